"""Which judge the evaluation goes by, settled before anything is trained."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ZooError
from ..hub.client.run_signature import FLAG
from ..plugins import REWARDS, load_object
from ..rewards.verifiable import Verifiable
from .context import RunContext
from .data.layout import CUTS, HOLDS_OUT
from .record import first_difference
from .registry import is_member
from .settings.evaluation import EvaluationConfig
from .settings.judge_names import SAME_LABELS
from .settings.key_classes import GROUPS, STAGE_KEYS, Kind, check_key, check_repository, machine_keys, without_machine
from .settings.parse import BESIDE_KEYS, StageSettings
from .trusted_names import check_object

#: Keys of PPO by which a reward model's samples are drawn, as its run.json records them.
SAMPLES = ("response_length", "temperature", *CUTS, *HOLDS_OUT)


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


def of_same_labels(context: RunContext, name: str) -> bool:
    """Whether a judge learned from the labels that the run's reward model learned from.

    Other texts of the same data set do not make it another judge: what these labels get wrong, both get wrong. name:
    the recipe's.
    """
    if name != "classifier" or "reward" not in context.recipe.stages:
        return name == SAME_LABELS
    pairs = context.settings("reward").data
    labeled = evaluation_of(context).labeled_data
    return pairs.simulated_pairs is None and pairs.dataset_name == labeled.dataset_name


def judge_run(context: RunContext) -> RunContext:
    """The run whose reward model is the judge `same-labels`: as the run's own is trained, on the pairs kept for it.

    With the keys that the run's own was trained with, once it is, those of PPO's sampling among them.
    """
    run = as_trained(context, "reward")
    document = context.record("reward").read()
    if document.get("status") == "finished" and "ppo" in document["resolved"] and "ppo" in run.recipe.stages:
        sampling = {key: value for key, value in document["resolved"]["ppo"].items() if key in SAMPLES}
        drawn = {**run.recipe.stages["ppo"], **sampling}
        flags = {name: {} if name == "ppo" else keys for name, keys in run.flags.items()}
        run = replace(run, recipe=replace(run.recipe, stages={**run.recipe.stages, "ppo": drawn}), flags=flags)
    base = context.record("reward").path.parent
    return replace(
        run, directory=base / "judge", base=base, own=("reward",), of_judge=True, publish=False, restart=False
    )


def as_trained(context: RunContext, stage: str) -> RunContext:
    """The run with the keys that the stage was trained with, once it is, whatever its file says now.

    Where somebody else's run or recipe says them, keys of a machine or account are as this user's recipe and flags say.

    Raises ZooError for a flag of the stage that says otherwise.
    """
    document = context.record(stage).read()
    if document.get("status") != "finished":
        return context
    keys = {name: value for name, value in document["resolved"].items() if name not in BESIDE_KEYS}
    _check_keys(context, stage, keys)
    given, recipe = context.flags.get(stage, {}), context.recipe
    kept: dict[str, Any] = {}
    if recipe.download is not None or not context.record(stage).is_own():
        own = recipe.stages.get(stage, {})
        keys = {**without_machine(keys), **{name: own[name] for name in machine_keys() if name in own}}
        kept = {name: given[name] for name in machine_keys() if name in given}
        given = without_machine(given)
    if given:
        asked = context.settings(stage).resolved
        key = first_difference({name: keys.get(name) for name in given}, {name: asked.get(name) for name in given})
        if key is not None:
            raise ZooError(
                f"{context.record(stage).path} was trained with another {key} than this command says: leave the flag "
                f"out, or train it again with `{context.stage_command(stage, '--restart')}`."
            )
    recipe = replace(recipe, stages={**recipe.stages, stage: keys})
    return replace(context, recipe=recipe, flags={**context.flags, stage: kept})


def _check_keys(context: RunContext, stage: str, keys: Mapping[str, Any]) -> None:
    """Raises ZooError where a run that is not this user's would set what no download may, and the recipe does not."""
    record = context.record(stage)
    if record.is_own():
        return
    own = {**context.recipe.stages.get(stage, {}), **context.flags.get(stage, {})}
    where = f"{record.run_file}, which was not written by your rlhf-zoo, or was changed since,"
    for key, value in keys.items():
        if value is None or value == own.get(key):
            continue
        check_key(key, value, STAGE_KEYS, where=where)
        for name in value if isinstance(value, list) else [value]:
            if key in GROUPS:
                check_object(name, GROUPS[key], key=key, where=where, flag=FLAG)
            elif STAGE_KEYS[key] is Kind.REPOSITORY and not (isinstance(name, str) and _is_trained(context, name)):
                check_repository(name, key=key, where=where)


def _is_trained(context: RunContext, name: str) -> bool:
    return name in context.recipe.stages or is_member(name)


def check_same_labels(context: RunContext, *, anew: bool = False) -> None:
    """Raises ZooError where a judge is to learn from pairs kept from the run's reward model, and there are none.

    anew: the reward model that is there will be trained again.
    """
    if SAME_LABELS not in evaluation_of(context).names:
        return
    wanted = f"The judge {SAME_LABELS} learns from preference pairs that the reward model does not see, and"
    if "reward" not in context.recipe.stages:
        raise ZooError(f"{wanted} the recipe has no stage reward: name another, such as reward:MODEL.")
    settings, record = (context if anew else judge_run(context)).settings("reward"), context.record("reward")
    document, again = record.read(), f"train it again with `{context.stage_command('reward', '--restart')}`."
    trained = document.get("status") == "finished" and not anew
    if settings.data.judge_share is None:
        more = f", and {again}" if trained else "."
        raise ZooError(f"{wanted} the stage reward keeps none from it: set judge_share there, such as 0.5{more}")
    if not trained:
        return
    before = {name: value for name, value in document["resolved"].items() if name not in ("data", "parents")}
    if (key := first_difference(before, settings.resolved)) is not None:
        raise ZooError(
            f"{wanted} the one in {record.path} was trained with another {key} than this command says: say it as then, "
            f"or {again}"
        )
