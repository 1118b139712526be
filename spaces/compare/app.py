"""The comparison page: one prompt through SFT and PPO, side by side. The same file serves locally and as a Space.

Locally `rlhf-zoo compare PPO` opens it. As a Space it shows the models that compare.json beside this file names, at
their commits; the variable RLHF_ZOO_PPO, with RLHF_ZOO_SFT and RLHF_ZOO_REWARD, takes its place.
"""

try:  # the package of ZeroGPU, which its builder installs; it must be imported before torch
    from spaces import GPU
except ImportError:
    GPU = None

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlhf_zoo import ZooError
from rlhf_zoo.app import page


def opened(subject: page.Subject, **options: Any) -> AbstractContextManager[str]:
    """Serves the page of loaded models until the context is left; see `rlhf_zoo.app.page.opened`."""
    return page.opened(subject, gpu=GPU, **options)


def main() -> None:
    """Serves the Space's models."""
    try:
        named = page.chosen(Path(__file__).parent)
        subject = page.Subject.load(named.ppo, sft=named.sft, reward=named.reward, runs=named.runs, lenient=True)
        with opened(subject, votes=named.votes, block=True):
            pass
    except ZooError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
