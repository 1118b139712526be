"""Guards: a run that is wrong says so, early and by name. An error where it cannot be right, else a warning.

Each check takes what it looks at and nothing else, so that it can be shown to find a planted fault.
"""

import json
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file  # type: ignore[attr-defined]

from ..errors import NotFinite, ZooError
from ..modeling.loading import first_line, load_tokenizer
from ..modeling.logprobs import token_logprobs
from ..modeling.sampling.sampler import Samples, Vocabulary, base_of, sample
from .failures import Unscored
from .reference import Reference

# Far above what float32 makes of equal models, far below the KL of models that differ. Nats per completion.
START_KL = 0.5
# Mean |log ρ| of the first pass. The sampler's cached pass and the training pass differ by rounding: 1e-6 in float32 on
# a CPU, 1e-3 where a GPU multiplies in TF32, some hundredths in bf16.
RATIO_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.1}
# Tokens of each of the two texts that show whether a policy can be sampled from.
PROBE_TOKENS = 4
# The reference is run twice on the same row by the same code, so only a change of its weights shows.
REFERENCE_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
WINDOW = 20
NEGATIVE_RUN = 5


class GuardWarning(UserWarning):
    """Something that may be wrong with a run, with the number that says so."""


@contextmanager
def unscored() -> Iterator[None]:
    """Inside, what is refused is Unscored."""
    try:
        yield
    except NotFinite:
        raise
    except ZooError as error:
        raise Unscored(str(error)) from error.__cause__


def warn_of(message: str) -> None:
    warnings.warn(message, GuardWarning, stacklevel=3)


# Before training


def check_tokens(tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel, *, pad_apart: bool = True) -> None:
    """Checks that the policy can be trained with this tokenizer.

    PAD itself may lie past the embeddings: it is never fed to the model.

    Args:
        tokenizer: the policy's.
        policy: the model in training.
        pad_apart: whether PAD must differ from EOS; it need not where every completion comes with its length.

    Raises:
        ZooError: there is no EOS, no PAD apart from it, or an id without an embedding.
    """
    if tokenizer.eos_token_id is None:
        raise ZooError("The tokenizer has no eos_token, so no completion could end: give it one.")
    if pad_apart and (tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id):
        raise ZooError("The tokenizer has no pad_token other than its eos_token: add one, as PPO must tell them apart.")
    rows = embedding_rows(policy)
    highest = max(index for index in tokenizer.get_vocab().values() if index != tokenizer.pad_token_id)
    if highest >= rows:
        raise ZooError(
            f"The tokenizer has ids up to {highest} and the policy {rows} embedding rows: resize them or use the "
            "policy's own tokenizer."
        )


def embedding_rows(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


class TokenConsumer(NamedTuple):
    """A model that reads the policy's token ids, as an error names it, and its embedding rows."""

    name: str
    rows: int

    @classmethod
    def of(cls, model: PreTrainedModel, name: str = "the policy") -> Self:
        return cls(name, embedding_rows(model))


def narrowest_of(vocabulary: Vocabulary, models: Mapping[str, PreTrainedModel | None]) -> TokenConsumer:
    """The model with the fewest embedding rows.

    Args:
        vocabulary: what the policy samples.
        models: by name, the policy first, then those that read what it samples.

    Raises:
        ZooError: a model has no embedding for a token that the policy can sample.
    """
    readers = [TokenConsumer.of(model, name) for name, model in models.items() if model is not None]
    narrowest = min(readers, key=lambda reader: reader.rows)
    if narrowest.rows < vocabulary.size:
        name, rows = narrowest
        raise ZooError(
            f"{name[0].upper()}{name[1:]} has {rows} embedding rows and the policy {readers[0].rows}, which can sample "
            f"ids up to {vocabulary.size - 1}: give one that reads the policy's tokens."
        )
    return narrowest


def check_ids(prompts: Sequence[Sequence[int]], reader: TokenConsumer, *, what: str = "Prompt") -> None:
    """Raises ZooError for a prompt with a token id beyond the reader's embedding rows, or with what is no id."""
    for row, ids in enumerate(prompts):
        if wrong := [index for index in ids if not isinstance(index, int) or not 0 <= index < reader.rows]:
            raise ZooError(
                f"{what} {row} holds the token id {wrong[0]}, and {reader.name} has {reader.rows} embedding rows: "
                "tokenize it with the policy's own tokenizer."
            )


@torch.no_grad()
def check_decoding(policy: PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Raises ZooError for a policy whose completions cannot be sampled in batches with a cache.

    Two short prompts of different lengths go on for a few tokens. Each token must have the log-probability that a
    forward pass over its text alone gives it, and so must a pass over both, padded.
    """
    name, training = type(base_of(policy)).__name__, policy.training
    # From the middle, as what stands first or last may have a meaning of its own.
    ids = [index for index in range(vocabulary.size // 2, vocabulary.size) if index in vocabulary][:PROBE_TOKENS]
    policy.eval()
    try:
        samples = sample(
            policy,
            [ids, ids[-1:]],
            keys=[(0,), (1,)],
            seed=0,
            max_new_tokens=PROBE_TOKENS,
            stop_ids=[],
            pad_id=ids[0],
            vocabulary=vocabulary,
        )
        alone = torch.cat([token_logprobs(policy, samples.rows(slice(row, row + 1))) for row in range(2)])
        beside = token_logprobs(policy, samples)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ZooError(
            f"A {name} cannot be sampled from in batches with a cache ({first_line(error)}): give another architecture "
            "as policy."
        ) from error
    finally:
        policy.train(training)
    drift = max(float((logprobs - alone).abs().mean()) for logprobs in (samples.logprobs, beside))
    allowed = RATIO_ROUNDING.get(policy.dtype, RATIO_ROUNDING[torch.bfloat16])
    if not drift <= allowed:
        raise ZooError(
            f"A {name} gives tokens other log-probabilities beside a longer prompt, or from its cache, than alone (by "
            f"{drift:.3g} nats a token, where rounding makes {allowed:g} at most), as when it does not heed left "
            "padding or is not a causal language model: give another as policy."
        )


def check_tokenizer_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, of: str) -> None:
    """Raises ZooError if the files that `model` was loaded from have a tokenizer that numbers tokens otherwise.

    A model that was made in memory, or whose tokenizer is not on this machine, cannot be checked.
    """
    name = getattr(model.config, "_name_or_path", "") or ""
    if not name:
        return
    try:
        # Where only the weights were downloaded, transformers makes an empty tokenizer of config.json alone.
        if not get_tokenizer_config(name, local_files_only=True):
            return
        own = load_tokenizer(name, local_files_only=True)
    except (OSError, ValueError, ZooError):
        return  # no tokenizer beside the weights: nothing to compare
    vocabulary, tokens = own.get_vocab(), tokenizer.get_vocab()
    moved = [token for token, index in tokens.items() if vocabulary.get(token, index) != index]
    strange = [token for token in tokens if token not in vocabulary]
    if moved or len(strange) > len(tokens) // 2:
        example = repr((moved or strange)[0])
        raise ZooError(
            f"The tokenizer given for {of} is not the one that {name} was saved with ({example} has another id there): "
            "tokenizers may be swapped; give each model its own."
        )


def check_head_of(model: PreTrainedModel, *, of: str) -> None:
    """Warns if the files that `model` was loaded from hold no classification head, so that it may be random.

    Warns only: it may have been trained since. What is not on this machine, or was made in memory, cannot be checked.
    """
    name = getattr(model.config, "_name_or_path", "") or ""
    if not name or not type(model).__module__.startswith("transformers."):
        return  # how another class calls its head, only that class knows
    keys: list[str] = []
    for file in ("model.safetensors", "model.safetensors.index.json"):
        try:
            path = cached_file(name, file, local_files_only=True)
        except (OSError, ValueError):
            continue  # not among the files, or not on this machine
        if path is not None and file.endswith(".json"):
            keys += json.loads(Path(path).read_text())["weight_map"]
        elif path is not None:
            with safe_open(path, framework="pt") as tensors:
                keys += tensors.keys()
    if keys and not any(key.startswith(("score.", "classifier.")) for key in keys):
        warn_of(
            f"The files of {name} hold no classification head, so that of {of} was initialised at random when it was "
            "loaded: unless you trained it since, its scores mean nothing."
        )


@torch.no_grad()
def check_step_size(model: Any, rate: float, *, of: str) -> None:
    """Warns if most weights that train are held too coarsely for an optimizer step of about `rate` to change them.

    bfloat16 has 8 bits of mantissa, and what an Adam step adds to a weight 512 times its size rounds away.
    """
    coarse = [w for w in model.parameters() if w.requires_grad and w.dtype in (torch.bfloat16, torch.float16)]
    total = sum(weight.numel() for weight in coarse)
    moved = sum(int((weight + rate != weight).sum()) for weight in coarse)
    if moved < total / 2:
        warn_of(
            f"A step of the learning rate {rate:g} changes {moved / total:.1%} of the weights of {of} and rounds away "
            f"in the others, as they are held in {str(coarse[0].dtype).removeprefix('torch.')}: load them with "
            "dtype=torch.float32 and set bf16, which computes in bfloat16 all the same."
        )


# In the first update, and in each


def check_start(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, precision: torch.dtype, at_reference: bool = True
) -> None:
    """Raises ZooError if the first rollout of a run that begins at its reference is too far from it.

    The mean KL of a completion may be START_KL, or what rounding of log π by r a token makes of it: ½r² for each token,
    and in few bits 3 standard errors, as the noise of a long completion's tokens adds up. What is within these and
    above START_KL is warned of by the name of the precision.

    Args:
        logprobs, ref_logprobs, mask: (B, T) of the rollout.
        precision: what the policy computes in.
        at_reference: False where the reference is a model of the user's choice, so it is only warned of.

    Raises:
        ZooError: The run begins at its reference, and the first rollout does not.
    """
    by_token, count = (logprobs - ref_logprobs)[mask].double(), len(mask)
    kl = float(by_token.sum()) / count
    if abs(kl) < START_KL:
        return
    # Of tokens, whose rounding is independent, and not of completions: few of these, or unequal lengths, mislead.
    error = float(by_token.square().sum()) ** 0.5 / count
    coarse, bits = precision != torch.float32, str(precision).removeprefix("torch.")
    rounding = RATIO_ROUNDING.get(precision, RATIO_ROUNDING[torch.bfloat16])
    bound = 0.5 * rounding**2 * float(mask.sum()) / count + (3 * error if coarse else 0.0)
    away = f"The first rollout is {kl:.3g} ± {error:.2g} nats a completion from the reference"
    if abs(kl) < bound:
        warn_of(
            f"{away}, and {bits} alone can make it {bound:.2g}: sampling and the reference round differently, so KL is "
            "no more precise than that; load the models in float32, or sample more completions an update."
        )
    elif not at_reference:
        warn_of(f"{away}, and a run usually begins at it: check that ref_model is the SFT policy.")
    else:
        beyond = f" and {bits} makes it {bound:.2g} at most" if coarse else ""
        raise ZooError(
            f"{away}, though the run begins there{beyond}, as when the policy's adapter was trained before: merge it "
            "into its base, or give ref_model or ref_adapter_name."
        )


def check_ends(samples: Samples, stop_ids: Sequence[int]) -> None:
    """Raises ZooError unless each completion that ended has its end token inside the mask, and the others none."""
    stops = torch.tensor(list(stop_ids), device=samples.mask.device)
    last = samples.completion_ids.gather(1, (samples.mask.sum(1) - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    wrong = torch.isin(last, stops) != samples.ended
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ZooError(
            f"Completion {row} of the rollout {'ended' if samples.ended[row] else 'did not end'}, but the last token "
            f"in its mask is {int(last[row])}: the end token must count in the loss, and nothing after it."
        )


def check_rewards(rewards: Tensor, scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> None:
    """Checks that r_t = score·1[last] − β·KL_t, and names the two mistakes that people make.

    Args:
        rewards: (B, A).
        scores: (B,).
        kl: (B, A) in nats.
        mask: (B, A) bool.
        kl_coef: β.

    Raises:
        ZooError: a completion's rewards do not add up to that, in float64.
    """
    rewards, kl, scores = (x.double() for x in (rewards.masked_fill(~mask, 0), kl.masked_fill(~mask, 0), scores))
    paid, charged, count = rewards.sum(1), kl_coef * kl.sum(1), mask.sum(1)
    scale = 1e-4 * (1 + scores.abs() * count + abs(kl_coef) * kl.abs().sum(1))
    if ((paid - (scores - charged)).abs() <= scale).all():
        return
    if ((paid - (scores + charged)).abs() <= scale).all():
        raise ZooError("The KL penalty is paid instead of charged (+β·KL in the reward): give it a minus sign.")
    if ((paid - (scores * count - charged)).abs() <= scale).all():
        raise ZooError("The score is broadcast to every token: place it once, on the last token of the completion.")
    row = int(((paid - (scores - charged)).abs() - scale).argmax())
    raise ZooError(
        f"The rewards of completion {row} add up to {float(paid[row]):.4g}, and score − β·KL is "
        f"{float((scores - charged)[row]):.4g}: mend token_rewards, which places a score and pays nothing on top; a "
        "reward function that returns lists pays tokens."
    )


def warn_if_scores_identical(scores: Tensor, *, of: str) -> None:
    """Warns where all completions (B,) are paid the same."""
    if len(scores) > 1 and bool((scores == scores[0]).all()):
        warn_of(
            f"All {len(scores)} completions of the {of} score {float(scores[0]):.4g}, so there is nothing in them to "
            "learn: look at the rewards, or raise temperature or num_generations."
        )


def _rows_not_finite(x: Tensor, mask: Tensor) -> int:
    return int((~x.masked_fill(~mask, 0).isfinite()).any(1).sum())


def check_logprobs(logprobs: Tensor, mask: Tensor, *, of: str) -> None:
    """Checks log π of sampled tokens.

    Args:
        logprobs: (B, T) in nats.
        mask: (B, T) bool.
        of: the model, for the error.

    Raises:
        NotFinite: one is NaN or infinite.
    """
    if wrong := _rows_not_finite(logprobs, mask):
        raise NotFinite(
            f"The {of} gave log-probabilities that are not finite to {wrong} of {len(logprobs)} completions: check its "
            "weights, lower learning_rate, or compute in float32 if bf16 is on."
        )


def check_values(values: Tensor, mask: Tensor) -> None:
    """Checks the critic's values.

    Args:
        values: (B, T).
        mask: (B, T) bool.

    Raises:
        NotFinite: one is NaN or infinite.
    """
    if wrong := _rows_not_finite(values, mask):
        raise NotFinite(
            f"The critic returned NaN or infinity for {wrong} of {len(values)} completions: lower "
            "critic_learning_rate, or check value_model."
        )


def check_ratio(mismatch: float, *, precision: torch.dtype) -> None:
    """Checks that the training pass agrees with the sampler before any step: ρ must be 1.

    Args:
        mismatch: mean |log ρ| over the first minibatch's tokens.
        precision: that the policy computes in, which sets the tolerance.

    Raises:
        ZooError: they disagree.
    """
    allowed = RATIO_ROUNDING.get(precision, RATIO_ROUNDING[torch.bfloat16])
    if not mismatch <= allowed:
        raise ZooError(
            f"In the first pass log π differs from the sampler's by {mismatch:.3g} a token on average, where rounding "
            f"makes {allowed:g} at most: the policy does not run in training as it samples (dropout, a mask, another "
            "precision); recompute_logprobs takes log π_old from a forward pass."
        )


class ReferenceWatch:
    """Remembers the reference's log-probabilities of one completion, and looks whether they stay."""

    def __init__(self) -> None:
        self._probe: Samples | None = None
        self._first: Tensor | None = None

    def look(self, reference: Reference, samples: Samples, *, temperature: float, precision: torch.dtype) -> None:
        """Raises ZooError once the reference has moved. samples: a rollout, whose first row is kept the first time."""
        if self._probe is None:
            self._probe = samples.rows(slice(0, 1))
        with reference.model() as model:
            logprobs = token_logprobs(model, self._probe, temperature=temperature)
        if self._first is None:
            self._first = logprobs
        moved = float((logprobs - self._first).abs().max())
        if not moved <= REFERENCE_ROUNDING.get(precision, REFERENCE_ROUNDING[torch.bfloat16]):
            raise ZooError(
                f"The reference changed: log π_ref of a fixed completion moved by {moved:.3g} nats; it must not share "
                "weights with what trains, so give ref_model a copy of its own."
            )


class KLWatch:
    """Follows KL and score over updates, and warns, once each, of what a right run does not do."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._warned: set[str] = set()

    def look(self, kl: float, kl_error: float, score: float) -> None:
        """kl: mean Σ k1 of the rollout in nats, with its standard error; score: the mean score."""
        self._seen.append((kl, kl_error, score))
        recent = list(self._seen)[-NEGATIVE_RUN:]
        if len(recent) == NEGATIVE_RUN and all(k < -2 * error for k, error, _ in recent):
            self._once(
                "negative",
                f"KL was negative in {NEGATIVE_RUN} updates running (now {kl:.3g} nats): log-probabilities are not of "
                "the distribution that is sampled (temperature, truncation), as the mean of k1 cannot stay below 0.",
            )
        if len(self._seen) == WINDOW:
            kls, scores = [k for k, _, _ in self._seen], [s for _, _, s in self._seen]
            start = sum(scores[:5]) / 5
            rise = sum(scores[-5:]) / 5 - start
            noise = sum((s - start) ** 2 for s in scores[:5]) ** 0.5
            if max(kls) - min(kls) < 1e-3 and rise > 3 * noise and rise > 0:
                self._once(
                    "flat",
                    f"The score rose by {rise:.3g} over {WINDOW} updates while KL stood at {kl:.3g} nats: the "
                    "reference may be the policy itself, or the completions are not the policy's.",
                )

    def _once(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warn_of(message)
