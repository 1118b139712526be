"""Receives uploads by Xet, huggingface_hub's default protocol: issues tokens, and stores uploads that carry them.

Files end up in `LargeFiles`, like files that were uploaded by LFS, and are downloaded from there. Apart from
`paths-info`, no answer of this Hub names a Xet hash. The Hub does not offer grants, deduplication across repositories,
or version 2 of the shard requests. Clients accept a 404 for them.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from .access import Api, signed_identity
from .faults import Fault, bad_request, forbidden, revision_not_found
from .lfs_api import translate_upload_errors
from .messages import Request, Response, bearer_token, json_response
from .names import RepoId
from .routing import Router
from .xet_format import SHARD_LIMIT, XORB_LIMIT
from .xet_store import XetStore, current_epoch

log = logging.getLogger(__name__)

#: Start of the path of each store's address.
XET_PREFIX = "/_xet/"
#: Path to which hf-xet sends its reports, with a store's token. It is not below XET_PREFIX.
TELEMETRY_PATH = "/v1/telemetry"
_TOKEN_SECONDS = 3600


class XetApi(Api):
    """Uploads of large files by Xet."""

    def register(self, router: Router) -> None:
        store_path = f"{XET_PREFIX}{{repo}}/{{epoch}}"
        router.add("GET", "/api/{repo}/xet-write-token/{revision}", self._issue_token)
        router.add("POST", f"{store_path}/v1/xorbs/default/{{xorb}}", self._upload_xorb, max_body=XORB_LIMIT)
        router.add("POST", f"{store_path}/v1/shards", self._upload_shard, max_body=SHARD_LIMIT)
        router.add("POST", TELEMETRY_PATH, self._telemetry)

    def _issue_token(self, request: Request, repo: RepoId, revision: str) -> Response:
        """Issues a token for this repository's store only, and returns it with the store's address."""
        settings = self._access.require_write(request, repo)
        with self._storage.git(repo) as git:
            if git.branch(revision.removeprefix("refs/heads/")) is None:
                # Clients send the revision "None" before they open a pull request.
                if revision == "None" or revision.startswith("refs/pr/"):
                    raise forbidden("The embedded Hub has no pull requests: commit to a branch instead.")
                raise revision_not_found(revision)
        epoch = current_epoch(self._storage.path(repo), self._storage.clock.now())
        token = self._access.signer.sign("xet", *signed_identity(repo, settings), seconds=_TOKEN_SECONDS)
        expiry = token.partition(".")[0]
        address = f"{request.base_url}{XET_PREFIX}{repo.plural}/{repo}/{epoch}"
        headers = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": expiry}
        return json_response({"casUrl": address, "accessToken": token, "exp": int(expiry)}, headers=headers)

    def _upload_xorb(self, request: Request, repo: RepoId, epoch: str, xorb: str) -> Response:
        """Receives a xorb, whose chunks a later shard refers to."""
        with self._authorized_upload(request, repo):
            _check_hash(xorb)  # it becomes a file's name
            self._storage.require_room(min(request.body.length or 0, XORB_LIMIT))
            is_new = XetStore(self._storage.path(repo), epoch).receive(xorb, request.body.pieces())
        return json_response({"was_inserted": is_new})

    def _upload_shard(self, request: Request, repo: RepoId, epoch: str) -> Response:
        """Receives a shard, and rebuilds its files from the xorbs. From then on, the files are ordinary large files."""
        with self._authorized_upload(request, repo):
            store = XetStore(self._storage.path(repo), epoch)
            store.rebuild_files(request.body.read(), require_room=self._storage.require_room)
        return json_response({"result": 1})

    def _telemetry(self, request: Request) -> Response:
        """Accepts hf-xet's reports without reading or keeping them."""
        return json_response({})

    @contextmanager
    def _authorized_upload(self, request: Request, repo: RepoId) -> Iterator[None]:
        """Checks the Xet token of an upload, and turns errors in the context into refusals."""
        token = bearer_token(request.headers.get("Authorization", ""))
        if token is None or not self._access.is_signed(token, "xet", repo):
            raise Fault(401, "The Xet token is not valid here or has expired; start the upload again.")
        request.body.allow(request.body.limit)  # the token is valid, so read the rest of the body even after a refusal
        try:
            with translate_upload_errors(repo, self._storage):
                yield
        except Fault as fault:
            # hf-xet shows the user only the status, so log the reason.
            log.warning("Xet upload to %s refused: %s", repo, fault.message)
            raise


def _check_hash(text: str) -> None:
    """Raises Fault 400 if a hash does not have the protocol's text form."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise bad_request("A Xet hash has 64 lower-case hexadecimal digits.")
