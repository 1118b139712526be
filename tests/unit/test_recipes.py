"""Recipes are found, read strictly and copied whole."""

import shutil
from pathlib import Path

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs import recipe as recipes
from rlhf_zoo.runs.recipe import copy_recipe, find_recipe, is_repository_name, list_recipes, load_recipe
from rlhf_zoo.runs.recipe_table import insert_table


def write(folder: Path, **files: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"recipe": "description: A toy.\n", **files}.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder)


def test_shipped_recipes_have_readmes_and_stages():
    assert {"product-remarks", "tiny-world"} < set(list_recipes())
    for name in list_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name and [*recipe.stages] in (["sft", "reward", "ppo"], ["sft", "ppo"], ["ppo"])
        assert all(recipe.yaml_file(stage).is_file() for stage in ("recipe", *recipe.stages))
        assert recipe.shared["description"]
        readme = (recipe.folder / "README.md").read_text(encoding="utf-8")
        assert f"rlhf-zoo run {name}" in readme or f"-m rlhf_zoo.cli run {name}" in readme or "/README.md" in readme


def test_published_recipes_set_weight_decay_and_clipping():
    published = [one for name in list_recipes() if (one := load_recipe(name)).zoo.get("published")]
    assert len(published) > 8
    for recipe in published:
        for stage, keys in recipe.stages.items():
            if keys["learning_rate"]:  # at the rate 0 nothing is trained
                assert keys.keys() >= {"weight_decay", "max_grad_norm"}, (recipe.name, stage)


def test_recipe_extends_another_key_by_key(tmp_path):
    write(tmp_path / "base", recipe="description: B.\nseed: 3\n", sft="max_steps: 1\npacking: true\n", zoo="a: 1\n")
    folder = write(tmp_path / "mine", recipe="extends: base\ndescription: M.\n", sft="max_steps: 2\n", ppo="lam: 1\n")
    found = load_recipe(folder)
    assert found.shared == {"description": "M.", "seed": 3} and found.zoo == {"a": 1}
    assert found.stages == {"sft": {"max_steps": 2, "packing": True}, "ppo": {"lam": 1}}
    assert [path.parent.name for path in found.yaml_files("sft")] == ["base", "mine"]
    assert load_recipe(write(tmp_path / "far", recipe="extends: tiny-world\n")).stages["ppo"]["kl_coef"] == 0.1
    with pytest.raises(ZooError, match="extends mine, which itself extends base"):
        load_recipe(write(tmp_path / "third", recipe="extends: mine\n"))


def test_recipe_table_is_current():
    path = find_recipe("tiny-world").parent / "README.md"
    assert path.read_text(encoding="utf-8") == insert_table(path.read_text(encoding="utf-8"))
    with pytest.raises(ZooError, match="needs exactly one"):
        insert_table("# Recipes\n")


def test_folder_is_a_recipe_named_after_itself(tmp_path, monkeypatch):
    write(tmp_path / "mine", ppo="kl_coef: 0.1\n", sft="")
    found = load_recipe(str(tmp_path / "mine"))
    assert (found.name, dict(found.stages)) == ("mine", {"sft": {}, "ppo": {"kl_coef": 0.1}})
    monkeypatch.chdir(tmp_path / "mine")
    assert load_recipe(".").name == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-wrld", "There is no recipe 'tiny-wrld', did you mean 'tiny-world'?"),
        ("zzz", "There is no recipe 'zzz': `rlhf-zoo recipes list` shows them, and `rlhf-zoo new` writes yours."),
        ("", "There is no recipe ''"),
        (
            "folder",
            "The folder folder holds no recipe.yaml: name the folder of a recipe, or one that `rlhf-zoo recipes",
        ),
        ("file.yaml", "file.yaml is a file: name the folder of a recipe, or one that `rlhf-zoo recipes list` shows."),
    ],
)
def test_find_recipe_rejects_unknown_names(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file.yaml").touch()
    with pytest.raises(ZooError) as caught:
        find_recipe(name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl_coef: 1\nlam: 1\nkl_coef: 2\n", r"ppo\.yaml, line 3, repeats the key 'kl_coef': keep one of them"),
        ("a: {b: 1, b: 2}\n", r"line 1, repeats the key 'b'"),
        ("- kl_coef\n", r"ppo\.yaml holds a list: a recipe is a mapping"),
        ("just words\n", r"ppo\.yaml holds a str"),
        ("kl_coef: [1\n", r"ppo\.yaml, line 2 is not valid YAML"),
        ("{{ name }}: 1\n", r"ppo\.yaml, line 1 is not valid YAML \(.*found unhashable key\)"),
        ("a: !!python/object/apply:os.system [true]\n", r"is not valid YAML \(could not determine a constructor"),
        ("seed: !!timestamp foo\n", r"ppo\.yaml is not valid YAML \(a value does not fit its tag\)"),
        (f"a: {'[' * 20_000}", r"ppo\.yaml, line 1 is not valid YAML \(it is nested more than 63 deep\)"),
    ],
)
def test_load_recipe_rejects_malformed_yaml(tmp_path, text, message):
    with pytest.raises(ZooError, match=message):
        load_recipe(write(tmp_path / "mine", ppo=text))


def test_yaml_dates_are_text_and_merged_keys_are_no_duplicates(tmp_path):
    text = "base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  a: 3\n"
    dates = "model_revision: 2024-01-31\nnone: 2024-13-45\n"
    found = load_recipe(write(tmp_path / "mine", sft=text, ppo=dates))
    assert found.stages["ppo"] == {"model_revision": "2024-01-31", "none": "2024-13-45"}
    assert found.stages["sft"]["more"] == {"a": 3, "b": 2}


def test_load_recipe_rejects_unreadable_files(tmp_path):
    folder = write(tmp_path / "mine")
    (tmp_path / "mine" / "sft.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ZooError, match=r"sft\.yaml cannot be read"):
        load_recipe(folder)


def test_recipe_name_must_be_valid_in_repository_names(tmp_path):
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    for name in ("tiny-world", "a", "a.b_c-9", "a" * 80):
        assert is_repository_name(name)
        validate_repo_id(f"local/{name}-reward")
    for name in ("my recipe", "-a", "a--b", "a..b", "å", "a" * 90):
        assert not is_repository_name(name)
        with pytest.raises(HFValidationError):
            validate_repo_id(f"local/{name}-reward")
        with pytest.raises(ZooError, match="The recipe's folder is called"):
            load_recipe(write(tmp_path / name))
    assert not any(map(is_repository_name, ("a" * 81, "a-", "a/b", "")))


def test_copy_recipe_is_complete_and_overwrites_nothing(tmp_path, monkeypatch):
    target = copy_recipe("tiny-world", tmp_path / "deep" / "mine")
    source = find_recipe("tiny-world")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    assert load_recipe(str(target)).stages == load_recipe("tiny-world").stages
    with pytest.raises(ZooError, match="already exists"):
        copy_recipe("tiny-world", target)
    (tmp_path / "file").touch()
    with pytest.raises(ZooError, match="cannot be written"):
        copy_recipe("tiny-world", tmp_path / "file" / "mine")

    def fail_late(source, target, **_):
        shutil.copy(source / "recipe.yaml", target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recipes.shutil, "copytree", fail_late)
    with pytest.raises(ZooError, match=r"No space left on device\): choose another place"):
        copy_recipe("tiny-world", tmp_path / "half")
    assert not (tmp_path / "half").exists()
