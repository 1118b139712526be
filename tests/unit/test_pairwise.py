"""Both orders of a pair make one verdict, and what a judge's liking for a place looks like in the report."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.pairwise import FunctionPairJudge, PairJudge, PairVerdict, compare_pairs, merge_orders
from rlhf_zoo.evaluation.reference_answers import compare_with_references
from rlhf_zoo.evaluation.stats import proportion, win_rate

PROMPTS = ["p", "q", "r", "s"]
FIRST = ["long text", "a", "same", "longest of all"]
SECOND = ["short", "longer", "same", "x"]


def by_length(prompts, shown_first, shown_second):
    """Prefers the longer text.

    More is not said.
    """
    return [(len(a) > len(b)) + 0.5 * (len(a) == len(b)) for a, b in zip(shown_first, shown_second, strict=True)]


@pytest.mark.parametrize(
    ("in_order", "swapped", "score", "orders"),
    [
        (1, 0, 1, [1, 1]),  # the first won, both times
        (0, 1, 0, [0, 0]),
        (0.5, 0.5, 0.5, [0.5, 0.5]),
        (1, 1, 0.5, [1, 0]),  # whichever came first
        (0, 0, 0.5, [0, 1]),
        (1, 0.5, 0.5, [1, 0.5]),  # one order alone wins nothing
        (0.5, 1, 0.5, [0.5, 0]),
        (None, 0, 0.5, [None, 1]),
        (1, None, 0.5, [1, None]),
        (None, None, 0.5, [None, None]),
    ],
)
def test_merge_orders_combines_both_orders(in_order, swapped, score, orders):
    assert merge_orders(in_order, swapped) == (score, {"orders": orders})
    assert merge_orders(swapped, in_order).score == 1 - score, "swapping sides swaps the score"


def test_merge_orders_keeps_extra_details():
    assert merge_orders(1, 0, unparsed=True).details == {"orders": [1, 1], "unparsed": True}


def test_compare_pairs_with_judge_of_texts():
    judge = FunctionPairJudge(by_length)
    assert isinstance(judge, PairJudge)
    assert (judge.name, judge.description) == ("by_length", "Prefers the longer text.")
    report = compare_pairs(judge, PROMPTS, FIRST, SECOND, seed=0)
    assert report.scores == [1, 0, 0.5, 1]
    assert report.win_rate == win_rate([1, 0, 0.5, 1], [0, 1, 0.5, 0], PROMPTS)
    assert (report.win_rate.value, report.win_rate.ties) == (0.625, 0.25)
    assert report.agreement == proportion(4, 4)
    assert report.shown_first.value == 0.5
    assert report.unparsed == 0
    assert set(report.to_json()) == {"win_rate", "agreement", "shown_first", "unparsed"}


@pytest.mark.parametrize("place", [1.0, 0.0])
def test_judge_of_positions_gives_only_ties(place):
    judge = FunctionPairJudge(lambda prompts, a, b: [place] * len(prompts), name="place", description="A place.")
    report = compare_pairs(judge, PROMPTS, FIRST, SECOND, seed=0)
    assert report.scores == [0.5] * 4
    assert (report.win_rate.value, report.win_rate.ties) == (0.5, 1.0)
    assert report.agreement == proportion(0, 4)
    assert report.shown_first.value == place and report.shown_first.n == 8


def test_groups_default_to_prompts():
    """Five copies of two prompts' pairs: the interval is that of two prompts unless other groups are given."""
    prompts, first, second = ["p"] * 5 + ["q"] * 5, ["long"] * 5 + ["s"] * 5, ["s"] * 5 + ["long"] * 5
    judge = FunctionPairJudge(by_length)
    low, high = compare_pairs(judge, prompts, first, second, seed=0).win_rate.ci95
    assert low < 0.001 and high > 0.999
    low, high = compare_pairs(judge, prompts, first, second, seed=0, groups=range(10)).win_rate.ci95
    assert 0 < low < 0.5 < high < 1


def test_verdicts_without_orders_count_only_for_win_rate():
    class Odd:
        name = description = "odd"

        def compare(self, prompts, first, second):
            return [PairVerdict(0.5, {"identical": True}), merge_orders(None, 0), merge_orders(1, 0)]

    report = compare_pairs(Odd(), ["p", "q", "r"], ["a"] * 3, ["b"] * 3, seed=0)
    assert report.win_rate.value == pytest.approx(2 / 3)
    assert report.agreement == proportion(1, 1) and report.unparsed == 1 and report.shown_first.n == 2

    class Mute(Odd):
        def compare(self, prompts, first, second):
            return [merge_orders(None, None)]

    report = compare_pairs(Mute(), ["p"], ["a"], ["b"], seed=0)
    assert (report.agreement, report.shown_first, report.unparsed) == (None, None, 1)
    assert report.to_json()["agreement"] is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [([1.0], "gave 1 preferences for 2 pairs"), ([1.0, 0.7], "gave 0.7 for pair 1"), ([1.0, None], "gave None for")],
)
def test_pair_judge_rejects_bad_answers(answer, said):
    with pytest.raises(ZooError, match=said):
        FunctionPairJudge(lambda prompts, a, b: answer).compare(["p", "q"], ["a", "b"], ["c", "d"])


def test_pair_judge_rejects_bad_functions_and_pairs():
    judge = FunctionPairJudge(f"{__name__}:by_length")
    assert judge.name == "by_length" and judge.compare(["p"], ["aa"], ["b"]) == [(1, {"orders": [1, 1]})]
    with pytest.raises(ZooError, match="'toy_run:PPO' is a dict, not a function"):
        FunctionPairJudge("toy_run:PPO")
    with pytest.raises(ValueError, match="There are 2 prompts but 1 and 2 completions"):
        compare_pairs(judge, ["p", "q"], ["a"], ["b", "c"], seed=0)


def test_pair_judge_compares_with_answers_of_the_data():
    """The first sample of each prompt; an answer is a conversation's last message, without special tokens."""
    judge = FunctionPairJudge(by_length, name="longer")
    tools = SimpleNamespace(
        judge=SimpleNamespace(name="longer"), panel=SimpleNamespace(pair_judges=[judge]),
        tokenizer=SimpleNamespace(all_special_tokens=["<eos>"]),
    )  # fmt: skip
    written = {"sft": ["aaa", "", "b", "long text"], "ppo": ["aaaa", "", "long text", ""]}
    measured = {side: SimpleNamespace(completions=texts) for side, texts in written.items()}
    answers = [[{"role": "assistant", "content": text}] for text in ("aaa<eos>", "bb<eos>")]
    rows = Dataset.from_dict({"prompt": ["p", "q"], "answer": answers})
    result = SimpleNamespace(evaluator=tools, measurements=measured, samples_per_prompt=2, seed=0, groups=[0, 0, 1, 1])
    rates = compare_with_references(result, rows, lambda: None, column="answer")
    assert (rates["sft"]["value"], rates["ppo"]["value"]) == (0.25, 1.0)
