"""The card of an SFT policy."""

from collections.abc import Iterator, Mapping
from typing import Any

from .. import plots
from .data import DataPart, evaluated_on, validated_on
from .facts import StageFacts
from .markdown import Raw, short
from .parts import (
    FIGURES,
    TEMPLATES,
    Draw,
    Metric,
    StageCard,
    perplexity,
    policy_figures,
    selected_samples,
    unmeasured_figures,
)
from .summary import examples


def _model_index_metrics(facts: StageFacts) -> Iterator[tuple[DataPart, list[Metric]]]:
    if facts.step_of_latest("eval_loss") == facts.described_step:
        loss = facts.latest_metrics.get("eval_loss")
        yield validated_on(facts), [
            ("loss", loss, "loss, nats per token"),
            ("perplexity", perplexity(loss), "perplexity, per token"),
        ]  # fmt: skip
    values = {key: (facts.estimate("sft", key) or {}).get("value") for key in FIGURES}
    yield evaluated_on(facts), [(key, values[key], name) for key, name in FIGURES.items() if key != "kl"]


def _draw(facts: StageFacts, draw: Draw) -> None:
    curves = {"loss": "training", "eval_loss": "validation"}
    options = {"title": "Loss", "unit": "nats per token", "mark": facts.plot_marker_step}
    draw("loss", "Loss against the step", plots.plot_curves, facts.metrics, curves, **options)


def _variables(facts: StageFacts) -> Mapping[str, Any]:
    return {
        "figures": policy_figures(facts),
        "perplexity": perplexity(facts.latest_metrics.get("eval_loss")),
        "selected_samples": selected_samples(facts, "sft"),
        "watch_out": list(_watch_out(facts)),
        "examples": examples(facts, "sft"),
    }


def _watch_out(facts: StageFacts) -> Iterator[Raw]:
    yield Raw("**It imitates its data**, with their errors and opinions.")
    counts = facts.run.get("cut_rows") or {}
    if counts.get("cut"):
        share = f"{short(counts['cut'])} of the {short(counts['rows'])} training rows"
        yield Raw(f"**Cut texts.** `max_length` truncated {share}.")


def _unmeasured(facts: StageFacts) -> list[str]:
    has_perplexity = perplexity(facts.latest_metrics.get("eval_loss")) is not None
    never_measured = ["human preferences", "other seeds", "safety, bias and truthfulness"]
    figures = unmeasured_figures(facts, "kl") if facts.step is None else []
    return [*figures, *([] if has_perplexity else ["perplexity on validation text"]), *never_measured]


CARD = StageCard(
    template=TEMPLATES / "sft.md.jinja",
    columns={"loss": "loss", "validation loss": "eval_loss"},
    required_column="validation loss",
    json_columns={"loss": "loss", "eval_loss": "eval_loss"},
    model_index_metrics=_model_index_metrics,
    draw=_draw,
    variables=_variables,
    unmeasured=_unmeasured,
    evaluated_step_figures="reward, judge, length and variety on held-out prompts, and samples",
)
