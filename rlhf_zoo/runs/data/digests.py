"""Digests of local files and folders, which identify the data, models and code of a run."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ZooError

#: Patterns of the files that a model and its tokenizer are loaded from: weights, configuration, vocabulary, template,
#: code.
MODEL_FILES = (
    "*.safetensors", "*.gguf", "*.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "*.py",
)  # fmt: skip


def check_unchanged(subject: str, lineage: Mapping[str, Any], recorded_lineage: Mapping[str, Any] | None) -> None:
    """Checks that a local file or folder is the same as when the run started.

    Args:
        subject: The file or folder, for the message.
        lineage: The present lineage, with the digest under `files`.
        recorded_lineage: The lineage that the run recorded when it started. None, or a lineage without `files`, passes.

    Raises:
        ZooError: The digests differ.
    """
    recorded_files, present_files = (recorded_lineage or {}).get("files"), lineage.get("files")
    if recorded_files is not None and present_files is not None and recorded_files != present_files:
        raise ZooError(
            f"{subject} has changed since this run started with it: restore it, choose another --output_dir, or start "
            "again with --restart."
        )


def digest(path: Path, ending: str = "") -> str:
    """Returns the sha256 over the names and bytes of all files in a folder, or of a single file.

    Args:
        path: The folder, or the file.
        ending: Include only files of the folder whose names end with this text.

    Returns:
        The digest in hex.
    """
    return digest_of(path, [path] if path.is_file() else path.rglob(f"*{ending}"))


def digest_of(folder: Path, files: Iterable[Path]) -> str:
    """Returns the sha256 over the names and bytes of some files of a folder.

    Args:
        folder: The folder to which the hashed names are relative.
        files: Files in the folder; folders among them are skipped.

    Returns:
        The digest in hex.
    """
    sha256 = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        sha256.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()
