"""The β of a run on the Hub is the one by which the timeline sorts it."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_zoo.comparison import TimelineRun
from rlhf_zoo.hub.ablation import Run
from rlhf_zoo.ppo.config import PPOConfig

LISTING = {"repo": "me/toy-ppo", "checkpoints": []}


@pytest.mark.parametrize(
    ("settings", "beta"),
    [
        ({"kl_coef": 0.2}, 0.2),
        ({"kl_coef": 0}, 0.0),
        ({}, PPOConfig.kl_coef),
        ({"kl_coef": None}, None),
        ({"kl_coef": True}, None),
        ({"kl_coef": "0.2"}, None),
        ({"kl_coef": float("nan")}, None),
        ({"kl_coef": float("-inf")}, None),
        ({"kl_coef": 10**400}, None),
        ({"kl_coef": [0.2]}, None),
        ("none", None),
        (None, None),
    ],
)
def test_beta(settings: Any, beta: float | None) -> None:
    card = {"settings": settings}
    assert Run(LISTING, card).beta == TimelineRun.from_listing(LISTING, card).beta == beta


def test_a_card_without_settings() -> None:
    assert Run(LISTING, {}).beta is None and Run(LISTING, {}).steps == ()
