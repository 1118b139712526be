"""Defects that a recipe's corpus recognizes in completions, such as false statements.

A mean score can rise while a defect becomes more frequent. So the share of completions with each defect is measured
for both policies, in addition to the judge's scores.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ZooError
from ..modeling.chat import plain_text
from ..plugins import CORPORA, load_object
from ..runs.settings.parse import RecipeConfig
from .head_to_head import HeadToHead
from .stats import bootstrap_mean, mean_share

#: (prompts, completions) -> for each completion, whether it has the defect.
DefectDetector = Callable[[Sequence[str], Sequence[str]], Sequence[bool]]


def corpus_defects(shared: RecipeConfig) -> Mapping[str, DefectDetector]:
    """Returns the detectors of the defects that a recipe's corpus recognizes.

    Args:
        shared: The recipe's keys. Its corpus names the defects in its attribute `defects`.

    Returns:
        Name on cards -> function; {} if the recipe has no corpus, or its corpus recognizes none.
    """
    corpus = None if shared.corpus is None else load_object(shared.corpus, group=CORPORA)
    defects: Mapping[str, DefectDetector] = getattr(corpus, "defects", {})
    return defects


def defect_figures(defects: Mapping[str, DefectDetector], comparison: HeadToHead) -> dict[str, Any]:
    """Measures how many of SFT's and PPO's completions have each defect.

    Args:
        defects: Name on cards -> function.
        comparison: The measured policies.

    Returns:
        For each defect the shares `sft` and `ppo`, and their paired `difference`.

    Raises:
        ZooError: A function does not return true or false for each completion.
    """
    prompts, groups = [plain_text(prompt) for prompt in comparison.prompts], comparison.groups
    figures = {}
    for name, detect in defects.items():
        sft, ppo = (
            _find_defect(name, detect, prompts, comparison.measurements[role].completions) for role in ("sft", "ppo")
        )
        figures[name] = {
            "sft": mean_share(sft, groups).to_json(),
            "ppo": mean_share(ppo, groups).to_json(),
            "difference": bootstrap_mean(ppo - sft, groups, seed=comparison.seed).to_json(),
        }
    return figures


def _find_defect(
    name: str, detect: DefectDetector, prompts: Sequence[str], completions: Sequence[str]
) -> NDArray[np.float64]:
    values = list(detect(prompts, completions))
    if len(values) != len(completions) or any(value not in (0, 1) for value in values):
        raise ZooError(
            f"The defect {name!r} of the recipe's corpus must be true or false for each of {len(completions)} "
            "completions: correct its function."
        )
    return np.asarray(values, dtype=float)
