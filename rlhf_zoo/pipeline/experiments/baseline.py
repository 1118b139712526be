"""Baselines of a finished run, on the same data: best-of-n of its SFT policy, more SFT, DPO and RLOO.

RUN/baseline/METHOD/ has a method's results: for best-of-n, the scores of N samples per prompt; for other methods, a
directory for each seed (and β, if the method has one) with run.json and samples.jsonl. Baselines are measured like PPO
in the eval stage: on the same prompts, with the same random numbers. `baseline_report` compares them with PPO.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from datasets import Dataset

from ...errors import ZooError
from ...evaluation.compute import Compute, Passes, ppo_compute
from ...evaluation.frontier import Floats, average_by_prompt
from ...evaluation.head_to_head import read_samples
from ...evaluation.judges.panel import check_answers, is_answer_checker, score_completions
from ...evaluation.judges.rule import RuleJudge
from ...evaluation.measure import Evaluator, make_evaluator, repeat_prompts
from ...evaluation.prompt_groups import group_rows
from ...modeling.chat import append_completion, tokenize_for_reward, tokenize_prompt
from ...modeling.chat_template import Prompt
from ...modeling.critic import CRITIC_DIR, critic_from
from ...modeling.models import count_matmul_parameters
from ...rewards import Rewards
from ...runs.context import RunContext
from ...runs.data.layout import drop_long_prompts
from ...runs.dataset import DataSource, stage_source, training_and_held_out_rows
from ...runs.judge import evaluation_settings
from ...runs.models import ParentCheckpoint
from ...runs.record import first_difference
from ...runs.settings.declared import default_of
from ..stages.evaluate import evaluation_prompts, identity_keys
from ..stages.pairs import open_pairs, training_pairs
from ..stages.train import silence_libraries

FOLDER = "baseline"
TrainedMethod = Literal["sft", "rejection", "dpo", "rloo"]
Method = Literal["best-of-n", TrainedMethod]
METHODS: tuple[Method, ...] = get_args(Method)
#: Methods that use a β to keep the policy near SFT.
METHODS_WITH_BETA: tuple[Method, ...] = ("dpo", "rloo")
#: Keys of PPO that determine the reward of a completion, which baselines use too.
REWARD_KEYS = (
    "reward_model_path", "reward_model_loader", "reward_label", "reward_output", "reward_pad_token", "reward_ensemble",
    "reward_ensemble_lambda", "reward_funcs", "reward_weights", "score_centering", "score_scaling",
)  # fmt: skip
#: Values of n for which best-of-n is reported.
N_VALUES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run that baselines are compared with.

    Attributes:
        context: The run.
        source: The run's data set.
        checkpoints: Stage -> the stage's chosen checkpoint.
        rows: The P held-out rows.
        policy_samples: "sft" or "ppo" -> its P · samples entries in eval/samples.jsonl, ordered by prompt.
    """

    context: RunContext
    source: DataSource
    checkpoints: Mapping[str, ParentCheckpoint]
    rows: Dataset
    policy_samples: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def folder(self) -> Path:
        """The folder RUN/baseline."""
        return self.context.directory / FOLDER

    @property
    def samples_per_prompt(self) -> int:
        """Number of samples of each held-out prompt."""
        return self.context.shared.evaluation.samples

    @cached_property
    def _evaluator(self) -> Evaluator:
        return make_evaluator(self.context, self.checkpoints["sft"].path)

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator, with the headline judge only."""
        return self._evaluator.with_only_headline_judge

    def extra_metrics(self, completions: Sequence[str]) -> dict[str, Floats]:
        """Scores completions by rules other than the headline judge.

        Args:
            completions: P · samples texts, ordered by prompt.

        Returns:
            Name -> (P,) scores by each other rule and, if the headline judge checks answers, figures that combine all
            answers to a prompt.
        """
        per_prompt = self.samples_per_prompt
        _, prompts, columns = repeat_prompts(self.rows, per_prompt)
        figures: dict[str, Floats] = {}
        for judge in self._evaluator.panel.scoring_judges:
            if isinstance(judge, RuleJudge) and judge.name != self.judge_name:
                scores = score_completions(judge, prompts, completions, columns)
                figures[judge.name] = average_by_prompt(scores, per_prompt)
            elif isinstance(judge, RuleJudge) and is_answer_checker(judge):
                checks = check_answers(judge, prompts, completions, columns, samples_per_prompt=per_prompt)
                figures |= checks.joint_figures()
        return figures

    @cached_property
    def groups(self) -> list[int]:
        """The group of each held-out row's prompt. The evaluation resamples these groups."""
        return group_rows(self.rows, self.context.shared.evaluation.group)

    @property
    def rewards(self) -> Rewards:
        """PPO's reward."""
        assert self.evaluator.rewards is not None  # every PPO stage has a reward
        return self.evaluator.rewards

    @property
    def judge_name(self) -> str:
        """Name of the headline judge."""
        return self.evaluator.judge.name

    @cached_property
    def matrix_sizes(self) -> dict[str, int]:
        """Role -> number of parameters in matrices, for policy, reference and, if they exist, reward and critic."""
        policy = count_matmul_parameters(self.evaluator.reference)
        sizes = {"policy": policy, "reference": policy}
        for reward_model in self.rewards.models:
            sizes["reward"] = sizes.get("reward", 0) + count_matmul_parameters(reward_model.model)
        critic_folder = self.checkpoints["ppo"].path / CRITIC_DIR
        if (critic_folder / "config.json").is_file():
            sizes["critic"] = count_matmul_parameters(critic_from(critic_folder))
        return sizes

    @cached_property
    def mean_prompt_length(self) -> float:
        """Mean length of the held-out prompts, in tokens."""
        return self._mean_length(self.rows["prompt"])

    def _mean_length(self, prompts: Sequence[Prompt]) -> float:
        return float(np.mean([len(tokenize_prompt(prompt, self.evaluator.tokenizer)) for prompt in prompts]))

    @cached_property
    def reward_training_compute(self) -> Compute:
        """Compute of training the reward model, which neither DPO nor more SFT needs; zero without a reward model."""
        if "reward" not in self.checkpoints or "reward" not in self.matrix_sizes:
            return Compute()
        pairs, args = self.load_pairs(), self.context.settings("reward").trainer
        epochs = float(args.num_train_epochs)
        if args.max_steps > 0:
            epochs = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps / len(pairs)
        texts = [append_completion(row["prompt"], row[side]) for row in pairs for side in ("chosen", "rejected")]
        tokens = sum(len(tokenize_for_reward(text, self.evaluator.tokenizer, ended=True)) for text in texts)
        return Compute({"reward": Passes(self.matrix_sizes["reward"], trained=tokens * epochs)})

    @property
    def episodes(self) -> int:
        """Number of completions that PPO sampled in training.

        Raises:
            ZooError: The metrics do not record the number.
        """
        counts = [row["episodes"] for row in self.context.record("ppo").metrics() if row.get("episodes") is not None]
        if not counts:
            raise ZooError(
                f"{self.context.record('ppo').metrics_file} does not count PPO's episodes, so a method cannot sample "
                "the same number: train the stage ppo again."
            )
        return int(counts[-1])

    @property
    def update_count(self) -> int:
        """Number of PPO's updates, each of which trains on one rollout."""
        return int(self.context.record("ppo").metrics()[-1]["step"])

    @cached_property
    def ppo_training_compute(self) -> Compute:
        """Compute of PPO's updates, from the completions, lengths and epochs in its metrics."""
        prompt_length = self._mean_length(self.load_prompts()["prompt"])
        episodes, completion_tokens, trained_tokens = 0.0, 0.0, 0.0
        for row in self.context.record("ppo").metrics():
            if row.get("episodes") is not None:
                new_episodes, length = row["episodes"] - episodes, row["completions/length"]
                episodes = row["episodes"]
                completion_tokens += new_episodes * length
                trained_tokens += new_episodes * row["policy/epochs"] * (prompt_length + length)
        return ppo_compute(
            self.matrix_sizes,
            prompt_tokens=episodes * prompt_length,
            completion_tokens=completion_tokens,
            trained_tokens=trained_tokens,
        )

    def load_pairs(self) -> Dataset:
        """Loads the pairs that the reward model was trained on."""
        return training_pairs(*open_pairs(self.context))[0]

    def load_prompts(self) -> Dataset:
        """Loads the prompts on which PPO was trained."""
        rows = training_and_held_out_rows(self.context, "ppo", self.source)[0]
        limit = self.context.settings("ppo").data.max_prompt_length
        return drop_long_prompts(rows, self.evaluator.tokenizer, limit, subject="the prompts")[0]

    def part_settings(self, **settings: Any) -> dict[str, Any]:
        """Returns the settings that identify a part of a baseline, for run.json.

        Args:
            **settings: The part's own settings. PPO's reward, the evaluation and the starting models are added.
        """
        shared, ppo = self.context.shared, self.context.settings("ppo").resolved
        parents = {stage: checkpoint for stage, checkpoint in self.checkpoints.items() if stage != "ppo"}
        return {
            **settings,
            "paid_by": {key: ppo[key] for key in REWARD_KEYS if key in ppo},
            "evaluation": identity_keys(evaluation_settings(self.context)),
            "evaluation_seed": shared.seed,
            "response_length": self.evaluator.max_new_tokens,
            "temperature": self.evaluator.temperature,
            "data": self.source.lineage["fingerprint"],
            "parents": {stage: checkpoint.lineage["fingerprint"] for stage, checkpoint in parents.items()},
        }


def default_betas(context: RunContext) -> list[float]:
    """Returns 0.5, 1 and 2 times PPO's kl_coef, because β has the same meaning in DPO and RLOO.

    Args:
        context: The run. If its kl_coef is 0, PPO's default is used.
    """
    kl_coef = context.settings("ppo").trainer.kl_coef or default_of("ppo", "kl_coef")
    return [kl_coef / 2, kl_coef, kl_coef * 2]


def open_finished_run(context: RunContext, method: Method) -> FinishedRun:
    """Opens a finished run, to compare baselines with it.

    Args:
        context: The run.
        method: The method that the run is compared with.

    Raises:
        ZooError: The recipe lacks a stage, or a stage is not finished or ran with settings other than this command's.
    """
    silence_libraries()
    recipe, stages = context.recipe, list(context.recipe.stages)
    if method == "dpo" and "reward" not in stages:
        raise ZooError(
            f"The recipe {recipe.name} has no stage reward, so DPO has no pairs to learn from: choose another method."
        )
    if "ppo" not in stages:
        raise ZooError(
            f"The recipe {recipe.name} has no stage ppo to compare a baseline with: choose a recipe with PPO."
        )
    for stage in [*stages, "eval"]:
        if context.record(stage).read().get("status") != "finished":
            raise ZooError(
                f"The stage {stage} is not finished in {context.directory}, but baselines are compared with a finished "
                f"run: start `rlhf-zoo run {recipe.cli_name} --output_dir {context.directory}` first."
            )
    _check_settings(context)
    source = stage_source(context, "ppo")
    rows = evaluation_prompts(context, source, context.checkpoint("sft").path)
    checkpoints = {stage: context.checkpoint(stage) for stage in stages}
    path, per_prompt = context.record("eval").path / "samples.jsonl", context.shared.evaluation.samples
    lines = read_samples(path, rows["prompt"], per_prompt)
    return FinishedRun(
        context, source, checkpoints, rows, {side: [line[side] for line in lines] for side in ("sft", "ppo")}
    )


def _check_settings(context: RunContext) -> None:
    """Raises ZooError if a stage or the evaluation ran with settings that differ from this command's."""
    settings = {stage: dict(context.settings(stage).resolved) for stage in context.recipe.stages}
    settings["eval"] = {"evaluation": identity_keys(evaluation_settings(context)), "seed": context.shared.seed}
    for stage, current in settings.items():
        resolved = context.record(stage).read()["resolved"]
        recorded_settings = {key: resolved[key] for key in resolved if key not in ("data", "parents", "own_pairs")}
        if (key := first_difference(recorded_settings, current)) is not None:
            raise ZooError(
                f"The stage {stage} in {context.directory} ran with a different {key} than this command: pass the "
                "flags of the run."
            )
