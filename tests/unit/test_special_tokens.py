"""What ends a completion and what pads, as public families have it."""

import pytest
from miniatures import FAMILIES, load

from rlhf_zoo.errors import ZooError
from rlhf_zoo.tokenizer import settle_padding, stop_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_stops_and_padding(name):
    model, tokenizer = load(name)
    family, rows = FAMILIES[name], model.get_input_embeddings().weight.shape[0]
    assert {*tokenizer.convert_ids_to_tokens(stop_ids(model, tokenizer))} == {*family.stops}
    assert stop_ids(model, tokenizer)[0] == tokenizer.eos_token_id
    said = settle_padding(tokenizer, model)
    assert tokenizer.pad_token == family.pad
    assert (said is None) == (family.own_pad == family.pad)
    assert said is None or family.pad in said
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape[0] == rows + (family.pad == "[PAD]")
    assert {*tokenizer.convert_ids_to_tokens(stop_ids(model, tokenizer))} == {*family.stops}
    assert settle_padding(tokenizer, model) is None


def test_tokens_that_are_named():
    model, tokenizer = load("Llama 3")
    settle_padding(tokenizer, model, pad_token="<|reserved_special_token_0|>", eos_token="<|end_of_text|>")
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|reserved_special_token_0|>", "<|end_of_text|>")
    said = settle_padding(tokenizer, model, pad_token="<|finetune_right_pad_id|>")
    assert said is not None and said.startswith("The tokenizer pads with <|reserved_special_token_0|>: <|finetune_")
    assert settle_padding(tokenizer, model, pad_token="<|finetune_right_pad_id|>") is None
    for given in ({"pad_token": "<nothing>"}, {"pad_token": tokenizer.eos_token}, {"eos_token": "<nothing>"}):
        with pytest.raises(ZooError, match="token"):
            settle_padding(tokenizer, model, **given)


def test_an_ordinary_token_ends_nothing():
    model, tokenizer = load("GPT-2")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 17]
    assert stop_ids(model, tokenizer) == [tokenizer.eos_token_id]
