"""Pairwise loss and metrics over several processes, tested on the share of one process."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_zoo.pipeline.stages.global_batch import GlobalRewardMixin

CHOSEN, REJECTED, MARGINS = [2.0, -1.0, 0.5, 9.0], [0.5, 1.0, 0.5, 9.0], [1.0, 0.5, 0.0, 4.0]
#: The last pair only fills the batch up.
REAL, OF_ALL, PROCESSES = 3, 5, 2


def trainer(coefficient: float | None = None) -> Any:
    stub = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=coefficient, world_size=PROCESSES),
        count_rows=lambda here: (REAL, OF_ALL),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=100.0,
    )
    stub._log_metrics = lambda *seen: GlobalRewardMixin._log_metrics(stub, *seen)
    return stub


def pair_loss(stub: Any, **inputs: Any) -> float:
    """The loss of CHOSEN against REJECTED; checks its gradient too."""
    logits = torch.tensor([*CHOSEN, *REJECTED]).unsqueeze(1).requires_grad_()

    class Model:
        training = True

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(logits=logits)

    loss = GlobalRewardMixin.compute_loss(stub, Model(), {"attention_mask": torch.ones(8, 5)} | inputs)
    (gradient,) = torch.autograd.grad(loss, logits)
    # A chosen score is to rise and a rejected one to fall, by as much; what fills up teaches nothing.
    if stub.args.center_rewards_coefficient is None:
        assert (gradient[:3] < 0).all() and torch.allclose(gradient[:3], -gradient[4:7])
    assert gradient[3] == gradient[7] == 0
    return float(loss.detach())


def process_share(each: torch.Tensor) -> float:
    """This process's share of a mean over all processes, which average their results."""
    return float(each[:REAL].sum()) * PROCESSES / OF_ALL


def test_reward_loss_subtracts_margin() -> None:
    """−log σ(chosen − rejected − margin): Llama 2, arXiv:2307.09288, eq. 2. A margin raises the loss."""
    difference, margins = torch.tensor(CHOSEN) - torch.tensor(REJECTED), torch.tensor(MARGINS)
    plain, apart = pair_loss(trainer()), pair_loss(trainer(), margin=margins)
    assert plain == pytest.approx(process_share(torch.log1p(torch.exp(-difference))), rel=1e-6)
    assert apart == pytest.approx(process_share(torch.log1p(torch.exp(-difference + margins))), rel=1e-6)
    assert apart > plain


def test_reward_loss_centers_scores() -> None:
    together = torch.tensor(CHOSEN) + torch.tensor(REJECTED)
    assert pair_loss(trainer(0.3)) - pair_loss(trainer()) == pytest.approx(process_share(0.3 * together**2), rel=1e-5)


def test_reward_metrics_ignore_padding_pairs() -> None:
    stub = trainer()
    pair_loss(stub, margin=torch.tensor(MARGINS))
    assert {name: seen[0] for name, seen in stub._metrics["train"].items()} == pytest.approx(
        {"num_tokens": 140.0, "min_reward": -1.0, "max_reward": 2.0, "mean_reward": 3.5 / 6, "accuracy": 1 / 3,
         "margin": (1.5 - 2.0 + 0.0) / 3}
    )  # fmt: skip
    assert stub._total_train_tokens == 140.0 and not stub._metrics["eval"]
