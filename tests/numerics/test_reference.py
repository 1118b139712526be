"""Every public formula agrees with `reference.py` on random inputs, in float64 and in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import torch
from tolerances import PRECISIONS, tolerance

from rlhf_zoo import functional
from rlhf_zoo.ppo import control

VOCABULARY = 11
SHAPES = [(1, 1), (2, 5), (7, 53)]
FORMULAS = {name for name in functional.__all__ if callable(getattr(functional, name))}


@dataclass(frozen=True)
class Draw:
    """Random inputs of one shape; `close` pairs are log-probabilities of neighbouring policies."""

    rng: np.random.Generator
    shape: tuple[int, int]
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.tensor(self.rng.normal(0, scale, shape or self.shape), dtype=self.dtype)

    def mask(self, shortest: int = 1) -> torch.Tensor:
        width = self.shape[1]
        lengths = self.rng.integers(min(shortest, width), width + 1, size=self.shape[0])
        return torch.tensor(np.arange(self.shape[1]) < lengths[:, None])

    def logprobs(self) -> tuple[torch.Tensor, torch.Tensor]:
        old = -self.normal().abs() * 3
        return old + self.normal(scale=0.3), old


def _mean_and_std(draw: Draw) -> tuple[Any, Any]:
    x, mask = draw.normal() * 2 + 1, draw.mask(shortest=4)
    return functional.mean_and_std(functional.masked_moments(x, mask)), reference.mean_and_std(x, mask)


def _whiten(draw: Draw, *, shift_mean: bool) -> tuple[Any, Any]:
    # Two or three numbers can lie so near each other that dividing by their deviation magnifies any rounding.
    x, mask = draw.normal() * 2 + 1, draw.mask(shortest=4)
    ours = functional.whiten(x, mask, functional.masked_moments(x, mask), shift_mean=shift_mean)
    return ours, reference.whiten(x, mask, shift_mean=shift_mean)


def _whiten_over_shards(draw: Draw) -> tuple[Any, Any]:
    x, mask = draw.normal(), draw.mask(shortest=4)
    another = Draw(draw.rng, (draw.shape[0] + 2, draw.shape[1]), draw.dtype)
    other, other_mask = another.normal() * 3, another.mask(shortest=4)
    moments = functional.masked_moments(x, mask) + functional.masked_moments(other, other_mask)
    batch, batch_mask = torch.cat([x, other]), torch.cat([mask, other_mask])
    return functional.whiten(x, mask, moments), reference.whiten(x, mask, batch=batch, batch_mask=batch_mask)


def _selected_logprobs(draw: Draw) -> tuple[Any, Any]:
    logits = draw.normal(*draw.shape, VOCABULARY, scale=3)
    tokens = torch.tensor(draw.rng.integers(0, VOCABULARY, size=draw.shape))
    return functional.selected_logprobs(logits, tokens), reference.selected_logprobs(logits, tokens)


def _entropy(draw: Draw) -> tuple[Any, Any]:
    logits = draw.normal(*draw.shape, VOCABULARY, scale=3)
    return functional.entropy(logits), reference.entropy(logits)


def _kl_penalty(draw: Draw, estimator: str) -> tuple[Any, Any]:
    pair = draw.logprobs()
    return functional.kl_penalty(*pair, estimator=estimator), reference.kl_penalty(*pair, estimator=estimator)


def _exact_kl(draw: Draw) -> tuple[Any, Any]:
    logits, ref_logits = draw.normal(*draw.shape, VOCABULARY, scale=3), draw.normal(*draw.shape, VOCABULARY, scale=3)
    return functional.exact_kl(logits, ref_logits), reference.exact_kl(logits, ref_logits)


def _kl_loss(draw: Draw, estimator: str) -> tuple[Any, Any]:
    """The loss and its gradient: only the gradient shows which factors are constants."""
    logprobs, old = draw.logprobs()
    arguments = logprobs.requires_grad_(), old, old + draw.normal(scale=0.5)
    loss = functional.kl_loss(*arguments, estimator=estimator)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    numbers = [x.detach() for x in arguments]
    theirs = [f(*numbers, estimator=estimator) for f in (reference.kl_loss, reference.kl_loss_gradient)]
    return (loss.detach(), gradient), tuple(theirs)


def _actions(draw: Draw, level: str) -> tuple[Any, Any]:
    x, mask = draw.normal(), draw.mask()
    ours, theirs = functional.actions(x, mask, level=level), reference.actions(x, mask, level=level)
    return (ours, theirs) if level == "sequence" else (ours[mask], theirs[mask.cpu().numpy()])


def _missing_eos_penalty(draw: Draw) -> tuple[Any, Any]:
    scores, ended = draw.normal(draw.shape[0]), torch.tensor(draw.rng.random(draw.shape[0]) < 0.5)
    return (
        functional.missing_eos_penalty(scores, ended, penalty=1.5),
        reference.missing_eos_penalty(scores, ended, penalty=1.5),
    )


def _missing_eos_score(draw: Draw) -> tuple[Any, Any]:
    scores, ended = draw.normal(draw.shape[0]), torch.tensor(draw.rng.random(draw.shape[0]) < 0.5)
    return (
        functional.missing_eos_score(scores, ended, score=-1.25),
        reference.missing_eos_score(scores, ended, score=-1.25),
    )


def _token_rewards(draw: Draw) -> tuple[Any, Any]:
    arguments = draw.normal(draw.shape[0]), draw.normal(), draw.mask()
    return functional.token_rewards(*arguments, kl_coef=0.07), reference.token_rewards(*arguments, kl_coef=0.07)


def _gae(draw: Draw, gamma: float, lam: float) -> tuple[Any, Any]:
    arguments = draw.normal(), draw.normal(), draw.mask()
    return functional.gae(*arguments, gamma=gamma, lam=lam), reference.gae(*arguments, gamma=gamma, lam=lam)


def _policy_loss(draw: Draw, **clips: float) -> tuple[Any, Any]:
    arguments = *draw.logprobs(), draw.normal()
    return (
        functional.clipped_policy_loss(*arguments, cliprange=0.2, **clips),
        reference.clipped_policy_loss(*arguments, cliprange=0.2, **clips),
    )


def _sequence_policy_loss(draw: Draw) -> tuple[Any, Any]:
    # The log-ratios are summed, not the log-probabilities: those of 53 tokens would cancel to a rounding of their size.
    (logprobs, old), mask, advantages = draw.logprobs(), draw.mask(), draw.normal(draw.shape[0], 1)
    log_ratio = functional.actions(logprobs - old, mask, level="sequence")
    ours = functional.clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, cliprange=0.5)
    ratio = np.log(reference.sequence_ratio(logprobs, old, mask))
    return ours, reference.clipped_policy_loss(ratio, np.zeros_like(ratio), advantages, cliprange=0.5)


def _value_loss(draw: Draw, cliprange: float | None) -> tuple[Any, Any]:
    values = draw.normal()
    arguments = values, values + draw.normal(scale=0.3), draw.normal()
    return (
        functional.clipped_value_loss(*arguments, cliprange=cliprange),
        reference.clipped_value_loss(*arguments, cliprange=cliprange),
    )


def _aggregate(draw: Draw, mode: str) -> tuple[Any, Any]:
    arguments, counts = (draw.normal(), draw.mask()), {"tokens": 37.0, "sequences": 9.0, "length": 64}
    return functional.aggregate(*arguments, **counts, mode=mode), reference.aggregate(*arguments, **counts, mode=mode)


def _reduction(name: str, *, pair: bool = False) -> Callable[[Draw], tuple[Any, Any]]:
    def case(draw: Draw) -> tuple[Any, Any]:
        arguments = (*draw.logprobs(), draw.mask()) if pair else (draw.normal() + 0.5, draw.mask())
        return getattr(functional, name)(*arguments), getattr(reference, name)(*arguments)

    return case


def _critic(name: str) -> Callable[[Draw], tuple[Any, Any]]:
    def case(draw: Draw) -> tuple[Any, Any]:
        values, mask = draw.normal(), draw.mask()
        returns = values + draw.normal(scale=0.7)
        return getattr(functional, name)(values, returns, mask), getattr(reference, name)(values, returns, mask)

    return case


def _last_token(draw: Draw) -> tuple[Any, Any]:
    mask = draw.mask()
    return functional.last_token(mask), reference.last_token(mask)


def _shape_scores(draw: Draw, **settings: float) -> tuple[Any, Any]:
    scores = draw.normal(draw.shape[0], scale=4)
    return functional.shape_scores(scores, **settings), reference.shape_scores(scores, **settings)


def _shape_scores_by_their_own_moments(draw: Draw) -> tuple[Any, Any]:
    """As a run with running statistics does: μ and σ are tensors of the scores seen so far."""
    scores, seen = draw.normal(draw.shape[0], scale=4), draw.normal(20, scale=4)
    every = torch.ones(20, dtype=torch.bool)
    ours = functional.mean_and_std(functional.masked_moments(seen, every))
    theirs = reference.mean_and_std(seen, every)
    return (
        functional.shape_scores(scores, mean=ours[0], std=ours[1], clip=1.0),
        reference.shape_scores(scores, mean=theirs[0], std=theirs[1], clip=1.0),
    )


CASES: dict[str, Callable[[Draw], tuple[Any, Any]]] = {
    "selected_logprobs": _selected_logprobs,
    "entropy": _entropy,
    "masked_mean": _reduction("masked_mean"),
    "masked_moments": _reduction("masked_moments"),
    "whiten": lambda draw: _whiten(draw, shift_mean=True),
    "whiten/mean kept": lambda draw: _whiten(draw, shift_mean=False),
    "whiten/two shards": _whiten_over_shards,
    "mean_and_std": _mean_and_std,
    "kl_penalty/k1": lambda draw: _kl_penalty(draw, "k1"),
    "kl_penalty/k2": lambda draw: _kl_penalty(draw, "k2"),
    "kl_penalty/k3": lambda draw: _kl_penalty(draw, "k3"),
    "exact_kl": _exact_kl,
    "kl_loss/k2": lambda draw: _kl_loss(draw, "k2"),
    "kl_loss/k3": lambda draw: _kl_loss(draw, "k3"),
    "kl_loss/k3_reverse": lambda draw: _kl_loss(draw, "k3_reverse"),
    "actions/token": lambda draw: _actions(draw, "token"),
    "actions/sequence": lambda draw: _actions(draw, "sequence"),
    "last_token": _last_token,
    "shape_scores": lambda draw: _shape_scores(draw),
    "shape_scores/clipped": lambda draw: _shape_scores(draw, clip=2.5),
    "shape_scores/centred and scaled": lambda draw: _shape_scores(draw, mean=1.3, std=2.7),
    "shape_scores/all three": lambda draw: _shape_scores(draw, mean=1.3, std=2.7, clip=0.9),
    "shape_scores/by their own moments": _shape_scores_by_their_own_moments,
    "missing_eos_penalty": _missing_eos_penalty,
    "missing_eos_score": _missing_eos_score,
    "token_rewards": _token_rewards,
    "gae": lambda draw: _gae(draw, 0.97, 0.9),
    "gae/undiscounted": lambda draw: _gae(draw, 1.0, 0.95),
    "clipped_policy_loss": lambda draw: _policy_loss(draw),
    "clipped_policy_loss/clip higher": lambda draw: _policy_loss(draw, cliprange_high=0.4),
    "clipped_policy_loss/dual clip": lambda draw: _policy_loss(draw, dual_clip=1.3),
    "clipped_policy_loss/both": lambda draw: _policy_loss(draw, cliprange_high=0.4, dual_clip=1.3),
    "clipped_policy_loss/sequence": _sequence_policy_loss,
    "clipped_value_loss": lambda draw: _value_loss(draw, 0.2),
    "clipped_value_loss/unclipped": lambda draw: _value_loss(draw, None),
    "aggregate/token-mean": lambda draw: _aggregate(draw, "token-mean"),
    "aggregate/seq-mean-token-mean": lambda draw: _aggregate(draw, "seq-mean-token-mean"),
    "aggregate/seq-mean-token-sum": lambda draw: _aggregate(draw, "seq-mean-token-sum"),
    "aggregate/seq-sum-norm": lambda draw: _aggregate(draw, "seq-sum-norm"),
    "approx_kl": _reduction("approx_kl", pair=True),
    "explained_variance": _critic("explained_variance"),
    "constant_gain": _critic("constant_gain"),
}
IN_FLOAT64 = {"last_token", "masked_moments", "mean_and_std", "explained_variance", "constant_gain"}


def _arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(part) for part in (result if isinstance(result, tuple) else (result,))]


def test_every_public_formula_has_a_reference() -> None:
    assert {name.split("/")[0] for name in CASES} == FORMULAS


def test_every_mode_that_has_a_name_has_a_reference() -> None:
    estimators = {*functional.KL_IN_REWARD, *functional.KL_IN_LOSS}
    assert {f"kl_penalty/{estimator}" for estimator in ("k2", *functional.KL_IN_REWARD)} <= set(CASES)
    assert {f"kl_loss/{estimator}" for estimator in estimators - {"k1", "full"}} <= set(CASES)
    assert {f"aggregate/{mode}" for mode in functional.AGGREGATIONS} <= set(CASES)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    for number, shape in enumerate(SHAPES):
        for seed in range(20):
            ours, theirs = CASES[name](Draw(np.random.default_rng([seed, number]), shape, dtype))
            for got, wanted in zip(_arrays(ours), _arrays(theirs), strict=True):
                assert got.shape == wanted.shape
                if wanted.dtype.kind in "bi":
                    assert got.dtype == wanted.dtype
                    np.testing.assert_array_equal(got, wanted)
                else:
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance(dtype, wanted))


@pytest.mark.parametrize("name", sorted(set(CASES) - IN_FLOAT64))
def test_keeps_the_precision_it_is_given(name: str) -> None:
    for dtype in PRECISIONS:
        ours, _ = CASES[name](Draw(np.random.default_rng(0), (2, 5), dtype))
        first = ours[0] if isinstance(ours, tuple) else ours
        assert first.dtype == dtype


def test_the_adaptive_controller_agrees_with_the_reference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        coefficient, target = rng.uniform(0.01, 1), rng.uniform(0.5, 20)
        kl, episodes, horizon = rng.uniform(-2, 40), int(rng.integers(1, 512)), int(rng.integers(512, 20_000))
        ours = control.AdaptiveKL(coefficient, target, horizon).update(kl, episodes).kl_coef
        theirs = reference.adaptive_kl(coefficient, kl, episodes, target=target, horizon=horizon)
        assert ours == pytest.approx(theirs, rel=0, abs=tolerance(torch.float64, theirs))
