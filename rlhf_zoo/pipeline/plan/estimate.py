"""Estimates the memory and the work of the SFT and reward stages. `plan.ppo` uses some of these functions.

This module mirrors `rlhf_zoo.ppo`, `modeling.logprobs`, `modeling.sampling` and trl's trainers: the models that a stage
holds, and how it splits a batch.
"""

import math
from collections.abc import Iterable
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
from .shapes import Shape
from .tracing import Tracer, tracer

if TYPE_CHECKING:
    from peft import LoraConfig

#: trl computes the head in tiles: tokens per tile, vocabulary columns per tile, and tiles in memory at once.
TRL_TOKENS, TRL_COLUMNS, TRL_TILES = 4096, 32768, 3
#: Bytes of a CPU process whose models have almost no weights: imported libraries, their buffers, data and the trainer's
#: objects (benchmarks/plan_check.py, the setting `nothing`).
PROCESS_ON_CPU = 524 * 2**20
#: Heap fragmentation on a CPU, as a share of the bytes that an update allocates and frees. glibc keeps blocks below
#: 32 MiB in its heap, where gradients lie between activations. Giving each block its own mapping
#: (MALLOC_MMAP_THRESHOLD_) avoids fragmentation. Fitted to the memory that `make bench` measured (docs/plan.md).
FRAGMENTATION = 0.5


def sft_plan(keys: SimpleNamespace, base: Shape, device: Device) -> StagePlan:
    """Plans SFT, which trl's trainer runs.

    Args:
        keys: The stage's keys, as attributes.
        base: The model that the stage starts from.
        device: The devices of the stage.

    Raises:
        ZooError: The model cannot be planned, or fsdp2 does not support the keys.
    """
    rows, micro_batches = divide_batch(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
    length = keys.max_length or base.context
    bf16, dtype = computes_in_bfloat16(keys, device), weight_dtype(keys, base)
    model = stage_tracer(base, "policy", keys, dtype, bf16)
    tile = min(rows * length, TRL_TOKENS) * min(TRL_COLUMNS, model.counts.vocabulary if device.cpu else TRL_COLUMNS)
    trains_head = model.counts.trained == model.counts.parameters
    head_bytes: float = TRL_TILES * tile * (BFLOAT16 if bf16 else FLOAT32)
    head_bytes += memory.head_gradient(tokens=rows * length, counts=model.counts, trains_head=trains_head)
    return _plan_supervised(
        "sft", keys, model, device, rows=rows, length=length, micro_batches=micro_batches, head_bytes=head_bytes
    )


def reward_plan(keys: SimpleNamespace, base: Shape, device: Device) -> StagePlan:
    """Plans the reward model, which trl's trainer trains. Each pair takes two rows, one per text.

    Args:
        keys: The stage's keys, as attributes.
        base: The model that the stage starts from.
        device: The devices of the stage.

    Raises:
        ZooError: The model cannot be planned, or fsdp2 does not support the keys.
    """
    rows, micro_batches = divide_batch(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
    length = min(keys.max_length or base.context, base.context)
    model = stage_tracer(base, "classifier", keys, weight_dtype(keys, base), computes_in_bfloat16(keys, device))
    return _plan_supervised(
        "reward", keys, model, device, rows=2 * rows, length=length, micro_batches=micro_batches, head_bytes=0
    )


def _plan_supervised(
    stage: str,
    keys: SimpleNamespace,
    model: Tracer,
    device: Device,
    *,
    rows: int,
    length: int,
    micro_batches: int,
    head_bytes: float,
) -> StagePlan:
    bf16, counts = computes_in_bfloat16(keys, device), model.counts
    shards = shard_count(stage, keys, device, use_peft=model.spec.adapter is not None)
    accumulates = micro_batches > 1 or shards > 1
    training_pass = model.training_pass(
        rows=rows,
        length=length,
        bf16=bf16,
        checkpointing=bool(keys.gradient_checkpointing),
        accumulates=accumulates,
    )
    resident = resident_memory(model, keys).per_device(shards)
    # Gradients of shards are exchanged layer by layer, so the full gradients never exist at once.
    exchange_buffers = resident.gradients if device.count > 1 and shards == 1 else 0
    peak = memory.training_memory(
        resident, training_pass, head_bytes=head_bytes, accumulates=accumulates, exchange_buffers=exchange_buffers
    )
    peak = replace(peak, weights=peak.weights + gathered_bytes(shards, model))
    tokens = rows * length * micro_batches
    trunk_flops = forward_flops(counts, tokens, length) * training_cost(counts, keys)
    work = Work(
        update=trunk_flops,
        update_head=2 * tokens * counts.width * counts.vocabulary * 3 if head_bytes else 0,
        trained=counts.trained,
    )
    batch: dict[str, float] = {"rows": rows, "tokens": length, "micro_batches": micro_batches}
    batch |= known_updates(keys) or {"epochs": keys.num_train_epochs}
    phases = {"step": add_process_memory(device, peak, shards), **saving_phase(device, shards, [resident])}
    return StagePlan(stage, {"model": resident}, phases, batch, work, bf16)


def known_updates(keys: SimpleNamespace, episodes: int = 0) -> dict[str, int]:
    """Returns the number of updates, if the keys alone determine it.

    Args:
        keys: The stage's keys.
        episodes: Completions of a PPO update; 0 for other stages.

    Returns:
        {"updates": the number}; {} if the number depends on the number of rows.
    """
    if episodes and keys.total_episodes is not None:
        return {"updates": math.ceil(keys.total_episodes / episodes)}
    return {"updates": keys.max_steps} if keys.max_steps > 0 else {}


def shard_count(stage: str, keys: SimpleNamespace, device: Device, **unsupported: bool) -> int:
    """Returns the number of devices over which the weights are sharded; 1 without fsdp2.

    Args:
        stage: Name of the stage.
        keys: The stage's keys.
        device: The devices of the stage.
        **unsupported: Setting that fsdp2 does not support -> whether the setting is on.

    Raises:
        ZooError: An unsupported setting is on, the optimizer cannot be sharded, or there is only one device.
    """
    if not keys.fsdp2:
        return 1
    subject = f"fsdp2 of the stage {stage}"
    for name in (name for name, is_set in unsupported.items() if is_set):
        raise ZooError(f"{subject} does not work with {name}: remove one of them.")
    if str(keys.optim) not in SHARDABLE_OPTIMIZERS:
        raise ZooError(
            f"{subject} cannot shard the optimizer {keys.optim}: set optim to one of {', '.join(SHARDABLE_OPTIMIZERS)}."
        )
    if device.count == 1:
        raise ZooError(
            f"{subject} shards weights over several devices, but this plan is for one device: set --gpu NAME:COUNT."
        )
    return device.count


def gathered_bytes(shards: int, *models: Tracer | None) -> float:
    """Returns the bytes that an update gathers from shards.

    Every model gathers its embeddings (which stay until the backward pass), two layers, and the gradients of one layer.
    One model at a time also has the gradients of its embeddings, and a copy of them for the exchange between processes.

    Args:
        shards: Number of devices over which the weights are sharded.
        *models: The trained models; None is skipped.
    """
    if shards == 1:
        return 0
    sizes = [model.counts for model in models if model is not None]
    layers = sum(3 * (counts.parameters - counts.embeddings) / counts.layers for counts in sizes)
    embeddings = [counts.embeddings for counts in sizes]
    return FLOAT32 * (sum(embeddings) + layers + 2 * max(embeddings))


def saving_phase(
    device: Device, shards: int, models: Iterable[ModelMemory], frozen: float = 0
) -> dict[str, PhaseMemory]:
    """Estimates the first process's peak of host memory while it saves the optimizer state of all shards.

    Args:
        device: The devices of the stage.
        shards: Number of devices over which the weights are sharded.
        models: Bytes of each trained model on a device.
        frozen: Bytes of the frozen models' weights.

    Returns:
        {"save": the peak}; {} without shards or on a GPU.
    """
    if shards == 1 or not device.cpu:
        return {}
    weights, optimizer = frozen, 0.0
    for model in models:
        weights, optimizer = weights + model.weights, optimizer + model.optimizer * (1 + shards)
    return {"save": PhaseMemory(weights=weights, optimizer=optimizer, process=PROCESS_ON_CPU)}


def forward_flops(counts: Counts, tokens: float, length: float) -> float:
    """Returns the FLOPs of a trunk's forward pass: two per weight and token, and attention to length/2 tokens.

    Args:
        counts: The model's size.
        tokens: Tokens of the whole batch.
        length: Tokens of a row.
    """
    matrices = counts.linear if counts.linear else counts.parameters - counts.embeddings
    return tokens * (2 * matrices + 4 * counts.attention_width * counts.layers * length / 2)


def training_cost(counts: Counts, keys: SimpleNamespace) -> float:
    """Returns the cost of a forward and backward pass, as a multiple of a forward pass's cost.

    Args:
        counts: The model's size.
        keys: The stage's keys.
    """
    trains_all = counts.trained == counts.parameters  # frozen weights need no gradients
    return (3 if trains_all else 2) + bool(keys.gradient_checkpointing)


def add_process_memory(device: Device, phase: PhaseMemory, shards: int = 1) -> PhaseMemory:
    """Adds to a phase the memory that a CPU process takes besides tensors.

    Args:
        device: The devices of the stage.
        phase: The memory of the phase's tensors.
        shards: Number of devices over which the weights are sharded.
    """
    if not device.cpu:
        return phase
    # With shards, each large block gets its own mapping (`modeling.fsdp`), so gradients do not fragment the heap.
    gradients = phase.gradients if shards == 1 else 0
    return replace(phase, process=PROCESS_ON_CPU + FRAGMENTATION * (phase.activations + gradients + phase.logits))


def computes_in_bfloat16(keys: SimpleNamespace, device: Device) -> bool:
    """Whether a stage computes in bfloat16. If the key `bf16` is not set, the device decides.

    Args:
        keys: The stage's keys.
        device: The devices of the stage.
    """
    return device.bfloat16 if keys.bf16 is None else bool(keys.bf16)


def quantization(keys: SimpleNamespace) -> str | None:
    """Returns the precision of quantized weights, "4bit" or "8bit"; None if weights are not quantized.

    Args:
        keys: The stage's keys.
    """
    return "4bit" if getattr(keys, "load_in_4bit", False) else "8bit" if getattr(keys, "load_in_8bit", False) else None


def weight_dtype(keys: SimpleNamespace, shape: Shape) -> str:
    """Returns the dtype in which a stage loads weights.

    Args:
        keys: The stage's keys.
        shape: The model.
    """
    return shape.dtype if keys.dtype == "auto" else keys.dtype


def bytes_per_weight(model: Tracer) -> int:
    """Returns the number of bytes of a weight.

    Args:
        model: The tracer of the model.
    """
    return FLOAT32 if model.spec.dtype == "float32" else BFLOAT16


def stage_tracer(
    shape: Shape, role: str, keys: SimpleNamespace, dtype: str, bf16: bool, *, is_trainable: bool = True
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
        if quantization(keys) is not None:  # the weights are dequantized to the dtype of the computation
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

    names = [name for name in vars(keys) if name.startswith("lora_")]
    model = ModelConfig(**{name: getattr(keys, name) for name in names})  # accepts a single name in place of a list
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
    model: Tracer, keys: SimpleNamespace, *, bits: str | None = None, owns_base: bool = True
) -> ModelMemory:
    """Returns the bytes that a model takes in every phase.

    Args:
        model: The tracer of the model.
        keys: The stage's keys.
        bits: Quantization of a frozen model; None for the quantization in the stage's keys.
        owns_base: False if the model shares its frozen weights with another model.
    """
    counts = model.counts
    state_per_parameter = memory.state_bytes(str(getattr(keys.optim, "value", keys.optim)))
    bits = bits or (quantization(keys) if counts.trained < counts.parameters else None)
    return memory.model_memory(
        counts,
        bytes_per_weight=bytes_per_weight(model),
        state_per_parameter=8 if state_per_parameter is None else state_per_parameter,
        bits=bits,
        owns_base=owns_base,
    )
