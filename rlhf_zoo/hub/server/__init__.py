"""A small Hugging Face Hub for one machine: the real HTTP protocol, git objects on disk, the unmodified client.

It is for first runs without an account, for machines without a network, and for tests. The rest of the package does
not depend on it: only HF_ENDPOINT differs. To read the code, start with `routing`. The `*_api` modules have the
protocol; `storage` and `git` have the layout on disk.
"""

from .process import serve
from .tokens import create_token

__all__ = ["create_token", "serve"]
