"""Every public formula agrees with `reference.py` on random inputs, in float64 and in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import torch
from tolerances import PRECISIONS, tolerance

from rlhf_zoo import functional
from rlhf_zoo.ppo import kl_controller

VOCABULARY = 11
SHAPES = [(1, 1), (2, 5), (7, 53)]
FORMULAS = {name for name in functional.__all__ if callable(getattr(functional, name))}


@dataclass(frozen=True)
class Draw:
    """Draws random inputs of one shape."""

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
        """Draws log-probabilities of two similar policies."""
        old = -self.normal().abs() * 3
        return old + self.normal(scale=0.3), old


Case = Callable[[Draw], tuple[Any, Any]]


def evaluate_both(name: str, *arguments: Any, **settings: Any) -> tuple[Any, Any]:
    return getattr(functional, name)(*arguments, **settings), getattr(reference, name)(*arguments, **settings)


def _logits(draw: Draw) -> torch.Tensor:
    return draw.normal(*draw.shape, VOCABULARY, scale=3)


def _selected_logprobs(draw: Draw) -> tuple[Any, Any]:
    return evaluate_both(
        "selected_logprobs", _logits(draw), torch.tensor(draw.rng.integers(0, VOCABULARY, size=draw.shape))
    )


def _importance_weights(level: str) -> Case:
    def case(draw: Draw) -> tuple[Any, Any]:
        mask = draw.mask()
        actual, expected = evaluate_both("importance_weights", *draw.logprobs(), mask, cap=1.2, level=level)
        return (actual[mask], expected[mask.cpu().numpy()]) if level == "token" else (actual, expected)

    return case


def _spread(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    # Two or three numbers can be so close that a division by their deviation magnifies rounding.
    return draw.normal() * 2 + 1, draw.mask(shortest=4)


def _mean_and_std(draw: Draw) -> tuple[Any, Any]:
    x, mask = _spread(draw)
    return functional.mean_and_std(functional.masked_moments(x, mask)), reference.mean_and_std(x, mask)


def _whiten(draw: Draw, *, shift_mean: bool) -> tuple[Any, Any]:
    x, mask = _spread(draw)
    ours = functional.whiten(x, mask, functional.masked_moments(x, mask), shift_mean=shift_mean)
    return ours, reference.whiten(x, mask, shift_mean=shift_mean)


def _whiten_over_shards(draw: Draw) -> tuple[Any, Any]:
    (x, mask), second_draw = _spread(draw), Draw(draw.rng, (draw.shape[0] + 2, draw.shape[1]), draw.dtype)
    other, other_mask = second_draw.normal() * 3, second_draw.mask(shortest=4)
    moments = functional.masked_moments(x, mask) + functional.masked_moments(other, other_mask)
    batch, batch_mask = torch.cat([x, other]), torch.cat([mask, other_mask])
    return functional.whiten(x, mask, moments), reference.whiten(x, mask, batch=batch, batch_mask=batch_mask)


def _kl_loss(draw: Draw, estimator: str) -> tuple[Any, Any]:
    """The loss and its gradient: only the gradient shows which factors are constants."""
    logprobs, old = draw.logprobs()
    arguments = logprobs.requires_grad_(), old, old + draw.normal(scale=0.5)
    loss = functional.kl_loss(*arguments, estimator=estimator)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    numbers = [x.detach() for x in arguments]
    expected = [f(*numbers, estimator=estimator) for f in (reference.kl_loss, reference.kl_loss_gradient)]
    return (loss.detach(), gradient), tuple(expected)


def _token_actions(draw: Draw) -> tuple[Any, Any]:
    x, mask = draw.normal(), draw.mask()
    actual, expected = evaluate_both("sum_per_action", x, mask, level="token")
    return actual[mask], expected[mask.cpu().numpy()]


def _missing_eos(name: str, **settings: float) -> Case:
    def case(draw: Draw) -> tuple[Any, Any]:
        ended = torch.tensor(draw.rng.random(draw.shape[0]) < 0.5)
        return evaluate_both(name, draw.normal(draw.shape[0]), ended, **settings)

    return case


def _zero_variance_groups(draw: Draw) -> tuple[Any, Any]:
    scores = torch.tensor(draw.rng.integers(0, 2, size=3 * draw.shape[0]), dtype=draw.dtype)
    return evaluate_both("zero_variance_groups", scores, size=3)


def _scores_of_groups(draw: Draw) -> torch.Tensor:
    return torch.tensor(draw.rng.normal(size=3 * draw.shape[0]), dtype=draw.dtype)


def _policy_loss(**clips: float) -> Case:
    return lambda draw: evaluate_both("clipped_policy_loss", *draw.logprobs(), draw.normal(), cliprange=0.2, **clips)


def _sequence_policy_loss(draw: Draw) -> tuple[Any, Any]:
    # Sums log-ratios: sums of 53 log-probabilities would cancel, which leaves a rounding of their size.
    (logprobs, old), mask, advantages = draw.logprobs(), draw.mask(), draw.normal(draw.shape[0], 1)
    log_ratio = functional.sum_per_action(logprobs - old, mask, level="sequence")
    ours = functional.clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantages, cliprange=0.5)
    ratio = np.log(reference.sequence_ratio(logprobs, old, mask))
    return ours, reference.clipped_policy_loss(ratio, np.zeros_like(ratio), advantages, cliprange=0.5)


def _value_loss(draw: Draw, cliprange: float | None) -> tuple[Any, Any]:
    values = draw.normal()
    return evaluate_both(
        "clipped_value_loss", values, values + draw.normal(scale=0.3), draw.normal(), cliprange=cliprange
    )


def _aggregate(mode: str) -> Case:
    counts = {"token_count": 37.0, "sequence_count": 9.0, "max_length": 64}
    return lambda draw: evaluate_both("aggregate", draw.normal(), draw.mask(), **counts, mode=mode)


def _critic(name: str) -> Case:
    def case(draw: Draw) -> tuple[Any, Any]:
        values, mask = draw.normal(), draw.mask()
        return evaluate_both(name, values, values + draw.normal(scale=0.7), mask)

    return case


def _shape_scores(**settings: float) -> Case:
    return lambda draw: evaluate_both("shape_scores", draw.normal(draw.shape[0], scale=4), **settings)


CASES: dict[str, Case] = {
    "selected_logprobs": _selected_logprobs,
    "log_softmax": lambda draw: evaluate_both("log_softmax", _logits(draw)),
    "entropy": lambda draw: evaluate_both("entropy", _logits(draw)),
    "masked_mean": lambda draw: evaluate_both("masked_mean", draw.normal() + 0.5, draw.mask()),
    "masked_moments": lambda draw: evaluate_both("masked_moments", draw.normal() + 0.5, draw.mask()),
    "whiten": lambda draw: _whiten(draw, shift_mean=True),
    "whiten/mean kept": lambda draw: _whiten(draw, shift_mean=False),
    "whiten/two shards": _whiten_over_shards,
    "mean_and_std": _mean_and_std,
    **{
        f"kl_penalty/{k}": lambda draw, k=k: evaluate_both("kl_penalty", *draw.logprobs(), estimator=k)
        for k in ("k2", *functional.REWARD_KL_ESTIMATORS)
    },
    "exact_kl": lambda draw: evaluate_both("exact_kl", _logits(draw), _logits(draw)),
    **{f"kl_loss/{k}": lambda draw, k=k: _kl_loss(draw, k) for k in functional.LOSS_KL_ESTIMATORS if k != "full"},
    "sum_per_action/token": _token_actions,
    "sum_per_action/sequence": lambda draw: evaluate_both(
        "sum_per_action", draw.normal(), draw.mask(), level="sequence"
    ),
    **{f"importance_weights/{level}": _importance_weights(level) for level in ("token", "sequence")},
    "last_token": lambda draw: evaluate_both("last_token", draw.mask()),
    **{
        f"ensemble_scores/{how}": lambda draw, how=how: evaluate_both(
            "ensemble_scores", draw.normal(), how=how, penalty=0.6
        )
        for how in functional.ENSEMBLES
    },
    "shape_scores": _shape_scores(),
    "shape_scores/clipped": _shape_scores(clip=2.5),
    "shape_scores/all three": _shape_scores(mean=1.3, std=2.7, clip=0.9),
    "missing_eos_penalty": _missing_eos("missing_eos_penalty", penalty=1.5),
    "missing_eos_score": _missing_eos("missing_eos_score", score=-1.25),
    "token_rewards": lambda draw: evaluate_both(
        "token_rewards", draw.normal(draw.shape[0]), draw.normal(), draw.mask(), kl_coef=0.07
    ),
    "terminal_remainder": lambda draw: evaluate_both(
        "terminal_remainder", draw.normal(draw.shape[0]), draw.normal(), draw.mask()
    ),
    "zero_variance_groups": _zero_variance_groups,
    "leave_one_out": lambda draw: evaluate_both("leave_one_out", _scores_of_groups(draw), size=3),
    "gae": lambda draw: evaluate_both("gae", draw.normal(), draw.normal(), draw.mask(), gamma=0.97, lam=0.9),
    "gae/undiscounted": lambda draw: evaluate_both(
        "gae", draw.normal(), draw.normal(), draw.mask(), gamma=1.0, lam=0.95
    ),
    "clipped_policy_loss": _policy_loss(),
    "clipped_policy_loss/clip higher": _policy_loss(cliprange_high=0.4),
    "clipped_policy_loss/dual clip": _policy_loss(dual_clip=1.3),
    "clipped_policy_loss/both": _policy_loss(cliprange_high=0.4, dual_clip=1.3),
    "clipped_policy_loss/sequence": _sequence_policy_loss,
    "clipped_value_loss": lambda draw: _value_loss(draw, 0.2),
    "clipped_value_loss/unclipped": lambda draw: _value_loss(draw, None),
    **{f"aggregate/{mode}": _aggregate(mode) for mode in functional.AGGREGATIONS},
    "explained_variance": _critic("explained_variance"),
    "value_r2": _critic("value_r2"),
}
IN_FLOAT64 = {"zero_variance_groups", "last_token", "masked_moments", "mean_and_std", "explained_variance", "value_r2"}


def _arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(part) for part in (result if isinstance(result, tuple) else (result,))]


def test_every_public_formula_has_a_reference() -> None:
    assert {name.split("/")[0] for name in CASES} == FORMULAS


@pytest.mark.parametrize("dtype", PRECISIONS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_formula_agrees_with_reference(name: str, dtype: torch.dtype) -> None:
    for number, shape in enumerate(SHAPES):
        for seed in range(20):
            ours, theirs = CASES[name](Draw(np.random.default_rng([seed, number]), shape, dtype))
            assert name in IN_FLOAT64 or (ours[0] if isinstance(ours, tuple) else ours).dtype == dtype
            for actual, expected in zip(_arrays(ours), _arrays(theirs), strict=True):
                assert actual.shape == expected.shape
                if expected.dtype.kind in "bi":
                    assert actual.dtype == expected.dtype
                    np.testing.assert_array_equal(actual, expected)
                else:
                    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance(dtype, expected))


def test_adaptive_kl_controller_agrees_with_reference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        coefficient, target = rng.uniform(0.01, 1), rng.uniform(0.5, 20)
        kl, episodes, horizon = rng.uniform(-2, 40), int(rng.integers(1, 512)), int(rng.integers(512, 20_000))
        ours = kl_controller.KLController(coefficient, target, horizon).update(kl, episodes).kl_coef
        theirs = reference.adaptive_kl(coefficient, kl, episodes, target=target, horizon=horizon)
        assert ours == pytest.approx(theirs, rel=0, abs=tolerance(torch.float64, theirs))
