"""The probe *equal texts*: texts that answer several prompts, so they cannot depend on the prompt."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ..text import normalize_text
from .blindness import MAX_FULL_WEIGHT_TEXTS, texts_for_all_prompts
from .misspellings import merge_copies
from .texts import Pair, plain_words

#: Texts with more words than this that answer several prompts are canned. Shorter ones may be right answers.
MAX_ANSWER_WORDS = 15
#: A text of any length is canned if at least this share of a side's completions are equal to it.
MIN_CONSTANT_SHARE = 0.9


@dataclass(frozen=True)
class CannedTexts:
    """The canned completions of the policy and of SFT.

    Attributes:
        weights: (N,) 1 for a canned completion, 0 for any other; between 0 and 1 if a side chooses from many texts.
        note: Sentences on misspelled copies and weights below 1 among the policy's completions; "" if there are none.
    """

    weights: tuple[list[float], list[float]]
    note: str


def find_canned(pair: Pair) -> CannedTexts:
    """Finds the canned completions: their text answers several prompts, counting both sides, and is not merely a label.

    It is long, or a side answers almost always with it, or `texts_for_all_prompts` finds it. Prompts that ask the same
    question may have the same answer, so they count as one.
    """
    original_texts = [[normalize_text(side.texts[row]) for row in rows] for side, rows in
                      zip((pair.policy, pair.sft), pair.rows, strict=True)]  # fmt: skip
    texts = _merge_long_copies(pair, original_texts)
    answered_questions: dict[str, set[int]] = {}
    for side_texts, prompt_ids in zip(texts, pair.prompt_ids, strict=True):
        for text, question in zip(side_texts, pair.questions[prompt_ids].tolist(), strict=True):
            answered_questions.setdefault(text, set()).add(question)
    constants = {
        text
        for side_texts in texts
        for text, count in Counter(side_texts).items()
        if count >= MIN_CONSTANT_SHARE * len(side_texts)
    }
    recurring_weights = texts_for_all_prompts(pair, texts)

    def canned_weight(text: str, text_words: Sequence[str], is_counted: bool) -> float:
        if len(answered_questions[text]) < 2:
            return 0.0
        # A text that a program accepts for almost every question exploits the program, so it counts even if verified.
        if text in constants or (is_counted and len(text_words) > MAX_ANSWER_WORDS):
            return 1.0
        return recurring_weights.get(text, 0.0) if is_counted else 0.0

    policy_weights, sft_weights = (
        [canned_weight(*row) for row in zip(side_texts, side_words, counted, strict=True)]
        for side_texts, side_words, counted in zip(texts, pair.text_words, pair.counted, strict=True)
    )
    copy_count = sum(
        weight > 0 and text != original
        for weight, text, original in zip(policy_weights, texts[0], original_texts[0], strict=True)
    )
    notes = [f"Of these, {copy_count} equal another one except for spelling."] if copy_count else []
    recurring_weight = max((weight for weight in policy_weights if weight < 1), default=0.0)
    if recurring_weight > 0:
        reason = f"because there are more than {MAX_FULL_WEIGHT_TEXTS} of them"
        notes.append(f"Recurring texts count {recurring_weight:.2f} each, {reason}.")
    return CannedTexts((policy_weights, sft_weights), " ".join(notes))


def _merge_long_copies(pair: Pair, originals: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Replaces misspelled copies of a long text by one of them, and returns (policy, SFT): (N,) texts."""
    policy_words, sft_words = (set(chain.from_iterable(side)) for side in pair.text_words)
    prompt_words = {word for prompts in pair.prompts for prompt in prompts for word in plain_words(prompt)}
    texts, text_words = [*originals[0], *originals[1]], [*pair.text_words[0], *pair.text_words[1]]
    rows = [row for row, words in enumerate(text_words) if len(words) > MAX_ANSWER_WORDS]
    merged_texts = merge_copies(
        [texts[row] for row in rows], [text_words[row] for row in rows], prompt_words | policy_words & sft_words
    )
    for row, text in zip(rows, merged_texts, strict=True):
        texts[row] = text
    return texts[: len(originals[0])], texts[len(originals[0]) :]
