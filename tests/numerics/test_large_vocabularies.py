"""Log-probabilities, entropies and their gradients stay close to float64 for large vocabularies.

On a CPU, softmax and log_softmax sum in a few float32 accumulators, so their error grows with the vocabulary: at
262,144 tokens it was 1e-5 in log π and 3e-3 in the entropy.
"""

import pytest
import torch
from torch import Tensor, nn

from rlhf_zoo import functional
from rlhf_zoo.modeling.chunked_logprobs import chunked_logprobs
from rlhf_zoo.modeling.sampling.random import draw_with_logprobs, uniforms

SIZES = (49_152, 128_256, 262_144)
ROWS, WIDTH = 32, 16
# float32 numbers from 16 to 32, such as log Σ exp z here, are 1.9e-6 apart.
LOGPROB, BIAS = 1.9e-6, 4e-7


def head_and_states(size: int) -> tuple[nn.Linear, Tensor]:
    """A head and states with logits of deviation 3: they differ enough between tokens to bias rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(size)
        head, states = nn.Linear(WIDTH, size, bias=False), torch.randn(ROWS, WIDTH)
        nn.init.normal_(head.weight, std=3 / WIDTH**0.5)
    return head, states


def trl_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """TRL's selective_log_softmax."""
    normalizers = torch.stack([row.logsumexp(-1) for row in logits])
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - normalizers


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_logprobs_are_as_close_to_float64_as_trls(size: int) -> None:
    """In the chunked head, in the plain path, and in sampling."""
    head, states = head_and_states(size)
    logits = head(states)
    uniform = uniforms(0, [(row,) for row in range(ROWS)], 1).squeeze(1)
    tokens, sampled = draw_with_logprobs(logits, uniform)
    exact = functional.selected_logprobs(logits.double(), tokens)
    chunked = chunked_logprobs(states, head, tokens)[0]
    trl_error = (trl_logprobs(logits, tokens) - exact).abs()
    for actual in (chunked, sampled, functional.selected_logprobs(logits, tokens)):
        error = actual.double() - exact
        assert error.abs().max() < LOGPROB and error.mean().abs() < BIAS
        assert error.abs().mean() <= 1.1 * trl_error.mean()
    tokens, sampled = draw_with_logprobs(logits, uniform, top_p=0.9)
    assert (sampled - functional.selected_logprobs(logits.double(), tokens)).abs().max() < LOGPROB


@pytest.mark.parametrize("size", SIZES)
def test_entropies_and_gradients_are_close_to_float64(size: int) -> None:
    """For a loss of both, with gradients computed in the forward pass, or in the backward pass."""
    head, states = head_and_states(size)
    tokens = torch.arange(ROWS) * 1000
    exact_head, exact_states = nn.Linear(WIDTH, size, bias=False).double(), states.double().requires_grad_()
    exact_head.load_state_dict(head.state_dict())
    logits = exact_head(exact_states)
    exact = functional.entropy(logits)
    (functional.selected_logprobs(logits, tokens).sum() + exact.sum()).backward()
    assert (functional.entropy(head(states)).detach() - exact).abs().max() < 2e-5

    for by_loss in (True, False):
        head.zero_grad()
        inputs = states.clone().requires_grad_()
        loss = (lambda logprobs, entropies: ((logprobs + entropies).sum(), {})) if by_loss else None
        logprobs, entropies, total, _ = chunked_logprobs(inputs, head, tokens, loss=loss)
        (logprobs.sum() + entropies.sum() if total is None else total).backward()
        assert (entropies.detach() - exact).abs().max() < 1e-5  # the product with the head is rounded too
        for actual, expected in ((inputs.grad, exact_states.grad), (head.weight.grad, exact_head.weight.grad)):
            assert actual is not None and expected is not None
            assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_exact_kl_is_close_to_float64() -> None:
    head, states = head_and_states(SIZES[-1])
    logits = head(states)
    other = logits + 0.1 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    exact = functional.exact_kl(logits.double(), other.double())
    assert (functional.exact_kl(logits, other) - exact).abs().max() < 4e-6
    assert (functional.log_softmax(logits) - logits.double().log_softmax(-1)).abs().max() < 4e-6
