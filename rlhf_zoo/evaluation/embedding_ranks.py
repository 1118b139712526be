"""Ranks each text's prompt among all prompts by a sentence embedder, which compares meanings rather than words."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import ZooError
from ..hub.client.connect import Hub
from ..hub.client.refs import resolve
from ..modeling.embedder import Embedder
from ..rewards.relevance import request_text
from ..runs.status_line import show_activity
from .probes import Completions
from .probes.similarity import MAX_OTHER_PROMPTS
from .stats import group_indices

_TEXTS_AT_ONCE = 4096  # rows of the matrix of texts and prompts


def add_meaning_ranks(policy: Completions, sft: Completions, name: str, hub: Hub) -> tuple[Completions, Completions]:
    """Adds the share of other prompts that are less similar to a completion than its own prompt, by an embedder.

    Only completions that are not empty and whose prompt both sides have are embedded. Prompts of the same group are not
    compared.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        name: A folder or a Hub id of an encoder whose embedding is the mean over the tokens.
        hub: The Hub on which to look up Hub ids.

    Returns:
        Both sides, with `meaning_ranks`; NaN for completions that were not embedded.

    Raises:
        ZooError: The embedder cannot be loaded, or there are fewer than two groups of prompts.
    """
    shared_prompts = set(policy.prompts) & set(sft.prompts)
    prompts = [prompt for prompt in dict.fromkeys(policy.prompts) if prompt in shared_prompts]
    group_of = policy.group_by_prompt
    if len({group_of[prompt] for prompt in prompts}) < 2:
        raise ZooError(
            "An embedder compares prompts, but all prompts ask the same question: sample other prompts too, or give "
            "no embedder."
        )
    embedder = Embedder(resolve(name, hub).path, name=name)
    all_texts = [text for side in (policy, sft) for prompt, text in zip(side.prompts, side.texts, strict=True)
                 if prompt in shared_prompts and text.strip()]  # fmt: skip
    requests = _request_texts(policy) | _request_texts(sft)
    with show_activity(f"embedding completions and prompts with {name}"):
        prompt_vectors = embedder.embed([requests[prompt] for prompt in prompts]).numpy()
        texts = list(dict.fromkeys(all_texts))
        row_by_text = {text: row for row, text in enumerate(texts)}
        text_vectors = embedder.embed(texts).numpy() if texts else prompt_vectors[:0]
    groups = [group_of[prompt] for prompt in prompts]
    prompt_indices = {prompt: index for index, prompt in enumerate(prompts)}
    sides = []
    for side in (policy, sft):
        ranks = np.full(len(side), np.nan)
        rows = [row for row, text in enumerate(side.texts) if side.prompts[row] in shared_prompts and text.strip()]
        vectors = text_vectors[[row_by_text[side.texts[row]] for row in rows]]
        prompt_ids = [prompt_indices[side.prompts[row]] for row in rows]
        ranks[rows] = ranks_among_prompts(vectors, prompt_vectors, prompt_ids, groups)
        sides.append(replace(side, meaning_ranks=ranks.tolist()))
    return sides[0], sides[1]


def ranks_among_prompts(
    text_vectors: NDArray[np.float32], prompt_vectors: NDArray[np.float32], prompt_ids: Sequence[int],
    groups: Sequence[Hashable],
) -> NDArray[np.float64]:  # fmt: skip
    """Computes the share of other prompts less similar to a text than its own prompt; a tie counts one half.

    Args:
        text_vectors: (N, H) vectors of length 1.
        prompt_vectors: (G, H) vectors of length 1.
        prompt_ids: (N,) the index of each text's prompt.
        groups: (G,) the group of each prompt; prompts of the same group are not compared.

    Returns:
        (N,) shares from 0 to 1.
    """
    # A sample of the prompts suffices to estimate a share.
    compared_ids = np.unique(np.linspace(0, len(groups) - 1, min(len(groups), MAX_OTHER_PROMPTS)).astype(int))
    group_ids, ranks = group_indices(groups), np.empty(len(prompt_ids))
    for start in range(0, len(prompt_ids), _TEXTS_AT_ONCE):
        block = slice(start, start + _TEXTS_AT_ONCE)
        own_cosines = np.einsum("nh,nh->n", text_vectors[block], prompt_vectors[prompt_ids[block]])
        # Rounded, so that equal vectors tie whatever the order of the sums.
        gaps = np.round(own_cosines[:, None] - text_vectors[block] @ prompt_vectors[compared_ids].T, 6)
        is_other = group_ids[prompt_ids[block], None] != group_ids[compared_ids]
        ranks[block] = ((np.sign(gaps) + 1) / 2 * is_other).sum(1) / np.maximum(is_other.sum(1), 1)
    return ranks


def _request_texts(side: Completions) -> dict[str, str]:
    """Returns each prompt -> the text of its request."""
    conversations = side.conversations or side.prompts
    return {
        prompt: request_text(conversation) for prompt, conversation in zip(side.prompts, conversations, strict=True)
    }
