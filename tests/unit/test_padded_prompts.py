"""Prompts that come as token ids: padded on either side, with a mask or without, and beside a column of texts."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trainer_fixture import CHAT, digests, make_tokenizer, prompt_rows, timeless, trained

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.prompts import prepare_prompts
from rlhf_zoo.ppo.ptx import TextSource

TOKENIZER = make_tokenizer()
PAD, WIDTH = TOKENIZER.pad_token_id, 6


def token_ids(count: int = 16) -> list[list[int]]:
    return [TOKENIZER(text)["input_ids"] for text in prompt_rows(count)["prompt"]]


def padded(side: str, *, masked: bool = True, token: int = PAD) -> Dataset:
    """Every prompt at WIDTH tokens."""
    rows: dict[str, list[Any]] = {"input_ids": [], "attention_mask": []}
    for ids in token_ids():
        missing = WIDTH - len(ids)
        fill, left_out = [token] * missing, [0] * missing
        rows["input_ids"].append(fill + ids if side == "left" else ids + fill)
        rows["attention_mask"].append(left_out + [1] * len(ids) if side == "left" else [1] * len(ids) + left_out)
    return Dataset.from_dict(rows if masked else {"input_ids": rows["input_ids"]})


def prepared(rows: Dataset, tokenizer: Any = TOKENIZER) -> Dataset:
    return prepare_prompts(rows, tokenizer, context_length=None, max_new_tokens=1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("style", [None, "torch", "numpy"])
def test_padding_is_removed_from_prompts(side: str, style: str | None) -> None:
    for rows in (padded(side), padded(side, masked=False), padded(side, token=TOKENIZER.eos_token_id)):
        result = prepared(rows.with_format(style))
        assert list(result["input_ids"]) == token_ids()
        assert "attention_mask" not in result.column_names


def test_attention_mask_decides_which_pad_tokens_belong_to_prompt() -> None:
    rows = Dataset.from_dict({"input_ids": [[PAD, 4, PAD, 3]], "attention_mask": [[0, 1, 1, 1]]})
    assert list(prepared(rows)["input_ids"]) == [[4, PAD, 3]]


def test_padded_prompts_train_the_same_weights(tmp_path: Path) -> None:
    plain = Dataset.from_dict({"input_ids": token_ids()})
    expected = trained(tmp_path / "plain", train_dataset=plain, eval_dataset=plain, max_steps=1)
    result = trained(tmp_path / "padded", train_dataset=padded("left"), eval_dataset=padded("right"), max_steps=1)
    assert digests(result) == digests(expected)
    assert timeless(result.state.log_history) == timeless(expected.state.log_history)
    assert result.evaluate(padded("left"))["eval_objective/score"] == expected.evaluate()["eval_objective/score"]


def test_padding_is_removed_from_pretraining_texts() -> None:
    settings: dict[str, Any] = {
        "context_length": None,
        "pad_id": TOKENIZER.eos_token_id,
        "num_embeddings": len(TOKENIZER),
    }
    plain = TextSource(Dataset.from_dict({"input_ids": token_ids()}), TOKENIZER, **settings)
    result = TextSource(padded("right").with_format("torch"), TOKENIZER, **settings)
    drawn = [source.draw(8, torch.Generator().manual_seed(0), torch.device("cpu")) for source in (plain, result)]
    assert torch.equal(drawn[0].ids, drawn[1].ids) and torch.equal(drawn[0].mask, drawn[1].mask)


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ([1, 0, 1], "position 1"),
        ([1, 1], "3 input_ids, .* has 2 entries"),
        (None, "is missing"),
        ([0, 0, 0], "is empty"),
    ],
)
def test_bad_attention_mask_is_rejected(mask: list[int] | None, told: str) -> None:
    rows = Dataset.from_dict({"input_ids": [[3, 4, 5]] * 2, "attention_mask": [[1, 1, 1], mask]})
    with pytest.raises(ZooError, match=f"Prompt 1 .*{told}"):
        prepared(rows)


def test_ids_and_texts_of_one_prompt_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    both = prompt_rows().add_column("input_ids", token_ids())
    assert list(prepared(both)["input_ids"]) == token_ids() and not caplog.records
    assert list(prepared(prepared(both))["input_ids"]) == token_ids(), "a prepared data set may be given again"

    framed = [[TOKENIZER.convert_tokens_to_ids(":"), *ids] for ids in token_ids()]  # a template of the user's own
    result = prepared(prompt_rows().add_column("input_ids", framed))
    assert list(result["input_ids"]) == framed and "16 of 16 prompts" in caplog.text

    wrong = [*token_ids()[:3], token_ids()[4], *token_ids()[4:]]
    with pytest.raises(ZooError, match=r"Prompt 3 is .* remove the column that is wrong"):
        prepared(prompt_rows().add_column("input_ids", wrong))


def test_ids_and_turns_of_one_prompt_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    turns = [[{"role": "user", "content": text}] for text in ("ab", "cd")]
    ids = [tokenizer(text)["input_ids"] for text in ("ab;:", "cd;:")]
    assert list(prepared(Dataset.from_dict({"prompt": turns, "input_ids": ids}), tokenizer)["input_ids"]) == ids
    assert not caplog.records
    with pytest.raises(ZooError, match="Prompt 0 is 'ab'"):
        prepared(Dataset.from_dict({"prompt": turns, "input_ids": ids[::-1]}), tokenizer)
