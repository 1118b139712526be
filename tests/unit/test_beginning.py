"""What is settled before the first stage trains: models that can be had, lengths that fit them, by the right key."""

import logging
from pathlib import Path

import miniatures
import pytest
from schemas import make_recipe
from transformers import AutoTokenizer

from rlhf_zoo.cli import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.rewards.model import say_cut

HUB = ("--hub", "http://127.0.0.1:9", "--source_hub", "none")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a model of 128 positions."""
    base = miniatures.save("Qwen3", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return make_recipe(tmp_path, "trl-lib/ultrafeedback_binarized", "conversational", base=base)


def zoo(*words: str) -> None:
    cli.main(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--ppo.response_length", "120"),
            r"^response_length of the stage ppo is 120, the longest prompt has \d+ tokens, and the model .*base reads "
            r"128: lower response_length, or set max_prompt_length to at most 8\.$",
        ),
        (
            ("--ppo.max_prompt_length", "3"),
            r"^max_prompt_length of the stage ppo is 3, and the shortest of \d+ prompts has \d+ tokens: raise it\.$",
        ),
        (
            ("--ppo.reward_model_path", "who/knows"),
            r"^The model who/knows cannot be found on .*: check reward_model_pa",
        ),
        (("--ppo.value_model_name_or_path", "who/knows"), "check value_model_name_or_path of the stage ppo, --hub"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_trains(recipe: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        zoo("run", "mine", *HUB, *flags)
    assert not Path("runs/mine/sft").exists()


def test_an_answer_longer_than_the_model_is_found_without_a_hub(recipe: Path) -> None:
    for command in (["recipes", "validate", "mine"], ["run", "mine", *HUB]):
        with pytest.raises(
            ZooError, match=r"^response_length of the stage ppo is 300, and the model .* reads 128 tokens"
        ):
            zoo(*command, "--ppo.response_length", "300")
    zoo("recipes", "validate", "mine", "--ppo.reward_model_path", "who/knows", "--reward.columns", "{chosen: chosen}")
    with pytest.raises(ZooError, match=r"^--reward\.columns is '\{chosen: ', and it takes YAML or JSON \("):
        zoo("recipes", "validate", "mine", "--reward.columns", "{chosen: ")
    with pytest.raises(ZooError, match=r"^--ppo\.kl_coef is 'abc', and it takes a number\.$"):
        zoo("run", "mine", *HUB, "--ppo.kl_coef", "abc")
    with pytest.raises(ZooError, match=r"^--kl_coef is 'abc', and it takes a number\.$"):
        zoo("ppo", "mine", *HUB, "--kl_coef", "abc")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_by_sft(recipe: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.add_tokens(["one more", "and one"])
    tokenizer.save_pretrained("base")
    with pytest.raises(ZooError, match=r"base has \d+ embedding rows and its tokenizer the token \d+"):
        zoo("sft", "mine", *HUB)
    assert not Path("runs/mine/sft/run.json").exists()


def test_what_a_reward_model_leaves_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_cut.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            say_cut("who/scores", 128)
    assert [record.getMessage() for record in caplog.records] == [
        "The reward model who/scores reads 128 tokens: of a longer text the beginning is left out."
    ]
