"""`python -m rlhf_zoo.runs.corpora.instructions`: answers to training tasks, for demonstrations."""

import json
import string
from pathlib import Path

import pytest
from trainer_fixture import make_policy, make_tokenizer

from rlhf_zoo.runs.corpora.instructions import __main__ as task_answers
from rlhf_zoo.runs.corpora.instructions import prepare, split_of
from rlhf_zoo.runs.corpora.instructions.tasks import tasks


def test_answers_are_to_training_tasks_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(task_answers, "TOKENS", 4)
    monkeypatch.setattr(task_answers, "BATCH", 2)
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    make_policy(tokenizer, seed=0).save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), str(tmp_path / "answers"), "--bf16", "--limit"]
    path = tmp_path / "answers" / "train.jsonl"
    task_answers.main([*arguments, "2"])
    first = path.read_text()
    task_answers.main([*arguments, "3"])
    assert f"{path} has 3 answers." in capsys.readouterr().out
    assert path.read_text().startswith(first)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    expected = [task.text for task in tasks() if split_of(task) == "train"][:3]
    assert [row["prompt"][0]["content"] for row in rows] == expected
    assert prepare(str(tmp_path / "answers"), seed=1)["demonstrations"] == {"train": []}, "no answer has a sentence"
