"""Probes rollouts of any trainer against those of SFT, and decides the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ZooError
from .evidence import Checkpoint, Evidence, JudgeReliability
from .judges.check import JudgeCheck, split_half
from .probes import Completions, Report, probe
from .prompt_groups import group_prompts, number_of_groups
from .stats import Estimate
from .verdict import Verdict, decide

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
        groups: Number of groups of these prompts that ask the same: the effective number of prompts.
        completions: Number of the policy's completions to these.
        reference_completions: Number of SFT's completions to these.
        left_out: Number of lines of the policy, and of SFT, whose prompt the other side lacks.
        split_half: How far the judge agrees with itself, see `judges.check`; None if that is unknown, and for a
            verifiable reward, which is a program.
        judge_check: The judge's results on pairs of known order; None without such pairs.
    """

    report: Report
    verdict: Verdict
    prompts: int
    groups: int
    completions: int
    reference_completions: int
    left_out: tuple[int, int]
    split_half: Estimate | None
    judge_check: JudgeCheck | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the findings as JSON."""
        counts = {
            "prompts": self.prompts, "groups": self.groups, "completions": self.completions,
            "reference_completions": self.reference_completions, "left_out": list(self.left_out),
        }  # fmt: skip
        split_half = self.split_half.to_json() if self.split_half else None
        judge_check = self.judge_check.to_json() if self.judge_check else None
        findings = {
            **self.verdict.to_json(), "split_half": split_half, "judge_check": judge_check,
            "probes": self.report.to_json(),
        }  # fmt: skip
        return {"schema": 1, **counts, **findings}


def probe_rollouts(
    policy: Completions,
    sft: Completions,
    *,
    verifiable: bool = False,
    judge_check: JudgeCheck | None = None,
    seed: int = 0,
) -> RolloutFindings:
    """Runs every probe, and decides the verdict by reward and judge if both sides have them.

    Prompts that ask the same count as one: those of one group or, if no groups are given, near-duplicates.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        verifiable: Whether the reward is a program that checks answers, and so its own judge.
        judge_check: The judge's results on pairs of known order.
        seed: Seed of the permutations and resamples.

    Returns:
        The findings.

    Raises:
        ValueError: The two share no prompt.
        ZooError: A verifiable reward is missing, or has another judge beside it.
    """
    if verifiable:
        policy, sft = _mark_right_answers(policy, sft)
    policy, sft = group_sides(policy, sft)
    report = probe(policy, sft, seed=seed)
    # Only prompts that both sides answered can be compared in pairs.
    shared = set(policy.prompts) & set(sft.prompts)
    shared_rows = [[row for row, prompt in enumerate(side.prompts) if prompt in shared] for side in (policy, sft)]
    # Prompts are numbered in SFT's order, so the result does not depend on how a set is ordered.
    prompt_numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(p for p in sft.prompts if p in shared))}
    group_of = sft.group_by_prompt
    question_of_prompt = [group_of[prompt] for prompt in prompt_numbers]
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
        raise ZooError("--verifiable needs a column reward (or score) in both files: add it, or remove --verifiable.")
    if verifiable and judged is not None and not judge_is_reward:
        raise ZooError("A verifiable reward judges itself, but there is a column judge: remove it or --verifiable.")
    if verifiable:
        judged, reliability = rewards, JudgeReliability("the reward", is_reward=True, verifiable=True)
    elif judge_is_reward:
        reliability = JudgeReliability(is_reward=True, independent=False, unfit=_JUDGE_IS_REWARD)
    else:
        reliability = JudgeReliability()
    if judge_check is not None:
        reliability = reliability.with_check(judge_check)
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
        self_agreement = None if verifiable else split_half(score_rows, question_of_prompt * 2, seed=seed)
        reliability = replace(reliability, split_half=self_agreement)
    policy_proxy, sft_proxy = _prompt_means(rewards, groups)
    policy_judge, sft_judge = _prompt_means(judged, groups)
    evidence = Evidence(
        # There is no KL: rollouts of other trainers do not include it.
        Checkpoint(0, None, sft_proxy, sft_judge),
        [Checkpoint(1, None, policy_proxy, policy_judge, wins, report)],
        reliability,
        rollouts=True,
        groups=question_of_prompt,
    )
    left_out = (len(policy) - len(shared_rows[0]), len(sft) - len(shared_rows[1]))
    verdict = decide(evidence, seed=seed)
    completions, reference_completions = map(len, shared_rows)
    return RolloutFindings(
        report,
        verdict,
        len(prompt_numbers),
        number_of_groups(question_of_prompt),
        completions,
        reference_completions,
        left_out,
        self_agreement,
        judge_check,
    )


def group_sides(policy: Completions, sft: Completions) -> tuple[Completions, Completions]:
    """Gives near-duplicate prompts the same group, unless the completions have groups already.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.

    Returns:
        Both sides, with groups.

    Raises:
        ValueError: Only one side has groups.
    """
    if (policy.groups is None) != (sft.groups is None):
        raise ValueError("Only one side has groups of prompts: give them for both, or for neither.")
    if policy.groups is not None:
        return policy, sft
    prompts = list(dict.fromkeys([*policy.prompts, *sft.prompts]))
    group_of = dict(zip(prompts, group_prompts(prompts), strict=True))
    sides = [replace(side, groups=[group_of[prompt] for prompt in side.prompts]) for side in (policy, sft)]
    return sides[0], sides[1]


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
