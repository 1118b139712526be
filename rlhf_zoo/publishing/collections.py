"""A Collection for each recipe: its SFT model, reward model, PPO model and comparison Space, in this order."""

from collections.abc import Mapping
from typing import Any

from ..hub.client.connect import CLIENT, Hub
from ..hub.client.refusals import refusals_as
from ..runs.registry import STAGES

SPACE_NOTE = "comparison of SFT with PPO"
MAX_TITLE = 60


def title_of(recipe: str) -> str:
    """What a recipe's Collection is called; a Hub takes 60 characters."""
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
    """Groups what a recipe published into its Collection, made if there is none of its title. Returns the slug.

    repos: the models, id -> stage; one that this package does not know stands behind the others. space: the id of a
    Space. private: whether a Collection that is made is. What is in the Collection stays, and what belongs in it and
    is not is added, so the same call twice changes nothing. Raises ZooError where the Hub refuses.
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
    """Of the Collection with this title; the first of several that a Hub may have."""
    for found in api.list_collections(owner=namespace):
        if found.title == title:
            return found.slug
    description = "Made by rlhf-zoo: every model names its data, settings, reward and KL on its card."
    made = api.create_collection(title, namespace=namespace, description=description, private=private, exists_ok=True)
    return made.slug


def _items(api: Any, slug: str) -> dict[tuple[str, str], str]:
    """(repository, type) -> the item's own id, in order. A listing of Collections holds the first four only."""
    items = sorted(api.get_collection(slug).items, key=lambda item: item.position)
    return {(item.item_id, item.item_type): item.item_object_id for item in items}


def _arrange(api: Any, slug: str, wanted: list[tuple[str, str]]) -> None:
    """Moves the wanted items to the front in their order, unless they stand in it, perhaps with others between."""
    items = _items(api, slug)
    if [item for item in items if item in wanted] == wanted:
        return
    for place, item in enumerate(wanted):
        api.update_collection_item(slug, items[item], position=place)
