"""A damaged repository affects only itself; private repositories stay private."""

import hashlib
import hmac
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import connect, export
from rlhf_zoo.hub.client.pull import fetch
from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.cli import hub as hub_command
from rlhf_zoo.hub.server.durable import make_private
from rlhf_zoo.hub.server.git import GitRepository
from rlhf_zoo.hub.server.tokens import Signer
from rlhf_zoo.publishing.catalog import index

pytestmark = pytest.mark.attack

CARD = "---\ntags: [rlhf-zoo, 'stage:ppo']\n---\n"
SERVER = "rlhf_zoo.hub.server"


def loose_object(folder: Path, kind: bytes) -> Path:
    """The file of the newest commit's object of this kind."""
    with GitRepository(folder) as git:
        commit = git.branch("main") or ""
        tree = git.root_tree(commit)
        oid = {b"commit": commit, b"tree": tree, b"blob": git.children(tree).get(b"README.md", (0, ""))[1]}[kind]
    return folder / "objects" / oid[:2] / oid[2:]


def overwrite(path: Path, content: bytes | None) -> None:
    path.chmod(0o600)
    path.unlink()
    if content is not None:
        path.write_bytes(content)


#: Damage to a repository on the disk, and the message about it.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty-settings": (lambda folder: overwrite(folder / "hub.json", b""), "its hub.json is not what a Hub writes"),
    "half-settings": (lambda folder: overwrite(folder / "hub.json", b'{"created": "\\ud800"}'), "half a character"),
    "list-settings": (lambda folder: overwrite(folder / "hub.json", b"[1]"), "its hub.json is not what a Hub writes"),
    "odd-settings": (lambda folder: overwrite(folder / "hub.json", b'{"created": 5}'), "'created' is 5"),
    "odd-privacy": (lambda folder: overwrite(folder / "hub.json", b'{"created": "", "private": 5}'), "'private' is 5"),
    "odd-secrets": (lambda folder: overwrite(folder / "hub.json", b'{"created": "", "secrets": {"a": 5}}'), "5 is no"),
    "lost-settings": (lambda folder: overwrite(folder / "hub.json", None), "its hub.json is lost"),
    "empty-main": (lambda folder: overwrite(folder / "refs/heads/main", b""), "its branch main is lost"),
    "lost-commit": (lambda folder: overwrite(loose_object(folder, b"commit"), None), "is lost"),
    "lost-tree": (lambda folder: overwrite(loose_object(folder, b"tree"), None), "the tree"),
    "lost-readme": (lambda folder: overwrite(loose_object(folder, b"blob"), None), "the object"),
    "no-objects": (lambda folder: shutil.rmtree(folder / "objects"), "is lost"),
}  # fmt: skip
#: Pushed files whose metadata no list can show; they damage nothing.
PUSHED = {
    "odd-config": {"README.md": CARD, "config.json": '{"architectures": 5}'},
    "cycle": {"README.md": "---\ntags: &a [rlhf-zoo, *a]\n---\n"},
    "digits": {"README.md": f"---\nx: 0x{'f' * 5000}\n---\n"},
}


def test_lists_skip_damaged_repositories(
    thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread_hub.make("good", {"README.md": CARD, "rlhf_card.json": '{"stage": "ppo", "recipe": "toy"}'})
    thread_hub.make("good-data", {"README.md": CARD}, "dataset")
    thread_hub.make("good-space", {"README.md": "---\nmodels: [local/good]\n---\n"}, "space")
    thread_hub.make("odd-space", {"README.md": "---\nmodels: [{a: 1}, 5]\ndatasets: {b: 2}\n---\n"}, "space")
    for name, (damage, _) in DAMAGE.items():
        thread_hub.make(name, {"README.md": CARD, "config.json": "{}"})
        damage(thread_hub.folder(name))
    for name, files in PUSHED.items():
        thread_hub.make(name, files)
    with caplog.at_level(logging.WARNING, SERVER):
        for role in ("write", None, "write"):
            api = thread_hub.api(role)
            expand = ["sha", "lastModified", "tags", "config"]
            for listed in (
                api.list_models(),
                api.list_models(full=True, cardData=True),
                api.list_models(author="local", filter="rlhf-zoo", expand=expand),
                api.list_models(search="o", sort="created_at"),
            ):
                ids = {item.id for item in listed}
                assert {"local/good", "local/odd-config"} <= ids and not ids & {f"local/{name}" for name in DAMAGE}
            assert [item.id for item in api.list_datasets(full=True)] == ["local/good-data"]
            assert [item.id for item in api.list_spaces(full=True, models="local/good")] == ["local/good-space"]
        api = thread_hub.api()
        assert api.whoami()["name"] == "local" and api.get_full_repo_name("x") == "local/x"
        usage = thread_hub.send("GET", "/api/settings/repositories").json()
        assert "local/good" in {item["id"] for item in usage}
        assert b"local/good" in thread_hub.send("GET", "/", role=None).content
    messages = [record.getMessage() for record in caplog.records]
    for name in DAMAGE:
        assert any(f"models/local/{name} is damaged" in line for line in messages), (name, messages)
    assert not [record for record in caplog.records if record.exc_info], caplog.text

    # `hub status`, as text and as JSON, and `zoo` report the damage.
    status = ["status", "--root", str(thread_hub.root)]
    document = json.loads(CliRunner().invoke(hub_command, [*status, "--json"], catch_exceptions=False).stdout)
    reasons = {item["id"]: item["reason"] for item in document["damaged"]}
    expected = {name: message for name, (_, message) in DAMAGE.items()}
    assert set(reasons) == {f"local/{name}" for name in expected}
    for name, message in expected.items():
        assert message in reasons[f"local/{name}"], name
    assert str(thread_hub.folder("lost-tree")) in {item["folder"] for item in document["damaged"]}
    assert "damaged       model local/lost-settings: " in CliRunner().invoke(hub_command, status).stdout
    entries = {entry.repo: entry for entry in index.published_models("local")}
    assert (entries["local/good"].recipe, entries["local/good"].note) == ("toy", None)
    for name, message in expected.items():
        assert message in (entries[f"local/{name}"].note or ""), name
    monkeypatch.delenv("HF_TOKEN")
    assert "local/good" in {entry.repo for entry in index.published_models("local")}


def test_request_for_damaged_repository_returns_410(
    thread_hub: ThreadHub, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, (damage, message) in DAMAGE.items():
        thread_hub.make(name, {"README.md": CARD})
        damage(thread_hub.folder(name))
        with pytest.raises(HfHubHTTPError, match="is damaged on this Hub's disk") as caught:
            thread_hub.api().model_info(f"local/{name}")
        assert caught.value.response.status_code == 410 and message in str(caught.value)
    for address in ("/api/models/{0}/tree/main", "/{0}/resolve/main/README.md", "/{0}", "/api/models/{0}/commits/main"):
        answer = thread_hub.send("GET", address.format("local/lost-commit"))
        assert (answer.status, b"is damaged on this Hub's disk" in answer.content) == (410, True), address
    assert thread_hub.send("GET", "/api/models/local/lost-settings", role=None).status == 401, "it may be private"
    assert "Traceback" not in caplog.text and not [
        record for record in caplog.records if record.levelno >= logging.ERROR
    ]
    # The client's commands.
    for call in (
        lambda: index.list_checkpoints("local/lost-commit"),
        lambda: fetch("local/lost-commit", tmp_path / "out"),
    ):
        with pytest.raises(ZooError, match=r"'local/lost-commit' is damaged on this Hub's disk") as error:
            call()
        assert "\n" not in str(error.value)
    for name in ("empty-settings", "lost-tree"):
        with (
            pytest.raises(ZooError, match=f"^local/{name} is damaged on this disk") as error,
            export.open_source(thread_hub.root, f"local/{name}", "model") as source,
        ):
            source.files(source.branches()[0].commits[-1])
        assert str(thread_hub.folder(name)) in str(error.value)
    # It can be deleted, and its name is free again.
    for name in DAMAGE:
        thread_hub.api().delete_repo(f"local/{name}")
        with pytest.raises(RepositoryNotFoundError):
            thread_hub.api().model_info(f"local/{name}")
        thread_hub.api().create_repo(f"local/{name}")
        assert thread_hub.api().model_info(f"local/{name}").sha


def test_lost_refs_and_lfs_files_are_reported(thread_hub: ThreadHub) -> None:
    """main is readable, so lists keep the repository; requests for the lost parts fail."""
    api = thread_hub.api()
    for name in ("garbage", "empty", "folder", "tag", "cut-tag", "lfs", "cut-lfs", "good"):
        thread_hub.make(name, {"README.md": CARD})
        api.create_tag(f"local/{name}", tag="v1", tag_message="a tag with an object of its own")
        api.upload_file(path_or_fileobj=b"\0" * 5000, path_in_repo="x.bin", repo_id=f"local/{name}")
    (thread_hub.folder("garbage") / "packed-refs").write_bytes(b"\xff garbage\n")
    (thread_hub.folder("empty") / "packed-refs").write_bytes(b"")
    (thread_hub.folder("folder") / "packed-refs").mkdir()
    for name, content in (("tag", None), ("cut-tag", b"x\x9c")):
        oid = (thread_hub.folder(name) / "refs/tags/v1").read_text().strip()
        overwrite(thread_hub.folder(name) / "objects" / oid[:2] / oid[2:], content)
    for name, content in (("lfs", None), ("cut-lfs", bytes(100))):
        (file,) = (thread_hub.folder(name) / "lfs/objects").glob("*/*/*")
        overwrite(file, content)
    reasons = {
        "garbage": "packed-refs, or a file of refs, cannot be read: Invalid hex sha",
        "empty": "packed-refs, or a file of refs, cannot be read: StopIteration",
        "folder": "packed-refs, or a file of refs, cannot be read: Is a directory",
        "tag": "is lost",
        "cut-tag": "cannot be read",
        "lfs": "the content of 'x.bin' is lost",
        "cut-lfs": "the content of 'x.bin' is truncated: 100 of 5000 bytes",
    }
    status = CliRunner().invoke(hub_command, ["status", "--root", str(thread_hub.root)], catch_exceptions=False).stdout
    assert "local/good" not in status
    damaged = thread_hub.send("GET", "/api/rlhf-zoo/damaged").content.decode()
    for name, message in reasons.items():
        assert message in status.partition(f"local/{name}: ")[2].partition("\n")[0], (name, status)
        assert f"local/{name}" in damaged
        is_big = name.endswith("lfs")
        address = f"/local/{name}/resolve/main/x.bin" if is_big else f"/api/models/local/{name}/refs"
        answer = thread_hub.send("GET", address)
        assert (answer.status, message.encode() in answer.content) == (410, True), (address, answer)
    # Pushing a file again repairs it, and the tag of a lost object can be deleted.
    for name in ("lfs", "cut-lfs"):
        api.upload_file(path_or_fileobj=b"\0" * 5000, path_in_repo="x.bin", repo_id=f"local/{name}")
        assert len(thread_hub.send("GET", f"/local/{name}/resolve/main/x.bin").content) == 5000
    api.delete_tag("local/tag", tag="v1")
    assert api.list_repo_refs("local/tag").tags == []


def test_file_in_place_of_repository_returns_409(thread_hub: ThreadHub) -> None:
    thread_hub.make("good", {})
    thread_hub.folder("taken").write_text("a file")
    (thread_hub.root / "repos" / "models" / "org").write_text("a file")
    for name in ("local/taken", "org/new"):
        for call in (thread_hub.api().create_repo, lambda name: thread_hub.api().move_repo("local/good", name)):
            with pytest.raises(HfHubHTTPError, match="a file is in its place") as caught:
                call(name)
            assert caught.value.response.status_code == 409
    assert thread_hub.api().model_info("local/good").sha


def _token(**fields: object) -> bytes:
    """tokens.json with one token that has these invalid fields."""
    valid = {"sha256": "0" * 64, "role": "write", "created": "2026-01-01T00:00:00+00:00"}
    return json.dumps([valid | fields]).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[1]", b"null", b"\xff", b"[" * 100_000, _token(sha256="\ud800"), _token(sha256=5), _token(role="admin"),
        _token(role=[]), _token(name=5), _token(created=5), _token(expires="tomorrow"), _token(expires=1893456000),
        _token(expires="2030-01-01"), _token(expires="2030-01-01T00:00:00"), _token(expires={}), _token(expires=""),
    ],
)  # fmt: skip
def test_damaged_tokens_file_is_reported_in_one_sentence(
    thread_hub: ThreadHub, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (thread_hub.root / "tokens.json").write_bytes(content)
    message = "tokens.json is damaged ("
    (thread_hub.root / "client-token").write_bytes(b"\xffx")
    with (
        pytest.raises(ZooError, match=r"tokens\.json is damaged") as caught,
        connect._run_embedded_hub(thread_hub.root),
    ):
        pass
    assert "\n" not in str(caught.value) and "remove it" in str(caught.value)
    for command in (["token", "list"], ["token"], ["token", "revoke", "x"]):
        result = CliRunner().invoke(hub_command, [*command, "--root", str(thread_hub.root)])
        assert (result.exit_code, message in result.output, result.output.count("\n")) == (2, True, 1), result
    answer = thread_hub.send("GET", "/api/whoami-v2", role=None, Authorization=f"Bearer {thread_hub.token}")
    assert (answer.status, message in answer.content.decode()) == (410, True)
    assert thread_hub.send("GET", "/api/models", role=None).status == 200, "strangers have no token"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "content", [b"x", b"[1]", b"5", b'{"url": 5, "pid": 5}', b'{"url": "http://[x", "pid": 5}', None]
)
def test_damaged_server_record_is_reported_in_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / "server.json").mkdir()
    else:
        (tmp_path / "server.json").write_bytes(content)
    for command in ("status", "env", "serve"):
        result = CliRunner().invoke(hub_command, [command, "--root", str(tmp_path)])
        assert (result.exit_code, "server.json" in result.output, result.output.count("\n")) == (2, True, 1), result
        assert "remove the file" in result.output


def test_signer_replaces_empty_key(tmp_path: Path) -> None:
    """Otherwise anyone could sign upload links with the empty key."""
    (tmp_path / "secret").write_bytes(b"")
    signer = Signer(tmp_path)
    expiry = str(int(time.time()) + 60)
    forged = hmac.new(b"", f"{expiry}\nPUT".encode(), hashlib.sha256).hexdigest()
    assert not signer.verify(f"{expiry}.{forged}", "PUT")
    assert Signer(tmp_path).verify(signer.sign("PUT"), "PUT")


#: Changed fields of a collection's file, or bytes in its place; None is a folder.
COLLECTIONS: list[bytes | dict[str, object] | None] = [
    b"", b"\xff", b"[]", b"5", b"null", b"{}", b"[" * 100_000, None,
    {"title": 5}, {"items": None}, {"items": [5]}, {"items": [{}]}, {"private": "no"}, {"lastUpdated": 5},
    {"description": []}, {"slug": "local/../../tokens"}, {"slug": "other/x"}, {"owner": "other"},
    {"items": [{"_id": "1", "id": "local/m", "type": "paper", "note": ""}]},
    {"items": [{"_id": "1", "id": "local/../m", "type": "model", "note": ""}]},
    {"items": [{"_id": "1", "id": "m", "type": "model", "note": ""}]},
]  # fmt: skip


def test_lists_skip_damaged_collections(thread_hub: ThreadHub, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged, and the other collections are served."""
    api = thread_hub.api()
    intact, *damaged = [api.create_collection(f"number {number}").slug for number in range(1 + len(COLLECTIONS))]
    for slug, content in zip(damaged, COLLECTIONS, strict=True):
        path = thread_hub.root / "collections" / f"{slug}.json"
        value = json.loads(path.read_text())
        path.unlink()
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(value | content).encode())
    (thread_hub.root / "collections" / "file").write_text("in the place of a folder")
    with caplog.at_level(logging.WARNING, SERVER):
        for role in (None, "write"):
            caplog.clear()
            assert [item.slug for item in thread_hub.api(role).list_collections()] == [intact]
            assert len(caplog.records) == len(damaged)
    assert api.create_collection("number 1").slug not in damaged
    for slug in damaged:
        for method, suffix in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/items"), ("DELETE", "/items/1")):
            body = {"item": {"type": "model", "id": "local/m"}, "title": "x"}
            assert thread_hub.send(method, f"/api/collections/{slug}{suffix}", body).status == 404, (method, slug)
    assert thread_hub.send("POST", "/api/collections", {"title": "x", "namespace": "file"}).status == 410
    assert (thread_hub.root / "tokens.json").exists()


# Private repositories


def test_collection_hides_private_repositories_from_anonymous(thread_hub: ThreadHub) -> None:
    api, stranger = thread_hub.api(), thread_hub.api(None)
    thread_hub.make("open", {})
    thread_hub.make("secret", {}, private=True)
    slug = api.create_collection("Runs").slug
    for name in ("secret", "open"):
        api.add_collection_item(slug, f"local/{name}", "model", note=f"about {name}")
    addresses = [f"/api/collections/{slug}", "/api/collections", "/api/collections?item=models/local/secret"]
    for address in addresses:
        assert b"secret" not in thread_hub.send("GET", address, role=None).content, address
    assert [(item.item_id, item.position) for item in stranger.get_collection(slug).items] == [("local/open", 0)]
    assert list(stranger.list_collections(item="models/local/secret")) == []
    assert [item.item_id for item in api.get_collection(slug).items] == ["local/secret", "local/open"]
    api.update_repo_settings("local/open", private=True)
    assert stranger.get_collection(slug).items == []
    api.delete_repo("local/secret")
    assert stranger.get_collection(slug).items == [], "a deleted private repository stays hidden too"


def test_hub_root_is_private_to_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    before = os.umask(0o022)
    try:
        with connect._run_embedded_hub(connect.home() / "hub") as (url, token):
            HfApi(endpoint=url, token=token).create_repo("local/m", private=True)
            HfApi(endpoint=url, token=token).upload_file(
                path_or_fileobj=b"\0" * 5000, path_in_repo="model.safetensors", repo_id="local/m"
            )
        paths = [tmp_path / "home", *(tmp_path / "home").rglob("*")]
        assert [path for path in paths if path.stat().st_mode & 0o077] == []
        # Someone opened the permissions: every entry point closes them again.
        (tmp_path / "home").chmod(0o755)
        for folder, enter in (
            ("home/hub", lambda root: connect._make_private(root)),
            ("home/hub", lambda root: create_token(root, "read")),
            ("wide", lambda root: create_token(root, "read")),
            ("new/deep", lambda root: create_token(root, "read")),
        ):
            root = tmp_path / folder
            if root.exists() or folder == "wide":
                root.mkdir(exist_ok=True)
                root.chmod(0o755)
            enter(root)
            assert root.stat().st_mode & 0o777 == 0o700, folder
        assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755, "it may hold other files, so its mode stays"
        for name in (*connect.CLIENT_VARIABLES, "HF_HOME"):
            monkeypatch.setenv(name, "x")  # put back afterwards
        connect._isolate_client(tmp_path / "home" / "hubs" / "other", None)
        assert (tmp_path / "home" / "hubs").stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
    assert not caplog.records
    # A folder of another user stays open, and a warning says so.
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for _ in range(2):
        make_private(tmp_path / "theirs")
    (record,) = caplog.records
    assert f"of this machine can read {tmp_path / 'theirs'} (mode 0755)" in record.getMessage()
