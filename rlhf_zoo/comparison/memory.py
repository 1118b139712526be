"""Running out of memory, said in a sentence, with what filled it let go."""

from ..devices import free_cache, is_out_of_memory
from ..errors import ZooError


def out_of_memory(error: Exception, *, mend: str) -> ZooError | None:
    """The sentence for an error that came of an allocation, None for any other.

    The error lets go of the frames that it came through, which hold the tensors that filled the memory.
    """
    if not is_out_of_memory(error):
        return None
    error.__traceback__ = None
    free_cache()
    return ZooError(f"The memory of this machine is full: {mend}")
