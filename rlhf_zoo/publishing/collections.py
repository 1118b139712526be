"""A Collection for each recipe: its SFT model, reward model, PPO model and comparison Space, in this order."""

from collections.abc import Mapping
from typing import Any

from ..hub.client.connect import CLIENT, Hub
from ..hub.client.refusals import refusals_as
from ..runs.registry import STAGES

SPACE_NOTE = "comparison of SFT with PPO"
MAX_TITLE = 60


def title_of(recipe: str) -> str:
    """Returns the title of a recipe's Collection. A Hub allows 60 characters.

    Args:
        recipe: Name of the recipe.

    Returns:
        The title.
    """
    return f"{recipe}: SFT, RM, PPO" if len(recipe) <= MAX_TITLE - 14 else recipe[:MAX_TITLE]


def collect(
    recipe: str,
    namespace: str,
    repos: Mapping[str, str],
    space: str | None = None,
    *,
    private: bool = False,
    hub: Hub = CLIENT,
) -> str:
    """Groups what a recipe published into its Collection, which is created where none has its title.

    What is in the Collection stays, and what is missing is added, so a second call changes nothing.

    Args:
        recipe: Name of the recipe.
        namespace: Owner of the Collection.
        repos: Id of each model -> its stage; models of unknown stages come last.
        space: Id of the comparison Space, if any.
        private: Whether a new Collection is private.
        hub: The Hub.

    Returns:
        The Collection's slug.

    Raises:
        ZooError: The Hub refuses.
    """
    stages = list(STAGES)
    order = sorted(repos, key=lambda repo: (stages.index(repos[repo]) if repos[repo] in stages else len(stages), repo))
    wanted = [(repo, "model", STAGES[repos[repo]].note if repos[repo] in STAGES else repos[repo]) for repo in order]
    wanted += [(space, "space", SPACE_NOTE)] if space is not None else []
    title = title_of(recipe)
    with refusals_as(
        f"The Collection {title!r} of {namespace} cannot be made on {hub.name}",
        "check that the token may write Collections, or leave it out.",
    ):
        api = hub.api()
        slug = _slug(api, title, namespace, private=private)
        there = _items(api, slug)
        for repo, kind, note in wanted:
            if (repo, kind) not in there:
                api.add_collection_item(slug, repo, kind, note=note, exists_ok=True)  # type: ignore[arg-type]
        _arrange(api, slug, [(repo, kind) for repo, kind, _ in wanted])
    return slug


def _slug(api: Any, title: str, namespace: str, *, private: bool) -> str:
    """Returns the slug of the Collection with this title; of several, the first."""
    for collection in api.list_collections(owner=namespace):
        if collection.title == title:
            return collection.slug
    description = "Made by rlhf-zoo: every model names its data, settings, reward and KL on its card."
    new_collection = api.create_collection(
        title, namespace=namespace, description=description, private=private, exists_ok=True
    )
    return new_collection.slug


def _items(api: Any, slug: str) -> dict[tuple[str, str], str]:
    """Returns (repository, type) -> the item's own id, in order.

    It asks for the Collection itself, since a listing of Collections holds only the first four items of each.
    """
    items = sorted(api.get_collection(slug).items, key=lambda item: item.position)
    return {(item.item_id, item.item_type): item.item_object_id for item in items}


def _arrange(api: Any, slug: str, wanted: list[tuple[str, str]]) -> None:
    """Moves the wanted items to the front, unless they are in order already, perhaps with others between them."""
    items = _items(api, slug)
    if [item for item in items if item in wanted] == wanted:
        return
    for place, item in enumerate(wanted):
        api.update_collection_item(slug, items[item], position=place)
