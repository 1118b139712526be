"""Special tokens of a policy: PAD and the tokens that end a completion. Also trains tokenizers from scratch."""

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ZooError
from .chat import tokenize_prompt
from .chat_template import end_of_turn

ADDED_PAD = "[PAD]"
# Names of tokens that can serve as PAD, best first: tokens for padding, unused tokens, and document separators.
_SPARE_PATTERNS = (r"pad(ding)?", r"(finetune_)?right_pad(_id)?", r"fim_pad", r"vision_pad", r"(image|video)_pad",
         r"reserved(_special)?_token_?\d+", r"unused_?(token_?)?\d+", r"control_\d+", r"end_?of_?text")  # fmt: skip
_BRACKETS = "<>[]|"
# Text in several scripts. The last code point is unassigned, so a vocabulary without bytes maps it to UNK.
_ORDINARY_TEXT = 'Ordinary text, 0 to 9: (a + b) * c = {"key": [1.5]};\n\tÉtude, Москва, 漢字, العربية, 🙂, \u0378'


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the tokens that end a completion: EOS, EOS tokens in the generation config, and the template's end of turn.

    Ordinary tokens in the generation config do not count, because a default config may name an ordinary token.

    Args:
        model: The policy, with or without a generation config.
        tokenizer: The policy's tokenizer.
    """
    eos_setting = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured_ids = eos_setting if isinstance(eos_setting, list) else [eos_setting]
    special_tokens = _special_tokens(tokenizer)
    turn_end = None if tokenizer.chat_template is None else end_of_turn(tokenizer)
    special_ids = (token_id for token_id in configured_ids if token_id in special_tokens)
    end_ids = (tokenizer.eos_token_id, *special_ids, turn_end)
    return list(dict.fromkeys(token_id for token_id in end_ids if token_id is not None))


def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the highest token id for which a model may need an embedding.

    PAD does not count: some scripts add PAD without an embedding, which works as long as no model looks PAD up.
    """
    pad_id = tokenizer.pad_token_id  # read only once, because each read of this property is a slow lookup
    return max((token_id for token_id in tokenizer.get_vocab().values() if token_id != pad_id), default=0)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns {id: token} for the tokens that are not ordinary text."""
    added_tokens: dict[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
    special_tokens = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {token_id: str(token) for token_id, token in added_tokens.items()} | special_tokens


def set_up_padding(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    pad_token: str | None = None,
    eos_token: str | None = None,
) -> str | None:
    """Gives the tokenizer a PAD that is not EOS, and writes PAD into the model's configs.

    PAD is, in this order: `pad_token`, the tokenizer's current PAD unless it is EOS, a token of the vocabulary that no
    text uses, or a new token. If PAD has no embedding, one is added, and peft then saves all embeddings with adapters.

    Args:
        tokenizer: The tokenizer, which is changed.
        model: The model, which is changed.
        pad_token: The new PAD; None to choose a token as above.
        eos_token: The new EOS; None to keep the current one.

    Returns:
        A sentence that describes the change; None if nothing had to change.

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
        raise ZooError(f"pad_token is {pad_token!r}, which is also the EOS: choose another, or remove the key.")
    old_pad = tokenizer.pad_token
    if pad_token in (None, old_pad) and old_pad not in (None, tokenizer.eos_token):
        if not add_pad_embedding(model, tokenizer):
            return None
        write_pad_id(model, tokenizer)
        return (
            f"The model has no embedding for PAD, {old_pad} (id {tokenizer.pad_token_id}): its embeddings are resized."
        )
    problem = "has no PAD" if old_pad is None else f"pads with {'EOS' if old_pad == tokenizer.eos_token else old_pad}"
    new_pad = pad_token or find_spare_token(tokenizer, model)
    if new_pad is not None:
        tokenizer.pad_token = new_pad
        origin = "as requested" if pad_token is not None else "an unused token of its vocabulary"
    else:
        tokenizer.add_special_tokens({"pad_token": ADDED_PAD})
        new_pad, origin = ADDED_PAD, "a new token"
    add_pad_embedding(model, tokenizer)
    write_pad_id(model, tokenizer)
    return f"The tokenizer {problem}: PAD is now {new_pad} (id {tokenizer.pad_token_id}), {origin}."


def has_own_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has a PAD other than its EOS."""
    return tokenizer.pad_token not in (None, tokenizer.eos_token)


def ensure_own_pad(tokenizer: PreTrainedTokenizerBase, pad_token: str | None, *, subject: str, key: str) -> None:
    """Checks that PAD is not EOS. If it is, or if there is no PAD, PAD becomes `pad_token`.

    Args:
        tokenizer: The tokenizer, which may be changed.
        pad_token: A token of the tokenizer's vocabulary; None to change nothing.
        subject: The name of the tokenizer's model in errors.
        key: The key that sets `pad_token`, for errors.

    Raises:
        ZooError: PAD would still be EOS or missing, or the tokenizer does not have `pad_token`.
    """
    current_pad, eos = tokenizer.pad_token, tokenizer.eos_token
    if pad_token is not None and pad_token not in tokenizer.get_vocab():
        raise ZooError(
            f"{key} is {pad_token!r}, which the tokenizer of {subject} does not have: choose one of its tokens."
        )
    if pad_token is not None and pad_token == eos:
        raise ZooError(f"{key} is {pad_token!r}, which is also the EOS of {subject}: choose another of its tokens.")
    if has_own_pad(tokenizer):
        return
    if pad_token is None:
        problem = "has no PAD" if current_pad is None else "pads with its EOS"
        raise ZooError(
            f"The tokenizer of {subject} {problem}, so EOS would be taken for padding and the score would be read one "
            f"token early: set {key} to {_suggest_pad(tokenizer)}."
        )
    tokenizer.pad_token = pad_token


def _suggest_pad(tokenizer: PreTrainedTokenizerBase) -> str:
    """Suggests a token for PAD, as part of an error. The token's embedding is checked once the user has set the key."""
    candidate = find_spare_token(tokenizer, None)
    return "another of its tokens" if candidate is None else f"{candidate!r}, which no text uses"


def add_pad_embedding(model: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Adds an embedding for PAD if the model has none. Trainers look it up, but mask the result.

    Args:
        model: The model, which is changed.
        tokenizer: The model's tokenizer.

    Returns:
        Whether an embedding was added.
    """
    if tokenizer.pad_token_id < model.get_input_embeddings().weight.shape[0]:
        return False
    model.resize_token_embeddings(tokenizer.pad_token_id + 1)
    return True


def write_pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the tokenizer's PAD into the model's configs.

    Args:
        model: The model, which is changed.
        tokenizer: The model's tokenizer.
    """
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.pad_token_id = tokenizer.pad_token_id


def find_spare_token(tokenizer: PreTrainedTokenizerBase, model: Any) -> str | None:
    """Finds a token that can serve as PAD: it has an embedding and occurs neither in text nor in conversations.

    Args:
        tokenizer: The tokenizer.
        model: The model; None if every token has an embedding.

    Returns:
        The token; None if there is no such token.
    """
    num_embeddings = len(tokenizer) if model is None else model.get_input_embeddings().weight.shape[0]
    used_ids = {tokenizer.eos_token_id, tokenizer.bos_token_id, *stop_ids(model, tokenizer)}
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    unused_tokens = [
        token
        for token_id, token in sorted(_special_tokens(tokenizer).items())
        if token_id < num_embeddings and token_id not in used_ids and token not in template
    ]
    matches = (
        token
        for pattern in _SPARE_PATTERNS
        for token in unused_tokens
        if re.fullmatch(pattern, token.strip(_BRACKETS), re.IGNORECASE)
    )
    # A vocabulary that contains all bytes never uses UNK, so UNK can serve too.
    unk_tokens = [tokenizer.unk_token] if tokenizer.unk_token in unused_tokens else []
    return next((token for token in (*matches, *unk_tokens) if not _occurs_in_text(token, tokenizer)), None)


def _occurs_in_text(token: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a token occurs in ordinary text, or would in conversations if it were PAD, which a template may write."""
    token_id, current_pad = tokenizer.convert_tokens_to_ids(token), tokenizer.pad_token
    turns = [{"role": "user", "content": _ORDINARY_TEXT}, {"role": "assistant", "content": _ORDINARY_TEXT}]
    ids = [*tokenize_prompt(_ORDINARY_TEXT, tokenizer)]
    tokenizer.pad_token = token
    try:
        for messages in (turns[:1], turns) if tokenizer.chat_template is not None else ():
            with contextlib.suppress(ZooError):  # the template does not accept this conversation
                ids += tokenize_prompt(messages, tokenizer)
    finally:
        tokenizer.pad_token = current_pad
    return token_id in ids


def train_tokenizer(
    lines: Iterable[str], *, vocab_size: int, lowercase: bool = False, max_length: int
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer with the special tokens <pad> and <eos>.

    Padding and the end of a text have different tokens, because PPO must distinguish them. There is no <unk>, because
    bytes encode every text.

    Args:
        lines: The texts to train on.
        vocab_size: The maximum number of tokens.
        lowercase: Whether the tokenizer lower-cases texts.
        max_length: The model's context length, in tokens.
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
