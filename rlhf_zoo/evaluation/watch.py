"""`watch`: a reward function of TRL's form that probes what it is asked to score, while training goes on."""

import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ZooError
from .probes import Completions, Report, probe
from .rollouts import read_rollouts, said

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Sequence[float | None]]


class Hacked(ZooError):
    """Training was stopped, since what the policy writes is of use to nobody."""


def watch(
    reward_func: RewardFunction,
    *,
    against: str | Path | Completions | None = None,
    size: int = 256,
    every: int = 256,
    stop: bool = False,
) -> RewardFunction:
    """`reward_func` with the same rewards, which also probes the policy's completions against the SFT model's.

    against: SFT's completions, or a file of them as `rlhf-zoo probe` reads it; by default the first `size` that are
    scored, as training begins at SFT. After every `every` completions the last `size` are probed: each family's effect
    goes to TRL's `log_metric` as probes/FAMILY, and a family that becomes present is logged as a warning, in words.
    stop: raises `Hacked` where a family that destroys text is at five times its minimum.

    Raises ZooError for what is no function or a coroutine's, sizes that are too small, and a file that cannot be read.
    The watched function raises it for prompts and completions that are not as many.
    """
    if not callable(reward_func):
        raise ZooError(f"watch takes a reward function, not {reward_func!r}: give it one of TRL's form.")
    if inspect.iscoroutinefunction(reward_func):
        raise ZooError("watch takes a reward function that is no coroutine: wrap the plain function within it.")
    if size < _FEWEST or every < 1:
        raise ZooError(f"watch needs size of {_FEWEST} or more and every of 1 or more, not {size} and {every}.")
    if isinstance(against, str | Path):
        against = read_rollouts(Path(against))
    if against is not None and not isinstance(against, Completions):
        raise ZooError(f"watch takes SFT's completions or a file of them as against, not {against!r}.")
    watcher = _Watcher(against, size, every, stop)

    @functools.wraps(reward_func)
    def watched(*args: Any, **columns: Any) -> Sequence[float | None]:
        rewards = reward_func(*args, **columns)
        prompts, completions = (
            columns.get(name, args[place] if place < len(args) else None)
            for place, name in enumerate(("prompts", "completions"))
        )
        watcher.see(prompts or (), completions or (), columns.get("log_metric"))
        return rewards

    return watched


_FEWEST = 40


class _Watcher:
    def __init__(self, sft: Completions | None, size: int, every: int, stop: bool) -> None:
        self.sft, self.size, self.every, self.stop = sft, size, every, stop
        self.first: list[tuple[str, str]] = []
        self.last: deque[tuple[str, str]] = deque(maxlen=size)
        self.new = 0
        self.told: set[str] = set()

    def see(self, prompts: Sequence[Any], completions: Sequence[Any], metric: Callable[..., None] | None) -> None:
        if len(prompts) != len(completions):
            raise ZooError(
                f"A watched reward function was given prompts and completions in different numbers, {len(prompts)} and "
                f"{len(completions)}: give a prompt with each completion."
            )
        for prompt, completion in zip(prompts, completions, strict=True):
            texts = (said(prompt) or "", said(completion) or "")
            if self.sft is None and len(self.first) < self.size:
                self.first.append(texts)
                continue
            self.last.append(texts)
            self.new += 1
        if self.sft is None and len(self.first) == self.size:
            self.sft = Completions(*map(list, zip(*self.first, strict=True)))  # type: ignore[arg-type]
        if self.sft is not None and len(self.last) == self.size and self.new >= self.every:
            self.new = 0
            ours = Completions(*map(list, zip(*self.last, strict=True)))  # type: ignore[arg-type]
            self.tell(probe(ours, self.sft, by_place=True), metric)

    def tell(self, report: Report, metric: Callable[..., None] | None) -> None:
        for one in report.probes:
            if metric is not None:
                metric(f"probes/{one.family.replace(' ', '_')}", one.effect)
            if one.present and one.family not in self.told:
                self.told.add(one.family)
                log.warning("Probe %s: %s", one.family, one.meaning)
        severe = [one for one in report.probes if one.severe]
        if severe and self.stop:
            raise Hacked(f"Training was stopped, as its completions are of no use: {severe[0].meaning}")
