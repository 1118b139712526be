"""Completions cut after they were sampled: at a text behind a position, or at a length drawn for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .alignment import TokenText
from .sampling import Samples, uniforms

__all__ = ["Truncation", "cut", "drawn_lengths", "text_end"]


def cut(samples: Samples, lengths: Tensor, ended: Tensor) -> Samples:
    """m'_t = m_t·1[t < n]: the first n tokens of each completion; what is cut off counts nowhere.

    lengths: (B,) n of at least 1; ended: (B,) bool, whether what is left is a whole completion. As every token draws
    its own number, the tokens that are left are those of an uncut rollout.
    """
    places = torch.arange(samples.mask.shape[1], device=samples.mask.device)
    mask = samples.mask & (places < lengths.unsqueeze(1))
    logprobs = samples.logprobs.masked_fill(~mask, 0)
    shorter = replace(samples, mask=mask, logprobs=logprobs, ended=ended)
    return shorter.rows(slice(None))  # without the columns that no row reaches any more


def drawn_lengths(seed: int, keys: Sequence[tuple[int, ...]], *, shortest: int, longest: int) -> Tensor:
    """n_i uniform over shortest, …, longest: old TRL's LengthSampler, which left its upper bound out. Returns (B,).

    keys: the identity of each row's random stream, as `sample` takes it. The number comes from a stream beside the
    tokens', so that it depends on nothing but the seed and the row, and moves no token.
    """
    uniform = uniforms(seed, [(*key, 0) for key in keys], 1).squeeze(1)
    return shortest + (uniform * (longest - shortest + 1)).long()


def text_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, text: str, after: int) -> int | None:
    """How many tokens there are up to the first `text` behind the first `after` tokens, itself included; else None.

    OpenAI's truncate_token and truncate_after (lm-human-preferences `lm_tasks.py`, arXiv:1909.08593), of a text instead
    of one token.
    """
    if len(ids) <= after:
        return None
    found = TokenText(tokenizer, ids)
    start = found.text.find(text, len(found.first(after)))
    return None if start < 0 else found.completing(start + len(text)) + 1


@dataclass(frozen=True)
class Truncation:
    """How completions of at most `longest` tokens are cut.

    text: where a completion ends, once it has `after` tokens; shortest: each may have a length drawn from here to
    `longest`. What is cut at the text has ended; what is cut at its length has not.
    """

    longest: int
    shortest: int | None = None
    text: str | None = None
    after: int = 0

    def __bool__(self) -> bool:
        return self.text is not None or self.shortest is not None

    def __call__(
        self, samples: Samples, tokenizer: PreTrainedTokenizerBase, *, seed: int, keys: Sequence[tuple[int, ...]]
    ) -> Samples:
        """The samples, cut. seed, keys: those that they were sampled with."""
        if not self:
            return samples
        whole = samples.mask.sum(1)
        lengths, ended = whole, samples.ended
        if self.shortest is not None:
            lengths = drawn_lengths(seed, keys, shortest=self.shortest, longest=self.longest).to(whole)
            lengths = torch.minimum(lengths, whole)
            ended = ended & (lengths == whole)
        if self.text is not None:
            most = lengths.tolist()
            ends = [
                text_end(tokenizer, ids[:count], text=self.text, after=self.after)
                for ids, count in zip(samples.token_lists(), most, strict=True)
            ]
            counts = [count if end is None else end for end, count in zip(ends, most, strict=True)]
            lengths = torch.tensor(counts, device=whole.device)
            ended = ended | torch.tensor([end is not None for end in ends], device=whole.device)
        return cut(samples, lengths, ended)
