"""The generated blocks of the docs: tables made from docs/evidence and benchmarks/results."""

from collections.abc import Callable
from functools import partial

from speed import report

from .experiments import EXPERIMENTS, REVIEWS
from .instructions_table import page as instructions_page
from .instructions_table import short_pair, short_table
from .reviews_table import reviews_table
from .run_tables import runs_table

#: The name of a block -> the function that makes its Markdown.
TABLES: dict[str, Callable[[], str]] = {
    **{experiment.recipe: partial(runs_table, experiment) for experiment in EXPERIMENTS},
    REVIEWS: reviews_table,
    "smollm2-ifeval": instructions_page,
    "smollm2-ifeval-short": short_table,
    "smollm2-ifeval-pair": short_pair,
    "speed": lambda: report.page(report.newest_report()),
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
