"""Tokenizes texts with at most one BOS and without EOS. Compares the ids of two tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ZooError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "zxq"  # a text in which no special token occurs


class AddedTokens(NamedTuple):
    """The token ids that a tokenizer adds around a text.

    Attributes:
        prefix: The ids before the text.
        suffix: The ids after the text.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


# {tokenizer: (settings, the tokens that it adds)}. Cached tokens are valid as long as the settings are the same.
_CACHE: WeakKeyDictionary[Any, tuple[Any, AddedTokens]] = WeakKeyDictionary()


def same_token_ids(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same tokens and the same EOS. PAD is masked, so it may differ."""
    return a is b or (a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> AddedTokens:
    """Returns the token ids that a tokenizer adds around every text."""
    switches = [getattr(tokenizer, f"add_{name}_token", None) for name in ("bos", "eos")]
    settings = (tokenizer.bos_token_id, tokenizer.eos_token_id, *switches)
    cached = _CACHE.get(tokenizer)
    if cached is None or cached[0] != settings:
        bare_ids, ids = (list(tokenizer(_PLACEHOLDER, add_special_tokens=add)["input_ids"]) for add in (False, True))
        size = len(bare_ids)
        start = next((start for start in range(len(ids) - size + 1) if ids[start : start + size] == bare_ids), 0)
        tokens = AddedTokens(tuple(ids[:start]), tuple(ids[start + size :])) if bare_ids else AddedTokens((), ())
        cached = _CACHE[tokenizer] = settings, tokens
    return cached[1]


def appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer adds EOS after every text, prompts included.

    The separator that an encoder's tokenizer adds after every text does not count.
    """
    eos = tokenizer.eos_token_id
    return eos is not None and eos != tokenizer.sep_token_id and added_tokens(tokenizer).suffix[-1:] == (eos,)


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a text with at most one BOS and without EOS.

    Args:
        text: The text, which may begin with BOS if a chat template rendered it.
        tokenizer: Any tokenizer.

    Returns:
        Token ids, with one BOS if the tokenizer adds BOS, and without an EOS that it adds.
    """
    ids = list(tokenizer(without_bos(text, tokenizer))["input_ids"])
    return ids[:-1] if appends_eos(tokenizer) else ids


def without_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Removes the BOS at the start of a text if the tokenizer would add a second one."""
    bos: Any = tokenizer.bos_token
    would_double = bos is not None and added_tokens(tokenizer).prefix[-1:] == (tokenizer.bos_token_id,)
    return text.removeprefix(bos) if would_double else text


def switch_off_eos(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Makes a tokenizer add no EOS after texts, because that EOS would end prompts too. Trainers add their own EOS.

    Args:
        tokenizer: The tokenizer, which is changed. The setting is saved with it.

    Returns:
        A sentence that describes the change; None if the tokenizer adds no EOS.

    Raises:
        ZooError: The tokenizer ignores the setting.
    """
    if not appends_eos(tokenizer):
        return None
    # Setting either switch applies both, so the switch for BOS must match the tokenizer's current behavior.
    prefix = added_tokens(tokenizer).prefix
    switches = {"add_bos_token": tokenizer.bos_token_id in prefix, "add_eos_token": False}
    for name, value in switches.items():
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value  # save_pretrained writes init_kwargs
    if appends_eos(tokenizer) or added_tokens(tokenizer).prefix != prefix:
        raise ZooError(
            f"The tokenizer adds {tokenizer.eos_token} after every text, prompts included, and ignores add_eos_token: "
            "save the tokenizer with add_eos_token=False, and load that copy."
        )
    return f"The tokenizer added {tokenizer.eos_token} after every text, prompts included. It no longer does."
