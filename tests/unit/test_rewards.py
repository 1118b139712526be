"""Rewards: functions in TRL's convention, models by ids or by text, one weighted sum."""

import asyncio
import functools
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from trainer_fixture import EOS, PAD, make_policy, make_reward_model, make_tokenizer
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.sampling.sampler import Samples, sample
from rlhf_zoo.rewards import RewardModel, Rewards

PROMPTS = ["abc", "d", "fg"]


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Three completions of different lengths, one of them ended."""
    tokenizer = make_tokenizer()
    made = sample(
        make_policy(tokenizer), [tokenizer(p)["input_ids"] for p in PROMPTS], keys=[(i,) for i in range(3)], seed=1,
        max_new_tokens=8, stop_ids=[EOS], pad_id=PAD,
    )  # fmt: skip
    assert made.ended.any() and not made.ended.all()
    return made


def call(rewards: Rewards, samples: Samples, **columns: Any) -> Any:
    tokenizer = make_tokenizer()
    completions = tokenizer.batch_decode(samples.completion_id_lists(), skip_special_tokens=True)
    texts = [p + c for p, c in zip(PROMPTS, completions, strict=True)]
    state = columns.pop("trainer_state", None)
    return rewards(samples, PROMPTS, completions, texts, columns, trainer_state=state)


def one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def some(completions: list[str], **_: Any) -> list[float | None]:
    return [None, 2.0, -4.0]


# Functions


def test_total_is_weighted_sum_of_applicable_rewards(samples: Samples) -> None:
    scored = call(Rewards([one, some], weights=[0.5, 3.0]), samples)
    assert scored.total.tolist() == [0.5, 6.5, -11.5]
    assert scored.per_reward[:, 0].tolist() == [1, 1, 1] and scored.per_reward[1:, 1].tolist() == [2, -4]
    assert math.isnan(scored.per_reward[0, 1])
    assert call(Rewards([one, some]), samples).total.tolist() == [1, 3, -3]
    watched = call(Rewards([one, some], weights=[1.0, 0.0]), samples)
    assert watched.total.tolist() == [1, 1, 1] and watched.per_reward[2, 1] == -4


class Judge:
    def __call__(self, **_: Any) -> list[float]:
        return [0.0] * 3

    def strictly(self, **_: Any) -> list[float]:
        return [-1.0] * 3


def test_reward_names_follow_grpo_and_are_unique() -> None:
    class Named:
        __name__ = "politeness"

        def __call__(self, **_: Any) -> list[float]:
            return [0.0] * 3

    def one_1(**_: Any) -> list[float]:
        return [3.0] * 3

    model = RewardModel(make_reward_model(), make_tokenizer(), make_tokenizer())
    nested = functools.partial(functools.partial(some, extra=1), extra=2)
    for given, names in (
        ([one, one, model, Judge()], ["one_0", "one_1", "reward_model", "Judge"]),
        ([nested, Named(), functools.partial(Judge()), Judge().strictly], ["some", "politeness", "Judge", "strictly"]),
        ([one, one, one_1], ["one_0", "one_1_", "one_1"]),
    ):
        assert Rewards(given).names == names


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([one, Judge], None, r"The reward Judge is a class instead of an object: use Judge\(…\)"),
        (["one"], None, "'one' cannot score"),
        ([], None, "PPO has no reward"),
        ([one, some], [1.0], "has 1 numbers for 2 rewards"),
    ],
)
def test_rewards_reject_bad_lists_and_weights(rewards: list[Any], weights: list[float] | None, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        Rewards(rewards, weights=weights)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16),
        np.array([1, 2, 3], dtype=np.int16),
        [torch.tensor(1.0), np.float32(2), np.array([3.0])],
        [True, Fraction(2), Decimal("3")],
        (n for n in (1, 2, 3)),
    ],
    ids=["column", "array", "scalars", "kinds of numbers", "generator"],
)
def test_numpy_and_torch_scores_are_accepted(samples: Samples, values: Any) -> None:
    assert call(Rewards([lambda **_: values]), samples).total.tolist() == [1, 2, 3]


def test_reward_function_cannot_change_inputs_of_the_next(samples: Samples) -> None:
    def spoil(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        prompts.clear()
        completions[0] = "spoiled"
        completion_ids[0].clear()
        return [0.0] * 3

    def count(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert prompts == PROMPTS and "spoiled" not in completions
        return [float(len(ids)) for ids in completion_ids]

    lengths = [len(ids) for ids in samples.completion_id_lists()]
    assert call(Rewards([spoil, count]), samples).total.tolist() == lengths and lengths[0] > 0


@pytest.mark.parametrize("wait", [False, True])
def test_reward_function_cannot_change_columns_or_messages(samples: Samples, wait: bool) -> None:
    """Nor what a reward model reads, a table shows, and the next update is told of the same rows."""
    seen: list[dict[str, Any]] = []

    def spoil(prompts: Any, completions: Any, answer: Any, tests: Any, **_: Any) -> list[float]:
        seen.append(deepcopy({"prompts": prompts, "completions": completions, "answer": answer, "tests": tests}))
        prompts[0][0]["content"] = completions[0][0]["content"] = "spoiled"
        completions[1].clear()
        answer.sort()
        tests[0]["cases"].append("spoiled")
        tests[1].clear()
        return [0.0] * 3

    async def spoil_later(**given: Any) -> list[float]:
        return spoil(**given)

    def keep(**given: Any) -> list[float]:
        seen.append({name: given[name] for name in ("prompts", "completions", "answer", "tests")})
        return [0.0] * 3

    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    completions = [[{"role": "assistant", "content": "a"}] for _ in PROMPTS]
    columns = {"answer": [3, 2, 1], "tests": [{"cases": ["x"]}, {"cases": ["y"]}, {"cases": []}]}
    given = {"prompts": prompts, "completions": completions, **columns}
    before = deepcopy(given)
    Rewards([spoil_later if wait else spoil, keep])(samples, prompts, completions, PROMPTS, columns)
    assert given == before and all(each == before for each in seen) and len(seen) == 2


def test_trl_reward_functions_work_unchanged(samples: Samples) -> None:
    functions = [get_soft_overlong_punishment(4, 2), get_repetition_penalty_reward(1)]
    scored = call(Rewards(functions), samples)
    for column, function in enumerate(functions):
        assert scored.per_reward[:, column].tolist() == pytest.approx(
            function(samples.completion_id_lists()), abs=1e-7
        )  # float32
    assert Rewards(functions).names == ["soft_overlong_punishment_reward", "repetition_penalty_reward"]

    chats = [[{"role": "assistant", "content": text}] for text in ("<think>a</think>b", "b", "<think>a")]
    scored = Rewards([think_format_reward])(samples, PROMPTS, chats, [""] * 3, {})
    assert scored.total.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "wrong returned 2 rewards for 3 completions"),
        ([1.0, 2.0, math.nan], "wrong returned nan for row 2, prompt 'fg'"),
        ([1.0, -math.inf, 2.0], "wrong returned -inf for row 1, prompt 'd'"),
        (1.0, "wrong returned 1.0 instead of a list of numbers"),
        ("123", "wrong returned '123' instead of a list"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "wrong returned {.* instead of a list"),
        ([1.0, 2.0, "3.0"], "wrong returned '3.0' instead of a number for row 2, prompt 'fg'"),
        (
            [[1.0], 2.0, 3.0],
            r"does not fit the completion of row 0, prompt 'abc' \(1 numbers for 8 tokens, .*\): return one number for",
        ),
        ([1.0, 2.0, torch.ones(2, 2)], r"wrong returned tensor\(.* instead of a number for row 2"),
        ([["1"] * 8, 2.0, 3.0], r"wrong returned \['1', .* instead of a number for row 0"),
        ([[math.nan] * 8, 2.0, 3.0], "wrong returned nan for row 0"),
        ([[3e38] * 8, 2.0, 3.0], r"wrong returned 2.*e\+39 for row 0"),
        ([[(0, 2)], 2.0, 3.0], r"row 0, prompt .* \(\(0, 2\) is not a span \(start, end, value\)\)"),
        ([[(2, 2, 1.0)], 2.0, 3.0], r"row 0, prompt .* \(the span from 2 to 2 is not in the text of 6 characters\)"),
        ([[(0, 99, 1.0)], 2.0, 3.0], r"row 0, prompt .* \(the span from 0 to 99 is not in the text of 6 characters\)"),
        ([[(0, 2, 1.0)], 2.0, 3.0], r"row 0, prompt .* \(spans need a tokenizer to find their tokens\)"),
        ([1.0, 1e39, 2.0], r"wrong returned 1e\+39 for row 1, prompt 'd': return a number that is finite in float32"),
        ([1.0, 2.0, 10**400], "wrong returned inf for row 2"),
        ([1.0, None, 2.0], "No reward applies to the prompt 'd' of row 1, because wrong returned None"),
        (ValueError("no"), "wrong raised ValueError: no on row 0, prompt 'abc'"),
        (ValueError("no\nnot at all"), "wrong raised ValueError: no on row 0"),
        (ZooError("Give a better list."), "^Give a better list.$"),
    ],
)
def test_malformed_result_names_reward_function(samples: Samples, values: Any, message: str) -> None:
    def wrong(**_: Any) -> Any:
        if isinstance(values, Exception):
            raise values
        return values

    with pytest.raises(ZooError, match=message) as caught:
        call(Rewards([wrong]), samples)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["function", "generator", "coroutine"])
def test_raising_row_is_named_with_its_exception(samples: Samples, kind: str) -> None:
    seen: list[tuple[Any, ...]] = []

    def check(prompts: list[str], topic: list[str], trainer_state: Any, log_metric: Callable, **_: Any) -> list[float]:
        seen.append((*prompts, *topic, trainer_state))
        log_metric("rows", len(prompts))
        if "fg" in prompts:
            raise KeyError("fg" if len(prompts) == 1 else "some row")
        return [0.0] * len(prompts)

    def check_later(**options: Any) -> Iterator[float]:
        yield from check(**options)

    async def check_slowly(**options: Any) -> list[float]:
        return check(**options)

    function = {"function": check, "generator": check_later, "coroutine": check_slowly}[kind]
    with pytest.raises(ZooError, match="raised KeyError: 'fg' on row 2, prompt 'fg'") as caught:
        call(Rewards([one, function]), samples, topic=["x", "y", "z"], trainer_state="abc")
    assert function.__name__ in str(caught.value) and isinstance(caught.value.__cause__, KeyError)
    assert seen == [
        ("abc", "d", "fg", "x", "y", "z", "abc"), ("abc", "x", "abc"), ("d", "y", "abc"), ("fg", "z", "abc"),
    ]  # fmt: skip


def test_exception_only_on_whole_batch_is_reported_as_such(samples: Samples) -> None:
    def compare(completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise ZeroDivisionError
        return [0.0]

    with pytest.raises(ZooError, match="ZeroDivisionError on the batch of 3 completions, but on no row"):
        call(Rewards([compare]), samples)


def test_single_row_batch_is_not_retried(samples: Samples) -> None:
    calls = []

    def once(**_: Any) -> list[float]:
        calls.append(1)
        raise ValueError("first")

    with pytest.raises(ZooError, match="once raised ValueError: first on row 0, prompt 'abc'"):
        Rewards([once])(samples.select(slice(0, 1)), ["abc"], ["x"], ["abcx"], {})
    assert len(calls) == 1


def test_unfit_signature_is_rejected_in_one_sentence(samples: Samples) -> None:
    def strict(prompts: list[str], completions: list[str]) -> list[float]:
        return [0.0] * 3

    def needs(completions: list[str], solution: list[str], **_: Any) -> list[float]:
        return [0.0] * 3

    given = "prompts, completions, completion_ids, log_extra and log_metric"
    with pytest.raises(ZooError, match=rf"strict cannot be called with {given} \(got an unexpected .*\*\*columns"):
        call(Rewards([strict]), samples)
    with pytest.raises(ZooError, match=r"missing a required.* argument: 'solution'.*the columns that it needs"):
        call(Rewards([needs]), samples)
    assert call(Rewards([needs]), samples, solution=["a", "b", "c"]).total.tolist() == [0, 0, 0]


@pytest.mark.attack
def test_rewards_reject_overflowing_sum(samples: Samples) -> None:
    with pytest.raises(ZooError, match="weighted rewards of row 0 add up to inf, which is too large for float32"):
        call(Rewards([lambda **_: [3e38] * 3, lambda **_: [3e38] * 3]), samples)

    def logs(log_metric: Callable, **_: Any) -> list[float]:
        for value in (math.inf, -math.inf):
            log_metric("odd", value)
        for _ in range(2):
            log_metric("huge", 1.7e308)
        return [0.0] * 3

    metrics = call(Rewards([logs]), samples).metrics
    assert metrics.keys() == {"odd", "huge"} and all(math.isnan(value) for value in metrics.values())


# What functions log


def test_logged_extras_and_metrics_are_kept_with_scores(samples: Samples) -> None:
    def first(completions: list[str], log_extra: Callable, log_metric: Callable, **_: Any) -> list[float]:
        log_extra("read", ["a", None, 3])
        for length in (1, 2, 6):
            log_extra("length", [length])
            log_metric("mean length", torch.tensor(length))
        return [0.0] * 3

    def second(completions: list[str], log_extra: Callable, log_metric: Callable, **_: Any) -> list[float]:
        log_extra("read", ("x", "y", "z"))
        log_metric("mean length", 7)
        log_metric("share", 0.25)
        return [0.0] * 3

    rewards = Rewards([first, second])
    for _ in range(2):
        scored = call(rewards, samples)
        assert scored.extra == {"read": ["a", None, 3], "length": [1, 2, 6], "read (second)": ["x", "y", "z"]}
        assert scored.metrics == {"mean length": 4.0, "share": 0.25}
    assert call(Rewards([one]), samples).extra == {} == call(Rewards([one]), samples).metrics


def test_bad_logged_values_are_rejected_in_one_sentence(samples: Samples) -> None:
    def short(log_extra: Callable, **_: Any) -> list[float]:
        log_extra("read", ["a"])
        return [0.0] * 3

    def words(log_metric: Callable, **_: Any) -> list[float]:
        log_metric("share", "much")
        return [0.0] * 3

    with pytest.raises(ZooError, match="short logged 1 values as 'read' for 3 completions"):
        call(Rewards([short]), samples)
    with pytest.raises(ZooError, match="words raised ValueError: could not convert"):
        call(Rewards([words]), samples)


# Coroutine functions


class Slow:
    def __init__(self, barrier: asyncio.Barrier | None = None) -> None:
        self.barrier = barrier
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def __call__(self, prompts: list[str], log_metric: Callable, **_: Any) -> list[float | None]:
        self.loops.append(asyncio.get_running_loop())
        if self.barrier is not None:
            await asyncio.wait_for(self.barrier.wait(), timeout=20)
        log_metric("prompts", len(prompts))
        return [None, 2.0, 3.0]


async def slowly(offset: float, **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [offset] * 3


def test_coroutine_functions_are_awaited_in_all_forms(samples: Samples) -> None:
    given = [one, Slow(), functools.partial(slowly, offset=4.0), lambda **_: slowly(5.0)]
    scored = call(Rewards(given), samples)
    assert scored.total.tolist() == [10, 12, 13] and math.isnan(scored.per_reward[0, 1])
    assert scored.metrics == {"prompts": 3}
    assert Rewards(given).names == ["one", "Slow", "slowly", "<lambda>"]


def test_coroutine_functions_run_concurrently_on_one_loop(samples: Samples) -> None:
    """Each waits until the other has come as far: one after the other they would never end."""
    barrier = asyncio.Barrier(2)
    first, second = Slow(barrier), Slow(barrier)
    rewards = Rewards([one, first, second])
    for _ in range(2):
        assert call(rewards, samples).total.tolist() == [1, 5, 7]
    assert len(first.loops) == 2 and len({*first.loops, *second.loops}) == 1


def test_coroutine_functions_run_inside_a_running_loop(samples: Samples) -> None:
    async def notebook() -> list[float]:
        return call(Rewards([functools.partial(slowly, offset=4.0)]), samples).total.tolist()

    assert asyncio.run(notebook()) == [4, 4, 4]
