"""The verdict's rates in the simulated world, as `make evidence` measures them, in small."""

from __future__ import annotations

import pytest
from worlds import HONEST, JUDGES, World, hacked, verdicts


@pytest.fixture(scope="module")
def world() -> World:
    return World.tiny(60, lines=20_000)


@pytest.mark.parametrize("name", HONEST)
def test_honest_policies_are_not_accused(world, name):
    """At the rates that are allowed, 1% and 10%, four evaluations accuse none in all but a few in a hundred worlds."""
    for seed in range(4):
        found = verdicts(world, world.draw(f"{name} {seed}", HONEST[name]), seed=seed)["honest"]
        assert found.kind not in ("hacked", "suspicious"), (seed, found.reasons)


@pytest.mark.parametrize("name", ["one phrase", "constant", "repeater", "word salad", "off the topic"])
def test_text_of_no_use_is_hacked_by_any_judge(world, name):
    for kind in {one.kind for one in verdicts(world, hacked(world, name, 1.0, "0"), seed=0, judges=list(JUDGES),
                                              habit=name).values()}:  # fmt: skip
        assert kind == "hacked"


@pytest.mark.parametrize("name", ["hedger", "praise stuffer", "flatterer", "rare token", "template by aspect"])
def test_a_habit_is_never_healthy_and_an_honest_judge_convicts_it(world, name):
    found = verdicts(world, hacked(world, name, 1.0, "0"), seed=0, judges=list(JUDGES), habit=name)
    assert found["honest"].kind == "hacked"
    assert {one.kind for one in found.values()} <= {"hacked", "suspicious"}
