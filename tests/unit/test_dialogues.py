"""Dialogues in one text, as those of Anthropic/hh-rlhf, become the turns of a chat template where texts do."""

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


def read(form: Form, *rows: dict[str, Any], turns: bool = True, **columns: str) -> dict[str, Any]:
    data = datasets.Dataset.from_list(list(rows))
    return convert_rows(data, form, columns=columns, turns=turns, text="text", subject="The data set x")[0]


def test_pairs_and_prompts_and_texts() -> None:
    assert read("pairs", ROW) == {"prompt": TURNS, "chosen": CHOSEN, "rejected": REJECTED}
    assert read("prompts", ROW)["prompt"] == TURNS
    assert read("texts", ROW, messages="chosen") == {"messages": [*TURNS, *CHOSEN]}


def test_an_open_answer_ends_a_prompt() -> None:
    assert read("prompts", {"prompt": ASKED, "chosen": "a column of rewards"})["prompt"] == TURNS
    row = {"prompt": ASKED, "chosen": "Yes.\n\nIt is here.", "rejected": "Take it."}
    assert read("pairs", row) == {"prompt": TURNS, "chosen": CHOSEN, "rejected": REJECTED}
    assert read("pairs", {"prompt": ASKED, **ROW}) == {"prompt": TURNS, "chosen": CHOSEN, "rejected": REJECTED}


def test_texts_stay_texts_without_conversations_and_other_texts_are_one_turn() -> None:
    assert read("pairs", ROW, turns=False) == {
        "prompt": ASKED, "chosen": " Yes.\n\nIt is here.", "rejected": " Take it."
    }  # fmt: skip
    assert read("prompts", {"prompt": "Who is Human: A or B?"})["prompt"] == [
        {"role": "user", "content": "Who is Human: A or B?"}
    ]


@pytest.mark.parametrize("text", ["", "Hello", "Hi\n\nHuman: a\n\nAssistant: b", "\n\nAssistant: b"])
def test_what_is_no_dialogue(text: str) -> None:
    assert turns_of_text(text) is None


def test_a_row_without_a_dialogue_is_named() -> None:
    with pytest.raises(ZooError, match=r"Row 1 of the data set x has no dialogue .* in the column 'chosen'"):
        read("pairs", ROW, {**ROW, "chosen": "No."})
