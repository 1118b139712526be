"""Checks that a chat template passes on the words of a conversation.

A template is a program that comes with a downloaded model. One that drops, changes, reorders or adds words would change
the data that a stage learns from, and no figure of the run would show it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError
from transformers.utils import chat_template_utils

from ..errors import ZooError
from .chat_template import Chat, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "user", "assistant")
#: A tag such as </s> or [/INST], which a tokenizer may have as text only.
_TAG = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
# The last second of an hour: one second later the minute and the hour are others, too.
_NOW = datetime(2026, 1, 2, 11, 59, 59)
_REMEDY = "set chat_template_path in sft.yaml to a template that keeps them"


def is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation consists of texts of a system, a user and an assistant. Only those are checked.

    Args:
        messages: The conversation.
    """
    return all(
        turn.get("role") in _ROLES and isinstance(turn.get("content"), str) and not turn.get("tool_calls")
        for turn in messages
    )


def check_keeps_words(messages: Sequence[Mapping[str, Any]], text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that a rendered conversation has the words of its turns, in their order.

    Templates may strip white space and thoughts, and may move and rewrite the system turn.

    Args:
        messages: A plain conversation.
        text: Its rendering.
        tokenizer: With the chat template.

    Raises:
        ZooError: A turn is missing or changed, or is not after the one before.
    """
    start = 0
    for number, turn in enumerate(messages, start=1):
        content = turn["content"].rpartition("</think>")[2].strip()
        if turn["role"] == "system":
            continue
        place = text.find(content, start)
        if place < 0:
            verb = "moves" if content in text else "drops or changes"
            raise ZooError(
                f"{_subject(tokenizer)} {verb} the words of message {number} of "
                f"{len(messages)} ({turn['role']}: {content!r:.60}): {_REMEDY}."
            )
        start = place + len(content)


def check_template(roles: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, answered: bool) -> None:
    """Checks how the template renders conversations of some roles, on a conversation of made-up words.

    Args:
        roles: The roles of the turns.
        tokenizer: With the chat template.
        answered: Whether the last turn is an answer. Otherwise the template's generation prompt is added.

    Raises:
        ZooError: The template drops, changes, repeats or moves a turn, adds words after the last answer, or renders
            the same conversation differently at another time.
    """
    subject = _subject(tokenizer)
    if _draws_at_random(tokenizer.get_chat_template()):
        raise ZooError(f"{subject} draws words at random: {_REMEDY}.")
    chat = Chat.of(tokenizer)
    if chat is not None and chat.system_prompt is not None and roles[:1] != ("system",):
        roles = ("system", *roles)
    # Punctuation, capitals and a blank line show templates that escape, fold or join.
    messages = [
        {"role": role, "content": f'Vexil & "quorn" {number}\n\nTAZim <{number}> olph.'}
        for number, role in enumerate(roles, start=1)
    ]
    try:
        with _clock_at(_NOW):
            text = render_text(messages, tokenizer, add_generation_prompt=not answered)
        with _clock_at(_NOW + timedelta(seconds=1)):
            later = render_text(messages, tokenizer, add_generation_prompt=not answered)
    except ZooError:  # the template takes other conversations than this one
        return
    if text != later:
        raise ZooError(
            f"{subject} writes the time of day, so the same conversation is rendered differently each time: {_REMEDY}."
        )
    check_keeps_words(messages, text, tokenizer)
    for turn in messages:
        if (count := text.count(turn["content"])) != 1:
            verb = "repeats" if count else "drops or changes"
            raise ZooError(f"{subject} {verb} the words of the role {turn['role']}: {_REMEDY}.")
    if answered and roles[-1] == "assistant" and (words := _words_after_end(text, messages[-1]["content"], tokenizer)):
        raise ZooError(f"{subject} adds {words!r:.60} after the last answer: {_REMEDY}.")


@contextlib.contextmanager
def _clock_at(moment: datetime) -> Iterator[None]:
    """Stops the clock that templates read, strftime_now of transformers."""
    clock: Any = chat_template_utils
    before = clock.datetime
    clock.datetime = SimpleNamespace(now=lambda: moment)
    try:
        yield
    finally:
        clock.datetime = before


def _subject(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"The chat template used with {tokenizer.name_or_path or 'this tokenizer'}"


def _words_after_end(text: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the words after the last answer; "" where no special token ends it, as a text may end it then."""
    after = text.rpartition(answer)[2]
    added = sorted((str(token) for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    without = re.sub("|".join(map(re.escape, added)), " ", after) if added else after
    if without == after:
        return ""
    words = " ".join(_TAG.sub(" ", without).split())
    return words if re.search(r"\w", words) else ""


@lru_cache(maxsize=16)
def _draws_at_random(template: str) -> bool:
    """Whether a template uses what Jinja has for random texts."""
    try:
        tokens = [text.strip("'\"") for _, kind, text in Environment().lex(template) if kind in ("name", "string")]
    except TemplateError:  # rendering gives the reason
        return False
    return "random" in tokens or "lipsum" in tokens
