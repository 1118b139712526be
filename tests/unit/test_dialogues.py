"""Dialogues in one text, as in Anthropic/hh-rlhf, are converted to chat turns."""

from typing import Any

import datasets
import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.data.layout import Form, convert_rows
from rlhf_zoo.runs.data.turns import turns_of_text

ASKED = "\n\nHuman: May I borrow a pen?\n\nAssistant: Which one?\n\nHuman: The blue one.\n\nAssistant:"
ROW = {"chosen": f"{ASKED} Yes.\n\nIt is here.", "rejected": f"{ASKED} Take it."}
TURNS = [
    {"role": "user", "content": "May I borrow a pen?"},
    {"role": "assistant", "content": "Which one?"},
    {"role": "user", "content": "The blue one."},
]
CHOSEN, REJECTED = (
    [{"role": "assistant", "content": "Yes.\n\nIt is here."}],
    [{"role": "assistant", "content": "Take it."}],
)


def read_row(form: Form, *rows: dict[str, Any], as_chat: bool = True, **columns: str) -> dict[str, Any]:
    data = datasets.Dataset.from_list(list(rows))
    return convert_rows(data, form, columns=columns, as_chat=as_chat, subject="The data set x")[0]


def test_dialogues_become_turns_in_every_form() -> None:
    assert read_row("pairs", ROW) == {"prompt": TURNS, "chosen": CHOSEN, "rejected": REJECTED}
    assert read_row("prompts", ROW)["prompt"] == TURNS
    assert read_row("texts", ROW, messages="chosen") == {"messages": [*TURNS, *CHOSEN]}


def test_dialogue_prompt_may_end_with_assistant_marker() -> None:
    assert read_row("prompts", {"prompt": ASKED, "chosen": "a column of rewards"})["prompt"] == TURNS
    row = {"prompt": ASKED, "chosen": "Yes.\n\nIt is here.", "rejected": "Take it."}
    assert read_row("pairs", row) == {"prompt": TURNS, "chosen": CHOSEN, "rejected": REJECTED}
    assert read_row("pairs", {"prompt": ASKED, **ROW}) == {"prompt": TURNS, "chosen": CHOSEN, "rejected": REJECTED}


def test_dialogues_stay_text_without_turns_and_plain_text_is_one_turn() -> None:
    assert read_row("pairs", ROW, as_chat=False) == {
        "prompt": ASKED, "chosen": " Yes.\n\nIt is here.", "rejected": " Take it."
    }  # fmt: skip
    assert read_row("prompts", {"prompt": "Who is Human: A or B?"})["prompt"] == [
        {"role": "user", "content": "Who is Human: A or B?"}
    ]


@pytest.mark.parametrize("text", ["", "Hello", "Hi\n\nHuman: a\n\nAssistant: b", "\n\nAssistant: b"])
def test_turns_of_text_ignores_other_texts(text: str) -> None:
    assert turns_of_text(text) is None


def test_convert_rows_names_row_without_dialogue() -> None:
    with pytest.raises(ZooError, match=r"Row 1 of the data set x has no dialogue .* in the column 'chosen'"):
        read_row("pairs", ROW, {**ROW, "chosen": "No."})
