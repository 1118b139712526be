"""Distinct-n and repetition: goldens, properties, and an interval that covers."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.evaluation.text import distinct_n, distinct_n_difference, distinct_n_estimate, ngrams, repetition
from rlhf_zoo.modeling.words import is_word, join_words, split_before_spaces, words, words_regex

TEXTS = st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", "!"]), max_size=8).map(" ".join), max_size=8)


def test_words_splits_words_and_punctuation():
    assert words("Don't STOP!! It’s 5-star, über.") == [
        "don't", "stop", "!", "!", "it’s", "5", "-", "star", ",", "über", ".",
    ]  # fmt: skip
    assert words(" \n ") == []
    assert ngrams("abc", 2) == [("a", "b"), ("b", "c")] and ngrams("abc", 4) == []
    with pytest.raises(ValueError, match="shorter"):
        distinct_n_estimate(["a", "b"], [0])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("水壶很好。GPT4真棒", ["水", "壶", "很", "好", "。", "gpt4", "真", "棒"]),
        ("ラジオ だよ", ["ラ", "ジ", "オ", "だ", "よ"]),
        ("ที่นี่ดี", ["ที่", "นี่", "ดี"]),
        ("ພາສາ", ["ພ", "າ", "ສ", "າ"]),
        ("ខ្មែរ។", ["ខ្", "មែ", "រ", "។"]),
        ("မြန်မာ", ["မြ", "န်", "မာ"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("great😀👍", ["great", "😀", "👍"]),
    ],
)
def test_words_splits_scripts_without_spaces_by_character(text, tokens):
    assert words(text) == tokens
    kept = [token for token in tokens if is_word(token)]
    assert words(join_words(kept)) == kept and re.search(words_regex(kept), text.lower())
    assert "".join(split_before_spaces(text)) == text


@given(text=st.text(st.characters(codec="ascii", exclude_characters="_")))
@settings(deadline=None)
def test_words_of_ascii_text_match_simple_patterns(text):
    plain = [token for token in words(text) if token[0].isalnum()]
    assert words(text) == words(f"{text} 水")[:-1]
    assert [token for token in words(text) if is_word(token)] == plain
    assert split_before_spaces(text) == re.findall(r"\s*\S+", text) and words(join_words(plain)) == plain
    assert not plain or re.search(r"\b" + r"\W+".join(map(re.escape, plain)) + r"\b", text.lower()).group() == (
        re.search(words_regex(plain), text.lower()).group()
    )


def test_distinct_n_matches_hand_computation():
    texts = ["good zoom good zoom", "good zoom", "lcd"]
    assert distinct_n(texts, 1) == 3 / 7
    assert distinct_n(texts, 2) == 2 / 4  # good zoom ×3, zoom good ×1; none runs across texts
    assert distinct_n([], 2) == distinct_n(["one"], 2) == 0.0


def test_repetition_matches_hand_computation():
    assert repetition("great great great great great") == 3 / 4
    assert repetition("easy to use and easy to carry") == pytest.approx(1 / 6)
    assert repetition("easy to use and easy to carry", 1) == pytest.approx(2 / 7)
    assert repetition("!!!!!!") == 4 / 5
    assert repetition("great") == repetition("") == 0.0


@given(texts=TEXTS.filter(bool), n=st.integers(1, 3), data=st.data())
@settings(deadline=None)
def test_distinct_n_estimate_equals_explicit_jackknife(texts, n, data):
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(texts), max_size=len(texts)))
    estimate = distinct_n_estimate(texts, groups, n)
    assert estimate.value == distinct_n(texts, n) and estimate.n == len(texts)
    left_out = np.array(
        [
            distinct_n([text for text, group in zip(texts, groups, strict=True) if group != gone], n)
            for gone in dict.fromkeys(groups)
        ]
    )
    if len(left_out) > 1:
        size = len(left_out)
        half = 1.959964 * np.sqrt((size - 1) / size * np.square(left_out - left_out.mean()).sum())
        expected = (max(0.0, estimate.value - half), min(1.0, estimate.value + half))
    else:
        expected = (0.0, 1.0)
    assert estimate.ci95 == pytest.approx(expected, abs=1e-5)


def test_distinct_n_difference_is_paired():
    """Leaving a prompt out leaves it out of both, so what both have in common cancels."""
    rng = random.Random(1)
    theirs = [" ".join(rng.choices("abcdefghij", k=9)) for _ in range(60)]
    groups = [place // 3 for place in range(60)]
    same = distinct_n_difference(theirs, theirs, groups, 2)
    assert (same.value, same.ci95, same.n) == (0.0, (0.0, 0.0), 60)
    ours = [text + " z" for text in theirs]
    apart = distinct_n_difference(ours, theirs, groups, 2)
    assert apart.value == pytest.approx(distinct_n(ours, 2) - distinct_n(theirs, 2))
    width = apart.ci95[1] - apart.ci95[0]
    alone = [distinct_n_estimate(texts, groups, 2).ci95 for texts in (ours, theirs)]
    assert 0 < width < min(high - low for low, high in alone)
