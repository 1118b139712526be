"""Which checkpoints of PPO were written to their end."""

from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

PPO_COMPLETE = "ppo_complete"


class Complete(TrainerCallback):
    """Marks a checkpoint once all processes have written all of it: a run killed before that never goes on from it."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            marker = Path(args.output_dir) / f"checkpoint-{state.global_step}" / PPO_COMPLETE
            if marker.parent.is_dir():
                marker.write_text(f"{state.global_step}\n")
