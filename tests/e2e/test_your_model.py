"""Runs every command of docs/your-model.md unchanged, on tiny models and data under the names that the page uses."""

import json
import re
from pathlib import Path

import miniatures
import pytest
import schemas
from test_readme import check_compare, run_command, user_environment
from transformers import AutoModelForSequenceClassification

PAGE = (Path(__file__).parents[2] / "docs/your-model.md").read_text(encoding="utf-8")
JUDGE = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.S | re.M)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of tiny models and data: a folder takes precedence over a repository of the same name."""
    folder = tmp_path_factory.mktemp("mine")
    base = miniatures.save("Qwen3", folder / "Qwen/Qwen3-0.6B")
    judge = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    tokenizer = miniatures.load("Qwen3")[1]
    judge.config.pad_token_id = tokenizer.pad_token_id
    judge.save_pretrained(folder / JUDGE)
    tokenizer.save_pretrained(folder / JUDGE)
    for name in ("trl-lib/ultrafeedback_binarized", "openai/gsm8k"):
        schemas.write_data(folder / name, schemas.rows_of(name))
    return folder, user_environment(folder)


@pytest.mark.full
def test_your_model_page_commands_run(place: tuple[Path, dict[str, str]]) -> None:
    assert len(commands()) >= 9
    for command in commands():
        if command.startswith("rlhf-zoo compare "):
            check_compare(command, place)
        else:
            run_command(command, place)
    folder = place[0]
    evaluation = json.loads((folder / "runs/my-model/eval/evaluation.json").read_text())
    assert evaluation["judge"]["name"] == f"reward:{folder / JUDGE}" and not evaluation["judge"]["is_training_reward"]
    ppo = json.loads((folder / "runs/my-model/ppo/run.json").read_text())
    assert ppo["status"] == "finished" and "step-000040" in ppo["repo"]["tags"]
    assert ppo["chosen"]["rule"] == "recommended" and "provisional" not in ppo["chosen"]
    assert ("best" in ppo["repo"]["tags"]) is ("none" not in ppo["chosen"])
    assert "bfloat16" in (folder / "runs/my-model/ppo/README.md").read_text()
