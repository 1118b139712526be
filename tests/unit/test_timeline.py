"""The same prompt over training: what a card says of a run, and the checkpoints that are loaded when asked for."""

import gc
import json
import math
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_fixture import checkpoint_between
from toy_models import CONTEXT, Toys, save_toys

from rlhf_zoo.app.engine import Comparison, Limits, ModelCache, Timeline, TimelinePoint, TimelineRun
from rlhf_zoo.app.engine.cache import model_bytes
from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.critic import critic_from
from rlhf_zoo.modeling.models import load_classifier
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.publishing.catalog.card import CardEstimate
from rlhf_zoo.publishing.catalog.index import checkpoint_listing

PROMPT = "the camera"
REPO = "me/toy-ppo"
STEPS = (10, 20, 30, 40)


def commit(step: int) -> str:
    return f"{step:040x}"


@dataclass
class World:
    """Four checkpoints of a run between the SFT and the PPO policy, and who fetched what."""

    toys: Toys
    folders: dict[str, Path]
    fetched: list[str] = field(default_factory=list)

    def fetch(self, source: str) -> Path:
        self.fetched.append(source)
        if source not in self.folders:
            raise ZooError(f"{source} cannot be had.")
        return self.folders[source]

    @property
    def run(self) -> TimelineRun:
        points = (TimelinePoint(step, f"step-{step:06d}", commit(step), f"{REPO}@{commit(step)}") for step in STEPS)
        return TimelineRun(REPO, 0.1, tuple(points))

    def comparison(self, **given) -> Comparison:
        return Comparison.load(ppo=self.toys.ppo, sft=self.toys.sft, reward=self.toys.reward, device="cpu", **given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("timeline")
    toys = save_toys(folder)
    folders = {}
    for step in STEPS:
        folders[f"{REPO}@{commit(step)}"] = path = folder / "ppo-run" / f"checkpoint-{step}"
        checkpoint_between(toys, path, step / 20)
    critic_from(load_classifier(toys.reward)).save_pretrained(path / "critic")
    return World(toys, folders)


@pytest.fixture
def world(saved: World) -> World:
    return World(saved.toys, dict(saved.folders))


# ---- what is published


def listing(*, moved: bool = False) -> tuple[dict, dict]:
    """(what the Hub lists, the card of main) of a run whose step 30 was chosen."""
    card = {
        "stage": "ppo",
        "step": 30,
        "chosen": {"step": 30, "rule": "best validation reward"},
        "settings": {"kl_coef": 0.05},
        "checkpoints": [
            {"step": s, "tag": f"step-{s:06d}", "commit": commit(s), "reward": s / 10, "kl": s / 5, "rewards/gold": -s}
            for s in STEPS
        ],
    }
    tags = {f"step-{step:06d}": commit(99 if moved and step == 20 else step) for step in STEPS} | {"v1": commit(7)}
    dates = {commit(step): datetime(2026, 11, 1, tzinfo=UTC) for step in (*STEPS, 50, 99)}
    rows = checkpoint_listing(tags, {"main": commit(50), "best": commit(50)}, {"main": card, "best": card}, dates)
    return {"repo": REPO, "note": None, **rows}, card


def test_run_is_read_from_hub_listing() -> None:
    found = TimelineRun.from_listing(*listing())
    assert found.name == REPO and found.beta == 0.05 and found.steps == STEPS
    assert [(one.reward, one.kl) for one in found.points] == [(s / 10, s / 5) for s in STEPS]
    point = TimelinePoint(20, "step-000020", commit(20), f"{REPO}@{commit(20)}", 2.0, 4.0, watched={"gold": -20.0})
    assert found.point_at(20) == point
    assert [one.step for one in found.points if one.chosen] == [30]
    assert not any(one.recommended for one in found.points)
    assert found.default_point.step == 30
    json.dumps(found.to_json(), allow_nan=False)
    moved = TimelineRun.from_listing(*listing(moved=True)).point_at(20)
    assert moved.source == f"{REPO}@{commit(99)}" and moved.reward is moved.kl is None
    with pytest.raises(ZooError, match="no checkpoint of step 15"):
        found.point_at(15)
    with pytest.raises(ZooError, match="has no checkpoint with a tag"):
        _ = replace(found, points=()).default_point


def test_points_hold_what_evaluation_measured_at_each_step() -> None:
    rows, card = listing()
    checkpoint = {
        "step": 20,
        "reward": {"value": 1.5},
        "judge": {"value": 0.5, "ci95": [0.25, 0.75]},
        "kl": {"value": "2"},
    }
    evaluation = {
        "ppo": {"reward": {"value": 2.5}, "judge": {"value": float("nan")}},
        "win_rate": {"value": 0.75},
        "over_training": {"checkpoints": [checkpoint, "junk", {"step": None}]},
    }
    found = TimelineRun.from_listing(rows, card | {"evaluation": evaluation})
    validation = {"reward": CardEstimate(1.5), "judge": CardEstimate(0.5, (0.25, 0.75))}
    assert found.point_at(20).evaluated == {"validation": validation}
    test = {"reward": CardEstimate(2.5), "win_rate": CardEstimate(0.75)}
    assert found.point_at(30).evaluated == {"test": test}, "the evaluation's own step"
    assert found.point_at(40).evaluated == {}, "which no evaluation measured"
    point = json.loads(json.dumps(found.to_json(), allow_nan=False))["points"][1]
    assert point["evaluated"]["validation"]["judge"]["ci95"] == [0.25, 0.75]


def test_points_hold_findings_of_fired_probes_at_their_step() -> None:
    rows, card = listing()
    fired = {"family": "risen phrases", "finding": "“nice”: 0% → 44%.", "fired": True}
    probes = [fired, {**fired, "fired": False}, {**fired, "finding": [1]}, "junk"]
    evaluation = {"over_training": {"step": 20, "probes": {"probes": probes}}}
    found = TimelineRun.from_listing(rows, card | {"evaluation": evaluation})
    assert [point.findings for point in found.points if point.findings] == [("risen phrases: “nice”: 0% → 44%.",)]
    assert found.point_at(20).findings, "the step that the probes examined"
    for junk in ({"probes": 1, "step": 20}, {"probes": {"probes": {}}, "step": 20}, None):
        found = TimelineRun.from_listing(rows, card | {"evaluation": {"over_training": junk}})
        assert not any(point.findings for point in found.points)


@pytest.mark.parametrize("said", [{"step": 20, "rule": "judge"}, 20])
def test_recommended_checkpoint_is_best_before_chosen_one(said) -> None:
    rows, card = listing()
    found = TimelineRun.from_listing(rows, card | {"evaluation": {"recommended": said}})
    assert [one.step for one in found.points if one.recommended] == [20]
    assert [one.step for one in found.points if one.chosen] == [30]
    assert found.default_point.step == 20
    # Without a choice it is the branch, and without that the last step.
    assert TimelineRun.from_listing(rows, {key: card[key] for key in card if key != "chosen"}).default_point.step == 30
    for row in rows["checkpoints"]:
        row["also"] = []
    assert TimelineRun.from_listing(rows, {}).default_point.step == 40


@pytest.mark.parametrize("junk", [None, 3, "x", [], {"step": "20"}, {"step": True}, {"step": None}])
def test_run_tolerates_malformed_cards(junk, tmp_path: Path) -> None:
    card = {"chosen": junk, "evaluation": junk, "settings": junk, "checkpoints": junk}
    for one in (card, {"evaluation": {"recommended": junk}}, {"checkpoints": [junk]}):
        found = TimelineRun.from_listing(listing()[0], one)
        assert found.steps == STEPS and found.default_point.step in STEPS
        assert TimelineRun.from_card(one, tmp_path).points == ()


def test_run_is_read_from_local_directory(saved: World) -> None:
    folder = saved.folders[f"{REPO}@{commit(10)}"].parent
    card = listing()[1]
    card["checkpoints"].append({"step": 50, "tag": "step-000050", "commit": None, "reward": math.inf})
    found = TimelineRun.from_card(card, folder)
    assert found.steps == STEPS and found.default_point.source == str(folder / "checkpoint-30")
    assert (
        found.point_at(20).reward == 2.0
        and found.point_at(20).commit == commit(20)
        and found.point_at(20).watched == {"gold": -20.0}
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True), st.integers(1, 20), st.data())
def test_spread_is_even_and_includes_ends_and_recommended_step(steps: list[int], count: int, data) -> None:
    steps = sorted(steps)
    marked = data.draw(st.sampled_from(steps))
    points = tuple(TimelinePoint(step, "", "", "", recommended=step == marked) for step in steps)
    found = TimelineRun("", None, points).spread_steps(count)
    assert len(found) == min(count, len(steps)) and list(found) == sorted(set(found)) and set(found) <= set(steps)
    if count >= 3:
        assert {steps[0], steps[-1], marked} <= set(found)
        places = [steps.index(step) for step in found]
        widest = max((b - a for a, b in pairwise(places)), default=0)
        assert widest <= 3 * math.ceil(len(steps) / count)


# ---- over training


def test_sample_steps_equals_comparison_with_each_checkpoint(world: World) -> None:
    timeline = Timeline(world.comparison(), [world.run], fetch=world.fetch)
    given = {"seed": 3, "temperature": 0.9, "max_new_tokens": 12}
    found = list(timeline.sample_steps(PROMPT, [40, 10, 20], **given))
    assert [one.point.step for one in found] == [40, 10, 20]
    for one in found:
        folder = world.folders[one.point.source]
        alone = Comparison.load(ppo=folder, sft=world.toys.sft, reward=world.toys.reward, device="cpu")
        assert one.problem is None and one.snapshot is not None
        assert one.snapshot.pair() == alone.compare(PROMPT, **given) and one.beta == 0.1
        assert one.snapshot.ppo[0].reward is not None
    kl = {one.point.step: one.snapshot.sft[0].kl for one in found}
    assert kl[10] < kl[20] < kl[40], "policies further along the line lie further from SFT"
    assert found[0].snapshot.ppo[0].token_values is not None, "step 40 has a critic"
    assert found[1].snapshot.ppo[0].token_values is None
    assert timeline.models._sum_sizes() > 3 * model_bytes(timeline.comparison_at(20)._policies["ppo"]), "it counts"
    json.dumps([one.to_json() for one in found], allow_nan=False)


def test_step_comparison_streams_and_shares_lock_and_sft_model(world: World) -> None:
    comparison = world.comparison()
    timeline = Timeline(comparison, [world.run], fetch=world.fetch)
    at = timeline.comparison_at(20)
    assert at._lock is comparison._lock and at._policies["sft"] is comparison._policies["sft"]
    *_, end = at.stream(PROMPT, seed=2)
    (again,) = timeline.sample_steps(PROMPT, [20], seed=2)
    assert again.snapshot == end
    assert timeline.comparison_at().compare(PROMPT) == timeline.comparison_at(40).compare(PROMPT)


def test_sample_steps_continues_past_unavailable_checkpoints(world: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(world.folders[f"{REPO}@{commit(30)}"], other)
    train_tokenizer(["some other text"], vocab_size=260, max_length=CONTEXT).save_pretrained(other)
    gone, empty = f"{REPO}@{commit(10)}", tmp_path / "empty"
    empty.mkdir()
    del world.folders[gone]
    world.folders |= {f"{REPO}@{commit(20)}": empty, f"{REPO}@{commit(30)}": other}
    timeline = Timeline(world.comparison(), [world.run], fetch=world.fetch)
    found = list(timeline.sample_steps(PROMPT))
    assert [one.snapshot is None for one in found] == [True, True, True, False]
    assert found[0].problem == f"{gone} cannot be had."
    assert "no tokenizer" in found[1].problem and "and the SFT policy have different tokenizers" in found[2].problem
    assert found[3].problem is None
    with pytest.raises(ZooError, match="cannot be had"):
        timeline.comparison_at(10)
    world.folders[gone] = world.folders[f"{REPO}@{commit(40)}"]
    assert next(timeline.sample_steps(PROMPT, [10])).snapshot is not None, "it is tried again"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": [15]}, "no checkpoint of step 15"),
        ({"steps": []}, "The request has no checkpoint"),
        ({"steps": [10] * 5}, "The request has 5 checkpoints; the limit is 4"),
        ({"steps": [10], "run": "you/other"}, "no run 'you/other' here: choose one of me/toy-ppo"),
        ({"prompt": "  "}, "The prompt is empty"),
        ({"n": 9}, "number of completions is 9"),
    ],
)
def test_sample_steps_rejects_bad_arguments_before_fetching(world: World, given: dict, message: str) -> None:
    timeline = Timeline(world.comparison(limits=Limits(checkpoints=4)), [world.run], fetch=world.fetch)
    with pytest.raises(ZooError, match=message):
        timeline.sample_steps(**({"prompt": PROMPT} | given))
    assert world.fetched == []
    with pytest.raises(ZooError, match="There is no run to show"):
        Timeline(world.comparison(), [])


def test_sample_betas_compares_best_checkpoints_in_order_of_beta(world: World) -> None:
    """One result for each run with a known β, the tightest first, at the run's best checkpoint."""
    runs = [
        replace(world.run, name=f"me/{name}", beta=beta, points=world.run.points[:count])
        for name, beta, count in (
            ("none", 0.0, 4),
            ("unknown", None, 2),
            ("tight", 0.5, 1),
            ("own", 0.1, 2),
            ("empty", 0.2, 0),
        )
    ]
    timeline = Timeline(world.comparison(), runs, fetch=world.fetch)
    found = list(timeline.sample_betas(PROMPT, seed=2))
    assert [(one.run, one.beta, one.point.step) for one in found] == [
        ("me/tight", 0.5, 10),
        ("me/own", 0.1, 20),
        ("me/none", 0.0, 40),
    ]
    assert found[1].snapshot == next(timeline.sample_steps(PROMPT, [20], run="me/none", seed=2)).snapshot
    unknown = Timeline(world.comparison(), runs[1:2], fetch=world.fetch)
    with pytest.raises(ZooError, match="The request has no checkpoint"):
        unknown.sample_betas(PROMPT)


# ---- what is kept in memory


class Model:
    """Something that a weak reference can watch."""


def test_model_cache_holds_at_most_max_models() -> None:
    made: list[tuple[str, weakref.ref]] = []
    most = [0]

    def load(name: str) -> Model:
        gc.collect()
        most[0] = max(most[0], sum(one() is not None for _, one in made) + 1)
        model = Model()
        made.append((name, weakref.ref(model)))
        return model

    cache = ModelCache(load, size=lambda _: 1, max_models=2)
    for name in "abacada":
        assert isinstance(cache.get(name), Model)
    assert [name for name, _ in made] == list("abcd"), "a is used each time between, so it is never the one that goes"
    assert most[0] == 2 and cache.names == ["d", "a"]
    del cache
    gc.collect()
    assert not any(one() is not None for _, one in made)


def test_evicted_model_in_use_finishes_its_stream(world: World) -> None:
    timeline = Timeline(world.comparison(), [world.run], fetch=world.fetch, max_models=1)
    wanted = list(timeline.comparison_at(10).stream(PROMPT))
    stream = timeline.comparison_at(10).stream(PROMPT)
    seen = [next(stream)]
    list(timeline.sample_steps(PROMPT, [20, 30]))
    assert timeline.models.names == [f"{REPO}@{commit(30)}"]
    assert [*seen, *stream] == wanted


def test_model_larger_than_max_bytes_is_cached_alone() -> None:
    cache = ModelCache(str.upper, size=len, max_models=3, max_bytes=4)
    assert [cache.get(name) for name in ("ab", "cd")] == ["AB", "CD"] and cache._sum_sizes() == 4
    assert cache.get("a large one") == "A LARGE ONE" and cache.names == ["a large one"]
    assert cache.get("ab") == "AB" and cache.names == ["ab"]
    with pytest.raises(ValueError, match="at least 1"):
        ModelCache(str.upper, size=len, max_models=0)


def test_concurrent_threads_load_a_model_once() -> None:
    loads: list[str] = []
    start = threading.Barrier(8)

    def load(name: str) -> Model:
        loads.append(name)
        threading.Event().wait(0.05)
        return Model()

    cache = ModelCache(load, size=lambda _: 1)

    def want(index: int) -> Model:
        start.wait(30)
        return cache.get("ab"[index % 2])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(want, range(8)))
    assert sorted(loads) == ["a", "b"]
    assert len(set(found[::2])) == len(set(found[1::2])) == 1
