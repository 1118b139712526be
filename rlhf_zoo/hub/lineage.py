"""From a PPO checkpoint to the models it came from, as its rlhf_card.json names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ZooError
from .card import CARD_FILE
from .facts import finite, hub_id
from .pull import pull

__all__ = ["Lineage", "Source", "find_lineage"]


@dataclass(frozen=True)
class Source:
    """A model: its name as a user wrote it or as a card names it, and the folder it was fetched into."""

    name: str
    path: Path


@dataclass(frozen=True)
class Lineage:
    """A PPO checkpoint with its SFT and reward model; reward is None where it was trained without one.

    card: the checkpoint's rlhf_card.json, {} without one, as its publisher wrote it: its texts are data.
    """

    ppo: Source
    sft: Source
    reward: Source | None
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> list[str]:
        """Held-out prompts that its evaluation used."""
        found = self.card.get("prompts")
        return [prompt for prompt in found if isinstance(prompt, str)] if isinstance(found, list) else []

    @property
    def simulated(self) -> bool:
        return self.card.get("simulated") is True

    @property
    def kl(self) -> Mapping[str, Any] | None:
        """KL to SFT over held-out completions, in nats per completion: {value, ci95, n}; None if not measured."""
        found: Any = self.card
        for key in ("evaluation", "ppo", "kl"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) and finite(found.get("value")) else None

    def setting(self, key: str, default: float) -> float:
        """A number among the settings that it was trained with."""
        settings = self.card.get("settings")
        value = settings.get(key) if isinstance(settings, Mapping) else None
        return value if finite(value) and value is not None else default


def find_lineage(ppo: str, *, sft: str | None = None, reward: str | None = None) -> Lineage:
    """Fetches a PPO checkpoint, NAMESPACE/NAME[@TAG] or a folder, and the models of its lineage at their commits.

    sft and reward take the place of what the lineage names. Raises ZooError where a model cannot be had, where the
    checkpoint is not one of PPO, and where nothing names its SFT model.
    """
    source = _fetch(ppo)
    card = _read_card(source)
    if card.get("stage", "ppo") != "ppo":
        raise ZooError(
            f"{ppo} is a checkpoint of the stage {card['stage']}, not of PPO: give the PPO model that came of it."
        )
    base = _fetch(sft) if sft is not None else _parent(source, card, "sft")
    if base is None:
        raise ZooError(f"{ppo} does not say which SFT model it started from: name it with --sft.")
    scorer = _fetch(reward) if reward is not None else _parent(source, card, "reward")
    return Lineage(source, base, scorer, card)


def _fetch(name: str) -> Source:
    return Source(name, Path(name) if Path(name).is_dir() else pull(name))


def _read_card(source: Source) -> dict[str, Any]:
    path = source.path / CARD_FILE
    if not path.is_file():
        return {}
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ZooError(f"{CARD_FILE} of {source.name} is not JSON ({error}): publish its card again.") from error
    if not isinstance(card, dict):
        raise ZooError(f"{CARD_FILE} of {source.name} holds no object: publish its card again.")
    return card


def _parent(child: Source, card: Mapping[str, Any], role: str) -> Source | None:
    parents = card.get("parents")
    parent = parents.get(role) if isinstance(parents, Mapping) else None
    if not isinstance(parent, Mapping):
        return None
    repo, commit = hub_id(parent.get("repo")), parent.get("commit")
    what = {"sft": "SFT", "reward": "reward"}[role]
    if repo is None:
        raise ZooError(f"The {what} model of {child.name} was never published: name a copy of it with --{role}.")
    name = f"{repo}@{commit}" if commit else repo
    try:
        return Source(name, pull(name))
    except ZooError as error:
        reason = str(error).rstrip(".")
        raise ZooError(
            f"The {what} model of {child.name} cannot be had ({reason}): name another with --{role}."
        ) from error
