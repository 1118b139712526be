"""What all rules share: a name for the metrics, and the text that they read."""

from typing import Any, ClassVar

from ..errors import ZooError
from ..fileio import integer


def text_of(message: Any) -> str:
    """Returns the text of a completion or a prompt.

    Args:
        message: A text, or a conversation, of which the last message counts. Typed parts of its content are joined if
            they are text; no content (a bare tool call) is the empty text.
    """
    if isinstance(message, str):
        return message
    content = message[-1].get("content") if message else None
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or "" for part in content)


class Rule:
    """A reward whose field `name` is its name in metrics.

    Attributes:
        meaning: What a card says of it where it is a judge, after its name and a comma.
    """

    meaning: ClassVar[str] = "which a program checks"
    name: str

    @property
    def __name__(self) -> str:
        """Its name, where functions have theirs."""
        return self.name

    def _field_error(self, field: str, expected: str) -> ZooError:
        return ZooError(f"{field} of the reward {self.name} is {getattr(self, field)!r}: give {expected}.")

    def _check_count(self, field: str) -> None:
        value = integer(getattr(self, field))
        if value is None or value < 1:
            raise self._field_error(field, "a whole number from 1")

    def _check_marker(self) -> None:
        if getattr(self, "marker", None) == "":
            raise self._field_error("marker", "a text, or leave it out")

    def _check_choice(self, field: str, *choices: str) -> None:
        if getattr(self, field) not in choices:
            *first, last = map(repr, choices)
            raise self._field_error(field, f"{', '.join(first)} or {last}")
