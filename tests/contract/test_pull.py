"""`rlhf-zoo pull` fetches the named revision, complete and verified, and resumes where it stopped."""

import contextlib
import hashlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import close_session
from thread_hub import ThreadHub, send_all
from zoo_process import COMMAND, environment, errors, wait_until, zoo

from rlhf_zoo.cli import pull as command
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB, Hub
from rlhf_zoo.hub.client.local_paths import PULL_MARK, Cache, FileToFetch, Folder
from rlhf_zoo.hub.client.publish import CHECKPOINT_PATTERNS
from rlhf_zoo.hub.client.pull import fetch
from rlhf_zoo.hub.client.refs import resolve
from rlhf_zoo.hub.server.handler import ConnectionHandler
from rlhf_zoo.hub.server.messages import FilePart
from rlhf_zoo.publishing.sender import Sender
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import StageRecord, fingerprint

pytestmark = pytest.mark.usefixtures("quick_plots")

REPO = "local/toy-ppo"
CHUNK = 2**20  # the bytes that pull reads at once
BIG, STALL = 4 * CHUNK, 2 * CHUNK
STEPS = (4, 40, 1000)


def content(step: int) -> dict[str, bytes]:
    """Returns a large file, small files, a file in a folder, and an empty file whose name needs quoting."""
    return {
        "model.safetensors": hashlib.shake_256(str(step).encode()).digest(BIG if step == 40 else 5000),
        "critic/model.safetensors": hashlib.shake_256(str(-step).encode()).digest(5000),
        "config.json": json.dumps({"step": step}).encode(),
        "notes for #1?.txt": b"",
    }


@pytest.fixture(scope="module")
def commits(module_hub: ThreadHub) -> dict[int, str]:
    """REPO with a commit and a tag for each of STEPS, `best` at 40, a branch, and a tag called 7 at step 4."""
    by_step = {step: module_hub.push(REPO, content(step)) for step in STEPS}
    tags = {**{f"step-{step:06d}": step for step in STEPS}, "best": 40, "7": 4, "step-000007": 1000}
    for tag, step in tags.items():
        module_hub.api().create_tag(REPO, tag=tag, revision=by_step[step])
    module_hub.api().create_branch(REPO, branch="side/way", revision=by_step[4])
    return by_step


@pytest.fixture
def pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command in this process, whose clients already use the Hub."""
    monkeypatch.setattr(command, "open_hub", lambda *_, **__: contextlib.nullcontext(DEFAULT_HUB))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(command.pull, arguments, catch_exceptions=False)


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def tree(folder: Path) -> dict[str, str]:
    """Maps each file, through symbolic links, to its SHA-256, without files that the Hub or a pull adds."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    added = (".gitattributes", PULL_MARK.as_posix())
    return digests({name: path.read_bytes() for name, path in files.items() if name not in added})


# Revisions and output


@pytest.mark.parametrize(
    ("suffix", "revision", "step"),
    [
        ("", "main", 1000),
        ("@best", "best", 40),
        ("@step-000040", "step-000040", 40),
        ("@step-40", "step-000040", 40),
        ("@0040", "step-000040", 40),
        ("@7", "7", 4),  # the tag 7 has priority over step 7
        ("@step-7", "step-000007", 1000),
        ("@side/way", "side/way", 4),
        ("@{commit}", "{commit}", 4),
    ],
)
def test_fetch_resolves_revision(at_module_hub, commits, suffix, revision, step):
    result = fetch(REPO + suffix.format(commit=commits[4]))
    assert (result.repo, result.revision, result.commit) == (REPO, revision.format(commit=commits[4]), commits[step])
    assert tree(result.path) == digests(content(step))


def test_pull_json_lists_files(at_module_hub, commits, tmp_path, pull):
    result = pull(f"{REPO}@best", "--output_dir", "out", "--json")
    document = json.loads(result.stdout)
    assert list(document) == ["repo", "revision", "commit", "path", "files", "bytes", "refetched", "unrelated"]
    assert document["path"] == str(tmp_path / "out") and (document["refetched"], document["unrelated"]) == ([], [])
    listed = {file["path"]: file for file in document["files"] if file["path"] != ".gitattributes"}
    assert {name: file["sha256"] for name, file in listed.items()} == tree(tmp_path / "out")
    assert {name: file["size"] for name, file in listed.items()} == {n: len(data) for n, data in content(40).items()}
    assert document["bytes"] == sum(file["size"] for file in document["files"])
    plain = pull(f"{REPO}@best", "--output_dir", "out")
    assert (plain.stdout, plain.stderr) == (f"{tmp_path / 'out'}\n", "")
    short = pull(f"{REPO}@step-40", "--output_dir", "out")
    assert (short.stdout, short.stderr) == (plain.stdout, "step-40 is the tag step-000040.\n")
    assert json.loads(pull(f"{REPO}@40", "--output_dir", "out", "--json").stdout)["revision"] == "step-000040"


def test_resolve_names_tag_of_short_step(at_module_hub, commits):
    names = [resolve(f"{REPO}{revision}").name for revision in ("@step-40", "@0040", "@step-000040", "@best", "")]
    assert names == [*[f"{REPO}@step-000040"] * 3, f"{REPO}@best", REPO]
    assert resolve(REPO, revision="step-4").hub_location == (REPO, commits[4], "step-000004")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"{REPO}@step-41"], "local/toy-ppo has no revision 'step-41', did you mean 'step-000040'?"),
        ([f"{REPO}@22"], "local/toy-ppo has no revision '22', did you mean 'step-000007'?"),
        ([f"{REPO}@zzz"], "local/toy-ppo has no revision 'zzz': it has 7, best, step-000004, step-000007, step-000040"),
        (["local/none@best"], "There is no repository 'local/none'"),
        (["a/b/c"], "'a/b/c' is not a repository: write NAMESPACE/NAME[@TAG]."),
        (["local/none", "--list"], "There is no repository 'local/none'"),
        (["a/b/c", "--list"], "'a/b/c' is not a repository: write NAMESPACE/NAME."),
        ([f"{REPO}@best", "--list"], f"--list shows all checkpoints: write {REPO} without a revision."),
    ],
)
def test_pull_rejects_missing_names_and_writes_nothing(at_module_hub, commits, pull, arguments, message):
    options = [] if "--list" in arguments else ["--output_dir", "out"]
    with pytest.raises(ZooError, match=f"^{re.escape(message)}"):
        pull(*arguments, *options)
    assert not Path("out").exists()


def test_pull_keeps_foreign_files(at_module_hub, commits, tmp_path, pull):
    """No foreign file is overwritten; files that the revision lacks are listed and stay."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ZooError, match=r"^file is a file: pass a folder"):
        pull(REPO, "--output_dir", "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("my own")
    with pytest.raises(ZooError, match=r"config\.json exists, and .* was not written by a pull of"):
        pull(f"{REPO}@4", "--output_dir", "mine")
    assert tree(tmp_path / "mine") == digests({"config.json": b"my own"})
    with pytest.raises(ZooError, match="--list downloads nothing: leave out --output_dir"):
        pull(REPO, "--list", "--output_dir", "out")

    assert pull(f"{REPO}@4", "--output_dir", "out").exit_code == 0
    (tmp_path / "out" / "critic" / "mine.txt").write_text("mine")
    assert pull(f"{REPO}@step-001000", "--output_dir", "out").stderr.splitlines() == [
        "Fetched again, because they differed: config.json, critic/model.safetensors, model.safetensors",
        "Left untouched, because this revision lacks them: critic/mine.txt",
    ]
    assert tree(tmp_path / "out") == digests({**content(1000), "critic/mine.txt": b"mine"})


# Interruptions, damage and wrong content


@dataclass
class Wire:
    """Controls the Hub's answers to downloads. sent: (path, Range, bytes of the body).

    stall: path -> bytes of the body after which an answer hangs until `stall` is clear, and then breaks.
    change: changes an answer's body, by path.
    """

    stall: dict[str, int] = field(default_factory=dict)
    change: Callable[[str, bytes], bytes] = lambda path, body: body
    sent: list[tuple[str, str | None, int]] = field(default_factory=list)

    def downloads(self, name: str) -> list[tuple[str | None, int]]:
        return [(span, size) for path, span, size in self.sent if path.endswith(name)]

    def send(self, handler: Any, response: Any, original_send: Callable[..., None]) -> None:
        path, part = handler.path.partition("?")[0], response.content
        if handler.command != "GET" or "/resolve/" not in path:
            original_send(handler, response)
            return
        body = part.path.read_bytes()[part.offset :][: part.count] if isinstance(part, FilePart) else part
        body = self.change(path, body)
        limit = next((size for name, size in self.stall.items() if path.endswith(name)), len(body))
        self.sent.append((path, handler.headers.get("Range"), min(limit, len(body))))
        if limit >= len(body):
            original_send(handler, replace(response, content=body))
            return
        handler.close_connection = True
        handler.command = "HEAD"  # sends only the headers
        original_send(handler, replace(response, content=body))
        handler.wfile.write(body[:limit])
        while self.stall:
            time.sleep(0.02)


@pytest.fixture
def wire(at_module_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Any:
    controlled, send = Wire(), ConnectionHandler._send
    monkeypatch.setattr(ConnectionHandler, "_send", lambda self, response: controlled.send(self, response, send))
    yield controlled
    controlled.stall.clear()


def partials(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in folder.glob("**/.rlhf-zoo-partial/*"):
        with contextlib.suppress(FileNotFoundError):  # a process has just completed it
            sizes[path.name] = path.stat().st_size
    return sizes


@pytest.mark.parametrize(
    ("stop_signal", "code", "destination"), [(signal.SIGKILL, -9, "cache"), (signal.SIGINT, 130, "output_dir")]
)
def test_interrupted_pull_resumes_where_it_stopped(wire, module_hub, commits, tmp_path, stop_signal, code, destination):
    """The Hub sends no byte twice, except those of the chunk that was being read."""
    options = ["--output_dir", "out"] if destination == "output_dir" else []
    arguments = ["pull", f"{REPO}@40", *options, "--hub", module_hub.url]
    env = {"RLHF_ZOO_HUB_TOKEN": module_hub.token}
    wire.stall[f"{commits[40]}/model.safetensors"] = STALL
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=tmp_path, text=True, env=environment(tmp_path / "home", **env),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    digest = digests(content(40))["model.safetensors"]
    try:
        wait_until(lambda: partials(tmp_path).get(digest, 0) >= STALL - CHUNK, process)
        process.send_signal(stop_signal)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout) == (code, ""), stderr
    if stop_signal == signal.SIGINT:
        assert errors(stderr) == ["Interrupted; run the same command again: it resumes if it has saved anything."]
    received = partials(tmp_path)[digest]
    assert not (tmp_path / "out" / "model.safetensors").exists()
    wire.stall.clear()
    wire.sent.clear()

    result = zoo(*arguments, home=tmp_path / "home", cwd=tmp_path, **env)
    assert result.returncode == 0, result.stderr
    assert tree(Path(result.stdout.strip())) == digests(content(40))
    assert wire.downloads(f"{commits[40]}/model.safetensors") == [(f"bytes={received}-", BIG - received)]
    assert received >= STALL - CHUNK and partials(tmp_path) == {}
    wire.sent.clear()
    assert zoo(*arguments, home=tmp_path / "home", cwd=tmp_path, **env).stdout == result.stdout
    assert wire.sent == []


def test_fetch_resumes_broken_connection(wire, commits):
    wire.change = lambda path, body: body[:STALL] if len(body) == BIG else body
    assert tree(fetch(f"{REPO}@40").path) == digests(content(40))
    assert wire.downloads(f"{commits[40]}/model.safetensors") == [(None, STALL), (f"bytes={STALL}-", BIG - STALL)]


def test_fetch_restarts_damaged_partial_file(wire, commits, tmp_path):
    part = tmp_path / "out" / ".rlhf-zoo-partial" / digests(content(40))["model.safetensors"]
    part.parent.mkdir(parents=True)
    Folder(REPO, commits[40], tmp_path / "out").begin([])
    part.write_bytes(b"\0" * STALL)
    assert tree(fetch(f"{REPO}@40", tmp_path / "out").path) == digests(content(40))
    assert [span for span, _ in wire.downloads(f"{commits[40]}/model.safetensors")] == [f"bytes={STALL}-", None]


@pytest.mark.parametrize(
    ("destination", "name", "damage"),
    [
        ("cache", "model.safetensors", "flipped"),
        ("cache", "config.json", "cut"),
        ("output_dir", "model.safetensors", "cut"),
        ("output_dir", "config.json", "flipped"),
    ],
)
def test_fetch_repairs_damaged_file(wire, commits, tmp_path, destination, name, damage):
    out = tmp_path / "out" if destination == "output_dir" else None
    folder = fetch(f"{REPO}@4", out).path
    file = (folder / name).resolve()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if damage == "flipped" else b""))
    wire.sent.clear()
    assert fetch(f"{REPO}@4", out).refetched == [name]
    assert tree(folder) == digests(content(4))
    assert [(path, span) for path, span, _ in wire.sent] == [(f"/{REPO}/resolve/{commits[4]}/{name}", None)]
    assert fetch(f"{REPO}@4", out).refetched == []


@pytest.mark.parametrize(("destination", "name"), [("cache", "config.json"), ("output_dir", "model.safetensors")])
def test_fetch_retries_wrong_content_once(wire, commits, tmp_path, destination, name):
    """The wrong content has the same length. One wrong answer is retried; two are an error."""
    corruptions = [1]

    def corrupt(path: str, body: bytes) -> bytes:
        if not path.endswith(f"{commits[4]}/{name}") or not corruptions[0]:
            return body
        corruptions[0] -= 1
        return b"x" * len(body)

    wire.change = corrupt
    result = fetch(f"{REPO}@4", tmp_path / "once" if destination == "output_dir" else None)
    assert tree(result.path) == digests(content(4)) and (corruptions, result.refetched) == ([0], [])
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    corruptions[0] = 99
    with pytest.raises(ZooError, match=f"^{name} of {REPO} at commit {commits[4]} arrived twice with a digest other"):
        fetch(f"{REPO}@4", tmp_path / "out" if destination == "output_dir" else None)
    assert corruptions == [97]
    wrong_content = b"x" * len(content(4)[name])
    corrupted = [path for path in tmp_path.rglob("*") if path.is_file() and wrong_content in path.read_bytes()]
    intact_digests = {hashlib.sha256(data).hexdigest() for other, data in content(4).items() if other != name}
    partial_sizes = {size for digest, size in partials(tmp_path).items() if digest not in intact_digests}
    assert corrupted == [] and len(wrong_content) not in partial_sizes  # other partial files may stay, to be resumed


def test_pull_uses_intact_cache_when_hub_is_offline(thread_hub, pull, tmp_path):
    thread_hub.push(REPO, content(4))
    thread_hub.api().create_tag(REPO, tag="step-000004")
    folder = fetch(f"{REPO}@4").path
    thread_hub.server.shutdown()
    thread_hub.server.server_close()
    close_session()  # with its open connections
    for suffix in ("@4", "@step-000004", f"@{folder.name}"):
        result = pull(f"{REPO}{suffix}")
        assert result.stdout == f"{folder}\n"
        *short, last = result.stderr.splitlines()
        assert re.fullmatch(r"The Hub does not answer \(.+\): this is the copy in the cache\.", last)
        assert short == (["4 is the tag step-000004."] if suffix == "@4" else [])
    with pytest.raises(
        ZooError, match=rf"^The Hub {thread_hub.url} cannot be reached .*, and {REPO}@5 is not in the cache"
    ):
        fetch(f"{REPO}@5")
    with pytest.raises(ZooError, match=rf"cannot be reached .*, so {REPO}@4 cannot be fetched"):
        fetch(f"{REPO}@4", tmp_path / "out")
    file = (folder / "config.json").resolve()
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(ZooError, match=r"^config\.json of local/toy-ppo@step-000004 is damaged in the cache"):
        fetch(f"{REPO}@4")


def test_concurrent_fetches_download_file_once(wire, commits):
    name = f"{commits[40]}/model.safetensors"
    wire.stall[name] = STALL
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fetch, f"{REPO}@40") for _ in range(2)]
        wait_until(lambda: bool(wire.downloads(name)))
        time.sleep(0.5)  # meanwhile the other fetch waits
        assert len(wire.downloads(name)) == 1
        wire.stall.clear()
        (folder,) = {future.result(60).path for future in futures}
    assert tree(folder) == digests(content(40))
    # The client that holds the file resumes the broken answer; nothing is downloaded twice.
    assert sum(size for _, size in wire.downloads(name)) == BIG


def test_fetch_continues_when_another_moves_its_files(tmp_path, monkeypatch):
    """The other one completes a file, or replaces its link, between a look at the path and its use."""
    cache, file = Cache(REPO, "0" * 40, Hub("other", None, "a test", cache=tmp_path)), FileToFetch("a", 1, "e" * 40)
    cache.target(file).parent.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", lambda self: True)
        cache.check_free_space([file])
    cache.target(file).write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda self: True)
        assert cache.finish([file], cache.commit).joinpath("a").read_bytes() == b"x"


def test_fetch_handles_files_of_equal_content(thread_hub, tmp_path):
    """They share a blob in the cache, and the name of their partial file."""
    twins = {f"{folder}{name}": data for folder in ("", "a/", "b/") for name, data in content(4).items()}
    thread_hub.push(REPO, twins)
    for out in (None, None, tmp_path / "out", tmp_path / "out"):
        assert tree(fetch(REPO, out).path) == digests(twins)
    assert partials(tmp_path) == {}


# Push and pull


def train_stage(folder: Path, kind: str) -> Path:
    """Trains a toy PPO run; returns a stage with its checkpoints of steps 2 and 3."""
    from trainer_fixture import good, make_policy, make_reward_model, make_tokenizer, make_trainer

    options = (
        {"reward_model": make_reward_model(), "reward_funcs": None} if kind == "critic" else {"reward_funcs": good}
    )
    if kind == "shared":
        options |= {"critic": "shared", "critic_learning_rate": 1e-2}
    options |= {"max_steps": 3, "save_steps": 1, "save_strategy": "steps", "save_total_limit": 2}
    trainer = make_trainer(folder / "toy", model=make_policy(), **options)
    trainer.train()
    record = StageRecord(folder / "run" / "ppo")
    record.write(stage="ppo", recipe="toy", status="running", seed=1, hub="local", repo=None, parents={})
    record.write(fingerprint=fingerprint({}), resolved={}, versions={}, command="rlhf-zoo ppo toy")
    for step in (2, 3):
        record.append_metrics({"step": step, "objective/score": step / 10, "objective/kl": 0.1})
        path = record.checkpoint_path(step)
        shutil.copytree(folder / "toy" / f"checkpoint-{step}", path)
        make_tokenizer().save_pretrained(path)
        record.mark_complete(path)
    return record.path


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("critic", {"model.safetensors", "critic/model.safetensors"}),
        ("shared", {"model.safetensors", "critic/value_head.safetensors"}),
    ],
)
def test_pull_rebuilds_pushed_folder(thread_hub, tmp_path, kind, expected):
    """Every sent file is pulled bit for bit, and plain transformers loads the model by its tag.

    Adapters: tests/unit/test_release_rule.py.
    """
    stage = train_stage(tmp_path, kind)
    recipe = Recipe("toy", tmp_path, {"description": "A toy."}, {})
    hub = Hub("other", thread_hub.url, "a test")
    context = RunContext(recipe=recipe, hub=hub, directory=tmp_path / "run", namespace="local", publish=True)
    send_all(Sender(context, stages=("ppo",)))
    weights = {}
    for step in (2, 3):
        checkpoint = stage / f"checkpoint-{step}"
        sent = {name: digest for name, digest in tree(checkpoint).items() if is_sent(name)}
        pulled = fetch(f"{REPO}@{step}", tmp_path / f"pulled-{step}").path
        pulled_files = tree(pulled)
        assert {name: pulled_files.get(name) for name in sent} == sent
        assert {"README.md", "rlhf_card.json", "metrics.jsonl", "recipe.json"} <= pulled_files.keys()
        assert not any(name.endswith((".pt", ".pth", ".bin")) for name in pulled_files)
        weights[step] = {name: digest for name, digest in sent.items() if name.endswith(".safetensors")}
        assert_same_models(kind, checkpoint, f"step-{step:06d}")
    assert set(weights[2]) == expected
    assert all(weights[2][name] != weights[3][name] for name in expected), "the steps have different weights"


def is_sent(name: str) -> bool:
    path = Path(name)
    return str(path.parent) in (".", "critic") and any(path.match(pattern) for pattern in CHECKPOINT_PATTERNS)


def assert_same_models(kind: str, checkpoint: Path, tag: str) -> None:
    """Checks that transformers loads the same model from the Hub as from the disk."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

    from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead

    def outputs(model: Any, source: Any, **options: Any) -> Any:
        with torch.no_grad():
            return model.from_pretrained(source, **options).eval()(torch.tensor([[3, 4, 5, 6]]))

    ours = outputs(AutoModelForCausalLM, checkpoint).logits
    assert torch.equal(ours, outputs(AutoModelForCausalLM, REPO, revision=tag).logits)
    assert AutoTokenizer.from_pretrained(REPO, revision=tag)("abc").input_ids == [3, 4, 5]
    if kind == "shared":
        logits, _, values = outputs(AutoModelForCausalLMWithValueHead, REPO, revision=tag)
        assert torch.equal(ours, logits) and values.abs().max() > 0
        assert torch.equal(values, outputs(AutoModelForCausalLMWithValueHead, checkpoint)[2])
    else:
        critic = outputs(AutoModelForTokenClassification, checkpoint / "critic").logits
        hub_logits = outputs(AutoModelForTokenClassification, REPO, subfolder="critic", revision=tag).logits
        assert torch.equal(critic, hub_logits) and critic.abs().max() > 0
