"""The judges that a recipe or a command names.

classifier           learned from labeled texts, by default the configuration judge of the data (scikit-learn)
reward:MODEL         a second reward model, a folder or NAMESPACE/NAME[@REVISION]
reward:MODEL#LABEL   of a classifier of several labels, the probability of one
unlabeled:module:function  a function (texts) -> judge, which learns from the classifier's texts without their labels
same-labels          a reward model that learned from pairs kept from PPO's, of a recipe's run
rule:REWARD          a reward function or a verifier, by the name that reward_funcs takes
pairs:module:function a function (prompts, shown first, shown second) -> 1, 1/2 or 0, asked in both orders
llm:MODEL            a language model behind the endpoint OPENAI_BASE_URL, with the key OPENAI_API_KEY
votes:NAMESPACE/NAME people's votes of the comparison page, on these two policies
module:function      a function (prompts, completions) -> numbers, or an entry point's name
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ...errors import ZooError
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.refs import ask, resolve
from ...modeling import distributed
from ...modeling.chat import append_completion, completion_text, plain_text, wrap_completion
from ...modeling.devices import on_device
from ...modeling.models import label_index, labels_in
from ...modeling.prompt_keys import prompt_key
from ...plugins import run_judge
from ...rewards import RewardEnsemble, RewardModel
from ...runs.record import StageRecord
from ...runs.settings.evaluation import LLMConfig
from ...runs.settings.judge_names import SAME_LABELS, check_judge_name, kind_of
from ..pass_at_k import Answers
from .check import JudgeCheck, PairCheck, check_pairs, settled
from .llm import LLMJudge
from .pairwise import FunctionPairJudge, PairJudge, load_function
from .rule import RuleJudge
from .scalar import ClassifierJudge, FunctionJudge, Judge

log = logging.getLogger(__name__)

#: Labelled pairs that a judge is checked on; each is paid for where a language model judges.
CHECKED, CHECKED_BY_LLM = 500, 50
ENDPOINT, OPENAI = "OPENAI_BASE_URL", "https://api.openai.com/v1"

OF_SAME_LABELS = (
    "A reward model trained as PPO's was, on pairs of the same labels whose prompts that one did not see: it shares "
    "what these labels get wrong."
)
#: What judges are called that learn from labels, by the names that recipes take.
JUDGES_OF_LABELS = {"classifier": ClassifierJudge.name, SAME_LABELS: "same labels"}
Labeled = Callable[[], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Panel:
    """The judges of an evaluation.

    Attributes:
        scoring: Judges of single completions; the first is the headline's.
        comparing: Judges of pairs.
        votes: Data sets of people's votes.
        named: The scoring judges by the names that a recipe gave them.
    """

    scoring: Sequence[Judge]
    comparing: Sequence[PairJudge] = ()
    votes: Sequence[str] = ()
    named: Mapping[str, Judge] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Saves what was learned for this evaluation beside its figures."""
        for judge in self.scoring:
            if isinstance(judge, ClassifierJudge):
                judge.save(folder / "judge.npz")


class RewardJudge:
    """A reward model that did not reward PPO. It reads each text as a finished one, as it was trained to."""

    def __init__(self, name: str, model: RewardModel | RewardEnsemble, *, description: str | None = None) -> None:
        self.name, self.model = name, model
        of, label = split_label(name.removeprefix("reward:"))
        read = f"The scores of the reward model {of}." if label is None else f"The probability of {label!r} by {of}."
        self.description = description or read
        self._is_probability = label is not None

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        """Scores completions of texts or of conversations, which the model's own template renders."""
        texts = [append_completion(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        scores = self.model.score_texts(texts, ended=[True] * len(texts))
        return (scores.exp() if self._is_probability else scores).tolist()


def checks_answers(judge: Judge) -> bool:
    """Whether the judge is a rule that checks answers, by which PPO may be both rewarded and judged."""
    return isinstance(judge, RuleJudge) and bool(judge.readings)


def answers(
    judge: Judge, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None,
    *, samples: int,
) -> dict[str, Answers]:  # fmt: skip
    """Checks `samples` answers to each prompt with a rule's strict and lenient readings; {} for any other judge."""
    rules = judge.readings if isinstance(judge, RuleJudge) else {}
    return {name: as_answers(rule, prompts, completions, columns, samples=samples) for name, rule in rules.items()}


def as_answers(
    rule: RuleJudge, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None,
    *, samples: int,
) -> Answers:  # fmt: skip
    """Checks `samples` answers to each prompt with a rule, as the rule reads them."""
    right = np.reshape(scores(rule, prompts, completions, columns), (-1, samples))
    readings = rule.said(completions)
    starts = range(0, len(completions), samples)
    prompt_keys = [prompt_key(prompt) for prompt in prompts[::samples]]
    return Answers(
        right, None if readings is None else [readings[start : start + samples] for start in starts], prompt_keys
    )


def scores(
    judge: Judge, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None
) -> list[float]:
    """Scores each completion by a judge. Of several processes only the first asks, because a judge may cost money.

    A rule receives conversations, as reward functions do, and the prompts' other columns. A reward model renders
    conversations itself. Other judges read plain text.

    Args:
        judge: The judge.
        prompts: (N,) texts or conversations.
        completions: (N,) texts.
        columns: The prompts' other columns, one value per prompt.

    Returns:
        (N,) scores.
    """

    def asked() -> list[float]:
        if isinstance(judge, RuleJudge):
            wrapped = [wrap_completion(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
            return judge.score(prompts, wrapped, columns or {})
        if isinstance(judge, RewardJudge):
            return judge(prompts, completions)
        return judge([plain_text(prompt) for prompt in prompts], list(completions))

    values: list[float] = distributed.from_first(asked)
    return values


def cheapest_first(judges: Sequence[Judge]) -> list[Judge]:
    """Puts the paid judges last, so that an error in a free one shows before anything is spent."""
    return sorted(judges, key=lambda judge: isinstance(judge, LLMJudge))


def checked(
    panel: Panel, labeled: Dataset | None, *, own: Dataset | None = None, seed: int,
    reward: RewardModel | RewardEnsemble | None = None, same_labels: Collection[str] = (),
) -> dict[str, JudgeCheck]:  # fmt: skip
    """Checks each scoring judge on pairs whose order is known from elsewhere.

    Args:
        panel: The judges.
        labeled: Pairs with the columns prompt, chosen and rejected, and others for rules; None where there are none.
        own: Pairs of the policies' own outputs, likewise.
        seed: Seed of the resamples.
        reward: The training reward's model or ensemble, whose errors are compared with the judges'.
        same_labels: Names of the judges that learned from the labels of that model.

    Returns:
        The checks, by the judges' names.
    """
    paid = None if reward is None else RewardJudge("reward", reward)

    def tried(judge: Judge, pairs: Dataset | None) -> PairCheck | None:
        if isinstance(judge, RuleJudge) and pairs is not None:
            pairs = judge.with_answers(pairs)
        return None if pairs is None else _on_pairs(judge, pairs, paid, seed)

    return {
        judge.name: JudgeCheck(tried(judge, labeled), tried(judge, own), judge.name in same_labels)
        for judge in cheapest_first(panel.scoring)
    }


def _on_pairs(judge: Judge, pairs: Dataset, paid: Judge | None, seed: int) -> PairCheck:
    most = CHECKED_BY_LLM if isinstance(judge, LLMJudge) else CHECKED
    columns = pairs.select(range(min(most, len(pairs)))).to_dict()
    prompts = columns.pop("prompt")
    sides = [
        [completion_text(text, prompt) for prompt, text in zip(prompts, columns.pop(side), strict=True)]
        for side in ("chosen", "rejected")
    ]
    good, bad = (scores(judge, prompts, side, columns) for side in sides)
    margins = None
    if paid is not None:
        above, below = (scores(paid, prompts, side, columns) for side in sides)
        margins = np.subtract(above, below)
    return check_pairs(
        good,
        bad,
        [prompt_key(prompt) for prompt in prompts],
        probabilities=isinstance(judge, ClassifierJudge),
        seed=seed,
        reward_margins=margins,
    )


def settled_pairs(pairs: Dataset, prefer: Callable[[str, str, random.Random], int], *, seed: int) -> Dataset | None:
    """Orders pairs as a noisy preference means them, and drops those near a toss-up.

    Args:
        pairs: Rows with prompt, chosen and rejected.
        prefer: Draws the preferred side of two whole texts, 0 or 1.
        seed: Seed of the draws.

    Returns:
        The pairs; None where none is left.
    """
    rows = pairs.to_list()
    sides = [
        [plain_text(row["prompt"]) + completion_text(row[side], row["prompt"]) for row in rows]
        for side in ("chosen", "rejected")
    ]
    kept = []
    for row, better in zip(rows, settled(list(zip(*sides, strict=True)), prefer, seed=seed), strict=True):
        if better is not None:
            # The preference contradicts the label, so the sides change places.
            turned = {"chosen": row["rejected"], "rejected": row["chosen"]} if better else {}
            kept.append({**row, **turned})
    return Dataset.from_list(kept) if kept else None


def check_names(
    names: Sequence[str], llm: LLMConfig, *, labeled: Labeled | None = None, seed: int = 1,
    hub: Hub | None = CLIENT, headline: bool = True,
) -> None:  # fmt: skip
    """Checks, before models are loaded, that the judges can be had.

    Args:
        names: The judges.
        llm: Settings of the language models.
        labeled: Rows for the classifier; None to skip them.
        seed: Seed of the classifier's split.
        hub: The Hub to ask; None to ask none.
        headline: Whether the first is the headline's and must score single completions.

    Raises:
        ZooError: A judge cannot be had, or is named twice.
    """
    doubled = next((name for name in names if list(names).count(name) > 1), None)
    if doubled is not None:
        raise ZooError(f"The judge {doubled} is named twice: name it once.")
    for place, name in enumerate(names):
        kind, argument = kind_of(name)
        if kind == "classifier" and labeled is not None:
            with needing_labels():
                ClassifierJudge.check(labeled(), seed=seed)
        elif kind == "unlabeled":
            load_function(argument)
            if labeled is not None:
                labeled()
        elif kind == "reward":
            _check_reward_model(argument, hub)
        elif kind == "rule":
            RuleJudge(argument)
        elif kind == "llm":
            _llm(argument, llm, None)
        elif kind == "pairs":
            FunctionPairJudge(argument)
        elif kind == "function":
            check_judge_name(argument)
            FunctionJudge(argument)
        elif kind == "votes":
            from ..votes.data import HubVotes

            HubVotes(argument)
            if hub is not None:
                _check_on_hub(name, argument, None, repo_type="dataset", hub=replace(hub, source=None))
        if headline and place == 0 and kind in ("pairs", "votes"):
            raise ZooError(
                f"The first judge scores single completions, and {name} only says which of two is preferred: name "
                "another before it, such as classifier."
            )


def check_endpoints(names: Sequence[str], llm: LLMConfig) -> None:
    """Raises ZooError for a language model whose endpoint does not answer, or refuses the key."""
    for kind, model in map(kind_of, names):
        if kind == "llm":
            _llm(model, llm, None).check_endpoint()


def open_panel(
    names: Sequence[str], *, llm: LLMConfig, labeled: Labeled, folder: Path, seed: int, title: str | None = None,
    description: str | None = None, beside: Sequence[Judge] = (), use_cpu: bool = False,
    same_labels: Path | None = None, hub: Hub = CLIENT, headline: bool = True,
) -> Panel:  # fmt: skip
    """Opens the judges by name.

    Args:
        names: The judges; the first is the headline's.
        llm: Settings of the language models.
        labeled: Rows with text and label for the classifier, read where it is named.
        folder: Where an LLM's answers are kept.
        seed: Seed of the classifier's split.
        title: The name of a headline judge that is a function.
        description: Its description.
        beside: Further judges, which have no such name.
        use_cpu: Whether models stay on the CPU.
        same_labels: The reward model of the judge `same-labels`.
        hub: Where reward models come from.
        headline: As in `check_names`.

    Raises:
        ZooError: A judge cannot be had.
    """
    check_names(names, llm, hub=hub, headline=headline)
    scoring: list[Judge] = []
    comparing: list[PairJudge] = []
    votes: list[str] = []
    named: dict[str, Judge] = {}
    for place, name in enumerate(names):
        kind, argument = kind_of(name)
        before = len(scoring)
        if kind == "classifier":
            scoring.append(ClassifierJudge.train(labeled(), seed=seed))
        elif kind == "unlabeled":
            scoring.append(_unlabeled(argument, labeled()))
        elif kind == "reward":
            scoring.append(RewardJudge(name, _reward(argument, use_cpu=use_cpu, hub=hub)))
        elif kind == SAME_LABELS:
            if same_labels is None:
                raise ZooError(
                    f"The judge {SAME_LABELS} is one of a recipe's run: name another, such as reward:RUN/judge/reward."
                )
            own = _reward(str(same_labels), use_cpu=use_cpu, hub=hub)
            scoring.append(RewardJudge(JUDGES_OF_LABELS[SAME_LABELS], own, description=OF_SAME_LABELS))
        elif kind == "rule":
            scoring.append(RuleJudge(argument))
        elif kind == "llm":
            model = _llm(argument, llm, folder / "llm")
            comparing.append(model)
            if place == 0:
                scoring.append(model)
        elif kind == "pairs":
            comparing.append(FunctionPairJudge(argument, name=name))
        elif kind == "votes":
            votes.append(argument)
        else:
            first = place == 0
            scoring.append(
                FunctionJudge(argument, name=title if first else None, description=description if first else None)
            )
        # By the recipe's name for it, which may differ from the judge's own.
        if len(scoring) > before:
            named[name] = scoring[-1]
    return Panel((*scoring, *beside), tuple(comparing), tuple(votes), named)


@contextlib.contextmanager
def needing_labels() -> Iterator[None]:
    """Turns an error inside into one that says the judge `classifier` has nothing to learn from, with the remedies."""
    try:
        yield
    except ZooError as error:
        why = str(error).rpartition(": ")[0] or str(error)  # without its mend, as there are others here
        raise ZooError(
            f"The judge classifier has no labeled texts to learn from ({why}): say in evaluation.labeled where some "
            "are, or name another judge, by evaluation.judge or --judge: reward:MODEL (another public reward model), "
            "rule:REWARD, llm:MODEL, MODULE:FUNCTION, or same-labels where the stage reward has a judge_share."
        ) from error


def split_label(name: str) -> tuple[str, str | None]:
    """(model, label) of MODEL#LABEL; a folder may have a # in its own name."""
    model, mark, label = name.rpartition("#")
    return (model, label) if mark and not Path(name).is_dir() else (name, None)


def _check_reward_model(name: str, hub: Hub | None) -> None:
    from ...fileio import hub_id
    from ...hub.client.pull import split_revision

    model = split_label(name)[0]
    if Path(model).is_dir():
        _check_outputs(name, Path(model))
        return
    repo, revision = split_revision(model)
    if hub_id(repo) is None:
        raise ZooError(f"The judge reward:{name} is no folder and no repository: write reward:NAMESPACE/NAME.")
    if hub is not None and _check_on_hub(f"reward:{name}", repo, revision, repo_type="model", hub=hub):
        read = ask(
            repo,
            hub,
            lambda connection: connection.snapshot(
                repo, revision=revision, allow_patterns=["config.json", "token*", "vocab*", "merges.txt", "special*"]
            ),
        )
        _check_outputs(name, read[1])


def _check_outputs(name: str, folder: Path) -> None:
    from ...modeling.loading import TOKENIZER_FILES, json_object, load_tokenizer
    from ...modeling.special_tokens import pads_apart

    path = folder / "config.json"
    labels = labels_in(json_object(path)) if path.is_file() else None
    if labels is not None:
        check_outputs(name, labels)
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        tokenizer = load_tokenizer(folder, name=f"The judge reward:{name}")
        if not pads_apart(tokenizer):
            raise ZooError(
                f"The judge reward:{name} pads with its EOS, so that its score would be read one token early: put it "
                "in a folder whose tokenizer has another pad_token, and name that."
            )


def check_outputs(name: str, labels: Mapping[Any, str]) -> None:
    """Raises ZooError for a judge MODEL or MODEL#LABEL that is none of a model with these labels (output -> label)."""
    model, label = split_label(name)
    if label is None and len(labels) != 1:
        raise ZooError(
            f"The judge reward:{name} has {len(labels)} outputs, and a judge has one: name the label whose probability "
            f"is the score, as in reward:{name}#{next(iter(labels.values()))}, one of {', '.join(labels.values())}."
        )
    label_index(labels, label, name=model)


def _check_on_hub(judge: str, repo: str, revision: str | None, *, repo_type: str, hub: Hub) -> bool:
    """Raises ZooError for what the Hub says it lacks; False where it does not answer, so that loading will tell."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    from ...hub.client.refusals import refusals_as

    def look(one: Hub) -> None:
        with refusals_as(f"The judge {judge} is not on {one.name}, or this token may not read it", "check its name."):
            one.api().repo_info(repo, revision=revision, repo_type=repo_type)

    try:
        ask(repo, hub, look)
    except ZooError as error:
        if isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError)):
            raise
        log.warning("Whether the judge %s exists cannot be checked now: %s", judge, error)
        return False
    return True


def _reward(name: str, *, use_cpu: bool, hub: Hub) -> RewardModel:
    from ...modeling.loading import load_tokenizer
    from ...modeling.models import load_classifier

    model, label = split_label(name)
    path = resolve(model, hub).path
    if not (path / "config.json").is_file():  # a stage of a run: the checkpoint that it chose
        path = StageRecord(path).chosen_checkpoint() or path
    loaded = on_device(load_classifier(path, label=label), use_cpu=use_cpu)
    tokenizer = load_tokenizer(path, name=f"The judge reward:{name}")
    if label is None:
        return RewardModel(loaded, tokenizer, tokenizer)
    return RewardModel(loaded, tokenizer, tokenizer, label=label, output="logprob", center=False, scale=False)


def _unlabeled(target: str, rows: Iterable[Mapping[str, Any]]) -> Judge:
    """The judge that a function makes of texts whose labels it is not shown."""
    judge = run_judge(target, load_function(target), [str(row["text"]) for row in rows])
    if not isinstance(judge, Judge):
        raise ZooError(
            f"{target!r} made a {type(judge).__name__}, which is no judge: it needs name, description and "
            "(prompts, completions) -> numbers."
        )
    return judge


def _llm(model: str, config: LLMConfig, cache: Path | None) -> LLMJudge:
    """The endpoint is the environment's, as the key is: what a recipe says must not choose where a key is sent."""
    options = {key: value for key, value in asdict(config).items() if value is not None}
    price = options.pop("price", None)
    return LLMJudge(
        os.environ.get(ENDPOINT) or OPENAI,
        model,
        name=f"llm:{model}",
        cache=cache,
        price=None if price is None else (price[0], price[1]),
        **options,
    )
