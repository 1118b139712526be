"""Chooses the lengths and batch sizes of a new recipe from its data."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import ZooError
from ...evaluation.evidence import MIN_PROMPTS as VERDICT_PROMPTS
from ...modeling.chat import append_completion, tokenize_for_reward, tokenize_prompt
from ...modeling.chat_template import Prompt
from ...modeling.prompt_keys import prompt_key
from ...runs.data.layout import as_turns, sft_text
from .data import StageData
from .model import ModelFacts

#: Upper bounds for evaluation prompts, episodes of PPO, tokens per answer, and tokens per training text.
MAX_EVAL_PROMPTS, MAX_EPISODES, MAX_RESPONSE, MAX_TOKENS = 200, 20_000, 256, 1024
#: Minimum number of distinct prompts, including held-out prompts.
MIN_PROMPTS = 8
#: With fewer prompts to evaluate on, the probes find only large effects.
FEW_EVAL_PROMPTS = 50
#: If there are few prompts, PPO repeats them to reach `MIN_UPDATES`. Below `FEW_UPDATES`, the policy changes little.
MIN_UPDATES, FEW_UPDATES = 40, 10
#: Maximum number of completions per update, and per micro-batch.
MAX_ROLLOUT, MAX_MICRO_BATCH = 64, 4


@dataclass
class Decisions:
    """The settings that were chosen for a recipe: (setting, value, reason), in order."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, setting: str, value: Any, reason: str) -> None:
        """Adds a choice. It replaces an earlier choice of the same setting.

        Args:
            setting: Name of the setting.
            value: The value that was chosen.
            reason: Why this value was chosen.
        """
        self.rows = [row for row in self.rows if row[0] != setting]
        self.rows.append((setting, str(value), reason))


def choose_sizes(
    model: ModelFacts, data_by_stage: Mapping[str, StageData], is_chat: bool, decisions: Decisions
) -> dict[str, Any]:
    """Chooses lengths in tokens, batch sizes, and the number of held-out prompts.

    Args:
        model: Facts about the starting model.
        data_by_stage: Stage -> its data and how the stage reads them.
        is_chat: Whether prompts are conversations.
        decisions: Receives the choices.

    Returns:
        Name of a size in the templates -> size.

    Raises:
        ZooError: No prompt fits the model's context, or there are too few prompts.
    """
    context_length, counter = model.context_length or MAX_TOKENS, _TokenCounter(model.tokenizer)
    ppo = data_by_stage["ppo"]
    prompts: Iterable[Mapping[str, Any]] = map(as_turns, ppo.rows) if is_chat else ppo.rows
    keys_and_lengths = [(prompt_key(row["prompt"]), counter.count_prompt(row["prompt"])) for row in prompts]
    lengths = sorted(dict(keys_and_lengths).values())  # of distinct prompts
    text_lengths, answer_lengths = _text_and_answer_lengths(data_by_stage, counter, is_chat)
    prompt_p95 = _percentile_95(lengths)
    prompt_length = min(_round_up(prompt_p95), context_length - max(8, context_length // 8))
    response_length = min(MAX_RESPONSE, context_length - prompt_length)
    if answer_lengths:
        response_length = min(response_length, _round_up(2 * _percentile_95(answer_lengths)))
    if lengths[0] > prompt_length:
        raise ZooError(
            f"The shortest of {len(lengths)} prompts has {lengths[0]} tokens, but a prompt may have {prompt_length}, "
            f"because the context of {model.name} is {context_length} tokens: use shorter prompts."
        )
    usable_count = max(
        int(ppo.row_count * sum(length <= prompt_length for _, length in keys_and_lengths) / len(keys_and_lengths)), 1
    )
    # All rows of a prompt are held out together, so count distinct prompts.
    distinct_count = int(ppo.prompt_count * sum(length <= prompt_length for length in lengths) / len(lengths))
    if distinct_count < MIN_PROMPTS:
        raise ZooError(
            f"A recipe needs {MIN_PROMPTS} different prompts that are short enough, because some are held out of "
            f"training, but {ppo.data_set.name} has {distinct_count}: add rows to it, or pass other --prompts."
        )
    text_length, answer_reason = None, ""
    if text_lengths:
        text_p95 = _percentile_95(text_lengths)
        text_length = min(context_length, MAX_TOKENS, max(16, _round_up(text_p95)))
        decisions.add("max_length", text_length, f"95% of texts have at most {text_p95} tokens")
    prompt_reason = f"95% of {len(lengths)} prompts have at most {prompt_p95} tokens"
    if ppo.keys["columns"].get("prompt") == "text" and prompt_p95 > MAX_RESPONSE:
        prompt_reason += """; LONG, because they are complete texts: --columns '{prompt: "{text:8 words}"}' cuts them"""
    decisions.add("max_prompt_length", prompt_length, prompt_reason)
    if answer_lengths:
        answer_reason = f"twice the {_percentile_95(answer_lengths)} tokens that 95% of answers do not exceed; "
    reason = f"{answer_reason}at most {MAX_RESPONSE}, and no more than prompts leave of the context"
    decisions.add("response_length", response_length, reason)
    eval_prompts, share = _choose_held_out(ppo, distinct_count, decisions)
    trained_count = int(usable_count * (1 - 2 * share))
    # The largest power of two that leaves at least two updates in a pass over the prompts.
    rollout_size = min(MAX_ROLLOUT, 2 ** int(math.log2(max(trained_count / 2, 2))))
    sft_batch = max(1, min(32, data_by_stage["sft"].row_count // 4)) if "sft" in data_by_stage else None
    sizes = {
        "prompt_length": prompt_length, "response_length": response_length, "text_length": text_length,
        "eval_prompts": eval_prompts, "held_out_share": share, "trained_rows": trained_count, "sft_batch": sft_batch,
        **choose_batches(trained_count, rollout_size, MAX_EPISODES),
    }  # fmt: skip
    add_episodes(sizes, decisions)
    return sizes


def _choose_held_out(ppo: StageData, distinct_count: int, decisions: Decisions) -> tuple[int, float]:
    """Chooses how many prompts the evaluation uses, and the share of all prompts in each held-out part.

    PPO holds out two parts. With a test split, both monitor training, and together have 1.5 times the evaluation's
    prompts. Without a test split, one part monitors training, the evaluation uses the other, and each has 1.5 times
    those prompts. The surplus makes up for prompts that are too long.
    """
    eval_prompts = max(2, min(MAX_EVAL_PROMPTS, distinct_count // 8))
    test_split = ppo.keys["dataset_test_split"]
    share = min(
        0.1 if test_split else 0.2,
        max(0.005, math.ceil((750 if test_split else 1500) * eval_prompts / distinct_count) / 1000),
    )
    if test_split:
        eval_prompts = min(eval_prompts, ppo.test_prompt_count or 0)
    warning = ""
    if eval_prompts < VERDICT_PROMPTS:
        warning = f"; TOO FEW FOR A VERDICT, which needs {VERDICT_PROMPTS}: pass --prompts with more"
    elif eval_prompts < FEW_EVAL_PROMPTS:
        warning = f"; FEW: below {FEW_EVAL_PROMPTS} only large effects can be found, so pass --prompts with more"
    evaluation_reason = f"the evaluation uses {eval_prompts}"
    if test_split:
        decisions.add("evaluation.dataset_test_split", test_split, f"{evaluation_reason}{warning}")
    # `split_by_prompt` holds out two parts of this size before it leaves out prompts that are too long.
    part = math.ceil(share * ppo.prompt_count)
    purpose = (
        "all to monitor training"
        if test_split
        else f"{part} to monitor training and {part} to evaluate, of which {evaluation_reason}{warning}"
    )
    held_out_reason = f"no stage trains on {2 * part} of {ppo.prompt_count_text} prompts: {purpose}"
    decisions.add("held_out_share", share, held_out_reason)
    return eval_prompts, share


def add_episodes(sizes: Mapping[str, Any], decisions: Decisions, reason: str = "") -> None:
    """Records the choice of `total_episodes`. Its reason states the updates, and warns if they are too few.

    Args:
        sizes: The sizes that `choose_sizes` returned.
        decisions: Receives the choice.
        reason: What limits the number of episodes; "" if nothing does.
    """
    passes, updates = sizes["episodes"] / sizes["trained_rows"], sizes["updates"]
    parts = [f"{updates:,} update{'' if updates == 1 else 's'} of {sizes['rollout']} answers"]
    if passes > 1:
        parts[0] += f", {passes:.0f} passes over {sizes['trained_rows']:,} prompts"
    parts += [reason] if reason else []
    if updates < FEW_UPDATES:
        parts.append(f"TOO FEW UPDATES TO LEARN MUCH: below {FEW_UPDATES}, so raise total_episodes")
    decisions.add("total_episodes", sizes["episodes"], "; ".join(parts))


def choose_batches(trained_count: int, rollout_size: int, max_episodes: int) -> dict[str, int]:
    """Chooses PPO's batch sizes, its number of episodes, and the interval between checkpoints.

    Args:
        trained_count: Number of prompt rows to train on.
        rollout_size: Answers per update.
        max_episodes: Maximum number of answers in the run.

    Returns:
        Name of a size in the templates -> size. `save_steps` counts updates.
    """
    micro_batch = min(MAX_MICRO_BATCH, rollout_size)
    updates = max(1, min(max_episodes, max(trained_count, MIN_UPDATES * rollout_size)) // rollout_size)
    return {
        "rollout": rollout_size, "micro_batch": micro_batch, "accumulation_steps": rollout_size // micro_batch,
        "episodes": updates * rollout_size, "updates": updates, "save_steps": max(1, updates // 20),
    }  # fmt: skip


def _percentile_95(lengths: Sequence[int]) -> int:
    """Returns the 95th percentile of sorted lengths."""
    return lengths[int(0.95 * (len(lengths) - 1))]


def _round_up(length: int) -> int:
    """Rounds up to a multiple of 32, so that rows slightly longer than the inspected rows still fit."""
    return -(-length // 32) * 32


class _TokenCounter:
    """Counts tokens, and caches the counts, because stages share texts and rendering a chat template is slow."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._prompt_counts: dict[str, int] = {}
        self._text_counts: dict[str, int] = {}

    def count_prompt(self, prompt: Prompt) -> int:
        key = repr(prompt)
        if key not in self._prompt_counts:
            self._prompt_counts[key] = len(tokenize_prompt(prompt, self._tokenizer))
        return self._prompt_counts[key]

    def count_text(self, text: Prompt) -> int:
        """Counts the tokens of a prompt with its answer."""
        key = repr(text)
        if key not in self._text_counts:
            self._text_counts[key] = len(tokenize_for_reward(text, self._tokenizer, ended=True))
        return self._text_counts[key]


def _text_and_answer_lengths(
    data_by_stage: Mapping[str, StageData], counter: _TokenCounter, is_chat: bool
) -> tuple[list[int], list[int]]:
    """Returns sorted token counts of the texts for SFT and the reward model, and of the answers in these texts."""
    text_lengths, answer_lengths = [], []
    for prompt, text in _prompts_and_texts(data_by_stage, is_chat):
        text_lengths.append(counter.count_text(text))
        if prompt is not None:
            answer_lengths.append(max(text_lengths[-1] - counter.count_prompt(prompt), 1))
    return sorted(text_lengths), sorted(answer_lengths)


def _prompts_and_texts(data_by_stage: Mapping[str, StageData], is_chat: bool) -> Iterator[tuple[Any, Any]]:
    """Yields (prompt, prompt with answer) for each text or conversation; the prompt is None if it is not separate."""
    for row in data_by_stage["sft"].rows if "sft" in data_by_stage else ():
        conversation = {**row, **as_turns(row)} if is_chat else row
        prompt = None
        if "messages" in conversation:
            prompt = conversation["messages"][:-1]
        elif "completion" in conversation:
            prompt = conversation.get("prompt")
        yield prompt, sft_text(conversation, "text")
    for row in data_by_stage["reward"].rows if "reward" in data_by_stage else ():
        turns = as_turns(row) if is_chat else row
        for side in ("chosen", "rejected"):
            yield turns["prompt"], append_completion(turns["prompt"], turns[side])
