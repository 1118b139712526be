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


def _missing_eos(draw: Draw) -> tuple[Any, Any]:
    scores, ended = draw.normal(draw.shape[0]), torch.tensor(draw.rng.random(draw.shape[0]) < 0.5)
    return (
        functional.missing_eos_penalty(scores, ended, penalty=1.5),
        reference.missing_eos_penalty(scores, ended, penalty=1.5),
    )


def _token_rewards(draw: Draw) -> tuple[Any, Any]:
    arguments = draw.normal(draw.shape[0]), draw.normal(), draw.mask()
    return functional.token_rewards(*arguments, kl_coef=0.07), reference.token_rewards(*arguments, kl_coef=0.07)


def _gae(draw: Draw, gamma: float, lam: float) -> tuple[Any, Any]:
    arguments = draw.normal(), draw.normal(), draw.mask()
    return functional.gae(*arguments, gamma=gamma, lam=lam), reference.gae(*arguments, gamma=gamma, lam=lam)


def _policy_loss(draw: Draw) -> tuple[Any, Any]:
    arguments = *draw.logprobs(), draw.normal()
    return (
        functional.clipped_policy_loss(*arguments, cliprange=0.2),
        reference.clipped_policy_loss(*arguments, cliprange=0.2),
    )


def _value_loss(draw: Draw, cliprange: float | None) -> tuple[Any, Any]:
    values = draw.normal()
    arguments = values, values + draw.normal(scale=0.3), draw.normal()
    return (
        functional.clipped_value_loss(*arguments, cliprange=cliprange),
        reference.clipped_value_loss(*arguments, cliprange=cliprange),
    )


def _aggregate(draw: Draw) -> tuple[Any, Any]:
    loss, mask = draw.normal(), draw.mask()
    return functional.aggregate(loss, mask, tokens=37.0), reference.aggregate(loss, mask, tokens=37.0)


def _reduction(name: str, *, pair: bool = False) -> Callable[[Draw], tuple[Any, Any]]:
    def case(draw: Draw) -> tuple[Any, Any]:
        arguments = (*draw.logprobs(), draw.mask()) if pair else (draw.normal() + 0.5, draw.mask())
        return getattr(functional, name)(*arguments), getattr(reference, name)(*arguments)

    return case


def _explained_variance(draw: Draw) -> tuple[Any, Any]:
    values, mask = draw.normal(), draw.mask()
    returns = values + draw.normal(scale=0.7)
    return functional.explained_variance(values, returns, mask), reference.explained_variance(values, returns, mask)


def _last_token(draw: Draw) -> tuple[Any, Any]:
    mask = draw.mask()
    return functional.last_token(mask), reference.last_token(mask)


def _shape_scores(draw: Draw, clip: float | None) -> tuple[Any, Any]:
    scores = draw.normal(draw.shape[0], scale=4)
    return functional.shape_scores(scores, clip=clip), reference.shape_scores(scores, clip=clip)


CASES: dict[str, Callable[[Draw], tuple[Any, Any]]] = {
    "selected_logprobs": _selected_logprobs,
    "entropy": _entropy,
    "masked_mean": _reduction("masked_mean"),
    "masked_moments": _reduction("masked_moments"),
    "whiten": lambda draw: _whiten(draw, shift_mean=True),
    "whiten/mean kept": lambda draw: _whiten(draw, shift_mean=False),
    "whiten/two shards": _whiten_over_shards,
    "kl_penalty/k1": lambda draw: _kl_penalty(draw, "k1"),
    "kl_penalty/k3": lambda draw: _kl_penalty(draw, "k3"),
    "last_token": _last_token,
    "shape_scores": lambda draw: _shape_scores(draw, None),
    "shape_scores/clipped": lambda draw: _shape_scores(draw, 2.5),
    "missing_eos_penalty": _missing_eos,
    "token_rewards": _token_rewards,
    "gae": lambda draw: _gae(draw, 0.97, 0.9),
    "gae/undiscounted": lambda draw: _gae(draw, 1.0, 0.95),
    "clipped_policy_loss": _policy_loss,
    "clipped_value_loss": lambda draw: _value_loss(draw, 0.2),
    "clipped_value_loss/unclipped": lambda draw: _value_loss(draw, None),
    "aggregate": _aggregate,
    "approx_kl": _reduction("approx_kl", pair=True),
    "explained_variance": _explained_variance,
}


def _arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(part) for part in (result if isinstance(result, tuple) else (result,))]


def test_every_public_formula_has_a_reference() -> None:
    assert {name.split("/")[0] for name in CASES} == set(functional.__all__)


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


@pytest.mark.parametrize("name", sorted(set(CASES) - {"last_token", "masked_moments", "explained_variance"}))
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
