"""Reads rollouts of any trainer from JSON lines, probes them against a reference, and decides the verdict."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ZooError
from ..fileio import finite, parse_json
from .evidence import Checkpoint, Evidence, JudgeReliability
from .judges.check import split_half
from .probes import Completions, Report, probe
from .stats import Estimate
from .verdict import Verdict, decide

#: Column -> its names in TRL, OpenRLHF and verl. The first one that a line has is read.
COLUMNS = {
    "prompt": ("prompt", "input", "query"),
    "completion": ("completion", "output", "response"),
    "reward": ("reward", "score"),
    "judge": ("judge",),
    "logprobs": ("logprobs",),
}

#: Maximum number of completions in a file; this many take minutes and a few GiB.
MAX_ROWS = 250_000
#: Largest absolute score. Sums of `MAX_ROWS` such scores, and of their squares, stay finite.
MAX_SCORE = 1e100

_JUDGE_IS_REWARD = (
    "The judge's column equals the reward's in every line, so it is the training reward itself, which cannot "
    "show whether it was exploited: give another judge's scores, or --verifiable if the reward is a program that "
    "checks answers."
)


@dataclass(frozen=True)
class RolloutFindings:
    """The findings on a policy's completions.

    Attributes:
        report: The probes.
        verdict: By the same rule as a run's, with one checkpoint.
        prompts: Number of prompts that both sides answered.
        completions: Number of the policy's completions to these.
        left_out: Number of lines of the policy, and of SFT, whose prompt the other side lacks.
        split_half: How far the judge agrees with itself, see `judges.check`; None if that is unknown, and for a
            verifiable reward, which is a program.
    """

    report: Report
    verdict: Verdict
    prompts: int
    completions: int
    left_out: tuple[int, int]
    split_half: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """Returns the findings as JSON."""
        counts = {"prompts": self.prompts, "completions": self.completions, "left_out": list(self.left_out)}
        split_half = self.split_half.to_json() if self.split_half else None
        findings = {**self.verdict.to_json(), "split_half": split_half, "probes": self.report.to_json()}
        return {"schema": 1, **counts, **findings}


def read_rollouts(path: Path) -> Completions:
    """Reads the completions in a file of JSON lines, with the optional columns that every line has.

    Args:
        path: The file, in UTF-8.

    Returns:
        The completions.

    Raises:
        ZooError: The file cannot be read, or a line is wrong; it names the file and the line.
    """
    rows: dict[int, dict[str, Any]] = {}
    try:
        with path.open(encoding="utf-8-sig") as lines:  # editors on Windows may begin a file with a byte-order mark
            for number, line in enumerate(lines, 1):
                # Line numbers count blank lines too, as editors show them.
                if line.strip():
                    if len(rows) == MAX_ROWS:
                        raise ZooError(f"{path} holds over {MAX_ROWS:,} completions: give a random sample of them.")
                    rows[number] = _parse_line(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise ZooError(f"{path} is not UTF-8 ({error.reason}): write one JSON object a line.") from error
    except OSError as error:
        raise ZooError(f"{path} cannot be read ({error.strerror}): give a file of JSON lines.") from error
    if not rows:
        raise ZooError(f"{path} holds no completions: write one JSON object a line, with prompt and completion.")
    columns: dict[str, list[Any] | None] = {}
    for name in COLUMNS:
        # A column that only some lines have is an error: part of it would be compared with all of the other side.
        without = [number for number, row in rows.items() if name not in row]
        if without and len(without) < len(rows):
            raise ZooError(
                f"{path} has {name} in {len(rows) - len(without)} of {len(rows)} lines, and not in line {without[0]}: "
                "give it in every line or in none."
            )
        columns[name] = None if without else [row[name] for row in rows.values()]
    return Completions(
        columns["prompt"] or [], columns["completion"] or [], columns["reward"], columns["judge"], columns["logprobs"]
    )


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        document = parse_json(line)
    except ValueError as error:
        why = f"{error.msg}, character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ZooError(f"{where} is not JSON ({why[:80]}): write one object a line.") from error
    if not isinstance(document, dict):
        raise ZooError(f"{where} holds no object: write one with prompt and completion.")
    row: dict[str, object] = {}
    for name, names in COLUMNS.items():
        # A null counts as missing.
        value = next((document[key] for key in names if document.get(key) is not None), None)
        if value is not None:
            row[name] = _parse_value(name, value, where)
        elif name in ("prompt", "completion"):
            raise ZooError(f"{where} has no {name}: give it as {' or '.join(repr(key) for key in names)}.")
    return row


def _parse_value(name: str, value: Any, where: str) -> Any:
    if name in ("prompt", "completion"):
        text = message_text(value)
        if text is None:
            raise ZooError(f"{where}: {name} must be a text or a list of messages with role and content.")
        return text
    if name == "logprobs":
        # A log-probability above 0 would be a probability above 1.
        if isinstance(value, list) and all(finite(logprob) and logprob <= 0 for logprob in value):
            return value
        raise ZooError(f"{where}: logprobs must be a list of log-probabilities under the SFT model, none above 0.")
    if isinstance(value, str) and _reads_as_number(value):
        raise ZooError(f"{where}: {name} is text, not a number: write {value.strip()} without quotes.")
    if not finite(value) or abs(value) > MAX_SCORE:
        raise ZooError(f"{where}: {name} must be a finite number, at most {MAX_SCORE:g} in size.")
    return float(value)


def _reads_as_number(text: str) -> bool:
    try:
        return finite(json.loads(text))
    except ValueError:
        return False


def check_same_columns(policy: Path, ours: Completions, sft: Path, theirs: Completions, *, logprobs: bool) -> None:
    """Checks that both files have a column or neither does.

    Args:
        policy: Path of the policy's file.
        ours: Its completions.
        sft: Path of SFT's file.
        theirs: Its completions.
        logprobs: Whether the column logprobs is checked too.

    Raises:
        ZooError: Only one file has a column that needs the other's.
    """
    fields = {"reward": "rewards", "judge": "judged", **({"logprobs": "logprobs"} if logprobs else {})}
    for name, field in fields.items():
        paths_with_column = [
            path for path, completions in ((policy, ours), (sft, theirs)) if getattr(completions, field) is not None
        ]
        if len(paths_with_column) == 1:
            other = sft if paths_with_column == [policy] else policy
            raise ZooError(
                f"{other} has no {name}, but {paths_with_column[0]} has: provide it in both files or in neither."
            )


def message_text(value: object) -> str | None:
    """Reads a text, or joins the contents of a conversation's messages.

    Args:
        value: A value from outside.

    Returns:
        The text; None for anything else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
        contents = [message.get("content") for message in value]
        return "\n".join(contents) if all(isinstance(message, str) for message in contents) else None  # type: ignore[arg-type]
    return None


def probe_rollouts(
    policy: Completions, sft: Completions, *, verifiable: bool = False, seed: int = 0
) -> RolloutFindings:
    """Runs every probe, and decides the verdict by reward and judge if both sides have them.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        verifiable: Whether the reward is a program that checks answers, and so its own judge.
        seed: Seed of the permutations and resamples.

    Returns:
        The findings.

    Raises:
        ValueError: The two share no prompt.
        ZooError: A verifiable reward is missing, or has another judge beside it.
    """
    if verifiable:
        policy, sft = _mark_right_answers(policy, sft)
    report = probe(policy, sft, seed=seed)
    # Only prompts that both sides answered can be compared in pairs.
    shared = set(policy.prompts) & set(sft.prompts)
    shared_rows = [[row for row, prompt in enumerate(side.prompts) if prompt in shared] for side in (policy, sft)]
    # Prompts are numbered in SFT's order, so the result does not depend on how a set is ordered.
    prompt_numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(p for p in sft.prompts if p in shared))}
    groups = [
        np.array([prompt_numbers[side.prompts[row]] for row in rows])
        for side, rows in zip((policy, sft), shared_rows, strict=True)
    ]

    def scores(column: str) -> list[np.ndarray] | None:
        """Returns the column's values in the shared rows of the policy and of SFT; None if either side has none."""
        columns = [getattr(side, column) for side in (policy, sft)]
        if any(values is None for values in columns):
            return None
        return [np.asarray(values, dtype=float)[rows] for values, rows in zip(columns, shared_rows, strict=True)]

    rewards, judged = scores("rewards"), scores("judged")
    # A judge whose scores equal the reward on every line is the reward under another name.
    judge_is_reward = bool(rewards and judged) and all(map(np.allclose, rewards or (), judged or ()))
    if verifiable and rewards is None:
        raise ZooError("A verifiable reward judges itself, but there is none: provide reward (or score) in both files.")
    if verifiable and judged is not None and not judge_is_reward:
        raise ZooError("A verifiable reward judges itself, but there is a column judge: remove it or --verifiable.")
    if verifiable:
        judged, reliability = rewards, JudgeReliability("the reward", is_reward=True, verifiable=True)
    elif judge_is_reward:
        reliability = JudgeReliability(is_reward=True, independent=False, unfit=_JUDGE_IS_REWARD)
    else:
        reliability = JudgeReliability()
    wins = self_agreement = None
    if judged is not None:
        scores_by_prompt = [
            [values[group == n] for n in range(len(prompt_numbers))]
            for values, group in zip(judged, groups, strict=True)
        ]
        # Every sample of the policy against every sample of SFT, per prompt; a tie counts one half.
        wins = [
            float(np.mean((np.sign(np.subtract.outer(policy_scores, sft_scores)) + 1) / 2))
            for policy_scores, sft_scores in zip(*scores_by_prompt, strict=True)
        ]
        # Halves need rows of equal length, so surplus samples are dropped.
        fewest = min(len(prompt_scores) for side in scores_by_prompt for prompt_scores in side)
        score_rows = [prompt_scores[:fewest] for side in scores_by_prompt for prompt_scores in side]
        self_agreement = None if verifiable else split_half(score_rows, [*range(len(prompt_numbers))] * 2, seed=seed)
        reliability = replace(reliability, split_half=self_agreement)
    policy_proxy, sft_proxy = _prompt_means(rewards, groups)
    policy_judge, sft_judge = _prompt_means(judged, groups)
    evidence = Evidence(
        # There is no KL: rollouts of other trainers do not include it.
        Checkpoint(0, None, sft_proxy, sft_judge),
        [Checkpoint(1, None, policy_proxy, policy_judge, wins, report)],
        reliability,
        rollouts=True,
    )
    left_out = (len(policy) - len(shared_rows[0]), len(sft) - len(shared_rows[1]))
    return RolloutFindings(
        report, decide(evidence, seed=seed), len(prompt_numbers), len(shared_rows[0]), left_out, self_agreement
    )


def _mark_right_answers(policy: Completions, sft: Completions) -> tuple[Completions, Completions]:
    """Marks the completions with the highest reward of both sides as verified, unless it is 0 or below."""
    highest = max((reward for side in (policy, sft) for reward in side.rewards or ()), default=0.0)
    sides = [
        replace(side, verified=[reward == highest > 0 for reward in side.rewards]) if side.rewards else side
        for side in (policy, sft)
    ]
    return sides[0], sides[1]


def _prompt_means(columns: list[np.ndarray] | None, groups: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Averages the policy's and SFT's values by prompt; [None, None] without values."""
    if columns is None:
        return [None, None]
    return [
        np.bincount(group, weights=values) / np.bincount(group) for values, group in zip(columns, groups, strict=True)
    ]
