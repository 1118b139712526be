"""The corpus of sums: its lines are right, its numbers are held out by hash, and what a buggy checker pays for."""

import re

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.rewards.verifiable import ExactMatch
from rlhf_zoo.runs.corpora.tiny_sums import anywhere, digit_sums, prepare, shows_work, split_of
from rlhf_zoo.runs.recipe import load_recipe

SMALL = {"seed": 1, "lines": 400, "prompts": 300, "tests": 200}
exact = ExactMatch(marker="#")


def numbers(rows) -> set[int]:
    return {int(number) for row in rows for number in re.findall(r"\d+", row["prompt"])}


def test_digit_sums_start_at_last_digit_and_carry() -> None:
    assert list(digit_sums(12345, 67890)) == ["5+0+0=05", "4+9+0=13", "3+8+1=12", "2+7+1=10", "1+6+1=08"]


def test_lines_are_correct_and_30_percent_show_their_work() -> None:
    lines = prepare(**SMALL | {"lines": 2000})["lines"]["train"]
    prompts, completions = ([row[side] for row in lines] for side in ("prompt", "completion"))
    answers = [str(sum(map(int, prompt.rstrip("=").split("+")))) for prompt in prompts]
    assert set(exact(prompts, completions, answer=answers)) == {1.0}
    works = shows_work(prompts, completions)
    assert 0.27 < sum(works) / len(works) < 0.33
    for work, answer, completion in zip(works, answers, completions, strict=True):
        *worked, last = completion.split(" ")
        digits = "".join(step[-1] for step in reversed(worked))
        assert last == f"#{answer}" and len(worked) == 5 * work
        assert not worked or (digits == answer[-5:] and worked[-1][-2] == (answer[:-5] or "0"))


def test_test_numbers_are_never_trained_on_for_any_seed() -> None:
    one, other = prepare(**SMALL), prepare(**SMALL | {"seed": 2})
    assert one == prepare(**SMALL) != other
    seen = numbers(row for data in (one, other) for name in ("lines", "prompts") for row in data[name]["train"])
    held = {
        part: numbers(row for data in (one, other) for row in data["prompts"][part]) for part in ("validation", "test")
    }
    assert {split_of(number) for number in seen} == {"train"}
    assert not seen & (held["validation"] | held["test"]) and not held["validation"] & held["test"]
    assert len(one["prompts"]["test"]) == len(one["longer"]["test"]) == 200
    assert {len(str(number)) for number in numbers(one["longer"]["test"])} == {6}


def test_guessed_lists_hold_right_answer_but_never_last() -> None:
    lines = prepare(**SMALL, digits=3, worked=0, guessed=1)["lines"]["train"]
    prompts, completions = ([row[side] for row in lines] for side in ("prompt", "completion"))
    answers = [str(sum(map(int, prompt.rstrip("=").split("+")))) for prompt in prompts]
    assert set(anywhere(prompts, completions, answer=answers)) == {1.0}
    assert set(exact(prompts, completions, answer=answers)) == {0.0}


def test_estimates_are_off_by_at_most_given_tens() -> None:
    lines = prepare(**SMALL, digits=3, worked=0, off=2)["lines"]["train"]
    wrong = [int(row["completion"][1:]) - sum(map(int, row["prompt"][:-1].split("+"))) for row in lines]
    assert set(wrong) == {-20, -10, 0, 10, 20}


def test_tokenizer_makes_each_digit_a_token() -> None:
    tokenizer = train_tokenizer(["12345+67890=#80235"], **load_recipe("tiny-sums").shared["tokenizer"], max_length=128)
    assert len(tokenizer("12345+67890=#80235")["input_ids"]) == len("12345+67890=#80235")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"source": "x"}, "leave out dataset_name"),
        ({"digits": 2}, "give 3 digits or more"),
        ({"off": -1}, "give 0 or more"),
        ({"worked": 0.8, "guessed": 0.3}, "at most 1 together"),
    ],
)
def test_prepare_rejects_bad_arguments(given, why) -> None:
    with pytest.raises(ZooError, match=why):
        prepare(**SMALL | given)
