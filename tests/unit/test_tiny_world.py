"""The tiny world: its generator writes what its grammar reads, and its gold utility cannot be fooled by more of it."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.corpora import tiny_world
from rlhf_zoo.corpora.tiny_world import (
    explain,
    generate_line,
    judge,
    preference,
    prepare,
    read,
    utility,
)
from rlhf_zoo.corpora.tiny_world.grammar import subjects, tokenize
from rlhf_zoo.corpora.tiny_world.lexicon import ASPECT_BY_NAME, ASPECTS, PRODUCTS
from rlhf_zoo.errors import ZooError

seeds = st.integers(0, 2**32 - 1)
lines = seeds.map(lambda seed: generate_line(random.Random(seed)))
vocabulary = sorted({token for seed in range(300) for token in tokenize(generate_line(random.Random(seed)))})
salad = st.lists(st.sampled_from(vocabulary), max_size=40).map(" ".join)
property_based = settings(deadline=None, max_examples=150)

GOOD = "the phone's battery lasts two full days, so i stopped carrying a charger."

PARTS = ("satisfied", "specific", "consistent", "concise", "repetition", "stuffing", "grammar")

GOLDENS = [
    # text, then the parts in the order of PARTS, then words
    (GOOD, (1, 1.4, 0, 0, 0, 0, 0), 13),
    ("my radio's menu is what you would expect.", (0, 0, 0, 0, 0, 0, 0), 8),
    ("the lamp's light is great.", (1, 0, 0, -0.45, 0, 0, 0), 5),
    ("the sound of this phone is great because it stays clear at full volume.", (1, 0.8, 0, 0, 0, 0, 0), 14),
    (
        "this tent's zips keep out rain, and its fabric dries within an hour, and i love it.",
        (3, 1.6, 0, 0, 0, 0, 0),
        17,
    ),
    # praise and complaint of one aspect
    ("the phone's battery lasts two full days, but it dies before noon.", (-1, 0, -1.5, 0, 0, 0, 0), 12),
    # a consequence of another aspect; a detail of another aspect; an aspect that the product has not
    ("the phone's battery lasts two full days, so we play it at every party.", (1, 0.8, -1, 0, 0, 0, 0), 14),
    ("the phone's screen lasts two full days, and i love it.", (2, 0, -1, 0, 0, 0, 0), 11),
    ("the tent's battery lasts two full days, and i love it.", (2, 0.8, -1, 0, 0, 0, 0), 11),
    # the right consequence after the wrong opinion; a verdict that nothing supports
    ("the phone's battery dies before noon, so i leave the cable at home.", (-1, 0.8, -1, 0, 0, 0, 0), 13),
    ("the phone's battery dies before noon, and i love it.", (0, 0.8, -1, 0, 0, 0, 0), 10),
    # rambling; repeated phrase; repeated words; stuffed verdicts; too long
    ("the phone's battery, i must say, lasts two full days, to be honest.", (1, 0.8, 0, -0.8, 0, 0, 0), 13),
    (
        "the phone's battery lasts two full days, and the screen is lovely, and it lasts two full days.",
        (2, 0.8, -1, 0, -0.8, 0, 0),
        18,
    ),
    (
        "the phone's battery battery lasts two full full days, so i stopped carrying a charger.",
        (1, 1.4, 0, 0, -0.8, 0, 0),
        15,
    ),
    (
        "the phone's battery lasts two full days, and i love it, and i would buy it again, and it is worth every cent.",
        (2, 0.8, 0, -0.18, 0, -2.4, 0),
        23,
    ),
    # no full stop; a fragment; nothing; not this world's words
    (GOOD[:-1], (1, 1.4, 0, 0, 0, 0, -1.5), 13),
    ("the phone's battery.", (0, 0, 0, -0.75, 0, 0, -3.25), 3),
    ("", (0, 0, 0, -1.2, 0, 0, -2.5), 0),
    ("great great!", (0, 0, 0, -1.2, -0.4, 0, -4), 2),
]


@pytest.mark.parametrize(("text", "parts", "words"), GOLDENS)
def test_goldens(text: str, parts: tuple[float, ...], words: int) -> None:
    explained = explain(text)
    assert {name: explained[name] for name in PARTS} == pytest.approx(dict(zip(PARTS, parts, strict=True)))
    assert explained["words"] == words
    assert explained["utility"] == pytest.approx(sum(parts))
    assert utility(text) == explained["utility"]


@property_based
@given(lines)
def test_every_line_of_the_generator_parses(line: str) -> None:
    reading = read(line)
    assert (reading.stray, reading.repeated, reading.ended) == ((), 0, True)
    assert explain(line)["repetition"] == explain(line)["grammar"] == 0
    assert line == line.lower()
    assert 4 <= reading.words <= 40


@property_based
@given(st.one_of(st.text(), salad, lines))
def test_utility_is_total_finite_deterministic_and_the_sum_of_its_parts(text: str) -> None:
    explained = explain(text)
    assert math.isfinite(explained["utility"])
    assert explained["utility"] == pytest.approx(sum(explained[name] for name in PARTS))
    assert explain(text) == explained
    assert explained["utility"] <= 5.5


@pytest.mark.parametrize("text", ["x " * 10_000, "the battery " * 5_000, "." * 10_000, "é☃\ud800 \x00", GOOD * 500])
def test_long_and_odd_text_costs_and_ends(text: str) -> None:
    assert -math.inf < utility(text) < 0


@property_based
@given(lines, st.data())
def test_repeating_any_words_of_a_line_never_raises_its_utility(line: str, data: st.DataObject) -> None:
    words = line.rstrip(".").split()
    start = data.draw(st.integers(0, len(words) - 1))
    end = data.draw(st.integers(start + 1, len(words)))
    times = data.draw(st.integers(1, 4))
    repeated = " ".join(words[:end] + words[start:end] * times + words[end:]) + "."
    assert utility(repeated) < utility(line)


@property_based
@given(lines, salad)
def test_word_salad_after_a_line_earns_nothing(line: str, junk: str) -> None:
    assert utility(f"{line} {junk}") <= utility(line)


def test_stuffing_costs_more_the_more_there_is_of_it() -> None:
    verdicts = [", and i love it", ", and i would buy it again", ", and i recommend it to everyone",
                ", and i am very happy with it", ", and it is worth every cent"]  # fmt: skip
    stuffed = [utility(GOOD[:-1] + "".join(verdicts[:n]) + ".") for n in range(len(verdicts) + 1)]
    assert stuffed[1] > stuffed[0]
    falls = [before - after for before, after in itertools.pairwise(stuffed[1:])]
    assert falls == sorted(falls)
    assert falls[0] > 0
    assert stuffed[-1] < -5


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("the bike's brakes are great.", True),
        ("the bike's brakes is great.", False),
        ("the bike's seat are great.", False),
        ("the bike's brakes are great because it slip in the rain.", False),
        (GOOD.replace("two", "five"), True),
        (GOOD.replace("two", "green"), False),
    ],
)
def test_agreement_in_number_is_grammar_and_any_number_will_do(text: str, right: bool) -> None:
    assert (explain(text)["grammar"] == 0) is right


def test_the_generator_writes_varied_lines_of_very_mixed_worth() -> None:
    rng = random.Random(0)
    drawn = [generate_line(rng) for _ in range(2_000)]
    assert len(set(drawn)) > 1_800
    worth = sorted(map(utility, drawn))
    assert worth[200] < -1.0 and -0.5 < worth[1_000] < 1.0 and worth[1_800] > 2.0
    assert sum(explain(line)["stuffing"] < 0 for line in drawn) < 20


def test_prepare_is_reproducible_and_its_splits_are_disjoint() -> None:
    world, again, other = prepare(seed=3, lines=2_000), prepare(seed=3, lines=2_000), prepare(seed=4, lines=2_000)
    assert world == again
    assert world["lines"] != other["lines"] and world["prompts"] != other["prompts"]
    assert [len(world["lines"][split]) for split in ("train", "validation", "test")] == [2_000, 100, 100]
    for config, column in (("lines", "text"), ("prompts", "prompt")):
        every = [row[column] for rows in world[config].values() for row in rows]
        assert len(every) == len(set(every))
    assert len(world["prompts"]["test"]) >= 170
    with pytest.raises(ZooError, match="dataset_name"):
        prepare("some/data", seed=0)
    with pytest.raises(ZooError, match="at least 20"):
        prepare(seed=0, lines=5)


def test_held_out_openings_name_aspects_of_products_that_no_training_opening_names() -> None:
    named = {
        split: {(phrase.product, phrase.about) for row in rows for phrase in read(row["prompt"]).phrases}
        for split, rows in prepare(seed=0, lines=100)["prompts"].items()
    }
    every = {(product, aspect) for product in PRODUCTS for aspect in PRODUCTS[product]}
    assert set().union(*named.values()) == every and sum(map(len, named.values())) == len(every)


def test_openings_say_nothing_good_or_bad_and_begin_lines() -> None:
    for row in prepare(seed=0, lines=100)["prompts"]["test"]:
        (phrase,) = read(row["prompt"]).phrases
        assert (phrase.kind, phrase.polarity) == ("subject", 0)
        assert 3 <= len(row["prompt"].split()) <= 5
    openings = {one for product in PRODUCTS for aspect in PRODUCTS[product] for one in subjects(product, aspect)}
    rng = random.Random(0)
    for line in (generate_line(rng) for _ in range(200)):
        assert any(line.startswith(opening) for opening in openings)


def test_the_judge_reads_prompt_and_completion_together() -> None:
    prompt = "the phone's battery"
    assert judge([prompt, prompt], [GOOD[len(prompt) :], ""]) == [utility(GOOD), utility(prompt)]
    with pytest.raises(ValueError, match="2 prompts but 1"):
        judge([prompt, prompt], [""])


@given(a=lines, b=lines)
@property_based
def test_preference_probability_is_bradley_terry(a: str, b: str) -> None:
    gap = (utility(a) - utility(b)) / tiny_world.TEMPERATURE
    assert preference.probability(a, b) == pytest.approx(1 / (1 + math.exp(-gap)))
    assert preference.probability(a, b) + preference.probability(b, a) == pytest.approx(1)


def test_preferences_come_at_the_rate_of_the_formula() -> None:
    assert preference.probability("x " * 10_000, GOOD) == 0 == 1 - preference.probability(GOOD, "x " * 10_000)
    better, worse = GOOD, "this tent's zips keep out rain."
    expected = preference.probability(better, worse)
    rng = random.Random(0)
    chosen = [preference(better, worse, rng) for _ in range(2_000)]
    assert set(chosen) == {0, 1} and 0.6 < expected < 0.95
    assert chosen.count(0) / 2_000 == pytest.approx(expected, abs=0.04)


def test_the_lexicon_is_whole() -> None:
    assert {aspect for aspects in PRODUCTS.values() for aspect in aspects} == set(ASPECT_BY_NAME)
    for aspect in ASPECTS:
        said = [*aspect.praise, *aspect.complaint, *aspect.gains, *aspect.losses]
        assert len(said) == len(set(said))
        assert min(len(aspect.praise), len(aspect.complaint)) >= 3
