"""The whole recipe product-remarks on the real text, shrunken, through the command line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from json_keys import unexplained

SMALL = [
    "--sft.max_steps", "60", "--sft.save_strategy", "no", "--sft.eval_strategy", "no",
    "--reward.max_steps", "30", "--reward.score_samples", "64", "--corpus_args", '{"train_pairs": 960}',
    "--ppo.total_episodes", "256", "--ppo.save_steps", "2", "--ppo.eval_steps", "4",
    "--evaluation.prompts", "20", "--evaluation.samples", "2", "--evaluation.checkpoint_prompts", "20",
]  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RLHF_ZOO_HOME"))}
    return {**kept, "RLHF_ZOO_HOME": str(home), "OMP_NUM_THREADS": "1"}


def zoo(*words: str, home: Path, cwd: Path) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "rlhf-zoo"), *words]
    done = subprocess.run(command, cwd=cwd, env=environment(home), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_the_whole_recipe_on_a_local_folder(real_data, tmp_path):
    zoo("run", "product-remarks", "--dataset_name", str(real_data / "pros_cons"), "--evaluation.lexicon",
        str(real_data / "opinion_lexicon"), *SMALL, home=tmp_path / "home", cwd=tmp_path)  # fmt: skip
    run = tmp_path / "runs" / "product-remarks"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["simulated"] is False
    assert summary["reward_model"]["n"] > 200
    assert summary["reward_model"]["accuracy"] > 0.6  # after 30 steps; chance is 0.5
    assert summary["win_rate"]["n"] == summary["control"]["n"] == 40
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    assert unexplained(evaluation) == []
    assert set(evaluation["judges"]) == {"classifier", "lexicon"}
    assert evaluation["judge"]["accuracy"]["value"] > 0.9
    data = json.loads((run / "data" / "run.json").read_text())["repo"]
    assert data["id"] == "local/product-remarks"
    assert len(data["commit"]) == 40
    card = (run / "ppo" / "README.md").read_text()
    assert "simulated world" not in card.lower()
    assert "license: cc-by-4.0" in card
    seen = {row["text"] for row in rows(run / "data/lines/train.jsonl")}
    judged = {row["text"].lower() for row in rows(run / "data/judge/train.jsonl")}
    assert not seen & judged


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_the_form_in_which_nltk_has_it(real_data, tmp_path):
    """The command of the recipe's README, on a corpus folder as nltk.download leaves it."""
    folder = tmp_path / "nltk_data" / "corpora"
    for name in ("pros_cons", "opinion_lexicon"):
        (folder / name).mkdir(parents=True)
    texts: dict[int, list[str]] = {0: [], 1: []}
    for split in ("train", "judge", "validation", "test"):
        with gzip.open(real_data / "pros_cons" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                texts[row["label"]].append(row["text"])
    for label, tag in ((1, "Pros"), (0, "Cons")):
        lines = "".join(f"<{tag}>{text}</{tag}>\n" for text in texts[label])
        (folder / "pros_cons" / f"Integrated{tag}.txt").write_text(lines, encoding="latin-1", errors="replace")
    with gzip.open(real_data / "opinion_lexicon" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        words = [json.loads(line) for line in file]
    for label, name in ((1, "positive-words.txt"), (0, "negative-words.txt")):
        listed = "".join(row["word"] + "\n" for row in words if row["label"] == label)
        (folder / "opinion_lexicon" / name).write_text("; a comment\n\n" + listed, encoding="latin-1", errors="replace")
    nltk = str(tmp_path / "nltk_data")
    zoo("run", "product-remarks", "--dataset_name", nltk, "--evaluation.lexicon", nltk, *SMALL, home=tmp_path / "home",
        cwd=tmp_path)  # fmt: skip
    summary = json.loads((tmp_path / "runs/product-remarks/summary.json").read_text())
    assert summary["win_rate"]["n"] == 40


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_the_figures_of_the_recipe(real_data, tmp_path):
    """It comes near what the committed evidence shows of three seeds, with room for other threads and processors."""
    zoo("run", "product-remarks", "--dataset_name", str(real_data / "pros_cons"), home=tmp_path / "home", cwd=tmp_path)
    summary = json.loads((tmp_path / "runs/product-remarks/summary.json").read_text())
    assert summary["reward_model"]["accuracy"] >= 0.87
    assert summary["win_rate"]["value"] >= 0.85
    assert summary["win_rate"]["n"] >= 500
    assert 1.5 <= summary["ppo"]["kl"] <= 9
    assert summary["ppo"]["distinct_2"] >= 0.5 * summary["sft"]["distinct_2"]
    assert summary["peak_rss_mib"] <= 3 * 1024
    assert abs(summary["control"]["value"] - 0.5) < 0.1
