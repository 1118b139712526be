"""Hugging Face's libraries and the `hf` command, unmodified, against the embedded Hub, each in its own process."""

import json
import random
from pathlib import Path

import pytest
import trainer_fixture

PUSH_MODEL = f"""
import sys
sys.path.insert(0, {str(Path(trainer_fixture.__file__).parent)!r})
import torch
from huggingface_hub import HfApi
from trainer_fixture import make_policy, make_tokenizer

model, tokenizer = make_policy(), make_tokenizer()
first = model.push_to_hub("local/tiny", commit_message="First").oid
tokenizer.push_to_hub("local/tiny")
HfApi().create_tag("local/tiny", tag="step-000001", tag_message="the first")
total = sum(p.sum().item() for p in model.parameters())
with torch.no_grad():
    model.lm_head.weight += 1
model.push_to_hub("local/tiny", commit_message="Second")
torch.save(model.state_dict(), "second.pt")
print(total)
"""

PULL_MODEL = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

old = AutoModelForCausalLM.from_pretrained("local/tiny", revision="step-000001")
new = AutoModelForCausalLM.from_pretrained("local/tiny")
tokenizer = AutoTokenizer.from_pretrained("local/tiny", revision="step-000001")
saved = torch.load("second.pt", weights_only=True)
assert all(torch.equal(saved[name], tensor) for name, tensor in new.state_dict().items())
difference = new.lm_head.weight - old.lm_head.weight
assert torch.allclose(difference, torch.ones_like(difference), atol=1e-6)
assert tokenizer("ab")["input_ids"] == [3, 4]
text = pipeline("text-generation", model="local/tiny", revision="step-000001")("ab", max_new_tokens=2)
print(sum(p.sum().item() for p in old.parameters()))
"""


def test_transformers_pushes_and_loads_models(in_process_hub, tmp_path):
    pushed = in_process_hub.python(PUSH_MODEL, cwd=tmp_path, HF_HUB_DISABLE_XET="0").split()[-1]
    empty = str(tmp_path / "an-empty-home")
    pulled = in_process_hub.python(PULL_MODEL, cwd=tmp_path, HF_HOME=empty).split()[-1]
    assert float(pulled) == pytest.approx(float(pushed), rel=1e-6)
    api = in_process_hub.api()
    assert api.model_info("local/tiny").pipeline_tag == "text-generation"
    assert in_process_hub.git("local/tiny", "fsck", "--full", "--strict") == ""


DATASETS = """
from datasets import Dataset, get_dataset_config_names, load_dataset

Dataset.from_dict({"prompt": ["a", "b"]}).push_to_hub("local/remarks", "prompts", split="train")
Dataset.from_dict({"text": ["x"], "label": [1]}).push_to_hub("local/remarks", "judge", split="judge", private=False)

assert get_dataset_config_names("local/remarks") == ["judge", "prompts"]
assert load_dataset("local/remarks", "judge", split="judge")[0] == {"text": "x", "label": 1}
streamed = load_dataset("local/remarks", "prompts", split="train", streaming=True)
assert [row["prompt"] for row in streamed] == ["a", "b"]
"""

FOLDER = """
from huggingface_hub import HfApi

api = HfApi()
api.create_repo("local/world", repo_type="dataset")
api.upload_folder(repo_id="local/world", repo_type="dataset", folder_path="world")
api.create_tag("local/world", tag="v1", repo_type="dataset")
assert load_dataset("local/world", split="validation")["text"][:] == ["lines validation"]
assert load_dataset("local/world", "judge", split="judge", revision="v1")["text"][:] == ["judge judge"]
"""
CARD = """---
configs:
- config_name: lines
  default: true
  data_files:
  - {split: train, path: lines/train.jsonl}
  - {split: validation, path: lines/validation.jsonl}
- config_name: judge
  data_files:
  - {split: judge, path: judge/judge.jsonl}
---
# A folder of JSON lines
"""


def test_datasets_pushes_and_loads_configurations(in_process_hub, tmp_path):
    """A data set made by `push_to_hub`, and a folder with configurations, in one process."""
    for name in ("lines/train", "lines/validation", "judge/judge"):
        path = tmp_path / "world" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name.replace("/", " ")}) + "\n")
    (tmp_path / "world" / "README.md").write_text(CARD)
    in_process_hub.python(DATASETS + FOLDER, cwd=tmp_path)
    info = in_process_hub.api().dataset_info("local/remarks")
    assert {c["config_name"] for c in info.card_data["configs"]} == {"judge", "prompts"}


def test_hf_command_uploads_tags_and_downloads(in_process_hub, tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    weights = random.Random(5).randbytes(400_000)
    (folder / "sub" / "w.safetensors").write_bytes(weights)
    assert "local" in in_process_hub.run("hf", "auth", "whoami")
    in_process_hub.run("hf", "upload", "local/cli", str(folder), ".", "--commit-message", "From the command line")
    in_process_hub.run("hf", "repos", "tag", "create", "local/cli", "v1", "-m", "first")
    in_process_hub.run("hf", "download", "local/cli", "--revision", "v1", "--local-dir", str(tmp_path / "tag"))
    assert (tmp_path / "tag" / "sub" / "w.safetensors").read_bytes() == weights
    assert "local/cli" in in_process_hub.run("hf", "repos", "ls")
    in_process_hub.run("hf", "repos", "delete", "local/cli", "--yes")
    assert not in_process_hub.api().repo_exists("local/cli")
