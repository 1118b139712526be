"""What `transformers.Trainer` needs of PPO: construction, optimizer, evaluation, logging, saving and resuming.

The algorithm stands in `rlhf_zoo.ppo.trainer`.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from .. import functional as F
from ..errors import NotFinite, ZooError
from ..modeling.fsdp import full_weights
from ..modeling.fsdp_trainer import ShardTrainer
from ..modeling.length_grouping import GroupsByLength
from ..modeling.reserved_columns import PROMPT_INDEX
from ..modeling.value_head import ValueHead
from ..rewards import RewardFunction, RewardModel, Rewards, Scored
from .actor_critic import ActorCritic
from .assembly import Parts, assemble, prompts_of
from .checkpoint import PPO_COMPLETE, Complete
from .completions import COMPLETIONS_DIR, DecodedCompletions, decoded, show_table
from .config import PPOConfig
from .custom_loop import GivenScores
from .engines import make_engine
from .guards import KLWatch, ReferenceWatch
from .kl_controller import KLController, RunningScores
from .metrics import Progress, critic_health, of_completions
from .offload import at_hand, place
from .prompt_batches import PromptReader
from .rollout import Advantages, Rollout
from .step_guard import SKIPPED, Guarded
from .timing import Phases

PPO_STATE = "ppo_state.json"
TRAIN_STREAM, EVAL_STREAM, LOOP_STREAM = 0, 1, 2


class BasePPOTrainer(PromptReader, GroupsByLength, ShardTrainer, Guarded, ABC):
    """A Trainer of a policy and its critic. Its abstract methods are the steps of an update that evaluation needs."""

    args: PPOConfig
    processing_class: PreTrainedTokenizerBase
    pad_apart: ClassVar[bool] = True

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: PreTrainedModel | str | Any,
        ref_model: PreTrainedModel | str | None = None,
        reward_model: PreTrainedModel | str | Sequence[PreTrainedModel | str] | None = None,
        train_dataset: Dataset | None = None,
        value_model: PreTrainedModel | str | Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        optimizers: tuple = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Sequence[RewardFunction | PreTrainedModel | str] | RewardFunction | None = None,
        reward_processing_class: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
        ptx_dataset: Dataset | None = None,
    ) -> None:
        """Takes what `rlhf_zoo.PPOTrainer` documents."""
        parts: Parts = assemble(
            args,
            processing_class,
            model,
            ref_model=ref_model,
            reward_model=reward_model,
            value_model=value_model,
            peft_config=peft_config,
            reward_funcs=reward_funcs,
            reward_processing_class=reward_processing_class,
            ptx_dataset=ptx_dataset,
            pad_apart=self.pad_apart,
        )
        self.reference, self.texts, self._rewards = parts.reference, parts.texts, parts.rewards
        self.context, self.vocabulary, self.narrowest = parts.context, parts.vocabulary, parts.narrowest
        # What is fed where the mask is False; PAD itself may have no embedding.
        pad, eos = processing_class.pad_token_id, processing_class.eos_token_id
        self.stop_ids = args.stop_ids(processing_class, parts.policy)
        self.fill_id: int = pad if pad in self.vocabulary else eos
        self.controller = KLController(args.kl_coef, args.kl_target, args.kl_horizon)
        self.scores_seen = RunningScores()
        self.last_metrics: dict[str, float] = {}
        self._from_reference, self._begun = parts.from_reference, False
        self._watch, self._kl_watch = ReferenceWatch(), KLWatch()
        self._waiting: list[dict] = []
        self._sizes: list[int] = []  # of the batches that wait
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._shown: dict[str, list[Any]] = {}
        self._episodes = self._generated = 0
        self._loop_model: nn.Module | None = None
        self.most_tokens = args.tokens_at_once
        reading = args, processing_class, self.context, self.narrowest
        super().__init__(
            model=ActorCritic(parts.policy, parts.critic),
            args=args,
            data_collator=data_collator or _as_they_are,
            train_dataset=prompts_of(train_dataset, *reading, training=True),
            eval_dataset=prompts_of(eval_dataset, *reading),
            processing_class=processing_class,
            callbacks=[Complete(), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.phases = Phases(self.accelerator.device)
        self.engine = make_engine(args, self.policy, processing_class, self.accelerator)
        moving = self.model if args.offload_frozen else None
        place(self.reference, self._scoring, device=self.accelerator.device, training=moving)
        if args.fsdp2:
            self._shard_all(optimizers[0])

    def _shard_all(self, optimizer: Any) -> None:
        """Shards the models. optimizer: one made before, of whole weights."""
        for wrong, mend in (
            (
                isinstance(self.value_model, ValueHead),
                "a critic on the policy's trunk: give critic 'policy' or 'reward'",
            ),
            (optimizer is not None, "an optimizer of one's own: leave it out"),
        ):
            if wrong:
                raise ZooError(f"fsdp2 is not there for {mend}, or leave fsdp2 out.")
        reference = self.reference.own if self.reference else None
        frozen = [*(one.model for one in self._scoring), *([] if reference is None else [reference])]
        self.shard(self.policy, self.value_model, frozen=frozen)

    @property
    def _scoring(self) -> Sequence[RewardModel]:
        """The reward models."""
        return self._rewards.models if self._rewards is not None else ()

    @abstractmethod
    def rollout(self, rows: Sequence[Mapping], *, stream: int) -> Rollout:
        """Samples a completion for each row, with log π, log π_ref and V of its tokens."""

    @abstractmethod
    def score(self, rollout: Rollout, rows: Sequence[Mapping]) -> Scored:
        """Scores each completion of a rollout by the rewards."""

    @abstractmethod
    def estimate(self, rollout: Rollout, scored: Scored) -> Advantages:
        """Rewards, advantages and returns of a scored rollout."""

    # Parts

    @property
    def actor(self) -> ActorCritic:
        return self.accelerator.unwrap_model(self.model)

    @property
    def policy(self) -> PreTrainedModel:
        """The policy being trained."""
        return self.actor.policy

    @property
    def value_model(self) -> Any:
        """The critic being trained: a model, or a value head on the policy's trunk."""
        return self.actor.value_model

    @property
    def rewards(self) -> Rewards:
        """What scores completions. Raises ZooError where no reward was given."""
        if self._rewards is None:
            raise ZooError(
                "PPO has no reward: give reward_model or reward_funcs, or use step() with scores of your own."
            )
        return self._rewards

    @property
    def precision(self) -> torch.dtype:
        """What the policy computes in; bfloat16 stands for eight bits too, whose rounding depends on a batch's rows."""
        policy: Any = self.policy
        eight = bool(getattr(policy, "is_loaded_in_8bit", False))
        half = self.args.bf16 or next(policy.parameters()).dtype == torch.bfloat16
        return torch.bfloat16 if half or eight else torch.float32

    @property
    def warming_up(self) -> bool:
        """Whether only the critic learns in this update."""
        return self.state.global_step < self.args.critic_warmup_updates

    def total(self, x: Tensor) -> Tensor:
        """Σ of x over processes, elementwise."""
        return self.accelerator.reduce(x, "sum")

    @staticmethod
    def moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(n, Σx, Σx²) of what is not NaN where no mask is given."""
        return F.masked_moments(x, ~x.isnan() if mask is None else mask)

    def mean(self, x: Tensor) -> float:
        """Mean of x over its real entries (not NaN); NaN if there is none."""
        n, total, _ = self.moments(x).tolist()
        return total / n if n else math.nan

    def look(self, progress: Progress) -> None:
        """Has the processes agree on whether the step under way has a loss that is a number.

        Raises NotFinite for log-probabilities, or weights, that are not finite.
        """
        finite = self.agreed({"loss": progress.step_loss, "log-probabilities": progress.step_logprobs})
        if not finite["log-probabilities"]:
            self.check_weights()
            raise NotFinite(
                f"In step {self.state.global_step + 1} log-probabilities of the policy in training are not finite, "
                "though its weights are: lower learning_rate, or compute in float32 if bf16 is on."
            )
        self.guard.look({"loss": finite["loss"]})

    # Metrics

    def observe(self, rollout: Rollout, estimates: Advantages, progress: Mapping[str, float]) -> None:
        """Adds this update's metrics to what the next log line averages."""
        names = ["given"] if isinstance(estimates.scored, GivenScores) else self.rewards.names
        each = of_completions(rollout, estimates, names)
        values, returns, mask = estimates.values, estimates.returns, estimates.mask
        measured = {
            **{name: self.mean(column) for name, column in each.items()},
            "objective/non_score_reward": self.mean(estimates.non_score),
            "objective/rlhf_reward": self.mean(estimates.non_score + estimates.scores),
            **critic_health(values, returns, mask, length=self.args.response_length),
            "critic/value": self.mean(values.masked_fill(~mask, math.nan)),
            "critic/return": self.mean(returns.masked_fill(~mask, math.nan)),
        }
        # What does not apply (a quarter of positions never reached, returns that do not vary) is left out.
        applies = {name: value for name, value in measured.items() if not math.isnan(value)}
        metrics = {**applies, "kl_coef": self.controller.kl_coef, **progress}
        metrics |= {name: value for name, value in estimates.scored.metrics.items() if name not in metrics}
        if "running" in (self.args.score_centering, self.args.score_scaling):
            metrics |= {
                "objective/score_mean_so_far": self.scores_seen.mean,
                "objective/score_std_so_far": self.scores_seen.std,
            }
        # A number that failed stays, as NaN: metrics.jsonl has null for it.
        self.last_metrics = {name: float(x) if math.isfinite(x) else math.nan for name, x in metrics.items()}
        for name, value in self.last_metrics.items():
            self._metrics[name].append(value)
        self.last_metrics[SKIPPED] = self.guard.skipped
        n, kl, squares = self.moments(rollout.kl if rollout.measured else estimates.scores).tolist()
        self._episodes += int(n)
        self.phases.sampled(int(rollout.mask.sum()))
        if not rollout.measured:
            return
        error = math.sqrt(max(squares / n - (kl / n) ** 2, 0.0) / n)
        self._kl_watch.look(kl / n, error, measured["objective/score"])

    def decode_and_score(self, rollout: Rollout, rows: Sequence[Mapping]) -> tuple[DecodedCompletions, Scored]:
        """Decodes completions and scores them.

        Args:
            rollout: B completions.
            rows: their prompts' rows of the data set, one for each completion.
        """
        texts = decoded(self.processing_class, rollout.samples, rows)
        held = partial(at_hand, device=self.accelerator.device)
        arguments = texts.prompts, texts.completions, texts.texts, texts.columns
        return texts, self.rewards(rollout.samples, *arguments, trainer_state=self.state, at_hand=held)

    def remember(self, texts: DecodedCompletions, rollout: Rollout, scored: Scored) -> None:
        """Keeps the first completions of a rollout, for the table of the next log line."""
        if not self.args.log_completions:
            return
        few = slice(self.args.num_completions_to_print)
        self._shown = {
            "prompt": texts.prompts[few],
            "completion": texts.completions[few],
            "score": scored.total[few].tolist(),
            "kl": rollout.kl[few].tolist(),
            "ended": rollout.samples.ended[few].tolist(),
            **{name: list(column)[few] for name, column in scored.extra.items()},
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of PPO's metrics over the updates since the last log line."""
        if "loss" in logs and self._metrics:
            # Trainer's own norm is read after the update has cleared the gradients: always 0. Its own loss forgets, on
            # resuming, the updates since the last log line: ours replaces it.
            logs.pop("grad_norm", None)
            logs = logs | {name: sum(seen) / len(seen) for name, seen in self._metrics.items()}
            logs |= {"episodes": self._episodes, SKIPPED: self.guard.skipped, **self.phases.take()}
            self._metrics.clear()
            if self._shown:
                self.show(self._shown, "completions")
        super().log(logs, start_time)

    def show(self, table: Mapping[str, Sequence[Any]], title: str, *, step: int | None = None) -> None:
        """Prints, saves and reports a table of completions, in the first process. step: None is the current one."""
        if self.is_world_process_zero():
            show_table(
                table,
                title=title,
                step=self.state.global_step if step is None else step,
                directory=Path(self.args.output_dir or ".") / COMPLETIONS_DIR / title,
                reporters=self.callback_handler.callbacks,
                report_to=self.args.report_to or (),
            )

    # What Trainer calls

    def last_good(self) -> str | None:
        whole = [path.parent for path in Path(self.args.output_dir or ".").glob(f"checkpoint-*/{PPO_COMPLETE}")]
        return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the last complete one of output_dir.

        Raises:
            ZooError: prompts or rewards are missing, there is no checkpoint, or it is incomplete.
        """
        if self.train_dataset is None:
            raise ZooError(
                "PPO has no prompts: give train_dataset, or use generate() and step() in a loop of your own."
            )
        _ = self.rewards
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_good()
            if resume_from_checkpoint is None:
                raise ZooError(
                    f"{self.args.output_dir} holds no whole checkpoint to go on from: begin anew, or check output_dir."
                )
        elif resume_from_checkpoint and not (Path(resume_from_checkpoint) / PPO_COMPLETE).is_file():
            raise ZooError(
                f"{resume_from_checkpoint} holds no {PPO_COMPLETE}: it is half-written or not a PPO checkpoint; choose "
                "another, or give True for the last whole one."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimizer, with groups of their own for policy and critic: each has its learning rate."""
        if self.optimizer is None:
            args, actor = self.args, self.actor
            critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
            groups = []
            for part, rate in ((actor.policy, args.learning_rate), (actor.value_model, critic_rate)):
                decayed = set(self.get_decay_parameter_names(part))
                for decay in (True, False):
                    chosen = [p for n, p in part.named_parameters() if p.requires_grad and (n in decayed) == decay]
                    if chosen:
                        weight_decay = args.weight_decay if decay else 0.0
                        groups.append({"params": chosen, "lr": rate, "weight_decay": weight_decay})
            kind, kwargs = self.get_optimizer_cls_and_kwargs(args)
            self.optimizer = kind(groups, **kwargs)
        return self.optimizer

    def prepare_loop(self) -> nn.Module:
        """The model to call in a loop of one's own, with optimizer and schedule made on the first call.

        Without max_steps nobody knows the end of the loop, so the learning rate stays as it was set.
        """
        if self._loop_model is None:
            self.create_optimizer()
            if self.args.max_steps > 0:
                self.create_scheduler(self.args.max_steps)
            self._loop_model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self._loop_model
        return self._loop_model

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Samples held-out prompts, the same random streams each time, and reports score, KL, length and EOS rate."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, dict):
            parts = [self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}") for name, each in given.items()]
            return {name: value for part in parts for name, value in part.items()}
        if given is None:
            raise ZooError("There is nothing to evaluate on: give eval_dataset.")
        if not isinstance(given, Dataset) or PROMPT_INDEX not in given.column_names:
            given = prompts_of(given, self.args, self.processing_class, self.context, self.narrowest)
        seen: dict[str, list[Tensor]] = defaultdict(list)
        shown, self._shown = self._shown, {}
        self.callback_handler.eval_dataloader = self.get_eval_dataloader(given)
        for rows in self.rows_of(self.callback_handler.eval_dataloader):
            rollout = self.rollout(rows, stream=EVAL_STREAM)
            estimates = self.estimate(rollout, self.score(rollout, rows))
            for name, each in of_completions(rollout, estimates, self.rewards.names).items():
                # Over all processes, without the rows that only fill up the last batch.
                seen[name].append(self.accelerator.gather_for_metrics(each))
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self._shown = shown
        metrics = {f"{metric_key_prefix}_{name}": float(torch.cat(each).nanmean()) for name, each in seen.items()}
        self.log({name: value for name, value in metrics.items() if not math.isnan(value)})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def generate_completions(self, sampling: bool = False, *, step: int | None = None) -> dict[str, list[Any]]:
        """Samples completions of the held-out prompts, and shows them with their scores as a table.

        Args:
            sampling: whether to stop after one batch.
            step: the update that the table is of; None for the current one.

        Returns:
            The columns prompt, completion and score.

        Raises:
            ZooError: there is no eval_dataset.
        """
        if self.eval_dataset is None:
            raise ZooError("generate_completions() samples held-out prompts: give eval_dataset.")
        table: dict[str, list[Any]] = {"prompt": [], "completion": [], "score": []}
        held_out = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for rows in chain.from_iterable(map(self.rows_of, map(self.get_eval_dataloader, held_out.values()))):
            rollout = self.rollout(rows, stream=EVAL_STREAM)
            texts, scored = self.decode_and_score(rollout, rows)
            for name, column in zip(table, (texts.prompts, texts.completions, scored.total.tolist()), strict=True):
                table[name] += list(column)
            if sampling:
                break
        few = {name: column[: self.args.num_completions_to_print] for name, column in table.items()}
        self.show(few, "samples", step=step)
        return table

    def log_eval_samples(self) -> None:
        """Shows held-out samples after an update, num_sample_generations times in a run."""
        times = self.args.num_sample_generations
        step = self.state.global_step + 1  # Trainer counts this update after it
        if times and self.eval_dataset is not None and step % max(1, self.state.max_steps // times) == 0:
            self.generate_completions(sampling=True, step=step)

    # Saving and resuming

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy as a plain checkpoint, with tokenizer, `critic/` and PPO's state beside it.

        With merge_adapter, what is saved outside of checkpoints is a LoRA policy merged into its base.
        """
        self.check_weights()
        directory = Path(output_dir or self.args.output_dir or ".")
        # Trainer calls this for a checkpoint, with its directory, and for push_to_hub, without one.
        checkpoint = _internal_call and output_dir is not None
        weights = full_weights(self.policy), full_weights(self.value_model)
        if self.args.should_save:
            directory.mkdir(parents=True, exist_ok=True)
            self.actor.save_pretrained(directory, merge=self.args.merge_adapter and not checkpoint, weights=weights)
            self.processing_class.save_pretrained(directory)
            state = {
                "kl_coef": self.controller.kl_coef,
                "episodes": self._episodes,
                "scores_seen": list(vars(self.scores_seen).values()),
                # JSON has no NaN.
                "unlogged": {
                    name: [None if math.isnan(value) else value for value in seen]
                    for name, seen in self._metrics.items()
                },
            }
            (directory / PPO_STATE).write_text(json.dumps(state, allow_nan=False) + "\n")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's card, made of the policy: the pair of policy and critic has no configuration to read."""
        pair, self.model = self.model, self.policy
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.model = pair

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory = Path(resume_from_checkpoint)
        self.actor.load_checkpoint(directory)
        if not (directory / PPO_STATE).is_file():
            raise ZooError(f"{directory} holds no {PPO_STATE}: it is not a PPO checkpoint; choose another to resume.")
        state = json.loads((directory / PPO_STATE).read_text())
        self.controller = replace(self.controller, kl_coef=state["kl_coef"])
        self.scores_seen = RunningScores(*state.get("scores_seen", ()))
        self._begun = True
        self._episodes = state["episodes"]
        self._metrics = defaultdict(list)
        for name, seen in state["unlogged"].items():
            self._metrics[name] = [math.nan if value is None else value for value in seen]


def _as_they_are(rows: list[Any]) -> Any:
    """Rewards want the rows as they are: nothing is stacked."""
    return rows
