"""`rlhf-zoo reproduce`: reruns the stage of a published checkpoint, and compares the two checkpoints.

The stage starts from the published checkpoints of earlier stages, at the commits that the card names.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ZooError
from ...fileio import hub_id, now, read_json, write_json, write_text
from ...hub.client.claims import RECIPE_FILE
from ...hub.client.connect import Hub
from ...hub.client.publish import checkpoint_files
from ...hub.client.refs import resolve, try_hub_then_source
from ...hub.client.refusals import client_errors, reason, translate_hub_errors
from ...hub.client.trees import fetch_dataset
from ...modeling.integrity import check_integrity
from ...modeling.sampling.sampler import SAMPLER_VERSION
from ...plugins import load_object
from ...publishing.adapters import file_overrides
from ...publishing.catalog.family import clean
from ...rewards.loading import find_loader
from ...runs.context import RunContext, environment_info
from ...runs.corpus_data import configuration_digests, corpus_settings, split_files
from ...runs.dataset import data_source
from ...runs.lock import LOCK, sole_writer
from ...runs.record import COMPLETE, StageRecord, fingerprint
from ...runs.registry import PARENT_TITLES, REWARD_ROLES
from ...runs.trusted_names import LOADERS
from ..run_recipe import run_stage
from .differences import compare_files, compare_metrics, compare_settings, compare_versions, compare_weights
from .published import PublishedCheckpoint, comparable_settings, fetch_published, named_objects, recipe_of

if TYPE_CHECKING:
    from rich.console import Console

RESULT_FILE = "reproduce.json"
SCHEMA = 1
#: Thread counts above this are ignored, because a published card is not trusted.
_MAX_THREADS = 1024
#: Maximum number of differing metrics in the table.
_MAX_METRIC_ROWS = 12


def reproduce(
    name: str, *, hub: Hub, directory: Path | None = None, allowed_names: Sequence[str] = (), command: str = ""
) -> dict[str, Any]:
    """Trains a published checkpoint again, up to its step, and compares the two checkpoints.

    An earlier attempt in the directory is continued. A finished attempt is only compared again.

    Args:
        name: NAMESPACE/NAME[@REVISION], or a pulled folder.
        hub: The Hub that has the checkpoint and its parents.
        directory: The run directory; None for runs/reproduce/NAMESPACE--NAME@REV or runs/reproduce/FOLDER.
        allowed_names: Names of Python objects from the download that the user allows to be imported.
        command: The command line, for run.json.

    Returns:
        The comparison, which is also written to reproduce.json in the directory: bit_equal (weights, other files and
        metrics; not versions), weights, files, metrics, settings, data, versions, notes, and the checkpoint's name.

    Raises:
        ZooError: Before training, a file, model or data set is missing or not trusted; or training ends before the
            published step.
    """
    published = fetch_published(name, hub)
    recipe, pinned_checkpoints = recipe_of(published, allowed_names)
    context = RunContext(
        recipe=recipe,
        directory=directory or Path("runs") / "reproduce" / published.folder_name,
        hub=hub,
        namespace="local",
        publish=False,
        command=command,
        pinned_checkpoints=pinned_checkpoints,
        stop_after=published.step,
        preflight_passed=True,  # nothing is evaluated
    )
    if context.directory.exists() and not context.directory.is_dir():
        raise ZooError(f"{context.directory} is a file, not a directory: choose another --output_dir.")
    with sole_writer(context.directory, command=command):
        return _reproduce(published, context)


def _reproduce(published: PublishedCheckpoint, context: RunContext) -> dict[str, Any]:
    result_file = context.directory / RESULT_FILE
    _check_directory(context.directory, published)
    context.settings(published.stage)
    for _, object_name, group in named_objects(published):
        if group == LOADERS:
            find_loader(object_name)
        else:
            load_object(object_name, group=group)
    rounding_notes = _note_rounded_parents(published, context)
    if not result_file.is_file():
        write_json(result_file, {**_identity(published), "begun": now()})
    data, data_notes = _prepare_data(context, published)
    start_time = time.monotonic()
    record = context.record(published.stage)
    checkpoint = record.checkpoint_path(published.step)
    must_train = not (checkpoint / COMPLETE).is_file()
    if must_train:
        with _use_threads(published.versions.get("threads")):
            run_stage(context, published.stage)
    if not (checkpoint / COMPLETE).is_file():
        raise ZooError(
            f"The run in {record.path} ended before step {published.step}, the step of {published.name}, so the "
            "published recipe.json is from another run: choose another checkpoint."
        )
    check_integrity(checkpoint)
    document = {
        **_identity(published),
        "directory": str(context.directory),
        "seconds": round(time.monotonic() - start_time, 1) if must_train else None,
        **_compare(published, context, checkpoint),
        "data": _compare_data(context.directory / "data", data),
        "notes": [*_make_notes(published), *rounding_notes, *data_notes],
    }
    write_json(result_file, document)
    return document


def _note_rounded_parents(published: PublishedCheckpoint, context: RunContext) -> list[str]:
    """Returns a note for each parent with rounded published weights; the run itself started from exact weights."""
    notes = []
    for role in ("sft", *REWARD_ROLES):
        if (parent := published.parent(role)) is not None:
            recipe_file = resolve("@".join(parent), context.hub, is_repository=True).path / RECIPE_FILE
            dtype = read_json(recipe_file).get("push_dtype") if recipe_file.is_file() else None
            if dtype is not None:
                notes.append(
                    f"the {PARENT_TITLES[role]} was published in {clean(str(dtype))}, but the run started from the "
                    "weights before rounding: figures will be close, but not bit-equal"
                )
    return notes


def _identity(published: PublishedCheckpoint) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": published.name,
        "commit": published.commit,
        "fingerprint": fingerprint(published.settings),
        "stage": published.stage,
        "recipe": published.card["recipe"],
        "step": published.step,
    }


def _check_directory(directory: Path, published: PublishedCheckpoint) -> None:
    """Raises ZooError if the directory has files other than those of an earlier reproduction of this checkpoint."""
    result_file = directory / RESULT_FILE
    if result_file.is_file():
        result, identity = read_json(result_file), _identity(published)
        keys = ("commit", "fingerprint", "stage", "step")
        if not isinstance(result, dict) or any(result.get(key) != identity[key] for key in keys):
            raise ZooError(f"{directory} holds the reproduction of another checkpoint: choose another --output_dir.")
        return
    if directory.is_dir() and any(path.name != LOCK for path in directory.iterdir()):
        raise ZooError(f"{directory} has files that do not belong to a reproduction: choose another --output_dir.")


@contextlib.contextmanager
def _use_threads(recorded_count: Any) -> Iterator[None]:
    """Sets torch's thread count to that of the published run, because it affects how sums are split and rounded."""
    previous = torch.get_num_threads()
    count = int(recorded_count) if str(recorded_count).isdecimal() else previous
    torch.set_num_threads(count if 1 <= count <= _MAX_THREADS else previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


# Data


def _prepare_data(context: RunContext, published: PublishedCheckpoint) -> tuple[dict[str, Any], list[str]]:
    """Prepares the stage's data before training. Returns {repo, commit, how, folder} of the data, and notes.

    `folder` holds the published data set for the comparison; it is None if no data set was published or it cannot be
    fetched, or if the stage itself loads the data.
    """
    config, parent = context.shared, published.parent("data")
    repo, commit = parent or (None, None)
    notes: list[str] = []
    if config.corpus is None:
        name, revision = config.dataset_name, config.dataset_revision
        _check_data_set(str(name), revision, context.hub)
        if revision is None:
            notes.append(f"the published run did not pin {name}: its current revision was loaded")
        return {"repo": name, "commit": revision, "how": f"loaded from {name}", "folder": None}, notes
    data: dict[str, Any] = {"repo": repo, "commit": commit, "how": "prepared again by its corpus", "folder": None}
    if parent is None:
        notes.append("the data set was never published: the output of the corpus could not be compared with it")
    else:
        try:
            data["folder"] = fetch_dataset(context.hub, parent[0], revision=parent[1], patterns=["*/*.jsonl"])
        except client_errors() as error:
            notes.append(f"the data set {repo} at {commit} could not be compared ({reason(error)})")
    if config.dataset_name is not None and (hub_id(config.dataset_name) is None or Path(config.dataset_name).exists()):
        if data["folder"] is None:
            raise ZooError(
                f"The data of {published.name} were made from {clean(config.dataset_name)}, a folder on the machine "
                f"that published it, and the data set is not available ({'; '.join(notes)}), so the checkpoint "
                "cannot be reproduced."
            )
        _copy_data(context, data["folder"])
        data["how"] = (
            f"taken as published: its corpus reads {clean(config.dataset_name)}, a folder on the publisher's machine"
        )
    data_source(context)
    return data, notes


def _check_data_set(name: str, revision: str | None, hub: Hub) -> None:
    def check(candidate: Hub) -> None:
        title = f"The data set {f'{name}@{revision}' if revision else name} cannot be loaded from {candidate.name}"
        with translate_hub_errors(title, "check --hub and the token."):
            candidate.api().dataset_info(name, revision=revision)

    try_hub_then_source(name, hub, check)


def _copy_data(context: RunContext, folder: Path) -> None:
    """Copies the rows of published data, without the card, into the folder for the corpus's data."""
    import yaml

    record, config = context.record("data"), context.shared
    if record.read().get("status") == "finished":
        return
    splits: dict[str, list[dict[str, str]]] = {}
    for name in split_files(folder):
        target = record.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, target)
        splits.setdefault(target.parent.name, []).append({"split": target.stem, "path": name})
    front_matter = {"configs": [{"config_name": name, "data_files": files} for name, files in splits.items()]}
    write_text(record.path / "README.md", f"---\n{yaml.safe_dump(front_matter)}---\n")
    resolved = corpus_settings(config)
    record.write(
        stage="data",
        recipe=context.recipe.name,
        status="finished",
        fingerprint=fingerprint(resolved),
        resolved=resolved,
        versions=environment_info(),
        repo=None,
        files=configuration_digests(record.path),
    )


def _compare_data(run_folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the stage's data files. Returns {repo, commit, how, compared, differing}."""
    published_folder = data["folder"]
    names = [] if published_folder is None else split_files(published_folder)
    names = [name for name in names if (run_folder / name).is_file()]
    differing = [name for name in names if (published_folder / name).read_bytes() != (run_folder / name).read_bytes()]
    description = {key: data[key] for key in ("repo", "commit", "how")}
    return {**description, "compared": len(names), "differing": differing}


# Comparing


def _compare(published: PublishedCheckpoint, context: RunContext, checkpoint: Path) -> dict[str, Any]:
    record = context.record(published.stage)
    run = record.read()
    with _as_published(context, record, checkpoint) as folder:
        weights = compare_weights(published.folder, folder)
        files = compare_files(published.folder, folder)
    metrics = compare_metrics(published.metrics, record.metrics(), step=published.step)
    card_fingerprint = published.card.get("fingerprint")
    return {
        "bit_equal": not (
            files
            or metrics["problem"]
            or metrics["differing"]
            or any(row["differing"] or row["problem"] for row in weights)
        ),
        "weights": weights,
        "files": files,
        "metrics": metrics,
        "settings": {
            "fingerprint": {"card": card_fingerprint, "recipe": fingerprint(published.settings)},
            "differing": [
                *_card_differences(published, card_fingerprint),
                *compare_settings(
                    comparable_settings(published.settings, published), comparable_settings(run["resolved"], published)
                ),
            ],
        },
        "versions": compare_versions(published.versions, run["versions"]),
    }


@contextlib.contextmanager
def _as_published(context: RunContext, record: StageRecord, checkpoint: Path) -> Iterator[Path]:
    """Yields a folder with the checkpoint as it would be published, for example rounded to `push_dtype`."""
    with tempfile.TemporaryDirectory() as staging:
        folder, override_dir = Path(staging) / "sent", Path(staging) / "altered"
        overrides = file_overrides(context, record, checkpoint, override_dir)
        for name, path in checkpoint_files(checkpoint, include_resume_files=True, overrides=overrides).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.absolute())
        yield folder


def _card_differences(published: PublishedCheckpoint, card_fingerprint: Any) -> list[dict[str, Any]]:
    """Returns settings that differ between recipe.json and the card; [] if they have the same fingerprint."""
    if card_fingerprint == fingerprint(published.settings):
        return []
    settings = published.card.get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    rows = compare_settings(settings, {key: value for key, value in published.settings.items() if key in settings})
    rows = [{**row, "key": f"{row['key']} (card, recipe.json)"} for row in rows]
    return rows or [{"key": "fingerprint (card, recipe.json)", "published": card_fingerprint, "here": "another"}]


def _make_notes(published: PublishedCheckpoint) -> list[str]:
    notes, settings = [], published.settings
    sampler = str(published.versions.get("sampler", "unknown"))
    if published.stage in ("reward", "ppo") and sampler != str(SAMPLER_VERSION):
        notes.append(
            f"the published run used version {clean(sampler)} of the sampler, but this is version {SAMPLER_VERSION}, "
            "which rounds sums differently: figures will be close, but not bit-equal"
        )
    name, revision = settings.get("model_name_or_path"), settings.get("model_revision")
    if published.stage == "sft" and name is not None and revision in (None, "main"):
        notes.append(f"the published run did not pin {clean(str(name))}, its base: the current revision was loaded")
    critic = settings.get("value_model_name_or_path")
    if critic is not None and published.parent("value") is None:
        notes.append(f"no card names the commit of value_model_name_or_path {clean(str(critic))}")
    if published.stage == "reward" and not isinstance(settings.get("ppo"), Mapping):
        notes.append("recipe.json does not record how samples were drawn: temperature 1, at most 64 tokens were used")
    return notes


# Printing


def show(document: Mapping[str, Any], console: "Console") -> None:
    """Prints what was compared, what differs, and the verdict, after cleaning texts of the download.

    Args:
        document: The comparison that `reproduce` returned.
        console: A rich console.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = f"{document['stage']} of {document['recipe']}, step {document['step']}, in {document['directory']}"
    console.print(Text(title))
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "compared", "differ"):
        table.add_column(column, overflow="fold", justify="right" if column == "differ" else "left")
    for name, compared_text, differing_count in _summary(document):
        table.add_row(name, Text(clean(compared_text)), str(differing_count))
    console.print(table)
    if rows := list(_difference_rows(document)):
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("", "what differs", "published", "here"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(clean(cell)) for cell in row))
        console.print(table)
    for note in document["notes"]:
        console.print(Text(f"Note: {clean(note, 400)}."))
    verdict = "Bit-equal" if document["bit_equal"] else "Not bit-equal"
    console.print(Text(f"{verdict}: {document['name']}", style="bold"))


def _summary(document: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yields (part, what was compared, how many differ)."""
    weights, metrics, data = document["weights"], document["metrics"], document["data"]
    tensors, differing = (sum(row[key] for row in weights) for key in ("tensors", "differing"))
    yield "weights", f"{tensors} tensors in {', '.join(row['file'] for row in weights)}", differing
    yield "metrics", f"{metrics['rows']} rows of {metrics['columns']} columns", len(metrics["differing"])
    yield "files", "configuration, tokenizer and all others except weights", len(document["files"])
    files = f", {data['compared']} files" if data["compared"] else ""
    yield "data", data["how"] + files, len(data["differing"])
    yield "settings", "recipe.json, its card and this run", len(document["settings"]["differing"])
    yield "versions", "packages and machine", len(document["versions"])


def _difference_rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in document["weights"]:
        if row["problem"]:
            yield "weights", row["file"], row["problem"], ""
        if row["worst"] is not None:
            largest, relative = (
                "not finite" if row[key] is None else f"{row[key]:.3g}" for key in ("max_abs", "max_rel")
            )
            distance = f"max |a − b| {largest} ({row['worst']}), max relative {relative}"
            yield "weights", row["file"], f"{row['differing']} of {row['tensors']} tensors differ", distance
    for row in document["files"]:
        yield "files", row["file"], row["problem"], ""
    metrics = document["metrics"]
    if metrics["problem"]:
        yield "metrics", "rows", metrics["problem"], ""
    for row in metrics["differing"][:_MAX_METRIC_ROWS]:
        distance = "no number on one side" if row["max_abs"] is None else f"max |a − b| {row['max_abs']:.3g}"
        yield "metrics", row["column"], f"{row['rows']} of {row['of']} rows, from step {row['first_step']}", distance
    if (remaining := len(metrics["differing"]) - _MAX_METRIC_ROWS) > 0:
        yield "metrics", f"and {remaining} more columns", "", ""
    for name in document["data"]["differing"]:
        yield "data", name, "has different content", ""
    for row in document["settings"]["differing"]:
        yield "settings", row["key"], str(row["published"]), str(row["here"])
    for row in document["versions"]:
        yield "versions", row["name"], *(str(row[side] or "not recorded") for side in ("published", "here"))
