"""`rlhf-zoo sweep` trains PPO for each cell of a grid and each seed, tags each, and resumes after Ctrl-C."""

import json
import signal
from pathlib import Path

from finished_run import Run
from json_keys import unexplained
from test_ablate import SMALL
from zoo_process import wait_until

from rlhf_zoo.runs.record import StageRecord

TAGS = """
import json
from huggingface_hub import HfApi
refs = HfApi().list_repo_refs("local/tiny-world-ppo")
print(json.dumps({ref.name: ref.target_commit for ref in refs.tags}))
"""


def test_sweep_trains_each_cell_once_and_tags_it(base: Run, tmp_path: Path) -> None:
    run = base.before_ppo(tmp_path / "run")
    words = ["sweep", "recipes/tiny-world", "--output_dir", "run", *SMALL]
    words += ["--grid", "kl_coef=0.5", "--seeds", "2"]  # test_ablate.py tests two values of a key
    cells = run.path / "sweep"
    process = run.start(*words, "--json")
    wait_until(lambda: (cells / "kl-coef-0.5-seed-2" / "ppo" / "run.json").is_file(), process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 and stdout == "" and "Interrupted; run the same command again" in stderr
    first = cells / "kl-coef-0.5" / "ppo"
    before = (first / "run.json").read_bytes(), (run.path / "reward" / "run.json").read_bytes()
    assert StageRecord(first).read()["status"] == "finished"

    done = run.zoo(*words, "--json")
    assert done.returncode == 0, done.stderr
    overview = json.loads(done.stdout)
    assert overview == run.json("sweep", "overview.json") and unexplained(overview) == []
    assert overview["grid"] == {"kl_coef": [0.5]}
    assert [(row["settings"], row["seeds"]) for row in overview["over_seeds"]] == [({"kl_coef": 0.5}, 2)]
    assert before == ((first / "run.json").read_bytes(), (run.path / "reward" / "run.json").read_bytes())
    assert sorted(path.name for path in (cells / "kl-coef-0.5").iterdir() if path.is_dir()) == ["eval", "ppo"]

    again = run.zoo(*words)
    assert again.returncode == 0, again.stderr
    assert "β = 0.5" in again.stdout and " to " in again.stdout and "2 " in again.stdout
    hub = run.hub(tmp_path / "server")
    try:
        tags = json.loads(hub.python(TAGS))
    finally:
        hub.stop()
    documents = {name: run.json("sweep", name, "ppo", "run.json") for name in tags}
    assert {*tags} == {"kl-coef-0.5", "kl-coef-0.5-seed-2"}
    for name, commit in tags.items():
        assert documents[name]["repo"] == {"id": "local/tiny-world-ppo", "commit": commit, "tags": {name: commit}}
    assert [document["seed"] for document in documents.values()] == [1, 2]

    pulled = run.zoo("pull", "local/tiny-world-ppo@kl-coef-0.5", "--hub", "local", "--output_dir", "pulled")
    assert pulled.returncode == 0, pulled.stderr
    weights = cells / "kl-coef-0.5" / "ppo" / f"checkpoint-{documents['kl-coef-0.5']['chosen']['step']}"
    assert (run.folder / "pulled" / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    card = json.loads((run.folder / "pulled" / "rlhf_card.json").read_text())
    assert card["tag"] == "kl-coef-0.5" and card["settings"]["kl_coef"] == 0.5
    assert card["parents"]["sft"]["commit"] and card["parents"]["reward"]["commit"]
    text = (run.folder / "pulled" / "README.md").read_text()
    assert "| base model | none: random initial weights |" in text
    assert "This is one run of a sweep, with the tag `kl-coef-0.5`." in text
    assert "rlhf-zoo pull local/tiny-world-ppo@kl-coef-0.5 --hub local" in text
