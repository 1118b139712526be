"""Receives large files by LFS: the batch request, and uploads to the signed links that it returns."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from .access import Api, signed_identity
from .faults import Fault, bad_request, disk_full, is_disk_full
from .messages import SMALL_BODY, Request, Response, json_response, member, object_list
from .names import RepoId, check_oid, parse_repo_id
from .routing import Router
from .storage import Settings, Storage

_MAX_OBJECTS = 1000
_MAX_SIZE = 10**15 - 1  # bytes, the largest size that `_parse_size` accepts
_LFS_CONTENT_TYPE = "application/vnd.git-lfs+json"


class LfsApi(Api):
    """Uploads of large files by LFS, and copies between repositories."""

    def register(self, router: Router) -> None:
        router.add("POST", "/{page}.git/info/lfs/objects/batch", self._batch, max_body=SMALL_BODY)
        router.add("POST", "/api/{repo}/lfs-files/duplicate", self._duplicate, max_body=SMALL_BODY)
        router.add("PUT", "/_lfs/{repo}/{oid}", self._upload, max_body=_MAX_SIZE)

    def _batch(self, request: Request, repo: RepoId) -> Response:
        """Returns upload links for the files that are not stored yet."""
        fields = request.json()
        if fields.get("operation") != "upload":
            raise bad_request("The LFS operation must be upload; files are downloaded from their own addresses.")
        settings = self._access.require_write(request, repo)
        if fields.get("hash_algo", "sha256") != "sha256":
            raise bad_request("The Hub identifies LFS objects only by sha256.")
        store = self._storage.large_files(repo)
        objects = object_list(fields, "objects", max_count=_MAX_OBJECTS)
        size_by_oid = {check_oid(entry.get("oid")): _parse_size(entry.get("size")) for entry in objects}
        self._storage.require_writable()
        # Subtract each file from the free space, so that files that do not fit are refused before any upload.
        free_bytes = self._storage.free_bytes()
        answers: list[dict[str, object]] = []
        for oid, size in size_by_oid.items():
            answer: dict[str, object] = {"oid": oid, "size": size, "authenticated": True}
            if store.size(oid) != size:
                free_bytes -= size
                if free_bytes < 0:
                    answer["error"] = {"code": 507, "message": disk_full(self._storage.root).message}
                else:
                    answer["actions"] = {"upload": {"href": self._link(request, repo, settings, oid, size)}}
            answers.append(answer)
        batch = {"transfer": "basic", "objects": answers, "hash_algo": "sha256"}
        return json_response(batch, headers={"Content-Type": _LFS_CONTENT_TYPE})

    def _duplicate(self, request: Request, repo: RepoId) -> Response:
        """Copies large files to another repository. The client's `copy_files` does this before it commits there."""
        self._access.require_read(request, repo)
        fields = request.json()
        target = member(fields, "target", dict) or {}
        parts = (member(target, "name", str) or "").split("/")
        if len(parts) != 2:
            raise bad_request("The target's name must be NAMESPACE/NAME.")
        target_repo = parse_repo_id(member(target, "type", str) or "model", *parts)
        self._access.require_write(request, target_repo)
        store, target_store = self._storage.large_files(repo), self._storage.large_files(target_repo)
        files = object_list(fields, "files", max_count=_MAX_OBJECTS)
        oids = dict.fromkeys(check_oid(file.get("sha256")) for file in files)
        failures = []
        with translate_upload_errors(target_repo, self._storage):
            for oid in oids:
                size = store.size(oid)
                if size is None:
                    failures.append({"sha256": oid, "error": f"'{repo}' has no such file"})
                elif target_store.size(oid) != size:
                    target_store.copy_from(store, oid)
        return json_response({"succeeded": len(oids) - len(failures), "failed": failures})

    def _upload(self, request: Request, repo: RepoId, oid: str) -> Response:
        """Receives a large file at a signed link. The request carries no token."""
        size = self._signed_size(request, repo, check_oid(oid))
        request.body.allow(size)  # the link is valid for exactly this many bytes
        with translate_upload_errors(repo, self._storage):
            if request.body.length not in (None, size):
                raise bad_request(f"LFS object {oid} was announced with {size} bytes, not {request.body.length}.")
            self._storage.large_files(repo).receive(oid, size, request.body.pieces())
        return Response(200)

    def _link(self, request: Request, repo: RepoId, settings: Settings, oid: str, size: int) -> str:
        # The signature covers the size. Otherwise a link for 1 KB could be used to fill the disk.
        signature = self._access.signer.sign("PUT", *signed_identity(repo, settings), oid, str(size))
        query = urlencode({"size": size, "signature": signature})
        return f"{request.base_url}/_lfs/{repo.plural}/{repo}/{oid}?{query}"

    def _signed_size(self, request: Request, repo: RepoId, oid: str) -> int:
        """Returns the size that a signed link permits. Raises Fault 403 if the link is not valid."""
        size, signature = (request.value(key) or "" for key in ("size", "signature"))
        if not self._access.is_signed(signature, "PUT", repo, oid, size):
            raise Fault(403, "The upload link is not valid or has expired; start the upload again.")
        return _parse_size(size)


@contextmanager
def translate_upload_errors(repo: RepoId, storage: Storage) -> Iterator[None]:
    """Turns errors that occur while an upload is stored into refusals.

    Args:
        repo: The repository.
        storage: The Hub's storage.

    Raises:
        Fault: 404 if the repository was moved or deleted meanwhile, 507 if the disk is full.
    """
    try:
        yield
    except FileNotFoundError as error:  # uploads take no lock, so the folder can disappear meanwhile
        raise Fault(404, f"Repository '{repo}' was moved or deleted meanwhile.", code="RepoNotFound") from error
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(storage.root) from error
        raise


def _parse_size(value: Any) -> int:
    if not re.fullmatch(r"\d{1,15}", str(value)):
        raise bad_request("An LFS object needs its size in bytes.")
    return int(value)
