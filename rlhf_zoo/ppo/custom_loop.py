"""Checks and converts the arguments that a custom training loop passes to `PPOTrainer.step`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ZooError
from ..modeling.alignment import encode_after
from ..modeling.chat import tokenize_completion, tokenize_prompt
from ..modeling.chat_template import Prompt
from ..modeling.prompts import check_prompt_length
from ..modeling.sampling.sampler import Samples, left_pad
from ..rewards import RewardScores
from .token_checks import check_ids


class UserScores(RewardScores):
    """Scores from a custom training loop, which have no names of rewards."""


def _as_ids(value: Any) -> list[int] | None:
    """Returns the token ids in a tensor, array or list of ints; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return list(value)
    return None


def _response_ids(query: Any, query_ids: list[int], response: str, tokenizer: Any) -> list[int]:
    """Tokenizes a text response in the context of its query, which may be token ids."""
    if _as_ids(query) is None:
        return tokenize_completion(query, response, tokenizer)
    query_and_response = tokenizer(tokenizer.decode(query_ids) + response, add_special_tokens=False)["input_ids"]
    return encode_after(tokenizer, query_ids, query_and_response, response)


def encode_prompt(prompt: Prompt, index: int, trainer: Any) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
        prompt: A text, a conversation or token ids.
        index: The prompt's index, for errors.
        trainer: The trainer, whose tokenizer and context length are used.

    Raises:
        ZooError: The prompt is empty, has unknown ids, or leaves no room for a completion.
    """
    ids = _as_ids(prompt)
    ids = tokenize_prompt(prompt, trainer.processing_class) if ids is None else ids
    check_prompt_length(index, ids, context_length=trainer.context_length, max_new_tokens=trainer.args.response_length)
    check_ids([ids], trainer.smallest_consumer)
    return ids


def samples_from_user(queries: Sequence[Any], responses: Sequence[Any], trainer: Any) -> Samples:
    """Converts completions from a custom training loop. Their log-probabilities are 0 until they are computed.

    A text response gets no end token. If a response ended, pass its token ids with the end token.

    Args:
        queries: B texts, conversations or token ids.
        responses: B texts or token ids.
        trainer: The trainer, whose tokenizer, context length and stop ids are used.

    Raises:
        ZooError: Counts differ; a query or response is empty, too long, or has ids that the policy cannot read or
            sample; or a response continues after its end token.
    """
    if len(queries) != len(responses) or not len(queries):
        raise ZooError(
            f"step() got {len(queries)} queries and {len(responses)} responses: pass the same number of each, at least "
            "one."
        )
    if isinstance(queries, str) or isinstance(responses, str):
        raise ZooError("step() got a single text: pass lists of queries and responses.")
    device, stop_ids = trainer.args.device, set(trainer.stop_ids)
    all_query_ids, all_response_ids = [], []
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        query_ids, response_ids = _as_ids(query), _as_ids(response)
        if query_ids is None:
            query_ids = tokenize_prompt(query, trainer.processing_class)
        if response_ids is None and not isinstance(response, str):
            raise ZooError(f"Response {row} is {response!r}: pass a text or a 1-D tensor of token ids.")
        if response_ids is None:
            response_ids = _response_ids(query, query_ids, response, trainer.processing_class)
        all_query_ids.append(query_ids)
        all_response_ids.append(response_ids)
        if not query_ids or not response_ids:
            raise ZooError(f"Query {row} or its response is empty: each needs at least one token.")
        length = len(query_ids) + len(response_ids)
        if trainer.context_length is not None and length > trainer.context_length:
            raise ZooError(
                f"Query {row} and its response have {length} tokens together and exceed the context of "
                f"{trainer.context_length}: shorten them."
            )
        if stop_ids & set(response_ids[:-1]):
            raise ZooError(f"Response {row} continues after its end token: cut it there.")
    check_ids(all_query_ids, trainer.smallest_consumer, label="Query")
    check_ids(all_response_ids, trainer.smallest_consumer, label="Response")
    for row, response_ids in enumerate(all_response_ids):
        if unknown_ids := [token_id for token_id in response_ids if token_id not in trainer.vocabulary]:
            raise ZooError(
                f"Response {row} has the token id {unknown_ids[0]}, which the tokenizer does not have and the policy "
                "never samples: pass the ids that were sampled."
            )
    pad_id, width = trainer.padding_id, max(map(len, all_response_ids))
    padded_query_ids, query_mask = left_pad(all_query_ids, pad_id, device)
    completion_ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in all_response_ids], device=device)
    lengths = torch.tensor([len(ids) for ids in all_response_ids], device=device)
    mask = torch.arange(width, device=device) < lengths.unsqueeze(1)
    ended = torch.tensor([ids[-1] in stop_ids for ids in all_response_ids], device=device)
    logprobs = torch.zeros(mask.shape, device=device)
    return Samples(padded_query_ids, query_mask, completion_ids, mask, logprobs, ended, trainer.vocabulary)


def scores_from_user(scores: Sequence[Any], samples: Samples) -> UserScores:
    """Checks and converts scores from a custom training loop.

    Args:
        scores: B numbers.
        samples: B completions.

    Raises:
        ZooError: The count differs, or a score is not a finite number.
    """
    if len(scores) != len(samples):
        raise ZooError(f"step() got {len(scores)} scores for {len(samples)} responses: pass one per response.")
    numbers = []
    for row, score in enumerate(scores):
        try:
            number = float(score)
        except (TypeError, ValueError) as error:
            raise ZooError(f"Score {row} is {score!r}, which is not a number ({error}): pass a float.") from error
        if not math.isfinite(number):
            raise ZooError(f"Score {row} is {number}: pass a finite number.")
        numbers.append(number)
    total: Tensor = torch.tensor(numbers, device=samples.mask.device)
    return UserScores(total=total, per_reward=total.unsqueeze(1))
