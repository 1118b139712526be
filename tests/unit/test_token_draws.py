"""The draw: the token of a float64 sum over the whole vocabulary, without that sum; and log π of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.modeling.sampling import random as draws
from rlhf_zoo.modeling.sampling.random import draw_tokens, draw_with_logprobs


def bounds(logits: torch.Tensor) -> torch.Tensor:
    """By definition: Σ p over the vocabulary in float64. (B, V) -> (B, V)."""
    return logits.softmax(-1).double().cumsum(-1)


def plain(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token at which the sum passes u·Σ, or reaches it where the product was rounded so."""
    target = uniform * cumulative[:, -1:]
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


@pytest.mark.parametrize(
    ("size", "numbers"), [(1024, 1200), (4096, 500), (4133, 300), (16384, 100), (50304, 50), (151936, 50)]
)
def test_drawn_token_equals_float64_cumulative_sum(size: int, numbers: int) -> None:
    """Over a million draws in all: flat as of an untrained model, like a language model's, and of few tokens."""
    generator = torch.Generator().manual_seed(size)
    for scale in (0.0, 0.2, 2.5, 12.0):
        rows = min(128, 500_000 // size)
        probabilities = (torch.randn(rows, size, generator=generator) * scale).softmax(-1)
        uniform = torch.rand(rows, numbers, dtype=torch.float64, generator=generator)
        uniform[:, :2] = torch.tensor([0.0, 1 - 2**-53])
        expected = plain(probabilities.double().cumsum(-1), uniform)
        got = [draws._inverse_cdf_by_blocks(probabilities, each)[0] for each in uniform.T]
        assert torch.equal(torch.stack(got, dim=1), expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1100, 2048, 5000]), st.sampled_from([0.0, 0.5, 4.0]), st.booleans())
def test_draws_at_token_bounds_equal_float64_result(seed: int, size: int, scale: float, holes: bool) -> None:
    """Where rounding decides: numbers on a bound and the next float64 on both sides of it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, size, generator=generator) * scale
    if holes:
        logits[:, torch.randint(size, (size // 3,), generator=generator)] = torch.finfo(torch.float32).min / 2
    cumulative = bounds(logits)[0]
    some = (cumulative / cumulative[-1])[torch.randint(size - 1, (30,), generator=generator)]
    uniform = torch.cat([some.nextafter(torch.tensor(x, dtype=torch.float64)) for x in (0.0, 1.0)] + [some])
    uniform = torch.cat([uniform, some + 1e-6, some - 1e-6]).clamp(0, 1 - 2**-53)
    rows = logits.expand(len(uniform), size)
    tokens, logps = draw_with_logprobs(rows, uniform)
    assert torch.equal(tokens, plain(bounds(rows), uniform.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(
        logps, rows.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0].float(), atol=2e-6, rtol=5e-7
    )


def test_few_rows_fall_back_to_full_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of rows in doubt is about 4e-6 a token of typical probability: none at 4,096 tokens, most when flat."""
    counted = []
    whole = draws._inverse_cdf
    monkeypatch.setattr(draws, "_inverse_cdf", lambda p, u: counted.append(len(p)) or whole(p, u))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 4096, generator=generator) * 2.5
    draw_tokens(logits, torch.rand(2000, dtype=torch.float64, generator=generator))
    assert sum(counted) < 40


@pytest.mark.parametrize(("vocabulary", "least", "most"), [(49_152, 1e-3, 1e-2), (17, 0.0, 1e-5)])
def test_rate_of_tokens_decided_by_rounding_is_as_documented(vocabulary: int, least: float, most: float) -> None:
    """Two processes and one differ by 3e-6 in log-probabilities after an update: docs/scale.md says what comes of it.

    Between its bounds in the sum of probabilities a token takes up p; where noise moves a bound, a number in between
    names its neighbour. Of many tokens most are less probable than the noise of their bounds.
    """
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(vocabulary, generator=random, dtype=torch.float64)
    bounds, moved = (
        (logits + noise * torch.randn(vocabulary, generator=random, dtype=torch.float64)).softmax(-1).cumsum(-1)
        for noise in (0.0, 3e-6)
    )
    numbers = torch.rand(2_000_000, generator=random, dtype=torch.float64)
    parted = (torch.searchsorted(bounds, numbers) != torch.searchsorted(moved, numbers)).double().mean()
    assert least <= float(parted) <= most
