"""PPO with adapters (peft): what trains and what stands still, which weights the reference has, what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from trainer_fixture import (
    SAVED,
    Spy,
    assert_resumes_exactly,
    digests,
    make_policy,
    make_reward_model,
    make_tokenizer,
    make_trainer,
    rows_of,
    snapshot,
    token_logps,
    trained,
    updates_of,
    vocabulary_logps,
)
from transformers import AutoModelForCausalLM

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.models import is_peft, load_causal
from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead
from rlhf_zoo.ppo.guards import GuardWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*so its adapter names no base:rlhf_zoo.ppo.guards.GuardWarning")
RUN: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.02, "critic_learning_rate": 0.02}


def lora(**options: Any) -> LoraConfig:
    """Of rank 2, over attention; its dropout must be switched off as any other."""
    fields: dict[str, Any] = {
        "r": 2, "lora_alpha": 8, "lora_dropout": 0.5, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    return LoraConfig(**fields | options)


def gpt2() -> Any:
    """Its layers are Conv1D, which keep their weights transposed."""
    return tiny_model(AutoModelForCausalLM, "gpt2")


def adapted(*names: str, seed: int = 3, base: Any = None, **options: Any) -> PeftModel:
    """A policy with adapters that say something; all have the weights of the first."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = lora(init_lora_weights=False, **options)
        model = get_peft_model(base or make_policy(), config, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, lora(**options))
            set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name=names[0]), adapter_name=name)
    return model.eval()


def moves(trainer: Spy, part: str) -> tuple[set[str], set[str]]:
    """The names of one part's weights: those of its adapter and head, all of which have moved, and all others."""
    after = {name: weight for name, weight in snapshot(trainer).items() if name.startswith(part)}
    moved = {name for name, weight in after.items() if not torch.equal(weight, trainer.before[name])}
    return moved, after.keys() - moved


def check_moves(trainer: Spy, *, critic: str, adapter: str = "default") -> None:
    """Every weight of the adapter in training has moved and, to the last bit, none of its base.

    critic: "lora", whose head trains beside its adapter; "full"; or "head" on the policy's trunk.
    """
    moved, still = moves(trainer, "policy")
    assert moved and all(f".{adapter}." in name for name in moved)
    assert still and not [name for name in still if f".{adapter}." in name]
    moved, still = moves(trainer, "critic")
    if critic == "lora":
        assert any("lora_" in name for name in moved) and any("modules_to_save" in name for name in moved)
        assert still and not [name for name in still if "lora_" in name or "modules_to_save" in name]
    else:
        assert moved and not still and ("critic.summary.weight" in moved) == (critic == "head")
        assert not [name for name in moved if "lora_" in name]


def check_reference(trainer: Spy, reference: Any, *, within: float = 2e-5) -> None:
    """log π_ref of every rollout is what `reference` says, row by row; the first rollout has no KL, later ones have."""
    for rollout, _, _ in trainer.updates:
        rows = rows_of(rollout)
        with torch.no_grad():
            for row, logps in enumerate(token_logps(vocabulary_logps(reference, rows), rows)):
                assert (rollout.ref_logprobs[row, : len(logps)] - logps).abs().max() < within
    first, *_, last = (row["objective/kl"] for row in updates_of(trainer))
    assert abs(first) < 1e-5 < 1e-4 < abs(last)
    assert updates_of(trainer)[0]["policy/logprob_mismatch"] < 1e-5


def says(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 6, 7, 3], [9, 9, 4, 12]])).logits.float()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and its tokenizer on the disk, so that an adapter has a base to name."""
    directory = tmp_path_factory.mktemp("base")
    make_policy().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def sft(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter over it, as an SFT run leaves one."""
    directory = tmp_path_factory.mktemp("sft")
    adapted("default", base=AutoModelForCausalLM.from_pretrained(base)).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("given", "critic"),
    [
        ({}, "lora"),
        ({"critic_lora": False}, "full"),
        ({"critic": "shared"}, "head"),
        ({"target_modules": "all-linear", "reward_model": True}, "lora"),
        ({"target_modules": None, "gradient_checkpointing": True}, "lora"),
        ({"modules_to_save": ["lm_head"]}, "lora"),
        ({"model": "gpt2", "target_modules": None}, "lora"),
    ],
    ids=["policy critic", "full critic", "shared", "all-linear reward", "defaults", "head in full", "conv1d"],
)
def test_adapters_train_while_bases_stay_fixed(tmp_path: Path, given: dict[str, Any], critic: str) -> None:
    config = {name: given[name] for name in ("target_modules", "modules_to_save") if name in given}
    settings = {name: value for name, value in given.items() if name not in config}
    make = gpt2 if "model" in given else make_policy
    settings |= {"model": make()} | ({"reward_model": make_reward_model()} if "reward_model" in given else {})
    trainer = trained(tmp_path, peft_config=lora(**config), **RUN | settings)
    check_moves(trainer, critic=critic)
    check_reference(trainer, make())
    if config.get("target_modules") == "all-linear":
        for part in (trainer.policy, trainer.value_model):
            names = {name.split(".lora_A")[0].split(".")[-1] for name, _ in part.named_parameters() if "lora_A" in name}
            assert names == {f"{letter}_proj" for letter in "qkvo"} | {"gate_proj", "up_proj", "down_proj"}
    # Each group of the optimizer holds what trains and nothing else.
    groups = [weight for group in trainer.optimizer.optimizer.param_groups for weight in group["params"]]
    assert {id(w) for w in groups} == {id(w) for w in trainer.model.parameters() if w.requires_grad}


def test_adapters_keep_float32_under_bf16(tmp_path: Path) -> None:
    """The adapter itself keeps float32: a step of 1e-3 is below what bf16 resolves."""
    trainer = trained(tmp_path, model=make_policy().to(torch.bfloat16), peft_config=lora(), bf16=True, **RUN)
    check_moves(trainer, critic="lora")
    dtypes = {weight.dtype for name, weight in trainer.policy.named_parameters() if "lora_" in name}
    assert dtypes == {torch.float32} and trainer.precision == torch.bfloat16
    first, *_, last = (row["objective/kl"] for row in updates_of(trainer))
    # Some processors round bf16 products of other shapes otherwise, so sampling and scoring part by 1e-3.
    assert abs(first) < 5e-3 and first != last


def test_policy_with_its_own_adapter_trains(tmp_path: Path) -> None:
    """The critic gets one too. With a fresh adapter the base is the reference; a value head may come along."""
    trainer = trained(tmp_path, model=get_peft_model(make_policy(), lora()), **RUN)
    check_moves(trainer, critic="lora")
    check_reference(trainer, make_policy())
    config = trainer.value_model.peft_config["default"]
    assert config.r == 2 and config.target_modules == {"q_proj", "v_proj"}
    headed = AutoModelForCausalLMWithValueHead.from_pretrained(make_policy(), peft_config=lora())
    trainer = trained(tmp_path, model=headed, **RUN)
    assert trainer.value_model is headed.v_head
    check_moves(trainer, critic="head")


def test_critic_with_its_own_adapter_is_kept(tmp_path: Path) -> None:
    mine = get_peft_model(critic_from(make_reward_model()), lora(task_type="TOKEN_CLS", modules_to_save=["score"]))
    trainer = trained(tmp_path, value_model=mine, peft_config=lora(), **RUN)
    assert trainer.value_model is mine
    check_moves(trainer, critic="lora")


def test_critic_of_trained_adapter_starts_from_policy_without_base(tmp_path: Path, base: Path) -> None:
    """Its trunk is base and adapter together, so its own adapter over the base alone would be another critic."""
    policy = adapted("default", base=AutoModelForCausalLM.from_pretrained(base))
    trained(
        tmp_path, model=policy, ref_model=adapted("default").merge_and_unload(), max_steps=1, save_strategy="steps",
        save_steps=1,
    )  # fmt: skip
    fresh = make_trainer(tmp_path, model=adapted("default"), ref_model=make_policy())
    trunk = adapted("default").merge_and_unload().model.state_dict()
    held = {
        name.replace(".base_layer", ""): w for name, w in fresh.value_model.get_base_model().model.named_parameters()
    }
    assert all(torch.equal(held[name], weight) for name, weight in trunk.items())
    with pytest.raises(ZooError, match=r"adapter in .*critic names no base model"):
        critic_from(str(tmp_path / "checkpoint-1" / "critic"))


def test_one_adapter_trains_with_another_as_reference(tmp_path: Path, base: Path, sft: Path) -> None:
    """`from_pretrained` and `load_adapter` freeze an adapter unless asked otherwise; it trains by name."""

    class Watched(Spy):
        """Looks at the gradients before each optimizer step."""

        def optimizer_step(self, model: Any) -> Any:
            seen.append({name for name, weight in self.policy.named_parameters() if weight.grad is not None})
            return super().optimizer_step(model)

    seen: list[set[str]] = []
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), sft, adapter_name="ref")
    model.load_adapter(str(sft), "ppo")
    trainer = make_trainer(
        tmp_path, kind=Watched, model=model, model_adapter_name="ppo", ref_adapter_name="ref", merge_adapter=True, **RUN
    )
    trains = {name for name, weight in trainer.policy.named_parameters() if weight.requires_grad}
    assert trains == {name for name in dict(trainer.policy.named_parameters()) if ".ppo." in name} != set()
    trainer.train()
    check_moves(trainer, critic="lora", adapter="ppo")
    check_reference(trainer, load_causal(sft), within=1e-4)  # merging rounds
    assert len(seen) == 8 and all(names == trains for names in seen)
    assert {name for name, weight in trainer.policy.named_parameters() if weight.requires_grad} == trains
    assert trainer.policy.active_adapter == "ppo"
    with trainer.reference.model() as reference:
        assert reference.active_adapter == "ref"
    assert {name for name, weight in trainer.policy.named_parameters() if weight.requires_grad} == trains
    trainer.save_model(str(tmp_path / "plain"))
    merged = says(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    assert (merged - says(trainer.policy)).abs().max() < 1e-5
    assert (merged - says(load_causal(sft))).abs().max() > 1e-2


def test_frozen_adapter_weights_stay_frozen(tmp_path: Path) -> None:
    """Only its B trains, as in LoRA-FA: making the reference active and inactive again frees nothing."""
    model = adapted("ppo", "ref")
    for name, weight in model.named_parameters():
        weight.requires_grad_(".lora_B.ppo." in name)
    trainer = trained(tmp_path, model=model, ref_adapter_name="ref", **RUN)
    moved, still = moves(trainer, "policy")
    assert moved and all(".lora_B.ppo." in name for name in moved)
    assert not [name for name in still if ".lora_B.ppo." in name]
    # Whatever counts as trained adds to the norm by which gradients are clipped.
    assert {f"policy.{name}" for name, weight in model.named_parameters() if weight.requires_grad} == moved


def test_reference_adapter_may_differ_from_trained_one(tmp_path: Path) -> None:
    """It was chosen by name, so that the run need not begin at it."""
    model = adapted("ref")
    model.add_adapter("ppo", lora())
    trainer = trained(tmp_path, model=model, model_adapter_name="ppo", ref_adapter_name="ref", **RUN)
    check_moves(trainer, critic="lora", adapter="ppo")
    assert abs(updates_of(trainer)[0]["objective/kl"]) > 0.5


def test_named_adapter_is_saved_where_loaders_look(tmp_path: Path, base: Path) -> None:
    """PEFT would put it into a folder of its name, and the reference's beside it."""

    def build(directory: Path) -> Spy:
        policy = adapted("ref", "ppo", base=AutoModelForCausalLM.from_pretrained(base))
        names = {"model_adapter_name": "ppo", "ref_adapter_name": "ref"}
        return make_trainer(directory, kind=Spy, model=policy, **names, **SAVED)

    whole = assert_resumes_exactly(build, tmp_path)
    checkpoint = tmp_path / "straight" / "checkpoint-3"
    assert sorted(path.name for path in checkpoint.iterdir() if path.is_dir()) == ["critic"]
    expected = says(whole.policy)
    assert torch.equal(says(AutoModelForCausalLM.from_pretrained(checkpoint)), expected)
    merged = load_causal(checkpoint)
    assert not is_peft(merged) and (says(merged) - expected).abs().max() < 1e-5
    assert (says(load_causal(tmp_path / "straight" / "checkpoint-1")) - expected).abs().max() > 1e-3


def test_exact_kl_to_adapter_works_with_gradient_checkpointing(tmp_path: Path) -> None:
    """The reference runs beside the policy in each micro-batch, and the policy again on the way back."""
    runs = [
        trained(
            tmp_path, model=adapted("ref", "ppo"), model_adapter_name="ppo", ref_adapter_name="ref", kl_in="loss",
            kl_estimator="full", kl_coef=0.5, gradient_checkpointing=checkpointing, critic="shared",
            **{**RUN, "seed": 3},  # under which some completion scores, with every lever too
        )
        for checkpointing in (False, True)
    ]  # fmt: skip
    assert digests(runs[0]) == digests(runs[1])
    assert all(row["loss/kl"] > 0 for row in updates_of(runs[1]))
    check_moves(runs[1], critic="head", adapter="ppo")


@pytest.mark.parametrize("given", [{"critic": "shared"}, {"critic_lora": False}])
def test_run_with_adapter_resumes_exactly(tmp_path: Path, given: dict[str, Any]) -> None:
    def build(directory: Path) -> Spy:
        torch.manual_seed(0)  # an adapter begins at random
        return make_trainer(directory, kind=Spy, peft_config=lora(), **given, **RUN | SAVED)

    assert_resumes_exactly(build, tmp_path)


def test_merged_policy_is_a_plain_model(tmp_path: Path, base: Path) -> None:
    """save_model writes it, also as push_to_hub calls it and over an unmerged one; checkpoints keep the adapter."""
    trainer = trained(
        tmp_path, model=str(base), peft_config=lora(), merge_adapter=True, save_strategy="steps", save_steps=2,
        **RUN,
    )  # fmt: skip
    expected, adapter = says(trainer.policy), digests(trainer)
    assert (says(make_policy()) - expected).abs().max() > 0.1
    checkpoint, plain = tmp_path / "checkpoint-2", tmp_path / "plain"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    assert torch.equal(says(AutoModelForCausalLM.from_pretrained(checkpoint)), expected)
    assert (says(critic_from(checkpoint / "critic")) - says(trainer.value_model)).abs().max() < 1e-5
    trainer.actor.save_pretrained(plain)
    trainer.save_model(str(plain))
    trainer.save_model(_internal_call=True)
    for directory in (plain, tmp_path):
        assert (directory / "model.safetensors").is_file() and not list(directory.glob("adapter_*"))
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert not any("lora_" in name for name in loaded.state_dict())
        assert (says(loaded) - expected).abs().max() < 1e-5
    assert digests(trainer) == adapter  # what trains was not merged


def test_adapter_over_merged_weights_names_no_base(tmp_path: Path, base: Path, sft: Path) -> None:
    """The base that an SFT adapter names is not what PPO's adapter was put on: loading it there was another policy."""
    with pytest.warns(GuardWarning, match=r"adapter names no base .* set merge_adapter, or save the model first"):
        trainer = trained(tmp_path, model=str(sft), peft_config=lora(), save_strategy="steps", save_steps=2, **RUN)
    check_reference(trainer, load_causal(sft))
    for part in (".", "critic"):
        config = json.loads((tmp_path / "checkpoint-2" / part / "adapter_config.json").read_text())
        assert not config["base_model_name_or_path"]
    with pytest.raises(ZooError, match=r"adapter in .* names no base model"):
        load_causal(tmp_path / "checkpoint-2")
    trained(tmp_path / "named", model=str(base), peft_config=lora(), save_strategy="steps", save_steps=2, **RUN)
    config = json.loads((tmp_path / "named" / "checkpoint-2" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_bad_adapters_and_references_are_rejected_in_one_sentence(tmp_path: Path, base: Path, sft: Path) -> None:
    frozen = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), sft)
    policy = make_policy()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("No weight of the PeftModel requires a gradient: load its adapter with is_trainable=True", {"model": frozen}),
        ("is a PeftModel, and peft_config is passed too", {"model": adapted("default"), "peft_config": lora()}),
        ("ref_model is the policy itself", {"model": policy, "ref_model": policy, "peft_config": lora()}),
        ("model_adapter_name is 'ppo', but the model has no such", {"model_adapter_name": "ppo"}),
        ("model_adapter_name is 'ppo', but the model has no such", {
            "model": adapted("ref"), "model_adapter_name": "ppo"}),
        ("ref_adapter_name is 'ref', but the policy has no such", {"ref_adapter_name": "ref"}),
        ("ref_adapter_name is 'ref', but the policy has no such", {
            "model": adapted("default"), "ref_adapter_name": "ref"}),
        ("ref_adapter_name is 'ppo', the adapter in training", {
            "model": adapted("ppo"), "ref_adapter_name": "ppo"}),
        ("ref_adapter_name is 'ref' and ref_model is passed too", {
            "model": adapted("ref", "ppo"), "model_adapter_name": "ppo", "ref_adapter_name": "ref",
            "ref_model": make_policy()}),
        ("ref_load_in_8bit needs a separate reference", {"peft_config": lora(), "ref_load_in_8bit": True}),
        ("next to the adapters that checkpoints pushed before: set hub_strategy to 'end'", {
            "merge_adapter": True, "push_to_hub": True, "peft_config": lora(), "save_strategy": "steps"}),
        (r"adapter does not fit the critic, a GPT2ForTokenClassification .*set critic_lora=False", {
            "value_model": gpt2(), "peft_config": lora()}),
    ]  # fmt: skip
    for message, given in cases:
        with pytest.raises(ZooError, match=message) as caught:
            make_trainer(tmp_path, **given)
        assert "\n" not in str(caught.value) and str(caught.value).endswith("."), message
    full = trained(tmp_path, value_model=gpt2(), peft_config=lora(), critic_lora=False, **RUN)
    check_moves(full, critic="full")
