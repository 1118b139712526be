"""`rlhf-zoo reproduce`: runs the one stage that made a published checkpoint again, and compares the two.

The stages before it are not run: it starts from their published checkpoints, at the commits that its card names.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import ZooError
from ...fileio import hub_id, now, read_json, write_json, write_text
from ...hub.client.claims import RECIPE_FILE
from ...hub.client.connect import Hub
from ...hub.client.publish import checkpoint_files
from ...hub.client.refs import ask, resolve
from ...hub.client.refusals import client_errors, reason, refusals_as
from ...modeling.integrity import check_integrity
from ...modeling.sampling.sampler import SAMPLER
from ...plugins import load_object
from ...publishing.adapters import sent_instead
from ...publishing.catalog.family import clean
from ...rewards.loading import find_loader
from ...runs.context import RunContext, versions
from ...runs.dataset import data_source
from ...runs.lock import LOCK, sole_writer
from ...runs.prepared import configuration_digests, corpus_settings, split_files
from ...runs.record import COMPLETE, StageRecord, fingerprint
from ...runs.registry import PARENT_TITLES, REWARD_ROLES
from ...runs.trusted_names import LOADERS
from ..run_recipe import run_stage
from .differences import compare_files, compare_metrics, compare_settings, compare_versions, compare_weights, contents
from .published import Published, comparable, fetch, named_objects, recipe_of

NOTE = "reproduce.json"
SCHEMA = 1
_MOST_THREADS = 1024
_SHOWN = 12


def reproduce(
    name: str, *, hub: Hub, directory: Path | None = None, allowed: Sequence[str] = (), command: str = ""
) -> dict[str, Any]:
    """Makes a published checkpoint again, up to its step, and says how the two compare, also in its reproduce.json.

    name: NAMESPACE/NAME[@REVISION], or a folder that was pulled. directory: None is runs/reproduce/NAMESPACE--NAME@REV.
    What it holds of an earlier try is gone on with, and compared again where that was finished. allowed: Python objects
    that may be imported although only the download names them.

    Keys of the answer: bit_equal (weights, files beside them, and metrics; not the versions), weights, files, metrics,
    settings, data, versions, notes, and what was made from where. Raises ZooError, before anything trains, for what is
    missing or not to be trusted.
    """
    published = fetch(name, hub)
    recipe, pinned = recipe_of(published, allowed)
    context = RunContext(
        recipe=recipe,
        directory=directory or Path("runs") / "reproduce" / published.title,
        hub=hub,
        namespace="local",
        publish=False,
        command=command,
        pinned=pinned,
        stop_after=published.step,
        checked=True,  # nothing is evaluated
    )
    if context.directory.exists() and not context.directory.is_dir():
        raise ZooError(f"{context.directory} is a file, so no run can be kept in it: give another --output_dir.")
    with sole_writer(context.directory, command=command):
        return _reproduced(published, context)


def _reproduced(published: Published, context: RunContext) -> dict[str, Any]:
    note = context.directory / NOTE
    _check_directory(context.directory, published)
    context.settings(published.stage)
    for _, wanted, group in named_objects(published):
        if group == LOADERS:
            find_loader(wanted)
        else:
            load_object(wanted, group=group)
    rounded = []
    for role in ("sft", *REWARD_ROLES):
        if (at := published.parent(role)) is not None:
            settings = resolve("@".join(at), context.hub, published=True).path / RECIPE_FILE
            dtype = read_json(settings).get("push_dtype") if settings.is_file() else None
            if dtype is not None:
                rounded.append(
                    f"its {PARENT_TITLES[role]} was published in {clean(str(dtype))}, and the run began from the "
                    "weights before they were rounded: these figures come near, and not bit for bit"
                )
    if not note.is_file():
        write_json(note, {**_head(published), "begun": now()})
    data, data_notes = _data(context, published)
    started = time.monotonic()
    record = context.record(published.stage)
    checkpoint = record.checkpoint_path(published.step)
    trained = not (checkpoint / COMPLETE).is_file()
    if trained:
        with _threads(published.versions.get("threads")):
            run_stage(context, published.stage)
    if not (checkpoint / COMPLETE).is_file():
        raise ZooError(
            f"The run in {record.path} ended before step {published.step}, of which {published.name} is: its settings "
            "do not lead there, so its recipe.json is of another run."
        )
    check_integrity(checkpoint)
    document = {
        **_head(published),
        "directory": str(context.directory),
        "seconds": round(time.monotonic() - started, 1) if trained else None,
        **_compared(published, context, checkpoint),
        "data": _compared_data(context.directory / "data", data),
        "notes": [*_notes(published), *rounded, *data_notes],
    }
    write_json(note, document)
    return document


def _head(published: Published) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": published.name,
        "commit": published.commit,
        "fingerprint": fingerprint(published.resolved),
        "stage": published.stage,
        "recipe": published.card["recipe"],
        "step": published.step,
    }


def _check_directory(directory: Path, published: Published) -> None:
    """Raises ZooError where it holds anything but an earlier try to make the same checkpoint."""
    note = directory / NOTE
    if note.is_file():
        before = read_json(note)
        same = ("commit", "fingerprint", "stage", "step")
        if not isinstance(before, dict) or any(before.get(key) != _head(published)[key] for key in same):
            raise ZooError(f"{directory} holds the reproduction of another checkpoint: give another --output_dir.")
        return
    if directory.is_dir() and any(path.name != LOCK for path in directory.iterdir()):
        raise ZooError(f"{directory} holds files that no reproduction wrote: give another --output_dir.")


@contextlib.contextmanager
def _threads(recorded: Any) -> Iterator[None]:
    """As many threads of torch as the published run had: sums are split among them, which decides the last bits."""
    before = torch.get_num_threads()
    count = int(recorded) if str(recorded).isdecimal() else before
    torch.set_num_threads(count if 1 <= count <= _MOST_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Data


def _data(context: RunContext, published: Published) -> tuple[dict[str, Any], list[str]]:
    """Has the stage's data at hand, before anything trains. Returns {repo, commit, how, folder} of it, and notes.

    folder: the published data set, to compare with; None where there is none, or the stage loads it from there.
    """
    shared, at = context.shared, published.parent("data")
    repo, commit = at or (None, None)
    if shared.corpus is None:
        _check_data_set(str(shared.dataset_name), shared.dataset_revision, context.hub)
        notes = []
        if shared.dataset_revision is None:
            notes.append(f"the published run did not pin {shared.dataset_name}: what it holds now was loaded")
        how = f"loaded from {shared.dataset_name}"
        return {"repo": shared.dataset_name, "commit": shared.dataset_revision, "how": how, "folder": None}, notes
    found: dict[str, Any] = {"repo": repo, "commit": commit, "how": "made again by its corpus", "folder": None}
    notes = []
    if at is None:
        notes.append("the data set was never published: what the corpus makes could not be compared with it")
    else:
        try:
            rows = ["*/*.jsonl"]
            found["folder"] = context.hub.snapshot(at[0], repo_type="dataset", revision=at[1], allow_patterns=rows)
        except client_errors() as error:
            notes.append(f"the data set {repo} at {commit} could not be compared ({reason(error)})")
    if shared.dataset_name is not None and (hub_id(shared.dataset_name) is None or Path(shared.dataset_name).exists()):
        if found["folder"] is None:
            raise ZooError(
                f"The data of {published.name} were made from {clean(shared.dataset_name)}, a folder of the machine "
                f"that published it, and its data set is not to be had ({'; '.join(notes)}): it cannot be made again."
            )
        _place(context, found["folder"])
        found["how"] = f"taken as published: its corpus reads {clean(shared.dataset_name)}, a folder of the publisher's"
    data_source(context)
    return found, notes


def _check_data_set(name: str, revision: str | None, hub: Hub) -> None:
    def look(one: Hub) -> None:
        what = f"The data set {f'{name}@{revision}' if revision else name} cannot be had from {one.name}"
        with refusals_as(what, "check --hub and the token."):
            one.api().dataset_info(name, revision=revision)

    ask(name, hub, look)


def _place(context: RunContext, folder: Path) -> None:
    """Puts published data where the corpus would have put what it makes. Only the rows: no word of the card."""
    import yaml

    record, shared = context.record("data"), context.shared
    if record.read().get("status") == "finished":
        return
    splits: dict[str, list[dict[str, str]]] = {}
    for name in split_files(folder):
        target = record.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, target)
        splits.setdefault(target.parent.name, []).append({"split": target.stem, "path": name})
    front = {"configs": [{"config_name": name, "data_files": files} for name, files in splits.items()]}
    write_text(record.path / "README.md", f"---\n{yaml.safe_dump(front)}---\n")
    resolved = corpus_settings(shared)
    record.write(
        stage="data",
        recipe=context.recipe.name,
        status="finished",
        fingerprint=fingerprint(resolved),
        resolved=resolved,
        versions=versions(),
        repo=None,
        files=configuration_digests(record.path),
    )


def _compared_data(here: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """{repo, commit, how, compared, differing}: files of the data set by sha256; those of other stages are left out."""
    published = data["folder"]
    names = [name for name in split_files(published) if (here / name).is_file()] if published is not None else []
    there, made = (contents(folder, names) if names else {} for folder in (published, here))
    source = {key: data[key] for key in ("repo", "commit", "how")}
    return {**source, "compared": len(names), "differing": [name for name in names if there[name] != made[name]]}


# Comparing


def _compared(published: Published, context: RunContext, checkpoint: Path) -> dict[str, Any]:
    record = context.record(published.stage)
    run = record.read()
    with _as_sent(context, record, checkpoint) as made:
        weights = compare_weights(published.folder, made)
        files = compare_files(published.folder, made)
    metrics = compare_metrics(published.metrics, record.metrics(), step=published.step)
    recorded = published.card.get("fingerprint")
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
            "fingerprint": {"card": recorded, "recipe": fingerprint(published.resolved)},
            "differing": [
                *_altered(published, recorded),
                *compare_settings(comparable(published.resolved, published), comparable(run["resolved"], published)),
            ],
        },
        "versions": compare_versions(published.versions, run["versions"]),
    }


@contextlib.contextmanager
def _as_sent(context: RunContext, record: StageRecord, checkpoint: Path) -> Iterator[Path]:
    """A folder that holds a checkpoint as it would be published: rounded, say, where the recipe rounds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, altered = Path(scratch) / "sent", Path(scratch) / "altered"
        overrides = sent_instead(context, record, checkpoint, altered)
        for name, path in checkpoint_files(checkpoint, optimizer=True, overrides=overrides).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.absolute())
        yield folder


def _altered(published: Published, recorded: Any) -> list[dict[str, Any]]:
    """What recipe.json says otherwise than the card, which names the settings that the run was fingerprinted by."""
    if recorded == fingerprint(published.resolved):
        return []
    settings = published.card.get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    known = {key: value for key, value in published.resolved.items() if key in settings}
    rows = compare_settings(settings, known)
    rows = [{"key": f"{row['key']} (card, recipe.json)", **{k: row[k] for k in ("published", "here")}} for row in rows]
    return rows or [{"key": "fingerprint (card, recipe.json)", "published": recorded, "here": "another"}]


def _notes(published: Published) -> list[str]:
    notes, own = [], published.resolved
    sampler = str(published.versions.get("sampler", "unknown"))
    if published.stage in ("reward", "ppo") and sampler != str(SAMPLER):
        notes.append(
            f"it was sampled by version {clean(sampler)} of the sampler, and this is version {SAMPLER}, whose sums are "
            "rounded otherwise: the figures come near, and not bit for bit"
        )
    name, revision = own.get("model_name_or_path"), own.get("model_revision")
    if published.stage == "sft" and name is not None and revision in (None, "main"):
        notes.append(f"the published run did not pin the base model {clean(str(name))}: what it holds now was loaded")
    critic = own.get("value_model_name_or_path")
    if critic is not None and published.parent("value") is None:
        notes.append(f"no card names the commit of value_model_name_or_path {clean(str(critic))}")
    if published.stage == "reward" and not isinstance(own.get("ppo"), Mapping):
        notes.append("recipe.json does not say how its samples were sampled: temperature 1, at most 64 tokens")
    return notes


# Showing


def show(document: Mapping[str, Any], console: Any) -> None:
    """Prints a table of what was compared, one of what differs, and the verdict. Downloads' texts are cleaned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    where = f"{document['stage']} of {document['recipe']}, step {document['step']}, in {document['directory']}"
    console.print(Text(where))
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "compared", "differ"):
        table.add_column(column, overflow="fold", justify="right" if column == "differ" else "left")
    for what, compared, differing in _summary(document):
        table.add_row(what, Text(clean(compared)), str(differing))
    console.print(table)
    if rows := list(_rows(document)):
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
    """(what, what of it was compared, how much of that differs)."""
    weights, metrics, data = document["weights"], document["metrics"], document["data"]
    tensors, differing = (sum(row[key] for row in weights) for key in ("tensors", "differing"))
    yield "weights", f"{tensors} tensors in {', '.join(row['file'] for row in weights)}", differing
    yield "metrics", f"{metrics['rows']} rows of {metrics['columns']} columns", len(metrics["differing"])
    yield "files", "configuration, tokenizer and what else lies beside the weights", len(document["files"])
    files = f", {data['compared']} files" if data["compared"] else ""
    yield "data", data["how"] + files, len(data["differing"])
    yield "settings", "recipe.json, its card and this run", len(document["settings"]["differing"])
    yield "versions", "packages and machine", len(document["versions"])


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in document["weights"]:
        if row["problem"]:
            yield "weights", row["file"], row["problem"], ""
        if row["worst"] is not None:
            apart, relative = (
                "not finite" if row[key] is None else f"{row[key]:.3g}" for key in ("max_abs", "max_rel")
            )
            far = f"max |a − b| {apart} ({row['worst']}), max relative {relative}"
            yield "weights", row["file"], f"{row['differing']} of {row['tensors']} tensors differ", far
    for row in document["files"]:
        yield "files", row["file"], row["problem"], ""
    metrics = document["metrics"]
    if metrics["problem"]:
        yield "metrics", "rows", metrics["problem"], ""
    for row in metrics["differing"][:_SHOWN]:
        far = "no number on one side" if row["max_abs"] is None else f"max |a − b| {row['max_abs']:.3g}"
        yield "metrics", row["column"], f"{row['rows']} of {row['of']} rows, from step {row['first_step']}", far
    if (more := len(metrics["differing"]) - _SHOWN) > 0:
        yield "metrics", f"and {more} more columns", "", ""
    for name in document["data"]["differing"]:
        yield "data", name, "other content", ""
    for row in document["settings"]["differing"]:
        yield "settings", row["key"], str(row["published"]), str(row["here"])
    for row in document["versions"]:
        yield "versions", row["name"], *(str(row[side] or "not recorded") for side in ("published", "here"))
