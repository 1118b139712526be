"""A recipe run through the command line: its files, its repositories, and recovery from interrupts."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from finished_run import STAGES, STEPS, Run
from folders import file_digests
from hub_fixture import Hub, RunningHub, start_hub
from zoo_process import COMMAND, errors, hubs_over, wait_until

from rlhf_zoo.hub.client.step_tags import tag_name
from rlhf_zoo.runs.metrics_file import without_times

FIGURES = {
    "reward", "judge", "kl", "exact_kl", "length", "eos_rate", "distinct_1", "distinct_2", "repetition",
    "sft_perplexity",
}  # fmt: skip
LAST = STEPS["ppo"][-1]


@pytest.fixture(scope="module")
def served(base: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    running = base.hub(tmp_path_factory.mktemp("served"))
    yield running
    running.stop()


def weight_digests(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in file_digests(folder).items() if name.endswith(".safetensors")}


def read_metrics(run: Run, stage: str) -> list[dict]:
    return [*map(without_times, run.record(stage).metrics())]


def read_evaluation(run: Run) -> dict:
    """Returns the evaluation without its time and without the data's commit, which differs between Hubs."""
    document = run.json("eval", "evaluation.json")
    document["data"].pop("revision")
    return {name: value for name, value in document.items() if name != "seconds"}


def assert_same_stage(run: Run, base: Run, stage: str) -> None:
    """Checks that checkpoints equal the undisturbed run's bit for bit, and metrics except for times."""
    for step in STEPS[stage]:
        ours, theirs = (weight_digests(each.record(stage).checkpoint_path(step)) for each in (run, base))
        assert ours == theirs and ours, f"{stage} at step {step}"
    assert read_metrics(run, stage) == read_metrics(base, stage)


def list_tags(hub: RunningHub, stage: str) -> dict[str, str]:
    return {ref.name: ref.target_commit for ref in hub.api().list_repo_refs(f"local/tiny-world-{stage}").tags}


# Files of a run


def test_run_directory_holds_expected_files(base):
    assert {path.name for path in base.path.iterdir()} == {"data", *STAGES, "eval", "summary.json", "run_id"}
    for stage in (*STAGES, "eval"):
        document = base.json(stage, "run.json")
        assert {"fingerprint", "resolved", "created", "finished", "command"} <= document.keys()
        assert (document["schema"], document["stage"], document["recipe"]) == (1, stage, "tiny-world")
        assert (document["status"], document["seed"], document["hub"]) == ("finished", 1, "local")
        assert document["seconds"] > 0 and document["versions"]["torch"]
    for stage in STAGES:
        record, tags = base.record(stage), base.json(stage, "run.json")["repo"]["tags"]
        assert [path.name for path in record.checkpoints()] == [f"checkpoint-{step}" for step in STEPS[stage]]
        assert not list(record.path.rglob("*.tmp"))
        assert list(tags) == [*(tag_name(step) for step in STEPS[stage]), "best"]
        for path, step in zip(record.checkpoints(), STEPS[stage], strict=True):
            note = json.loads((path / "published.json").read_text())
            wanted = (f"local/tiny-world-{stage}", tag_name(step), tags[tag_name(step)])
            assert (note["repo"], note["tag"], note["commit"]) == wanted
            assert (path / "critic").is_dir() is (stage == "ppo")
        steps = [row["step"] for row in record.metrics()]
        assert steps == sorted(steps) and steps[-1] == STEPS[stage][-1]
    parents = base.json("ppo", "run.json")["parents"]
    assert {"sft", "reward"} == parents.keys()
    assert parents["sft"]["commit"] in base.json("sft", "run.json")["repo"]["tags"].values()
    ppo = [row for row in base.record("ppo").metrics() if "objective/kl" in row]
    assert [row["step"] for row in ppo] == list(range(1, LAST + 1)) and ppo[-1]["episodes"] == 96
    assert ppo[0]["objective/kl"] == pytest.approx(0, abs=1e-3)


def test_run_writes_evaluation_and_samples(base):
    document = base.json("eval", "evaluation.json")
    assert (document["schema"], document["split"], document["n"]) == (1, "test", 16)
    assert document["judge"]["is_training_reward"] is False and document["simulated"] is True
    for side in ("sft", "ppo"):
        assert document[side].keys() == FIGURES
        assert all({"value", "ci95", "n"} <= figure.keys() for figure in document[side].values())
    rows = [json.loads(line) for line in (base.path / "eval" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {row["sample"] for row in rows} == {0, 1}
    assert all({"prompt", "sample", "sft", "ppo", "control"} == row.keys() for row in rows)
    held_out = {json.loads(line)["prompt"] for line in (base.path / "data" / "prompts" / "test.jsonl").open()}
    rolled_out = {json.loads(line)["prompt"] for line in (base.path / "data" / "prompts" / "train.jsonl").open()}
    assert {row["prompt"] for row in rows} <= held_out - rolled_out


def test_checkpoint_means_match_stored_scores_and_card_shows_verdict(base):
    document = base.json("eval", "evaluation.json")
    over = document["over_training"]
    assert (over["split"], over["samples_per_prompt"], over["schema"]) == ("validation", 2, 1)
    assert [row["step"] for row in over["checkpoints"]] == STEPS["ppo"]
    assert over["verdict"] == document["verdict"] and over["recommended"] == document["recommended"]
    assert over["recommended"] in (None, *STEPS["ppo"]) and over["reasons"]
    assert len(over["probes"]["probes"]) + len(over["probes"]["skipped"]) == 10
    assert over["sft"]["kl"]["value"] == 0.0 and all(row["kl"]["value"] > 0 for row in over["checkpoints"])
    scores = base.json("eval", "over_training.json")
    assert scores["steps"] == [0, *STEPS["ppo"]]
    for name in ("reward", "judge", "kl"):
        for row, prompts in zip([over["sft"], *over["checkpoints"]], scores[name], strict=True):
            assert len(prompts) == over["prompts"]
            assert sum(prompts) / len(prompts) == pytest.approx(row[name]["value"], abs=1e-5)
    card = base.json("ppo", "rlhf_card.json")["evaluation"]
    assert (card["verdict"], card["recommended"]) == (document["verdict"], document["recommended"])
    assert f"## Verdict: {document['verdict']}" in (base.path / "ppo" / "README.md").read_text()
    assert (base.path / "ppo" / "plots" / "over_training.png").is_file()


def test_summary_matches_schema_and_json_output(base):
    summary = base.json("summary.json")
    assert json.loads((base.folder / "stdout").read_text()) == summary
    assert summary.keys() == {
        "schema", "recipe", "seed", "simulated", "hub", "seconds", "peak_rss_mib", "repos", "reward_model", "sft",
        "ppo", "win_rate", "control", "prompts", "groups", "rows", "verdict", "recommended",
    }  # fmt: skip
    assert (summary["schema"], summary["recipe"], summary["seed"], summary["hub"]) == (1, "tiny-world", 1, "local")
    assert summary["seconds"].keys() == {*STAGES, "eval", "total"}
    stages = sum(summary["seconds"][stage] for stage in (*STAGES, "eval"))
    assert stages <= summary["seconds"]["total"] and all(value > 0 for value in summary["seconds"].values())
    assert 100 < summary["peak_rss_mib"] < 3000
    for stage in STAGES:
        repo, tags = summary["repos"][stage], base.json(stage, "run.json")["repo"]["tags"]
        assert repo == {"id": f"local/tiny-world-{stage}", "commit": tags["best"], "tags": tags}
    assert summary["reward_model"].keys() == {"accuracy", "n", "ci95"}
    figures = base.json("eval", "evaluation.json")
    for side in ("sft", "ppo"):
        assert summary[side] == {name: figures[side][name]["value"] for name in FIGURES}
    assert (summary["prompts"], summary["rows"]) == (figures["prompts"], figures["rows"])
    for name in ("win_rate", "control"):
        assert summary[name] == {key: figures[name][key] for key in ("value", "ci95", "n")}


def test_run_output_names_stages_and_results(base):
    log = (base.folder / "stderr").read_text()
    assert "Hub: the embedded Hub (to publish" in log and "Publishing to local/tiny-world-*" in log
    assert re.search(r"^Plan for cpu \(.* GiB\): sft [\d.]+, reward [\d.]+, ppo [\d.]+ GiB, about ", log, re.MULTILINE)
    assert "differ from those that this run sent" not in log and "weights verified by SHA-256" in log
    for text in ("Warning", "warn(", "Traceback", "Generating train split"):
        assert text not in log


# Published repositories


def test_plain_transformers_load_published_models(base, served, tmp_path):
    code = """
import sys, torch
from datasets import get_dataset_config_names, load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
lines = load_dataset("local/tiny-world")
assert set(lines) == {"train", "validation", "test"} and lines["train"].column_names == ["text"], lines
assert set(get_dataset_config_names("local/tiny-world")) == {"lines", "prompts", "preferences"}
pairs = load_dataset("local/tiny-world", "preferences", split="train")
assert {"prompt", "chosen", "rejected", "simulated"} == set(pairs.column_names) and all(pairs["simulated"])
last = AutoModelForCausalLM.from_pretrained("local/tiny-world-ppo", revision="best")
on_disk = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert all(torch.equal(a, b) for a, b in zip(last.parameters(), on_disk.parameters(), strict=True))
tokenizer = AutoTokenizer.from_pretrained("local/tiny-world-ppo", revision="best")
ids = tokenizer("the screen", return_tensors="pt")
assert tokenizer.decode(last.generate(**ids, max_new_tokens=3, do_sample=False)[0]).startswith("the screen")
reward = AutoModelForSequenceClassification.from_pretrained("local/tiny-world-reward", revision="best")
assert reward.config.rlhf_zoo["score_std"] > 0 and reward.num_labels == 1
"""
    last = base.record("ppo").checkpoint_path(LAST)
    served.run(*COMMAND[:1], "-c", code, str(last), HF_HOME=str(tmp_path))


# Reruns and single stages


def test_rerun_changes_nothing_and_rejects_other_settings(base):
    before = file_digests(base.path), file_digests(base.root)
    done = base.zoo(*base.command())
    assert (done.returncode, errors(done.stderr)) == (0, [])
    for stage in (*STAGES, "eval"):
        assert f"{stage} is already finished; --restart runs it again." in done.stdout
    assert done.stdout.rstrip().splitlines()[-4:] == [
        "Try next:",
        "  rlhf-zoo compare local/tiny-world-ppo --hub local",
        "  rlhf-zoo pull local/tiny-world-ppo@best --hub local",
        "  rlhf-zoo card run/ppo",
    ]
    assert "Win rate of PPO over SFT on simulated preferences: " in done.stdout
    done = base.zoo(*base.command("run", "--ppo.kl_coef", "0.2"))
    assert done.returncode == 2
    (error,) = errors(done.stderr)
    assert error.startswith("Error: run/ppo has a run with kl_coef = ") and "and this one has 0.2" in error
    assert "`rlhf-zoo ppo recipes/tiny-world --output_dir run --restart`, with your other flags, leaves" in error
    # Settings of the evaluation do not affect a finished training stage.
    done = base.zoo(*base.command("ppo", "--evaluation.lexicon", "none"))
    assert done.returncode == 0 and "ppo is already finished in run" in done.stdout
    assert re.search(r"^Plan for cpu \(.* GiB\): ppo [\d.]+ GiB, about ", done.stderr, re.MULTILINE)
    assert (file_digests(base.path), file_digests(base.root)) == before


@pytest.mark.parametrize("stage", STAGES)
def test_stage_killed_after_last_step_trains_no_more(base, tmp_path, stage, monkeypatch):
    run = base.copy(tmp_path / "copy")
    monkeypatch.setenv("RLHF_ZOO_HOME", str(run.home / "zoo"))  # its key signs the record
    record = run.record(stage)
    before, rows = record.read(), record.metrics()
    last = run.record(stage).checkpoint_path(STEPS[stage][-1])
    digests = weight_digests(last)
    record.write(status="running", chosen=None, finished=None)
    done = run.zoo(*run.command(stage))
    assert (done.returncode, errors(done.stderr)) == (0, [])
    after = record.read()
    assert after["status"] == "finished" and after["chosen"] == before["chosen"]
    assert record.last_checkpoint() == last and weight_digests(last) == digests and record.metrics() == rows


def test_ppo_stage_starts_from_hub_and_verdict_chooses_release(base, tmp_path):
    """The ppo command trains only PPO. `rlhf-zoo eval` then chooses the step of `main` and `best`."""
    run = base.copy(tmp_path / "copy", "data", *STAGES, "eval")
    done = run.zoo(*run.command("ppo"))
    assert done.returncode == 2 and "has the tag step-" in done.stderr and "pass --restart" in done.stderr
    without_rule = [word for word in run.command("ppo", "--restart") if word not in ("--ppo.release", "last")]
    done = run.zoo(*without_rule)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ppo done: ") and done.stdout.endswith("Run directory: run/ppo\n")
    assert "`main` is the last checkpoint until `rlhf-zoo eval` has chosen one" in done.stdout
    assert {path.name for path in run.path.iterdir() if path.is_dir()} == {"data", "ppo"}
    assert_same_stage(run, base, "ppo")
    document = run.json("ppo", "run.json")
    assert document["chosen"]["provisional"] is True
    for stage in ("sft", "reward"):
        published, parent = base.json("summary.json")["repos"][stage], document["parents"][stage]
        assert (parent["repo"], parent["commit"]) == (published["id"], published["tags"]["best"])
    git = Hub("", run.root, "", {}, run.root).git
    tags = git("local/tiny-world-ppo", "tag", "--format=%(refname:strip=2) %(objectname)").split()
    before, after = base.json("ppo", "run.json")["repo"]["tags"], dict(zip(tags[::2], tags[1::2], strict=True))
    assert after.keys() == before.keys() - {"best"} and not set(before.values()) & set(after.values())

    local = run.path / "ppo" / "README.md"
    local.write_text("the card of `run`")
    done = run.zoo(*[word for word in run.command("eval") if word not in ("--ppo.release", "last")])
    assert done.returncode == 0, done.stderr
    document, chosen = run.json("eval", "evaluation.json"), run.json("ppo", "run.json")["chosen"]
    assert document["sft"] == base.json("eval", "evaluation.json")["sft"]
    wanted = document["recommended"] or LAST
    none = {"none": True} if document["recommended"] is None else {}
    assert chosen == {"step": wanted, "rule": "recommended", "metric": None, "value": None, **none}
    assert run.json("eval", "run.json")["parents"]["ppo"]["path"] == f"checkpoint-{wanted}"
    hub = run.hub(tmp_path / "hub")
    try:
        card = Path(hub.api().hf_hub_download("local/tiny-world-ppo", "README.md", cache_dir=tmp_path / "cache"))
        main = hub.api().model_info("local/tiny-world-ppo", files_metadata=True)
        head = hub.api().dataset_info("local/tiny-world").sha
        named = {ref.name for ref in hub.api().list_repo_refs("local/tiny-world-ppo").tags}
    finally:
        hub.stop()
    assert f"The recipe's rule is `recommended`: step **{wanted}**" in card.read_text()
    assert f"step **{wanted}**" in local.read_text()
    assert ("best" in named) is (document["recommended"] is not None)
    published = {file.rfilename: file.lfs.sha256 for file in main.siblings if file.lfs}
    assert weight_digests(run.path / "ppo" / f"checkpoint-{wanted}").items() <= published.items()
    # The ppo stage prepared no preferences, and did not remove those of the published data set.
    assert head == base.json("data", "run.json")["repo"]["commit"]


def test_card_and_push_commands_publish_run(base, tmp_path):
    run = base.copy(tmp_path / "copy")
    before = file_digests(run.root)
    done = run.zoo("card", "run/ppo", "--step", "4")
    assert done.returncode == 0 and "card of the evaluated step" in (run.path / "ppo" / "README.md").read_text()
    done = run.zoo("card", "run/ppo", "--step", "55")
    assert done.returncode == 2 and "has no step 55" in done.stderr
    done = run.zoo("card", "run")
    assert (done.returncode, done.stdout.split()) == (0, [f"run/{stage}/README.md" for stage in STAGES]), done.stderr
    for stage in STAGES:
        text = (run.path / stage / "README.md").read_text()
        assert f"local/tiny-world-{stage}" in text and "step-0000" in text and "simulated" in text

    shutil.rmtree(run.folder / "recipes")  # a push does not need the recipe
    done = run.zoo("push", "run", "--hub", "local")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == "local/tiny-world-ppo: step-000002, step-000004, step-000006, best"
    assert file_digests(run.root) == before


# Interrupts


def stop_command(
    run: Run, command: list[str], when: Callable[[], bool], how: signal.Signals, **env: str
) -> tuple[int, str]:
    """Starts a command, sends it the signal `how` once `when()` holds, and returns its exit code and stderr."""
    process = run.start(*command, **env)
    try:
        wait_until(when, process)
        process.send_signal(how)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: hubs_over(run.home) == [])
    return process.returncode, stderr


def last_logged_step(run: Run, stage: str) -> int:
    """The last step in metrics.jsonl."""
    return max((row["step"] for row in run.record(stage).metrics()), default=0)


def test_interrupted_and_killed_runs_give_same_result(base, tmp_path):
    run = base.before_ppo(tmp_path / "copy")
    code, stderr = stop_command(run, run.command("ppo"), lambda: last_logged_step(run, "ppo") >= 1, signal.SIGINT)
    assert code == 130, stderr
    assert "Saving the ppo stage after this step, or after this batch of an evaluation; press Ctrl-C again" in stderr
    assert stderr.rstrip().endswith("Interrupted; run the same command again: it resumes if it has saved anything.")
    assert "Traceback" not in stderr
    record, document, step = run.record("ppo"), run.json("ppo", "run.json"), last_logged_step(run, "ppo")
    assert document["status"] == "interrupted" and 1 <= step < LAST
    last = record.last_checkpoint()
    assert last is not None and last.name == f"checkpoint-{step}"
    assert tag_name(step) in document["repo"]["tags"] and (last / "published.json").is_file()
    assert not record.remove_incomplete_files()
    code, _ = stop_command(run, run.command("ppo"), lambda: last_logged_step(run, "ppo") > step, signal.SIGKILL)
    assert code == -signal.SIGKILL and run.json("ppo", "run.json")["status"] == "running"
    done = run.zoo(*run.command("ppo"))
    assert done.returncode == 0, done.stderr
    assert run.json("ppo", "run.json")["status"] == "finished"
    assert_same_stage(run, base, "ppo")


@pytest.mark.full
def test_kills_in_every_stage_publish_same_repositories(base, tmp_path):
    run = Run(tmp_path / "copy")
    shutil.copytree(base.folder / "recipes", run.folder / "recipes")
    hub, expected_hub = start_hub(tmp_path / "server"), base.hub(tmp_path / "expected")
    env = {name: hub.env[name] for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME")}
    command = run.command("run", "--push_to_hub", "--namespace", "local")
    try:
        for stage, step in (("sft", 20), ("reward", 3), ("ppo", 3)):
            code, _ = stop_command(run, command, lambda: last_logged_step(run, stage) >= step, signal.SIGKILL, **env)  # noqa: B023
            assert code == -signal.SIGKILL
        done = run.zoo(*command, **env)
        assert done.returncode == 0, done.stderr
        assert f"Hub: {hub.url} (HF_ENDPOINT)" in done.stderr and run.json("summary.json")["hub"] == hub.url
        assert not run.root.exists(), "no embedded Hub was needed"
        assert read_evaluation(run) == read_evaluation(base)
        for stage in STAGES:
            assert_same_stage(run, base, stage)
            repo = f"local/tiny-world-{stage}"
            subjects = hub.git(repo, "log", "--format=%s", "main").splitlines()
            assert len([subject for subject in subjects if ": step " in subject]) == len(STEPS[stage])
            hub.git(repo, "fsck", "--strict")
            assert list_tags(hub, stage).keys() == list_tags(expected_hub, stage).keys()
            for tag in list_tags(hub, stage):
                ours, theirs = (published_content(each, repo, tag, "model") for each in (hub, expected_hub))
                assert ours == theirs and any(name.endswith(".safetensors") for name in ours)
        ours, theirs = (published_content(each, "local/tiny-world", "main", "dataset") for each in (hub, expected_hub))
        assert ours == theirs and "preferences/train.jsonl" in ours
    finally:
        hub.stop()
        expected_hub.stop()


def published_content(hub: RunningHub, repo: str, revision: str, kind: str) -> dict[str, str]:
    """Maps path to blob id, without the files that contain the Hub's URL or times."""
    excluded = ("README.md", "rlhf_card.json", "metrics.jsonl", "claim.json")
    entries = hub.api().list_repo_tree(repo, revision=revision, repo_type=kind, recursive=True)
    return {
        entry.path: entry.blob_id
        for entry in entries
        if hasattr(entry, "blob_id")
        and (kind == "dataset" or (not entry.path.endswith(excluded) and not entry.path.startswith("runs/")))
    }
