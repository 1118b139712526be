"""examples/recipe_package works as its README says: after `pip install`, its recipe works like a built-in one."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from hub_fixture import base_environment
from test_reward_plugin import pip_install
from zoo_process import zoo

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs import recipe as recipes
from rlhf_zoo.runs.recipe import copy_recipe, list_recipes, list_registered_recipes, load_recipe
from rlhf_zoo.runs.recipe_table import rows_of_other_packages

PACKAGE = Path(__file__).parents[2] / "examples" / "recipe_package"
README = (PACKAGE / "README.md").read_text()
ENTRIES = {
    "countdown": "zoo_broken.countdown", "gone": "zoo_broken.gone", "unread": "zoo_broken.unread",
    "no-hardware": "zoo_broken.no_hardware", "nowhere": "zoo_not_there.x", "tiny-world": "zoo_broken.no_hardware",
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_install(PACKAGE, tmp_path_factory.mktemp("package"))


def make_broken_package(folder: Path) -> Path:
    """Writes an installed package with invalid recipes and a recipe whose name is taken."""
    dist_info = folder / "zoo_broken-2.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-broken\nVersion: 2.0\n")
    entries = "\n".join(f"{name} = {target}" for name, target in ENTRIES.items())
    (dist_info / "entry_points.txt").write_text(f"[{recipes.RECIPES}]\n{entries}\n")
    recipe_texts = {"countdown": "description: A.\n", "unread": "a: [1\n", "no_hardware": "description: U.\n"}
    for name, text in recipe_texts.items():
        (folder / "zoo_broken" / name).mkdir(parents=True)
        (folder / "zoo_broken" / name / "recipe.yaml").write_text(text)
    (folder / "zoo_broken" / "__init__.py").write_text("raise SystemExit('imported')\n")
    return folder


def test_readme_commands_work_with_installed_package(installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), base_environment()["PYTHONPATH"]])
    lines = re.findall(r"^rlhf-zoo (.*)$", README, flags=re.M)
    outputs = {}
    for line in lines:
        if line.startswith("recipes "):
            result = zoo(*shlex.split(line), home=tmp_path, cwd=tmp_path, PYTHONPATH=path)
            assert (result.returncode, result.stderr) == (0, ""), result.stderr
            outputs[line.split()[1]] = result.stdout
    assert {*outputs} == {"list", "show", "validate"} and {"smoke countdown", "run countdown"} < {*lines}
    assert "countdown" in outputs["list"] and "(package zoo-recipe-example 0.1.0)" in " ".join(outputs["list"].split())
    assert (
        "corpus: zoo_recipe_example:prepare" in outputs["show"]
        and "countdown is valid: sft, ppo." in outputs["validate"]
    )
    rows = json.loads(zoo("recipes", "list", "--json", home=tmp_path, PYTHONPATH=path).stdout)
    assert {row["name"]: row["package"] for row in rows} == {
        **dict.fromkeys(list_recipes()), "countdown": "zoo-recipe-example 0.1.0"
    }  # fmt: skip
    result = zoo("recipes", "show", "countdwn", home=tmp_path, PYTHONPATH=path)
    assert result.returncode == 2 and "There is no recipe 'countdwn', did you mean 'countdown'?" in result.stderr


def test_smoke_run_names_package_in_record_and_card(installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), base_environment()["PYTHONPATH"]])
    result = zoo("smoke", "countdown", "--keep", tmp_path / "kept", home=tmp_path, PYTHONPATH=path)
    assert result.returncode == 0, result.stdout + result.stderr
    package = {"name": "zoo-recipe-example", "version": "0.1.0"}
    for stage in ("sft", "ppo"):
        folder = tmp_path / "kept" / "run" / stage
        assert json.loads((folder / "run.json").read_text())["package"] == package
        assert json.loads((folder / "rlhf_card.json").read_text())["package"] == package
        assert "comes from the package `zoo-recipe-example` 0.1.0" in (folder / "README.md").read_text()


def test_broken_package_affects_no_other_recipe(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list_registered_recipes() == []
    monkeypatch.syspath_prepend(make_broken_package(tmp_path / "broken"))
    monkeypatch.syspath_prepend(installed)
    assert list_registered_recipes() == ["countdown", "gone", "no-hardware", "nowhere", "unread"]
    assert load_recipe("tiny-world").package == {}, "a package cannot replace a built-in recipe"
    rows, left_out = rows_of_other_packages()
    assert rows == []
    for name, reason in {
        "countdown": "'countdown' more than once, zoo-broken 2.0 and zoo-recipe-example 0.1.0: uninstall one",
        "gone": "zoo-broken 2.0 registers the recipe 'gone' as zoo_broken.gone, but that folder has no recipe.yaml",
        "nowhere": "registers the recipe 'nowhere' as zoo_not_there.x, but that folder has no recipe.yaml",
        "unread": "recipe.yaml, line 2 is not valid YAML",
        "no-hardware": "zoo.yaml has no hardware, which the list of recipes shows: add it.",
    }.items():
        [sentence] = [
            line for line in left_out if line.startswith(f"The recipe {name!r} of an installed package is left")
        ]
        assert reason in sentence
    with pytest.raises(ZooError, match="more than once"):
        load_recipe("countdown")
    assert load_recipe("no-hardware").package == {"name": "zoo-broken", "version": "2.0"}


def test_packaged_recipe_is_copied_and_extended(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    copied = copy_recipe("countdown", tmp_path / "mine")
    assert load_recipe(str(copied)).package == {} and load_recipe(str(copied)).stages == load_recipe("countdown").stages
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "recipe.yaml").write_text("extends: countdown\nseed: 3\n")
    assert load_recipe(str(tmp_path / "more")).shared["corpus"] == "zoo_recipe_example:prepare"
