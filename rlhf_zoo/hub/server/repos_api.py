"""Creates, deletes, moves, configures, describes and lists repositories."""

from functools import partial
from typing import Any

from .access import Api, resolve_commit
from .describe import describe
from .faults import Fault, bad_request
from .git import MAIN
from .messages import SMALL_BODY, Request, Response, json_response, member, object_list
from .names import KINDS, OWNER, RepoId, parse_repo_id
from .routing import Router
from .storage import now

_PAGE_SIZE = 1000
_MAX_VARIABLES = 500
# Namespaces whose pages would collide with other addresses of the Hub.
_RESERVED_NAMESPACES = ("api", "_lfs", "_xet", "models", "datasets", "spaces", "collections")
# The properties of each repository in a list, and the properties that the query parameter `full` adds.
_LIST_PROPERTIES = [
    "createdAt", "downloads", "library_name", "likes", "pipeline_tag", "private", "sdk", "tags", "trendingScore",
]  # fmt: skip
_FULL_LIST_PROPERTIES = ["author", "disabled", "gated", "lastModified", "sha", "siblings"]
_SORT_KEYS = ("lastModified", "createdAt", "downloads", "likes", "trendingScore")
# The properties that filtering and sorting a list need.
_FILTER_PROPERTIES = (*_SORT_KEYS, "tags", "pipeline_tag", "models", "datasets", "sha")


class ReposApi(Api):
    """Repositories: their creation, settings, descriptions and lists."""

    def register(self, router: Router) -> None:
        router.add("POST", "/api/repos/create", self._create, max_body=SMALL_BODY)
        router.add("DELETE", "/api/repos/delete", self._delete, max_body=SMALL_BODY)
        router.add("POST", "/api/repos/move", self._move, max_body=SMALL_BODY)
        for kind, plural in KINDS.items():
            router.add("GET", f"/api/{plural}", partial(self._list, kind=kind))
        router.add("GET", "/api/settings/repositories", self._disk_usage)
        router.add("GET", "/api/organizations/{namespace}/settings/repositories", self._disk_usage)
        router.add("POST", "/api/{repo}/duplicate", self._duplicate, max_body=SMALL_BODY)
        router.add("PUT", "/api/{repo}/settings", self._change_visibility, max_body=SMALL_BODY)
        router.add("GET", "/api/{repo}/auth-check", self._auth_check)
        router.add("GET", "/api/{repo}/auth-check/write", partial(self._auth_check, needs_write=True))
        router.add("GET", "/api/{repo}/revision/{revision}", self._info)
        router.add("GET", "/api/{repo}", self._info)

    def _create(self, request: Request) -> Response:
        """Creates a repository. Fault 409, with its address in the body, if it exists."""
        request.require_write()
        fields = request.json()
        repo = _parse_repo(fields)
        _check_not_reserved(repo)
        if fields.get("template"):
            raise bad_request("The embedded Hub has no Space templates: create the Space and push your own files.")
        private = _parse_private(fields)
        sdk = member(fields, "sdk", str)
        was_created = self._storage.create(repo, private=bool(private), sdk=sdk, variables=_parse_variables(fields))
        answer = {"url": f"{request.base_url}/{repo.page_path}", "name": str(repo), "id": str(repo)}
        if not was_created:
            raise Fault(409, f"You already created the {repo.kind} repository '{repo}'.", body=answer)
        return json_response(answer)

    def _delete(self, request: Request) -> Response:
        """Deletes a repository."""
        request.require_write()  # not `Access.require_write`, which refuses a damaged repository
        self._storage.delete(_parse_repo(request.json()))
        return json_response({})

    def _move(self, request: Request) -> Response:
        """Renames a repository. The old name redirects to the new name until another repository takes the old name."""
        fields = request.json()
        kind = fields.get("type") or "model"
        source, target = (_parse_full_name(kind, fields.get(key), key) for key in ("fromRepo", "toRepo"))
        self._access.require_write(request, source)
        _check_not_reserved(target)
        self._storage.move(source, target)
        return json_response({"url": f"{request.base_url}/{target.page_path}"})

    def _duplicate(self, request: Request, repo: RepoId) -> Response:
        """Copies a repository with its history. Fault 409, with the address, if the new name is taken."""
        self._access.require_read(request, repo)
        request.require_write()
        fields = request.json()
        runtime_keys = ("hardware", "sleepTimeSeconds", "secrets", "volumes")
        if repo.kind == "space" and any(map(fields.get, runtime_keys)):
            raise bad_request("The embedded Hub stores Spaces and does not run them: leave hardware and secrets out.")
        target = _parse_full_name(repo.kind, fields.get("repository"), "repository")
        _check_not_reserved(target)
        was_created = self._storage.duplicate(
            repo, target, private=_parse_private(fields), variables=_parse_variables(fields)
        )
        answer = {"url": f"{request.base_url}/{target.page_path}", "filesCopyPending": False}
        if not was_created:
            raise Fault(409, f"The {target.kind} repository '{target}' already exists.", body=answer)
        return json_response(answer)

    def _change_visibility(self, request: Request, repo: RepoId) -> Response:
        """Changes the visibility of a repository."""
        self._access.require_write(request, repo)
        fields = request.json()
        if fields.get("gated"):
            raise bad_request("The embedded Hub has no gated repositories: make the repository private instead.")
        private = _parse_private(fields)
        if private is not None:
            with self._storage.lock(repo):
                self._storage.change_settings(repo, private=private)
        return json_response({"private": self._storage.settings(repo).private, "gated": False})

    def _disk_usage(self, request: Request, namespace: str = OWNER) -> Response:
        """Lists the disk space that each repository of a namespace uses, largest first."""
        request.require_token()
        answer: list[dict[str, Any]] = []
        for repo in self._storage.repositories():
            if repo.namespace != namespace:
                continue
            with self._storage.skip_damaged(repo):
                settings = self._storage.settings(repo)
                with self._storage.git(repo) as git:
                    expand = ("usedStorage", "lastModified")
                    properties = describe(self._storage, repo, settings, git, git.head(), expand=expand)
                usage = {"id": str(repo), "type": repo.kind, "updatedAt": properties["lastModified"]}
                visibility = "private" if settings.private else "public"
                usage |= {"visibility": visibility, "storage": properties["usedStorage"]}
                answer.append(usage)
        # At least 1, because the sum is a divisor.
        total = sum(usage["storage"] for usage in answer) or 1
        answer.sort(key=lambda usage: usage["storage"], reverse=True)
        return json_response([{**usage, "storagePercent": usage["storage"] / total} for usage in answer])

    def _auth_check(self, request: Request, repo: RepoId, needs_write: bool = False) -> Response:
        """Checks that the caller may read (or write) a repository."""
        (self._access.require_write if needs_write else self._access.require_read)(request, repo)
        return json_response({})

    def _info(self, request: Request, repo: RepoId, revision: str = MAIN) -> Response:
        """Describes a repository at a revision."""
        settings = self._access.require_read(request, repo)
        expand = request.values("expand") or None
        with self._storage.git(repo) as git:
            commit = resolve_commit(git, revision)
            include_blobs = request.flag("blobs")
            info = describe(self._storage, repo, settings, git, commit, include_blobs=include_blobs, expand=expand)
            return json_response(info)

    def _list(self, request: Request, kind: str) -> Response:
        """Lists the repositories of a kind that match every filter, in pages."""
        sort = request.value("sort") or "lastModified"
        if sort not in _SORT_KEYS:
            raise bad_request(f"Cannot sort by '{sort[:40]}': use one of {', '.join(_SORT_KEYS)}.")
        if request.value("num_parameters"):
            raise bad_request("The embedded Hub cannot filter by the number of parameters: leave num_parameters out.")
        expand = request.values("expand") or None
        matches = []
        for repo in self._storage.repositories(kind):
            with self._storage.skip_damaged(repo):
                properties = self._match_filters(request, repo)
                if properties is not None:
                    matches.append((repo, properties))
        matches.sort(key=lambda pair: pair[1][sort], reverse=request.value("direction") != "1")
        # Filters need a few properties of every repository. Get the other properties only for the page.
        page, headers = request.page(matches, _PAGE_SIZE)
        answer = []
        for repo, properties in page:
            with self._storage.skip_damaged(repo):
                answer.append(self._describe_for_list(request, repo, properties["sha"], expand))
        return json_response(answer, headers=headers)

    def _match_filters(self, request: Request, repo: RepoId) -> dict[str, Any] | None:
        """Returns a repository's `_FILTER_PROPERTIES`; None if a filter excludes it or the caller may not see it."""
        authors = request.values("author")
        if authors and repo.namespace not in authors:
            return None
        words = " ".join(request.values("search")).lower().split()
        if not all(word in str(repo).lower() for word in words):
            return None
        # No repository here is served for inference, gated, or linked to applications.
        if any(request.value(key) for key in ("inference", "inference_provider", "apps")) or request.flag("gated"):
            return None
        settings = self._storage.settings(repo)
        if not self._access.can_see(request, settings):
            return None
        with self._storage.git(repo) as git:
            commit = git.head()
            properties = describe(self._storage, repo, settings, git, commit, expand=_FILTER_PROPERTIES)
        if not set(request.values("filter")) <= set(properties["tags"]):
            return None
        task = request.value("pipeline_tag")
        if task and properties.get("pipeline_tag") != task:
            return None
        for key in ("models", "datasets"):
            if repo.kind == "space" and not set(request.values(key)) <= set(properties[key]):
                return None
        if repo.kind == "space" and request.flag("linked") and not (properties["models"] or properties["datasets"]):
            return None
        return properties

    def _describe_for_list(
        self, request: Request, repo: RepoId, commit: str, expand: list[str] | None
    ) -> dict[str, Any]:
        if expand is None:
            is_full = request.flag("full")
            expand = [*_LIST_PROPERTIES, *(_FULL_LIST_PROPERTIES if is_full else ())]
            expand += [key for key in ("cardData", "config") if request.flag(key)]
            if is_full and repo.kind != "model":
                expand.append("cardData")
        settings = self._storage.settings(repo)
        with self._storage.git(repo) as git:
            return describe(self._storage, repo, settings, git, commit, expand=expand)


def _parse_repo(fields: dict[str, object]) -> RepoId:
    return parse_repo_id(fields.get("type") or "model", fields.get("organization"), fields.get("name"))


def _check_not_reserved(repo: RepoId) -> None:
    if repo.namespace in _RESERVED_NAMESPACES:
        raise bad_request(f"The namespace '{repo.namespace}' is part of the Hub's own addresses; choose another.")


def _parse_variables(fields: dict[str, object]) -> dict[str, dict[str, Any]]:
    return {
        member(item, "key", str) or "": {"value": member(item, "value", str) or "", "updatedAt": now()}
        for item in object_list(fields, "variables", max_count=_MAX_VARIABLES)
    }


def _parse_private(fields: dict[str, object]) -> bool | None:
    """Returns whether a request makes the repository private; None if the request does not say."""
    visibility = fields.get("visibility")
    if visibility is None:
        private = fields.get("private")
        return None if private is None else bool(private)
    if visibility not in ("public", "private", "protected"):
        raise bad_request(f"Visibility '{visibility}' is unknown: use public or private.")
    return visibility != "public"


def _parse_full_name(kind: str, repo_id: object, field: str) -> RepoId:
    namespace, separator, name = str(repo_id).partition("/")
    if not separator:
        raise bad_request(f"{field} must be NAMESPACE/NAME.")
    return parse_repo_id(kind, namespace, name)
