"""Finds and loads data sets: a folder, a file of JSON lines, or a repository on a Hub at a commit."""

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from ...errors import ZooError
from ...fileio import MAX_CHARACTERS, BadYAML, load_yaml
from ...hub.client.checked_data import CheckedData, LoaderOptions, drop_media, open_checked
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refs import hub_lineage, try_hub_then_source
from ...hub.client.refusals import (
    client_errors,
    is_disk_full,
    is_malformed_answer,
    is_outage,
    reason,
    translate_lookup_errors,
)
from ...modeling.prompts import require_columns
from ..record import block_record_writes, fingerprint
from .digests import digest
from .tables import read_all_rows

log = logging.getLogger(__name__)

#: The loader's messages about a missing configuration or split. The group matches the list of existing names.
_MISSING_PART = {
    "configuration": re.compile(r"(?:BuilderConfig '.*' not found\. Available|available configs): (\[.*\])"),
    "split": re.compile(r"(?:Unknown split|Bad split).*(\[.*\])"),
}
#: Part of a data set -> the keys of a recipe that name it, for messages.
PART_KEYS: Mapping[str, str] = {"configuration": "dataset_config", "split": "dataset_train_split or dataset_test_split"}
#: A file by which the Hub recognizes a data set as a benchmark.
BENCHMARK_FILE = "eval.yaml"


class NoSuchPart(ZooError):
    """The data set has no such configuration or split, or it has several and none is named."""


@dataclass(frozen=True)
class DataSource:
    """A data set to load: a Hub id at a commit, a folder, or a file of JSON lines, which serves as every split.

    Attributes:
        location: The Hub id, folder or file.
        revision: The commit, branch or tag of a Hub id; None for the default branch.
        lineage: What identifies the data set in run.json and cards: repo and commit, or folder and digest of the files.
        hub: The Hub that has the data set.
        outage: Why no Hub answered, so that only the cache can be used; None if a Hub answered.
    """

    location: str
    revision: str | None
    lineage: Mapping[str, Any]
    hub: Hub = DEFAULT_HUB
    outage: str | None = None

    def load(
        self, configuration: str | None, split: str, *, columns: list[str], keys: Mapping[str, str] = PART_KEYS
    ) -> datasets.Dataset:
        """Loads one split.

        Args:
            configuration: Configuration of the data set; None if it has only one.
            split: Name of the split.
            columns: Columns that the split must have.
            keys: The recipe's keys for configuration and split, for messages.

        Raises:
            ZooError: The split is empty, lacks a column, or cannot be loaded.
            NoSuchPart: The configuration or split does not exist.
        """
        # `datasets` lists the files of a local folder, which may be the run's own. The thread that uploads must not
        # write run.json there meanwhile, because the list would contain that write's temporary file.
        with self._loading(configuration, split, keys) as (label, data, options), block_record_writes():
            if (cache := _folder_cache(self.location)) is not None:
                options["cache_dir"] = cache
            try:
                rows = data.load(configuration, split, **options)
            except datasets.exceptions.DatasetGenerationError as error:
                rows = self._load_all_rows(data.make_builder(configuration, split, **options), split, options, error)
        require_columns(rows, columns, subject=f"{label},")
        return rows

    def _load_all_rows(
        self, builder: datasets.DatasetBuilder, split: str, options: LoaderOptions, error: Exception
    ) -> datasets.Dataset:
        """Loads a split whose column types change after the first rows; raises `error` if it has another cause."""
        if is_disk_full(error):
            raise error
        try:
            rows = read_all_rows(builder, split, cache=options.get("cache_dir"), token=options.get("token"))
        except (ValueError, RecursionError):
            raise error from error.__cause__
        if rows is None:
            raise error
        log.info("A column of %s changes its type after the first rows, so all rows are read at once.", self.location)
        return drop_media(rows)

    def first_row(self, configuration: str | None, split: str) -> dict[str, Any] | None:
        """Returns the first row of a split without downloading the rest.

        Args:
            configuration: Configuration of the data set; None if it has only one.
            split: Name of the split.

        Returns:
            The row; None for an empty split.

        Raises:
            ZooError: The split cannot be loaded.
            NoSuchPart: The configuration or split does not exist.
        """
        with self._loading(configuration, split) as (_, data, options):
            return next(iter(data.stream(configuration, split, **options)), None)

    @contextlib.contextmanager
    def _loading(
        self, configuration: str | None, split: str, keys: Mapping[str, str] = PART_KEYS
    ) -> Iterator[tuple[str, CheckedData, LoaderOptions]]:
        """Yields (label for messages, the checked data set, keywords for the loader).

        Errors of the Hub client and of `datasets` inside the block are raised as ZooError.
        """
        name = f"The data set {self.location}"
        label = f"{name}{f', configuration {configuration}' if configuration else ''}, split {split}"
        try:
            with (
                reading_from(self.hub) as options,
                open_checked(self.location, self.revision, token=self.hub.token) as data,
            ):
                yield label, data, options
        except StopIteration as error:  # the loader raises this for a file without rows
            raise ZooError(f"{label}, is empty: add rows.") from error
        except (ValueError, datasets.exceptions.DatasetsError, *client_errors()) as error:
            if is_disk_full(error):
                raise
            if self.outage is not None:
                raise ZooError(
                    f"{label}, is not in the cache, and {self.hub.name} does not answer ({self.outage}): check the "
                    f"network and {self.hub.flag}."
                ) from error
            for kind, part_name in (("configuration", configuration), ("split", split)):
                if match := _MISSING_PART[kind].search(str(error)):
                    existing_names = ", ".join(re.findall(r"'[^']+'", match[1]))
                    mismatch = (
                        f"no {kind} {part_name!r}, only {existing_names}"
                        if part_name
                        else f"several {kind}s, {existing_names}"
                    )
                    raise NoSuchPart(f"{name} has {mismatch}: set {keys[kind]}.") from error
            if (problem := file_problem(Path(self.location))) is not None:
                raise ZooError(f"{name} cannot be loaded: {problem}.") from error
            raise ZooError(
                f"{label}, cannot be loaded ({reason(_cause_of(error))}): check the names of the data set, its "
                f"configuration and its split, and {self.hub.flag}."
            ) from error
        except Exception as error:
            if not is_malformed_answer(error):
                raise
            raise ZooError(
                f"{label}, cannot be loaded ({self.hub.name} does not answer like a Hub: {error!r:.200}): check "
                f"{self.hub.flag}."
            ) from error


def _cause_of(error: Exception) -> BaseException:
    """Returns the cause of a DatasetGenerationError, which says only that generation failed; other errors unchanged."""
    is_vague = type(error) is datasets.exceptions.DatasetGenerationError
    return error.__cause__ if is_vague and error.__cause__ is not None else error


def file_problem(path: Path) -> str | None:
    """Finds the problem of a local file of JSON lines, or of the first bad file in a folder.

    Args:
        path: The file or folder.

    Returns:
        The problem and its fix; None if no file has a problem.
    """
    if path.is_dir() and not any(path.rglob("*.*")):
        return f"{path.name} holds no data files: add a file of JSON lines, or name another folder"
    for file in [path] if path.is_file() else sorted(path.rglob("*.jsonl")):
        if not file.stat().st_size:
            return f"{file.name} is empty: add rows"
        if file.suffix.lower() in (".csv", ".tsv", ".txt", ".parquet"):
            return f"{file.name} is read as JSON lines, but does not have the ending .jsonl: rename or convert it"
        if file.suffix.lower() != ".jsonl":
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    json.loads(line.decode("utf-8-sig").strip() or "null")  # the loader skips empty lines
                except UnicodeDecodeError:
                    return f"line {number} of {file.name} is not UTF-8; convert the file"
                except json.JSONDecodeError as error:
                    position = f"{error.msg}, column {error.colno}"
                    return f"line {number} of {file.name} is not JSON ({position}); correct that line"
                except RecursionError:
                    return f"line {number} of {file.name} is nested too deeply; correct that line"
    return None


@contextlib.contextmanager
def reading_from(hub: Hub) -> Iterator[LoaderOptions]:
    """Makes `datasets` use a Hub's address inside the block. `datasets` has one address for the whole process.

    Args:
        hub: The Hub to read from.

    Yields:
        Keywords for calls of `datasets`.
    """
    config, settings = datasets.config, ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    old_values = {name: getattr(config, name) for name in settings}
    is_another_hub = hub.endpoint not in (None, old_values["HF_ENDPOINT"])
    if is_another_hub:
        config.HF_ENDPOINT = hub.endpoint
    if is_another_hub or hub.offline:
        config.HF_HUB_OFFLINE = config.HF_DATASETS_OFFLINE = hub.offline
    try:
        options: LoaderOptions = {"token": hub.token} if is_another_hub else {}
        if is_another_hub and hub.data_cache is not None:
            options["cache_dir"] = str(hub.data_cache)
        yield options
    finally:
        for name, value in old_values.items():
            setattr(config, name, value)


def find_data(
    name: str, revision: str | None, hub: Hub, *, recorded_lineage: Mapping[str, Any] | None = None
) -> DataSource:
    """Finds a data set: a folder, a file, or a repository on a Hub or on its source Hub.

    The source Hub is asked for repositories that the first Hub does not have. If no Hub answers, the cache may still
    have the data set at the recipe's revision.

    Args:
        name: The folder, file or Hub id.
        revision: Commit, branch or tag on the Hub.
        hub: The Hub.
        recorded_lineage: The lineage that the run recorded when it started; None for a new run. If it has the same name
            and revision, its commit is used again. Local files are not compared with it: `check_unchanged` does that.

    Returns:
        The data set. Its lineage has the digest of local files, or repo, commit and, if the data set is a benchmark,
        the content of its eval.yaml.

    Raises:
        ZooError: Neither the Hub nor its source Hub has it. Without a source Hub, `DataSource.load` raises this later.
    """
    request_digest = fingerprint({"repo": name, "commit": revision})
    serving_hub, outage = hub, None
    lineage: Mapping[str, Any]
    if Path(name).exists():
        # A local file or folder has no public name, so a digest of its files identifies it.
        lineage = {"repo": None, "commit": None, "folder": Path(name).resolve().name, "files": digest(Path(name))}
    elif recorded_lineage is not None and recorded_lineage.get("fingerprint") == request_digest:
        lineage = recorded_lineage
        if hub.source_hub is not None and lineage.get("hub") == hub.source_hub.label:
            serving_hub = hub.source_hub
    else:
        serving_hub, lineage, outage = _look_up(name, revision, hub)
    if outage is not None:
        serving_hub = replace(serving_hub, offline=True)  # otherwise `datasets` retries for half a minute
    return DataSource(
        name, lineage.get("commit") or revision, {**lineage, "fingerprint": request_digest}, serving_hub, outage
    )


def _look_up(name: str, revision: str | None, hub: Hub) -> tuple[Hub, dict[str, Any], str | None]:
    """Returns (the Hub that has the data set, the lineage, why that Hub did not answer or None)."""
    from huggingface_hub.errors import RepositoryNotFoundError

    queried_hubs: list[Hub] = []

    def query(candidate: Hub) -> dict[str, Any]:
        queried_hubs.append(candidate)
        with translate_lookup_errors(
            f"The data set {name}", candidate, "check its name.", repo=name, repo_type="dataset"
        ):
            info = candidate.api().dataset_info(name, revision=revision)
            lineage: dict[str, Any] = {"repo": name, "commit": info.sha}
            if any(file.rfilename == BENCHMARK_FILE for file in info.siblings or []):
                path = candidate.file(name, BENCHMARK_FILE, repo_type="dataset", revision=info.sha)
                lineage["benchmark"] = _read_benchmark(path)
            return lineage

    try:
        serving_hub, lineage = try_hub_then_source(name, hub, query)
    except ZooError as error:
        if len(queried_hubs) > 1 and isinstance(error.__cause__, RepositoryNotFoundError):
            raise
        # Not an error yet: the cache may have the data set, and if not, `DataSource.load` reports the problem.
        log.info("The data set %s could not be looked up: %s", name, error)
        outage = reason(error.__cause__) if error.__cause__ is not None and is_outage(error.__cause__) else None
        return queried_hubs[-1], {"repo": name, "commit": revision}, outage
    return serving_hub, lineage | hub_lineage(serving_hub, hub), None


def _read_benchmark(path: Path) -> dict[str, Any] | None:
    """Reads an untrusted eval.yaml; returns None if the file is too long or not text."""
    if path.stat().st_size > MAX_CHARACTERS:
        return None
    try:
        return parse_benchmark(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return None


def parse_benchmark(text: str) -> dict[str, Any] | None:
    """Parses the text of an eval.yaml, by which a data set registers as a benchmark.

    Args:
        text: Content of the file.

    Returns:
        {name, tasks: [{id, config, split}]}; None if the file registers no task.
    """
    try:
        content = load_yaml(text)
    except BadYAML:
        return None
    tasks = content.get("tasks") if isinstance(content, Mapping) else None
    registered_tasks = [
        {key: str(task[key]) for key in ("id", "config", "split") if task.get(key) is not None}
        for task in (tasks if isinstance(tasks, list) else [])
        if isinstance(task, Mapping) and task.get("id") is not None
    ]
    return {"name": str(content.get("name") or ""), "tasks": registered_tasks} if registered_tasks else None


def _folder_cache(location: str) -> str | None:
    """Returns a cache folder for the present content of a local folder; None for other data sets.

    The default cache would not notice that the content has changed, because it distinguishes folders by name.
    """
    folder = Path(location)
    if not folder.is_dir():
        return None
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "folders" / digest(folder)[:32])
