"""A run says which sampler drew for it, and `reproduce` why what another one drew has other last bits."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_zoo.modeling.sampling.sampler import SAMPLER_VERSION
from rlhf_zoo.pipeline.inspect.reproduce import _make_notes
from rlhf_zoo.runs.context import environment_info


@pytest.mark.parametrize(
    ("stage", "recorded", "named"),
    [
        ("ppo", {}, "unknown"),
        ("ppo", {"sampler": "2"}, "2"),
        ("ppo", {"sampler": str(SAMPLER_VERSION)}, None),
        ("ppo", {"sampler": str(SAMPLER_VERSION + 1)}, str(SAMPLER_VERSION + 1)),
        ("reward", {"sampler": "1"}, "1"),
        ("reward", {"sampler": str(SAMPLER_VERSION)}, None),
        ("sft", {}, None),
    ],
)
def test_reproduce_notes_runs_of_another_sampler_version(
    stage: str, recorded: dict[str, str], named: str | None
) -> None:
    published: Any = SimpleNamespace(
        stage=stage, versions=recorded, settings={"critic": "auto"}, parent=lambda role: None
    )
    notes = [note for note in _make_notes(published) if "sampler" in note]
    assert [f"version {named} of the sampler, but this is version {SAMPLER_VERSION}" in note for note in notes] == (
        [True] if named else []
    )


def test_environment_records_sampler_version() -> None:
    assert environment_info()["sampler"] == str(SAMPLER_VERSION)
