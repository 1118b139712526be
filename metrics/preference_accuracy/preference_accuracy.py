"""How often a reward model scores the chosen side of a pair higher than the rejected one."""

# `evaluate` takes the first class of its own that it finds here, so none may be imported by name; and the comment at
# the import is where it tells a user to install the package from, since no package index has it.
import datasets
import evaluate

from rlhf_zoo.evaluation import metrics  # From: git+https://github.com/rlhf-zoo/rlhf-zoo

_DESCRIPTION = """
The share of held-out preference pairs whose chosen side the reward model scores higher, a tie counting as wrong, with a
95% interval: Wilson's over pairs, and with prompts with as many trials as leave the spread over these.
"""

_INPUTS = """
Args:
    predictions (list of float): the reward model's scores of the chosen sides.
    references (list of float): its scores of the rejected sides, in the same order.
    prompts (list of str, optional): the prompt of each row. Completions of one prompt are not independent: the
        interval is then by prompts. With `add_batch`, load the configuration "by_prompt", in which it is a
        column, or hand all of them to `compute`.
Returns:
    value: the accuracy, 0 to 1.
    ci95: its 95% interval, [low, high].
    n: how many pairs.
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
    """One row a pair; the configuration "by_prompt" adds the column `prompts`."""

    def _info(self):
        columns = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        if self.config_name == "by_prompt":
            columns["prompts"] = datasets.Value("string")
        elif self.config_name != "default":
            raise ValueError(
                f"preference_accuracy has no configuration {self.config_name!r}: take 'default' or 'by_prompt'."
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
