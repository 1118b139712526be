"""Token ids of a text: BOS once, where its tokenizer puts one, and no end, which only what was ended has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ZooError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "zxq"


class Frame(NamedTuple):
    """The token ids that a tokenizer puts before a text, and behind it."""

    before: tuple[int, ...]
    behind: tuple[int, ...]


_FRAMES: WeakKeyDictionary[Any, tuple[Any, Frame]] = WeakKeyDictionary()


def frame_of(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """What a tokenizer puts around every text."""
    switches = [getattr(tokenizer, f"add_{name}_token", None) for name in ("bos", "eos")]
    state = (tokenizer.bos_token_id, tokenizer.eos_token_id, *switches)
    known = _FRAMES.get(tokenizer)
    if known is None or known[0] != state:
        bare, full = (list(tokenizer(_PROBE, add_special_tokens=add)["input_ids"]) for add in (False, True))
        extra = len(full) - len(bare)
        start = next((place for place in range(extra + 1) if full[place : place + len(bare)] == bare), 0)
        frame = Frame(tuple(full[:start]), tuple(full[start + len(bare) :])) if bare else Frame((), ())
        known = _FRAMES[tokenizer] = state, frame
    return known[1]


def ends_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer puts its end-of-sequence token behind every text, a prompt too.

    The separator of an encoder, which it reads behind every text, is no end.
    """
    eos = tokenizer.eos_token_id
    return eos is not None and eos != tokenizer.sep_token_id and frame_of(tokenizer).behind[-1:] == (eos,)


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text.

    Args:
        text: It may begin with BOS, as a text does that a chat template rendered.
        tokenizer: The one that encodes.

    Returns:
        The ids, with one BOS where the tokenizer puts one, and without the end that it may put behind every text.
    """
    ids = list(tokenizer(without_bos(text, tokenizer))["input_ids"])
    return ids[:-1] if ends_texts(tokenizer) else ids


def without_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text without the BOS that it begins with, where the tokenizer puts one before it anyway."""
    bos: Any = tokenizer.bos_token
    doubled = bos is not None and frame_of(tokenizer).before[-1:] == (tokenizer.bos_token_id,)
    return text.removeprefix(bos) if doubled else text


def settle_ends(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Has a tokenizer put no end behind texts, as prompts are texts too; what is trained ends is said elsewhere.

    Args:
        tokenizer: It is changed, and keeps that where it is saved.

    Returns:
        A line that says so; None where it puts none.

    Raises:
        ZooError: It cannot be had without.
    """
    if not ends_texts(tokenizer):
        return None
    switches = {"add_bos_token": tokenizer.bos_token_id in frame_of(tokenizer).before, "add_eos_token": False}
    before = frame_of(tokenizer).before
    for name, value in switches.items():
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value
    if ends_texts(tokenizer) or frame_of(tokenizer).before != before:
        raise ZooError(
            f"The tokenizer puts {tokenizer.eos_token} behind every text, also behind prompts, and cannot be told not "
            "to: save it with add_eos_token=False, and give that one."
        )
    return f"The tokenizer put {tokenizer.eos_token} behind every text, also behind prompts: it does not from now on."
