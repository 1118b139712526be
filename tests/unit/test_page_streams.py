"""The page's streams: on ZeroGPU's terms, with errors that keep their words, and stopped when nobody looks."""

import pickle
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from toy_models import Toys, save_toys

from rlhf_zoo.app.engine import Comparison, Timeline, TimelinePoint, TimelineRun
from rlhf_zoo.app.page.streams import CompletionStreams
from rlhf_zoo.errors import ZooError

SAMPLING = {"seed": 1, "temperature": 0.9, "top_p": 1.0, "max_new_tokens": 8, "n": 1}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return save_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def comparison(toys: Toys) -> Comparison:
    return Comparison.load(ppo=toys.ppo, sft=toys.sft)


def timeline(comparison: Comparison, *folders: Path) -> Timeline:
    points = tuple(TimelinePoint(step, f"step-{step}", None, str(one)) for step, one in enumerate(folders, start=1))
    return Timeline(comparison, [TimelineRun("run", 0.1, points), TimelineRun("loose", 0.0, points)])


def zero_gpu(stream: Callable) -> Callable:
    """As ZeroGPU does: what is yielded crosses a process, and of what is raised only the name comes back."""

    def run(*arguments: Any, **keywords: Any) -> Generator[Any, None, None]:
        try:
            for one in stream(*arguments, **keywords):
                yield pickle.loads(pickle.dumps(one))
        except Exception as error:
            raise RuntimeError(type(error).__name__) from None

    return run


@pytest.mark.parametrize("gpu", [None, zero_gpu])
def test_streams_equal_those_of_comparison(comparison: Comparison, toys: Toys, gpu) -> None:
    streams = CompletionStreams(comparison, timeline(comparison, toys.sft, toys.ppo), gpu=gpu)
    *_, expected = comparison.stream("the camera", **SAMPLING)
    *_, found = streams.stream("the camera", **SAMPLING)
    assert found == expected
    *_, at = streams.stream_step(2, "the camera", run="run", **SAMPLING)
    assert at.ppo == expected.ppo
    rows = list(streams.stream_steps("the camera", [1, 2], run="run", **SAMPLING))
    assert [row.snapshot.ppo == expected.ppo for row in rows] == [False, True]
    assert [row.run for row in streams.stream_betas("the camera", **SAMPLING)] == ["run", "loose"]


@pytest.mark.parametrize("gpu", [None, zero_gpu])
def test_streams_keep_error_messages(comparison: Comparison, toys: Toys, tmp_path: Path, gpu) -> None:
    streams = CompletionStreams(comparison, timeline(comparison, toys.ppo, tmp_path / "gone"), gpu=gpu)
    for stream, message in [
        (streams.stream(None, **SAMPLING), "The prompt is empty"),
        (streams.stream("the camera", **(SAMPLING | {"n": 99})), "the limit is 8"),
        (streams.stream_step(7, "the camera", run="run", **SAMPLING), "no checkpoint of step 7"),
        (streams.stream_step(1, "the camera", run="other", **SAMPLING), "There is no run 'other' here"),
        (streams.stream_step(2, "the camera", run="run", **SAMPLING), "gone is neither a folder"),
        (streams.stream_steps(" ", [1], run="run", **SAMPLING), "The prompt is empty"),
        (streams.stream_betas("the camera", **(SAMPLING | {"seed": -1})), "The seed is -1"),
    ]:
        with pytest.raises(ZooError, match=message):
            next(stream)
    first, second = streams.stream_steps("the camera", [1, 2], run="run", **SAMPLING)
    assert first.problem is None and "gone is neither a folder" in second.problem
