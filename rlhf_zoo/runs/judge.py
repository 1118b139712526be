"""Chooses the judge of an evaluation before any training, and prepares the run that trains the judge `same-labels`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ZooError
from ..hub.client.run_signature import TRUST_RUN_FLAG
from ..plugins import CORPORA, REWARDS, load_object
from ..rewards.verifiable import Verifiable
from .context import RunContext
from .data.layout import HELD_OUT_KEYS, STOP_KEYS, TRUNCATION_KEYS
from .record import first_difference
from .registry import is_ensemble_member
from .settings.evaluation import EvaluationConfig
from .settings.judge_names import SAME_LABELS
from .settings.key_classes import (
    GROUPS,
    STAGE_KEYS,
    Kind,
    check_key,
    check_repository,
    machine_keys,
    without_machine_keys,
)
from .settings.parse import NON_STAGE_KEYS, StageSettings
from .trusted_names import check_object

#: PPO's keys that determine which completions the reward stage samples. The run.json of the reward stage records them.
SAMPLING_KEYS = ("response_length", "temperature", *TRUNCATION_KEYS, *STOP_KEYS, *HELD_OUT_KEYS)


def evaluation_settings(context: RunContext) -> EvaluationConfig:
    """Returns the run's evaluation settings with the judge that `choose_judge` chooses.

    Args:
        context: The run.
    """
    return choose_judge(context.shared.evaluation, context.settings("ppo"))


def choose_judge(config: EvaluationConfig, ppo: StageSettings) -> EvaluationConfig:
    """Chooses the judge of an evaluation if its settings do not name one.

    Args:
        config: The evaluation settings.
        ppo: Settings of the PPO stage.

    Returns:
        The settings with a judge: the judge that they name, otherwise PPO's verifiable reward, otherwise `classifier`.

    Raises:
        ZooError: A reward function cannot be loaded.
    """
    if config.judge is not None:
        return config
    for name in ppo.data.reward_funcs or []:
        if isinstance(load_object(name, group=REWARDS), Verifiable):
            return replace(config, judge=f"rule:{name}")
    return replace(config, judge="classifier")


def shares_reward_labels(context: RunContext, name: str) -> bool:
    """Whether a judge learned from the same labelers as the run's reward model.

    Even if they labeled other texts, such a judge is not independent, because both models learn the labelers' mistakes.

    Args:
        context: The run.
        name: The judge, as the recipe names it.

    Returns:
        True for `same-labels`, and for a `classifier` that learns from the reward stage's data set, unless the pairs
        are simulated or the corpus sets `judge_has_other_labels`.
    """
    if name != "classifier" or "reward" not in context.recipe.stages:
        return name == SAME_LABELS
    reward_data = context.settings("reward").data
    labeled_data = evaluation_settings(context).labeled_arguments
    if reward_data.simulated_pairs is not None or reward_data.dataset_name != labeled_data.dataset_name:
        return False
    corpus = context.shared.corpus if labeled_data.dataset_name is None else None
    return corpus is None or not getattr(load_object(corpus, group=CORPORA), "judge_has_other_labels", False)


def judge_run(context: RunContext) -> RunContext:
    """Returns the run that trains the judge `same-labels`.

    The judge is a reward model with the keys of the run's own reward model, trained on the pairs reserved for the
    judge. If the run's reward model is finished, its recorded keys are used, including PPO's sampling keys.

    Args:
        context: The run.

    Returns:
        The run whose reward stage is the judge.

    Raises:
        ZooError: A flag contradicts a recorded key, or another user's run sets a key that it may not set.
    """
    run = with_trained_keys(context, "reward")
    document = context.record("reward").read()
    if document.get("status") == "finished" and "ppo" in document["resolved"] and "ppo" in run.recipe.stages:
        sampling = {key: value for key, value in document["resolved"]["ppo"].items() if key in SAMPLING_KEYS}
        ppo_keys = {**run.recipe.stages["ppo"], **sampling}
        flags = {name: {} if name == "ppo" else keys for name, keys in run.flags.items()}
        run = replace(run, recipe=replace(run.recipe, stages={**run.recipe.stages, "ppo": ppo_keys}), flags=flags)
    base = context.record("reward").path.parent
    run = replace(run, directory=base / "judge", base=base, own_stages=("reward",))
    return replace(run, trains_judge=True, publish=False, restart=False)


def with_trained_keys(context: RunContext, stage: str) -> RunContext:
    """Returns the run with the keys that a finished stage was trained with, whatever its recipe says now.

    If another user made the run or the recipe, the keys that concern the machine or an account come from this user's
    recipe and flags instead.

    Args:
        context: The run.
        stage: Name of the stage.

    Returns:
        The run; unchanged if the stage is not finished.

    Raises:
        ZooError: A flag contradicts a recorded key, or another user's run sets a key that it may not set.
    """
    document = context.record(stage).read()
    if document.get("status") != "finished":
        return context
    keys = {name: value for name, value in document["resolved"].items() if name not in NON_STAGE_KEYS}
    _check_keys(context, stage, keys)
    flags, recipe = context.flags.get(stage, {}), context.recipe
    machine_flags: dict[str, Any] = {}
    if recipe.download_mark is not None or not context.record(stage).is_own():
        recipe_keys = recipe.stages.get(stage, {})
        own_machine_keys = {name: recipe_keys[name] for name in machine_keys() if name in recipe_keys}
        keys = {**without_machine_keys(keys), **own_machine_keys}
        machine_flags = {name: flags[name] for name in machine_keys() if name in flags}
        flags = without_machine_keys(flags)
    if flags:
        new_keys = context.settings(stage).resolved
        key = first_difference({name: keys.get(name) for name in flags}, {name: new_keys.get(name) for name in flags})
        if key is not None:
            raise ZooError(
                f"{context.record(stage).path} was trained with a different {key} than this command sets: omit the "
                f"flag, or train the stage again with `{context.stage_command(stage, '--restart')}`."
            )
    recipe = replace(recipe, stages={**recipe.stages, stage: keys})
    return replace(context, recipe=recipe, flags={**context.flags, stage: machine_flags})


def _check_keys(context: RunContext, stage: str, keys: Mapping[str, Any]) -> None:
    """Raises ZooError if another user's run sets a key to a value that a download may not set.

    A value that the recipe or a flag of this command also sets passes.
    """
    record = context.record(stage)
    if record.is_own():
        return
    own_keys = {**context.recipe.stages.get(stage, {}), **context.flags.get(stage, {})}
    where = f"{record.run_file}, which was not written by your rlhf-zoo, or was changed since,"
    for key, value in keys.items():
        if value is None or value == own_keys.get(key):
            continue
        check_key(key, value, STAGE_KEYS, where=where)
        for name in value if isinstance(value, list) else [value]:
            if key in GROUPS:
                check_object(name, GROUPS[key], key=key, where=where, flag=TRUST_RUN_FLAG)
            elif STAGE_KEYS[key] is Kind.REPOSITORY:
                is_trained = isinstance(name, str) and (name in context.recipe.stages or is_ensemble_member(name))
                if not is_trained:
                    check_repository(name, key=key, where=where)


def check_same_labels(context: RunContext, *, restart: bool = False) -> None:
    """Checks that the judge `same-labels` can learn from pairs that the reward model does not see.

    Args:
        context: The run.
        restart: Whether the reward model will be trained again, even if it is finished.

    Raises:
        ZooError: The recipe names the judge but reserves no pairs, or the reward model was trained with other keys.
    """
    if SAME_LABELS not in evaluation_settings(context).judge_names:
        return
    requirement = f"The judge {SAME_LABELS} learns from preference pairs that the reward model does not see, but"
    if "reward" not in context.recipe.stages:
        raise ZooError(f"{requirement} the recipe has no stage reward: name another judge, such as reward:MODEL.")
    settings = (context if restart else judge_run(context)).settings("reward")
    record = context.record("reward")
    document, retrain_hint = record.read(), f"train it again with `{context.stage_command('reward', '--restart')}`."
    is_trained = document.get("status") == "finished" and not restart
    if settings.data.judge_share is None:
        hint = f", and {retrain_hint}" if is_trained else "."
        raise ZooError(
            f"{requirement} the stage reward reserves no pairs: set judge_share there, for example to 0.5{hint}"
        )
    if not is_trained:
        return
    recorded_keys = {name: value for name, value in document["resolved"].items() if name not in ("data", "parents")}
    if (key := first_difference(recorded_keys, settings.resolved)) is not None:
        raise ZooError(
            f"{requirement} the reward model in {record.path} was trained with a different {key} than this command "
            f"sets: use the earlier value, or {retrain_hint}"
        )
