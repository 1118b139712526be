"""Formulas for the bytes that a device holds in each phase of a stage.

Under Adam a trained weight takes four numbers, itself, its gradient and two moments: 16 bytes in float32. What depends
on the architecture, a pass through the layers below the head, is counted by `tracing`.
"""

from dataclasses import dataclass, fields

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
#: Bytes of optimizer state per float32 parameter; the first entry that is a prefix of the optimizer's name applies.
#: The 8-bit ones hold two moments, and a float32 scale for each block of 256 or more.
STATES = {
    "adamw_torch_8bit": 2.03, "adamw_torch_4bit": 1.06, "adamw_8bit": 2.03, "adamw_bnb_8bit": 2.03,
    "paged_adamw_8bit": 2.03, "adam": 8, "paged_adamw": 8, "ademamix_8bit": 3.05, "ademamix": 12, "lion_8bit": 1.02,
    "paged_lion_8bit": 1.02, "lion": 4, "paged_lion": 4, "adagrad": 4, "rmsprop": 4, "sgd": 0, "adafactor": 0.01,
}  # fmt: skip
#: Bytes of a weight that bitsandbytes quantized, with a float32 scale for each block of 64 (4-bit) or each row (8-bit).
BITS = {"4bit": 0.5 + 4 / 64, "8bit": 1.002}


@dataclass(frozen=True)
class Counts:
    """The size of a model: parameters, and the dimensions that its memory depends on.

    Attributes:
        parameters: All of them, an adapter's included.
        trained: Those that train.
        linear: Those in linear layers, without the head.
        embeddings: Those in the embeddings and the head; tied ones count once.
        layers: Transformer layers.
        width: Hidden size.
        vocabulary: Tokens.
        kv_values: Keys and values of one token in the KV cache, summed over the layers.
        attention_width: Query width, summed over the heads of a layer.
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
    """Bytes that a forward and backward pass takes beyond the weights, without the head.

    Attributes:
        saved: Held from the forward to the backward pass.
        first_peak: The peak of the first micro-batch, including the gradients that it allocates.
        repeat_peak: The peak of a later one, which adds to gradients that exist; they are not included.
        gradients: What the pass leaves behind.
    """

    saved: int = 0
    first_peak: int = 0
    repeat_peak: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class ForwardPass:
    """Bytes of a pass without a backward one.

    Attributes:
        casts: bfloat16 copies of trained weights, which stay for the phase.
        peak: The peak, casts included.
    """

    casts: int = 0
    peak: int = 0


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a model that stay from phase to phase.

    Attributes:
        weights: Parameters.
        gradients: Gradients; present only during the update.
        optimizer: The optimizer's state.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def per_device(self, devices: int) -> "ModelMemory":
        """Divides the bytes evenly.

        Args:
            devices: How many devices share the model.

        Returns:
            The share of each.
        """
        return ModelMemory(self.weights / devices, self.gradients / devices, self.optimizer / devices)


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on a device at the peak of a phase.

    Attributes:
        weights: The weights of every model on the device.
        gradients: The gradients of the models that train, and buffers to exchange them.
        optimizer: Optimizer state.
        activations: Tensors of the passes.
        cache: The KV cache.
        logits: Logits, what the loss computes from them, and the head's gradient.
        process: What a CPU process holds besides tensors; 0 on a GPU.
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
    """Looks up the optimizer's state size.

    Args:
        optimizer: Its name, as the key `optim`.

    Returns:
        Bytes of state per trained float32 parameter; None for an unknown optimizer.
    """
    return next((size for name, size in STATES.items() if optimizer.startswith(name)), None)


def model_memory(
    counts: Counts, *, size: float, state: float, bits: str | None = None, own: bool = True
) -> ModelMemory:
    """The bytes of a model that stay from phase to phase.

    Args:
        counts: The model's size.
        size: Bytes of a weight; trained adapter weights take `FLOAT32` whatever it is.
        state: Bytes of optimizer state per parameter, from `state_bytes`.
        bits: The precision of quantized linear layers, a key of `BITS`; None without quantization.
        own: False for a model whose frozen weights are shared with another.
    """
    adapter = 0 < counts.trained < counts.parameters
    frozen = counts.parameters - counts.trained
    trained_size = FLOAT32 if adapter else size
    linear = min(counts.linear, frozen) if bits else 0
    frozen_bytes = (frozen - linear) * size + linear * BITS.get(bits or "", 0)
    return ModelMemory(
        weights=(frozen_bytes if own else 0) + counts.trained * trained_size,
        gradients=counts.trained * trained_size,
        optimizer=counts.trained * state * trained_size / FLOAT32,
    )


def chunk_logits(*, tokens: int, counts: Counts, chunk: int, half: bool, learns: bool) -> float:
    """Bytes of the logits where `modeling.logprobs` computes them in chunks of tokens.

    Scores and probabilities are float32. In bfloat16 the head's weight is cast for the pass, and so is its gradient.

    Args:
        tokens: Tokens whose log-probabilities are computed.
        counts: The model's size.
        chunk: The most logits held at a time.
        half: Whether the pass runs in bfloat16.
        learns: Whether the head trains.
    """
    rows = min(tokens, max(counts.width, chunk // counts.vocabulary))
    size = counts.vocabulary * counts.width
    working = rows * counts.vocabulary * (2 * FLOAT32 + (BFLOAT16 if half and learns else 0))
    return working + (BFLOAT16 * size * (2 if learns else 1) if half else 0)


def whole_logits(*, tokens: int, counts: Counts) -> float:
    """Bytes of logits that cannot be chunked: logits, scaled logits, and four tensors of that size for the entropy.

    Args:
        tokens: Tokens whose log-probabilities are computed.
        counts: The model's size.
    """
    return tokens * counts.vocabulary * FLOAT32 * 6


def head_gradient(*, tokens: int, counts: Counts, learns: bool) -> float:
    """Bytes of the float32 sums kept for the backward pass: the head's gradient and those of the hidden states.

    Args:
        tokens: Tokens whose log-probabilities are computed.
        counts: The model's size.
        learns: Whether the head trains.
    """
    return FLOAT32 * (tokens * counts.width * 3 + (counts.vocabulary * counts.width if learns else 0))


def update_memory(
    policy: ModelMemory,
    critic: ModelMemory,
    passes: tuple[TrainingPass, TrainingPass],
    *,
    frozen: float,
    logits: float,
    head: float,
    several: bool,
    buckets: float = 0,
    cache: float = 0,
) -> PhaseMemory:
    """The peak of PPO's update: the policy's forward pass, then the critic's, then backward, the critic first.

    Args:
        policy: The policy's bytes.
        critic: The critic's bytes.
        passes: The passes of policy and critic.
        frozen: Bytes of the weights of frozen models.
        logits: Bytes of the current chunk of logits.
        head: Bytes from `head_gradient`.
        several: Whether gradients of an earlier micro-batch exist.
        buckets: Bytes of the buffers through which processes exchange gradients.
        cache: Bytes of a KV cache that stays between rollouts.
    """
    policy_pass, critic_pass = passes
    gradients = policy.gradients + critic.gradients
    if several:
        moments = [
            policy_pass.saved + head + max(logits, critic_pass.repeat_peak),
            policy_pass.repeat_peak + head,
        ]
        working = max(moments)
    else:
        moments = [
            policy_pass.saved + head + max(logits, critic_pass.first_peak),
            critic.gradients + policy_pass.first_peak + head,
        ]
        working = max(*moments, gradients) - gradients
    return PhaseMemory(
        weights=policy.weights + critic.weights + frozen,
        gradients=gradients + buckets,
        optimizer=policy.optimizer + critic.optimizer,
        activations=working - min(head, working),
        logits=min(head, working),
        cache=cache,
    )


def training_memory(
    model: ModelMemory, passed: TrainingPass, *, head: float, several: bool, buckets: float = 0
) -> PhaseMemory:
    """The peak of a training step of SFT or of the reward model.

    Args:
        model: The model's bytes.
        passed: The pass of the model.
        head: Bytes that the loss takes beyond the pass.
        several: Whether gradients of an earlier micro-batch exist.
        buckets: Bytes of the buffers through which processes exchange gradients.
    """
    working = passed.saved + head
    if several:
        working = max(working, passed.repeat_peak + head)
    else:
        working = max(working, passed.first_peak + head, model.gradients) - model.gradients
    return PhaseMemory(
        weights=model.weights,
        gradients=model.gradients + buckets,
        optimizer=model.optimizer,
        activations=max(working - head, 0),
        logits=min(head, working),
    )
