"""`rlhf-zoo doctor`: runs PPO's guards that need no training, on the models and data that a run would start from.

It neither writes to the run directory nor publishes. Data that is not prepared yet goes into a temporary folder. Checks
that need the model of an untrained stage are skipped.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ... import functional as F
from ...errors import ZooError
from ...modeling.devices import MicroBatches, move_to_best_device
from ...modeling.loading import load_tokenizer
from ...modeling.logprobs import text_logprobs
from ...modeling.models import context_length_of, load_causal
from ...modeling.prompt_keys import describe_prompt_count
from ...modeling.prompts import prepare_prompts
from ...modeling.reserved_columns import GENERATION_INDEX, PROMPT_TOKENS
from ...ppo.assembly import MAX_USUAL_EPOCHS, warn_if_many_epochs
from ...ppo.base import TRAIN_STREAM
from ...ppo.custom_loop import samples_from_user
from ...ppo.guards import check_ratio, check_rewards, check_start_kl, check_values, warn, warn_if_scores_identical
from ...ppo.rollout import Advantages, Rollout
from ...ppo.token_checks import TokenConsumer, check_ids, check_saved_tokenizer, check_tokenizer, count_embedding_rows
from ...ppo.trainer import PPOTrainer
from ...publishing.adapters import check_planned_base
from ...rewards import RewardModel, RewardScores
from ...runs.checks.models import NamedModel, check_prompt_lengths, starting_models
from ...runs.checks.splits import check_forms
from ...runs.context import RunContext, stages_to_train
from ...runs.dataset import stage_source
from ...runs.judge import check_same_labels, evaluation_settings
from ...runs.models import ParentCheckpoint
from ...runs.parents import find_parent, is_member_trained, parent_names, reward_roles
from ...runs.registry import REWARD_ROLES, is_ensemble_member, reward_names
from ...runs.settings.loading import check_installed, stage_load_options
from ...runs.settings.parse import StageSettings
from ..stages.evaluate import check_judges, check_rules, evaluation_prompts
from ..stages.ppo import (
    build_trainer,
    check_answers,
    check_batch,
    drop_too_long_prompts,
    load_data,
    load_policy_tokenizer,
    load_reward_checkpoint,
    load_reward_functions,
    try_functions,
)
from ..stages.reward import check_pairs
from ..stages.train import silence_libraries
from .examination import Examination, Finding, SkipCheck

#: Number of prompts of the trial rollout, with one completion each.
TRIAL_PROMPTS = 8
#: Number of prompts for checking the policy's tokenizer.
TOKENIZER_PROMPTS = 64
#: Nats per token by which the loss may exceed that of a uniform guess. A policy with its own tokenizer has a lower loss
#: than the guess, and random weights exceed it by about half a nat at most. A policy that was trained with another
#: tokenizer exceeds it by more, because it is confident in wrong tokens.
MAX_EXCESS_NATS = 1.0


def examine(context: RunContext, *, publishes: bool = True) -> list[Finding]:
    """Runs every check of the recipe's PPO stage, in order.

    Args:
        context: The run.
        publishes: Whether the run would publish.
    """
    silence_libraries()
    examination = Examination()
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-doctor-") as scratch_folder:
        scratch_context = replace(context, directory=Path(scratch_folder), publish=False)
        has_data = context.record("data").read().get("status") == "finished" and not context.restart
        data_context = replace(context, publish=False) if has_data else scratch_context
        check = examination.check
        # Before anything is trained.
        check("keys", lambda: _check_keys(scratch_context, publishes))
        check("columns", lambda settings: _check_columns(data_context), "keys")
        check("epochs", _check_epochs, "keys")
        check("reward functions", _check_functions, "keys")
        check("prompts", lambda settings: _check_prompts(data_context), "keys")
        check("answers", _check_answers, "keys", "reward functions", "prompts")
        check("batch", lambda *results: (None, check_batch(*results)), "keys", "prompts")
        check("models", lambda *results: _check_models(context), "keys")
        check("room", lambda *results: (None, _check_room(data_context, *results[:2])), "models", "prompts", "batch")
        check("evaluation's prompts", lambda *results: _check_evaluation_prompts(data_context), "keys", "prompts")
        check("judges", lambda *results: _check_judges(context, data_context), "keys", "reward functions")
        # The models that PPO starts from.
        check("sft checkpoint", lambda settings, _: _find_parent(context, settings, "sft"), "keys", "models")
        check("reward checkpoint", lambda settings, _: _find_reward_parents(context, settings), "keys", "models")
        check("value model", lambda settings, _: _find_parent(context, settings, "value"), "keys", "models")
        check("policy", _load_policy, "keys", "sft checkpoint")
        check("tokenizer", lambda *results: _load_tokenizer(context, *results), "prompts", "sft checkpoint", "policy")
        needs: Sequence[str] = ("keys", "prompts", "policy", "tokenizer", "room")
        check("prompt length", lambda *results: _check_prompt_lengths(*results[:4]), *needs)
        check("prompt ids", _check_prompt_ids, "prompt length", "policy")
        check("policy's tokenizer", _check_policy_tokenizer, "policy", "tokenizer", "prompt ids")
        check("reward head", _load_reward_models, "keys", "reward checkpoint")
        needs = ("keys", "reward checkpoint", "reward head", "tokenizer")
        check("reward model's tokenizer", lambda *results: _check_reward_tokenizer(context, *results), *needs)
        check("reward reads the end", _check_reads_eos, "reward model's tokenizer", "tokenizer", "prompt ids")
        # The first update, without its optimizer steps.
        needs = ("keys", "reward functions", "prompts", "batch", "policy", "tokenizer", "prompt ids", "reward head")
        check("trainer", _build_trainer, *needs, "reward model's tokenizer", "value model")
        check("critic", _check_critic, "trainer")
        check("end tokens", _sample_rollout, "trainer")
        check("KL at the start", _check_kl, "trainer", "end tokens")
        check("ratio", _check_ratio, "trainer", "end tokens")
        check("rewards", lambda *results: _check_rewards(*results[:2]), "trainer", "end tokens", "answers")
        check("rewards add up", _check_reward_sums, "trainer", "end tokens", "rewards")
    return examination.findings


# Before anything is trained


def _check_keys(context: RunContext, publishes: bool) -> tuple[StageSettings, str]:
    settings = {stage: context.settings(stage) for stage in context.recipe.stages}
    for stage_settings in settings.values():
        check_installed(stage_settings)
    if publishes:
        for stage in settings:
            check_planned_base(context, stage)
    return settings.get("ppo") or context.settings("ppo"), f"{', '.join(settings)}: all keys and their types are valid"


def _check_columns(context: RunContext) -> tuple[None, str]:
    # `_check_prompts` checks the columns of PPO's data.
    stages = {stage: settings for stage, settings in stages_to_train(context).items() if stage != "ppo"}
    reason_by_stage = check_forms(context.shared, stages, context.hub)
    if reason_by_stage:
        names, reason = ", ".join(reason_by_stage), next(iter(reason_by_stage.values()))
        raise SkipCheck(f"the columns of {names} cannot be checked ({reason})")
    if "reward" in stages and stages["reward"].data.simulated_pairs is None:
        check_pairs(context, None)
    exclusion = "" if context.shared.corpus is None else ", except for what the corpus prepares"
    return None, f"{' and '.join(stages) or 'none'} still to train: every split and its columns exist{exclusion}"


def _check_epochs(settings: StageSettings) -> tuple[None, str]:
    epochs = settings.trainer.num_ppo_epochs
    warn_if_many_epochs(epochs)
    return None, f"{epochs} over each rollout, at most {MAX_USUAL_EPOCHS}"


def _check_functions(settings: StageSettings) -> tuple[list[Any], str]:
    functions = load_reward_functions(settings)
    names = settings.data.reward_funcs or []
    if models := reward_names(settings.data.reward_model_path):
        ensemble = f"{settings.trainer.reward_ensemble} of {len(models)} reward models"
        names = [ensemble if len(models) > 1 else "the reward model", *names]
    weights = settings.trainer.reward_weights or [1.0] * len(names)
    return functions, ", ".join(f"{weight:g} × {name}" for weight, name in zip(weights, names, strict=True))


def _check_prompts(context: RunContext) -> tuple[dict[str, Any], str]:
    data = load_data(context, stage_source(context, "ppo"))
    train, held_out, ptx_texts = (data[name] for name in ("train_dataset", "eval_dataset", "ptx_dataset"))
    descriptions = [f"{describe_prompt_count(train)} for rollouts"]
    descriptions += [] if held_out is None else [f"{describe_prompt_count(held_out)} to monitor training"]
    descriptions += [] if ptx_texts is None else [f"{len(ptx_texts)} texts for ptx_coef"]
    return data, f"{', '.join(descriptions)}; columns {', '.join(train.column_names)}"


def _check_answers(settings: StageSettings, functions: list[Any], data: dict[str, Any]) -> tuple[None, str]:
    detail = check_answers(settings, functions, data)
    try_functions(settings, functions, data)
    return None, detail


def _check_models(context: RunContext) -> tuple[dict[str, NamedModel], str]:
    models = starting_models(context)
    descriptions = (
        f"{role} {model.name}" + (f", {model.context_length} tokens" if model.context_length else "")
        for role, model in models.items()
    )
    return models, "; ".join(descriptions) or "all are trained by this run"


def _check_room(context: RunContext, models: dict[str, NamedModel], data: dict[str, Any]) -> str:
    return check_prompt_lengths(context, models, data["train_dataset"]["prompt"])


def _check_evaluation_prompts(context: RunContext) -> tuple[None, str]:
    config = context.shared.evaluation
    source = stage_source(context, "ppo")
    prompts = evaluation_prompts(context, source)
    check_rules(context, source, prompts)
    return None, f"{describe_prompt_count(prompts)} held-out prompts, {config.samples} completions per row"


def _check_judges(context: RunContext, data_context: RunContext) -> tuple[None, str]:
    check_same_labels(context)
    check_judges(data_context)
    return None, ", ".join(evaluation_settings(context).judge_names)


# The models that PPO starts from


def _find_parent(context: RunContext, settings: StageSettings, role: str) -> tuple[ParentCheckpoint | None, str]:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    name = parent_names(settings).get(role)
    if name is None:
        defaults = {"reward": "only reward functions", "value": "the critic starts from the reward model or the policy"}
        return None, f"none: {defaults[role]}"
    if is_ensemble_member(name) and not is_member_trained(context, name):
        raise SkipCheck(f"train {name} with `rlhf-zoo ensemble` first")
    try:
        checkpoint = find_parent(context, name)
    except ZooError as error:
        is_missing = isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError))
        if name in context.recipe.stages and is_missing:
            raise SkipCheck(f"train the {name} stage first") from error
        raise
    lineage = checkpoint.lineage
    origin = "@".join(str(lineage[key]) for key in ("repo", "commit") if lineage.get(key)) or checkpoint.path
    if name in context.recipe.stages and lineage["path"] is None:
        origin = f"{origin}, published earlier, because {context.directory} has none; a run there trains its own"
    return checkpoint, str(origin)


def _find_reward_parents(context: RunContext, settings: StageSettings) -> tuple[list[ParentCheckpoint], str]:
    roles = list(reward_roles(settings.data.reward_model_path)) or ["reward"]
    parents = [_find_parent(context, settings, role) for role in roles]
    checkpoints = [checkpoint for checkpoint, _ in parents if checkpoint is not None]
    return checkpoints, "; ".join(detail for _, detail in parents)


def _load_policy(settings: StageSettings, checkpoint: ParentCheckpoint) -> tuple[PreTrainedModel, str]:
    model = move_to_best_device(
        load_causal(checkpoint.path, options=stage_load_options(settings)), use_cpu=settings.trainer.use_cpu
    ).eval()
    model.name_or_path = str(checkpoint.path)  # otherwise a merged adapter would have the name of its base
    size = sum(parameter.numel() for parameter in model.parameters())
    return model, f"{type(model).__name__}, {size:,} weights"


def _load_tokenizer(
    context: RunContext, data: dict[str, Any], checkpoint: ParentCheckpoint, policy: PreTrainedModel
) -> tuple[PreTrainedTokenizerBase, str]:
    tokenizer = load_policy_tokenizer(context, checkpoint.path, data)
    check_tokenizer(tokenizer, policy)
    eos, pad = f"{tokenizer.eos_token} = {tokenizer.eos_token_id}", f"{tokenizer.pad_token} = {tokenizer.pad_token_id}"
    highest_id, row_count = max(tokenizer.get_vocab().values()), count_embedding_rows(policy)
    return tokenizer, f"EOS {eos}, PAD {pad}; the highest id is {highest_id}, of {row_count} embedding rows"


def _check_prompt_lengths(
    settings: StageSettings, data: dict[str, Any], policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], str]:
    context_length, response_length = context_length_of(policy), settings.trainer.response_length
    data, _ = drop_too_long_prompts(settings, tokenizer, data)
    prompts: list[list[int]] = []
    for name in ("train_dataset", "eval_dataset"):
        if data[name] is not None:
            rows = prepare_prompts(data[name], tokenizer, context_length=context_length, max_new_tokens=response_length)
            prompts += list(rows[PROMPT_TOKENS])
    longest = max(map(len, prompts))
    total = f"{longest + response_length}" + (f" of {context_length}" if context_length else "")
    return prompts, f"the longest has {longest} tokens; with a response of {response_length}: {total}"


def _check_prompt_ids(prompts: list[list[int]], policy: PreTrainedModel) -> tuple[list[list[int]], str]:
    check_ids(prompts, TokenConsumer.of(policy))
    return prompts, f"the highest is {max(map(max, prompts))}, of {count_embedding_rows(policy)} embedding rows"


def _check_policy_tokenizer(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> tuple[None, str]:
    """Compares the tokenizer's files, and checks how well the policy predicts the prompts' tokens."""
    check_saved_tokenizer(policy, tokenizer, subject="the policy")
    texts = [torch.tensor(ids) for ids in prompts[:TOKENIZER_PROMPTS] if len(ids) > 1]
    if not texts:
        return None, "its files match; the prompts are single tokens, so nothing else can be measured"
    uniform_loss = math.log(count_embedding_rows(policy))
    loss = _prompt_loss(policy, texts)
    detail = (
        f"the policy's loss on the prompts is {loss:.2f} nats per token, that of a uniform guess {uniform_loss:.2f}"
    )
    if not loss <= uniform_loss + MAX_EXCESS_NATS:
        raise ZooError(
            f"The policy was probably trained with another tokenizer, because {detail}: tokenizers may be swapped; "
            "use the policy's own."
        )
    if loss > uniform_loss:
        warn(f"The policy may be untrained, or trained with another tokenizer: {detail}.")
    return None, detail


@torch.no_grad()
def _prompt_loss(policy: PreTrainedModel, texts: Sequence[Tensor]) -> float:
    """Returns −log π of the next token, averaged over all tokens of the texts, in nats."""
    ids = pad_sequence(list(texts), batch_first=True).to(policy.device)
    attention = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).bool().to(policy.device)

    def nats(rows: Sequence[int]) -> Tensor:
        batch = slice(rows[0], rows[-1] + 1)
        return -text_logprobs(policy, ids[batch], attention[batch])

    losses = torch.cat(list(MicroBatches(TOKENIZER_PROMPTS).run(nats, range(len(texts)))))
    return float(F.masked_mean(losses, attention[:, 1:]))


def _load_reward_models(settings: StageSettings, parents: list[ParentCheckpoint]) -> tuple[list[PreTrainedModel], str]:
    models = [
        move_to_best_device(load_reward_checkpoint(settings, parent.path), use_cpu=settings.trainer.use_cpu)
        for parent in parents
    ]
    return models, "trained: it is among the saved weights" if models else "no reward model"


def _check_reward_tokenizer(
    context: RunContext,
    settings: StageSettings,
    parents: list[ParentCheckpoint],
    models: list[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[RewardModel], str]:
    args, reward_models, details, names = settings.trainer, [], [], parent_names(settings)
    options: dict[str, Any] = {
        "label": args.reward_label, "output": args.reward_output, "pad_token": args.reward_pad_token,
        "center": args.score_centering == "stored", "scale": args.score_scaling == "stored",
        "batch_size": args.local_rollout_forward_batch_size,
    }  # fmt: skip
    for checkpoint, model, role in zip(parents, models, REWARD_ROLES, strict=False):
        own_tokenizer = load_tokenizer(checkpoint.path)
        check_saved_tokenizer(model, own_tokenizer, subject="the reward model")
        reward_model = RewardModel(model, own_tokenizer, tokenizer, **options)
        if not reward_model.shares_ids and {names["sft"], names[role]} <= context.recipe.stages.keys():
            raise ZooError(
                f"The tokenizer in {checkpoint.path} differs from the SFT policy's, with which the recipe's reward "
                "model is trained: tokenizers may be swapped, or sft was trained again; use each model's own "
                "tokenizer, or train reward again."
            )
        comparison = "the policy's: it reads ids"
        if not reward_model.shares_ids:
            comparison = "different from the policy's: it reads texts"
        scale = f"μ {reward_model.mean:.3g} and σ {reward_model.std:.3g}"
        reward_models.append(reward_model)
        details.append(f"{comparison}; scores are (s − μ)/σ with {scale}")
    return reward_models, ". ".join(details) or "no reward model"


def _check_reads_eos(
    reward_models: list[RewardModel], tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> tuple[None, str]:
    texts, details = tokenizer.batch_decode(prompts[:TRIAL_PROMPTS], skip_special_tokens=True), []
    for reward_model in reward_models:
        if reward_model.tokenizer.eos_token_id is None:
            details.append("its tokenizer has no end-of-sequence token")
            continue
        if reward_model.always_appends_eos:
            details.append("it reads an end-of-sequence token after every text")
            continue
        with_eos, without_eos = (reward_model.score_texts(texts, ended=[ended] * len(texts)) for ended in (True, False))
        if not (with_eos - without_eos).abs().max() > 0:
            raise ZooError(
                f"The reward model {reward_model.name} gives {len(texts)} texts the same score with and without an "
                f"end-of-sequence token (the first has {float(with_eos[0]):.4g}), so it does not read the last token: "
                "check the model's pooling and head."
            )
        change = float((with_eos - without_eos).abs().mean())
        details.append(f"without the end-of-sequence token a score changes by {change:.3g} on average")
    return None, "; ".join(details) or "no reward model"


# The first update, without its optimizer steps


def _build_trainer(
    settings: StageSettings,
    functions: list[Any],
    data: dict[str, Any],
    _batch: None,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    _ids: list[list[int]],
    models: list[PreTrainedModel],
    reward_models: list[RewardModel],
    value: ParentCheckpoint | None,
) -> tuple[PPOTrainer, str]:
    trainer = build_trainer(
        settings,
        functions,
        model=policy,
        processing_class=tokenizer,
        reward_model=models or None,
        reward_processing_class=[reward_model.tokenizer for reward_model in reward_models] or None,
        value_model=None if value is None else value.path,
        **drop_too_long_prompts(settings, tokenizer, data)[0],
    )
    return trainer, f"{trainer.args.max_steps} updates" if trainer.args.max_steps > 0 else "it can be built"


def _trial_prompts(trainer: PPOTrainer) -> list[dict]:
    prompts: Any = trainer.train_dataset
    return [prompts[row] for row in range(min(TRIAL_PROMPTS, len(prompts)))]


def _check_critic(trainer: PPOTrainer) -> tuple[None, str]:
    prompts = [row[PROMPT_TOKENS] for row in _trial_prompts(trainer)]
    samples = samples_from_user(prompts, [[trainer.processing_class.eos_token_id]] * len(prompts), trainer)
    with torch.no_grad():
        values = trainer.actor.values(samples)
    check_values(values, samples.mask)
    class_name = type(trainer.value_model).__name__
    return None, f"{class_name}, V(prompt) {float(values.mean()):.3g} on average over {len(prompts)} prompts"


def _sample_rollout(trainer: PPOTrainer) -> tuple[tuple[list[dict], Rollout], str]:
    """Samples the first completions of the run."""
    rows = [{**row, GENERATION_INDEX: 0} for row in _trial_prompts(trainer)]
    rollout = trainer.rollout(rows, stream=TRAIN_STREAM)
    ended_count = int(rollout.samples.ended.sum())
    return (rows, rollout), f"{ended_count} of {len(rows)} completions ended, each with its end token in the mask"


def _check_kl(trainer: PPOTrainer, trial: tuple[list[dict], Rollout]) -> tuple[None, str]:
    if trainer.reference is None:
        return None, "not measured, because there is no reference"
    rollout = trial[1]
    kl = trainer.mean(rollout.kl)
    check_start_kl(rollout.logprobs, rollout.ref_logprobs, rollout.mask, precision=trainer.precision)
    return None, f"{kl:.3g} nats per completion from the reference at the start of the run"


@torch.no_grad()
def _check_ratio(trainer: PPOTrainer, trial: tuple[list[dict], Rollout]) -> tuple[None, str]:
    samples = trial[1].samples
    trainer.actor.train()
    with trainer.compute_loss_context_manager():
        log_ratio = trainer.actor(samples, trainer.args.temperature).logprobs - samples.logprobs
    trainer.actor.eval()
    mismatch = float(F.masked_mean(log_ratio.abs(), samples.mask))
    check_ratio(mismatch, precision=trainer.precision)
    return None, f"|log ρ| is {mismatch:.3g} per token before any step"


def _check_rewards(trainer: PPOTrainer, trial: tuple[list[dict], Rollout]) -> tuple[RewardScores, str]:
    rows, rollout = trial
    reward_scores = trainer.score(rollout, rows)
    scores = reward_scores.total
    warn_if_scores_identical(scores, subject="trial rollout")
    return reward_scores, f"{len(rows)} finite scores from {scores.min():.3g} to {scores.max():.3g}"


def _check_reward_sums(
    trainer: PPOTrainer, trial: tuple[list[dict], Rollout], reward_scores: RewardScores
) -> tuple[None, str]:
    _, rollout = trial
    advantages: Advantages = trainer.compute_advantages(rollout, reward_scores)
    args = trainer.args
    if args.whiten_rewards:
        return None, "not checked: whitened rewards do not sum to score − β·ΣKL"
    if args.kl_in == "reward":
        beta, estimator = trainer.controller.kl_coef, args.kl_estimator
    else:
        beta, estimator = 0.0, "k1"  # β = 0 cancels the KL, whatever its estimator
    kl = F.kl_penalty(rollout.logprobs, rollout.ref_logprobs, estimator=estimator).masked_fill(~rollout.mask, 0)
    kl = F.sum_per_action(kl, rollout.mask, level=args.action_level)
    check_rewards(advantages.rewards, advantages.shaped_scores, kl, advantages.mask, kl_coef=beta)
    difference = (advantages.rewards.sum(1) - (advantages.shaped_scores - beta * kl.sum(1))).abs().max()
    return None, f"Σr = score − β·ΣKL within {float(difference):.1g}, β = {beta:g}"
