"""`rlhf-zoo pull`: the revision that is meant, whole and checked, going on where it stopped, and nothing else."""

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
from thread_hub import ThreadHub
from zoo_process import COMMAND, environment, errors, wait_until, zoo

from rlhf_zoo.cli import pull as command
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB, Hub
from rlhf_zoo.hub.client.local_paths import PULL_MARK, Folder
from rlhf_zoo.hub.client.publish import CHECKPOINT_PATTERNS
from rlhf_zoo.hub.client.pull import fetch
from rlhf_zoo.hub.client.refs import resolve
from rlhf_zoo.hub.server.handler import Handler
from rlhf_zoo.hub.server.messages import FilePart
from rlhf_zoo.publishing.sender import Sender
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import StageRecord, fingerprint

pytestmark = pytest.mark.usefixtures("pictures")

REPO = "local/toy-ppo"
CHUNK = 2**20  # what pull reads at once
BIG, STALL = 4 * CHUNK, 2 * CHUNK
STEPS = (4, 40, 1000)


def content(step: int) -> dict[str, bytes]:
    """A large file, small ones, one in a folder, and an empty one whose name needs quoting."""
    return {
        "model.safetensors": hashlib.shake_256(str(step).encode()).digest(BIG if step == 40 else 5000),
        "critic/model.safetensors": hashlib.shake_256(str(-step).encode()).digest(5000),
        "config.json": json.dumps({"step": step}).encode(),
        "notes for #1?.txt": b"",
    }


@pytest.fixture(scope="module")
def commits(module_hub: ThreadHub) -> dict[int, str]:
    """REPO with a commit and a tag for each of STEPS, `best` at 40, a branch, and a tag called 7 at step 4."""
    found = {step: module_hub.push(REPO, content(step)) for step in STEPS}
    tags = {**{f"step-{step:06d}": step for step in STEPS}, "best": 40, "7": 4, "step-000007": 1000}
    for tag, step in tags.items():
        module_hub.api().create_tag(REPO, tag=tag, revision=found[step])
    module_hub.api().create_branch(REPO, branch="side/way", revision=found[4])
    return found


@pytest.fixture
def pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, whose clients talk to a Hub already."""
    monkeypatch.setattr(command, "open_hub", lambda *_, **__: contextlib.nullcontext(DEFAULT_HUB))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(command.pull, arguments, catch_exceptions=False)


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def tree(folder: Path) -> dict[str, str]:
    """Every file's sha256, through symbolic links; without what the Hub and a pull add."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    added = (".gitattributes", PULL_MARK.as_posix())
    return digests({name: path.read_bytes() for name, path in files.items() if name not in added})


# Which revision, and what comes of it


@pytest.mark.parametrize(
    ("wanted", "named", "step"),
    [
        ("", "main", 1000),
        ("@best", "best", 40),
        ("@step-000040", "step-000040", 40),
        ("@step-40", "step-000040", 40),
        ("@0040", "step-000040", 40),
        ("@7", "7", 4),  # a tag of that name goes before a step of that number
        ("@step-7", "step-000007", 1000),
        ("@side/way", "side/way", 4),
        ("@{commit}", "{commit}", 4),
    ],
)
def test_the_revision_that_is_meant(at_module_hub, commits, wanted, named, step):
    found = fetch(REPO + wanted.format(commit=commits[4]))
    assert (found.repo, found.revision, found.commit) == (REPO, named.format(commit=commits[4]), commits[step])
    assert tree(found.path) == digests(content(step))


def test_json_says_what_came(at_module_hub, commits, tmp_path, pull):
    done = pull(f"{REPO}@best", "--output_dir", "out", "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["repo", "revision", "commit", "path", "files", "bytes", "refetched", "unrelated"]
    assert document["path"] == str(tmp_path / "out") and (document["refetched"], document["unrelated"]) == ([], [])
    told = {file["path"]: file for file in document["files"] if file["path"] != ".gitattributes"}
    assert {name: file["sha256"] for name, file in told.items()} == tree(tmp_path / "out")
    assert {name: file["size"] for name, file in told.items()} == {n: len(data) for n, data in content(40).items()}
    assert document["bytes"] == sum(file["size"] for file in document["files"])
    plain = pull(f"{REPO}@best", "--output_dir", "out")
    assert (plain.stdout, plain.stderr) == (f"{tmp_path / 'out'}\n", "")
    short = pull(f"{REPO}@step-40", "--output_dir", "out")
    assert (short.stdout, short.stderr) == (plain.stdout, "step-40 is the tag step-000040.\n")
    assert json.loads(pull(f"{REPO}@40", "--output_dir", "out", "--json").stdout)["revision"] == "step-000040"


def test_pages_and_lineage_name_the_tag_of_a_short_step(at_module_hub, commits):
    names = [resolve(f"{REPO}{revision}").name for revision in ("@step-40", "@0040", "@step-000040", "@best", "")]
    assert names == [*[f"{REPO}@step-000040"] * 3, f"{REPO}@best", REPO]
    assert resolve(REPO, revision="step-4").published_at == (REPO, commits[4], "step-000004")


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
def test_what_cannot_be_had_is_one_sentence_and_leaves_nothing(at_module_hub, commits, pull, arguments, message):
    options = [] if "--list" in arguments else ["--output_dir", "out"]
    with pytest.raises(ZooError, match=f"^{re.escape(message)}"):
        pull(*arguments, *options)
    assert not Path("out").exists()


def test_a_users_own_files(at_module_hub, commits, tmp_path, pull):
    """None is overwritten; those beside the checkpoint's are named and stay."""
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
        "Differed from this revision and were fetched again: config.json, critic/model.safetensors, model.safetensors",
        "Not part of this revision and left untouched: critic/mine.txt",
    ]
    assert tree(tmp_path / "out") == digests({**content(1000), "critic/mine.txt": b"mine"})


# Interrupted, damaged, lied to


@dataclass
class Wire:
    """What the Hub answers with files. sent: (path, Range, bytes of the body).

    stall: path -> bytes of the body after which an answer hangs until `stall` is clear, and then breaks.
    change: what becomes of an answer's body, by path.
    """

    stall: dict[str, int] = field(default_factory=dict)
    change: Callable[[str, bytes], bytes] = lambda path, body: body
    sent: list[tuple[str, str | None, int]] = field(default_factory=list)

    def downloads(self, name: str) -> list[tuple[str | None, int]]:
        return [(span, size) for path, span, size in self.sent if path.endswith(name)]

    def send(self, handler: Any, response: Any, really: Callable[..., None]) -> None:
        path, part = handler.path.partition("?")[0], response.content
        if handler.command != "GET" or "/resolve/" not in path:
            really(handler, response)
            return
        body = part.path.read_bytes()[part.offset :][: part.count] if isinstance(part, FilePart) else part
        body = self.change(path, body)
        limit = next((size for name, size in self.stall.items() if path.endswith(name)), len(body))
        self.sent.append((path, handler.headers.get("Range"), min(limit, len(body))))
        if limit >= len(body):
            really(handler, replace(response, content=body))
            return
        handler.close_connection = True
        handler.command = "HEAD"  # the headers alone
        really(handler, replace(response, content=body))
        handler.wfile.write(body[:limit])
        while self.stall:
            time.sleep(0.02)


@pytest.fixture
def wire(at_module_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Any:
    found, really = Wire(), Handler._send
    monkeypatch.setattr(Handler, "_send", lambda self, response: found.send(self, response, really))
    yield found
    found.stall.clear()


def partials(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in folder.glob("**/.rlhf-zoo-partial/*"):
        with contextlib.suppress(FileNotFoundError):  # a process has just completed it
            sizes[path.name] = path.stat().st_size
    return sizes


@pytest.mark.parametrize(("how", "code", "place"), [(signal.SIGKILL, -9, "cache"), (signal.SIGINT, 130, "output_dir")])
def test_an_interrupted_download_goes_on_where_it_stopped(wire, module_hub, commits, tmp_path, how, code, place):
    """Counted in bytes that the Hub sends: none that arrived comes twice, but for the chunk that was being read."""
    options = ["--output_dir", "out"] if place == "output_dir" else []
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
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout) == (code, ""), stderr
    if how == signal.SIGINT:
        assert errors(stderr) == ["Interrupted; run the same command again: it resumes if it has saved anything."]
    have = partials(tmp_path)[digest]
    assert not (tmp_path / "out" / "model.safetensors").exists()
    wire.stall.clear()
    wire.sent.clear()

    done = zoo(*arguments, home=tmp_path / "home", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert tree(Path(done.stdout.strip())) == digests(content(40))
    assert wire.downloads(f"{commits[40]}/model.safetensors") == [(f"bytes={have}-", BIG - have)]
    assert have >= STALL - CHUNK and partials(tmp_path) == {}
    wire.sent.clear()
    assert zoo(*arguments, home=tmp_path / "home", cwd=tmp_path, **env).stdout == done.stdout
    assert wire.sent == []


def test_a_connection_that_breaks_is_taken_up_again(wire, commits):
    wire.change = lambda path, body: body[:STALL] if len(body) == BIG else body
    assert tree(fetch(f"{REPO}@40").path) == digests(content(40))
    assert wire.downloads(f"{commits[40]}/model.safetensors") == [(None, STALL), (f"bytes={STALL}-", BIG - STALL)]


def test_a_damaged_part_costs_a_new_download(wire, commits, tmp_path):
    part = tmp_path / "out" / ".rlhf-zoo-partial" / digests(content(40))["model.safetensors"]
    part.parent.mkdir(parents=True)
    Folder(REPO, commits[40], tmp_path / "out").begin([])
    part.write_bytes(b"\0" * STALL)
    assert tree(fetch(f"{REPO}@40", tmp_path / "out").path) == digests(content(40))
    assert [span for span, _ in wire.downloads(f"{commits[40]}/model.safetensors")] == [f"bytes={STALL}-", None]


@pytest.mark.parametrize(
    ("place", "name", "damage"),
    [
        ("cache", "model.safetensors", "flipped"),
        ("cache", "config.json", "cut"),
        ("output_dir", "model.safetensors", "cut"),
        ("output_dir", "config.json", "flipped"),
    ],
)
def test_what_was_damaged_is_found_named_and_mended(wire, commits, tmp_path, place, name, damage):
    out = tmp_path / "out" if place == "output_dir" else None
    folder = fetch(f"{REPO}@4", out).path
    file = (folder / name).resolve()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if damage == "flipped" else b""))
    wire.sent.clear()
    assert fetch(f"{REPO}@4", out).refetched == [name]
    assert tree(folder) == digests(content(4))
    assert [(path, span) for path, span, _ in wire.sent] == [(f"/{REPO}/resolve/{commits[4]}/{name}", None)]
    assert fetch(f"{REPO}@4", out).refetched == []


@pytest.mark.parametrize(("place", "name"), [("cache", "config.json"), ("output_dir", "model.safetensors")])
def test_a_hub_that_sends_something_else(wire, commits, tmp_path, place, name):
    """Of the same length, so that only the checksum tells. Once is mended; twice is an error, and nothing is kept."""
    lies = [1]

    def lie(path: str, body: bytes) -> bytes:
        if not path.endswith(f"{commits[4]}/{name}") or not lies[0]:
            return body
        lies[0] -= 1
        return b"x" * len(body)

    wire.change = lie
    done = fetch(f"{REPO}@4", tmp_path / "once" if place == "output_dir" else None)
    assert tree(done.path) == digests(content(4)) and (lies, done.refetched) == ([0], [])
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    lies[0] = 99
    with pytest.raises(ZooError, match=f"^{name} of {REPO} at commit {commits[4]} arrived twice with a digest other"):
        fetch(f"{REPO}@4", tmp_path / "out" if place == "output_dir" else None)
    assert lies == [97]
    wrong = b"x" * len(content(4)[name])
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and wrong in path.read_bytes()]
    others = {hashlib.sha256(each).hexdigest() for other, each in content(4).items() if other != name}
    left = {size for digest, size in partials(tmp_path).items() if digest not in others}
    assert kept == [] and len(wrong) not in left  # others may go on where they stopped


def test_without_an_answer_the_cache_serves_if_it_is_whole(thread_hub, pull):
    thread_hub.push(REPO, content(4))
    thread_hub.api().create_tag(REPO, tag="step-000004")
    folder = fetch(f"{REPO}@4").path
    thread_hub.server.shutdown()
    thread_hub.server.server_close()
    close_session()  # with its open connections
    for wanted in ("@4", "@step-000004", f"@{folder.name}"):
        done = pull(f"{REPO}{wanted}")
        assert done.stdout == f"{folder}\n"
        *short, last = done.stderr.splitlines()
        assert re.fullmatch(r"The Hub does not answer \(.+\): this is the copy in the cache\.", last)
        assert short == (["4 is the tag step-000004."] if wanted == "@4" else [])
    with pytest.raises(ZooError, match=rf"^{REPO}@5 is not in the cache, and {thread_hub.url} does not deliver it \("):
        fetch(f"{REPO}@5")
    file = (folder / "config.json").resolve()
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(ZooError, match=r"^config\.json of local/toy-ppo@step-000004 is damaged in the cache"):
        fetch(f"{REPO}@4")


def test_two_at_once_fetch_a_file_once(wire, commits):
    name = f"{commits[40]}/model.safetensors"
    wire.stall[name] = STALL
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, f"{REPO}@40") for _ in range(2)]
        wait_until(lambda: bool(wire.downloads(name)))
        time.sleep(0.5)  # the other one waits meanwhile
        assert len(wire.downloads(name)) == 1
        wire.stall.clear()
        (folder,) = {one.result(60).path for one in both}
    assert tree(folder) == digests(content(40))
    # The broken answer is taken up by the one that holds the file; nothing is fetched by both.
    assert sum(size for _, size in wire.downloads(name)) == BIG


def test_files_of_equal_content(thread_hub, tmp_path):
    """They share a blob in the cache, and the name of the part while they are fetched."""
    twins = {f"{folder}{name}": data for folder in ("", "a/", "b/") for name, data in content(4).items()}
    thread_hub.push(REPO, twins)
    for out in (None, None, tmp_path / "out", tmp_path / "out"):
        assert tree(fetch(REPO, out).path) == digests(twins)
    assert partials(tmp_path) == {}


# What was pushed comes back


def trained(folder: Path, kind: str) -> Path:
    """A stage with the checkpoints of steps 2 and 3 of a toy PPO run."""
    from trainer_fixture import good, make_policy, make_reward_model, make_tokenizer, make_trainer

    given = {"reward_model": make_reward_model(), "reward_funcs": None} if kind == "critic" else {"reward_funcs": good}
    if kind == "shared":
        given |= {"critic": "shared", "critic_learning_rate": 1e-2}
    given |= {"max_steps": 3, "save_steps": 1, "save_strategy": "steps", "save_total_limit": 2}
    trainer = make_trainer(folder / "toy", model=make_policy(), **given)
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
def test_push_then_pull_rebuilds_the_same_folder(thread_hub, tmp_path, kind, expected):
    """Every file that is sent comes back bit for bit, and plain transformers loads it by its tag.

    Adapters: tests/unit/test_release_rule.py.
    """
    stage = trained(tmp_path, kind)
    recipe = Recipe("toy", tmp_path, {"description": "A toy."}, {})
    hub = Hub("other", thread_hub.url, "a test")
    context = RunContext(recipe=recipe, hub=hub, directory=tmp_path / "run", namespace="local", publish=True)
    Sender(context, stages=("ppo",)).send_all()
    weights = {}
    for step in (2, 3):
        here = stage / f"checkpoint-{step}"
        sent = {name: digest for name, digest in tree(here).items() if is_sent(name)}
        pulled = fetch(f"{REPO}@{step}", tmp_path / f"pulled-{step}").path
        came = tree(pulled)
        assert {name: came.get(name) for name in sent} == sent
        assert {"README.md", "rlhf_card.json", "metrics.jsonl", "recipe.json"} <= came.keys()
        assert not any(name.endswith((".pt", ".pth", ".bin")) for name in came)
        weights[step] = {name: digest for name, digest in sent.items() if name.endswith(".safetensors")}
        same_models(kind, here, f"step-{step:06d}")
    assert set(weights[2]) == expected
    assert all(weights[2][name] != weights[3][name] for name in expected), "two steps, two models"


def is_sent(name: str) -> bool:
    path = Path(name)
    return str(path.parent) in (".", "critic") and any(path.match(pattern) for pattern in CHECKPOINT_PATTERNS)


def same_models(kind: str, here: Path, tag: str) -> None:
    """Transformers loads of the Hub what lies on the disk, and the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

    from rlhf_zoo.modeling.value_head_models import AutoModelForCausalLMWithValueHead

    def outputs(model: Any, place: Any, **where: Any) -> Any:
        with torch.no_grad():
            return model.from_pretrained(place, **where).eval()(torch.tensor([[3, 4, 5, 6]]))

    ours = outputs(AutoModelForCausalLM, here).logits
    assert torch.equal(ours, outputs(AutoModelForCausalLM, REPO, revision=tag).logits)
    assert AutoTokenizer.from_pretrained(REPO, revision=tag)("abc").input_ids == [3, 4, 5]
    if kind == "shared":
        logits, _, values = outputs(AutoModelForCausalLMWithValueHead, REPO, revision=tag)
        assert torch.equal(ours, logits) and values.abs().max() > 0
        assert torch.equal(values, outputs(AutoModelForCausalLMWithValueHead, here)[2])
    else:
        critic = outputs(AutoModelForTokenClassification, here / "critic").logits
        found = outputs(AutoModelForTokenClassification, REPO, subfolder="critic", revision=tag).logits
        assert torch.equal(critic, found) and critic.abs().max() > 0
