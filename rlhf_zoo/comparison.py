"""One prompt through the SFT and the PPO policy, with the same random numbers, and what each completion is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .data import tokenize_prompt
from .errors import ZooError
from .models import disable_dropout, load_causal, load_classifier
from .rewards import RewardModel
from .rewards.model import same_tokenizer
from .sampling import Samples, sample, token_logprobs

__all__ = ["Compared", "Comparison", "Side"]

COMPARE_STREAM = 7


@dataclass(frozen=True)
class Side:
    """One policy's completion of a prompt.

    reward: (s − μ)/σ of prompt and completion, None without a reward model. tokens: the completion token by token, the
    end-of-sequence token included. token_log_ratio: log π_PPO − log π_SFT of each of them at the sampling temperature,
    in nats. log_ratio: their sum, which says how much likelier PPO makes this one completion: a sample, not a KL. Its
    mean over many completions of PPO is KL(PPO‖SFT); over many of SFT it is −KL(SFT‖PPO). length: tokens. ended:
    whether the policy stopped by itself.
    """

    completion: str
    reward: float | None
    log_ratio: float
    token_log_ratio: tuple[float, ...]
    tokens: tuple[str, ...]
    length: int
    ended: bool


@dataclass(frozen=True)
class Compared:
    """The two completions of one prompt, and how they were drawn."""

    prompt: str
    seed: int
    temperature: float
    max_new_tokens: int
    sft: Side
    ppo: Side

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Comparison:
    """An SFT policy, the PPO policy that was trained from it, and the reward model between them, loaded once."""

    def __init__(
        self,
        *,
        ppo: PreTrainedModel,
        sft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardModel | None = None,
    ) -> None:
        """The policies share `tokenizer`; reward None: nothing is scored."""
        for policy in (ppo, sft):
            disable_dropout(policy)
            policy.requires_grad_(False).eval()
        self._policies = {"sft": sft, "ppo": ppo}
        self._tokenizer = tokenizer
        self._reward = reward

    @classmethod
    def load(
        cls, *, ppo: str | Path, sft: str | Path, reward: str | Path | None = None, device: str | None = None
    ) -> Comparison:
        """Loads checkpoints from folders or the Hub, onto `device` (default: a GPU if there is one).

        Raises ZooError for what is no such model, and for policies with different tokenizers: the log-ratio of a
        completion is defined only where its tokens mean the same to both.
        """
        tokenizer, other = _load_tokenizer(ppo), _load_tokenizer(sft)
        if not same_tokenizer(tokenizer, other):
            raise ZooError(
                f"{ppo} and {sft} have different tokenizers, so their completions cannot be compared token by token: "
                "give the SFT model that PPO started from."
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        scorer = None
        if reward is not None:
            scorer = RewardModel(load_classifier(reward), _load_tokenizer(reward), tokenizer)
            scorer.to(device)
        policies = {"ppo": load_causal(ppo), "sft": load_causal(sft)}
        for policy in policies.values():
            nn.Module.to(policy, device)
        return cls(**policies, tokenizer=tokenizer, reward=scorer)

    @property
    def context(self) -> int | None:
        """Tokens that prompt and completion may have together, None if the architecture sets no bound."""
        known = [getattr(policy.config, "max_position_embeddings", None) for policy in self._policies.values()]
        return min((length for length in known if length), default=None)

    @property
    def has_reward(self) -> bool:
        return self._reward is not None

    def compare(self, prompt: str, *, seed: int = 1, temperature: float = 1.0, max_new_tokens: int = 32) -> Compared:
        """Samples one completion from each policy with the same random stream, and measures both.

        Equal arguments give equal results. Raises ZooError for a prompt that is empty, leaves too little room in the
        context or is no valid text, and for a seed, temperature or length out of range.
        """
        _check_numbers(seed, temperature, max_new_tokens)
        ids = self._encode(prompt, max_new_tokens)
        sides = {}
        for name, policy in self._policies.items():
            drawn = sample(
                policy,
                [ids],
                keys=[(COMPARE_STREAM,)],
                seed=seed,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_ids=[] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id],
                pad_id=self._tokenizer.pad_token_id or 0,  # one row is never padded
            )
            sides[name] = self._measure(prompt, drawn, temperature)
        return Compared(prompt, seed, temperature, max_new_tokens, sft=sides["sft"], ppo=sides["ppo"])

    def _encode(self, prompt: str, room: int) -> list[int]:
        if not prompt.strip():
            raise ZooError("The prompt is empty: write the beginning of a text.")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ZooError("The prompt holds half of a character (a lone surrogate): remove it.") from error
        ids = tokenize_prompt(prompt, self._tokenizer)
        if not ids:
            raise ZooError("The tokenizer leaves nothing of this prompt: write other characters.")
        if self.context is not None and len(ids) + room > self.context:
            raise ZooError(
                f"The prompt has {len(ids)} tokens, and with {room} new ones it passes the {self.context} that these "
                "models can read: shorten it or ask for fewer."
            )
        return ids

    def _measure(self, prompt: str, drawn: Samples, temperature: float) -> Side:
        # Both by the same forward pass: where the policies agree, the ratio is exactly 0.
        ppo, sft = (token_logprobs(self._policies[name], drawn, temperature=temperature) for name in ("ppo", "sft"))
        ratios = (ppo - sft)[0].tolist()
        ids = drawn.token_lists()[0]
        completion = self._decode(ids)
        reward = None
        if self._reward is not None:
            reward = float(self._reward.score_samples(drawn, [prompt + completion])[0])
        return Side(
            completion=completion,
            reward=reward,
            log_ratio=math.fsum(ratios),
            token_log_ratio=tuple(ratios),
            tokens=tuple(str(self._tokenizer.decode([one])) for one in ids),
            length=len(ids),
            ended=bool(drawn.ended[0]),
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ZooError(f"{path} has no tokenizer that can be loaded: save the tokenizer with the model.") from error


def _check_numbers(seed: Any, temperature: Any, max_new_tokens: Any) -> None:
    if not _is_whole(seed) or seed < 0:
        raise ZooError(f"The seed is {seed!r}: give a whole number that is not negative.")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ZooError(f"The temperature is {temperature!r}: give a number above 0.")
    if not _is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ZooError(f"The number of new tokens is {max_new_tokens!r}: give a whole number, at least 1.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
