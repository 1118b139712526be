"""Contradictory generation configs are fixed on loading, so that checkpoints can be saved."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from miniatures import load, save
from trainer_fixture import make_policy, make_reward_model, make_trainer
from transformers import GenerationConfig

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.generation_config import _warn_once, make_savable, set_sampling
from rlhf_zoo.modeling.models import load_causal


@pytest.fixture(autouse=True)
def anew() -> None:
    _warn_once.cache_clear()


@pytest.mark.parametrize(
    ("fields", "changed", "message"),
    [
        ({"temperature": 0.5}, {"do_sample": True, "temperature": 0.5}, "do_sample is set to true"),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
            "do_sample is set to true",
        ),
        ({"length_penalty": 2.0, "max_length": 64}, {"length_penalty": None, "max_length": 64}, "length_penalty is"),
        ({"output_scores": True, "early_stopping": True}, {"output_scores": None}, "early_stopping, output_scores are"),
        ({"temperature": 0.5, "length_penalty": 2.0}, {"length_penalty": None}, "temperature, length_penalty are"),
    ],
)
def test_load_fixes_contradictory_generation_config_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    path = save("Qwen3", tmp_path / "base") / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with caplog.at_level(logging.WARNING, logger="rlhf_zoo"):
        for _ in range(2):
            model = load_causal(tmp_path / "base")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("rlhf_zoo")]
    assert len(lines) == 1 and message in lines[0] and "\n" not in lines[0]
    model.generation_config.pad_token_id = 3  # as every stage changes it, from when on transformers is strict
    model.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert {key: getattr(saved, key) for key in changed} == changed
    assert saved.eos_token_id == load("Qwen3")[0].generation_config.eos_token_id


def test_valid_generation_config_is_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = load("Qwen3")
    before = model.generation_config
    make_savable(model, name="It")
    make_savable(make_reward_model(), name="It")
    assert model.generation_config is before and not caplog.records


def test_unfixable_generation_config_is_refused() -> None:
    model, _ = load("Qwen3")
    model.generation_config.streamer = 1
    with pytest.raises(ZooError, match=r"a generation_config\.json that cannot be saved \(.*streamer.*\): correct it"):
        make_savable(model, name="It")


def test_trainer_saves_policy_with_contradictory_generation_config(tmp_path: Path) -> None:
    policy = make_policy()
    policy.generation_config.temperature = 0.5
    trainer = make_trainer(tmp_path, model=policy, max_steps=1)
    trainer.save_model(str(tmp_path / "saved"))
    assert GenerationConfig.from_pretrained(tmp_path / "saved").do_sample is True


def test_set_sampling_saves_training_sampling_settings(tmp_path: Path) -> None:
    policy = make_policy()
    before = policy.generation_config.eos_token_id
    set_sampling(policy, temperature=0.7)
    policy.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.do_sample, saved.temperature, saved.top_k, saved.top_p) == (True, 0.7, 0, 1.0)
    assert saved.eos_token_id == before
    policy.generation_config.streamer = 1  # cannot be saved, whatever is set
    set_sampling(policy, temperature=0.5)
    assert policy.generation_config.temperature == 0.7
    set_sampling(make_reward_model(), temperature=0.5)
