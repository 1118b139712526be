"""Reads rlhf_card.json of a published model without trusting it.

The properties of `Card` return values of the expected type and range, and None otherwise. Control characters in texts
are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...fileio import float_or_none, get_nested, hub_id, int_or_none, is_finite, parse_json
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import client_errors, is_disk_full, reason
from ...hub.client.weights import Origin
from ...runs.registry import PARENT_TITLES, STAGES, parent_title, starts_from_base
from ...runs.settings.declared import default_of
from ..cards.card import CARD_FILE

#: Role of a parent that a card may name -> its title, in the order of the family tree.
ROLE_TITLES = {**PARENT_TITLES, "value": "value model", "data": "data set", "base": "base model"}
#: Maximum size of rlhf_card.json. The card of a run with a hundred checkpoints has about ten thousand bytes.
MAX_CARD_BYTES = 2**22
MAX_LINE = 96  # characters


@dataclass(frozen=True)
class CardEstimate:
    """A measured number on a card.

    Attributes:
        value: The number.
        ci95: Its 95% interval, if the card has one.
        n: Its sample size, if the card has one.
        held_out: Whether the evaluation of the finished run measured it. Otherwise it is the last value that training
            logged.
    """

    value: float
    ci95: tuple[float, float] | None = None
    n: int | None = None
    held_out: bool = True

    @classmethod
    def read(cls, estimate: object) -> CardEstimate | None:
        """Reads an estimate.

        Args:
            estimate: {value, ci95, n}.

        Returns:
            The estimate; None if the value is not a finite number.
        """
        value = float_or_none(get_nested(estimate, "value"))
        if value is None:
            return None
        interval = get_nested(estimate, "ci95")
        is_interval = isinstance(interval, list) and len(interval) == 2 and all(map(is_finite, interval))
        ci95 = (float(interval[0]), float(interval[1])) if is_interval else None
        return cls(value, ci95, int_or_none(get_nested(estimate, "n")))


@dataclass(frozen=True)
class CardParent:
    """A parent that a card names, a model or data set, by repository and commit or by a local folder.

    It also describes the root of a family tree, which no card names.

    Attributes:
        role: Its role among the parents, a key of `ROLE_TITLES`; "" for the root of a tree.
        kind: "model" or "dataset".
        repo: Its repository; None if the card names none.
        commit: Its commit; None if the card names none. For the root of a tree it may be a branch or tag.
        folder: Its local folder; None for a repository.
        title: A title for its role, such as "SFT model".
        gguf: The name and sha256 of the GGUF file that it was unpacked from; None for other models.
    """

    role: str
    kind: str
    repo: str | None = None
    commit: str | None = None
    folder: Path | None = None
    title: str = "this model"
    gguf: str | None = None

    @property
    def name(self) -> str:
        """The folder, else the repository."""
        return str(self.folder) if self.folder is not None else self.repo or ""


class Card(dict[str, Any]):
    """The content of rlhf_card.json, {} without one, with properties that validate their values."""

    @classmethod
    def parse(cls, content: bytes) -> tuple[Card, str | None]:
        """Parses a card.

        Args:
            content: The bytes of rlhf_card.json.

        Returns:
            (the card, None), or ({}, a predicate to follow the model's name, such as "has an rlhf_card.json that is not
            JSON").
        """
        try:
            card = parse_json(content)
        except ValueError:
            return cls(), f"has an {CARD_FILE} that is not JSON"
        if not isinstance(card, dict):
            return cls(), f"has an {CARD_FILE} that is not a JSON object"
        return cls(card), None

    @property
    def stage(self) -> str | None:
        """Name of the stage."""
        return one_line(self.get("stage"))

    @property
    def is_ppo(self) -> bool:
        """Whether it is a PPO card. A card without a stage counts as a PPO card."""
        return self.get("stage", "ppo") == "ppo"

    @property
    def recipe(self) -> str | None:
        """Name of the recipe."""
        return one_line(self.get("recipe"))

    @property
    def base(self) -> str | None:
        """Name of the base model."""
        return one_line(self.get("base_model"))

    @property
    def step(self) -> int | None:
        """The checkpoint's step."""
        return int_or_none(self.get("step"))

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        return int_or_none(self.get("seed"))

    @property
    def simulated(self) -> bool | None:
        """Whether a program simulates the human preferences; None if the card does not say."""
        simulated = self.get("simulated")
        return simulated if isinstance(simulated, bool) else None

    @property
    def date(self) -> str | None:
        """When the run finished, or else started."""
        return iso_date(self.get("finished")) or iso_date(self.get("created"))

    @property
    def prompts(self) -> list[str]:
        """The held-out prompts of its evaluation."""
        prompts = self.get("prompts")
        return [prompt for prompt in prompts if isinstance(prompt, str)] if isinstance(prompts, list) else []

    @property
    def beta(self) -> float | None:
        """The KL coefficient β, or its initial value if it adapts; None if the card has no settings."""
        settings = self.get("settings")
        if not isinstance(settings, Mapping):
            return None
        return float_or_none(settings.get("kl_coef", default_of("ppo", "kl_coef")))

    @property
    def checkpoints(self) -> list[Mapping[str, Any]]:
        """The rows of its table of checkpoints."""
        rows = self.get("checkpoints")
        return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []

    @property
    def parents(self) -> tuple[CardParent, ...]:
        """The parents that it names, in the order of `ROLE_TITLES`. Unknown roles are skipped.

        A parent that was never published, or has an invalid name, has no repository.
        """
        parents = []
        for role in ROLE_TITLES:
            parent = get_nested(self, "parents", role)
            if isinstance(parent, Mapping):
                commit = parent.get("commit")
                commit = commit if isinstance(commit, str) and commit.isascii() and commit.isalnum() else None
                kind = "dataset" if role == "data" else "model"
                is_base_model = role == "sft" and self.started_from_base
                title = parent_title("sft", from_base=True) if is_base_model else ROLE_TITLES[role]
                repo = hub_id(parent.get("repo"))
                parents.append(CardParent(role, kind, repo, commit, title=title, gguf=_gguf_name(parent)))
        return tuple(parents)

    @property
    def started_from_base(self) -> bool:
        """Whether it is a PPO run that started from a model named in its settings."""
        settings = self.get("settings")
        return isinstance(settings, Mapping) and starts_from_base(self.stage, settings)

    @property
    def initial_policy(self) -> str:
        """What sentences call the policy that PPO started from: "SFT", or "the base" if `started_from_base`."""
        return "the base" if self.started_from_base else "SFT"

    @property
    def comparison_title(self) -> str:
        """Title of a page that compares `initial_policy` with PPO."""
        return f"{self.initial_policy[0].upper()}{self.initial_policy[1:]} and PPO, side by side"

    @property
    def origin(self) -> Origin | None:
        """The SFT checkpoint that the run started from; None if the card does not name a published one."""
        sft = next((parent for parent in self.parents if parent.role == "sft"), None)
        return (sft.repo, sft.commit) if sft and sft.repo is not None and sft.commit is not None else None

    @property
    def figures(self) -> dict[str, float]:
        """Name -> number, for the figures that a family tree shows of this stage."""
        stage = STAGES.get(self.stage or "")
        step = self.get("step")
        checkpoint = next((row for row in self.checkpoints if step is not None and row.get("step") == step), {})
        # `Stage.figures` holds paths into the card, in which "checkpoints" means the row of this step.
        document = {**self, "checkpoints": checkpoint}
        figures = {name: get_nested(document, *path) for name, path in stage.figures.items()} if stage else {}
        return {name: value for name, value in figures.items() if is_finite(value)}

    def estimate(self, *path: str) -> CardEstimate | None:
        """Returns an estimate of its evaluation; None if the evaluation does not have it.

        Args:
            *path: The keys that lead to it.
        """
        return CardEstimate.read(get_nested(self, "evaluation", *path))


def _gguf_name(parent: Mapping[str, Any]) -> str | None:
    digest, name = parent.get("gguf"), parent.get("folder")
    if not isinstance(digest, str):
        return None
    return f"{clean(name)}, sha256 {clean(digest)}" if isinstance(name, str) else f"sha256 {clean(digest)}"


def clean(text: str, max_length: int = 120) -> str:
    """Makes an untrusted text safe to print: replaces line breaks, terminal control characters and direction marks.

    Args:
        text: Any text, such as one from a card.
        max_length: Maximum length in characters. A longer text is truncated.
    """
    printable = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return printable if len(printable) <= max_length else printable[: max_length - 1] + "…"


def one_line(value: object) -> str | None:
    """Returns a value of a card as text of at most `MAX_LINE` characters that is safe to print.

    Args:
        value: The value, which is not trusted.

    Returns:
        The text; None if the value is not text or is empty.
    """
    text = value[: MAX_LINE + 1].strip() if isinstance(value, str) else ""
    return clean(text, MAX_LINE) or None


def iso_date(value: Any) -> str | None:
    """Converts a time in ISO 8601 to UTC, without fractions of a second; None if the value is not such a time.

    Args:
        value: A value of a card, which is not trusted.
    """
    try:
        return datetime.fromisoformat(value).astimezone(UTC).isoformat(timespec="seconds")
    except (TypeError, ValueError, OverflowError):
        return None


def try_download_card(repo: str, commit: str, hub: Hub = DEFAULT_HUB) -> tuple[Card, str | None]:
    """Downloads a card as `download_card` does, but returns errors of the Hub as text. A full disk raises OSError.

    Args:
        repo: NAMESPACE/NAME of a model.
        commit: The commit to read the card at.
        hub: The Hub to ask.

    Returns:
        (the card, None), or ({}, a predicate to follow the model's name, such as "has no rlhf_card.json").
    """
    try:
        return download_card(repo, commit, hub)
    except client_errors() as error:
        if is_disk_full(error):
            raise
        return Card(), f"has an {CARD_FILE} that cannot be downloaded ({one_line(reason(error))})"


def download_card(repo: str, commit: str, hub: Hub = DEFAULT_HUB) -> tuple[Card, str | None]:
    """Downloads rlhf_card.json at a commit.

    Args:
        repo: NAMESPACE/NAME of a model.
        commit: The commit to read the card at.
        hub: The Hub to ask.

    Returns:
        (the card, None), or ({}, a predicate to follow the model's name, such as "has no rlhf_card.json").

    Raises:
        Exception: Errors of the Hub's client pass through.
    """
    from huggingface_hub import try_to_load_from_cache

    cached_path = try_to_load_from_cache(repo, CARD_FILE, cache_dir=hub.cache, revision=commit)
    if isinstance(cached_path, str):
        path = Path(cached_path)
    else:
        entries = hub.api().get_paths_info(repo, [CARD_FILE], revision=commit)
        if not entries:
            return Card(), f"has no {CARD_FILE}"
        if getattr(entries[0], "size", MAX_CARD_BYTES + 1) > MAX_CARD_BYTES:
            return Card(), f"has an {CARD_FILE} that is not a file of at most {MAX_CARD_BYTES} bytes"
        path = hub.file(repo, CARD_FILE, revision=commit)
    with path.open("rb") as source:
        return Card.parse(source.read(MAX_CARD_BYTES + 1))
