"""Conversation formats of public data sets, read in every stage as lists of {role, content}."""

import json
from typing import Any

import datasets
import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.new.data import InspectedData, Subset, make_stage_data
from rlhf_zoo.runs.data.layout import Form, convert_rows
from rlhf_zoo.runs.data.turns import parse_prompt

ASKED = {"from": "human", "value": "2+2?"}
RIGHT, WRONG = {"from": "gpt", "value": "4"}, {"from": "gpt", "value": "5"}
USER, FOUR, FIVE = (
    {"role": role, "content": content} for role, content in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5"))
)


def read_rows(
    form: Form, *rows: dict[str, Any], columns: dict[str, str] | None = None, as_chat: bool = False
) -> list[dict]:
    data = datasets.Dataset.from_list(list(rows))
    return convert_rows(data, form, columns=columns or {}, as_chat=as_chat, subject="It").to_list()


def test_sft_reads_sharegpt_conversations() -> None:
    whole = [{"from": "system", "value": "Be brief."}, ASKED, RIGHT]
    assert read_rows("texts", {"id": 1, "conversations": whole}) == [
        {"messages": [{"role": "system", "content": "Be brief."}, USER, FOUR]}
    ]
    weighed = [{**turn, "weight": None} for turn in (ASKED, RIGHT)]
    assert read_rows("texts", {"conversations": weighed, "system": "Be brief."})[0]["messages"][0]["role"] == "system"
    assert read_rows("texts", {"dialog": whole[1:]}, columns={"messages": "dialog"}) == [{"messages": [USER, FOUR]}]
    tools = [ASKED, {"from": "function_call", "value": "add(2, 2)"}, {"from": "observation", "value": "4"}, RIGHT]
    roles = [turn["role"] for turn in read_rows("texts", {"conversations": tools})[0]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    named = [{"role": "human", "content": "2+2?"}, {"role": "gpt", "content": "4"}]
    assert read_rows("texts", {"conversations": named}) == [{"messages": [USER, FOUR]}]


PAIR = {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}
PAIRS: dict[str, dict[str, Any]] = {
    "single messages behind conversations": {"conversations": [ASKED], "chosen": RIGHT, "rejected": WRONG},
    "lists behind conversations": {"conversations": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
    "texts behind conversations": {"conversations": [ASKED], "chosen": "4", "rejected": "5"},
    "whole conversations": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
    "whole ones beside conversations": {
        "conversations": [ASKED], "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG],
    },
    "single messages behind a prompt's turns": {"prompt": [USER], "chosen": FOUR, "rejected": FIVE},
    "single messages behind a text": {"prompt": "2+2?", "chosen": RIGHT, "rejected": WRONG},
    "texts behind a prompt's turns": {"prompt": [USER], "chosen": "4", "rejected": "5"},
    "a text that the sides begin with": {"prompt": "2+2?", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
}  # fmt: skip


@pytest.mark.parametrize("kind", PAIRS)
def test_pair_formats_convert_to_same_rows(kind: str) -> None:
    row = read_rows("pairs", PAIRS[kind])[0]
    assert {name: row[name] for name in PAIR} == PAIR


def test_repeated_prompt_in_answers_is_removed() -> None:
    """UltraFeedback has whole conversations as sides, beside a prompt in text or in turns."""
    whole = {"chosen": [USER, FOUR], "rejected": [USER, FIVE]}
    assert read_rows("pairs", {"prompt": [USER], **whole}) == [PAIR]
    assert read_rows("pairs", {"prompt": [USER], "chosen": [USER, FOUR], "rejected": [FIVE]}) == [PAIR]
    assert read_rows("pairs", {"prompt": "2+2?", **whole}) == [PAIR]
    for prompt in ("2+2?", [USER]):
        learned = read_rows("texts", {"prompt": prompt, **whole}, columns={"completion": "chosen"})[0]
        assert (learned["prompt"], learned["completion"]) == ([USER], [FOUR])


def test_system_column_joins_renamed_conversations() -> None:
    row = {"system": "Be brief.", "conversations": [ASKED, RIGHT]}
    read_so = read_rows("texts", row, columns={"messages": "conversations"})[0]["messages"]
    assert [turn["role"] for turn in read_so] == ["system", "user", "assistant"]


def test_prompt_formats_convert_to_same_rows() -> None:
    answered = {"conversations": [ASKED, RIGHT], "solution": "4"}
    assert read_rows("prompts", answered) == [{"prompt": [USER], "solution": "4"}]
    row = read_rows("prompts", {"conversations": [ASKED], "chosen": RIGHT, "rejected": WRONG})[0]
    assert row["prompt"] == [USER]
    assert read_rows("prompts", {"prompt": [ASKED], "system": "no business of ours"})[0]["prompt"] == [USER]
    assert read_rows("prompts", {"conversations": [ASKED], "system": "Be brief."})[0]["prompt"][0]["role"] == "system"


def test_sft_on_pairs_uses_chosen_answer() -> None:
    rows = {"conversations": [ASKED], "chosen": RIGHT, "rejected": WRONG}
    assert read_rows("texts", rows) == [{"prompt": [USER], "completion": [FOUR]}]
    assert read_rows("texts", {"prompt": [USER], "completion": "4"}) == [{"prompt": [USER], "completion": [FOUR]}]


def test_sft_merges_open_assistant_turn_into_completion() -> None:
    begun = [USER, {"role": "assistant", "content": "It is "}]
    expected = {"prompt": [USER], "completion": [{"role": "assistant", "content": "It is 4"}]}
    for answer in ("4", [FOUR], [{"role": "assistant", "content": "It is 4"}]):
        assert read_rows("texts", {"prompt": begun, "completion": answer}) == [expected]
    assert read_rows("prompts", {"prompt": begun}) == [{"prompt": begun}]


def test_convert_rows_names_row_with_invalid_turn() -> None:
    rows = [{"conversations": [ASKED, RIGHT]}, {"conversations": [ASKED, {"from": "narrator", "value": "x"}]}]
    with pytest.raises(ZooError, match=r"Row 1 of it has a turn from 'narrator', but a turn must be from one of human"):
        read_rows("texts", *rows)
    with pytest.raises(ZooError, match=r"Row 1 of it has its prompt and answers in a different form from row 0"):
        read_rows("pairs", PAIRS["single messages behind a text"], {"prompt": "a", "chosen": ASKED, "rejected": ASKED})
    with pytest.raises(ZooError, match="Row 0 of it has nothing in the column 'messages'"):
        read_rows("texts", {"conversations": [ASKED, {"from": "gpt", "value": None}]})


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("texts", {"conversations": [ASKED, RIGHT], "input": "x"}, {"messages": [USER, FOUR]}),
        ("pairs", {"conversations": [ASKED], "chosen": RIGHT, "rejected": WRONG, "input": "x"}, PAIR),
        ("prompts", {"conversations": [ASKED, RIGHT]}, {"prompt": [USER]}),
        ("texts", {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, {"messages": [USER, FOUR]}),
    ],
)
def test_new_recipe_reads_sharegpt_rows(form: Form, row: dict[str, Any], expected: dict[str, Any]) -> None:
    part = Subset(None, {"train": 1}, {"train": [row]}, lambda split: [row])
    reading = make_stage_data(InspectedData("some/data", None, [part]), form)
    assert reading is not None and not reading.is_plain_text
    assert expected.items() <= reading.rows[0].items()


def test_new_takes_no_split_without_rows() -> None:
    rows = {"train_gen": [], "train": [{"prompt": "what"}], "test": []}
    subset = Subset(None, {split: len(rows[split]) for split in rows}, rows, rows.__getitem__)
    data = make_stage_data(InspectedData("some/data", None, [subset]), "prompts")
    assert data is not None and data.test_prompt_count is None
    assert (data.keys["dataset_train_split"], data.keys["dataset_test_split"]) == ("train", None)


def test_typed_prompt_is_text_or_conversation() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    share_gpt = '[{"from": "system", "value": "Be brief."}, {"from": "human", "value": "hi"}]'
    for text in (json.dumps(turns), f" {json.dumps(turns, indent=1)}\n", share_gpt):
        assert parse_prompt(text) == turns
    for text in ("the battery", "[1, 2] sorted is", '[{"a": 1}]', "[{", ""):
        assert parse_prompt(text) == text
