"""No stage of a run learns from the prompts that PPO holds out."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, concatenate_datasets
from schemas import SCHEMAS, make_recipe

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.modeling.chat import plain_text
from rlhf_zoo.pipeline.stages.pairs import held_out_pairs, training_pairs
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.data.hold_out import drop_rows_with_prompts
from rlhf_zoo.runs.data.layout import sft_text
from rlhf_zoo.runs.dataset import (
    HELD_OUT,
    data_source,
    drop_held_out_prompts,
    evaluation_rows,
    training_and_held_out_rows,
)
from rlhf_zoo.runs.recipe import load_recipe


@pytest.mark.parametrize(("schema", "form"), SCHEMAS)
def test_no_stage_trains_on_evaluation_prompts(schema: str, form: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"reward": {"judge_share": 0.5}} if "reward" in SCHEMAS[schema, form] else {}
    folder = make_recipe(tmp_path, schema, form, **keys)
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    context = RunContext(load_recipe(str(folder)), tmp_path / "run", hub, namespace="local", publish=False)
    source = data_source(context)
    evaluated = {
        plain_text(prompt).strip()
        for part in ("test", "validation")
        for prompt in evaluation_rows(context, source, part)["prompt"]
    }
    assert len(evaluated) == 2 * 5, "a fifth of 24 prompts each"

    def learned() -> Iterator[tuple[str, list[str]]]:
        train, held_out, left_out = training_and_held_out_rows(context, "sft", source)
        assert held_out is not None and left_out[HELD_OUT] == 10
        yield "sft", [plain_text(row.get("prompt") or sft_text(row, "text")) for row in (*train, *held_out)]
        if "reward" in context.recipe.stages:
            pairs, left_out = training_pairs(context, source)
            assert left_out[HELD_OUT] == 10
            measured, _ = held_out_pairs(context, source) or (None, "")
            assert measured is not None
            yield "reward", [plain_text(row["prompt"]) for rows in (pairs, measured) for row in rows]
        yield "ppo", [plain_text(prompt) for prompt in training_and_held_out_rows(context, "ppo", source)[0]["prompt"]]

    for stage, texts in learned():
        assert texts
        prefixes = {text.strip()[: len(prompt) + 1] for prompt in evaluated for text in texts}
        assert not [prompt for prompt in evaluated for end in ("", " ", "\n", "?") if prompt + end in prefixes], stage


def test_drop_rows_with_prompts_matches_prompts_across_formats() -> None:
    texts = [[{"role": "user", "content": "one "}], "two", "\n\nHuman: three\n\nAssistant:"]
    held_out = [{"prompt": text} for text in texts]
    for rows in (
        [{"prompt": "one"}, {"prompt": " two"}, {"prompt": "four"}],
        [{"prompt": [{"role": "user", "content": name}]} for name in ("one", "two", "four")],
        [{"text": "\n\nHuman: three\n\nAssistant: yes"}, {"text": "two"}, {"text": "four"}],
        [
            {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "a"}]}
            for name in ("one", "two", "x")
        ],
    ):
        remaining, left_out = drop_rows_with_prompts(Dataset.from_list(rows), held_out, subject="the stage sft")
        assert remaining.to_list() == rows[2:] and left_out == 2
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    rows = Dataset.from_list([{"prompt": system}, {"prompt": [{"role": "user", "content": "six"}]}])
    assert drop_rows_with_prompts(rows, held_out, subject="x")[1] == 1, "a system turn asks nothing"
    with pytest.raises(ZooError, match="holds out every prompt of the stage sft: use more data, or lower the share"):
        drop_rows_with_prompts(Dataset.from_list([{"prompt": "two"}]), held_out, subject="the stage sft")


def test_all_held_out_prompts_validate_when_evaluation_has_own_split(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path, "trl-lib/tldr", "plain")
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    context = RunContext(load_recipe(str(folder)), tmp_path / "run", hub, namespace="local", publish=False)
    changed = replace(context, flags={"recipe": {"evaluation.dataset_test_split": "train"}})
    source = data_source(context)
    prompts = [prompt for part in ("test", "validation") for prompt in evaluation_rows(context, source, part)["prompt"]]
    train, watched, _ = training_and_held_out_rows(changed, "ppo", source)
    assert watched is not None and list(watched["prompt"]) == prompts and len(train) == 24 - len(prompts)
    assert evaluation_rows(changed, source, "validation").to_list() == watched.to_list()
    assert len(evaluation_rows(changed, source)) == 24


def test_prompts_that_contain_held_out_prompt_are_counted_in_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_recipe(tmp_path, "trl-lib/tldr", "plain")
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    context = RunContext(load_recipe(str(folder)), tmp_path / "run", hub, namespace="local", publish=False)
    count = len(training_and_held_out_rows(context, "ppo", data_source(context))[0])
    assert "are left out" not in caplog.text
    file = next((tmp_path / "data").glob("train*.jsonl"))
    prompt = evaluation_rows(context, data_source(context))["prompt"][0]
    longer = json.dumps({"prompt": f"{plain_text(prompt)} Answer in one word.", "completion": " yes"})
    file.write_text(f"{file.read_text().rstrip()}\n{longer}\n")
    train, _, _ = training_and_held_out_rows(replace(context), "ppo", data_source(context))
    assert len(train) == count and f"1 of {count + 1} prompts of PPO are left out" in caplog.text


def test_drop_held_out_prompts_keeps_texts_without_prompt(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path, "openai/gsm8k", "plain")
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    context = RunContext(load_recipe(str(folder)), tmp_path / "run", hub, namespace="local", publish=False)
    texts = Dataset.from_list([{"text": f"how is item {row} it is fine"} for row in range(24)])
    remaining, left_out = drop_held_out_prompts(context, texts, subject="the stage sft")
    assert len(remaining) == 24 and left_out == {}


def test_left_out_rows_are_logged_once_per_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_recipe(tmp_path, "openai/gsm8k", "plain")
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    context = RunContext(load_recipe(str(folder)), tmp_path / "run", hub, namespace="local", publish=False)
    prompts = Dataset.from_list(
        [{"prompt": prompt} for prompt in evaluation_rows(context, data_source(context))["prompt"]]
    )
    rows = concatenate_datasets([prompts, Dataset.from_list([{"prompt": "another"}])])
    for run in (context, context, replace(context, preflight_passed=True)):
        assert drop_held_out_prompts(run, rows, subject="the stage sft")[1] == {HELD_OUT: len(prompts)}
    assert caplog.text.count(f"{len(prompts)} of {len(rows)} rows of the stage sft are left out") == 1
