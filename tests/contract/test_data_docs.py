"""docs/data.md: each example is a valid recipe on data of its schema."""

import re
from pathlib import Path

import pytest
import schemas
import yaml

from rlhf_zoo.cli import main as cli

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def write_recipe(folder: Path, example: str) -> Path:
    """Writes the example as a recipe, and rows of each data set that it names."""
    recipe = folder / "my-recipe"
    recipe.mkdir()
    parts = re.split(r"^# (\w+)\.yaml\n", example, flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        keys = yaml.safe_load(text)
        if "dataset_name" in keys:
            data = folder / keys["dataset_name"]
            schemas.write_data(data, schemas.rows_of(keys["dataset_name"]), schemas.SPLITS[keys["dataset_name"]])
            keys["dataset_name"] = str(data)
        config = keys.get("dataset_config")
        keys |= {"dataset_config": None} if config in ("main", "plain_text") else {}
        if (labeled := keys.get("evaluation", {}).get("labeled")) is not None:
            labeled |= {"dataset_config": None}
        keys |= {"bf16": False} if name in ("sft", "reward") else {}  # the page is for a GPU, which tests lack
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return recipe


def test_data_page_has_example_of_each_schema() -> None:
    datasets = set(re.findall(r"dataset_name: (\S+)", "".join(EXAMPLES)))
    assert datasets == {schema for schema, _ in schemas.SCHEMAS}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: re.findall(r"dataset_name: (\S+)", text)[0])
def test_data_page_example_is_valid_recipe(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(tmp_path, example)
    monkeypatch.chdir(tmp_path)
    assert "rlhf-zoo recipes validate my-recipe" in PAGE
    cli.cli.main(["recipes", "validate", "my-recipe"], standalone_mode=False)
