"""Loads the critic that was saved with a PPO policy."""

from pathlib import Path

from transformers import PreTrainedModel

from ..errors import ZooError, first_line
from ..modeling.critic import CRITIC_DIR, critic_from
from ..modeling.model_files import ModelFiles
from ..modeling.value_head import ValueHead, read_value_head
from .actor_critic import shared_value_head


def load_critic(folder: str | Path, policy: PreTrainedModel) -> PreTrainedModel | ValueHead | None:
    """Loads the critic of a checkpoint.

    Args:
        folder: The checkpoint.
        policy: The policy, whose trunk a value head reads.

    Returns:
        A separate model, or a value head on the policy's trunk; None if the folder has no critic or does not exist.

    Raises:
        ZooError: The critic cannot be loaded.
    """
    folder = Path(folder)
    if not (folder / CRITIC_DIR).is_dir():
        return None
    try:
        # The critic's folder has either a value head, which is a single file, or a separate model.
        if (head := read_value_head(ModelFiles(folder))) is None:
            return critic_from(folder / CRITIC_DIR)
        critic = shared_value_head(policy)
        critic.load_state_dict(head)
    except (OSError, ValueError, RuntimeError) as error:
        raise ZooError(
            f"The critic in {folder} cannot be loaded ({first_line(error)}): publish the checkpoint again."
        ) from error
    return critic
