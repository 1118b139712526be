"""benchmarks/evidence.py: the share of the possible gain; what is kept of runs: tests/contract/test_evidence.py."""

import pytest
from figures import gain

from rlhf_zoo.errors import ZooError


@pytest.mark.parametrize(
    ("sft", "checkpoints", "recommended", "best_step", "shares"),
    [
        (-0.5, {10: 1.0, 20: 1.5, 30: 0.5}, 10, 20, (0.75, 0.5)),
        (0.0, {10: 1.0, 20: -3.0}, None, 10, (0, -3)),  # nothing is recommended: nothing is gained
        (1.0, {10: 0.5, 20: 3.0}, 10, 20, (-0.25, 1)),
        (1.0, {10: 1.0, 20: 0.0}, 10, 10, (None, None)),  # none above SFT
        (0.0, {20: 1.0, 10: 1.0}, 20, 10, (1, 1)),  # of equal ones the first
    ],
)
def test_the_share_of_the_gain(sft, checkpoints, recommended, best_step, shares):
    found = gain.share_of_gain(sft, checkpoints, recommended)
    assert (found.best_step, (found.share, found.last_share)) == (best_step, shares)


def test_a_recommended_step_must_have_been_measured():
    with pytest.raises(ZooError, match="Step 30 is recommended and was not measured"):
        gain.share_of_gain(0.0, {10: 1.0}, 30)
