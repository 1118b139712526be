"""Writes objects to a bare git repository. They wait in a quarantine, so a commit appears completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import time
import zlib
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ...fileio import sync_folder
from .durable import mark_in_use
from .faults import Fault
from .git import GitRepository
from .names import OWNER

if TYPE_CHECKING:
    from dulwich.objects import ShaFile

_IDENTITY = f"{OWNER} <{OWNER}@localhost>".encode()
_FILE_MODE = 0o100644


class Quarantine:
    """Holds new objects outside the store until their commit is accepted, as git's receive-pack does.

    If the context ends without `migrate`, the objects are removed. So a refused or interrupted push leaves nothing
    behind.
    """

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._folder = repository / f"incoming-{secrets.token_hex(8)}"
        self._oids: list[str] = []
        self._in_use = ExitStack()

    def __enter__(self) -> Quarantine:
        self._folder.mkdir()
        self._in_use.enter_context(mark_in_use(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._in_use.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add_blob(self, content: bytes) -> str:
        """Stores a blob and returns its git id.

        Args:
            content: The content.
        """
        from dulwich.objects import Blob

        return self.add_object(Blob.from_string(content))

    def add_object(self, git_object: ShaFile) -> str:
        """Stores an object and returns its git id.

        Args:
            git_object: The object.
        """
        oid = git_object.id.decode()
        path = self._folder / oid
        if not path.exists():
            with open(path, "xb") as file:
                file.write(git_object.as_legacy_object(compression_level=1))
                os.fchmod(file.fileno(), 0o400)
            self._oids.append(oid)
        return oid

    def read(self, oid: str) -> bytes | None:
        """Returns the content of an object; None if it is not in the quarantine.

        Args:
            oid: Git id of the object.
        """
        if oid not in self._oids:
            return None
        object_bytes = zlib.decompress((self._folder / oid).read_bytes())
        return object_bytes.partition(b"\0")[2]

    def migrate(self) -> None:
        """Syncs the objects to the disk, then moves them to the store. The caller holds the repository's lock."""
        objects = self._repository / "objects"
        changed_folders = set()
        for oid in self._oids:
            fd = os.open(self._folder / oid, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for oid in self._oids:
            target = objects / oid[:2] / oid[2:]
            if not target.exists():
                if not target.parent.exists():
                    target.parent.mkdir(exist_ok=True)
                    changed_folders.add(objects)
                os.rename(self._folder / oid, target)
                changed_folders.add(target.parent)
        for folder in changed_folders:  # the renames must be on the disk before a ref names the objects
            sync_folder(folder)
        self._oids.clear()

    def add_commit(self, tree: str, parents: list[str], message: str) -> str:
        """Stores a commit and returns its id.

        Args:
            tree: Git id of the root tree.
            parents: Ids of the parent commits.
            message: The commit message.
        """
        from dulwich.objects import Commit, ObjectID

        commit = Commit()
        commit.tree = ObjectID(tree.encode())
        commit.parents = [ObjectID(parent.encode()) for parent in parents]
        commit.author = commit.committer = _IDENTITY
        commit.author_time = commit.commit_time = int(time.time())
        commit.author_timezone = commit.commit_timezone = 0
        commit.encoding = b"UTF-8"
        commit.message = _encode_message(message)
        return self.add_object(commit)

    def add_tag(self, name: str, commit: str, message: str) -> str:
        """Stores an annotated tag and returns its id.

        Args:
            name: The tag.
            commit: Commit id.
            message: The tag's message.
        """
        from dulwich.objects import Commit, ObjectID, Tag

        tag = Tag()
        tag.name = name.encode()
        tag.object = (Commit, ObjectID(commit.encode()))
        tag.tagger = _IDENTITY
        tag.tag_time = int(time.time())
        tag.tag_timezone = 0
        tag.message = _encode_message(message)
        return self.add_object(tag)


def _encode_message(message: str) -> bytes:
    # git ends a message with one newline and stops reading at a NUL.
    return (message.replace("\0", " ").replace("\r\n", "\n").strip() + "\n").encode(errors="replace")


class TreeEdit:
    """A tree that is being edited, as a mapping of paths to blob ids.

    Args:
        git: The open repository.
        tree: Git id of the tree to start from; None for an empty tree.
    """

    def __init__(self, git: GitRepository, tree: str | None) -> None:
        self._files = {entry.path: entry.oid for entry in git.walk(tree) if not entry.is_folder} if tree else {}
        self._file_counts: dict[str, int] = {}  # folder -> number of files below it
        for path in self._files:
            self._count_in_folders(path, 1)

    def _count_in_folders(self, path: str, change: int) -> None:
        for folder in _parent_folders(path):
            self._file_counts[folder] = self._file_counts.get(folder, 0) + change

    def put(self, path: str, oid: str) -> None:
        """Writes a file.

        Args:
            path: Path in the repository.
            oid: Git id of the blob.

        Raises:
            Fault: 400 if one of the path's folders is a file, or the path is a folder.
        """
        for folder in _parent_folders(path):
            if folder in self._files:
                raise Fault(400, f"Cannot write '{path}': '{folder}' is a file there; delete it first.")
        if self._file_counts.get(path):
            raise Fault(400, f"Cannot write '{path}': a folder has that name; delete it first.")
        if path not in self._files:
            self._count_in_folders(path, 1)
        self._files[path] = oid

    def get(self, path: str) -> str | None:
        """Returns the git id of the blob at a path; None if there is no such file.

        Args:
            path: Path in the repository.
        """
        return self._files.get(path)

    def remove(self, path: str, *, is_folder: bool) -> bool:
        """Removes a file, or a folder with its content. Returns False if there is no such file or folder.

        Args:
            path: Path in the repository.
            is_folder: Whether to remove a folder.
        """
        paths = [file for file in self._files if file.startswith(f"{path}/")] if is_folder else [path]
        removed_paths = [file for file in paths if file in self._files]
        for file in removed_paths:
            del self._files[file]
            self._count_in_folders(file, -1)
        return bool(removed_paths)

    def write(self, quarantine: Quarantine) -> str:
        """Stores the trees in a quarantine, and returns the git id of the root tree.

        Args:
            quarantine: Receives the tree objects.
        """
        from dulwich.index import commit_tree
        from dulwich.objects import ObjectID

        blobs = [
            (path.encode(errors="surrogateescape"), ObjectID(oid.encode()), _FILE_MODE)
            for path, oid in self._files.items()
        ]
        root: bytes = commit_tree(quarantine, blobs)  # type: ignore[arg-type]
        return root.decode()


def _parent_folders(path: str) -> list[str]:
    """Returns the folders above a file, except the root."""
    return [str(folder) for folder in PurePosixPath(path).parents][:-1]
