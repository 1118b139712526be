"""The folder of real corpora that `RLHF_ZOO_DATA` names."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real corpora. Skips the test if the variable is unset; fails if the folder is missing."""
    name = os.environ.get("RLHF_ZOO_DATA")
    if not name:
        pytest.skip("RLHF_ZOO_DATA is not set: it names the folder of real corpora")
    folder = Path(name)
    assert folder.is_dir(), f"RLHF_ZOO_DATA={name} is not a folder"
    return folder
