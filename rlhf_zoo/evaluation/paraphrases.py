"""Counts prompts that may ask the same question in other words. They are reported but not grouped.

Two prompts may be paraphrases if they share at least `MIN_SHARED` content words, and the shared words make up at least
`MIN_SHARED_PART` of the content words of the prompt that has fewer. Content words are all words except frequent English
words and words in more than half of the prompts. They are compared without their endings. A few pairs of prompts that
ask different things pass this test too, so the number is reported only if it is at least `MIN_PARAPHRASED` of all
prompts.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from ..modeling.chat_template import Prompt
from ..modeling.words import is_word, words
from .prompt_groups import near_duplicate_key

MIN_SHARED = 2
MIN_SHARED_PART = 0.75
MIN_PARAPHRASED = 0.5
#: The remedy where `evaluation.group` or `eval --group` can name the groups.
GROUP_REMEDY = "set `evaluation.group` or `eval --group` to the column that holds each prompt's group"
#: Maximum number of prompts that are compared.
MAX_PROMPTS = 1000

_STOP_WORDS = {
    "a", "about", "after", "again", "all", "am", "an", "and", "any", "are", "as", "at", "be", "been", "before",
    "being", "below", "between", "both", "but", "by", "call", "called", "can", "come", "could", "describe",
    "did", "do", "does", "doing", "done", "down", "each", "every", "explain", "few", "for", "from", "further",
    "get", "give", "had", "happen", "has", "have", "having", "he", "her", "here", "him", "his", "how", "i",
    "if", "in", "into", "is", "it", "its", "just", "know", "let", "like", "make", "many", "may", "me", "might",
    "mine", "more", "most", "much", "must", "my", "name", "need", "no", "nor", "not", "of", "off", "on", "once",
    "only", "or", "other", "our", "out", "over", "own", "please", "same", "say", "shall", "she", "should", "so",
    "some", "such", "tell", "than", "that", "the", "their", "them", "then", "there", "these", "they", "this",
    "those", "through", "to", "too", "under", "up", "us", "very", "want", "was", "we", "were", "what", "when",
    "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you", "your",
}  # fmt: skip
_ENDINGS = ("ing", "ed", "es", "s")


def count_possible_paraphrases(prompts: Sequence[Prompt], groups: Sequence[Hashable]) -> int:
    """Counts the prompts that may ask the same question as a prompt of another group.

    Args:
        prompts: (N,) texts or conversations.
        groups: (N,) the group of each prompt.

    Returns:
        The number of such prompts, among at most `MAX_PROMPTS` distinct ones; 0 if it is less than `MIN_PARAPHRASED` of
        them.
    """
    group_by_text = dict(zip(map(near_duplicate_key, prompts), groups, strict=True))
    texts = list(group_by_text)
    texts = [texts[k] for k in np.unique(np.linspace(0, len(texts) - 1, min(len(texts), MAX_PROMPTS)).astype(int))]
    word_sets = [{_stem(word) for word in words(text) if is_word(word) and word not in _STOP_WORDS} for text in texts]
    counts = Counter(word for word_set in word_sets for word in word_set)
    content_words = [{word for word in word_set if 2 * counts[word] <= len(texts)} for word_set in word_sets]
    rows_by_word: dict[str, list[int]] = {}
    similar_rows: set[int] = set()
    for row, content in enumerate(content_words):
        shared_counts = Counter(earlier for word in content for earlier in rows_by_word.get(word, ()))
        for earlier, count in shared_counts.items():
            min_count = max(MIN_SHARED, MIN_SHARED_PART * min(len(content), len(content_words[earlier])))
            if count >= min_count and group_by_text[texts[row]] != group_by_text[texts[earlier]]:
                similar_rows |= {row, earlier}
        for word in content:
            rows_by_word.setdefault(word, []).append(row)
    return len(similar_rows) if len(similar_rows) >= MIN_PARAPHRASED * len(texts) else 0


def paraphrase_warning(count: int, remedy: str) -> str:
    """Returns a warning about prompts that may ask the same question.

    Args:
        count: Number of such prompts, more than 0.
        remedy: What the user should do, as an imperative without a period.
    """
    return (
        f"{count:,} prompts share nearly all their content words with a prompt of another group. If they ask the same "
        f"question, it counts too often and intervals are too narrow. In that case, {remedy}."
    )


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) >= len(ending) + 3:
            return word.removesuffix(ending)
    return word
