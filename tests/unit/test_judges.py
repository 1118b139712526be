"""Judges score whole texts, are saved without pickle, and refuse what they cannot judge."""

import sys
import types

import numpy as np
import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.pairwise import FunctionPairJudge
from rlhf_zoo.evaluation.judges.scalar import ClassifierJudge, FunctionJudge, Judge, LexiconJudge

GOOD = ["great", "sharp", "easy", "bright", "sturdy"]
BAD = ["poor", "blurry", "awkward", "dim", "flimsy"]
THINGS = ["screen", "zoom", "menu", "lens", "case", "battery", "manual", "strap"]


def remarks(seed: int, size: int, noise: float = 0.0) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(size):
        label = int(rng.integers(2))
        picks = [f"{rng.choice(GOOD if label else BAD)} {rng.choice(THINGS)}" for _ in range(3)]
        rows.append({"text": ", ".join(picks), "label": label ^ int(rng.random() < noise)})
    return rows


@pytest.fixture(scope="module")
def classifier() -> ClassifierJudge:
    return ClassifierJudge.train(remarks(0, 400), seed=0)


@pytest.fixture
def module(monkeypatch):
    """A module `toy_judges` that a test fills."""
    module = types.ModuleType("toy_judges")
    monkeypatch.setitem(sys.modules, "toy_judges", module)
    return module


# classifier


def test_classifier_separates_and_reads_prompt_and_completion(classifier):
    good, bad, completed = classifier(["great", "poor", "the"], [" zoom", " zoom", " blurry zoom"])
    assert good > 0.75 and bad < 0.25 and completed < 0.25
    assert classifier([], []) == []
    assert isinstance(classifier, Judge) and classifier.name == "classifier"


def test_classifier_accuracy_is_of_texts_it_did_not_learn_from():
    """Labels that are pure noise cannot be predicted, however well they are remembered."""
    judge = ClassifierJudge.train(remarks(1, 2000, noise=0.5), seed=0)
    assert judge.accuracy.ci95[0] < 0.5 < judge.accuracy.ci95[1]
    judge = ClassifierJudge.train(remarks(1, 2000, noise=0.1), seed=0)
    assert 0.82 < judge.accuracy.value < 0.96
    assert "accuracy 0." in judge.description and f"{judge.accuracy.n} held-out" in judge.description


def test_equal_texts_stay_on_one_side_of_the_split():
    """200 distinct texts with random labels, ten times each: leaking copies would make the accuracy perfect."""
    rng = np.random.default_rng(0)
    rows = [{"text": f"word{index} thing{index}", "label": int(rng.integers(2))} for index in range(200)]
    copies = [
        {**row, "text": row["text"].upper() if copy % 2 else row["text"] + " "} for row in rows for copy in range(10)
    ]
    assert ClassifierJudge.train(copies, seed=0).accuracy.value < 0.7


def test_saved_classifier_gives_the_same_scores_and_holds_no_pickle(classifier, tmp_path):
    path = tmp_path / "deep" / "judge.npz"
    classifier.save(path)
    again = ClassifierJudge.train(remarks(0, 400), seed=0)
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes(), "training is seeded"
    loaded = ClassifierJudge.load(path)
    texts = [row["text"] for row in remarks(9, 50)]
    empty = [""] * len(texts)
    assert loaded(texts, empty) == classifier(texts, empty)
    assert loaded.accuracy == classifier.accuracy and loaded.description == classifier.description
    with np.load(path, allow_pickle=False) as arrays:
        assert not any(arrays[key].dtype.hasobject for key in arrays.files)


def test_classifier_load_rejects_other_files(tmp_path, classifier):
    with pytest.raises(ZooError, match="no judge at"):
        ClassifierJudge.load(tmp_path / "absent.npz")
    bad = tmp_path / "bad.npz"
    classifier.save(bad)
    whole = bad.read_bytes()
    for content in (b"", b"noise", whole[: len(whole) // 2]):
        bad.write_bytes(content)
        with pytest.raises(ZooError, match="not a saved judge"):
            ClassifierJudge.load(bad)
    np.savez(bad, header=np.array([{"schema": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ZooError, match="not a saved judge"):
        ClassifierJudge.load(bad)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"txt": "a", "label": 1}], "Row 0 for the judge has no column 'text', only txt, label"),
        ([{"text": "a"}], "no column 'label'"),
        ([{"text": "a", "label": "pos"}], "label 'pos': it must be 1 or 0"),
        ([{"text": "a", "label": 1}, {"text": "b", "label": 1}], "not both labels"),
        ([{"text": "a", "label": 1}, {"text": None, "label": 0}], "Row 1 for the judge has None as its text"),
        ([], "not both labels"),
    ],
)
def test_classifier_training_rejects_bad_rows(rows, message):
    with pytest.raises(ZooError, match=message):
        ClassifierJudge.train(rows, seed=0)


# lexicon


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("great zoom, easy menu, poor case", 1 / 3),
        ("a camera", 0.0),
        ("", 0.0),
        ("GREAT", 1.0),
        ("not great", -1.0),
        ("it isn't all that great", -1.0),  # three words after the negation
        ("it isn't all that really great", 1.0),  # four
        ("no, great", 1.0),  # punctuation ends the reach
        ("not flimsy", 1.0),
        ("never poor, great", 1.0),
        ("user-friendly", 1.0),  # a hyphenated entry
        ("easy-going but flimsy", 0.0),  # one that is none counts by its parts
        ("an a+ product", 1.0),
        ("cheap", 0.0),  # on both lists
        ("!!!", 0.0),
    ],
)
def test_lexicon_scores_words_and_negations(text, score):
    judge = LexiconJudge([*GOOD, "user-friendly", "a+", "cheap"], [*BAD, "cheap"])
    assert judge([""], [text]) == [pytest.approx(score)]
    assert judge([text], [""]) == [pytest.approx(score)]


def test_lexicon_words_are_trimmed_and_counted():
    judge = LexiconJudge(["Great "], ["poor"])
    assert judge(["great", "poor"], ["", ""]) == [1.0, -1.0]
    assert isinstance(judge, Judge) and "1 positive and 1 negative" in judge.description
    with pytest.raises(ZooError, match="needs words that are only positive"):
        LexiconJudge(["good"], ["good"])
    with pytest.raises(ValueError, match="2 prompts but 1 completions"):
        judge(["a", "b"], ["c"])


# function


def test_function_judge_scores_and_reads_docstring(module):
    def shout(prompts, completions):
        """Counts exclamation
        marks.

        More text."""
        return np.array([float((p + c).count("!")) for p, c in zip(prompts, completions, strict=True)])

    module.shout = shout
    judge = FunctionJudge("toy_judges:shout")
    assert judge(["a!", "b"], ["!", ""]) == [2.0, 0.0]
    assert (judge.name, judge.description) == ("shout", "Counts exclamation marks.")
    assert isinstance(judge, Judge)
    assert FunctionJudge("toy_judges:shout", name="loud", description="Loudness.").name == "loud"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, texts: 1 / 0, "raised ZeroDivisionError (division by zero): fix it."),
        (lambda: [1.0], "raised TypeError"),
        (lambda prompts, texts: None, "returned a NoneType: it must return a list of numbers."),
        (lambda prompts, texts: "1", "returned a str: it must return a list of numbers."),
        (lambda prompts, texts: ["1"], "gave '1' for completion 0: it must be a number."),
        (lambda prompts, texts: [float("nan")], "nan for completion 0"),
        (lambda prompts, texts: [None], "None for completion 0"),
        (lambda prompts, texts: [], "0 scores for 1"),
        (3, "is a int, not a function"),
    ],
)
def test_function_judge_rejects_invalid_functions(module, function, message):
    module.odd = function
    with pytest.raises(ZooError) as refused:
        FunctionJudge("toy_judges:odd")(["a"], [" b"])
    assert message in str(refused.value) and "toy_judges:odd" in str(refused.value)
    with pytest.raises(ZooError, match="did you mean 'odd'"):
        FunctionJudge("toy_judges:od")
    with pytest.raises(ZooError, match="toy_judges:odd"):
        FunctionPairJudge("toy_judges:odd").compare(["a"], [" b"], [" c"])
