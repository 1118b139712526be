"""The parts of benchmarks/evidence.py: the experiments, the figures kept from them, and their tables and plots."""
