"""Reads rollouts of any trainer, from files (JSON lines, a JSON array or Parquet) or from rows in memory."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import ZooError
from ..fileio import is_finite, parse_json
from .probes import Completions
from .prompt_groups import check_labels, is_label

log = logging.getLogger(__name__)

#: Column -> its names in TRL, OpenRLHF and verl. The first name that a row has is read.
COLUMNS = {
    "prompt": ("prompt", "input", "query"),
    "completion": ("completion", "output", "response"),
    "reward": ("reward", "score"),
    "judge": ("judge",),
    "logprobs": ("logprobs",),
    "group": ("group",),
}

#: Maximum number of completions in a file. Probing this many takes minutes and a few GiB.
MAX_ROWS = 250_000
#: Largest absolute score. Sums of `MAX_ROWS` such scores, and of their squares, stay finite.
MAX_SCORE = 1e100

#: The keys in a row of samples.jsonl with the policy's and with the reference's completion.
Side = Literal["ppo", "sft"]
#: A file; rows, such as a list of dicts or a `datasets.Dataset`; or completions that have been read.
Rollouts = str | Path | Completions | Iterable[Mapping[str, Any]]


def read_rollouts(
    source: Rollouts, *, reward: str | None = None, name: str = "the rows", side: Side = "ppo"
) -> Completions:
    """Reads completions, with the optional columns that every row has.

    Args:
        source: A UTF-8 file of JSON lines or with a JSON array, or a Parquet file if its name ends in .parquet; rows
            with the same columns; or completions, which are returned as they are. The samples.jsonl of an evaluation
            holds both sides in each row.
        reward: The column of the reward; None for one of the usual names.
        name: Name of rows in memory, for error messages. A file is named by its path.
        side: Which side to read if the rows hold both.

    Raises:
        ZooError: The file cannot be read, or a row is wrong. The message names the file and the row.
    """
    if isinstance(source, Completions):
        return source
    if isinstance(source, str | Path):
        name = str(source)
    column_names = COLUMNS if reward is None else {**COLUMNS, "reward": (reward,)}
    rows: dict[str, dict[str, Any]] = {}
    unread_columns: set[str] = set()  # other columns with a number
    for where, document in iterate_rows(source, name):
        if len(rows) == MAX_ROWS:
            raise ZooError(f"{name} holds over {MAX_ROWS:,} completions: give a random sample of them.")
        row = _flatten_sample(document, side)
        rows[where] = _parse_row(row, column_names, where)
        if row is document:  # no other column of samples.jsonl could be a reward or a judge
            number_columns = {key for key, value in row.items() if is_finite(value)}
            unread_columns |= number_columns.difference(*column_names.values())
    if not rows:
        raise ZooError(f"{name} holds no completions: write one JSON object per line, with prompt and completion.")
    columns: dict[str, list[Any] | None] = {}
    for column in column_names:
        # A column in some rows only is an error: those rows would be compared with all rows of the other side.
        rows_without = [where for where, row in rows.items() if column not in row]
        if rows_without and len(rows_without) < len(rows):
            location = rows_without[0].removeprefix(f"{name}, ")
            raise ZooError(
                f"{name} has {column} in {len(rows) - len(rows_without)} of {len(rows)} rows, but not in {location}: "
                "give it in every row or in none."
            )
        columns[column] = None if rows_without else [row[column] for row in rows.values()]
    unread_names = ", ".join(map(repr, sorted(unread_columns)))
    if columns["reward"] is None and reward is not None:
        hint = f" Its other columns of numbers are {unread_names}." if unread_columns else ""
        raise ZooError(f"{name} has no column {reward!r}: name the column of the reward.{hint}")
    if unread_columns:
        missing = " and no ".join(column for column in ("reward", "judge") if columns[column] is None)
        advice = {"reward": " Name the reward's with --reward.", "judge": " Rename the judge's to judge."}
        log.warning(
            "%s has %sunread columns of numbers: %s.%s",
            name, f"no {missing}, and " if missing else "", unread_names,
            "".join(text for column, text in advice.items() if columns[column] is None),
        )  # fmt: skip
    conversations = [row.get("conversation", row["prompt"]) for row in rows.values()]
    has_conversations = any("conversation" in row for row in rows.values())
    prompts, groups = columns["prompt"] or [], columns["group"]
    if groups is not None:
        check_labels(prompts, groups, f"{name}: the column group")
    return Completions(
        prompts, columns["completion"] or [], rewards=columns["reward"], judge_scores=columns["judge"], groups=groups,
        logprobs=columns["logprobs"], conversations=conversations if has_conversations else None,
    )  # fmt: skip


def _flatten_sample(document: Mapping[str, Any], side: Side) -> Mapping[str, Any]:
    """Returns a row of samples.jsonl in the form of other rows, with one side's completion and scores."""
    values = document.get(side)
    if "completion" in document or not isinstance(values, Mapping):
        return document
    return {**values, "prompt": document.get("messages", document.get("prompt"))}


def iterate_rows(source: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the rows of a file or of rows in memory.

    Args:
        source: As for `read_rollouts`, but without `Completions`.
        name: As for `read_rollouts`.

    Yields:
        The location of the row for error messages, such as "rollouts.jsonl, line 2", and the row.

    Raises:
        ZooError: The file cannot be read, or a row is not an object.
    """
    if isinstance(source, str | Path):
        name, rows = str(source), _iterate_file(Path(source))
    elif isinstance(source, Iterable) and not isinstance(source, Completions):
        rows = _number_rows(source, name)
    else:
        raise ZooError(f"{name} must be a file, rows with prompt and completion, or Completions, not {source!r:.80}.")
    for where, row in rows:
        yield f"{name}, {where}", row


def read_completion_log(path: Path) -> list[tuple[Any, Any]]:
    """Reads the prompts and completions (texts or conversations) that a trainer logged. Other columns are ignored.

    Args:
        path: A Parquet file.

    Returns:
        (prompt, completion) of each row.

    Raises:
        ZooError: The file is not Parquet, or a row has no prompt or no completion.
    """
    rows = []
    for where, row in _iterate_parquet(path):
        if row.get("prompt") is None or row.get("completion") is None:
            raise ZooError(f"{path}, {where} has no prompt or no completion: log both.")
        rows.append((row["prompt"], row["completion"]))
    return rows


def _iterate_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the location of each row of a file, such as "line 2", and the row."""
    try:
        if path.suffix == ".parquet" and path.is_file():
            yield from _iterate_parquet(path)
            return
        # A file that was written on Windows may begin with a byte-order mark.
        with path.open(encoding="utf-8-sig") as lines:
            is_array = lines.read(1) == "["
            lines.seek(0)
            if not is_array:
                # Line numbers count blank lines too, as editors show them.
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        where = f"line {number}"
                        yield where, _check_object(_parse_document(line, f"{path}, {where}"), str(path), where)
                return
            yield from _number_rows(_parse_document(lines.read(), str(path)), str(path))
    except UnicodeDecodeError as error:
        raise ZooError(f"{path} is not UTF-8 ({error.reason}): write one JSON object per line.") from error
    except OSError as error:
        raise ZooError(
            f"{path} cannot be read ({error.strerror}): give a file of JSON lines, a JSON array or Parquet."
        ) from error


def _number_rows(rows: Iterable[Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(rows, 1):
        yield f"row {number}", _check_object(row, name, f"row {number}")


def _iterate_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for document in batch.to_pylist():
                    number += 1
                    yield f"row {number}", document
    except pa.ArrowInvalid as error:
        raise ZooError(f"{path} is not Parquet ({str(error)[:80]}): write it again, or give JSON lines.") from error


def _parse_document(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        reason = f"{error.msg}, character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ZooError(f"{where} is not JSON ({reason[:80]}): write one object per line, or one array.") from error


def _check_object(document: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise ZooError(f"{name}, {where} is not an object: write one with prompt and completion.")
    return document


def _parse_row(document: Mapping[str, Any], column_names: Mapping[str, Sequence[str]], where: str) -> dict[str, Any]:
    row: dict[str, object] = {}
    for column, keys in column_names.items():
        # null counts as missing.
        value = next((document[key] for key in keys if document.get(key) is not None), None)
        if value is not None:
            row[column] = _parse_value(column, value, where)
            if column == "prompt" and (messages := _prompt_messages(value)):
                row["conversation"] = messages
        elif column in ("prompt", "completion"):
            raise ZooError(f"{where} has no {column}: give it as {' or '.join(map(repr, keys))}.")
    return row


def _parse_value(column: str, value: Any, where: str) -> Any:
    if column in ("prompt", "completion"):
        text = message_text(value)
        if text is None:
            raise ZooError(f"{where}: {column} must be a text or a list of messages with role and content.")
        return text
    if column == "group":
        if is_label(value):
            return value
        raise ZooError(f"{where}: group must be text or a whole number, equal for prompts that ask the same question.")
    if column == "logprobs":
        # A log-probability above 0 would be a probability above 1.
        if isinstance(value, list) and all(is_finite(logprob) and logprob <= 0 for logprob in value):
            return value
        raise ZooError(f"{where}: logprobs must be a list of log-probabilities under the SFT model, none above 0.")
    return check_number(column, value, where)


def check_number(name: str, value: Any, where: str) -> float:
    """Returns a score as a float.

    Args:
        name: The column of the score.
        value: The value in the row.
        where: The location of the row, for error messages.

    Raises:
        ZooError: The value is not a finite number, or is above `MAX_SCORE` in size.
    """
    if isinstance(value, str) and _reads_as_number(value):
        raise ZooError(f"{where}: {name} is text, not a number: write {value.strip()} without quotes.")
    if not is_finite(value) or abs(value) > MAX_SCORE:
        raise ZooError(f"{where}: {name} must be a finite number, at most {MAX_SCORE:g} in size.")
    return float(value)


def _reads_as_number(text: str) -> bool:
    try:
        return is_finite(json.loads(text))
    except ValueError:
        return False


def message_text(value: object) -> str | None:
    """Reads a text, or joins the contents of a conversation's messages.

    The content of a message may be a text or a list of parts, whose texts are joined. For a message that only calls
    tools, the calls are written as JSON.

    Args:
        value: A value from a file or a trainer.

    Returns:
        The text; None if the value is neither a text nor such a conversation.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(message, Mapping) for message in value):
        contents = [_message_content(message) for message in value]
        return None if None in contents else "\n".join(text for text in contents if text is not None)
    return None


def _prompt_messages(value: object) -> list[dict[str, str]] | None:
    """Returns a prompt's messages in the form for chat templates; None if it is a text, or a message has no role."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    roles = [message.get("role") for message in value]
    contents = [_message_content(message) or "" for message in value]
    if not all(isinstance(role, str) for role in roles):
        return None
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]


def _message_content(message: Mapping[str, Any]) -> str | None:
    """Returns the text of a message, or its tool calls as JSON; None if it has neither."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        texts = [part["text"] for part in content if part.get("text") is not None]
        return "\n".join(texts) if texts and all(isinstance(text, str) for text in texts) else None
    if content is None and isinstance(calls, Sequence) and calls:
        functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls]
        return json.dumps(functions, ensure_ascii=False)
    return None
