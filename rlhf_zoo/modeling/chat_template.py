"""Writes chat settings at the head of a tokenizer's chat template, and renders within limits of time and memory.

A stage that trains on conversations writes the recipe's chat settings there. They are saved and published with the
model, so everyone who applies the template renders conversations in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from keyword import kwlist
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard, Unpack
from weakref import WeakKeyDictionary

from jinja2 import Environment, TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE

from ..errors import ZooError, first_line
from .alignment import special_ids
from .time_limit import LimitExceeded, deadline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A conversation: messages with the keys `role` and `content`, and any other keys that a template reads.
Conversation = Sequence[Mapping[str, Any]]
#: A prompt in a data set: a text or a conversation.
Prompt = str | Conversation

_HEAD = re.compile(r"\{#- rlhf-zoo (\{.*?\}) #\}.*?\{#- end #\}", re.DOTALL)
_PLACEHOLDER = "zxq"  # a text that no template contains
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Names with a meaning in Jinja, or in a template that transformers applies.
_RESERVED = frozenset(
    (*DEFAULT_NAMESPACE, *kwlist, *(word.lower() for word in kwlist))
) | {
    "block", "call", "caller", "do", "elif", "endif", "endfor", "extends", "filter", "generation", "include", "kwargs",
    "loop", "macro", "recursive", "self", "set", "super", "varargs",
    "messages", "tools", "documents", "conversation", "add_generation_prompt", "continue_final_message",
    "raise_exception", "strftime_now",
}  # fmt: skip
_PLACEHOLDER_TURNS = [{"role": "user", "content": _PLACEHOLDER}, {"role": "assistant", "content": _PLACEHOLDER}]
#: Limits for one rendering, in seconds and bytes, because a template is a program that comes with a downloaded model.
RENDER_SECONDS, RENDER_MEMORY = 10.0, 2 * 2**30


@dataclass(frozen=True)
class ChatSettings:
    """How conversations are rendered, and how completions are read.

    Attributes:
        system_prompt: The system turn of conversations that have none; None to add no system turn.
        chat_template_kwargs: Default values of the template's variables.
        strip_thoughts: Whether to remove <think>…</think> from the text that rewards and judges read.
    """

    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    strip_thoughts: bool = False

    def __post_init__(self) -> None:
        for name in self.chat_template_kwargs:
            if not _VARIABLE.fullmatch(name) or name in _RESERVED or name.endswith("_token"):
                raise ZooError(
                    f"chat_template_kwargs has the key {name!r:.100}, which is not a free variable of a template: "
                    "use the name of a variable of this chat template, such as enable_thinking."
                )

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatSettings | None:
        """Reads the settings at the head of the tokenizer's template.

        Returns:
            The settings; None if rlhf-zoo did not train this model on conversations.
        """
        head = _HEAD.match(_template(tokenizer) or "")
        return cls(**json.loads(head[1])) if head else None

    def write(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Writes these settings at the head of the tokenizer's template, and replaces earlier settings.

        Args:
            tokenizer: The tokenizer, whose chat template is changed.

        Returns:
            The same tokenizer.

        Raises:
            ZooError: The tokenizer has no chat template, or the template refuses a conversation under these settings.
        """
        template = _template(tokenizer)
        if template is None:
            raise ZooError(
                "The data are conversations, but the tokenizer has no chat template: set chat_template_path in "
                "sft.yaml to a .jinja file or a model that has one, or use plain texts."
            )
        # A "#}" in a system prompt would end the comment that holds the settings.
        settings = json.dumps(asdict(self), sort_keys=True).replace("#", "\\u0023")
        head = f"{{#- rlhf-zoo {settings} #}}"
        # `is not defined` lets a caller of apply_chat_template override each setting.
        for name, value in self.chat_template_kwargs.items():
            head += f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        if self.system_prompt is not None:
            turn = f"[{{'role': 'system', 'content': {_literal(self.system_prompt)}}}]"
            head += f"{{%- if messages and messages[0].role != 'system' %}}{{%- set messages = {turn} + messages %}}"
            head += "{%- endif %}"
        tokenizer.chat_template = head + "{#- end #}" + _HEAD.sub("", template, count=1)
        # If the template does not accept these settings, fail here instead of at the first prompt.
        render_ids(_PLACEHOLDER_TURNS[:1], tokenizer, add_generation_prompt=True)
        return tokenizer

    def write_for_prompts(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt]
    ) -> PreTrainedTokenizerBase:
        """Writes these settings into the tokenizer's template if the prompts are conversations.

        Args:
            tokenizer: The tokenizer, whose chat template may be changed.
            prompts: Texts or conversations. The first one decides.

        Returns:
            The same tokenizer.

        Raises:
            ZooError: As for `write`.
        """
        return self.write(tokenizer) if is_conversation(next(iter(prompts), None)) else tokenizer


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template: Any = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _literal(value: Any) -> str:
    """Writes a value as a Jinja literal, with strings escaped as in JSON."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def is_conversation(value: Any) -> TypeGuard[Conversation]:
    """Whether a prompt or a completion is a list of messages.

    Args:
        value: Anything that a data set's column holds.
    """
    return isinstance(value, (list, tuple)) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)


class PromptOptions(TypedDict, total=False):
    """How a template ends a conversation: keywords of `apply_chat_template`."""

    add_generation_prompt: bool
    continue_final_message: bool


def render_ids(
    messages: Conversation, tokenizer: PreTrainedTokenizerBase, **options: Unpack[PromptOptions]
) -> list[int]:
    """Renders a conversation to token ids.

    Args:
        messages: The conversation.
        tokenizer: A tokenizer with a chat template.
        **options: See `PromptOptions`.

    Raises:
        ZooError: The tokenizer has no chat template, or the template refuses the conversation or takes too long.
    """
    return list(_apply_template(messages, tokenizer, {"tokenize": True, "return_dict": False, **options}))


def render_text(messages: Conversation, tokenizer: PreTrainedTokenizerBase, **options: Unpack[PromptOptions]) -> str:
    """Renders a conversation to text.

    Args:
        messages: The conversation.
        tokenizer: A tokenizer with a chat template.
        **options: See `PromptOptions`.

    Raises:
        ZooError: As for `render_ids`.
    """
    return str(_apply_template(messages, tokenizer, {"tokenize": False, **options}))


@lru_cache(maxsize=16)
def _computes_powers(template: str) -> bool:
    """Whether a template computes a power. For example, 9 ** 9 ** 9 takes forever, and no limit can interrupt it."""
    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    except TemplateError:  # rendering gives the reason
        return False
    # The `**` of keyword arguments follows a bracket or a comma. The `**` of a power follows an operand.
    return any(token == ("operator", "**") and previous[1] not in ("(", ",") for previous, token in pairwise(tokens))


def _apply_template(messages: Conversation, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Any:
    """Applies the tokenizer's template under the limits RENDER_SECONDS and RENDER_MEMORY."""
    if tokenizer.chat_template is None:
        raise ZooError("The prompts are conversations, but the tokenizer has no chat template: add one, or use texts.")
    if _computes_powers(_template(tokenizer) or ""):
        raise ZooError("The chat template computes powers, which may take forever: use another template.")
    try:
        with deadline(RENDER_SECONDS, memory=RENDER_MEMORY):
            turns: Any = list(messages)
            return tokenizer.apply_chat_template(turns, **options)
    except LimitExceeded as error:
        raise ZooError(
            f"The chat template exceeds {RENDER_SECONDS:g} s or {RENDER_MEMORY // 2**30} GiB on a conversation of "
            f"{len(messages)} messages: use another template."
        ) from error
    except Exception as error:  # a template may raise any exception
        roles = ", ".join(str(turn.get("role")) for turn in messages) or "no turns"
        raise ZooError(
            f"The chat template refuses a conversation of {roles} ({first_line(error)}): correct the data, or remove "
            "system_prompt if the template does not allow one."
        ) from error


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Finds the special token with which the template ends an answer.

    Args:
        tokenizer: A tokenizer with or without a chat template.

    Returns:
        The token's id; the id of EOS if the template ends answers without a special token.
    """
    try:
        text = render_text(_PLACEHOLDER_TURNS, tokenizer)
    except ZooError:  # the template does not accept this conversation
        return tokenizer.eos_token_id
    end_id = _first_special_token(text.rpartition(_PLACEHOLDER)[2], tokenizer)
    return tokenizer.eos_token_id if end_id is None else end_id


def _first_special_token(text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    special = special_ids(tokenizer) - {tokenizer.unk_token_id}  # UNK may stand for ordinary text
    return next((token for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token in special), None)


def check_answers_end(tokenizer: PreTrainedTokenizerBase, *, assistant_only: bool) -> None:
    """Checks that SFT on conversations teaches the model where an answer ends.

    Args:
        tokenizer: The tokenizer, with the chat template that SFT trains on.
        assistant_only: Whether the loss includes only tokens in the template's {% generation %} blocks.

    Raises:
        ZooError: No special token follows an answer, or the loss does not include that token.
    """
    try:
        text = render_text(_PLACEHOLDER_TURNS, tokenizer)
    except ZooError:  # the template does not accept this conversation
        return
    _, placeholder, text_after = text.rpartition(_PLACEHOLDER)
    if not placeholder:
        return
    if _first_special_token(text_after, tokenizer) is None:
        raise ZooError(
            "The chat template does not end an answer with a special token, so SFT would not teach the model to stop: "
            "set chat_template_path to one that does, such as this template with {{ eos_token }} after each answer; "
            "or, if a certain text ends answers, set stop_token or truncate_text in ppo.yaml."
        )
    if not assistant_only:
        return
    encoding = _apply_template(
        _PLACEHOLDER_TURNS, tokenizer, {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    )
    ids, loss_mask = encoding["input_ids"], encoding["assistant_masks"]
    start = len(ids) - len(tokenizer(text_after, add_special_tokens=False)["input_ids"])
    special = special_ids(tokenizer)
    end = next((position for position in range(start, len(ids)) if ids[position] in special), None)
    if 1 in loss_mask and end is not None and not loss_mask[end]:
        raise ZooError(
            f"assistant_only_loss trains only on the template's {{% generation %}} blocks, but the token that ends "
            f"an answer, {tokenizer.convert_ids_to_tokens(ids[end])}, is outside them: move it inside."
        )


# {tokenizer: (template, generation prompt, space)}. Cached because each completion needs them. The values are valid as
# long as the tokenizer has the same template.
_TURN_STARTS: WeakKeyDictionary[Any, tuple[Any, str, str]] = WeakKeyDictionary()


def template_space(tokenizer: PreTrainedTokenizerBase) -> str:
    """Finds the white space that the template puts between its generation prompt and an answer.

    Args:
        tokenizer: A tokenizer with a chat template.

    Returns:
        The white space, or "".
    """
    return _turn_start(tokenizer)[1]


def generation_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Finds the text that the template adds after a conversation to start an answer.

    Args:
        tokenizer: A tokenizer with a chat template.

    Returns:
        The text, such as the assistant's role and, in templates of reasoning models, "<think>".
    """
    return _turn_start(tokenizer)[0]


def _turn_start(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Returns the generation prompt, and the white space between it and an answer."""
    template = tokenizer.chat_template
    cached = _TURN_STARTS.get(tokenizer)
    if cached is None or cached[0] != template:
        opening = space = ""
        with suppress(ZooError):  # the template does not accept this conversation
            prompt_text = render_text(_PLACEHOLDER_TURNS[:1], tokenizer, add_generation_prompt=True)
            opening = prompt_text.rpartition(_PLACEHOLDER)[2]
            text = render_text(_PLACEHOLDER_TURNS, tokenizer)
            between = text[len(prompt_text) :].partition(_PLACEHOLDER)[0] if text.startswith(prompt_text) else ""
            space = between if between.isspace() else ""
        cached = _TURN_STARTS[tokenizer] = template, opening, space
    return cached[1:]
