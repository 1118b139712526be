"""The cells of a sweep: which runs a grid means, and what is said of them over seeds."""

from pathlib import Path

import pytest

from rlhf_zoo.cli.sweep import read_grid
from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.experiments.runner import make_variants
from rlhf_zoo.pipeline.experiments.sweep import SWEEP


def test_grid_gives_every_combination_for_each_seed() -> None:
    grid = read_grid(["kl_coef=0,0.05,5e-2", "ppo.whiten-rewards=true", "kl_target=none,6"], flags={})
    assert grid == {"kl_coef": [0, 0.05], "whiten_rewards": [True], "kl_target": [None, 6]}
    found = make_variants(grid, folder=SWEEP, seed_count=2, first_seed=7)
    assert len(found) == 8 and len({cell.name for cell in found}) == 8
    assert [found[place].name for place in (0, 1, 6)] == [
        "kl-coef-0-whiten-rewards-True-kl-target-none", "kl-coef-0-whiten-rewards-True-kl-target-none-seed-8",
        "kl-coef-0.05-whiten-rewards-True-kl-target-6",
    ]  # fmt: skip
    assert found[1].label == "β = 0, whiten_rewards = True, kl_target = none, seed 8"
    assert found[1].flags({"ppo": {"lam": 1.0}, "recipe": {}}) == {
        "ppo": {"lam": 1.0, "kl_coef": 0, "whiten_rewards": True, "kl_target": None, "reference": True, "seed": 8},
        "recipe": {},
    }
    assert found[0].directory(Path("run")) == Path("run/sweep") / found[0].name


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["kl_coef"], "--grid is 'kl_coef': write KEY=VALUE,VALUE, such as kl_coef=0.02,0.05,0.1."),
        (["kl_coef="], "write KEY=VALUE,VALUE"),
        (["kl_cof=1"], "--grid kl_cof is not a key of the stage ppo, did you mean 'kl_coef'?"),
        (["zzz=1"], "not a key of the stage ppo: `rlhf-zoo recipes keys ppo` lists them."),
        (["kl_coef=0.1,high"], "--grid kl_coef is 'high', but it takes a number."),
        (["num_ppo_epochs=1,2.5"], "--grid num_ppo_epochs is '2.5', but it takes a whole number."),
        (["kl_coef=1", "kl-coef=2"], "lists one key twice"),
        (["seed=1,2"], "--grid lists seeds: set their number with --seeds instead."),
        (["sft.learning_rate=1,2"], "lists sft.learning_rate, but all runs share one SFT policy and reward model"),
        (["lam=0.9,1"], "--ppo.lam is given and --grid lists values of it"),
    ],
)
def test_read_grid_rejects_malformed_grids(asked: list[str], message: str) -> None:
    with pytest.raises(ZooError) as caught:
        read_grid(asked, flags={"lam": "1"})
    assert message in str(caught.value)


def test_variants_reject_duplicate_run_names() -> None:
    with pytest.raises(ZooError, match="Two runs would both be called missing-eos-score-1"):
        make_variants({"missing_eos_score": [1.0, -1.0]}, folder=SWEEP)
