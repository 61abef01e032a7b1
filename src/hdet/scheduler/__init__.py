"""The torch LRScheduler, and the life of one run."""
