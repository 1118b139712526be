"""Resolves a model's name to a local folder, else to a repository on a Hub, else to one on its source Hub."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...errors import ZooError, as_clause
from ...fileio import hub_id, read_json, write_json
from .connect import DEFAULT_HUB, Hub
from .links import ADAPTER_COPIES
from .pull import PulledRevision, fetch, split_revision
from .refusals import is_missing, retry_when_rate_limited
from .trees import COMMIT_ID

#: Patterns of weights in formats other than safetensors, and of files for other programs. rlhf-zoo loads none of them.
NOT_LOADED = (
    "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite",
    "*.ot", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "original/*",
)  # fmt: skip
ADAPTER_CONFIGS = ("adapter_config.json", "critic/adapter_config.json")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Checkpoint:
    """A model or a checkpoint on this machine.

    Args:
        name: The name, with the revision if the user gave a revision. A short step such as step-40 becomes the tag
            step-000040.
        path: The folder.
        repo, commit, hub: Where the model was fetched from; None for a local folder.
    """

    name: str
    path: Path
    repo: str | None = None
    commit: str | None = None
    hub: Hub | None = None

    @property
    def hub_location(self) -> tuple[str | None, str | None, str | None]:
        """(repository, commit, the branch or tag in `name`); (None, None, None) for a local folder."""
        revision = split_revision(self.name)[1] if self.repo else None
        return self.repo, self.commit, None if revision is None or COMMIT_ID.fullmatch(revision) else revision


def resolve(
    name: str | Path,
    hub: Hub = DEFAULT_HUB,
    *,
    revision: str | None = None,
    ignore: Sequence[str] = NOT_LOADED,
    skip_source: bool = False,
    is_repository: bool = False,
) -> Checkpoint:
    """Resolves a model's name. Fetches the model into the cache if it is not a local folder.

    Args:
        name: A folder, or NAMESPACE/NAME[@REVISION].
        hub: The Hub to ask first. If it does not have the repository, its source is asked.
        revision: A branch, tag, commit or step; None for the one in `name`, by default main.
        ignore: Patterns of files that are not fetched. () fetches all files, and changes no adapter's configuration.
        skip_source: Whether to ask only `hub` for the model and not its source, because the user's own run published it
            there. An adapter's base may still come from the source.
        is_repository: Whether `name` must be a repository, as on a card, and is never looked up as a local folder.

    Returns:
        The model. If an adapter's base comes from the source, the adapter's configuration names the base's folder here.

    Raises:
        ZooError: There is no such folder; no Hub has the repository, or a Hub refuses; the repository lacks the
            revision; or its only weights are a pickle.
    """
    if not is_repository and Path(name).is_dir():
        return Checkpoint(str(name), Path(name))
    # Do not ask the Hub for a mistyped path.
    if str(name).startswith((".", "/", "~")):
        raise ZooError(f"There is no folder {name}: check the path, or write NAMESPACE/NAME or NAMESPACE/NAME@TAG.")
    full_name = f"{name}@{revision}" if revision else str(name)
    first_hub = replace(hub, source_hub=None) if skip_source else hub
    serving_hub, download = try_hub_then_source(
        full_name, first_hub, lambda hub_to_ask: fetch(full_name, hub=hub_to_ask, ignore=ignore)
    )
    # NOT_LOADED leaves pickles on the Hub. If there are no safetensors either, nothing that can be loaded was fetched.
    pickle_path = next((path for path in download.excluded if fnmatch(path, "pytorch_model*.bin")), None)
    loads_weights = "*.safetensors" not in ignore
    if loads_weights and pickle_path and not any(file.path.endswith(".safetensors") for file in download.files):
        raise ZooError(
            f"{full_name} has {pickle_path}, a pickle, which can run code and is never loaded: use a revision with "
            "safetensors, or convert it."
        )
    path = download.path if hub.source_hub is None or not ignore else _with_local_bases(download.path, hub)
    # Only rlhf-zoo understands a short step such as step-40. Lineage, votes and pages need the tag, because any client
    # can load it.
    tagged_name = f"{download.repo}@{download.revision}" if split_revision(full_name)[1] else full_name
    return Checkpoint(tagged_name, path, download.repo, download.commit, serving_hub)


def _with_local_bases(folder: Path, hub: Hub) -> Path:
    """Returns `folder`; if an adapter's base comes from the source, a copy in which the adapter names a local folder.

    peft looks up a base by name, and only on the Hub that the environment names, so it would not find a base on the
    source. The copy consists of links and of the changed configurations.
    """
    new_configs = {}
    for name in ADAPTER_CONFIGS:
        config = read_json(folder / name) if (folder / name).is_file() else {}
        base = hub_id(config.get("base_model_name_or_path")) if isinstance(config, dict) else None
        if base is None or Path(base).is_dir():
            continue
        base_id = f"{base}@{config['revision']}" if config.get("revision") else base
        serving_hub, download = try_hub_then_source(base_id, hub, partial(_fetch_base, base_id))
        if serving_hub is not hub:
            new_configs[name] = {**config, "base_model_name_or_path": str(download.path), "revision": None}
    if not new_configs:
        return folder
    # Make the copy inside the repository's folder in the cache: `modeling.model_files` and `links` recognize
    # downloads by that path.
    copy = folder.parents[1] / ADAPTER_COPIES / folder.name
    for path in folder.rglob("*"):
        link = copy / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and str(path.relative_to(folder)) not in new_configs:
            with contextlib.suppress(FileExistsError):  # from an earlier call, or another process
                link.symlink_to(path)
    for name, config in new_configs.items():
        write_json(copy / name, config)
    return copy


def _fetch_base(base_id: str, hub: Hub) -> PulledRevision:
    return fetch(base_id, hub=hub, ignore=NOT_LOADED)


def hub_lineage(model_hub: Hub, run_hub: Hub) -> dict[str, str]:
    """Returns the lineage entry {"hub": label} for a model that came from a Hub other than the run's own; else {}.

    Args:
        model_hub: The Hub that the model came from.
        run_hub: The Hub that the run publishes to.
    """
    return {} if model_hub.label == run_hub.label else {"hub": model_hub.label}


def try_hub_then_source(name: str, hub: Hub, request: Callable[[Hub], Answer]) -> tuple[Hub, Answer]:
    """Sends a request to a Hub, and to its source if the Hub does not have the repository.

    Args:
        name: The repository, for messages.
        hub: The Hub to ask first.
        request: Sends the request to the given Hub. Raises a ZooError whose `__cause__` is the client's error.

    Returns:
        The Hub that answered, and its answer.

    Raises:
        ZooError: Neither Hub has the repository, or a Hub refuses for another reason.
    """
    try:
        return hub, retry_when_rate_limited(lambda: request(hub), hub_name=hub.name)
    except ZooError as error:
        if hub.source_hub is None or error.__cause__ is None or not is_missing(error.__cause__):
            raise
    source = hub.source_hub
    try:
        return source, retry_when_rate_limited(lambda: request(source), hub_name=source.name)
    except ZooError as error:
        problem = f"{name} is not on {hub.name}, which was asked first"
        raise ZooError(f"{problem}; {as_clause(error)}") from error.__cause__
