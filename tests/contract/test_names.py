"""No identifier in the package, the benchmarks or the examples is a word that fits any value."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlhf_zoo", "benchmarks", "docs/site", "examples", "metrics", "spaces")
#: Words that would fit any value.
FORBIDDEN = {
    *("found", "one", "said", "told", "mine", "given", "known", "asked", "seen", "look", "looked", "its", "what"),
    *("whole", "whom", "rest", "others", "those", "that"),
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields each name that a module defines: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def forbidden(source: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in names(ast.parse(source)) if name.strip("_").lower() in FORBIDDEN]


@pytest.mark.parametrize("source", ["found = 1", "def f(given): ...", "class Said: ...", "self._asked = 1"])
def test_forbidden_finds_each_kind_of_name(source: str) -> None:
    assert len(forbidden(source)) == 1


def test_code_has_no_forbidden_name() -> None:
    violations = {
        f"{path.relative_to(ROOT)}:{line}": name
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in forbidden(path.read_text())
    }
    assert not violations
