"""Tests of checkpoints: what is on disk, what is refused, and what a run goes on with."""
