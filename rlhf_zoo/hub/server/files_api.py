"""Serves files: downloads, listings of folders, and descriptions of paths."""

import mimetypes
import re
from typing import Any
from urllib.parse import quote

from .access import Api, resolve_commit
from .describe import commit_date
from .faults import Fault, entry_not_found
from .git import Entry, GitRepository
from .messages import SMALL_BODY, FilePart, Request, Response, json_response
from .names import RepoId
from .routing import Router

_PAGE_SIZE = 1000
_EXPANDED_PAGE_SIZE = 50


class FilesApi(Api):
    """Files and folders of a revision."""

    def register(self, router: Router) -> None:
        router.add("GET", "/{page}/resolve/{revision}/{path*}", self._resolve)
        router.add("GET", "/{page}/raw/{revision}/{path*}", self._raw)
        router.add("GET", "/api/{repo}/tree/{revision}/{path*}", self._tree)
        router.add("POST", "/api/{repo}/paths-info/{revision}", self._paths_info, max_body=SMALL_BODY)

    def _resolve(self, request: Request, repo: RepoId, revision: str, path: str) -> Response:
        """Sends a file's content, or the part that Range asks for. For HEAD, sends only the headers."""
        self._access.require_read(request, repo)
        with self._storage.git(repo) as git:
            commit = resolve_commit(git, revision)
            entry = _find_file(git, commit, path)
            info = git.blob_info(entry.oid)
            # As on the Hub: the sha256 of a large file, else the git blob id. Clients name cached files by their ETags.
            etag = info.pointer.oid if info.pointer else entry.oid
            headers = _file_headers(path, etag, commit)
            if info.pointer:
                headers["X-Linked-Etag"] = f'"{etag}"'
                headers["X-Linked-Size"] = str(info.size)
                file = self._storage.large_files(repo).checked_path(info.pointer, path)
            if request.headers.get("If-None-Match") == f'"{etag}"':
                return Response(304, headers)
            status, start, end = 200, 0, info.size
            # A resumed download of a file that changed meanwhile gets the whole new file.
            is_unchanged = request.headers.get("If-Range", f'"{etag}"') == f'"{etag}"'
            # HEAD describes the whole file: huggingface_hub reads the file's size from Content-Length.
            if is_unchanged and request.method == "GET":
                byte_range = _parse_byte_range(request.headers.get("Range", ""), info.size)
                if byte_range is not None:
                    status, (start, end) = 206, byte_range
                    headers["Content-Range"] = f"bytes {start}-{end - 1}/{info.size}"
            if info.pointer:
                return Response(status, headers, FilePart(file, start, end - start))
            return Response(status, headers, git.blob(entry.oid)[start:end])

    def _raw(self, request: Request, repo: RepoId, revision: str, path: str) -> Response:
        """Sends a file as git stores it. For a large file, that is the pointer."""
        self._access.require_read(request, repo)
        with self._storage.git(repo) as git:
            commit = resolve_commit(git, revision)
            entry = _find_file(git, commit, path)
            return Response(200, _file_headers(path, entry.oid, commit), git.blob(entry.oid))

    def _tree(self, request: Request, repo: RepoId, revision: str, path: str) -> Response:
        """Lists a folder, in pages. Fault 404 for a missing folder."""
        self._access.require_read(request, repo)
        expand = request.flag("expand")
        path = path.strip("/")
        with self._storage.git(repo) as git:
            commit = resolve_commit(git, revision)
            folder = git.entry(commit, path)
            if folder is None or not folder.is_folder:
                raise entry_not_found(f"There is no folder '{path}' at '{revision}' of '{repo}'.", commit=commit)
            prefix = f"{path}/" if path else ""
            entries = list(git.walk(folder.oid, prefix, recursive=request.flag("recursive")))
            # The addresses of later pages name the commit, so that a push meanwhile does not shift them.
            address = f"/api/{repo.plural}/{repo}/tree/{commit}" + (f"/{quote(path, safe='')}" if path else "")
            page, headers = request.page(entries, _EXPANDED_PAGE_SIZE if expand else _PAGE_SIZE, address)
            return json_response(_describe_paths(git, commit, page, expand=expand), headers=headers)

    def _paths_info(self, request: Request, repo: RepoId, revision: str) -> Response:
        """Describes the requested paths. Leaves out missing paths and the root."""
        self._access.require_read(request, repo)
        fields = request.form()
        expand = (fields.get("expand") or ["false"])[-1].lower() in ("true", "1")
        with self._storage.git(repo) as git:
            commit = resolve_commit(git, revision)
            entries = [git.entry(commit, path.strip("/")) for path in dict.fromkeys(fields.get("paths", []))]
            infos = _describe_paths(git, commit, [entry for entry in entries if entry and entry.path], expand=expand)
        if request.role == "write" and not expand:
            # Without a Xet hash, the client refuses to copy a large file to another repository. `_tree` must not return
            # the hash: the client would then download by Xet, which this Hub does not offer.
            for info in infos:
                if "lfs" in info:
                    info["xetHash"] = info["lfs"]["oid"]
        return json_response(infos)


def _find_file(git: GitRepository, commit: str, path: str) -> Entry:
    entry = git.entry(commit, path)
    if entry is None or entry.is_folder:
        raise entry_not_found(f"There is no file '{path}' at commit {commit}.", commit=commit)
    return entry


def _file_headers(path: str, etag: str, commit: str) -> dict[str, str]:
    name = path.rpartition("/")[2]
    return {
        "X-Repo-Commit": commit,
        "ETag": f'"{etag}"',
        "Accept-Ranges": "bytes",
        "Content-Type": mimetypes.guess_type(name)[0] or "application/octet-stream",
        "Content-Disposition": f"inline; filename*=UTF-8''{quote(name, safe='')}",
        # A pushed HTML page must not run scripts under the Hub's address.
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }


def _parse_byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Parses a single byte range as [start, end). Returns None for any other header, which HTTP says to ignore.

    Raises Fault 416 for a range outside the file.
    """
    # Possessive quantifiers (`*+`) do not backtrack. Otherwise a long header of spaces would take seconds.
    match = re.fullmatch(r"\s*+bytes\s*+=\s*+(\d{0,18}+)\s*+-\s*+(\d{0,18}+)\s*+", header)
    if not match or not (match[1] or match[2]):
        return None
    if not match[1]:  # bytes=-N: the last N bytes
        start, end = max(0, size - int(match[2])), size
    else:
        start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= size or start == end:
        message = f"The range {header!r:.60} lies outside the file of {size} bytes."
        raise Fault(416, message, headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _describe_paths(git: GitRepository, commit: str, entries: list[Entry], *, expand: bool) -> list[dict[str, Any]]:
    commit_by_path = git.last_commits(commit, [entry.path for entry in entries]) if expand else {}
    infos = []
    for entry in entries:
        if entry.is_folder:
            info: dict[str, object] = {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
        else:
            blob_info = git.blob_info(entry.oid)
            info = {"type": "file", "oid": entry.oid, "size": blob_info.size, "path": entry.path}
            if (pointer := blob_info.pointer) is not None:
                info["lfs"] = {"oid": pointer.oid, "size": blob_info.size, "pointerSize": blob_info.stored_size}
        if expand:
            oid = commit_by_path[entry.path]
            title = git.commit(oid).message.decode(errors="replace").partition("\n")[0]
            info["lastCommit"] = {"id": oid, "title": title, "date": commit_date(git, oid)}
        infos.append(info)
    return infos
