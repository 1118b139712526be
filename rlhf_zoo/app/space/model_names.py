"""Reads which models a comparison Space shows, from compare.json and the Space's variables."""

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ZooError
from ...evaluation.votes.data import HubVotes
from ...fileio import hub_id

#: The file that names the models of a Space. Each Space that rlhf-zoo deployed has it.
MODELS_FILE = "compare.json"
#: Version of compare.json. Adding a key does not change it: readers treat missing keys as null.
SCHEMA = 1


@dataclass(frozen=True)
class ModelNames:
    """The names of the models that a Space shows.

    Attributes:
        ppo: NAMESPACE/NAME[@REVISION].
        sft: The SFT model, in the same form; None for the one in the lineage.
        reward: The reward model, in the same form; None for the one in the lineage.
        votes: The data set NAMESPACE/NAME that receives the votes of the blind test; None if votes are not stored.
        runs: The other PPO repositories of the ablation; () for none; None to look them up on the Hub.
    """

    ppo: str
    sft: str | None = None
    reward: str | None = None
    votes: str | None = None
    runs: tuple[str, ...] | None = None


def read_model_names(folder: Path) -> ModelNames:
    """Reads which models a Space shows.

    If the variable RLHF_ZOO_PPO is set, the models are those that it, RLHF_ZOO_SFT and RLHF_ZOO_REWARD name, and
    compare.json is not read. Otherwise RLHF_ZOO_SFT and RLHF_ZOO_REWARD have no effect. In both cases, RLHF_ZOO_VOTES
    and RLHF_ZOO_RUNS (names separated by commas) take precedence over compare.json. Empty variables are ignored.

    Args:
        folder: The Space's files.

    Raises:
        ZooError: No PPO model is named, compare.json is invalid, or a name is not a valid repository id.
    """
    ppo = _read_variable("PPO")
    names = (
        _read_models_file(folder / MODELS_FILE)
        if ppo is None
        else ModelNames(ppo, _read_variable("SFT"), _read_variable("REWARD"))
    )
    votes, runs = _read_variable("VOTES"), _read_variable("RUNS")
    return replace(
        names,
        votes=names.votes if votes is None else HubVotes(votes).name,
        runs=names.runs if runs is None else _parse_runs(runs),
    )


def _read_variable(name: str) -> str | None:
    return os.environ.get(f"RLHF_ZOO_{name}", "").strip() or None


def _parse_runs(value: str) -> tuple[str, ...]:
    names = tuple(name for part in value.split(",") if (name := part.strip()))
    invalid = next((name for name in names if not is_model_name(name)), None)
    if invalid is not None:
        raise ZooError(
            f"RLHF_ZOO_RUNS contains {reprlib.repr(invalid)}, which is not a repository id: write NAMESPACE/NAME, with "
            "commas between several."
        )
    return names


def _read_models_file(file: Path) -> ModelNames:
    if not file.is_file():
        raise ZooError("Set the Space's variable RLHF_ZOO_PPO to a PPO checkpoint, such as NAMESPACE/NAME-ppo.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ZooError(f"{file} cannot be read ({error.strerror or error}): deploy the Space again.") from error
    except (ValueError, RecursionError) as error:
        raise ZooError(f"{file} is not JSON ({reprlib.repr(str(error))}): deploy the Space again.") from error
    if not isinstance(content, Mapping):
        raise ZooError(f"{file} is not a JSON object: deploy the Space again.")
    schema = content.get("schema", SCHEMA)
    if type(schema) is int and schema > SCHEMA:
        raise ZooError(f"{file} has schema {schema}; this rlhf-zoo reads up to {SCHEMA}. Install a newer version.")
    votes, runs = content.get("votes"), content.get("runs")
    is_valid_by_key = {
        "schema": type(schema) is int,
        "ppo": is_model_name(content.get("ppo")),
        **{role: content.get(role) is None or is_model_name(content[role]) for role in ("sft", "reward")},
        "votes": votes is None or isinstance(votes, str),
        "runs": runs is None or (isinstance(runs, list) and all(map(is_model_name, runs))),
    }
    bad_key = next((key for key, is_valid in is_valid_by_key.items() if not is_valid), None)
    if bad_key is not None:
        raise ZooError(
            f"{file} has the invalid value {reprlib.repr(content.get(bad_key))} under {bad_key!r}: deploy the Space "
            "again."
        )
    return ModelNames(
        content["ppo"],
        content.get("sft"),
        content.get("reward"),
        None if votes is None else HubVotes(votes).name,
        None if runs is None else tuple(runs),
    )


def is_model_name(name: object) -> bool:
    """Whether a value is a model's name, NAMESPACE/NAME[@REVISION].

    Args:
        name: Any value.
    """
    return isinstance(name, str) and hub_id(name.partition("@")[0]) is not None
