"""Groups a recipe's SFT model, reward model, PPO model and comparison Space, in this order, into a Collection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..hub.client.connect import DEFAULT_HUB, Hub
from ..hub.client.refusals import translate_hub_errors
from ..runs.registry import STAGES

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SPACE_NOTE = "comparison of SFT with PPO"
TITLE_SUFFIX = ": SFT, RM, PPO"
MAX_TITLE = 60  # characters; a Hub refuses more


def title_of(recipe: str) -> str:
    """Returns the title of a recipe's Collection. If it would be too long, it is the name alone, truncated.

    Args:
        recipe: Name of the recipe.
    """
    title = recipe + TITLE_SUFFIX
    return title if len(title) <= MAX_TITLE else recipe[:MAX_TITLE]


def collect(
    recipe: str,
    namespace: str,
    repos: Mapping[str, str],
    space: str | None = None,
    *,
    private: bool = False,
    hub: Hub = DEFAULT_HUB,
) -> str:
    """Groups a recipe's repositories into a Collection, which is created if the namespace has none with its title.

    Missing items are added, and the recipe's items are put in order. Items from elsewhere stay. A second call changes
    nothing.

    Args:
        recipe: Name of the recipe.
        namespace: Owner of the Collection.
        repos: Id of each model -> its stage; models of unknown stages come last.
        space: Id of the comparison Space, if any.
        private: Whether to make a new Collection private.
        hub: The Hub to write to.

    Returns:
        The Collection's slug.

    Raises:
        ZooError: The Hub refuses.
    """
    order = {stage: index for index, stage in enumerate(STAGES)}
    models = sorted(repos.items(), key=lambda model: (order.get(model[1], len(order)), model[0]))
    items = [(repo, "model", STAGES[stage].note if stage in STAGES else stage) for repo, stage in models]
    items += [(space, "space", SPACE_NOTE)] if space is not None else []
    title = title_of(recipe)
    with translate_hub_errors(
        f"Cannot create the Collection {title!r} of {namespace} on {hub.name}",
        "check that the token may write Collections.",
    ):
        api = hub.api()
        slug = _find_or_create(api, title, namespace, private=private)
        existing_items = _existing_items(api, slug)
        for repo, kind, note in items:
            if (repo, kind) not in existing_items:
                api.add_collection_item(slug, repo, kind, note=note, exists_ok=True)  # type: ignore[arg-type]
        _arrange(api, slug, [(repo, kind) for repo, kind, _ in items])
    return slug


def _find_or_create(api: HfApi, title: str, namespace: str, *, private: bool) -> str:
    """Returns the slug of the first Collection with this title. Creates one if there is none."""
    for collection in api.list_collections(owner=namespace):
        if collection.title == title:
            return collection.slug
    description = "Made by rlhf-zoo: every model card names data, settings, reward and KL."
    return api.create_collection(
        title, namespace=namespace, description=description, private=private, exists_ok=True
    ).slug


def _existing_items(api: HfApi, slug: str) -> dict[tuple[str, str], str]:
    """Returns (repository, type) -> id of the item, in order."""
    # Request the Collection itself, because a listing of Collections has only the first four items of each.
    items = sorted(api.get_collection(slug).items, key=lambda item: item.position)
    return {(item.item_id, item.item_type): item.item_object_id for item in items}


def _arrange(api: HfApi, slug: str, order: list[tuple[str, str]]) -> None:
    """Moves items to the front in this order. Does nothing if they are in order already, even among other items."""
    item_ids = _existing_items(api, slug)
    if [item for item in item_ids if item in order] == order:
        return
    for index, item in enumerate(order):
        api.update_collection_item(slug, item_ids[item], position=index)
