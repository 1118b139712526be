"""The comparison of two policies: what it measures, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from toy_models import CONTEXT, Toys, save_toys
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_zoo.comparison import Comparison
from rlhf_zoo.errors import ZooError
from rlhf_zoo.tokenizer import train_tokenizer

PROMPT = "the camera"


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return save_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def comparison(toys: Toys) -> Comparison:
    return Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward, device="cpu")


@pytest.mark.parametrize("side", ["sft", "ppo"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_figures_are_those_of_the_models(comparison: Comparison, toys: Toys, side: str, seed: int) -> None:
    """Against plain transformers: one forward pass of each model over prompt and completion, without our code."""
    temperature = 0.7
    one = getattr(comparison.compare(PROMPT, seed=seed, temperature=temperature, max_new_tokens=10), side)
    tokenizer = AutoTokenizer.from_pretrained(toys.ppo)
    prompt = tokenizer(PROMPT)["input_ids"]
    completion = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("".join(one.tokens)))
    ids = torch.tensor([prompt + completion])
    assert len(completion) == one.length == len(one.tokens) == len(one.token_log_ratio)

    def logprobs(path):
        logits = AutoModelForCausalLM.from_pretrained(path)(ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1)[range(len(completion)), completion]

    with torch.no_grad():
        ratio = logprobs(toys.ppo) - logprobs(toys.sft)
        score = AutoModelForSequenceClassification.from_pretrained(toys.reward)(ids).logits.item()
    assert one.token_log_ratio == pytest.approx(ratio.tolist(), abs=1e-5)
    assert one.log_ratio == pytest.approx(ratio.sum().item(), abs=1e-5)
    assert one.reward == pytest.approx((score - 0.1) / 0.5, abs=1e-4)
    assert one.ended == (one.tokens[-1] == "<eos>")
    assert one.completion == "".join(one.tokens).removesuffix("<eos>")


def test_both_policies_draw_from_one_stream(toys: Toys) -> None:
    found = Comparison.load(ppo=toys.sft, sft=toys.sft).compare(PROMPT, seed=5)
    assert found.sft == found.ppo
    assert found.ppo.log_ratio == 0 and set(found.ppo.token_log_ratio) == {0.0}
    assert found.ppo.reward is None


def test_equal_arguments_give_equal_results(comparison: Comparison) -> None:
    first = comparison.compare(PROMPT, seed=1)
    assert first == comparison.compare(PROMPT, seed=1)
    assert len({comparison.compare(PROMPT, seed=seed).ppo.completion for seed in range(6)}) > 1


def test_log_ratio_leans_to_whose_completion_it_is(comparison: Comparison) -> None:
    """Its mean over PPO's completions estimates KL(PPO‖SFT) ≥ 0, over SFT's completions −KL(SFT‖PPO) ≤ 0."""
    found = [comparison.compare(PROMPT, seed=seed, max_new_tokens=10) for seed in range(150)]
    assert math.fsum(one.ppo.log_ratio for one in found) > 0 > math.fsum(one.sft.log_ratio for one in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": " \n\t "}, "The prompt is empty"),
        ({"prompt": "half \ud800"}, "half of a character"),
        ({"prompt": "the camera " * CONTEXT}, f"passes the {CONTEXT}"),
        ({"max_new_tokens": CONTEXT}, f"one request may ask for {CONTEXT - 1}"),
        ({"max_new_tokens": CONTEXT - 1}, f"passes the {CONTEXT} that these models can read: shorten it or ask for"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": 2.5}, "whole number"),
        ({"max_new_tokens": None}, "whole number"),
        ({"seed": -1}, "The seed is -1"),
        ({"seed": True}, "The seed is True"),
        ({"temperature": 0}, "above 0"),
        ({"temperature": math.nan}, "above 0"),
        ({"temperature": math.inf}, "above 0"),
        ({"temperature": "hot"}, "above 0"),
    ],
)
def test_what_it_refuses(comparison: Comparison, changes: dict, message: str) -> None:
    with pytest.raises(ZooError, match=message):
        comparison.compare(**({"prompt": PROMPT} | changes))


def test_the_longest_prompt_fits(comparison: Comparison) -> None:
    found = comparison.compare("the camera " * 4, max_new_tokens=CONTEXT - 12)
    assert found.ppo.length >= 1


def test_policies_that_do_not_share_a_tokenizer(toys: Toys, tmp_path) -> None:
    AutoModelForCausalLM.from_pretrained(toys.sft).save_pretrained(tmp_path)
    train_tokenizer(["some other text"], vocab_size=260, max_length=CONTEXT).save_pretrained(tmp_path)
    with pytest.raises(ZooError, match="different tokenizers"):
        Comparison.load(ppo=toys.ppo, sft=tmp_path)


def test_a_folder_that_holds_no_model(toys: Toys, tmp_path) -> None:
    with pytest.raises(ZooError, match="no tokenizer that can be loaded"):
        Comparison.load(ppo=toys.ppo, sft=tmp_path)
