"""Downloaded recipes and their copies may name no code, no private files, no account and no machine."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.hub.client.downloads import DOWNLOAD_FOLDER, PARTIAL_FOLDER, RECIPE_MARK, find_download
from rlhf_zoo.hub.client.local_paths import FileToFetch, Folder
from rlhf_zoo.pipeline.smoke.miniatures import publish_miniatures, small_flags
from rlhf_zoo.runs.recipe import copy_recipe, load_recipe
from rlhf_zoo.runs.settings.key_classes import check_download
from rlhf_zoo.runs.settings.parse import recipe_config, stage_settings

pytestmark = pytest.mark.attack
SHELL = "subprocess:check_output(args='touch executed', shell=True)"
PPO = {"use_cpu": True, "reward_funcs": ["length"], "max_steps": 1}
SHARED = {"description": "A toy.", "corpus": "rlhf_zoo.runs.corpora.tiny_world_2:prepare"}


def write_recipe(folder: Path, *, shared: Any = None, ppo: Any = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**SHARED, **(shared or {})}))
    (folder / "ppo.yaml").write_text(yaml.safe_dump({**PPO, **(ppo or {})}))
    return folder


def read_recipe(folder: Path, **flags: Any) -> None:
    """As every command that takes a recipe does. flags: of the stage ppo, and of recipe.yaml under `recipe`."""
    recipe, shared = load_recipe(str(folder)), flags.pop("recipe", {})
    recipe_config(recipe, shared)
    stage_settings(recipe, "ppo", flags, shared_flags=shared, output_dir=Path("out"))


@pytest.fixture(params=["pull", "pull that stopped", "client", "cache", "card"])
def download(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that was downloaded."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("models--x--y/snapshots/abc" if request.param == "cache" else "pulled")
    folder.mkdir(parents=True)
    if request.param == "pull":
        Folder("x/y", "a" * 40, folder).begin([])
    elif request.param == "pull that stopped":  # of a version that made no other mark until the end
        (folder / PARTIAL_FOLDER).mkdir()
    elif request.param == "client":
        (folder / ".cache/huggingface/download").mkdir(parents=True)
    elif request.param == "card":
        (folder / "rlhf_card.json").write_text("{}")
    return folder


BAD: list[tuple[str, dict[str, Any]]] = [
    ("reward_funcs", {"ppo": {"reward_funcs": ["length", SHELL]}}),
    ("reward_funcs", {"ppo": {"reward_funcs": ["beside:f"]}}),
    ("reward_model_loader", {"ppo": {"reward_model_loader": SHELL}}),
    ("deepspeed", {"ppo": {"deepspeed": "ds.json"}}),
    ("vllm_server_base_url", {"ppo": {"vllm_server_base_url": "http://elsewhere"}}),
    ("corpus", {"shared": {"corpus": "beside:f"}}),
    ("corpus_args", {"shared": {"corpus_args": {"lines": SHELL}}}),
    ("architecture", {"shared": {"architecture": {"model_type": "llama", "auto_map": {"AutoConfig": "a.B"}}}}),
    ("judge", {"shared": {"evaluation": {"judge": SHELL}}}),
    ("judge", {"shared": {"evaluation": {"judge": "llm:gpt-9"}}}),
    ("judges", {"shared": {"evaluation": {"judges": ["classifier", f"rule:{SHELL}"]}}}),
    *(
        ("lm_eval", {"shared": {"evaluation": {"lm_eval": ["gsm8k", name]}}})
        for name in (
            "tasks/own.yaml",
            "tasks/own",
            "./own",
            "../own",
            "own.YAML",
            "own.txt",
            "~",
            "beside",
            "folder",
            "",
        )
    ),
]


@pytest.mark.parametrize(("key", "keys"), BAD, ids=[f"{key}-{place}" for place, (key, _) in enumerate(BAD)])
def test_downloaded_recipe_may_not_name_code(key: str, keys: dict[str, Any], download: Path) -> None:
    (download / "beside.py").write_text("open('executed', 'w')\ndef f(**_): pass\n")
    Path("beside").write_text("task: own\ndoc_to_text: !function beside.f\n")
    Path("folder").mkdir()
    folder = write_recipe(download / "recipe", **keys)
    with pytest.raises(ZooError, match=rf"which was downloaded,.*{key}"):
        read_recipe(folder)
    copy = copy_recipe(str(folder), download.parents[0] / "own" / "copied")
    with pytest.raises(ZooError, match=rf"which was downloaded,.*{key}"):
        read_recipe(copy)
    assert not Path("executed").exists()
    (copy / RECIPE_MARK).unlink()  # its user has read it
    if find_download(copy) is None:  # outside of the client's cache
        assert load_recipe(str(copy)).download_mark is None


def test_downloaded_recipe_accepts_user_flags_for_refused_keys(tmp_path: Path) -> None:
    folder = write_recipe(
        tmp_path / "toy", shared={"evaluation": {"judge": "llm:gpt-9"}}, ppo={"reward_funcs": [SHELL]}
    )
    read_recipe(folder)  # the user's own
    (tmp_path / DOWNLOAD_FOLDER).mkdir(parents=True)
    with pytest.raises(ZooError, match="which was downloaded"):
        read_recipe(folder)
    read_recipe(folder, reward_funcs=["my:own"], recipe={"evaluation.judge": "llm:gpt-5"})
    read_recipe(write_recipe(tmp_path / "plain", shared={"evaluation": {"judge": "classifier", "lm_eval": ["gsm8k"]}}))


def test_downloaded_folder_shadowing_built_in_recipe_is_download(download: Path, monkeypatch: Any) -> None:
    write_recipe(download / "tiny-world", ppo={"reward_funcs": [SHELL]})
    monkeypatch.chdir(download)
    with pytest.raises(ZooError, match="which was downloaded"):
        read_recipe(Path("tiny-world"))
    user_recipe = write_recipe(download.parents[0] / "mine" / "toy")
    (user_recipe / "ppo.yaml").unlink()
    (user_recipe / "recipe.yaml").write_text("extends: " + str(download / "tiny-world"))
    with pytest.raises(ZooError, match="which was downloaded"):
        read_recipe(user_recipe)


def test_built_in_recipes_are_no_downloads() -> None:
    assert load_recipe("tiny-world").download_mark is None and load_recipe("remarks-count").download_mark is None


def test_pull_rejects_files_that_fake_download_marks(tmp_path: Path) -> None:
    (tmp_path / "pulled").mkdir()
    for path in (
        ".cache", ".cache/huggingface", ".cache/huggingface/download", ".cache/huggingface/download/recipe9",
        ".Cache/HuggingFace/rlhf-zoo-pull",
    ):  # fmt: skip
        with pytest.raises(ZooError, match=f"contains {path}, which belongs to the client's folder"):
            Folder("x/y", "a" * 40, tmp_path / "pulled").check([FileToFetch(path, 1, "b" * 40)])


@pytest.mark.parametrize("by", ["pull", "client"])
def test_home_directory_downloads_leave_other_folders_trusted(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~/.cache/huggingface` is everybody's cache, so only folders that a download wrote into count."""
    monkeypatch.setenv("HOME", str(tmp_path))
    user_recipe = write_recipe(tmp_path / "mine" / "toy", ppo={"reward_funcs": [SHELL]})
    for folder in ("hub", "modules", "datasets/downloads"):
        (tmp_path / ".cache/huggingface" / folder).mkdir(parents=True)
    write_recipe(tmp_path / "recipe9", ppo={"reward_funcs": [SHELL]})
    assert find_download(user_recipe) is None and find_download(tmp_path) is None
    read_recipe(tmp_path / "recipe9")
    if by == "pull":
        Folder("x/y", "a" * 40, tmp_path).begin([FileToFetch("recipe9/recipe.yaml", 1, "b" * 40)])
    else:
        (tmp_path / DOWNLOAD_FOLDER / "recipe9").mkdir(parents=True)
    with pytest.raises(ZooError, match="which was downloaded"):
        read_recipe(tmp_path / "recipe9")
    assert find_download(tmp_path) is not None and find_download(user_recipe) is None
    read_recipe(user_recipe)


def test_copy_recipe_marks_copy_before_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_recipe(tmp_path / "pulled" / "toy", ppo={"reward_funcs": [SHELL]})
    Folder("x/y", "a" * 40, folder.parent).begin([])
    really = shutil.copytree

    def interrupted(*args: Any, **kwargs: Any) -> None:
        really(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copytree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_recipe(str(folder), tmp_path / "copied")
    with pytest.raises(ZooError, match="which was downloaded"):
        read_recipe(tmp_path / "copied")


def test_copied_recipe_is_trusted_after_mark_is_removed(tmp_path: Path) -> None:
    folder = write_recipe(tmp_path / "toy", ppo={"reward_funcs": [SHELL]})
    Folder("x/toy", "a" * 40, folder).begin([])
    (folder / "rlhf_card.json").write_text("{}")
    copy = copy_recipe(str(folder), tmp_path / "copied")
    assert {path.name for path in copy.iterdir()} == {RECIPE_MARK, "recipe.yaml", "ppo.yaml"}
    (copy / RECIPE_MARK).unlink()
    read_recipe(copy)


#: Of the machine or account: what would send a run's figures and token to its author's Space, and the others alike.
ACCOUNT: dict[str, Any] = {
    "report_to": "trackio",
    "trackio_space_id": "evil/space",
    "trackio_bucket_id": "evil/b",
    "trackio_static_space_id": "evil/space",
    "project": "evil",
    "run_name": "evil",
    "attn_implementation": "eager",
}


def test_downloaded_recipe_sets_no_account_or_machine_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_recipe(tmp_path / "toy", ppo=ACCOUNT)
    (folder / "zoo.yaml").write_text(yaml.safe_dump({"flags": {"ppo.trackio_space_id": "evil/b", "ppo.max_steps": 2}}))
    Folder("x/toy", "a" * 40, folder).begin([])
    recipe = load_recipe(str(folder))
    settings = stage_settings(recipe, "ppo", {"project": "mine"}, shared_flags={}, output_dir=Path("out"))
    assert settings.resolved.keys() & ACCOUNT.keys() == {"project"}
    assert (settings.trainer.report_to, settings.trainer.trackio_space_id, settings.trainer.project) == (
        [],
        None,
        "mine",
    )
    (message,) = [log.getMessage() for log in caplog.records if log.name == "rlhf_zoo.runs.settings.key_classes"]
    assert all(name in message for name in ACCOUNT)
    flags = small_flags(recipe)["ppo"]
    assert flags["max_steps"] == 2 and "trackio_space_id" not in flags


MODELS = [
    ("ppo", "model_name_or_path"),
    ("ppo", "reward_model_path"),
    ("ppo", "value_model_name_or_path"),
    ("sft", "model_name_or_path"),
    ("evaluation", "judge"),
    ("evaluation", "judges"),
    ("evaluation", "lexicon"),
]


#: What a key names, and whether a download may name it.
NAMES = [
    ("org/model", True), ("org/model@main", True), ("{recipe}/model", True), ("{private}", False), ("private", False),
    ("private@main", False), ("./private", False), ("pulled/toy/../../private", False), ("pulled/toy/link", False),
    ("pulled/toy/linked", False), ("~/private", False), ("/nowhere", False), ("org/private", False),
]  # fmt: skip


@pytest.mark.parametrize(("place", "key"), MODELS)
def test_downloaded_recipe_names_no_local_model(
    place: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's recipe would train on a private model, and publish what came of it."""
    monkeypatch.chdir(tmp_path)
    for private in ("private", "private@main", "org/private"):
        (tmp_path / private).mkdir(parents=True)
        (tmp_path / private / "config.json").write_text("{}")
    folder = write_recipe(tmp_path / "pulled" / "toy")
    (folder / "reward.yaml").write_text("use_cpu: true")
    (folder / "model").mkdir()
    (folder / "link").symlink_to(tmp_path / "private")
    (folder / "linked").mkdir()
    (folder / "linked" / "config.json").symlink_to(tmp_path / "private" / "config.json")
    user_recipe = load_recipe(str(folder))
    Folder("x/toy", "a" * 40, folder).begin([])
    recipe = load_recipe(str(folder))
    run_models = [("reward", True), ("ensemble/seed-1/reward", place == "ppo")]
    for name, passes in [*NAMES, *run_models]:
        named: Any = name.format(private=tmp_path / "private", recipe=folder)
        named = f"reward:{named}" if key in ("judge", "judges") else named
        named = [named] if key in ("judges", "reward_model_path") else named
        check_download(user_recipe, place, {key: named}, {})
        check_download(recipe, place, {key: named}, {key: "the user's"})
        if passes:
            check_download(recipe, place, {key: named}, {})
            continue
        with pytest.raises(ZooError, match=rf"which was downloaded, sets {key}.*Hub and files in its own folder"):
            check_download(recipe, place, {key: named}, {})


def test_downloaded_recipe_with_private_model_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    folder = write_recipe(tmp_path / "toy", ppo={"model_name_or_path": str(tmp_path / "private")})
    read_recipe(folder)
    Folder("x/toy", "a" * 40, folder).begin([])
    with pytest.raises(ZooError, match="sets model_name_or_path"):
        read_recipe(folder)


@pytest.mark.parametrize("base", ["{mine}", "../mine", "mine", "./beside", "linked"])
def test_downloaded_recipe_may_not_extend_user_recipe(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user_recipe = write_recipe(tmp_path / "mine", shared={"dataset_name": "private/data"})
    folder = write_recipe(tmp_path / "pulled" / "toy")
    write_recipe(folder.parent / "beside")
    (folder.parent / "linked").symlink_to(user_recipe)
    Folder("x/toy", "a" * 40, folder.parent).begin([])
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"extends": base.format(mine=user_recipe)}))
    with pytest.raises(ZooError, match="which was downloaded, extends"):
        load_recipe(str(folder))
    for name in ("beside", "tiny-world"):
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"extends": name}))
        assert load_recipe(str(folder)).base is not None


def test_copy_recipe_refuses_links_leading_outside(tmp_path: Path) -> None:
    folder = write_recipe(tmp_path / "pulled" / "toy", shared={"dataset_name": "copied/rows.jsonl"})
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (folder / "rows.jsonl").symlink_to(tmp_path / "secret.jsonl")
    Folder("x/toy", "a" * 40, folder).begin([])
    with pytest.raises(ZooError, match=r"its link rows\.jsonl leads out of the folder"):
        copy_recipe(str(folder), tmp_path / "copied")
    assert not (tmp_path / "copied").exists()


@pytest.mark.parametrize("zoo", [
    {"data": {"a/b": {"splits": ["../../../written"], "rows": [{"text": "a"}]}}},
    {"models": {"a/b": {"family": "qwen2.5", "template": "../../../../secret"}}},
    {"models": {"a/b": {"family": "qwen2.5", "fields": {"attn_implementation": "evil/kernel"}}}},
])  # fmt: skip
def test_downloaded_miniatures_stay_inside_their_folder(zoo: Any, tmp_path: Path) -> None:
    folder = write_recipe(tmp_path / "pulled" / "toy")
    (folder / "zoo.yaml").write_text(yaml.safe_dump(zoo))
    Folder("x/toy", "a" * 40, folder).begin([])
    with pytest.raises(ZooError, match=r"split|template|which may load code"):
        publish_miniatures(load_recipe(str(folder)), DEFAULT_HUB)
    assert not list(tmp_path.rglob("written*"))
