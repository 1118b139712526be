"""Sampling that returns the log-probability of each sampled token, from one random stream per row.

`model.generate` draws a whole batch from one global generator: another row order, batch split or number of processes
samples other tokens, and so does a resumed run. Here row i draws from a stream keyed by (seed, key of the row, token
position) and by nothing else. Rows that have ended leave the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .errors import ZooError
from .finite import NotFinite
from .functional import selected_logprobs

__all__ = [
    "Samples",
    "Vocabulary",
    "base_of",
    "check_cached",
    "draw_tokens",
    "left_pad",
    "next_logits",
    "positions_of",
    "sample",
    "scaled",
    "takes",
    "uniforms",
]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that can be sampled: ids below `size` but for `holes`. A model may have more rows than tokens."""

    size: int
    holes: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *models: PreTrainedModel) -> Self:
        """The ids that the tokenizer names and every model has an embedding of."""
        tables: list[Any] = [model.get_input_embeddings() for model in models]
        rows = min(table.weight.shape[0] for table in tables)
        named = {index for index in tokenizer.get_vocab().values() if index < rows}
        size = max(named) + 1
        return cls(size, tuple(index for index in range(size) if index not in named))

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.size and index not in self.holes


@dataclass(frozen=True)
class Samples:
    """Prompts and their sampled completions. B rows, P prompt positions (left-padded), T response positions.

    prompt_ids (B, P) int64 with prompt_mask (B, P) bool; completion_ids (B, T) int64, right-padded, with mask (B, T)
    bool, True up to and including the end-of-sequence token; logprobs (B, T) of the sampled token at the sampling
    temperature, in nats, 0 outside the mask; ended (B,) bool: whether the row stopped by itself. vocabulary: what could
    be sampled, so that log-probabilities of these samples are of that distribution in every model; None: all rows.
    cut (B,) bool: which completions ended at a text, so without an end token; None: none did.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor
    vocabulary: Vocabulary | None = None
    cut: Tensor | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def rows(self, index: Tensor | slice) -> Samples:
        """The chosen rows, without columns that are padding in all of them."""
        known = {name: value for name, value in vars(self).items() if name != "vocabulary" and value is not None}
        chosen = {name: value[index] for name, value in known.items()}
        prompt = int(chosen["prompt_mask"].sum(1).max())
        response = int(chosen["mask"].sum(1).max())
        for name in ("prompt_ids", "prompt_mask"):
            chosen[name] = chosen[name][:, -prompt:]
        for name in ("completion_ids", "mask", "logprobs"):
            chosen[name] = chosen[name][:, :response]
        return Samples(**chosen, vocabulary=self.vocabulary)

    def to(self, device: torch.device | str) -> Samples:
        """The same, there."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @classmethod
    def joined(cls, parts: Sequence[Samples], pad_id: int) -> Samples:
        """The rows of all parts, in their order, none of which is cut yet."""
        if len(parts) == 1:
            return parts[0]
        widths = {name: max(getattr(part, name).shape[1] for part in parts) for name in ("prompt_mask", "mask")}

        def beside(name: str, like: str, fill: float) -> Tensor:
            """Prompts end and completions begin where they meet."""
            rows = [getattr(part, name) for part in parts]
            room = [widths[like] - row.shape[1] for row in rows]
            sides = [(more, 0) if like == "prompt_mask" else (0, more) for more in room]
            return torch.cat([pad(row, side, value=fill) for row, side in zip(rows, sides, strict=True)])

        return cls(
            beside("prompt_ids", "prompt_mask", pad_id),
            beside("prompt_mask", "prompt_mask", False),
            beside("completion_ids", "mask", pad_id),
            beside("mask", "mask", False),
            beside("logprobs", "mask", 0.0),
            torch.cat([part.ended for part in parts]),
            parts[0].vocabulary,
        )

    def chunks(self, size: int) -> Iterator[Samples]:
        """Consecutive rows, at most `size` at a time."""
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def token_lists(self) -> list[list[int]]:
        """Each completion's real tokens, the end-of-sequence token included."""
        return [ids[keep].tolist() for ids, keep in zip(self.completion_ids, self.mask, strict=True)]


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Token lists -> ids (B, P) int64 and mask (B, P) bool, padded on the left."""
    width = max(len(s) for s in sequences)
    ids = [[pad_id] * (width - len(s)) + list(s) for s in sequences]
    mask = [[False] * (width - len(s)) + [True] * len(s) for s in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def uniforms(seed: int, keys: Sequence[tuple[int, ...]], length: int) -> Tensor:
    """One uniform number in [0, 1) per row and position, (B, length) float64, a function of (seed, key) alone."""
    # The key's length is part of the seed: SeedSequence pads with zeros, so (1,) and (1, 0) would share a stream.
    streams = (np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(key), *key]))) for key in keys)
    return torch.from_numpy(np.stack([stream.random(length) for stream in streams]))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the smallest set of most likely tokens that holds `top_p` of the mass. (B, V) -> (B, V)."""
    ordered, order = probabilities.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probabilities.masked_fill(outside.gather(-1, order.argsort(-1)), 0)


def draw_tokens(logits: Tensor, uniform: Tensor, *, top_p: float = 1.0) -> Tensor:
    """Inverse-CDF draw with numbers of `uniforms`: logits (B, V), uniform (B,) in [0, 1) -> tokens (B,).

    Sums in float64, as V may be large. Raises NotFinite for logits that are not finite.
    """
    probabilities = logits.softmax(-1).double()
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(-1)
    if not cumulative[:, -1].isfinite().all():
        raise NotFinite(
            "The policy gave logits that are not finite, so no token can be drawn: check its weights, and where it "
            "trains lower learning_rate, or compute in float32 if bf16 is on."
        )
    target = uniform.to(cumulative) * cumulative[:, -1]
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)


def positions_of(mask: Tensor) -> Tensor:
    """Where each token stands in its row, of which padding is no part. mask: (B, L) bool. Returns (B, L) int64."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


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
) -> Samples:
    """Samples one completion a prompt; a row ends with the first token among `stop_ids` or after `max_new_tokens`.

    prompts: B non-empty token lists; keys: B tuples of non-negative ints, the identity of each row's random stream.
    vocabulary: the tokens that can be sampled, None for every row of the logits; the rest has the probability 0. The
    log-probabilities are of this distribution at `temperature`, also when `top_p` < 1 cuts its tail off. Raises
    ZooError for a model without the cache that sampling needs.
    """
    check_cached(model)
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, device)
    size = len(prompts)
    random = uniforms(seed, keys, max_new_tokens).to(device)
    completion = torch.full((size, max_new_tokens), pad_id, device=device)
    mask = torch.zeros((size, max_new_tokens), dtype=torch.bool, device=device)
    logprobs = torch.zeros((size, max_new_tokens), device=device)
    ended = torch.zeros(size, dtype=torch.bool, device=device)
    stops = torch.tensor(list(stop_ids), device=device, dtype=torch.long)

    alive = torch.arange(size, device=device)
    cache: Any = DynamicCache(config=model.config)
    seen = prompt_mask
    keep_last = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    inputs, positions = prompt_ids, positions_of(prompt_mask)
    for t in range(max_new_tokens):
        out = model(
            input_ids=inputs,
            attention_mask=seen.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **keep_last,
        )
        if t == 0:
            _check_filled(cache, model)
        logits = scaled(out.logits[:, -1], temperature, vocabulary)
        tokens = draw_tokens(logits, random[alive, t], top_p=top_p)
        completion[alive, t] = tokens
        mask[alive, t] = True
        logprobs[alive, t] = selected_logprobs(logits, tokens)
        stopped = torch.isin(tokens, stops)
        ended[alive[stopped]] = True
        if stopped.all():
            break
        if stopped.any():
            going = (~stopped).nonzero().squeeze(-1)
            cache.reorder_cache(going)
            alive, tokens, seen, positions = alive[going], tokens[going], seen[going], positions[going]
        seen = torch.cat([seen, seen.new_ones(len(alive), 1)], dim=1)
        inputs, positions = tokens.unsqueeze(1), positions[:, -1:] + 1
    width = int(mask.sum(1).max())
    return Samples(
        prompt_ids, prompt_mask, completion[:, :width], mask[:, :width], logprobs[:, :width], ended, vocabulary
    )


def scaled(logits: Tensor, temperature: float, vocabulary: Vocabulary | None) -> Tensor:
    """Logits (..., V) at the temperature, float32, of what can be sampled; a hole's probability is 0."""
    if vocabulary is None:
        return logits.float() / temperature
    kept = logits[..., : vocabulary.size].float() / temperature
    if not vocabulary.holes:
        return kept
    # Not −∞: in a sum Σ p·log p it would make NaN of 0·∞.
    holes = torch.tensor(vocabulary.holes, device=kept.device)
    return kept.index_fill(-1, holes, torch.finfo(torch.float32).min / 2)


def base_of(model: Any) -> Any:
    """The model under an adapter; the model itself where there is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes(model: Any, argument: str) -> bool:
    """Whether a model's forward has an argument of this name."""
    return argument in inspect.signature(base_of(model).forward).parameters


def check_cached(model: PreTrainedModel) -> None:
    """Raises ZooError for a model that takes no `past_key_values`, and would forget all tokens but the last."""
    if not takes(model, "past_key_values"):
        raise ZooError(
            f"A {type(base_of(model)).__name__} takes no past_key_values, the cache that completions are sampled with: "
            "give a causal language model that does, as those with state-space layers beside attention do."
        )


def _check_filled(cache: DynamicCache, model: Any) -> None:
    """Raises ZooError where a layer of linear attention left its place in the cache empty: its state is elsewhere."""
    for layer in cache.layers:
        states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
        if any(states) and not any(filled for each in states for filled in each.values()):
            raise ZooError(
                f"A {type(base_of(model)).__name__} keeps the state of its recurrent layers in its modules and not in "
                "past_key_values, so the rows of a batch would mix: give another architecture."
            )


def next_logits(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    cache: DynamicCache,
    length: int,
    temperature: float = 1.0,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Logits of the next token after rows that have no padding, as `sample` has them.

    ids (B, I) int64: what `cache`, which this adds to, has not seen yet of rows of `length` tokens. Returns (B, V)
    float32, divided by the temperature.
    """
    size, new = ids.shape
    out = model(
        input_ids=ids,
        attention_mask=ids.new_ones(size, length),
        position_ids=torch.arange(length - new, length, device=ids.device).expand(size, new),
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}),
    )
    return scaled(out.logits[:, -1], temperature, vocabulary)
