"""Parts shared by the cards of all stages."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fileio import is_finite
from .data import DataPart
from .facts import StageFacts

TEMPLATES = Path(__file__).parent / "templates"
# Rows of the tables of held-out figures: key in evaluation.json -> label. PPO's template writes these three itself.
HEADLINE = {
    "reward": "reward (the proxy that PPO maximizes)",
    "kl": "KL to SFT, nats per completion",
    "length": "length, tokens",
}
FIGURES = {
    **HEADLINE,
    "judge": "judge",
    "eos_rate": "ended with EOS, share",
    "distinct_2": "distinct-2",
    "repetition": "repetition",
}
# Figures that only some evaluations measure; without a measurement they have no row.
_OPTIONAL_FIGURES = {
    "exact_kl": "exact KL to SFT, nats per completion",
    "distinct_1": "distinct-1",
    "sft_perplexity": "perplexity under the SFT policy, per token",
}
_MAX_FIRST, _MAX_WORST = 4, 3  # maximum samples under a heading

#: A metric of the model index: type, value, name.
Metric = tuple[str, Any, str]
#: Draws a plot: draw(file name, alternative text, function of `plots`, *arguments, **options of that function).
Draw = Callable[..., None]


@dataclass(frozen=True)
class StageCard:
    """The parts of a stage's card that differ from stage to stage.

    Attributes:
        template: The README's template, which extends base.md.jinja.
        columns: Columns of the checkpoint table after the step: heading -> metric. Columns without values are left
            out.
        required_column: The heading of the column that is shown even without values.
        json_columns: The metrics of a checkpoint in rlhf_card.json: name -> metric.
        model_index_metrics: Yields (data, metrics measured on it) for the model index.
        draw: Draws the plots.
        variables: Returns the template's variables that other stages do not have.
        unmeasured: Returns the figures that a reader might expect but that were not measured. On the card of a step it
            leaves out the figures that `evaluated_step_figures` names.
        evaluated_step_figures: A phrase for what only the card of the evaluated checkpoint has. The cards of other
            steps put it into a sentence.
    """

    template: Path
    columns: Mapping[str, str]
    required_column: str
    json_columns: Mapping[str, str]
    model_index_metrics: Callable[[StageFacts], Iterator[tuple[DataPart, list[Metric]]]]
    draw: Callable[[StageFacts, Draw], None]
    variables: Callable[[StageFacts], Mapping[str, Any]]
    unmeasured: Callable[[StageFacts], list[str]]
    evaluated_step_figures: str


def policy_figures(facts: StageFacts) -> dict[str, str]:
    """Returns the rows of a policy's table of held-out figures: key in evaluation.json -> label.

    Args:
        facts: The facts of the stage.
    """
    return FIGURES | {key: name for key, name in _OPTIONAL_FIGURES.items() if facts.estimate("ppo", key)}


def unmeasured_figures(facts: StageFacts, *excluded: str) -> list[str]:
    """Returns the labels of the held-out figures that were not measured.

    Args:
        facts: The facts of the stage.
        *excluded: Keys to leave out.
    """
    return [name for key, name in FIGURES.items() if facts.estimate(facts.stage, key) is None and key not in excluded]


def selected_samples(facts: StageFacts, side: str) -> dict[str, list[dict[str, Any]]]:
    """Selects samples to show: those of the first prompts, the worst ones and, for PPO, those farthest from SFT.

    The worst samples have the lowest rating by the judge, or the lowest reward if there is no judge.

    Args:
        facts: The facts of the stage.
        side: "sft" or "ppo".

    Returns:
        Heading -> samples.
    """
    rows = [row for row in facts.samples if isinstance(row.get(side), Mapping)]
    first_rows: dict[str, dict[str, Any]] = {}
    for row in rows:
        first_rows.setdefault(row["prompt"], row)
    samples_by_heading = {"The first held-out prompts": list(first_rows.values())[:_MAX_FIRST]}
    key = "judge" if any(is_finite(row[side].get("judge")) for row in rows) else "reward"
    worst = sorted((row for row in rows if is_finite(row[side].get(key))), key=lambda row: row[side][key])
    samples_by_heading[f"The worst of all {len(rows)}, by the {key}"] = worst[:_MAX_WORST]
    if side == "ppo":
        farthest = sorted((row for row in rows if is_finite(row[side].get("kl"))), key=lambda row: -row[side]["kl"])
        samples_by_heading["The farthest from the SFT policy, by log-ratio"] = farthest[:_MAX_WORST]
    return {heading: samples for heading, samples in samples_by_heading.items() if samples}


def perplexity(loss: Any) -> float | None:
    """Returns the perplexity, exp(loss); None if the loss was not measured or is at least 100.

    Args:
        loss: Nats per token.
    """
    return math.exp(loss) if is_finite(loss) and loss < 100 else None
