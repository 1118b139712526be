"""Samples completions of many prompts, in batches, with a progress bar."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling import distributed
from ...modeling.chat import decode_completions, tokenize_prompt
from ...modeling.chat_template import Prompt
from ...modeling.devices import MicroBatches
from ...modeling.sampling.sampler import Samples, Vocabulary, sample
from ...modeling.sampling.truncation import Truncation
from ...modeling.special_tokens import stop_ids
from ..status_line import Progress


@dataclass(frozen=True)
class SampledCompletions:
    """Batches of samples and the texts of their completions, in the order of the prompts.

    Attributes:
        batches: The samples.
        texts: The text of each completion.
    """

    batches: list[Samples]
    texts: list[str]

    @cached_property
    def ended(self) -> list[bool]:
        """Whether each completion ended by itself."""
        return [bool(end) for batch in self.batches for end in batch.ended]

    @cached_property
    def lengths(self) -> list[int]:
        """The length of each completion, in tokens."""
        return [int(length) for batch in self.batches for length in batch.mask.sum(1)]


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    keys: Sequence[tuple[int, ...]],
    seed: int,
    max_new_tokens: int,
    temperature: float,
    desc: str,
    top_p: float = 1.0,
    batch_size: int = 128,
    truncation: Truncation | None = None,
    stops: Sequence[int] | None = None,
) -> SampledCompletions:
    """Samples one completion for each prompt, only from tokens that the tokenizer has.

    The random stream of a prompt depends only on the seed and the prompt's key. A batch that does not fit into the
    device's memory is sampled in parts. In distributed training each process samples some of the batches, and every
    process returns all of them.

    Args:
        model: The policy.
        tokenizer: The policy's tokenizer.
        prompts: The prompts: texts or conversations.
        keys: The key of each prompt's random stream.
        seed: Seed of all random streams.
        max_new_tokens: Maximum number of tokens in a completion.
        temperature: Temperature of sampling.
        desc: Label of the progress bar.
        top_p: Probability mass of nucleus sampling; 1 samples from all tokens.
        batch_size: Prompts sampled at a time.
        truncation: How completions are cut; None leaves them as sampled.
        stops: Ids of tokens that end a completion; None takes the model's.

    Returns:
        The completions, on the CPU.
    """
    model.eval()
    vocabulary = Vocabulary.of(tokenizer, model)
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id not in vocabulary:
        pad_id = tokenizer.eos_token_id
    stops = stop_ids(model, tokenizer) if stops is None else stops
    prompt_ids = [tokenize_prompt(prompt, tokenizer) for prompt in prompts]
    results: dict[int, tuple[Samples, list[str]]] = {}  # number of a batch -> its samples and their texts
    micro_batches = MicroBatches(batch_size)
    bar = Progress(len(prompts), desc, "sample", leave=False)

    def sample_batch(indices: Sequence[int]) -> Samples:
        return sample(
            model,
            [prompt_ids[index] for index in indices],
            keys=[keys[index] for index in indices],
            seed=seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_ids=stops,
            pad_id=pad_id,
            vocabulary=vocabulary,
            # Set the bar instead of adding to it, because prompts that do not fit into memory are sampled again.
            on_finished=lambda count: bar.update(indices[0] + count - bar.n),
        ).to("cpu")

    with bar:
        for number, start in enumerate(range(0, len(prompts), batch_size)):
            indices = range(start, min(start + batch_size, len(prompts)))
            if distributed.is_my_batch(number):
                batch = Samples.concatenate(list(micro_batches.run(sample_batch, indices)), pad_id)
                if truncation is not None:
                    batch = truncation(batch, tokenizer, seed=seed, keys=[keys[index] for index in indices])
                batch_prompts, batch_ids = prompts[start : indices.stop], prompt_ids[start : indices.stop]
                completion_ids = batch.completion_id_lists()
                results[number] = batch, decode_completions(tokenizer, batch_prompts, batch_ids, completion_ids)
            bar.update(indices.stop - bar.n)
    batches = distributed.gather_in_order(results)
    return SampledCompletions([batch for batch, _ in batches], [text for _, texts in batches for text in texts])
