"""How often one policy's completion scores higher than another's on the same prompt."""

# `evaluate` loads the first subclass of its own classes in this module, so none may be imported by name. It also shows
# users the comment at the import as the place to install the package from, since no package index has it.
import datasets
import evaluate

from rlhf_zoo.evaluation import metrics  # From: git+https://github.com/rlhf-zoo/rlhf-zoo

_DESCRIPTION = """
The share of comparisons that the predictions win; a tie counts one half. A comparison is one judge's score of two
completions of the same prompt. The 95% interval is Wilson's, with the effective number of independent comparisons given
the prompts.
"""

_INPUTS = """
Args:
    predictions (list of float): the judge's scores of the policy's completions; higher is better.
    references (list of float): its scores of the other policy's completions to the same prompts, in the same order.
    prompts (list of str, optional): the prompt of each row. Completions of one prompt are not independent: the
        interval then takes them together. With `add_batch`, load the configuration "by_prompt", which has this
        column, or pass all prompts to `compute`.
    tolerance (float): the largest difference of scores that counts as a tie, default 0.
Returns:
    value: the win rate, 0 to 1.
    ci95: its 95% interval, [low, high].
    n: the number of comparisons.
    ties: the share of comparisons that are ties.
"""

_CITATION = """\
@article{stiennon2020learning,
  title={Learning to summarize from human feedback},
  author={Stiennon, Nisan and Ouyang, Long and Wu, Jeff and Ziegler, Daniel M. and others},
  journal={arXiv:2009.01325},
  year={2020}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class WinRate(evaluate.Metric):
    """One row per comparison; the configuration "by_prompt" adds the column `prompts`."""

    def _info(self):
        columns = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        if self.config_name == "by_prompt":
            columns["prompts"] = datasets.Value("string")
        elif self.config_name != "default":
            raise ValueError(f"win_rate has no configuration {self.config_name!r}: use 'default' or 'by_prompt'.")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(columns),
            reference_urls=["https://arxiv.org/abs/2009.01325"],
        )

    def _compute(self, *, predictions, references, prompts=None, tolerance=0.0):
        return metrics.win_rate_of_scores(predictions, references, prompts, tolerance=tolerance).to_json()
