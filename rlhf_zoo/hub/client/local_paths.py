"""Places the files of a checkpoint in a folder of the user's or in the client's cache, and writes nowhere else."""

import contextlib
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...errors import ZooError
from ...fileio import replace_file
from .connect import CLIENT, Hub
from .downloads import DOWNLOADED, PARTIAL

CHUNK = 2**20
#: The client's own folder in an output directory. No repository may write into it.
_CLIENT = DOWNLOADED.parent
#: A file with the id of the repository that was pulled into a folder.
PULLED = _CLIENT / "rlhf-zoo-pull"


@dataclass(frozen=True)
class FileToFetch:
    """A file to fetch.

    Args:
        path: Path in the repository.
        size: Bytes.
        etag: The sha256 of a large file, the git blob id of any other.
        blob: The git blob id: of the pointer, if the file is large.
    """

    path: str
    size: int
    etag: str
    blob: str = ""


class _Place:
    """Destination of the files of a commit. A file grows at `partial` and moves to `target` once it is complete."""

    def __init__(self, repo: str, commit: str, folder: Path, hub: Hub) -> None:
        self.repo, self.commit, self.folder, self.hub = repo, commit, folder, hub

    def target(self, file: FileToFetch) -> Path:
        """The path of a complete file."""
        raise NotImplementedError

    def partial(self, file: FileToFetch) -> Path:
        """The path of an incomplete file, named by its digest: another revision with the same file can resume it."""
        return self.folder / PARTIAL / file.etag

    def copy(self, file: FileToFetch) -> Path | None:
        """Returns another path on this machine that may hold the file already."""
        return None

    def check_free_space(self, files: list[FileToFetch]) -> None:
        """Checks that the disk has enough free space for what is not there yet.

        Args:
            files: The files to write.

        Raises:
            ZooError: It has less than the sizes that the Hub names.
        """
        missing = {self.target(file): file.size - self._have(file) for file in files}
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        needed, free = sum(missing.values()), shutil.disk_usage(existing).free
        if needed > free:
            raise ZooError(
                f"{self.repo} takes {needed / 2**30:,.1f} GiB more in {self.folder}, but the disk has "
                f"{free / 2**30:,.1f} free: free some space, or give another --output_dir."
            )

    def _have(self, file: FileToFetch) -> int:
        """Bytes of a file that are there already."""
        paths = (self.target(file), self.partial(file))
        return max(min(path.stat().st_size, file.size) if path.is_file() else 0 for path in paths)

    def begin(self, files: list[FileToFetch]) -> None:
        """Prepares the folder, before the first byte is written."""

    def unrelated(self, files: list[FileToFetch]) -> list[str]:
        """Lists the files in the folder that do not belong to the commit."""
        return []

    def _forget_partials(self) -> None:
        # rmdir fails if the folder is not empty: an interrupted pull of another revision can still resume from there.
        with contextlib.suppress(OSError):
            (self.folder / PARTIAL).rmdir()


class Folder(_Place):
    """An output directory of the user's."""

    def __init__(self, repo: str, commit: str, folder: Path, hub: Hub = CLIENT) -> None:
        super().__init__(repo, commit, folder.absolute(), hub)

    def target(self, file: FileToFetch) -> Path:
        """Returns the final path of a file.

        Args:
            file: A file of the commit.
        """
        return self.folder / file.path

    def check(self, files: list[FileToFetch]) -> None:
        """Checks that a pull overwrites nothing but an earlier pull of the same repository.

        Args:
            files: The files to write.

        Raises:
            ZooError: The folder holds files that no pull of this repository wrote; it contains a symbolic link on the
                way to a file; or a file would overwrite the marks of a download.
        """
        if (reserved := next((entry.path for entry in files if _is_clients(entry.path)), None)) is not None:
            raise ZooError(
                f"{self.repo} contains {reserved}, which belongs to the client's folder {_CLIENT}: fetch it without "
                "--output_dir."
            )
        marks = [self.folder / path for path in (_CLIENT.parent, _CLIENT, DOWNLOADED, PULLED)]
        # A link in the folder, left by an earlier download for example, would redirect writes to anywhere.
        for path in sorted({*marks, *(parent for file in files for parent in self._above(file))}):
            if path.is_symlink():
                raise ZooError(
                    f"{path} is a symbolic link, which would redirect files to another folder: remove it, or choose "
                    "another --output_dir."
                )
        pulled = self.folder / PULLED
        before = pulled.read_text(encoding="utf-8", errors="replace").strip() if pulled.is_file() else None
        if before == self.repo:
            return
        if before is not None:
            raise ZooError(
                f"{self.folder} holds a pull of {before!r:.120}, not of {self.repo}: choose another --output_dir."
            )
        # `hf download` wrote here, or a pull that was cut off before PULLED. One file with the right content is proof
        # enough that it was this repository.
        if (self.folder / DOWNLOADED).is_dir():
            existing = [file for file in files if os.path.lexists(self.target(file))]
            matches = any(sha256_of(self.target(file), file) for file in existing)
            obstacle = self.target(existing[0]) if existing and not matches else None
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
        # Each subfolder is repeated below DOWNLOADED: `find_download` looks for that in the home folder.
        for inside in {Path(file.path).parent for file in files}:
            (self.folder / DOWNLOADED / inside).mkdir(parents=True, exist_ok=True)
        (self.folder / DOWNLOADED).mkdir(parents=True, exist_ok=True)
        if not (self.folder / PULLED).is_file():
            replace_file(self.folder / PULLED, f"{self.repo}\n".encode(), mode=0o644)

    def _above(self, file: FileToFetch) -> list[Path]:
        """The paths between the folder and the file, and those of its unfinished part: all that a write touches."""
        inside = file.path.count("/")
        return [*self.target(file).parents[:inside], self.folder / PARTIAL, self.partial(file)]

    def copy(self, file: FileToFetch) -> Path | None:
        """Returns the file in the client's cache, if it has the same commit.

        Args:
            file: A file of the commit.
        """
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, file.path, cache_dir=self.hub.cache, revision=self.commit)
        # Otherwise None, or a marker that the commit has no such file.
        return Path(cached) if isinstance(cached, str) else None

    def finish(self, files: list[FileToFetch], name: str, *, all_files: list[FileToFetch] | None = None) -> Path:
        """Finishes the pull, once every file is there. Returns the folder.

        Args:
            files: The files of the commit.
            name: The revision that the user named. Not needed for a folder.
            all_files: All files of the commit, if `files` is only a part of them.
        """
        self._forget_partials()
        return self.folder

    def unrelated(self, files: list[FileToFetch]) -> list[str]:
        """Lists the files in the folder that do not belong to the commit.

        Args:
            files: The files of the commit.
        """
        expected = {file.path for file in files}
        paths = (path for path in sorted(self.folder.rglob("*")) if not path.is_dir())
        names = (path.relative_to(self.folder).as_posix() for path in paths)
        return [
            name
            for name in names
            if name not in expected and not name.startswith((f"{PARTIAL}/", f"{_CLIENT.as_posix()}/"))
        ]


class Cache(_Place):
    """The client's cache. Afterwards from_pretrained finds the revision there without asking the Hub."""

    def __init__(self, repo: str, commit: str, hub: Hub = CLIENT, *, repo_type: str = "model") -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=repo, repo_type=repo_type)
        super().__init__(repo, commit, Path(hub.cache or constants.HF_HUB_CACHE) / name, hub)

    def target(self, file: FileToFetch) -> Path:
        """Returns the final path of a file.

        Args:
            file: A file of the commit.
        """
        return self.folder / "blobs" / file.etag

    def finish(self, files: list[FileToFetch], name: str, *, all_files: list[FileToFetch] | None = None) -> Path:
        """Links the blobs into a snapshot, in the client's own layout.

        The client could do this itself, but would ask the Hub for every file again, and would write each file to the
        path in that answer's ETag, even one with `../` in it.

        Args:
            files: The files that were fetched.
            name: The branch, tag or commit that the user named.
            all_files: All files of the commit, if `files` is only a part of them.

        Returns:
            The folder of the snapshot.
        """
        from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
        from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision, _create_symlink

        self._forget_partials()
        snapshot = self.folder / "snapshots" / self.commit
        tree = {}
        for file in all_files or files:
            is_large = file.etag != file.blob
            large = {"lfs_sha256": file.etag, "lfs_size": file.size} if is_large else {}
            tree[file.path] = TreeCacheEntry.from_json({"size": file.size, "blob_id": file.blob, **large})
        # Before the snapshot: with this list the client can tell that a snapshot is incomplete.
        write_tree_cache(str(self.folder), self.commit, tree)
        for file in files:
            pointer = snapshot / file.path
            if not self._is_checked(pointer, file):
                pointer.parent.mkdir(parents=True, exist_ok=True)
                _create_symlink(str(self.target(file)), str(pointer))
        _cache_commit_hash_for_specific_revision(str(self.folder), name, self.commit)
        return snapshot

    def _is_checked(self, path: Path, file: FileToFetch) -> bool:
        blob = self.target(file)
        if path.exists() and blob.exists() and os.path.samefile(path, blob):
            return True
        return sha256_of(path, file) is not None  # on a file system without symbolic links a snapshot is a copy


def _is_clients(path: str) -> bool:
    """Whether a file of a repository would be written into the client's folder, or in its place."""
    # Case does not count: on some file systems `.Cache` is `.cache`.
    parts, client = Path(path.casefold()).parts, _CLIENT.parts
    return parts[: len(client)] == client[: len(parts)]


def sha256_of(path: Path, file: FileToFetch) -> str | None:
    """Hashes a local file and compares it with the Hub's listing.

    Args:
        path: The local file.
        file: The expected size and etag. With an empty etag only the size is compared.

    Returns:
        The sha256 of the content, or None if there is no such file or it differs.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    # One pass for both digests: the etag of a regular file is git's SHA-1, but our report names the sha256.
    sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    is_blob = len(file.etag) == 40
    with path.open("rb") as source:
        while chunk := source.read(CHUNK):
            sha256.update(chunk)
            if is_blob:
                blob.update(chunk)
    digest = blob.hexdigest() if is_blob else sha256.hexdigest()
    return sha256.hexdigest() if digest == (file.etag or digest) else None
