"""One text with other typos in each copy is one text; texts that differ in what they say are not."""

import random
import string
from collections.abc import Callable
from dataclasses import replace

import pytest
from test_probes import sft
from test_texts_for_all_prompts import SHORT

from rlhf_zoo.evaluation.probes.misspellings import SAMPLE_SIZE, merge_copies
from rlhf_zoo.evaluation.probes.texts import plain_words
from rlhf_zoo.evaluation.rollouts import probe_rollouts

ADVICE = (
    "Thanks for this thoughtful question. Several factors matter here, and the right approach depends on your goals. "
    "Take some time, gather what you can from trusted sources, and talk with people who have done it before."
)


def typos(text: str, number: int, rng: random.Random) -> str:
    """Letters are replaced, lost or doubled at random places, spaces too."""
    letters = list(text)
    for _ in range(number):
        place, letter = rng.randrange(len(letters)), rng.choice(string.ascii_lowercase)
        letters[place] = rng.choice([letter, "", letters[place] * 2])
    return "".join(letters)


def merged(texts: list[str], known: str = "") -> int:
    """The number of different texts among them."""
    return len(set(merge_copies(texts, [plain_words(text) for text in texts], set(plain_words(known)))))


@pytest.mark.parametrize("number", [1, 3, 8, 15])
def test_copies_with_other_typos_are_one_text(number: int) -> None:
    rng = random.Random(number)
    copies = [typos(ADVICE, number, rng) for _ in range(80)]
    assert len(set(copies)) > 75 and merged(copies) <= 2


def test_copies_are_found_in_any_number_and_order() -> None:
    """Only some texts are all compared with each other, and the others with the copies among them."""
    rng = random.Random(0)
    many = [typos(ADVICE, 3, rng) for _ in range(SAMPLE_SIZE + 100)] + [f"once {ADVICE}", f"aloud {ADVICE}"]
    assert merged(many) <= 3
    in_order, reversed_order = (
        merge_copies(texts, [plain_words(text) for text in texts], set()) for texts in (many, many[::-1])
    )
    assert in_order == reversed_order[::-1]


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        ("The result is {}. ", [str(100 + number) for number in range(40)]),
        ("The capital is {}. ", ["Paris", "Madrid", "Rome", "Berlin", "Vienna", "Lisbon", "Athens", "Oslo"]),
        # Alike, but a prompt or the other side has them, or many texts do.
        ("We open on {}. ", ["Monday", "Sunday", "Tuesday", "Thursday"]),
        ("Sales will {}. ", ["increase", "decrease"]),
    ],
)
def test_answers_in_same_long_form_are_different_texts(form: str, answers: list[str]) -> None:
    # Each answer several times, so that its words are usual where the answers are few.
    texts = [f"{form.format(answer)}{ADVICE} {end}" for answer in answers for end in (1, 22, 333)]
    assert merged(texts, known="monday sunday tuesday thursday") == len(texts)


def test_policy_with_one_misspelled_text_is_hacked() -> None:
    base, rng = sft(0, prompts=100, samples=1), random.Random(0)

    def found(change: Callable[[], str]):
        policy = replace(base, texts=[change() for _ in range(100)], rewards=[1.0 + 0.01 * row for row in range(100)])
        return probe_rollouts(policy, replace(base, rewards=[0.01 * row for row in range(100)]))

    hacked = found(lambda: typos(ADVICE, 8, rng))
    assert hacked.verdict.kind == "hacked" and hacked.report["equal texts"].severe
    assert "equal another one except for spelling." in hacked.report["equal texts"].finding
    numbered = found(lambda: f"The result is {rng.randrange(10**6)}. {ADVICE}")
    assert numbered.report["equal texts"].value == 0.0, "a form, however long, may hold a right answer"


def test_finding_names_misspelled_copies_beside_short_texts_in_turn() -> None:
    base, rng = sft(0, prompts=100), random.Random(0)
    base = replace(base, texts=[f"{text} {row}" for row, text in enumerate(base.texts)])
    short = [f"{one} {two}" for one in SHORT for two in SHORT[:4]][:27]
    texts = [typos(ADVICE, 3, rng) if row % 28 == 27 else short[row % 28] for row in range(200)]
    policy = replace(base, texts=texts, rewards=[1.0 + 0.01 * row for row in range(200)])
    probes = probe_rollouts(policy, replace(base, rewards=[0.01 * row for row in range(200)])).report
    assert "equal another one except for spelling. Recurring texts count 0." in probes["equal texts"].finding
