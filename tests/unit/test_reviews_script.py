"""benchmarks/reviews.py: which runs are kept, and their commands without the places of one machine."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import reviews
from figures import keep, plots
from figures.experiments import REVIEWS
from PIL import Image

from rlhf_zoo.errors import ZooError


def test_run_needs_a_machine():
    assert reviews.parse_run("H200, bf16=runs/a=b") == ("H200, bf16", Path("runs/a=b"))
    for argument in ("runs/a", "=runs/a", "H200="):
        with pytest.raises(ArgumentTypeError, match="MACHINE=RUN"):
            reviews.parse_run(argument)


def test_run_without_evaluated_policy_is_an_error(tmp_path):
    with pytest.raises(ZooError, match="has no evaluated policy"):
        reviews.read_variants("H200", tmp_path)


def test_command_names_no_place_of_one_machine():
    recorded = (
        "rlhf-zoo ablate smollm2-reviews --hub local --source_hub none --overwrite_repo --seed 3 --namespace mine "
        "--output_dir /a/run --dataset_name /a/data --kl_coef 0.05,0"
    )
    assert reviews.public_command(recorded) == (
        "rlhf-zoo ablate smollm2-reviews --hub local --seed 3 --dataset_name $RLHF_ZOO_DATA --kl_coef 0.05,0"
    )


def test_picture_of_kept_runs_is_drawn(tmp_path):
    path = tmp_path / "reviews.png"
    plots.draw_reviews([], path)
    assert not path.exists()
    plots.draw_reviews(keep.load(REVIEWS)["runs"], path)
    with Image.open(path) as picture:
        assert picture.width > picture.height and len(picture.getcolors()) > 10


def test_add_keeps_other_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_variants(machine: str, run: Path) -> list[dict]:
        return [{"seed": 3, "beta": 0.05, "machine": machine, "run": run.name}]

    monkeypatch.setattr(keep, "FOLDER", tmp_path)
    monkeypatch.setattr(reviews, "read_variants", read_variants)
    for arguments in (["CPU=a"], ["H200=b", "--add"], ["H200=c", "--add"]):
        reviews.main(arguments)
    assert [(row["machine"], row["run"]) for row in keep.load(REVIEWS)["runs"]] == [("CPU", "a"), ("H200", "c")]
    reviews.main(["CPU=d"])
    assert [row["run"] for row in keep.load(REVIEWS)["runs"]] == ["d"]
