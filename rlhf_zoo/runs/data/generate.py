"""Completions of many prompts, in batches, with a progress bar."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling import distributed
from ...modeling.chat import decode_completions, tokenize_prompt
from ...modeling.devices import MicroBatches
from ...modeling.sampling.sampler import Samples, Vocabulary, sample
from ...modeling.sampling.truncation import Truncation
from ...modeling.special_tokens import stop_ids


@dataclass(frozen=True)
class SampledCompletions:
    """Batches of samples, and the texts of their completions, in the order of the prompts."""

    batches: list[Samples]
    texts: list[str]

    @cached_property
    def ended(self) -> list[bool]:
        return [bool(end) for batch in self.batches for end in batch.ended]

    @cached_property
    def lengths(self) -> list[int]:
        return [int(length) for batch in self.batches for length in batch.mask.sum(1)]


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    max_new_tokens: int,
    temperature: float,
    desc: str,
    top_p: float = 1.0,
    batch_size: int = 128,
    truncation: Truncation | None = None,
    stops: Sequence[int] | None = None,
) -> SampledCompletions:
    """One completion a prompt, of tokens that the tokenizer names. stops: what ends it; None: what ends the model's.

    The random stream of each depends on (seed, its key) alone. Batches are on the CPU; where the memory of the model's
    device is too small for one, it is sampled in parts. Of several processes each samples some; all have all of them.
    """
    model.eval()
    vocabulary = Vocabulary.of(tokenizer, model)
    pad = tokenizer.pad_token_id
    fill = pad if pad is not None and pad in vocabulary else tokenizer.eos_token_id
    stops = stop_ids(model, tokenizer) if stops is None else stops
    tokens = [tokenize_prompt(prompt, tokenizer) for prompt in prompts]
    done: dict[int, tuple[Samples, list[str]]] = {}
    parts = MicroBatches(batch_size)

    def drawn(rows: Sequence[int]) -> Samples:
        return sample(
            model,
            [tokens[row] for row in rows],
            keys=[keys[row] for row in rows],
            seed=seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_ids=stops,
            pad_id=fill,
            vocabulary=vocabulary,
        ).to("cpu")

    hidden = not distributed.first()
    with tqdm(total=len(prompts), desc=desc, unit="sample", leave=False, disable=hidden) as bar:
        for number, start in enumerate(range(0, len(prompts), batch_size)):
            chosen = range(start, min(start + batch_size, len(prompts)))
            if distributed.is_my_batch(number):
                batch = Samples.joined(list(parts.run(drawn, chosen)), fill)
                if truncation is not None:
                    batch = truncation(batch, tokenizer, seed=seed, keys=[keys[row] for row in chosen])
                asked, before = ([of[row] for row in chosen] for of in (prompts, tokens))
                done[number] = batch, decode_completions(tokenizer, asked, before, batch.token_lists())
            bar.update(len(chosen))
    found = distributed.in_order(done)
    return SampledCompletions([batch for batch, _ in found], [text for _, texts in found for text in texts])
