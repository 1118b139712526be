"""Verifiable rewards: what counts as an answer, a form, a length, a repetition; and how recipes come by them."""

import math
import pickle
import random
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import text as evaluation_text
from rlhf_zoo.plugins import load_object
from rlhf_zoo.rewards import (
    ExactMatch,
    FormatMatch,
    Length,
    NumericMatch,
    Repetition,
    Rewards,
    SoftOverlong,
    verifiable,
)
from rlhf_zoo.rewards.instructions import InstructionsFollowed
from rlhf_zoo.rewards.prose import Grammar, Refuses, Vader
from rlhf_zoo.rewards.relevance import Relevance
from rlhf_zoo.rewards.rule import last_message_text
from rlhf_zoo.rewards.verifiable import read_number

ENTRIES = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"][
    "rlhf_zoo.rewards"
]
ALL = [
    ExactMatch(),
    NumericMatch(),
    FormatMatch(pattern=r"\d+"),
    Length(),
    SoftOverlong(limit=5, margin=2),
    Repetition(),
]


def score(reward: Any, *completions: Any, **columns: Any) -> list[float | None]:
    return reward(prompts=[""] * len(completions), completions=list(completions), **columns)


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content} for content in contents]


# As rewards


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.name)
def test_verifiable_reward_is_named_frozen_and_picklable(reward: Any) -> None:
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward and again.__name__ == reward.name
    assert Rewards([reward]).names == [reward.name]
    with pytest.raises(AttributeError):
        reward.name = "another"


@pytest.mark.parametrize("reward", ALL, ids=lambda reward: reward.name)
def test_reward_scores_texts_and_conversations_alike(reward: Any) -> None:
    texts = ["42", "the answer is 42", "no", ""]
    rest: dict[str, Any] = {"answer": ["42", "42", "7", None], "completion_ids": [[1, 1], [1] * 6, [2], []]}
    if isinstance(reward, NumericMatch):
        expected = [1.0, 1.0, 0.0, None]
    elif isinstance(reward, ExactMatch):
        expected = [1.0, 0.0, 0.0, None]
    else:
        expected = reward([""] * 4, texts, **rest)
    assert score(reward, *texts, **rest) == expected == score(reward, *(chat("7", text) for text in texts), **rest)


def test_last_message_text_joins_text_parts() -> None:
    assert last_message_text("as it is") == "as it is"
    assert last_message_text(chat("first", "last")) == "last"
    for empty in ([{"role": "assistant", "tool_calls": []}], [], chat(None)):
        assert last_message_text(empty) == ""
    parts = [{"type": "text", "text": "a "}, {"type": "image", "image": 1}, {"type": "text", "text": "picture"}]
    assert last_message_text(chat(parts)) == "a picture"


def test_recipes_load_every_reward_by_name() -> None:
    """What pyproject.toml registers: ready-made objects where none needs a setting, else the class."""
    for name, target in ENTRIES.items():
        result = load_object(target, group="rlhf_zoo.rewards")
        made = result if name not in ("format_match", "soft_overlong") else None
        assert made is None or made.__name__ == name
    kinds = {load_object(target, group="rlhf_zoo.rewards") for target in ENTRIES.values()}
    kinds = {kind if isinstance(kind, type) else type(kind) for kind in kinds}
    public = {thing for name in verifiable.__all__ if isinstance(thing := getattr(verifiable, name), type)}
    public.discard(verifiable.Verifiable)
    assert kinds == public | {InstructionsFollowed, Grammar, Refuses, Relevance, Vader}
    assert public == {type(reward) for reward in ALL}


# Exact answers


@pytest.mark.parametrize(
    ("reward", "said", "answer", "wanted"),
    [
        (ExactMatch(), "Paris", "Paris", 1),
        (ExactMatch(), "  New \n York ", "New York", 1),
        (ExactMatch(), "paris", "Paris", 0),
        (ExactMatch(), "", "Paris", 0),
        (ExactMatch(), "", "", 1),
        (ExactMatch(), "7", 7, 1),
        (ExactMatch(), "Rome", ["Paris", "Rome"], 1),
        (ExactMatch(), "Rome", ["Paris", None], 0),
        (ExactMatch(), "Rome", None, None),
        (ExactMatch(), "Rome", [], None),
        (ExactMatch(), "Rome", math.nan, None),
        (ExactMatch(ignore_case=True), "STRASSE", "Straße", 1),
        (ExactMatch(marker="Answer:"), "Not Rome. Answer: Rome. Answer:  Paris \nThanks", "Paris", 1),
        (ExactMatch(marker="Answer:"), "Answer:\nParis", "Paris", 1),
        (ExactMatch(marker="Answer:"), "Paris", "Paris", 0),
        (ExactMatch(marker="####"), "so #### 42", "6 times 7 is 42\n#### 42", 1),
    ],
)
def test_exact_match_scores_answers(reward: ExactMatch, said: str, answer: Any, wanted: float | None) -> None:
    assert score(reward, said, answer=[answer]) == [wanted]


# Numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("1,234.50", 1234.5),
        ("It costs $1,200.00.", 1200),
        ("-3", -3),
        ("\N{MINUS SIGN}3", -3),
        ("x=-3", -3),
        ("$-5", -5),
        ("5-3", 3),
        ("1/2", 0.5),
        ("-1 / 4", -0.25),
        (".5", 0.5),
        ("6e-3", 0.006),
        ("42%", 42),
        ("#### 42", 42),
        ("_42_", 42),
        ("the 2nd", 2),
        (r"first \boxed{6}, no: \boxed{7}", 7),
        (r"\boxed{\text{about } 7\text{ cm}^2} of 9", 7),
        (r"\boxed{x_{10} = 7}", 7),
        (r"\boxed{\frac{1}{2}}", 0.5),
        (r"-\dfrac{3}{4}", -0.75),
        (r"\tfrac12", 0.5),
        (r"\boxed 7 of 9", 7),
        (r"\boxed{7", 7),
        (r"1\,234", 1234),
        ("1{,}234", 1234),
        ("1 1/2", 0.5),
        (r"1\frac{1}{2}", 0.5),
        ("1,2345", 2345),
        ("2024-01-31", 31),
        ("H2O", None),
        ("v1.2.3", None),
        (r"\boxed{none} of 9", None),
        ("1/0", None),
        ("1e999", None),
        ("-", None),
        ("", None),
    ],
)
def test_read_number_parses_text(text: str, number: float | None) -> None:
    assert read_number(text) == number


def test_read_number_starts_after_last_marker() -> None:
    assert read_number("#### 42 apples in 3 boxes", marker="####") == 42
    assert read_number("#### 1\n#### 42 apples", marker="####") == 42
    assert read_number("42", marker="####") is None
    assert read_number("####", marker="####") is None


def test_percent_sign_is_read_as_unit_or_hundredth() -> None:
    assert read_number("42%", percent="hundredth") == 0.42 and read_number("0.42", percent="hundredth") == 0.42
    hundredth, unit = NumericMatch(percent="hundredth"), NumericMatch()
    assert score(hundredth, "42%", "42", answer=[0.42, "42%"]) == [1, 0]
    assert score(unit, "42%", "42", answer=[0.42, "42%"]) == [0, 1]


@settings(deadline=None)
@given(st.integers(-(10**15), 10**15), st.sampled_from(["{}", "so {}.", "=={}==", r"\boxed{{{}}} of 9", "${}"]))
def test_read_number_parses_integers_as_python_prints_them(number: int, frame: str) -> None:
    assert read_number(frame.format(number)) == number
    assert read_number(frame.format(f"{number:,}")) == number


@settings(deadline=None)
@given(st.text(alphabet=r"0123456789.,/-+%$\{}^_ eEboxdfracx#" + "\n"))
def test_read_number_is_finite_or_none(text: str) -> None:
    number = read_number(text)
    assert number is None or math.isfinite(number)


@pytest.mark.parametrize(
    "text", ["9" * 10**5, ",123" * 10**5, "1/" * 10**5, r"\frac{" * 10**5, r"\boxed{" + "{" * 10**5, "x_a" * 10**5]
)
def test_read_number_takes_linear_time(text: str) -> None:
    """Quadratic time would be minutes here; what is seen is a tenth of a second."""
    started = time.monotonic()
    read_number(text)
    assert time.monotonic() - started < 10


def test_numeric_match_scores_answers_and_skips_missing_ones() -> None:
    answers = [42, "42", "6 times 7 is 42\n#### 42", [41, 42], np.float32(42), None, math.nan, []]
    assert score(NumericMatch(), *["It is 42."] * 8, answer=answers) == [1, 1, 1, 1, 1, None, None, None]
    assert score(NumericMatch(), *["It is 43."] * 8, answer=answers) == [0, 0, 0, 0, 0, None, None, None]
    assert score(NumericMatch(), "I do not know.", "1/3", answer=[42, "2/6"]) == [0, 1]
    seen: dict[str, list] = {}
    assert score(
        NumericMatch(name="sum", column="solution"), "so 7", "none", solution=[7, 7], answer=[8, 8],
        log_extra=seen.__setitem__,
    ) == [1, 0]  # fmt: skip
    assert seen == {"sum/read": [7.0, None]}


def test_numeric_match_requires_marker_in_completions_not_in_answers() -> None:
    marked = NumericMatch(marker="####")
    assert score(marked, "#### 42", "42", "#### 42 of 99", answer=["7 #### 42", "42", "42"]) == [1, 0, 1]


def test_numeric_match_tolerances_follow_isclose() -> None:
    assert score(NumericMatch(), "1000000", "0.1", answer=[1000001, 0.1 + 1e-12]) == [0, 1]
    assert score(NumericMatch(relative=0.01), "101", "102", answer=[100, 100]) == [1, 0]
    assert score(NumericMatch(absolute=0.5), "0.5", "0.6", answer=[0, 0]) == [1, 0]
    assert score(NumericMatch(relative=0, absolute=0), "0.3", answer=[0.1 + 0.2]) == [0]


def test_numeric_match_rejects_answer_without_number() -> None:
    with pytest.raises(ValueError, match="the column 'answer' holds 'unknown', which has no number"):
        score(NumericMatch(), "4", answer=["unknown"])


@pytest.mark.parametrize("reward", [ExactMatch(), NumericMatch()], ids=["exact", "numeric"])
def test_reward_rejects_missing_answer_column(reward: Any) -> None:
    with pytest.raises(
        ZooError, match=rf"{reward.name} reads the column 'answer', but the prompts have 'solution': set"
    ):
        score(reward, "4", solution=["4"], trainer_state=None, log_extra=lambda *_: None)
    with pytest.raises(ZooError, match="no columns but the prompt"):
        score(reward, "4", completion_ids=[[1]])


# Form


def test_format_match_matches_whole_text_or_searches() -> None:
    whole, part = FormatMatch(pattern=r"<a>\d+</a>"), FormatMatch(pattern=r"<a>\d+</a>", how="search")
    texts = ["<a>42</a>", " <a>42</a>\n", "so <a>42</a>", "<a>x</a>"]
    assert score(whole, *texts) == [1, 1, 0, 0]
    assert score(part, *texts) == [1, 1, 1, 0]
    assert score(FormatMatch(pattern="a|ab"), "ab") == [1], "also where the first branch would match a part"
    assert score(FormatMatch(pattern="a.b"), "a\nb") == [0] and score(FormatMatch(pattern="(?s)a.b"), "a\nb") == [1]
    assert score(FormatMatch(pattern="(?i)yes"), "YES") == [1]


def test_format_match_times_out_on_catastrophic_backtracking() -> None:
    """(a|aa)+ splits 60 letters in more ways than can be tried: without a limit this test would not end."""
    reward = FormatMatch(pattern="(?:a|aa)+$", how="search", timeout=0.2)
    assert score(reward, "a" * 60) == [1]
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"pattern '.*' took more than 0\.2 s on a completion of 61 characters"):
        score(reward, "a" * 60 + "b")
    assert time.monotonic() - started < 20


# Lengths


def test_length_counts_units_and_scores_distance_to_target() -> None:
    texts = ["a b  c", "", "abcd"]
    ids = [[1] * 5, [], [1]]
    assert score(Length(), *texts, completion_ids=ids) == [5, 0, 1]
    assert score(Length(unit="words"), *texts) == [3, 0, 1]
    assert score(Length(unit="characters"), *texts) == [6, 0, 4]
    targeted = score(Length(target=4), *[""] * 6, completion_ids=[[1] * n for n in (4, 3, 5, 0, 8, 100)])
    assert targeted == [0, -0.25, -0.25, -1, -1, -1] and math.copysign(1, targeted[0] or 0.0) == 1


def test_soft_overlong_equals_dapo_and_trl() -> None:
    """Equation 13 with L_max 20 and L_cache 8, at its corners; and TRL's at every length."""
    at = {0: 0, 12: 0, 13: -1 / 8, 16: -0.5, 20: -1, 21: -1, 500: -1}
    assert score(SoftOverlong(limit=20, margin=8), *[""] * 7, completion_ids=[[1] * n for n in at]) == list(at.values())
    every = [[1] * n for n in range(30)]
    for margin in (0, 1, 8, 20):
        ours = score(SoftOverlong(limit=20, margin=margin), *[""] * 30, completion_ids=every)
        assert ours == get_soft_overlong_punishment(20, margin)(completion_ids=every)
    assert score(SoftOverlong(limit=2, unit="words"), "a b", "a b c") == [0, -1]


def test_repetition_counts_repeated_ngrams_and_equals_trl() -> None:
    ids = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 1], [7], []]
    assert score(Repetition(n=2), *[""] * 5, completion_ids=ids) == [0, -0.75, -0.5, 0, 0]
    assert score(Repetition(n=1, unit="words"), "so so, SO!") == [-0.4]
    draw = random.Random(3)
    many = [[draw.randrange(4) for _ in range(draw.randrange(40))] for _ in range(50)]
    for n in (1, 3, 4):
        ours = score(Repetition(n=n), *[""] * 50, completion_ids=many)
        assert ours == pytest.approx(get_repetition_penalty_reward(n)(completion_ids=many), abs=1e-12)
        texts = [" ".join(map(str, row)) for row in many]
        expected = [-evaluation_text.repetition(text, n) for text in texts]
        assert score(Repetition(n=n, unit="words"), *texts) == pytest.approx(expected, abs=1e-12)
    assert Repetition().n == 4


@pytest.mark.parametrize("reward", [Length(), SoftOverlong(limit=3), Repetition()], ids=lambda reward: reward.name)
def test_token_count_reward_rejects_missing_token_ids(reward: Any) -> None:
    with pytest.raises(ZooError, match=f"{reward.name} counts tokens but got none: set its unit to 'words'"):
        score(reward, "a")


# Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExactMatch(marker=""), "marker of the reward exact_match is '': give a text, or leave it out"),
        (lambda: NumericMatch(relative=-1), "relative of the reward numeric_match is -1: give a tolerance"),
        (lambda: NumericMatch(absolute=math.inf), "absolute of the reward numeric_match is inf"),
        (lambda: FormatMatch(pattern="(a"), r"pattern of .* is '\(a': give a regular expression \(missing \)"),
        (lambda: FormatMatch(pattern="a", how="match"), "'fullmatch' or 'search'"),  # type: ignore[arg-type]
        (lambda: FormatMatch(pattern="a", timeout=0), "timeout of .* is 0: give a positive number of seconds"),
        (lambda: Length(target=0), "target of the reward length is 0: give a whole number of at least 1"),
        (lambda: Length(unit="lines"), "'tokens', 'words' or 'characters'"),  # type: ignore[arg-type]
        (lambda: SoftOverlong(limit=0), "limit of the reward soft_overlong is 0"),
        (lambda: SoftOverlong(limit=3, margin=4), "margin of .* is 4: give a whole number from 0 to the limit, 3"),
        (lambda: Repetition(n=0), "n of the reward repetition is 0"),
    ],
)
def test_verifiable_rewards_reject_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        make()


def test_rewards_have_strict_and_lenient_readings() -> None:
    messages = ["so 42", "#### 42", "#### 41, no: 42", "\\boxed{42}", "none"]
    answers = {"answer": ["6 times 7 #### 42"] * len(messages)}

    def read(reward: Any) -> list[list[float]]:
        return [rule(prompts=messages, completions=messages, **answers) for rule in (reward.strict, reward.lenient)]

    assert read(NumericMatch()) == [[0, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert read(NumericMatch(marker="so")) == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
    words = ["Paris", "it is paris.", "parisian", "Answer: Paris"]
    named = {"answer": ["Paris", "Paris", "Paris", ["Rome", "Paris"]]}
    exact = ExactMatch()
    assert isinstance(exact, verifiable.Verifiable) and not isinstance(Length(), verifiable.Verifiable)
    assert exact.strict(prompts=words, completions=words, **named) == [1, 0, 0, 0]
    assert exact.lenient(prompts=words, completions=words, **named) == [1, 1, 0, 1]
