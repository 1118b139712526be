"""The public names of `rlhf_zoo`, and the console scripts."""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest
from hub_fixture import base_environment

import rlhf_zoo
from rlhf_zoo.cli import main as cli


def test_all_is_sorted_and_equals_dir():
    names = [name for name in rlhf_zoo.__all__ if not name.startswith("__")]
    assert names == sorted(names) and len(set(names)) == len(names) and "__version__" in rlhf_zoo.__all__
    assert set(dir(rlhf_zoo)) == set(rlhf_zoo.__all__)


@pytest.mark.parametrize("name", [name for name in rlhf_zoo.__all__ if not name.startswith("__")])
def test_public_name_is_importable_and_documented(name):
    value = getattr(rlhf_zoo, name)
    assert value.__name__ == name
    text = inspect.getdoc(value) or ""
    assert len(text) > 20 and not text.startswith(f"{name}("), "a written docstring, not a generated one"


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'PPO'"):
        _ = rlhf_zoo.PPO


# Votes are also stored on machines with little memory, so these modules may not import models' packages.
VOTES = "rlhf_zoo.evaluation.votes.box, rlhf_zoo.evaluation.votes.data, rlhf_zoo.evaluation.votes.ratings"
HUB = "rlhf_zoo.hub.server.cli, rlhf_zoo.hub.server.xet_store, rlhf_zoo.hub.server.xet_format"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rlhf_zoo", ["torch", "numpy"]),
        ("rlhf_zoo.publishing.catalog.ablation", ["torch"]),
        ("rlhf_zoo.evaluation.rollout_probe", ["torch", "transformers", "datasets", "pyarrow"]),
        (VOTES, ["torch", "gradio", "transformers", "datasets", "pyarrow"]),
        (HUB, ["torch", "numpy", "huggingface_hub", "dulwich", "yaml", "httpx2", "http.server", "lz4"]),
    ],
)
def test_module_imports_no_heavy_package(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code], env=base_environment(), capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


def test_version_equals_version_of_distribution():
    assert rlhf_zoo.__version__ == importlib.metadata.version("rlhf-zoo")


@pytest.mark.parametrize(("script", "name"), [("rlhf-zoo", "main"), ("hf-rlhf-zoo", "hf_main")])
def test_console_script_points_to_its_function(script, name):
    """`hf extensions` runs a package's console script of the name hf-NAME."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=script)
    assert entry.value == f"rlhf_zoo.cli.main:{name}" and entry.load() is getattr(cli, name)
