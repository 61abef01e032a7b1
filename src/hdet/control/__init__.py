"""From the scores of a cycle to moves, rollbacks and exclusions. Plain Python, no torch."""
