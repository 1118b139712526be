"""Seconds of a pass of policy and critic, forward and backward, by rows: `python -m speed.passes POINT LENGTH ROWS`.

In benchmarks/; LENGTH: tokens of a row, half of them the response; ROWS: numbers of rows, in turn. `--bf16`: in bf16.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from figures import text

from rlhf_zoo.actor_critic import ActorCritic
from rlhf_zoo.models import critic_from
from rlhf_zoo.sampling import Samples

from .points import POINTS, TEMPERATURE, build_models

ROUNDS = 7


def seconds(actor: ActorCritic, samples: Samples, *, bf16: bool) -> float:
    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        said = actor(samples, TEMPERATURE, policy_loss=lambda logprobs, _: logprobs.sum())
    (said.policy_loss + said.values.sum()).backward()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("point", choices=sorted(POINTS))
    parser.add_argument("length", type=int)
    parser.add_argument("rows", type=lambda words: [int(word) for word in words.split(",")])
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args(arguments)
    point = POINTS[given.point]
    models = build_models(point)
    if given.bf16:
        for model in (models.policy, models.value):
            model.set_attn_implementation("eager")
    actor = ActorCritic(models.policy, critic_from(models.value)).train()
    half = given.length // 2
    batches = {}
    for rows in given.rows:
        ids = torch.randint(point.vocab, (rows, given.length))
        prompts, completions = ids.split([half, given.length - half], 1)
        real = [torch.ones(part.shape, dtype=torch.bool) for part in (prompts, completions)]
        batches[rows] = Samples(prompts, real[0], completions, real[1], completions.float(), real[1][:, 0])
    seen: dict[int, list[float]] = {rows: [] for rows in batches}
    for _ in range(ROUNDS + 1):
        for rows, samples in batches.items():
            seen[rows].append(seconds(actor, samples, bf16=given.bf16))
    table = []
    for rows, each in seen.items():
        median, tokens = statistics.median(each[1:]), rows * given.length
        table.append([str(rows), f"{tokens:,}", f"{median * 1e3:.1f}", f"{median / tokens * 1e6:.0f}"])
    print(text.table(["rows", "tokens", "ms", "µs a token"], table))


if __name__ == "__main__":
    main()
