"""Columns: placeholders filled from a row, row filters, and columns of mixed types."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.runs.checks.splits import local_rows
from rlhf_zoo.runs.data.columns import fill_placeholders, keep_rows_above
from rlhf_zoo.runs.data.layout import convert_rows
from rlhf_zoo.runs.data.sources import find_data
from rlhf_zoo.runs.settings.parse import PPOArguments, RecipeConfig

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROW = {"question": "How many?", "prompt": {"text": "a b  c d e f", "toxicity": 0.5}, "answer": "#### 2"}


def test_fill_placeholders_inserts_row_values() -> None:
    assert fill_placeholders('{question} Say "####".', ROW, subject="it", index=0) == 'How many? Say "####".'
    assert fill_placeholders("{prompt[text]:3 words}!", ROW, subject="it", index=0) == "a b  c!"
    assert fill_placeholders("{prompt[text]:99 words}", ROW, subject="it", index=0) == "a b  c d e f"
    drawn = {fill_placeholders("{q:2-4 words}", {"q": f"a b c d {n}"}, subject="it", index=0) for n in range(40)}
    assert drawn == {"a b", "a b c", "a b c d"}
    assert (
        fill_placeholders(r"{question} Answer in \boxed{{}}.", ROW, subject="it", index=0)
        == r"How many? Answer in \boxed{}."
    )
    assert fill_placeholders('{{"a": "{answer}"}}', {"answer": "{x} }}"}, subject="it", index=0) == '{"a": "{x} }}"}'
    assert fill_placeholders(r"\boxed{{{answer}}}", ROW, subject="it", index=0) == r"\boxed{#### 2}"
    rows = datasets.Dataset.from_list([ROW])
    read = convert_rows(rows, "prompts", columns={"prompt": "{question} {answer}"}, as_chat=True, subject="It")
    assert read[0]["prompt"] == [{"role": "user", "content": "How many? #### 2"}] and read[0]["answer"] == "#### 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{quest}", "has no column 'quest', only 'question', 'prompt', 'answer': correct the stage's key 'quest'"),
        ("{prompt[txt]}", "It has no 'prompt[txt]', because its column 'prompt' has only 'text', 'toxicity'"),
        ("{question[text]}", "It has no 'question[text]', because its column 'question' is not a mapping"),
        ("{question.__class__}", "write a placeholder as"),
        ("{question:some words}", "write a placeholder as"),
        (r"{question} \boxed{}", "and a literal brace as {{ or }}"),
        ("{question}}", "and a literal brace as {{ or }}"),
    ],
)
def test_fill_placeholders_names_mistakes(text: str, message: str) -> None:
    with pytest.raises(ZooError) as caught:
        fill_placeholders(text, ROW, subject="It", index=0)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("form", "rows", "message"),
    [
        ("pairs", [{"chosen": "a b", "rejected": "a c"}, {"chosen": "a b", "rejected": None}],
         "Row 1 of it has nothing in the column 'rejected': correct it, or remove the row."),
        ("texts", [{"prompt": "a", "completion": None}, {"prompt": "a", "completion": "b"}], "Row 0 of it has nothing"),
        ("texts", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": None}], "Row 1 of it has nothing"),
        ("texts", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": []}], "Row 1 of it has nothing"),
        ("texts", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}],
         "Row 0 of it has nothing in the column 'messages'"),
        ("pairs", [{"chosen": [{"role": "user", "content": "a"}], "rejected": []}], "Row 0 of it has nothing"),
        ("prompts", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": None}], "Row 1 of it has nothing"),
        ("prompts", [{"chosen": "a b", "rejected": "a c"}, {"chosen": None, "rejected": "a"}], "Row 1 of it has"),
        ("prompts", [{"prompt": 5}], "The column 'prompt' of it has int64 instead of texts or conversations"),
        ("pairs", [{"chosen": None, "rejected": None}], "Row 0 of it has nothing in the column 'chosen'"),
        ("pairs", [{**PAIR, "margin": 1.5}, {**PAIR, "margin": None}],
         "Row 1 of it has nothing in the column 'margin'"),
        ("pairs", [{**PAIR, "margin": math.nan}], "Row 0 of it has nan in the column 'margin'"),
        ("pairs", [{**PAIR, "margin": "much"}], "Row 0 of it has 'much' in the column 'margin'"),
        ("texts", [{"messages": json.dumps(TURNS)}], "Row 0 of it has a text in the column 'messages'"),
        ("prompts", [{"messages": json.dumps(TURNS)}], "Row 0 of it has a text in the column 'messages'"),
        ("texts", [{"conversations": json.dumps(TURNS)}], "Row 0 of it has a text in the column 'messages'"),
        ("texts", [{"messages": ["a", "b"]}], "Row 0 of it has a list of texts in the column 'messages'"),
        ("texts", [{"prompt": "a", "completion": ["b", "c"]}], "Row 0 of it has a list of texts in the column 'compl"),
        ("texts", [{"text": TURNS}], "Row 0 of it has a conversation in the column 'text', which may have texts"),
        ("pairs", [{"prompt": "a", "chosen": ["b"], "rejected": ["c"]}], "Row 0 of it has a list of texts in the"),
        ("prompts", [{"prompt": {"text": "a"}}], "Row 0 of it has a mapping in the column 'prompt'"),
        ("prompts", [{"prompt": [{"text": "a"}]}], "Row 0 of it has a list that is not a conversation in the column"),
    ],
)  # fmt: skip
def test_convert_rows_names_row_without_text(form: Any, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ZooError, match=re.escape(message)):
        convert_rows(datasets.Dataset.from_list(rows), form, columns={}, as_chat=False, subject="It")


def test_convert_rows_accepts_tool_call_without_content() -> None:
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": call},
    ]
    rows = datasets.Dataset.from_list([{"messages": turns}])
    assert len(convert_rows(rows, "texts", columns={}, as_chat=False, subject="It")) == 1


def test_convert_rows_ignores_unselected_empty_rows() -> None:
    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": None}])
    read = convert_rows(rows.select([0]), "prompts", columns={}, as_chat=False, subject="It")
    assert read.to_list() == [{"prompt": "a"}]


def test_convert_rows_drops_token_ids_of_data() -> None:
    """They are of whichever tokenizer made them; trl, and PPO, would learn from these and not from the text."""
    ids = {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2]}
    rows = datasets.Dataset.from_list([{"text": "a b", "prompt": "a", "solution": "b", **ids}])
    read = convert_rows(rows.remove_columns("prompt"), "texts", columns={}, as_chat=False, subject="It")
    assert read.column_names == ["text"]
    read = convert_rows(rows, "prompts", columns={}, as_chat=False, subject="It")
    assert {"prompt", "solution"} <= set(read.column_names) and not {"input_ids", "attention_mask"} & set(read.features)


@pytest.mark.parametrize("part", ["{input}", "{input:2 words}", "{of[input]}"])
def test_convert_rows_names_row_without_placeholder_value(part: str) -> None:
    rows = datasets.Dataset.from_list([{"q": "a", "input": text, "of": {"input": text}} for text in ("b", "", None)])
    columns = {"prompt": f"{{q}} {part}"}
    assert convert_rows(rows.select([0, 1]), "prompts", columns=columns, as_chat=False, subject="It")["prompt"] == [
        "a b",
        "a ",
    ]
    with pytest.raises(ZooError, match=r"Row 2 of it has nothing in '(input|of\[input\])', .* remove the row"):
        convert_rows(rows, "prompts", columns=columns, as_chat=False, subject="It")


def test_rows_above_filters_by_threshold() -> None:
    rows = datasets.Dataset.from_list([{"at": {"n": n}} for n in (0.1, None, 0.3, 0.31)])
    assert [row["at"]["n"] for row in keep_rows_above(rows, {"at[n]": 0.3}, subject="It")] == [0.31]
    with pytest.raises(ZooError, match="no row whose at"):
        keep_rows_above(rows, {"at[n]": 1}, subject="It")


def write_data(folder: Path, ending: str, parts: list[list[dict[str, Any]]]) -> Path:
    """A data set of one split in files of this kind."""
    folder.mkdir()
    for number, rows in enumerate(parts):
        path = folder / f"train-{number}.{ending}"
        if ending == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif ending == "csv":
            pd.DataFrame(rows).to_csv(path, index=False)
        else:
            parquet.write_table(pa.Table.from_pylist(rows), path)
    return folder


@pytest.mark.parametrize(
    ("first", "later", "read"),
    [
        ({"x": None}, {"x": "late"}, [None, "late"]),
        ({}, {"x": "late"}, [None, "late"]),
        ({"x": 5}, {"x": 1.5}, [5.0, 1.5]),
        ({"x": 5}, {"x": "late"}, [5, "late"]),
        ({"x": {"a": 1}}, {"x": {"b": 2}}, [{"a": 1, "b": None}, {"a": None, "b": 2}]),
        ({"x": []}, {"x": ["late"]}, [[], ["late"]]),
        ({"x": [5]}, {"x": "late"}, [[5], "late"]),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_load_merges_column_types_across_files(
    tmp_path: Path, ending: str, first: dict[str, Any], later: dict[str, Any], read: list[Any]
) -> None:
    data = write_data(tmp_path / "data", ending, [[{"prompt": "a"} | first], [{"prompt": "b"} | later]])
    rows = find_data(str(data), None, DEFAULT_HUB).load(None, "train", columns=[])
    assert rows["prompt"][:] == ["a", "b"] and rows["x"][:] == read
    shaped = convert_rows(rows, "prompts", columns={}, as_chat=True, subject="It")
    assert shaped["x"][:] == read and shaped[1]["prompt"] == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize(("ending", "count", "late"), [("jsonl", 11_000, "late"), ("csv", 20_000, "late")])
@pytest.mark.parametrize("early", [None, 5])
def test_load_merges_column_types_across_blocks(tmp_path: Path, ending: str, count: int, early: Any, late: str) -> None:
    rows = [{"prompt": "p" * (1000 if ending == "jsonl" else 1), "x": early} for _ in range(count)]
    data = write_data(tmp_path / "data", ending, [[*rows, {"prompt": "q", "x": late}]])
    read = find_data(str(data), None, DEFAULT_HUB).load(None, "train", columns=[])
    assert len(read) == count + 1
    assert (read[0]["x"], read[count]["x"]) == (early if ending == "jsonl" or early is None else str(early), late)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", 5], "Row 1 of it has a number in the column 'prompt', which may have texts or conversations"),
        (["a", {"b": 1}], "Row 1 of it has a mapping in the column 'prompt', which may have texts or conversations"),
        (["a", [{"role": "user", "content": "b"}]], "Row 1 of it has a conversation, and row 0 a text, in the column"),
    ],
)
def test_convert_rows_rejects_mixed_types_in_text_column(tmp_path: Path, values: list[Any], message: str) -> None:
    data = write_data(tmp_path / "data", "jsonl", [[{"prompt": value} for value in values]])
    rows = find_data(str(data), None, DEFAULT_HUB).load(None, "train", columns=[])
    with pytest.raises(ZooError, match=re.escape(message)):
        convert_rows(rows, "prompts", columns={}, as_chat=False, subject="It")


def test_deeply_nested_json_raises_readable_error(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ZooError, match=r"line 2 of data\.jsonl is nested too deeply; correct that line"):
        find_data(str(tmp_path / "data.jsonl"), None, DEFAULT_HUB).load(None, "train", columns=[])


def test_local_rows_applies_keep_above_to_split_of_one_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "score": 1}\n')
    keys: dict[str, Any] = {"dataset_name": str(tmp_path / "rows.jsonl"), "dataset_config": None}
    settings: Any = SimpleNamespace(stage="ppo", data=PPOArguments(**keys, keep_above={"score": 2}), trainer=None)
    with pytest.raises(ZooError, match="no row whose score is above 2"):
        local_rows(RecipeConfig(description="one row"), settings)
