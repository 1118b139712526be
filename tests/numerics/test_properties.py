"""What must hold for every input: properties of the formulas, searched for counterexamples by hypothesis."""

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
from rlhf_zoo.ppo.control import AdaptiveKL, FixedKL

FORMULAS = {name for name in functional.__all__ if callable(getattr(functional, name))}
GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
PROPERTY = settings(deadline=None, max_examples=40)

numbers = st.floats(-4, 4, allow_subnormal=False)
fractions = st.floats(0, 1, allow_subnormal=False)
clipranges = st.floats(0.05, 0.5)
dual_clips = st.floats(1.05, 5)
aggregations = st.sampled_from(functional.AGGREGATIONS)


@dataclass(frozen=True)
class Batch:
    """Four arrays (B, T) of float64 in [−4, 4], one number a row, and a mask."""

    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    row: Tensor
    mask: Tensor

    def each(self, change: Callable[[Tensor], Tensor], names: str = "a b c d") -> Batch:
        return replace(self, **{name: change(getattr(self, name)) for name in names.split()})

    def outside(self, value: float) -> Batch:
        """The same with `value` in every array where the mask is False."""
        return self.each(lambda x: x.masked_fill(~self.mask, value))

    def ordered(self, order: list[int]) -> Batch:
        return self.each(lambda x: x[order], "a b c d row mask")

    def wider(self, columns: int) -> Batch:
        """The same with padding columns at the end."""

        def pad(x: Tensor, value: float = 3.0) -> Tensor:
            return torch.cat([x, torch.full((len(x), columns), value).to(x.dtype)], dim=1)

        return replace(self.each(pad), mask=pad(self.mask, 0))


@st.composite
def batches(draw: st.DrawFn, rows: int = 4, width: int = 6, elements: st.SearchStrategy[float] = numbers) -> Batch:
    size, length = draw(st.integers(1, rows)), draw(st.integers(1, width))
    arrays = [torch.tensor(draw(hnp.arrays(np.float64, (size, length), elements=elements))) for _ in range(4)]
    row = torch.tensor(draw(hnp.arrays(np.float64, size, elements=elements)))
    lengths = torch.tensor(draw(st.lists(st.integers(1, length), min_size=size, max_size=size)))
    a, b, c, d = arrays
    return Batch(a, b, c, d, row, torch.arange(length) < lengths.unsqueeze(1))


def logits(size: int = 5) -> st.SearchStrategy[Tensor]:
    return hnp.arrays(np.float64, size, elements=numbers).map(torch.tensor)


def categorical(size: int = 5) -> st.SearchStrategy[Tensor]:
    """Log-probabilities of a distribution over `size` tokens."""
    return logits(size).map(lambda x: x.log_softmax(-1))


def same(got: Tensor | float, wanted: Tensor | float) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-10, atol=1e-10)


def identical(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.nan_to_num(nan=123.0), other.nan_to_num(nan=123.0))


def gradient(of: Tensor, at: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of.sum(), at)
    return found


def _whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    return functional.whiten(x, mask, functional.masked_moments(x, mask), shift_mean=shift_mean, eps=eps)


def _variance(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    # The root of a variance of nearly 0 magnifies its rounding beyond any tolerance.
    mean, std = functional.mean_and_std(functional.masked_moments(x, mask))
    return mean, std.square()


def _aggregate(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The loss of a whole minibatch of responses of at most 6 tokens."""
    return functional.aggregate(loss, mask, tokens=mask.sum(), sequences=len(mask), length=6, mode=mode)


# Formulas over a batch, split by what comes back: one entry a token (0 outside the mask), a row, or a number for all.
PER_TOKEN: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "whiten": lambda x: (_whiten(x.a, x.mask), _whiten(x.a, x.mask, shift_mean=False)),
    "token_rewards": lambda x: (functional.token_rewards(x.row, x.a, x.mask, kl_coef=0.3),),
    "gae": lambda x: functional.gae(x.a, x.b, x.mask, gamma=0.9, lam=0.8),
}
PER_ROW: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "actions": lambda x: (functional.actions(x.a, x.mask, level="sequence"),),
    "last_token": lambda x: (functional.last_token(x.mask),),
    "shape_scores": lambda x: (functional.shape_scores(x.row, mean=0.5, std=2.0, clip=1.0),),
    "missing_eos_penalty": lambda x: (functional.missing_eos_penalty(x.row, x.row > 0, penalty=1.0),),
    "missing_eos_score": lambda x: (functional.missing_eos_score(x.row, x.row > 0, score=-1.0),),
}
REDUCTIONS: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "masked_mean": lambda x: (functional.masked_mean(x.a, x.mask),),
    "masked_moments": lambda x: (functional.masked_moments(x.a, x.mask),),
    "mean_and_std": lambda x: _variance(x.a, x.mask),
    "aggregate": lambda x: tuple(_aggregate(x.a, x.mask, mode) for mode in functional.AGGREGATIONS),
    "approx_kl": lambda x: (functional.approx_kl(x.a, x.b, x.mask),),
    "explained_variance": lambda x: (functional.explained_variance(x.a, x.b, x.mask),),
    "constant_gain": lambda x: (functional.constant_gain(x.a, x.b, x.mask),),
}
UNMASKED: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "kl_penalty": lambda x: tuple(functional.kl_penalty(x.a, x.b, estimator=k) for k in ("k1", "k2", "k3")),
    "exact_kl": lambda x: (functional.exact_kl(torch.stack([x.a, x.b], -1), torch.stack([x.c, x.d], -1)),),
    "kl_loss": lambda x: tuple(
        functional.kl_loss(x.a, x.b, x.c, estimator=k) for k in functional.KL_IN_LOSS if k != "full"
    ),
    "clipped_policy_loss": lambda x: functional.clipped_policy_loss(
        x.a, x.b, x.c, cliprange=0.2, cliprange_high=0.3, dual_clip=2.0
    ),
    "clipped_value_loss": lambda x: functional.clipped_value_loss(x.a, x.b, x.c, cliprange=0.2),
    "selected_logprobs": lambda x: (
        functional.selected_logprobs(torch.stack([x.a, x.b, x.c], -1), (x.d > 0).long() + (x.d > 2)),
    ),
    "entropy": lambda x: (functional.entropy(torch.stack([x.a, x.b, x.c], -1)),),
}


def test_the_tables_cover_every_public_formula() -> None:
    assert {*PER_TOKEN, *PER_ROW, *REDUCTIONS, *UNMASKED} == FORMULAS


# ---- the mask


@pytest.mark.parametrize("name", [*PER_TOKEN, *REDUCTIONS, "actions"])
@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_what_lies_outside_the_mask_never_matters(name: str, batch: Batch, garbage: float) -> None:
    formula = (PER_TOKEN | REDUCTIONS | PER_ROW)[name]
    identical(formula(batch.outside(garbage)), formula(batch.outside(0.0)))


@pytest.mark.parametrize("name", PER_TOKEN)
@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_results_are_zero_outside_the_mask(name: str, batch: Batch, garbage: float) -> None:
    for result in PER_TOKEN[name](batch.outside(garbage)):
        assert (result[~batch.mask] == 0).all()


@pytest.mark.parametrize("name", PER_TOKEN)
@PROPERTY
@given(batches(), st.integers(1, 4))
def test_padding_columns_change_no_token(name: str, batch: Batch, columns: int) -> None:
    wide = PER_TOKEN[name](batch.wider(columns))
    for got, wanted in zip(wide, PER_TOKEN[name](batch), strict=True):
        same(got[:, : wanted.shape[1]], wanted)


@pytest.mark.parametrize("name", [*REDUCTIONS, "actions", "last_token"])
@PROPERTY
@given(batches(), st.integers(1, 4))
def test_padding_columns_change_no_row_and_no_reduction(name: str, batch: Batch, columns: int) -> None:
    formula = (REDUCTIONS | PER_ROW)[name]
    for got, wanted in zip(formula(batch.wider(columns)), formula(batch), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_no_gradient_leaves_the_mask(batch: Batch, garbage: float) -> None:
    mask, lengths = batch.mask.double(), batch.mask.sum(1, keepdim=True)
    weights = {
        "token-mean": mask / batch.mask.sum(),
        "seq-mean-token-mean": mask / (lengths * len(mask)),
        "seq-mean-token-sum": mask / len(mask),
        "seq-sum-norm": mask / (len(mask) * 6),
    }
    for mode, wanted in weights.items():
        x = batch.outside(garbage).a.requires_grad_()
        same(gradient(_aggregate(x, batch.mask, mode), x), wanted)
    x = batch.outside(garbage).a.requires_grad_()
    same(gradient(functional.masked_mean(x, batch.mask), x), weights["token-mean"])
    same(gradient(functional.actions(x, batch.mask, level="sequence"), x), mask)


@PROPERTY
@given(batches(), st.sampled_from([0.0, -5.0, -1e30, -math.inf]), st.sampled_from([None, 2.0]))
def test_the_policy_gradient_is_zero_on_padding(batch: Batch, padding_logprob: float, dual_clip: float | None) -> None:
    # What a rollout holds there is 0; the training forward gives the padding token any log-probability.
    old, advantages = batch.outside(0.0).b, batch.outside(0.0).c
    logprobs = batch.outside(padding_logprob).a.requires_grad_()
    loss, _ = functional.clipped_policy_loss(logprobs, old, advantages, cliprange=0.2, dual_clip=dual_clip)
    got = gradient(functional.aggregate(loss, batch.mask, tokens=batch.mask.sum()), logprobs)
    assert (got[~batch.mask] == 0).all()
    assert got.isfinite().all()


# ---- the order of rows


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_ROW, *UNMASKED])
@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_rows_in_another_order_give_the_same_rows(name: str, batch: Batch, random) -> None:
    order = random.sample(range(len(batch.mask)), len(batch.mask))
    formula = (PER_TOKEN | PER_ROW | UNMASKED)[name]
    for got, wanted in zip(formula(batch.ordered(order)), formula(batch), strict=True):
        same(got, wanted[order])


@pytest.mark.parametrize("name", REDUCTIONS)
@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_rows_in_another_order_give_the_same_number(name: str, batch: Batch, random) -> None:
    order = random.sample(range(len(batch.mask)), len(batch.mask))
    if name in ("explained_variance", "constant_gain"):
        assume(batch.b[batch.mask].var(correction=0) > 1e-3)
    for got, wanted in zip(REDUCTIONS[name](batch.ordered(order)), REDUCTIONS[name](batch), strict=True):
        same(got, wanted)


# ---- log-probabilities and entropy


@PROPERTY
@given(categorical(), numbers)
def test_selected_logprobs_of_the_whole_vocabulary_sum_to_one_whatever_is_added(logps: Tensor, shift: float) -> None:
    every = functional.selected_logprobs((logps + shift).expand(5, 5), torch.arange(5))
    same(every.exp().sum(), 1.0)
    same(every, logps)


@PROPERTY
@given(categorical(), numbers)
def test_entropy_is_the_mean_of_minus_the_logprob(logps: Tensor, shift: float) -> None:
    every = functional.selected_logprobs(logps.expand(5, 5), torch.arange(5))
    got = functional.entropy(logps + shift)
    same(got, -(every.exp() * every).sum())
    assert -1e-12 <= got <= math.log(5) + 1e-12


@PROPERTY
@given(categorical(4))
def test_a_token_of_probability_zero_changes_neither(logps: Tensor) -> None:
    padded = torch.cat([logps, torch.tensor([-math.inf])]).requires_grad_()
    same(functional.entropy(padded).detach(), functional.entropy(logps))
    same(functional.selected_logprobs(padded, torch.tensor(2)).detach(), logps[2])
    same(gradient(functional.entropy(padded), padded)[4], 0.0)
    assert gradient(functional.entropy(padded), padded).isfinite().all()


# ---- means and whitening


@PROPERTY
@given(batches())
def test_the_masked_mean_lies_between_the_extremes(batch: Batch) -> None:
    kept = batch.a[batch.mask]
    assert kept.min() - 1e-12 <= functional.masked_mean(batch.a, batch.mask) <= kept.max() + 1e-12


@PROPERTY
@given(batches())
def test_mean_and_std_are_those_of_the_numbers(batch: Batch) -> None:
    kept = batch.a[batch.mask]
    mean, std = functional.mean_and_std(functional.masked_moments(batch.a, batch.mask))
    same(mean, kept.mean())
    assume(len(kept) == 1 or kept.std() > 0.01)
    same(std, kept.std() if len(kept) > 1 else 0.0)


@PROPERTY
@given(batches(), st.floats(0.5, 4), numbers)
def test_the_mean_moves_with_scale_and_offset_and_the_std_with_scale(batch: Batch, scale: float, offset: float) -> None:
    mean, variance = _variance(batch.a, batch.mask)
    moved_mean, moved_variance = _variance(batch.a * scale + offset, batch.mask)
    same(moved_mean, mean * scale + offset)
    same(moved_variance, variance * scale**2)


@PROPERTY
@given(batches())
def test_whitening_gives_mean_zero_and_unbiased_variance_one(batch: Batch) -> None:
    assume(batch.mask.sum() > 1 and batch.a[batch.mask].std() > 0.01)
    kept = _whiten(batch.a, batch.mask, eps=0.0)[batch.mask]
    same(kept.mean(), 0.0)
    same(kept.var(), 1.0)


@PROPERTY
@given(batches())
def test_whitening_without_a_shift_keeps_the_mean(batch: Batch) -> None:
    assume(batch.mask.sum() > 1 and batch.a[batch.mask].std() > 0.01)
    kept = _whiten(batch.a, batch.mask, shift_mean=False, eps=0.0)[batch.mask]
    same(kept.mean(), batch.a[batch.mask].mean())
    same(kept.var(), 1.0)


@PROPERTY
@given(batches(), st.floats(0.5, 4), numbers)
def test_whitening_undoes_scale_and_offset(batch: Batch, scale: float, offset: float) -> None:
    assume(batch.mask.sum() > 1 and batch.a[batch.mask].std() > 0.01)
    same(_whiten(batch.a * scale + offset, batch.mask, eps=0.0), _whiten(batch.a, batch.mask, eps=0.0))


@PROPERTY
@given(batches(), numbers)
def test_whitening_a_constant_gives_zero_or_the_constant(batch: Batch, constant: float) -> None:
    x = torch.full_like(batch.a, constant)
    np.testing.assert_allclose(_whiten(x, batch.mask), torch.zeros_like(x), atol=1e-7)
    np.testing.assert_allclose(_whiten(x, batch.mask, shift_mean=False), x * batch.mask, atol=1e-7)


@PROPERTY
@given(batches(), st.integers(0, 4))
def test_moments_add_over_shards(batch: Batch, cut: int) -> None:
    shards = [(batch.a[part], batch.mask[part]) for part in (slice(None, cut), slice(cut, None))]
    moments = sum(functional.masked_moments(*shard) for shard in shards)
    assert isinstance(moments, Tensor)
    same(moments, functional.masked_moments(batch.a, batch.mask))
    assume(batch.mask.sum() > 1 and batch.a[batch.mask].std() > 0.01)
    whole = torch.cat([functional.whiten(*shard, moments) for shard in shards])
    same(whole, _whiten(batch.a, batch.mask))


# ---- KL


@PROPERTY
@given(batches())
def test_k3_is_never_negative_and_k1_changes_sign_with_its_arguments(batch: Batch) -> None:
    assert (functional.kl_penalty(batch.a, batch.b, estimator="k3") >= -1e-15).all()
    forward = functional.kl_penalty(batch.a, batch.b, estimator="k1")
    assert torch.equal(forward, -functional.kl_penalty(batch.b, batch.a, estimator="k1"))


@PROPERTY
@given(batches())
def test_k2_is_never_negative_and_the_same_both_ways(batch: Batch) -> None:
    k2 = functional.kl_penalty(batch.a, batch.b, estimator="k2")
    assert (k2 >= 0).all()
    assert torch.equal(k2, functional.kl_penalty(batch.b, batch.a, estimator="k2"))
    same(2 * k2, functional.kl_penalty(batch.a, batch.b, estimator="k1").square())


@PROPERTY
@given(categorical(), categorical(), numbers, numbers)
def test_k1_and_k3_both_average_to_the_exact_kl(policy: Tensor, ref: Tensor, shift: float, ref_shift: float) -> None:
    exact = functional.exact_kl(policy + shift, ref + ref_shift)  # logits: what is added to all of them is nothing
    same(exact, torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum"))  # KL(policy ‖ ref)
    for estimator in ("k1", "k3"):
        same((policy.exp() * functional.kl_penalty(policy, ref, estimator=estimator)).sum(), exact)


@PROPERTY
@given(logits(), logits())
def test_the_exact_kl_is_never_negative_and_zero_for_the_same_distribution(scores: Tensor, ref_scores: Tensor) -> None:
    assert functional.exact_kl(scores, ref_scores) >= -1e-15
    assert functional.exact_kl(scores, scores) == 0
    same(functional.exact_kl(scores, scores + 1.5), 0.0)
    distance = (scores.softmax(-1) - ref_scores.softmax(-1)).abs().sum()
    assert functional.exact_kl(scores, ref_scores) >= distance.square() / 2 - 1e-12  # Pinsker's inequality


@PROPERTY
@given(logits(), logits(), categorical(), st.sampled_from(["k2", "k3"]))
def test_the_gradient_of_k2_and_k3_in_the_loss_is_that_of_the_exact_kl(
    scores: Tensor, old_scores: Tensor, ref: Tensor, estimator: str
) -> None:
    # Each token once, weighted by its probability under the policy that sampled it.
    scores, old = scores.requires_grad_(), old_scores.log_softmax(-1)
    loss = functional.kl_loss(scores.log_softmax(-1), old, ref, estimator=estimator)
    same(gradient(old.exp() * loss, scores), gradient(functional.exact_kl(scores, ref), scores))


@PROPERTY
@given(logits(), logits(), categorical())
def test_the_gradient_of_k3_reverse_is_that_of_the_exact_kl_the_other_way_round(
    scores: Tensor, old_scores: Tensor, ref: Tensor
) -> None:
    scores, old = scores.requires_grad_(), old_scores.log_softmax(-1)
    loss = functional.kl_loss(scores.log_softmax(-1), old, ref, estimator="k3_reverse")
    same(gradient(old.exp() * loss, scores), gradient(functional.exact_kl(ref, scores), scores))


@PROPERTY
@given(batches())
def test_k2_and_k3_in_the_loss_pull_each_token_alike(batch: Batch) -> None:
    # ρ·k3 + ρ·(1 − e^−k1) = ρ·k1: the two differ in what is logged, not in what is learnt.
    logprobs, ratio, k1 = batch.a.clone().requires_grad_(), (batch.a - batch.b).exp(), batch.a - batch.c
    for estimator in ("k2", "k3"):
        loss = functional.kl_loss(logprobs, batch.b, batch.c, estimator=estimator)
        np.testing.assert_allclose(gradient(loss, logprobs), ratio * k1, rtol=1e-10, atol=1e-10)
    loss = functional.kl_loss(logprobs, batch.b, batch.c, estimator="k3_reverse")
    np.testing.assert_allclose(gradient(loss, logprobs), -ratio * torch.expm1(-k1), rtol=1e-10, atol=1e-10)


@PROPERTY
@given(batches())
def test_on_policy_a_kl_loss_is_its_estimator(batch: Batch) -> None:
    for estimator, same_as in (("k2", "k2"), ("k3", "k3"), ("k3_reverse", "k3")):
        loss = functional.kl_loss(batch.a, batch.a, batch.b, estimator=estimator)
        assert torch.equal(loss, functional.kl_penalty(batch.a, batch.b, estimator=same_as))


@PROPERTY
@given(batches(), st.sampled_from(["k2", "k3", "k3_reverse"]), st.sampled_from([0.0, -5.0, -80.0]))
def test_the_gradient_of_a_kl_loss_is_zero_on_padding(batch: Batch, estimator: str, padding_logprob: float) -> None:
    logprobs = batch.outside(padding_logprob).a.requires_grad_()
    loss = functional.kl_loss(logprobs, batch.outside(0.0).b, batch.outside(0.0).c, estimator=estimator)
    got = gradient(_aggregate(loss, batch.mask, "token-mean"), logprobs)
    assert (got[~batch.mask] == 0).all()
    assert got.isfinite().all()


@PROPERTY
@given(categorical(), categorical())
def test_approx_kl_averages_to_the_exact_kl_of_old_and_new(new: Tensor, old: Tensor) -> None:
    exact = torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum")  # KL(old ‖ new)
    one = torch.ones(1, dtype=torch.bool)
    every = torch.stack([functional.approx_kl(new[v : v + 1], old[v : v + 1], one) for v in range(5)])
    same((old.exp() * every).sum(), exact)


@PROPERTY
@given(batches())
def test_approx_kl_is_never_negative_and_zero_for_the_same_policy(batch: Batch) -> None:
    assert functional.approx_kl(batch.a, batch.b, batch.mask) >= -1e-15
    assert functional.approx_kl(batch.a, batch.a, batch.mask) == 0


# ---- scores and rewards


@PROPERTY
@given(batches())
def test_the_last_token_is_real_and_none_follows(batch: Batch) -> None:
    for flags, last in zip(batch.mask.tolist(), functional.last_token(batch.mask).tolist(), strict=True):
        assert flags[last] and not any(flags[last + 1 :])


@PROPERTY
@given(batches(), st.floats(0.1, 5))
def test_shaped_scores_are_bounded_and_those_within_the_bound_untouched(batch: Batch, clip: float) -> None:
    shaped = functional.shape_scores(batch.row, clip=clip)
    assert (shaped.abs() <= clip).all()
    within = batch.row.abs() <= clip
    assert torch.equal(shaped[within], batch.row[within])
    assert (shaped[~within].sign() == batch.row[~within].sign()).all()


@PROPERTY
@given(batches(), numbers, st.floats(0.1, 4), st.floats(0.5, 4), numbers, st.sampled_from([None, 0.7]))
def test_shaped_scores_are_the_same_in_any_unit(
    batch: Batch, mean: float, std: float, scale: float, offset: float, clip: float | None
) -> None:
    shaped = functional.shape_scores(batch.row, mean=mean, std=std, clip=clip)
    moved = functional.shape_scores(batch.row * scale + offset, mean=mean * scale + offset, std=std * scale, clip=clip)
    same(moved, shaped)


@PROPERTY
@given(batches(), numbers, st.floats(0.1, 4), st.floats(0.1, 5))
def test_the_bound_of_shaped_scores_is_in_deviations_from_the_mean(
    batch: Batch, mean: float, std: float, clip: float
) -> None:
    shaped = functional.shape_scores(batch.row, mean=mean, std=std, clip=clip)
    assert (shaped.abs() <= clip).all()
    free = (shaped.abs() < clip * (1 - 1e-12)).nonzero().squeeze(1)
    same(shaped[free] * std + mean, batch.row[free])
    beyond = ((batch.row - mean).abs() > clip * std * (1 + 1e-12)).nonzero().squeeze(1)
    assert torch.equal(shaped[beyond], clip * (batch.row - mean)[beyond].sign())


@PROPERTY
@given(batches())
def test_scores_shaped_by_their_own_moments_are_whitened(batch: Batch) -> None:
    assume(len(batch.row) > 1 and batch.row.std() > 0.01)
    every = torch.ones_like(batch.row, dtype=torch.bool)
    mean, std = functional.mean_and_std(functional.masked_moments(batch.row, every))
    same(functional.shape_scores(batch.row, mean=mean, std=std), _whiten(batch.row, every, eps=0.0))


@PROPERTY
@given(batches(), numbers)
def test_the_missing_eos_score_replaces_the_unended_alone(batch: Batch, score: float) -> None:
    ended = batch.a[:, 0] > 0
    got = functional.missing_eos_score(batch.row, ended, score=score)
    assert torch.equal(got[ended], batch.row[ended])
    assert (got[~ended] == score).all()
    assert torch.equal(functional.missing_eos_score(got, ended, score=score), got)
    assert torch.equal(functional.missing_eos_score(batch.row, ended, score=None), batch.row)


@PROPERTY
@given(batches(), numbers, st.floats(0.1, 4), st.floats(0.1, 5), numbers)
def test_no_shaping_touches_the_score_of_a_missing_eos(
    batch: Batch, mean: float, std: float, clip: float, score: float
) -> None:
    ended = batch.a[:, 0] > 0
    shaped = functional.shape_scores(batch.row, mean=mean, std=std, clip=clip)
    replaced = functional.missing_eos_score(shaped, ended, score=score)
    assert (replaced[~ended] == score).all()
    lowered = functional.missing_eos_penalty(shaped, ended, penalty=score)
    same(lowered[~ended], shaped[~ended] - score)
    assert torch.equal(replaced[ended], shaped[ended]) and torch.equal(lowered[ended], shaped[ended])


@PROPERTY
@given(batches(), st.floats(0, 5))
def test_the_missing_eos_penalty_falls_on_the_unended_alone(batch: Batch, penalty: float) -> None:
    ended = batch.a[:, 0] > 0
    got = functional.missing_eos_penalty(batch.row, ended, penalty=penalty)
    assert torch.equal(got[ended], batch.row[ended])
    same(batch.row[~ended] - got[~ended], torch.full_like(got[~ended], penalty))


@PROPERTY
@given(batches(), fractions)
def test_rewards_sum_to_the_score_less_the_penalty(batch: Batch, kl_coef: float) -> None:
    k1 = functional.kl_penalty(batch.a, batch.b, estimator="k1")
    rewards = functional.token_rewards(batch.row, k1, batch.mask, kl_coef=kl_coef)
    same(rewards.sum(1), batch.row - kl_coef * (k1 * batch.mask).sum(1))


@PROPERTY
@given(batches(), fractions)
def test_the_score_sits_exactly_on_the_last_token(batch: Batch, kl_coef: float) -> None:
    without = functional.token_rewards(torch.zeros_like(batch.row), batch.a, batch.mask, kl_coef=kl_coef)
    score_alone = functional.token_rewards(batch.row, batch.a, batch.mask, kl_coef=kl_coef) - without
    last = torch.nn.functional.one_hot(batch.mask.sum(1) - 1, batch.mask.shape[1])
    same(score_alone, last * batch.row.unsqueeze(1))


# ---- advantages


@PROPERTY
@given(batches(), fractions)
def test_gae_at_lambda_one_is_monte_carlo_less_the_value(batch: Batch, gamma: float) -> None:
    advantages, returns = functional.gae(batch.a, batch.b, batch.mask, gamma=gamma, lam=1.0)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        for t in range(length):
            monte_carlo = sum(gamma**k * float(batch.a[row, t + k]) for k in range(length - t))
            same(advantages[row, t], monte_carlo - float(batch.b[row, t]))
            same(returns[row, t], monte_carlo)


@PROPERTY
@given(batches(), fractions)
def test_gae_at_lambda_zero_is_the_td_residual(batch: Batch, gamma: float) -> None:
    advantages, _ = functional.gae(batch.a, batch.b, batch.mask, gamma=gamma, lam=0.0)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        for t in range(length):
            following = float(batch.b[row, t + 1]) if t + 1 < length else 0.0
            same(advantages[row, t], float(batch.a[row, t]) + gamma * following - float(batch.b[row, t]))


@PROPERTY
@given(batches(), fractions)
def test_gae_without_discount_of_true_values_is_zero(batch: Batch, lam: float) -> None:
    # A critic that knows what is to come leaves nothing to learn, whatever λ is.
    rewards = batch.a.masked_fill(~batch.mask, 0)
    values = rewards.flip(1).cumsum(1).flip(1)
    advantages, returns = functional.gae(rewards, values, batch.mask, gamma=1.0, lam=lam)
    same(advantages, torch.zeros_like(advantages))
    same(returns, values.masked_fill(~batch.mask, 0))


@PROPERTY
@given(batches(), fractions, fractions)
def test_returns_are_advantages_plus_values(batch: Batch, gamma: float, lam: float) -> None:
    advantages, returns = functional.gae(batch.a, batch.b, batch.mask, gamma=gamma, lam=lam)
    same(returns, advantages + batch.b.masked_fill(~batch.mask, 0))


@PROPERTY
@given(batches(), fractions, fractions)
def test_gae_is_linear_in_rewards_and_values(batch: Batch, gamma: float, lam: float) -> None:
    def gae(rewards: Tensor, values: Tensor) -> Tensor:
        return functional.gae(rewards, values, batch.mask, gamma=gamma, lam=lam)[0]

    same(gae(batch.a + 2 * batch.c, batch.b + 2 * batch.d), gae(batch.a, batch.b) + 2 * gae(batch.c, batch.d))


# ---- a whole completion as one action


@PROPERTY
@given(batches(), fractions, fractions, fractions)
def test_the_advantage_of_a_completion_is_its_score_less_penalty_and_value(
    batch: Batch, kl_coef: float, gamma: float, lam: float
) -> None:
    k1 = functional.kl_penalty(batch.a, batch.b, estimator="k1")
    total, one = functional.actions(k1, batch.mask, level="sequence"), batch.mask[:, :1]
    rewards = functional.token_rewards(batch.row, total, one, kl_coef=kl_coef)
    advantages, returns = functional.gae(rewards, batch.c[:, :1], one, gamma=gamma, lam=lam)
    wanted = batch.row - kl_coef * (k1 * batch.mask).sum(1)
    same(returns, wanted.unsqueeze(1))
    same(advantages, (wanted - batch.c[:, 0]).unsqueeze(1))


@PROPERTY
@given(batches())
def test_the_ratio_of_a_completion_is_the_product_of_those_of_its_tokens(batch: Batch) -> None:
    new, old = (functional.actions(x, batch.mask, level="sequence") for x in (batch.a, batch.b))
    loss, _ = functional.clipped_policy_loss(new, old, -torch.ones_like(new), cliprange=math.inf)
    ratios = (batch.a - batch.b).exp().masked_fill(~batch.mask, 1)
    np.testing.assert_allclose(loss, ratios.prod(1, keepdim=True), rtol=1e-10)
    same(functional.kl_penalty(new, old, estimator="k1"), (batch.a - batch.b).mul(batch.mask).sum(1, keepdim=True))


@PROPERTY
@given(batches())
def test_per_token_nothing_is_summed_and_a_completion_of_one_token_is_that_token(batch: Batch) -> None:
    assert torch.equal(functional.actions(batch.a, batch.mask, level="token")[batch.mask], batch.a[batch.mask])
    first, one = batch.a[:, :1], batch.mask[:, :1]
    assert torch.equal(functional.actions(first, one, level="sequence"), first)


# ---- losses


@PROPERTY
@given(batches(), clipranges)
def test_at_ratio_one_the_loss_is_minus_the_advantage_and_nothing_is_clipped(batch: Batch, cliprange: float) -> None:
    logprobs = batch.a.clone().requires_grad_()
    loss, clipped = functional.clipped_policy_loss(logprobs, batch.a, batch.c, cliprange=cliprange)
    assert torch.equal(loss, -batch.c)
    assert not clipped.any()
    same(gradient(loss, logprobs), -batch.c)  # ∇ρ = ∇log π at ratio 1: the plain policy gradient


@PROPERTY
@given(batches(), clipranges)
def test_the_clipped_policy_loss_is_never_below_the_unclipped(batch: Batch, cliprange: float) -> None:
    loss, clipped = functional.clipped_policy_loss(batch.a, batch.b, batch.c, cliprange=cliprange)
    unclipped = -(batch.a - batch.b).exp() * batch.c
    assert (loss >= unclipped).all()
    assert torch.equal(clipped, loss > unclipped)


@PROPERTY
@given(batches(), clipranges)
def test_the_clip_acts_only_on_gains_beyond_the_range_and_stops_their_gradient(batch: Batch, cliprange: float) -> None:
    logprobs = batch.a.clone().requires_grad_()
    loss, clipped = functional.clipped_policy_loss(logprobs, batch.b, batch.c, cliprange=cliprange)
    ratio = (batch.a - batch.b).exp()
    gain = ((batch.c > 0) & (ratio > 1 + cliprange)) | ((batch.c < 0) & (ratio < 1 - cliprange))
    assert torch.equal(clipped, gain)
    same(gradient(loss, logprobs), torch.where(gain, 0.0, -ratio * batch.c))


@PROPERTY
@given(batches(), clipranges)
def test_an_upper_bound_equal_to_the_lower_is_the_symmetric_clip(batch: Batch, cliprange: float) -> None:
    got = functional.clipped_policy_loss(batch.a, batch.b, batch.c, cliprange=cliprange, cliprange_high=cliprange)
    identical(got, functional.clipped_policy_loss(batch.a, batch.b, batch.c, cliprange=cliprange))


@PROPERTY
@given(batches(), clipranges, st.floats(0.001, 1))
def test_a_higher_upper_bound_lets_gains_alone_grow(batch: Batch, cliprange: float, more: float) -> None:
    arguments, high = (batch.a, batch.b, batch.c), cliprange + more
    loss, clipped = functional.clipped_policy_loss(*arguments, cliprange=cliprange, cliprange_high=high)
    symmetric, symmetric_clipped = functional.clipped_policy_loss(*arguments, cliprange=cliprange)
    gains, ratio = batch.c > 0, (batch.a - batch.b).exp()
    assert torch.equal(loss[~gains], symmetric[~gains]) and torch.equal(clipped[~gains], symmetric_clipped[~gains])
    same(loss[gains], (-batch.c * ratio.clamp(max=1 + high))[gains])
    assert torch.equal(clipped[gains], (ratio > 1 + high)[gains])
    assert (loss <= symmetric).all()


@PROPERTY
@given(batches(), clipranges, clipranges, dual_clips)
def test_dual_clip_bounds_the_loss_of_bad_actions_and_leaves_the_others_alone(
    batch: Batch, cliprange: float, high: float, dual_clip: float
) -> None:
    arguments, bounds = (batch.a, batch.b, batch.c), {"cliprange": cliprange, "cliprange_high": high}
    single, single_clipped = functional.clipped_policy_loss(*arguments, **bounds)
    loss, clipped = functional.clipped_policy_loss(*arguments, **bounds, dual_clip=dual_clip)
    bad, ceiling = batch.c < 0, -dual_clip * batch.c
    assert (loss <= ceiling)[bad].all()
    assert torch.equal(loss[bad], torch.minimum(single, ceiling)[bad])
    identical((loss[~bad], clipped[~bad]), (single[~bad], single_clipped[~bad]))
    assert torch.equal(clipped, single_clipped | (loss < single))


@PROPERTY
@given(batches(), clipranges, clipranges, dual_clips)
def test_no_gradient_passes_any_clip_and_all_of_it_passes_elsewhere(
    batch: Batch, cliprange: float, high: float, dual_clip: float
) -> None:
    logprobs, ratio = batch.a.clone().requires_grad_(), (batch.a - batch.b).exp()
    loss, clipped = functional.clipped_policy_loss(
        logprobs, batch.b, batch.c, cliprange=cliprange, cliprange_high=high, dual_clip=dual_clip
    )
    same(gradient(loss, logprobs), torch.where(clipped, 0.0, -ratio * batch.c))


@PROPERTY
@given(batches(), clipranges)
def test_a_dual_clip_that_nothing_reaches_changes_nothing(batch: Batch, cliprange: float) -> None:
    got = functional.clipped_policy_loss(batch.a, batch.b, batch.c, cliprange=cliprange, dual_clip=math.exp(9))
    identical(got, functional.clipped_policy_loss(batch.a, batch.b, batch.c, cliprange=cliprange))


@PROPERTY
@given(batches(), clipranges)
def test_the_clipped_value_loss_is_never_below_the_unclipped(batch: Batch, cliprange: float) -> None:
    loss, clipped = functional.clipped_value_loss(batch.a, batch.b, batch.c, cliprange=cliprange)
    unclipped, none = functional.clipped_value_loss(batch.a, batch.b, batch.c, cliprange=None)
    assert (loss >= unclipped).all()
    assert torch.equal(clipped, loss > unclipped)
    assert not none.any()
    assert not clipped[(batch.a - batch.b).abs() < cliprange - 1e-9].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_counts_as_clipping(dtype: torch.dtype) -> None:
    # V_old + clip(V − V_old) misses V by a rounding in 2% of such small values, and they would read as clipped.
    rng = np.random.default_rng(0)
    values, old_values = (torch.tensor(rng.uniform(-0.1, 0.1, (100, 100)), dtype=dtype) for _ in range(2))
    returns = torch.tensor(rng.normal(size=(100, 100)), dtype=dtype)
    loss, clipped = functional.clipped_value_loss(values, old_values, returns, cliprange=0.25)
    assert not clipped.any()
    assert torch.equal(loss, functional.clipped_value_loss(values, old_values, returns, cliprange=None)[0])


@PROPERTY
@given(batches(), aggregations, st.data())
def test_micro_batches_of_any_split_add_up_to_the_minibatch(batch: Batch, mode: str, data: st.DataObject) -> None:
    size = len(batch.mask)
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    bounds = [0, *cuts, size]
    counts = {"tokens": batch.mask.sum(), "sequences": torch.tensor(size), "length": 6}
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)  # one weight that every token depends on

    def loss(part: slice) -> Tensor:
        # A micro-batch is no wider than its longest response.
        width = int(batch.mask[part].sum(1).max())
        per_token = (batch.a[part, :width] * scale).square()
        return functional.aggregate(per_token, batch.mask[part, :width], **counts, mode=mode)

    whole = loss(slice(None))
    (wanted,) = torch.autograd.grad(whole, scale)
    parts = [loss(slice(a, b)) for a, b in itertools.pairwise(bounds)]
    same(torch.stack(parts).sum().detach(), whole.detach())
    same(sum(torch.autograd.grad(part, scale)[0] for part in parts), wanted)


@PROPERTY
@given(batches())
def test_aggregate_over_all_tokens_is_the_masked_mean(batch: Batch) -> None:
    got = functional.aggregate(batch.a, batch.mask, tokens=batch.mask.sum())
    same(got, functional.masked_mean(batch.a, batch.mask))


@PROPERTY
@given(batches())
def test_both_token_means_are_one_where_all_responses_are_as_long(batch: Batch) -> None:
    full, width = torch.ones_like(batch.mask), batch.mask.shape[1]
    token_mean = _aggregate(batch.a, full, "token-mean")
    same(_aggregate(batch.a, full, "seq-mean-token-mean"), token_mean)
    same(_aggregate(batch.a, full, "seq-mean-token-sum"), token_mean * width)
    same(_aggregate(batch.a, full, "seq-sum-norm"), token_mean * width / 6)


@PROPERTY
@given(batches())
def test_both_token_means_are_one_for_a_single_response(batch: Batch) -> None:
    loss, mask = batch.a[:1], batch.mask[:1]
    same(_aggregate(loss, mask, "seq-mean-token-mean"), _aggregate(loss, mask, "token-mean"))
    same(_aggregate(loss, mask, "seq-mean-token-sum"), loss[mask].sum())


@PROPERTY
@given(batches())
def test_all_modes_are_one_for_actions_that_are_whole_completions(batch: Batch) -> None:
    loss, one = batch.a[:, :1], batch.mask[:, :1]
    counts = {"tokens": len(one), "sequences": len(one), "length": 1}
    for mode in functional.AGGREGATIONS:
        same(functional.aggregate(loss, one, **counts, mode=mode), loss.mean())


@PROPERTY
@given(batches(), st.integers(1, 100))
def test_the_constant_divisor_is_the_token_sum_by_the_longest_length(batch: Batch, length: int) -> None:
    sequences = len(batch.mask)
    got = functional.aggregate(
        batch.a, batch.mask, tokens=math.nan, sequences=sequences, length=length, mode="seq-sum-norm"
    )
    same(got * length, _aggregate(batch.a, batch.mask, "seq-mean-token-sum"))


@PROPERTY
@given(batches())
def test_the_mean_over_sequences_is_that_of_their_own_means(batch: Batch) -> None:
    means = torch.stack([functional.masked_mean(*row) for row in zip(batch.a, batch.mask, strict=True)])
    same(_aggregate(batch.a, batch.mask, "seq-mean-token-mean"), means.mean())


# ---- the critic's worth


@PROPERTY
@given(batches(), numbers)
def test_explained_variance_is_one_for_perfect_values_and_zero_for_constant_ones(batch: Batch, constant: float) -> None:
    assume(batch.a[batch.mask].var(correction=0) > 1e-3)
    same(functional.explained_variance(batch.a, batch.a, batch.mask), 1.0)
    same(functional.explained_variance(batch.a + constant, batch.a, batch.mask), 1.0)
    same(functional.explained_variance(torch.full_like(batch.a, constant), batch.a, batch.mask), 0.0)


@PROPERTY
@given(batches())
def test_explained_variance_never_exceeds_one_and_is_nan_without_variation(batch: Batch) -> None:
    assert not functional.explained_variance(batch.a, batch.b, batch.mask) > 1
    assert functional.explained_variance(batch.a, torch.full_like(batch.b, 0.5), batch.mask).isnan()


@PROPERTY
@given(batches(), numbers)
def test_constant_gain_is_explained_variance_less_what_an_offset_costs(batch: Batch, constant: float) -> None:
    kept = batch.b[batch.mask]
    variance, offset = kept.var(correction=0), (batch.b - batch.a)[batch.mask].mean()
    assume(variance > 1e-3)
    gain, explained = (getattr(functional, name) for name in ("constant_gain", "explained_variance"))
    got = gain(batch.a, batch.b, batch.mask)
    assert got <= 1
    same(got, explained(batch.a, batch.b, batch.mask) - offset.square() / variance)
    same(gain(batch.b, batch.b, batch.mask), 1.0)
    same(gain(torch.full_like(batch.b, float(kept.mean())), batch.b, batch.mask), 0.0)
    assert gain(torch.full_like(batch.b, constant), batch.b, batch.mask) <= 1e-10


@PROPERTY
@given(batches())
def test_constant_gain_is_nan_without_variation(batch: Batch) -> None:
    assert functional.constant_gain(batch.a, torch.full_like(batch.b, 0.5), batch.mask).isnan()


# ---- β

controllers = st.builds(
    AdaptiveKL, kl_coef=st.floats(0.001, 1), kl_target=st.floats(0.5, 20), kl_horizon=st.integers(500, 20_000)
)
episodes_ = st.integers(1, 500)
kls = st.floats(-5, 100)


@PROPERTY
@given(controllers, kls, episodes_)
def test_adaptive_beta_moves_toward_the_target(controller: AdaptiveKL, kl: float, episodes: int) -> None:
    after = controller.update(kl, episodes).kl_coef
    if abs(kl / controller.kl_target - 1) > 1e-9:
        assert (after > controller.kl_coef) == (kl > controller.kl_target)
    assert controller.update(controller.kl_target, episodes) == controller


@PROPERTY
@given(controllers, kls, episodes_)
def test_adaptive_beta_moves_by_a_fifth_of_episodes_over_horizon_at_most(
    controller: AdaptiveKL, kl: float, episodes: int
) -> None:
    change = controller.update(kl, episodes).kl_coef / controller.kl_coef - 1
    assert abs(change) <= 0.2 * episodes / controller.kl_horizon + 1e-12
    far = controller.update(controller.kl_target * 2, episodes).kl_coef / controller.kl_coef - 1
    same(far, 0.2 * episodes / controller.kl_horizon)


@PROPERTY
@given(controllers, kls, kls, episodes_)
def test_adaptive_beta_rises_with_kl(controller: AdaptiveKL, kl: float, other: float, episodes: int) -> None:
    low, high = sorted((kl, other))
    assert controller.update(low, episodes).kl_coef <= controller.update(high, episodes).kl_coef


@PROPERTY
@given(st.floats(0, 1), kls, episodes_)
def test_fixed_beta_never_moves(kl_coef: float, kl: float, episodes: int) -> None:
    assert FixedKL(kl_coef).update(kl, episodes) == FixedKL(kl_coef)


# ---- gradients against finite differences, in float64, away from the kinks


def _inputs(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(0, scale, shape), requires_grad=True)


def _at_least(distance: Tensor, margin: float = 1e-3) -> None:
    assert distance.abs().min() > margin


def test_gradient_of_selected_logprobs() -> None:
    tokens = torch.tensor([[0, 3, 6], [5, 1, 1]])
    assert torch.autograd.gradcheck(lambda x: functional.selected_logprobs(x, tokens), (_inputs(2, 3, 7, scale=2),))


def test_gradient_of_entropy() -> None:
    assert torch.autograd.gradcheck(functional.entropy, (_inputs(2, 3, 7, scale=2),))


def test_gradient_of_the_exact_kl() -> None:
    assert torch.autograd.gradcheck(functional.exact_kl, (_inputs(2, 3, 7, scale=2), _inputs(2, 3, 7, seed=1, scale=2)))


def test_gradient_of_k3_in_the_loss() -> None:
    # The others hold ρ constant, which finite differences cannot see.
    old, ref = _inputs(2, 3, seed=1).detach(), _inputs(2, 3, seed=2).detach()
    assert torch.autograd.gradcheck(lambda x: functional.kl_loss(x, old, ref, estimator="k3"), (_inputs(2, 3),))


@pytest.mark.parametrize(
    "clips",
    [{"cliprange": 0.2}, {"cliprange": 0.2, "cliprange_high": 0.3, "dual_clip": 1.5}],
    ids=["symmetric", "higher and dual"],
)
def test_gradient_of_the_clipped_policy_loss(clips: dict[str, float]) -> None:
    old, advantages = _inputs(4, 6, seed=1).detach(), _inputs(4, 6, seed=2).detach()
    logprobs = (old + _inputs(4, 6, seed=3, scale=0.4).detach()).requires_grad_()
    ratio = (logprobs - old).exp().detach()
    _at_least(torch.stack([ratio - bound for bound in (0.8, 1.2, 1.3, 1.5)]))
    _, clipped = functional.clipped_policy_loss(logprobs, old, advantages, **clips)
    assert clipped.any() and not clipped.all()
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [4]])

    def loss(x: Tensor) -> tuple[Tensor, ...]:
        per_token, _ = functional.clipped_policy_loss(x, old, advantages, **clips)
        return per_token, *(_aggregate(per_token, mask, mode) for mode in functional.AGGREGATIONS)

    assert torch.autograd.gradcheck(loss, (logprobs,))


@pytest.mark.parametrize("cliprange", [0.3, None])
def test_gradient_of_the_clipped_value_loss(cliprange: float | None) -> None:
    old, returns = _inputs(4, 6, seed=1).detach(), _inputs(4, 6, seed=2).detach()
    values = (old + _inputs(4, 6, seed=3, scale=0.5).detach()).requires_grad_()
    _at_least((values - old).detach().abs() - 0.3)
    if cliprange is not None:
        plain, clipped = (
            (values - returns).detach(),
            functional.clipped_value_loss(values, old, returns, cliprange=0.3)[1],
        )
        bounded = old + (values - old).detach().clamp(-0.3, 0.3)
        moved = (values - old).detach().abs() > 0.3
        _at_least((plain.square() - (bounded - returns).square())[moved])
        assert clipped.any() and not clipped[moved].all()
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [4]])

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        per_token, _ = functional.clipped_value_loss(x, old, returns, cliprange=cliprange)
        return per_token, functional.aggregate(per_token, mask, tokens=mask.sum())

    assert torch.autograd.gradcheck(loss, (values,))
