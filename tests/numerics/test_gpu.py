"""Models that are made on the CPU and moved to the GPU agree with copies that stay on the CPU."""

import gpu
import pytest
import torch

from rlhf_zoo.ppo.guards import RATIO_ROUNDING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
# In units of the largest entry, float32. An update has 4 optimizer steps.
CLOSE = 1e-4


def test_update_equals_that_of_cpu() -> None:
    with torch.device("cpu"):
        errors = gpu.parity("cuda", tiny=True)
    for optimizer in ("sgd", "adamw_torch"):
        assert max(errors[optimizer]["device"].values()) < CLOSE, errors


def test_completions_with_and_without_graphs_equal_those_of_cpu() -> None:
    with torch.device("cpu"):
        results = gpu.sampling("cuda", tiny=True)
    rows = [row for row in results.values() if isinstance(row, dict)]
    assert len(rows) == 4 and all(row["equal completions"] == results["completions"] for row in rows), results


def test_sampler_and_training_pass_agree_within_bound_of_guard() -> None:
    with torch.device("cpu"):
        results = gpu.mismatch("cuda", tiny=True)
    assert results["float32"]["max |log ratio|"] < CLOSE
    for name in ("bf16 autocast", "bf16 weights"):
        assert results[name]["mean |log ratio|"] < RATIO_ROUNDING[torch.bfloat16]
