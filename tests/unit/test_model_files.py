"""Models that somebody else saved: pickles, files cut short, missing tokenizers and remote code are one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_fixture import RunningHub
from miniatures import save
from trainer_fixture import make_policy, make_reward_model, make_tokenizer, make_trainer

from rlhf_zoo.actor_critic import ActorCritic
from rlhf_zoo.errors import ZooError
from rlhf_zoo.model_files import load_config, load_tokenizer
from rlhf_zoo.models import CRITIC_DIR, critic_from, load_causal, load_classifier

pytestmark = pytest.mark.attack

LOADERS = [(load_causal, make_policy), (load_classifier, make_reward_model), (critic_from, make_reward_model)]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(("load", "make"), LOADERS)
def test_a_pickle_is_refused_before_it_is_read(tmp_path: Path, load: Callable, make: Callable) -> None:
    model = make()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # which transformers would load
    with pytest.raises(ZooError, match=r"pytorch_model\.bin, a pickle, which can run code and is not read here"):
        load(tmp_path)


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**7}, {"text_config": {"num_local_experts": 10**7}}])
@pytest.mark.parametrize(("load", "make"), LOADERS)
def test_a_model_of_ten_million_layers_is_refused_before_it_is_built(
    tmp_path: Path, load: Callable, make: Callable, fields: dict[str, Any]
) -> None:
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    for read in (load, lambda path: load_config(path, what="The model")):
        with pytest.raises(ZooError, match=r"says num_\w+ = 10,000,000"):
            read(tmp_path)


def test_a_pickled_adapter_is_refused(hub: RunningHub, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    make_policy().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(load_causal(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(ZooError, match=r"adapter_model\.bin, a pickle"):
        load_causal(tmp_path / "adapter")
    hub.api().create_repo("local/adapter")
    hub.api().upload_folder(repo_id="local/adapter", folder_path=tmp_path / "adapter")
    said = hub.python(
        "import torch; from rlhf_zoo.errors import ZooError; from rlhf_zoo.models import load_causal\n"
        "torch.load = lambda *a, **k: print('read')\n"
        "try: load_causal('local/adapter')\nexcept ZooError as error: print(error)",
        cwd=tmp_path,
    )
    assert said.startswith("local/adapter has adapter_model.bin, a pickle"), said


@pytest.mark.parametrize(("load", "make"), LOADERS)
def test_weights_that_are_cut_short_are_named(tmp_path: Path, load: Callable, make: Callable) -> None:
    make().save_pretrained(tmp_path)
    cut(tmp_path / "model.safetensors")
    with pytest.raises(ZooError, match=r"model\.safetensors is cut short or damaged \(.*\): copy it again\.$"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["model.safetensors", f"{CRITIC_DIR}/model.safetensors"])
def test_a_checkpoint_that_is_cut_short_is_not_resumed(tmp_path: Path, part: str) -> None:
    actor = ActorCritic(make_policy(), critic_from(make_reward_model()))
    actor.save_pretrained(tmp_path)
    cut(tmp_path / part)
    with pytest.raises(ZooError, match="is cut short or damaged"):
        actor.load_checkpoint(tmp_path)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers would make an empty one of config.json."""
    make_policy().save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="has no tokenizer that can be loaded: save the tokenizer with the model"):
        load_tokenizer(tmp_path)
    make_reward_model().save_pretrained(tmp_path / "reward")
    with pytest.raises(ZooError, match="reward has no tokenizer"):
        make_trainer(tmp_path / "run", reward_model=str(tmp_path / "reward"))
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == make_tokenizer().get_vocab()


@pytest.mark.parametrize("load", [load_causal, load_classifier, critic_from])
def test_a_model_that_needs_code_of_its_own_is_refused_by_name(tmp_path: Path, load: Callable) -> None:
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "evil.Evil")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ZooError, match=r"needs program code of its own \(auto_map"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"vocab_size": 400},
            r"lm_head\.weight of 300 x 32, and its config\.json says 400 x 32: take the",
        ),
        (
            {"hidden_size": 64},
            r"lm_head\.weight of 300 x 32, and its config\.json says 300 x 64: take the",
        ),
        ({"intermediate_size": 7}, r"\.0\.mlp\.\w+_proj\.weight of .*, and its config\.json says "),
        ({"num_hidden_layers": 4}, r"lacks weights that its config\.json names \(model\.layers\.2.* and 17 more\)"),
        ({"num_hidden_layers": 1}, r"more layers than its config\.json names \(model\.layers\.1.* and 8 more\)"),
        ({"hidden_size": "x"}, r"cannot be loaded.* expected int, got str"),
    ],
)
@pytest.mark.parametrize("load", [load_causal, critic_from])
def test_weights_that_do_not_fit_the_config_are_named(
    tmp_path: Path, load: Callable, keys: dict[str, Any], said: str
) -> None:
    """transformers draws what is missing at random, and leaves out what has no place."""
    edit(save("Llama 3", tmp_path) / "config.json", **keys)
    with pytest.raises(ZooError, match=said):
        load(tmp_path)


DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("content", [DEEP, "[]", "<!DOCTYPE html><html></html>"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json", "tokenizer.json",
     "tokenizer_config.json"],
)  # fmt: skip
def test_files_that_are_no_json_objects_are_one_sentence(tmp_path: Path, name: str, content: str) -> None:
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
            load_config(tmp_path, what="The model")


@pytest.mark.attack
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "attacker/kernel"},
        {"_attn_implementation": {"": "sdpa", "text_config": "attacker/kernel@main"}},
        {"text_config": {"experts_implementation": "attacker/kernel"}},
    ],
)
def test_a_config_that_names_a_kernel_of_a_repository_is_refused(tmp_path: Path, fields: dict) -> None:
    """transformers would fetch it, and run it, if the package kernels is installed."""
    make_policy().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ZooError, match=r"names attacker/kernel\S*, a kernel that would be fetched and run"):
        load_causal(tmp_path)
