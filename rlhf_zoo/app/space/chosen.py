"""What a comparison Space shows: compare.json, which `rlhf-zoo space deploy` writes, and the Space's variables."""

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...evaluation.votes.data import HubVotes
from ...fileio import hub_id

CHOSEN = "compare.json"
"""Which models a Space shows. A Space without one is not ours."""
SCHEMA = 1
"""Of compare.json. A new key leaves it as it is, and whoever reads the file takes a key that is missing for null."""


@dataclass(frozen=True)
class Chosen:
    """The models that a Space shows.

    Attributes:
        ppo: NAMESPACE/NAME[@REVISION].
        sft: The same; None for that of the lineage.
        reward: The same; None for that of the lineage.
        votes: The data set NAMESPACE/NAME that blind votes go to; None keeps none.
        runs: The PPO repositories of the ablation beside ppo, () for none; None where nothing says: then they are found
            as `find_runs` does.
    """

    ppo: str
    sft: str | None = None
    reward: str | None = None
    votes: str | None = None
    runs: tuple[str, ...] | None = None


def chosen(folder: Path) -> Chosen:
    """Reads what a Space shows.

    The variable RLHF_ZOO_PPO, with RLHF_ZOO_SFT and RLHF_ZOO_REWARD, takes the place of compare.json as a whole.
    RLHF_ZOO_VOTES, and RLHF_ZOO_RUNS with commas between the names, count with the file too. An empty variable is none.

    Args:
        folder: The Space's files.

    Raises:
        ZooError: Neither says what to show, the file is broken, or a name is one that no Hub has.
    """
    ppo = _variable("PPO")
    named = _from_file(folder / CHOSEN) if ppo is None else Chosen(ppo, _variable("SFT"), _variable("REWARD"))
    votes, runs = _variable("VOTES"), _variable("RUNS")
    return replace(
        named,
        votes=named.votes if votes is None else HubVotes(votes).name,
        runs=named.runs if runs is None else _names_in(runs),
    )


def _variable(name: str) -> str | None:
    return os.environ.get(f"RLHF_ZOO_{name}", "").strip() or None


def _names_in(listed: str) -> tuple[str, ...]:
    names = tuple(name for part in listed.split(",") if (name := part.strip()))
    wrong = next((name for name in names if not is_model(name)), None)
    if wrong is not None:
        raise ZooError(
            f"RLHF_ZOO_RUNS names {reprlib.repr(wrong)}, which no Hub has: write NAMESPACE/NAME, with commas between "
            "several."
        )
    return names


def _from_file(file: Path) -> Chosen:
    if not file.is_file():
        raise ZooError("Set the Space's variable RLHF_ZOO_PPO to a PPO checkpoint, such as NAMESPACE/NAME-ppo.")
    try:
        named = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ZooError(f"{file} cannot be read ({error.strerror or error}): deploy the Space again.") from error
    except (ValueError, RecursionError) as error:
        raise ZooError(f"{file} is not JSON ({reprlib.repr(str(error))}): deploy the Space again.") from error
    if not isinstance(named, Mapping):
        raise ZooError(f"{file} holds no object: deploy the Space again.")
    schema = named.get("schema", SCHEMA)
    if type(schema) is int and schema > SCHEMA:
        raise ZooError(f"{file} has the schema {schema}, and this rlhf-zoo reads up to {SCHEMA}: install a newer one.")
    votes, runs = named.get("votes"), named.get("runs")
    is_valid = {
        "schema": type(schema) is int,
        "ppo": is_model(named.get("ppo")),
        **{role: named.get(role) is None or is_model(named[role]) for role in ("sft", "reward")},
        "votes": votes is None or isinstance(votes, str),
        "runs": runs is None or (isinstance(runs, list) and all(map(is_model, runs))),
    }
    wrong = next((key for key, good in is_valid.items() if not good), None)
    if wrong is not None:
        raise ZooError(
            f"{file} has {reprlib.repr(named.get(wrong))} under {wrong!r}, which `rlhf-zoo space deploy` "
            "does not write there: deploy the Space again."
        )
    return Chosen(
        named["ppo"],
        named.get("sft"),
        named.get("reward"),
        None if votes is None else HubVotes(votes).name,
        None if runs is None else tuple(runs),
    )


def is_model(name: Any) -> bool:
    """Whether a name is NAMESPACE/NAME[@REVISION].

    Args:
        name: Any value.
    """
    return isinstance(name, str) and hub_id(name.partition("@")[0]) is not None
