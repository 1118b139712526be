"""The sides of benchmarks/bench.py, each a process: this trainer, TRL 1.12.0's and a floor; and their tables."""
