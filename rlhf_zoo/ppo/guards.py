"""Guards detect bugs in a run early. They raise an error if the run must be wrong, and warn if it may be wrong.

Each check takes only the values that it checks, so that tests can pass faulty values.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import NotFinite, ZooError
from ..modeling import distributed
from ..modeling.logprobs import token_logprobs
from ..modeling.sampling.sampler import Samples
from .failures import ScoringFailed
from .reference import Reference

#: The largest KL of the first rollout, in nats per completion. It is far above what rounding causes between equal
#: models in float32, and far below the KL between different models.
MAX_START_KL = 0.5
#: The largest mean |log ρ| in the first pass. The sampler's cached pass and the training pass differ by rounding: 1e-6
#: in float32 on a CPU, 1e-3 if a GPU multiplies in TF32, a few hundredths in bf16.
RATIO_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.1}
#: The largest |Δ log π_ref|. The same code runs on the same row, so only changed weights can exceed it.
REFERENCE_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
#: The number of latest updates over which KL must change if the score rises.
WINDOW = 20
#: The number of updates at either end of the window whose mean scores are compared.
WINDOW_END = 5
#: The number of updates in a row with a negative KL that causes a warning.
NEGATIVE_UPDATES = 5


class GuardWarning(UserWarning):
    """A run may be wrong. The message has the number that shows the problem."""


@contextmanager
def wrap_reward_errors() -> Iterator[None]:
    """Converts errors of rewards, except NotFinite, to ScoringFailed, so that the run can save a checkpoint."""
    try:
        yield
    except NotFinite:
        raise
    except ZooError as error:
        raise ScoringFailed(str(error)) from error.__cause__


def warn(message: str) -> None:
    """Warns that a run may be wrong. Only the main process warns, because all processes detect the same problem.

    Args:
        message: A sentence with the number that shows the problem.
    """
    if distributed.is_main_process():
        warnings.warn(message, GuardWarning, stacklevel=3)


@torch.no_grad()
def check_step_size(model: Any, learning_rate: float, *, subject: str) -> None:
    """Warns if an optimizer step is too small to change most of the trained weights that have 16 bits.

    bfloat16 has 8 significant bits: adding a step to a weight 512 times as large changes nothing.

    Args:
        model: The model.
        learning_rate: The learning rate, about the size of an Adam step.
        subject: The model's name in the warning.
    """
    half_types = (torch.bfloat16, torch.float16)
    weights = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype in half_types]
    total = sum(weight.numel() for weight in weights)
    # Adam's first steps have about the size of the learning rate, whatever the gradient's scale.
    changed_count = sum(int((weight + learning_rate != weight).sum()) for weight in weights)
    if changed_count < total / 2:
        warn(
            f"An optimizer step of about the learning rate {learning_rate:g} changes {changed_count / total:.1%} of "
            f"the weights of {subject} and is lost to rounding in the others, because they are "
            f"{str(weights[0].dtype).removeprefix('torch.')}: load them with dtype=torch.float32 and set bf16, which "
            "still computes in bfloat16."
        )


def check_start_kl(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, precision: torch.dtype, starts_at_reference: bool = True
) -> None:
    """Checks that the first rollout of a run that starts at its reference has a KL near 0.

    The mean KL per completion may be up to MAX_START_KL, or as large as rounding can explain. If log π has an error r,
    rounding explains a KL of ½r² per token. In lower precision, 3 standard errors are added, because noise adds up over
    long completions. A KL above MAX_START_KL that rounding can explain causes a warning.

    Args:
        logprobs: (B, T) log π of the first rollout, in nats.
        ref_logprobs: (B, T) log π_ref, in nats.
        mask: (B, T) bool.
        precision: The precision of the policy's passes.
        starts_at_reference: False if the user chose another reference. In that case, a large KL causes only a warning.

    Raises:
        ZooError: The run starts at its reference, but the first rollout's KL is too large.
    """
    token_kl, completion_count = (logprobs - ref_logprobs)[mask].double(), len(mask)
    kl = float(token_kl.sum()) / completion_count
    if abs(kl) < MAX_START_KL:
        return
    # Estimate the standard error over tokens, because their rounding is independent. Completions are too few and differ
    # too much in length.
    standard_error = float(token_kl.square().sum()) ** 0.5 / completion_count
    low_precision, dtype_name = precision != torch.float32, str(precision).removeprefix("torch.")
    rounding = RATIO_ROUNDING.get(precision, RATIO_ROUNDING[torch.bfloat16])
    bound = 0.5 * rounding**2 * float(mask.sum()) / completion_count + (3 * standard_error if low_precision else 0.0)
    message = f"The KL of the first rollout to the reference is {kl:.3g} ± {standard_error:.2g} nats per completion"
    if abs(kl) < bound:
        warn(
            f"{message}. Rounding in {dtype_name} alone can explain {bound:.2g}, because sampling and the reference "
            "round differently, so KL is no more precise than that: load the models in float32, or sample more "
            "completions per update."
        )
    elif not starts_at_reference:
        warn(f"{message}, but a run usually starts at 0: check that ref_model is the SFT policy.")
    else:
        rounding_note = f", more than the {bound:.2g} that {dtype_name} rounding can explain" if low_precision else ""
        raise ZooError(
            f"{message}{rounding_note}, although the run starts at its reference: if the policy's adapter was trained "
            "before, merge it into its base, or pass ref_model or ref_adapter_name."
        )


def check_ends(samples: Samples, stop_ids: Sequence[int]) -> None:
    """Checks that the last token in the mask is an end token for all completions that ended, and for no others.

    Args:
        samples: B completions.
        stop_ids: The end tokens.

    Raises:
        ZooError: The end token is missing from the mask, or a completion has an end token but has not ended.
    """
    stops = torch.tensor(list(stop_ids), device=samples.mask.device)
    last_tokens = samples.completion_ids.gather(1, (samples.mask.sum(1) - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    mismatches = torch.isin(last_tokens, stops) != samples.ended
    if mismatches.any():
        row = int(mismatches.nonzero()[0])
        if samples.ended[row]:
            raise ZooError(
                f"Completion {row} of the rollout ended, but the last token in its mask is {int(last_tokens[row])}: "
                "the end token must be the last one in the mask."
            )
        raise ZooError(
            f"Completion {row} of the rollout did not end, but the last token in its mask is {int(last_tokens[row])}, "
            "an end token: the sampler must set `ended` for it."
        )


def check_rewards(rewards: Tensor, scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> None:
    """Checks that each completion's rewards add up to score − β·ΣKL. The error names the two most common mistakes.

    A is T if each token is an action, and 1 if a completion is.

    Args:
        rewards: (B, A), the reward of each action.
        scores: (B,), the score of each completion.
        kl: (B, A) in nats.
        mask: (B, A) bool.
        kl_coef: β.

    Raises:
        ZooError: The rewards of a completion do not add up to score − β·ΣKL.
    """
    rewards, kl, scores = (x.double() for x in (rewards.masked_fill(~mask, 0), kl.masked_fill(~mask, 0), scores))
    reward_sums, kl_penalties, lengths = rewards.sum(1), kl_coef * kl.sum(1), mask.sum(1)
    # Rounding grows with the size of the terms that are summed, not with their sum.
    tolerance = 1e-4 * (1 + scores.abs() * lengths + abs(kl_coef) * kl.abs().sum(1))
    if ((reward_sums - (scores - kl_penalties)).abs() <= tolerance).all():
        return
    if ((reward_sums - (scores + kl_penalties)).abs() <= tolerance).all():
        raise ZooError("The KL penalty is added instead of subtracted (+β·KL in the reward): give it a minus sign.")
    if ((reward_sums - (scores * lengths - kl_penalties)).abs() <= tolerance).all():
        raise ZooError("The score is broadcast to every token: place it once, on the last token of the completion.")
    row = int(((reward_sums - (scores - kl_penalties)).abs() - tolerance).argmax())
    raise ZooError(
        f"The rewards of completion {row} add up to {float(reward_sums[row]):.4g}, but score − β·KL is "
        f"{float((scores - kl_penalties)[row]):.4g}: correct token_rewards, which must place the score without "
        "changing it. For rewards per token, let a reward function return lists."
    )


def warn_if_scores_identical(scores: Tensor, *, subject: str) -> None:
    """Warns if all completions have the same score.

    Args:
        scores: (B,).
        subject: The name of the rollout in the warning.
    """
    if len(scores) > 1 and bool((scores == scores[0]).all()):
        warn(
            f"All {len(scores)} completions of the {subject} score {float(scores[0]):.4g}, so there is nothing to "
            "learn from them: check the rewards, or raise temperature or num_generations."
        )


def _count_nonfinite_rows(x: Tensor, mask: Tensor) -> int:
    return int((~x.masked_fill(~mask, 0).isfinite()).any(1).sum())


def check_logprobs(logprobs: Tensor, mask: Tensor, *, subject: str) -> None:
    """Checks log π of sampled tokens.

    Args:
        logprobs: (B, T) in nats.
        mask: (B, T) bool.
        subject: The model's name in the error.

    Raises:
        NotFinite: A log-probability is NaN or infinite.
    """
    if failed_count := _count_nonfinite_rows(logprobs, mask):
        raise NotFinite(
            f"The {subject} returned NaN or infinite log-probabilities for {failed_count} of {len(logprobs)} "
            "completions: check its weights, lower learning_rate, or set bf16: false."
        )


def check_values(values: Tensor, mask: Tensor) -> None:
    """Checks the critic's values.

    Args:
        values: (B, T).
        mask: (B, T) bool.

    Raises:
        NotFinite: A value is NaN or infinite.
    """
    if failed_count := _count_nonfinite_rows(values, mask):
        raise NotFinite(
            f"The critic returned NaN or infinite values for {failed_count} of {len(values)} completions: check "
            "value_model, or lower critic_learning_rate."
        )


def check_ratio(mismatch: float, *, precision: torch.dtype) -> None:
    """Checks that the training pass agrees with the sampler: before the first optimizer step, ρ must be 1.

    Args:
        mismatch: Mean |log ρ| over the first minibatch's tokens, in nats.
        precision: The precision of the policy's passes, which sets the tolerance.

    Raises:
        ZooError: The mismatch is larger than rounding can explain.
    """
    tolerance = RATIO_ROUNDING.get(precision, RATIO_ROUNDING[torch.bfloat16])
    if not mismatch <= tolerance:  # also if the mismatch is NaN
        raise ZooError(
            f"In the first pass log π differs from the sampler's by {mismatch:.3g} per token on average, more than the "
            f"{tolerance:g} that rounding can explain. Training and sampling must compute the same: check dropout, "
            "mask and precision, or set recompute_logprobs, which takes log π_old from a forward pass."
        )


class ReferenceWatch:
    """Checks that the reference does not change, by comparing its log-probabilities of a fixed completion."""

    def __init__(self) -> None:
        self._completion: Samples | None = None
        self._first_logprobs: Tensor | None = None

    def check(self, reference: Reference, samples: Samples, *, temperature: float, precision: torch.dtype) -> None:
        """Compares the reference's log-probabilities with those of the first call.

        Args:
            reference: The reference.
            samples: A rollout. The first call keeps its first row.
            temperature: The sampling temperature.
            precision: The precision of the policy's passes, which sets the tolerance.

        Raises:
            ZooError: The reference has changed.
        """
        if self._completion is None:
            # One row is enough: weights that are shared with the policy change every token's log-probability.
            self._completion = samples.select(slice(0, 1))
        with reference.model() as model:
            logprobs = token_logprobs(model, self._completion, temperature=temperature)
        if self._first_logprobs is None:
            self._first_logprobs = logprobs
        change = float((logprobs - self._first_logprobs).abs().max())
        tolerance = REFERENCE_ROUNDING.get(precision, REFERENCE_ROUNDING[torch.bfloat16])
        if not change <= tolerance:  # also if the change is NaN
            raise ZooError(
                f"The reference changed: log π_ref of a fixed completion moved by {change:.3g} nats. Pass a copy as "
                "ref_model, because the reference must not share weights with a model in training."
            )


class KLWatch:
    """Watches KL and score over updates, and warns once about each symptom that a correct run never shows."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._warned: set[str] = set()

    def observe(self, kl: float, kl_error: float, score: float) -> None:
        """Adds KL and score of an update, and warns about the symptoms that the window shows.

        Args:
            kl: The mean over completions of Σ_t (log π − log π_ref), the estimator k1 of the KL, in nats.
            kl_error: The standard error of `kl`.
            score: The mean score.
        """
        self._recent.append((kl, kl_error, score))
        last_updates = list(self._recent)[-NEGATIVE_UPDATES:]
        # By chance k1 may be negative in a single rollout, but not in NEGATIVE_UPDATES rollouts in a row.
        if len(last_updates) == NEGATIVE_UPDATES and all(mean < -2 * error for mean, error, _ in last_updates):
            self._warn_once(
                "negative",
                f"KL was negative in {NEGATIVE_UPDATES} updates in a row (now {kl:.3g} nats). The expectation of k1 "
                "cannot be negative, so the log-probabilities are not those of the sampled distribution: check "
                "temperature and truncation.",
            )
        if len(self._recent) == WINDOW:
            kls, _, scores = zip(*self._recent, strict=True)
            first_mean, last_mean = (sum(end) / WINDOW_END for end in (scores[:WINDOW_END], scores[-WINDOW_END:]))
            rise = last_mean - first_mean
            # The spread of the first scores, before the policy could learn much: √5 times their standard deviation.
            noise = sum((early_score - first_mean) ** 2 for early_score in scores[:WINDOW_END]) ** 0.5
            if max(kls) - min(kls) < 1e-3 and rise > 3 * noise and rise > 0:
                self._warn_once(
                    "flat",
                    f"The score rose by {rise:.3g} over {WINDOW} updates while KL stayed at {kl:.3g} nats: check that "
                    "the reference is not the policy itself, and that the completions are the policy's.",
                )

    def _warn_once(self, symptom: str, message: str) -> None:
        if symptom not in self._warned:
            self._warned.add(symptom)
            warn(message)
