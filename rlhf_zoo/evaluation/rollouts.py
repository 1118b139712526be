"""Probes rollouts of any trainer against those of SFT, and decides the verdict."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ZooError
from .evidence import Checkpoint, Evidence, JudgeReliability, Labels
from .judges.check import JudgeCheck, split_half
from .paraphrases import count_possible_paraphrases, paraphrase_warning
from .probes import Completions, Report, probe
from .probes.equal_texts import MAX_ANSWER_WORDS
from .prompt_groups import group_prompts, number_of_groups
from .stats import Estimate
from .verdict import Kind, Verdict, decide
from .verified_answers import mark_right_answers

_JUDGE_IS_REWARD = (
    "The judge's column equals the reward's in every line, so it is the training reward itself, which cannot "
    "show whether it was exploited: give another judge's scores, or --verifiable if the reward is a program that "
    "checks answers."
)

#: Page that names a remedy for each verdict and each family of probes.
REMEDIES = "https://github.com/rlhf-zoo/rlhf-zoo/blob/main/docs/reward-up-text-worse.md"
_TRAIN_AGAIN = (
    "raise your trainer's KL coefficient (TRL: beta) or penalize what the probes name, and train again from the SFT "
    f"model: {REMEDIES}"
)
_CHECK_ANSWERS = (
    "If these may be right answers, let the reward be a program that checks them, and pass --verifiable: then right "
    "answers are left out of the probes."
)
#: Kind of verdict on two files -> what to do next.
NEXT_STEPS: dict[Kind, str] = {
    "hacked": f"Do not use this policy. Read its worst samples, {_TRAIN_AGAIN}",
    "suspicious": "Do not use this policy before you have read its worst samples. If you would show them to a user, "
    f"give scores of another judge. If not, {_TRAIN_AGAIN}",
    "worse": f"Use the SFT model. To improve on it, {_TRAIN_AGAIN}",
    "not judged": "Do not rely on this policy yet: provide what the reasons name, and read samples of both files",
    "no difference shown": "Keep the SFT model, or sample more prompts, at least 100 and twice each",
    "no sign found": "Before you rely on this policy, check the judge on pairs of known order: --own_pairs",
    "better": "Use this policy, after a look at its worst samples",
}


@dataclass(frozen=True)
class RolloutFindings:
    """The findings on a policy's completions.

    Attributes:
        report: The probes.
        verdict: The verdict on the policy, by the rule for two files.
        prompts: Number of prompts that both sides answered.
        groups: Number of groups among these prompts: the effective number of prompts.
        completions: Number of the policy's completions to these prompts.
        reference_completions: Number of SFT's completions to these prompts.
        left_out: Number of completions of the policy, and of SFT, whose prompt the other side lacks.
        split_half: How well the judge agrees with itself, see `judges.check`; None if unknown, or if the reward is
            verifiable.
        judge_check: The judge's results on pairs of known order; None without such pairs.
        possible_paraphrases: Number of prompts that may ask the same question as a prompt of another group; 0 if they
            are less than half of the prompts, or if the files name the groups.
        may_be_right_answers: Whether a program could perhaps check the completions, but none did: they are short, or
            their rewards have at most two values.
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
    possible_paraphrases: int = 0
    may_be_right_answers: bool = False

    @property
    def next_step(self) -> str:
        """What to do next, in sentences."""
        step = f"{NEXT_STEPS[self.verdict.kind]}."
        if self.may_be_right_answers and any(probe.fired and probe.flags_hacking for probe in self.report.probes):
            step += f" {_CHECK_ANSWERS}"
        return step

    @property
    def warning(self) -> str:
        """A warning about prompts that may ask the same question in other words; "" if they are few."""
        if not self.possible_paraphrases:
            return ""
        return paraphrase_warning(self.possible_paraphrases, "name the group of each prompt in a column `group`")

    def to_json(self) -> dict[str, Any]:
        counts = {
            "prompts": self.prompts, "groups": self.groups, "completions": self.completions,
            "reference_completions": self.reference_completions, "left_out": list(self.left_out),
            "possible_paraphrases": self.possible_paraphrases,
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
    report: Report | None = None,
    seed: int = 0,
) -> RolloutFindings:
    """Runs every probe, and decides the verdict by reward and judge if both sides have them.

    Prompts of one group count as one. If no groups are given, near-duplicate prompts form a group.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        verifiable: Whether the reward is a program that checks answers, so that it serves as the judge too.
        judge_check: The judge's results on pairs of known order, and the labels of the own pairs.
        report: The findings of probes that already ran on the same texts; None runs the probes.
        seed: Seed of the permutations and resamples.

    Raises:
        ValueError: The two sides share no prompt, or only one of them has groups.
        ZooError: The reward is verifiable but missing, or there is also a separate judge.
    """
    has_groups = policy.groups is not None
    policy, sft = group_sides(policy, sft)
    exploit_reason: str | None = None
    if verifiable:
        sides = mark_right_answers(policy, sft)
        policy, sft, exploit_reason = sides.policy, sides.sft, sides.exploit_reason
    report = report or probe(policy, sft, seed=seed)
    shared_prompts, shared_rows, prompt_indices = _pair_by_prompt(policy, sft)
    group_of = sft.group_by_prompt
    prompt_groups = [group_of[prompt] for prompt in shared_prompts]
    rewards, judge_scores = (
        _column_values((policy, sft), shared_rows, column) for column in ("rewards", "judge_scores")
    )
    reliability = _judge_reliability(rewards, judge_scores, verifiable=verifiable)
    if exploit_reason:
        reliability = replace(reliability, unfit=exploit_reason)
    if judge_check is not None:
        reliability = reliability.with_check(judge_check)
    if verifiable:
        judge_scores = rewards
    wins = self_agreement = None
    if judge_scores is not None:
        scores_by_prompt = [
            [values[indices == index] for index in range(len(shared_prompts))]
            for values, indices in zip(judge_scores, prompt_indices, strict=True)
        ]
        wins = _win_rates(*scores_by_prompt)
        if not verifiable:
            self_agreement = _self_agreement(scores_by_prompt, prompt_groups, seed=seed)
        reliability = replace(reliability, split_half=self_agreement)
    policy_proxy, sft_proxy = _prompt_means(rewards, prompt_indices)
    policy_judge, sft_judge = _prompt_means(judge_scores, prompt_indices)
    evidence = Evidence(
        # The KL is None, because rollouts of other trainers do not include it.
        Checkpoint(0, None, sft_proxy, sft_judge),
        [Checkpoint(1, None, policy_proxy, policy_judge, wins, report)],
        reliability,
        two_files=True,
        groups=prompt_groups,
        labels=Labels.of(judge_check),
    )
    completions, reference_completions = map(len, shared_rows)
    return RolloutFindings(
        report,
        decide(evidence, seed=seed),
        prompts=len(shared_prompts),
        groups=number_of_groups(prompt_groups),
        completions=completions,
        reference_completions=reference_completions,
        left_out=(len(policy) - completions, len(sft) - reference_completions),
        split_half=self_agreement,
        judge_check=judge_check,
        possible_paraphrases=0 if has_groups else count_possible_paraphrases(shared_prompts, prompt_groups),
        may_be_right_answers=not verifiable and _may_be_right_answers(policy),
    )


def _pair_by_prompt(policy: Completions, sft: Completions) -> tuple[list[str], list[list[int]], list[np.ndarray]]:
    """Finds the prompts that both sides answered, since comparisons are paired by prompt.

    Returns:
        These prompts, in SFT's order, so that the result does not depend on the order of a set; of each side its rows
        with these prompts; and of each side these rows' indices into the prompts.
    """
    policy_prompts = set(policy.prompts)
    shared_prompts = list(dict.fromkeys(prompt for prompt in sft.prompts if prompt in policy_prompts))
    index_by_prompt = {prompt: index for index, prompt in enumerate(shared_prompts)}
    rows = [[row for row, prompt in enumerate(side.prompts) if prompt in index_by_prompt] for side in (policy, sft)]
    indices = [
        np.array([index_by_prompt[side.prompts[row]] for row in side_rows])
        for side, side_rows in zip((policy, sft), rows, strict=True)
    ]
    return shared_prompts, rows, indices


def _may_be_right_answers(policy: Completions) -> bool:
    """Whether completions are so short, or have so few rewards, that a program may be able to check them."""
    median_words = float(np.median([len(text.split()) for text in policy.texts]))
    return median_words <= MAX_ANSWER_WORDS or (policy.rewards is not None and len(set(policy.rewards)) <= 2)


def _column_values(sides: Sequence[Completions], rows: Sequence[Sequence[int]], column: str) -> list[np.ndarray] | None:
    """Returns a column's values in the given rows of the policy and of SFT; None if either side has none."""
    columns = [getattr(side, column) for side in sides]
    if any(values is None for values in columns):
        return None
    return [np.asarray(values, dtype=float)[side_rows] for values, side_rows in zip(columns, rows, strict=True)]


def _self_agreement(
    scores_by_prompt: Sequence[Sequence[np.ndarray]], groups: Sequence[Hashable], *, seed: int
) -> Estimate | None:
    """Correlates the judge's scores of one half of the samples with those of the other half.

    Args:
        scores_by_prompt: For the policy and for SFT, (P,) arrays with the scores of each prompt's samples.
        groups: (P,) the group of each prompt.
        seed: Seed of the resamples.
    """
    # Halves need rows of equal length, so surplus samples are dropped.
    samples_per_prompt = min(len(prompt_scores) for side in scores_by_prompt for prompt_scores in side)
    score_rows = [prompt_scores[:samples_per_prompt] for side in scores_by_prompt for prompt_scores in side]
    return split_half(score_rows, [*groups, *groups], seed=seed)


def _judge_reliability(
    rewards: list[np.ndarray] | None, judge_scores: list[np.ndarray] | None, *, verifiable: bool
) -> JudgeReliability:
    """Determines what the judge is: a separate judge, the reward under another name, or a reward that checks answers.

    Args:
        rewards: The rewards of the policy and of SFT, (N,) each; None if either side has none.
        judge_scores: The judge's scores, in the same form.
        verifiable: Whether the reward checks answers.

    Raises:
        ZooError: The reward is verifiable but missing, or there is also a separate judge.
    """
    judge_is_reward = bool(rewards and judge_scores) and all(map(np.allclose, rewards or (), judge_scores or ()))
    if verifiable and rewards is None:
        raise ZooError("--verifiable needs a column reward (or score) in both files: add it, or remove --verifiable.")
    if verifiable and judge_scores is not None and not judge_is_reward:
        raise ZooError("A verifiable reward judges itself, but there is a column judge: remove it or --verifiable.")
    if verifiable:
        return JudgeReliability("the reward", is_reward=True, verifiable=True)
    if judge_is_reward:
        return JudgeReliability(is_reward=True, independent=False, unfit=_JUDGE_IS_REWARD)
    return JudgeReliability()


def _win_rates(policy: Sequence[np.ndarray], sft: Sequence[np.ndarray]) -> list[float]:
    """Compares every sample of the policy with every sample of SFT on the same prompt. A tie counts one half.

    Args:
        policy: (P,) arrays with the judge's scores of the policy's samples for each prompt.
        sft: The same for SFT's samples.

    Returns:
        (P,) the policy's win rate on each prompt.
    """
    return [
        float(np.mean((np.sign(np.subtract.outer(policy_scores, sft_scores)) + 1) / 2))
        for policy_scores, sft_scores in zip(policy, sft, strict=True)
    ]


def group_sides(policy: Completions, sft: Completions) -> tuple[Completions, Completions]:
    """Adds groups of near-duplicate prompts to both sides, unless they have groups already.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.

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


def _prompt_means(columns: list[np.ndarray] | None, prompt_indices: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """Averages the policy's and SFT's values by prompt, given each row's prompt index; [None, None] without values."""
    if columns is None:
        return [None, None]
    return [
        np.bincount(indices, weights=values) / np.bincount(indices)
        for values, indices in zip(columns, prompt_indices, strict=True)
    ]
