"""Tests of the benchmarks: their arithmetic, their result files and a short run of each."""
