"""Converts prompts and completions between text, messages and tokens, in the same way for all stages and judges.

`tokenize_*` returns token ids, and `decode_completions` turns them back into text. `wrap_*` gives a text the form of
the prompts. `append_completion` joins prompt and completion. `plain_text` and `display_text` write a conversation
without the template's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from ..errors import ZooError
from .alignment import decode_after, encode_after, special_ids
from .chat_template import (
    ChatSettings,
    Conversation,
    Prompt,
    PromptOptions,
    end_of_turn,
    generation_prompt,
    is_conversation,
    render_ids,
    render_text,
    template_space,
)
from .text_ids import tokenize_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN_THINK, _CLOSE_THINK = "<think>", "</think>"
# A thought that was cut off at the length limit has no closing tag, and no answer follows it.
_THOUGHT = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


def tokenize_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a prompt up to the beginning of its completion.

    Args:
        prompt: A text, or a conversation. A conversation gets the template's generation prompt. If its last turn is the
            assistant's, however, that turn stays open, and the completion continues it.
        tokenizer: The policy's tokenizer.

    Returns:
        Token ids, with one BOS if the tokenizer adds one.

    Raises:
        ZooError: The prompt is neither a text nor a conversation, leaves a thought open (see `check_no_open_thought`),
            or is a conversation that the chat template refuses or for which there is no template.
    """
    if isinstance(prompt, str):
        return tokenize_text(prompt, tokenizer)
    if not is_conversation(prompt):
        raise ZooError(f"The prompt {prompt!r} is neither a text nor a conversation: correct the column 'prompt'.")
    check_no_open_thought(prompt, tokenizer)
    return render_ids(prompt, tokenizer, **_prompt_options(prompt))


def _prompt_options(prompt: Sequence[Mapping[str, Any]]) -> PromptOptions:
    """Returns the options with which `apply_chat_template` renders a prompt so that its completion can follow."""
    return {"continue_final_message": True} if has_answer_prefix(prompt) else {"add_generation_prompt": True}


def has_answer_prefix(prompt: Prompt) -> TypeGuard[Conversation]:
    """Whether a prompt ends with an assistant turn, which its completion continues.

    Args:
        prompt: A text or a conversation.
    """
    return not isinstance(prompt, str) and bool(prompt) and prompt[-1].get("role") == "assistant"


def check_no_open_thought(prompt: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that a prompt leaves no thought open if the recipe removes thoughts from answers.

    Thoughts are removed from the completion alone, before it is joined with its prompt. If the prompt left a thought
    open, the answer would be inside that thought in the joined text. A chat template may open a thought, because its
    generation prompt is not part of the conversation.

    Args:
        prompt: A conversation.
        tokenizer: The policy's tokenizer, with the recipe's strip_thoughts.

    Raises:
        ZooError: The recipe sets strip_thoughts, and the prompt begins its answer with an open thought.
    """
    if _strips_thoughts(tokenizer) and _opens_thought(_answer_prefix(prompt)):
        raise ZooError(
            f"A prompt begins its answer with an open {_OPEN_THINK} ({_answer_prefix(prompt)[:40]!r}), which "
            f"strip_thoughts cannot remove: end that thought with {_CLOSE_THINK}, let the chat template open it, or "
            "set strip_thoughts: false."
        )


def _answer_prefix(prompt: Prompt) -> str:
    """Returns the part of the answer that is in the prompt: the text of a final assistant turn; "" without one."""
    return _message_text(prompt[-1]) if has_answer_prefix(prompt) else ""


def tokenize_for_reward(text_or_turns: Prompt, tokenizer: PreTrainedTokenizerBase, *, ended: bool) -> list[int]:
    """Tokenizes a prompt with its completion, for a reward model.

    A reward model that this package trained reads a conversation as PPO samples it: the rendered prompt, the completion
    and the end of turn. Any other reward model reads the complete conversation as its template renders it, or
    `plain_text` without system turns if it has no template.

    Args:
        text_or_turns: A text, or a conversation with its answer.
        tokenizer: The reward model's tokenizer.
        ended: Whether the completion ended by itself instead of at the length limit.

    Returns:
        Token ids, with the end of turn or EOS last if the completion ended.

    Raises:
        ZooError: The template refuses the conversation.
    """
    if not isinstance(text_or_turns, str) and tokenizer.chat_template is None:
        # Such a model was trained on texts alone, and would read system turns as noise.
        text_or_turns = plain_text([turn for turn in text_or_turns if turn.get("role") != "system"])
    if isinstance(text_or_turns, str):
        ids, end_id = tokenize_text(text_or_turns, tokenizer), tokenizer.eos_token_id
    elif ChatSettings.of(tokenizer) is None:  # this package did not train the reward model
        # An answer that was cut off stays open, because an end of turn would mark it as complete.
        options: PromptOptions = {} if ended else {"continue_final_message": True}
        return render_ids(text_or_turns, tokenizer, **options)
    else:
        prompt, completion = text_or_turns[:-1], _message_text(text_or_turns[-1])
        # The reward model was trained on answers without thoughts.
        completion = remove_thoughts(completion) if _strips_thoughts(tokenizer) else completion
        prompt_ids, completion_ids = _tokenize_pair(prompt, completion, tokenizer)
        ids, end_id = [*prompt_ids, *completion_ids], end_of_turn(tokenizer)
    if ended and end_id is not None and (not ids or ids[-1] != end_id):
        ids.append(end_id)
    return ids


def wrap_completion(prompt: Prompt, completion: str) -> Any:
    """Gives a completion the form of its prompt. TRL passes this form to reward functions.

    Args:
        prompt: A text or a conversation.
        completion: The text of the completion.

    Returns:
        The text if the prompt is a text; a list of one assistant message if it is a conversation.
    """
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]


def wrap_answer(prompt: Prompt, completion: str) -> Any:
    """Gives an answer the form of its prompt. An answer begins with the prompt's open assistant turn, if any.

    Args:
        prompt: A text, or a conversation, whose last turn may begin the answer.
        completion: The text of the completion.

    Returns:
        The text if the prompt is a text. If the prompt is a conversation, a list of one assistant message with the
        answer, including the part in the prompt.
    """
    return wrap_completion(prompt, _answer_prefix(prompt) + completion)


def append_completion(prompt: Prompt, completion: Any) -> Any:
    """Joins a prompt and its completion.

    Args:
        prompt: A text, or a conversation, whose last turn may begin the answer.
        completion: A text, or messages.

    Returns:
        A text for a text prompt, otherwise a conversation. If the prompt begins the answer, the completion continues
        that turn. Messages come from a data set and may repeat the beginning, which is then not added twice. A text
        comes from a policy and is appended unchanged.
    """
    if isinstance(prompt, str):
        return prompt + completion
    turns = wrap_answer(prompt, completion) if isinstance(completion, str) else list(completion)
    if has_answer_prefix(prompt) and turns and turns[0].get("role") == "assistant":
        # Some data sets repeat the beginning in the answer, others do not.
        prefix, content = _answer_prefix(prompt), _message_text(turns[0])
        content = content if content.startswith(prefix) else prefix + content
        return [*prompt[:-1], {**turns[0], "content": content}, *turns[1:]]
    return [*prompt, *turns]


def move_answer_prefix(prompt: Prompt, completion: Any) -> tuple[Any, Any]:
    """Moves the beginning of the answer from the prompt into the completion, because TRL would close that turn.

    Args:
        prompt: A text or a conversation.
        completion: A text, or messages.

    Returns:
        The prompt without its assistant turn, and the complete answer; both unchanged if the prompt begins no answer.
    """
    if not has_answer_prefix(prompt):
        return prompt, completion
    return list(prompt[:-1]), append_completion(prompt, completion)[len(prompt) - 1 :]


def plain_text(text_or_turns: Prompt) -> str:
    """Writes a prompt, or a prompt with its answer, as plain text without the template's tokens.

    People, judges, probes and reward models without a chat template read this text. A single turn has no label;
    several turns are labeled `System:`, `User:` and `Assistant:`.

    Args:
        text_or_turns: A text, or a conversation with or without an answer.

    Returns:
        A text is returned unchanged. A conversation ends with its last assistant turn, or with a blank line if an
        answer follows, so that `plain_text(prompt) + completion` equals
        `plain_text(append_completion(prompt, completion))`.
    """
    if isinstance(text_or_turns, str):
        return text_or_turns
    # The answer continues right after its prefix, so there is no blank line between them.
    if has_answer_prefix(text_or_turns):
        return plain_text(text_or_turns[:-1]) + _answer_prefix(text_or_turns)
    if len(text_or_turns) == 1:
        return _message_text(text_or_turns[0]) + "\n\n"
    return "".join(f"{str(turn.get('role')).capitalize()}: {_message_text(turn)}\n\n" for turn in text_or_turns)


def display_text(prompt: Prompt) -> str:
    """Writes a prompt for readers: `plain_text` without the blank line at the end.

    Args:
        prompt: A text, which is returned unchanged, or a conversation.

    Returns:
        The text that tables, pages, error messages and `samples.jsonl` show.
    """
    return prompt if isinstance(prompt, str) else plain_text(prompt).rstrip("\n")


def wrap_prompt(text: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Gives a prompt that a user typed the form of the prompts that the policy was trained on.

    Args:
        text: A text; anything else is returned unchanged.
        tokenizer: The policy's tokenizer. Its template shows whether the policy was trained on conversations.

    Returns:
        A conversation of one user turn; the text if the policy was not trained on conversations.
    """
    if not isinstance(text, str) or ChatSettings.of(tokenizer) is None:
        return text
    return [{"role": "user", "content": text.strip()}]


def completion_text(completion: Any, prompt: Prompt = "") -> str:
    """Returns the text of a completion.

    Args:
        completion: A text, or messages. Only the last message is read.
        prompt: The completion's prompt. If it begins the answer and the messages repeat that part, the part is removed.

    Returns:
        The text that the completion adds to its prompt.
    """
    if isinstance(completion, str):
        return completion
    return _message_text(completion[-1]).removeprefix(_answer_prefix(prompt)) if completion else ""


def remove_thoughts(text: str, *, starts_inside: bool = False) -> str:
    """Removes a completion's thoughts. The last thought may be incomplete.

    Args:
        text: The completion.
        starts_inside: Whether the prompt ends inside a thought, as it does with the templates of reasoning models. If a
            completion closes a thought that it did not open, this is assumed to be true.

    Returns:
        The text outside <think>…</think>.
    """
    text = _OPEN_THINK + text if starts_inside else text
    while True:
        text = _THOUGHT.sub("", text)
        if _CLOSE_THINK not in text:
            return text
        text = _OPEN_THINK + text  # everything before an unmatched closing tag is a thought


def _opens_thought(text: str) -> bool:
    """Whether a text ends inside a thought."""
    return text.rfind(_OPEN_THINK) > text.rfind(_CLOSE_THINK)


def _strips_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether rewards and judges read completions without thoughts, by the settings saved in the tokenizer."""
    chat = ChatSettings.of(tokenizer)
    return chat is not None and chat.strip_thoughts


def decode_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    prompt_tokens: Sequence[Sequence[int]],
    completion_tokens: Sequence[Sequence[int]],
) -> list[str]:
    """Decodes completions to the text that rewards, judges and people read.

    Args:
        tokenizer: The policy's tokenizer.
        prompts: Texts or conversations.
        prompt_tokens: The prompts' token ids, as the policy read them.
        completion_tokens: The token ids of one completion for each prompt.

    Returns:
        The text that each completion adds to its prompt, without special tokens and without the white space that the
        template puts before an answer. If the recipe sets strip_thoughts, also without thoughts.
    """
    strips_thoughts = _strips_thoughts(tokenizer)
    # Decoding drops special tokens. <think> may be a special token, but it must stay so that thoughts can be found.
    vocabulary = tokenizer.get_vocab() if strips_thoughts else {}
    think_ids = special_ids(tokenizer) & {vocabulary[tag] for tag in (_OPEN_THINK, _CLOSE_THINK) if tag in vocabulary}
    texts = []
    for prompt, prompt_ids, ids in zip(prompts, prompt_tokens, completion_tokens, strict=True):
        text = decode_after(tokenizer, prompt_ids, ids, keep=think_ids)
        text = strip_template_space(text, prompt, tokenizer)
        if strips_thoughts:
            text = remove_thoughts(text, starts_inside=_begins_in_thought(prompt, prompt_ids, tokenizer))
        texts.append(text)
    return texts


def strip_template_space(text: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Removes the white space that the template puts between its generation prompt and an answer.

    Args:
        text: A decoded completion.
        prompt: The completion's prompt. If it is a text or begins the answer, there is no such white space.
        tokenizer: The policy's tokenizer.
    """
    if isinstance(prompt, str) or has_answer_prefix(prompt):
        return text
    return text.removeprefix(template_space(tokenizer))


def _begins_in_thought(prompt: Prompt, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a completion begins inside a thought that the chat template or a text prompt opened."""
    if isinstance(prompt, str):
        return str(tokenizer.decode(list(ids), skip_special_tokens=False)).rstrip().endswith(_OPEN_THINK)
    return not has_answer_prefix(prompt) and _opens_thought(generation_prompt(tokenizer))


def tokenize_completion(prompt: Prompt, completion: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a completion in the context of its prompt.

    Except for removed thoughts, this is the inverse of `decode_completions`.

    Args:
        prompt: A text or a conversation.
        completion: The text of the completion.
        tokenizer: The policy's tokenizer.

    Returns:
        The completion's token ids, without those of the prompt and without an end token.

    Raises:
        ZooError: As for `tokenize_prompt`.
    """
    return _tokenize_pair(prompt, completion, tokenizer)[1]


def _tokenize_pair(prompt: Prompt, completion: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the token ids of a prompt and of the completion after it."""
    prompt_ids = tokenize_prompt(prompt, tokenizer)
    if isinstance(prompt, str):
        ids = tokenize_text(prompt + completion, tokenizer)
    else:
        completion = completion if has_answer_prefix(prompt) else template_space(tokenizer) + completion
        text = render_text(prompt, tokenizer, **_prompt_options(prompt)) + completion
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompt_ids, encode_after(tokenizer, prompt_ids, ids, completion)


def _message_text(message: Mapping[str, Any]) -> str:
    """Returns a message's text. In a list of parts, such as texts and images, only texts count."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)
