"""Rules that PPO was rewarded with, as the page shows their values."""

import json
import time
from pathlib import Path

import pytest
from toy_models import save_toys

from rlhf_zoo.app.engine import Comparison, RuleRewards
from rlhf_zoo.app.page import models as page_models
from rlhf_zoo.app.page.held_out import read_held_out_columns
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.publishing.catalog.lineage import Lineage
from rlhf_zoo.rewards import Rewards
from rlhf_zoo.rewards.verifiable import exact_match, length
from rlhf_zoo.runs.record import StageRecord

KNOWN = "the camera"


def lineage(folder: Path, **settings: object) -> Lineage:
    source = Checkpoint(str(folder), folder)
    return Lineage(source, source, None, {"settings": settings})


def stage(tmp_path: Path, **splits: list[dict]) -> Path:
    """A stage's folder, with the data of its run beside it."""
    StageRecord(tmp_path / "ppo").write(stage="ppo", recipe="x", status="finished")
    for split, rows in splits.items():
        path = tmp_path / "data" / "prompts" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "ppo"


def test_completion_reward_is_weighted_sum_of_rules(tmp_path: Path) -> None:
    toys = save_toys(tmp_path)
    rules = RuleRewards(Rewards([exact_match, length], weights=[10.0, 1.0]), {KNOWN: {"answer": "no such answer"}})
    comparison = Comparison.load(ppo=toys.ppo, sft=toys.sft, rules=rules)
    options = {"max_new_tokens": 6, "seed": 3}
    found = comparison.compare(KNOWN, **options)
    bare = Comparison.load(ppo=toys.ppo, sft=toys.sft).compare(KNOWN, **options)
    assert (found.sft.completion, found.ppo.completion) == (bare.sft.completion, bare.ppo.completion)
    assert [side.reward for side in (bare.sft, bare.ppo)] == [None, None]
    for side in (found.sft, found.ppo):  # the answer is wrong, so the length alone counts
        alone = RuleRewards(Rewards([length]), {})
        again = Comparison.load(ppo=toys.ppo, sft=toys.sft, rules=alone).compare(KNOWN, **options)
        expected = again.sft if side is found.sft else again.ppo
        assert side.reward == expected.reward is not None
    assert comparison.compare("a typed prompt", **options).ppo.reward is None, "nobody knows its right answer"
    model = Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward, rules=rules)
    assert model.rules is None and model.compare(KNOWN, **options).ppo.reward is not None, "a reward model goes first"


def test_only_first_call_of_rule_may_take_long(tmp_path: Path) -> None:
    """A rule may load a dictionary or a model at its first call."""
    seconds = iter([0.2, 0.0, 0.2, 0.2])

    def slow(completions: list[str], **_: object) -> list[float]:
        time.sleep(next(seconds))
        return [1.0] * len(completions)

    rules = RuleRewards(Rewards([slow], timeout=30.0), {}, later_timeout=0.05)
    toys = save_toys(tmp_path)
    comparison = Comparison.load(ppo=toys.ppo, sft=toys.sft, rules=rules)
    found = comparison.compare(KNOWN, max_new_tokens=2)
    assert (found.sft.reward, found.ppo.reward) == (1.0, 1.0)
    assert comparison.compare(KNOWN, max_new_tokens=2, seed=2).sft.reward is None, "the third call is too slow"


def test_held_out_columns_cover_every_prompt(tmp_path: Path) -> None:
    folder = stage(tmp_path, validation=[{"prompt": "v ", "solution": 1}], test=[{"prompt": "t", "solution": 2}, 3])
    found = read_held_out_columns(lineage(folder, columns={"answer": "solution"}))
    assert {prompt: row["answer"] for prompt, row in found.items()} == {"v": 1, "t": 2}
    assert read_held_out_columns(lineage(stage(tmp_path / "none"))) == {}


@pytest.mark.parametrize(
    ("names", "weights", "expected"),
    [
        (["exact_match"], None, ("exact_match",)),
        (["exact_match", "os:getcwd"], [1, 0], ("exact_match",)),
        (["exact_match", "os:getcwd"], [1, 1], None),
        (["exact_match"], [1, 1], None),
        (["exact_match"], [float("nan")], None),
        (["exact_match"], [0], None),
        (['format_match(pattern="(a|aa)+$")'], None, None),
        ("exact_match", None, None),
        ([7], None, None),
        (None, None, None),
    ],
)
def test_page_uses_only_rules_a_download_may_name(tmp_path: Path, names, weights, expected) -> None:
    card = lineage(stage(tmp_path), reward_funcs=names, reward_weights=weights)
    found = page_models._load_rules(card, hub=page_models.DEFAULT_HUB)
    assert (found.names if found else None) == expected
