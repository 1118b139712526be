"""Tells from texts alone, without a model, whether they depend on their prompts.

Texts are blind if completions of prompts that ask different things match about as often as completions of one prompt.
The match rate across prompts must reach three bounds: `MIN_MATCH_RATE`, the lower bound of the 95% interval of the rate
within a prompt, and `MIN_BLIND_RATIO` times the upper bound. The words of a text's prompt are masked before texts are
compared. Words in more than half of the prompts, such as the options of a choice, are not masked, since they may be all
that distinguishes the answers.

A second sign, for the probe *equal texts*, is that a side answers all prompts with a few texts
(`texts_for_all_prompts`). These may be right answers, such as labels. So the sign counts only if they are sentences,
and share no more words with their own prompts (and with the other side's answers to these prompts) than with other
prompts.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...modeling.words import words
from ..stats import group_indices, share_interval
from .similarity import prompt_ranks
from .texts import Pair, plain_words, to_template

#: For prompt-blind texts, the match rate across prompts is at least this share of the upper bound within a prompt.
MIN_BLIND_RATIO = 0.9
#: Prompt-blind texts must also match in at least this share of the pairs across prompts.
MIN_MATCH_RATE = 0.25
#: Maximum number of words in a label such as "yes". If two or more labels recur, texts cannot show blindness.
MAX_LABEL_WORDS = 4
#: Only the most frequent texts of a side are examined: the fewest that make up this share of its completions.
MIN_COVERED_SHARE = 0.9
#: A side has few texts if the other side has at least this many times as many.
MIN_TEXT_RATIO = 4
#: More such texts on a side may be classes of right answers, so each of them weighs this number / their count.
MAX_FULL_WEIGHT_TEXTS = 20
#: Texts below this mean rank are hardly about their prompts. Chance is ½; at 1, a text's own prompt is always nearest.
_MIN_RELATED_RANK = 0.75


def is_blind(pair: Pair) -> bool:
    """Returns whether the policy's texts alone show that they do not depend on their prompts."""
    prompt_ids, body_words = pair.prompt_ids[0], pair.body_words[0]
    prompt_words = [set(words(prompt)) for prompt in pair.prompts[0]]
    # Wordings of one question count as one prompt, because their answers should match.
    questions = pair.questions[prompt_ids]
    # Short labels such as "yes" may recur because they are right answers to several prompts.
    texts_and_questions = set(zip(map(tuple, body_words), questions.tolist(), strict=True))
    question_counts = Counter(text for text, _ in texts_and_questions)
    if sum(0 < len(text) <= MAX_LABEL_WORDS and count > 1 for text, count in question_counts.items()) > 1:
        return False
    prompt_counts = Counter(word for word_set in prompt_words for word in word_set)
    masked_words = [
        {word for word in word_set if 2 * prompt_counts[word] <= len(prompt_words)} for word_set in prompt_words
    ]
    templates = [
        to_template(masked_words[prompt_id], text_words)
        for text_words, prompt_id in zip(body_words, prompt_ids, strict=True)
    ]
    # A verified answer, and an answer made only of its prompt's words, must not count as equal to any other.
    template_ids = group_indices(
        [
            (str(row),) if set(template) == {"_"} or not counted else ("", *template)
            for row, (template, counted) in enumerate(zip(templates, pair.counted[0], strict=True))
        ]
    )

    def pair_counts(counts: ArrayLike) -> NDArray[np.intp]:
        return np.asarray(counts) * (np.asarray(counts) - 1) // 2

    texts_per_question = np.bincount(questions)
    text_counts = Counter(zip(questions.tolist(), template_ids.tolist(), strict=True))
    equal_pairs = np.bincount(
        [question for question, _ in text_counts], weights=pair_counts(list(text_counts.values()))
    )
    rate_across = float(pair_counts(np.bincount(template_ids)).sum() - equal_pairs.sum()) / (
        pair_counts(len(prompt_ids)) - pair_counts(texts_per_question).sum()
    )
    has_several_texts = texts_per_question > 1
    rates_within_question = equal_pairs[has_several_texts] / pair_counts(texts_per_question)[has_several_texts]
    # If fewer than two questions have several texts, there is no interval: use the widest one, 0 to 1.
    low, high = 0.0, 1.0
    if len(rates_within_question) > 1:
        mean_rate = float(rates_within_question.mean())
        half_width = 1.96 * float(rates_within_question.std(ddof=1)) / math.sqrt(len(rates_within_question))
        low, high = mean_rate - half_width, mean_rate + half_width
    return bool(rate_across >= MIN_MATCH_RATE and low <= rate_across and rate_across >= MIN_BLIND_RATIO * high)


def texts_for_all_prompts(pair: Pair, texts: tuple[Sequence[str], Sequence[str]]) -> dict[str, float]:
    """Finds the few texts that a side chooses from, whatever the prompt is.

    Args:
        pair: The completions.
        texts: (policy, SFT): (N,) the text of each row, with misspelled copies already replaced by one text.

    Returns:
        Text -> its weight: 1 if its side has at most `MAX_FULL_WEIGHT_TEXTS` such texts, else `MAX_FULL_WEIGHT_TEXTS` /
        their count.
    """
    frequent = [_most_frequent(side_texts) for side_texts in texts]
    weights: dict[str, float] = {}
    for side, other in ((0, 1), (1, 0)):
        has_few_texts = len(frequent[side]) <= len(frequent[other]) / MIN_TEXT_RATIO
        if has_few_texts and _are_sentences_about_no_prompt(pair, side, texts[side], frequent[side]):
            weights |= dict.fromkeys(frequent[side], min(1.0, MAX_FULL_WEIGHT_TEXTS / len(frequent[side])))
    return weights


def _most_frequent(texts: Sequence[str]) -> set[str]:
    """Returns the fewest distinct texts that cover `MIN_COVERED_SHARE` of the completions."""
    frequent_texts, covered_count = set(), 0
    for text, count in Counter(texts).most_common():
        if covered_count >= MIN_COVERED_SHARE * len(texts):
            break
        frequent_texts.add(text)
        covered_count += count
    return frequent_texts


def _are_sentences_about_no_prompt(pair: Pair, side: int, texts: Sequence[str], frequent_texts: set[str]) -> bool:
    rows = [row for row, text in enumerate(texts) if text in frequent_texts]
    words_by_text = {texts[row]: set(pair.body_words[side][row]) for row in rows}
    text_counts_by_word = Counter(word for text_words in words_by_text.values() for word in text_words)
    # Without the words that most of these texts share, "the final answer is 7" is the label 7.
    distinctive_words = {
        text: [word for word in sorted(text_words) if 2 * text_counts_by_word[word] <= len(frequent_texts)]
        for text, text_words in words_by_text.items()
    }
    if 2 * sum(len(distinctive_words[texts[row]]) > MAX_LABEL_WORDS for row in rows) <= len(rows):
        return False
    # A right answer has words of its prompt, or of what the other side answered there.
    prompt_words = [plain_words(prompt) for prompt in pair.prompts[side]]
    if pair.prompts[0] == pair.prompts[1]:
        for prompt_id, text_words in zip(pair.prompt_ids[1 - side].tolist(), pair.body_words[1 - side], strict=True):
            prompt_words[prompt_id].extend(text_words)
    prompt_ids = pair.prompt_ids[side][rows]
    ranks = prompt_ranks([distinctive_words[texts[row]] for row in rows], prompt_ids, prompt_words, pair.questions)
    # A text without any of these words gets the rank of chance.
    low, high = share_interval(np.where(np.isnan(ranks), 0.5, ranks), pair.questions[prompt_ids].tolist(), level=0.95)
    return low <= 0.5 and high < _MIN_RELATED_RANK
