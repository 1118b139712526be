"""Our verifiers beside Google's, as if-verifiable and lm-evaluation-harness contain them, on the same answers."""

import random
from collections import Counter
from typing import Any

import ifeval
import pytest
from test_instructions import CASES

from rlhf_zoo.rewards.instructions import read_instructions
from rlhf_zoo.rewards.instructions_kinds import KINDS

#: Kinds in which our rules are not Google's, and the least agreement there; all others agree fully.
OUR_RULES = {"length_constraints:number_sentences": 0.97, "change_case:capital_word_frequency": 0.97}

TEXTS = [
    "Dear Ms. Lane,\n\nI am writing about the bill of 3.50 that I got on Monday. It isn't mine! Why?\n\nYours,\nTom",
    "Rain falls on the old stone wall,\nAnd moss grows where the swallows call.\n\nP.S. I wrote this in ten minutes.",
    "Here are some ideas:\n\n* Walk to work\n* Cook at home\n* Read more books\n\nLet me know if you need more.",
    "1. Fill the pot with water.\n2. Add salt, and wait until it boils.\n3. Put in the pasta.\n\nEnjoy your meal!",
    "<<Two Gardens>>\n\nThe first garden is wild. The second one, though, is neat... Which is better? Who knows.",
    "**Section 1**\nThe U.S. economy grew by 2.1% last year. NASA and the EU met.\n\n**Section 2**\nPrices fell.",
    "My answer is yes. Cats sleep for 12 to 16 hours a day, i.e. most of it, and hunt at dawn.",
    '```json\n{"name": "Ada", "born": 1815, "fields": ["math", "poetry"]}\n```',
    "Die Stadt liegt am Fluss. Im Sommer kommen viele Leute, um dort zu schwimmen.",
    "La ville se trouve au bord de la rivière. En été, beaucoup de gens viennent y nager.",
    "To [name],\n\nwe invite you to [event] on [date]. Please answer by [deadline]!\n\nBest wishes\n[sender]",
    "Then the train stopped.\n\nThen nobody spoke. DON'T MOVE, said the guard. I didn't.\n\nThen it was over.",
    "Option A is cheap.\n******\nOption B is better, but it costs more than we have.",
    "First part of the story.\n***\nSecond part, with *some* **marked** words.\n***\nThe end.",
    "Write a short note. Sure! A NOTE: the shop opens at 9 a.m. and closes at 5 p.m. It is shut on Sundays.",
]  # fmt: skip


def _changed(text: str) -> list[str]:
    """Forms that a text may take as the answer to an instruction."""
    lines = text.split("\n")
    return [
        text,
        text.upper(),
        text.lower(),
        text.replace(",", ""),
        f'"{text}"',
        f"{text}\n\nP.P.S. Do not forget it.",
        f"{text} Is there anything else I can help with?",
        f"<<A Title>>\n{text}",
        f"{text}\n******\n{lines[0]}",
        "\n".join(f"- {line}" for line in lines if line),
        "\n\n".join(line for line in lines if line),
        "\n***\n".join(line for line in lines if line),
        "\n".join(f"SECTION {place}\n{line}" for place, line in enumerate(lines, 1)),
        f"Sure, here it is:\n\n{text}\n\nHope that helps.",
        f"{text} " * 3,
        text[: len(text) // 2],
        " ".join(f"*{word}*" if place % 5 == 0 else word for place, word in enumerate(text.split())),
        f"Say hi. {text}",
        f"[{lines[0]}] {text}",
        text.title(),
        f"* \n{text}\n*\n",
        f"{text}\n---\n{text}",
    ]


ANSWERS = list(dict.fromkeys(answer for text in TEXTS for answer in _changed(text)))


def instructions(kind: str) -> list[dict[str, Any]]:
    """Arguments for a kind: those of its cases, and others near what answers have."""
    own = [arguments for name, arguments, *_ in CASES if name == kind]
    near: list[dict[str, Any]] = []
    for arguments in own:
        numbers = [name for name, value in arguments.items() if isinstance(value, int)]
        if len(numbers) == 1:
            for value in (1, 2, 3, 5, 8, 20, 40, 80):
                near.append({**arguments, numbers[0]: value})
    return own + near if kind != "keywords:existence" else [own[0], {"keywords": ["the", "is"]}]


def usable_by_google(arguments: dict[str, Any]) -> bool:
    return arguments.get("letter") != "#"  # for which its code draws another letter


@pytest.fixture(params=["if_verifiable.ifeval", "lm_eval.tasks.ifeval"])
def google(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The registry of a package that has Google's code."""
    pytest.importorskip("nltk", reason="the extra ifeval is not installed")
    pytest.importorskip("langdetect", reason="the extra ifeval is not installed")
    pytest.importorskip(request.param.partition(".")[0], reason="installed by `make test-full`, or the extra ifeval")
    return ifeval.google_verifiers(request.param)


def agreement(google: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """The share of decisions that are the same, by kind."""
    same: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    for kind in KINDS:
        for arguments in filter(usable_by_google, instructions(kind)):
            [ours] = read_instructions([kind], [arguments], where="row 0")
            checker = google[kind](kind)
            checker.build_description(**arguments)
            for answer in answers:
                compared[kind] += 1
                same[kind] += ours.is_followed(answer) == bool(checker.check_following(answer))
    return {kind: same[kind] / compared[kind] for kind in KINDS}


def test_decisions_match_google_verifiers(google: dict[str, Any]) -> None:
    answers = random.Random(0).sample(ANSWERS, 60)
    shares = agreement(google, answers)
    assert {kind: share for kind, share in shares.items() if share < OUR_RULES.get(kind, 1)} == {}


@pytest.mark.full
def test_decisions_match_google_verifiers_on_all_answers(google: dict[str, Any]) -> None:
    assert len(ANSWERS) > 300
    shares = agreement(google, ANSWERS)
    print(shares)
    assert {kind: share for kind, share in shares.items() if share < OUR_RULES.get(kind, 1)} == {}


@pytest.mark.parametrize(("kind", "arguments", "right", "wrong"), [case for case in CASES if usable_by_google(case[1])])
def test_cases_match_google_verifiers(
    google: dict[str, Any], kind: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    if arguments.get("keywords") == ["c++"]:
        pytest.skip("its code reads a keyword as a regular expression")
    checker = google[kind](kind)
    checker.build_description(**arguments)
    assert checker.check_following(right)
    assert not checker.check_following(wrong)
