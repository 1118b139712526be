"""Prompts that stand in several rows: counted once, and resampled together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.evaluation.frontier import Point
from rlhf_zoo.evaluation.pass_at_k import Answers
from rlhf_zoo.evaluation.prompt_groups import number_prompts
from rlhf_zoo.evaluation.stats import bootstrap_mean, mean_share
from rlhf_zoo.fileio import read_json
from rlhf_zoo.modeling.prompt_keys import count_distinct_prompts, format_prompt_count, prompt_key
from rlhf_zoo.pipeline.inspect.doctor import examine
from rlhf_zoo.pipeline.new.data import InspectedData, StageData, inspect_data, make_stage_data
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.pipeline.stages.evaluate import evaluation_prompts
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.data.layout import put_distinct_prompts_first
from rlhf_zoo.runs.dataset import stage_source

PROMPTS, ROWS = 40, 6


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_prompt_key_distinguishes_prompts() -> None:
    assert prompt_key(" how is it\n") == prompt_key([user("how is it")]) == "how is it"
    assert prompt_key([user("a"), {"role": "assistant", "content": "b"}, user("c")]) != prompt_key([user("c")])
    assert prompt_key([{"role": "system", "content": "be kind"}, user("a")]) != prompt_key([user("a")])
    assert prompt_key([{"role": "assistant"}]) == prompt_key([{"role": "assistant", "content": None}])
    assert count_distinct_prompts(["a", [user("a")], "b"]) == 2
    assert (format_prompt_count(14, 469), format_prompt_count(14, 14)) == ("14 (in 469 rows)", "14")


def test_distinct_first_moves_repeated_prompts_to_the_end() -> None:
    rows = Dataset.from_dict({"prompt": list("aaabbc"), "row": range(6)})
    assert put_distinct_prompts_first(rows)["row"][:] == [0, 3, 5, 1, 4, 2]
    once = Dataset.from_dict({"prompt": list("cab")})
    assert put_distinct_prompts_first(once) is once


def covered(rng: np.random.Generator, *, shares: bool, clustered: bool) -> bool:
    """Whether an interval holds the truth, 0 or one half, of rows whose prompts differ more than their samples do."""
    levels = np.repeat(rng.normal(size=PROMPTS), ROWS)
    prompts = [f"prompt {place}" for place in np.repeat(np.arange(PROMPTS), ROWS)]
    values = levels + 0.5 * rng.normal(size=len(levels))
    groups = number_prompts(prompts) if clustered else list(range(len(prompts)))
    if shares:
        low, high = mean_share((values > 0).astype(float), groups).ci95
        return low <= 0.5 <= high
    low, high = bootstrap_mean(values, groups, seed=int(rng.integers(2**31)), resamples=400).ci95
    return low <= 0 <= high


@pytest.mark.parametrize("shares", [False, True])
def test_clustered_intervals_cover_when_rows_repeat_prompts(shares: bool) -> None:
    rng = np.random.default_rng(5)
    by_prompt = np.mean([covered(rng, shares=shares, clustered=True) for _ in range(300)])
    by_row = np.mean([covered(rng, shares=shares, clustered=False) for _ in range(300)])
    assert by_prompt >= 0.92 and by_row <= 0.75


def test_points_resample_equal_prompts_together() -> None:
    rng = np.random.default_rng(3)
    values, names = rng.normal(size=12), [*"aaabbbcccddd"]
    right = (values[:, None] + rng.normal(size=(12, 2)) > 0).astype(float)
    point = Point("a", values, values, values, 12, prompts=names)
    assert point.estimate(values, seed=1).ci95 == bootstrap_mean(values, names, seed=1).ci95
    assert point.rate(right[:, 0]).ci95 == mean_share(right[:, 0], names).ci95
    np.testing.assert_allclose(point.by_prompt(values), values.reshape(4, 3).mean(1))
    each = [name for name in names for _ in range(2)]
    assert Answers(right, groups=names).to_json()["accuracy"] == mean_share(right.ravel(), each).to_json()
    different = Answers(right, groups=[*map(str, range(12))]).to_json()
    assert different == Answers(right).to_json(), "as ever, where no two are equal"


def twice(folder: Path) -> None:
    """Each split of the toy's prompts with every row twice."""
    for path in folder.glob("prompts/*.jsonl"):
        path.write_text(path.read_text() * 2)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same run and evaluation on prompts that stand in one row, and in two."""
    found = {}
    for name in ("once", "twice"):
        folder = tmp_path_factory.mktemp(name)
        make_recipe(folder)
        save_start(folder)
        if name == "twice":
            twice(folder / "data")
        found[name] = make_context(folder)
    return found


def asking(context: RunContext, prompts: int) -> RunContext:
    """The same run with another number of prompts to evaluate on."""
    return replace(context, flags={**context.flags, "recipe": {"evaluation.prompts": prompts}})


def test_evaluation_reports_prompts_and_rows(both: dict[str, Any]) -> None:
    once, two = both["once"], both["twice"]
    asked = [evaluation_prompts(one, stage_source(one, "ppo")) for one in (once, two)]
    assert asked[0]["prompt"][:] == asked[1]["prompt"][:], "as many different ones as before"
    said = {one.check: one.detail for one in examine(two)}
    assert said["prompts"].startswith("12 (in 24 rows) for rollouts, 12 (in 24 rows) to monitor training")
    assert said["batch"].startswith("4 of 12 (in 24 rows) prompts per update")
    more = asking(two, 18)
    assert {one.check: one.detail for one in examine(more)}["evaluation's prompts"].startswith(
        "12 (in 18 rows) held-out"
    )


def test_evaluation_of_repeated_rows_counts_prompts(both: dict[str, Any]) -> None:
    more = asking(both["twice"], 18)
    ppo.run(more)
    assert evaluate.run(more) is True
    found = read_json(more.record("eval").path / "evaluation.json")
    assert (found["prompts"], found["rows"], found["n"]) == (12, 18, 36)
    lines = [json.loads(line) for line in (more.record("eval").path / "samples.jsonl").read_text().splitlines()]
    lengths, names = [line["ppo"]["length"] for line in lines], [line["prompt"] for line in lines]
    assert len(set(names)) == 12
    assert found["ppo"]["length"] == bootstrap_mean(lengths, names, seed=found["seed"]).to_json()
    assert found["data"]["trained_on"]["ppo"] == 12
    assert found["over_training"]["prompts"] == len(
        read_json(more.record("eval").path / "over_training.json")["judge"][0]
    )


def test_new_recipe_counts_distinct_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": f"How is item {place % 14}?"} for place in range(469)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = make_stage_data(inspect_data(str(tmp_path)), "prompts")
    assert found is not None and (found.row_count, found.prompt_count, found.test_prompt_count) == (469, 14, None)
    distinct = [{"prompt": f"How is item {place}?"} for place in range(469)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in distinct))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = make_stage_data(inspect_data(str(tmp_path)), "prompts")
    assert found is not None and (found.row_count, found.prompt_count, found.test_prompt_count) == (469, 469, 14)


@pytest.mark.parametrize(
    ("row_count", "prompt_count", "text"),
    [(469, 14, "14"), (5000, 14, "at least 14"), (20_000, 14, "at least 14"), (20_000, 20_000, "20,000")],
)
def test_prompt_count_of_partly_read_rows_is_lower_bound(row_count: int, prompt_count: int, text: str) -> None:
    data = StageData(InspectedData("data", None, []), {}, row_count, [], prompt_count)
    assert data.prompt_count_text == text
