"""How many of the n-grams of a policy's completions are different ones."""

# `evaluate` takes the first class of its own that it finds here, so none may be imported by name; and the comment at
# the import is where it tells a user to install the package from, since no package index has it.
import datasets
import evaluate

from rlhf_zoo.evaluation import metrics  # From: git+https://github.com/rlhf-zoo/rlhf-zoo

_DESCRIPTION = """
Distinct n-grams over all n-grams, across the completions together (Li et al. 2016), in lower case and with words as
what stands between spaces; with a 95% jackknife interval, since a bootstrap is biased here. It falls as texts are
added: only equal numbers of texts of like length compare.
"""

_INPUTS = """
Args:
    predictions (list of str): the completions.
    prompts (list of str, optional): the prompt of each completion; the interval then leaves out whole prompts. With
        `add_batch`, load the configuration "by_prompt", in which it is a column, or hand all of them to `compute`.
    n (int): words in an n-gram, default 2.
Returns:
    value: distinct-n, 0 to 1; 0 where no completion has n words.
    ci95: its 95% interval, [low, high].
    n: how many completions.
"""

_CITATION = """\
@article{li2016diversity,
  title={A Diversity-Promoting Objective Function for Neural Conversation Models},
  author={Li, Jiwei and Galley, Michel and Brockett, Chris and Gao, Jianfeng and Dolan, Bill},
  journal={arXiv:1510.03055},
  year={2016}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class DistinctN(evaluate.Metric):
    """One row a completion; the configuration "by_prompt" adds the column `prompts`."""

    def _info(self):
        columns = {"predictions": datasets.Value("string")}
        if self.config_name == "by_prompt":
            columns["prompts"] = datasets.Value("string")
        elif self.config_name != "default":
            raise ValueError(f"distinct_n has no configuration {self.config_name!r}: take 'default' or 'by_prompt'.")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(columns),
            reference_urls=["https://arxiv.org/abs/1510.03055"],
        )

    def _compute(self, *, predictions, prompts=None, n=2):
        return metrics.distinct_n(predictions, prompts, n=n).to_json()
