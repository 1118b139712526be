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

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
PROPERTY = settings(deadline=None, max_examples=40)

numbers = st.floats(-4, 4, allow_subnormal=False)
fractions = st.floats(0, 1, allow_subnormal=False)
clipranges = st.floats(0.05, 0.5)


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
    arrays = [torch.from_numpy(draw(hnp.arrays(np.float64, (size, length), elements=elements))) for _ in range(4)]
    row = torch.from_numpy(draw(hnp.arrays(np.float64, size, elements=elements)))
    lengths = torch.tensor(draw(st.lists(st.integers(1, length), min_size=size, max_size=size)))
    a, b, c, d = arrays
    return Batch(a, b, c, d, row, torch.arange(length) < lengths.unsqueeze(1))


def categorical(size: int = 5) -> st.SearchStrategy[Tensor]:
    """Log-probabilities of a distribution over `size` tokens."""
    logits = hnp.arrays(np.float64, size, elements=numbers)
    return logits.map(lambda x: torch.from_numpy(x).log_softmax(-1))


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


# Formulas over a batch, split by what comes back: one entry a token (0 outside the mask), or a number for all.
PER_TOKEN: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "whiten": lambda x: (_whiten(x.a, x.mask), _whiten(x.a, x.mask, shift_mean=False)),
    "token_rewards": lambda x: (functional.token_rewards(x.row, x.a, x.mask, kl_coef=0.3),),
    "gae": lambda x: functional.gae(x.a, x.b, x.mask, gamma=0.9, lam=0.8),
}
REDUCTIONS: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "masked_mean": lambda x: (functional.masked_mean(x.a, x.mask),),
    "masked_moments": lambda x: (functional.masked_moments(x.a, x.mask),),
    "aggregate": lambda x: (functional.aggregate(x.a, x.mask, tokens=7.0),),
    "approx_kl": lambda x: (functional.approx_kl(x.a, x.b, x.mask),),
    "explained_variance": lambda x: (functional.explained_variance(x.a, x.b, x.mask),),
}
UNMASKED: dict[str, Callable[[Batch], tuple[Tensor, ...]]] = {
    "kl_penalty": lambda x: tuple(functional.kl_penalty(x.a, x.b, estimator=k) for k in ("k1", "k3")),
    "last_token": lambda x: (functional.last_token(x.mask),),
    "shape_scores": lambda x: (functional.shape_scores(x.row, clip=1.0),),
    "missing_eos_penalty": lambda x: (functional.missing_eos_penalty(x.row, x.row > 0, penalty=1.0),),
    "clipped_policy_loss": lambda x: functional.clipped_policy_loss(x.a, x.b, x.c, cliprange=0.2),
    "clipped_value_loss": lambda x: functional.clipped_value_loss(x.a, x.b, x.c, cliprange=0.2),
    "selected_logprobs": lambda x: (
        functional.selected_logprobs(torch.stack([x.a, x.b, x.c], -1), (x.d > 0).long() + (x.d > 2)),
    ),
    "entropy": lambda x: (functional.entropy(torch.stack([x.a, x.b, x.c], -1)),),
}


def test_the_tables_cover_every_public_formula() -> None:
    assert {*PER_TOKEN, *REDUCTIONS, *UNMASKED} == set(functional.__all__)


# ---- the mask


@pytest.mark.parametrize("name", [*PER_TOKEN, *REDUCTIONS])
@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_what_lies_outside_the_mask_never_matters(name: str, batch: Batch, garbage: float) -> None:
    formula = (PER_TOKEN | REDUCTIONS)[name]
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


@pytest.mark.parametrize("name", REDUCTIONS)
@PROPERTY
@given(batches(), st.integers(1, 4))
def test_padding_columns_change_no_reduction(name: str, batch: Batch, columns: int) -> None:
    for got, wanted in zip(REDUCTIONS[name](batch.wider(columns)), REDUCTIONS[name](batch), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


@PROPERTY
@given(batches(), st.sampled_from(GARBAGE))
def test_no_gradient_leaves_the_mask(batch: Batch, garbage: float) -> None:
    for reduce in (functional.masked_mean, lambda x, mask: functional.aggregate(x, mask, tokens=mask.sum())):
        x = batch.outside(garbage).a.requires_grad_()
        same(gradient(reduce(x, batch.mask), x), batch.mask.double() / batch.mask.sum())


@PROPERTY
@given(batches(), st.sampled_from([0.0, -5.0, -1e30, -math.inf]))
def test_the_policy_gradient_is_zero_on_padding(batch: Batch, padding_logprob: float) -> None:
    # What a rollout holds there is 0; the training forward gives the padding token any log-probability.
    old, advantages = batch.outside(0.0).b, batch.outside(0.0).c
    logprobs = batch.outside(padding_logprob).a.requires_grad_()
    loss, _ = functional.clipped_policy_loss(logprobs, old, advantages, cliprange=0.2)
    got = gradient(functional.aggregate(loss, batch.mask, tokens=batch.mask.sum()), logprobs)
    assert (got[~batch.mask] == 0).all()
    assert got.isfinite().all()


# ---- the order of rows


@pytest.mark.parametrize("name", [*PER_TOKEN, *UNMASKED])
@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_rows_in_another_order_give_the_same_rows(name: str, batch: Batch, random) -> None:
    order = random.sample(range(len(batch.mask)), len(batch.mask))
    formula = (PER_TOKEN | UNMASKED)[name]
    for got, wanted in zip(formula(batch.ordered(order)), formula(batch), strict=True):
        same(got, wanted[order])


@pytest.mark.parametrize("name", REDUCTIONS)
@PROPERTY
@given(batches(), st.randoms(use_true_random=False))
def test_rows_in_another_order_give_the_same_number(name: str, batch: Batch, random) -> None:
    order = random.sample(range(len(batch.mask)), len(batch.mask))
    if name == "explained_variance":
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
@given(categorical(), categorical())
def test_k1_and_k3_both_average_to_the_exact_kl(policy: Tensor, ref: Tensor) -> None:
    exact = torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum")  # KL(policy ‖ ref)
    for estimator in ("k1", "k3"):
        same((policy.exp() * functional.kl_penalty(policy, ref, estimator=estimator)).sum(), exact)


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
@given(batches(), st.data())
def test_micro_batches_of_any_split_add_up_to_the_minibatch(batch: Batch, data: st.DataObject) -> None:
    size = len(batch.mask)
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    bounds = [0, *cuts, size]
    tokens = batch.mask.sum()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)  # one weight that every token depends on

    def loss(part: slice) -> Tensor:
        per_token = (batch.a[part] * scale).square()
        return functional.aggregate(per_token, batch.mask[part], tokens=tokens)

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


def test_gradient_of_the_clipped_policy_loss() -> None:
    old, advantages = _inputs(4, 6, seed=1).detach(), _inputs(4, 6, seed=2).detach()
    logprobs = (old + _inputs(4, 6, seed=3, scale=0.4).detach()).requires_grad_()
    ratio = (logprobs - old).exp().detach()
    _at_least(torch.stack([ratio - 1.2, ratio - 0.8]))
    _, clipped = functional.clipped_policy_loss(logprobs, old, advantages, cliprange=0.2)
    assert clipped.any() and not clipped.all()
    mask = torch.arange(6) < torch.tensor([[6], [2], [1], [4]])

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        per_token, _ = functional.clipped_policy_loss(x, old, advantages, cliprange=0.2)
        return per_token, functional.aggregate(per_token, mask, tokens=mask.sum())

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
