"""Compares a policy with its SFT policy on the same prompts and random numbers, in all metrics."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling.chat import display_text, plain_text
from ..modeling.chat_template import Prompt
from ..modeling.prompt_keys import count_distinct_prompts
from .judges.check import JudgeCheck, split_half
from .judges.llm import LLMJudge
from .judges.pairwise import PairReport, compare_pairs
from .judges.panel import check_answers_by_strictness, is_answer_checker
from .judges.rule import RuleJudge
from .judges.scalar import ClassifierJudge, FunctionJudge
from .length_control import length_controlled_win_rate
from .measure import Evaluator, PolicyMeasurements, measure, repeat_prompts
from .metrics import cached_metric
from .paraphrases import GROUP_REMEDY, count_possible_paraphrases, paraphrase_warning
from .pass_at_k import Answers
from .prompt_groups import NEAR_DUPLICATES, group_rows, number_prompts
from .stats import TIE_TOLERANCE, Estimate, bootstrap_mean, bootstrap_perplexity, correlation, perplexity_difference
from .text import distinct_n_difference, repetition

log = logging.getLogger(__name__)

STREAM = 5  # separates these random numbers from others under the same seed
_ROLES = ("sft", "ppo")


@dataclass(frozen=True)
class HeadToHead:
    """The measurements of SFT, of PPO (the policy) and of the control (SFT with other random numbers).

    Attributes:
        evaluator: The reference, the reward and the judges.
        measurements: The name sft, ppo or control -> its completions and scores, one entry per (prompt, sample).
        prompts: The prompt of each completion.
        samples_per_prompt: Completions per prompt.
        seed: Seed of the sampling and of the resamples.
        reward_judges: Names of the judges that are also the training reward.
        checks: Each judge's results on labeled pairs, by the judge's name.
        answers_by_judge: Name of a rule that checks answers -> sft or ppo -> strict or lenient -> answers.
        row_groups: The group of each row's prompt, see `prompt_groups`; None if every prompt is its own group.
        possible_paraphrases: Number of prompts that may ask the same question as a prompt of another group; 0 if they
            are less than half of the prompts, or if a column of the data set names the groups.
    """

    evaluator: Evaluator
    measurements: Mapping[str, PolicyMeasurements]
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    seed: int
    reward_judges: Collection[str] = ()
    checks: Mapping[str, JudgeCheck] = field(default_factory=dict)
    answers_by_judge: Mapping[str, Mapping[str, Mapping[str, Answers]]] = field(default_factory=dict)
    row_groups: Sequence[int] | None = None
    possible_paraphrases: int = 0

    @property
    def judge_name(self) -> str:
        """The name of the headline judge: the first judge in the recipe, and the only one that the verdict uses."""
        return self.evaluator.judge.name

    @cached_property
    def groups(self) -> list[int]:
        """The group number of each completion's prompt. Intervals treat a group as one unit."""
        if self.row_groups is None:
            return number_prompts(self.prompts)
        return np.repeat(self.row_groups, self.samples_per_prompt).tolist()

    def to_json(self) -> dict[str, Any]:
        """Returns the metrics of evaluation.json.

        Estimates are {value, ci95, n}, where n counts completions and intervals treat a group of prompts as one unit.
        """
        judges = {
            **{
                judge.name: self._scoring_judge_figures(judge.name, judge.description)
                for judge in self.evaluator.panel.scoring_judges
            },
            **{name: self._pair_judge_figures(name) for name in self.pair_reports},
        }
        headline = judges[self.judge_name]
        figures = {
            "prompts": count_distinct_prompts(self.prompts),
            "groups": max(self.groups) + 1,
            "possible_paraphrases": self.possible_paraphrases,
            "rows": len(self.prompts) // self.samples_per_prompt,
            "samples_per_prompt": self.samples_per_prompt,
            "n": len(self.prompts),
            "temperature": self.evaluator.temperature,
            "max_new_tokens": self.evaluator.max_new_tokens,
            "judge": self._judge_facts(),
            "judges": judges,
            **{role: self._policy_metrics(role) for role in _ROLES},
            "difference": self._difference(),
            "win_rate": headline["win_rate"],
            "win_rate_at_equal_length": self._win_rate_at_equal_length(),
            # SFT against itself: its win rate differs from ½ only by noise.
            "control": headline["control"],
        }
        # Without a training reward, the judge has nothing to agree with.
        if self.measurements["sft"].reward:
            figures["agreement"] = self._agreement()
        return figures

    def judge_gain(self, policy: PreTrainedModel | None, rows: Dataset) -> Estimate:
        """Estimates how much higher than SFT the headline judge scores a policy on these prompts.

        Args:
            policy: The candidate of the verdict, which is measured with the same random numbers; None if the candidate
                is the policy that was compared.
            rows: The rows that were passed to `head_to_head`.

        Returns:
            The mean difference of the scores.
        """
        measurements = self.measurements["ppo"]
        if policy is not None:
            _, prompts, columns = repeat_prompts(rows, self.samples_per_prompt)
            keys = random_keys(len(prompts), self.samples_per_prompt)
            evaluator = self.evaluator.with_only_headline_judge
            measurements = measure(
                policy, evaluator, prompts, keys=keys, seed=self.seed, desc="confirming the candidate", columns=columns
            )
        scores = measurements.judge_scores[self.judge_name]
        sft_scores = self.measurements["sft"].judge_scores[self.judge_name]
        return bootstrap_mean(np.subtract(scores, sft_scores), self.groups, seed=self.seed)

    def to_jsonl(self) -> str:
        """Returns samples.jsonl: a line for each (prompt, sample), with every policy's completion and its metrics."""
        lines = []
        for i, prompt in enumerate(self.prompts):
            row: dict[str, object] = {"prompt": display_text(prompt)}
            if not isinstance(prompt, str):
                # The roles matter to a chat template, so a text is not enough for `probe --model`.
                row["messages"] = [dict(message) for message in prompt]
            row["sample"] = i % self.samples_per_prompt
            row |= {role: policy.row(i, self.judge_name) for role, policy in self.measurements.items()}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(lines)

    @cached_property
    def pair_reports(self) -> dict[str, dict[str, PairReport]]:
        """{judge: {role: report}}: the reports of pair judges on ppo and on the control, both against SFT."""
        sft_completions = self.measurements["sft"].completions
        prompt_texts = [plain_text(prompt) for prompt in self.prompts]
        return {
            judge.name: {
                role: compare_pairs(
                    judge,
                    prompt_texts,
                    self.measurements[role].completions,
                    sft_completions,
                    seed=self.seed,
                    groups=self.groups,
                )
                for role in ("ppo", "control")
            }
            for judge in self.evaluator.panel.pair_judges
        }

    def _judge_facts(self) -> dict[str, Any]:
        judge = self.evaluator.judge
        facts: dict[str, object] = {
            "name": judge.name,
            "description": judge.description,
            "is_training_reward": judge.name in self.reward_judges,
        }
        if judge.name in self.answers_by_judge:
            facts["checks_answers"] = True
        if isinstance(judge, FunctionJudge | RuleJudge):
            facts["target"] = judge.target
        if isinstance(judge, ClassifierJudge):
            facts["accuracy"] = judge.accuracy.to_json()
        if self_agreement := self._self_agreement():
            facts["split_half"] = self_agreement.to_json()
        return {**facts, **self._check_entry(judge.name)}

    def _self_agreement(self) -> Estimate | None:
        """Measures how well the headline judge agrees with itself on SFT and the policy; see `split_half`."""
        # Both policies answered the same prompts, so the groups are the same for both.
        scores = np.concatenate([self.measurements[role].judge_scores[self.judge_name] for role in _ROLES])
        groups = self.groups[:: self.samples_per_prompt] * len(_ROLES)
        return split_half(scores.reshape(-1, self.samples_per_prompt), groups, seed=self.seed)

    def _check_entry(self, judge: str) -> dict[str, Any]:
        """Returns {"check": a judge's results on labeled pairs}; {} if it has none."""
        return {"check": self.checks[judge].to_json()} if judge in self.checks else {}

    def _scoring_judge_figures(self, name: str, description: str) -> dict[str, Any]:
        means = {role: self._mean(self.measurements[role].judge_scores[name]) for role in _ROLES}
        return {
            "description": description,
            "is_training_reward": name in self.reward_judges,
            **means,
            "win_rate": self._win_rate("ppo", name),
            "control": self._win_rate("control", name),
            **self._answer_figures(name),
            **self._check_entry(name),
        }

    def _answer_figures(self, name: str) -> dict[str, Any]:
        """Computes both policies' accuracy and the paired difference; {} for a judge that does not check answers."""
        if name not in self.answers_by_judge:
            return {}
        figures = {}
        for strictness, sft_answers in self.answers_by_judge[name]["sft"].items():
            ppo_answers = self.answers_by_judge[name]["ppo"][strictness]
            figures[strictness] = {
                "sft": sft_answers.to_json(),
                "ppo": ppo_answers.to_json(),
                "difference": self._mean((ppo_answers.correct - sft_answers.correct).ravel().tolist()),
            }
        return {"checks_answers": True, "answers": figures}

    def _pair_judge_figures(self, name: str) -> dict[str, Any]:
        judge = next(candidate for candidate in self.evaluator.panel.pair_judges if candidate.name == name)
        reports = self.pair_reports[name]
        figures: dict[str, object] = {"description": judge.description}
        if name in self.measurements["sft"].judge_scores:  # it also rated single completions
            figures |= {role: self._mean(self.measurements[role].judge_scores[name]) for role in _ROLES}
        figures |= {
            "win_rate": reports["ppo"].win_rate.to_json(),
            "control": reports["control"].win_rate.to_json(),
            "orders": {key: value for key, value in reports["ppo"].to_json().items() if key != "win_rate"},
        }
        if isinstance(judge, LLMJudge):
            figures["usage"] = judge.usage.to_json()
        return {**figures, **self._check_entry(name)}

    def _policy_metrics(self, role: str) -> dict[str, Any]:
        # The metric modules group by text, so the number of each group is passed as a text.
        measurements, prompt_keys = self.measurements[role], list(map(str, self.groups))
        logprobs = {"predictions": measurements.logprobs, "references": measurements.ref_logprobs}
        return {
            **({"reward": self._mean(measurements.reward)} if measurements.reward else {}),
            "judge": self._mean(measurements.judge_scores[self.judge_name]),
            "kl": cached_metric("kl_divergence").compute(**logprobs, prompts=prompt_keys, seed=self.seed),
            "exact_kl": self._mean(measurements.exact_kl),
            "length": self._mean(measurements.length),
            "eos_rate": self._mean(list(map(float, measurements.ended))),
            **{
                f"distinct_{n}": cached_metric("distinct_n").compute(
                    predictions=measurements.completions, prompts=prompt_keys, n=n
                )
                for n in (1, 2)
            },
            "repetition": self._mean([repetition(text) for text in measurements.completions]),
            "sft_perplexity": bootstrap_perplexity(
                measurements.ref_logprob_sums, measurements.length, self.groups, seed=self.seed
            ).to_json(),
        }

    def _difference(self) -> dict[str, Any]:
        """Computes the metrics of ppo minus those of sft, paired by prompt.

        KL is left out, because it is relative to SFT already.
        """
        ppo, sft = (self.measurements[role] for role in ("ppo", "sft"))
        sides_by_name = {
            "reward": (ppo.reward, sft.reward),
            "judge": (ppo.judge_scores[self.judge_name], sft.judge_scores[self.judge_name]),
            "length": (ppo.length, sft.length),
            "eos_rate": (ppo.ended, sft.ended),
            "repetition": tuple([repetition(text) for text in policy.completions] for policy in (ppo, sft)),
        }
        differences = {
            name: self._mean(np.subtract(np.asarray(a, dtype=float), np.asarray(b, dtype=float)).tolist())
            for name, (a, b) in sides_by_name.items()
            if a
        }
        for n in (1, 2):
            # Distinct-n needs a jackknife: a bootstrap draws prompts twice, which adds no new n-gram.
            estimate = distinct_n_difference(ppo.completions, sft.completions, self.groups, n)
            differences[f"distinct_{n}"] = estimate.to_json()
        perplexity = perplexity_difference(
            (ppo.ref_logprob_sums, ppo.length), (sft.ref_logprob_sums, sft.length), self.groups, seed=self.seed
        )
        return {**differences, "sft_perplexity": perplexity.to_json()}

    def _mean(self, values: Sequence[float]) -> dict[str, Any]:
        return bootstrap_mean(values, self.groups, seed=self.seed).to_json()

    def _win_rate(self, role: str, judge: str) -> dict[str, Any]:
        scores, sft_scores = self.measurements[role].judge_scores[judge], self.measurements["sft"].judge_scores[judge]
        estimate: dict[str, object] = cached_metric("win_rate").compute(
            predictions=scores, references=sft_scores, prompts=list(map(str, self.groups)), tolerance=TIE_TOLERANCE
        )
        return estimate

    def _preferences(self) -> np.ndarray:
        """Returns (N,): 1 if the headline judge prefers the policy's completion, 0 if it prefers SFT's, ½ for a tie."""
        if self.judge_name in self.pair_reports:
            return np.asarray(self.pair_reports[self.judge_name]["ppo"].scores)
        return preference_scores(*(self.measurements[role].judge_scores[self.judge_name] for role in ("ppo", "sft")))

    def _win_rate_at_equal_length(self) -> dict[str, Any]:
        ppo_lengths, sft_lengths = (self.measurements[role].length for role in ("ppo", "sft"))
        return length_controlled_win_rate(
            self._preferences(), ppo_lengths, sft_lengths, self.groups, seed=self.seed
        ).to_json()

    def _agreement(self) -> dict[str, Any]:
        """Measures how far reward and judge agree: Spearman's ρ by policy, and how often they prefer the same side."""
        agreement: dict[str, object] = {}
        for role in _ROLES:
            # For each policy alone, because the difference between policies would inflate the correlation.
            reward, judge_scores = self.measurements[role].reward, self.measurements[role].judge_scores[self.judge_name]
            estimate = correlation(reward, judge_scores, self.groups, seed=self.seed, ranks=True)
            agreement[role] = None if estimate is None else estimate.to_json()
        # 1 if reward and judge prefer the same side, 0 if they prefer opposite sides, ½ if one of them ties.
        reward_wins = preference_scores(self.measurements["ppo"].reward, self.measurements["sft"].reward)
        judge_wins = self._preferences()
        # If reward or judge has only ties, there is no agreement to measure.
        only_ties = (reward_wins == 0.5).all() or (judge_wins == 0.5).all()
        agreement["same_side"] = None if only_ties else self._mean((1 - np.abs(reward_wins - judge_wins)).tolist())
        return agreement


def preference_scores(ours: Sequence[float], theirs: Sequence[float]) -> np.ndarray:
    """Compares scores pair by pair.

    Args:
        ours: (N,) scores of the first side.
        theirs: (N,) scores of the second side.

    Returns:
        (N,) 1 if ours is higher, 0 if theirs is, ½ for a tie (within `TIE_TOLERANCE`).
    """
    difference = np.subtract(ours, theirs)
    # The scores of equal texts may differ by rounding error between batches.
    return np.where(np.abs(difference) <= TIE_TOLERANCE, 0.5, difference > 0)


def random_keys(size: int, samples_per_prompt: int) -> list[tuple[int, ...]]:
    """Builds the keys of the random numbers, which are the same for every policy of an evaluation.

    Args:
        size: Number of completions.
        samples_per_prompt: Completions per prompt.

    Returns:
        (size,) keys (stream, prompt, sample).
    """
    # The keys contain prompt and sample, so a completion's random numbers do not depend on its batch.
    return [(STREAM, *divmod(i, samples_per_prompt)) for i in range(size)]


def head_to_head(
    policy: PreTrainedModel,
    evaluator: Evaluator,
    rows: Dataset,
    *,
    samples_per_prompt: int,
    seed: int,
    reward_judges: Collection[str] = (),
    checks: Mapping[str, JudgeCheck] | None = None,
    group: str | None = None,
) -> HeadToHead:
    """Samples completions from SFT, from the policy, and from SFT again, and measures them.

    Args:
        policy: The trained policy.
        evaluator: The reference, the reward and the judges.
        rows: Prompts, possibly repeated, with other columns for rules and reward functions.
        samples_per_prompt: Completions per prompt.
        seed: Seed of the sampling and of the resamples.
        reward_judges: Names of the judges that were also the training reward.
        checks: Each judge's results on labeled pairs, by the judge's name.
        group: How to group prompts that ask the same question; see the argument `by` of `group_rows`.

    Returns:
        The measurements of all three.

    Raises:
        ZooError: The column of the groups is missing or wrong.
    """
    row_groups = group_rows(rows, group)
    _, prompts, columns = repeat_prompts(rows, samples_per_prompt)
    policies = {"sft": evaluator.reference, "ppo": policy, "control": evaluator.reference}
    measurements = {
        name: measure(
            model,
            evaluator,
            prompts,
            keys=random_keys(len(prompts), samples_per_prompt),
            # The control needs another seed: with the same seed, SFT would write the same texts again.
            seed=seed + (name == "control"),
            desc=f"evaluating {name}",
            columns=columns,
        )
        for name, model in policies.items()
    }
    # Rules that check answers are applied again to each completion, for accuracy and pass@k.
    answers_by_judge = {
        judge.name: {
            role: {
                strictness: replace(answers, groups=row_groups)
                for strictness, answers in check_answers_by_strictness(
                    judge, prompts, measurements[role].completions, columns, samples_per_prompt=samples_per_prompt
                ).items()
            }
            for role in _ROLES
        }
        for judge in evaluator.panel.scoring_judges
        if is_answer_checker(judge)
    }
    has_group_column = group not in (None, NEAR_DUPLICATES)
    possible_paraphrases = 0 if has_group_column else count_possible_paraphrases(rows["prompt"], row_groups)
    if possible_paraphrases:
        log.warning("%s", paraphrase_warning(possible_paraphrases, GROUP_REMEDY))
    return HeadToHead(
        evaluator,
        measurements,
        prompts,
        samples_per_prompt,
        seed,
        reward_judges,
        checks or {},
        answers_by_judge,
        row_groups,
        possible_paraphrases,
    )


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a samples.jsonl.

    Args:
        path: The file.
    """
    # Only a newline ends a row. `splitlines` would also split at other characters, which completions may contain.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_samples(path: Path, prompts: Sequence[Prompt], per_prompt: int) -> list[dict[str, Any]]:
    """Reads the samples.jsonl of an eval stage and checks that it has the expected prompts.

    Args:
        path: The file.
        prompts: The held-out prompts.
        per_prompt: Samples per prompt.

    Raises:
        ZooError: The file is damaged or has other prompts.
    """
    remedy = "make it again with `rlhf-zoo eval --restart`."
    try:
        rows = read_json_lines(path)
    except (FileNotFoundError, ValueError) as error:
        raise ZooError(f"{path} cannot be read ({error}): {remedy}") from error
    # Prompts that differ only in trailing white space count as equal.
    expected = [display_text(prompt).rstrip() for prompt in prompts for _ in range(per_prompt)]
    if [row["prompt"].rstrip() for row in rows] != expected:
        raise ZooError(f"{path} does not have the data set's prompts: {remedy}")
    return rows
