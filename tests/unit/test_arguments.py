"""Argument pairs ordered by people: both corpus formats, debates within one split, and the length baseline."""

import gzip
import json
from pathlib import Path

import pytest
from test_product_remarks import write

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.corpora.arguments import DEBATES, SPLITS, prepare

TRAIN = "cats-or-dogs-_dogs-of-course"
TOPICS = {"train": TRAIN, **{split: f"{names[0]}_yes" for split, names in DEBATES.items()}}


def pairs(topic: str, n: int = 6) -> list[dict]:
    """Of n good arguments and n bad ones, each good one chosen over each bad one."""
    return [
        {"topic": topic, "chosen": f"{i} good  arguments for {topic}\n with reasons", "rejected": f"{j} bad {topic}"}
        for i in range(n)
        for j in range(n)
    ]


@pytest.fixture
def splits() -> dict[str, list[dict]]:
    return {split: pairs(TOPICS[split]) for split in SPLITS}


def write_csv(folder: Path, rows: list[dict]) -> None:
    lines = ["#id\tlabel\ta1\ta2"]
    for place, row in enumerate(rows):
        chosen, rejected = (row[side].replace("\n", "<br/>") for side in ("chosen", "rejected"))
        label, sides = ("a1", (chosen, rejected)) if place % 2 else ("a2", (rejected, chosen))
        lines.append("\t".join((f"id{place}", label, *sides)))
    (folder / f"{rows[0]['topic']}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_prepare_makes_four_configurations(tmp_path: Path, splits: dict) -> None:
    data = prepare(str(write(tmp_path, splits)), seed=0)
    assert {config: set(parts) for config, parts in data.items()} == {
        "lines": {"train", "validation", "test"},
        "prompts": {"train", "validation", "test"},
        "preferences": {"train", "test"},
        "judge": {"train"},
    }
    side = "cats or dogs: dogs of course."
    assert {row["text"] for row in data["lines"]["train"]} == {
        f"{side} {i} {what}" for i in range(6) for what in (f"good arguments for {TRAIN} with reasons", f"bad {TRAIN}")
    }
    assert {row["prompt"] for row in data["prompts"]["train"]} == {
        f"{side} {i} {what}" for i in range(6) for what in ("good arguments", f"bad {TRAIN}")
    }
    assert len(data["preferences"]["train"]) == 36
    for row in data["preferences"]["train"]:
        assert row["prompt"] == side and " good " in row["chosen"] and " bad " in row["rejected"]
        assert row["chosen"].startswith(" ") and row["rejected"].startswith(" ")
    judged = data["judge"]["train"]
    assert [" good " in row["text"] for row in judged] == [bool(row["label"]) for row in judged] and len(judged) == 12


def test_prepare_reads_csv_and_folder_alike(tmp_path: Path, splits: dict) -> None:
    folder = tmp_path / "csv"
    folder.mkdir()
    for rows in splits.values():
        write_csv(folder, rows)
    assert prepare(str(folder), seed=3) == prepare(str(write(tmp_path / "folder", splits)), seed=3)
    (folder / f"{TOPICS['test']}.csv").unlink()
    with pytest.raises(ZooError, match="no debate of the split test"):
        prepare(str(folder), seed=0)
    (folder / "broken_yes.csv").write_text("#id\tlabel\ta1\ta2\n1\ta3\tone\ttwo\n")
    with pytest.raises(ZooError, match=r"broken_yes\.csv, line 2, must hold id"):
        prepare(str(folder), seed=0)


def test_prepare_seed_shuffles_training_prompts_only(tmp_path: Path, splits: dict) -> None:
    source = str(write(tmp_path, splits))
    first, other = prepare(source, seed=0), prepare(source, seed=1)
    assert first["prompts"].pop("train") != other["prompts"].pop("train")
    assert first == other
    tie = {"topic": "a-b_c", "chosen": "x y", "rejected": "z"}
    splits["judge"] = [tie, {**tie, "chosen": "z", "rejected": "x y"}, {**tie, "chosen": "better"}]
    judged = prepare(str(write(tmp_path / "tied", splits)), seed=0)["judge"]["train"]
    assert judged == [{"text": "a b: c. better", "label": 1}, {"text": "a b: c. z", "label": 0}] or judged == [
        {"text": "a b: c. z", "label": 0},
        {"text": "a b: c. better", "label": 1},
    ], "what wins as often as it loses has no label"


def test_prepare_errors_name_problem_and_remedy(tmp_path: Path, splits: dict) -> None:
    with pytest.raises(ZooError, match="do not come with this package"):
        prepare(None, seed=0)
    with pytest.raises(ZooError, match=r"There is no data set at .*nothing"):
        prepare(str(tmp_path / "nothing"), seed=0)
    splits["train"][3].pop("topic")
    with pytest.raises(ZooError, match=r"split train, has no column 'topic' in row 4 \(it has chosen, rejected\)"):
        prepare(str(write(tmp_path, splits)), seed=0)


def test_prepare_matches_published_counts_of_real_corpus(real_data: Path) -> None:
    data = prepare(str(real_data / "ukp_convarg"), seed=0)
    assert [len(data["preferences"][split]) for split in ("train", "test")] == [6414, 1660]
    assert len(data["prompts"]["test"]) >= 120
    written = [len(data["lines"][split]) for split in ("train", "validation", "test")]
    assert (*written, len(data["judge"]["train"])) == (579, 60, 137, 260), "as the recipe's README has it"
    debates = {
        split: {row["prompt"].partition(":")[0] for row in data["prompts"][split]}
        for split in ("train", "validation", "test")
    }
    debates["judge"] = {row["text"].partition(":")[0] for row in data["judge"]["train"]}
    assert {split: len(names_of_split) for split, names_of_split in debates.items()} == {
        "train": 9,
        "validation": 1,
        "test": 2,
        "judge": 4,
    }
    assert len(set().union(*debates.values())) == 16, "no debate is in two splits"
    for split, names in DEBATES.items():
        assert all(any(name.replace("-", " ") in debate for name in names) for debate in debates[split])
    longer = [len(row["chosen"].split()) > len(row["rejected"].split()) for row in data["preferences"]["test"]]
    assert 0.70 < sum(longer) / len(longer) < 0.78
    with gzip.open(real_data / "ukp_convarg" / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        first = json.loads(next(file))
    assert f" {' '.join(first['chosen'].split())}" in {row["chosen"] for row in data["preferences"]["test"]}
