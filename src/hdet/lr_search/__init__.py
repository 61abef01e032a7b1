"""Which learning rates to try, and what to conclude. Plain Python, no torch."""
