"""Opens the judges that a recipe or a command names.

classifier                 a scikit-learn classifier trained on labeled texts (see evaluation.labeled)
reward:MODEL               a second reward model, a folder or NAMESPACE/NAME[@REVISION]
reward:MODEL#LABEL         the probability of one label, by a classifier with several labels
unlabeled:module:function  a function (texts) -> judge, called with the classifier's texts without their labels
same-labels                a reward model from a recipe's run, trained on pairs that PPO's reward model did not see
rule:REWARD                a reward function or a verifier, named as in reward_funcs
pairs:module:function      a function (prompts, shown first, shown second) -> 1, 1/2 or 0, called in both orders
llm:MODEL                  a language model at the endpoint in OPENAI_BASE_URL, with the key in OPENAI_API_KEY
votes:NAMESPACE/NAME       people's votes on the two evaluated policies, from the comparison page
module:function            a function (prompts, completions) -> numbers; an entry point's name works too
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import full_revision
from ...hub.client.refs import try_hub_then_source
from ...modeling.devices import move_to_best_device
from ...modeling.models import label_index, labels_of
from ...plugins import call_judge
from ...rewards import RewardModel
from ...runs.checkpoint_choice import resolve_model
from ...runs.settings.evaluation import LLMConfig
from ...runs.settings.judge_names import SAME_LABELS, check_judge_name, split_judge_name
from .llm import LLMJudge
from .pairwise import FunctionPairJudge, PairJudge, load_function
from .panel import Panel, RewardJudge, split_label
from .rule import RuleJudge
from .scalar import ClassifierJudge, FunctionJudge, Judge

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE, DEFAULT_ENDPOINT = "OPENAI_BASE_URL", "https://api.openai.com/v1"

SAME_LABELS_DESCRIPTION = (
    "A reward model trained like PPO's, on pairs of other prompts with labels from the same source: it shares the "
    "errors of these labels."
)
#: Name in recipes -> name in reports.
JUDGES_TRAINED_ON_LABELS = {"classifier": ClassifierJudge.name, SAME_LABELS: "same labels"}
LabeledTextsLoader = Callable[[], Iterable[Mapping[str, object]]]


def check_judges_available(
    names: Sequence[str], llm: LLMConfig, *, load_labeled: LabeledTextsLoader | None = None, seed: int = 1,
    hub: Hub | None = DEFAULT_HUB, has_headline: bool = True,
) -> None:  # fmt: skip
    """Checks, before models are loaded, that the judges are available.

    Args:
        names: Names of the judges, as recipes write them.
        llm: Settings of the language models.
        load_labeled: Loads the classifier's texts; None to check no texts.
        seed: Seed of the classifier's split.
        hub: The Hub on which to look for repositories; None to check no repositories.
        has_headline: Whether the first judge is the headline judge, which must score single completions.

    Raises:
        ZooError: A judge is not available or is named twice, or the headline judge only compares pairs.
    """
    duplicate = next((name for name in names if list(names).count(name) > 1), None)
    if duplicate is not None:
        raise ZooError(f"The judge {duplicate} is named twice: name it once.")
    # Creating a judge checks its name, so some judges are created here and discarded.
    for index, name in enumerate(names):
        kind, argument = split_judge_name(name)
        if kind == "classifier" and load_labeled is not None:
            with explain_missing_labels():
                ClassifierJudge.check(load_labeled(), seed=seed)
        elif kind == "unlabeled":
            load_function(argument)
            if load_labeled is not None:
                load_labeled()
        elif kind == "reward":
            _check_reward_model(argument, hub)
        elif kind == "rule":
            RuleJudge(argument)
        elif kind == "llm":
            _open_llm(argument, llm, None)
        elif kind == "pairs":
            FunctionPairJudge(argument)
        elif kind == "function":
            check_judge_name(argument)
            FunctionJudge(argument)
        elif kind == "votes":
            from ..votes.data import HubVotes

            HubVotes(argument)
            if hub is not None:
                _check_on_hub(name, argument, None, repo_type="dataset", hub=replace(hub, source_hub=None))
        if has_headline and index == 0 and kind in ("pairs", "votes"):
            raise ZooError(
                f"The first judge must score single completions, but {name} only compares pairs: name another judge "
                "before it, such as classifier."
            )


def check_endpoints(names: Sequence[str], llm: LLMConfig) -> None:
    """Checks the endpoint of each judge that is a language model, as `LLMJudge.check_endpoint` does.

    Args:
        names: Names of the judges, as recipes write them.
        llm: Settings of the language models.
    """
    for kind, model in map(split_judge_name, names):
        if kind == "llm":
            _open_llm(model, llm, None).check_endpoint()


def open_panel(
    names: Sequence[str], *, llm: LLMConfig, load_labeled: LabeledTextsLoader, folder: Path, seed: int,
    title: str | None = None, description: str | None = None, extra: Sequence[Judge] = (), use_cpu: bool = False,
    same_labels_folder: Path | None = None, hub: Hub = DEFAULT_HUB, has_headline: bool = True,
) -> Panel:  # fmt: skip
    """Opens the judges by name.

    Args:
        names: Names of the judges, as recipes write them; the first is the headline judge.
        llm: Settings of the language models.
        load_labeled: Loads rows with text and label; called only for judges that need them.
        folder: Folder of the evaluation, in which language models cache their answers.
        seed: Seed of the classifier's split.
        title: The headline judge's name in reports, if it is a function; None for the function's own name.
        description: The headline judge's description in reports, if it is a function; None for its docstring.
        extra: Further judges of single completions, which have no name in recipes.
        use_cpu: Whether models stay on the CPU.
        same_labels_folder: Folder of the reward model of the judge `same-labels`; None if there is none.
        hub: The Hub to fetch reward models from.
        has_headline: As in `check_judges_available`.

    Raises:
        ZooError: A judge is not available.
    """
    check_judges_available(names, llm, hub=hub, has_headline=has_headline)
    scoring_judges: list[Judge] = []
    pair_judges: list[PairJudge] = []
    vote_repos: list[str] = []
    by_recipe_name: dict[str, Judge] = {}
    for index, name in enumerate(names):
        kind, argument = split_judge_name(name)
        count_before = len(scoring_judges)
        if kind == "classifier":
            scoring_judges.append(ClassifierJudge.train(load_labeled(), seed=seed))
        elif kind == "unlabeled":
            scoring_judges.append(_create_unlabeled_judge(argument, load_labeled()))
        elif kind == "reward":
            scoring_judges.append(RewardJudge(name, _load_reward_model(argument, use_cpu=use_cpu, hub=hub)))
        elif kind == SAME_LABELS:
            if same_labels_folder is None:
                raise ZooError(
                    f"The judge {SAME_LABELS} exists only in a recipe's run: name another, such as "
                    "reward:RUN/judge/reward."
                )
            reward_model = _load_reward_model(str(same_labels_folder), use_cpu=use_cpu, hub=hub)
            scoring_judges.append(
                RewardJudge(JUDGES_TRAINED_ON_LABELS[SAME_LABELS], reward_model, description=SAME_LABELS_DESCRIPTION)
            )
        elif kind == "rule":
            scoring_judges.append(RuleJudge(argument))
        elif kind == "llm":
            llm_judge = _open_llm(argument, llm, folder / "llm")
            pair_judges.append(llm_judge)
            # The headline judge must also score single completions.
            if index == 0:
                scoring_judges.append(llm_judge)
        elif kind == "pairs":
            pair_judges.append(FunctionPairJudge(argument, name=name))
        elif kind == "votes":
            vote_repos.append(argument)
        else:
            name_and_description = {"name": title, "description": description} if index == 0 else {}
            scoring_judges.append(FunctionJudge(argument, **name_and_description))
        # The key is the recipe's name for the judge, which may differ from the judge's own name.
        if len(scoring_judges) > count_before:
            by_recipe_name[name] = scoring_judges[-1]
    return Panel((*scoring_judges, *extra), tuple(pair_judges), tuple(vote_repos), by_recipe_name)


@contextlib.contextmanager
def explain_missing_labels() -> Iterator[None]:
    """Explains, if labeled texts cannot be loaded, that the judge `classifier` needs them."""
    try:
        yield
    except ZooError as error:
        problem = str(error).rpartition(": ")[0] or str(error)  # without the advice after the colon
        raise ZooError(
            f"The judge classifier has no labeled texts ({problem}): name them in evaluation.labeled, or name another "
            "judge in evaluation.judge or --judge: reward:MODEL (another public reward model), rule:REWARD, "
            "llm:MODEL, MODULE:FUNCTION, or same-labels if the stage reward has a judge_share."
        ) from error


def _check_reward_model(name: str, hub: Hub | None) -> None:
    from ...fileio import hub_id
    from ...hub.client.pull import split_revision

    model = split_label(name)[0]
    if Path(model).is_dir():
        _check_reward_files(name, Path(model))
        return
    repo, revision = split_revision(model)
    if hub_id(repo) is None:
        raise ZooError(f"The judge reward:{name} is neither a folder nor a repository: write reward:NAMESPACE/NAME.")
    if hub is not None and _check_on_hub(f"reward:{name}", repo, revision, repo_type="model", hub=hub):
        _, folder = try_hub_then_source(
            repo,
            hub,
            lambda connection: connection.snapshot(
                repo,
                revision=full_revision(repo, revision, connection),
                allow_patterns=["config.json", "token*", "vocab*", "merges.txt", "special*"],
            ),
        )
        _check_reward_files(name, folder)


def _check_reward_files(name: str, folder: Path) -> None:
    from ...modeling.loading import TOKENIZER_FILES, load_tokenizer
    from ...modeling.model_files import read_json_object
    from ...modeling.special_tokens import has_own_pad

    path = folder / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    if (labels := labels_of(config)) is not None:
        check_outputs(name, labels, label2id=config.get("label2id"))
    if any((folder / file).is_file() for file in TOKENIZER_FILES):
        tokenizer = load_tokenizer(folder, name=f"The judge reward:{name}")
        if not has_own_pad(tokenizer):
            raise ZooError(
                f"The judge reward:{name} pads with its EOS token, so its score would be read one token early: copy "
                "the model to a folder, give its tokenizer another pad_token, and name that folder."
            )


def check_outputs(name: str, labels: Mapping[object, str], *, label2id: Mapping[str, Any] | None = None) -> None:
    """Checks that a judge's name, MODEL or MODEL#LABEL, selects one output of the model.

    Args:
        name: MODEL or MODEL#LABEL.
        labels: The model's labels, by output.
        label2id: The outputs by label, from the model's configuration; None if it has no such key.

    Raises:
        ZooError: The model has several outputs and no label is named, or it has no such label.
    """
    model, label = split_label(name)
    if label is None and len(labels) != 1:
        raise ZooError(
            f"The judge reward:{name} has {len(labels)} outputs, but a judge has one: name the label whose probability "
            f"is the score, as in reward:{name}#{next(iter(labels.values()))}; the labels are "
            f"{', '.join(labels.values())}."
        )
    label_index(labels, label, name=model, label2id=label2id)


def _check_on_hub(judge: str, repo: str, revision: str | None, *, repo_type: str, hub: Hub) -> bool:
    """Returns whether the Hub answered. Raises ZooError if it answered that the repository does not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    from ...hub.client.refusals import translate_lookup_errors

    def check_exists(connection: Hub) -> None:
        with translate_lookup_errors(
            f"The judge {judge}", connection, "check its name and the token.", repo=repo, repo_type=repo_type
        ):
            full = full_revision(repo, revision, connection) if repo_type == "model" else revision
            connection.api().repo_info(repo, revision=full, repo_type=repo_type)

    try:
        try_hub_then_source(repo, hub, check_exists)
    except ZooError as error:
        if isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError)):
            raise
        log.warning("Cannot check now whether the judge %s exists: %s", judge, error)
        return False
    return True


def _load_reward_model(name: str, *, use_cpu: bool, hub: Hub) -> RewardModel:
    from ...modeling.loading import load_tokenizer
    from ...modeling.models import load_classifier

    model_name, label = split_label(name)
    path = resolve_model(model_name, hub).path
    model = move_to_best_device(load_classifier(path, label=label), use_cpu=use_cpu)
    tokenizer = load_tokenizer(path, name=f"The judge reward:{name}")
    if label is None:
        return RewardModel(model, tokenizer, tokenizer)
    # Probabilities have one scale for all models, so they are neither centered nor scaled.
    return RewardModel(model, tokenizer, tokenizer, label=label, output="logprob", center=False, scale=False)


def _create_unlabeled_judge(target: str, rows: Iterable[Mapping[str, object]]) -> Judge:
    """Calls a function that makes a judge from texts without labels."""
    judge = call_judge(target, load_function(target), [str(row["text"]) for row in rows])
    if not isinstance(judge, Judge):
        raise ZooError(
            f"{target!r} returned a {type(judge).__name__}, not a judge: it needs name, description and (prompts, "
            "completions) -> numbers."
        )
    return judge


def _open_llm(model: str, config: LLMConfig, cache: Path | None) -> LLMJudge:
    """Opens a language model at the environment's endpoint, because a recipe must not choose where the key is sent."""
    options = {key: value for key, value in asdict(config).items() if value is not None}
    price = options.pop("price", None)
    return LLMJudge(
        os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT,
        model,
        name=f"llm:{model}",
        cache=cache,
        price=None if price is None else (price[0], price[1]),
        **options,
    )
