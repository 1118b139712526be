"""Handles uploads: validates cards, tells clients how to send each file, and makes commits."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .access import Api
from .cards import parse_card, read_card
from .faults import Fault, bad_request, entry_not_found, forbidden, revision_not_found
from .git import GitRepository
from .git_writes import Quarantine, TreeEdit
from .large_files import Pointer, parse_pointer
from .messages import Request, Response, json_response, member, object_list, parse_plain_json
from .names import RepoId, check_oid, check_path
from .patterns import Budget, IgnoredPaths, LfsPaths
from .routing import Router
from .storage import Storage

# As on the Hub, a file above this size is a large file, even if .gitattributes does not say so.
_MAX_REGULAR_BYTES = 10 * 2**20
_MAX_CARD_BYTES = 16 * 2**20
_MAX_PREUPLOAD_BYTES = 4 * 2**20
_MAX_FILES = 5000
_MAX_COMMIT_BYTES = 4 * 2**30
_MAX_CHANGES = 100_000
_MAX_ATTRIBUTE_LINE = 2000  # bytes, a little below git's own limit (see `patterns`)
_ATTRIBUTES = ".gitattributes"
_LFS_ATTRIBUTES = " filter=lfs diff=lfs merge=lfs -text"
_NO_PULL_REQUESTS = "The embedded Hub has no pull requests: commit to a branch (revision=...) instead."


@dataclass(frozen=True)
class _Change:
    """A change of a path: a new blob or large file; a deletion if `blob` and `sha256` are None.

    Args:
        path: Path in the repository.
        blob: Git blob id of the new content.
        sha256: The sha256 of a large file that was uploaded before.
        size: The size of the large file in bytes, if the client sent it.
        is_folder: Whether the change deletes a folder.
    """

    path: str
    blob: str | None = None
    sha256: str | None = None
    size: int | None = None
    is_folder: bool = False


class CommitsApi(Api):
    """The three requests of an upload: card check, upload modes, commit."""

    def register(self, router: Router) -> None:
        router.add("POST", "/api/validate-yaml", self._validate, max_body=_MAX_CARD_BYTES)
        router.add("POST", "/api/{repo}/preupload/{revision}", self._preupload, max_body=_MAX_PREUPLOAD_BYTES)
        router.add("POST", "/api/{repo}/commit/{revision}", self._commit, max_body=_MAX_COMMIT_BYTES)

    def _validate(self, request: Request) -> Response:
        """Checks that a card's metadata can be read. huggingface_hub calls this before it uploads anything."""
        # Do not parse YAML for anonymous callers. They cannot commit anyway, and each commit checks its card again.
        if request.role is None:
            for _ in request.body.pieces():
                pass
            return json_response({"errors": [], "warnings": []})
        request.body.allow(_MAX_CARD_BYTES)
        fields = request.json()
        content = member(fields, "content", str)
        if content is None:
            raise bad_request("The card's content is missing.")
        card, error = parse_card(content.encode())
        warning = "The card has no YAML metadata; put them between two lines of --- at its top."
        answer = {
            "errors": [{"message": error}] if error else [],
            "warnings": [{"message": warning}] if card is None and not error else [],
        }
        return json_response(answer, status=400 if error else 200)

    def _preupload(self, request: Request, repo: RepoId, revision: str) -> Response:
        """Tells the client how to send each file, and which content the repository already has at its path."""
        self._access.require_write(request, repo)
        if request.flag("create_pr"):
            raise forbidden(_NO_PULL_REQUESTS)
        fields = request.json()
        with self._storage.git(repo) as git:
            _, commit = _branch_head(git, revision)
            tree = TreeEdit(git, git.root_tree(commit))
            budget = Budget()
            is_lfs = LfsPaths(_read_file(git, tree, _ATTRIBUTES), budget)
            # If this commit uploads a .gitignore, the client sends it here, and it overrides the stored .gitignore.
            client_gitignore = member(fields, "gitIgnore", str)
            is_ignored = IgnoredPaths(
                _read_file(git, tree, ".gitignore") if client_gitignore is None else client_gitignore.encode(), budget
            )
            answers = []
            needed_bytes = 0
            for file in object_list(fields, "files", max_count=_MAX_FILES):
                path = check_path(file.get("path"))
                size = member(file, "size", int)
                sample = _decode_base64(member(file, "sample", str) or "", path)
                # git treats content with a NUL byte as binary, and so does the Hub.
                is_large = is_lfs(path) or b"\0" in sample or (size is not None and size > _MAX_REGULAR_BYTES)
                answer = {
                    # The path exactly as received: the client looks up each answer by its path.
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large else "regular",
                    "shouldIgnore": is_ignored(path),
                }
                stored_oid = tree.get(path)
                pointer = git.blob_info(stored_oid).pointer if stored_oid is not None else None
                if stored_oid is not None:
                    answer["oid"] = pointer.oid if pointer else stored_oid
                if is_large and size is not None and not (pointer and pointer.size == size):
                    needed_bytes += max(size, 0)
                answers.append(answer)
        # Refuse here if the disk is full: the client shows this message. If Xet refuses, it shows only the status.
        if needed_bytes:
            self._storage.require_room(needed_bytes)
        return json_response({"files": answers, "commitOid": commit})

    def _commit(self, request: Request, repo: RepoId, revision: str) -> Response:
        """Commits a list of changes to a branch: either all of them or none."""
        self._access.require_write(request, repo)
        if request.flag("create_pr"):
            raise forbidden(_NO_PULL_REQUESTS)
        request.body.allow(_MAX_COMMIT_BYTES)
        with self._storage.git(repo) as git, Quarantine(self._storage.path(repo)) as quarantine:
            _branch_head(git, revision)  # refuse a missing branch before the upload, not after it
            header, changes = _read_commit(request, repo, quarantine, self._storage)
            # Lock only now: a slow upload must not keep other writers waiting.
            with self._storage.lock(repo):
                branch, head = _branch_head(git, revision)
                parent = member(header, "parentCommit", str)
                if parent and not head.startswith(parent.lower()):
                    raise Fault(
                        412, f"A commit has happened since: the head of '{branch}' is {head}, not {parent}; try again."
                    )
                oid = self._apply(git, quarantine, repo, head, header, changes)
                if oid != head:
                    # Objects first, then the ref: whoever sees the new head can read the complete commit.
                    quarantine.migrate()
                    git.write_ref(f"refs/heads/{branch}", oid)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{request.base_url}/{repo.page_path}/commit/{oid}"}
        return json_response(answer)

    def _apply(
        self,
        git: GitRepository,
        quarantine: Quarantine,
        repo: RepoId,
        head: str,
        header: dict[str, object],
        changes: list[_Change],
    ) -> str:
        """Builds the new commit in the quarantine, and returns its id.

        Returns the head if no file changes, so that a client which missed the answer can safely repeat its request.
        """
        store = self._storage.large_files(repo)
        old_tree = git.root_tree(head)
        tree = TreeEdit(git, old_tree)
        large_paths = []
        for change in changes:
            if change.blob is not None:
                tree.put(change.path, change.blob)
            elif change.sha256 is not None:
                size = store.size(change.sha256)
                if size is None:
                    raise bad_request(f"The content of '{change.path}' was not uploaded to LFS; upload it first.")
                if change.size not in (None, size):
                    raise bad_request(f"'{change.path}' has {size} bytes in LFS, not {change.size}.")
                tree.put(change.path, quarantine.add_blob(Pointer(change.sha256, size).content()))
                large_paths.append(change.path)
            elif not tree.remove(change.path, is_folder=change.is_folder):
                kind = "folder" if change.is_folder else "file"
                raise entry_not_found(f"A {kind} with this name doesn't exist: '{change.path}'.", commit=head)
        self._add_attributes(git, quarantine, tree, large_paths)
        new_tree = tree.write(quarantine)
        if new_tree == old_tree:
            return head
        summary = member(header, "summary", str) or "Update files"
        description = member(header, "description", str) or ""
        return quarantine.add_commit(new_tree, [head], f"{summary}\n\n{description}")

    def _add_attributes(self, git: GitRepository, quarantine: Quarantine, tree: TreeEdit, paths: list[str]) -> None:
        """Adds a line to .gitattributes for each large file that no pattern in it covers, as the Hub does."""
        # Without that line, `git clone` would check out the pointer instead of the file.
        if not paths:
            return
        content = _read_file(git, tree, _ATTRIBUTES, quarantine)
        is_covered = LfsPaths(content, Budget())
        lines = [f"{_attribute_pattern(path)}{_LFS_ATTRIBUTES}\n".encode() for path in paths if not is_covered(path)]
        if lines:
            if content and not content.endswith(b"\n"):
                content += b"\n"
            tree.put(_ATTRIBUTES, quarantine.add_blob(content + b"".join(lines)))


def _branch_head(git: GitRepository, revision: str) -> tuple[str, str]:
    """Returns (branch, head). Raises Fault: 404 if it is missing, 400 for a tag or commit, 403 for a pull request."""
    if revision.startswith("refs/pr/"):
        raise forbidden(_NO_PULL_REQUESTS)
    name = revision.removeprefix("refs/heads/")
    head = git.branch(name)
    if head is None:
        if git.resolve(revision) is not None:
            raise bad_request(f"'{revision}' is not a branch: commit to a branch instead.")
        raise revision_not_found(revision)
    return name, head


def _decode_base64(content: str, path: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"The content of '{path}' is not base64.") from error


def _read_commit(
    request: Request, repo: RepoId, quarantine: Quarantine, storage: Storage
) -> tuple[dict[str, Any], list[_Change]]:
    """Reads the header and the changes of a commit. Puts each content into the quarantine, to keep memory small."""
    header: dict[str, object] = {}
    changes: list[_Change] = []
    for key, fields in _read_operations(request):
        if key == "header":
            header = fields
            continue
        if len(changes) == _MAX_CHANGES:
            raise bad_request(f"The commit has more than {_MAX_CHANGES} changes; split it into several commits.")
        path = check_path((member(fields, "path", str) or "").removesuffix("/" if key == "deletedFolder" else ""))
        if key == "file":
            content = _decode_content(fields, path)
            if path.rpartition("/")[2] == _ATTRIBUTES and max(map(len, content.split(b"\n"))) > _MAX_ATTRIBUTE_LINE:
                raise bad_request(f"A line of '{path}' has over {_MAX_ATTRIBUTE_LINE} bytes, which git does not read.")
            # A push from an LFS checkout without git-lfs would publish pointers to files that are not here.
            pointer = parse_pointer(content)
            if pointer and storage.large_files(repo).size(pointer.oid) != pointer.size:
                raise bad_request(f"'{path}' is an LFS pointer to a file that was not uploaded; push the file itself.")
            blob = quarantine.add_blob(content)
            if path == "README.md":
                _check_metadata(content, blob)
            changes.append(_Change(path, blob=blob))
        elif key == "lfsFile":
            if fields.get("algo", "sha256") != "sha256":
                raise bad_request(f"'{path}' is identified by {fields['algo']}; the Hub supports only sha256.")
            changes.append(_Change(path, sha256=check_oid(fields.get("oid")), size=member(fields, "size", int)))
        elif key in ("deletedFile", "deletedFolder"):
            changes.append(_Change(path, is_folder=key == "deletedFolder"))
        else:
            raise bad_request(f"The commit contains an unknown operation '{key[:40]}'.")
    if not header:
        raise bad_request("The commit has no header line.")
    return header, changes


def _check_metadata(readme: bytes, oid: str) -> None:
    """Raises Fault 400 if the metadata of a README cannot be read."""
    _, error = read_card(oid, lambda: readme)
    if error:
        raise bad_request(f"Invalid metadata in README.md: {error}")


def _read_operations(request: Request) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the kind and the fields of each operation in a commit."""
    for line in request.body.lines():
        if not line.strip():
            continue
        try:
            operation = parse_plain_json(line)
            key, fields = operation["key"], operation["value"]
        except (ValueError, KeyError, TypeError) as error:
            raise bad_request(f"A line of the commit is not a JSON object with key and value: {error}.") from error
        if not isinstance(key, str) or not isinstance(fields, dict):
            raise bad_request("A line of the commit is not a JSON object with key and value.")
        yield key, fields


def _decode_content(fields: dict[str, object], path: str) -> bytes:
    content = member(fields, "content", str)
    if content is None:
        raise bad_request(f"The content of '{path}' is missing.")
    return _decode_base64(content, path) if fields.get("encoding") == "base64" else content.encode()


def _read_file(git: GitRepository, tree: TreeEdit, path: str, quarantine: Quarantine | None = None) -> bytes:
    """Returns the content of a file, which may still be in the quarantine; empty if there is no such file."""
    oid = tree.get(path)
    if oid is None:
        return b""
    new_content = quarantine.read(oid) if quarantine is not None else None
    return git.blob(oid) if new_content is None else new_content


def _attribute_pattern(path: str) -> str:
    """Returns a .gitattributes pattern for a path: exact, unless the escapes make it too long."""
    exact_pattern = "/" + re.sub(r"([*?\[\]])", r"\\\1", path).replace(" ", "[[:space:]]")
    # If the line is too long for git, use "?" instead of the escapes, although it matches similar paths too.
    is_short = len(exact_pattern.encode()) <= _MAX_ATTRIBUTE_LINE - 100
    return exact_pattern if is_short else "/" + re.sub(r"[*?\[\] ]", "?", path)
