"""A small Hugging Face Hub for one machine: the real HTTP protocol, git objects on disk, the unmodified client.

It is for first runs without an account, for machines without a network, and for tests. Nothing else of this package
knows it: only HF_ENDPOINT differs. Read `routing`, then the `*_api` modules for the protocol, `storage` and `git` for
what lies on the disk.
"""

from .process import serve
from .tokens import create_token

__all__ = ["create_token", "serve"]
