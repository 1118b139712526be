"""A stranger who publishes a repository tries to have his code run: every key of every file that is published.

A payload that is obeyed leaves the file MARK behind. `key_classes` says what each key of a recipe may hold; a key
that it does not know fails here.
"""

import copy
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.app.page.card_view import card_html
from rlhf_zoo.app.page.models import PageModels
from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import hub_id, write_json
from rlhf_zoo.hub.client.run_signature import trust_all_runs
from rlhf_zoo.modeling.loading import load_tokenizer
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.pipeline.inspect.published import PublishedCheckpoint, named_objects, recipe_of
from rlhf_zoo.pipeline.inspect.trace import find_traced_policy, trace_checkpoint
from rlhf_zoo.pipeline.policy_eval import ComparisonSettings, find_pair
from rlhf_zoo.pipeline.stages import ppo
from rlhf_zoo.plugins import CORPORA, JUDGES, PREFERENCES, REWARDS, entry_points, load_object, registered_names
from rlhf_zoo.ppo.saved_critic import load_critic
from rlhf_zoo.publishing.cards.card import card_json
from rlhf_zoo.publishing.cards.facts import StageFacts
from rlhf_zoo.publishing.catalog.card import Card
from rlhf_zoo.publishing.catalog.lineage import find_family, find_lineage
from rlhf_zoo.runs.judge import with_trained_keys
from rlhf_zoo.runs.record import StageRecord
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings import key_classes as classified
from rlhf_zoo.runs.settings.declared import SCRIPT_KEYS
from rlhf_zoo.runs.settings.key_classes import Kind
from rlhf_zoo.runs.settings.parse import NON_STAGE_KEYS, recipe_keys, stage_keys, stage_settings
from rlhf_zoo.runs.trusted_names import LOADERS, OWN_ENTRIES, OWN_OBJECTS, may_import, may_use_judge

pytestmark = pytest.mark.attack
A, B = "a" * 40, "b" * 40
MARK = "executed"
SHELL = f"subprocess:check_output(args='touch {MARK}', shell=True)"
#: What a key may hold that somebody would execute, import, render or unpickle.
PAYLOADS: list[Any] = [
    SHELL,
    f'rlhf_zoo.rewards.loading:find_loader(name="{SHELL}")',
    f'rlhf_zoo.plugins:load_object(name="{SHELL}", group="rlhf_zoo.rewards")',
    f"rlhf_zoo.fileio:write_text(path='{MARK}', text='x')",
    "payload_module:run",
    "payload_entry",
    "payload_entry(loader='payload_module:run')",
    "payload_module.py",
    "./payload_module.py",
    f"rule:{SHELL}",
    f"unlabeled:{SHELL}",
    f"pairs:{SHELL}",
    f"!!python/object/apply:os.system ['touch {MARK}']",
    "{{ cycler.__init__.__globals__.os.system('touch " + MARK + "') }}",
    f"$(touch {MARK}); `touch {MARK}`",
    {"auto_map": dict.fromkeys(("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"), "payload_module.Run")},
    {"trust_remote_code": True, "name": SHELL},
]
#: Kinds of keys that may hold a text: it is no name of code, or nobody reads it.
FREE = (Kind.PLAIN, Kind.MACHINE, Kind.NESTED)
#: `NON_STAGE_KEYS`, which a stage's run records in addition to its keys. Reproducing never reads the last two.
NON_STAGE_KINDS = {
    **dict.fromkeys(("recipe", "ppo", "evaluation"), Kind.NESTED),
    "data": Kind.MACHINE,
    "parents": Kind.MACHINE,
}
SHARED = {
    "license": "mit",
    "seed": 3,
    "corpus": "rlhf_zoo.runs.corpora.tiny_world_2:prepare",
    "corpus_args": {"lines": 90},
}
PARENTS = {"sft": {"repo": "x/toy-sft", "commit": A}, "reward": {"repo": "x/toy-reward", "commit": B}}


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: a folder that was downloaded, with a module, a pickle and a package's metadata in it."""
    (tmp_path / "payload_module.py").write_text(f"open({MARK!r}, 'w')\nclass Run: pass\ndef run(*_, **__): pass\n")
    shutil.copy(tmp_path / "payload_module.py", tmp_path / "wandb.py")
    (tmp_path / "payload_entry-1.dist-info").mkdir()
    (tmp_path / "payload_entry-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: payload_entry\n")
    groups = "\n".join(
        f"[{group}]\npayload_entry = payload_module:run" for group in (CORPORA, JUDGES, PREFERENCES, REWARDS, LOADERS)
    )
    (tmp_path / "payload_entry-1.dist-info" / "entry_points.txt").write_text(groups)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert "payload_module" not in sys.modules and "wandb" not in sys.modules


def published(stage: str, shared: Mapping[str, Any] | None = None, **keys: Any) -> PublishedCheckpoint:
    card = {"stage": stage, "recipe": "toy", "step": 4, "parents": PARENTS}
    resolved = {"seed": 3, "recipe": {**SHARED, **(shared or {})}, "data": "d", "parents": {"sft": "s"}, **keys}
    return PublishedCheckpoint("x/toy@best", Path("nowhere"), A, card, resolved, [])


def obeyed(one: PublishedCheckpoint) -> bool:
    """Does with a published checkpoint what `reproduce` does before it trains. Whether it would train."""
    try:
        recipe, _ = recipe_of(one)
        stage_settings(recipe, one.stage, {}, shared_flags={}, output_dir=Path("out"))
        for _, name, group in named_objects(one):
            load_object(name, group=group)
    except ZooError:
        return False
    finally:
        assert not Path(MARK).exists(), one.resolved
    return True


def harmless(kind: Kind, value: Any) -> bool:
    """Whether a key of this kind may hold the value: it is no name of code, or names a repository or a revision."""
    if kind is Kind.REPOSITORY:
        names = value if isinstance(value, list) else [value]
        return all(hub_id(name) is not None for name in names)
    return kind in FREE or (kind is Kind.REVISION and classified.is_revision(value))


# recipe.json


def test_every_setting_is_classified() -> None:
    """A key that a new version of trl or transformers brings is refused until somebody says what a download may do."""
    keys = set().union(*(stage_keys(stage) for stage in STAGES))
    assert keys | {*SCRIPT_KEYS} == set(classified.STAGE_KEYS)
    shared = {name for name in recipe_keys() if "." not in name}
    assert shared | {"evaluation"} == set(classified.SHARED_KEYS)
    nested = {name.partition(".")[2] for name in recipe_keys() if "." in name}
    assert nested == set(classified.EVALUATION_KEYS)
    assert set(NON_STAGE_KEYS) == set(NON_STAGE_KINDS)


def test_unclassified_key_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classified, "STAGE_KEYS", {k: v for k, v in classified.STAGE_KEYS.items() if k != "max_steps"})
    monkeypatch.setattr("rlhf_zoo.pipeline.inspect.published.STAGE_KEYS", classified.STAGE_KEYS)
    with pytest.raises(ZooError, match="sets max_steps, which is not on the list of keys that a downloaded recipe"):
        recipe_of(published("sft", max_steps=3))
    monkeypatch.setattr("rlhf_zoo.pipeline.inspect.published.SHARED_KEYS", {})
    with pytest.raises(ZooError, match="sets license, which is not on the list"):
        recipe_of(published("sft"))


@pytest.mark.parametrize("stage", STAGES)
def test_recipe_json_keys_cannot_run_code(stage: str, pulled: Path) -> None:
    """Names of objects, files and hosts are refused; other texts at most name a column, or a word."""
    kinds = {**classified.STAGE_KEYS, **NON_STAGE_KINDS}
    for key, kind in kinds.items():
        for value in (*PAYLOADS, [SHELL]) if kind not in FREE else (SHELL, [SHELL], *PAYLOADS[-3:]):
            if key != "recipe":  # `fetch_published` refuses what is not a mapping there; its keys are tried below
                assert not obeyed(published(stage, **{key: value})) or harmless(kind, value), (key, value)


@pytest.mark.parametrize("stage", STAGES)
def test_recipe_yaml_keys_cannot_run_code(stage: str, pulled: Path) -> None:
    for key, kind in classified.SHARED_KEYS.items():
        for payload in PAYLOADS:
            for value in (payload, {"model_type": "llama", "hidden_act": payload}, {key: payload}):
                shared = {"corpus": None, key: value} if key == "dataset_name" else {key: value}
                assert not obeyed(published(stage, shared)) or harmless(kind, value), (key, value)
    for key in classified.EVALUATION_KEYS:
        for payload in PAYLOADS:
            obeyed(published(stage, {"evaluation": {key: payload}}, evaluation={key: payload}))
    for key in stage_keys("ppo"):
        obeyed(published(stage, ppo={key: SHELL}))


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": {"AutoModelForCausalLM": "payload_module.Run"}},
        {"_attn_implementation": "x/kernel"},
        {"attn_implementation": "x/kernel"},
        {"rope_parameters": {"auto_map": {"AutoConfig": "x.Y"}}},
        {"rope_parameters": {"rope_type": "x/y"}},
        {"quantization_config": {"quant_method": "x"}},
        {"hidden_act": "payload_module:run"},
        {"nobody_declares_this": "word"},
    ],
)  # fmt: skip
def test_architecture_fields_that_fetch_code_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ZooError, match="which may load code"):
        recipe_of(published("sft", {"architecture": {"model_type": "llama", **fields}}))
    fine = {"model_type": "llama", "hidden_size": 32, "hidden_act": "silu", "rope_parameters": {"rope_type": "default"}}
    recipe_of(published("sft", {"architecture": fine}))


# What a name from outside may stand for


def test_allow_listed_objects_accept_no_object_names(pulled: Path) -> None:
    """Each of its objects, with each payload in each of its settings."""
    for group, names in OWN_OBJECTS.items():
        for name in names:  # the entry points of this package are among them
            found = load_object(name, group=group)
            for key in getattr(found, "__dataclass_fields__", ()):
                for payload in PAYLOADS:
                    try:
                        made = load_object(f"{name}({key}={payload!r})", group=group)
                        made(prompts=["a"], completions=["b"], completion_ids=[[1]], answer=["b"])
                    except (ZooError, TypeError, ValueError, KeyError, AttributeError):
                        pass
                    assert not Path(MARK).exists()


def test_may_import_accepts_only_registered_and_listed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_import("length(target=3, unit='words')", REWARDS) and may_import("length", REWARDS)
    assert {*OWN_ENTRIES, "relevance"} == set(
        registered_names(REWARDS)
    )  # relevance names a model, by its default alone
    assert may_import("relevance", REWARDS) and may_import("relevance(batch_size=8)", REWARDS)
    assert not may_import("relevance(model='x/y')", REWARDS)
    assert {one.value for one in entry_points(REWARDS) if one.name in OWN_ENTRIES} <= OWN_OBJECTS[REWARDS]
    for name in (
        SHELL,
        "rlhf_zoo.rewards.loading:find_loader(name='length')",
        "rlhf_zoo.plugins:load_object",
        "length",
    ):
        assert not may_import(name, LOADERS) and not may_import(name, CORPORA)
    for name in (
        "llm:gpt",
        "rule:os:system",
        "unlabeled:os:system",
        "pairs:os:system",
        "os:system",
        "rule:length(",
        "",
    ):
        assert not may_use_judge(name), name
    for name in ("classifier", "rule:length", "reward:x/y", "rlhf_zoo.runs.corpora.tiny_world_2:judge", "votes:x/y"):
        assert may_use_judge(name), name
    info = tmp_path / "other-1.dist-info"  # an installed package, which knows what its settings are
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\n")
    (info / "entry_points.txt").write_text(f"[{REWARDS}]\nby_name = other:by_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert may_import("by_name", REWARDS) and may_import("by_name(weight=[1.5, None], strict=True)", REWARDS)
    assert not may_import(f"by_name(loader={SHELL!r})", REWARDS)
    assert not may_import(f"by_name(names=[[{{'a': {SHELL!r}}}]])", REWARDS)


def test_working_directory_registers_no_entry_points(pulled: Path) -> None:
    """It may be the folder that was downloaded."""
    for path in ("", str(pulled)):
        sys.path.insert(0, path)
        assert not [one for one in entry_points(REWARDS) if one.name == "payload_entry"]
        sys.path.pop(0)
    load_object("length", group=REWARDS)
    load_object("rlhf_zoo.rewards.verifiable:length", group=REWARDS)
    assert str(pulled) not in sys.path
    with pytest.raises(ZooError, match="There is no module 'payload_modul'"):
        load_object("payload_modul:run", group=REWARDS)
    assert str(pulled) not in sys.path, "nothing of this name lies there"


# Folders that hold run.json, cards and models


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO of this machine's, with its card and what its evaluation recorded."""
    folder = tmp_path_factory.mktemp("own")
    make_recipe(folder, ppo={"reward_funcs": ["toy_run:answered"], "reward_weights": [1.0, 0.5], "max_steps": 1})
    save_start(folder)
    assert ppo.run(make_context(folder))
    run = folder / "run"
    StageRecord(run / "eval").write(stage="eval", recipe="toy", resolved={"evaluation": {"judge": "toy_run:judge"}})
    (step,) = StageRecord(run / "ppo").checkpoints()
    card = card_json(StageFacts.read(run / "ppo", 1))
    card["parents"] = {"sft": {"repo": None, "folder": None}, "reward": None}
    write_json(step / "rlhf_card.json", card)
    write_json(step / "recipe.json", StageRecord(run / "ppo").read()["resolved"])
    return run


@pytest.fixture
def strange(own: Path, pulled: Path) -> Path:
    """The same run, as somebody else's machine wrote it: nothing in it is signed by this one."""
    run = shutil.copytree(own, pulled / "run")
    for path in run.glob("*/run.json"):
        document = json.loads(path.read_text())
        document["signature"] = "0" * 64
        path.write_text(json.dumps(document))
    return run


def change(run: Path, stage: str, resolved: Mapping[str, Any]) -> None:
    path = run / stage / "run.json"
    document = json.loads(path.read_text())
    document["resolved"] |= resolved
    path.write_text(json.dumps(document))


def test_own_runs_are_recognized_by_signature(own: Path, tmp_path: Path) -> None:
    """Also where they were moved or copied, and while their record goes on; not where somebody changed it."""
    copied = StageRecord(shutil.copytree(own, tmp_path / "copy") / "ppo")
    assert (
        copied.is_own() and find_traced_policy(str(copied.path)).is_trusted and find_traced_policy(str(own)).is_trusted
    )
    copied.write(status="finished", seconds=1.5)
    assert copied.is_own()
    document = json.loads(copied.run_file.read_text())
    for name, value in (("seed", 7), ("resolved", {}), ("signature", None), ("signature", "é")):
        copied.run_file.write_text(json.dumps({**document, name: value}))
        assert not copied.is_own()
        copied.write(status="running")
        assert not copied.is_own(), "what goes on with it does not make it this user's"
        with trust_all_runs():
            assert copied.is_own()
    copied.clear()
    copied.write(stage="ppo")
    assert copied.is_own(), "begun again here"


def test_signature_key_differs_between_machines(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    assert not StageRecord(own / "ppo").is_own() and not (tmp_path / "home").exists()
    record = StageRecord(tmp_path / "ppo")
    record.write(stage="ppo")
    key = tmp_path / "home" / "run-key"
    assert record.is_own() and key.stat().st_mode & 0o777 == 0o600 and key.stat().st_size == 32
    key.write_bytes(b"")
    assert not record.is_own(), "half a key signs nothing"
    monkeypatch.setenv("RLHF_ZOO_HOME", "/proc/nowhere")
    record = StageRecord(tmp_path / "reward")
    assert record.write(stage="reward")["stage"] == "reward" and not record.is_own()


@pytest.mark.parametrize(
    "resolved",
    [
        {"reward_funcs": [PAYLOADS[0]], "reward_weights": [1.0, 1.0]},
        {"reward_funcs": [PAYLOADS[1]], "reward_weights": [1.0, 1.0]},
        {"reward_funcs": ["payload_module:run"]},
        {"reward_model_loader": SHELL, "reward_funcs": ["length"]},
        {"reward_model_loader": PAYLOADS[1], "reward_funcs": ["length"]},
    ],
)  # fmt: skip
def test_downloaded_folder_with_run_json_is_not_trusted(strange: Path, resolved: dict[str, Any]) -> None:
    """compare, trace and eval of a folder that was downloaded, by its run directory and by a checkpoint of it."""
    change(strange, "ppo", resolved)
    for place in (strange, strange / "ppo", strange / "ppo" / "checkpoint-1"):
        with pytest.raises(ZooError, match="code that a download names"):
            trace_checkpoint(find_traced_policy(str(place)), "cd", columns={"answer": "e"})
        if "reward_model_loader" in resolved:
            card = json.loads((strange / "ppo/checkpoint-1/rlhf_card.json").read_text())
            card["settings"] |= resolved
            write_json(strange / "ppo/checkpoint-1/rlhf_card.json", card)
            with pytest.raises(
                ZooError, match="nor registered by an installed package: if you trust it, add --trust_run"
            ):
                find_pair(str(place), against=None, reward=None, settings=ComparisonSettings(judges=("classifier",)))
            with pytest.raises(ZooError, match="add --trust_run if you trust this run"):
                PageModels.load(str(strange / "ppo/checkpoint-1"), sft=str(strange / "sft/checkpoint-4"))
    assert not Path(MARK).exists()


def test_user_can_trust_a_run(strange: Path) -> None:
    with pytest.raises(ZooError, match=r"--reward_funcs toy_run:answered, or --trust_run to allow all functions"):
        trace_checkpoint(find_traced_policy(str(strange)), "cd", columns={"answer": "e"})
    with trust_all_runs():
        found = find_traced_policy(str(strange))
    assert found.is_trusted and trace_checkpoint(found, "cd", columns={"answer": "e"}).scores.keys() >= {"answered"}


@pytest.mark.parametrize("judge", [*PAYLOADS[:6], f"rule:{SHELL}", f"unlabeled:{SHELL}", f"pairs:{SHELL}", "llm:gpt-9"])
def test_downloaded_run_cannot_name_a_judge(strange: Path, own: Path, judge: str) -> None:
    """Nor one that asks an endpoint, which the user pays for."""
    change(strange, "eval", {"evaluation": {"judge": judge}})
    with pytest.raises(ZooError, match=r"eval/run.json was not written by your rlhf-zoo.*choose a judge with --judge"):
        find_pair(str(strange), against=None, reward=None, settings=ComparisonSettings())
    with pytest.raises(ZooError, match=r"dataset_name to '.*', a path on the machine that published it"):
        find_pair(str(strange), against=None, reward=None, settings=ComparisonSettings(judges=("classifier",)))
    settings = ComparisonSettings(judges=("classifier",), dataset_name=str(own.parent / "data"))
    given = find_pair(str(strange), against=None, reward=None, settings=settings)
    assert given.policy.path.name == "checkpoint-1" and not Path(MARK).exists()


def test_downloaded_run_directory_cannot_set_code_of_recipe_run(strange: Path, own: Path) -> None:
    """`eval RECIPE` and `ensemble RECIPE` take the keys that a finished stage was trained with."""
    folder = strange.parent
    make_recipe(folder, ppo={"reward_funcs": ["toy_run:answered"]})
    StageRecord(strange / "ppo").write(status="finished")
    with_trained_keys(make_context(folder), "ppo")  # what the recipe itself says is the user's
    private = [(key, str(own / "sft")) for key in ("model_name_or_path", "value_model_name_or_path", "dataset_name")]
    for key, value in (("reward_funcs", [SHELL]), ("reward_model_loader", SHELL), ("deepspeed", "ds.json"), *private):
        change(strange, "ppo", {"reward_funcs": None, "reward_model_loader": None, key: value})
        with pytest.raises(ZooError, match=r"run\.json, which was not written by your rlhf-zoo"):
            with_trained_keys(make_context(folder), "ppo")
        change(strange, "ppo", {key: None})
    account = {
        "report_to": "trackio",
        "trackio_space_id": "evil/space",
        "project": "evil",
        "attn_implementation": "eager",
    }
    change(strange, "ppo", {**account, "kl_coef": 0.5})
    flags = {"ppo": {"project": "mine"}}
    settings = with_trained_keys(replace(make_context(folder), flags=flags), "ppo").settings("ppo")
    assert settings.trainer.kl_coef == 0.5 and settings.trainer.trackio_space_id is None
    assert settings.trainer.project == "mine" and settings.trainer.report_to == []
    assert settings.model.attn_implementation is None
    assert with_trained_keys(make_context(folder), "ppo").settings("ppo").resolved.keys() & account.keys() == set()


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key and item of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places_in(item, (*at, key))


def replaced(document: Any, place: tuple[Any, ...], payload: Any) -> Any:
    found = copy.deepcopy(document)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = payload
    return found


def read(folder: Path, name: str) -> None:
    """What commands do with a checkpoint that was downloaded, as far as the file `name` of it is read."""
    jobs: list[Any] = [lambda: load_tokenizer(folder)]
    if name in ("rlhf_card.json", "recipe.json"):
        sft = str(folder.parent / "sft")
        jobs = [
            lambda: find_lineage(str(folder), sft=sft),
            lambda: find_pair(str(folder), against=sft, reward="none", settings=ComparisonSettings()),
            lambda: find_family(str(folder)),
            lambda: card_html(folder),
            lambda: Card.parse((folder / "rlhf_card.json").read_bytes()),
            lambda: find_traced_policy(str(folder), sft=sft, reward=None),
        ]
    elif name in ("config.json", "generation_config.json", "ppo_state.json"):
        jobs = [lambda: load_causal(folder)]
    elif name.startswith("critic/"):
        jobs = [lambda: load_critic(folder, load_causal(folder))]
    for job in jobs:
        try:
            job()
        except Exception:
            continue  # whatever a library says of nonsense
        finally:
            assert not Path(MARK).exists(), name


def test_checkpoint_file_keys_cannot_run_code(own: Path, pulled: Path) -> None:
    """One payload in the place of each key of each JSON file: cards, settings, configurations, tokenizers, states."""
    folder = shutil.copytree(own / "ppo/checkpoint-1", pulled / "checkpoint")
    shutil.copytree(own / "sft/checkpoint-4", pulled / "sft")
    (folder / "COMPLETE").unlink()
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.json"))]
    assert {"rlhf_card.json", "recipe.json", "config.json", "tokenizer_config.json", "critic/config.json"} <= {*names}
    auto_map = PAYLOADS[-2]["auto_map"]
    for name in names:
        before = (folder / name).read_text()
        document = json.loads(before)
        if name == "tokenizer.json":  # the Rust library's, which knows no code
            continue
        for number, place in enumerate([("auto_map",), *places_in(document)]):
            payload = auto_map if place == ("auto_map",) else PAYLOADS[number % len(PAYLOADS)]
            (folder / name).write_text(json.dumps(replaced(document, place, payload)))
            read(folder, name)
        (folder / name).write_text(before)
