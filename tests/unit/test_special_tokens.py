"""What ends a completion and what pads, as public families have it."""

import pytest
from miniatures import FAMILIES, load, save
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.special_tokens import ensure_own_pad, set_up_padding, stop_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_ids_and_padding_of_public_families(name):
    model, tokenizer = load(name)
    family, rows = FAMILIES[name], model.get_input_embeddings().weight.shape[0]
    assert {*tokenizer.convert_ids_to_tokens(stop_ids(model, tokenizer))} == {*family.stops}
    assert stop_ids(model, tokenizer)[0] == tokenizer.eos_token_id
    said = set_up_padding(tokenizer, model)
    assert tokenizer.pad_token == family.pad
    assert (said is None) == (family.own_pad == family.pad)
    assert said is None or family.pad in said
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape[0] == rows + (family.pad == "[PAD]")
    assert {*tokenizer.convert_ids_to_tokens(stop_ids(model, tokenizer))} == {*family.stops}
    assert set_up_padding(tokenizer, model) is None


def test_set_up_padding_uses_named_tokens():
    model, tokenizer = load("Llama 3")
    set_up_padding(tokenizer, model, pad_token="<|reserved_special_token_0|>", eos_token="<|end_of_text|>")
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|reserved_special_token_0|>", "<|end_of_text|>")
    said = set_up_padding(tokenizer, model, pad_token="<|finetune_right_pad_id|>")
    assert said is not None and "reserved_special_token_0|>: PAD is now <|finetune_right_pad_id|> (id 3)" in said
    assert set_up_padding(tokenizer, model, pad_token="<|finetune_right_pad_id|>") is None
    for given in ({"pad_token": "<nothing>"}, {"pad_token": tokenizer.eos_token}, {"eos_token": "<nothing>"}):
        with pytest.raises(ZooError, match="token"):
            set_up_padding(tokenizer, model, **given)


@pytest.mark.parametrize("name", FAMILIES)
def test_ensure_own_pad_error_suggests_a_usable_token(name):
    model, tokenizer = load(name)
    if tokenizer.pad_token not in (None, tokenizer.eos_token):
        return
    with pytest.raises(ZooError, match="set pad_token to") as refused:
        ensure_own_pad(tokenizer, None, subject="the policy", key="pad_token")
    set_up_padding(tokenizer, model)
    spare = "another of its tokens." if tokenizer.pad_token == "[PAD]" else f"{tokenizer.pad_token!r}, which no text"
    assert spare in str(refused.value)


def test_stop_ids_exclude_ordinary_tokens():
    model, tokenizer = load("GPT-2")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 17]
    assert stop_ids(model, tokenizer) == [tokenizer.eos_token_id]


def adapter_of(folder, *, rows=None):
    """The PAD that a base in `folder` is given, and the tensors of an adapter that is saved of it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if rows is not None:
        model.resize_token_embeddings(rows)
        model.save_pretrained(folder)
    set_up_padding(tokenizer, model)
    get_peft_model(model, LoraConfig(target_modules="all-linear")).save_pretrained(folder / "adapter")
    with safe_open(folder / "adapter" / "adapter_model.safetensors", framework="pt") as tensors:
        return tokenizer.pad_token, set(tensors.keys())


def test_adapter_holds_no_embeddings_when_token_or_row_is_spare(tmp_path):
    pad, tensors = adapter_of(save("SmolLM2", tmp_path / "chat"))
    assert pad == "<|endoftext|>" and tensors and all("lora_" in name for name in tensors)
    # No token is to spare, and the embedding has more rows than the tokenizer has tokens, as Pythia's and Qwen's have.
    pad, tensors = adapter_of(save("GPT-2", tmp_path / "spare rows"), rows=320)
    assert pad == "[PAD]" and tensors and all("lora_" in name for name in tensors)
    pad, tensors = adapter_of(save("GPT-2", tmp_path / "full"))
    assert pad == "[PAD]" and any("wte" in name for name in tensors)


@pytest.mark.parametrize(
    "written", ["{{ '<|endoftext|>' }}{{ messages[0].content }}", "{{ pad_token }}{{ messages[0].content }}"]
)
def test_pad_token_is_never_one_the_template_writes(written):
    model, tokenizer = load("SmolLM2")
    tokenizer.chat_template = written
    set_up_padding(tokenizer, model)
    assert tokenizer.pad_token == "[PAD]"


def test_pad_token_is_never_one_that_encodes_unknown_text():
    model, tokenizer = load("Mistral")
    set_up_padding(tokenizer, model)
    assert tokenizer.pad_token == "<unk>"
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    set_up_padding(tokenizer, model)
    assert tokenizer.pad_token == "[PAD]"


@pytest.mark.parametrize("asked", [None, "[PAD]"])
def test_pad_token_without_embedding_gets_one(asked):
    model, tokenizer = load("GPT-2")
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # as scripts do, and leave the model as it is
    assert tokenizer.pad_token_id == rows
    said = set_up_padding(tokenizer, model, pad_token=asked)
    assert said == f"The model has no embedding for PAD, [PAD] (id {rows}): its embeddings are resized."
    assert model.get_input_embeddings().weight.shape[0] == rows + 1 and model.config.pad_token_id == rows
    batch = tokenizer(["how is it", "how"], padding=True, return_tensors="pt")
    assert model(**batch).logits.shape[:2] == batch["input_ids"].shape
