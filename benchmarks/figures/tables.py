"""The blocks of the docs that are written from what is kept in docs/evidence, and from nothing else."""

from collections.abc import Callable
from functools import partial

from speed import report

from .ensemble_table import ensemble_table
from .experiments import EXPERIMENTS, OUTSIDE, PLAN, REAL_TEXT, REVIEWS, SUMS
from .frontier_tables import baselines_table
from .instructions_table import page as instructions_page
from .instructions_table import short_pair, short_table
from .ledger_table import ledger_table
from .outside_table import outside_table
from .plan_table import plan_table
from .real_text_table import hacked_table, honest_table
from .reviews_table import reviews_table
from .run_tables import ablation_table, runs_table
from .sums_table import seeds_table, sums_table

#: The name of a block -> its Markdown.
TABLES: dict[str, Callable[[], str]] = {
    **{one.name("runs"): partial(runs_table, one) for one in EXPERIMENTS},
    **{one.name("ablation"): partial(ablation_table, one) for one in EXPERIMENTS if "ablation" in one.parts},
    **{one.name("ensemble"): partial(ensemble_table, one) for one in EXPERIMENTS if "ensemble" in one.parts},
    **{one.name("baselines"): partial(baselines_table, one) for one in EXPERIMENTS if "baselines" in one.parts},
    SUMS: sums_table,
    f"{SUMS}-seeds": seeds_table,
    PLAN: plan_table,
    "ledger": ledger_table,
    REAL_TEXT: honest_table,
    f"{REAL_TEXT}-hackers": hacked_table,
    OUTSIDE: outside_table,
    REVIEWS: reviews_table,
    "smollm2-ifeval": instructions_page,
    "smollm2-ifeval-short": short_table,
    "smollm2-ifeval-pair": short_pair,
    "speed": lambda: report.page(report.newest()),
    "speed-aims": lambda: report.aims_table(report.newest()),
    "speed-keys": lambda: report.key_table(report.newest()),
    "speed-phases": lambda: report.phase_table(report.newest()),
    "speed-profile": lambda: report.profile_page(report.newest("profiles")),
}


def rendered(text: str) -> str:
    """A document with every block between `<!-- evidence:NAME -->` and `<!-- /evidence -->` written anew."""
    parts = text.split("<!-- evidence:")
    out = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition(" -->")
        _, _, after = rest.partition("<!-- /evidence -->")
        out.append(f"{name} -->\n{TABLES[name]()}\n<!-- /evidence -->{after}")
    return "<!-- evidence:".join(out)
