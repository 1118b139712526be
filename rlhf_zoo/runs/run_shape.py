"""Checks the types in run.json, because a run directory may come from somebody else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError

SCHEMA = 1
_LINEAGE = dict.fromkeys(("path", "repo", "commit", "tag", "hub", "folder", "files", "fingerprint", "weights"), str)
_TEXTS = (
    "stage", "recipe", "status", "fingerprint", "run", "hub", "command", "created", "finished", "weights", "merged",
    "released", "cell",
)  # fmt: skip
#: Field -> the type of its value, or the shape of an object. The key None stands for all other keys. Every field may be
#: null or missing.
SHAPE: Mapping[str | None, Any] = {
    **dict.fromkeys(_TEXTS, str),
    "seed": int,
    "resolved": {"recipe": {}, "evaluation": {}},
    "parents": {None: _LINEAGE},
    "dataset": {**_LINEAGE, "benchmark": {}},
    "repo": {"id": str, "commit": str, "tags": {None: str}},
    "chosen": {"step": int, "rule": str, "metric": str},
    "publish": {"hub": str, "namespace": str, "private": bool},
    "reward_model": {},
    "versions": {},
    "remote_code": list,
}


def check_run_json(document: Any, file: Path) -> dict[str, Any]:
    """Checks a document that was read from run.json.

    Args:
        document: Any JSON value.
        file: The file, for messages.

    Raises:
        ZooError: The document is not an object, has a different schema, or has a field of the wrong type.
    """
    if not isinstance(document, dict):
        raise ZooError(f"{file} does not hold a JSON object: start over with --restart.")
    if document.get("schema") != SCHEMA:
        raise ZooError(
            f"{file} has schema {document.get('schema')!r:.80}, but this rlhf-zoo reads {SCHEMA}: use the version that "
            "wrote it, or start over with --restart."
        )
    if (name := _wrong_field(document, SHAPE)) is not None:
        raise ZooError(f"{name:.80} in {file} has a different type than rlhf-zoo writes: restore it, or use --restart.")
    return document


def _wrong_field(value: Any, shape: Any, name: str = "") -> str | None:
    """Returns the dotted name of the first field with a wrong type; None if all types are right."""
    if value is None:
        return None
    if not isinstance(shape, Mapping):
        return None if isinstance(value, shape) and not (shape is int and isinstance(value, bool)) else name
    if not isinstance(value, Mapping):
        return name
    for key, child in value.items():
        child_shape = shape.get(key, shape.get(None))
        child_name = f"{name}.{key}".lstrip(".")
        if child_shape is not None and (wrong_name := _wrong_field(child, child_shape, child_name)) is not None:
            return wrong_name
    return None
