"""Completions cut after they were sampled: at a text behind a position, or at a length drawn for each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..alignment import TokenText
from .random import uniforms
from .sampler import Samples


def cut(samples: Samples, lengths: Tensor, *, whole: Tensor) -> Samples:
    """m'_t = m_t·1[t < n]: the first n tokens of each completion; what is cut off counts nowhere.

    lengths: (B,) n of at least 1; whole: (B,) bool, whether a completion is over with its nth token, though that is no
    end token. Otherwise it has ended only where nothing was cut off. As every token draws its own number, the tokens
    that are left are those of an uncut rollout.
    """
    ended = (samples.ended & (lengths >= samples.mask.sum(1))) | whole
    places = torch.arange(samples.mask.shape[1], device=samples.mask.device)
    mask = samples.mask & (places < lengths.unsqueeze(1))
    logprobs = samples.logprobs.masked_fill(~mask, 0)
    shorter = replace(samples, mask=mask, logprobs=logprobs, ended=ended, cut=whole)
    return shorter.rows(slice(None))  # without the columns that no row reaches any more


def drawn_lengths(seed: int, keys: Sequence[tuple[int, ...]], *, shortest: int, longest: int) -> Tensor:
    """n_i uniform over shortest, …, longest: old TRL's LengthSampler, which left its upper bound out. Returns (B,).

    keys: the identity of each row's random stream, as `sample` takes it. The number comes from a stream beside the
    tokens', so that it depends on nothing but the seed and the row, and moves no token.
    """
    uniform = uniforms(seed, [(*key, 0) for key in keys], 1).squeeze(1)
    return shortest + (uniform * (longest - shortest + 1)).long()


def text_end(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, text: str, after: int, prompt: Sequence[int] = ()
) -> int | None:
    """How many tokens there are up to the first `text` behind the first `after` tokens, itself included; else None.

    OpenAI's truncate_token and truncate_after (lm-human-preferences `lm_tasks.py`, arXiv:1909.08593), of a text instead
    of one token.
    """
    if len(ids) <= after:
        return None
    found = TokenText(tokenizer, ids, prompt)
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
        lengths = samples.mask.sum(1)
        if self.shortest is not None:
            drawn = drawn_lengths(seed, keys, shortest=self.shortest, longest=self.longest)
            lengths = torch.minimum(lengths, drawn.to(lengths))
        ends: list[int | None] = [None] * len(samples)
        if self.text is not None:
            ends = [
                text_end(tokenizer, ids[:most], text=self.text, after=self.after, prompt=prompt)
                for prompt, ids, most in zip(
                    samples.prompt_lists(), samples.token_lists(), lengths.tolist(), strict=True
                )
            ]
        counts = [most if end is None else end for end, most in zip(ends, lengths.tolist(), strict=True)]
        device = lengths.device
        at_text = torch.tensor([end is not None for end in ends], device=device)
        return cut(samples, torch.tensor(counts, device=device), whole=at_text)
