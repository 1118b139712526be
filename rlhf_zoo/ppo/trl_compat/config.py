"""TRL 1.12's PPOConfig, with its fields and defaults, as a subclass of ours."""

from dataclasses import dataclass, field

from ...errors import ZooError
from ..config import PPOConfig as ZooPPOConfig


@dataclass
class PPOConfig(ZooPPOConfig):
    """`rlhf_zoo.PPOConfig` with the defaults of TRL 1.12, and its additional fields.

    The batch sizes are computed as in TRL, and values passed for them are replaced. Where TRL's trainer ignored its own
    defaults, the defaults here match its behavior: no bf16, no gradient checkpointing, and a log line in each update.
    """

    stop_token: str | None = field(default=None, metadata={"help": "'eos'; None: only stop_token_id ends completions."})
    num_sample_generations: int = field(
        default=10, metadata={"help": "How many times per run generate_completions() shows held-out samples."}
    )
    sft_model_path: str = field(default="EleutherAI/pythia-160m", metadata={"help": "For the script to load."})
    reward_model_path: str = field(default="EleutherAI/pythia-160m", metadata={"help": "For the script to load."})
    ds3_gather_for_generation: bool = field(
        default=True, metadata={"help": "For DeepSpeed ZeRO-3, which this trainer was never tested with."}
    )
    num_total_batches: int | None = field(default=None, metadata={"help": "Number of updates in the run."})
    micro_batch_size: int | None = field(default=None, metadata={"help": "per_device_train_batch_size × processes."})
    local_batch_size: int | None = field(default=None, metadata={"help": "Completions per update and process."})
    batch_size: int | None = field(default=None, metadata={"help": "Completions per update."})
    local_mini_batch_size: int | None = field(default=None, metadata={"help": "mini_batch_size of one process."})
    mini_batch_size: int | None = field(default=None, metadata={"help": "Completions per optimizer step."})

    def __post_init__(self) -> None:
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ZooError("stop_token and stop_token_id are both set: remove one of them.")
        super().__post_init__()
        # These sizes are computed as in TRL, because scripts print them. An episode is one completion.
        self.micro_batch_size = self.per_device_train_batch_size * self.world_size
        self.batch_size = self.episodes_per_update
        self.local_batch_size = self.batch_size // self.world_size
        self.mini_batch_size = self.batch_size // self.num_mini_batches
        self.local_mini_batch_size = self.local_batch_size // self.num_mini_batches
        self.num_total_batches = self.max_steps if self.max_steps > 0 else None
