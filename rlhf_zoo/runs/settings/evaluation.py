"""The keys under `evaluation:` in recipe.yaml: prompts, judges, and what judges learn from and are tried on."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ZooError
from ...fields import option
from .values import checked_keys, type_hints

HARNESS = "lm_eval"  # the package that the keys of its name are for


@dataclass(frozen=True)
class LLMConfig:
    """How a judge llm:MODEL is asked; the keys under `evaluation.llm`, which `evaluation.judges.llm.LLMJudge` explains.

    price: of a million prompt and a million completion tokens. None takes the judge's own setting.
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
                f"price of an LLM judge is {self.price}: give two numbers, of a million prompt tokens and of a million "
                "completion tokens."
            )


@dataclass(frozen=True)
class LabeledArguments:
    """Where the texts are that a judge learns from, and their labels; the keys under `evaluation.labeled`."""

    dataset_name: str | None = None
    dataset_revision: str | None = None
    dataset_config: str | None = "judge"
    dataset_train_split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)
    keep_above: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnPairsArguments(LabeledArguments):
    """Where pairs of the policies' own outputs are that somebody put in order; the keys under `evaluation.own_pairs`.

    dataset_name: a data set as elsewhere, or a file or folder beside recipe.yaml.
    """

    dataset_config: str | None = None


@dataclass(frozen=True)
class ReferenceArguments:
    """Which answers SFT and PPO are compared with as well; the keys under `evaluation.reference`.

    column: of PPO's data. temperature: of new samples for it; None takes those of the evaluation.
    """

    column: str | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.column is None:
            raise ZooError("evaluation.reference names no column: give the one that holds the answers.")


@dataclass(frozen=True)
class EvaluationConfig:
    """How the eval stage compares PPO with SFT; the keys under `evaluation:` in recipe.yaml.

    judge scores for the headline, and judges beside it; `evaluation.judges.named` says what their names may be, and
    `runs.judge` which one judges where none is named. Prompts are those of PPO's data set, of the split
    dataset_test_split: None is "test", or what PPO's held_out_share holds out. lm_eval: tasks of lm-evaluation-harness,
    on SFT and PPO, with at most lm_eval_limit examples and lm_eval_fewshot shots; None is as the task has it.
    """

    prompts: int = option(200, "Held-out prompts of the last checkpoint; all where there are fewer.")
    samples: int = option(3, "Completions of each.")
    judge: str | None = option(
        None, "Scores for the headline: see docs/evaluation.md for its names; None takes the recipe's own."
    )
    judge_name: str | None = option(None, "What cards call it.")
    judge_description: str = option("", "What it is, in words for the card.")
    lexicon: str | None = option(None, "Folder of opinion words, for a judge of its own; the recipe's corpus reads it.")
    checkpoint_prompts: int = option(
        100, "Validation prompts of each checkpoint on the way, from which `best` is chosen."
    )
    checkpoint_samples: int = option(2, "Completions of each of these.")
    judges: list[str] = field(default_factory=list, metadata={"help": "More judges beside the headline's."})
    llm: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "Of judges that are language models: criterion, price, budget and others (docs/evaluation.md)."
        },
    )
    dataset_test_split: str | None = option(
        None, "Split of the prompts; None is test, or what held_out_share holds out."
    )
    labeled: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Texts with labels, from which a classifier as judge is trained."}
    )
    own_pairs: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Labeled pairs of the policies' own outputs, on which the judge's accuracy is measured."},
    )
    reference: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Answers that SFT and PPO are compared with as well: column, and temperature of samples."},
    )
    lm_eval: list[str] = field(
        default_factory=list, metadata={"help": "Tasks of lm-evaluation-harness, on SFT and PPO."}
    )
    lm_eval_limit: int | None = option(None, "Examples of a task at most.")
    lm_eval_fewshot: int | None = option(None, "Shots; None is as the task has it.")

    @property
    def labeled_data(self) -> LabeledArguments:
        """Raises ZooError for a key of `labeled` that is unknown or mistyped."""
        given = checked_keys(self.labeled, type_hints(LabeledArguments), "evaluation.labeled", of="labeled texts")
        return LabeledArguments(**given)

    @property
    def own_pairs_data(self) -> OwnPairsArguments | None:
        """None where the recipe names none. Raises ZooError as `labeled_data` does."""
        if not self.own_pairs:
            return None
        given = checked_keys(self.own_pairs, type_hints(OwnPairsArguments), "evaluation.own_pairs", of="own pairs")
        return OwnPairsArguments(**given)

    @property
    def reference_answers(self) -> ReferenceArguments | None:
        """None where the recipe names none. Raises ZooError as `labeled_data` does, and without a column."""
        if not self.reference:
            return None
        given = checked_keys(
            self.reference, type_hints(ReferenceArguments), "evaluation.reference", of="reference answers"
        )
        return ReferenceArguments(**given)

    @property
    def names(self) -> list[str]:
        """Every judge, the headline's first."""
        return [self.judge or "classifier", *self.judges]

    @property
    def asked_llm(self) -> LLMConfig:
        """Raises ZooError for a key of `llm` that is unknown or mistyped."""
        return llm_config(self.llm, "evaluation.llm")


def llm_config(given: Mapping[str, Any], where: str) -> LLMConfig:
    """The typed settings of LLM judges. Raises ZooError for a key that is unknown or mistyped."""
    return LLMConfig(**checked_keys(given, type_hints(LLMConfig), where, of="an LLM judge"))


def check_harness() -> None:
    """Raises ZooError where lm-evaluation-harness is not installed; it does not import it."""
    if importlib.util.find_spec(HARNESS) is None:
        raise ZooError(
            f"{HARNESS} names tasks of lm-evaluation-harness, which is not installed: `pip install 'lm-eval>=0.4.13'`."
        )
