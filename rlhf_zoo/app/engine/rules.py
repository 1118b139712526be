"""Scores completions with the rules that PPO was trained on, for runs without a reward model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ZooError
from ...modeling.chat import append_completion, wrap_completion
from ...modeling.chat_template import Prompt
from ...modeling.sampling.sampler import Samples
from ...rewards import Rewards

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuleRewards:
    """Scores completions by a weighted sum of rules. A rule may also read the columns of a prompt in the data set.

    Attributes:
        rewards: The rules and their weights, without reward models.
        columns_by_prompt: Prompt as the page shows it, without surrounding white space -> the columns of its row in the
            data set, such as the right answer.
        later_timeout: The time limit in seconds after the first call; None to keep the limit of `rewards`.
    """

    rewards: Rewards
    columns_by_prompt: Mapping[str, Mapping[str, Any]]
    later_timeout: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The rules' names in metrics."""
        return tuple(self.rewards.names)

    def score(self, prompt: str, wrapped_prompt: Prompt, samples: Samples, completion: str) -> float | None:
        """Scores one completion.

        Args:
            prompt: The prompt as the visitor typed it.
            wrapped_prompt: The prompt in the form that the policy was trained on.
            samples: The completion's token ids, a batch of one.
            completion: Its text.

        Returns:
            The score; None if a rule fails on this prompt, for example because its right answer is unknown.
        """
        columns = {name: [value] for name, value in self.columns_by_prompt.get(prompt.strip(), {}).items()}
        texts = [append_completion(wrapped_prompt, completion)]
        completions = [wrap_completion(wrapped_prompt, completion)]
        try:
            reward_scores = self.rewards(samples, [wrapped_prompt], completions, texts, columns)
        except ZooError as error:
            log.info("No reward for the prompt %.80r: %s", prompt, error)
            return None
        finally:
            if self.later_timeout is not None:
                self.rewards.timeout = self.later_timeout
        return float(reward_scores.total[0])
