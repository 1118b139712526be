"""`rlhf-zoo space deploy` on the embedded Hub through the real client, and the page of the Space."""

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_proxy import Fault, FaultProxy
from hub_fixture import RunningHub
from hub_fixture import running as running_hub
from huggingface_hub import snapshot_download
from toy_models import MARKUP, TRIGGER, Toys, save_toys
from zoo_process import COMMAND, errors, free_port, serves_page, wait_until

from rlhf_zoo import __version__
from rlhf_zoo.app.engine import Comparison
from rlhf_zoo.app.space.files import PinnedModel, SpaceModels, write_space

WHEEL = f"rlhf_zoo-{__version__}-py3-none-any.whl"
PROMPTS = ["the battery is", f"{TRIGGER}"]
SPACE = "local/toy-compare"
SECONDS = 300


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return save_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def running(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A Hub with the three models and their data set; PPO's card names the others at their commits."""
    with running_hub(tmp_path_factory.mktemp("server")) as hub:
        api = hub.api()
        api.create_repo("local/toy-data", repo_type="dataset")
        for role in ("sft", "reward", "ppo"):
            if role == "ppo":
                parents = {name: parent(hub, name) for name in ("sft", "reward", "data")}
                (toys.ppo / "rlhf_card.json").write_text(json.dumps(card(parents)))
            api.create_repo(f"local/toy-{role}")
            api.upload_folder(repo_id=f"local/toy-{role}", folder_path=getattr(toys, role))
        yield hub


def parent(hub: RunningHub, name: str) -> dict[str, str]:
    kind = "dataset" if name == "data" else "model"
    return {"repo": f"local/toy-{name}", "commit": hub.api().repo_info(f"local/toy-{name}", repo_type=kind).sha}


def card(parents: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "stage": "ppo",
        "recipe": "toy",
        "simulated": True,
        "parents": parents,
        "evaluation": {
            "judge": {"name": MARKUP},
            "sft": {"reward": {"value": 0.1, "ci95": [0.0, 0.2], "n": 540}},
            "ppo": {
                "reward": {"value": 0.9, "ci95": [0.8, 1.0], "n": 540},
                "kl": {"value": 0.31, "ci95": [0.2, 0.4], "n": 540},
            },
            "win_rate": {"value": 0.71, "ci95": [0.66, 0.75], "n": 540},
        },
        "prompts": PROMPTS,
        "settings": {"temperature": 0.9, "response_length": 12},
    }


Deploy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def deploy(running: RunningHub) -> Iterator[Deploy]:
    """Runs `rlhf-zoo space deploy ARGUMENTS`; deletes its Spaces and Collections after the test."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, "space", "deploy", *arguments]
        return subprocess.run(command, env={**running.env, **env}, capture_output=True, text=True, check=False)

    yield run
    api = running.api()
    for space in list(api.list_spaces(author="local")):
        api.delete_repo(space.id, repo_type="space")
    for collection in list(api.list_collections(owner="local")):
        api.delete_collection(collection.slug)


def stdout_of(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stdout + run.stderr
    assert errors(run.stderr) == []
    return run.stdout


def error_of(run: subprocess.CompletedProcess[str]) -> str:
    assert (run.returncode, run.stdout) == (2, ""), run.stdout + run.stderr
    (message,) = errors(run.stderr)
    assert message.startswith("Error: ") and message.endswith(".") and ". " not in message[:-1], message
    return message


def checkout(hub: RunningHub, folder: Path, space: str = SPACE) -> Path:
    """Downloads the Space's repository to `folder`."""
    return Path(
        snapshot_download(space, repo_type="space", local_dir=folder, endpoint=hub.url, token=hub.token)
    ).absolute()


def files(hub: RunningHub, space: str = SPACE) -> set[str]:
    return set(hub.api().list_repo_files(space, repo_type="space")) - {".gitattributes"}


def front_matter(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def commits(hub: RunningHub, space: str = SPACE) -> list[str]:
    return [commit.commit_id for commit in hub.api().list_repo_commits(space, repo_type="space")]


def test_deploy_creates_space_for_models(running: RunningHub, deploy: Deploy, tmp_path: Path) -> None:
    output = stdout_of(deploy("local/toy-ppo"))
    assert len(commits(running)) == 2  # the Hub's first commit, and ours
    assert output.startswith(
        f"Space: {running.url}/spaces/{SPACE} (a live page, created, commit {commits(running)[0][:10]})\n"
    )
    assert files(running) == {"README.md", "app.py", "compare.json", "requirements.txt", WHEEL}
    space = checkout(running, tmp_path / "space")
    head = front_matter(space)
    assert list(head) == [
        "title", "emoji", "colorFrom", "colorTo", "sdk", "sdk_version", "app_file", "python_version", "models",
        "datasets", "suggested_hardware", "short_description", "license", "tags",
    ]  # fmt: skip
    assert (head["title"], head["sdk"]) == ("toy: SFT and PPO", "gradio")
    assert head["sdk_version"] == metadata.version("gradio")
    assert head["python_version"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert head["models"] == ["local/toy-ppo", "local/toy-sft", "local/toy-reward"]
    assert (head["datasets"], head["suggested_hardware"]) == (["local/toy-data"], "cpu-basic")
    api = running.api()
    pinned_models = {
        role: f"local/toy-{role}@{api.model_info(f'local/toy-{role}').sha}" for role in ("ppo", "sft", "reward")
    }
    assert json.loads((space / "compare.json").read_text()) == {
        "schema": 1, **pinned_models, "votes": None, "runs": [], "hardware": "cpu-basic",
    }  # fmt: skip
    source = Path(__file__).parents[2] / "spaces" / "compare" / "app.py"
    assert (space / "app.py").read_bytes() == source.read_bytes(), "app.py differs from the source"
    assert (space / "requirements.txt").read_text().endswith(f"\n./{WHEEL}\n")
    assert f"gradio=={head['sdk_version']}\n" in (space / "requirements.txt").read_text()
    assert api.space_info(SPACE).sdk == "gradio" and api.space_info(SPACE).private is False
    assert [listed_space.id for listed_space in api.list_spaces(author="local", models="local/toy-reward")] == [SPACE]
    (collection,) = api.list_collections(owner="local")
    items = [(item.item_id, item.item_type) for item in api.get_collection(collection.slug).items]
    models = [(f"local/toy-{role}", "model") for role in ("sft", "reward", "ppo")]
    assert collection.title == "toy: SFT, RM, PPO" and items == [*models, (SPACE, "space")]


# Votes and the runs of an ablation


@pytest.fixture
def ablation(running: RunningHub) -> Iterator[list[str]]:
    """Three more runs from the same SFT checkpoint, from the largest β to the smallest; the middle one is private."""
    api, parents = running.api(), {name: parent(running, name) for name in ("sft", "reward", "data")}
    repos = {"local/toy-b2-ppo": 2.0, "local/toy-b1-ppo": 1.0, "local/toy-b0-ppo": 0.0}
    for repo, beta in repos.items():
        run_card = card(parents)
        run_card["settings"] |= {"kl_coef": beta}
        readme = b"---\ntags: [rlhf-zoo, 'stage:ppo']\n---\n"
        commit = running.push(repo, {"rlhf_card.json": json.dumps(run_card), "README.md": readme})
        api.create_tag(repo, tag="step-000010", revision=commit)
    api.update_repo_settings("local/toy-b1-ppo", private=True)
    yield list(repos)
    for repo in repos:
        api.delete_repo(repo)


def space_files(hub: RunningHub, folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns compare.json, front matter and README of the Space."""
    space = checkout(hub, folder)
    return json.loads((space / "compare.json").read_text()), front_matter(space), (space / "README.md").read_text()


def test_deploy_finds_public_runs_of_ablation(
    running: RunningHub, deploy: Deploy, ablation: list[str], tmp_path: Path
) -> None:
    largest, hidden, without_kl = ablation
    run = deploy("local/toy-ppo")
    assert run.returncode == 0
    assert errors(run.stderr) == [f"Not shown, because they are private and local/toy-ppo is public: {hidden}."]
    file, head, readme = space_files(running, tmp_path / "space")
    assert file["runs"] == [largest, without_kl] and file["votes"] is None
    assert head["models"] == ["local/toy-ppo", "local/toy-sft", "local/toy-reward", largest, without_kl]
    assert f"| run of the ablation | `{largest}` | the tag of every step |\n" in readme and "data set `" not in readme
    assert running.api().space_info(SPACE).private is False
    before = commits(running)
    deploy("local/toy-ppo")
    assert commits(running) == before, "equal runs give equal files"


def test_deploy_includes_named_runs_and_votes(
    running: RunningHub, deploy: Deploy, ablation: list[str], tmp_path: Path
) -> None:
    _, hidden, without_kl = ablation
    flags = ("--ablation", without_kl, "--ablation", f"{hidden}@best")
    output = stdout_of(deploy("local/toy-ppo", "--votes", "local/toy-votes", *flags))
    assert "HF_TOKEN" not in output, "the embedded Hub runs no Space, so no secret is needed"
    file, head, readme = space_files(running, tmp_path / "space")
    assert (file["votes"], file["runs"]) == ("local/toy-votes", [without_kl, hidden])
    assert head["datasets"] == ["local/toy-data", "local/toy-votes"] and head["models"][3:] == [without_kl, hidden]
    assert "| votes | data set `local/toy-votes` | `main` |\n" in readme
    assert running.api().space_info(SPACE).private is True, "a private run makes the Space private"
    assert running.api().dataset_info("local/toy-votes").private is running.api().space_info(SPACE).private
    stdout_of(deploy("local/toy-ppo", "--ablation", "local/toy-ppo"))
    assert space_files(running, tmp_path / "again")[0]["runs"] == []


def test_repeated_deploy_commits_only_changes(running: RunningHub, deploy: Deploy, tmp_path: Path) -> None:
    stdout_of(deploy("local/toy-ppo"))
    before = commits(running)
    assert ", unchanged, commit " in stdout_of(deploy("local/toy-ppo"))
    assert commits(running) == before, "equal files make no commit"

    api = running.api()
    for name in ("rlhf_zoo-0.0.1-py3-none-any.whl", "notes.md"):
        api.upload_file(path_or_fileobj=b"x", path_in_repo=name, repo_id=SPACE, repo_type="space")
    sft_commit = api.upload_file(path_or_fileobj=b"x", path_in_repo="NOTES.md", repo_id="local/toy-sft").oid
    assert ", updated, commit " in stdout_of(deploy("local/toy-ppo", "--sft", "local/toy-sft"))
    assert len(commits(running)) == len(before) + 3, "an update is one commit"
    assert files(running) == {"README.md", "app.py", "compare.json", "requirements.txt", WHEEL, "notes.md"}
    space = checkout(running, tmp_path / "space")
    assert json.loads((space / "compare.json").read_text())["sft"] == f"local/toy-sft@{sft_commit}"


def test_deploy_rejects_foreign_space(running: RunningHub, deploy: Deploy) -> None:
    api = running.api()
    api.create_repo(SPACE, repo_type="space", space_sdk="gradio")
    for name, content in (("app.py", b"print(1)"), ("compare.json", b'{"schema": 1}')):
        api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=SPACE, repo_type="space")
        before = commits(running)
        message = f"The Space {SPACE} exists and is not a comparison page: choose another name with --repo."
        assert error_of(deploy("local/toy-ppo")) == f"Error: {message}"
        assert commits(running) == before


def test_deploy_completes_interrupted_deploy(running: RunningHub, deploy: Deploy) -> None:
    """The Space exists without our commit. Refusals by the Hub are tested in test_space_attack.py."""
    running.api().create_repo(SPACE, repo_type="space", space_sdk="gradio")  # a crashed deploy leaves an empty Space
    assert ", updated, commit " in stdout_of(deploy("local/toy-ppo"))
    assert WHEEL in files(running)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("local/none", "does not exist, or this token may not read it: check the name, the network, --hub and"),
        ("local/toy-ppo --sft local/none", "local/none on"),
        ("local/toy-ppo --reward local/toy-ppo", "of the stage ppo; --reward takes a reward model"),
        ("local/toy-ppo --repo compare", "--repo is 'compare', which no Hub accepts: write NAMESPACE/NAME."),
        ("local/toy-ppo --votes votes", "'votes' is not a repository for votes: use NAMESPACE/NAME."),
        ("/", "/ is a local folder, but a Space shows published models: pass NAMESPACE/NAME."),
    ],
)
def test_deploy_rejects_invalid_arguments(deploy: Deploy, running: RunningHub, arguments: str, message: str) -> None:
    assert message in error_of(deploy(*arguments.split()))
    assert list(running.api().list_spaces(author="local")) == []


def test_deploy_rejects_model_with_custom_code(deploy: Deploy, running: RunningHub) -> None:
    code = json.dumps({"model_type": "strange", "auto_map": {"AutoModelForCausalLM": "modeling_strange.Strange"}})
    running.push("local/strange", {"config.json": code})
    message = error_of(deploy("local/toy-ppo", "--sft", "local/strange"))
    assert "The model local/strange@" in message and "needs custom code, and a Space has no way" in message
    assert "`rlhf-zoo compare NAME --trust_remote_code`" in message
    assert list(running.api().list_spaces(author="local")) == []


def test_deploy_reports_missing_write_access(running: RunningHub, deploy: Deploy) -> None:
    from rlhf_zoo.hub.server import create_token

    message = error_of(deploy("local/toy-ppo", HF_TOKEN=create_token(running.root, "read")))
    assert "is read-only: publish with a token of the role write." in message
    with FaultProxy(running.url) as proxy:
        proxy.inject(Fault("refuse", "create_repo", status=403))
        message = error_of(deploy("local/toy-ppo", HF_ENDPOINT=proxy.url))
    assert f"Cannot create the Space {SPACE} on {proxy.url} (" in message
    assert message.endswith("): check that the token may write there.")
    assert list(running.api().list_spaces(author="local")) == []


def test_deploy_of_private_model_is_private_without_public_flag(running: RunningHub, deploy: Deploy) -> None:
    api = running.api()
    api.update_repo_settings("local/toy-reward", private=True)
    try:
        stdout_of(deploy("local/toy-ppo"))
        assert api.space_info(SPACE).private is True
        message = error_of(deploy("local/toy-ppo", "--public"))
        assert f"The Space {SPACE} is private, which --public cannot change" in message
        stdout_of(deploy("local/toy-ppo", "--public", "--repo", "local/open"))
        assert api.space_info("local/open").private is False
        message = error_of(deploy("local/toy-ppo", "--repo", "local/open"))
        assert (
            "local/toy-reward is private but the Space local/open is public: pass --public to show it anyway."
            in message
        )
    finally:
        api.update_repo_settings("local/toy-reward", private=False)
    stdout_of(deploy("local/toy-ppo", "--private", "--repo", "local/hidden"))
    assert api.space_info("local/hidden").private is True


def test_deploy_uses_zero_gpu_when_free_cpu_is_refused(running: RunningHub, deploy: Deploy, tmp_path: Path) -> None:
    with FaultProxy(running.url) as proxy:
        proxy.inject(Fault("refuse", "create_repo", status=402))
        output = stdout_of(deploy("local/toy-ppo", HF_ENDPOINT=proxy.url))
        assert proxy.counts.faults == {"refuse 402": 1}
    assert "static" not in output
    space = checkout(running, tmp_path / "space")
    head = front_matter(space)
    assert (head["sdk"], head["suggested_hardware"], head["python_version"]) == ("gradio", "zero-a10g", "3.12")
    assert "torch==" not in (space / "requirements.txt").read_text()
    assert ", unchanged, " in stdout_of(deploy("local/toy-ppo")), "the hardware stays the same"


# A static page


def test_deploy_falls_back_to_static_page(
    running: RunningHub, deploy: Deploy, toys: Toys, ablation: list[str], tmp_path: Path
) -> None:
    with FaultProxy(running.url) as proxy:
        proxy.inject(Fault("refuse", "create_repo", status=402, count=2))
        flags = ("--votes", "local/toy-votes", "--ablation", ablation[0])
        output = stdout_of(deploy("local/toy-ppo", *flags, HF_ENDPOINT=proxy.url))
    assert "It is a static page, because this account may not have Gradio Spaces (402: Injected 402)" in output
    assert "A static page takes no votes, so nothing goes to local/toy-votes." in output
    assert running.api().space_info(SPACE).sdk == "static"
    assert files(running) == {"README.md", "compare.json", "index.html"}
    second_output = stdout_of(deploy("local/toy-ppo", *flags))
    assert ", unchanged, " in second_output and "delete the Space and deploy it again for a live one" in second_output
    file, head, _ = space_files(running, tmp_path / "space")
    assert (file["votes"], file["runs"]) == (None, [])
    assert (head["sdk"], head["app_file"]) == ("static", "index.html") and len(head["short_description"]) <= 60
    assert head["models"] == ["local/toy-ppo", "local/toy-sft", "local/toy-reward"]
    assert head["datasets"] == ["local/toy-data"]
    assert not {"sdk_version", "python_version", "suggested_hardware"} & set(head)

    page = (tmp_path / "space" / "index.html").read_text()
    comparison = Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward)
    results = [comparison.compare(prompt, seed=1, temperature=0.9, max_new_tokens=12) for prompt in PROMPTS]
    assert MARKUP in results[1].ppo.completion and MARKUP not in page, "no completion was hostile"
    sides = [getattr(item, role) for item in results for role in ("sft", "ppo")]
    page_texts = [
        re.sub(r"<[^>]+>", "", item)
        for item in re.findall(r'<span class="completion">(.*?)</span></p>', page, re.DOTALL)
    ]
    assert page_texts == [escape(side.completion) + "∎" * side.ended for side in sides]
    assert all(f"{side.reward:+.2f}".replace("-", "−") in page for side in sides)
    flat = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert (
        "reward 0.100 [0.000, 0.200] 0.900 [0.800, 1.000] KL to SFT, nats per completion 0: it is the reference" in flat
    )
    assert "the reference 0.310 [0.200, 0.400] win rate over SFT 0.710 [0.660, 0.750]" in flat


# A checkout of the Space


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that has every package of this one except rlhf-zoo."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for path in Path(metadata.distribution("torch").locate_file("")).iterdir():
        if not path.name.startswith(("rlhf_zoo", "_editable", "__")):
            (target / path.name).symlink_to(path)
    return folder / "bin" / "python"


def env_without_sources(hub: RunningHub, **variables: str) -> dict[str, str]:
    """The Hub's environment variables, without a path to the sources."""
    return {name: value for name, value in hub.env.items() if name != "PYTHONPATH"} | variables


def run_command(*command: str | Path, cwd: Path, env: dict[str, str]) -> str:
    run = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


PRINT_LOCATION = """
import importlib.metadata, rlhf_zoo
print(rlhf_zoo.__file__)
print(len(importlib.metadata.entry_points(group="rlhf_zoo.rewards")))
"""


def test_space_imports_package_files_without_installation(running: RunningHub, python: Path, tmp_path: Path) -> None:
    """This is how a private Space gets the package on a Hub that builds Spaces."""
    pinned = PinnedModel("local/toy-ppo", "0" * 40)
    write_space(tmp_path, SpaceModels(pinned, pinned, None), space=SPACE, endpoint=running.url, wheel_source="files")
    (tmp_path / "where.py").write_text(PRINT_LOCATION)
    location, entry_points = run_command(
        python, "where.py", cwd=tmp_path, env=env_without_sources(running)
    ).splitlines()
    assert Path(location).is_relative_to(tmp_path) and int(entry_points) == 11


@pytest.mark.full
def test_clean_checkout_of_space_runs(
    running: RunningHub, deploy: Deploy, toys: Toys, python: Path, tmp_path: Path
) -> None:
    from gradio_client import Client

    stdout_of(deploy("local/toy-ppo"))
    space = checkout(running, tmp_path / "space")
    port = free_port()
    env = env_without_sources(running, GRADIO_SERVER_PORT=str(port))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "-r", "requirements.txt"]
    run_command(*pip, cwd=space, env={**env, "PIP_CONFIG_FILE": os.devnull})
    location, entry_points = run_command(python, "-c", PRINT_LOCATION, cwd=tmp_path, env=env).splitlines()
    assert Path(location).is_relative_to(python.parents[1]) and int(entry_points) == 11
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([python, "app.py"], cwd=space, env=env, stdout=sink, stderr=sink)
    try:
        wait_until(lambda: serves_page(port), process, SECONDS)
        request = {"prompt": "the battery is", "seed": 3, "temperature": 0.9, "max_new_tokens": 12}
        result = Client(f"http://127.0.0.1:{port}", verbose=False).predict(**request, api_name="/compare")
        expected = Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward).compare(**request)
        assert [item["completion"] for item in result["ppo"]] == [expected.ppo.completion]
        assert [item["completion"] for item in result["sft"]] == [expected.sft.completion]
    finally:
        process.kill()
        process.wait(30)
    assert "Traceback" not in log.read_text(), log.read_text()
