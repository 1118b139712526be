"""Untrusted model files: readable errors for pickles, truncated files, missing tokenizers and remote code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_fixture import RunningHub
from miniatures import FAMILIES, save
from trainer_fixture import make_policy, make_reward_model, make_tokenizer, make_trainer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.run_signature import trust_all_runs
from rlhf_zoo.modeling import model_files
from rlhf_zoo.modeling.critic import CRITIC_DIR, critic_from
from rlhf_zoo.modeling.loading import load_config, load_tokenizer
from rlhf_zoo.modeling.model_files import ModelFiles, find_model_files
from rlhf_zoo.modeling.models import build_causal, load_causal, load_classifier
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead
from rlhf_zoo.ppo.actor_critic import ActorCritic
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.attack

LOADERS = [(load_causal, make_policy), (load_classifier, make_reward_model), (critic_from, make_reward_model)]


def truncate_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(("load", "make"), LOADERS)
def test_pickled_weights_are_refused_before_reading(tmp_path: Path, load: Callable, make: Callable) -> None:
    model = make()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # which transformers would load
    with pytest.raises(ZooError, match=r"has pickled weights \(pytorch_model\.bin\), which are not read because"):
        load(tmp_path)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**7}, {"text_config": {"num_local_experts": 10**7}}])
@pytest.mark.parametrize(("load", "make"), LOADERS)
def test_config_with_millions_of_layers_is_refused(
    tmp_path: Path, load: Callable, make: Callable, fields: dict[str, Any]
) -> None:
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    for read in (load, lambda path: load_config(path, subject="The model")):
        with pytest.raises(ZooError, match=r"has num_\w+ = 10,000,000"):
            read(tmp_path)


def test_pickled_adapter_is_refused(hub: RunningHub, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    make_policy().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(load_causal(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(
        ZooError, match=r"has pickled weights \(adapter_model\.bin\), .*: if you trust it, run, in its folder, `python"
    ):
        load_causal(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="local/base")
    hub.api().create_repo("local/adapter")
    hub.api().upload_folder(repo_id="local/adapter", folder_path=tmp_path / "adapter")
    output = hub.python(
        "import torch; from rlhf_zoo.errors import ZooError; from rlhf_zoo.modeling.models import load_causal\n"
        "torch.load = lambda *a, **k: print('read')\n"
        "try: load_causal('local/adapter')\nexcept ZooError as error: print(error)",
        cwd=tmp_path,
    )
    assert (
        output.startswith("local/adapter has pickled weights (adapter_model.bin)") and "download it, then run" in output
    )


@pytest.mark.parametrize(("load", "make"), LOADERS)
def test_truncated_weights_are_named(tmp_path: Path, load: Callable, make: Callable) -> None:
    make().save_pretrained(tmp_path)
    truncate_file(tmp_path / "model.safetensors")
    with pytest.raises(ZooError, match=r"model\.safetensors is truncated or damaged \(.*\): copy it again\.$"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["model.safetensors", f"{CRITIC_DIR}/model.safetensors"])
def test_truncated_checkpoint_is_not_resumed(tmp_path: Path, part: str) -> None:
    actor = ActorCritic(make_policy(), critic_from(make_reward_model()))
    actor.save_pretrained(tmp_path)
    truncate_file(tmp_path / part)
    with pytest.raises(ZooError, match="is truncated or damaged"):
        actor.load_checkpoint(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    find_model_files(save("Llama 3", tmp_path / "whole")).require_weights()
    sharded, adapter = tmp_path / "sharded", tmp_path / "adapter"
    make_policy().save_pretrained(sharded, max_shard_size=4000)
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 1
    find_model_files(sharded).require_weights()
    shards[-1].unlink()
    with pytest.raises(ZooError, match=rf"names the missing weight file {shards[-1].name}: copy it"):
        find_model_files(sharded).require_weights()
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ZooError, match=r"^The model in .*sharded has no weights: copy model\.safetensors there, or all"
    ):
        find_model_files(sharded).require_weights()
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ZooError, match=r"^The adapter in .*adapter has no adapter_model\.safetensors: copy"):
        find_model_files(adapter).require_weights()
    (adapter / "adapter_model.safetensors").touch()
    ModelFiles(adapter).require_weights()


def test_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers would build an empty tokenizer from config.json."""
    make_policy().save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="has no tokenizer that can be loaded: save the tokenizer with the model"):
        load_tokenizer(tmp_path)
    make_reward_model().save_pretrained(tmp_path / "reward")
    with pytest.raises(ZooError, match="reward has no tokenizer"):
        make_trainer(tmp_path / "run", reward_model=str(tmp_path / "reward"))
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == make_tokenizer().get_vocab()


@pytest.mark.parametrize("load", [load_causal, load_classifier, critic_from])
def test_model_with_remote_code_is_refused(tmp_path: Path, load: Callable) -> None:
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "evil.Evil")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ZooError, match=r"needs program code of its own \(auto_map"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"vocab_size": 400},
            r"lm_head\.weight of 300 x 32, but its config\.json says 400 x 32: use the",
        ),
        (
            {"hidden_size": 64},
            r"lm_head\.weight of 300 x 32, but its config\.json says 300 x 64: use the",
        ),
        ({"intermediate_size": 7}, r"\.0\.mlp\.\w+_proj\.weight of .*, but its config\.json says "),
        ({"num_hidden_layers": 4}, r"lacks weights that its config\.json names \(model\.layers\.2.* and 17 more\)"),
        ({"num_hidden_layers": 1}, r"more layers than its config\.json names \(model\.layers\.1.* and 8 more\)"),
        ({"hidden_size": "x"}, r"cannot be loaded.* expected int, got str"),
    ],
)
@pytest.mark.parametrize("load", [load_causal, critic_from])
def test_weights_that_mismatch_config_are_named(
    tmp_path: Path, load: Callable, keys: dict[str, Any], message: str
) -> None:
    """transformers would initialize missing weights at random and drop surplus ones."""
    edit(save("Llama 3", tmp_path) / "config.json", **keys)
    with pytest.raises(ZooError, match=message):
        load(tmp_path)


DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("content", [DEEP, "[]", "<!DOCTYPE html><html></html>"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json", "tokenizer.json",
     "tokenizer_config.json"],
)  # fmt: skip
def test_malformed_json_files_raise_readable_error(tmp_path: Path, name: str, content: str) -> None:
    if name == "generation_config.json" and content.startswith("<"):
        pytest.skip("transformers does without it")
    (save("Llama 3", tmp_path) / name).write_text(content)
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    load: Callable = load_tokenizer if name.startswith("tokenizer") else load_causal
    with pytest.raises(ZooError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    if name == "config.json":
        with pytest.raises(ZooError):
            load_config(tmp_path, subject="The model")


@pytest.mark.attack
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "attacker/kernel"},
        {"_attn_implementation": {"": "sdpa", "text_config": "attacker/kernel@main"}},
        {"text_config": {"experts_implementation": "attacker/kernel"}},
    ],
)
def test_config_naming_hub_kernel_is_refused(tmp_path: Path, fields: dict) -> None:
    """transformers would download and run it if the package kernels is installed."""
    make_policy().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ZooError, match=r"names the kernel attacker/kernel\S*, which would be downloaded"):
        load_causal(tmp_path)


SECRET = "hf_AbCdEf0123456789"


def write_minimal_tokenizer(folder: Path, **settings: Any) -> Path:
    """A folder whose tokenizer_config.json says all that there is: its tokens are the printable characters."""
    folder.mkdir(exist_ok=True)
    texts = {str(10 + at): {"content": chr(33 + at), "special": False} for at in range(94)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": texts, **settings}))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "BertTokenizer", "vocab": "{secret}"},
        {"tokenizer_class": "BertTokenizer", "vocab": "secret.txt"},
        {"tokenizer_class": "GPT2Tokenizer", "vocab": {"a": 0}, "merges": "{secret}"},
        {"tokenizer_class": "BertTokenizer", "init_inputs": ["{secret}"]},
        {"tokenizer_class": "BertTokenizer", "init_inputs": ["secret.txt"]},
        {"tokenizer_class": "BertTokenizer", "entity_vocab_file": "secret.txt"},
        {"tokenizer_class": "BertTokenizer", "fast_tokenizer_files": ["../tokenizer.1.0.json"]},
        {"tokenizer_class": "BertJapaneseTokenizer", "mecab_kwargs": {"mecab_option": "-d {secret}"}},
        {"tokenizer_class": "BertTokenizer", "new_key": [{"of": "secret.txt"}]},
        {"tokenizer_class": "BertTokenizer", "new_key": "https://example.org/vocab.txt"},
        {"tokenizer_class": "RagTokenizer"},
    ],
)
def test_tokenizer_naming_other_files_is_refused(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.txt").write_text(f"HF_TOKEN={SECRET}\0HOME=/root\n")
    monkeypatch.chdir(tmp_path)
    text = json.dumps(settings).replace("{secret}", str(tmp_path / "secret.txt"))
    folder = write_minimal_tokenizer(tmp_path / "model", **json.loads(text))
    with pytest.raises(
        ZooError, match=r"may only read files that were saved with it|combines two tokenizers"
    ) as caught:
        load_tokenizer(folder)
    assert SECRET not in str(caught.value)


def test_special_tokens_map_may_not_name_files(tmp_path: Path) -> None:
    """Its entries would override the files that transformers found."""
    folder = save("GPT-2", tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    load_tokenizer(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"vocab": "/proc/self/environ"}))
    with pytest.raises(ZooError, match="has the key vocab, which is not a special token"):
        load_tokenizer(folder)


def test_hub_tokenizer_is_checked_before_loading(hub: RunningHub, tmp_path: Path) -> None:
    folder = write_minimal_tokenizer(tmp_path / "model", tokenizer_class="BertTokenizer", vocab="/proc/self/environ")
    hub.api().create_repo("local/reads-files")
    hub.api().upload_folder(repo_id="local/reads-files", folder_path=folder)
    output = hub.python(
        "from rlhf_zoo.errors import ZooError; from rlhf_zoo.modeling.loading import load_tokenizer\n"
        "try: print(load_tokenizer('local/reads-files').get_vocab())\nexcept ZooError as error: print(error)",
        cwd=tmp_path,
    )
    assert output.startswith("tokenizer_config.json of local/reads-files has vocab = '/proc/self/environ'"), output


@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizer_ignores_paths_noted_by_older_exports(tmp_path: Path, name: str) -> None:
    folder = save(name, tmp_path)
    saved = load_tokenizer(folder).get_vocab()
    noted = ("name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file")
    (tmp_path / "other.txt").write_text(SECRET)
    edit(folder / "tokenizer_config.json", **dict.fromkeys(noted, str(tmp_path / "other.txt")), init_inputs=[])
    assert load_tokenizer(folder).get_vocab() == saved
    if name == "GPT-2":
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ZooError, match="no tokenizer that can be loaded"):
            load_tokenizer(folder)


def test_wordpiece_tokenizer_without_unk_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    for vocabulary in ({"a": 0, "[UNK]": 1}, {"a": 0}):
        pieces = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=pieces).save_pretrained(tmp_path)
        if len(vocabulary) == 2:
            load_tokenizer(tmp_path)
    with pytest.raises(ZooError, match=r"without the token \[UNK\] for unknown words"):
        load_tokenizer(tmp_path)


def save_adapter_with(tmp_path: Path, **settings: Any) -> Path:
    from peft import LoraConfig, get_peft_model

    make_policy().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(load_causal(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", **settings)
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, None),
        ({"peft_type": "SHADOW", "shadow_model": "attacker/code"}, "peft_type = 'SHADOW', but only LORA"),
        ({"peft_type": None}, "peft_type = None"),
        ({"megatron_config": {"a": 1}, "megatron_core": "megatron.core"}, r"has megatron_config = \{'a': 1\}, which"),
        ({"megatron_core": "evil"}, "has megatron_core = 'evil', which could load"),
        ({"auto_mapping": {"parent_library": "evil/code", "base_model_class": "A"}}, "has auto_mapping = "),
        ({"auto_mapping": {"parent_library": "evil", "loader": "A"}}, "has auto_mapping = "),
        ({"layer_replication": [[0, 2]] * 9}, "has layer_replication = "),
        ({"corda_config": {"cache_file": "a.pt"}}, "has corda_config = "),
        ({"key_of_tomorrow": "attacker/code"}, "has key_of_tomorrow = "),
        ({"r": 10**9}, "has a rank of 1,000,000,000"),
    ],
)
@pytest.mark.parametrize("load", [load_causal, AutoModelForCausalLMWithValueHead.from_pretrained])
def test_adapter_config_may_name_only_its_base(
    tmp_path: Path, load: Callable, settings: dict[str, Any], message: str | None
) -> None:
    adapter = save_adapter_with(tmp_path, **settings)
    if message is None:
        load(adapter)
        return
    with pytest.raises(ZooError, match=message):
        load(adapter)


def test_adapter_on_adapter_is_refused(tmp_path: Path) -> None:
    """transformers would load the base adapter by itself, whatever its type."""
    adapter = save_adapter_with(tmp_path, base_model_name_or_path=str(tmp_path / "base"))
    (tmp_path / "base" / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    with pytest.raises(ZooError, match="is itself an adapter: merge it"):
        AutoModelForCausalLMWithValueHead.from_pretrained(adapter)


def test_trust_remote_code_is_always_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a boolean, so that transformers never prompts the user."""
    from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto

    answers: list[Any] = []

    def resolve(trust: Any, *_: Any, **__: Any) -> bool:
        answers.append(trust)
        return False

    for module in (auto_factory, configuration_auto, tokenization_auto):
        monkeypatch.setattr(module, "resolve_trust_remote_code", resolve)
    folder = save("Llama 3", tmp_path)
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "evil.Evil")
    edit(folder / "config.json", auto_map=classes)
    load_tokenizer(folder)
    load_causal(folder)
    AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    AutoModelForCausalLMWithValueHead.from_pretrained(folder, trust_remote_code=None)
    build_causal({"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                  "num_attention_heads": 1, "auto_map": classes}, make_tokenizer())  # fmt: skip
    assert len(answers) >= 5 and all(isinstance(trust, bool) for trust in answers)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_labels": 3e8},
        {"num_labels": 3 * 10**8},
        {"id2label": {str(at): "a" for at in range(100_001)}},
        {"attention_types": [[["global"], 10**9]]},
        {"depths": [2, 10**9]},
        {"block_configs": [{"num_layers": 10**9}]},
        {"vocab_size": 10**9},
        {"num_codebooks": 10**6},
        {"sizes": [1, 10**9]},
    ],
)
def test_config_with_huge_sizes_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = save("Llama 3", tmp_path)
    edit(folder / "config.json", **fields)
    for read in (load_causal, load_tokenizer, lambda path: load_config(path, subject="The model")):
        with pytest.raises(ZooError, match=r"config\.json of .* has \w+ = [\d,.]+, but at most"):
            read(folder)


def test_config_accepts_large_numbers_that_allocate_nothing(tmp_path: Path) -> None:
    folder = save("Llama 3", tmp_path)
    edit(
        folder / "config.json", max_position_embeddings=10_485_760, rope_theta=10**11, eos_token_id=[128_001, 128_008],
        image_grid_pinpoints=[[384, 2304]], cutoffs=[20_000, 200_000], num_parameters=7 * 10**9,
    )  # fmt: skip
    assert load_config(folder, subject="The model").max_position_embeddings == 10_485_760


@pytest.mark.parametrize(
    "fields", [{"attn_implementation": "flash_attention_2"}, {"quantization_config": {"quant_method": "hqq"}}]
)
def test_missing_library_raises_readable_error(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = save("Llama 3", tmp_path)
    edit(folder / "config.json", **fields)
    with pytest.raises(ZooError, match=r"cannot be loaded") as caught:
        load_causal(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mark", [".downloaded", ".cache/huggingface/download", "rlhf_card.json", "in the cache"])
@pytest.mark.parametrize("load", [load_causal, AutoModelForCausalLMWithValueHead.from_pretrained])
def test_untrusted_adapter_may_not_use_local_base(
    tmp_path: Path, load: Callable, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model trained from it would be published with the private model merged in."""
    monkeypatch.chdir(tmp_path)
    adapter = save_adapter_with(tmp_path)
    if mark == "in the cache":
        cached = tmp_path / "models--x--y" / "snapshots" / "c"
        cached.parent.mkdir(parents=True)
        adapter = adapter.rename(cached)
    else:
        (adapter / mark).parent.mkdir(parents=True, exist_ok=True)
        (adapter / mark).write_text("{}")
    (tmp_path / "org").mkdir()
    (tmp_path / "base").rename(tmp_path / "org" / "base")
    for base in (str(tmp_path / "org" / "base"), "org/base", "./org/base", "../org/base", "/nowhere"):
        edit(adapter / "adapter_config.json", base_model_name_or_path=base)
        with pytest.raises(ZooError, match=r"merge it where it was trained\.$"):
            load(adapter)


def test_untrusted_adapter_on_hub_may_not_use_local_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message does not offer --trust_run, which cannot apply to a Hub id."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}')
    monkeypatch.setattr(model_files, "resolve_revision", lambda *_, **__: "c" * 40)
    monkeypatch.setattr(model_files, "hf_hub_download", lambda _, name, **__: tmp_path / name)
    with pytest.raises(ZooError, match=r"The adapter in org/adapter names .*: merge it where it was trained\.$"):
        _ = ModelFiles("org/adapter").adapter_config


def test_adapter_of_own_run_may_use_local_base(tmp_path: Path) -> None:
    """A run that another machine signed is untrusted, unless the user trusts it."""
    record = StageRecord(tmp_path / "sft")
    record.write(stage="sft")
    (record.path / "rlhf_card.json").write_text("{}")
    adapter = save_adapter_with(tmp_path).rename(record.path / "checkpoint-4")
    load_causal(adapter)
    document = json.loads(record.run_file.read_text())
    record.run_file.write_text(json.dumps({**document, "signature": "0" * 64}))
    with pytest.raises(ZooError, match=r"a path on this machine.* or add --trust_run if you trust the run"):
        load_causal(adapter)
    with trust_all_runs():
        load_causal(adapter)


@pytest.mark.parametrize("load", [load_causal, AutoModelForCausalLMWithValueHead.from_pretrained])
def test_weights_index_may_not_name_files_elsewhere(tmp_path: Path, load: Callable) -> None:
    """Otherwise a private local model would be loaded and published under another name."""
    make_policy().save_pretrained(tmp_path / "private")
    make_policy().save_pretrained(tmp_path / "model", max_shard_size="10KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    load(tmp_path / "model")
    for file in (str(tmp_path / "private" / "model.safetensors"), "../private/model.safetensors", 7):
        moved = dict.fromkeys(document["weight_map"], file)
        index.write_text(json.dumps({**document, "weight_map": moved}))
        with pytest.raises(ZooError, match=r"shards must be \.safetensors files next to their index|has no weight_map"):
            load(tmp_path / "model")
