"""Finds copies of one text that differ only in spelling, such as copies with different typos.

Two texts are such copies if three conditions hold wherever their words differ: the letters are alike, no word there
has a digit, and one of the words may be misspelled. A word in `vocabulary` or in many texts is not misspelled, so
"Sunday" instead of "Monday" makes a different text, and so does another number. In addition, at least half of the
differences must involve a word that is in many texts, and so is probably the right spelling.
"""

from collections import Counter
from collections.abc import Sequence, Set
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

#: At most this many texts are all compared with each other. Other texts are compared with the copies found among these.
SAMPLE_SIZE = 300
#: Each of the other texts is compared with at most this many copies of a text.
MAX_MEMBERS = 10
#: Copies have at least this share of their words in common, and their lengths in letters differ by at most a tenth.
MIN_SHARED_WORDS = 0.4
_MIN_LENGTH_RATIO = 0.9
#: Where words differ, at least this share of their letters agrees, in order; words of up to two letters may differ.
MIN_SAME_LETTERS = 0.6
_MAX_SHORT_WORD = 2
#: A word is common if at least this share of the texts, and at least three of them, have it.
MIN_COMMON_SHARE, MIN_COMMON_TEXTS = 0.05, 3


def merge_copies(texts: Sequence[str], text_words: Sequence[Sequence[str]], vocabulary: Set[str]) -> list[str]:
    """Replaces misspelled copies of a text by one of them.

    Args:
        texts: (N,) texts.
        text_words: (N,) their words.
        vocabulary: Words that are not misspelled.

    Returns:
        (N,) texts, equal for copies.
    """
    row_by_text = {text: row for row, text in enumerate(texts)}
    # Sorted, so that the result does not depend on the order of the input.
    distinct_texts = sorted(row_by_text)
    words = [text_words[row_by_text[text]] for text in distinct_texts]
    size = len(distinct_texts)
    sample = np.unique(np.linspace(0, size - 1, min(size, SAMPLE_SIZE)).astype(int)).tolist()
    counts = Counter(word for index in sample for word in set(words[index]))
    common = {word for word, count in counts.items() if count >= max(MIN_COMMON_TEXTS, MIN_COMMON_SHARE * len(sample))}
    representative = {index: index for index in sample}  # of each text, the copy that replaces it
    for a, b in _similar_pairs(words, sample):
        if representative[a] != representative[b] and _are_copies(words[a], words[b], vocabulary, common):
            new, old = sorted((representative[a], representative[b]))
            representative.update({index: new for index, current in representative.items() if current == old})
    members: dict[int, list[int]] = {}
    for index, first in representative.items():
        members.setdefault(first, []).append(index)
    copies = {first: indices[:MAX_MEMBERS] for first, indices in members.items() if len(indices) > 1}
    for index in set(range(size)) - representative.keys():
        matches = (first for first, indices in copies.items()
                   if any(_are_copies(words[index], words[k], vocabulary, common) for k in indices))  # fmt: skip
        representative[index] = next(matches, index)
    replacements = {text: distinct_texts[representative[index]] for index, text in enumerate(distinct_texts)}
    return [replacements[text] for text in texts]


def _similar_pairs(words: Sequence[Sequence[str]], indices: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the pairs of indices whose texts are about equally long and share enough words to be copies."""
    sets = [set(words[index]) for index in indices]
    column_by_word = {word: column for column, word in enumerate(sorted(set().union(*sets)))}
    matrix: NDArray[np.float32] = np.zeros((len(indices), len(column_by_word)), dtype=np.float32)
    for row, word_set in enumerate(sets):
        matrix[row, [column_by_word[word] for word in word_set]] = 1
    sizes = np.maximum(matrix.sum(1), 1)
    letter_counts = np.array([max(1, sum(map(len, words[index]))) for index in indices])
    similar = matrix @ matrix.T >= MIN_SHARED_WORDS * np.minimum.outer(sizes, sizes)
    lengths = np.minimum.outer(letter_counts, letter_counts), np.maximum.outer(letter_counts, letter_counts)
    similar &= lengths[0] >= _MIN_LENGTH_RATIO * lengths[1]
    return [(indices[a], indices[b]) for a, b in combinations(range(len(indices)), 2) if similar[a, b]]


def _are_copies(a: Sequence[str], b: Sequence[str], vocabulary: Set[str], common: Set[str]) -> bool:
    difference_count = common_word_count = 0
    for kind, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        different_words = [*a[a_start:a_end], *b[b_start:b_end]]
        if any(map(str.isdigit, "".join(different_words))) or not {*different_words} - vocabulary - common:
            return False
        # A lost or doubled space splits or joins words, so their letters are compared together.
        letters = "".join(a[a_start:a_end]), "".join(b[b_start:b_end])
        is_short = max(map(len, letters)) <= _MAX_SHORT_WORD
        if not is_short and SequenceMatcher(None, *letters, autojunk=False).ratio() < MIN_SAME_LETTERS:
            return False
        difference_count += 1
        common_word_count += any(word in common for word in different_words)
    return 2 * common_word_count >= difference_count
