"""The tiny world: its generator writes what its grammar reads, and its gold utility is total."""

import hashlib
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.evidence import MIN_PROMPTS
from rlhf_zoo.evaluation.prompt_groups import NEAR_DUPLICATES, group_prompts
from rlhf_zoo.runs.corpora.tiny_world_2 import (
    PARTS,
    TEMPERATURE,
    explain,
    generate_line,
    judge,
    preference,
    prepare,
    utility,
)
from rlhf_zoo.runs.corpora.tiny_world_2.grammar import read, subjects, tokenize
from rlhf_zoo.runs.corpora.tiny_world_2.lexicon import ASPECT_BY_NAME, ASPECTS, PRODUCTS
from rlhf_zoo.runs.recipe import load_recipe

seeds = st.integers(0, 2**32 - 1)
lines = seeds.map(lambda seed: generate_line(random.Random(seed)))
vocabulary = sorted({token for seed in range(300) for token in tokenize(generate_line(random.Random(seed)))})
salad = st.lists(st.sampled_from(vocabulary), max_size=40).map(" ".join)
property_based = settings(deadline=None, max_examples=150)

GOOD = "the phone's battery lasts two full days, so i stopped carrying a charger."


@property_based
@given(lines)
def test_generated_lines_parse(line: str) -> None:
    reading = read(line)
    assert (reading.stray_tokens, reading.repeated_word_count, reading.is_complete) == ((), 0, True)
    assert explain(line)["repetition"] == explain(line)["grammar"] == 0
    assert line == line.lower()
    assert 4 <= reading.word_count <= 40


@property_based
@given(st.one_of(st.text(), salad, lines))
def test_utility_is_finite_deterministic_sum_of_its_parts(text: str) -> None:
    explained = explain(text)
    assert math.isfinite(explained["utility"])
    assert explained["utility"] == pytest.approx(sum(explained[name] for name in PARTS))
    assert explain(text) == explained


@pytest.mark.parametrize("text", ["x " * 10_000, "the battery " * 5_000, "." * 10_000, "é☃\ud800 \x00", GOOD * 500])
def test_utility_of_long_or_odd_text_is_negative_and_finite(text: str) -> None:
    assert -math.inf < utility(text) < 0


@property_based
@given(lines, salad)
def test_appended_word_salad_does_not_raise_utility(line: str, junk: str) -> None:
    assert utility(f"{line} {junk}") <= utility(line)


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
def test_grammar_checks_number_agreement(text: str, right: bool) -> None:
    assert (explain(text)["grammar"] == 0) is right


def test_generated_lines_are_varied() -> None:
    rng = random.Random(0)
    drawn = [generate_line(rng) for _ in range(2_000)]
    assert len(set(drawn)) > 1_800


def test_prepare_is_reproducible_and_its_splits_are_disjoint() -> None:
    world, again, other = prepare(seed=3, lines=2_000), prepare(seed=3, lines=2_000), prepare(seed=4, lines=2_000)
    assert world == again
    assert world["lines"] != other["lines"] and world["prompts"] != other["prompts"]
    assert [len(world["lines"][split]) for split in ("train", "validation", "test")] == [2_000, 100, 100]
    for config, column in (("lines", "text"), ("prompts", "prompt")):
        every = [row[column] for rows in world[config].values() for row in rows]
        assert len(every) == len(set(every))
    assert [len(world["prompts"][split]) for split in ("train", "validation", "test")] == [352, 160, 80]
    with pytest.raises(ZooError, match="dataset_name"):
        prepare("some/data", seed=0)
    with pytest.raises(ZooError, match="at least 20"):
        prepare(seed=0, lines=5)


def test_held_out_openings_name_aspects_absent_from_training() -> None:
    named = {
        split: {(phrase.product, phrase.aspect) for row in rows for phrase in read(row["prompt"]).phrases}
        for split, rows in prepare(seed=0, lines=100)["prompts"].items()
    }
    every = {(product, aspect) for product in PRODUCTS for aspect in PRODUCTS[product]}
    assert set().union(*named.values()) == every and sum(map(len, named.values())) == len(every)


def test_training_openings_are_those_of_published_runs() -> None:
    """The split of the held-out pairs has changed since runs were published, and the training prompts have not."""
    prompts = [[row["prompt"] for row in prepare(seed=seed, lines=20)["prompts"]["train"]] for seed in range(1, 11)]
    frozen = "07eb276ecc3ab9212b3ab43a754b23075c0b29f0f219886d663a38d565edf15c"
    assert hashlib.sha256(json.dumps(prompts).encode()).hexdigest() == frozen


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_recipe_evaluates_enough_questions_each_equally_often(seed: int) -> None:
    keys = load_recipe("tiny-world").shared["evaluation"]
    assert keys["group"] == NEAR_DUPLICATES
    splits = prepare(seed=seed, lines=20)["prompts"]
    validation = [row["prompt"] for row in splits["validation"][: keys["checkpoint_prompts"]]]
    counts = Counter(group_prompts(validation))
    assert len(counts) == MIN_PROMPTS and set(counts.values()) == {5}
    test = Counter(group_prompts([row["prompt"] for row in splits["test"]]))
    assert len(splits["test"]) == keys["prompts"] and sorted(test.values()) == [8] * 10


def test_openings_are_neutral_and_begin_lines() -> None:
    for row in prepare(seed=0, lines=100)["prompts"]["test"]:
        (phrase,) = read(row["prompt"]).phrases
        assert (phrase.kind, phrase.polarity) == ("subject", 0)
        assert 3 <= len(row["prompt"].split()) <= 5
    openings = {one for product in PRODUCTS for aspect in PRODUCTS[product] for one in subjects(product, aspect)}
    rng = random.Random(0)
    for line in (generate_line(rng) for _ in range(200)):
        assert any(line.startswith(opening) for opening in openings)


def test_judge_scores_prompt_and_completion_together() -> None:
    prompt = "the phone's battery"
    assert judge([prompt, prompt], [GOOD[len(prompt) :], ""]) == [utility(GOOD), utility(prompt)]
    with pytest.raises(ValueError, match="2 prompts but 1"):
        judge([prompt, prompt], [""])


@given(a=lines, b=lines)
@property_based
def test_preference_probability_is_bradley_terry(a: str, b: str) -> None:
    gap = (utility(a) - utility(b)) / TEMPERATURE
    assert preference.probability(a, b) == pytest.approx(1 / (1 + math.exp(-gap)))
    assert preference.probability(a, b) + preference.probability(b, a) == pytest.approx(1)


def test_sampled_preferences_match_their_probability() -> None:
    assert preference.probability("x " * 10_000, GOOD) == 0 == 1 - preference.probability(GOOD, "x " * 10_000)
    better, worse = GOOD, "this tent's zips keep out rain."
    expected = preference.probability(better, worse)
    rng = random.Random(0)
    chosen = [preference(better, worse, rng) for _ in range(2_000)]
    assert set(chosen) == {0, 1} and 0.3 < expected < 0.95
    assert chosen.count(0) / 2_000 == pytest.approx(expected, abs=0.04)


def test_lexicon_is_complete() -> None:
    assert {aspect for aspects in PRODUCTS.values() for aspect in aspects} == set(ASPECT_BY_NAME)
    for aspect in ASPECTS:
        said = [*aspect.praise, *aspect.complaint, *aspect.good_outcomes, *aspect.bad_outcomes]
        assert len(said) == len(set(said))
        assert min(len(aspect.praise), len(aspect.complaint)) >= 3
