"""The generated blocks of the docs: tables made from docs/evidence and benchmarks/results."""

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

#: Part of an experiment -> the function that makes its table.
PART_TABLES = {
    "runs": runs_table, "ablation": ablation_table, "ensemble": ensemble_table, "baselines": baselines_table,
}  # fmt: skip
#: The name of a block -> the function that makes its Markdown.
TABLES: dict[str, Callable[[], str]] = {
    **{
        experiment.name(part): partial(make_table, experiment)
        for part, make_table in PART_TABLES.items()
        for experiment in EXPERIMENTS
        if part in experiment.parts
    },
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
    "speed": lambda: report.page(report.newest_report()),
    "speed-aims": lambda: report.aims_table(report.newest_report()),
    "speed-keys": lambda: report.key_table(report.newest_report()),
    "speed-phases": lambda: report.phase_table(report.newest_report()),
    "speed-profile": lambda: report.profile_page(report.newest_report("profiles")),
}


def render_blocks(text: str) -> str:
    """Returns a document with new blocks between `<!-- evidence:NAME -->` and `<!-- /evidence -->`."""
    before, *parts = text.split("<!-- evidence:")
    result = [before]
    for part in parts:
        name, _, block = part.partition(" -->")
        _, _, after = block.partition("<!-- /evidence -->")
        result.append(f"{name} -->\n{TABLES[name]()}\n<!-- /evidence -->{after}")
    return "<!-- evidence:".join(result)
