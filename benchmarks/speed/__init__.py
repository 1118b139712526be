"""The sides of benchmarks/bench.py: this trainer, TRL 1.12.0's and a floor, each a process; and their table."""
