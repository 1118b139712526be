"""Small models with value heads, and comparisons of two of them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from trainer_fixture import digests
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    T5Config,
)

from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

__all__ = [
    "CONFIGS", "CONTEXT", "DECODER_IDS", "EOS", "HEAD", "HEAD_KEYS", "IDS", "PAD", "SHARD", "adapted", "assert_same",
    "classes", "digests", "headed", "lora", "outputs", "plain", "tensors_of",
]  # fmt: skip

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
IDS = torch.tensor([[5, 6, 7, 8, EOS], [9, 4, 3, 3, 12]])
DECODER_IDS = torch.tensor([[PAD, 3, 4], [PAD, 8, 9]])
HEAD_KEYS = {"v_head.summary.weight", "v_head.summary.bias"}
SHARD = "6KB"


def classes(kind: str) -> tuple[Any, Any]:
    if kind == "t5":
        return AutoModelForSeq2SeqLM, AutoModelForSeq2SeqLMWithValueHead
    return AutoModelForCausalLM, AutoModelForCausalLMWithValueHead


def plain(kind: str, *, seed: int = 0) -> Any:
    """Makes a language model without a value head."""
    torch.manual_seed(seed)
    return classes(kind)[0].from_config(CONFIGS[kind]()).eval()


def headed(kind: str, *, seed: int = 0, base: Any = None, **kwargs: Any) -> Any:
    """Makes a model with a value head whose weights differ from every default initialization."""
    model = classes(kind)[1].from_pretrained(plain(kind) if base is None else base, **kwargs).eval()
    torch.manual_seed(seed)
    nn.init.normal_(model.v_head.summary.weight)
    nn.init.normal_(model.v_head.summary.bias)
    return model


def outputs(model: Any) -> tuple[Tensor, Tensor]:
    """Returns the logits and values for IDS."""
    kwargs = {"decoder_input_ids": DECODER_IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits, loss, values = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **kwargs)
    assert loss is None
    return logits, values


def assert_same(model: Any, other: Any) -> None:
    """Checks that weights, logits and values are equal bit for bit."""
    assert digests(model.pretrained_model) == digests(other.pretrained_model)
    assert digests(model.v_head) == digests(other.v_head)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(other.eval()), strict=True))


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]} | fields)


def adapted(folder: Path, **kwargs: Any) -> Any:
    """Makes a Llama with a value head and an adapter that changes its outputs, from `folder/base`."""
    plain("llama").save_pretrained(folder / "base")
    model = headed("llama", base=folder / "base", peft_config=lora(), **kwargs)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


HEAD = {"v_head.summary.weight": torch.arange(32.0)[None] / 7, "v_head.summary.bias": torch.tensor([0.3])}
