"""A toy recipe and its run directory, made in a second: the sft and reward stages are saved, only PPO is trained.

Its world is trainer_fixture's: one token a letter. Its texts go through the alphabet letter by letter, which the policy
has learned; so a tokenizer that numbers letters otherwise shows.
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

BACKWARDS = LETTERS[::-1]  # the same letters under other numbers
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
    """Whether a completion begins with its prompt's answer, a column of the prompts."""
    return [float(completion.startswith(wanted)) for completion, wanted in zip(completions, answer, strict=True)]


def judge(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def _run_of(start: int, length: int) -> str:
    return "".join(LETTERS[(start + place) % len(LETTERS)] for place in range(length))


def _write_data(folder: Path) -> None:
    rows = [
        {"prompt": _run_of(row, 2 + row % 3), "answer": _run_of(row + 2 + row % 3, 1), "row": row} for row in range(12)
    ]
    lines = [{"text": _run_of(row, 6)} for row in range(12)]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}aa"} for row in rows]
    configs = {
        "prompts": dict.fromkeys(("train", "validation", "test"), rows),
        "lines": {"train": lines},
        "preferences": {"train": pairs},
    }
    write_data_set(folder, configs)


def make_recipe(folder: Path, *, ppo: Mapping[str, Any] | None = None, shared: Mapping[str, Any] | None = None) -> Path:
    """Writes the recipe `toy` under `folder`, and its data. ppo: keys of ppo.yaml on top. Returns its folder."""
    recipe = folder / "toy"
    recipe.mkdir(parents=True)
    _write_data(folder / "data")
    own = {"description": "A toy.", "dataset_name": str(folder / "data"), "evaluation": EVALUATION, **(shared or {})}
    before = {"bf16": False, "dataset_test_split": None}
    for name, keys in {"recipe": own, "sft": before, "reward": before, "ppo": {**PPO, **(ppo or {})}}.items():
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    return recipe


def make_context(folder: Path, **flags: Any) -> RunContext:
    """The run of `folder`/toy in `folder`/run, published nowhere. flags: of the ppo stage."""
    return RunContext(
        recipe=load_recipe(str(folder / "toy")),
        directory=folder / "run",
        hub=Hub("other", "http://127.0.0.1:9", "a test"),
        namespace="local",
        publish=False,
        flags={"ppo": flags},
    )


def save_stage(folder: Path, stage: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A finished stage in `folder`/run, as its command leaves it. Returns its checkpoint."""
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
    """A policy that has learned the alphabet, and to end a text after six letters or so. fields: of its config."""
    return copy.deepcopy(_learned_policy(**fields))


@functools.cache
def _learned_policy(**fields: Any) -> PreTrainedModel:
    policy, tokenizer = make_policy(make_tokenizer(), **fields), make_tokenizer()
    rows = [[*tokenizer(_run_of(start, 6))["input_ids"], EOS] for start in range(len(LETTERS))]
    ids = torch.tensor(rows)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(10):
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy.eval()


def save_start(folder: Path) -> None:
    """The finished sft and reward stages that PPO starts from."""
    save_stage(folder, "sft", trained_policy(), make_tokenizer())
    save_stage(folder, "reward", make_reward_model(), make_tokenizer())
