"""The one exception that a user may see: a sentence, and an exit code."""


class ZooError(Exception):
    """A mistake that the user can mend.

    The message is one sentence that names what was wrong, where, and the mend. The command line prints it without a
    traceback and exits with code 2.
    """
