"""The results of a comparison, which convert to JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from ...fileio import jsonable


@dataclass(frozen=True)
class PolicyCompletion:
    """One policy's completion of a prompt, complete or in progress.

    Log-probabilities, log-ratios, KL and entropies are in nats, over the full vocabulary, at the sampling temperature.
    Top-p changes which tokens are sampled, but not these figures of a token.

    Attributes:
        completion: The text.
        reward: The reward model's normalized score (s − μ)/σ, or the weighted sum of rules; None if there is no
            reward, if a rule does not apply to the prompt, or while in progress.
        log_ratio: Sum of token_log_ratio: how much more likely PPO makes this one completion, in nats. It is a sample,
            not a KL. Without top-p, its mean is KL(PPO‖SFT) over PPO's completions, and −KL(SFT‖PPO) over SFT's.
        token_log_ratio: log π_PPO − log π_SFT of the sampled token.
        tokens: The text of each token. Unlike `completion`, they include the texts of special tokens, and white space
            that a chat template puts before an answer.
        length: Number of tokens.
        ended: Whether the policy sampled an end-of-sequence token.
        stop: "eos" or "length"; None while in progress.
        token_ids: Ids of `tokens`.
        token_logprob_ppo: log π_PPO of the sampled token.
        token_logprob_sft: log π_SFT of the sampled token.
        kl: Sum of token_kl over this completion.
        token_kl: KL(π_PPO‖π_SFT) at each position, exact.
        token_kl_reverse: KL(π_SFT‖π_PPO) at each position, exact.
        token_entropy_ppo: Entropy of the PPO policy at each position.
        token_entropy_sft: Entropy of the SFT policy at each position.
        token_values: The critic's value before each token: the expected sum of the remaining shaped rewards, which
            include the KL penalty; None if there is no critic, or while in progress.
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
class CompletionPair:
    """The two completions of one prompt, and their sampling parameters."""

    prompt: str
    seed: int
    temperature: float
    max_new_tokens: int
    sft: PolicyCompletion
    ppo: PolicyCompletion
    top_p: float = 1.0

    @property
    def note(self) -> str:
        """A caveat on the figures if top-p is below 1; otherwise ""."""
        if self.top_p >= 1:
            return ""
        return (
            f"Sampled with top-p {self.top_p:g}: only from the most likely tokens with this total probability. "
            "Log-probabilities, log-ratios and KL refer to the full distribution, so the mean log-ratio of such "
            "completions is not a KL."
        )

    def to_json(self) -> dict[str, Any]:
        """Returns every field and `note`; a figure that is not finite is null."""
        return {**jsonable(asdict(self), nonfinite_as_text=False), "note": self.note}


@dataclass(frozen=True)
class Snapshot:
    """n completions of one prompt from each policy, in progress or done. Completion i of either uses random stream i.

    Attributes:
        done: Whether all completions are complete.
        is_chat: Whether the prompt is a user's message that the completions answer. Otherwise they continue its text.
        initial_policy: What sentences call the policy that PPO started from.
    """

    prompt: str
    seed: int
    temperature: float
    top_p: float
    max_new_tokens: int
    sft: tuple[PolicyCompletion, ...]
    ppo: tuple[PolicyCompletion, ...]
    done: bool
    is_chat: bool = False
    initial_policy: str = "SFT"

    @property
    def n(self) -> int:
        return len(self.ppo)

    @property
    def note(self) -> str:
        return self.pair().note

    def pair(self) -> CompletionPair:
        """Returns the first completion of each policy."""
        sft, ppo = self.sft[0], self.ppo[0]
        return CompletionPair(self.prompt, self.seed, self.temperature, self.max_new_tokens, sft, ppo, self.top_p)

    def to_json(self) -> dict[str, Any]:
        """Returns every field, `n` and `note`; a figure that is not finite is null."""
        return {**jsonable(asdict(self), nonfinite_as_text=False), "n": self.n, "note": self.note}
