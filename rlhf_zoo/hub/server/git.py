"""Reads and writes the refs of a bare git repository, and reads its objects and history. `git_writes` adds objects."""

from __future__ import annotations

import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...fileio import replace_file
from .faults import Damaged, Fault, is_file_error
from .large_files import Pointer, parse_pointer

if TYPE_CHECKING:
    from dulwich.objects import Commit, ShaFile

MAIN = "main"
_FOLDER_MODE = 0o040000
# Maximum number of tree entries in memory while a repository is open.
_MAX_CACHED_ENTRIES = 200_000
_CONFIG = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"


@dataclass(frozen=True)
class BlobInfo:
    """The size of a blob, and the pointer in it.

    Args:
        size: Bytes that a user downloads: the large file's if the blob is a pointer, else the blob's.
        stored_size: Bytes of the blob itself.
        pointer: The blob's content as a pointer to a large file; None for ordinary content.
    """

    size: int
    stored_size: int
    pointer: Pointer | None


@dataclass(frozen=True)
class Entry:
    """A file or folder of a commit. `path` is relative to the root; `oid` is the git id of the blob or tree."""

    path: str
    oid: str
    is_folder: bool


@dataclass(frozen=True)
class Ref:
    """A branch or tag. `full_name` begins with refs/. `commit` is a commit id, even for an annotated tag."""

    name: str
    full_name: str
    commit: str


class GitRepository:
    """A bare repository. Reads need no lock; writers hold the repository's lock (see `storage`).

    Methods that read raise Damaged for an object that a ref or another object names, but that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from dulwich.object_store import DiskObjectStore
        from dulwich.refs import DiskRefsContainer

        self.path = path
        self._objects = DiskObjectStore(str(path / "objects"))
        self._refs = DiskRefsContainer(str(path))
        self._trees: dict[str, dict[bytes, tuple[int, str]]] = {}
        self._cached_entry_count = 0
        self._blob_infos: dict[str, BlobInfo] = {}

    def __enter__(self) -> GitRepository:
        return self

    def __exit__(self, *_: object) -> None:
        self._objects.close()

    @staticmethod
    def initialize(path: Path) -> None:
        """Creates an empty bare repository.

        Args:
            path: An existing empty folder.
        """
        for folder in ("objects/info", "objects/pack", "refs/heads", "refs/tags", "lfs/objects", "lfs/incomplete"):
            (path / folder).mkdir(parents=True)
        replace_file(path / "config", _CONFIG)
        replace_file(path / "HEAD", f"ref: refs/heads/{MAIN}\n".encode())

    def branch(self, name: str) -> str | None:
        """Returns the commit at the head of a branch; None if there is no such branch.

        Args:
            name: The branch.
        """
        return self._read_ref(f"refs/heads/{name}")

    def resolve(self, revision: str) -> str | None:
        """Returns the commit that a revision stands for; None if there is no such revision.

        Args:
            revision: A tag, a branch, a full ref name, or at least 7 digits of a commit id. A tag takes precedence over
                a branch of the same name, as in git; `refs/heads/NAME` is the branch.

        Raises:
            Fault: 400 if the ids of several commits begin with the digits.
        """
        names = [revision] if revision.startswith("refs/") else [f"refs/tags/{revision}", f"refs/heads/{revision}"]
        for name in names:
            target = self._read_ref(name)
            if target is not None:
                return self._peel(target)
        return self._commit_by_prefix(revision.lower()) if re.fullmatch(r"[0-9a-fA-F]{7,40}", revision) else None

    def _commit_by_prefix(self, prefix: str) -> str | None:
        with self._errors_as_damaged():
            oids = [oid.decode() for oid in self._objects.iter_prefix(prefix.encode())]
        commits = {oid for oid in oids if getattr(self._find_object(oid), "type_name", None) == b"commit"}
        if len(commits) > 1:
            raise Fault(400, f"The ids of {len(commits)} commits begin with '{prefix}': give more digits.")
        return commits.pop() if commits else None

    def refs(self, prefix: str) -> list[Ref]:
        """Returns all branches or all tags, sorted by name.

        Args:
            prefix: "refs/heads/" or "refs/tags/".
        """
        oids = {name: self._read_ref(prefix + name) for name in self.ref_names(prefix)}
        return [Ref(name, prefix + name, self._peel(oid)) for name, oid in oids.items() if oid is not None]

    def ref_names(self, prefix: str) -> list[str]:
        """Returns the names of all branches or all tags, including those whose objects are damaged.

        Args:
            prefix: "refs/heads/" or "refs/tags/".
        """
        with self._errors_as_damaged():
            names = sorted(key.decode() for key in self._refs.allkeys() if key.startswith(prefix.encode()))
        return [name.removeprefix(prefix) for name in names if self._read_ref(name)]

    def write_ref(self, ref: str, target: str) -> None:
        """Points a ref at an object that is already on the disk. This step alone makes a commit visible.

        Args:
            ref: Full name, such as refs/heads/main.
            target: Id of the commit or tag object.
        """
        path = self.path / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # an empty folder, which remains after a ref such as `exp/a` is deleted
            path.rmdir()
        replace_file(path, f"{target}\n".encode(), temporary_folder=self.path)

    def delete_ref(self, ref: str) -> None:
        """Removes a ref, including from packed-refs, to which `git gc` may have moved it.

        Args:
            ref: Full name, such as refs/heads/main.
        """
        self._refs.remove_if_equals(ref.encode(), None)  # type: ignore[arg-type]

    def _read_ref(self, ref: str) -> str | None:
        if "\0" in ref or ".." in ref or len(ref) > 4000:
            return None
        try:
            target = (self.path / ref).read_bytes().strip().decode("ascii")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            with self._errors_as_damaged():
                oid = self._refs.get_packed_refs().get(ref.encode(errors="replace"))  # type: ignore[call-overload]
            return oid.decode() if oid else None
        except (OSError, UnicodeError):  # the name is too long for the file system, or the file is not a ref
            return None
        return target if re.fullmatch(r"[0-9a-f]{40}", target) else None

    def _peel(self, oid: str) -> str:
        """Follows annotated tags to the commit that they point to. Returns the id of a commit unchanged."""
        while True:
            git_object: Any = self._find_object(oid)
            if git_object is None:
                raise Damaged(self.path, f"the object {oid[:12]} is lost")
            if git_object.type_name != b"tag":
                return oid
            with self._errors_as_damaged(oid):
                oid = git_object.object[1].decode()  # (class, id) of the tagged object

    @contextmanager
    def _errors_as_damaged(self, oid: str | None = None) -> Iterator[None]:
        """Turns errors while reading the object `oid`, or while reading the refs if `oid` is None, into Damaged."""
        subject = f"the object {oid[:12]}" if oid else "packed-refs, or a file of refs,"
        try:
            yield
        except KeyError as error:
            raise Damaged(self.path, f"{subject} is lost") from error
        except (Fault, MemoryError):
            raise
        except OSError as error:
            if not is_file_error(error):
                raise
            raise Damaged(self.path, f"{subject} cannot be read: {error.strerror}") from error
        except Exception as error:  # dulwich and zlib raise a dozen different classes for damaged data
            raise Damaged(self.path, f"{subject} cannot be read: {str(error) or type(error).__name__}") from error

    def _find_object(self, oid: str) -> ShaFile | None:
        with self._errors_as_damaged(oid):
            try:
                return self._objects[oid.encode()]  # type: ignore[index]
            except KeyError:
                return None

    def _read_object(self, oid: str, kind: str) -> Any:
        git_object = self._find_object(oid)
        if git_object is None or git_object.type_name != kind.encode():
            raise Damaged(self.path, f"the {kind} {oid[:12]} is lost")
        return git_object

    def blob(self, oid: str) -> bytes:
        """Returns the content of a blob.

        Args:
            oid: Git id of the blob.
        """
        with self._errors_as_damaged(oid):
            return self._objects.get_raw(oid.encode())[1]  # type: ignore[arg-type]

    def blob_info(self, oid: str) -> BlobInfo:
        """Returns the size and the pointer of a blob. Decompresses only the start of a blob that is not in a pack.

        Args:
            oid: Git id of the blob.
        """
        info = self._blob_infos.get(oid)
        if info is None:
            start, size = self._blob_start(oid)
            pointer = parse_pointer(start) if size == len(start) else None
            info = BlobInfo(pointer.size if pointer else size, size, pointer)
            self._blob_infos[oid] = info
        return info

    def _blob_start(self, oid: str) -> tuple[bytes, int]:
        """Returns (the first bytes of a blob, the blob's size)."""
        with self._errors_as_damaged(oid):
            try:
                with open(self.path / "objects" / oid[:2] / oid[2:], "rb") as file:
                    # A pointer has less than 1024 bytes, so 1100 bytes show whether the blob is a pointer.
                    start = zlib.decompressobj().decompress(file.read(4096), 1100)
            except FileNotFoundError:  # in a pack
                content = self.blob(oid)
                return content[:1100], len(content)
            header, _, content = start.partition(b"\0")
            return content, int(header.split()[1])

    def commit(self, oid: str) -> Commit:
        """Returns a commit object.

        Args:
            oid: Commit id.
        """
        commit: Commit = self._read_object(oid, "commit")
        return commit

    def head(self) -> str:
        """Returns the commit at the head of main. Every repository has that branch."""
        commit = self.branch(MAIN)
        if commit is None:
            raise Damaged(self.path, f"its branch {MAIN} is lost")
        return commit

    def history(self, commit: str) -> Iterator[tuple[str, Commit]]:
        """Yields (id, object) of a commit and of its chain of first parents, newest first.

        Args:
            commit: Commit id.
        """
        oid: str | None = commit
        while oid is not None:
            commit_object = self.commit(oid)
            yield oid, commit_object
            oid = commit_object.parents[0].decode() if commit_object.parents else None

    def children(self, tree: str) -> dict[bytes, tuple[int, str]]:
        """Returns the entries of a tree object: name -> (mode, oid).

        Args:
            tree: Git id of the tree.
        """
        entries = self._trees.get(tree)
        if entries is None:
            tree_object = self._read_object(tree, "tree")
            with self._errors_as_damaged(tree):
                entries = {item.path: (item.mode, item.sha.decode()) for item in tree_object.items()}
            self._cached_entry_count += 1 + len(entries)
            if self._cached_entry_count > _MAX_CACHED_ENTRIES:  # a long history of large folders
                self._trees.clear()
                self._cached_entry_count = 1 + len(entries)
            self._trees[tree] = entries
        return entries

    def root_tree(self, commit: str) -> str:
        """Returns the git id of a commit's root tree.

        Args:
            commit: Commit id.
        """
        tree: bytes = self.commit(commit).tree
        return tree.decode()

    def entry(self, commit: str, path: str) -> Entry | None:
        """Returns the file or folder at a path; None if the commit has neither.

        Args:
            commit: Commit id.
            path: Path in the repository; "" for the root.
        """
        mode, oid = _FOLDER_MODE, self.root_tree(commit)
        for name in path.split("/") if path else []:
            if not stat.S_ISDIR(mode):
                return None
            child = self.children(oid).get(name.encode(errors="replace"))
            if child is None:
                return None
            mode, oid = child
        return Entry(path, oid, stat.S_ISDIR(mode))

    def walk(self, tree: str, prefix: str = "", *, recursive: bool = True) -> Iterator[Entry]:
        """Yields the entries of a tree in git's order. A folder comes before its entries.

        Args:
            tree: Git id of the tree.
            prefix: Prepended to each path.
            recursive: Whether to descend into folders.
        """
        for name, (mode, oid) in self.children(tree).items():
            path = f"{prefix}{name.decode(errors='surrogateescape')}"
            is_folder = stat.S_ISDIR(mode)
            yield Entry(path, oid, is_folder)
            if is_folder and recursive:
                yield from self.walk(oid, f"{path}/")

    def files(self, commit: str) -> list[Entry]:
        """Lists every file of a commit.

        Args:
            commit: Commit id.
        """
        return [entry for entry in self.walk(self.root_tree(commit)) if not entry.is_folder]

    def last_commits(self, commit: str, paths: list[str]) -> dict[str, str]:
        """Returns path -> the newest commit in the history of `commit` that changed the path.

        Args:
            commit: Commit id.
            paths: Paths in the repository.
        """
        commit_by_path: dict[str, str] = {}
        pending_paths = set(paths)
        path_tree = _group_by_folder(pending_paths)
        tree = self.root_tree(commit)
        for oid, commit_object in self.history(commit):
            parents = commit_object.parents
            parent_tree = self.root_tree(parents[0].decode()) if parents else None
            changed_paths = set(self._changed_paths(tree, parent_tree, path_tree)) & pending_paths
            if changed_paths:
                commit_by_path |= dict.fromkeys(changed_paths, oid)
                pending_paths -= changed_paths
                path_tree = _group_by_folder(pending_paths)
            if not pending_paths or parent_tree is None:
                break
            tree = parent_tree
        return commit_by_path

    def _changed_paths(self, tree: str | None, other_tree: str | None, path_tree: _PathTree) -> Iterator[str]:
        """Yields the paths that differ between two trees, given by their git ids; None for a missing folder."""
        if tree == other_tree:  # folders with equal content have equal ids, so this skips most of a long history
            return
        entries, other_entries = (self.children(oid) if oid is not None else {} for oid in (tree, other_tree))
        for name, (path, subtree) in path_tree.items():
            entry, other_entry = entries.get(name), other_entries.get(name)
            if entry != other_entry:
                if path is not None:
                    yield path
                if subtree:
                    yield from self._changed_paths(_tree_id(entry), _tree_id(other_entry), subtree)


def _tree_id(entry: tuple[int, str] | None) -> str | None:
    """Returns the git id of an entry that is a folder; None for a file or a missing entry."""
    return entry[1] if entry is not None and stat.S_ISDIR(entry[0]) else None


#: Paths as a tree: name -> (the path that ends there, or None; the tree below it).
_PathTree = dict[bytes, tuple[str | None, "_PathTree"]]


def _group_by_folder(paths: Iterable[str]) -> _PathTree:
    """Arranges paths as a tree."""
    path_tree: _PathTree = {}
    for path in paths:
        level = path_tree
        *folders, name = path.encode(errors="surrogateescape").split(b"/")
        for folder in folders:
            level = level.setdefault(folder, (None, {}))[1]
        level[name] = (path, level.get(name, (None, {}))[1])
    return path_tree
