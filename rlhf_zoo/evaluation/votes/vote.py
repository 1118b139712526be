"""A vote of a blind test: what was shown on which side, and what was preferred. It holds nothing about the voter.

`box` stores votes on the disk and sends them; `data` is the data set that they go to.
"""

from __future__ import annotations

import re
import reprlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ZooError
from ...fileio import hub_id, int_or_none, is_finite, now

MAX_TEXT = 32_768  # characters of a prompt or a completion
#: Configurations of the data set: votes that prefer a side, and all others.
CONFIGURATIONS = ("default", "ties")
SIDES = ("left", "right")  # the sides of the page; also the verdicts that prefer a side
VERDICTS = (*SIDES, "tie", "both_bad")
ROLES = ("ppo", "sft")
MODEL_KEYS = ("role", "repo", "commit", "tag", "reward", "ended")  # columns of each side, prefixed with its name
VOTE_KEYS = ("temperature", "top_p", "seed", "max_new_tokens", "time", "id")  # columns of the vote itself

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ShownCompletion:
    """A completion as one side of the page showed it, and the model that wrote it.

    Attributes:
        completion: The text.
        role: ppo or sft.
        repo: The repository of the model; None if it was not published. A path is refused, because it would reveal a
            user name on this machine.
        commit: The model's commit in the repository; None if unknown.
        tag: The tag of that commit; None if unknown.
        reward: The reward as the page showed it; None if it showed none.
        ended: Whether the model stopped by itself.

    Raises:
        ZooError: A value is out of range, a text is too long or invalid, or the repo is not a Hub id.
    """

    completion: str
    role: str
    repo: str | None = None
    commit: str | None = None
    tag: str | None = None
    reward: float | None = None
    ended: bool | None = None

    def __post_init__(self) -> None:
        _check_text("completion", self.completion)
        _check(self.role in ROLES, "role", self.role, "use ppo or sft")
        _check(self.repo is None or hub_id(self.repo) is not None, "repo", self.repo, "use an id on the Hub, or none")
        _check(
            self.commit is None or _matches(_COMMIT, self.commit), "commit", self.commit, "use all 40 digits, or none"
        )
        if self.tag is not None:
            _check_text("tag", self.tag)
        _check(self.reward is None or is_finite(self.reward), "reward", self.reward, "use a finite number, or none")
        _check(self.ended is None or isinstance(self.ended, bool), "ended", self.ended, "use true, false or none")
        _set_floats(self, "reward")


@dataclass(frozen=True)
class Vote:
    """One judgment of two completions of a prompt, and how they were drawn. It holds nothing about the voter.

    Attributes:
        prompt: The prompt of both completions.
        left: The completion on the left side.
        right: The completion on the right side.
        verdict: left, right, tie or both_bad.
        temperature: Sampling temperature.
        top_p: Nucleus probability.
        seed: Seed of the sampling, the same for both sides.
        max_new_tokens: Maximum number of tokens in a completion.
        id: A random uuid.
        time: UTC, to the second.

    Raises:
        ZooError: A value is out of range, or the verdict prefers one of two equal texts.
    """

    prompt: str
    left: ShownCompletion
    right: ShownCompletion
    verdict: str
    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    time: str = field(default_factory=now)

    def __post_init__(self) -> None:
        _check_text("prompt", self.prompt)
        _check(self.verdict in VERDICTS, "verdict", self.verdict, f"use one of {', '.join(VERDICTS)}")
        # A preference between equal texts would teach a reward model only noise.
        if self.verdict in SIDES and self.left.completion == self.right.completion:
            raise ZooError(f"A vote prefers the {self.verdict} side of two equal texts: make it a tie.")
        temperature, seed = self.temperature, self.seed
        _check(is_finite(temperature) and temperature >= 0, "temperature", temperature, "use a number of at least 0")
        _check(is_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "use a number above 0, at most 1")
        _check(int_or_none(seed) is not None and seed >= 0, "seed", seed, "use an integer of at most 63 bits")
        length = self.max_new_tokens
        _check(int_or_none(length) is not None and length > 0, "max_new_tokens", length, "use an integer of at least 1")
        _check(_matches(_ID, self.id), "id", self.id, "use a random uuid")
        _check(_matches(_TIME, self.time), "time", self.time, "use UTC, to the second")
        _set_floats(self, "temperature", "top_p")

    @property
    def chosen(self) -> ShownCompletion | None:
        """The preferred side; None for a tie and for "both bad"."""
        return {"left": self.left, "right": self.right}.get(self.verdict)

    @property
    def rejected(self) -> ShownCompletion | None:
        """The side that was not preferred; None for a tie and for "both bad"."""
        return {"left": self.right, "right": self.left}.get(self.verdict)

    @property
    def configuration(self) -> str:
        """The configuration of the data set that holds this vote."""
        return "default" if self.verdict in SIDES else "ties"

    def to_row(self) -> dict[str, Any]:
        """Returns the row in the data set, whose column names depend on the configuration."""
        names = side_names(self.configuration)
        sides = (self.chosen, self.rejected) if self.chosen and self.rejected else (self.left, self.right)
        row: dict[str, object] = {"prompt": self.prompt}
        row |= {name: side.completion for name, side in zip(names, sides, strict=True)}
        row["verdict"] = self.verdict
        for name, side in zip(names, sides, strict=True):
            row |= {f"{name}_{key}": getattr(side, key) for key in MODEL_KEYS}
        return row | {key: getattr(self, key) for key in VOTE_KEYS}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Vote:
        """Reads a row that `to_row` made.

        Args:
            row: A row of the data set.

        Raises:
            ZooError: The row is not a vote.
        """
        try:
            # Every value passes the checks of `ShownCompletion` and `Vote`, because anybody may have written the row.
            first, second = (
                ShownCompletion(row[name], **{key: row[f"{name}_{key}"] for key in MODEL_KEYS})
                for name in side_names("default" if row["verdict"] in SIDES else "ties")
            )
            # In `default`, the first column is the chosen side, whichever side it was on.
            left, right = (second, first) if row["verdict"] == "right" else (first, second)
            values = {key: row[key] for key in ("prompt", "verdict", *VOTE_KEYS)}
            return cls(left=left, right=right, **values)
        except (KeyError, TypeError) as error:
            raise ZooError(f"A row of votes lacks a column or has a value of a wrong type ({error}).") from error


def side_names(configuration: str) -> tuple[str, str]:
    """Returns the column names of the two completions.

    Args:
        configuration: "default" or "ties".
    """
    return ("chosen", "rejected") if configuration == "default" else ("left", "right")


def _check(is_valid: bool, name: str, value: object, remedy: str) -> None:
    if not is_valid:
        raise ZooError(f"The {name} of a vote is {reprlib.repr(value)}: {remedy}.")


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None


def _set_floats(instance: object, *names: str) -> None:
    """Turns integers into floats, as the data set stores them. Large integers are rounded."""
    for name in names:
        if getattr(instance, name) is not None:
            # The dataclass is frozen; this runs in its own __post_init__.
            object.__setattr__(instance, name, float(getattr(instance, name)))


def _check_text(name: str, text: Any) -> None:
    _check(isinstance(text, str), name, text, "use text")
    if len(text) > MAX_TEXT:
        raise ZooError(f"The {name} of a vote has {len(text)} characters: the limit is {MAX_TEXT}.")
    try:
        # Parquet stores UTF-8, which has no lone surrogates.
        text.encode()
    except UnicodeEncodeError as error:
        raise ZooError(f"The {name} of a vote contains half of a character (a lone surrogate): remove it.") from error


def merge_votes(*lists: Iterable[Vote]) -> list[Vote]:
    """Merges lists of votes, each vote once (by its id), oldest first."""
    by_id = {vote.id: vote for votes in lists for vote in votes}
    # The id breaks ties, so the order is the same everywhere.
    return sorted(by_id.values(), key=lambda vote: (vote.time, vote.id))
