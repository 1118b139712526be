"""What the cards of all stages are made of: the form of a stage's card, and the words that several share."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fileio import finite
from .data import DataPart
from .facts import Facts
from .markdown import Raw
from .report import judge_notes

TEMPLATES = Path(__file__).parent / "templates"
# Rows of the tables of held-out figures: key in evaluation.json, how it reads. The first three are the headline's.
HEADLINE = {
    "reward": "reward (the proxy that PPO maximises)",
    "kl": "KL to SFT, nats per completion",
    "length": "length, tokens",
}
FIGURES = {
    **HEADLINE,
    "judge": "judge",
    "eos_rate": "ended by EOS, share",
    "distinct_2": "distinct-2",
    "repetition": "repetition",
}
# Figures that evaluations have since they were added: in the table where they were measured.
_NEWER = {
    "exact_kl": "exact KL to SFT, nats per completion",
    "distinct_1": "distinct-1",
    "sft_perplexity": "perplexity under the SFT policy, per token",
}
_SAMPLES_SHOWN = 4
_WORST_SHOWN = 3

Metric = tuple[str, Any, str]
"""Of the model index: type, value, name."""
Draw = Callable[..., None]
"""draw(name of the file, alternative text, function of `plots`, its arguments)."""


@dataclass(frozen=True)
class StageCard:
    """What the card of a stage has that those of others have not.

    template: of the README, which extends base.md.jinja. columns: of the checkpoint table after the step: heading ->
    metric of the row at that step; one that no checkpoint has is left out, but for `always`. json_columns: the same in
    rlhf_card.json. measured: (data, metrics) for the model index, of what was measured on data held out here. draw: the
    plots. words: what the template needs besides. unmeasured: what a reader might look for on the card and will not
    find.
    """

    template: Path
    columns: Mapping[str, str]
    always: str
    json_columns: Mapping[str, str]
    measured: Callable[[Facts], Iterator[tuple[DataPart, list[Metric]]]]
    draw: Callable[[Facts, Draw], None]
    words: Callable[[Facts], Mapping[str, Any]]
    unmeasured: Callable[[Facts], list[str]]


def policy_figures(facts: Facts) -> dict[str, str]:
    """The figures of a policy's table: key in evaluation.json -> how it reads."""
    return FIGURES | {key: name for key, name in _NEWER.items() if facts.figure("ppo", key)}


def unmeasured_figures(facts: Facts, *but: str) -> list[str]:
    return [name for key, name in FIGURES.items() if facts.figure(facts.stage, key) is None and key not in but]


def picks(facts: Facts, side: str) -> dict[str, list[dict[str, Any]]]:
    """Samples of a side by heading: the first prompts, the worst by the judge, and of PPO those farthest from SFT."""
    rows = [row for row in facts.samples if isinstance(row.get(side), Mapping)]
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["prompt"], row)
    found = {"The first held-out prompts": list(first.values())[:_SAMPLES_SHOWN]}
    key = "judge" if any(finite(row[side].get("judge")) for row in rows) else "reward"
    worst = sorted((row for row in rows if finite(row[side].get(key))), key=lambda row: row[side][key])
    found[f"The worst of all {len(rows)}, by the {key}"] = worst[:_WORST_SHOWN]
    if side == "ppo":
        far = sorted((row for row in rows if finite(row[side].get("kl"))), key=lambda row: -row[side]["kl"])
        found["The farthest from the SFT policy, by log-ratio"] = far[:_WORST_SHOWN]
    return {heading: chosen for heading, chosen in found.items() if chosen}


def notes_on_judge(judge: Mapping[str, Any]) -> Raw:
    """What is to be known of a judge. That it is the reward itself, the template says of the main one."""
    return judge_notes({key: value for key, value in judge.items() if key != "is_training_reward"})


def perplexity(loss: Any) -> float | None:
    return math.exp(loss) if finite(loss) and loss < 100 else None
