"""Rollouts that any trainer wrote, as JSON lines: read strictly, probed against a reference, and judged by the rule."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ZooError
from .probes import Completions, Report, probe
from .verdict import Checkpoint, Evidence, Standing, Verdict, decide

COLUMNS = {
    "prompt": ("prompt", "input", "query"),
    "completion": ("completion", "output", "response"),
    "reward": ("reward", "score"),
    "judge": ("judge",),
    "logprobs": ("logprobs",),
}
"""Each column by the names that TRL, OpenRLHF and verl write; the first that a line has is read."""


@dataclass(frozen=True)
class Probed:
    """What was found of a policy's completions. verdict: by the same rule as a run's, with one checkpoint."""

    report: Report
    verdict: Verdict
    prompts: int
    completions: int

    def to_json(self) -> dict[str, Any]:
        counts = {"prompts": self.prompts, "completions": self.completions}
        return {"schema": 1, **counts, **self.verdict.to_json(), "probes": self.report.to_json()}


def read_rollouts(path: Path) -> Completions:
    """The completions of a file of JSON lines, with the optional columns that every line has.

    Raises ZooError, naming file and line, for what is no such line.
    """
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(line, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise ZooError(f"{path} is not UTF-8 ({error.reason}): write one JSON object a line.") from error
    if not rows:
        raise ZooError(f"{path} holds no completions: write one JSON object a line, with prompt and completion.")
    columns: dict[str, list[Any] | None] = {}
    for name in COLUMNS:
        there = [name in row for row in rows]
        if any(there) and not all(there):
            raise ZooError(f"{path} has {name} in {sum(there)} of {len(rows)} lines: give it in every line or in none.")
        columns[name] = [row[name] for row in rows] if all(there) else None
    return Completions(
        columns["prompt"] or [], columns["completion"] or [], columns["reward"], columns["judge"], columns["logprobs"]
    )


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ZooError(f"{where} is not JSON ({str(error)[:80]}): write one object a line.") from error
    if not isinstance(given, dict):
        raise ZooError(f"{where} holds no object: write one with prompt and completion.")
    row: dict[str, Any] = {}
    for name, names in COLUMNS.items():
        found = next((given[key] for key in names if given.get(key) is not None), None)
        if found is not None:
            row[name] = _checked(name, found, where)
        elif name in ("prompt", "completion"):
            raise ZooError(f"{where} has no {name}: give it as {' or '.join(repr(key) for key in names)}.")
    return row


def _checked(name: str, value: Any, where: str) -> Any:
    if name in ("prompt", "completion"):
        text = said(value)
        if text is None:
            raise ZooError(f"{where}: {name} must be a text or a list of messages with role and content.")
        return text
    if name == "logprobs":
        if isinstance(value, list) and all(_number(one) and one <= 0 for one in value):
            return value
        raise ZooError(f"{where}: logprobs must be a list of log-probabilities under the SFT model, none above 0.")
    if not _number(value):
        raise ZooError(f"{where}: {name} must be a finite number.")
    return float(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def said(value: Any) -> str | None:
    """A text, or what the messages of a conversation say; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(one, Mapping) for one in value):
        contents = [one.get("content") for one in value]
        return "\n".join(contents) if all(isinstance(one, str) for one in contents) else None  # type: ignore[arg-type]
    return None


def probe_rollouts(policy: Completions, sft: Completions, *, judge: str = "the judge", seed: int = 0) -> Probed:
    """Every probe, and the verdict by reward and judge where both sides have them.

    Raises ValueError where the two share no prompt.
    """
    report = probe(policy, sft, seed=seed)
    shared = set(policy.prompts) & set(sft.prompts)
    sides = [[row for row, prompt in enumerate(one.prompts) if prompt in shared] for one in (policy, sft)]
    order = {prompt: place for place, prompt in enumerate(dict.fromkeys(p for p in sft.prompts if p in shared))}
    groups = [[order[one.prompts[row]] for row in rows] for one, rows in zip((policy, sft), sides, strict=True)]

    def means(column: str) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = []
        for one, rows, group in zip((policy, sft), sides, groups, strict=True):
            values = getattr(one, column)
            chosen = None if values is None else np.asarray(values, dtype=float)[rows]
            found.append(None if chosen is None else np.bincount(group, weights=chosen) / np.bincount(group))
        return found if all(one is not None for one in found) else [None, None]

    proxies, judged = means("rewards"), means("judged")
    wins = None
    if judged[0] is not None and policy.judged is not None and sft.judged is not None:
        ours, theirs = (
            [np.asarray(one.judged, dtype=float)[rows][np.asarray(group) == g] for g in range(len(order))]
            for one, rows, group in zip((policy, sft), sides, groups, strict=True)
        )
        wins = [float(np.mean((np.sign(np.subtract.outer(a, b)) + 1) / 2)) for a, b in zip(ours, theirs, strict=True)]
    evidence = Evidence(
        Checkpoint(0, None, proxies[1], judged[1]),
        [Checkpoint(1, None, proxies[0], judged[0], wins, report)],
        Standing(judge),
    )
    return Probed(report, decide(evidence, seed=seed), len(order), len(sides[0]))
