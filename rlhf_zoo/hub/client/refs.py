"""What a name means: a folder, else a repository of the target Hub, else one of the source of models and data."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from ...errors import ZooError
from ...fileio import hub_id, read_json, write_json
from .connect import CLIENT, Hub
from .pull import fetch, split_revision
from .refusals import after_waiting

#: Other forms of a model's weights, and what other programs read: none of it is loaded here.
NOT_LOADED = (
    "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite",
    "*.ot", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "original/*",
)  # fmt: skip
ADAPTERS = ("adapter_config.json", "critic/adapter_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine, by the name that a user or a card gave it. repo, commit, hub: None of a folder."""

    name: str
    path: Path
    repo: str | None = None
    commit: str | None = None
    hub: Hub | None = None

    @property
    def published_at(self) -> tuple[str | None, str | None, str | None]:
        """(repository, commit, the branch or tag that its name asks for); Nones of a folder."""
        revision = split_revision(self.name)[1] if self.repo else None
        return self.repo, self.commit, None if revision is None or _COMMIT.fullmatch(revision) else revision


def resolve(
    name: str | Path,
    hub: Hub = CLIENT,
    *,
    revision: str | None = None,
    but: Sequence[str] = NOT_LOADED,
    own: bool = False,
) -> Checkpoint:
    """The folder `name`, or NAMESPACE/NAME[@REVISION] fetched from `hub`, else from its source, into the cache.

    but: patterns of the files that stay there; () is for what reads the files as they are. own: the source is not
    asked, for what this run or another of the house published. Adapters whose base is of the source name its folder.
    Raises ZooError for what no Hub has, for a revision that is missing where the repository is, and for a pickle.
    """
    if Path(name).is_dir():
        return Checkpoint(str(name), Path(name))
    if str(name).startswith((".", "/", "~")):
        raise ZooError(f"There is no folder {name}: check the path, or write NAMESPACE/NAME or NAMESPACE/NAME@TAG.")
    full = f"{name}@{revision}" if revision else str(name)
    at, pulled = ask(full, replace(hub, source=None) if own else hub, lambda one: fetch(full, hub=one, but=but))
    pickled = next((path for path in pulled.left if fnmatch(path, "pytorch_model*.bin")), None)
    if pickled is not None and not any(file.path.endswith(".safetensors") for file in pulled.files):
        raise ZooError(
            f"{full} has {pickled}, a pickle, which can run code and is not read here: take a revision of it with "
            "safetensors, or convert it."
        )
    path = pulled.path if hub.source is None or not but else _on_bases(pulled.path, hub)
    return Checkpoint(full, path, pulled.repo, pulled.commit, at)


def _on_bases(folder: Path, hub: Hub) -> Path:
    """`folder`, or one beside it, of links, whose adapters name the folders of their bases.

    Libraries look for a base by its name on the one Hub that the environment names.
    """
    changed = {}
    for name in ADAPTERS:
        config = read_json(folder / name) if (folder / name).is_file() else {}
        base = hub_id(config.get("base_model_name_or_path")) if isinstance(config, dict) else None
        if base is None or Path(base).is_dir():
            continue
        full = f"{base}@{config['revision']}" if config.get("revision") else base
        at, pulled = ask(full, hub, lambda one, full=full: fetch(full, hub=one, but=NOT_LOADED))  # type: ignore[misc]
        if at is not hub:
            changed[name] = {**config, "base_model_name_or_path": str(pulled.path), "revision": None}
    if not changed:
        return folder
    copy = folder.parents[1] / "on_bases" / folder.name
    for path in folder.rglob("*"):
        at_copy = copy / path.relative_to(folder)
        at_copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and str(path.relative_to(folder)) not in changed:
            with contextlib.suppress(FileExistsError):
                at_copy.symlink_to(path)
    for name, config in changed.items():
        write_json(copy / name, config)
    return copy


def came_from(found: Hub, target: Hub) -> dict[str, str]:
    """What a lineage says of the Hub that it was found on, where that is not the run's own."""
    return {} if found.label == target.label else {"hub": found.label}


def ask(name: str, hub: Hub, look: Callable[[Hub], T]) -> tuple[Hub, T]:
    """(the Hub that answered, its answer): `hub`, and only where that has no such repository, its source."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return hub, after_waiting(lambda: look(hub), hub=hub.name)
    except ZooError as error:
        missing = error.__cause__
        elsewhere = isinstance(missing, RepositoryNotFoundError) and not isinstance(missing, GatedRepoError)
        if hub.source is None or not elsewhere:
            raise
    source = hub.source
    try:
        return source, after_waiting(lambda: look(source), hub=source.name)
    except ZooError as error:
        raise ZooError(f"{name} is not on {hub.name}, which was asked first. {error}") from error.__cause__
