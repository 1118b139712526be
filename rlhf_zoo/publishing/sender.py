"""Decides what to upload next from a run directory, and uploads it.

The state is read from disk every time, so if this process is killed, another one can continue. Data that a corpus
generated are sent first. Then, stage by stage, the checkpoints that `push_steps` selects are sent in order, each as a
commit with a tag. After a stage has finished, its chosen checkpoint becomes `main`, with the final card. If an
evaluation is still to choose the checkpoint, the last one is `main` until then.
"""

import hashlib
import logging
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import write_json
from ..hub.client import claims
from ..hub.client.claims import RECIPE_FILE
from ..hub.client.connect import Hub
from ..hub.client.links import find_outward_link, is_inside
from ..hub.client.publish import (
    MERGED_MODEL,
    PUBLISHED_FILE,
    publish_checkpoint,
    publish_on_branch,
    publish_release,
)
from ..hub.client.refusals import client_errors, status_of, translate_hub_errors
from ..hub.client.run_signature import TRUST_RUN_FLAG
from ..hub.client.step_tags import tag_name, tagged_steps
from ..modeling.integrity import check_integrity
from ..runs.checkpoint_choice import checkpoints_to_keep, chosen_is_best
from ..runs.context import RunContext
from ..runs.corpus_data import forget_lost_data, has_pending_data, send_data
from ..runs.record import StageRecord, checkpoint_step
from ..runs.registry import STAGES
from .adapters import file_overrides
from .cards.card import make_card
from .cards.facts import FRONTIER
from .collections import collect
from .events import write_events
from .sent_checkpoints import published_tags, unsent_checkpoints

log = logging.getLogger(__name__)

# HTTP statuses with which a Hub answers if it has no Collections, or if the token may not write them.
NO_COLLECTIONS_STATUSES = (400, 401, 403, 404)


@dataclass(frozen=True)
class Upload:
    """An upload of one part of a run.

    Attributes:
        description: What it sends, for messages.
        send: Uploads that part. After a failure it can be called again, and skips what was already sent.
    """

    description: str
    send: Callable[[], None]


class Sender:
    """Sends the files of a run directory that the Hub does not have. Not thread-safe.

    Args:
        context: The run.
        stages: The stages to send; None for those whose run.json names this Hub and namespace.
        resend_cards: Whether to send the final cards again, even if nothing changed.

    Raises:
        ZooError: Another user wrote a part of the run, and it links to files elsewhere or claims to be part of a run
            that this user wrote.
    """

    def __init__(
        self, context: RunContext, *, stages: tuple[str, ...] | None = None, resend_cards: bool = False
    ) -> None:
        _check_links(context)
        self._context = context
        self._stages = stages
        self._checked: set[str] = set()  # stages whose state on the Hub was checked, and "data"
        self._cards_to_resend = set(STAGES) if resend_cards else set()

    def remaining_uploads(self) -> list[str]:
        """Returns descriptions of the remaining uploads, in order."""
        return [upload.description for upload in self._uploads()]

    def next_upload(self) -> Upload | None:
        """Returns the next upload; None if the Hub has everything."""
        return next(self._uploads(), None)

    def _uploads(self) -> Iterator[Upload]:
        context = self._context
        stages = [stage for stage in STAGES if self._is_selected(context.record(stage), stage)]
        if not stages:
            return
        has_data_repo = bool(context.record("data").read().get("repo"))
        if "data" not in self._checked and (has_pending_data(context) or has_data_repo):
            yield Upload(f"the state of {context.dataset_repo}", self._check_data)
        if has_pending_data(context):
            yield Upload("the data", lambda: send_data(context))
        for stage in stages:
            yield from self._stage_uploads(context.record(stage), stage)
        if self._is_collection_due(stages):
            yield Upload(f"the Collection of {context.recipe.name}", lambda: self._collect(stages))

    def _is_collection_due(self, stages: list[str]) -> bool:
        """Whether all stages are released, and run.json does not yet record a Collection of their repositories."""
        context = self._context
        covers_run = set(stages) >= set(context.recipe.stages)
        if not covers_run or not all(context.record(stage).read().get("released") for stage in stages):
            return False
        collection = context.record(stages[-1]).read().get("collection") or {}
        repos = [context.repo(stage) for stage in stages]
        return (collection.get("hub"), collection.get("repos")) != (context.hub.label, repos)

    def _collect(self, stages: list[str]) -> None:
        """Groups the run's repositories into a Collection. Only warns if the Hub or the token does not allow it."""
        context = self._context
        repos = {context.repo(stage): stage for stage in stages}
        try:
            slug = collect(context.recipe.name, context.namespace, repos, private=context.private, hub=context.hub)
        except ZooError as error:
            cause = error.__cause__
            # The outbox retries after an error of the Hub's client, so raise that.
            if isinstance(cause, client_errors()) and status_of(cause) not in NO_COLLECTIONS_STATUSES:
                raise cause from None
            log.warning("%s", error)
            slug = None
        collection = {"hub": context.hub.label, "repos": list(repos), "slug": slug}
        context.record(stages[-1]).write(collection=collection)

    def _is_selected(self, record: StageRecord, stage: str) -> bool:
        document, context = record.read(), self._context
        if self._stages is not None:
            return bool(document) and stage in self._stages
        destination = document.get("publish") or {}
        return (destination.get("hub"), destination.get("namespace")) == (context.hub.label, context.namespace)

    def _stage_uploads(self, record: StageRecord, stage: str) -> Iterator[Upload]:
        repo, hub_label = self._context.repo(stage), self._context.hub.label
        # Read this before listing the checkpoints, because a stage that ends in between may add one.
        document = record.read()
        checkpoints = unsent_checkpoints(record, repo, hub_label=hub_label)
        lacks_chosen_checkpoint = document.get("status") == "finished" and record.chosen_checkpoint() is None
        if stage not in self._checked and (
            checkpoints or lacks_chosen_checkpoint or published_tags(record, repo, hub_label=hub_label)
        ):
            yield Upload(f"the state of {repo}", lambda: self._check_repository(record, stage))
        for path in checkpoints:
            yield Upload(f"step {checkpoint_step(path)} of {stage}", partial(self._send, record, stage, path))
        if document.get("status") == "finished":
            digest = self._release_digest(record)
            if stage in self._cards_to_resend or document.get("released") != digest:
                yield Upload(f"the card of {stage}", lambda: self._release(record, stage, digest))

    def _check_data(self) -> None:
        forget_lost_data(self._context)
        self._checked.add("data")

    def _check_repository(self, record: StageRecord, stage: str) -> None:
        """Claims a stage's repository before the first commit, and forgets acknowledged commits that it has lost."""
        # Restore a missing chosen checkpoint first, while run.json still names the repository that has it.
        self._context.restore_chosen_checkpoint(stage)
        _claim(self._context, stage)
        _forget_lost_commits(record, self._context.repo(stage), self._context.hub)
        self._pin_lineage(record)
        self._checked.add(stage)

    def _pin_lineage(self, record: StageRecord) -> None:
        """Adds to run.json the commits of parents and data that were sent after the stage began."""
        document = record.read()
        parents = {role: self._pin_parent(role, parent) for role, parent in (document.get("parents") or {}).items()}
        data = dict(document.get("dataset") or {})
        data_run = self._context.record("data").read()
        is_same_data = data_run.get("repo") and data_run.get("fingerprint") == data.get("fingerprint")
        if is_same_data and not self._is_pinned(data, self._context.dataset_repo):
            repo = data_run["repo"]
            data |= {"repo": repo["id"], "commit": repo["commit"], "hub": repo["hub"]}
        record.write(parents=parents, dataset=data)

    def _is_pinned(self, parent: Mapping[str, Any], repo: str) -> bool:
        """Whether a parent or data set names a commit in `repo`, the repository where this run publishes it."""
        hub_label = self._context.hub.label
        return bool(parent.get("commit")) and (parent.get("hub", hub_label), parent.get("repo")) == (hub_label, repo)

    def _pin_parent(self, role: str, parent: Mapping[str, Any]) -> dict[str, Any]:
        record = self._context.record(role) if role in STAGES else None
        repo = self._context.repo(role)
        if record is None or self._is_pinned(parent, repo) or not str(parent.get("path")).startswith("checkpoint-"):
            return dict(parent)
        if record.read().get("fingerprint") != parent.get("fingerprint"):
            return dict(parent)  # the parent stage was trained again since
        tag = tag_name(checkpoint_step(parent["path"]))
        commit = published_tags(record, repo, hub_label=self._context.hub.label).get(tag)
        location = {"repo": repo, "commit": commit, "tag": tag, "hub": self._context.hub.label}
        return {**parent, **location} if commit else dict(parent)

    def _send(self, record: StageRecord, stage: str, checkpoint: Path) -> None:
        context, step = self._context, checkpoint_step(checkpoint)
        repo, hub_label = context.repo(stage), context.hub.label
        # Record the repository before the first commit, because the card names it.
        self._record_repository(record, repo, published_tags(record, repo, hub_label=hub_label))
        with tempfile.TemporaryDirectory() as extra_folder, tempfile.TemporaryDirectory() as override_folder:
            write_extra_files(record, Path(extra_folder), stage, step=step)
            include_resume_files = bool(record.read()["resolved"].get("push_optimizer"))
            check_integrity(checkpoint, for_resuming=include_resume_files)
            publication = publish_checkpoint(
                checkpoint,
                repo,
                run_id=context.run_id(stage),
                hub=context.hub,
                extra_files=Path(extra_folder),
                message=f"{context.recipe.name} {stage}: step {step}",
                step=step,
                include_resume_files=include_resume_files,
                overwrite=context.overwrite,
                overrides=file_overrides(context, record, checkpoint, Path(override_folder)),
            )
        tags = {**published_tags(record, repo, hub_label=hub_label), publication["tag"]: publication["commit"]}
        self._record_repository(record, repo, tags)

    def _release(self, record: StageRecord, stage: str, digest: str) -> None:
        context, repo = self._context, self._context.repo(stage)
        context.restore_chosen_checkpoint(stage)
        checkpoint = record.chosen_checkpoint()
        if checkpoint is None:
            raise ZooError(f"{record.path} is finished but holds no checkpoint to publish: train it with --restart.")
        tag = tag_name(checkpoint_step(checkpoint))
        tags = published_tags(record, repo, hub_label=context.hub.label)
        has_best = chosen_is_best(record)
        step_tags = {name: commit for name, commit in tags.items() if name != "best"}
        # Record the tag `best` first, because the card names it and is part of the commit that the tag will point to.
        self._record_repository(record, repo, {"best": tags[tag], **tags} if has_best else step_tags)
        with tempfile.TemporaryDirectory() as extra_folder, tempfile.TemporaryDirectory() as override_folder:
            write_extra_files(record, Path(extra_folder), stage, step=None)
            include_resume_files = bool(record.read()["resolved"].get("push_optimizer"))
            check_integrity(checkpoint, for_resuming=include_resume_files)
            commit = publish_release(
                checkpoint,
                repo,
                run_id=context.run_id(stage),
                extra_files=Path(extra_folder),
                message=f"{context.recipe.name} {stage}: card of {tag}",
                tag_message=f"{tag}, with the card of the finished run" if has_best else None,
                hub=context.hub,
                include_resume_files=include_resume_files,
                overrides=file_overrides(context, record, checkpoint, Path(override_folder)),
            )
            if record.read()["resolved"].get("push_merged"):
                self._release_merged(
                    record, stage, checkpoint, Path(extra_folder), Path(override_folder) / MERGED_MODEL
                )
        self._record_repository(record, repo, {**tags, "best": commit} if has_best else step_tags)
        record.write(released=digest)
        self._cards_to_resend.discard(stage)
        self._prune(record)

    @staticmethod
    def _prune(record: StageRecord) -> None:
        """Deletes the checkpoints that were kept only to be uploaded. Before the evaluation chooses one, keeps all."""
        kept_paths = checkpoints_to_keep(record)
        for path in record.checkpoints():
            if path not in kept_paths:
                record.remove_checkpoint(path)

    def _release_merged(
        self, record: StageRecord, stage: str, checkpoint: Path, folder: Path, override_folder: Path
    ) -> None:
        """Sends the chosen checkpoint, with its adapter merged and a card of its own, to the branch `merged`."""
        make_card(record.path, out=folder, merged=True, is_trusted=_is_trusted(record))
        check_integrity(checkpoint / MERGED_MODEL)
        context = self._context
        commit = publish_on_branch(
            checkpoint / MERGED_MODEL,
            context.repo(stage),
            run_id=context.run_id(stage),
            extra_files=folder,
            message=f"{context.recipe.name} {stage}: {tag_name(checkpoint_step(checkpoint))}, adapter merged",
            branch=MERGED_MODEL,
            overrides=file_overrides(context, record, checkpoint / MERGED_MODEL, override_folder),
            hub=context.hub,
        )
        record.write(merged=commit)

    def _record_repository(self, record: StageRecord, repo: str, tags: Mapping[str, str]) -> None:
        record.write(hub=self._context.hub.label, repo=_repository_entry(repo, tags))

    def _release_digest(self, record: StageRecord) -> str:
        """Returns a digest that changes whenever the final card would change.

        It covers the Hub, the repository, the end of the run, and the files of the evaluation and the baselines.
        """
        document, eval_folder = record.read(), self._context.record("eval").path
        repo = self._context.repo(document["stage"])
        run_end = {key: document.get(key) for key in ("finished", "chosen", "fingerprint", "reward_model")}
        digest = hashlib.sha256(repr((sorted(run_end.items()), repo)).encode())
        digest.update(self._context.hub.label.encode())
        for path in (eval_folder / "evaluation.json", eval_folder / "samples.jsonl", eval_folder.parent / FRONTIER):
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()


def _check_links(context: RunContext) -> None:
    """Checks that a run of another user has no links to files elsewhere. Warns that it is sent without figures.

    Such a link could make `push` publish any file of this machine. All folders of the run are checked, because cards,
    metrics and data are made from files next to the checkpoints. The user's own runs may contain links, for example to
    a stage on another disk.

    Raises:
        ZooError: There is such a link, or the run claims to be part of a run that this user wrote.
    """
    records = [context.record(name) for name in ("data", *STAGES, "eval")]
    are_own = [record.is_own() for record in records if record.run_file.is_file()]
    if all(are_own):
        return
    if context.base is not None and any(are_own):
        raise ZooError(
            f"{context.directory} was not written by your rlhf-zoo but claims to be part of your run in "
            f"{context.base}, so neither was sent. Move it elsewhere, or add {TRUST_RUN_FLAG} if you trust it."
        )
    folders = [*(record.path for record in records), context.record("eval").path.parent / Path(FRONTIER).parent]
    for folder in folders:
        link = None if is_inside(folder, folder.parent) else folder
        if link is None and (inner := find_outward_link(folder, include_hidden=True)) is not None:
            link = folder / inner
        if link is not None:
            raise ZooError(
                f"{link} links to a file outside its folder, and this run was not written by your rlhf-zoo, so it was "
                f"not sent. Replace the link with the file, or add {TRUST_RUN_FLAG} if you trust this run."
            )
    log.warning(
        "%s was not written by your rlhf-zoo, or was changed since: it is sent without figures. Add %s if you trust "
        "this run.",
        context.directory,
        TRUST_RUN_FLAG,
    )


def _is_trusted(record: StageRecord) -> bool:
    """Whether this user wrote or trusts a stage and its run's evaluation, so that a card may show their figures."""
    records = (record, StageRecord(record.path.parent / "eval"))
    return all(other.is_own() for other in records if other.run_file.is_file())


def write_extra_files(record: StageRecord, folder: Path, stage: str, *, step: int | None) -> None:
    """Writes the files that accompany a checkpoint in its commit: card, plots, metrics, events and recipe.

    If this user neither wrote nor trusts the run, the card has no figures, and metrics and events are left out.

    Args:
        record: The stage's directory.
        folder: Folder for the files.
        stage: Name of the stage.
        step: Step of the checkpoint; later metrics are left out. None for the end of the run.
    """
    is_trusted = _is_trusted(record)
    make_card(record.path, out=folder, step=step, is_trusted=is_trusted)
    copied_record = StageRecord(folder)
    if is_trusted and record.metrics_file.exists():
        shutil.copy(record.metrics_file, copied_record.metrics_file)
        if step is not None:
            copied_record.truncate_metrics(step)
        write_events(copied_record.metrics(), folder, stage=stage)
    write_json(folder / RECIPE_FILE, record.read()["resolved"])


def claim_stage_repository(context: RunContext, stage: str) -> None:
    """Claims a stage's repository for this run before training, so that no other run writes there.

    Args:
        context: The run.
        stage: Name of the stage.

    Raises:
        ZooError: The repository belongs to another run and --overwrite_repo was not given; it has a step's tag that
            run.json does not record as sent and whose checkpoint is not on disk; or the token may not write there.
    """
    record, repo = context.record(stage), context.repo(stage)
    failure = f"Cannot write to {repo} on {context.hub.description}"
    with translate_hub_errors(failure, "check --namespace and the token, or try again when the Hub answers."):
        _claim(context, stage)
        acknowledged_tags = published_tags(record, repo, hub_label=context.hub.label)
        tags_on_disk = {tag_name(checkpoint_step(path)) for path in record.checkpoints()}
        existing_tags = tagged_steps(claims.all_tags(repo, hub=context.hub)).values()
    if lost_tags := sorted({*existing_tags} - {*acknowledged_tags, *tags_on_disk}):
        raise ZooError(
            f"{repo} on {context.hub.label} has the tag {lost_tags[0]} for weights that {record.path} no longer holds, "
            "and a step's tag is never moved: pass --restart or --overwrite_repo to replace the repository, or publish "
            "under another --namespace."
        )


def _claim(context: RunContext, stage: str) -> None:
    record, repo, hub_label = context.record(stage), context.repo(stage), context.hub.label
    # A step that was trained again is unsent. Its tag on the Hub has other weights, and must not count as published.
    unsent_tags = {tag_name(checkpoint_step(path)) for path in unsent_checkpoints(record, repo, hub_label=hub_label)}
    claims.claim_repository(
        repo,
        context.run_id(stage),
        sent_tags={
            tag: commit
            for tag, commit in published_tags(record, repo, hub_label=hub_label).items()
            if tag not in unsent_tags
        },
        overwrite=context.overwrite,
        drop_old_tags=context.drop_old_tags,
        private=context.private,
        run_name=f"{context.recipe.name} {stage}",
        hub=context.hub,
    )


def keep_published_lineage(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parent's current lineage, with the published commit that run.json records if the parent is unchanged.

    Args:
        recorded: The parent's lineage in run.json.
        current: The parent's current lineage.
    """
    if recorded.get("fingerprint") != current.get("fingerprint") or not recorded.get("commit"):
        return dict(current)
    return {**current, **{key: recorded[key] for key in ("repo", "commit", "tag", "hub") if key in recorded}}


def resume_command(context: RunContext) -> str:
    """Returns the command that sends the remaining files.

    Args:
        context: The run.
    """
    return f"rlhf-zoo push --resume {shlex.quote(str(context.directory))}"


def _forget_lost_commits(record: StageRecord, repo: str, hub: Hub) -> None:
    """Marks checkpoints as not sent if their tags on the Hub are gone or moved, as after a claim by another run."""
    sent_tags, tags_on_hub = published_tags(record, repo, hub_label=hub.label), claims.all_tags(repo, hub=hub)
    intact_tags = {tag: commit for tag, commit in sent_tags.items() if tags_on_hub.get(tag) == commit}
    if intact_tags == sent_tags:
        return
    for checkpoint in record.checkpoints():
        if tag_name(checkpoint_step(checkpoint)) not in intact_tags:
            (checkpoint / PUBLISHED_FILE).unlink(missing_ok=True)
    record.write(repo=_repository_entry(repo, intact_tags) if intact_tags else None, released=None)


def _repository_entry(repo: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """Returns the entry `repo` of run.json. Its commit is that of the tag `best`, or else of the last tag."""
    return {"id": repo, "commit": tags.get("best") or next(reversed(list(tags.values())), None), "tags": dict(tags)}
