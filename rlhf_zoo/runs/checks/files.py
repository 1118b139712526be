"""Fetches the files of a model that are read before its weights: configuration, tokenizer and code."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...hub.client.connect import Hub
from ...hub.client.pull import full_revision
from ...hub.client.refs import try_hub_then_source
from ...hub.client.refusals import translate_lookup_errors
from ...modeling.model_files import ADAPTER_CONFIG, read_json_object

#: Patterns of all files of a model except its weights.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def fetch_files(name: str, revision: str | None, hub: Hub, *, patterns: Sequence[str] = SMALL_FILES, fix: str) -> Path:
    """Returns a folder with a model's files, without downloading its weights.

    For an adapter on a Hub without a config.json, the files are those of the adapter's base model.

    Args:
        name: A folder, or a repository on `hub` or on its source Hub.
        revision: A branch, tag or commit of the repository; None for its main branch.
        hub: The Hub. If it does not answer, cached files are used.
        patterns: Patterns of the files to fetch from a repository.
        fix: The end of the error message, which says what to do.

    Raises:
        ZooError: No Hub has the model, or no Hub answers.
    """
    if Path(name).is_dir():
        return Path(name)

    def snapshot(candidate: Hub) -> Path:
        with translate_lookup_errors(f"The model {name}", candidate, fix, repo=name):
            outage = candidate.outage()
            try:
                answering_hub = candidate if outage is None else replace(candidate, offline=True)
                revision_name = full_revision(name, revision, answering_hub)
                return answering_hub.snapshot(name, revision=revision_name, allow_patterns=[*patterns])
            except OSError:
                if outage is None:
                    raise
                raise outage from None

    folder = try_hub_then_source(name, hub, snapshot)[1]
    adapter = read_json_object(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else {}
    base = adapter.get("base_model_name_or_path")
    if base and not (folder / "config.json").is_file():
        return fetch_files(base, adapter.get("revision"), hub, patterns=patterns, fix=fix)
    return folder
