"""How good a policy is: samples, judges, probes, statistics, verdict, votes.

Formulas stand in modules that import no model; nothing here writes cards.
"""
