"""The KL divergence of a policy from its reference, by log-probabilities of completions."""

# `evaluate` loads the first subclass of its own classes in this module, so none may be imported by name. It also shows
# users the comment at the import as the place to install the package from, since no package index has it.
import datasets
import evaluate

from rlhf_zoo.evaluation import metrics  # From: git+https://github.com/rlhf-zoo/rlhf-zoo

_DESCRIPTION = """
KL(policy ‖ reference) in nats per completion, estimated from log-probabilities of tokens that the policy sampled, with
a 95% bootstrap interval over prompts. k1 = log π − log π_ref is unbiased and may be negative; k2 = ½k1² is biased; k3 =
exp(−k1) − 1 + k1 is never negative (Schulman 2020, "Approximating KL divergence").
"""

_INPUTS = """
Args:
    predictions (list of list of float): log-probabilities (natural logarithm) of each completion's tokens under the
        policy that sampled it, at the temperature of sampling. If only a completion's sum is available, pass [sum].
    references (list of list of float): log-probabilities of the same tokens under the reference.
    prompts (list of str, optional): the prompt of each row. Completions of one prompt are not independent: the
        interval then resamples prompts. With `add_batch`, load the configuration "by_prompt", which has this
        column, or pass all prompts to `compute`.
    estimator (str): "k1" (default), "k2" or "k3".
    level (str): "token" (default) sums the estimates of the tokens; "sequence" takes the completion as one action and
        estimates from the sum. For k1 they are the same; k3 of a long sequence overflows.
    seed (int): seed of the bootstrap, default 0.
Returns:
    value: the mean over completions, in nats.
    ci95: its 95% interval, [low, high].
    n: the number of completions.
"""

_CITATION = """\
@misc{schulman2020kl,
  title={Approximating KL Divergence},
  author={Schulman, John},
  url={http://joschu.net/blog/kl-approx.html},
  year={2020}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class KlDivergence(evaluate.Metric):
    """One row per completion; the configuration "by_prompt" adds the column `prompts`."""

    def _info(self):
        columns = {
            "predictions": datasets.Sequence(datasets.Value("float64")),
            "references": datasets.Sequence(datasets.Value("float64")),
        }
        if self.config_name == "by_prompt":
            columns["prompts"] = datasets.Value("string")
        elif self.config_name != "default":
            raise ValueError(f"kl_divergence has no configuration {self.config_name!r}: use 'default' or 'by_prompt'.")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(columns),
            reference_urls=["http://joschu.net/blog/kl-approx.html"],
        )

    def _compute(self, *, predictions, references, prompts=None, estimator="k1", level="token", seed=0):
        return metrics.kl_divergence(
            predictions, references, prompts, estimator=estimator, level=level, seed=seed
        ).to_json()
