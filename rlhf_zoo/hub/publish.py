"""Sending checkpoints, cards and data sets: one commit each, and a tag by which a checkpoint can be pulled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ZooError
from ..record import StageRecord, checkpoint_step, now, read_json, write_json
from .refusals import client_errors, reason

__all__ = [
    "PUBLISHED",
    "RECIPE_FILE",
    "check_access",
    "drop_tags",
    "publish_checkpoint",
    "publish_folder",
    "published_recipe",
    "published_tags",
    "tag_name",
    "tag_revision",
    "unpublished",
]

PUBLISHED = "published.json"
RECIPE_FILE = "recipe.json"
# What a checkpoint is to others; optimizer, scheduler and random states stay at home.
SENT = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.*",
    "merges.txt",
    "ppo_state.json",
)


def tag_name(step: int) -> str:
    """step-000040: sorts as text in the order of the steps."""
    return f"step-{step:06d}"


def check_access(namespace: str | None, *, token_from: str = "HF_TOKEN") -> str:
    """Asks the Hub who we are, before anything is trained. Returns the namespace to publish under.

    token_from: the environment variable that a token for this Hub is read from. Raises ZooError when the Hub cannot be
    reached or does not accept the token.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        me = HfApi().whoami()
    except LocalTokenNotFoundError as error:
        mend = "log in with `hf auth login`, or set HF_TOKEN" if token_from == "HF_TOKEN" else f"set {token_from}"
        raise ZooError(f"There is no token for {constants.ENDPOINT}: {mend}.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise ZooError(
                f"{constants.ENDPOINT} does not accept the token: make a new one with the role write, and set "
                f"{token_from}."
            ) from error
        raise ZooError(
            f"{constants.ENDPOINT} answers with an error ({status}): try again later, or use --hub local."
        ) from error
    except client_errors() as error:
        raise ZooError(
            f"The Hub {constants.ENDPOINT} cannot be reached ({reason(error)}): check the address and the network, or "
            "use --hub local."
        ) from error
    role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ZooError(f"The token for {constants.ENDPOINT} may only read: publishing needs one with the role write.")
    return namespace or me["name"]


def publish_folder(folder: Path, repo_id: str, *, repo_type: str, message: str, private: bool = False) -> str:
    """Sends a folder as one commit, creating the repository if need be. Returns the commit."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return _commit(repo_id, repo_type, files, message, private=private)


def publish_checkpoint(
    checkpoint: Path, repo_id: str, *, hub: str, beside: Mapping[str, Path], message: str, private: bool = False
) -> dict[str, str]:
    """Sends one complete checkpoint as one commit with one tag, and notes it in published.json.

    hub: what run.json calls the Hub. beside: further files, path in the repository -> local path (card, metrics,
    recipe). Returns {hub, repo, commit, tag, time}.
    A run that was killed between commit and tag sends nothing twice: an unchanged commit is not made again.
    """
    files = {str(path.relative_to(checkpoint)): path for path in _sent(checkpoint)}
    commit = _commit(repo_id, "model", {**files, **beside}, message, private=private, whole=True)
    tag = tag_name(checkpoint_step(checkpoint))
    tag_revision(repo_id, tag, commit, message)
    published = {"hub": hub, "repo": repo_id, "commit": commit, "tag": tag, "time": now()}
    write_json(checkpoint / PUBLISHED, published)
    return published


def _sent(checkpoint: Path) -> Iterable[Path]:
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return sorted(path for path in files if _is_sent(str(path.relative_to(checkpoint))))


def _is_sent(name: str) -> bool:
    path = PurePosixPath(name)
    if str(path.parent) not in (".", "critic") or path.suffix in (".pt", ".pth", ".bin"):
        return False
    return any(path.match(pattern) for pattern in SENT)


def published_recipe(repo_id: str) -> dict[str, Any] | None:
    """recipe.json at the head of a repository, or None where there is no repository or no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    try:
        return read_json(hf_hub_download(repo_id, RECIPE_FILE))
    except (RepositoryNotFoundError, EntryNotFoundError):
        return None


def drop_tags(repo_id: str) -> None:
    """Deletes every tag of a repository that another run is about to fill."""
    from huggingface_hub import HfApi

    api = HfApi()
    for ref in api.list_repo_refs(repo_id).tags:
        api.delete_tag(repo_id, tag=ref.name)


def tag_revision(repo_id: str, tag: str, commit: str, message: str) -> None:
    """Points `tag` at `commit`, moving it if a run that was restarted had left it elsewhere."""
    from huggingface_hub import HfApi

    api = HfApi()
    existing = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}
    if existing.get(tag) == commit:
        return
    if tag in existing:
        api.delete_tag(repo_id, tag=tag)
    api.create_tag(repo_id, tag=tag, revision=commit, tag_message=message)


def _commit(
    repo_id: str,
    repo_type: str,
    files: Mapping[str, Path],
    message: str,
    *,
    private: bool = False,
    whole: bool = False,
) -> str:
    """whole: `files` are all that a checkpoint has, so what an earlier one left beside them (an adapter) goes."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(repo_id, repo_type=repo_type, exist_ok=True, private=private)
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in sorted(files.items())
    ]
    if whole:
        stale = [name for name in api.list_repo_files(repo_id) if _is_sent(name) and name not in files]
        operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    return api.create_commit(repo_id, operations, commit_message=message, repo_type=repo_type).oid


def unpublished(record: StageRecord, repo_id: str, *, hub: str) -> list[Path]:
    """Complete checkpoints that this Hub has not acknowledged under `repo_id` yet, oldest first."""
    return [path for path in record.checkpoints() if not _acknowledged(path, repo_id, hub)]


def published_tags(record: StageRecord, repo_id: str, *, hub: str) -> dict[str, str]:
    """Tag -> commit of what was sent to this Hub under `repo_id`."""
    found = (_acknowledged(path, repo_id, hub) for path in record.checkpoints())
    return {sent["tag"]: sent["commit"] for sent in found if sent}


def _acknowledged(checkpoint: Path, repo_id: str, hub: str) -> dict[str, str]:
    """published.json if it speaks of this repository on this Hub, else {}."""
    path = checkpoint / PUBLISHED
    sent = read_json(path) if path.is_file() else {}
    return sent if (sent.get("repo"), sent.get("hub")) == (repo_id, hub) else {}
