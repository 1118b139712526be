"""Exports a repository of the embedded Hub to another Hub, with its history, branches and tags.

The source is read from the folder of the embedded Hub. The target, on the other Hub, gets new commits with their own
ids and dates. Each new commit's description names the original commit:

    Exported-From: local/tiny-world-ppo@4f0c…  2026-11-21T08:00:00Z

A later export uses these lines to recognize commits that were already sent. It refuses a target with any other commit,
except the one with which the other Hub created the repository.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from .connect import DEFAULT_HUB, Hub
from .local_paths import CHUNK_BYTES
from .refusals import translate_hub_errors

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

    from ..server.git import GitRepository
    from ..server.large_files import LargeFiles
    from ..server.names import RepoId

MAIN = "main"
TRAILER = re.compile(r"^Exported-From: \S+@([0-9a-f]{40})\b", re.MULTILINE)
#: Type of a repository -> the files that a Hub puts into a new repository.
INITIAL_FILES = {"model": {".gitattributes"}, "dataset": {".gitattributes"}, "space": {".gitattributes", "README.md"}}


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Args:
        commits: Commit of the source -> commit of the target; for a commit that changes no file, its parent's.
        tags: Tag -> commit of the target.
        branches: Branch -> commit of the target.
        sent: Number of commits that this export made.
        skipped_tags: Tags that were not exported, because their commits are on no branch.
    """

    commits: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    sent: int = 0
    skipped_tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Branch:
    """A branch, and the commits that it adds to earlier branches of the export.

    Args:
        name: Name of the branch.
        fork: The commit of an earlier branch from which this branch starts; None if it shares no commit with any.
        commits: The commits that no earlier branch has, oldest first.
    """

    name: str
    fork: str | None
    commits: list[str]


@dataclass(frozen=True)
class Source:
    """A repository of the embedded Hub, opened for reading. New commits may arrive meanwhile: old ones never change.

    Args:
        repo: The repository's id and type.
        private: Whether reading the repository requires a token.
        sdk: The SDK of a Space; None for other repositories.
        git: The git repository.
        large_files: The large files, of which git stores only pointers.
    """

    repo: RepoId
    private: bool
    sdk: str | None
    git: GitRepository
    large_files: LargeFiles

    def branches(self) -> list[Branch]:
        """Returns the branches: main first, then the others by name. A history follows each commit's first parent."""
        branches: list[Branch] = []
        visited_commits: set[str] = set()
        heads = {ref.name: ref.commit for ref in self.git.refs("refs/heads/")}
        for name in sorted(heads, key=lambda name: (name != MAIN, name)):
            new_commits: list[str] = []
            fork = None
            for commit, _ in self.git.history(heads[name]):
                if commit in visited_commits:
                    fork = commit
                    break
                new_commits.append(commit)
            visited_commits.update(new_commits)
            branches.append(Branch(name, fork, new_commits[::-1]))
        return branches

    def tags(self) -> dict[str, tuple[str, str | None]]:
        """Returns name -> (commit, message) of the tags. The message is None for a tag without annotation."""
        from dulwich.objects import Tag
        from dulwich.repo import Repo

        messages = {}
        with Repo(str(self.git.path)) as repo:
            for name, oid in repo.refs.as_dict(b"refs/tags").items():  # type: ignore[arg-type]
                tag = repo[oid]
                if isinstance(tag, Tag):
                    messages[name.decode()] = (tag.message or b"").decode(errors="replace").strip()
        return {ref.name: (ref.commit, messages.get(ref.name) or None) for ref in self.git.refs("refs/tags/")}

    def files(self, commit: str) -> dict[str, str]:
        """Returns path -> git blob id for each file of a commit.

        Args:
            commit: Commit id.
        """
        return {entry.path: entry.oid for entry in self.git.files(commit)}

    def size(self, blob: str) -> int:
        """Returns the size of a file in bytes. If the blob is a pointer, this is the size of the large file.

        Args:
            blob: Git id of the blob.
        """
        return self.git.blob_info(blob).size

    def content(self, blob: str) -> str | bytes:
        """Returns a file as huggingface_hub takes it: the path of a large file, the bytes of any other.

        Args:
            blob: Git id of the blob.
        """
        pointer = self.git.blob_info(blob).pointer
        return str(self.large_files.path(pointer.oid)) if pointer else self.git.blob(blob)

    def is_same(self, blob: str, entry: RepoFile) -> bool:
        """Whether the file that a Hub lists as `entry` has the content of this blob.

        Args:
            blob: Git id of the blob.
            entry: The file in the target's listing.
        """
        # The two Hubs may store different files as large files, so either id may have to be computed from the content.
        pointer = self.git.blob_info(blob).pointer
        if entry.lfs is not None:
            return entry.lfs.sha256 == (pointer.oid if pointer else hashlib.sha256(self.git.blob(blob)).hexdigest())
        return entry.blob_id == (self._git_id(pointer.oid) if pointer else blob)

    def _git_id(self, sha256: str) -> str:
        """Returns the git blob id that a large file would have as an ordinary file."""
        path = self.large_files.path(sha256)
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def message(self, commit: str) -> tuple[str, str]:
        """Returns the title and the description that a commit gets on the target.

        Args:
            commit: The commit's id in the source.
        """
        original = self.git.commit(commit)
        title, _, body = original.message.decode(errors="replace").strip().partition("\n")
        date = datetime.fromtimestamp(original.commit_time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return title or "Update files", f"{body.strip()}\n\nExported-From: {self.repo}@{commit}  {date}".strip()

    def check_large_files(self, commits: list[str]) -> None:
        """Checks the large files of commits. Raises ZooError if one is missing or has the wrong size.

        Args:
            commits: The commits to send.
        """
        for commit in commits:
            for path, blob in self.files(commit).items():
                pointer = self.git.blob_info(blob).pointer
                if pointer and self.large_files.size(pointer.oid) != pointer.size:
                    stored_file = self.large_files.path(pointer.oid)
                    raise ZooError(
                        f"{path} of {self.repo}@{commit[:8]} is damaged on this disk ({stored_file} does not have "
                        f"{pointer.size} bytes): publish it again, or restore that file."
                    )


@contextmanager
def open_source(root: Path, name: str, kind: str) -> Iterator[Source]:
    """Opens a repository of the embedded Hub for an export.

    Args:
        root: Folder of the embedded Hub.
        name: NAMESPACE/NAME.
        kind: model, dataset or space.

    Yields:
        The repository.

    Raises:
        ZooError: There is no such repository; or, while the context is open, the repository turns out to be damaged.
    """
    from ..server.faults import Damaged
    from ..server.large_files import LargeFiles
    from ..server.storage import Storage

    root = root.expanduser().absolute()
    if not (root / "repos").is_dir():
        raise ZooError(f"There is no embedded Hub in {root}: name its folder with --root.")
    storage = Storage(root)
    repos = {str(repo): repo for repo in storage.repositories(kind)}
    if name not in repos:
        if actual_kind := next((repo.kind for repo in storage.repositories() if str(repo) == name), None):
            raise ZooError(f"{name} is a {actual_kind}, not a {kind}: pass --repo_type {actual_kind}.")
        # Names in one namespace are always similar, so a single suggestion would often be wrong.
        closest = ", ".join(difflib.get_close_matches(name, repos, n=5, cutoff=0))
        hint = f"the closest names are {closest}" if closest else "it has none"
        if Path(name).exists():
            hint = "this is a path, but only a repository can be exported; `rlhf-zoo push` sends a run"
        raise ZooError(f"The embedded Hub in {root} has no {kind} {name!r}: {hint}.")
    repo = repos[name]
    path = storage.path(repo)
    try:
        settings = storage.settings(repo)
        with storage.git(repo) as git:
            yield Source(repo, settings.private, settings.sdk, git, LargeFiles(path))
    except Damaged as fault:
        raise ZooError(
            f"{name} is damaged on this disk ({fault.reason}), under {path}: restore that folder, or publish it again."
        ) from fault


def export(
    source: Source, repo_id: str, *, private: bool | None, report: Callable[[str], None], hub: Hub = DEFAULT_HUB
) -> ExportResult:
    """Copies a repository's branches, and the tags of their commits, to another Hub, with their history.

    Sends only the commits that are missing there. Then compares the files at each branch's head and at each tag with
    the hashes that the target reports.

    Args:
        source: The repository of the embedded Hub.
        repo_id: NAMESPACE/NAME on the target.
        private: Whether the target is private; None for the source's visibility.
        report: Called with one line per commit, before the commit is sent.
        hub: The Hub to export to.

    Raises:
        ZooError: A large file of the source is damaged; or the target is public although it should be private, holds
            commits that are not an export of this repository, refuses a request, or still differs afterwards.
    """
    return _Export(source, repo_id, report, hub).run(private)


class _Export:
    """One call of `export`, with the state of the target."""

    def __init__(self, source: Source, repo_id: str, report: Callable[[str], None], hub: Hub) -> None:
        self.source = source
        self.report = report
        self.api = hub.api()
        self.target: dict[str, Any] = {"repo_id": repo_id, "repo_type": source.repo.kind}  # keywords for HfApi
        self.target_name = f"{repo_id} on {hub.name}"
        self.commits: dict[str, str] = {}  # commit of the source -> commit of the target
        self.accepted_commits: set[str] = set()  # the target's first commit, and the commits that earlier exports sent
        self.reported_count = self.sent_count = 0  # of commits

    def run(self, private: bool | None) -> ExportResult:
        branches, tags = self.source.branches(), self.source.tags()
        # Check the files before anything is sent, because a partial export would be worse than none.
        self.source.check_large_files([commit for branch in branches for commit in branch.commits])
        remedy = "check the name and the token's rights, and try again."
        with translate_hub_errors(f"{self.target_name} cannot be written", remedy):
            self._create(self.source.private if private is None else private)
            heads = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(**self.target).branches}
        missing_by_branch = {branch.name: self._match_commits(branch, heads.get(branch.name)) for branch in branches}
        total = sum(map(len, missing_by_branch.values()))
        new_heads = {}
        for branch in branches:
            missing_commits = missing_by_branch[branch.name]
            new_heads[branch.name] = self._replay(branch, heads.get(branch.name), missing_commits, total)
        tags_to_send = {name: (commit, text) for name, (commit, text) in tags.items() if commit in self.commits}
        self._tag(tags_to_send)
        branch_heads = {branch.commits[-1] for branch in branches if branch.commits}
        self._verify(branch_heads | {commit for commit, _ in tags_to_send.values()})
        new_tags = {name: self.commits[commit] for name, (commit, _) in tags_to_send.items()}
        skipped_tags = sorted(tags.keys() - tags_to_send.keys())
        return ExportResult(self.commits, new_tags, new_heads, self.sent_count, skipped_tags)

    def _create(self, private: bool) -> None:
        kind = self.source.repo.kind
        sdk: dict[str, Any] = {"space_sdk": self.source.sdk or "static"} if kind == "space" else {}
        self.api.create_repo(**self.target, private=private, exist_ok=True, **sdk)
        # With exist_ok, an existing repository keeps its visibility, and private files must not become public.
        if private and not self.api.repo_info(**self.target).private:
            raise ZooError(f"{self.target_name} exists and is public: make it private first, or export with --public.")

    def _match_commits(self, branch: Branch, head: str | None) -> list[str]:
        """Records in `commits` the commits of a branch that the target has, and returns the missing ones.

        Raises ZooError if the target has a commit that is not part of the export.
        """
        if head is None:
            return self._commits_to_send(branch)
        with self._translate_refusal("a request for its history"):
            history = self.api.list_repo_commits(**self.target, revision=head)
        # Target commit -> the commits that its trailers name.
        origins = {entry.commit_id: TRAILER.findall(entry.message) for entry in reversed(history)}
        target_commits = [commit for commit in origins if commit not in self.accepted_commits]
        # A Hub makes the first commit of main itself. Build on that commit if it has only the files of a new
        # repository, or if exported commits follow it.
        if branch.name == MAIN and target_commits and not origins[target_commits[0]]:
            first_commit = target_commits.pop(0)
            listing = self._list_target_files(first_commit)
            if not target_commits and not listing.keys() <= INITIAL_FILES[self.source.repo.kind]:
                raise self._foreign_commit_error(first_commit)
            self.accepted_commits.add(first_commit)
            if not any(self._changes(branch.commits[0], listing)):
                self.commits[branch.commits[0]] = first_commit
        missing_commits = self._commits_to_send(branch)
        # The target's commits must be the beginning of the branch, in order. A message can quote an older trailer, so
        # use the last trailer.
        for commit in target_commits:
            if not missing_commits or origins[commit][-1:] != missing_commits[:1]:
                raise self._foreign_commit_error(commit)
            self.commits[missing_commits.pop(0)] = commit
            self.accepted_commits.add(commit)
        return missing_commits

    def _commits_to_send(self, branch: Branch) -> list[str]:
        """Returns the commits that are not in `self.commits` and that change a file: a Hub makes no empty commits."""
        tree = self.source.git.root_tree
        return [
            commit
            for parent, commit in zip([branch.fork, *branch.commits], branch.commits, strict=False)
            if commit not in self.commits and (parent is None or tree(parent) != tree(commit))
        ]

    def _foreign_commit_error(self, commit: str) -> ZooError:
        return ZooError(
            f"{self.target_name} holds the commit {commit[:8]}, which is not an export of {self.source.repo} as it is "
            "now: choose another --repo."
        )

    def _replay(self, branch: Branch, head: str | None, missing_commits: list[str], total: int) -> str:
        """Sends the missing commits of a branch in order. Returns the branch's head on the target."""
        if head is None:
            # A branch that shares no commit with an earlier branch starts at main's first commit, and its own first
            # commit then replaces all files.
            head = self.commits[branch.fork] if branch.fork else next(iter(self.commits.values()))
            with self._translate_refusal(f"the branch {branch.name}"):
                self.api.create_branch(**self.target, branch=branch.name, revision=head, exist_ok=True)
        parent = branch.fork
        for commit in branch.commits:
            if commit in missing_commits:
                head = self.commits[commit] = self._send(branch.name, commit, head, total)
            elif commit not in self.commits:
                # This commit changes no file, so it maps to the same commit of the target as its parent.
                assert parent is not None
                self.commits[commit] = self.commits[parent]
            parent = commit
        assert parent is not None  # a branch has a fork or commits of its own
        if head != self.commits[parent]:  # since the last export, the branch was moved to another commit
            raise self._foreign_commit_error(head)
        return head

    def _send(self, branch: str, commit: str, head: str, total: int) -> str:
        """Sends one commit on top of `head`. Returns the new commit; `head` itself if `head` has the same files."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        title, description = self.source.message(commit)
        blobs = self.source.files(commit)
        paths_to_add, paths_to_delete = self._changes(commit, self._list_target_files(head))
        size = sum(self.source.size(blobs[path]) for path in paths_to_add)
        self.reported_count += 1
        file_summary = f"{len(paths_to_add)} files ({size / 1e6:,.1f} MB), {len(paths_to_delete)} deleted"
        self.report(f"[{self.reported_count}/{total}] {commit[:8]} {title}: {file_summary}")
        if not paths_to_add and not paths_to_delete:
            return head
        # Delete first, because a new file may have the name of a folder that is deleted.
        operations: list[CommitOperationAdd | CommitOperationDelete] = []
        operations += [CommitOperationDelete(path_in_repo=path) for path in paths_to_delete]
        with self._translate_refusal(f"the commit {commit[:8]}"):
            operations += [CommitOperationAdd(path, self.source.content(blobs[path])) for path in paths_to_add]
            new_commit = self.api.create_commit(
                **self.target,
                operations=operations,
                commit_message=title,
                commit_description=description,
                revision=branch,
                parent_commit=head,
            )
        self.sent_count += 1
        return str(new_commit.oid)

    def _tag(self, tags: Mapping[str, tuple[str, str | None]]) -> None:
        with self._translate_refusal("its tags"):
            existing_tags = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(**self.target).tags}
            for name, (commit, message) in tags.items():
                new_commit = self.commits[commit]
                if existing_tags.get(name) == new_commit:
                    continue
                if name in existing_tags:  # the Hub's protocol cannot move a tag
                    self.api.delete_tag(**self.target, tag=name)
                self.api.create_tag(**self.target, tag=name, revision=new_commit, tag_message=message)

    def _verify(self, commits: set[str]) -> None:
        # huggingface_hub silently drops files that the repository's .gitignore matches.
        for commit in sorted(commits):
            paths_to_add, paths_to_delete = self._changes(commit, self._list_target_files(self.commits[commit]))
            if paths_to_add or paths_to_delete:
                raise ZooError(
                    f"{self.target_name} differs from {self.source.repo}@{commit[:8]} in "
                    f"{', '.join([*paths_to_add, *paths_to_delete][:5])}: check its .gitignore, or delete that "
                    "repository and export again."
                )

    def _list_target_files(self, commit: str) -> dict[str, RepoFile]:
        """Returns path -> file, as the target lists a commit."""
        from huggingface_hub import RepoFile

        with self._translate_refusal("a request for its files"):
            entries = list(self.api.list_repo_tree(**self.target, revision=commit, recursive=True))
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _changes(self, commit: str, listing: Mapping[str, RepoFile]) -> tuple[list[str], list[str]]:
        """Returns (paths to add, paths to delete) that make the target with this listing equal to `commit`."""
        files = self.source.files(commit)
        paths_to_add = [
            path for path, blob in files.items() if path not in listing or not self.source.is_same(blob, listing[path])
        ]
        return paths_to_add, sorted(listing.keys() - files.keys())

    def _translate_refusal(self, request: str) -> AbstractContextManager[None]:
        return translate_hub_errors(f"{self.target_name} refused {request}", "run the same command again to continue.")
