"""Properties of masks, batches and clips, for which Hypothesis searches counterexamples.

`test_goldens.py` and `test_reference.py` test the values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from rlhf_zoo import functional

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
PROPERTY = settings(deadline=None, max_examples=40)

numbers = st.floats(-4, 4, allow_subnormal=False)
clipranges = st.floats(0.05, 0.5)


@dataclass(frozen=True)
class Batch:
    """Three arrays (B, T) of float64 in [−4, 4], one number per row, and a mask."""

    a: Tensor
    b: Tensor
    c: Tensor
    row: Tensor
    mask: Tensor

    def map_arrays(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(self, **{name: change(getattr(self, name)) for name in "abc"})

    def fill_padding(self, value: float) -> Batch:
        """The same with `value` in every array where the mask is False."""
        return self.map_arrays(lambda x: x.masked_fill(~self.mask, value))

    def add_padding(self, columns: int) -> Batch:
        """The same with padding columns at the end."""

        def pad(x: Tensor, value: float = 3.0) -> Tensor:
            return torch.cat([x, torch.full((len(x), columns), value).to(x.dtype)], dim=1)

        return replace(self.map_arrays(pad), mask=pad(self.mask, 0))


@st.composite
def batches(draw: st.DrawFn, rows: int = 4, width: int = 6) -> Batch:
    size, length = draw(st.integers(1, rows)), draw(st.integers(1, width))
    a, b, c = (torch.tensor(draw(hnp.arrays(np.float64, (size, length), elements=numbers))) for _ in range(3))
    row = torch.tensor(draw(hnp.arrays(np.float64, size, elements=numbers)))
    lengths = torch.tensor(draw(st.lists(st.integers(1, length), min_size=size, max_size=size)))
    return Batch(a, b, c, row, torch.arange(length) < lengths.unsqueeze(1))


def assert_close(actual: Tensor | float, expected: Tensor | float) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-10, atol=1e-10)


def gradient(output: Tensor, inputs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(output.sum(), inputs)
    return grad


def _whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    return functional.whiten(x, mask, functional.masked_moments(x, mask), shift_mean=shift_mean, eps=eps)


def _aggregate(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Aggregates the loss of a minibatch whose responses have at most 6 tokens."""
    return functional.aggregate(loss, mask, token_count=mask.sum(), sequence_count=len(mask), max_length=6, mode=mode)


# ---- the mask

# Every formula with a mask, by the shape of its result: per token, or per row or batch.
PER_TOKEN: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "whiten": lambda x: (_whiten(x.a, x.mask), _whiten(x.a, x.mask, shift_mean=False)),
    "token_rewards": lambda x: (functional.token_rewards(x.row, x.a, x.mask, kl_coef=0.3),),
    "gae": lambda x: functional.gae(x.a, x.b, x.mask, gamma=0.9, lam=0.8),
}
REDUCED: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "terminal_remainder": lambda x: (functional.terminal_remainder(x.row, x.a, x.mask),),
    "sum_per_action": lambda x: (functional.sum_per_action(x.a, x.mask, level="sequence"),),
    "last_token": lambda x: (functional.last_token(x.mask),),
    "masked_mean": lambda x: (functional.masked_mean(x.a, x.mask),),
    "masked_moments": lambda x: (functional.masked_moments(x.a, x.mask),),
    "aggregate": lambda x: tuple(_aggregate(x.a, x.mask, mode) for mode in functional.AGGREGATIONS),
    "explained_variance": lambda x: (functional.explained_variance(x.a, x.b, x.mask),),
    "value_r2": lambda x: (functional.value_r2(x.a, x.b, x.mask),),
}


@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_values_outside_mask_never_matter(batch: Batch, garbage: float) -> None:
    for name, formula in (PER_TOKEN | REDUCED).items():
        for actual, expected in zip(
            formula(batch.fill_padding(garbage)), formula(batch.fill_padding(0.0)), strict=True
        ):
            assert torch.equal(actual.nan_to_num(nan=123.0), expected.nan_to_num(nan=123.0)), name
            assert name not in PER_TOKEN or (actual[~batch.mask] == 0).all(), name


@PROPERTY
@given(batches(), st.integers(1, 4))
def test_padding_columns_change_no_result(batch: Batch, columns: int) -> None:
    width = batch.mask.shape[1]
    for name, formula in (PER_TOKEN | REDUCED).items():
        for actual, expected in zip(formula(batch.add_padding(columns)), formula(batch), strict=True):
            assert_close(actual[:, :width] if name in PER_TOKEN else actual, expected)


@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_gradient_is_zero_outside_mask(batch: Batch, garbage: float) -> None:
    mask, lengths = batch.mask.double(), batch.mask.sum(1, keepdim=True)
    weights = {
        "token-mean": mask / batch.mask.sum(),
        "seq-mean-token-mean": mask / (lengths * len(mask)),
        "seq-mean-token-sum": mask / len(mask),
        "seq-sum-norm": mask / (len(mask) * 6),
    }
    for mode, expected in weights.items():
        x = batch.fill_padding(garbage).a.requires_grad_()
        assert_close(gradient(_aggregate(x, batch.mask, mode), x), expected)
    x = batch.fill_padding(garbage).a.requires_grad_()
    assert_close(gradient(functional.masked_mean(x, batch.mask), x), weights["token-mean"])
    assert_close(gradient(functional.sum_per_action(x, batch.mask, level="sequence"), x), mask)


@PROPERTY
@given(batches(), st.sampled_from([0.0, -5.0, -80.0, -1e30, -math.inf]), st.sampled_from([None, 2.0]))
def test_policy_and_kl_losses_have_no_gradient_on_padding(
    batch: Batch, padding_logprob: float, dual_clip: float | None
) -> None:
    # On padding, the rollout has 0 and the training pass has any log-probability.
    logprobs, old, other = batch.fill_padding(padding_logprob).a, batch.fill_padding(0.0).b, batch.fill_padding(0.0).c
    logprobs.requires_grad_()
    losses = [functional.clipped_policy_loss(logprobs, old, other, cliprange=0.2, dual_clip=dual_clip)[0]]
    if padding_logprob > -100:
        losses += [functional.kl_loss(logprobs, old, other, estimator=k) for k in functional.LOSS_KL_ESTIMATORS[:-1]]
    for loss in losses:
        grad = gradient(_aggregate(loss, batch.mask, "token-mean"), logprobs)
        assert (grad[~batch.mask] == 0).all() and grad.isfinite().all()


@PROPERTY
@given(hnp.arrays(np.float64, 4, elements=numbers))
def test_token_of_probability_zero_changes_no_entropy_or_logprob(logits: np.ndarray) -> None:
    logps = torch.tensor(logits).log_softmax(-1)
    padded = torch.cat([logps, torch.tensor([-math.inf])]).requires_grad_()
    assert_close(functional.entropy(padded).detach(), functional.entropy(logps))
    assert_close(functional.selected_logprobs(padded, torch.tensor(2)).detach(), logps[2])
    grad = gradient(functional.entropy(padded), padded)
    assert grad.isfinite().all() and grad[4] == 0


# ---- ensembles


@PROPERTY
@given(batches(), st.sampled_from(functional.ENSEMBLES), st.floats(0, 3), st.integers(0, 3), numbers)
def test_ensemble_scores_ignore_order_and_never_exceed_mean(
    batch: Batch, how: str, penalty: float, rotation: int, shift: float
) -> None:
    combined = functional.ensemble_scores(batch.a, how=how, penalty=penalty)
    assert_close(functional.ensemble_scores(batch.a.roll(rotation, 0), how=how, penalty=penalty), combined)
    assert_close(functional.ensemble_scores(batch.a + shift, how=how, penalty=penalty), combined + shift)
    assert (combined <= batch.a.mean(0) + 1e-12).all()
    equal_scores = batch.a[:1].expand(3, -1)
    assert_close(functional.ensemble_scores(equal_scores, how=how, penalty=penalty), batch.a[0])


# ---- batches


@PROPERTY
@given(batches())
def test_whitening_gives_mean_zero_and_unbiased_variance_one(batch: Batch) -> None:
    assume(batch.mask.sum() > 1 and batch.a[batch.mask].std() > 0.01)
    whitened = _whiten(batch.a, batch.mask, eps=0.0)[batch.mask]
    assert_close(whitened.mean(), 0.0)
    assert_close(whitened.var(), 1.0)


@PROPERTY
@given(batches(), st.sampled_from(functional.AGGREGATIONS), st.data())
def test_micro_batches_of_any_split_sum_to_minibatch(batch: Batch, mode: str, data: st.DataObject) -> None:
    size = len(batch.mask)
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    bounds = [0, *cuts, size]
    counts = {"token_count": batch.mask.sum(), "sequence_count": torch.tensor(size), "max_length": 6}
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)  # one weight that every token depends on

    def loss(part: slice) -> Tensor:
        # A micro-batch is no wider than its longest response.
        width = int(batch.mask[part].sum(1).max())
        per_token = (batch.a[part, :width] * scale).square()
        return functional.aggregate(per_token, batch.mask[part, :width], **counts, mode=mode)

    total = loss(slice(None))
    (expected,) = torch.autograd.grad(total, scale)
    parts = [loss(slice(a, b)) for a, b in itertools.pairwise(bounds)]
    assert_close(torch.stack(parts).sum().detach(), total.detach())
    assert_close(sum(torch.autograd.grad(part, scale)[0] for part in parts), expected)


# ---- clips


@PROPERTY
@given(batches(), clipranges, clipranges, st.sampled_from([None, 1.05, 2.0, 5.0]))
def test_gradient_is_zero_exactly_where_clipped(
    batch: Batch, cliprange: float, high: float, dual_clip: float | None
) -> None:
    logprobs, ratio = batch.a.clone().requires_grad_(), (batch.a - batch.b).exp()
    loss, clipped = functional.clipped_policy_loss(
        logprobs, batch.b, batch.c, cliprange=cliprange, cliprange_high=high, dual_clip=dual_clip
    )
    bounds = torch.where(batch.c > 0, 1 + high, math.inf if dual_clip is None else dual_clip)
    assert torch.equal(clipped, (batch.c != 0) & ((ratio > bounds) | ((batch.c < 0) & (ratio < 1 - cliprange))))
    assert_close(gradient(loss, logprobs), torch.where(clipped, 0.0, -ratio * batch.c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_counts_as_clipping(dtype: torch.dtype) -> None:
    # V_old + clip(V − V_old) misses V by a rounding in 2% of such small values, and they would read as clipped.
    rng = np.random.default_rng(0)
    values, old_values = (torch.tensor(rng.uniform(-0.1, 0.1, (100, 100)), dtype=dtype) for _ in range(2))
    returns = torch.tensor(rng.normal(size=(100, 100)), dtype=dtype)
    loss, clipped = functional.clipped_value_loss(values, old_values, returns, cliprange=0.25)
    assert not clipped.any()
    assert torch.equal(loss, functional.clipped_value_loss(values, old_values, returns, cliprange=None)[0])
