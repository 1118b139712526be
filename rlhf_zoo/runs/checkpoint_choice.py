"""Chooses the checkpoint for `main` and for later stages, and decides which checkpoints stay on disk."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ZooError
from ..fields import option
from ..fileio import is_finite
from ..hub.client.connect import DEFAULT_HUB, Hub
from ..hub.client.refs import ADAPTER_CONFIGS, Checkpoint, resolve
from ..modeling.gguf import unpack_if_gguf
from .record import StageRecord, checkpoint_step
from .registry import STAGES

# PPO's evaluation logs one metric with this prefix for each reward, in addition to the metrics of the stage.
REWARD_METRIC_PREFIX = "eval_rewards/"
_OPTIMIZER_FILE = "optimizer.pt"
# PPO maximizes these metrics, so even on held-out prompts they are not an independent measure of quality.
_PROXY_METRICS = ("eval_objective/score", "eval_objective/shaped_score", "eval_objective/rlhf_reward")


@dataclass(frozen=True)
class ReleaseArguments:
    """Which checkpoints and files of a stage are published, and which checkpoint becomes `main`."""

    release: Literal["last", "best"] = option(
        "last",
        "The checkpoint that is `main` and `best` at the end: the last, or the best by metric_for_best_model on the "
        "validation split.",
    )
    push_optimizer: bool = option(
        False, "Also send the states that resuming needs: optimizer, scheduler and random states."
    )
    push_merged: bool = option(
        False, "With LoRA, also send the chosen model with its adapter merged, as the branch `merged`."
    )
    push_steps: int | None = option(
        None,
        "Send only checkpoints whose step is a multiple of this number, and at the end the last and the chosen one; "
        "None sends every saved checkpoint.",
    )
    push_dtype: Literal["bfloat16"] | None = option(
        None, "Round the weights that are sent. Weights on disk stay float32, so resuming is exact."
    )
    push_critic: bool = option(True, "Also send PPO's critic.")
    save_optimizer_limit: int | None = option(
        None, "Number of the newest checkpoints that keep their optimizer state; None keeps all states."
    )


@dataclass(frozen=True)
class PPOReleaseArguments(ReleaseArguments):
    """The release keys of PPO, for which the evaluation's verdict chooses the checkpoint by default."""

    release: Literal["last", "best", "recommended"] = option(  # type: ignore[assignment]
        "recommended",
        "The checkpoint that is `main` and `best` at the end: the one that the verdict of `rlhf-zoo eval` recommends, "
        "the last, or the best by metric_for_best_model on the validation split. Until the evaluation, and if it "
        "recommends no checkpoint, `main` is the last and no checkpoint is `best`.",
    )


def check_release_rule(stage: str, release: ReleaseArguments, trainer: Any, *, evaluated_split: str | None) -> None:
    """Checks, before training, that the release keys work together and can choose a checkpoint.

    Args:
        stage: Name of the stage.
        release: The release keys of the stage.
        trainer: The trainer's configuration.
        evaluated_split: The split that the trainer evaluates on; None without evaluation.

    Raises:
        ZooError: Keys contradict each other; or `release: best` has no metric, or one that the stage does not log at
            every checkpoint, that belongs to the test split, or that PPO maximizes.
    """
    _check_push_keys(stage, release, trainer)
    if release.release != "best":
        return
    metric = metric_name(trainer)
    rule = f"release: best of the stage {stage}"
    if metric is None:
        raise ZooError(f"{rule} needs metric_for_best_model: set it to a metric of the validation split, such as loss.")
    if metric in _PROXY_METRICS:
        raise ZooError(
            f"{rule} would choose the checkpoint by {metric}, which PPO maximizes: choose a metric that PPO is not "
            "trained on, such as rewards/NAME of a reward function with weight 0."
        )
    stage_metrics = STAGES[stage].metrics
    if metric not in stage_metrics and not (stage == "ppo" and metric.startswith(REWARD_METRIC_PREFIX)):
        reward_hint = " or rewards/NAME of a reward function" if stage == "ppo" else ""
        raise ZooError(
            f"{rule} would choose the checkpoint by {metric}, which no evaluation of that stage logs: choose "
            f"{', '.join(name.removeprefix('eval_') for name in stage_metrics)}{reward_hint}."
        )
    if evaluated_split is None or trainer.eval_strategy == "no":
        raise ZooError(
            f"{rule} needs metrics of the validation split: set eval_strategy, eval_steps and the split for it."
        )
    if evaluated_split == "test":
        raise ZooError(
            f"{rule} would choose the checkpoint by the test split, whose metrics the card reports: evaluate on "
            "another split."
        )
    eval_strategy, save_strategy = trainer.eval_strategy, trainer.save_strategy
    if eval_strategy != save_strategy or (save_strategy == "steps" and trainer.save_steps % trainer.eval_steps):
        raise ZooError(
            f"{rule} needs an evaluation at every checkpoint: make eval_strategy equal save_strategy, and save_steps "
            "a multiple of eval_steps."
        )


def _check_push_keys(stage: str, release: ReleaseArguments, trainer: Any) -> None:
    if not release.push_critic and stage != "ppo":
        raise ZooError(f"push_critic works for ppo only, because the stage {stage} has no critic: leave it out.")
    if release.push_optimizer and (release.push_dtype or release.save_optimizer_limit is not None):
        key = "push_dtype" if release.push_dtype else "save_optimizer_limit"
        raise ZooError(
            f"push_optimizer of the stage {stage} sends the state that resuming needs, but {key} omits a part of it: "
            "set only one of them."
        )
    push_steps, save_steps = release.push_steps, trainer.save_steps
    if push_steps is not None and (trainer.save_strategy != "steps" or save_steps < 1 or push_steps % save_steps):
        raise ZooError(
            f"push_steps of the stage {stage} is {push_steps}, but checkpoints are saved by "
            f"{trainer.save_strategy.value}{f', every {save_steps:g}' if trainer.save_strategy == 'steps' else ''}: "
            "set push_steps to a multiple of save_steps, which must be an integer, with save_strategy: steps."
        )


def metric_name(trainer: Any) -> str | None:
    """Returns `metric_for_best_model` as the trainer logs it.

    Args:
        trainer: The trainer's configuration.

    Returns:
        The name with the prefix `eval_`; None if no metric is set.
    """
    metric = trainer.metric_for_best_model
    return metric if metric is None or metric.startswith("eval_") else f"eval_{metric}"


def best_step(
    rows: Iterable[Mapping[str, Any]], metric: str, *, greater_is_better: bool, steps: Collection[int]
) -> tuple[int, float] | None:
    """Finds the step with the best value of a metric.

    Args:
        rows: Rows of metrics.jsonl.
        metric: The metric to compare.
        greater_is_better: Whether a higher value is better.
        steps: The steps to choose from.

    Returns:
        (step, value); None if no step has a finite value. Among equal values the earliest step wins, because it needed
        the least training.
    """
    values = {row["step"]: float(row[metric]) for row in rows if row["step"] in steps and is_finite(row.get(metric))}
    sign = 1 if greater_is_better else -1
    return max(values.items(), key=lambda item: (sign * item[1], -item[0]), default=None)


def choose_checkpoint(record: StageRecord, release: ReleaseArguments, trainer: Any) -> dict[str, Any]:
    """Chooses the checkpoint of a finished stage by its release rule.

    With `release: recommended` the evaluation chooses later. Until then the last checkpoint is recorded and marked
    `provisional`: it becomes `main`, and no checkpoint becomes `best`.

    Args:
        record: The stage's directory.
        release: The release keys of the stage.
        trainer: The trainer's configuration.

    Returns:
        {step, rule, metric, value} for run.json, and {provisional: True} until the evaluation chooses.

    Raises:
        ZooError: There is no complete checkpoint, or no checkpoint has the metric of the rule.
    """
    steps = [checkpoint_step(path) for path in record.checkpoints()]
    if not steps:
        raise ZooError(f"{record.path} holds no complete checkpoint after training: check save_strategy in the recipe.")
    if release.release == "last":
        return {"step": steps[-1], "rule": "last", "metric": None, "value": None}
    if release.release == "recommended":
        return {"step": steps[-1], "rule": "recommended", "metric": None, "value": None, "provisional": True}
    metric = metric_name(trainer)
    assert metric is not None
    best = best_step(record.metrics(), metric, greater_is_better=bool(trainer.greater_is_better), steps=steps)
    if best is None:
        logged_metrics = sorted({key for row in record.metrics() for key in row if key.startswith("eval_")})
        raise ZooError(
            f"No checkpoint in {record.path} has {metric}, by which release: best chooses. The evaluations logged "
            f"{', '.join(logged_metrics) or 'nothing'}: set metric_for_best_model to one of these."
        )
    return {"step": best[0], "rule": "best", "metric": metric, "value": best[1]}


def choice_of_verdict(step: int, *, recommends: bool) -> dict[str, Any]:
    """Returns the entry `chosen` of run.json for a choice by the verdict.

    Args:
        step: The recommended step, or the last step if the verdict recommends no checkpoint.
        recommends: Whether the verdict recommends a checkpoint.

    Returns:
        {step, rule, metric, value}, and {none: True} if the verdict recommends no checkpoint.
    """
    choice = {"step": step, "rule": "recommended", "metric": None, "value": None}
    return choice if recommends else {**choice, "none": True}


def chosen_is_best(record: StageRecord) -> bool:
    """Whether the chosen checkpoint of a finished stage gets the tag `best`.

    Args:
        record: The stage's directory.

    Returns:
        False while the evaluation has not chosen yet, and if it recommends no checkpoint.
    """
    choice = record.read().get("chosen") or {}
    return not choice.get("provisional") and not choice.get("none")


def steps_to_protect(record: StageRecord, release: ReleaseArguments, trainer: Any) -> set[int]:
    """Returns the steps on disk that training or the release rule may still need.

    Args:
        record: The stage's directory.
        release: The release keys of the stage.
        trainer: The trainer's configuration.

    Returns:
        The last step, and with `release: best` also the best step so far.
    """
    steps = [checkpoint_step(path) for path in record.checkpoints()]
    metric = metric_name(trainer) if release.release == "best" else None
    if metric is None:
        return set(steps[-1:])
    best = best_step(record.metrics(), metric, greater_is_better=bool(trainer.greater_is_better), steps=steps)
    return {*steps[-1:], *([best[0]] if best else [])}


def delete_old_checkpoints(record: StageRecord, *, keep: int | None, protected_steps: Collection[int]) -> None:
    """Deletes the oldest checkpoints until at most `keep` are left.

    Args:
        record: The stage's directory.
        keep: How many checkpoints to keep; None or 0 keeps all.
        protected_steps: Steps whose checkpoints are never deleted, even if more than `keep` checkpoints remain.
    """
    for path in _surplus_checkpoints(record, keep=keep, protected_steps=protected_steps):
        record.remove_checkpoint(path)


def delete_old_optimizer_states(record: StageRecord, *, keep: int | None) -> None:
    """Deletes the optimizer state of all checkpoints except the newest `keep`.

    A checkpoint without its optimizer state can still be published and loaded, but training cannot resume from it.

    Args:
        record: The stage's directory.
        keep: How many checkpoints keep their optimizer state; with None or 0, all of them.
    """
    for path in record.checkpoints()[:-keep] if keep else []:
        (path / _OPTIMIZER_FILE).unlink(missing_ok=True)


def checkpoints_to_keep(record: StageRecord) -> list[Path]:
    """Returns the checkpoints of a finished stage to keep once everything is on the Hub, in the order of their steps.

    Before the evaluation chooses a checkpoint, all checkpoints are kept.

    Args:
        record: The stage's directory.
    """
    paths = record.checkpoints()
    document = record.read()
    if (document.get("chosen") or {}).get("provisional"):
        return paths
    chosen_and_last = (record.chosen_checkpoint(), record.last_checkpoint())
    protected_steps = {checkpoint_step(path) for path in chosen_and_last if path is not None}
    surplus_paths = _surplus_checkpoints(
        record, keep=(document.get("resolved") or {}).get("save_total_limit"), protected_steps=protected_steps
    )
    return [path for path in paths if path not in surplus_paths]


def _surplus_checkpoints(record: StageRecord, *, keep: int | None, protected_steps: Collection[int]) -> list[Path]:
    paths = record.checkpoints()
    if not keep:
        return []
    return [path for path in paths if checkpoint_step(path) not in protected_steps][: max(len(paths) - keep, 0)]


def resolve_model(name: str | Path, hub: Hub = DEFAULT_HUB, *, skip_source: bool = False) -> Checkpoint:
    """Finds a model by its name. For the folder of a stage, this is the checkpoint that the release rule chose.

    Args:
        name: A folder, a GGUF file or a Hub id.
        hub: Where Hub ids are looked up.
        skip_source: Whether to look only on `hub` itself, and not on its source Hub.

    Returns:
        The checkpoint. For the folder of a stage, its `name` is that folder, and its `path` the chosen checkpoint.

    Raises:
        ZooError: There is no such model, or the folder of a stage has no complete checkpoint.
    """
    checkpoint = resolve(unpack_if_gguf(str(name)), hub, skip_source=skip_source)
    stage = StageRecord(checkpoint.path)
    if checkpoint.repo is not None or not stage.run_file.is_file():
        return checkpoint
    if (chosen_path := stage.chosen_checkpoint()) is not None:
        return replace(checkpoint, path=chosen_path)
    # A pulled repository may also have a run.json, but next to the files of its model.
    if any((checkpoint.path / file).is_file() for file in ("config.json", *ADAPTER_CONFIGS)):
        return checkpoint
    raise ZooError(
        f"{name} is the folder of a stage, but its chosen checkpoint is missing or incomplete: train the stage to "
        "its end, or name a checkpoint in it."
    )
