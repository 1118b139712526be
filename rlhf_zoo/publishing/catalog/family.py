"""Builds the family tree of a published model: its ancestors, with the figures of their cards.

This module does no I/O: the caller passes a function that reads a repository, as `publishing.catalog.lineage` does.
Cards are not trusted, so control characters in their text are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...runs.registry import STAGES
from .card import ROLE_TITLES, Card, CardParent, clean

# Limits, because hostile cards could form an endless chain.
MAX_GENERATIONS = 8
MAX_MEMBERS = 64  # repositories and folders that are read


@dataclass(frozen=True)
class Member:
    """What a family tree shows of a repository or folder.

    Attributes:
        commit: Its commit.
        tags: The tags at that commit.
        card: Its card; None without one.
        problem: Why it could not be read; None if it was read.
        parents: The parents that its card names.
    """

    commit: str | None = None
    tags: tuple[str, ...] = ()
    card: Card | None = None
    problem: str | None = None
    parents: tuple[CardParent, ...] = ()


@dataclass(frozen=True)
class Node:
    """A member at its place in the tree.

    Attributes:
        entry: The repository or folder, as the card of its child names it.
        member: The repository or folder.
        parents: The nodes of its parents.
        omitted: Why its parents are not shown here; None if they are.
    """

    entry: CardParent
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
        """The title of its role; for a base model that a stage trained, the title of that stage."""
        title = self.entry.title
        return STAGES[self.stage].title if self.stage and title == ROLE_TITLES["base"] else title

    def to_json(self) -> dict[str, Any]:
        """Returns the node and its ancestors as a JSON object."""
        entry = self.entry
        return {
            "role": entry.role,
            "title": self.title,
            "kind": entry.kind,
            "repo": None if entry.repo is None else clean(entry.repo),
            "folder": None if entry.folder is None else str(entry.folder),
            "gguf": entry.gguf,
            "commit": self.member.commit or entry.commit,
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


def family_tree(root: CardParent, read: Callable[[CardParent], Member]) -> Node:
    """Builds a model's family tree, and returns its root. The parents of a member with two children are shown once.

    Args:
        root: The model whose ancestors to find.
        read: Reads a repository or folder. It is called once for each.
    """
    members: dict[tuple[str | None, ...], Member] = {}
    shown_identities: set[tuple[str | None, ...]] = set()

    def node_of(entry: CardParent, descendants: tuple[tuple[str | None, ...], ...]) -> Node:
        if entry.repo is None and entry.folder is None:
            return Node(entry, Member(problem="never published"))
        key = (entry.kind, entry.name, entry.commit)
        if key not in members:
            if len(members) >= MAX_MEMBERS:
                return Node(entry, Member(), omitted=f"not read: more than {MAX_MEMBERS} repositories")
            members[key] = read(entry)
        member = members[key]
        # An entry may name a tag, and another one the tag's commit, so compare by commit.
        identity = (entry.kind, entry.name, member.commit or entry.commit)
        if identity in descendants:
            return Node(entry, member, omitted="a cycle: it is its own ancestor")
        if identity in shown_identities and member.parents:
            return Node(entry, member, omitted="drawn above")
        shown_identities.add(identity)
        if member.parents and len(descendants) >= MAX_GENERATIONS:
            return Node(entry, member, omitted=f"its parents are not drawn: more than {MAX_GENERATIONS} generations")
        return Node(entry, member, tuple(node_of(parent, (*descendants, identity)) for parent in member.parents))

    return node_of(root, ())


def node_lines(node: Node) -> list[str]:
    """Returns lines of plain text about a node: its title, repository and version, then the figures of its card.

    Args:
        node: A node of the tree.
    """
    entry, member = node.entry, node.member
    if not entry.name:
        gguf = "" if entry.gguf is None else f"GGUF file {entry.gguf}, "
        return [f"{node.title}: {gguf}{member.problem}"]
    commit = member.commit or entry.commit
    tags = ", ".join(clean(tag) for tag in member.tags)
    version = f" @ {tags}" if tags else ""
    version += f" ({clean(commit)[:10]})" if commit else " (no commit)" if entry.folder is None else ""
    lines = [f"{node.title}: {clean(entry.name)}{version}"]
    if member.problem:
        return [*lines, clean(member.problem)]
    if node.omitted:
        return [*lines, node.omitted]
    if phrases := list(_summary_phrases(node)):
        lines.append(", ".join(phrases))
    return lines


def _summary_phrases(node: Node) -> Iterator[str]:
    if node.member.card is None:
        if node.entry.gguf is not None:
            yield f"unpacked from a GGUF file, {node.entry.gguf}"
        elif node.entry.kind == "model":
            yield "no card of rlhf-zoo"
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
