"""Samples one prompt from the SFT and the PPO policy with the same random numbers, and scores both completions."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ZooError
from ...modeling.alignment import IncrementalDetokenizer
from ...modeling.chat import append_completion, decode_completions, strip_template_space, tokenize_prompt, wrap_prompt
from ...modeling.chat_template import Prompt
from ...modeling.devices import MEMORY_ERRORS, as_memory_error, best_device, move
from ...modeling.loading import load_tokenizer
from ...modeling.models import context_length_of, disable_dropout, load_causal
from ...modeling.sampling.sampler import Samples, Vocabulary
from ...modeling.special_tokens import stop_ids
from ...modeling.text_ids import same_token_ids
from ...modeling.value_head import ValueHead
from ...ppo.actor_critic import ActorCritic
from ...ppo.saved_critic import load_critic
from ...ppo.token_checks import TokenConsumer, check_ids
from ...rewards import RewardEnsemble, RewardModel
from ...rewards.loading import load_reward
from .fair_lock import FairLock
from .limits import Limits, check_prompt, check_sampling
from .lockstep import LockstepSampler, SampledToken
from .results import CompletionPair, PolicyCompletion, Snapshot
from .rules import RuleRewards

TOKEN_METRICS = ("log_ratio", "logprob_ppo", "logprob_sft", "kl", "kl_reverse", "entropy_ppo", "entropy_sft")
OUT_OF_MEMORY_HINT = "request fewer completions or fewer tokens, or shorten the prompt."


@dataclass(frozen=True)
class _Request:
    """A checked request. The keys of `sampling` are seed, temperature, top_p and max_new_tokens."""

    prompt: str
    prompt_ids: tuple[int, ...]
    n: int
    sampling: Mapping[str, Any]


class Sampling(TypedDict, total=False):
    """The sampling parameters of `Comparison.stream`."""

    seed: int
    temperature: float
    top_p: float
    max_new_tokens: int
    n: int


class Comparison:
    """An SFT policy, the PPO policy trained from it, and what scores their completions, loaded once.

    Threads may share it. A thread locks the models for one token at a time, and waiting threads get the lock in order.

    Args:
        ppo: The PPO policy.
        sft: The SFT policy.
        tokenizer: The tokenizer of both policies.
        reward: Scores completions; None if there is no reward model.
        critic: The critic of the PPO policy; None if there is no critic.
        rules: Scores completions if there is no reward model; None if there are no rules.
        limits: Bounds of one request; None for the default `Limits`.
        initial_policy: What sentences call the SFT policy: "the base" if PPO started from a base model.
    """

    def __init__(
        self,
        *,
        ppo: PreTrainedModel,
        sft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardModel | RewardEnsemble | None = None,
        critic: PreTrainedModel | ValueHead | None = None,
        rules: RuleRewards | None = None,
        limits: Limits | None = None,
        initial_policy: str = "SFT",
    ) -> None:
        self._policies = {"sft": _freeze_for_inference(sft), "ppo": _freeze_for_inference(ppo)}
        self._tokenizer = tokenizer
        self._reward = reward
        self.rules = rules if reward is None else None
        self._critic = None if critic is None else ActorCritic(ppo, critic).eval().requires_grad_(False)
        self._lock = FairLock()
        self.limits = limits or Limits()
        self.initial_policy = initial_policy

    @classmethod
    def load(
        cls,
        *,
        ppo: str | Path,
        sft: str | Path,
        reward: str | Path | Sequence[str | Path] | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        loader: str | None = None,
        rules: RuleRewards | None = None,
        device: str | torch.device | None = None,
        limits: Limits | None = None,
        initial_policy: str = "SFT",
    ) -> Comparison:
        """Loads checkpoints from folders or the Hub.

        If `ppo` is a folder with a critic, the critic is loaded too.

        Args:
            ppo: The PPO policy.
            sft: The SFT policy that it started from.
            reward: The reward model. Several models form an ensemble. None or an empty sequence for no reward model.
            reward_kwargs: Other keyword arguments of `load_reward`.
            loader: Name of the class or function that loads the reward model; see `load_reward_model`.
            rules: Scores completions if there is no reward model; None if there are no rules.
            device: Device of the models; None for the accelerator if there is one, otherwise the CPU.
            limits: Bounds of one request; None for the default `Limits`.
            initial_policy: As for the constructor.

        Raises:
            ZooError: A checkpoint cannot be loaded, or the policies have different tokenizers. The log-ratio of a
                completion is defined only if a token id means the same text to both policies.
        """
        tokenizer = load_tokenizer(ppo)
        if not same_token_ids(tokenizer, load_tokenizer(sft)):
            raise ZooError(
                f"{ppo} and {sft} have different tokenizers, so their completions cannot be compared token by token: "
                "pass the SFT model that PPO started from."
            )
        device = best_device() if device is None else torch.device(device)
        reward_model = None
        reward_paths = [reward] if isinstance(reward, str | Path) else list(reward or ())
        if reward_paths:
            reward_model = load_reward(
                reward_paths, tokenizer, move=partial(move, device=device), loader=loader, **(reward_kwargs or {})
            )
        policies = {"ppo": load_causal(ppo), "sft": load_causal(sft)}
        for policy in policies.values():
            move(policy, device)
        critic = load_critic(ppo, policies["ppo"])
        if critic is not None:
            move(critic, device)
        return cls(
            **policies,
            tokenizer=tokenizer,
            reward=reward_model,
            critic=critic,
            rules=rules,
            limits=limits,
            initial_policy=initial_policy,
        )

    def with_policy(self, ppo: PreTrainedModel, *, critic: PreTrainedModel | ValueHead | None = None) -> Comparison:
        """Creates a comparison with another PPO policy. It shares the other models and the lock.

        Args:
            ppo: A policy with the same tokenizer, on the same device.
            critic: The policy's critic, on the same device; None if it has no critic.
        """
        comparison = Comparison(
            ppo=ppo,
            sft=self._policies["sft"],
            tokenizer=self._tokenizer,
            reward=self._reward,
            critic=critic,
            rules=self.rules,
            limits=self.limits,
            initial_policy=self.initial_policy,
        )
        comparison._lock = self._lock
        return comparison

    @property
    def is_chat(self) -> bool:
        """Whether a prompt becomes a user turn of the tokenizer's chat template."""
        return not isinstance(wrap_prompt("prompt", self._tokenizer), str)

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens of prompt and completion together; None if the architecture sets no bound."""
        return context_length_of(*self._policies.values())

    @property
    def has_reward_model(self) -> bool:
        return self._reward is not None

    @property
    def has_critic(self) -> bool:
        return self._critic is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def device(self) -> torch.device:
        return next(self._policies["sft"].parameters()).device

    def compare(
        self, prompt: str, *, seed: int = 1, temperature: float = 1.0, top_p: float = 1.0, max_new_tokens: int = 32
    ) -> CompletionPair:
        """Samples one completion from each policy with the same random stream, and scores both.

        Equal arguments give equal results.

        Args:
            prompt: The prompt.
            seed: Seed of the random stream, at least 0.
            temperature: Divides the logits.
            top_p: Samples from the most likely tokens with this total probability; 1 samples from all.
            max_new_tokens: Largest number of tokens in a completion.

        Raises:
            ZooError: The prompt is empty, invalid or too long for the context; a number is out of range; a policy's
                logits are NaN; or memory runs out.
        """
        request = self._check_request(prompt, seed, temperature, top_p, max_new_tokens, 1)
        *_, last_snapshot = self._stream_snapshots(request, every=math.inf)  # builds only the first and last snapshots
        return last_snapshot.pair()

    def stream(
        self,
        prompt: str,
        *,
        seed: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 32,
        n: int = 1,
        every: float = 0.0,
    ) -> Generator[Snapshot, None, None]:
        """Samples n completions from each policy, and yields snapshots of them while they grow.

        The first completions equal those of `compare`. Completion i of either policy uses random stream i of the seed.
        Close the generator to stop sampling and free its memory.

        Args:
            prompt: See `compare`.
            seed: See `compare`.
            temperature: See `compare`.
            top_p: See `compare`.
            max_new_tokens: See `compare`.
            n: Number of completions of each policy.
            every: Shortest time between two snapshots, in seconds. The last snapshot is never skipped.

        Returns:
            The snapshots. `done` is True for the last one only.

        Raises:
            ZooError: See `compare`. Invalid arguments raise it at once; NaN and lack of memory, during iteration.
        """
        return self._stream_snapshots(self._check_request(prompt, seed, temperature, top_p, max_new_tokens, n), every)

    def _stream_snapshots(self, request: _Request, every: float) -> Generator[Snapshot, None, None]:
        next_time = -math.inf
        for completions in self._generate(request):
            if time.monotonic() >= next_time or all(completion.stop is not None for completion in completions):
                yield self._take_snapshot(request, completions)
                next_time = time.monotonic() + every

    def check(self, prompt: str, **sampling: Unpack[Sampling]) -> None:
        """Checks the arguments of `stream`.

        Args:
            prompt: The prompt.
            **sampling: See `stream`.

        Raises:
            ZooError: `stream` would refuse them.
        """
        self.stream(prompt, **sampling)  # returns a generator, so no model runs before its first snapshot is requested

    def count_tokens(self, prompt: str) -> int:
        """Counts the tokens of a prompt.

        Args:
            prompt: The prompt.
        """
        return len(self._tokenize_prompt(prompt))

    def _tokenize_prompt(self, prompt: str) -> list[int]:
        with self._lock:  # a tokenizer that two threads use at once can raise "Already borrowed"
            return list(tokenize_prompt(wrap_prompt(prompt, self._tokenizer), self._tokenizer))

    def _check_request(
        self, prompt: str, seed: int, temperature: float, top_p: float, max_new_tokens: int, n: int
    ) -> _Request:
        """Checks the arguments of `stream` and tokenizes the prompt."""
        limits = self.limits
        if self.context_length is not None:  # an error must not name a limit that exceeds the context
            limits = replace(limits, max_new_tokens=min(limits.max_new_tokens, max(self.context_length - 1, 1)))
        check_sampling(seed, temperature, top_p, max_new_tokens, n, limits)
        check_prompt(prompt, limits)
        ids = self._tokenize_prompt(prompt)
        if not ids:
            raise ZooError("The tokenizer produces no tokens for this prompt: enter a different prompt.")
        if self.context_length is not None and len(ids) + max_new_tokens > self.context_length:
            available_tokens = self.context_length - len(ids)
            alternative = f" or ask for at most {available_tokens} new tokens" if available_tokens > 0 else ""
            raise ZooError(
                f"The prompt has {len(ids)} tokens; with {max_new_tokens} new tokens it exceeds the context of "
                f"{self.context_length}: shorten it{alternative}."
            )
        for policy in self._policies.values():
            check_ids([ids], TokenConsumer.of(policy))
        sampling = {"temperature": float(temperature), "top_p": float(top_p), "max_new_tokens": max_new_tokens}
        return _Request(prompt, tuple(ids), n, {"seed": seed, **sampling})

    def _generate(self, request: _Request) -> Generator[Sequence[_PartialCompletion], None, None]:
        """Yields all completions after each token, SFT before PPO."""
        completions = [_PartialCompletion(self._tokenizer, request.prompt_ids) for _ in range(2 * request.n)]
        sampler: LockstepSampler | None = None
        try:
            with self._lock:
                all_stop_ids = {
                    token_id for policy in self._policies.values() for token_id in stop_ids(policy, self._tokenizer)
                }
                sampler = LockstepSampler(
                    sft=self._policies["sft"],
                    ppo=self._policies["ppo"],
                    prompt_ids=request.prompt_ids,
                    n=request.n,
                    **request.sampling,
                    stop_ids=sorted(all_stop_ids),
                    vocabulary=Vocabulary.of(self._tokenizer, *self._policies.values()),
                )
            while not sampler.is_done:
                with self._lock:
                    for token in sampler.step():
                        completions[token.index].add(token)
                        if token.stop is not None:
                            self._finish(request, completions[token.index])
                yield completions
        except MEMORY_ERRORS as error:
            sampler = None  # frees the KV caches before the error is reported
            if (memory_error := as_memory_error(error, fix=OUT_OF_MEMORY_HINT)) is None:
                raise
            raise memory_error from error

    @torch.no_grad()
    def _finish(self, request: _Request, completion: _PartialCompletion) -> None:
        """Decodes a completion that stopped, and computes its reward and values.

        The models run on a batch of one, so that padding cannot change the results.
        """
        token_ids = completion.detokenizer.ids
        completion_ids = torch.tensor([token_ids], device=self.device)
        prompt_ids = torch.tensor([request.prompt_ids], device=self.device)
        samples = Samples(
            prompt_ids=prompt_ids,
            prompt_mask=torch.ones_like(prompt_ids, dtype=torch.bool),
            completion_ids=completion_ids,
            mask=torch.ones_like(completion_ids, dtype=torch.bool),
            logprobs=torch.zeros_like(completion_ids, dtype=torch.float32),  # the models below do not read them
            ended=torch.tensor([completion.stop == "eos"], device=self.device),
        )
        wrapped_prompt = wrap_prompt(request.prompt, self._tokenizer)
        completion.finish(wrapped_prompt)
        # Decode again, because rewards read the text without thoughts if the recipe removes them.
        if self._reward is not None or self.rules is not None:
            (text,) = decode_completions(self._tokenizer, [wrapped_prompt], [request.prompt_ids], [token_ids])
        if self.rules is not None:
            completion.reward = self.rules.score(request.prompt, wrapped_prompt, samples, text)
        elif self._reward is not None:
            completion.reward = float(self._reward.score_samples(samples, [append_completion(wrapped_prompt, text)])[0])
        if self._critic is not None:
            completion.values = tuple(self._critic.values(samples)[0].tolist())

    def _take_snapshot(self, request: _Request, completions: Sequence[_PartialCompletion]) -> Snapshot:
        results = tuple(completion.result() for completion in completions)
        return Snapshot(
            prompt=request.prompt,
            **request.sampling,
            sft=results[: request.n],
            ppo=results[request.n :],
            done=all(result.stop is not None for result in results),
            is_chat=self.is_chat,
            initial_policy=self.initial_policy,
        )


class _PartialCompletion:
    """A completion that is being sampled."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self.tokenizer, self.detokenizer = tokenizer, IncrementalDetokenizer(tokenizer, prompt_ids)
        self.tokens: list[SampledToken] = []
        self.reward: float | None = None
        self.values: tuple[float, ...] | None = None
        self._text: str | None = None

    def add(self, token: SampledToken) -> None:
        self.tokens.append(token)
        self.detokenizer.add(token.token_id)

    def finish(self, prompt: Prompt) -> None:
        """Decodes the final text. `prompt` is in the form that the policy reads: a conversation for a chat model."""
        self._text = strip_template_space(self.detokenizer.finish(), prompt, self.tokenizer)

    @property
    def stop(self) -> str | None:
        return self.tokens[-1].stop if self.tokens else None

    def result(self) -> PolicyCompletion:
        token_metrics: dict[str, tuple[float, ...]] = {
            f"token_{name}": tuple(getattr(token, name) for token in self.tokens) for name in TOKEN_METRICS
        }
        return PolicyCompletion(
            completion=self.detokenizer.text if self._text is None else self._text,
            reward=self.reward,
            log_ratio=math.fsum(token_metrics["token_log_ratio"]),
            kl=math.fsum(token_metrics["token_kl"]),
            tokens=tuple(self.detokenizer.by_token),
            length=len(self.tokens),
            ended=self.stop == "eos",
            stop=self.stop,
            token_ids=tuple(self.detokenizer.ids),
            token_values=self.values,
            **token_metrics,
        )


def _freeze_for_inference(policy: PreTrainedModel) -> PreTrainedModel:
    disable_dropout(policy)
    return policy.requires_grad_(False).eval()
