"""Formulas for the bytes in a device's memory in each phase of a stage.

With Adam, a trained weight takes four numbers: itself, its gradient and two moments. In float32 these are 16 bytes.
`tracing` measures the bytes that depend on the architecture: those of passes through the layers below the head.
"""

from dataclasses import dataclass, fields

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
#: Prefix of an optimizer's name -> bytes of state per float32 parameter; the first matching prefix applies. The 8-bit
#: optimizers store each moment in a byte, with a float32 scale per block of 256 or more.
OPTIMIZER_STATE = {
    "adamw_torch_8bit": 2.03, "adamw_torch_4bit": 1.06, "adamw_8bit": 2.03, "adamw_bnb_8bit": 2.03,
    "paged_adamw_8bit": 2.03, "adam": 8, "paged_adamw": 8, "ademamix_8bit": 3.05, "ademamix": 12, "lion_8bit": 1.02,
    "paged_lion_8bit": 1.02, "lion": 4, "paged_lion": 4, "adagrad": 4, "rmsprop": 4, "sgd": 0, "adafactor": 0.01,
}  # fmt: skip
#: Bytes of a weight that bitsandbytes quantized, with a float32 scale per block of 64 (4-bit) or per row (8-bit).
BYTES_PER_QUANTIZED_WEIGHT = {"4bit": 0.5 + 4 / 64, "8bit": 1.002}


@dataclass(frozen=True)
class Counts:
    """The size of a model: parameters, and the dimensions that its memory depends on.

    Attributes:
        parameters: All parameters, including an adapter's.
        trained: Trainable parameters.
        linear: Parameters of linear layers, without the head and adapters; of experts, only those that a token uses.
        embeddings: Parameters of the embeddings and the head; tied weights count once.
        layers: Number of transformer layers.
        width: Hidden size.
        vocabulary: Vocabulary size.
        kv_values: Number of values per token in the KV cache, over all layers.
        attention_width: Width of all query heads of a layer together.
    """

    parameters: int
    trained: int
    linear: int
    embeddings: int
    layers: int
    width: int
    vocabulary: int
    kv_values: int
    attention_width: int


@dataclass(frozen=True)
class TrainingPass:
    """Bytes that a forward and backward pass takes in addition to the weights, without the head.

    Attributes:
        saved: Activations that the forward pass saves for the backward pass.
        peak: Peak of the pass, including the gradients that it allocates. A pass that adds to the gradients of an
            earlier micro-batch allocates none.
    """

    saved: int = 0
    peak: int = 0


@dataclass(frozen=True)
class ForwardPass:
    """Bytes that a forward pass without a backward pass takes in addition to the weights.

    Attributes:
        casts: bfloat16 copies of trained weights, which autocast keeps until the end of the phase.
        peak: The peak, including `casts`.
    """

    casts: int = 0
    peak: int = 0


@dataclass(frozen=True)
class ModelMemory:
    """Bytes that a model takes outside of its passes.

    Attributes:
        weights: The weights.
        gradients: The gradients, which exist only during an update.
        optimizer: The optimizer's state.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def per_device(self, device_count: int) -> "ModelMemory":
        """Returns the bytes on each device if the model is divided evenly.

        Args:
            device_count: Number of devices that share the model.
        """
        return ModelMemory(self.weights / device_count, self.gradients / device_count, self.optimizer / device_count)


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on a device at the peak of a phase.

    Attributes:
        weights: Weights of all models on the device.
        gradients: Gradients of the trained models, and buffers to exchange them.
        optimizer: Optimizer state.
        activations: Activations of the passes.
        cache: The KV cache.
        logits: Logits and tensors computed from them; in a PPO update, the gradients of `head_gradient_bytes` instead;
            in a step of SFT, both.
        process: Memory that a CPU process takes besides tensors; 0 on a GPU.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    cache: float = 0
    logits: float = 0
    process: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, entry.name) for entry in fields(self))


def state_bytes(optimizer: str) -> float | None:
    """Returns the bytes of optimizer state per trained float32 parameter; None for an unknown optimizer.

    Args:
        optimizer: Value of the key `optim`.
    """
    return next((size for name, size in OPTIMIZER_STATE.items() if optimizer.startswith(name)), None)


def model_memory(
    counts: Counts,
    *,
    bytes_per_weight: float,
    state_per_parameter: float,
    quantization: str | None = None,
    shares_base: bool = False,
) -> ModelMemory:
    """Returns the bytes that a model takes outside of its passes.

    Args:
        counts: The model's size.
        bytes_per_weight: Bytes of a weight, except of a trained adapter's weights, which always take `FLOAT32`.
        state_per_parameter: Bytes of optimizer state per float32 parameter, from `state_bytes`.
        quantization: The precision of quantized linear layers, a key of `BYTES_PER_QUANTIZED_WEIGHT`; None if they are
            not quantized.
        shares_base: Whether the model shares its frozen weights with another model, where they are counted.
    """
    is_adapter = 0 < counts.trained < counts.parameters
    frozen_count = counts.parameters - counts.trained
    trained_bytes = counts.trained * (FLOAT32 if is_adapter else bytes_per_weight)
    quantized_count = min(counts.linear, frozen_count) if quantization else 0
    frozen_bytes = (frozen_count - quantized_count) * bytes_per_weight
    frozen_bytes += quantized_count * BYTES_PER_QUANTIZED_WEIGHT.get(quantization or "", 0)
    return ModelMemory(
        weights=(0 if shares_base else frozen_bytes) + trained_bytes,
        gradients=trained_bytes,
        optimizer=trained_bytes * state_per_parameter / FLOAT32,
    )


def head_gradient_bytes(*, tokens: int, counts: Counts, trains_head: bool) -> float:
    """Returns the bytes of the head's and hidden states' gradients, which the loss sums over chunks in float32.

    Args:
        tokens: Number of tokens whose log-probabilities are computed.
        counts: The model's size.
        trains_head: Whether the head is trained.
    """
    return FLOAT32 * (tokens * counts.width * 3 + (counts.vocabulary * counts.width if trains_head else 0))


def update_memory(
    policy: ModelMemory,
    critic: ModelMemory,
    passes: tuple[TrainingPass, TrainingPass],
    *,
    frozen_bytes: float,
    logits: float,
    head_bytes: float,
    accumulates: bool,
    exchange_bytes: float = 0,
    cache: float = 0,
) -> PhaseMemory:
    """Returns the peak of PPO's update.

    The update runs the forward passes of policy and critic, then the backward passes of critic and policy.

    Args:
        policy: Bytes that the policy takes outside of its passes.
        critic: Bytes that the critic takes outside of its passes.
        passes: The training passes of the policy and of the critic.
        frozen_bytes: Bytes of the frozen models' weights.
        logits: Peak bytes of the logits.
        head_bytes: Bytes from `head_gradient_bytes`.
        accumulates: Whether gradients of an earlier micro-batch exist.
        exchange_bytes: Bytes of the buffers for exchanging gradients between processes.
        cache: Bytes of a KV cache that stays between rollouts.
    """
    policy_pass, critic_pass = passes
    gradients = policy.gradients + critic.gradients
    critic_peak = policy_pass.saved + head_bytes + max(logits, critic_pass.peak)
    policy_peak = policy_pass.peak + head_bytes
    if accumulates:
        working_bytes = max(critic_peak, policy_peak)
    else:
        working_bytes = max(critic_peak, critic.gradients + policy_peak, gradients) - gradients
    return PhaseMemory(
        weights=policy.weights + critic.weights + frozen_bytes,
        gradients=gradients + exchange_bytes,
        optimizer=policy.optimizer + critic.optimizer,
        activations=working_bytes - min(head_bytes, working_bytes),
        logits=min(head_bytes, working_bytes),
        cache=cache,
    )


def training_memory(
    model: ModelMemory, training_pass: TrainingPass, *, head_bytes: float, accumulates: bool, exchange_bytes: float = 0
) -> PhaseMemory:
    """Returns the peak of a training step of SFT or of the reward model.

    Args:
        model: Bytes that the model takes outside of its passes.
        training_pass: The model's training pass.
        head_bytes: Bytes that the head and the loss take in addition to the pass.
        accumulates: Whether gradients of an earlier micro-batch exist.
        exchange_bytes: Bytes of the buffers for exchanging gradients between processes.
    """
    working_bytes = training_pass.saved + head_bytes
    if accumulates:
        working_bytes = max(working_bytes, training_pass.peak + head_bytes)
    else:
        working_bytes = max(working_bytes, training_pass.peak + head_bytes, model.gradients) - model.gradients
    return PhaseMemory(
        weights=model.weights,
        gradients=model.gradients + exchange_bytes,
        optimizer=model.optimizer,
        activations=max(working_bytes - head_bytes, 0),
        logits=min(head_bytes, working_bytes),
    )
