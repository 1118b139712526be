"""Checks one after another, each with what it found or why it could not be made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import ZooError
from ...ppo.guards import GuardWarning

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


class NotYet(ZooError):
    """What a check needs is not trained yet."""


@dataclass(frozen=True)
class Finding:
    """A check, its status (ok, warning, failed, skipped), and the figure or sentence that says why."""

    check: str
    status: str
    said: str


class Examination:
    """Checks in their order; one may need what earlier ones found, and is skipped where they found nothing."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._found: dict[str, Any] = {}
        self._why_not: dict[str, str] = {}
        self._warned: set[str] = set()

    def check(self, name: str, test: Callable[..., tuple[Any, str]], *needs: str) -> None:
        """test(what each check in `needs` found) -> (what this one finds, the figure). It raises ZooError to fail."""
        missing = next((need for need in needs if need not in self._found), None)
        if missing is not None:
            self._without(name, SKIPPED, self._why_not[missing])
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", GuardWarning)
            try:
                self._found[name], said = test(*(self._found[need] for need in needs))
            except NotYet as reason:
                self._without(name, SKIPPED, str(reason))
                return
            except Exception as error:
                # What a library raises is a finding too; `rlhf-zoo ppo` shows its traceback.
                first = (str(error).strip().splitlines() or ["it says nothing"])[0]
                said = str(error) if isinstance(error, ZooError) else f"{type(error).__name__}: {first}"
                self._without(name, FAILED, said, f"needs the check {name!r}, which failed")
                return
        # A trainer warns again of what a check of its own has found before.
        warned = [text for text in dict.fromkeys(str(one.message) for one in caught) if text not in self._warned]
        self._warned.update(warned)
        self.findings.append(Finding(name, WARNING if warned else OK, " ".join(warned) or said))

    def _without(self, name: str, status: str, said: str, why_not: str | None = None) -> None:
        self._why_not[name] = why_not or said
        self.findings.append(Finding(name, status, said))
