"""Reports the baselines of a run next to PPO: a point of KL, reward and judge score for each policy."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluation.compute import Compute, best_of_n_compute
from ...evaluation.frontier import Floats, Point, average_by_prompt, average_points, cheapest_filter, win_shares
from ...evaluation.frontier_report import PPOComparison
from ...evaluation.head_to_head import read_lines, read_samples
from ...evaluation.overoptimization import best_of_n_kl, expected_best_of_n
from ...fileio import read_json, write_json
from ...modeling.prompt_keys import count_distinct_prompts
from ...publishing.plots import plot_frontier
from ...runs.record import StageRecord, first_difference
from .baseline import METHODS, POOL_SIZES, Baseline, Method
from .sweep import ABLATION

#: Labels of the methods that train one policy per seed.
_LABELS_WITHOUT_BETA: dict[Method, str] = {"sft": "twice as long", "rejection": "on completions above the mean reward"}


def _ppo_points(baseline: Baseline, ppo: Point) -> tuple[Point, list[Point]]:
    """Returns PPO's point, averaged over seeds, and a point at each other β.

    The finished runs of `rlhf-zoo ablate --kl_coef LIST --seeds N` that differ from the run only in β and seed are
    used. The compute of runs at another β is not counted, because they only show what PPO reaches at another KL.
    """
    run, ppo_args = baseline.context.directory, baseline.context.settings("ppo").trainer
    by_beta: dict[float, dict[int, Point]] = defaultdict(dict)
    by_beta[ppo_args.kl_coef][ppo_args.seed] = replace(ppo, label=f"seed {ppo_args.seed}")
    for folder in sorted((run / ABLATION).glob("kl-coef-*")):
        if all(
            _differs_only_in(("kl_coef", "seed", "release"), folder / stage, run / stage) for stage in ("ppo", "eval")
        ):
            resolved = StageRecord(folder / "ppo").read()["resolved"]
            beta, seed = resolved.get("kl_coef", ppo_args.kl_coef), resolved.get("seed", ppo_args.seed)
            if beta == ppo_args.kl_coef and _release_rule(folder) != _release_rule(run):
                continue  # seeds are averaged only if the same rule chose their checkpoints
            lines = read_samples(
                folder / "eval" / "samples.jsonl", baseline.rows["prompt"], baseline.samples_per_prompt
            )
            ppo_lines = [line["ppo"] for line in lines]
            by_beta[beta].setdefault(seed, _point_of(baseline, f"seed {seed}", ppo_lines, Compute()))
    points = {
        beta: average_points(list(seeds.values()), label=f"PPO, β = {beta:g}")
        if len(seeds) > 1
        else next(iter(seeds.values()))
        for beta, seeds in sorted(by_beta.items())
    }
    mean = points.pop(ppo_args.kl_coef)
    ablated = [replace(point, label=f"PPO, β = {beta:g}") for beta, point in points.items()]
    return replace(mean, label=ppo.label, training=ppo.training, serving=ppo.serving), ablated


def _release_rule(run: Path) -> str | None:
    """Returns the rule that chose the checkpoint that a run sampled."""
    return (StageRecord(run / "ppo").read().get("chosen") or {}).get("rule")


def _differs_only_in(keys: Sequence[str], stage: Path, base: Path) -> bool:
    """Whether a stage is finished and its settings differ from the base run's only in these keys."""
    record, base_settings = StageRecord(stage).read(), StageRecord(base).read()["resolved"]
    if record.get("status") != "finished":
        return False
    settings = [
        {
            **{key: value for key, value in resolved.items() if key not in (*keys, "parents")},
            "parents": {role: parent for role, parent in resolved["parents"].items() if role != "ppo"},
        }
        for resolved in (record["resolved"], base_settings)
    ]
    return first_difference(*settings) is None


def _point_of(baseline: Baseline, label: str, lines: Sequence[Mapping[str, Any]], training: Compute) -> Point:
    """Computes the point of a policy from its P · samples lines of samples.jsonl, ordered by prompt."""
    samples = baseline.samples_per_prompt
    scores = {name: _column(lines, name) for name in ("reward", "judge", "kl", "length")}
    judge, win_rates = scores["judge"], {}
    for side, opponent in baseline.lines.items():
        # Samples of the same prompt that were drawn with the same random numbers are compared: 1, 0 or one half.
        win_rates[side] = average_by_prompt(
            win_shares(judge[:, None], _column(opponent, "judge")[:, None])[:, 0], samples
        )
    return Point(
        label,
        average_by_prompt(scores["kl"], samples),
        average_by_prompt(scores["reward"], samples),
        average_by_prompt(judge, samples),
        len(judge),
        win_rates,
        training=training,
        serving=best_of_n_compute(
            baseline.matrix_sizes,
            1,
            prompt_tokens=baseline.prompt_tokens,
            completion_tokens=float(np.mean(scores["length"])),
        ),
        extra_metrics=baseline.extra_metrics([line["completion"] for line in lines]),
        prompts=baseline.groups,
    )


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([line[name] for line in lines], dtype=float)


def _points_of(baseline: Baseline, method: Method) -> list[Point]:
    """Returns a method's points, averaged over seeds, from finished parts with the run's present models and data."""
    if method == "best-of-n":
        return _best_of_n_points(baseline)
    by_settings: dict[tuple[float | None, float | None], list[Point]] = defaultdict(list)
    for record in _finished_records(baseline, sorted((baseline.folder / method).glob("*seed-*"))):
        document = record.read()
        compute = Compute.from_json(document["compute"])
        if method in ("rloo", "rejection"):
            compute = compute + baseline.reward_training
        lines = read_lines(record.path / "samples.jsonl")
        settings = document.get("beta"), document["resolved"]["arguments"].get("learning_rate")
        by_settings[settings].append(_point_of(baseline, f"seed {document['seed']}", lines, compute))
    several_rates = len({rate for _, rate in by_settings}) > 1
    points = []
    for beta, rate in sorted(by_settings, key=lambda settings: (settings[0] or 0.0, settings[1] or 0.0)):
        label = _LABELS_WITHOUT_BETA[method] if beta is None else f"β = {beta:g}"
        suffix = f", {'its own learning rate' if rate is None else f'learning rate {rate:g}'}" if several_rates else ""
        points.append(average_points(by_settings[beta, rate], label=label + suffix))
    return points


def _finished_records(baseline: Baseline, folders: Sequence[Path]) -> Iterator[StageRecord]:
    """Yields the records of finished parts with the same prompts, SFT policy and reward model as the run has now."""
    current = baseline.resolved()
    for folder in folders:
        record = StageRecord(folder)
        document = record.read()
        if document.get("status") == "finished" and all(
            document["resolved"].get(key) == current[key] for key in current
        ):
            yield record


def _read_pool(baseline: Baseline) -> dict[str, Floats] | None:
    """Returns reward, judge and length of best-of-n's samples, (P, N) each; None if they were not drawn."""
    for record in _finished_records(baseline, [baseline.folder / "best-of-n"]):
        rows = sorted(record.metrics(), key=lambda row: row["step"])
        return {name: np.array([row[name] for row in rows]) for name in ("reward", "judge", "length")}
    return None


def _best_of_n_points(baseline: Baseline) -> list[Point]:
    pool = _read_pool(baseline)
    if pool is None:
        return []
    reward, judge = pool["reward"], pool["judge"]
    sizes = [n for n in POOL_SIZES if n <= reward.shape[1]]
    chosen, judge_scores = expected_best_of_n(reward, sizes), expected_best_of_n(reward, sizes, judge=judge)
    win_rates = {}
    for side, opponent in baseline.lines.items():
        opponent_scores = _column(opponent, "judge").reshape(-1, baseline.samples_per_prompt)
        win_rates[side] = expected_best_of_n(reward, sizes, judge=win_shares(judge, opponent_scores))
    length = float(pool["length"].mean())
    return [
        Point(
            f"n = {n}",
            np.full(len(reward), float(best_of_n_kl(n))),
            chosen[index],
            judge_scores[index],
            reward.size,
            {side: values[index] for side, values in win_rates.items()},
            kl_is_bound=True,
            training=baseline.reward_training if n > 1 else Compute(),
            serving=best_of_n_compute(
                baseline.matrix_sizes, n, prompt_tokens=baseline.prompt_tokens, completion_tokens=length
            ),
            prompts=baseline.groups,
        )
        for index, n in enumerate(sizes)
    ]


def write_report(baseline: Baseline, method: Method, *, served: int | None) -> dict[str, Any]:
    """Writes METHOD/baseline.json, frontier.json and frontier.png from all finished parts.

    Args:
        baseline: The run to compare with.
        method: The method that this command ran.
        served: Number of served completions whose compute is added to training; None for as many as were evaluated.
    """
    context, seed, pool = baseline.context, baseline.context.shared.seed, _read_pool(baseline)
    sft = _point_of(baseline, "SFT", baseline.lines["sft"], Compute())
    ppo = _point_of(baseline, "PPO", baseline.lines["ppo"], baseline.ppo_training + baseline.reward_training)
    ppo, ablated = _ppo_points(baseline, ppo)
    comparison = PPOComparison(sft, ppo, ablated, seed, ppo.n if served is None else served)
    methods = {name: points for name in METHODS if (points := _points_of(baseline, name))}
    description = {
        "schema": 1,
        "recipe": context.recipe.name,
        "command": context.command,
        "evaluation": context.record("eval").read()["fingerprint"],
        "seed": seed,
        "judge": baseline.judge,
        "prompts": count_distinct_prompts(baseline.rows["prompt"]),
        "rows": len(baseline.rows),
        "samples_per_prompt": baseline.samples_per_prompt,
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
        "filter": None if pool is None else cheapest_filter(pool["reward"], pool["judge"], float(ppo.reward.mean())),
        "ppo_ablation": [comparison.row(point) for point in ablated],
        "methods": series,
        "commands": {name: _last_command(baseline, name, method) for name in methods},
        # The method "sft" starts from the base model, so its line does not begin at SFT's point.
        "equal_kl": {name: comparison.at_equal_kl(points) for name, points in methods.items() if name != "sft"},
        "equal_compute": {name: comparison.at_equal_compute(points) for name, points in methods.items()},
    }
    method_document = {**description, "method": method, "points": series.get(method, [])}
    write_json(baseline.folder / method / "baseline.json", method_document)
    write_json(baseline.folder / "frontier.json", frontier)
    plot_frontier(frontier, baseline.folder / "frontier.png")
    return frontier


def _last_command(baseline: Baseline, method: Method, current: Method) -> str:
    """Returns the command that last ran a method."""
    if method == current:
        return baseline.context.command
    path = baseline.folder / method / "baseline.json"
    return str(read_json(path)["command"]) if path.is_file() else ""
