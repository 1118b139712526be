"""Weights out of a GGUF file: unpacked once, trained and saved as any other, or refused before anything trains."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_fixture import make_policy, make_trainer
from transformers import AutoModelForCausalLM, GgufConfig

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import gguf
from rlhf_zoo.modeling.gguf import check_no_gguf, check_plain_weights, with_plain_weights
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead
from rlhf_zoo.pipeline.new.model import inspect_model
from rlhf_zoo.runs.settings.declared import declared_keys, refused_keys
from rlhf_zoo.runs.settings.values import checked_keys

FILE = "tiny.Q8_0.gguf"


def test_packed_weights_are_unpacked_when_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_plain_weights({"dtype": "float32"}) == {"dtype": "float32"}
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: object())
    given = with_plain_weights({"dtype": "float32", "gguf_file": FILE})
    assert given["quantization_config"].dequantize is True and given["gguf_file"] == FILE
    with pytest.raises(ZooError, match="and quantization_config are both set"):
        with_plain_weights({"gguf_file": FILE, "quantization_config": GgufConfig()})


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    message = f"gguf_file is {FILE}, and the package gguf is not installed: pip install gguf, or choose"
    with pytest.raises(ZooError, match=message):
        load_causal(tmp_path, gguf_file=FILE)
    with pytest.raises(ZooError, match=message):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, gguf_file=FILE)


def quantized(packed: dict[str, Any]) -> Any:
    """A policy as transformers leaves one that it loads from a GGUF file."""
    policy = make_policy()
    policy.hf_quantizer = SimpleNamespace(
        quantization_config=GgufConfig(), packed_modules=packed, remove_quantization_config=_as_transformers_does
    )
    policy.is_quantized = True
    policy.config.quantization_config = policy.hf_quantizer.quantization_config
    return policy


def _as_transformers_does(model: Any) -> None:
    del model.hf_quantizer, model.config.quantization_config
    model.is_quantized = False


def test_a_policy_that_was_loaded_elsewhere_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=quantized({}))
    trainer.save_model(str(tmp_path / "saved"))
    assert load_file(tmp_path / "saved" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_packed_weights_are_refused_before_anything_trains(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="packed as in its GGUF file, so they can be neither trained nor saved: load it"):
        make_trainer(tmp_path, model=quantized({"model.layers.0.mlp.up_proj": object()}))
    check_plain_weights(make_policy())


def write_gguf(folder: Path) -> None:
    """A Llama of one layer, its matrices in 8 bits."""
    import gguf

    rng, width = np.random.default_rng(0), 32
    writer = gguf.GGUFWriter(folder / FILE, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(64)
    sizes = {"token_embd": (64, width), "output": (64, width)}
    sizes |= {f"blk.0.attn_{one}": (width, width) for one in ("q", "k", "v", "output")}
    sizes |= {"blk.0.ffn_gate": (64, width), "blk.0.ffn_up": (64, width), "blk.0.ffn_down": (width, 64)}
    for name, size in sizes.items():
        packed = gguf.quants.quantize(rng.normal(size=size).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_becomes_plain_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path)
    model = load_causal(tmp_path, gguf_file=FILE)
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, gguf_file=FILE)
    for place, one in enumerate((model, wrapped)):
        saved = tmp_path / str(place)
        one.save_pretrained(saved)
        assert "quantization_config" not in json.loads((saved / "config.json").read_text())
        again = AutoModelForCausalLM.from_pretrained(saved)
        for name, weight in model.state_dict().items():
            assert weight.dtype == torch.float32 and torch.equal(again.state_dict()[name], weight), name


def test_a_recipe_takes_no_gguf_file_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / FILE
    file.touch()
    for name in (file, file.parent):
        with pytest.raises(ZooError, match=rf"--model names .*{FILE}, a GGUF file, and .*: save it unpacked"):
            inspect_model(str(name))
    (file.parent / "config.json").write_text("{}")
    check_no_gguf(file.parent, key="--model")  # which has weights beside it, or says itself that it has none
    for where in ({"flag": "--sft."}, {"refused": refused_keys("sft")}):
        with pytest.raises(ZooError, match=r"gguf_file.* not taken by recipes, which read safetensors: save the model"):
            checked_keys({"gguf_file": FILE}, {}, "sft.yaml", **{"refused": refused_keys("sft"), **where})


def test_a_key_whose_library_advises_against_it_says_what_it_does_here() -> None:
    said = declared_keys("sft")["pad_token"].help
    assert said.startswith("PAD, a token of the vocabulary")
