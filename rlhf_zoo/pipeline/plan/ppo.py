"""Estimates the memory and the work of PPO, phase by phase."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from ...modeling.chunked_logprobs import CHUNK_ON_ACCELERATOR, CHUNK_ON_CPU
from ...modeling.sampling.cuda_graphs import COLUMN_MULTIPLE, round_rows
from ...modeling.sampling.kv_cache import SPARE_COLUMNS
from ...ppo.key_checks import default_tokens_per_pass, has_reference
from ...runs.data.batch_share import divide_batch
from . import memory
from .devices import Device
from .estimate import (
    add_process_memory,
    bytes_per_weight,
    computes_in_bfloat16,
    forward_flops,
    gathered_bytes,
    known_updates,
    quantization,
    resident_memory,
    saving_phase,
    shard_count,
    stage_tracer,
    training_cost,
    weight_dtype,
)
from .memory import BFLOAT16, FLOAT32, Counts, ModelMemory, PhaseMemory, TrainingPass
from .result import StagePlan, Work
from .shapes import Shape
from .tracing import Tracer

NO_MEMORY = ModelMemory()
#: Number of tensors with the size of the sampled tokens' logits: the logits, the scaled logits, and the probabilities.
SAMPLING_TENSORS = 3


@dataclass(frozen=True)
class Reward:
    """A reward model.

    Attributes:
        shape: Architecture of the reward model.
        initializes_critic: Whether a critic may start from the reward model.
    """

    shape: Shape
    initializes_critic: bool = True


@dataclass(frozen=True)
class PPOModels:
    """The models that PPO starts from.

    Attributes:
        policy: The policy that PPO starts from.
        rewards: The reward models.
        value: The model that value_model_name_or_path names; None if that key is not set.
        is_unmodified: Whether the policy has its published weights, so that the reference may keep their dtype.
    """

    policy: Shape
    rewards: Sequence[Reward] = ()
    value: Shape | None = None
    is_unmodified: bool = False


def ppo_plan(keys: SimpleNamespace, models: PPOModels, device: Device, *, prompt_length: int) -> StagePlan:
    """Plans PPO.

    Args:
        keys: The stage's keys, as attributes.
        models: The models that PPO starts from.
        device: The devices of the stage.
        prompt_length: Number of tokens of the longest prompt.

    Raises:
        ZooError: A model cannot be planned, or fsdp2 does not support the keys.
    """
    return _PPOPlanner(keys, models, device, prompt_length).plan()


def ppo_work(keys: SimpleNamespace, models: PPOModels, device: Device, *, prompt_length: int) -> tuple[Work, bool]:
    """Counts the computations of a PPO update, without planning its memory.

    Args:
        keys: As for `ppo_plan`.
        models: As for `ppo_plan`.
        device: As for `ppo_plan`.
        prompt_length: As for `ppo_plan`.

    Returns:
        The computations, and whether the update computes in bfloat16.

    Raises:
        ZooError: As for `ppo_plan`.
    """
    planner = _PPOPlanner(keys, models, device, prompt_length)
    return planner.work(), planner.in_bfloat16


class _PPOPlanner:
    """Plans one process of PPO: its models, how it splits a batch, and the memory of each phase."""

    def __init__(self, keys: SimpleNamespace, models: PPOModels, device: Device, prompt_length: int) -> None:
        self.keys, self.device, self.prompt_length = keys, device, prompt_length
        self.response_length: int = keys.response_length
        self.length = prompt_length + self.response_length
        self.in_bfloat16 = computes_in_bfloat16(keys, device)
        prompts_per_batch, batches = divide_batch(
            keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count
        )
        self.prompt_count = prompts_per_batch * batches
        self.completion_count = self.prompt_count * keys.num_generations
        self.minibatch_rows = math.ceil(self.completion_count / keys.num_mini_batches)
        max_tokens = keys.max_tokens_per_micro_batch or default_tokens_per_pass(
            on_cpu=device.cpu, bf16=self.in_bfloat16
        )
        max_rows = self.completion_count if max_tokens is None else max(max_tokens // self.length, 1)
        # Unless max_tokens_per_micro_batch is set, per_device_train_batch_size limits the rows of a micro-batch.
        self.micro_batch_rows = min(
            self.minibatch_rows,
            max_rows,
            self.minibatch_rows if keys.max_tokens_per_micro_batch else prompts_per_batch,
        )
        self.forward_rows = min(self.completion_count, keys.local_rollout_forward_batch_size, max_rows)
        self.policy = stage_tracer(models.policy, "policy", keys, weight_dtype(keys, models.policy), self.in_bfloat16)
        self.critic, self.critic_has_own_weights = self._trace_critic(models)
        # A critic on the policy's trunk computes values during sampling, unless log-probabilities are recomputed.
        recomputes = keys.recompute_logprobs or keys.rollout_engine != "native"
        self.value_model = self.critic or (self.policy if recomputes else None)
        self.has_adapter = self.policy.spec.adapter is not None
        critic_from_reward = any(reward.initializes_critic for reward in models.rewards) and keys.critic != "policy"
        self._copies_policy = (
            self.has_adapter and self.critic is not None and models.value is None and not critic_from_reward
        )
        unsupported = {
            "use_peft": self.has_adapter, "critic shared": self.critic is None, "offload_frozen": keys.offload_frozen
        }  # fmt: skip
        self.shards = shard_count("ppo", keys, device, **unsupported)
        self.reference = None
        if has_reference(keys, has_ref_model=False) and not self.has_adapter:
            dtype = (
                "bfloat16"
                if self.in_bfloat16 and models.is_unmodified and models.policy.dtype != "float32"
                else "float32"
            )
            reference_keys = SimpleNamespace(use_peft=False, attn_implementation=keys.attn_implementation)
            self.reference = stage_tracer(
                models.policy, "policy", reference_keys, dtype, self.in_bfloat16, is_trainable=False
            )
        reward_keys = SimpleNamespace(use_peft=False)
        self.rewards = {
            "reward model" if number == 1 else f"reward model {number}": stage_tracer(
                reward.shape, "classifier", reward_keys, reward.shape.dtype, False, is_trainable=False
            )
            for number, reward in enumerate(models.rewards, start=1)
        }

    def _trace_critic(self, models: PPOModels) -> tuple[Tracer | None, bool]:
        """Returns the critic (None for a head on the policy), and whether its base is not the reward model's."""
        keys, quantized = self.keys, quantization(self.keys) is not None
        reward = next((reward.shape for reward in models.rewards if reward.initializes_critic), None)
        shape = models.value
        if shape is None and keys.critic != "shared":
            if reward is not None and keys.critic != "policy":
                shape = reward
            elif not quantized:
                shape = models.policy
        if shape is None:
            return None, True
        critic_keys = SimpleNamespace(**{**vars(keys), "use_peft": keys.use_peft and keys.critic_lora})
        shares_base = critic_keys.use_peft and shape is reward and (self.in_bfloat16 or shape.dtype == "float32")
        dtype = shape.dtype if shares_base else "float32"
        return stage_tracer(shape, "classifier", critic_keys, dtype, self.in_bfloat16), not shares_base

    def plan(self) -> StagePlan:
        keys, device = self.keys, self.device
        unquantized_keys = SimpleNamespace(optim=keys.optim)  # load_in_4bit and load_in_8bit apply only to the policy
        models = {"policy": resident_memory(self.policy, keys)}
        if self.critic is not None:
            models["critic"] = resident_memory(self.critic, unquantized_keys, owns_base=self.critic_has_own_weights)
        if self.reference is not None:
            bits = "8bit" if keys.ref_load_in_8bit else None
            models["reference"] = resident_memory(self.reference, unquantized_keys, bits=bits)
        for name, reward in self.rewards.items():
            models[name] = resident_memory(reward, unquantized_keys)
        self.models = {name: model.per_device(self.shards) for name, model in models.items()}
        phases = {
            **({"load": self._loading_phase()} if self._copies_policy else {}),
            "sample": self._sampling_phase(),
            **({"values": self._values_phase(self.value_model)} if self.value_model else {}),
            **({"reference": self._reference_phase()} if has_reference(keys, has_ref_model=False) else {}),
            **({"reward": self._reward_phase()} if self.rewards else {}),
            "update": self._update_phase(),
        }
        batch = {
            "prompt": self.prompt_length, "response": self.response_length, "rows": self.completion_count,
            "sampled_rows": self._sampling_shape()[0],
            "micro_batch": self.micro_batch_rows, "forward_rows": self.forward_rows,
            **known_updates(keys, self.completion_count * device.count),
        }  # fmt: skip
        peaks = {name: add_process_memory(device, phase, self.shards) for name, phase in phases.items()}
        peaks |= saving_phase(device, self.shards, self._trained_models(), self._frozen_weights())
        return StagePlan("ppo", self.models, peaks, batch, self.work(), self.in_bfloat16)

    # What stays on the device

    def _trained_models(self) -> list[ModelMemory]:
        return [self.models[name] for name in ("policy", "critic") if name in self.models]

    def _frozen_weights(self, *in_use: str) -> float:
        """Returns the bytes of the frozen models' weights; with offload_frozen, only of the models in use."""
        names = [name for name in self.models if name not in ("policy", "critic")]
        offloads = self.keys.offload_frozen and (self.critic is None or self.critic_has_own_weights)
        return sum(self.models[name].weights for name in names if not offloads or name in in_use)

    def _memory_without_pass(self, *in_use: str, gathered: Tracer | None = None) -> PhaseMemory:
        """Returns a phase's memory without its pass. `gathered` is the running model, whose shards are gathered."""
        trained_models = self._trained_models()
        weights = sum(model.weights for model in trained_models) + self._frozen_weights(*in_use)
        if gathered is not None and self.shards > 1:
            weights += bytes_per_weight(gathered) * gathered.counts.parameters  # in addition to its shard
        shape = self._graph_cache_shape()
        cache = 0 if shape is None else shape[0] * shape[1] * self._kv_bytes()
        return PhaseMemory(weights=weights, optimizer=sum(model.optimizer for model in trained_models), cache=cache)

    def _kv_bytes(self) -> float:
        """Returns the bytes of a token's keys and values over all layers."""
        size = BFLOAT16 if self.in_bfloat16 else bytes_per_weight(self.policy)
        return size * self.policy.counts.kv_values

    def _graph_cache_shape(self) -> tuple[int, int] | None:
        """Returns rows and columns of the KV cache that stays between rollouts for CUDA graphs; None without graphs."""
        keys, rows = self.keys, round_rows(self.completion_count)
        if self.device.cpu or keys.rollout_engine != "native" or not keys.rollout_graphs or self.shards > 1:
            return None
        # Graphs are captured only for row counts that `round_rows` returns and for multiples of COLUMN_MULTIPLE.
        columns = -(-self.length // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        if keys.max_rollout_batch_tokens is not None:
            while rows > 1 and rows * columns > keys.max_rollout_batch_tokens:
                rows = next(fewer for fewer in range(rows - 1, 0, -1) if round_rows(fewer) == fewer)
        return rows, columns

    def _sampling_shape(self) -> tuple[int, int]:
        """Returns the number of rows that are sampled at once, and the number of columns of their KV cache."""
        if (shape := self._graph_cache_shape()) is not None:
            return min(shape[0], self.completion_count), shape[1]
        limit = self.keys.max_rollout_batch_tokens
        rows = self.completion_count if limit is None else min(self.completion_count, max(limit // self.length, 1))
        # A full cache is replaced by one that has a column for the new token and SPARE_COLUMNS more (`InPlaceLayer`).
        growths = max(math.ceil((self.response_length - 1 - SPARE_COLUMNS) / (SPARE_COLUMNS + 1)), 0)
        return rows, self.prompt_length + SPARE_COLUMNS + growths * (SPARE_COLUMNS + 1)

    # Phases

    def _loading_phase(self) -> PhaseMemory:
        """Returns the memory for making the critic from a copy of the policy whose adapter is merged."""
        policy, critic = self.models["policy"].weights, self.models["critic"].weights
        return PhaseMemory(weights=2 * policy + critic + self._frozen_weights())

    def _sampling_phase(self) -> PhaseMemory:
        resident, (rows, columns) = self._memory_without_pass(gathered=self.policy), self._sampling_shape()
        distinct_prompts = math.ceil(rows / self.keys.num_generations)  # all completions of a prompt share its prefill
        prefill = self.policy.forward_pass(rows=distinct_prompts, length=self.prompt_length, bf16=self.in_bfloat16)
        step = self.policy.decode_step(rows=rows, length=self.length, bf16=self.in_bfloat16)
        counts = self.policy.counts
        cache = resident.cache or rows * columns * self._kv_bytes()
        if not resident.cache and columns > self.prompt_length + SPARE_COLUMNS:
            # The cache grows layer by layer: each layer is copied into a larger buffer.
            step = replace(step, peak=step.peak + round(cache / counts.layers))
        # During prefill the cache is only as long as the prompts.
        unused_cache = 0 if resident.cache else cache * (1 - (self.prompt_length + SPARE_COLUMNS) / columns)
        working = max(step.peak, prefill.peak - unused_cache)
        logits = SAMPLING_TENSORS * FLOAT32 * rows * counts.vocabulary
        return replace(resident, activations=working, cache=cache, logits=logits)

    def _values_phase(self, value_model: Tracer) -> PhaseMemory:
        forward = value_model.forward_pass(rows=self.forward_rows, length=self.length, bf16=self.in_bfloat16)
        return replace(self._memory_without_pass(gathered=value_model), activations=forward.peak)

    def _reference_phase(self) -> PhaseMemory:
        model = self.reference or self.policy
        forward = model.forward_pass(rows=self.forward_rows, length=self.length, bf16=self.in_bfloat16)
        sharded_model = None if self.reference is None else model
        resident, casts = self._memory_without_pass("reference", gathered=sharded_model), 0
        if self.critic is not None:  # bfloat16 casts of the critic's weights stay during this pass
            casts = self.critic.forward_pass(rows=self.forward_rows, length=self.length, bf16=self.in_bfloat16).casts
        return replace(
            resident, activations=forward.peak + casts, logits=self._logit_bytes(self.forward_rows, trains_head=False)
        )

    def _reward_phase(self) -> PhaseMemory:
        peaks = []
        for name, reward in self.rewards.items():
            max_length = getattr(reward.config.get_text_config(), "max_position_embeddings", None) or self.length
            forward = reward.forward_pass(rows=self.forward_rows, length=min(self.length, max_length), bf16=False)
            peaks.append(replace(self._memory_without_pass(name, gathered=reward), activations=forward.peak))
        return max(peaks, key=lambda peak: peak.total)

    def _logit_bytes(self, rows: int, *, trains_head: bool) -> float:
        tokens, counts = rows * self.response_length, self.policy.counts
        full_kl = trains_head and self.keys.kl_in == "loss" and self.keys.kl_estimator == "full"
        # A sharded or adapted head, and a KL over the full vocabulary, need all logits at once.
        if self.shards > 1 or full_kl or _adapts_head(self.keys):
            # The logits, the scaled logits, and four tensors of this size for the entropy.
            return 6 * FLOAT32 * tokens * counts.vocabulary * (2 if full_kl else 1)
        chunk = CHUNK_ON_CPU if self.device.cpu else CHUNK_ON_ACCELERATOR
        return _chunk_logit_bytes(
            tokens=tokens, counts=counts, chunk=chunk, bf16=self.in_bfloat16, trains_head=trains_head
        )

    def _update_phase(self) -> PhaseMemory:
        counts, keys = self.policy.counts, self.keys
        accumulates = self.micro_batch_rows < self.minibatch_rows or self.shards > 1
        passes = [
            TrainingPass()
            if model is None
            else model.training_pass(
                rows=self.micro_batch_rows,
                length=self.length,
                bf16=self.in_bfloat16,
                checkpointing=bool(keys.gradient_checkpointing),
                accumulates=accumulates,
            )
            for model in (self.policy, self.critic)
        ]
        trains_head = counts.trained == counts.parameters
        head_bytes = memory.head_gradient(
            tokens=self.micro_batch_rows * self.response_length, counts=counts, trains_head=trains_head
        )
        policy, critic = (self.models.get(name, NO_MEMORY) for name in ("policy", "critic"))
        resident = self._memory_without_pass()
        exchange_buffers = policy.gradients + critic.gradients if self.device.count > 1 and self.shards == 1 else 0
        peak = memory.update_memory(
            policy,
            critic,
            (passes[0], passes[1]),
            frozen=self._frozen_weights(),
            logits=self._logit_bytes(self.micro_batch_rows, trains_head=True),
            head_bytes=head_bytes,
            accumulates=accumulates,
            exchange_buffers=exchange_buffers,
            cache=resident.cache,
        )
        return replace(peak, weights=peak.weights + gathered_bytes(self.shards, self.policy, self.critic))

    def work(self) -> Work:
        keys, policy = self.keys, self.policy.counts
        rows_at_once, _ = self._sampling_shape()
        tokens, response_tokens = self.completion_count * self.length, self.completion_count * self.response_length
        sampling_batches = math.ceil(self.completion_count / rows_at_once)
        head_flops = 2 * response_tokens * policy.width * policy.vocabulary
        forward_only = [model.counts for model in (self.value_model, *self.rewards.values()) if model is not None]
        if has_reference(keys, has_ref_model=False):
            forward_only.append(policy)
        trained = [model.counts for model in (self.policy, self.critic) if model is not None]
        epochs = keys.num_ppo_epochs
        training = sum(forward_flops(counts, tokens, self.length) * training_cost(counts, keys) for counts in trained)
        # On average, a response token attends to (prompt_length + length) / 2 tokens; `forward_flops` divides by 2.
        return Work(
            prefill=forward_flops(policy, self.prompt_count * self.prompt_length, self.prompt_length),
            decode=forward_flops(policy, response_tokens, self.length + self.prompt_length) + head_flops,
            layer_steps=sampling_batches * self.response_length * policy.layers,
            bytes_read=sampling_batches * self.response_length * (bytes_per_weight(self.policy) * policy.parameters)
            + response_tokens * (self.length + self.prompt_length) / 2 * self._kv_bytes(),
            passes=sum(forward_flops(counts, tokens, self.length) for counts in forward_only),
            head=head_flops if has_reference(keys, has_ref_model=False) else 0,
            update=epochs * training,
            update_head=epochs * head_flops * 3,
            trained=epochs * keys.num_mini_batches * sum(counts.trained for counts in trained),
        )


def _chunk_logit_bytes(*, tokens: int, counts: Counts, chunk: int, bf16: bool, trains_head: bool) -> float:
    """Returns the bytes of the logits if `modeling.logprobs` computes them in chunks of tokens."""
    # Logits and probabilities are float32. In bfloat16, the head's weight and its gradient are cast for the pass.
    rows = min(tokens, max(counts.width, chunk // counts.vocabulary))
    head_weights = counts.vocabulary * counts.width
    logit_bytes = rows * counts.vocabulary * (2 * FLOAT32 + (BFLOAT16 if bf16 and trains_head else 0))
    return logit_bytes + (BFLOAT16 * head_weights * (2 if trains_head else 1) if bf16 else 0)


def _adapts_head(keys: SimpleNamespace) -> bool:
    """Whether LoRA adapts the LM head, or trains it in full (`lora_modules_to_save`)."""
    modules = [*(keys.lora_modules_to_save or ()), *(keys.lora_target_modules or ())]
    return bool(keys.use_peft and {"lm_head", "embed_out"} & {*modules})
