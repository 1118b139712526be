"""A policy's answers to prompts, in a file from which a second call resumes."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..hub.client.connect import Hub
from .checkpoint_choice import resolve_model
from .status_line import Progress

#: A temperature so low that the most likely token has all probability.
GREEDY_TEMPERATURE = 1e-4
Conversation = list[dict[str, Any]]
#: The text of an answer, and whether it ended by itself.
Answer = tuple[str, bool]


class AnsweringPolicy:
    """A policy that answers prompts in its chat template."""

    def __init__(self, name: str, hub: Hub, *, bf16: bool = False) -> None:
        """Loads the model and its tokenizer.

        Args:
            name: A folder, a GGUF file or a Hub id; an adapter is merged into its base.
            hub: Where Hub ids are looked up.
            bf16: Whether the weights are rounded to bfloat16, which some CPUs multiply several times as fast.
        """
        import torch

        from ..modeling.loading import load_tokenizer
        from ..modeling.models import load_causal
        from ..modeling.sampling.sampler import Vocabulary
        from ..modeling.special_tokens import stop_ids

        path = resolve_model(name, hub).path
        self.tokenizer = load_tokenizer(path)
        self.model = load_causal(path).eval().to("cuda" if torch.cuda.is_available() else "cpu")
        if bf16:
            self.model = self.model.to(torch.bfloat16)
        self.stop_ids = stop_ids(self.model, self.tokenizer)
        self.vocabulary = Vocabulary.of(self.tokenizer, self.model)

    def answer(
        self, prompts: Sequence[Conversation], indices: Sequence[int], *, temperature: float, max_tokens: int
    ) -> dict[int, Answer]:
        """Answers prompts. The random numbers of an answer depend only on the index of its prompt.

        Args:
            prompts: All prompts.
            indices: The indices of the prompts to answer.
            temperature: The sampling temperature; 0 is greedy.
            max_tokens: The maximum number of tokens in an answer.

        Returns:
            The answers by index.
        """
        from ..modeling.chat import decode_completions, tokenize_prompt
        from ..modeling.sampling.sampler import sample

        batch_prompts = [prompts[index] for index in indices]
        prompt_ids = [tokenize_prompt(prompt, self.tokenizer) for prompt in batch_prompts]
        samples = sample(
            self.model,
            prompt_ids,
            keys=[(index,) for index in indices],
            seed=0,
            max_new_tokens=max_tokens,
            stop_ids=self.stop_ids,
            pad_id=self.stop_ids[0],
            temperature=temperature or GREEDY_TEMPERATURE,
            vocabulary=self.vocabulary,
        )
        texts = decode_completions(self.tokenizer, batch_prompts, prompt_ids, samples.completion_id_lists())
        return dict(zip(indices, zip(texts, samples.ended.tolist(), strict=True), strict=True))


def sample_answers(
    name: str,
    hub: Hub,
    prompts: Sequence[Conversation],
    answered_count: int,
    *,
    temperature: float,
    batch_size: int,
    max_tokens: int,
    bf16: bool = False,
) -> Iterator[list[Answer]]:
    """Yields a policy's answers in batches.

    A prompt far longer than the others in its batch is answered alone, as it would pad all of them to its length.

    Args:
        name: As for `AnsweringPolicy`.
        hub: Where Hub ids are looked up.
        prompts: All prompts.
        answered_count: How many of the first prompts have answers already; these are left out.
        temperature: The sampling temperature; 0 is greedy.
        batch_size: Number of prompts in a batch.
        max_tokens: The maximum number of tokens in an answer.
        bf16: As for `AnsweringPolicy`.

    Yields:
        The answers of a batch.
    """
    policy = AnsweringPolicy(name, hub, bf16=bf16)
    with Progress(total=len(prompts), initial=answered_count, desc="answering", unit="prompt") as progress:
        for first in range(answered_count, len(prompts), batch_size):
            indices = range(first, min(first + batch_size, len(prompts)))
            lengths = {index: len(str(prompts[index])) for index in indices}
            limit = 4 * statistics.median(lengths.values())
            batch_indices = [index for index in indices if lengths[index] <= limit]
            answers: dict[int, Answer] = {}
            for group in (batch_indices, *([index] for index in indices if lengths[index] > limit)):
                answers |= policy.answer(prompts, group, temperature=temperature, max_tokens=max_tokens)
            progress.update(len(indices))
            yield [answers[index] for index in indices]


def resume_answers(
    path: Path, prompts: Sequence[Conversation], sample_remaining: Callable[[int], Iterator[list[Answer]]]
) -> list[Answer]:
    """Reads the answers in a file, and appends answers to the remaining prompts.

    Args:
        path: The file of answers, in JSON lines.
        prompts: The prompts.
        sample_remaining: Called with the number of answers in the file; yields the remaining answers in batches.

    Raises:
        ZooError: The file has answers to other prompts.
    """
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    if [row["prompt"] for row in rows] != list(prompts[: len(rows)]):
        raise ZooError(f"{path} has answers to other prompts: remove it, or write another file.")
    answers = [(row["answer"], row["ended"]) for row in rows]
    if len(answers) < len(prompts):
        for batch in sample_remaining(len(answers)):
            with path.open("a", encoding="utf-8") as file:
                for prompt, (text, ended) in zip(prompts[len(answers) :], batch, strict=False):
                    row = {"prompt": prompt, "answer": text, "ended": ended}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            answers += batch
    return answers
