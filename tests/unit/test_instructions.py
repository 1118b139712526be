"""The verifiers of IFEval's 25 kinds and the reward made of them, and the two programs that they are compared with.

if-verifiable and lm-evaluation-harness both have Google's code: the first comes with the extra `ifeval`, the second is
installed beside the environment by `make test-full`.
"""

import builtins
import importlib.util
import pickle
import random
import time
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards import instructions_text
from rlhf_zoo.rewards.instructions import InstructionsFollowed, instructions_followed, read_instructions
from rlhf_zoo.rewards.instructions_kinds import KINDS, answer_forms
from rlhf_zoo.rewards.instructions_text import count_capital_words, count_sentences, detect_language

LANGDETECT = importlib.util.find_spec("langdetect") is not None
needs_langdetect = pytest.mark.skipif(not LANGDETECT, reason="the extra ifeval is not installed")

AT_LEAST, LESS = "at least", "less than"
#: Kind, arguments, an answer that fulfills the instruction, and one that does not.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["River", "boat"]}, "The boat left the river.", "The boat left."),
    ("keywords:existence", {"keywords": ["c++"]}, "I write C++.", "I write C."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": AT_LEAST}, "Tea, tea!", "Tea."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": LESS}, "Tea.", "Tea, tea!"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "A badge.", "A Bad day."),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": AT_LEAST}, "Eee", "ee"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": LESS}, "none", "# one"),
    ("language:response_language", {"language": "de"}, "Das ist ein schöner Tag am Meer.", "It is a fine day."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": AT_LEAST}, "One. Two!", "Dr. Ray left."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n***\n \n***\nTwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": LESS}, "two words", "three words here"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First.\n\n'Then, all.",
        "First.\n\nAnd then.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a and b]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. More.", "Bye. PS more."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP. P. S. More.", "Bye.\nP.S. More."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n** two **"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a* ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section one\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A day>>\nIt was.", "<< >>\nIt was."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'It was so. "the end."', "The end. Bye."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        "NASA and ESA-2",
        "Nasa and ESA",
    ),
    ("change_case:english_capital", {}, "THIS IS AN ENGLISH SENTENCE.", "This is an English sentence."),
    ("change_case:english_lowercase", {}, "this is an english sentence.", "This is an English sentence."),
    ("punctuation:no_comma", {}, "No comma here.", "Here, one."),
    ("startend:quotation", {}, '"Quoted."', '"Quoted'),
]  # fmt: skip
OF_LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")


def follows(kind: str, arguments: dict[str, Any], answer: str, *, loose: bool = False) -> bool:
    [instruction] = read_instructions([kind], [arguments], where="row 0")
    return instruction.is_followed(answer, loose=loose)


def test_cases_have_every_kind() -> None:
    assert {kind for kind, *_ in CASES} == set(KINDS)
    assert len(KINDS) == 25


@pytest.mark.parametrize(("kind", "arguments", "right", "wrong"), CASES)
def test_verifier_tells_right_from_wrong(kind: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    if kind in OF_LANGUAGE and not LANGDETECT:
        pytest.skip("the extra ifeval is not installed")
    assert follows(kind, arguments, right)
    assert not follows(kind, arguments, wrong)
    assert not follows(kind, arguments, " \n ")


def test_loose_reading_drops_outer_lines_and_asterisks() -> None:
    answer = "Sure:\n**a poem**\nEnjoy, all."
    assert answer_forms(answer, loose=False) == [answer]
    assert "a poem" in answer_forms(answer, loose=True)
    assert not follows("punctuation:no_comma", {}, answer)
    assert follows("punctuation:no_comma", {}, answer, loose=True)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One", 1),
        ("One. two", 2),
        ("Mr. Ray met Dr. Lee at 3.5 km. He left!", 2),
        ("She lives in the U.S. and works.", 1),
        ("She lives in the U.S. The end.", 2),
        ('He asked: "Why?" Nobody knew (yet.) So…', 3),
        ("Wait... no. Wait... No.", 3),
        ("The 3. place is ours.", 1),
    ],
)
def test_count_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"), [("I saw NASA's U.S. base", 3), ("DON'T (STOP) -- **NOW**!", 4), ("A1 b2 3", 1), ("", 0)]
)
def test_count_capital_words(text: str, count: int) -> None:
    assert count_capital_words(text) == count


def scores(answers: list[str], ids: list[Any], kwargs: list[Any], **settings: Any) -> tuple[list[Any], dict, dict]:
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}
    rewards = InstructionsFollowed(**settings)(
        prompts=["p"] * len(answers),
        completions=answers,
        instruction_id_list=ids,
        kwargs=kwargs,
        log_extra=extra.__setitem__,
        log_metric=metrics.__setitem__,
    )
    return rewards, extra, metrics


def test_reward_is_share_followed_plus_completion_bonus() -> None:
    ids = [["punctuation:no_comma", "length_constraints:number_words"]] * 2 + [None]
    kwargs = [[{"num_words": None}, {"relation": AT_LEAST, "num_words": 2.0}]] * 2 + [None]
    rewards, extra, metrics = scores(["two words", "two, words", "x"], ids, kwargs)
    assert rewards == [2.0, 0.5, None]
    assert extra == {"instructions_followed/missed": ["", "punctuation:no_comma", ""]}
    assert metrics == {"instructions_followed/share": 0.75, "instructions_followed/all": 0.5}
    assert scores(["two words", "two, words", "x"], ids, kwargs, share=0, complete=3)[0] == [3, 0, None]
    assert scores(["one, a\ntwo words"], ids[:1], kwargs[:1], loose=True)[0] == [2.0]


def test_reward_reads_conversations_and_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(instructions_followed))
    completions = [[{"role": "assistant", "content": "No comma."}]]
    assert again([""], completions, instruction_id_list=[["punctuation:no_comma"]], kwargs=[[{}]]) == [2.0]


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (["punctuation:no_comma"], [], "two lists of the same length"),
        ("punctuation:no_comma", "{}", "two lists of the same length"),
        (["punctuation:comma"], [{}], "row 0 has the instruction 'punctuation:comma'"),
        (["punctuation:no_comma"], [3], "kwargs 3: give a mapping"),
        (["length_constraints:number_words"], [{"relation": AT_LEAST}], "has no num_words"),
        (["length_constraints:number_words"], [{"relation": "over", "num_words": 3}], "relation 'over'"),
        (["length_constraints:number_words"], [{"relation": LESS, "num_words": "3"}], "num_words '3'"),
        (["keywords:existence"], [{"keywords": []}], "keywords \\[\\]"),
        (
            ["length_constraints:nth_paragraph_first_word"],
            [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}],
            "nth_paragraph 3: give a number from 1",
        ),
    ],
)
def test_malformed_instructions_are_refused_in_a_sentence(ids: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        scores(["x"], [ids], [kwargs])


def test_missing_column_is_named() -> None:
    with pytest.raises(ZooError, match="reads the column 'kwargs'"):
        instructions_followed(["p"], ["a"], instruction_id_list=[[]])


@pytest.mark.parametrize("field", ["share", "complete", "loose"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(ZooError, match=f"{field} of the reward"):
        InstructionsFollowed(**{field: "much"})


def test_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **keywords: Any) -> Any:
        if name.startswith("langdetect"):
            raise ImportError(name)
        return real(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    instructions_text._detector_factory.cache_clear()
    detect_language.cache_clear()
    with pytest.raises(ZooError, match=r'pip install "rlhf-zoo\[ifeval\]"'):
        detect_language("It is a fine day.")


@needs_langdetect
def test_detect_language_is_deterministic_and_leaves_random_state() -> None:
    import langdetect

    random.seed(1)
    before, seed = random.getstate(), langdetect.DetectorFactory.seed
    texts = ["hello my friend", "ok", "12 34", "Ein Tag", "no se"]
    first = [detect_language(text) for text in texts]
    detect_language.cache_clear()
    assert [detect_language(text) for text in texts] == first
    assert first[2] is None
    assert random.getstate() == before
    assert langdetect.DetectorFactory.seed is seed


HOSTILE = [
    "[", "<", "<<", "*", "***", "\n", " \n", "-\n", "{", "[[", '{"a":', "a", "A", "p.", "P. ", "Section 1", ".", "! ",
    "'S", "a@", "1", '"', "é", "\t", "--",
]  # fmt: skip


@needs_langdetect
@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_answers_are_bounded_in_time(piece: str) -> None:
    answer = piece * (100_000 // len(piece))
    started = time.process_time()
    for kind, arguments, *_ in CASES:
        follows(kind, arguments, answer, loose=True)
    assert time.process_time() - started < 20
