"""PPO's models: critics for several architectures, exact checkpoints, and loading errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_fixture import EOS, PAD, digests, make_reward_model, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.critic import CRITIC_DIR, critic_from
from rlhf_zoo.modeling.models import (
    build_causal,
    disable_dropout,
    load_causal,
    load_classifier,
    score_statistics,
    set_score_statistics,
)
from rlhf_zoo.ppo.actor_critic import ActorCritic, shared_value_head

KINDS = ("llama", "qwen2", "gpt_neox", "gpt2")
IDS = torch.tensor([[5, 6, 7, 8, EOS], [9, 4, 3, 3, 12]])


def make_causal(kind: str, **more: Any) -> PreTrainedModel:
    return tiny_model(AutoModelForCausalLM, kind, **more)


def make_classifier(kind: str, **more: Any) -> PreTrainedModel:
    """Its weights are not those of `causal`."""
    options = {"num_labels": 1, "initializer_range": 0.3} | more
    return tiny_model(AutoModelForSequenceClassification, kind, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_critic_from_reward_model_computes_normalised_score(kind: str) -> None:
    source = make_classifier(kind)
    set_score_statistics(source, mean=0.7, std=0.25, measured_on="nothing: a toy")
    critic = critic_from(source).eval()
    with torch.no_grad():
        scores = source(input_ids=IDS).logits[:, 0]
        values = critic(input_ids=IDS).logits[..., 0]
    assert values.shape == IDS.shape
    assert values[:, -1].tolist() == pytest.approx(((scores - 0.7) / 0.25).tolist(), abs=1e-4)
    assert score_statistics(critic) == (0, 1) and score_statistics(source) == (0.7, 0.25)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in critic.parameters())


def test_critic_from_reward_model_counts_bias_of_its_head() -> None:
    source = make_classifier("llama")
    source.score = torch.nn.Linear(source.score.in_features, 1)
    source.score.bias.data.fill_(0.4)
    set_score_statistics(source, mean=0.7, std=0.25, measured_on="nothing: a toy")
    critic = critic_from(source, weight=2.0).eval()
    with torch.no_grad():
        scores, values = source(input_ids=IDS).logits[:, 0], critic(input_ids=IDS).logits[..., 0]
    assert values[:, -1].tolist() == pytest.approx((2 * (scores - 0.7) / 0.25).tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_critic_from_policy_copies_trunk_and_starts_at_zero(kind: str) -> None:
    source = make_causal(kind)
    critic = critic_from(source)
    assert digests(critic.base_model) == digests(source.base_model)
    assert critic.base_model is not source.base_model
    with torch.no_grad():
        assert torch.equal(critic.eval()(input_ids=IDS).logits, torch.zeros(2, 5, 1))
        next(critic.base_model.parameters()).add_(1)
    assert digests(critic.base_model) != digests(source.base_model)


def test_critic_from_frozen_bfloat16_model_trains_in_float32() -> None:
    source = make_classifier("llama").to(torch.bfloat16).requires_grad_(False)
    source.config.dtype = torch.bfloat16
    critic = critic_from(source)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in critic.parameters())


@pytest.mark.parametrize("saved", ["critic", "classifier", "causal"])
def test_critic_from_path_loads_saved_weights(tmp_path: Path, saved: str) -> None:
    model = {"critic": lambda: critic_from(make_classifier("llama")), "classifier": lambda: make_classifier("llama"),
            "causal": lambda: make_causal("llama")}[saved]()  # fmt: skip
    model.save_pretrained(tmp_path)
    assert digests(critic_from(tmp_path)) == digests(model if saved == "critic" else critic_from(model))


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True), ("gpt_neox", False), ("gpt2", True)])
def test_checkpoint_round_trip_is_exact(tmp_path: Path, kind: str, tied: bool) -> None:
    actor = ActorCritic(make_causal(kind, tie_word_embeddings=tied), critic_from(make_classifier(kind)))
    actor.save_pretrained(tmp_path)
    expected = digests(actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1)
    assert not any(value == expected[name] for name, value in digests(actor).items())
    parameters = {id(p) for p in actor.parameters()}
    actor.load_checkpoint(tmp_path)
    assert digests(actor) == expected and {id(p) for p in actor.parameters()} == parameters
    if tied:
        assert actor.policy.get_input_embeddings().weight is actor.policy.get_output_embeddings().weight
    assert digests(AutoModelForCausalLM.from_pretrained(tmp_path)) == digests(actor.policy)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / CRITIC_DIR)
    assert digests(loaded) == digests(actor.value_model)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    actor = ActorCritic(make_causal("llama"), critic_from(make_classifier("llama")))
    with pytest.raises(ZooError, match=r"no model\*.safetensors"):
        actor.load_checkpoint(tmp_path)
    ActorCritic(make_causal("gpt2"), critic_from(make_classifier("gpt2"))).save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="another model's checkpoint"):
        actor.load_checkpoint(tmp_path)
    with pytest.raises(ZooError, match=r"has no critic/value_head\.safetensors"):
        ActorCritic(policy := make_causal("gpt2"), shared_value_head(policy)).load_checkpoint(tmp_path)
    with pytest.raises(ZooError, match=r"has no adapter_model\.safetensors"):
        ActorCritic(get_peft_model(make_causal("gpt2"), LoraConfig()), actor.value_model).load_checkpoint(tmp_path)
    narrow = ActorCritic(make_causal("gpt2", n_embd=16), critic_from(make_classifier("gpt2", n_embd=16)))
    with pytest.raises(ZooError, match="another model's checkpoint"):
        narrow.load_checkpoint(tmp_path)


def test_load_errors_name_model(tmp_path: Path) -> None:
    for loader in (load_causal, load_classifier):
        with pytest.raises(ZooError, match="nor a readable repository") as caught:
            loader(tmp_path / "nothing")
        assert "nothing" in str(caught.value) and "\n" not in str(caught.value)
    make_classifier("llama", num_labels=2).save_pretrained(tmp_path / "two")
    with pytest.raises(ZooError, match="has 2 outputs"):
        load_classifier(tmp_path / "two")


def test_models_load_in_float32_with_their_score_statistics(tmp_path: Path) -> None:
    model = make_reward_model(statistics=(0.25, 2.0))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_classifier(tmp_path)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    assert score_statistics(loaded) == (0.25, 2.0)
    assert score_statistics(make_reward_model(statistics=None)) == (0, 1)


def test_build_causal_uses_tokenizer_ids() -> None:
    tokenizer = make_tokenizer()
    model = build_causal({"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "intermediate_size": 16}, tokenizer)  # fmt: skip
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == EOS
    assert model.config.pad_token_id == PAD
    for wrong in ({"model_type": "no-such-model"}, {}, {"model_type": "llama", "num_attention_heads": 0}):
        with pytest.raises(ZooError, match="cannot be built"):
            build_causal(wrong, tokenizer)


def test_disable_dropout_covers_every_architecture() -> None:
    """Two passes in training mode agree: dropout sits in modules (GPT-2), in attributes (Llama), in both (Bloom)."""
    models = [
        make_causal("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5),
        make_causal("llama", attention_dropout=0.5),
        make_causal("gpt_neox", hidden_dropout=0.5, attention_dropout=0.5),
        make_causal("bloom", hidden_dropout=0.5, attention_dropout=0.5),
    ]
    for model in models:
        model.train()
        with torch.no_grad():
            assert not torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits), type(model)
            disable_dropout(model)
            assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits), type(model)
    assert not any(m.p for model in models for m in model.modules() if isinstance(m, nn.Dropout))


def test_mixture_of_experts_decodes_after_trl_training(tmp_path: Path) -> None:
    """trl writes `output_router_logits: true` into the checkpoint; its loss has no shape in a step of decoding."""
    make_causal("mixtral", eos_token_id=None, output_router_logits=True).save_pretrained(tmp_path)
    model = load_causal(tmp_path)
    assert not model.config.output_router_logits
    ids = torch.ones(2, 4, dtype=torch.long)
    assert model.generate(ids, attention_mask=ids, max_new_tokens=3, do_sample=False).shape == (2, 7)
