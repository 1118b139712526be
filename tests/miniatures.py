"""Tiny models with the config class, special tokens, PAD, EOS and chat template of public families."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from families import tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_zoo.pipeline.smoke.models import Family as Base
from rlhf_zoo.pipeline.smoke.models import make_tokenizer

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>", "<|vision_pad|>")
_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")


@dataclass(frozen=True)
class Family:
    """A family.

    stops: The tokens that end completions, once a stage has started from the model.
    pad: The token that pads then; own_pad: the tokenizer's own.
    adds_bos: Whether the tokenizer writes its BOS before every text.
    fields: Fields of the configuration that give the tiny model the kinds of layers that large models have.
    """

    config: str
    special: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]
    pad: str
    template: str | None = None
    bos: str | None = None
    unk: str | None = None
    own_pad: str | None = None
    generation: tuple[str, ...] = ()
    byte_fallback: bool = False
    tied: bool = False
    adds_bos: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Base:
        special = {token: index for index, token in enumerate(self.special)}
        return Base(
            model_type=self.config, vocab_size=min(294 + len(special), 300), special=special, eos=self.eos,
            bos=self.bos, unk=self.unk, pad=self.own_pad, wrap=(self.bos if self.adds_bos else None, None),
            template=self.template, byte_fallback=self.byte_fallback,
        )  # fmt: skip


#: Text that trains every tokenizer: it yields 294 tokens, including all bytes.
CORPUS_LINE = "how is item it is sharp clear heavy cheap bright slow good weak"
FAMILIES = {
    "Qwen2.5": Family("qwen2", _CHATML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "qwen2_5",
                      own_pad="<|endoftext|>", generation=("<|im_end|>", "<|endoftext|>"), tied=True),
    "Qwen3-Base": Family("qwen3", _CHATML, "<|endoftext|>", ("<|endoftext|>", "<|im_end|>"), "<|fim_pad|>", "qwen3",
                         own_pad="<|endoftext|>", generation=("<|endoftext|>",), tied=True),
    "Qwen3": Family("qwen3", _CHATML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "qwen3",
                    own_pad="<|endoftext|>", generation=("<|im_end|>", "<|endoftext|>"), tied=True),
    "SmolLM2": Family("llama", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"), "<|im_end|>",
                      ("<|im_end|>",), "<|endoftext|>", "qwen2_5", bos="<|im_start|>", unk="<|endoftext|>",
                      own_pad="<|im_end|>", tied=True),
    "Llama 3": Family("llama", _LLAMA, "<|eot_id|>", ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
                      "<|finetune_right_pad_id|>", "llama3", bos="<|begin_of_text|>",
                      generation=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), adds_bos=True),
    "Gemma 2": Family("gemma2", _GEMMA, "<eos>", ("<eos>", "<end_of_turn>"), "<pad>", "gemma", bos="<bos>", unk="<unk>",
                      own_pad="<pad>", tied=True, adds_bos=True),
    "Gemma 3": Family("gemma3_text", _GEMMA, "<eos>", ("<eos>", "<end_of_turn>"), "<pad>", "gemma3", bos="<bos>",
                      unk="<unk>", own_pad="<pad>", generation=("<eos>", "<end_of_turn>"), tied=True, adds_bos=True,
                      fields={"num_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"]}),
    "Mistral": Family("mistral", ("<unk>", "<s>", "</s>"), "</s>", ("</s>",), "<unk>", bos="<s>", unk="<unk>",
                      byte_fallback=True, adds_bos=True),
    "Pythia": Family("gpt_neox", ("<|endoftext|>", "<|padding|>"), "<|endoftext|>", ("<|endoftext|>",), "<|padding|>"),
    "GPT-2": Family("gpt2", ("<|endoftext|>",), "<|endoftext|>", ("<|endoftext|>",), "[PAD]", bos="<|endoftext|>",
                    tied=True),
    "OPT": Family("opt", ("<s>", "<pad>", "</s>", "<unk>"), "</s>", ("</s>",), "<pad>", bos="</s>", unk="<unk>",
                  own_pad="<pad>", tied=True, adds_bos=True),
}  # fmt: skip


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns a model with random weights, and a byte-level tokenizer."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family.base, [CORPUS_LINE], learned_count=300 - len(family.special), length=128)
    ids = tokenizer.convert_tokens_to_ids
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer), "tie_word_embeddings": family.tied, "max_position_embeddings": 128,
        "pad_token_id": None if family.own_pad is None else ids(family.own_pad), "eos_token_id": ids(family.eos),
        "bos_token_id": None if family.bos is None else ids(family.bos), **family.fields,
    }  # fmt: skip
    if family.config == "gpt2":
        fields["n_positions"] = fields.pop("max_position_embeddings")
    model = tiny_model(AutoModelForCausalLM, family.config, **fields)
    model.generation_config.eos_token_id = [ids(token) for token in family.generation] or ids(family.eos)
    return model, tokenizer


def save(name: str, folder: Path) -> Path:
    model, tokenizer = load(name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_two_label_classifier(folder: Path, base: Path) -> None:
    """Saves a random classifier with the labels `bad` and `good`, and the tokenizer of `base`."""
    config = AutoConfig.from_pretrained(base, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
