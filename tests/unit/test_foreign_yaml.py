"""YAML that others commit beside data: what a client reads of it is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.vote_data import HubVotes
from rlhf_zoo.stages.data import _benchmark

pytestmark = pytest.mark.attack

NESTED = "a: " + "[" * 20_000


class OneReadme:
    """A Hub with a data set that holds this README."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        path.write_text(text, encoding="utf-8")

    def get_paths_info(self, *_: Any, **__: Any) -> list[str]:
        return ["README.md"]

    def hf_hub_download(self, *_: Any, **__: Any) -> str:
        return str(self.path)


@pytest.mark.parametrize("text", [NESTED, "tasks: !!timestamp foo", "- x", "\ud800"])
def test_an_eval_yaml_that_harms_registers_nothing(text: str) -> None:
    assert _benchmark(text) is None


def test_an_eval_yaml_is_read() -> None:
    assert _benchmark("name: x\ntasks: [{id: 1, split: test}, {}]") == {
        "name": "x",
        "tasks": [{"id": "1", "split": "test"}],
    }


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (NESTED, "begins with bad YAML (line 1: it is nested more than 63 deep)"),
        ("- a", "does not begin with a mapping in YAML"),
        ("configs: 5", "has configs that are no list of mappings"),
        ("configs: [5]", "has configs that are no list of mappings"),
    ],
    ids=lambda text: text[:20],
)
def test_a_readme_beside_votes_that_harms_is_a_sentence(tmp_path: Path, head: str, message: str) -> None:
    hub = OneReadme(tmp_path / "README.md", f"---\n{head}\n---\n# Votes\n")
    with pytest.raises(ZooError) as caught:
        HubVotes("user/votes")._card(hub, "0" * 40)
    assert str(caught.value).startswith(f"The README of user/votes {message}")


def test_a_readme_of_others_keeps_what_it_says(tmp_path: Path) -> None:
    hub = OneReadme(tmp_path / "README.md", "---\nlicense: mit\nconfigs: [{config_name: mine}]\n---\n# Ours\n")
    card = HubVotes("user/votes")._card(hub, "0" * 40)
    assert card is not None and "license: mit" in card and "config_name: mine" in card and "# Ours" in card
