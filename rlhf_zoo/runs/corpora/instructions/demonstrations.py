"""Demonstrations for SFT: answers that a program edits until they follow the instructions of a request.

A policy that never follows a kind of instruction never gets the reward for it, so PPO alone cannot teach it. Here an
answer to the task without instructions is cut into sentences, which are put together again in the form that the
instructions ask for, such as bullets or lowercase letters. The reward's own verifiers check each edited answer.
"""

import itertools
import json
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from ....rewards.instructions import read_instructions

Arguments = dict[str, Any]

_LIST_MARK = re.compile(r"^\s*(?:[*•-]|#+|\d+[.)])\s+")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[\"“(]?[A-Z])")
_SENTENCE_END = re.compile(r"[.!?][\"”)]?$")
_MIN_WORDS = 3
#: An answer has more sentences than this only if an instruction needs more.
_SENTENCES = 3
#: Sentences with a word that an instruction asks for. They fit a noun as well as an adjective.
_WITH_WORD = (
    'One word for this is "{word}".', 'The word "{word}" belongs here as well.',
    'Some people would say "{word}" at this point.', 'What comes to mind is "{word}".',
    'In a nutshell, think of "{word}".',
)  # fmt: skip
_WITH_PLACEHOLDER = (
    "For more, ask [name].", "It takes place on [date].", "The price is [price].", "We meet at [place].",
    "Write to [email address].", "It begins at [time].", "My phone number is [phone number].",
)  # fmt: skip
_TITLES = ("{topic}", "About {topic}", "A Word on {topic}", "{topic} in Brief", "Notes on {topic}")
_POSTSCRIPTS = (
    "Thank you for reading.", "I hope that this helps.", "Let me know what you think.", "There is more to say.",
)  # fmt: skip


def demonstrate(request: dict[str, Any], answer: str, topic: str, rng: random.Random) -> str | None:
    """Edits an answer until it follows the instructions of a request.

    Args:
        request: A row with instruction_id_list and kwargs.
        answer: An answer to the request's task without the instructions.
        topic: What the answer is about, for its title.
        rng: Draws what the instructions leave open, such as which words are highlighted.

    Returns:
        The edited answer, of as many sentences as possible up to three, or more if the instructions need more; None if
        no edited answer follows all instructions.
    """
    instructions = read_instructions(request["instruction_id_list"], request["kwargs"], where="a request")
    arguments = {instruction.kind: dict(instruction.arguments) for instruction in instructions}
    if "detectable_format:constrained_response" in arguments:
        first_word = re.match(r"\W*(yes|no)\b", answer.lower())
        return f"My answer is {first_word[1] if first_word else 'maybe'}."
    title = rng.choice(_TITLES).format(topic=string.capwords(topic))
    all_sentences = sentences(answer)
    usual = min(_SENTENCES, len(all_sentences))
    for count in (*range(usual, 0, -1), *range(usual + 1, len(all_sentences) + 1)):
        parts = all_sentences[:count]
        for kind, edit_sentences in _SENTENCE_EDITS.items():
            if kind in arguments:
                parts = edit_sentences(parts, arguments[kind], rng)
        joined = [join(parts, arguments[kind]) for kind, join in _JOINS.items() if kind in arguments]
        text = joined[0] if joined else " ".join(parts)
        for kind, edit_text in _TEXT_EDITS.items():
            if kind in arguments:
                text = edit_text(text, {**arguments[kind], "title": title}, rng)
        if text == text.strip() and all(instruction.is_followed(text) for instruction in instructions):
            return text
    return None


def sentences(answer: str) -> list[str]:
    """Cuts an answer into sentences.

    Args:
        answer: The answer.

    Returns:
        The sentences, without marks of lists, headings and emphasis. Repeated ones, those of one or two words, and a
        last one that breaks off are left out.
    """
    lines = [_LIST_MARK.sub("", line).replace("*", "").strip() for line in answer.split("\n")]
    parts = [part.strip() for line in lines for part in _BETWEEN_SENTENCES.split(line)]
    complete = [part for part in parts if _SENTENCE_END.search(part) and len(part.split()) >= _MIN_WORDS]
    return list(dict.fromkeys(complete))


def _remove_words(parts: Sequence[str], words: Sequence[str]) -> list[str]:
    return [part for part in parts if not any(word.lower() in part.lower() for word in words)]


def _add_word(parts: Sequence[str], word: str, number: int, rng: random.Random) -> list[str]:
    """Adds sentences until the answer has a word a number of times."""
    parts = list(parts)
    missing = number - sum(part.lower().count(word.lower()) for part in parts)
    for pattern in rng.sample(_WITH_WORD, max(0, min(missing, len(_WITH_WORD)))):
        parts.insert(rng.randint(1, max(1, len(parts))), pattern.format(word=word))
    return parts


def _add_keywords(parts: Sequence[str], arguments: Arguments, rng: random.Random) -> list[str]:
    for word in arguments["keywords"]:
        parts = _add_word(parts, word, 1, rng)
    return list(parts)


def _set_frequency(parts: Sequence[str], arguments: Arguments, rng: random.Random) -> list[str]:
    word = arguments["keyword"]
    if arguments["relation"] == "at least":
        return _add_word(parts, word, arguments["frequency"], rng)
    return _remove_words(parts, [word])


def _add_placeholders(parts: Sequence[str], arguments: Arguments, rng: random.Random) -> list[str]:
    return [*parts, *rng.sample(_WITH_PLACEHOLDER, min(arguments["num_placeholders"], len(_WITH_PLACEHOLDER)))]


def _capitalize_words(parts: Sequence[str], arguments: Arguments, rng: random.Random) -> list[str]:
    """Puts words of at least four letters in capitals; changes nothing if fewer capitals are wanted."""
    texts = [part.split(" ") for part in parts]
    places = [(i, j) for i, words in enumerate(texts) for j, word in enumerate(words) if re.match("[A-Za-z]{4}", word)]
    number = arguments["capital_frequency"] if arguments["capital_relation"] == "at least" else 0
    for i, j in rng.sample(places, min(number, len(places))):
        texts[i][j] = texts[i][j].upper()
    return [" ".join(words) for words in texts]


def _highlight(parts: Sequence[str], arguments: Arguments, rng: random.Random) -> list[str]:
    """Puts pairs of words between asterisks."""
    texts = [part.split(" ") for part in parts]
    places = [
        (i, j)
        for i, words in enumerate(texts)
        for j in range(0, len(words) - 1, 3)
        if words[j].isalpha() and words[j + 1].isalpha()
    ]
    for i, j in rng.sample(places, min(arguments["num_highlights"], len(places))):
        texts[i][j] = f"*{texts[i][j]}"
        texts[i][j + 1] += "*"
    return [" ".join(words) for words in texts]


def _groups(parts: Sequence[str], number: int) -> list[str]:
    """Joins sentences to a number of texts of about the same number of sentences."""
    bounds = [len(parts) * index // number for index in range(number + 1)]
    return [" ".join(parts[start:end]) for start, end in itertools.pairwise(bounds)]


def _as_bullets(parts: Sequence[str], arguments: Arguments) -> str:
    start = max(0, len(parts) - arguments["num_bullets"])
    introduction = [" ".join(parts[: min(start, 2)]), ""] if start else []
    return "\n".join([*introduction, *(f"* {part}" for part in parts[start:])])


def _as_paragraphs_with_first_word(parts: Sequence[str], arguments: Arguments) -> str:
    paragraphs = _groups(parts, arguments["num_paragraphs"])
    nth = arguments["nth_paragraph"] - 1
    text = paragraphs[nth] if re.match(r"I\b", paragraphs[nth]) else paragraphs[nth][:1].lower() + paragraphs[nth][1:]
    paragraphs[nth] = f"{arguments['first_word'].capitalize()}, {text}"
    return "\n\n".join(paragraphs)


def _as_sections(parts: Sequence[str], arguments: Arguments) -> str:
    groups = _groups(parts, arguments["num_sections"])
    heading = arguments["section_spliter"].strip()
    return "\n\n".join(f"{heading} {number}\n{group}" for number, group in enumerate(groups, 1))


def _add_end(text: str, arguments: Arguments, rng: random.Random) -> str:
    separator = "\n" if "\n" in text else " "
    return f"{text}{separator}{arguments['end_phrase']}"


def _as_json(text: str, arguments: Arguments, rng: random.Random) -> str:
    document = json.dumps({"title": arguments["title"], "text": text}, indent=2, ensure_ascii=False)
    return f"```json\n{document}\n```" if rng.random() < 0.5 else document


#: Kind -> edit of an answer's sentences. Edits are applied in this order.
_SENTENCE_EDITS: dict[str, Callable[[Sequence[str], Arguments, random.Random], list[str]]] = {
    "keywords:forbidden_words": lambda parts, arguments, rng: _remove_words(parts, arguments["forbidden_words"]),
    "keywords:existence": _add_keywords,
    "keywords:frequency": _set_frequency,
    "punctuation:no_comma": lambda parts, arguments, rng: [part.replace(",", "") for part in parts],
    "detectable_content:number_placeholders": _add_placeholders,
    "change_case:capital_word_frequency": _capitalize_words,
    "detectable_format:number_highlighted_sections": _highlight,
}
#: Kind -> how the sentences become a text. If a request has two of these kinds, the verifiers refuse the text.
_JOINS: dict[str, Callable[[Sequence[str], Arguments], str]] = {
    "detectable_format:number_bullet_lists": _as_bullets,
    "length_constraints:number_paragraphs": lambda parts, arguments: "\n***\n".join(
        _groups(parts, arguments["num_paragraphs"])
    ),
    "length_constraints:nth_paragraph_first_word": _as_paragraphs_with_first_word,
    "detectable_format:multiple_sections": _as_sections,
    "combination:two_responses": lambda parts, arguments: "\n******\n".join(_groups(parts, 2)),
}
#: Kind -> edit of the text, whose arguments have a title too. Edits are applied in this order.
_TEXT_EDITS: dict[str, Callable[[str, Arguments, random.Random], str]] = {
    "detectable_content:postscript": lambda text, arguments, rng: (
        f"{text}\n\n{arguments['postscript_marker'].strip()} {rng.choice(_POSTSCRIPTS)}"
    ),
    "startend:end_checker": _add_end,
    "detectable_format:title": lambda text, arguments, rng: f"<<{arguments['title']}>>\n\n{text}",
    "detectable_format:json_format": _as_json,
    "startend:quotation": lambda text, arguments, rng: '"' + text.replace('"', "'") + '"',
    "change_case:english_capital": lambda text, arguments, rng: text.upper(),
    "change_case:english_lowercase": lambda text, arguments, rng: text.lower(),
    "combination:repeat_prompt": lambda text, arguments, rng: f"{arguments['prompt_to_repeat']}\n\n{text}",
}
