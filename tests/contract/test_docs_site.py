"""The documentation site builds without a warning and holds what the code declares; its guides are short and plain."""

import re
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

from rlhf_zoo.cli.main import cli
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings.declared import declared_keys

ROOT = Path(__file__).parents[2]
#: mkdocs.yml names Python functions by tags, which only its own loader knows.
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2])
SECTIONS = {title: list(pages) for section in NAV for title, pages in section.items()}
PAGES = {title: [path for page in pages for path in page.values()] for title, pages in SECTIONS.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. With `strict`, mkdocs stops at a dead link or heading, and at a page that the nav lacks."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_reference_holds_what_the_code_declares(site: Path) -> None:
    commands, keys = page(site, "reference/cli"), page(site, "reference/keys")
    names = cli.list_commands(None)  # type: ignore[arg-type]
    assert len(names) >= 25
    assert [name for name in names if f'id="rlhf-zoo-{name}"' not in commands] == []
    assert [key for stage in STAGES for key in declared_keys(stage) if f"<code>{key}</code>" not in keys] == []
    assert 'id="rlhf_zoo.PPOTrainer.training_step"' in page(site, "reference/api")
    errors = page(site, "reference/errors")
    assert "--grid lists one key twice: write its values as one list." in errors
    assert errors.count("<li>") > 700


def test_pages_of_other_folders_link_within_the_site_and_to_the_source(site: Path) -> None:
    recipe = page(site, "recipes/remarks-count")
    assert re.search(r'href="(\.\./)+evaluation/', recipe)
    assert 'src="../../evidence/remarks-count.png"' in recipe
    assert "rlhf-zoo/blob/main/rlhf_zoo/ppo/trainer.py" in page(site, "trainer")


def test_home_links_to_every_page() -> None:
    home = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [path for paths in PAGES.values() for path in paths if not path.startswith("reference/")]
    outside = {"CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"}
    links = [f"../{path}" if path in outside else path for path in pages if path != "README.md"]
    assert len(links) >= 29
    assert [link for link in links if f"]({link})" not in home] == []
