"""Seconds of a minibatch's passes, forward and backward, by how its rows are cut: `python -m speed.minibatch POINT`.

In benchmarks/. In one process and in turn, so that ratios of a round mean something on a machine that does not keep
still. `--shared`: the critic on the policy's trunk; `--bf16`: in bf16, where rows with padding have eager attention.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from figures import text

from rlhf_zoo.actor_critic import ActorCritic, shared_value_head
from rlhf_zoo.end_to_end import lay_end_to_end
from rlhf_zoo.logprobs import in_batches
from rlhf_zoo.models import critic_from
from rlhf_zoo.ppo.config import usual_tokens
from rlhf_zoo.sampling import Samples

from .floor import Floor, LogProbs, Packed
from .padding import samples_of
from .points import POINTS, TEMPERATURE, Point, build_models

Pass = Callable[[], None]
#: Tokens of a pass, and whether rows lie end to end; None: as a run has them that says nothing.
WAYS = ((None, False), (1024, False), (512, True), (1024, True), (2048, True))


def trainers(point: Point, samples: Samples, *, tokens: int | None, laid: bool, shared: bool, bf16: bool) -> Pass:
    """The passes of this trainer."""
    models = build_models(point)
    critic = shared_value_head(models.policy) if shared else critic_from(models.value)
    for model in (models.policy, *(() if shared else (critic,))):
        if laid:
            lay_end_to_end(model, of="the model")
        elif bf16:
            model.set_attn_implementation("eager")
    actor = ActorCritic(models.policy, critic).train()
    usual = usual_tokens(cpu=True, bf16=bf16)
    even = tokens is not None or bf16
    batches = in_batches(samples, size=len(samples), tokens=tokens or usual, even=even, end_to_end=laid)

    def passes() -> None:
        for rows in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                said = actor(samples.rows(rows), TEMPERATURE, policy_loss=lambda logprobs, _: logprobs.sum())
            assert said.policy_loss is not None
            (said.policy_loss + said.values.sum()).backward()

    return passes


def floors(point: Point, samples: Samples, *, shared: bool, bf16: bool) -> Pass:
    """Those of the floor."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    floor = Floor(point, shared=shared, dtype=dtype)
    prompts, responses = (
        [row[real].tolist() for row, real in zip(*part, strict=True)]
        for part in ((samples.prompt_ids, samples.prompt_mask), (samples.completion_ids, samples.mask))
    )
    parts = Packed.parts(prompts, responses)

    def passes() -> None:
        for packed in parts:
            hidden = packed.seen_by(floor.policy)[packed.before]
            found = LogProbs.apply(hidden, floor.policy.embedding, floor.bias, packed.tokens, dtype)
            if not shared:
                hidden = packed.seen_by(floor.critic)[packed.before]
            (found.sum() + (hidden.float() @ floor.value.t()).sum()).backward()

    return passes


def seconds(passes: Pass) -> float:
    began = time.perf_counter()
    passes()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("point", choices=sorted(POINTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args(arguments)
    point, how = POINTS[given.point], {"shared": given.shared, "bf16": given.bf16}
    torch.manual_seed(0)
    samples = samples_of(point, 1)
    sides = {
        f"{tokens or 'as usual'}{', end to end' if laid else ''}": trainers(
            point, samples, tokens=tokens, laid=laid, **how
        )
        for tokens, laid in WAYS
    }
    sides["floor"] = floors(point, samples, **how)
    rounds = [{name: seconds(passes) for name, passes in sides.items()} for _ in range(given.rounds + 1)][1:]
    table = []
    for name in sides:
        ratios = sorted(each[name] / each["floor"] for each in rounds)
        middle = statistics.median(each[name] for each in rounds)
        quarters = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        table.append([name, f"{middle:.3f}", f"{statistics.median(ratios):.2f}", quarters])
    print(text.table(["tokens of a pass", "s", "/ floor", "half of the rounds"], table))


if __name__ == "__main__":
    main()
