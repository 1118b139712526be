"""What completions are measured with: sampling, reward, KL and the judges."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..functional import exact_kl, selected_logprobs
from ..modeling import distributed
from ..modeling.chat import Chat, append_completion, prompt_key, wrap_completion
from ..modeling.devices import MicroBatches, move, on_device
from ..modeling.loading import Loading, load_tokenizer
from ..modeling.logprobs import response_logits
from ..modeling.models import load_causal
from ..modeling.reserved_columns import passed_on
from ..modeling.sampling.sampler import Samples
from ..modeling.sampling.truncation import Truncation
from ..plugins import REWARDS, load_object
from ..rewards import RewardModel, Rewards
from ..rewards.loading import load_reward
from ..runs.context import RunContext
from ..runs.data.generate import SampledCompletions, complete
from ..runs.dataset import labeled_rows
from ..runs.judge import evaluation_of, judge_run
from ..runs.parents import parent, reward_names
from ..runs.settings.judge_names import SAME_LABELS
from .judges.lexicon import lexicon_judge
from .judges.named import Panel, RewardJudge, cheapest_first, open_panel, scores
from .judges.rule import RuleJudge
from .judges.scalar import FunctionJudge, Judge
from .reward_reading import reading_of
from .stats import group_indices

CHUNK = 64  # completions whose logits of both policies are held at once, at most
LOGITS = 2**28  # of one policy; a large vocabulary takes fewer completions


def rows_at_once(policy: PreTrainedModel, tokens: int) -> int:
    """Texts of so many tokens whose logits are held at once."""
    table: Any = policy.get_input_embeddings()
    return max(1, min(CHUNK, LOGITS // (tokens * table.weight.shape[0])))


@dataclass(frozen=True)
class Evaluator:
    """What completions are measured with: one reference, one reward (None without), the judges."""

    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards | None
    panel: Panel
    max_new_tokens: int
    temperature: float
    truncation: Truncation | None = None
    stops: Sequence[int] | None = None

    @property
    def judge(self) -> Judge:
        """The headline's."""
        return self.panel.scoring[0]

    @property
    def with_one_judge(self) -> Evaluator:
        """The same with the headline's judge alone."""
        return replace(self, panel=Panel(self.panel.scoring[:1]))

    def sampled(
        self, policy: PreTrainedModel, prompts: Sequence[Any], *, keys: Sequence[tuple[int, ...]], seed: int, desc: str
    ) -> SampledCompletions:
        """One completion of a policy a prompt; see `complete`."""
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

    def reward_of(
        self,
        batch: Samples,
        part: slice,
        prompts: Sequence[Any],
        texts: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> list[float]:
        """Of a batch, which is the rows `part` of prompts, texts and columns; [] without a reward."""
        if self.rewards is None:
            return []
        written = list(zip(prompts[part], texts[part], strict=True))
        completions, full = [wrap_completion(*one) for one in written], [append_completion(*one) for one in written]
        others = {name: list(values[part]) for name, values in columns.items()}
        return self.rewards(batch, prompts[part], completions, full, others).total.tolist()


@dataclass(frozen=True)
class Measured:
    """One policy's completions, one entry a (prompt, sample).

    reward: [] without one. logprobs, ref_logprobs: log π and log π_SFT of each token that was drawn, nats. exact_kl:
    Σ_t KL(π‖π_SFT) of the distributions that they were drawn from, nats a completion: as `kl` in the mean, less noise.
    """

    completions: list[str]
    reward: list[float]
    length: list[int]
    ended: list[bool]
    judges: dict[str, list[float]]
    exact_kl: list[float]
    logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    tokens: list[list[int]]

    @cached_property
    def kl(self) -> list[float]:
        """Σ_t log π − log π_SFT of each completion, nats (k1)."""
        return [math.fsum(ours) - theirs for ours, theirs in zip(self.logprobs, self.sft_logprob, strict=True)]

    @cached_property
    def sft_logprob(self) -> list[float]:
        """Σ_t log π_SFT of each completion, nats."""
        return [math.fsum(row) for row in self.ref_logprobs]

    def row(self, place: int, judge: str) -> dict[str, Any]:
        """Of samples.jsonl: one completion and what was found of it, by the judge of that name."""
        return {
            "completion": self.completions[place],
            "reward": self.reward[place] if self.reward else None,
            "judge": self.judges[judge][place],
            "kl": self.kl[place],
            "length": self.length[place],
            "ended": self.ended[place],
        }


def repeated(rows: Dataset, samples: int) -> tuple[list[int], list[Any], dict[str, list[Any]]]:
    """Each row `samples` times in turn: the place of its row, its prompt, and the other columns."""
    groups = [place for place in range(len(rows)) for _ in range(samples)]
    columns = rows.select(groups).to_dict()
    return groups, columns["prompt"], passed_on(columns)


def prompt_groups(prompts: Iterable[Any]) -> list[int]:
    """The place of each row's prompt among the different ones: what intervals resample as one."""
    return group_indices([prompt_key(prompt) for prompt in prompts]).tolist()


def measure(
    policy: PreTrainedModel,
    evaluator: Evaluator,
    prompts: Sequence[Any],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    desc: str,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> Measured:
    """Samples one completion a prompt and measures each, on the device of the reference.

    Two policies under equal keys and seed draw alike. Several processes measure a batch in turn.

    columns: the prompts' other columns, one value a prompt, which reward functions may read.
    """
    move(policy, evaluator.reference.device)
    done = evaluator.sampled(policy, prompts, keys=keys, seed=seed, desc=desc)
    measured: dict[int, _Batch] = {}
    parts, start = MicroBatches(rows_at_once(policy, evaluator.max_new_tokens)), 0
    for number, batch in enumerate(done.batches):
        chosen = slice(start, start + len(batch))
        start += len(batch)
        if not distributed.is_my_batch(number):
            continue
        reward = evaluator.reward_of(batch, chosen, prompts, done.texts, columns or {})
        rated = list(parts.run(partial(_against, policy, evaluator, batch), range(len(batch))))
        measured[number] = (
            reward,
            [value for along, _ in rated for value in along],
            _rows(batch.logprobs, batch),
            [row for _, rows in rated for row in rows],
        )
    columns_of: tuple[list, ...] = ([], [], [], [])
    for one in distributed.in_order(measured):
        for column, values in zip(columns_of, one, strict=True):
            column += values
    reward, exact, ours, theirs = columns_of
    judged = {
        judge.name: scores(judge, prompts, done.texts, columns) for judge in cheapest_first(evaluator.panel.scoring)
    }
    tokens = [list(row) for batch in done.batches for row in batch.token_lists()]
    return Measured(done.texts, reward, done.lengths, done.ended, judged, exact, ours, theirs, tokens)


#: Of a batch: rewards, exact KL, log π and log π_ref of each token.
_Batch = tuple[list[float], list[float], list[list[float]], list[list[float]]]


@torch.no_grad()
def _against(
    policy: PreTrainedModel, evaluator: Evaluator, batch: Samples, rows: Sequence[int]
) -> tuple[list[float], list[list[float]]]:
    """Of each completion, nats: its exact KL to the reference, summed over tokens, and log π_ref of each token."""
    batch = batch.rows(slice(rows[0], rows[-1] + 1)).to(evaluator.reference.device)
    logits = response_logits(evaluator.reference, batch, temperature=evaluator.temperature)
    reference = selected_logprobs(logits, batch.completion_ids)
    if policy is evaluator.reference:
        exact = torch.zeros_like(reference)
    else:
        exact = exact_kl(response_logits(policy, batch, temperature=evaluator.temperature), logits)
    return exact.masked_fill(~batch.mask, 0).sum(1).tolist(), _rows(reference, batch)


def _rows(values: torch.Tensor, batch: Samples) -> list[list[float]]:
    """The values (B, T) of each completion's own tokens."""
    return [row[keep].tolist() for row, keep in zip(values, batch.mask, strict=True)]


def make_evaluator(context: RunContext, reference_path: Path) -> Evaluator:
    """The SFT policy at `reference_path` as reference, PPO's reward, and the recipe's judges."""
    ppo = context.settings("ppo")
    tokenizer = load_tokenizer(reference_path)
    if tokenizer.chat_template is not None and context.shared.chat != Chat():
        context.shared.chat.write(tokenizer)
    rewards: list[Any] = [load_object(name, group=REWARDS) for name in ppo.data.reward_funcs or []]
    if names := reward_names(ppo.data.reward_model_path):
        paths = [parent(context, name).path for name in names]
        place = partial(on_device, use_cpu=ppo.trainer.use_cpu)
        how = Loading(dtype="auto", attention=ppo.model.attn_implementation)  # as PPO holds it
        loader, reading = ppo.data.reward_model_loader, reading_of(vars(ppo.trainer))
        rewards.insert(0, load_reward(paths, tokenizer, place=place, how=how, loader=loader, **reading))
    reference = on_device(load_causal(reference_path), use_cpu=ppo.trainer.use_cpu).eval()
    return Evaluator(
        reference=reference,
        tokenizer=tokenizer,
        rewards=Rewards(
            rewards,
            weights=ppo.trainer.reward_weights,
            tokenizer=tokenizer,
            timeout=ppo.trainer.reward_timeout,
        ),
        panel=_panel(context),
        max_new_tokens=ppo.trainer.response_length,
        temperature=ppo.trainer.temperature,
        truncation=ppo.trainer.truncation,
        stops=ppo.trainer.stop_ids(tokenizer, reference),
    )


def training_rewards(context: RunContext, tools: Evaluator) -> frozenset[str]:
    """The names of the judges that PPO is paid by: these judge nothing."""
    ppo = context.settings("ppo")
    models = 0 if ppo.data.reward_model_path is None else 1
    weights = ppo.trainer.reward_weights or [1.0]
    paid = paid_functions(ppo.data.reward_funcs, ppo.trainer.reward_weights, learned=bool(models))
    return function_judges(tools, paid) | (reward_models(tools) if models and weights[0] else frozenset())


def paid_functions(names: Sequence[str] | None, weights: Sequence[float] | None, *, learned: bool) -> frozenset[str]:
    """The reward functions that pay: those whose weight is not 0.

    weights: of the reward model, where there is one (`learned`), then of each function; None for 1 each.
    """
    names = names or []
    of_each = list(weights or [])[int(learned) :]
    if len(of_each) != len(names):
        return frozenset(names)
    return frozenset(name for name, weight in zip(names, of_each, strict=True) if weight)


def function_judges(tools: Evaluator, functions: Collection[str]) -> frozenset[str]:
    """The names of the judges that are one of these functions, in whatever unit they count."""
    judges = (one for one in tools.panel.scoring if isinstance(one, FunctionJudge | RuleJudge))
    paid = set(map(_without_unit, functions))
    return frozenset(one.name for one in judges if _without_unit(one.target) in paid)


def _without_unit(target: str) -> str:
    """NAME(KEY=…) of a name that says a unit, too; NAME of one that says nothing else."""
    rest = re.sub(r"""unit *= *(['"])\w+\1 *,? *|\)$""", "", target).rstrip(" ,(")
    return rest.replace(" ", "")


def reward_models(tools: Evaluator) -> frozenset[str]:
    """The names of the judges that have the weights of the training reward's model, under whatever name."""
    models = tools.rewards.models if tools.rewards is not None else []
    return frozenset(
        judge.name
        for judge in tools.panel.scoring
        if isinstance(judge, RewardJudge)
        and isinstance(judge.model, RewardModel)
        and any(_equal(judge.model.model.state_dict(), one.model.state_dict()) for one in models)
    )


def _equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu().float(), b[name].cpu().float()) for name in a)


def _panel(context: RunContext) -> Panel:
    config, lexicon = evaluation_of(context), lexicon_judge(context.shared)
    return open_panel(
        config.names,
        llm=config.asked_llm,
        labeled=lambda: labeled_rows(context),
        folder=context.record("eval").path,
        seed=context.shared.seed,
        title=config.judge_name,
        description=config.judge_description or None,
        beside=() if lexicon is None else (lexicon,),
        use_cpu=context.settings("ppo").trainer.use_cpu,
        hub=context.hub,
        same_labels=judge_run(context).record("reward").path if SAME_LABELS in config.names else None,
    )
