"""Whether every split that a run reads is there, in a form that its stage can read, before anything trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from ..chat import Chat
from ..errors import ZooError
from ..hub.connect import CLIENT, Hub
from ..hub.refusals import reason
from ..recipes import Recipe
from .columns import value_of
from .data import FORMS, evaluated_split, own_pairs_at, text_field
from .layout import Form, conversational, in_form
from .settings import RecipeConfig, StageSettings
from .sources import NoSuchPart, find_data
from .tables import dataset_of


def check_forms(shared: RecipeConfig, stages: Mapping[str, StageSettings], hub: Hub = CLIENT) -> dict[str, str]:
    """Raises ZooError for columns that a stage cannot read, as far as the data sets' pages tell without a download.

    What the Hub does not say, or a Hub that does not answer, is left to the stage. Returns it: data set -> why.
    """
    look = _Look(shared, hub)
    for stage, settings in stages.items():
        if stage == "reward" and settings.data.simulated_pairs is not None:
            continue
        of, data, text = f"the stage {stage}", settings.data, text_field(settings)
        rows = look.first_row(data, data.dataset_train_split, FORMS[stage], of=of, text=text)
        for split in ("dataset_test_split", "dataset_validation_split"):
            if getattr(data, split, None) is not None:
                look.first_row(data, getattr(data, split), FORMS[stage], of=of, text=text)
        if stage == "ppo":
            look.first_row(data, evaluated_split(shared, data)[0], "prompts", of="the evaluation")
        if rows is not None and shared.chat != Chat() and not conversational(rows):
            raise ZooError(
                f"The data set {settings.data.dataset_name or shared.dataset_name} of {of} has plain texts, and "
                "recipe.yaml says how conversations are rendered: set conversational to true, or leave system_prompt, "
                "chat_template_kwargs and strip_thoughts out."
            )
    return look.unseen


def check_labeled(shared: RecipeConfig, hub: Hub = CLIENT) -> dict[str, str]:
    """The same of the texts and labels that the judge `classifier` learns from."""
    look, data = _Look(shared, hub), shared.evaluation.labeled_data
    look.first_row(data, data.dataset_train_split, "labeled", of="the judge classifier")
    return look.unseen


def check_own_pairs(recipe: Recipe, shared: RecipeConfig, hub: Hub = CLIENT) -> dict[str, str]:
    """The same of the pairs of `evaluation.own_pairs`, where it names any."""
    look, data = _Look(shared, hub), own_pairs_at(recipe, shared)
    if data is not None:
        look.first_row(data, data.dataset_train_split, "pairs", of="evaluation.own_pairs")
    return look.unseen


class _Look:
    """First rows of data sets, each looked at once. unseen: of those that cannot be looked at yet, why."""

    def __init__(self, shared: RecipeConfig, hub: Hub) -> None:
        self.shared, self.hub, self.unseen = shared, hub, dict[str, str]()
        self._seen: dict[Any, dict[str, Any] | None] = {}

    def first_row(self, data: Any, split: str, form: Form, *, of: str, text: str = "text") -> datasets.Dataset | None:
        """The split's first row in its form; None where that cannot be told. Raises ZooError where it has none."""
        shared = self.shared
        name = data.dataset_name or (shared.dataset_name if shared.corpus is None else None)
        revision = data.dataset_revision if data.dataset_name else shared.dataset_revision
        if name is None or name in self.unseen:
            return None
        key = (name, revision, data.dataset_config, split)
        if key not in self._seen:
            self._seen[key] = self._look(*key, of=of)
        if (first := self._seen[key]) is None:
            return None
        rows, what = dataset_of({name: [value] for name, value in first.items()}), f"The data set {name} of {of}"
        for column in data.keep_above:
            value_of(first, column, of=what)
        return in_form(rows, form, columns=data.columns, turns=shared.conversational, text=text, of=what)

    def _look(
        self, name: str, revision: str | None, configuration: str | None, split: str, *, of: str
    ) -> dict[str, Any] | None:
        source = find_data(name, revision, self.hub)
        try:
            return source.first_row(configuration, split)
        except NoSuchPart as error:
            raise NoSuchPart(f"{str(error).removesuffix('.')} of {of}.") from error
        except ZooError as error:
            if Path(name).exists():
                raise
            self.unseen[name] = source.unanswered or reason(error.__cause__ or error)
            return None
