"""A toy recipe and its run directory, made in a second: sft and reward are saved untrained, only PPO is trained.

As in trainer_fixture, each letter is one token. The texts follow the alphabet, and the policy has learned that order,
so a tokenizer with other ids makes a visible difference.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from folders import write_data_set
from trainer_fixture import EOS, LETTERS, make_policy, make_reward_model, make_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.record import StageRecord, fingerprint

BACKWARDS = LETTERS[::-1]  # the same letters with other token ids
PPO = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,
    "save_steps": 1,
    "num_ppo_epochs": 2,
    "response_length": 10,
    "temperature": 2.0,
    "learning_rate": 3e-3,
    "critic_learning_rate": 2e-3,
    "eval_strategy": "no",
    "use_cpu": True,
}
EVALUATION = {
    "prompts": 6, "samples": 2, "judge": "toy_run:judge", "checkpoint_prompts": 6, "checkpoint_samples": 1
}  # fmt: skip


def answered(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Rewards a completion that starts with its prompt's answer, a column of the prompts."""
    return [float(completion.startswith(wanted)) for completion, wanted in zip(completions, answer, strict=True)]


def judge(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def _letters(start: int, length: int) -> str:
    return "".join(LETTERS[(start + place) % len(LETTERS)] for place in range(length))


def _write_data(folder: Path) -> None:
    rows = [
        {"prompt": _letters(row, 2 + row % 3), "answer": _letters(row + 2 + row % 3, 1), "row": row}
        for row in range(12)
    ]
    lines = [{"text": _letters(row, 6)} for row in range(12)]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}aa"} for row in rows]
    configs = {
        "prompts": dict.fromkeys(("train", "validation", "test"), rows),
        "lines": {"train": lines},
        "preferences": {"train": pairs},
    }
    write_data_set(folder, configs)


def make_recipe(folder: Path, *, ppo: Mapping[str, Any] | None = None, shared: Mapping[str, Any] | None = None) -> Path:
    """Writes the recipe `toy` and its data in `folder`. ppo, shared: More keys of ppo.yaml and recipe.yaml."""
    recipe = folder / "toy"
    recipe.mkdir(parents=True)
    _write_data(folder / "data")
    own = {"description": "A toy.", "dataset_name": str(folder / "data"), "evaluation": EVALUATION, **(shared or {})}
    untrained = {"bf16": False, "dataset_test_split": None}
    for name, keys in {"recipe": own, "sft": untrained, "reward": untrained, "ppo": {**PPO, **(ppo or {})}}.items():
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    return recipe


def make_context(folder: Path, **flags: Any) -> RunContext:
    """The context of a run of `folder`/toy in `folder`/run, without publishing. flags: Flags of the ppo stage."""
    return RunContext(
        recipe=load_recipe(str(folder / "toy")),
        directory=folder / "run",
        hub=Hub("other", "http://127.0.0.1:9", "a test"),
        namespace="local",
        publish=False,
        flags={"ppo": flags},
    )


def save_stage(folder: Path, stage: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Saves a finished stage in `folder`/run, as its command does. Returns its checkpoint."""
    record = StageRecord(folder / "run" / stage)
    checkpoint = record.checkpoint_path(4)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    record.mark_complete(checkpoint)
    record.write(
        stage=stage, recipe="toy", status="finished", resolved={"seed": 1}, fingerprint=fingerprint({stage: 1})
    )
    return checkpoint


def trained_policy(**fields: Any) -> PreTrainedModel:
    """Returns a policy trained on the alphabet and on ending after six letters. fields: Fields of its config."""
    return copy.deepcopy(_learned_policy(**fields))


@functools.cache
def _learned_policy(**fields: Any) -> PreTrainedModel:
    policy, tokenizer = make_policy(make_tokenizer(), **fields), make_tokenizer()
    rows = [[*tokenizer(_letters(start, 6))["input_ids"], EOS] for start in range(len(LETTERS))]
    ids = torch.tensor(rows)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(10):
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy.eval()


def save_start(folder: Path) -> None:
    """Saves the finished sft and reward stages that PPO starts from."""
    save_stage(folder, "sft", trained_policy(), make_tokenizer())
    save_stage(folder, "reward", make_reward_model(), make_tokenizer())
