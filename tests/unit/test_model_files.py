"""Models that somebody else saved: pickles, files cut short, missing tokenizers and remote code are one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hub_fixture import RunningHub
from trainer_fixture import make_policy, make_reward_model, make_tokenizer, make_trainer

from rlhf_zoo.actor_critic import ActorCritic
from rlhf_zoo.errors import ZooError
from rlhf_zoo.model_files import load_tokenizer
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
