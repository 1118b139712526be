"""Builds the family tree of a published model from cards: its ancestors and their figures.

It does no I/O: the function `read` reads repositories (`publishing.catalog.lineage` has one for a Hub). Cards are not
trusted, so their texts are cleaned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...runs.registry import STAGES
from .card import ROLES, Card, Reference, clean

#: Largest number of generations: hostile cards could form an endless chain.
DEPTH = 8
#: Largest number of repositories in one tree.
MOST = 64


@dataclass(frozen=True)
class Member:
    """The content of a repository or folder.

    Attributes:
        commit: Its commit.
        tags: The tags at that commit.
        card: Its card; None without one.
        problem: Why it could not be read.
        parents: The parents that its card names.
    """

    commit: str | None = None
    tags: tuple[str, ...] = ()
    card: Card | None = None
    problem: str | None = None
    parents: tuple[Reference, ...] = ()


@dataclass(frozen=True)
class Node:
    """A member at its place in the tree.

    Attributes:
        reference: The reference in its child's card.
        member: Its content.
        parents: Its parents.
        omitted: Why its parents are not drawn here; None if they are.
    """

    reference: Reference
    member: Member
    parents: tuple[Node, ...] = field(default=())
    omitted: str | None = None

    @property
    def card(self) -> Card:
        """The member's card; {} without one."""
        return Card(self.member.card or {})

    @property
    def stage(self) -> str | None:
        """Name of the stage; None if it is unknown."""
        return self.card.stage if self.card.stage in STAGES else None

    @property
    def title(self) -> str:
        """Its relation to the model that names it. A base model may itself come from a stage, by its own card."""
        title = self.reference.title
        return STAGES[self.stage].title if self.stage and title == ROLES["base"] else title

    def to_json(self) -> dict[str, Any]:
        """Returns the node and its ancestors as a document."""
        at = self.reference
        return {
            "role": at.role,
            "title": self.title,
            "kind": at.kind,
            "repo": None if at.repo is None else clean(at.repo),
            "folder": None if at.folder is None else str(at.folder),
            "commit": self.member.commit or at.commit,
            "tags": [clean(tag) for tag in self.member.tags],
            "stage": self.stage,
            "recipe": self.card.recipe,
            "step": self.card.step,
            "simulated": self.card.simulated is True,
            "figures": self.card.figures,
            "problem": None if self.member.problem is None else clean(self.member.problem),
            "omitted": self.omitted,
            "parents": [parent.to_json() for parent in self.parents],
        }


def family_tree(root: Reference, read: Callable[[Reference], Member], *, depth: int = DEPTH, most: int = MOST) -> Node:
    """Builds the family tree of a model. A member with two children is drawn in full the first time only.

    `depth` and `most` limit the effect of hostile cards.

    Args:
        root: The model.
        read: Reads a repository or folder; called once for each.
        depth: Largest number of generations.
        most: Largest number of repositories and folders that are read.

    Returns:
        The root's node.
    """
    members: dict[tuple[Any, ...], Member] = {}
    drawn: set[tuple[Any, ...]] = set()

    def grow(at: Reference, above: tuple[tuple[object, ...], ...]) -> Node:
        if at.repo is None and at.folder is None:
            return Node(at, Member(problem="never published"))
        key = (at.kind, at.name, at.commit)
        if key not in members:
            if len(members) >= most:
                return Node(at, Member(), omitted=f"not read: more than {most} repositories")
            members[key] = read(at)
        member = members[key]
        place = (at.kind, at.name, member.commit or at.commit)
        if place in above:
            return Node(at, member, omitted="a cycle: it is its own ancestor")
        if place in drawn and member.parents:
            return Node(at, member, omitted="drawn above")
        drawn.add(place)
        if member.parents and len(above) >= depth:
            return Node(at, member, omitted=f"its parents are not drawn: more than {depth} generations")
        return Node(at, member, tuple(grow(parent, (*above, place)) for parent in member.parents))

    return grow(root, ())


def draw(node: Node) -> list[str]:
    """Formats a node as lines of plain text: its role and place, then the figures of its card.

    Args:
        node: The node.

    Returns:
        The lines.
    """
    at, member = node.reference, node.member
    if not at.name:
        return [f"{node.title}: {member.problem}"]
    commit = member.commit or at.commit
    tags = ", ".join(clean(tag) for tag in member.tags)
    version = f" @ {tags}" if tags else ""
    version += f" ({clean(commit)[:10]})" if commit else " (no commit)" if at.folder is None else ""
    lines = [f"{node.title}: {clean(at.name)}{version}"]
    if member.problem:
        return [*lines, clean(member.problem)]
    if node.omitted:
        return [*lines, node.omitted]
    if figures := list(_summary(node)):
        lines.append(", ".join(figures))
    return lines


def _summary(node: Node) -> Iterator[str]:
    if node.member.card is None:
        if node.reference.kind == "model":
            yield "no card"
        return
    yield f"stage {node.stage}" if node.stage else "stage unknown"
    if node.card.recipe:
        yield f"recipe {node.card.recipe}"
    if node.card.step is not None:
        yield f"step {node.card.step}"
    if node.card.simulated:
        yield "simulated"
    for name, value in node.card.figures.items():
        yield f"{name} {value:.4g}"
