"""The comparison Space's files, what they show, and what `rlhf-zoo compare` refuses before it loads a model."""

import ast
import hashlib
import json
import re
import socket
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import yaml
from test_page_streams import zero_gpu
from toy_models import save_toys

import rlhf_zoo
from rlhf_zoo.app import page
from rlhf_zoo.app import serve as compare
from rlhf_zoo.app.engine import Comparison, PolicyCompletion, Snapshot
from rlhf_zoo.app.page import PageModels, serve
from rlhf_zoo.app.page.static import static_page_html
from rlhf_zoo.app.space.files import ZERO_GPU, PinnedModel, SpaceModels, write_space
from rlhf_zoo.app.space.model_names import MODELS_FILE, ModelNames, read_model_names
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.refs import Checkpoint

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "spaces" / "compare"


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_readme_front_matter_is_valid() -> None:
    head = yaml.safe_load((SPACE / "README.md").read_text().split("---\n")[1])
    assert head["sdk"] == "gradio" and head["sdk_version"] == pins(ROOT / "constraints.txt")["gradio"]
    assert (SPACE / head["app_file"]).is_file()
    assert head["python_version"] == "3.11"
    assert {head["colorFrom"], head["colorTo"]} <= {
        "red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray",
    }  # fmt: skip
    assert len(head["short_description"]) <= 60  # the Hub's limit
    assert {"title", "emoji", "models", "datasets", "suggested_hardware", "license"} <= set(head)


def test_requirements_match_constraints() -> None:
    required, constraints = pins(SPACE / "requirements.txt"), pins(ROOT / "constraints.txt")
    assert required and required == {name: constraints[name] for name in required}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["space"]]
    wanted.remove("hatchling>=1.27")  # it makes the wheel, here
    names = {re.match(r"[\w.-]+", one)[0].lower().replace("-", "_") for one in wanted}
    assert {name.lower().replace("-", "_") for name in required} == names


def test_app_uses_only_public_api() -> None:
    tree = ast.parse((SPACE / "app.py").read_text())
    ours = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_zoo")
        for alias in node.names
    ]
    assert ours and {module for module, _ in ours} == {"rlhf_zoo", "rlhf_zoo.app"}
    assert {name for _, name in ours} <= {*rlhf_zoo.__all__, "page"}
    of_page = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "page"
    }
    assert of_page and of_page <= set(page.__all__)
    for name in page.__all__:
        assert callable(getattr(page, name))


def test_launch_names_extra_when_gradio_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ZooError, match=r"pip install 'rlhf-zoo\[space\]'"):
        compare.launch("local/x-ppo", sft=None, reward=None, host="127.0.0.1", port=0)


def test_launch_rejects_bad_ports_and_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ZooError, match=f"Port {port} of 127.0.0.1 is taken: choose another with --port"):
            compare.launch("local/x-ppo", sft=None, reward=None, host="127.0.0.1", port=port)
    assert compare._find_free_port("127.0.0.1", port) == port
    assert compare._find_free_port("127.0.0.1", 0) > 0
    for number in (-1, 65536):
        with pytest.raises(ZooError, match=f"There is no port {number}"):
            compare._find_free_port("127.0.0.1", number)
    with pytest.raises(ZooError, match="not an address of this machine"):
        compare._find_free_port("192.0.2.1", 0)  # TEST-NET-1, which no machine has


# What is deployed

MODELS = SpaceModels(
    ppo=PinnedModel("me/tiny-ppo", "1" * 40),
    sft=PinnedModel("me/tiny-sft", "2" * 40),
    reward=None,
    datasets=("me/tiny-data",),
    recipe="tiny: [x]\u202e",
)


def space(folder: Path, models: SpaceModels = MODELS, **options: str) -> dict[str, str]:
    """The text files of a Space in `folder`, by name."""
    folder.mkdir()
    write_space(folder, models, space="me/tiny-compare", endpoint="https://hub.test", **options)
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".md", ".txt", ".json", ".py")}


def test_requirements_name_wheel_by_path_or_address(tmp_path: Path) -> None:
    required = {
        layout: space(tmp_path / layout, wheel_source=layout)["requirements.txt"]
        for layout in ("path", "address", "files")
    }
    (wheel,) = (tmp_path / "path").glob("*.whl")
    assert required["path"].splitlines()[-1] == f"./{wheel.name}"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    address = f"https://hub.test/spaces/me/tiny-compare/resolve/main/{wheel.name}"
    assert required["address"].splitlines()[-1] == f"rlhf-zoo @ {address}#sha256={digest}"
    assert "rlhf-zoo @" not in required["files"] and ".whl" not in required["files"]
    assert not list((tmp_path / "files").glob("*.whl"))
    assert (tmp_path / "files" / "rlhf_zoo" / "__init__.py").is_file()


def test_written_space_has_pinned_requirements_and_readme(tmp_path: Path) -> None:
    written = space(tmp_path / "space")
    found = dict(line.split("==") for line in written["requirements.txt"].splitlines()[1:-1])
    assert set(found) == set(pins(SPACE / "requirements.txt"))
    assert all(version == metadata.version(name).split("+")[0] for name, version in found.items()), found
    without = [line for line in written["requirements.txt"].splitlines() if not line.startswith("torch==")]
    assert space(tmp_path / "zero", hardware=ZERO_GPU)["requirements.txt"].splitlines() == without
    head = yaml.safe_load(written["README.md"].split("---\n")[1])
    assert head["models"] == ["me/tiny-ppo", "me/tiny-sft"] and head["datasets"] == ["me/tiny-data"]
    assert head["title"] == "tiny: [x]\N{REPLACEMENT CHARACTER}: SFT and PPO"
    assert f"| SFT | `me/tiny-sft` | `{'2' * 40}` |" in written["README.md"]
    assert "NAMESPACE/NAME" not in written["README.md"] and "<!--" not in written["README.md"]


def test_written_space_round_trips_model_names(tmp_path: Path) -> None:
    more = replace(MODELS, votes="me/votes", runs=("me/b0-ppo", "me/b1-ppo"))
    for folder, models in (("plain", MODELS), ("more", more)):
        space(tmp_path / folder, models)
        assert read_model_names(tmp_path / folder) == ModelNames(
            f"me/tiny-ppo@{'1' * 40}", f"me/tiny-sft@{'2' * 40}", None, models.votes, models.runs
        )


def test_zero_gpu_wraps_the_computing_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = []

    def gpu(task):
        taken.append(task)
        return zero_gpu(task)

    toys = save_toys(tmp_path / "toys")
    source = {role: Checkpoint("me/x", getattr(toys, role)) for role in ("ppo", "sft")}
    page_models = PageModels(Comparison.load(ppo=toys.ppo, sft=toys.sft), rlhf_zoo.Lineage(**source, reward=None))
    app = compare._import_space_app()
    monkeypatch.setattr(app, "GPU", gpu)
    monkeypatch.setattr(serve, "start", lambda page, **address: page)
    with app.serve_page(page_models) as page:
        assert len(taken) == 1, "without a run, one function computes"
        fns = {one.api_name: one for one in page.fns.values()}
        assert fns["compare"].concurrency_limit == 1, "calls of ZeroGPU are processes of their own"
        with pytest.raises(gr.Error, match="The prompt is empty"):
            fns["compare"].fn("")
        assert fns["compare"].fn("the camera", max_new_tokens=4)["ppo"][0]["length"] <= 4


NASTY = "</p></style><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>&amp;\x1b[31m\u202e\" onload=1"


def test_static_page_escapes_text() -> None:
    card = {
        "simulated": True,
        "evaluation": {"judge": {"name": NASTY}, "ppo": {"judge": {"value": 0.5, "ci95": NASTY}}},
    }
    sft = PolicyCompletion("", None, 0.0, (), (), 0, False, stop="length")
    figures = dict.fromkeys(("token_logprob_ppo", "token_logprob_sft", "token_kl"), (1.0,))
    ppo = PolicyCompletion(NASTY, None, -7.0, (-7.0,), (NASTY,), 1, False, stop="length", **figures)
    sample = Snapshot(NASTY, 1, 1.0, 1.0, 8, (sft,), (ppo,), done=True)
    page = static_page_html(replace(MODELS, recipe=NASTY, card=card), [sample])
    assert "<script" not in page and "<img" not in page and "\x1b" not in page and "\u202e" not in page
    assert page.count("&lt;script&gt;window.ran = 1&lt;/script&gt;") >= 5
    assert "default-src 'none'" in page and not re.findall(r"url\(|@import|https://", page)
    assert page.count("http://") == page.count('<svg xmlns="http://'), "and no address but that name"
    assert "0.500 (interval not measured)" in page and '<i class="m4 k3" title="log-ratio −7.00' in page


def test_static_page_names_base_model() -> None:
    card = {"stage": "ppo", "settings": {"model_name_or_path": "maker/chat"}}
    card["evaluation"] = {"ppo": {"kl": {"value": 1.0}}, "win_rate": {"value": 0.5}}
    page = static_page_html(replace(MODELS, card=card), [])
    assert "SFT" not in page.partition("</style>")[2]
    assert "KL to the base, nats" in page and "win rate over the base" in page and "<th>base</th>" in page


def test_static_page_handles_missing_figures_and_samples() -> None:
    for card in ({}, {"evaluation": None}, {"evaluation": [1]}, {"evaluation": {"ppo": {"kl": {"value": "x"}}}}):
        page = static_page_html(replace(MODELS, card=card), [])
        assert "has no held-out prompts" in page and "On held-out prompts</h2>" not in page


PPO = f"me/toy-ppo@{'1' * 40}"
WHOLE = {"schema": 1, "ppo": PPO, "sft": "me/toy-sft@main", "reward": None, "votes": "me/votes",
         "runs": ["me/b02-ppo", f"me/b0-ppo@{'2' * 40}"], "hardware": "cpu-basic"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PPO", "SFT", "REWARD", "VOTES", "RUNS"):
        monkeypatch.delenv(f"RLHF_ZOO_{name}", raising=False)


def written(folder: Path, content: Any) -> Path:
    (folder / MODELS_FILE).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def test_environment_variables_replace_models_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ZOO_PPO", "you/other-ppo")
    assert (
        read_model_names(written(tmp_path, WHOLE))
        == read_model_names(written(tmp_path, b"{"))
        == ModelNames("you/other-ppo")
    )
    monkeypatch.setenv("RLHF_ZOO_SFT", "you/other-sft")
    monkeypatch.setenv("RLHF_ZOO_REWARD", "")
    monkeypatch.setenv("RLHF_ZOO_VOTES", "you/votes")
    monkeypatch.setenv("RLHF_ZOO_RUNS", " you/a-ppo, you/b-ppo@best ,")
    assert read_model_names(tmp_path / "none") == ModelNames(
        "you/other-ppo", "you/other-sft", None, "you/votes", ("you/a-ppo", "you/b-ppo@best")
    )


def test_votes_and_runs_variables_combine_with_models_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, WHOLE)
    monkeypatch.setenv("RLHF_ZOO_SFT", "you/other-sft")
    assert read_model_names(tmp_path).sft == "me/toy-sft@main", "it counts with RLHF_ZOO_PPO alone"
    monkeypatch.setenv("RLHF_ZOO_VOTES", "you/votes")
    assert read_model_names(tmp_path).votes == "you/votes" and read_model_names(tmp_path).runs == tuple(WHOLE["runs"])
    monkeypatch.setenv("RLHF_ZOO_VOTES", "")
    monkeypatch.setenv("RLHF_ZOO_RUNS", "you/a-ppo")
    assert read_model_names(tmp_path).votes == "me/votes" and read_model_names(tmp_path).runs == ("you/a-ppo",)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VOTES", "votes", "'votes' is not a repository for votes: use NAMESPACE/NAME."),
        ("VOTES", "me/votes@main", "'me/votes@main' is not a repository for votes"),
        ("RUNS", "me/a-ppo, ../b", "RLHF_ZOO_RUNS contains '../b', which is not a repository id"),
    ],
)
def test_read_model_names_rejects_bad_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"RLHF_ZOO_{name}", value)
    with pytest.raises(ZooError) as refused:
        read_model_names(written(tmp_path, WHOLE))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON ("),
        (b"[" * 100_000, "is not JSON ("),
        (b"[]", "is not a JSON object: deploy the Space again."),
        ({**WHOLE, "schema": 2}, "has schema 2; this rlhf-zoo reads up to 1."),
        ({**WHOLE, "schema": "1"}, "has the invalid value '1' under 'schema'"),
        ({**WHOLE, "ppo": "../toy-ppo"}, "has the invalid value '../toy-ppo' under 'ppo'"),
        ({**WHOLE, "sft": ["me/toy-sft"]}, "has the invalid value ['me/toy-sft'] under 'sft'"),
        ({**WHOLE, "reward": ""}, "has the invalid value '' under 'reward'"),
        ({**WHOLE, "runs": [None]}, "has the invalid value [None] under 'runs'"),
    ],
)
def test_read_model_names_rejects_broken_file(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ZooError) as refused:
        read_model_names(written(tmp_path, content))
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / MODELS_FILE} {message}") and said.endswith("."), said
