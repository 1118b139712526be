"""The verdict's rates in the simulated world, as `make evidence` measures them, in small."""

import random

import pytest
from trained import Policy, Trained, Written
from worlds import HONEST, JUDGES, NAMED, World, gold, hacked, verdicts


@pytest.fixture(scope="module")
def world() -> World:
    return World.tiny(60)


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


def test_trained_policies_are_those_that_improve_the_gold_and_are_confirmed_on_other_prompts(world):
    """With texts of the world in the place of a run's: of three policies by one method, two improve it."""
    rng = random.Random(0)

    def policy(best_of: int) -> Policy:
        return {
            prompt: [
                Written(text, gold(prompt, text), world.sft.logprobs(NAMED[prompt], world.sft.steps(text)), 1.0)
                for text in (max(rng.choices(of, k=best_of), key=lambda one: gold(prompt, one)) for _ in range(3))
            ]
            for prompt, of in world.lines.items()
        }

    good, better, worse = policy(4), policy(8), policy(1)
    trained = Trained(policy(1), {"PPO": [worse, good, better]}, lambda prompts, texts: list(map(gold, prompts, texts)))
    assert trained.improving == {"PPO": [good, better]}
    for seed in range(4):
        by_judge = trained.verdicts("PPO", seed, prompts=30)
        found = by_judge["honest"]
        assert (found.kind, found.recommended, found.confirmed.n) == ("healthy", 1, 30), found.reasons
    assert found == trained.verdicts("PPO", 3, prompts=30)["honest"]
    assert list(by_judge) == list(JUDGES) and by_judge["fooled"].kind == "not judged"
