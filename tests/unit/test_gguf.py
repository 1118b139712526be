"""GGUF files: unpacked once, then trained and saved like other weights, or refused before training."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_fixture import FILE, write_gguf
from safetensors.torch import load_file
from trainer_fixture import make_policy, make_trainer
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.gguf import check_no_gguf, check_plain_weights, gguf_source, unpack_if_gguf, with_plain_weights
from rlhf_zoo.modeling.loading import load_model, load_tokenizer
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead
from rlhf_zoo.pipeline.new.model import reward_labels
from rlhf_zoo.runs.models import folder_lineage
from rlhf_zoo.runs.settings.declared import declared_keys, refused_keys
from rlhf_zoo.runs.settings.values import convert_keys


def test_gguf_loading_options_request_dequantization() -> None:
    assert with_plain_weights({"dtype": "float32"}) == {"dtype": "float32"}
    options = with_plain_weights({"dtype": "float32", "gguf_file": FILE})
    assert options["quantization_config"].dequantize is True and options["gguf_file"] == FILE
    with pytest.raises(ZooError, match="and quantization_config are both set"):
        with_plain_weights({"gguf_file": FILE, "quantization_config": GgufConfig()})


def make_gguf_policy(packed: dict[str, Any]) -> Any:
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


def test_trainer_saves_policy_loaded_from_gguf(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=make_gguf_policy({}))
    trainer.save_model(str(tmp_path / "saved"))
    assert load_file(tmp_path / "saved" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_trainer_rejects_packed_gguf_weights(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="packed as in its GGUF file, so they can be neither trained nor saved: load it"):
        make_trainer(tmp_path, model=make_gguf_policy({"model.layers.0.mlp.up_proj": object()}))
    check_plain_weights(make_policy())


def test_gguf_model_saves_as_plain_safetensors(tmp_path: Path) -> None:
    write_gguf(tmp_path)
    model = load_model(AutoModelForCausalLM, tmp_path, subject="The model", overrides={"gguf_file": FILE})
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, gguf_file=FILE)
    for place, loaded in enumerate((model, wrapped)):
        saved = tmp_path / str(place)
        loaded.save_pretrained(saved)
        assert "quantization_config" not in json.loads((saved / "config.json").read_text())
        again = AutoModelForCausalLM.from_pretrained(saved)
        for name, weight in model.state_dict().items():
            assert weight.dtype == torch.float32 and torch.equal(again.state_dict()[name], weight), name


def test_gguf_file_is_unpacked_once_into_model_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    file = write_gguf(tmp_path)
    folder = Path(unpack_if_gguf(str(file)))
    assert folder.name == FILE and f"Unpacking {file}" in caplog.text
    model, tokenizer = load_causal(folder), load_tokenizer(folder)
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True)
    )
    assert all(torch.equal(weight, packed.state_dict()[name]) for name, weight in model.state_dict().items())
    assert tokenizer.decode(tokenizer("the path").input_ids) == "the path" and tokenizer.pad_token == "<|endoftext|>"
    facts = gguf_source(folder)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert facts == {"file": FILE, "sha256": digest, "quantization": "Q8_0", "license": "mit"}
    assert folder_lineage(folder)["gguf"] == digest

    caplog.clear()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert unpack_if_gguf(str(tmp_path)) == str(folder), "a folder with nothing but a GGUF file stands for it"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before and not caplog.text
    file.write_bytes(file.read_bytes() + b"\0")
    assert unpack_if_gguf(str(file)) != str(folder), "another file"
    assert unpack_if_gguf("org/model") == "org/model" and unpack_if_gguf(str(folder)) == str(folder)


def test_gemma3_config_is_read_from_gguf_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path, kind="gemma3")
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=FILE)
    assert type(config).__name__ == "Gemma3TextConfig" and config.num_hidden_layers == 1 and config.head_dim == 16


def test_unpack_rejects_missing_damaged_or_ambiguous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    with pytest.raises(ZooError, match=r"There is no file .*missing\.gguf: check the path"):
        unpack_if_gguf(str(tmp_path / "missing.gguf"))
    file = write_gguf(tmp_path)
    content = file.read_bytes()
    for part in (content[:20], content[:2000], content[:-5000], b"not a GGUF file" * 100):
        file.write_bytes(part)
        with pytest.raises(ZooError, match=rf"The GGUF file .*{FILE} cannot be loaded"):
            unpack_if_gguf(str(file))
    (tmp_path / "second.gguf").write_bytes(content)
    with pytest.raises(ZooError, match="has 2 GGUF files: name one of them"):
        unpack_if_gguf(str(tmp_path))
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()], "no half folder stays"


def test_reward_model_may_not_be_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / FILE
    file.touch()
    for name in (file, file.parent):
        with pytest.raises(ZooError, match=rf"--reward names .*{FILE}, but a GGUF file has no score head"):
            reward_labels(str(name))
    (file.parent / "config.json").write_text("{}")
    check_no_gguf(file.parent, key="--reward")  # which has weights beside it, or says itself that it has none


def test_gguf_file_key_error_names_model_name_or_path() -> None:
    for where in ({"flag": "--sft."}, {"refused_names": refused_keys("sft")}):
        with pytest.raises(
            ZooError, match=r"gguf_file.* not supported by recipes: name the file in model_name_or_path"
        ):
            convert_keys({"gguf_file": FILE}, {}, "sft.yaml", **{"refused_names": refused_keys("sft"), **where})


def test_pad_token_help_describes_key() -> None:
    text = declared_keys("sft")["pad_token"].help
    assert text.startswith("PAD token, which no text may use")
