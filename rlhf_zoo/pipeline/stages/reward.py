"""The reward stage: trains a reward model with trl.RewardTrainer, on preference pairs or on labeled SFT samples.

`--dataset_name` may name a data set that has only pairs, such as the votes of a comparison page: see `runs.pairs`.
"""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...errors import ZooError
from ...modeling import distributed
from ...modeling import fsdp as sharding
from ...modeling.chat import append_completion, tokenize_for_reward
from ...modeling.devices import move_to_best_device
from ...modeling.loading import load_model, load_tokenizer
from ...modeling.models import HEADS, is_peft, load_classifier, set_score_statistics
from ...modeling.special_tokens import ensure_own_pad
from ...rewards import RewardModel
from ...runs.checks.conversations import check_conversations
from ...runs.context import Publisher, RunContext
from ...runs.data.hold_out import hold_out
from ...runs.data.layout import drop_long_prompts, has_conversations
from ...runs.dataset import DataSource, stage_rows
from ...runs.models import ParentCheckpoint
from ...runs.settings.loading import stage_load_options
from ...runs.settings.parse import StageSettings
from ...runs.status_line import show_activity
from .merged import merged_model
from .pair_report import count_trained_pairs, held_out_report
from .pairs import held_out_pairs, open_pairs, training_pairs
from .samples import SFTSamples, preference_of, prompts_of, sft_samples, simulated_pairs, utility_of
from .train import silence_libraries, train_stage
from .trainers import make_trainer

log = logging.getLogger(__name__)


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Trains the reward model.

    Args:
        context: The run.
        publisher: Sends each checkpoint as it is saved; None if the run does not publish.

    Returns:
        Whether it trained: False if the stage was already finished.

    Raises:
        ZooError: The SFT policy, the pairs or the settings do not work.
        Stopped: Ctrl-C was pressed, and the finished steps are saved.
    """
    from transformers import set_seed
    from trl import RewardTrainer, get_peft_config

    start_time = time.monotonic()
    context.settings("reward")  # reports mistakes in the settings before data are prepared
    context.check_policy_keys_unchanged()
    silence_libraries()
    context, source = open_pairs(context)
    settings = context.settings("reward")
    sft = context.checkpoint("sft")
    tokenizer = _load_tokenizer(settings, sft)
    if settings.data.simulated_pairs is not None:
        source = simulated_pairs(context, settings, source, sft)
    left_out_counts: dict[str, int] = {}
    inputs: _Inputs  # set by `build`

    def build() -> Trainer:
        nonlocal inputs
        inputs = _load_inputs(context, settings, source, sft, tokenizer, left_out_counts)
        set_seed(settings.trainer.seed)
        return make_trainer(
            RewardTrainer,
            settings,
            model=_load_model(context, settings, sft, tokenizer),
            train_dataset=inputs.train,
            eval_dataset=inputs.validation,
            processing_class=tokenizer,
            peft_config=get_peft_config(replace(settings.model, lora_task_type="SEQ_CLS")),
        )

    def finish_checkpoint(trainer: Trainer, path: Path) -> None:
        """Stores μ and σ of the scores in every checkpoint, because they depend on its weights."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        with sharding.unsharded(model):
            if distributed.is_main_process():
                _write_score_statistics(model, tokenizer, inputs.samples, path)

    def final_fields(trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
        return {"reward_model": _measure_chosen(context, settings, tokenizer, inputs, checkpoint)}

    return train_stage(
        context,
        settings,
        data_lineage=source.lineage,
        parents={"sft": sft} | ({} if context.round is None else {"ppo": context.round.previous_policy}),
        start_time=start_time,
        build=build,
        publisher=publisher,
        finish_checkpoint=finish_checkpoint,
        final_fields=final_fields,
        left_out_counts=left_out_counts,
    )


@dataclass(frozen=True)
class _Inputs:
    """The data of the reward model.

    Attributes:
        train: Token ids of the pairs to train on.
        validation: Token ids of the pairs to evaluate on during training; None without such pairs.
        pairs: The pairs to train on, as texts.
        samples: SFT samples whose mean score becomes 0.
        held_out: The pairs to measure accuracy on, and a name for them; None if no pairs are held out.
    """

    train: Dataset
    validation: Dataset | None
    pairs: Dataset
    samples: SFTSamples
    held_out: tuple[Dataset, str] | None


def _load_tokenizer(settings: StageSettings, sft: ParentCheckpoint) -> PreTrainedTokenizerBase:
    """Loads the SFT policy's tokenizer and makes sure that its PAD token differs from EOS."""
    tokenizer = load_tokenizer(sft.path)
    pad_token = settings.trainer.pad_token
    ensure_own_pad(tokenizer, pad_token, subject=str(sft.path), key="pad_token of the stage reward")
    tokenizer.pad_token = pad_token or tokenizer.pad_token  # as trl does
    return tokenizer


def _load_inputs(
    context: RunContext,
    settings: StageSettings,
    source: DataSource,
    sft: ParentCheckpoint,
    tokenizer: PreTrainedTokenizerBase,
    left_out_counts: dict[str, int],
) -> _Inputs:
    """Loads the pairs and draws the samples. Adds to `left_out_counts` how many rows each key keeps out of training."""
    data_keys, location = settings.data, source.location
    pairs, counts = training_pairs(context, source, keep_questions=True)
    if has_conversations(pairs):
        context.shared.chat.write(tokenizer)
    pairs, dropped_count = drop_long_prompts(pairs, tokenizer, data_keys.max_prompt_length, subject=location)
    left_out_counts.update(counts | ({"max_prompt_length": dropped_count} if dropped_count else {}))
    if not context.preflight_passed and has_conversations(pairs):
        check_conversations(context, "reward", source, tokenizer)
    train = _tokenize_pairs(pairs, tokenizer)
    _check_equal_sides(train, subject=location)
    if long_count := _count_too_long(train, settings.trainer.max_length):
        left_out_counts["max_length"] = long_count
    validation = None
    if data_keys.dataset_validation_split is not None:
        rows = stage_rows(context, "reward", source, data_keys.dataset_validation_split)
        rows = drop_long_prompts(rows, tokenizer, data_keys.max_prompt_length, subject=location)[0]
        validation = _tokenize_pairs(rows, tokenizer)
    samples = sft_samples(context, settings, source, sft)
    return _Inputs(train, validation, pairs, samples, held_out_pairs(context, source))


def _load_model(
    context: RunContext, settings: StageSettings, sft: ParentCheckpoint, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Loads the SFT policy with a new head that has a single output, the score."""
    from transformers import AutoModelForSequenceClassification

    subject, path, options = f"The SFT model {sft.path}", merged_model(context, sft), stage_load_options(settings)
    model = load_model(
        AutoModelForSequenceClassification,
        path,
        subject=subject,
        options=options,
        may_lack=HEADS,
        overrides={"num_labels": 1},
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def _write_score_statistics(model: Any, tokenizer: PreTrainedTokenizerBase, samples: SFTSamples, path: Path) -> None:
    """Writes the mean and standard deviation of the model's scores for the samples into the checkpoint's config."""
    model.config.rlhf_zoo = None  # without statistics, RewardModel returns raw scores
    # RewardModel freezes the model and sets it to evaluation mode, but training continues afterwards.
    was_training, trainable = model.training, [parameter.requires_grad for parameter in model.parameters()]
    with show_activity(f"reward: scoring {len(samples.texts)} samples of the SFT policy"):
        raw_scores = RewardModel(model, tokenizer, tokenizer).score_texts(samples.texts, ended=samples.ended)
    for parameter, requires_grad in zip(model.parameters(), trainable, strict=True):
        parameter.requires_grad_(requires_grad)
    model.train(was_training)
    if not raw_scores.isfinite().all():
        raise ZooError(
            f"The reward model of {path.name} has finite weights, but gives scores that are not finite: lower "
            "learning_rate, or compute in float32 if bf16 is on."
        )
    set_score_statistics(
        model, mean=float(raw_scores.mean()), std=float(raw_scores.std()), measured_on="samples of the SFT model"
    )
    if is_peft(model):  # peft saves an adapter without its model's configuration, which holds the statistics
        model.config.architectures = [type(model.get_base_model()).__name__]
    model.config.save_pretrained(path)


def _measure_chosen(
    context: RunContext, settings: StageSettings, tokenizer: PreTrainedTokenizerBase, inputs: _Inputs, checkpoint: Path
) -> dict[str, Any]:
    """Returns the chosen checkpoint's score statistics and its figures on held-out pairs, as fields of run.json."""
    model = move_to_best_device(load_classifier(checkpoint), use_cpu=settings.trainer.use_cpu)
    report = {key: model.config.rlhf_zoo[key] for key in ("score_mean", "score_std")}
    if inputs.held_out is not None:
        pairs, split = inputs.held_out
        seed, utility = settings.trainer.seed, utility_of(context, settings)
        with show_activity(f"reward: measuring on {len(pairs)} held-out pairs"):
            report |= held_out_report(model, tokenizer, pairs, seed=seed, utility=utility)
        report |= {"split": split, "trained_on": count_trained_pairs(pairs, inputs.pairs)}
    return report


def check_pairs(context: RunContext, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Checks, before SFT trains, everything that the reward stage will read: all pairs, and the prompts for samples.

    Args:
        context: The run.
        tokenizer: The SFT policy's tokenizer; None before it exists, which skips the check of conversations.

    Raises:
        ZooError: A pair lacks a side or cannot be rendered, all pairs have equal sides, no pairs are left to train or
            measure on, there are no prompts, or simulated pairs have no function that labels them.
    """
    context, source = open_pairs(context)
    data_keys = context.settings("reward").data
    has_own_prompts = "ppo" not in context.recipe.stages  # otherwise the ppo stage checks the prompts
    if data_keys.simulated_pairs is not None:
        preference_of(data_keys)
        if has_own_prompts:
            for split in ("train", "validation"):
                prompts_of(context, source, split)
        return
    pairs = stage_rows(context, "reward", source, data_keys.dataset_train_split)
    for split in (data_keys.dataset_test_split, data_keys.dataset_validation_split):
        if split is not None:
            stage_rows(context, "reward", source, split)
    if data_keys.held_out_share is not None:
        hold_out(pairs, data_keys.held_out_share)
    if all(chosen == rejected for chosen, rejected in zip(pairs["chosen"], pairs["rejected"], strict=True)):
        raise _no_preference_error(source.location)
    if tokenizer is not None and has_conversations(pairs):
        check_conversations(context, "reward", source, tokenizer)
    if has_own_prompts:
        prompts_of(context, source, "train")


def _tokenize_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Tokenizes pairs in the same way as for scoring."""
    ids = {
        f"{side}_ids": [
            tokenize_for_reward(append_completion(prompt, text), tokenizer, ended=True)
            for prompt, text in zip(pairs["prompt"], pairs[side], strict=True)
        ]
        for side in ("chosen", "rejected")
    }
    return Dataset.from_dict({**ids, **({"margin": pairs["margin"]} if "margin" in pairs.column_names else {})})


def _check_equal_sides(pairs: Dataset, *, subject: str) -> None:
    """Warns about pairs whose sides have the same tokens. Raises ZooError if all pairs have such sides."""
    equal_count = sum(
        chosen_ids == rejected_ids
        for chosen_ids, rejected_ids in zip(pairs["chosen_ids"], pairs["rejected_ids"], strict=True)
    )
    if equal_count == len(pairs):
        raise _no_preference_error(subject)
    if equal_count:
        log.warning("%d of %d pairs of %s have equal sides, which teach nothing.", equal_count, len(pairs), subject)


def _no_preference_error(subject: str) -> ZooError:
    return ZooError(f"All pairs of {subject} have equal sides, so there is no preference to learn: use other pairs.")


def _count_too_long(pairs: Dataset, limit: int | None) -> int:
    """Counts the pairs that trl will leave out because they are too long, and warns about them."""
    if limit is None:
        return 0
    sides = zip(pairs["chosen_ids"], pairs["rejected_ids"], strict=True)
    long_count = sum(max(map(len, pair)) > limit for pair in sides)
    if long_count:
        log.warning(
            "%d of %d pairs have more than max_length, %d, tokens and are left out.", long_count, len(pairs), limit
        )
    return long_count
