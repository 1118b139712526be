"""Words and forms that may not come back: in pages, card templates, help and messages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("docs/*.md", "recipes/README.md", "recipes/*/README.md", "spaces/*/README.md", "*.md")
    for path in ROOT.glob(pattern)
)
TEMPLATES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("rlhf_zoo/**/*.jinja"))
#: A judge answers by the words of its question, so new words would change published figures.
QUESTIONS = "rlhf_zoo/evaluation/judges/llm_questions.py"
CODE = sorted(
    path
    for path in (found.relative_to(ROOT).as_posix() for found in ROOT.glob("rlhf_zoo/**/*.py"))
    if path != QUESTIONS and not path.startswith("rlhf_zoo/runs/corpora/")  # whose strings are data
)
#: Of "is no …" only "there is no token" and the comparisons "no longer" and "no more … than" are plain English.
FORMS = (
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more \w+ than\b)[a-z]\w*",
    r"\bthere (?:is|are) none\b",
    r"\b(?:convict|acquit)\w*",
    r"\b(?:dealt|dealing)\b",
    r"\bso that it cannot\b",
    r"\bone command a stage\b",
    r"\b(?:taken for granted|ordered rightly|measure anew|price to beat)\b",
    r"\b(?:let the string|the string (?:out|in|does|holds)|(?:tight|loos|short|long)\w* strings?)\b",
    # The order is turned round: "Chosen on these prompts is step 20", "Trained were 3".
    r"\b(?:chosen|trained|measured|compared|picked|published|recommended)(?: (?:on|by|with|from) [^.:;|,]{1,40})? "
    r"(?:is|are|was|were) (?:step|the|a|an|\d+)\b",
)
#: A page or a card has no other strings than that for the KL penalty: those of a program stand in code.
IN_PROSE = (*FORMS, r"\bstrings?\b")


def found(forms: tuple[str, ...], text: str) -> list[str]:
    return [match[0] for form in forms for match in re.finditer(form, re.sub(r"\s+", " ", text), re.IGNORECASE)]


def prose(text: str) -> str:
    """A page without its rendered blocks and its code."""
    return re.sub(r"<!-- evidence:.*?<!-- /evidence -->|```.*?```|`[^`\n]*`", "`…`", text, flags=re.DOTALL)


def literals(source: str) -> list[str]:
    """The strings of a module, without docstrings; … stands for what an f-string fills in."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    filled = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in filled for part in node.values}
    texts = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values) for node in filled
    ]
    return texts + [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts
    ]


@pytest.mark.parametrize("name", PAGES)
def test_docs_pages_have_no_forbidden_words(name: str) -> None:
    assert found(IN_PROSE, prose((ROOT / name).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_card_templates_have_no_forbidden_words(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert found(IN_PROSE, re.sub(r"\{[{%#].*?[#%}]\}", "…", text, flags=re.DOTALL)) == []


def test_help_and_messages_have_no_forbidden_forms() -> None:
    texts = {name: literals((ROOT / name).read_text(encoding="utf-8")) for name in CODE}
    assert {name: said for name, listed in texts.items() if (said := found(FORMS, "\n".join(listed)))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "Chosen on these prompts is step 20.", "Trained were 3 by PPO.", "Let the string out and pull it in",
        "Which is no\nacquittal", "Length convicts nobody", "--beta is no key of it", "start if there is none",
        "from the tightest string to the loosest", "hidden, so that it cannot be read", "by dealing completions",
    ],
)  # fmt: skip
def test_forbidden_forms_match_bad_text(text: str) -> None:
    assert found(FORMS, text)


@pytest.mark.parametrize(
    "text",
    [
        "There is no token for the Hub.", "It is no longer valid.", "KL is no more precise than that.",
        "Trained weights are not kept.", "The checkpoint was chosen on validation prompts.",
    ],
)  # fmt: skip
def test_forbidden_forms_do_not_match_plain_english(text: str) -> None:
    assert not found(FORMS, text)
