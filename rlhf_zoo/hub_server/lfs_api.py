"""Uploading big files: the LFS batch call and the signed links that it gives out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from .access import Access
from .faults import Fault, bad_request, disk_full, is_disk_full
from .large_files import LargeFiles, PartialUploads, Pointer
from .messages import (
    SMALL_BODY,
    FilePart,
    Request,
    Response,
    json_response,
    member,
    objects,
)
from .names import RepoId, check_oid
from .routing import Router
from .storage import Settings, Storage
from .tokens import Signer

__all__ = ["PART_SIZE", "LfsApi", "receiving"]

#: Files above this many bytes go up in parts of it, each of which can be repeated alone.
PART_SIZE = 50_000_000
_MAX_PARTS = 1000
_MAX_OBJECTS = 1000
_MAX_SIZE = 10**15 - 1
_MIME = "application/vnd.git-lfs+json"


class LfsApi:
    """See `register` for the addresses."""

    def __init__(self, access: Access, signer: Signer, *, part_size: int = PART_SIZE) -> None:
        self._access = access
        self._storage = access.storage
        self._signer = signer
        self._part_size = part_size
        self._partial = PartialUploads()

    def register(self, router: Router) -> None:
        """Add the routes; they come before those of pages, whose addresses look alike."""
        router.add("POST", "/{page}.git/info/lfs/objects/batch", self.batch, body=SMALL_BODY)
        router.add("PUT", "/_lfs/{repo}/{oid}", self.upload, body=_MAX_SIZE)
        router.add("GET", "/_lfs/{repo}/{oid}", self.download)
        router.add("PUT", "/_lfs/{repo}/{oid}/{upload}/{part}", self.upload_part, body=_MAX_SIZE)
        router.add("POST", "/_lfs/{repo}/{oid}/{upload}", self.complete)

    def batch(self, request: Request, repo: RepoId) -> Response:
        """Links for the objects that are not stored yet (upload), or that are (download)."""
        fields = request.json()
        operation = fields.get("operation")
        if operation not in ("upload", "download"):
            raise bad_request(f"The LFS operation must be upload or download, not '{operation}'.")
        settings = (self._access.write if operation == "upload" else self._access.read)(request, repo)
        if fields.get("hash_algo", "sha256") != "sha256":
            raise bad_request("The Hub names LFS objects by sha256 only.")
        transfers = member(fields, "transfers", list) or ["basic"]
        store = self._storage.large_files(repo)
        items = objects(fields, "objects", most=_MAX_OBJECTS)
        wanted = [(check_oid(item.get("oid")), _size(item.get("size"))) for item in items]
        link = partial(self._link, request, repo, settings)
        free = self._storage.free()
        answers: list[dict[str, Any]] = []
        for oid, size in dict(wanted).items():
            answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
            stored = store.size(oid)
            if operation == "download":
                if stored is None:
                    answer["error"] = {"code": 404, "message": f"LFS object {oid} is not stored in '{repo}'."}
                else:
                    answer["actions"] = {"download": {"href": link("GET", oid, stored)}}
            elif stored != size:
                free -= size
                if free < 0:
                    answer["error"] = {"code": 507, "message": disk_full(self._storage.root).message}
                elif size > self._part_size and "multipart" in transfers:
                    answer["actions"] = {"upload": self._multipart(link, store, oid, size)}
                else:
                    answer["actions"] = {"upload": {"href": link("PUT", oid, size)}}
            answers.append(answer)
        parts = any("chunk_size" in a.get("actions", {}).get("upload", {}).get("header", {}) for a in answers)
        transfer = "multipart" if parts else "basic"
        answer = {"transfer": transfer, "objects": answers, "hash_algo": "sha256"}
        return json_response(answer, headers={"Content-Type": _MIME})

    def upload(self, request: Request, repo: RepoId, oid: str) -> Response:
        """A whole file in one request."""
        size = self._verified(request, repo, "PUT", check_oid(oid))
        request.body.expect(size)
        with receiving(repo, self._storage):
            if request.body.length not in (None, size):
                raise bad_request(f"LFS object {oid} was announced with {size} bytes, not {request.body.length}.")
            self._storage.large_files(repo).receive(oid, size, request.body.chunks())
        return Response(200)

    def download(self, request: Request, repo: RepoId, oid: str) -> Response:
        """A whole file, for git-lfs."""
        size = self._verified(request, repo, "GET", check_oid(oid))
        path = self._storage.large_files(repo).whole(Pointer(oid, size), oid)
        return Response(200, {"Content-Type": "application/octet-stream"}, FilePart(path, 0, size))

    def upload_part(self, request: Request, repo: RepoId, oid: str, upload: str, part: str) -> Response:
        """One part; parts count from 1."""
        size = self._verified(request, repo, "PUT", check_oid(oid), upload, part)
        chunk = _size(request.one("chunk"))
        offset = (_size(part) - 1) * chunk
        length = min(chunk, size - offset)
        path = self._incomplete(self._storage.large_files(repo), oid, upload)
        request.body.expect(length)
        with receiving(repo, self._storage):
            if request.body.length not in (None, length):
                raise bad_request(f"Part {part} of LFS object {oid} has {length} bytes, not {request.body.length}.")
            self._partial.receive(path, offset, length, request.body.chunks())
        # Clients hand ETags back at the end; what counts is the sha256 of the whole.
        return Response(200, {"ETag": f'"{part}"'})

    def complete(self, request: Request, repo: RepoId, oid: str, upload: str) -> Response:
        """Put the parts together."""
        size = self._verified(request, repo, "POST", check_oid(oid), upload)
        store = self._storage.large_files(repo)
        with receiving(repo, self._storage):
            self._partial.finish(store, self._incomplete(store, oid, upload), oid, size)
        return json_response({"success": True})

    def _link(
        self,
        request: Request,
        repo: RepoId,
        settings: Settings,
        method: str,
        oid: str,
        size: int,
        *parts: str,
        chunk: int = 0,
    ) -> str:
        signature = self._signer.sign(method, *_identity(repo, settings), oid, str(size), str(chunk), *parts)
        query = urlencode({"size": size, "chunk": chunk, "signature": signature})
        return f"{request.base}/_lfs/{repo.plural}/{repo}/{'/'.join((oid, *parts))}?{query}"

    def _verified(self, request: Request, repo: RepoId, method: str, oid: str, *parts: str) -> int:
        """The size that the link was signed for; Fault 403 where the link was not made here, is too old, or was made
        for an earlier repository of that name, which was deleted or moved since."""
        size, chunk, signature = (request.one(key) or "" for key in ("size", "chunk", "signature"))
        refused = Fault(403, "The upload link is not valid or has expired; start the upload again.")
        try:
            settings = self._storage.settings(repo)
        except Fault as fault:  # a stranger is not to learn what exists
            raise refused from fault
        if not self._signer.verify(signature, method, *_identity(repo, settings), oid, size, chunk, *parts):
            raise refused
        return _size(size)

    def _multipart(self, link: Callable[..., str], store: LargeFiles, oid: str, size: int) -> dict[str, Any]:
        chunk = max(self._part_size, -(-size // _MAX_PARTS))
        upload = store.incomplete(oid).name.partition(".")[2]
        links = {
            str(part): link("PUT", oid, size, upload, str(part), chunk=chunk)
            for part in range(1, -(-size // chunk) + 1)
        }
        href = link("POST", oid, size, upload)
        return {"href": href, "header": {"chunk_size": str(chunk), **links}}

    @staticmethod
    def _incomplete(store: LargeFiles, oid: str, upload: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{16}", upload):
            raise bad_request("The upload has no valid name; start it again.")
        return store.folder / "incomplete" / f"{oid}.{upload}"


def _identity(repo: RepoId, settings: Settings) -> tuple[str, str]:
    return f"{repo.plural}/{repo}", settings.created


@contextmanager
def receiving(repo: RepoId, storage: Storage) -> Iterator[None]:
    """Says what became of an upload that cannot be stored."""
    try:
        yield
    except FileNotFoundError as error:
        raise Fault(404, f"Repository '{repo}' was moved or deleted meanwhile.", code="RepoNotFound") from error
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(storage.root) from error
        raise


def _size(value: Any) -> int:
    if not re.fullmatch(r"\d{1,15}", str(value)):
        raise bad_request("An LFS object needs its size in bytes.")
    return int(value)
