"""`rlhf-zoo ablate`: PPO under several β from one SFT model, each run published, and found by the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_fixture import start_hub
from json_keys import unexplained
from zoo_process import errors, zoo

from rlhf_zoo.recipes import copy_recipe

FLAGS = [
    "--corpus_args", '{"lines": 1000}', "--sft.max_steps", "20", "--sft.eval_strategy", "no",
    "--sft.save_strategy", "no",
    "--reward.simulated_pairs", "100", "--reward.simulated_test_pairs", "40", "--reward.score_samples", "32",
    "--reward.max_steps", "4", "--reward.save_strategy", "no", "--reward.eval_strategy", "no",
    "--ppo.total_episodes", "64", "--ppo.per_device_train_batch_size", "16", "--ppo.gradient_accumulation_steps", "1",
    "--ppo.num_mini_batches", "1", "--ppo.save_steps", "2", "--ppo.eval_strategy", "no", "--ppo.response_length", "12",
    "--evaluation.prompts", "10", "--evaluation.samples", "1", "--evaluation.checkpoint_prompts", "20",
]  # fmt: skip
FOUND = """
import json, sys
from rlhf_zoo.hub.ablation import find_runs
from rlhf_zoo.hub.index import fetch_card
from huggingface_hub import HfApi
repo = "local/tiny-world-kl-coef-0.5-ppo"
card, _ = fetch_card(repo, HfApi().model_info(repo).sha)
found = find_runs(repo, card)
print(json.dumps([[run.repo, run.beta, list(run.steps)] for run in found.runs] + [found.problem]))
"""


def test_an_ablation_is_trained_published_and_found(tmp_path: Path) -> None:
    copy_recipe("tiny-world", tmp_path / "recipes" / "tiny-world")
    hub = start_hub(tmp_path / "server")
    try:
        to = ["--hub", hub.url, "--push_to_hub", "--namespace", "local", "--output_dir", "run"]

        def ablate(listed: str, *more: str):
            words = ["ablate", "recipes/tiny-world", "--kl_coef", listed, *to, *FLAGS, *more]
            return zoo(*words, home=tmp_path / "home", cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=hub.token)

        done = ablate("0,0.5", "--json")
        assert done.returncode == 0, done.stderr
        overview = json.loads(done.stdout)
        run = tmp_path / "run"
        assert overview == json.loads((run / "ablation" / "overview.json").read_text())
        assert unexplained(overview) == []
        assert [(one["value"], one["repo"]) for one in overview["runs"]] == [
            (0.0, "local/tiny-world-kl-coef-0-ppo"), (0.5, "local/tiny-world-kl-coef-0.5-ppo"),
        ]  # fmt: skip
        assert (run / "ablation" / "overview.png").read_bytes().startswith(b"\x89PNG")
        folders = sorted(path.name for path in (run / "ablation" / "kl-coef-0").iterdir() if path.is_dir())
        assert folders == ["eval", "ppo"], "what comes before PPO is the recipe's own"
        documents = {one: json.loads((run / "ablation" / one / "ppo" / "run.json").read_text())
                     for one in ("kl-coef-0", "kl-coef-0.5")}  # fmt: skip
        assert [one["resolved"]["kl_coef"] for one in documents.values()] == [0.0, 0.5]
        assert documents["kl-coef-0"]["parents"]["sft"] == documents["kl-coef-0.5"]["parents"]["sft"]
        *found, problem = json.loads(hub.python(FOUND))
        assert found == [
            ["local/tiny-world-kl-coef-0.5-ppo", 0.5, [2, 4]],
            ["local/tiny-world-kl-coef-0-ppo", 0.0, [2, 4]],
        ]
        assert problem is None

        commits = {repo.id: hub.api().model_info(repo.id).sha for repo in hub.api().list_models(author="local")}
        assert set(commits) == {
            "local/tiny-world-sft", "local/tiny-world-reward", "local/tiny-world-kl-coef-0-ppo",
            "local/tiny-world-kl-coef-0.5-ppo",
        }  # fmt: skip
        again = ablate("0.5,0", "--json")
        assert again.returncode == 0, again.stderr
        assert [one["value"] for one in json.loads(again.stdout)["runs"]] == [0.5, 0.0]
        assert commits == {repo.id: hub.api().model_info(repo.id).sha for repo in hub.api().list_models(author="local")}

        sft = json.loads((run / "sft" / "run.json").read_text())["finished"]
        changed = ablate("0", "--ppo.seed", "9")
        assert changed.returncode == 2 and "Traceback" not in changed.stderr, "other settings in the same place"
        done = ablate("0", "--ppo.learning_rate", "1e-5", "--restart", "--seeds", "2")
        assert done.returncode == 0, done.stderr
        seeds = {name: json.loads((run / "ablation" / name / "ppo" / "run.json").read_text())["seed"]
                 for name in ("kl-coef-0", "kl-coef-0-seed-2")}  # fmt: skip
        assert seeds == {"kl-coef-0": 1, "kl-coef-0-seed-2": 2}
        assert (
            "β = 0" in done.stdout
            and " to " in done.stdout
            and "win" in done.stdout
            and "rlhf-zoo compare local/tiny-world-kl-coef-0-ppo" in done.stdout
        )
        again = json.loads((run / "sft" / "run.json").read_text())["finished"]
        assert again == sft, "--restart is of the ablation's own runs"
        assert hub.api().model_info("local/tiny-world-kl-coef-0-ppo").sha != commits["local/tiny-world-kl-coef-0-ppo"]

        pushed = zoo("push", "run/ablation/kl-coef-0", "--hub", hub.url, "--namespace", "local", home=tmp_path / "home",
                     cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=hub.token)  # fmt: skip
        assert pushed.returncode == 0 and pushed.stdout.startswith("local/tiny-world-kl-coef-0-ppo: "), pushed.stderr
    finally:
        hub.stop()


def test_a_recipe_without_ppo_is_refused_before_it_trains(tmp_path: Path) -> None:
    copy_recipe("tiny-world", tmp_path / "recipes" / "sft-only")
    (tmp_path / "recipes" / "sft-only" / "ppo.yaml").unlink()
    done = zoo("ablate", "recipes/sft-only", "--kl_coef", "0", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 2 and "has no stage ppo, so there is nothing to ablate" in errors(done.stderr)[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-world"], "kl_coef"),
        (["tiny-world", "--kl_coef", "0,x"], "--kl_coef lists 'x': give numbers that are not negative"),
        (["tiny-world", "--kl_coef", "0", "--ppo.kl_coef", "1"], "leave --ppo.kl_coef out"),
        (["nothing", "--kl_coef", "0"], "nothing"),
        (["tiny-world", "--kl_coef", "0", "--ppo.kl_coeff", "1"], "did you mean"),
    ],
)
def test_what_cannot_be_ablated(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = zoo("ablate", *arguments, home=tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and message in errors(done.stderr)[-1] and "Traceback" not in done.stderr, done.stderr
