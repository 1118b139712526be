"""Reports the baselines of a run next to PPO: a point of KL, reward and judge score for each policy."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluation.compute import Compute, best_of_n_compute
from ...evaluation.frontier import Floats, Point, average_by_prompt, average_points, lowest_kl_filter, win_shares
from ...evaluation.frontier_report import PPOComparison
from ...evaluation.head_to_head import read_json_lines, read_samples
from ...evaluation.overoptimization import best_of_n_kl, expected_best_of_n
from ...fileio import read_json, write_json
from ...modeling.prompt_keys import count_distinct_prompts
from ...publishing.plots import plot_frontier
from ...runs.record import StageRecord, first_difference
from .baseline import METHODS, N_VALUES, FinishedRun, Method
from .runner import ABLATION_KEYS
from .sweep import ABLATION

#: Labels of the methods that train one policy per seed.
_LABELS_WITHOUT_BETA: dict[Method, str] = {"sft": "twice as long", "rejection": "on completions above the mean reward"}


def _ppo_points(run: FinishedRun, own_point: Point) -> tuple[Point, list[Point]]:
    """Returns PPO's point, averaged over seeds (`own_point` is that of the run itself), and a point at each other β.

    Other seeds and β come from the finished runs of `rlhf-zoo ablate --kl_coef LIST --seeds N` that differ from the run
    only in β, seed or release. The compute of runs at another β is not counted, because they only show what PPO reaches
    at another KL.
    """
    directory, ppo_args = run.context.directory, run.context.settings("ppo").trainer
    by_beta: dict[float, dict[int, Point]] = defaultdict(dict)
    by_beta[ppo_args.kl_coef][ppo_args.seed] = replace(own_point, label=f"seed {ppo_args.seed}")
    for folder in sorted((directory / ABLATION).glob("kl-coef-*")):
        if all(
            _differs_only_in((*ABLATION_KEYS, "seed"), folder / stage, directory / stage) for stage in ("ppo", "eval")
        ):
            resolved = StageRecord(folder / "ppo").read()["resolved"]
            beta, seed = resolved.get("kl_coef", ppo_args.kl_coef), resolved.get("seed", ppo_args.seed)
            if beta == ppo_args.kl_coef and _release_rule(folder) != _release_rule(directory):
                continue  # points of seeds are averaged only if the same rule chose the checkpoints
            lines = read_samples(folder / "eval" / "samples.jsonl", run.rows["prompt"], run.samples_per_prompt)
            samples = [line["ppo"] for line in lines]
            by_beta[beta].setdefault(seed, _policy_point(run, f"seed {seed}", samples, Compute()))
    points = {}
    for beta, by_seed in sorted(by_beta.items()):
        seed_points, label = list(by_seed.values()), f"PPO, β = {beta:g}"
        is_mean = len(seed_points) > 1
        points[beta] = average_points(seed_points, label=label) if is_mean else replace(seed_points[0], label=label)
    mean = points.pop(ppo_args.kl_coef)
    mean = replace(mean, label=own_point.label, training=own_point.training, serving=own_point.serving)
    return mean, list(points.values())


def _release_rule(run_folder: Path) -> str | None:
    """Returns the release rule that chose the checkpoint that a run evaluated."""
    return (StageRecord(run_folder / "ppo").read().get("chosen") or {}).get("rule")


def _differs_only_in(keys: Sequence[str], stage_folder: Path, base_folder: Path) -> bool:
    """Whether a stage is finished, and its settings differ from those of the run's own stage only in `keys`."""
    document, base_settings = StageRecord(stage_folder).read(), StageRecord(base_folder).read()["resolved"]
    if document.get("status") != "finished":
        return False
    settings = [
        {
            **{key: value for key, value in resolved.items() if key not in (*keys, "parents")},
            "parents": {role: parent for role, parent in resolved["parents"].items() if role != "ppo"},
        }
        for resolved in (document["resolved"], base_settings)
    ]
    return first_difference(*settings) is None


def _policy_point(run: FinishedRun, label: str, samples: Sequence[Mapping[str, Any]], training: Compute) -> Point:
    """Computes the point of a policy from its P · samples_per_prompt entries of samples.jsonl, ordered by prompt."""
    per_prompt = run.samples_per_prompt
    figures = {name: _column(samples, name) for name in ("reward", "judge", "kl", "length")}
    judge_scores, win_rates = figures["judge"], {}
    for opponent, opponent_samples in run.policy_samples.items():
        # Samples that share a prompt and random numbers are compared: a win counts 1, a loss 0 and a tie one half.
        shares = win_shares(judge_scores[:, None], _column(opponent_samples, "judge")[:, None])[:, 0]
        win_rates[opponent] = average_by_prompt(shares, per_prompt)
    length = float(np.mean(figures["length"]))
    return Point(
        label,
        kl=average_by_prompt(figures["kl"], per_prompt),
        reward=average_by_prompt(figures["reward"], per_prompt),
        judge=average_by_prompt(judge_scores, per_prompt),
        n=len(judge_scores),
        wins=win_rates,
        training=training,
        serving=best_of_n_compute(run.matrix_sizes, 1, prompt_tokens=run.mean_prompt_length, completion_tokens=length),
        extra_metrics=run.extra_metrics([line["completion"] for line in samples]),
        prompts=run.groups,
    )


def _column(samples: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([sample[name] for sample in samples], dtype=float)


def _method_points(run: FinishedRun, method: Method) -> list[Point]:
    """Returns a method's points, averaged over seeds, from finished parts with the run's current models and data."""
    if method == "best-of-n":
        return _best_of_n_points(run)
    by_settings: dict[tuple[float | None, float | None], list[Point]] = defaultdict(list)
    for record in _finished_records(run, sorted((run.folder / method).glob("*seed-*"))):
        document = record.read()
        compute = Compute.from_json(document["compute"])
        if method in ("rloo", "rejection"):
            compute = compute + run.reward_training_compute
        samples = read_json_lines(record.path / "samples.jsonl")
        settings = document.get("beta"), document["resolved"]["arguments"].get("learning_rate")
        by_settings[settings].append(_policy_point(run, f"seed {document['seed']}", samples, compute))
    has_several_rates = len({rate for _, rate in by_settings}) > 1
    points = []
    for beta, rate in sorted(by_settings, key=lambda settings: (settings[0] or 0.0, settings[1] or 0.0)):
        label = _LABELS_WITHOUT_BETA[method] if beta is None else f"β = {beta:g}"
        if has_several_rates:
            label += ", its own learning rate" if rate is None else f", learning rate {rate:g}"
        points.append(average_points(by_settings[beta, rate], label=label))
    return points


def _finished_records(run: FinishedRun, folders: Sequence[Path]) -> Iterator[StageRecord]:
    """Yields the records of finished parts that used the run's current data, evaluation, reward and starting models."""
    current = run.part_settings()
    for folder in folders:
        record = StageRecord(folder)
        document = record.read()
        if document.get("status") == "finished" and all(
            document["resolved"].get(key) == current[key] for key in current
        ):
            yield record


def _read_pool(run: FinishedRun) -> dict[str, Floats] | None:
    """Returns reward, judge score and length of best-of-n's samples, (P, N) each; None if no samples were drawn."""
    record = next(_finished_records(run, [run.folder / "best-of-n"]), None)
    if record is None:
        return None
    rows = sorted(record.metrics(), key=lambda row: row["step"])
    return {name: np.array([row[name] for row in rows]) for name in ("reward", "judge", "length")}


def _best_of_n_points(run: FinishedRun) -> list[Point]:
    pool = _read_pool(run)
    if pool is None:
        return []
    rewards, judge_scores = pool["reward"], pool["judge"]
    n_values = [n for n in N_VALUES if n <= rewards.shape[1]]
    best_rewards = expected_best_of_n(rewards, n_values)
    best_judge_scores = expected_best_of_n(rewards, n_values, judge=judge_scores)
    win_rates = {}
    for opponent, samples in run.policy_samples.items():
        shares = win_shares(judge_scores, _column(samples, "judge").reshape(-1, run.samples_per_prompt))
        win_rates[opponent] = expected_best_of_n(rewards, n_values, judge=shares)
    length = float(pool["length"].mean())
    return [
        Point(
            f"n = {n}",
            kl=np.full(len(rewards), float(best_of_n_kl(n))),
            reward=best_rewards[index],
            judge=best_judge_scores[index],
            n=rewards.size,
            wins={opponent: rates[index] for opponent, rates in win_rates.items()},
            kl_is_bound=True,
            training=run.reward_training_compute if n > 1 else Compute(),
            serving=best_of_n_compute(
                run.matrix_sizes, n, prompt_tokens=run.mean_prompt_length, completion_tokens=length
            ),
            prompts=run.groups,
        )
        for index, n in enumerate(n_values)
    ]


def write_report(run: FinishedRun, method: Method, *, served: int | None) -> dict[str, Any]:
    """Writes METHOD/baseline.json, frontier.json and frontier.png from all finished parts.

    Args:
        run: The run that the methods are compared with.
        method: The method that this command ran.
        served: Number of served completions whose compute is added to that of training; None for the number of
            evaluated completions.

    Returns:
        The content of frontier.json.
    """
    context, seed, pool = run.context, run.context.shared.seed, _read_pool(run)
    training = run.ppo_training_compute + run.reward_training_compute
    sft = _policy_point(run, "SFT", run.policy_samples["sft"], Compute())
    ppo, other_betas = _ppo_points(run, _policy_point(run, "PPO", run.policy_samples["ppo"], training))
    comparison = PPOComparison(sft, ppo, other_betas, seed, ppo.n if served is None else served)
    methods = {name: points for name in METHODS if (points := _method_points(run, name))}
    description = {
        "schema": 1,
        "recipe": context.recipe.name,
        "command": context.command,
        "evaluation": context.record("eval").read()["fingerprint"],
        "seed": seed,
        "judge": run.judge_name,
        "prompts": count_distinct_prompts(run.rows["prompt"]),
        "rows": len(run.rows),
        "samples_per_prompt": run.samples_per_prompt,
        "served": comparison.served,
        "sft": comparison.row(sft),
        "ppo": comparison.row(ppo),
    }
    series = {name: comparison.rows(points) for name, points in methods.items()}
    fit = comparison.fit_best_of_n(methods.get("best-of-n", []))
    frontier = {
        **description,
        "trivial": read_json(context.record("eval").path / "evaluation.json").get("trivial"),
        "fits": {"best-of-n": fit} if fit else {},
        "filter": None if pool is None else lowest_kl_filter(pool["reward"], pool["judge"], float(ppo.reward.mean())),
        "ppo_ablation": [comparison.row(point) for point in other_betas],
        "methods": series,
        "commands": {name: _last_command(run, name, method) for name in methods},
        # The method "sft" starts from the base model, so its line does not begin at SFT's point.
        "equal_kl": {name: comparison.at_equal_kl(points) for name, points in methods.items() if name != "sft"},
        "equal_compute": {name: comparison.at_equal_compute(points) for name, points in methods.items()},
    }
    method_document = {**description, "method": method, "points": series.get(method, [])}
    write_json(run.folder / method / "baseline.json", method_document)
    write_json(run.folder / "frontier.json", frontier)
    plot_frontier(frontier, run.folder / "frontier.png")
    return frontier


def _last_command(run: FinishedRun, method: Method, current_method: Method) -> str:
    """Returns the command that last ran a method."""
    if method == current_method:
        return run.context.command
    path = run.folder / method / "baseline.json"
    return str(read_json(path)["command"]) if path.is_file() else ""
