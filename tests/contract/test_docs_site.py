"""The documentation site builds without a warning and lists what the code declares; its guides are short."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from prose import sentences

import rlhf_zoo
from rlhf_zoo.cli.main import cli
from rlhf_zoo.pipeline.stages.ppo import load_reward_functions
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings.declared import declared_keys
from rlhf_zoo.runs.settings.parse import parse_flags, recipe_keys, stage_settings

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


def test_reference_lists_commands_keys_api_and_errors(site: Path) -> None:
    commands, keys = page(site, "reference/cli"), page(site, "reference/keys")
    names = cli.list_commands(None)  # type: ignore[arg-type]
    assert len(names) >= 25
    assert [name for name in names if f'id="rlhf-zoo-{name}"' not in commands] == []
    assert [key for stage in STAGES for key in declared_keys(stage) if f"<code>{key}</code>" not in keys] == []
    api = page(site, "reference/api")
    assert [name for name in rlhf_zoo.__all__ if f'id="rlhf_zoo.{name}"' not in api] == ["__version__"]
    assert 'id="rlhf_zoo.PPOTrainer.training_step"' in api
    errors = page(site, "reference/errors")
    assert "--grid lists one key twice: write its values as one list." in errors
    assert errors.count("<li>") > 700


def test_site_rewrites_links_between_folders_and_to_source(site: Path) -> None:
    recipe = page(site, "recipes/remarks-count")
    assert re.search(r'href="(\.\./)+evaluation/', recipe)
    assert 'src="../../evidence/remarks-count.png"' in recipe
    assert "rlhf-zoo/blob/main/rlhf_zoo/ppo/trainer.py" in page(site, "trainer")


def test_site_rewrites_addresses_in_html_pictures(site: Path) -> None:
    assert 'srcset="evidence/tiny-world-narrow.png"' in page(site, ".")
    assert 'src="evidence/tiny-world.png"' in page(site, ".")
    assert 'srcset="../../evidence/tiny-world-narrow.png"' in page(site, "recipes/tiny-world")
    assert (site / "evidence/tiny-world-narrow.png").is_file()


def test_home_page_links_to_every_page() -> None:
    home = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [path for paths in PAGES.values() for path in paths if not path.startswith("reference/")]
    outside = {"CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"}
    links = [f"../{path}" if path in outside else path for path in pages if path != "README.md"]
    assert len(links) >= 29
    assert [link for link in links if f"]({link})" not in home] == []


#: Pages under Start and Guides, which are short and in short sentences. Code and tables do not count.
GUIDES = [path for path in [*PAGES["Start"], *PAGES["Guides"]] if path != "README.md"]


@pytest.mark.parametrize("name", GUIDES)
def test_guide_is_short_with_short_sentences(name: str) -> None:
    guide_sentences = sentences((ROOT / "docs" / name).read_text(encoding="utf-8"))
    words = sum(map(len, guide_sentences))
    assert words <= 1500
    assert words / len(guide_sentences) <= 18


def test_sentences_counts_words_outside_headings_and_code() -> None:
    text = "# Title\n\nOne `a b c` two three. Four [five six](x.md) seven.\n\n```\ncode it is\n```\n"
    text += "| a | b |\n- eight nine: ten\n"
    assert [len(sentence) for sentence in sentences(text)] == [4, 4, 3]


def inline_commands(name: str) -> list[str]:
    """The commands in the text and tables of a page, and in its blocks that no test runs."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    untested_blocks = "\n".join(re.findall(r"(?ms)^```bash\n(.*?)^```", text))
    return re.findall(r"`(rlhf-zoo [^`\n]+)`", text) + re.findall(r"(?m)^rlhf-zoo .+$", untested_blocks)


def unknown_options(line: str) -> list[str]:
    """The options of a command line that neither the command nor a recipe has."""
    words = shlex.split(line)[1:]
    context, command = click.Context(cli, info_name="rlhf-zoo"), cli
    while isinstance(command, click.Group):
        name = words.pop(0)
        child = command.get_command(context, name)
        if child is None:
            return [name]
        context, command = click.Context(child, info_name=name, parent=context), child
    options = {option for parameter in command.get_params(context) for option in parameter.opts}
    keys = {f"--{stage}.{key}" for stage in STAGES for key in declared_keys(stage)}
    keys |= {f"--{key}" for key in (*recipe_keys(), *declared_keys(name if name in STAGES else "ppo"))}
    return [word for word in words if word.startswith("--") and word not in options | keys]


@pytest.mark.parametrize("name", [*GUIDES, *PAGES["Understand"]])
def test_page_commands_use_existing_options(name: str) -> None:
    assert {line: unknown for line in inline_commands(name) if (unknown := unknown_options(line))} == {}


def test_unknown_options_finds_wrong_flag_and_command() -> None:
    assert len(inline_commands("reward-up-text-worse.md")) >= 30
    assert unknown_options("rlhf-zoo ppo tiny-world --kl_coeff 1 --restart") == ["--kl_coeff"]
    assert unknown_options("rlhf-zoo trains tiny-world") == ["trains"]


@pytest.mark.parametrize(
    "name",
    ["../README.md", "README.md", "is-ppo-right.md", "one-gpu.md", "several-gpus.md", "quickstart.md", "your-model.md"],
)
def test_page_names_gpu_that_ran_this_version(name: str) -> None:
    """Pages on which readers choose hardware."""
    text = " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
    assert re.search(r"his version has run on (one GPU|\[one GPU\]\(docs/gpu.md\)) only, an H200, for minutes", text)
    assert "gpu.md" in text


def test_readme_has_at_most_120_lines_and_a_first_screen_of_25() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    first_screen = lines[:25]
    assert first_screen[-1].startswith("Next: "), "the first screen ends with links to the next pages"
    table = first_screen.index("<!-- evidence:smollm2-ifeval-short -->")
    assert first_screen[table - 1].startswith("A real model"), "a sentence above the table explains it"


#: PPO commands that the troubleshooting page proposes.
PROPOSED = sorted({line for line in inline_commands("reward-up-text-worse.md") if line.startswith("rlhf-zoo ppo ")})


@pytest.mark.parametrize("line", PROPOSED)
def test_proposed_ppo_command_is_valid(line: str, tmp_path: Path) -> None:
    flags = parse_flags([word for word in shlex.split(line)[3:] if word != "--restart"])[""]
    settings = stage_settings(load_recipe("tiny-world"), "ppo", flags, shared_flags={}, output_dir=tmp_path)
    functions = load_reward_functions(settings)
    weights = settings.trainer.reward_weights
    assert weights is None or len(weights) == 1 + len(functions)  # the reward model's first


def test_troubleshooting_page_proposes_ppo_commands() -> None:
    assert len(PROPOSED) >= 12
