"""Tests of the rewards, which need no model and no trainer."""

from __future__ import annotations

import pickle

import pytest
from zoo_reward_example import Mentions, finished


def test_finished() -> None:
    texts = ["It works.", "It works", "Does it? ", ""]
    assert finished([""] * 4, texts) == [1.0, 0.0, 1.0, None]
    assert finished([[]], [[{"role": "assistant", "content": "Yes!"}]]) == [1.0]


def test_mentions() -> None:
    mentions = Mentions(words=["battery", "price"])
    assert mentions([""] * 3, ["Battery and price.", "the batteries", "a fair price"]) == [1.0, 0.0, 0.5]
    assert mentions.__name__ == "mentions"
    assert pickle.loads(pickle.dumps(mentions)) == mentions


@pytest.mark.parametrize("words", ["battery", []])
def test_mentions_rejects_text_and_empty_list(words: object) -> None:
    with pytest.raises(ValueError, match="give a list of words"):
        Mentions(words=words)  # type: ignore[arg-type]
