"""Fixtures that every test may use."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from warm import no_flushes

# A shell that starts this in the background leaves SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["card_run", "hub_fixture", "finished_run", "real_data", "thread_hub"]

#: They begin first, so that no worker is left with a long file when the others have finished. Longest first.
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
    parser.addoption("--device", default="cpu", help="where the trainer's tests compute: cpu, or cuda (`make gpu`)")
    parser.addoption("--every-lever", action="store_true", help="trainers of tests with all that makes an update fit")


def pytest_configure(config: Any) -> None:
    """Warm processes fork from one of this process's own; models and tensors lie on the device asked for, there too."""
    no_flushes()
    if "WARM_OWNER" not in os.environ:  # workers have that of the process that started them
        os.environ |= {"WARM_OWNER": str(os.getpid()), "WARM_SOCKET": f"{tempfile.mkdtemp(prefix='warm-')}/socket"}
    if "RLHF_ZOO_HOME" not in os.environ:  # no test leaves anything in the home of whoever runs it
        os.environ["RLHF_ZOO_HOME"] = tempfile.mkdtemp(prefix="rlhf-zoo-home-")
    if config.getoption("--every-lever"):
        os.environ["RLHF_ZOO_TEST_LEVERS"] = "1"
    device = config.getoption("--device")
    if device == "cpu":
        return
    import torch
    from torch.utils._device import DeviceContext

    class InTests(DeviceContext):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Our own code finds no default device, as with users: what it forgets to place stays on the CPU and fails.
            if f"{os.sep}rlhf_zoo{os.sep}" in sys._getframe(1).f_code.co_filename:
                return function(*args, **(kwargs or {}))
            return super().__torch_function__(function, types, args, kwargs)

    os.environ["RLHF_ZOO_TEST_DEVICE"] = device
    InTests(torch.device(device)).__enter__()
    # NumPy references read what was computed on the device; `.numpy()` stays an error there.
    read = torch.Tensor.__array__
    torch.Tensor.__array__ = lambda self, *args, **kwargs: read(self.cpu(), *args, **kwargs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Whole files change places; within one, tests keep their order. One test in a browser is not of the long tier."""
    for item in items:
        if {"browser", "visitor"} & set(item.fixturenames) and item.name != "test_visitor_compares_completions":
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Each trainer ends with `gc.collect()`, which need not visit a million objects of imported libraries again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze() -> Iterator[None]:
    """Nor those of what the tests of a file have imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def untraced() -> Iterator[pytest.MonkeyPatch]:
    """Plans count the weights and the work alone, until `undo`: to trace the passes is most of a plan's time."""
    from rlhf_zoo.pipeline.plan.memory import ForwardPass, TrainingPass
    from rlhf_zoo.pipeline.plan.tracing import Tracer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracer, "training_pass", lambda *_, **__: TrainingPass())
        patch.setattr(Tracer, "forward_pass", lambda *_, **__: ForwardPass())
        patch.setattr(Tracer, "decode_step", lambda *_, **__: ForwardPass())
        yield patch
