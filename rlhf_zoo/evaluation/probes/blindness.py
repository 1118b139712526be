"""Whether texts alone show that they do not depend on their prompts, without a model.

Texts are blind if completions to prompts that ask different things match about as often as completions to one prompt.
Their match rate must be at least `MIN_MATCH_RATE`, the lower bound of the 95% interval of the rate within a prompt, and
`MIN_BLIND_RATIO` times its upper bound. The words of a text's prompt are masked before texts are compared. Words in
more than half of the prompts, such as the options of a choice, are not masked: they may be what distinguishes the
answers.
"""

import math
from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...modeling.words import words
from ..stats import group_indices
from .texts import Pair, to_template

#: Texts are prompt-blind if their match rate across prompts is at least this share of the rate within a prompt.
MIN_BLIND_RATIO = 0.9
#: Prompt-blind texts must also match in at least this share of the pairs across prompts.
MIN_MATCH_RATE = 0.25
#: Maximum number of words in a label such as "yes". Two or more labels are answers: texts cannot show blindness.
MAX_LABEL_WORDS = 4


def is_blind(pair: Pair) -> bool:
    """Whether the policy's texts alone show that they do not depend on their prompts.

    Args:
        pair: The completions.
    """
    groups, tokens, prompt_words = (
        pair.groups[0],
        pair.body_words[0],
        [set(words(prompt)) for prompt in pair.prompts[0]],
    )
    # Spellings of one question count as one prompt: their answers should match.
    questions = pair.questions[groups]
    # Short labels such as "yes" may recur because they are right answers to several prompts.
    labels = Counter(
        text for text, _ in {(tuple(text_tokens), q) for text_tokens, q in zip(tokens, questions.tolist(), strict=True)}
    )
    if sum(0 < len(text) <= MAX_LABEL_WORDS and prompts > 1 for text, prompts in labels.items()) > 1:
        return False
    word_counts = Counter(word for prompt_word_set in prompt_words for word in prompt_word_set)
    prompt_specific = [
        {word for word in prompt_word_set if 2 * word_counts[word] <= len(prompt_words)}
        for prompt_word_set in prompt_words
    ]
    templates = [to_template(prompt_specific[g], text_tokens) for text_tokens, g in zip(tokens, groups, strict=True)]
    # A verified answer, or one that its prompt holds, equals no other.
    texts = group_indices(
        [
            (str(row),) if set(template) == {"_"} or not counted else ("", *template)
            for row, (template, counted) in enumerate(zip(templates, pair.counted[0], strict=True))
        ]
    )

    def pairs(counts: ArrayLike) -> NDArray[np.intp]:
        return np.asarray(counts) * (np.asarray(counts) - 1) // 2

    texts_per_prompt, text_counts = (
        np.bincount(questions),
        Counter(zip(questions.tolist(), texts.tolist(), strict=True)),
    )
    equal = np.bincount([q for q, _ in text_counts], weights=pairs(list(text_counts.values())))
    across_prompts = float(pairs(np.bincount(texts)).sum() - equal.sum()) / (
        pairs(len(groups)) - pairs(texts_per_prompt).sum()
    )
    has_several = texts_per_prompt > 1
    rates = equal[has_several] / pairs(texts_per_prompt)[has_several]
    # With a single prompt, or one text per prompt, nothing bounds the rate.
    low, high = 0.0, 1.0
    if len(rates) > 1:
        half = 1.96 * float(rates.std(ddof=1)) / math.sqrt(len(rates))
        low, high = rates.mean() - half, rates.mean() + half
    return bool(across_prompts >= MIN_MATCH_RATE and low <= across_prompts and across_prompts >= MIN_BLIND_RATIO * high)
