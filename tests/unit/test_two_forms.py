"""Rows that have the columns of two forms: the log says which the stage reads."""

import logging
from typing import Any

import pytest
from datasets import Dataset

from rlhf_zoo.runs.data import layout
from rlhf_zoo.runs.data.layout import Form, convert_rows

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PAIR = {"chosen": [*TURNS[:1], {"role": "assistant", "content": "c"}], "rejected": TURNS}


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("texts", {"messages": TURNS, "text": "x"}, "columns messages, which the stage reads, and also text, which"),
        ("texts", {"messages": TURNS, "prompt": "x", "completion": "y"}, "also completion and prompt, which"),
        ("texts", {"messages": TURNS, "prompt": "x"}, None),
        ("prompts", {"messages": TURNS, "prompt": "x"}, "columns prompt, which the stage reads, and also messages"),
        (
            "prompts",
            {"messages": TURNS, **PAIR},
            "columns chosen and rejected, which the stage reads, and also messages",
        ),
        ("prompts", {"prompt": "x", "completion": "y"}, None),
        ("prompts", {"prompt": TURNS[:1], **PAIR}, None),
        ("pairs", {**PAIR, "messages": TURNS, "prompt": TURNS[:1]}, None),
    ],
)
def test_log_names_columns_read_when_rows_have_two_forms(
    form: Form,
    row: dict[str, Any],
    message: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "_warned_columns", set())
    rows = Dataset.from_list([row, row])
    with caplog.at_level(logging.WARNING):
        shaped = convert_rows(rows, form, columns={}, as_chat=False, subject="The data set mine")
    assert (message in caplog.text) if message else not caplog.records
    if form == "prompts":
        assert shaped[0]["prompt"] == row.get("prompt", TURNS[:1])
    if form == "texts" and "messages" in row:
        assert shaped.column_names == ["messages"]
    if message is not None:
        caplog.clear()
        convert_rows(rows, form, columns={}, as_chat=False, subject="The data set mine of another stage")
        assert not caplog.records, "once is enough"
        name = next(iter(row))
        convert_rows(rows, form, columns={name: name}, as_chat=False, subject="The data set mine")
        assert not caplog.records, "who names columns has chosen"
