"""Choosing the Hub of a command, and keeping its token from any other Hub."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from warm import PYTHON
from zoo_process import environment, hubs_over, wait_until, zoo

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB, HF_URL, Hub, choose_hub, choose_source, home
from rlhf_zoo.hub.client.refusals import check_reachable, translate_lookup_errors
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.hub.server.names import RepoId
from rlhf_zoo.hub.server.storage import Storage
from rlhf_zoo.pipeline.plan.shapes import find_shape

OTHER = "https://hub.example.com"
SECRET = "hf_secret"
SERVED = "http://127.0.0.1:8123"


def choose_with(flag: str | None, push: bool | None, env: dict[str, str]) -> Hub:
    with patch.dict(os.environ, env, clear=True):
        return choose_hub(flag, push_to_hub=push)


@pytest.mark.parametrize(
    ("flag", "push", "env", "kind", "endpoint", "why"),
    [
        (None, False, {}, "local", None, "log in and add --push_to_hub"),
        (None, False, {"HF_TOKEN": SECRET}, "local", None, "log in and add --push_to_hub"),
        (None, None, {"HF_TOKEN": SECRET}, "local", None, "pass --hub to use another"),
        (None, True, {"HF_TOKEN": SECRET}, "huggingface", HF_URL, "a token was found"),
        (None, True, {"HF_TOKEN": ""}, "local", None, "to publish on huggingface.co, log in: no token was found"),
        (None, False, {"HF_ENDPOINT": OTHER}, "other", OTHER, "HF_ENDPOINT"),
        (None, True, {"HF_ENDPOINT": "", "HF_TOKEN": SECRET}, "huggingface", HF_URL, "a token was found"),
        (None, False, {"HF_ENDPOINT": HF_URL + "/"}, "huggingface", HF_URL, "HF_ENDPOINT"),
        ("local", True, {"HF_ENDPOINT": OTHER, "HF_TOKEN": SECRET}, "local", None, "--hub local"),
        (OTHER + "/", True, {"HF_ENDPOINT": HF_URL, "HF_TOKEN": SECRET}, "other", OTHER, "--hub"),
        (HF_URL, False, {"HF_ENDPOINT": OTHER}, "huggingface", HF_URL, "--hub"),
        ("http://127.0.0.1:8080", False, {}, "other", "http://127.0.0.1:8080", "--hub"),
        ("http://[::1]:8080", False, {}, "other", "http://[::1]:8080", "--hub"),
    ],
)
def test_choose_follows_flag_then_environment_then_token(flag, push, env, kind, endpoint, why, tmp_path):
    hub = choose_with(flag, push, {"HF_HOME": str(tmp_path), **env})
    assert (hub.kind, hub.endpoint) == (kind, endpoint)
    assert hub.reason.startswith(why) or why in hub.reason
    assert hub.label == ("local" if kind == "local" else endpoint)
    assert why in hub.description


def test_default_hub_description_names_client_endpoint():
    from huggingface_hub import constants

    assert DEFAULT_HUB.description == f"{constants.ENDPOINT} (huggingface_hub's settings)"


@pytest.mark.parametrize("by_flag", [False, True])
def test_address_of_served_embedded_hub_selects_embedded_hub(tmp_path, thread_hub, by_flag):
    flag, endpoint = (thread_hub.url + "/", {}) if by_flag else (None, {"HF_ENDPOINT": thread_hub.url})
    env = {"RLHF_ZOO_HOME": str(tmp_path / "zoo"), "HF_HOME": str(tmp_path), **endpoint}
    (tmp_path / "zoo" / "hub").mkdir(parents=True)
    record = tmp_path / "zoo" / "hub" / "server.json"
    for content in (None, "{", '{"url": "http://127.0.0.1:9"}', json.dumps({"url": thread_hub.url})):
        if content is not None:
            record.write_text(content)
        assert choose_with(flag, False, env).kind == "other"
    record.write_text(json.dumps({"url": thread_hub.url, "pid": os.getpid()}))
    hub = choose_with(flag, False, env)
    assert (hub.kind, hub.endpoint, hub.label) == ("local", None, "local")
    with patch.dict(os.environ, env, clear=True):
        assert choose_source(None, hub) is None or by_flag


def test_record_of_killed_hub_is_ignored(tmp_path, thread_hub):
    """Nothing answers at its address, or another program does, which is then the Hub that the user named."""
    (tmp_path / "zoo" / "hub").mkdir(parents=True)
    for address in (SERVED, thread_hub.url):
        (tmp_path / "zoo" / "hub" / "server.json").write_text(json.dumps({"url": address, "pid": 2**22 + 1}))
        hub = choose_with(
            None, False, {"RLHF_ZOO_HOME": str(tmp_path / "zoo"), "HF_HOME": str(tmp_path), "HF_ENDPOINT": address}
        )
        assert (hub.kind, hub.endpoint, hub.reason) == ("other", address, "HF_ENDPOINT")


@pytest.mark.parametrize(
    "variables", [{"HF_HOME": "{0}"}, {"XDG_CACHE_HOME": "{0}"}, {"HF_TOKEN_PATH": "{0}/elsewhere"}]
)
def test_choose_uses_token_of_login(tmp_path, variables):
    env = {"HF_HOME": "", **{name: value.format(tmp_path) for name, value in variables.items()}}
    env = {name: value for name, value in env.items() if value}
    assert choose_with(None, True, {"HF_HOME": "/nowhere", **env}).kind == "local"
    for file in (tmp_path / "token", tmp_path / "huggingface" / "token", tmp_path / "elsewhere"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(SECRET)
    assert choose_with(None, True, env).kind == "huggingface"
    assert choose_with(None, False, env).kind == "local"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://example.com", "would send a token unencrypted: use https"),
        ("http://localhost.example.com", "would send a token unencrypted"),
        ("http://127.0.0.1@example.com", "would send a token unencrypted"),
        ("embedded", "use 'local' or an address such as https://huggingface.co"),
        ("ftp://huggingface.co", "use 'local' or an address"),
        ("https://", "use 'local' or an address"),
        ("http://[::1", "use 'local' or an address"),
        ("http://127.0.0.1:port", "use 'local' or an address"),
    ],
)
def test_choose_rejects_malformed_or_unsafe_addresses(address, message):
    with pytest.raises(ZooError, match=message):
        choose_with(address, False, {})
    endpoint_message = message.replace("'local' or ", "")  # only the flag accepts it
    with pytest.raises(ZooError, match=f"HF_ENDPOINT is .*{endpoint_message}"):
        choose_with(None, False, {"HF_ENDPOINT": address})


def test_home_follows_environment_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RLHF_ZOO_HOME", raising=False)
    assert home() == tmp_path / ".cache" / "rlhf-zoo"
    monkeypatch.setenv("RLHF_ZOO_HOME", "~/zoo")
    assert home() == tmp_path / "zoo"


# In a process of its own. A warm one has imported the clients, which read their environment then

LOOK = """
import json, os, sys
from rlhf_zoo.hub.client.connect import choose_hub, connect
flag, push = json.loads(sys.argv[1])
with connect(choose_hub(flag, push_to_hub=push)) as hub:
    from huggingface_hub import HfApi, constants, get_token
    import datasets.config, transformers.utils.hub
    who = HfApi().whoami()["name"] if hub.kind == "local" else None
    json.dump({
        "kind": hub.kind, "endpoint": hub.endpoint, "token_variable": hub.token_variable, "who": who,
        "client": constants.ENDPOINT, "token": get_token(), "offline": constants.HF_HUB_OFFLINE,
        "datasets_offline": datasets.config.HF_HUB_OFFLINE, "xet": not constants.HF_HUB_DISABLE_XET,
        "places": [constants.HF_HOME, constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH, constants.HF_XET_CACHE,
                   constants.HF_ASSETS_CACHE, str(datasets.config.HF_DATASETS_CACHE), datasets.config.HF_MODULES_CACHE],
        "environment": dict(os.environ),
    }, sys.stdout, default=str)
"""
REAL_PLACES = ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE",
               "HF_MODULES_CACHE", "HUGGINGFACE_HUB_CACHE")  # fmt: skip


def inspect_clients(
    tmp_path: Path, flag: str | None, push: bool = False, python: Sequence[str] = PYTHON, **env: str
) -> dict:
    """What the clients see after connect(), where the user has a token and caches of the real Hub."""
    places = {name: str(tmp_path / "real" / name.lower()) for name in REAL_PLACES}
    env = environment(tmp_path) | places | {"HF_TOKEN": SECRET} | env
    command = [*python, "-c", LOOK, json.dumps([flag, push])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def is_sealed(tmp_path: Path, seen: dict) -> bool:
    """Neither the user's token nor the user's caches are in reach of what runs after connect()."""
    report = json.dumps({key: value for key, value in seen.items() if key != "environment"})
    known = ("RLHF_ZOO_HUB_TOKEN", "TRACKIO_DIR")  # logs are of no Hub
    left = {name: value for name, value in seen["environment"].items() if name not in known}
    return SECRET not in json.dumps(left) + report and str(tmp_path / "real") not in json.dumps(left) + report


@pytest.mark.parametrize("python", [[sys.executable], PYTHON], ids=["cold", "warm"])
def test_embedded_hub_hides_real_token_and_caches(tmp_path, python):
    seen = inspect_clients(
        tmp_path, "local", python=python, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HTTP_PROXY="http://127.0.0.1:9"
    )
    assert is_sealed(tmp_path, seen)
    assert (seen["kind"], seen["who"], seen["xet"]) == ("local", "local", False)
    assert (seen["offline"], seen["datasets_offline"]) == (False, False)
    assert seen["client"] == seen["endpoint"] and seen["endpoint"].startswith("http://127.0.0.1:")
    assert all(place.startswith(str(tmp_path / "zoo" / "hub-cache")) for place in seen["places"])
    assert seen["token"] == (tmp_path / "zoo" / "hub" / "client-token").read_text()
    assert (tmp_path / "zoo" / "hub" / "client-token").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "real").exists()
    assert hubs_over(tmp_path) == []


def test_other_hub_uses_own_token_and_caches(tmp_path):
    seen = inspect_clients(tmp_path, OTHER, RLHF_ZOO_HUB_TOKEN="other_token")
    assert is_sealed(tmp_path, seen)
    assert (seen["token"], seen["token_variable"]) == ("other_token", "RLHF_ZOO_HUB_TOKEN")
    assert all(place.startswith(str(tmp_path / "zoo" / "hubs" / "hub.example.com")) for place in seen["places"])
    # The token that stands beside HF_ENDPOINT is that Hub's, and not the real one's.
    seen = inspect_clients(tmp_path, HF_URL, HF_ENDPOINT=OTHER)
    assert is_sealed(tmp_path, seen) and seen["client"] == HF_URL and seen["token"] is None


@pytest.mark.parametrize(("flag", "push", "endpoint"), [(None, True, None), (None, False, OTHER)])
def test_token_is_sent_only_to_its_own_hub(tmp_path, flag, push, endpoint):
    seen = inspect_clients(tmp_path, flag, push, **({"HF_ENDPOINT": endpoint} if endpoint else {}))
    assert (seen["client"], seen["token"], seen["token_variable"]) == (endpoint or HF_URL, SECRET, "HF_TOKEN")
    assert seen["places"][0] == str(tmp_path / "real" / "hf_home")


def test_requests_to_other_hub_omit_token(tmp_path, thread_hub, monkeypatch):
    seen: list[str] = []
    really = Application.find_role

    def role(self: Application, path: str, headers: Any) -> Any:
        seen.append(f"{path}\n{headers}")
        return really(self, path, headers)

    monkeypatch.setattr(Application, "find_role", role)
    command = ("pull", "a/b", "--hub", thread_hub.url)
    done = zoo(*command, home=tmp_path / "home", HF_TOKEN=SECRET)
    assert done.returncode == 2 and "There is no repository 'a/b'" in done.stderr
    assert seen and SECRET not in "".join(seen) + done.stdout + done.stderr
    seen.clear()
    zoo(*command, home=tmp_path / "home", HF_TOKEN=SECRET, RLHF_ZOO_HUB_TOKEN="mine")
    assert "Bearer mine" in "".join(seen) and SECRET not in "".join(seen)


def test_embedded_hub_ends_when_its_command_is_killed(tmp_path):
    code = """
import sys, time
from rlhf_zoo.hub.client.connect import choose_hub, connect
with connect(choose_hub("local", push_to_hub=False)):
    print("up", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([*PYTHON, "-c", code], env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert len(hubs_over(tmp_path)) == 1
    process.kill()
    process.communicate()
    wait_until(lambda: hubs_over(tmp_path) == [])


def test_embedded_hub_start_errors_are_readable(tmp_path):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "hub").write_text("a file")
    done = zoo("pull", "a/b", "--hub", "local", home=tmp_path)
    assert done.returncode == 2 and "set RLHF_ZOO_HOME to a writable folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_failed_lookup_names_embedded_hub_that_has_repository(thread_hub, tmp_path, monkeypatch):
    """A Hub that lacks it, and one that does not answer; `plan`, `validate` and `new` look up by this."""
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "own" / "zoo"))
    embedded = tmp_path / "own" / "zoo" / "hub"
    embedded.mkdir(parents=True)
    Storage(embedded).create(RepoId("model", "maker", "base"), private=False, sdk=None, variables={})
    remedy = r", but it is on the embedded Hub: add --source_hub local\.$"

    def look_up(hub: Hub, repo: str, repo_type: str) -> None:
        with translate_lookup_errors("The model x", hub, "check its name.", repo=repo, repo_type=repo_type):
            hub.api().repo_info(repo.partition("@")[0], repo_type=repo_type)

    answering = Hub("other", thread_hub.url, "", token=False, flag="--source_hub")
    closed = Hub("other", "http://127.0.0.1:9", "", token=False, flag="--source_hub")
    for hub in (answering, closed):
        with pytest.raises(ZooError, match=rf"^The model x cannot be found on {hub.address} \(.*\){remedy}"):
            look_up(hub, "maker/base@main", "model")
        for repo, repo_type in (("maker/base", "dataset"), ("maker/other", "model")):
            with pytest.raises(ZooError) as caught:
                look_up(hub, repo, repo_type)
            assert "embedded" not in str(caught.value)
    with pytest.raises(ZooError, match=remedy):
        check_reachable(closed, "maker/base")
    with pytest.raises(ZooError, match="so maker/other cannot be looked up: check the network"):
        check_reachable(closed, "maker/other")
    with pytest.raises(ZooError, match=rf"^The model maker/base cannot be found on .*{remedy}"):
        find_shape("maker/base", hub=answering)
    request = ("--model", "maker/base", "--preferences", "maker/pairs", "--judge", "classifier")
    done = zoo("new", tmp_path / "mine", *request, home=tmp_path / "own", HF_ENDPOINT=thread_hub.url)
    assert done.returncode == 2 and "but it is on the embedded Hub: add --source_hub local." in done.stderr
