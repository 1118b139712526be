"""Describes changes that may be signs of reward hacking, without a verdict."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...fileio import is_finite
from .facts import StageFacts
from .markdown import number

_DISAGREEMENT = "rewards/disagreement"
_ENSEMBLE_METRIC = re.compile(rf"{_DISAGREEMENT}|rewards/reward_model_\d+")


def signs(facts: StageFacts) -> list[str]:
    """Returns sentences on what PPO changed, on held-out prompts or, without an evaluation, on the training rollouts.

    Args:
        facts: The facts of the stage.
    """
    return list(_held_out_signs(facts) if facts.estimate("ppo", "reward") else _rollout_signs(facts))


def _held_out_signs(facts: StageFacts) -> Iterator[str]:
    def before_and_after(*path: str) -> tuple[float, float] | None:
        before, after = (facts.estimate(side, *path) for side in ("sft", "ppo"))
        return (before["value"], after["value"]) if before and after else None

    reward, judge = before_and_after("reward"), before_and_after("judge")
    name = (facts.evaluation.get("judge") or {}).get("name", "the judge")
    if reward and judge:
        agreement = "both rose" if reward[1] > reward[0] and judge[1] > judge[0] else "they did not both rise"
        yield f"Reward {_change(*reward)}, judge ({name}) {_change(*judge)}: {agreement}."
    for other in facts.evaluation.get("judges") or {}:
        before, after = (facts.estimate("judges", other, side) for side in ("sft", "ppo"))
        if other != name and before and after:
            yield f"Second judge ({other}) {_change(before['value'], after['value'])}."
    if counts := _disagreements(facts.samples):
        yield (
            f"In {counts[0]} of {counts[1]} comparisons on the same prompt and sample, PPO's completion has the higher "
            "reward and the lower judge score."
        )
    if change := before_and_after("distinct_2"):
        ratio = _ratio(*change, f"{facts.initial_policy}'s")
        yield f"Distinct-2 {_change(*change)}{ratio}. Below 1, completions are more alike."
    if change := before_and_after("repetition"):
        yield f"Repetition within a completion {_change(*change)}."
    if change := before_and_after("length"):
        ratio = _ratio(*change, f"{facts.initial_policy}'s")
        yield f"Length {_change(*change)} tokens{ratio}."
    if change := before_and_after("eos_rate"):
        yield f"Share that ended with EOS {_change(*change)}."


def _rollout_signs(facts: StageFacts) -> Iterator[str]:
    for key, description, has_ratio in (
        ("objective/score", "reward", False),
        ("completions/length", "length in tokens", True),
        ("objective/entropy", "entropy in nats per token", True),
        ("completions/eos_rate", "share that ended with EOS", False),
    ):
        first, latest = facts.first_value(key), facts.latest_metrics.get(key)
        if is_finite(first) and is_finite(latest):
            change = _change(first, latest) + (_ratio(first, latest, "the first") if has_ratio else "")
            yield f"From the first rollout to step {facts.step_of_latest(key)}: {description} {change}."


def reward_parts(facts: StageFacts) -> list[dict[str, Any]]:
    """Returns the parts of the reward as logged on the rollouts; [] if there is only one.

    The models of an ensemble and their disagreement come last, with a description in place of a weight.

    Args:
        facts: The facts of the stage.

    Returns:
        [{name, weight, first, latest}], with the values of the first and the latest rollouts.
    """
    names = list(dict.fromkeys(key for row in facts.metrics for key in row if key.startswith("rewards/")))
    if len(names) < 2:
        return []
    ensemble = [name for name in names if _ENSEMBLE_METRIC.fullmatch(name)]
    reward_count = len(names) - len(ensemble)
    weights = facts.setting("reward_weights") or [1] * reward_count
    if len(weights) != reward_count:
        weights = [None] * reward_count
    descriptions = ["watched" if name == _DISAGREEMENT else "in the ensemble score" for name in ensemble]
    parts = zip([*(name for name in names if name not in ensemble), *ensemble], [*weights, *descriptions], strict=True)
    return [
        {
            "name": name.partition("/")[2],
            "weight": weight,
            "first": facts.first_value(name),
            "latest": facts.latest_metrics.get(name),
        }
        for name, weight in parts
    ]


def watched_metrics(facts: StageFacts) -> list[str]:
    """Returns the names of the training metrics of rewards whose weight is 0, such as rewards/length.

    Args:
        facts: The facts of the stage.
    """
    return [f"rewards/{part['name']}" for part in reward_parts(facts) if part["weight"] == 0]


def _disagreements(samples: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Returns (comparisons that PPO wins by reward and loses by judge, all comparisons); None without comparisons."""
    disagrees = []  # for each comparison
    for row in samples:
        sft, ppo = row.get("sft"), row.get("ppo")
        if isinstance(sft, Mapping) and isinstance(ppo, Mapping):
            values: list[Any] = [side.get(key) for key in ("reward", "judge") for side in (sft, ppo)]
            if all(map(is_finite, values)):
                sft_reward, ppo_reward, sft_judge, ppo_judge = values
                disagrees.append(ppo_reward > sft_reward and ppo_judge < sft_judge)
    return (sum(disagrees), len(disagrees)) if disagrees else None


def _change(before: float, after: float) -> str:
    return f"{number(before)} → {number(after)}"


def _ratio(before: float, after: float, base: str) -> str:
    return f": {number(after / before)} times {base}" if before > 0 else ""
