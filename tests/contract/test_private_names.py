"""The private names of libraries that the code uses (docs/departures.md) still exist and have the same meaning."""

import inspect
from pathlib import Path

from transformers import Trainer

from rlhf_zoo.modeling.fsdp_trainer import ShardedModelMixin
from rlhf_zoo.ppo.trainer import PPOTrainer

DEPARTURES = Path(__file__).parents[2] / "docs" / "departures.md"


def test_trainer_overrides_only_listed_private_names():
    ours = [kind for kind in PPOTrainer.__mro__ if kind.__module__.startswith("rlhf_zoo.")]
    kinds = ["PPOTrainer", "StepwiseTrainer", "HeldOutTrainer", "RolloutTrainer", "BasePPOTrainer"]
    kinds += ["PromptReader", "LengthGroupingMixin", "ShardTrainer", "GuardedTrainer"]
    assert [kind.__name__ for kind in ours] == kinds
    private = {
        name
        for kind in ours
        for name, value in vars(kind).items()
        if name.startswith("_") and not name.startswith("__") and inspect.isfunction(value) and hasattr(Trainer, name)
    }
    optimizer = {"_load_optimizer_and_scheduler", "_save_optimizer_and_scheduler"}
    assert private == {"_get_train_sampler", "_load_from_checkpoint", *optimizer}
    assert all(name in DEPARTURES.read_text() for name in private)


def test_hf_trainer_resumes_through_load_from_checkpoint():
    parameters = list(inspect.signature(Trainer._load_from_checkpoint).parameters)
    assert parameters == ["self", "resume_from_checkpoint", "model"]
    assert "self._load_from_checkpoint(resume_from_checkpoint" in inspect.getsource(Trainer.train)


def test_hf_trainer_saves_and_loads_optimizer_by_private_methods():
    assert list(inspect.signature(Trainer._save_optimizer_and_scheduler).parameters) == ["self", "output_dir"]
    assert list(inspect.signature(Trainer._load_optimizer_and_scheduler).parameters) == ["self", "checkpoint"]
    assert "self._save_optimizer_and_scheduler(output_dir)" in inspect.getsource(Trainer._save_checkpoint)


def test_hf_trainer_saves_model_by_private_method():
    assert ShardedModelMixin._save.__name__ in DEPARTURES.read_text()
    assert list(inspect.signature(Trainer._save).parameters) == ["self", "output_dir", "state_dict"]
    assert "self._save(output_dir)" in inspect.getsource(Trainer.save_model)
