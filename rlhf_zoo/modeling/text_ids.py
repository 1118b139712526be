"""The token ids of a text: with one BOS where its tokenizer adds one, and without an end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ZooError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "zxq"


class AddedTokens(NamedTuple):
    """The token ids that a tokenizer adds around a text.

    Attributes:
        prefix: Before it.
        suffix: After it.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


_FRAMES: WeakKeyDictionary[Any, tuple[Any, AddedTokens]] = WeakKeyDictionary()


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> AddedTokens:
    """Returns what a tokenizer adds around every text.

    Args:
        tokenizer: Any tokenizer.
    """
    switches = [getattr(tokenizer, f"add_{name}_token", None) for name in ("bos", "eos")]
    state = (tokenizer.bos_token_id, tokenizer.eos_token_id, *switches)
    cached = _FRAMES.get(tokenizer)
    if cached is None or cached[0] != state:
        bare, full = (list(tokenizer(_PROBE, add_special_tokens=add)["input_ids"]) for add in (False, True))
        extra = len(full) - len(bare)
        start = next((place for place in range(extra + 1) if full[place : place + len(bare)] == bare), 0)
        frame = AddedTokens(tuple(full[:start]), tuple(full[start + len(bare) :])) if bare else AddedTokens((), ())
        cached = _FRAMES[tokenizer] = state, frame
    return cached[1]


def appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer adds its end-of-sequence token after every text, also after a prompt.

    The separator that an encoder reads after every text is no end.

    Args:
        tokenizer: Any tokenizer.
    """
    eos = tokenizer.eos_token_id
    return eos is not None and eos != tokenizer.sep_token_id and added_tokens(tokenizer).suffix[-1:] == (eos,)


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a text.

    Args:
        text: It may begin with BOS, as a text does that a chat template rendered.
        tokenizer: Any tokenizer.

    Returns:
        Token ids, with one BOS where the tokenizer adds one, and without the end that it may add after every text.
    """
    ids = list(tokenizer(without_bos(text, tokenizer))["input_ids"])
    return ids[:-1] if appends_eos(tokenizer) else ids


def without_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Removes the BOS that a text begins with, if its tokenizer adds one anyway.

    Args:
        text: The text.
        tokenizer: Its tokenizer.
    """
    bos: Any = tokenizer.bos_token
    doubled = bos is not None and added_tokens(tokenizer).prefix[-1:] == (tokenizer.bos_token_id,)
    return text.removeprefix(bos) if doubled else text


def switch_off_eos(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Makes a tokenizer add no end after texts, because prompts are texts too. Training adds its ends by itself.

    Args:
        tokenizer: It is changed, and keeps the setting when it is saved.

    Returns:
        A line that says what changed; None where it adds none.

    Raises:
        ZooError: The tokenizer cannot do without.
    """
    if not appends_eos(tokenizer):
        return None
    switches = {"add_bos_token": tokenizer.bos_token_id in added_tokens(tokenizer).prefix, "add_eos_token": False}
    before = added_tokens(tokenizer).prefix
    for name, value in switches.items():
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value
    if appends_eos(tokenizer) or added_tokens(tokenizer).prefix != before:
        raise ZooError(
            f"The tokenizer adds {tokenizer.eos_token} after every text, prompts included, and ignores add_eos_token: "
            "save it with add_eos_token=False, and use that one."
        )
    return f"The tokenizer added {tokenizer.eos_token} after every text, prompts included. That is switched off now."
