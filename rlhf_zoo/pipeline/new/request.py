"""What somebody asks a recipe for, and what is wrong with it by its words alone."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ZooError
from ...plugins import REWARDS, did_you_mean, registered
from ...runs.recipe import is_repository_name
from ...runs.settings.judge_names import check_judge_name

#: What `new` looks for in data.
COLUMNS = ("prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class RecipeRequest:
    """texts: what SFT learns from. rewards: functions, and at most one model. gib: of the GPU.

    columns: what the data call a column that a stage reads, where that is no usual name: ours -> theirs.
    """

    model: str
    preferences: str | None = None
    prompts: str | None = None
    texts: str | None = None
    rewards: Sequence[str] = ()
    judge: str | None = None
    gib: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def functions(self) -> list[str]:
        """The reward functions among the rewards."""
        known = registered(REWARDS)
        return [name for name in self.rewards if name.partition("(")[0] in known or ":" in name]

    @property
    def models(self) -> list[str]:
        """The reward models among them."""
        functions = self.functions
        return [name for name in self.rewards if name not in functions]

    def __post_init__(self) -> None:
        # As --judge takes them.
        object.__setattr__(self, "rewards", tuple(name.removeprefix("reward:") for name in self.rewards))
        functions = self.functions
        rewards = tuple(name if name in functions else _lasting(name) for name in self.rewards)
        object.__setattr__(self, "rewards", rewards)
        for name in ("model", "preferences", "prompts", "texts"):
            object.__setattr__(self, name, _lasting(getattr(self, name), data=name != "model"))
        if self.judge is not None and self.judge.startswith("reward:"):
            object.__setattr__(self, "judge", f"reward:{_lasting(self.judge.removeprefix('reward:'))}")

    def check(self) -> None:
        """Raises ZooError for what no recipe can be made of; it imports nothing, so that this is said at once."""
        if unknown := next((name for name in self.columns if name not in COLUMNS), None):
            near = ": YAML wants a space behind a colon." if ":" in unknown else did_you_mean(unknown, COLUMNS)
            near = near or f": it is one of {', '.join(COLUMNS)}."
            raise ZooError(f"--columns names {unknown!r}, which nothing reads{near}")
        if self.judge is not None:
            check_judge_name(self.judge)
        for name in self.models:
            if not Path(name).is_dir() and "/" not in name:
                known = registered(REWARDS)
                raise ZooError(
                    f"--reward {name} is no reward function, no folder and no model's name"
                    + (did_you_mean(name, known) or f": the functions are {', '.join(known)}.")
                )
        if len(self.models) > 1:
            raise ZooError(
                f"--reward names two reward models, {self.models[0]} and {self.models[1]}: give one, and functions."
            )
        if self.preferences is None and not self.rewards:
            raise ZooError("Nothing says what is better: give --preferences, or --reward with --prompts.")
        if self.preferences is None and self.prompts is None:
            raise ZooError("There are no prompts to answer: give --prompts, or --preferences, whose prompts are taken.")


def _lasting(name: str | None, *, data: bool = False) -> str | None:
    """A folder by a name that holds wherever the recipe is run from, and a file of data; any other name as it is."""
    there = name is not None and (Path(name).exists() if data else Path(name).is_dir())
    return str(Path(name).absolute()) if name is not None and there else name


def check_folder(folder: Path) -> None:
    """Raises ZooError where a recipe cannot be written, or would be written over something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ZooError(f"{folder} is there already and is not empty: choose another name, or remove it first.")
    name = os.path.basename(os.path.abspath(folder))
    if not is_repository_name(name):
        raise ZooError(
            f"The recipe would be called {name!r}, and its repositories could not be: use at most 80 "
            "letters, digits, '-', '_' and '.', with a letter or digit at both ends."
        )
