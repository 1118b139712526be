"""Options, hooks and fixtures of all tests."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from warm import disable_fsync

# A shell that starts pytest in the background makes it ignore SIGINT, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["card_run", "hub_fixture", "finished_run", "real_data", "thread_hub"]

#: The files that take longest, longest first. They start first, so that no worker ends with a long file.
LONGEST = (
    "test_tiny_sums_figures.py",
    "test_product_remarks_run.py",
    "test_tiny_world_figures.py",
    "test_smoke.py",
    "test_mutants.py",
    "test_several_processes.py",
    "test_plan_memory.py",
    "test_pipeline.py",
    "test_planner.py",
    "test_gpu_script.py",
    "test_faults.py",
    "test_tables.py",
    "test_reproduce.py",
    "test_readme.py",
    "test_page_load.py",
    "test_baseline.py",
    "test_resume.py",
    "test_early_checks.py",
    "test_evaluate_stage.py",
    "test_rounds_run.py",
    "test_space_deploy.py",
    "test_processes.py",
    "test_votes_train.py",
    "test_sweep_run.py",
    "test_release_rule.py",
    "test_new.py",
)


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--device", default="cpu", help="device of the trainer's tests: cpu, or cuda (`make gpu`)")
    parser.addoption("--every-lever", action="store_true", help="test trainers with every option that saves memory")


def pytest_configure(config: Any) -> None:
    """Sets up warm processes, an RLHF_ZOO_HOME for tests, and the device; child processes inherit all three."""
    disable_fsync()
    if "WARM_OWNER" not in os.environ:  # pytest-xdist workers inherit it
        os.environ |= {"WARM_OWNER": str(os.getpid()), "WARM_SOCKET": f"{tempfile.mkdtemp(prefix='warm-')}/socket"}
    if "RLHF_ZOO_HOME" not in os.environ:  # tests leave nothing in the user's home
        os.environ["RLHF_ZOO_HOME"] = tempfile.mkdtemp(prefix="rlhf-zoo-home-")
    if config.getoption("--every-lever"):
        os.environ["RLHF_ZOO_TEST_LEVERS"] = "1"
    device = config.getoption("--device")
    if device == "cpu":
        return
    import torch
    from torch.utils._device import DeviceContext

    class DeviceOfTests(DeviceContext):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # The package gets no default device, as in production: a tensor that it forgets to move fails on the CPU.
            if f"{os.sep}rlhf_zoo{os.sep}" in sys._getframe(1).f_code.co_filename:
                return function(*args, **(kwargs or {}))
            return super().__torch_function__(function, types, args, kwargs)

    os.environ["RLHF_ZOO_TEST_DEVICE"] = device
    DeviceOfTests(torch.device(device)).__enter__()
    # NumPy references may read tensors of the device; `.numpy()` on them remains an error.
    to_array = torch.Tensor.__array__
    torch.Tensor.__array__ = lambda self, *args, **kwargs: to_array(self.cpu(), *args, **kwargs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Sorts the files by LONGEST, keeping the order within each, and marks all browser tests but one as `full`."""
    for item in items:
        if {"browser", "visitor"} & set(item.fixturenames) and item.name != "test_visitor_compares_completions":
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Hides imported libraries from `gc.collect()`, which each trainer calls: it would visit a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze() -> Iterator[None]:
    """Does the same for libraries that the tests of a file have imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def untraced() -> Iterator[pytest.MonkeyPatch]:
    """Makes plans skip tracing, which takes most of their time: they leave out the memory of the passes.

    `undo()` of the yielded patch restores tracing.
    """
    from rlhf_zoo.pipeline.plan.memory import ForwardPass, TrainingPass
    from rlhf_zoo.pipeline.plan.tracing import Tracer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracer, "training_pass", lambda *_, **__: TrainingPass())
        patch.setattr(Tracer, "forward_pass", lambda *_, **__: ForwardPass())
        patch.setattr(Tracer, "decode_step", lambda *_, **__: ForwardPass())
        yield patch
