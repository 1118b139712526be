"""Reads what a namespace has published from its cards: index, lineage, family trees, ablations."""
