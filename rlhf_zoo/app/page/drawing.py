"""Streams completions at a pace that a browser can follow, on ZeroGPU if the Space has it."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, Unpack

from ...errors import ZooError
from ..engine import AtCheckpoint, Comparison, Sampling, Snapshot, Timeline

#: Seconds between two updates of a completion in progress.
EVERY = 0.08

T = TypeVar("T")


class Drawing:
    """The streams of a comparison and of its timeline.

    Every stream raises ZooError at its first item if the arguments are refused, and later if memory runs out. Closing a
    stream stops the models.

    Args:
        comparison: The models.
        timeline: The run's checkpoints; None if there are none.
        gpu: The decorator of ZeroGPU; None without it.
    """

    def __init__(
        self,
        comparison: Comparison,
        timeline: Timeline | None = None,
        *,
        gpu: Callable[[Any], Any] | None = None,
    ) -> None:
        self.comparison, self.timeline = comparison, timeline
        self._stream = _shielded(comparison.stream, gpu)
        if timeline is not None:
            self._at = _shielded(
                lambda step, run, **sampling: timeline.comparison(step, run=run).stream(**sampling), gpu
            )
            self._steps = _shielded(timeline.at_steps, gpu)
            self._betas = _shielded(timeline.at_betas, gpu)

    def stream(self, prompt: Any, **sampling: Unpack[Sampling]) -> Generator[Snapshot, None, None]:
        """Runs `Comparison.stream` at the page's pace; the last snapshot is `done`.

        Args:
            prompt: The visitor's prompt.
            **sampling: See `Comparison.stream`.
        """
        return self._stream(prompt=_text_of(prompt), every=EVERY, **sampling)

    def at(
        self, step: int, prompt: Any, *, run: str | None = None, **sampling: Unpack[Sampling]
    ) -> Generator[Snapshot, None, None]:
        """Runs `stream` with the policy of a training step.

        Args:
            step: The training step.
            prompt: The visitor's prompt.
            run: The run's name; None for the first.
            **sampling: See `Comparison.stream`.
        """
        return self._at(step, run, prompt=_text_of(prompt), every=EVERY, **sampling)

    def steps(
        self, prompt: Any, steps: Sequence[int] | None = None, *, run: str | None = None, **sampling: Unpack[Sampling]
    ) -> Generator[AtCheckpoint, None, None]:
        """Runs `Timeline.at_steps`.

        Args:
            prompt: The visitor's prompt.
            steps: Training steps; None spreads them over the run.
            run: The run's name; None for the first.
            **sampling: See `Comparison.stream`.
        """
        return self._steps(_text_of(prompt), steps, run=run, **sampling)

    def betas(self, prompt: Any, **sampling: Unpack[Sampling]) -> Generator[AtCheckpoint, None, None]:
        """Runs `Timeline.at_betas`.

        Args:
            prompt: The visitor's prompt.
            **sampling: See `Comparison.stream`.
        """
        return self._betas(_text_of(prompt), **sampling)


def _text_of(prompt: Any) -> Any:
    return "" if prompt is None else prompt


def _shielded(
    stream: Callable[..., Generator[T, None, None]], gpu: Callable[[Any], Any] | None
) -> Callable[..., Generator[T, None, None]]:
    """Wraps a stream for ZeroGPU.

    It runs in another process, which loses the message of an exception, so errors are passed as values.
    """

    def values(*arguments: Any, **keywords: Any) -> Generator[T | ZooError, None, None]:
        try:
            yield from stream(*arguments, **keywords)
        except ZooError as error:
            yield error

    outer = values if gpu is None else gpu(values)

    def unpacked(*arguments: Any, **keywords: Any) -> Generator[T, None, None]:
        for item in outer(*arguments, **keywords):
            if isinstance(item, ZooError):
                raise item
            yield item

    return unpacked
