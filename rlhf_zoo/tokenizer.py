"""A tokenizer trained from scratch, for recipes that start from nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["train_tokenizer"]


def train_tokenizer(
    lines: Iterable[str], *, vocab_size: int, lowercase: bool = False, max_length: int
) -> PreTrainedTokenizerBase:
    """Byte-level BPE over `lines`, with <pad> and <eos> apart: PPO must tell a padded position from an end.

    A byte-level tokenizer knows every text, so it needs no <unk>. `max_length` is the model's context in tokens.
    """
    backend = Tokenizer(models.BPE())
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
