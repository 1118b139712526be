"""Conversations: one rendering of prompts and completions for every stage, judge and page.

What a recipe says of conversations is written at the head of the tokenizer's chat template when a stage trains on them.
So it is saved and published with the model, and whoever applies the template, here or elsewhere, renders alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import ZooError
from .alignment import decode_behind, encode_behind, special_ids
from .text_ids import tokenize_text
from .time_limit import Expired, deadline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEAD = re.compile(r"\{#- rlhf-zoo (\{.*?\}) #\}.*?\{#- end #\}", re.DOTALL)
_THINK, _THOUGHT_ENDS = "<think>", "</think>"
# A thought that was cut by the length has no end, and nothing was said after it.
_THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
_PROBE = "zxq"
_PROBES = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
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
        tokenize_prompt([{"role": "user", "content": _PROBE}], tokenizer)
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


def check_renders(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, answered: bool) -> None:
    """Raises ZooError where the template refuses a conversation; answered: whether its last turn is an answer."""
    _written(messages, tokenizer, add_generation_prompt=not answered)


def prompt_key(prompt: Any) -> str:
    """What tells prompts apart: equal for a text and a user's only turn of that text, with or without space around."""
    if isinstance(prompt, str):
        return prompt.strip()
    turns = [(turn["role"], turn["content"]) for turn in prompt] if is_conversation(prompt) else prompt
    if isinstance(turns, list) and len(turns) == 1 and turns[0][0] == "user" and isinstance(turns[0][1], str):
        return turns[0][1].strip()
    return json.dumps(turns, sort_keys=True, default=str)


def distinct_prompts(prompts: Iterable[Any]) -> int:
    """How many different prompts there are among these rows."""
    return len(set(map(prompt_key, prompts)))


def prompt_count(distinct: int, rows: int) -> str:
    """A number of prompts for people: the different ones, with the rows beside them where these are more."""
    return f"{distinct:,}" if distinct == rows else f"{distinct:,} (in {rows:,} rows)"


def counted_prompts(rows: Any) -> str:
    """`prompt_count` of a data set with the column `prompt`."""
    return prompt_count(distinct_prompts(rows["prompt"]), len(rows))


def _rendered(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **how: Any) -> list[int]:
    """The token ids of a conversation by the tokenizer's template."""
    return list(_applied(messages, tokenizer, tokenize=True, return_dict=False, **how))


def _written(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **how: Any) -> str:
    """As `_rendered`, the text."""
    return str(_applied(messages, tokenizer, tokenize=False, **how))


def _applied(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, **how: Any) -> Any:
    """What a tokenizer's template makes of a conversation; it may be a stranger's: see RENDER_SECONDS."""
    if tokenizer.chat_template is None:
        raise ZooError("The prompts are conversations and the tokenizer has no chat template: give it one, or texts.")
    if _POWER.search(_template(tokenizer) or ""):
        raise ZooError("The chat template computes powers, which may take for ever: give the tokenizer another one.")
    try:
        with deadline(RENDER_SECONDS, memory=RENDER_MEMORY):
            turns: Any = list(messages)
            return tokenizer.apply_chat_template(turns, **how)
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


def tokenize_conversation(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a whole conversation, as the tokenizer's template writes it."""
    return _rendered(messages, tokenizer)


def tokenize_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text, or of a conversation closed by the template's generation prompt.

    Raises ZooError for what is neither, and for a conversation where the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return tokenize_text(prompt, tokenizer)
    if not is_conversation(prompt):
        raise ZooError(f"The prompt {prompt!r} is neither a text nor a conversation: mend the column 'prompt'.")
    return _rendered(prompt, tokenizer, **_opened(prompt))


def _opened(prompt: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """How a template writes a prompt: up to where an answer begins, or goes on."""
    return {"continue_final_message" if has_answer_prefix(prompt) else "add_generation_prompt": True}


def has_answer_prefix(prompt: Any) -> bool:
    """Whether the last turn of a prompt is the assistant's, so that a completion goes on with it."""
    return not isinstance(prompt, str) and bool(prompt) and prompt[-1].get("role") == "assistant"


def answer_prefix(prompt: Any) -> str:
    """What a conversation already says of its answer, "" where it says nothing."""
    return _content(prompt[-1]) if has_answer_prefix(prompt) else ""


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token by which the template closes an answer; the end of sequence where it has none."""
    try:
        text = _written(_PROBES, tokenizer)
    except ZooError:  # a template for other conversations than this
        return tokenizer.eos_token_id
    found = _first_special(text.rpartition(_PROBE)[2], tokenizer)
    return tokenizer.eos_token_id if found is None else found


def _first_special(text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    special = special_ids(tokenizer) - {tokenizer.unk_token_id}  # which any text may be
    return next((index for index in tokenizer(text, add_special_tokens=False)["input_ids"] if index in special), None)


def check_answers_end(tokenizer: PreTrainedTokenizerBase, *, assistant_only: bool) -> None:
    """Looks whether a conversation teaches where an answer ends.

    Args:
        tokenizer: With the chat template that SFT learns from.
        assistant_only: Whether only what stands in the template's {% generation %} blocks is learned.

    Raises:
        ZooError: No special token follows an answer, or it is not learned.
    """
    try:
        text = _written(_PROBES, tokenizer)
    except ZooError:  # a template for other conversations than this
        return
    _, answered, behind = text.rpartition(_PROBE)
    if not answered:
        return
    if _first_special(behind, tokenizer) is None:
        raise ZooError(
            "The chat template closes no answer: no special token stands behind it, so that SFT would teach no end. "
            "Give one that does by chat_template_path, such as this one with {{ eos_token }} behind each answer; "
            "or, for answers that end at a text, say stop_token or truncate_text in ppo.yaml."
        )
    if not assistant_only:
        return
    read = _applied(_PROBES, tokenizer, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, learned = read["input_ids"], read["assistant_masks"]
    first = len(ids) - len(tokenizer(behind, add_special_tokens=False)["input_ids"])
    special = special_ids(tokenizer)
    end = next((place for place in range(first, len(ids)) if ids[place] in special), None)
    if 1 in learned and end is not None and not learned[end]:
        raise ZooError(
            f"assistant_only_loss learns what stands in the chat template's {{% generation %}} blocks, and "
            f"{tokenizer.convert_ids_to_tokens(ids[end])}, which ends an answer, does not: put it into them."
        )


def tokenize_for_reward(text: Any, tokenizer: PreTrainedTokenizerBase, *, ended: bool) -> list[int]:
    """What a reward model reads, under its own tokenizer and template: a text, or a conversation with its answer.

    A model that was trained here reads a conversation as PPO writes it: the rendered prompt, the completion and the end
    of turn. One from elsewhere reads it as its template renders the whole; without a template it reads plain words.
    """
    if not isinstance(text, str) and tokenizer.chat_template is None:
        text = plain_text(text)
    if isinstance(text, str):
        ids, end = tokenize_text(text, tokenizer), tokenizer.eos_token_id
    elif Chat.of(tokenizer) is None:
        return _rendered(text, tokenizer) if ended else _rendered(text, tokenizer, continue_final_message=True)
    else:
        prompt, said = text[:-1], _content(text[-1])
        said = without_thoughts(said) if strips_thoughts(tokenizer) else said
        before, behind = _both_ids(prompt, said, tokenizer)
        ids, end = [*before, *behind], end_of_turn(tokenizer)
    if ended and end is not None and (not ids or ids[-1] != end):
        ids.append(end)
    return ids


def wrap_completion(prompt: Any, completion: str) -> Any:
    """A completion in the form of its prompt, as TRL gives it to reward functions."""
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]


def append_completion(prompt: Any, completion: Any) -> Any:
    """Prompt and completion together: a text, or a conversation, in which an answer that the prompt begins goes on."""
    if isinstance(prompt, str):
        return prompt + completion
    turns = list(wrap_completion(prompt, completion) if isinstance(completion, str) else completion)
    if has_answer_prefix(prompt) and turns and turns[0].get("role") == "assistant":
        begun, said = answer_prefix(prompt), _content(turns[0])
        said = said if begun and said.startswith(begun) else begun + said
        return [*prompt[:-1], {**turns[0], "content": said}, *turns[1:]]
    return [*prompt, *turns]


def move_answer_prefix(prompt: Any, completion: Any) -> tuple[Any, Any]:
    """Prompt and completion with the answer that a prompt begins as part of the completion: trl would close it."""
    if not has_answer_prefix(prompt):
        return prompt, completion
    return list(prompt[:-1]), append_completion(prompt, completion)[len(prompt) - 1 :]


def plain_text(text: Any) -> str:
    """Writes a prompt, or a prompt with its answer, as plain text without any template's tokens.

    Judges and probes read this, and so does a reward model without a chat template. System turns are left out. A single
    user turn stands without its role; several turns are labeled `User:` and `Assistant:`.

    Args:
        text: A text, or a conversation with or without an answer.

    Returns:
        A text unchanged. A conversation ends with its last assistant turn, or with a blank line where an answer
        follows, so that `plain_text(prompt) + completion` reads as `plain_text(append_completion(prompt, completion))`.
    """
    if isinstance(text, str):
        return text
    if has_answer_prefix(text):
        return plain_text(text[:-1]) + answer_prefix(text)
    turns = [turn for turn in text if turn.get("role") != "system"]
    if len(turns) == 1:
        return _content(turns[0]) + "\n\n"
    return "".join(f"{str(turn.get('role')).capitalize()}: {_content(turn)}\n\n" for turn in turns)


def display_text(prompt: Any) -> str:
    """Writes a prompt for people: `plain_text` without the blank line at the end.

    Args:
        prompt: A text, which is returned unchanged, or a conversation.

    Returns:
        What tables, pages, error messages and `samples.jsonl` show.
    """
    return prompt if isinstance(prompt, str) else plain_text(prompt).rstrip("\n")


def wrap_prompt(text: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What somebody typed, as the policy was trained to read it: a user's turn if its prompts were conversations."""
    if not isinstance(text, str) or Chat.of(tokenizer) is None:
        return text
    return [{"role": "user", "content": text.strip()}]


def completion_text(completion: Any, prompt: Any = "") -> str:
    """Reads the text of a completion.

    Args:
        completion: A text, or messages, of which the last one counts.
        prompt: What it completes. Where the prompt already begins the answer, that part is left out.

    Returns:
        The text that the completion adds to its prompt.
    """
    text = completion if isinstance(completion, str) else _content(completion[-1]) if completion else ""
    return text.removeprefix(answer_prefix(prompt))


def without_thoughts(text: str, *, begun: bool = False) -> str:
    """A completion without its thoughts, the last of which may have been cut.

    Args:
        text: The completion.
        begun: Whether its prompt ends within a thought, as templates of reasoning models let it. One that closes a
            thought which it did not open has such a prompt, too.

    Returns:
        What stands outside of <think>…</think>.
    """
    ends, opens = text.find(_THOUGHT_ENDS), text.find(_THINK)
    if begun or (ends >= 0 and not 0 <= opens < ends):
        text = _THINK + text
    return _THOUGHT.sub("", text)


def strips_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the recipe says that rewards and judges read completions without thoughts."""
    chat = Chat.of(tokenizer)
    return chat is not None and chat.strip_thoughts


def decode_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    prompt_tokens: Sequence[Sequence[int]],
    completion_tokens: Sequence[Sequence[int]],
) -> list[str]:
    """Completions as rewards, judges and people read them.

    Args:
        tokenizer: The policy's.
        prompts: Texts or conversations.
        prompt_tokens: Their token ids, as the policy read them.
        completion_tokens: The token ids of a completion of each.

    Returns:
        The text that each completion adds to its prompt: without special tokens, without the white space by which a
        template parts an answer from the turn before it, and without thoughts where the recipe says so.
    """
    strips = strips_thoughts(tokenizer)
    # Special tokens are left out of a text, and these mark what is to go.
    tags = special_ids(tokenizer) & _ids_of((_THINK, _THOUGHT_ENDS), tokenizer) if strips else frozenset[int]()
    texts = []
    for prompt, before, ids in zip(prompts, prompt_tokens, completion_tokens, strict=True):
        text = decode_behind(tokenizer, before, ids, keep=tags)
        text = strip_template_space(text, prompt, tokenizer)
        if strips:
            text = without_thoughts(text, begun=_thinks(prompt, before, tokenizer))
        texts.append(text)
    return texts


def strip_template_space(text: str, prompt: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """A decoded completion without the white space that the template puts before an answer to a conversation."""
    return text if isinstance(prompt, str) or has_answer_prefix(prompt) else text.removeprefix(_lead(tokenizer))


def _thinks(prompt: Any, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt ends within a thought: by its template's last words, or by the turn that it has begun."""
    if str(tokenizer.decode(list(ids), skip_special_tokens=False)).rstrip().endswith(_THINK):
        return True
    begun = "" if isinstance(prompt, str) else answer_prefix(prompt)
    return begun.rfind(_THINK) > begun.rfind(_THOUGHT_ENDS)


def _ids_of(tokens: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[token] for token in tokens if token in vocabulary)


def tokenize_completion(prompt: Any, completion: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a completion's text as it stands behind its prompt, a text or a conversation; the inverse of
    `decode_completions`."""
    return _both_ids(prompt, completion, tokenizer)[1]


def _both_ids(prompt: Any, completion: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, and of a completion's text behind it."""
    before = tokenize_prompt(prompt, tokenizer)
    if isinstance(prompt, str):
        return before, encode_behind(tokenizer, before, tokenize_prompt(prompt + completion, tokenizer), completion)
    completion = completion if has_answer_prefix(prompt) else _lead(tokenizer) + completion
    whole = _written(prompt, tokenizer, **_opened(prompt)) + completion
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return before, encode_behind(tokenizer, before, ids, completion)


_LEADS: WeakKeyDictionary[Any, tuple[Any, str]] = WeakKeyDictionary()


def _lead(tokenizer: PreTrainedTokenizerBase) -> str:
    """The white space that the template has between its generation prompt and an answer; "" where it has none."""
    template = tokenizer.chat_template
    known = _LEADS.get(tokenizer)
    if known is None or known[0] != template:
        turns = [{"role": "user", "content": _PROBE}]
        lead = ""
        with suppress(ZooError):  # a template for other conversations than this
            before = _written(turns, tokenizer, add_generation_prompt=True)
            whole = _written([*turns, {"role": "assistant", "content": _PROBE}], tokenizer)
            between = whole[len(before) :].partition(_PROBE)[0] if whole.startswith(before) else ""
            lead = between if between.isspace() else ""
        known = _LEADS[tokenizer] = template, lead
    return known[1]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)
