"""Serves and changes branches, tags and history."""

from functools import partial
from html import escape

from .access import Api, resolve_commit
from .describe import commit_date
from .faults import Fault, bad_request, forbidden, revision_not_found
from .git import MAIN, GitRepository, Ref
from .git_writes import Quarantine
from .messages import SMALL_BODY, Request, Response, json_response, member
from .names import OWNER, RepoId, check_ref
from .routing import Router

_PAGE_SIZE = 50


class RefsApi(Api):
    """Branches, tags and commits of a repository."""

    def register(self, router: Router) -> None:
        router.add("GET", "/api/{repo}/refs", self._refs)
        router.add("GET", "/api/{repo}/commits/{revision}", self._commits)
        router.add("POST", "/api/{repo}/branch/{name}", self._create_branch, max_body=SMALL_BODY)
        router.add("DELETE", "/api/{repo}/branch/{name}", partial(self._delete, prefix="refs/heads/"))
        router.add("POST", "/api/{repo}/tag/{revision}", self._create_tag, max_body=SMALL_BODY)
        router.add("DELETE", "/api/{repo}/tag/{name}", partial(self._delete, prefix="refs/tags/"))
        router.add("POST", "/api/{repo}/super-squash/{name}", self._squash, max_body=SMALL_BODY)

    def _refs(self, request: Request, repo: RepoId) -> Response:
        """Lists all branches and tags. Gives the commit of an annotated tag, not the tag object."""
        self._access.require_read(request, repo)

        def as_json(ref: Ref) -> dict[str, str]:
            return {"name": ref.name, "ref": ref.full_name, "targetCommit": ref.commit}

        with self._storage.git(repo) as git:
            answer: dict[str, object] = {
                "branches": [as_json(ref) for ref in git.refs("refs/heads/")],
                "tags": [as_json(ref) for ref in git.refs("refs/tags/")],
                "converts": [],
            }
        if request.flag("include_prs"):
            answer["pullRequests"] = []
        return json_response(answer)

    def _commits(self, request: Request, repo: RepoId, revision: str) -> Response:
        """Lists the history of a revision, newest first, in pages."""
        self._access.require_read(request, repo)
        size = request.number("limit", _PAGE_SIZE, maximum=1000)
        is_formatted = "formatted" in request.values("expand")
        with self._storage.git(repo) as git:
            page: list[dict[str, object]] = []
            for oid, commit in git.history(resolve_commit(git, revision)):
                if len(page) == size:
                    # The address of the next page names this commit, so that new commits do not shift the page.
                    path = request.path.rpartition("/")[0] + f"/{oid}"
                    return json_response(page, headers=request.next_page_header(path))
                title, _, message = commit.message.decode(errors="replace").strip().partition("\n")
                entry: dict[str, object] = {
                    "id": oid,
                    "title": title,
                    "message": message.strip(),
                    "authors": [{"user": OWNER, "avatar": ""}],
                    "date": commit_date(git, oid),
                }
                if is_formatted:
                    entry["formatted"] = {"title": escape(title), "message": escape(message.strip())}
                page.append(entry)
        return json_response(page)

    def _create_branch(self, request: Request, repo: RepoId, name: str) -> Response:
        """Creates a branch at `startingPoint` (main by default). Fault 409 if the branch exists."""
        self._access.require_write(request, repo)
        check_ref(name, kind="branch")
        fields = request.json()
        if fields.get("emptyBranch"):
            raise bad_request("The embedded Hub starts branches at a commit: leave emptyBranch out.")
        with self._storage.lock(repo), self._storage.git(repo) as git:
            commit = resolve_commit(git, member(fields, "startingPoint", str) or MAIN)
            _check_name_is_free(git, name, "branch")
            git.write_ref(f"refs/heads/{name}", commit)
        return json_response({})

    def _delete(self, request: Request, repo: RepoId, name: str, prefix: str) -> Response:
        """Deletes a branch or a tag, depending on `prefix`."""
        self._access.require_write(request, repo)
        if prefix + name == f"refs/heads/{MAIN}":
            raise forbidden("The branch 'main' cannot be deleted; delete the repository instead.")
        with self._storage.lock(repo), self._storage.git(repo) as git:
            if name not in git.ref_names(prefix):  # `ref_names` lists damaged refs too, so that they can be deleted
                raise revision_not_found(name)
            git.delete_ref(prefix + name)
        return json_response({})

    def _create_tag(self, request: Request, repo: RepoId, revision: str) -> Response:
        """Tags a revision. With a message, the tag is annotated. Fault 409 if the tag exists."""
        self._access.require_write(request, repo)
        fields = request.json()
        name = check_ref(fields.get("tag"), kind="tag")
        message = member(fields, "message", str)
        with self._storage.lock(repo), self._storage.git(repo) as git:
            target = commit = resolve_commit(git, revision)
            _check_name_is_free(git, name, "tag")
            if message:
                # An annotated tag is a git object: the ref points to it, and it points to the commit.
                with Quarantine(self._storage.path(repo)) as quarantine:
                    target = quarantine.add_tag(name, commit, message)
                    quarantine.migrate()
            git.write_ref(f"refs/tags/{name}", target)
        return json_response({})

    def _squash(self, request: Request, repo: RepoId, name: str) -> Response:
        """Replaces the history of a branch with a single commit that has the same files."""
        self._access.require_write(request, repo)
        message = member(request.json(), "message", str) or f"Squash the branch '{name}'"
        with self._storage.lock(repo), self._storage.git(repo) as git:
            head = git.branch(name)
            if head is None:
                raise revision_not_found(name)
            with Quarantine(self._storage.path(repo)) as quarantine:
                commit = quarantine.add_commit(git.root_tree(head), [], message)
                quarantine.migrate()
            git.write_ref(f"refs/heads/{name}", commit)
        return json_response({})


def _check_name_is_free(git: GitRepository, name: str, kind: str) -> None:
    """Raises Fault if a branch (or tag) already has this name, or a name that conflicts with it in git."""
    # A ref is a file, so `exp` and `exp/a` exclude each other. A branch and a tag may share a name.
    for existing_name in git.ref_names("refs/heads/" if kind == "branch" else "refs/tags/"):
        if existing_name == name:
            raise Fault(409, f"The {kind} '{name}' already exists.")
        if existing_name.startswith(f"{name}/") or name.startswith(f"{existing_name}/"):
            raise bad_request(f"'{name}' conflicts with '{existing_name}' in git: one name begins with the other.")
