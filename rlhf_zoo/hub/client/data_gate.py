"""The check that every data set passes before `datasets` loads it: it may name files of its own, and no others.

The card of a data set lists its files as patterns that `datasets` hands to fsspec. fsspec takes any path of this
machine and any address, and some of its file systems render templates that see the environment. A column of images,
audio or video holds paths and addresses too, which are opened when a row is read. So `gated` checks the card, and what
it yields is the only way to `datasets` in this package: it loads formats of text alone, from files that lie in the data
set, and leaves media columns out.
"""

import contextlib
import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import BadYAML, hub_id, load_yaml

log = logging.getLogger(__name__)

#: The files that `datasets` reads patterns from.
CARD = "README.md"
CARDS = (CARD, ".huggingface.yaml")
MAX_CARD_BYTES = 2**24
#: File systems of fsspec that follow addresses from inside a file, render templates, or ask other hosts.
REFUSED_FILE_SYSTEMS = (
    "reference", "generic", "dask", "dbfs", "ftp", "git", "github", "gist", "jlab", "jupyter", "sftp", "smb", "ssh",
    "webhdfs",
)  # fmt: skip
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # a drive letter too
_CACHED = re.compile(r"(models|datasets|spaces)--.+")  # a repository in the client's cache
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PATTERNS = ("data_files", "data_dir")
#: What a configuration says of itself for people, where an address is only text.
_TEXTS = ("description", "citation", "homepage", "license")
#: The loaders of `datasets` that read what is in a file. Others follow links in it, unpickle, or open what rows name.
FORMATS = ("json", "csv", "parquet", "arrow", "text", "cache")
#: Columns of these types hold values. Others, such as images, are opened by what a row names when it is read.
_VALUES = (
    "Value", "ClassLabel", "Json", "Translation", "TranslationVariableLanguages", "Array2D", "Array3D", "Array4D",
    "Array5D",
)  # fmt: skip
_LISTS = ("List", "LargeList", "Sequence")
#: (address of the Hub, repository, commit) of cards that passed: what stands at a commit does not change.
_passed: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class GatedData:
    """A data set whose card and links were checked, for the calls of `datasets` that load it.

    location: A folder, a file of JSON lines, or the id of a repository. commit: Of a repository; None of the others.
    """

    location: str
    commit: str | None

    def load(
        self, configuration: str | None = None, split: str | None = None, *, data_files: Any = None, **options: Any
    ) -> Any:
        """The rows of a split, or of all splits by their names, without media columns.

        Args:
            configuration: None for the only one.
            split: None for all of them.
            data_files: Split -> files of a repository, where its card does not list them.
            options: `token` and `cache_dir` of `datasets.load_dataset`.

        Returns:
            A Dataset, or a DatasetDict.

        Raises:
            ZooError: Its files are of another format, or lie elsewhere.
        """
        builder = self.builder(configuration, split, data_files=data_files, **options)
        builder.download_and_prepare()
        return without_media(builder.as_dataset(split=split))

    def stream(self, configuration: str | None, split: str, **options: Any) -> Any:
        """The rows of a split as they are fetched, an IterableDataset; see `load`."""
        return without_media(self.builder(configuration, split, **options).as_streaming_dataset(split=split))

    def configurations(self, **options: Any) -> list[str]:
        """The names of its configurations."""
        import datasets

        return list(datasets.get_dataset_config_names(self._path, revision=self.commit, **options))

    def splits(self, configuration: str | None, **options: Any) -> list[str]:
        """The names of a configuration's splits. Raises ZooError as `load` does."""
        import datasets

        if known := self.builder(configuration, **options).info.splits:
            return list(known)
        called = self._called(configuration, "train")
        return list(datasets.get_dataset_split_names(config_name=called.pop("name", None), **called, **options))

    def builder(
        self, configuration: str | None = None, split: str | None = None, *, data_files: Any = None, **options: Any
    ) -> Any:
        """The DatasetBuilder of `datasets`, whose files were checked; see `load`."""
        import datasets

        if Path(self.location, datasets.config.DATASET_STATE_JSON_FILENAME).exists():
            raise ValueError("it was saved by `save_to_disk`, and data sets are read from JSON, CSV or Parquet files")
        called = self._called(configuration, split or "train")
        if data_files is not None:
            called["data_files"] = data_files
        builder = datasets.load_dataset_builder(**called, **options)
        self._check(builder)
        return builder

    @property
    def _path(self) -> str:
        """What `datasets` is given: a folder that is called as one of its loaders is, would be taken for that."""
        return f"./{self.location}" if is_loader(self.location) else self.location

    def _called(self, configuration: str | None, split: str) -> dict[str, Any]:
        if Path(self.location).is_file():
            return {"path": "json", "data_files": {split: glob.escape(self.location)}}
        return {"path": self._path, "name": configuration, "revision": self.commit}

    def _check(self, builder: Any) -> None:
        """Raises ZooError for a loader that could open other files, and for files that lie elsewhere."""
        modules = {kind.__module__ for kind in type(builder).__mro__}
        if not modules & {f"datasets.packaged_modules.{name}.{name}" for name in FORMATS}:
            kind = type(builder).__mro__[1].__name__
            raise ZooError(
                f"The data set {self.location} is not loaded, as `datasets` reads it by its loader {kind}, which may "
                "open files elsewhere: take, or make, a copy of it in JSON lines, CSV, Parquet, Arrow or plain text."
            )
        path = Path(self.location)
        for files in (builder.config.data_files or {}).values():
            for file in map(str, files):
                if path.exists():
                    inside = is_inside(Path(file), path) and "::" not in file and "://" not in file
                else:
                    own = re.match(rf"hf://datasets/{re.escape(self.location)}@[^/@]+/", file)
                    inside = own is not None and not leads_out(file[own.end() :])
                if not inside:
                    raise ZooError(
                        f"The data set {self.location} is not loaded, as its file {file!r:.200} may lead outside of "
                        "it: load another data set, or a copy whose files have plain names."
                    )


def is_loader(name: str) -> bool:
    """Whether `datasets` takes a name for one of its loaders, which without files reads the working directory."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return name in _PACKAGED_DATASETS_MODULES


def without_media(loaded: Any) -> Any:
    """A data set without the columns whose values are opened when a row is read: images, audio, video and the like.

    Args:
        loaded: A Dataset, IterableDataset, or DatasetDict of them. Of one whose types are not known nothing is opened.

    Returns:
        It, without these columns, which the log names.
    """
    import datasets

    if isinstance(loaded, dict):
        return type(loaded)({split: without_media(part) for split, part in loaded.items()})
    plain = [name for name, feature in (loaded.features or {}).items() if _is_plain(feature)]
    media = [name for name in loaded.features or () if name not in plain]
    if not media:
        return loaded
    log.info("The columns %s are left out, as what their rows name would be opened.", ", ".join(media))
    if isinstance(loaded, datasets.IterableDataset):
        loaded = loaded.decode(False)  # or threads open it before columns are chosen
    return loaded.select_columns(plain)


def _is_plain(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, list | tuple):
        return all(map(_is_plain, feature))
    kind = type(feature).__name__
    return kind in _VALUES or (kind in _LISTS and _is_plain(feature.feature))


@contextlib.contextmanager
def gated(location: str, revision: str | None = None, *, token: str | bool | None = None) -> Iterator[GatedData]:
    """Checks a data set, and yields what loads it.

    Args:
        location: A folder, a file, or the id of a repository.
        revision: Of a repository: a branch, tag or commit.
        token: Of the Hub that `datasets.config` names.

    Yields:
        The data set, at the commit whose card was checked. Where the Hub does not answer, at `revision`: inside,
        `datasets` then reads only what it has prepared before, for which it needs no card.

    Raises:
        ZooError: A pattern of the data set leads outside of it, or its card cannot be read.
    """
    import datasets

    refuse_file_systems()
    path = Path(location)
    if path.exists():
        check_local(path, location)
        yield GatedData(location, revision)
        return
    if hub_id(location) is None or location.startswith("buckets/") or is_loader(location):
        raise ZooError(f"The data set {location!r:.200} is no file, no folder and no id of a data set: check its name.")
    if datasets.config.HF_HUB_OFFLINE:
        yield GatedData(location, revision)
        return
    try:
        commit = _check_repository(location, revision, token)
    except Exception as error:
        if not _is_silence(error):
            raise
        datasets.config.HF_HUB_OFFLINE = True
        try:
            yield GatedData(location, revision)
        except ConnectionError:  # what `datasets` says of what it has not prepared
            raise error from None
        finally:
            datasets.config.HF_HUB_OFFLINE = False
        return
    yield GatedData(location, commit)


def check_local(path: Path, name: str) -> None:
    """Checks a file, or the card and the links of a folder.

    Args:
        path: The file or folder.
        name: What the user calls it.

    Raises:
        ZooError: A pattern or a link leads outside of the folder, or the card cannot be read.
    """
    if "::" in name or "://" in name:
        raise ZooError(f"The data set {name!r:.200} is not loaded, as its path holds '::' or '://': move it.")
    if not path.is_dir():
        return
    patterns: list[str] = []
    for file in CARDS:
        if (path / file).exists():
            patterns += check_card(_text(path / file, name), file, name)
    hidden = any(part.startswith((".", "__")) for pattern in patterns for part in pattern.split("/"))
    if (link := find_outward_link(path, hidden=hidden)) is not None:
        raise ZooError(
            f"The data set {name} is not loaded, as {str(link)!r} in it is a link to outside of the folder: put the "
            "file itself there."
        )


def find_outward_link(folder: Path, *, hidden: bool) -> Path | None:
    """A link in a folder that leads outside of it.

    Args:
        folder: The folder.
        hidden: Whether to look at names that begin with . or __ too, which `datasets` passes over unless a pattern
            names them.

    Returns:
        The first such link, relative to the folder; None where there is none.
    """
    for below, folders, files in os.walk(folder):
        if not hidden:
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in (*folders, *files):
            if Path(below, name).is_symlink() and not is_inside(Path(below, name), folder):
                return Path(below, name).relative_to(folder)
    return None


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path leads to something in a folder, links followed.

    Args:
        path: Any path.
        folder: A folder. Of one in the client's cache, the repository's blobs and snapshots count as inside.

    Returns:
        False for what lies elsewhere.
    """
    root, found = folder.resolve(), Path(os.path.realpath(path))
    roots = [root]
    for above in (root, *root.parents):
        cached = above.parent.parent
        if above.parent.name in ("snapshots", "on_bases") and _CACHED.fullmatch(cached.name):
            roots += [cached / "blobs", cached / "snapshots"]
    return any(found.is_relative_to(one) for one in roots)


def check_card(text: str, file: str, name: str) -> list[str]:
    """Checks the patterns that a card gives its files by.

    Args:
        text: The card: README.md with its front matter, or a file that is YAML as a whole.
        file: The card's file name.
        name: The data set, for messages.

    Returns:
        The patterns, each of which may name a file of the data set alone.

    Raises:
        ZooError: A pattern leads outside of the data set, or the card cannot be read.
    """
    mend = "load another data set, or a copy whose card names its own files"
    try:
        said = load_yaml(_front_matter(text) if file == CARD else text)
    except BadYAML as error:
        raise ZooError(
            f"The data set {name} is not loaded, as its {file} is no plain YAML ({error}): {mend}."
        ) from error
    patterns = []
    for key, value in _values(said):
        if key in _PATTERNS and (not isinstance(value, str) or leads_out(value)):
            raise ZooError(
                f"The data set {name} is not loaded, as {key} in its {file} is {value!r:.200}, which may lead outside "
                f"of the data set: {mend}."
            )
        if key not in _PATTERNS and isinstance(value, str) and "://" in value:
            raise ZooError(
                f"The data set {name} is not loaded, as {key} of a configuration in its {file} is the address "
                f"{value!r:.200}: {mend}."
            )
        if key in _PATTERNS:
            patterns.append(value)
    return patterns


def leads_out(pattern: str) -> bool:
    """Whether a pattern may name anything but a file below the place that it is read from.

    Args:
        pattern: A pattern of `datasets`.

    Returns:
        True for an address, a chain of them, an absolute path, a home, a drive, and a path with a part `..`.
    """
    return bool(
        "::" in pattern
        or "://" in pattern
        or pattern.startswith(("/", "\\", "~", " "))
        or _SCHEME.match(pattern)
        or _CONTROL.search(pattern)
        or ".." in re.split(r"[/\\]", pattern)
    )


def refuse_file_systems() -> None:
    """From here on, no library in this process reads through `REFUSED_FILE_SYSTEMS` of fsspec.

    Nor from a zip in which a file is called as a chain of addresses, by which fsspec would open them.
    """
    from fsspec import AbstractFileSystem
    from fsspec.implementations.zip import ZipFileSystem
    from fsspec.registry import register_implementation, registry

    class Refused(AbstractFileSystem):  # type: ignore[misc]
        protocol = REFUSED_FILE_SYSTEMS

        def __init__(self, *_: Any, **__: Any) -> None:
            raise ValueError(f"no file is read through {', '.join(REFUSED_FILE_SYSTEMS)}")

    for name in REFUSED_FILE_SYSTEMS:
        if getattr(registry.get(name), "__qualname__", None) != Refused.__qualname__:
            register_implementation(name, Refused, clobber=True)

    class CheckedZip(ZipFileSystem):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if (
                name := next((name for name in self.zip.namelist() if "::" in name or "://" in name), None)
            ) is not None:
                raise ValueError(f"an archive holds a file {name!r:.200}, which would be taken for an address")

    if getattr(registry.get("zip"), "__qualname__", None) != CheckedZip.__qualname__:
        register_implementation("zip", CheckedZip, clobber=True)


def _check_repository(repo: str, revision: str | None, token: str | bool | None) -> str:
    """The commit, of which the card was read as `datasets` will read it: by the same client, from the same cache."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    api = HfApi(endpoint=datasets.config.HF_ENDPOINT, token=token)
    known = revision is not None and _COMMIT.fullmatch(revision)
    commit = str(revision if known else api.dataset_info(repo, revision=revision).sha)
    passed = (datasets.config.HF_ENDPOINT, repo, commit)
    if passed in _passed:
        return commit
    for file in CARDS:
        try:
            path = api.hf_hub_download(repo, file, repo_type="dataset", revision=commit)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            continue
        check_card(_text(Path(path), repo), file, repo)
    _passed.add(passed)
    return commit


def _is_silence(error: Exception) -> bool:
    """Whether the Hub gave no answer; one that does not accept the token gives none either."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        status = 500 if error.response is None else error.response.status_code
        return status >= 500 or status == 401
    return isinstance(error, HTTPError | OfflineModeIsEnabled | LocalEntryNotFoundError)


def _text(path: Path, name: str) -> str:
    """A card, with its line ends as they are. Raises ZooError for one that is too large, or not UTF-8."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
            raise ZooError(
                f"The data set {name} is not loaded, as its {path.name} is no file of a card's size: mend it."
            )
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ZooError(f"The data set {name} is not loaded, as its {path.name} is not UTF-8: write it so.") from error


def _front_matter(text: str) -> str:
    """The YAML of a README.md, found by what `datasets` finds it by."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if match := REGEX_YAML_BLOCK.search(text):
        return str(match[2])
    begun = text.lstrip("\ufeff \t\r\n")
    # No version of the client may take this for front matter that this one does not see.
    if begun.startswith("---") and any(key in begun for key in _PATTERNS):
        raise BadYAML("its front matter has no end")
    return ""


def _values(node: Any, key: str = "", configuration: bool = False) -> Iterator[tuple[str, Any]]:
    """(key, value) of every pattern, wherever it stands, and of every other value of a configuration."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if key in _PATTERNS or not (configuration and name in _TEXTS):
                below = key if key in _PATTERNS else str(name)
                yield from _values(value, below, configuration or name == "configs")
    elif isinstance(node, list | tuple | set):
        for value in node:
            yield from _values(value, key, configuration)
    elif node is not None and (configuration or key in _PATTERNS):
        yield key, node
