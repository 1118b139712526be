"""Metrics of an update. docs/metrics.md explains each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from .loss import LOGPROB_MISMATCH, PER_TOKEN_TERMS
from .rollout import Advantages, Rollout

#: The number of parts of a completion, by position, for which explained variance is computed.
QUARTERS = 4


def completion_metrics(rollout: Rollout, advantages: Advantages, names: list[str]) -> dict[str, Tensor]:
    """Computes the metrics of each completion, for training and evaluation.

    Args:
        rollout: B completions.
        advantages: The completions' rewards.
        names: The names of the rewards, in the order of the columns of `per_reward`.

    Returns:
        {metric: (B,)}, NaN where the metric does not apply.
    """
    per_reward = advantages.reward_scores.per_reward
    return {
        "objective/score": advantages.reward_scores.total,
        "objective/shaped_score": advantages.shaped_scores,
        **{f"rewards/{name}": per_reward[:, index] for index, name in enumerate(names)},
        "objective/kl": rollout.kl,
        **({} if rollout.engine_mismatch is None else {"policy/engine_mismatch": rollout.engine_mismatch}),
        "completions/length": rollout.mask.sum(1).float(),
        "completions/eos_rate": rollout.samples.ended.float(),
    }


def critic_metrics(values: Tensor, returns: Tensor, mask: Tensor, *, max_actions: int) -> dict[str, float]:
    """Measures how well V predicts R: overall, compared with the best constant, and in each quarter of the positions.

    Args:
        values: (B, A), V of all processes.
        returns: (B, A).
        mask: (B, A) bool.
        max_actions: The maximum number of actions in a completion.

    Returns:
        Explained variances and R² (gain_over_constant) by the metrics' names, NaN where returns do not vary or a
        quarter is never reached. There are no quarters if each completion has a single action.
    """
    metrics = {
        "critic/explained_variance": F.explained_variance(values, returns, mask),
        "critic/gain_over_constant": F.value_r2(values, returns, mask),
    }
    if mask.shape[1] > 1:
        # Split the longest possible completion, not the longest of this batch, so that the quarters of different
        # updates can be compared.
        quarter_length = math.ceil(max_actions / QUARTERS)
        for quarter in range(QUARTERS):
            positions = slice(quarter * quarter_length, (quarter + 1) * quarter_length)
            name = f"critic/explained_variance/quarter_{quarter + 1}"
            quarter_mask = mask[:, positions]
            metrics[name] = (
                F.explained_variance(values[:, positions], returns[:, positions], quarter_mask)
                if quarter_mask.any()
                else torch.tensor(math.nan)
            )
    return {name: float(value) for name, value in metrics.items()}


class UpdateMetrics:
    """Accumulates the loss terms of an update over its micro-batches, and averages them over tokens or actions.

    Args:
        device: Where the sums are kept. Copying them to the CPU for each micro-batch would make the GPU wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))
        self.norms: dict[str, list[Tensor]] = defaultdict(list)
        self.step_loss = torch.zeros((), device=device)
        self.step_mismatch = torch.zeros((), device=device)
        self.steps = 0
        self.epochs = 0
        self._sums_before_epoch = torch.zeros(2, dtype=torch.float64, device=device)

    def add_loss(self, loss: Tensor) -> None:
        """Adds a micro-batch's share of the minibatch's loss.

        Args:
            loss: The scalar that is differentiated.
        """
        self.sums["loss"] += loss.detach().double()
        self.step_loss += loss.detach()

    def add_terms(self, terms: Mapping[str, Tensor], token_mask: Tensor, action_mask: Tensor) -> None:
        """Adds the terms of a micro-batch.

        Args:
            terms: (b, T) or (b, A) by name.
            token_mask: (b, T) bool.
            action_mask: (b, A) bool.
        """
        # A single NaN makes the sum NaN, so one copy to the CPU per optimizer step checks all log-probabilities.
        self.step_mismatch += terms[LOGPROB_MISMATCH].masked_fill(~token_mask, 0).sum()
        for name, term in terms.items():
            # After the first optimizer step, log ρ measures the change of the policy and not a mismatch.
            if name == LOGPROB_MISMATCH and self.steps:
                continue
            mask = token_mask if name in PER_TOKEN_TERMS else action_mask
            self.sums[name] += term.double().masked_fill(~mask, 0).sum()
        self.sums["tokens"] += token_mask.sum()
        self.sums["actions"] += action_mask.sum()
        if not self.steps:
            self.sums["tokens before first step"] += token_mask.sum()

    def register_keys(self, other: UpdateMetrics) -> None:
        """Adds the other metrics' keys with sums of 0, because all processes must reduce the same keys.

        Args:
            other: The metrics whose keys are added. Their values are ignored.
        """
        for name in other.sums:
            self.sums[name] += 0

    def add_texts(self, nll: Tensor, mask: Tensor) -> None:
        """Adds the negative log-likelihood of PTX texts.

        Args:
            nll: (b, L−1) in nats.
            mask: (b, L−1) bool, the target tokens.
        """
        self.sums["loss/ptx"] += nll.detach().double().masked_fill(~mask, 0).sum()
        self.sums["text tokens"] += mask.sum()

    def record_step(self, norms: Mapping[str, Tensor]) -> None:
        """Counts an optimizer step, whether it was made or skipped.

        Args:
            norms: The gradient norms, by name.
        """
        self.steps += 1
        self.step_loss, self.step_mismatch = (torch.zeros_like(x) for x in (self.step_loss, self.step_mismatch))
        for name, norm in norms.items():
            self.norms[name].append(norm)

    def first_pass_mismatch(self, reduce: Any) -> float:
        """Returns the mean |log ρ| per token before the first optimizer step, over all processes.

        Args:
            reduce: Sums a tensor over processes.
        """
        mismatch, token_count = reduce(
            torch.stack([self.sums[LOGPROB_MISMATCH], self.sums["tokens before first step"]])
        ).tolist()
        return mismatch / token_count

    def end_epoch(self, reduce: Any) -> float:
        """Counts an epoch. Returns its approximate KL: the mean ρ − 1 − log ρ per token over all processes, in nats.

        Args:
            reduce: Sums a tensor over processes.
        """
        # The sums cover all epochs so far, so subtract those of earlier epochs.
        sums = reduce(torch.stack([self.sums["policy/approxkl"], self.sums["tokens"]]))
        approx_kl, token_count = (sums - self._sums_before_epoch).tolist()
        self._sums_before_epoch = sums
        self.epochs += 1
        return approx_kl / token_count

    def means(self, reduce: Any) -> dict[str, float]:
        """Returns the means of the update's metrics over all processes.

        Args:
            reduce: Sums a tensor over processes.
        """
        # Sort the names, because every process must reduce in the same order, and each process fills its dictionary in
        # the order of its micro-batches.
        names = sorted(self.sums)
        reduced_sums = reduce(torch.stack([self.sums[name] for name in names]))
        totals = dict(zip(names, reduced_sums.tolist(), strict=True))
        token_count, action_count = totals.pop("tokens"), totals.pop("actions")
        divisors = {
            "loss": max(self.steps, 1),
            "loss/ptx": totals.pop("text tokens", 0.0),
            LOGPROB_MISMATCH: totals.pop("tokens before first step"),
        }
        means = {
            name: total / divisors.get(name, token_count if name in PER_TOKEN_TERMS else action_count)
            for name, total in totals.items()
        }
        norms = {f"grad_norm/{name}": float(torch.stack(values).mean()) for name, values in self.norms.items()}
        return means | norms | {"policy/epochs": float(self.epochs)}
