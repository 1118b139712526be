"""How many bytes a device holds in each phase of a stage: formulas alone.

A weight that trains takes four numbers under Adam, itself, its gradient and two moments: 16 bytes in float32. What
depends on an architecture, the passes of a trunk, comes from `tracing`.
"""

from dataclasses import dataclass, fields

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
#: Bytes of an optimizer's state for each number that trains in float32, by what its name begins with, the first that
#: does. In 8 bits: two moments, and a scale in float32 for each block of 256 or more of them.
STATES = {
    "adamw_torch_8bit": 2.03, "adamw_torch_4bit": 1.06, "adamw_8bit": 2.03, "adamw_bnb_8bit": 2.03,
    "paged_adamw_8bit": 2.03, "adam": 8, "paged_adamw": 8, "ademamix_8bit": 3.05, "ademamix": 12, "lion_8bit": 1.02,
    "paged_lion_8bit": 1.02, "lion": 4, "paged_lion": 4, "adagrad": 4, "rmsprop": 4, "sgd": 0, "adafactor": 0.01,
}  # fmt: skip
#: Of a weight in few bits, by bitsandbytes: itself, and a scale in float32 for each block of 64 (4 bit) or row (8 bit).
BITS = {"4bit": 0.5 + 4 / 64, "8bit": 1.002}


@dataclass(frozen=True)
class Numbers:
    """How many numbers a model has.

    everything: parameters, an adapter's among them; linear: of the linear layers in the trunk; tables: of embeddings
    and head, tied ones once. cached: a token's keys and values over all layers; attended: width of all heads.
    """

    everything: int
    trained: int
    linear: int
    tables: int
    layers: int
    width: int
    vocabulary: int
    cached: int
    attended: int


@dataclass(frozen=True)
class TrainingPass:
    """Bytes of a trunk's pass forward and backward, beyond its weights.

    saved: between the two. first: the most, where the gradients are made in it, which it includes; again: the same,
    where they were there before. gradients: what it leaves.
    """

    saved: int = 0
    first: int = 0
    again: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class ReadingPass:
    """Bytes of a pass without one backward: casts, of weights that train to bfloat16, stay while the phase goes on;
    peak includes them."""

    casts: int = 0
    peak: int = 0


@dataclass(frozen=True)
class Held:
    """Bytes of a model that stay from phase to phase; its gradients while it learns."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def over(self, devices: int) -> "Held":
        """The share of one of them."""
        return Held(self.weights / devices, self.gradients / devices, self.optimizer / devices)


@dataclass(frozen=True)
class Need:
    """Bytes on a device at the worst moment of a phase. logits: with what is made of them, and a head's gradient.

    process: what a CPU's process holds beside tensors; on a card it is no part of the plan.
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
    """Bytes of an optimizer's state for each number that trains; None of one that is not known."""
    return next((size for name, size in STATES.items() if optimizer.startswith(name)), None)


def held(numbers: Numbers, *, size: float, state: float, bits: str | None = None, own: bool = True) -> Held:
    """size: bytes of a weight, of which one that trains under an adapter has FLOAT32; state: those of `state_bytes`.

    bits: of the linear layers where they are held in few, a name of BITS. own: False of a model whose frozen weights
    are another's.
    """
    adapter = 0 < numbers.trained < numbers.everything
    frozen = numbers.everything - numbers.trained
    trained_size = FLOAT32 if adapter else size
    linear = min(numbers.linear, frozen) if bits else 0
    still = (frozen - linear) * size + linear * BITS.get(bits or "", 0)
    return Held(
        weights=(still if own else 0) + numbers.trained * trained_size,
        gradients=numbers.trained * trained_size,
        optimizer=numbers.trained * state * trained_size / FLOAT32,
    )


def chunk_logits(*, tokens: int, numbers: Numbers, chunk: int, half: bool, learns: bool) -> float:
    """Of the head, a few tokens' logits at a time, as `logprobs` has it. chunk: logits that are held at once at most.

    Scores and probabilities in float32; in bfloat16 the head's weight is cast for the pass, and so is the gradient.
    """
    rows = min(tokens, max(numbers.width, chunk // numbers.vocabulary))
    size = numbers.vocabulary * numbers.width
    working = rows * numbers.vocabulary * (2 * FLOAT32 + (BFLOAT16 if half and learns else 0))
    return working + (BFLOAT16 * size * (2 if learns else 1) if half else 0)


def whole_logits(*, tokens: int, numbers: Numbers) -> float:
    """Where the head's own class or a shard of it must run: logits, scaled ones, and the entropy's four like them."""
    return tokens * numbers.vocabulary * FLOAT32 * 6


def head_gradient(*, tokens: int, numbers: Numbers, learns: bool) -> float:
    """Sums in float32 that wait for the backward pass: of the head's weight where it learns, and of the states."""
    return FLOAT32 * (tokens * numbers.width * 3 + (numbers.vocabulary * numbers.width if learns else 0))


def update_need(
    policy: Held,
    critic: Held,
    passes: tuple[TrainingPass, TrainingPass],
    *,
    others: float,
    logits: float,
    head: float,
    several: bool,
    buckets: float = 0,
    cache: float = 0,
) -> Need:
    """The update: the policy's pass, then the critic's, then backward, the critic's first.

    passes: of both; others: weights of frozen models; logits: of the chunk under way; head: of `head_gradient`.
    several: whether gradients of earlier micro-batches are there. buckets: of processes that exchange gradients.
    """
    of_policy, of_critic = passes
    gradients = policy.gradients + critic.gradients
    if several:
        moments = [
            of_policy.saved + head + max(logits, of_critic.again),
            of_policy.again + head,
        ]
        working = max(moments)
    else:
        moments = [
            of_policy.saved + head + max(logits, of_critic.first),
            critic.gradients + of_policy.first + head,
        ]
        working = max(*moments, gradients) - gradients
    return Need(
        weights=policy.weights + critic.weights + others,
        gradients=gradients + buckets,
        optimizer=policy.optimizer + critic.optimizer,
        activations=working - min(head, working),
        logits=min(head, working),
        cache=cache,
    )


def training_need(model: Held, passed: TrainingPass, *, head: float, several: bool, buckets: float = 0) -> Need:
    """A step of SFT or of the reward model. head: what the loss takes beside the trunk."""
    working = passed.saved + head
    if several:
        working = max(working, passed.again + head)
    else:
        working = max(working, passed.first + head, model.gradients) - model.gradients
    return Need(
        weights=model.weights,
        gradients=model.gradients + buckets,
        optimizer=model.optimizer,
        activations=max(working - head, 0),
        logits=min(head, working),
    )
