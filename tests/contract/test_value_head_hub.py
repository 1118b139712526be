"""Value heads on the Hub, through the unmodified client in separate processes: pushed, pulled, raced and rejected."""

from pathlib import Path
from typing import Any

import value_head_models

PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(value_head_models.__file__).parent)!r})
from pathlib import Path
import pytest, torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import value_head
from rlhf_zoo.modeling.model_files import ModelFiles
from rlhf_zoo.modeling.value_head import VALUE_HEAD_FILE
from rlhf_zoo.modeling.value_head_models import *
from value_head_models import *

api = HfApi()
Causal, Seq2Seq = AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

def read_value_head(name, **hub):
    return value_head.read_value_head(ModelFiles(name, **hub))

def first():
    return headed("llama", base=plain("llama", seed=1), seed=1)
"""

PUSH = """
first().push_to_hub("local/headed", commit_message="First", private=True)
api.create_tag("local/headed", tag="first")
headed("llama", seed=2).push_to_hub("local/headed")
headed("gpt2").push_to_hub("local/shards", max_shard_size=SHARD)
assert len([name for name in api.list_repo_files("local/shards") if name.endswith(".safetensors")]) > 2
headed("t5").save_pretrained("kept", push_to_hub=True, repo_id="local/seq2seq")
plain("llama").push_to_hub("local/base")
api.create_tag("local/base", tag="v1")
plain("llama", seed=9).push_to_hub("local/base")
adapter = headed("llama", base="local/base", revision="v1", peft_config=lora(init_lora_weights=False))
adapter.save_pretrained("adapter")
adapter.push_to_hub("local/adapter")
save_file(dict(zip(("logits", "values"), outputs(adapter))), "adapter-outputs.safetensors")
api.create_repo("local/folders")
api.upload_folder(repo_id="local/folders", folder_path="adapter", path_in_repo="deep/adapter")
plain("llama").push_to_hub("local/shared-trunk")
Path("critic").mkdir()
save_file(HEAD, VALUE_HEAD_FILE)
api.upload_file(repo_id="local/shared-trunk", path_or_fileobj=VALUE_HEAD_FILE, path_in_repo=VALUE_HEAD_FILE)
api.create_repo("local/pickle")
torch.save(headed("llama").state_dict(), "pytorch_model.bin")
api.upload_file(repo_id="local/pickle", path_or_fileobj="pytorch_model.bin", path_in_repo="pytorch_model.bin")
CONFIGS["llama"]().push_to_hub("local/pickle")

# Another push happens between loading the trunk and the head: both come from the first commit.
import rlhf_zoo.modeling.value_head_models as module
load = module._load_model

def load_while_another_pushes(*args):
    model = load(*args)
    headed("gpt2", seed=6).push_to_hub("local/raced", max_shard_size=SHARD)
    return model

headed("gpt2", seed=5).push_to_hub("local/raced", max_shard_size=SHARD)
module._load_model = load_while_another_pushes
assert_same(headed("gpt2", seed=5), Causal.from_pretrained("local/raced"))
module._load_model = load
assert_same(headed("gpt2", seed=6), Causal.from_pretrained("local/raced"))
"""

PULL = """
import logging, sys
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
for name in ("transformers", "rlhf_zoo"):
    logging.getLogger(name).addHandler(handler)

assert_same(headed("llama", seed=2), Causal.from_pretrained("local/headed", **OPTIONS))
assert_same(first(), Causal.from_pretrained("local/headed", revision="first", **OPTIONS))
assert_same(headed("gpt2"), Causal.from_pretrained("local/shards", **OPTIONS))
assert_same(headed("t5"), Seq2Seq.from_pretrained("local/seq2seq", **OPTIONS))
expected = load_file("adapter-outputs.safetensors")
for name, folder in (("local/adapter", ""), ("local/folders", "deep/adapter"), ("adapter", "")):
    logits, values = outputs(Causal.from_pretrained(name, subfolder=folder, **OPTIONS))
    assert torch.equal(logits, expected["logits"]) and torch.equal(values, expected["values"]), name
shared = Causal.from_pretrained("local/shared-trunk", **OPTIONS)
assert torch.equal(shared.v_head.summary.weight, HEAD["v_head.summary.weight"])
assert torch.equal(read_value_head("local/headed", revision="first", **OPTIONS)["summary.bias"],
                   first().v_head.summary.bias)
assert warnings == [], warnings
Causal.from_pretrained("local/base", **OPTIONS)
assert warnings == ["local/base has no value head: using a new one with random weights."], warnings
print("pulled")
"""

REJECTED = """
import os
for read in (read_value_head, Causal.from_pretrained):
    with pytest.raises(ZooError, match="local/pickle has pickled weights"):
        read("local/pickle")
    with pytest.raises(ZooError, match="local/nothing is neither"):
        read("local/nothing")
    with pytest.raises(ZooError, match="local/headed is neither"):
        read("local/headed", token=False)
    with pytest.raises(ZooError, match="local/headed is neither"):
        read("local/headed", revision="second", **OPTIONS)
cached = [name for _, _, names in os.walk(os.environ["HF_HOME"]) for name in names]
assert "pytorch_model.bin" not in cached, cached
"""


def test_value_heads_are_pushed_and_loaded(hub: Any, tmp_path: Path) -> None:
    hub.python(PRELUDE + PUSH, cwd=tmp_path)
    assert hub.api().model_info("local/headed").private
    home = str(tmp_path / "an-empty-home")
    # First with a token as an argument; then from the cache only, as the Hub refuses calls without a token.
    online = f"OPTIONS = {{'token': {hub.env['HF_TOKEN']!r}}}\n" + REJECTED + PULL
    cached = "assert_same(headed('llama', seed=2), Causal.from_pretrained('local/headed', local_files_only=True))"
    output = hub.python(PRELUDE + online + cached, cwd=tmp_path, HF_HOME=home, HF_TOKEN="")
    assert output.split()[-1] == "pulled"
    output = hub.python(PRELUDE + "OPTIONS = {}\n" + PULL, cwd=tmp_path, HF_HOME=home, HF_HUB_OFFLINE="1")
    assert output.split()[-1] == "pulled"
    for name in ("headed", "shards", "adapter"):
        assert hub.git(f"local/{name}", "fsck", "--full", "--strict") == ""
