"""Runs a training stage: starts or resumes training, saves and sends checkpoints, and records the result."""

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ...errors import NotFinite, ZooError
from ...fileio import now
from ...hub.client.publish import MERGED_MODEL
from ...hub.client.refusals import is_disk_full
from ...modeling import distributed
from ...modeling.integrity import weights_digest
from ...modeling.loading import silence_transformers
from ...modeling.remote_code import executed_code
from ...ppo.failures import UpdateFailed
from ...ppo.timing import Phases
from ...ppo.waiting import WaitInterrupted
from ...publishing.adapters import check_base
from ...publishing.sender import claim_stage_repository, keep_published_lineage
from ...publishing.sent_checkpoints import unsent_checkpoints
from ...runs.checkpoint_choice import (
    choose_checkpoint,
    delete_old_checkpoints,
    delete_old_optimizer_states,
    steps_to_protect,
)
from ...runs.code import check_code, stage_code
from ...runs.context import Publisher, RunContext
from ...runs.data.digests import check_unchanged, digest
from ...runs.models import ParentCheckpoint
from ...runs.record import COMPLETE, SUMMARY, StageRecord, checkpoint_step
from ...runs.registry import STAGES, parent_title, starts_from_base
from ...runs.settings.loading import check_installed
from ...runs.settings.parse import StageSettings
from ...runs.status_line import show_activity
from .callbacks import NoRoom, StageCallback, check_room
from .interrupt import Interruptible, Stopped
from .merged import save_merged
from .reporting import report_to_one_run
from .running_metrics import RunningMetrics

log = logging.getLogger(__name__)


def silence_libraries() -> None:
    """Turns off the progress bars and warnings of transformers and datasets, because rlhf-zoo has its own bars."""
    import datasets

    silence_transformers()
    datasets.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class _Plan:
    """Whether and how a stage trains.

    Attributes:
        is_finished: Whether the stage is already finished.
        starts_over: Whether the stage replaces the files of an earlier run.
        old_document: run.json of the run to resume; {} for a new run.
        resume_from: The checkpoint to resume from; None to start from the beginning.
    """

    is_finished: bool
    starts_over: bool = False
    old_document: Mapping[str, Any] = field(default_factory=dict)
    resume_from: Path | None = None


@dataclass(frozen=True)
class _StageRun:
    """A run of a stage that is about to train.

    Attributes:
        context: The recipe's run.
        settings: The stage's settings.
        record: The stage's files.
        plan: Whether and how the stage trains.
        start_time: time.monotonic() when the stage began.
        publisher: Sends the stage's checkpoints; None if the run does not publish.
    """

    context: RunContext
    settings: StageSettings
    record: StageRecord
    plan: _Plan
    start_time: float
    publisher: Publisher | None

    def seconds(self) -> float:
        """Returns the seconds spent on the stage so far, including the runs that this run resumes."""
        return float(self.plan.old_document.get("seconds", 0.0) + time.monotonic() - self.start_time)


def train_stage(
    context: RunContext,
    settings: StageSettings,
    *,
    data_lineage: Mapping[str, Any],
    parents: Mapping[str, ParentCheckpoint],
    start_time: float,
    build: Callable[[], Trainer],
    publisher: Publisher | None = None,
    finish_checkpoint: Callable[[Trainer, Path], None] | None = None,
    final_fields: Callable[[Any, Path], Mapping[str, Any]] | None = None,
    left_out_counts: Mapping[str, int] | None = None,
    cut_rows: Mapping[str, int] | None = None,
) -> bool:
    """Trains a stage, unless it is finished.

    Args:
        context: The run.
        settings: The stage's settings.
        data_lineage: The lineage of the data set.
        parents: Role -> checkpoint that the stage uses, such as the SFT policy or a reward model.
        start_time: time.monotonic() when the stage began.
        build: Builds the trainer. Called only if there is something to train.
        publisher: Sends each checkpoint as it is saved; None if the run does not publish.
        finish_checkpoint: Takes the trainer and a checkpoint's path, and adds files before the checkpoint is complete;
            None adds no files.
        final_fields: Takes the trainer and the chosen checkpoint at the end, and returns fields for run.json; None adds
            no fields.
        left_out_counts: Key of the recipe -> number of rows that this key keeps out of training. `build` fills this
            mapping; None for a stage that does not count them.
        cut_rows: Counts of the rows that max_length cuts. `build` fills this mapping; None for a stage that cuts none.

    Returns:
        Whether it trained: False if the stage was already finished.

    Raises:
        ZooError: The stage cannot start, resume, or be published.
        Stopped: Ctrl-C was pressed, and the finished steps are saved.
    """
    stage = settings.stage
    check_installed(settings)
    parent_lineages = {role: dict(parent.lineage) for role, parent in parents.items()}
    identity = _run_identity(settings, data_lineage, parent_lineages)
    code = stage_code(settings)
    # Only the main process makes the plan, because it also writes files.
    plan: _Plan = distributed.call_on_main_process(
        lambda: _make_plan(context, settings, identity, parents, code, publisher)
    )
    if plan.is_finished:
        return False
    run = _StageRun(context, settings, context.record(stage), plan, start_time, publisher)
    for role, lineage in parent_lineages.items():
        if distributed.is_main_process() and lineage.get("repo") and not lineage.get("path"):  # not from this run
            log.info("The stage %s takes %s from %s at %s.", stage, role, lineage["repo"], lineage["commit"])
    with Interruptible(f"the {stage} stage") as stop:
        _reset_precision(settings)
        with show_activity(f"{stage}: loading models and data"):
            trainer = build()
        # `build` comes first, because settings that it refuses must neither claim the directory nor delete its files.
        if distributed.is_main_process():
            optional_fields = {"code": code, "left_out": left_out_counts, "cut_rows": cut_rows}
            _write_start(run, identity, parent_lineages, data_lineage, optional_fields)
        distributed.wait()
        if not _train_and_record(run, trainer, stop, finish_checkpoint):
            return True
        if distributed.is_main_process():
            _finish(run, trainer, final_fields)
    if distributed.is_main_process() and stop.requested:
        raise Stopped
    return True


def _reset_precision(settings: StageSettings) -> None:
    """Resets accelerate, which refuses a precision that differs from that of an earlier stage in the same process."""
    if AcceleratorState._shared_state.get("_mixed_precision") != ("bf16" if settings.trainer.bf16 else "no"):
        AcceleratorState._reset_state()


def _train_and_record(
    run: _StageRun, trainer: Trainer, stop: Interruptible, finish_checkpoint: Callable[[Trainer, Path], None] | None
) -> bool:
    """Trains, and records an early end. Returns whether the last step was reached; raises Stopped after a signal."""
    context = run.context
    callback = _add_callbacks(run, trainer, stop, finish_checkpoint)
    run_name = f"{context.recipe.name}-{run.settings.stage}-{context.run_id(run.settings.stage)}"
    with (
        _delete_incomplete_on_failure(run.record),
        contextlib.closing(callback),
        report_to_one_run(trainer.args, run_name, project=context.recipe.name),
    ):
        try:
            _train(run, trainer)
        except UpdateFailed as error:
            if not stop.requested:
                raise
            log.warning("%s", error)
            raise Stopped from error
    step = trainer.state.global_step
    if step >= trainer.state.max_steps:
        return True
    reached_stop_after = not stop.requested and step == context.stop_after
    if distributed.is_main_process():
        run.record.write(status="stopped" if reached_stop_after else "interrupted", seconds=run.seconds())
    if not reached_stop_after:
        raise Stopped
    return False


def _finish(run: _StageRun, trainer: Trainer, final_fields: Callable[[Any, Path], Mapping[str, Any]] | None) -> None:
    """Chooses the checkpoint of a stage that trained to its last step, and records the result."""
    release = run.settings.release
    choice = choose_checkpoint(run.record, release, trainer.args)
    path = run.record.checkpoint_path(choice["step"])
    if release.push_merged:
        save_merged(path, path / MERGED_MODEL, dtype=run.settings.model.dtype)
    stage_fields = dict(final_fields(trainer, path)) if final_fields is not None else {}
    weights = weights_digest(path)
    fields = {"chosen": choice, "weights": weights, "seconds": run.seconds(), "finished": now(), **stage_fields}
    run.record.write(status="finished", **fields)
    if run.publisher is not None:
        run.publisher.notify()


def _run_identity(
    settings: StageSettings, data_lineage: Mapping[str, Any], parent_lineages: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the keys, the data and the parents that identify a run of the stage."""
    # A folder has no fingerprint. `_check_files` compares its files.
    fingerprints = {
        role: lineage["fingerprint"]
        for role, lineage in parent_lineages.items()
        if lineage["fingerprint"] or "files" not in lineage
    }
    return {**settings.resolved, "data": data_lineage.get("fingerprint"), "parents": fingerprints}


def _write_start(
    run: _StageRun,
    identity: Mapping[str, Any],
    parent_lineages: Mapping[str, Mapping[str, Any]],
    data_lineage: Mapping[str, Any],
    optional_fields: Mapping[str, Mapping[str, Any] | None],
) -> None:
    """Writes run.json of a stage that is about to train, and deletes the files of a run that the stage replaces.

    Empty `optional_fields` are not written.
    """
    context, settings, record, publisher = run.context, run.settings, run.record, run.publisher
    stage, old_document = settings.stage, run.plan.old_document
    remote_code = code_lineage(context)  # reads records that may be deleted next
    if run.plan.starts_over:
        record.clear()
        (context.directory / SUMMARY).unlink(missing_ok=True)
        if publisher is not None:
            claim_stage_repository(context, stage)  # without the earlier run's tags, whose records are gone now
    record.write(
        **context.run_json_header(stage, "running", seed=settings.trainer.seed, settings=identity),
        parents={
            role: keep_published_lineage((old_document.get("parents") or {}).get(role) or {}, lineage)
            for role, lineage in parent_lineages.items()
        },
        dataset=keep_published_lineage(old_document.get("dataset") or {}, data_lineage),
        **({"chat_template": template} if (template := _template_lineage(settings)) else {}),
        hub=old_document.get("hub") or context.hub.label,
        publish=old_document.get("publish") if publisher is None else _publish_target(context),
        repo=old_document.get("repo"),
        command=context.command,
        run=context.run_id(stage),
        **({"round": context.round.lineage} if context.round is not None else {}),
        **({"package": dict(context.recipe.package)} if context.recipe.package else {}),
        **{name: dict(value) for name, value in optional_fields.items() if value},
        **({"remote_code": remote_code} if remote_code else {}),
    )


def code_lineage(context: RunContext) -> list[dict[str, Any]]:
    """Lists the remote code (Python files that come with a model) that ran in this process.

    Args:
        context: The run.

    Returns:
        The lineage of each model's code. If run.json of a stage already records the same files, its entry is returned.
    """
    entries = [entry for stage in STAGES for entry in context.record(stage).read().get("remote_code") or ()]
    lineages = [code.lineage for code in executed_code()]
    return [next((entry for entry in entries if entry["files"] == lineage["files"]), lineage) for lineage in lineages]


def _make_plan(
    context: RunContext,
    settings: StageSettings,
    identity: Mapping[str, Any],
    parents: Mapping[str, ParentCheckpoint],
    code: Mapping[str, Any],
    publisher: Publisher | None,
) -> _Plan:
    """Decides whether and how the stage trains. Raises ZooError if the stage cannot start, resume, or be published."""
    stage, recipe_name = settings.stage, context.recipe.name
    record = context.record(stage)
    starts_over = record.run_file.exists() and (context.restart or record.can_be_replaced(identity, recipe_name))
    if not starts_over:
        context.check_settings_unchanged(stage, identity)
    old_document = {} if starts_over else record.read()
    if old_document and record.has_trained:
        _check_files(settings, parents, old_document)
        check_code(code, old_document.get("code"))
    if old_document.get("status") == "finished":
        if publisher is not None:
            record.write(publish=_publish_target(context))
            publisher.notify()
        return _Plan(is_finished=True)
    if publisher is not None and not context.preflight_passed:
        claim_stage_repository(context, stage)
    if publisher is not None and settings.model.use_peft:
        check_base(context, stage, parents)
    if not old_document and not starts_over and any(record.path.glob("checkpoint-*")):
        raise ZooError(f"{record.path} has checkpoints without a run.json: choose another --output_dir.")
    resume_from = None
    if not starts_over:
        record.remove_incomplete_files()
        resume_from = _resumable_checkpoint(record)
        record.truncate_metrics(checkpoint_step(resume_from) if resume_from else -1)
    return _Plan(is_finished=False, starts_over=starts_over, old_document=old_document, resume_from=resume_from)


def _template_lineage(settings: StageSettings) -> dict[str, Any]:
    """Returns the digest of the file that chat_template_path names, for run.json; {} if it does not name a file."""
    path = getattr(settings.trainer, "chat_template_path", None)
    return {"files": digest(Path(path))} if path is not None and Path(path).is_file() else {}


def _check_files(
    settings: StageSettings, parents: Mapping[str, ParentCheckpoint], old_document: Mapping[str, Any]
) -> None:
    """Raises ZooError if a local model or chat template has changed since the stage started."""
    recorded_parents, from_base = old_document.get("parents") or {}, starts_from_base(settings.stage, settings.resolved)
    for role, parent in parents.items():
        title = parent_title(role, from_base=from_base)
        check_unchanged(f"The {title} in {parent.path}", parent.lineage, recorded_parents.get(role))
    path = getattr(settings.trainer, "chat_template_path", None)
    check_unchanged(f"The chat template {path}", _template_lineage(settings), old_document.get("chat_template"))


def _resumable_checkpoint(record: StageRecord) -> Path | None:
    """Returns the last intact checkpoint. Renames later, damaged checkpoints with a warning."""
    problems = record.rename_damaged_checkpoints()
    checkpoint = record.last_checkpoint()
    for problem in problems:
        log.warning(
            "%s: its checkpoint is renamed to damaged-checkpoint-*, and training resumes from %s.",
            problem,
            checkpoint.name if checkpoint is not None else "the start, because no checkpoint is intact",
        )
    return checkpoint


def _publish_target(context: RunContext) -> dict[str, Any]:
    """Returns the Hub and namespace to which the run is published, for `push --resume`."""
    return {"hub": context.hub.label, "namespace": context.namespace, "private": context.private}


def _train(run: _StageRun, trainer: Trainer) -> None:
    """Trains. If an update fails, or a signal ends a wait or an evaluation, the finished updates are saved.

    An evaluation that a signal ended is repeated when training resumes.

    Raises:
        Stopped: A signal ended a wait or an evaluation.
        UpdateFailed: An update failed. If a step was saved, the message names it.
    """
    resume_from, record = run.plan.resume_from, run.record
    try:
        if resume_from is None:
            trainer.train()
            return
        state = TrainerState.load_from_json(str(resume_from / TRAINER_STATE_NAME))
        must_evaluate = _is_evaluation_due(state, record)
        if state.global_step < state.max_steps:
            trainer.args.eval_on_start = must_evaluate
            trainer.train(resume_from_checkpoint=str(resume_from))
            return
        trainer.state = state  # all steps are done, but Trainer.train would train another step
        if must_evaluate:
            trainer._load_from_checkpoint(str(resume_from))
            trainer.evaluate()
    except WaitInterrupted as error:
        _save_finished_updates(trainer, record, error)
        if distributed.is_main_process():
            record.write(status="interrupted", seconds=run.seconds())
        raise Stopped from error
    except UpdateFailed as error:
        if not _save_finished_updates(trainer, record, error):
            raise
        if distributed.is_main_process():
            record.write(status="interrupted", seconds=run.seconds())
        step = trainer.state.global_step
        message = f"{error} Step {step} is saved: run the same command again to resume from it."
        raise type(error)(message) from error.__cause__


def _save_finished_updates(trainer: Trainer, record: StageRecord, error: UpdateFailed | WaitInterrupted) -> bool:
    """Saves the finished updates. Returns False if there are no such updates, or if other processes are still waiting.

    Raises `error` again if the disk is full.
    """
    step = trainer.state.global_step
    others_wait = distributed.process_count() > 1 and not getattr(error, "raised_on_all_processes", False)
    if step == 0 or others_wait:
        return False
    if not (record.checkpoint_path(step) / COMPLETE).is_file():
        try:
            check_room(record)
        except NoRoom:
            raise error from None
        assert trainer.model is not None, "a trainer that has trained has a model"
        trainer._save_checkpoint(trainer.model, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    return True


def _is_evaluation_due(state: TrainerState, record: StageRecord) -> bool:
    """Whether an evaluation was due after the step of `state`, but did not finish."""
    callbacks: Any = state.stateful_callbacks
    control = (callbacks or {}).get("TrainerControl", {}).get("args", {})
    return bool(control.get("should_evaluate")) and not any(
        name.startswith("eval_") for row in record.metrics() if row["step"] == state.global_step for name in row
    )


@contextlib.contextmanager
def _delete_incomplete_on_failure(record: StageRecord) -> Iterator[None]:
    """A context that deletes incomplete checkpoints if training raises `NotFinite` or the disk is full."""
    try:
        yield
    except (NotFinite, NoRoom):
        if distributed.is_main_process():
            record.remove_incomplete_files()
            record.write(status="interrupted")
        raise
    except Exception as error:
        if not distributed.is_main_process():
            raise
        # torch reports a full disk by a RuntimeError that does not state the cause.
        is_out_of_space = isinstance(error, RuntimeError) and shutil.disk_usage(record.path).free < 2**20
        if not is_out_of_space and not is_disk_full(error):
            raise
        record.remove_incomplete_files()
        record.write(status="interrupted")
        raise ZooError(
            f"The disk of {record.path} is full: free some space, then run the same command again to resume from the "
            "last checkpoint."
        ) from error


def _add_callbacks(
    run: _StageRun, trainer: Trainer, stop: Interruptible, finish_checkpoint: Callable[[Trainer, Path], None] | None
) -> StageCallback:
    """Adds the stage's callbacks to a trainer."""
    from transformers import PrinterCallback

    context, settings, record = run.context, run.settings, run.record
    trainer.remove_callback(PrinterCallback)
    if hasattr(trainer, "_total_train_tokens"):  # a trl trainer; PPOTrainer saves its own averages
        trainer.add_callback(RunningMetrics(trainer))

    def after_save() -> None:
        record.write(seconds=run.seconds())  # now, because the process may be killed; a resumed run adds its own time
        unsent: set[int] = set()
        if run.publisher is not None:
            run.publisher.notify()
            unpublished_paths = unsent_checkpoints(record, context.repo(settings.stage), hub_label=context.hub.label)
            unsent = {checkpoint_step(path) for path in unpublished_paths}
        protected_steps = unsent | steps_to_protect(record, settings.release, settings.trainer)
        delete_old_checkpoints(record, keep=settings.save_total_limit, protected_steps=protected_steps)
        delete_old_optimizer_states(record, keep=settings.release.save_optimizer_limit)

    finish = None if finish_checkpoint is None else functools.partial(finish_checkpoint, trainer)
    callback = StageCallback(
        record, stop, finish_checkpoint=finish, after_save=after_save, stop_after=context.stop_after
    )
    trainer.add_callback(callback)
    if isinstance(phases := getattr(trainer, "phases", None), Phases):
        phases.listener = callback.show_phase
    return callback
