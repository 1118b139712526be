"""Sending checkpoints, cards and data sets: one commit each, and a tag by which a checkpoint can be pulled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..record import StageRecord, checkpoint_step, now, read_json, write_json

__all__ = [
    "PUBLISHED",
    "check_access",
    "publish_checkpoint",
    "publish_folder",
    "tag_name",
    "tag_revision",
    "unpublished",
]

PUBLISHED = "published.json"
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


def check_access(namespace: str | None) -> str:
    """Asks the Hub who we are, before anything is trained. Returns the namespace to publish under.

    Raises ZooError when the Hub cannot be reached or does not accept the token.
    """
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        me = HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise ZooError(
            f"There is no token for {constants.ENDPOINT}: log in with `hf auth login`, or set HF_TOKEN."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise ZooError(
                f"{constants.ENDPOINT} does not accept the token: make a new one with the role write."
            ) from error
        raise ZooError(
            f"{constants.ENDPOINT} answers with an error ({status}): try again later, or use --hub local."
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise ZooError(
            f"The Hub {constants.ENDPOINT} cannot be reached ({type(error).__name__}): check the address and the "
            "network, or use --hub local."
        ) from error
    role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise ZooError(f"The token for {constants.ENDPOINT} may only read: publishing needs one with the role write.")
    return namespace or me["name"]


def publish_folder(folder: Path, repo_id: str, *, repo_type: str, message: str) -> str:
    """Sends a folder as one commit, creating the repository if need be. Returns the commit."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return _commit(repo_id, repo_type, files, message)


def publish_checkpoint(
    checkpoint: Path, repo_id: str, *, beside: Mapping[str, Path], message: str, private: bool = False
) -> dict[str, str]:
    """Sends one complete checkpoint as one commit with one tag, and notes it in published.json.

    beside: further files, path in the repository -> local path (card, metrics, recipe). Returns {repo, commit, tag}.
    A run that was killed between commit and tag sends nothing twice: an unchanged commit is not made again.
    """
    files = {str(path.relative_to(checkpoint)): path for path in _sent(checkpoint)}
    commit = _commit(repo_id, "model", {**files, **beside}, message, private=private)
    tag = tag_name(checkpoint_step(checkpoint))
    tag_revision(repo_id, tag, commit, message)
    published = {"repo": repo_id, "commit": commit, "tag": tag, "time": now()}
    write_json(checkpoint / PUBLISHED, published)
    return published


def _sent(checkpoint: Path) -> Iterable[Path]:
    folders = [checkpoint, checkpoint / "critic"]
    found = {path for folder in folders for pattern in SENT for path in folder.glob(pattern)}
    return sorted(path for path in found if path.suffix not in (".pt", ".pth", ".bin"))


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


def _commit(repo_id: str, repo_type: str, files: Mapping[str, Path], message: str, *, private: bool = False) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    api.create_repo(repo_id, repo_type=repo_type, exist_ok=True, private=private)
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in sorted(files.items())
    ]
    return api.create_commit(repo_id, operations, commit_message=message, repo_type=repo_type).oid


def unpublished(record: StageRecord) -> list[Path]:
    """Complete checkpoints that no Hub has acknowledged yet, oldest first."""
    return [path for path in record.checkpoints() if not (path / PUBLISHED).is_file()]


def published_tags(record: StageRecord) -> dict[str, str]:
    """Tag -> commit of what was sent."""
    sent = [read_json(path / PUBLISHED) for path in record.checkpoints() if (path / PUBLISHED).is_file()]
    return {entry["tag"]: entry["commit"] for entry in sent}
