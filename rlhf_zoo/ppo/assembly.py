"""Assembles the parts of a PPOTrainer (policy, reference, rewards, critic, texts) and checks them before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError, first_line
from ..modeling.critic import add_adapter
from ..modeling.generation_config import make_savable
from ..modeling.gguf import check_plain_weights
from ..modeling.loading import AS_SAVED, IN_FLOAT32, load_tokenizer
from ..modeling.models import context_length_of, disable_dropout, is_peft, load_causal, load_classifier
from ..modeling.packed_attention import enable_packing
from ..modeling.prompts import prepare_prompts, warn_about_reserved_columns
from ..modeling.reserved_columns import PROMPT_TOKENS
from ..modeling.sampling.sampler import Vocabulary, check_accepts_cache, check_cache_capacity
from ..modeling.value_head import ValueHead
from ..modeling.value_head_models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from ..rewards import RewardEnsemble, RewardModel, Rewards
from ..rewards.ensemble import check_ensemble
from .config import PPOConfig
from .critics import build_critic, statistics_options
from .guards import check_step_size, warn
from .key_checks import has_reference
from .ptx import TextSource
from .reference import Reference
from .token_checks import (
    TokenConsumer,
    check_decoding,
    check_ids,
    check_reward_head,
    check_saved_tokenizer,
    check_tokenizer,
    count_embedding_rows,
    find_smallest_consumer,
)

if TYPE_CHECKING:
    from datasets import Dataset

#: The largest number of epochs over a rollout that causes no warning.
MAX_USUAL_EPOCHS = 4


@dataclass(frozen=True)
class Parts:
    """The parts of a PPOTrainer.

    Attributes:
        policy: The policy to train.
        critic: The critic to train.
        reference: The reference for KL; None without one.
        rewards: The rewards; None if a custom training loop scores the completions.
        text_source: The texts for the PTX loss; None without that loss.
        starts_at_reference: Whether the policy should start exactly at the reference: the user chose no other one.
        context_length: The number of tokens that all models can read; None for no limit.
        vocabulary: The tokens that the policy can sample.
        smallest_consumer: The model with the fewest embedding rows among those that read the policy's ids.
    """

    policy: PreTrainedModel
    critic: PreTrainedModel | ValueHead
    reference: Reference | None
    rewards: Rewards | None
    text_source: TextSource | None
    starts_at_reference: bool
    context_length: int | None
    vocabulary: Vocabulary
    smallest_consumer: TokenConsumer


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
    needs_own_pad: bool = True,
) -> Parts:
    """Builds the models of a PPOTrainer and checks that they fit together.

    Args:
        args: The settings.
        tokenizer: The policy's tokenizer.
        model: The policy: a causal model, with or without a value head, its path or its Hub id.
        ref_model: The reference as a model, a path or a Hub id; None for the policy as it starts, if args need one.
        reward_model: One reward model or several.
        value_model: The critic as a model, a path or a Hub id; None for the critic that args.critic names.
        peft_config: The configuration of a new adapter for the policy; None to add none.
        reward_funcs: One reward function or several.
        reward_processing_class: The tokenizers of reward models that are not passed as paths or Hub ids; None for the
            policy's.
        ptx_dataset: Texts for the PTX loss; None without that loss.
        needs_own_pad: Whether PAD must differ from EOS.

    Raises:
        ZooError: The parts cannot be trained together.
    """
    _check_settings(args, tokenizer)
    policy, head = _prepare_policy(model, args)
    make_savable(policy, name="The policy")
    check_tokenizer(tokenizer, policy, needs_own_pad=needs_own_pad)
    check_saved_tokenizer(policy, tokenizer, subject="the policy")
    if peft_config is not None:
        policy = _add_policy_adapter(policy, peft_config, args)
    # With dropout the ratio ρ would differ from 1 before the first optimizer step.
    disable_dropout(policy)
    reference, starts_at_reference = _prepare_reference(policy, ref_model, args)
    rewards = build_rewards(reward_model, reward_funcs, args, tokenizer, reward_processing_class or tokenizer)
    critic, critic_adapter = _prepare_critic(head, value_model, rewards, policy, peft_config, args)
    vocabulary = Vocabulary.of(tokenizer, policy)
    reward_models = rewards.models if rewards is not None else ()
    # Every model that reads the policy's ids needs an embedding for each id.
    models = {
        "the policy": policy,
        "the critic": None if isinstance(critic, ValueHead) else critic,
        "ref_model": reference.separate_model if reference is not None else None,
        **{f"the reward model {reward.name}": reward.model for reward in reward_models if reward.shares_ids},
    }
    smallest_consumer = find_smallest_consumer(vocabulary, models)
    # Check before training, because a model with broken caching would silently sample from another distribution.
    check_decoding(policy, vocabulary)
    # The shortest context limits all models, because all read the same tokens.
    context_length = context_length_of(*models.values())
    if critic_adapter is not None:
        critic = add_adapter(critic, critic_adapter)
    if args.padding_free:
        for name in ("the policy", "the critic", "ref_model"):
            if models[name] is not None:
                enable_packing(models[name], subject=name)
    _check_stop_token(args, vocabulary)
    text_source = _prepare_texts(ptx_dataset, policy, tokenizer, context_length, args)
    critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    for name, module, rate in (("the policy", policy, args.learning_rate), ("the critic", critic, critic_rate)):
        check_step_size(module, rate, subject=name)
    return Parts(
        policy, critic, reference, rewards, text_source, starts_at_reference, context_length, vocabulary,
        smallest_consumer,
    )  # fmt: skip


def _check_stop_token(args: PPOConfig, vocabulary: Vocabulary) -> None:
    if args.stop_token_id is not None and args.stop_token_id not in vocabulary:
        raise ZooError(
            f"stop_token_id is {args.stop_token_id}, which the policy never samples: choose one of the tokenizer's "
            f"ids up to {vocabulary.size - 1}."
        )


def _prepare_reference(policy: PreTrainedModel, ref_model: Any, args: PPOConfig) -> tuple[Reference | None, bool]:
    """Returns the reference (None without one), and whether the policy should start exactly at it."""
    if isinstance(ref_model, str):
        ref_model = load_causal(ref_model, options=AS_SAVED if args.bf16 else IN_FLOAT32)
    if isinstance(ref_model, AutoModelForCausalLMWithValueHead):
        ref_model = ref_model.pretrained_model
    if args.reference is False and ref_model is not None:
        raise ZooError("reference is false and ref_model is passed too: remove ref_model.")
    reference = None
    if has_reference(args, has_ref_model=ref_model is not None):
        reference = Reference(
            policy, ref_model, adapter=args.ref_adapter_name, in_8bit=args.ref_load_in_8bit, in_bf16=bool(args.bf16)
        )
    # A reference in lower precision differs a little. The user's own model or adapter may differ in any way.
    is_rounded = args.ref_load_in_8bit or (
        reference is not None
        and reference.separate_model is not None
        and reference.separate_model.dtype != policy.dtype
    )
    return reference, ref_model is None and args.ref_adapter_name is None and not is_rounded


def _prepare_critic(
    head: ValueHead | None, value_model: Any, rewards: Rewards | None, policy: Any, peft_config: Any, args: PPOConfig
) -> tuple[Any, Any]:
    """Returns the critic, and the configuration of the adapter that it still needs; None if it needs none."""
    if head is not None and value_model is not None:
        raise ZooError("The model has a value head and value_model is passed too: remove one of them.")
    if head is not None and args.critic not in ("auto", "shared"):
        raise ZooError(f"The model has a value head, but critic is {args.critic!r}: set critic to 'shared'.")
    if head is not None:
        return head, None
    config = peft_config or (policy.peft_config[policy.active_adapter] if is_peft(policy) else None)
    uses_adapter = config is not None and args.critic_lora
    # With an adapter, only the adapter and the critic's head are trained, so a reward model can share the trunk.
    share_weights = uses_adapter and getattr(config, "bias", "none") == "none"
    critic = build_critic(value_model, rewards, policy, args, share_weights=share_weights)
    needs_adapter = uses_adapter and not isinstance(critic, ValueHead) and not is_peft(critic)
    return critic, config if needs_adapter else None


def _prepare_texts(
    dataset: Dataset | None,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int | None,
    args: PPOConfig,
) -> TextSource | None:
    """Returns the texts for the PTX loss; None without that loss."""
    if not args.ptx_coef > 0:
        return None
    if dataset is None:
        raise ZooError(f"ptx_coef is {args.ptx_coef}, but there are no texts for it: pass ptx_dataset.")
    return TextSource(
        dataset,
        tokenizer,
        context_length=context_length,
        pad_id=tokenizer.eos_token_id,
        num_embeddings=count_embedding_rows(policy),
    )


def warn_if_many_epochs(epochs: int) -> None:
    """Warns if there are more epochs over a rollout than PPO usually benefits from.

    Args:
        epochs: `num_ppo_epochs`.
    """
    if epochs > MAX_USUAL_EPOCHS:
        warn(
            f"num_ppo_epochs is {epochs}. After {MAX_USUAL_EPOCHS} epochs the policy is far from the one that sampled "
            "the rollout, and clipping stops most of the update: watch policy/clipfrac, or set early_stop_kl."
        )


def _check_settings(args: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if not isinstance(args, PPOConfig):
        raise ZooError(f"args is a {type(args).__name__}: pass a PPOConfig.")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ZooError(f"processing_class is a {type(tokenizer).__name__}: pass the policy's tokenizer.")
    if args.load_best_model_at_end:
        raise ZooError("load_best_model_at_end does not work with PPO: pull the best checkpoint by its tag instead.")
    accelerator_config: Any = args.accelerator_config
    if args.world_size > 1 and not accelerator_config.even_batches and not args.dataloader_drop_last:
        raise ZooError(
            "accelerator_config has even_batches False, so some processes may get one batch fewer, and the others "
            "would wait forever: leave it True, or set dataloader_drop_last."
        )
    if args.merge_adapter and args.push_to_hub and args.hub_strategy != "end" and args.save_strategy != "no":
        raise ZooError(
            "merge_adapter pushes a merged model at the end, next to the adapters that checkpoints pushed before: set "
            "hub_strategy to 'end'."
        )
    warn_if_many_epochs(args.num_ppo_epochs)
    if args.kl_in == "reward" and args.kl_estimator == "k3":
        warn(
            "kl_estimator 'k3' in the reward follows ∇KL(π‖ref) − ∇KL(ref‖π), not the gradient of a KL. This estimator "
            "exists for parity with TRL: use k1."
        )


def _prepare_policy(model: Any, args: PPOConfig) -> tuple[Any, ValueHead | None]:
    """Returns the policy, and its value head if `model` has one."""
    head = None
    if isinstance(model, AutoModelForCausalLMWithValueHead | AutoModelForSeq2SeqLMWithValueHead):
        model, head = model.pretrained_model, model.v_head
    if isinstance(model, str):
        model = load_causal(model)
    if not hasattr(model, "config") or model.get_output_embeddings() is None:
        raise ZooError(f"The model is a {type(model).__name__}: pass a causal language model, its path or its Hub id.")
    check_plain_weights(model.get_base_model() if is_peft(model) else model)
    if model.config.is_encoder_decoder:
        raise ZooError(
            f"PPO supports only decoder-only models, but {type(model).__name__} has an encoder: choose another."
        )
    if args.model_adapter_name is not None:
        if not is_peft(model) or args.model_adapter_name not in model.peft_config:
            raise ZooError(
                f"model_adapter_name is {args.model_adapter_name!r}, but the model has no such adapter: load it, or "
                "remove the key."
            )
        model.set_adapter(args.model_adapter_name)
    if is_peft(model) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ZooError("No weight of the PeftModel requires a gradient: load its adapter with is_trainable=True.")
    return model, head


def _add_policy_adapter(policy: PreTrainedModel, peft_config: Any, args: PPOConfig) -> Any:
    from peft import get_peft_model, prepare_model_for_kbit_training

    if is_peft(policy):
        raise ZooError(
            "The model is a PeftModel, and peft_config is passed too: remove peft_config to train the model's adapter, "
            "or merge that adapter and save the model first."
        )
    if not policy.name_or_path and not args.merge_adapter:
        warn(
            "The policy under the adapter was merged or made in memory, so its adapter names no base and cannot be "
            "loaded by itself: set merge_adapter, or save the model first and pass its path."
        )
    check_accepts_cache(policy)
    if getattr(policy, "is_quantized", False):
        policy = prepare_model_for_kbit_training(policy, use_gradient_checkpointing=args.gradient_checkpointing)
    try:
        return get_peft_model(policy, peft_config)
    except ValueError as error:
        raise ZooError(
            f"The adapter does not fit the policy, a {type(policy).__name__} ({first_line(error).split('. ')[0]}): "
            "choose other target modules."
        ) from error


def build_rewards(
    reward_model: Any, reward_funcs: Any, args: PPOConfig, tokenizer: PreTrainedTokenizerBase, reward_tokenizer: Any
) -> Rewards | None:
    """Builds the weighted list of rewards: the reward model first (several as one ensemble), then the functions.

    Args:
        reward_model: One reward model or several, as models, paths or Hub ids; None for none.
        reward_funcs: One reward function or several; None for none.
        args: The settings.
        tokenizer: The policy's tokenizer.
        reward_tokenizer: The reward models' tokenizers, one for all or one for each. A path or Hub id is loaded with
            its own tokenizer instead.

    Returns:
        The rewards; None if there is no reward model and reward_funcs is None.

    Raises:
        ZooError: The numbers of tokenizers and models differ, a setting needs a reward model and there is none, or
            reward_funcs is [] and there is no reward model.
    """
    models = _as_list(reward_model)
    check_ensemble(models, args.reward_ensemble)
    for key in ("reward_pad_token", "reward_label"):
        if getattr(args, key) is not None and not models:
            raise ZooError(f"{key} is {getattr(args, key)!r}, but there is no reward_model: remove it.")
    tokenizer_list = _as_list(reward_tokenizer) or [tokenizer]
    tokenizers = tokenizer_list * len(models) if len(tokenizer_list) == 1 else tokenizer_list
    if len(tokenizers) != len(models):
        raise ZooError(
            f"There are {len(models)} reward models and {len(tokenizers)} tokenizers in reward_processing_class: pass "
            "one for all of them, or one for each."
        )
    common_options: dict[str, Any] = {
        "batch_size": args.local_rollout_forward_batch_size,
        "max_tokens": args.max_tokens_per_pass,
        **statistics_options(args),
    }

    def as_reward(reward: Any, own_tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
        if isinstance(reward, str):
            model = load_classifier(reward, label=options.get("label"), options=AS_SAVED)
            return RewardModel(model, load_tokenizer(reward), tokenizer, **common_options, **options)
        if isinstance(reward, PreTrainedModel):
            check_saved_tokenizer(reward, own_tokenizer, subject="the reward model")
            check_reward_head(reward)
            return RewardModel(reward, own_tokenizer, tokenizer, **common_options, **options)
        return reward

    # These settings apply to reward_model. For a model in reward_funcs, pass a RewardModel with its own settings.
    score_options = {"label": args.reward_label, "output": args.reward_output, "pad_token": args.reward_pad_token}
    rewards = [
        as_reward(reward, own_tokenizer, **score_options)
        for reward, own_tokenizer in zip(models, tokenizers, strict=True)
    ]
    if len(rewards) > 1:
        rewards = [RewardEnsemble(rewards, how=args.reward_ensemble, penalty=args.reward_ensemble_lambda)]
    rewards += [as_reward(reward, tokenizer_list[0]) for reward in _as_list(reward_funcs)]
    if not rewards and reward_funcs is None:
        return None
    return Rewards(rewards, weights=args.reward_weights, tokenizer=tokenizer, timeout=args.reward_timeout)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def prepare_prompt_data(
    prompts: Any,
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int | None,
    smallest_consumer: TokenConsumer,
    *,
    for_training: bool = False,
) -> Any:
    """Tokenizes and checks one or more data sets of prompts.

    Args:
        prompts: A data set, a mapping from names to data sets, or None.
        args: The settings.
        tokenizer: The policy's tokenizer.
        context_length: The number of tokens that all models can read; None for no limit.
        smallest_consumer: The model with the fewest embedding rows.
        for_training: Whether these are training prompts. If so, they must be enough for an update.

    Returns:
        The same prompts with token ids; None if `prompts` is None.

    Raises:
        ZooError: A prompt cannot be used, or there are too few prompts.
    """
    if prompts is None:
        return None
    if isinstance(prompts, dict):
        if for_training:
            raise ZooError("train_dataset is a mapping of data sets: pass one of its splits, such as data['train'].")
        return {
            name: prepare_prompt_data(dataset, args, tokenizer, context_length, smallest_consumer)
            for name, dataset in prompts.items()
        }
    from datasets import Dataset

    if not isinstance(prompts, Dataset):
        raise ZooError(
            f"The prompts are a {type(prompts).__name__}: pass a datasets.Dataset, which has a length and an order."
        )
    prepared_prompts = prepare_prompts(
        prompts,
        tokenizer,
        context_length=context_length,
        max_new_tokens=args.response_length,
        num_proc=args.dataset_num_proc,
    )
    if for_training:
        warn_about_reserved_columns(prompts)
    check_ids(prepared_prompts[PROMPT_TOKENS], smallest_consumer)
    check_cache_capacity(map(len, prepared_prompts[PROMPT_TOKENS]), args.response_length, args.max_rollout_batch_tokens)
    if for_training and len(prepared_prompts) < args.prompts_per_update:
        raise ZooError(
            f"The prompt data set has {len(prepared_prompts)} rows, but an update needs {args.prompts_per_update}: use "
            "more prompts or a smaller batch."
        )
    return prepared_prompts
