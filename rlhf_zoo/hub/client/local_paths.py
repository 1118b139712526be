"""Decides where a pull writes its files: an output directory or the client's cache. Nothing is written elsewhere."""

import contextlib
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...errors import ZooError
from ...fileio import replace_file
from .connect import DEFAULT_HUB, Hub
from .downloads import DOWNLOAD_FOLDER, PARTIAL_FOLDER

CHUNK_BYTES = 2**20
#: The client's own folder in an output directory. No repository may write into it.
_CLIENT_FOLDER = DOWNLOAD_FOLDER.parent
#: A file with the id of the repository that was pulled into a folder.
PULL_MARK = _CLIENT_FOLDER / "rlhf-zoo-pull"


@dataclass(frozen=True)
class FileToFetch:
    """A file to fetch.

    Args:
        path: Path in the repository.
        size: Bytes.
        etag: The sha256 of a large (LFS) file, or the git blob id of any other file; "" if it is unknown.
        blob_id: The git blob id (for a large file, of its pointer); "" if it is unknown.
    """

    path: str
    size: int
    etag: str
    blob_id: str = ""


class _Destination:
    """Where the files of a commit are written. A file grows at `partial` and moves to `target` once it is complete."""

    _space_remedy = "free some space"

    def __init__(self, repo: str, commit: str, folder: Path, hub: Hub) -> None:
        self.repo, self.commit, self.folder, self.hub = repo, commit, folder, hub

    def target(self, file: FileToFetch) -> Path:
        """Returns the final path of a file.

        Args:
            file: A file of the commit.
        """
        raise NotImplementedError

    def partial(self, file: FileToFetch) -> Path:
        """Returns the path of an incomplete file, named by digest so that a pull of another revision can resume it."""
        return self.folder / PARTIAL_FOLDER / file.etag

    def find_copy(self, file: FileToFetch) -> Path | None:
        """Returns another path on this machine that may hold the file; None if there is none."""
        return None

    def check_free_space(self, files: list[FileToFetch]) -> None:
        """Checks that the disk has room for the missing bytes, according to the sizes in the Hub's listing.

        Args:
            files: The files to write.

        Raises:
            ZooError: The disk has too little free space.
        """
        # Keyed by target, because files with equal content share a blob in the cache.
        missing_bytes = {self.target(file): file.size - self._bytes_present(file) for file in files}
        nearest_folder = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        needed_bytes, free_bytes = sum(missing_bytes.values()), shutil.disk_usage(nearest_folder).free
        if needed_bytes > free_bytes:
            raise ZooError(
                f"{self.repo} takes {needed_bytes / 2**30:,.1f} GiB more in {self.folder}, but the disk has "
                f"{free_bytes / 2**30:,.1f} free: {self._space_remedy}."
            )

    def _bytes_present(self, file: FileToFetch) -> int:
        sizes = [0]
        for path in (self.target(file), self.partial(file)):
            # Not `is_file` and then `stat`: another pull moves its complete file from `partial` to `target`.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                sizes.append(min(path.stat().st_size, file.size))
        return max(sizes)

    def begin(self, files: list[FileToFetch]) -> None:
        """Prepares the folder before the first byte is written."""

    def unrelated_files(self, files: list[FileToFetch]) -> list[str]:
        """Lists the files in the folder that do not belong to the commit."""
        return []

    def _remove_partial_folder(self) -> None:
        # rmdir fails if the folder is not empty, so an interrupted pull of another revision can still resume.
        with contextlib.suppress(OSError):
            (self.folder / PARTIAL_FOLDER).rmdir()


class Folder(_Destination):
    """An output directory that the user named."""

    _space_remedy = "free some space, or give another --output_dir"

    def __init__(self, repo: str, commit: str, folder: Path, hub: Hub = DEFAULT_HUB) -> None:
        super().__init__(repo, commit, folder.absolute(), hub)

    def target(self, file: FileToFetch) -> Path:
        return self.folder / file.path

    def check(self, files: list[FileToFetch]) -> None:
        """Checks that a pull overwrites nothing but an earlier pull of the same repository.

        Args:
            files: The files to write.

        Raises:
            ZooError: The folder holds files that did not come from a pull of this repository, a file would be written
                through a symbolic link, or a file would be written into the client's folder.
        """
        reserved_path = next((file.path for file in files if _is_reserved(file.path)), None)
        if reserved_path is not None:
            raise ZooError(
                f"{self.repo} contains {reserved_path}, which belongs to the client's folder {_CLIENT_FOLDER}: fetch "
                "it without --output_dir."
            )
        client_paths = (_CLIENT_FOLDER.parent, _CLIENT_FOLDER, DOWNLOAD_FOLDER, PULL_MARK)
        written_paths = {self.folder / path for path in client_paths}.union(*map(self._written_paths, files))
        # A link in the folder, left for example by an earlier download, could redirect writes to any place.
        for path in sorted(written_paths):
            if path.is_symlink():
                raise ZooError(
                    f"{path} is a symbolic link, which would redirect files to another folder: remove it, or choose "
                    "another --output_dir."
                )
        mark = self.folder / PULL_MARK
        pulled_repo = mark.read_text(encoding="utf-8", errors="replace").strip() if mark.is_file() else None
        if pulled_repo == self.repo:
            return
        if pulled_repo is not None:
            raise ZooError(
                f"{self.folder} holds a pull of {pulled_repo!r:.120}, not of {self.repo}: choose another --output_dir."
            )
        # The client wrote here (`hf download`), or a pull was interrupted before it wrote PULL_MARK. A single file with
        # the right content is enough evidence that the folder was written from this repository.
        if (self.folder / DOWNLOAD_FOLDER).is_dir():
            existing_files = [file for file in files if os.path.lexists(self.target(file))]
            has_intact_file = any(sha256_if_intact(self.target(file), file) for file in existing_files)
            obstacle = self.target(existing_files[0]) if existing_files and not has_intact_file else None
        else:
            obstacle = next((path for path in self.folder.rglob("*") if path.is_symlink() or not path.is_dir()), None)
        if obstacle is not None:
            raise ZooError(
                f"{obstacle} exists, and {self.folder} was not written by a pull of {self.repo}: pass a new or empty "
                "folder as --output_dir."
            )

    def begin(self, files: list[FileToFetch]) -> None:
        """Marks the folder as a download, as the client does, and as a pull of this repository.

        Args:
            files: The files of the commit.
        """
        # Repeat each subfolder below DOWNLOAD_FOLDER: if this is the home folder, `find_download` looks for it there.
        for subfolder in {Path(file.path).parent for file in files}:
            (self.folder / DOWNLOAD_FOLDER / subfolder).mkdir(parents=True, exist_ok=True)
        (self.folder / DOWNLOAD_FOLDER).mkdir(parents=True, exist_ok=True)
        if not (self.folder / PULL_MARK).is_file():
            replace_file(self.folder / PULL_MARK, f"{self.repo}\n".encode(), mode=0o644)

    def _written_paths(self, file: FileToFetch) -> list[Path]:
        """Returns the paths that a write of the file touches: subfolders, PARTIAL_FOLDER, and the incomplete file."""
        depth = file.path.count("/")
        return [*self.target(file).parents[:depth], self.folder / PARTIAL_FOLDER, self.partial(file)]

    def find_copy(self, file: FileToFetch) -> Path | None:
        """Returns the file in the client's cache; None if the cache does not have it at this commit.

        Args:
            file: A file of the commit.
        """
        from huggingface_hub import try_to_load_from_cache

        cached_path = try_to_load_from_cache(self.repo, file.path, cache_dir=self.hub.cache, revision=self.commit)
        # If the file is not in the cache, the result is None, or a marker for a commit that lacks the file.
        return Path(cached_path) if isinstance(cached_path, str) else None

    def finish(self, files: list[FileToFetch], revision: str, *, all_files: list[FileToFetch] | None = None) -> Path:
        """Finishes a pull once every file has arrived. Returns the folder. See `Cache.finish` for the arguments."""
        self._remove_partial_folder()
        return self.folder

    def unrelated_files(self, files: list[FileToFetch]) -> list[str]:
        """Lists the files in the folder that do not belong to the commit.

        Args:
            files: The files of the commit.
        """
        own_paths = {file.path for file in files}
        paths = (path for path in sorted(self.folder.rglob("*")) if not path.is_dir())
        names = (path.relative_to(self.folder).as_posix() for path in paths)
        client_folders = (f"{PARTIAL_FOLDER}/", f"{_CLIENT_FOLDER.as_posix()}/")
        return [name for name in names if name not in own_paths and not name.startswith(client_folders)]


class Cache(_Destination):
    """The client's cache. After the pull, from_pretrained finds the revision there, even offline."""

    def __init__(self, repo: str, commit: str, hub: Hub = DEFAULT_HUB, *, repo_type: str = "model") -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=repo, repo_type=repo_type)
        super().__init__(repo, commit, Path(hub.cache or constants.HF_HUB_CACHE) / name, hub)

    def target(self, file: FileToFetch) -> Path:
        return self.folder / "blobs" / file.etag

    def finish(self, files: list[FileToFetch], revision: str, *, all_files: list[FileToFetch] | None = None) -> Path:
        """Links the blobs into a snapshot, in the client's own layout. Returns the snapshot's folder.

        The client could do this itself, but it would ask the Hub for every file again, and write each file to the path
        that the response's ETag names, even if that contains `../`.

        Args:
            files: The files that were fetched.
            revision: The branch, tag or commit that the user meant.
            all_files: All files of the commit; None if `files` has all of them.
        """
        from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
        from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision, _create_symlink

        self._remove_partial_folder()
        snapshot = self.folder / "snapshots" / self.commit
        tree = {}
        for file in all_files or files:
            is_large = file.etag != file.blob_id
            lfs_fields = {"lfs_sha256": file.etag, "lfs_size": file.size} if is_large else {}
            tree[file.path] = TreeCacheEntry.from_json({"size": file.size, "blob_id": file.blob_id, **lfs_fields})
        # Write this list before the snapshot, because it tells the client whether a snapshot is complete.
        write_tree_cache(str(self.folder), self.commit, tree)
        for file in files:
            link = snapshot / file.path
            if not self._holds(link, file):
                link.parent.mkdir(parents=True, exist_ok=True)
                _create_symlink(str(self.target(file)), str(link))
        _cache_commit_hash_for_specific_revision(str(self.folder), revision, self.commit)
        return snapshot

    def _holds(self, path: Path, file: FileToFetch) -> bool:
        """Whether a path in the snapshot has a file's content."""
        # Another process that fetches this commit may replace the link at any time.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(path, self.target(file)):
                return True
        # On a file system without symbolic links, a snapshot consists of copies.
        return sha256_if_intact(path, file) is not None


def _is_reserved(path: str) -> bool:
    """Whether a repository's file would be written into the client's folder, or in its place."""
    # On some file systems `.Cache` is `.cache`.
    parts, client = Path(path.casefold()).parts, _CLIENT_FOLDER.parts
    return parts[: len(client)] == client[: len(parts)]


def sha256_if_intact(path: Path, file: FileToFetch) -> str | None:
    """Returns the sha256 of a local file that matches the Hub's listing.

    Args:
        path: The local file.
        file: The expected size and etag. If the etag is empty, only the size is compared.

    Returns:
        The sha256 of the content; None if there is no such file or its content differs.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    # Compute both digests in one pass: the etag of a small file is git's SHA-1, but callers need the sha256.
    sha256, sha1 = hashlib.sha256(), hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    is_sha1 = len(file.etag) == 40
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            sha256.update(chunk)
            if is_sha1:
                sha1.update(chunk)
    digest = sha1.hexdigest() if is_sha1 else sha256.hexdigest()
    return sha256.hexdigest() if file.etag in ("", digest) else None
