"""Turns a run directory into repositories on a Hub: cards, plots, outbox, sender, catalog.

It neither trains nor samples.
"""
