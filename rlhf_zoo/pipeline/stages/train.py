"""One training stage from a trainer: begin or resume, train, save, send, record."""

import contextlib
import copy
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ...errors import NotFinite, ZooError
from ...fileio import now
from ...hub.client.publish import MERGED
from ...hub.client.refusals import is_disk_full
from ...modeling import distributed
from ...modeling.integrity import weights_digest
from ...modeling.remote_code import code_run
from ...ppo.failures import NoUpdate
from ...ppo.guards import check_step_size
from ...ppo.waiting import WaitEnded
from ...publishing.adapters import check_bases
from ...publishing.sender import claim_repository, kept_lineage
from ...publishing.sent import unpublished
from ...runs.checkpoint_choice import choose, promising, prune, thin
from ...runs.code import check_code, stage_code
from ...runs.context import Publisher, RunContext
from ...runs.data.sources import check_unchanged, digest
from ...runs.models import ParentCheckpoint
from ...runs.record import COMPLETE, SUMMARY, StageRecord, checkpoint_step
from ...runs.registry import STAGES, parent_title, starts_on_base
from ...runs.settings.loading import check_installed
from ...runs.settings.parse import StageSettings
from ...runs.status_line import doing
from .callbacks import NoRoom, StageCallback, check_room
from .interrupt import Interruptible, Stopped
from .merged import save_merged
from .reporting import one_run
from .running_metrics import RunningMetrics

log = logging.getLogger(__name__)


def quiet() -> None:
    """Turns off the progress bars and the advice of transformers and datasets: the screen shows our own bars."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.disable_progress_bar()


def make_trainer(kind: Callable[..., Any], settings: StageSettings, **parts: Any) -> Any:
    """Makes a trainer of TRL over these settings.

    Args:
        kind: The trainer's class.
        settings: The stage's.
        **parts: Models, tokenizers and data sets, by the trainer's keywords.

    Raises:
        ZooError: The trainer refuses the settings, the learning rate cannot change the model's weights, or no example
            is left to train on.
    """
    from ...modeling.fsdp_trainer import in_shards
    from ...modeling.length_grouping import grouping_by_length
    from .global_batch import in_processes

    kind = grouping_by_length(kind)
    if getattr(settings.data, "fsdp2", False):  # a stage of somebody else need not have it
        kind = in_shards(kind)
    try:
        trainer = in_processes(kind)(args=copy.copy(settings.trainer), **parts)  # a trainer changes its arguments
    except ValueError as error:
        first = str(error).strip().splitlines()[0].rstrip(".").replace(". ", "; ")
        raise ZooError(f"The settings of the stage {settings.stage} do not work: {first}.") from error
    # trl writes its own card, of the folder that the base lies in, beside each checkpoint: ours is the run's.
    trainer.create_model_card = lambda **_: None
    for weight in trainer.model.parameters():  # trl holds adapters on few bits in bfloat16, where small steps vanish
        if weight.requires_grad and settings.model.use_peft and settings.trainer.bf16:
            weight.data = weight.data.float()
    check_step_size(trainer.model, trainer.args.learning_rate, of=f"the model of the stage {settings.stage}")
    if len(trainer.train_dataset) == 0:
        raise ZooError(
            f"max_length {settings.trainer.max_length} of the stage {settings.stage} leaves no example to train on: "
            "raise it, or set it to null."
        )
    return trainer


@dataclass(frozen=True)
class _Plan:
    """What is to be done of a stage. again: from the start, over what is there; before: run.json as it stands."""

    finished: bool
    again: bool = False
    before: Mapping[str, Any] = field(default_factory=dict)
    resume: Path | None = None


def train_stage(
    context: RunContext,
    settings: StageSettings,
    *,
    data: Mapping[str, Any],
    parents: Mapping[str, ParentCheckpoint],
    started: float,
    build: Callable[[], Any],
    publisher: Publisher | None = None,
    finish_checkpoint: Callable[[Any, Path], None] | None = None,
    conclude: Callable[[Any, Path], Mapping[str, Any]] | None = None,
    left_out: Mapping[str, int] | None = None,
    cut_rows: Mapping[str, int] | None = None,
) -> bool:
    """Runs a stage, or leaves it when it is finished.

    Args:
        context: The run.
        settings: The stage's.
        data: The lineage of the data set.
        parents: The checkpoints that the stage starts from, by role.
        started: time.monotonic() when the stage began.
        build: Makes the trainer; called only when there is something to train.
        publisher: Sends each checkpoint as it is saved.
        finish_checkpoint: Takes the trainer and a checkpoint, and adds to it before it counts as complete.
        conclude: Takes the trainer and the chosen checkpoint at the end, and returns fields for run.json.
        left_out: Rows that `build` leaves out of training, by the key for which it does.
        cut_rows: What `build` finds of rows that max_length cuts.

    Returns:
        Whether it trained.

    Raises:
        ZooError: The stage cannot begin, go on, or be published.
        Stopped: After Ctrl-C, once the step under way is saved.
    """
    stage = settings.stage
    check_installed(settings)
    record = context.record(stage)
    lineage = {name: dict(parent.lineage) for name, parent in parents.items()}
    resolved = _resolved(settings, data, lineage)
    code = stage_code(settings)
    # Of several processes the first one decides what is done, and writes.
    plan: _Plan = distributed.from_first(lambda: _plan(context, settings, resolved, parents, code, publisher))
    if plan.finished:
        return False

    def spent() -> float:
        return float(plan.before.get("seconds", 0.0) + time.monotonic() - started)

    for role, parent in lineage.items():
        if distributed.first() and parent.get("repo") and not parent.get("path"):
            log.info("The stage %s takes %s from %s at %s.", stage, role, parent["repo"], parent["commit"])
    with Interruptible(f"the {stage} stage") as stop:
        # Once made it refuses another precision than that of the stage before.
        if AcceleratorState._shared_state.get("_mixed_precision") != ("bf16" if settings.trainer.bf16 else "no"):
            AcceleratorState._reset_state()
        with doing(f"{stage}: loading models and data"):
            trainer = build()
        # Only now: settings that build refuses must not claim the directory, nor cost what lies there.
        if distributed.first():
            optional = {"code": code, "left_out": left_out, "cut_rows": cut_rows}
            _begin(context, settings, plan, resolved, lineage, data, optional, publisher)
        distributed.wait()
        callback = _attach(trainer, context, settings, record, stop, publisher, finish_checkpoint)
        run_name = f"{context.recipe.name}-{stage}-{context.run_id(stage)}"
        with (
            _whole_checkpoints(record),
            contextlib.closing(callback),
            one_run(trainer.args, run_name, project=context.recipe.name),
        ):
            _train_or_stop(trainer, plan.resume, record, spent, stop)
        if _ended_early(trainer, record, context.stop_after, spent, stop) or not distributed.first():
            return True
        chosen = choose(record, settings.release, trainer.args)
        path = record.checkpoint_path(chosen["step"])
        if settings.release.push_merged:
            save_merged(path, path / MERGED, dtype=settings.model.dtype)
        concluded = dict(conclude(trainer, path)) if conclude is not None else {}
    weights = weights_digest(path)
    record.write(status="finished", chosen=chosen, weights=weights, seconds=spent(), finished=now(), **concluded)
    if publisher is not None:
        publisher.notify()
    if stop.requested:
        raise Stopped
    return True


def _resolved(
    settings: StageSettings, data: Mapping[str, Any], parents: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The keys, the data and the parents, by which runs of the stage are told apart."""
    fingerprints = {
        name: parent["fingerprint"]
        for name, parent in parents.items()
        if parent["fingerprint"] or "files" not in parent
    }
    return {**settings.resolved, "data": data.get("fingerprint"), "parents": fingerprints}


def _begin(
    context: RunContext,
    settings: StageSettings,
    plan: _Plan,
    resolved: Mapping[str, Any],
    parents: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any],
    optional: Mapping[str, Mapping[str, Any] | None],
    publisher: Publisher | None,
) -> None:
    """Writes run.json of a stage that trains now, over what is there where it begins again.

    parents, data: their lineage. optional: fields of run.json, left out where they are empty.
    """
    stage, before, record = settings.stage, plan.before, context.record(settings.stage)
    remote_code = code_lineage(context)  # reads what is cleared below
    if plan.again:
        record.clear()
        (context.directory / SUMMARY).unlink(missing_ok=True)  # of what was before
        if publisher is not None:
            claim_repository(context, stage)  # without the tags of what was cleared
    record.write(
        **context.head(stage, "running", seed=settings.trainer.seed, resolved=resolved),
        parents={
            role: kept_lineage((before.get("parents") or {}).get(role) or {}, parent)
            for role, parent in parents.items()
        },
        dataset=kept_lineage(before.get("dataset") or {}, data),
        **({"chat_template": template} if (template := _template_lineage(settings)) else {}),
        hub=before.get("hub") or context.hub.label,
        publish=before.get("publish") if publisher is None else _publication(context),
        repo=before.get("repo"),
        command=context.command,
        run=context.run_id(stage),
        **({"round": context.round.lineage} if context.round is not None else {}),
        **({"package": dict(context.recipe.package)} if context.recipe.package else {}),
        **{name: dict(value) for name, value in optional.items() if value},
        **({"remote_code": remote_code} if remote_code else {}),
    )


def _train_or_stop(
    trainer: Any, resume: Path | None, record: StageRecord, spent: Callable[[], float], stop: Interruptible
) -> None:
    """Trains. An update that cannot be made after Ctrl-C is no error: raises Stopped."""
    try:
        _train(trainer, resume, record, spent)
    except NoUpdate as error:
        if not stop.requested:
            raise
        log.warning("%s", error)
        raise Stopped from error


def _ended_early(
    trainer: Any, record: StageRecord, stop_after: int | None, spent: Callable[[], float], stop: Interruptible
) -> bool:
    """Whether training ended at the step `stop_after`, before its last; records it. Raises Stopped after a signal."""
    step = trainer.state.global_step
    if step >= trainer.state.max_steps:
        return False
    stopped = not stop.requested and step == stop_after
    if distributed.first():
        record.write(status="stopped" if stopped else "interrupted", seconds=spent())
    if not stopped:
        raise Stopped
    return True


def code_lineage(context: RunContext) -> list[dict[str, Any]]:
    """The models' own code that ran, under the name that an earlier stage of the run knew it by."""
    recorded = [code for stage in STAGES for code in context.record(stage).read().get("remote_code") or ()]
    ran = [code.lineage for code in code_run()]
    return [next((earlier for earlier in recorded if earlier["files"] == code["files"]), code) for code in ran]


def _plan(
    context: RunContext,
    settings: StageSettings,
    resolved: Mapping[str, Any],
    parents: Mapping[str, ParentCheckpoint],
    code_named: Mapping[str, Any],
    publisher: Publisher | None,
) -> _Plan:
    """Raises ZooError where the stage cannot begin or go on in its directory, or be published under its name."""
    stage = settings.stage
    record = context.record(stage)
    recipe = context.recipe.name
    again = record.run_file.exists() and (context.restart or record.came_to_nothing(resolved, recipe))
    if not again:
        context.check_begun(stage, resolved)
    before = {} if again else record.read()
    if before and record.has_trained:
        _check_files(settings, parents, before)
        check_code(code_named, before.get("code"))
    if before.get("status") == "finished":
        if publisher is not None:
            record.write(publish=_publication(context))
            publisher.notify()
        return _Plan(finished=True)
    if publisher is not None and not context.checked:
        claim_repository(context, stage)
    if publisher is not None and settings.model.use_peft:
        check_bases(context, stage, parents)
    if not before and not again and any(record.path.glob("checkpoint-*")):
        raise ZooError(f"{record.path} holds checkpoints that no run of rlhf-zoo wrote: choose another --output_dir.")
    resume = None
    if not again:
        record.remove_incomplete()
        resume = _last_whole(record)
        record.truncate_metrics(checkpoint_step(resume) if resume else -1)
    return _Plan(False, again, before, resume)


def _template_lineage(settings: StageSettings) -> dict[str, Any]:
    """The digest of the file that chat_template_path names, for run.json; {} where it names none."""
    path = getattr(settings.trainer, "chat_template_path", None)
    return {"files": digest(Path(path))} if path is not None and Path(path).is_file() else {}


def _check_files(settings: StageSettings, parents: Mapping[str, ParentCheckpoint], before: Mapping[str, Any]) -> None:
    """Raises ZooError where a model or a chat template on this machine is not what the stage began with."""
    recorded, on_base = before.get("parents") or {}, starts_on_base(settings.stage, settings.resolved)
    for role, parent in parents.items():
        title = parent_title(role, on_base=on_base)
        check_unchanged(f"The {title} in {parent.path}", parent.lineage, recorded.get(role))
    path = getattr(settings.trainer, "chat_template_path", None)
    check_unchanged(f"The chat template {path}", _template_lineage(settings), before.get("chat_template"))


def _last_whole(record: StageRecord) -> Path | None:
    """What to go on from: the last checkpoint that is what was saved. Later ones are set aside, and that is said."""
    problems = record.set_damaged_aside()
    resume = record.last_checkpoint()
    for problem in problems:
        log.warning(
            "%s: its checkpoint is now called damaged-checkpoint-*, and training goes on from %s.",
            problem,
            f"{resume.name}, which is whole" if resume is not None else "the start, as no other is whole",
        )
    return resume


def _publication(context: RunContext) -> dict[str, Any]:
    """Where the run is to be published, for `push --resume`."""
    return {"hub": context.hub.label, "namespace": context.namespace, "private": context.private}


def _train(trainer: Any, resume: Path | None, record: StageRecord, spent: Callable[[], float]) -> None:
    """Trains; where an update cannot be made, or a signal ends a wait or an evaluation, saves the updates before it.

    An evaluation that a signal ended is made before training goes on.

    Raises:
        Stopped: After such a signal.
    """
    try:
        if resume is None:
            trainer.train()
            return
        state = TrainerState.load_from_json(str(resume / TRAINER_STATE_NAME))
        owed = _owes_evaluation(state, record)
        if state.global_step < state.max_steps:
            trainer.args.eval_on_start = owed
            trainer.train(resume_from_checkpoint=str(resume))
            return
        trainer.state = state  # Trainer would make one more step
        if owed:
            trainer._load_from_checkpoint(str(resume))
            trainer.evaluate()
    except WaitEnded as error:
        _save_finished(trainer, record, error)
        if distributed.first():
            record.write(status="interrupted", seconds=spent())
        raise Stopped from error
    except NoUpdate as error:
        if not _save_finished(trainer, record, error):
            raise
        if distributed.first():
            record.write(status="interrupted", seconds=spent())
        step = trainer.state.global_step
        raise type(error)(f"{error} Step {step} is saved, and the same command goes on from it.") from error.__cause__


def _save_finished(trainer: Any, record: StageRecord, error: NoUpdate | WaitEnded) -> bool:
    """Saves the finished updates. Returns whether they are saved: not where there are none.

    Of several processes those that still wait cannot save. Raises the error where the disk has no room.
    """
    step = trainer.state.global_step
    if (distributed.count() > 1 and not getattr(error, "agreed", False)) or step == 0:
        return False
    if not (record.checkpoint_path(step) / COMPLETE).is_file():
        try:
            check_room(record)
        except NoRoom:
            raise error from None
        trainer._save_checkpoint(trainer.model, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    return True


def _owes_evaluation(state: TrainerState, record: StageRecord) -> bool:
    """Whether the evaluation that was due after this step was begun and not finished."""
    callbacks: Any = state.stateful_callbacks
    control = (callbacks or {}).get("TrainerControl", {}).get("args", {})
    return bool(control.get("should_evaluate")) and not any(
        name.startswith("eval_") for row in record.metrics() if row["step"] == state.global_step for name in row
    )


@contextlib.contextmanager
def _whole_checkpoints(record: StageRecord) -> Iterator[None]:
    """Deletes a torn checkpoint where the disk fills up, which is a ZooError, or the run stops making numbers."""
    try:
        yield
    except (NotFinite, NoRoom):
        if distributed.first():
            record.remove_incomplete()
            record.write(status="interrupted")
        raise
    except Exception as error:
        if not distributed.first():
            raise
        # torch reports a full disk as a RuntimeError without a reason.
        no_room = isinstance(error, RuntimeError) and shutil.disk_usage(record.path).free < 2**20
        if not no_room and not is_disk_full(error):
            raise
        record.remove_incomplete()
        record.write(status="interrupted")
        raise ZooError(
            f"The disk of {record.path} is full: make room, and the same command goes on from the last checkpoint."
        ) from error


def _attach(
    trainer: Any,
    context: RunContext,
    settings: StageSettings,
    record: StageRecord,
    stop: Interruptible,
    publisher: Publisher | None,
    finish_checkpoint: Callable[[Any, Path], None] | None,
) -> StageCallback:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    if hasattr(trainer, "_total_train_tokens"):  # of trl; PPOTrainer saves its own
        trainer.add_callback(RunningMetrics(trainer))

    def saved() -> None:
        unsent: set[int] = set()
        if publisher is not None:
            publisher.notify()
            waiting = unpublished(record, context.repo(settings.stage), hub=context.hub.label)
            unsent = {checkpoint_step(path) for path in waiting}
        stay = unsent | promising(record, settings.release, settings.trainer)
        prune(record, keep=settings.keep, stay=stay)
        thin(record, keep=settings.release.save_optimizer_limit)

    finish = None if finish_checkpoint is None else functools.partial(finish_checkpoint, trainer)
    callback = StageCallback(record, stop, finish_checkpoint=finish, saved=saved, stop_after=context.stop_after)
    trainer.add_callback(callback)
    return callback
