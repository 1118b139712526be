"""An interrupted evaluation continues with what it has measured, and gives the figures of an uninterrupted one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import file_digests
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.evaluation import trajectory
from rlhf_zoo.evaluation.measure import Evaluator
from rlhf_zoo.evaluation.saved_measurements import SavedMeasurements
from rlhf_zoo.fileio import read_json
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.pipeline.stages.interrupt import Stopped
from rlhf_zoo.runs.context import RunContext

SETTINGS = {"prompts": 6, "samples": 2, "judge": "toy_run:judge", "checkpoint_prompts": 12, "checkpoint_samples": 1,
            "filter_samples": 2}  # fmt: skip


def test_saved_measurements_are_those_of_one_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    value = {"judges": {"a": [0.1 + 0.2, float("-inf")]}, "texts": ["\ud800 ü"], "ended": [True], "none": None}
    saved = SavedMeasurements(tmp_path / "run", {"seed": 0})
    given = {**value, "judges": {"a": [np.float64(0.1) + np.float64(0.2), np.float32("-inf")]}, "ended": [np.True_]}
    assert saved.get({"step": 1}, lambda: given) is given and saved.seconds == 0

    def again(run: str = "run", seed: int = 0, **keys: bool) -> SavedMeasurements:
        return SavedMeasurements(tmp_path / run, {"seed": seed}, **keys)

    continued = again()
    assert continued.get({"step": 1}, pytest.fail) == value and continued.seconds > 0
    assert json.dumps(continued.get({"step": 1}, pytest.fail)) == json.dumps(value)
    assert again().get({"step": 2}, lambda: [2]) == again().get({"step": 2}, pytest.fail) == [2]
    assert again("another run").get({"step": 1}, lambda: 3) == 3
    for path in (tmp_path / "home").rglob("*.json"):
        path.write_text(path.read_text()[:-2])
    assert again().get({"step": 1}, lambda: 4) == again().get({"step": 1}, pytest.fail) == 4, "a damaged file"
    assert again(restart=True).get({"step": 1}, lambda: 5) == 5
    assert again(seed=1).get({"step": 1}, lambda: 6) == 6
    assert again().get({"step": 1}, lambda: 7) == 7, "other settings delete what was saved before"
    again().delete()
    again("another run").delete()
    assert not list((tmp_path / "home").rglob("*.json"))


def test_evaluation_continues_without_saving_when_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    saved = SavedMeasurements(tmp_path / "run", {"seed": 0})
    assert [saved.get({"step": step}, lambda: [1]) for step in range(3)] == [[1]] * 3
    (warning,) = caplog.messages
    assert "could not be written" in warning and warning.endswith("an interrupted evaluation starts again.")
    saved.delete()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("trained")
    make_recipe(folder, shared={"evaluation": SETTINGS})
    save_start(folder)
    context = make_context(folder, release="recommended")
    assert ppo.run(context) is True
    return context


@pytest.mark.usefixtures("quick_plots")
@pytest.mark.parametrize("interrupted_at", ["dependence", "evaluating ppo", "filtering"])
def test_interrupted_evaluation_gives_equal_figures(
    trained: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interrupted_at: str
) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    # In place, because the path of a checkpoint belongs to what identifies a measurement.
    before = tmp_path / "before"
    shutil.copytree(trained.directory, before)
    measured, interruptions = list[str](), list[str]()
    sample, dependence = Evaluator.sample, trajectory.measure_dependence

    def note(name: str) -> None:
        if interruptions and name.startswith(interruptions[0]):
            interruptions.clear()
            raise KeyboardInterrupt
        measured.append(name)

    def sample_or_stop(self: Evaluator, *args: Any, desc: str, **keys: Any) -> Any:
        note(desc)
        return sample(self, *args, desc=desc, **keys)

    def dependence_or_stop(*args: Any, **keys: Any) -> Any:
        note("dependence")
        return dependence(*args, **keys)

    def results() -> dict[str, str]:
        folder = trained.record("eval").path
        texts = {name: (folder / name).read_text() for name in ("samples.jsonl", "over_training.json")}
        figures = read_json(folder / "evaluation.json")
        assert figures.pop("seconds") > 0
        chosen = trained.record("ppo").read()["chosen"]
        shutil.rmtree(trained.directory)
        shutil.copytree(before, trained.directory)
        return {"evaluation.json": json.dumps(figures), "chosen": json.dumps(chosen), **texts}

    monkeypatch.setattr(Evaluator, "sample", sample_or_stop)
    monkeypatch.setattr(trajectory, "measure_dependence", dependence_or_stop)
    assert evaluate.run(trained) is True
    uninterrupted, all_measured = results(), list(measured)
    assert all_measured.count("dependence") == 4 and len(all_measured) >= 13

    measured.clear()
    interruptions.append(interrupted_at)
    unchanged = file_digests(trained.directory)
    with pytest.raises(Stopped):
        evaluate.run(trained)
    assert file_digests(trained.directory) == unchanged
    number_before = len(measured)
    assert measured == all_measured[:number_before] and all_measured[number_before].startswith(interrupted_at)
    assert evaluate.run(trained) is True
    assert measured == all_measured, "each policy is measured once"
    assert results() == uninterrupted
    assert not list((tmp_path / "home").glob("evaluations/*"))
    assert evaluate.run(replace(trained, restart=True)) is True and measured == all_measured * 2
    assert results() == uninterrupted
