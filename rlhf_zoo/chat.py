"""Conversations: one rendering of prompts and completions for every stage, judge and page.

What a recipe says of conversations is written at the head of the tokenizer's chat template when a stage trains on them.
So it is saved and published with the model, and whoever applies the template, here or elsewhere, renders alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .deadline import Expired, deadline
from .errors import ZooError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEAD = re.compile(r"\{#- rlhf-zoo (\{.*?\}) #\}.*?\{#- end #\}", re.DOTALL)
# A thought that was cut by the length has no end, and nothing was said after it.
_THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
_PROBE = "zxq"
#: What one rendering may take. A template is a program that comes with a model.
RENDER_SECONDS, RENDER_MEMORY = 10.0, 2 * 2**30
# A power in an expression, which nothing can interrupt: an operand before `**`, where keywords have none.
_POWER = re.compile(r"\{[{%](?:(?!%\}|\}\}).)*[\w)\]]\s*\*\*", re.DOTALL)


@dataclass(frozen=True)
class Chat:
    """How conversations are rendered and read.

    system_prompt: of conversations that have none. chat_template_kwargs: variables of the template where its caller
    gives none. strip_thoughts: leave <think>…</think> out of what rewards and judges read.
    """

    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    strip_thoughts: bool = False

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Chat | None:
        """What was written into the tokenizer's template; None where nothing was trained on conversations here."""
        head = _HEAD.match(_template(tokenizer) or "")
        return cls(**json.loads(head[1])) if head else None

    def write(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Writes this at the head of the tokenizer's template, in place of what stood there, and returns the tokenizer.

        Raises ZooError where it has no template, or its template refuses a conversation under these settings.
        """
        template = _template(tokenizer)
        if template is None:
            raise ZooError(
                "The data are conversations and the tokenizer has no chat template: name one with chat_template_path "
                "in sft.yaml, a .jinja file or a model that has one, or give texts."
            )
        about = json.dumps(asdict(self), sort_keys=True).replace("#", "\\u0023")
        head = f"{{#- rlhf-zoo {about} #}}"
        for name, value in self.chat_template_kwargs.items():
            head += f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        if self.system_prompt is not None:
            first = f"[{{'role': 'system', 'content': {_literal(self.system_prompt)}}}]"
            head += f"{{%- if messages and messages[0].role != 'system' %}}{{%- set messages = {first} + messages %}}"
            head += "{%- endif %}"
        tokenizer.chat_template = head + "{#- end #}" + _HEAD.sub("", template, count=1)
        prompt_ids([{"role": "user", "content": _PROBE}], tokenizer)
        return tokenizer

    def for_prompts(self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Any]) -> PreTrainedTokenizerBase:
        """The tokenizer; with this in its template where the prompts are conversations."""
        return self.write(tokenizer) if is_conversation(next(iter(prompts), None)) else tokenizer


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template: Any = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _literal(value: Any) -> str:
    """A value as Jinja writes it, on ASCII or not: its texts know \\n and \\" as JSON's do."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def is_conversation(value: Any) -> bool:
    """Whether a prompt, a completion or both are a list of messages."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) and "role" in one for one in value)


def _rendered(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **how: Any) -> list[int]:
    """The token ids of a conversation by the tokenizer's template, which may be a stranger's: see RENDER_SECONDS."""
    if tokenizer.chat_template is None:
        raise ZooError("The prompts are conversations and the tokenizer has no chat template: give it one, or texts.")
    if _POWER.search(_template(tokenizer) or ""):
        raise ZooError("The chat template computes powers, which may take for ever: give the tokenizer another one.")
    try:
        with deadline(RENDER_SECONDS, memory=RENDER_MEMORY):
            turns: Any = list(messages)
            ids: Any = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, **how)
            return list(ids)
    except Expired as error:
        raise ZooError(
            f"The chat template does not come to an end within {RENDER_SECONDS:g} s and "
            f"{RENDER_MEMORY // 2**30} GiB on a conversation of {len(messages)} messages: give the tokenizer "
            "another one."
        ) from error
    except Exception as error:  # a template may raise whatever Python raises
        first = (str(error).strip().splitlines() or ["it gives no reason"])[0].rstrip(".")
        roles = ", ".join(str(one.get("role")) for one in messages) or "nobody"
        raise ZooError(
            f"The chat template refuses a conversation of {roles} ({first}): mend the data, or leave out a "
            "system_prompt that the model has no place for."
        ) from error


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text, or of a conversation closed by the template's generation prompt.

    Raises ZooError for what is neither, and for a conversation where the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not is_conversation(prompt):
        raise ZooError(f"The prompt {prompt!r} is neither a text nor a conversation: mend the column 'prompt'.")
    return _rendered(prompt, tokenizer, add_generation_prompt=True)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token by which the template closes an answer; the end of sequence where it has none."""
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    try:
        ids = _rendered(turns, tokenizer)
    except ZooError:  # a template for other conversations than this
        return tokenizer.eos_token_id
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
    content = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    ends = [place + len(content) for place in range(len(ids)) if ids[place : place + len(content)] == content]
    behind = ids[ends[-1] :] if ends else []
    return next((index for index in behind if index in special), tokenizer.eos_token_id)


def reading_ids(text: Any, tokenizer: PreTrainedTokenizerBase, *, ended: bool) -> list[int]:
    """What a reward model reads, under its own tokenizer and template: a text, or a conversation with its answer.

    A model that was trained here reads a conversation as PPO writes it: the rendered prompt, the completion and the end
    of turn. One from elsewhere reads it as its template renders the whole; without a template it reads plain words.
    """
    if not isinstance(text, str) and tokenizer.chat_template is None:
        text = whole_words(text)
    if isinstance(text, str):
        ids, end = list(tokenizer(text, add_special_tokens=True)["input_ids"]), tokenizer.eos_token_id
    elif Chat.of(tokenizer) is None:
        return _rendered(text, tokenizer) if ended else _rendered(text, tokenizer, continue_final_message=True)
    else:
        completion = tokenizer(_content(text[-1]), add_special_tokens=False)["input_ids"]
        ids, end = [*prompt_ids(text[:-1], tokenizer), *completion], end_of_turn(tokenizer)
    if ended and end is not None and (not ids or ids[-1] != end):
        ids.append(end)
    return ids


def answer(prompt: Any, completion: str) -> Any:
    """A completion in the form of its prompt, as TRL gives it to reward functions."""
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]


def whole(prompt: Any, completion: Any) -> Any:
    """Prompt and completion together: a text, or a conversation."""
    if isinstance(prompt, str):
        return prompt + completion
    return [*prompt, *(answer(prompt, completion) if isinstance(completion, str) else completion)]


def words(prompt: Any) -> str:
    """A prompt as judges, probes and people read it, without the marks of any template: its completion comes behind."""
    if isinstance(prompt, str):
        return prompt
    turns = [one for one in prompt if one.get("role") != "system"]
    if len(turns) == 1:
        return _content(turns[0]) + "\n\n"
    return "".join(f"{str(one.get('role')).capitalize()}: {_content(one)}\n\n" for one in turns)


def readable(prompt: Any) -> str:
    """A prompt as it is shown to people: a text as it is, of a conversation what was said, and nothing behind that."""
    return prompt if isinstance(prompt, str) else words(prompt).rstrip("\n")


def whole_words(text: Any) -> str:
    """As `words`, of prompt and completion together."""
    return text if isinstance(text, str) else words(text[:-1]) + _content(text[-1])


def as_prompt(text: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What somebody typed, as the policy was trained to read it: a user's turn if its prompts were conversations."""
    if not isinstance(text, str) or Chat.of(tokenizer) is None:
        return text
    return [{"role": "user", "content": text.strip()}]


def completion_text(completion: Any) -> str:
    """The text of a completion, itself or the last message's."""
    return completion if isinstance(completion, str) else _content(completion[-1]) if completion else ""


def without_thoughts(text: str) -> str:
    """A completion without its <think>…</think>."""
    return _THOUGHT.sub("", text)


def spoken(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decoded completions as rewards and judges read them: without thoughts where the recipe says so."""
    chat = Chat.of(tokenizer)
    return [without_thoughts(text) for text in texts] if chat is not None and chat.strip_thoughts else list(texts)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)
