"""Prepares a run that trains a recipe's reward model on a data set with only pairs, such as people's votes.

This is what `rlhf-zoo reward RECIPE --dataset_name NAME` does for such a data set. The changed keys are recorded, so
that the published model can be reproduced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from ..errors import ZooError
from ..fileio import hub_id
from ..hub.client.checked_data import open_checked
from ..hub.client.connect import Hub
from ..hub.client.refusals import client_errors, is_disk_full, reason
from .context import RunContext
from .data.layout import STOP_KEYS, TRUNCATION_KEYS
from .data.sources import DataSource, find_data, reading_from
from .recipe import Recipe
from .record import fingerprint

PAIR_COLUMNS = ["prompt", "chosen", "rejected"]
#: Names that a configuration with pairs may have: this package's name, and the Hub's default.
PAIR_CONFIGURATIONS = ("preferences", "default")
#: Keys of PPO that `sampler_arguments` reads.
_SAMPLER_KEYS = ("response_length", "temperature", *TRUNCATION_KEYS, *STOP_KEYS)
_SIMULATION_KEYS = ("simulated_pairs", "simulated_test_pairs", "pairs_seed", "preference")
#: Share of the prompts to hold out of pairs without a test split, if the recipe sets none.
HELD_OUT_SHARE = 0.1


def sampler_arguments(context: RunContext) -> dict[str, Any]:
    """Returns PPO's sampling settings, with which the reward stage samples pairs and the texts that center its scores.

    Args:
        context: The run.

    Returns:
        Keyword arguments of `complete`: max_new_tokens, temperature and, if set, truncation and stops. A recipe without
        PPO samples up to 64 tokens at temperature 1.
    """
    if "ppo" in context.recipe.stages:
        ppo = context.settings("ppo").trainer
        arguments = {"max_new_tokens": ppo.response_length, "temperature": ppo.temperature}
        arguments |= {"truncation": ppo.truncation} if ppo.truncation else {}
        return arguments | ({"stops": ppo.configured_stop_ids} if ppo.configured_stop_ids is not None else {})
    return {"max_new_tokens": 64, "temperature": 1.0}


@dataclass(frozen=True)
class NamedPairs:
    """A data set with pairs, but without the recipe's prompts.

    Attributes:
        name: A Hub id or a folder.
        commit: The commit that is read; None for a folder.
        configuration: The configuration that holds the pairs.
        test_split: Test split of the configuration; None if it has no test split.
        hub: Label of the Hub that has the data set; None for the run's own Hub.
    """

    name: str
    commit: str | None
    configuration: str
    test_split: str | None
    hub: str | None = None

    def open(self, hub: Hub) -> DataSource:
        """Opens the data set at its commit.

        Args:
            hub: The run's Hub.

        Raises:
            ZooError: The data set cannot be found.
        """
        data_fingerprint = fingerprint({"repo": self.name, "commit": self.commit})
        repo = None if Path(self.name).is_dir() else self.name
        other_hub = {} if self.hub is None else {"hub": self.hub}
        lineage = {"repo": repo, "commit": self.commit, "fingerprint": data_fingerprint, **other_hub}
        return find_data(self.name, self.commit, hub, recorded_lineage=lineage)


def recipe_on_pairs(recipe: Recipe, pairs: NamedPairs, *, sampling: Mapping[str, Any]) -> Recipe:
    """Returns the recipe for training its reward model on `pairs`, with every key that reproducing the model needs.

    No pairs are simulated. Scores are centered over samples of the SFT model on the prompts of the pairs. Without a
    test split, the recipe's held_out_share of the prompts is held out, or a tenth if the recipe sets none.

    Args:
        recipe: The recipe.
        pairs: The data set.
        sampling: Keys of PPO and their values: how the samples are made.
    """
    replaced_keys = (*_SIMULATION_KEYS, "held_out_share")
    reward = {key: value for key, value in recipe.stages["reward"].items() if key not in replaced_keys}
    reward |= {"dataset_config": pairs.configuration, "dataset_test_split": pairs.test_split}
    if pairs.test_split is None:
        reward["held_out_share"] = recipe.stages["reward"].get("held_out_share") or HELD_OUT_SHARE
    ppo = {**recipe.stages.get("ppo", {}), **sampling, "dataset_config": pairs.configuration}
    ppo.pop("held_out_share", None)  # it concerns PPO's prompts, which this run does not read
    shared = {**recipe.shared, "dataset_name": pairs.name, "dataset_revision": pairs.commit}
    shared |= {"corpus": None, "corpus_args": {}, "preferences": None}
    return replace(recipe, shared=shared, stages={**recipe.stages, "reward": reward, "ppo": ppo})


def run_on_pairs(context: RunContext, pairs: NamedPairs) -> RunContext:
    """Returns the run with `recipe_on_pairs`. Flags of the reward stage and of PPO's sampling still apply.

    Args:
        context: The run.
        pairs: The data set.

    Raises:
        ZooError: A flag asks for simulated pairs.
    """
    flags = {stage: dict(keys) for stage, keys in context.flags.items()}
    for key in ("dataset_name", "dataset_revision", "corpus", "corpus_args", "preferences"):
        flags.get("recipe", {}).pop(key, None)
    reward_flags = flags.get("reward", {})
    if simulation_flag := next((key for key in _SIMULATION_KEYS if key in reward_flags), None):
        raise ZooError(
            f"--{simulation_flag} simulates pairs, but --dataset_name names {pairs.name}: pass only one of the two."
        )
    arguments = sampler_arguments(context)
    sampling = {"response_length": arguments["max_new_tokens"], "temperature": arguments["temperature"]}
    # Sampling flags move into the recipe, so that the model can be reproduced. PPO's other flags do not affect it.
    ppo_flags = flags.pop("ppo", {})
    if "ppo" in context.recipe.stages:
        trainer = context.settings("ppo").trainer
        sampling |= {key: getattr(trainer, key) for key in _SAMPLER_KEYS if key in ppo_flags}
    return replace(context, recipe=recipe_on_pairs(context.recipe, pairs, sampling=sampling), flags=flags)


def find_named_pairs(context: RunContext) -> NamedPairs | None:
    """Returns the data set that --dataset_name names, if it has only pairs.

    A data set that a corpus reads, or that also has PPO's prompts, replaces the recipe's data as in any other stage. A
    run that has begun keeps its commit, even if votes have been added since.

    Args:
        context: The run.

    Returns:
        The data set; None if the stage reads its data as usual.

    Raises:
        ZooError: The data set cannot be read.
    """
    flags = context.flags.get("recipe", {})
    name, revision = flags.get("dataset_name"), flags.get("dataset_revision")
    if name is None or not (Path(name).is_dir() or hub_id(name)):
        return None
    data_document = context.record("data").read()
    if data_document.get("status") == "finished" and data_document.get("resolved", {}).get("dataset_name") == name:
        return None  # the recipe's corpus reads this data set, so it is not a set of pairs
    reward_document = {} if context.restart else context.record("reward").read()
    recorded_settings = reward_document.get("resolved", {})
    recorded_recipe = recorded_settings.get("recipe", {})
    configuration = recorded_settings.get("dataset_config")
    # `recipe_on_pairs` gives PPO the configuration of the pairs, which the recipe's own PPO does not read.
    ppo_configuration = recorded_settings.get("ppo", {}).get("dataset_config")
    is_pairs_run = configuration == ppo_configuration and configuration not in (None, _prompts_configuration(context))
    if is_pairs_run and recorded_recipe.get("dataset_name") == name:
        commit, test_split = recorded_recipe["dataset_revision"], recorded_settings["dataset_test_split"]
        if revision in (None, commit):
            hub_label = (reward_document.get("dataset") or {}).get("hub")
            return NamedPairs(name, commit, configuration, test_split, hub_label)
    return _find_pairs(context, name, revision)


def _prompts_configuration(context: RunContext) -> str:
    """Returns the configuration that PPO reads its prompts from."""
    if "ppo" not in context.recipe.stages:
        return "prompts"
    return context.settings("ppo").data.dataset_config or "default"


def _find_pairs(context: RunContext, name: str, revision: str | None) -> NamedPairs | None:
    source = find_data(name, revision, context.hub)
    is_local, commit = Path(name).is_dir(), source.lineage["commit"]
    try:
        with (
            reading_from(source.hub) as options,
            open_checked(name, commit, token=source.hub.token) as data,
        ):
            commit = data.revision
            configurations = data.configurations(**options)
            # A data set that also has prompts replaces the recipe's data for all stages.
            if _prompts_configuration(context) in configurations:
                return None
            flags = context.flags.get("reward", {})
            keys = {**context.recipe.stages["reward"], **flags}
            train, test = keys.get("dataset_train_split", "train"), keys.get("dataset_test_split", "test")
            for configuration in [flags["dataset_config"]] if "dataset_config" in flags else PAIR_CONFIGURATIONS:
                if configuration not in configurations:
                    continue
                splits = data.splits(configuration, **options)
                if train in splits and set(PAIR_COLUMNS) <= set(source.first_row(configuration, train) or {}):
                    test_split = test if test in splits else None
                    return NamedPairs(name, commit, configuration, test_split, source.lineage.get("hub"))
    except (ValueError, datasets.exceptions.DatasetsError, *client_errors()) as error:
        if is_disk_full(error):
            raise
        if is_local or context.shared.corpus is None:
            return None  # the stage reports the problem when it reads the data set
        raise ZooError(
            f"The data set {name} cannot be read ({reason(error)}): check its name and {source.hub.flag}."
        ) from error
    return None
