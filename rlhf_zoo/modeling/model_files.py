"""Finds the files of a model in a folder or on the Hub. Reads only safetensors and JSON, never a pickle."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from huggingface_hub import hf_hub_download, is_offline_mode, resolve_revision
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionResolutionError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open

from ..errors import ZooError, first_line
from ..fileio import MAX_JSON, hub_id, parse_json
from ..hub.client.downloads import CARD_FILE, find_download
from ..hub.client.links import ADAPTER_COPIES, REVISION_FOLDERS
from ..hub.client.run_signature import TRUST_RUN_FLAG, is_own
from .config_checks import check_adapter, check_config
from .integrity import check_integrity
from .remote_code import untrusted_message

WEIGHTS_FILE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")

#: The exceptions that libraries raise if a model's files are malformed or a dependency is not installed.
LOAD_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError, StrictDataclassError,
)  # fmt: skip


@contextmanager
def translate_load_errors(subject: str, suffix: str = "") -> Iterator[None]:
    """Converts the exceptions of libraries that load a model into a ZooError.

    Args:
        subject: The model's name in the error, such as "The model NAME".
        suffix: The text after "cannot be loaded", such as " as a causal language model".

    Raises:
        ZooError: The code in this context raised SafetensorError or one of LOAD_ERRORS.
    """
    try:
        yield
    except SafetensorError as error:
        raise ZooError(f"{subject} is truncated or damaged ({first_line(error)}): copy it again.") from error
    except LOAD_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise ZooError(untrusted_message(subject)) from error
        # transformers has no error class for this case, so match the message.
        if "use_safetensors" in str(error):
            raise ZooError(
                f"{subject} has no model.safetensors, and pickled weights are not read because a pickle can run code: "
                "choose a revision with safetensors, or convert the weights."
            ) from error
        raise ZooError(f"{subject} cannot be loaded{suffix} ({first_line(error)}).") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Args:
        path: The file.

    Raises:
        ZooError: The file is not valid JSON, or does not hold an object.
    """
    try:
        with path.open("rb") as file:
            # Read one byte more than allowed, so that parse_json rejects a file that is too long.
            content = parse_json(file.read(MAX_JSON + 1))
    except ValueError as error:
        raise ZooError(f"{path} is not valid JSON ({first_line(error)}): copy it again.") from error
    if not isinstance(content, dict):
        raise ZooError(f"{path} holds a {type(content).__name__} instead of a JSON object: copy it again.")
    return content


def display_name(source: str | Path) -> str:
    """Returns a model's name for logs and errors.

    Args:
        source: A folder or a Hub id.

    Returns:
        The repository's id, for a folder in the Hub client's cache; otherwise `source` itself.
    """
    return _cached_repository_id(source) or str(source)


def _cached_repository_id(source: str | Path) -> str | None:
    """Returns the id of the model repository that a folder in the Hub client's cache belongs to; otherwise None."""
    revisions = Path(source).parent
    is_cached = revisions.name in REVISION_FOLDERS and revisions.parent.name.startswith("models--")
    return revisions.parent.name.removeprefix("models--").replace("--", "/", 1) if is_cached else None


class HubOptions(TypedDict, total=False):
    """Arguments of the Hub's client: which checkpoint to download, and how."""

    revision: str | None
    subfolder: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    force_download: bool
    local_files_only: bool


class ModelFiles:
    """The files of a checkpoint, in a folder or in a Hub repository at a fixed commit.

    Args:
        source: A folder or a Hub id.
        variant: The infix of the weight files' names, such as "fp16"; see transformers.
        **hub: See `HubOptions`.

    Raises:
        ZooError: The repository cannot be read.
    """

    def __init__(self, source: str | Path, *, variant: str | None = None, **hub: Unpack[HubOptions]) -> None:
        self.source = str(source)
        self.variant = variant
        self.hub_options: dict[str, Any] = {name: value for name, value in hub.items() if value not in (None, "")}
        self.directory = Path(source) / (hub.get("subfolder") or "") if Path(source).is_dir() else None
        if self.directory is None:
            # Pin one commit for all files, because a run may push between two downloads.
            options = {
                name: value for name, value in self.hub_options.items() if name not in ("subfolder", "force_download")
            }
            try:
                self.hub_options["revision"] = resolve_revision(self.source, **options)
            except (HfHubHTTPError, HFValidationError, RevisionResolutionError) as error:
                raise ZooError(
                    f"{self.source} is neither a folder nor a readable repository ({first_line(error)}): check its "
                    "name, its revision and your token."
                ) from error

    def find(self, name: str) -> Path | None:
        """Returns a file's path, and downloads the file if necessary; None if the checkpoint has no such file.

        Args:
            name: The file's path in the checkpoint.
        """
        if self.directory is not None:
            path = self.directory / name
            return path if path.is_file() else None
        download_path = self._hub_download(name)
        return None if download_path is None else Path(download_path)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a file. Downloads nothing.

        Args:
            name: The file's path in the checkpoint.
        """
        if self.directory is not None:
            return (self.directory / name).is_file()
        return self._hub_download(name, dry_run=True) is not None

    def _hub_download(self, name: str, *, dry_run: bool = False) -> Any:
        try:
            return hf_hub_download(self.source, name, dry_run=dry_run, **self.hub_options)
        except LocalEntryNotFoundError as error:
            # Only the cache is available offline, so a file that is not in the cache counts as missing.
            if self.hub_options.get("local_files_only") or is_offline_mode():
                return None
            raise ZooError(
                f"The Hub did not answer whether {self.source} has a file {name}: check the connection, or set "
                "HF_HUB_OFFLINE=1 to use the cache only."
            ) from error
        except EntryNotFoundError:
            return None

    @cached_property
    def adapter_config(self) -> dict[str, Any] | None:
        """The content of adapter_config.json; None if there is no such file.

        Raises:
            ZooError: The adapter is not supported, or it was downloaded and names a path on this machine as its base.
        """
        path = self.find(ADAPTER_CONFIG)
        if path is None:
            return None
        config = read_json_object(path)
        check_adapter(config, f"{ADAPTER_CONFIG} of {self.source}")
        self._check_base(config.get("base_model_name_or_path"))
        return config

    def _check_base(self, base: Any) -> None:
        """Raises ZooError if a downloaded adapter names a path on this machine as its base.

        A run publishes an adapter merged into its base, so a stranger's adapter could publish a private model.
        """
        if not base or (self.directory is not None and not is_foreign(self.directory)):
            return
        is_adapter_copy = self.directory is not None and self.directory.parent.name == ADAPTER_COPIES
        if is_adapter_copy and _cached_repository_id(str(base)) is not None:
            return  # `hub.client.refs` downloaded the base into the client's cache, and wrote that path into this copy
        if hub_id(base) is None or os.path.lexists(base):
            mark = None if self.directory is None else find_download(self.directory)
            is_from_run = mark is not None and _run_file_beside_card(mark) is not None
            hint = f", or add {TRUST_RUN_FLAG} if you trust the run" if is_from_run else ""
            raise ZooError(
                f"The adapter in {self.source} names the base {base!r:.200}, a path on this machine, but a download "
                f"may name only a model on the Hub: merge it where it was trained{hint}."
            )

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads a JSON file of the checkpoint.

        Args:
            name: The file's path in the checkpoint.

        Returns:
            The object in the file; {} if there is no such file.

        Raises:
            ZooError: The file does not hold a JSON object.
        """
        path = self.find(name)
        return {} if path is None else read_json_object(path)

    @cached_property
    def weights(self) -> tuple[Path, Mapping[str, str] | None] | None:
        """The weights: (file, None), or (index, {tensor: file}) for shards; None if there are no safetensors.

        As in transformers, a single file has priority over shards.
        """
        infix = f".{self.variant}" if self.variant else ""
        if weights_file := self.find(f"model{infix}.safetensors"):
            return weights_file, None
        if index := self.find(f"{WEIGHTS_FILE}.index{infix}.json"):
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ZooError(f"{index} has no weight_map of file names: copy it again.")
            _check_shards(index, weight_map.values())
            return index, weight_map
        return None

    def check_shards(self) -> None:
        """Checks that shard indices name only .safetensors files in their own folder.

        Transformers would load any other file that they name.

        Raises:
            ZooError: A shard index names another file.
        """
        if self.directory is not None:
            indices = sorted(self.directory.glob("*.safetensors.index*.json"))
        else:
            index = self.find(f"{WEIGHTS_FILE}.index.json")
            indices = [] if index is None else [index]
        for index in indices:
            weight_map = read_json_object(index).get("weight_map")
            _check_shards(index, weight_map.values() if isinstance(weight_map, dict) else ())

    def check_config(self) -> None:
        """Checks config.json before a configuration is built from it.

        Raises:
            ZooError: The file asks for more layers, experts or labels than any machine can build, or names a kernel
                in a repository, which transformers would download and run.
        """
        path = self.find("config.json")
        if path is None:
            return
        check_config(read_json_object(path), f"config.json of {self.source}")

    def check_weights(self) -> None:
        """Checks that the weights in a folder are intact safetensors. A folder without weights passes.

        Raises:
            ZooError: Weights are pickled or truncated.
        """
        assert self.directory is not None
        if self.find(ADAPTER_CONFIG) is not None:
            stem, has_safetensors = "adapter_model", self.has(ADAPTER_WEIGHTS)
        else:
            stem, has_safetensors = "model", self.weights is not None
        if not has_safetensors:
            self.refuse_pickle(stem)
        for path in sorted(self.directory.glob("*.safetensors")):
            # Opening is enough to notice a truncated file, because the header states the file's length.
            with translate_load_errors(f"{self.source}/{path.name}"), safe_open(path, framework="pt"):
                pass

    def require_weights(self) -> None:
        """Checks that a folder has an adapter's weights, or a model's safetensors with every shard in the index.

        Raises:
            ZooError: A weight file is missing.
        """
        assert self.directory is not None
        if self.find(ADAPTER_CONFIG) is not None:
            if not self.has(ADAPTER_WEIGHTS):
                raise ZooError(f"The adapter in {self.source} has no {ADAPTER_WEIGHTS}: copy its weights there too.")
            return
        if self.weights is None:
            raise ZooError(
                f"The model in {self.source} has no weights: copy {WEIGHTS_FILE} there, or all shards and their index."
            )
        index, weight_map = self.weights
        if missing_files := sorted(name for name in set((weight_map or {}).values()) if not self.has(name)):
            problem = (
                f"{len(missing_files)} missing weight files, such as {missing_files[0]}: copy them"
                if len(missing_files) > 1
                else f"the missing weight file {missing_files[0]}: copy it"
            )
            raise ZooError(f"{index} names {problem} there too.")

    def refuse_pickle(self, stem: str) -> None:
        """Raises an error if the weights are pickled. Call this if there are no safetensors.

        Args:
            stem: The name of the safetensors file without its ending: "model" or "adapter_model".

        Raises:
            ZooError: The weights are pickled. The message gives a command that converts them.
        """
        pickle_stem = "pytorch_model" if stem == "model" else stem
        for name in (f"{pickle_stem}.bin", f"{pickle_stem}.bin.index.json"):
            if self.has(name):
                download_step = "download it, then " if self.directory is None else ""
                raise ZooError(
                    f"{self.source} has pickled weights ({name}), which are not read because a pickle can run code: if "
                    f"you trust it, {download_step}run, in its folder, `{_conversion_command(pickle_stem, stem)}`."
                )


def _conversion_command(pickle_stem: str, stem: str) -> str:
    """Returns a command that converts pickled weights.

    It clones every tensor, because safetensors refuses tensors that share memory.
    """
    return (
        "python -c 'import glob, torch, safetensors.torch as st; st.save_file({k: v.clone() "
        f'for f in glob.glob("{pickle_stem}*.bin") for k, v in torch.load(f, weights_only=True).items()}}, '
        f'"{stem}.safetensors", metadata={{"format": "pt"}})\''
    )


def _check_shards(index: Path, files: Iterable[Any]) -> None:
    invalid_file = next((file for file in files if not isinstance(file, str) or not _SHARD.fullmatch(file)), None)
    if invalid_file is not None:
        raise ZooError(
            f"{index} names the file {invalid_file!r:.200}, but shards must be .safetensors files next to their index: "
            "choose another model, or copy it again."
        )


def is_foreign(folder: Path) -> bool:
    """Whether a folder was downloaded. The output of a run that is the user's own or trusted does not count."""
    mark = find_download(folder)
    if mark is None:
        return False
    run_file = _run_file_beside_card(mark)
    return run_file is None or not is_own(read_json_object(run_file))


def _run_file_beside_card(mark: Path) -> Path | None:
    """Returns the run.json in the folder of a download's mark, if that mark is the card of a run; otherwise None."""
    # A card marks a download, but the user's own runs have cards too.
    run_file = mark.parent / "run.json"
    return run_file if mark.name == CARD_FILE and run_file.is_file() else None


def find_model_files(source: str | Path, **hub: Unpack[HubOptions]) -> ModelFiles:
    """Finds a model's files, and checks config.json and the shard indices.

    In a folder, it also checks the weights and the digests that the run recorded. On the Hub, it also checks an
    adapter's config, and that the adapter's weights are not pickled.

    Args:
        source: A folder or a Hub id.
        **hub: See `HubOptions`. Ignored for a folder.

    Raises:
        ZooError: A check fails.
    """
    if Path(source).is_dir():
        check_integrity(source)
        files = ModelFiles(source)
        files.check_weights()
        files.check_config()
        files.check_shards()
        return files
    files = ModelFiles(source, **hub)
    files.check_config()
    files.check_shards()
    if files.adapter_config is not None and files.find(ADAPTER_WEIGHTS) is None:
        files.refuse_pickle("adapter_model")  # peft would read the pickle, despite use_safetensors
    return files
