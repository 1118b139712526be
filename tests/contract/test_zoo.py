"""`rlhf-zoo zoo` lists the models of a namespace as a table, JSON, Markdown and Collections."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from thread_hub import ThreadHub
from zoo_process import errors, zoo

from rlhf_zoo.cli import zoo as command
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.publishing.collections import collect, title_of

EVIL = "\x1b]0;owned\x07[red]| <!-- /zoo -->\n# H"
FIGURE = {"value": 0.5, "ci95": [0.25, 0.75], "n": 540}


def card(stage: str, recipe: str = "toy", **fields: Any) -> dict[str, Any]:
    evaluation = {
        "sft": {"reward": FIGURE},
        "ppo": {"reward": {**FIGURE, "value": 2.5}, "kl": {**FIGURE, "value": 7.0}},
        "win_rate": {**FIGURE, "value": 0.875},
        "over_training": {"kind": "hacked", "step": 80, "at_recommended": {"kind": "healthy", "step": 40}},
        "reward_model": {"accuracy": 0.75, "ci95": [0.7, 0.8], "n": 498},
    }
    base = None if stage == "sft" else f"local/{recipe}-sft"
    defaults = {"stage": stage, "recipe": recipe, "base_model": base, "step": 40, "seed": 1, "simulated": True,
             "evaluation": evaluation, "finished": "2026-11-21T10:00:00+00:00"}  # fmt: skip
    return {**defaults, **fields}


def publish(hub: ThreadHub, name: str, content: str | dict | None, *, tag: str = "rlhf-zoo", stage: str = "") -> str:
    """Publishes local/NAME with a README whose front matter has the tag, and a card. Returns the commit."""
    tags = [tag, *([f"stage:{stage}"] if stage else [])]
    files = {"README.md": f"---\ntags: {json.dumps(tags)}\n---\n"}
    if content is not None:
        files["rlhf_card.json"] = content if isinstance(content, str) else json.dumps(content)
    with contextlib.suppress(Exception):
        hub.api().delete_repo(f"local/{name}")
    return hub.make(name, files)


@pytest.fixture(scope="module")
def heads(module_hub: ThreadHub) -> dict[str, str]:
    """Repository -> commit: a complete recipe, a second one still in training, and a foreign model."""
    commits = {f"local/toy-{stage}": publish(module_hub, f"toy-{stage}", card(stage)) for stage in ("ppo", "sft")}
    commits["local/toy-reward"] = publish(module_hub, "toy-reward", card("reward"))
    training = card("ppo", "other", evaluation=None, reward=3.5, kl=4.0, finished=None, seed=2, simulated=False)
    commits["local/other-ppo"] = publish(module_hub, "other-ppo", training, stage="ppo")
    publish(module_hub, "somebody-else", card("ppo"), tag="llama")
    return commits


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """run(hub, *arguments): runs the command in this process, whose clients already use the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(hub: ThreadHub, *arguments: str) -> Result:
        opened = contextlib.nullcontext(Hub("other", hub.url, "a test"))
        monkeypatch.setattr(command, "open_hub", lambda *_, **__: opened)
        return CliRunner().invoke(command.zoo, arguments, catch_exceptions=False)

    return run


def test_zoo_json_lists_models(at_module_hub, heads, run):
    rows = {row["repo"]: row for row in json.loads(run(at_module_hub, "--json").stdout)}
    assert {repo: row["commit"] for repo, row in rows.items()} == heads
    ppo = rows["local/toy-ppo"]
    assert set(ppo) == {"repo", "commit", "stage", "recipe", "base", "step", "seed", "simulated", "reward", "kl",
                        "win_rate", "accuracy", "verdict", "date", "note"}  # fmt: skip
    assert {repo: row["verdict"] for repo, row in rows.items() if row["verdict"]} == {"local/toy-ppo": "healthy"}
    assert ppo["reward"] == {"value": 2.5, "ci95": [0.25, 0.75], "n": 540, "held_out": True}
    assert rows["local/other-ppo"]["kl"] == {"value": 4.0, "ci95": None, "n": None, "held_out": False}
    filtered = run(at_module_hub, "--json", "--recipe", "toy", "--base", "toy-sft", "--sort", "name", "--reverse")
    assert [row["repo"] for row in json.loads(filtered.stdout)] == ["local/toy-reward", "local/toy-ppo"]


def test_zoo_prints_table(at_module_hub, heads, run):
    result = run(at_module_hub)
    lines = [line.split() for line in result.stdout.splitlines()]
    # All names are RECIPE-STAGE, so the table has neither column.
    assert ["model", "base", "reward", "KL", "win", "rate", "verdict", "date"] in lines
    assert ["toy-ppo", "toy-sft", "2.500", "7.000", "0.875", "healthy", "2026-11-21"] in lines
    assert ["toy-reward", "toy-sft", "acc.", "0.750", "2026-11-21"] in lines
    (training_row,) = [line for line in lines if line[:1] == ["other-ppo"]]
    assert training_row[1:4] == ["other-sft", "3.500*", "4.000*"]
    assert result.stderr == "* the last value that training logged; the others are on held-out prompts\n"
    result = run(at_module_hub, "--stage", "ppo", "--recipe", "none")
    assert (result.stdout, result.stderr) == ("", "No model of local matches the options.\n")
    assert run(at_module_hub, "--namespace", "nobody").stderr == "No model of nobody has the tag rlhf-zoo.\n"


def test_zoo_table_has_stage_and_recipe_if_names_lack_them(thread_hub, run):
    publish(thread_hub, "mine", card("ppo"))
    publish(thread_hub, "toy-sft", card("sft"))
    lines = [line.split() for line in run(thread_hub).stdout.splitlines()]
    assert ["model", "stage", "recipe", "base", "reward", "KL", "win", "rate", "verdict", "date"] in lines
    assert ["mine", "ppo", "toy", "toy-sft", "2.500", "7.000", "0.875", "healthy", "2026-11-21"] in lines


def test_zoo_notes_broken_missing_and_hostile_cards(thread_hub, run, monkeypatch):
    publish(thread_hub, "a-missing", None, stage="sft")
    publish(thread_hub, "b-broken", "{'stage': ")
    publish(thread_hub, "d-huge", '{"stage": "' + "x" * 2**22 + '"}')
    evil = dict.fromkeys(card("ppo"), EVIL) | {"stage": EVIL, "evaluation": {"win_rate": {"value": 10**400}}}
    publish(thread_hub, "e-evil", evil)
    publish(thread_hub, "f-whole", card("ppo"))
    rows = json.loads(run(thread_hub, "--json", "--sort", "name").stdout)
    notes = {row["repo"]: row["note"] for row in rows}
    assert notes == {
        "local/a-missing": "has no rlhf_card.json",
        "local/b-broken": "has an rlhf_card.json that is not JSON",
        "local/d-huge": "has an rlhf_card.json that is not a file of at most 4194304 bytes",
        "local/e-evil": None,
        "local/f-whole": None,
    }
    assert rows[0]["stage"] == "sft", "the stage comes from the Hub's tag"
    run(thread_hub, "--readme", "R.md")
    monkeypatch.setenv("COLUMNS", "400")
    result = run(thread_hub)
    assert "\x1b" not in result.output and "\x07" not in result.output
    assert "�]0;owned�[red]| <!-- /zoo -->�# H" in result.stdout
    assert result.stderr.splitlines() == [f"{repo}: {note}" for repo, note in notes.items() if note]
    text = Path("R.md").read_text()
    assert text.count("<!-- /zoo -->") == 1 and "\n# H" not in text and "\x1b" not in text


def test_zoo_readme_is_reproducible_and_keeps_other_text(at_module_hub, heads, run, tmp_path):
    (tmp_path / "recipes").mkdir()
    result = run(at_module_hub, "--readme", "--stage", "ppo", "--sort", "win_rate")
    assert (result.stdout, result.stderr) == ("", "2 rows in recipes/README.md\n")
    path = tmp_path / "recipes" / "README.md"
    text = path.read_text()
    command_line = f"rlhf-zoo zoo --hub {at_module_hub.url} --namespace local --stage ppo --sort win_rate --readme"
    assert f"Made by `{command_line}` from the models that `local` has published.\n" in text
    rows = [line for line in text.splitlines() if line.startswith("| local/")]
    assert rows[0] == (
        f"| local/toy-ppo @ {heads['local/toy-ppo']} | toy | ppo | local/toy-sft | 2.500 [0.250, 0.750], n=540 | "
        "7.000 [0.250, 0.750], n=540 | 0.875 [0.250, 0.750], n=540 |  | 1 | 40 | simulated | 2026-11-21 |"
    )
    assert rows[1].startswith(f"| local/other-ppo @ {heads['local/other-ppo']} |") and "3.500 (training)" in rows[1]
    # The printed command writes the same table again, byte for byte, and keeps the text around it.
    path.write_text(text.replace("# Recipes", "# My recipes") + "\nMore.\n")
    edited = path.read_text()
    run(at_module_hub, *command_line.split()[2:])
    assert path.read_text() == edited
    run(at_module_hub, "--readme")
    assert path.read_text() != edited and path.read_text().endswith("\nMore.\n")


def test_zoo_lists_embedded_hub_without_namespace(tmp_path):
    hub = ThreadHub(tmp_path / "hub")
    publish(hub, "toy-ppo", card("ppo"))
    hub.server.shutdown()
    hub.server.server_close()
    (tmp_path / "home" / "zoo").mkdir(parents=True)
    hub.root.rename(tmp_path / "home" / "zoo" / "hub")
    result = zoo("zoo", "--hub", "local", "--json", "--readme", "R.md", home=tmp_path / "home", cwd=tmp_path)
    assert [row["repo"] for row in json.loads(result.stdout)] == ["local/toy-ppo"]
    assert errors(result.stderr) == ["1 rows in R.md"]
    assert "Made by `rlhf-zoo zoo --hub local --readme R.md` from" in (tmp_path / "R.md").read_text()


def test_zoo_rejects_invalid_arguments(at_module_hub, heads, run, monkeypatch, tmp_path):
    for arguments, message in (
        ("--namespace a/b", "--namespace is 'a/b', which no Hub accepts"),
        ("--readme", "The folder recipes does not exist: create it, or pass another path to --readme."),
    ):
        with pytest.raises(ZooError, match=message):
            run(at_module_hub, *arguments.split())
    assert list(tmp_path.rglob("*.md")) == []
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(ZooError, match=r"pass --namespace, or set a token\.$"):
        run(at_module_hub)
    assert "toy-ppo" in run(at_module_hub, "--namespace", "local").stdout, "a public zoo needs no token"


# Collections


def items(hub: ThreadHub, title: str) -> list[tuple[str, str]]:
    (collection,) = [candidate for candidate in hub.api().list_collections(owner="local") if candidate.title == title]
    ordered = sorted(hub.api().get_collection(collection.slug).items, key=lambda item: item.position)
    return [(item.item_id, item.item_type) for item in ordered]


@pytest.fixture
def hub_with_recipe(thread_hub: ThreadHub) -> ThreadHub:
    for stage in ("ppo", "reward", "sft"):
        publish(thread_hub, f"toy-{stage}", card(stage))
    thread_hub.make("toy-compare", {"README.md": "---\nsdk: gradio\nmodels: [local/toy-ppo]\n---\n"}, kind="space")
    return thread_hub


REPOS = {f"local/toy-{stage}": stage for stage in ("sft", "ppo", "reward")}
ALL_ITEMS = [
    ("local/toy-sft", "model"), ("local/toy-reward", "model"), ("local/toy-ppo", "model"),
    ("local/toy-compare", "space"),
]  # fmt: skip


def test_zoo_makes_collection_per_recipe_and_fetches_cards_once(hub_with_recipe, run, monkeypatch):
    requests: list[str] = []
    original_answer = Application.answer
    monkeypatch.setattr(
        Application, "answer", lambda self, r: (requests.append(f"{r.method} {r.path}"), original_answer(self, r))[1]
    )
    publish(hub_with_recipe, "other-sft", card("sft", "other"))
    result = run(hub_with_recipe, "--collections")
    slugs = [item.slug for item in hub_with_recipe.api().list_collections(owner="local")]
    assert sorted(line.rpartition(" ")[2] for line in result.stderr.splitlines()) == sorted(slugs) and len(slugs) == 2
    assert items(hub_with_recipe, "toy: SFT, RM, PPO") == ALL_ITEMS
    assert items(hub_with_recipe, "other: SFT, RM, PPO") == [("local/other-sft", "model")]
    assert len([item for item in requests if item.startswith("GET /local/toy-ppo/resolve/")]) == 1
    requests.clear()
    assert run(hub_with_recipe, "--collections").stderr == result.stderr
    assert not [
        item for item in requests if item.startswith(("POST /api/coll", "PATCH /api/coll")) or "/resolve/" in item
    ]
    publish(hub_with_recipe, "toy-ppo", card("ppo", seed=5))
    (row,) = json.loads(run(hub_with_recipe, "--json", "--stage", "ppo").stdout)
    assert row["seed"] == 5


def test_collect_adds_missing_items_in_order_and_keeps_others(hub_with_recipe):
    slug = collect("toy", "local", {"local/toy-ppo": "ppo"}, None)
    hub_with_recipe.api().create_repo("local/mine", repo_type="dataset")
    hub_with_recipe.api().add_collection_item(slug, "local/mine", "dataset", note="my own")
    assert collect("toy", "local", REPOS, "local/toy-compare") == slug
    assert items(hub_with_recipe, "toy: SFT, RM, PPO") == [*ALL_ITEMS, ("local/mine", "dataset")]
    notes = [item.note for item in hub_with_recipe.api().get_collection(slug).items]
    assert notes == ["SFT", "reward model", "PPO", "comparison of SFT with PPO", "my own"]
    # Other items in between stay: a user may have placed them there.
    own_item = hub_with_recipe.api().get_collection(slug).items[-1]
    hub_with_recipe.api().update_collection_item(slug, own_item.item_object_id, position=1)
    collect("toy", "local", REPOS, "local/toy-compare")
    assert items(hub_with_recipe, "toy: SFT, RM, PPO") == [ALL_ITEMS[0], ("local/mine", "dataset"), *ALL_ITEMS[1:]]


def test_collect_reports_refusal_in_one_sentence(hub_with_recipe, monkeypatch):
    with pytest.raises(ZooError, match=r"^Cannot create the Collection .*local/toy-none"):
        collect("toy", "local", {"local/toy-none": "none"}, None)
    monkeypatch.setenv("HF_TOKEN", create_token(hub_with_recipe.root, "read"))
    with pytest.raises(
        ZooError, match=r"^Cannot create the Collection 'other: SFT, RM, PPO' of local on .* may write Collections\.$"
    ):
        collect("other", "local", REPOS, None)
    assert len(list(hub_with_recipe.api().list_collections(owner="local"))) <= 1


def test_title_of_collection_fits_limit_of_hub():
    assert title_of("toy") == "toy: SFT, RM, PPO"
    assert all(len(title_of("x" * size)) <= 60 for size in range(1, 81))
    assert len({title_of("x" * size) for size in range(40, 60)}) == 20
