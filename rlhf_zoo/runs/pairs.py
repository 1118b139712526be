"""`rlhf-zoo reward RECIPE --dataset_name NAME` where NAME holds pairs and nothing else, such as votes of people.

The recipe is trained on them as they are: the reward stage's keys that its own data needed give way, and every key that
takes their place is said, so that what is published can be made again.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from ..errors import ZooError
from ..fileio import hub_id
from ..hub.client.connect import Hub
from ..hub.client.data_gate import gated
from ..hub.client.refusals import client_errors, is_disk_full, reason
from .context import RunContext
from .data.sources import DataSource, find_data, reading_from
from .recipe import Recipe
from .record import fingerprint

COLUMNS = ["prompt", "chosen", "rejected"]
#: What configurations of pairs are called: by this package, and by the Hub where nobody names one.
CONFIGURATIONS = ("preferences", "default")
SIMULATION = ("simulated_pairs", "simulated_test_pairs", "pairs_seed", "preference")
HELD_OUT_SHARE = 0.1


def sampling(context: RunContext) -> dict[str, Any]:
    """The sampling that PPO will use: scores are centered over what the policy will write at its start."""
    if "ppo" in context.recipe.stages:
        ppo = context.settings("ppo").trainer
        drawn = {"max_new_tokens": ppo.response_length, "temperature": ppo.temperature}
        drawn |= {"truncation": ppo.truncation} if ppo.truncation else {}
        return drawn | ({"stops": ppo.own_stops} if ppo.own_stops is not None else {})
    return {"max_new_tokens": 64, "temperature": 1.0}


@dataclass(frozen=True)
class NamedPairs:
    """A data set of pairs without the recipe's prompts: name, the commit it stands at, and where its pairs are.

    commit: None for a folder. test_split: None where it has none. hub: the label of the Hub that has it,
    None where that is the run's.
    """

    name: str
    commit: str | None
    configuration: str
    test_split: str | None
    hub: str | None = None

    def source(self, hub: Hub) -> DataSource:
        """hub: the run's."""
        told = fingerprint({"repo": self.name, "commit": self.commit})
        repo = None if Path(self.name).is_dir() else self.name
        elsewhere = {} if self.hub is None else {"hub": self.hub}
        found = {"repo": repo, "commit": self.commit, "fingerprint": told, **elsewhere}
        return find_data(self.name, self.commit, hub, before=found)


def recipe_on_pairs(recipe: Recipe, pairs: NamedPairs, *, response_length: int, temperature: float) -> Recipe:
    """The recipe as it is when its reward model is trained on `pairs`, every key said, so that it can be made again.

    Nothing is simulated. Scores are centered over samples of the SFT model on the prompts of the pairs, drawn as the
    recipe draws them (response_length, temperature). Without a test split a tenth of the prompts is held out.
    """
    settled = (*SIMULATION, "held_out_share")
    reward = {key: value for key, value in recipe.stages["reward"].items() if key not in settled}
    reward |= {"dataset_config": pairs.configuration, "dataset_test_split": pairs.test_split}
    if pairs.test_split is None:
        reward["held_out_share"] = recipe.stages["reward"].get("held_out_share") or HELD_OUT_SHARE
    drawn = {"response_length": response_length, "temperature": temperature}
    ppo = {**recipe.stages.get("ppo", {}), **drawn, "dataset_config": pairs.configuration}
    ppo.pop("held_out_share", None)  # of PPO's own prompts
    shared: dict[str, Any] = {
        "dataset_name": pairs.name,
        "dataset_revision": pairs.commit,
        "corpus": None,
        "corpus_args": {},
    }
    return replace(
        recipe,
        shared={**recipe.shared, **shared, "preferences": None},
        stages={**recipe.stages, "reward": reward, "ppo": ppo},
    )


def on_pairs(context: RunContext, pairs: NamedPairs) -> RunContext:
    """The run with `recipe_on_pairs`; what flags say of the reward stage still counts."""
    flags = {stage: dict(keys) for stage, keys in context.flags.items()}
    for key in ("dataset_name", "dataset_revision", "corpus", "corpus_args", "preferences"):
        flags.get("recipe", {}).pop(key, None)
    asked = flags.get("reward", {})
    if given := next((key for key in SIMULATION if key in asked), None):
        raise ZooError(f"--{given} simulates pairs, and --dataset_name names {pairs.name}: give one of the two.")
    drawn = sampling(context)
    flags["ppo"] = {}  # what they say of sampling is in `drawn`, and the rest is of another stage
    recipe = recipe_on_pairs(
        context.recipe, pairs, response_length=drawn["max_new_tokens"], temperature=drawn["temperature"]
    )
    return replace(context, recipe=recipe, flags=flags)


def named_pairs(context: RunContext) -> NamedPairs | None:
    """What --dataset_name names, where that is pairs alone; None where the recipe's data come from elsewhere.

    A data set that a corpus reads, or that holds the prompts too, takes the place of the recipe's data as in any stage.
    A run that was begun stays at its commit, however many votes came since. Raises ZooError for a data set that is not
    to be had.
    """
    asked = context.flags.get("recipe", {})
    name, revision = asked.get("dataset_name"), asked.get("dataset_revision")
    if name is None or not (Path(name).is_dir() or hub_id(name)):
        return None
    made = context.record("data").read()
    if made.get("status") == "finished" and made.get("resolved", {}).get("dataset_name") == name:
        return None  # the corpus has read it
    document = {} if context.restart else context.record("reward").read()
    begun = document.get("resolved", {})
    before = begun.get("recipe", {})
    alone = begun.get("ppo", {}).get("dataset_config") == begun.get("dataset_config")
    if alone and before.get("dataset_name") == name and revision in (None, before["dataset_revision"]):
        at = (document.get("dataset") or {}).get("hub")
        return NamedPairs(name, before["dataset_revision"], begun["dataset_config"], begun["dataset_test_split"], at)
    return _look_for_pairs(context, name, revision)


def _look_for_pairs(context: RunContext, name: str, revision: str | None) -> NamedPairs | None:
    source = find_data(name, revision, context.hub)
    prompts = context.settings("ppo").data.dataset_config if "ppo" in context.recipe.stages else "prompts"
    local, commit = Path(name).is_dir(), source.lineage["commit"]
    try:
        with (
            reading_from(source.hub) as options,
            gated(name, commit, token=source.hub.token) as data,
        ):
            commit = data.commit
            known = data.configurations(**options)
            if prompts in known:  # that PPO will roll out
                return None
            flags = context.flags.get("reward", {})
            stage = {**context.recipe.stages["reward"], **flags}
            train, test = stage.get("dataset_train_split", "train"), stage.get("dataset_test_split", "test")
            for configuration in [flags["dataset_config"]] if "dataset_config" in flags else CONFIGURATIONS:
                if configuration not in known:
                    continue
                splits = data.splits(configuration, **options)
                if train in splits and set(COLUMNS) <= set(source.first_row(configuration, train) or {}):
                    held_out = test if test in splits else None
                    return NamedPairs(name, commit, configuration, held_out, source.lineage.get("hub"))
    except (ValueError, datasets.exceptions.DatasetsError, *client_errors()) as error:
        if is_disk_full(error):
            raise
        if local or context.shared.corpus is None:
            return None  # whoever reads it says what is wrong
        raise ZooError(
            f"The data set {name} cannot be looked at ({reason(error)}): check its name and {source.hub.flag}."
        ) from error
    return None
