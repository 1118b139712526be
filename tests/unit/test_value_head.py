"""Value head models: the head, a pass through it, its state, and which models can have none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    Gemma3Config,
    LlamaModel,
    PreTrainedConfig,
)
from value_head_models import (
    CONFIGS,
    DECODER_IDS,
    HEAD_KEYS,
    IDS,
    adapted,
    assert_same,
    digests,
    headed,
    lora,
    outputs,
    plain,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.value_head import ValueHead, hidden_size_of
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

WIDTHS = {"llama": 32, "llama-tied": 32, "gpt2": 32, "opt": 16, "t5": 32}


def test_hidden_size_is_found_in_nested_configurations() -> None:
    pair = [BertConfig(hidden_size=size, num_attention_heads=4) for size in (24, 40)]
    assert hidden_size_of(EncoderDecoderConfig.from_encoder_decoder_configs(*pair)) == 40
    assert hidden_size_of(Gemma3Config(text_config={"hidden_size": 48})) == 48
    config = PreTrainedConfig()
    with pytest.raises(ZooError, match="PreTrainedConfig has no hidden_size"):
        hidden_size_of(config)
    config.d_model = 56
    assert hidden_size_of(config) == 56


def test_value_head_is_linear_and_returns_float32() -> None:
    head = ValueHead(4).eval()
    with torch.no_grad():
        head.summary.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 4.0]]))
        head.summary.bias.fill_(0.25)
    hidden = torch.tensor([[[1.0, 1.0, 2.0, 0.5], [0.0, 0.0, 0.0, 0.0]]])
    for kind in (torch.float32, torch.bfloat16):  # every number here is exact in both
        values = head(hidden.to(kind))
        assert values.tolist() == [[[2.25], [0.25]]]
        assert values.dtype == torch.float32
    assert head.to(torch.bfloat16)(hidden).dtype == torch.float32


def test_value_head_is_float32_under_another_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ValueHead(4).summary.weight.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_dropout_applies_to_hidden_state_only_in_training() -> None:
    head = ValueHead(64, summary_dropout_prob=1.0)
    hidden = torch.ones(3, 64)
    assert torch.equal(head.train()(hidden), head.summary.bias.expand(3, 1))
    assert not torch.equal(head.eval()(hidden), head.summary.bias.expand(3, 1))


def test_new_head_initialization_follows_its_settings() -> None:
    model = plain("llama")
    drawn = AutoModelForCausalLMWithValueHead.from_pretrained(
        model, v_head_init_strategy="normal", v_head_initializer_range=1e-3, summary_dropout_prob=0.3
    )
    assert 0 < drawn.v_head.summary.weight.abs().max() < 1e-2
    assert drawn.v_head.summary.bias.item() == 0
    assert drawn.v_head.dropout.p == 0.3
    torch.manual_seed(5)
    as_linear = nn.Linear(32, 1)
    torch.manual_seed(5)
    default = AutoModelForCausalLMWithValueHead(model)
    assert torch.equal(default.v_head.summary.weight, as_linear.weight)
    assert default.v_head.dropout.p == 0.1
    model.config.summary_dropout_prob = 0.7
    assert AutoModelForCausalLMWithValueHead(model).v_head.dropout.p == 0.7
    with pytest.raises(ZooError, match="v_head_init_strategy is 'orthogonal'"):
        AutoModelForCausalLMWithValueHead(model, v_head_init_strategy="orthogonal")


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_come_from_model_and_values_from_last_hidden_state(kind: str) -> None:
    model = headed(kind)
    kwargs = {"decoder_input_ids": DECODER_IDS} if kind == "t5" else {}
    logits, values = outputs(model)
    with torch.no_grad():
        inner = model.pretrained_model(input_ids=IDS, output_hidden_states=True, **kwargs)
        last = (inner.decoder_hidden_states if kind == "t5" else inner.hidden_states)[-1]
        expected = last @ model.v_head.summary.weight[0] + model.v_head.summary.bias
    assert torch.equal(logits, inner.logits)
    # The same sum of at most 32 products, perhaps in another order: values up to 10 are known to 1e-6.
    torch.testing.assert_close(values, expected, rtol=0, atol=4e-6)
    assert values.shape == (DECODER_IDS if kind == "t5" else IDS).shape
    assert hidden_size_of(model.config) == last.shape[-1] == WIDTHS[kind]


def test_past_key_values_are_returned_and_accepted() -> None:
    model = headed("llama")
    whole = outputs(model)[1]
    with torch.no_grad():
        *_, cache = model(IDS[:, :3], return_past_key_values=True)
        assert len(model(IDS[:, :3])) == 3
        _, _, rest = model(IDS[:, 3:], cache, torch.ones_like(IDS))
    # Attention over cached keys sums in another order; values up to 10 are known to 1e-6, and two layers add to it.
    torch.testing.assert_close(rest, whole[:, 3:], rtol=2e-6, atol=5e-6)
    model.config.use_cache = False
    assert model(IDS, return_past_key_values=True)[3] is not None


def test_wrapper_keeps_training_mode_of_its_model() -> None:
    for training in (False, True):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(plain("llama").train(training))
        assert {module.training for module in model.modules()} == {training}
    assert not model.eval().v_head.dropout.training


def test_loss_and_generation_are_those_of_the_model() -> None:
    model = headed("llama")
    assert torch.equal(model(IDS, labels=IDS)[1], model.pretrained_model(IDS, labels=IDS).loss)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), model.pretrained_model.generate(IDS, **options))
    model.generation_config.eos_token_id = None
    assert model.pretrained_model.generation_config.eos_token_id is None
    assert model.generate(IDS, **options).shape == (2, 11)
    model.gradient_checkpointing_enable()
    assert model.pretrained_model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert not model.pretrained_model.is_gradient_checkpointing


def test_half_precision_model_returns_float32_outputs() -> None:
    model = headed("llama").to(torch.bfloat16)
    assert (model.dtype, model.device) == (torch.bfloat16, IDS.device)
    assert model.v_head.summary.weight.dtype == torch.bfloat16
    assert [out.dtype for out in outputs(model)] == [torch.float32, torch.float32]


def test_quantized_model_is_prepared_before_adapter_is_added() -> None:
    model = plain("llama").to(torch.bfloat16)
    model.is_quantized = model.is_loaded_in_8bit = True
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(
        model, peft_config=lora(), use_gradient_checkpointing=False
    )
    assert wrapped.dtype == torch.float32
    assert not model.is_gradient_checkpointing
    again = plain("llama")
    again.is_quantized = again.is_loaded_in_8bit = True
    AutoModelForCausalLMWithValueHead.from_pretrained(again, peft_config=lora())
    assert again.is_gradient_checkpointing


def test_state_dict_has_trl_keys_and_loads_strictly() -> None:
    model, other = headed("llama"), headed("llama", base=plain("llama", seed=1), seed=3)
    state = model.state_dict()
    assert list(state) == [*plain("llama").state_dict(), "v_head.summary.weight", "v_head.summary.bias"]
    assert not other.load_state_dict(state).missing_keys
    assert_same(model, other)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({key: value for key, value in state.items() if key not in HEAD_KEYS})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(state | {"stranger": torch.ones(1)})


def test_state_dict_of_parent_module_loads() -> None:
    holder, other = nn.ModuleDict({"policy": headed("llama")}), nn.ModuleDict({"policy": headed("llama", seed=4)})
    state = holder.state_dict()
    assert set(state) == {f"policy.{key}" for key in headed("llama").state_dict()}
    other.load_state_dict(state)
    assert_same(holder["policy"], other["policy"])


def test_state_dict_of_adapted_model_holds_only_the_head(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    state = {key: torch.full_like(value, 2.0) for key, value in model.state_dict().items()}
    assert state.keys() == HEAD_KEYS
    trunk = digests(model.pretrained_model)
    model.load_state_dict(state)
    assert model.v_head.summary.weight.unique().tolist() == [2.0]
    assert digests(model.pretrained_model) == trunk
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"v_head.summary.bias": torch.ones(1)})


def test_value_head_rejects_models_of_the_wrong_kind() -> None:
    inside = plain("llama")
    inside.add_adapter(lora())
    prompted = get_peft_model(plain("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("LlamaModel has no language model head", LlamaModel(CONFIGS["llama"]()), {}),
        ("T5ForConditionalGeneration is not a model of AutoModelForCausalLM", plain("t5"), {}),
        ("A Linear is not a language model", nn.Linear(2, 2), {}),
        ("learns prompts", prompted, {}),
        ("has an adapter without a PeftModel", inside, {}),
        ("peft_config is a dict", plain("llama"), {"peft_config": {"r": 2}}),
        ("reward_adapter is not supported", plain("llama"), {"reward_adapter": "somewhere"}),
    ]
    for message, model, given in cases:
        with pytest.raises(ZooError, match=message):
            AutoModelForCausalLMWithValueHead.from_pretrained(model, **given)
    with pytest.raises(ZooError, match="use AutoModelForCausalLMWithValueHead"):
        AutoModelForSeq2SeqLMWithValueHead.from_pretrained(plain("gpt2"))
