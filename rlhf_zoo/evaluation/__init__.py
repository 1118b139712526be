"""How good a policy is: samples, judges, probes, statistics, verdict, votes.

Modules with formulas import no model. Nothing here writes cards.
"""
