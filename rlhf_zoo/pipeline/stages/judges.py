"""The judges of the eval stage: trains `same-labels`, and checks judges on labeled pairs."""

import logging
from collections.abc import Collection
from dataclasses import replace

from datasets import Dataset

from ...errors import ZooError
from ...evaluation.evidence import JudgeReliability
from ...evaluation.judges.check import JudgeCheck
from ...evaluation.judges.named import JUDGES_TRAINED_ON_LABELS
from ...evaluation.judges.pair_checks import check_panel, relabel_by_majority
from ...evaluation.judges.panel import is_answer_checker
from ...evaluation.measure import Evaluator
from ...plugins import PREFERENCES, load_object
from ...runs.context import RunContext
from ...runs.judge import evaluation_settings, judge_run, shares_reward_labels
from ...runs.lock import sole_writer
from ...runs.settings.judge_names import SAME_LABELS
from . import reward
from .pairs import held_out_pairs, open_pairs
from .samples import are_simulated

log = logging.getLogger(__name__)


def train_same_labels(context: RunContext) -> None:
    """Trains the judge `same-labels`, unless the run already has one with the reward model's settings.

    Args:
        context: The run.

    Raises:
        ZooError: The run has no finished reward model.
    """
    judge_context, reward_document = judge_run(context), context.record("reward").read()
    if reward_document.get("status") != "finished":
        raise ZooError(
            f"The judge {SAME_LABELS} needs the reward model of this run, but {context.record('reward').path} has no "
            "finished one: train it there, or name another judge."
        )
    judge_fingerprint = judge_context.record("reward").read().get("fingerprint", reward_document["fingerprint"])
    with sole_writer(judge_context.directory, command=context.command):
        reward.run(replace(judge_context, restart=judge_fingerprint != reward_document["fingerprint"]))


def check_on_pairs(context: RunContext, evaluator: Evaluator, own_pairs: Dataset | None) -> dict[str, JudgeCheck]:
    """Checks each judge on the reward model's held-out pairs, and on pairs of the policies' own outputs.

    Args:
        context: The run.
        evaluator: The judges and the rewards.
        own_pairs: Labeled pairs of the policies' own outputs; None if the recipe has none.

    Returns:
        Name of the judge -> its check.
    """
    reward_models = evaluator.rewards.model_rewards if evaluator.rewards is not None else []
    same_label_judges = [
        JUDGES_TRAINED_ON_LABELS[name]
        for name in evaluation_settings(context).judge_names
        if shares_reward_labels(context, name)
    ]
    if context.round is not None:  # the judge that labeled the round's pairs shares the reward model's labels
        same_label_judges += [
            judge.name for name, judge in evaluator.panel.by_recipe_name.items() if name == context.round.labeler
        ]
    return check_panel(
        evaluator.panel,
        _labeled_pairs(context),
        own_pairs=own_pairs,
        seed=context.shared.seed,
        reward=reward_models[0] if len(reward_models) == 1 else None,
        same_label_judges=same_label_judges,
        group=evaluation_settings(context).group,
    )


def _labeled_pairs(context: RunContext) -> Dataset | None:
    """Returns the reward model's held-out pairs, with noiseless labels if they are simulated; None without pairs."""
    if "reward" not in context.recipe.stages:
        return None
    try:
        pairs_context, source = open_pairs(context)
        held_out = held_out_pairs(pairs_context, source)
    except ZooError as error:
        log.info("The judges cannot be checked on labeled pairs: %s", error)
        return None
    if held_out is None:
        return None
    (pairs, _), data_keys = held_out, pairs_context.settings("reward").data
    if not are_simulated(pairs_context, data_keys):
        return pairs
    prefer = load_object(data_keys.preference, group=PREFERENCES)
    return relabel_by_majority(pairs, prefer, seed=context.shared.seed)


def judge_reliability(evaluator: Evaluator, reward_judges: Collection[str], check: JudgeCheck) -> JudgeReliability:
    """Describes how reliable the headline judge is.

    Args:
        evaluator: The judges; the headline judge is `evaluator.judge`.
        reward_judges: Names of judges that are also PPO's rewards.
        check: The check of the headline judge on labeled pairs.
    """
    return JudgeReliability(
        name=evaluator.judge.name,
        is_reward=evaluator.judge.name in reward_judges,
        verifiable=is_answer_checker(evaluator.judge),
    ).with_check(check)
