"""The instructions of the corpus `instructions`: IFEval's 25 kinds with drawn arguments, in wordings of our own."""

import random
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]

#: Words that an instruction may ask for or forbid.
WORDS = (
    "river", "window", "engine", "market", "teacher", "orange", "winter", "bottle", "garden", "signal", "pocket",
    "summer", "letter", "bridge", "castle", "doctor", "farmer", "island", "kitchen", "lantern", "mirror", "needle",
    "ocean", "paper", "quiet", "ribbon", "silver", "ticket", "useful", "valley", "wooden", "yellow", "simple",
    "honest", "famous", "gentle", "hungry", "careful", "early", "future", "music", "nature", "people", "reason",
    "season", "travel", "weather", "friend", "family", "history", "energy", "money", "morning", "holiday", "problem",
    "answer", "example", "picture", "science", "village",
)  # fmt: skip
LANGUAGES = {
    "es": "Spanish", "fr": "French", "de": "German", "it": "Italian", "pt": "Portuguese", "nl": "Dutch",
    "ru": "Russian", "hi": "Hindi", "ar": "Arabic", "sw": "Swahili", "vi": "Vietnamese", "ko": "Korean",
}  # fmt: skip
ENDINGS = (
    "That is all I have to say.", "Thanks for reading!", "Now it is your turn.", "I rest my case.",
    "See you next time.", "Who would have thought so?", "And so it goes.", "What do you make of this?",
    "Good luck out there!", "Let us leave it at that.", "Feel free to write back.", "More on this tomorrow.",
)  # fmt: skip
FIRST_WORDS = ("today", "however", "nobody", "later", "maybe", "imagine", "still", "once", "finally", "every", "people")
SPLITTERS = ("Section", "SECTION", "Part", "Chapter", "Step")
#: Wordings of the relations "less than" and "at least".
LESS_THAN = ("fewer than {n}", "less than {n}", "under {n}")
AT_LEAST = ("at least {n}", "{n} or more", "no fewer than {n}")


def _relation(rng: random.Random, number: int, share_at_least: float = 0.6) -> tuple[str, str]:
    """Draws a relation, and returns it with words that express it together with the number."""
    relation = "at least" if rng.random() < share_at_least else "less than"
    return relation, rng.choice(AT_LEAST if relation == "at least" else LESS_THAN).format(n=number)


def _count_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _existence(rng: random.Random) -> tuple[Arguments, list[str]]:
    words = rng.sample(WORDS, rng.choice((1, 2, 2, 3)))
    word_list = " and ".join(f'"{word}"' for word in words)
    return {"keywords": words}, [
        f"Mention {word_list} in your answer.",
        f"Your text has to contain {word_list}.",
        f"Make sure to use {word_list}.",
    ]


def _frequency(rng: random.Random) -> tuple[Arguments, list[str]]:
    word = rng.choice(WORDS)
    number = rng.choice((2, 2, 3, 3, 4))
    relation, times = _relation(rng, number, share_at_least=0.75)
    return {"keyword": word, "frequency": number, "relation": relation}, [
        f'Use the word "{word}" {times} times.',
        f'"{word}" has to occur {times} times.',
        f'I want to read the word "{word}" {times} times.',
    ]


def _forbidden(rng: random.Random) -> tuple[Arguments, list[str]]:
    words = rng.sample(WORDS, rng.choice((1, 2, 3)))
    word_list = " or ".join(f'"{word}"' for word in words)
    return {"forbidden_words": words}, [
        f"Never use {word_list}.",
        f"You may not write {word_list} anywhere.",
        f"Leave out {word_list}.",
    ]


def _letters(rng: random.Random) -> tuple[Arguments, list[str]]:
    is_rare = rng.random() < 0.4
    letter = rng.choice("jqxzvk" if is_rare else "abcdeghilmnoprstu")
    number = rng.randint(1, 5) if is_rare else rng.randint(5, 25)
    relation, times = _relation(rng, number, share_at_least=0.7)
    return {"letter": letter, "let_frequency": number, "let_relation": relation}, [
        f'The letter "{letter}" must occur {times} times.',
        f'Your text needs the letter "{letter}" {times} times.',
        f'Use the letter "{letter}" {times} times.',
    ]


def _language(rng: random.Random) -> tuple[Arguments, list[str]]:
    code = rng.choice(list(LANGUAGES))
    name = LANGUAGES[code]
    return {"language": code}, [
        f"Reply only in {name}.",
        f"Write your whole answer in {name}.",
        f"I only read {name}, so use no other language.",
    ]


def _sentences(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(3, 8)
    relation, times = _relation(rng, number)
    return {"num_sentences": number, "relation": relation}, [
        f"Write {times} sentences.",
        f"Use {times} sentences.",
        f"Your text should have {times} sentences.",
    ]


def _paragraphs(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 5)
    return {"num_paragraphs": number}, [
        f"Write {number} paragraphs and separate them with ***",
        f"Split your text into {number} paragraphs, with *** between them.",
        f"I need exactly {number} paragraphs. Put *** between two paragraphs.",
    ]


def _words(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.choice((30, 40, 50, 60, 80, 100, 120))
    relation, times = _relation(rng, number)
    return {"num_words": number, "relation": relation}, [
        f"Write {times} words.",
        f"Use {times} words.",
        f"Your text should have {times} words.",
    ]


def _first_word(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 4)
    nth, word = rng.randint(1, number), rng.choice(FIRST_WORDS)
    return {"num_paragraphs": number, "nth_paragraph": nth, "first_word": word}, [
        f'Write {number} paragraphs with a blank line between them. Begin paragraph {nth} with the word "{word}".',
        f'Write {number} paragraphs, separated by blank lines; paragraph {nth} begins with "{word}".',
        f'Use {number} paragraphs with blank lines between them. The first word of paragraph {nth} is "{word}".',
    ]


def _placeholders(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(1, 5)
    return {"num_placeholders": number}, [
        f"Use at least {_count_noun(number, 'placeholder')} in square brackets, like [place].",
        f"Put {number} or more placeholders in square brackets, for instance [time].",
        f"Leave at least {_count_noun(number, 'detail')} open, written as [price] or [color].",
    ]


def _postscript(rng: random.Random) -> tuple[Arguments, list[str]]:
    marker = rng.choice(("P.S.", "P.P.S"))
    return {"postscript_marker": marker}, [
        f"Add a postscript at the end that starts with {marker}",
        f"Close with a postscript, marked {marker}",
        f"After the text, add a line that begins with {marker}",
    ]


def _bullets(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 6)
    return {"num_bullets": number}, [
        f"Include exactly {number} bullet points in markdown (* item).",
        f"Use exactly {number} bullet points, each on its own line after an asterisk: * item",
        f"Give a list of exactly {number} markdown bullets, such as: * point",
    ]


def _constrained(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        'Reply "My answer is maybe." if it depends, "My answer is yes." if so, and otherwise "My answer is no."',
        'If you are unsure, reply "My answer is maybe." If it is true: "My answer is yes." If not: "My answer is no."',
        'Reply with one of these: "My answer is no." (false), "My answer is maybe." (open), "My answer is yes." (true)',
    ]


def _highlights(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(1, 5)
    return {"num_highlights": number}, [
        f"Highlight at least {_count_noun(number, 'phrase')} with asterisks, *like this*.",
        f"Highlight {number} or more parts in markdown: *important part*.",
        f"Put at least {_count_noun(number, 'phrase')} between single asterisks, as in *this phrase*.",
    ]


def _sections(rng: random.Random) -> tuple[Arguments, list[str]]:
    number, splitter = rng.randint(2, 4), rng.choice(SPLITTERS)
    return {"section_spliter": splitter, "num_sections": number}, [
        f"Divide it into {number} sections with the headings {splitter} 1, {splitter} 2 and so on.",
        f"Write {number} sections and begin each with its number: {splitter} 1, {splitter} 2, ...",
        f'Use {number} sections. Head the first "{splitter} 1", the second "{splitter} 2".',
    ]


def _json(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Answer in JSON and write nothing else.",
        "A program reads your answer, so return only valid JSON.",
        "Put your whole answer into one JSON object.",
    ]


def _title(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Give it a title in double angle brackets, like <<title>>.",
        "Begin with a title between << and >>.",
        "Add a title and write it as <<my title>>.",
    ]


def _two_responses(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Give two different answers with ****** between them.",
        "Write two different versions and separate them with ******.",
        "Answer twice, in different ways. Put ****** between the two answers.",
    ]


def _repeat(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "First copy the text above exactly, then answer it. Do not copy this line.",
        "Begin your answer with the text above, word for word and without quotation marks. Leave out this line.",
        "Before you answer, copy the request above without any change. This sentence is not part of it.",
    ]


def _end(rng: random.Random) -> tuple[Arguments, list[str]]:
    phrase = rng.choice(ENDINGS)
    return {"end_phrase": phrase}, [
        f'End with these words: "{phrase}"',
        f'The last sentence must be "{phrase}"',
        f'Finish with exactly this: "{phrase}"',
    ]


def _capital_words(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 8)
    relation, times = _relation(rng, number, share_at_least=0.7)
    return {"capital_frequency": number, "capital_relation": relation}, [
        f"Write {times} words in all capitals.",
        f"Use {times} words in CAPITALS.",
        f"Your text should have {times} words in CAPITAL letters.",
    ]


def _capital(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Write in English and only in CAPITAL LETTERS.",
        "Use all caps for the whole English text.",
        "Write everything in capital letters, in English.",
    ]


def _lowercase(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Write in English and only in lowercase letters.",
        "Use lowercase letters for the whole English text.",
        "Write everything in small letters, in English, without any capital letter.",
    ]


def _no_comma(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, ["Do not use commas.", "Write it without any commas.", "Your text must not contain a comma."]


def _quotation(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Put your whole answer in double quotation marks.",
        'Start and end with a double quotation mark (").',
        "Enclose the complete text in double quotes.",
    ]


#: Kind -> a function that draws its arguments and returns them with its wordings.
INSTRUCTIONS: dict[str, Callable[[random.Random], tuple[Arguments, list[str]]]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "startend:end_checker": _end,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _capital,
    "change_case:english_lowercase": _lowercase,
    "punctuation:no_comma": _no_comma,
    "startend:quotation": _quotation,
}
