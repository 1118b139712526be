"""Product remarks: three forms of one corpus, four configurations, and no leak between them."""

import gzip
import json
import random
import zipfile
from pathlib import Path

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.lexicon import lexicon_judge
from rlhf_zoo.runs.corpora import product_remarks
from rlhf_zoo.runs.corpora.product_remarks import lexicon, prepare, read_remarks
from rlhf_zoo.runs.corpora.source import SHARES, SPLITS
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.settings.parse import recipe_config

SUBJECTS = ("the battery", "the screen", "zoom", "print quality", "it", "memory card slot")
PROS = ("is great", "works very well", "never fails", "looks sharp")
CONS = ("is poor", "breaks too fast", "always fails", "looks cheap")
ONLY_PROS = "Great"


def corpus(n: int, seed: int) -> list[dict]:
    """Remarks whose openings are neutral, but for one that only pros begin with."""
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        label = i % 2
        if rng.random() < 0.15:
            rows.append({"text": f"{ONLY_PROS} value for the price no {seed}{i}", "label": 1})
        else:
            rows.append(
                {"text": f"{rng.choice(SUBJECTS)} {rng.choice((CONS, PROS)[label])} no {seed}{i}", "label": label}
            )
    return rows


def write(folder: Path, splits: dict[str, list[dict]], *, compress: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        name = f"{split}.jsonl.gz" if compress else f"{split}.jsonl"
        (folder / name).write_bytes(gzip.compress(data) if compress else data)
    return folder


@pytest.fixture
def splits() -> dict[str, list[dict]]:
    return {split: corpus(n, seed) for seed, (split, n) in enumerate(zip(SPLITS, (300, 80, 60, 80), strict=True))}


def test_prepare_makes_four_configurations(tmp_path: Path, splits: dict) -> None:
    data = prepare(str(write(tmp_path, splits)), seed=0, train_pairs=50)
    assert {config: set(parts) for config, parts in data.items()} == {
        "lines": {"train", "validation", "test"},
        "prompts": {"train", "validation", "test"},
        "preferences": {"train", "test"},
        "judge": {"train"},
    }
    for split in ("train", "validation", "test"):
        assert data["lines"][split] == [{"text": row["text"].lower()} for row in splits[split]]
    assert data["judge"]["train"] == [{**row, "text": row["text"].lower()} for row in splits["judge"]]
    assert len(data["preferences"]["train"]) == 50


def test_judge_split_affects_only_the_judge(tmp_path: Path, splits: dict) -> None:
    first = prepare(str(write(tmp_path / "a", splits)), seed=0)
    other = prepare(str(write(tmp_path / "b", splits | {"judge": corpus(50, 99)})), seed=0)
    assert first["judge"] != other["judge"]
    for config in ("lines", "prompts", "preferences"):
        assert first[config] == other[config]


def test_held_out_openings_are_neutral_supported_and_unseen_by_ppo(tmp_path: Path, splits: dict) -> None:
    splits["train"] += [{"text": f"rarely said thing {i}", "label": i % 2} for i in range(4)]
    prompts = prepare(str(write(tmp_path, splits)), seed=0)["prompts"]
    train, validation, test = ([row["prompt"] for row in prompts[split]] for split in ("train", "validation", "test"))
    assert test
    assert len({*test, *validation}) == len(test) + len(validation)
    assert not {*train} & {*test, *validation}
    assert "great" in train
    assert sum(prompt.startswith("rarely") for prompt in train) == 4, "too few to be held out"
    counted = [row for split in ("train", "validation", "test") for row in splits[split]]
    for opening in (*test, *validation):
        labels = [row["label"] for row in counted if row["text"].lower().startswith(opening + " ")]
        assert len(labels) >= 5
        assert 0.2 <= sum(labels) / len(labels) <= 0.8
        assert 1 <= len(opening.split()) <= 3


def test_pairs_join_pro_and_con_with_common_prefix(tmp_path: Path, splits: dict) -> None:
    for pro, con, prompt in (
        ("the zoom of it is a joy", "the zoom of it is poor", "the zoom of"),  # three words at most
        ("good zoom", "good zoom but slow", "good"),
    ):
        row = product_remarks._row(product_remarks.Remark(pro, 1), product_remarks.Remark(con, 0))
        assert row == {"prompt": prompt, "chosen": pro[len(prompt) :], "rejected": con[len(prompt) :]}
    preferences = prepare(str(write(tmp_path, splits)), seed=0)["preferences"]
    for split, rows in preferences.items():
        label = {row["text"].lower(): row["label"] for row in splits[split]}
        used: list[str] = []
        for row in rows:
            chosen, rejected = row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]
            assert (label[chosen], label[rejected]) == (1, 0)
            used += [chosen, rejected]
            if row["prompt"]:
                assert all(row[side].startswith(" ") and row[side].strip() for side in ("chosen", "rejected"))
            else:
                assert chosen.split()[0] != rejected.split()[0] or split == "train"
        assert len(used) == len(set(used))
    assert preferences["test"] and all(row["prompt"] for row in preferences["test"])
    assert {bool(row["prompt"]) for row in preferences["train"]} == {True, False}


def test_seed_changes_training_rows_but_not_evaluation(tmp_path: Path, splits: dict) -> None:
    source = str(write(tmp_path, splits))
    first, again, other = prepare(source, seed=0), prepare(source, seed=0), prepare(source, seed=1)
    assert first == again
    assert first["prompts"]["train"] != other["prompts"]["train"]
    assert first["preferences"]["train"] != other["preferences"]["train"]
    assert first["prompts"]["test"] == other["prompts"]["test"]
    assert first["preferences"]["test"] == other["preferences"]["test"]


def nltk_files(n: int = 400) -> dict[str, bytes]:
    rows = corpus(n, 7)
    lines: dict[int, list[str]] = {0: [], 1: []}
    for row in rows:
        tag = "Pros" if row["label"] else "Cons"
        lines[row["label"]].append(f"<{tag}>{row['text']}</{tag}>")
    lines[1] += ["<Pros>Excellent</Pros>", "<Pros>seen under both</Pros>", "<Pros>Said Twice</Pros>"]
    lines[1] += ["<Pros>said  twice</Pros>", "<Pros>caf\xe9 mode works</Pros>"]
    lines[0] += ["<Cons>Seen under BOTH</Cons>", "<Cons></Cons>"]
    return {
        "IntegratedPros.txt": "\n".join(lines[1]).encode("iso-8859-2"),
        "IntegratedCons.txt": "\r\n".join(lines[0]).encode("iso-8859-2"),
    }


@pytest.mark.parametrize("form", ["nltk_data", "nltk_data zip", "folder", "zip"])
def test_nltk_format_is_cleaned_and_split(tmp_path: Path, form: str) -> None:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    if "zip" in form:
        with zipfile.ZipFile(corpora / "pros_cons.zip", "w") as archive:
            for name, data in nltk_files().items():
                archive.writestr(f"pros_cons/{name}", data)
    else:
        (corpora / "pros_cons").mkdir()
        for name, data in nltk_files().items():
            (corpora / "pros_cons" / name).write_bytes(data)
    source = {"folder": corpora / "pros_cons", "zip": corpora / "pros_cons.zip"}.get(form, tmp_path)

    remarks = read_remarks(str(source))
    flat = [(remark.text, remark.label) for split in SPLITS for remark in remarks[split]]
    by_text = dict(flat)
    assert len(flat) == len(by_text) == 400 + 2
    assert by_text["Said Twice"] == 1
    assert by_text["café mode works"] == 1
    assert not {text for text in by_text if "<" in text or text.lower() in ("excellent", "seen under both", "")}
    shares = [len(remarks[split]) / len(flat) for split in SPLITS]
    assert shares == pytest.approx(list(SHARES.values()), abs=0.1)
    assert prepare(str(source), seed=0)["lines"]["train"]


def test_hub_format_finds_judge_split_by_file_name(tmp_path: Path, splits: dict, shared_hub) -> None:
    folder = write(tmp_path / "data", splits, compress=True)
    api = shared_hub.api()
    api.create_repo("local/remarks", repo_type="dataset")
    api.upload_folder(repo_id="local/remarks", repo_type="dataset", folder_path=folder)
    code = (
        "import json, sys; from rlhf_zoo.runs.corpora.product_remarks import prepare; "
        "json.dump(prepare('local/remarks', seed=0, train_pairs=20), open(sys.argv[1], 'w'))"
    )
    out = tmp_path / "out.json"
    shared_hub.python(f"import sys; sys.argv = ['', {str(out)!r}]; {code}")
    assert json.loads(out.read_text()) == prepare(str(folder), seed=0, train_pairs=20)
    said = shared_hub.python(
        "from rlhf_zoo.runs.corpora.product_remarks import prepare; from rlhf_zoo.errors import ZooError\n"
        "try: prepare('local/nothing', seed=0)\nexcept ZooError as error: print(error)"
    )
    assert "data set local/nothing cannot be loaded" in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("altered", "files", "said"),
    [
        ({"judge": None}, {}, "has no judge.jsonl"),
        ({"test": [{"text": "a remark without its label"}]}, {}, "no column 'label' in row 1"),
        ({"test": [{"text": "a remark", "label": 4}]}, {}, "row 1: text must be a string and label 0"),
        ({"validation": []}, {}, "split validation, is empty"),
        ({}, {"train.jsonl": "text,label\n"}, "train.jsonl cannot be read"),
        ({}, {"train.jsonl.gz": "no gzip"}, "train.jsonl.gz cannot be read"),
        ({}, {"IntegratedPros.txt": "<Pros>works very well</Pros>"}, "lacks IntegratedCons.txt"),
    ],
)
def test_prepare_rejects_bad_folders_and_says_how_to_fix_them(
    tmp_path: Path, splits: dict, altered: dict, files: dict[str, str], said: str
) -> None:
    write(tmp_path, {split: rows for split, rows in (splits | altered).items() if rows is not None})
    for name, content in files.items():
        (tmp_path / "train.jsonl").unlink(missing_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(ZooError, match=said):
        prepare(str(tmp_path), seed=0)


def test_missing_source_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"nltk\.download.*--dataset_name"):
        prepare(None, seed=0)
    with pytest.raises(ZooError, match=r'nltk.download\("pros_cons"\)'):
        prepare(str(tmp_path / "nothing"), seed=0)
    (tmp_path / "pros_cons.zip").write_bytes(b"no zip")
    with pytest.raises(ZooError, match=r"pros_cons\.zip cannot be read"):
        prepare(str(tmp_path / "pros_cons.zip"), seed=0)
    with pytest.raises(ZooError, match="opinion_lexicon"):
        lexicon(str(tmp_path / "nothing"))
    with pytest.raises(ZooError, match=r"train\.jsonl"):
        lexicon(str(tmp_path))


def test_lexicon_reads_both_formats(tmp_path: Path) -> None:
    rows = [{"word": "good", "label": 1}, {"word": "bad", "label": 0}, {"word": "envious", "label": 1}]
    folder = write(tmp_path / "folder", {"train": [*rows, {"word": "envious", "label": 0}]}, compress=True)
    nltk = tmp_path / "corpora" / "opinion_lexicon"
    nltk.mkdir(parents=True)
    (nltk / "positive-words.txt").write_text("; a comment\n\ngood\nenvious\n")
    (nltk / "negative-words.txt").write_text("; a comment\nbad\nenvious\n")
    assert lexicon(str(folder)) == lexicon(str(tmp_path)) == {"good": 1, "bad": -1}


def test_lexicon_judge_uses_lexicon_of_corpus(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "folder", {"train": [{"word": "good", "label": 1}, {"word": "bad", "label": 0}]}))
    flags = {"evaluation.lexicon": folder}
    judge = lexicon_judge(recipe_config(load_recipe("product-remarks"), flags))
    assert judge is not None and judge(["a", "a"], [" good", " bad"]) == [1.0, -1.0]
    assert lexicon_judge(recipe_config(load_recipe("product-remarks"))) is None
    with pytest.raises(ZooError, match=r"tiny_world_?2?:prepare reads no lexicon"):
        lexicon_judge(recipe_config(load_recipe("tiny-world"), flags))


def test_real_corpus_has_documented_sizes(real_data: Path) -> None:
    data = prepare(str(real_data / "pros_cons"), seed=0)
    assert [len(data["lines"][split]) for split in ("train", "validation", "test")] == [20150, 1585, 3217]
    assert len(data["judge"]["train"]) == 15252 and len(data["preferences"]["train"]) == 5000
    assert len(data["preferences"]["test"]) >= 250 and len(data["prompts"]["test"]) >= 170
    judged = {row["text"] for row in data["judge"]["train"]}
    assert not judged & {row["text"] for rows in data["lines"].values() for row in rows}
    signs = lexicon(str(real_data / "opinion_lexicon"))
    assert (signs["great"], signs["awful"], len(signs)) == (1, -1, 6783)
