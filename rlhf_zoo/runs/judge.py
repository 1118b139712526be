"""Which judge the evaluation goes by, settled before anything is trained."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ZooError
from ..plugins import REWARDS, load_object
from ..record import first_difference
from ..rewards.verifiable import Verifiable
from .context import RunContext
from .names import SAME_LABELS
from .settings import EvaluationConfig, StageSettings

#: What a stage's resolved settings hold beside its own keys.
OF_OTHERS = ("recipe", "ppo", "data", "parents")

__all__ = ["check_same_labels", "evaluation_of", "judge_run", "of_same_labels", "with_judge"]


def evaluation_of(context: RunContext) -> EvaluationConfig:
    """The run's evaluation, with its judge: see `with_judge`."""
    return with_judge(context.shared.evaluation, context.settings("ppo"))


def with_judge(config: EvaluationConfig, ppo: StageSettings) -> EvaluationConfig:
    """The evaluation with its judge: the one that it names, else PPO's verifiable reward, else `classifier`.

    Raises ZooError for a reward function that cannot be loaded.
    """
    if config.judge is not None:
        return config
    for name in ppo.data.reward_funcs or []:
        if isinstance(load_object(name, group=REWARDS), Verifiable):
            return replace(config, judge=f"rule:{name}")
    return replace(config, judge="classifier")


def of_same_labels(context: RunContext) -> bool:
    """Whether the headline's judge learned from the labels that the run's reward model learned from.

    Other texts of the same data set do not make it another judge: what these labels get wrong, both get wrong.
    """
    config = evaluation_of(context)
    if config.names[0] != "classifier" or "reward" not in context.recipe.stages:
        return config.names[0] == SAME_LABELS
    pairs = context.settings("reward").data
    return pairs.simulated_pairs is None and pairs.dataset_name == config.labeled_data.dataset_name


def judge_run(context: RunContext) -> RunContext:
    """The run whose reward model is the judge `same-labels`: as the run's own is trained, on the pairs kept for it.

    With the keys that the run's own was trained with, once it is.
    """
    document, recipe, flags = context.record("reward").read(), context.recipe, context.flags
    if document.get("status") == "finished":
        keys = {name: value for name, value in document["resolved"].items() if name not in OF_OTHERS}
        recipe, flags = replace(recipe, stages={**recipe.stages, "reward": keys}), {**flags, "reward": {}}
    base = context.record("reward").path.parent
    directory, own = base / "judge", ("reward",)
    run = replace(context, recipe=recipe, flags=flags, directory=directory, base=base, own=own)
    return replace(run, publish=False, restart=False, of_judge=True)


def check_same_labels(context: RunContext) -> None:
    """Raises ZooError where a judge is to learn from pairs kept from the run's reward model, and there are none."""
    if SAME_LABELS not in evaluation_of(context).names:
        return
    wanted = f"The judge {SAME_LABELS} learns from preference pairs that the reward model does not see, and"
    if "reward" not in context.recipe.stages:
        raise ZooError(f"{wanted} the recipe has no stage reward: name another, such as reward:MODEL.")
    settings, record = judge_run(context).settings("reward"), context.record("reward")
    document, again = record.read(), f"train it again with `rlhf-zoo reward {context.recipe.name} --restart`."
    trained = document.get("status") == "finished"
    if settings.data.judge_share is None:
        more = f", and {again}" if trained else "."
        raise ZooError(f"{wanted} the stage reward keeps none from it: set judge_share there, such as 0.5{more}")
    if not trained:
        return
    before = {name: value for name, value in document["resolved"].items() if name not in ("data", "parents")}
    given = {key: context.settings("reward").resolved[key] for key in context.flags.get("reward", {})}
    key = first_difference(before, settings.resolved) or first_difference(
        {key: before.get(key) for key in given}, given
    )
    if key is not None:
        raise ZooError(
            f"{wanted} the one in {record.path} was trained with another {key} than this command says: say it as then, "
            f"or {again}"
        )
