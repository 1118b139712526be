"""The runs of a sweep: one recipe, one SFT and reward model, and PPO runs over a grid of its keys and over seeds.

runs/RECIPE/sweep/NAME/ holds the stages ppo and eval of a cell; what comes before PPO lies in runs/RECIPE, as for the
recipe's own run. A cell's name is its tag in the recipe's PPO repository.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import write_json
from ...plugins import did_you_mean
from ...runs.data.layout import HOLDS_OUT
from ...runs.registry import STAGES
from ...runs.settings.declared import declared_keys
from ...runs.settings.values import coerce
from .ablate import Outcome, Variant, told

FOLDER = "sweep"
EXAMPLE = "kl_coef=0.02,0.05,0.1"


def read_grid(asked: Sequence[str], *, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """PPO's keys and the values of each, every one once, in the order of `asked`: ["kl_coef=0.02,0.05", ...].

    given: the other flags of PPO. Raises ZooError for what is no key of PPO or no value of it, and for a key that is
    given twice.
    """
    listed = dict(_parts(one) for one in asked)
    if len(listed) < len(asked):
        raise ZooError("--grid lists the values of one key twice: write them into one list.")
    for key in listed:
        _check_key(key, given)
    from ...runs.settings.parse import stage_keys

    hints = {key: hint for key, (hint, _, _) in stage_keys("ppo").items()}
    return {key: _values(key, text, hints[key]) for key, text in listed.items()}


def _parts(asked: str) -> tuple[str, str]:
    key, _, text = asked.partition("=")
    if not key.strip() or not text.strip():
        raise ZooError(f"--grid is {asked!r}: write KEY=VALUE,VALUE, such as {EXAMPLE}.")
    return key.strip().removeprefix("ppo.").replace("-", "_"), text


def _check_key(key: str, given: Mapping[str, Any]) -> None:
    known = declared_keys("ppo")
    if key.partition(".")[0] in STAGES:
        raise ZooError(f"--grid lists {key}, and all cells share one SFT policy and reward model: list keys of PPO.")
    if key in HOLDS_OUT:
        raise ZooError(f"--grid lists {key}, which may decide what SFT learns from: list keys of PPO's training.")
    if key == "seed":
        raise ZooError("--grid lists seeds: say how many by --seeds.")
    if key not in known:
        hint = did_you_mean(key, known) or ": `rlhf-zoo recipes keys ppo` lists them."
        raise ZooError(f"--grid lists {key}, which is no key of PPO{hint}")
    if key in given:
        raise ZooError(f"--ppo.{key} is given and --grid lists values of it: leave --ppo.{key} out.")


def _values(key: str, text: str, hint: Any) -> list[Any]:
    found = []
    for one in coerce(text, list[str]):
        try:
            found.append(coerce(one.strip(), hint))
        except ValueError as error:
            raise ZooError(f"--grid lists {one.strip()!r} for {key}: give {error}.") from error
    return [value for place, value in enumerate(found) if value not in found[:place]]


def cells(grid: Mapping[str, Sequence[Any]], *, seeds: int, first: int) -> list[Variant]:
    """Every combination of the grid's values under each seed: the first has the seed that the recipe has anyway.

    Raises ZooError where two of them would have one name.
    """
    made = [
        Variant(tuple(zip(grid, values, strict=True)), first + more if more else None, FOLDER)
        for values in itertools.product(*grid.values())
        for more in range(seeds)
    ]
    names = [cell.name for cell in made]
    twice = next((cell for place, cell in enumerate(made) if cell.name in names[:place]), None)
    if twice is not None:
        raise ZooError(
            f"Two cells of --grid would both be called {twice.name}: write values that differ in their words."
        )
    return made


def write_overview(run: Path, recipe: str, grid: Mapping[str, Sequence[Any]], outcomes: Sequence[Outcome]) -> Path:
    """Writes overview.json beside the cells; returns its path."""
    path = run / FOLDER / "overview.json"
    write_json(path, {"schema": 1, "recipe": recipe, "grid": dict(grid), **told(outcomes)})
    return path
