"""The data set of a recipe: prepared by its corpus and published, or named and loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ..data import need_columns
from ..errors import ZooError
from ..hub.publish import publish_folder
from ..plugins import load_object
from ..record import fingerprint, now, write_text
from .context import RunContext, versions

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
        import httpx
        from huggingface_hub.errors import HfHubHTTPError

        what = f"The data set {self.location}" + (f", configuration {configuration}" if configuration else "")
        try:
            loaded = datasets.load_dataset(self.location, configuration, split=split, revision=self.revision)
        except (ValueError, datasets.exceptions.DatasetsError, FileNotFoundError) as error:
            raise ZooError(f"{what}, split {split}, cannot be loaded: {str(error).strip().splitlines()[0]}") from error
        except (HfHubHTTPError, httpx.HTTPError, ConnectionError) as error:
            raise ZooError(f"{what} cannot be fetched: {str(error).strip().splitlines()[0]}") from error
        need_columns(loaded, columns, of=f"{what}, split {split},")
        return loaded


def data_source(context: RunContext) -> DataSource:
    """The recipe's data: what its corpus prepares (once), else the data set that it names.

    Raises ZooError when the recipe has neither, or another run's data lie in the run directory.
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
    if context.restart:
        shutil.rmtree(record.path, ignore_errors=True)
    resolved = {
        "corpus": shared.corpus,
        "corpus_args": shared.corpus_args,
        "dataset_name": shared.dataset_name,
        "seed": shared.seed,
    }
    record.check_fingerprint(resolved, recipe=context.recipe.name)
    if record.read().get("status") != "finished":
        prepare = load_object(shared.corpus, group=CORPORA)
        for configuration, splits in prepare(shared.dataset_name, seed=shared.seed, **shared.corpus_args).items():
            write_configuration(record.path, configuration, splits)
        _write_card(context)
        record.write(
            stage="data",
            recipe=context.recipe.name,
            status="finished",
            seed=shared.seed,
            fingerprint=fingerprint(resolved),
            resolved=resolved,
            versions=versions(),
            parents={},
            hub=context.hub.label,
            repo=None,
            command=context.command,
            finished=now(),
        )
    return _published(context)


def add_configuration(context: RunContext, configuration: str, splits: Mapping[str, Iterable[Mapping]]) -> DataSource:
    """Adds a configuration that a stage made (simulated preferences) and sends the data set again."""
    write_configuration(context.record("data").path, configuration, splits)
    _write_card(context)
    context.record("data").write(repo=None)
    return _published(context)


def write_configuration(folder: Path, configuration: str, splits: Mapping[str, Iterable[Mapping]]) -> None:
    """Writes FOLDER/CONFIGURATION/SPLIT.jsonl, each as a whole."""
    for split, rows in splits.items():
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        write_text(folder / configuration / f"{split}.jsonl", text)


def _configurations(folder: Path) -> dict[str, list[str]]:
    return {
        path.name: sorted(file.stem for file in path.glob("*.jsonl"))
        for path in sorted(folder.iterdir())
        if path.is_dir() and any(path.glob("*.jsonl"))
    }


def _write_card(context: RunContext) -> None:
    import yaml

    shared, folder = context.shared, context.record("data").path
    configurations = _configurations(folder)
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
    rows = "".join(f"| `{name}` | {', '.join(splits)} |\n" for name, splits in configurations.items())
    write_text(
        folder / "README.md",
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {context.recipe.name}: data\n\n"
        f"{shared.description}\n{notice}\n| configuration | splits |\n|---|---|\n{rows}\n"
        f"Prepared by `rlhf-zoo run {context.recipe.name}` (seed {shared.seed}).\n",
    )


def _published(context: RunContext) -> DataSource:
    record = context.record("data")
    document = record.read()
    lineage = {"repo": None, "commit": None, "fingerprint": document["fingerprint"]}
    if not context.publish:
        return DataSource(str(record.path), None, lineage)
    repo = document.get("repo")
    if not repo or repo.get("hub") != context.hub.label or not _still_there(repo):
        commit = _send(context, record.path)
        repo = {"id": context.dataset_repo, "commit": commit, "tags": {}, "hub": context.hub.label}
        record.write(repo=repo)
    return DataSource(repo["id"], repo["commit"], {**lineage, "repo": repo["id"], "commit": repo["commit"]})


def _still_there(repo: Mapping[str, Any]) -> bool:
    from huggingface_hub import HfApi

    return HfApi().revision_exists(repo["id"], repo["commit"], repo_type="dataset")


def _send(context: RunContext, folder: Path) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        for path in [folder / "README.md", *folder.glob("*/*.jsonl")]:
            target = Path(scratch) / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
        return publish_folder(
            Path(scratch), context.dataset_repo, repo_type="dataset", message=f"{context.recipe.name}: data"
        )
