"""Estimates the memory and the work of PPO, phase by phase.

This module mirrors `rlhf_zoo.ppo`, `modeling.logprobs` and `modeling.sampling`: the models that PPO loads, and how it
splits a batch.
"""

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
    count_shards,
    forward_flops,
    gathered_bytes,
    known_updates,
    resident_memory,
    saving_phase,
    stage_tracer,
    training_cost,
    weight_dtype,
    weight_quantization,
)
from .memory import BFLOAT16, FLOAT32, ModelMemory, PhaseMemory, TrainingPass
from .result import StagePlan, Work
from .shapes import ModelShape
from .tracing import Tracer

NO_MEMORY = ModelMemory()
#: Number of tensors with the size of the sampled tokens' logits: the logits, the scaled logits, and the probabilities.
SAMPLING_TENSORS = 3


@dataclass(frozen=True)
class RewardModelSpec:
    """A reward model, as far as it affects the plan.

    Attributes:
        shape: The model's architecture.
        can_initialize_critic: Whether the critic may start from this model.
    """

    shape: ModelShape
    can_initialize_critic: bool = True


@dataclass(frozen=True)
class PPOModels:
    """The models that PPO loads.

    Attributes:
        policy: The policy that PPO trains further.
        reward_models: The reward models.
        value_model: The model that value_model_name_or_path names; None if that key is not set.
        policy_is_unmodified: Whether the policy has its published weights. The reference may then keep their dtype.
    """

    policy: ModelShape
    reward_models: Sequence[RewardModelSpec] = ()
    value_model: ModelShape | None = None
    policy_is_unmodified: bool = False


def ppo_plan(keys: SimpleNamespace, models: PPOModels, device: Device, *, prompt_length: int) -> StagePlan:
    """Plans the memory and the work of PPO.

    Args:
        keys: The stage's keys, as attributes.
        models: The models that PPO loads.
        device: The devices of the stage.
        prompt_length: Number of tokens of the longest prompt.

    Raises:
        ZooError: A model cannot be planned, or fsdp2 does not support the keys.
    """
    return _PPOPlanner(keys, models, device, prompt_length).plan()


def ppo_work(keys: SimpleNamespace, models: PPOModels, device: Device, *, prompt_length: int) -> tuple[Work, bool]:
    """Counts the computations of a PPO update, without planning its memory.

    Args:
        keys: The stage's keys, as attributes.
        models: The models that PPO loads.
        device: The devices of the stage.
        prompt_length: Number of tokens of the longest prompt.

    Returns:
        The computations, and whether the update computes in bfloat16.

    Raises:
        ZooError: A model cannot be planned, or fsdp2 does not support the keys.
    """
    planner = _PPOPlanner(keys, models, device, prompt_length)
    return planner.work(), planner.bf16


class _PPOPlanner:
    """Plans a single process of PPO: its models, how it splits a batch, and the memory of each phase."""

    def __init__(self, keys: SimpleNamespace, models: PPOModels, device: Device, prompt_length: int) -> None:
        self.keys, self.device, self.prompt_length = keys, device, prompt_length
        self.response_length: int = keys.response_length
        self.length = prompt_length + self.response_length
        self.bf16 = computes_in_bfloat16(keys, device)
        prompt_batch_size, steps = divide_batch(
            keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count
        )
        self.prompt_count = prompt_batch_size * steps
        self.completion_count = self.prompt_count * keys.num_generations
        self.minibatch_size = math.ceil(self.completion_count / keys.num_mini_batches)
        max_tokens = keys.max_tokens_per_micro_batch or default_tokens_per_pass(on_cpu=device.cpu, bf16=self.bf16)
        max_batch_size = self.completion_count if max_tokens is None else max(max_tokens // self.length, 1)
        # Unless max_tokens_per_micro_batch is set, per_device_train_batch_size limits the rows of a micro-batch.
        self.micro_batch_size = min(
            self.minibatch_size,
            max_batch_size,
            self.minibatch_size if keys.max_tokens_per_micro_batch else prompt_batch_size,
        )
        self.forward_size = min(self.completion_count, keys.local_rollout_forward_batch_size, max_batch_size)
        self.policy = stage_tracer(models.policy, "policy", keys, weight_dtype(keys, models.policy), self.bf16)
        self.critic, self.critic_shares_base = self._trace_critic(models)
        # A critic on the policy's trunk computes values during sampling, but in a separate pass if another engine
        # samples or log-probabilities are recomputed.
        recomputes = keys.recompute_logprobs or keys.rollout_engine != "native"
        self.values_model = self.critic or (self.policy if recomputes else None)
        self.has_adapter = self.policy.spec.adapter is not None
        starts_from_reward = keys.critic != "policy" and any(
            reward.can_initialize_critic for reward in models.reward_models
        )
        self._copies_policy = (
            self.has_adapter and self.critic is not None and models.value_model is None and not starts_from_reward
        )
        conflicts = {
            "use_peft": self.has_adapter, "critic shared": self.critic is None, "offload_frozen": keys.offload_frozen
        }  # fmt: skip
        self.shard_count = count_shards("ppo", keys, device, conflicts)
        self.has_reference = has_reference(keys, has_ref_model=False)
        self.reference = None
        if self.has_reference and not self.has_adapter:
            keeps_dtype = self.bf16 and models.policy_is_unmodified and models.policy.dtype != "float32"
            dtype = "bfloat16" if keeps_dtype else "float32"
            reference_keys = SimpleNamespace(use_peft=False, attn_implementation=keys.attn_implementation)
            self.reference = stage_tracer(models.policy, "policy", reference_keys, dtype, self.bf16, is_trainable=False)
        reward_keys = SimpleNamespace(use_peft=False)
        self.reward_models = {
            "reward model" if number == 1 else f"reward model {number}": stage_tracer(
                reward.shape, "classifier", reward_keys, reward.shape.dtype, False, is_trainable=False
            )
            for number, reward in enumerate(models.reward_models, start=1)
        }

    def _trace_critic(self, models: PPOModels) -> tuple[Tracer | None, bool]:
        """Returns the critic (None for a head on the policy), and whether it shares the reward model's weights."""
        keys = self.keys
        reward_shape = next((reward.shape for reward in models.reward_models if reward.can_initialize_critic), None)
        shape = models.value_model
        if shape is None and keys.critic != "shared":
            if reward_shape is not None and keys.critic != "policy":
                shape = reward_shape
            elif weight_quantization(keys) is None:  # quantized weights cannot be copied
                shape = models.policy
        if shape is None:
            return None, False
        critic_keys = SimpleNamespace(**{**vars(keys), "use_peft": keys.use_peft and keys.critic_lora})
        shares_base = critic_keys.use_peft and shape is reward_shape and (self.bf16 or shape.dtype == "float32")
        dtype = shape.dtype if shares_base else "float32"
        return stage_tracer(shape, "classifier", critic_keys, dtype, self.bf16), shares_base

    def plan(self) -> StagePlan:
        keys = self.keys
        unquantized_keys = SimpleNamespace(optim=keys.optim)  # load_in_4bit and load_in_8bit apply only to the policy
        full_memory = {"policy": resident_memory(self.policy, keys)}
        if self.critic is not None:
            full_memory["critic"] = resident_memory(self.critic, unquantized_keys, shares_base=self.critic_shares_base)
        if self.reference is not None:
            quantization = "8bit" if keys.ref_load_in_8bit else None
            full_memory["reference"] = resident_memory(self.reference, unquantized_keys, quantization=quantization)
        for name, reward_model in self.reward_models.items():
            full_memory[name] = resident_memory(reward_model, unquantized_keys)
        self.memory_by_model = {name: model.per_device(self.shard_count) for name, model in full_memory.items()}
        phases = {
            **({"load": self._loading_phase()} if self._copies_policy else {}),
            "sample": self._sampling_phase(),
            **({"values": self._values_phase(self.values_model)} if self.values_model else {}),
            **({"reference": self._reference_phase()} if self.has_reference else {}),
            **({"reward": self._reward_phase()} if self.reward_models else {}),
            "update": self._update_phase(),
        }
        batch = {
            "prompt": self.prompt_length, "response": self.response_length, "rows": self.completion_count,
            "sampled_rows": self._sampling_shape()[0],
            "micro_batch": self.micro_batch_size, "forward_rows": self.forward_size,
            **known_updates(keys, self.completion_count * self.device.count),
        }  # fmt: skip
        peaks = {name: add_process_memory(self.device, phase, self.shard_count) for name, phase in phases.items()}
        peaks |= saving_phase(self.device, self.shard_count, self._trained_memory(), self._frozen_weight_bytes())
        return StagePlan("ppo", self.memory_by_model, peaks, batch, self.work(), self.bf16)

    # Memory that stays on the device

    def _trained_memory(self) -> list[ModelMemory]:
        return [self.memory_by_model[name] for name in ("policy", "critic") if name in self.memory_by_model]

    def _frozen_weight_bytes(self, *in_use: str) -> float:
        """Returns the bytes of the frozen models' weights; with offload_frozen, only of the models in use."""
        names = [name for name in self.memory_by_model if name not in ("policy", "critic")]
        offloads = self.keys.offload_frozen and not self.critic_shares_base
        return sum(self.memory_by_model[name].weights for name in names if not offloads or name in in_use)

    def _baseline_memory(self, *in_use: str, gathered: Tracer | None = None) -> PhaseMemory:
        """Returns the memory of a phase besides its pass: weights, optimizer state, and the cache of CUDA graphs.

        `in_use` names the frozen models that the phase runs. The shards of the model `gathered` are gathered to run it.
        """
        trained = self._trained_memory()
        weights = sum(model.weights for model in trained) + self._frozen_weight_bytes(*in_use)
        if gathered is not None and self.shard_count > 1:
            weights += bytes_per_weight(gathered) * gathered.counts.parameters  # in addition to its shard
        graph_cache = self._graph_cache_shape()
        cache = 0 if graph_cache is None else math.prod(graph_cache) * self._kv_bytes_per_token()
        return PhaseMemory(weights=weights, optimizer=sum(model.optimizer for model in trained), cache=cache)

    def _kv_bytes_per_token(self) -> float:
        """Returns the bytes of a token's keys and values over all layers."""
        bytes_per_value = BFLOAT16 if self.bf16 else bytes_per_weight(self.policy)
        return bytes_per_value * self.policy.counts.kv_values

    def _graph_cache_shape(self) -> tuple[int, int] | None:
        """Returns the rows and columns of the KV cache that CUDA graphs keep between rollouts; None without graphs."""
        keys, row_count = self.keys, round_rows(self.completion_count)
        if self.device.cpu or keys.rollout_engine != "native" or not keys.rollout_graphs or self.shard_count > 1:
            return None
        # Graphs are captured only for row counts that `round_rows` returns and for multiples of COLUMN_MULTIPLE.
        column_count = -(-self.length // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        if keys.max_rollout_batch_tokens is not None:
            while row_count > 1 and row_count * column_count > keys.max_rollout_batch_tokens:
                row_count = next(fewer for fewer in range(row_count - 1, 0, -1) if round_rows(fewer) == fewer)
        return row_count, column_count

    def _sampling_shape(self) -> tuple[int, int]:
        """Returns the number of rows that are sampled at once, and the number of columns of their KV cache."""
        if (graph_cache := self._graph_cache_shape()) is not None:
            return min(graph_cache[0], self.completion_count), graph_cache[1]
        limit = self.keys.max_rollout_batch_tokens
        row_count = self.completion_count if limit is None else min(self.completion_count, max(limit // self.length, 1))
        # A full cache is replaced by one that has a column for the new token and SPARE_COLUMNS more (`InPlaceLayer`).
        growth_count = max(math.ceil((self.response_length - 1 - SPARE_COLUMNS) / (SPARE_COLUMNS + 1)), 0)
        return row_count, self.prompt_length + SPARE_COLUMNS + growth_count * (SPARE_COLUMNS + 1)

    # Phases

    def _loading_phase(self) -> PhaseMemory:
        """Returns the memory while the critic is made from a copy of the policy, into which the adapter is merged."""
        policy, critic = (self.memory_by_model[name].weights for name in ("policy", "critic"))
        return PhaseMemory(weights=2 * policy + critic + self._frozen_weight_bytes())

    def _sampling_phase(self) -> PhaseMemory:
        baseline, (row_count, column_count) = self._baseline_memory(gathered=self.policy), self._sampling_shape()
        prompt_count = math.ceil(row_count / self.keys.num_generations)  # all completions of a prompt share its prefill
        prefill = self.policy.forward_pass(batch_size=prompt_count, length=self.prompt_length, bf16=self.bf16)
        step = self.policy.decode_step(batch_size=row_count, length=self.length, bf16=self.bf16)
        counts = self.policy.counts
        cache = baseline.cache or row_count * column_count * self._kv_bytes_per_token()
        if not baseline.cache and column_count > self.prompt_length + SPARE_COLUMNS:
            # The cache grows layer by layer: each layer is copied into a larger buffer.
            step = replace(step, peak=step.peak + round(cache / counts.layers))
        # During prefill the cache is only as long as the prompts.
        unused_cache = 0 if baseline.cache else cache * (1 - (self.prompt_length + SPARE_COLUMNS) / column_count)
        working_bytes = max(step.peak, prefill.peak - unused_cache)
        logits = SAMPLING_TENSORS * FLOAT32 * row_count * counts.vocabulary
        return replace(baseline, activations=working_bytes, cache=cache, logits=logits)

    def _values_phase(self, model: Tracer) -> PhaseMemory:
        forward = model.forward_pass(batch_size=self.forward_size, length=self.length, bf16=self.bf16)
        return replace(self._baseline_memory(gathered=model), activations=forward.peak)

    def _reference_phase(self) -> PhaseMemory:
        model = self.reference or self.policy
        forward = model.forward_pass(batch_size=self.forward_size, length=self.length, bf16=self.bf16)
        baseline, casts = self._baseline_memory("reference", gathered=model), 0
        if self.critic is not None:  # autocast keeps bfloat16 copies of the critic's weights during this pass
            casts = self.critic.forward_pass(batch_size=self.forward_size, length=self.length, bf16=self.bf16).casts
        logits = self._logit_bytes(self.forward_size, is_training=False)
        return replace(baseline, activations=forward.peak + casts, logits=logits)

    def _reward_phase(self) -> PhaseMemory:
        peaks = []
        for name, model in self.reward_models.items():
            max_length = getattr(model.config.get_text_config(), "max_position_embeddings", None) or self.length
            forward = model.forward_pass(batch_size=self.forward_size, length=min(self.length, max_length), bf16=False)
            peaks.append(replace(self._baseline_memory(name, gathered=model), activations=forward.peak))
        return max(peaks, key=lambda peak: peak.total)

    def _logit_bytes(self, rows: int, *, is_training: bool) -> float:
        """Returns the peak bytes of the logits in a forward pass, or in a training pass with their gradients."""
        tokens, counts = rows * self.response_length, self.policy.counts
        full_kl = is_training and self.keys.kl_in == "loss" and self.keys.kl_estimator == "full"
        # A sharded or adapted head, and a KL over the full vocabulary, need all logits at once.
        if self.shard_count > 1 or full_kl or _adapts_head(self.keys):
            # The logits, the scaled logits, and four tensors of this size for the entropy.
            return 6 * FLOAT32 * tokens * counts.vocabulary * (2 if full_kl else 1)
        # As in `chunked_logprobs.tokens_per_chunk`, a chunk has at least as many tokens as the model's width.
        logits_per_chunk = CHUNK_ON_CPU if self.device.cpu else CHUNK_ON_ACCELERATOR
        chunk_tokens = min(tokens, max(counts.width, logits_per_chunk // counts.vocabulary))
        # Logits and probabilities are float32. In bfloat16, the head's weight is cast, and so are the gradients of the
        # logits and of the head's weight.
        logit_bytes = chunk_tokens * counts.vocabulary * (2 * FLOAT32 + (BFLOAT16 if self.bf16 and is_training else 0))
        head_casts = (2 if is_training else 1) if self.bf16 else 0
        return logit_bytes + head_casts * BFLOAT16 * counts.vocabulary * counts.width

    def _update_phase(self) -> PhaseMemory:
        counts, keys = self.policy.counts, self.keys
        accumulates = self.micro_batch_size < self.minibatch_size or self.shard_count > 1
        passes = [
            TrainingPass()
            if model is None
            else model.training_pass(
                batch_size=self.micro_batch_size,
                length=self.length,
                bf16=self.bf16,
                checkpointing=bool(keys.gradient_checkpointing),
                accumulates=accumulates,
            )
            for model in (self.policy, self.critic)
        ]
        head_bytes = memory.head_gradient_bytes(
            tokens=self.micro_batch_size * self.response_length,
            counts=counts,
            trains_head=counts.trained == counts.parameters,
        )
        policy, critic = (self.memory_by_model.get(name, NO_MEMORY) for name in ("policy", "critic"))
        exchange_bytes = policy.gradients + critic.gradients if self.device.count > 1 and self.shard_count == 1 else 0
        peak = memory.update_memory(
            policy,
            critic,
            (passes[0], passes[1]),
            frozen_bytes=self._frozen_weight_bytes(),
            logits=self._logit_bytes(self.micro_batch_size, is_training=True),
            head_bytes=head_bytes,
            accumulates=accumulates,
            exchange_bytes=exchange_bytes,
            cache=self._baseline_memory().cache,
        )
        return replace(peak, weights=peak.weights + gathered_bytes(self.shard_count, self.policy, self.critic))

    def work(self) -> Work:
        keys, policy = self.keys, self.policy.counts
        rows_at_once, _ = self._sampling_shape()
        tokens, response_tokens = self.completion_count * self.length, self.completion_count * self.response_length
        sampling_batches = math.ceil(self.completion_count / rows_at_once)
        head_flops = 2 * response_tokens * policy.width * policy.vocabulary
        models = (self.values_model, *self.reward_models.values())
        forward_only_counts = [model.counts for model in models if model is not None]
        if self.has_reference:
            forward_only_counts.append(policy)
        trained_counts = [model.counts for model in (self.policy, self.critic) if model is not None]
        epochs = keys.num_ppo_epochs
        training_flops = sum(
            forward_flops(counts, tokens, self.length) * training_cost(counts, keys) for counts in trained_counts
        )
        # On average, a response token attends to (prompt_length + length) / 2 tokens; `forward_flops` divides by 2.
        return Work(
            prefill=forward_flops(policy, self.prompt_count * self.prompt_length, self.prompt_length),
            decode=forward_flops(policy, response_tokens, self.length + self.prompt_length) + head_flops,
            layer_steps=sampling_batches * self.response_length * policy.layers,
            bytes_read=sampling_batches * self.response_length * (bytes_per_weight(self.policy) * policy.parameters)
            + response_tokens * (self.length + self.prompt_length) / 2 * self._kv_bytes_per_token(),
            forward_only=sum(forward_flops(counts, tokens, self.length) for counts in forward_only_counts),
            forward_only_head=head_flops if self.has_reference else 0,
            update=epochs * training_flops,
            update_head=epochs * head_flops * 3,
            parameter_updates=epochs * keys.num_mini_batches * sum(counts.trained for counts in trained_counts),
        )


def _adapts_head(keys: SimpleNamespace) -> bool:
    """Whether LoRA adapts the LM head, or trains it in full (`lora_modules_to_save`)."""
    modules = [*(keys.lora_modules_to_save or ()), *(keys.lora_target_modules or ())]
    return bool(keys.use_peft and {"lm_head", "embed_out"} & {*modules})
