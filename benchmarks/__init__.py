"""Benchmarks: each script answers one question and writes one file into results/."""
