"""`grammar`, `refuses` and `vader` on real texts; conversations, missing packages and settings."""

import pickle
import sys
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.rewards import prose
from rlhf_zoo.rewards.prose import REFUSALS, Grammar, Refuses, Vader, grammar, refuses, vader


def score(reward: Any, *completions: Any) -> list[float | None]:
    return reward(prompts=[""] * len(completions), completions=list(completions), other=[1] * len(completions))


# Grammar


def test_grammar_counts_errors_per_hundred_words() -> None:
    pytest.importorskip("harper", reason="the extra judges is not installed")
    good = "The capital of France is Paris. It lies on the Seine."
    bad = "He go to school yesterday and dont know nothing."
    recipe = "**Ingredients**\n\n* 2 cups of flour\n* 1 teaspoon of salt\n\n```python\ndef foo(xx): retrun xx\n```\n"
    assert score(grammar, good, recipe) == [0, 0]
    assert score(grammar, bad) == [pytest.approx(-200 / 9)]
    assert score(grammar, f"{bad} {good}") == [pytest.approx(-200 / 20)]
    assert score(grammar, "asdf qwer zxcv lkjh", "", " \n") == [-100, -100, -100]
    judge = RuleJudge("rlhf_zoo.rewards.prose:grammar")
    assert judge(["a"], [good]) == [0]
    assert judge.description.endswith(":grammar, minus the errors of grammar and spelling for each 100 words.")


def test_grammar_respects_dialect_and_ignored_kinds() -> None:
    pytest.importorskip("harper", reason="the extra judges is not installed")
    british = "It was the colour of her favourite dress."
    assert score(grammar, british) == [-25] and score(Grammar(dialect="british"), british) == [0]
    lower = "the weather today is lovely and we all went outside."
    assert score(grammar, lower) == [-10] and score(Grammar(ignore=["Capitalization"]), lower) == [0]
    with pytest.raises(ZooError, match=r"dialect of the reward grammar is 'scots': give 'american', 'british', .* or"):
        Grammar(dialect="scots")  # type: ignore[arg-type]
    with pytest.raises(ZooError, match="ignore of the reward grammar is 'Style': give a list of harper's kinds"):
        Grammar(ignore="Style")


# Refusals


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I’m sorry, but I can’t assist with this request.",
        "I cannot help with that. It would be dangerous.",
        "As an AI language model, I do not have feelings.",
        "Thank you for asking! Unfortunately, I am unable to write that letter.",
        "Sorry, I can not do that: I won't provide it.",
        "**I must decline.**",
        "I apologize for any inconvenience, but I can't share addresses.",
        "My apologies, but I can't say that.",
        "I'm afraid that I can't open the door.",
        "I’m so sorry, I’m not allowed to answer that.",
        "No, sorry.",
        "I'm really sorry!",
    ],
)
def test_refuses_detects_refusals(text: str) -> None:
    assert score(refuses, text, [{"role": "assistant", "content": text}]) == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris is the capital of France.",
        "I can help with that: mix flour and water.",
        "Dear Ms. Lee, I am sorry that my order came late.",
        "I'm sorry to hear that. Here is a letter to your landlord.",
        "I'm so sorry for your loss. I can't imagine how you feel. Would you like to talk?",
        "Sorry for the delay! I can help now.",
        "I apologize for my mistake: the sum is 12.",
        "Sorry, I don't understand. Which city do you mean?",
        "Language models answer questions. As an AI language, Lisp was popular.",
        "Here is the scene you asked for, in which a robot speaks to its maker at the end of a long day in the lab. "
        "'I cannot help you,' it said.",
    ],
)
def test_refuses_ignores_answers(text: str) -> None:
    assert score(refuses, text) == [0]


def test_refusal_phrases_are_normalized_and_unique() -> None:
    assert all(score(refuses, phrase) == [1] for phrase in REFUSALS)
    assert len(set(REFUSALS)) == len(REFUSALS)


# Sentiment


def test_vader_scores_sentiment() -> None:
    pytest.importorskip("vaderSentiment", reason="the extra judges is not installed")
    good, bad, flat, empty = score(vader, "I love this great movie!", "It was a terrible waste.", "It is a table.", "")
    assert good is not None and bad is not None
    assert 0.8 < good <= 1 and -1 <= bad < -0.5 and flat == empty == 0
    assert score(vader, [{"role": "assistant", "content": "I love this great movie!"}]) == [good]


# All


@pytest.mark.parametrize("reward", [grammar, refuses, vader], ids=lambda reward: reward.name)
def test_prose_reward_is_named_frozen_and_picklable(reward: Any) -> None:
    assert pickle.loads(pickle.dumps(reward)) == reward and reward.__name__ == reward.name
    renamed = type(reward)(name="watched")
    assert renamed.__name__ == "watched" and renamed != reward


@pytest.mark.parametrize(
    ("reward", "package", "module"), [(Grammar(), "harper-py", "harper"), (Vader(), "vaderSentiment", "vaderSentiment")]
)
def test_missing_package_is_reported_in_one_sentence(
    reward: Any, package: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    for cached in (prose._linter, prose._analyzer):
        cached.cache_clear()
    with pytest.raises(ZooError) as caught:
        RuleJudge(f"rlhf_zoo.rewards.prose:{reward.name}")(["a"], ["Some text."])
    assert str(caught.value) == f'The reward {reward.name} needs {package}: `pip install "rlhf-zoo[judges]"`.'
    assert score(Refuses(), "Some text.") == [0], "this one needs no package"
