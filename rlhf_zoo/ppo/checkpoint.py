"""The marker of complete PPO checkpoints."""

from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

PPO_COMPLETE = "ppo_complete"


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once all processes have written it, so that no run resumes from an incomplete one."""

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        """Waits for all processes, then writes the marker.

        Args:
            args: As Trainer passes them.
            state: As Trainer passes them.
            control: As Trainer passes them.
        """
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            marker = Path(args.output_dir) / f"checkpoint-{state.global_step}" / PPO_COMPLETE
            if marker.parent.is_dir():
                marker.write_text(f"{state.global_step}\n")
