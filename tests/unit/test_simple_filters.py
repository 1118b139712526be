"""Simple filters of samples: what each keeps, which words are left out, and which filter is the best."""

import numpy as np
import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.simple_filters import choose_words, make_filters
from rlhf_zoo.runs.settings.evaluation import EvaluationConfig

# Two prompts, four samples each. "it is" goes with a low reward, and the judge likes "three days" best.
TEXTS = ["it is fine", "lasts three days", "it is poor", "lasts two days"] * 2
REWARD = np.array([[0.0, 3.0, -1.0, 2.0], [0.0, 3.0, -1.0, 2.0]])
JUDGE = np.array([[0.0, 1.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]])
WINS = JUDGE / 2


def test_filters_keep_best_longest_and_word_free_samples() -> None:
    filters = {each.name: each for each in make_filters(TEXTS, REWARD, JUDGE, WINS)}
    assert list(filters) == [
        "best of 2 by the reward", "longest of 2", "best of 4 by the reward", "longest of 4", "without any of 2 words",
    ]  # fmt: skip
    best = filters["best of 4 by the reward"]
    assert (best.drawn, best.reward.tolist(), best.judge.tolist()) == (4, [3.0, 3.0], [1.0, 0.5])
    assert best.wins.tolist() == [0.5, 0.25]
    # Of the six pairs of four samples, the best is in three.
    assert filters["best of 2 by the reward"].judge.tolist() == [0.5, 0.25]
    # All texts have three words, so the longest is any.
    assert np.allclose(filters["longest of 4"].judge, JUDGE.mean(1))
    without = filters["without any of 2 words"]
    assert (without.words, without.drawn) == (("is", "two"), 4.0)
    assert without.reward.tolist() == [3.0, 3.0] and without.judge.tolist() == [1.0, 0.5]


def test_length_filter_direction_follows_reward() -> None:
    texts = ["one", "one two three", "one", "one two"] * 2
    assert "longest of 4" in [each.name for each in make_filters(texts, REWARD, JUDGE, WINS)]
    assert "shortest of 4" in [each.name for each in make_filters(texts, -REWARD, JUDGE, WINS)]


def test_choose_words_uses_only_the_reward() -> None:
    words, kept = choose_words(TEXTS, REWARD)
    assert words == ("is", "two") and kept.tolist() == [[False, True, False, False]] * 2
    assert choose_words(["!"] * 8, REWARD)[0] == (), "marks are no words"
    assert choose_words(TEXTS, np.zeros((2, 4)))[0] == (), "a reward that is always the same chooses no word"


def test_word_filter_keeps_all_samples_when_every_one_has_the_word() -> None:
    texts = ["bad", "bad", "good", "bad", "bad", "bad", "bad", "bad"]
    reward = np.array([[0.0, 0.0, 4.0, 0.0], [1.0, 2.0, 3.0, 2.0]])
    (without,) = [each for each in make_filters(texts, reward, reward, reward) if each.kind == "words"]
    assert without.words == ("bad",) and without.reward.tolist() == [4.0, 2.0]
    assert without.drawn == pytest.approx(8 / 5)


def test_evaluation_config_rejects_one_filter_sample() -> None:
    with pytest.raises(ZooError, match="filter_samples is 1"):
        EvaluationConfig(filter_samples=1)
