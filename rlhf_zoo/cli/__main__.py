"""`python -m rlhf_zoo.cli`, as `accelerate launch -m` starts it."""

from .main import main

main()
