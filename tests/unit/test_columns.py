"""Texts with a row's values in them, and rows left out by a number."""

import re
from typing import Any

import datasets
import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.columns import above, filled
from rlhf_zoo.runs.layout import in_form

ROW = {"question": "How many?", "prompt": {"text": "a b  c d e f", "toxicity": 0.5}, "answer": "#### 2"}


def test_a_text_has_a_rows_values() -> None:
    assert filled('{question} Say "####".', ROW, of="it") == 'How many? Say "####".'
    assert filled("{prompt[text]:3 words}!", ROW, of="it") == "a b  c!"
    assert filled("{prompt[text]:99 words}", ROW, of="it") == "a b  c d e f"
    drawn = {filled("{q:2-4 words}", {"q": f"a b c d {n}"}, of="it") for n in range(40)}
    assert drawn == {"a b", "a b c", "a b c d"}
    rows = datasets.Dataset.from_list([ROW])
    read = in_form(rows, "prompts", columns={"prompt": "{question} {answer}"}, turns=True, text="text", of="It")
    assert read[0]["prompt"] == [{"role": "user", "content": "How many? #### 2"}] and read[0]["answer"] == "#### 2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{quest}", "has no column 'quest', only 'question', 'prompt', 'answer': mend 'quest'"),
        ("{prompt[txt]}", "It has no 'prompt[txt]', as its column 'prompt' has only 'text', 'toxicity'"),
        ("{question[text]}", "It has no 'question[text]', as its column 'question' is no mapping"),
        ("{question.__class__}", "write a value's place as"),
        ("{question:some words}", "write a value's place as"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(ZooError) as caught:
        filled(text, ROW, of="It")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("form", "rows", "said"),
    [
        ("pairs", [{"chosen": "a b", "rejected": "a c"}, {"chosen": "a b", "rejected": None}],
         "Row 1 of it has nothing in the column 'rejected': mend it, or take it out."),
        ("texts", [{"prompt": "a", "completion": None}, {"prompt": "a", "completion": "b"}], "Row 0 of it has nothing"),
        ("texts", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": None}], "Row 1 of it has nothing"),
        ("texts", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": []}], "Row 1 of it has nothing"),
        ("texts", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}],
         "Row 0 of it has nothing in the column 'messages'"),
        ("pairs", [{"chosen": [{"role": "user", "content": "a"}], "rejected": []}], "Row 0 of it has nothing"),
        ("prompts", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": None}], "Row 1 of it has nothing"),
        ("prompts", [{"chosen": "a b", "rejected": "a c"}, {"chosen": None, "rejected": "a"}], "Row 1 of it has"),
        ("prompts", [{"prompt": 5}], "The column 'prompt' of it holds int64, and texts or conversations are read."),
        ("pairs", [{"chosen": None, "rejected": None}], "Row 0 of it has nothing in the column 'chosen'"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named_with_its_row(form: Any, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ZooError, match=re.escape(said)):
        in_form(datasets.Dataset.from_list(rows), form, columns={}, turns=False, text="text", of="It")


def test_a_turn_that_calls_a_tool_need_not_say_anything() -> None:
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": call},
    ]
    rows = datasets.Dataset.from_list([{"messages": turns}])
    assert len(in_form(rows, "texts", columns={}, turns=False, text="text", of="It")) == 1


def test_an_empty_row_that_is_not_chosen_counts_for_nothing() -> None:
    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": None}])
    read = in_form(rows.select([0]), "prompts", columns={}, turns=False, text="text", of="It")
    assert read.to_list() == [{"prompt": "a"}]


def test_rows_are_kept_above_a_number() -> None:
    rows = datasets.Dataset.from_list([{"at": {"n": n}} for n in (0.1, None, 0.3, 0.31)])
    assert [row["at"]["n"] for row in above(rows, {"at[n]": 0.3}, of="It")] == [0.31]
    with pytest.raises(ZooError, match="no row whose at"):
        above(rows, {"at[n]": 1}, of="It")
