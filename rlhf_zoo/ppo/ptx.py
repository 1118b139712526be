"""Pretraining texts for the PTX loss of InstructGPT: language modeling mixed into PPO (arXiv:2203.02155 §3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.chat import tokenize_completion, tokenize_prompt
from ..modeling.prompts import read_unpadded_ids
from .actor_critic import TextBatch

if TYPE_CHECKING:
    from datasets import Dataset


class TextSource:
    """Texts that are tokenized once and drawn at random."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context_length: int | None,
        pad_id: int,
        num_embeddings: int,
    ) -> None:
        """Tokenizes the texts and appends EOS, except to `input_ids`. `draw` cuts texts to the context length.

        Target tokens are the tokens to predict. A text without any within the context length is dropped.

        Args:
            dataset: A data set with the column `text`, with `prompt` and `completion` (only the completion has target
                tokens), or with `input_ids`.
            tokenizer: The policy's tokenizer.
            context_length: The maximum number of tokens in a text; None for no limit.
            pad_id: The id that pads shorter texts.
            num_embeddings: The number of rows of the policy's embedding table.

        Raises:
            ZooError: `dataset` is not a data set or has other columns, a row is not a text, an id has no embedding, or
                no text has a target token.
        """
        from datasets import Dataset

        if not isinstance(dataset, Dataset):
            raise ZooError(f"ptx_dataset is a {type(dataset).__name__}: pass a datasets.Dataset.")
        columns = dataset.column_names
        if len(dataset) == 0:
            raise ZooError("ptx_dataset is empty: choose another split, or set ptx_coef to 0.")
        eos = [tokenizer.eos_token_id]
        id_pairs: list[tuple[list[int], list[int]]]  # prompt (without target tokens) and text
        if "text" in columns:
            id_pairs = [([], tokenize_prompt(text, tokenizer) + eos) for text in _texts(dataset, "text")]
        elif "prompt" in columns and "completion" in columns:
            pairs = zip(_texts(dataset, "prompt"), _texts(dataset, "completion"), strict=True)
            id_pairs = [
                (tokenize_prompt(prompt, tokenizer), tokenize_completion(prompt, completion, tokenizer) + eos)
                for prompt, completion in pairs
            ]
        elif "input_ids" in columns:
            id_pairs = [([], ids) for ids in read_unpadded_ids(dataset, tokenizer, subject="ptx_dataset: row")]
        else:
            raise ZooError(
                f"ptx_dataset has the columns {', '.join(map(repr, columns))}: it needs 'text', or 'prompt' and "
                "'completion', or 'input_ids'."
            )
        # The first token of a text has no log-probability, because nothing precedes it.
        self._id_pairs = [pair for pair in id_pairs if len((pair[0] + pair[1])[:context_length]) > max(len(pair[0]), 1)]
        if not self._id_pairs:
            raise ZooError(
                "No row of ptx_dataset has a token to predict within the context length, outside the prompt and after "
                "the first token of the row: choose another data set."
            )
        for prompt_ids, text_ids in self._id_pairs:
            if invalid_ids := [token_id for token_id in prompt_ids + text_ids if not 0 <= token_id < num_embeddings]:
                raise ZooError(
                    f"ptx_dataset has the token id {invalid_ids[0]}, but the policy has only {num_embeddings} "
                    "embedding rows: tokenize it with the policy's own tokenizer."
                )
        self._context_length, self._pad_id = context_length, pad_id

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> TextBatch:
        """Draws texts, with replacement.

        Args:
            count: The number of texts.
            generator: A random generator on the CPU.
            device: The device of the batch.
        """
        # Drawing with replacement has no position in a shuffled order, which a resumed run would have to restore.
        indices = torch.randint(len(self._id_pairs), (count,), generator=generator, device="cpu").tolist()
        id_pairs = [self._id_pairs[index] for index in indices]
        sequences = [(prompt_ids + text_ids)[: self._context_length] for prompt_ids, text_ids in id_pairs]
        width = max(map(len, sequences))
        ids = torch.full((count, width), self._pad_id)
        attention = torch.zeros((count, width), dtype=torch.bool)
        mask = torch.zeros((count, width), dtype=torch.bool)
        for row, (sequence, (prompt_ids, _)) in enumerate(zip(sequences, id_pairs, strict=True)):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            attention[row, : len(sequence)] = True
            mask[row, len(prompt_ids) : len(sequence)] = True
        return TextBatch(ids.to(device), attention.to(device), mask[:, 1:].to(device))


def _texts(dataset: Dataset, column: str) -> list[str]:
    texts = list(dataset[column])
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ZooError(f"Row {row} of ptx_dataset has {text!r} in {column!r}, which is not a text.")
    return texts
