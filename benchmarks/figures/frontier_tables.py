"""The tables of docs/baselines.md: PPO and what is simpler, at their own points, at equal KL and at equal compute."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import keep
from .experiments import METHODS, Experiment
from .run_tables import kept
from .text import NOTHING, code, listed, made, number, spread, table

Told = Mapping[str, Any]


def baselines_table(experiment: Experiment) -> str:
    """The frontier of the first seed's run, and PPO's spread over the seeds of whole runs."""
    frontier = keep.load(experiment.name("baselines"))
    if not frontier:
        return NOTHING
    tested = frontier["prompts"] * frontier["samples_per_prompt"]
    # Runs that were tested on other prompts differ also by these.
    runs = [run for run in kept(experiment, "runs") if run["win_rate"]["n"] == tested]
    own = f"PPO, β = {experiment.beta:g}"
    headings = ["", "KL", "reward", "judge", "each seed's judge", "win rate over SFT", "over PPO", "10¹² FLOPs"]
    label = own if frontier["ppo"].get("seeds") else f"{own}, seed {frontier['seed']}"
    rows = [_point("SFT", frontier["sft"]), _point(label, frontier["ppo"])]
    if len(runs) > 1:
        rows.append(_over_seeds(own, runs))
    # What the ablation computed is not counted, and its serving alone would look like all.
    rows += [[*_point(one["label"], one)[:-1], ""] for one in frontier["ppo_ablation"]]
    rows += [_point(label, one) for label, one in _points(frontier)]
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
        text += f" Left out, since not finished: {listed(missing)}."
    blocks = [
        table(headings, rows),
        text,
        _training(experiment, frontier),
        _equal_kl(frontier),
        _equal_compute(frontier),
        *_fits(frontier),
    ]
    return "\n\n".join([*blocks, made(*map(code, frontier["commands"].values()))])


def _points(frontier: Told) -> Iterator[tuple[str, Told]]:
    for method in METHODS:
        for one in frontier["methods"].get(method, []):
            yield f"{method}, {one['label']}", one


def _point(label: str, point: Told) -> list[str]:
    kl = ("≤ " if point["kl"]["is_bound"] else "") + number(point["kl"]["value"], 2)
    each = ", ".join(number(one["judge"], 2) for one in point.get("seeds", []))
    won = [f"{point['win_rate'][side]['value']:.3f}" for side in ("sft", "ppo")]
    return [label, kl, _interval(point["reward"]), _interval(point["judge"]), each, *won, _flops(point["compute"])]


def _trivial(frontier: Told) -> Iterator[list[str]]:
    """What needs no training, as the evaluation of the run has it: beside SFT alone."""
    for one in (frontier.get("trivial") or {}).get("policies", []):
        reward = _interval(one["reward"]) if one["reward"] else ""
        yield [one["name"], "", reward, _interval(one["judge"]), "", f"{one['win_rate']['value']:.3f}", "", ""]


def _filter(frontier: Told) -> Iterator[list[str]]:
    """SFT's best samples by the reward, as many as have PPO's mean reward: the price in nats to beat."""
    if result := frontier.get("filter"):
        kl, reward, judge = (number(result[name], 2) for name in ("kl", "reward", "judge"))
        yield [f"a filter: the best {result['share']:.1%} of SFT's samples", kl, reward, judge, "", "", "", ""]


def _over_seeds(own: str, runs: Sequence[Told]) -> list[str]:
    of = f"{own}, {len(runs)} whole runs"
    figures = [spread([run["ppo"][name] for run in runs], 2) for name in ("kl", "reward", "judge")]
    each = ", ".join(number(run["ppo"]["judge"], 2) for run in runs)
    return [of, *figures, each, spread([run["win_rate"]["value"] for run in runs], 3), "", ""]


def _fits(frontier: Told) -> Iterator[str]:
    """The form of Gao et al. 2022 for best-of-n: of the gains over SFT against the root of the bound on its KL."""
    rows = []
    for of, fit in (frontier.get("fits") or {}).get("best-of-n", {}).items():
        peak = fit["peak"]
        told = f"at d = {number(peak['d']['value'], 2)}" if peak else fit["no_peak"]
        title = "reward (the proxy)" if of == "proxy" else "judge"
        rows.append([title, _interval(fit["alpha"]), _interval(fit["beta"]), number(fit["r_squared"], 3), told])
    if rows:
        yield table(["best-of-n: gain d·(α − β·d) of the", "α", "β", "R²", "peak"], rows)


def _training(experiment: Experiment, frontier: Told) -> str:
    """Tokens of each kind, once; a baseline under the β that is nearest the recipe's."""
    rows = [("PPO and its reward model", frontier["ppo"])]
    for method, title in (("rloo", "RLOO, {}, and the reward model"), ("dpo", "DPO, {}")):
        if points := frontier["methods"].get(method):
            nearest = min(points, key=lambda one: abs(float(one["label"].removeprefix("β = ")) - experiment.beta))
            rows.append((title.format(nearest["label"]), nearest))
    rows += [("the reward model alone (best-of-n)", one) for one in frontier["methods"].get("best-of-n", [])[1:2]]
    headings = ["10³ tokens of training", "generated", "read", "trained", "10¹² FLOPs"]
    cells = []
    for title, point in rows:
        passes = point["compute"]["training"]
        tokens = [f"{passes[f'tokens_{kind}'] / 1e3:.0f}" for kind in ("generated", "read", "trained")]
        cells.append([title, *tokens, _flops(passes)])
    return table(headings, cells)


def _equal_kl(frontier: Told) -> str:
    """Each point beside PPO at its KL, where PPO was run under other β; else, and besides, the method at PPO's KL."""
    rows = []
    for label, point in _points(frontier):
        if point["kl"]["value"] > 0 and (there := point.get("ppo_at_its_kl")):
            kl = ("≤ " if point["kl"]["is_bound"] else "") + number(there["kl"], 2)
            rows.append([label, kl, _interval(there["judge"]), _gap(there), there["ppo"]])
    for method in METHODS:
        result = frontier["equal_kl"].get(method)
        if result is None:
            continue
        if result["inside"]:
            rows.append(
                [
                    f"{method}, {result['label']}",
                    number(result["kl"], 2),
                    _interval(result["judge"]),
                    _gap(result),
                    result["ppo"],
                ]
            )
        elif not result.get("farthest"):
            rows.append([method, result["reason"], "", "", ""])
    return table(["at equal KL", "KL", "judge", "PPO there, less this", "PPO read"], rows)


def _equal_compute(frontier: Told) -> str:
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
    told = table(["at most PPO's FLOPs", "share of them", "judge", "PPO less this"], rows)
    even = [
        f"best of {one['label'].removeprefix('n = ')} after {one['break_even']:.0f}"
        for one in frontier["methods"].get("best-of-n", [])
        if one.get("break_even") is not None
    ]
    if not even:
        return told
    return f"{told}\n\nCompletions served until best-of-n has computed as much as PPO: {', '.join(even)}."


def _flops(compute: Told) -> str:
    return f"{compute['flops'] / 1e12:.2f}"


def _gap(found: Told) -> str:
    return _interval(found["ppo_minus_this"]["judge"], sign=True)


def _interval(found: Told, *, sign: bool = False) -> str:
    low, high = (number(end, 2, zero_sign=True) for end in found["ci95"])
    return f"{number(found['value'], 2, sign=sign)} ({low} to {high})"
