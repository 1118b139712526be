"""The rule `best` in a real PPO stage, local pruning, and LoRA runs that publish the merged model too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.publish import checkpoint_files
from rlhf_zoo.record import checkpoint_step
from rlhf_zoo.stages import evaluate, ppo

WATCHED = {
    "reward_funcs": "toy_run:answered", "reward_weights": "1,0", "release": "best",
    "metric_for_best_model": "rewards/answered", "greater_is_better": "true", "eval_strategy": "steps",
    "eval_steps": "1",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path, ppo={"max_steps": 6, "learning_rate": 0.02})
    save_start(tmp_path)
    return tmp_path


def steps(folder: Path) -> list[int]:
    return [checkpoint_step(path) for path in make_context(folder).record("ppo").checkpoints()]


def test_the_best_checkpoint_is_chosen_by_the_watched_reward_and_kept(folder):
    context = make_context(folder, save_total_limit="1", **WATCHED)
    assert ppo.run(context)
    record = context.record("ppo")
    seen = {row["step"]: row["eval_rewards/answered"] for row in record.metrics() if "eval_rewards/answered" in row}
    assert set(seen) == set(range(1, 7)) and len(set(seen.values())) > 1
    best = max(seen.values())
    first = min(step for step, value in seen.items() if value == best)
    chosen = record.read()["chosen"]
    assert chosen == {"step": first, "rule": "best", "metric": "eval_rewards/answered", "value": best}
    assert steps(folder) == sorted({first, 6})
    assert context.checkpoint("ppo").path == record.checkpoint_path(first)


def test_a_rewarded_metric_is_refused_before_the_directory_is_claimed(folder):
    with pytest.raises(ZooError, match=r"choose by eval_rewards/answered, which PPO is rewarded for"):
        ppo.run(make_context(folder, **{**WATCHED, "reward_weights": "1,1"}))
    with pytest.raises(ZooError, match=r"there is no reward silver: name one of reward_model, answered that has"):
        ppo.reward_functions(
            make_context(folder, **{**WATCHED, "metric_for_best_model": "rewards/silver"}).settings("ppo")
        )
    assert not (folder / "run" / "ppo" / "run.json").exists()


def test_without_publishing_the_limit_leaves_the_last(folder):
    assert ppo.run(make_context(folder, save_total_limit="2"))
    assert steps(folder) == [5, 6]
    assert make_context(folder).record("ppo").read()["chosen"]["rule"] == "last"


def test_training_stops_after_the_step_asked_for(folder):
    context = replace(make_context(folder), stop_after=2)
    assert ppo.run(context)
    assert context.record("ppo").read()["status"] == "stopped" and steps(folder) == [1, 2]
    whole = make_context(folder)
    assert ppo.run(whole) and whole.record("ppo").read()["status"] == "finished"
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


LORA = {"use_peft": "true", "lora_r": "4", "lora_target_modules": "all-linear", "lora_task_type": "CAUSAL_LM"}
SEND = """
import os
from pathlib import Path
from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.recipes import Recipe
from rlhf_zoo.stages.context import RunContext
from rlhf_zoo.stages.release import Sender

hub = Hub("other", os.environ["HF_ENDPOINT"], "test")
recipe = Recipe("toy", Path("."), {"description": "A toy."}, {})
context = RunContext(recipe=recipe, directory=Path("run"), hub=hub, namespace="local", publish=True)
Sender(context, stages=("sft", "reward", "ppo")).send_all()
"""
LOAD = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_zoo.models import load_causal

ids = torch.tensor([[3, 4, 5]])
here = load_causal("run/ppo/checkpoint-6")(ids).logits
adapter = AutoPeftModelForCausalLM.from_pretrained("local/toy-ppo", revision="best", dtype=torch.float32)
merged = AutoModelForCausalLM.from_pretrained("local/toy-ppo", revision="merged", dtype=torch.float32)
AutoTokenizer.from_pretrained("local/toy-ppo", revision="merged")
print(float((adapter(ids).logits - here).abs().max()), float((merged(ids).logits - here).abs().max()))
earlier = AutoPeftModelForCausalLM.from_pretrained("local/toy-ppo", revision="step-000003", dtype=torch.float32)
print(float((earlier(ids).logits - here).abs().max()))
"""


def test_an_adapter_is_published_on_its_base_and_merged(folder, hub):
    context = make_context(folder, push_merged="true", **LORA)
    assert ppo.run(context)
    checkpoint = context.checkpoint("ppo").path
    sent = checkpoint_files(checkpoint)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {*sent} and "model.safetensors" not in sent
    assert {"model.safetensors", "config.json", "tokenizer_config.json"} <= {*checkpoint_files(checkpoint / "merged")}
    assert not (context.record("ppo").checkpoint_path(5) / "merged").exists()
    hub.python(SEND, cwd=folder)
    first, second = hub.python(LOAD, cwd=folder).splitlines()
    # Adapter and merged weights round apart; by how much hangs on the processor.
    assert all(float(difference) < 1e-5 for difference in first.split()) and float(second) > 1e-6
    sft = {ref.name: ref.target_commit for ref in hub.api().list_repo_refs("local/toy-sft").tags}
    config = Path(hub.api().hf_hub_download("local/toy-ppo", "adapter_config.json", cache_dir=folder / "pulled"))
    told = json.loads(config.read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == ("local/toy-sft", sft["step-000004"])
    files = hub.api().list_repo_files("local/toy-ppo", revision="merged")
    assert "model.safetensors" in files and not [name for name in files if "adapter" in name]
    for name in ("README.md", "adapter_config.json", "critic/adapter_config.json"):
        text = Path(hub.api().hf_hub_download("local/toy-ppo", name, cache_dir=folder / "pulled")).read_text()
        assert str(folder) not in text, "a path of this machine"
    # What comes back is what was sent, whatever else lies in the checkpoint on the disk.
    pulled = Path(hub.api().snapshot_download("local/toy-ppo", revision="best", cache_dir=folder / "pulled"))
    assert evaluate.same_weights(pulled, checkpoint)
    assert not evaluate.same_weights(pulled, folder / "run/ppo/checkpoint-3")
    card = hub.api().hf_hub_download("local/toy-ppo", "README.md", revision="merged", cache_dir=folder / "pulled")
    assert "base_model_relation: finetune" in Path(card).read_text()
