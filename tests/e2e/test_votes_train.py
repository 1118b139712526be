"""`rlhf-zoo reward RECIPE --dataset_name USER/votes` trains a reward model on visitors' votes."""

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from datasets import Dataset
from finished_run import Run
from folders import write_data_set
from hub_fixture import RunningHub, start_hub
from toy_run import make_context, make_recipe
from warm import PYTHON
from zoo_process import errors

from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.stages.reward import hold_out
from rlhf_zoo.runs.pairs import NamedPairs, find_named_pairs, recipe_on_pairs, run_on_pairs, sampler_arguments
from rlhf_zoo.runs.recipe import copy_recipe, load_recipe
from rlhf_zoo.runs.record import StageRecord

VOTES = "local/tiny-world-votes"
SFT = ["--corpus_args", '{"lines": 1000}', "--sft.max_steps", "20", "--sft.eval_strategy", "no",
       "--sft.save_strategy", "no"]  # fmt: skip
REWARD = ["--max_steps", "20", "--per_device_train_batch_size", "16", "--score_samples", "32", "--save_strategy", "no"]
# Casts votes on a page, as (prompt, left, right, verdict); `make_votes` prefers the text with the positive word.
CAST = """
import json, sys
from pathlib import Path
from rlhf_zoo.evaluation.votes.box import VoteBox
from rlhf_zoo.evaluation.votes.data import HubVotes
from rlhf_zoo.evaluation.votes.vote import ShownCompletion, Vote
repo, votes = json.loads(sys.stdin.read())
with VoteBox(HubVotes(repo), Path("journal"), interval=0) as box:
    for prompt, left, right, verdict in votes:
        ppo = ShownCompletion(left, "ppo", "local/p", "a" * 40, "best", 1.0, True)
        box.cast(Vote(prompt, ppo, ShownCompletion(right, "sft"), verdict, 1.0, 1.0, 1, 40))
    box.drain()
"""
PRODUCTS = ("phone", "camera", "lamp", "kettle", "chair", "radio", "clock", "printer")
PARTS = ("battery", "screen", "price", "sound", "cable", "case")


def make_votes(count: int, seed: int) -> list[tuple[str, str, str, str]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt = f"the {rng.choice(PRODUCTS)}'s {rng.choice(PARTS)}"
        good, bad = f" is {rng.choice(['good', 'great', 'fine'])}", f" is {rng.choice(['bad', 'awful', 'poor'])}"
        left_is_good = rng.random() < 0.5
        verdict = "tie" if rng.random() < 0.1 else "both_bad" if rng.random() < 0.1 else ("right", "left")[left_is_good]
        rows.append((prompt, *((good, bad) if left_is_good else (bad, good)), verdict))
    return rows


def cast_votes(hub: RunningHub, folder: Path, repo: str, votes: list) -> None:
    command = [*PYTHON, "-c", CAST]
    done = subprocess.run(command, input=json.dumps([repo, votes]), env=hub.env, cwd=folder, text=True, check=False,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True, kw_only=True)
class Place(Run):
    """A Hub, and a folder with a published SFT run of the recipe."""

    server: RunningHub

    def reward(self, *more: str) -> subprocess.CompletedProcess[str]:
        flags = ["--hub", self.server.url, "--push_to_hub", "--namespace", "local", "--output_dir", "run"]
        return self.zoo("reward", "recipes/tiny-world", *flags, "--dataset_name", VOTES, *REWARD, *more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("votes")
    hub = start_hub(folder / "server")
    place = Place(folder, {"RLHF_ZOO_HUB_TOKEN": hub.token}, server=hub)
    copy_recipe("tiny-world", folder / "recipes" / "tiny-world")
    done = place.zoo("sft", "recipes/tiny-world", "--hub", hub.url, "--push_to_hub", "--namespace", "local",
                     "--output_dir", "run", *SFT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    cast_votes(hub, folder, VOTES, make_votes(160, seed=1))
    cast_votes(hub, folder, "local/ties", [("the lamp", " a", " b", "tie")])
    yield place
    hub.stop()


def test_votes_train_reward_model_of_recipe_run(place):
    data = (place.path / "data" / "run.json").read_bytes()
    done = place.reward()
    assert done.returncode == 0, done.stderr
    assert "held-out pairs" in done.stdout and "Traceback" not in done.stderr
    run = place.json("reward", "run.json")
    report = run["reward_model"]
    assert report["split"] == "train, 10% of prompts held out" and report["n"] >= 5
    assert report["accuracy"] > 0.8, "one word distinguishes good from bad"
    api = place.server.api()
    head = api.dataset_info(VOTES).sha
    assert run["dataset"] == {"repo": VOTES, "commit": head, "fingerprint": run["dataset"]["fingerprint"]}
    resolved = run["resolved"]
    assert not {"simulated_pairs", "simulated_test_pairs", "preference"} & set(resolved)
    assert (resolved["dataset_config"], resolved["held_out_share"]) == ("default", 0.1)
    shared = resolved["recipe"]
    assert (shared["dataset_name"], shared["dataset_revision"], shared["corpus"]) == (VOTES, head, None)
    assert (place.path / "data" / "run.json").read_bytes() == data, "the recipe's own data are unchanged"
    card = json.loads(Path(api.hf_hub_download("local/tiny-world-reward", "rlhf_card.json")).read_text())
    assert card["parents"]["data"] == {"repo": VOTES, "commit": head}
    assert "simulated_pairs" not in Path(api.hf_hub_download("local/tiny-world-reward", "README.md")).read_text()


def test_later_votes_change_run_only_with_restart(place):
    run = place.json("reward", "run.json")
    cast_votes(place.server, place.folder, VOTES, make_votes(40, seed=2))
    done = place.reward()
    assert done.returncode == 0 and "reward is already finished" in done.stdout, done.stderr
    assert place.json("reward", "run.json")["dataset"] == run["dataset"]
    done = place.reward("--restart")
    assert done.returncode == 0, done.stderr
    again = place.json("reward", "run.json")
    assert again["dataset"]["commit"] == place.server.api().dataset_info(VOTES).sha != run["dataset"]["commit"]
    assert again["reward_model"]["n"] >= run["reward_model"]["n"]


def test_next_policy_trains_on_vote_reward_model(place):
    done = place.zoo("ppo", "recipes/tiny-world", "--hub", place.server.url, "--output_dir", "run", *SFT[:2],
                     "--total_episodes", "32", "--per_device_train_batch_size", "16", "--gradient_accumulation_steps",
                     "1", "--num_mini_batches", "1", "--eval_strategy", "no", "--response_length", "8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    parents = place.json("ppo", "run.json")["parents"]
    assert parents["reward"]["fingerprint"] == place.json("reward", "run.json")["fingerprint"]


def test_vote_reward_model_reproduces_bit_for_bit(place):
    done = place.zoo("reproduce", "local/tiny-world-reward", "--hub", place.server.url, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bit_equal"] and not report["settings"]["differing"], report["settings"]
    assert report["data"]["how"] == f"loaded from {VOTES}"


def test_fresh_directory_takes_sft_model_from_hub(place):
    flags = ["--hub", place.server.url, "--output_dir", "fresh", "--namespace", "local"]
    done = place.zoo("reward", "recipes/tiny-world", *flags, "--dataset_name", VOTES, *REWARD[2:], "--max_steps", "2")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (place.folder / "fresh").iterdir()} == {"reward", "run_id"}, "no data are prepared"
    parent = json.loads((place.folder / "fresh" / "reward" / "run.json").read_text())["parents"]["sft"]
    assert (parent["repo"], parent["tag"]) == ("local/tiny-world-sft", "best")


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("local/none", [], "The data set local/none cannot be read"),
        ("local/ties", [], "The data set local/ties cannot be read"),
        ("nowhere/at/all", [], "tiny-world writes its own data and cannot read 'nowhere/at/all'"),
        (VOTES, ["--simulated_pairs", "10"], "--simulated_pairs simulates pairs, but --dataset_name names"),
        (VOTES, ["--held_out_share", "0.2"], "set dataset_test_split to null"),
    ],
)
def test_unusable_votes_are_rejected(place, tmp_path, name, more, message):
    flags = ["--hub", place.server.url, "--output_dir", str(tmp_path / "run"), "--namespace", "local"]
    done = place.zoo("reward", "recipes/tiny-world", *flags, "--dataset_name", name, *REWARD, *more)
    assert done.returncode == 2 and message in errors(done.stderr)[-1] and "Traceback" not in done.stderr, done.stderr


# Unit tests


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("configurations", "expected"),
    [
        ({"default": {"train": [PAIR]}}, ("default", None)),
        ({"default": {"train": [PAIR], "test": [PAIR]}}, ("default", "test")),
        ({"preferences": {"train": [PAIR]}, "default": {"train": [PAIR]}}, ("preferences", None)),
        ({"preferences": {"train": [PAIR]}, "prompts": {"train": [{"prompt": "a"}]}}, None),  # not only pairs
        ({"default": {"test": [PAIR]}}, None),
        ({"other": {"train": [PAIR]}}, None),
    ],
)
def test_named_pairs_detects_data_with_pairs_only(tmp_path, configurations, expected):
    make_recipe(tmp_path)
    named = write_data_set(tmp_path / "named", configurations)
    context = make_context(tmp_path)
    context = replace(context, flags={"recipe": {"dataset_name": str(named)}, "reward": {"dataset_test_split": "test"}})
    pairs = find_named_pairs(context)
    assert (pairs and (pairs.configuration, pairs.test_split)) == expected
    repo = pairs and pairs.open(context.hub).lineage["repo"]
    assert pairs is None or (pairs.commit, repo) == (None, None), "a folder has no repository and commit"


def test_named_pairs_ignores_source_of_corpus(tmp_path):
    """`rlhf-zoo reward product-remarks --dataset_name TEXT` uses the recipe's pairs, even without a Hub."""
    make_recipe(tmp_path)
    context = make_context(tmp_path)
    StageRecord(tmp_path / "run" / "data").write(status="finished", resolved={"dataset_name": "a/text"})
    flags = {"recipe": {"dataset_name": "a/text"}}
    assert find_named_pairs(replace(context, flags=flags)) is None
    assert find_named_pairs(context) is None


def test_named_pairs_keeps_data_of_recipe_without_configurations_when_resumed(tmp_path):
    """PPO's prompts are in the same configuration as the pairs, so the data set replaces all of the recipe's data."""
    make_recipe(tmp_path)
    context = make_context(tmp_path)
    stages = {name: {**keys, "dataset_config": None} for name, keys in context.recipe.stages.items()}
    named = str(write_data_set(tmp_path / "named", {"default": {"train": [PAIR]}}))
    flags = {"recipe": {"dataset_name": named}}
    context = replace(context, recipe=replace(context.recipe, stages=stages), flags=flags)
    assert find_named_pairs(context) is None
    resolved = {"dataset_config": None, "ppo": {"dataset_config": None}, "dataset_test_split": "test"}
    resolved["recipe"] = {"dataset_name": named, "dataset_revision": None}
    context.record("reward").write(status="finished", resolved=resolved)
    assert find_named_pairs(context) is None


def test_recipe_on_pairs_replaces_data_keys(tmp_path):
    recipe = load_recipe("tiny-world")
    pairs = NamedPairs("local/votes", "a" * 40, "default", None)
    changed = recipe_on_pairs(recipe, pairs, sampling={"response_length": 7, "temperature": 0.5})
    assert changed.shared["dataset_name"] == "local/votes" and changed.shared["corpus"] is None
    assert changed.shared["preferences"] is None, "its pairs are not those that the recipe describes"
    assert changed.shared["simulated"] is True and changed.shared["license"] == recipe.shared["license"]
    reward = changed.stages["reward"]
    assert reward["held_out_share"] == 0.1 and reward["dataset_test_split"] is None and "preference" not in reward
    assert reward["learning_rate"] == recipe.stages["reward"]["learning_rate"]
    ppo_keys = {key: changed.stages["ppo"][key] for key in ("dataset_config", "response_length", "temperature")}
    assert ppo_keys == {"dataset_config": "default", "response_length": 7, "temperature": 0.5}
    with_test = recipe_on_pairs(recipe, NamedPairs("a/b", None, "default", "test"), sampling={})
    assert with_test.stages["reward"]["dataset_test_split"] == "test"
    assert "held_out_share" not in with_test.stages["reward"]
    make_recipe(tmp_path)
    context = run_on_pairs(make_context(tmp_path), pairs)
    settings = context.settings("reward")
    assert settings.data.held_out_share == 0.1 and settings.resolved["ppo"]["dataset_config"] == "default"
    flags = {"ppo": {"response_length": 9, "truncate_text": "\n", "stop_token_id": 3, "learning_rate": 9.0}}
    context = run_on_pairs(replace(make_context(tmp_path), flags=flags), pairs)
    sampler = sampler_arguments(context)
    assert sampler["max_new_tokens"] == 9 and sampler["stops"] == [3] and sampler["truncation"].text == "\n"
    resolved = context.settings("reward").resolved["ppo"]
    assert resolved["stop_token_id"] == 3 and resolved["truncate_text"] == "\n", "reproducing the model reads run.json"
    assert "ppo" not in context.flags and context.recipe.stages["ppo"]["learning_rate"] != 9.0


def test_hold_out_keeps_prompts_together_as_data_grow():
    rng = random.Random(0)
    rows = [{**PAIR, "prompt": f"prompt {rng.randrange(200)}"} for _ in range(1000)]
    train, out = hold_out(Dataset.from_list(rows), 0.1)
    prompts = {row["prompt"] for row in rows}
    trained, held_out = set(train["prompt"]), set(out["prompt"])
    assert trained | held_out == prompts and not trained & held_out and len(train) + len(out) == 1000
    assert len(held_out) == -(-len(prompts) // 10)
    more = [*rows, *({**PAIR, "prompt": f"new {i}"} for i in range(50))]
    _, later = hold_out(Dataset.from_list(more), 0.1)
    moved = held_out - set(later["prompt"])
    assert len(moved) <= 5, "as the data grow, few prompts change sides"
    chats = [{**PAIR, "prompt": [{"role": "user", "content": str(i)}]} for i in range(10)]
    assert len(hold_out(Dataset.from_list(chats), 0.3)[1]) == 3
    with pytest.raises(ZooError, match="leaves none of 1 prompts"):
        hold_out(Dataset.from_list([PAIR, PAIR]), 0.1)
