"""Value heads come back bit for bit from the disk: TRL's checkpoints, shards, adapters, and no pickle."""

import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from value_head_models import (
    CONFIGS,
    HEAD,
    HEAD_KEYS,
    IDS,
    SHARD,
    adapted,
    assert_same,
    classes,
    digests,
    headed,
    lora,
    outputs,
    plain,
    tensors_of,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import value_head
from rlhf_zoo.modeling.model_files import ModelFiles
from rlhf_zoo.modeling.value_head import VALUE_HEAD_FILE
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead


def read_value_head(folder: Path, **options: Any) -> Any:
    return value_head.read_value_head(ModelFiles(folder, **options))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers and the package warn of."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "rlhf_zoo")]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()  # a stage run before in this process silences it
    for logger in loggers:
        logger.addHandler(handler)
    yield heard
    transformers_logging.set_verbosity(verbosity)
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("kind", "shards"), [*((kind, False) for kind in CONFIGS), ("llama-tied", True), ("gpt2", True), ("t5", True)]
)
def test_checkpoint_round_trip_is_bit_exact(kind: str, shards: bool, tmp_path: Path, said: list[str]) -> None:
    model = headed(kind)
    model.save_pretrained(tmp_path, **({"max_shard_size": SHARD} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == shards
    assert not list(tmp_path.glob("*.bin"))
    assert tensors_of(tmp_path).keys() >= HEAD_KEYS
    said.clear()
    again = classes(kind)[1].from_pretrained(tmp_path)
    assert said == []
    assert_same(model, again)
    head = read_value_head(tmp_path)
    assert head is not None
    assert head.keys() == {"summary.weight", "summary.bias"}
    assert torch.equal(head["summary.weight"], model.v_head.summary.weight.cpu())
    alone = classes(kind)[0].from_pretrained(tmp_path)
    assert digests(alone) == digests(model.pretrained_model)
    if kind in ("llama-tied", "gpt2", "t5"):
        assert "lm_head.weight" not in tensors_of(tmp_path)
        inner = again.pretrained_model
        assert inner.get_output_embeddings().weight is inner.get_input_embeddings().weight


def write_old_checkpoint(folder: Path, *, shards: bool, head: dict[str, Tensor], leave_out: str = "-") -> None:
    """A Llama's plain weights and TRL's two, put together by hand."""
    model = plain("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    trunk = {key: value.clone() for key, value in model.state_dict().items() if key != leave_out}
    if not shards:
        save_file(trunk | head, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {f"model-0000{number}-of-00002.safetensors": part for number, part in ((1, trunk), (2, head))}
    for name, part in files.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in files.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
def test_trl_checkpoint_loads_with_its_head(shards: bool, tmp_path: Path, said: list[str]) -> None:
    write_old_checkpoint(tmp_path, shards=shards, head=HEAD)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    assert said == []
    assert torch.equal(model.v_head.summary.weight, HEAD["v_head.summary.weight"])
    assert torch.equal(model.v_head.summary.bias, HEAD["v_head.summary.bias"])
    assert digests(model.pretrained_model) == digests(plain("llama"))


def test_load_warns_of_missing_and_unexpected_keys(tmp_path: Path, said: list[str]) -> None:
    left_out = "model.layers.1.mlp.up_proj.weight"
    write_old_checkpoint(tmp_path, shards=False, head=HEAD | {"stranger.weight": torch.ones(2)}, leave_out=left_out)
    AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert len(said) == 1
    assert f"{left_out} (missing); stranger.weight (unexpected)" in said[0]
    assert "v_head" not in said[0]


def test_value_head_file_is_read_only_when_weights_lack_a_head(tmp_path: Path, said: list[str]) -> None:
    plain("llama").save_pretrained(tmp_path)
    (tmp_path / VALUE_HEAD_FILE).parent.mkdir()
    save_file(HEAD, tmp_path / VALUE_HEAD_FILE)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert said == []
    assert torch.equal(model.v_head.summary.weight, HEAD["v_head.summary.weight"])
    trained = headed("llama")
    trained.save_pretrained(tmp_path)
    assert_same(trained, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_checkpoint_without_head_gets_new_head_and_warns(tmp_path: Path, said: list[str]) -> None:
    plain("gpt2").save_pretrained(tmp_path)
    assert read_value_head(tmp_path) is None
    torch.manual_seed(9)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    torch.manual_seed(9)
    assert torch.equal(model.v_head.summary.weight, nn.Linear(32, 1).weight)
    assert said == [f"{tmp_path} has no value head: using a new one with random weights."]


def test_variant_and_subfolder_are_loaded(tmp_path: Path) -> None:
    models = [headed("llama", seed=seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path / "deep", max_shard_size=SHARD)
    models[1].save_pretrained(tmp_path / "deep", variant="best", max_shard_size=SHARD)
    for model, options in zip(models, ({}, {"variant": "best"}), strict=True):
        kept = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, subfolder="deep", **options)
        assert_same(model, kept)
        head = read_value_head(tmp_path, subfolder="deep", **options)
        assert head is not None
        assert torch.equal(head["summary.bias"], model.v_head.summary.bias.cpu())


def test_head_stays_float32_under_half_precision_weights(tmp_path: Path) -> None:
    model = headed("llama", base=plain("llama").to(torch.bfloat16))
    assert model.v_head.summary.weight.dtype == torch.float32
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.v_head.summary.weight.dtype == torch.float32
    assert torch.equal(again.v_head.summary.weight, model.v_head.summary.weight)
    assert AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_save_pretrained_writes_given_state_dict(tmp_path: Path) -> None:
    model, other = headed("llama"), headed("llama", base=plain("llama", seed=1), seed=3)
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert_same(other, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_load_rejects_head_of_another_form_or_hidden_size(tmp_path: Path) -> None:
    write_old_checkpoint(tmp_path, shards=False, head={"v_head.0.weight": torch.ones(4, 32), **HEAD})
    for read in (read_value_head, AutoModelForCausalLMWithValueHead.from_pretrained):
        with pytest.raises(ZooError, match=r"tensors 0.weight, summary.bias, summary.weight"):
            read(tmp_path)
    write_old_checkpoint(tmp_path, shards=False, head=HEAD | {"v_head.summary.weight": torch.ones(1, 24)})
    with pytest.raises(ZooError, match="has hidden size 24, but this model has 32"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_load_names_missing_shard_and_truncated_file(tmp_path: Path) -> None:
    write_old_checkpoint(tmp_path, shards=True, head=HEAD)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ZooError, match=rf"{shard.name} is truncated or damaged"):
        read_value_head(tmp_path)
    shard.unlink()
    with pytest.raises(ZooError, match=rf"lacks {shard.name}"):
        read_value_head(tmp_path)


def convert_as_told(error: ZooError, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command that the message gives."""
    program, option, code = shlex.split(str(error).split("`")[1])
    assert (program, option) == ("python", "-c")
    monkeypatch.chdir(folder)
    exec(code, {})


def refusal_of(folder: Path, read: Any, name: str) -> ZooError:
    with pytest.raises(ZooError, match=rf"has pickled weights \({name}\)") as caught:
        read(folder)
    return caught.value


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
def test_pickle_is_rejected_with_a_conversion_that_works(
    shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = headed("llama-tied")
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()  # tied weights share their memory, as TRL pickled them
    if shards:
        head = {key: state.pop(key) for key in HEAD_KEYS}
        torch.save(head, tmp_path / "pytorch_model-00002-of-00002.bin")
        torch.save(state, tmp_path / "pytorch_model-00001-of-00002.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    refusal_of(tmp_path, read_value_head, r"pytorch_model\.bin\S*")
    error = refusal_of(tmp_path, AutoModelForCausalLMWithValueHead.from_pretrained, r"pytorch_model\.bin\S*")
    convert_as_told(error, tmp_path, monkeypatch)
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_adapter_and_head_round_trip_is_bit_exact(tmp_path: Path, said: list[str]) -> None:
    model = adapted(tmp_path)
    assert model.is_peft_model
    assert not headed("llama").is_peft_model
    said.clear()
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    assert said == []
    assert isinstance(again.pretrained_model, PeftModel)
    assert_same(model, again)
    assert load_file(tmp_path / "adapter" / "model.safetensors").keys() == HEAD_KEYS
    assert not list((tmp_path / "adapter").glob("*.bin"))
    logits, _ = outputs(model)
    assert not torch.equal(logits, plain("llama")(IDS).logits)
    for loader in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert torch.equal(loader.from_pretrained(tmp_path / "adapter")(IDS).logits, logits)


@pytest.mark.parametrize("trainable", [False, True])
def test_loaded_adapter_trains_only_when_is_trainable(trainable: bool, tmp_path: Path) -> None:
    adapted(tmp_path).save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter", is_trainable=trainable)
    learns = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert learns >= HEAD_KEYS
    assert any("lora_" in name for name in learns) == trainable


def test_adapter_head_wins_over_head_of_its_base(tmp_path: Path, said: list[str]) -> None:
    headed("llama", seed=7).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    said.clear()
    headed("llama", base=get_peft_model(base, lora()), seed=8).save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    assert said == []
    assert torch.equal(again.v_head.summary.weight, headed("llama", seed=8).v_head.summary.weight)


@pytest.mark.parametrize("head", [False, True], ids=["adapter", "TRL's head beside it"])
def test_adapter_pickle_is_rejected_with_a_conversion_that_works(
    head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = adapted(tmp_path), tmp_path / "adapter"
    if head:
        model.pretrained_model.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, safe_serialization=False)
    name = "pytorch_model" if head else "adapter_model"
    error = refusal_of(folder, AutoModelForCausalLMWithValueHead.from_pretrained, rf"{name}\.bin")
    convert_as_told(error, folder, monkeypatch)
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(folder))


def test_adapter_without_base_or_weights_is_rejected(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    with pytest.raises(ZooError, match="call push_to_hub"):
        model.save_pretrained(tmp_path / "adapter", push_to_hub=True)
    model.save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ZooError, match="names no base model"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ZooError, match=r"no adapter_model\.safetensors"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")


def test_offloaded_model_is_rejected(tmp_path: Path) -> None:
    headed("llama").save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="is offloaded"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "offload"
        )
