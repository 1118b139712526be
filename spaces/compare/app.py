"""The comparison page: SFT and PPO answer the same prompt, side by side. It runs locally and as a Space.

`rlhf-zoo compare PPO` opens it locally. As a Space it shows the models that compare.json names, at their commits. The
variable RLHF_ZOO_PPO, with RLHF_ZOO_SFT and RLHF_ZOO_REWARD, replaces that file.
"""

try:  # the builder of ZeroGPU Spaces installs this package; it must be imported before torch
    from spaces import GPU
except ImportError:
    GPU = None

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlhf_zoo import ZooError
from rlhf_zoo.app import page


def serve_page(page_models: page.PageModels, **options: Any) -> AbstractContextManager[str]:
    """Serves the page of loaded models until the context exits; see `rlhf_zoo.app.page.serve_page`."""
    return page.serve_page(page_models, gpu=GPU, **options)


def main() -> None:
    """Serves the page of the Space's models."""
    try:
        models = page.read_model_names(Path(__file__).parent)
        page_models = page.PageModels.load(
            models.ppo, sft=models.sft, reward=models.reward, runs=models.runs, skip_unreadable=True
        )
        with serve_page(page_models, votes=models.votes, block=True):
            pass
    except ZooError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
