"""Samples completions with the log-probability of each token, from one random stream per row.

`model.generate` draws all rows of a batch from one global generator, so tokens depend on the order of rows, the batch
size and the number of processes, and a resumed run samples other tokens. Here, a token depends only on its logits, the
seed, the row's key and the token's position. Rows that have ended leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from .decoder import Decoder, GrowingDecoder, accepts_argument, base_of, left_pad
from .random import draw_with_logprobs, uniforms

#: The version of the sampler's results, which run.json records. Raise it if a change gives other tokens for the same
#: seed, keys and weights, or other last bits of log-probabilities, in sampling or in training's passes.
SAMPLER_VERSION = 6

#: A critic on the policy's trunk. Maps the last hidden states of N rows, (N, H), to V before their next tokens, (N,).
Critic = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that can be sampled: all ids below `size` except `holes`. A model may have logits for more ids."""

    size: int
    holes: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *models: PreTrainedModel) -> Self:
        """Returns the tokenizer's ids for which every model has an embedding.

        Args:
            tokenizer: The policy's tokenizer.
            *models: The models that sample or read completions.
        """
        tables: list[Any] = [model.get_input_embeddings() for model in models]
        num_embeddings = min(table.weight.shape[0] for table in tables)
        # Embeddings are often padded to a multiple of 64, and the extra rows belong to no token.
        token_ids = {token_id for token_id in tokenizer.get_vocab().values() if token_id < num_embeddings}
        size = max(token_ids) + 1
        return cls(size, tuple(token_id for token_id in range(size) if token_id not in token_ids))

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and token_id not in self.holes


@dataclass(frozen=True)
class Samples:
    """Prompts and their sampled completions: B rows, P prompt positions, T response positions.

    Attributes:
        prompt_ids: (B, P) int64, left-padded.
        prompt_mask: (B, P) bool.
        completion_ids: (B, T) int64, right-padded.
        mask: (B, T) bool, True for the completion's tokens, up to and including its end token.
        logprobs: (B, T) in nats, log π of the sampled token at the sampling temperature; 0 outside the mask.
        ended: (B,) bool, whether the completion ended by itself instead of at the length limit.
        vocabulary: The tokens that could be sampled. Every model normalizes log-probabilities over these alone. None
            for all entries of the logits.
        cut_at_text: (B,) bool, whether the completion was cut at the stop text and so has no end token; None if
            completions are not cut.
        values: (B, T), V of the state before each token, if the critic shares the policy's trunk; otherwise None.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor
    vocabulary: Vocabulary | None = None
    cut_at_text: Tensor | None = None
    values: Tensor | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def select(self, indices: Tensor | slice) -> Samples:
        """Selects rows, and drops columns that are padding in all of them.

        Args:
            indices: The rows.
        """
        tensors = {name: value for name, value in vars(self).items() if name != "vocabulary" and value is not None}
        selected_tensors = {name: value[indices] for name, value in tensors.items()}
        prompt_width = int(selected_tensors["prompt_mask"].sum(1).max())
        response_width = int(selected_tensors["mask"].sum(1).max())
        for name in ("prompt_ids", "prompt_mask"):
            selected_tensors[name] = selected_tensors[name][:, -prompt_width:]
        for name in {"completion_ids", "mask", "logprobs", "values"} & set(selected_tensors):
            selected_tensors[name] = selected_tensors[name][:, :response_width]
        return Samples(**selected_tensors, vocabulary=self.vocabulary)

    def to(self, device: torch.device | str) -> Samples:
        """Moves all tensors.

        Args:
            device: The destination.
        """
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    @classmethod
    def concatenate(cls, parts: Sequence[Samples], pad_id: int) -> Samples:
        """Concatenates samples that have neither `cut_at_text` nor `values`.

        Args:
            parts: At least one batch of samples.
            pad_id: The id of PAD.
        """
        if len(parts) == 1:
            return parts[0]

        def concatenate_field(name: str, fill: float, *, left_padded: bool = False) -> Tensor:
            tensors = [getattr(part, name) for part in parts]
            width = max(tensor.shape[1] for tensor in tensors)
            padded_tensors = []
            for tensor in tensors:
                missing_columns = width - tensor.shape[1]
                padding = (missing_columns, 0) if left_padded else (0, missing_columns)
                padded_tensors.append(pad(tensor, padding, value=fill))
            return torch.cat(padded_tensors)

        return cls(
            concatenate_field("prompt_ids", pad_id, left_padded=True),
            concatenate_field("prompt_mask", False, left_padded=True),
            concatenate_field("completion_ids", pad_id),
            concatenate_field("mask", False),
            concatenate_field("logprobs", 0.0),
            torch.cat([part.ended for part in parts]),
            parts[0].vocabulary,
        )

    def prompt_id_lists(self) -> list[list[int]]:
        """Returns each prompt's token ids, without padding."""
        return [ids[is_token].tolist() for ids, is_token in zip(self.prompt_ids, self.prompt_mask, strict=True)]

    def completion_id_lists(self) -> list[list[int]]:
        """Returns each completion's token ids, with its end token and without padding."""
        return [ids[is_token].tolist() for ids, is_token in zip(self.completion_ids, self.mask, strict=True)]


@dataclass(frozen=True)
class SamplingRequest:
    """A trainer's request to a rollout engine. The fields are arguments of `sample`, which documents them."""

    prompts: Sequence[Sequence[int]]
    keys: Sequence[tuple[int, ...]]
    seed: int
    max_new_tokens: int
    stop_ids: Sequence[int]
    pad_id: int
    temperature: float
    vocabulary: Vocabulary
    max_tokens: int | None = None
    critic: Critic | None = None


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    vocabulary: Vocabulary | None = None,
    max_tokens: int | None = None,
    critic: Critic | None = None,
    decoder: Decoder | None = None,
    on_finished: Callable[[int], object] | None = None,
) -> Samples:
    """Samples one completion for each prompt.

    Args:
        model: The policy.
        prompts: B non-empty token lists.
        keys: B tuples of non-negative integers. A row's key selects its random stream.
        seed: The run's seed.
        max_new_tokens: The maximum number of tokens in a completion.
        stop_ids: A completion ends with the first of these tokens.
        pad_id: The id of PAD.
        temperature: The sampling temperature, by which logits are divided.
        top_p: Draws are limited to the most likely tokens that together have this probability; log π is not changed.
        vocabulary: The tokens that can be sampled; None for every entry of the logits. All others have probability 0.
        max_tokens: The maximum number of tokens in the cache, padding included; None for no limit. Prompts wait until
            there is room.
        critic: A critic that shares the policy's trunk, for `Samples.values`; None for no critic.
        decoder: The decoder; None for a `GrowingDecoder`.
        on_finished: Called after each pass with the number of finished completions; None calls nothing.

    Raises:
        ZooError: The model has no key-value cache, or a prompt with its completion exceeds max_tokens.
    """
    check_accepts_cache(model)
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, device)
    row_count = len(prompts)
    # Draw all random numbers first, so that a token's random number does not depend on when other rows end.
    uniform = uniforms(seed, keys, max_new_tokens).to(device)
    completion_ids = torch.full((row_count, max_new_tokens), pad_id, device=device)
    logprobs = torch.zeros((row_count, max_new_tokens), device=device)
    values = None if critic is None else torch.zeros_like(logprobs)
    ended = torch.zeros(row_count, dtype=torch.bool, device=device)
    drawn_counts = torch.zeros(row_count, dtype=torch.long, device=device)
    stops = torch.tensor(list(stop_ids), device=device, dtype=torch.long)

    lengths = [len(prompt) for prompt in prompts]
    waiting_rows = _starting_order(lengths, max_new_tokens, max_tokens)
    decoder = decoder or GrowingDecoder(model, max_new_tokens=max_new_tokens, max_tokens=max_tokens)
    while waiting_rows or len(decoder.row_ids):
        waiting_lengths = [lengths[row] for row in waiting_rows]
        if start_count := _count_rows_to_start(decoder, waiting_lengths, drawn_counts, max_new_tokens):
            new_rows, waiting_rows = waiting_rows[:start_count], waiting_rows[start_count:]
            output, rows = decoder.prefill([prompts[row] for row in new_rows], new_rows, pad_id)
        else:
            output, rows = decoder.step()
        positions = drawn_counts[rows]
        logits = scale_logits(output.logits, temperature, vocabulary)
        tokens, token_logprobs = draw_with_logprobs(logits, uniform[rows, positions], top_p=top_p)
        completion_ids[rows, positions], logprobs[rows, positions] = tokens, token_logprobs
        if critic is not None and values is not None:
            values[rows, positions] = critic(output.states)
        is_stop = torch.isin(tokens, stops)
        ended[rows] = is_stop
        drawn_counts[rows] = positions + 1
        decoder.advance(tokens, is_stop | (positions + 1 == max_new_tokens))
        if on_finished is not None:
            on_finished(row_count - len(waiting_rows) - len(decoder.row_ids))
    mask = torch.arange(int(drawn_counts.max()), device=device) < drawn_counts.unsqueeze(1)
    width = mask.shape[1]
    values = None if values is None else values[:, :width]
    return Samples(
        prompt_ids, prompt_mask, completion_ids[:, :width], mask, logprobs[:, :width], ended, vocabulary, values=values
    )


def _count_rows_to_start(
    decoder: Decoder, waiting_lengths: Sequence[int], drawn_counts: Tensor, max_new_tokens: int
) -> int:
    """Returns how many waiting rows to start now; 0 if the running rows draw their next token first.

    A prefill is a separate pass, in which running rows make no progress. So rows wait until it can start at least a
    quarter as many as are running, or all that wait.
    """
    if not waiting_lengths:
        return 0
    count = decoder.count_startable(waiting_lengths, max_new_tokens - drawn_counts[decoder.row_ids])
    return count if count >= min(len(waiting_lengths), len(decoder.row_ids) / 4) else 0


def _starting_order(lengths: Sequence[int], max_new_tokens: int, max_tokens: int | None) -> list[int]:
    """Returns the rows in the order in which they start. Checks that each row fits into the cache."""
    if max_tokens is None:
        return list(range(len(lengths)))
    check_cache_capacity(lengths, max_new_tokens, max_tokens)
    # Sort by length, because `count_startable` assumes that the last of the rows that start is the longest, and because
    # rows of similar length need little padding.
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def check_cache_capacity(lengths: Iterable[int], max_new_tokens: int, max_tokens: int | None) -> None:
    """Checks that an otherwise empty cache can hold each prompt with its completion.

    Args:
        lengths: The prompts' lengths in tokens.
        max_new_tokens: The maximum number of tokens in a completion.
        max_tokens: The maximum number of tokens in the cache; None for no limit.

    Raises:
        ZooError: A prompt does not fit.
    """
    if max_tokens is None:
        return
    longest = max(lengths)
    if longest + max_new_tokens > max_tokens:
        raise ZooError(
            f"max_rollout_batch_tokens is {max_tokens}, but a prompt of {longest} tokens with a completion of up to "
            f"{max_new_tokens} needs {longest + max_new_tokens}: set it to at least that."
        )


def scale_logits(logits: Tensor, temperature: float, vocabulary: Vocabulary | None) -> Tensor:
    """Divides logits by the temperature, and gives tokens that cannot be sampled the probability 0.

    Args:
        logits: (..., V).
        temperature: The temperature.
        vocabulary: The tokens that can be sampled; None for all.

    Returns:
        (..., vocabulary.size) float32; (..., V) without a vocabulary.
    """
    if vocabulary is None:
        return logits.float() / temperature
    scaled_logits = logits[..., : vocabulary.size].float() / temperature
    if not vocabulary.holes:
        return scaled_logits
    # Use a finite number instead of −∞, because 0·∞ would be NaN in Σ p·log p: half of the lowest, so that differences
    # stay finite too.
    holes = torch.tensor(vocabulary.holes, device=scaled_logits.device)
    return scaled_logits.index_fill(-1, holes, torch.finfo(torch.float32).min / 2)


def check_accepts_cache(model: PreTrainedModel) -> None:
    """Checks that a model accepts a cache, `past_key_values`. Without it, each step would see only the newest token.

    Args:
        model: The policy.

    Raises:
        ZooError: The model does not accept `past_key_values`.
    """
    if not accepts_argument(model, "past_key_values"):
        raise ZooError(
            f"A {type(base_of(model)).__name__} takes no past_key_values, the cache that sampling needs: choose a "
            "causal language model that does."
        )
