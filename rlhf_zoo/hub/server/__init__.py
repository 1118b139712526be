"""A small Hugging Face Hub for one machine: the real HTTP protocol, git objects on disk, the unmodified client.

It serves first runs without an account, machines without a network, and tests. The rest of the package does not know
it: only HF_ENDPOINT differs. To read the code, start with `routing`; the `*_api` modules hold the protocol, `storage`
and `git` the layout on disk.
"""

from .process import serve
from .tokens import create_token

__all__ = ["create_token", "serve"]
