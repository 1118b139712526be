"""docs/architecture.md names what is there, and the package has the shape that it says."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = re.findall(r"(?m)^([a-z]+) {3,}\S", TEXT.partition("```")[2].partition("```")[0])


def test_the_picture_is_the_package():
    here = {path.name for path in (ROOT / "rlhf_zoo").iterdir() if (path / "__init__.py").is_file()}
    loose = {path.stem for path in (ROOT / "rlhf_zoo").glob("*.py")} - {"__init__"}
    assert set(PACKAGES) == here and len(here) <= 11
    assert loose == {"errors", "fileio", "fields", "plugins", "functional"}


NAMES = sorted(set(re.findall(r"`((?:rlhf_zoo|tests|examples|recipes)[\w./-]*(?::[\w.]+)?)`", TEXT)))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_names_is_there(name):
    path, _, attribute = name.partition(":")
    assert (ROOT / path).exists()
    if attribute:
        value = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for part in attribute.split("."):
            value = getattr(value, part)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_lives_there(package):
    text = (ROOT / "rlhf_zoo" / package / "__init__.py").read_text(encoding="utf-8")
    assert re.match(r'"""[A-Z]', text)
