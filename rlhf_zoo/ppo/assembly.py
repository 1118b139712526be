"""What a PPOTrainer is assembled from: policy, reference, rewards, critic and texts, checked before any training."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import MODEL_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.generation_config import make_savable
from ..modeling.loading import AS_SAVED, FLOAT32, check_plain_weights, first_line, load_tokenizer
from ..modeling.models import (
    context_of,
    critic_from,
    disable_dropout,
    is_peft,
    load_causal,
    load_classifier,
    with_adapter,
)
from ..modeling.packed_attention import lay_end_to_end
from ..modeling.prompts import prepare_prompts, say_withheld
from ..modeling.reserved_columns import PROMPT_TOKENS
from ..modeling.sampling.sampler import Vocabulary, check_cached, check_fits
from ..modeling.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead, ValueHead
from ..rewards import RewardEnsemble, RewardModel, Rewards
from ..rewards.ensemble import check_ensemble
from .actor_critic import shared_value_head
from .config import PPOConfig, holds_reference
from .guards import (
    TokenConsumer,
    check_decoding,
    check_head_of,
    check_ids,
    check_step_size,
    check_tokenizer_of,
    check_tokens,
    embedding_rows,
    narrowest_of,
    warn_of,
)
from .ptx import TextSource
from .reference import Reference

MANY_EPOCHS = 4


@dataclass(frozen=True)
class Parts:
    """What a PPOTrainer is made of.

    Attributes:
        policy: trains.
        critic: trains.
        reference: None where there is none.
        rewards: None in a loop of one's own.
        texts: for the language-model loss.
        from_reference: whether the policy begins exactly where the reference is.
        context: tokens that all models can read; None for no limit.
        vocabulary: what the policy samples.
        narrowest: which of the models that read its ids has the fewest embedding rows.
    """

    policy: PreTrainedModel
    critic: PreTrainedModel | ValueHead
    reference: Reference | None
    rewards: Rewards | None
    texts: TextSource | None
    from_reference: bool
    context: int | None
    vocabulary: Vocabulary
    narrowest: TokenConsumer


def assemble(
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: Any,
    *,
    ref_model: Any,
    reward_model: Any,
    value_model: Any,
    peft_config: Any,
    reward_funcs: Any,
    reward_processing_class: Any,
    ptx_dataset: Dataset | None,
    pad_apart: bool = True,
) -> Parts:
    """Builds what a PPOTrainer trains and reads, and checks that it fits together.

    Args:
        args: the settings.
        tokenizer: the policy's.
        model: the policy: a causal model, with or without a value head, its path or its Hub id.
        ref_model: the reference as a model, a path or a Hub id; None for the policy as it begins.
        reward_model: one reward model or several.
        value_model: the critic as a model, a path or a Hub id; None for what args.critic names.
        peft_config: of an adapter to train on the policy.
        reward_funcs: one reward function or several.
        reward_processing_class: the reward models' tokenizers; None for the policy's.
        ptx_dataset: texts for the language-model loss.
        pad_apart: whether PAD must differ from EOS.

    Raises:
        ZooError: these cannot train together.
    """
    if not isinstance(args, PPOConfig):
        raise ZooError(f"args is a {type(args).__name__}: give a PPOConfig.")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ZooError(f"processing_class is a {type(tokenizer).__name__}: give the policy's tokenizer.")
    _check_settings(args)
    policy, head = _policy(model, args)
    make_savable(policy, name="The policy")
    check_tokens(tokenizer, policy, pad_apart=pad_apart)
    check_tokenizer_of(policy, tokenizer, of="the policy")
    if peft_config is not None:
        policy = _with_adapter(policy, peft_config, args)
    # With dropout ρ would differ from 1 before the first step.
    disable_dropout(policy)
    reference, from_reference = _reference(policy, ref_model, args)
    rewards = build_rewards(reward_model, reward_funcs, args, tokenizer, reward_processing_class or tokenizer)
    critic, critic_adapter = _critic(head, value_model, rewards, policy, peft_config, args)
    vocabulary = Vocabulary.of(tokenizer, policy)
    scoring = [reward for reward in rewards.models if reward.shares_ids] if rewards is not None else []
    models = {
        "the policy": policy,
        "the critic": None if isinstance(critic, ValueHead) else critic,
        "ref_model": reference.own if reference is not None else None,
        **{f"the reward model {reward.name}": reward.model for reward in scoring},
    }
    narrowest = narrowest_of(vocabulary, models)
    check_decoding(policy, vocabulary)
    context = context_of(*models.values())
    if critic_adapter is not None:
        critic = with_adapter(critic, critic_adapter)
    if args.padding_free:
        for name in ("the policy", "the critic", "ref_model"):
            if models[name] is not None:
                lay_end_to_end(models[name], of=name)
    if args.stop_token_id is not None and args.stop_token_id not in vocabulary:
        raise ZooError(
            f"stop_token_id is {args.stop_token_id}, and the policy samples ids up to {vocabulary.size - 1} that the "
            "tokenizer names, so nothing could end: give one of these."
        )
    texts = _texts(ptx_dataset, policy, tokenizer, context, args)
    critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    for name, part, rate in (("the policy", policy, args.learning_rate), ("the critic", critic, critic_rate)):
        check_step_size(part, rate, of=name)
    return Parts(policy, critic, reference, rewards, texts, from_reference, context, vocabulary, narrowest)


def _reference(policy: PreTrainedModel, ref_model: Any, args: PPOConfig) -> tuple[Reference | None, bool]:
    """The reference, None where the settings want none, and whether the policy begins exactly where it is."""
    if isinstance(ref_model, str):
        ref_model = load_causal(ref_model, how=AS_SAVED if args.bf16 else FLOAT32)
    if isinstance(ref_model, AutoModelForCausalLMWithValueHead):
        ref_model = ref_model.pretrained_model
    if args.reference is False and ref_model is not None:
        raise ZooError("reference is false and ref_model is given too: leave it out.")
    reference = None
    if holds_reference(args, given=ref_model is not None):
        reference = Reference(
            policy, ref_model, adapter=args.ref_adapter_name, in_8bit=args.ref_load_in_8bit, in_bf16=bool(args.bf16)
        )
    # Fewer bits move the reference a little, a model or adapter of one's own may be anywhere.
    rounded = args.ref_load_in_8bit or (
        reference is not None and reference.own is not None and reference.own.dtype != policy.dtype
    )
    return reference, ref_model is None and args.ref_adapter_name is None and not rounded


def _critic(
    head: ValueHead | None,
    value_model: Any,
    rewards: Rewards | None,
    policy: Any,
    peft_config: Any,
    args: PPOConfig,
) -> tuple[Any, Any]:
    """The critic, and the configuration of the adapter that it is still to get, None for none."""
    if head is not None and value_model is not None:
        raise ZooError("The model has a value head and value_model is given too: give one critic.")
    if head is not None and args.critic not in ("auto", "shared"):
        raise ZooError(f"The model has a value head and critic is {args.critic!r}: give 'shared', or the model alone.")
    if head is not None:
        return head, None
    config = peft_config or (policy.peft_config[policy.active_adapter] if is_peft(policy) else None)
    adapts = config is not None and args.critic_lora
    # Then all of the critic but its adapter and its head stays as it is, and a reward model may hold the same weights.
    share = adapts and getattr(config, "bias", "none") == "none"
    critic = build_critic(value_model, rewards, policy, args, share=share)
    return critic, config if adapts and not isinstance(critic, ValueHead) and not is_peft(critic) else None


def _texts(
    dataset: Dataset | None,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    args: PPOConfig,
) -> TextSource | None:
    """The texts of the language-model loss, None where it is off."""
    if not args.ptx_coef > 0:
        return None
    if dataset is None:
        raise ZooError(f"ptx_coef is {args.ptx_coef} and there is no text to model: give ptx_dataset.")
    return TextSource(
        dataset, tokenizer, context=context, pad_id=tokenizer.eos_token_id, embeddings=embedding_rows(policy)
    )


def warn_if_many_epochs(epochs: int) -> None:
    """Warns about more epochs over a rollout than PPO can use.

    Args:
        epochs: `num_ppo_epochs`.
    """
    if epochs > MANY_EPOCHS:
        warn_of(
            f"num_ppo_epochs is {epochs}: beyond {MANY_EPOCHS} the policy is far from the rollout, and clipping stops "
            "most of the update; watch policy/clipfrac, or set early_stop_kl."
        )


def _check_settings(args: PPOConfig) -> None:
    if args.load_best_model_at_end:
        raise ZooError("load_best_model_at_end does not work with PPO: pull the best checkpoint by its tag instead.")
    batches: Any = args.accelerator_config
    if args.world_size > 1 and not batches.even_batches and not args.dataloader_drop_last:
        raise ZooError(
            "accelerator_config has even_batches False, so a pass may have one batch fewer in some processes and the "
            "others would wait for them: leave it True, or set dataloader_drop_last."
        )
    if args.merge_adapter and args.push_to_hub and args.hub_strategy != "end" and args.save_strategy != "no":
        raise ZooError(
            "merge_adapter pushes a merged model at the end, and what the checkpoints push before, the adapter, would "
            "stay beside it: set hub_strategy to 'end'."
        )
    warn_if_many_epochs(args.num_ppo_epochs)
    if args.kl_in == "reward" and args.kl_estimator == "k3":
        warn_of(
            "kl_estimator 'k3' in the reward follows ∇KL(π‖ref) − ∇KL(ref‖π), not the gradient of a KL: it is here for "
            "parity with TRL; k1 is right."
        )


def _policy(model: Any, args: PPOConfig) -> tuple[Any, ValueHead | None]:
    """The policy, and its value head where `model` has one."""
    if isinstance(model, AutoModelForSeq2SeqLMWithValueHead):
        raise ZooError("PPO rolls out decoder-only models: one with an encoder cannot be trained here.")
    head = None
    if isinstance(model, AutoModelForCausalLMWithValueHead):
        model, head = model.pretrained_model, model.v_head
    if isinstance(model, str):
        model = load_causal(model)
    if not hasattr(model, "config") or model.get_output_embeddings() is None:
        raise ZooError(f"The model is a {type(model).__name__}: give a causal language model, its path or its Hub id.")
    check_plain_weights(model.get_base_model() if is_peft(model) else model)
    if model.config.is_encoder_decoder:
        raise ZooError(f"PPO rolls out decoder-only models, and {type(model).__name__} has an encoder: give another.")
    if args.model_adapter_name is not None:
        if not is_peft(model) or args.model_adapter_name not in model.peft_config:
            raise ZooError(f"model_adapter_name is {args.model_adapter_name!r}, and the model has no such adapter.")
        model.set_adapter(args.model_adapter_name)
    if is_peft(model) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ZooError("No weight of the PeftModel trains: load its adapter with is_trainable=True.")
    return model, head


def _with_adapter(policy: Any, peft_config: Any, args: PPOConfig) -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if is_peft(policy):
        raise ZooError(
            "The model is a PeftModel and peft_config is given too: leave it out to train the model's adapter, or "
            "merge that adapter and save the model first."
        )
    if not policy.name_or_path and not args.merge_adapter:
        warn_of(
            "The policy under the adapter was merged or made in memory, so its adapter names no base and nothing can "
            "load it alone: set merge_adapter, or save the model first and give its path."
        )
    check_cached(policy)
    if getattr(policy, "is_quantized", False):
        policy = prepare_model_for_kbit_training(policy, use_gradient_checkpointing=args.gradient_checkpointing)
    try:
        return get_peft_model(policy, peft_config)
    except ValueError as error:
        raise ZooError(
            f"The adapter does not fit the policy, a {type(policy).__name__} ({first_line(error).split('. ')[0]}): "
            "give other target modules."
        ) from error


def build_rewards(
    reward_model: Any,
    reward_funcs: Any,
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: Any,
) -> Rewards | None:
    """Builds one weighted list: the reward model first, or several as one, then the functions.

    Args:
        reward_model: one or several, as models, paths or Hub ids.
        reward_funcs: one or several.
        args: the settings.
        tokenizer: the policy's.
        reward_tokenizer: of the reward models, one for all or one for each.

    Returns:
        The rewards; None where none are given.

    Raises:
        ZooError: tokenizers and models differ in number, or a setting has no reward model that it could be for.
    """
    models = _listed(reward_model)
    check_ensemble(models, args.reward_ensemble)
    if args.reward_pad_token is not None and not models:
        raise ZooError(f"reward_pad_token is {args.reward_pad_token!r}, and there is no reward_model that pads.")
    if args.reward_label is not None and not models:
        raise ZooError(f"reward_label is {args.reward_label!r}, and there is no reward_model whose label it could be.")
    theirs = _listed(reward_tokenizer) or [tokenizer]
    tokenizers = theirs * len(models) if len(theirs) == 1 else theirs
    if len(tokenizers) != len(models):
        raise ZooError(
            f"There are {len(models)} reward models and {len(tokenizers)} reward_processing_class: give one for all of "
            "them, or one for each."
        )
    kwargs: dict[str, Any] = {
        "batch_size": args.local_rollout_forward_batch_size,
        "max_tokens": args.tokens_at_once,
        **_stored_statistics(args),
    }

    def read(reward: Any, its: PreTrainedTokenizerBase, **how: Any) -> Any:
        if isinstance(reward, str):
            model = load_classifier(reward, label=how.get("label"), how=AS_SAVED)
            return RewardModel(model, load_tokenizer(reward), tokenizer, **kwargs, **how)
        if isinstance(reward, PreTrainedModel):
            check_tokenizer_of(reward, its, of="the reward model")
            check_head_of(reward, of="the reward model")
            return RewardModel(reward, its, tokenizer, **kwargs, **how)
        return reward

    # The label is that of reward_model; one among reward_funcs is given as a RewardModel with its own.
    labeled = {"label": args.reward_label, "output": args.reward_output, "pad_token": args.reward_pad_token}
    ready = [read(one, its, **labeled) for one, its in zip(models, tokenizers, strict=True)]
    if len(ready) > 1:
        ready = [RewardEnsemble(ready, how=args.reward_ensemble, penalty=args.reward_ensemble_lambda)]
    ready += [read(one, theirs[0]) for one in _listed(reward_funcs)]
    if not ready and reward_funcs is None:
        return None
    return Rewards(ready, weights=args.reward_weights, tokenizer=tokenizer, timeout=args.reward_timeout)


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _stored_statistics(args: PPOConfig) -> dict[str, bool]:
    """Which of the statistics that a reward model keeps shape its scores."""
    return {"center": args.score_centering == "stored", "scale": args.score_scaling == "stored"}


def build_critic(
    value_model: Any, rewards: Rewards | None, policy: Any, args: PPOConfig, *, share: bool = False
) -> PreTrainedModel | ValueHead:
    """Builds the critic.

    An adapter of the policy is merged into the critic's trunk. On a policy in few bits the critic is a head alone.

    Args:
        value_model: the critic that was given; None for the one that `args.critic` names, which begins as the reward
            model that reads the policy's tokens, or as the policy.
        rewards: may hold a reward model to begin from.
        policy: the policy to begin from otherwise.
        args: the settings.
        share: whether a critic on a reward model holds the same weights, because only its adapter and head will change.

    Raises:
        ZooError: there is no model to begin from, or it cannot be a critic.
    """
    shaped: dict[str, Any] = {**_stored_statistics(args)}
    if value_model is not None:
        if args.critic != "auto":
            raise ZooError(f"critic is {args.critic!r} and value_model is given too: give one of them.")
        if isinstance(value_model, PreTrainedModel) and type(value_model).__name__.endswith("ForTokenClassification"):
            if value_model.config.num_labels != 1:
                raise ZooError(
                    f"value_model has {value_model.config.num_labels} outputs a token, and a critic has one: give a "
                    "model with num_labels=1."
                )
            return value_model
        if is_peft(value_model):
            return value_model
        if not isinstance(value_model, (PreTrainedModel, str, Path)):
            raise ZooError(
                f"value_model has the type {type(value_model).__name__}: give a model, its path or its Hub id."
            )
        return critic_from(value_model, **shaped, weight=_weight_as_reward(value_model, rewards))
    if args.critic == "shared":
        return shared_value_head(policy)
    weighted = rewards.weighted_models if rewards is not None else []
    sharing = [(reward.model, weight) for reward, weight in weighted if _begins_critic(reward)]
    if args.critic == "reward" and not sharing:
        raise ZooError(
            "critic is 'reward', and no reward is a model of one output with the policy's tokenizer: give 'policy'."
        )
    if sharing and args.critic != "policy":
        # A head in float32 reads what a trunk in fewer bits says only where both compute in bf16.
        model, weight = sharing[0]
        fits = args.bf16 or model.dtype == torch.float32
        return critic_from(model, **shaped, weight=weight, share=share and fits)
    if getattr(policy, "is_quantized", False):
        if args.critic == "policy":
            raise ZooError("critic is 'policy', whose weights are in few bits and cannot be copied: give 'shared'.")
        return shared_value_head(policy)
    if not is_peft(policy):
        return critic_from(policy)
    merged = copy.deepcopy(policy).merge_and_unload()
    base = {name.replace(".base_layer", ""): weight for name, weight in policy.get_base_model().state_dict().items()}
    critic = critic_from(merged)
    if not all(name in base and torch.equal(weight, base[name]) for name, weight in merged.state_dict().items()):
        critic.name_or_path = ""  # an adapter of the critic must not name the policy's base as its own
    return critic


def _weight_as_reward(value_model: PreTrainedModel | str | Path, rewards: Rewards | None) -> float:
    """What the score of `value_model` counts in the reward, where it is one of the reward models or of its files."""

    def name(model: Any) -> str:
        return str(getattr(model.config, "_name_or_path", "")) if isinstance(model, PreTrainedModel) else str(model)

    for reward, weight in rewards.weighted_models if rewards is not None else ():
        if reward.model is value_model or (name(value_model) and name(reward.model) == name(value_model)):
            return weight
    return 1.0


def _begins_critic(reward: RewardModel) -> bool:
    """Whether a critic can begin as this reward model: it reads the policy's ids, and has one head on a known trunk."""
    return reward.shares_ids and reward.label is None and type(reward.model.config) in MODEL_MAPPING


def prompts_of(
    data: Any,
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    narrowest: TokenConsumer,
    *,
    training: bool = False,
) -> Any:
    """Tokenizes and checks a data set of prompts, or each of a mapping of such.

    Args:
        data: the data set, a mapping, or None.
        args: the settings.
        tokenizer: the policy's.
        context: tokens that all models can read.
        narrowest: the model with the fewest embedding rows.
        training: whether these are training prompts, of which there must be enough for an update.

    Returns:
        The same with token ids; None of None.

    Raises:
        ZooError: a prompt cannot be used, or there are too few.
    """
    if data is None:
        return None
    if isinstance(data, dict):
        if training:
            raise ZooError("train_dataset is a mapping of data sets: give one split of it, such as data['train'].")
        return {name: prompts_of(each, args, tokenizer, context, narrowest) for name, each in data.items()}
    if not isinstance(data, Dataset):
        raise ZooError(
            f"The prompts are a {type(data).__name__}: give a datasets.Dataset, which has a length and an order."
        )
    prepared = prepare_prompts(
        data, tokenizer, context=context, room=args.response_length, num_proc=args.dataset_num_proc
    )
    if training:
        say_withheld(data)
    check_ids(prepared[PROMPT_TOKENS], narrowest)
    check_fits(map(len, prepared[PROMPT_TOKENS]), args.response_length, args.max_rollout_batch_tokens)
    needed = args.prompts_per_update * args.world_size
    if training and len(prepared) < needed:
        raise ZooError(
            f"The prompt data set has {len(prepared)} rows and an update takes {needed}: give more prompts or a "
            "smaller batch."
        )
    return prepared
