"""How often a reward model scores the chosen side of a pair higher than the rejected one."""

# `evaluate` loads the first subclass of its own classes in this module, so none may be imported by name. It also shows
# users the comment at the import as the place to install the package from, since no package index has it.
import datasets
import evaluate

from rlhf_zoo.evaluation import metrics  # From: git+https://github.com/rlhf-zoo/rlhf-zoo

_DESCRIPTION = """
The share of held-out preference pairs in which the reward model scores the chosen side higher; a tie counts as wrong.
The 95% interval is Wilson's over pairs; with prompts, it uses the effective number of independent pairs.
"""

_INPUTS = """
Args:
    predictions (list of float): the reward model's scores of the chosen sides.
    references (list of float): its scores of the rejected sides, in the same order.
    prompts (list of str, optional): the prompt of each row. Completions of one prompt are not independent: the
        interval then takes them together. With `add_batch`, load the configuration "by_prompt", which has this
        column, or pass all prompts to `compute`.
Returns:
    value: the accuracy, 0 to 1.
    ci95: its 95% interval, [low, high].
    n: the number of pairs.
"""

_CITATION = """\
@article{bradley1952rank,
  title={Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons},
  author={Bradley, Ralph Allan and Terry, Milton E.},
  journal={Biometrika},
  volume={39},
  pages={324--345},
  year={1952}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class PreferenceAccuracy(evaluate.Metric):
    """One row per pair; the configuration "by_prompt" adds the column `prompts`."""

    def _info(self):
        columns = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        if self.config_name == "by_prompt":
            columns["prompts"] = datasets.Value("string")
        elif self.config_name != "default":
            raise ValueError(
                f"preference_accuracy has no configuration {self.config_name!r}: use 'default' or 'by_prompt'."
            )
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(columns),
            reference_urls=["https://arxiv.org/abs/2009.01325"],
        )

    def _compute(self, *, predictions, references, prompts=None):
        return metrics.preference_accuracy(predictions, references, prompts).to_json()
