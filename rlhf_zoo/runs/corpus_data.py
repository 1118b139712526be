"""Writes the data that a recipe's corpus prepares into the run directory, checks them, and publishes them.

Stages read the data from the run directory instead of the Hub, because a stage must also start without a network.
run.json records a digest of each configuration, which is checked before the data are read or sent.
"""

import inspect
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ZooError
from ..fileio import hub_id, now, write_text
from ..hub.client.connect import Hub
from ..hub.client.publish import publish_files
from ..hub.client.refusals import translate_hub_errors
from ..hub.client.trees import fetch_dataset
from ..plugins import CORPORA, load_object
from .context import RunContext
from .data.digests import digest
from .data.sources import DataSource, find_data
from .settings.parse import RecipeConfig


def corpus_source(context: RunContext, *, refresh: bool) -> DataSource:
    """Opens the data of the recipe's corpus, after preparing them if needed.

    Args:
        context: The run.
        refresh: Whether to prepare the data again, although the run directory already has them.

    Returns:
        The data in the run directory.

    Raises:
        ZooError: The run directory has other files, or another run's data and --restart is not set; corpus_args does
            not fit the corpus; the corpus leaves a split empty; or the data have changed since they were prepared.
    """
    shared, record = context.shared, context.record("data")
    settings = corpus_settings(shared)
    if not record.run_file.exists() and record.path.is_dir() and any(record.path.iterdir()):
        raise ZooError(f"{record.path} has files that do not belong to a run: choose another --output_dir.")
    try:
        context.check_settings_unchanged("data", settings)
    except ZooError:
        if not context.restart:
            raise
        refresh = True
    if refresh or record.read().get("status") != "finished":
        start_time = time.monotonic()
        configurations = _prepare_corpus(shared, context.hub)
        if record.path.is_dir():
            shutil.rmtree(record.path)
        record.write(
            **context.run_json_header("data", "running", seed=shared.seed, settings=settings),
            parents={},
            hub=context.hub.label,
            repo=None,
            about=asdict(shared),
            command=context.command,
        )
        for configuration, splits in configurations.items():
            write_configuration(record.path, configuration, splits)
        write_text(record.path / "README.md", _card(record.read(), _splits_by_configuration(split_files(record.path))))
        files = configuration_digests(record.path)
        record.write(status="finished", files=files, seconds=time.monotonic() - start_time, finished=now())
    return _open_prepared(context)


def configuration_digests(folder: Path) -> dict[str, str]:
    """Returns configuration -> sha256 of the names and bytes of its split files.

    Args:
        folder: The data's folder.
    """
    return {name: digest(folder / name, ".jsonl") for name in _splits_by_configuration(split_files(folder))}


def _check_digests(context: RunContext) -> None:
    """Raises ZooError if a configuration differs from its recorded digest."""
    record = context.record("data")
    recorded_digests = record.read().get("files") or {}
    digests = configuration_digests(record.path)
    for name, sha256 in recorded_digests.items():
        if digests.get(name) != sha256:
            raise ZooError(
                f"{record.path / name} has changed since the run prepared it: restore it, choose another "
                f"--output_dir, or start again with `{context.stage_command('run', '--restart')}`."
            )


def corpus_settings(shared: RecipeConfig) -> dict[str, Any]:
    """Returns the keys that determine the data of a corpus.

    Args:
        shared: The keys of recipe.yaml.
    """
    return {key: getattr(shared, key) for key in ("corpus", "corpus_args", "dataset_name", "seed")}


def _prepare_corpus(shared: RecipeConfig, hub: Hub) -> Mapping[str, Mapping[str, list[dict[str, Any]]]]:
    prepare = load_object(str(shared.corpus), group=CORPORA)
    try:
        inspect.signature(prepare).bind(shared.dataset_name, seed=shared.seed, **shared.corpus_args)
    except TypeError as error:
        raise ZooError(
            f"corpus_args does not fit {shared.corpus} ({error}): see the arguments in its docstring."
        ) from error
    configurations = prepare(_corpus_location(shared, hub), seed=shared.seed, **shared.corpus_args)
    for configuration, splits in configurations.items():
        for split, rows in splits.items():
            if not rows:
                raise ZooError(
                    f"{shared.dataset_name or shared.corpus} leaves the split {split} of {configuration} empty: "
                    "add more text."
                )
    return configurations


def _corpus_location(shared: RecipeConfig, hub: Hub) -> str | None:
    """Returns the name or folder of the data set that a corpus's function reads.

    The function does not know the run's Hubs, so a data set from the source Hub is downloaded first. A name that no Hub
    has is returned unchanged, because the function may understand it.
    """
    name = shared.dataset_name
    if hub.source_hub is None or name is None or not hub_id(name) or Path(name).exists():
        return name
    try:
        source = find_data(name, shared.dataset_revision, hub)
    except ZooError:
        return name
    if source.hub is not hub.source_hub or not source.lineage["commit"]:
        return name
    with translate_hub_errors(f"The data set {name} cannot be loaded from {source.hub.name}", "try again."):
        return str(fetch_dataset(source.hub, name, revision=source.revision))


def add_preferences(context: RunContext, splits: Mapping[str, Iterable[Mapping]]) -> DataSource:
    """Adds simulated preferences to the data, or replaces earlier preferences. The data set then counts as unsent.

    Args:
        context: The run.
        splits: Split -> rows.

    Raises:
        ZooError: Another configuration has changed since it was written.
    """
    record, name = context.record("data"), "preferences"
    files = dict(record.read().get("files") or {})
    files.pop(name, None)
    record.write(files=files)  # if the process is killed after this, no outdated digest remains
    write_configuration(record.path, name, splits)
    write_text(record.path / "README.md", _card(record.read(), _splits_by_configuration(split_files(record.path))))
    record.write(files={**files, name: configuration_digests(record.path)[name]})
    return _open_prepared(context)


def write_configuration(folder: Path, configuration: str, splits: Mapping[str, Iterable[Mapping]]) -> None:
    """Writes FOLDER/CONFIGURATION/SPLIT.jsonl, each file atomically.

    Args:
        folder: The data's folder.
        configuration: Name of the configuration.
        splits: Split -> rows.
    """
    for split, rows in splits.items():
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        write_text(folder / configuration / f"{split}.jsonl", text)


def split_files(folder: Path) -> list[str]:
    """Lists CONFIGURATION/SPLIT.jsonl of each split in a folder, sorted.

    Args:
        folder: The data's folder.
    """
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.jsonl") if path.is_file())


def _splits_by_configuration(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns configuration -> splits for files named CONFIGURATION/SPLIT.jsonl."""
    splits: dict[str, list[str]] = {}
    for path in sorted(map(PurePosixPath, names)):
        if path.suffix == ".jsonl" and len(path.parts) == 2:
            splits.setdefault(path.parts[0], []).append(path.stem)
    return splits


def card_head(shared: Mapping[str, Any], recipe: str, configurations: Mapping[str, Iterable[str]]) -> str:
    """Returns the YAML front matter of a data set's README.

    Args:
        shared: The keys of recipe.yaml.
        recipe: Name of the recipe.
        configurations: Configuration -> splits.
    """
    import yaml

    head = {
        "license": shared["license"],
        "language": [shared["language"]],
        "tags": ["rlhf-zoo", f"recipe:{recipe}"] + (["simulated"] if shared["simulated"] else []),
        "configs": [
            {
                "config_name": name,
                "data_files": [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits],
                **({"default": True} if name == "lines" else {}),
            }
            for name, splits in configurations.items()
        ],
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n"


def _card(document: Mapping[str, Any], configurations: Mapping[str, list[str]]) -> str:
    """Returns the data set's README, from the recipe's keys in run.json."""
    shared, recipe = document["about"], document["recipe"]
    notice = (
        "\n**This is a simulated world**: a program wrote every line, and preferences are simulated too.\n"
        if shared["simulated"]
        else ""
    )
    source = f"\nText: {shared['attribution']}\n" if shared["attribution"] else ""
    if shared["preferences"] and "preferences" in configurations:
        source += f"\nPreferences: {shared['preferences']}\n"
    rows = "".join(f"| `{name}` | {', '.join(splits)} |\n" for name, splits in configurations.items())
    return (
        f"{card_head(shared, recipe, configurations)}# {recipe}: data\n\n"
        f"{shared['description']}\n{notice}{source}\n| configuration | splits |\n|---|---|\n{rows}\n"
        f"Prepared by `rlhf-zoo run {recipe}` (seed {shared['seed']}).\n"
    )


def _open_prepared(context: RunContext) -> DataSource:
    """Opens the corpus's data in the run directory without asking a Hub.

    If the run publishes and the Hub already has these data, the lineage names the Hub's copy.
    """
    _check_digests(context)
    document = context.record("data").read()
    lineage = {"repo": None, "commit": None, "fingerprint": document["fingerprint"]}
    repo = document.get("repo")
    if context.publish and repo and not has_pending_data(context):
        lineage |= {"repo": repo["id"], "commit": repo["commit"], "hub": repo["hub"]}
    return DataSource(str(context.record("data").path), None, lineage)


def has_pending_data(context: RunContext) -> bool:
    """Whether the Hub lacks the corpus data of the run directory, or has an older version of them.

    Args:
        context: The run.
    """
    record = context.record("data")
    document = record.read()
    if document.get("status") != "finished":
        return False
    repo = document.get("repo") or {}
    sent_state = (repo.get("hub"), repo.get("id"), repo.get("content"))
    return sent_state != (context.hub.label, context.dataset_repo, digest(record.path, ".jsonl"))


def send_data(context: RunContext) -> None:
    """Sends the data as one commit, and records it in run.json.

    Args:
        context: The run.

    Raises:
        ZooError: The data have changed since they were prepared, or the Hub refuses them.
    """
    _check_digests(context)
    record = context.record("data")
    content = digest(record.path, ".jsonl")  # before the upload, so that later changes are sent again
    commit = _send_folder(context, record.path)
    repo = {"id": context.dataset_repo, "commit": commit, "tags": {}, "hub": context.hub.label, "content": content}
    record.write(repo=repo)


def forget_lost_data(context: RunContext) -> None:
    """Marks the data as unsent if the Hub no longer has them.

    Args:
        context: The run.
    """
    record = context.record("data")
    repo = record.read().get("repo") or {}
    if repo.get("hub") != context.hub.label:
        return
    if not context.hub.api().revision_exists(repo["id"], repo["commit"], repo_type="dataset"):
        record.write(repo=None)


def _send_folder(context: RunContext, folder: Path) -> str:
    """Sends a folder as one commit. Its card also lists configurations that only other runs have sent."""
    import tempfile

    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        files_on_hub = context.hub.api().list_repo_files(context.dataset_repo, repo_type="dataset")
    except RepositoryNotFoundError:
        files_on_hub = []
    with tempfile.TemporaryDirectory() as staging:
        for name in split_files(folder):
            target = Path(staging) / name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(folder / name, target)
        configurations = _splits_by_configuration({*files_on_hub, *split_files(folder)})
        card = _card(context.record("data").read(), configurations)
        (Path(staging) / "README.md").write_text(card, encoding="utf-8")
        return publish_files(
            Path(staging),
            context.dataset_repo,
            repo_type="dataset",
            message=f"{context.recipe.name}: data",
            private=context.private,
            hub=context.hub,
        )
