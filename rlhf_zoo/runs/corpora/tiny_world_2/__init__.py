"""The tiny world: a simulated world of product remarks, with an exactly known gold utility.

No buyer wrote or rated anything here. A seeded generator writes what owners say about their products, and a rule,
`utility`, scores each remark. A run can therefore compare its reward model, the proxy, with the true utility. The
utility of a remark depends on the product, so no single sentence scores well for all products.
"""

from .facts import FACTS
from .lines import generate_line, prepare
from .utility import PARTS, TEMPERATURE, explain, gold, judge, preference, utility

__all__ = [
    "FACTS",
    "PARTS",
    "TEMPERATURE",
    "explain",
    "generate_line",
    "gold",
    "judge",
    "preference",
    "prepare",
    "utility",
]
