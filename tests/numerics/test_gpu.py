"""What only an accelerator can show: models made on the CPU and moved there agree with those that stayed."""

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


def test_an_update_is_that_of_the_cpu() -> None:
    with torch.device("cpu"):
        found = gpu.parity("cuda", tiny=True)
    for optimizer in ("sgd", "adamw_torch"):
        assert max(found[optimizer]["device"].values()) < CLOSE, found


def test_completions_with_graphs_and_without_are_those_of_the_cpu() -> None:
    with torch.device("cpu"):
        found = gpu.sampling("cuda", tiny=True)
    rows = [row for row in found.values() if isinstance(row, dict)]
    assert len(rows) == 4 and all(row["equal completions"] == found["completions"] for row in rows), found


def test_the_sampler_and_the_training_pass_agree_within_what_the_guard_allows() -> None:
    with torch.device("cpu"):
        found = gpu.mismatch("cuda", tiny=True)
    assert found["float32"]["max |log ratio|"] < CLOSE
    for name in ("bf16 autocast", "bf16 weights"):
        assert found[name]["mean |log ratio|"] < RATIO_ROUNDING[torch.bfloat16]
