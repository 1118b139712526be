"""`rlhf-zoo smoke` of every recipe. A quarter runs in the fast tier; recipes/README.md names each recipe's tier."""

import json
from pathlib import Path

import pytest
from zoo_process import zoo

from rlhf_zoo.pipeline.smoke.models import families, make_tokenizer
from rlhf_zoo.runs.recipe import copy_recipe
from rlhf_zoo.runs.recipe_table import Row, recipe_rows

ROWS = recipe_rows()
FAST = [row for row in ROWS if row.smoke == "make test"]


def test_smoke_fast_tier_has_a_quarter_of_recipes() -> None:
    assert {row.smoke for row in ROWS} == {"make test", "make test-full"}
    assert 4 * len(FAST) >= len(ROWS)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[] if row in FAST else pytest.mark.full) for row in ROWS]
)
def test_smoke_trains_every_stage_and_writes_cards(row: Row, tmp_path: Path) -> None:
    done = zoo("smoke", row.name, "--json", "--keep", tmp_path / "kept", home=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])
    report = json.loads(done.stdout)
    assert (report["recipe"], report["passed"], report["error"]) == (row.name, True, None)
    evaluation = json.loads((tmp_path / "kept/run/eval/evaluation.json").read_text())
    assert evaluation["n"] > 0
    assert [(tmp_path / "kept/run" / stage / "README.md").is_file() for stage in row.stages] == [True] * len(row.stages)


def test_smoke_names_failed_stage(tmp_path: Path) -> None:
    recipe = copy_recipe("imdb-gpt2", tmp_path / "mine")
    path = recipe / "ppo.yaml"
    path.write_text(path.read_text().replace("reward_label: POSITIVE", "reward_label: HAPPY"))
    done = zoo("smoke", recipe, "--keep", tmp_path / "kept", home=tmp_path)
    assert done.returncode == 1 and "FAILED" in done.stdout and "HAPPY" in done.stdout
    again = zoo("smoke", recipe, "--keep", tmp_path / "kept", home=tmp_path)
    assert again.returncode == 2 and "is not a new or empty folder: give --keep another one" in again.stderr


@pytest.mark.parametrize("name", ["gpt2", "distilbert", "minilm", "pythia"])
def test_miniature_special_tokens_have_distinct_ids(name: str) -> None:
    family = families()[name]
    tokenizer = make_tokenizer(family, ["how is it"])
    assert len(tokenizer) == (family.tokens or family.vocab_size)
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in family.special} == family.special
    ids = tokenizer("how is it, naïve?").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "how is it, naïve?"
