"""SFT and PPO beside answers that the data hold, as published runs of summaries are measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from ..modeling import distributed
from ..modeling.chat import plain_text
from ..modeling.devices import move
from ..rewards.verifiable import text_of
from .head_to_head import TIE, HeadToHead, keys_of
from .judges.named import scores
from .judges.pairwise import compare_pairs
from .measure import prompt_groups, repeated
from .stats import WinRate, win_rate


def beside_references(
    found: HeadToHead,
    rows: Dataset,
    policy: Callable[[], PreTrainedModel],
    *,
    column: str,
    temperature: float | None = None,
) -> dict[str, Any]:
    """How often the headline's judge prefers SFT, and PPO, to the answer in a column of the rows, a sample a prompt.

    policy: PPO's, asked for where a temperature is given: then both sample anew; else the first of what they wrote is
    compared. Special tokens of the answers are left out, as they are of completions.
    """
    tools, judge = found.tools, found.tools.judge
    _, prompts, columns = repeated(rows, 1)
    groups = prompt_groups(prompts)
    written = [_without_special_tokens(text_of(one), tools.tokenizer.all_special_tokens) for one in rows[column]]
    texts = {side: found.measured[side].completions[:: found.samples] for side in ("sft", "ppo")}
    if temperature is not None:
        at, keys = replace(tools, temperature=temperature), keys_of(len(prompts), 1)
        for side, model in {"sft": tools.reference, "ppo": policy()}.items():
            move(model, tools.reference.device)
            texts[side] = at.sampled(model, prompts, keys=keys, seed=found.seed, desc=f"{side} beside {column}").texts
    comparing = next((one for one in tools.panel.comparing if one.name == judge.name), None)

    def preferred(side: str) -> WinRate:
        if comparing is None:
            ours, theirs = (scores(judge, prompts, one, columns) for one in (texts[side], written))
            return win_rate(ours, theirs, groups, tolerance=TIE)
        asked = [plain_text(prompt) for prompt in prompts]
        return distributed.from_first(
            lambda: compare_pairs(comparing, asked, texts[side], written, seed=found.seed).win_rate
        )

    rates = {side: preferred(side).to_json() for side in ("sft", "ppo")}
    return {"column": column, "temperature": temperature, **rates}


def _without_special_tokens(text: str, special: list[str]) -> str:
    for token in special:
        text = text.replace(token, "")
    return text
