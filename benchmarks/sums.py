"""Runs tiny-sums over seeds; scores SFT, PPO and cheaper alternatives on 1,000 unseen sums and on longer ones."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import keep
from figures.experiments import RELEASE_LAST, RUNS, relative

from rlhf_zoo.evaluation.head_to_head import read_lines
from rlhf_zoo.evaluation.stats import mean_share
from rlhf_zoo.fileio import read_json, write_json
from rlhf_zoo.modeling.loading import load_tokenizer
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.publishing.cards.facts import FRONTIER
from rlhf_zoo.rewards.verifiable import ExactMatch
from rlhf_zoo.runs.corpora.tiny_sums import shows_work
from rlhf_zoo.runs.data.generate import complete
from rlhf_zoo.runs.record import StageRecord

RECIPE = "tiny-sums"
SEEDS = (1, 2, 3, 4, 5)
#: Cheaper alternatives to PPO: name in the table -> method of `rlhf-zoo baseline`.
ALTERNATIVES = {"SFT for twice as long": "sft", "rejection fine-tuning": "rejection"}
STREAM = 23
MAX_TOKENS = 80
GREEDY_TOP_P = 1e-9  # so small that only the most likely token remains
WATCHED = "rlhf_zoo.runs.corpora.tiny_sums:shows_work"

RunCommand = Callable[[Sequence[str], Path], None]
Rows = Sequence[Mapping[str, Any]]
exact = ExactMatch(marker="#")


def run(run_command: RunCommand) -> None:
    """Runs the recipe and the alternatives for each seed that is not finished, and scores them."""
    for seed in SEEDS:
        folder = _folder(seed)
        if not keep.is_finished(folder):
            run_command(_words("run", str(relative(folder)), seed), folder)
        for method in ALTERNATIVES.values():
            if not (folder / "baseline" / method / "baseline.json").is_file():
                words = _words("baseline", str(relative(folder)), seed)
                run_command([*words, "--method", method, "--seeds", "1"], folder)
        measure(folder, {name: _alternative(folder, method, seed) for name, method in ALTERNATIVES.items()})


def finished_figures() -> dict[str, Any]:
    """Reads the figures of the finished runs over seeds."""
    runs = [_run_figures(folder) for seed in SEEDS if _is_finished(folder := _folder(seed))]
    return {"schema": 2, "recipe": RECIPE, "runs": runs}


def _is_finished(folder: Path) -> bool:
    return keep.is_finished(folder) and (folder / "sums.json").is_file()


def _run_figures(folder: Path) -> dict[str, Any]:
    summary, evaluation = read_json(folder / "summary.json"), read_json(folder / "eval" / "evaluation.json")
    over, judge = evaluation["over_training"], evaluation["judge"]["name"]
    work = next(figures for name, figures in evaluation["judges"].items() if name != judge)
    return {
        "seed": summary["seed"],
        "command": StageRecord(folder / "eval").read()["command"],
        "seconds": {stage: StageRecord(folder / stage).read()["seconds"] for stage in ("sft", "ppo", "eval")},
        "peak_rss_mib": summary["peak_rss_mib"],
        **{name: {side: evaluation[side][name] for side in ("sft", "ppo")} for name in ("reward", "judge")},
        "kl": evaluation["ppo"]["kl"],
        "shows_work": {side: work[side] for side in ("sft", "ppo")},
        **{name: over[name] for name in ("verdict", "kind", "without_judge", "fired", "explained", "reasons")},
        "policies": _policy_figures(folder),
        "curve": [
            {
                "step": row["step"],
                "reward": row["objective/score"],
                "kl": row["objective/kl"],
                "shows_work": row["rewards/shows_work"],
            }
            for row in StageRecord(folder / "ppo").metrics()
            if "objective/kl" in row
        ],
    }


def _policy_figures(folder: Path) -> dict[str, Any]:
    sampled = _sampled(folder)
    return {name: {**result, **sampled[name]} for name, result in read_json(folder / "sums.json").items()}


def measure(folder: Path, alternatives: Mapping[str, Path]) -> None:
    """Writes sums.json: each policy's shares of right answers and of shown work, greedily, also on longer sums."""
    if (path := folder / "sums.json").is_file():
        return
    tests, longer = (read_lines(folder / "data" / name / "test.jsonl") for name in ("prompts", "longer"))
    policies = {stage.upper(): _checkpoint(folder / stage) for stage in ("sft", "ppo")} | alternatives
    results = {}
    for name, policy in policies.items():
        results[name] = dict(zip(("greedy", "greedy_work"), greedy(policy, tests), strict=True))
        results[name] |= zip(("longer", "longer_work"), greedy(policy, longer), strict=True)
    write_json(path, results)


def _sampled(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads each policy's right answers and shown work at T = 1; with baselines also majority, pass@16 and FLOPs."""
    evaluation = read_json(folder / "eval" / "evaluation.json")
    if not (folder / FRONTIER).is_file():
        work = evaluation["judges"][f"rule:{WATCHED}"]
        return {
            side.upper(): {"sampled": evaluation[side]["judge"], "sampled_work": work[side]} for side in ("sft", "ppo")
        }
    frontier = read_json(folder / FRONTIER)
    points = {"SFT": frontier["sft"], "PPO": frontier["ppo"]}
    points |= {name: frontier["methods"][method][0] for name, method in ALTERNATIVES.items()}
    keys = {"sampled_work": f"rule:{WATCHED}", "majority": "majority of 16", "pass": "pass@16"}
    return {
        name: {
            "sampled": point["judge"],
            **{key: point["extra_metrics"][metric] for key, metric in keys.items()},
            "teraflops": {"value": point["compute"]["training"]["flops"] / 1e12},
        }
        for name, point in points.items()
    }


def greedy(policy: Path, rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the shares of right answers and of shown work among a policy's greedy completions."""
    completions = _greedy_completions(policy, rows)
    scores = exact([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])
    by_row = [score or 0.0 for score in scores], shows_work([], completions)
    right, work = (mean_share(marks, range(len(rows))).to_json() for marks in by_row)
    return right, work


def _greedy_completions(path: Path, rows: Rows) -> list[str]:
    completions = complete(
        load_causal(path),
        load_tokenizer(path),
        [row["prompt"] for row in rows],
        keys=[(STREAM, place) for place in range(len(rows))],
        seed=1,
        max_new_tokens=MAX_TOKENS,
        temperature=1.0,
        top_p=GREEDY_TOP_P,
        batch_size=500,
        desc=path.parent.parent.name,
    )
    return completions.texts


def _words(verb: str, directory: str, seed: int) -> list[str]:
    return ["rlhf-zoo", verb, RECIPE, "--output_dir", directory, "--hub", "local", "--seed", str(seed), *RELEASE_LAST]


def _folder(seed: int) -> Path:
    return RUNS / f"{RECIPE}-{seed}"


def _alternative(folder: Path, method: str, seed: int) -> Path:
    return _checkpoint(folder / "baseline" / method / f"seed-{seed}" / "sft")


def _checkpoint(stage: Path) -> Path:
    path = StageRecord(stage).chosen_checkpoint()
    assert path is not None  # a finished stage has a chosen checkpoint
    return path
