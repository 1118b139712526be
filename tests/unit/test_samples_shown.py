"""Completions that training shows and saves: of the update they are named after, in files, tensorboard and trackio."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_fixture import (
    CHAT,
    digests,
    good,
    make_policy,
    make_tokenizer,
    prompt_rows,
    read_table,
    rows_of,
    trained,
    updates_of,
)


def texts_of(directory: Path) -> dict[str, dict[int, str]]:
    """The texts that tensorboard was given, by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    read = EventAccumulator(str(events)).Reload()
    return {
        tag: {event.step: event.tensor_proto.string_val[0].decode() for event in read.Tensors(tag)}
        for tag in read.Tags()["tensors"]
    }


def test_logged_completions_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversations, which pass through the chat template and reach the rewards as such, as they are read."""
    heard: list[str] = []

    def explained(prompts: list[Any], completions: list[Any], log_extra: Any = None, **_: Any) -> list[float]:
        heard.extend(prompt[0]["content"] for prompt in prompts)
        log_extra("first", [completion[0]["content"][:1] for completion in completions])
        return good(completions)

    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompt_rows()["prompt"]]})
    trainer = trained(
        tmp_path, log_completions=True, num_completions_to_print=3, reward_funcs=explained, processing_class=tokenizer,
        report_to=["tensorboard"], ref_model=make_policy(seed=5), train_dataset=chats,
    )  # fmt: skip
    folder = tmp_path / "completions" / "completions"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    for step, (rollout, advantages, _) in enumerate(trainer.updates, start=1):
        said = trainer.processing_class.batch_decode(rollout.samples.completion_id_lists(), skip_special_tokens=True)
        asked = [trainer.processing_class.decode(prompt) for prompt, _ in rows_of(rollout)]
        assert asked == [f"{prompt};:" for prompt in heard[8 * step - 8 : 8 * step]]
        wanted = [
            {
                "prompt": asked[row].removesuffix(";:"), "completion": said[row],
                "score": advantages.reward_scores.total[row].item(), "kl": rollout.kl[row].item(),
                "ended": rollout.samples.ended[row].item(), "first": said[row][:1],
            }
            for row in range(3)
        ]  # fmt: skip
        assert read_table(folder / f"step-{step:06d}.jsonl") == wanted
    shown = texts_of(tmp_path)["completions/text_summary"]
    assert shown.keys() == {1, 2}
    head, line, *cells = shown[2].split("\n")
    assert head == "| prompt | completion | score | kl | ended | first |" and line.count("---") == 6
    assert [row.split(" | ")[1] for row in cells] == [row["completion"] for row in wanted]
    assert said[0] in capsys.readouterr().err


def test_saved_samples_belong_to_the_update_in_their_name(tmp_path: Path) -> None:
    """Twice in four updates, and nothing of the run changes for it."""
    settings: dict[str, Any] = {
        "max_steps": 4, "train_dataset": prompt_rows(8), "eval_dataset": prompt_rows(12), "missing_eos_penalty": 1.0,
    }  # fmt: skip
    sampled = trained(tmp_path, num_sample_generations=2, report_to=["tensorboard"], **settings)
    plain = trained(tmp_path / "without", **settings)
    assert digests(sampled) == digests(plain) and not (tmp_path / "without" / "completions").exists()
    folder = tmp_path / "completions" / "samples"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002.jsonl", "step-000004.jsonl"]
    assert texts_of(tmp_path)["samples/text_summary"].keys() == {2, 4}
    now = plain.generate_completions(sampling=True)
    rows = [dict(zip(now, cells, strict=True)) for cells in zip(*now.values(), strict=True)]
    assert read_table(folder / "step-000004.jsonl") == rows != read_table(folder / "step-000002.jsonl")
    assert len(now["prompt"]) == 8  # one batch
    table = sampled.generate_completions()
    assert table["prompt"] == prompt_rows(12)["prompt"]
    assert table["score"] == pytest.approx(good(table["completion"]), abs=1e-7)


def test_trackio_receives_metrics_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # It reads TRACKIO_DIR when it is imported, and trl's other trainers, which other tests use, import it.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    import sqlite3

    trainer = trained(
        tmp_path, report_to=["trackio"], project="toys", run_name="toy", log_completions=True, max_steps=1
    )
    with sqlite3.connect(tmp_path / "trackio" / "toys.db") as database:
        logged = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    scores = [row["train/objective/score"] for row in logged if "train/objective/score" in row]
    assert scores == pytest.approx([row["objective/score"] for row in updates_of(trainer)])
    [table] = [row["completions"]["_value"] for row in logged if "completions" in row]
    assert table == read_table(tmp_path / "completions" / "completions" / "step-000001.jsonl")
