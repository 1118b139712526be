"""Completions for a page: at a pace that a browser can follow, and on ZeroGPU where a Space has it."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from ...errors import ZooError
from ..engine import AtCheckpoint, Comparison, Snapshot, Timeline

#: Seconds between two pictures of a completion that is being written.
EVERY = 0.08

T = TypeVar("T")


class Drawing:
    """The streams of a comparison and of its timeline.

    Every stream raises ZooError at its first item for what is refused, and later where memory runs out. Closing one
    stops the models.

    Args:
        comparison: The models.
        timeline: The run's checkpoints; None where there are none.
        gpu: The decorator of ZeroGPU; None where there is none.
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

    def stream(self, prompt: Any, **sampling: Any) -> Generator[Snapshot, None, None]:
        """Draws `Comparison.stream` at a page's pace; the last snapshot is `done`.

        Args:
            prompt: What a visitor wrote.
            **sampling: Keywords of `Comparison.stream`.
        """
        return self._stream(prompt=_given(prompt), every=EVERY, **sampling)

    def at(self, step: int, prompt: Any, *, run: str | None = None, **sampling: Any) -> Generator[Snapshot, None, None]:
        """Draws `stream` with PPO's policy of a step.

        Args:
            step: Of training.
            prompt: What a visitor wrote.
            run: The run's name; None for the first.
            **sampling: Keywords of `Comparison.stream`.
        """
        return self._at(step, run, prompt=_given(prompt), every=EVERY, **sampling)

    def steps(
        self, prompt: Any, steps: Sequence[int] | None = None, *, run: str | None = None, **sampling: Any
    ) -> Generator[AtCheckpoint, None, None]:
        """Draws `Timeline.at_steps`.

        Args:
            prompt: What a visitor wrote.
            steps: Of training; None spreads them over the run.
            run: The run's name; None for the first.
            **sampling: Keywords of `Comparison.stream`.
        """
        return self._steps(_given(prompt), steps, run=run, **sampling)

    def betas(self, prompt: Any, **sampling: Any) -> Generator[AtCheckpoint, None, None]:
        """Draws `Timeline.at_betas`.

        Args:
            prompt: What a visitor wrote.
            **sampling: Keywords of `Comparison.stream`.
        """
        return self._betas(_given(prompt), **sampling)


def _given(prompt: Any) -> Any:
    return "" if prompt is None else prompt


def _shielded(
    stream: Callable[..., Generator[T, None, None]], gpu: Callable[[Any], Any] | None
) -> Callable[..., Generator[T, None, None]]:
    """`stream` on ZeroGPU, which runs it in a process of its own: an exception comes back from there without its words,
    so that errors cross as values."""

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
