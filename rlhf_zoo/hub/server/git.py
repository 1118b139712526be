"""One bare git repository: objects, trees, refs, and commits that appear completely or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ...fileio import replace_file, sync_folder
from .durable import in_use
from .faults import Damaged, Fault, is_of_the_file
from .large_files import Pointer, parse_pointer
from .names import OWNER

if TYPE_CHECKING:
    from dulwich.objects import Commit, ShaFile

MAIN = "main"
_IDENTITY = f"{OWNER} <{OWNER}@localhost>".encode()
_FILE_MODE = 0o100644
_FOLDER_MODE = 0o040000
# Largest number of tree entries in memory while a repository is open.
_MOST_ENTRIES = 200_000
_CONFIG = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"


@dataclass(frozen=True)
class BlobInfo:
    """Size of a file.

    Args:
        size: Bytes that a user downloads: of the large file, if the blob is a pointer.
        stored: Bytes of the blob itself.
        pointer: The pointer to the large file, if the blob is one.
    """

    size: int
    stored: int
    pointer: Pointer | None


@dataclass(frozen=True)
class Entry:
    """A file or folder of a commit. `path` is relative to the root, `oid` is the git id of the blob or tree."""

    path: str
    oid: str
    is_folder: bool


@dataclass(frozen=True)
class Ref:
    """A branch or tag. `commit` is the commit that an annotated tag leads to, not the tag object."""

    name: str
    ref: str
    commit: str


class GitRepository:
    """A bare repository. Reads need no lock; writers hold the repository's lock (see `storage`).

    Every method that reads raises Damaged if an object that a ref or another object names cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from dulwich.object_store import DiskObjectStore
        from dulwich.refs import DiskRefsContainer

        self.path = path
        self._objects = DiskObjectStore(str(path / "objects"))
        self._refs = DiskRefsContainer(str(path))
        self._trees: dict[str, dict[bytes, tuple[int, str]]] = {}
        self._known_entries = 0
        self._blobs: dict[str, BlobInfo] = {}

    def __enter__(self) -> GitRepository:
        return self

    def __exit__(self, *_: object) -> None:
        self._objects.close()

    @staticmethod
    def initialize(path: Path) -> None:
        """Lays out an empty bare repository in the existing folder `path`."""
        for folder in ("objects/info", "objects/pack", "refs/heads", "refs/tags", "lfs/objects", "lfs/incomplete"):
            (path / folder).mkdir(parents=True)
        replace_file(path / "config", _CONFIG)
        replace_file(path / "HEAD", f"ref: refs/heads/{MAIN}\n".encode())

    # -- refs ---------------------------------------------------------------------------------------------------

    def branch(self, name: str) -> str | None:
        """Returns the commit at the head of a branch, or None."""
        return self._read_ref(f"refs/heads/{name}")

    def resolve(self, revision: str) -> str | None:
        """Returns the commit that a revision stands for, or None.

        Args:
            revision: A tag, a branch, a full ref name, or at least 7 digits of a commit id. A tag goes before a branch
                of the same name, as in git; `refs/heads/NAME` is the branch.

        Raises:
            Fault: 400 if several commits begin with these digits.
        """
        names = [revision] if revision.startswith("refs/") else [f"refs/tags/{revision}", f"refs/heads/{revision}"]
        for name in names:
            target = self._read_ref(name)
            if target is not None:
                return self._peel(target)
        return self._by_beginning(revision.lower()) if re.fullmatch(r"[0-9a-fA-F]{7,40}", revision) else None

    def _by_beginning(self, digits: str) -> str | None:
        with self._reading():
            oids = [oid.decode() for oid in self._objects.iter_prefix(digits.encode())]
        commits = {oid for oid in oids if (item := self._get(oid)) is not None and item.type_name == b"commit"}
        if len(commits) > 1:
            raise Fault(400, f"The ids of {len(commits)} commits begin with '{digits}': give more digits.")
        return commits.pop() if commits else None

    def refs(self, prefix: str) -> list[Ref]:
        """Returns every ref below `prefix` ("refs/heads/" or "refs/tags/"), by name."""
        targets = {name: self._read_ref(prefix + name) for name in self.names(prefix)}
        return [Ref(name, prefix + name, self._peel(oid)) for name, oid in targets.items() if oid is not None]

    def names(self, prefix: str) -> list[str]:
        """Returns the names of `refs`, even of those whose objects are damaged."""
        with self._reading():
            names = sorted(key.decode() for key in self._refs.allkeys() if key.startswith(prefix.encode()))
        return [name.removeprefix(prefix) for name in names if self._read_ref(name)]

    def write_ref(self, ref: str, target: str) -> None:
        """Points a ref at an object that is on the disk already. This one step makes a commit visible."""
        path = self.path / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # empty, left by deleted refs such as `exp/a` when `exp` is created
            path.rmdir()
        replace_file(path, f"{target}\n".encode(), scratch=self.path)

    def delete_ref(self, ref: str) -> None:
        """Removes a ref, also from packed-refs, where `git gc` may have moved it."""
        self._refs.remove_if_equals(ref.encode(), None)  # type: ignore[arg-type]

    def _read_ref(self, ref: str) -> str | None:
        if "\0" in ref or ".." in ref or len(ref) > 4000:
            return None
        try:
            target = (self.path / ref).read_bytes().strip().decode("ascii")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            with self._reading():
                packed = self._refs.get_packed_refs().get(ref.encode(errors="replace"))  # type: ignore[call-overload]
            return packed.decode() if packed else None
        except (OSError, UnicodeError):  # a name that is too long for the file system, or a file that is not a ref
            return None
        return target if re.fullmatch(r"[0-9a-f]{40}", target) else None

    def _peel(self, oid: str) -> str:
        while True:
            item: Any = self._get(oid)
            if item is None:
                raise Damaged(self.path, f"the object {oid[:12]} is lost")
            if item.type_name != b"tag":
                return oid
            with self._reading(oid):
                oid = item.object[1].decode()

    # -- objects ------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, oid: str | None = None) -> Iterator[None]:
        # Turns every error of a read into Damaged. oid: the object that is read; None for the refs.
        what = f"the object {oid[:12]}" if oid else "packed-refs, or a file of refs,"
        try:
            yield
        except KeyError as error:
            raise Damaged(self.path, f"{what} is lost") from error
        except (Fault, MemoryError):
            raise
        except OSError as error:
            if not is_of_the_file(error):
                raise
            raise Damaged(self.path, f"{what} cannot be read: {error.strerror}") from error
        except Exception as error:  # dulwich and zlib raise a dozen different classes for damaged data
            raise Damaged(self.path, f"{what} cannot be read: {str(error) or type(error).__name__}") from error

    def _get(self, oid: str) -> ShaFile | None:
        with self._reading(oid):
            try:
                return self._objects[oid.encode()]  # type: ignore[index]
            except KeyError:
                return None

    def _need(self, oid: str, kind: str) -> Any:
        item = self._get(oid)
        if item is None or item.type_name != kind.encode():
            raise Damaged(self.path, f"the {kind} {oid[:12]} is lost")
        return item

    def blob(self, oid: str) -> bytes:
        with self._reading(oid):
            return self._objects.get_raw(oid.encode())[1]  # type: ignore[arg-type]

    def blob_info(self, oid: str) -> BlobInfo:
        """Returns size and pointer of a blob, without inflating a large one."""
        info = self._blobs.get(oid)
        if info is None:
            head, size = self._blob_head(oid)
            pointer = parse_pointer(head) if size == len(head) else None
            info = BlobInfo(pointer.size if pointer else size, size, pointer)
            self._blobs[oid] = info
        return info

    def _blob_head(self, oid: str) -> tuple[bytes, int]:
        with self._reading(oid):
            try:
                with open(self.path / "objects" / oid[:2] / oid[2:], "rb") as file:
                    # A pointer has less than 1024 bytes, so this much decides whether the blob is one.
                    start = zlib.decompressobj().decompress(file.read(4096), 1100)
            except FileNotFoundError:  # in a pack
                content = self.blob(oid)
                return content[:1100], len(content)
            header, _, content = start.partition(b"\0")
            return content, int(header.split()[1])

    def commit(self, oid: str) -> Commit:
        commit: Commit = self._need(oid, "commit")
        return commit

    def head(self) -> str:
        """Returns the commit at the head of main, which every repository has."""
        commit = self.branch(MAIN)
        if commit is None:
            raise Damaged(self.path, f"its branch {MAIN} is lost")
        return commit

    def history(self, commit: str) -> Iterator[tuple[str, Commit]]:
        """Yields the ids and objects of a commit and its first parents, newest first."""
        current: str | None = commit
        while current is not None:
            item = self.commit(current)
            yield current, item
            current = item.parents[0].decode() if item.parents else None

    # -- trees --------------------------------------------------------------------------------------------------

    def children(self, tree: str) -> dict[bytes, tuple[int, str]]:
        """Returns the entries of a tree object: name -> (mode, oid)."""
        entries = self._trees.get(tree)
        if entries is None:
            tree_object = self._need(tree, "tree")
            with self._reading(tree):
                entries = {item.path: (item.mode, item.sha.decode()) for item in tree_object.items()}
            self._known_entries += 1 + len(entries)
            if self._known_entries > _MOST_ENTRIES:  # a long history of large folders
                self._trees.clear()
                self._known_entries = 1 + len(entries)
            self._trees[tree] = entries
        return entries

    def root_tree(self, commit: str) -> str:
        tree: bytes = self.commit(commit).tree
        return tree.decode()

    def entry(self, commit: str, path: str) -> Entry | None:
        """Returns the file or folder at `path`, or None. The empty path is the root."""
        mode, oid = _FOLDER_MODE, self.root_tree(commit)
        for part in path.split("/") if path else []:
            if not stat.S_ISDIR(mode):
                return None
            child = self.children(oid).get(part.encode(errors="replace"))
            if child is None:
                return None
            mode, oid = child
        return Entry(path, oid, stat.S_ISDIR(mode))

    def walk(self, tree: str, prefix: str = "", *, recursive: bool = True) -> Iterator[Entry]:
        """Yields the content of a tree in git's order. A folder comes before its content."""
        for name, (mode, oid) in self.children(tree).items():
            path = f"{prefix}{name.decode(errors='surrogateescape')}"
            is_folder = stat.S_ISDIR(mode)
            yield Entry(path, oid, is_folder)
            if is_folder and recursive:
                yield from self.walk(oid, f"{path}/")

    def files(self, commit: str) -> list[Entry]:
        return [entry for entry in self.walk(self.root_tree(commit)) if not entry.is_folder]

    def last_commits(self, commit: str, paths: list[str]) -> dict[str, str]:
        """Returns the newest commit, from `commit` backwards, that changed each path."""
        changed: dict[str, str] = {}
        open_paths = set(paths)
        wanted = _by_folder(open_paths)
        tree = self.root_tree(commit)
        for current, item in self.history(commit):
            parent = self.root_tree(item.parents[0].decode()) if item.parents else None
            differing = set(self._differing(tree, parent, wanted)) & open_paths
            if differing:
                changed |= dict.fromkeys(differing, current)
                open_paths -= differing
                wanted = _by_folder(open_paths)
            if not open_paths or parent is None:
                break
            tree = parent
        return changed

    def _differing(self, tree: str | None, other: str | None, wanted: _Wanted) -> Iterator[str]:
        """The wanted paths that differ between two trees."""
        if tree == other:  # equal folders have equal ids, so most of a long history is skipped here
            return
        entries, others = (self.children(oid) if oid is not None else {} for oid in (tree, other))
        for name, (path, below) in wanted.items():
            entry, other_entry = entries.get(name), others.get(name)
            if entry != other_entry:
                if path is not None:
                    yield path
                if below:
                    yield from self._differing(_folder_of(entry), _folder_of(other_entry), below)


def _folder_of(entry: tuple[int, str] | None) -> str | None:
    return entry[1] if entry is not None and stat.S_ISDIR(entry[0]) else None


#: Wanted paths as a tree: name -> (the path that ends there, if one does; what is wanted below it).
_Wanted = dict[bytes, tuple[str | None, "_Wanted"]]


def _by_folder(paths: Iterable[str]) -> _Wanted:
    wanted: _Wanted = {}
    for path in paths:
        level = wanted
        *folders, name = path.encode(errors="surrogateescape").split(b"/")
        for folder in folders:
            level = level.setdefault(folder, (None, {}))[1]
        level[name] = (path, level.get(name, (None, {}))[1])
    return wanted


class Quarantine:
    """Holds new objects outside the store until their commit is certain, as git's receive-pack does.

    Leaving the context without `migrate` removes them, so a refused or interrupted push leaves nothing behind.
    """

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._folder = repository / f"incoming-{secrets.token_hex(8)}"
        self._names: list[str] = []
        self._used = ExitStack()

    def __enter__(self) -> Quarantine:
        self._folder.mkdir()
        self._used.enter_context(in_use(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._used.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def blob(self, content: bytes) -> str:
        from dulwich.objects import Blob

        return self.add_object(Blob.from_string(content))

    def add_object(self, item: ShaFile) -> str:
        oid = item.id.decode()
        path = self._folder / oid
        if not path.exists():
            with open(path, "xb") as file:
                file.write(item.as_legacy_object(compression_level=1))
                os.fchmod(file.fileno(), 0o400)
            self._names.append(oid)
        return oid

    def read(self, oid: str) -> bytes | None:
        """Returns the content of an object in the quarantine, or None."""
        if oid not in self._names:
            return None
        raw = zlib.decompress((self._folder / oid).read_bytes())
        return raw.partition(b"\0")[2]

    def migrate(self) -> None:
        """Makes the objects durable, then part of the store. The caller holds the repository's lock."""
        objects = self._repository / "objects"
        touched = set()
        for oid in self._names:
            fd = os.open(self._folder / oid, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for oid in self._names:
            target = objects / oid[:2] / oid[2:]
            if not target.exists():
                if not target.parent.exists():
                    target.parent.mkdir(exist_ok=True)
                    touched.add(objects)
                os.rename(self._folder / oid, target)
                touched.add(target.parent)
        for folder in touched:  # the renames must be on the disk before a ref names the objects
            sync_folder(folder)
        self._names.clear()

    def commit(self, tree: str, parents: list[str], message: str) -> str:
        from dulwich.objects import Commit, ObjectID

        commit = Commit()
        commit.tree = ObjectID(tree.encode())
        commit.parents = [ObjectID(parent.encode()) for parent in parents]
        commit.author = commit.committer = _IDENTITY
        commit.author_time = commit.commit_time = int(time.time())
        commit.author_timezone = commit.commit_timezone = 0
        commit.encoding = b"UTF-8"
        commit.message = _clean(message)
        return self.add_object(commit)

    def tag(self, name: str, commit: str, message: str) -> str:
        from dulwich.objects import Commit, ObjectID, Tag

        tag = Tag()
        tag.name = name.encode()
        tag.object = (Commit, ObjectID(commit.encode()))
        tag.tagger = _IDENTITY
        tag.tag_time = int(time.time())
        tag.tag_timezone = 0
        tag.message = _clean(message)
        return self.add_object(tag)


def _clean(message: str) -> bytes:
    # git ends a message with one newline and stops reading at a NUL.
    return (message.replace("\0", " ").replace("\r\n", "\n").strip() + "\n").encode(errors="replace")


class TreeEdit:
    """A tree that is being changed: the blob of each path."""

    def __init__(self, repository: GitRepository, tree: str | None) -> None:
        self._files = {entry.path: entry.oid for entry in repository.walk(tree) if not entry.is_folder} if tree else {}
        self._folders: dict[str, int] = {}  # how many files are below
        for path in self._files:
            self._count(path, 1)

    def _count(self, path: str, change: int) -> None:
        for folder in _folders(path):
            self._folders[folder] = self._folders.get(folder, 0) + change

    def put(self, path: str, oid: str) -> None:
        """Writes a file. Raises Fault 400 if one of its folders is a file, or if its path is a folder."""
        for folder in _folders(path):
            if folder in self._files:
                raise Fault(400, f"Cannot write '{path}': '{folder}' is a file there; delete it first.")
        if self._folders.get(path):
            raise Fault(400, f"Cannot write '{path}': a folder has that name; delete it first.")
        if path not in self._files:
            self._count(path, 1)
        self._files[path] = oid

    def get(self, path: str) -> str | None:
        return self._files.get(path)

    def remove(self, path: str, *, is_folder: bool) -> bool:
        """Removes a file or a whole folder. Returns False if there is none."""
        gone = (
            [name for name in self._files if name.startswith(f"{path}/")]
            if is_folder
            else [path] * (path in self._files)
        )
        for name in gone:
            del self._files[name]
            self._count(name, -1)
        return bool(gone)

    def write(self, quarantine: Quarantine) -> str:
        from dulwich.index import commit_tree
        from dulwich.objects import ObjectID

        blobs = [
            (path.encode(errors="surrogateescape"), ObjectID(oid.encode()), _FILE_MODE)
            for path, oid in self._files.items()
        ]
        root: bytes = commit_tree(quarantine, blobs)  # type: ignore[arg-type]
        return root.decode()


def _folders(path: str) -> list[str]:
    """The folders that a file is in."""
    return [str(folder) for folder in PurePosixPath(path).parents][:-1]  # without the root
