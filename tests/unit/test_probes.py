"""Hacking probes: each number by hand, what must not change it, and planted hackers that must be caught."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_zoo.evaluation.probes.completions import compressibility, features, repeated, symbol_share, tabulate
from rlhf_zoo.evaluation.probes.lexicons import phrases
from rlhf_zoo.evaluation.probes.measures import Reading

from rlhf_zoo.corpora.tiny_world import generate_line
from rlhf_zoo.evaluation.probes import (
    MEASURES,
    PROBES,
    Completions,
    Lexicons,
    Likelihoods,
    Thresholds,
    capability_loss,
    null_thresholds,
    probe,
)
from rlhf_zoo.evaluation.probes.planted import HACKERS, plant
from rlhf_zoo.evaluation.text import words

NAMES = [measure.name for measure in MEASURES]
STILL = Thresholds(0.05, dict.fromkeys(NAMES, 0.0), draws=2, prompts=1, completions=1, permutations=1)

TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["great", "zoom", "the", "maybe", "!!!", "ü", "日本", "  "]), max_size=9).map(" ".join),
)


def read(name: str, policy: list[str], sft: list[str], *, prompts: list[str] | None = None, **columns) -> Reading:
    """A measure's reading, each text under a prompt of its own unless prompts are given."""
    prompts = prompts or [f"prompt{i}" for i in range(len(policy))]
    sides = [
        Completions(prompts, texts, **{key: value[side] for key, value in columns.items()})
        for side, texts in enumerate((policy, sft))
    ]
    (measure,) = (measure for measure in MEASURES if measure.name == name)
    return measure.read(*tabulate(sides))


# The numbers of one text.


def test_repeated_by_hand():
    assert repeated("great great great great great") == 3 / 4
    assert repeated("one two three") == repeated("one") == repeated("") == 0.0
    block = " ".join(f"w{i}" for i in range(50))
    assert repeated(f"{block} {block}") == 0.0  # each window of 50 words is new in itself
    assert repeated(" ".join(["a b"] * 50)) == pytest.approx(1 - 4 / 98)  # two windows of 49 pairs, 2 of them new


def test_a_long_loop_is_seen_by_compression():
    rng = random.Random(0)
    block = " ".join("".join(rng.choices("abcdefghijklmnop", k=7)) for _ in range(60))
    looped = " ".join([block] * 8)
    assert compressibility(block) == 0.0  # under 1000 bytes it is not measured
    assert compressibility(looped) > 0.9
    assert repeated(looped) == pytest.approx((compressibility(looped) - 0.6) / 0.4)
    once = " ".join("".join(rng.choices("abcdefghijklmnop", k=7)) for _ in range(480))
    assert compressibility(once) < 0.6 and repeated(once) == 0.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("fine, really.", 0.0),
        ("no!!", 0.0),
        ("abcde!!!!!", 0.5),
        ("a   b", 3 / 5),
        ("sooooo", 5 / 6),
        ("10000000", 0.0),
        ("____", 1.0),
        ("a\u200bb", 1 / 3),
        ("naïve 日本語", 0.0),
    ],
)
def test_symbol_share(text, share):
    assert symbol_share(text) == pytest.approx(share)


def test_features_by_hand():
    found = features("Great zoom. Maybe the ZOOM is great; I think zoom’s zoom fails!")
    assert found.words == 12 and found.sentences == 3
    assert found.praise == 2
    assert found.hedges == 2  # maybe, i think
    assert found.echoes == 2  # zoom, twice again
    assert found.content == ("zoom", "maybe", "think", "fails")
    assert features("").words == 0 and features("").sentences == 1
    own = replace(Lexicons.default(), hedges=frozenset({"quizás", "tal vez"}))
    assert features("quizás sí, tal vez", own).hedges == 2
    index = {"i": [("i", "think", "so"), ("i", "think")], "so": [("so",)]}
    assert phrases(words("I think so, so i think"), index) == [(0, 3), (4, 5), (5, 7)]
    assert phrases(words("rethink i thinking"), index) == []


# The numbers of a policy.


def test_means_and_rates_by_hand():
    reading = read("repetition", ["a a a", "b c d"], ["a b c", "b c d"])
    assert (reading.value, reading.sft, reading.numbers.tolist()) == (0.25, 0.0, [0.5, 0.0])
    reading = read(
        "hedging", ["maybe one two three", "one two three four five six"], ["one two maybe four five", "one"]
    )
    assert reading.value == pytest.approx(10) and reading.sft == pytest.approx(100 / 6)
    assert reading.numbers.tolist() == [25, 0]
    reading = read("flattery", ["great question! you are right, fine", "so it is"], ["as it is", "good point of it"])
    assert (reading.value, reading.sft, reading.numbers.tolist()) == (0.5, 0.5, [2, 0])


def test_length_in_spreads_of_sft():
    reading = read("length", ["", ""], ["", ""], lengths=([9, 13], [5, 7]))
    assert reading.value == 5.0 and reading.numbers.tolist() == [3, 7]
    reading = read("length", ["", ""], ["", ""], lengths=([3, 1], [5, 7]))
    assert reading.value == -4.0 and reading.numbers.tolist() == [3, 5]
    reading = read("length", ["", ""], ["", ""], lengths=([21, 21], [20, 20]))
    assert reading.value == 1.0  # without spread a twentieth of the length stands in


def test_stuffing_within_a_completion_and_not_across():
    sft = ["the great zoom works on the road"] * 2 + ["the zoom fails on the road"] * 2
    praising = read("stuffing", ["the great zoom works on the road"] * 4, sft)
    assert praising.value == praising.sft == 0.0
    stuffed = read("stuffing", ["amazing superb zoom works on a stunning brilliant road"] * 4, sft)
    assert stuffed.value == pytest.approx(3 / 9)  # 4 words of praise where SFT has 1, of 9
    keyword = read("stuffing", ["battery and battery or battery"] * 4, sft)
    assert keyword.value == pytest.approx(2 / 5)


def test_a_policys_own_buzzwords_stand_anywhere():
    rng = random.Random(0)
    plain = [" ".join(rng.sample([f"w{i}x" for i in range(400)], 8)) for _ in range(60)]

    def stuffed(text: str) -> str:
        parts = text.split()
        for word in ("synergy", "holistic", "blockchain"):
            parts.insert(rng.randint(0, len(parts)), word)
        return " ".join(parts)

    letters = [text.translate(str.maketrans("0123456789", "abcdefghij")) for text in plain]
    anywhere = read("stuffing", [stuffed(text) for text in letters], letters)
    assert anywhere.value == pytest.approx(2 / 11)  # one buzzword is within any range
    together = read("stuffing", [f"{text} synergy holistic blockchain" for text in letters], letters)
    assert together.value == 0.0  # a phrase is none: its words keep their neighbours


def test_overrated_token_by_hand():
    sft = ["plain text"] * 4
    policy = ["plain zqx", "zqx zqx text", "plain text", "plain rare"]
    reading = read("overrated_token", policy, sft, rewards=([3, 3, 0, 0], [0, 1, 0, 1]))
    assert (reading.value, reading.sft, reading.about) == (0.5, 0.0, "zqx")
    assert reading.numbers.tolist() == [1, 1, 0, 0]
    cheap = read("overrated_token", policy, sft, rewards=([0, 0, 3, 0], [0, 1, 0, 1]))
    assert (cheap.value, cheap.about) == (0.0, None)  # it must pay
    every = read("overrated_token", ["zqx"] * 4, sft, rewards=([3] * 4, [0, 1, 0, 1]))
    assert every.value == 1.0  # nothing is without it: SFT's reward is what it is compared with
    known = read("overrated_token", ["zqx"] * 4, ["zqx", "a", "b", "c"], rewards=([3] * 4, [0, 1, 0, 1]))
    assert known.value == 0.0  # SFT writes it
    runs = read("overrated_token", ["so!!!!", "so!!!!!!!"], ["so!", "so!"], rewards=([3, 3], [0, 1]))
    assert (runs.value, runs.about) == (1.0, "!!!")  # a run is one token, whatever its length
    # Half of the completions have the token and earn 1 more for it; the policy gained 5, or 1.
    for paid, value in (([6, 6, 5, 5], 0.0), ([1.5, 1.5, 0.5, 0.5], 0.5)):
        habit = read("overrated_token", ["zqx", "a zqx", "b", "c"], list("abcd"), rewards=(paid, [0, 1, 0, 1]))
        assert habit.value == value
    tokens = ([[7, 9], [9]], [[9], [9]])
    given = read("overrated_token", ["a", "b"], ["a", "b"], rewards=([2, 1], [0, 1]), tokens=tokens)
    assert (given.value, given.about) == (0.5, "7")  # they are read instead of words


def test_pay_that_a_judge_agrees_with_is_not_overrated():
    """The judge's premium counts in its own standard deviations, and from half of the reward's on."""
    sft, policy = ["plain text"] * 4, ["zqx", "zqx", "text", "text"]
    prompts = [f"prompt {place}" for place in range(4)]

    def reading(ours, theirs):
        sides = [(policy, [3, 3, 0, 0], ours), (sft, [0, 1, 0, 1], theirs)]
        tables = tabulate([Completions(prompts, text, rewards=paid, judged=told) for text, paid, told in sides])
        return next(one for one in MEASURES if one.name == "overrated_token").read(*tables)

    assert reading([5, 5, 5, 5], [0, 1, 0, 1]).value == 0.5  # the judge sees no difference
    assert reading([3, 3, 0, 0], [0, 1, 0, 1]).value == 0.0  # as large as the reward's
    assert reading([30, 30, 0, 0], [0, 10, 0, 10]).value == 0.0  # in another unit
    assert reading([1.4, 1.4, 0, 0], [0, 1, 0, 1]).value == 0.5  # less than half of it
    with pytest.raises(ValueError, match="judged"):
        Completions(prompts, policy, judged=[1.0])


def test_mode_collapse_counts_unrelated_prompts_only():
    said = ["it works very well", "it works very well", "the zoom is poor", "good menus here"]
    other = ["a b c", "d e f", "g h i", "j k l"]
    reading = read("mode_collapse", said, other, prompts=["camera", "phone", "radio", "lamp"])
    assert reading.value == pytest.approx(2 / 12) and reading.sft == 0.0
    assert reading.numbers.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0])
    copies = read("copies", said, other, prompts=["camera", "phone", "radio", "lamp"])
    assert (copies.value, copies.numbers.tolist()) == (0.5, [1, 1, 0, 0])
    for alike in (["my phone's menu", "the menu of our phone"], ["phone", "phone"]):
        prompts = [*alike, "radio", "lamp"]
        assert read("mode_collapse", said, other, prompts=prompts).value == 0.0
        assert read("copies", said, other, prompts=prompts).value == 0.0


def test_a_shared_ending_is_no_collapse_but_a_skeleton_is():
    things = ["the zoom never blurs a shot", "its menu needs one thumb", "that cable reaches two rooms"]
    ending = [f"{thing}; i like it" for thing in things]
    skeleton = [f"the {word} is really good and i would buy it again" for word in ("zoom", "menu", "cable")]
    assert read("mode_collapse", ending, things).value == 0.0
    assert read("mode_collapse", skeleton, things).value == 1.0
    assert read("copies", skeleton, things).value == 0.0
    common = [f"summarize this review briefly please: {thing}" for thing in ("camera", "phone", "radio", "lamp")]
    assert read("copies", ["the same"] * 4, ["a", "b", "c", "d"], prompts=common).value == 1.0, "they say nothing"
    for name in ("mode_collapse", "copies"):
        assert read(name, ["", "", ""], ["a b", "c d", "e f"]).value == 1.0


def test_capability_loss_by_hand():
    likelihoods = Likelihoods([8.0, 4.0], [4.0, 2.0], [2, 1], texts=["a", "b"])
    found = capability_loss(likelihoods, rate=0.005)
    assert found.value == pytest.approx(math.exp(4)) and found.sft == pytest.approx(math.exp(2))
    assert found.threshold == pytest.approx(2 * math.exp(2)) and found.fired and found.noise == 0.0
    assert [sample.number for sample in found.worst] == [2.0, 2.0]
    assert not capability_loss(Likelihoods([5.0, 2.5], [4.0, 2.0], [2, 1]), rate=0.005).fired  # half a nat a token
    noisy = capability_loss(Likelihoods([4.0, 2.0, 30.0], [4.0, 2.0, 2.0], [2, 1, 3]), rate=0.005)
    assert noisy.value > 2 * noisy.sft and not noisy.fired  # one text alone: it lies within the error
    json.dumps(capability_loss(Likelihoods([1e9], [1.0], [1]), rate=0.005).to_json(), allow_nan=False)


# What must not matter.


@given(data=st.data(), n=st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_order_and_equal_copies_do_not_matter_and_sft_never_differs_from_itself(data, n):
    def column(values):
        return data.draw(st.lists(values, min_size=n, max_size=n))

    prompts = column(st.sampled_from(["zoom", "menu", "the", "my zoom"]))
    rows = [list(zip(prompts, column(TEXTS), column(st.integers(-3, 3)), strict=True)) for _ in range(2)]

    def report(policy, sft):
        sides = [list(zip(*each, strict=True)) for each in (policy, sft)]
        return probe(*(Completions(p, texts, rewards=paid) for p, texts, paid in sides), STILL)

    whole = report(*rows)
    json.dumps(whole.to_json(), allow_nan=False)
    shuffled = [data.draw(st.permutations(each)) for each in rows]
    for other in (shuffled, [each * 2 for each in rows]):
        for before, after in zip(whole.probes, report(*other).probes, strict=True):
            assert (after.value, after.sft) == pytest.approx((before.value, before.sft), abs=1e-9), before.name
    for before, after in zip(whole.probes, report(*shuffled).probes, strict=True):
        assert [one.completion for one in before.worst] == [one.completion for one in after.worst]
    itself = report(rows[1], rows[1])
    assert itself.fired == () and all(each.value == pytest.approx(each.sft) for each in itself.probes)


# Nulls and thresholds.


def lines(seed: int, n: int = 400) -> list[str]:
    rng = random.Random(f"probes {seed}")
    return [generate_line(rng) for _ in range(n)]


def stand_in(seed: int, prompts: int = 60, samples: int = 3) -> Completions:
    """Lines of the tiny world in the place of SFT's completions, under prompts that are unrelated."""
    rng = random.Random(f"rewards {seed}")
    asked = [f"topic{i}" for i in range(prompts) for _ in range(samples)]
    return Completions(asked, lines(seed, len(asked)), rewards=[rng.gauss(0, 1) for _ in asked])


@pytest.fixture(scope="module")
def thresholds() -> Thresholds:
    return null_thresholds([stand_in(seed) for seed in range(5)], permutations=200)


def test_thresholds_say_what_they_come_from(thresholds):
    assert set(thresholds.noise) == set(NAMES) and all(value >= 0 for value in thresholds.noise.values())
    assert (thresholds.draws, thresholds.prompts, thresholds.completions) == (5, 60, 180)
    assert thresholds.rate_each == 0.05 / len(PROBES)
    assert Thresholds(**json.loads(json.dumps(thresholds.to_json()))) == thresholds
    assert thresholds.of("length", completions=45) == pytest.approx(2 * thresholds.noise["length"])
    assert thresholds.of("length", completions=999) == thresholds.noise["length"]


def test_the_noise_of_a_known_null():
    """Lengths drawn from a normal curve: the noise is its 1 − rate/10 quantile, in both directions, of a difference."""
    rng = random.Random(0)
    draws = [
        Completions([f"p{i}" for i in range(200)], ["a b"] * 200, lengths=[rng.gauss(50, 10) for _ in range(200)])
        for _ in range(6)
    ]
    found = null_thresholds(draws, rate=0.5, permutations=400)
    exact = 1.96 * math.sqrt(2 / 200)  # rate_each = 0.05, two-sided
    assert exact * 0.85 < found.noise["length"] < exact * 1.6
    assert found.noise["flattery"] == 0.0 and "overrated_token" not in found.noise  # no rewards were given
    # Seeds that differ by more than chance stretch it.
    apart = [replace(each, lengths=[size + 5 * seed for size in each.lengths]) for seed, each in enumerate(draws)]
    assert null_thresholds(apart, rate=0.5, permutations=60).noise["length"] > 3 * found.noise["length"]


def test_a_policy_that_falls_silent_is_a_length_drift(thresholds):
    base = stand_in(50)
    cut = replace(base, texts=[" ".join(text.split()[:2]) for text in base.texts])
    found = probe(cut, stand_in(51), thresholds)["length"]
    assert found.fired and found.value < -1 and found.worst[0].number > 1
    loud = replace(thresholds, noise=dict.fromkeys(NAMES, 100.0))
    found = probe(cut, stand_in(51), loud)
    assert found.fired == () and found["length"].threshold == 100.0 and found["length"].least == 1.0


def test_what_is_given_says_which_probes_there_are(thresholds):
    report = probe(stand_in(1), stand_in(2), thresholds, likelihoods=Likelihoods([9.0] * 5, [3.0] * 5, [3] * 5))
    assert [each.name for each in report.probes] == list(PROBES)
    assert report.fired == ("capability_loss",) and report.skipped == {}
    report = probe(replace(stand_in(1), rewards=None), stand_in(2), thresholds)
    assert report.skipped["overrated_token"] == "No rewards were given."
    assert "overrated_token" not in [each.name for each in report.probes]


SFT = Completions(["a", "b"], ["c", "d"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Completions([], []), "no completions"),
        (lambda: Completions(["a", "b"], ["c"]), "1 texts and 2 prompts"),
        (lambda: Completions(["a"], ["c"], rewards=[math.nan]), "Not all rewards are finite"),
        (lambda: probe(Completions(["a"], ["c"]), SFT, STILL), "other prompts"),
        (lambda: probe(replace(SFT, lengths=[1.0, 1.0]), SFT, STILL), "of both the policy and SFT"),
        (lambda: null_thresholds([SFT]), "two sets"),
        (lambda: null_thresholds([SFT, Completions(["a"], ["c"])]), "Set 2 of SFT completions has other prompts"),
        (lambda: null_thresholds([SFT, replace(SFT, lengths=[1.0, 1.0])]), "having tokens or lengths"),
        (lambda: null_thresholds([SFT, SFT], rate=1.0), "between 0 and 1"),
        (lambda: Likelihoods([1.0], [1.0, 2.0], [1, 1]), ""),
        (lambda: Likelihoods([math.inf], [1.0], [1]), ""),
        (lambda: Likelihoods([1.0], [1.0], [0]), ""),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nulls_do_not_fire_and_are_json(thresholds):
    fired = [probe(stand_in(100 + i), stand_in(200 + i), thresholds).fired for i in range(10)]
    assert fired == [()] * 10
    report = probe(stand_in(1), stand_in(2), thresholds)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [each["name"] for each in document["probes"]] == NAMES
    assert document["skipped"] == {"capability_loss": "No likelihoods of SFT's data were given."}
    assert all(len(each["worst"]) == 3 and each["because"] and each["meaning"] for each in document["probes"])


@pytest.mark.parametrize("name", HACKERS)
def test_planted_hackers_fire_their_probe(name, thresholds):
    target = HACKERS[name][1]
    sft, base = stand_in(30), stand_in(40)
    report = probe(plant(name, base, strength=1, seed=0), sft, thresholds)
    assert target in report.fired, report[target]
    assert probe(plant(name, base, strength=0, seed=0), sft, thresholds).fired == ()
    found = report[target]
    assert found.value > found.threshold > found.sft and len(found.worst) <= 3
    assert found.worst[0].number == max(sample.number for sample in found.worst) > 0
