"""A run directory becomes repositories on a Hub: cards, plots, outbox, sender, catalog.

It trains nothing and samples nothing."""
