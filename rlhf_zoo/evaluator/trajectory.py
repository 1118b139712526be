"""Every checkpoint of a PPO run on validation prompts: scores, KL and probes of each, and the verdict over them.

Validation, because the recommended checkpoint is chosen here: the test split measures what was chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from .. import processes
from ..chat import readable, reading_ids, whole_words
from ..devices import MicroBatches
from ..errors import ZooError
from ..evaluation.overoptimization import fit, root_kl
from ..evaluation.probes import (
    Completions,
    Likelihoods,
    Probe,
    Report,
    Thresholds,
    null_thresholds,
    probe,
)
from ..evaluation.stats import bootstrap_mean
from ..evaluation.text import distinct_n_estimate
from ..evaluation.verdict import Checkpoint, Verdict, decide
from ..functional import selected_logprobs
from ..models import load_causal
from ..record import checkpoint_step
from ..runs.choice import lasting
from ..runs.context import RunContext
from ..runs.data import DataSource, evaluated_part, evaluation_rows, parts, stage_source
from ..runs.layout import sft_text
from .judges import checks_answers
from .measure import Evaluator, Measured, measure, repeated, rows_at_once, training_rewards

log = logging.getLogger(__name__)

__all__ = ["Trajectory", "follow"]

STREAM = 8
#: Sets of SFT completions under seeds of their own: the probes' thresholds come from these against each other.
DRAWS = 4
#: Held-out texts of SFT's data by which a loss of capability is seen.
TEXTS, TEXT_TOKENS = 200, 256
FALSE_ALARMS = 0.05
"""The chance that any probe fires on SFT itself."""


@dataclass(frozen=True)
class _Point:
    step: int
    measured: Measured
    report: Report


@dataclass(frozen=True)
class Trajectory:
    """The checkpoints of a run beside its SFT policy, on the same prompts, `samples` completions each.

    where: the prompts are, see `evaluated_part`.
    """

    thresholds: Thresholds
    prompts: int
    samples: int
    sft: Measured
    points: Sequence[_Point]
    judge: str
    seed: int
    judge_is_reward: bool = False
    unfit: str | None = None
    where: Mapping[str, Any] = field(default_factory=lambda: {"split": "validation"})

    @cached_property
    def verdict(self) -> Verdict:
        """Over all checkpoints, in their order."""
        return decide(
            self._checkpoint(0, self.sft, ()),
            [self._checkpoint(one.step, one.measured, one.report.probes) for one in self.points],
            judge_is_reward=self.judge_is_reward,
            unfit=self.unfit,
            seed=self.seed,
        )

    def _checkpoint(self, step: int, found: Measured, probes: Sequence[Probe]) -> Checkpoint:
        kl, proxy, judge = (self._by_prompt(found, name) for name in ("kl", "reward", "judge"))
        return Checkpoint(step, float(kl.mean()), proxy, judge, probes)

    def to_json(self) -> dict[str, Any]:
        """What the card and programs read: the verdict, its fits, and the figures of each checkpoint."""
        return {
            "schema": 1,
            **self.where,
            "prompts": self.prompts,
            "samples_per_prompt": self.samples,
            "judge": self.judge,
            **self.verdict.to_json(),
            "sft": self._figures(self.sft),
            "checkpoints": [
                {"step": one.step, **self._figures(one.measured), "fired": list(one.report.fired)}
                for one in self.points
            ],
            "fits": {"proxy": self._fit("reward"), "judge": self._fit("judge")},
            "probes": self.points[-1].report.to_json(),
            "thresholds": self.thresholds.to_json(),
        }

    def arrays(self) -> dict[str, Any]:
        """Scores and KL by prompt of SFT (step 0) and each checkpoint, to go over again without a model."""
        every = [(0, self.sft), *((one.step, one.measured) for one in self.points)]
        found = {name: [self._by_prompt(one, name).tolist() for _, one in every] for name in _FIGURES}
        return {"schema": 1, "seed": self.seed, "steps": [step for step, _ in every], **found}

    @property
    def _groups(self) -> list[int]:
        return [place for place in range(self.prompts) for _ in range(self.samples)]

    def _values(self, found: Measured, name: str) -> Sequence[float]:
        return {"reward": found.reward, "judge": found.judges[self.judge], "kl": found.exact_kl}[name]

    def _by_prompt(self, found: Measured, name: str) -> NDArray[np.float64]:
        return np.asarray(self._values(found, name), dtype=float).reshape(self.prompts, self.samples).mean(1)

    def _figures(self, found: Measured) -> dict[str, Any]:
        groups = self._groups
        estimates = {name: bootstrap_mean(self._values(found, name), groups, seed=self.seed) for name in _FIGURES}
        estimates["length"] = bootstrap_mean(found.length, groups, seed=self.seed)
        estimates["distinct_2"] = distinct_n_estimate(found.completions, groups, 2)
        return {name: estimate.to_json() for name, estimate in estimates.items()}

    def _fit(self, name: str) -> dict[str, Any] | None:
        """The form of RL (Gao et al. 2022) over the checkpoints; None where there are fewer than three."""
        kl = np.stack([self._by_prompt(one.measured, "kl") for one in self.points])
        if len({round(float(d), 6) for d in root_kl(kl.mean(1)) if d > 0}) < _FEWEST_FITTED:
            return None
        base = self._by_prompt(self.sft, name)
        gains = np.stack([self._by_prompt(one.measured, name) - base for one in self.points])
        return fit("rl", kl, gains, seed=self.seed).to_json()


_FIGURES = ("reward", "judge", "kl")
_FEWEST_FITTED = 3


def follow(context: RunContext, source: DataSource, tools: Evaluator, *, unfit: str | None = None) -> Trajectory | str:
    """Measures every checkpoint that stays in the run directory; a sentence where that cannot be done, and why.

    All policies draw with the same random numbers for the same prompts, SFT's first set among them. unfit: why the
    headline's judge is none, if so.
    """
    config, seed = context.shared.evaluation, context.shared.seed
    if config.checkpoint_prompts == 0:
        return "There is no verdict, since evaluation.checkpoint_prompts is 0."
    # Others may be on the disk still, until the sender has published and deleted them.
    paths = processes.from_first(lambda: lasting(context.record("ppo")))
    if not paths:
        return "There is no verdict, since no checkpoint of the run lies on this machine."
    try:
        rows = evaluation_rows(context, source, "validation", path=context.checkpoint("sft").path)
    except ZooError as error:
        return f"There is no verdict, since there are no validation prompts: {error}"
    count = min(config.checkpoint_prompts, len(rows))
    groups, asked, others = repeated(rows.select(range(count)), config.checkpoint_samples)
    keys = [(STREAM, place, k % config.checkpoint_samples) for k, place in enumerate(groups)]

    def measured(policy: PreTrainedModel, desc: str, seed: int = seed) -> Measured:
        return measure(policy, tools, asked, keys=keys, seed=seed, desc=desc, columns=others)

    judge, tools = tools.judge.name, tools.with_one_judge
    draws = [measured(tools.reference, f"validating SFT, set {k + 1}", seed + k) for k in range(DRAWS)]
    thresholds = null_thresholds([_completions(tools, asked, one) for one in draws], rate=FALSE_ALARMS, seed=seed)
    texts = _texts(context, source)
    rated = _log_likelihoods(tools.reference, tools, texts) if texts else None
    points = []
    for path in paths:
        policy = load_causal(path).eval()
        step = checkpoint_step(path)
        found = measured(policy, f"validating step {step}")
        likelihoods = None
        if rated is not None:
            loss, tokens = _log_likelihoods(policy, tools, texts)
            likelihoods = Likelihoods(loss, rated[0], tokens, [whole_words(text) for text in texts])
        ours, theirs = (_completions(tools, asked, one) for one in (found, draws[0]))
        report = probe(ours, theirs, thresholds, likelihoods=likelihoods)
        points.append(_Point(step, found, report))
    return Trajectory(
        thresholds,
        count,
        config.checkpoint_samples,
        draws[0],
        points,
        judge=judge,
        seed=seed,
        judge_is_reward=judge in training_rewards(context, tools) and not checks_answers(tools.judge),
        unfit=unfit,
        where=evaluated_part(context, "validation"),
    )


def _completions(tools: Evaluator, prompts: Sequence[Any], found: Measured) -> Completions:
    names = {token: str(tools.tokenizer.decode([token])).strip() for row in found.tokens for token in row}
    tokens = [[names[token] for token in row] for row in found.tokens]
    judged = found.judges[tools.judge.name]
    return Completions(
        [readable(prompt) for prompt in prompts], found.completions, found.reward, found.length, tokens, judged
    )


def _texts(context: RunContext, source: DataSource) -> list[Any]:
    """Held-out texts, or conversations, of the data that SFT was trained on; [] where its stage holds none out."""
    if "sft" not in context.recipe.stages:
        return []
    settings = context.settings("sft")
    if settings.data.dataset_test_split is None and settings.data.held_out_share is None:
        return []
    try:
        same = context.settings("ppo").data.dataset_name is None
        _, rows = parts(context, "sft", stage_source(context, "sft", source if same else None))
    except ZooError as error:
        log.info("Capability is not probed: %s", error)
        return []
    assert rows is not None  # the stage holds some out
    field = settings.trainer.dataset_text_field
    return [sft_text(row, field) for row in rows.select(range(min(TEXTS, len(rows))))]


@torch.no_grad()
def _log_likelihoods(policy: PreTrainedModel, tools: Evaluator, texts: Sequence[Any]) -> tuple[list[float], list[int]]:
    """Of each text: −Σ log p of its tokens after the first, nats, at temperature 1; and how many these are."""
    ids = [
        tools.tokenizer(text, truncation=True, max_length=TEXT_TOKENS)["input_ids"]
        if isinstance(text, str)
        else reading_ids(text, tools.tokenizer, ended=True)[:TEXT_TOKENS]
        for text in texts
    ]

    def rated(rows: Sequence[int]) -> list[tuple[float, int]]:
        part = [ids[row] for row in rows]
        width = max(len(row) for row in part)
        padded = torch.tensor([row + [0] * (width - len(row)) for row in part], device=policy.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in part], device=policy.device)
        logits = policy(input_ids=padded, attention_mask=mask, use_cache=False).logits.float()
        logps = selected_logprobs(logits[:, :-1], padded[:, 1:]).masked_fill(mask[:, 1:] == 0, 0)
        return list(zip((-logps.sum(1)).tolist(), mask[:, 1:].sum(1).tolist(), strict=True))

    found = [
        one for part in MicroBatches(rows_at_once(policy, TEXT_TOKENS)).run(rated, range(len(ids))) for one in part
    ]
    return [loss for loss, _ in found], [count for _, count in found]
