"""Writes files completely or not at all, and reads JSON and YAML within bounds on size and depth."""

import contextlib
import datetime
import errno
import json
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeGuard

from .errors import ZooError, first_line


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, temporary_folder: Path | None = None) -> None:
    """Replaces a file atomically: readers see the old or the new content, never a part, even after a crash.

    Args:
        path: The file. It need not exist.
        content: The new content.
        mode: The permissions, such as 0o600.
        temporary_folder: The folder of the temporary file, on the same file system; by default the file's own folder.

    Raises:
        OSError: The file system refuses. The old file is unchanged, unless only syncing its folder failed.
    """
    folder = temporary_folder or path.parent
    descriptor, temporary_path = tempfile.mkstemp(dir=folder, prefix=f".{path.name[:40]}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary_path, mode)
        os.replace(temporary_path, path)
    except BaseException:
        Path(temporary_path).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut. Does nothing on Windows, which cannot open folders.

    Args:
        folder: An existing folder.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Error numbers of a full disk, a spent disk quota and a file that exceeds the limit on file sizes.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: The largest JSON document, in bytes (in characters for a str).
MAX_JSON = 2**26
#: The deepest nesting of JSON and YAML.
MAX_DEPTH = 64
_UMASK_LOCK = threading.Lock()


def home() -> Path:
    """Returns the folder for caches and the embedded Hub: $RLHF_ZOO_HOME, else ~/.cache/rlhf-zoo."""
    return Path(os.environ.get("RLHF_ZOO_HOME") or Path.home() / ".cache" / "rlhf-zoo").expanduser()


def now() -> str:
    """Returns the current UTC time as ISO 8601 text, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def folder_bytes(folder: Path) -> int:
    """Returns the total size of all files below a folder. Files that are deleted meanwhile do not count.

    Args:
        folder: The folder.
    """
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def write_bytes(path: Path | str, content: bytes) -> None:
    """Replaces a file atomically, and creates its folder if it is missing.

    Args:
        path: The file. If it exists, it keeps its permissions.
        content: The new content.

    Raises:
        ZooError: The file system refuses (disk full, no permission). The old file is unchanged.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, mode=_permissions(path))
    except OSError as error:
        raise ZooError(describe_write_error(path, error)) from error


def write_text(path: Path | str, text: str) -> None:
    """Writes text in UTF-8, as `write_bytes` does.

    Args:
        path: The file.
        text: The new content.

    Raises:
        ZooError: As for `write_bytes`.
    """
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Writes a value as strict JSON, as `write_bytes` does.

    Args:
        path: The file.
        value: What `jsonable` accepts. NaN and infinities become strings, such as "NaN".

    Raises:
        ZooError: As for `write_bytes`.
        TypeError: The value cannot be written as JSON.
    """
    json_value = jsonable(value, nonfinite_as_text=True)
    write_text(path, json.dumps(json_value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Reads a JSON document.

    Raises:
        FileNotFoundError: There is no such file.
        ZooError: `parse_json` does not accept the file.
    """
    try:
        with open(path, "rb") as file:
            return parse_json(file.read(MAX_JSON + 1))
    except ValueError as error:
        raise ZooError(f"{path} is not valid JSON ({error}): restore it, or start again with --restart.") from error


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON document, which may be untrusted, within bounds on size and depth.

    Args:
        text: The document; bytes must be UTF-8.

    Raises:
        ValueError: The text is not JSON, is longer than `MAX_JSON`, or is nested more than `MAX_DEPTH` deep. The bound
            on depth makes it safe to recurse over documents.
    """
    if len(text) > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON:,} bytes")
    try:
        value = json.loads(text if isinstance(text, str) else text.decode())
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from error
    level = [value]  # the values at one depth; no recursion, which could exhaust the stack
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def jsonable(value: Any, *, nonfinite_as_text: bool) -> Any:
    """Converts a value to JSON types.

    Args:
        value: Any nesting of mappings, lists, tuples, sets, enums, paths and scalars, including NumPy's and torch's.
        nonfinite_as_text: Whether NaN and infinities become strings, such as "NaN". Otherwise they become None.

    Returns:
        Dicts with string keys, lists (sets are sorted), strings, numbers, booleans and None.

    Raises:
        TypeError: A part cannot be written as JSON.
    """
    if isinstance(value, Enum):
        return jsonable(value.value, nonfinite_as_text=nonfinite_as_text)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(float(value))] if nonfinite_as_text else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, nonfinite_as_text=nonfinite_as_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, nonfinite_as_text=nonfinite_as_text) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item, nonfinite_as_text=nonfinite_as_text) for item in value), key=canonical_json)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch, neither of which this module imports
        return jsonable(value.item(), nonfinite_as_text=nonfinite_as_text)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def canonical_json(value: Any) -> str:
    """Converts a value to JSON so that equal values become equal text: sorted keys, ASCII, no spaces, 1.0 as 1.

    Args:
        value: What `jsonable` accepts.
    """
    json_value = _integral_floats_to_int(jsonable(value, nonfinite_as_text=True))
    return json.dumps(json_value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _integral_floats_to_int(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _integral_floats_to_int(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integral_floats_to_int(item) for item in value]
    return value


def _permissions(path: Path) -> int:
    """Returns the file's permissions, or the defaults for a new file, because mkstemp excludes other users."""
    # Not `exists` and then `stat`: another process may delete the file between the two.
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    with _UMASK_LOCK:  # reading the umask means setting it to 0, which another thread must not read
        mask = os.umask(0)
        os.umask(mask)
    return 0o666 & ~mask


def describe_write_error(path: Path, error: OSError) -> str:
    """Describes why a file could not be written, and how to fix it.

    Args:
        path: The file.
        error: The file system's error.
    """
    reason = error.strerror or str(error)
    return f"{path} could not be written ({reason}): free space, correct the permissions, or choose another directory."


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number: not a boolean, NaN, an infinity, or an integer too large for a float.

    Args:
        value: Anything that JSON or YAML holds.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def float_or_none(value: Any) -> float | None:
    """Returns a value as a float if `is_finite` accepts it; otherwise None.

    Args:
        value: Anything that JSON or YAML holds.
    """
    return float(value) if is_finite(value) else None


def int_or_none(value: Any) -> int | None:
    """Returns a value if it is an integer that fits into 64 bits; otherwise None.

    Args:
        value: Anything that JSON or YAML holds.
    """
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def hub_id(name: Any) -> str | None:
    """Returns a name if it has the form of a repository's id on a Hub; otherwise None.

    Args:
        name: Anything that JSON or YAML holds.
    """
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else None


def get_nested(value: Any, *path: str) -> Any:
    """Returns the value at a path of keys; None if a key is missing.

    Args:
        value: Nested mappings.
        *path: The keys, outermost first.
    """
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


#: Bounds of a YAML document; see `load_yaml`.
MAX_CHARACTERS = 2**20
MAX_NODES = 100_000
MAX_DIRECTIVES = 100
MAX_NUMBER_LENGTH = 400
#: Integers of at most this many digits are below 2**61 - 1, the modulus of Python's hash. Larger integers can be chosen
#: so that they collide as keys of a dict, which takes quadratic time.
MAX_SHORT_NUMBER_LENGTH = 18
MAX_LONG_NUMBERS = 1000
_DIRECTIVE = re.compile(r"(?:^|[\n\r\x85\u2028\u2029])%")
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class BadYAML(ValueError):
    """YAML that is not valid, or exceeds the bounds.

    Attributes:
        reason: The error, in a few words.
        line: The line, from 1; None if the error concerns the whole text.
        column: The column, from 1; None if `line` is None.
    """

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason, self.line, self.column = reason, line, column


def load_yaml(text: str, loader: Any = None) -> Any:
    """Loads one YAML document within bounds.

    The bounds limit a document's length, nesting, size with aliases expanded, and anything that takes quadratic time
    (directives, the digits of a number, numbers that collide as keys). They are checked on the parser's events, because
    PyYAML's composers recurse, and the composer in C has no limit.

    Args:
        text: The document.
        loader: A subclass of yaml.SafeLoader; None for the fastest safe loader.

    Returns:
        Plain Python values; None for an empty document.

    Raises:
        BadYAML: The text is not YAML, has a value that does not fit its tag, contains more than one document, or
            exceeds a bound.
    """
    import yaml

    safe_loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) > MAX_CHARACTERS:
        raise BadYAML(f"it has more than {MAX_CHARACTERS:,} characters")
    if len(_DIRECTIVE.findall(text)) > MAX_DIRECTIVES:
        raise BadYAML(f"it has more than {MAX_DIRECTIVES} lines that begin with %")
    try:
        _check_bounds(yaml.parse(text, Loader=safe_loader))
        return yaml.load(text, Loader=loader or safe_loader)
    except BadYAML:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise BadYAML(", ".join(filter(None, (error.context, error.problem))), *position) from error
    except yaml.YAMLError as error:
        raise BadYAML(first_line(error)) from error
    except UnicodeError as error:
        raise BadYAML("it contains half a character (a lone surrogate)") from error
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        # PyYAML's constructors raise these for `!!timestamp foo`, `!!bool foo`, `!!int ""`, 2001-99-99.
        raise BadYAML("a value does not fit its tag") from error


def _check_bounds(events: Any) -> None:
    """Raises BadYAML if the document exceeds a bound. An alias counts as much as the node that it repeats."""
    import yaml

    sizes: dict[str | None, tuple[int, int]] = {}  # anchor -> (values, characters) of its node
    # [anchor, values, characters] of the document, then of every open collection.
    open_nodes: list[list[Any]] = [[None, 0, 0]]
    long_numbers = 0

    def close(anchor: str | None, size: tuple[int, int], event: Any) -> None:
        if anchor is not None:
            sizes[anchor] = size
        parent = open_nodes[-1]
        parent[1], parent[2] = parent[1] + size[0], parent[2] + size[1]
        for limit, count, unit in ((MAX_NODES, parent[1], "values"), (MAX_CHARACTERS, parent[2], "characters")):
            if count > limit:
                reason = f"it has more than {limit:,} {unit} once its aliases are expanded"
                raise BadYAML(reason, *_position(event))

    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([event.anchor, 1, 0])
            if len(open_nodes) > MAX_DEPTH:
                raise BadYAML(f"it is nested more than {MAX_DEPTH - 1} deep", *_position(event))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, characters = open_nodes.pop()
            close(anchor, (values, characters), event)
        elif isinstance(event, yaml.ScalarEvent):
            close(event.anchor, (1, len(event.value)), event)
            number_tag = _number_tag(event) if len(event.value) > MAX_SHORT_NUMBER_LENGTH else None
            if number_tag in (_INT, _FLOAT) and len(event.value) > MAX_NUMBER_LENGTH:
                raise BadYAML(f"a number has more than {MAX_NUMBER_LENGTH} characters", *_position(event))
            long_numbers += number_tag == _INT
            if long_numbers > MAX_LONG_NUMBERS:
                reason = f"more than {MAX_LONG_NUMBERS:,} integers have more than {MAX_SHORT_NUMBER_LENGTH} characters"
                raise BadYAML(reason, *_position(event))
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, *_ in open_nodes):
                raise BadYAML(f"the alias *{event.anchor} contains itself", *_position(event))
            close(None, sizes.get(event.anchor, (1, 0)), event)


def _number_tag(event: Any) -> str | None:
    """Returns a scalar's explicit tag, else the number tag that PyYAML will infer; None for any other type."""
    import yaml

    if event.tag not in (None, "!"):
        return str(event.tag)
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(event.value[0], []) if event.implicit[0] else []
    return next((tag for tag, pattern in resolvers if tag in (_INT, _FLOAT) and pattern.match(event.value)), None)


def _position(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1
