"""Stores a Hub's repositories on disk. Several threads, and several servers of the same root, may use it at once.

ROOT/repos/models/NAMESPACE/NAME.git/   a bare git repository
    hub.json                            visibility, creation date, a Space's variables
    lfs/objects/ab/cd/SHA256            large files
    xet/                                uploads by Xet, see `xet_store`
ROOT/locks/                             one lock file per repository name
ROOT/moved/                             one file per former name of a repository, with the name that replaced it
ROOT/trash/                             repositories that are being created or deleted
ROOT/collections/                       see `collections_api`
"""

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...fileio import sync_folder
from . import xet_store
from .durable import Clock, check_types, is_in_use, link_tree, locked, mark_in_use, read_json, write_json
from .faults import Damaged, Fault, cannot_write, disk_full, is_file_error, repo_not_found
from .git import MAIN, GitRepository
from .git_writes import Quarantine, TreeEdit
from .large_files import LargeFiles
from .names import KINDS, RepoId, parse_repo_id

log = logging.getLogger(__name__)

_LARGE_FILE_PATTERNS = (
    "*.7z", "*.arrow", "*.avro", "*.bin", "*.bz2", "*.ckpt", "*.flac", "*.ftz", "*.gguf", "*.gz", "*.h5", "*.joblib",
    "*.lz4", "*.mlmodel", "*.model", "*.mp3", "*.mp4", "*.msgpack", "*.npy", "*.npz", "*.ogg", "*.onnx", "*.ot",
    "*.parquet", "*.pb", "*.pickle", "*.pkl", "*.pt", "*.pth", "*.rar", "*.safetensors", "*.tar", "*.tflite", "*.tgz",
    "*.wasm", "*.wav", "*.webm", "*.xz", "*.zip", "*.zst", "*tfevents*",
)  # fmt: skip
#: The .gitattributes in a repository's first commit, which says which files git-lfs keeps outside git.
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in _LARGE_FILE_PATTERNS)
# Key of hub.json -> type of its value.
_SETTING_TYPES = {
    "created": str,
    "private": bool,
    "gated": str | bool,
    "sdk": str | None,
    "variables": dict,
    "secrets": dict,
}
_STALE_SECONDS = 24 * 3600
# Bytes that uploads must leave free on the disk, for commits and deletions.
_RESERVED_BYTES = 16 * 2**20
# Maximum number of renames to follow, because the records could form a cycle.
_MAX_RENAMES = 20


def now() -> str:
    """Returns the current time in the Hub's format: ISO 8601 with milliseconds and Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@dataclass(frozen=True)
class Settings:
    """The properties of a repository that are not in its git history.

    Args:
        created: Date of creation.
        private: Whether only callers with a token can see it.
        gated: Always False. The Hub's API has this key.
        sdk: The SDK of a Space, such as gradio or static.
        variables: The variables of a Space: name -> value, date and so on.
        secrets: The secrets of a Space: name -> description and date, but never a value.

    Raises:
        ValueError: A value does not have the type that a Hub writes.
    """

    created: str
    private: bool = False
    gated: str | bool = False
    sdk: str | None = None
    variables: dict[str, dict[str, object]] = field(default_factory=dict)
    secrets: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(vars(self), _SETTING_TYPES)
        for entries in (self.variables, self.secrets):
            for entry in entries.values():
                check_types(entry, {})  # each entry must be a JSON object


def repository_folder(root: Path, repo: RepoId) -> Path:
    """Returns the folder of a bare repository, whether or not it exists.

    Args:
        root: The Hub's folder.
        repo: The repository.
    """
    # `parse_repo_id` has checked the names, so the path stays below the root.
    return root / "repos" / repo.plural / repo.namespace / f"{repo.name}.git"


class Storage:
    """Creates, finds, moves and removes repositories.

    Args:
        root: The Hub's folder, which must exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._repos_folder = root / "repos"
        self._locks_folder = root / "locks"
        self._trash_folder = root / "trash"
        self._moved_folder = root / "moved"
        self.clock = Clock()
        for name in ("repos", "locks", "trash", "moved", "collections"):
            (root / name).mkdir(exist_ok=True)

    def path(self, repo: RepoId) -> Path:
        """Returns the folder of a bare repository, whether or not it exists.

        Args:
            repo: The repository.
        """
        return repository_folder(self.root, repo)

    def exists(self, repo: RepoId) -> bool:
        """Whether a repository exists, intact or damaged.

        Args:
            repo: The repository.
        """
        # A single rename creates or removes a repository, so it never exists in part.
        return self.path(repo).is_dir()

    def git(self, repo: RepoId) -> GitRepository:
        """Opens the git repository, which is a context manager.

        Args:
            repo: The repository.
        """
        return GitRepository(self.path(repo))

    def large_files(self, repo: RepoId) -> LargeFiles:
        """Returns the store of a repository's large files.

        Args:
            repo: The repository.
        """
        return LargeFiles(self.path(repo))

    @contextmanager
    def lock(self, *repos: RepoId) -> Iterator[None]:
        """Locks repositories against all other writers, in this process or another.

        Args:
            repos: The repositories to lock.
        """
        with ExitStack() as stack:
            # Lock in a fixed order, so that two writers never wait for each other.
            for repo in sorted(set(repos)):
                stack.enter_context(locked(self._locks_folder / _file_name(repo)))
            yield

    def settings(self, repo: RepoId) -> Settings:
        """Returns the settings of a repository.

        Args:
            repo: The repository.

        Raises:
            Fault: 404 if there is no such repository; the subclass Damaged if its settings cannot be read.
        """
        folder = self.path(repo)
        try:
            fields = read_json(folder / "hub.json")
            if fields is None:
                if not self.exists(repo):
                    raise repo_not_found(repo, is_anonymous=False)
                raise Damaged(folder, "its hub.json is lost")
            return Settings(**fields)
        except OSError as error:
            if not is_file_error(error):
                raise
            raise Damaged(folder, f"its hub.json cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise Damaged(folder, f"its hub.json is not what a Hub writes: {error}") from error

    @contextmanager
    def skip_damaged(self, repo: RepoId) -> Iterator[None]:
        """Suppresses the errors of a repository that is damaged or was deleted meanwhile, so that a list leaves it out.

        Logs damage.

        Args:
            repo: The repository.
        """
        try:
            yield
        except Damaged as fault:
            if self.exists(repo):
                log.warning("%s/%s is damaged (%s): %s", repo.plural, repo, fault.reason, self.path(repo))
        except (Fault, FileNotFoundError):
            if self.exists(repo):
                raise

    def change_settings(self, repo: RepoId, **changes: Any) -> Settings:
        """Changes some settings and returns all of them. The caller holds the lock.

        Args:
            repo: The repository.
            **changes: Field of `Settings` -> new value.
        """
        settings = replace(self.settings(repo), **changes)
        write_json(self.path(repo) / "hub.json", asdict(settings))
        return settings

    def create(self, repo: RepoId, *, private: bool, sdk: str | None, variables: dict[str, dict[str, object]]) -> bool:
        """Creates a repository with its first commit.

        Args:
            repo: The repository.
            private: Whether only callers with a token can see it.
            sdk: The SDK of a Space; None for other repositories.
            variables: The variables of a Space, by name; {} for other repositories.

        Returns:
            False if the repository already exists.
        """
        with self.lock(repo):
            if self.exists(repo):
                return False
            settings = Settings(created=now(), private=private, sdk=sdk, variables=variables)
            with (
                self._new_repository(repo, settings) as folder,
                GitRepository(folder) as git,
                Quarantine(folder) as quarantine,
            ):
                edit = TreeEdit(git, None)
                edit.put(".gitattributes", quarantine.add_blob(GIT_ATTRIBUTES.encode()))
                commit = quarantine.add_commit(edit.write(quarantine), [], "Create the repository")
                quarantine.migrate()
                git.write_ref(f"refs/heads/{MAIN}", commit)
            return True

    @contextmanager
    def _new_repository(self, repo: RepoId, settings: Settings) -> Iterator[Path]:
        """Yields a temporary folder with an empty git repository. Moves it to its final path when the context ends.

        After a crash, `sweep` removes the folder.
        """
        folder = self._trash_folder / f"new-{secrets.token_hex(8)}"
        folder.mkdir()
        try:
            with mark_in_use(folder):
                GitRepository.initialize(folder)
                yield folder
                write_json(folder / "hub.json", asdict(settings))
                self._place(folder, repo)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def duplicate(
        self, repo: RepoId, target: RepoId, *, private: bool | None, variables: dict[str, dict[str, object]]
    ) -> bool:
        """Copies a repository with its history and files, but without secrets. Hard-links the files if possible.

        Args:
            repo: The original.
            target: The name of the copy.
            private: Visibility of the copy; None for the original's.
            variables: Variables of the copy, in addition to the original's.

        Returns:
            False if the new name is taken.

        Raises:
            Damaged: The original is damaged.
        """
        with self.lock(repo, target):
            if self.exists(target):
                return False
            settings = self.settings(repo)
            with self.git(repo) as git:
                git.head()  # raises Damaged
            new_settings = replace(
                settings,
                created=now(),
                private=settings.private if private is None else private,
                variables=settings.variables | variables,
                secrets={},
            )
            with self._new_repository(target, new_settings) as folder:
                for name in ("objects", "refs", "packed-refs", "lfs/objects"):
                    link_tree(self.path(repo) / name, folder / name)
            return True

    def delete(self, repo: RepoId) -> None:
        """Deletes a repository.

        Args:
            repo: The repository.

        Raises:
            Fault: 404 if there is no such repository.
        """
        with self.lock(repo):
            if not self.exists(repo):
                raise repo_not_found(repo, is_anonymous=False)
            # First free the name in a single step. Deleting gigabytes takes a while and needs no lock.
            discarded_folder = self._trash_folder / f"old-{secrets.token_hex(8)}"
            os.rename(self.path(repo), discarded_folder)
            sync_folder(self.path(repo).parent)
        shutil.rmtree(discarded_folder, ignore_errors=True)

    def move(self, repo: RepoId, target: RepoId) -> None:
        """Renames a repository. From then on, `current_name` returns the new name for the old name.

        Args:
            repo: The repository.
            target: The new name.

        Raises:
            Fault: 404 if there is no such repository, 409 if the new name is taken.
        """
        with self.lock(repo, target):
            created = self.settings(repo).created
            if self.exists(target):
                raise Fault(409, f"Cannot move '{repo}': '{target}' already exists; delete it or choose another name.")
            self._place(self.path(repo), target)
            sync_folder(self.path(repo).parent)
            write_json(self._moved_folder / _file_name(repo), {"to": str(target), "created": created})

    def current_name(self, repo: RepoId) -> RepoId | None:
        """Returns the current name of a repository that formerly had this name; None if there is no such repository.

        Args:
            repo: The requested name.
        """
        # The creation date identifies the repository, because another repository may have taken the new name since.
        for _ in range(_MAX_RENAMES):
            try:
                record = read_json(self._moved_folder / _file_name(repo))
                if record is None:
                    return None
                check_types(record, {"to": str, "created": str})
                repo = parse_repo_id(repo.kind, *record["to"].split("/"))
                if self.exists(repo):
                    return repo if self.settings(repo).created == record["created"] else None
            except (ValueError, TypeError, OSError, Fault) as error:
                log.warning("%s is damaged (%s): remove it.", self._moved_folder / _file_name(repo), error)
                return None
        return None

    def _place(self, source: Path, repo: RepoId) -> None:
        """Moves a complete repository from the folder `source` to its final path, where no repository may exist."""
        target = self.path(repo)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(source, target)
        except (FileExistsError, NotADirectoryError) as error:
            raise Fault(
                409,
                f"The name '{repo}' cannot be used, because a file is in its place: remove the file at {target} or "
                f"{target.parent}.",
            ) from error
        sync_folder(target.parent)
        # From now on, the name belongs to this repository, so an old record must not redirect from it.
        (self._moved_folder / _file_name(repo)).unlink(missing_ok=True)

    def require_writable(self) -> None:
        """Raises Fault 507 if nothing can be written. Clients should learn this before they send gigabytes."""
        if not os.access(self.root, os.W_OK):
            raise cannot_write(self.root, os.strerror(errno.EROFS))

    def require_room(self, size: int) -> None:
        """Raises Fault 507 if nothing can be written, or if the disk lacks room for `size` bytes and later commits.

        Args:
            size: Bytes to be written.
        """
        self.require_writable()
        if size > self.free_bytes():
            raise disk_full(self.root)

    def free_bytes(self) -> int:
        """Returns the number of bytes that uploads may still use; negative if too little is left for commits."""
        return shutil.disk_usage(self.root).free - _RESERVED_BYTES

    def repositories(self, kind: str | None = None) -> Iterator[RepoId]:
        """Yields every repository of a kind, or of all kinds, in order of name. Includes damaged repositories.

        Args:
            kind: model, dataset or space; None for all.
        """
        for repo_kind in [kind] if kind else list(KINDS):
            for folder in sorted((self._repos_folder / KINDS[repo_kind]).glob("*/*.git")):
                if folder.is_dir():
                    yield RepoId(repo_kind, folder.parent.name, folder.name.removesuffix(".git"))

    def sweep(self) -> None:
        """Removes leftovers of killed servers: deleted repositories, incomplete uploads, objects that were never used.

        Keeps those that are younger than a day or in use. Removes idle epochs of Xet uploads too. Logs failures.
        """
        cutoff = self.clock.now() - _STALE_SECONDS
        leftovers = [*self._trash_folder.iterdir(), *self.root.glob(".*.tmp"), *self.root.glob("collections/*/.*.tmp")]
        folders = [self.path(repo) for repo in self.repositories()]
        for folder in folders:
            with _log_sweep_errors(folder):
                for pattern in ("incoming-*", "lfs/incomplete/*", "xet/*/incomplete/*", ".*.tmp"):
                    leftovers += folder.glob(pattern)
        for path in leftovers:
            with _log_sweep_errors(path):
                # Age alone is not enough: a large upload can take longer than a day.
                if path.lstat().st_mtime < cutoff and not is_in_use(path):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in folders:
            if (folder / "xet").is_dir():
                with _log_sweep_errors(folder):
                    xet_store.sweep(folder, self.clock.now())


def _file_name(repo: RepoId) -> str:
    return f"{repo.plural}--{repo.namespace}--{repo.name}"  # no part holds "--"


@contextmanager
def _log_sweep_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # another server removed the file, or the repository was deleted or moved meanwhile
        pass
    except OSError as error:
        log.warning("%s cannot be removed (%s); it stays where it is.", path, error.strerror)
