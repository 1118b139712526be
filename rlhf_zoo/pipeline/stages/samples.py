"""Samples the SFT policy for the reward stage: to center scores, and to make pairs that a function labels."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import read_json, write_json
from ...modeling import distributed
from ...modeling.chat import append_completion, plain_text, tokenize_prompt, wrap_answer
from ...modeling.chat_template import Prompt
from ...modeling.devices import move_to_best_device
from ...modeling.loading import load_tokenizer
from ...modeling.models import context_length_of, load_causal
from ...modeling.sampling.truncation import Truncation
from ...plugins import PREFERENCES, load_object
from ...runs.context import RunContext
from ...runs.corpus_data import add_preferences
from ...runs.data.generate import complete
from ...runs.data.layout import convert_rows
from ...runs.data.sources import NoSuchPart
from ...runs.dataset import DataSource, stage_rows, stage_source, training_and_held_out_rows
from ...runs.models import ParentCheckpoint
from ...runs.pairs import sampler_arguments
from ...runs.settings.parse import RewardArguments, StageSettings
from .merged import merged_model
from .pairs import training_pairs

#: Random streams, which keep the samples for different purposes apart under one seed.
SCORE_STREAM, TRAIN_STREAM, TEST_STREAM = 2, 3, 4
#: (first text, second text, random numbers) -> 0 or 1, the preferred text.
Preference = Callable[[str, str, random.Random], int]
#: (prompts, first completions, second completions, columns) -> for each pair 0 or 1, the preferred completion; None for
#: a tie.
Labeler = Callable[[Sequence[Prompt], Sequence[str], Sequence[str], Mapping[str, Sequence[Any]]], list[int | None]]


def prompts_of(context: RunContext, source: DataSource, split: str) -> list[Prompt]:
    """Returns the prompts for samples of the SFT policy: PPO's training or validation prompts.

    Without a ppo stage, they come from the data set's configuration `prompts` or, if it has none, from the training
    pairs. In a later round, whose data set has only pairs, they come from PPO's own data.

    Args:
        context: The run.
        source: The data set of the pairs.
        split: "train" or "validation".

    Returns:
        Texts or conversations.
    """
    if "ppo" not in context.recipe.stages:
        return _prompts_of_data(context, source, split)
    data_keys = context.settings("ppo").data
    if data_keys.dataset_name is not None or context.round is not None:
        source = stage_source(context, "ppo")
    if data_keys.held_out_share is not None:
        train, held_out, _ = training_and_held_out_rows(context, "ppo", source)
        return list((train if split == "train" or held_out is None else held_out)["prompt"])
    return list(stage_rows(context, "ppo", source, split)["prompt"])


def _prompts_of_data(context: RunContext, source: DataSource, split: str) -> list[Prompt]:
    """Returns the prompts of a recipe without PPO: the configuration `prompts`, otherwise those of training pairs.

    Raises NoSuchPart if there is no such configuration and the pairs are still to be simulated.
    """
    if not Path(source.location).is_file():  # a file has no configurations
        try:
            rows = source.load("prompts", split, columns=["prompt"])
        except NoSuchPart:
            if context.settings("reward").data.simulated_pairs is not None:
                raise  # there are no pairs yet
        else:
            title = f"The data set {source.location}, configuration prompts, split {split},"
            is_chat = context.shared.conversational
            return list(convert_rows(rows, "prompts", columns={}, as_chat=is_chat, subject=title)["prompt"])
    return list(training_pairs(context, source)[0]["prompt"])


@dataclass(frozen=True)
class SFTSamples:
    """Samples of the SFT model.

    Attributes:
        prompts: N prompts.
        texts: N texts, each a prompt with its completion.
        ended: N booleans: whether the completion ended by itself.
    """

    prompts: list[Prompt]
    texts: list[Prompt]
    ended: list[bool]


def sft_samples(context: RunContext, settings: StageSettings, source: DataSource, sft: ParentCheckpoint) -> SFTSamples:
    """Draws `score_samples` completions for training prompts, with PPO's sampling settings and the stage's seed.

    Args:
        context: The run.
        settings: The settings of the reward stage.
        source: The data set of the pairs.
        sft: The SFT policy.

    Raises:
        ZooError: Every prompt is empty or too long.
    """
    prompts = prompts_of(context, source, "train")
    tokenizer = context.shared.chat.write_for_prompts(load_tokenizer(sft.path), prompts)
    policy = load_causal(merged_model(context, sft))
    model, options = move_to_best_device(policy, use_cpu=settings.trainer.use_cpu), sampler_arguments(context)
    max_tokens = (context_length_of(model) or math.inf) - options["max_new_tokens"]
    fix = "lower PPO's response_length"
    limit = context.settings("ppo").data.max_prompt_length if "ppo" in context.recipe.stages else None
    if limit is not None and limit < max_tokens:
        max_tokens, fix = limit, "raise PPO's max_prompt_length"
    prompts = [prompt for prompt in prompts if 0 < len(tokenize_prompt(prompt, tokenizer)) <= max_tokens]
    if not prompts:
        raise ZooError(
            f"No prompt of {source.location} has at most {max_tokens:g} tokens, so there are no SFT samples to center "
            f"scores by: {fix}."
        )
    count = settings.data.score_samples
    repeated_prompts = [prompts[index % len(prompts)] for index in range(count)]
    samples = complete(
        model,
        tokenizer,
        repeated_prompts,
        keys=[(SCORE_STREAM, index) for index in range(count)],
        seed=settings.trainer.seed,
        desc="samples to center scores",
        **options,
    )
    texts = [append_completion(prompt, text) for prompt, text in zip(repeated_prompts, samples.texts, strict=True)]
    return SFTSamples(repeated_prompts, texts, samples.ended)


def pairs_seed(settings: StageSettings) -> int:
    """Returns the seed of simulated pairs.

    Args:
        settings: The settings of the reward stage.
    """
    return settings.trainer.seed if settings.data.pairs_seed is None else settings.data.pairs_seed


def are_simulated(context: RunContext, data_keys: RewardArguments) -> bool:
    """Whether a preference function labeled the held-out pairs. Later rounds use the first round's held-out pairs.

    Args:
        context: The run.
        data_keys: The data settings of the reward stage.
    """
    return data_keys.preference is not None and (data_keys.simulated_pairs is not None or context.round is not None)


def utility_of(context: RunContext, settings: StageSettings) -> Callable[[str], float] | None:
    """Returns the utility behind the preference function that labels simulated pairs.

    Args:
        context: The run.
        settings: The settings of the reward stage.

    Returns:
        The function from text to utility; None if pairs are not simulated or the function has no utility.
    """
    if not are_simulated(context, settings.data):
        return None
    prefer = load_object(settings.data.preference, group=PREFERENCES)
    utility: Callable[[str], float] | None = getattr(prefer, "utility", None)
    return utility


def preference_of(data_keys: RewardArguments) -> Preference:
    """Loads the function that labels simulated pairs.

    Args:
        data_keys: The data settings of the reward stage.

    Raises:
        ZooError: The settings name no preference function, or it cannot be loaded.
    """
    if data_keys.preference is None:
        raise ZooError(
            "simulated_pairs needs `preference`, the function that labels the pairs: set it to module:attribute."
        )
    preference: Preference = load_object(data_keys.preference, group=PREFERENCES)
    return preference


def simulated_pairs(
    context: RunContext, settings: StageSettings, source: DataSource, sft: ParentCheckpoint
) -> DataSource:
    """Makes pairs of SFT samples, labeled by the recipe's preference function, unless the same pairs exist.

    Args:
        context: The run.
        settings: The settings of the reward stage.
        source: The run's data set.
        sft: The SFT policy.

    Returns:
        The data set with the pairs.

    Raises:
        ZooError: The preference cannot be loaded, or no two samples of a prompt can be compared.
    """
    data_keys, seed = settings.data, pairs_seed(settings)
    prefer = preference_of(data_keys)
    folder = context.record("data").path / "preferences"
    inputs = {
        "sft": sft.lineage["fingerprint"],
        "seed": seed,
        "train": data_keys.simulated_pairs,
        "test": data_keys.simulated_test_pairs,
        "preference": data_keys.preference,
        **{
            name: asdict(value) if isinstance(value, Truncation) else value
            for name, value in sampler_arguments(context).items()
        },
    }
    inputs_file = folder / "made.json"
    if distributed.call_on_main_process(lambda: inputs_file.is_file() and read_json(inputs_file) == inputs):
        return source
    rng = random.Random(seed)
    splits = {}
    for split, prompt_split, count, stream in (
        ("train", "train", data_keys.simulated_pairs, TRAIN_STREAM),
        ("test", "validation", data_keys.simulated_test_pairs, TEST_STREAM),
    ):
        prompts = prompts_of(context, source, prompt_split)
        repeated_prompts = [prompts[index % len(prompts)] for index in range(count)]
        samples = sample_pairs(context, repeated_prompts, seed, (stream,), sft)
        splits[split] = _labeled_rows(repeated_prompts, samples, prefer, rng)
    with distributed.main_process_first():
        if distributed.is_main_process():
            inputs_file.unlink(missing_ok=True)  # after a kill, the old file must not describe the new pairs
            source = add_preferences(context, splits)
            write_json(inputs_file, inputs)
    return source


def _labeled_rows(
    prompts: list[Prompt], samples: tuple[list[int], list[str], list[str]], prefer: Preference, rng: random.Random
) -> list[dict[str, Any]]:
    indices, first, second = samples
    pair_prompts = [prompts[index] for index in indices]
    rows = ordered_pairs(pair_prompts, first, second, labeler_of(prefer, rng)(pair_prompts, first, second, {}))
    if not rows:
        raise ZooError(
            f"None of {len(prompts)} simulated pairs can be used, because no two samples of the SFT model differed and "
            "both ended: train the model longer, or raise PPO's response_length."
        )
    return [{**row, "simulated": True} for row in rows]


def labeler_of(prefer: Preference, rng: random.Random) -> Labeler:
    """Turns a preference function into a labeler.

    Args:
        prefer: The preference function.
        rng: The random stream that the function gets.
    """
    return lambda prompts, first, second, _: [
        prefer(plain_text(prompt) + a, plain_text(prompt) + b, rng)
        for prompt, a, b in zip(prompts, first, second, strict=True)
    ]


def ordered_pairs(
    prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str], labels: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Returns rows {prompt, chosen, rejected}, without ties.

    Args:
        prompts: The prompt of each pair.
        first: The first completion of each pair.
        second: The second completion of each pair.
        labels: For each pair the preferred completion, 0 or 1; None for a tie.
    """
    rows = []
    for prompt, *texts, label in zip(prompts, first, second, labels, strict=True):
        if label is not None:
            chosen, rejected = (wrap_answer(prompt, texts[side]) for side in (label, 1 - label))
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def sample_pairs(
    context: RunContext, prompts: Sequence[Prompt], seed: int, stream: tuple[int, ...], policy: ParentCheckpoint
) -> tuple[list[int], list[str], list[str]]:
    """Draws two samples of a policy for each prompt, with PPO's sampling settings.

    Keeps a pair only if its samples differ and both ended by themselves.

    Args:
        context: The run.
        prompts: Texts or conversations.
        seed: The seed of the samples.
        stream: Random stream, which keeps these samples apart from others with the same seed.
        policy: The checkpoint to draw from.

    Returns:
        For the K remaining pairs: the indices of their prompts, the first completions, and the second completions.
    """
    tokenizer = context.shared.chat.write_for_prompts(load_tokenizer(policy.path), list(prompts))
    model = load_causal(merged_model(context, policy))
    model = move_to_best_device(model, use_cpu=context.settings("reward").trainer.use_cpu)
    first, second = (
        complete(
            model,
            tokenizer,
            prompts,
            keys=[(*stream, index, side) for index in range(len(prompts))],
            seed=seed,
            desc=f"pairs to compare, side {side + 1}",
            **sampler_arguments(context),
        )
        for side in (0, 1)
    )
    # RewardTrainer appends an end-of-sequence token to every text, which a truncated text did not have.
    both_ended = [all(pair) for pair in zip(first.ended, second.ended, strict=True)]
    texts_differ = [text != other for text, other in zip(first.texts, second.texts, strict=True)]
    indices = [index for index in range(len(prompts)) if both_ended[index] and texts_differ[index]]
    return indices, [first.texts[index] for index in indices], [second.texts[index] for index in indices]
