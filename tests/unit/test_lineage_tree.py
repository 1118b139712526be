"""The family tree built from cards: its layout, and safety against hostile cards."""

from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_zoo.publishing.catalog.card import Card
from rlhf_zoo.publishing.catalog.family import MAX_GENERATIONS, CardParent, Member, Node, clean, family_tree, node_lines

A, B, C, D = (letter * 40 for letter in "abcd")


def card(stage: str, step: int = 40, parents: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "recipe": "toy", "step": step, "parents": parents or {}, **more}


def parent_at(repo: str, commit: str | None) -> dict[str, Any]:
    return {"repo": repo, "commit": commit}


class World:
    """Repositories by name: (commit, tags, card). Counts what is asked for."""

    def __init__(self, **repositories: tuple[str, tuple[str, ...], Any]) -> None:
        self.repositories = {f"x/{name}": found for name, found in repositories.items()}
        self.asked: list[str] = []

    def look(self, reference: CardParent) -> Member:
        self.asked.append(reference.name)
        if reference.name not in self.repositories:
            return Member(problem="is not there")
        commit, tags, card = self.repositories[reference.name]
        return Member(reference.commit or commit, tags, card, None, Card(card or {}).parents)

    def tree(self, name: str = "x/ppo") -> Node:
        return family_tree(CardParent("", "model", name), self.look)


@pytest.fixture
def world() -> World:
    """PPO from SFT and a reward model, which came of the same SFT; all of one data set."""
    data = parent_at("x/data", D)
    return World(
        ppo=(
            A,
            ("best",),
            card(
                "ppo",
                parents={"data": data, "reward": parent_at("x/reward", B), "sft": parent_at("x/sft", C)},
                reward=1.25,
                kl=3.5,
                evaluation={"ppo": {"reward": {"value": 2.0}}, "win_rate": {"value": 0.8}},
                simulated=True,
            ),
        ),
        reward=(
            B,
            (),
            card(
                "reward",
                6,
                {"sft": parent_at("x/sft", C), "data": data},
                checkpoints=[{"step": 6, "eval_accuracy": 0.75}],
            ),
        ),
        sft=(C, ("step-000009",), card("sft", 9, {"data": data}, checkpoints=[{"step": 8}, {"step": 9, "loss": 1.5}])),
        data=(D, (), None),
    )


def shape(node: Node) -> Any:
    """The tree as (name, why not drawn on, parents)."""
    return (node.entry.name, node.omitted, [shape(parent) for parent in node.parents])


def test_family_tree_draws_and_reads_shared_parent_once(world):
    data = ("x/data", None, [])
    assert shape(world.tree()) == (
        "x/ppo",
        None,
        [
            ("x/sft", None, [data]),
            ("x/reward", None, [("x/sft", "drawn above", []), data]),
            data,
        ],
    )
    assert sorted(world.asked) == ["x/data", "x/ppo", "x/reward", "x/sft"]


def test_family_tree_separates_commits_of_a_parent(world):
    world.repositories["x/reward"][2]["parents"]["sft"]["commit"] = A
    sft = world.tree().parents[1].parents[0]
    assert world.asked.count("x/sft") == 2 and sft.omitted is None and node_lines(sft)[0].endswith("(aaaaaaaaaa)")


def test_node_lines_and_json_describe_model(world):
    root = world.tree()
    assert node_lines(root) == [
        "this model: x/ppo @ best (aaaaaaaaaa)",
        "stage ppo, recipe toy, step 40, simulated, reward 1.25, KL (nats) 3.5, held-out reward 2, win rate 0.8",
    ]
    sft, reward, data = root.parents
    assert node_lines(sft) == [
        "SFT policy: x/sft @ step-000009 (cccccccccc)", "stage sft, recipe toy, step 9, loss 1.5"
    ]  # fmt: skip
    assert node_lines(reward)[1] == "stage reward, recipe toy, step 6, validation accuracy 0.75"
    assert node_lines(reward.parents[0]) == ["SFT policy: x/sft @ step-000009 (cccccccccc)", "drawn above"]
    assert node_lines(data) == ["data set: x/data (dddddddddd)"]
    document = root.to_json()
    assert (document["repo"], document["commit"], document["tags"], document["step"]) == ("x/ppo", A, ["best"], 40)
    assert document["figures"] == {"reward": 1.25, "KL (nats)": 3.5, "held-out reward": 2.0, "win rate": 0.8}
    assert document["parents"][2] == {
        "role": "data", "title": "data set", "kind": "dataset", "repo": "x/data", "folder": None, "gguf": None,
        "commit": D, "tags": [], "stage": None, "recipe": None, "step": None, "simulated": False, "figures": {},
        "problem": None, "omitted": None, "parents": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parent", "title"),
    [(None, "base model"), (card("sft"), "SFT policy"), (card("ppo"), "PPO policy")],
)
def test_base_title_follows_stage_of_base(parent, title):
    settings = {"model_name_or_path": "x/base"}
    world = World(
        ppo=(A, (), card("ppo", parents={"sft": parent_at("x/base", B)}, settings=settings)), base=(B, (), parent)
    )
    root = world.tree()
    assert node_lines(root.parents[0])[0].startswith(f"{title}: x/base")
    assert root.to_json()["parents"][0]["title"] == title


def test_family_tree_ends_at_cycle(world):
    world.repositories["x/sft"][2]["parents"]["base"] = parent_at("x/ppo", A)
    node = world.tree().parents[0].parents[1]
    assert node.omitted is not None and node.omitted.startswith("a cycle")
    assert node_lines(node)[1] == node.omitted
    world.repositories["x/ppo"][2]["parents"] = {"sft": parent_at("x/ppo", None)}  # one that names itself
    (node,) = world.tree().parents
    assert node.omitted is not None and node.omitted.startswith("a cycle")


def test_family_tree_bounds_generations():
    def look(reference: CardParent) -> Member:
        following = f"x/{int(reference.name[2:]) + 1}"
        return Member(A, (), None, None, (CardParent("sft", "model", following),))

    node, generations = family_tree(CardParent("", "model", "x/0"), look), 0
    while node.parents:
        (node,), generations = node.parents, generations + 1
    assert generations == MAX_GENERATIONS
    assert node.omitted is not None and f"more than {MAX_GENERATIONS} generations" in node.omitted


def test_family_tree_bounds_repositories_read():
    requests = []

    def look(reference: CardParent) -> Member:
        requests.append(reference.name)
        parents = (
            CardParent("sft", "model", f"{reference.name}0"),
            CardParent("reward", "model", f"{reference.name}1"),
        )
        return Member(A, (), None, None, parents)

    root = family_tree(CardParent("", "model", "x/"), look)
    assert len(requests) == 64
    assert "not read: more than 64 repositories" in str(root.to_json())


def test_card_parents_ignore_malformed_entries():
    """A malformed entry yields no parent, or a parent that was never published."""
    for parents in (
        None,
        [],
        "sft",
        {"sft": None},
        {"sft": "x/sft"},
        {"sft": []},
        {"../sft": parent_at("x/sft", None)},
    ):
        assert Card(parents=parents).parents == ()
    for repo in (None, 3, "", "/etc/passwd", "../x", "a/b/c", "a b", ["x"]):
        (parent,) = Card(parents={"sft": {"repo": repo, "commit": 3}}).parents
        assert (parent.repo, parent.commit, parent.folder) == (None, None, None)
    for commit in ("--help", "a b", "../x", "", 7, None, "ä"):
        assert Card(parents={"sft": {"repo": "x/y", "commit": commit}}).parents[0].commit is None


def test_unpublished_base_is_named_by_its_gguf_file(world):
    parents = {"sft": {"repo": None, "folder": "chat.Q4_1.gguf", "files": "f" * 64, "gguf": "b\x1b" * 9}}
    world.repositories["x/ppo"] = (A, (), card("ppo", parents=parents))
    (base,) = world.tree().parents
    named = f"chat.Q4_1.gguf, sha256 {'b�' * 9}"
    assert base.to_json()["gguf"] == named
    assert node_lines(base) == [f"SFT policy: GGUF file {named}, never published"]


def test_base_that_hub_add_unpacked_is_named_with_its_gguf_file(world):
    parents = {"sft": {"repo": "x/chat", "commit": B, "gguf": "b" * 64}}
    world.repositories["x/ppo"] = (A, (), card("ppo", parents=parents))
    world.repositories["x/chat"] = (B, (), None)
    (base,) = world.tree().parents
    assert node_lines(base)[1:] == [f"unpacked from a GGUF file, sha256 {'b' * 64}"]


def test_family_tree_escapes_card_texts(world):
    world.repositories["x/ppo"] = (
        A,
        ("be\x1b[31mst",),
        card("ppo", parents={}, step=True, reward="high", kl=float("nan")),
    )  # fmt: skip
    world.repositories["x/ppo"][2]["recipe"] = "to\x9b31my\u202e[bold red]" + "x" * 500
    root = world.tree()
    for text in (*node_lines(root), str(root.to_json())):
        assert "\x1b" not in text and "\x9b" not in text and "\u202e" not in text and len(text) < 1000
    assert "[bold red]" in node_lines(root)[1], "brackets are text here; what prints it must not read them as markup"
    assert root.card.step is None and root.card.figures == {}


def test_clean_keeps_printable_text():
    assert clean("größer 好 [x]") == "größer 好 [x]"
    assert clean("a\nb\tc\x00") == "a\ufffdb\ufffdc\ufffd"
    assert len(clean("x" * 200)) == 120 and clean("x" * 200).endswith("…")
