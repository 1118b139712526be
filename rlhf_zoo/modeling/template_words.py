"""Checks that a chat template keeps the words of a conversation.

A template is a program that comes with a downloaded model. One that drops, changes, reorders or adds words would change
the data that a stage trains on, and no metric of the run would show it.
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
from .chat_template import ChatSettings, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "user", "assistant")
# A tag such as </s> or [/INST]. It need not be a token of the tokenizer.
_TAG = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
# The last second of an hour. One second later, the minute and the hour differ too.
_TEST_TIME = datetime(2026, 1, 2, 11, 59, 59)
_FIX = "set chat_template_path in sft.yaml to a template that keeps them"


def is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every turn is a text by the system, the user or the assistant. Other conversations are not checked."""
    return all(
        turn.get("role") in _ROLES and isinstance(turn.get("content"), str) and not turn.get("tool_calls")
        for turn in messages
    )


def check_keeps_words(messages: Sequence[Mapping[str, Any]], text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that a rendered conversation contains the words of its turns, in order.

    A template may strip white space and thoughts, and may move or rewrite the system turn.

    Args:
        messages: A conversation for which `is_plain` is true.
        text: The rendered conversation.
        tokenizer: The tokenizer with the chat template.

    Raises:
        ZooError: A turn is missing, changed or out of order.
    """
    start = 0
    for number, turn in enumerate(messages, start=1):
        content = turn["content"].rpartition("</think>")[2].strip()
        if turn["role"] == "system":
            continue
        position = text.find(content, start)
        if position < 0:
            verb = "moves" if content in text else "drops or changes"
            raise ZooError(
                f"{_subject(tokenizer)} {verb} the words of message {number} of "
                f"{len(messages)} ({turn['role']}: {content!r:.60}): {_FIX}."
            )
        start = position + len(content)


def check_template(roles: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, has_answer: bool) -> None:
    """Checks how the template renders a conversation of made-up words with these roles.

    Args:
        roles: The roles of the turns.
        tokenizer: The tokenizer with the chat template.
        has_answer: Whether the last turn is an answer. If not, the template's generation prompt is added.

    Raises:
        ZooError: The template drops, changes, repeats or moves a turn, adds words after the last answer, or renders
            the same conversation differently at another time.
    """
    subject = _subject(tokenizer)
    if _draws_at_random(tokenizer.get_chat_template()):
        raise ZooError(f"{subject} draws words at random: {_FIX}.")
    chat = ChatSettings.of(tokenizer)
    if chat is not None and chat.system_prompt is not None and roles[:1] != ("system",):
        roles = ("system", *roles)
    # Punctuation, capitals and a blank line reveal templates that escape, lower-case or join words.
    messages = [
        {"role": role, "content": f'Vexil & "quorn" {number}\n\nTAZim <{number}> olph.'}
        for number, role in enumerate(roles, start=1)
    ]
    try:
        with _clock_at(_TEST_TIME):
            text = render_text(messages, tokenizer, add_generation_prompt=not has_answer)
        with _clock_at(_TEST_TIME + timedelta(seconds=1)):
            later_text = render_text(messages, tokenizer, add_generation_prompt=not has_answer)
    except ZooError:  # the template does not accept this conversation
        return
    if text != later_text:
        raise ZooError(
            f"{subject} writes the time of day, so the same conversation is rendered differently each time: {_FIX}."
        )
    check_keeps_words(messages, text, tokenizer)
    for turn in messages:
        if (count := text.count(turn["content"])) != 1:
            verb = "repeats" if count else "drops or changes"
            raise ZooError(f"{subject} {verb} the words of the role {turn['role']}: {_FIX}.")
    ends_with_answer = has_answer and roles[-1] == "assistant"
    words = _words_after_end(text, messages[-1]["content"], tokenizer) if ends_with_answer else ""
    if words:
        raise ZooError(f"{subject} adds {words!r:.60} after the last answer: {_FIX}.")


@contextlib.contextmanager
def _clock_at(moment: datetime) -> Iterator[None]:
    """Sets the time that templates read with strftime_now. transformers reads it from its module's `datetime`."""
    module: Any = chat_template_utils
    original_datetime = module.datetime
    module.datetime = SimpleNamespace(now=lambda: moment)
    try:
        yield
    finally:
        module.datetime = original_datetime


def _subject(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"The chat template used with {tokenizer.name_or_path or 'this tokenizer'}"


def _words_after_end(text: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the words after the last answer; "" if no special token follows, because words may then end answers."""
    text_after = text.rpartition(answer)[2]
    # Replace the longest tokens first, because a token may begin with another token.
    tokens = sorted((str(token) for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    without_tokens = re.sub("|".join(map(re.escape, tokens)), " ", text_after) if tokens else text_after
    if without_tokens == text_after:
        return ""
    words = " ".join(_TAG.sub(" ", without_tokens).split())
    return words if re.search(r"\w", words) else ""


@lru_cache(maxsize=16)
def _draws_at_random(template: str) -> bool:
    """Whether a template uses Jinja's `random` or `lipsum`, which return random values."""
    try:
        tokens = [text.strip("'\"") for _, kind, text in Environment().lex(template) if kind in ("name", "string")]
    except TemplateError:  # rendering gives the reason
        return False
    return "random" in tokens or "lipsum" in tokens
