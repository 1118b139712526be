"""The keys under `evaluation:` in recipe.yaml: prompts, judges, and the data that judges learn from."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ZooError
from ...fields import option
from .values import convert_keys, type_hints

#: The package that runs the tasks of the key `lm_eval`.
HARNESS = "lm_eval"


@dataclass(frozen=True)
class LLMConfig:
    """How a judge llm:MODEL is called: the keys under `evaluation.llm`. None keeps the judge's default.

    Attributes:
        criterion: What the judge should prefer.
        price: Price of a million prompt tokens, and of a million completion tokens.
        budget: Maximum total cost, in the currency of `price`. A request that might exceed it is not sent.
        concurrency: Maximum number of simultaneous requests.
        attempts: Maximum number of times that a failing request is sent.
        timeout: Seconds after which a request without an answer fails.
        max_tokens: Maximum number of tokens in an answer.
        parameters: Name -> value of further fields of the request. A field whose value is None is left out.
    """

    criterion: str | None = None
    price: list[float] | None = None
    budget: float | None = None
    concurrency: int | None = None
    attempts: int | None = None
    timeout: float | None = None
    max_tokens: int | None = None
    parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.price is not None and len(self.price) != 2:
            raise ZooError(
                f"price of an LLM judge is {self.price}: set two numbers, for a million prompt tokens and for a "
                "million completion tokens."
            )


@dataclass(frozen=True)
class LabeledArguments:
    """Labeled texts for a judge: the keys under `evaluation.labeled`.

    Attributes:
        dataset_name: The data set; None for the recipe's data set.
        dataset_revision: Commit, branch or tag of the data set.
        dataset_config: Configuration of the data set.
        dataset_train_split: Split to load.
        columns: The judge's column -> the data set's column.
        keep_above: Column of numbers -> bound. Rows whose number does not exceed the bound are dropped.
    """

    dataset_name: str | None = None
    dataset_revision: str | None = None
    dataset_config: str | None = "judge"
    dataset_train_split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)
    keep_above: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnPairsArguments(LabeledArguments):
    """Labeled pairs of the policies' own outputs: the keys under `evaluation.own_pairs`.

    `dataset_name` may also be a file or folder next to recipe.yaml.
    """

    dataset_config: str | None = None


@dataclass(frozen=True)
class ReferenceArguments:
    """Reference answers with which SFT and PPO are also compared: the keys under `evaluation.reference`.

    Attributes:
        column: The column of PPO's data that holds the answers. It must be set.
        temperature: Temperature of new samples for this comparison; None compares the evaluation's samples.
    """

    column: str | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.column is None:
            raise ZooError(
                "evaluation.reference names no column: set column to the name of the column that holds the answers."
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """How the eval stage compares PPO with SFT: the keys under `evaluation:` in recipe.yaml.

    `judge` decides the headline win rate; cards also show the results of `judges`. The module
    `rlhf_zoo.evaluation.judges.named` describes the names of judges, and `runs.judge` chooses a judge if the recipe
    names none. The prompts come from PPO's data.
    """

    prompts: int = option(200, "Number of held-out prompts for the final evaluation; all if there are fewer.")
    samples: int = option(3, "Number of completions of each prompt.")
    judge: str | None = option(
        None,
        "The judge of the headline win rate, by a name that docs/evaluation.md lists; None takes PPO's verifiable "
        "reward function, or else `classifier`.",
    )
    judge_name: str | None = option(None, "Name of the judge on cards.")
    judge_description: str = option("", "Description of the judge on cards.")
    lexicon: str | None = option(
        None, "Folder of opinion words for the judge `lexicon`, in a format that the recipe's corpus reads."
    )
    checkpoint_prompts: int = option(
        100, "Number of validation prompts on which each checkpoint is evaluated, to choose `best`."
    )
    checkpoint_samples: int = option(2, "Number of completions of each validation prompt.")
    filter_samples: int = option(
        0,
        "Number of SFT completions of each prompt from which simple filters choose one, to compare PPO with the "
        "filtered completions; 0 for no filters.",
    )
    group: str | None = option(
        None,
        "How to group prompts that ask the same question, so that intervals and the verdict count each group once: "
        "near-duplicates, or the column with each prompt's group; None for no groups.",
    )
    judges: list[str] = field(default_factory=list, metadata={"help": "Further judges, whose results cards also show."})
    llm: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Settings of LLM judges, such as criterion, price and budget (docs/evaluation.md)."},
    )
    dataset_test_split: str | None = option(
        None,
        "Split of the prompts; None takes the prompts that PPO's held_out_share holds out if that is set, otherwise "
        "the split test.",
    )
    labeled: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Labeled texts on which the judge `classifier` is trained."}
    )
    own_pairs: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Labeled pairs of the policies' own outputs, on which the judge's accuracy is measured."},
    )
    reference: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Reference answers to compare with SFT and PPO: their column, and the samples' temperature."},
    )
    lm_eval: list[str] = field(
        default_factory=list, metadata={"help": "Tasks of lm-evaluation-harness to run on SFT and PPO."}
    )
    lm_eval_limit: int | None = option(None, "Maximum number of examples per task.")
    lm_eval_fewshot: int | None = option(None, "Number of few-shot examples; None takes the task's own number.")

    def __post_init__(self) -> None:
        if self.filter_samples == 1:
            raise ZooError("evaluation.filter_samples is 1, which leaves no choice: set 0, or at least 2.")

    @property
    def labeled_arguments(self) -> LabeledArguments:
        """The keys under `labeled`.

        Raises:
            ZooError: A key is unknown or has the wrong type.
        """
        values = convert_keys(self.labeled, type_hints(LabeledArguments), "evaluation.labeled", subject="labeled texts")
        return LabeledArguments(**values)

    @property
    def own_pairs_arguments(self) -> OwnPairsArguments | None:
        """The keys under `own_pairs`; None if the recipe does not set `own_pairs`.

        Raises:
            ZooError: A key is unknown or has the wrong type.
        """
        if not self.own_pairs:
            return None
        hints = type_hints(OwnPairsArguments)
        return OwnPairsArguments(**convert_keys(self.own_pairs, hints, "evaluation.own_pairs", subject="own pairs"))

    @property
    def reference_arguments(self) -> ReferenceArguments | None:
        """The keys under `reference`; None if the recipe does not set `reference`.

        Raises:
            ZooError: A key is unknown or has the wrong type, or no column is named.
        """
        if not self.reference:
            return None
        values = convert_keys(
            self.reference, type_hints(ReferenceArguments), "evaluation.reference", subject="reference answers"
        )
        return ReferenceArguments(**values)

    @property
    def judge_names(self) -> list[str]:
        """The names of all judges, the headline judge first.

        If `judge` is None, the first name is "classifier", even if `runs.judge.choose_judge` would choose another.
        """
        return [self.judge or "classifier", *self.judges]

    @property
    def llm_settings(self) -> LLMConfig:
        """The keys under `llm`.

        Raises:
            ZooError: A key is unknown or has the wrong type, or `price` does not have two numbers.
        """
        return llm_config(self.llm, "evaluation.llm")


def llm_config(keys: Mapping[str, Any], where: str) -> LLMConfig:
    """Checks the keys of LLM judges.

    Args:
        keys: Key -> value, from the recipe or a flag.
        where: The key or flag that holds them, for messages.

    Raises:
        ZooError: A key is unknown or has the wrong type.
    """
    return LLMConfig(**convert_keys(keys, type_hints(LLMConfig), where, subject="an LLM judge"))


def check_harness() -> None:
    """Checks that lm-evaluation-harness is installed, without importing it.

    Raises:
        ZooError: lm-evaluation-harness is not installed.
    """
    if importlib.util.find_spec(HARNESS) is None:
        raise ZooError(
            f"The key {HARNESS} names tasks of lm-evaluation-harness, which is not installed: "
            "run `pip install 'lm-eval>=0.4.13'`."
        )
