"""Checks, before training, that the chat template renders every conversation of a run and keeps its words."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from ...errors import ZooError, as_clause
from ...modeling.chat import append_completion, check_no_open_thought, display_text
from ...modeling.chat_template import is_conversation, render_text
from ...modeling.template_words import check_keeps_words, check_template, is_plain
from ..context import RunContext
from ..data.layout import has_conversations
from ..data.sources import DataSource
from ..dataset import evaluation_split, stage_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Maximum number of characters of a conversation that a message quotes.
MAX_QUOTED = 60


def check_conversations(
    context: RunContext, stage: str, source: DataSource, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Renders every conversation that a stage learns from or is measured on.

    Args:
        context: The run.
        stage: Name of the stage.
        source: The stage's data.
        tokenizer: A tokenizer with the template that the stage's model has, or will have after SFT.

    Raises:
        ZooError: The template refuses a conversation, leaves a thought open, or drops, changes, moves or adds words.
    """
    for split in _split_names(context, stage):
        rows = stage_rows(context, stage, source, split)
        if has_conversations(rows):
            subject = f"the split {split} of {source.location} (stage {stage})"
            check_rows(rows, context.shared.chat.write(tokenizer), subject=subject)


def check_rows(rows: Dataset, tokenizer: "PreTrainedTokenizerBase", *, subject: str) -> None:
    """Renders the conversations of some rows, and checks that the template keeps their words.

    Args:
        rows: Rows of any form that have conversations.
        tokenizer: A tokenizer with the template.
        subject: What to call the rows.

    Raises:
        ZooError: The template refuses a conversation, leaves a thought open, or drops, changes, moves or adds words.
    """
    checked_forms: set[tuple[tuple[str, ...], bool]] = set()
    for index, row in enumerate(rows):
        for turns, has_answer in _conversations(row):
            try:
                rendering = render_text(turns, tokenizer, add_generation_prompt=not has_answer)
                if not has_answer:
                    check_no_open_thought(turns, tokenizer)
            except ZooError as error:
                text = " ".join(display_text(turns).split())
                excerpt = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"
                raise ZooError(
                    f"Row {index} of {subject} cannot be rendered ({excerpt!r}); {as_clause(error)}"
                ) from error
            if not is_plain(turns):  # such as a conversation that calls tools
                continue
            roles = tuple(turn["role"] for turn in turns)
            if (roles, has_answer) not in checked_forms:
                check_template(roles, tokenizer, has_answer=has_answer)
                checked_forms.add((roles, has_answer))
            check_keeps_words(turns, rendering, tokenizer)


def _split_names(context: RunContext, stage: str) -> list[str]:
    data = context.settings(stage).data
    names = [data.dataset_train_split, data.dataset_test_split, getattr(data, "dataset_validation_split", None)]
    if stage == "ppo":
        names += [evaluation_split(context.shared, data, part)[0] for part in ("test", "validation")]
    return list(dict.fromkeys(name for name in names if name is not None))


def _conversations(row: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yields the conversations that are rendered from a row, and whether each ends in an answer."""
    prompt = row.get("prompt")
    if is_conversation(prompt):
        yield prompt, False
    for name in ("messages", "completion", "chosen", "rejected"):
        if not is_conversation(row.get(name)):
            continue
        turns = row[name] if name == "messages" or prompt is None else append_completion(prompt, row[name])
        if name in ("chosen", "rejected"):  # training renders only the prompt, and appends the answer's text
            yield turns[:-1], False
        else:
            yield turns, True
