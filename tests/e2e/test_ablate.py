"""`rlhf-zoo ablate`: PPO with several β from one SFT model; runs are published, and the page finds them."""

import json
from pathlib import Path

from finished_run import FLAGS, Run
from json_keys import unexplained

SMALL = [
    *FLAGS[: FLAGS.index("--ppo.total_episodes")],  # of what is there already
    "--ppo.total_episodes", "64", "--ppo.per_device_train_batch_size", "16", "--ppo.gradient_accumulation_steps", "2",
    "--ppo.num_mini_batches", "1", "--ppo.save_steps", "1", "--ppo.eval_strategy", "no", "--ppo.response_length", "20",
    "--evaluation.prompts", "10", "--evaluation.samples", "1", "--evaluation.checkpoint_prompts", "0",
]  # fmt: skip
FOUND = """
import json, sys
from rlhf_zoo.publishing.catalog.ablation import find_runs
from rlhf_zoo.publishing.catalog.index import try_download_card
from huggingface_hub import HfApi
api = HfApi()
repo = "local/tiny-world-kl-coef-0.5-ppo"
card, _ = try_download_card(repo, api.model_info(repo).sha)
found = find_runs(repo, card)
print(json.dumps([[run.repo, run.beta, list(run.steps)] for run in found.runs] + [found.problem]))
"""


def test_ablate_trains_publishes_and_lists_runs(base: Run, tmp_path: Path) -> None:
    run = base.before_ppo(tmp_path / "run")

    def ablate(*words: str) -> str:
        done = run.zoo("ablate", "recipes/tiny-world", "--output_dir", "run", *SMALL, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    overview = json.loads(ablate("--kl_coef", "0,0.5", "--json"))
    assert overview == run.json("ablation", "overview.json") and unexplained(overview) == []
    assert [(one["value"], one["repo"]) for one in overview["runs"]] == [
        (0.0, "local/tiny-world-kl-coef-0-ppo"), (0.5, "local/tiny-world-kl-coef-0.5-ppo"),
    ]  # fmt: skip
    assert (run.path / "ablation" / "overview.png").read_bytes().startswith(b"\x89PNG")
    folders = sorted(path.name for path in (run.path / "ablation" / "kl-coef-0").iterdir() if path.is_dir())
    assert folders == ["eval", "ppo"], "what comes before PPO is the recipe's own"
    documents = [run.json("ablation", one, "ppo", "run.json") for one in ("kl-coef-0", "kl-coef-0.5")]
    assert [one["resolved"]["kl_coef"] for one in documents] == [0.0, 0.5]
    assert documents[0]["parents"]["sft"] == documents[1]["parents"]["sft"]
    hub = run.hub(tmp_path / "server")
    try:
        *found, problem = json.loads(hub.python(FOUND))
    finally:
        hub.stop()
    assert problem is None and found == [
        ["local/tiny-world-kl-coef-0.5-ppo", 0.5, [1, 2]],
        ["local/tiny-world-kl-coef-0-ppo", 0.0, [1, 2]],
    ]

    said = ablate("--kl_coef", "0")
    assert run.json("ablation", "kl-coef-0", "ppo", "run.json") == documents[0], "it was there"
    assert "β = 0" in said and "rlhf-zoo compare local/tiny-world-kl-coef-0-ppo" in said

    pushed = run.zoo("push", "run/ablation/kl-coef-0", "--hub", "local")
    assert pushed.returncode == 0 and pushed.stdout.startswith("local/tiny-world-kl-coef-0-ppo: "), pushed.stderr
