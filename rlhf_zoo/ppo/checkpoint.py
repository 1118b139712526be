"""Marks PPO checkpoints as complete."""

from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

#: The file in a checkpoint that marks it as complete.
PPO_COMPLETE = "ppo_complete"
#: The file in a checkpoint with PPO's state other than weights, such as the KL coefficient.
PPO_STATE = "ppo_state.json"


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once all processes have written it, so that no run resumes from an incomplete one."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            marker = Path(args.output_dir or "") / f"checkpoint-{state.global_step}" / PPO_COMPLETE
            if marker.parent.is_dir():
                marker.write_text(f"{state.global_step}\n")
