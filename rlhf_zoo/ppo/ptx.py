"""Text to keep modelling while PPO trains: the PTX mix of InstructGPT (arXiv:2203.02155 §3.5)."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..actor_critic import TextBatch
from ..errors import ZooError

__all__ = ["TextSource", "split"]


class TextSource:
    """Texts, tokenised once, and drawn at random."""

    def __init__(
        self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, context: int | None, pad_id: int
    ) -> None:
        """dataset: a column `text`, or `prompt` and `completion` (only the completion is modelled), or `input_ids`.

        Texts end with EOS and are cut at the context. Raises ZooError for other columns and for an empty data set.
        """
        names = dataset.column_names
        if len(dataset) == 0:
            raise ZooError("ptx_dataset is empty: choose another split, or leave ptx_coef at 0.")
        eos = [tokenizer.eos_token_id]
        rows: list[tuple[list[int], list[int]]]
        if "text" in names:
            rows = [([], tokenizer(text)["input_ids"] + eos) for text in dataset["text"]]
        elif "prompt" in names and "completion" in names:
            prompts, completions = (tokenizer(list(dataset[name]))["input_ids"] for name in ("prompt", "completion"))
            rows = [(prompt, completion + eos) for prompt, completion in zip(prompts, completions, strict=True)]
        elif "input_ids" in names:
            rows = [([], list(ids)) for ids in dataset["input_ids"]]
        else:
            raise ZooError(
                f"ptx_dataset has the columns {', '.join(map(repr, names))}: give it 'text', 'prompt' and "
                "'completion', or 'input_ids'."
            )
        self._rows = [(prompt, text) for prompt, text in rows if len(prompt) + len(text) > 1]
        if not self._rows:
            raise ZooError("No text of ptx_dataset has two tokens, so there is nothing to model: choose another.")
        self._context, self._pad = context, pad_id

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> TextBatch:
        """`count` texts, with replacement. Returns ids and masks (count, L); mask (count, L−1) is of next tokens."""
        picked = torch.randint(len(self._rows), (count,), generator=generator).tolist()
        rows = [self._rows[index] for index in picked]
        sequences = [(prompt + text)[: self._context] for prompt, text in rows]
        width = max(map(len, sequences))
        ids = torch.full((count, width), self._pad)
        attention = torch.zeros((count, width), dtype=torch.bool)
        mask = torch.zeros((count, width), dtype=torch.bool)
        for row, (sequence, (prompt, _)) in enumerate(zip(sequences, rows, strict=True)):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            attention[row, : len(sequence)] = True
            mask[row, len(prompt) : len(sequence)] = True
        return TextBatch(ids.to(device), attention.to(device), mask[:, 1:].to(device))


def split(texts: TextBatch, parts: int) -> list[TextBatch]:
    """`texts` in as many parts, of equal size but for the last."""
    size = -(-len(texts.ids) // parts)

    def pieces(x: Tensor) -> Any:
        return torch.split(x, size)

    return [TextBatch(*each) for each in zip(*map(pieces, texts), strict=True)]
