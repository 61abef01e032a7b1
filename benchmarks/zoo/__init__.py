"""What the benchmarks train: models, data, tasks, and problems with a known answer."""
