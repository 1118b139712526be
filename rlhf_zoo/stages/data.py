"""The data set of a recipe: prepared by its corpus and published, or named and loaded."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import datasets

from ..data import need_columns
from ..errors import ZooError
from ..hub.publish import publish_folder
from ..hub.refusals import client_errors, is_disk_full, reason, refusals_as
from ..plugins import load_object
from ..record import fingerprint, now, write_text
from .context import RunContext, versions
from .settings import RecipeConfig

__all__ = ["CORPORA", "DataSource", "data_source", "write_configuration"]

CORPORA = "rlhf_zoo.corpora"


@dataclass(frozen=True)
class DataSource:
    """Where the stages load from: a Hub id at a commit, or a folder."""

    location: str
    revision: str | None
    lineage: Mapping[str, Any]

    def load(self, configuration: str | None, split: str, *, columns: list[str]) -> datasets.Dataset:
        """One split. Raises ZooError when it, its configuration or a column is not there, or it is empty."""
        what = f"The data set {self.location}" + (f", configuration {configuration}" if configuration else "")
        try:
            loaded = datasets.load_dataset(
                self.location, configuration, split=split, revision=self.revision, cache_dir=_cache_of(self.location)
            )
        except (ValueError, datasets.exceptions.DatasetsError, *client_errors()) as error:
            if is_disk_full(error):
                raise
            raise ZooError(
                f"{what}, split {split}, cannot be loaded ({reason(error)}): check the names of the data set, its "
                "configuration and its split, and --hub."
            ) from error
        need_columns(loaded, columns, of=f"{what}, split {split},")
        return loaded


def _cache_of(location: str) -> str | None:
    """A cache of its own for each content of a local folder: the usual one tells folders apart by their last name."""
    folder = Path(location)
    if not folder.is_dir():
        return None
    content = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content.update(str(path.relative_to(folder)).encode())
        content.update(path.read_bytes())
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "folders" / content.hexdigest()[:32])


def data_source(context: RunContext, *, again: bool = False) -> DataSource:
    """The recipe's data: what its corpus prepares (once, and `again` if asked), else the data set that it names.

    Raises ZooError when the recipe has neither, or another run's data lie in the run directory and --restart was not
    given.
    """
    shared = context.shared
    if shared.corpus is None:
        if shared.dataset_name is None:
            raise ZooError(f"The recipe {context.recipe.name} names no data set: give --dataset_name.")
        lineage = {"repo": shared.dataset_name, "commit": shared.dataset_revision}
        return DataSource(
            shared.dataset_name, shared.dataset_revision, {**lineage, "fingerprint": fingerprint(lineage)}
        )
    record = context.record("data")
    resolved = {
        "corpus": shared.corpus,
        "corpus_args": shared.corpus_args,
        "dataset_name": shared.dataset_name,
        "seed": shared.seed,
    }
    if not record.run_file.exists() and record.path.is_dir() and any(record.path.iterdir()):
        raise ZooError(f"{record.path} holds files that no run wrote: choose another --output_dir.")
    try:
        record.check_fingerprint(resolved, recipe=context.recipe.name)
    except ZooError:
        if not context.restart:
            raise
        again = True
    if again or record.read().get("status") != "finished":
        started = time.monotonic()
        prepared = _prepare(shared)
        if record.path.is_dir():
            shutil.rmtree(record.path)
        record.write(
            stage="data",
            recipe=context.recipe.name,
            status="running",
            seed=shared.seed,
            fingerprint=fingerprint(resolved),
            resolved=resolved,
            versions=versions(),
            parents={},
            hub=context.hub.label,
            repo=None,
            command=context.command,
        )
        for configuration, splits in prepared.items():
            write_configuration(record.path, configuration, splits)
        write_text(record.path / "README.md", _card(context, _configurations(_files(record.path))))
        record.write(status="finished", seconds=time.monotonic() - started, finished=now())
    return _published(context)


def _prepare(shared: RecipeConfig) -> Mapping[str, Mapping[str, list[dict[str, Any]]]]:
    prepare = load_object(str(shared.corpus), group=CORPORA)
    try:
        inspect.signature(prepare).bind(shared.dataset_name, seed=shared.seed, **shared.corpus_args)
    except TypeError as error:
        raise ZooError(
            f"corpus_args does not suit {shared.corpus} ({error}): its docstring says what it takes."
        ) from error
    prepared = prepare(shared.dataset_name, seed=shared.seed, **shared.corpus_args)
    for configuration, splits in prepared.items():
        for split, rows in splits.items():
            if not rows:
                raise ZooError(
                    f"{shared.dataset_name or shared.corpus} leaves the split {split} of {configuration} empty: "
                    "give more text."
                )
    return prepared


def add_configuration(context: RunContext, configuration: str, splits: Mapping[str, Iterable[Mapping]]) -> DataSource:
    """Adds a configuration that a stage made (simulated preferences) and sends the data set again."""
    record = context.record("data")
    write_configuration(record.path, configuration, splits)
    write_text(record.path / "README.md", _card(context, _configurations(_files(record.path))))
    record.write(repo=None)
    return _published(context)


def write_configuration(folder: Path, configuration: str, splits: Mapping[str, Iterable[Mapping]]) -> None:
    """Writes FOLDER/CONFIGURATION/SPLIT.jsonl, each as a whole."""
    for split, rows in splits.items():
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        write_text(folder / configuration / f"{split}.jsonl", text)


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.glob("*/*.jsonl")]


def _configurations(names: Iterable[str]) -> dict[str, list[str]]:
    """CONFIGURATION/SPLIT.jsonl, ... -> the splits of each configuration."""
    paths = sorted(PurePosixPath(name) for name in names)
    found: dict[str, list[str]] = {}
    for path in paths:
        if path.suffix == ".jsonl" and len(path.parts) == 2:
            found.setdefault(path.parts[0], []).append(path.stem)
    return found


def _card(context: RunContext, configurations: Mapping[str, list[str]]) -> str:
    import yaml

    shared = context.shared
    front = {
        "license": shared.license,
        "language": [shared.language],
        "tags": ["rlhf-zoo", f"recipe:{context.recipe.name}"] + (["simulated"] if shared.simulated else []),
        "configs": [
            {
                "config_name": name,
                "data_files": [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits],
                **({"default": True} if name == "lines" else {}),
            }
            for name, splits in configurations.items()
        ],
    }
    notice = (
        "\n**This is a simulated world**: a program wrote every line, and preferences are simulated too.\n"
        if shared.simulated
        else ""
    )
    source = f"\nText: {shared.attribution}\n" if shared.attribution else ""
    if shared.preferences and "preferences" in configurations:
        source += f"\nPreferences: {shared.preferences}\n"
    rows = "".join(f"| `{name}` | {', '.join(splits)} |\n" for name, splits in configurations.items())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {context.recipe.name}: data\n\n"
        f"{shared.description}\n{notice}{source}\n| configuration | splits |\n|---|---|\n{rows}\n"
        f"Prepared by `rlhf-zoo run {context.recipe.name}` (seed {shared.seed}).\n"
    )


def _published(context: RunContext) -> DataSource:
    record = context.record("data")
    document = record.read()
    lineage = {"repo": None, "commit": None, "fingerprint": document["fingerprint"]}
    if not context.publish:
        return DataSource(str(record.path), None, lineage)
    repo = document.get("repo")
    with refusals_as(
        f"The data cannot be published under {context.dataset_repo} on {context.hub.described}",
        "check --namespace and the token, or try again when the Hub answers.",
    ):
        if not repo or (repo["hub"], repo["id"]) != (context.hub.label, context.dataset_repo) or not _still_there(repo):
            commit = _send(context, record.path)
            repo = {"id": context.dataset_repo, "commit": commit, "tags": {}, "hub": context.hub.label}
            record.write(repo=repo)
    return DataSource(repo["id"], repo["commit"], {**lineage, "repo": repo["id"], "commit": repo["commit"]})


def _still_there(repo: Mapping[str, Any]) -> bool:
    from huggingface_hub import HfApi

    return HfApi().revision_exists(repo["id"], repo["commit"], repo_type="dataset")


def _send(context: RunContext, folder: Path) -> str:
    """The card names also what other runs put there: `rlhf-zoo ppo` alone has no preferences to send."""
    import tempfile

    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        there = HfApi().list_repo_files(context.dataset_repo, repo_type="dataset")
    except RepositoryNotFoundError:
        there = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in _files(folder):
            target = Path(scratch) / name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(folder / name, target)
        configurations = _configurations({*there, *_files(folder)})
        (Path(scratch) / "README.md").write_text(_card(context, configurations), encoding="utf-8")
        return publish_folder(
            Path(scratch),
            context.dataset_repo,
            repo_type="dataset",
            message=f"{context.recipe.name}: data",
            private=context.private,
        )
