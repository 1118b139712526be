"""Measures a policy: samples completions and computes their reward, their KL and the judges' scores."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..functional import exact_kl, selected_logprobs
from ..modeling import distributed
from ..modeling.chat import append_completion, wrap_completion
from ..modeling.chat_template import ChatSettings, Prompt
from ..modeling.devices import MicroBatches, move, move_to_best_device
from ..modeling.loading import LoadOptions, load_tokenizer
from ..modeling.logprobs import response_logits
from ..modeling.models import load_causal
from ..modeling.reserved_columns import columns_for_functions
from ..modeling.sampling.sampler import Samples
from ..modeling.sampling.truncation import Truncation
from ..plugins import REWARDS, load_object
from ..rewards import RewardModel, Rewards
from ..rewards.loading import load_reward
from ..runs.context import RunContext
from ..runs.data.generate import SampledCompletions, complete
from ..runs.dataset import labeled_rows
from ..runs.judge import evaluation_settings, judge_run
from ..runs.parents import find_parent
from ..runs.registry import reward_names
from ..runs.settings.judge_names import SAME_LABELS
from ..runs.status_line import Progress
from .judges.lexicon import lexicon_judge
from .judges.named import open_panel
from .judges.panel import Panel, RewardJudge, score_completions, sort_free_first
from .judges.rule import RuleJudge
from .judges.scalar import FunctionJudge, Judge
from .logprob_cache import model_fingerprint
from .reward_load_settings import reward_load_kwargs
from .saved_measurements import SavedMeasurements

MAX_COMPLETIONS = 64  # completions whose logits are in memory at once
MAX_LOGITS = 2**28  # logits of one policy that are in memory at once; the tighter limit if the vocabulary is large


def max_rows_in_memory(policy: PreTrainedModel, tokens: int) -> int:
    """Computes for how many texts the logits fit in memory at once.

    Args:
        policy: The model; its vocabulary determines the size.
        tokens: Maximum number of tokens in a text.

    Returns:
        A number from 1 to `MAX_COMPLETIONS`.
    """
    # The embedding may be padded beyond the tokenizer's vocabulary, and the logits have the size of the embedding.
    embedding: Any = policy.get_input_embeddings()
    return max(1, min(MAX_COMPLETIONS, MAX_LOGITS // (tokens * embedding.weight.shape[0])))


@dataclass(frozen=True)
class Evaluator:
    """The models, rewards and judges that measure every policy.

    Attributes:
        reference: The SFT policy.
        tokenizer: The tokenizer of all policies.
        rewards: The training reward; None if there is none.
        panel: The judges.
        max_new_tokens: Maximum number of tokens in a completion.
        temperature: The sampling temperature.
        truncation: Where completions are cut, at a text or a random length; None to cut none.
        stops: Token ids that end a completion.
        saved_measurements: Those of an unfinished evaluation, which `measure` reads and adds to; None to save none.
    """

    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards | None
    panel: Panel
    max_new_tokens: int
    temperature: float
    truncation: Truncation | None = None
    stops: Sequence[int] | None = None
    saved_measurements: SavedMeasurements | None = None

    @property
    def judge(self) -> Judge:
        """The headline judge."""
        return self.panel.scoring_judges[0]

    @property
    def with_only_headline_judge(self) -> Evaluator:
        """A copy with only the headline judge."""
        return replace(self, panel=Panel(self.panel.scoring_judges[:1]))

    def sample(
        self,
        policy: PreTrainedModel,
        prompts: Sequence[Prompt],
        *,
        keys: Sequence[tuple[int, ...]],
        seed: int,
        desc: str,
    ) -> SampledCompletions:
        """Samples one completion for each prompt; see `complete`.

        Args:
            policy: The model to sample from.
            prompts: (N,) texts or conversations.
            keys: (N,) keys of the random numbers, see `head_to_head.random_keys`.
            seed: Seed of the sampling.
            desc: Label of the progress bar.
        """
        return complete(
            policy,
            self.tokenizer,
            prompts,
            keys=keys,
            seed=seed,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            truncation=self.truncation,
            stops=self.stops,
            desc=desc,
        )

    def score_batch(
        self,
        batch: Samples,
        batch_rows: slice,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        columns: Mapping[str, Sequence[object]],
    ) -> list[float]:
        """Computes the training reward of a batch.

        Args:
            batch: The sampled token ids with their prompts.
            batch_rows: The rows of prompts, texts and columns that are in the batch.
            prompts: (N,) the prompts of all batches.
            texts: (N,) the completions of all batches.
            columns: Name -> (N,) values of the prompts' other columns.

        Returns:
            (B,) the total reward of each row of the batch; [] without a reward.
        """
        if self.rewards is None:
            return []
        exchanges = list(zip(prompts[batch_rows], texts[batch_rows], strict=True))
        completions = [wrap_completion(*exchange) for exchange in exchanges]
        full_texts = [append_completion(*exchange) for exchange in exchanges]
        batch_columns = {name: list(values[batch_rows]) for name, values in columns.items()}
        return self.rewards(batch, prompts[batch_rows], completions, full_texts, batch_columns).total.tolist()


@dataclass(frozen=True)
class PolicyMeasurements:
    """One policy's completions with their metrics, one entry per (prompt, sample).

    Attributes:
        completions: The texts.
        reward: The training reward; [] if there is no reward.
        length: The number of tokens.
        ended: Whether the completion ended by itself.
        judge_scores: Name of the judge -> its scores.
        exact_kl: Σ_t KL(π‖π_SFT) of the distributions that the tokens were sampled from, nats per completion. The mean
            estimates the same quantity as the mean of `kl`, with less noise.
        logprobs: Log π of each sampled token, nats.
        ref_logprobs: Log π_SFT of each sampled token, nats.
        tokens: The sampled token ids.
    """

    completions: list[str]
    reward: list[float]
    length: list[int]
    ended: list[bool]
    judge_scores: dict[str, list[float]]
    exact_kl: list[float]
    logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    tokens: list[list[int]]

    @cached_property
    def kl(self) -> list[float]:
        """Σ_t log π − log π_SFT of each completion, nats (the estimator k1)."""
        return [math.fsum(row) - ref for row, ref in zip(self.logprobs, self.ref_logprob_sums, strict=True)]

    @cached_property
    def ref_logprob_sums(self) -> list[float]:
        """Σ_t log π_SFT of each completion, nats."""
        return [math.fsum(row) for row in self.ref_logprobs]

    def row(self, index: int, judge: str) -> dict[str, Any]:
        """Builds one policy's part of a line in samples.jsonl.

        Args:
            index: Index of the completion.
            judge: Name of the judge whose score to include.
        """
        return {
            "completion": self.completions[index],
            "reward": self.reward[index] if self.reward else None,
            "judge": self.judge_scores[judge][index],
            "kl": self.kl[index],
            "length": self.length[index],
            "ended": self.ended[index],
        }


def repeat_prompts(rows: Dataset, copies: int) -> tuple[list[int], list[Any], dict[str, list[Any]]]:
    """Repeats each row. The copies of a row are adjacent.

    Args:
        rows: (P,) rows with a prompt and other columns.
        copies: Number of copies of each row.

    Returns:
        (P · copies,) the index of the row, the prompt, and the values of each other column.
    """
    row_indices = [index for index in range(len(rows)) for _ in range(copies)]
    columns = rows.select(row_indices).to_dict()
    return row_indices, columns["prompt"], columns_for_functions(columns)


def measure(
    policy: PreTrainedModel,
    evaluator: Evaluator,
    prompts: Sequence[Prompt],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    desc: str,
    columns: Mapping[str, Sequence[object]] | None = None,
) -> PolicyMeasurements:
    """Samples one completion for each prompt and measures it, on the reference's device.

    Two policies with equal keys and seed use the same random numbers. If there are several processes, they share the
    batches.

    Args:
        policy: The model to measure. It is moved to the reference's device.
        evaluator: The reference, the reward and the judges.
        prompts: (N,) texts or conversations.
        keys: (N,) keys of the random numbers.
        seed: Seed of the sampling.
        desc: Label of the progress bar. It also identifies saved measurements, so each set of prompts needs its own.
        columns: Name -> (N,) values of the prompts' other columns, which reward functions may read.
    """
    # KL needs the logits of both models on one device.
    move(policy, evaluator.reference.device)

    measure_now = partial(_measure_now, policy, evaluator, prompts, keys=keys, seed=seed, desc=desc, columns=columns)
    if evaluator.saved_measurements is None:
        return measure_now()
    key = {
        "measured": desc,
        "policy": [policy.name_or_path, model_fingerprint(policy, evaluator.tokenizer)],
        "judge_names": [judge.name for judge in evaluator.panel.scoring_judges],
        "seed": seed,
    }
    return PolicyMeasurements(**evaluator.saved_measurements.get(key, lambda: dict(vars(measure_now()))))


def _measure_now(
    policy: PreTrainedModel,
    evaluator: Evaluator,
    prompts: Sequence[Prompt],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    desc: str,
    columns: Mapping[str, Sequence[object]] | None,
) -> PolicyMeasurements:
    samples = evaluator.sample(policy, prompts, keys=keys, seed=seed, desc=desc)
    metrics_by_batch: dict[int, _BatchMetrics] = {}
    # Logits over the whole vocabulary are the largest tensors here, so their size limits the micro-batches.
    micro_batches = MicroBatches(max_rows_in_memory(policy, evaluator.max_new_tokens))
    start = 0
    with Progress(len(prompts), f"{desc}: reward and KL", "sample", leave=False) as bar:
        for batch_index, batch in enumerate(samples.batches):
            bar.update(start - bar.n)  # the batches of other processes count as done
            batch_rows = slice(start, start + len(batch))
            start += len(batch)
            # Every process has all samples but scores only its own batches; `gather_in_order` merges the results.
            if not distributed.is_my_batch(batch_index):
                continue
            reward = evaluator.score_batch(batch, batch_rows, prompts, samples.texts, columns or {})
            kl_parts = []
            for part in micro_batches.run(partial(_kl_to_reference, policy, evaluator, batch), range(len(batch))):
                kl_parts.append(part)
                bar.update(len(part[0]))
            metrics_by_batch[batch_index] = (
                reward,
                [value for part_kl, _ in kl_parts for value in part_kl],
                _unpad(batch.logprobs, batch),
                [row for _, rows in kl_parts for row in rows],
            )
    merged_metrics: tuple[list, ...] = ([], [], [], [])
    for batch_metrics in distributed.gather_in_order(metrics_by_batch):
        for values, batch_values in zip(merged_metrics, batch_metrics, strict=True):
            values += batch_values
    reward, exact_kls, logprobs, ref_logprobs = merged_metrics
    judge_scores = {
        # Paid judges come last, so that an error in a free judge costs nothing.
        judge.name: score_completions(judge, prompts, samples.texts, columns)
        for judge in sort_free_first(evaluator.panel.scoring_judges)
    }
    # The token ids are kept, because decoding and encoding may give other ids.
    tokens = [list(row) for batch in samples.batches for row in batch.completion_id_lists()]
    return PolicyMeasurements(
        completions=samples.texts,
        reward=reward,
        length=samples.lengths,
        ended=samples.ended,
        judge_scores=judge_scores,
        exact_kl=exact_kls,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        tokens=tokens,
    )


#: For one batch: rewards, exact KL, and log π and log π_ref of each token.
_BatchMetrics = tuple[list[float], list[float], list[list[float]], list[list[float]]]


@torch.no_grad()
def _kl_to_reference(
    policy: PreTrainedModel, evaluator: Evaluator, batch: Samples, rows: Sequence[int]
) -> tuple[list[float], list[list[float]]]:
    """Returns the exact KL of each completion, summed over tokens, and log π_ref of each token, in nats."""
    batch = batch.select(slice(rows[0], rows[-1] + 1)).to(evaluator.reference.device)
    logits = response_logits(evaluator.reference, batch, temperature=evaluator.temperature)
    ref_logprobs = selected_logprobs(logits, batch.completion_ids)
    if policy is evaluator.reference:
        # The KL of the reference to itself is exactly 0, so a forward pass is saved.
        kl = torch.zeros_like(ref_logprobs)
    else:
        # At the sampling temperature, so this is the KL of the distributions that the tokens were sampled from.
        kl = exact_kl(response_logits(policy, batch, temperature=evaluator.temperature), logits)
    return kl.masked_fill(~batch.mask, 0).sum(1).tolist(), _unpad(ref_logprobs, batch)


def _unpad(values: torch.Tensor, batch: Samples) -> list[list[float]]:
    """Returns the values (B, T) of each completion's tokens, without padding."""
    return [row[is_token].tolist() for row, is_token in zip(values, batch.mask, strict=True)]


def make_evaluator(context: RunContext, reference_path: Path) -> Evaluator:
    """Loads the SFT policy as reference, PPO's reward, and the recipe's judges.

    Args:
        context: The run.
        reference_path: Checkpoint of the SFT policy.
    """
    ppo = context.settings("ppo")
    tokenizer = load_tokenizer(reference_path)
    # The recipe's chat settings override the checkpoint's own template.
    if tokenizer.chat_template is not None and context.shared.chat != ChatSettings():
        context.shared.chat.write(tokenizer)
    rewards: list[Any] = [load_object(name, group=REWARDS) for name in ppo.data.reward_funcs or []]
    if names := reward_names(ppo.data.reward_model_path):
        paths = [find_parent(context, name).path for name in names]
        move_to_device = partial(move_to_best_device, use_cpu=ppo.trainer.use_cpu)
        load_options = LoadOptions(dtype="auto", attention=ppo.model.attn_implementation)  # as in PPO
        loader, load_kwargs = ppo.data.reward_model_loader, reward_load_kwargs(vars(ppo.trainer))
        # The reward model comes first, because the first of the `reward_weights` is its weight.
        rewards.insert(
            0, load_reward(paths, tokenizer, move=move_to_device, options=load_options, loader=loader, **load_kwargs)
        )
    reference = move_to_best_device(load_causal(reference_path), use_cpu=ppo.trainer.use_cpu).eval()
    return Evaluator(
        reference=reference,
        tokenizer=tokenizer,
        rewards=Rewards(
            rewards, weights=ppo.trainer.reward_weights, tokenizer=tokenizer, timeout=ppo.trainer.reward_timeout
        ),
        panel=_open_judge_panel(context),
        max_new_tokens=ppo.trainer.response_length,
        temperature=ppo.trainer.temperature,
        truncation=ppo.trainer.truncation,
        stops=ppo.trainer.stop_ids(tokenizer, reference),
    )


def find_reward_judges(context: RunContext, evaluator: Evaluator) -> frozenset[str]:
    """Returns the names of the judges that are also PPO's training reward.

    Args:
        context: The run.
        evaluator: The loaded reward and judges.
    """
    ppo = context.settings("ppo")
    has_reward_model = ppo.data.reward_model_path is not None
    weights = ppo.trainer.reward_weights or [1.0]
    rewarded_functions = find_weighted_functions(
        ppo.data.reward_funcs, ppo.trainer.reward_weights, has_reward_model=has_reward_model
    )
    return find_function_judges(evaluator, rewarded_functions) | (
        find_reward_model_judges(evaluator) if has_reward_model and weights[0] else frozenset()
    )


def find_weighted_functions(
    names: Sequence[str] | None, weights: Sequence[float] | None, *, has_reward_model: bool
) -> frozenset[str]:
    """Returns the names of the reward functions whose weight is not 0.

    Args:
        names: Names of the reward functions.
        weights: The weight of the reward model, if there is one, then of each function; None for 1 each.
        has_reward_model: Whether there is a reward model.
    """
    names = names or []
    # The first weight is the reward model's.
    function_weights = list(weights or [])[1 if has_reward_model else 0 :]
    if len(function_weights) != len(names):
        # With a wrong number of weights, every function counts as rewarded, to be safe.
        return frozenset(names)
    return frozenset(name for name, weight in zip(names, function_weights, strict=True) if weight)


def find_function_judges(evaluator: Evaluator, functions: Collection[str]) -> frozenset[str]:
    """Returns the names of the judges that are one of these functions, even if they differ in `unit` (words or tokens).

    Args:
        evaluator: The judges.
        functions: Names of reward functions.
    """
    judges = (judge for judge in evaluator.panel.scoring_judges if isinstance(judge, FunctionJudge | RuleJudge))
    # A length in words and a length in tokens are the same incentive.
    rewarded_targets = set(map(_remove_unit, functions))
    return frozenset(judge.name for judge in judges if _remove_unit(judge.target) in rewarded_targets)


def _remove_unit(target: str) -> str:
    """Removes the argument `unit`, spaces and the closing parenthesis from NAME(KEY=…, unit=…), for comparison."""
    return re.sub(r"""unit *= *(['"])\w+\1 *,? *|\)$""", "", target).rstrip(" ,(").replace(" ", "")


def find_reward_model_judges(evaluator: Evaluator) -> frozenset[str]:
    """Returns the names of the judges whose weights equal those of a reward model, whatever they are called.

    Args:
        evaluator: The reward and the judges.
    """
    models = evaluator.rewards.models if evaluator.rewards is not None else []
    return frozenset(
        judge.name
        for judge in evaluator.panel.scoring_judges
        if isinstance(judge, RewardJudge)
        and isinstance(judge.model, RewardModel)
        and any(_equal_tensors(judge.model.model.state_dict(), model.model.state_dict()) for model in models)
    )


def _equal_tensors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    # Compare in float32, because the two may be loaded in different dtypes.
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu().float(), b[name].cpu().float()) for name in a)


def _open_judge_panel(context: RunContext) -> Panel:
    config, lexicon = evaluation_settings(context), lexicon_judge(context.shared)
    return open_panel(
        config.judge_names,
        llm=config.llm_settings,
        load_labeled=lambda: labeled_rows(context),
        folder=context.record("eval").path,
        seed=context.shared.seed,
        title=config.judge_name,
        description=config.judge_description or None,
        extra=() if lexicon is None else (lexicon,),
        use_cpu=context.settings("ppo").trainer.use_cpu,
        hub=context.hub,
        # Only the judge `same-labels` needs this reward model of another run, so its path is not looked up otherwise.
        same_labels_folder=judge_run(context).record("reward").path if SAME_LABELS in config.judge_names else None,
    )
