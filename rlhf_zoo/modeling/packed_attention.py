"""Packed rows: a forward pass over rows that are concatenated in a single row, without padding.

Each token attends only to tokens of its own row. transformers packs rows like this for flash attention (TRL calls it
`padding_free`), but a CPU has no such kernels. Here each row is one call of torch's own attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..errors import ZooError
from .sampling.decoder import base_of

NAME = "rlhf_zoo_packed"
#: Lengths of the two rows that test a model, and how far rounding may move logits, in standard deviations.
LENGTHS, APART = (5, 9), {torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1
#: The sliding windows that a model's layers passed to `attention`.
_windows: set[int] = set()


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """Computes torch's attention, also over packed rows.

    Args:
        module: The attention layer.
        query: (B, heads, L, D).
        key: (B, heads, L, D).
        value: (B, heads, L, D).
        attention_mask: torch's mask; or (1, 1, 1, R) int64, the lengths of R packed rows.
        **how: Further options of transformers' attention functions.

    Returns:
        (B, L, heads, D), and None for the attention weights.
    """
    # gpt-oss passes them, and torch's attention would ignore them silently.
    if how.get("s_aux") is not None:
        raise ValueError("torch's attention has no sinks.")
    if attention_mask is None or attention_mask.dtype != torch.long:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    if how.get("sliding_window"):
        _windows.add(how["sliding_window"])
    lengths = attention_mask.flatten().tolist()
    # One call for each row: a block-diagonal mask over all of them would be quadratic in their total length.
    rows = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, _window(q, **how), **how)[0] for q, k, v in rows]
    return torch.cat(outputs, 1), None


def _window(query: Tensor, *, sliding_window: int | None = None, **_: object) -> Tensor | None:
    """Returns the mask (L, L) of a sliding window; None if the row is no longer than the window."""
    length = query.shape[2]
    # Without a mask torch can use its causal kernel.
    if sliding_window is None or length <= sliding_window:
        return None
    behind = torch.arange(length, device=query.device).unsqueeze(1) - torch.arange(length, device=query.device)
    return (behind >= 0) & (behind < sliding_window)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether a model accepts packed rows, as it does after `enable_packing`.

    Args:
        model: A model.
    """
    return base_of(model).config._attn_implementation == NAME


def packed_inputs(ids: Tensor, mask: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Returns a model's arguments for packed rows.

    Args:
        ids: (B, L) token ids.
        mask: (B, L) bool, False for padding.
        positions: (B, L) positions.
    """
    return {
        "input_ids": ids[mask].unsqueeze(0),
        "position_ids": positions[mask].unsqueeze(0),
        # transformers passes on a 4-D mask unchanged, so this one can carry the lengths.
        "attention_mask": mask.sum(1).view(1, 1, 1, -1),
    }


@torch.no_grad()
def enable_packing(model: PreTrainedModel, *, subject: str) -> None:
    """Makes a model accept packed rows. Other inputs go through torch's attention as before.

    Args:
        model: The model.
        subject: What the error calls it.

    Raises:
        ZooError: A pass over two rows shows that packed rows would attend to each other in this model; or its
            attention is not torch's.
    """
    base = base_of(model)
    if supports_packing(base):
        return
    if (previous := base.config._attn_implementation) != "sdpa":
        raise ZooError(
            f"padding_free needs torch's attention (sdpa), and {subject}, a {type(base).__name__}, uses {previous!r}: "
            "remove padding_free, or attn_implementation if it is set."
        )
    training = base.training
    base.eval()  # without dropout
    ids = torch.arange(1, max(LENGTHS) + 1, device=next(base.parameters()).device) % _text_config(base).vocab_size
    rows = [ids[:length].unsqueeze(0) for length in LENGTHS]
    alone = torch.cat([base(input_ids=row, use_cache=False).logits[0] for row in rows]).float()
    base.set_attn_implementation(NAME)
    packed = _packed_logits(base, ids)
    base.train(training)
    # NaN in both counts as equal here. The rollout reports NaN.
    tolerance = APART.get(base.dtype, LOW_PRECISION_TOLERANCE) * float(alone.nan_to_num(0, 0, 0).std())
    if packed is None or not torch.allclose(packed, alone, rtol=0, atol=tolerance, equal_nan=True):
        base.set_attn_implementation(previous)
        raise ZooError(
            f"padding_free packs rows into one, and in {subject}, a {type(base).__name__}, they would attend to each "
            "other: remove it."
        )


def _packed_logits(base: Any, ids: Tensor) -> Tensor | None:
    """Returns the logits of the first `LENGTHS` of ids, packed; None if the model cannot accept packed rows."""
    # Flash attention takes no mask, so models that support it pass their sliding window to the attention function.
    if not (base._supports_flash_attn and supports_packing(base)):
        return None
    real = torch.arange(len(ids), device=ids.device) < torch.tensor(LENGTHS, device=ids.device).unsqueeze(1)
    positions = torch.arange(len(ids), device=ids.device).expand_as(real)
    # The pass below fills this if the model's layers pass on their window.
    _windows.clear()
    try:
        logits = base(**packed_inputs(ids.expand_as(real), real, positions), use_cache=False).logits[0].float()
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError):
        return None
    passes_window = _windows or not getattr(_text_config(base), "sliding_window", None)
    return logits if passes_window and len(logits) == sum(LENGTHS) else None


def _text_config(base: Any) -> Any:
    return base.config.get_text_config()
