"""The rule `best` in a real PPO stage, local pruning, and LoRA runs that publish the merged model too."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from thread_hub import send_all
from toy_run import make_context, make_recipe, save_start
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import trajectory
from rlhf_zoo.evaluation.evidence import Evidence
from rlhf_zoo.evaluation.head_to_head import HeadToHead
from rlhf_zoo.evaluation.stats import Estimate
from rlhf_zoo.evaluation.verdict import Verdict, decide
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.hub.client.publish import checkpoint_files, folders_have_same_weights
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.publishing.sender import Sender
from rlhf_zoo.runs.record import checkpoint_step

pytestmark = pytest.mark.usefixtures("quick_plots")

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


def test_best_checkpoint_is_chosen_by_watched_reward_and_kept(folder):
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


def test_rewarded_metric_is_rejected_before_directory_is_claimed(folder):
    with pytest.raises(ZooError, match=r"choose the checkpoint by eval_rewards/answered, which PPO maximizes"):
        ppo.run(make_context(folder, **{**WATCHED, "reward_weights": "1,1"}))
    with pytest.raises(ZooError, match="there is no reward silver"):
        ppo.load_reward_functions(
            make_context(folder, **{**WATCHED, "metric_for_best_model": "rewards/silver"}).settings("ppo")
        )
    assert not (folder / "run" / "ppo" / "run.json").exists()


def test_stop_after_stops_and_save_total_limit_keeps_last_checkpoints(folder):
    stopped = replace(make_context(folder, save_total_limit="2"), stop_after=2)
    assert ppo.run(stopped)
    assert stopped.record("ppo").read()["status"] == "stopped" and steps(folder) == [1, 2]
    whole = make_context(folder, save_total_limit="2")
    assert ppo.run(whole) and steps(folder) == [5, 6]
    found = whole.record("ppo").read()
    assert found["status"] == "finished" and found["chosen"]["step"] == 6


def test_restarted_stage_keeps_nothing_of_previous_run(folder):
    context = make_context(folder)
    assert ppo.run(context)
    make_card(context.record("ppo").path)
    (folder / "run" / "summary.json").write_text("{}")
    mine = context.record("ppo").path / "notes.md"
    mine.write_text("mine")
    assert {"README.md", "rlhf_card.json", "plots"} <= {path.name for path in mine.parent.iterdir()}
    assert ppo.run(replace(context, restart=True, stop_after=1))
    left = {path.relative_to(folder / "run").as_posix() for path in mine.parent.rglob("*") if path.is_file()}
    assert {one for one in left if "checkpoint-" not in one} == {"ppo/run.json", "ppo/metrics.jsonl", "ppo/notes.md"}
    assert not (folder / "run" / "summary.json").exists() and steps(folder) == [1]


LORA = {"use_peft": "true", "lora_r": "4", "lora_target_modules": "all-linear", "lora_task_type": "CAUSAL_LM"}


def test_adapter_is_published_on_its_base_and_merged(folder, thread_hub):
    context = make_context(folder, push_merged="true", release="last", **LORA)
    assert ppo.run(context)
    checkpoint = context.checkpoint("ppo").path
    sent = checkpoint_files(checkpoint)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {*sent} and "model.safetensors" not in sent
    assert {"model.safetensors", "config.json", "tokenizer_config.json"} <= {*checkpoint_files(checkpoint / "merged")}
    assert not (context.record("ppo").checkpoint_path(5) / "merged").exists()
    assert not [*context.record("ppo").path.rglob("README.md")], "peft's empty template, with a path of this machine"

    hub = Hub("other", thread_hub.url, "a test")
    send_all(Sender(replace(context, hub=hub, publish=True), stages=("sft", "reward", "ppo")))
    ids = torch.tensor([[3, 4, 5]])

    def apart(kind, revision):
        """From the checkpoint on the disk; adapter and merged weights round apart, by the processor."""
        theirs = kind.from_pretrained("local/toy-ppo", revision=revision, dtype=torch.float32)
        return float((theirs(ids).logits - load_causal(checkpoint)(ids).logits).abs().max())

    assert apart(AutoPeftModelForCausalLM, "best") < 1e-5 and apart(AutoModelForCausalLM, "merged") < 1e-5
    assert apart(AutoPeftModelForCausalLM, "step-000003") > 1e-6
    AutoTokenizer.from_pretrained("local/toy-ppo", revision="merged")

    api = thread_hub.api()
    pulled = Path(api.snapshot_download("local/toy-ppo", revision="best"))
    told = json.loads((pulled / "adapter_config.json").read_text())
    sft = {ref.name: ref.target_commit for ref in api.list_repo_refs("local/toy-sft").tags}
    assert (told["base_model_name_or_path"], told["revision"]) == ("local/toy-sft", sft["step-000004"])
    for name in ("README.md", "adapter_config.json", "critic/adapter_config.json"):
        assert str(folder) not in (pulled / name).read_text(), "a path of this machine"
    # What comes back is what was sent, whatever else lies in the checkpoint on the disk.
    assert folders_have_same_weights(pulled, checkpoint)
    assert not folders_have_same_weights(pulled, folder / "run/ppo/checkpoint-3")
    files = api.list_repo_files("local/toy-ppo", revision="merged")
    assert "model.safetensors" in files and not [name for name in files if "adapter" in name]
    card = Path(api.hf_hub_download("local/toy-ppo", "README.md", revision="merged"))
    assert "base_model_relation: finetune" in card.read_text()


def test_main_best_merged_and_card_name_recommended_step(folder, thread_hub, monkeypatch):
    """Before the evaluation the last checkpoint is `main`, its card says so, and nothing is `best`."""
    hub = Hub("other", thread_hub.url, "a test")
    context = replace(make_context(folder, push_merged="true", **LORA), hub=hub, publish=True)
    assert ppo.run(context)
    send_all(Sender(context, stages=("sft", "reward", "ppo")))
    api, record = thread_hub.api(), context.record("ppo")

    def published(name: str, revision: str) -> Path:
        return Path(api.hf_hub_download("local/toy-ppo", name, revision=revision))

    def weights(step: int) -> bytes:
        return (record.checkpoint_path(step) / "adapter_model.safetensors").read_bytes()

    def tags() -> set[str]:
        return {ref.name for ref in api.list_repo_refs("local/toy-ppo").tags}

    card = published("README.md", "main").read_text()
    assert "Until then, step **6**, the last checkpoint, is `main`" in card and "best" not in tags()
    assert "has not chosen yet" in card and "@best" not in card and "of the evaluated step" not in card
    assert published("adapter_model.safetensors", "main").read_bytes() == weights(6) != weights(2)
    merged = published("model.safetensors", "merged").read_bytes()

    def decided(evidence: Evidence, *, seed: int) -> Verdict:
        return replace(decide(evidence, seed=seed), candidate=2)

    monkeypatch.setattr(trajectory, "decide", decided)
    monkeypatch.setattr(HeadToHead, "judge_gain", lambda self, policy, rows: Estimate(0.5, (0.1, 0.9), 6))
    assert evaluate.run(context)
    assert record.read()["chosen"] == {"step": 2, "rule": "recommended", "metric": None, "value": None}
    send_all(Sender(context, stages=("sft", "reward", "ppo")))
    assert "best" in tags()
    for revision in ("main", "best"):
        assert published("adapter_model.safetensors", revision).read_bytes() == weights(2)
        assert json.loads(published("rlhf_card.json", revision).read_text())["chosen"]["step"] == 2
    assert published("model.safetensors", "merged").read_bytes() != merged
    card = published("README.md", "main").read_text()
    assert "Use **step 2** (this page, `main`)" in card and 'revision="step-000002"' in card
    assert "`main` and the tag `best`: `rlhf-zoo pull local/toy-ppo@best" in card
    assert (
        json.loads((record.path.parent / "eval" / "run.json").read_text())["parents"]["ppo"]["path"] == "checkpoint-2"
    )
    other = published("README.md", "step-000004").read_text()
    assert "are on the card of the evaluated step, `main`: " in other and other.lower().count("not evaluated") <= 4
