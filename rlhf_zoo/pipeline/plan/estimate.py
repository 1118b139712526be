"""Estimates the memory and the work of the SFT and reward stages, and has functions that `plan.ppo` also uses.

It mirrors trl's trainers: how they split a batch, and how they compute the head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ...errors import ZooError
from ...modeling.distributed import SHARDABLE_OPTIMIZERS
from ...runs.data.batch_share import divide_batch
from . import memory
from .devices import Device
from .memory import BFLOAT16, FLOAT32, Counts, ModelMemory, PhaseMemory
from .result import StagePlan, Work
from .shapes import ModelShape
from .tracing import Tracer, tracer

if TYPE_CHECKING:
    from peft import LoraConfig

#: trl computes the head in tiles: tokens per tile, vocabulary columns per tile, and tiles in memory at once.
TRL_TOKENS, TRL_COLUMNS, TRL_TILES = 4096, 32768, 3
#: Bytes assumed for a CPU process besides tensors: imported libraries, their buffers, data and the trainer's objects.
#: A process whose models have almost no weights took 508 MiB (`python benchmarks/plan_check.py nothing`).
CPU_PROCESS_BYTES = 524 * 2**20
#: Heap fragmentation on a CPU, as a share of the bytes that an update allocates and frees. glibc keeps blocks below
#: 32 MiB in its heap, where gradients lie between activations. Giving each block its own mapping
#: (MALLOC_MMAP_THRESHOLD_) avoids fragmentation. Fitted to the memory that `make bench` measured (docs/plan.md).
FRAGMENTATION = 0.5


def sft_plan(keys: SimpleNamespace, base: ModelShape, device: Device) -> StagePlan:
    """Plans the memory and the work of SFT, which trl's trainer runs.

    Args:
        keys: The stage's keys, as attributes.
        base: The model that the stage starts from.
        device: The devices of the stage.

    Raises:
        ZooError: The model cannot be planned, or fsdp2 does not support the keys.
    """
    batch_size, steps = divide_batch(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
    length = keys.max_length or base.context_length
    bf16, dtype = computes_in_bfloat16(keys, device), weight_dtype(keys, base)
    model = stage_tracer(base, "policy", keys, dtype, bf16)
    columns = min(TRL_COLUMNS, model.counts.vocabulary) if device.cpu else TRL_COLUMNS
    logits_per_tile = min(batch_size * length, TRL_TOKENS) * columns
    trains_head = model.counts.trained == model.counts.parameters
    head_bytes: float = TRL_TILES * logits_per_tile * (BFLOAT16 if bf16 else FLOAT32)
    head_bytes += memory.head_gradient_bytes(tokens=batch_size * length, counts=model.counts, trains_head=trains_head)
    return _plan_supervised(
        "sft", keys, model, device, batch_size, length, accumulation_steps=steps, head_bytes=head_bytes
    )


def reward_plan(keys: SimpleNamespace, base: ModelShape, device: Device) -> StagePlan:
    """Plans the memory and the work of the reward stage, which trl's trainer runs. Each pair takes two rows.

    Args:
        keys: The stage's keys, as attributes.
        base: The model that the stage starts from.
        device: The devices of the stage.

    Raises:
        ZooError: The model cannot be planned, or fsdp2 does not support the keys.
    """
    batch_size, steps = divide_batch(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
    length = min(keys.max_length or base.context_length, base.context_length)
    model = stage_tracer(base, "classifier", keys, weight_dtype(keys, base), computes_in_bfloat16(keys, device))
    return _plan_supervised(
        "reward", keys, model, device, 2 * batch_size, length, accumulation_steps=steps, head_bytes=0
    )


def _plan_supervised(
    stage: str,
    keys: SimpleNamespace,
    model: Tracer,
    device: Device,
    batch_size: int,
    length: int,
    *,
    accumulation_steps: int,
    head_bytes: float,
) -> StagePlan:
    bf16, counts = computes_in_bfloat16(keys, device), model.counts
    shard_count = count_shards(stage, keys, device, {"use_peft": model.spec.adapter is not None})
    accumulates = accumulation_steps > 1 or shard_count > 1
    training_pass = model.training_pass(
        batch_size=batch_size,
        length=length,
        bf16=bf16,
        checkpointing=bool(keys.gradient_checkpointing),
        accumulates=accumulates,
    )
    model_memory = resident_memory(model, keys).per_device(shard_count)
    # Gradients of shards are exchanged layer by layer, so a device never holds copies of all gradients.
    exchange_bytes = model_memory.gradients if device.count > 1 and shard_count == 1 else 0
    peak = memory.training_memory(
        model_memory, training_pass, head_bytes=head_bytes, accumulates=accumulates, exchange_bytes=exchange_bytes
    )
    peak = replace(peak, weights=peak.weights + gathered_bytes(shard_count, model))
    tokens = batch_size * length * accumulation_steps
    trunk_flops = forward_flops(counts, tokens, length) * training_cost(counts, keys)
    work = Work(
        update=trunk_flops,
        update_head=2 * tokens * counts.width * counts.vocabulary * 3 if head_bytes else 0,
        parameter_updates=counts.trained,
    )
    batch: dict[str, float] = {"rows": batch_size, "tokens": length, "micro_batches": accumulation_steps}
    batch |= known_updates(keys) or {"epochs": keys.num_train_epochs}
    phases = {"step": add_process_memory(device, peak, shard_count)}
    phases |= saving_phase(device, shard_count, [model_memory])
    return StagePlan(stage, {"model": model_memory}, phases, batch, work, bf16)


def known_updates(keys: SimpleNamespace, episodes_per_update: int = 0) -> dict[str, int]:
    """Returns the number of updates, if the keys alone determine it.

    Args:
        keys: The stage's keys.
        episodes_per_update: Completions of a PPO update in all processes; 0 for other stages.

    Returns:
        {"updates": the number}; {} if the number depends on the number of rows.
    """
    if episodes_per_update and keys.total_episodes is not None:
        return {"updates": math.ceil(keys.total_episodes / episodes_per_update)}
    return {"updates": keys.max_steps} if keys.max_steps > 0 else {}


def count_shards(stage: str, keys: SimpleNamespace, device: Device, conflicts: Mapping[str, bool]) -> int:
    """Returns the number of devices over which the weights are sharded; 1 without fsdp2.

    Args:
        stage: Name of the stage.
        keys: The stage's keys.
        device: The devices of the stage.
        conflicts: Setting that does not work with fsdp2 -> whether the stage uses it.

    Raises:
        ZooError: A setting conflicts with fsdp2, the optimizer cannot be sharded, or there is only one device.
    """
    if not keys.fsdp2:
        return 1
    subject = f"fsdp2 of the stage {stage}"
    conflict = next((name for name, is_used in conflicts.items() if is_used), None)
    if conflict is not None:
        raise ZooError(f"{subject} does not work with {conflict}: remove one of them.")
    if str(keys.optim) not in SHARDABLE_OPTIMIZERS:
        raise ZooError(
            f"{subject} cannot shard the optimizer {keys.optim}: set optim to one of {', '.join(SHARDABLE_OPTIMIZERS)}."
        )
    if device.count == 1:
        raise ZooError(
            f"{subject} shards weights over several devices, but this plan is for one device: set --gpu NAME:COUNT."
        )
    return device.count


def gathered_bytes(shard_count: int, *models: Tracer | None) -> float:
    """Returns the peak of the bytes that an update gathers from shards, including their gradients.

    Each model gathers its embeddings (which stay until the backward pass), two layers, and the gradients of one layer.
    One model at a time also has the gradients of its embeddings, and a copy of them for the exchange between processes.

    Args:
        shard_count: Number of devices over which the weights are sharded.
        *models: The trained models; None is skipped.
    """
    if shard_count == 1:
        return 0
    model_counts = [model.counts for model in models if model is not None]
    layers = sum(3 * (counts.parameters - counts.embeddings) / counts.layers for counts in model_counts)
    embeddings = [counts.embeddings for counts in model_counts]
    return FLOAT32 * (sum(embeddings) + layers + 2 * max(embeddings))


def saving_phase(
    device: Device, shard_count: int, models: Sequence[ModelMemory], frozen_bytes: float = 0
) -> dict[str, PhaseMemory]:
    """Estimates the first process's peak of host memory while it saves the optimizer state of all shards.

    Args:
        device: The devices of the stage.
        shard_count: Number of devices over which the weights are sharded.
        models: Bytes of each trained model on each device.
        frozen_bytes: Bytes of the frozen models' weights.

    Returns:
        {"save": the peak}; {} without shards or on a GPU.
    """
    if shard_count == 1 or not device.cpu:
        return {}
    weights = frozen_bytes + sum(model.weights for model in models)
    optimizer = (1 + shard_count) * sum(model.optimizer for model in models)
    return {"save": PhaseMemory(weights=weights, optimizer=optimizer, process=CPU_PROCESS_BYTES)}


def forward_flops(counts: Counts, tokens: float, length: float) -> float:
    """Returns the FLOPs of a forward pass without the head: two per weight and token, and attention to length/2 tokens.

    Args:
        counts: The model's size.
        tokens: Tokens of the whole batch.
        length: Tokens of a row.
    """
    linear = counts.linear or counts.parameters - counts.embeddings
    return tokens * (2 * linear + 4 * counts.attention_width * counts.layers * length / 2)


def training_cost(counts: Counts, keys: SimpleNamespace) -> float:
    """Returns the cost of a forward and backward pass, as a multiple of a forward pass's cost.

    Args:
        counts: The model's size.
        keys: The stage's keys.
    """
    trains_all = counts.trained == counts.parameters  # frozen weights need no gradients
    return (3 if trains_all else 2) + bool(keys.gradient_checkpointing)


def add_process_memory(device: Device, phase: PhaseMemory, shard_count: int = 1) -> PhaseMemory:
    """Adds to a phase the memory that a CPU process takes besides tensors.

    Args:
        device: The devices of the stage.
        phase: The memory of the phase's tensors.
        shard_count: Number of devices over which the weights are sharded.
    """
    if not device.cpu:
        return phase
    # With shards, each large block gets its own mapping (`modeling.fsdp`), so gradients do not fragment the heap.
    gradients = phase.gradients if shard_count == 1 else 0
    return replace(phase, process=CPU_PROCESS_BYTES + FRAGMENTATION * (phase.activations + gradients + phase.logits))


def computes_in_bfloat16(keys: SimpleNamespace, device: Device) -> bool:
    """Whether a stage computes in bfloat16. If the key `bf16` is not set, the device decides.

    Args:
        keys: The stage's keys.
        device: The devices of the stage.
    """
    return device.bfloat16 if keys.bf16 is None else bool(keys.bf16)


def weight_quantization(keys: SimpleNamespace) -> str | None:
    """Returns the precision to which a stage quantizes weights, "4bit" or "8bit"; None if it does not quantize them.

    Args:
        keys: The stage's keys.
    """
    return "4bit" if getattr(keys, "load_in_4bit", False) else "8bit" if getattr(keys, "load_in_8bit", False) else None


def weight_dtype(keys: SimpleNamespace, shape: ModelShape) -> str:
    """Returns the dtype in which a stage loads weights.

    Args:
        keys: The stage's keys.
        shape: The model.
    """
    return shape.dtype if keys.dtype == "auto" else keys.dtype


def bytes_per_weight(model: Tracer) -> int:
    """Returns the number of bytes of a weight that is not quantized.

    Args:
        model: The tracer of the model.
    """
    return FLOAT32 if model.spec.dtype == "float32" else BFLOAT16


def stage_tracer(
    shape: ModelShape, role: str, keys: SimpleNamespace, dtype: str, bf16: bool, *, is_trainable: bool = True
) -> Tracer:
    """Returns the tracer of a model as a stage loads it.

    Args:
        shape: The model.
        role: "policy" or "classifier".
        keys: The stage's keys.
        dtype: The dtype of the loaded weights.
        bf16: Whether the stage computes in bfloat16.
        is_trainable: Whether any weight is trained.
    """
    peft_config = None
    if keys.use_peft:
        peft_config = lora_config(keys)
        if weight_quantization(keys) is not None:  # the weights are dequantized to the dtype of the computation
            dtype = "bfloat16" if bf16 else "float32"
    attention = getattr(keys, "attn_implementation", None)
    return tracer(
        shape.config, role, peft_config=peft_config, dtype=dtype, attention=attention, is_trainable=is_trainable
    )


def lora_config(keys: SimpleNamespace) -> "LoraConfig":
    """Returns the adapter that a stage trains.

    The result equals that of trl's `get_peft_config`, whose module takes a second to import.

    Args:
        keys: The stage's keys.
    """
    from peft import LoraConfig
    from trl import ModelConfig

    lora_keys = {name: value for name, value in vars(keys).items() if name.startswith("lora_")}
    model = ModelConfig(**lora_keys)  # converts a list with a single name to the name
    return LoraConfig(
        task_type=model.lora_task_type,
        r=model.lora_r,
        target_modules=model.lora_target_modules,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        bias="none",
        use_rslora=keys.use_rslora,
        use_dora=keys.use_dora,
        modules_to_save=model.lora_modules_to_save,
        target_parameters=model.lora_target_parameters,
    )


def resident_memory(
    model: Tracer, keys: SimpleNamespace, *, quantization: str | None = None, shares_base: bool = False
) -> ModelMemory:
    """Returns the bytes that a model takes outside of its passes.

    Args:
        model: The tracer of the model.
        keys: The stage's keys.
        quantization: Quantization of a frozen model, "4bit" or "8bit"; None for the quantization in the stage's keys.
        shares_base: Whether the model shares its frozen weights with another model, where they are counted.
    """
    counts = model.counts
    state_per_parameter = memory.state_bytes(str(keys.optim))
    if quantization is None and counts.trained < counts.parameters:
        quantization = weight_quantization(keys)
    return memory.model_memory(
        counts,
        bytes_per_weight=bytes_per_weight(model),
        state_per_parameter=8 if state_per_parameter is None else state_per_parameter,
        quantization=quantization,
        shares_base=shares_base,
    )
