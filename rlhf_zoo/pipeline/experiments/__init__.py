"""Variants of a run: sweep, ablate, baseline, ensemble, rounds, any policy against any other."""
