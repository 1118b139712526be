"""Measures every checkpoint of a PPO run (scores, KL and probes) and decides the verdict over them.

The prompts are validation prompts, because they select the recommended checkpoint. Test prompts then measure it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling import distributed
from ..modeling.chat import display_text
from ..modeling.chat_template import Prompt
from ..modeling.models import load_causal
from ..modeling.prompt_keys import count_distinct_prompts
from ..runs.checkpoint_choice import checkpoints_to_keep
from ..runs.context import RunContext
from ..runs.dataset import DataSource, evaluation_location, evaluation_rows
from ..runs.record import checkpoint_step
from .evidence import Checkpoint, Evidence, JudgeReliability
from .head_to_head import preference_scores
from .judges.check import split_half
from .judges.panel import is_answer_checker, score_completions
from .measure import Evaluator, PolicyMeasurements, measure, repeat_prompts
from .overoptimization import MIN_POINTS, fit_form, root_kl
from .probes import Completions, Report, probe
from .probes.reward_effect import RewardEffect, make_edits
from .prompt_groups import group_means, group_rows, number_of_groups
from .stats import Estimate, bootstrap_mean
from .text import distinct_n_estimate
from .text_logprobs import measure_dependence, score_by_reward
from .trivial_comparison import choose_trivial_policies
from .trivial_policies import TrivialPolicy
from .verdict import Verdict, decide

STREAM = 8  # separates these random numbers from others under the same seed


@dataclass(frozen=True)
class _CheckpointMeasurements:
    step: int
    measurements: PolicyMeasurements
    report: Report


@dataclass(frozen=True)
class Trajectory:
    """The measurements of a run's checkpoints and of its SFT policy on the same prompts.

    Attributes:
        prompt_count: Number of prompts, P.
        samples_per_prompt: Completions per prompt.
        sft: The SFT policy's measurements.
        checkpoints: The measurements of the checkpoints, in order of their steps.
        judge_name: Name of the headline judge.
        seed: Seed of sampling, permutations and resamples.
        reliability: The facts about the judge.
        reward_effects: How much the last checkpoint's habits (families of probes that fired) change the reward.
        trivial_policies: The trivial policies chosen on these prompts.
        confirmation: The candidate's step, and its gain on test prompts; None until it is measured.
        prompt_source: The split and data of the prompts, see `evaluation_location`.
        groups: (P,) the group of each prompt, see `evaluation.prompt_groups`; None if every prompt is its own group.
    """

    prompt_count: int
    samples_per_prompt: int
    sft: PolicyMeasurements
    checkpoints: Sequence[_CheckpointMeasurements]
    judge_name: str
    seed: int
    reliability: JudgeReliability = field(default_factory=JudgeReliability)
    reward_effects: Sequence[RewardEffect] = ()
    trivial_policies: Sequence[TrivialPolicy] = ()
    confirmation: tuple[int, Estimate] | None = None
    prompt_source: Mapping[str, object] = field(default_factory=lambda: {"split": "validation"})
    groups: Sequence[int] | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict over all checkpoints."""
        sft, *checkpoints = self._policies()
        evidence = Evidence(
            sft, checkpoints, judge=self.reliability, reward_effects=self.reward_effects, groups=self.prompt_groups
        )
        verdict = decide(evidence, seed=self.seed)
        return verdict if self.confirmation is None else verdict.confirm(*self.confirmation)

    @cached_property
    def verdict_at_recommended(self) -> Verdict | None:
        """The verdict over the checkpoints up to the recommended one; None if that is the last, or there is none.

        The effects of habits on the reward are left out, because only the last checkpoint's texts show them.
        """
        step = self.verdict.recommended
        if step is None or step == self.checkpoints[-1].step:
            return None
        sft, *checkpoints = self._policies()
        checkpoints = [policy for policy in checkpoints if policy.step <= step]
        return decide(Evidence(sft, checkpoints, judge=self.reliability, groups=self.prompt_groups), seed=self.seed)

    @cached_property
    def verdict_without_judge(self) -> Verdict:
        """The verdict by the same rule from reward, KL and probes alone."""
        sft, *checkpoints = (replace(policy, judge=None, wins=None) for policy in self._policies())
        effects = [replace(effect, judge_ratio=None) for effect in self.reward_effects]
        return decide(Evidence(sft, checkpoints, reward_effects=effects, groups=self.prompt_groups), seed=self.seed)

    @property
    def prompt_groups(self) -> Sequence[int]:
        """The group number of each prompt."""
        return range(self.prompt_count) if self.groups is None else self.groups

    def with_confirmation(self, gain: Estimate) -> Trajectory:
        """Returns a copy with the candidate's gain over SFT on test prompts.

        Args:
            gain: The gain of the current candidate.
        """
        candidate = self.verdict.candidate
        assert candidate is not None  # the caller measured its gain
        return replace(self, confirmation=(candidate, gain))

    def _policies(self) -> list[Checkpoint]:
        """Returns SFT (step 0) and the checkpoints in the form for `Evidence`."""
        checkpoints = [
            self._policy(checkpoint.step, checkpoint.measurements, checkpoint.report) for checkpoint in self.checkpoints
        ]
        return [self._policy(0, self.sft, None), *checkpoints]

    def _policy(self, step: int, policy: PolicyMeasurements, report: Report | None) -> Checkpoint:
        kl, proxy, judge = (self._by_prompt(policy, name) for name in ("kl", "reward", "judge"))
        wins = preference_scores(policy.judge_scores[self.judge_name], self.sft.judge_scores[self.judge_name])
        wins_by_prompt = wins.reshape(self.prompt_count, -1).mean(1)
        return Checkpoint(step, float(kl.mean()), proxy, judge, wins_by_prompt, report)

    def to_json(self) -> dict[str, Any]:
        """Returns what the card and other programs read: the verdict, the fits, and the metrics of each checkpoint."""
        return {
            "schema": 1,
            **self.prompt_source,
            "prompts": self.prompt_count,
            "groups": number_of_groups(self.prompt_groups),
            "samples_per_prompt": self.samples_per_prompt,
            **self.verdict.to_json(),
            "without_judge": self.verdict_without_judge.text,
            "at_recommended": None if self.verdict_at_recommended is None else self.verdict_at_recommended.summary(),
            "judge": self.judge_name,
            "judge_reliability": self.reliability.to_json(),
            "sft": self._estimates(self.sft),
            "checkpoints": [
                {
                    "step": checkpoint.step,
                    **self._estimates(checkpoint.measurements),
                    "fired": list(checkpoint.report.fired),
                }
                for checkpoint in self.checkpoints
            ],
            "fits": {"proxy": self._fit("reward"), "judge": self._fit("judge")},
            # The verdict uses only the last checkpoint's probes, so only these are written in full.
            "probes": self.checkpoints[-1].report.to_json(),
        }

    def arrays(self) -> dict[str, Any]:
        """Returns {metric: (policies, P)} for SFT (step 0) and the checkpoints, for analyses that need no model."""
        policies = [self.sft, *(checkpoint.measurements for checkpoint in self.checkpoints)]
        means = {name: [self._by_prompt(policy, name).tolist() for policy in policies] for name in _METRICS}
        steps = [0, *(checkpoint.step for checkpoint in self.checkpoints)]
        return {"schema": 1, "seed": self.seed, "steps": steps, **means}

    def _values(self, policy: PolicyMeasurements, name: str) -> Sequence[float]:
        return {"reward": policy.reward, "judge": policy.judge_scores[self.judge_name], "kl": policy.exact_kl}[name]

    def _by_prompt(self, policy: PolicyMeasurements, name: str) -> NDArray[np.float64]:
        return np.reshape(self._values(policy, name), (self.prompt_count, self.samples_per_prompt)).mean(1)

    def _estimates(self, policy: PolicyMeasurements) -> dict[str, Any]:
        groups = [group for group in self.prompt_groups for _ in range(self.samples_per_prompt)]
        estimates = {name: bootstrap_mean(self._values(policy, name), groups, seed=self.seed) for name in _METRICS}
        estimates["length"] = bootstrap_mean(policy.length, groups, seed=self.seed)
        estimates["distinct_2"] = distinct_n_estimate(policy.completions, groups, 2)
        return {name: estimate.to_json() for name, estimate in estimates.items()}

    def _fit(self, name: str) -> dict[str, Any] | None:
        """Fits Gao et al.'s form for RL to the checkpoints; None if fewer than three KLs differ."""
        kl = np.stack([self._by_prompt(checkpoint.measurements, "kl") for checkpoint in self.checkpoints])
        if len({round(float(d), 6) for d in root_kl(kl.mean(1)) if d > 0}) < MIN_POINTS:
            return None
        # Gains by prompt, so that the fit can resample the same prompts for all checkpoints.
        means = np.stack([self._by_prompt(checkpoint.measurements, name) for checkpoint in self.checkpoints])
        gains = means - self._by_prompt(self.sft, name)
        kl, gains = (group_means(values, self.prompt_groups) for values in (kl, gains))
        return fit_form("rl", kl, gains, seed=self.seed).to_json()


_METRICS = ("reward", "judge", "kl")


def evaluate_checkpoints(
    context: RunContext, source: DataSource, evaluator: Evaluator, *, reliability: JudgeReliability
) -> Trajectory | str:
    """Measures every checkpoint that is kept in the run directory.

    All policies use the same random numbers for the same prompts.

    Args:
        context: The run.
        source: The data set.
        evaluator: The reference, the reward and the judges.
        reliability: The facts about the judge.

    Returns:
        The trajectory, or a sentence on why there is none.
    """
    config, seed = context.shared.evaluation, context.shared.seed
    if config.checkpoint_prompts == 0:
        return "There is no verdict, because evaluation.checkpoint_prompts is 0."
    # Other checkpoints may be on the disk until the sender has published and deleted them.
    paths = distributed.call_on_main_process(lambda: checkpoints_to_keep(context.record("ppo")))
    if not paths:
        return "There is no verdict, because no checkpoint of the run is on this machine."
    try:
        # The tokenizer of the SFT checkpoint determines which prompts are short enough.
        rows = evaluation_rows(context, source, "validation", policy_folder=context.checkpoint("sft").path)
    except ZooError as error:
        return f"There is no verdict, because there are no validation prompts: {error}"
    # A verdict compares policies prompt by prompt, so only the first rows are used, whose prompts all differ.
    rows = rows.select(range(min(config.checkpoint_prompts, count_distinct_prompts(rows["prompt"]))))
    count, groups = len(rows), group_rows(rows, config.group)
    row_indices, prompts, columns = repeat_prompts(rows, config.checkpoint_samples)
    keys = [(STREAM, row, k % config.checkpoint_samples) for k, row in enumerate(row_indices)]

    # The verdict uses only the headline judge, so other judges do not score the checkpoints.
    evaluator = evaluator.with_only_headline_judge
    judge_name = evaluator.judge.name

    def measure_policy(policy: PreTrainedModel, desc: str, seed: int = seed) -> PolicyMeasurements:
        return measure(policy, evaluator, prompts, keys=keys, seed=seed, desc=desc, columns=columns)

    # The probes compare with SFT under other random numbers. Under the same random numbers, a policy that hardly
    # changed would write the same texts as SFT.
    sft = measure_policy(evaluator.reference, "validating SFT")
    sft_again = measure_policy(evaluator.reference, "validating SFT again", seed + 1)
    completion_groups = [groups[row] for row in row_indices]
    sft_completions = _completions(evaluator, prompts, sft_again, completion_groups, seed)
    checkpoints = []
    for path in paths:
        step = checkpoint_step(path)
        measurements = measure_policy(load_causal(path).eval(), f"validating step {step}")
        policy_completions = _completions(evaluator, prompts, measurements, completion_groups, seed)
        report = probe(policy_completions, sft_completions, seed=seed)
        checkpoints.append(_CheckpointMeasurements(step, measurements, report))
    # From here on, `measurements`, `policy_completions` and `report` are those of the last checkpoint.
    scores = [np.reshape(policy.judge_scores[judge_name], (count, -1)) for policy in (sft, measurements)]
    return Trajectory(
        count,
        config.checkpoint_samples,
        sft,
        checkpoints,
        judge_name=judge_name,
        seed=seed,
        reliability=replace(reliability, split_half=split_half(np.concatenate(scores), [*groups, *groups], seed=seed)),
        trivial_policies=choose_trivial_policies(
            evaluator, prompts, columns, sft, measurements, samples_per_prompt=config.checkpoint_samples
        ),
        reward_effects=_reward_effects(evaluator, prompts, columns, report, policy_completions, sft_completions),
        prompt_source=evaluation_location(context, "validation"),
        groups=groups,
    )


def _reward_effects(
    evaluator: Evaluator,
    prompts: Sequence[Prompt],
    columns: Mapping[str, Sequence[object]],
    report: Report,
    policy: Completions,
    sft: Completions,
) -> list[RewardEffect]:
    """Measures how much the habits that fired change the reward, if they can be added to texts and removed."""
    # Without rewards, no effect can be measured.
    text_edits = make_edits(report, policy, sft) if policy.rewards and sft.rewards else []
    if not text_edits:
        return []

    def compute_rewards(texts: Sequence[str]) -> list[float]:
        return score_by_reward(evaluator, prompts, texts, columns, desc="edited texts")

    def judge(texts: Sequence[str]) -> list[float]:
        return score_completions(evaluator.judge, prompts, texts, columns)

    # Unedited texts are tokenized and scored in the same way as edited texts, so that only the edit matters.
    sft_rewards, policy_rewards = compute_rewards(sft.texts), compute_rewards(policy.texts)
    sft_scores = judge(sft.texts)
    return [
        RewardEffect.of(
            edit.family, sft_rewards=sft_rewards, policy_rewards=policy_rewards,
            rewards_with_habit=compute_rewards(edit.with_habit),
            rewards_without_habit=compute_rewards(edit.without_habit), judge_scores=sft_scores,
            judge_scores_with_habit=judge(edit.with_habit),
        )
        for edit in text_edits
    ]  # fmt: skip


def _completions(
    evaluator: Evaluator, prompts: Sequence[Prompt], measurements: PolicyMeasurements, groups: Sequence[int], seed: int
) -> Completions:
    judge_scores = measurements.judge_scores[evaluator.judge.name]

    def prompt_dependence() -> list[float] | None:
        return measure_dependence(
            evaluator.reference,
            evaluator.tokenizer,
            prompts,
            measurements.tokens,
            measurements.ref_logprob_sums,
            seed=seed,
            temperature=evaluator.temperature,
        )

    # Scoring each text after eight other prompts takes as long as sampling, so the result is reused.
    saved, key = evaluator.saved_measurements, {"measured": "dependence", "tokens": measurements.tokens}
    dependence = prompt_dependence() if saved is None else saved.get(key, prompt_dependence)
    return Completions(
        [display_text(prompt) for prompt in prompts],
        measurements.completions,
        rewards=measurements.reward or None,
        judge_scores=judge_scores,
        logprobs=measurements.ref_logprobs,
        dependence=dependence,
        verified=[score >= 1 for score in judge_scores] if is_answer_checker(evaluator.judge) else None,
        groups=groups,
    )
