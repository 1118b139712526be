"""Model keys: what reaches from_pretrained, what is refused before training, and which weights are shared."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trainer_fixture import make_policy, make_reward_model, make_trainer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import models
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.loading import AS_SAVED, LoadOptions
from rlhf_zoo.modeling.model_files import ADAPTER_WEIGHTS
from rlhf_zoo.modeling.models import load_causal, load_classifier, score_statistics
from rlhf_zoo.ppo.reference import Reference
from rlhf_zoo.rewards.loading import load_reward_model
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings.loading import check_installed, stage_load_options
from rlhf_zoo.runs.settings.parse import StageSettings, stage_settings

LORA = {"use_peft": True, "lora_r": 2}
FOUR = {**LORA, "load_in_4bit": True}


def settings(stage: str, **keys: Any) -> StageSettings:
    base = {"model_name_or_path": "somebody/model"} if stage == "sft" else {}
    recipe = Recipe("toy", Path(), {"description": "A toy."}, {stage: {"bf16": False} | base | keys})
    return stage_settings(recipe, stage, {}, shared_flags={}, output_dir=Path("runs/toy"))


BEST = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 5,
    "save_steps": 5,
}


@pytest.mark.parametrize(
    ("stage", "keys", "message"),
    [
        ("sft", {"dtype": "float16"}, "gradients underflow and overflow: set bfloat16 or float32"),
        ("sft", {"dtype": "int8"}, "dtype of the stage sft is 'int8': set one of float32, bfloat16, auto"),
        ("ppo", {"attn_implementation": "kernels-community/flash-attn"}, "a kernel that would be downloaded and run"),
        ("ppo", {"load_in_8bit": True}, "load_in_8bit of the stage ppo needs use_peft"),
        ("sft", {**FOUR, "load_in_8bit": True}, "at the same time"),
        ("sft", {**LORA, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type of the stage sft needs load_in_4bit"),
        ("sft", {**FOUR, "bnb_4bit_quant_type": "nf5"}, "is 'nf5': set nf4 or fp4"),
        ("ppo", {**FOUR, "critic": "policy"}, "set 'shared' or 'reward'"),
        ("sft", {**LORA, "model_name_or_path": None}, "an adapter on random weights could not be loaded"),
        ("reward", {"load_in_4bit": True}, "not supported by the stage reward"),
        ("reward", {"model_name_or_path": "a"}, "which starts from the SFT policy: set --sft.model_name_or_path"),
        (
            "sft",
            {**LORA, "fsdp2": True},
            "fsdp2 of the stage sft does not work with use_peft, because adapters are not sharded",
        ),
        ("sft", {"fsdp2": True, **BEST}, "load_best_model_at_end of the stage sft loads unsharded weights"),
        (
            "sft",
            {"fsdp2": True, "optim": "adafactor"},
            "fsdp2 does not support the optimizer adafactor: set optim to one of",
        ),
        (
            "ppo",
            {"fsdp2": True, "optim": "adafactor"},
            "fsdp2 does not support the optimizer adafactor: set optim to one of",
        ),
        ("reward", {"fsdp2": True}, "fsdp2 shards weights over several processes, but there is only one"),
    ],
)
def test_settings_reject_incompatible_model_keys(stage: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        settings(stage, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (FOUR, "load_in_4bit of the stage ppo needs bitsandbytes, which is not installed"),
        ({**LORA, "load_in_8bit": True}, "load_in_8bit of the stage ppo needs bitsandbytes"),
        ({"optim": "adamw_8bit"}, "optim adamw_8bit of the stage ppo needs bitsandbytes"),
        ({"optim": "paged_adamw_32bit"}, "needs bitsandbytes"),
        ({"attn_implementation": "flash_attention_2"}, "needs flash-attn, which is not installed"),
        ({"report_to": ["wandb"]}, "report_to wandb of the stage ppo needs wandb, which is not installed"),
    ],
)
def test_check_installed_names_missing_packages(
    keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ZooError, match=message):
        check_installed(settings("ppo", **keys))
    check_installed(settings("ppo", optim="adamw_torch_fused", attn_implementation="sdpa"))


def test_model_keys_reach_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in few bits need a package and a GPU; what transformers is asked for does not."""
    arguments: dict[str, Any] = {}
    make_policy().save_pretrained(tmp_path)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda source, **options: arguments.update(options) or whole
    )
    whole = make_policy()
    keys = {**FOUR, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
    how = stage_load_options(
        settings("ppo", **keys, dtype="bfloat16", attn_implementation="eager", bf16=True, use_cpu=True)
    )
    load_causal(tmp_path, options=how)
    bits = arguments.pop("quantization_config").to_dict()
    assert arguments == {
        "dtype": "bfloat16", "attn_implementation": "eager", "trust_remote_code": False, "use_safetensors": True,
        "ignore_mismatched_sizes": True, "output_loading_info": True,  # which is how weights that do not fit are told
    }  # fmt: skip
    assert bits["load_in_4bit"] and bits["bnb_4bit_quant_type"] == "fp4" and bits["bnb_4bit_use_double_quant"]
    assert bits["bnb_4bit_compute_dtype"] == bits["bnb_4bit_quant_storage"] == "bfloat16"
    assert stage_load_options(settings("ppo", **LORA, load_in_8bit=True)).quantization.load_in_8bit
    assert stage_load_options(settings("sft")) == LoadOptions()
    with pytest.raises(ZooError, match="cannot be merged into quantized weights"):
        load_causal(save_adapter(tmp_path, tmp_path / "adapter", "CAUSAL_LM"), options=how)


def test_weights_load_in_requested_or_saved_dtype(tmp_path: Path) -> None:
    make_policy().save_pretrained(tmp_path / "policy")
    make_reward_model().to(torch.bfloat16).save_pretrained(tmp_path / "reward")
    assert load_causal(tmp_path / "policy", options=LoadOptions("bfloat16", "eager")).dtype == torch.bfloat16
    assert load_causal(tmp_path / "policy", options=AS_SAVED).dtype == torch.float32
    assert load_reward_model(tmp_path / "reward").dtype == torch.bfloat16
    assert load_classifier(tmp_path / "reward").dtype == torch.float32
    # A copy in fewer bits, where it loses nothing.
    exact = make_policy().to(torch.bfloat16).float()
    assert Reference(exact, in_bf16=True).separate_model.dtype == torch.bfloat16
    assert (
        Reference(exact).separate_model.dtype
        == Reference(make_policy(), in_bf16=True).separate_model.dtype
        == torch.float32
    )


def save_adapter(base: Path, folder: Path, task: str, model: Any = None, **fields: Any) -> Path:
    """A random adapter on what lies at `base`, saved."""
    model = AutoModelForCausalLM.from_pretrained(base) if model is None else model
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type=task, init_lora_weights=False, **fields)
    get_peft_model(model, config).save_pretrained(folder)
    return folder


def test_reward_model_may_be_adapter(tmp_path: Path) -> None:
    """Its head is in the adapter and its configuration beside it; it does not load as a policy."""
    make_policy().save_pretrained(tmp_path / "base")
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    trained.config.rlhf_zoo = {"score_mean": 0.5, "score_std": 2.0}
    path = save_adapter(tmp_path / "base", tmp_path / "reward", "SEQ_CLS", trained)
    ids = torch.tensor([[5, 6, 7, 1]])
    expected = trained.eval()(input_ids=ids).logits
    for configured in (False, True):  # others save none
        if configured:
            trained.config.save_pretrained(path)
        loaded = load_classifier(path).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-5, rtol=0)
        assert loaded.name_or_path == loaded.config._name_or_path == str(path)
        assert score_statistics(loaded) == ((0.5, 2.0) if configured else (0, 1))
    critic = critic_from(path).eval()
    value = critic(input_ids=ids).logits[0, -1, 0].item()
    assert value == pytest.approx((expected.item() - 0.5) / 2, abs=1e-4)
    with pytest.raises(ZooError, match="adapter of a reward model or critic, which generates no text"):
        load_causal(path)
    weights = load_file(path / ADAPTER_WEIGHTS)
    headless = {name: weight for name, weight in weights.items() if "score" not in name}
    save_file(headless, path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ZooError, match=r"no trained head \(score.weight is missing"):
        load_classifier(path)


def test_adapter_base_loads_once_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_policy().save_pretrained(tmp_path / "base")
    path = save_adapter(tmp_path / "base", tmp_path / "adapter", "CAUSAL_LM", revision="abc")
    seen: list[Any] = []
    real = models.load_model

    def watched(auto_class: Any, source: Any, *, revision: Any = None, **options: Any) -> Any:
        seen.append((str(source), revision))
        return real(auto_class, source, **options)

    monkeypatch.setattr(models, "load_model", watched)
    load_causal(path)
    assert seen == [(str(tmp_path / "base"), "abc")]


@pytest.mark.filterwarnings("ignore:.*so its adapter names no base:rlhf_zoo.ppo.guards.GuardWarning")
def test_adapters_share_base_weights_with_reference_and_reward_model(tmp_path: Path) -> None:
    """The reference is the policy without its adapter, and the critic shares the reward model's weights."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    rates = {"learning_rate": 0.02, "critic_learning_rate": 0.02}
    fields: dict[str, Any] = {"max_steps": 2, "merge_adapter": True, **rates}

    def run(folder: str, **more: Any) -> Any:
        trainer = make_trainer(tmp_path / folder, **{"reward_model": make_reward_model()} | fields | more)
        reward = {id(weight) for weight in trainer.rewards.models[0].model.base_model.parameters()}
        held = {id(weight) for weight in trainer.value_model.parameters()}
        return trainer, reward, held

    half = {"bf16": True, "reward_model": make_reward_model().to(torch.bfloat16)}
    for name, more in {"two": {}, "half": {**half, "model": make_policy().to(torch.bfloat16)}}.items():
        trainer, reward, held = run(name, peft_config=lora, **more)
        assert reward <= held and trainer.reference.separate_model is None
        before = copy.deepcopy(trainer.rewards.models[0].model.state_dict())
        trainer.train()
        after = trainer.rewards.models[0].model.state_dict()
        assert all(torch.equal(weight, before[name]) for name, weight in after.items())
        assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}
    _, reward, held = run("full", peft_config=lora, critic_lora=False)
    assert not reward & held


def test_keys_of_models_page_build_settings(tmp_path: Path) -> None:
    """The keys that docs/models.md proposes for one GPU."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    keys = yaml.safe_load(page.split("```yaml")[1].split("```")[0])
    for stage in STAGES:
        built = settings(stage, **keys, use_cpu=True)
        assert built.model.use_peft and built.model.dtype == "bfloat16" and built.trainer.bf16
