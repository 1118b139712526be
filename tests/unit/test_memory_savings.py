"""Saving memory: frozen models are offloaded to the CPU, and micro-batches are halved when they do not fit."""

import gc
import logging
import multiprocessing
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_fixture import (
    DEVICE,
    distance,
    make_policy,
    make_reward_model,
    make_trainer,
    prompt_rows,
    snapshot,
    trained,
    updates_of,
)
from transformers import TrainerCallback

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.devices import temporarily_on_device
from rlhf_zoo.ppo import offload as frozen
from rlhf_zoo.ppo.offload import place_frozen_models

ELSEWHERE = torch.device("cuda:7")


class Carried(nn.Module):
    """A model that only records its device."""

    def __init__(self, *, quantized: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.device, self.is_quantized = torch.device("cpu"), quantized
        self.model = self.separate_model = self

    def to(self, device: Any) -> None:  # type: ignore[override]
        self.device = torch.device(device)


def test_temporarily_on_device_moves_and_returns_models() -> None:
    waits, stays = Carried(), Carried()
    stays.to(ELSEWHERE)
    with temporarily_on_device(ELSEWHERE, waits, None, stays):
        with pytest.raises(KeyError), temporarily_on_device(ELSEWHERE, waits):
            raise KeyError(str(waits.device))
        assert [waits.device, stays.device] == [ELSEWHERE] * 2
    assert [waits.device.type, stays.device] == ["cpu", ELSEWHERE]


def test_place_frozen_models_offloads_movable_models() -> None:
    """Quantized models and shared weights stay on the device; without the key, so do all models."""
    reference, alone, quantized, shares, training = (Carried(quantized=place == 2) for place in range(5))
    shares.weight = training.weight
    rewards: Any = [alone, quantized, shares]
    given: Any = reference
    place_frozen_models(given, rewards, device=ELSEWHERE, trained=training, offload=True)
    homes = [model.device.type for model in (reference, alone, quantized, shares)]
    assert homes == ["cpu", "cpu", "cuda", "cuda"]
    place_frozen_models(given, rewards, device=ELSEWHERE, trained=training, offload=False)
    assert {model.device for model in (reference, *rewards)} == {ELSEWHERE}
    with pytest.raises(ZooError, match=r"^offload_frozen has no model to move"):
        place_frozen_models(None, [quantized, shares], device=ELSEWHERE, trained=training, offload=True)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ref_load_in_8bit": True}, "ref_load_in_8bit, whose weights cannot be moved"),
        ({"kl_in": "loss", "kl_estimator": "full"}, "kl_estimator 'full', for which the reference runs in every"),
        pytest.param(
            {}, "on the CPU, but this run computes there", marks=pytest.mark.skipif(DEVICE != "cpu", reason="")
        ),
    ],
)
def test_offload_frozen_is_refused_when_nothing_can_move(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=rf"^offload_frozen .*{message}.*: (remove|omit) .*\.$"):
        make_trainer(tmp_path, offload_frozen=True, **keys)


def test_offloaded_models_run_on_device_and_keep_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, evaluation and sample tables; of two reward models, one is on the device at a time."""
    here: list[Any] = []

    @contextmanager
    def watched(device: torch.device, *models: Any) -> Iterator[None]:
        assert device.type == DEVICE
        here.extend(models)
        yield
        del here[len(here) - len(models) :]

    monkeypatch.setattr(frozen, "temporarily_on_device", watched)
    reward, reference = make_reward_model().to(torch.bfloat16), make_policy(seed=4)
    second = make_reward_model(seed=5)
    trainer = make_trainer(
        tmp_path, reward_model=[reward, second], reward_ensemble="worst", ref_model=reference,
        eval_dataset=prompt_rows(4),
    )  # fmt: skip
    runs = []

    def look(model: Any, *_: Any) -> None:
        runs.append(model)
        assert here == [model]

    for model in (reward, second, reference):
        model.register_forward_pre_hook(look)
    trainer.train()
    trainer.evaluate()
    trainer.generate_completions()
    assert {id(model) for model in runs} == {id(reward), id(second), id(reference)}
    assert {weight.dtype for weight in reward.parameters()} == {torch.bfloat16}


# Micro-batches that do not fit


class Full:
    """Of a policy: passes with gradients over more tokens fail, the first time in the middle of their backward pass."""

    def __init__(self, policy: Any, most: int) -> None:
        self.most, self.failed = most, 0
        policy.model.layers[0].register_forward_hook(self.look)

    def look(self, layer: nn.Module, states: Any, out: torch.Tensor) -> None:
        if not torch.is_grad_enabled() or states[0].shape[:2].numel() <= self.most:
            return
        self.failed += 1
        if self.failed > 1:
            self.fail()
        out.register_hook(self.fail)

    @staticmethod
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "stop_token_id": 3, "critic": "shared"}


def test_halved_micro_batches_give_same_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, narrow = trained(tmp_path, **SGD), make_trainer(tmp_path, **SGD)
    full = Full(narrow.policy, 30)
    with caplog.at_level(logging.WARNING):
        narrow.train()
    messages = [record.message for record in caplog.records if "do not fit" in record.message]
    assert full.failed == len(messages) >= 1
    assert messages[-1].endswith(f"memory: continuing with {narrow.max_tokens_per_pass} at a time.")
    assert distance(snapshot(whole), snapshot(narrow)) < 1e-5 < distance(whole.before, snapshot(whole))
    for expected, actual in zip(updates_of(whole), updates_of(narrow), strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)


def test_single_row_that_does_not_fit_raises_readable_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SGD)
    Full(trainer.policy, 1)
    with pytest.raises(ZooError, match=r"^A single row does not fit into the memory of"):
        trainer.train()


class Resident(TrainerCallback):
    """The process's memory after some updates, in KiB."""

    def __init__(self, at: Collection[int]) -> None:
        self.at, self.found = at, dict[int, int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.at:
            gc.collect()
            [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
            self.found[state.global_step] = int(line.split()[1])


def resident(folder: Path, updates: Collection[int]) -> dict[int, int]:
    """Runs in a separate process, where nothing else allocates memory."""
    trainer, watch = make_trainer(folder, max_steps=max(updates)), Resident(updates)
    trainer.add_callback(watch)
    trainer.train()
    return watch.found


@pytest.mark.full
def test_memory_does_not_grow_from_update_10_to_100(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        memory = alone.submit(resident, tmp_path, (10, 100)).result()
    assert memory[100] < 1.01 * memory[10], memory
