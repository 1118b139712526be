"""The numerics tests catch every mutant of `mutate.py`; that the mutations still fit the source is checked always."""

from __future__ import annotations

import mutate
import pytest

from rlhf_zoo import functional

FORMULAS = {name for name in functional.__all__ if callable(getattr(functional, name))}


def test_every_mutation_fits_the_source_and_every_formula_has_one() -> None:
    source = (mutate.ROOT / mutate.MODULE).read_text(encoding="utf-8")
    mutants = {mutation.apply(source) for mutation in mutate.MUTATIONS}
    assert source not in mutants
    assert len(mutants) == len(mutate.MUTATIONS)
    assert {mutation.function for mutation in mutate.MUTATIONS} == FORMULAS


@pytest.mark.full
@pytest.mark.timeout(2400)  # 5 minutes on a quiet core: a fresh interpreter for each mutant
def test_no_mutant_survives(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        assert mutate.survivors() == []
