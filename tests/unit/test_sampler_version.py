"""A run says which sampler drew for it, and `reproduce` why what an older one drew has other last bits."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_zoo.runs.context import versions
from rlhf_zoo.sampling import SAMPLER
from rlhf_zoo.studies.reproduce import _notes


@pytest.mark.parametrize(
    ("stage", "keys", "recorded", "named"),
    [
        ("ppo", {}, {}, "1"),
        ("ppo", {}, {"sampler": "2"}, "2"),
        ("ppo", {"bf16": False, "use_cpu": True}, {"sampler": "5"}, "5"),
        ("ppo", {}, {"sampler": "6"}, None),
        ("ppo", {"critic": "shared"}, {"sampler": str(SAMPLER)}, None),
        ("ppo", {}, {"sampler": str(SAMPLER + 1)}, str(SAMPLER + 1)),
        ("reward", {}, {"sampler": "1"}, "1"),
        ("reward", {}, {"sampler": "2"}, None),
        ("reward", {"bf16": True, "use_cpu": True}, {"sampler": "4"}, "4"),
        ("reward", {"max_tokens_per_micro_batch": 64}, {"sampler": "4"}, "4"),
        ("reward", {"bf16": True, "use_cpu": True}, {"sampler": "5"}, None),
        ("sft", {}, {}, None),
    ],
)
def test_a_run_of_an_older_sampler_is_told_apart(
    stage: str, keys: dict[str, Any], recorded: dict[str, str], named: str | None
) -> None:
    published: Any = SimpleNamespace(
        stage=stage, versions=recorded, resolved={"critic": "auto"} | keys, parent=lambda role: None
    )
    notes = [note for note in _notes(published) if "sampler" in note]
    assert [f"version {named} of the sampler, and this is version {SAMPLER}" in note for note in notes] == (
        [True] if named else []
    )


def test_a_run_records_its_sampler() -> None:
    assert versions()["sampler"] == str(SAMPLER)
