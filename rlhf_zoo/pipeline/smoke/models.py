"""Makes miniatures of public models, with their configuration class, vocabulary size, special tokens and template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...plugins import did_you_mean
from ...runs.recipe import is_repository_name, read_mapping, shipped_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Field of a configuration class -> small size. A class gets the fields that it has.
SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "rotary_dim": 4, "num_layers": 2,
    "num_heads": 4, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
}  # fmt: skip
#: Number of tokens that a tokenizer learns, including the 256 bytes.
LEARNED_TOKENS = 1024
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Family:
    """A family of public models, as recipes/families.yaml describes it.

    Attributes:
        model_type: Model type in the transformers configuration.
        vocab_size: Vocabulary size in the configuration.
        special: Special token -> id.
        eos: End-of-sequence token.
        bos: Beginning-of-sequence token, or None.
        unk: Unknown token, or None.
        pad: Padding token, or None.
        tokens: Number of tokens in the tokenizer; None for vocab_size.
        wrap: The tokens that the tokenizer adds before and after a text; None for no token.
        stops: Tokens at which generation stops; () for eos.
        template: Name of one of trl's chat templates, or None.
        byte_fallback: Whether the tokenizer has a byte fallback.
        fields: Other fields of the configuration.
        labels: Names of a classifier's labels; 1 for a reward model, None for a language model.
        embedder: Whether the model is a sentence embedder, which has no head.
    """

    model_type: str
    vocab_size: int
    special: Mapping[str, int]
    eos: str
    bos: str | None = None
    unk: str | None = None
    pad: str | None = None
    tokens: int | None = None
    wrap: tuple[str | None, str | None] = (None, None)
    stops: tuple[str, ...] = ()
    template: str | None = None
    byte_fallback: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | int | None = None
    embedder: bool = False


def families() -> dict[str, Family]:
    """Returns name -> family, from recipes/families.yaml."""
    return {name: Family(**keys) for name, keys in read_mapping(shipped_folder() / "families.yaml").items()}


def make_family(keys: Mapping[str, Any], *, subject: str) -> Family:
    """Builds the family of a miniature.

    Args:
        keys: `family`, the name of a family, and fields that override those of the family.
        subject: The model's name, for messages.

    Raises:
        ZooError: The family or a field is unknown.
    """
    changes = dict(keys)
    name, families_by_name = changes.pop("family", None), families()
    if name not in families_by_name:
        suggestion = did_you_mean(str(name), families_by_name) or ""
        raise ZooError(
            f"The miniature of {subject} has the unknown family {name!r}{suggestion}: see recipes/families.yaml."
        )
    unknown_keys = changes.keys() - {entry.name for entry in fields(Family)}
    if unknown_keys:
        raise ZooError(f"The miniature of {subject} has the unknown key {min(unknown_keys)}: remove it.")
    template = changes.get("template")
    if template is not None and not is_repository_name(str(template)):  # it becomes part of a path
        raise ZooError(f"The miniature of {subject} has the template {template!r:.200}: use the name of one of trl's.")
    family = families_by_name[name]
    return replace(family, **{**changes, "special": {**family.special, **changes.get("special", {})}})


def make_tokenizer(
    family: Family, texts: Iterable[str], *, learned_count: int = LEARNED_TOKENS, length: int = 2048
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer whose special tokens have the family's ids.

    Made-up words fill the ids that neither training nor special tokens use.

    Args:
        family: The family whose vocabulary size and special tokens are used.
        texts: The texts to train the tokenizer on.
        learned_count: Number of tokens to learn, including the 256 bytes.
        length: The tokenizer's model_max_length.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    learned_tokens, merges = _train_bpe(texts, learned_count)
    special_tokens = {index: token for token, index in family.special.items()}
    words = ("Ġ" + "".join(letters) for letters in product(LETTERS, repeat=4))
    used_tokens = {*learned_tokens, *family.special}
    ordinary_tokens = (token for token in learned_tokens if token not in family.special)
    other_tokens = chain(ordinary_tokens, (word for word in words if word not in used_tokens))
    vocabulary = {
        special_tokens.get(index) or next(other_tokens): index for index in range(family.tokens or family.vocab_size)
    }
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=family.unk, byte_fallback=family.byte_fallback)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    token_before, token_after = family.wrap
    if token_before or token_after:
        parts = [*filter(None, (token_before, "$A", token_after))]
        pieces = [(token, family.special[token]) for token in (token_before, token_after) if token]
        backend.post_processor = processors.TemplateProcessing(" ".join(parts), special_tokens=pieces)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos, unk_token=family.unk,
        pad_token=family.pad, model_max_length=length,
    )  # fmt: skip
    if family.template is not None:
        import trl

        path = Path(trl.__file__).parent / "chat_templates" / f"{family.template}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def _train_bpe(texts: Iterable[str], size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the tokens, bytes first, and the merges that byte-level BPE learns."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [tuple(pair) for pair in model["merges"]]


def _make_model(family: Family) -> PreTrainedModel:
    """Makes a model of two layers of width 32, with the family's vocabulary and random weights."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class, ids = CONFIG_MAPPING[family.model_type], family.special
    defaults = config_class().to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in defaults}
    token_names = {"eos": family.eos, "bos": family.bos, "pad": family.pad}
    tokens = {f"{name}_token_id": None if token is None else ids[token] for name, token in token_names.items()}
    config = config_class(**{"vocab_size": family.vocab_size, **sizes, **tokens, **family.fields})
    auto_class: Any = AutoModel if family.embedder else AutoModelForCausalLM
    if family.labels is not None:
        auto_class = AutoModelForSequenceClassification
        labels = ["LABEL_0"] if family.labels == 1 else list(family.labels)  # type: ignore[arg-type]
        config.id2label, config.label2id = dict(enumerate(labels)), {name: index for index, name in enumerate(labels)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=torch.float32)
    if family.stops and family.labels is None:
        model.generation_config.eos_token_id = [ids[token] for token in family.stops]
    return model


def save_model(family: Family, folder: Path, texts: Iterable[str]) -> Path:
    """Makes a miniature and its tokenizer, and saves both.

    Args:
        family: The family of the miniature.
        folder: Where to save the model and the tokenizer.
        texts: The texts to train the tokenizer on.
    """
    _make_model(family).save_pretrained(folder)
    make_tokenizer(family, texts).save_pretrained(folder)
    return folder
