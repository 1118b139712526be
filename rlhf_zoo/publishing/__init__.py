"""Turns a run directory into repositories on a Hub (cards, plots, outbox, sender), and lists them (catalog).

It neither trains nor samples.
"""
