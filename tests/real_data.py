"""The real corpora, where a machine has them: `RLHF_ZOO_DATA` names their folder."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real corpora. Unset is a visible skip; set but missing is a failure."""
    name = os.environ.get("RLHF_ZOO_DATA")
    if not name:
        pytest.skip("RLHF_ZOO_DATA is not set: it names the folder of real corpora")
    folder = Path(name)
    assert folder.is_dir(), f"RLHF_ZOO_DATA={name} is no folder"
    return folder
