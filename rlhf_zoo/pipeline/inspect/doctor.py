"""`rlhf-zoo doctor`: the guards of PPO that need no training, one by one, on what a run would start from.

Nothing of the run directory is written and nothing is published: data that is not prepared yet goes into a scratch
folder. A check whose stage is not trained yet is skipped, and the others run.
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
from ...modeling.devices import MicroBatches, on_device
from ...modeling.loading import load_tokenizer
from ...modeling.logprobs import text_logprobs
from ...modeling.models import context_of, load_causal
from ...modeling.prompt_keys import describe_prompt_count
from ...modeling.prompts import prepare_prompts
from ...modeling.reserved_columns import GENERATION, PROMPT_TOKENS
from ...ppo.assembly import MANY_EPOCHS
from ...ppo.base import TRAIN_STREAM
from ...ppo.custom_loop import given_samples
from ...ppo.guards import (
    TokenConsumer,
    check_ids,
    check_ratio,
    check_rewards,
    check_start,
    check_tokenizer_of,
    check_tokens,
    check_values,
    embedding_rows,
    warn_if_scores_identical,
    warn_of,
)
from ...ppo.rollout import Advantages, Rollout
from ...ppo.trainer import PPOTrainer
from ...publishing.adapters import check_plan
from ...rewards import RewardModel, Scored
from ...runs.checks.models import Named, check_prompt_lengths, start_of
from ...runs.checks.splits import check_forms
from ...runs.context import RunContext
from ...runs.dataset import stage_source, to_train
from ...runs.judge import check_same_labels, evaluation_of
from ...runs.models import ParentCheckpoint
from ...runs.parents import is_trained, parent, parent_names, reward_names, reward_roles
from ...runs.registry import REWARD_ROLES, is_member
from ...runs.settings.loading import check_installed, loading_of
from ...runs.settings.parse import StageSettings
from ..stages.evaluate import check_judges, check_prompts, check_rules
from ..stages.ppo import (
    build_trainer,
    check_answers,
    check_batch,
    load_data,
    policy_tokenizer,
    reward_functions,
    reward_model,
    try_functions,
    within_length,
)
from ..stages.reward import check_pairs
from ..stages.train import quiet
from .examination import Examination, Finding, NotYet

# Completions of the trial rollout, and prompts that are read.
TRIAL = 8
READ = 64
# A policy that reads its own tokens beats a uniform guess; random weights come within about half a nat of it, while
# one that was trained on other tokens is sure of the wrong ones. Nats a token.
WORSE_THAN_A_GUESS = 1.0


def examine(context: RunContext, *, publishes: bool = True) -> list[Finding]:
    """Every check of the recipe's PPO stage, in order. publishes: whether a run of it would publish."""
    quiet()
    found = Examination()
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-doctor-") as scratch:
        apart = replace(context, directory=Path(scratch), publish=False)
        prepared = context.record("data").read().get("status") == "finished" and not context.restart
        data_from = replace(context, publish=False) if prepared else apart
        check = found.check
        # Before anything is trained.
        check("keys", lambda: _keys(apart, publishes))
        check("columns", lambda settings: _columns(data_from), "keys")
        check("epochs", _epochs, "keys")
        check("reward functions", _functions, "keys")
        check("prompts", lambda settings: _prompts(settings, data_from), "keys")
        check("answers", _answers, "keys", "reward functions", "prompts")
        check("batch", lambda *found: (None, check_batch(*found)), "keys", "prompts")
        check("models", lambda *found: _named(context), "keys")
        check("room", lambda *found: _room(data_from, *found), "models", "prompts", "batch")
        check("evaluation's prompts", lambda *found: _evaluated(data_from), "keys", "prompts")
        check("judges", lambda *found: _judges(context, data_from), "keys", "reward functions")
        # What PPO starts from.
        check("sft checkpoint", lambda settings, _: _start(context, settings, "sft"), "keys", "models")
        check("reward checkpoint", lambda settings, _: _paid_by(context, settings), "keys", "models")
        check("value model", lambda settings, _: _start(context, settings, "value"), "keys", "models")
        check("policy", _policy, "keys", "sft checkpoint")
        check("tokenizer", lambda *found: _tokenizer(context, *found), "prompts", "sft checkpoint", "policy")
        check("prompt length", lambda *found: _lengths(*found[:4]), "keys", "prompts", "policy", "tokenizer", "room")
        check("prompt ids", _ids, "prompt length", "policy")
        check("policy's tokenizer", _policy_tokenizer, "policy", "tokenizer", "prompt ids")
        check("reward head", _reward_head, "keys", "reward checkpoint")
        models = ("keys", "reward checkpoint", "reward head", "tokenizer")
        check("reward model's tokenizer", lambda *found: _reward_tokenizer(context, *found), *models)
        check("reward reads the end", _reads_the_end, "reward model's tokenizer", "tokenizer", "prompt ids")
        # The first update, without its steps.
        parts = ("keys", "reward functions", "prompts", "batch", "policy", "tokenizer", "prompt ids", "reward head")
        check("trainer", _trainer, *parts, "reward model's tokenizer", "value model")
        check("critic", _critic, "trainer")
        check("end tokens", _rollout, "trainer")
        check("KL at the start", _kl, "trainer", "end tokens")
        check("ratio", _ratio, "trainer", "end tokens")
        check("rewards", lambda *found: _rewards(*found[:2]), "trainer", "end tokens", "answers")
        check("rewards add up", _sum, "trainer", "end tokens", "rewards")
    return found.findings


# Before anything is trained


def _keys(context: RunContext, publishes: bool) -> tuple[StageSettings, str]:
    settings = {stage: context.settings(stage) for stage in context.recipe.stages}
    for each in settings.values():
        check_installed(each)
    for stage in settings if publishes else ():
        check_plan(context, stage)
    return settings.get("ppo") or context.settings("ppo"), f"{', '.join(settings)}: every key is known and of its type"


def _columns(context: RunContext) -> tuple[None, str]:
    stages = {stage: each for stage, each in to_train(context).items() if stage != "ppo"}  # whose are read next
    unseen = check_forms(context.shared, stages, context.hub)
    if unseen:
        raise NotYet(f"{', '.join(unseen)} cannot be looked at ({next(iter(unseen.values()))})")
    if "reward" in stages and stages["reward"].data.simulated_pairs is None:
        check_pairs(context, None)
    but = "" if context.shared.corpus is None else ", but for what the corpus is to prepare"
    return None, f"{' and '.join(stages) or 'none'} still to train: every split is there, with its columns{but}"


def _epochs(settings: StageSettings) -> tuple[None, str]:
    epochs = settings.trainer.num_ppo_epochs
    if epochs > MANY_EPOCHS:
        warn_of(
            f"num_ppo_epochs is {epochs}: beyond {MANY_EPOCHS} the rollout is far from the policy, and the clip stops "
            "most of it; watch policy/clipfrac, or set early_stop_kl."
        )
    return None, f"{epochs} over each rollout, at most {MANY_EPOCHS}"


def _functions(settings: StageSettings) -> tuple[list[Any], str]:
    functions = reward_functions(settings)
    names = settings.data.reward_funcs or []
    if models := reward_names(settings.data.reward_model_path):
        how = f"{settings.trainer.reward_ensemble} of {len(models)} reward models"
        names = [how if len(models) > 1 else "the reward model", *names]
    weights = settings.trainer.reward_weights or [1.0] * len(names)
    return functions, ", ".join(f"{w:g} × {name}" for w, name in zip(weights, names, strict=True))


def _prompts(settings: StageSettings, context: RunContext) -> tuple[dict[str, Any], str]:
    data = load_data(context, stage_source(context, "ppo"))
    train, held_out, texts = (data[name] for name in ("train_dataset", "eval_dataset", "ptx_dataset"))
    parts = [f"{describe_prompt_count(train)} to roll out"]
    parts += [] if held_out is None else [f"{describe_prompt_count(held_out)} held out"]
    parts += [] if texts is None else [f"{len(texts)} texts for ptx_coef"]
    return data, f"{', '.join(parts)}; columns {', '.join(train.column_names)}"


def _answers(settings: StageSettings, functions: list[Any], data: dict[str, Any]) -> tuple[None, str]:
    said = check_answers(settings, functions, data)
    try_functions(settings, functions, data)
    return None, said


def _named(context: RunContext) -> tuple[dict[str, Named], str]:
    models = start_of(context)
    listed = (f"{role} {one.name}" + (f", {one.context} tokens" if one.context else "") for role, one in models.items())
    return models, "; ".join(listed) or "none comes from elsewhere"


def _room(context: RunContext, models: dict[str, Named], data: dict[str, Any], _batch: None) -> tuple[None, str]:
    return None, check_prompt_lengths(context, models, data["train_dataset"]["prompt"])


def _evaluated(context: RunContext) -> tuple[None, str]:
    config = context.shared.evaluation
    source = stage_source(context, "ppo")
    prompts = check_prompts(context, source)
    check_rules(context, source, prompts)
    return None, f"{describe_prompt_count(prompts)} held-out prompts, {config.samples} completions a row"


def _judges(context: RunContext, data_from: RunContext) -> tuple[None, str]:
    check_same_labels(context)
    check_judges(data_from)
    return None, ", ".join(evaluation_of(context).names)


# What PPO starts from


def _start(context: RunContext, settings: StageSettings, role: str) -> tuple[ParentCheckpoint | None, str]:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    name = parent_names(settings).get(role)
    if name is None:
        none = {"reward": "reward functions alone", "value": "the critic begins from the reward model or the policy"}
        return None, f"none: {none[role]}"
    if is_member(name) and not is_trained(context, name):
        raise NotYet(f"train {name} with `rlhf-zoo ensemble` first")
    try:
        found = parent(context, name)
    except ZooError as error:
        missing = isinstance(error.__cause__, (RepositoryNotFoundError, RevisionNotFoundError))
        if name in context.recipe.stages and missing:
            raise NotYet(f"train the {name} stage first") from error
        raise
    at = "@".join(str(found.lineage[key]) for key in ("repo", "commit") if found.lineage.get(key)) or found.path
    if name in context.recipe.stages and found.lineage["path"] is None:
        return found, f"{at}, published before, as {context.directory} holds none; a run there trains its own"
    return found, str(at)


def _paid_by(context: RunContext, settings: StageSettings) -> tuple[list[ParentCheckpoint], str]:
    roles = list(reward_roles(settings.data.reward_model_path)) or ["reward"]
    found = [_start(context, settings, role) for role in roles]
    return [one for one, _ in found if one is not None], "; ".join(said for _, said in found)


def _policy(settings: StageSettings, checkpoint: ParentCheckpoint) -> tuple[PreTrainedModel, str]:
    model = on_device(load_causal(checkpoint.path, how=loading_of(settings)), use_cpu=settings.trainer.use_cpu).eval()
    model.name_or_path = str(checkpoint.path)  # also where an adapter was merged, which a run saves
    size = sum(parameter.numel() for parameter in model.parameters())
    return model, f"{type(model).__name__}, {size:,} weights"


def _tokenizer(
    context: RunContext, data: dict[str, Any], checkpoint: ParentCheckpoint, policy: PreTrainedModel
) -> tuple[PreTrainedTokenizerBase, str]:
    tokenizer = policy_tokenizer(context, checkpoint.path, data)
    check_tokens(tokenizer, policy)
    ends = f"EOS {tokenizer.eos_token} = {tokenizer.eos_token_id}, PAD {tokenizer.pad_token} = {tokenizer.pad_token_id}"
    return tokenizer, f"{ends}; ids to {max(tokenizer.get_vocab().values())}, {embedding_rows(policy)} embedding rows"


def _lengths(
    settings: StageSettings, data: dict[str, Any], policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], str]:
    context, room = context_of(policy), settings.trainer.response_length
    data, _ = within_length(settings, tokenizer, data)
    prompts: list[list[int]] = []
    for name in ("train_dataset", "eval_dataset"):
        if data[name] is not None:
            prepared = prepare_prompts(data[name], tokenizer, context=context, room=room)
            prompts += list(prepared[PROMPT_TOKENS])
    longest = max(map(len, prompts))
    total = f"{longest + room}" + (f" of {context}" if context else "")
    return prompts, f"the longest has {longest} tokens, with {room} to answer {total}"


def _ids(prompts: list[list[int]], policy: PreTrainedModel) -> tuple[list[list[int]], str]:
    rows = embedding_rows(policy)
    check_ids(prompts, TokenConsumer.of(policy))
    return prompts, f"the highest is {max(map(max, prompts))}, of {rows} embedding rows"


def _policy_tokenizer(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> tuple[None, str]:
    """By its files where they say so, and by whether the policy foretells the prompts' tokens at all."""
    check_tokenizer_of(policy, tokenizer, of="the policy")
    texts = [torch.tensor(ids) for ids in prompts[:READ] if len(ids) > 1]
    if not texts:
        return None, "its files fit; the prompts are single tokens, so nothing else can be told"
    guess = math.log(embedding_rows(policy))
    surprise = _surprise(policy, texts)
    said = f"the prompts' tokens cost the policy {surprise:.2f} nats each, and a blind guess {guess:.2f}"
    if not surprise <= guess + WORSE_THAN_A_GUESS:
        raise ZooError(
            f"The tokenizer is not the one that the policy was trained with, for {said}: tokenizers may be swapped; "
            "give the policy its own."
        )
    if surprise > guess:
        warn_of(f"The policy may be untrained, or trained with another tokenizer: {said}.")
    return None, said


@torch.no_grad()
def _surprise(policy: PreTrainedModel, texts: Sequence[Tensor]) -> float:
    """−log π of each next token, averaged over the texts' tokens, in nats."""
    ids = pad_sequence(list(texts), batch_first=True).to(policy.device)
    attention = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).bool().to(policy.device)

    def nats(rows: Sequence[int]) -> Tensor:
        some = slice(rows[0], rows[-1] + 1)
        return -text_logprobs(policy, ids[some], attention[some])

    return float(F.masked_mean(torch.cat(list(MicroBatches(READ).run(nats, range(len(texts))))), attention[:, 1:]))


def _reward_head(settings: StageSettings, paid_by: list[ParentCheckpoint]) -> tuple[list[PreTrainedModel], str]:
    models = [on_device(reward_model(settings, one.path), use_cpu=settings.trainer.use_cpu) for one in paid_by]
    return models, "trained: it stands among the saved weights" if models else "no reward model"


def _reward_tokenizer(
    context: RunContext,
    settings: StageSettings,
    paid_by: list[ParentCheckpoint],
    models: list[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[RewardModel], str]:
    args, rewards, said, names = settings.trainer, [], [], parent_names(settings)
    read: dict[str, Any] = {"label": args.reward_label, "output": args.reward_output}
    read["pad_token"] = args.reward_pad_token
    read |= {"center": args.score_centering == "stored", "scale": args.score_scaling == "stored"}
    for checkpoint, model, role in zip(paid_by, models, REWARD_ROLES, strict=False):
        its = load_tokenizer(checkpoint.path)
        check_tokenizer_of(model, its, of="the reward model")
        reward = RewardModel(model, its, tokenizer, batch_size=args.local_rollout_forward_batch_size, **read)
        if not reward.shares_ids and {names["sft"], names[role]} <= context.recipe.stages.keys():
            raise ZooError(
                f"The tokenizer in {checkpoint.path} is not the SFT policy's, which the recipe's reward model is "
                "trained with: tokenizers may be swapped, or sft was trained again; give each model its own, or train "
                "reward again."
            )
        same = "the policy's: ids are passed" if reward.shares_ids else "another than the policy's: texts are passed"
        rewards.append(reward)
        said.append(f"{same}; scores are (s − μ)/σ with μ {reward.mean:.3g} and σ {reward.std:.3g}")
    return rewards, ". ".join(said) or "no reward model"


def _reads_the_end(
    rewards: list[RewardModel], tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> tuple[None, str]:
    texts, said = tokenizer.batch_decode(prompts[:TRIAL], skip_special_tokens=True), []
    for reward in rewards:
        if reward.tokenizer.eos_token_id is None:
            said.append("its tokenizer has no end-of-sequence token to leave out")
            continue
        if reward.always_ends:
            said.append("it reads an end-of-sequence token behind every text, so none can be left out")
            continue
        whole, cut = (reward.score_texts(texts, ended=[ended] * len(texts)) for ended in (True, False))
        if not (whole - cut).abs().max() > 0:
            raise ZooError(
                f"The reward model {reward.name} scores {len(texts)} texts alike with and without an end-of-sequence "
                f"token ({float(whole[0]):.4g} the first): it does not read the last token, so look at how it pools "
                "and at its head."
            )
        said.append(f"without the end-of-sequence token a score moves by {float((whole - cut).abs().mean()):.3g}")
    return None, "; ".join(said) or "no reward model"


# The first update, without its steps


def _trainer(
    settings: StageSettings,
    functions: list[Any],
    data: dict[str, Any],
    _batch: None,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    _ids: list[list[int]],
    rewards: list[PreTrainedModel],
    scorers: list[RewardModel],
    value: ParentCheckpoint | None,
) -> tuple[PPOTrainer, str]:
    trainer = build_trainer(
        settings,
        functions,
        model=policy,
        processing_class=tokenizer,
        reward_model=rewards or None,
        reward_processing_class=[one.tokenizer for one in scorers] or None,
        value_model=None if value is None else value.path,
        **within_length(settings, tokenizer, data)[0],
    )
    return trainer, f"{trainer.args.max_steps} updates" if trainer.args.max_steps > 0 else "it can be made"


def _first(trainer: PPOTrainer) -> list[dict]:
    prompts: Any = trainer.train_dataset
    return [prompts[row] for row in range(min(TRIAL, len(prompts)))]


def _critic(trainer: PPOTrainer) -> tuple[None, str]:
    prompts = [row[PROMPT_TOKENS] for row in _first(trainer)]
    samples = given_samples(prompts, [[trainer.processing_class.eos_token_id]] * len(prompts), trainer)
    with torch.no_grad():
        values = trainer.actor.values(samples)
    check_values(values, samples.mask)
    kind = type(trainer.value_model).__name__
    return None, f"{kind}, V(prompt) {float(values.mean()):.3g} on average of {len(prompts)}"


def _rollout(trainer: PPOTrainer) -> tuple[tuple[list[dict], Rollout], str]:
    """The first completions that the run would sample."""
    rows = [{**row, GENERATION: 0} for row in _first(trainer)]
    rollout = trainer.rollout(rows, stream=TRAIN_STREAM)
    ended = int(rollout.samples.ended.sum())
    return (rows, rollout), f"{ended} of {len(rows)} completions ended, each with its end token in the mask"


def _kl(trainer: PPOTrainer, trial: tuple[list[dict], Rollout]) -> tuple[None, str]:
    if trainer.reference is None:
        return None, "not measured, as no reference is held"
    rollout = trial[1]
    kl = trainer.mean(rollout.kl)
    check_start(rollout.logprobs, rollout.ref_logprobs, rollout.mask, precision=trainer.precision)
    return None, f"{kl:.3g} nats a completion from the reference, where the run begins"


@torch.no_grad()
def _ratio(trainer: PPOTrainer, trial: tuple[list[dict], Rollout]) -> tuple[None, str]:
    samples = trial[1].samples
    trainer.actor.train()
    with trainer.compute_loss_context_manager():
        log_ratio = trainer.actor(samples, trainer.args.temperature).logprobs - samples.logprobs
    trainer.actor.eval()
    mismatch = float(F.masked_mean(log_ratio.abs(), samples.mask))
    check_ratio(mismatch, precision=trainer.precision)
    return None, f"|log ρ| is {mismatch:.3g} a token before any step"


def _rewards(trainer: PPOTrainer, trial: tuple[list[dict], Rollout]) -> tuple[Scored, str]:
    rows, rollout = trial
    scored = trainer.score(rollout, rows)
    warn_if_scores_identical(scored.total, of="trial rollout")
    return scored, f"{len(rows)} finite scores from {scored.total.min():.3g} to {scored.total.max():.3g}"


def _sum(trainer: PPOTrainer, trial: tuple[list[dict], Rollout], scored: Scored) -> tuple[None, str]:
    _, rollout = trial
    estimates: Advantages = trainer.estimate(rollout, scored)
    args = trainer.args
    if args.whiten_rewards:
        return None, "Σr = score − β·ΣKL, before rewards are whitened"
    beta = trainer.controller.kl_coef if args.kl_in == "reward" else 0.0
    kl = F.kl_penalty(
        rollout.logprobs, rollout.ref_logprobs, estimator=args.kl_estimator if args.kl_in == "reward" else "k1"
    ).masked_fill(~rollout.mask, 0)
    kl = F.actions(kl, rollout.mask, level=args.action_level)
    check_rewards(estimates.rewards, estimates.scores, kl, estimates.mask, kl_coef=beta)
    apart = (estimates.rewards.sum(1) - (estimates.scores - beta * kl.sum(1))).abs().max()
    return None, f"Σr = score − β·ΣKL within {float(apart):.1g}, β = {beta:g}"
