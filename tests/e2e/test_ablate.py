"""`rlhf-zoo ablate` trains PPO with several β from one SFT model, and publishes runs that the page can list."""

import json
from pathlib import Path

from finished_run import FLAGS, Run
from json_keys import unexplained

SMALL = [
    *FLAGS[: FLAGS.index("--ppo.total_episodes")],  # the data and the stages before PPO are those of the finished run
    "--ppo.total_episodes", "64", "--ppo.per_device_train_batch_size", "16", "--ppo.gradient_accumulation_steps", "2",
    "--ppo.num_mini_batches", "1", "--ppo.save_steps", "1", "--ppo.eval_strategy", "no", "--ppo.response_length", "20",
    "--evaluation.prompts", "10", "--evaluation.samples", "1", "--evaluation.checkpoint_prompts", "0",
]  # fmt: skip
FIND_RUNS = """
import json, sys
from rlhf_zoo.publishing.catalog.ablation import find_runs
from rlhf_zoo.publishing.catalog.index import try_download_card
from huggingface_hub import HfApi
api = HfApi()
repo = "local/tiny-world-kl-coef-0.5-ppo"
card, _ = try_download_card(repo, api.model_info(repo).sha)
ablation = find_runs(repo, card)
print(json.dumps([[run.repo, run.beta, list(run.steps)] for run in ablation.runs] + [ablation.problem]))
"""


def test_ablate_trains_publishes_and_lists_runs(base: Run, tmp_path: Path) -> None:
    run = base.before_ppo(tmp_path / "run")

    def ablate(*words: str) -> str:
        done = run.zoo("ablate", "recipes/tiny-world", "--output_dir", "run", *SMALL, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    overview = json.loads(ablate("--kl_coef", "0,0.5", "--json"))
    assert overview == run.json("ablation", "overview.json") and unexplained(overview) == []
    assert [(row["value"], row["repo"]) for row in overview["runs"]] == [
        (0.0, "local/tiny-world-kl-coef-0-ppo"), (0.5, "local/tiny-world-kl-coef-0.5-ppo"),
    ]  # fmt: skip
    assert (run.path / "ablation" / "overview.png").read_bytes().startswith(b"\x89PNG")
    folders = sorted(path.name for path in (run.path / "ablation" / "kl-coef-0").iterdir() if path.is_dir())
    assert folders == ["eval", "ppo"], "the stages before PPO are those of the recipe's run"
    documents = [run.json("ablation", name, "ppo", "run.json") for name in ("kl-coef-0", "kl-coef-0.5")]
    assert [document["resolved"]["kl_coef"] for document in documents] == [0.0, 0.5]
    assert documents[0]["parents"]["sft"] == documents[1]["parents"]["sft"]
    hub = run.hub(tmp_path / "server")
    try:
        *runs, problem = json.loads(hub.python(FIND_RUNS))
    finally:
        hub.stop()
    assert problem is None and runs == [
        ["local/tiny-world-kl-coef-0.5-ppo", 0.5, [1, 2]],
        ["local/tiny-world-kl-coef-0-ppo", 0.0, [1, 2]],
    ]

    stdout = ablate("--kl_coef", "0")
    assert run.json("ablation", "kl-coef-0", "ppo", "run.json") == documents[0], "a finished run is not trained again"
    assert "β = 0" in stdout and "rlhf-zoo compare local/tiny-world-kl-coef-0-ppo" in stdout

    pushed = run.zoo("push", "run/ablation/kl-coef-0", "--hub", "local")
    assert pushed.returncode == 0 and pushed.stdout.startswith("local/tiny-world-kl-coef-0-ppo: "), pushed.stderr
