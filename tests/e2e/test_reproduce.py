"""`rlhf-zoo reproduce` reproduces published stages bit for bit, and names what was altered."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_fixture import RunningHub, start_hub
from safetensors.torch import load_file, save_file
from zoo_process import errors, zoo

SHARED = {
    "description": "A toy.",
    "simulated": True,
    "corpus": "rlhf_zoo.runs.corpora.tiny_world_2:prepare",
    "corpus_args": {"lines": 400},
    "tokenizer": {"vocab_size": 320, "lowercase": True},
    "architecture": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128, "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "evaluation": {
        "prompts": 4, "samples": 1, "judge": "rlhf_zoo.runs.corpora.tiny_world_2:judge", "dataset_test_split": "test",
    },
}  # fmt: skip
TRAINED = {"bf16": False, "gradient_checkpointing": False, "max_length": 128, "save_strategy": "steps"}
STAGES = {
    "sft": {
        **TRAINED, "learning_rate": 1e-2, "max_steps": 20, "save_steps": 10, "logging_steps": 5,
        "per_device_train_batch_size": 16, "eval_strategy": "steps", "eval_steps": 10,
    },
    "reward": {
        **TRAINED, "learning_rate": 1e-3, "max_steps": 4, "save_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": 8, "simulated_pairs": 60, "simulated_test_pairs": 20, "score_samples": 16,
        "preference": "rlhf_zoo.runs.corpora.tiny_world_2:preference",
    },
    "ppo": {
        "learning_rate": 1e-3, "per_device_train_batch_size": 8, "total_episodes": 48, "num_mini_batches": 2,
        "response_length": 40, "missing_eos_penalty": 1.0, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 4,
        "release": "last", "per_device_eval_batch_size": 32, "held_out_share": 0.2, "dataset_test_split": None,
        "reward_funcs": ["rlhf_zoo.runs.corpora.tiny_world_2:gold"], "reward_weights": [1, 0],
    },
}  # fmt: skip
LAST = {"sft": 20, "reward": 4, "ppo": 6}
MIDDLE = {"sft": 10, "reward": 2, "ppo": 4}

# One process reproduces all of them: importing the trainers takes longer than their training here.
WORKER = """
import json, sys
from pathlib import Path
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.pipeline.inspect.reproduce import reproduce

for key, folder, name, allowed in json.loads(sys.argv[2]):
    try:
        report = reproduce(name, hub=Hub("other", sys.argv[1], "a test"), directory=Path(folder), allowed_names=allowed)
    except ZooError as error:
        report = {"error": str(error)}
    Path(f"{key}.json").write_text(json.dumps(report))
"""


@dataclass(frozen=True)
class Reports:
    """The reports of `reproduce` by key; its run directories are in `folder`."""

    folder: Path

    def __getitem__(self, key: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{key}.json").read_text())


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return edit


def alter_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 0.25
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def alter_metrics(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    next(row for row in rows if row["step"] == 2)["loss"] += 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_settings(**keys: Any) -> Callable[[Path], None]:
    return edit_json("recipe.json", lambda document: document.update(keys))


def edit_recipe(**keys: Any) -> Callable[[Path], None]:
    return edit_json("recipe.json", lambda document: document["recipe"].update(keys))


def edit_parents(**named: Mapping[str, Any]) -> Callable[[Path], None]:
    return edit_json("rlhf_card.json", lambda document: document["parents"].update(named))


MISSING = {"repo": "local/gone", "commit": "0" * 40}
UNPUBLISHED = {"repo": None, "commit": None}
# Name of an altered copy -> (its original, the alteration).
ALTERED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "seed": ("toy-ppo@step-000004", edit_settings(seed=2)),
    "weights": ("toy-sft@step-000010", alter_weights),
    "metrics": ("toy-reward@step-000004", alter_metrics),
    "version-and-data": (
        "toy-sft@step-000010",
        lambda folder: [
            edit_json("rlhf_card.json", lambda card: card["versions"].update(torch="\x1b0.1"))(folder),
            edit_parents(data=MISSING)(folder),
        ],
    ),
    "config": ("toy-sft@step-000010", edit_json("config.json", lambda config: config.update(hidden_act="gelu"))),
    "folder": ("toy-sft@step-000010", edit_recipe(dataset_name="/somewhere/lines")),
    "no-recipe": ("toy-sft@step-000010", lambda folder: (folder / "recipe.json").unlink()),
    "unpublished-sft": ("toy-ppo@step-000004", edit_parents(sft=UNPUBLISHED)),
    "sft-gone": ("toy-ppo@step-000004", edit_parents(sft=MISSING)),
    "folder-gone": (
        "toy-sft@step-000010",
        lambda folder: [edit_recipe(dataset_name="/somewhere")(folder), edit_parents(data=MISSING)(folder)],
    ),
    "data-gone": ("toy-sft@step-000010", edit_recipe(corpus=None, dataset_name="local/gone")),
    "own-reward": ("toy-ppo@step-000004", edit_settings(reward_funcs=["their_rewards:good"])),
    "short": ("toy-sft@step-000010", edit_settings(max_steps=5)),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A Hub that holds the recipe's repositories, and altered copies of them."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "toy").mkdir()
    for name, keys in (("recipe", SHARED), *STAGES.items()):
        (folder / "toy" / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    done = zoo("run", "toy", "--hub", "local", home=folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "zoo" / "hub", folder / "root")
    running = start_hub(folder / "server", root=folder / "root")
    api = running.api()
    for name, (origin, alter) in ALTERED.items():
        repo, _, tag = origin.partition("@")
        copy = folder / "copies" / name
        api.snapshot_download(f"local/{repo}", revision=tag, local_dir=copy, cache_dir=folder / "cache")
        shutil.rmtree(copy / ".cache")
        alter(copy)
        api.create_repo(f"local/{name}")
        api.upload_folder(repo_id=f"local/{name}", folder_path=copy)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def reports(served: RunningHub, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = tmp_path_factory.mktemp("reproduced")
    (folder / "their_rewards.py").write_text(
        "open('imported', 'w')\ndef good(completions, **_): return [0.0] * len(completions)\n"
    )
    pulled = folder / "pulled"
    served.api().snapshot_download("local/toy-sft", revision="step-000010", local_dir=pulled)
    names = {
        "ppo-best": "local/toy-ppo@best",
        **{f"{stage}-middle": f"local/toy-{stage}@step-{MIDDLE[stage]}" for stage in STAGES},
        **{name: f"local/{name}" for name in ALTERED},
        "pulled-folder": "pulled",
    }
    requests: list[tuple[str, str, str, list[str]]] = [
        *((key, key, name, []) for key, name in names.items()),
        ("allowed", "allowed", "local/own-reward", ["their_rewards:good"]),
        ("sft-middle-again", "sft-middle", "local/toy-sft@step-000010", []),
        ("other-checkpoint", "ppo-best", "local/toy-sft@step-10", []),
    ]
    env = {"HF_HOME": str(folder / "home"), "WARM_QUICK": "1"}
    served.run(sys.executable, "-c", WORKER, served.url, json.dumps(requests), cwd=folder, **env)
    return Reports(folder)


@pytest.mark.parametrize(("stage", "when"), [("ppo", "best"), *((stage, "middle") for stage in STAGES)])
def test_every_stage_reproduces_bit_for_bit(reports, stage, when):
    report = reports[f"{stage}-{when}"]
    step = LAST[stage] if when == "best" else MIDDLE[stage]
    assert report["bit_equal"], report
    assert (report["stage"], report["recipe"], report["step"]) == (stage, "toy", step)
    weights = {row["file"]: (row["differing"], row["problem"], row["max_abs"]) for row in report["weights"]}
    files = ["critic/model.safetensors", "model.safetensors"] if stage == "ppo" else ["model.safetensors"]
    assert weights == dict.fromkeys(files, (0, None, 0.0)) and all(row["tensors"] > 8 for row in report["weights"])
    metrics = report["metrics"]
    assert metrics["rows"] == metrics["rows_here"] >= 2 and metrics["columns"] > 5 and metrics["differing"] == []
    assert report["files"] == report["versions"] == report["notes"] == report["settings"]["differing"] == []
    data = report["data"]
    # Lines and prompts have three splits each; the reward stage also prepares the two splits of pairs.
    assert (data["repo"], data["how"], data["compared"], data["differing"]) == (
        "local/toy", "prepared again by its corpus", 8 if stage == "reward" else 6, [],
    )  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_reproduce_runs_one_stage_up_to_its_step(reports, served, tmp_path, stage):
    run, api = reports.folder / f"{stage}-middle", served.api()
    assert {path.name for path in run.iterdir()} == {"data", stage, "reproduce.json", "run_id"}
    assert max(int(path.name[11:]) for path in (run / stage).glob("checkpoint-*")) == MIDDLE[stage]
    document = json.loads((run / stage / "run.json").read_text())
    assert (document["status"], document["repo"]) == ("stopped", None), "nothing is published"
    # The parents are at the commits that the card names, which are not those of the tags `best`.
    tag = f"step-{MIDDLE[stage]:06d}"
    card = api.hf_hub_download(f"local/toy-{stage}", "rlhf_card.json", revision=tag, cache_dir=tmp_path)
    commits = {role: parent["commit"] for role, parent in json.loads(Path(card).read_text())["parents"].items()}
    assert {role: parent["commit"] for role, parent in document["parents"].items()}.items() <= commits.items()
    best = {api.model_info(f"local/toy-{name}", revision="best").sha for name in STAGES}
    assert len(document["parents"]) == len(commits) - 1 and not best & set(commits.values())
    assert len(list(api.list_models())) == len(STAGES) + len(ALTERED)


def test_pulled_folder_reproduces(reports):
    report = reports["pulled-folder"]
    assert report["bit_equal"] and (report["commit"], report["step"]) == (None, 10)


def test_finished_reproduction_is_compared_without_rerun(reports):
    before, again = reports["sft-middle"], reports["sft-middle-again"]
    assert json.loads((reports.folder / "sft-middle" / "reproduce.json").read_text()) == again
    assert before["seconds"] > 0 and again["seconds"] is None
    assert {**again, "seconds": 0, "name": ""} == {**before, "seconds": 0, "name": ""}
    assert reports["other-checkpoint"] == {
        "error": "ppo-best holds the reproduction of another checkpoint: choose another --output_dir."
    }


# Planted differences


def test_reproduce_reports_another_seed(reports):
    report = reports["seed"]
    assert not report["bit_equal"]
    assert {"key": "seed (card, recipe.json)", "published": 1, "here": 2} in report["settings"]["differing"]
    assert report["settings"]["fingerprint"]["card"] != report["settings"]["fingerprint"]["recipe"]
    assert all(row["differing"] > 0 and row["max_abs"] > 0 for row in report["weights"])
    assert "objective/score" in {row["column"] for row in report["metrics"]["differing"]}


def test_reproduce_names_altered_weights_metrics_and_config(reports):
    """Each alteration is reported on its own, and is enough for a failure."""
    differences = {}
    for name in ("weights", "metrics", "config"):
        report = reports[name]
        assert not report["bit_equal"] and report["settings"]["differing"] == []
        differences[name] = [
            [row for row in report["weights"] if row["differing"]],
            report["metrics"]["differing"],
            report["files"],
        ]
    ([weights], *unaltered), (no_weights, [metrics], _) = differences["weights"], differences["metrics"]
    assert unaltered == [[], []] and weights["worst"] == "model.norm.weight"
    assert weights["max_abs"] == pytest.approx(0.25, abs=1e-6)  # rounding of the altered weight to float32
    assert no_weights == [] and metrics["column"] == "loss"
    assert (metrics["rows"], metrics["of"], metrics["first_step"]) == (1, 4, 2)
    assert differences["config"] == [[], [], [{"file": "config.json", "problem": "hidden_act differs"}]]


def test_reproduce_notes_versions_and_missing_data_without_failing(reports):
    """The data set is not needed, because a corpus generates it."""
    report = reports["version-and-data"]
    (row,) = report["versions"]
    assert report["bit_equal"] and (row["name"], row["published"]) == ("torch", "\x1b0.1")
    assert report["data"]["compared"] == 0
    (note,) = report["notes"]
    assert note.startswith(f"the data set local/gone at {'0' * 40} could not be compared")


def test_reproduce_uses_published_data_of_local_folder(reports):
    report = reports["folder"]
    assert report["bit_equal"], report
    assert report["data"]["how"].startswith("taken as published: its corpus reads /somewhere/lines")
    assert report["data"]["compared"] == 6
    # The data's fingerprint depends on the source, which the altered recipe.json changes.
    keys = [row["key"] for row in report["settings"]["differing"]]
    assert keys == ["recipe.dataset_name (card, recipe.json)", "data"]


# Stages that cannot be reproduced


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-recipe", "local/no-recipe has no recipe.json, so it cannot be reproduced"),
        ("unpublished-sft", "The SFT policy of local/unpublished-sft was never published"),
        ("sft-gone", "There is no repository 'local/gone' on"),
        ("folder-gone", "were made from /somewhere, a folder on the machine that published it"),
        ("data-gone", "The data set local/gone cannot be loaded from"),
        ("own-reward", "sets reward_funcs to their_rewards:good, which may import code"),
    ],
)
def test_reproduce_names_missing_parts_before_training(reports, name, message):
    report = reports[name]
    assert message in report["error"] and ". " not in report["error"]
    run = reports.folder / name
    assert {path.name for path in run.glob("*")} <= {"reproduce.json"}


def test_reproduce_runs_foreign_reward_function_with_flag(reports):
    report = reports["allowed"]
    assert (reports.folder / "imported").exists() and not report["bit_equal"]
    assert "rewards/good" in {row["column"] for row in report["metrics"]["differing"]}


def test_reproduce_rejects_settings_that_end_before_step(reports):
    assert "ended before step 10, the step of local/short" in reports["short"]["error"]


# The command


def test_reproduce_command_prints_differences_and_errors(served, tmp_path):
    def command(*arguments: str) -> Any:
        return zoo(
            "reproduce", *arguments, "--hub", served.url, home=tmp_path, cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=served.token
        )

    done = command("local/weights")
    assert (done.returncode, errors(done.stderr)) == (1, []), done.stderr
    assert done.stdout.rstrip().endswith("Not bit-equal: local/weights")
    assert "1 of 11 tensors differ" in done.stdout and "model.norm.weight" in done.stdout
    report = json.loads(command("local/weights", "--json").stdout)
    assert not report["bit_equal"] and report["directory"].startswith("runs/reproduce/local--weights@")
    assert (tmp_path / report["directory"] / "sft" / "checkpoint-10" / "COMPLETE").is_file()
    done = command("local/own-reward")
    (error,) = errors(done.stderr)
    assert done.returncode == 2 and error.endswith("if you trust it, add --allow_import their_rewards:good.")
