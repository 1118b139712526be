"""Plans a recipe on a device: the memory and time of each stage, and the smallest change that makes a stage fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from ...errors import ZooError
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...runs.recipe import Recipe
from ...runs.registry import STAGES, is_ensemble_member, reward_names
from ...runs.settings.key_classes import effective_keys
from ...runs.settings.parse import recipe_config, recorded_settings
from .devices import Device
from .estimate import reward_plan, sft_plan
from .memory import GIB, OPTIMIZER_STATE, state_bytes
from .ppo import PPOModels, RewardModelSpec, ppo_plan, ppo_work
from .result import LORA, Change, Duration, Plan, StagePlan, Work
from .seconds import predict_duration
from .shapes import ModelShape, find_shape, new_shape

#: Assumed number of tokens of the longest prompt if neither the recipe nor the command sets it.
DEFAULT_PROMPT_LENGTH = 512
#: Keys of all stages that affect a stage's memory or time.
_COMMON_KEYS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "optim",
    "learning_rate", "max_steps", "num_train_epochs", "fsdp2",
)  # fmt: skip
#: Stage -> further keys that affect its memory or time.
_STAGE_KEYS = {
    "sft": ("max_length",),
    "reward": ("max_length",),
    "ppo": (
        "response_length", "num_generations", "num_ppo_epochs", "num_mini_batches", "local_rollout_forward_batch_size",
        "max_tokens_per_micro_batch", "max_rollout_batch_tokens", "reference", "ref_load_in_8bit", "ref_adapter_name",
        "metric_for_best_model", "kl_coef", "kl_target", "kl_in", "kl_estimator", "critic", "critic_lora",
        "reward_model_path", "reward_model_loader", "reward_label", "value_model_name_or_path", "offload_frozen",
        "rollout_engine", "rollout_graphs", "recompute_logprobs", "max_prompt_length", "total_episodes",
    ),
}  # fmt: skip


def make_plan(
    recipe: Recipe,
    device: Device,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    prompt_length: int | None = None,
    stages: Sequence[str] | None = None,
    suggest_changes: bool = True,
    hub: Hub = DEFAULT_HUB,
) -> Plan:
    """Plans the memory and the time of a recipe on a device.

    Args:
        recipe: The recipe.
        device: The devices of the run.
        flags: Stage -> key -> value, as `read_flags` returns them.
        prompt_length: Number of tokens of the longest prompt; None for PPO's max_prompt_length or else the length in
            zoo.yaml. If neither is set, the plan assumes `DEFAULT_PROMPT_LENGTH`.
        stages: The stages to plan; None for all stages of the recipe.
        suggest_changes: Whether to search for changes that make stages fit.
        hub: Where Hub ids of models are looked up.

    Raises:
        ZooError: A key is not valid, a model's shape cannot be found, or a stage cannot be planned.
    """
    inputs = _PlanInputs(recipe, device, flags or {}, prompt_length, hub)
    keys, assumptions = inputs.keys, inputs.assumptions

    def estimate(stage: str, stage_keys: SimpleNamespace) -> StagePlan:
        if stage == "ppo":
            return ppo_plan(stage_keys, inputs.ppo_models(stage_keys), device, prompt_length=inputs.prompt_length)
        return (sft_plan if stage == "sft" else reward_plan)(stage_keys, inputs.base, device)

    plans, durations, changes = [], {}, {}
    for stage in stages or recipe.stages:
        plan = estimate(stage, keys[stage])
        plans.append(plan)
        durations[stage] = _predict_stage(plan.work, keys[stage], device, bf16=plan.bf16)
        optimizer = str(keys[stage].optim)
        if state_bytes(optimizer) is None:
            assumptions.append(f"the optimizer {optimizer} of the stage {stage} has as much state as Adam")
        if plan.peak > device.usable_gib * GIB:
            changes[stage] = smallest_change(stage, keys[stage], device, estimate) if suggest_changes else None
    return Plan(recipe.name, device, plans, durations, changes, assumptions)


def predict_update(recipe: Recipe, device: Device) -> Duration | None:
    """Predicts the duration of a PPO update, without planning its memory, which takes longer.

    Args:
        recipe: A recipe with PPO.
        device: The devices of the run.

    Returns:
        The prediction; None if no measured rates apply to the device.
    """
    inputs = _PlanInputs(recipe, device, {}, None, DEFAULT_HUB)
    keys = inputs.keys["ppo"]
    work, bf16 = ppo_work(keys, inputs.ppo_models(keys), device, prompt_length=inputs.prompt_length)
    return _predict_stage(work, keys, device, bf16=bf16)


def _predict_stage(work: Work, keys: SimpleNamespace, device: Device, *, bf16: bool) -> Duration | None:
    # With weights loaded in bfloat16, most arithmetic is in bfloat16, even with LoRA.
    return predict_duration(work, device, bf16=bf16 or keys.dtype == "bfloat16")


def parse_planner_keys(stage: str, values: Mapping[str, Any], *, where: str) -> SimpleNamespace:
    """Parses the keys of a stage that affect its memory or time.

    Args:
        stage: Name of the stage.
        values: The stage's keys. Missing keys get their defaults.
        where: The file of the keys, for messages.

    Returns:
        The keys as attributes.
    """
    names = [*_COMMON_KEYS, *_STAGE_KEYS[stage], *STAGES[stage].model_keys]
    keys = SimpleNamespace(**recorded_settings(values, stage, names, where=where))
    for name in ("load_in_4bit", "load_in_8bit"):
        vars(keys).setdefault(name, False)
    return keys


class _PlanInputs:
    """The inputs of a plan: the keys of each stage, the models that stages load, and the longest prompt."""

    def __init__(
        self,
        recipe: Recipe,
        device: Device,
        flags: Mapping[str, Mapping[str, Any]],
        prompt_length: int | None,
        hub: Hub,
    ) -> None:
        shared = recipe_config(recipe, flags.get("recipe", {}))
        effective = {stage: effective_keys(recipe, stage, stage_keys) for stage, stage_keys in recipe.stages.items()}
        self.hub = hub
        self.keys = keys = {
            stage: parse_planner_keys(stage, {**stage_keys, **flags.get(stage, {})}, where=str(recipe.yaml_file(stage)))
            for stage, stage_keys in effective.items()
        }
        sft, ppo = keys.get("sft"), keys.get("ppo")
        name = None if sft is None else sft.model_name_or_path
        if sft is None and ppo is not None:
            name = ppo.model_name_or_path
        if name is not None:
            self.base = find_shape(name, revision=getattr(sft, "model_revision", None), hub=hub)
        else:
            vocabulary_size = int((shared.tokenizer or {}).get("vocab_size", 1024))
            self.base = new_shape(shared.architecture or {}, vocabulary=vocabulary_size)
        # A learning rate of 0 leaves the published weights as they are.
        self._sft_is_unmodified = sft is not None and name is not None and sft.learning_rate == 0
        self.assumptions = (
            [] if device.cpu else ["the plan also holds on GPUs, although it was compared with real runs on CPUs only"]
        )
        if ppo is not None and prompt_length is None:
            prompt_length = ppo.max_prompt_length or recipe.zoo.get("prompt_length")
            if prompt_length is None:
                prompt_length = min(DEFAULT_PROMPT_LENGTH, max(self.base.context_length - ppo.response_length, 1))
                self.assumptions.append(
                    f"the longest prompt has {prompt_length} tokens; "
                    "set max_prompt_length or --prompt_length to change this"
                )
        self.prompt_length: int = prompt_length or 0  # 0 only without PPO

    def ppo_models(self, ppo: SimpleNamespace) -> PPOModels:
        """Returns the models that PPO loads, according to its keys."""
        name = ppo.model_name_or_path
        is_external = name not in (None, *STAGES)
        policy = find_shape(name, hub=self.hub) if is_external else self.base
        value_name = ppo.value_model_name_or_path
        value_shape = None
        if value_name is not None:
            value_shape = self._own_reward_shape() if value_name in STAGES else find_shape(value_name, hub=self.hub)
        return PPOModels(
            policy=policy,
            reward_models=[self._reward_model(reward, policy, ppo) for reward in reward_names(ppo.reward_model_path)],
            value_model=value_shape,
            policy_is_unmodified=is_external or self._sft_is_unmodified,
        )

    def _own_reward_shape(self) -> ModelShape:
        """Returns the shape of the recipe's own reward model. With an adapter, it has the dtype of its loaded base."""
        keys = self.keys.get("reward")
        is_adapter = keys is not None and keys.use_peft and keys.dtype != "auto"
        return ModelShape(self.base.config, keys.dtype if keys is not None and is_adapter else "float32")

    def _reward_model(self, name: str, policy: ModelShape, ppo: SimpleNamespace) -> RewardModelSpec:
        if name in STAGES or is_ensemble_member(name):
            return RewardModelSpec(self._own_reward_shape())
        if ppo.reward_model_loader is not None:
            raise ZooError(
                f"The reward model {name} is loaded by {ppo.reward_model_loader}, so its memory is unknown: plan the "
                "recipe with a classifier as its reward model."
            )
        shape = find_shape(name, hub=self.hub)
        is_same_type = shape.config.model_type == policy.config.model_type
        has_same_vocabulary = is_same_type and shape.config.vocab_size == policy.config.vocab_size
        return RewardModelSpec(shape, can_initialize_critic=has_same_vocabulary and ppo.reward_label is None)


# Changes that make a stage fit


def smallest_change(
    stage: str, keys: SimpleNamespace, device: Device, estimate: Callable[[str, SimpleNamespace], StagePlan]
) -> Change | None:
    """Finds the smallest change of keys that makes a stage fit.

    The search first tries changes that affect only rounding: single changes, then pairs, then larger combinations.
    Next, it tries changes that affect training, each alone and then together with all rounding changes. From the first
    combination that fits, it drops the changes that are not needed.

    Args:
        stage: Name of the stage.
        keys: The stage's keys.
        device: The devices of the stage.
        estimate: Plans the stage for a set of keys.

    Returns:
        The change; None if no change makes the stage fit.
    """
    rounding_changes = [*_rounding_changes(stage, keys, device)]
    training_changes = [*_training_changes(stage, keys, device)]

    def try_changes(changes: Sequence[Mapping[str, Any]]) -> Change | None:
        """Returns the merged changes if the stage fits with them; otherwise None."""
        merged_keys = {name: value for change in changes for name, value in change.items()}
        merged_keys = {name: value for name, value in merged_keys.items() if value != getattr(keys, name)}
        try:
            peak = estimate(stage, SimpleNamespace(**{**vars(keys), **merged_keys})).peak
        except ZooError:
            return None  # these keys do not work together
        return Change(merged_keys, peak) if peak <= device.usable_gib * GIB else None

    rounding_groups: list[list[dict[str, Any]]] = []
    if try_changes(rounding_changes) is not None:
        prefixes = (rounding_changes[: count + 1] for count in range(len(rounding_changes)))
        rounding_groups = [*map(list, combinations(rounding_changes, 2)), *prefixes]
    mixed_groups = [[*rounding_changes, *training_changes[: count + 1]] for count in range(len(training_changes))]
    rounding_singles = [[change] for change in rounding_changes]
    training_singles = [[change] for change in training_changes]
    for candidates in (rounding_singles, rounding_groups, training_singles, mixed_groups):
        combination = next((changes for changes in candidates if try_changes(changes) is not None), None)
        if combination is None:
            continue
        for change in combination:
            remaining = [other for other in combination if other is not change]
            combination = remaining if try_changes(remaining) is not None else combination
        return try_changes(combination)
    return None


def _rounding_changes(stage: str, keys: SimpleNamespace, device: Device) -> Iterator[dict[str, Any]]:
    """Yields changes of keys that affect the results of training only by rounding."""
    batch_size, steps = keys.per_device_train_batch_size, keys.gradient_accumulation_steps
    while batch_size % 2 == 0 and batch_size > device.count:
        batch_size, steps = batch_size // 2, steps * 2
        yield {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": steps}
    if not keys.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if not device.cpu and not keys.fsdp2 and not keys.use_peft and device.count > 1:
        yield {"fsdp2": True}
    if stage == "ppo":
        yield from _ppo_rounding_changes(keys, device)
    if device.bfloat16 and keys.bf16 is False:
        yield {"bf16": True}


def _training_changes(stage: str, keys: SimpleNamespace, device: Device) -> Iterator[dict[str, Any]]:
    """Yields changes of keys that affect training by more than rounding."""
    state = state_bytes(str(keys.optim))
    if not device.cpu and (state is None or state > OPTIMIZER_STATE["adamw_8bit"]):
        yield {"optim": "adamw_8bit"}
    lora = {} if keys.use_peft else {**LORA, "fsdp2": False}  # adapters cannot be sharded
    if lora:
        yield lora
    if "load_in_4bit" in STAGES[stage].model_keys and not keys.load_in_4bit and not device.cpu:
        yield {**lora, "load_in_4bit": True}


def _ppo_rounding_changes(keys: SimpleNamespace, device: Device) -> Iterator[dict[str, Any]]:
    for batch_size in (16, 4, 1):
        if keys.local_rollout_forward_batch_size > batch_size:
            yield {"local_rollout_forward_batch_size": batch_size}
    if keys.rollout_engine == "native" and not device.cpu and keys.rollout_graphs:
        yield {"rollout_graphs": False}
    if not device.cpu and not keys.offload_frozen and device.count == 1:
        yield {"offload_frozen": True}
    max_tokens = (keys.max_prompt_length or DEFAULT_PROMPT_LENGTH) + keys.response_length
    completions = (
        keys.per_device_train_batch_size * keys.gradient_accumulation_steps * keys.num_generations // device.count
    )
    while completions > 4:
        completions //= 4
        yield {"max_rollout_batch_tokens": completions * max_tokens}
