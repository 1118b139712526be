"""The share of distinct n-grams in a policy's completions."""

# `evaluate` loads the first subclass of its own classes in this module, so none may be imported by name. It also shows
# users the comment at the import as the place to install the package from, since no package index has it.
import datasets
import evaluate

from rlhf_zoo.evaluation import metrics  # From: git+https://github.com/rlhf-zoo/rlhf-zoo

_DESCRIPTION = """
The share of distinct n-grams among all n-grams of the completions together (Li et al. 2016). Text is lower-cased, and
words are separated by spaces. The 95% interval is a jackknife's, since a bootstrap is biased here. The share falls as
texts are added, so compare only equal numbers of texts of similar length.
"""

_INPUTS = """
Args:
    predictions (list of str): the completions.
    prompts (list of str, optional): the prompt of each completion; the jackknife then leaves out prompts. With
        `add_batch`, load the configuration "by_prompt", which has this column, or pass all prompts to `compute`.
    n (int): the number of words in an n-gram, default 2.
Returns:
    value: distinct-n, 0 to 1; 0 if no completion has n words.
    ci95: its 95% interval, [low, high].
    n: the number of completions.
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
    """One row per completion; the configuration "by_prompt" adds the column `prompts`."""

    def _info(self):
        columns = {"predictions": datasets.Value("string")}
        if self.config_name == "by_prompt":
            columns["prompts"] = datasets.Value("string")
        elif self.config_name != "default":
            raise ValueError(f"distinct_n has no configuration {self.config_name!r}: use 'default' or 'by_prompt'.")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(columns),
            reference_urls=["https://arxiv.org/abs/1510.03055"],
        )

    def _compute(self, *, predictions, prompts=None, n=2):
        return metrics.distinct_n(predictions, prompts, n=n).to_json()
