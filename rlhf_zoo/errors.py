"""Exceptions that users see: one sentence and an exit code. What a terminal shows of texts from elsewhere."""

import logging


class ZooError(Exception):
    """A mistake that the user can fix.

    The message is one sentence that names what was wrong, where, and the fix. The command line prints it without a
    traceback and exits with code 2.
    """

    def __str__(self) -> str:
        """The sentence. Names from elsewhere may be in it, so terminal control characters are escaped."""
        return printable(super().__str__())


class NotFinite(ZooError):
    """A loss, gradient, log-probability or weight was NaN or infinite, and the run cannot go on."""


class PrintableFormatter(logging.Formatter):
    """Formats log records so that names and answers from elsewhere in them cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record.

        Args:
            record: The record.
        """
        return printable(super().format(record))


def printable(text: str) -> str:
    r"""Escapes the control characters of a text, such as \x1b; newlines and tabs stay.

    Args:
        text: Any text.
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
