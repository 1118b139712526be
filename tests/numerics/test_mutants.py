"""The numerics tests catch every mutant of `mutate.py`, whose mutations fit the source."""

import subprocess
import sys

import mutate
import pytest

from rlhf_zoo import functional

FORMULAS = {name for name in functional.__all__ if callable(getattr(functional, name))}


def test_mutations_fit_source_and_cover_every_formula() -> None:
    sources = [mutate.source_of(mutation) for mutation in mutate.MUTATIONS]
    mutants = {mutation.apply(source) for mutation, source in zip(mutate.MUTATIONS, sources, strict=True)}
    assert not mutants & set(sources)
    assert len(mutants) == len(mutate.MUTATIONS)
    mutated = {mutation.function for mutation in mutate.MUTATIONS if mutation.module == mutate.FORMULAS}
    assert mutated == FORMULAS


@pytest.mark.full
def test_no_mutant_survives(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process that has not imported the package, because every mutant's tests run in a fork of it."""
    with capsys.disabled():
        process = subprocess.run([sys.executable, mutate.__file__], check=False)
    assert process.returncode == 0
