"""Several answers per prompt: pass@k against enumeration, majority votes against counts by hand."""

import itertools

import numpy as np
import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.panel import check_answers, check_answers_by_strictness
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.evaluation.pass_at_k import Answers
from rlhf_zoo.rewards.verifiable import ExactMatch, NumericMatch

RIGHT = np.array([[1, 0, 0, 1, 0], [0] * 5, [1] * 5, [0, 0, 1, 0, 0]], dtype=float)


def test_pass_at_k_matches_enumeration_of_subsets() -> None:
    answers = Answers(RIGHT)
    for k in (1, 2, 5):
        expected = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in RIGHT]
        assert answers.pass_at(k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="pass@6 needs 6 answers per prompt"):
        answers.pass_at(6)
    figures = answers.to_json()
    assert figures.keys() == {"accuracy", "pass_at"} and list(figures["pass_at"]) == ["1", "2", "4", "5"]
    assert figures["accuracy"]["value"] == RIGHT.mean() == pytest.approx(figures["pass_at"]["1"]["value"])
    assert (figures["accuracy"]["n"], figures["pass_at"]["5"]["n"]) == (20, 4)


def test_majority_correct_splits_ties_and_ignores_unparsed() -> None:
    """A tie between two answers counts half, an unparsed answer has no vote, and no votes at all count 0."""
    parsed = [["4", "5", "4", "5", "5"], ["7", "8", "8", None, None], ["1", "2", "1", "2", "3"], [None] * 5]
    right = np.array([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0] * 5], dtype=float)
    answers = Answers(right, parsed)
    assert answers.majority_correct().tolist() == [0, 0, 0.5, 0]
    assert list(answers.joint_figures()) == ["majority of 5", "pass@5"]
    assert answers.to_json()["majority_at"]["5"]["value"] == 0.125
    with pytest.raises(ValueError, match="needs the parsed answers"):
        Answers(right).majority_correct()
    assert Answers(right[:, :1]).joint_figures() == {} and list(Answers(right).joint_figures()) == ["pass@5"]


def broken(completions: list[str], **_: object) -> list[float]:
    return [1.0] * len(completions)


def test_rule_judge_rejects_rule_with_unhashable_readings() -> None:
    broken.read = lambda text: [text]  # type: ignore[attr-defined]
    with pytest.raises(
        ZooError, match=r"`read` of the rule .*broken.* fails \(unhashable type: 'list'\): it must return"
    ):
        RuleJudge("test_answer_metrics:broken", broken)


@pytest.mark.parametrize(
    ("rule", "texts", "strict", "lenient"),
    [
        (NumericMatch(), ["so #### 4", "7 #### 4.0", "4", "#### 9"], [4.0, 4.0, None, 9.0], [4.0, 4.0, 4.0, 9.0]),
        (ExactMatch(marker="#"), ["#a b", "# a  b", "a b", "#c"], ["a b", "a b", None, "c"], None),
    ],
)
def test_majority_votes_use_parsed_answers(
    rule: NumericMatch, texts: list[str], strict: list, lenient: list | None
) -> None:
    columns = {"answer": ["4" if isinstance(rule, NumericMatch) else "a b"] * 4}
    answers = check_answers_by_strictness(RuleJudge("rule", rule), ["?"] * 4, texts, columns, samples_per_prompt=2)
    assert answers["strict"].parsed == [strict[:2], strict[2:]]
    assert answers["lenient"].parsed == (lenient and [lenient[:2], lenient[2:]])
    checked = check_answers(RuleJudge("rule", rule), ["?"] * 4, texts, columns, samples_per_prompt=2)
    assert checked.parsed == answers["strict" if lenient is None else "lenient"].parsed, (
        "a number without a marker is any number"
    )
    assert answers["strict"].correct.tolist() == [[1, 1], [0, 0]] and answers["strict"].majority_correct().tolist() == [
        1,
        0,
    ]
