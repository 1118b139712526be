"""Scores existing texts: log p of their tokens after their own prompt and after other prompts, and their reward."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..functional import selected_logprobs
from ..modeling.chat import decode_completions, display_text, tokenize_completion, tokenize_prompt
from ..modeling.chat_template import Prompt
from ..modeling.devices import MicroBatches
from ..modeling.logprobs import response_logits
from ..modeling.models import context_length_of
from ..modeling.sampling.sampler import Samples, Vocabulary, left_pad
from ..modeling.special_tokens import stop_ids
from ..runs.status_line import Progress
from .measure import Evaluator, max_rows_in_memory
from .probes.texts import OTHER_PROMPTS


def build_samples(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
) -> Samples:
    """Builds samples for reward functions from existing texts and their prompts.

    Args:
        prompts: (N,) texts or conversations.
        tokens: (N,) token ids of each text.
        tokenizer: The policy's tokenizer.
        stops: Token ids that end a text.

    Returns:
        The samples. Their log-probabilities are zeros, because rewards do not read them.
    """
    return _pad_samples([tokenize_prompt(prompt, tokenizer) for prompt in prompts], tokens, tokenizer, stops)


def _pad_samples(
    prompt_tokens: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    stops: Sequence[int],
) -> Samples:
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompt_ids, prompt_mask = left_pad([list(ids) for ids in prompt_tokens], fill, "cpu")
    width = max(1, *map(len, tokens))
    # Prompts are padded on the left and completions on the right, so that no padding is between them.
    completion_ids = torch.tensor([[*ids, *([fill] * (width - len(ids)))] for ids in tokens])
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in tokens]).unsqueeze(1)
    ended = torch.tensor([bool(ids) and ids[-1] in stops for ids in tokens])
    return Samples(prompt_ids, prompt_mask, completion_ids, mask, torch.zeros(mask.shape), ended)


def make_batch_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
) -> Callable[[Sequence[int]], list[list[float]]]:
    """Returns a function that computes log p of the texts in some rows, in one forward pass.

    Args:
        model: The model.
        tokenizer: The model's tokenizer.
        prompt_tokens: (N,) token ids of each prompt.
        tokens: (N,) token ids of each text.
        temperature: The sampling temperature.

    Returns:
        A function of row indices that returns, for each of these rows, the log-probability of each token, nats.
    """
    vocabulary = Vocabulary.of(tokenizer, model)

    @torch.no_grad()
    def score(rows: Sequence[int]) -> list[list[float]]:
        batch = _pad_samples([prompt_tokens[row] for row in rows], [tokens[row] for row in rows], tokenizer, ())
        batch = Samples(**{**vars(batch), "vocabulary": vocabulary}).to(model.device)
        values = selected_logprobs(response_logits(model, batch, temperature=temperature), batch.completion_ids)
        return [row[is_token].tolist() for row, is_token in zip(values, batch.mask, strict=True)]

    return score


def compute_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    desc: str,
) -> list[list[float]]:
    """Computes log p of each text's tokens after its prompt.

    Args:
        model: The model.
        tokenizer: The model's tokenizer.
        prompts: (N,) texts or conversations.
        tokens: (N,) token ids of each text.
        temperature: The sampling temperature.
        desc: Label of the progress bar.

    Returns:
        (N,) lists of log-probabilities, nats.
    """
    if not tokens:
        return []
    prompt_tokens = [tokenize_prompt(prompt, tokenizer) for prompt in prompts]
    score = make_batch_scorer(model, tokenizer, prompt_tokens, tokens, temperature=temperature)
    batches, logprobs = MicroBatches(max_rows_in_memory(model, max(1, *map(len, tokens)))), []
    with Progress(len(tokens), desc, "text", leave=False) as bar:
        for batch_logprobs in batches.run(score, range(len(tokens))):
            logprobs += batch_logprobs
            bar.update(len(batch_logprobs))
    return logprobs


def measure_dependence(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    own_logprobs: Sequence[float],
    *,
    seed: int,
    temperature: float = 1.0,
) -> list[float] | None:
    """Measures how much each text depends on its prompt: log p(text | prompt) − log mean p over several prompts.

    The mean is over the text's own prompt and `OTHER_PROMPTS` (8) others, so the value is at most log 9, the bound of
    van den Oord et al. 2018 (arXiv:1807.03748, eq. 4). A single unusual prompt hardly changes it.

    Args:
        model: The SFT model.
        tokenizer: The model's tokenizer.
        prompts: (N,) texts or conversations.
        tokens: (N,) token ids of each text.
        own_logprobs: (N,) log p of each text after its own prompt, nats.
        seed: Seed for choosing other prompts, see `choose_other_prompts`.
        temperature: The sampling temperature.

    Returns:
        (N,) values, nats; None if there are fewer than `OTHER_PROMPTS` other prompts.
    """
    prompt_texts = [display_text(prompt) for prompt in prompts]
    other_prompts = choose_other_prompts(prompt_texts, seed=seed)
    if other_prompts is None:
        return None
    # Reversed, so that the first prompt with each text remains.
    prompt_by_text = dict(zip(reversed(prompt_texts), reversed(prompts), strict=True))
    logprobs = compute_logprobs(
        model,
        tokenizer,
        [prompt_by_text[text] for row_prompts in other_prompts for text in row_prompts],
        [ids for ids in tokens for _ in range(OTHER_PROMPTS)],
        temperature=temperature,
        desc="under other prompts",
    )
    return dependence_from_logprobs(own_logprobs, [sum(row) for row in logprobs])


def choose_other_prompts(prompts: Sequence[str], *, seed: int) -> list[list[str]] | None:
    """Chooses other prompts for each text, for `measure_dependence`.

    Args:
        prompts: (N,) the prompt of each text.
        seed: Seed of the choice.

    Returns:
        (N,) lists of `OTHER_PROMPTS` prompts; None if there are too few.
    """
    distinct_prompts = list(dict.fromkeys(prompts))
    size = len(distinct_prompts)
    if size <= OTHER_PROMPTS:
        return None
    # Every text uses the same cyclic shifts of the prompts, so each prompt is used equally often.
    shifts = np.random.default_rng(seed).permutation(np.arange(1, size))[:OTHER_PROMPTS]
    indices = {prompt: index for index, prompt in enumerate(distinct_prompts)}
    return [[distinct_prompts[(indices[prompt] + shift) % size] for shift in shifts] for prompt in prompts]


def dependence_from_logprobs(own_logprobs: ArrayLike, other_logprobs: ArrayLike) -> list[float]:
    """Computes the result of `measure_dependence` from log-probabilities.

    Args:
        own_logprobs: (N,) log p of each text after its own prompt, nats.
        other_logprobs: (N * OTHER_PROMPTS,) the same after the other prompts, text by text.

    Returns:
        (N,) values, nats.
    """
    own = np.asarray(own_logprobs, dtype=float)
    # Column 0 has the text's own prompt, the other columns have the other prompts.
    by_prompt = np.column_stack([own, np.asarray(other_logprobs, dtype=float).reshape(len(own), OTHER_PROMPTS)])
    return (own - np.logaddexp.reduce(by_prompt, axis=1) + np.log(OTHER_PROMPTS + 1)).tolist()


def score_by_reward(
    evaluator: Evaluator,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    columns: Mapping[str, Sequence[object]],
    *,
    desc: str,
) -> list[float]:
    """Computes the reward of texts as if they had ended by themselves.

    Texts are cut at twice the maximum length of a completion, because edits lengthen them, and at the model's context.

    Args:
        evaluator: The reward and its tokenizer.
        prompts: (N,) texts or conversations.
        texts: (N,) completions.
        columns: Name -> (N,) values of the prompts' other columns.
        desc: Label of the progress bar.

    Returns:
        (N,) rewards; [] without a reward.
    """
    if evaluator.rewards is None:
        return []
    stops = evaluator.stops or stop_ids(evaluator.reference, evaluator.tokenizer)
    prompt_ids = [tokenize_prompt(prompt, evaluator.tokenizer) for prompt in prompts]
    max_tokens, context_length = 2 * evaluator.max_new_tokens, context_length_of(evaluator.reference)
    if context_length is not None:
        longest_prompt = max(map(len, prompt_ids), default=0)
        max_tokens = max(evaluator.max_new_tokens, min(max_tokens, context_length - longest_prompt - 1))
    tokens = [
        tokenize_completion(prompt, text, evaluator.tokenizer)[:max_tokens]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    # The cut tokens are decoded like a policy's, so that texts and tokens match.
    texts = decode_completions(evaluator.tokenizer, prompts, prompt_ids, tokens)
    # A text that ends by itself has the end token that the policy would write.
    tokens = [[*ids, stops[0]] for ids in tokens]
    rewards: list[float] = []
    batch_size = max_rows_in_memory(evaluator.reference, max(map(len, tokens), default=1))
    with Progress(len(texts), f"{desc}: reward", "text", leave=False) as bar:
        for start in range(0, len(texts), batch_size):
            batch_rows = slice(start, start + batch_size)
            batch = build_samples(prompts[batch_rows], tokens[batch_rows], evaluator.tokenizer, stops)
            batch = batch.to(evaluator.reference.device)
            rewards += evaluator.score_batch(batch, batch_rows, prompts, texts, columns)
            bar.update(len(batch))
    return rewards
