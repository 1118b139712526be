"""Web pages for a browser: a list of repositories, and a page for each with its card, files, branches and tags.

The pages are read-only, have no scripts, and request nothing from other hosts. Jinja escapes all text.
"""

from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import quote, unquote

from ..markdown import MAX_CARD_BYTES, card_body, render_card, split_address
from .access import Api, resolve_commit
from .describe import describe
from .faults import Fault
from .git import MAIN, Entry, GitRepository
from .messages import Request, Response
from .names import KINDS, RepoId, parse_repo_id
from .routing import Router

_MAX_ROWS = 1000  # of each list: repositories of a kind, a repository's files, tags, and branches
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_SECURITY_POLICY = "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_TITLES = {"model": "Models", "dataset": "Data sets", "space": "Spaces"}


class PagesApi(Api):
    """The pages."""

    def register(self, router: Router) -> None:
        router.add("GET", "/", self._front_page)
        router.add("GET", "/{page}", self._page)
        router.add("GET", "/{page}/{view}/{revision}", self._page)

    def _front_page(self, request: Request) -> Response:
        """Lists the repositories that the caller may see, the most recently changed first."""
        rows_by_title = {_TITLES[kind]: self._list_rows(request, kind) for kind in KINDS}
        title = "rlhf-zoo embedded Hub"
        return _render("index.html.jinja", title=title, rows_by_title=rows_by_title, limit=_MAX_ROWS)

    def _list_rows(self, request: Request, kind: str) -> list[dict[str, Any]]:
        rows = []
        for repo in self._storage.repositories(kind):
            with self._storage.skip_damaged(repo):
                settings = self._storage.settings(repo)
                if not self._access.can_see(request, settings):
                    continue
                expand = ("lastModified", "pipeline_tag")
                with self._storage.git(repo) as git:
                    properties = describe(self._storage, repo, settings, git, git.head(), expand=expand)
                modified, task = properties["lastModified"], properties.get("pipeline_tag", "")
                rows.append({"name": str(repo), "url": f"/{quote(repo.page_path)}", "modified": modified, "task": task})
        return sorted(rows, key=lambda row: row["modified"], reverse=True)

    def _page(self, request: Request, repo: RepoId, view: str = "tree", revision: str = MAIN) -> Response:
        """Shows a repository at a revision, at the addresses that clients print."""
        settings = self._access.require_read(request, repo)
        if view not in ("tree", "commit"):
            raise Fault(404, "The embedded Hub has no such page.")
        with self._storage.git(repo) as git:
            commit = resolve_commit(git, revision)
            properties = describe(self._storage, repo, settings, git, commit, expand=("lastModified", "tags"))
            files = git.files(commit)
            base_url = f"/{quote(repo.page_path)}/resolve/{commit}/"
            return _render(
                "repository.html.jinja",
                title=str(repo),
                kind=_TITLES[repo.kind],
                url=f"/{quote(repo.page_path)}",
                revision=revision,
                commit=commit,
                private=settings.private,
                modified=properties["lastModified"],
                labels=properties["tags"],
                refs=[
                    (title, [(ref.name, quote(ref.name, safe="")) for ref in git.refs(prefix)][:_MAX_ROWS])
                    for title, prefix in (("Tags", "refs/tags/"), ("Branches", "refs/heads/"))
                ],
                card=_render_readme(git, files, base_url, cache(lambda name: self._repository_url(request, name))),
                files=[
                    (entry.path, f"{git.blob_info(entry.oid).size:,}", base_url + quote(entry.path))
                    for entry in files[:_MAX_ROWS]
                ],
                file_count=len(files),
                limit=_MAX_ROWS,
            )

    def _repository_url(self, request: Request, name: str) -> str | None:
        """Returns the page of NAMESPACE/NAME; None unless the caller may see exactly one repository of that name."""
        parts = name.split("/")
        if len(parts) != 2:
            return None
        urls = []
        for kind in KINDS:
            try:
                repo = parse_repo_id(kind, *parts)
            except Fault:  # not a repository's name, but other code with a slash
                return None
            with self._storage.skip_damaged(repo):
                if self._storage.exists(repo) and self._access.can_see(request, self._storage.settings(repo)):
                    urls.append(f"/{quote(repo.page_path)}")
        return urls[0] if len(urls) == 1 else None


class _CardResolver:
    """Resolves the relative addresses in a card to files of the same commit, below `base_url`.

    Cards name models and data sets of the embedded Hub as inline code. This class links such code to their pages.
    """

    def __init__(self, files: list[Entry], base_url: str, repository_url: Callable[[str], str | None]) -> None:
        self._paths = {entry.path for entry in files}
        self._base_url = base_url
        self.code_link = repository_url

    def link(self, address: str) -> str | None:
        """Returns the address of a file of the repository; None for anything else."""
        parts = split_address(address)
        if parts is None or parts.scheme or parts.netloc:
            return None
        path = unquote(parts.path).removeprefix("./")
        return self._base_url + quote(path) if path in self._paths else None

    def image(self, address: str) -> str | None:
        """Returns the address of an image in the repository; None for others, and for SVG, which can hold scripts."""
        return self.link(address) if address.lower().endswith(_IMAGE_SUFFIXES) else None


def _render_readme(
    git: GitRepository, files: list[Entry], base_url: str, repository_url: Callable[[str], str | None]
) -> Any:
    """Renders README.md as safe HTML; "" if there is none, and a note in place of a README.md that is too long."""
    from markupsafe import Markup

    readme = next((entry for entry in files if entry.path == "README.md"), None)
    if readme is None:
        return ""
    blob_info = git.blob_info(readme.oid)
    if blob_info.pointer is not None or blob_info.size > MAX_CARD_BYTES:
        return "The card is too long to be shown here: open README.md."
    source = card_body(git.blob(readme.oid).decode(errors="replace"))
    return Markup(render_card(source, _CardResolver(files, base_url, repository_url), id_prefix="card-", levels=2))


@cache
def _jinja_environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("rlhf_zoo.hub.server"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _render(template: str, **values: Any) -> Response:
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": _SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(200, headers, _jinja_environment().get_template(template).render(**values).encode(errors="replace"))
