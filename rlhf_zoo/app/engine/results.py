"""What a comparison says: frozen, and in the types of JSON when asked."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Side:
    """One policy's completion of a prompt, finished or as far as it is written.

    What is named token_… has a value for each token, in nats, over the whole vocabulary at the sampling temperature;
    top-p changes which tokens are drawn and none of these.

    Attributes:
        completion: Its text.
        reward: (s − μ)/σ of prompt and completion; None without a reward model and while it is being written.
        log_ratio: The sum of token_log_ratio: how much likelier PPO makes this one completion. That is a sample, not a
            KL. Without top-p its mean over many completions of PPO is KL(PPO‖SFT); over many of SFT it is −KL(SFT‖PPO).
        token_log_ratio: log π_PPO − log π_SFT of the drawn token.
        tokens: The completion token by token, the end-of-sequence token included; joined, they are its text.
        length: How many tokens.
        ended: Whether the policy stopped by itself.
        stop: "eos", "length", or None while it is being written.
        token_ids: Ids of `tokens`.
        token_logprob_ppo: log π_PPO of the drawn token.
        token_logprob_sft: log π_SFT of the drawn token.
        kl: The sum of token_kl along this completion.
        token_kl: KL(π_PPO‖π_SFT) of the two distributions that the token was drawn under, exact at that position.
        token_kl_reverse: KL(π_SFT‖π_PPO), exact at that position.
        token_entropy_ppo: Of the PPO policy there.
        token_entropy_sft: Of the SFT policy there.
        token_values: What PPO's critic expects, before each token, of the reward still to come with its KL penalty,
            in units of the shaped reward; None without a critic and while the completion is being written.
    """

    completion: str
    reward: float | None
    log_ratio: float
    token_log_ratio: tuple[float, ...]
    tokens: tuple[str, ...]
    length: int
    ended: bool
    stop: str | None = None
    token_ids: tuple[int, ...] = ()
    token_logprob_ppo: tuple[float, ...] = ()
    token_logprob_sft: tuple[float, ...] = ()
    kl: float = 0.0
    token_kl: tuple[float, ...] = ()
    token_kl_reverse: tuple[float, ...] = ()
    token_entropy_ppo: tuple[float, ...] = ()
    token_entropy_sft: tuple[float, ...] = ()
    token_values: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Compared:
    """The two completions of one prompt, and how they were drawn."""

    prompt: str
    seed: int
    temperature: float
    max_new_tokens: int
    sft: Side
    ppo: Side
    top_p: float = 1.0

    @property
    def note(self) -> str:
        """What must be read beside the figures where top-p cut the tail off; "" otherwise."""
        if self.top_p >= 1:
            return ""
        return (
            f"Drawn with top-p {self.top_p:g}: only from the likeliest tokens that hold this share of the probability. "
            "Log-probabilities, log-ratio and KL are of the whole distribution, so the mean log-ratio of such "
            "completions is not a KL."
        )

    def to_json(self) -> dict[str, Any]:
        """Every field and `note`; a figure that is not finite is null."""
        return {**_finite(asdict(self)), "note": self.note}


@dataclass(frozen=True)
class Snapshot:
    """n completions of one prompt from each policy, as far as they are written. Row i of both drew with one stream."""

    prompt: str
    seed: int
    temperature: float
    top_p: float
    max_new_tokens: int
    sft: tuple[Side, ...]
    ppo: tuple[Side, ...]
    done: bool

    @property
    def n(self) -> int:
        return len(self.ppo)

    @property
    def note(self) -> str:
        return self.pair().note

    def pair(self, index: int = 0) -> Compared:
        """Row `index` of both policies."""
        return Compared(
            self.prompt,
            self.seed,
            self.temperature,
            self.max_new_tokens,
            sft=self.sft[index],
            ppo=self.ppo[index],
            top_p=self.top_p,
        )

    def to_json(self) -> dict[str, Any]:
        """Every field, `n` and `note`; a figure that is not finite is null."""
        return {**_finite(asdict(self)), "n": self.n, "note": self.note}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
