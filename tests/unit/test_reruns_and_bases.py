"""What a user meets on the second day: another seed, a base of their own, what a card says can be made again."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from card_run import COMMITS, cells, head_and_body, over_training
from rich.console import Console
from thread_hub import send_all
from toy_run import make_context, make_recipe, save_stage, save_start, trained_policy
from trainer_fixture import make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import read_json, write_json
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.pipeline.inspect.doctor import examine
from rlhf_zoo.pipeline.inspect.examination import FAILED, OK
from rlhf_zoo.pipeline.inspect.published import PublishedCheckpoint, recipe_of
from rlhf_zoo.pipeline.run_recipe import print_headline, run_stage
from rlhf_zoo.pipeline.stages import ppo
from rlhf_zoo.publishing.adapters import check_base, check_planned_base, reason_not_to_publish, record_base_repository
from rlhf_zoo.publishing.cards.card import CARD_FILE, make_card
from rlhf_zoo.publishing.sender import Sender
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.usefixtures("no_plots")

BASE = {"repo": "maker/base", "commit": COMMITS["sft"]}


def changed(runs: Path, parents: Any = None, **keys: Any) -> str:
    """The card of PPO under these settings and parents."""
    record = StageRecord(runs / "ppo")
    before = record.read()
    record.write(resolved={**before["resolved"], **keys}, parents=before["parents"] | (parents or {}))
    return head_and_body(make_card(runs / "ppo"))[1]


def test_card_names_base_once_when_run_has_no_sft(runs):
    body = changed(runs, {"sft": BASE}, model_name_or_path="maker/base")
    assert cells(body, "base model, from which PPO started")[1:] == ["`maker/base`", f"`{COMMITS['sft']}`"]
    assert "It started from the base model in its lineage, which is also the reference" in body
    unfolded = body.split("<details>")[0]
    assert cells(unfolded, "held-out prompts")[1] == "base" and "SFT" not in unfolded
    assert "| SFT policy |" not in body and "| base model | not recorded" not in body
    folder = {"repo": None, "commit": None, "folder": "mine", "files": "9" * 64, "path": "/home/someone/mine"}
    body = changed(runs, {"sft": folder}, model_name_or_path="/home/someone/mine")
    assert cells(body, "base model, from which PPO started")[1:] == ["the folder `mine`", "files `9999999999`"]
    assert "/home/someone" not in body


@pytest.mark.parametrize(
    ("keys", "parents", "why"),
    [
        ({"reward_model_loader": "mine:load"}, {}, "reward_model_loader"),
        ({"chat_template_path": "mine.jinja"}, {}, "chat_template_path"),
        ({"reward_funcs": ["mine:score"]}, {}, "its recipe takes reward_funcs from "),
        ({"model_name_or_path": "/home/someone/base"}, {}, "model_name_or_path is a local folder"),
        ({"reward_model_path": ["reward", "ensemble/seed-2/reward"]}, {}, "reward_model_path is a local folder"),
        ({"dataset_name": "/home/someone/data"}, {}, "its data are in a local file or folder"),
        ({}, {"sft": {"repo": None, "commit": None, "path": "checkpoint-4"}}, "its SFT policy is not published"),
    ],
)
def test_card_omits_reproduce_when_it_would_be_rejected(runs, keys, parents, why):
    """`reproduce` refuses these, and nothing else of this run."""

    def again() -> None:
        run, card = StageRecord(runs / "ppo").read(), json.loads((runs / "ppo" / CARD_FILE).read_text())
        recipe_of(PublishedCheckpoint("x/toy", Path("nowhere"), COMMITS["sft"], card, run["resolved"], []))

    assert "rlhf-zoo reproduce local/tiny-world-ppo@step-000040" in changed(runs)
    again()
    body = changed(runs, parents, **keys)
    assert "rlhf-zoo reproduce" not in body and "It cannot be reproduced from published files, because" in body
    assert why in body.replace("&#95;", "_")
    if "reward_model_loader" not in keys:
        with pytest.raises(ZooError):
            again()


def test_card_states_each_held_out_share(runs):
    """A twentieth is held out for the evaluation, another to watch by; a tenth is what PPO does not learn from."""
    share = {"held_out_share": 0.05, "dataset_train_split": "train", "dataset_config": "prompts"}
    path, part = runs / "eval" / "evaluation.json", {"split": "train", "held_out_share": 0.05}
    data = {"location": "local/tiny-world", "config": "prompts", **part}
    write_json(path, {**read_json(path), "split": "train", "data": data, "over_training": over_training() | part})
    body = changed(runs, **share)
    assert "trained on the `train` split without 10% of its prompts" in body
    assert body.count("5% held out") == 2
    assert "161 prompts of the 5% held out of the `train` split" in body
    assert "30 prompts of another 5% held out of the `train` split" in body


def test_changed_seed_error_names_all_needed_options(tmp_path):
    make_recipe(tmp_path)
    save_start(tmp_path)
    context, other = make_context(tmp_path), {"seed": 2}
    with pytest.raises(ZooError, match="choose another --output_dir, or start again there"):
        context.check_settings_unchanged("sft", other)
    published = "choose another --output_dir and, if this run is already published under local, another --namespace"
    with pytest.raises(ZooError, match=published):
        replace(context, publish=True).check_settings_unchanged("sft", other)


@pytest.mark.parametrize(("model", "start"), [("sft", "SFT"), ("maker/chat", "the base")])
def test_headline_names_what_ppo_started_from(tmp_path, model, start):
    make_recipe(tmp_path)
    context = make_context(tmp_path)
    context.record("ppo").write(stage="ppo", resolved={"model_name_or_path": model})
    rate = {"value": 0.6, "ci95": [0.5, 0.7], "n": 40}
    means = {"reward": 1.0, "judge": 1.0, "distinct_2": 1.0, "kl": 2.0}
    write_json(context.directory / "summary.json", {
        "simulated": False, "sft": means, "ppo": means, "win_rate": rate, "control": rate, "prompts": 40, "rows": 40,
        "seconds": {"total": 9.0}, "peak_rss_mib": 100.0,
    })  # fmt: skip
    console = Console(file=StringIO(), width=200)
    print_headline(context, console)
    text = console.file.getvalue()
    assert f"Win rate of PPO over {start}: 0.600" in text and f"; {start} against itself with another seed" in text


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_run_stage_rejects_adapter_that_cannot_be_published_later(tmp_path, stage):
    make_recipe(tmp_path)
    context = make_context(tmp_path)
    adapters = {one: {"use_peft": True} for one in ("sft", "ppo")}
    context = replace(context, flags={**adapters, "sft": {"use_peft": True, "model_name_or_path": "maker/base"}})
    with pytest.raises(ZooError, match=r"adapter of the stage ppo .* cannot be published.*set push_merged in sft"):
        run_stage(context, stage, cast("Any", object()))
    assert context.record(stage).read() == {}


LORA = {
    "use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear", "reward_model_path": None,
    "reward_funcs": ["toy_run:answered"], "max_steps": 1,
}  # fmt: skip


def test_adapter_on_local_base_publishes_only_when_hub_has_base(tmp_path, thread_hub):
    """Refused where publishing was asked for; sent with the base that `push --base` names, if that is the very one."""
    base = save_stage(tmp_path / "elsewhere", "sft", trained_policy(), make_tokenizer())
    make_recipe(tmp_path, ppo={**LORA, "model_name_or_path": str(base)})
    for stage in ("sft", "reward"):
        (tmp_path / "toy" / f"{stage}.yaml").unlink()
    context = replace(make_context(tmp_path), hub=Hub("other", thread_hub.url, "a test"))
    for check in (lambda: check_planned_base(context, "ppo"), lambda: check_base(context, "ppo", {})):
        with pytest.raises(ZooError, match="is on no Hub: upload it"):
            check()
    assert str(base) in str(reason_not_to_publish(context))
    keys = {publishes: examine(context, publishes=publishes)[0] for publishes in (True, False)}
    assert {publishes: (one.check, one.status) for publishes, one in keys.items()} == {
        True: ("keys", FAILED), False: ("keys", OK)
    }  # fmt: skip
    assert ppo.run(context)

    sent = replace(context, publish=True)
    with pytest.raises(ZooError, match="--base NAMESPACE/NAME"):
        send_all(Sender(sent, stages=("ppo",)))
    api = thread_hub.api()
    for name, weights in (("other", b"others"), ("base", (base / "model.safetensors").read_bytes())):
        api.create_repo(f"maker/{name}")
        api.upload_file(repo_id=f"maker/{name}", path_in_repo="model.safetensors", path_or_fileobj=weights)
    with pytest.raises(ZooError, match="has other weights than"):
        record_base_repository(sent, ["ppo"], "maker/other")
    record_base_repository(sent, ["ppo"], "maker/base")
    send_all(Sender(sent, stages=("ppo",)))
    there = json.loads(Path(api.hf_hub_download("local/toy-ppo", "adapter_config.json")).read_text())
    commit = api.model_info("maker/base").sha
    assert (there["base_model_name_or_path"], there["revision"]) == ("maker/base", commit)
    card = json.loads(Path(api.hf_hub_download("local/toy-ppo", CARD_FILE)).read_text())
    assert (card["base_model"], card["parents"]["sft"]["commit"]) == ("maker/base", commit)
    assert reason_not_to_publish(context) is None, "what trains later is published too"
    check_planned_base(context, "ppo")
    assert reason_not_to_publish(replace(context, hub=replace(context.hub, endpoint="http://127.0.0.1:9"))), (
        "elsewhere nobody has it"
    )
    record_base_repository(sent, ["ppo"], "maker/base")  # again, for a push to another namespace
    with pytest.raises(ZooError, match="remove --base"):
        record_base_repository(sent, [], "maker/base")
