"""The card of a reward model."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...fileio import is_finite
from .. import plots, reward_plots
from .data import DataPart, measured_on
from .estimates import estimate_at
from .facts import StageFacts
from .markdown import Raw, number
from .parts import TEMPLATES, Draw, Metric, StageCard
from .summary import bold
from .watch_out import MIN_LENGTH_CORRELATION


def _model_index_metrics(facts: StageFacts) -> Iterator[tuple[DataPart, list[Metric]]]:
    report = facts.reward_report
    yield measured_on(facts), [
        ("accuracy", (facts.accuracy or {}).get("value"), "accuracy on held-out pairs"),
        ("loss", (estimate_at(report, "loss") or {}).get("value"), "loss on held-out pairs, nats per pair"),
        ("ece", (report.get("calibration") or {}).get("ece"), "expected calibration error"),
    ]  # fmt: skip


def _draw(facts: StageFacts, draw: Draw) -> None:
    report, rows = facts.reward_report, facts.metrics
    draw("margins", "Histogram of margins on held-out pairs", reward_plots.plot_margins, report)
    draw("calibration", "Calibration on held-out pairs", reward_plots.plot_reliability, report)
    draw("length", "Score against length on held-out pairs", reward_plots.plot_score_by_length, report)
    curves = {"loss": "training", "eval_loss": "validation"}
    options: dict[str, object] = {"title": "Loss", "unit": "nats per pair", "mark": facts.plot_marker_step}
    draw("loss", "Loss against the step", plots.plot_curves, rows, curves, **options)
    curves = {"accuracy": "training batches", "eval_accuracy": "validation"}
    options |= {"title": "Pair accuracy", "unit": "share of pairs"}
    draw("accuracy", "Pair accuracy against the step", plots.plot_curves, rows, curves, **options)


def _variables(facts: StageFacts) -> dict[str, Any]:
    hard_pair_rows = list(_hard_pair_rows(facts.reward_report.get("hard") or {}))
    return {
        "report": facts.reward_report,
        "pairs": measured_on(facts),
        "hard_pair_rows": hard_pair_rows,
        "has_gold": any(row.get("gold") is not None for _, row in hard_pair_rows),
        "training_overlap": Raw(_training_overlap(facts.reward_report.get("trained_on"))),
        "watch_out": list(_watch_out(facts)),
        "accuracy": bold(facts.accuracy),
        "length_effect": _length_effect(facts),
    }


def _length_effect(facts: StageFacts) -> str:
    """Returns a sentence on what the correlation of the score with length means for PPO."""
    correlation = (estimate_at(facts.reward_report, "length", "spearman") or {"value": 0.0})["value"]
    if abs(correlation) < MIN_LENGTH_CORRELATION:
        return "Length hardly matters."
    return f"PPO on this reward will probably write {'longer' if correlation > 0 else 'shorter'} texts."


def _watch_out(facts: StageFacts) -> Iterator[Raw]:
    yield Raw(
        "**It is a proxy** for texts like those in its pairs. PPO finds texts that it overrates: use a judge as well."
    )
    yield Raw("**Only differences between scores count**, not their values.")
    longer_wins, accuracy = estimate_at(facts.reward_report, "length", "longer_wins"), facts.accuracy
    if longer_wins and accuracy and longer_wins["value"] >= accuracy["value"]:
        yield Raw("**“The longer text wins”** is a rule as good as this model, so PPO may only learn to write more.")
    ties = facts.reward_report.get("ties")
    if ties and ties["apart"]["value"] > ties["others"]["value"] / 2:
        yield Raw("**It scores tied texts apart**, by over half the usual difference: PPO may be rewarded for nothing.")


def _training_overlap(counts: Any) -> str:
    """Returns a clause on whether the model trained on the held-out pairs; "" if nothing was counted."""
    prompts, pairs = (counts.get(name) if isinstance(counts, Mapping) else None for name in ("prompts", "pairs"))
    if not is_finite(pairs):
        return ""
    if pairs or prompts:
        and_prompts = f" and on {number(prompts)} of their prompts" if is_finite(prompts) else ""
        return f"**of which it trained on {number(pairs)}{and_prompts} as well**"
    return "which it never trained on" + (", nor on their prompts" if is_finite(prompts) else "")


def _hard_pair_rows(hard_pairs: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (description of pairs, accuracy on them): quarters of the pairs by difficulty, then groups by length."""
    for key, description in (("by_overlap", "words in common"), ("by_strength", "difference in utility")):
        for row in hard_pairs.get(key) or ():
            yield f"{description}: {number(row['low'])} to {number(row['high'])}", row
    for key, description in (
        ("same_length", "lengths within 10% of each other"),
        ("chosen_longer", "the chosen text is longer"),
        ("chosen_shorter", "the chosen text is shorter"),
    ):
        if row := hard_pairs.get(key):
            yield description, row


def _unmeasured(facts: StageFacts) -> list[str]:
    report = facts.reward_report
    measurements: dict[str, Any] = {"mean and standard deviation of its score over SFT samples": facts.score_statistics}
    if facts.step is None:
        measurements |= {
            "accuracy on held-out pairs": facts.accuracy is not None,
            "best of 4": report.get("best_of_n"),
            "ties": report.get("ties"),
            "calibration": report.get("calibration"),
            "correlation of its score with length": report.get("length"),
        }
    never_measured = ["agreement with people beyond its pairs", "accuracy on PPO's completions", "other seeds"]
    return [*(description for description, measured in measurements.items() if not measured), *never_measured]


CARD = StageCard(
    template=TEMPLATES / "reward.md.jinja",
    columns={
        "loss": "loss",
        "accuracy on its batches": "accuracy",
        "validation loss": "eval_loss",
        "validation accuracy": "eval_accuracy",
    },
    required_column="loss",
    json_columns={"loss": "loss", "eval_loss": "eval_loss", "eval_accuracy": "eval_accuracy"},
    model_index_metrics=_model_index_metrics,
    draw=_draw,
    variables=_variables,
    unmeasured=_unmeasured,
    evaluated_step_figures="accuracy on held-out pairs, ties, calibration and the correlation of its score with length",
)
