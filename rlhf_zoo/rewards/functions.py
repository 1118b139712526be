"""Calls reward functions as TRL's GRPO does, and checks their return values."""

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
from ..modeling.chat_template import Prompt
from ..modeling.reserved_columns import columns_for_functions
from ..modeling.time_limit import LimitExceeded, deadline
from .by_token import PartsMismatch, is_list, rewards_by_token, to_float
from .rule import last_message_text

RewardFunction = Callable[..., Any]

#: The maximum length of an excerpt of a prompt or a value in an error, in characters.
MAX_QUOTED = 80


@dataclass(frozen=True)
class Batch:
    """The arguments of reward functions for B rows.

    Attributes:
        prompts: B texts or conversations.
        completions: B texts, or lists of messages.
        completion_ids: B lists of token ids.
        columns: The data set's other columns: lists of B values, or single values for the entire batch.
        trainer_state: The trainer's state; None outside training.
        prompt_ids: B lists of the prompts' token ids; () if they are not needed.
    """

    prompts: list[Prompt]
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
            index: The row's index.
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

    def quoted_prompt(self, index: int) -> str:
        """Returns a row's prompt, shortened and quoted, for messages.

        Args:
            index: The row's index.
        """
        return repr(_shorten(last_message_text(self.prompts[index])))


class NamedReward:
    """A reward function with its name. Collects what the function logs while it scores a batch.

    Args:
        name: The name in metrics.
        function: The function.
    """

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.name = name
        self.function = function
        self.extra: dict[str, list[Any]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        function = unwrap_partials(self.function)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)

    def __call__(self, batch: Batch) -> Any:
        """Calls the function and returns its result. An exception of the function propagates.

        Args:
            batch: The batch to score.
        """
        result = self.function(**self._arguments(batch))
        if inspect.isawaitable(result):
            return _run_coroutine(_as_coroutine(result))
        return list(result) if isinstance(result, Iterator) else result

    async def call_async(self, batch: Batch) -> Any:
        """Calls the function, which must be a coroutine function, and awaits its result.

        Args:
            batch: The batch to score.
        """
        return await self.function(**self._arguments(batch))

    def raise_as_zoo_error(self, batch: Batch, error: Exception) -> NoReturn:
        """Re-raises an exception of the function as a ZooError that names the function and the row.

        Args:
            batch: The batch that the function scored.
            error: The exception that the function raised.

        Raises:
            ZooError: Always. A ZooError is raised unchanged.
        """
        if isinstance(error, ZooError):
            raise error
        raise self._error_for(batch, error) from error

    def _error_for(self, batch: Batch, error: Exception) -> ZooError:
        """Builds an error that names the first row on which the function also fails alone, if there is one."""
        if signature_error := self._signature_error(batch):
            return signature_error
        if len(batch) == 1:
            return self._row_error(batch, 0, error)
        for row in range(len(batch)):
            if (exception := self._exception_on(batch.row(row))) is not None:
                return self._row_error(batch, row, exception)
        return ZooError(
            f"The reward function {self.name} raised {_describe(error)} on the batch of {len(batch)} completions, but "
            "on no row alone: check for state shared between rows, or for random failures."
        )

    def _row_error(self, batch: Batch, row: int, error: Exception) -> ZooError:
        return ZooError(
            f"The reward function {self.name} raised {_describe(error)} on row {row}, prompt "
            f"{batch.quoted_prompt(row)}: fix the function, or let it return None for rows that it does not apply to."
        )

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        """Returns the function's arguments, with copies of lists and mappings, because a function may change them.

        Leaves out columns named in `reserved_columns.RESERVED`, so that no column replaces another argument.
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
            self(batch)
        except Exception as error:
            return error
        return None

    def _signature_error(self, batch: Batch) -> ZooError | None:
        """Returns an error if the function's signature does not accept the arguments; otherwise None."""
        arguments = self._arguments(batch)
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            return ZooError(
                f"The reward function {self.name} cannot be called with {join_names(list(arguments))} ({error}): let "
                "it accept **columns, and add the columns that it needs to the prompt data set."
            )
        except ValueError:  # some callables written in C have no signature
            return None
        return None


def call_functions(functions: Sequence[NamedReward], batch: Batch, *, timeout: float | None = None) -> dict[str, Any]:
    """Calls each reward function. Coroutine functions run concurrently.

    Args:
        functions: The reward functions.
        batch: The batch to score.
        timeout: The limit in seconds for each function, and for all coroutine functions together; None for no limit.

    Returns:
        {name: the function's return value}.

    Raises:
        ZooError: A function raises an exception, exceeds the limit, or was stopped because it still ran
            `time_limit.GRACE_SECONDS` after Ctrl-C.
    """
    results: dict[str, Any] = {}
    for function in functions:
        if not function.is_async:
            try:
                with _limit_time([function], timeout):
                    results[function.name] = function(batch)
            except Exception as error:
                function.raise_as_zoo_error(batch, error)
    async_functions = [function for function in functions if function.is_async]
    if async_functions:
        with _limit_time(async_functions, timeout):
            async_results = _run_coroutine(_gather([function.call_async(batch) for function in async_functions]))
        for function, result in zip(async_functions, async_results, strict=True):
            if isinstance(result, Exception):
                function.raise_as_zoo_error(batch, result)
            results[function.name] = result
    return results


@contextmanager
def _limit_time(functions: Sequence[NamedReward], timeout: float | None) -> Iterator[None]:
    start = time.monotonic()
    try:
        with deadline(timeout, shorten_on_interrupt=True):
            yield
    except LimitExceeded as error:
        seconds = time.monotonic() - start
        noun = "function" if len(functions) == 1 else "functions"
        timed_out = timeout is not None and seconds >= timeout
        raise ZooError(
            f"The reward {noun} {join_names([function.name for function in functions])} did not return within "
            f"{seconds:.0f} s"
            + (": make it faster, or raise reward_timeout." if timed_out else " and was stopped after the interrupt.")
        ) from error


# The end of an error about an invalid return value.
_RETURN_FIX = "return a float or None for each completion"


def check_reward_count(name: str, values: Any, batch: Batch) -> list[Any]:
    """Checks that a function returned one value for each row, and returns these values as a list.

    Args:
        name: The function's name.
        values: The function's return value.
        batch: The batch that the function scored.

    Raises:
        ZooError: `values` cannot be converted to a list, or the list's length is not the number of rows.
    """
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise ZooError(
            f"The reward function {name} returned {_show(values)} instead of a list of numbers: {_RETURN_FIX}."
        )
    rewards = list(values)
    if len(rewards) != len(batch):
        raise ZooError(
            f"The reward function {name} returned {len(rewards)} rewards for {len(batch)} completions: {_RETURN_FIX}."
        )
    return rewards


def convert_rewards(
    name: str, values: Any, batch: Batch, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Tensor, list[list[float]] | None]:
    """Checks and converts a function's return value.

    Args:
        name: The function's name.
        values: The function's return value.
        batch: The batch that the function scored.
        tokenizer: The policy's tokenizer, which finds the tokens of spans; None if there are no spans.

    Returns:
        (totals, token_rewards). totals: (B,) float32, NaN where the function returned None. token_rewards: None if the
        function returned no list for any row; otherwise, for each row, one number per token. They add up to the total
        if the function returned a list for the row, and are 0 if it did not.

    Raises:
        ZooError: The values are not B finite numbers or lists that fit their completions.
    """
    rewards = check_reward_count(name, values, batch)
    totals: list[float] = []
    token_rewards = [[0.0] * len(ids) for ids in batch.completion_ids]
    for row, reward in enumerate(rewards):
        try:
            if is_list(reward):
                text, ids = last_message_text(batch.completions[row]), batch.completion_ids[row]
                prompt_ids = batch.prompt_ids[row] if batch.prompt_ids else ()
                token_rewards[row] = rewards_by_token(reward, text, ids, tokenizer, prompt_ids)
                addends = token_rewards[row]
            else:
                addends = [math.nan if reward is None else to_float(reward)]
        except PartsMismatch as mismatch:
            raise ZooError(
                f"The reward function {name} returned a list that does not fit the completion of row {row}, prompt "
                f"{batch.quoted_prompt(row)} ({mismatch}): return one number for the completion, one for each of "
                "completion_ids, or spans (start, end, value) in characters of the completion."
            ) from mismatch
        except (TypeError, ValueError, RuntimeError) as error:
            raise ZooError(
                f"The reward function {name} returned {_show(reward)} instead of a number for row {row}, prompt "
                f"{batch.quoted_prompt(row)}: {_RETURN_FIX}."
            ) from error
        total = sum(addends)
        # The trainer uses float32, in which larger numbers are infinite. `not … <=` is true for NaN too.
        non_finite = [number for number in (*addends, total) if not abs(number) <= torch.finfo(torch.float32).max]
        if reward is not None and non_finite:
            raise ZooError(
                f"The reward function {name} returned {non_finite[0]} for row {row}, prompt "
                f"{batch.quoted_prompt(row)}: return a number that is finite in float32, or None for rows that it does "
                "not apply to."
            )
        totals.append(total)
    return torch.tensor(totals, dtype=torch.float32), token_rewards if any(map(is_list, rewards)) else None


def _copy_nested(value: Any) -> Any:
    """Copies lists, tuples and dicts at any depth. Shares all other values."""
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


def join_names(names: Sequence[str]) -> str:
    """Joins names as "a", "a and b" or "a, b and c".

    Args:
        names: At least one name.
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


def _show(value: Any) -> str:
    return _shorten(" ".join(repr(value).split()))


def _describe(error: Exception) -> str:
    """Describes an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable  # `asyncio.run_coroutine_threadsafe` refuses other awaitables


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Waits for all coroutines. Returns each one's return value or exception."""
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine and returns its result. The calling thread may have a running loop, as in a notebook."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop(os.getpid()))
    try:
        return future.result()
    except BaseException:  # for example Ctrl-C, after which the coroutine must not go on in the background
        future.cancel()
        raise


@functools.cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Returns this process's event loop. It runs the coroutines of all batches, as in TRL's GRPO.

    A client that a reward function keeps open between batches works only in the loop in which it was created. The
    process id is the cache's key, so that a forked process gets its own loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rlhf-zoo-rewards", daemon=True).start()
    return loop
