"""tiny-sums over seeds: SFT, PPO and baselines, on 1,000 unseen sums and on longer ones."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import keep
from figures.experiments import LAST, RUNS, shown

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
#: What could be had for less: in the table, and as a method of `rlhf-zoo baseline`.
RIVALS = {"SFT for twice as long": "sft", "rejection fine-tuning": "rejection"}
STREAM = 23
NEW_TOKENS = 80
GREEDY = 1e-9  # of the probability: the likeliest token alone
WATCHED = "rlhf_zoo.runs.corpora.tiny_sums:shows_work"

Call = Callable[[Sequence[str], Path], None]
Rows = Sequence[Mapping[str, Any]]
exact = ExactMatch(marker="#")


def run(call: Call, seeds: Sequence[int]) -> None:
    """Trains what is not there yet, the recipe and what could be had for less, and measures it."""
    for seed in (one for one in SEEDS if one in seeds):
        folder = _folder(seed)
        if not keep.finished(folder):
            call(_words("run", str(shown(folder)), seed), folder)
        for method in RIVALS.values():
            if not (folder / "baseline" / method / "baseline.json").is_file():
                call([*_words("baseline", str(shown(folder)), seed), "--method", method, "--seeds", "1"], folder)
        measure(folder, {name: _rival(folder, method, seed) for name, method in RIVALS.items()})


def kept_runs() -> dict[str, Any]:
    """What is kept of the finished runs over seeds."""
    runs = [_kept(folder) for seed in SEEDS if _whole(folder := _folder(seed))]
    return {"schema": 2, "recipe": RECIPE, "runs": runs}


def _whole(folder: Path) -> bool:
    return keep.finished(folder) and (folder / "sums.json").is_file()


def _kept(folder: Path) -> dict[str, Any]:
    summary, evaluation = read_json(folder / "summary.json"), read_json(folder / "eval" / "evaluation.json")
    over, judge = evaluation["over_training"], evaluation["judge"]["name"]
    work = next(each for name, each in evaluation["judges"].items() if name != judge)
    return {
        "seed": summary["seed"],
        "command": StageRecord(folder / "eval").read()["command"],
        "seconds": {stage: StageRecord(folder / stage).read()["seconds"] for stage in ("sft", "ppo", "eval")},
        "peak_rss_mib": summary["peak_rss_mib"],
        **{name: {side: evaluation[side][name] for side in ("sft", "ppo")} for name in ("reward", "judge")},
        "kl": evaluation["ppo"]["kl"],
        "shows_work": {side: work[side] for side in ("sft", "ppo")},
        **{name: over[name] for name in ("verdict", "kind", "without_judge", "fired", "explained", "reasons")},
        "policies": _policies(folder),
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


def _policies(folder: Path) -> dict[str, Any]:
    sampled = _sampled(folder)
    return {name: {**result, **sampled[name]} for name, result in read_json(folder / "sums.json").items()}


def measure(folder: Path, rivals: Mapping[str, Path]) -> None:
    """Writes sums.json, of each policy: greedily and on longer sums, the shares of right answers and of shown work."""
    if (path := folder / "sums.json").is_file():
        return
    tests, longer = (read_lines(folder / "data" / name / "test.jsonl") for name in ("prompts", "longer"))
    policies = {stage.upper(): _checkpoint(folder / stage) for stage in ("sft", "ppo")} | rivals
    results = {}
    for name, policy in policies.items():
        results[name] = dict(zip(("greedy", "greedy_work"), greedy(policy, tests), strict=True))
        results[name] |= zip(("longer", "longer_work"), greedy(policy, longer), strict=True)
    write_json(path, results)


def _sampled(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each policy at T = 1: right answers, and shown work; beside baselines also vote, pass@16 and FLOPs."""
    evaluation = read_json(folder / "eval" / "evaluation.json")
    if not (folder / FRONTIER).is_file():
        work = evaluation["judges"][f"rule:{WATCHED}"]
        return {
            side.upper(): {"sampled": evaluation[side]["judge"], "sampled_work": work[side]} for side in ("sft", "ppo")
        }
    frontier = read_json(folder / FRONTIER)
    points = {"SFT": frontier["sft"], "PPO": frontier["ppo"]}
    points |= {name: frontier["methods"][method][0] for name, method in RIVALS.items()}
    keys = {"sampled_work": f"rule:{WATCHED}", "majority": "majority of 16", "pass": "pass@16"}
    return {
        name: {
            "sampled": point["judge"],
            **{key: point["extra_metrics"][of] for key, of in keys.items()},
            "teraflops": {"value": point["compute"]["training"]["flops"] / 1e12},
        }
        for name, point in points.items()
    }


def greedy(policy: Path, rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shares of right answers and of shown work among the likeliest completions."""
    completions = _answers(policy, rows)
    scores = exact([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])
    shares = [one or 0.0 for one in scores], shows_work([], completions)
    right, work = (mean_share(each, range(len(rows))).to_json() for each in shares)
    return right, work


def _answers(path: Path, rows: Rows) -> list[str]:
    """The likeliest completion of each problem."""
    done = complete(
        load_causal(path),
        load_tokenizer(path),
        [row["prompt"] for row in rows],
        keys=[(STREAM, place) for place in range(len(rows))],
        seed=1,
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
        top_p=GREEDY,
        batch_size=500,
        desc=path.parent.parent.name,
    )
    return done.texts


def _words(verb: str, directory: str, seed: int) -> list[str]:
    return ["rlhf-zoo", verb, RECIPE, "--output_dir", directory, "--hub", "local", "--seed", str(seed), *LAST]


def _folder(seed: int) -> Path:
    return RUNS / f"{RECIPE}-{seed}"


def _rival(folder: Path, method: str, seed: int) -> Path:
    return _checkpoint(folder / "baseline" / method / f"seed-{seed}" / "sft")


def _checkpoint(stage: Path) -> Path:
    path = StageRecord(stage).chosen_checkpoint()
    assert path is not None  # a finished stage has one
    return path
