"""The commands that a card prints, ready to run."""

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from ...runs.registry import STAGES
from .facts import CheckpointRow, StageFacts

_CLASSES = {"text-generation": "AutoModelForCausalLM", "text-classification": "AutoModelForSequenceClassification"}
OUTPUT = ("--output_dir", "--output-dir")


def sent(facts: StageFacts) -> CheckpointRow | None:
    """Returns the published checkpoint that the card describes, or the one that is sent together with this card.

    Args:
        facts: The facts of the stage.

    Returns:
        The checkpoint; None if it is not published.
    """
    if facts.repo_id is None:
        return None
    return next(
        (
            row
            for row in facts.checkpoints
            if row.step == facts.described_step and (row.commit or facts.step_in_this_commit)
        ),
        None,
    )


def pull(facts: StageFacts, revision: str) -> str:
    """Returns the command that downloads a revision of the model.

    Args:
        facts: The facts of the stage.
        revision: A branch, tag or commit.

    Returns:
        The command.
    """
    return f"rlhf-zoo pull {facts.repo_id}@{revision} {_hub(facts)}"


def about(facts: StageFacts, command: str) -> str | None:
    """Returns a command about the published checkpoint.

    Args:
        facts: The facts of the stage.
        command: Its name, such as lineage or reproduce.

    Returns:
        The command; None if no checkpoint is published.
    """
    row = sent(facts)
    return f"rlhf-zoo {command} {facts.repo_id}@{row.tag} {_hub(facts)}" if row else None


def of_the_run(facts: StageFacts) -> str:
    """Returns the command that made the run, without local folders and access tokens.

    Args:
        facts: The facts of the stage.

    Returns:
        The command.
    """
    command = public(facts.run.get("command"))
    if not command:
        seed = facts.run.get("seed")
        command = f"rlhf-zoo {facts.stage} {shlex.quote(facts.recipe)}" + (
            f" --seed {seed}" if seed is not None else ""
        )
    return command


def public(command: Any) -> str:
    """Returns a command without local folders and access tokens.

    Args:
        command: A text, or a list of words; may be empty.

    Returns:
        The command.
    """
    if not command:
        return ""
    words = shlex.split(command) if isinstance(command, str) else map(str, command)
    return re.sub(r"hf_\w{8,}", "hf_***", shlex.join(_public(words)))


def _public(words: Iterable[str]) -> list[str]:
    """Returns words without --output_dir, and with absolute paths reduced to their names."""
    public: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word in OUTPUT:
            next(remaining, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in OUTPUT)):
            flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            public.append(flag + equals + (PurePath(value).name if PurePath(value).is_absolute() else value))
    return public


def fetch(facts: StageFacts) -> str | None:
    """Returns the commands to run before `snippet`: downloads from the embedded Hub into folders.

    Args:
        facts: The facts of the stage.

    Returns:
        The commands; None if none is needed.
    """
    row = sent(facts)
    if row is None or facts.hub_label != "local" or snippet(facts) is None:
        return None
    lines = [f"{pull(facts, _revision(facts, row))} --output_dir {facts.title}"]
    if facts.is_adapter and facts.parent_model:
        name = "@".join(filter(None, (facts.parent_model["repo"], facts.parent_model["commit"])))
        folder = facts.parent_model["repo"].rpartition("/")[2]
        lines.insert(0, f"rlhf-zoo pull {shlex.quote(name)} {_hub(facts)} --output_dir {folder}")
    return "\n".join(lines)


def snippet(facts: StageFacts) -> str | None:
    """Returns Python code that loads the model without this package.

    Args:
        facts: The facts of the stage.

    Returns:
        The code; None if the model, or the base of its adapter, is not published.
    """
    row = sent(facts)
    if row is None or (facts.is_adapter and facts.parent_model is None):
        return None
    model = _CLASSES[STAGES[facts.stage].task]
    source = _source(facts, str(facts.repo_id), _revision(facts, row))
    trust_argument = ", trust_remote_code=True" if facts.remote_code else ""  # the reader decides to run it
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({source}{trust_argument})"
    if not facts.is_adapter:
        lines = [f"model = {model}.from_pretrained({source}{trust_argument})", tokenizer]
        names = [model, "AutoTokenizer"]
        if facts.has_critic and not facts.merged and not trust_argument:
            names.insert(1, "AutoModelForTokenClassification")
            lines.append(f'critic = AutoModelForTokenClassification.from_pretrained({source}, subfolder="critic")')
        return f"from transformers import {', '.join(names)}\n\n" + "\n".join(lines)
    assert facts.parent_model is not None
    base = _source(facts, facts.parent_model["repo"], facts.parent_model["commit"])
    base += ", num_labels=1" if facts.stage == "reward" else ""
    return (
        f"from peft import PeftModel\nfrom transformers import {model}, AutoTokenizer\n\n"
        f"base = {model}.from_pretrained({base}{trust_argument})\n"
        f"model = PeftModel.from_pretrained(base, {source})\n{tokenizer}"
    )


def merged(facts: StageFacts) -> tuple[str | None, str] | None:
    """Returns how to load an adapter's branch `merged` with transformers alone.

    Args:
        facts: The facts of the stage.

    Returns:
        (the download command or None, Python code); None if there is no such branch.
    """
    if not (facts.is_adapter and facts.describes_finished_run and facts.repo_id and facts.setting("push_merged")):
        return None
    model, folder = _CLASSES[STAGES[facts.stage].task], f"{facts.title}-merged"
    local = facts.hub_label == "local"
    source = json.dumps(f"./{folder}") if local else f'{json.dumps(facts.repo_id)}, revision="merged"'
    source += ", trust_remote_code=True" if facts.remote_code else ""
    return (
        f"{pull(facts, 'merged')} --output_dir {folder}" if local else None,
        f"from transformers import {model}, AutoTokenizer\n\n"
        f"model = {model}.from_pretrained({source})\ntokenizer = AutoTokenizer.from_pretrained({source})",
    )


def _revision(facts: StageFacts, checkpoint: CheckpointRow) -> str:
    return "merged" if facts.merged else checkpoint.tag


def _source(facts: StageFacts, repo: str, revision: str | None) -> str:
    """Returns arguments of from_pretrained: a folder that `fetch` fills, else the repository at its revision."""
    if facts.hub_label == "local":
        return json.dumps(f"./{repo.rpartition('/')[2]}")
    return json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else "")


def _hub(facts: StageFacts) -> str:
    return f"--hub {shlex.quote(facts.hub_label)}"
