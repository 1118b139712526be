"""Texts that are written already, under a model: log p of their tokens after their own prompts and after others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..functional import selected_logprobs
from ..modeling.chat import decode_completions, display_text, tokenize_completion, tokenize_prompt
from ..modeling.devices import MicroBatches
from ..modeling.logprobs import response_logits
from ..modeling.models import context_of
from ..modeling.sampling.sampler import Samples, Vocabulary, left_pad
from ..modeling.special_tokens import stop_ids
from .judges.named import scores
from .measure import Evaluator, rows_at_once

OTHERS = 8
"""Prompts that a text is read after besides its own."""


def written_samples(
    prompts: Sequence[Any], tokens: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
) -> Samples:
    """Texts after their prompts, as rewards read them; log-probabilities are not known and not read."""
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompt_ids, prompt_mask = left_pad([tokenize_prompt(one, tokenizer) for one in prompts], fill, "cpu")
    width = max(1, *map(len, tokens))
    padded = torch.tensor([[*ids, *([fill] * (width - len(ids)))] for ids in tokens])
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in tokens]).unsqueeze(1)
    ended = torch.tensor([bool(ids) and ids[-1] in stops for ids in tokens])
    return Samples(prompt_ids, prompt_mask, padded, mask, torch.zeros(mask.shape), ended)


@torch.no_grad()
def logprobs_under(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    tokens: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
) -> list[list[float]]:
    """Of each text, log p of its tokens after its prompt, nats."""
    vocabulary = Vocabulary.of(tokenizer, model)

    def rated(rows: Sequence[int]) -> list[list[float]]:
        part = written_samples([prompts[row] for row in rows], [tokens[row] for row in rows], tokenizer, ())
        part = Samples(**{**vars(part), "vocabulary": vocabulary}).to(model.device)
        found = selected_logprobs(response_logits(model, part, temperature=temperature), part.completion_ids)
        return [row[keep].tolist() for row, keep in zip(found, part.mask, strict=True)]

    if not tokens:
        return []
    parts = MicroBatches(rows_at_once(model, max(1, *map(len, tokens))))
    return [one for part in parts.run(rated, range(len(tokens))) for one in part]


def dependence(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    tokens: Sequence[Sequence[int]],
    own: Sequence[float],
    *,
    seed: int,
    temperature: float = 1.0,
) -> list[float] | None:
    """Of each text, log p(text | prompt) − log mean over its own and `OTHERS` other prompts, nats: at most log 9.

    own: log p of each text after its own prompt. The bound is that of van den Oord et al. 2018 (arXiv:1807.03748,
    eq. 4), which no single unlikely prompt moves. None where there are fewer other prompts.
    """
    names = [display_text(prompt) for prompt in prompts]
    different = list(dict.fromkeys(names))
    if len(different) <= OTHERS:
        return None
    first = {name: prompts[names.index(name)] for name in different}
    shift = np.random.default_rng(seed).permutation(np.arange(1, len(different)))[:OTHERS]
    place = {name: k for k, name in enumerate(different)}
    asked = [first[different[(place[name] + step) % len(different)]] for name in names for step in shift]
    repeated = [ids for ids in tokens for _ in shift]
    found = logprobs_under(model, tokenizer, asked, repeated, temperature=temperature)
    others = np.array([sum(row) for row in found]).reshape(len(tokens), OTHERS)
    every = np.column_stack([np.asarray(own, dtype=float), others])
    return (every[:, 0] - np.logaddexp.reduce(every, axis=1) + np.log(OTHERS + 1)).tolist()


def rescored(
    tools: Evaluator, prompts: Sequence[Any], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> tuple[list[float], list[float]]:
    """Reward and headline's judge of texts that somebody edited."""
    return rewarded(tools, prompts, texts, columns), scores(tools.judge, prompts, texts, columns)


def rewarded(
    tools: Evaluator, prompts: Sequence[Any], texts: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[float]:
    """The reward of texts that end by themselves; [] where there is none.

    A text may be twice as long as a completion, as edits lengthen it, where the model reads so much; then it is cut.
    """
    if tools.rewards is None:
        return []
    stops = tools.stops or stop_ids(tools.reference, tools.tokenizer)
    most, context = 2 * tools.max_new_tokens, context_of(tools.reference)
    if context is not None:
        asked = max((len(tokenize_prompt(prompt, tools.tokenizer)) for prompt in prompts), default=0)
        most = max(tools.max_new_tokens, min(most, context - asked - 1))
    written = zip(prompts, texts, strict=True)
    tokens = [tokenize_completion(prompt, text, tools.tokenizer)[:most] for prompt, text in written]
    before = [tokenize_prompt(prompt, tools.tokenizer) for prompt in prompts]
    texts = decode_completions(tools.tokenizer, prompts, before, tokens)  # as rewards read a policy's
    ended = [[*ids, stops[0]] for ids in tokens]
    rewards: list[float] = []
    size = rows_at_once(tools.reference, max(map(len, ended), default=1))
    for start in range(0, len(texts), size):
        part = slice(start, start + size)
        batch = written_samples(prompts[part], ended[part], tools.tokenizer, stops).to(tools.reference.device)
        rewards += tools.reward_of(batch, part, prompts, texts, columns)
    return rewards
