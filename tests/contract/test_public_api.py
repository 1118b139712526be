"""What `import rlhf_zoo` offers, and the console scripts."""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest
from hub_fixture import base_environment

import rlhf_zoo
from rlhf_zoo.cli import main as cli


def test_all_is_sorted_and_said():
    names = [name for name in rlhf_zoo.__all__ if not name.startswith("__")]
    assert names == sorted(names) and len(set(names)) == len(names) and "__version__" in rlhf_zoo.__all__
    assert set(dir(rlhf_zoo)) == set(rlhf_zoo.__all__)


@pytest.mark.parametrize("name", [name for name in rlhf_zoo.__all__ if not name.startswith("__")])
def test_every_public_name_is_importable_and_documented(name):
    found = getattr(rlhf_zoo, name)
    assert found.__name__ == name
    text = inspect.getdoc(found) or ""
    assert len(text) > 20 and not text.startswith(f"{name}("), "a docstring that a person wrote"


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="has no attribute 'PPO'"):
        _ = rlhf_zoo.PPO


# The page's process may have no room, and a box none of the models.
VOTES = "rlhf_zoo.evaluation.votes.box, rlhf_zoo.evaluation.votes.data, rlhf_zoo.evaluation.votes.ratings"
HUB = "rlhf_zoo.hub.server.cli, rlhf_zoo.hub.server.xet_store, rlhf_zoo.hub.server.xet_format"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rlhf_zoo", ["torch", "numpy"]),
        ("rlhf_zoo.publishing.catalog.ablation", ["torch"]),
        ("rlhf_zoo.evaluation.rollout_probe", ["torch", "transformers", "datasets", "pyarrow"]),
        # Where mistakes in flags are told.
        (
            "rlhf_zoo.cli.train, rlhf_zoo.runs.settings.parse, rlhf_zoo.runs.settings.declared",
            ["torch", "transformers", "trl"],
        ),
        (VOTES, ["torch", "gradio", "transformers", "datasets", "pyarrow"]),
        (HUB, ["torch", "numpy", "huggingface_hub", "dulwich", "yaml", "httpx2", "http.server", "lz4"]),
    ],
)
def test_importing_imports_nothing_heavy(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=base_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_version_is_that_of_the_distribution():
    assert rlhf_zoo.__version__ == importlib.metadata.version("rlhf-zoo")


@pytest.mark.parametrize(("script", "name"), [("rlhf-zoo", "main"), ("hf-rlhf-zoo", "hf_main")])
def test_console_scripts(script, name):
    """`hf extensions` runs a package's console script of the name hf-NAME."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=script)
    assert entry.value == f"rlhf_zoo.cli.main:{name}" and entry.load() is getattr(cli, name)
