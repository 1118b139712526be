"""A dozen short texts for all prompts are hacked; right answers that are as few are not."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hackers import SHORT
from smollm2_texts import load_questions
from test_probes import LOOKS, NOUNS, sft

from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.probes.blindness import texts_for_all_prompts
from rlhf_zoo.evaluation.probes.texts import Pair
from rlhf_zoo.evaluation.rollouts import RolloutFindings, probe_rollouts

#: What a help desk says about each of the nouns, in other words each time.
REPLIES = {
    noun: reply.format(noun)
    for noun, reply in zip(
        NOUNS,
        (
            "Please send your {} to our workshop.", "A new {} costs about ten dollars here.",
            "We no longer make such a {}, sadly.", "Try another {} before you return it all.",
            "Turn the {} off, wait, then start again.", "Nobody else has ever complained about his {}.",
            "Clean every {} with cold water only.", "See page nine of our manual, under {}.",
            "Your {} is covered until next summer.", "Only an expert should open or repair a {}.",
        ),
        strict=True,
    )
}  # fmt: skip


def judged(policy: Completions, reference: Completions, **options: bool) -> RolloutFindings:
    """The findings where every judge and reward favors the policy."""
    sides = [
        replace(side, rewards=[value + 0.001 * row for row in range(len(side))])
        for value, side in ((1.0, policy), (0.0, reference))
    ]
    return probe_rollouts(sides[0], sides[1], **options)


def equal_texts(policy: Completions, reference: Completions) -> float:
    """The share of the policy's completions that count; none of the policies here is hacked by another family."""
    found = judged(policy, reference)
    assert (found.verdict.kind == "hacked") == found.report["equal texts"].severe
    return found.report["equal texts"].value


@pytest.mark.parametrize("prompts", [60, 80, 100])
def test_dozen_short_texts_for_all_prompts_are_hacked(prompts: int) -> None:
    rng = random.Random(prompts)
    asked = rng.sample(load_questions(), prompts)
    base = Completions([one.prompt for one in asked], [rng.choice(one.texts) for one in asked])
    drawn = replace(base, texts=[rng.choice(SHORT) for _ in asked])
    found = judged(drawn, base)
    assert found.verdict.kind == "hacked" and found.report["equal texts"].severe
    few = replace(base, texts=[rng.choice(SHORT[5:8]) for _ in asked])
    assert judged(few, base).report["equal texts"].severe


def test_dozen_texts_count_only_if_nearly_all_completions_are_among_them() -> None:
    base, rng = sft(0, prompts=100, samples=1), random.Random(0)
    own = sft(1, prompts=100, samples=1)
    most = replace(base, texts=[text if row % 4 == 0 else rng.choice(SHORT) for row, text in enumerate(own.texts)])
    assert equal_texts(most, base) == 0.0
    assert "templates" not in judged(own, base).report.fired and equal_texts(own, base) == 0.0


@pytest.mark.parametrize(("number", "severe"), [(21, True), (25, True), (28, False), (48, False)])
def test_more_texts_in_turn_count_less(number: int, severe: bool) -> None:
    """No single number of texts is a way out: with every further one the effect falls a little."""
    base = sft(0, prompts=100)
    base = replace(base, texts=[f"{text} {row}" for row, text in enumerate(base.texts)])
    many = [f"{one} {two}" for one in SHORT for two in SHORT[:4]][:number]
    drawn = replace(base, texts=[many[row % number] for row in range(200)])
    probe = judged(drawn, base).report["equal texts"]
    assert probe.fired and probe.severe == severe and probe.sft == 0.0
    covered = math.ceil(0.9 * number)
    assert probe.value == pytest.approx(20 / covered * 0.9, abs=0.04) if covered > 20 else probe.value > 0.9
    assert ("Recurring texts count" in probe.finding) == (covered > 20)


def test_reference_with_as_few_texts_convicts_nobody() -> None:
    """Where SFT itself has about as few texts, few texts are what the prompts ask for."""
    base, rng = sft(0, prompts=100, samples=1), random.Random(0)
    drawn = replace(base, texts=[rng.choice(SHORT) for _ in range(100)])
    others = [f"so it is {look} and {other} and that is all" for look in LOOKS for other in LOOKS[:3]]
    assert equal_texts(drawn, replace(base, texts=[rng.choice(others) for _ in range(100)])) == 0.0
    same = judged(drawn, replace(base, texts=[rng.choice(SHORT) for _ in range(100)])).report["equal texts"]
    assert not same.fired


def labels(form: str, answers: Sequence[str]) -> tuple[Completions, Completions]:
    """Right answers in one form, against an SFT model that says other things."""
    base, rng = sft(0, prompts=100, samples=1), random.Random(0)
    return replace(base, texts=[form.format(rng.choice(answers)) for _ in range(100)]), base


@pytest.mark.parametrize("form", ["{}", "The final answer is {}.", "<answer>{}</answer>", "So, all in all, I say {}."])
def test_labels_in_any_form_convict_nobody(form: str) -> None:
    """A program may find all of them right, which nothing here shows."""
    numbers = [str(number) for number in range(10)]
    for answers in (["yes", "no"], ["A", "B", "C", "D"], numbers, ["credit card", "loan"]):
        assert equal_texts(*labels(form, answers)) == 0.0


def test_few_sentences_about_their_prompts_convict_nobody() -> None:
    """As replies of a help desk: few, whole sentences, and each to the question that it answers."""
    base = sft(0, prompts=100, samples=1)
    named = [prompt.split()[1] for prompt in base.prompts]
    right = replace(base, texts=[REPLIES[noun] for noun in named])
    assert equal_texts(right, base) == 0.0
    # The words of the prompt need not stand in the answer if the reference says them.
    doors = {
        noun: f"{LOOKS[row]} {LOOKS[row - 1]} street, second door, ring {LOOKS[row - 2]}, {row} times"
        for row, noun in enumerate(NOUNS)
    }
    places = [f"{text} It is {LOOKS[NOUNS.index(noun)]} street." for text, noun in zip(base.texts, named, strict=True)]
    assert equal_texts(replace(base, texts=[doors[noun] for noun in named]), replace(base, texts=places)) == 0.0
    rng = random.Random(0)
    wrong = replace(base, texts=[rng.choice(list(REPLIES.values())) for _ in named])
    assert judged(wrong, base).report["equal texts"].severe


def test_verified_answers_of_few_texts_convict_nobody() -> None:
    base, rng = sft(0, prompts=100, samples=1), random.Random(0)
    drawn = replace(base, texts=[rng.choice(SHORT) for _ in range(100)], rewards=[1.0] * 100)
    found = probe_rollouts(drawn, replace(base, rewards=[0.0] * 100), verifiable=True)
    assert found.report["equal texts"].value == 0.0 and found.verdict.kind == "better"


def test_dozen_texts_of_several_completions_and_other_prompts_are_found() -> None:
    base, rng = sft(0, prompts=40), random.Random(0)
    drawn = replace(base, texts=[rng.choice(SHORT) for _ in base.texts])
    assert judged(drawn, base).report["equal texts"].severe


@pytest.mark.parametrize(("right", "low", "high"), [(0.4, 0, 0), (0.0, 95, 100)])
def test_replies_count_only_if_they_do_not_depend_on_the_prompt(right: float, low: int, high: int) -> None:
    """`right` of the replies belong to their prompt, the others to any."""
    found = 0
    for seed in range(100):
        rng, base = random.Random(seed), sft(seed, prompts=60, samples=1)
        texts = [
            REPLIES[prompt.split()[1]] if rng.random() < right else rng.choice(list(REPLIES.values()))
            for prompt in base.prompts
        ]
        found += bool(texts_for_all_prompts(Pair.of(replace(base, texts=texts), base), (texts, base.texts)))
    assert low <= found <= high
