"""`python -m rlhf_zoo.hub.server --root DIR --ready-file F`: the same as `rlhf-zoo hub serve`."""

from .cli import main

if __name__ == "__main__":
    main()
