"""Reviews and snippets: each form of the corpus, pairs of equal length, and labels of two sources."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_product_remarks import write

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.corpora.reviews import NLTK, PAIR_COUNTS, REVIEWS, SNIPPETS, SPLITS, prepare
from rlhf_zoo.runs.judge import shares_reward_labels
from rlhf_zoo.runs.recipe import load_recipe

Splits = dict[str, list[dict[str, Any]]]


def rows(corpus: str, split: str, n: int = 8) -> list[dict[str, Any]]:
    """Texts of different lengths, positive and negative in turn."""
    return [{"text": f"{corpus} {split}  {place}\n" + "word " * (place // 2), "label": place % 2} for place in range(n)]


def folder(place: Path) -> Path:
    for corpus in (REVIEWS, SNIPPETS):
        write(place / corpus, {split: rows(corpus, split) for split in SPLITS}, compress=True)
    return place


def test_prepare_makes_lines_preferences_and_judge_data(tmp_path: Path) -> None:
    data = prepare(str(folder(tmp_path)), seed=1)
    assert {name: set(splits) for name, splits in data.items()} == {
        "lines": {"train", "validation", "test"},
        "preferences": {"train", "test"},
        "judge": {"train"},
    }
    assert all(row["text"].startswith(f"{REVIEWS} test ") and "\n" not in row["text"] for row in data["lines"]["test"])
    assert {row["text"].split()[1] for row in data["judge"]["train"]} == {"judge"}
    assert {row["label"] for row in data["judge"]["train"]} == {0, 1}
    assert data == prepare(str(tmp_path), seed=2), "nothing is drawn"


def test_training_texts_exclude_prompts_of_held_out_reviews(tmp_path: Path) -> None:
    folder(tmp_path)
    prompt = "a tall stranger walks into the old saloon"
    texts = {"train": [f"we begin: {prompt.title()} - and leaves", "nothing else"], "test": [f"{prompt} and sits down"]}
    reviews = {
        split: [{"text": text, "label": 0} for text in texts.get(split, [])] + rows(REVIEWS, split) for split in SPLITS
    }
    write(tmp_path / REVIEWS, reviews, compress=True)
    kept = [row["text"] for row in prepare(str(tmp_path), seed=1)["lines"]["train"]]
    assert "nothing else" in kept and not any("Saloon" in text for text in kept)


def test_pairs_have_equal_length_and_use_each_snippet_once(tmp_path: Path) -> None:
    pairs = prepare(str(folder(tmp_path)), seed=1)["preferences"]["train"]
    assert len(pairs) == 4
    for pair in pairs:
        assert pair["prompt"] == "" and pair["chosen"].startswith(f"{SNIPPETS} train ")
        assert len(pair["chosen"].split()) == len(pair["rejected"].split())
        assert int(pair["chosen"].split()[2]) % 2 == 1 and int(pair["rejected"].split()[2]) % 2 == 0
    assert len({text for pair in pairs for text in (pair["chosen"], pair["rejected"])}) == 8


def test_prepare_accepts_one_data_set_with_corpus_column(tmp_path: Path) -> None:
    both = {
        split: [{"corpus": corpus, **row} for corpus in (REVIEWS, SNIPPETS) for row in rows(corpus, split)]
        for split in SPLITS
    }
    assert prepare(str(write(tmp_path / "one", both)), seed=1) == prepare(str(folder(tmp_path / "two")), seed=1)


def nltk(place: Path, *, zipped: bool) -> Path:
    """NLTK's files: a review in each, and all snippets of a label in one; spaces around marks."""
    files = {
        f"{NLTK[REVIEWS]}/{kind}/cv{n}.txt": f"{kind} film {n} , which ( alas ) is long .\nit's over .\n"
        for kind in ("pos", "neg")
        for n in range(40)
    }
    for kind in ("pos", "neg"):
        lines = "".join(f"{kind} snippet {n} , isn't it ?\n" for n in [*range(40), 0])
        files[f"{NLTK[SNIPPETS]}/rt-polarity.{kind}"] = lines
    files |= {f"{NLTK[REVIEWS]}/README": "read me", f"{NLTK[SNIPPETS]}/README.txt": "read me"}
    for name, text in files.items():
        path = place / "corpora" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not zipped:
            path.write_text(text)
            continue
        with zipfile.ZipFile(place / "corpora" / f"{name.split('/')[0]}.zip", "a") as archive:
            archive.writestr(name, text)
    return place


def test_nltk_folders_and_zips_are_cleaned_and_split(tmp_path: Path) -> None:
    data = prepare(str(nltk(tmp_path / "folders", zipped=False)), seed=1)
    assert data == prepare(str(nltk(tmp_path / "zips", zipped=True)), seed=1)
    reviews = [row["text"] for split in data["lines"].values() for row in split]
    judged = {row["text"]: row["label"] for row in data["judge"]["train"]}
    assert len(reviews) + len(judged) == 80 and not {*reviews} & judged.keys()
    assert reviews[0].endswith(", which (alas) is long. it's over.") and " film " in reviews[0]
    assert all(text.startswith("pos") == bool(label) for text, label in judged.items())
    sides = {side: {pair[side] for pair in data["preferences"]["train"]} for side in ("chosen", "rejected")}
    assert all(text.startswith("pos snippet") and text.endswith(", isn't it?") for text in sides["chosen"])
    assert all(text.startswith("neg snippet") for text in sides["rejected"])


def test_prepare_rejects_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="do not come with this package"):
        prepare(None, seed=1)
    with pytest.raises(ZooError, match=r"There is no data set at .*nothing.*nltk\.download"):
        prepare(str(tmp_path / "nothing"), seed=1)
    source = folder(tmp_path / "data")
    write(source / SNIPPETS, {"test": [{"text": "only praise", "label": 1}]}, compress=True)
    with pytest.raises(ZooError, match="rt_polarity, split test, needs texts of both labels"):
        prepare(str(source), seed=1)
    write(source / SNIPPETS, {"test": [{"text": "unsure", "label": 0.5}]}, compress=True)
    with pytest.raises(ZooError, match="split test, row 1: text must be a string and label 0"):
        prepare(str(source), seed=1)


@pytest.mark.parametrize(("name", "same"), [("smollm2-reviews", False), ("product-remarks", True)])
def test_reviews_judge_does_not_share_reward_labels(name: str, same: bool, tmp_path: Path) -> None:
    run = RunContext(load_recipe(name), tmp_path / "run", DEFAULT_HUB, namespace="local", publish=False)
    assert shares_reward_labels(run, "classifier") is same and shares_reward_labels(run, "same-labels")


def test_real_corpora_have_documented_sizes(real_data: Path) -> None:
    data = prepare(str(real_data), seed=1)
    sizes = {name: {split: len(part) for split, part in splits.items()} for name, splits in data.items()}
    assert sizes == {
        "lines": {"train": 949, "validation": 73, "test": 133},
        "preferences": PAIR_COUNTS,
        "judge": {"train": 841},
    }, "as the recipe's README has it"
    for pair in data["preferences"]["train"]:
        assert abs(len(pair["chosen"].split()) - len(pair["rejected"].split())) <= 6
