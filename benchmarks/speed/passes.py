"""Seconds of a pass of policy and critic, forward and backward, by rows: `python -m speed.passes POINT LENGTH ROWS`.

In benchmarks/; LENGTH: tokens of a row, half of them the response; ROWS: numbers of rows, in turn. Beside it the
floor's pass over the same rows, end to end. `--bf16`: in bf16.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from figures import text
from torch import Tensor

from rlhf_zoo.actor_critic import ActorCritic
from rlhf_zoo.models import critic_from
from rlhf_zoo.sampling import Samples

from .floor import LogProbs, Packed, Trunk
from .points import POINTS, TEMPERATURE, Models, build_models

ROUNDS = 7


def trainers(models: Models, samples: Samples, *, bf16: bool) -> Callable[[], Tensor]:
    """The trainer's pass: a loss to learn from."""
    actor = ActorCritic(models.policy, critic_from(models.value)).train()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            said = actor(samples, TEMPERATURE, policy_loss=lambda logprobs, _: logprobs.sum())
        assert said.policy_loss is not None
        return said.policy_loss + said.values.sum()

    return loss


def floors(models: Models, samples: Samples, *, bf16: bool) -> Callable[[], Tensor]:
    """The same of the floor."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    policy, critic = (Trunk(model.model, dtype) for model in (models.policy, models.value))
    packed = Packed.of(samples.prompt_ids.tolist(), samples.completion_ids.tolist())
    bias, score = models.policy.lm_head.bias.detach(), models.value.score.weight

    def loss() -> Tensor:
        hidden, read = (packed.seen_by(trunk)[packed.before] for trunk in (policy, critic))
        logprobs = LogProbs.apply(hidden, policy.embedding, bias, packed.tokens, dtype)
        return logprobs.sum() + (read.float() @ score.t()).sum()

    return loss


def seconds(loss: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    loss().backward()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("point", choices=sorted(POINTS))
    parser.add_argument("length", type=int)
    parser.add_argument("rows", type=lambda words: [int(word) for word in words.split(",")])
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args(arguments)
    point, half = POINTS[given.point], given.length // 2
    models = build_models(point)
    if given.bf16:
        for model in (models.policy, models.value):
            model.set_attn_implementation("eager")
    sides = {}
    for rows in given.rows:
        ids = torch.randint(point.vocab, (rows, given.length))
        prompts, completions = ids.split([half, given.length - half], 1)
        real = [torch.ones(part.shape, dtype=torch.bool) for part in (prompts, completions)]
        samples = Samples(prompts, real[0], completions, real[1], completions.float(), real[1][:, 0])
        for make in (trainers, floors):
            sides[rows, make] = make(models, samples, bf16=given.bf16)
    seen: dict[object, list[float]] = {each: [] for each in sides}
    for _ in range(ROUNDS + 1):
        for each, loss in sides.items():
            seen[each].append(seconds(loss))
    table = []
    for rows in given.rows:
        here, floor = (statistics.median(seen[rows, make][1:]) for make in (trainers, floors))
        tokens = rows * given.length
        figures = here * 1e3, here / tokens * 1e6, floor / tokens * 1e6
        table.append([str(rows), f"{tokens:,}", *(f"{each:.1f}" for each in figures)])
    print(text.table(["rows", "tokens", "ms", "µs a token", "floor, µs a token"], table))


if __name__ == "__main__":
    main()
