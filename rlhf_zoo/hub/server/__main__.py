"""`python -m rlhf_zoo.hub.server --root DIR --ready-file F`: the same as `rlhf-zoo hub serve`."""

from .cli import serve_command

if __name__ == "__main__":
    serve_command(prog_name="python -m rlhf_zoo.hub.server")
