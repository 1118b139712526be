"""`benchmarks/ifeval.py`: its scores, and resuming."""

import json
import string
from pathlib import Path
from typing import Any

import ifeval
import pytest
import torch
from trainer_fixture import make_policy, make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.answers import resume_answers

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


def test_score_reports_strict_and_loose_accuracy() -> None:
    figures = ifeval.score(ROWS, [("Sure, here:\nhi you", True), ('"me"', False)])
    assert figures["prompt_strict"]["share"] == 0.5
    assert figures["prompt_loose"]["share"] == 1
    assert figures["instruction_strict"] == {"share": 0.6667, "interval": [0.5, 1.0], "n": 3}
    assert figures["average"] == pytest.approx((0.5 + 1 + 0.6667 + 1) / 4, abs=1e-4)
    assert figures["average_interval"] == [(0 + 1 + 0.5 + 1) / 4, 1.0], "of draws with one prompt twice"
    assert figures["kinds_strict"]["startend:quotation"] == [1, 1]
    assert (figures["words"], figures["ended"], figures["skipped"]) == (2.5, 0.5, {})


def test_interval_of_mean_resamples_prompts_together() -> None:
    even, odd = [(1, 1), (0, 1)] * 10, [(0, 1), (1, 1)] * 10
    low, high = ifeval.bootstrap_interval(even)
    assert low < 0.35 and high > 0.65
    assert ifeval.bootstrap_interval(even, odd) == [0.5, 0.5]


def test_constant_text_is_scored_without_model(prompts: Path, tmp_path: Path) -> None:
    ifeval.main(["--text", '"hi you"', "--prompts", str(prompts), "--output", str(tmp_path / "scores.json")])
    figures = json.loads((tmp_path / "scores.json").read_text())
    assert figures["prompt_strict"]["share"] == 1
    assert figures["settings"]["text"] == '"hi you"'


def test_score_counts_skipped_kinds() -> None:
    row = {"prompt": "?", "instruction_id_list": ["count:nothing"], "kwargs": [{}]}
    figures = ifeval.score([*ROWS, row], [("a b", True)] * 3)
    assert figures["prompts_scored"] == 2
    assert sum(figures["skipped"].values()) == 1
    with pytest.raises(ZooError, match="None of the kinds"):
        ifeval.score([row], [("a", True)])


def test_answers_resume_after_interrupt(tmp_path: Path) -> None:
    path, calls, prompts = tmp_path / "answers.jsonl", [], [ifeval.messages(row) for row in ROWS]

    def stops(done: int) -> Any:
        yield [("first", True)]
        raise KeyboardInterrupt

    def rest(done: int) -> Any:
        calls.append(done)
        yield [("second", False)]

    with pytest.raises(KeyboardInterrupt):
        resume_answers(path, prompts, stops)
    assert resume_answers(path, prompts, rest) == [("first", True), ("second", False)]
    assert resume_answers(path, prompts, rest) == [("first", True), ("second", False)]
    assert calls == [1]
    with pytest.raises(ZooError, match="other prompts"):
        resume_answers(path, prompts[::-1], rest)


def test_answers_are_same_in_any_batch_and_match_greedy_generate(prompts: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    model = make_policy(tokenizer, seed=1)
    tokenizer.save_pretrained(tmp_path / "policy")
    model.save_pretrained(tmp_path / "policy")
    answers = {}
    for temperature in ("0", "1"):
        for batch in ("1", "2"):
            output = tmp_path / f"{temperature}-{batch}.json"
            options = [
                "--prompts",
                str(prompts),
                "--output",
                str(output),
                "--tokens",
                "12",
                "--temperature",
                temperature,
            ]
            ifeval.main([str(tmp_path / "policy"), *options, "--batch", batch])
            assert json.loads(output.read_text())["prompts_scored"] == 2
            lines = output.with_suffix(".answers.jsonl").read_text().splitlines()
            answers[temperature, batch] = [json.loads(line)["answer"] for line in lines]
    assert answers["0", "1"] == answers["0", "2"] != answers["1", "1"] == answers["1", "2"]
    for row, answer in zip(ROWS, answers["0", "1"], strict=True):
        ids = torch.tensor([tokenizer(row["prompt"] + ";", add_special_tokens=False)["input_ids"]])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True) == answer
