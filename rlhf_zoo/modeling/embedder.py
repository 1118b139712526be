"""Sentence embedders: encoders whose hidden states, averaged over a text's tokens, represent the text's content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from .devices import MicroBatches, move_to_best_device
from .loading import IN_FLOAT32, load_model, load_tokenizer
from .model_files import read_json_object
from .models import context_length_of

#: The files that sentence-transformers saves next to a model, as glob patterns in its folder.
SENTENCE_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/*.json",
    "[0-9]_*/*.safetensors",
)
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")


class Embedder:
    """A sentence embedder that averages the last hidden states over all tokens, as all-MiniLM-L6-v2 does.

    Args:
        folder: The model's folder.
        name: The model's name in errors.
        batch_size: The maximum number of texts in a forward pass.

    Raises:
        ZooError: The model cannot be loaded, or is not an encoder that averages over tokens.
    """

    def __init__(self, folder: Path, *, name: str, batch_size: int = 64) -> None:
        subject = f"The embedder {name}"
        _check_modules(folder, subject)
        # The pooler may be missing, because it is not used. Fork the random generator, because initializing a pooler
        # would change the random numbers of training.
        with torch.random.fork_rng(devices=[]):
            model = load_model(AutoModel, folder, subject=subject, options=IN_FLOAT32, may_lack=("pooler",))
        self.tokenizer: Any = load_tokenizer(folder, name=subject)
        if model.config.is_encoder_decoder or self.tokenizer.pad_token_id is None:
            problem = "has a decoder" if model.config.is_encoder_decoder else "has no PAD in its tokenizer"
            raise _not_an_embedder(f"{subject} {problem}")
        self.model = move_to_best_device(model).requires_grad_(False).eval()
        self.max_length = _max_length(folder, model, self.tokenizer)
        self._batches = MicroBatches(batch_size)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts. Texts with more than `max_length` tokens lose their end.

        Args:
            texts: N texts.

        Returns:
            (N, H) vectors of length 1, float32 on the CPU.
        """
        # Put texts of similar length into a batch, so that there is little padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = torch.cat(
            list(self._batches.run(lambda batch: self._embed([texts[index] for index in batch]), order))
        )
        return vectors[torch.tensor(order).argsort()]  # back in the order of the texts

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str]) -> Tensor:
        device = next(self.model.parameters()).device
        batch = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        ).to(device)
        hidden = self.model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1), dim=1).cpu().clone()


def _max_length(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the maximum number of tokens in a text: the smallest limit set by tokenizer, model and saved settings."""
    settings_file = folder / "sentence_bert_config.json"
    bounds = [tokenizer.model_max_length, context_length_of(model)]
    if settings_file.is_file():
        bounds.append(read_json_object(settings_file).get("max_seq_length"))
    return min(bound for bound in bounds if bound)


def _check_modules(folder: Path, subject: str) -> None:
    """Raises ZooError if a folder holds no sentence embedder, or an embedder that does not average over tokens."""
    config = folder / "config.json"
    architectures = (read_json_object(config).get("architectures") if config.is_file() else None) or []
    if not (folder / "modules.json").is_file():
        # A model of a class such as BertForMaskedLM was trained for a task other than embedding.
        other_class = next((str(name) for name in architectures if "For" in str(name)), None)
        if other_class is not None:
            raise _not_an_embedder(f"{subject} is a {other_class}")
        return
    for path in sorted(folder.glob("[0-9]_*/config.json")):
        module = path.parent.name.partition("_")[2]
        settings = read_json_object(path)
        if module not in _SUPPORTED_MODULES:
            raise _not_an_embedder(f"{subject} has the module {module}, which is not supported")
        averages_tokens = settings.get("pooling_mode_mean_tokens", settings.get("pooling_mode") == "mean") is True
        if module == "Pooling" and not averages_tokens:
            raise _not_an_embedder(f"{subject} does not average the hidden states of its tokens")


def _not_an_embedder(problem: str) -> ZooError:
    return ZooError(
        f"{problem}: choose an encoder whose embedding is the mean over tokens, such as "
        "sentence-transformers/all-MiniLM-L6-v2."
    )
