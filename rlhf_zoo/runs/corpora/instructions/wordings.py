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
    """Draws a relation, and its words with the number."""
    relation = "at least" if rng.random() < share_at_least else "less than"
    return relation, rng.choice(AT_LEAST if relation == "at least" else LESS_THAN).format(n=number)


def _existence(rng: random.Random) -> tuple[Arguments, list[str]]:
    words = rng.sample(WORDS, rng.choice((1, 2, 2, 3)))
    listed = " and ".join(f'"{word}"' for word in words)
    return {"keywords": words}, [
        f"Work {listed} into the text.",
        f"Somewhere you have to mention {listed}.",
        f"Make use of {listed}.",
    ]


def _frequency(rng: random.Random) -> tuple[Arguments, list[str]]:
    word = rng.choice(WORDS)
    number = rng.choice((2, 2, 3, 3, 4))
    relation, times = _relation(rng, number, share_at_least=0.75)
    return {"keyword": word, "frequency": number, "relation": relation}, [
        f'Use "{word}" {times} times.',
        f'"{word}" has to occur {times} times.',
        f'I want to read "{word}" {times} times.',
    ]


def _forbidden(rng: random.Random) -> tuple[Arguments, list[str]]:
    words = rng.sample(WORDS, rng.choice((1, 2, 3)))
    listed = " or ".join(f'"{word}"' for word in words)
    return {"forbidden_words": words}, [
        f"Stay away from {listed}.",
        f"You may not write {listed} anywhere.",
        f"Get by without {listed}.",
    ]


def _letters(rng: random.Random) -> tuple[Arguments, list[str]]:
    rare = rng.random() < 0.4
    letter = rng.choice("jqxzvk" if rare else "abcdeghilmnoprstu")
    number = rng.randint(1, 5) if rare else rng.randint(5, 25)
    relation, times = _relation(rng, number, share_at_least=0.7)
    return {"letter": letter, "let_frequency": number, "let_relation": relation}, [
        f'The letter "{letter}" must turn up {times} times.',
        f'Count your letters: there have to be {times} of "{letter}".',
        f'Use the letter "{letter}" {times} times.',
    ]


def _language(rng: random.Random) -> tuple[Arguments, list[str]]:
    code = rng.choice(list(LANGUAGES))
    name = LANGUAGES[code]
    return {"language": code}, [
        f"Reply only in {name}.",
        f"I read nothing but {name}, so use that language throughout.",
        f"All of it has to be written in {name}.",
    ]


def _sentences(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(3, 8)
    relation, times = _relation(rng, number)
    return {"num_sentences": number, "relation": relation}, [
        f"Form {times} sentences.",
        f"The text should run to {times} sentences.",
        f"Make it {times} sentences long.",
    ]


def _paragraphs(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 5)
    return {"num_paragraphs": number}, [
        f"Write {number} paragraphs and put a line with *** between each two.",
        f"Split it into {number} paragraphs, divided by ***.",
        f"I need {number} paragraphs. Set *** between neighbors.",
    ]


def _words(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.choice((30, 40, 50, 60, 80, 100, 120))
    relation, times = _relation(rng, number)
    return {"num_words": number, "relation": relation}, [
        f"Take {times} words.",
        f"The length should be {times} words.",
        f"Keep count: {times} words.",
    ]


def _first_word(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 4)
    nth, word = rng.randint(1, number), rng.choice(FIRST_WORDS)
    return {"num_paragraphs": number, "nth_paragraph": nth, "first_word": word}, [
        f'Write {number} paragraphs with an empty line between them, and open number {nth} with "{word}".',
        f'Leave a blank line after each of your {number} paragraphs; paragraph {nth} begins with "{word}".',
        f'Use {number} paragraphs, kept apart by blank lines. Let "{word}" be the first word of number {nth}.',
    ]


def _placeholders(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(1, 5)
    return {"num_placeholders": number}, [
        f"Leave {number} or more gaps to fill in later and mark them with square brackets like [place].",
        f"Put in at least {number} blanks in square brackets, for instance [time].",
        f"No fewer than {number} details stay open: write them as [price] or [color].",
    ]


def _postscript(rng: random.Random) -> tuple[Arguments, list[str]]:
    marker = rng.choice(("P.S.", "P.P.S"))
    return {"postscript_marker": marker}, [
        f"Close with an afterthought marked {marker}",
        f"Put a line that opens with {marker} at the bottom.",
        f"Below the text, add something after {marker}",
    ]


def _bullets(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 6)
    return {"num_bullets": number}, [
        f"Include a list of exactly {number} items, each on a line that begins with an asterisk and a space.",
        f"Give precisely {number} points as markdown bullets (* item).",
        f"There have to be {number} bullets, neither more nor fewer, written with * in front.",
    ]


def _constrained(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        'Pick "My answer is maybe." if it depends, "My answer is yes." if so, and otherwise "My answer is no."',
        'If you are unsure reply "My answer is maybe." and else "My answer is yes." if so, "My answer is no." if not.',
        'Choose from: "My answer is no." (false), "My answer is maybe." (open) and "My answer is yes." (true)',
    ]


def _highlights(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(1, 5)
    return {"num_highlights": number}, [
        f"Mark {number} or more passages by asterisks, *like this*.",
        f"Stress no fewer than {number} parts with markdown: *important part*.",
        f"Set at least {number} phrases between single asterisks, as in *this phrase*.",
    ]


def _sections(rng: random.Random) -> tuple[Arguments, list[str]]:
    number, splitter = rng.randint(2, 4), rng.choice(SPLITTERS)
    return {"section_spliter": splitter, "num_sections": number}, [
        f'Divide it into {number} pieces with the headings "{splitter} 1" and so on.',
        f'Number your {number} pieces: "{splitter} 1", then "{splitter} 2", up to the last.',
        f'Give it {number} headed pieces, the first under "{splitter} 1".',
    ]


def _json(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Return valid JSON and nothing else.",
        "The reply is read by a program, so make it a JSON object.",
        "Put all of it into one JSON value.",
    ]


def _title(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Give it a heading in double angle brackets like <<heading>>.",
        "Above the text goes a title between << and >>.",
        "Name the text and write the name as <<name>>.",
    ]


def _two_responses(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Offer two versions that differ, with ****** between them.",
        "I would like two unlike answers; put ****** after the first.",
        "Answer twice in different ways and part the answers by ******.",
    ]


def _repeat(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Begin by copying the request above exactly, then carry it out. This last line is not part of it.",
        "Before anything else, quote what stands above, word by word and without quotation marks. Then do it.",
        "Start with the text above as it is. Your own text comes after that.",
    ]


def _end(rng: random.Random) -> tuple[Arguments, list[str]]:
    phrase = rng.choice(ENDINGS)
    return {"end_phrase": phrase}, [
        f'The last words are "{phrase}"',
        f'Stop right after "{phrase}"',
        f'Let it end on "{phrase}"',
    ]


def _capital_words(rng: random.Random) -> tuple[Arguments, list[str]]:
    number = rng.randint(2, 8)
    relation, times = _relation(rng, number, share_at_least=0.7)
    return {"capital_frequency": number, "capital_relation": relation}, [
        f"Write {times} words all in capitals.",
        f"Shout a little: {times} words go in CAPITALS.",
        f"The number of words in full capitals is {times}.",
    ]


def _capital(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Use English and capitals only.",
        "Type the English text with caps lock on.",
        "Let no small letter appear; the language is English.",
    ]


def _lowercase(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        "Use English and small letters only.",
        "Write in English without a single capital.",
        "Nothing may be capitalized; the language is English.",
    ]


def _no_comma(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, ["Do it without commas.", "Commas are off limits.", "Not a single comma may occur."]


def _quotation(rng: random.Random) -> tuple[Arguments, list[str]]:
    return {}, [
        'Put everything between one pair of " marks.',
        'The first and the last character must be ".',
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
