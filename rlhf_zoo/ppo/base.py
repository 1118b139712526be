"""The parts of PPO that `transformers.Trainer` calls: construction, optimizer, logging, saving and resuming.

The algorithm is in `rlhf_zoo.ppo.trainer`.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from .. import functional as F
from ..errors import NotFinite, ZooError
from ..modeling.fsdp import gather_weights
from ..modeling.fsdp_trainer import ShardTrainer
from ..modeling.length_grouping import LengthGroupingMixin
from ..modeling.value_head import ValueHead
from ..rewards import RewardFunction, RewardModel, Rewards, RewardScores
from .actor_critic import ActorCritic
from .assembly import Parts, assemble, prepare_prompt_data
from .checkpoint import PPO_COMPLETE, PPO_STATE, MarkComplete
from .completions import COMPLETIONS_DIR, DecodedCompletions, decode_rows, show_table
from .config import PPOConfig
from .custom_loop import UserScores
from .engines import make_engine
from .guards import KLWatch, ReferenceWatch
from .kl_controller import KLController, RunningScores
from .metrics import UpdateMetrics, completion_metrics, critic_metrics
from .offload import on_device, place_frozen_models
from .prompt_batches import PromptReader
from .rollout import Advantages, Rollout
from .step_guard import SKIPPED, GuardedTrainer
from .timing import Phases

#: The random streams: the first part of a row's random key. No two of them share random numbers.
TRAIN_STREAM, EVAL_STREAM, CUSTOM_LOOP_STREAM = 0, 1, 2


class BasePPOTrainer(PromptReader, LengthGroupingMixin, ShardTrainer, GuardedTrainer, ABC):
    """A Trainer for a policy and its critic. `PPOTrainer` adds `compute_advantages`, which evaluation calls too."""

    args: PPOConfig
    processing_class: PreTrainedTokenizerBase
    needs_own_pad: ClassVar[bool] = True

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
        """Builds the models and checks them. `rlhf_zoo.PPOTrainer` documents the arguments."""
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
            needs_own_pad=self.needs_own_pad,
        )
        self.reference, self.text_source, self._rewards = parts.reference, parts.text_source, parts.rewards
        self.context_length, self.vocabulary = parts.context_length, parts.vocabulary
        self.smallest_consumer = parts.smallest_consumer
        pad, eos = processing_class.pad_token_id, processing_class.eos_token_id
        self.stop_ids = args.stop_ids(processing_class, parts.policy)
        # Pad with EOS if PAD has no embedding, for example because a script added PAD past the embeddings.
        self.padding_id: int = pad if pad in self.vocabulary else eos
        self.controller = KLController(args.kl_coef, args.kl_target, args.kl_horizon)
        self.running_scores = RunningScores()
        self.last_metrics: dict[str, float] = {}
        self._starts_at_reference, self._start_checked = parts.starts_at_reference, False
        self._reference_watch, self._kl_watch = ReferenceWatch(), KLWatch()
        self._pending_prompts: list[dict] = []
        self._prompts_per_batch: list[int] = []  # of the batches read since the last update
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._completions_table: dict[str, list[Any]] = {}
        self._episodes = self._custom_loop_prompt_count = 0
        self._custom_loop_model: nn.Module | None = None
        self.max_tokens_per_pass = args.max_tokens_per_pass  # halved when memory runs out
        prompt_arguments = args, processing_class, self.context_length, self.smallest_consumer
        super().__init__(
            model=ActorCritic(parts.policy, parts.critic),
            args=args,
            data_collator=data_collator or _keep_rows,
            train_dataset=prepare_prompt_data(train_dataset, *prompt_arguments, for_training=True),
            eval_dataset=prepare_prompt_data(eval_dataset, *prompt_arguments),
            processing_class=processing_class,
            callbacks=[MarkComplete(), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.phases = Phases(self.accelerator.device)
        self.engine = make_engine(args, self.policy, processing_class, self.accelerator)
        place_frozen_models(
            self.reference,
            self._reward_models,
            device=self.accelerator.device,
            trained=self.actor,
            offload=args.offload_frozen,
        )
        if args.fsdp2:
            self._shard_all(optimizers[0])

    def _shard_all(self, optimizer: Any) -> None:
        """Shards the models. Raises ZooError for a shared critic or a passed optimizer, which has unsharded weights."""
        for is_used, feature_and_fix in (
            (isinstance(self.value_model, ValueHead), "a critic on the policy's trunk: set critic to 'policy'"),
            (optimizer is not None, "an optimizer passed to the trainer: remove it"),
        ):
            if is_used:
                raise ZooError(f"fsdp2 does not support {feature_and_fix}, or remove fsdp2.")
        reference = self.reference.separate_model if self.reference else None
        frozen_models = [*(reward.model for reward in self._reward_models), *([] if reference is None else [reference])]
        self.shard(self.policy, self.value_model, frozen=frozen_models)

    @property
    def _reward_models(self) -> Sequence[RewardModel]:
        return self._rewards.models if self._rewards is not None else ()

    @abstractmethod
    def compute_advantages(self, rollout: Rollout, reward_scores: RewardScores) -> Advantages:
        """Computes rewards, advantages and returns.

        Args:
            rollout: B completions.
            reward_scores: The completions' scores.
        """

    @property
    def actor(self) -> ActorCritic:
        """Policy and critic, without the wrapper of DDP or FSDP."""
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
        """The rewards that score completions.

        Raises:
            ZooError: There is no reward.
        """
        if self._rewards is None:
            raise ZooError("PPO has no reward: pass reward_model or reward_funcs, or use step() with your own scores.")
        return self._rewards

    @property
    def precision(self) -> torch.dtype:
        """The precision of the policy's passes. 8 bit counts as bfloat16: rounding to 8 bit depends on the batch."""
        policy: Any = self.policy
        in_8bit = bool(getattr(policy, "is_loaded_in_8bit", False))
        in_bfloat16 = self.args.bf16 or next(policy.parameters()).dtype == torch.bfloat16
        return torch.bfloat16 if in_bfloat16 or in_8bit else torch.float32

    @property
    def is_critic_warmup(self) -> bool:
        """Whether only the critic is trained in this update."""
        return self.state.global_step < self.args.critic_warmup_updates

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """Sums a tensor over processes, elementwise.

        Args:
            x: A tensor of any shape. All processes pass the same shape.
        """
        return self.accelerator.reduce(x, "sum")

    @staticmethod
    def moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns (n, Σx, Σx²), float64.

        Args:
            x: Any shape.
            mask: Of the same shape; None for all entries that are not NaN.
        """
        return F.masked_moments(x, ~x.isnan() if mask is None else mask)

    def mean(self, x: Tensor) -> float:
        """Returns the mean over entries that are not NaN; NaN if there are none.

        Args:
            x: Any shape.
        """
        n, total, _ = self.moments(x).tolist()
        return total / n if n else math.nan

    def check_step(self, metrics: UpdateMetrics) -> None:
        """Checks the loss and the log-probabilities of the current optimizer step. All processes get the same result.

        Args:
            metrics: The update's metrics, with the sums of the step's micro-batches.

        Raises:
            NotFinite: Log-probabilities are not finite. If only the loss is not, `optimizer_step` skips the step.
        """
        tensors = {"loss": metrics.step_loss, "log-probabilities": metrics.step_mismatch}
        finite = self.finite_on_all_processes(tensors)
        if not finite["log-probabilities"]:
            self.check_weights()
            raise NotFinite(
                f"In step {self.state.global_step + 1} log-probabilities of the policy in training are not finite, "
                "although its weights are: lower learning_rate, or set bf16: false."
            )
        self.guard.record({"loss": finite["loss"]})

    def record_metrics(self, rollout: Rollout, advantages: Advantages, loss_metrics: Mapping[str, float]) -> None:
        """Adds this update's metrics to the means of the next log line.

        Args:
            rollout: The rollout of all processes.
            advantages: The rollout's rewards and advantages.
            loss_metrics: Means of the update's losses and their terms.
        """
        reward_names = ["given"] if isinstance(advantages.reward_scores, UserScores) else self.rewards.names
        per_completion_metrics = completion_metrics(rollout, advantages, reward_names)
        values, returns, mask = advantages.values, advantages.returns, advantages.mask
        rollout_metrics = {
            **{name: self.mean(column) for name, column in per_completion_metrics.items()},
            "objective/non_score_reward": self.mean(advantages.non_score),
            "objective/rlhf_reward": self.mean(advantages.non_score + advantages.shaped_scores),
            **critic_metrics(values, returns, mask, max_actions=self.args.response_length),
            "critic/value": self.mean(values.masked_fill(~mask, math.nan)),
            "critic/return": self.mean(returns.masked_fill(~mask, math.nan)),
        }
        # NaN means that a metric does not apply, so the metric is left out. For example, all completions may end before
        # the last quarter of the positions, or explained variance is undefined because returns do not vary.
        applicable_metrics = {name: value for name, value in rollout_metrics.items() if not math.isnan(value)}
        metrics = {**applicable_metrics, "kl_coef": self.controller.kl_coef, **loss_metrics}
        metrics |= {name: value for name, value in advantages.reward_scores.metrics.items() if name not in metrics}
        if "running" in (self.args.score_centering, self.args.score_scaling):
            metrics |= {
                "objective/score_mean_so_far": self.running_scores.mean,
                "objective/score_std_so_far": self.running_scores.std,
            }
        # A metric that is infinite or could not be computed becomes NaN, and metrics.jsonl has null for it.
        self.last_metrics = {name: float(x) if math.isfinite(x) else math.nan for name, x in metrics.items()}
        for name, value in self.last_metrics.items():
            self._metrics[name].append(value)
        self.last_metrics[SKIPPED] = self.guard.skipped
        self._episodes += len(rollout.samples)
        self.phases.count_tokens(int(rollout.mask.sum()))
        if not rollout.has_reference:
            return
        n, kl_sum, kl_square_sum = self.moments(rollout.kl).tolist()
        mean_kl = kl_sum / n
        standard_error = math.sqrt(max(kl_square_sum / n - mean_kl**2, 0.0) / n)
        self._kl_watch.observe(mean_kl, standard_error, rollout_metrics["objective/score"])

    def decode_and_score(self, rollout: Rollout, rows: Sequence[Mapping]) -> tuple[DecodedCompletions, RewardScores]:
        """Decodes completions and scores them.

        Args:
            rollout: B completions.
            rows: One data-set row for each completion, the row of its prompt.
        """
        decoded = decode_rows(self.processing_class, rollout.samples, rows)
        model_context = partial(on_device, device=self.accelerator.device)
        arguments = decoded.prompts, decoded.completions, decoded.texts, decoded.columns
        return decoded, self.rewards(rollout.samples, *arguments, trainer_state=self.state, model_context=model_context)

    def keep_completions_table(
        self, decoded: DecodedCompletions, rollout: Rollout, reward_scores: RewardScores
    ) -> None:
        """Keeps the first completions of a rollout for the table of the next log line.

        Args:
            decoded: The decoded prompts and completions.
            rollout: The rollout.
            reward_scores: The completions' scores.
        """
        if not self.args.log_completions:
            return
        first_rows = slice(self.args.num_completions_to_print)
        self._completions_table = {
            "prompt": decoded.prompts[first_rows],
            "completion": decoded.completions[first_rows],
            "score": reward_scores.total[first_rows].tolist(),
            "kl": rollout.kl[first_rows].tolist(),
            "ended": rollout.samples.ended[first_rows].tolist(),
            **{name: list(column)[first_rows] for name, column in reward_scores.extra.items()},
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs Trainer's metrics and the means of PPO's metrics over the updates since the last log line.

        Args:
            logs: Trainer's metrics.
            start_time: As in Trainer.
        """
        if "loss" in logs and self._metrics:
            # PPO's metrics replace two of Trainer's. Trainer reads grad_norm after the update has cleared the gradients
            # and always gets 0. After resuming, Trainer's loss lacks the updates between log line and checkpoint.
            logs.pop("grad_norm", None)
            logs = logs | {name: sum(values) / len(values) for name, values in self._metrics.items()}
            logs |= {"episodes": self._episodes, SKIPPED: self.guard.skipped, **self.phases.pop_means()}
            self._metrics.clear()
            if self._completions_table:
                self.show(self._completions_table, "completions")
        super().log(logs, start_time)

    def show(self, table: Mapping[str, Sequence[Any]], title: str, *, step: int | None = None) -> None:
        """Prints, saves and reports a table of completions, in the first process only.

        Args:
            table: Columns of equal length.
            title: The table's name.
            step: The update to which the table belongs; None for the current one.
        """
        if self.is_world_process_zero():
            show_table(
                table,
                title=title,
                step=self.state.global_step if step is None else step,
                directory=Path(self.args.output_dir or ".") / COMPLETIONS_DIR / title,
                reporters=self.callback_handler.callbacks,
                report_to=self.args.report_to or (),
            )

    def last_complete_checkpoint(self) -> str | None:
        """Returns the last complete checkpoint in output_dir; None if there is none."""
        checkpoints = [path.parent for path in Path(self.args.output_dir or ".").glob(f"checkpoint-*/{PPO_COMPLETE}")]
        return str(max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]))) if checkpoints else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: A checkpoint, or True for the last complete one in output_dir.
            *args: As in Trainer.
            **kwargs: As in Trainer.

        Raises:
            ZooError: Prompts or rewards are missing, or the checkpoint is missing or incomplete.
        """
        if self.train_dataset is None:
            raise ZooError(
                "PPO has no prompts: pass train_dataset, or write your own training loop with generate() and step()."
            )
        _ = self.rewards  # raises ZooError if there are none, before training is set up
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_complete_checkpoint()
            if resume_from_checkpoint is None:
                raise ZooError(f"{self.args.output_dir} has no complete checkpoint to resume from: check output_dir.")
        elif resume_from_checkpoint and not (Path(resume_from_checkpoint) / PPO_COMPLETE).is_file():
            raise ZooError(
                f"{resume_from_checkpoint} has no {PPO_COMPLETE}: it is incomplete or not a PPO checkpoint; choose "
                "another, or pass True for the last complete one."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes one optimizer, if none was passed, with separate learning rates for policy and critic.

        Args:
            model: Ignored; Trainer passes it.
        """
        if self.optimizer is None:
            args, actor = self.args, self.actor
            critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
            groups = []
            for module, rate in ((actor.policy, args.learning_rate), (actor.value_model, critic_rate)):
                decay_names = set(self.get_decay_parameter_names(module))
                for decay in (True, False):
                    weights = [
                        weight
                        for name, weight in module.named_parameters()
                        if weight.requires_grad and (name in decay_names) == decay
                    ]
                    if weights:
                        weight_decay = args.weight_decay if decay else 0.0
                        groups.append({"params": weights, "lr": rate, "weight_decay": weight_decay})
            optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(args)
            self.optimizer = optimizer_class(groups, **kwargs)
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the policy as a plain checkpoint, with the tokenizer, `critic/` and PPO's state in one folder.

        With merge_adapter, a LoRA policy is merged into its base. Checkpoints keep the adapter, to resume training it.

        Args:
            output_dir: The folder; None for args.output_dir.
            _internal_call: Whether Trainer itself calls this method.
        """
        self.check_weights()
        directory = Path(output_dir or self.args.output_dir or ".")
        # Trainer passes a directory when it saves a checkpoint, and none for push_to_hub.
        is_checkpoint = _internal_call and output_dir is not None
        weights = gather_weights(self.policy), gather_weights(self.value_model)
        if self.args.should_save:
            directory.mkdir(parents=True, exist_ok=True)
            self.actor.save_pretrained(directory, merge=self.args.merge_adapter and not is_checkpoint, weights=weights)
            self.processing_class.save_pretrained(directory)
            state = {
                "kl_coef": self.controller.kl_coef,
                "episodes": self._episodes,
                "scores_seen": list(vars(self.running_scores).values()),
                # JSON has no NaN.
                "unlogged": {
                    name: [None if math.isnan(value) else value for value in values]
                    for name, values in self._metrics.items()
                },
            }
            (directory / PPO_STATE).write_text(json.dumps(state, allow_nan=False) + "\n")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Makes Trainer's card for the policy alone, because `ActorCritic` has no configuration.

        Args:
            *args: As in Trainer.
            **kwargs: As in Trainer.
        """
        actor_critic, self.model = self.model, self.policy
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.model = actor_critic

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory = Path(resume_from_checkpoint)
        self.actor.load_checkpoint(directory)
        if not (directory / PPO_STATE).is_file():
            raise ZooError(f"{directory} has no {PPO_STATE}: it is not a PPO checkpoint; choose another to resume.")
        state = json.loads((directory / PPO_STATE).read_text())
        self.controller = replace(self.controller, kl_coef=state["kl_coef"])
        self.running_scores = RunningScores(*state.get("scores_seen", ()))
        self._start_checked = True
        self._episodes = state["episodes"]
        self._metrics = defaultdict(list)
        for name, values in state["unlogged"].items():
            self._metrics[name] = [math.nan if value is None else value for value in values]


def _keep_rows(rows: list[Any]) -> Any:
    """Returns the rows unchanged, because reward functions read their columns."""
    return rows
