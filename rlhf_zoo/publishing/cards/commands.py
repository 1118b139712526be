"""Writes the commands and the Python code that a card shows, ready to run."""

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from ...runs.registry import STAGES
from .facts import CheckpointRow, StageFacts
from .markdown import Raw, code

_AUTO_CLASSES = {"text-generation": "AutoModelForCausalLM", "text-classification": "AutoModelForSequenceClassification"}
_OUTPUT_FLAGS = ("--output_dir", "--output-dir")
_MAX_PROMPT = 100  # maximum characters of a prompt in a snippet


def published_checkpoint(facts: StageFacts) -> CheckpointRow | None:
    """Returns the checkpoint that the card describes; None if it is neither published nor sent together with this card.

    Args:
        facts: The facts of the stage.
    """
    row = facts.described_checkpoint
    return row if facts.repo_id and row and (row.commit or facts.step_in_this_commit is not None) else None


def pull_command(facts: StageFacts, revision: str) -> str:
    """Returns the command that downloads a revision of the model.

    Args:
        facts: The facts of the stage.
        revision: A branch, tag or commit.
    """
    return f"rlhf-zoo pull {facts.repo_id}@{revision} {_hub_option(facts)}"


def download_command(facts: StageFacts) -> str | None:
    """Returns the command that downloads the described checkpoint; None without a `published_checkpoint`.

    Args:
        facts: The facts of the stage.
    """
    row = published_checkpoint(facts)
    return None if row is None else download_revision_command(facts, _revision(facts, row))


def download_revision_command(facts: StageFacts, revision: str) -> str:
    """Returns the command that downloads a revision of the model; from the embedded Hub, into a folder.

    Args:
        facts: The facts of the stage.
        revision: A branch, tag or commit.
    """
    folder = f" --output_dir {facts.title}" if facts.hub_label == "local" else ""
    return f"{pull_command(facts, revision)}{folder}"


def checkpoint_command(facts: StageFacts, command: str) -> str | None:
    """Returns a command line whose argument is the described checkpoint; None without a `published_checkpoint`.

    Args:
        facts: The facts of the stage.
        command: Name of the command, such as lineage or reproduce.
    """
    row = published_checkpoint(facts)
    return f"rlhf-zoo {command} {facts.repo_id}@{row.tag} {_hub_option(facts)}" if row else None


def training_command(facts: StageFacts) -> str:
    """Returns the `public_command` that started the run, or an equivalent one if none was recorded.

    Args:
        facts: The facts of the stage.
    """
    seed = f" --seed {facts.run['seed']}" if facts.run.get("seed") is not None else ""
    return public_command(facts.run.get("command")) or f"rlhf-zoo {facts.stage} {shlex.quote(facts.recipe)}{seed}"


def public_command(command: Any) -> str:
    """Returns a command without --output_dir and --overwrite_repo, and with access tokens masked.

    Absolute paths are reduced to the names of their files or folders.

    Args:
        command: The command line, or the list of its words; None if none was recorded.

    Returns:
        The command line; "" if none was recorded.
    """
    if not command:
        return ""
    words = shlex.split(command) if isinstance(command, str) else map(str, command)
    return re.sub(r"hf_\w{8,}", "hf_***", shlex.join(_public_words(words)))


def _public_words(words: Iterable[str]) -> list[str]:
    public_words: list[str] = []
    iterator = iter(words)
    for word in iterator:
        if word in _OUTPUT_FLAGS:
            next(iterator, None)
        elif word != "--overwrite_repo" and not word.startswith(tuple(f"{flag}=" for flag in _OUTPUT_FLAGS)):
            flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            public_words.append(flag + equals + (PurePath(value).name if PurePath(value).is_absolute() else value))
    return public_words


def main_branch_location(facts: StageFacts) -> Raw:
    """Returns a link to the branch `main`; for the embedded Hub, the command that downloads it.

    Args:
        facts: The facts of a published stage.
    """
    if facts.hub_label == "local":
        return code(pull_command(facts, "main"))
    return Raw(f"[{facts.repo_id}]({facts.hub_label.rstrip('/')}/{facts.repo_id})")


def install_commands(facts: StageFacts) -> str | None:
    """Returns the commands to run before `snippet`, downloads from the embedded Hub or pip; None without a snippet.

    Args:
        facts: The facts of the stage.
    """
    fetch = download_command(facts)
    if fetch is None or snippet(facts) is None:
        return None
    if facts.hub_label != "local":
        return f"pip install torch transformers{' peft' if facts.is_adapter else ''}"
    lines = [fetch]
    if facts.is_adapter and facts.parent_model:
        name = "@".join(filter(None, (facts.parent_model["repo"], facts.parent_model["commit"])))
        folder = facts.parent_model["repo"].rpartition("/")[2]
        lines.insert(0, f"rlhf-zoo pull {shlex.quote(name)} {_hub_option(facts)} --output_dir {folder}")
    return "\n".join(lines)


def snippet(facts: StageFacts) -> str | None:
    """Returns Python code that generates or scores with the model, and needs only transformers and peft.

    Args:
        facts: The facts of the stage.

    Returns:
        The code; None if the model, or the base of its adapter, is not published.
    """
    row = published_checkpoint(facts)
    if row is None or (facts.is_adapter and facts.parent_model is None):
        return None
    task, source = STAGES[facts.stage].task, _source(facts, str(facts.repo_id), _revision(facts, row))
    trust_argument = ", trust_remote_code=True" if facts.remote_code else ""  # readers decide whether to run that code
    if not facts.is_adapter:
        return _pipeline_code(facts, "from transformers import pipeline\n", f"model={source}{trust_argument}")
    assert facts.parent_model is not None
    auto_class = _AUTO_CLASSES[task]
    base = _source(facts, facts.parent_model["repo"], facts.parent_model["commit"])
    base += ", num_labels=1" if facts.stage == "reward" else ""
    loading_code = (
        f"from peft import PeftModel\nfrom transformers import {auto_class}, AutoTokenizer, pipeline\n\n"
        f"base = {auto_class}.from_pretrained({base}{trust_argument})\n"
        f"model = PeftModel.from_pretrained(base, {source})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({source}{trust_argument})"
    )
    return _pipeline_code(facts, loading_code, "model=model, tokenizer=tokenizer")


def _pipeline_code(facts: StageFacts, loading_code: str, model_arguments: str) -> str:
    """Returns `loading_code` and code that runs a pipeline on a short prompt: one of the evaluation's, or a stock one.

    `model_arguments` are the arguments of `pipeline` that name the model.
    """
    if STAGES[facts.stage].task == "text-classification":
        return (
            f'{loading_code}\nscore = pipeline("text-classification", {model_arguments}, function_to_apply="none")\n'
            f"{_text_code(facts)}"
            'print(score(text)[0]["score"])  # higher is better; only differences count'
        )
    prompt: Any = _short_prompt(facts) or ("Hello!" if facts.is_chat else "The")
    if facts.is_chat:  # the chat template adds the system prompt
        prompt = [{"role": "user", "content": prompt}]
    arguments = ", ".join(f"{key}={value}" for key, value in sampling_arguments(facts).items())
    answer = '["generated_text"][-1]["content"]' if facts.is_chat else '["generated_text"]'
    return (
        f'{loading_code}\ngenerate = pipeline("text-generation", {model_arguments})\n'
        f"prompt = {json.dumps(prompt, ensure_ascii=False)}\n"
        f"print(generate(prompt, {arguments})[0]{answer})"
    )


def _text_code(facts: StageFacts) -> str:
    """Returns code that assigns `text`: what a reward model scores, a short prompt with an answer."""
    prompt = _short_prompt(facts) or "A prompt."
    if facts.is_chat:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "An answer."}]
        rendering = "text = score.tokenizer.apply_chat_template(turns, tokenize=False)\n"
        return f"turns = {json.dumps(turns, ensure_ascii=False)}\n{rendering}"
    return f"text = {json.dumps(f'{prompt} An answer.', ensure_ascii=False)} + score.tokenizer.eos_token\n"


def _short_prompt(facts: StageFacts) -> str | None:
    """Returns the first held-out prompt of at most `_MAX_PROMPT` characters; None if there is none."""
    prompts = dict.fromkeys(str(row["prompt"]) for row in facts.samples)
    return next((prompt for prompt in prompts if len(prompt) <= _MAX_PROMPT), None)


def sampling_arguments(facts: StageFacts) -> dict[str, Any]:
    """Returns the arguments that make transformers sample as the evaluation did, or as training did if there was none.

    Args:
        facts: The facts of the stage.
    """
    evaluation = facts.evaluation
    temperature = evaluation.get("temperature", facts.setting("temperature", 1.0))
    length = evaluation.get("max_new_tokens", facts.setting("response_length", 64))
    arguments: dict[str, Any] = {"do_sample": True, "top_k": 0}  # top_k: transformers' default is 50
    if temperature != 1.0:
        arguments["temperature"] = temperature
    return {**arguments, "max_new_tokens": length}


def critic_snippet(facts: StageFacts) -> str | None:
    """Returns Python code that loads PPO's critic; None if it is not published or plain transformers cannot load it.

    Args:
        facts: The facts of the stage.
    """
    row = published_checkpoint(facts)
    if row is None or facts.is_adapter or not facts.has_critic or facts.merged or facts.remote_code:
        return None
    source = _source(facts, str(facts.repo_id), _revision(facts, row))
    return (
        "from transformers import AutoModelForTokenClassification\n\n"
        f'critic = AutoModelForTokenClassification.from_pretrained({source}, subfolder="critic")'
    )


def merged_usage(facts: StageFacts) -> tuple[str | None, str] | None:
    """Returns how to load an adapter's branch `merged` with transformers alone.

    Args:
        facts: The facts of the stage.

    Returns:
        (the download command, Python code); None without that branch. Only the embedded Hub needs the command.
    """
    if not (facts.is_adapter and facts.describes_finished_run and facts.repo_id and facts.setting("push_merged")):
        return None
    auto_class, folder = _AUTO_CLASSES[STAGES[facts.stage].task], f"{facts.title}-merged"
    is_local = facts.hub_label == "local"
    source = json.dumps(f"./{folder}") if is_local else f'{json.dumps(facts.repo_id)}, revision="merged"'
    source += ", trust_remote_code=True" if facts.remote_code else ""
    return (
        f"{pull_command(facts, 'merged')} --output_dir {folder}" if is_local else None,
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        f"model = {auto_class}.from_pretrained({source})\ntokenizer = AutoTokenizer.from_pretrained({source})",
    )


def _revision(facts: StageFacts, checkpoint: CheckpointRow) -> str:
    return "merged" if facts.merged else checkpoint.tag


def _source(facts: StageFacts, repo: str, revision: str | None) -> str:
    """Returns arguments of from_pretrained: the folder of `install_commands`, or the repository and the revision."""
    if facts.hub_label == "local":
        return json.dumps(f"./{repo.rpartition('/')[2]}")
    return json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else "")


def _hub_option(facts: StageFacts) -> str:
    return f"--hub {shlex.quote(facts.hub_label)}"
