"""Weights in few bits under an adapter, by bitsandbytes: on the CPU, where it is slow but computes the same way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainer_fixture import EOS, PAD, SAVED, digests, make_tokenizer, make_trainer, trained, updates_of
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.settings.loading import stage_load_options
from rlhf_zoo.runs.settings.parse import stage_settings

pytest.importorskip("bitsandbytes")

LORA = {"use_peft": True, "lora_r": 2, "bf16": False, "use_cpu": True}
#: What is quantized is a block of 64 numbers, so the layers are as wide.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("keys", "dtype"), [({"load_in_4bit": True}, torch.uint8), ({"load_in_8bit": True}, torch.int8)], ids=["4", "8"]
)
def test_ppo_trains_adapter_on_weights_in_few_bits(keys: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, **WIDE)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    recipe = Recipe("toy", Path(), {"description": "A toy."}, {"ppo": {**LORA, **keys}})
    settings = stage_settings(recipe, "ppo", {}, shared_flags={}, output_dir=tmp_path)

    def load() -> Any:
        policy = load_causal(tmp_path / "base", options=stage_load_options(settings))
        # bitsandbytes packs weights anew where a CPU has these instructions, and rounds.
        for module in policy.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return policy

    policy = load()
    weight = policy.model.layers[0].self_attn.q_proj.weight
    before = weight.clone()
    assert weight.dtype == dtype and not weight.requires_grad
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    given = {"model": policy, "peft_config": adapter, "critic": "shared", "optim": "adamw_8bit"}
    trainer = trained(tmp_path / "run", **SAVED, **given)
    assert all(row["objective/kl"] == row["objective/kl"] for row in updates_of(trainer))
    moved = [name for name, one in trainer.policy.named_parameters() if "lora_B" in name and one.abs().max() > 0]
    assert moved and torch.equal(weight, before)
    saved = tmp_path / "run" / "checkpoint-3"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
    again = make_trainer(tmp_path / "again", **SAVED, **{**given, "model": load()})
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    ours, theirs = (
        {name: one for name, one in digests(one.policy).items() if "lora" in name} for one in (again, trainer)
    )
    assert ours == theirs and ours, "a resumed run ends as the one that was not cut off"
