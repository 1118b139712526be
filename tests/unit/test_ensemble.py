"""Reward ensembles: disagreement against hand values and against models with known disagreement."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.ensemble import (
    average_by_kl,
    disagreement,
    pairwise_agreement,
    standardize,
    unrelated_disagreement,
)
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.pipeline.experiments.ensemble import check, run_with_seed
from rlhf_zoo.pipeline.stages.samples import pairs_seed
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import load_recipe


def test_standardized_uses_each_models_sft_statistics() -> None:
    over = [[0.0, 2.0], [10.0, 16.0]]  # means 1 and 13, standard deviations 1 and 3
    assert standardize([[3.0, 1.0], [13.0, 7.0]], over).tolist() == [[2.0, 0.0], [0.0, -2.0]]


def test_disagreement_matches_hand_values() -> None:
    assert disagreement([[1.0, 0.0, 2.0], [3.0, 0.0, 2.0]]) == pytest.approx([math.sqrt(2), 0, 0])
    assert disagreement([[0.0], [0.0], [3.0]]) == pytest.approx([math.sqrt(3)])


def test_unrelated_disagreement_equals_c4_constants() -> None:
    """The values are from tables for control charts."""
    c4 = {2: 0.7979, 3: 0.8862, 4: 0.9213, 5: 0.94, 10: 0.9727}
    assert {models: round(unrelated_disagreement(models), 4) for models in c4} == c4


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.integers(0, 2**31), st.floats(0, 3))
def test_mean_square_disagreement_is_one_minus_correlation(models: int, seed: int, common: float) -> None:
    rng = np.random.default_rng(seed)
    raw = common * rng.normal(size=30) + rng.normal(size=(models, 30))
    shared = np.mean([np.corrcoef(raw[a], raw[b])[0, 1] for a, b in combinations(range(models), 2)])
    assert np.square(disagreement(standardize(raw, raw))).mean() == pytest.approx(1 - shared)


def test_agreements_compare_signs() -> None:
    result = pairwise_agreement([[1.0, -2.0, 0.5, 3.0], [9.0, -0.1, -4.0, 1.0], [-1.0, 2.0, -0.5, -3.0]])
    assert {pair: estimate.value for pair, estimate in result.items()} == {(0, 1): 0.75, (0, 2): 0.0, (1, 2): 0.25}
    assert result[0, 1].n == 4 and 0.30 < result[0, 1].ci95[0] < 0.31  # Wilson's of 3 in 4
    assert pairwise_agreement([[0.0, 1.0], [0.0, 1.0]])[0, 1].value == 1, "neither prefers a side of a tie"


def test_by_kl_partitions_texts() -> None:
    kl = [4.0, 0.0, 1.0, 0.0, 3.0, 2.0]
    parts = average_by_kl([4.0, 0.0, 10.0, 2.0, 3.0, 20.0], kl, list("aabbcc"), seed=1, max_parts=3)
    assert [(part["low"], part["high"], part["n"], part["value"]) for part in parts] == [
        (0.0, 0.0, 2, 1.0), (1.0, 2.0, 2, 15.0), (3.0, 4.0, 2, 3.5),
    ]  # fmt: skip
    assert [part["kl"] for part in parts] == [0.0, 1.5, 3.5]
    assert parts[0]["ci95"] == [0.0, 2.0], "prompts a and b are resampled"
    assert [part["n"] for part in average_by_kl([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], "abc", seed=1)] == [3], (
        "equal ones share"
    )


# Ensemble members


def make_run_context(tmp_path: Path, recipe: str = "tiny-world", **reward: object) -> RunContext:
    hub = Hub("local", None, "of no concern here")
    return RunContext(
        load_recipe(recipe), tmp_path, hub, "local", publish=False, flags={"recipe": {}, "reward": reward}
    )


def test_ensemble_member_changes_seed_and_keeps_pairs(tmp_path: Path) -> None:
    run = make_run_context(tmp_path, learning_rate="1e-4")
    member_run = run_with_seed(run, 4)
    own, other = run.settings("reward"), member_run.settings("reward")
    assert (own.trainer.seed, other.trainer.seed) == (1, 4)
    assert pairs_seed(own) == pairs_seed(other) == 1
    differing = {key for key in other.resolved if other.resolved[key] != own.resolved.get(key)}
    assert differing == {"seed", "pairs_seed"}
    assert member_run.record("reward").path == tmp_path / "ensemble" / "seed-4" / "reward"
    assert {member_run.record(stage).path for stage in ("data", "sft", "eval")} == {
        tmp_path / stage for stage in ("data", "sft", "eval")
    }
    assert pairs_seed(run_with_seed(make_run_context(tmp_path, pairs_seed="9"), 4).settings("reward")) == 9
    unpaired = run_with_seed(make_run_context(tmp_path, "product-remarks"), 2).settings("reward")
    assert "pairs_seed" not in unpaired.resolved, "its pairs are not simulated"


def test_ensemble_requires_held_out_pairs(tmp_path: Path) -> None:
    check(make_run_context(tmp_path))
    with pytest.raises(ZooError, match="holds out no pairs"):
        check(make_run_context(tmp_path, dataset_test_split="null"))
