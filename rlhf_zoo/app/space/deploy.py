"""A comparison Space is made or updated on a Hub: checked first, in one commit, and nothing empty is left behind."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    """What `deploy` did. changed: whether it took a commit. hidden: the models that only a token may read.

    refused: why the Hub takes no Gradio Space of this account, where the page is static for that.
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
    """Makes or updates the Space NAMESPACE/NAME in one commit.

    A new Space is a Gradio one on the free CPU, else on ZeroGPU; where the account may have neither (402), a static
    page, the HTML that `page()` gives. A Space that is there keeps its kind, and what others put into it. A Gradio one
    has the data set of its votes made too, as private as itself. private None: as the models are, where the Space is
    new. builds: whether the Hub runs Spaces.

    Its files are written before the Space is made, and what was made is deleted again where the commit does not come.

    Raises ZooError where a Space of this name is not ours, where its visibility is another than asked for, where its
    files cannot be written, and where the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api, endpoint = hub.api(), hub.address
    check_code(models, hub)
    with refusals_as(f"The models of {space} cannot be looked at on {endpoint}", "try again, or check --hub."):
        shown = dict.fromkeys([*(model.repo for model in models.roles.values()), *models.runs])
        hidden = tuple(repo for repo in shown if api.model_info(repo).private)
    refused = None
    not_made = f"The Space {space} cannot be made on {endpoint}", "check that the token may write there."
    with refusals_as(*not_made):
        there = _look(api, space)
    sdk: Sdk
    if there is None:
        private, sdk, hardware = bool(hidden) if private is None else private, "gradio", CPU
    else:
        _check_visibility(space, private, there.private, hidden)
        private, sdk, hardware = there.private, there.sdk, there.hardware
    layout: Layout = "path" if not builds else "files" if private else "address"

    def write(folder: Path) -> dict[str, Path]:
        folder.mkdir()
        if sdk == "static":
            write_static(folder, models, page())
        else:
            write_space(folder, models, space=space, endpoint=endpoint, layout=layout, hardware=hardware)
        return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}

    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-space-") as scratch, _taken_back(api) as made:
        files = write(Path(scratch) / "first")
        if there is None:
            planned = sdk, hardware
            with refusals_as(*not_made):
                sdk, hardware, refused = _create(api, space, private=private)
            made.append((space, "space"))
            if (sdk, hardware) != planned:
                files = write(Path(scratch) / "second")
        if models.votes is not None and sdk == "gradio":
            # The page would make it public, whoever sees the Space.
            with refusals_as(
                f"The data set {models.votes} cannot be made on {endpoint}", "check --votes and the token."
            ):
                if not api.repo_exists(models.votes, repo_type="dataset"):
                    api.create_repo(models.votes, repo_type="dataset", private=private, exist_ok=True)
                    made.append((models.votes, "dataset"))
        stale = [name for name in (there.files if there else ()) if _is_ours(name) and name not in files]
        operations: list[Any] = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        with refusals_as(f"The Space {space} cannot be written to on {endpoint}", "try again, or check the token."):
            done = api.create_commit(
                space,
                operations,
                repo_type="space",
                commit_message=f"Compare {models.ppo.name} with {models.sft.name}",
                parent_commit=there.head if there else None,
            )
    return Deployed(
        url=f"{endpoint}/spaces/{space}",
        commit=done.oid,
        sdk=sdk,
        hardware=hardware,
        created=there is None,
        changed=there is None or done.oid != there.head,
        private=private,
        hidden=hidden,
        refused=refused,
    )


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
    files = tuple(one.rfilename for one in info.siblings or [])
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
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None  # not ours: we write nothing but JSON
    if not isinstance(found, dict) or type(found.get("schema")) is not int:
        return None
    return found if is_model(found.get("ppo")) else None


def _is_ours(name: str) -> bool:
    """Whether an earlier deployment may have put this file there."""
    top = name.partition("/")[0]
    wheel = top.startswith("rlhf_zoo-") and top.endswith((".whl", ".dist-info"))
    return wheel or top == "rlhf_zoo" or name in ("app.py", "index.html", "requirements.txt")


def _create(api: Any, space: str, *, private: bool) -> tuple[Sdk, str, str | None]:
    """(kind, hardware, why no Gradio Space) of a Space that was made now."""
    from huggingface_hub.errors import HfHubHTTPError

    options = {"repo_type": "space", "private": private}
    try:
        api.create_repo(space, space_sdk="gradio", **options)
        return "gradio", CPU, None
    except HfHubHTTPError as error:
        if status_of(error) != 402:
            raise
        refused = reason(error)
    try:
        api.create_repo(space, space_sdk="gradio", space_hardware=ZERO_GPU, **options)
        return "gradio", ZERO_GPU, None
    except HfHubHTTPError as error:
        if status_of(error) not in (400, 402, 403):  # by which a Hub says that this account has no ZeroGPU (left)
            raise
    api.create_repo(space, space_sdk="static", **options)
    return "static", CPU, refused


def _check_visibility(space: str, asked: bool | None, private: bool, hidden: Sequence[str]) -> None:
    if asked is None and hidden and not private:
        raise ZooError(f"{hidden[0]} is private and the Space {space} is not: --public shows it to everybody.")
    if asked is not None and asked != private:
        is_now, flag = ("private", "--public") if private else ("public", "--private")
        raise ZooError(f"The Space {space} is {is_now}, which {flag} does not change: change it in its settings.")
