"""Checks every data set before `datasets` loads it: a data set may name only its own files.

A data set's card lists its files as patterns, which `datasets` passes to fsspec. fsspec accepts any path on this
machine and any address, and some of its file systems expand templates that can read environment variables. Columns of
images, audio or video contain paths and addresses too, which are opened when a row is read. rlhf-zoo therefore loads
all data through `CheckedData`, which `open_checked` yields once the card has passed. `CheckedData` reads tables and
text, drops media columns, and reads no file outside the data set.
"""

import contextlib
import glob
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ...errors import ZooError
from ...fileio import hub_id
from .data_card import CARD_FILES, check_card, leads_out
from .links import find_outward_link, is_inside
from .local_splits import check_split
from .trees import COMMIT_ID

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

log = logging.getLogger(__name__)

MAX_CARD_BYTES = 2**24
#: fsspec's file systems that follow addresses inside a file, expand templates, or contact other hosts.
REFUSED_FILE_SYSTEMS = (
    "reference", "generic", "dask", "dbfs", "ftp", "git", "github", "gist", "jlab", "jupyter", "sftp", "smb", "ssh",
    "webhdfs",
)  # fmt: skip
#: Loaders of `datasets` that only read a file's content. Other loaders open paths or links in the file, or unpickle it.
FORMATS = ("json", "csv", "parquet", "arrow", "text", "cache")
#: Columns of these types hold plain values. For other types, such as images, reading a row opens the path in it.
_PLAIN_TYPES = (
    "Value", "ClassLabel", "Json", "Translation", "TranslationVariableLanguages", "Array2D", "Array3D", "Array4D",
    "Array5D",
)  # fmt: skip
_LIST_TYPES = ("List", "LargeList", "Sequence")
#: Modules of `datasets` that parse the metadata in a card or in dataset_infos.json.
_PARSERS = ("datasets.features", "datasets.splits", "datasets.info", "datasets.utils.metadata", "datasets.load")
#: (Hub's address, repository, commit) of each card that passed. A commit never changes, so one check is enough.
_checked_cards: set[tuple[str, str, str]] = set()


class LoaderOptions(TypedDict, total=False):
    """Keywords that every loader of `datasets` takes.

    Attributes:
        token: The token for the Hub; True for the stored token, False for none.
        cache_dir: The cache folder.
    """

    token: str | bool | None
    cache_dir: str


@dataclass(frozen=True)
class CheckedData:
    """A data set that `datasets` may load: its card and links passed the check, or only cached copies are read.

    Args:
        location: A folder, a file of JSON lines, or the id of a repository.
        revision: The commit whose card was checked. Offline, the revision that the caller named, or None. Ignored for a
            folder or file.
        infers_splits: Whether `datasets` infers the splits from file names, as it does in a folder whose card lists no
            files.
    """

    location: str
    revision: str | None
    infers_splits: bool = False

    def load(
        self,
        configuration: str | None = None,
        split: str | None = None,
        *,
        data_files: Mapping[str, Sequence[str]] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> Any:
        """Loads one split or all of them, without media columns.

        Args:
            configuration: Name of the configuration; None for the default or only one.
            split: Name of the split; None for all.
            data_files: Split -> files of the repository, if its card does not list them.
            **options: See `LoaderOptions`.

        Returns:
            A Dataset, or a DatasetDict of all splits.

        Raises:
            ZooError: A file's format is not in `FORMATS`, a file lies outside the data set, `datasets` cannot read the
                metadata, or it is unclear which files of a folder form a split.
            ValueError: The folder was written by `save_to_disk`.
        """
        builder = self.make_builder(configuration, split, data_files=data_files, **options)
        builder.download_and_prepare()
        return drop_media(builder.as_dataset(split=split))

    def stream(self, configuration: str | None, split: str, **options: Unpack[LoaderOptions]) -> "IterableDataset":
        """Streams the rows of a split as an IterableDataset, without media columns. Raises what `load` does.

        Args:
            configuration: Name of the configuration; None for the default or only one.
            split: Name of the split.
            **options: See `LoaderOptions`.
        """
        return drop_media(self.make_builder(configuration, split, **options).as_streaming_dataset(split=split))

    def configurations(self, **options: Unpack[LoaderOptions]) -> list[str]:
        """Returns the names of the configurations. Raises ZooError if `datasets` cannot read the metadata.

        Args:
            **options: See `LoaderOptions`.
        """
        import datasets

        with _translate_load_errors(self.location):
            return list(datasets.get_dataset_config_names(self._path, revision=self.revision, **options))

    def splits(self, configuration: str | None, **options: Unpack[LoaderOptions]) -> list[str]:
        """Returns the names of a configuration's splits. Raises what `load` does.

        Args:
            configuration: Name of the configuration; None for the default or only one.
            **options: See `LoaderOptions`.
        """
        import datasets

        if splits := self.make_builder(configuration, **options).info.splits:
            return list(splits)
        # The card does not list the splits, so `datasets` must read the files, which `make_builder` has checked.
        arguments = self._load_arguments(configuration, "train")
        return list(datasets.get_dataset_split_names(config_name=arguments.pop("name", None), **arguments, **options))

    def make_builder(
        self,
        configuration: str | None = None,
        split: str | None = None,
        *,
        data_files: Mapping[str, Sequence[str]] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> "DatasetBuilder":
        """Makes a builder of `datasets` and checks its files. Raises the same exceptions as `load`.

        Args:
            configuration: Name of the configuration; None for the default or only one.
            split: Name of the split; None for all.
            data_files: Split -> files of the repository, if its card does not list them.
            **options: See `LoaderOptions`.
        """
        import datasets

        # load_dataset makes this check too, but load_dataset_builder does not.
        if Path(self.location, datasets.config.DATASET_STATE_JSON_FILENAME).exists():
            raise ValueError("it was saved by `save_to_disk`, and data sets are read from JSON, CSV or Parquet files")
        arguments = self._load_arguments(configuration, split or "train")
        if data_files is not None:
            arguments["data_files"] = data_files
        with _translate_load_errors(self.location):
            builder = datasets.load_dataset_builder(**arguments, **options)
        self._check_builder(builder)
        return builder

    @property
    def _path(self) -> str:
        """The path to pass to `datasets`."""
        # `datasets` would take a folder named "csv" or "json" for its loader of that name.
        return f"./{self.location}" if _is_loader(self.location) else self.location

    def _load_arguments(self, configuration: str | None, split: str) -> dict[str, Any]:
        if Path(self.location).is_file():
            # `datasets` takes file names as patterns, so [ and * in a name must be escaped.
            return {"path": "json", "data_files": {split: glob.escape(self.location)}}
        return {"path": self._path, "name": configuration, "revision": self.revision}

    def _check_builder(self, builder: "DatasetBuilder") -> None:
        """Raises ZooError for a loader that could open other files, files outside the data set, and unclear splits."""
        # `datasets` generates a subclass of the loader for each data set.
        modules = {loader_class.__module__ for loader_class in type(builder).__mro__}
        if not modules & {f"datasets.packaged_modules.{name}.{name}" for name in FORMATS}:
            loader = type(builder).__mro__[1].__name__
            raise ZooError(
                f"The data set {self.location} was not loaded: `datasets` would read it with the loader {loader}, "
                "which can open other files. Convert it to JSON lines, CSV, Parquet, Arrow or plain text."
            )
        path = Path(self.location)
        # This check of the resolved files is the one that makes loading safe. The check of the card's patterns only
        # reports most problems earlier.
        for files in (builder.config.data_files or {}).values():
            for file in map(str, files):
                if path.exists():
                    is_own_file = is_inside(Path(file), path) and "::" not in file and "://" not in file
                else:
                    match = re.match(rf"hf://datasets/{re.escape(self.location)}@[^/@]+/", file)
                    is_own_file = match is not None and not leads_out(file[match.end() :])
                if not is_own_file:
                    raise ZooError(
                        f"The data set {self.location} was not loaded: its file {file!r:.200} may lie outside it. "
                        "Load another data set, or a copy whose files have plain names."
                    )
        if self.infers_splits:
            for split, names in (builder.config.data_files or {}).items():
                check_split(path, str(split), map(Path, names))


def _is_loader(name: str) -> bool:
    """Whether `datasets` takes a name for one of its loaders, such as "csv"."""
    # Without data_files, such a loader reads the working directory.
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return name in _PACKAGED_DATASETS_MODULES


def drop_media(dataset: Any) -> Any:
    """Drops columns of images, audio, video and the like: reading a row would open the paths in them.

    Args:
        dataset: A Dataset, an IterableDataset, or a dict of either by split. If its column types are unknown,
            `datasets` opens nothing, and nothing is dropped.

    Returns:
        The data set without these columns. The log names them.
    """
    import datasets

    if isinstance(dataset, dict):
        return type(dataset)({split: drop_media(split_data) for split, split_data in dataset.items()})
    plain_columns = [name for name, feature in (dataset.features or {}).items() if _is_plain(feature)]
    media_columns = [name for name in dataset.features or () if name not in plain_columns]
    if not media_columns:
        return dataset
    log.info("Dropped the columns %s: reading a row would open the files named there.", ", ".join(media_columns))
    if isinstance(dataset, datasets.IterableDataset):
        dataset = dataset.decode(False)  # otherwise threads open the media before select_columns drops them
    return dataset.select_columns(plain_columns)


def _is_plain(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, list | tuple):
        return all(map(_is_plain, feature))
    type_name = type(feature).__name__
    return type_name in _PLAIN_TYPES or (type_name in _LIST_TYPES and _is_plain(feature.feature))


@contextlib.contextmanager
def open_checked(
    location: str, revision: str | None = None, *, token: str | bool | None = None
) -> Iterator[CheckedData]:
    """Checks a data set, and yields the object that loads it.

    Args:
        location: A folder, a file, or the id of a repository.
        revision: A branch, tag or commit of a repository; None for the head of its main branch.
        token: Access token for the Hub in `datasets.config`; None for the stored token, False for none.

    Yields:
        The data set at the commit whose card passed the check. Offline, or if the Hub does not answer or does not
        accept the token, the data set at `revision`: while the context is open, `datasets` then reads only data that it
        has already built and cached, which needs no card.

    Raises:
        ZooError: There is no such data set, a pattern or link leads outside it, its card sets an option that is not
            allowed, or its card cannot be read.
    """
    import datasets

    # Before `datasets` raises an error for an unreadable file of JSON lines, it logs the same message.
    logging.getLogger("datasets.packaged_modules.json.json").setLevel(logging.CRITICAL)
    refuse_file_systems()
    path = Path(location)
    if path.exists():
        patterns = _check_local(path, location)
        yield CheckedData(location, revision, infers_splits=path.is_dir() and not patterns)
        return
    if hub_id(location) is None or location.startswith("buckets/") or _is_loader(location):
        raise ZooError(
            f"The data set {location!r:.200} is not a file, a folder or the id of a data set: check its name."
        )
    if datasets.config.HF_HUB_OFFLINE:
        yield CheckedData(location, revision)
        return
    try:
        commit = _check_repository(location, revision, token)
    except Exception as error:
        if not _is_inconclusive(error):
            raise
        # Stay offline: if the Hub began to answer again, `datasets` would load an unchecked card.
        datasets.config.HF_HUB_OFFLINE = True
        try:
            yield CheckedData(location, revision)
        except ConnectionError:  # not in the cache; the first error says why the Hub did not answer
            raise error from None
        finally:
            datasets.config.HF_HUB_OFFLINE = False
        return
    yield CheckedData(location, commit)


def _check_local(path: Path, name: str) -> list[str]:
    """Checks a file's path, or a folder's path, cards and links. Returns the patterns by which the cards list files."""
    # fsspec reads "::" anywhere in a path as a chain of addresses.
    if "::" in name or "://" in name:
        raise ZooError(f"The data set {name!r:.200} was not loaded: its path contains '::' or '://'. Move it.")
    patterns: list[str] = []
    if not path.is_dir():
        return patterns
    for file in CARD_FILES:
        if (path / file).exists():
            patterns += check_card(_read_card(path / file, name), file, name)
    # `datasets` skips hidden names unless a pattern names one, and hidden folders such as .venv are full of links.
    include_hidden = any(part.startswith((".", "__")) for pattern in patterns for part in pattern.split("/"))
    if (link := find_outward_link(path, include_hidden=include_hidden)) is not None:
        raise ZooError(
            f"The data set {name} was not loaded: {str(link)!r} in it links to a file outside the folder. Replace the "
            "link with the file."
        )
    return patterns


@contextlib.contextmanager
def _translate_load_errors(location: str) -> Iterator[None]:
    """Raises ZooError if `datasets` fails on a data set's metadata, or because the data set has a loading script."""
    try:
        yield
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise ZooError(
            f"The data set {location} was not loaded: it has a loading script, which `datasets` no longer runs: remove "
            "the script if the data are in files, or load another data set."
        ) from error
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        # Translate only errors in a parser of metadata. All other errors are bugs and must stay visible.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith(_PARSERS):
            raise
        raise ZooError(
            f"The data set {location} was not loaded: `datasets` cannot read its dataset_info, its configs or its "
            f"dataset_infos.json ({error!r:.200}): correct or remove them in a copy."
        ) from error


def refuse_file_systems() -> None:
    """Blocks `REFUSED_FILE_SYSTEMS` of fsspec for every library in this process.

    Also blocks zip files that contain a name with "::" or "://", because fsspec would open that name as an address.
    """
    from fsspec import AbstractFileSystem
    from fsspec.implementations.zip import ZipFileSystem
    from fsspec.registry import register_implementation, registry

    class RefusedFileSystem(AbstractFileSystem):  # type: ignore[misc]
        protocol = REFUSED_FILE_SYSTEMS

        def __init__(self, *_: Any, **__: Any) -> None:
            raise ValueError(f"files cannot be read through {', '.join(REFUSED_FILE_SYSTEMS)}")

    # Compare names, because each call creates a new class. `clobber` replaces file systems that are already registered.
    for name in REFUSED_FILE_SYSTEMS:
        if getattr(registry.get(name), "__qualname__", None) != RefusedFileSystem.__qualname__:
            register_implementation(name, RefusedFileSystem, clobber=True)

    class CheckedZip(ZipFileSystem):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            name = next((name for name in self.zip.namelist() if "::" in name or "://" in name), None)
            if name is not None:
                raise ValueError(f"an archive contains a file {name!r:.200}, which fsspec would open as an address")

    if getattr(registry.get("zip"), "__qualname__", None) != CheckedZip.__qualname__:
        register_implementation("zip", CheckedZip, clobber=True)


def _check_repository(repo: str, revision: str | None, token: str | bool | None) -> str:
    """Checks a repository's card, and returns the commit at which the card was read.

    Reads the card through the client and cache that `datasets` uses, so that `datasets` gets the card that was checked.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    api = HfApi(endpoint=datasets.config.HF_ENDPOINT, token=token)
    is_commit = revision is not None and COMMIT_ID.fullmatch(revision)
    commit = str(revision if is_commit else api.dataset_info(repo, revision=revision).sha)
    card_key = (datasets.config.HF_ENDPOINT, repo, commit)
    if card_key in _checked_cards:
        return commit
    for file in CARD_FILES:
        try:
            path = api.hf_hub_download(repo, file, repo_type="dataset", revision=commit)
        except LocalEntryNotFoundError:  # the Hub did not answer; its base class below means "no such file"
            raise
        except EntryNotFoundError:
            continue
        check_card(_read_card(Path(path), repo), file, repo)
    _checked_cards.add(card_key)
    return commit


def _is_inconclusive(error: Exception) -> bool:
    """Whether an error does not tell if the data set exists: no Hub answered, it failed, or the token is not valid."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        # 401: without a valid token the Hub does not say whether the data set exists.
        status = 500 if error.response is None else error.response.status_code
        return status >= 500 or status == 401
    return isinstance(error, HTTPError | OfflineModeIsEnabled | LocalEntryNotFoundError)


def _read_card(path: Path, name: str) -> str:
    """Returns a card's text. Raises ZooError if the card is not a file, is too large, or is not UTF-8."""
    # newline="" keeps the line endings, because the check must see the same text as `datasets`.
    try:
        if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
            raise ZooError(
                f"The data set {name} was not loaded: its {path.name} is not a file, or exceeds {MAX_CARD_BYTES} bytes."
            )
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ZooError(f"The data set {name} was not loaded: its {path.name} is not UTF-8. Convert it.") from error
