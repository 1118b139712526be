"""Scores completions with a reward model, from token ids if it shares the policy's tokenizer, otherwise from text."""

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.chat import tokenize_for_reward
from ..modeling.chat_template import ChatSettings
from ..modeling.devices import MicroBatches
from ..modeling.model_files import display_name
from ..modeling.models import context_length_of, has_score_statistics, label_index, score_statistics
from ..modeling.sampling.sampler import Samples
from ..modeling.special_tokens import ensure_own_pad, highest_id
from ..modeling.text_ids import added_tokens, same_token_ids

log = logging.getLogger(__name__)

REWARD_OUTPUTS = ("logit", "logprob")


class RewardModel:
    """Scores entire sequences by (s − μ)/σ, where s is the model's output.

    μ and σ are the statistics that the reward stage stored, or else 0 and 1. A decoder's output is read at the last
    token that is not PAD. If the completion ended, that is the end-of-sequence token, as in training, so PAD must
    differ from EOS. An encoder pools the first token. An encoder-decoder's output is read at an end-of-sequence token,
    which is therefore appended even if the completion did not end.

    Args:
        model: A classifier, or a custom model with one output per text or per token. With outputs per token, the last
            token's output is the score.
        tokenizer: The model's tokenizer.
        policy_tokenizer: The policy's tokenizer.
        batch_size: The maximum number of rows in a forward pass.
        max_tokens: The maximum number of tokens in a forward pass, padding included; None for no limit.
        center: Whether to subtract μ.
        scale: Whether to divide by σ.
        label: For a classifier with several labels, the name or index of the label whose output is s; otherwise None.
        output: "logit", or "logprob" for the label's log-probability among all labels. In a multi-label classifier,
            each label has its own probability.
        pad_token: PAD, for a tokenizer that has no PAD or whose PAD is EOS; None to use the tokenizer's PAD.

    Attributes:
        mean, std: The μ and σ in use.
        lacks_statistics: Whether μ or σ is requested but not stored.
        truncated_count: The number of texts that were too long for the model and lost their beginning.

    Raises:
        ZooError: PAD is EOS or missing, μ or σ is invalid, `label` does not fit the model's outputs, an encoder-decoder
            has no EOS, or the embeddings do not fit the tokenizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 64,
        max_tokens: int | None = None,
        center: bool = True,
        scale: bool = True,
        label: str | None = None,
        output: str = "logit",
        pad_token: str | None = None,
    ) -> None:
        self.name = name = display_name(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        # The outputs of a custom class are unknown until it has scored a batch, unless `label` chooses one.
        has_unknown_outputs = label is None and not type(model).__module__.startswith("transformers.")
        config = model.config
        self.label = (
            None
            if has_unknown_outputs
            else label_index(config.id2label or {}, label, name=name, label2id=config.label2id)
        )
        self.output = output
        if pad_token is not None:
            tokenizer = copy.deepcopy(tokenizer)  # the policy may share it
        ensure_own_pad(tokenizer, pad_token, subject=f"the reward model {name}", key="reward_pad_token")
        if model.config.is_encoder_decoder and not isinstance(model.config.eos_token_id, int):
            raise ZooError(
                f"The reward model {name} has an encoder and no eos_token_id, the token whose state gives the score: "
                "set it in the model's configuration."
            )
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.pad_id: int = tokenizer.pad_token_id
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self._micro_batches = MicroBatches(batch_size)
        mean, std = score_statistics(model)
        self.lacks_statistics = (center or scale) and not has_score_statistics(model)
        self.mean, self.std = mean if center else 0.0, std if scale else 1.0
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise ZooError(
                f"The reward model {name} has the stored mean {mean} and standard deviation {std}, so its scores "
                "cannot be standardized: train the model again, or leave its scores as they are "
                "(score_centering none, score_scaling none)."
            )
        # The score is read at the last token that is not PAD, so the policy's ids need the same PAD.
        has_same_pad = tokenizer.pad_token_id == policy_tokenizer.pad_token_id
        self.shares_ids = has_same_pad and same_token_ids(tokenizer, policy_tokenizer)
        self._has_same_template = tokenizer.chat_template == policy_tokenizer.chat_template
        chat = ChatSettings.of(policy_tokenizer)
        self._strips_thoughts = chat is not None and chat.strip_thoughts
        self.max_length = context_length_of(model)
        self.truncated_count = 0
        embeddings: Any = _input_embeddings(model, name)
        self.num_embeddings: int = embeddings.weight.shape[0]
        if self.pad_id < self.num_embeddings:
            self.model.config.pad_token_id = self.pad_id
        if highest_id(tokenizer) >= self.num_embeddings:
            raise ZooError(
                f"The reward model {name} has {self.num_embeddings} embedding rows, but the tokenizer has "
                f"{len(tokenizer)} tokens: pass the model's own tokenizer as reward_processing_class."
            )

    @property
    def always_appends_eos(self) -> bool:
        """Whether even a text that did not end gets EOS: for an encoder-decoder, or by a tokenizer whose SEP is EOS."""
        sep_is_eos = self.tokenizer.sep_token_id == self.tokenizer.eos_token_id
        adds_eos = added_tokens(self.tokenizer).suffix[-1:] == (self.tokenizer.eos_token_id,)
        return bool(self.model.config.is_encoder_decoder) or (sep_is_eos and adds_eos)

    def to(self, device: torch.device | str) -> None:
        """Moves the model.

        Args:
            device: The device.
        """
        self.model.to(device)

    def score_samples(self, samples: Samples, texts: Sequence[Any]) -> Tensor:
        """Scores sampled completions.

        Scores their token ids if the model has the policy's tokenizer and chat template, and thoughts are not stripped.
        Otherwise scores the texts.

        Args:
            samples: B completions.
            texts: The same completions, each as a complete text (prompt + completion) or a conversation.

        Returns:
            Scores, (B,).
        """
        has_conversations = any(not isinstance(text, str) for text in texts)
        if not self.shares_ids or self._strips_thoughts or (has_conversations and not self._has_same_template):
            return self.score_texts(texts, ended=samples.ended.tolist())
        pairs = zip(samples.prompt_id_lists(), samples.completion_id_lists(), strict=True)
        rows = [[*prompt_ids, *completion_ids] for prompt_ids, completion_ids in pairs]
        eos = self.tokenizer.eos_token_id
        if samples.cut_at_text is not None and eos is not None:
            # A completion cut at the stop text has ended, and training appends EOS to every text that ended.
            needs_eos = samples.cut_at_text.tolist()
            rows = [[*row, eos] if needed else row for row, needed in zip(rows, needs_eos, strict=True)]
        return self._score_ids(rows)

    def score_texts(self, texts: Sequence[Any], *, ended: Sequence[bool]) -> Tensor:
        """Scores texts and conversations.

        Args:
            texts: B texts or conversations.
            ended: For each text, whether it ended by itself. If so, an end-of-sequence token is appended, as in
                training.

        Returns:
            Scores, (B,).
        """
        rows = [
            tokenize_for_reward(text, self.tokenizer, ended=has_ended)
            for text, has_ended in zip(texts, ended, strict=True)
        ]
        return self._score_ids([self._truncate(row) for row in rows])

    def _truncate(self, row: list[int]) -> list[int]:
        """Drops the beginning of a text that is too long for the model, counts the text, and warns once."""
        if self.max_length is None or len(row) <= self.max_length:
            return row
        self.truncated_count += 1
        warn_truncated(self.name, self.max_length)
        # Keep a special token in the first position, because encoders pool it.
        first_ids = row[:1] if row[0] in self.tokenizer.all_special_ids else []
        return [*first_ids, *row[len(row) - self.max_length + len(first_ids) :]]

    @torch.no_grad()
    def _score_ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores token ids. Pads on the right, because encoders pool the token in the first position."""
        device = next(self.model.parameters()).device
        kwargs = {} if self.model.config.is_encoder_decoder else {"use_cache": False}
        eos_counts = [0] * len(rows)
        if self.model.config.is_encoder_decoder:
            eos = self.model.config.eos_token_id
            rows = [row if row and row[-1] == eos else [*row, eos] for row in rows]
            eos_counts = [list(row).count(eos) for row in rows]

        def score(indices: Sequence[int]) -> Tensor:
            batch = [torch.tensor(rows[index]) for index in indices]
            ids = pad_sequence(batch, batch_first=True, padding_value=self.pad_id)
            max_id = max((int(row.max()) for row in batch if len(row)), default=0)
            if max_id >= self.num_embeddings:
                # In a custom training loop, prompts and completions may have ids that belong to no token.
                raise ZooError(
                    f"A text has the token id {max_id}, but the reward model {self.name} has only "
                    f"{self.num_embeddings} embedding rows: resize the policy's or the reward model's embeddings to "
                    "the tokenizer."
                )
            mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
            with self._without_dropout(), self._pad_beyond_embeddings():
                output = self.model(input_ids=ids.to(device), attention_mask=mask.to(device), **kwargs)
            logits = output if isinstance(output, Tensor) else output.logits
            return (self._select_score(logits.float(), mask.to(device)) - self.mean) / self.std

        scores = torch.zeros(len(rows), device=device)
        for indices in _batches(eos_counts, [len(row) for row in rows], self.batch_size, self.max_tokens):
            scores[indices] = torch.cat(list(self._micro_batches.run(score, indices)))
        return scores

    def _select_score(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Returns the scores s of a batch, (b,), from logits (b, labels) or (b, L, 1), and the mask (b, L)."""
        if logits.ndim == 3 and logits.shape[2] == 1:
            last_indices = (mask.sum(1) - 1).clamp(min=0)
            return logits[:, :, 0].gather(1, last_indices.unsqueeze(1)).squeeze(1)
        if logits.ndim != 2 or (self.label is None and logits.shape[1] != 1):
            raise ZooError(
                f"The reward model {self.name} returns logits of the shape {tuple(logits.shape)} for a batch of "
                f"{len(logits)}: it must return one number per text, (B, 1), or per token, (B, L, 1)."
            )
        if self.label is None or self.output == "logit":
            return logits[:, self.label or 0]
        if self.model.config.problem_type == "multi_label_classification":
            return F.logsigmoid(logits[:, self.label])
        return logits.log_softmax(1)[:, self.label]

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Puts a model that the caller may still be training into evaluation mode, while this context is open."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    @contextmanager
    def _pad_beyond_embeddings(self) -> Iterator[None]:
        """Lets the model read a PAD id that has no embedding, while this context is open.

        The embeddings read id 0 in place of PAD, and the attention mask hides it. Pooling finds the last token by the
        PAD id in the configuration. The id is there only in this context, because transformers cannot build embeddings
        from a configuration with such an id.
        """
        if self.pad_id < self.num_embeddings:
            yield
            return
        config, embeddings = self.model.config, self.model.get_input_embeddings()
        previous_pad_id, config.pad_token_id = config.pad_token_id, self.pad_id
        hook = embeddings.register_forward_pre_hook(lambda _, ids: (ids[0].masked_fill(ids[0] == self.pad_id, 0),))
        try:
            yield
        finally:
            hook.remove()
            config.pad_token_id = previous_pad_id


@cache
def warn_truncated(name: str, max_length: int) -> None:
    """Warns that a model truncates texts. Warns only once for each model.

    Args:
        name: The model's name.
        max_length: The maximum number of tokens that the model can read.
    """
    log.warning("The reward model %s reads at most %d tokens: longer texts lose their beginning.", name, max_length)


def _input_embeddings(model: PreTrainedModel, name: str) -> Any:
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError) as error:
        raise ZooError(
            f"The reward model {name} has no get_input_embeddings(): add that method to its class."
        ) from error


def _batches(
    eos_counts: Sequence[int], lengths: Sequence[int], max_rows: int, max_tokens: int | None
) -> Iterator[list[int]]:
    """Groups rows of similar length into batches of at most `max_rows` rows and `max_tokens` tokens, padding included.

    A row with more than `max_tokens` tokens is a batch of its own.
    For an encoder-decoder, all rows of a batch have the same number of end-of-sequence tokens (transformers needs it).
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (eos_counts[row], lengths[row])):
        is_full = len(batch) == max_rows or (max_tokens is not None and (len(batch) + 1) * lengths[row] > max_tokens)
        if batch and (is_full or eos_counts[row] != eos_counts[batch[-1]]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
