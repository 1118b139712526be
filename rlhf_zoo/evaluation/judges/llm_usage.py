"""Counts a language model's usage and cost, and enforces a budget."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ZooError

_TEMPLATE_TOKENS = 64  # upper bound for the tokens that a chat template adds to a request


class BudgetSpent(ZooError):
    """The next request might exceed the budget. The judgments received so far are kept."""


@dataclass(frozen=True)
class Usage:
    """The requests, tokens and cost of a judge since it was created.

    Attributes:
        requests: Requests sent, retries included.
        retries: Requests sent again after a failure.
        answers: Judgments received.
        from_cache: Judgments read from the cache.
        unparsed: Judgments that could not be read, those in the cache included.
        unmetered: Answers for which the endpoint reported no tokens.
        prompt_tokens: Prompt tokens, as counted by the endpoint.
        completion_tokens: Completion tokens, as counted by the endpoint.
        cost: The cost of these tokens, plus the largest possible cost of each unmetered answer, in the currency of the
            prices; None without prices.
        cached_cost: The cost of the cached judgments' tokens at the current prices; None without prices.
    """

    requests: int = 0
    retries: int = 0
    answers: int = 0
    from_cache: int = 0
    unparsed: int = 0
    unmetered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    cached_cost: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


class Stopped(Exception):
    """Another thread stopped the run."""


class Meter:
    """Counts usage, and refuses requests that might exceed the budget. Thread-safe.

    Args:
        price: Price per million prompt tokens and per million completion tokens; None if unknown.
        budget: Largest total cost; None for no limit.
        max_answer_tokens: Largest number of tokens in an answer.
    """

    def __init__(self, price: tuple[float, float] | None, budget: float | None, max_answer_tokens: int) -> None:
        self._price, self._budget, self._max_answer_tokens = price, budget, max_answer_tokens
        zero = None if price is None else 0.0
        self._usage = Usage(cost=zero, cached_cost=zero)
        self._bounds: list[float] = []  # the largest possible cost of each pending request
        self._changed = threading.Condition()

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return self._usage

    def add(self, **amounts: float) -> None:
        """Adds to the figures of `usage`. Without prices, costs stay None.

        Args:
            **amounts: Amounts to add, by the attributes of `Usage`.
        """
        with self._changed:
            figures: dict[str, Any] = {name: getattr(self._usage, name) for name in amounts}
            sums = {name: figures[name] + amount for name, amount in amounts.items() if figures[name] is not None}
            self._usage = replace(self._usage, **sums)

    def count_cached(self, entry: Mapping[str, Any]) -> None:
        """Counts a judgment that was read from the cache."""
        self.add(from_cache=1, unparsed=int(entry["score"] is None), cached_cost=self._cost(*entry["tokens"]))

    def charge(self, tokens: tuple[int, int] | None, bound: float) -> None:
        """Counts an answer's tokens.

        Args:
            tokens: (prompt, completion); None if the endpoint did not report them. Then the bound is charged.
            bound: The most that the request could cost.
        """
        if tokens is None:
            self.add(unmetered=1, cost=bound)
        else:
            self.add(prompt_tokens=tokens[0], completion_tokens=tokens[1], cost=self._cost(*tokens))

    @contextmanager
    def reserve(self, messages: Sequence[Mapping[str, str]], stop: threading.Event) -> Iterator[float]:
        """Reserves the most that a request may cost, so that no parallel request can spend it.

        If pending requests have reserved too much of the budget, waits until they end, because they may cost less.

        Args:
            messages: The request's messages.
            stop: Ends the wait.

        Yields:
            The most that the request may cost.

        Raises:
            BudgetSpent: The budget cannot cover the request.
            Stopped: `stop` was set.
        """
        # A token is at least one byte of text, so bytes bound the tokens without a tokenizer.
        text_bytes = sum(len(message["content"].encode("utf-8", "replace")) for message in messages)
        bound = self._cost(text_bytes + _TEMPLATE_TOKENS, self._max_answer_tokens)
        with self._changed:
            while self._budget is not None and (self._usage.cost or 0.0) + sum(self._bounds) + bound > self._budget:
                if stop.is_set():
                    raise Stopped
                # Without pending requests, waiting frees nothing.
                if not self._bounds:
                    raise BudgetSpent(
                        f"The budget of {self._budget:g} would not cover the next request, which may cost up to "
                        f"{bound:.3g} with {self._usage.cost:.3g} spent: raise the budget to continue."
                    )
                self._changed.wait(0.5)  # seconds at most, so that `stop` is noticed
            self._bounds.append(bound)
        try:
            yield bound
        finally:
            with self._changed:
                self._bounds.remove(bound)
                self._changed.notify_all()

    def _cost(self, prompt: int, completion: int) -> float:
        return 0.0 if self._price is None else (prompt * self._price[0] + completion * self._price[1]) / 1e6
