"""Builds trl's trainers from a stage's settings."""

import copy
from typing import Any

from ...errors import ZooError, first_line
from ...modeling import distributed
from ...ppo.guards import check_step_size
from ...runs.settings.parse import StageSettings


def make_trainer(trainer_class: type, settings: StageSettings, **inputs: Any) -> Any:
    """Builds one of trl's trainers. It skips steps whose loss or gradients are not finite.

    Args:
        trainer_class: The trainer's class, such as SFTTrainer.
        settings: The stage's settings.
        **inputs: Models, tokenizers and data sets, by the trainer's keywords.

    Raises:
        ZooError: The trainer refuses the settings, the learning rate is too small to change the model's weights, or no
            example is left to train on.
    """
    from trl import RewardTrainer

    from ...modeling.fsdp_trainer import ShardedModelMixin
    from ...modeling.length_grouping import LengthGroupingMixin
    from ...ppo.step_guard import FiniteStepsTrainer
    from .global_batch import GlobalBatchMixin, GlobalRewardMixin

    mixins: list[type] = [LengthGroupingMixin, FiniteStepsTrainer]
    if getattr(settings.data, "fsdp2", False):  # a third-party stage may lack this key
        mixins.insert(0, ShardedModelMixin)
    if distributed.process_count() > 1:
        mixins.insert(0, GlobalRewardMixin if issubclass(trainer_class, RewardTrainer) else GlobalBatchMixin)
    full_class: Any = type(trainer_class.__name__, (*mixins, trainer_class), {})
    try:
        # The trainer changes its arguments, so it gets a copy.
        trainer = full_class(args=copy.copy(settings.trainer), **inputs)
    except ValueError as error:
        reason = first_line(error).replace(". ", "; ")
        raise ZooError(f"The settings of the stage {settings.stage} do not work: {reason}.") from error
    # trl would write its own card, with local paths, into each checkpoint.
    trainer.create_model_card = lambda **_: None
    # trl keeps adapters of quantized models in bfloat16, where small steps would be rounded away.
    if settings.model.use_peft and settings.trainer.bf16:
        for weight in filter(lambda weight: weight.requires_grad, trainer.model.parameters()):
            weight.data = weight.data.float()
    check_step_size(trainer.model, trainer.args.learning_rate, subject=f"the model of the stage {settings.stage}")
    if len(trainer.train_dataset) == 0:
        raise ZooError(
            f"max_length {settings.trainer.max_length} of the stage {settings.stage} leaves no example to train on: "
            "raise max_length, or set it to null."
        )
    return trainer
