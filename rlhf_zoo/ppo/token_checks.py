"""Checks, before sampling, that tokenizers, models and token ids match."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from ..errors import ZooError, first_line
from ..modeling.loading import load_tokenizer
from ..modeling.logprobs import token_logprobs
from ..modeling.sampling.sampler import Vocabulary, base_of, sample
from ..modeling.special_tokens import highest_id
from .guards import RATIO_ROUNDING, warn

#: The number of tokens in the longer test prompt and in each test completion of `check_decoding`.
_TEST_TOKENS = 4


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel, *, needs_own_pad: bool = True) -> None:
    """Checks that the policy can be trained with this tokenizer.

    PAD itself may be past the embeddings, because the model never reads it.

    Args:
        tokenizer: The policy's tokenizer.
        policy: The model in training.
        needs_own_pad: Whether PAD must differ from EOS. It may be EOS if the length of every completion is known.

    Raises:
        ZooError: EOS is missing, an id other than PAD's has no embedding, or PAD is missing or equals EOS although
            needs_own_pad is True.
    """
    if tokenizer.eos_token_id is None:
        raise ZooError("The tokenizer has no eos_token, so no completion could end: set one.")
    if needs_own_pad and (tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id):
        raise ZooError(
            "The tokenizer has no pad_token other than its eos_token: add one, because PPO must distinguish the two."
        )
    num_embeddings, highest = count_embedding_rows(policy), highest_id(tokenizer)
    if highest >= num_embeddings:
        raise ZooError(
            f"The tokenizer has ids up to {highest}, but the policy has only {num_embeddings} embedding rows: "
            "resize the embeddings or use the policy's own tokenizer."
        )


def count_embedding_rows(model: PreTrainedModel) -> int:
    """Counts the rows of a model's embedding table.

    Args:
        model: The model.
    """
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


class TokenConsumer(NamedTuple):
    """A model that reads the policy's token ids, and so needs an embedding for each of them.

    Attributes:
        name: The model's name in errors.
        num_embeddings: The number of rows of the model's embedding table.
    """

    name: str
    num_embeddings: int

    @classmethod
    def of(cls, model: PreTrainedModel, name: str = "the policy") -> Self:
        """Makes the consumer of a model.

        Args:
            model: The model.
            name: The model's name in errors.
        """
        return cls(name, count_embedding_rows(model))


def find_smallest_consumer(vocabulary: Vocabulary, models: Mapping[str, PreTrainedModel | None]) -> TokenConsumer:
    """Finds the model with the fewest embedding rows, and checks that they are enough.

    Args:
        vocabulary: The tokens that the policy can sample.
        models: {name: model}, the policy first, then the other models that read the policy's ids; None is skipped.

    Raises:
        ZooError: A model has no embedding for a token that the policy can sample.
    """
    consumers = [TokenConsumer.of(model, name) for name, model in models.items() if model is not None]
    smallest_consumer = min(consumers, key=lambda consumer: consumer.num_embeddings)
    if smallest_consumer.num_embeddings < vocabulary.size:
        name, num_embeddings = smallest_consumer
        raise ZooError(
            f"{name[0].upper()}{name[1:]} has {num_embeddings} embedding rows, but the policy has "
            f"{consumers[0].num_embeddings} and can sample ids up to {vocabulary.size - 1}: use a model that reads the "
            "policy's tokens."
        )
    return smallest_consumer


def check_ids(sequences: Sequence[Sequence[int]], consumer: TokenConsumer, *, label: str = "Prompt") -> None:
    """Checks that a model has an embedding for each token id.

    Args:
        sequences: Sequences of token ids.
        consumer: The model.
        label: The name of a sequence in errors, such as "Prompt" in "Prompt 3".

    Raises:
        ZooError: An id is not an integer, is negative, or is beyond the embedding rows.
    """
    known_ids = range(consumer.num_embeddings)
    for index, ids in enumerate(sequences):
        if invalid_ids := [token_id for token_id in ids if not isinstance(token_id, int) or token_id not in known_ids]:
            raise ZooError(
                f"{label} {index} has the token id {invalid_ids[0]}, but {consumer.name} has only {len(known_ids)} "
                "embedding rows: tokenize it with the policy's own tokenizer."
            )


@torch.no_grad()
def check_decoding(policy: PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Checks that a policy can be sampled from in batches with a KV cache.

    Samples a few tokens after two short prompts of different lengths. Each token must have the same log-probability in
    the sampler, in a forward pass over its row alone, and in a forward pass over both rows with padding.

    Args:
        policy: The policy.
        vocabulary: The tokens that the policy can sample.

    Raises:
        ZooError: Log-probabilities differ by more than rounding can explain, or sampling fails.
    """
    name, was_training = type(base_of(policy)).__name__, policy.training
    # Take ids from the middle of the vocabulary, because special tokens are usually at its ends.
    upper_half = range(vocabulary.size // 2, vocabulary.size)
    ids = [token_id for token_id in upper_half if token_id in vocabulary][:_TEST_TOKENS]
    policy.eval()
    try:
        samples = sample(
            policy,
            [ids, ids[-1:]],
            keys=[(0,), (1,)],
            seed=0,
            max_new_tokens=_TEST_TOKENS,
            stop_ids=[],
            pad_id=ids[0],
            vocabulary=vocabulary,
        )
        unpadded_logprobs = torch.cat([token_logprobs(policy, samples.select(slice(row, row + 1))) for row in range(2)])
        padded_logprobs = token_logprobs(policy, samples)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ZooError(
            f"A {name} cannot be sampled from in batches with a KV cache ({first_line(error)}): choose another "
            "architecture."
        ) from error
    finally:
        policy.train(was_training)
    batched_logprobs = samples.logprobs, padded_logprobs
    difference = max(float((logprobs - unpadded_logprobs).abs().mean()) for logprobs in batched_logprobs)
    tolerance = RATIO_ROUNDING.get(policy.dtype, RATIO_ROUNDING[torch.bfloat16])
    if not difference <= tolerance:
        raise ZooError(
            f"With left padding or a KV cache, log-probabilities of {name} differ by {difference:.3g} nats per token "
            f"from those of a single unpadded row, more than the {tolerance:g} that rounding can explain: it may "
            "ignore the attention mask or not be causal; choose another policy."
        )


def check_saved_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, subject: str) -> None:
    """Checks that a tokenizer is the tokenizer that was saved with the model.

    A model that was made in memory, or whose tokenizer is not on this machine, is not checked.

    Args:
        model: The model.
        tokenizer: The tokenizer that was passed for the model.
        subject: The model's name in errors.

    Raises:
        ZooError: The tokenizer in the model's files has another id for a token of `tokenizer`, or lacks most of its
            tokens.
    """
    name = getattr(model.config, "_name_or_path", "") or ""
    if not name:
        return
    try:
        # If only the weights were downloaded, transformers makes an empty tokenizer from config.json alone.
        if not get_tokenizer_config(name, local_files_only=True):
            return
        saved_tokenizer = load_tokenizer(name, local_files_only=True)
    except (OSError, ValueError, ZooError):
        return  # there is no tokenizer with the weights
    saved_ids, ids = saved_tokenizer.get_vocab(), tokenizer.get_vocab()
    moved_tokens = [token for token, token_id in ids.items() if saved_ids.get(token, token_id) != token_id]
    missing_tokens = [token for token in ids if token not in saved_ids]
    if moved_tokens or len(missing_tokens) > len(ids) // 2:
        example = f"{(moved_tokens or missing_tokens)[0]!r} {'has another id' if moved_tokens else 'is missing'} there"
        raise ZooError(
            f"The tokenizer passed for {subject} is not the one that {name} was saved with ({example}): "
            "tokenizers may be swapped; pass each model its own."
        )


def check_reward_head(model: PreTrainedModel) -> None:
    """Warns if the files of a reward model have no classification head, because its head may then be random.

    This is not an error, because the head may have been trained since. A model that was made in memory, or whose files
    are not on this machine, is not checked.

    Args:
        model: The reward model.
    """
    name = getattr(model.config, "_name_or_path", "") or ""
    if not name or not type(model).__module__.startswith("transformers."):
        return  # the head of any other class has an unknown name
    keys: list[str] = []
    for file in ("model.safetensors", "model.safetensors.index.json"):
        try:
            path = cached_file(name, file, local_files_only=True)
        except (OSError, ValueError):
            continue  # there is no such file, or it is not on this machine
        if path is not None and file.endswith(".json"):
            keys += json.loads(Path(path).read_text())["weight_map"]
        elif path is not None:
            with safe_open(path, framework="pt") as tensors:
                keys += tensors.keys()
    if keys and not any(key.startswith(("score.", "classifier.")) for key in keys):
        warn(
            f"The files of {name} have no classification head, so the head of the reward model was initialized at "
            "random when it was loaded: unless you trained it since, its scores are random."
        )
