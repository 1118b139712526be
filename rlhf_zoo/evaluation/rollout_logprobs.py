"""Computes log-probabilities of rollouts under the SFT model, and how much each text depends on its prompt."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError, first_line
from ..hub.client.connect import Hub
from ..modeling.chat import tokenize_completion, tokenize_prompt
from ..modeling.chat_template import Prompt
from ..modeling.devices import MicroBatches, best_device, move
from ..modeling.loading import LoadOptions, load_tokenizer
from ..modeling.models import context_length_of, load_causal
from ..runs.checkpoint_choice import resolve_model
from ..runs.status_line import Progress
from .logprob_cache import DECIMALS, LogprobCache, Value, request_key
from .measure import max_rows_in_memory
from .probes import Completions
from .text_logprobs import choose_other_prompts, dependence_from_logprobs, make_batch_scorer

log = logging.getLogger(__name__)

#: Number of texts of similar length that share a batch size, which the longest text determines.
BLOCK = 256
#: Texts in a batch on the CPU, where larger batches are not faster. Progress is shown and saved after each batch.
CPU_BATCH = 8


@dataclass(frozen=True)
class ModelOptions:
    """The model that computes log-probabilities, and how to run it.

    Attributes:
        model: A folder or a Hub id.
        hub: The Hub on which to look up Hub ids.
        device: A torch device, such as "cuda:1"; None for the accelerator, or the CPU if there is none.
        dtype: The torch dtype of the weights in memory; "auto" for the type in which they were saved.
    """

    model: str | Path
    hub: Hub
    device: str | None = None
    dtype: str = "float32"


def add_logprobs(
    policy: Completions, sft: Completions, options: ModelOptions, *, seed: int
) -> tuple[Completions, Completions]:
    """Adds log-probabilities under the SFT model, and how much each text depends on its prompt.

    The model's chat template renders prompts that are conversations. Only completions whose prompt both sides have are
    scored. Results are cached on disk, so an interrupted call resumes where it stopped.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        options: The SFT model, and how to run it.
        seed: Seed for choosing other prompts, see `choose_other_prompts`.

    Returns:
        Both sides, with `logprobs` and `dependence` (None if there are too few prompts).

    Raises:
        ZooError: The model cannot be loaded or does not fit into memory, its chat template refuses a conversation, or a
            prompt is longer than the model's context.
    """
    device = best_device() if options.device is None else _named_device(options.device)
    path = resolve_model(options.model, options.hub).path
    model = move(load_causal(path, options=LoadOptions(dtype=options.dtype)).eval(), device)
    tokenizer = load_tokenizer(path)
    cache = LogprobCache(model, tokenizer)
    shared_prompts = set(policy.prompts) & set(sft.prompts)
    rows = [[row for row, prompt in enumerate(side.prompts) if prompt in shared_prompts] for side in (policy, sft)]
    prompt_ids, encoded_texts = _tokenize([policy, sft], rows, model, tokenizer, str(options.model))
    own_logprobs = _compute_logprobs(
        model, tokenizer, [(prompt_ids[prompt], tokens) for prompt, tokens in encoded_texts], cache, is_sum=False,
        desc=f"log p under own prompts, on {device}",
    )  # fmt: skip
    other_prompts = choose_other_prompts([prompt for prompt, _ in encoded_texts], seed=seed)
    dependence: list[float] | None = None
    if other_prompts is not None:
        requests = [
            (prompt_ids[prompt], tokens)
            for (_, tokens), prompts in zip(encoded_texts, other_prompts, strict=True)
            for prompt in prompts
        ]
        other_logprobs = _compute_logprobs(
            model, tokenizer, requests, cache, is_sum=True, desc=f"log p under other prompts, on {device}"
        )  # fmt: skip
        dependence = dependence_from_logprobs([sum(_as_list(value)) for value in own_logprobs], other_logprobs)
    sides = []
    start = 0
    for side, side_rows in zip((policy, sft), rows, strict=True):
        part = slice(start, start + len(side_rows))
        start += len(side_rows)
        # No probe reads the empty lists and zeros of the other rows.
        logprobs: list[list[float]] = [[] for _ in side.texts]
        for row, value in zip(side_rows, own_logprobs[part], strict=True):
            logprobs[row] = _as_list(value)
        side_dependence = np.zeros(len(side))
        side_dependence[side_rows] = dependence[part] if dependence else 0.0
        sides.append(replace(side, logprobs=logprobs, dependence=side_dependence.tolist() if dependence else None))
    return sides[0], sides[1]


def _named_device(name: str) -> torch.device:
    """Returns a device that the user named."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)[:100]
        raise ZooError(f"There is no device {name!r} here ({reason}): name another, such as cpu.") from error
    return device


def _as_list(value: Value) -> list[float]:
    assert isinstance(value, list)  # `_compute_logprobs` returns lists unless `is_sum` is set
    return value


def _tokenize(
    sides: Sequence[Completions],
    rows: Sequence[Sequence[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
) -> tuple[dict[str, list[int]], list[tuple[str, list[int]]]]:
    """Returns prompt -> its token ids, and for each completion in `rows` its prompt and its token ids."""
    prompts = _prompts_by_text(sides, tokenizer, model_name)
    prompt_ids: dict[str, list[int]] = {}
    encoded_texts: list[tuple[str, list[int]]] = []
    for side, side_rows in zip(sides, rows, strict=True):
        for row in side_rows:
            prompt = side.prompts[row]
            if prompt not in prompt_ids:
                prompt_ids[prompt] = tokenize_prompt(prompts[prompt], tokenizer)
            encoded_texts.append((prompt, tokenize_completion(prompts[prompt], side.texts[row], tokenizer)))
    context_length = context_length_of(model)
    if context_length is not None:
        # A text keeps the same number of tokens after every prompt, or the sums could not be compared.
        max_tokens = context_length - max(map(len, prompt_ids.values()))
        if max_tokens < 1:
            raise ZooError(
                f"A prompt has more tokens than {model_name} can read ({context_length}): leave it out of both files."
            )
        cut_count = sum(len(tokens) > max_tokens for _, tokens in encoded_texts)
        if cut_count:
            message = "%d texts are read up to %d tokens: %s reads %d tokens."
            log.warning(message, cut_count, max_tokens, model_name, context_length)
            encoded_texts = [(prompt, tokens[:max_tokens]) for prompt, tokens in encoded_texts]
    return prompt_ids, encoded_texts


def _prompts_by_text(
    sides: Sequence[Completions], tokenizer: PreTrainedTokenizerBase, model_name: str
) -> dict[str, Prompt]:
    """Returns each prompt's text -> the prompt as the model reads it, a text or a conversation."""
    prompts: dict[str, Prompt] = {}
    for side in sides:
        for text, prompt in zip(side.prompts, side.conversations or side.prompts, strict=True):
            prompts.setdefault(text, prompt)
    has_conversations = any(not isinstance(prompt, str) for prompt in prompts.values())
    if has_conversations and tokenizer.chat_template is None:
        log.warning("%s has no chat template, so conversations are read as plain text.", model_name)
        return {text: text for text in prompts}
    if not has_conversations and tokenizer.chat_template is not None:
        message = "The prompts are texts, so the chat template of %s is not used: it needs lists of messages."
        log.warning(message, model_name)
    return prompts


def _compute_logprobs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    cache: LogprobCache,
    *,
    is_sum: bool,
    desc: str,
) -> list[Value]:
    """Computes log p of each token of each text after its prompt or, if `is_sum`, their sum over the text."""
    keys = [request_key(*request, is_sum=is_sum) for request in requests]
    # Equal requests are computed once: a collapsed policy writes many equal texts.
    row_by_key = {key: row for row, key in enumerate(keys)}
    missing_rows = [row for key, row in row_by_key.items() if key not in cache]
    # The longest come first, so that a batch that does not fit in memory fails early.
    missing_rows.sort(key=lambda row: -sum(map(len, requests[row])))
    score = make_batch_scorer(model, tokenizer, *zip(*requests, strict=True))

    def score_rows(batch: Sequence[int]) -> dict[str, Value]:
        logprobs = [[round(logprob, DECIMALS) for logprob in row_logprobs] for row_logprobs in score(batch)]
        return {keys[row]: round(sum(values), DECIMALS) if is_sum else values
                for row, values in zip(batch, logprobs, strict=True)}  # fmt: skip

    max_batch = CPU_BATCH if model.device.type == "cpu" else len(missing_rows)
    with Progress(len(row_by_key), desc, "text", initial=len(row_by_key) - len(missing_rows)) as bar:
        for start in range(0, len(missing_rows), BLOCK):
            block = missing_rows[start : start + BLOCK]
            width = max(1, max(len(requests[row][1]) for row in block))
            batches = MicroBatches(min(max_batch, max_rows_in_memory(model, width)))
            initial_size = batches.size
            for values in batches.run(score_rows, block):
                cache.add(values)
                bar.update(len(values))
            if batches.size < initial_size:  # a larger batch did not fit in memory
                max_batch = batches.size
    return [cache[key] for key in keys]
