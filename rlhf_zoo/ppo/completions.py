"""Decodes completions for rewards, and shows them in tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.integrations import TensorBoardCallback  # type: ignore[attr-defined]

from ..errors import printable
from ..modeling.chat import append_completion, completion_text, decode_completions, display_text, wrap_completion
from ..modeling.chat_template import Prompt
from ..modeling.reserved_columns import PROMPT_TOKENS, columns_for_functions
from ..modeling.sampling.sampler import Samples

COMPLETIONS_DIR = "completions"


@dataclass(frozen=True)
class DecodedCompletions:
    """Completions in the form that reward functions get.

    Attributes:
        prompts: B texts or conversations.
        completions: B texts, or lists with a single message.
        texts: B prompts with their completions, as texts or conversations.
        columns: The data set's other columns, B values each.
    """

    prompts: list[Prompt]
    completions: list[Any]
    texts: list[Any]
    columns: dict[str, list[Any]]


def decode_rows(tokenizer: PreTrainedTokenizerBase, samples: Samples, rows: Sequence[Mapping]) -> DecodedCompletions:
    """Decodes samples for reward functions.

    Args:
        tokenizer: The policy's tokenizer.
        samples: B completions.
        rows: One data-set row for each completion, the row of its prompt.
    """
    prompt_ids = [list(row[PROMPT_TOKENS]) for row in rows]
    decoded_prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    prompts = [row.get("prompt", prompt) for row, prompt in zip(rows, decoded_prompts, strict=True)]
    completions = decode_completions(tokenizer, prompts, prompt_ids, samples.completion_id_lists())
    return DecodedCompletions(
        prompts=prompts,
        completions=[wrap_completion(*pair) for pair in zip(prompts, completions, strict=True)],
        texts=[
            append_completion(decoded_prompt if isinstance(prompt, str) else prompt, completion)
            for prompt, decoded_prompt, completion in zip(prompts, decoded_prompts, completions, strict=True)
        ],
        columns={name: [row[name] for row in rows] for name in columns_for_functions(rows[0])},
    )


def show_table(
    table: Mapping[str, Sequence[Any]],
    *,
    title: str,
    step: int,
    directory: Path,
    reporters: Sequence[TrainerCallback],
    report_to: Sequence[str],
) -> None:
    """Prints a table of completions, saves it as `directory`/step-NNNNNN.jsonl, and sends it to the reporters.

    If a step is repeated, its file is replaced.

    Args:
        table: Columns of equal length; `prompt` and `completion` are texts or conversations.
        title: The heading of the table, and its name for the reporters.
        step: The update to which the table belongs.
        directory: The folder, which is created if it is missing.
        reporters: Trainer's callbacks. Only TensorBoard's is used.
        report_to: The reporters' names, as in TrainingArguments.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = list(table)
    converters: dict[str, Callable[[Any], str]] = {"prompt": display_text, "completion": completion_text}
    columns = {name: list(map(converters[name], table[name])) if name in converters else table[name] for name in names}
    rows = [dict(zip(names, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    (directory / f"step-{step:06d}.jsonl").write_text(lines, encoding="utf-8")

    printed_table = Table(title=title, show_lines=True)
    for name in names:
        printed_table.add_column(name, overflow="fold")
    for row in rows:
        # Use Text instead of str, because rich would read brackets in a completion as markup.
        printed_table.add_row(
            *(Text(f"{cell:.3g}" if isinstance(cell, float) else printable(str(cell))) for cell in row.values())
        )
    Console(stderr=True).print(printed_table)
    for reporter in reporters:
        if isinstance(reporter, TensorBoardCallback) and reporter.tb_writer is not None:
            reporter.tb_writer.add_text(title, _markdown(rows), step)
    if "trackio" in report_to:
        import pandas
        import trackio

        trackio.log({title: trackio.Table(dataframe=pandas.DataFrame(rows))}, step=step)
    if "wandb" in report_to:
        import wandb

        if wandb.run is not None:
            cells = [list(map(str, row.values())) for row in rows]
            wandb.log({title: wandb.Table(columns=names, data=cells)}, step=step)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"

    return "\n".join([line(names), line(["---"] * len(names)), *(line(list(row.values())) for row in rows)])
