"""The family tree of a published model, from the cards alone: what each came of, and what it reached.

Pure: what a repository says of itself comes through the function `look` (that of `catalog.lineage` asks a
Hub). Whatever stands in a card was written by its publisher, so its texts are cleaned before they go anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..json_values import finite, hub_id
from ..stage import STAGES

__all__ = ["DEPTH", "MOST", "ROLES", "Member", "Node", "Reference", "clean", "draw", "family_tree", "parents_of"]

ROLES = {**{stage.name: stage.title for stage in STAGES.values()}, "data": "data set", "base": "base model"}
"""What a card may name as a parent, in the order in which it is drawn."""
DEPTH = 8
"""Generations below the root: a chain of cards could be made endless."""
MOST = 64
"""Repositories that one tree looks at."""
_LONGEST = 120
_LARGEST = 1e15


@dataclass(frozen=True)
class Reference:
    """What is named: a model or data set by repository and commit (None: not said), or by a folder of this machine."""

    role: str
    kind: str  # "model" or "dataset"
    repo: str | None = None
    commit: str | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        return str(self.folder) if self.folder is not None else self.repo or ""


@dataclass(frozen=True)
class Member:
    """What was found of a reference. card: None without one; problem: why there is nothing more to say of it."""

    commit: str | None = None
    tags: tuple[str, ...] = ()
    card: Mapping[str, Any] | None = None
    problem: str | None = None
    parents: tuple[Reference, ...] = ()


@dataclass(frozen=True)
class Node:
    """A member where the tree draws it. again: why its own parents are not drawn here, or None where they are."""

    reference: Reference
    member: Member
    parents: tuple[Node, ...] = field(default=())
    again: str | None = None

    @property
    def stage(self) -> str | None:
        found = (self.member.card or {}).get("stage")
        return found if found in STAGES else None

    @property
    def step(self) -> int | None:
        found = (self.member.card or {}).get("step")
        return found if type(found) is int and abs(found) < 2**63 else None

    @property
    def recipe(self) -> str | None:
        found = (self.member.card or {}).get("recipe")
        return clean(found) if isinstance(found, str) else None

    @property
    def simulated(self) -> bool:
        return (self.member.card or {}).get("simulated") is True

    @property
    def figures(self) -> dict[str, float]:
        """What its card says that it reached; nothing that was not measured."""
        card = self.member.card or {}
        asked = STAGES[self.stage].figures if self.stage else {}
        found = {name: _figure(card, *path) for name, path in asked.items()}
        return {name: value for name, value in found.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        at = self.reference
        return {
            "role": at.role,
            "kind": at.kind,
            "repo": None if at.repo is None else clean(at.repo),
            "folder": None if at.folder is None else str(at.folder),
            "commit": self.member.commit or at.commit,
            "tags": [clean(tag) for tag in self.member.tags],
            "stage": self.stage,
            "recipe": self.recipe,
            "step": self.step,
            "simulated": self.simulated,
            "figures": self.figures,
            "problem": None if self.member.problem is None else clean(self.member.problem),
            "again": self.again,
            "parents": [parent.to_json() for parent in self.parents],
        }


def clean(text: str, longest: int = _LONGEST) -> str:
    """`text` in one line without anything that a terminal obeys or that turns the direction of writing."""
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def parents_of(card: Mapping[str, Any]) -> tuple[Reference, ...]:
    """The parents that a card names, in the order of ROLES; other roles and what no Hub could have are left out.

    A parent that was never published stays, without a repository.
    """
    named = card.get("parents")
    found = []
    for role in ROLES:
        parent = named.get(role) if isinstance(named, Mapping) else None
        if isinstance(parent, Mapping):
            repo, commit = hub_id(parent.get("repo")), parent.get("commit")
            commit = commit if isinstance(commit, str) and commit.isascii() and commit.isalnum() else None
            found.append(Reference(role, "dataset" if role == "data" else "model", repo, commit))
    return tuple(found)


def family_tree(root: Reference, look: Callable[[Reference], Member], *, depth: int = DEPTH, most: int = MOST) -> Node:
    """The tree below `root`. Who has two children is drawn in full where it comes first, and referred to after that.

    look: called once for each thing named. depth and most bound what cards can make of it.
    """
    looked: dict[tuple[Any, ...], Member] = {}
    drawn: set[tuple[Any, ...]] = set()

    def grow(at: Reference, above: tuple[tuple[Any, ...], ...]) -> Node:
        if at.repo is None and at.folder is None:
            return Node(at, Member(problem="never published"))
        asked = (at.kind, at.name, at.commit)
        if asked not in looked:
            if len(looked) >= most:
                return Node(at, Member(), again=f"not looked at: more than {most} repositories")
            looked[asked] = look(at)
        member = looked[asked]
        here = (at.kind, at.name, member.commit or at.commit)
        if here in above:
            return Node(at, member, again="a cycle: it names itself among what it came of")
        if here in drawn and member.parents:
            return Node(at, member, again="drawn above")
        drawn.add(here)
        if member.parents and len(above) >= depth:
            return Node(at, member, again=f"its parents are not drawn: more than {depth} generations")
        return Node(at, member, tuple(grow(parent, (*above, here)) for parent in member.parents))

    return grow(root, ())


def draw(node: Node) -> list[str]:
    """The lines of a node: what it is and where, then what its card says. Plain text, whatever brackets it holds."""
    at, member = node.reference, node.member
    role = ROLES.get(at.role, "this model")
    if not at.name:
        return [f"{role}: {member.problem}"]
    commit = member.commit or at.commit
    tags = ", ".join(clean(tag) for tag in member.tags)
    where = f" @ {tags}" if tags else ""
    where += f" ({clean(commit)[:10]})" if commit else " (at no commit)" if at.folder is None else ""
    lines = [f"{role}: {clean(at.name)}{where}"]
    if member.problem:
        return [*lines, clean(member.problem)]
    if node.again:
        return [*lines, node.again]
    if said := list(_said(node)):
        lines.append(", ".join(said))
    return lines


def _said(node: Node) -> Iterator[str]:
    if node.member.card is None:
        if node.reference.kind == "model":
            yield "no card"
        return
    yield f"stage {node.stage}" if node.stage else "stage unknown"
    if node.recipe:
        yield f"recipe {node.recipe}"
    if node.step is not None:
        yield f"step {node.step}"
    if node.simulated:
        yield "simulated"
    for name, value in node.figures.items():
        yield f"{name} {value:.4g}"


def _figure(card: Mapping[str, Any], *path: str) -> float | None:
    found: Any = {**card, "checkpoints": _own_row(card)}
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if type(found) in (int, float) and abs(found) < _LARGEST and finite(found) else None


def _own_row(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of the card's table of checkpoints that is of its own step."""
    rows = card.get("checkpoints")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and card.get("step") is not None and row.get("step") == card.get("step"):
            return row
    return {}
