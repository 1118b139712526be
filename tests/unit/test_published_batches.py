"""Batches of recipes of published runs: a recipe's batch is of all processes together (docs/scale.md)."""

import pytest

from rlhf_zoo.modeling import distributed
from rlhf_zoo.runs.data.batch_share import share_of_batch
from rlhf_zoo.runs.recipe import load_recipe

#: recipe -> GPUs of the published run, and examples of an optimizer step (of an update of PPO) by stage, as published.
PUBLISHED = {
    "tldr-pythia-1b": (8, {"sft": 128, "reward": 64, "ppo": 512}),
    "tldr-pythia-2.8b": (8, {"sft": 128, "reward": 64, "ppo": 512}),
    "tldr-pythia-6.9b": (8, {"sft": 128, "reward": 64, "ppo": 512}),
    "tldr-pythia-1b-trl": (8, {"sft": None, "ppo": 512}),  # None: a published checkpoint, as it is
    "gsm8k-qwen2.5-0.5b": (1, {"sft": None, "ppo": 256}),
    "gsm8k-gemma-2-2b": (2, {"sft": 128, "ppo": 512}),
    "imdb-gpt2": (1, {"sft": None, "ppo": 128}),
    "detox-gpt-neo": (1, {"sft": None, "ppo": 16}),
    "sentiment-gpt2": (1, {"sft": None, "ppo": 512}),
    "openrlhf-llama-3-8b": (8, {"sft": None, "ppo": 1024}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_share_of_batch_gives_published_batches_per_process(name, monkeypatch):
    gpus, batches = PUBLISHED[name]
    monkeypatch.setattr(distributed, "process_count", lambda: gpus)
    for stage, batch in batches.items():
        said = {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 8, **load_recipe(name).stages[stage]}
        mine = said | share_of_batch(said, stage)
        together = gpus * mine["per_device_train_batch_size"] * mine["gradient_accumulation_steps"]
        assert batch is None or together == batch, stage
