"""Tokens and FLOPs of each method, against hand counts."""

import pytest
import torch
from trainer_fixture import make_policy, make_reward_model

from rlhf_zoo.evaluation.compute import (
    Compute,
    Passes,
    best_of_n_compute,
    break_even,
    dpo_compute,
    ppo_compute,
    rloo_compute,
)
from rlhf_zoo.modeling.models import count_matmul_parameters

SIZES = {"policy": 10, "reference": 10, "reward": 7, "critic": 5}


def test_ppo_compute_matches_hand_count() -> None:
    """2 completions of 3 tokens after prompts of 4, two epochs: 14 tokens in all, 28 trained on."""
    compute = ppo_compute(SIZES, prompt_tokens=8, completion_tokens=6, trained_tokens=28)
    assert compute.models == {
        "policy": Passes(10, generated=6, read=8, trained=28),
        "reference": Passes(10, read=14),
        "reward": Passes(7, read=14),
        "critic": Passes(5, read=14, trained=28),
    }
    assert compute.flops == 10 * (2 * 14 + 6 * 28) + 10 * 2 * 14 + 7 * 2 * 14 + 5 * (2 * 14 + 6 * 28)
    assert (compute.total("generated"), compute.total("read"), compute.total("trained")) == (6, 8 + 3 * 14, 56)
    shared = {role: size for role, size in SIZES.items() if role not in ("critic", "reward")}
    assert set(ppo_compute(shared, prompt_tokens=8, completion_tokens=6, trained_tokens=28).models) == set(shared)


def test_rloo_compute_has_extra_policy_pass_and_no_critic() -> None:
    compute = rloo_compute(SIZES, prompt_tokens=8, completion_tokens=6, iterations=2)
    assert compute.models == {
        "policy": Passes(10, generated=6, read=8 + 14, trained=28),
        "reference": Passes(10, read=14),
        "reward": Passes(7, read=14),
    }


def test_dpo_compute_has_no_generation() -> None:
    compute = dpo_compute(SIZES, pair_tokens=100, epochs=1.5)
    assert compute.models == {"policy": Passes(10, trained=150), "reference": Passes(10, read=150)}
    assert compute.total("generated") == 0


def test_best_of_n_compute_counts_every_completion() -> None:
    four = best_of_n_compute(SIZES, 4, prompt_tokens=4, completion_tokens=3)
    assert four.models == {"policy": Passes(10, generated=12, read=16), "reward": Passes(7, read=28)}
    single = best_of_n_compute(SIZES, 1, prompt_tokens=4, completion_tokens=3)
    assert single.models == {"policy": Passes(10, generated=3, read=4)}, "nothing to choose, so no reward is asked"


def test_compute_sum_keeps_roles_and_rejects_two_sizes() -> None:
    total = Compute({"policy": Passes(10, 1, 2, 3)}) + Compute({"policy": Passes(10, 4, 5, 6), "reward": Passes(7, 1)})
    assert total.models == {"policy": Passes(10, 5, 7, 9), "reward": Passes(7, 1)}
    assert total.times(0.5).models["policy"] == Passes(10, 2.5, 3.5, 4.5)
    assert Compute.from_json(total.to_json()) == total
    with pytest.raises(ValueError, match="reward has 7 parameters in one count and 8"):
        total + Compute({"reward": Passes(8)})


def test_break_even_equalizes_total_compute() -> None:
    count = break_even(1000.0, 2.0, other_training_flops=100.0, other_serving_flops=12.0)
    assert count == 90
    assert 1000 + count * 2 == 100 + count * 12
    assert break_even(1000.0, 2.0, other_training_flops=0.0, other_serving_flops=2.0) is None
    assert break_even(10.0, 2.0, other_training_flops=100.0, other_serving_flops=12.0) == 0


def test_matmul_parameters_exclude_embedding_lookup() -> None:
    """A table of embeddings is only looked up, unless it is the matrix of logits too."""
    untied, tied = make_policy(), make_policy(tie_word_embeddings=True)
    table = untied.get_input_embeddings().weight.numel()
    assert count_matmul_parameters(untied) == sum(weight.numel() for weight in untied.parameters()) - table
    assert count_matmul_parameters(tied) == count_matmul_parameters(untied)
    reward = make_reward_model()
    assert (
        count_matmul_parameters(reward)
        == count_matmul_parameters(untied) - table + torch.tensor(reward.score.weight.shape).prod()
    )
