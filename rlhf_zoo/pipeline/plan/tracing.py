"""What a model's passes take beside its weights, in bytes, by running it on tensors that have shapes and no memory.

The operations are those of the model's own code in transformers, with its attention, its adapter and its precision; so
nothing is known here of any architecture. Layers are taken to be alike: two depths are run, and what each further pair
of layers adds is taken for all.
"""

from __future__ import annotations

import copy
import inspect
import json
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from ...errors import ZooError
from ...modeling.loading import first_line
from ...modeling.models import is_peft
from ...modeling.remote_code import is_trusted
from ...modeling.sampling.decoder import forward
from ...modeling.sampling.kv_cache import new_cache
from .memory import Numbers, ReadingPass, TrainingPass

#: Experts as they are run here: as many rows as tokens have experts, all through the weights of one. Which rows go to
#: which expert is known from data alone, and changes no size.
EXPERTS = "rlhf-zoo-traced"
#: Two layers each, as some architectures have two kinds in turn.
DEPTHS = 2, 4
KINDS: Mapping[str, Any] = {"policy": AutoModelForCausalLM, "classifier": AutoModelForSequenceClassification}


def _experts(self: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """transformers' grouped_mm in shapes. states: (tokens, hidden); chosen, shares: (tokens, experts of each)."""

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)[0]
        with torch.autocast("cpu", enabled=False):  # which leaves grouped_mm alone
            out = rows.to(weight.dtype) @ (weight if self.is_transposed else weight.T)
        return out + getattr(self, f"{name}_bias")[0] if self.has_bias else out

    rows = states[torch.arange(chosen.numel(), device=states.device) // chosen.shape[-1]]
    inner = linear(rows, "gate_up_proj" if self.has_gate else "up_proj")
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = linear(inner, "down_proj") * shares.reshape(-1, 1)
    return out.view(*chosen.shape, -1).sum(dim=1).to(states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


class _Ledger(TorchDispatchMode):
    """Bytes of the tensors that were made while it was open and still live; the most that did at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._known[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = self._known[key] = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)

    def since(self, before: int) -> int:
        """The most beyond `before` since the last call."""
        found, self.peak = self.peak - before, self.live
        return found


@dataclass(frozen=True)
class Kind:
    """What is built: a policy or a classifier, which a critic is one of too, of a configuration as JSON.

    dtype: of its weights; adapter: LoRA's settings as JSON, None where all weights train; trains: whether any do.
    """

    config: str
    what: str = "policy"
    dtype: str = "float32"
    attention: str | None = None
    adapter: str | None = None
    trains: bool = True


class Tracer:
    """A model of a configuration, which is run without memory.

    Raises ZooError, in every method, for what cannot be run so.
    """

    def __init__(self, kind: Kind, config: Any, peft_config: Any = None) -> None:
        self.kind, self.config, self._peft = kind, config, peft_config
        self.depth: int = config.get_text_config().num_hidden_layers
        self._seen: dict[tuple[Any, ...], list[int]] = {}

    @cached_property
    def _models(self) -> list[tuple[int, FakeTensorMode, Any]]:
        """(layers, the mode that its tensors are of, the model) at two depths, or at its own where it has few."""
        depths = DEPTHS if self.depth > DEPTHS[-1] else (self.depth,)
        return [(depth, mode := FakeTensorMode(), self._built(depth, mode)) for depth in depths]

    def _built(self, depth: int, mode: FakeTensorMode) -> Any:
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = depth
        for name in ("layer_types", "attention_layers"):
            if isinstance(getattr(text, name, None), list):
                setattr(text, name, getattr(text, name)[:depth])
        how: dict[str, Any] = {"dtype": getattr(torch, self.kind.dtype), "trust_remote_code": is_trusted()}
        if self.kind.attention is not None:
            # What a GPU alone computes saves as much as what is computed in its place here.
            how["attn_implementation"] = "eager" if self.kind.attention == "eager" else "sdpa"
        config._experts_implementation = EXPERTS
        with torch.device("meta"):
            model = KINDS[self.kind.what].from_config(config, **how)
            if self._peft is not None:
                from peft import get_peft_model

                peft = copy.deepcopy(self._peft)
                if self.kind.what != "policy":
                    peft.task_type = None  # a head of its own is next to nothing
                model = get_peft_model(model, peft)
        if not self.kind.trains:
            model.requires_grad_(False)
        with mode:
            _on_processor(model)
        return model

    def _at_depth(self, key: tuple[Any, ...], run: Callable[[Any, FakeTensorMode], list[int]]) -> list[int]:
        if key not in self._seen:
            try:
                found = [(depth, run(model, mode)) for depth, mode, model in self._models]
            except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
                raise ZooError(
                    f"A {self.config.model_type} of this configuration cannot be run without memory "
                    f"({first_line(error)}), so what it takes is not known."
                ) from error
            (low, few), (high, many) = found[0], found[-1]
            if low == high:
                self._seen[key] = few
            else:
                each = [(b - a) / (high - low) for a, b in zip(few, many, strict=True)]
                self._seen[key] = [round(a + (self.depth - low) * more) for a, more in zip(few, each, strict=True)]
        return self._seen[key]

    @property
    def numbers(self) -> Numbers:
        """How many numbers the model has."""
        text = self.config.get_text_config()
        if getattr(text, "num_attention_heads", None) is None:
            raise ZooError(f"A {self.config.model_type} has no attention, and what its states take is not known.")
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

        def count(model: Any, _: Any) -> list[int]:
            table = _under(model).get_input_embeddings().weight
            outputs = _under(model).get_output_embeddings() if self.kind.what == "policy" else None
            head = None if outputs is None else outputs.weight
            parameters = [*model.parameters()]
            linear = {
                id(module.weight): module.weight.numel()
                for name, module in _trunk(model).named_modules()
                if isinstance(module, nn.Linear | Conv1D) and "lora_" not in name
            }
            for module in _trunk(model).modules():
                if hasattr(module, "_apply_gate"):  # experts, of which a token goes through some
                    some = getattr(text, "num_experts_per_tok", 1)
                    linear |= {id(one): one.numel() * some // len(one) for one in module.parameters() if one.ndim == 3}
            return [
                sum(each.numel() for each in parameters),
                sum(each.numel() for each in parameters if each.requires_grad),
                sum(linear.values()),
                table.numel() if head is None or head is table else table.numel() + head.numel(),
            ]

        everything, trained, linear, tables = self._at_depth(("numbers",), count)
        return Numbers(
            everything=everything,
            trained=trained,
            linear=linear,
            tables=tables,
            layers=self.depth,
            width=text.hidden_size,
            vocabulary=text.vocab_size,
            cached=2 * self.depth * heads * width,
            attended=text.num_attention_heads * width,
        )

    def training(self, *, rows: int, length: int, half: bool, checkpointing: bool) -> TrainingPass:
        """Of the trunk, over (rows, length) tokens, backward and forward. half: computed in bfloat16, by autocast."""

        def run(model: Any, mode: FakeTensorMode) -> list[int]:
            model.train()
            base = _under(model)
            if checkpointing:
                base.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
                if self._peft is not None:
                    base.enable_input_require_grads()
            found: list[int] = []
            with ExitStack() as opened:
                ledger, call = _opened(opened, model, mode, rows, length)
                for _ in range(2):  # the gradients are made, then added to
                    before = ledger.live
                    with _autocast(half):
                        out = call()
                    saved, forward_peak = ledger.live - before, ledger.since(before)
                    out.backward(torch.ones_like(out))
                    del out
                    found += [saved, max(forward_peak, ledger.since(before))]
                gradients = ledger.live
            model.zero_grad(set_to_none=True)
            if checkpointing:
                base.activation_checkpointing_disable()
            return [*found, gradients]

        saved, first, _, again, gradients = self._at_depth(("training", rows, length, half, checkpointing), run)
        return TrainingPass(saved=saved, first=first, again=again, gradients=gradients)

    def reading(self, *, rows: int, length: int, half: bool) -> ReadingPass:
        """A pass of the trunk that keeps nothing for a backward one."""

        def run(model: Any, mode: FakeTensorMode) -> list[int]:
            model.eval()
            with ExitStack() as opened, torch.no_grad():
                ledger, call = _opened(opened, model, mode, rows, length)
                with _autocast(half):
                    call()
                    return [ledger.live, ledger.since(0)]

        return ReadingPass(*self._at_depth(("reading", rows, length, half), run))

    def step(self, *, rows: int, length: int, half: bool) -> ReadingPass:
        """Sampling the last token of (rows, length) over a cache, which is not counted."""

        def run(model: Any, mode: FakeTensorMode) -> list[int]:
            model.eval()
            with ExitStack() as opened, torch.no_grad():
                opened.enter_context(mode)
                ledger = opened.enter_context(_Ledger(model))
                opened.enter_context(_autocast(half))
                cache = new_cache(_under(model))
                ids, seen = (torch.ones(rows, length, dtype=torch.long) for _ in range(2))
                positions = seen.cumsum(-1) - 1
                forward(model, ids[:, :-1], seen[:, :-1], positions[:, :-1], cache)
                held = ledger.live
                ledger.since(held)
                forward(model, ids[:, -1:], seen, positions[:, -1:], cache)
                peak = ledger.since(held)
                del cache
                return [ledger.live, ledger.live + peak]

        return ReadingPass(*self._at_depth(("step", rows, length, half), run))


def _on_processor(model: nn.Module) -> None:
    """Puts tensors of a processor, which have no memory where a mode says so, in the places of meta tensors."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:  # tied weights stay so
                    empty: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = tensor, nn.Parameter(empty, tensor.requires_grad) if parameter else empty
                if tensor is not None:
                    held[name] = made[id(tensor)][1]


def _opened(
    opened: ExitStack, model: Any, mode: FakeTensorMode, rows: int, length: int
) -> tuple[_Ledger, Callable[[], Tensor]]:
    """A ledger, and a call of the trunk over (rows, length) tokens, whose states it returns."""
    opened.enter_context(mode)
    ids, seen = (torch.ones(rows, length, dtype=torch.long) for _ in range(2))
    trunk = _trunk(model)
    known = inspect.signature(trunk.forward).parameters
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": seen}
    if "position_ids" in known:
        given["position_ids"] = seen.cumsum(-1) - 1
    if "use_cache" in known:
        given["use_cache"] = False
    ledger = opened.enter_context(_Ledger(model))
    return ledger, lambda: trunk(**given)[0]


def _autocast(half: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()


def _under(model: Any) -> Any:
    return model.get_base_model() if is_peft(model) else model


def _trunk(model: Any) -> Any:
    return _under(model).base_model


_TRACERS: dict[Kind, Tracer] = {}


def tracer(config: Any, what: str, *, peft_config: Any = None, **how: Any) -> Tracer:
    """The tracer of a model; one for all that ask for the same. how: see `Kind`."""
    adapter = None if peft_config is None else json.dumps(peft_config.to_dict(), default=str, sort_keys=True)
    kind = Kind(config.to_json_string(use_diff=False), what, adapter=adapter, **how)
    if kind not in _TRACERS:
        _TRACERS[kind] = Tracer(kind, config, peft_config)
    return _TRACERS[kind]
