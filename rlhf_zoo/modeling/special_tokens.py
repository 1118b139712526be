"""The special tokens of a policy (what ends a completion, what pads), and a tokenizer that is trained from scratch."""

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ZooError
from .chat import tokenize_prompt
from .chat_template import end_of_turn

ADDED_PAD = "[PAD]"
# Patterns of tokens that a vocabulary reserves for padding or leaves unused, or that separate documents. The first
# pattern that matches a token decides.
SPARE = (r"pad(ding)?", r"(finetune_)?right_pad(_id)?", r"fim_pad", r"vision_pad", r"(image|video)_pad",
         r"reserved(_special)?_token_?\d+", r"unused_?(token_?)?\d+", r"control_\d+", r"end_?of_?text")  # fmt: skip
_BRACKETS = "<>[]|"
# Text of several scripts and kinds, and an unassigned code point, for which no vocabulary has a token.
_ORDINARY = 'Ordinary text, 0 to 9: (a + b) * c = {"key": [1.5]};\n\tÉtude, Москва, 漢字, العربية, 🙂, \u0378'


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the tokens that end a completion: EOS, those in the generation config, and the template's end of turn.

    From the generation config only special tokens count, because a default config may name an ordinary token.

    Args:
        model: The policy, or anything with a generation config.
        tokenizer: The policy's.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    special = _added(tokenizer)
    turn = None if tokenizer.chat_template is None else end_of_turn(tokenizer)
    candidates = (tokenizer.eos_token_id, *(index for index in configured if index in special), turn)
    return list(dict.fromkeys(index for index in candidates if index is not None))


def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the highest token id for which a model may need an embedding.

    PAD does not count, because scripts add it past the embeddings, and it is never looked up.

    Args:
        tokenizer: Any tokenizer.
    """
    return max((index for index in tokenizer.get_vocab().values() if index != tokenizer.pad_token_id), default=0)


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns the tokens that are not ordinary text: {id: token}."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {index: str(token) for index, token in added.items()} | special


def settle_padding(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    pad_token: str | None = None,
    eos_token: str | None = None,
) -> str | None:
    """Makes the tokenizer pad with a token that does not also end completions, and writes it into the model's configs.

    Uses `pad_token`, otherwise the tokenizer's PAD, otherwise a token of the vocabulary that no text uses. If there is
    none, adds one. If the embeddings have no row for it, they grow, and peft then saves them with every adapter.

    Args:
        tokenizer: The tokenizer, which is changed.
        model: The model, which is changed.
        pad_token: The new PAD; None to choose one.
        eos_token: The new EOS; None keeps the present one.

    Returns:
        A line that says what changed; None if nothing had to change.

    Raises:
        ZooError: The vocabulary lacks a token, there is no EOS, or PAD would be EOS.
    """
    for key, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is not None and token not in tokenizer.get_vocab():
            raise ZooError(f"{key} is {token!r}, which the tokenizer does not have: choose one of its tokens.")
    if eos_token is not None:
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token_id is None:
        raise ZooError("The tokenizer has no eos_token, so no completion could end: set one.")
    if pad_token is not None and pad_token == tokenizer.eos_token:
        raise ZooError(f"pad_token is {pad_token!r}, which is also EOS: choose another, or remove the key.")
    old_pad = tokenizer.pad_token
    if pad_token in (None, old_pad) and old_pad not in (None, tokenizer.eos_token):
        if not make_room(model, tokenizer):
            return None
        name_pad(model, tokenizer)
        return (
            f"The model has no embedding for PAD, {old_pad} (id {tokenizer.pad_token_id}): its embeddings are resized."
        )
    problem = "has no PAD" if old_pad is None else f"pads with {'EOS' if old_pad == tokenizer.eos_token else old_pad}"
    padding = pad_token or spare_token(tokenizer, model)
    if padding is not None:
        tokenizer.pad_token = padding
        how = "as requested" if pad_token is not None else "an unused token of its vocabulary"
    else:
        tokenizer.add_special_tokens({"pad_token": ADDED_PAD})
        padding, how = ADDED_PAD, "a new token"
    make_room(model, tokenizer)
    name_pad(model, tokenizer)
    return f"The tokenizer {problem}: PAD is now {padding} (id {tokenizer.pad_token_id}), {how}."


def pads_apart(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has a PAD that is not its EOS.

    Args:
        tokenizer: Any tokenizer.
    """
    return tokenizer.pad_token not in (None, tokenizer.eos_token)


def pad_apart(tokenizer: PreTrainedTokenizerBase, pad_token: str | None, *, subject: str, key: str) -> None:
    """Makes a tokenizer pad with another token than its EOS.

    Args:
        tokenizer: The tokenizer. It gets `pad_token` if it has no PAD, or if its PAD is EOS.
        pad_token: A token of its vocabulary, or None.
        subject: Whose tokenizer it is, for the error.
        key: The key that names `pad_token`.

    Raises:
        ZooError: It still pads with EOS, or has no such token.
    """
    current_pad, end = tokenizer.pad_token, tokenizer.eos_token
    if pad_token is not None and pad_token not in tokenizer.get_vocab():
        raise ZooError(
            f"{key} is {pad_token!r}, which the tokenizer of {subject} does not have: choose one of its tokens."
        )
    if pad_token is not None and pad_token == end:
        raise ZooError(f"{key} is {pad_token!r}, which is also EOS of {subject}: choose another of its tokens.")
    if pads_apart(tokenizer):
        return
    if pad_token is None:
        pads = "has no PAD" if current_pad is None else "pads with its EOS"
        raise ZooError(
            f"The tokenizer of {subject} {pads}, so EOS would be taken for padding and the score would be read one "
            f"token early: set {key} to {_suggestion(tokenizer)}."
        )
    tokenizer.pad_token = pad_token


def _suggestion(tokenizer: PreTrainedTokenizerBase) -> str:
    """Names a token that could be PAD, for an error; its embedding is checked when the key is set."""
    candidate = spare_token(tokenizer, None)
    return "another of its tokens" if candidate is None else f"{candidate!r}, which no text uses"


def make_room(model: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Gives PAD an embedding if the model has none for it. Its values do not matter, but trainers look it up.

    Args:
        model: The model, which is changed.
        tokenizer: The model's.

    Returns:
        Whether the embeddings grew.
    """
    if tokenizer.pad_token_id < model.get_input_embeddings().weight.shape[0]:
        return False
    model.resize_token_embeddings(tokenizer.pad_token_id + 1)
    return True


def name_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the tokenizer's PAD into the model's configs.

    Args:
        model: The model, which is changed.
        tokenizer: The model's.
    """
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.pad_token_id = tokenizer.pad_token_id


def spare_token(tokenizer: PreTrainedTokenizerBase, model: Any) -> str | None:
    """Finds a token with an embedding that occurs in no text and no turn of a conversation.

    Args:
        tokenizer: The tokenizer.
        model: The model, whose weights are not read; None assumes an embedding for each token.

    Returns:
        The token; None without one.
    """
    rows = len(tokenizer) if model is None else model.get_input_embeddings().weight.shape[0]
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, *stop_ids(model, tokenizer)}
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    added = {
        token: index
        for index, token in sorted(_added(tokenizer).items())
        if index < rows and index not in used and token not in template
    }
    matches = (
        token for pattern in SPARE for token in added if re.fullmatch(pattern, token.strip(_BRACKETS), re.IGNORECASE)
    )
    # If every text can be spelled in bytes, nothing is unknown, so UNK is free.
    unknown = [tokenizer.unk_token] if tokenizer.unk_token in added else []
    return next((token for token in (*matches, *unknown) if not _is_written(token, tokenizer)), None)


def _is_written(token: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a token occurs in ordinary text, or in a conversation when it is PAD, which a template may write."""
    index, current_pad = tokenizer.convert_tokens_to_ids(token), tokenizer.pad_token
    turns = [{"role": "user", "content": _ORDINARY}, {"role": "assistant", "content": _ORDINARY}]
    ids = [*tokenize_prompt(_ORDINARY, tokenizer)]
    tokenizer.pad_token = token
    try:
        for messages in (turns[:1], turns) if tokenizer.chat_template is not None else ():
            with contextlib.suppress(ZooError):  # the template does not accept this conversation
                ids += tokenize_prompt(messages, tokenizer)
    finally:
        tokenizer.pad_token = current_pad
    return index in ids


def train_tokenizer(
    lines: Iterable[str], *, vocab_size: int, lowercase: bool = False, max_length: int
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer. <pad> differs from <eos>, because PPO must tell padding from an end.

    A byte-level tokenizer can encode every text, so it needs no <unk>.

    Args:
        lines: The texts.
        vocab_size: The most tokens.
        lowercase: Whether it lower-cases texts.
        max_length: The model's context, in tokens.
    """
    backend = Tokenizer(models.BPE())
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
