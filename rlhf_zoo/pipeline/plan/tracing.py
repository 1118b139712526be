"""Measures the bytes that a model's passes take in addition to its weights, on tensors that have shapes but no memory.

The model runs transformers' own code, with its attention, adapter and precision, so this module needs no code
for individual architectures. All layers are assumed to be alike: the model runs at two depths, and the bytes are
extrapolated to its real depth.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from ...errors import ZooError, first_line
from ...modeling.models import is_peft
from ...modeling.remote_code import is_code_trusted
from ...modeling.sampling.decoder import forward
from ...modeling.sampling.kv_cache import new_cache
from .cache import digest, read_cached, versions, write_cached
from .memory import Counts, ForwardPass, TrainingPass

if TYPE_CHECKING:
    from peft import PeftConfig

#: Name of the implementation of experts that sends every row through the first expert's weights. Routing depends on
#: data, which traced tensors do not have, but it does not affect the sizes of tensors.
EXPERTS = "rlhf-zoo-traced"
#: The two numbers of layers that a model runs with. Both are even, because some models alternate two kinds of layers.
DEPTHS = 2, 4
#: First elements of the keys of measurements that run a model without its head.
TRUNK_PASSES = ("training", "forward")
AUTO_CLASSES: Mapping[str, Any] = {"policy": AutoModelForCausalLM, "classifier": AutoModelForSequenceClassification}


def _run_first_expert(self: Any, states: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> Tensor:
    """Replaces transformers' grouped_mm. states: (tokens, hidden); the other arguments: (tokens, experts per token)."""

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)[0]
        with torch.autocast("cpu", enabled=False):  # autocast does not apply to grouped_mm
            output = rows.to(weight.dtype) @ (weight if self.is_transposed else weight.T)
        return output + getattr(self, f"{name}_bias")[0] if self.has_bias else output

    rows = states[torch.arange(expert_ids.numel(), device=states.device) // expert_ids.shape[-1]]
    hidden = linear(rows, "gate_up_proj" if self.has_gate else "up_proj")
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    output = linear(hidden, "down_proj") * routing_weights.reshape(-1, 1)
    return output.view(*expert_ids.shape, -1).sum(dim=1).to(states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _run_first_expert)


class _CountingMode(FakeTensorMode):
    """Gives tensors shapes without memory, and reports to a counter the tensors that operators return.

    A single mode does both, because two modes would handle every operator twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counter: _MemoryCounter | None = None
        self._is_inside_operator = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and checking for compilation takes longer than counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two thirds of all calls
            return args[0].device
        # Operators that another operator calls are not counted, because fused kernels do not allocate their outputs.
        if self.counter is None or self._is_inside_operator:
            return self.dispatch(func, types, args, kwargs or {})
        self._is_inside_operator = True
        try:
            outputs = self.dispatch(func, types, args, kwargs or {})
        finally:
            self._is_inside_operator = False
        for leaf in (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self.counter.add(leaf.untyped_storage())
        return outputs

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[_MemoryCounter]:
        """Counts the tensors that are allocated in this context. The model's own tensors are not counted."""
        self.counter = _MemoryCounter(model)
        try:
            yield self.counter
        finally:
            self.counter = None


class _MemoryCounter:
    """Counts the bytes of live tensors, and their peak."""

    def __init__(self, model: nn.Module) -> None:
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        gradients = (weight.grad for weight in model.parameters() if weight.grad is not None)
        for tensor in (*model.parameters(), *model.buffers(), *gradients):
            self._sizes[tensor.untyped_storage()._cdata] = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it is freed. A storage that is already counted is not counted twice."""
        key = storage._cdata
        if key in self._sizes:
            return
        size = self._sizes[key] = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def take_peak(self, before: int) -> int:
        """Returns the peak since the last call of this method, in bytes above `before`, and starts a new peak."""
        peak, self.peak = self.peak - before, self.live
        return peak


@dataclass(frozen=True)
class ModelSpec:
    """The properties that identify a traced model.

    Attributes:
        config: The configuration, as JSON.
        role: "policy", or "classifier" for a reward model or critic.
        dtype: The dtype of the weights.
        attention: The value of attn_implementation; None for the model's default.
        adapter: The adapter's configuration as JSON; None without an adapter.
        is_trainable: Whether any weight is trained.
    """

    config: str
    role: str = "policy"
    dtype: str = "float32"
    attention: str | None = None
    adapter: str | None = None
    is_trainable: bool = True


class Tracer:
    """Runs a model on tensors without memory, and measures the bytes that its passes would take.

    Every method raises ZooError for a model that cannot run on such tensors.

    Args:
        spec: The properties that identify the model.
        config: The model's transformers configuration.
        peft_config: The adapter's configuration; None without an adapter.
    """

    def __init__(self, spec: ModelSpec, config: PreTrainedConfig, peft_config: PeftConfig | None = None) -> None:
        self.spec, self.config, self._peft_config = spec, config, peft_config
        self.depth: int = config.get_text_config().num_hidden_layers
        self._results: dict[tuple[Any, ...], list[int]] = {}

    @cached_property
    def _models(self) -> list[tuple[int, _CountingMode, PreTrainedModel]]:
        """(number of layers, mode of the tensors, model) at two depths, or only at the real depth if that is small."""
        depths = DEPTHS if self.depth > DEPTHS[-1] else (self.depth,)
        modes = [(depth, _CountingMode()) for depth in depths]
        return [(depth, mode, self._build(depth, mode)) for depth, mode in modes]

    def _build(self, depth: int, mode: _CountingMode) -> PreTrainedModel:
        config = copy.deepcopy(self.config)
        text_config = config.get_text_config()
        text_config.num_hidden_layers = depth
        for name in ("layer_types", "attention_layers"):
            if isinstance(getattr(text_config, name, None), list):
                setattr(text_config, name, getattr(text_config, name)[:depth])
        options: dict[str, Any] = {"dtype": getattr(torch, self.spec.dtype), "trust_remote_code": is_code_trusted()}
        if self.spec.attention is not None:
            # Kernels that need a GPU, such as flash attention, save as many bytes for the backward pass as sdpa.
            options["attn_implementation"] = "eager" if self.spec.attention == "eager" else "sdpa"
        config._experts_implementation = EXPERTS
        with torch.device("meta"):
            model = AUTO_CLASSES[self.spec.role].from_config(config, **options)
            if self._peft_config is not None:
                from peft import get_peft_model

                peft_config = copy.deepcopy(self._peft_config)
                if self.spec.role != "policy":
                    peft_config.task_type = None  # otherwise peft would train a copy of the small head
                model = get_peft_model(model, peft_config)
        if not self.spec.is_trainable:
            model.requires_grad_(False)
        with mode:
            _to_fake_tensors(model)
        return model

    def _extrapolate(
        self, key: tuple[Any, ...], run: Callable[[PreTrainedModel, _CountingMode], list[int]]
    ) -> list[int]:
        """Calls `run` at each depth of `_models`, and extrapolates linearly to the real depth. Caches the result."""
        if key not in self._results:
            name = self._cache_name(key)
            values = None if name is None else read_cached("traces", name)
            if isinstance(values, list) and values and all(isinstance(value, int) for value in values):
                self._results[key] = values
                return values
            try:
                measurements = self._measure(key, run)
            except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
                raise ZooError(
                    f"A {self.config.model_type} of this configuration cannot be run on tensors without memory "
                    f"({first_line(error)}), so its memory cannot be planned."
                ) from error
            (depth, values), (larger_depth, larger_values) = measurements[0], measurements[-1]
            if depth != larger_depth:
                factor = (self.depth - depth) / (larger_depth - depth)
                values = [round(a + factor * (b - a)) for a, b in zip(values, larger_values, strict=True)]
            self._results[key] = values
            if name is not None:
                write_cached("traces", name, values)
        return self._results[key]

    def _measure(
        self, key: tuple[Any, ...], run: Callable[[PreTrainedModel, _CountingMode], list[int]]
    ) -> list[tuple[int, list[int]]]:
        """Calls `run` at each depth, unless a model with the same trunk, such as the critic, was already measured."""
        if key[0] not in TRUNK_PASSES:
            return self._run_at_depths(run)
        trunk = _trunk(self._models[-1][-1])
        # A forward pass saves nothing for a backward pass. Which weights are frozen therefore matters only in bfloat16,
        # where autocast keeps copies of the trained weights. The key of a forward pass ends with its `bf16`.
        ignores_frozen = key[0] == "forward" and not key[-1]
        weights = tuple(
            (name, weight.shape, weight.requires_grad or ignores_frozen) for name, weight in trunk.named_parameters()
        )
        depths = tuple(depth for depth, _, _ in self._models)
        spec = replace(self.spec, role="trunk", is_trainable=self.spec.is_trainable or ignores_frozen)
        trunk_key = (spec, depths, type(trunk), weights, key)
        if trunk_key not in _TRUNK_RESULTS:
            _TRUNK_RESULTS[trunk_key] = self._run_at_depths(run)
        return _TRUNK_RESULTS[trunk_key]

    def _run_at_depths(self, run: Callable[[PreTrainedModel, _CountingMode], list[int]]) -> list[tuple[int, list[int]]]:
        """Calls `run` at each depth, without garbage collection, which would free tensors at arbitrary moments."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return [(depth, run(model, mode)) for depth, mode, model in self._models]
        finally:
            if was_enabled:
                gc.enable()

    def _cache_name(self, key: tuple[Any, ...]) -> str | None:
        """Returns a measurement's name in the cache; None if the model may have its own code, which has no version."""
        if is_code_trusted():
            return None
        files = [__file__, inspect.getfile(forward), inspect.getfile(new_cache)]
        source_digests = [sha256(Path(file).read_bytes()).hexdigest() for file in files]
        return digest([versions(), source_digests, asdict(self.spec), self.depth, list(key)])

    @property
    def counts(self) -> Counts:
        """The model's size."""
        text_config = self.config.get_text_config()
        if getattr(text_config, "num_attention_heads", None) is None:
            raise ZooError(f"A {self.config.model_type} has no attention, so the memory of its state is unknown.")
        heads = text_config.num_attention_heads
        kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
        head_width = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads

        def count(model: PreTrainedModel, _: _CountingMode) -> list[int]:
            embeddings = _base_model(model).get_input_embeddings().weight
            output_layer = _base_model(model).get_output_embeddings() if self.spec.role == "policy" else None
            head = None if output_layer is None else output_layer.weight
            parameters = [*model.parameters()]
            size_by_id = {
                id(module.weight): module.weight.numel()
                for name, module in _trunk(model).named_modules()
                if isinstance(module, nn.Linear | Conv1D) and "lora_" not in name
            }
            for module in _trunk(model).modules():
                if hasattr(module, "_apply_gate"):  # of the experts, count only as many as a token uses
                    experts_per_token = getattr(text_config, "num_experts_per_tok", 1)
                    experts = (weight for weight in module.parameters() if weight.ndim == 3)
                    size_by_id |= {id(weight): weight.numel() * experts_per_token // len(weight) for weight in experts}
            return [
                sum(weight.numel() for weight in parameters),
                sum(weight.numel() for weight in parameters if weight.requires_grad),
                sum(size_by_id.values()),
                embeddings.numel() + (0 if head is None or head is embeddings else head.numel()),
            ]

        parameters, trained, linear, embeddings = self._extrapolate(("counts",), count)
        return Counts(
            parameters=parameters,
            trained=trained,
            linear=linear,
            embeddings=embeddings,
            layers=self.depth,
            width=text_config.hidden_size,
            vocabulary=text_config.vocab_size,
            kv_values=2 * self.depth * kv_heads * head_width,
            attention_width=heads * head_width,
        )

    def training_pass(
        self, *, batch_size: int, length: int, bf16: bool, checkpointing: bool, accumulates: bool = True
    ) -> TrainingPass:
        """Measures a forward and backward pass of the trunk, without the head.

        Args:
            batch_size: Rows of the batch.
            length: Tokens of each row.
            bf16: Whether the pass runs under bfloat16 autocast.
            checkpointing: Whether gradient checkpointing is on.
            accumulates: Whether the pass adds to the gradients of an earlier micro-batch instead of allocating its own.
        """

        def run(model: PreTrainedModel, mode: _CountingMode) -> list[int]:
            model.train()
            base = _base_model(model)
            if checkpointing:
                base.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
            if accumulates:
                with mode:
                    for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
                        weight.grad = torch.empty_like(weight)
            with ExitStack() as stack:
                counter, run_trunk = _start_counting(stack, model, mode, batch_size, length)
                before = counter.live
                with _autocast(bf16):
                    output = run_trunk()
                saved, forward_peak = counter.live - before, counter.take_peak(before)
                output.backward(torch.ones_like(output))
                peak = max(forward_peak, counter.take_peak(before))
            model.zero_grad(set_to_none=True)
            if checkpointing:
                base.activation_checkpointing_disable()
                base.disable_input_require_grads()  # otherwise later passes would save the embeddings too
            return [saved, peak]

        key = ("training", batch_size, length, bf16, checkpointing, accumulates)
        return TrainingPass(*self._extrapolate(key, run))

    def forward_pass(self, *, batch_size: int, length: int, bf16: bool) -> ForwardPass:
        """Measures a forward pass of the trunk that saves nothing for a backward pass.

        Args:
            batch_size: Rows of the batch.
            length: Tokens of each row.
            bf16: Whether the pass runs under bfloat16 autocast.
        """

        def run(model: PreTrainedModel, mode: _CountingMode) -> list[int]:
            model.eval()
            with ExitStack() as stack, torch.no_grad():
                counter, run_trunk = _start_counting(stack, model, mode, batch_size, length)
                with _autocast(bf16):
                    run_trunk()
                    return [counter.live, counter.take_peak(0)]

        return ForwardPass(*self._extrapolate(("forward", batch_size, length, bf16), run))

    def decode_step(self, *, batch_size: int, length: int, bf16: bool) -> ForwardPass:
        """Measures the pass that samples the last token of each row with a KV cache, without the cache itself.

        Args:
            batch_size: Rows of the batch.
            length: Tokens of each row, including the last token.
            bf16: Whether the step runs under bfloat16 autocast.
        """

        def run(model: PreTrainedModel, mode: _CountingMode) -> list[int]:
            model.eval()
            with ExitStack() as stack, torch.no_grad():
                stack.enter_context(mode)
                counter = stack.enter_context(mode.counting(model))
                stack.enter_context(_autocast(bf16))
                cache = new_cache(_base_model(model))
                ids, mask = (torch.ones(batch_size, length, dtype=torch.long) for _ in range(2))
                positions = mask.cumsum(-1) - 1
                forward(model, ids[:, :-1], mask[:, :-1], positions[:, :-1], cache)
                before = counter.live
                counter.take_peak(before)
                forward(model, ids[:, -1:], mask, positions[:, -1:], cache)
                peak = counter.take_peak(before)
                del cache  # leaves only the copies of weights that autocast keeps
                return [counter.live, counter.live + peak]

        return ForwardPass(*self._extrapolate(("decode", batch_size, length, bf16), run))


def _to_fake_tensors(model: nn.Module) -> None:
    """Replaces meta tensors with CPU tensors, which take no memory under `_CountingMode`. Tied weights stay tied."""
    replacements: dict[int, tuple[Tensor, Any]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in replacements:
                    replacement = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        replacement = nn.Parameter(replacement, tensor.requires_grad)
                    replacements[id(tensor)] = tensor, replacement
                if tensor is not None:
                    tensors[name] = replacements[id(tensor)][1]


def _start_counting(
    stack: ExitStack, model: PreTrainedModel, mode: _CountingMode, batch_size: int, length: int
) -> tuple[_MemoryCounter, Callable[[], Tensor]]:
    """Returns an active counter, and a function that runs the model's trunk over (batch_size, length) tokens."""
    stack.enter_context(mode)
    ids, mask = (torch.ones(batch_size, length, dtype=torch.long) for _ in range(2))
    trunk = _trunk(model)
    forward_parameters = inspect.signature(trunk.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in forward_parameters:
        inputs["position_ids"] = mask.cumsum(-1) - 1
    if "use_cache" in forward_parameters:
        inputs["use_cache"] = False
    counter = stack.enter_context(mode.counting(model))
    return counter, lambda: trunk(**inputs)[0]


def _autocast(bf16: bool) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()


def _base_model(model: Any) -> Any:
    return model.get_base_model() if is_peft(model) else model


def _trunk(model: PreTrainedModel) -> nn.Module:
    trunk: nn.Module = _base_model(model).base_model
    return trunk


_TRACERS: dict[ModelSpec, Tracer] = {}
#: Measurements of trunks, which `Tracer._measure` shares between models with the same trunk.
_TRUNK_RESULTS: dict[tuple[Any, ...], list[tuple[int, list[int]]]] = {}


def tracer(
    config: PreTrainedConfig,
    role: str,
    *,
    peft_config: PeftConfig | None = None,
    dtype: str = "float32",
    attention: str | None = None,
    is_trainable: bool = True,
) -> Tracer:
    """Returns the tracer of a model. Later calls for the same model return the same tracer.

    Args:
        config: The model's transformers configuration.
        role: "policy" or "classifier".
        peft_config: The adapter's configuration; None without an adapter.
        dtype: The dtype of the weights.
        attention: Value of attn_implementation; None for the model's default.
        is_trainable: Whether any weight is trained.
    """
    adapter = None
    if peft_config is not None:
        # The order of a set differs between processes, so each process would trace the model again.
        adapter = json.dumps(
            peft_config.to_dict(),
            default=lambda value: sorted(value) if isinstance(value, set) else str(value),
            sort_keys=True,
        )
    spec = ModelSpec(config.to_json_string(use_diff=False), role, dtype, attention, adapter, is_trainable)
    if spec not in _TRACERS:
        _TRACERS[spec] = Tracer(spec, config, peft_config)
    return _TRACERS[spec]
