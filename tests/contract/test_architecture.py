"""The package has the shape that docs/architecture.md describes, and pages name files and functions that exist."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = [path.as_posix() for folder in ("rlhf_zoo", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
PACKAGES = re.findall(r"(?m)^([a-z]+) {3,}\S", TEXT.partition("```")[2].partition("```")[0])


def test_architecture_page_lists_packages_and_top_level_modules():
    packages = {path.name for path in (ROOT / "rlhf_zoo").iterdir() if (path / "__init__.py").is_file()}
    modules = {path.stem for path in (ROOT / "rlhf_zoo").glob("*.py")} - {"__init__"}
    assert set(PACKAGES) == packages and len(packages) <= 11
    assert modules == {"errors", "fileio", "fields", "plugins", "functional"}


PAGES = [
    page.relative_to(ROOT).as_posix()
    for folder, pattern in (("docs", "*.md"), ("recipes", "*/README.md"), ("", "README.md"), ("", "CONTRIBUTING.md"))
    for page in sorted((ROOT / folder).glob(pattern))
]
#: A file or folder of this repository, or a Python file by the end of its path; then a function after : or ::.
REFERENCE = re.compile(
    r"(?<![\w./:-])((?:(?:rlhf_zoo|tests|benchmarks|spaces)/[\w./-]*[\w/]|docs/[\w-]+\.md|(?:[\w-]+/)*\w+\.py(?!\w)))"
    r"(?:::?([A-Za-z_]\w*(?:(?:\.|::)\w+)*))?"
)
#: Scripts of other projects and of the reader.
FOREIGN = {"my_rewards.py", "launch.py", "train_policy.py", "trl/trainer/ppo_config.py", "app.py"}


def defines(path: Path, name: str) -> bool:
    """Whether a Python file has a function, class, method or constant."""
    if path.is_relative_to(ROOT / "rlhf_zoo"):
        value: Any = importlib.import_module(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
        return all((value := getattr(value, part, None)) is not None for part in name.split("."))
    node: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("::"):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        if node is None:
            return False
    return True


@pytest.mark.parametrize("page", PAGES)
def test_page_names_only_existing_files_and_functions(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    # A page names a removed file with the commit that still has it.
    removed = {Path(path).name for path in re.findall(r"git show\s+\w+:([\w./-]+)", text)}
    missing = []
    for path, name in REFERENCE.findall(re.sub(r"https?://\S+|git show\s+\S+", "", text)):
        if path in FOREIGN or Path(path).name in removed or "DATE" in path:
            continue
        candidates = [(ROOT / page).parent / path, ROOT / path]
        candidates += [Path(file) for file in FILES if file.endswith(f"/{path}")]
        file = next((candidate for candidate in candidates if candidate.exists()), None)
        if file is None or (name and file.suffix == ".py" and not defines(file, name)):
            missing.append(f"{path}:{name}" if name else path)
    assert missing == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_page_links_to_existing_headings(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]*\.md|)#([\w-]+)\)", text)
    missing = [
        link for link in links if link[1] not in anchors((ROOT / page).parent / link[0] if link[0] else ROOT / page)
    ]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_docstring(package):
    text = (ROOT / "rlhf_zoo" / package / "__init__.py").read_text(encoding="utf-8")
    assert re.match(r'"""[A-Z]', text)


def test_no_file_has_over_500_lines_and_no_function_over_80():
    too_long = []
    for name in FILES:
        text = Path(name).read_text(encoding="utf-8")
        if (count := len(text.splitlines())) > 500:
            too_long.append(f"{name}: {count} lines")
        too_long += [
            f"{name}: {node.name} has {count} lines"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (count := (node.end_lineno or 0) - node.lineno + 1) > 80
        ]
    assert too_long == []
