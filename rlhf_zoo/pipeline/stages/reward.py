"""The reward model, on trl.RewardTrainer: from preference pairs, or from SFT samples that a function compares.

`--dataset_name` may name pairs alone, such as the votes of a comparison page: see `pairs`.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from ...errors import ZooError
from ...fileio import read_json, write_json
from ...modeling import distributed
from ...modeling import fsdp as sharding
from ...modeling.chat import append_completion, plain_text, tokenize_for_reward, tokenize_prompt, wrap_completion
from ...modeling.devices import on_device
from ...modeling.loading import load_model, load_tokenizer
from ...modeling.models import HEADS, context_of, is_peft, load_causal, load_classifier, set_score_statistics
from ...modeling.sampling.truncation import Truncation
from ...modeling.special_tokens import pad_apart
from ...plugins import PREFERENCES, load_object
from ...ppo.step_guard import finite_steps
from ...rewards import RewardModel
from ...runs.checks.conversations import check_conversations
from ...runs.context import Publisher, RunContext
from ...runs.data.generate import complete
from ...runs.data.layout import conversational, fitting, hold_out, in_form
from ...runs.data.overlap import unmarked
from ...runs.data.sources import NoSuchPart
from ...runs.dataset import DataSource, add_configuration, learned_rows, parts, stage_rows, stage_source
from ...runs.models import ParentCheckpoint
from ...runs.pairs import named_pairs, on_pairs, sampling
from ...runs.settings.loading import loading_of
from ...runs.settings.parse import StageSettings
from ...runs.status_line import doing
from .merged import whole_model
from .pair_report import held_out_report, pairs_seen
from .train import make_trainer, quiet, train_stage

log = logging.getLogger(__name__)

Preference = Callable[[str, str, random.Random], int]


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    """Trains the reward model. Returns False when it was trained already."""
    from transformers import AutoModelForSequenceClassification, set_seed
    from trl import RewardTrainer, get_peft_config

    started = time.monotonic()
    context.settings("reward")  # a mistake in them is told before data are made
    context.check_shared()
    quiet()
    context, source = open_pairs(context)
    settings = context.settings("reward")
    data = settings.data
    sft = context.checkpoint("sft")
    parents = {"sft": sft} | ({} if context.round is None else {"ppo": context.round.before})
    tokenizer = load_tokenizer(sft.path)
    asked = settings.trainer.pad_token
    pad_apart(tokenizer, asked, of=str(sft.path), key="pad_token of the stage reward")
    tokenizer.pad_token = asked or tokenizer.pad_token  # as trl will
    if data.simulated_pairs is not None:
        source = _simulated(context, settings, source, sft)
    scored: list[SFTSamples] = []
    learned: list[Dataset] = []
    measured: list[tuple[Dataset, str] | None] = []
    left_out: dict[str, int] = {}

    def build() -> Any:
        train, spared = training_pairs(context, source, marked=True)
        if conversational(train):
            context.shared.chat.write(tokenizer)
        train, cut = fitting(train, tokenizer, data.max_prompt_length, of=source.location)
        left_out.update(spared | ({"max_prompt_length": cut} if cut else {}))
        if not context.checked and conversational(train):
            check_conversations(context, "reward", source, tokenizer)
        learned.append(train)
        train = _as_read(train, tokenizer)
        _look_for_equal(train, of=source.location)
        if (long := _longer(train, settings.trainer.max_length)) > 0:
            left_out["max_length"] = long
        held_out = None
        if data.dataset_validation_split is not None:
            held_out = stage_rows(context, "reward", source, data.dataset_validation_split)
            held_out = _as_read(fitting(held_out, tokenizer, data.max_prompt_length, of=source.location)[0], tokenizer)
        scored.append(sft_samples(context, settings, source, sft))
        measured.append(held_out_pairs(context, source))
        set_seed(settings.trainer.seed)
        what = f"The SFT model {sft.path}"
        path, how = whole_model(context, sft), loading_of(settings)
        model = load_model(AutoModelForSequenceClassification, path, what=what, how=how, may_lack=HEADS, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        return make_trainer(
            finite_steps(RewardTrainer),
            settings,
            model=model,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=get_peft_config(replace(settings.model, lora_task_type="SEQ_CLS")),
        )

    def finish_checkpoint(trainer: Any, path: Path) -> None:
        """μ and σ belong to the weights, so every checkpoint carries those of its own scores."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        with sharding.whole(model):
            if distributed.first():
                center(model, path)

    def center(model: Any, path: Path) -> None:
        model.config.rlhf_zoo = None
        # RewardModel freezes the model and leaves it in evaluation mode; training goes on after this.
        training, needed = model.training, [parameter.requires_grad for parameter in model.parameters()]
        with doing(f"reward: scoring {len(scored[0].texts)} samples of the SFT policy"):
            raw = RewardModel(model, tokenizer, tokenizer).score_texts(scored[0].texts, ended=scored[0].ended)
        for parameter, needs in zip(model.parameters(), needed, strict=True):
            parameter.requires_grad_(needs)
        model.train(training)
        if not raw.isfinite().all():
            raise ZooError(
                f"The reward model of {path.name} gives scores that are not finite, though its weights are: lower "
                "learning_rate, or compute in float32 if bf16 is on."
            )
        set_score_statistics(model, mean=float(raw.mean()), std=float(raw.std()), over="samples of the SFT model")
        if is_peft(model):  # an adapter is saved without the configuration, which holds the statistics
            model.config.architectures = [type(model.get_base_model()).__name__]
        model.config.save_pretrained(path)

    def conclude(trainer: Any, chosen: Path) -> dict[str, Any]:
        model = on_device(load_classifier(chosen), use_cpu=settings.trainer.use_cpu)
        report = {key: model.config.rlhf_zoo[key] for key in ("score_mean", "score_std")}
        if (found := measured[0]) is not None:
            pairs, split = found
            seed, utility = settings.trainer.seed, _utility(context, settings)
            with doing(f"reward: measuring on {len(pairs)} held-out pairs"):
                report |= held_out_report(model, tokenizer, pairs, seed=seed, utility=utility)
            report |= {"split": split, "seen": pairs_seen(pairs, learned[0])}
        return {"reward_model": report}

    return train_stage(
        context,
        settings,
        data=source.lineage,
        parents=parents,
        started=started,
        build=build,
        publisher=publisher,
        finish_checkpoint=finish_checkpoint,
        conclude=conclude,
        left_out=left_out,
    )


def open_pairs(context: RunContext) -> tuple[RunContext, DataSource]:
    """The run as its reward model is trained, and where its pairs are."""
    pairs = None if context.round is not None else named_pairs(context)
    if pairs is None:
        return context, stage_source(context, "reward")
    return on_pairs(context, pairs), pairs.source(context.hub)


def check_pairs(context: RunContext, tokenizer: Any | None) -> None:
    """Looks, before SFT trains, at all that the reward stage will read: every pair, and the prompts of its samples.

    Args:
        context: The run.
        tokenizer: The SFT policy's, as far as it is known.

    Raises:
        ZooError: A pair lacks a side or cannot be rendered, both sides of all are the same, nothing is left to train
            on or to measure, there are no prompts, or nothing could label simulated pairs.
    """
    owner, source = open_pairs(context)
    data = owner.settings("reward").data
    alone = "ppo" not in owner.recipe.stages  # else the prompts are PPO's, which has a check of its own
    if data.simulated_pairs is not None:
        _preference(data)
        if alone:
            for split in ("train", "validation"):
                _prompts(owner, source, split)
        return
    pairs = stage_rows(owner, "reward", source, data.dataset_train_split)
    for split in (data.dataset_test_split, data.dataset_validation_split):
        if split is not None:
            stage_rows(owner, "reward", source, split)
    if data.held_out_share is not None:
        hold_out(pairs, data.held_out_share)
    if all(one == other for one, other in zip(pairs["chosen"], pairs["rejected"], strict=True)):
        raise _all_equal(source.location)
    if tokenizer is not None and conversational(pairs):
        check_conversations(owner, "reward", source, tokenizer)
    if alone:
        _prompts(owner, source, "train")


def training_pairs(context: RunContext, source: DataSource, *, marked: bool = False) -> tuple[Dataset, dict[str, int]]:
    """The pairs to train on, those kept for the judge `same-labels` or the others; and what `learned_rows` left out.

    marked: whether they keep the column by which `overlap` compares prompts.
    """
    data = context.settings("reward").data
    train, left_out = learned_rows(context, "reward", source)
    if data.held_out_share is not None:
        train = hold_out(train, data.held_out_share)[0]
    if data.judge_share is not None:
        train = hold_out(train, data.judge_share)[context.of_judge]
    return train if marked else unmarked(train), left_out


def held_out_pairs(context: RunContext, source: DataSource) -> tuple[Dataset, str] | None:
    """The pairs that accuracy is measured on, and what to call them; None where the stage holds none out."""
    data = context.settings("reward").data
    if data.held_out_share is not None:
        split = data.dataset_train_split
        _, held_out = hold_out(learned_rows(context, "reward", source)[0], data.held_out_share)
        return held_out, f"{split}, {data.held_out_share:.0%} of prompts held out"
    if data.dataset_test_split is None:
        return None
    return stage_rows(context, "reward", source, data.dataset_test_split), data.dataset_test_split


def _as_read(pairs: Dataset, tokenizer: Any) -> Dataset:
    """Texts and conversations as the token ids that the model is read with later."""
    ids = {
        f"{side}_ids": [
            tokenize_for_reward(append_completion(prompt, text), tokenizer, ended=True)
            for prompt, text in zip(pairs["prompt"], pairs[side], strict=True)
        ]
        for side in ("chosen", "rejected")
    }
    return Dataset.from_dict({**ids, **({"margin": pairs["margin"]} if "margin" in pairs.column_names else {})})


def _look_for_equal(pairs: Dataset, *, of: str) -> None:
    """Says of how many pairs both sides are the same, as the model reads them. Raises ZooError where all are."""
    equal = sum(one == other for one, other in zip(pairs["chosen_ids"], pairs["rejected_ids"], strict=True))
    if equal == len(pairs):
        raise _all_equal(of)
    if equal:
        log.warning("Of %d of %d pairs of %s both sides are the same: they teach nothing.", equal, len(pairs), of)


def _all_equal(of: str) -> ZooError:
    return ZooError(f"Both sides of all pairs of {of} are the same, so that nothing is preferred: give others.")


def _longer(pairs: Dataset, most: int | None) -> int:
    """How many pairs trl will leave out as too long, which is said in a line."""
    if most is None:
        return 0
    sides = zip(pairs["chosen_ids"], pairs["rejected_ids"], strict=True)
    long = sum(max(map(len, one)) > most for one in sides)
    if long:
        log.warning("%d of %d pairs are left out: they have more than max_length, %d, tokens.", long, len(pairs), most)
    return long


def _prompts(context: RunContext, source: DataSource, split: str) -> list[Any]:
    """Prompts of PPO's, in its own data set where it names one.

    Without a stage ppo they are those of the data's configuration `prompts`, and where there is none those of the
    pairs. The data of a later round's reward model are pairs alone.
    """
    if "ppo" not in context.recipe.stages:
        return _prompts_of_data(context, source, split)
    data = context.settings("ppo").data
    if data.dataset_name is not None or context.round is not None:
        source = stage_source(context, "ppo")
    if data.held_out_share is not None:
        train, held_out, _ = parts(context, "ppo", source)
        return list((train if split == "train" or held_out is None else held_out)["prompt"])
    return list(stage_rows(context, "ppo", source, split)["prompt"])


def _prompts_of_data(context: RunContext, source: DataSource, split: str) -> list[Any]:
    """Those of the configuration `prompts`, else of the pairs to train on, of a recipe without PPO."""
    if not Path(source.location).is_file():  # which has no configurations
        try:
            rows = source.load("prompts", split, columns=["prompt"])
        except NoSuchPart:
            if context.settings("reward").data.simulated_pairs is not None:
                raise
        else:
            what = f"The data set {source.location}, configuration prompts, split {split},"
            turns = context.shared.conversational
            return list(in_form(rows, "prompts", columns={}, turns=turns, text="text", of=what)["prompt"])
    return list(training_pairs(context, source)[0]["prompt"])


@dataclass(frozen=True)
class SFTSamples:
    """Samples of the SFT model: N prompts, prompt + completion of each, and whether it ended by itself."""

    prompts: list[Any]
    texts: list[Any]
    ended: list[bool]


def sft_samples(context: RunContext, settings: StageSettings, source: DataSource, sft: ParentCheckpoint) -> SFTSamples:
    """`score_samples` completions of training prompts, drawn as PPO will draw them under the stage's seed."""
    prompts = _prompts(context, source, "train")
    tokenizer = context.shared.chat.for_prompts(load_tokenizer(sft.path), prompts)
    loaded = load_causal(whole_model(context, sft))
    model, drawn = on_device(loaded, use_cpu=settings.trainer.use_cpu), sampling(context)
    longest, mend = (context_of(model) or math.inf) - drawn["max_new_tokens"], "lower PPO's response_length"
    most = context.settings("ppo").data.max_prompt_length if "ppo" in context.recipe.stages else None
    if most is not None and most < longest:
        longest, mend = most, "raise PPO's max_prompt_length"
    prompts = [prompt for prompt in prompts if 0 < len(tokenize_prompt(prompt, tokenizer)) <= longest]
    if not prompts:
        raise ZooError(
            f"No prompt of {source.location} has at most {longest:g} tokens, so the SFT model can draw no answers to "
            f"center scores by: {mend}."
        )
    count = settings.data.score_samples
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    done = complete(
        model,
        tokenizer,
        chosen,
        keys=[(2, i) for i in range(count)],
        seed=settings.trainer.seed,
        desc="samples to center scores",
        **drawn,
    )
    return SFTSamples(
        chosen, [append_completion(prompt, text) for prompt, text in zip(chosen, done.texts, strict=True)], done.ended
    )


def pairs_seed(settings: StageSettings) -> int:
    """The seed of simulated pairs."""
    return settings.trainer.seed if settings.data.pairs_seed is None else settings.data.pairs_seed


def are_simulated(context: RunContext, data: Any) -> bool:
    """Whether held-out pairs were put in order by `preference`; those of a later round are the first one's."""
    return data.preference is not None and (data.simulated_pairs is not None or context.round is not None)


def _utility(context: RunContext, settings: StageSettings) -> Callable[[str], float] | None:
    """What simulated pairs were labeled by, where their preference function knows it."""
    data = settings.data
    if not are_simulated(context, data):
        return None
    found: Callable[[str], float] | None = getattr(load_object(data.preference, group=PREFERENCES), "utility", None)
    return found


def _preference(data: Any) -> Preference:
    """The function that labels simulated pairs. Raises ZooError where there is none."""
    if data.preference is None:
        raise ZooError("simulated_pairs needs `preference`, the function that labels them: give module:attribute.")
    found: Preference = load_object(data.preference, group=PREFERENCES)
    return found


def _simulated(context: RunContext, settings: StageSettings, source: DataSource, sft: ParentCheckpoint) -> DataSource:
    """Pairs of SFT samples of the same prompt, labeled by the recipe's preference function; made once."""
    data = settings.data
    prefer = _preference(data)
    folder = context.record("data").path / "preferences"
    seed = pairs_seed(settings)
    made = {
        "sft": sft.lineage["fingerprint"],
        "seed": seed,
        "train": data.simulated_pairs,
        "test": data.simulated_test_pairs,
        "preference": data.preference,
        **{
            name: asdict(value) if isinstance(value, Truncation) else value for name, value in sampling(context).items()
        },
    }
    note = folder / "made.json"
    if distributed.from_first(lambda: note.is_file() and read_json(note) == made):
        return source
    rng = random.Random(seed)
    splits = {}
    for split, prompts_of, count, stream in (
        ("train", "train", data.simulated_pairs, 3),
        ("test", "validation", data.simulated_test_pairs, 4),
    ):
        prompts = _prompts(context, source, prompts_of)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        splits[split] = _pairs(chosen, two_samples(context, chosen, seed, (stream,), sft), prefer, rng)
    with distributed.main_process_first():
        if distributed.first():
            source = add_configuration(context, "preferences", splits)
            write_json(note, made)
    return source


def _pairs(
    prompts: list[str], drawn: tuple[list[int], list[str], list[str]], prefer: Preference, rng: random.Random
) -> list[dict[str, Any]]:
    rows = []
    for place, *texts in zip(*drawn, strict=True):
        prompt = prompts[place]
        winner = prefer(plain_text(prompt) + texts[0], plain_text(prompt) + texts[1], rng)
        chosen, rejected = (wrap_completion(prompt, texts[side]) for side in (winner, 1 - winner))
        pair = {"chosen": chosen, "rejected": rejected}
        rows.append({"prompt": prompt, **pair, "simulated": True})
    if not rows:
        raise ZooError(
            f"Of {len(prompts)} simulated pairs none is left, as no two samples of the SFT model differed and ended by "
            "themselves: train it longer, or raise PPO's response_length."
        )
    return rows


def two_samples(
    context: RunContext, prompts: Sequence[Any], seed: int, stream: tuple[int, ...], policy: ParentCheckpoint
) -> tuple[list[int], list[str], list[str]]:
    """Two samples of a policy to each prompt, drawn as PPO draws them: those that differ and ended by themselves.

    Returns the places of their prompts, the first ones and the second ones.
    """
    tokenizer = context.shared.chat.for_prompts(load_tokenizer(policy.path), list(prompts))
    loaded = load_causal(whole_model(context, policy))
    model = on_device(loaded, use_cpu=context.settings("reward").trainer.use_cpu)
    first, second = (
        complete(
            model,
            tokenizer,
            prompts,
            keys=[(*stream, i, side) for i in range(len(prompts))],
            seed=seed,
            desc=f"pairs to compare, side {side + 1}",
            **sampling(context),
        )
        for side in (0, 1)
    )
    # RewardTrainer closes every text with an end-of-sequence token, which a cut one did not have.
    ended = [one and other for one, other in zip(first.ended, second.ended, strict=True)]
    kept = [i for i in range(len(prompts)) if ended[i] and first.texts[i] != second.texts[i]]
    return kept, [first.texts[i] for i in kept], [second.texts[i] for i in kept]
