"""What the stages of a recipe need of a device, phase by phase: settings and configurations in, bytes out.

How a stage runs, which models it holds, how it cuts a batch, is as in `ppo`, `logprobs`, `sampling` and trl's trainers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from ...errors import ZooError
from ...modeling.distributed import IN_SHARDS
from ...modeling.logprobs import CHUNK, CHUNK_ELSEWHERE
from ...modeling.sampling.cuda_graphs import COLUMNS, bucket
from ...modeling.sampling.kv_cache import ROOM
from ...ppo.config import holds_reference, usual_tokens
from ...runs.data.batch_share import divided
from . import memory
from .devices import Device
from .memory import BFLOAT16, FLOAT32, Held, Need, Numbers, TrainingPass
from .shapes import Shape
from .tracing import Tracer, tracer

NOTHING = Held()
#: Numbers that a sampled token's logits are: scaled ones and probabilities beside them.
DRAWN = 3
#: trl's head: tokens and columns of the vocabulary that it computes at a time, and such tiles that live at once.
TRL_TOKENS, TRL_COLUMNS, TRL_TILES = 4096, 32768, 3
#: On a CPU tensors lie in the memory of the process, beside what it holds without any: the libraries, which take half a
#: GiB once they are imported, their buffers, data and the trainer's own objects, as measured with models of next to no
#: weights (benchmarks/plan_check.py, the setting `nothing`). And there are gaps. glibc keeps blocks below 32 MiB in its
#: heap, where gradients come to lie between activations: with a mapping of its own for each block
#: (MALLOC_MMAP_THRESHOLD_) there are none. How large they are, as a share of what an update makes and frees, was
#: chosen by the memory that `make bench` saw, and docs/plan.md shows how far runs are from it.
PROCESS_ON_CPU, GAPS = 524 * 2**20, 0.5


@dataclass(frozen=True)
class Reward:
    """A reward model. begins: whether a critic may begin as it."""

    shape: Shape
    begins: bool = True


@dataclass(frozen=True)
class Work:
    """What an update computes, in one process, in FLOPs and counts: what `seconds` turns into time.

    steps: of the sampler, one after the other, in layers of which each starts its kernels; read: bytes of weights and
    cache that they read. trained: numbers that optimizer steps change.
    """

    prefill: float = 0
    decode: float = 0
    steps: float = 0
    read: float = 0
    passes: float = 0
    head: float = 0
    update: float = 0
    update_head: float = 0
    trained: float = 0


@dataclass(frozen=True)
class StagePlan:
    """What a stage holds on each device, by model and by phase. about: what it was computed for, in words."""

    stage: str
    models: Mapping[str, Held]
    phases: Mapping[str, Need]
    about: Mapping[str, Any]
    work: Work = field(default_factory=Work)
    half: bool = False

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> float:
        """Bytes on each device."""
        return self.phases[self.worst].total


def sft_plan(keys: SimpleNamespace, base: Shape, device: Device) -> StagePlan:
    """SFT, by trl's trainer. keys: those of the stage, as attributes; base: the model that it starts from."""
    rows, steps = divided(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
    length = keys.max_length or base.context
    half, size = _half(keys, device), _dtype(keys, base)
    model = _tracer(base, "policy", keys, size, half)
    tile = min(rows * length, TRL_TOKENS) * min(TRL_COLUMNS, model.numbers.vocabulary if device.cpu else TRL_COLUMNS)
    learns = model.numbers.trained == model.numbers.everything
    head: float = TRL_TILES * tile * (BFLOAT16 if half else FLOAT32)
    head += memory.head_gradient(tokens=rows * length, numbers=model.numbers, learns=learns)
    return _supervised("sft", keys, model, device, rows=rows, length=length, steps=steps, head=head)


def reward_plan(keys: SimpleNamespace, base: Shape, device: Device) -> StagePlan:
    """The reward model, by trl's trainer: both texts of a pair are rows."""
    rows, steps = divided(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
    length = min(keys.max_length or base.context, base.context)
    model = _tracer(base, "classifier", keys, _dtype(keys, base), _half(keys, device))
    return _supervised("reward", keys, model, device, rows=2 * rows, length=length, steps=steps, head=0)


def _supervised(
    stage: str,
    keys: SimpleNamespace,
    model: Tracer,
    device: Device,
    *,
    rows: int,
    length: int,
    steps: int,
    head: float,
) -> StagePlan:
    half, numbers = _half(keys, device), model.numbers
    passed = model.training(rows=rows, length=length, half=half, checkpointing=bool(keys.gradient_checkpointing))
    shards = _shards(stage, keys, device, use_peft=model.kind.adapter is not None)
    held = _held(numbers, keys, model).over(shards)
    exchanged = held.gradients if device.count > 1 and shards == 1 else 0
    # Gradients of shards are exchanged layer by layer, and never lie there whole.
    need = memory.training_need(held, passed, head=head, several=steps > 1 or shards > 1, buckets=exchanged)
    need = replace(need, weights=need.weights + _gathered(shards, model))
    tokens = rows * length * steps
    trunk = _forward(numbers, tokens, length) * _times(numbers, keys)
    work = Work(
        update=trunk,
        update_head=2 * tokens * numbers.width * numbers.vocabulary * 3 if head else 0,
        trained=numbers.trained,
    )
    about = {"rows": rows, "tokens": length, "micro_batches": steps, **_updates(keys)}
    phases = {"step": _on(device, need, shards), **_saving(device, shards, [held])}
    return StagePlan(stage, {"model": held}, phases, about, work, half)


@dataclass(frozen=True)
class PPOModels:
    """policy: as it is saved. exact: whether its weights are as they were published, and its reference may be so."""

    policy: Shape
    rewards: Sequence[Reward] = ()
    value: Shape | None = None
    exact: bool = False


def _updates(keys: SimpleNamespace, episodes: int = 0) -> dict[str, int]:
    """How many a stage makes where its keys say so, and not the size of its data. episodes: of an update of PPO."""
    if episodes and keys.total_episodes is not None:
        return {"updates": math.ceil(keys.total_episodes / episodes)}
    return {"updates": keys.max_steps} if keys.max_steps > 0 else {}


def ppo_plan(keys: SimpleNamespace, models: PPOModels, device: Device, *, prompt: int) -> StagePlan:
    """PPO. prompt: tokens of the longest prompt."""
    return _PPO(keys, models, device, prompt).plan()


class _PPO:
    """One process of PPO: its models, the parts that a batch is cut into, and what each phase holds."""

    def __init__(self, keys: SimpleNamespace, models: PPOModels, device: Device, prompt: int) -> None:
        self.keys, self.device, self.prompt = keys, device, prompt
        self.response: int = keys.response_length
        self.length = prompt + self.response
        self.half = _half(keys, device)
        rows, steps = divided(keys.per_device_train_batch_size, keys.gradient_accumulation_steps, device.count)
        self.prompts = rows * steps
        self.rows = self.prompts * keys.num_generations
        self.minibatch = math.ceil(self.rows / keys.num_mini_batches)
        budget = keys.max_tokens_per_micro_batch or usual_tokens(cpu=device.cpu, bf16=self.half)
        fitting = self.rows if budget is None else max(budget // self.length, 1)
        self.micro = min(self.minibatch, fitting, self.minibatch if keys.max_tokens_per_micro_batch else rows)
        self.read = min(self.rows, keys.local_rollout_forward_batch_size, fitting)
        self.policy = _tracer(models.policy, "policy", keys, _dtype(keys, models.policy), self.half)
        self.critic, self.critic_own = self._critic(models)
        # Sampling asks a critic on the policy's trunk.
        passed = keys.recompute_logprobs or keys.rollout_engine != "native"
        self.reads_values = self.critic or (self.policy if passed else None)
        self.adapts = self.policy.kind.adapter is not None
        begins = any(reward.begins for reward in models.rewards) and keys.critic != "policy"
        self._copies_policy = self.adapts and self.critic is not None and models.value is None and not begins
        alone = {"use_peft": self.adapts, "critic shared": self.critic is None, "offload_frozen": keys.offload_frozen}
        self.shards = _shards("ppo", keys, device, **alone)
        self.reference = None
        if holds_reference(keys, given=False) and not self.adapts:
            dtype = "bfloat16" if self.half and models.exact and models.policy.dtype != "float32" else "float32"
            frozen = SimpleNamespace(use_peft=False, attn_implementation=keys.attn_implementation)
            self.reference = _tracer(models.policy, "policy", frozen, dtype, self.half, trains=False)
        still = SimpleNamespace(use_peft=False)
        self.rewards = {
            "reward model" if place == 1 else f"reward model {place}": _tracer(
                one.shape, "classifier", still, one.shape.dtype, False, trains=False
            )
            for place, one in enumerate(models.rewards, start=1)
        }

    def _critic(self, models: PPOModels) -> tuple[Tracer | None, bool]:
        """The critic, None for a head on the policy; and whether its frozen weights are its own."""
        keys, few = self.keys, _bits(self.keys) is not None
        begin = next((reward.shape for reward in models.rewards if reward.begins), None)
        shape = models.value
        if shape is None and keys.critic != "shared":
            if begin is not None and keys.critic != "policy":
                shape = begin
            elif not few:
                shape = models.policy
        if shape is None:
            return None, True
        lora = SimpleNamespace(**{**vars(keys), "use_peft": keys.use_peft and keys.critic_lora})
        shares = lora.use_peft and shape is begin and (self.half or shape.dtype == "float32")
        dtype = shape.dtype if shares else "float32"
        return _tracer(shape, "classifier", lora, dtype, self.half), not shares

    def plan(self) -> StagePlan:
        keys, device = self.keys, self.device
        plain = SimpleNamespace(optim=keys.optim)
        held = {"policy": _held(self.policy.numbers, keys, self.policy)}
        if self.critic is not None:
            held["critic"] = _held(self.critic.numbers, plain, self.critic, own=self.critic_own)
        if self.reference is not None:
            bits = "8bit" if keys.ref_load_in_8bit else None
            held["reference"] = _held(self.reference.numbers, plain, self.reference, bits=bits)
        for name, reward in self.rewards.items():
            held[name] = _held(reward.numbers, plain, reward)
        self.held = {name: one.over(self.shards) for name, one in held.items()}
        phases = {
            **({"load": self._load()} if self._copies_policy else {}),
            "sample": self._sample(),
            **({"values": self._values(self.reads_values)} if self.reads_values else {}),
            **({"reference": self._reference()} if holds_reference(keys, given=False) else {}),
            **({"reward": self._reward()} if self.rewards else {}),
            "update": self._update(),
        }
        about = {
            "prompt": self.prompt, "response": self.response, "rows": self.rows, "sampled_at_once": self._at_once()[0],
            "micro_batch": self.micro, "read_at_once": self.read, **_updates(keys, self.rows * device.count),
        }  # fmt: skip
        found = {name: _on(device, need, self.shards) for name, need in phases.items()}
        found |= _saving(
            device, self.shards, [self.held[name] for name in ("policy", "critic") if name in self.held], self._frozen()
        )
        return StagePlan("ppo", self.held, found, about, self._work(), self.half)

    # What lies on the device

    def _frozen(self, *at_hand: str) -> float:
        """Weights of frozen models, of those that wait on the CPU only the ones at hand."""
        names = [name for name in self.held if name not in ("policy", "critic")]
        waits = self.keys.offload_frozen and (self.critic is None or self.critic_own)
        return sum(self.held[name].weights for name in names if not waits or name in at_hand)

    def _at_rest(self, *at_hand: str, whole: Tracer | None = None) -> Need:
        """whole: a model that is gathered from its shards while it runs alone."""
        kept = [self.held[name] for name in ("policy", "critic") if name in self.held]
        weights = sum(one.weights for one in kept) + self._frozen(*at_hand)
        if whole is not None and self.shards > 1:
            weights += _size(whole) * whole.numbers.everything  # beside the shard, which stays
        fixed = self._fixed()
        cache = 0 if fixed is None else fixed[0] * fixed[1] * self._token()
        return Need(weights=weights, optimizer=sum(one.optimizer for one in kept), cache=cache)

    def _token(self) -> float:
        """Bytes of a token's keys and values."""
        size = BFLOAT16 if self.half else _size(self.policy)
        return size * self.policy.numbers.cached

    def _fixed(self) -> tuple[int, int] | None:
        """Rows and columns of a cache that stays from one rollout to the next, as CUDA graphs need it."""
        keys, rows = self.keys, bucket(self.rows)
        if self.device.cpu or keys.rollout_engine != "native" or not keys.rollout_graphs or self.shards > 1:
            return None
        columns = -(-self.length // COLUMNS) * COLUMNS
        if keys.max_rollout_batch_tokens is not None:
            while rows > 1 and rows * columns > keys.max_rollout_batch_tokens:
                rows = next(fewer for fewer in range(rows - 1, 0, -1) if bucket(fewer) == fewer)
        return rows, columns

    def _at_once(self) -> tuple[int, int]:
        """Rows that are sampled at a time, and columns of their cache."""
        if (fixed := self._fixed()) is not None:
            return min(fixed[0], self.rows), fixed[1]
        most = self.keys.max_rollout_batch_tokens
        rows = self.rows if most is None else min(self.rows, max(most // self.length, 1))
        grown = max(math.ceil((self.response - 1 - ROOM) / (ROOM + 1)), 0)
        return rows, self.prompt + ROOM + grown * (ROOM + 1)

    # Phases

    def _load(self) -> Need:
        """The critic is made of the policy's weights with its adapter merged in: for a moment these are there twice."""
        policy, critic = self.held["policy"].weights, self.held["critic"].weights
        return Need(weights=2 * policy + critic + self._frozen())

    def _sample(self) -> Need:
        rest, (rows, columns) = self._at_rest(whole=self.policy), self._at_once()
        fresh = math.ceil(rows / self.keys.num_generations)  # equal prompts are read once
        prefill = self.policy.reading(rows=fresh, length=self.prompt, half=self.half)
        step = self.policy.step(rows=rows, length=self.length, half=self.half)
        numbers = self.policy.numbers
        cache = rest.cache or rows * columns * self._token()
        if not rest.cache and columns > self.prompt + ROOM:  # a layer at a time is copied into a larger buffer
            step = replace(step, peak=step.peak + round(cache / numbers.layers))
        # While prompts are read the cache is as long as they are.
        short = 0 if rest.cache else cache * (1 - (self.prompt + ROOM) / columns)
        working = max(step.peak, prefill.peak - short)
        logits = DRAWN * FLOAT32 * rows * numbers.vocabulary
        return replace(rest, activations=working, cache=cache, logits=logits)

    def _values(self, reader: Tracer) -> Need:
        read = reader.reading(rows=self.read, length=self.length, half=self.half)
        return replace(self._at_rest(whole=reader), activations=read.peak)

    def _reference(self) -> Need:
        reader = self.reference or self.policy
        read = reader.reading(rows=self.read, length=self.length, half=self.half)
        whole = None if self.reference is None else reader
        rest, kept = self._at_rest("reference", whole=whole), 0
        if self.critic is not None:  # casts of its weights stay while the reference reads
            kept = self.critic.reading(rows=self.read, length=self.length, half=self.half).casts
        return replace(rest, activations=read.peak + kept, logits=self._logits(self.read, learns=False))

    def _reward(self) -> Need:
        needs = []
        for name, reward in self.rewards.items():
            context = getattr(reward.config.get_text_config(), "max_position_embeddings", None) or self.length
            read = reward.reading(rows=self.read, length=min(self.length, context), half=False)
            needs.append(replace(self._at_rest(name, whole=reward), activations=read.peak))
        return max(needs, key=lambda need: need.total)

    def _logits(self, rows: int, *, learns: bool) -> float:
        tokens, numbers = rows * self.response, self.policy.numbers
        exact = learns and self.keys.kl_in == "loss" and self.keys.kl_estimator == "full"
        if self.shards > 1 or exact or _adapts_head(self.keys):
            return memory.whole_logits(tokens=tokens, numbers=numbers) * (2 if exact else 1)
        chunk = CHUNK if self.device.cpu else CHUNK_ELSEWHERE
        return memory.chunk_logits(tokens=tokens, numbers=numbers, chunk=chunk, half=self.half, learns=learns)

    def _update(self) -> Need:
        numbers, keys = self.policy.numbers, self.keys
        checkpointing = bool(keys.gradient_checkpointing)
        passes = [
            TrainingPass()
            if one is None
            else one.training(rows=self.micro, length=self.length, half=self.half, checkpointing=checkpointing)
            for one in (self.policy, self.critic)
        ]
        learns = numbers.trained == numbers.everything
        head = memory.head_gradient(tokens=self.micro * self.response, numbers=numbers, learns=learns)
        policy, critic = (self.held.get(name, NOTHING) for name in ("policy", "critic"))
        rest = self._at_rest()
        exchanged = policy.gradients + critic.gradients if self.device.count > 1 and self.shards == 1 else 0
        need = memory.update_need(
            policy,
            critic,
            (passes[0], passes[1]),
            others=self._frozen(),
            logits=self._logits(self.micro, learns=True),
            head=head,
            several=self.micro < self.minibatch or self.shards > 1,
            buckets=exchanged,
            cache=rest.cache,
        )
        return replace(need, weights=need.weights + _gathered(self.shards, self.policy, self.critic))

    def _work(self) -> Work:
        keys, policy = self.keys, self.policy.numbers
        rows, _ = self._at_once()
        tokens, answered = self.rows * self.length, self.rows * self.response
        rounds = math.ceil(self.rows / rows)
        head = 2 * answered * policy.width * policy.vocabulary
        readers = [one.numbers for one in (self.reads_values, *self.rewards.values()) if one is not None]
        if holds_reference(keys, given=False):
            readers.append(policy)
        learning = [one.numbers for one in (self.policy, self.critic) if one is not None]
        updates = keys.num_ppo_epochs
        return Work(
            prefill=_forward(policy, self.prompts * self.prompt, self.prompt),
            decode=_forward(policy, answered, self.length + self.prompt) + head,
            steps=rounds * self.response * policy.layers,
            read=rounds * self.response * (_size(self.policy) * policy.everything)
            + answered * (self.length + self.prompt) / 2 * self._token(),
            passes=sum(_forward(one, tokens, self.length) for one in readers),
            head=head if holds_reference(keys, given=False) else 0,
            update=updates * sum(_forward(one, tokens, self.length) * _times(one, keys) for one in learning),
            update_head=updates * head * 3,
            trained=updates * keys.num_mini_batches * sum(one.trained for one in learning),
        )


# What both kinds of trainers do


def _shards(stage: str, keys: SimpleNamespace, device: Device, **whole: bool) -> int:
    """Over how many devices each weight lies. whole: what the stage may be set to that shards no weights."""
    if not keys.fsdp2:
        return 1
    of = f"fsdp2 of the stage {stage}"
    for name in (name for name, given in whole.items() if given):
        raise ZooError(f"{of} does not go with {name}: leave one of them out.")
    if str(keys.optim) not in IN_SHARDS:
        raise ZooError(f"{of} has no shards for the optimizer {keys.optim}: give optim one of {', '.join(IN_SHARDS)}.")
    if device.count == 1:
        raise ZooError(f"{of} shards weights over several devices, and this plan is for one: give --gpu NAME:COUNT.")
    return device.count


def _gathered(shards: int, *models: Tracer | None) -> float:
    """Bytes that an update gathers from shards: tables, which stay until the backward pass, two layers of each model,
    and one layer's gradients. Beside them, of one model after the other, the tables' gradients and the copy that the
    processes exchange."""
    if shards == 1:
        return 0
    present = [one.numbers for one in models if one is not None]
    layers = sum(3 * (one.everything - one.tables) / one.layers for one in present)
    return FLOAT32 * (sum(one.tables for one in present) + layers + 2 * max(one.tables for one in present))


def _saving(device: Device, shards: int, models: Iterable[Held], others: float = 0) -> dict[str, Need]:
    """What the first process holds on a CPU while it saves: the optimizer's state of all shards. On a GPU it is in the
    host's memory."""
    if shards == 1 or not device.cpu:
        return {}
    weights, optimizer = others, 0.0
    for one in models:
        weights, optimizer = weights + one.weights, optimizer + one.optimizer * (1 + shards)
    return {"save": Need(weights=weights, optimizer=optimizer, process=PROCESS_ON_CPU)}


def _forward(numbers: Numbers, tokens: float, length: float) -> float:
    """FLOPs of a trunk's pass: two for each weight and token, and attention over half of `length` on average."""
    matrices = numbers.linear if numbers.linear else numbers.everything - numbers.tables
    return tokens * (2 * matrices + 4 * numbers.attended * numbers.layers * length / 2)


def _times(numbers: Numbers, keys: Any) -> float:
    """How many forward passes a pass forward and backward costs; under an adapter no weight's gradient is made."""
    whole = numbers.trained == numbers.everything
    return (3 if whole else 2) + bool(keys.gradient_checkpointing)


def _on(device: Device, need: Need, shards: int = 1) -> Need:
    if not device.cpu:
        return need
    # With shards large blocks are mapped by themselves (`sharding.return_memory`).
    gradients = need.gradients if shards == 1 else 0
    return replace(need, process=PROCESS_ON_CPU + GAPS * (need.activations + gradients + need.logits))


def _half(keys: SimpleNamespace, device: Device) -> bool:
    """Whether a stage computes in bfloat16: null does where the device can."""
    return device.bfloat16 if keys.bf16 is None else bool(keys.bf16)


def _bits(keys: Any) -> str | None:
    return "4bit" if getattr(keys, "load_in_4bit", False) else "8bit" if getattr(keys, "load_in_8bit", False) else None


def _dtype(keys: SimpleNamespace, shape: Shape) -> str:
    return shape.dtype if keys.dtype == "auto" else keys.dtype


def _size(model: Tracer) -> int:
    return FLOAT32 if model.kind.dtype == "float32" else BFLOAT16


def _adapts_head(keys: SimpleNamespace) -> bool:
    """Whether an adapter lies on the head, or the head trains whole beside it."""
    named = [*(keys.lora_modules_to_save or ()), *(keys.lora_target_modules or ())]
    return bool(keys.use_peft and {"lm_head", "embed_out"} & {*named})


def _tracer(shape: Shape, what: str, keys: Any, dtype: str, half: bool, *, trains: bool = True) -> Tracer:
    peft_config = None
    if keys.use_peft:
        from trl import ModelConfig, get_peft_config

        names = [name for name in vars(keys) if name.startswith("lora_") or name in ("use_rslora", "use_dora")]
        peft_config = get_peft_config(ModelConfig(use_peft=True, **{name: getattr(keys, name) for name in names}))
        if _bits(keys) is not None:  # they are read out of their few bits into what is computed in
            dtype = "bfloat16" if half else "float32"
    attention = getattr(keys, "attn_implementation", None)
    return tracer(shape.config, what, peft_config=peft_config, dtype=dtype, attention=attention, trains=trains)


def _held(numbers: Numbers, keys: Any, model: Tracer, *, bits: str | None = None, own: bool = True) -> Held:
    state = memory.state_bytes(str(getattr(keys.optim, "value", keys.optim)))
    bits = bits or (_bits(keys) if numbers.trained < numbers.everything else None)
    return memory.held(numbers, size=_size(model), state=8 if state is None else state, bits=bits, own=own)
