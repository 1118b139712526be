"""The options of `rlhf-zoo new`, and checks of the options that do not read files."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...errors import ZooError
from ...plugins import REWARDS, did_you_mean, registered_names
from ...runs.recipe import is_repository_name
from ...runs.settings.judge_names import check_judge_name

#: Columns that --columns may name.
COLUMNS = ("prompt", "completion", "chosen", "rejected")
#: A name with such an ending is taken for a local file. For a data set on a Hub, users add @REVISION to the name.
_DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|txt)(\.(gz|bz2|xz|zst|zip))?$", re.IGNORECASE)


@dataclass(frozen=True)
class RecipeRequest:
    """The options for a new recipe.

    Attributes:
        model: The model to start from.
        preferences: Data for SFT and the reward model.
        prompts: Prompts for PPO; None for the prompts of the preferences.
        texts: Data for SFT; None for the chosen answers of the preferences, or for the prompts' data.
        rewards: Reward functions, and at most one reward model.
        judge: The judge of the evaluation; None to have one chosen.
        gib: Memory of the GPU in GiB; None for the local device.
        columns: Column that a stage reads -> column of the data.
    """

    model: str
    preferences: str | None = None
    prompts: str | None = None
    texts: str | None = None
    rewards: Sequence[str] = ()
    judge: str | None = None
    gib: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def reward_functions(self) -> list[str]:
        """The reward functions among the rewards. Reads the entry points of all installed packages."""
        functions = registered_names(REWARDS)
        return [name for name in self.rewards if name.partition("(")[0] in functions or ":" in name]

    @property
    def reward_models(self) -> list[str]:
        """The reward models among the rewards."""
        functions = self.reward_functions
        return [name for name in self.rewards if name not in functions]

    @property
    def first_hub_name(self) -> str | None:
        """The first model or data set that is on a Hub and not on this machine; None if there is none."""
        names = (self.model, self.preferences, self.prompts, self.texts)
        return next((name for name in names if name is not None and _is_hub_name(name)), None)

    def __post_init__(self) -> None:
        # --judge takes reward models with this prefix, so --reward does too.
        object.__setattr__(self, "rewards", tuple(name.removeprefix("reward:") for name in self.rewards))
        functions = self.reward_functions
        rewards = tuple(name if name in functions else _absolute_path(name) for name in self.rewards)
        object.__setattr__(self, "rewards", rewards)
        for name in ("model", "preferences", "prompts", "texts"):
            object.__setattr__(self, name, _absolute_path(getattr(self, name), is_data_set=name != "model"))
        if self.judge is not None and self.judge.startswith("reward:"):
            object.__setattr__(self, "judge", f"reward:{_absolute_path(self.judge.removeprefix('reward:'))}")

    def check(self) -> None:
        """Checks the options before anything slow is imported.

        Raises:
            ZooError: The options are incomplete or contradict each other.
        """
        if unknown := next((name for name in self.columns if name not in COLUMNS), None):
            suggestion = ": YAML needs a space after a colon." if ":" in unknown else did_you_mean(unknown, COLUMNS)
            suggestion = suggestion or f": use one of {', '.join(COLUMNS)}."
            raise ZooError(f"--columns names {unknown!r}, which no stage reads{suggestion}")
        for option in ("model", "preferences", "prompts", "texts"):
            _check_path(option, getattr(self, option))
        if self.judge is not None:
            check_judge_name(self.judge)
        for name in self.reward_models:
            if not Path(name).is_dir() and "/" not in name:
                functions = registered_names(REWARDS)
                raise ZooError(
                    f"--reward {name} is neither a reward function, nor a folder, nor a repository"
                    + (did_you_mean(name, functions) or f": the functions are {', '.join(functions)}.")
                )
        if len(self.reward_models) > 1:
            raise ZooError(
                f"--reward names two reward models, {self.reward_models[0]} and {self.reward_models[1]}: pass only one "
                "of them, with any number of functions."
            )
        if self.preferences is None and not self.rewards:
            raise ZooError("There is neither preference data nor a reward: pass --preferences or --reward.")
        if self.preferences is None and self.prompts is None:
            raise ZooError("There are no prompts for PPO: pass --prompts, or --preferences, which contain prompts.")


def _is_hub_name(name: str) -> bool:
    """Whether a name is NAMESPACE/NAME[@REVISION], and not a folder or file on this machine."""
    parts = name.partition("@")[0].split("/")
    return len(parts) == 2 and all(map(is_repository_name, parts)) and not Path(name).exists()


def _check_path(option: str, name: str | None) -> None:
    """Raises ZooError if a path does not exist, or if --model is a file other than GGUF."""
    if option == "model" and name is not None and Path(name).is_file() and not name.lower().endswith(".gguf"):
        raise ZooError(
            f"--model is {name}, which is not a model: pass a model's folder, a GGUF file, or NAMESPACE/NAME."
        )
    if name is None or Path(name).exists() or (option == "model" and Path(name).expanduser().exists()):
        return
    is_data_file = option != "model" and _DATA_FILE.search(name) is not None
    if is_data_file or name.startswith((".", "/", "~")):
        kind = "file" if is_data_file else "file or folder"
        raise ZooError(f"There is no {kind} {name}: check the path after --{option}.")


def _absolute_path(name: str | None, *, is_data_set: bool = False) -> str | None:
    """Returns the absolute path of a folder, a data file or a GGUF file, and any other name unchanged."""
    exists = name is not None and (
        Path(name).exists() if is_data_set or name.endswith(".gguf") else Path(name).is_dir()
    )
    return os.path.abspath(name) if name is not None and exists else name


def check_folder(folder: Path) -> None:
    """Checks that a recipe can be written into a folder.

    Args:
        folder: The folder of the recipe.

    Raises:
        ZooError: The folder is not empty, or its name is not valid for a repository.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ZooError(f"{folder} already exists and is not empty: choose another name, or remove it first.")
    name = os.path.basename(os.path.abspath(folder))
    if not is_repository_name(name):
        raise ZooError(
            f"The recipe would be called {name!r}, which is not a valid name of a repository: use at most 80 "
            "letters, digits, '-', '_' and '.', with a letter or digit at both ends."
        )
