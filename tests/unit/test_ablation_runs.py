"""Ablations: the variants that a list of values defines, their directories, and how outcomes are read."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from toy_run import make_context, make_recipe

from rlhf_zoo.app.engine import TimelineRun
from rlhf_zoo.cli.sweep import _show_figures, read_penalties
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.stats import Spread
from rlhf_zoo.fileio import read_json, write_json
from rlhf_zoo.pipeline import run_recipe as pipeline
from rlhf_zoo.pipeline.experiments.runner import (
    SHOWN_PROMPTS,
    Variant,
    group_by_setting,
    make_variants,
    open_part,
    read_outcome,
    read_own_outcome,
    run_variants,
    variant_fields,
)
from rlhf_zoo.pipeline.experiments.sweep import ABLATION, write_overview
from rlhf_zoo.pipeline.stages.interrupt import Stopped
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.publishing.catalog.ablation import Run
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.record import StageRecord


def test_variants_are_one_per_distinct_value() -> None:
    grid = make_variants(read_penalties("0, 0.02,0.5,2e-2", flags={}), folder=ABLATION)
    assert [variant.value for variant in grid] == [0.0, 0.02, 0.5], "equal values are one run"
    assert [variant.name for variant in grid] == ["kl-coef-0", "kl-coef-0.02", "kl-coef-0.5"]
    assert [variant.label for variant in grid] == ["β = 0", "β = 0.02", "β = 0.5"]
    assert grid[1].flags({"ppo": {"seed": 2}, "recipe": {}}) == {"ppo": {"seed": 2, "kl_coef": 0.02}, "recipe": {}}


def test_variants_repeat_each_value_for_every_seed() -> None:
    grid = make_variants({"kl_coef": [0.0, 0.5]}, folder=ABLATION, seed_count=3, first_seed=7)
    names = ["kl-coef-0", "kl-coef-0-seed-8", "kl-coef-0-seed-9"]
    assert [variant.name for variant in grid] == [*names, *(name.replace("-0", "-0.5", 1) for name in names)]
    assert grid[1].label == "β = 0, seed 8" and grid[1].settings_text == grid[0].settings_text == "β = 0"
    assert grid[0].flags({"ppo": {"seed": 7}}) == {"ppo": {"seed": 7, "kl_coef": 0.0, "reference": True}}
    assert grid[2].flags({}) == {"ppo": {"seed": 9, "kl_coef": 0.0, "reference": True}}


def test_read_penalties_rejects_invalid_lists() -> None:
    for listed in ("", "a", "0.1,", "-1", "nan", "inf", "0.1 0.2"):
        with pytest.raises(ZooError, match="use numbers that are not negative"):
            read_penalties(listed, flags={})
    with pytest.raises(ZooError, match=r"leave --ppo.kl_coef out"):
        read_penalties("0,1", flags={"kl_coef": 0.1})


def test_variant_shares_all_stages_but_ppo_with_base_run(tmp_path: Path) -> None:
    make_recipe(tmp_path)
    plain = make_context(tmp_path)
    variant = Variant((("kl_coef", 0.5),), None, ABLATION)
    run = tmp_path / "run"
    variant.record_base(run)
    fields = variant_fields(variant.directory(run))
    assert (
        variant_fields(run) == {} and fields["variant"] == "kl-coef-0.5" and fields["base"].resolve() == run.resolve()
    )
    ablation = replace(plain, directory=variant.directory(run), **fields)
    for stage in ("data", "sft", "reward"):
        assert ablation.record(stage).path.resolve() == plain.record(stage).path.resolve()
        assert ablation.repo(stage) == plain.repo(stage)
    assert ablation.record("ppo").path == variant.directory(run) / "ppo"
    assert ablation.repo("ppo") == "local/toy-kl-coef-0.5-ppo" != plain.repo("ppo")
    for context in (plain, ablation):
        for stage in ("sft", "reward", "ppo"):
            context.record(stage).write(status="finished")
    pipeline._delete_records(replace(ablation, restart=True))
    left = [
        record.run_file.is_file() for record in (ablation.record("ppo"), ablation.record("sft"), plain.record("ppo"))
    ]
    assert left == [False, True, True], "--restart is of the ablation's own runs"


def write_finished_run(
    run: Path, value: float, reward: float, seed: int | None = None, verdict: str = "healthy"
) -> Variant:
    """Writes the directory of a run with the files that `read_outcome` reads."""
    variant = Variant((("kl_coef", value),), seed, ABLATION)
    folder = variant.directory(run)
    record = StageRecord(folder / "ppo")
    record.write(repo={"id": f"local/x-{variant.name}-ppo"}, chosen={"step": 40})
    record.metrics_file.write_text(
        "".join(
            json.dumps({"step": k, "objective/score": reward * k, "objective/kl": k / 10}) + "\n" for k in (1, 2, 3)
        )
    )
    figure = {"value": reward, "ci95": [0.0, 1.0], "n": 9}
    names = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")
    evaluation = {"ppo": dict.fromkeys(names, figure), "win_rate": {"value": 0.5, "ci95": [0.4, 0.6], "n": 9}}
    fired = ["length", "stuffing"] if verdict == "hacked" else []
    evaluation |= {"over_training": {"verdict": verdict, "step": 40, "fired": fired}}
    write_json(folder / "eval" / "evaluation.json", evaluation)
    rows = [
        {"prompt": f"p{k // 2}", "sample": k % 2, "ppo": {"completion": f"c{k}", "reward": 1.0, "judge": 2.0}}
        for k in range(20)
    ]
    (folder / "eval" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return variant


def test_overview_aggregates_over_seeds(tmp_path: Path) -> None:
    runs = [(0.0, 2.0, None, "hacked"), (0.0, 5.0, 2, "healthy"), (0.5, 1.0, None, "healthy")]
    outcomes = [read_outcome(write_finished_run(tmp_path, *one), tmp_path) for one in runs]
    names = ["kl-coef-0", "kl-coef-0-seed-2", "kl-coef-0.5"]
    assert [one.repo for one in outcomes] == [f"local/x-{name}-ppo" for name in names]
    assert [one.judgment["fired"] for one in outcomes] == [["length", "stuffing"], [], []]
    assert [text for _, text, _, _ in outcomes[0].samples] == ["c0", "c2", "c4", "c6"] and SHOWN_PROMPTS == 4
    (loose, figures, seeds), (_, _, one) = group_by_setting(outcomes)
    assert loose == "β = 0" and figures["reward"] == Spread(3.5, (2.0, 5.0), 2) and (len(seeds), len(one)) == (2, 1)
    path = write_overview(tmp_path, "x", outcomes)
    plot = path.with_suffix(".png")
    document = json.loads(path.read_text())
    assert document["key"] == "kl_coef" and [run["directory"] for run in document["runs"]] == names
    shown = [(run["value"], run["figures"]["reward"]["value"], run["seed"]) for run in document["runs"]]
    assert shown == [one[:3] for one in runs]
    over = [(one["value"], one["seeds"], one["verdicts"]) for one in document["over_seeds"]]
    assert over == [(0.0, 2, ["hacked", "healthy"]), (0.5, 1, ["healthy"])]
    assert document["over_seeds"][0]["figures"]["reward"] == {"mean": 3.5, "range": [2.0, 5.0]}
    first = plot.read_bytes()
    assert first.startswith(b"\x89PNG")
    write_overview(tmp_path, "x", outcomes)
    assert plot.read_bytes() == first, "equal runs give equal pictures"


def test_own_run_stands_beside_its_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the last row, at its own step and with the verdict on that step, unless it differs in other settings."""
    variant = write_finished_run(tmp_path, 0.0, 2.0, verdict="hacked")
    assert read_own_outcome(tmp_path, variant) is None, "the run has no PPO"
    for part in ("ppo", "eval"):
        shutil.copytree(variant.directory(tmp_path) / part, tmp_path / part)
    loose, own = StageRecord(variant.directory(tmp_path) / "ppo"), StageRecord(tmp_path / "ppo")
    settings = {"kl_coef": 0.0, "reference": True, "release": "last", "lam": 0.9}
    loose.write(status="finished", resolved=settings)
    own.write(status="running", resolved={"kl_coef": 0.1, "lam": 0.9}, chosen={"step": 10})
    assert read_own_outcome(tmp_path, variant) is None, "the run is not finished"
    own.write(status="finished")
    evaluation = read_json(tmp_path / "eval" / "evaluation.json")
    evaluation["over_training"]["at_recommended"] = {"step": 10, "verdict": "healthy", "fired": ["style"]}
    write_json(tmp_path / "eval" / "evaluation.json", evaluation)
    outcome = read_own_outcome(tmp_path, variant)
    assert outcome is not None and outcome.variant.label == "β = 0.1"
    assert outcome.judgment == {
        "step": 10, "verdict": "healthy", "fired": ["style"],
        "at_last": {"step": 40, "verdict": "hacked", "fired": ["length", "stuffing"]},
    }  # fmt: skip
    _show_figures("By β", [read_outcome(variant, tmp_path)], outcome)
    shown = capsys.readouterr().out
    rows = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    (loose_row,) = (row for row in rows if row[0] == "β = 0")
    ((place, own_row),) = ((place, row) for place, row in enumerate(rows) if row[0] == "β = 0.1 *")
    assert (loose_row[1], loose_row[-1]) == ("40", "hacked") and (own_row[1], own_row[-1]) == ("10", "healthy")
    assert rows[place + 1] == ["at the last step, 40: hacked"]
    assert "β = 0, step 40: probes fire for length, stuffing." in shown
    own.write(resolved={"kl_coef": 0.1, "lam": 0.5})
    assert read_own_outcome(tmp_path, variant) is None, "it differs in more than β"
    own.write(resolved={"kl_coef": 0.1, "lam": 0.9})
    write_json(tmp_path / "eval" / "evaluation.json", {**evaluation, "prompts": 7})
    assert read_own_outcome(tmp_path, variant) is None, "it is evaluated on other prompts"


def test_run_variants_runs_them_in_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is open while it runs, with its variant recorded, and closed before the next one opens."""
    make_recipe(tmp_path)
    base, steps = make_context(tmp_path), []
    run = base.directory

    @contextlib.contextmanager
    def opened(variant: Variant) -> Iterator[tuple[RunContext, None]]:
        steps.append(f"open {variant.name}")
        yield replace(base, **variant.context_fields(run, {"ppo": {"lam": 1.0}})), None
        steps.append(f"close {variant.name}")

    def trained(context: RunContext, *_: object) -> None:
        steps.append(f"run {context.flags['ppo']['kl_coef']:g} {context.flags['ppo'].get('seed')}")
        assert variant_fields(context.directory)["variant"] == context.variant
        write_finished_run(run, context.flags["ppo"]["kl_coef"], 1.0, context.flags["ppo"].get("seed"))

    monkeypatch.setattr(pipeline, "run", trained)
    grid = make_variants({"kl_coef": [0.5]}, folder=ABLATION, seed_count=2)
    outcomes = run_variants(run, grid, opened, Console(quiet=True))
    assert [outcome.variant for outcome in outcomes] == grid
    names = ("kl-coef-0.5", "kl-coef-0.5-seed-2")
    assert steps == [f"open {names[0]}", "run 0.5 None", f"close {names[0]}", f"open {names[1]}", "run 0.5 2",
                     f"close {names[1]}"]  # fmt: skip


def test_open_part_resumes_skips_or_restarts(tmp_path: Path) -> None:
    make_recipe(tmp_path)
    context, folder = make_context(tmp_path), tmp_path / "part"

    def opened(restart: bool = False, **settings: int) -> contextlib.AbstractContextManager[StageRecord | None]:
        return open_part(context, folder, settings, stage="baseline", restart=restart)

    def cut_off() -> None:
        with opened(beta=1) as record:
            assert record is not None and record.read()["status"] == "running"
            record.write(kept=True)
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        cut_off()
    assert StageRecord(folder).read()["status"] == "interrupted"
    with opened(beta=1) as record:
        assert record is not None and record.read()["kept"]
    assert StageRecord(folder).read()["status"] == "finished"
    with opened(beta=1) as record:
        assert record is None
    with pytest.raises(ZooError, match="beta = 1, and this one has 2"), opened(beta=2):
        pass
    with opened(restart=True, beta=2) as record:
        assert record is not None and "kept" not in record.read()


def test_hub_run_and_timeline_read_the_same_beta() -> None:
    listing = {"repo": "me/toy-ppo", "checkpoints": []}
    for settings, beta in (
        ({"kl_coef": 0.2}, 0.2), ({"kl_coef": 0}, 0.0), ({}, PPOConfig.kl_coef), ({"kl_coef": None}, None),
        ({"kl_coef": True}, None), ({"kl_coef": "0.2"}, None), ({"kl_coef": float("nan")}, None),
        ({"kl_coef": float("-inf")}, None), ({"kl_coef": 10**400}, None), ("none", None), (None, None),
    ):  # fmt: skip
        card = {"settings": settings}
        assert Run(listing, card).beta == TimelineRun.from_listing(listing, card).beta == beta
    assert Run(listing, {}).beta is None and Run(listing, {}).steps == ()
