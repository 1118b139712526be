"""A small Hugging Face Hub for a single machine. It implements the Hub's HTTP protocol and stores git objects on disk.

It is for first runs without an account, for machines without a network, and for tests. Clients talk to it over HTTP, as
to any other Hub. They import it only to start it, to export its repositories, and to check names. To read the code,
start with `routing`. The `*_api` modules implement the protocol; `storage` and `git` define the layout on disk.
"""

from .process import serve
from .tokens import create_token

__all__ = ["create_token", "serve"]
