"""Judges that compare two texts, asked in both orders to cancel position bias.

Such judges often favor the first or the last text that they see (Wang et al. 2023, arXiv:2305.17926; Zheng et al. 2023,
arXiv:2306.05685 §3.4). So each question is asked twice, the second time with the sides swapped, and a text wins only if
the judge prefers it both times.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...errors import ZooError
from ...plugins import JUDGES, call_list_judge, load_object
from ..stats import Estimate, WinRate, bootstrap_mean, proportion, win_rate

_PREFERENCES = (0.0, 0.5, 1.0)


class PairVerdict(NamedTuple):
    """The result of one comparison.

    Attributes:
        score: 1 if the first text won, 0 if the second did, ½ for a tie.
        details: The answers behind the score, as JSON. `details["orders"]` has two preferences for the *first* text:
            when it was shown first, and when it was shown second; None for an unreadable answer. There is no "orders"
            if the judge was not asked, such as for equal texts. A judge may add keys.
    """

    score: float
    details: Mapping[str, Any]


@runtime_checkable
class PairJudge(Protocol):
    """Compares two completions of each prompt."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One sentence for a card: what the judge is, what it was trained on, and how good it is."""
        ...

    def compare(self, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[PairVerdict]:
        """Compares two completions of each prompt.

        Args:
            prompts: (N,) texts.
            first: (N,) one completion of each prompt.
            second: (N,) the other completion.

        Returns:
            (N,) verdicts.
        """
        ...


def merge_orders(in_order: float | None, swapped: float | None, **details: Any) -> PairVerdict:
    """Merges the answers to both orders into one verdict: a win if both prefer the same text, else a tie.

    Args:
        in_order: The answer to the order (first, second): 1 for the text shown first, 0 for the other text, ½ for a
            tie, None for an unreadable answer.
        swapped: The answer to the order (second, first), in the same form.
        **details: Further details of the verdict.
    """
    # `swapped` prefers the text shown first, which is `second`, so it is inverted.
    orders = [in_order, None if swapped is None else 1 - swapped]
    score = orders[0] if orders[0] is not None and orders[0] == orders[1] else 0.5
    return PairVerdict(score, {"orders": orders, **details})


class FunctionPairJudge:
    """A function (prompts, shown_first, shown_second) -> preferences, called in both orders.

    A preference is 1 for the text shown first, 0 for the other, and ½ for a tie.

    Args:
        target: "module:attribute", an entry point's name, or the function itself.
        name: The judge's name; None for the function's name, or that of the entry point.
        description: A sentence for cards; None for the first paragraph of the function's docstring.
    """

    def __init__(
        self,
        target: str | Callable[[list[str], list[str], list[str]], Sequence[float]],
        *,
        name: str | None = None,
        description: str | None = None,
    ) -> None:
        self._function = load_function(target) if isinstance(target, str) else target
        # Errors name the function by its target.
        self._target = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
        self.name = name or self._target.rpartition(":")[2]
        self.description = description or first_paragraph(self._function) or f"The function {self._target}."

    def compare(self, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[PairVerdict]:
        """Asks in both orders and merges the answers.

        Args:
            prompts: (N,) texts.
            first: (N,) one completion of each prompt.
            second: (N,) the other completion.

        Returns:
            (N,) verdicts.

        Raises:
            ZooError: The function does not return 1, ½ or 0 for each pair.
        """
        check_lengths(prompts, first, second)
        orders = (self._ask(prompts, first, second), self._ask(prompts, second, first))
        return [merge_orders(in_order, swapped) for in_order, swapped in zip(*orders, strict=True)]

    def _ask(self, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float]:
        preferences = call_list_judge(self._target, self._function, list(prompts), list(first), list(second))
        if len(preferences) != len(prompts):
            raise ZooError(
                f"The judge {self._target!r} gave {len(preferences)} preferences for {len(prompts)} pairs: "
                "it must give one for each pair."
            )
        for index, preference in enumerate(preferences):
            # Both orders agree only if their preferences are equal, which graded numbers hardly ever are.
            if preference not in _PREFERENCES:
                raise ZooError(
                    f"The judge {self._target!r} gave {preference!r} for pair {index}: it must be 1, 0.5 or 0."
                )
        return [float(preference) for preference in preferences]


@dataclass(frozen=True)
class PairReport:
    """A judge's results on N pairs.

    Attributes:
        win_rate: The first side's win rate.
        agreement: The share of pairs on which both orders agree; about ½ for a judge that answers at random without
            ties. None if no pair was readable.
        shown_first: The share of answers that prefer the text shown first (a tie counts ½); ½ without position bias.
            None if no pair was readable.
        unparsed: Number of pairs with an unreadable answer.
        verdicts: The N verdicts.
    """

    win_rate: WinRate
    agreement: Estimate | None
    shown_first: Estimate | None
    unparsed: int
    verdicts: list[PairVerdict] = field(repr=False)

    @property
    def scores(self) -> list[float]:
        """The score of each verdict, for the first side."""
        return [verdict.score for verdict in self.verdicts]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON, without the verdicts."""
        return {
            "win_rate": self.win_rate.to_json(),
            "agreement": self.agreement.to_json() if self.agreement else None,
            "shown_first": self.shown_first.to_json() if self.shown_first else None,
            "unparsed": self.unparsed,
        }


def compare_pairs(
    judge: PairJudge,
    prompts: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
    *,
    seed: int,
    groups: Sequence[Hashable] | None = None,
) -> PairReport:
    """Compares N pairs with a judge and computes the win rate of `first`.

    Args:
        judge: A judge of pairs.
        prompts: (N,) texts.
        first: (N,) one completion of each prompt.
        second: (N,) the other completion.
        seed: Seed of the resamples.
        groups: (N,) the group of each pair, for the intervals of win_rate and shown_first; None to group by prompt.

    Raises:
        ValueError: Lengths differ or there are no pairs. Exceptions from the judge propagate.
    """
    verdicts = judge.compare(prompts, first, second)
    scores = [verdict.score for verdict in verdicts]
    pair_groups = list(prompts if groups is None else groups)
    agreement_count, shown_first_scores, answer_groups = 0, [], []
    # A judge may call a pair of equal texts a tie without asking, so such a pair has no orders.
    readable_pairs = [
        (verdict.details["orders"], group)
        for verdict, group in zip(verdicts, pair_groups, strict=True)
        if None not in verdict.details.get("orders", [None])
    ]
    for (when_first, when_second), group in readable_pairs:
        # An agreement is the same preference for the same text in both orders, ties included.
        agreement_count += when_first == when_second
        # Both numbers are preferences for the text shown first, so their mean measures position bias.
        shown_first_scores += [when_first, 1 - when_second]
        answer_groups += [group, group]
    return PairReport(
        win_rate=win_rate(scores, [1 - score for score in scores], pair_groups),
        agreement=proportion(agreement_count, len(readable_pairs)) if readable_pairs else None,
        shown_first=bootstrap_mean(shown_first_scores, answer_groups, seed=seed) if shown_first_scores else None,
        unparsed=sum(None in verdict.details.get("orders", []) for verdict in verdicts),
        verdicts=verdicts,
    )


def check_lengths(prompts: Sequence[str], *sides: Sequence[str]) -> None:
    """Raises ValueError unless each side has as many completions as there are prompts."""
    if any(len(completions) != len(prompts) for completions in sides):
        counts = " and ".join(str(len(completions)) for completions in sides)
        raise ValueError(
            f"There are {len(prompts)} prompts but {counts} completions: give one completion for each prompt."
        )


def load_function(target: str) -> Callable[..., Any]:
    """Loads a judge's function.

    Args:
        target: "module:attribute" or an entry point's name.

    Raises:
        ZooError: There is no such function.
    """
    function = load_object(target, group=JUDGES)
    if not callable(function):
        raise ZooError(f"The judge {target!r} is a {type(function).__name__}, not a function: name a function.")
    return function


def first_paragraph(function: Callable[..., Any]) -> str:
    """Returns the first paragraph of a function's docstring, on one line; "" without a docstring."""
    return " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
