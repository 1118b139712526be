"""`rlhf-zoo eval POLICY --against SFT`: compares two policies with the same tokenizer on held-out prompts."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from ..errors import ZooError
from ..evaluation.head_to_head import head_to_head
from ..evaluation.judges.check import JudgeCheck
from ..evaluation.judges.named import check_judges_available, open_panel
from ..evaluation.judges.pair_checks import check_panel
from ..evaluation.judges.people import compare_by_votes
from ..evaluation.measure import Evaluator, find_function_judges, find_reward_model_judges, find_weighted_functions
from ..evaluation.prompt_groups import NEAR_DUPLICATES, group_rows, number_of_groups
from ..evaluation.reward_load_settings import REWARD_LOAD_KEYS, reward_load_kwargs
from ..fields import check_limits
from ..fileio import get_nested, hub_id, is_finite, now, write_json, write_text
from ..hub.client.connect import DEFAULT_HUB, Hub
from ..hub.client.downloads import find_download
from ..hub.client.refs import Checkpoint
from ..hub.client.run_signature import TRUST_RUN_FLAG
from ..modeling.chat import tokenize_prompt
from ..modeling.chat_template import ChatSettings, Prompt
from ..modeling.devices import move_to_best_device
from ..modeling.models import context_length_of, load_causal
from ..modeling.prompt_keys import count_distinct_prompts, describe_prompt_count
from ..modeling.sampling.truncation import Truncation
from ..modeling.special_tokens import stop_ids
from ..modeling.text_ids import same_token_ids
from ..publishing.cards.report import WIN_RATES_PLOT
from ..publishing.catalog.card import Card, clean
from ..publishing.catalog.lineage import Lineage, PromptsLocation, find_policy, prompts_location
from ..publishing.plots import plot_win_rates
from ..rewards import Rewards
from ..rewards.loading import load_reward
from ..runs.context import environment_info
from ..runs.data.digests import check_unchanged
from ..runs.data.hold_out import split_by_prompt
from ..runs.data.layout import check_columns, convert_rows, put_distinct_prompts_first
from ..runs.data.sources import DataSource, find_data
from ..runs.pairs import PAIR_COLUMNS
from ..runs.record import StageRecord
from ..runs.settings.declared import default_of
from ..runs.settings.evaluation import EvaluationConfig, LabeledArguments, LLMConfig
from ..runs.settings.judge_names import SAME_LABELS
from ..runs.settings.key_classes import check_repository
from ..runs.settings.parse import recorded_settings
from ..runs.trusted_names import LOADERS, check_object, may_use_judge
from .inspect.trace import TracedPolicy, find_traced_policy, tokenizer_of
from .stages.train import silence_libraries

log = logging.getLogger(__name__)

#: Configurations of the data sets that the zoo's own recipes prepare; PROMPTS_CONFIG is tried if a run names none.
PROMPTS_CONFIG = "prompts"
PAIRS_CONFIG = "preferences"
#: With fewer prompts, a bootstrap interval over them is too narrow.
FEW_PROMPTS = 20


@dataclass(frozen=True)
class ComparisonSettings:
    """How two policies are compared.

    Attributes:
        prompts: Maximum number of held-out prompts.
        samples: Number of completions per prompt.
        split: Split of the prompts; None for the prompts that training held out, or for the split `test` if it held
            none out.
        seed: Seed of the samples.
        temperature, max_new_tokens: Sampling settings; None for the settings of the policy's training.
        dataset_name, dataset_revision: The data set with the prompts; None takes it from the policy's run or card.
        dataset_config: Configuration of the data set; "" for none, None takes it from the policy's run or card.
        columns: Name of the column that this command expects -> its name in the data set.
        judges: Names of the judges, the headline judge first; () for the judge of the policy's run or, if the run is
            not on this machine or was not evaluated, `classifier`.
        llm: Settings of judges llm:MODEL.
        group: How prompts that ask the same thing are found, as in `group_rows`.
    """

    prompts: int = 200
    samples: int = 3
    split: str | None = None
    seed: int = 1
    temperature: float | None = None
    max_new_tokens: int | None = None
    dataset_name: str | None = None
    dataset_revision: str | None = None
    dataset_config: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    judges: tuple[str, ...] = ()
    llm: LLMConfig = field(default_factory=LLMConfig)
    group: str | None = NEAR_DUPLICATES

    def __post_init__(self) -> None:
        check_columns(self.columns)
        for name in ("prompts", "samples", "seed", "temperature", "max_new_tokens"):
            key = "response_length" if name == "max_new_tokens" else name
            check_limits(key, getattr(self, name), label=f"--{name}")


@dataclass(frozen=True)
class PolicyPair:
    """A policy and the policy that it is compared with.

    Attributes:
        policy: The policy.
        against: The policy that `policy` is compared with.
        rewards: The policy's reward models; () without one.
        data: The data set of the policy's prompts; None if its run or card does not name one.
        sampling: `temperature` and `response_length` (tokens) of the policy's training.
        prompts_location: Where the policy's prompts are in the data set.
        judge: The judge of the policy's run, if the run is on this machine and was evaluated; otherwise None.
        judge_in_card: The judge that the policy's card names, for messages; None without one.
        labeled: Data-set arguments of the labeled texts that the judge `classifier` learns from.
        functions: Names of the reward functions that had a weight other than 0 in the policy's training.
        held_out: (share, split) of the prompts that training held out; None if it held out no share of a split.
        reward_load_kwargs: How to read the reward models, as keywords of `load_reward`.
        truncation_fields: How training truncated completions, as fields of `Truncation`.
        loader: The code that loads the reward model, for a run on this machine; None for a classifier.
        hub: The Hub that has the models and data.
    """

    policy: Checkpoint
    against: Checkpoint
    rewards: tuple[Checkpoint, ...]
    data: DataSource | None
    sampling: Mapping[str, float]
    prompts_location: PromptsLocation
    judge: str | None = None
    judge_in_card: str | None = None
    labeled: LabeledArguments = field(default_factory=LabeledArguments)
    functions: frozenset[str] = frozenset()
    held_out: tuple[float, str] | None = None
    reward_load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    truncation_fields: Mapping[str, Any] = field(default_factory=dict)
    loader: str | None = None
    hub: Hub = DEFAULT_HUB


def find_pair(
    policy: str, *, against: str | None, reward: str | None, settings: ComparisonSettings, hub: Hub = DEFAULT_HUB
) -> PolicyPair:
    """Finds a policy and the policy to compare it with.

    Args:
        policy: A run directory of PPO or a checkpoint in it, a model's folder, or NAMESPACE/NAME[@TAG].
        against: Replaces the SFT policy that the run or card names; None keeps it.
        reward: Replaces the reward model that the run or card names; "none" for no reward model, None keeps it.
        settings: How the policies are compared.
        hub: The Hub that has the models and data.

    Raises:
        ZooError: A model cannot be loaded, or neither the run nor the card names the other policy.
    """
    without_reward = reward == "none"
    reward_name = None if without_reward else reward
    data = None
    if settings.dataset_name is not None:
        data = find_data(settings.dataset_name, settings.dataset_revision, hub)
    stage_folder = _find_ppo_stage(Path(policy))
    if stage_folder is not None:
        traced = find_traced_policy(
            policy, sft=against, reward=reward_name, without_reward=without_reward, sft_flag="--against", hub=hub
        )
        where = str(traced.settings_file)
        sampling_keys = ("response_length", "temperature")
        names = (*sampling_keys, "reward_model_loader", *REWARD_LOAD_KEYS)
        recorded_keys = recorded_settings(traced.settings, "ppo", names, where=where)
        eval_record = StageRecord(stage_folder.parent / "eval")
        evaluation_keys = (eval_record.read().get("resolved") or {}).get("evaluation") or {}
        judge = evaluation_keys.get("judge")
        loader = recorded_keys["reward_model_loader"] if reward is None else None
        if not settings.judges:
            _check_recorded_judge(eval_record, judge)
        if loader is not None and not traced.is_trusted:
            check_object(loader, LOADERS, key="reward_model_loader", where=where, flag=TRUST_RUN_FLAG)
        data_folder = stage_folder.parent / "data"
        # Next to a stage that was downloaded alone, a folder "data" belongs to the user and not to the run.
        is_run_data = find_download(stage_folder) is None or find_download(data_folder) is not None
        configuration = prompts_location(traced.settings).configuration or PROMPTS_CONFIG
        if data is None and is_run_data and (data_folder / configuration).is_dir():
            data = DataSource(str(data_folder), None, {})
        data = data or _open_run_data(stage_folder, traced, hub)
        return PolicyPair(
            traced.policy,
            traced.reference,
            traced.reward_models,
            data,
            {name: float(recorded_keys[name]) for name in sampling_keys},
            judge=f"reward:{stage_folder.parent / 'judge' / 'reward'}" if judge == SAME_LABELS else judge,
            labeled=EvaluationConfig(labeled=evaluation_keys.get("labeled") or {}).labeled_arguments,
            functions=_reward_functions(traced.settings),
            prompts_location=prompts_location(traced.settings),
            held_out=_held_out_share_and_split(traced.settings),
            reward_load_kwargs=reward_load_kwargs(recorded_keys),
            truncation_fields=_truncation_fields(traced.settings, where),
            loader=loader,
            hub=hub,
        )
    lineage = find_policy(policy, against=against, reward=reward_name, without_reward=without_reward, hub=hub)
    sampling = {"temperature": lineage.setting("temperature", 1.0)}
    sampling["response_length"] = lineage.setting("response_length", default_of("ppo", "response_length"))
    judge_name = get_nested(lineage.card, "evaluation", "judge", "target")
    return PolicyPair(
        lineage.ppo,
        lineage.sft,
        lineage.rewards,
        data or _open_published_data(lineage, hub),
        sampling,
        judge_in_card=clean(judge_name) if isinstance(judge_name, str) else None,
        labeled=_published_labeled_arguments(lineage),
        functions=_reward_functions(lineage.card.get("settings")),
        prompts_location=lineage.prompts_location,
        held_out=_held_out_share_and_split(lineage.card.get("settings")),
        reward_load_kwargs=lineage.reward_load_kwargs,
        truncation_fields=lineage.truncation_fields,
        hub=hub,
    )


def _open_run_data(stage_folder: Path, traced: TracedPolicy, hub: Hub) -> DataSource | None:
    """Opens the data set of a run's PPO stage, at the run's commit; None if the run names none or a corpus made it.

    An untrusted run must name a data set on a Hub.
    """
    settings = traced.settings
    shared = settings.get("recipe") or {}
    keys = settings if settings.get("dataset_name") else shared
    name = keys.get("dataset_name")
    if not isinstance(name, str) or (keys is shared and shared.get("corpus")):
        return None
    if not traced.is_trusted:
        check_repository(name, key="dataset_name", where=str(traced.settings_file))
    recorded_lineage = StageRecord(stage_folder).read().get("dataset")
    source = find_data(name, keys.get("dataset_revision"), hub, recorded_lineage=recorded_lineage)
    check_unchanged(f"The data set {name}", source.lineage, recorded_lineage)
    return source


def _check_recorded_judge(eval_record: StageRecord, judge: object) -> None:
    """Raises ZooError if an evaluation that this user's rlhf-zoo did not write names code or a paid judge."""
    if judge is None or eval_record.is_own() or may_use_judge(str(judge)):
        return
    raise ZooError(
        f"{eval_record.run_file} was not written by your rlhf-zoo, or was changed since, and names the judge {judge}: "
        f"choose a judge with --judge, or add {TRUST_RUN_FLAG} if you trust this run."
    )


def _published_labeled_arguments(lineage: Lineage) -> LabeledArguments:
    """Returns where a published policy's judge found its labeled texts; defaults if its card names no Hub id."""
    labeled = get_nested(lineage.card, "evaluation", "labeled")
    if not isinstance(labeled, Mapping) or ("dataset_name" in labeled and hub_id(labeled["dataset_name"]) is None):
        return LabeledArguments()
    if "dataset_name" in labeled:
        where = f"The card of {lineage.ppo.name}"
        check_repository(labeled["dataset_name"], key="evaluation.labeled.dataset_name", where=where)
    return EvaluationConfig(labeled=dict(labeled)).labeled_arguments


def _truncation_fields(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns how a run truncated completions, as fields of `Truncation`; {} if it did not truncate them."""
    keys = {"shortest": "response_length_min", "text": "truncate_text", "after": "truncate_after"}
    recorded_keys = recorded_settings(settings, "ppo", tuple(keys.values()), where=where)
    fields = {name: recorded_keys[key] for name, key in keys.items()}
    return fields if fields["shortest"] or fields["text"] else {}


def _reward_functions(settings: object) -> frozenset[str]:
    """Returns the reward functions with a weight other than 0, by the untrusted settings of a run or card."""
    keys = settings if isinstance(settings, Mapping) else {}
    names, weights = keys.get("reward_funcs"), keys.get("reward_weights")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return frozenset()
    has_model = keys.get("reward_model_path") is not None
    return find_weighted_functions(names, weights if isinstance(weights, list) else None, has_reward_model=has_model)


def _find_ppo_stage(path: Path) -> Path | None:
    """Returns the folder of a path's PPO stage: the path itself, its subfolder ppo, or its parent; None without one."""
    for stage_folder in (path, path / "ppo", path.parent):
        if path.is_dir() and StageRecord(stage_folder).read().get("stage") == "ppo":
            return stage_folder
    return None


def _open_published_data(lineage: Lineage, hub: Hub) -> DataSource | None:
    for parent in Card(lineage.card).parents:
        if parent.role == "data" and parent.repo is not None:
            check_repository(parent.repo, key="parents.data", where=f"The card of {lineage.ppo.name}")
            return find_data(parent.repo, parent.commit, hub)
    return None


def evaluate(pair: PolicyPair, settings: ComparisonSettings, *, out: Path, command: str) -> dict[str, Any]:
    """Compares two policies on held-out prompts. Writes evaluation.json, samples.jsonl and a plot.

    Args:
        pair: The policies, as `find_pair` returns them.
        settings: How the policies are compared.
        out: Folder for the files.
        command: The command line, for evaluation.json.

    Returns:
        The content of evaluation.json.

    Raises:
        ZooError: A judge, prompts or a model cannot be loaded, or the policies have different tokenizers.
    """
    start_time = time.monotonic()
    silence_libraries()
    judge_names = settings.judges or (pair.judge or "classifier",)
    check_judges_available(judge_names, settings.llm, hub=pair.hub)
    if pair.data is None:
        raise ZooError(
            f"Neither the run nor the card of {pair.policy.name} names a data set with prompts: pass one with "
            "--dataset_name."
        )
    rows, split = _load_prompts(pair, pair.data, settings)
    rows = put_distinct_prompts_first(rows)
    rows = rows.select(range(min(settings.prompts, len(rows))))
    prompt_count = count_distinct_prompts(rows["prompt"])
    group_count = number_of_groups(group_rows(rows, settings.group))
    if prompt_count < settings.prompts:
        log.warning("The split %s has only %s prompts, so all of them are used.", split, describe_prompt_count(rows))
    if group_count < FEW_PROMPTS:
        group_note = f" in {group_count} groups that ask the same thing" if group_count < prompt_count else ""
        log.warning("The evaluation has only %d prompts%s, so its intervals are too narrow.", prompt_count, group_note)
    evaluator = _make_evaluator(pair, pair.data, settings, judge_names, out)
    policy = load_causal(pair.policy.path).eval()
    _check_context_length(policy, evaluator, rows["prompt"])
    checks = _check_judges(evaluator, pair.data, settings)
    comparison = head_to_head(
        policy,
        evaluator,
        rows,
        samples_per_prompt=settings.samples,
        seed=settings.seed,
        reward_judges=find_reward_model_judges(evaluator) | find_function_judges(evaluator, pair.functions),
        checks=checks,
        group=settings.group,
    )
    results = comparison.to_json()
    if evaluator.panel.vote_repos:
        ppo, sft = (_published_commits(side) for side in (pair.policy, pair.against))
        results["votes"] = {
            name: compare_by_votes(name, ppo_origins=ppo, sft_origins=sft, seed=settings.seed, hub=pair.hub)
            for name in evaluator.panel.vote_repos
        }
    document = {
        "schema": 1,
        "policy": _checkpoint_entry(pair.policy),
        "against": _checkpoint_entry(pair.against),
        "reward": _checkpoint_entry(pair.rewards[0]) if pair.rewards else None,
        **({"rewards": list(map(_checkpoint_entry, pair.rewards))} if len(pair.rewards) > 1 else {}),
        "data": {"location": pair.data.location, "revision": pair.data.revision, "split": split},
        "split": split,
        "seed": settings.seed,
        **results,
        "terms": asdict(replace(settings, split=settings.split or split)),
        "versions": environment_info(),
        "command": command,
        "finished": now(),
        "seconds": time.monotonic() - start_time,
    }
    out.mkdir(parents=True, exist_ok=True)
    evaluator.panel.save(out)
    write_json(out / "evaluation.json", document)
    write_text(out / "samples.jsonl", comparison.to_jsonl())
    plot_win_rates(document, out / WIN_RATES_PLOT)
    return document


def _load_prompts(pair: PolicyPair, data: DataSource, settings: ComparisonSettings) -> tuple[Dataset, str]:
    """Returns prompts and a name for them: the split of --split, what training held out, or the split `test`."""
    configuration, column, _ = pair.prompts_location
    if settings.dataset_config is not None:
        configuration = settings.dataset_config or None
    held_out = pair.held_out if settings.split is None else None
    split = held_out[1] if held_out is not None else settings.split or "test"
    keys = {"configuration": "--dataset_config", "split": "--split"}
    rows = data.load(configuration, split, columns=[], keys=keys)
    subject = f"The data set {data.location}, split {split},"
    column_names = settings.columns or ({} if column == "prompt" else {"prompt": column})
    is_chat = ChatSettings.of(tokenizer_of(pair.policy)) is not None
    rows = convert_rows(rows, "prompts", columns=column_names, as_chat=is_chat, subject=subject)
    if held_out is None:
        return rows, split
    share = held_out[0]
    return split_by_prompt(rows, share, part_count=2)[0], f"{split} ({share:.0%} of its prompts held out)"


def _held_out_share_and_split(settings: object) -> tuple[float, str] | None:
    """Returns `PolicyPair.held_out`, by the untrusted settings of a run or card."""
    keys = settings if isinstance(settings, Mapping) else {}
    share, split = keys.get("held_out_share"), keys.get("dataset_train_split", "train")
    if not is_finite(share) or not 0 < share < 1 or not isinstance(split, str):
        return None
    return float(share), split


def _check_context_length(policy: PreTrainedModel, evaluator: Evaluator, prompts: Sequence[Prompt]) -> None:
    """Raises ZooError if a prompt and its completion may exceed the models' context length."""
    limit = context_length_of(policy, evaluator.reference)
    if limit is None:
        return
    longest = max(len(tokenize_prompt(prompt, evaluator.tokenizer)) for prompt in prompts)
    if longest + evaluator.max_new_tokens > limit:
        raise ZooError(
            f"The models take {limit} tokens and the longest prompt has {longest}, which leaves no room for "
            f"{evaluator.max_new_tokens} new tokens: set --max_new_tokens to {max(limit - longest, 1)} or less."
        )


def _check_judges(evaluator: Evaluator, data: DataSource, settings: ComparisonSettings) -> dict[str, JudgeCheck]:
    try:
        pairs: Dataset | None = data.load(PAIRS_CONFIG, "test", columns=PAIR_COLUMNS)
    except ZooError as error:
        log.info("The judges are not checked on labeled pairs: %s", error)
        pairs = None
    return check_panel(evaluator.panel, pairs, seed=settings.seed, group=settings.group)


def _make_evaluator(
    pair: PolicyPair, data: DataSource, settings: ComparisonSettings, judge_names: Sequence[str], out: Path
) -> Evaluator:
    tokenizer, other_tokenizer = tokenizer_of(pair.policy), tokenizer_of(pair.against)
    if not same_token_ids(tokenizer, other_tokenizer):
        raise ZooError(
            f"{pair.policy.name} and {pair.against.name} have different tokenizers, so there is no KL between "
            "them: compare policies trained from the same base model."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    rewards = None
    if pair.rewards:
        paths = [model.path for model in pair.rewards]
        reward = load_reward(paths, tokenizer, move=move_to_best_device, loader=pair.loader, **pair.reward_load_kwargs)
        rewards = Rewards([reward])
    length = settings.max_new_tokens or int(pair.sampling["response_length"])
    panel = open_panel(
        judge_names,
        llm=settings.llm,
        load_labeled=lambda: _load_labeled_texts(pair, data),
        folder=out,
        seed=settings.seed,
        hub=pair.hub,
    )
    temperature = pair.sampling["temperature"] if settings.temperature is None else settings.temperature
    reference = move_to_best_device(load_causal(pair.against.path)).eval()
    truncation = Truncation(length, **pair.truncation_fields)
    if truncation.shortest is not None and truncation.shortest > length:
        truncation = replace(truncation, shortest=length)
    return Evaluator(
        reference,
        tokenizer,
        rewards,
        panel,
        max_new_tokens=length,
        temperature=temperature,
        truncation=truncation,
        stops=stop_ids(reference, tokenizer),
    )


def _load_labeled_texts(pair: PolicyPair, data: DataSource) -> Dataset:
    keys = pair.labeled
    location = keys.dataset_name or data.location
    where = f"configuration {keys.dataset_config}, split {keys.dataset_train_split}"
    try:
        if keys.dataset_name is not None:
            data = find_data(keys.dataset_name, keys.dataset_revision, pair.hub)
        rows = data.load(keys.dataset_config, keys.dataset_train_split, columns=[])
        return convert_rows(rows, "labeled", columns=keys.columns, as_chat=False, subject=f"The data set, {where},")
    except ZooError as error:
        if pair.judge_in_card is not None:
            hint = f"; the policy's card names {pair.judge_in_card}."
        else:
            hint = ". The recipe's README or the card of its last checkpoint may name one."
        raise ZooError(
            f"The data set {location} has no labeled texts for the judge classifier ({where}): choose a judge "
            f"with --judge (reward:MODEL, rule:REWARD, llm:MODEL or MODULE:FUNCTION){hint}"
        ) from error


def _published_commits(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    repo, commit, _ = checkpoint.hub_location
    return [(repo, commit)] if repo is not None and commit is not None else []


def _checkpoint_entry(checkpoint: Checkpoint) -> dict[str, Any]:
    repo, commit, tag = checkpoint.hub_location
    return {"name": checkpoint.name, "repo": repo, "commit": commit, "tag": tag}
