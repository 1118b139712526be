"""The tiny world: a simulated world of product remarks, with a gold utility that is known exactly.

Nothing here was written or rated by buyers. A seeded generator writes what owners say of their products, and a written
rule, `utility`, says what each remark is worth. So a run can compare a learned reward model, the proxy, with the truth
it stands for. Everything of worth depends on the product, so that no single sentence scores well everywhere.
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
