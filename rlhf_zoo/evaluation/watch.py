"""`watch`: wraps a reward function in TRL's form so that it probes the completions it scores during training."""

import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ZooError
from .probes import Completions, Report, probe
from .probes.permutations import MIN_SWAPPED_PROMPTS
from .prompt_groups import near_duplicate_key, number_of_groups
from .rollout_files import Rollouts, message_text, read_rollouts
from .trackers import send_alert

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Sequence[float | None]]


class Hacked(ZooError):
    """Training was stopped because the policy's completions are useless."""


def watch(
    reward_func: RewardFunction,
    *,
    against: Rollouts | None = None,
    size: int = 256,
    every: int = 256,
    stop: bool = False,
) -> RewardFunction:
    """Wraps a reward function so that it also probes the policy's completions against the SFT model's.

    The rewards stay the same. After every `every` completions, the last `size` completions are probed. If SFT did not
    answer all their prompts, these are paired in order with the prompts that SFT did answer. This needs 13 prompts, so
    earlier completions are added until there are as many; prompts that ask the same question count as one. TRL's
    `log_metric` receives each family's effect as probes/FAMILY. A family that fires for the first time is logged as a
    warning, and Weights & Biases and trackio send an alert if this process reports to them.

    Args:
        reward_func: A reward function of TRL's form.
        against: SFT's completions, in a file or as rows as `read_rollouts` reads them; None for the first `size`
            completions that are scored, because training starts at SFT. If these answer fewer than 13 prompts, later
            ones are added until there are 13 or a prompt recurs.
        size: The smallest number of completions that a probe compares with SFT's.
        every: Number of completions between two probes.
        stop: Whether to raise `Hacked` if a family that destroys text has an effect of five times its threshold.

    Returns:
        A reward function, which raises ZooError if prompts and completions differ in number, or if there are too few
        prompts to compare.

    Raises:
        ZooError: `reward_func` is not a plain function, `size` or `every` is too small, or the file cannot be read.
    """
    if not callable(reward_func):
        raise ZooError(f"watch needs a reward function of TRL's form, not {reward_func!r}.")
    # The wrapper is synchronous and would return the coroutine instead of rewards.
    if inspect.iscoroutinefunction(reward_func):
        raise ZooError("watch cannot wrap a coroutine function: wrap the plain reward function that it awaits.")
    watcher = Watcher(against, size, every, stop=stop)

    @functools.wraps(reward_func)
    def watched(*args: Any, **columns: Any) -> Sequence[float | None]:
        # The reward is computed first, so that its errors look the same as without the wrapper.
        rewards = reward_func(*args, **columns)
        # The trainer may pass prompts and completions by position or by name.
        prompts, completions = (
            columns.get(name, args[position] if position < len(args) else None)
            for position, name in enumerate(("prompts", "completions"))
        )
        watcher.collect(prompts or (), completions or (), columns.get("log_metric"))
        return rewards

    return watched


_MIN_SIZE = 40  # completions that a probe needs
_MAX_COLLECTED = 8  # in multiples of `size`; with this many completions, too few prompts are an error


class Watcher:
    """Collects a policy's completions during training, and probes the latest ones.

    Args:
        against: As for `watch`.
        size: As for `watch`.
        every: As for `watch`.
        stop: As for `watch`.

    Raises:
        ZooError: As for `watch`.
    """

    def __init__(self, against: Rollouts | None, size: int, every: int, *, stop: bool) -> None:
        if size < _MIN_SIZE or every < 1:
            raise ZooError(f"watch needs size >= {_MIN_SIZE} and every >= 1, not size={size} and every={every}.")
        self.sft = None if against is None else _group_near_duplicates(read_rollouts(against, name="`against`"))
        self.size, self.every, self.stop = size, every, stop
        self.first_samples: list[tuple[str, str]] = []  # (prompt, completion) from before training changes the policy
        self.last_samples: list[tuple[str, str]] = []  # the later ones that may be probed
        self.unprobed_count = 0  # completions since the last probe
        self.warned_families: set[str] = set()

    def collect(
        self, prompts: Sequence[object], completions: Sequence[object], log_metric: Callable[..., None] | None
    ) -> None:
        """Collects completions, and probes them if there are enough new ones.

        Args:
            prompts: (N,) texts or conversations.
            completions: (N,) their completions.
            log_metric: Receives the name and the value of each effect; None to log no effects.

        Raises:
            ZooError: As for the function that `watch` returns.
            Hacked: `stop` is set and the completions are useless.
        """
        if len(prompts) != len(completions):
            raise ZooError(
                f"A watched reward function received {len(prompts)} prompts and {len(completions)} completions: pass "
                "one prompt per completion."
            )
        for prompt, completion in zip(prompts, completions, strict=True):
            sample = (message_text(prompt) or "", message_text(completion) or "")
            # The first completions come from a policy with few or no updates, so they count as SFT's.
            if self.sft is None and not self._has_enough_sft(sample[0]):
                self.first_samples.append(sample)
                continue
            self.sft = self.sft or _group_near_duplicates(_to_completions(self.first_samples))
            self.last_samples.append(sample)
            self.unprobed_count += 1
        if self.sft is not None and len(self.last_samples) >= self.size and self.unprobed_count >= self.every:
            self._probe(self.sft, log_metric)

    def _has_enough_sft(self, prompt: str) -> bool:
        """Whether there are `size` completions of SFT, and they answer enough prompts or this prompt recurs."""
        if len(self.first_samples) < self.size:
            return False
        prompts = {first_prompt for first_prompt, _ in self.first_samples}
        # If the prompt equals the previous one, this is another completion of the same group.
        is_repeated = prompt in prompts and prompt != self.first_samples[-1][0]
        return is_repeated or len(set(map(near_duplicate_key, prompts))) >= MIN_SWAPPED_PROMPTS

    def _probe(self, sft: Completions, log_metric: Callable[..., None] | None) -> None:
        known_groups = sft.group_by_prompt

        def group_of(prompt: str) -> Hashable:
            return known_groups[prompt] if prompt in known_groups else near_duplicate_key(prompt)

        # If SFT answered all of these prompts, a few prompts are enough. Otherwise prompts are paired by position.
        samples = self.last_samples[-self.size :]
        by_position = not all(prompt in known_groups for prompt, _ in samples)
        group_count = number_of_groups(known_groups.values())
        if by_position and group_count < MIN_SWAPPED_PROMPTS:
            raise ZooError(
                f"watch compares the policy with SFT on different prompts. For this, SFT's completions must answer "
                f"{MIN_SWAPPED_PROMPTS} prompts that ask different things, not {group_count}: pass completions of more "
                "prompts as `against`."
            )
        groups = {group_of(prompt) for prompt, _ in samples}
        while by_position and len(groups) < MIN_SWAPPED_PROMPTS and len(samples) < len(self.last_samples):
            samples = self.last_samples[-len(samples) - 1 :]
            groups.add(group_of(samples[0][0]))
        if by_position and len(groups) < MIN_SWAPPED_PROMPTS:
            if len(self.last_samples) >= _MAX_COLLECTED * self.size:
                raise ZooError(
                    f"watch needs {MIN_SWAPPED_PROMPTS} prompts that ask different things, but the last {len(samples)} "
                    f"completions answer {len(groups)}, and SFT did not answer all of these: pass SFT's "
                    "completions of these prompts as `against`."
                )
            return
        # The counter is reset before the probe, because the probe may raise.
        self.last_samples, self.unprobed_count = samples, 0
        policy = replace(_to_completions(samples), groups=[group_of(prompt) for prompt, _ in samples])
        self.report_findings(probe(policy, sft, by_position=by_position), log_metric)

    def report_findings(self, report: Report, log_metric: Callable[..., None] | None) -> None:
        """Logs effects, warns once of each family that fired, and raises `Hacked` if `stop` and one is severe."""
        for result in report.probes:
            if log_metric is not None:
                log_metric(f"probes/{result.family.replace(' ', '_')}", result.effect)
            if result.fired and result.family not in self.warned_families:
                self.warned_families.add(result.family)
                log.warning("Probe %s: %s", result.family, result.finding)
                send_alert(f"Probe {result.family} fired", result.finding, is_error=result.severe)
        first_severe = next((result for result in report.probes if result.severe), None)
        if first_severe is not None and self.stop:
            raise Hacked(f"Training was stopped because the policy's completions are useless: {first_severe.finding}")


def _to_completions(samples: Sequence[tuple[str, str]]) -> Completions:
    return Completions([prompt for prompt, _ in samples], [completion for _, completion in samples])


def _group_near_duplicates(sft: Completions) -> Completions:
    """Gives near-duplicate prompts one group, unless the completions have groups already."""
    if sft.groups is not None:
        return sft
    return replace(sft, groups=[near_duplicate_key(prompt) for prompt in sft.prompts])
