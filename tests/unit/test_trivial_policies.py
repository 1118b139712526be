"""Trivial policies: which are chosen, what they write, and when a judge is winnable by one."""

from rlhf_zoo.evaluation.stats import Estimate, WinRate
from rlhf_zoo.evaluation.trivial_policies import (
    TrivialPolicy,
    TrivialScore,
    TrivialScores,
    append_ending,
    choose_policies,
    find_risen_ending,
    select_candidates,
    shift_by_prompt,
)

SFT = [" is good.", " is good.", " lasts two days.", " is fine, and cheap."]
PPO = [" is good, and i love it.", " lasts two days, and i love it.", " is superb.", " is superb."]


def test_choose_picks_constants_ending_and_shuffle() -> None:
    result = choose_policies(SFT, PPO, favorite=" is superb.")
    assert [(one.kind, one.text) for one in result] == [
        ("constant", " is good."),
        ("constant", " is superb."),
        ("ending", " and i love it."),
        ("shuffled", ""),
    ], "a text that is two of them stands once"
    assert [one.kind for one in choose_policies(SFT, SFT)] == ["constant", "shuffled"], (
        "where nothing rose there is no ending"
    )
    names = [policy.name for policy in choose_policies(SFT, [" b", " a"])[:2]]
    assert names == ["SFT's most frequent completion", "one of PPO's completions"], "none of PPO's repeats"
    assert find_risen_ending([], [" a b"] * 3) == " b" and find_risen_ending(SFT, []) is None
    assert select_candidates([" a", " b", " b", " c"], [1.0, 3.0, 2.0, 2.0]) == [" b", " c", " a"]


def test_trivial_policies_transform_texts() -> None:
    assert append_ending(" lasts two days.", " and i love it.") == " lasts two days, and i love it."
    assert append_ending(PPO[0], " and i love it.") == PPO[0], "it ends so already"
    assert shift_by_prompt(["a1", "a2", "b1", "b2"], 2) == ["b1", "b2", "a1", "a2"], (
        "all samples of a prompt go together"
    )


def score(kind: str, low: float) -> TrivialScore:
    rate = WinRate(low + 0.05, (low, low + 0.1), 60, 0.0)
    return TrivialScore(TrivialPolicy(f"{kind} {low}", kind, "x"), Estimate(1.0, (0.9, 1.1), 60), rate)  # type: ignore[arg-type]


def test_judge_is_winnable_only_by_a_constant() -> None:
    assert not TrivialScores([score("constant", 0.49), score("ending", 0.8), score("shuffled", 0.7)]).winnable
    result = TrivialScores([score("constant", 0.51), score("constant", 0.6), score("constant", 0.2)])
    assert result.winnable
    assert result.to_json()["winnable_by_a_constant"] is True
