"""Runs checks in order, and records the finding of each check."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import ZooError, first_line
from ...ppo.guards import GuardWarning

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


class SkipCheck(ZooError):
    """A check cannot run yet, for example because its model is not trained."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check.

    Attributes:
        check: Name of the check.
        status: "ok", "warning", "failed" or "skipped".
        detail: The figure that was measured, or the reason for the status.
    """

    check: str
    status: str
    detail: str


class Examination:
    """Runs checks in order. A check that needs the result of a failed or skipped check is skipped."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._results: dict[str, Any] = {}
        self._skip_reasons: dict[str, str] = {}
        self._shown_warnings: set[str] = set()

    def check(self, name: str, test: Callable[..., tuple[Any, str]], *needs: str) -> None:
        """Runs one check and appends its finding.

        Args:
            name: Name of the check.
            test: Takes the results of `needs`, and returns its own result and a detail to show. It raises ZooError to
                fail, and SkipCheck to be skipped.
            *needs: Names of earlier checks whose results the test takes.
        """
        unmet_need = next((need for need in needs if need not in self._results), None)
        if unmet_need is not None:
            self._fail_or_skip(name, SKIPPED, self._skip_reasons[unmet_need])
            return
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", GuardWarning)
            try:
                self._results[name], detail = test(*(self._results[need] for need in needs))
            except SkipCheck as reason:
                self._fail_or_skip(name, SKIPPED, str(reason))
                return
            except Exception as error:
                # An error in a library also fails the check; `rlhf-zoo ppo` shows its traceback.
                detail = str(error) if isinstance(error, ZooError) else f"{type(error).__name__}: {first_line(error)}"
                self._fail_or_skip(name, FAILED, detail, f"needs the check {name!r}, which failed")
                return
        # The trainer repeats warnings of earlier checks, but each is shown only once.
        messages = dict.fromkeys(str(warning.message) for warning in caught_warnings)
        new_messages = [message for message in messages if message not in self._shown_warnings]
        self._shown_warnings.update(new_messages)
        self.findings.append(Finding(name, WARNING if new_messages else OK, " ".join(new_messages) or detail))

    def _fail_or_skip(self, name: str, status: str, detail: str, skip_reason: str | None = None) -> None:
        self._skip_reasons[name] = skip_reason or detail
        self.findings.append(Finding(name, status, detail))
