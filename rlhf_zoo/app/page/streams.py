"""Streams the page's completions at a pace that a browser can follow, on ZeroGPU if the page runs there."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, Unpack

from ...errors import ZooError
from ..engine import CheckpointResult, Comparison, Sampling, Snapshot, Timeline

#: Shortest time between two snapshots of a completion in progress, in seconds.
SNAPSHOT_INTERVAL = 0.08

T = TypeVar("T")


class CompletionStreams:
    """Samples completions as streams, from a comparison and from its timeline.

    A stream raises ZooError at its first item if its arguments are refused, or later if memory runs out. Closing a
    stream stops its sampling.

    Args:
        comparison: The models.
        timeline: The checkpoints of the runs. If it is None, only `stream` works.
        gpu: ZeroGPU's decorator; None if the page does not run on ZeroGPU.
    """

    def __init__(
        self, comparison: Comparison, timeline: Timeline | None = None, *, gpu: Callable[[Any], Any] | None = None
    ) -> None:
        self._stream = _keep_error_messages(comparison.stream, gpu)
        if timeline is not None:
            self._stream_step = _keep_error_messages(
                lambda step, run, **sampling: timeline.comparison_at(step, run=run).stream(**sampling), gpu
            )
            self._stream_steps = _keep_error_messages(timeline.sample_steps, gpu)
            self._stream_betas = _keep_error_messages(timeline.sample_betas, gpu)

    def stream(self, prompt: object, **sampling: Unpack[Sampling]) -> Generator[Snapshot, None, None]:
        """Streams completions from both policies (`Comparison.stream`).

        Args:
            prompt: The visitor's prompt.
            **sampling: See `Comparison.stream`.
        """
        return self._stream(prompt=_empty_if_none(prompt), every=SNAPSHOT_INTERVAL, **sampling)

    def stream_step(
        self, step: int, prompt: object, *, run: str | None = None, **sampling: Unpack[Sampling]
    ) -> Generator[Snapshot, None, None]:
        """Streams completions as `stream` does, with the PPO policy of a training step.

        Args:
            step: The training step.
            prompt: The visitor's prompt.
            run: The run's name; None for the default run.
            **sampling: See `Comparison.stream`.
        """
        return self._stream_step(step, run, prompt=_empty_if_none(prompt), every=SNAPSHOT_INTERVAL, **sampling)

    def stream_steps(
        self,
        prompt: object,
        steps: Sequence[int] | None = None,
        *,
        run: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generator[CheckpointResult, None, None]:
        """Streams completions of one prompt from the policies of several training steps (`Timeline.sample_steps`).

        Args:
            prompt: The visitor's prompt.
            steps: Training steps; None to spread them over the run.
            run: The run's name; None for the default run.
            **sampling: See `Comparison.stream`.
        """
        return self._stream_steps(_empty_if_none(prompt), steps, run=run, **sampling)

    def stream_betas(self, prompt: object, **sampling: Unpack[Sampling]) -> Generator[CheckpointResult, None, None]:
        """Streams completions of one prompt from the policies of runs with different β (`Timeline.sample_betas`).

        Args:
            prompt: The visitor's prompt.
            **sampling: See `Comparison.stream`.
        """
        return self._stream_betas(_empty_if_none(prompt), **sampling)


def _empty_if_none(prompt: object) -> object:
    """Returns an empty prompt for None, which Gradio sends for an empty text box."""
    return "" if prompt is None else prompt


def _keep_error_messages(
    stream: Callable[..., Generator[T, None, None]], gpu: Callable[[Any], Any] | None
) -> Callable[..., Generator[T, None, None]]:
    """Wraps a stream for ZeroGPU so that errors keep their messages.

    ZeroGPU runs the stream in another process, and the message of an exception is lost on the way back. So that process
    yields an error as an item, and this process raises it.
    """

    def yield_errors(*arguments: Any, **keywords: Any) -> Generator[T | ZooError, None, None]:
        try:
            yield from stream(*arguments, **keywords)
        except ZooError as error:
            yield error

    run_in_process = yield_errors if gpu is None else gpu(yield_errors)

    def raise_errors(*arguments: Any, **keywords: Any) -> Generator[T, None, None]:
        for item in run_in_process(*arguments, **keywords):
            if isinstance(item, ZooError):
                raise item
            yield item

    return raise_errors
