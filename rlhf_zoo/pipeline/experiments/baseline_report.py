"""What the baselines of a run came to, beside PPO: at its KL, at its compute, and on one plot."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluation.compute import Compute, best_of_n_compute, break_even
from ...evaluation.frontier import NEAR, Floats, Point, at_kl, best_within, by_prompt, difference, filtered, mixed, wins
from ...evaluation.overoptimization import FEWEST, best_of_n, best_of_n_kl, fit
from ...evaluation.stats import Estimate
from ...fileio import read_json, write_json
from ...publishing.plots import plot_frontier
from ...runs.record import StageRecord, first_difference
from .ablate import FOLDER as ABLATION
from .baseline import METHODS, SIZES, Baseline, Method, read_lines, read_sides

#: Labels of the methods that have one policy a seed.
_UNDER_NO_BETA: dict[Method, str] = {"sft": "twice as long", "rejection": "on what the reward likes"}


def _ppo_line(baseline: Baseline, ppo: Point) -> tuple[Point, list[Point]]:
    """PPO over its seeds, and under each other β: the finished runs of `rlhf-zoo ablate --kl_coef LIST --seeds N` that
    differ from the run in β and seed alone.

    What runs under other β computed is not counted: they say what PPO reaches at a KL that its own run passed by.
    """
    run, own = baseline.context.directory, baseline.context.settings("ppo").trainer
    found: dict[float, dict[int, Point]] = defaultdict(dict)
    found[own.kl_coef][own.seed] = replace(ppo, label=f"seed {own.seed}")
    for folder in sorted((run / ABLATION).glob("kl-coef-*")):
        if all(_differs_in(("kl_coef", "seed"), folder / stage, run / stage) for stage in ("ppo", "eval")):
            resolved = StageRecord(folder / "ppo").read()["resolved"]
            beta, seed = resolved.get("kl_coef", own.kl_coef), resolved.get("seed", own.seed)
            lines = read_sides(folder / "eval" / "samples.jsonl", baseline.rows, baseline.per_prompt)
            found[beta].setdefault(seed, _measured(baseline, f"seed {seed}", lines["ppo"], Compute()))
    points = {
        beta: mixed(list(seeds.values()), label=f"PPO, β = {beta:g}") if len(seeds) > 1 else next(iter(seeds.values()))
        for beta, seeds in sorted(found.items())
    }
    mean = points.pop(own.kl_coef)
    others = [replace(point, label=f"PPO, β = {beta:g}") for beta, point in points.items()]
    return replace(mean, label=ppo.label, training=ppo.training, serving=ppo.serving), others


def _differs_in(keys: Sequence[str], stage: Path, base: Path) -> bool:
    """Whether a finished run of a stage differs from another in nothing but these keys."""
    document, wanted = StageRecord(stage).read(), StageRecord(base).read()["resolved"]
    if document.get("status") != "finished":
        return False
    settings = [
        {
            **{key: value for key, value in resolved.items() if key not in (*keys, "parents")},
            "parents": {role: found for role, found in resolved["parents"].items() if role != "ppo"},
        }
        for resolved in (document["resolved"], wanted)
    ]
    return first_difference(*settings) is None


def _measured(baseline: Baseline, label: str, lines: Sequence[Mapping[str, Any]], training: Compute) -> Point:
    """A policy from what was found of its P · samples completions, by prompt."""
    size = baseline.per_prompt
    scores = {name: _column(lines, name) for name in ("reward", "judge", "kl", "length")}
    judge, won = scores["judge"], {}
    for side, others in baseline.lines.items():
        # The same sample of the same prompt, drawn with the same random numbers: (N,) 1, 0 or one half.
        won[side] = by_prompt(wins(judge[:, None], _column(others, "judge")[:, None])[:, 0], size)
    return Point(
        label,
        by_prompt(scores["kl"], size),
        by_prompt(scores["reward"], size),
        by_prompt(judge, size),
        len(judge),
        won,
        training=training,
        serving=best_of_n_compute(
            baseline.sizes, 1, prompt_tokens=baseline.prompt_tokens, completion_tokens=float(np.mean(scores["length"]))
        ),
        beside=baseline.beside([line["completion"] for line in lines]),
        prompts=baseline.prompt_keys,
    )


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([line[name] for line in lines], dtype=float)


def _points_of(baseline: Baseline, method: Method) -> list[Point]:
    """The points of a method that are finished and started from what the run holds now; seeds of one are one point."""
    if method == "best-of-n":
        return _best_of_n_points(baseline)
    found: dict[tuple[float | None, float | None], list[Point]] = defaultdict(list)
    for record in _finished(baseline, sorted((baseline.folder / method).glob("*seed-*"))):
        document = record.read()
        compute = Compute.from_json(document["compute"])
        if method in ("rloo", "rejection"):
            compute = compute + baseline.reward_training
        lines = read_lines(record.path / "samples.jsonl")
        under = document.get("beta"), document["resolved"]["arguments"].get("learning_rate")
        found[under].append(_measured(baseline, f"seed {document['seed']}", lines, compute))
    several = len({at for _, at in found}) > 1
    points = []
    for beta, at in sorted(found, key=lambda under: (under[0] or 0.0, under[1] or 0.0)):
        label = _UNDER_NO_BETA[method] if beta is None else f"β = {beta:g}"
        told = f", learning rate {'its own' if at is None else f'{at:g}'}" if several else ""
        points.append(mixed(found[beta, at], label=label + told))
    return points


def _finished(baseline: Baseline, folders: Sequence[Path]) -> Iterator[StageRecord]:
    """Records of finished parts that were measured on the same prompts, from the same SFT policy and reward model."""
    now = baseline.resolved()
    for folder in folders:
        record = StageRecord(folder)
        document = record.read()
        if document.get("status") == "finished" and all(document["resolved"].get(key) == now[key] for key in now):
            yield record


def _pool(baseline: Baseline) -> dict[str, Floats] | None:
    """reward, judge and length of SFT's samples, (P, N), where best-of-n drew them."""
    for record in _finished(baseline, [baseline.folder / "best-of-n"]):
        rows = sorted(record.metrics(), key=lambda row: row["step"])
        return {name: np.array([row[name] for row in rows]) for name in ("reward", "judge", "length")}
    return None


def _best_of_n_points(baseline: Baseline) -> list[Point]:
    pool = _pool(baseline)
    if pool is None:
        return []
    reward, judge = pool["reward"], pool["judge"]
    sizes = [n for n in SIZES if n <= reward.shape[1]]
    chosen, judged = best_of_n(reward, sizes), best_of_n(reward, sizes, judge=judge)
    won = {}
    for side, theirs in baseline.lines.items():
        against = _column(theirs, "judge").reshape(-1, baseline.per_prompt)
        won[side] = best_of_n(reward, sizes, judge=wins(judge, against))
    length = float(pool["length"].mean())
    return [
        Point(
            f"n = {n}",
            np.full(len(reward), float(best_of_n_kl(n))),
            chosen[place],
            judged[place],
            reward.size,
            {side: values[place] for side, values in won.items()},
            kl_is_bound=True,
            training=baseline.reward_training if n > 1 else Compute(),
            serving=best_of_n_compute(
                baseline.sizes, n, prompt_tokens=baseline.prompt_tokens, completion_tokens=length
            ),
            prompts=baseline.prompt_keys,
        )
        for place, n in enumerate(sizes)
    ]


def write_report(baseline: Baseline, method: Method, *, served: int | None) -> dict[str, Any]:
    """Writes METHOD/baseline.json, frontier.json and frontier.png over all that is finished; returns the frontier.

    served: completions that compute counts beside training; None takes as many as were evaluated.
    """
    context = baseline.context
    sft = _measured(baseline, "SFT", baseline.lines["sft"], Compute())
    ppo = _measured(baseline, "PPO", baseline.lines["ppo"], baseline.ppo_training + baseline.reward_training)
    ppo, others = _ppo_line(baseline, ppo)
    asked = ppo.n if served is None else served
    seed = context.shared.seed
    found = {one: points for one in METHODS if (points := _points_of(baseline, one))}
    about = {
        "schema": 1,
        "recipe": context.recipe.name,
        "command": context.command,
        "evaluation": context.record("eval").read()["fingerprint"],
        "seed": seed,
        "judge": baseline.judge,
        "prompts": len(set(baseline.prompt_keys)),
        "rows": len(baseline.rows),
        "samples_per_prompt": baseline.per_prompt,
        "served": asked,
        "sft": _told(sft, seed, asked),
        "ppo": _told(ppo, seed, asked),
    }
    series = {
        one: [{**_told(point, seed, asked), **_ppo_there(point, sft, ppo, others, seed)} for point in points]
        for one, points in found.items()
    }
    # Of n = 1 there is none: it is the SFT policy, which serves at PPO's price but for the length of what it writes.
    for document, point in zip(series.get("best-of-n", [])[1:], found.get("best-of-n", [])[1:], strict=True):
        document["break_even"] = break_even(
            ppo.training.flops, ppo.serving.flops, other_training=point.training.flops, other=point.serving.flops
        )
    bent = {"best-of-n": fitted} if (fitted := _fitted(found.get("best-of-n", []), seed)) else {}
    pool = _pool(baseline)
    frontier = {
        **about,
        "trivial": read_json(context.record("eval").path / "evaluation.json").get("trivial"),
        "fits": bent,
        "filter": None if pool is None else filtered(pool["reward"], pool["judge"], float(ppo.reward.mean())),
        "ppo_ablation": [_told(point, seed, asked) for point in others],
        "methods": series,
        "commands": {one: _command(baseline, one, method) for one in found},
        # SFT for longer begins anew, and so not at SFT's KL of 0.
        "equal_kl": {
            one: _at_equal_kl(points, sft, ppo, others, seed) for one, points in found.items() if one != "sft"
        },
        "equal_compute": {one: _at_equal_compute(points, ppo, seed, asked) for one, points in found.items()},
    }
    write_json(
        baseline.folder / method / "baseline.json", {**about, "method": method, "points": series.get(method, [])}
    )
    write_json(baseline.folder / "frontier.json", frontier)
    plot_frontier(frontier, baseline.folder / "frontier.png")
    return frontier


def _command(baseline: Baseline, method: Method, now: Method) -> str:
    """By which a method's points were made last."""
    if method == now:
        return baseline.context.command
    path = baseline.folder / method / "baseline.json"
    return str(read_json(path)["command"]) if path.is_file() else ""


def _fitted(points: Sequence[Point], seed: int) -> dict[str, Any]:
    """d·(α − β·d) of Gao et al. 2022 on the gains of best-of-n over its own n = 1, d the root of the bound on its KL.

    n = 1 is the SFT policy on the samples that are chosen among: the one that was evaluated beside PPO drew others, and
    their difference would bend the form. {} where n has fewer than three values above 1.
    """
    moved = [point for point in points if point.mean_kl > 0]
    if len(moved) < FEWEST:
        return {}
    sft = points[0]
    kl = np.stack([point.by_prompt(point.kl) for point in moved])
    gains = {
        "proxy": np.stack([point.by_prompt(point.reward - sft.reward) for point in moved]),
        "judge": np.stack([point.by_prompt(point.judge - sft.judge) for point in moved]),
    }
    return {name: fit("best-of-n", kl, gain, seed=seed).to_json() for name, gain in gains.items()}


def _told(point: Point, seed: int, served: int) -> dict[str, Any]:
    kl: dict[str, Any] = {"value": point.mean_kl, "ci95": None, "n": point.n}
    if not point.kl_is_bound:
        kl = point.estimate(point.kl, seed=seed).to_json()
    document: dict[str, Any] = {
        "label": point.label,
        "kl": {**kl, "is_bound": point.kl_is_bound},
        **{name: point.estimate(getattr(point, name), seed=seed).to_json() for name in ("reward", "judge")},
        "win_rate": {side: point.rate(values).to_json() for side, values in point.wins.items()},
        "beside": {name: _beside(name, values, point, seed).to_json() for name, values in point.beside.items()},
        "compute": {
            "training": point.training.to_json(),
            "serving": point.serving.to_json(),
            "flops": point.flops(served),
        },
    }
    if point.seeds:
        names = ("reward", "judge", "kl")
        document["seeds"] = [
            {"label": one.label, **{name: float(getattr(one, name).mean()) for name in names}} for one in point.seeds
        ]
    return document


def _beside(name: str, values: Floats, point: Point, seed: int) -> Estimate:
    """A rule's score of each completion is any number; what is made of all of a prompt's is a share of prompts."""
    if name.startswith("rule:"):
        return point.estimate(values, seed=seed)
    return point.rate(values, n=len(values) * max(1, len(point.seeds)))


def _at_equal_kl(points: Sequence[Point], sft: Point, ppo: Point, others: Sequence[Point], seed: int) -> dict[str, Any]:
    """A method at PPO's KL. Every method begins at SFT, its β being infinite there, or its n one.

    Where it does not go so far, or was not measured near it, and PPO was run under other β, PPO is read at the KL of
    the method's farthest point.
    """
    line = points if points[0].kl_is_bound else [sft, *points]
    found = at_kl(line, ppo.mean_kl)
    if found is not None:
        # Of a mixture KL is linear in its share, and not √KL: what it was read at is told.
        return {"inside": True, **_compared(found, ppo, seed), "kl": ppo.mean_kl}
    reach = sorted(max(0.0, one.mean_kl) for one in line)  # a mean of log-ratios may lie below
    outside = f"outside its range: KL {reach[0]:.2f} to {reach[-1]:.2f}, and PPO's is {ppo.mean_kl:.2f}"
    if reach[0] <= ppo.mean_kl <= reach[-1]:
        below, above = max(one for one in reach if one <= ppo.mean_kl), min(one for one in reach if one >= ppo.mean_kl)
        outside = (
            f"not measured: its points next to PPO's KL of {ppo.mean_kl:.2f} are at {below:.2f} and {above:.2f}, more "
            f"than {NEAR} √nats apart; run one between"
        )
    farthest = max(points, key=lambda one: one.mean_kl)
    there = _ppo_there(farthest, sft, ppo, others, seed)
    return {"inside": False, "said": outside, "farthest": there.get("ppo_at_its_kl")}


def _ppo_there(point: Point, sft: Point, ppo: Point, others: Sequence[Point], seed: int) -> dict[str, Any]:
    """PPO at the KL of another's point, where PPO was run under other β; {} where it was not, or not so far."""
    there = at_kl([sft, *others, ppo], point.mean_kl) if others else None
    return {} if there is None else {"ppo_at_its_kl": _compared(point, there, seed)}


def _at_equal_compute(points: Sequence[Point], ppo: Point, seed: int, served: int) -> dict[str, Any]:
    """The highest judge of a method within PPO's FLOPs."""
    limit = ppo.flops(served)
    found = best_within(points, limit, served=served)
    if found is None:
        least = min(one.flops(served) for one in points) / limit
        return {"inside": False, "said": f"every point takes more: the cheapest {least:.2f} times PPO's FLOPs"}
    return {"inside": True, "share_of_flops": found.flops(served) / limit, **_compared(found, ppo, seed)}


def _compared(found: Point, ppo: Point, seed: int) -> dict[str, Any]:
    estimates = {name: found.estimate(getattr(found, name), seed=seed).to_json() for name in ("judge", "reward")}
    less = difference(ppo, found, seed=seed)
    return {"label": found.label, "kl": found.mean_kl, **estimates, "ppo": ppo.label, "ppo_less_this": less}
