"""Calls reward functions as TRL's GRPO does, and checks what they return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.reserved_columns import TABLE, columns_for_functions
from ..modeling.time_limit import Expired, deadline
from .by_token import PartsMismatch, is_list, rewards_by_token, to_float
from .rule import text_of

RewardFunction = Callable[..., Any]

#: Characters of a prompt or value that an error quotes.
MAX_QUOTED = 80


@dataclass(frozen=True)
class Batch:
    """The arguments of reward functions for B rows.

    Attributes:
        prompts: B texts or conversations.
        completions: B texts, or lists of messages.
        completion_ids: B lists of token ids.
        columns: The data set's columns: lists of B values, or values that belong to no row.
        trainer_state: None outside of training.
        prompt_ids: B lists of token ids, before completion_ids; () if they are not needed.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, Any]
    trainer_state: Any = None
    prompt_ids: Sequence[list[int]] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    def row(self, index: int) -> Batch:
        """Returns one row as a batch.

        Args:
            index: The row.
        """
        rows = slice(index, index + 1)
        columns = {
            name: values[rows] if isinstance(values, (list, tuple)) and len(values) == len(self) else values
            for name, values in self.columns.items()
        }
        return replace(
            self,
            prompts=self.prompts[rows],
            completions=self.completions[rows],
            completion_ids=self.completion_ids[rows],
            prompt_ids=self.prompt_ids[rows],
            columns=columns,
        )

    def prompt(self, index: int) -> str:
        """Returns a row's prompt, quoted and shortened.

        Args:
            index: The row.
        """
        return repr(_shorten(text_of(self.prompts[index])))


class FunctionCall:
    """A reward function with its name, and the values that it logs while it scores one batch.

    Args:
        name: Its name in metrics.
        function: The function.
    """

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.name = name
        self.function = function
        self.extra: dict[str, list[Any]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function."""
        function = unwrap_partials(self.function)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)

    def call(self, batch: Batch) -> Any:
        """Calls the function.

        Args:
            batch: The batch to score.

        Returns:
            What the function returns.

        Raises:
            Exception: Whatever the function raises.
        """
        values = self.function(**self._arguments(batch))
        if inspect.isawaitable(values):
            return _wait(_as_coroutine(values))
        return list(values) if isinstance(values, Iterator) else values

    async def call_async(self, batch: Batch) -> Any:
        """Calls a coroutine function.

        Args:
            batch: The batch to score.
        """
        return await self.function(**self._arguments(batch))

    def raise_error(self, batch: Batch, error: Exception) -> NoReturn:
        """Raises the error for an exception on a batch.

        Args:
            batch: The batch that the function scored.
            error: The exception that it raised.

        Raises:
            ZooError: The message names the function and the row. The function's own ZooError passes through.
        """
        if isinstance(error, ZooError):
            raise error
        raise self._error_for(batch, error) from error

    def _error_for(self, batch: Batch, error: Exception) -> ZooError:
        """Makes the error, which names the first row that fails on its own too."""
        if misfit := self._signature_error(batch):
            return misfit
        row = 0
        if len(batch) > 1:
            alone = ((row, self._exception_on(batch.row(row))) for row in range(len(batch)))
            first = next(((row, raised) for row, raised in alone if raised is not None), None)
            if first is None:
                return ZooError(
                    f"The reward function {self.name} raised {_describe(error)} on the batch of {len(batch)} "
                    "completions, but on none of its rows alone: check what it does across rows, or whether it fails "
                    "at random."
                )
            row, error = first
        return ZooError(
            f"The reward function {self.name} raised {_describe(error)} on row {row}, prompt {batch.prompt(row)}: "
            "fix it, or let it return None for such a row if another reward applies."
        )

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        """Returns the function's arguments, with copies of lists and mappings, because a function may change them.

        Columns never replace our arguments: names in RESERVED are left out.
        """
        state = {} if batch.trainer_state is None else {"trainer_state": batch.trainer_state}
        return {
            "prompts": _copy_nested(batch.prompts),
            "completions": _copy_nested(batch.completions),
            "completion_ids": _copy_nested(batch.completion_ids),
            **_copy_nested(columns_for_functions(batch.columns)),
            **state,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column].extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))

    def _exception_on(self, batch: Batch) -> Exception | None:
        try:
            self.call(batch)
        except Exception as error:
            return error
        return None

    def _signature_error(self, batch: Batch) -> ZooError | None:
        """Returns the error for a signature that does not accept the arguments of reward functions; None if it does."""
        arguments = self._arguments(batch)
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            return ZooError(
                f"The reward function {self.name} cannot be called with {join_words(list(arguments))} ({error}): let "
                "it take **columns, and add each column that it needs to the prompts."
            )
        except ValueError:  # some callables written in C have no signature
            return None
        return None


def call_functions(calls: Sequence[FunctionCall], batch: Batch, *, timeout: float | None = None) -> dict[str, Any]:
    """Calls each function. Coroutine functions run concurrently.

    Args:
        calls: The functions.
        batch: The batch to score.
        timeout: Seconds that one function, or all coroutine functions together, may take; None for no limit.

    Returns:
        What each function returned, by name.

    Raises:
        ZooError: A function raises or exceeds the limit. After Ctrl-C it gets a few more seconds (`time_limit.GRACE`).
    """
    results: dict[str, Any] = {}
    for call in calls:
        if not call.is_async:
            try:
                with _limit_time([call], timeout):
                    results[call.name] = call.call(batch)
            except Exception as error:
                call.raise_error(batch, error)
    async_calls = [call for call in calls if call.is_async]
    if async_calls:
        with _limit_time(async_calls, timeout):
            async_results = _wait(_gather([call.call_async(batch) for call in async_calls]))
        for call, answer in zip(async_calls, async_results, strict=True):
            if isinstance(answer, Exception):
                call.raise_error(batch, answer)
            results[call.name] = answer
    return results


@contextmanager
def _limit_time(calls: Sequence[FunctionCall], timeout: float | None) -> Iterator[None]:
    began = time.monotonic()
    try:
        with deadline(timeout, hurried=True):
            yield
    except Expired as error:
        seconds, names = time.monotonic() - began, join_words([call.name for call in calls])
        raise ZooError(
            f"The reward function {names} did not return within {seconds:.0f} s: fix it"
            + (", or raise reward_timeout." if timeout is not None and seconds >= timeout else ", or wait for it.")
        ) from error


def collect_logs(calls: Sequence[FunctionCall], count: int) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Collects what functions logged for a batch.

    Args:
        calls: The functions, after they were called.
        count: Completions in the batch.

    Returns:
        Extra columns, and the means of metrics. If two functions log a column of the same name, or if the table of
        completions already uses the name, the function's name is appended.

    Raises:
        ZooError: The number of values in a column is not `count`.
    """
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        for column, values in call.extra.items():
            if len(values) != count:
                raise ZooError(
                    f"The reward function {call.name} logged {len(values)} values as {column!r} for {count} "
                    "completions: log one for each."
                )
            extra[f"{column} ({call.name})" if column in extra or column in TABLE else column] = values
        for name, values in call.metrics.items():
            metrics[name] += values
    return extra, {name: _mean(values) for name, values in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    """Computes a mean; NaN for infinities of both signs, or if the sum overflows."""
    try:
        return math.fsum(values) / len(values)
    except (ValueError, OverflowError):
        return math.nan


#: The fix in errors about a returned value.
EXPECTED_RETURN = "return a float or None for each completion"


def check_count(name: str, values: Any, batch: Batch) -> list[Any]:
    """Checks that a function returned a list with one entry for each row.

    Args:
        name: The function's name.
        values: What it returned.
        batch: What it scored.

    Returns:
        The list.

    Raises:
        ZooError: It is not a list, or has another length.
    """
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise ZooError(
            f"The reward function {name} returned {_show(values)} instead of a list of numbers: {EXPECTED_RETURN}."
        )
    rewards = list(values)
    if len(rewards) != len(batch):
        raise ZooError(
            f"The reward function {name} returned {len(rewards)} rewards for {len(batch)} completions: "
            f"{EXPECTED_RETURN}."
        )
    return rewards


def convert_rewards(
    name: str, values: Any, batch: Batch, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Tensor, list[list[float]] | None]:
    """Checks and converts what a function returned.

    Args:
        name: The function's name.
        values: What it returned.
        batch: What it scored.
        tokenizer: The policy's, to find the tokens of spans.

    Returns:
        Totals (B,) float32, NaN for None. And, if the function returned a list for some completion, one number for each
        token of each completion, otherwise None. These are 0 in rows where the function returned one number or None. In
        rows where it returned a list, they add up to the row's total.

    Raises:
        ZooError: The values are not B finite numbers or lists that fit their completions.
    """
    rewards = check_count(name, values, batch)
    totals: list[float] = []
    token_values = [[0.0] * len(ids) for ids in batch.completion_ids]
    for row, value in enumerate(rewards):
        try:
            if is_list(value):
                text, ids = text_of(batch.completions[row]), batch.completion_ids[row]
                prompt = batch.prompt_ids[row] if batch.prompt_ids else ()
                token_values[row] = rewards_by_token(value, text, ids, tokenizer, prompt)
                parts = token_values[row]
            else:
                parts = [math.nan if value is None else to_float(value)]
        except PartsMismatch as misfit:
            raise ZooError(
                f"The reward function {name} returned {misfit} for row {row}, prompt {batch.prompt(row)}: return one "
                "number for the completion, one for each of completion_ids, or spans (start, end, value) in characters "
                "of the completion."
            ) from misfit
        except (TypeError, ValueError, RuntimeError) as error:
            raise ZooError(
                f"The reward function {name} returned {_show(value)} instead of a number for row {row}, prompt "
                f"{batch.prompt(row)}: {EXPECTED_RETURN}."
            ) from error
        total = sum(parts)
        # The trainer computes with rewards in float32, where larger numbers would be infinite.
        too_large = [x for x in (*parts, total) if not abs(x) <= torch.finfo(torch.float32).max]
        if value is not None and too_large:
            raise ZooError(
                f"The reward function {name} returned {too_large[0]} for row {row}, prompt {batch.prompt(row)}: return "
                "a finite number, or None where it does not apply."
            )
        totals.append(total)
    return torch.tensor(totals, dtype=torch.float32), token_values if any(map(is_list, rewards)) else None


def _copy_nested(value: Any) -> Any:
    """Copies lists and mappings at any depth; all other values are shared."""
    if isinstance(value, dict):
        return {key: _copy_nested(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy_nested(inner) for inner in value]
    return tuple(map(_copy_nested, value)) if type(value) is tuple else value


def unwrap_partials(function: Any) -> Any:
    """Returns the function under any partials.

    Args:
        function: A function, a partial or another callable.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return function


def join_words(words: Sequence[str]) -> str:
    """Joins words as "a", "a and b" or "a, b and c".

    Args:
        words: At least one.
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


def _show(value: Any) -> str:
    return _shorten(" ".join(repr(value).split()))


def _describe(error: Exception) -> str:
    """Writes an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


async def _as_coroutine(values: Awaitable[Any]) -> Any:
    return await values


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Waits for all, and returns what each of them returns or raises."""
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Waits for a coroutine, even if the calling thread has a running loop, as in a notebook."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))
    try:
        return future.result()
    except BaseException:  # such as Ctrl-C: the coroutine must not continue in the background
        future.cancel()
        raise


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Returns one loop for all batches of a process, as in GRPO: connections that a function keeps belong to a loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rlhf-zoo-rewards", daemon=True).start()
    return loop
