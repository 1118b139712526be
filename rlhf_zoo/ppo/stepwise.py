"""The methods of PPO for a custom training loop, which scores the completions itself: `generate` and `step`."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ZooError
from ..modeling.chat_template import Prompt
from ..modeling.reserved_columns import GENERATION_INDEX, PROMPT_INDEX, PROMPT_TOKENS
from ..rewards import RewardScores
from .base import CUSTOM_LOOP_STREAM
from .custom_loop import encode_prompt, samples_from_user, scores_from_user
from .held_out import HeldOutTrainer
from .rollout import Rollout


class StepwiseTrainer(HeldOutTrainer):
    """Adds `generate` and `step` for a custom training loop. Its abstract methods are the phases that `step` needs."""

    @abstractmethod
    def gather_rollouts(self, rollout: Rollout, reward_scores: RewardScores) -> tuple[Rollout, RewardScores]:
        """Joins the rollouts of all processes. The completions of a prompt stay together."""

    @abstractmethod
    def ppo_update(self, model: nn.Module, rollout: Rollout, reward_scores: RewardScores) -> Tensor:
        """Makes the PPO update for a scored rollout."""

    def prepare_loop(self) -> nn.Module:
        """Prepares the model, the optimizer and the schedule on the first call.

        Without max_steps, the length of the loop is unknown, so the learning rate stays constant, unless a schedule was
        passed.

        Returns:
            The model to call, wrapped for training.
        """
        if self._custom_loop_model is None:
            self.create_optimizer()
            if self.args.max_steps > 0:
                self.create_scheduler(self.args.max_steps)
            self._custom_loop_model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self._custom_loop_model
        return self._custom_loop_model

    def generate(self, prompts: Sequence[Prompt], *, num_generations: int = 1) -> list[Tensor]:
        """Samples completions at the training temperature.

        Args:
            prompts: Texts, conversations or token ids.
            num_generations: The number of completions per prompt.

        Returns:
            1-D tensors of token ids without the prompt. If a completion ended, its last token is the end token.
            Completions of the same prompt are adjacent.

        Raises:
            ZooError: There are no prompts, or a prompt is empty, is too long or has unknown ids.
        """
        self.prepare_loop()
        if isinstance(prompts, str):
            raise ZooError("generate() got a single text: pass a list of prompts.")
        if not len(prompts) or num_generations < 1:
            raise ZooError(
                f"generate() got {len(prompts)} prompts and num_generations {num_generations}: both must be at least 1."
            )
        rows = [
            {
                PROMPT_TOKENS: encode_prompt(prompt, index, self),
                PROMPT_INDEX: self.global_index(self._custom_loop_prompt_count + index),
                GENERATION_INDEX: generation,
            }
            for index, prompt in enumerate(prompts)
            for generation in range(num_generations)
        ]
        self._custom_loop_prompt_count += len(prompts)
        rollout = self.rollout(rows, stream=CUSTOM_LOOP_STREAM)
        device = rollout.mask.device
        return [torch.tensor(ids, device=device) for ids in rollout.samples.completion_id_lists()]

    def step(self, queries: Sequence[Any], responses: Sequence[Any], scores: Sequence[Any]) -> dict[str, float]:
        """Makes one PPO update from the user's completions and scores: the same update that `train` makes.

        Args:
            queries: B texts, conversations or sequences of token ids.
            responses: B texts or sequences of token ids.
            scores: B numbers.

        Returns:
            This update's metrics, by the names in docs/metrics.md.

        Raises:
            ZooError: Counts differ, a query or response cannot be used, a score is not finite, or score_centering is
                "prompt".
        """
        if self.args.score_centering == "prompt":
            raise ZooError(
                "step() does not know which responses share a prompt, but score_centering is 'prompt': set it to "
                "'running' or 'none'."
            )
        model = self.prepare_loop()
        samples = samples_from_user(queries, responses, self)
        rollout = self.make_rollout(samples, recompute_logprobs=True)
        self.ppo_update(model, *self.gather_rollouts(rollout, scores_from_user(scores, samples)))
        self._metrics.clear()  # the caller gets the metrics, so Trainer's next log line must not average them
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.state.global_step += 1
        return self.last_metrics
