"""Trains small runs in one process, or in WORLD_SIZE processes; each process saves its results.

    python -m torch.distributed.run --standalone --nproc-per-node 2 processes_run.py DIRECTORY 2 all_reductions

The second argument is the expected number of processes. Process N saves `NAME/process-N.pt` for each run NAME. A
process that takes too long writes the stacks of its threads to stderr and exits with an error. The other processes do
the same when they get SIGTERM then.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trainer_fixture import (  # noqa: E402
    LETTERS,
    Spy,
    good,
    make_policy,
    make_reward_model,
    make_trainer,
    prompt_rows,
    snapshot,
    timeless,
)
from transformers import DataCollatorWithPadding, TrainingArguments  # noqa: E402

from rlhf_zoo.errors import ZooError  # noqa: E402
from rlhf_zoo.modeling.fsdp_trainer import ShardedModelMixin  # noqa: E402
from rlhf_zoo.ppo.actor_critic import ActorCritic  # noqa: E402

# Wall-clock time that only a hang exceeds, even on a busy machine.
SECONDS = 240
PROCESSES = 2


def settings(processes: int) -> dict[str, Any]:
    """8 completions per update, in all processes together; plain SGD, because Adam magnifies rounding."""
    return {
        "kind": Spy, "per_device_train_batch_size": 4 // processes, "per_device_eval_batch_size": 4 // processes,
        "gradient_accumulation_steps": 2, "num_mini_batches": 1, "optim": "sgd", "learning_rate": 0.2,
        "critic_learning_rate": 0.2, "reward_model": make_reward_model(), "reward_funcs": good,
        "ref_model": make_policy(seed=2),
    }  # fmt: skip


def all_reductions(directory: Path, processes: int) -> Any:
    """Uses all reductions over processes: whitening, β, running scores, early stop, an evaluation of 7 prompts."""
    return make_trainer(
        directory, **settings(processes) | {
            "max_steps": 4, "train_dataset": prompt_rows(24), "eval_dataset": prompt_rows(7), "eval_strategy": "steps",
            "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "kl_target": 8.0,
            "kl_horizon": 32, "whiten_rewards": True, "score_centering": "running", "score_scaling": "running",
            "early_stop_kl": 0.02, "num_ppo_epochs": 3, "entropy_coef": 0.01,
        },
    )  # fmt: skip


def uneven_batches(directory: Path, processes: int) -> Any:
    """The last update of a pass over 13 prompts has 5 completions, so minibatches of 3 and of 2.

    Two processes fill up the last batch with the first prompt, and leave that row out. The token "a" ends a completion
    early, so the processes have different maximum lengths. Under the limits on tokens, they also have different numbers
    of micro-batches and of rows that wait for the sampler's cache.
    """
    return make_trainer(
        directory, **settings(processes) | {
            "max_steps": 4, "train_dataset": prompt_rows(13), "train_sampling_strategy": "sequential",
            "num_mini_batches": 2, "max_tokens_per_micro_batch": 24, "max_rollout_batch_tokens": 30,
            "per_device_train_batch_size": 2 // processes, "gradient_accumulation_steps": 4,
            "stop_token_id": 3, "eval_dataset": prompt_rows(1), "eval_strategy": "steps", "eval_steps": 4,
        },
    )  # fmt: skip


def shared_trunk(directory: Path, processes: int) -> Any:
    """A critic on the policy's trunk. The first update trains only the critic, so the policy gets no gradient."""
    return make_trainer(
        directory, **settings(processes) | {
            "max_steps": 3, "train_dataset": prompt_rows(24), "critic": "shared", "critic_warmup_updates": 1,
            "activation_checkpointing": True, "padding_free": True,
        },
    )  # fmt: skip


class TokenIdsOnly(Spy):
    """Has a collator that keeps only token ids, so the trainer has to number the prompts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pad = DataCollatorWithPadding(kwargs["processing_class"])

        def stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
            return dict(pad([{"input_ids": row["input_ids"]} for row in rows]))

        super().__init__(*args, data_collator=stack, **kwargs)


def counted_letters(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
    """Logs the mean length of the completions of a call."""
    log_metric("letters", sum(map(len, completions)) / len(completions))
    return good(completions)


def partial_batch(directory: Path, processes: int) -> Any:
    """In the last update of a pass over 13 prompts, one process has 5 prompts and the other has none.

    A reward function logs a metric, and the collator drops the numbers of the prompts.
    """
    return make_trainer(
        directory, **settings(processes) | {
            "kind": TokenIdsOnly, "max_steps": 4, "train_dataset": prompt_rows(13), "reward_funcs": counted_letters,
            "per_device_train_batch_size": 8 // processes, "gradient_accumulation_steps": 1,
            "train_sampling_strategy": "sequential", "eval_dataset": prompt_rows(11), "eval_strategy": "steps",
            "eval_steps": 4, "stop_token_id": 3,
        },
    )  # fmt: skip


def prompt_groups(directory: Path, processes: int) -> Any:
    """Three completions per prompt, with scores centered per prompt, LoRA and a critic on the policy's trunk."""
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return make_trainer(
        directory, **settings(processes) | {
            "max_steps": 3, "train_dataset": prompt_rows(24), "num_generations": 3, "score_centering": "prompt",
            "score_scaling": "none", "num_mini_batches": 2, "critic": "shared", "peft_config": lora, "ref_model": None,
        },
    )  # fmt: skip


def step_loop(directory: Path, processes: int) -> Any:
    """A trainer for a custom loop, in which two processes call `step` with 5 and with 3 completions."""
    return make_trainer(directory, **settings(processes) | {"max_steps": 3, "reward_model": None, "reward_funcs": None})


def loop(trainer: Any, processes: int) -> dict[str, Any]:
    """Makes two updates with `step`, then one with minibatches of 2, of which a process may have no row."""
    rank = trainer.args.process_index
    own_rows = slice(None) if processes == 1 else slice(0, 5) if rank == 0 else slice(5, 8)
    queries = prompt_rows(8)["prompt"]
    generated = [ids.tolist() for ids in trainer.generate(queries[:2])]
    metrics = []
    for update in range(2):
        responses = [LETTERS[row + update : 2 * row + 2 + update] for row in range(8)]
        scores = [float(row % 3 - update) for row in range(8)]
        metrics.append(trainer.step(queries[own_rows], responses[own_rows], scores[own_rows]))
    trainer.args.num_mini_batches = 4
    trainer.step(queries[own_rows], responses[own_rows], scores[own_rows])
    return {
        "began": trainer.before,
        "weights": snapshot(trainer),
        "log": metrics,
        "kl_coef": trainer.controller.kl_coef,
        "generated": generated,
        "refusal": refusal(Path(trainer.args.output_dir), accelerator_config={"even_batches": False}),
        "sharding": refusal(Path(trainer.args.output_dir), fsdp2=processes > 1, critic="shared"),
    }


def refusal(directory: Path, **options: Any) -> str:
    """The error for settings that do not work in several processes; empty if there is none."""
    try:
        make_trainer(directory, **options)
    except ZooError as error:
        return str(error)
    return ""


class NanLoss(Spy):
    """The loss of process 1 is NaN in the second update, though its gradients are finite."""

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        is_nan = self.state.global_step == 1 and os.environ.get("RANK") == "1"
        return super().loss(*args, **kwargs) + (float("nan") if is_nan else 0.0)


def skipped_step(directory: Path, processes: int) -> Any:
    """Only one process sees a NaN loss. In the second of three updates, both skip the two steps."""
    return make_trainer(
        directory, **settings(processes) | {"max_steps": 3, "kind": NanLoss, "train_dataset": prompt_rows(24)}
    )


def sharded(directory: Path, processes: int) -> Any:
    """`all_reductions`, with FSDP2 in several processes, and with several micro-batches and minibatches."""
    return make_trainer(
        directory, **settings(processes) | {
            "max_steps": 4, "train_dataset": prompt_rows(13), "eval_dataset": prompt_rows(7), "eval_strategy": "steps",
            "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "num_mini_batches": 2,
            "stop_token_id": 3, "optim": "adamw_torch", "learning_rate": 1e-3, "fsdp2": processes > 1,
            "critic_learning_rate": 1e-3, "per_device_train_batch_size": 4 // processes, "padding_free": True,
            "reward_model": [make_reward_model(), make_reward_model(seed=5)], "reward_ensemble": "mean_minus_variance",
        },
    )  # fmt: skip


def models_of(trainer: Any) -> dict[str, Any]:
    return {
        "policy": trainer.policy, "critic": trainer.value_model, "reference": trainer.reference.separate_model,
        **{f"reward {index}": reward.model for index, reward in enumerate(trainer.rewards.models)},
    }  # fmt: skip


def supervised(directory: Path) -> dict[str, Any]:
    """Returns a model that is sharded as in SFT."""
    plain = TrainingArguments(str(directory), use_cpu=True, report_to="none")
    trainer = ShardedModelMixin(model=make_policy(), args=plain)
    trainer.create_optimizer()
    return {"supervised": trainer.model}


def placements(models: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the placements of each model's weights, and the share of their elements in this process."""
    result = {}
    for name, model in models.items():
        weights = list(model.parameters())
        share = sum(w.to_local().numel() for w in weights) / sum(w.numel() for w in weights)
        result[name] = [*sorted({str(w.placements) for w in weights}), share]
    return result


RUNS = {
    run.__name__: run
    for run in (
        all_reductions,
        uneven_batches,
        shared_trunk,
        prompt_groups,
        step_loop,
        partial_batch,
        skipped_step,
        sharded,
    )
}
#: The same runs, resumed from the second update: `all_reductions`, and a sharded run from one process's checkpoint.
RUNS |= {"resumed": all_reductions, "sharded_resumed": sharded}


@contextlib.contextmanager
def counted(kind: type, name: str) -> Iterator[mock.Mock]:
    with mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name)) as calls:
        yield calls


def train(root: Path, name: str, processes: int) -> dict[str, Any]:
    """Makes the run NAME in `root`/NAME. Returns what this process computed."""
    trainer = RUNS[name](root / name, processes)
    assert trainer.args.world_size == processes
    if name == "step_loop":
        return loop(trainer, processes)
    checkpoint = root / ("all_reductions" if name == "resumed" else "start") / "checkpoint-2"
    placement_record = {"placements": placements(models_of(trainer))} if trainer.args.fsdp2 else {}
    with counted(ActorCritic, "save_pretrained") as saves:
        trainer.train(resume_from_checkpoint=str(checkpoint) if name.endswith("resumed") else None)
    rows = [{key: float(value) for key, value in row.items()} for row in timeless(trainer.state.log_history)]
    if trainer.args.fsdp2:  # afterwards, because a new Trainer seeds all random streams
        placement_record["placements"] |= placements(supervised(root / "supervised"))
    return {
        **placement_record,
        "began": trainer.before,
        "weights": snapshot(trainer),
        "log": rows,
        "saves": saves.call_count,
        "kl_coef": trainer.controller.kl_coef,
        "sizes": [len(rollout.samples) for rollout, _, _ in trainer.updates],
    }


def main(root: Path, processes: int, names: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for name in names:
        result = train(root, name, processes)
        assert torch.distributed.get_world_size() == processes
        (root / name).mkdir(exist_ok=True)
        torch.save(result, root / name / f"process-{rank}.pt")


def end_processes() -> None:
    """Leaves the process group, once nothing else holds it.

    DDP's reducer holds it too, and drops it without releasing the GIL. If it were the last holder, the group would wait
    for its threads, while one of them waits for the GIL to free a tensor of the last collective: a deadlock.
    """
    gc.collect()
    wrappers = [
        type(item).__name__ for item in gc.get_objects() if type(item) is torch.nn.parallel.DistributedDataParallel
    ]
    assert not wrappers, f"{len(wrappers)} DDP wrappers outlive their trainers: the process group cannot be left safely"
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    faulthandler.register(signal.SIGTERM, chain=True)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    end_processes()
