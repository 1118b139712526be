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

    scoring: judges of single completions; the first is the headline's. comparing: judges of pairs. votes: data sets of
    people's votes. named: those that score, by the names that a recipe gave them.
    """

    scoring: Sequence[Judge]
    comparing: Sequence[PairJudge] = ()
    votes: Sequence[str] = ()
    named: Mapping[str, Judge] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Keeps what was learned for this evaluation beside its figures."""
        for judge in self.scoring:
            if isinstance(judge, ClassifierJudge):
                judge.save(folder / "judge.npz")


class RewardJudge:
    """A reward model that PPO was not rewarded by; it reads each text as a finished one, as it was trained to."""

    def __init__(self, name: str, model: RewardModel | RewardEnsemble, *, description: str | None = None) -> None:
        self.name, self.model = name, model
        of, label = split_label(name.removeprefix("reward:"))
        read = f"The scores of the reward model {of}." if label is None else f"The probability of {label!r} by {of}."
        self.description = description or read
        self._is_probability = label is not None

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        """prompts: texts or conversations, which the model's own template renders."""
        texts = [append_completion(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        scores = self.model.score_texts(texts, ended=[True] * len(texts))
        return (scores.exp() if self._is_probability else scores).tolist()


def checks_answers(judge: Judge) -> bool:
    """Whether it is a rule that says whether an answer is right: PPO may be paid by it and judged by it."""
    return isinstance(judge, RuleJudge) and bool(judge.readings)


def answers(
    judge: Judge,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None,
    *,
    samples: int,
) -> dict[str, Answers]:
    """What a rule finds of `samples` answers to each prompt, read strictly and leniently; {} of any other judge."""
    rules = judge.readings if isinstance(judge, RuleJudge) else {}
    return {name: as_answers(rule, prompts, completions, columns, samples=samples) for name, rule in rules.items()}


def as_answers(
    rule: RuleJudge,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None,
    *,
    samples: int,
) -> Answers:
    """What a rule that says whether an answer is right finds of `samples` answers to each prompt, read as it reads."""
    right = np.reshape(scores(rule, prompts, completions, columns), (-1, samples))
    said = rule.said(completions)
    starts = range(0, len(completions), samples)
    asked = [prompt_key(prompt) for prompt in prompts[::samples]]
    return Answers(right, None if said is None else [said[start : start + samples] for start in starts], asked)


def scores(
    judge: Judge, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None
) -> list[float]:
    """A judge's score of each completion. prompts: texts or conversations.

    Rules are given conversations as reward functions are, and the prompts' other columns; a reward model renders them
    itself; other judges read plain words. Of several processes the first one asks, as a judge may be paid.
    """

    def asked() -> list[float]:
        if isinstance(judge, RuleJudge):
            given = [wrap_completion(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
            return judge.score(prompts, given, columns or {})
        if isinstance(judge, RewardJudge):
            return judge(prompts, completions)
        return judge([plain_text(prompt) for prompt in prompts], list(completions))

    found: list[float] = distributed.from_first(asked)
    return found


def cheapest_first(judges: Sequence[Judge]) -> list[Judge]:
    """Those that are paid for last: what another one cannot judge is known before anything is spent."""
    return sorted(judges, key=lambda judge: isinstance(judge, LLMJudge))


def checked(
    panel: Panel,
    labeled: Dataset | None,
    *,
    own: Dataset | None = None,
    seed: int,
    reward: RewardModel | RewardEnsemble | None = None,
    same_labels: Collection[str] = (),
) -> dict[str, JudgeCheck]:
    """What each scoring judge makes of pairs that were put in order elsewhere, by its name.

    labeled, own (pairs of the policies' own outputs): prompt, chosen, rejected, texts or conversations, and other
    columns for rules; None where there are none. reward: the training reward's model, or several as one, whose
    errors are held beside the judges'. same_labels: the judges that learned from the labels of that model.
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
        [completion_text(one, prompt) for prompt, one in zip(prompts, columns.pop(side), strict=True)]
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
    """The pairs in the order that a noisy preference means, without those near a toss-up; None where none is left."""
    rows = pairs.to_list()
    sides = [
        [plain_text(row["prompt"]) + completion_text(row[side], row["prompt"]) for row in rows]
        for side in ("chosen", "rejected")
    ]
    kept = []
    for row, better in zip(rows, settled(list(zip(*sides, strict=True)), prefer, seed=seed), strict=True):
        if better is not None:
            turned = {"chosen": row["rejected"], "rejected": row["chosen"]} if better else {}
            kept.append({**row, **turned})
    return Dataset.from_list(kept) if kept else None


def check_names(
    names: Sequence[str],
    llm: LLMConfig,
    *,
    labeled: Labeled | None = None,
    seed: int = 1,
    hub: Hub | None = CLIENT,
    headline: bool = True,
) -> None:
    """Raises ZooError for a judge that cannot be had, as far as that can be told before models are loaded.

    labeled: rows for the classifier; None does not look at them. hub: None is not asked what it has. headline: the
    first is a headline's, and scores single completions.
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
    """Raises ZooError for a language model whose endpoint does not answer, or takes no request without another key."""
    for kind, model in map(kind_of, names):
        if kind == "llm":
            _llm(model, llm, None).check_endpoint()


def open_panel(
    names: Sequence[str],
    *,
    llm: LLMConfig,
    labeled: Labeled,
    folder: Path,
    seed: int,
    title: str | None = None,
    description: str | None = None,
    beside: Sequence[Judge] = (),
    use_cpu: bool = False,
    same_labels: Path | None = None,
    hub: Hub = CLIENT,
    headline: bool = True,
) -> Panel:
    """Opens the judges by name, the first as the headline's, under `title` and `description` where they are given.

    labeled: rows with text and label for the classifier, read where it is named. folder: where an LLM's answers are
    kept. beside: judges that no name stands for. same_labels: where the reward model of that judge is.
    headline: as in `check_names`. Raises ZooError for a judge that cannot be had.
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
        if len(scoring) > before:
            named[name] = scoring[-1]
    return Panel((*scoring, *beside), tuple(comparing), tuple(votes), named)


@contextlib.contextmanager
def needing_labels() -> Iterator[None]:
    """Says of what goes wrong inside that the judge `classifier` has nothing to learn from, and the mends."""
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
            lambda one: one.snapshot(
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
    """Raises ZooError for what the Hub says it does not have; False where it does not answer, and that shows later."""
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
    given = {key: value for key, value in asdict(config).items() if value is not None}
    price = given.pop("price", None)
    return LLMJudge(
        os.environ.get(ENDPOINT) or OPENAI,
        model,
        name=f"llm:{model}",
        cache=cache,
        price=None if price is None else (price[0], price[1]),
        **given,
    )
