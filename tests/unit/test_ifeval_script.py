"""`benchmarks/ifeval.py`: its scores, and that it goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

import ifeval
import pytest

from rlhf_zoo.errors import ZooError

ROWS = [
    {
        "prompt": "Say hi without a comma in two words or more.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 2, "relation": "at least"}],
    },
    {"prompt": "Quote yourself.", "instruction_id_list": ["startend:quotation"], "kwargs": [{"letter": None}]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_strict_and_loose_accuracy() -> None:
    figures = ifeval.score(ROWS, [("Sure, here:\nhi you", True), ('"me"', False)])
    assert figures["prompt_strict"]["share"] == 0.5
    assert figures["prompt_loose"]["share"] == 1
    assert figures["instruction_strict"] == {"share": 0.6667, "interval": [0.5, 1.0], "n": 3}
    assert figures["average"] == pytest.approx((0.5 + 1 + 0.6667 + 1) / 4, abs=1e-4)
    assert figures["kinds_strict"]["startend:quotation"] == [1, 1]
    assert (figures["words"], figures["ended"], figures["skipped"]) == (2.5, 0.5, {})


def test_a_constant_text_needs_no_model(prompts: Path, tmp_path: Path) -> None:
    ifeval.main(["--text", '"hi you"', "--prompts", str(prompts), "--output", str(tmp_path / "scores.json")])
    figures = json.loads((tmp_path / "scores.json").read_text())
    assert figures["prompt_strict"]["share"] == 1
    assert figures["settings"]["text"] == '"hi you"'


def test_kinds_that_cannot_run_are_counted() -> None:
    row = {"prompt": "?", "instruction_id_list": ["count:nothing"], "kwargs": [{}]}
    figures = ifeval.score([*ROWS, row], [("a b", True)] * 3)
    assert figures["prompts_scored"] == 2
    assert sum(figures["skipped"].values()) == 1
    with pytest.raises(ZooError, match="None of the kinds"):
        ifeval.score([row], [("a", True)])


def test_answers_go_on_where_they_stopped(tmp_path: Path) -> None:
    path, calls = tmp_path / "answers.jsonl", []

    def stops(rows: Any) -> Any:
        yield [("first", True)]
        raise KeyboardInterrupt

    def rest(rows: Any) -> Any:
        calls.append(len(rows))
        yield [("second", False)]

    with pytest.raises(KeyboardInterrupt):
        ifeval.resumed(path, ROWS, stops)
    assert ifeval.resumed(path, ROWS, rest) == [("first", True), ("second", False)]
    assert ifeval.resumed(path, ROWS, rest) == [("first", True), ("second", False)]
    assert calls == [1]
    with pytest.raises(ZooError, match="other prompts"):
        ifeval.resumed(path, ROWS[::-1], rest)
