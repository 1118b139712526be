"""The tables of docs/baselines.md: PPO and simpler methods, as measured, at equal KL and at equal compute."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import keep
from .experiments import METHODS, Experiment
from .run_tables import kept_runs
from .text import NOTHING, code, join, made_by, number, spread, table

Figures = Mapping[str, Any]


def baselines_table(experiment: Experiment) -> str:
    """The frontier of the first seed's run, PPO's spread over complete runs, and the comparisons at equal cost."""
    frontier = keep.load(experiment.name("baselines"))
    if not frontier:
        return NOTHING
    completions = frontier["prompts"] * frontier["samples_per_prompt"]
    # Runs with other test prompts are left out: their figures would also differ by the prompts.
    runs = [run for run in kept_runs(experiment, "runs") if run["win_rate"]["n"] == completions]
    own = f"PPO, β = {experiment.beta:g}"
    headings = ["", "KL", "reward", "judge", "each seed's judge", "win rate over SFT", "over PPO", "10¹² FLOPs"]
    label = own if frontier["ppo"].get("seeds") else f"{own}, seed {frontier['seed']}"
    rows = [_point("SFT", frontier["sft"]), _point(label, frontier["ppo"])]
    if len(runs) > 1:
        rows.append(_over_seeds(own, runs))
    # The ablation's training FLOPs are not counted, and those of serving alone would mislead.
    rows += [[*_point(point["label"], point)[:-1], ""] for point in frontier["ppo_ablation"]]
    rows += [_point(label, point) for label, point in _labeled_points(frontier)]
    rows += [*_trivial(frontier), *_filter(frontier)]
    text = (
        f"Judge: {frontier['judge']}, on {frontier['prompts']} held-out prompts with {frontier['samples_per_prompt']} "
        f"completions each; {frontier['served']} completions are served. In brackets 95% intervals over prompts"
    )
    text += (
        "; of PPO over whole runs, each with a seed, an SFT and a reward model of its own, the range over them."
        if len(runs) > 1
        else "."
    )
    missing = [method for method in METHODS if method not in frontier["methods"]]
    if missing:
        text += f" Left out, since not finished: {join(missing)}."
    blocks = [
        table(headings, rows),
        text,
        _training(experiment, frontier),
        _equal_kl(frontier),
        _equal_compute(frontier),
        *_fits(frontier),
    ]
    return "\n\n".join([*blocks, made_by(*map(code, frontier["commands"].values()))])


def _labeled_points(frontier: Figures) -> Iterator[tuple[str, Figures]]:
    for method in METHODS:
        for point in frontier["methods"].get(method, []):
            yield f"{method}, {point['label']}", point


def _point(label: str, point: Figures) -> list[str]:
    kl = ("≤ " if point["kl"]["is_bound"] else "") + number(point["kl"]["value"], 2)
    by_seed = ", ".join(number(row["judge"], 2) for row in point.get("seeds", []))
    win_rates = [f"{point['win_rate'][side]['value']:.3f}" for side in ("sft", "ppo")]
    figures = [_interval(point["reward"]), _interval(point["judge"]), by_seed, *win_rates, _flops(point["compute"])]
    return [label, kl, *figures]


def _trivial(frontier: Figures) -> Iterator[list[str]]:
    """Rows of policies without training, from the run's evaluation, which compares them only with SFT."""
    for policy in (frontier.get("trivial") or {}).get("policies", []):
        reward = _interval(policy["reward"]) if policy["reward"] else ""
        yield [policy["name"], "", reward, _interval(policy["judge"]), "", f"{policy['win_rate']['value']:.3f}", "", ""]


def _filter(frontier: Figures) -> Iterator[list[str]]:
    """A row of SFT's best samples by reward, so many that their mean is PPO's: the KL that PPO should not exceed."""
    if result := frontier.get("filter"):
        kl, reward, judge = (number(result[name], 2) for name in ("kl", "reward", "judge"))
        yield [f"a filter: the best {result['share']:.1%} of SFT's samples", kl, reward, judge, "", "", "", ""]


def _over_seeds(own: str, runs: Sequence[Figures]) -> list[str]:
    label = f"{own}, {len(runs)} whole runs"
    figures = [spread([run["ppo"][name] for run in runs], 2) for name in ("kl", "reward", "judge")]
    by_seed = ", ".join(number(run["ppo"]["judge"], 2) for run in runs)
    return [label, *figures, by_seed, spread([run["win_rate"]["value"] for run in runs], 3), "", ""]


def _fits(frontier: Figures) -> Iterator[str]:
    """The table of best-of-n's fits by Gao et al. 2022: gain over SFT against d, the root of the bound on its KL."""
    rows = []
    for score, fit in (frontier.get("fits") or {}).get("best-of-n", {}).items():
        peak = fit["peak"]
        peak_text = f"at d = {number(peak['d']['value'], 2)}" if peak else fit["no_peak"]
        title = "reward (the proxy)" if score == "proxy" else "judge"
        rows.append([title, _interval(fit["alpha"]), _interval(fit["beta"]), number(fit["r_squared"], 3), peak_text])
    if rows:
        yield table(["best-of-n: gain d·(α − β·d) of the", "α", "β", "R²", "peak"], rows)


def _training(experiment: Experiment, frontier: Figures) -> str:
    """The table of training tokens by kind; of a baseline, for the β nearest to the recipe's."""
    rows = [("PPO and its reward model", frontier["ppo"])]
    for method, title in (("rloo", "RLOO, {}, and the reward model"), ("dpo", "DPO, {}")):
        if points := frontier["methods"].get(method):
            nearest = min(points, key=lambda point: abs(float(point["label"].removeprefix("β = ")) - experiment.beta))
            rows.append((title.format(nearest["label"]), nearest))
    rows += [("the reward model alone (best-of-n)", point) for point in frontier["methods"].get("best-of-n", [])[1:2]]
    headings = ["10³ tokens of training", "generated", "read", "trained", "10¹² FLOPs"]
    cells = []
    for title, point in rows:
        passes = point["compute"]["training"]
        tokens = [f"{passes[f'tokens_{kind}'] / 1e3:.0f}" for kind in ("generated", "read", "trained")]
        cells.append([title, *tokens, _flops(passes)])
    return table(headings, cells)


def _equal_kl(frontier: Figures) -> str:
    """The table at equal KL: PPO read at each point's KL, if it was run under several β, and methods at PPO's KL."""
    rows = []
    for label, point in _labeled_points(frontier):
        if point["kl"]["value"] > 0 and (ppo := point.get("ppo_at_its_kl")):
            kl = ("≤ " if point["kl"]["is_bound"] else "") + number(ppo["kl"], 2)
            rows.append([label, kl, _interval(ppo["judge"]), _gap(ppo), ppo["ppo"]])
    for method in METHODS:
        result = frontier["equal_kl"].get(method)
        if result is None:
            continue
        if result["inside"]:
            label, kl = f"{method}, {result['label']}", number(result["kl"], 2)
            rows.append([label, kl, _interval(result["judge"]), _gap(result), result["ppo"]])
        elif not result.get("farthest"):
            rows.append([method, result["reason"], "", "", ""])
    return table(["at equal KL", "KL", "judge", "PPO there, less this", "PPO read"], rows)


def _equal_compute(frontier: Figures) -> str:
    rows = []
    for method in METHODS:
        result = frontier["equal_compute"].get(method)
        if result is None:
            continue
        if result["inside"]:
            share = f"{result['share_of_flops']:.2f}"
            rows.append([f"{method}, {result['label']}", share, _interval(result["judge"]), _gap(result)])
        else:
            rows.append([method, result["reason"], "", ""])
    content = table(["at most PPO's FLOPs", "share of them", "judge", "PPO less this"], rows)
    break_evens = [
        f"best of {point['label'].removeprefix('n = ')} after {point['break_even']:.0f}"
        for point in frontier["methods"].get("best-of-n", [])
        if point.get("break_even") is not None
    ]
    if not break_evens:
        return content
    return f"{content}\n\nCompletions served until best-of-n has computed as much as PPO: {', '.join(break_evens)}."


def _flops(compute: Figures) -> str:
    return f"{compute['flops'] / 1e12:.2f}"


def _gap(comparison: Figures) -> str:
    return _interval(comparison["ppo_minus_this"]["judge"], sign=True)


def _interval(estimate: Figures, *, sign: bool = False) -> str:
    low, high = (number(end, 2, keep_zero_sign=True) for end in estimate["ci95"])
    return f"{number(estimate['value'], 2, sign=sign)} ({low} to {high})"
