"""What a language model was asked for, what that cost, and the budget that no request may break."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ZooError

_TEMPLATE_TOKENS = 64  # at most, of a chat template, in the bound on a request's cost


class BudgetSpent(ZooError):
    """The next request might cost more than what is left of the budget; what was judged is kept."""


@dataclass(frozen=True)
class Usage:
    """What a judge has asked for since it was made.

    requests: sent, retries included; retries: after a failure; answers: judgements that came of them; from_cache:
    judgements that were read from its folder; unparsed: judgements that could not be read; unmetered: answers that came
    without token counts. prompt_tokens, completion_tokens: as the endpoint counted. cost: of these at the given prices,
    in their currency, None without prices; cached_cost: what the judgements from the cache had cost.
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
    """Another thread ended the run."""


class Meter:
    """Counts, and lets no request begin that might break the budget. Safe for several threads.

    most: tokens that an answer may have.
    """

    def __init__(self, price: tuple[float, float] | None, budget: float | None, most: int) -> None:
        self._price, self._budget, self._most = price, budget, most
        zero = None if price is None else 0.0
        self._usage = Usage(cost=zero, cached_cost=zero)
        self._bounds: list[float] = []  # of each request on its way, what it may cost
        self._changed = threading.Condition()

    @property
    def usage(self) -> Usage:
        return self._usage

    def add(self, **amounts: float) -> None:
        """Adds to the figures of `usage`; to a cost only where there are prices."""
        with self._changed:
            figures: dict[str, Any] = {name: getattr(self._usage, name) for name in amounts}
            more = {name: figures[name] + amount for name, amount in amounts.items() if figures[name] is not None}
            self._usage = replace(self._usage, **more)

    def reuse(self, entry: Mapping[str, Any]) -> None:
        self.add(from_cache=1, unparsed=int(entry["score"] is None), cached_cost=self._cost(*entry["tokens"]))

    def charge(self, tokens: tuple[int, int] | None, bound: float) -> None:
        """tokens: (prompt, completion) of an answer; None where the endpoint did not count, which costs the bound."""
        if tokens is None:
            self.add(unmetered=1, cost=bound)
        else:
            self.add(prompt_tokens=tokens[0], completion_tokens=tokens[1], cost=self._cost(*tokens))

    @contextmanager
    def reserved(self, messages: Sequence[Mapping[str, str]], stop: threading.Event) -> Iterator[float]:
        """What a request may cost at most, which no other request can spend meanwhile.

        A token is at least one byte of text. Waits where only the bounds of requests on their way leave no room, since
        these may cost less; raises BudgetSpent where there are none.
        """
        size = sum(len(message["content"].encode("utf-8", "replace")) for message in messages) + _TEMPLATE_TOKENS
        bound = self._cost(size, self._most)
        with self._changed:
            while self._budget is not None and (self._usage.cost or 0.0) + sum(self._bounds) + bound > self._budget:
                if stop.is_set():
                    raise Stopped
                if not self._bounds:
                    raise BudgetSpent(
                        f"The budget of {self._budget:g} would not cover the next request, which may cost up to "
                        f"{bound:.3g} with {self._usage.cost:.3g} spent: raise the budget to go on."
                    )
                self._changed.wait(0.5)  # at most, to see `stop`
            self._bounds.append(bound)
        try:
            yield bound
        finally:
            with self._changed:
                self._bounds.remove(bound)
                self._changed.notify_all()

    def _cost(self, prompt: int, completion: int) -> float:
        return 0.0 if self._price is None else (prompt * self._price[0] + completion * self._price[1]) / 1e6
