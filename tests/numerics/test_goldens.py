"""Literal inputs and outputs, computed by hand from the formula that each test names."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from tolerances import GOLDEN_ATOL, GOLDEN_RTOL

from rlhf_zoo import functional
from rlhf_zoo.ppo.kl_controller import KLController

LN2, LN5 = 0.69314718056, 1.60943791243
NAN = math.nan


def f64(values: ArrayLike) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: torch.Tensor | float, expected: ArrayLike) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=GOLDEN_RTOL, atol=GOLDEN_ATOL)


def test_selected_logprobs_of_known_distribution() -> None:
    # softmax of (log 1, log 2, log 5) is (1/8, 2/8, 5/8), and no constant added to the logits changes it.
    logits = f64([[[0.0, LN2, LN5], [7.0, 7.0 + LN2, 7.0 + LN5]], [[0.0, LN2, LN5], [0.0, 0.0, 0.0]]])
    tokens = torch.tensor([[0, 1], [2, 1]])
    assert_close(
        functional.selected_logprobs(logits, tokens),
        [[-2.07944154168, -1.38629436112], [-0.47000362925, -1.09861228867]],
    )


def test_selected_logprobs_of_huge_logits() -> None:
    assert_close(functional.selected_logprobs(f64([1000.0, 1000.0]), torch.tensor(0)), -LN2)


def test_log_softmax() -> None:
    logits = f64([[LN2, 0.0, 0.0, -math.inf], [1000.0, 1000.0, -1000.0, -math.inf]])
    assert_close(
        functional.log_softmax(logits), [[-LN2, -2 * LN2, -2 * LN2, -math.inf], [-LN2, -LN2, -2000 - LN2, -math.inf]]
    )


def test_entropy() -> None:
    # (1/2, 1/4, 1/4): 1.5 log 2; uniform over 3: log 3; all on one token: 0; a token of probability 0 adds nothing.
    logits = f64([[LN2, 0.0, 0.0], [4.0, 4.0, 4.0], [0.0, -2000.0, -2000.0], [0.0, 0.0, -math.inf]])
    assert_close(functional.entropy(logits), [1.03972077084, 1.09861228867, 0.0, 0.69314718056])


def test_masked_mean() -> None:
    x = f64([[1.0, 2.0, 50.0], [6.0, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert_close(functional.masked_mean(x, mask), 3.0)
    assert torch.isnan(functional.masked_mean(x, torch.zeros_like(mask)))


def test_masked_moments_are_count_sum_and_sum_of_squares_in_float64() -> None:
    x = torch.tensor([[1.0, -2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    moments = functional.masked_moments(x, mask)
    assert moments.dtype == torch.float64
    assert_close(moments, [3.0, 3.0, 21.0])


def test_mean_and_std() -> None:
    # 1, 3, 5: mean 3, unbiased variance (4 + 0 + 4)/2 = 4; −2 alone: mean −2, and no deviation.
    assert_close(torch.stack(functional.mean_and_std(f64([3.0, 9.0, 35.0]))), [3.0, 2.0])
    assert_close(torch.stack(functional.mean_and_std(f64([1.0, -2.0, 4.0]))), [-2.0, 0.0])


def test_std_is_zero_when_rounding_makes_variance_negative() -> None:
    # Of three times 0.1 in float64: Σx² − n·μ² is −6.9e-18.
    moments = f64([3.0, 0.30000000000000004, 0.030000000000000006]).cpu()
    assert moments[2] - 3 * (moments[1] / 3).square() < 0
    assert functional.mean_and_std(moments)[1] == 0


def test_whiten() -> None:
    # 1, 3, 5: mean 3, unbiased variance (4 + 0 + 4)/2 = 4, deviation 2 (eps 0 leaves it at that).
    x = f64([[1.0, 3.0, 77.0], [5.0, NAN, 77.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    moments = f64([3.0, 9.0, 35.0])
    assert_close(functional.whiten(x, mask, moments, eps=0.0), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert_close(functional.whiten(x, mask, moments, eps=0.0, shift_mean=False), [[2.0, 3.0, 0.0], [4.0, 0.0, 0.0]])


def test_whiten_adds_eps_to_the_variance() -> None:
    # Variance 4 with eps 5 divides by √9 = 3.
    x, mask = f64([1.0, 3.0, 5.0]), torch.tensor([True, True, True])
    assert_close(functional.whiten(x, mask, f64([3.0, 9.0, 35.0]), eps=5.0), [-0.666666666667, 0.0, 0.666666666667])


def test_whiten_of_single_element_is_zero_or_its_mean() -> None:
    x, mask = f64([[7.0, NAN]]), torch.tensor([[True, False]])
    moments = f64([1.0, 7.0, 49.0])
    assert_close(functional.whiten(x, mask, moments), [[0.0, 0.0]])
    assert_close(functional.whiten(x, mask, moments, shift_mean=False), [[7.0, 0.0]])


def test_kl_penalty() -> None:
    # π twice, half and once as likely as π_ref: k1 = log 2, −log 2, 0; k2 = ½ log² 2 twice, 0;
    # k3 = 1/2 − 1 + log 2, 2 − 1 − log 2, 0.
    logprobs, ref_logprobs = f64([[-1.0, -2.0, -3.0]]), f64([[-1.0 - LN2, -2.0 + LN2, -3.0]])
    assert_close(functional.kl_penalty(logprobs, ref_logprobs, estimator="k1"), [[LN2, -LN2, 0.0]])
    assert_close(functional.kl_penalty(logprobs, ref_logprobs, estimator="k2"), [[0.240226506959, 0.240226506959, 0.0]])
    assert_close(functional.kl_penalty(logprobs, ref_logprobs, estimator="k3"), [[0.19314718056, 0.30685281944, 0.0]])


def test_exact_kl() -> None:
    # (1/2, 1/4, 1/4) from the uniform: ½ log(3/2) + ½ log(3/4) = log 3 − 1.5 log 2; back: ⅓ log(2/3) + ⅔ log(4/3).
    # A constant added to the logits changes neither; equal distributions are 0 apart.
    logits, ref_logits = f64([LN2, 0.0, 0.0]), f64([4.0, 4.0, 4.0])
    assert_close(functional.exact_kl(logits, ref_logits), 0.0588915178276)
    assert_close(functional.exact_kl(ref_logits, logits), 0.0566330122651)
    assert_close(
        functional.exact_kl(torch.stack([logits, ref_logits]), torch.stack([logits + 9.0, ref_logits])), [0.0, 0.0]
    )


def test_kl_loss() -> None:
    # ρ = 2 and ½; k1 = log 2 and −log 2, so k2 = ½ log² 2 twice, and k3 = log 2 − ½ and 1 − log 2.
    logprobs, old, ref = f64([[-1.0, -2.0]]), f64([[-1.0 - LN2, -2.0 + LN2]]), f64([[-1.0 - LN2, -2.0 + LN2]])
    assert_close(functional.kl_loss(logprobs, old, ref, estimator="k2"), [[0.480453013918, 0.12011325348]])
    assert_close(functional.kl_loss(logprobs, old, ref, estimator="k3"), [[0.38629436112, 0.15342640972]])
    assert_close(functional.kl_loss(logprobs, old, ref, estimator="k3_reverse"), [[0.38629436112, 0.15342640972]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k2", [1.38629436112, -0.34657359028]),  # ρ·k1
        ("k3", [1.38629436112, -0.34657359028]),  # ρ·k3 + ρ·(1 − e^−k1), which is ρ·k1 again
        ("k3_reverse", [1.0, -0.5]),  # ρ·(1 − e^−k1)
    ],
)
def test_kl_loss_gradient(estimator: str, expected: list[float]) -> None:
    logprobs, old = f64([[-1.0, -2.0]]).requires_grad_(), f64([[-1.0 - LN2, -2.0 + LN2]])
    functional.kl_loss(logprobs, old, old, estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    assert_close(logprobs.grad, [expected])


@pytest.mark.parametrize("estimator", functional.LOSS_KL_ESTIMATORS[:-1])
def test_kl_loss_is_finite_when_ratio_exceeds_float32(estimator: str) -> None:
    """exp(100) is infinite in float32, and infinity times a KL of 0 is NaN."""
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    old, ref = torch.tensor([[-100.0, -1e4]]), torch.tensor([[0.0, 0.0]])
    loss = functional.kl_loss(logprobs, old, ref, estimator=estimator)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_ratio_within_float32_is_not_bounded() -> None:
    """A policy may be 50 nats from π_old: the loss is then that large, with a gradient that leads back."""
    new, old = torch.tensor([[50.0]], requires_grad=True), torch.tensor([[0.0]])
    ratio = math.exp(50)
    policy, _ = functional.clipped_policy_loss(new, old, torch.tensor([[-1.0]]), cliprange=0.2)
    weight = functional.importance_weights(new, old, torch.tensor([[True]]), cap=math.inf, level="token")
    k2 = functional.kl_loss(new, old, new.detach() - 1, estimator="k2")
    for actual, expected in ((policy, ratio), (weight, ratio), (k2, ratio / 2)):
        assert float(actual.detach()) == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(policy.sum(), new)
    assert float(gradient) == pytest.approx(ratio, rel=1e-5)


def test_actions() -> None:
    x = f64([[1.0, 2.0, NAN], [4.0, NAN, NAN], [1.0, -2.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    assert_close(functional.sum_per_action(x, mask, level="sequence"), [[3.0], [4.0], [3.0]])
    assert_close(functional.sum_per_action(x, mask, level="token")[mask], [1.0, 2.0, 4.0, 1.0, -2.0, 4.0])


def test_last_token() -> None:
    mask = torch.tensor([[True, False, False], [True, True, True], [True, True, False]])
    assert functional.last_token(mask).tolist() == [0, 2, 1]


def test_ensemble_scores() -> None:
    # Of (1, 4, 4) the mean is 3 and the variance (4 + 1 + 1)/3 = 2; of (−2, 0, 2) they are 0 and 8/3.
    scores = f64([[1.0, -2.0], [4.0, 0.0], [4.0, 2.0]])
    assert_close(functional.ensemble_scores(scores, how="worst"), [1.0, -2.0])
    assert_close(functional.ensemble_scores(scores, how="mean"), [3.0, 0.0])
    assert_close(functional.ensemble_scores(scores, how="mean_minus_variance", penalty=0.75), [1.5, -2.0])


def test_shape_scores_centers_then_scales_then_clips() -> None:
    # (s − 1)/2 of −7, −1, 1, 3, 9 is −4, −1, 0, 1, 4, within ±1.5. If clipped first, they would be −1.25 … 0.25.
    scores = f64([-7.0, -1.0, 1.0, 3.0, 9.0])
    assert_close(functional.shape_scores(scores), scores)
    assert_close(functional.shape_scores(scores, clip=2.0), [-2.0, -1.0, 1.0, 2.0, 2.0])
    assert_close(functional.shape_scores(scores, mean=1.0, std=2.0), [-4.0, -1.0, 0.0, 1.0, 4.0])
    assert_close(functional.shape_scores(scores, mean=1.0, std=2.0, clip=1.5), [-1.5, -1.0, 0.0, 1.0, 1.5])
    assert_close(functional.shape_scores(scores, mean=f64(1.0), std=f64(2.0), clip=1.5), [-1.5, -1.0, 0.0, 1.0, 1.5])


def test_missing_eos_penalty() -> None:
    scores, ended = f64([1.0, 1.0, -4.0, -4.0]), torch.tensor([True, False, True, False])
    assert_close(functional.missing_eos_penalty(scores, ended, penalty=1.5), [1.0, -0.5, -4.0, -5.5])
    assert_close(functional.missing_eos_penalty(scores, ended, penalty=None), [1.0, 1.0, -4.0, -4.0])


def test_missing_eos_score() -> None:
    scores, ended = f64([1.0, 1.0, -4.0, -4.0, NAN]), torch.tensor([True, False, True, False, False])
    assert_close(functional.missing_eos_score(scores, ended, score=-1.0), [1.0, -1.0, -4.0, -1.0, -1.0])
    assert_close(functional.missing_eos_score(scores, ended, score=0.0), [1.0, 0.0, -4.0, 0.0, 0.0])
    assert_close(functional.missing_eos_score(scores, ended, score=None), [1.0, 1.0, -4.0, -4.0, NAN])


def test_terminal_remainder() -> None:
    # 10 − (1 + 2) = 7, and −4 − 0.5 = −4.5; padding pays nothing.
    mask = torch.tensor([[True, True, True], [True, False, False]])
    by_token = f64([[1.0, 0.0, 2.0], [0.5, NAN, 9.0]])
    assert_close(functional.terminal_remainder(f64([10.0, -4.0]), by_token, mask), [7.0, -4.5])


def test_zero_variance_groups() -> None:
    scores = f64([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0])
    assert functional.zero_variance_groups(scores, size=3).tolist() == [True, False, True]
    assert functional.zero_variance_groups(scores, size=1).all()


def test_leave_one_out_subtracts_the_mean_of_the_other_scores() -> None:
    assert_close(
        functional.leave_one_out(f64([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]), size=3), [-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]
    )
    assert_close(functional.leave_one_out(f64([1.0, 4.0]), size=2), [-3.0, 3.0])


def test_token_rewards_puts_score_on_last_token_only() -> None:
    kl = f64([[0.5, -1.0, 2.0], [1.0, 3.0, NAN], [4.0, NAN, NAN]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    assert_close(
        functional.token_rewards(f64([10.0, 20.0, -30.0]), kl, mask, kl_coef=0.1),
        [[-0.05, 0.1, 9.8], [-0.1, 19.7, 0.0], [-30.4, 0.0, 0.0]],
    )


def test_gae() -> None:
    # γ = λ = 1/2. Row 1: δ = (1 + ½·2 − 4, 2 + ½·6 − 2, 3 − 6) = (−2, 3, −3); Â = (−2 + ¼·2.25, 3 − ¼·3, −3).
    # Row 2 ends a step earlier: δ = (0 + ½·4 − 1, 5 − 4) = (1, 1); Â = (1 + ¼, 1).
    rewards = f64([[1.0, 2.0, 3.0], [0.0, 5.0, NAN]])
    values = f64([[4.0, 2.0, 6.0], [1.0, 4.0, NAN]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = functional.gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert_close(advantages, [[-1.4375, 2.25, -3.0], [1.25, 1.0, 0.0]])
    assert_close(returns, [[2.5625, 4.25, 3.0], [2.25, 5.0, 0.0]])


def test_gae_ignores_gamma_and_lambda_when_completion_is_one_action() -> None:
    # Row 1: 10 − 0.1·(0.5 − 1 + 2) = 9.85, less V = 4; row 2: 20 − 0.1·4 = 19.6, less −1. No γ, no λ can matter.
    kl = f64([[0.5, -1.0, 2.0], [1.0, 3.0, NAN]])
    mask, single_action = torch.tensor([[True, True, True], [True, True, False]]), torch.tensor([[True], [True]])
    total = functional.sum_per_action(kl, mask, level="sequence")
    rewards = functional.token_rewards(f64([10.0, 20.0]), total, single_action, kl_coef=0.1)
    assert_close(rewards, [[9.85], [19.6]])
    advantages, returns = functional.gae(rewards, f64([[4.0], [-1.0]]), single_action, gamma=0.5, lam=0.25)
    assert_close(advantages, [[5.85], [20.6]])
    assert_close(returns, [[9.85], [19.6]])


def test_clipped_policy_loss() -> None:
    # ε = 0.2. ratio:      2       2       1/2      1/2      1.1          0.9         2
    # advantage:           3      −3       3       −3        3           −3          0
    # objective:         1.2·3   2·−3    0.5·3   0.8·−3   1.1·3       0.9·−3         0
    ratio, advantages = f64([[2.0, 2.0, 0.5, 0.5, 1.1, 0.9, 2.0]]), f64([[3.0, -3.0, 3.0, -3.0, 3.0, -3.0, 0.0]])
    old = f64([[-4.0, -3.0, -2.0, -1.0, -0.5, -5.0, -6.0]])
    loss, clipped = functional.clipped_policy_loss(old + ratio.log(), old, advantages, cliprange=0.2)
    assert_close(loss, [[-3.6, 6.0, -1.5, 2.4, -3.3, 2.7, 0.0]])
    assert clipped.tolist() == [[True, False, False, True, False, False, False]]


def test_clipped_policy_loss_with_clip_higher() -> None:
    # ε = 0.2, ε_high = 0.5.  ratio:  2       1.4     1.4       1/2      1/2
    # advantage:                      3       3      −3         3       −3
    # objective:                    1.5·3   1.4·3   1.4·−3    0.5·3    0.8·−3
    ratio, advantages = f64([[2.0, 1.4, 1.4, 0.5, 0.5]]), f64([[3.0, 3.0, -3.0, 3.0, -3.0]])
    old = f64([[-4.0, -3.0, -2.0, -1.0, -0.5]])
    loss, clipped = functional.clipped_policy_loss(
        old + ratio.log(), old, advantages, cliprange=0.2, cliprange_high=0.5
    )
    assert_close(loss, [[-4.5, -4.2, 4.2, -1.5, 2.4]])
    assert clipped.tolist() == [[True, False, False, False, True]]


def test_clipped_policy_loss_with_dual_clip() -> None:
    # ε = 0.2, c = 3.  ratio:  5      2.5     1/2      5      0.5     5
    # advantage:              −2     −2      −2        2      2      0
    # objective:             3·−2   2.5·−2  0.8·−2   1.2·2   0.5·2    0
    ratio, advantages = f64([[5.0, 2.5, 0.5, 5.0, 0.5, 5.0]]), f64([[-2.0, -2.0, -2.0, 2.0, 2.0, 0.0]])
    old = f64([[-4.0, -3.0, -2.0, -1.0, -0.5, -5.0]])
    loss, clipped = functional.clipped_policy_loss(old + ratio.log(), old, advantages, cliprange=0.2, dual_clip=3.0)
    assert_close(loss, [[6.0, 5.0, 1.6, -2.4, -1.0, 0.0]])
    assert clipped.tolist() == [[True, False, True, True, False, False]]


def test_clipped_value_loss() -> None:
    # ε = 0.5. V:     2        2       0.4       2       2      2
    # V_old:          1        1       0         1       1      1
    # R:              3        0       1         1.5     1.75   2
    # kept V:         1.5      1.5     0.4       1.5     1.5    1.5
    # errors:       1, 2.25  4, 2.25  0.36 ×2  0.25, 0  1/16×2  0, 0.25
    values, old_values = f64([[2.0, 2.0, 0.4, 2.0, 2.0, 2.0]]), f64([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]])
    returns = f64([[3.0, 0.0, 1.0, 1.5, 1.75, 2.0]])
    loss, clipped = functional.clipped_value_loss(values, old_values, returns, cliprange=0.5)
    assert_close(loss, [[1.125, 2.0, 0.18, 0.125, 0.03125, 0.125]])
    assert clipped.tolist() == [[True, False, False, False, False, True]]
    loss, clipped = functional.clipped_value_loss(values, old_values, returns, cliprange=None)
    assert_close(loss, [[0.5, 2.0, 0.18, 0.125, 0.03125, 0.0]])
    assert not clipped.any()


def test_aggregate_in_each_mode() -> None:
    # Rows of 2 and 1 tokens: (1, 2) and (6). Σ = 9 over 3 tokens; means 1.5 and 6; sums 3 and 6; at most 4 tokens.
    loss = f64([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    counts = {"token_count": 3, "sequence_count": 2, "max_length": 4}
    for mode, expected in {
        "token-mean": 3.0,
        "seq-mean-token-mean": 3.75,
        "seq-mean-token-sum": 4.5,
        "seq-sum-norm": 1.125,
    }.items():
        assert_close(functional.aggregate(loss, mask, **counts, mode=mode), expected)
    assert_close(functional.aggregate(loss, mask, **counts), 3.0)


def test_aggregate_of_micro_batch_divides_by_counts_of_minibatch() -> None:
    # Only the first row of a minibatch of 3 sequences and 12 tokens.
    loss, mask = f64([[1.0, 2.0, NAN]]), torch.tensor([[True, True, False]])
    counts = {"token_count": torch.tensor(12), "sequence_count": torch.tensor(3), "max_length": 5}
    for mode, expected in zip(functional.AGGREGATIONS, [0.25, 0.5, 1.0, 0.2], strict=True):
        assert_close(functional.aggregate(loss, mask, **counts, mode=mode), expected)


def test_explained_variance() -> None:
    # R = 0, 2, 4 (variance 8/3) and R − V = 0, 1, 2 (variance 2/3): 1 − 1/4. A constant offset of V costs nothing.
    returns, mask = f64([[0.0, 2.0, 4.0, NAN]]), torch.tensor([[True, True, True, False]])
    assert_close(functional.explained_variance(f64([[0.0, 1.0, 2.0, NAN]]), returns, mask), 0.75)
    assert_close(functional.explained_variance(f64([[5.0, 6.0, 7.0, NAN]]), returns, mask), 0.75)
    assert_close(functional.explained_variance(f64([[4.0, 2.0, 0.0, NAN]]), returns, mask), -3.0)


def test_value_r2() -> None:
    # R = 0, 2, 4: the best constant, 2, errs by 8/3 on average. R − V = 0, 1, 2 errs by 5/3, −5, −5, −5 by 25,
    # and −4, 0, 4 by 32/3; V = 2 is that constant, and V = R errs by nothing.
    returns, mask = f64([[0.0, 2.0, 4.0, NAN]]), torch.tensor([[True, True, True, False]])
    for values, expected in [
        ([0.0, 1.0, 2.0, NAN], 0.375),
        ([5.0, 7.0, 9.0, NAN], -8.375),
        ([4.0, 2.0, 0.0, NAN], -3.0),
        ([2.0, 2.0, 2.0, NAN], 0.0),
        ([0.0, 2.0, 4.0, NAN], 1.0),
    ]:
        assert_close(functional.value_r2(f64([values]), returns, mask), expected)


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("formula", [functional.explained_variance, functional.value_r2])
def test_explained_variance_and_r2_are_nan_for_constant_returns(formula: Callable[..., torch.Tensor]) -> None:
    for mask in ([[True, True]], [[False, False]]):
        assert torch.isnan(formula(f64([[1.0, 3.0]]), f64([[2.0, 2.0]]), torch.tensor(mask)))


@pytest.mark.parametrize("name", ["full", "K1", "Token", "token_mean", ""])
def test_unknown_option_name_raises_value_error(name: str) -> None:
    x, mask = f64([[0.0]]), torch.tensor([[True]])
    with pytest.raises(ValueError, match="k1"):
        functional.kl_penalty(x, x, estimator=name)
    with pytest.raises(ValueError, match="k3_reverse"):
        functional.kl_loss(x, x, x, estimator=name)
    with pytest.raises(ValueError, match="k3_reverse"):
        functional.kl_loss(x, x, x, estimator="k1")  # its gradient is zero on average
    with pytest.raises(ValueError, match="seq-sum-norm"):
        functional.aggregate(x, mask, token_count=1, mode=name)
    with pytest.raises(ValueError, match="mean_minus_variance"):
        functional.ensemble_scores(x, how=name)
    with pytest.raises(ValueError, match="unknown action level"):
        functional.sum_per_action(x, mask, level=name)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * (1 + 0.1 * 0.0064)),  # 10% above it, 64 of 10 000 episodes
        (5.4, 0.2 * (1 - 0.1 * 0.0064)),
        (60.0, 0.2 * (1 + 0.2 * 0.0064)),  # clipped to 20%
        (-1.0, 0.2 * (1 - 0.2 * 0.0064)),
    ],
)
def test_adaptive_kl(kl: float, expected: float) -> None:
    controller = KLController(kl_coef=0.2, kl_target=6.0, kl_horizon=10_000).update(kl, 64)
    assert_close(controller.kl_coef, expected)
    assert (controller.kl_target, controller.kl_horizon) == (6.0, 10_000)


def test_fixed_kl_coef_never_changes() -> None:
    assert KLController(0.05).update(100.0, 64) == KLController(0.05)


def test_gradients_are_finite_for_extreme_inputs() -> None:
    """In the gradient of a clipped or masked entry, exp could overflow, or 0 be multiplied by infinity."""
    new = torch.tensor([[100.0, -200.0, 0.1]], requires_grad=True)
    loss, clipped = functional.clipped_policy_loss(
        new, torch.zeros(1, 3), torch.ones(1, 3), cliprange=0.2, dual_clip=3.0
    )
    loss.sum().backward()
    assert new.grad is not None and new.grad.isfinite().all() and clipped.tolist() == [[True, False, False]]
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    kl = functional.exact_kl(logits, torch.tensor([[0.0, 1.0, 2.0]]))
    kl.sum().backward()
    assert kl.isfinite().all() and logits.grad is not None and logits.grad[0, :2].isfinite().all()
