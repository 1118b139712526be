"""Experiments on a run: sweeps, ablations, baselines, ensembles of reward models, and further rounds."""
