"""What a loop of one's own gives to `PPOTrainer.step`: checked, and brought into the trainer's forms."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ZooError
from ..modeling.alignment import encode_behind
from ..modeling.chat import tokenize_completion, tokenize_prompt
from ..modeling.prompts import check_room
from ..modeling.sampling.sampler import Samples, left_pad
from ..rewards import Scored
from .guards import check_ids


class GivenScores(Scored):
    """Scores that no reward of the trainer gave."""


def _ids(given: Any) -> list[int] | None:
    """Token ids of a tensor, array or list of ints; None for what is none of these."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, (list, tuple)) and all(isinstance(item, int) for item in given):
        return list(given)
    return None


def _answer_ids(query: Any, prompt: list[int], response: str, tokenizer: Any) -> list[int]:
    """Token ids of a text response, as they stand behind its query, which may be token ids."""
    if _ids(query) is None:
        return tokenize_completion(query, response, tokenizer)
    whole = tokenizer(tokenizer.decode(prompt) + response, add_special_tokens=False)["input_ids"]
    return encode_behind(tokenizer, prompt, whole, response)


def prompt_row(prompt: Any, row: int, trainer: Any) -> list[int]:
    """Token ids of a prompt. Raises ZooError for an empty one, unknown ids, and one that leaves no room to answer."""
    ids = _ids(prompt)
    ids = tokenize_prompt(prompt, trainer.processing_class) if ids is None else ids
    check_room(row, ids, context=trainer.context, room=trainer.args.response_length)
    check_ids([ids], trainer.narrowest)
    return ids


def given_samples(queries: Sequence[Any], responses: Sequence[Any], trainer: Any) -> Samples:
    """Completions that somebody else sampled, without log-probabilities yet.

    A text response gets no end-of-sequence token; ids hold it where the response ended.
    """
    if len(queries) != len(responses) or not len(queries):
        raise ZooError(
            f"step() got {len(queries)} queries and {len(responses)} responses: give as many of one as of the other."
        )
    if isinstance(queries, str) or isinstance(responses, str):
        raise ZooError("step() got one text: give lists of queries and responses.")
    device, stops = trainer.args.device, set(trainer.stop_ids)
    prompts, answers = [], []
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        prompt, answer = _ids(query), _ids(response)
        if prompt is None:
            prompt = tokenize_prompt(query, trainer.processing_class)
        if answer is None and not isinstance(response, str):
            raise ZooError(f"Response {row} is {response!r}: give a text or a 1-D tensor of token ids.")
        if answer is None:
            answer = _answer_ids(query, prompt, response, trainer.processing_class)
        prompts.append(prompt)
        answers.append(answer)
        if not prompt or not answer:
            raise ZooError(f"Query {row} or its response is empty: each needs at least one token.")
        if trainer.context is not None and len(prompt) + len(answer) > trainer.context:
            raise ZooError(
                f"Query {row} and its response have {len(prompt) + len(answer)} tokens together, past the context of "
                f"{trainer.context}: shorten them."
            )
        if stops & set(answer[:-1]):
            raise ZooError(f"Response {row} goes on after its end token: cut it there, as nothing after it counts.")
    check_ids(prompts, trainer.narrowest, what="Query")
    check_ids(answers, trainer.narrowest, what="Response")
    for row, answer in enumerate(answers):
        if strange := [index for index in answer if index not in trainer.vocabulary]:
            raise ZooError(
                f"Response {row} holds the token id {strange[0]}, which the tokenizer does not name, so the policy "
                "never samples it: give the ids that were sampled."
            )
    prompt_ids, prompt_mask = left_pad(prompts, trainer.fill_id, device)
    width = max(map(len, answers))
    completion_ids = torch.tensor([ids + [trainer.fill_id] * (width - len(ids)) for ids in answers], device=device)
    lengths = torch.tensor([len(ids) for ids in answers], device=device)
    mask = torch.arange(width, device=device) < lengths.unsqueeze(1)
    ended = torch.tensor([ids[-1] in stops for ids in answers], device=device)
    logprobs = torch.zeros(mask.shape, device=device)
    return Samples(prompt_ids, prompt_mask, completion_ids, mask, logprobs, ended, trainer.vocabulary)


def given_scored(scores: Sequence[Any], samples: Samples) -> GivenScores:
    """Scores of B completions as the rewards would give them. Raises ZooError for another count and for no number."""
    if len(scores) != len(samples):
        raise ZooError(f"step() got {len(scores)} scores for {len(samples)} responses: give one a response.")
    numbers = []
    for row, score in enumerate(scores):
        try:
            number = float(score)
        except (TypeError, ValueError) as error:
            raise ZooError(f"Score {row} is {score!r}, which is not a number ({error}): give a float.") from error
        if not math.isfinite(number):
            raise ZooError(f"Score {row} is {number}: give a finite number.")
        numbers.append(number)
    total: Tensor = torch.tensor(numbers, device=samples.mask.device)
    return GivenScores(total=total, each=total.unsqueeze(1))
