"""What single levers bring to an update: `python -m speed.levers POINT` in benchmarks/.

One process, one rollout: the same update again and again, with each lever off in turn, so that all see the same machine.
Prints the least seconds of each, of the clock and of the processor, and what the update takes with all levers on as a
share of what it takes without the one. `none` is a second reading of all on: how far apart two readings are.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from rlhf_zoo.data import GENERATION
from rlhf_zoo.ppo import trainer as module

from .ours import built
from .points import POINTS

BUDGET = 512


@contextlib.contextmanager
def without(lever: str, trainer: Any) -> Iterator[None]:
    """While open, the trainer does without it."""
    with contextlib.ExitStack() as stack:
        if lever == "head in one pass":
            stack.enter_context(mock.patch.object(module, "token_loss", lambda *_, **__: None))
        if lever == "token budget":
            stack.enter_context(mock.patch.object(trainer, "most_tokens", None))
        if lever == "fused AdamW":
            for group in trainer.optimizer.param_groups:
                stack.enter_context(mock.patch.dict(group, fused=False))
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("point", choices=POINTS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shared", action="store_true", help="critic and policy share a trunk")
    given = parser.parse_args(arguments)
    point = POINTS[given.point]
    # Weights that hardly move: all updates are the first one.
    keys = {"max_tokens_per_micro_batch": BUDGET, "learning_rate": 1e-9}
    trainer = built(point, point.batch, shared=given.shared, bf16=False, keys=keys)
    model = trainer.prepare_loop()
    rows = [{**row, GENERATION: 0} for row in trainer.train_dataset]
    rollout = trainer.rollout(rows, stream=module.TRAIN_STREAM)
    estimates = trainer.estimate(rollout, trainer.score(rollout, rows))
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(given.rounds + 1):
        for lever in ("", "head in one pass", "token budget", "fused AdamW", "none"):
            with without(lever, trainer):
                began = time.perf_counter(), time.process_time()
                trainer.update(model, rollout, estimates)
                if number:
                    seen[lever].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    best = {lever: [min(column) for column in zip(*each, strict=True)] for lever, each in seen.items()}
    for lever, (clock, processor) in best.items():
        shares = f"{best[''][0] / clock:.2f} | {best[''][1] / processor:.2f}"
        print(f"{lever or 'all on':<18} {clock:6.2f} s | {processor:6.2f} s of the processor | {shares}")


if __name__ == "__main__":
    main()
