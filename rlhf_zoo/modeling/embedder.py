"""Sentence embedders: encoders whose hidden states, averaged over a text's tokens, say what the text is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel

from ..errors import ZooError
from .devices import MicroBatches, on_device
from .loading import FLOAT32, load_model, load_tokenizer
from .model_files import json_object
from .models import context_length

#: Files that sentence-transformers saves beside a model: patterns of paths in its folder.
SENTENCE_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/*.json",
    "[0-9]_*/*.safetensors",
)
_READ = ("Transformer", "Pooling", "Normalize")


class Embedder:
    """A sentence embedder that averages the last hidden states over all tokens, as all-MiniLM-L6-v2 does.

    Args:
        folder: Its folder.
        name: What errors call it.
        batch_size: The most texts in a forward pass.

    Raises:
        ZooError: It cannot be loaded, or is no encoder that averages over tokens.
    """

    def __init__(self, folder: Path, *, name: str, batch_size: int = 64) -> None:
        subject = f"The embedder {name}"
        _check_modules(folder, subject)
        # A pooler that is not saved is not read either; its random weights must not change the draws of a training.
        with torch.random.fork_rng(devices=[]):
            model = load_model(AutoModel, folder, subject=subject, how=FLOAT32, may_miss=("pooler",))
        self.tokenizer: Any = load_tokenizer(folder, name=subject)
        if model.config.is_encoder_decoder or self.tokenizer.pad_token_id is None:
            why = "has a decoder" if model.config.is_encoder_decoder else "has no PAD in its tokenizer"
            raise _not_an_embedder(f"{subject} {why}")
        self.model = on_device(model).requires_grad_(False).eval()
        self.max_length = _max_length(folder, model, self.tokenizer)
        self._batches = MicroBatches(batch_size)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts. A longer text than the model reads loses its end.

        Args:
            texts: (N,) texts.

        Returns:
            (N, width) vectors of length 1, float32 on the CPU.
        """
        # Texts of similar length share a batch, so that little padding is computed.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        vectors = torch.cat(list(self._batches.run(lambda places: self._embed([texts[p] for p in places]), order)))
        return vectors[torch.tensor(order).argsort()]

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


def _max_length(folder: Path, model: Any, tokenizer: Any) -> int:
    """The most tokens of a text: what sentence-transformers saved, or the smaller bound of model and tokenizer."""
    saved = folder / "sentence_bert_config.json"
    bounds = [tokenizer.model_max_length, context_length(model)]
    if saved.is_file():
        bounds.append(json_object(saved).get("max_seq_length"))
    return min(bound for bound in bounds if bound)


def _check_modules(folder: Path, subject: str) -> None:
    """Raises ZooError if a folder's files say that it is another kind of model, or pools in another way."""
    config = folder / "config.json"
    architectures = (json_object(config).get("architectures") if config.is_file() else None) or []
    if not (folder / "modules.json").is_file():
        with_head = next((str(name) for name in architectures if "For" in str(name)), None)
        if with_head is not None:
            raise _not_an_embedder(f"{subject} is a {with_head}")
        return
    for path in sorted(folder.glob("[0-9]_*/config.json")):
        kind = path.parent.name.partition("_")[2]
        pooling = json_object(path)
        if kind not in _READ:
            raise _not_an_embedder(f"{subject} has the module {kind}, which is not read here")
        if (
            kind == "Pooling"
            and pooling.get("pooling_mode_mean_tokens", pooling.get("pooling_mode") == "mean") is not True
        ):
            raise _not_an_embedder(f"{subject} does not pool by the mean of its tokens")


def _not_an_embedder(fault: str) -> ZooError:
    return ZooError(
        f"{fault}: choose an encoder whose embedding is the mean over tokens, such as "
        "sentence-transformers/all-MiniLM-L6-v2."
    )
