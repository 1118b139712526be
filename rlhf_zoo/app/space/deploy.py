"""A comparison Space is made or updated on a Hub: checked first, in one commit, and nothing empty is left behind."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import ZooError
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.refusals import client_errors, reason, refusals_as, status_of
from .chosen import CHOSEN, is_model
from .files import CPU, ZERO_GPU, Layout, SpaceModels, check_code, write_space, write_static

log = logging.getLogger(__name__)
_UNTOUCHED = {".gitattributes", "README.md"}  # all that a Hub puts into a new Space
Sdk = Literal["gradio", "static"]


@dataclass(frozen=True)
class Deployed:
    """What `deploy` did.

    Attributes:
        url: The Space's address.
        commit: Its commit.
        sdk: gradio or static.
        hardware: What it runs on.
        created: Whether the Space is new.
        changed: Whether it took a commit.
        private: Whether the Space is private.
        hidden: The models that only a token may read.
        refused: Why the Hub takes no Gradio Space of this account, where the page is static for that.
    """

    url: str
    commit: str
    sdk: Sdk
    hardware: str
    created: bool
    changed: bool
    private: bool
    hidden: tuple[str, ...]
    refused: str | None = None


def deploy(
    space: str,
    models: SpaceModels,
    *,
    page: Callable[[], str],
    private: bool | None = None,
    builds: bool = False,
    hub: Hub = CLIENT,
) -> Deployed:
    """Makes or updates a Space in one commit.

    A new Space is a Gradio one on the free CPU, else on ZeroGPU; where the account may have neither (402), a static
    page. An existing Space keeps its kind, and the files that others put into it. For a Gradio one the data set of its
    votes is made too, as private as the Space.

    Its files are written before the Space is made, and what was made is deleted again where the commit fails.

    Args:
        space: NAMESPACE/NAME.
        models: What it shows.
        page: Makes the HTML of a static page.
        private: Whether a new Space is private; None takes it from the models.
        builds: Whether the Hub runs Spaces.
        hub: Where it is made.

    Raises:
        ZooError: A Space of this name is not ours, its visibility is another than asked for, its files cannot be
            written, or the Hub refuses.
    """
    api, endpoint = hub.api(), hub.address
    check_code(models, hub)
    with refusals_as(f"The models of {space} cannot be looked at on {endpoint}", "try again, or check --hub."):
        shown = dict.fromkeys([*(model.repo for model in models.roles.values()), *models.runs])
        hidden = tuple(repo for repo in shown if api.model_info(repo).private)
    not_made = f"The Space {space} cannot be made on {endpoint}", "check that the token may write there."
    with refusals_as(*not_made):
        existing = _look(api, space)
    if existing is None:
        kind, private = _Kind("gradio", CPU), bool(hidden) if private is None else private
    else:
        _check_visibility(space, private, existing.private, hidden)
        kind, private = _Kind(existing.sdk, existing.hardware), existing.private
    layout: Layout = "path" if not builds else "files" if private else "address"

    def write(folder: Path) -> dict[str, Path]:
        folder.mkdir()
        if kind.sdk == "static":
            write_static(folder, models, page())
        else:
            write_space(folder, models, space=space, endpoint=endpoint, layout=layout, hardware=kind.hardware)
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}

    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-space-") as scratch, _taken_back(api) as made:
        files = write(Path(scratch) / "first")
        if existing is None:
            planned = kind
            with refusals_as(*not_made):
                kind = _create(api, space, private=private)
            made.append((space, "space"))
            if (kind.sdk, kind.hardware) != (planned.sdk, planned.hardware):
                files = write(Path(scratch) / "second")
        if models.votes is not None and kind.sdk == "gradio":
            # The page would make it public, whoever sees the Space.
            with refusals_as(
                f"The data set {models.votes} cannot be made on {endpoint}", "check --votes and the token."
            ):
                if not api.repo_exists(models.votes, repo_type="dataset"):
                    api.create_repo(models.votes, repo_type="dataset", private=private, exist_ok=True)
                    made.append((models.votes, "dataset"))
        with refusals_as(f"The Space {space} cannot be written to on {endpoint}", "try again, or check the token."):
            commit = _commit(api, space, models, files, existing)
    return Deployed(
        url=f"{endpoint}/spaces/{space}",
        commit=commit,
        sdk=kind.sdk,
        hardware=kind.hardware,
        created=existing is None,
        changed=existing is None or commit != existing.head,
        private=private,
        hidden=hidden,
        refused=kind.refused,
    )


class _Kind(NamedTuple):
    """What a Space runs on. refused: why it is no Gradio Space, in the Hub's words, where it was meant to be one."""

    sdk: Sdk
    hardware: str
    refused: str | None = None


@contextmanager
def _taken_back(api: Any) -> Iterator[list[tuple[str, str]]]:
    """Deletes again what the body notes as made, (id, type), where it fails before it has put files there."""
    made: list[tuple[str, str]] = []
    try:
        yield made
    except BaseException:
        for repo, kind in made:
            try:
                if set(api.list_repo_files(repo, repo_type=kind)) <= _UNTOUCHED:
                    api.delete_repo(repo, repo_type=kind)
            except client_errors() as error:
                log.warning("%s was made and is empty, and cannot be deleted (%s): delete it.", repo, reason(error))
        raise


class _Space(NamedTuple):
    """A Space of ours that is there already."""

    sdk: Sdk
    hardware: str
    private: bool
    head: str
    files: tuple[str, ...]


def _look(api: Any, space: str) -> _Space | None:
    """The Space of this name, None where there is none; raises ZooError where it is not one of ours."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.space_info(space)
    except RepositoryNotFoundError:
        return None
    files = tuple(sibling.rfilename for sibling in info.siblings or [])
    chosen = _read_chosen(api, space, info.sha) if CHOSEN in files else None
    # One that is as new was made by a run that was cut off before its commit.
    if (chosen is None and not set(files) <= _UNTOUCHED) or info.sdk not in ("gradio", "static"):
        raise ZooError(f"The Space {space} holds something else than our comparison: give another name with --repo.")
    runs_on = info.runtime and (info.runtime.requested_hardware or info.runtime.hardware)
    hardware = runs_on or (chosen or {}).get("hardware") or CPU
    return _Space(info.sdk, str(getattr(hardware, "value", hardware)), bool(info.private), info.sha, files)


def _read_chosen(api: Any, space: str, commit: str) -> dict[str, Any] | None:
    path = api.hf_hub_download(space, CHOSEN, repo_type="space", revision=commit)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None  # not ours: we write nothing but JSON
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        return None
    return content if is_model(content.get("ppo")) else None


def _is_ours(name: str) -> bool:
    """Whether an earlier deployment may have put this file there."""
    top = name.partition("/")[0]
    wheel = top.startswith("rlhf_zoo-") and top.endswith((".whl", ".dist-info"))
    return wheel or top == "rlhf_zoo" or name in ("app.py", "index.html", "requirements.txt")


def _commit(api: Any, space: str, models: SpaceModels, files: Mapping[str, Path], existing: _Space | None) -> str:
    """Puts the files into the Space, and takes out those of an earlier deployment. Returns the commit's id."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    stale = [name for name in (existing.files if existing else ()) if _is_ours(name) and name not in files]
    operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    operations += [CommitOperationDelete(name) for name in stale]
    commit = api.create_commit(
        space,
        operations,
        repo_type="space",
        commit_message=f"Compare {models.ppo.name} with {models.sft.name}",
        parent_commit=existing.head if existing else None,
    )
    return str(commit.oid)


def _create(api: Any, space: str, *, private: bool) -> _Kind:
    """Makes the Space, of the best kind that the Hub grants this account."""
    from huggingface_hub.errors import HfHubHTTPError

    options = {"repo_type": "space", "private": private}
    try:
        api.create_repo(space, space_sdk="gradio", **options)
        return _Kind("gradio", CPU)
    except HfHubHTTPError as error:
        if status_of(error) != 402:
            raise
        refused = reason(error)
    try:
        api.create_repo(space, space_sdk="gradio", space_hardware=ZERO_GPU, **options)
        return _Kind("gradio", ZERO_GPU)
    except HfHubHTTPError as error:
        if status_of(error) not in (400, 402, 403):  # by which a Hub says that this account has no ZeroGPU (left)
            raise
    api.create_repo(space, space_sdk="static", **options)
    return _Kind("static", CPU, refused)


def _check_visibility(space: str, asked: bool | None, private: bool, hidden: Sequence[str]) -> None:
    if asked is None and hidden and not private:
        raise ZooError(f"{hidden[0]} is private and the Space {space} is not: --public shows it to everybody.")
    if asked is not None and asked != private:
        is_now, flag = ("private", "--public") if private else ("public", "--private")
        raise ZooError(f"The Space {space} is {is_now}, which {flag} does not change: change it in its settings.")
