"""Which prompts two sets of rows both ask, however each of them is written."""

import random
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from schemas import make_recipe

from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.modeling.chat import plain_text
from rlhf_zoo.pipeline.stages.evaluate import evaluation_prompts
from rlhf_zoo.pipeline.stages.pair_report import count_trained_pairs
from rlhf_zoo.pipeline.stages.trained_prompts import count_trained_prompts
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.data.hold_out import hold_out
from rlhf_zoo.runs.data.layout import convert_rows
from rlhf_zoo.runs.data.overlap import MIN_CHARACTERS, MIN_WORDS, find_overlap, normalize_question
from rlhf_zoo.runs.dataset import HELD_OUT, data_source, evaluation_rows, training_and_held_out_rows
from rlhf_zoo.runs.recipe import load_recipe

ASKED = "How is the café in the old town?"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "  how is\tthe CAFÉ in the old\ntown? "},
        {"prompt": unicodedata.normalize("NFD", ASKED)},
        {"prompt": [turn("system", "Be brief."), turn("user", ASKED)]},
        {"messages": [turn("user", ASKED), turn("assistant", "Fine."), turn("user", "Why?"), turn("assistant", "So.")]},
        {"messages": [turn("user", "Hello!"), turn("assistant", "Hi."), turn("user", ASKED), turn("assistant", "Ok.")]},
        {"prompt": f"### Question: {ASKED}\n### Answer:"},
        {"text": f"\n\nHuman: {ASKED}\n\nAssistant: Fine.\n\nHuman: Why?\n\nAssistant: So."},
        {"text": f"Somebody asked: {ASKED} It is fine."},
        {"content": f"{ASKED} It is fine."},
    ],
    ids=["space and case", "form", "system", "first turn", "last turn", "template", "dialogue", "text", "other column"],
)
def test_overlap_finds_prompt_in_every_form(row: dict[str, Any]) -> None:
    for asking in (Dataset.from_list([row]), [row]):
        found = find_overlap([{"prompt": "Who is the mayor of the new town?"}, {"prompt": ASKED}], asking)
        assert (found.prompt_indices, found.row_indices, found.is_complete) == ({1}, {0}, True)
    if "prompt" in row:
        assert find_overlap([row], [{"prompt": ASKED}]).prompt_indices == {0}, "either may have more around it"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How is the café in the old tower?"},
        {"prompt": "How is it?"},
        {"messages": [turn("user", "Why?"), turn("assistant", ASKED)]},
        {"prompt": "in the old town"},
    ],
)
def test_overlap_ignores_different_prompts(row: dict[str, Any]) -> None:
    assert find_overlap([{"prompt": ASKED}], [row]).prompt_indices == set()


def test_short_prompts_match_only_whole_turns() -> None:
    """What is shorter is a phrase, by which no plain text can be known to ask it."""
    short = [{"prompt": "2+2?"}, {"prompt": [turn("user", "hi"), turn("assistant", "yes"), turn("user", "2-2?")]}]
    for said, asked in (
        (["2 + 2?"], {0}),
        (["hi", "2+2?"], {0}),
        (["Hi", "2-2?", "1+1?"], {1}),
        (["Hi", "", "2-2?", "1+1?"], {1}),
        (["2-2?"], set()),
        (["What is 2+2? Or 2-2?"], set()),
    ):
        talk = [turn("user", text) for text in said]
        assert find_overlap(short, [{"prompt": talk}]).prompt_indices == asked, said
    found = find_overlap(short, [{"text": "hi 2+2? 4"}])
    assert found.prompt_indices == set() and not found.is_complete


def test_shared_frame_of_prompts_is_no_overlap() -> None:
    frame = "Answer the following question in one sentence: {} Answer:"
    asked = [{"prompt": frame.format(f"how old is the tree of street {number}?")} for number in (4, 5)]
    assert find_overlap(asked, [{"prompt": "Answer the following question in one sentence:"}]).prompt_indices == set()
    assert find_overlap(asked, [{"prompt": "How old is the tree of street 5?"}]).prompt_indices == {1}


def test_containment_equals_all_pairs_comparison() -> None:
    rng = random.Random(1)

    def text(least: int, most: int) -> str:
        return " ".join([*rng.choices("abcd", k=rng.randint(least, most)), "o" * MIN_CHARACTERS])

    asked, known = [text(4, 9) for _ in range(300)], [text(2, 12) for _ in range(300)]
    asked += [f"{rng.choice(known)} {text(3, 5)}" for _ in range(100)]
    known += [f"{text(3, 5)} {rng.choice(asked)}" for _ in range(100)]

    def within(one: str, other: str) -> bool:
        return one == other or (one.count(" ") >= MIN_WORDS - 1 and f" {one} " in f" {other} ")

    wanted = {
        place for place, one in enumerate(asked) if any(within(one, other) or within(other, one) for other in known)
    }
    found = find_overlap([{"prompt": one} for one in asked], [{"prompt": one} for one in known])
    assert found.prompt_indices == wanted and 100 < len(wanted) < 300


def test_prompts_in_one_frame_need_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in one frame share most of their words: what they do not share is looked up."""
    from rlhf_zoo.runs.data.overlap import PromptIndex

    frame = "Below is a question. Write an answer to it in words that a child can read. {} Now write the answer."
    rows = [{"prompt": frame.format(f"How many are {place} apples and {place + 1} pears?")} for place in range(400)]
    questions = PromptIndex(rows)
    candidates = [len(questions._texts_by_rarest_window[window]) for window in questions._texts_by_rarest_window]
    assert max(candidates) == 1
    assert [questions.find_in({"prompt": f"Say: {row['prompt']}"}) for row in rows] == [{at} for at in range(400)]


def a_run(folder: Path, **keys: dict[str, Any]) -> RunContext:
    """A run of questions with a fifth held out."""
    recipe = load_recipe(str(make_recipe(folder, "openai/gsm8k", "plain", **keys)))
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    return RunContext(recipe, folder / "run", hub, namespace="local", publish=False)


TEMPLATES = {
    "of PPO": {"ppo": {"columns": {"prompt": "Q: {question}\nA:"}}},
    "of SFT": {"sft": {"columns": {"prompt": "Q: {question}\nA:", "completion": "answer"}}},
    "of both": {
        "sft": {"columns": {"prompt": "Solve {question}", "completion": "answer"}},
        "ppo": {"columns": {"prompt": "Q: {question}\nA:"}},
    },
    "of a text": {"sft": {"columns": {"text": "Q: {question}\nA: {answer}"}}},
}


@pytest.mark.parametrize("keys", TEMPLATES.values(), ids=TEMPLATES)
def test_templated_columns_hide_no_prompt(tmp_path: Path, keys: dict[str, Any]) -> None:
    """The questions have four words, so that none is looked for within others."""
    context = a_run(tmp_path, **keys)
    source = data_source(context)
    train, held_out, left_out = training_and_held_out_rows(context, "sft", source)
    assert held_out is not None and left_out == {HELD_OUT: 10}
    asked = {
        plain_text(prompt).strip()[-len("how is item 23\nA:") :]
        for part in ("test", "validation")
        for prompt in evaluation_rows(context, source, part)["prompt"]
    }
    assert len(asked) == 10
    assert {*train.column_names} <= {"prompt", "completion", "text"}, "no trainer is given our own column"
    learned, watched, _ = training_and_held_out_rows(context, "ppo", source)
    assert watched is not None and {*learned.column_names} == {*watched.column_names} == {"prompt", "answer"} | (
        {"question"} if "ppo" in keys else set()
    )


def test_hold_out_keeps_forms_of_one_prompt_together() -> None:
    rows = [{"prompt": form(f"how is item {row}?")} for row in range(40) for form in (str, str.upper, " {} ".format)]
    learned, held_out = hold_out(Dataset.from_list(rows), 0.3)
    sides = [{normalize_question(text) for text in side["prompt"]} for side in (learned, held_out)]
    assert [len(side) for side in sides] == [28, 12] and not sides[0] & sides[1]
    plain = Dataset.from_list(rows[::3])
    assert len(hold_out(plain, 0.3)[1]) == 12


@pytest.mark.parametrize(
    ("flags", "seen", "mend"),
    [
        ({}, {"sft": 0, "ppo": 0}, None),
        (
            {"recipe": {"evaluation.dataset_test_split": "train"}},
            {"sft": 1, "ppo": 1},
            "set evaluation.dataset_test_split to another split, or to null",
        ),
        (
            {"recipe": {"evaluation.dataset_test_split": "train"}, "ppo": {"held_out_share": "none"}},
            {"sft": 2, "ppo": 2},
            "held_out_share of the stage ppo",
        ),
    ],
    ids=["held out", "split of its own", "nothing held out"],
)
def test_evaluation_prompts_trained_on_are_counted_per_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any], seen: dict[str, int], mend: str | None
) -> None:
    """The evaluation asks for two prompts; of a split of its own PPO holds out one of them, which only watches."""
    context = replace(a_run(tmp_path), flags=flags)
    prompts = evaluation_prompts(context, data_source(context))
    assert count_trained_prompts(context, prompts, planned_stages=["sft", "ppo"]) == seen
    told = [
        record.getMessage() for record in caplog.records if record.name == "rlhf_zoo.pipeline.stages.trained_prompts"
    ]
    assert len(told) == (mend is not None) and all(str(mend) in sentence for sentence in told)
    assert count_trained_prompts(context, prompts) == {"sft": None, "ppo": None}, (
        "nothing here says what it learned from"
    )
    assert count_trained_prompts(context, prompts, planned_stages=["ppo"]) == {"sft": None, "ppo": seen["ppo"]}


def test_held_out_pairs_trained_on_are_counted() -> None:
    def pair(prompt: str, chosen: str = "it is good", rejected: str = "it is bad") -> dict[str, str]:
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    learned = Dataset.from_list([pair("one"), pair("two"), pair("three", "x", "y")])
    held_out = [pair("ONE ", "it is bad", "It is  good"), pair("two", "other"), pair("two", "another"), pair("four")]
    assert count_trained_pairs(Dataset.from_list(held_out), learned) == {"prompts": 2, "pairs": 1}
    assert count_trained_pairs(Dataset.from_list(held_out[3:]), learned) == {"prompts": 0, "pairs": 0}
    nameless = Dataset.from_list([pair("", "a"), pair("")])
    assert count_trained_pairs(nameless, learned) == {"prompts": None, "pairs": 0}


def test_truncated_column_is_matched_by_its_full_value() -> None:
    rows = Dataset.from_list([{"text": f"review {row} says that this film is {row}"} for row in range(3)])
    options: Any = {"as_chat": False, "subject": "mine"}
    prompts = convert_rows(rows, "prompts", columns={"prompt": "{text:2 words}"}, **options)
    texts = convert_rows(rows.select([2, 0]), "texts", columns={}, **options)
    found = find_overlap(prompts, texts)
    assert list(prompts["prompt"]) == ["review 0", "review 1", "review 2"]
    assert (found.prompt_indices, found.row_indices, found.is_complete) == ({0, 2}, {0, 1}, False)
