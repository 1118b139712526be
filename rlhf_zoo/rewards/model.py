"""A reward model as a reward: ids where it shares the policy's tokenizer, text where it does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..models import disable_dropout, score_statistics
from ..sampling import Samples

__all__ = ["RewardModel", "same_tokenizer"]


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether ids of `a` mean the same to `b`."""
    return a is b or (
        a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id and a.pad_token_id == b.pad_token_id
    )


class RewardModel:
    """Scores (s − μ)/σ of whole sequences, with the (μ, σ) that the reward stage stored (0 and 1 if it did not).

    The score is read at the rightmost token that is not PAD: an ended response's end-of-sequence token, as in
    training. So PAD must differ from it, which is checked.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 64,
    ) -> None:
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            raise ZooError(
                f"The reward model {name} pads with its end-of-sequence token, so its score would be read one token "
                "early: give its tokenizer a pad_token of its own."
            )
        disable_dropout(model)
        self.model = model.requires_grad_(False).eval()
        self.model.config.pad_token_id = tokenizer.pad_token_id
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.mean, self.std = score_statistics(model)
        self._shares_ids = same_tokenizer(tokenizer, policy_tokenizer)

    def to(self, device: torch.device | str) -> None:
        self.model.to(device)

    def score_samples(self, samples: Samples, texts: Sequence[str]) -> Tensor:
        """Scores of sampled completions. texts: B strings, prompt + completion. Returns (B,)."""
        if not self._shares_ids:
            return self.score_texts(texts, ended=samples.ended.tolist())
        scores = [
            self._forward(
                torch.cat([chunk.prompt_ids, chunk.completion_ids], dim=1),
                torch.cat([chunk.prompt_mask, chunk.mask], dim=1),
            )
            for chunk in samples.chunks(self.batch_size)
        ]
        return torch.cat(scores)

    def score_texts(self, texts: Sequence[str], *, ended: Sequence[bool]) -> Tensor:
        """Scores of texts; the end-of-sequence token is appended to those that ended. Returns (B,)."""
        eos = self.tokenizer.eos_token_id
        rows = [self.tokenizer(text, add_special_tokens=True)["input_ids"] for text in texts]
        rows = [
            [*row, eos] if done and (not row or row[-1] != eos) else row for row, done in zip(rows, ended, strict=True)
        ]
        scores = []
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            padded = self.tokenizer.pad({"input_ids": batch}, return_tensors="pt")
            scores.append(self._forward(padded["input_ids"], padded["attention_mask"].bool()))
        return torch.cat(scores)

    @torch.no_grad()
    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        kwargs = {} if self.model.config.is_encoder_decoder else {"position_ids": positions, "use_cache": False}
        raw = self.model(input_ids=ids, attention_mask=mask.long(), **kwargs).logits[:, 0].float()
        return (raw - self.mean) / self.std
