"""The exceptions that users see as one sentence, and functions that escape terminal control characters."""

import logging


class ZooError(Exception):
    """A mistake that the user can fix.

    The message is one sentence that says what is wrong, where, and how to fix it. The command line prints the message
    without a traceback and exits with code 2.
    """

    def __str__(self) -> str:
        """The sentence, with terminal control characters escaped, because it may contain names from files or a Hub."""
        return printable(super().__str__())


class NotFinite(ZooError):
    """A loss, gradient, log-probability or weight is NaN or infinite, and the run cannot continue."""


class PrintableFormatter(logging.Formatter):
    """Formats log records with control characters escaped, because records may contain names from files or a Hub."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, as `logging.Formatter` does."""
        return printable(super().format(record))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without a final period; the class's name if there is no message."""
    if isinstance(error, RecursionError):
        return "it nests or calls itself too deeply"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # The errors of huggingface_hub's strict dataclasses begin with a heading.
    line = lines[-1] if type(error).__name__.startswith("StrictDataclass") else lines[0]
    return line.strip().rstrip(".")


def as_clause(error: BaseException) -> str:
    """Returns an error's message as a later part of a sentence: "the Hub ..." instead of "The Hub ..."."""
    message = str(error)
    # Any other first word may be a name, which keeps its case.
    return f"t{message[1:]}" if message.startswith(("The ", "There ")) else message


def printable(text: str) -> str:
    r"""Escapes control characters, such as \x1b, and other unprintable ones, but not newlines and tabs."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
