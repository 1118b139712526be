"""Creates or updates a comparison Space on a Hub, in one commit. Deletes new, empty repositories after a failure."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...errors import ZooError
from ...fileio import read_json
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import client_errors, reason, status_of, translate_hub_errors
from ...modeling.remote_code import TRUST_CODE_FLAG, needs_remote_code
from .files import CPU, ZERO_GPU, SpaceModels, WheelSource, write_space, write_static
from .model_names import MODELS_FILE, is_model_name

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)
_INITIAL_FILES = {".gitattributes", "README.md"}  # the files that a Hub puts into a new Space
Sdk = Literal["gradio", "static"]


@dataclass(frozen=True)
class Deployment:
    """The result of `deploy`.

    Attributes:
        url: The Space's address.
        commit: Its commit.
        sdk: gradio or static.
        hardware: Its hardware.
        created: Whether the Space is new.
        changed: Whether the deployment made a commit; False if the Space already had the same files.
        private: Whether the Space is private.
        private_models: The private repositories among those that the Space shows.
        refusal: Why the Hub refused a Gradio Space, if this call made a static page for that reason; None otherwise.
    """

    url: str
    commit: str
    sdk: Sdk
    hardware: str
    created: bool
    changed: bool
    private: bool
    private_models: tuple[str, ...]
    refusal: str | None = None


def deploy(
    space: str,
    models: SpaceModels,
    *,
    render_page: Callable[[], str],
    private: bool | None = None,
    builds_spaces: bool = False,
    hub: Hub = DEFAULT_HUB,
) -> Deployment:
    """Creates or updates a Space in one commit.

    A new Space runs Gradio on the free CPU, or else on ZeroGPU. If the account may use neither (the Hub answers 402),
    the Space is a static page. An existing Space keeps its SDK, and any files that no deployment wrote. For a Gradio
    Space, a missing data set of its votes is created with the same visibility. After a failure, new repositories that
    are still empty are deleted.

    Args:
        space: NAMESPACE/NAME.
        models: The models to show.
        render_page: Renders the HTML of a static page.
        private: Whether a new Space is private; None makes it private if any model is. An existing Space keeps its
            visibility, so another value is an error.
        builds_spaces: Whether the Hub builds and runs Spaces; False for a Hub that only stores them.
        hub: The Hub of the Space.

    Raises:
        ZooError: A model needs custom code, the Space is not a comparison page or has another visibility, its files
            cannot be written, or the Hub refuses.
    """
    api, endpoint = hub.api(), hub.address
    _check_no_custom_code(models, hub)
    with translate_hub_errors(f"Cannot look up the models of {space} on {endpoint}", "try again, or check --hub."):
        repos = dict.fromkeys([*(model.repo for model in models.by_role.values()), *models.runs])
        private_models = tuple(repo for repo in repos if api.model_info(repo).private)
    failure_and_remedy = (f"Cannot create the Space {space} on {endpoint}", "check that the token may write there.")
    with translate_hub_errors(*failure_and_remedy):
        existing_space = _find_existing_space(api, space)
    if existing_space is None:
        kind = _SpaceKind("gradio", CPU)
        private = bool(private_models) if private is None else private
    else:
        _check_visibility(space, private, existing_space.private, private_models)
        kind, private = _SpaceKind(existing_space.sdk, existing_space.hardware), existing_space.private
    wheel_source: WheelSource = ("files" if private else "address") if builds_spaces else "path"

    def write(folder: Path, kind: _SpaceKind) -> dict[str, Path]:
        folder.mkdir()
        if kind.sdk == "static":
            write_static(folder, models, render_page())
        else:
            write_space(
                folder, models, wheel_source=wheel_source, space=space, endpoint=endpoint, hardware=kind.hardware
            )
        return _files_in(folder)

    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-space-") as scratch, _delete_on_failure(api) as new_repos:
        files = write(Path(scratch) / "first", kind)  # before the Space is created, because this may fail
        if existing_space is None:
            planned_kind = kind
            with translate_hub_errors(*failure_and_remedy):
                kind = _create_space(api, space, private=private)
            new_repos.append((space, "space"))
            # The account may get other hardware than planned, or only a static page.
            if (kind.sdk, kind.hardware) != (planned_kind.sdk, planned_kind.hardware):
                files = write(Path(scratch) / "second", kind)
        if models.votes is not None and kind.sdk == "gradio":
            new_repos += _create_votes(api, models.votes, private=private)
        with translate_hub_errors(f"Cannot write to the Space {space} on {endpoint}", "try again, or check the token."):
            commit = _commit(api, space, models, files, existing_space)
    return Deployment(
        url=f"{endpoint}/spaces/{space}",
        commit=commit,
        sdk=kind.sdk,
        hardware=kind.hardware,
        created=existing_space is None,
        changed=existing_space is None or commit != existing_space.head,
        private=private,
        private_models=private_models,
        refusal=kind.refusal,
    )


def _create_votes(api: HfApi, votes: str, *, private: bool) -> list[tuple[str, str]]:
    """Creates the data set of votes, which the page would create as a public one. Returns the new repositories."""
    with translate_hub_errors(f"Cannot create the data set {votes} on {api.endpoint}", "check --votes and the token."):
        if api.repo_exists(votes, repo_type="dataset"):
            return []
        api.create_repo(votes, repo_type="dataset", private=private, exist_ok=True)
    return [(votes, "dataset")]


def _check_no_custom_code(models: SpaceModels, hub: Hub) -> None:
    """Checks that no model needs custom code, because nobody can confirm in a Space that the code may run."""
    for model in models.by_role.values():
        with translate_hub_errors(f"Cannot fetch the configuration of {model.repo} from {hub.name}", "try again."):
            infos = hub.api().get_paths_info(model.repo, ["config.json"], revision=model.commit)
            path = hub.file(model.repo, "config.json", revision=model.commit) if infos else None
        if path is not None and needs_remote_code(read_json(path)):
            raise ZooError(
                f"The model {model.name} needs custom code, and a Space has no way to confirm that you trust it: read "
                f"the code, and serve the page here with `rlhf-zoo compare NAME {TRUST_CODE_FLAG}`."
            )


def _files_in(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder: path in the repository -> local path."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


class _SpaceKind(NamedTuple):
    """SDK and hardware of a Space. `refusal` is the Hub's reason if it refused a Gradio Space."""

    sdk: Sdk
    hardware: str
    refusal: str | None = None


@contextmanager
def _delete_on_failure(api: HfApi) -> Iterator[list[tuple[str, str]]]:
    """Yields a list to which the caller adds the (id, type) of new repositories. On failure, deletes the empty ones."""
    new_repos: list[tuple[str, str]] = []
    try:
        yield new_repos
    except BaseException:
        for repo, repo_type in new_repos:
            try:
                if set(api.list_repo_files(repo, repo_type=repo_type)) <= _INITIAL_FILES:
                    api.delete_repo(repo, repo_type=repo_type)
            except client_errors() as error:
                log.warning("Cannot delete the new, empty repository %s (%s): delete it yourself.", repo, reason(error))
        raise


class _ExistingSpace(NamedTuple):
    """An existing Space that rlhf-zoo created. `head` is its commit."""

    sdk: Sdk
    hardware: str
    private: bool
    head: str
    files: tuple[str, ...]


def _find_existing_space(api: HfApi, space: str) -> _ExistingSpace | None:
    """Returns the Space of this name; None if there is none. Raises ZooError if rlhf-zoo did not create it."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.space_info(space)
    except RepositoryNotFoundError:
        return None
    files = tuple(sibling.rfilename for sibling in info.siblings or [])
    content = _read_models_file(api, space, str(info.sha)) if MODELS_FILE in files else None
    # A Space without other files was created by a deployment that stopped before its commit.
    if (content is None and not set(files) <= _INITIAL_FILES) or info.sdk not in ("gradio", "static"):
        raise ZooError(f"The Space {space} exists and is not a comparison page: choose another name with --repo.")
    hub_hardware = info.runtime and (info.runtime.requested_hardware or info.runtime.hardware)
    # The embedded Hub reports no hardware, so compare.json has it.
    hardware = hub_hardware or (content or {}).get("hardware") or CPU
    sdk: Sdk = "static" if info.sdk == "static" else "gradio"
    return _ExistingSpace(sdk, str(getattr(hardware, "value", hardware)), bool(info.private), str(info.sha), files)


def _read_models_file(api: HfApi, space: str, commit: str) -> dict[str, Any] | None:
    """Returns the content of compare.json; None if rlhf-zoo did not write it."""
    path = api.hf_hub_download(space, MODELS_FILE, repo_type="space", revision=commit)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        return None
    return content if is_model_name(content.get("ppo")) else None


def _is_deployed_file(name: str) -> bool:
    """Whether a file in the Space may come from an earlier deployment."""
    top = name.partition("/")[0]
    is_wheel = top.startswith("rlhf_zoo-") and top.endswith((".whl", ".dist-info"))
    return is_wheel or top == "rlhf_zoo" or name in ("app.py", "index.html", "requirements.txt")


def _commit(
    api: HfApi, space: str, models: SpaceModels, files: Mapping[str, Path], existing_space: _ExistingSpace | None
) -> str:
    """Replaces the files of an earlier deployment in one commit. Returns the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    old_files = existing_space.files if existing_space else ()
    stale_files = [name for name in old_files if _is_deployed_file(name) and name not in files]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, str(path)) for name, path in files.items()
    ]
    operations += [CommitOperationDelete(name) for name in stale_files]
    commit = api.create_commit(
        space,
        operations,
        repo_type="space",
        commit_message=f"Compare {models.ppo.name} with {models.sft.name}",
        parent_commit=existing_space.head if existing_space else None,
    )
    return str(commit.oid)


def _create_space(api: HfApi, space: str, *, private: bool) -> _SpaceKind:
    """Creates the Space with the best SDK and hardware that the Hub grants this account."""
    from huggingface_hub import SpaceHardware
    from huggingface_hub.errors import HfHubHTTPError

    options: dict[str, Any] = {"repo_type": "space", "private": private}
    try:
        api.create_repo(space, space_sdk="gradio", **options)
        return _SpaceKind("gradio", CPU)
    except HfHubHTTPError as error:
        if status_of(error) != 402:
            raise
        refusal = reason(error)
    try:
        api.create_repo(space, space_sdk="gradio", space_hardware=SpaceHardware(ZERO_GPU), **options)
        return _SpaceKind("gradio", ZERO_GPU)
    except HfHubHTTPError as error:
        if status_of(error) not in (400, 402, 403):  # statuses for an account without ZeroGPU quota
            raise
    api.create_repo(space, space_sdk="static", **options)
    return _SpaceKind("static", CPU, refusal)


def _check_visibility(space: str, wants_private: bool | None, is_private: bool, private_models: Sequence[str]) -> None:
    if wants_private is None and private_models and not is_private:
        raise ZooError(
            f"{private_models[0]} is private but the Space {space} is public: pass --public to show it anyway."
        )
    if wants_private is not None and wants_private != is_private:
        visibility, flag = ("private", "--public") if is_private else ("public", "--private")
        raise ZooError(
            f"The Space {space} is {visibility}, which {flag} cannot change: change it in the Space's settings."
        )
