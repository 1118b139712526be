"""Cuts completions after they are sampled: at the first occurrence of a text, or at a random length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..alignment import TokenText
from .random import uniforms
from .sampler import Samples


def cut(samples: Samples, lengths: Tensor, *, at_text: Tensor) -> Samples:
    """Keeps the first n tokens of each completion: m'_t = m_t·1[t < n].

    Each token position has its own random number, so a cut does not change the remaining tokens.

    Args:
        samples: B completions.
        lengths: (B,) n, at least 1.
        at_text: (B,) bool, whether the completion is cut at a text that its nth token completes. Such a completion
            counts as ended. Any other counts as ended only if it had ended before and n cuts nothing off.
    """
    ended = (samples.ended & (lengths >= samples.mask.sum(1))) | at_text
    positions = torch.arange(samples.mask.shape[1], device=samples.mask.device)
    mask = samples.mask & (positions < lengths.unsqueeze(1))
    # Sums over rows need no mask because of these zeros.
    logprobs = samples.logprobs.masked_fill(~mask, 0)
    cut_samples = replace(samples, mask=mask, logprobs=logprobs, ended=ended, cut_at_text=at_text)
    return cut_samples.select(slice(None))  # drops columns that are now padding in all rows


def draw_lengths(seed: int, keys: Sequence[tuple[int, ...]], *, shortest: int, longest: int) -> Tensor:
    """Draws lengths n_i uniformly from `shortest` to `longest`, both included, unlike TRL's old LengthSampler.

    Lengths have their own random streams: they depend only on the seed and the row's key, and drawing them does not
    change which tokens are sampled.

    Args:
        seed: The run's seed.
        keys: B keys of the rows' random streams, as for `sample`.
        shortest: The smallest length, in tokens.
        longest: The largest length, in tokens.

    Returns:
        (B,) int64.
    """
    # Lengthen the key, because the key itself selects the stream that draws the row's tokens.
    uniform = uniforms(seed, [(*key, 0) for key in keys], 1).squeeze(1)
    return shortest + (uniform * (longest - shortest + 1)).long()


def find_text_end(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, text: str, after: int, prompt: Sequence[int] = ()
) -> int | None:
    """Finds the first occurrence of a text that ends a completion.

    Args:
        tokenizer: The policy's tokenizer.
        ids: Token ids of the completion.
        text: The text.
        after: The number of tokens at the completion's start; a text that begins within them does not count.
        prompt: Token ids of the prompt.

    Returns:
        The number of tokens up to and including the occurrence; None if the text does not occur.

    Source: truncate_token and truncate_after of lm-human-preferences (`lm_tasks.py`, arXiv:1909.08593), for a text
    instead of one token.
    """
    if len(ids) <= after:
        return None
    token_text = TokenText(tokenizer, ids, prompt)
    start = token_text.text.find(text, len(token_text.prefix_text(after)))
    return None if start < 0 else token_text.completing_token(start + len(text)) + 1


@dataclass(frozen=True)
class Truncation:
    """How completions are cut. A completion cut at the text has ended; one cut at its length has not.

    Attributes:
        longest: The largest random length. Not used without `shortest`, because sampling stops at this length itself.
        shortest: Each completion is cut at a random length from `shortest` to `longest`; None for no random lengths.
        text: A text that ends a completion; None for no text.
        after: The number of tokens at a completion's start; a text that begins within them does not count.
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
        """Cuts completions at the text or at a drawn length, whichever comes first.

        Args:
            samples: B completions.
            tokenizer: The policy's tokenizer.
            seed: The seed with which the completions were sampled.
            keys: The keys with which they were sampled.
        """
        if not self:
            return samples
        lengths = samples.mask.sum(1)
        # Apply random lengths first, because a text beyond the drawn length is cut off and does not end the completion.
        if self.shortest is not None:
            drawn_limits = draw_lengths(seed, keys, shortest=self.shortest, longest=self.longest)
            lengths = torch.minimum(lengths, drawn_limits.to(lengths))
        text_ends: list[int | None] = [None] * len(samples)
        if self.text is not None:
            text_ends = [
                find_text_end(tokenizer, ids[:limit], text=self.text, after=self.after, prompt=prompt)
                for prompt, ids, limit in zip(
                    samples.prompt_id_lists(), samples.completion_id_lists(), lengths.tolist(), strict=True
                )
            ]
        cut_lengths = [limit if end is None else end for end, limit in zip(text_ends, lengths.tolist(), strict=True)]
        device = lengths.device
        at_text = torch.tensor([end is not None for end in text_ends], device=device)
        return cut(samples, torch.tensor(cut_lengths, device=device), at_text=at_text)
