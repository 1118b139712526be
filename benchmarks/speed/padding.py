"""What share of the update's tokens is padding: `python -m speed.padding` in benchmarks/."""

import torch
from figures import text

from rlhf_zoo.logprobs import in_batches, tokens_of
from rlhf_zoo.sampling import Samples

from .points import POINTS, Point

UPDATES = 3


def samples_of(point: Point, update: int) -> Samples:
    """The update's prompts, padded on the left, and responses, of random tokens; the rest of it is empty."""
    rows = slice(update * point.batch, (update + 1) * point.batch)
    lengths = [len(each) for each in point.prompts(rows.stop)[rows]]
    responses = [min(each, point.response) for each in point.lengths(rows.stop)[rows]]
    prompts, mask = (torch.arange(max(each)) < torch.tensor(each).unsqueeze(1) for each in (lengths, responses))
    prompts = prompts.flip(1)
    ids = [torch.randint(4, point.vocab, part.shape) * part for part in (prompts, mask)]
    return Samples(ids[0], prompts, ids[1], mask, mask.float(), mask[:, 0])


def padding(point: Point, *, tokens: int, even: bool) -> float:
    """The share, over some updates."""
    seen = computed = 0
    for update in range(1, UPDATES + 1):
        samples = samples_of(point, update)
        seen += int(samples.prompt_mask.sum() + samples.mask.sum())
        batches = in_batches(samples, size=len(samples), tokens=tokens, even=even)
        computed += sum(tokens_of(samples, rows) for rows in batches)
    return 1 - seen / computed


if __name__ == "__main__":
    ways = {"512": (512, False), "512, even": (512, True), "2,048": (2048, False), "2,048, even": (2048, True)}
    rows = [
        [name, *(f"{padding(point, tokens=tokens, even=even):.0%}" for tokens, even in ways.values())]
        for name, point in POINTS.items()
        if name in ("full", "eos", "wide", "long")
    ]
    print(text.table(["point", *ways], rows))
