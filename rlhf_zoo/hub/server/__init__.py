"""A small Hugging Face Hub for one machine. It speaks the real HTTP protocol and stores git objects on disk.

It is for first runs without an account, for machines without a network, and for tests. The rest of the package does
not import it, and talks to it as to any other Hub. To read the code, start with `routing`. The `*_api` modules
implement the protocol; `storage` and `git` define the layout on disk.
"""

from .process import serve
from .tokens import create_token

__all__ = ["create_token", "serve"]
