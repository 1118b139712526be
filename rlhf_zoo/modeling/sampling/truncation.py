"""Cuts completions after sampling: at a text that occurs after a position, or at a length drawn for each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..alignment import TokenText
from .random import uniforms
from .sampler import Samples


def cut(samples: Samples, lengths: Tensor, *, at_text: Tensor) -> Samples:
    """m'_t = m_t·1[t < n]: keeps the first n tokens of each completion.

    Every token draws its own random number, so the tokens that are left are the same as in an uncut rollout.

    Args:
        samples: B completions.
        lengths: (B,) n, at least 1.
        at_text: (B,) bool, whether a completion ends with its nth token, at a text instead of an end token. Other
            completions have ended only if nothing was cut off.
    """
    ended = (samples.ended & (lengths >= samples.mask.sum(1))) | at_text
    places = torch.arange(samples.mask.shape[1], device=samples.mask.device)
    mask = samples.mask & (places < lengths.unsqueeze(1))
    # Sums over rows need no mask because of these zeros.
    logprobs = samples.logprobs.masked_fill(~mask, 0)
    shorter = replace(samples, mask=mask, logprobs=logprobs, ended=ended, cut=at_text)
    return shorter.select(slice(None))  # drops the columns that no row reaches any more


def draw_lengths(seed: int, keys: Sequence[tuple[int, ...]], *, shortest: int, longest: int) -> Tensor:
    """Draws n_i uniformly from shortest, …, longest. TRL's old LengthSampler did so too, but excluded its upper bound.

    The numbers come from a separate stream, so they depend only on the seed and the row, and change no token.

    Args:
        seed: The run's seed.
        keys: B keys of the rows' random streams, as for `sample`.
        shortest: The least length.
        longest: The greatest length.

    Returns:
        (B,) int64.
    """
    uniform = uniforms(seed, [(*key, 0) for key in keys], 1).squeeze(1)
    return shortest + (uniform * (longest - shortest + 1)).long()


def find_text_end(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, text: str, after: int, prompt: Sequence[int] = ()
) -> int | None:
    """Finds where a given text ends a completion.

    Args:
        tokenizer: The policy's.
        ids: Token ids of the completion.
        text: The text.
        after: The text counts only after this many tokens.
        prompt: Token ids of the prompt.

    Returns:
        The number of tokens up to and including its first occurrence; None if it does not occur.

    Source: truncate_token and truncate_after of lm-human-preferences (`lm_tasks.py`, arXiv:1909.08593), for a text
    instead of one token.
    """
    if len(ids) <= after:
        return None
    token_text = TokenText(tokenizer, ids, prompt)
    start = token_text.text.find(text, len(token_text.first(after)))
    return None if start < 0 else token_text.completing(start + len(text)) + 1


@dataclass(frozen=True)
class Truncation:
    """How completions are cut. A completion cut at the text has ended; one cut at its length has not.

    Attributes:
        longest: The most tokens of a completion.
        shortest: Each completion may have a length drawn from here to `longest`; None draws none.
        text: A text that ends a completion; None for none.
        after: The text counts only after this many tokens.
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
        """Cuts samples.

        Args:
            samples: The samples.
            tokenizer: The policy's.
            seed: The seed that they were sampled with.
            keys: The keys that they were sampled with.
        """
        if not self:
            return samples
        lengths = samples.mask.sum(1)
        if self.shortest is not None:
            drawn_limits = draw_lengths(seed, keys, shortest=self.shortest, longest=self.longest)
            lengths = torch.minimum(lengths, drawn_limits.to(lengths))
        text_ends: list[int | None] = [None] * len(samples)
        if self.text is not None:
            text_ends = [
                find_text_end(tokenizer, ids[:limit], text=self.text, after=self.after, prompt=prompt)
                for prompt, ids, limit in zip(
                    samples.prompt_lists(), samples.token_lists(), lengths.tolist(), strict=True
                )
            ]
        counts = [limit if end is None else end for end, limit in zip(text_ends, lengths.tolist(), strict=True)]
        device = lengths.device
        at_text = torch.tensor([end is not None for end in text_ends], device=device)
        return cut(samples, torch.tensor(counts, device=device), at_text=at_text)
