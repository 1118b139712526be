"""The probe *equal texts*: texts that answer several prompts, so they cannot depend on the prompt."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
        numbers: (N,) 1 for a canned completion, 0 for any other; between 0 and 1 if a side chooses from many texts.
        note: Sentences on misspelled copies and weights below 1 among the policy's completions; "" if there are none.
    """

    numbers: tuple[list[float], list[float]]
    note: str


def find_canned(pair: Pair) -> CannedTexts:
    """Finds the canned completions: their text answers several prompts, counting both sides, and is not merely a label.

    It is long, or a side answers almost always with it, or `texts_for_all_prompts` finds it. Prompts that ask the same
    question may have the same answer, so they count as one.

    Args:
        pair: The completions.
    """
    exact = [[normalize_text(side.texts[row]) for row in rows] for side, rows in
             zip((pair.policy, pair.sft), pair.rows, strict=True)]  # fmt: skip
    texts = _merge_long(pair, exact)
    answered_questions: dict[str, set[int]] = {}
    for side_texts, groups in zip(texts, pair.groups, strict=True):
        for text, question in zip(side_texts, pair.questions[groups].tolist(), strict=True):
            answered_questions.setdefault(text, set()).add(question)
    constants = {
        text
        for side_texts in texts
        for text, count in Counter(side_texts).items()
        if count >= MIN_CONSTANT_SHARE * len(side_texts)
    }
    weights = texts_for_all_prompts(pair, texts)

    def canned_weight(text: str, tokens: Sequence[str], is_counted: bool) -> float:
        if len(answered_questions[text]) < 2:
            return 0.0
        # A text that a program accepts for almost every question exploits the program, so it counts even if verified.
        if text in constants or (is_counted and len(tokens) > MAX_ANSWER_WORDS):
            return 1.0
        return weights.get(text, 0.0) if is_counted else 0.0

    policy_numbers, sft_numbers = (
        [canned_weight(*row) for row in zip(side_texts, side_tokens, counted, strict=True)]
        for side_texts, side_tokens, counted in zip(texts, pair.tokens, pair.counted, strict=True)
    )
    misspelled = sum(
        number > 0 and text != own for number, text, own in zip(policy_numbers, texts[0], exact[0], strict=True)
    )
    notes = [f"Of these, {misspelled} equal another one except for spelling."] if misspelled else []
    if (weight := max((number for number in policy_numbers if number < 1), default=0.0)) > 0:
        notes.append(
            f"Recurring texts count {weight:.2f} each, because there are more than {MAX_FULL_WEIGHT_TEXTS} of them."
        )
    return CannedTexts((policy_numbers, sft_numbers), " ".join(notes))


def _merge_long(pair: Pair, exact: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Returns (policy, SFT): (N,) texts. Replaces misspelled copies of a long text by one of them."""
    policy_words, sft_words = ({word for tokens in side for word in tokens} for side in pair.tokens)
    prompt_words = {word for prompts in pair.prompts for prompt in prompts for word in plain_words(prompt)}
    texts, tokens = [*exact[0], *exact[1]], [*pair.tokens[0], *pair.tokens[1]]
    rows = [row for row, words in enumerate(tokens) if len(words) > MAX_ANSWER_WORDS]
    merged = merge_copies(
        [texts[row] for row in rows], [tokens[row] for row in rows], prompt_words | policy_words & sft_words
    )
    for row, text in zip(rows, merged, strict=True):
        texts[row] = text
    return texts[: len(exact[0])], texts[len(exact[0]) :]
