"""The plan of a recipe on a device: what each stage needs, whether it fits, and what would make it fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from ...errors import ZooError
from ...hub.client.connect import CLIENT, Hub
from ...runs.parents import reward_names
from ...runs.recipe import Recipe
from ...runs.registry import STAGES, is_member
from ...runs.settings.key_classes import obeyed
from ...runs.settings.parse import RecipeConfig, recipe_config, recorded_settings
from .devices import Device
from .estimate import PPOModels, Reward, StagePlan, ppo_plan, reward_plan, sft_plan
from .memory import GIB, state_bytes
from .seconds import Duration, duration
from .shapes import Shape, is_at_hand, new_shape, shape_of

#: Tokens of the longest prompt where neither the recipe nor the command says how many.
PROMPT = 512
#: What makes a stage train an adapter on weights that stand still: docs/models.md.
LORA: Mapping[str, Any] = {"use_peft": True, "lora_target_modules": ["all-linear"], "dtype": "bfloat16"}
_BOTH = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "optim",
    "learning_rate", "max_steps", "fsdp2",
)  # fmt: skip
_KEYS = {
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


@dataclass(frozen=True)
class Change:
    """Keys of a stage that make it fit, and the bytes that it then takes."""

    keys: Mapping[str, Any]
    peak: float

    def __str__(self) -> str:
        return ", ".join(f"{name}: {_yaml(value)}" for name, value in self.keys.items())


@dataclass(frozen=True)
class Plan:
    """changes: of each stage that does not fit, the smallest change that makes it fit; None where none was found.

    assumed: what was taken for granted, in sentences.
    """

    recipe: str
    device: Device
    stages: Sequence[StagePlan]
    durations: Mapping[str, Duration | None]
    changes: Mapping[str, Change | None]
    assumed: Sequence[str] = field(default_factory=list)

    @property
    def peak(self) -> float:
        """Bytes on each device in the stage that needs most."""
        return max(stage.peak for stage in self.stages)

    @property
    def line(self) -> str:
        """The plan in one line."""
        parts = [f"{one.stage} {gib(one.peak)}" for one in self.stages]
        said = f"Plan for {self.device}: {', '.join(parts)} GiB"
        spent = self.durations.get("ppo")
        if spent is not None:
            said += f", about {seconds(spent.total)} s an update of PPO{self.in_all('ppo')}"
        if self.changes:
            said += f"; {' and '.join(self.changes)} may not fit: `rlhf-zoo plan {self.recipe}` says what would"
        return said + "."

    def in_all(self, stage: str) -> str:
        """How long a stage takes that says how many updates it makes, as the end of a sentence on one; else nothing."""
        [updates] = [one.about.get("updates") for one in self.stages if one.stage == stage]
        spent = self.durations[stage]
        if spent is None or updates is None:
            return ""
        hours = spent.total * updates / 3600
        return f" ({updates:,} of them: {f'{hours:,.1f} h' if hours >= 1 else f'{60 * hours:.1f} min'})"

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "device": asdict(self.device),
            "room": self.device.room * GIB,
            "stages": [
                {
                    "stage": stage.stage,
                    "models": {name: {**vars(one), "total": one.total} for name, one in stage.models.items()},
                    "phases": {name: {**vars(one), "total": one.total} for name, one in stage.phases.items()},
                    "worst": stage.worst,
                    "peak": stage.peak,
                    "about": stage.about,
                    "fits": stage.stage not in self.changes,
                    "change": None if (change := self.changes.get(stage.stage)) is None else dict(change.keys),
                    "seconds": None if (spent := self.durations[stage.stage]) is None else dict(spent.seconds),
                    "seconds_by": None if spent is None else spent.said,
                }
                for stage in self.stages
            ],
            "assumed": list(self.assumed),
        }


def seconds(value: float) -> str:
    """Three digits, and none below a hundredth: what a call itself takes is not in it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "under 0.01"


def gib(size: float) -> str:
    """Bytes in GiB, for people."""
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def make_plan(
    recipe: Recipe,
    device: Device,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    prompt: int | None = None,
    stages: Sequence[str] | None = None,
    mends: bool = True,
    hub: Hub = CLIENT,
) -> Plan:
    """The plan of a recipe on a device.

    Args:
        recipe: The recipe.
        device: What it is to run on.
        flags: By stage, as `run_flags` gives them.
        prompt: Tokens of the longest prompt.
        stages: Those to plan; None is the recipe's.
        mends: Whether to look for what makes a stage fit.
        hub: Where models are looked for that are no folders.

    Raises:
        ZooError: Nothing is known of a model.
    """
    given = flags or {}
    shared = recipe_config(recipe, given.get("recipe", {}))
    obeyed_keys = {stage: obeyed(recipe, stage, own) for stage, own in recipe.stages.items()}
    keys = {
        stage: stage_keys_of(stage, {**own, **given.get(stage, {})}, where=str(recipe.source(stage)))
        for stage, own in obeyed_keys.items()
    }
    shapes = _Shapes(recipe, shared, keys, hub)
    assumed = (
        [] if device.cpu else ["what is computed here holds on a GPU: it was held against real runs on a CPU alone"]
    )
    if "ppo" in keys and prompt is None:
        prompt = keys["ppo"].max_prompt_length or recipe.zoo.get("prompt_length")
        if prompt is None:
            prompt = min(PROMPT, max(shapes.base.context - keys["ppo"].response_length, 1))
            assumed.append(
                f"the longest prompt has {prompt} tokens: max_prompt_length or --prompt_length says otherwise"
            )

    def estimate(stage: str, own: SimpleNamespace) -> StagePlan:
        if stage == "ppo":
            return ppo_plan(own, shapes.of_ppo(own), device, prompt=prompt or PROMPT)
        return (sft_plan if stage == "sft" else reward_plan)(own, shapes.base, device)

    plans, durations, changes = [], {}, {}
    for stage in stages or recipe.stages:
        found = estimate(stage, keys[stage])
        plans.append(found)
        held_in_half = keys[stage].dtype == "bfloat16"  # which most of the arithmetic is then done in, also with LoRA
        durations[stage] = duration(found.work, device, half=found.half or held_in_half)
        optimizer = str(keys[stage].optim)
        if state_bytes(optimizer) is None:
            assumed.append(f"the optimizer {optimizer} of the stage {stage} keeps as much as Adam")
        if found.peak > device.room * GIB:
            changes[stage] = smallest_change(stage, keys[stage], device, estimate) if mends else None
    return Plan(recipe.name, device, plans, durations, changes, assumed)


def models_elsewhere(recipe: Recipe, flags: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a recipe names a model whose shape a Hub has to be asked for. flags: as for `make_plan`."""
    named: list[Any] = []
    for stage, own in recipe.stages.items():
        keys = {**own, **flags.get(stage, {})}
        named += [keys.get("model_name_or_path"), keys.get("value_model_name_or_path")]
        named += reward_names(keys.get("reward_model_path")) if stage == "ppo" else []
    names = [str(name) for name in named if name is not None]
    return not all(name in STAGES or is_member(name) or is_at_hand(name) for name in names)


def stage_keys_of(stage: str, said: Mapping[str, Any], *, where: str) -> SimpleNamespace:
    """A stage's keys that decide what it needs, typed, with the defaults of those that nobody set."""
    names = [*_BOTH, *_KEYS[stage], *STAGES[stage].model_keys]
    found = SimpleNamespace(**recorded_settings(said, stage, names, where=where))
    for name in ("load_in_4bit", "load_in_8bit"):
        vars(found).setdefault(name, False)
    return found


class _Shapes:
    """The models of a recipe, by the stage that begins with them."""

    def __init__(self, recipe: Recipe, shared: RecipeConfig, keys: Mapping[str, SimpleNamespace], hub: Hub) -> None:
        self.recipe, self.keys, self.hub = recipe, keys, hub
        sft = keys.get("sft")
        name = None if sft is None else sft.model_name_or_path
        ppo = keys.get("ppo")
        if name is None and sft is None and ppo is not None:
            name = ppo.model_name_or_path
        if name is not None:
            self.base = shape_of(name, revision=getattr(sft, "model_revision", None), hub=hub)
        else:
            size = int((shared.tokenizer or {}).get("vocab_size", 1024))
            self.base = new_shape(shared.architecture or {}, vocabulary=size)
        #: One step at the rate 0 leaves the weights as they were published.
        self._untouched = sft is not None and name is not None and sft.learning_rate == 0

    def of_ppo(self, ppo: SimpleNamespace) -> PPOModels:
        name = ppo.model_name_or_path
        other = name not in (None, *STAGES)
        policy = shape_of(name, hub=self.hub) if other else self.base
        value = ppo.value_model_name_or_path
        of_value = (
            None if value is None else (self._trained("reward") if value in STAGES else shape_of(value, hub=self.hub))
        )
        return PPOModels(
            policy=policy,
            rewards=[self._reward(one, policy, ppo) for one in reward_names(ppo.reward_model_path)],
            value=of_value,
            exact=other or self._untouched,
        )

    def _trained(self, stage: str) -> Shape:
        """A reward model of the recipe: held as its stage held the weights that it was made of."""
        keys = self.keys.get(stage)
        adapted = keys is not None and keys.use_peft and keys.dtype != "auto"
        return Shape(self.base.config, keys.dtype if keys is not None and adapted else "float32")

    def _reward(self, name: str, policy: Shape, ppo: SimpleNamespace) -> Reward:
        if name in STAGES or is_member(name):
            return Reward(self._trained("reward"))
        if ppo.reward_model_loader is not None:
            raise ZooError(
                f"The reward model {name} is loaded by {ppo.reward_model_loader}: what it takes is not known."
            )
        shape = shape_of(name, hub=self.hub)
        same = shape.config.model_type == policy.config.model_type
        alike = same and shape.config.vocab_size == policy.config.vocab_size
        return Reward(shape, begins=alike and ppo.reward_label is None)


# What would make a stage fit


def smallest_change(stage: str, keys: SimpleNamespace, device: Device, estimate: Any) -> Change | None:
    """The first that suffices: of keys that leave the results as they are but for rounding one, then two, then several,
    and only then one or several of those that do not.

    Of several those are taken back that are not needed. estimate: (stage, keys) -> StagePlan.
    """
    alike, other = [*_alike(stage, keys, device)], [*_other(stage, keys, device)]

    def joined(changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = {name: value for one in changes for name, value in one.items()}
        return {name: value for name, value in found.items() if value != getattr(keys, name)}

    def fits(changes: Sequence[Mapping[str, Any]]) -> Change | None:
        changed = joined(changes)
        try:
            size = estimate(stage, SimpleNamespace(**{**vars(keys), **changed})).peak
        except ZooError:
            return None  # a key that does not go with the others is no mend
        return Change(changed, size) if size <= device.room * GIB else None

    several: list[list[dict[str, Any]]] = []
    if fits(alike) is not None:
        several = [*map(list, combinations(alike, 2)), *(alike[: place + 1] for place in range(len(alike)))]
    more = [[*alike, *other[: place + 1]] for place in range(len(other))]
    for tried in ([[one] for one in alike], several, [[one] for one in other], more):
        enough = next((taken for taken in tried if fits(taken) is not None), None)
        if enough is None:
            continue
        for one in enough:
            rest = [left for left in enough if left is not one]
            enough = rest if fits(rest) is not None else enough
        return fits(enough)
    return None


def _alike(stage: str, keys: SimpleNamespace, device: Device) -> Iterator[dict[str, Any]]:
    """Changes of keys that leave the results as they are but for rounding."""
    size, steps = keys.per_device_train_batch_size, keys.gradient_accumulation_steps
    while size % 2 == 0 and size > device.count:
        size, steps = size // 2, steps * 2
        yield {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    if not keys.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if not device.cpu and not keys.fsdp2 and not keys.use_peft and device.count > 1:
        yield {"fsdp2": True}
    if stage == "ppo":
        yield from _ppo_levers(keys, device)
    if device.bfloat16 and keys.bf16 is False:
        yield {"bf16": True}


def _other(stage: str, keys: SimpleNamespace, device: Device) -> Iterator[dict[str, Any]]:
    """Changes of keys that train otherwise."""
    if not device.cpu and (state_bytes(str(keys.optim)) or 8) > 3:
        yield {"optim": "adamw_8bit"}
    lora = {} if keys.use_peft else {**LORA, "fsdp2": False}  # adapters have no shards
    if lora:
        yield lora
    if "load_in_4bit" in STAGES[stage].model_keys and not keys.load_in_4bit and not device.cpu:
        yield {**lora, "load_in_4bit": True}


def _ppo_levers(keys: SimpleNamespace, device: Device) -> Iterator[dict[str, Any]]:
    for rows in (16, 4, 1):
        if keys.local_rollout_forward_batch_size > rows:
            yield {"local_rollout_forward_batch_size": rows}
    if keys.rollout_engine == "native" and not device.cpu and keys.rollout_graphs:
        yield {"rollout_graphs": False}
    if not device.cpu and not keys.offload_frozen and device.count == 1:
        yield {"offload_frozen": True}
    longest = (keys.max_prompt_length or PROMPT) + keys.response_length
    rows = keys.per_device_train_batch_size * keys.gradient_accumulation_steps * keys.num_generations // device.count
    while rows > 4:
        rows //= 4
        yield {"max_rollout_batch_tokens": rows * longest}


def _yaml(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else ", ".join(value) if isinstance(value, list) else str(value)
    )
