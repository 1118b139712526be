"""`rlhf-zoo baseline` on a toy run: each method is trained, measured like PPO, compared with PPO, and resumed."""

import html
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import datasets
import numpy as np
import pytest
import yaml
from json_keys import unexplained
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.cli import main as cli
from rlhf_zoo.cli.baseline import METHOD_OPTIONS
from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.experiments import baseline, baseline_methods
from rlhf_zoo.pipeline.experiments.baseline_methods import draw_samples
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.rewards import Rewards
from rlhf_zoo.runs.record import StageRecord, fingerprint

pytestmark = pytest.mark.usefixtures("quick_plots")

ANSWERED = "rule:toy_run:answered"
EVALUATION = {"judge": "toy_run:judge", "judges": [ANSWERED], "prompts": 6, "samples": 2}
REWARDED: list[tuple[str, int]] = []
FROZEN = ["--learning_rate", "1e-30"]  # trains without changing the weights


def recorded(
    completions: Sequence[str], completion_ids: Sequence[Sequence[int]], answer: Sequence[str], **_: Any
) -> list[float]:
    """Records each completion with its number of tokens; rewards it if it starts with the column `answer`."""
    REWARDED.extend(zip(completions, map(len, completion_ids), strict=True))
    return [float(text.startswith(wanted)) for text, wanted in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe `toy` and its finished run: PPO with 3 updates of 4 completions, and its evaluation."""
    folder = tmp_path_factory.mktemp("toy")
    cache, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder / "cache"
    try:
        rewards = {"reward_funcs": ["test_baseline:recorded"], "reward_weights": [1, 2], "missing_eos_penalty": 1.0}
        recipe = make_recipe(folder, ppo=rewards, shared={"evaluation": EVALUATION})
        save_start(folder)
        start = {"model_name_or_path": str(folder / "run/sft/checkpoint-4"), "max_steps": 4}
        before = {"bf16": False, "dataset_test_split": None, "packing": False, "use_cpu": True, "report_to": "none"}
        (recipe / "sft.yaml").write_text(yaml.safe_dump({**before, **start, "per_device_train_batch_size": 4}))
        context = make_context(folder)
        for stage in ("sft", "reward"):
            context.record(stage).write(resolved=dict(context.settings(stage).resolved))
        REWARDED.clear()
        assert ppo.run(context)
        (folder / "generated").write_text(str(sum(tokens for _, tokens in REWARDED)))
        assert evaluate.run(context)
    finally:
        datasets.config.HF_DATASETS_CACHE = cache
    return folder


Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(finished: Path, tmp_path: Path, no_hub: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the run for one test. The recipe and its data are shared."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", finished / "cache")
    shutil.copytree(finished / "run", tmp_path / "run")
    REWARDED.clear()
    return tmp_path


@pytest.fixture
def compare(finished: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    def compare(*arguments: str) -> dict[str, Any]:
        run = str(folder / "run")
        words = ["baseline", str(finished / "toy"), "--output_dir", run, "--json", *arguments]
        monkeypatch.setattr(sys, "argv", ["rlhf-zoo", *words])  # run.json records the command
        cli.cli.main(words, standalone_mode=False)
        return json.loads((folder / "run/baseline/frontier.json").read_text())

    return compare


def read_samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_baseline_method_is_compared_with_ppo(
    folder: Path, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    compare("--method", "best-of-n", "--pool", "4")
    compare("--method", "dpo", "--beta", "0.1", "--seeds", "2")
    compare("--method", "sft", "--seeds", "2")
    compare("--method", "rejection", "--seeds", "1")
    capsys.readouterr()
    frontier = compare("--method", "rloo", "--beta", "0.05,0.5", "--seeds", "1")
    run = folder / "run" / "baseline"
    assert json.loads(capsys.readouterr().out) == frontier
    assert tuple(frontier["methods"]) == baseline.METHODS == tuple(METHOD_OPTIONS)
    labels = {method: [point["label"] for point in points] for method, points in frontier["methods"].items()}
    assert labels == {
        "best-of-n": ["n = 1", "n = 2", "n = 4"],
        "sft": ["twice as long"],
        "rejection": ["on completions above the mean reward"],
        "dpo": ["β = 0.1"],
        "rloo": ["β = 0.05", "β = 0.5"],
    }
    assert [row["label"] for row in frontier["methods"]["dpo"][0]["seeds"]] == ["seed 1", "seed 2"]
    evaluation = json.loads((folder / "run/eval/evaluation.json").read_text())
    assert unexplained([frontier, evaluation]) == []
    for side in ("sft", "ppo"):
        for name in ("reward", "judge", "kl"):
            expected, actual = evaluation[side][name], frontier[side][name]
            assert actual["value"] == pytest.approx(expected["value"])
            assert actual["ci95"] == pytest.approx(expected["ci95"])
    assert frontier["ppo"]["win_rate"]["sft"]["value"] == pytest.approx(evaluation["win_rate"]["value"])
    assert frontier["ppo"]["win_rate"]["ppo"]["value"] == 0.5
    assert frontier["fits"] == {}, "a curve needs three values of n above 1"
    assert set(frontier["equal_compute"]) == set(METHOD_OPTIONS) == {*frontier["equal_kl"], "sft"}
    assert {method: command.rpartition("--method ")[2] for method, command in frontier["commands"].items()} == {
        "best-of-n": "best-of-n --pool 4",
        "sft": "sft --seeds 2",
        "rejection": "rejection --seeds 1",
        "dpo": "dpo --beta 0.1 --seeds 2",
        "rloo": "rloo --beta 0.05,0.5 --seeds 1",
    }
    assert (run / "frontier.png").read_bytes().startswith(b"\x89PNG")
    rloo = json.loads((run / "rloo" / "baseline.json").read_text())
    assert rloo["method"] == "rloo" and rloo["points"] == frontier["methods"]["rloo"]

    before = {path: path.stat().st_mtime_ns for path in run.rglob("run.json")}
    REWARDED.clear()
    again = compare("--method", "rloo", "--beta", "0.05,0.5", "--seeds", "1")
    assert REWARDED == [] and before == {path: path.stat().st_mtime_ns for path in run.rglob("run.json")}
    assert {**again, "command": "", "commands": {}} == {**frontier, "command": "", "commands": {}}


def assert_measured_like_sft(
    folder: Path, method: str, frontier: dict[str, Any], *, name: str = "beta-0.1-seed-1"
) -> None:
    """Checks that an unchanged policy repeats SFT's completions: prompts and seed are those of the eval stage."""
    ours = read_samples(folder / "run/baseline" / method / name / "samples.jsonl")
    theirs = read_samples(folder / "run/eval/samples.jsonl")
    assert len(ours) == 12
    for row, expected in zip(ours, theirs, strict=True):
        sft = expected["sft"]
        assert (row["prompt"], row["completion"]) == (expected["prompt"], sft["completion"])
        assert row["reward"] == pytest.approx(sft["reward"]) and row["judge"] == sft["judge"]
        assert row["kl"] == pytest.approx(0.0, abs=1e-4)
    point = frontier["methods"][method][0]
    assert point["win_rate"]["sft"]["value"] == 0.5 and point["extra_metrics"] == frontier["sft"]["extra_metrics"]


def test_rejection_trains_on_best_of_equally_many_completions(
    finished: Path, folder: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps completions that ended with a reward above the mean, and trains with PPO's steps and minibatches.

    After an interrupt it does not sample again. With a learning rate of almost 0 it equals SFT.
    """
    arguments, run = ("--method", "rejection", "--seeds", "1", *FROZEN), folder / "run/baseline/rejection/seed-1"

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(baseline_methods, "run_sft_variant", interrupt)
        with pytest.raises(click.Abort):
            compare(*arguments)
    assert StageRecord(run).read()["status"] == "interrupted"
    rewarded_texts = [text for text, _ in REWARDED]
    assert len(rewarded_texts) == 12, "as many as PPO's three rollouts of four"
    REWARDED.clear()
    frontier = compare(*arguments)
    assert len(REWARDED) == 12, "only the evaluation computes rewards"
    assert_measured_like_sft(folder, "rejection", frontier, name="seed-1")
    lines, sampled = read_samples(run / "lines/train.jsonl"), StageRecord(run).read()["sampled"]
    prompts = [row["prompt"] for row in read_samples(finished / "data/prompts/train.jsonl")]
    assert 0 < len(lines) == sampled["kept"] < sampled["completions"] == 12
    assert {(line["prompt"], line["completion"]) for line in lines} <= set(zip(prompts, rewarded_texts, strict=True))
    trained = StageRecord(run / "sft").read()
    expected = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    expected["learning_rate"] = 1e-30
    assert trained["status"] == "finished" and expected.items() <= trained["resolved"].items()
    assert not (run / "sft/README.md").exists(), "trl's model card is not kept"
    models = StageRecord(run).read()["compute"]["models"]
    mean = np.mean([len(line["prompt"]) + len(line["completion"]) + 1 for line in lines])
    assert models["policy"]["trained"] == pytest.approx(6 * 4 * mean)
    assert models["policy"]["read"] == sampled["prompt_tokens"] == sum(map(len, prompts))
    assert models["policy"]["generated"] == sampled["completion_tokens"]
    assert models["reward"]["read"] == sampled["prompt_tokens"] + sampled["completion_tokens"]


def test_longer_sft_baseline_equals_stage_with_twice_the_steps(folder: Path, compare: Compare) -> None:
    frontier = compare("--method", "sft", "--seeds", "1", *FROZEN)
    assert_measured_like_sft(folder, "sft", frontier, name="seed-1")
    run = folder / "run/baseline/sft/seed-1"
    assert StageRecord(run / "sft").read()["resolved"]["max_steps"] == 8
    training = frontier["methods"]["sft"][0]["compute"]["training"]["models"]
    assert set(training) == {"policy", "reward"} and training["reward"]["read"] == 0
    assert training["policy"]["trained"] == 4 * 4 * 7, "four more steps on texts of six letters and EOS"


def test_changed_evaluation_remeasures_without_training(folder: Path, compare: Compare) -> None:
    """A changed reward is an error. Two learning rates of one method are two points."""
    arguments, run = ("--method", "rejection", "--seeds", "1"), folder / "run/baseline/rejection/seed-1"
    first = compare(*arguments)
    record, inner = StageRecord(run), StageRecord(run / "sft")
    inner.write(mark="first")
    old = {**record.read()["resolved"], "evaluation_seed": 99}
    record.write(resolved=old, fingerprint=fingerprint(old))
    REWARDED.clear()
    again = compare(*arguments)
    assert again["methods"] == first["methods"] and inner.read()["mark"] == "first"
    assert len(REWARDED) == 12, "only the evaluation computes rewards"
    other = {**record.read()["resolved"], "paid_by": {"reward_funcs": ["another"]}}
    record.write(resolved=other, fingerprint=fingerprint(other))
    with pytest.raises(ZooError, match=r"seed-1 has a run with paid_by.reward_"):
        compare(*arguments)
    record.clear()
    compare(*arguments)
    assert inner.read()["status"] == "finished" and "mark" not in inner.read()

    shutil.copytree(run, run.with_name("seed-2"))
    beside = StageRecord(run.with_name("seed-2"))
    resolved = beside.read()["resolved"]
    beside.write(resolved={**resolved, "arguments": {**resolved["arguments"], "learning_rate": 0.5}})
    points = compare(*arguments)["methods"]["rejection"]
    label = "on completions above the mean reward, learning rate"
    assert [point["label"] for point in points] == [f"{label} 0.003", f"{label} 0.5"]


def test_ppo_card_lists_baselines_of_its_evaluation(folder: Path, compare: Compare) -> None:
    ppo = folder / "run/ppo"
    frontier = compare("--method", "best-of-n", "--pool", "2")
    compare("--method", "sft", "--seeds", "1")
    card = html.unescape((ppo / "README.md").read_text())
    rows = card.partition("### Comparison with simpler methods\n\n")[2].partition("\n\n")[0].splitlines()
    names = ["policy", "---", "SFT", "**PPO**", "best-of-n, n = 1", "best-of-n, n = 2", "sft, twice as long"]
    assert [row.split("|")[1].strip() for row in rows] == names
    assert {row.count("|") for row in rows} == {8} and ANSWERED in rows[0]
    assert f" {frontier['ppo']['kl']['value']:.3f} |" in rows[3] and " ≤ 0.193 |" in rows[5]
    assert "Made by `rlhf-zoo baseline toy --json --method best-of-n --pool 2`,\n`rlhf-zoo baseline toy" in card
    assert str(folder) not in card
    assert "plots/baselines.png" in card and (ppo / "plots/baselines.png").is_file()
    baselines = json.loads((ppo / "rlhf_card.json").read_text())["baselines"]
    assert baselines["ppo"] == frontier["ppo"] and list(baselines["methods"]) == ["best-of-n", "sft"]
    record = StageRecord(folder / "run/eval")
    record.write(fingerprint="another")
    assert (
        "Comparison with simpler methods" not in make_card(ppo).read_text()
        and not (ppo / "plots/baselines.png").exists()
    )


def test_rejection_fails_when_no_reward_exceeds_mean(finished: Path, folder: Path) -> None:
    opened = baseline.open_finished_run(replace(make_context(finished), directory=folder / "run"), "rejection")
    same = replace(opened.evaluator, rewards=Rewards([lambda completions, **_: [1.0] * len(completions)]))
    with pytest.raises(
        ZooError, match=r"Of 5 completions of the SFT policy [0-5] ended, but none .* the mean of all, 1, so"
    ):
        draw_samples(same, opened.load_prompts(), 5, seed=1)


def test_rloo_samples_as_many_completions_as_ppo(folder: Path, compare: Compare) -> None:
    assert_measured_like_sft(folder, "rloo", compare("--method", "rloo", "--beta", "0.1", "--seeds", "1", *FROZEN))
    assert len(REWARDED) == 3 * 4 + 6 * 2, "three rollouts of four completions, and the evaluation"
    document = StageRecord(folder / "run/baseline/rloo/beta-0.1-seed-1").read()
    models = document["compute"]["models"]
    tokens = models["reference"]["read"]
    assert models["policy"]["trained"] == 2 * tokens, "two epochs, like PPO"
    assert models["reward"]["read"] == tokens
    assert models["policy"]["read"] + models["policy"]["generated"] == 2 * tokens
    assert models["policy"]["generated"] == sum(count for _, count in REWARDED[:12])
    ppo_rows = [row for row in StageRecord(folder / "run/ppo").metrics() if "episodes" in row]
    assert ppo_rows[-1]["episodes"] == 12


def test_dpo_is_compared_with_ppo_of_same_sft_policy_only(folder: Path, compare: Compare) -> None:
    """Also with runs of an ablation, here equal to SFT; a run that differs in more than β is left out."""
    compare("--method", "best-of-n", "--pool", "2")
    record = StageRecord(folder / "run/baseline/best-of-n")
    resolved = record.read()["resolved"]
    record.write(resolved={**resolved, "parents": {**resolved["parents"], "sft": "another"}})
    samples = read_samples(folder / "run/eval/samples.jsonl")
    for name, keys in (
        ("kl-coef-0", {"kl_coef": 0.0, "reference": True}),
        ("kl-coef-9", {"kl_coef": 9.0}),
        ("kl-coef-8", {"kl_coef": 8.0, "max_steps": 2}),
        ("kl-coef-own-seed-7", {"seed": 7}),
    ):
        place = folder / "run/ablation" / name
        for stage in ("ppo", "eval"):
            shutil.copytree(folder / "run" / stage, place / stage)
        record = StageRecord(place / "ppo")
        record.write(resolved={**record.read()["resolved"], **keys})
        lines = [json.dumps({**row, "ppo": row["sft"]}) + "\n" for row in samples]
        (place / "eval/samples.jsonl").write_text("".join(lines))
    dpo = ("--method", "dpo", "--beta", "0.1", "--seeds", "1")
    frontier = compare(*dpo, *FROZEN)
    assert set(frontier["methods"]) == {"dpo"}, "best-of-n was of another SFT policy"
    assert_measured_like_sft(folder, "dpo", frontier)
    assert [point["label"] for point in frontier["ppo_ablation"]] == ["PPO, β = 0", "PPO, β = 9"]
    assert frontier["ppo_ablation"][0]["judge"] == frontier["sft"]["judge"]
    seeds = {row["label"]: row["judge"] for row in frontier["ppo"]["seeds"]}
    assert set(seeds) == {"seed 1", "seed 7"} and seeds["seed 7"] == frontier["sft"]["judge"]["value"]
    assert frontier["ppo"]["judge"]["value"] == pytest.approx(sum(seeds.values()) / 2)
    comparison = frontier["equal_kl"]["dpo"]
    assert not comparison["inside"] and "outside its range: KL" in comparison["reason"]
    assert comparison["farthest"] == frontier["methods"]["dpo"][0]["ppo_at_its_kl"]
    assert comparison["farthest"]["ppo_minus_this"]["judge"]["value"] == pytest.approx(0.0, abs=1e-2), "both equal SFT"

    with pytest.raises(
        ZooError, match=r"beta-0.1-seed-1 has a run with arguments.learning_rate = 1e-30.*or --restart\.$"
    ):
        compare(*dpo)
    assert compare(*dpo, "--restart")["methods"]["dpo"][0]["kl"]["value"] > 1e-4


def test_ppo_compute_is_read_from_run_record(finished: Path, folder: Path, compare: Compare) -> None:
    """Three updates of four completions: one pass over twelve prompts, two epochs each, four models."""
    frontier = compare("--method", "best-of-n", "--pool", "2", "--served", "0")
    generated = int((finished / "generated").read_text())
    rows = read_samples(finished / "data/prompts/train.jsonl")
    tokens = generated + sum(len(row["prompt"]) for row in rows)
    training = frontier["ppo"]["compute"]["training"]
    models = training["models"]
    assert models["policy"]["generated"] == pytest.approx(generated)
    assert models["policy"]["trained"] == models["critic"]["trained"] == pytest.approx(2 * tokens)
    assert models["critic"]["read"] == models["reference"]["read"] == models["reward"]["read"] == pytest.approx(tokens)
    best_of_n = frontier["methods"]["best-of-n"][1]["compute"]["training"]["models"]
    assert models["reward"]["trained"] == best_of_n["reward"]["trained"]
    assert frontier["ppo"]["compute"]["flops"] == training["flops"], "nothing is served"
    assert frontier["methods"]["best-of-n"][0]["compute"]["flops"] == 0


def test_best_of_n_resumes_after_interrupt(folder: Path, compare: Compare) -> None:
    frontier = compare("--method", "best-of-n", "--pool", "8")
    record = StageRecord(folder / "run/baseline/best-of-n")
    rows = record.metrics()
    pool = {name: np.array([row[name] for row in rows]) for name in ("reward", "judge")}
    assert pool["reward"].shape == (6, 8) and len(REWARDED) == 48
    points = frontier["methods"]["best-of-n"]
    assert points[0]["judge"]["value"] == pytest.approx(pool["judge"].mean())
    assert points[3]["reward"]["value"] == pytest.approx(pool["reward"].max(1).mean())
    assert [point["kl"]["is_bound"] for point in points] == [True] * 4
    assert points[3]["kl"]["value"] == pytest.approx(np.log(8) - 0.875)
    assert "break_even" not in points[0] and points[3]["break_even"] > points[1]["break_even"] * 0.1
    fits = frontier["fits"]["best-of-n"]
    assert all(fit["form"] == "best-of-n" and fit["points"] == 3 for fit in fits.values())
    gains = [point["reward"]["value"] - points[0]["reward"]["value"] for point in points]
    cost = frontier["filter"]
    assert cost is None or (cost["reward"] >= frontier["ppo"]["reward"]["value"] and cost["kl"] >= 0)
    assert (frontier["trivial"] or {"policies": [None]})["policies"]
    sqrt_kl = np.sqrt([point["kl"]["value"] for point in points])
    curve = sqrt_kl * (fits["proxy"]["alpha"]["value"] - fits["proxy"]["beta"]["value"] * sqrt_kl)
    np.testing.assert_allclose(np.subtract(gains, curve)[1:], fits["proxy"]["residuals"], atol=1e-9)

    record.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    record.write(status="interrupted")
    REWARDED.clear()
    again = compare("--method", "best-of-n", "--pool", "8")
    assert len(REWARDED) == 16, "the two prompts that were missing"
    assert again["methods"] == frontier["methods"]


def test_interrupt_keeps_finished_baselines(folder: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def interrupt_second_seed(opened: Any, trained: Any, *, desc: str) -> Any:
        measured.append(desc)
        if "seed 2" in desc:
            raise KeyboardInterrupt
        return measure(opened, trained, desc=desc)

    measure = baseline_methods._measure
    monkeypatch.setattr(baseline_methods, "_measure", interrupt_second_seed)
    arguments = ("--method", "dpo", "--beta", "0.1", "--seeds", "2")
    with pytest.raises(click.Abort):
        compare(*arguments)
    run = folder / "run/baseline/dpo"
    status = {path.name: StageRecord(path).read()["status"] for path in run.iterdir()}
    assert status == {"beta-0.1-seed-1": "finished", "beta-0.1-seed-2": "interrupted"}
    monkeypatch.setattr(baseline_methods, "_measure", lambda *a, **k: measured.append(k["desc"]) or measure(*a, **k))
    measured.clear()
    frontier = compare(*arguments)
    assert measured == ["evaluating dpo beta 0.1 seed 2"]
    assert len(frontier["methods"]["dpo"][0]["seeds"]) == 2


def test_baseline_rejects_incomparable_runs(folder: Path, compare: Compare) -> None:
    for arguments, message in (
        (("--method", "dpo", "--pool", "3"), "--pool is not an option of --method dpo: leave it out."),
        (("--method", "best-of-n", "--seeds", "3"), "--seeds is not an option of --method best-of-n: leave it out."),
        (("--method", "rejection", "--beta", "1"), "--beta is not an option of --method rejection: leave it out."),
        (("--method", "rloo", "--beta", "0.1,x"), "--beta lists 'x': use numbers"),
        (("--method", "dpo", "--ppo.kl_coef", "9"), "ran with a different kl_coef than this command"),
        (("--method", "sft", "--sft.max_steps", "9"), "The stage sft in .* ran with a different max_steps than this"),
        (("--method", "dpo", "--evaluation.samples", "3"), "ran with a different evaluation.samples than this command"),
        (("--method", "dpo", "--ppo.kl_coeff", "9"), "did you mean 'kl_coef'"),
    ):
        with pytest.raises(ZooError) as caught:
            compare(*arguments)
        assert re.search(message, str(caught.value)), arguments
    StageRecord(folder / "run/eval").write(status="running")
    with pytest.raises(ZooError, match="The stage eval is not finished in"):
        compare("--method", "best-of-n")
    assert not (folder / "run/baseline").exists()
