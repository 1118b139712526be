"""A loss by token, whose gradients the chunked head makes in its forward pass, is the plain one with each option."""

from typing import Any

import pytest
import torch
from families import tiny_model
from test_logprobs import HEADS, HOLES, assert_equal, some
from test_ppo_options import SETTINGS
from torch import Tensor
from trainer_fixture import DEVICE, make_policy
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_zoo.modeling import logprobs
from rlhf_zoo.modeling.logprobs import after_head, response_logprobs
from rlhf_zoo.modeling.sampling.sampler import Samples, Vocabulary
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.loss import token_loss
from rlhf_zoo.ppo.rollout import Advantages, MinibatchSize, Rollout
from rlhf_zoo.rewards import Scored

MORE: dict[str, dict[str, Any]] = {
    "k3_reverse": {"kl_in": "loss", "kl_estimator": "k3_reverse"},
    "another engine": {"rollout_engine": "transformers", "importance_sampling_cap": 1.1},
}
NOT_BY_TOKEN = {"full", "sequence"}


def settings(**given: Any) -> PPOConfig:
    return PPOConfig(output_dir="unused", use_cpu=True, report_to="none", cliprange=0.1, **given)


def around(model: PreTrainedModel, samples: Samples) -> tuple[Rollout, Advantages, MinibatchSize]:
    """A rollout near what the model says now, so that some ratios are clipped, with random advantages."""
    random = torch.Generator().manual_seed(3)

    def near(x: Tensor) -> Tensor:
        return (x + 0.3 * torch.randn(x.shape, generator=random).to(x)).masked_fill(~samples.mask, 0)

    with torch.no_grad():
        now = response_logprobs(model, samples, temperature=0.7).logprobs
    nothing, each = torch.zeros_like(now), now[:, 0]
    samples = Samples(**{**vars(samples), "logprobs": near(now)})
    rollout = Rollout(samples, near(now), nothing, engine_logprobs=near(now))
    scored = Scored(total=each, each=each.unsqueeze(1))
    estimates = Advantages(scored, each, each, nothing, nothing, near(3 * nothing) * 4, nothing, samples.mask)
    # The minibatch is twice what is here.
    return rollout, estimates, MinibatchSize(2 * samples.mask.sum(), torch.tensor(6), 10)


def both_ways(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, vocabulary: Vocabulary | None = None, **given: Any
) -> list[tuple[Tensor, ...]]:
    """Plain, then chunked: the loss, log π, the entropy, and the gradient of every weight by three times the loss."""
    args, samples = settings(**given), some(vocabulary=vocabulary)
    rollout, estimates, size = around(model, samples)
    loss = token_loss(args, rollout, estimates, size, kl_coef=0.7)
    found = []
    for ask in (lambda _: None, after_head):
        monkeypatch.setattr(logprobs, "after_head", ask)
        said = response_logprobs(
            model, rollout.samples, temperature=0.7, entropy_learns=args.entropy_coef > 0, loss=loss
        )
        assert said.loss is not None and not said.logprobs.requires_grad and not said.entropy.requires_grad
        learning = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(3 * said.loss, learning, allow_unused=True)
        assert any(x is not None and x.abs().max() > 1e-3 for x in gradients)
        found.append((said.loss, said.logprobs, said.entropy, *(x for x in gradients if x is not None)))
    return found


@pytest.fixture(autouse=True)
def few_tokens_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "rows_at_once", lambda _, size: max(1, 40 // size))


@pytest.mark.parametrize("name", [name for name in [*SETTINGS, *MORE] if name not in NOT_BY_TOKEN])
def test_every_option_of_the_loss(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = (SETTINGS | MORE)[name]
    for vocabulary in (None, HOLES):
        assert_equal(*both_ways(monkeypatch, make_policy(), vocabulary, **given))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("entropy", [0.0, 0.4])
def test_every_head(monkeypatch: pytest.MonkeyPatch, name: str, entropy: float) -> None:
    family, more = HEADS[name]
    model = tiny_model(AutoModelForCausalLM, family, **more).to(DEVICE)
    for vocabulary in (None, HOLES):
        assert_equal(*both_ways(monkeypatch, model, vocabulary, entropy_coef=entropy))


def test_a_head_that_is_held_back_and_one_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_policy()
    model.lm_head.requires_grad_(False)
    assert_equal(*both_ways(monkeypatch, model))
    assert_equal(*both_ways(monkeypatch, make_policy().to(torch.bfloat16)), within=0.05)


@pytest.mark.parametrize("name", sorted(NOT_BY_TOKEN))
def test_what_is_not_by_token_has_no_such_loss(name: str) -> None:
    """A completion's ratio is of all its tokens, and an exact KL of the whole vocabulary."""
    model = make_policy()
    assert token_loss(settings(**SETTINGS[name]), *around(model, some()), kl_coef=0.7) is None


def test_the_head_runs_once_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss by token; without one the backward pass makes the logits again."""
    model, made, capped = make_policy(), [], logprobs._capped
    loss = token_loss(settings(), *(given := around(model, some())), kl_coef=0.7)
    samples = given[0].samples

    def counted(z: Tensor, *how: Any) -> Tensor:
        made.append(len(z))
        return capped(z, *how)

    monkeypatch.setattr(logprobs, "_capped", counted)
    assert loss is not None
    for times, asked in ((1, loss), (2, None)):
        made.clear()
        said = response_logprobs(model, samples, temperature=0.7, loss=asked)
        (loss(said.logprobs, said.entropy) if said.loss is None else said.loss).backward()
        assert sum(made) == times * int(samples.mask.sum()) and len(made) > 2 * times
