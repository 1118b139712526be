"""Builds a wheel of the running package. A Space needs it, because no package index has this package."""

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath

from ...errors import ZooError

DISTRIBUTION = "rlhf-zoo"
PACKAGE = Path(__file__).parents[2]
#: Files that an installer adds to dist-info. They describe the machine, not the package.
_INSTALLER_FILES = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
_TIMESTAMP = (2020, 2, 2, 0, 0, 0)  # of every entry, as in hatchling, so that the same files give the same bytes


def make_wheel(folder: Path) -> Path:
    """Writes a wheel of the running package. The same sources give the same bytes.

    In a checkout, the wheel is built from the sources; otherwise from the installed files.

    Args:
        folder: The folder for the wheel.

    Returns:
        The wheel's path.

    Raises:
        ZooError: The package was not installed, installed files are missing, or a checkout lacks hatchling.
    """
    sources = PACKAGE.parent
    if (sources / "pyproject.toml").is_file() and (sources / "spaces").is_dir():
        return _build(sources, folder)
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ZooError(f"{PACKAGE} is not installed, so no wheel can be built from it: install rlhf-zoo.") from error
    if Path(str(distribution.locate_file(PACKAGE.name))).resolve() != PACKAGE.resolve():
        raise ZooError(f"{PACKAGE} is running, but another rlhf-zoo is installed: remove one of them from the path.")
    return rebuild_wheel(distribution, folder)


def _build(sources: Path, folder: Path) -> Path:
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError as error:
        raise ZooError("Building a wheel of this checkout needs hatchling: run `pip install hatchling`.") from error
    (path,) = WheelBuilder(str(sources)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def rebuild_wheel(distribution: metadata.Distribution, folder: Path) -> Path:
    """Rebuilds the wheel of an installed package from the files in its RECORD.

    Scripts are left out, because the installer of the new wheel generates them.

    Args:
        distribution: The installed distribution.
        folder: The folder for the wheel.

    Returns:
        The wheel's path.

    Raises:
        ZooError: Installed files are missing.
    """
    members = sorted(
        filter(_belongs_in_wheel, (PurePosixPath(str(file)) for file in distribution.files or [])),
        key=lambda path: (path.parts[0].endswith(".dist-info"), str(path)),
    )
    missing_paths = [path for path in members if not Path(str(distribution.locate_file(path))).is_file()]
    if missing_paths or not any(path.name == "WHEEL" for path in members):
        missing_file = missing_paths[0] if missing_paths else "dist-info/WHEEL"
        raise ZooError(
            f"The installation of rlhf-zoo lacks {missing_file}, so no wheel can be built from it: install it again."
        )
    stem = f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}"
    target = folder / f"{stem}-py3-none-any.whl"
    record_lines = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in members:
            content = Path(str(distribution.locate_file(path))).read_bytes()
            _add_entry(wheel, str(path), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record_lines.append(f"{path},sha256={digest},{len(content)}")
        record_name = f"{stem}.dist-info/RECORD"
        _add_entry(wheel, record_name, "\n".join([*record_lines, f"{record_name},,", ""]).encode())
    return target


def _belongs_in_wheel(path: PurePosixPath) -> bool:
    if path.is_absolute() or ".." in path.parts or path.suffix == ".pyc":  # scripts are outside the package: ../../bin
        return False
    return not (path.parts[0].endswith(".dist-info") and path.name in _INSTALLER_FILES)


def _add_entry(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _TIMESTAMP)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o100644 << 16  # a regular file with mode rw-r--r--
    wheel.writestr(entry, content)
