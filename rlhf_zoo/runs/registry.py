"""The stages that a recipe may have, and everything that the package needs to know about them."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Stage:
    """A stage: a file NAME.yaml of a recipe, a command, a folder of the run directory and a model on the Hub.

    `arguments`, `trainer`, `run`, `card` and `release` name code as "module:attribute", which `load` imports.

    Attributes:
        name: Name of the stage.
        title: Name of the stage's model in sentences.
        note: Note on the stage's model in a Collection.
        summary: Help text of the stage's command.
        example: An example of the stage's command.
        arguments: The dataclass of the stage's own keys.
        trainer: The dataclass of the trainer's keys.
        run: The function that runs the stage: (context, publisher) -> whether it trained.
        card: The `StageCard`.
        starts_from: Roles (keys of `parents` in run.json) of the models that the weights may come from, nearest first.
        metrics: Metrics of the validation split that may decide which checkpoint is chosen. PPO also accepts the metric
            of each reward, such as eval_rewards/NAME.
        model_keys: Keys of trl.ModelConfig that the stage uses.
        figures: The figures in a family tree: label -> path in rlhf_card.json, in which "checkpoints" stands for the
            row of the card's step.
        task: The Hub's name for the model's task.
        release: The dataclass of the keys that control what is published.
    """

    name: str
    title: str
    note: str
    summary: str
    example: str
    arguments: str
    trainer: str
    run: str
    card: str
    starts_from: tuple[str, ...]
    metrics: tuple[str, ...]
    model_keys: tuple[str, ...]
    figures: Mapping[str, tuple[str, ...]]
    task: Literal["text-generation", "text-classification"] = "text-generation"
    release: str = "rlhf_zoo.runs.checkpoint_choice:ReleaseArguments"

    def load(self, name: Literal["arguments", "trainer", "release", "run", "card"]) -> Any:
        """Imports an object that the stage names.

        Args:
            name: The attribute.
        """
        module, _, attribute = getattr(self, name).partition(":")
        return getattr(importlib.import_module(module), attribute)


#: Keys of trl.ModelConfig for LoRA, for loading, and for quantization.
LORA = (
    "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
    "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora",
)  # fmt: skip
LOADING = ("dtype", "attn_implementation")
QUANTIZATION = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")
#: The stages, in the order in which a run trains them.
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="sft",
            title="SFT policy",
            note="SFT",
            summary="Train the SFT policy of a recipe.",
            example="rlhf-zoo sft tiny-world --num_train_epochs 2",
            arguments="rlhf_zoo.runs.settings.parse:SFTArguments",
            trainer="trl:SFTConfig",
            run="rlhf_zoo.pipeline.stages.sft:run",
            card="rlhf_zoo.publishing.cards.sft:CARD",
            starts_from=("base",),
            metrics=("eval_loss", "eval_mean_token_accuracy", "eval_entropy"),
            model_keys=("model_name_or_path", "model_revision", *LOADING, *QUANTIZATION, *LORA),
            figures={"loss": ("checkpoints", "loss"), "validation loss": ("checkpoints", "eval_loss")},
        ),
        Stage(
            name="reward",
            title="reward model",
            note="reward model",
            summary="Train the reward model of a recipe.",
            example="rlhf-zoo reward tiny-world --learning_rate 5e-4",
            arguments="rlhf_zoo.runs.settings.parse:RewardArguments",
            trainer="trl:RewardConfig",
            run="rlhf_zoo.pipeline.stages.reward:run",
            card="rlhf_zoo.publishing.cards.reward:CARD",
            starts_from=("sft", "base"),
            metrics=("eval_loss", "eval_accuracy", "eval_margin"),
            model_keys=(*LOADING, *(key for key in LORA if key != "lora_task_type")),
            figures={
                "held-out accuracy": ("reward_model", "accuracy"),
                "loss": ("checkpoints", "loss"),
                "validation accuracy": ("checkpoints", "eval_accuracy"),
                "validation loss": ("checkpoints", "eval_loss"),
            },
            task="text-classification",
        ),
        Stage(
            name="ppo",
            title="PPO policy",
            note="PPO",
            summary="Train a PPO policy from the recipe's SFT model.",
            example="rlhf-zoo ppo tiny-world --kl_coef 0.2",
            arguments="rlhf_zoo.runs.settings.parse:PPOArguments",
            trainer="rlhf_zoo.ppo.config:PPOConfig",
            run="rlhf_zoo.pipeline.stages.ppo:run",
            card="rlhf_zoo.publishing.cards.ppo:CARD",
            starts_from=("sft", "base"),
            metrics=("eval_objective/kl", "eval_completions/length", "eval_completions/eos_rate"),
            model_keys=("model_name_or_path", *LOADING, *QUANTIZATION, *LORA),
            figures={
                "reward": ("reward",),
                "KL (nats)": ("kl",),
                "held-out reward": ("evaluation", "ppo", "reward", "value"),
                "held-out KL (nats)": ("evaluation", "ppo", "kl", "value"),
                "win rate": ("evaluation", "win_rate", "value"),
            },
            release="rlhf_zoo.runs.checkpoint_choice:PPOReleaseArguments",
        ),
    )
}
#: Roles of reward models among a run's parents -> their titles. A run with one reward model uses the first role.
REWARD_ROLES = {"reward": "reward model"} | {f"reward_{number}": f"reward model {number}" for number in range(2, 10)}
#: Roles of trained models among a run's parents -> their titles.
PARENT_TITLES = {"sft": STAGES["sft"].title, **REWARD_ROLES, "ppo": STAGES["ppo"].title}

#: Folder in a run directory with the models of `rlhf-zoo ensemble`: ENSEMBLE/seed-K/reward.
ENSEMBLE = "ensemble"
ENSEMBLE_MEMBER = re.compile(rf"{ENSEMBLE}/seed-(\d+)/reward")


def is_ensemble_member(name: str) -> bool:
    """Whether a name has the form ensemble/seed-K/reward, which `rlhf-zoo ensemble` gives to reward models.

    Args:
        name: A value of `reward_model_path`.
    """
    return ENSEMBLE_MEMBER.fullmatch(name) is not None


def reward_names(reward_model_path: Any) -> list[str]:
    """Returns the value of `reward_model_path` as a list of names.

    Args:
        reward_model_path: The value of the key: None, a name or a list of names.
    """
    return [reward_model_path] if isinstance(reward_model_path, str) else list(reward_model_path or [])


def starts_from_base(stage: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a stage is PPO and started from a model that its settings name, rather than from the run's SFT stage.

    Args:
        stage: Name of the stage, as a record or a card has it.
        settings: Keys of the stage.
    """
    return stage == "ppo" and settings.get("model_name_or_path") not in (None, "sft")


def parent_title(role: str, *, from_base: bool = False) -> str:
    """Returns the title of a parent of a run.

    Args:
        role: Role of the parent.
        from_base: Whether `starts_from_base` is true for the run.

    Returns:
        The title; the role itself if it is unknown.
    """
    return "base model" if role == "base" or (role == "sft" and from_base) else PARENT_TITLES.get(role, role)
