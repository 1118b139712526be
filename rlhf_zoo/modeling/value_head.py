"""The value head on a language model's hidden states, and a function that reads it from a checkpoint."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..errors import ZooError
from .model_files import ModelFiles, translate_load_errors

VALUE_HEAD_FILE = "critic/value_head.safetensors"
HEAD_PREFIX = "v_head."  # the prefix of the head's tensors in a model's state dict
HEAD_TENSORS = {"summary.weight", "summary.bias"}


def hidden_size_of(config: PreTrainedConfig) -> int:
    """Returns H, the size of a language model's last hidden state.

    Args:
        config: The model's configuration. A composite model's size is in its text or decoder configuration.

    Raises:
        ZooError: The configuration has no hidden size.
    """
    text_config = config.get_text_config(decoder=True)
    # OPT-350m projects its last hidden state to `word_embed_proj_dim`, so that key comes first.
    for name in ("word_embed_proj_dim", "hidden_size", "d_model", "n_embd"):
        size = getattr(text_config, name, None)
        if isinstance(size, int):
            return size
    raise ZooError(
        f"The configuration {type(config).__name__} has no hidden_size, which a value head needs: choose a model whose "
        "configuration has one."
    )


class ValueHead(nn.Module):
    """V(s) = w·h + b of a hidden state h, with dropout on h. The names of tensors and options are TRL's.

    Args:
        hidden_size: H, the size of h.
        summary_dropout_prob: The probability of dropout on h.
        v_head_init_strategy: "normal" draws w from N(0, range²) and sets b = 0; None keeps nn.Linear's initial values.
        v_head_initializer_range: The standard deviation for "normal".

    Raises:
        ZooError: `v_head_init_strategy` is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__()
        if v_head_init_strategy not in (None, "normal"):
            raise ZooError(f"v_head_init_strategy is {v_head_init_strategy!r}: choose None or 'normal'.")
        self.dropout = nn.Dropout(summary_dropout_prob)
        # Always use float32, because a lower precision would round away small updates.
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes values in the type of the head's weights.

        Args:
            hidden: (..., H) of any float type.

        Returns:
            (..., 1) float32.
        """
        return self.summary(self.dropout(hidden).to(self.summary.weight.dtype)).float()


def read_value_head(checkpoint: ModelFiles) -> dict[str, Tensor] | None:
    """Reads the value head of a checkpoint.

    Looks first in the weights (`v_head.*` in `model.safetensors` or its shards), then in VALUE_HEAD_FILE.

    Args:
        checkpoint: The checkpoint's files.

    Returns:
        `summary.weight` (1, H) and `summary.bias` (1,); None if the checkpoint has no head.

    Raises:
        ZooError: The head has other tensors, a shard is missing, or all weights are pickled.
    """
    weights = checkpoint.weights
    head: dict[str, Tensor] = {}
    if weights is not None:
        path, shard_of = weights
        # Download only the shards that contain the head.
        names = [path.name] if shard_of is None else sorted({shard_of[key] for key in shard_of if is_head_key(key)})
        for name in names:
            shard = checkpoint.find(name)
            if shard is None:
                raise ZooError(f"{checkpoint.source} lacks {name}, which {path.name} names: copy all files again.")
            head |= _head_tensors(shard)
    if not head and (file := checkpoint.find(VALUE_HEAD_FILE)):
        head = _head_tensors(file)
    if not head:
        # Pickled weights may contain a head, so do not report that there is none.
        if weights is None:
            checkpoint.refuse_pickle("model")
        return None
    if head.keys() != HEAD_TENSORS:
        raise ZooError(
            f"{checkpoint.source} has a value head with the tensors {', '.join(sorted(head))} instead of "
            f"{' and '.join(sorted(HEAD_TENSORS))}: another program wrote it; remove its {HEAD_PREFIX}* tensors."
        )
    return head


def is_head_key(key: str) -> bool:
    """Whether a key of a state dict belongs to the value head.

    Args:
        key: A key of a state dict.
    """
    return key.startswith(HEAD_PREFIX)


def _head_tensors(path: Path) -> dict[str, Tensor]:
    with translate_load_errors(str(path)), safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if is_head_key(key)]  # noqa: SIM118
        return {key.removeprefix(HEAD_PREFIX): file.get_tensor(key) for key in keys}
