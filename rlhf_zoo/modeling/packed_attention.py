"""Packs the rows of a batch into a single row without padding, for one forward pass.

Each token attends only to tokens of its own row. transformers packs rows in this way for flash attention (TRL calls it
`padding_free`), but a CPU has no such kernels. Here, torch's own attention is called once for each row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..errors import ZooError
from .sampling.decoder import base_of

ATTENTION_NAME = "rlhf_zoo_packed"
#: The lengths of the two rows that test a model.
TEST_LENGTHS = 5, 9
#: The largest difference between logits that rounding may cause, in standard deviations of all logits, by dtype.
TOLERANCES = {torch.float32: 1e-3}
#: The tolerance for all other dtypes.
LOW_PRECISION_TOLERANCE = 0.1
# The sliding windows that a model's layers passed to `attention`. `_packed_logits` reads them.
_passed_windows: set[int] = set()


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Computes torch's attention over a batch, or over packed rows.

    Args:
        module: The attention layer.
        query: (B, heads, L, D).
        key: (B, heads, L, D).
        value: (B, heads, L, D).
        attention_mask: A mask for torch's attention; or (1, 1, 1, R) int64, the lengths of R packed rows.
        **options: Further arguments of transformers' attention functions.

    Returns:
        (B, L, heads, D), and None for the attention weights.
    """
    # gpt-oss passes attention sinks, which torch's attention would silently ignore.
    if options.get("s_aux") is not None:
        raise ValueError("torch's attention has no sinks.")
    if attention_mask is None or attention_mask.dtype != torch.long:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("sliding_window"):
        _passed_windows.add(options["sliding_window"])
    lengths = attention_mask.flatten().tolist()
    # Attend row by row, because a block-diagonal mask over all rows is quadratic in their total length.
    rows = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, _window_mask(q, **options), **options)[0] for q, k, v in rows]
    return torch.cat(outputs, 1), None


def _window_mask(query: Tensor, *, sliding_window: int | None = None, **_: object) -> Tensor | None:
    """Returns the mask of a sliding window, (L, L) bool; None if the row is not longer than the window."""
    length = query.shape[2]
    # Without a mask, torch can use its causal kernel.
    if sliding_window is None or length <= sliding_window:
        return None
    positions = torch.arange(length, device=query.device)
    distance = positions.unsqueeze(1) - positions
    return (distance >= 0) & (distance < sliding_window)


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether `enable_packing` was called on a model, so that it accepts packed rows."""
    return base_of(model).config._attn_implementation == ATTENTION_NAME


def pack_inputs(ids: Tensor, mask: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Packs rows into the arguments of a model.

    Args:
        ids: (B, L) token ids.
        mask: (B, L) bool, False for padding.
        positions: (B, L) int64, each token's position in its row.
    """
    return {
        "input_ids": ids[mask].unsqueeze(0),
        "position_ids": positions[mask].unsqueeze(0),
        # transformers does not change a 4-D mask, so this mask can carry the lengths to `attention`.
        "attention_mask": mask.sum(1).view(1, 1, 1, -1),
    }


@torch.no_grad()
def enable_packing(model: PreTrainedModel, *, subject: str) -> None:
    """Makes a model accept packed rows. Batches that are not packed give the same results as before.

    Args:
        model: The model.
        subject: The model's name in the error.

    Raises:
        ZooError: The model does not use torch's attention, does not accept packed rows, or a test with two rows shows
            that packed rows attend to each other.
    """
    base = base_of(model)
    if supports_packing(base):
        return
    if (original_attention := base.config._attn_implementation) != "sdpa":
        raise ZooError(
            f"padding_free needs torch's attention (sdpa), but {subject}, a {type(base).__name__}, uses "
            f"{original_attention!r}: remove padding_free, or attn_implementation if it is set."
        )
    was_training = base.training
    base.eval()  # without dropout
    ids = (
        torch.arange(1, max(TEST_LENGTHS) + 1, device=next(base.parameters()).device)
        % base.config.get_text_config().vocab_size
    )
    rows = [ids[:length].unsqueeze(0) for length in TEST_LENGTHS]
    logits = torch.cat([base(input_ids=row, use_cache=False).logits[0] for row in rows]).float()
    base.set_attn_implementation(ATTENTION_NAME)
    packed_logits = _packed_logits(base, ids)
    base.train(was_training)
    # NaN in both passes counts as equal, because packing did not cause it. The rollout reports it.
    tolerance = TOLERANCES.get(base.dtype, LOW_PRECISION_TOLERANCE) * float(logits.nan_to_num(0, 0, 0).std())
    if packed_logits is None or not torch.allclose(packed_logits, logits, rtol=0, atol=tolerance, equal_nan=True):
        base.set_attn_implementation(original_attention)
        raise ZooError(
            f"padding_free packs rows into one, but in {subject}, a {type(base).__name__}, they would attend to each "
            "other: remove padding_free."
        )


def _packed_logits(base: Any, ids: Tensor) -> Tensor | None:
    """Returns the logits of the two test rows, packed; None if the model does not accept packed rows."""
    # Only models that support flash attention pass their sliding window to the attention function, because flash
    # attention takes no mask.
    if not (base._supports_flash_attn and supports_packing(base)):
        return None
    mask = torch.arange(len(ids), device=ids.device) < torch.tensor(TEST_LENGTHS, device=ids.device).unsqueeze(1)
    positions = torch.arange(len(ids), device=ids.device).expand_as(mask)
    # The pass below fills this set if the model's layers pass their window on.
    _passed_windows.clear()
    try:
        logits = base(**pack_inputs(ids.expand_as(mask), mask, positions), use_cache=False).logits[0].float()
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError):
        return None
    passes_window = _passed_windows or not getattr(base.config.get_text_config(), "sliding_window", None)
    return logits if passes_window and len(logits) == sum(TEST_LENGTHS) else None
