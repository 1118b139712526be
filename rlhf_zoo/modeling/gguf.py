"""Unpacks the weights of GGUF files into folders with plain safetensors, which every command can load."""

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
#: The file in an unpacked folder that describes the original GGUF file: {file, sha256, quantization, license}.
SOURCE_FILE = "gguf.json"


def find_gguf(name: str | Path) -> Path | None:
    """Returns the GGUF file that a model's name refers to; None for any other model.

    Args:
        name: A file, a folder, or a repository of a Hub. A folder without config.json refers to its GGUF file.

    Raises:
        ZooError: The file is missing, or a folder without config.json has several GGUF files.
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
        key: The key or flag that names the model, such as --reward.

    Raises:
        ZooError: The model is a GGUF file.
    """
    if (file := find_gguf(name)) is not None:
        raise ZooError(
            f"{key} names {file}, but a GGUF file has no score head: choose a reward model in safetensors, or "
            "train one."
        )


def unpack_if_gguf(name: str) -> str:
    """Returns a name from which a model can be loaded: for a GGUF file, a folder with the unpacked weights.

    The folder is below $RLHF_ZOO_HOME/gguf. The first call for a file creates the folder.

    Args:
        name: A GGUF file, a folder, or a repository of a Hub.

    Raises:
        ZooError: The file cannot be read, its architecture is not supported, or the folder cannot be written.
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
            scratch_folder = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
        except OSError as error:
            raise ZooError(f"{folder.parent} cannot be written ({error.strerror}): set RLHF_ZOO_HOME.") from error
        try:
            unpack(file, scratch_folder, sha256=digest)
            # Rename in one step, so that no process loads a folder that is only partly written.
            os.rename(scratch_folder, folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise another process unpacked it at the same time
                raise ZooError(f"{file} cannot be unpacked into {folder} ({error}): free some space.") from error
        finally:
            shutil.rmtree(scratch_folder, ignore_errors=True)
    return str(folder)


def unpack(file: Path, folder: Path, *, sha256: str) -> None:
    """Writes the model of a GGUF file in float32: configuration, safetensors, tokenizer and `SOURCE_FILE`.

    Args:
        file: The GGUF file.
        folder: An existing folder to write to.
        sha256: The SHA-256 of the file, in hex.

    Raises:
        ZooError: The file is damaged, or its architecture is not supported.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from .model_files import translate_load_errors

    transformers_logging.disable_progress_bar()  # the bars for loading and saving; a bar for unpacking remains
    with translate_load_errors(f"The GGUF file {file}", " (transformers lists the architectures that it can read)"):
        metadata = _read_metadata(file)
        options = {"gguf_file": file.name, "dtype": "float32"}
        model = AutoModelForCausalLM.from_pretrained(file.parent, **with_plain_weights(options))
        check_plain_weights(model)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.config._name_or_path = ""  # otherwise the title in the file's metadata would be saved as the model's name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / SOURCE_FILE, {"file": file.name, "sha256": sha256, **metadata})


def gguf_source(folder: Path) -> dict[str, Any]:
    """Reads the record of the GGUF file from which a folder was unpacked.

    Returns:
        {file, sha256, quantization, license}; {} for any other folder.
    """
    path = folder / SOURCE_FILE
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


@lru_cache(maxsize=8)
def _digest(file: Path, size: int, modified_ns: int) -> str:
    """Returns the SHA-256 of a file. The cache's key has size and time too, so that a changed file is hashed again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_metadata(file: Path) -> dict[str, str | None]:
    """Reads quantization and license from the metadata of a GGUF file."""
    import gguf

    try:
        fields = gguf.GGUFReader(file).fields
    except (IndexError, OverflowError, AssertionError) as error:  # a truncated file
        raise ValueError("it is truncated or damaged") from error
    file_type, license_id = (
        fields[name].contents() if name in fields else None for name in ("general.file_type", "general.license")
    )
    type_names = {member.value: member.name.removeprefix("MOSTLY_") for member in gguf.LlamaFileType}
    quantization = type_names.get(file_type) if isinstance(file_type, int) else None
    return {"quantization": quantization, "license": license_id if isinstance(license_id, str) else None}


def with_plain_weights(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the option that makes `from_pretrained` unpack GGUF weights, because packed weights cannot be saved.

    Args:
        kwargs: Keyword arguments for `from_pretrained`.

    Returns:
        The arguments. If `gguf_file` is one of them, they include a quantization_config that unpacks the weights.

    Raises:
        ZooError: `gguf_file` and `quantization_config` are both set.
    """
    file = kwargs.get("gguf_file")
    if file is None:
        return dict(kwargs)
    if kwargs.get("quantization_config") is not None:
        raise ZooError(f"gguf_file ({file}) and quantization_config are both set: remove one of them.")
    from transformers import GgufConfig

    return {**kwargs, "quantization_config": GgufConfig(dequantize=True)}


def check_plain_weights(model: Any) -> None:
    """Checks that a model loaded from a GGUF file is unpacked. It then trains and saves like any other model.

    Args:
        model: The model. If transformers marks unpacked weights as quantized, the mark is removed.

    Raises:
        ZooError: The weights are packed.
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
