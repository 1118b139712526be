"""The planner's training pass: one micro-batch, with the same figures whatever was planned before."""

import contextlib

import pytest
from peft import LoraConfig

from rlhf_zoo.pipeline.plan import tracing
from rlhf_zoo.pipeline.plan.shapes import new_shape

TINY = new_shape(
    {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
     "num_attention_heads": 2, "num_key_value_heads": 2},
    vocabulary=32,
)  # fmt: skip


def test_pass_is_one_micro_batch_and_does_not_depend_on_earlier_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_TRUNK_RESULTS", {})
    forward_passes: list[int] = []
    monkeypatch.setattr(tracing, "_autocast", lambda _: forward_passes.append(1) or contextlib.nullcontext())
    asked = {"batch_size": 2, "length": 16, "bf16": False}

    def new_tracer() -> tracing.Tracer:
        adapter = LoraConfig(r=2, target_modules="all-linear")
        model = tracing.Tracer(tracing.ModelSpec("{}", adapter="{}"), TINY.config, adapter)
        monkeypatch.setattr(model, "_cache_name", lambda _: None)
        return model

    alone = new_tracer().training_pass(**asked, checkpointing=False)
    assert forward_passes == [1]
    tracing._TRUNK_RESULTS.clear()
    again = new_tracer()
    again.training_pass(**asked, checkpointing=True)
    assert again.training_pass(**asked, checkpointing=False) == alone
