"""Rows that lie end to end say what rows with padding say, in each family that can be laid so; others are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from peft import LoraConfig
from torch import Tensor
from trainer_fixture import DEVICE, distance, make_policy, snapshot, trained
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import logprobs
from rlhf_zoo.modeling.batches import count_tokens, split_batches
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.logprobs import response_logprobs, response_outputs
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.modeling.packed_attention import ATTENTION_NAME, enable_packing, supports_packing
from rlhf_zoo.modeling.sampling.sampler import Samples, sample

pytestmark = pytest.mark.attack

# With learned positions and with turned ones, windows (of 16 tokens here), mixtures, norms before and behind.
LAID = ["llama", "gpt2", "opt", "gpt_neox", "phi", "mistral", "mixtral", "qwen2", "qwen3", "gemma3_text", "olmo2"]
# A state that runs on, positions by way of the mask, capped logits of attention, a window that the mask alone has.
REFUSED = ["mamba", "qwen3_next", "falcon", "bloom", "gemma2", "phimoe"]


def some() -> Samples:
    """Rows of 24, 15, 10 and 8 tokens."""
    random, device = torch.Generator().manual_seed(1), DEVICE
    prompts, responses = (torch.tensor(lengths).unsqueeze(1) for lengths in ([20, 3, 9, 1], [4, 12, 1, 7]))
    masks = torch.arange(20) >= 20 - prompts, torch.arange(12) < responses
    ids = torch.randint(2, 17, (4, 32), generator=random)
    parts = ids[:, :20] * masks[0], masks[0], ids[:, 20:] * masks[1], masks[1], torch.zeros(4, 12), masks[1][:, 0]
    return Samples(*parts).to(device)


def said_by(model: Any, samples: Samples) -> list[Tensor]:
    """log π of the responses, and the gradient of every weight by a sum of it."""
    result = response_logprobs(model, samples).logprobs
    weights = torch.linspace(-1, 2, result.numel(), device=result.device).view_as(result)
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad((weights * result).sum(), learning, allow_unused=True)
    return [result, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "logits"])
@pytest.mark.parametrize("family", LAID)
def test_packed_row_attends_only_to_itself(monkeypatch: pytest.MonkeyPatch, family: str, chunked: bool) -> None:
    if not chunked:
        monkeypatch.setattr(logprobs, "logit_transform", lambda _: None)
    model, samples = tiny_model(AutoModelForCausalLM, family).to(DEVICE), some()
    drawn: Any = {"keys": [(0,), (1,)], "seed": 0, "max_new_tokens": 20, "stop_ids": [], "pad_id": 0}
    prompts = [[3, 4], [5, 6, 7]]
    padded, before = said_by(model, samples), sample(model, prompts, **drawn)
    enable_packing(model, subject="the policy")
    laid = said_by(model, samples)
    assert len(padded) == len(laid) > 2
    for one, other in zip(padded, laid, strict=True):
        assert (one - other).abs().max() <= 2e-5 * max(1.0, float(one.detach().abs().max()))
    after = sample(model, prompts, **drawn)
    assert torch.equal(before.completion_ids, after.completion_ids)
    assert (before.logprobs - after.logprobs).abs().max() < 1e-5


def test_packed_critic_gives_same_values() -> None:
    critic, samples = tiny_model(AutoModelForTokenClassification, "llama", num_labels=1).to(DEVICE), some()
    with torch.no_grad():
        padded = response_outputs(critic, samples)
        enable_packing(critic.train(), subject="the critic")  # whose family has dropout
        assert critic.training
        laid = response_outputs(critic.eval(), samples)
    assert (padded - laid)[samples.mask].abs().max() < 1e-5


@pytest.mark.parametrize("family", REFUSED)
def test_packing_rejects_unsupported_model_and_leaves_it_unchanged(family: str) -> None:
    model = tiny_model(AutoModelForCausalLM, family).to(DEVICE)
    before, samples = model.config._attn_implementation, some()
    with torch.no_grad():
        padded = response_outputs(model, samples)
    with pytest.raises(ZooError, match=r"^padding_free .*the policy, a.*: remove"):
        enable_packing(model, subject="the policy")
    assert model.config._attn_implementation == before and not supports_packing(model)
    with torch.no_grad():
        assert torch.equal(response_outputs(model, samples), padded)


def test_packed_batches_count_only_real_tokens() -> None:
    samples = some()
    batches = split_batches(samples, max_rows=64, max_tokens=34, packed=True)
    assert [sorted(batch.tolist()) for batch in batches] == [[1, 2, 3], [0]]
    assert [count_tokens(samples, batch, packed=True) for batch in batches] == [33, 24]
    assert [len(batch) for batch in split_batches(samples, max_rows=64, max_tokens=34)] == [2, 1, 1]
    assert [len(batch) for batch in split_batches(samples, max_rows=2, max_tokens=40, packed=True)] == [2, 2]
    assert [len(batch) for batch in split_batches(samples, max_rows=64, max_tokens=1, packed=True)] == [1] * 4


@pytest.mark.parametrize("critic", ["policy", "shared"])
def test_packed_policy_with_adapter_learns_the_same(tmp_path: Path, critic: str) -> None:
    settings: dict[str, Any] = {
        "peft_config": LoraConfig(target_modules=["q_proj", "v_proj"]), "critic": critic, "optim": "sgd",
        "learning_rate": 0.1, "stop_token_id": 3,
    }  # fmt: skip
    runs = []
    for options in ({}, {"padding_free": True}):
        torch.manual_seed(0)  # of the adapter's first weights
        runs.append(trained(tmp_path, **settings, **options))
    plain, laid = runs
    assert supports_packing(laid.policy) and not supports_packing(plain.policy)
    assert distance(plain.before, snapshot(plain)) > 1e-3 and distance(snapshot(plain), snapshot(laid)) < 1e-5


def test_saved_config_does_not_name_packed_attention(tmp_path: Path) -> None:
    model = make_policy()
    enable_packing(model, subject="the policy")
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()
    assert load_causal(str(tmp_path)).config._attn_implementation == "sdpa"
    assert critic_from(model).config._attn_implementation in ("sdpa", ATTENTION_NAME)
