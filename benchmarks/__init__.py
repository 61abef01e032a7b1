"""Benchmarks: each file answers one question, and leaves its numbers in results/."""
