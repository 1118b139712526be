"""The base class of rules, and the text that rules read."""

from typing import Any, ClassVar

from ..errors import ZooError
from ..fileio import int_or_none
from ..modeling.chat import completion_text


def last_message_text(text: Any) -> str:
    """Returns the text of a completion or a prompt: a text itself, or the last message of a conversation.

    Args:
        text: A text or a conversation. If the last message's content is a list of typed parts, the text parts are
            joined. If it has no content (only a tool call), the text is empty.
    """
    return completion_text(text)


class Rule:
    """A reward computed by a program. Its field `name` is its name in metrics.

    Attributes:
        meaning: A phrase that describes the rule. It follows the rule's name on a card on which the rule is a judge.
    """

    meaning: ClassVar[str] = "which a program checks"
    name: str

    @property
    def __name__(self) -> str:
        """The rule's name. Functions have this attribute too."""
        return self.name

    def _field_error(self, field: str, expected: str) -> ZooError:
        return ZooError(f"{field} of the reward {self.name} is {getattr(self, field)!r}: give {expected}.")

    def _check_positive_integer(self, field: str) -> None:
        value = int_or_none(getattr(self, field))
        if value is None or value < 1:
            raise self._field_error(field, "a whole number of at least 1")

    def _check_choice(self, field: str, *choices: str) -> None:
        if getattr(self, field) not in choices:
            *first, last = map(repr, choices)
            raise self._field_error(field, f"{', '.join(first)} or {last}")
