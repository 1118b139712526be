"""The tolerances of the numerics tests."""

from typing import Any

import numpy as np
import torch

PRECISIONS = (torch.float64, torch.float32)

# Reference and formula read the same numbers, so they differ only by rounding: a few operations per token, and sums or
# recursions over at most 53 positions. An entry that cancels to nearly 0 has the rounding of its neighbors, so the unit
# is the machine epsilon times the largest entry (at least 1). The largest error of 300 draws of every case and shape is
# 11 units in float64 and 6 in float32; 8 would fail.
ROUNDINGS = 12

# The golden literals have at least 9 significant digits, and comparisons are in float64; rlax allows 1e-5.
GOLDEN_RTOL, GOLDEN_ATOL = 1e-8, 1e-10


def tolerance(dtype: torch.dtype, expected: Any) -> float:
    """Returns the absolute error allowed in each entry of `expected`, an array or a number computed in `dtype`."""
    return ROUNDINGS * torch.finfo(dtype).eps * max(1.0, float(np.abs(expected).max()))
