"""Verifiers for the 25 kinds of instructions in IFEval (Zhou et al. 2023, arXiv:2311.07911).

Each verifier takes an answer and an instruction's arguments, named as in google/IFEval, and returns whether the answer
follows the instruction. Tests compare the results with those of Google's code, a copy of which is in
lm-evaluation-harness and in the package if-verifiable. We do not use that code, because it

- draws an argument at random if the argument is missing or unusual (the letter "#", a paragraph beyond the last);
- uses keywords and markers from the data as regular expressions;
- takes quadratic time on "[[[[…", "<<<<…" and many line ends in a row, and raises RecursionError on deeply nested JSON;
- downloads NLTK's Punkt model to count sentences and words in capitals;
- detects languages with an unseeded random generator, and accepts any answer whose language cannot be detected.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..fileio import int_or_none
from .instructions_text import count_capital_words, count_sentences, detect_language

RELATIONS = ("at least", "less than")
#: An answer to `detectable_format:constrained_response` must contain one of these.
CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

Arguments = Mapping[str, Any]

_BULLET = re.compile(r"^[^\S\n]*(?:\*[^*].*|-.*)$", re.MULTILINE)
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*")
_WORD = re.compile(r"\w+")
_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.P.S": re.compile(r"p\.\s?p\.\s?s"), "P.S.": re.compile(r"p\.\s?s\.")}


@dataclass(frozen=True)
class InstructionKind:
    """A kind of instruction.

    Attributes:
        follows: The verifier: (answer, arguments) -> whether the answer follows the instruction.
        expected: Name of an argument -> description of a valid value, a key of `ARGUMENT_CHECKS`.
    """

    follows: Callable[[str, Arguments], bool]
    expected: Mapping[str, str]

    def find_problem(self, arguments: Arguments) -> str | None:
        """Describes the first missing or invalid argument, as the end of a message; None if all arguments are valid.

        Args:
            arguments: The instruction's arguments by name.
        """
        for name, description in self.expected.items():
            if name not in arguments:
                return f"has no {name}: add {description}"
            if not ARGUMENT_CHECKS[description](arguments[name]):
                return f"has the {name} {arguments[name]!r}: give {description}"
        nth, count = arguments.get("nth_paragraph"), arguments.get("num_paragraphs")
        if "nth_paragraph" in self.expected and nth is not None and count is not None and not 1 <= nth <= count:
            return f"has the nth_paragraph {nth}: give a number from 1 to num_paragraphs, {count}"
        return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


#: Description of a valid argument, for messages -> whether an argument is valid.
ARGUMENT_CHECKS: dict[str, Callable[[Any], bool]] = {
    "a whole number of at least 0": lambda value: (count := int_or_none(value)) is not None and count >= 0,
    "'at least' or 'less than'": lambda value: value in RELATIONS,
    "a text": _is_text,
    "a list of texts": lambda value: isinstance(value, (list, tuple)) and bool(value) and all(map(_is_text, value)),
    "one character": lambda value: isinstance(value, str) and len(value) == 1,
}
_COUNT, _RELATION, _TEXT, _TEXTS, _CHARACTER = ARGUMENT_CHECKS  # the descriptions, in this order


def _satisfies_bound(count: int, arguments: Arguments, number_key: str, relation_key: str = "relation") -> bool:
    bound = arguments[number_key]
    return count < bound if arguments[relation_key] == "less than" else count >= bound


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, flags=re.IGNORECASE))


def _avoids_words(text: str, arguments: Arguments) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, flags=re.IGNORECASE) for word in arguments["forbidden_words"]
    )


def _has_first_word(text: str, arguments: Arguments) -> bool:
    paragraphs = text.split("\n\n")
    if sum(bool(paragraph.strip()) for paragraph in paragraphs) != arguments["num_paragraphs"]:
        return False
    words = paragraphs[arguments["nth_paragraph"] - 1].split()
    if not words:
        return False
    first_word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return first_word.lower() == arguments["first_word"].strip().lower()


def _has_paragraphs(text: str, arguments: Arguments) -> bool:
    has_text = [bool(paragraph.strip()) for paragraph in _DIVIDER.split(text)]
    # Only the first and the last part may be empty: an answer may begin or end with a divider.
    return all(has_text[1:-1]) and sum(has_text) == arguments["num_paragraphs"]


def _has_placeholders(text: str, arguments: Arguments) -> bool:
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= arguments["num_placeholders"]


def _has_postscript(text: str, arguments: Arguments) -> bool:
    marker, lower_text = arguments["postscript_marker"].strip(), text.lower()
    pattern = _POSTSCRIPTS.get(marker)
    return marker.lower() in lower_text if pattern is None else pattern.search(lower_text) is not None


def _has_highlights(text: str, arguments: Arguments) -> bool:
    highlights = [match.strip("*") for match in _HIGHLIGHT.findall(text)]
    highlights += [match.removeprefix("**").removesuffix("**") for match in _DOUBLE_HIGHLIGHT.findall(text)]
    return sum(bool(highlight.strip()) for highlight in highlights) >= arguments["num_highlights"]


def _has_sections(text: str, arguments: Arguments) -> bool:
    headings = re.findall(re.escape(arguments["section_spliter"].strip()) + r"\s?\d+", text)
    return len(headings) >= arguments["num_sections"]


def _is_json(text: str, arguments: Arguments) -> bool:
    body = text.strip()
    for fence in _FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str, arguments: Arguments) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _has_two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(text: str, arguments: Arguments) -> bool:
    return text.strip().lower().startswith(arguments["prompt_to_repeat"].strip().lower())


def _ends_with(text: str, arguments: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())


def _is_quoted(text: str, arguments: Arguments) -> bool:
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


#: {id in IFEval: kind}.
KINDS: dict[str, InstructionKind] = {
    "keywords:existence": InstructionKind(
        lambda text, args: all(_occurrences(word, text) for word in args["keywords"]), {"keywords": _TEXTS}
    ),
    "keywords:frequency": InstructionKind(
        lambda text, args: _satisfies_bound(_occurrences(args["keyword"].strip(), text), args, "frequency"),
        {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION},
    ),
    "keywords:forbidden_words": InstructionKind(_avoids_words, {"forbidden_words": _TEXTS}),
    "keywords:letter_frequency": InstructionKind(
        lambda text, args: _satisfies_bound(
            text.lower().count(args["letter"].lower()), args, "let_frequency", "let_relation"
        ),
        {"letter": _CHARACTER, "let_frequency": _COUNT, "let_relation": _RELATION},
    ),
    "language:response_language": InstructionKind(
        lambda text, args: detect_language(text) == args["language"], {"language": _TEXT}
    ),
    "length_constraints:number_sentences": InstructionKind(
        lambda text, args: _satisfies_bound(count_sentences(text), args, "num_sentences"),
        {"num_sentences": _COUNT, "relation": _RELATION},
    ),
    "length_constraints:number_paragraphs": InstructionKind(_has_paragraphs, {"num_paragraphs": _COUNT}),
    "length_constraints:number_words": InstructionKind(
        lambda text, args: _satisfies_bound(len(_WORD.findall(text)), args, "num_words"),
        {"num_words": _COUNT, "relation": _RELATION},
    ),
    "length_constraints:nth_paragraph_first_word": InstructionKind(
        _has_first_word, {"num_paragraphs": _COUNT, "nth_paragraph": _COUNT, "first_word": _TEXT}
    ),
    "detectable_content:number_placeholders": InstructionKind(_has_placeholders, {"num_placeholders": _COUNT}),
    "detectable_content:postscript": InstructionKind(_has_postscript, {"postscript_marker": _TEXT}),
    "detectable_format:number_bullet_lists": InstructionKind(
        lambda text, args: len(_BULLET.findall(text)) == args["num_bullets"], {"num_bullets": _COUNT}
    ),
    "detectable_format:constrained_response": InstructionKind(
        lambda text, args: any(option in text for option in CONSTRAINED_RESPONSES), {}
    ),
    "detectable_format:number_highlighted_sections": InstructionKind(_has_highlights, {"num_highlights": _COUNT}),
    "detectable_format:multiple_sections": InstructionKind(
        _has_sections, {"section_spliter": _TEXT, "num_sections": _COUNT}
    ),
    "detectable_format:json_format": InstructionKind(_is_json, {}),
    "detectable_format:title": InstructionKind(_has_title, {}),
    "combination:two_responses": InstructionKind(_has_two_responses, {}),
    "combination:repeat_prompt": InstructionKind(_repeats_prompt, {"prompt_to_repeat": _TEXT}),
    "startend:end_checker": InstructionKind(_ends_with, {"end_phrase": _TEXT}),
    "change_case:capital_word_frequency": InstructionKind(
        lambda text, args: _satisfies_bound(count_capital_words(text), args, "capital_frequency", "capital_relation"),
        {"capital_frequency": _COUNT, "capital_relation": _RELATION},
    ),
    "change_case:english_capital": InstructionKind(
        lambda text, args: text.isupper() and detect_language(text) == "en", {}
    ),
    "change_case:english_lowercase": InstructionKind(
        lambda text, args: text.islower() and detect_language(text) == "en", {}
    ),
    "punctuation:no_comma": InstructionKind(lambda text, args: "," not in text, {}),
    "startend:quotation": InstructionKind(_is_quoted, {}),
}


def answer_forms(text: str, *, loose: bool) -> list[str]:
    """Returns the forms in which an answer counts. It follows an instruction if any of them does.

    Args:
        text: The answer.
        loose: Whether the answer also counts without its first line, its last line or both, and without asterisks.

    Returns:
        The nonempty forms. The answer itself comes first.
    """
    forms = [text]
    if loose:
        lines = text.split("\n")
        forms += ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
        forms += [form.replace("*", "") for form in forms]
    return [form for form in dict.fromkeys(forms) if form.strip()]
