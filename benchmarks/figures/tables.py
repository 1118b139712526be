"""The blocks of the docs that are written from what is kept in docs/evidence, and from nothing else."""

from collections.abc import Callable
from functools import partial

from speed import report

from .ensemble_table import ensemble_table
from .experiments import EXPERIMENTS, FOUR_DIGITS, GOLD, PLAN, RATES, REMARK_JUDGES, SETTINGS, SUMS, TWINS, Experiment
from .frontier_tables import baselines_table
from .gain_table import gain_table
from .gold_table import gold_table
from .length_table import length_table
from .paid_table import paid_table
from .pairs import pairs_table, parts_table
from .plan_table import plan_table
from .rates_table import rates_table
from .remark_table import remark_table
from .run_tables import ablation_table, by_beta, kept, runs_table
from .setting_table import setting_table
from .several_table import rounds_table, sweep_table
from .sums_table import seeds_table, sums_table, twins_table


def _parts(experiment: Experiment) -> str:
    return parts_table(kept(experiment, "runs"), by_beta(kept(experiment, "ablation")).get(0.0, []))


#: The name of a block -> its Markdown.
TABLES: dict[str, Callable[[], str]] = {
    **{one.name("runs"): partial(runs_table, one) for one in EXPERIMENTS},
    **{one.name("ablation"): partial(ablation_table, one) for one in EXPERIMENTS if "ablation" in one.parts},
    **{one.name("ensemble"): partial(ensemble_table, one) for one in EXPERIMENTS if "ensemble" in one.parts},
    **{one.name("ensemble-reward"): partial(paid_table, one) for one in EXPERIMENTS if one.gold},
    **{one.name("baselines"): partial(baselines_table, one) for one in EXPERIMENTS if "baselines" in one.parts},
    **{f"{one.recipe}-gain": partial(gain_table, one) for one in EXPERIMENTS if one.gold},
    **{f"{one.recipe}-pairs": lambda one=one: pairs_table(kept(one, "runs")) for one in EXPERIMENTS if one.gold},
    **{f"{one.recipe}-sweep": partial(sweep_table, one) for one in EXPERIMENTS if one.gold},
    **{f"{one.recipe}-rounds": partial(rounds_table, one) for one in EXPERIMENTS if one.gold},
    **{f"{one.recipe}-parts": partial(_parts, one) for one in EXPERIMENTS if one.gold},
    RATES: rates_table,
    GOLD: gold_table,
    REMARK_JUDGES: remark_table,
    SUMS: sums_table,
    f"{SUMS}-seeds": partial(seeds_table, SUMS),
    FOUR_DIGITS: partial(seeds_table, FOUR_DIGITS),
    TWINS: twins_table,
    "arguments-length": partial(length_table, next(one for one in EXPERIMENTS if one.recipe == "arguments")),
    **{part: partial(setting_table, part, [one for one in EXPERIMENTS if part in one.parts]) for part in SETTINGS},
    PLAN: plan_table,
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
