"""docs/data.md: each example is a valid recipe on data of its schema, and a wrong column is told before training."""

import re
from pathlib import Path
from typing import Any

import pytest
import schemas
import yaml

from rlhf_zoo import cli
from rlhf_zoo.errors import ZooError

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def written(folder: Path, example: str, **sft: Any) -> Path:
    """The example as a recipe, on a folder of rows of each data set that it names."""
    recipe = folder / "my-recipe"
    recipe.mkdir()
    parts = re.split(r"^# (\w+)\.yaml\n", example, flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        keys = yaml.safe_load(text) | (sft if name == "sft" else {})
        if "dataset_name" in keys:
            data = folder / keys["dataset_name"]
            schemas.write_data(data, schemas.rows_of(keys["dataset_name"]), schemas.SPLITS[keys["dataset_name"]])
            keys["dataset_name"] = str(data)
        config = keys.get("dataset_config")
        keys |= {"dataset_config": None} if config in ("main", "plain_text") else {}
        if (labeled := keys.get("evaluation", {}).get("labeled")) is not None:
            labeled |= {"dataset_config": None}
        keys |= {"bf16": False} if name in ("sft", "reward") else {}  # the page is for a GPU, tests have none
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return recipe


def test_there_is_an_example_of_each_form() -> None:
    named = set(re.findall(r"dataset_name: (\S+)", "".join(EXAMPLES)))
    assert named == {schema for schema, _ in schemas.SCHEMAS}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: re.findall(r"dataset_name: (\S+)", text)[0])
def test_examples_are_valid(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, example)
    monkeypatch.chdir(tmp_path)
    assert "rlhf-zoo recipes validate my-recipe" in PAGE
    cli.cli.main(["recipes", "validate", "my-recipe"], standalone_mode=False)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"columns": {"messages": "choosen"}}, "has no column 'choosen', only 'chosen', 'rejected'"),
        ({"columns": {}}, "the stage reads messages, prompt and completion, or text"),
        ({"held_out_share": 0.1, "dataset_test_split": "test"}, "set dataset_test_split to null"),
        ({"dataset_train_split": "training"}, "has no split 'training', only 'train'"),
    ],
)
def test_mistakes_are_told_before_training(
    keys: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, EXAMPLES[0], **keys)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZooError, match=re.escape(said)):
        cli.cli.main(["recipes", "validate", "my-recipe"], standalone_mode=False)
