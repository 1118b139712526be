"""What a stranger's recipe.json may choose when it is run again, and what it may not."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.inspect.published import PublishedCheckpoint, comparable_settings, fetch_published, recipe_of
from rlhf_zoo.runs.settings.parse import stage_settings

A, B = "a" * 40, "b" * 40
SHARED = {
    "license": "mit",
    "seed": 3,
    "corpus": "rlhf_zoo.runs.corpora.tiny_world_2:prepare",
    "corpus_args": {"lines": 9},
}
PARENTS = {"sft": {"repo": "x/toy-sft", "commit": A}, "reward": {"repo": "x/toy-reward", "commit": B}}
GOLD = "rlhf_zoo.runs.corpora.tiny_world_2:gold"


def published(stage: str = "ppo", parents: Any = None, shared: Any = None, **keys: Any) -> PublishedCheckpoint:
    card = {"stage": stage, "recipe": "toy", "step": 4, "parents": PARENTS if parents is None else parents}
    resolved = {**keys, "seed": 3, "recipe": {**SHARED, **(shared or {})}, "data": "d", "parents": {"sft": "s"}}
    return PublishedCheckpoint("x/toy@best", Path("nowhere"), A, card, resolved, [])


def settings_of(one: PublishedCheckpoint) -> Any:
    return stage_settings(recipe_of(one)[0], one.stage, {}, shared_flags={}, output_dir=Path("out"))


def test_recipe_of_pins_earlier_stages_by_commit():
    recipe, pinned = recipe_of(published(max_steps=7, reward_funcs=[GOLD], reward_weights=[1, 0]))
    assert pinned == {"sft": f"x/toy-sft@{A}", "reward": f"x/toy-reward@{B}"}
    assert list(recipe.stages) == ["sft", "reward", "ppo"]
    assert (recipe.stages["sft"], recipe.stages["reward"]) == ({}, {})
    settings = stage_settings(recipe, "ppo", {}, shared_flags={}, output_dir=Path("out"))
    assert (settings.trainer.max_steps, settings.trainer.seed, settings.data.reward_funcs) == (7, 3, [GOLD])
    assert settings.recipe.corpus_args == {"lines": 9} and settings.recipe.license == "mit"
    recipe, pinned = recipe_of(published("sft", {}))
    assert (list(recipe.stages), pinned) == (["sft"], {})


def test_recipe_of_reward_model_keeps_ppo_sampling_settings():
    sampled = {"response_length": 12, "temperature": 0.5, "deepspeed": "/tmp/x", "reward_funcs": ["os:system"]}
    recipe, pinned = recipe_of(published("reward", ppo=sampled))
    assert recipe.stages["ppo"] == {"response_length": 12, "temperature": 0.5}
    assert pinned == {"sft": f"x/toy-sft@{A}"}
    trainer = stage_settings(recipe, "ppo", {}, shared_flags={}, output_dir=Path("out")).trainer
    assert (trainer.response_length, trainer.temperature) == (12, 0.5)
    assert "ppo" not in recipe_of(published("reward"))[0].stages


def test_recipe_of_takes_other_models_at_commits_of_card():
    other = {"sft": {"repo": "y/base", "commit": A}, "reward": {"repo": "y/judge", "commit": B}}
    found = published(parents=other, model_name_or_path="y/base", reward_model_path="y/judge@main")
    recipe, pinned = recipe_of(found)
    assert pinned == {} and list(recipe.stages) == ["ppo"]
    keys = recipe.stages["ppo"]
    assert (keys["model_name_or_path"], keys["reward_model_path"]) == (f"y/base@{A}", f"y/judge@{B}")
    assert comparable_settings(keys, found)["model_name_or_path"] == "y/base"
    assert comparable_settings(keys, found)["reward_model_path"] == "y/judge@main"


def test_recipe_of_pins_each_ensemble_member():
    """One that never left the machine it was trained on cannot be had."""
    parents = {**PARENTS, "reward_2": {"repo": "y/judge", "commit": A}}
    keys = {"reward_ensemble": "worst", "reward_ensemble_lambda": None}
    found = published(parents=parents, reward_model_path=["reward", "y/judge@main"], **keys)
    recipe, pinned = recipe_of(found)
    assert pinned == {"sft": f"x/toy-sft@{A}", "reward": f"x/toy-reward@{B}"} and "reward" in recipe.stages
    assert recipe.stages["ppo"]["reward_model_path"] == ["reward", f"y/judge@{A}"]
    assert comparable_settings(recipe.stages["ppo"], found)["reward_model_path"] == ["reward", "y/judge@main"]
    for name in ("ensemble/seed-2/reward", {"a": 1}):
        with pytest.raises(ZooError, match="a path on the machine that published it"):
            recipe_of(published(parents=parents, reward_model_path=["reward", name], **keys))


def test_recipe_of_run_without_reward_model_has_none():
    recipe, pinned = recipe_of(published(reward_model_path=None, reward_funcs=["length"]))
    assert "reward" not in recipe.stages and pinned == {"sft": f"x/toy-sft@{A}"}


@pytest.mark.parametrize(
    "parents",
    [
        {},
        {"sft": {"repo": None, "commit": None}},
        {"sft": {"repo": "x/y", "commit": "main"}},
        {"sft": {"repo": "/etc", "commit": A}},
    ],
)
@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_recipe_of_rejects_unpublished_parents(stage, parents):
    with pytest.raises(ZooError, match=r"The SFT policy of x/toy@best was never published"):
        recipe_of(published(stage, parents))


def test_recipe_of_drops_reporting_and_trust_settings():
    keys = {"report_to": "wandb", "run_name": "x", "trackio_space_id": "x/y", "trust_remote_code": True,
            "resume_from_checkpoint": "/tmp/x", "hub_private_repo": True,
            "attn_implementation": "x/kernel"}  # fmt: skip
    found = published("sft", {}, learning_rate=1e-3, **keys)
    stage = recipe_of(found)[0].stages["sft"]
    assert stage == {"learning_rate": 1e-3, "seed": 3, "report_to": []}
    # Nor is it a difference.
    assert comparable_settings(stage, found) == {"learning_rate": 1e-3, "seed": 3}
    assert comparable_settings(found.settings, found).keys() == {"learning_rate", "seed", "recipe", "data", "parents"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"deepspeed": "/tmp/x.json"}, "sets deepspeed, which may read files or load code"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "sets model_init_kwargs"),
        ({"accelerator_config": "/etc/passwd"}, "sets accelerator_config"),
        ({"model_name_or_path": "/home/me/model"}, "'/home/me/model', a path on the machine that published it"),
        ({"model_name_or_path": "../model"}, "a path on the machine that published it"),
        ({"output_dir": "/tmp/x"}, "output_dir, which is set by the run"),
        ({"hub_token": "x"}, "hub_token, which is set by the run"),
        ({"env": {"HF_ENDPOINT": "https://x"}}, "env, which is refused, because it could redirect the Hub"),
        ({"no_such_key": 1}, "no_such_key, which is not a key of the stage sft"),
        ({"learning_rate": "much"}, "learning_rate in recipe.json of x/toy@best is 'much'"),
        ({"shared": {"dataset_name": "/data", "corpus": None}}, "dataset_name to '/data', a path"),
        ({"shared": {"architecture": {"_attn_implementation": "x/y"}}}, "which may load code"),
        ({"shared": {"architecture": {"auto_map": {}}}}, "architecture.auto_map"),
        ({"shared": {"hub_token": "x"}}, "hub_token, which is set by the run"),
    ],
)  # fmt: skip
def test_settings_of_rejects_unsafe_values(keys, message):
    with pytest.raises(ZooError) as caught:
        settings_of(published("sft", {}, **keys))
    assert message in str(caught.value) and "recipe.json of x/toy@best" in str(caught.value)


def test_recipe_of_rejects_local_folder_with_repository_name(tmp_path, monkeypatch):
    (tmp_path / "y" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZooError, match="model_name_or_path to y/base, and a local folder has the same name"):
        recipe_of(published("sft", {}, model_name_or_path="y/base"))


HARMFUL = [
    "os:system",
    "rlhf_zoo.runs.record:os.system",  # through what one of our modules imports
    "rlhf_zoo.fileio:write_text",  # ours, but no reward
    "rlhf_zoo.fileio:write_text(path='owned', text='x')",
    "rlhf_zoo.runs.corpora.product_remarks:zipfile",
    "rlhf_zoo.runs.corpora.tiny_world_2:gold.__globals__",
    "rlhf_zoo.corpora_of_mine:prepare",
    "rlhf_zoo.runs.corpora.none:prepare",
    "my_rewards:length",
    "nothing_registered",
    ".corpora:prepare",
]


@pytest.mark.parametrize(
    ("name", "stage", "key"),
    [
        *((name, "sft", "corpus") for name in HARMFUL),
        *(
            (name, stage, key)
            for name in HARMFUL[:4]
            for stage, key in (("reward", "preference"), ("ppo", "reward_funcs"))
        ),
    ],
)
def test_recipe_of_rejects_unregistered_imports(name, stage, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("open('imported', 'w')\ndef length(): pass\n")
    keys = {"shared": {"corpus": name}} if key == "corpus" else {key: [name] if key == "reward_funcs" else name}
    with pytest.raises(ZooError, match="nor registered by an installed package: if you trust it, add --allow_import"):
        recipe_of(published(stage, **keys))
    assert [path.name for path in tmp_path.iterdir()] == ["my_rewards.py"]
    recipe_of(published(stage, **keys), [name])


@pytest.mark.parametrize(
    "name", [GOLD, "length", "format_match(pattern='x')", "rlhf_zoo.rewards.verifiable:exact_match"]
)
def test_recipe_of_accepts_package_and_entry_point_names(name):
    recipe, _ = recipe_of(published(reward_funcs=[name]))
    assert recipe.stages["ppo"]["reward_funcs"] == [name]


def test_recipe_of_rejects_unused_allow_import():
    with pytest.raises(ZooError, match=r"--allow_import names my:own, but recipe\.json of x/toy@best names rlhf_zoo"):
        recipe_of(published("sft", {}), ["my:own"])


@pytest.mark.parametrize(
    ("card", "resolved", "message"),
    [
        ('{"stage": "eval", "parents": {}}', "{}", "does not name its stage and parents"),
        ('{"stage": "sft", "parents": {}, "step": 1}', "[]", "does not hold a stage's settings"),
        ('{"stage": "sft", "parents": {}, "step": "1"}', '{"recipe": {}}', "does not name its step"),
        ('{"stage": "sft", "parents": {}, "step": 0}', '{"recipe": {}}', "does not name its step"),
        ('{"stage": "sft", "parents": {}, "step": 1, "recipe": "../x"}', '{"recipe": {}}', "does not name its recipe"),
        ("{", "{}", "is not valid JSON"),
        ("[" * 100_000, "{}", "nested more than 64 deep"),
    ],
)
def test_fetch_rejects_malformed_files(tmp_path, card, resolved, message):
    (tmp_path / "rlhf_card.json").write_text(card)
    (tmp_path / "recipe.json").write_text(resolved)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ZooError, match=message):
        fetch_published(str(tmp_path))


def test_fetch_ignores_malformed_parents_and_versions(tmp_path):
    card = {"stage": "sft", "parents": {"data": [1], "sft": "x"}, "step": 1, "recipe": "toy", "versions": [1]}
    (tmp_path / "rlhf_card.json").write_text(json.dumps(card))
    (tmp_path / "recipe.json").write_text('{"recipe": {}}')
    (tmp_path / "metrics.jsonl").touch()
    found = fetch_published(str(tmp_path))
    assert (found.parent("data"), found.parent("sft"), found.parent("reward"), found.versions) == (None, None, None, {})
