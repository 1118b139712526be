"""The numerics tests catch every mutant of `mutate.py`; that the mutations still fit the source is checked always."""

from __future__ import annotations

import mutate
import pytest

from rlhf_zoo import functional

FORMULAS = {name for name in functional.__all__ if callable(getattr(functional, name))}


def test_every_mutation_fits_the_source_and_every_formula_has_one() -> None:
    sources = [mutate.source_of(mutation) for mutation in mutate.MUTATIONS]
    mutants = {mutation.apply(source) for mutation, source in zip(mutate.MUTATIONS, sources, strict=True)}
    assert not mutants & set(sources)
    assert len(mutants) == len(mutate.MUTATIONS)
    of_formulas = {mutation.function for mutation in mutate.MUTATIONS if mutation.module == mutate.FORMULAS}
    assert of_formulas == FORMULAS


@pytest.mark.full
@pytest.mark.timeout(2400)  # 5 minutes on a quiet core: a fresh interpreter for each mutant
def test_no_mutant_survives(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        assert mutate.survivors() == []
