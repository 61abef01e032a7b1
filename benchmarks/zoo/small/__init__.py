"""Small training tasks, 3 to 6 seconds a run on one core."""
