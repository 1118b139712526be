"""The parts of benchmarks/evidence.py: what is run, what is kept of it, and the tables and plots made from that."""
