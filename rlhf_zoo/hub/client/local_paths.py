"""Where the files of a checkpoint go: a folder of the user's, or the client's cache. Nothing else is written."""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import ZooError
from ...fileio import replace_file
from .connect import CLIENT, Hub
from .downloads import DOWNLOADED, PARTIAL

CHUNK = 2**20
#: The client's own folder in a folder of the user's. No repository may write into it.
_CLIENT = DOWNLOADED.parent
#: The id of the repository that was pulled into a folder.
PULLED = _CLIENT / "rlhf-zoo-pull"


@dataclass(frozen=True)
class Wanted:
    """A file of the tree. etag: its sha256 if git holds a pointer to it, else blob: git's SHA-1 of what it holds."""

    path: str
    size: int
    etag: str
    blob: str = ""


class _Place:
    """Where the files of a commit go: `target` in the end, `partial` until then."""

    def __init__(self, repo: str, commit: str, folder: Path, hub: Hub) -> None:
        self.repo, self.commit, self.folder, self.hub = repo, commit, folder, hub

    def partial(self, file: Wanted) -> Path:
        return self.folder / PARTIAL / file.etag

    def copy(self, file: Wanted) -> Path | None:
        """Where this machine may have the file already."""
        return None

    def begin(self, files: list[Wanted]) -> None:
        """Before the first byte is written."""

    def others(self, files: list[Wanted]) -> list[str]:
        """Files that lie there and do not belong to the commit."""
        return []

    def _forget_partials(self) -> None:
        with contextlib.suppress(OSError):  # another revision, interrupted, may have left something to go on from
            (self.folder / PARTIAL).rmdir()


class Folder(_Place):
    """A folder of the user's."""

    def __init__(self, repo: str, commit: str, folder: Path, hub: Hub = CLIENT) -> None:
        super().__init__(repo, commit, folder.absolute(), hub)

    def target(self, file: Wanted) -> Path:
        return self.folder / file.path

    def check(self, files: list[Wanted]) -> None:
        """Checks that a pull writes over nothing but an earlier pull of the repository.

        Args:
            files: what would be written.

        Raises:
            ZooError: The folder holds files that are of no earlier pull of this repository; a symbolic link leads out
                of it; or a file would stand where the marks of a download are kept.
        """
        if (wrong := next((one.path for one in files if _is_clients(one.path)), None)) is not None:
            raise ZooError(
                f"{self.repo} holds a file {wrong}, which belongs to the client's folder {_CLIENT}: fetch it without "
                "--output_dir."
            )
        marks = [self.folder / path for path in (_CLIENT.parent, _CLIENT, DOWNLOADED, PULLED)]
        for path in sorted({*marks, *(above for file in files for above in self._above(file))}):
            if path.is_symlink():
                raise ZooError(
                    f"{path} is a symbolic link, and files would be written to where it leads: remove it, or give "
                    "another --output_dir."
                )
        pulled = self.folder / PULLED
        before = pulled.read_text(encoding="utf-8", errors="replace").strip() if pulled.is_file() else None
        if before == self.repo:
            return
        if before is not None:
            raise ZooError(
                f"{self.folder} holds a pull of {before!r:.120}, not of {self.repo}: give another --output_dir."
            )
        if (self.folder / DOWNLOADED).is_dir():  # by `hf download`, or by a pull that did not write its repository yet
            there = [file for file in files if os.path.lexists(self.target(file))]
            mine = self.target(there[0]) if there and not any(sha256_of(self.target(f), f) for f in there) else None
        else:
            mine = next((path for path in self.folder.rglob("*") if path.is_symlink() or not path.is_dir()), None)
        if mine is not None:
            raise ZooError(
                f"{mine} is there already, and {self.folder} is of no earlier pull of {self.repo}: give a new or empty "
                "folder as --output_dir."
            )

    def begin(self, files: list[Wanted]) -> None:
        """Marks the folder as a download, as the client does, and as a pull of this repository."""
        for inside in {Path(file.path).parent for file in files}:
            (self.folder / DOWNLOADED / inside).mkdir(parents=True, exist_ok=True)
        (self.folder / DOWNLOADED).mkdir(parents=True, exist_ok=True)
        if not (self.folder / PULLED).is_file():
            replace_file(self.folder / PULLED, f"{self.repo}\n".encode(), mode=0o644)

    def _above(self, file: Wanted) -> list[Path]:
        """What lies between the folder and the file, and its unfinished part with the folder of that."""
        inside = file.path.count("/")
        return [*self.target(file).parents[:inside], self.folder / PARTIAL, self.partial(file)]

    def copy(self, file: Wanted) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, file.path, cache_dir=self.hub.cache, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def settle(self, files: list[Wanted], name: str, *, whole: list[Wanted] | None = None) -> Path:
        """Once every file is there. Returns the folder."""
        self._forget_partials()
        return self.folder

    def others(self, files: list[Wanted]) -> list[str]:
        known = {file.path for file in files}
        found = (path for path in sorted(self.folder.rglob("*")) if not path.is_dir())
        names = (path.relative_to(self.folder).as_posix() for path in found)
        return [
            name
            for name in names
            if name not in known and not name.startswith((f"{PARTIAL}/", f"{_CLIENT.as_posix()}/"))
        ]


class Cache(_Place):
    """The client's own cache, in which plain from_pretrained finds the revision afterwards."""

    def __init__(self, repo: str, commit: str, hub: Hub = CLIENT) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=repo, repo_type="model")
        super().__init__(repo, commit, Path(hub.cache or constants.HF_HUB_CACHE) / name, hub)

    def target(self, file: Wanted) -> Path:
        return self.folder / "blobs" / file.etag

    def settle(self, files: list[Wanted], name: str, *, whole: list[Wanted] | None = None) -> Path:
        """Makes the snapshot of the blobs, as the client has it. whole: all that the commit has, where this is a part.

        The client itself would ask the Hub for every file again, and write it wherever the ETag of that answer says,
        `../` and all.
        """
        from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
        from huggingface_hub.file_download import _cache_commit_hash_for_specific_revision, _create_symlink

        self._forget_partials()
        snapshot = self.folder / "snapshots" / self.commit
        tree = {}
        for file in whole or files:
            is_large = file.etag != file.blob
            large = {"lfs_sha256": file.etag, "lfs_size": file.size} if is_large else {}
            tree[file.path] = TreeCacheEntry.from_json({"size": file.size, "blob_id": file.blob, **large})
        write_tree_cache(str(self.folder), self.commit, tree)  # first: by it the client knows a part of a snapshot
        for file in files:
            pointer = snapshot / file.path
            if not self._is_checked(pointer, file):
                pointer.parent.mkdir(parents=True, exist_ok=True)
                _create_symlink(str(self.target(file)), str(pointer))
        _cache_commit_hash_for_specific_revision(str(self.folder), name, self.commit)
        return snapshot

    def _is_checked(self, path: Path, file: Wanted) -> bool:
        blob = self.target(file)
        if path.exists() and blob.exists() and os.path.samefile(path, blob):
            return True
        return sha256_of(path, file) is not None  # without symbolic links a snapshot is a copy


def _is_clients(path: str) -> bool:
    """Whether a file of a repository would stand in the client's folder, or in its place."""
    parts, client = Path(path.casefold()).parts, _CLIENT.parts
    return parts[: len(client)] == client[: len(parts)]


def sha256_of(path: Path, file: Wanted) -> str | None:
    """The sha256 of what lies at `path`; None where that is not `file`. Of an empty etag only the size counts."""
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    is_blob = len(file.etag) == 40
    with path.open("rb") as source:
        while chunk := source.read(CHUNK):
            sha256.update(chunk)
            if is_blob:
                blob.update(chunk)
    found = blob.hexdigest() if is_blob else sha256.hexdigest()
    return sha256.hexdigest() if found == (file.etag or found) else None
