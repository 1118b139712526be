"""Value head models: TRL's checkpoints and calls; trunks and heads that come back bit for bit from disk and Hub."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    OPTConfig,
    PreTrainedConfig,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from rlhf_zoo.errors import ZooError
from rlhf_zoo.value_head import (
    VALUE_HEAD_FILE,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ValueHead,
    hidden_size_of,
    read_value_head,
)

PAD, EOS, CONTEXT = 0, 1, 32
COMMON: dict[str, Any] = {"vocab_size": 17, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
LLAMA = COMMON | SMALL | {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
CONFIGS = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "llama-tied": lambda: LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.2),
    "opt": lambda: OPTConfig(
        **COMMON | SMALL, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, do_layer_norm_before=False, init_std=0.2
    ),
    "t5": lambda: T5Config(
        vocab_size=17, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=PAD
    ),
}
WIDTHS = {"llama": 32, "llama-tied": 32, "gpt2": 32, "opt": 16, "t5": 32}
IDS = torch.tensor([[5, 6, 7, 8, EOS], [9, 4, 3, 3, 12]])
DECODER_IDS = torch.tensor([[PAD, 3, 4], [PAD, 8, 9]])
HEAD_KEYS = {"v_head.summary.weight", "v_head.summary.bias"}
SHARD = "6KB"


def classes(kind: str) -> tuple[Any, Any]:
    if kind == "t5":
        return AutoModelForSeq2SeqLM, AutoModelForSeq2SeqLMWithValueHead
    return AutoModelForCausalLM, AutoModelForCausalLMWithValueHead


def plain(kind: str, *, seed: int = 0) -> Any:
    """A language model alone."""
    torch.manual_seed(seed)
    return classes(kind)[0].from_config(CONFIGS[kind]()).eval()


def headed(kind: str, *, seed: int = 0, base: Any = None, **kwargs: Any) -> Any:
    """The same with a head that no initialisation would draw."""
    model = classes(kind)[1].from_pretrained(plain(kind) if base is None else base, **kwargs).eval()
    torch.manual_seed(seed)
    nn.init.normal_(model.v_head.summary.weight)
    nn.init.normal_(model.v_head.summary.bias)
    return model


def digests(module: nn.Module) -> dict[str, str]:
    """sha256 of each weight's bytes."""
    state = {name: value.contiguous().view(torch.uint8) for name, value in module.state_dict().items()}
    return {name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() for name, value in state.items()}


def outputs(model: Any) -> tuple[Tensor, Tensor]:
    """Logits and values of IDS."""
    kwargs = {"decoder_input_ids": DECODER_IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits, loss, values = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **kwargs)
    assert loss is None
    return logits, values


def assert_same(one: Any, other: Any) -> None:
    """Every weight of trunk and head, the logits and the values, bit for bit."""
    assert digests(one.pretrained_model) == digests(other.pretrained_model)
    assert digests(one.v_head) == digests(other.v_head)
    assert all(torch.equal(a, b) for a, b in zip(outputs(one), outputs(other.eval()), strict=True))


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]} | fields)


def adapted(folder: Path, **kwargs: Any) -> Any:
    """A headed Llama from `folder/base` under an adapter that does something."""
    plain("llama").save_pretrained(folder / "base")
    model = headed("llama", base=folder / "base", peft_config=lora(), **kwargs)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers and the package warn of."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "rlhf_zoo")]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()  # a stage run before in this process silences it
    for logger in loggers:
        logger.addHandler(handler)
    yield heard
    transformers_logging.set_verbosity(verbosity)
    for logger in loggers:
        logger.removeHandler(handler)


# The head


def test_the_width_of_other_configurations() -> None:
    pair = [BertConfig(hidden_size=size, num_attention_heads=4) for size in (24, 40)]
    assert hidden_size_of(EncoderDecoderConfig.from_encoder_decoder_configs(*pair)) == 40
    assert hidden_size_of(Gemma3Config(text_config={"hidden_size": 48})) == 48
    config = PreTrainedConfig()
    with pytest.raises(ZooError, match="PreTrainedConfig names no hidden size"):
        hidden_size_of(config)
    config.d_model = 56
    assert hidden_size_of(config) == 56


def test_the_head_is_linear_and_answers_in_float32() -> None:
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


def test_a_head_made_under_another_default_type_is_float32() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ValueHead(4).summary.weight.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_dropout_is_on_the_hidden_state_while_training() -> None:
    head = ValueHead(64, summary_dropout_prob=1.0)
    hidden = torch.ones(3, 64)
    assert torch.equal(head.train()(hidden), head.summary.bias.expand(3, 1))
    assert not torch.equal(head.eval()(hidden), head.summary.bias.expand(3, 1))


def test_how_a_new_head_is_drawn() -> None:
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


# Forward and generation


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_the_models_and_values_the_heads_of_its_last_hidden_state(kind: str) -> None:
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


def test_a_cache_goes_out_and_in() -> None:
    model = headed("llama")
    whole = outputs(model)[1]
    with torch.no_grad():
        *_, cache = model(IDS[:, :3], return_past_key_values=True)
        assert len(model(IDS[:, :3])) == 3
        _, _, rest = model(IDS[:, 3:], cache, torch.ones_like(IDS))
    # Attention over cached keys sums in another order; values up to 10 are known to 1e-6, and two layers add to it.
    torch.testing.assert_close(rest, whole[:, 3:], rtol=0, atol=5e-6)
    model.config.use_cache = False
    assert model(IDS, return_past_key_values=True)[3] is not None


def test_a_loaded_model_is_in_the_mode_of_the_model_under_it() -> None:
    for training in (False, True):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(plain("llama").train(training))
        assert {module.training for module in model.modules()} == {training}
    assert not model.eval().v_head.dropout.training


def test_loss_and_generation_are_the_models() -> None:
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


def test_half_precision_comes_out_in_float32() -> None:
    model = headed("llama").to(torch.bfloat16)
    assert (model.dtype, model.device) == (torch.bfloat16, IDS.device)
    assert model.v_head.summary.weight.dtype == torch.bfloat16
    assert [out.dtype for out in outputs(model)] == [torch.float32, torch.float32]


# Checkpoints of full models


@pytest.mark.parametrize(
    ("kind", "shards"), [*((kind, False) for kind in CONFIGS), ("llama-tied", True), ("gpt2", True), ("t5", True)]
)
def test_a_checkpoint_comes_back_bit_for_bit(kind: str, shards: bool, tmp_path: Path, said: list[str]) -> None:
    model = headed(kind)
    model.save_pretrained(tmp_path, **({"max_shard_size": SHARD} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == shards
    assert not list(tmp_path.glob("*.bin"))
    assert tensors_of(tmp_path).keys() >= HEAD_KEYS
    said.clear()
    again = classes(kind)[1].from_pretrained(tmp_path)
    assert said == []
    assert_same(model, again)
    head = read_value_head(tmp_path)
    assert head is not None
    assert head.keys() == {"summary.weight", "summary.bias"}
    assert torch.equal(head["summary.weight"], model.v_head.summary.weight.cpu())
    alone = classes(kind)[0].from_pretrained(tmp_path)
    assert digests(alone) == digests(model.pretrained_model)
    if kind in ("llama-tied", "gpt2", "t5"):
        assert "lm_head.weight" not in tensors_of(tmp_path)
        inner = again.pretrained_model
        assert inner.get_output_embeddings().weight is inner.get_input_embeddings().weight


def write_old_checkpoint(folder: Path, *, shards: bool, head: dict[str, Tensor], leave_out: str = "-") -> None:
    """A Llama's plain weights and TRL's two, put together by hand."""
    model = plain("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    trunk = {key: value.clone() for key, value in model.state_dict().items() if key != leave_out}
    if not shards:
        save_file(trunk | head, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {f"model-0000{number}-of-00002.safetensors": part for number, part in ((1, trunk), (2, head))}
    for name, part in files.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in files.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


HEAD = {"v_head.summary.weight": torch.arange(32.0)[None] / 7, "v_head.summary.bias": torch.tensor([0.3])}


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
def test_an_old_checkpoint_made_by_hand(shards: bool, tmp_path: Path, said: list[str]) -> None:
    write_old_checkpoint(tmp_path, shards=shards, head=HEAD)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    assert said == []
    assert torch.equal(model.v_head.summary.weight, HEAD["v_head.summary.weight"])
    assert torch.equal(model.v_head.summary.bias, HEAD["v_head.summary.bias"])
    assert digests(model.pretrained_model) == digests(plain("llama"))


def test_other_misfits_are_still_told(tmp_path: Path, said: list[str]) -> None:
    left_out = "model.layers.1.mlp.up_proj.weight"
    write_old_checkpoint(tmp_path, shards=False, head=HEAD | {"stranger.weight": torch.ones(2)}, leave_out=left_out)
    AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert len(said) == 1
    assert f"it lacks {left_out}; the model has no stranger.weight" in said[0]
    assert "v_head" not in said[0]


def test_transformers_own_report_is_not_told_twice(tmp_path: Path, said: list[str]) -> None:
    write_old_checkpoint(tmp_path, shards=False, head={}, leave_out="model.norm.weight")
    AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert ["model.norm.weight" in message for message in said] == [True, False]


def test_a_report_of_a_load_that_fails_is_not_kept_back(tmp_path: Path, said: list[str]) -> None:
    wide = {"model.norm.weight": torch.ones(33)}
    write_old_checkpoint(tmp_path, shards=False, head=HEAD | wide, leave_out="model.norm.weight")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert any("model.norm.weight" in message for message in said)


def test_the_trainers_file_is_read_unless_the_weights_have_a_head(tmp_path: Path, said: list[str]) -> None:
    plain("llama").save_pretrained(tmp_path)
    (tmp_path / VALUE_HEAD_FILE).parent.mkdir()
    save_file(HEAD, tmp_path / VALUE_HEAD_FILE)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert said == []
    assert torch.equal(model.v_head.summary.weight, HEAD["v_head.summary.weight"])
    trained = headed("llama")
    trained.save_pretrained(tmp_path)
    assert_same(trained, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_a_checkpoint_without_a_head_gets_a_new_one_and_says_so(tmp_path: Path, said: list[str]) -> None:
    plain("gpt2").save_pretrained(tmp_path)
    assert read_value_head(tmp_path) is None
    torch.manual_seed(9)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    torch.manual_seed(9)
    assert torch.equal(model.v_head.summary.weight, nn.Linear(32, 1).weight)
    assert said == [f"{tmp_path} holds no value head: a new one starts at random."]


def test_variant_and_subfolder(tmp_path: Path) -> None:
    models = [headed("llama", seed=seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path / "deep", max_shard_size=SHARD)
    models[1].save_pretrained(tmp_path / "deep", variant="best", max_shard_size=SHARD)
    for model, options in zip(models, ({}, {"variant": "best"}), strict=True):
        kept = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, subfolder="deep", **options)
        assert_same(model, kept)
        head = read_value_head(tmp_path, subfolder="deep", **options)
        assert head is not None
        assert torch.equal(head["summary.bias"], model.v_head.summary.bias.cpu())


def test_the_head_keeps_float32_under_half_precision_weights(tmp_path: Path) -> None:
    model = headed("llama", base=plain("llama").to(torch.bfloat16))
    assert model.v_head.summary.weight.dtype == torch.float32
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.v_head.summary.weight.dtype == torch.float32
    assert torch.equal(again.v_head.summary.weight, model.v_head.summary.weight)
    assert AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_gathered_weights_can_be_given_to_save(tmp_path: Path) -> None:
    model, other = headed("llama"), headed("llama", base=plain("llama", seed=1), seed=3)
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert_same(other, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


# Heads that cannot be used


def test_a_head_of_another_form_is_refused(tmp_path: Path) -> None:
    write_old_checkpoint(tmp_path, shards=False, head={"v_head.0.weight": torch.ones(4, 32), **HEAD})
    for read in (read_value_head, AutoModelForCausalLMWithValueHead.from_pretrained):
        with pytest.raises(ZooError, match=r"tensors 0.weight, summary.bias, summary.weight"):
            read(tmp_path)


def test_another_models_head_is_refused(tmp_path: Path) -> None:
    write_old_checkpoint(tmp_path, shards=False, head=HEAD | {"v_head.summary.weight": torch.ones(1, 24)})
    with pytest.raises(ZooError, match="of size 24, and this model's have size 32"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_a_shard_that_is_not_there_and_a_file_cut_short_are_named(tmp_path: Path) -> None:
    write_old_checkpoint(tmp_path, shards=True, head=HEAD)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ZooError, match=rf"{shard.name} is not a whole safetensors file"):
        read_value_head(tmp_path)
    shard.unlink()
    with pytest.raises(ZooError, match=rf"lacks {shard.name}"):
        read_value_head(tmp_path)


def convert_as_told(error: ZooError, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command that the message gives."""
    program, option, code = shlex.split(str(error).split("`")[1])
    assert (program, option) == ("python", "-c")
    monkeypatch.chdir(folder)
    exec(code, {})


def refusal_of(folder: Path, read: Any, name: str) -> ZooError:
    with pytest.raises(ZooError, match=rf"has {name}, a pickle") as caught:
        read(folder)
    return caught.value


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
def test_a_pickle_is_refused_and_the_message_converts_it(
    shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = headed("llama-tied")
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()  # tied weights share their memory, as TRL pickled them
    if shards:
        head = {key: state.pop(key) for key in HEAD_KEYS}
        torch.save(head, tmp_path / "pytorch_model-00002-of-00002.bin")
        torch.save(state, tmp_path / "pytorch_model-00001-of-00002.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    refusal_of(tmp_path, read_value_head, r"pytorch_model\.bin\S*")
    error = refusal_of(tmp_path, AutoModelForCausalLMWithValueHead.from_pretrained, r"pytorch_model\.bin\S*")
    convert_as_told(error, tmp_path, monkeypatch)
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


# Adapters


def test_adapter_and_head_come_back_bit_for_bit(tmp_path: Path, said: list[str]) -> None:
    model = adapted(tmp_path)
    assert model.is_peft_model
    assert not headed("llama").is_peft_model
    said.clear()
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    assert said == []
    assert isinstance(again.pretrained_model, PeftModel)
    assert_same(model, again)
    assert load_file(tmp_path / "adapter" / "model.safetensors").keys() == HEAD_KEYS
    assert not list((tmp_path / "adapter").glob("*.bin"))
    logits, _ = outputs(model)
    assert not torch.equal(logits, plain("llama")(IDS).logits)
    for loader in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert torch.equal(loader.from_pretrained(tmp_path / "adapter")(IDS).logits, logits)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_loaded_adapter_trains_only_if_asked(trainable: bool, tmp_path: Path) -> None:
    adapted(tmp_path).save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter", is_trainable=trainable)
    learns = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert learns >= HEAD_KEYS
    assert any("lora_" in name for name in learns) == trainable


def test_an_adapter_over_a_base_that_has_a_head_of_its_own(tmp_path: Path, said: list[str]) -> None:
    headed("llama", seed=7).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    said.clear()
    headed("llama", base=get_peft_model(base, lora()), seed=8).save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    assert said == []
    assert torch.equal(again.v_head.summary.weight, headed("llama", seed=8).v_head.summary.weight)


def test_a_variant_is_the_bases(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "model.best.safetensors")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter", variant="best")
    assert_same(model, again)


def test_an_adapter_in_memory_and_a_second_one(said: list[str]) -> None:
    inner = get_peft_model(plain("llama"), lora())
    model = AutoModelForCausalLMWithValueHead.from_pretrained(inner, peft_config=lora(r=2))
    assert model.pretrained_model is inner
    assert model.is_peft_model
    assert said == ["peft_config is not used: PeftModelForCausalLM has an adapter already."]


def test_keywords_of_loading_do_nothing_to_a_loaded_model(said: list[str]) -> None:
    AutoModelForCausalLMWithValueHead.from_pretrained(plain("llama"), dtype=torch.bfloat16, revision="main")
    assert said == ["Not used, because the model is loaded already: dtype, revision."]


@pytest.mark.parametrize("head", [False, True], ids=["adapter", "TRL's head beside it"])
def test_a_pickle_of_an_adapter_is_refused_and_the_message_converts_it(
    head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = adapted(tmp_path), tmp_path / "adapter"
    if head:
        model.pretrained_model.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, safe_serialization=False)
    name = "pytorch_model" if head else "adapter_model"
    error = refusal_of(folder, AutoModelForCausalLMWithValueHead.from_pretrained, rf"{name}\.bin")
    convert_as_told(error, folder, monkeypatch)
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(folder))


def test_adapter_checkpoints_that_cannot_be_loaded(tmp_path: Path) -> None:
    adapted(tmp_path).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ZooError, match="names no base model"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ZooError, match=r"no adapter_model\.safetensors"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")


def test_a_quantized_model_is_prepared_before_its_adapter() -> None:
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


def test_an_adapter_is_pushed_by_its_own_call(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="call push_to_hub"):
        adapted(tmp_path).save_pretrained(tmp_path / "adapter", push_to_hub=True)


# State dicts


def test_a_state_dict_has_trls_keys_and_loads_strictly() -> None:
    model, other = headed("llama"), headed("llama", base=plain("llama", seed=1), seed=3)
    state = model.state_dict()
    assert list(state) == [*plain("llama").state_dict(), "v_head.summary.weight", "v_head.summary.bias"]
    assert not other.load_state_dict(state).missing_keys
    assert_same(model, other)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({key: value for key, value in state.items() if key not in HEAD_KEYS})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(state | {"stranger": torch.ones(1)})


def test_a_module_that_holds_the_model_loads_its_own_state() -> None:
    holder, other = nn.ModuleDict({"policy": headed("llama")}), nn.ModuleDict({"policy": headed("llama", seed=4)})
    state = holder.state_dict()
    assert set(state) == {f"policy.{key}" for key in headed("llama").state_dict()}
    other.load_state_dict(state)
    assert_same(holder["policy"], other["policy"])


def test_the_state_of_an_adapted_model_is_its_head(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    state = {key: torch.full_like(value, 2.0) for key, value in model.state_dict().items()}
    assert state.keys() == HEAD_KEYS
    trunk = digests(model.pretrained_model)
    model.load_state_dict(state)
    assert model.v_head.summary.weight.unique().tolist() == [2.0]
    assert digests(model.pretrained_model) == trunk
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"v_head.summary.bias": torch.ones(1)})


# Models that cannot have a value head


def test_models_of_the_wrong_kind_are_refused() -> None:
    inside = plain("llama")
    inside.add_adapter(lora())
    prompted = get_peft_model(plain("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("LlamaModel has no language model head", LlamaModel(CONFIGS["llama"]()), {}),
        ("T5ForConditionalGeneration is not a model of AutoModelForCausalLM", plain("t5"), {}),
        ("A Linear is not a language model", nn.Linear(2, 2), {}),
        ("learns prompts", prompted, {}),
        ("carries its adapter inside", inside, {}),
        ("peft_config is a dict", plain("llama"), {"peft_config": {"r": 2}}),
        ("reward_adapter is not read", plain("llama"), {"reward_adapter": "somewhere"}),
    ]
    for message, model, given in cases:
        with pytest.raises(ZooError, match=message):
            AutoModelForCausalLMWithValueHead.from_pretrained(model, **given)
    with pytest.raises(ZooError, match="use AutoModelForCausalLMWithValueHead"):
        AutoModelForSeq2SeqLMWithValueHead.from_pretrained(plain("gpt2"))


def test_an_offloaded_model_is_refused(tmp_path: Path) -> None:
    headed("llama").save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="is offloaded"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "offload"
        )


# The Hub, by the unmodified client in processes of its own

PRELUDE = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file
from test_value_head import *

api = HfApi()
Causal, Seq2Seq = AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

def first():
    return headed("llama", base=plain("llama", seed=1), seed=1)
"""

PUSH = """
first().push_to_hub("local/headed", commit_message="First", private=True)
api.create_tag("local/headed", tag="first")
headed("llama", seed=2).push_to_hub("local/headed")
headed("gpt2").push_to_hub("local/shards", max_shard_size=SHARD)
assert len([name for name in api.list_repo_files("local/shards") if name.endswith(".safetensors")]) > 2
headed("t5").save_pretrained("kept", push_to_hub=True, repo_id="local/seq2seq")
plain("llama").push_to_hub("local/base")
api.create_tag("local/base", tag="v1")
plain("llama", seed=9).push_to_hub("local/base")
adapter = headed("llama", base="local/base", revision="v1", peft_config=lora(init_lora_weights=False))
adapter.save_pretrained("adapter")
adapter.push_to_hub("local/adapter")
save_file(dict(zip(("logits", "values"), outputs(adapter))), "adapter-outputs.safetensors")
api.create_repo("local/folders")
api.upload_folder(repo_id="local/folders", folder_path="adapter", path_in_repo="deep/adapter")
plain("llama").push_to_hub("local/shared-trunk")
Path("critic").mkdir()
save_file(HEAD, VALUE_HEAD_FILE)
api.upload_file(repo_id="local/shared-trunk", path_or_fileobj=VALUE_HEAD_FILE, path_in_repo=VALUE_HEAD_FILE)
api.create_repo("local/pickle")
torch.save(headed("llama").state_dict(), "pytorch_model.bin")
api.upload_file(repo_id="local/pickle", path_or_fileobj="pytorch_model.bin", path_in_repo="pytorch_model.bin")
CONFIGS["llama"]().push_to_hub("local/pickle")

# A push between the loading of the trunk and that of the head: both are of the first commit.
import rlhf_zoo.value_head as module
load = module._load_model

def load_while_another_pushes(*args):
    model = load(*args)
    headed("gpt2", seed=6).push_to_hub("local/raced", max_shard_size=SHARD)
    return model

headed("gpt2", seed=5).push_to_hub("local/raced", max_shard_size=SHARD)
module._load_model = load_while_another_pushes
assert_same(headed("gpt2", seed=5), Causal.from_pretrained("local/raced"))
module._load_model = load
assert_same(headed("gpt2", seed=6), Causal.from_pretrained("local/raced"))
"""

PULL = """
import logging, sys
heard = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: heard.append(record.getMessage())
for name in ("transformers", "rlhf_zoo"):
    logging.getLogger(name).addHandler(handler)

assert_same(headed("llama", seed=2), Causal.from_pretrained("local/headed", **OPTIONS))
assert_same(first(), Causal.from_pretrained("local/headed", revision="first", **OPTIONS))
assert_same(headed("gpt2"), Causal.from_pretrained("local/shards", **OPTIONS))
assert_same(headed("t5"), Seq2Seq.from_pretrained("local/seq2seq", **OPTIONS))
expected = load_file("adapter-outputs.safetensors")
for name, folder in (("local/adapter", ""), ("local/folders", "deep/adapter"), ("adapter", "")):
    logits, values = outputs(Causal.from_pretrained(name, subfolder=folder, **OPTIONS))
    assert torch.equal(logits, expected["logits"]) and torch.equal(values, expected["values"]), name
shared = Causal.from_pretrained("local/shared-trunk", **OPTIONS)
assert torch.equal(shared.v_head.summary.weight, HEAD["v_head.summary.weight"])
assert torch.equal(read_value_head("local/headed", revision="first", **OPTIONS)["summary.bias"],
                   first().v_head.summary.bias)
assert heard == [], heard
Causal.from_pretrained("local/base", **OPTIONS)
assert heard == ["local/base holds no value head: a new one starts at random."], heard
print("pulled")
"""

REFUSED = """
import os
for read in (read_value_head, Causal.from_pretrained):
    with pytest.raises(ZooError, match="local/pickle has pytorch_model.bin, a pickle"):
        read("local/pickle")
    with pytest.raises(ZooError, match="local/nothing is neither"):
        read("local/nothing")
    with pytest.raises(ZooError, match="local/headed is neither"):
        read("local/headed", token=False)
    with pytest.raises(ZooError, match="local/headed is neither"):
        read("local/headed", revision="second", **OPTIONS)
cached = [name for _, _, names in os.walk(os.environ["HF_HOME"]) for name in names]
assert "pytorch_model.bin" not in cached and "config.json" not in cached, cached
"""


def test_push_to_hub_and_from_pretrained(hub: Any, tmp_path: Path) -> None:
    hub.python(PRELUDE + PUSH, cwd=tmp_path)
    assert hub.api().model_info("local/headed").private
    home = str(tmp_path / "an-empty-home")
    # First with a token that only the call has, then from the cache alone: without the token the Hub gives nothing.
    online = f"OPTIONS = {{'token': {hub.env['HF_TOKEN']!r}}}\n" + REFUSED + PULL
    cached = "assert_same(headed('llama', seed=2), Causal.from_pretrained('local/headed', local_files_only=True))"
    said = hub.python(PRELUDE + online + cached, cwd=tmp_path, HF_HOME=home, HF_TOKEN="")
    assert said.split()[-1] == "pulled"
    said = hub.python(PRELUDE + "OPTIONS = {}\n" + PULL, cwd=tmp_path, HF_HOME=home, HF_HUB_OFFLINE="1")
    assert said.split()[-1] == "pulled"
    for name in ("headed", "shards", "adapter"):
        assert hub.git(f"local/{name}", "fsck", "--full", "--strict") == ""


@pytest.mark.attack
def test_the_attributes_of_trls_classes_are_there() -> None:
    """As TRL 0.x and 1.12 had them: code reads them on the class, such as what `isinstance` may be asked."""
    assert AutoModelForCausalLMWithValueHead.transformers_parent_class is AutoModelForCausalLM
    assert AutoModelForSeq2SeqLMWithValueHead.transformers_parent_class is AutoModelForSeq2SeqLM
    assert AutoModelForCausalLMWithValueHead.lm_head_namings == ["lm_head", "embed_out"]
    assert AutoModelForSeq2SeqLMWithValueHead.lm_head_namings == ["lm_head", "embed_out", "output_projection"]
    for kind in (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead):
        assert set(kind.supported_args) == {"summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy"}
        assert (kind.supported_modules, kind.supported_rm_modules) == (("v_head",), ("score",))
        assert issubclass(LlamaForCausalLM, kind.supported_pretrained_model_architectures)
