"""A run that reads models and data from one Hub and publishes to another: neither gets the other's token."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hub_fixture import base_environment
from miniatures import load, save
from schemas import make_recipe
from thread_hub import ThreadHub

from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import HF_URL, Hub, choose_source, reload_clients
from rlhf_zoo.hub.client.refs import NOT_LOADED, resolve
from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.handler import ConnectionHandler
from rlhf_zoo.modeling.models import load_causal

pytestmark = pytest.mark.usefixtures("quick_plots")

BASE, VALUE, DATA = "maker/base", "maker/value", "maker/pairs"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, str | None]]:
    """(port, Authorization) of every request that a Hub received."""
    requests: set[tuple[int, str | None]] = set()
    parse = ConnectionHandler.parse_request

    def record(self: ConnectionHandler) -> bool:
        parsed = parse(self)
        requests.add((self.server.server_address[1], self.headers.get("Authorization")))
        return parsed

    monkeypatch.setattr(ConnectionHandler, "parse_request", record)
    return requests


@pytest.fixture
def hubs(tmp_path: Path, sent: set) -> Iterator[tuple[ThreadHub, ThreadHub]]:
    """Two empty Hubs, (source, target), and an environment without settings of a Hub."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    source, target = ThreadHub(tmp_path / "a" / "hub"), ThreadHub(tmp_path / "b" / "hub")
    own = {"HOME": str(tmp_path), "RLHF_ZOO_HOME": str(tmp_path / "zoo"), "RLHF_ZOO_HUB_TOKEN": target.token}
    with patch.dict(os.environ, base_environment() | own, clear=True):
        yield source, target
    reload_clients()
    source.close(), target.close()


@pytest.fixture
def recipe(hubs: tuple[ThreadHub, ThreadHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that uses models and data of the source, which has a pickle next to the weights."""
    source, _ = hubs
    recipe = make_recipe(
        tmp_path, "trl-lib/tldr-preference", "plain", base=BASE, recipe={"dataset_name": DATA},
        ppo={"value_model_name_or_path": VALUE},
    )  # fmt: skip
    base = save("GPT-2", tmp_path / "base")
    (base / "pytorch_model.bin").write_bytes(b"a pickle")
    value, _ = load("GPT-2")
    value.resize_token_embeddings(296)  # SFT adds a PAD
    value.save_pretrained(tmp_path / "value")
    uploads = ((BASE, "model", base), (VALUE, "model", tmp_path / "value"), (DATA, "dataset", tmp_path / "data"))
    for repo, kind, folder in uploads:
        source.api().create_repo(repo, repo_type=kind)
        source.api().upload_folder(repo_id=repo, repo_type=kind, folder_path=folder)
        shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path)
    return recipe


def zoo(*arguments: str) -> None:
    cli.main(list(arguments), prog_name="rlhf-zoo", standalone_mode=False)


def test_run_reads_from_source_hub_and_publishes_to_target(
    hubs: tuple[ThreadHub, ThreadHub], recipe: Path, sent: set, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, target = hubs
    sent.clear()
    where = ("--hub", target.url, "--source_hub", source.url, "--output_dir", "run")
    zoo("run", "mine", *where, "--push_to_hub", "--namespace", "local")
    assert {token for port, token in sent if port == source.port} == {None}
    # Large files go to a signed URL, without a token.
    assert {token for port, token in sent if port == target.port} - {None} == {f"Bearer {target.token}"}
    run = {stage: json.loads(Path("run", stage, "run.json").read_text()) for stage in ("sft", "reward", "ppo")}
    base = run["sft"]["parents"]["base"]
    assert (base["repo"], base["hub"]) == (BASE, source.url)
    assert {(stage["dataset"]["repo"], stage["dataset"]["hub"]) for stage in run.values()} == {(DATA, source.url)}
    cached = {path.name for path in (tmp_path / "zoo").rglob("models--maker--base/snapshots/*/*")}
    assert "model.safetensors" in cached and "pytorch_model.bin" not in cached
    models = {model.id for model in target.api().list_models()}
    assert models == {"local/mine-sft", "local/mine-reward", "local/mine-ppo"}
    assert f"base_model: {BASE}" in Path("run/sft/README.md").read_text()
    with pytest.raises(ZooError, match="x"):
        zoo("recipes", "validate", "mine", "--source_hub", source.url, "--reward.columns", "{chosen: x}")
    flags = ("--judge", "schemas:judge", "--prompts", "2", "--split", "train", "--reward", "none")
    zoo("eval", "local/mine-ppo", "--against", "local/mine-sft", *flags, *where[:4], "--output_dir", "compared")
    assert "Hub: " + target.url in capsys.readouterr().err


def test_resolve_tries_target_hub_before_source(hubs: tuple[ThreadHub, ThreadHub], tmp_path: Path) -> None:
    first, second = hubs
    for hub, repo in ((first, "maker/both"), (second, "maker/both"), (second, "maker/second")):
        hub.push(repo, {"model.safetensors": hub.url})
    first.push("maker/pickle", {"config.json": "{}", "pytorch_model.bin": "a pickle"})
    second.api().create_repo("maker/hidden", private=True)
    source = Hub("other", second.url, "a test", token=False, cache=tmp_path / "second")
    both = Hub("other", first.url, "a test", token=first.token, cache=tmp_path / "first", source_hub=source)
    assert resolve("maker/both", both).path.joinpath("model.safetensors").read_text() == first.url
    assert resolve("maker/second", both).path.joinpath("model.safetensors").read_text() == second.url
    for name, message in (
        ("maker/both@v9", "maker/both has no revision 'v9'"),
        ("maker/hidden", f"maker/hidden is not on {first.url}, which was asked first; there is no repository "
                         f"'maker/hidden' on {second.url}"),
        ("maker/pickle", "has pytorch_model.bin, a pickle"),
    ):  # fmt: skip
        with pytest.raises(ZooError, match=message):
            resolve(name, both)
    silent = replace(both, source_hub=replace(source, endpoint="http://127.0.0.1:9"))
    with pytest.raises(
        ZooError, match=rf"maker/none is not on {first.url}, .*the Hub http://127.0.0.1:9 cannot be reached"
    ):
        resolve("maker/none", silent)
    offline = replace(both, source_hub=replace(source, offline=True))
    for hub in (silent, offline):
        assert resolve("maker/second", hub).commit, "the cache has it"
    with pytest.raises(ZooError, match=r"maker/none is not on .* is not in the cache"):
        resolve("maker/none", offline)
    # A model that is only a pickle is refused from the cache too. Its tokenizer may be loaded.
    for hub in (both, replace(both, endpoint="http://127.0.0.1:9"), replace(both, offline=True)):
        with pytest.raises(ZooError, match=r"maker/pickle has pytorch_model\.bin, a pickle"):
            resolve("maker/pickle", hub)
        assert (resolve("maker/pickle", hub, ignore=(*NOT_LOADED, "*.safetensors")).path / "config.json").is_file()


@pytest.mark.parametrize(
    ("flag", "target", "env", "endpoint"),
    [
        (None, "local", {}, HF_URL),
        (None, "local", {"HF_ENDPOINT": "https://hub.example.com/"}, "https://hub.example.com"),
        (None, HF_URL, {}, None),
        (None, "local", {"HF_ENDPOINT": "http://hub.example.com"}, None),
        ("none", "local", {}, None),
        ("local", "local", {}, None),
        ("https://other.example.com", "local", {}, "https://other.example.com"),
    ],
)
def test_source_hub_choice_follows_flag_and_environment(
    flag: str | None, target: str, env: dict[str, str], endpoint: str | None
) -> None:
    hub = Hub("local", None, "a test") if target == "local" else Hub("huggingface", target, "a test")
    with patch.dict(os.environ, env, clear=True):
        source = choose_source(flag, hub)
    assert (None if source is None else source.endpoint) == endpoint
    with pytest.raises(ZooError, match=r"--source_hub is .* which would send a token unencrypted"):
        choose_source("http://x.com", hub)


def test_token_goes_to_its_own_hub_only(hubs: tuple[ThreadHub, ThreadHub], sent: set) -> None:
    """A source that is HF_ENDPOINT gets HF_TOKEN; any other source gets RLHF_ZOO_SOURCE_TOKEN."""
    from rlhf_zoo.hub.client.connect import connect

    source, target = hubs
    write_token, read_token = create_token(source.root, "write"), create_token(source.root, "read")
    source.api().create_repo("maker/x", private=True)
    chosen = choose_source(source.url, Hub("other", target.url, "a test"))
    for env, token in (
        ({"HF_ENDPOINT": source.url, "HF_TOKEN": write_token}, write_token),
        ({"HF_TOKEN": "hf_real", "RLHF_ZOO_SOURCE_TOKEN": read_token}, read_token),
    ):
        sent.clear()
        with (
            patch.dict(os.environ, env),
            connect(Hub("other", target.url, "a test"), chosen) as hub,
        ):
            assert hub.source_hub is not None and hub.source_hub.api().model_info("maker/x").private
            assert hub.api().whoami()["name"] == "local"
        assert sent == {(source.port, f"Bearer {token}"), (target.port, f"Bearer {target.token}")}


def test_adapter_and_base_load_from_different_hubs(hubs: tuple[ThreadHub, ThreadHub], tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    source, target = hubs
    model, tokenizer = load("GPT-2")
    policy = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    policy.save_pretrained(tmp_path / "lora")
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text()) | {"base_model_name_or_path": BASE}
    save("GPT-2", tmp_path / "base")
    for hub, repo, name in ((source, BASE, "base"), (target, "local/lora", "lora")):
        (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
        hub.api().create_repo(repo)
        head = hub.api().upload_folder(repo_id=repo, folder_path=tmp_path / name).oid
        config["revision"] = head if hub is source else config["revision"]
    other = Hub("other", source.url, "a test", token=False, cache=tmp_path / "source")
    both = Hub("other", target.url, "a test", token=target.token, cache=tmp_path / "target", source_hub=other)
    for _ in range(2):
        resolved = resolve("local/lora", both)
        assert resolved.path.name == resolved.commit
        ids = tokenizer("how is item 3", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert torch.allclose(load_causal(resolved.path)(ids).logits, policy(ids).logits, atol=1e-5)
    assert resolve("local/lora", both, ignore=()).path.joinpath("adapter_config.json").read_text() == json.dumps(config)
