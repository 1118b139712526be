"""GGUF files: their weights are unpacked once into a folder of plain safetensors, which every command loads."""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import home, read_json, write_json

log = logging.getLogger(__name__)
#: Names the GGUF file that a folder was unpacked from: {file, sha256, quantization, license}.
SOURCE_FILE = "gguf.json"
_NAMED = ("general.file_type", "general.license")


def find_gguf(name: str | Path) -> Path | None:
    """Returns the GGUF file that a model's name stands for; None if it stands for something else.

    Args:
        name: A file, a folder, or a repository of a Hub. A folder stands for a GGUF file if it has nothing else.

    Raises:
        ZooError: The file is missing, or a folder has several GGUF files and nothing else.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ZooError(f"{path} has {len(files)} GGUF files: name one of them, such as {files[0]}.")
        return files[0] if files else None
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise ZooError(f"There is no file {path}: check the path of the GGUF file.")
    return path


def check_no_gguf(name: str | Path, *, key: str) -> None:
    """Checks that a reward model is not a GGUF file, which has no score head.

    Args:
        name: A folder, a file, or a repository of a Hub.
        key: The key or flag that names it, such as --reward.

    Raises:
        ZooError: It is one.
    """
    if (file := find_gguf(name)) is not None:
        raise ZooError(
            f"{key} names {file}, and a GGUF file has no score head: choose a reward model in safetensors, or "
            "train one."
        )


def unpack_if_gguf(name: str) -> str:
    """Returns the name of a model to load: for a GGUF file, the folder with its unpacked weights.

    The folder is in $RLHF_ZOO_HOME/gguf and has the file's name. The first call for a file writes it.

    Args:
        name: A GGUF file, a folder, or a repository of a Hub.

    Raises:
        ZooError: The file cannot be read, or its architecture is not supported.
    """
    file = find_gguf(name)
    if file is None:
        return name
    status = file.stat()
    digest = _digest(file.resolve(), status.st_size, status.st_mtime_ns)
    folder = home() / "gguf" / digest[:16] / file.name
    if not folder.is_dir():
        log.warning("Unpacking %s (%d MB) once, into %s", file, status.st_size // 10**6, folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
        except OSError as error:
            raise ZooError(f"{folder.parent} cannot be written ({error.strerror}): set RLHF_ZOO_HOME.") from error
        try:
            unpack(file, scratch, sha256=digest)
            os.rename(scratch, folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise another process unpacked it at the same time
                raise ZooError(f"{file} cannot be unpacked into {folder} ({error}): free some space.") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return str(folder)


def unpack(file: Path, folder: Path, *, sha256: str) -> None:
    """Writes a GGUF file's model in float32 as configuration, safetensors, tokenizer and `SOURCE_FILE`.

    Args:
        file: The GGUF file.
        folder: Where to write. It exists.
        sha256: The file's digest.

    Raises:
        ZooError: The file is damaged, or its architecture is not supported.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .model_files import loading

    with loading(f"The GGUF file {file}", " (transformers lists the architectures that it can read)"):
        facts = _metadata(file)
        options = {"gguf_file": file.name, "dtype": "float32"}
        model = AutoModelForCausalLM.from_pretrained(file.parent, **with_plain_weights(options))
        check_plain_weights(model)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.config._name_or_path = ""  # the title in the file's metadata, which would be saved as the model's name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / SOURCE_FILE, {"file": file.name, "sha256": sha256, **facts})


def gguf_source(folder: Path) -> dict[str, Any]:
    """Returns which GGUF file a folder was unpacked from.

    Args:
        folder: A model's folder.

    Returns:
        {file, sha256, quantization, license}; {} for any other folder.
    """
    path = folder / SOURCE_FILE
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


@lru_cache(maxsize=8)
def _digest(file: Path, size: int, modified: int) -> str:
    """The sha256 of a file. Size and time of modification are arguments so that a changed file is read again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _metadata(file: Path) -> dict[str, str | None]:
    """Returns the quantization and the license that a GGUF file names."""
    import gguf

    try:
        fields = gguf.GGUFReader(file).fields
    except (IndexError, OverflowError, AssertionError) as error:  # a truncated file
        raise ValueError("it is truncated or damaged") from error
    file_type, terms = (fields[name].contents() if name in fields else None for name in _NAMED)
    types = {member.value: member.name.removeprefix("MOSTLY_") for member in gguf.LlamaFileType}
    quantization = types.get(file_type) if isinstance(file_type, int) else None
    return {"quantization": quantization, "license": terms if isinstance(terms, str) else None}


def with_plain_weights(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Makes `from_pretrained` unpack the weights of a GGUF file, because packed ones cannot be saved.

    Args:
        kwargs: Keywords of `from_pretrained`.

    Returns:
        The keywords, with a quantization_config that unpacks if they have `gguf_file`.

    Raises:
        ZooError: The keywords have a quantization_config too.
    """
    file = kwargs.get("gguf_file")
    if file is None:
        return dict(kwargs)
    if kwargs.get("quantization_config") is not None:
        raise ZooError(f"gguf_file ({file}) and quantization_config are both set: remove one of them.")
    from transformers import GgufConfig

    return {**kwargs, "quantization_config": GgufConfig(dequantize=True)}


def check_plain_weights(model: Any) -> None:
    """Checks that a model loaded from a GGUF file is unpacked, so that it trains and saves like any other.

    Args:
        model: The model. If transformers still takes its unpacked weights for quantized ones, that mark is removed.

    Raises:
        ZooError: Its weights are packed.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if quantizer.packed_modules:
        raise ZooError(
            "The model's weights are packed as in its GGUF file, so they can be neither trained nor saved: load it "
            "with quantization_config=GgufConfig(dequantize=True)."
        )
    quantizer.remove_quantization_config(model)
