"""A per-token loss whose gradients the chunked head computes in its forward pass equals the plain loss."""

from typing import Any

import pytest
import torch
from families import tiny_model
from test_logprobs import HEADS, HOLES, assert_equal, some
from test_ppo_options import SETTINGS
from torch import Tensor
from trainer_fixture import DEVICE, make_policy
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_zoo.modeling import chunked_logprobs, logprobs
from rlhf_zoo.modeling.chunked_logprobs import logit_transform
from rlhf_zoo.modeling.logprobs import response_logprobs
from rlhf_zoo.modeling.sampling.sampler import Samples, Vocabulary
from rlhf_zoo.ppo.actor_critic import ActorCriticOutput
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.loss import PolicyLoss, micro_batch_loss
from rlhf_zoo.ppo.minibatch import Minibatch, MinibatchSize
from rlhf_zoo.ppo.rollout import Advantages, Rollout
from rlhf_zoo.rewards import RewardScores

MORE: dict[str, dict[str, Any]] = {
    "k3_reverse": {"kl_in": "loss", "kl_estimator": "k3_reverse"},
    "another engine": {"rollout_engine": "transformers", "importance_sampling_cap": 1.1},
}
NOT_BY_TOKEN = {"full", "sequence"}


def settings(**options: Any) -> PPOConfig:
    return PPOConfig(output_dir="unused", use_cpu=True, report_to="none", cliprange=0.1, **options)


def minibatch_near_policy(model: PreTrainedModel, samples: Samples) -> Minibatch:
    """A micro-batch near what the model says now, so that some ratios are clipped, with random advantages."""
    random = torch.Generator().manual_seed(3)

    def near(x: Tensor) -> Tensor:
        return (x + 0.3 * torch.randn(x.shape, generator=random).to(x)).masked_fill(~samples.mask, 0)

    with torch.no_grad():
        now = response_logprobs(model, samples, temperature=0.7).logprobs
    nothing, each = torch.zeros_like(now), now[:, 0]
    samples = Samples(**{**vars(samples), "logprobs": near(now)})
    rollout = Rollout(samples, near(now), nothing, engine_logprobs=near(now))
    reward_scores = RewardScores(total=each, per_reward=each.unsqueeze(1))
    advantages = Advantages(reward_scores, each, each, nothing, nothing, near(3 * nothing) * 4, nothing, samples.mask)
    # The minibatch is twice what is here.
    size = MinibatchSize(2 * samples.mask.sum(), torch.tensor(6), 10)
    return Minibatch(rollout, advantages, torch.arange(len(samples)), size)


def both_ways(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, vocabulary: Vocabulary | None = None, **options: Any
) -> list[tuple[Tensor, ...]]:
    """Plain, then chunked: the loss, log π, the entropy, terms, and each weight's gradient by three times the loss."""
    args, samples = settings(**options), some(vocabulary=vocabulary)
    loss = PolicyLoss(args, minibatch_near_policy(model, samples), 0.7)
    assert loss.is_separable_per_token
    results = []
    for ask in (lambda _: None, logit_transform):
        monkeypatch.setattr(logprobs, "logit_transform", ask)
        output = response_logprobs(
            model, loss.batch.rollout.samples, temperature=0.7, entropy_requires_grad=args.entropy_coef > 0, loss=loss
        )
        assert output.loss is not None and output.loss_terms is not None
        outputs = [output.logprobs, output.entropy, *output.loss_terms.values()]
        assert not any(x.requires_grad for x in outputs)
        # They are of this very log π and entropy.
        again = loss(output.logprobs, output.entropy)[1]
        assert again.keys() == output.loss_terms.keys()
        assert all(torch.equal(again[name], term) for name, term in output.loss_terms.items())
        learning = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(3 * output.loss, learning, allow_unused=True)
        assert any(x is not None and x.abs().max() > 1e-3 for x in gradients)
        results.append((output.loss, *outputs, *(x for x in gradients if x is not None)))
    return results


@pytest.fixture(autouse=True)
def few_tokens_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprobs, "tokens_per_chunk", lambda _, size: max(1, 40 // size))


@pytest.mark.parametrize("name", [name for name in [*SETTINGS, *MORE] if name not in NOT_BY_TOKEN])
def test_chunked_loss_matches_plain_for_every_option(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    keys = (SETTINGS | MORE)[name]
    for vocabulary in (None, HOLES):
        assert_equal(*both_ways(monkeypatch, make_policy(), vocabulary, **keys))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("entropy", [0.0, 0.4])
def test_chunked_loss_matches_plain_for_every_head(monkeypatch: pytest.MonkeyPatch, name: str, entropy: float) -> None:
    family, more = HEADS[name]
    model = tiny_model(AutoModelForCausalLM, family, **more).to(DEVICE)
    for vocabulary in (None, HOLES):
        assert_equal(*both_ways(monkeypatch, model, vocabulary, entropy_coef=entropy))


def test_chunked_loss_supports_frozen_and_bfloat16_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_policy()
    model.lm_head.requires_grad_(False)
    assert_equal(*both_ways(monkeypatch, model))
    assert_equal(*both_ways(monkeypatch, make_policy().to(torch.bfloat16)), within=0.05)


@pytest.mark.parametrize("name", sorted(NOT_BY_TOKEN))
def test_loss_over_whole_sequence_is_not_separable_per_token(name: str) -> None:
    """A sequence ratio needs all tokens of a completion, and an exact KL needs the whole vocabulary."""
    model = make_policy()
    assert not PolicyLoss(settings(**SETTINGS[name]), minibatch_near_policy(model, some()), 0.7).is_separable_per_token


def test_chunked_head_runs_once_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a per-token loss; without one, the backward pass recomputes the logits."""
    model, calls, capped = make_policy(), [], chunked_logprobs._apply_transform
    loss = PolicyLoss(settings(), minibatch_near_policy(model, some()), 0.7)
    samples = loss.batch.rollout.samples

    def counted(z: Tensor, *how: Any) -> Tensor:
        calls.append(len(z))
        return capped(z, *how)

    monkeypatch.setattr(chunked_logprobs, "_apply_transform", counted)
    for times, loss_or_none in ((1, loss), (2, None)):
        calls.clear()
        output = response_logprobs(model, samples, temperature=0.7, loss=loss_or_none)
        (loss(output.logprobs, output.entropy)[0] if output.loss is None else output.loss).backward()
        assert sum(calls) == times * int(samples.mask.sum()) and len(calls) > 2 * times


def test_micro_batch_loss_reuses_loss_of_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its terms are logged as they are; without one, `micro_batch_loss` computes it."""
    model = make_policy()
    loss = PolicyLoss(settings(), minibatch_near_policy(model, some()), 0.7)
    output = response_logprobs(model, loss.batch.rollout.samples, temperature=0.7, loss=loss)
    values = torch.zeros_like(output.logprobs)
    plain = ActorCriticOutput(output.logprobs, output.entropy, values)
    with_loss = plain._replace(policy_loss=output.loss, policy_terms=output.loss_terms)
    expected, terms = micro_batch_loss(loss, plain)
    monkeypatch.setattr(PolicyLoss, "__call__", None)
    total, same = micro_batch_loss(loss, with_loss)
    assert torch.equal(total, expected) and same.keys() == terms.keys()
    assert all(torch.equal(same[name], term) and not term.requires_grad for name, term in terms.items())


def test_micro_batch_keeps_minibatch_size_and_rollout_rows() -> None:
    update = minibatch_near_policy(make_policy(), some())
    rows = torch.tensor([2, 0])
    whole = Minibatch.of(update.rollout, update.advantages, rows, max_actions=10)
    assert whole.size.actions == update.advantages.mask[rows].sum() and whole.size.sequences == len(whole) == 2
    part = whole.micro_batch(torch.tensor([1]))
    assert part.size is whole.size and part.indices.tolist() == [0] and len(part) == 1
    length = int(update.rollout.mask[0].sum())
    assert torch.equal(part.rollout.logprobs, update.rollout.logprobs[:1, :length])
    assert torch.equal(part.advantages.advantages, update.advantages.advantages[:1, :length])
