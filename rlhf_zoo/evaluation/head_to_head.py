"""A policy and its SFT policy on the same prompts, under the same random numbers: every figure, and each completion."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from ..modeling.chat import display_text, plain_text
from .judges.check import JudgeCheck, split_half
from .judges.llm import LLMJudge
from .judges.named import answers, checks_answers
from .judges.pairwise import PairReport, compare_pairs
from .judges.rule import RuleJudge
from .judges.scalar import ClassifierJudge, FunctionJudge
from .length_control import length_controlled_win_rate
from .measure import Evaluator, Measured, measure, prompt_groups, repeated
from .metrics import metric
from .pass_at_k import Answers
from .stats import Estimate, bootstrap_mean, bootstrap_perplexity, correlation, perplexity_difference
from .text import distinct_n_difference, repetition

STREAM = 5
TIE = 1e-9  # scores of a judge that differ by less are equal
_SIDES = ("sft", "ppo")


@dataclass(frozen=True)
class HeadToHead:
    """What was measured of sft, ppo (the policy) and control (SFT again, other random numbers), by (prompt, sample).

    paid: the judges, by name, that the policy was rewarded by. checks: of each judge on labeled pairs, by its name.
    answers: of each rule that says whether an answer is right, by its name: by policy, and by how they are read,
    strictly or leniently.
    """

    tools: Evaluator
    measured: Mapping[str, Measured]
    prompts: Sequence[Any]
    samples: int
    seed: int
    paid: Collection[str] = ()
    checks: Mapping[str, JudgeCheck] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, Mapping[str, Answers]]] = field(default_factory=dict)

    @property
    def judge(self) -> str:
        """The headline's."""
        return self.tools.judge.name

    @cached_property
    def groups(self) -> list[int]:
        """The place of each completion's prompt among the different ones: rows of one prompt are resampled together."""
        return prompt_groups(self.prompts)

    def to_json(self) -> dict[str, Any]:
        """The figures of evaluation.json, each {value, ci95, n}: n completions, and intervals that resample prompts."""
        judges = {
            **{judge.name: self._scored(judge.name, judge.description) for judge in self.tools.panel.scoring},
            **{name: self._compared(name) for name in self.pairs},
        }
        headline = judges[self.judge]
        found = {
            "prompts": max(self.groups) + 1,
            "rows": len(self.prompts) // self.samples,
            "samples_per_prompt": self.samples,
            "n": len(self.prompts),
            "temperature": self.tools.temperature,
            "max_new_tokens": self.tools.max_new_tokens,
            "judge": self._about(),
            "judges": judges,
            **{side: self._figures(side) for side in _SIDES},
            "difference": self._difference(),
            "win_rate": headline["win_rate"],
            "win_rate_at_equal_length": self._at_equal_length(),
            "control": headline["control"],
        }
        if self.measured["sft"].reward:
            found["agreement"] = self._agreement()
        return found

    def gain_of(self, policy: PreTrainedModel | None, rows: Dataset) -> Estimate:
        """By how much the headline's judge scores a policy above SFT on these prompts; None: the one that was compared.

        rows: those that were asked, as in `head_to_head`. The policy draws with the random numbers of that one.
        """
        found = self.measured["ppo"]
        if policy is not None:
            _, prompts, others = repeated(rows, self.samples)
            keys = keys_of(len(prompts), self.samples)
            one = self.tools.with_one_judge
            found = measure(
                policy, one, prompts, keys=keys, seed=self.seed, desc="confirming the candidate", columns=others
            )
        apart = np.subtract(found.judges[self.judge], self.measured["sft"].judges[self.judge])
        return bootstrap_mean(apart, self.groups, seed=self.seed)

    def jsonl(self) -> str:
        """A line of samples.jsonl for each (prompt, sample): every policy's completion and what was found of it."""
        lines = []
        for i, prompt in enumerate(self.prompts):
            row: dict[str, Any] = {"prompt": display_text(prompt), "sample": i % self.samples}
            row |= {side: found.row(i, self.judge) for side, found in self.measured.items()}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(lines)

    @cached_property
    def pairs(self) -> dict[str, dict[str, PairReport]]:
        """What judges of pairs say of ppo, and of the control, against SFT: {judge: {side: report}}."""
        theirs, asked = self.measured["sft"].completions, [plain_text(prompt) for prompt in self.prompts]
        return {
            judge.name: {
                side: compare_pairs(
                    judge,
                    asked,
                    self.measured[side].completions,
                    theirs,
                    seed=self.seed,
                    groups=self.groups,
                )
                for side in ("ppo", "control")
            }
            for judge in self.tools.panel.comparing
        }

    def _about(self) -> dict[str, Any]:
        judge = self.tools.judge
        about: dict[str, Any] = {
            "name": judge.name,
            "description": judge.description,
            "is_training_reward": judge.name in self.paid,
        }
        if judge.name in self.answers:
            about["checks_answers"] = True
        if isinstance(judge, FunctionJudge | RuleJudge):
            about["target"] = judge.target
        if isinstance(judge, ClassifierJudge):
            about["accuracy"] = judge.accuracy.to_json()
        if steady := self._steadiness():
            about["split_half"] = steady.to_json()
        return {**about, **self._check(judge.name)}

    def _steadiness(self) -> Estimate | None:
        """How far the headline's judge agrees with itself, of SFT and the policy: see `split_half`."""
        rows = [np.reshape(self.measured[side].judges[self.judge], (-1, self.samples)) for side in _SIDES]
        return split_half(np.concatenate(rows), self.groups[:: self.samples] * len(_SIDES), seed=self.seed)

    def _check(self, judge: str) -> dict[str, Any]:
        return {"check": self.checks[judge].to_json()} if judge in self.checks else {}

    def _scored(self, name: str, description: str) -> dict[str, Any]:
        found = {side: self._mean(self.measured[side].judges[name]) for side in _SIDES}
        return {
            "description": description,
            "is_training_reward": name in self.paid,
            **found,
            "win_rate": self._win_rate("ppo", name),
            "control": self._win_rate("control", name),
            **({"checks_answers": True, "answers": self._answers(name)} if name in self.answers else {}),
            **self._check(name),
        }

    def _answers(self, name: str) -> dict[str, Any]:
        """Of right answers: what is found of both policies, and the difference of their accuracy, paired."""
        sft, ppo = (self.answers[name][side] for side in _SIDES)
        return {
            reading: {
                "sft": sft[reading].to_json(),
                "ppo": ppo[reading].to_json(),
                "difference": self._mean((ppo[reading].right - sft[reading].right).ravel().tolist()),
            }
            for reading in ppo
        }

    def _compared(self, name: str) -> dict[str, Any]:
        judge = next(one for one in self.tools.panel.comparing if one.name == name)
        found = self.pairs[name]
        figures: dict[str, Any] = {"description": judge.description}
        if name in self.measured["sft"].judges:  # it rated single completions too
            figures |= {side: self._mean(self.measured[side].judges[name]) for side in _SIDES}
        figures |= {
            "win_rate": found["ppo"].win_rate.to_json(),
            "control": found["control"].win_rate.to_json(),
            "orders": {key: value for key, value in found["ppo"].to_json().items() if key != "win_rate"},
        }
        if isinstance(judge, LLMJudge):
            figures["usage"] = judge.usage.to_json()
        return {**figures, **self._check(name)}

    def _figures(self, side: str) -> dict[str, Any]:
        found, by_prompt = self.measured[side], list(map(str, self.groups))
        kl = {"predictions": found.logprobs, "references": found.ref_logprobs}
        return {
            **({"reward": self._mean(found.reward)} if found.reward else {}),
            "judge": self._mean(found.judges[self.judge]),
            "kl": metric("kl_divergence").compute(**kl, prompts=by_prompt, seed=self.seed),
            "exact_kl": self._mean(found.exact_kl),
            "length": self._mean(found.length),
            "eos_rate": self._mean(list(map(float, found.ended))),
            **{
                f"distinct_{n}": metric("distinct_n").compute(predictions=found.completions, prompts=by_prompt, n=n)
                for n in (1, 2)
            },
            "repetition": self._mean([repetition(text) for text in found.completions]),
            "sft_perplexity": bootstrap_perplexity(
                found.sft_logprob, found.length, self.groups, seed=self.seed
            ).to_json(),
        }

    def _difference(self) -> dict[str, Any]:
        """ppo's figures less sft's, paired: the same resampled prompts for both. KL is a difference already."""
        ours, theirs = (self.measured[side] for side in ("ppo", "sft"))
        along = {
            "reward": (ours.reward, theirs.reward),
            "judge": (ours.judges[self.judge], theirs.judges[self.judge]),
            "length": (ours.length, theirs.length),
            "eos_rate": (ours.ended, theirs.ended),
            "repetition": tuple([repetition(text) for text in one.completions] for one in (ours, theirs)),
        }
        found = {
            name: self._mean(np.subtract(np.asarray(a, dtype=float), np.asarray(b, dtype=float)).tolist())
            for name, (a, b) in along.items()
            if a
        }
        for n in (1, 2):
            estimate = distinct_n_difference(ours.completions, theirs.completions, self.groups, n)
            found[f"distinct_{n}"] = estimate.to_json()
        lost = perplexity_difference(
            (ours.sft_logprob, ours.length), (theirs.sft_logprob, theirs.length), self.groups, seed=self.seed
        )
        return {**found, "sft_perplexity": lost.to_json()}

    def _mean(self, values: Sequence[float]) -> dict[str, Any]:
        return bootstrap_mean(values, self.groups, seed=self.seed).to_json()

    def _win_rate(self, side: str, judge: str) -> dict[str, Any]:
        ours, theirs = self.measured[side].judges[judge], self.measured["sft"].judges[judge]
        by_prompt = list(map(str, self.groups))
        found: dict[str, Any] = metric("win_rate").compute(
            predictions=ours, references=theirs, prompts=by_prompt, tolerance=TIE
        )
        return found

    def _wins(self) -> np.ndarray:
        """1 where the headline's judge prefers the policy, 0 where SFT, ½ for a tie."""
        if self.judge in self.pairs:
            return np.asarray(self.pairs[self.judge]["ppo"].scores)
        return won(self.measured["ppo"].judges[self.judge], self.measured["sft"].judges[self.judge])

    def _at_equal_length(self) -> dict[str, Any]:
        ours, theirs = (self.measured[side].length for side in ("ppo", "sft"))
        return length_controlled_win_rate(self._wins(), ours, theirs, self.groups, seed=self.seed).to_json()

    def _agreement(self) -> dict[str, Any]:
        """Of reward and judge: Spearman over each policy's completions, and how often they prefer the same side."""
        found: dict[str, Any] = {}
        for side in _SIDES:
            reward, judged = self.measured[side].reward, self.measured[side].judges[self.judge]
            estimate = correlation(reward, judged, self.groups, seed=self.seed, ranks=True)
            found[side] = None if estimate is None else estimate.to_json()
        paid, wins = won(self.measured["ppo"].reward, self.measured["sft"].reward), self._wins()
        # Where one of them prefers nothing at all, they agree on nothing.
        tied = (paid == 0.5).all() or (wins == 0.5).all()
        found["same_side"] = None if tied else self._mean((1 - np.abs(paid - wins)).tolist())
        return found


def won(ours: Sequence[float], theirs: Sequence[float]) -> np.ndarray:
    """1 where ours is higher, 0 where theirs is, ½ for a tie."""
    apart = np.subtract(ours, theirs)
    return np.where(np.abs(apart) <= TIE, 0.5, apart > 0)


def keys_of(size: int, samples: int) -> list[tuple[int, ...]]:
    """Of the random numbers that every policy of an evaluation draws with, by (prompt, sample)."""
    return [(STREAM, i // samples, i % samples) for i in range(size)]


def head_to_head(
    policy: PreTrainedModel,
    tools: Evaluator,
    rows: Dataset,
    *,
    samples: int,
    seed: int,
    paid: Collection[str] = (),
    checks: Mapping[str, JudgeCheck] | None = None,
) -> HeadToHead:
    """Samples `samples` completions of each row's prompt from SFT, the policy, and SFT again, and measures them.

    rows: prompts, some of them equal or none, with other columns for rules and reward functions. paid, checks: see
    there.
    """
    _, prompts, others = repeated(rows, samples)
    policies = {"sft": tools.reference, "ppo": policy, "control": tools.reference}
    measured = {
        name: measure(
            one,
            tools,
            prompts,
            keys=keys_of(len(prompts), samples),
            seed=seed + (name == "control"),
            desc=f"evaluating {name}",
            columns=others,
        )
        for name, one in policies.items()
    }
    read = {
        judge.name: {
            side: answers(judge, prompts, measured[side].completions, others, samples=samples) for side in _SIDES
        }
        for judge in tools.panel.scoring
        if checks_answers(judge)
    }
    return HeadToHead(tools, measured, prompts, samples, seed, paid, checks or {}, read)
