"""Describes a repository as a dictionary, which pages, lists and filters use."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from itertools import chain
from typing import Any

from .cards import card_tags, read_card
from .digest_cache import DigestCache
from .faults import Damaged, Fault
from .git import MAIN, GitRepository
from .names import RepoId
from .storage import Settings, Storage

_MAX_CONFIG_BYTES = 2**20
_CONFIG_CACHE = DigestCache(16 * 2**20)

# Suffix of an architecture's name -> the pipeline tag that the Hub derives from it.
_PIPELINE_TAGS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
}


def commit_date(git: GitRepository, commit: str) -> str:
    """Returns the date of a commit in the Hub's format.

    Args:
        git: The open repository.
        commit: Commit id.
    """
    return datetime.fromtimestamp(git.commit(commit).commit_time, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def stopped_runtime() -> dict[str, Any]:
    """Returns the runtime of every Space: stopped, because this Hub runs none."""
    message = "The embedded Hub stores Spaces and does not run them: start the app file with Python."
    return {
        "stage": "STOPPED",
        "hardware": {"current": None, "requested": None},
        "storage": None,
        "gcTimeout": None,
        "errorMessage": message,
    }


def describe(
    storage: Storage,
    repo: RepoId,
    settings: Settings,
    git: GitRepository,
    commit: str,
    *,
    include_blobs: bool = False,
    expand: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Describes a repository at a commit.

    Args:
        storage: The Hub's storage.
        repo: The repository.
        settings: Its settings.
        git: Its open git repository.
        commit: Commit id.
        include_blobs: Whether to add the sizes and ids of the files.
        expand: The properties to return in addition to the ids; None for all. Expensive properties are computed only
            if they are returned.

    Returns:
        The properties as JSON values. Properties without a value are left out.

    Raises:
        Damaged: Something in the repository cannot be read.
    """
    wanted_names = None if expand is None else set(expand)

    def is_wanted(name: str) -> bool:
        return wanted_names is None or name in wanted_names

    files = git.files(commit)
    oid_by_path = {entry.path: entry.oid for entry in files}
    card = _read_metadata(git, oid_by_path.get("README.md"))
    # lastModified is the date of main's head, even in the description of an older commit.
    head = git.branch(MAIN)
    info: dict[str, object] = {
        "author": repo.namespace,
        "sha": commit,
        "lastModified": commit_date(git, head or commit),
        "createdAt": settings.created,
        "private": settings.private,
        "gated": settings.gated,
        "disabled": False,
        "downloads": 0,
        "downloadsAllTime": 0,
        "likes": 0,
        "trendingScore": 0,
        "tags": card_tags(card, repo.kind),
        "cardData": card or None,
    }
    if repo.kind == "model":
        _add_model_properties(info, git, oid_by_path, card)
    elif repo.kind == "space":
        info["sdk"] = card.get("sdk") or settings.sdk
        for key in ("models", "datasets"):
            value = card.get(key)
            info[key] = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
        info["runtime"] = stopped_runtime()
    if is_wanted("siblings"):
        info["siblings"] = [_sibling(git, entry.path, entry.oid, include_blobs=include_blobs) for entry in files]
    if is_wanted("usedStorage"):
        large_file_sizes = (path.stat().st_size for path in storage.path(repo).glob("lfs/objects/*/*/*"))
        info["usedStorage"] = sum(large_file_sizes) + sum(git.blob_info(entry.oid).stored_size for entry in files)
    # The Hub's ids have 24 hexadecimal digits. The date gives a later repository of the same name a different id.
    ids = {"_id": sha256(f"{repo.plural}/{repo} {settings.created}".encode()).hexdigest()[:24], "id": str(repo)}
    if repo.kind == "model":
        ids["modelId"] = str(repo)
    return ids | {key: value for key, value in info.items() if is_wanted(key) and value is not None}


def _add_model_properties(
    info: dict[str, Any], git: GitRepository, oid_by_path: dict[str, str], card: dict[str, Any]
) -> None:
    """Adds the properties of a model. Infers those that its card lacks from its files, as the Hub does."""
    architectures, config = _read_config(git, oid_by_path.get("config.json"))
    library = card.get("library_name")
    if library is None and "adapter_config.json" in oid_by_path:
        library = "peft"
    if library is None and (config.get("model_type") or architectures):
        library = "transformers"
    task = card.get("pipeline_tag")
    if task is None and architectures:
        task = next((task for suffix, task in _PIPELINE_TAGS.items() if architectures[0].endswith(suffix)), None)
    tags = list(info["tags"])
    if any(path.endswith(".safetensors") for path in oid_by_path):
        tags.append("safetensors")
    if any("tfevents" in path for path in oid_by_path):
        tags.append("tensorboard")
    tags += [tag for tag in (library, task, config.get("model_type")) if isinstance(tag, str)]
    info["tags"] = list(dict.fromkeys(tags))
    info["library_name"], info["pipeline_tag"] = library, task
    info["model-index"] = card.get("model-index")
    if config:
        info["config"] = config


def _read_metadata(git: GitRepository, oid: str | None) -> dict[str, Any]:
    """Returns the metadata of README.md; empty if there are none, or if they cannot be read."""
    if oid is None:
        return {}
    git.blob_info(oid)  # raises Damaged for a lost blob, even if its metadata are still in the cache
    card, _ = read_card(oid, lambda: git.blob(oid))
    return card or {}


def _read_config(git: GitRepository, oid: str | None) -> tuple[list[str], dict[str, Any]]:
    """Returns (architectures, keys to show) of config.json; both empty if it describes no model or is too large."""
    if oid is None or git.blob_info(oid).size > _MAX_CONFIG_BYTES:
        return [], {}
    architectures, summary = _CONFIG_CACHE.get(oid, lambda: _parse_config(git.blob(oid)))
    return architectures, summary


def _parse_config(content: bytes) -> tuple[list[str], dict[str, Any]]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return [], {}
    summary = {key: config[key] for key in ("architectures", "model_type") if key in config}
    # Anybody can push any JSON under this name, so every type is checked.
    architectures = summary.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        return [], {}
    return (architectures, summary) if isinstance(summary.get("model_type"), str | None) else ([], {})


def find_damage(storage: Storage, repo: RepoId) -> str | None:
    """Checks that every commit, folder and file at a branch or tag of a repository is there.

    Checks the sizes of large files, but reads no file in full.

    Args:
        storage: The Hub's storage.
        repo: The repository.

    Returns:
        A short phrase that says what is wrong; None if nothing is, or if the repository was deleted meanwhile.
    """
    try:
        storage.settings(repo)
        with storage.git(repo) as git:
            commits = [git.head(), *(ref.commit for kind in ("heads", "tags") for ref in git.refs(f"refs/{kind}/"))]
            # Check each commit and each blob once, because tags share most of their files.
            files = [git.files(commit) for commit in dict.fromkeys(commits)]
            for entry in {entry.oid: entry for entry in chain.from_iterable(files)}.values():
                pointer = git.blob_info(entry.oid).pointer
                if pointer is not None:
                    storage.large_files(repo).checked_path(pointer, entry.path)
            return None
    except Fault as fault:
        if not storage.exists(repo):  # deleted meanwhile
            return None
        if not isinstance(fault, Damaged):
            raise
        return fault.reason


def _sibling(git: GitRepository, path: str, oid: str, *, include_blobs: bool) -> dict[str, Any]:
    sibling: dict[str, object] = {"rfilename": path}
    if include_blobs:
        info = git.blob_info(oid)
        sibling |= {"blobId": oid, "size": info.size}
        if info.pointer:
            sibling["lfs"] = {"sha256": info.pointer.oid, "size": info.size, "pointerSize": info.stored_size}
    return sibling
