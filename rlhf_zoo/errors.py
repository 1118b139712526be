"""The exceptions that a user may see: a sentence, and an exit code."""


class ZooError(Exception):
    """A mistake that the user can mend.

    The message is one sentence that names what was wrong, where, and the mend. The command line prints it without a
    traceback and exits with code 2.
    """

    def __str__(self) -> str:
        """The sentence. Names from elsewhere may stand in it: what would drive a terminal is shown as an escape."""
        return printable(super().__str__())


class NotFinite(ZooError):
    """A loss, gradient, log-probability or weight was NaN or infinite, and the run cannot go on."""


def printable(text: str) -> str:
    """A text whose control characters, but newlines and tabs, are escapes such as \\x1b."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1] for character in text
    )
