"""Finds the files of a model in a folder or on the Hub, and reads safetensors and JSON only, never a pickle."""

import importlib.util
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..errors import ZooError
from ..fileio import MAX_JSON, hub_id, parse_json
from ..hub.client.downloads import CARD, find_download
from ..hub.client.run_signature import FLAG, is_own
from .config_checks import check_adapter, check_config, check_tokenizer
from .integrity import check_integrity
from .remote_code import is_trusted, refusal, use_code

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_LAYER = re.compile(r"\.(layers|h|blocks?)\.\d+\.")
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Loading:
    """How weights are loaded. dtype: what they are held in, a name of torch's or "auto", as they were saved.

    attention: the implementation, None for transformers' choice; quantization: a configuration of transformers'.
    """

    dtype: str = "float32"
    attention: str | None = None
    quantization: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords of `from_pretrained`."""
        options = {"attn_implementation": self.attention, "quantization_config": self.quantization}
        chosen = {name: value for name, value in options.items() if value is not None}
        return {"dtype": self.dtype, "trust_remote_code": is_trusted(), **chosen}


FLOAT32 = Loading()
AS_SAVED = Loading(dtype="auto")


#: What libraries raise for files of a model that are not as they should be, or that need a library that is missing.
MALFORMED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError, StrictDataclassError,
)  # fmt: skip


def first_line(error: Exception) -> str:
    """Shortens an error's message to what fits into a sentence."""
    if isinstance(error, RecursionError):
        return "its JSON is nested too deep"
    if isinstance(error, StrictDataclassError):  # a heading, and then what is wrong
        return str(error).strip().splitlines()[-1].strip().rstrip(".")
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


@contextmanager
def loading(what: str, kind: str = "") -> Iterator[None]:
    """Raises ZooError for what goes wrong while `what`, such as "The model NAME", is loaded; kind: as what."""
    try:
        yield
    except SafetensorError as error:
        raise ZooError(f"{what} is cut short or damaged ({first_line(error)}): copy it again.") from error
    except MALFORMED as error:
        if "trust_remote_code" in str(error):
            raise ZooError(refusal(what)) from error
        if "use_safetensors" in str(error):
            raise ZooError(
                f"{what} has no model.safetensors, and a pickle can run code and is not read here: take a revision "
                "of it with safetensors, or convert it."
            ) from error
        raise ZooError(f"{what} cannot be loaded{kind} ({first_line(error)}).") from error


def json_object(path: Path) -> dict[str, Any]:
    """Reads a model's JSON file. Raises ZooError for anything but an object."""
    try:
        with path.open("rb") as file:
            content = parse_json(file.read(MAX_JSON + 1))
    except ValueError as error:
        raise ZooError(f"{path} is not JSON ({first_line(error)}): copy it again.") from error
    if not isinstance(content, dict):
        raise ZooError(f"{path} holds a {type(content).__name__}, and no JSON object: copy it again.")
    return content


def name_of(source: str | Path) -> str:
    """Returns a model's name for people: the repository of a folder in the client's cache, else the name itself."""
    snapshots = Path(source).parent
    cached = snapshots.name in ("snapshots", "on_bases") and snapshots.parent.name.startswith("models--")
    return snapshots.parent.name.removeprefix("models--").replace("--", "/", 1) if cached else str(source)


def load_tokenizer(source: str | Path, *, name: str | None = None, **hub: Any) -> PreTrainedTokenizerBase:
    """The tokenizer saved with a model. name: what errors call it, else `source`; hub: revision, token, ...

    Raises ZooError where there is none: of config.json alone transformers would make an empty one.
    """
    name = name or str(source)
    missing = f"{name} has no tokenizer that can be loaded"
    if Path(source).is_dir() and not any((Path(source) / file).is_file() for file in TOKENIZER_FILES):
        raise ZooError(f"{missing}: save the tokenizer with the model.")
    files = ModelFiles(source, **hub)
    files.check_config()  # which is read for the tokenizer's class
    unused = check_tokenizer(
        files.settings("tokenizer_config.json"),
        files.settings("special_tokens_map.json"),
        files.settings("config.json"),
        name,
    )
    if files.directory is None:
        hub = {**hub, "revision": files.hub["revision"]}  # of the files that were checked
    if is_trusted():
        use_code(files.find, name, name=name_of(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=is_trusted(), **unused, **hub)
    except Exception as error:  # of tokenizers, which is written in Rust, this class itself
        if "trust_remote_code" in str(error):
            raise ZooError(refusal(f"The tokenizer of {name}")) from error
        raise ZooError(f"{missing} ({first_line(error)}): save the tokenizer with the model.") from error
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ == "WordPiece" and model.token_to_id(model.unk_token) is None:
        raise ZooError(
            f"The tokenizer of {name} splits words into pieces and has no token {model.unk_token} for what it does not "
            "know: add it to the vocabulary, or take another tokenizer."
        )
    return tokenizer


class ModelFiles:
    """The files of a checkpoint, in a folder or in a repository of the Hub at one commit."""

    def __init__(self, source: str | Path, *, variant: str | None = None, **hub: Any) -> None:
        """hub: keywords among HUB_ARGUMENTS. Raises ZooError for a repository that cannot be read."""
        self.source = str(source)
        self.variant = variant
        self.hub = {name: value for name, value in hub.items() if value not in (None, "")}
        self.directory = Path(source) / (hub.get("subfolder") or "") if Path(source).is_dir() else None
        if self.directory is None:
            # One commit for all files: a run may push between the download of the trunk and that of the head.
            pin = {name: value for name, value in self.hub.items() if name not in ("subfolder", "force_download")}
            try:
                self.hub["revision"] = resolve_revision(self.source, **pin)
            except (HfHubHTTPError, HFValidationError, RevisionResolutionError) as error:
                raise ZooError(
                    f"{self.source} is neither a directory nor a repository that can be read ({first_line(error)}): "
                    "check its name, its revision and your token."
                ) from error

    def find(self, name: str) -> Path | None:
        """Returns a file's path, and downloads it if need be; None where the checkpoint has no such file."""
        if self.directory is not None:
            path = self.directory / name
            return path if path.is_file() else None
        cached = self._ask_hub(name)
        return None if cached is None else Path(cached)

    def has(self, name: str) -> bool:
        """Whether there is such a file. Downloads nothing."""
        if self.directory is not None:
            return (self.directory / name).is_file()
        return self._ask_hub(name, dry_run=True) is not None

    def _ask_hub(self, name: str, **options: Any) -> Any:
        try:
            return hf_hub_download(self.source, name, **self.hub, **options)
        except LocalEntryNotFoundError as error:
            if self.hub.get("local_files_only") or is_offline_mode():
                return None
            raise ZooError(
                f"The Hub does not answer whether {self.source} has a file {name}: check the connection, or set "
                "HF_HUB_OFFLINE=1 to use what is cached alone."
            ) from error
        except EntryNotFoundError:
            return None

    @cached_property
    def adapter(self) -> dict[str, Any] | None:
        """The content of adapter_config.json; None without one. Raises ZooError for one that is not supported."""
        path = self.find(ADAPTER_CONFIG)
        if path is None:
            return None
        config = json_object(path)
        check_adapter(config, f"{ADAPTER_CONFIG} of {self.source}")
        self._check_base(config.get("base_model_name_or_path"))
        return config

    def _check_base(self, base: Any) -> None:
        """Raises ZooError where a downloaded adapter names a base on this machine, which may be private."""
        if not base or (self.directory is not None and not is_strange(self.directory)):
            return
        if self.directory is not None and self.directory.parent.name == "on_bases" and name_of(str(base)) != base:
            return  # the client's cache, where `hub.client.refs` names the folder that a base was fetched into
        if hub_id(base) is None or os.path.lexists(base):
            raise ZooError(
                f"The adapter in {self.source} lies on {base!r:.200}, which is a path of this machine, and a download "
                f"may name only a model on the Hub: merge it where it was trained, or add {FLAG} if it is a run that "
                "you trust."
            )

    def settings(self, name: str) -> dict[str, Any]:
        """The object in one of its JSON files, {} where it has no such file. Raises ZooError for anything else."""
        path = self.find(name)
        return {} if path is None else json_object(path)

    @cached_property
    def weights(self) -> tuple[Path, Mapping[str, str] | None] | None:
        """The weights file, or a sharded checkpoint's index with the file of each tensor; None without safetensors.

        A single file goes before shards, as transformers has it.
        """
        infix = f".{self.variant}" if self.variant else ""
        if single := self.find(f"model{infix}.safetensors"):
            return single, None
        if index := self.find(f"{WEIGHTS_FILE}.index{infix}.json"):
            files = json_object(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ZooError(f"{index} names no file of any weight: copy it again.")
            _check_shards(index, files.values())
            return index, files
        return None

    def check_shards(self) -> None:
        """Raises ZooError where an index names weights outside its folder, which transformers would load."""
        if self.directory is not None:
            indices = sorted(self.directory.glob("*.safetensors.index*.json"))
        else:
            index = self.find(f"{WEIGHTS_FILE}.index.json")
            indices = [] if index is None else [index]
        for index in indices:
            files = json_object(index).get("weight_map")
            _check_shards(index, files.values() if isinstance(files, dict) else ())

    def check_config(self) -> None:
        """Raises ZooError for a configuration of more parts than any machine builds, before one is built; and for one
        that names a kernel of a repository, which transformers would fetch and run."""
        path = self.find("config.json")
        if path is None:
            return
        check_config(json_object(path), f"config.json of {self.source}")

    def check_weights(self) -> None:
        """Raises ZooError for a folder whose weights are a pickle or are truncated. Missing weights pass."""
        assert self.directory is not None
        if self.find(ADAPTER_CONFIG) is not None:
            kind, there = "adapter_model", self.has(ADAPTER_WEIGHTS)
        else:
            kind, there = "model", self.weights is not None
        if not there:
            self.refuse_pickle(kind)
        for path in sorted(self.directory.glob("*.safetensors")):
            # Its header says how long it must be.
            with loading(f"{self.source}/{path.name}"), safe_open(path, framework="pt"):
                pass

    def refuse_pickle(self, kind: str) -> None:
        """Raises ZooError if weights of this kind ("model" or "adapter_model") exist as a pickle."""
        stem = "pytorch_model" if kind == "model" else kind
        for name in (f"{stem}.bin", f"{stem}.bin.index.json"):
            if self.has(name):
                raise ZooError(
                    f"{self.source} has {name}, a pickle, which can run code and is not read here: if you trust it, "
                    f"write {kind}.safetensors beside it by running, in that directory, "
                    f"`{_conversion(stem, kind)}`."
                )


def _conversion(stem: str, kind: str) -> str:
    """A command that writes pickled weights as safetensors; clones, because tied weights share their memory."""
    return (
        "python -c 'import glob, torch, safetensors.torch as st; st.save_file({k: v.clone() "
        f'for f in glob.glob("{stem}*.bin") for k, v in torch.load(f, weights_only=True).items()}}, '
        f'"{kind}.safetensors", metadata={{"format": "pt"}})\''
    )


def _check_shards(index: Path, files: Iterable[Any]) -> None:
    wrong = next((file for file in files if not isinstance(file, str) or not _SHARD.fullmatch(file)), None)
    if wrong is not None:
        raise ZooError(
            f"{index} names the file {wrong!r:.200}, and weights lie beside their index: take another model, or copy "
            "it again."
        )


def is_strange(folder: Path) -> bool:
    """Whether a folder with a model was downloaded, or belongs to a run that this user's rlhf-zoo did not write."""
    mark = find_download(folder)
    if mark is None:
        return False
    run = mark.parent / "run.json"
    # The card of one's own run lies in its directory too.
    return not (mark.name == CARD and run.is_file() and is_own(json_object(run)))


def model_files(source: str | Path, **hub: Any) -> ModelFiles:
    """The files of a model, looked at. hub: revision, token.

    Raises ZooError for weights that are a pickle or damaged, for a configuration that names a kernel of a repository,
    and for a checkpoint of a run that is not what was saved.
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
    if files.adapter is not None and files.find(ADAPTER_WEIGHTS) is None:
        files.refuse_pickle("adapter_model")  # peft reads it in spite of use_safetensors
    return files


def load_lacking(
    auto_class: Any,
    source: str | Path,
    *,
    what: str,
    kind: str = "",
    how: Loading = FLOAT32,
    may_lack: tuple[str, ...] = (),
    **kwargs: Any,
) -> tuple[Any, set[str]]:
    """`auto_class.from_pretrained` of a whole model, from safetensors, all of whose weights are there.

    Args:
        auto_class: A class of transformers.
        source: A folder or Hub id.
        what: As `loading` says it; kind, too.
        how: In which precision, and by which kernels.
        may_lack: Modules that the checkpoint need not have, such as a head that is to be trained.
        kwargs: Further keywords of `from_pretrained`.

    Returns:
        The model, and the names of the weights that the checkpoint lacks, all of them of `may_lack`.

    Raises:
        ZooError: It cannot be loaded so, its weights do not fit its configuration, or it is a checkpoint of a run that
            is not what was saved.
    """
    files = model_files(source, **{name: kwargs[name] for name in ("revision", "token") if name in kwargs})
    if files.adapter is not None:
        raise ZooError(f"{what} is an adapter: merge it into its base first, or give that.")
    with loading(what, kind):
        use_code(files.find, what, name=name_of(source))
        loaded = auto_class.from_pretrained(
            source,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # or transformers says that there are some, and not which
            **with_plain_weights({**how.arguments, **_pinned(files, kwargs)}),
        )
    if not isinstance(loaded, tuple):  # a class of one's own, which reports nothing
        return loaded, set()
    model, report = loaded
    _check_fit(report, what, may_lack)
    return model, set(report["missing_keys"])


def load_model(auto_class: Any, source: str | Path, **how: Any) -> Any:
    """Like `load_lacking`, but returns the model only."""
    return load_lacking(auto_class, source, **how)[0]


def _check_fit(report: Mapping[str, Any], what: str, may_lack: tuple[str, ...]) -> None:
    """Raises ZooError where weights have other sizes than the configuration says, or random ones would stand in.

    report: of `from_pretrained`.
    """
    mend = "take the config.json that was saved with these weights"
    for name, saved, wanted in sorted(report["mismatched_keys"], key=lambda entry: entry[0]):
        sizes = (" x ".join(map(str, size)) for size in (saved, wanted))
        raise ZooError("{} has a weight {} of {}, and its config.json says {}: {}.".format(what, name, *sizes, mend))
    missing = sorted(name for name in report["missing_keys"] if name.split(".")[0] not in may_lack)
    if missing:
        count = f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        raise ZooError(f"{what} lacks weights that its config.json names ({count}): {mend}, or copy it again, whole.")
    layered = sorted(name for name in report["unexpected_keys"] if _LAYER.search(name))
    if layered:
        raise ZooError(
            f"{what} has weights of more layers than its config.json names ({layered[0]} and {len(layered) - 1} more): "
            f"{mend}."
        )


def check_no_gguf(name: str | Path, *, key: str) -> None:
    """Checks that what names a model for a recipe is no GGUF file, nor a folder of nothing else.

    Args:
        name: A folder, a file, or a repository of a Hub.
        key: What names it, such as --model.

    Raises:
        ZooError: It is one.
    """
    path = Path(name)
    files = [path] if path.suffix == ".gguf" else []
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
    if files:
        raise ZooError(
            f"{key} names {files[0]}, a GGUF file, and recipes train models of safetensors: save it unpacked in a "
            "folder (docs/models.md), and name that."
        )


def with_plain_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `from_pretrained`; with `gguf_file` they have the weights unpacked, as packed ones cannot be saved.

    Args:
        given: The keywords as somebody gave them.

    Returns:
        The same keywords where they name no `gguf_file`.

    Raises:
        ZooError: The package gguf is not installed, or another quantization is given too.
    """
    file = given.get("gguf_file")
    if file is None:
        return dict(given)
    if importlib.util.find_spec("gguf") is None:
        raise ZooError(
            f"gguf_file is {file}, and the package gguf is not installed: pip install gguf, or give a model with "
            "safetensors."
        )
    if given.get("quantization_config") is not None:
        raise ZooError(f"gguf_file is {file} and quantization_config is given too: leave one of them out.")
    from transformers import GgufConfig

    log.info("The weights of %s are unpacked once, and what is saved of them is plain safetensors.", file)
    return {**given, "quantization_config": GgufConfig(dequantize=True)}


def check_plain_weights(model: Any) -> None:
    """Has a model that was loaded from a GGUF file elsewhere saved as any other.

    Args:
        model: A model, changed where transformers still takes its unpacked weights for quantized ones.

    Raises:
        ZooError: Its weights are packed, so that they neither train nor can be saved.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if quantizer.packed_modules:
        raise ZooError(
            "The model's weights are packed as in its GGUF file, so they neither train nor can be saved: load it with "
            "quantization_config=GgufConfig(dequantize=True)."
        )
    quantizer.remove_quantization_config(model)


def load_config(source: str | Path, *, what: str, **hub: Any) -> PreTrainedConfig:
    """A model's configuration. hub: revision, token. Raises ZooError for what cannot be read."""
    files = ModelFiles(source, **hub)
    files.check_config()
    with loading(what):
        if is_trusted():
            use_code(files.find, what, name=name_of(source))
            hub = _pinned(files, hub)
        return AutoConfig.from_pretrained(source, trust_remote_code=is_trusted(), **hub)


def _pinned(files: ModelFiles, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """With the commit whose code was looked at, where code may run."""
    if not is_trusted() or files.directory is not None:
        return dict(kwargs)
    return {**kwargs, "revision": files.hub["revision"]}
