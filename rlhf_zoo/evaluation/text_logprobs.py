"""Existing texts under a model: log p of their tokens after their own prompts and after others."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..functional import selected_logprobs
from ..modeling.chat import decode_completions, display_text, tokenize_completion, tokenize_prompt
from ..modeling.chat_template import Prompt
from ..modeling.devices import MicroBatches
from ..modeling.logprobs import response_logits
from ..modeling.models import context_length
from ..modeling.sampling.sampler import Samples, Vocabulary, left_pad
from ..modeling.special_tokens import stop_ids
from .judges.panel import scores
from .measure import Evaluator, rows_at_once
from .probes.texts import OTHER_PROMPTS


def written_samples(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
) -> Samples:
    """Builds samples from texts and their prompts, as rewards read them.

    Args:
        prompts: (N,) texts or conversations.
        tokens: (N,) token ids of each text.
        tokenizer: The policy's tokenizer.
        stops: Token ids that end a text.

    Returns:
        The samples; their log-probabilities are zeros, which nothing reads.
    """
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompt_ids, prompt_mask = left_pad([tokenize_prompt(prompt, tokenizer) for prompt in prompts], fill, "cpu")
    width = max(1, *map(len, tokens))
    # Completions are padded on the right, prompts on the left, so that they meet.
    padded = torch.tensor([[*ids, *([fill] * (width - len(ids)))] for ids in tokens])
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in tokens]).unsqueeze(1)
    ended = torch.tensor([bool(ids) and ids[-1] in stops for ids in tokens])
    return Samples(prompt_ids, prompt_mask, padded, mask, torch.zeros(mask.shape), ended)


@torch.no_grad()
def logprobs_under(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
) -> list[list[float]]:
    """Computes log p of each text's tokens after its prompt.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: (N,) texts or conversations.
        tokens: (N,) token ids of each text.
        temperature: The sampling temperature.

    Returns:
        (N,) lists of log-probabilities, nats.
    """
    vocabulary = Vocabulary.of(tokenizer, model)

    def rated(rows: Sequence[int]) -> list[list[float]]:
        part = written_samples([prompts[row] for row in rows], [tokens[row] for row in rows], tokenizer, ())
        part = Samples(**{**vars(part), "vocabulary": vocabulary}).to(model.device)
        values = selected_logprobs(response_logits(model, part, temperature=temperature), part.completion_ids)
        return [row[keep].tolist() for row, keep in zip(values, part.mask, strict=True)]

    if not tokens:
        return []
    parts = MicroBatches(rows_at_once(model, max(1, *map(len, tokens))))
    return [text_values for part in parts.run(rated, range(len(tokens))) for text_values in part]


def dependence(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    own: Sequence[float],
    *,
    seed: int,
    temperature: float = 1.0,
) -> list[float] | None:
    """Measures how much each text depends on its prompt: log p(text | prompt) − log mean p over several prompts.

    The mean is over its own and `OTHER_PROMPTS` more, so the value is at most log 9. This is the bound of van den
    Oord et al. 2018 (arXiv:1807.03748, eq. 4). No single unlikely prompt moves it.

    Args:
        model: The SFT model.
        tokenizer: Its tokenizer.
        prompts: (N,) texts or conversations.
        tokens: (N,) token ids of each text.
        own: (N,) log p of each text after its own prompt, nats.
        seed: Seed that chooses the other prompts.
        temperature: The sampling temperature.

    Returns:
        (N,) values, nats; None where there are fewer than `OTHER_PROMPTS` other prompts.
    """
    names = [display_text(prompt) for prompt in prompts]
    different = list(dict.fromkeys(names))
    if len(different) <= OTHER_PROMPTS:
        return None
    first = {name: prompts[names.index(name)] for name in different}
    # The same cyclic shifts for all texts: each prompt then serves equally often as another's.
    shift = np.random.default_rng(seed).permutation(np.arange(1, len(different)))[:OTHER_PROMPTS]
    place = {name: k for k, name in enumerate(different)}
    other_prompts = [first[different[(place[name] + step) % len(different)]] for name in names for step in shift]
    repeated = [ids for ids in tokens for _ in shift]
    logprobs = logprobs_under(model, tokenizer, other_prompts, repeated, temperature=temperature)
    under_other_prompts = np.array([sum(row) for row in logprobs]).reshape(len(tokens), OTHER_PROMPTS)
    # Its own prompt in column 0, then the others.
    every = np.column_stack([np.asarray(own, dtype=float), under_other_prompts])
    return (every[:, 0] - np.logaddexp.reduce(every, axis=1) + np.log(OTHER_PROMPTS + 1)).tolist()


def rescored(
    evaluator: Evaluator, prompts: Sequence[Prompt], texts: Sequence[str], columns: Mapping[str, Sequence[object]]
) -> tuple[list[float], list[float]]:
    """Computes reward and headline judge's score of edited texts.

    Args:
        evaluator: The reward and the judges.
        prompts: (N,) texts or conversations.
        texts: (N,) completions.
        columns: The prompts' other columns.

    Returns:
        (N,) rewards, or [] without a reward, and (N,) judge's scores.
    """
    return rewarded(evaluator, prompts, texts, columns), scores(evaluator.judge, prompts, texts, columns)


def rewarded(
    evaluator: Evaluator, prompts: Sequence[Prompt], texts: Sequence[str], columns: Mapping[str, Sequence[object]]
) -> list[float]:
    """Computes the reward of texts as if they had ended by themselves.

    A text may be twice as long as a completion, because edits lengthen it, and is cut beyond that, or beyond the
    model's context.

    Args:
        evaluator: The reward and its tokenizer.
        prompts: (N,) texts or conversations.
        texts: (N,) completions.
        columns: The prompts' other columns.

    Returns:
        (N,) rewards; [] without a reward.
    """
    if evaluator.rewards is None:
        return []
    stops = evaluator.stops or stop_ids(evaluator.reference, evaluator.tokenizer)
    # Edits lengthen a text, here at most to twice a completion.
    most, context = 2 * evaluator.max_new_tokens, context_length(evaluator.reference)
    if context is not None:
        longest_prompt = max((len(tokenize_prompt(prompt, evaluator.tokenizer)) for prompt in prompts), default=0)
        most = max(evaluator.max_new_tokens, min(most, context - longest_prompt - 1))
    written = zip(prompts, texts, strict=True)
    tokens = [tokenize_completion(prompt, text, evaluator.tokenizer)[:most] for prompt, text in written]
    # The text is decoded again after the cut, so that it matches the tokens.
    before = [tokenize_prompt(prompt, evaluator.tokenizer) for prompt in prompts]
    texts = decode_completions(evaluator.tokenizer, prompts, before, tokens)  # as rewards read a policy's
    # The reward reads a text that ends by itself, so it gets the end token that the policy would write.
    ended = [[*ids, stops[0]] for ids in tokens]
    rewards: list[float] = []
    size = rows_at_once(evaluator.reference, max(map(len, ended), default=1))
    for start in range(0, len(texts), size):
        part = slice(start, start + size)
        batch = written_samples(prompts[part], ended[part], evaluator.tokenizer, stops).to(evaluator.reference.device)
        rewards += evaluator.reward_of(batch, part, prompts, texts, columns)
    return rewards
