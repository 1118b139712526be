"""The card of a policy trained with PPO."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...fileio import is_finite
from ...runs.registry import REWARD_ROLES
from .. import plots
from ..plot_parts import over_training_title
from . import markdown
from .data import DataPart, evaluated_on, stage_setting
from .facts import StageFacts
from .hacking_signs import reward_parts, signs, watched_metrics
from .kl import kl_settings, penalty_varies
from .markdown import Raw
from .parts import (
    FIGURES,
    HEADLINE,
    TEMPLATES,
    Draw,
    Metric,
    StageCard,
    policy_figures,
    selected_samples,
    unmeasured_figures,
)
from .report import answer_rows, judge_notes
from .summary import example, headline, kind_of_verdict, verdict
from .watch_out import watch_out

_PANELS: tuple[plots.Panel, ...] = (
    ("completions/length", "Length", "tokens"),
    ("objective/entropy", "Entropy", "nats per token"),
    ("policy/clipfrac", "Clip fraction", "share of actions"),
    ("loss/value", "Value loss", "squared reward"),
)
#: Method of `rlhf-zoo baseline` -> its description, as the predicate of a sentence.
_METHOD_DESCRIPTIONS = {
    "best-of-n": "samples n completions from the SFT policy and keeps the one with the highest reward",
    "sft": "runs the SFT stage for twice as long",
    "rejection": "samples as many completions as PPO did from the SFT policy, and continues SFT on the best by reward",
    "dpo": "trains the SFT policy on pairs with trl's DPOTrainer",
    "rloo": "trains the SFT policy on the same reward with trl's RLOOTrainer",
}


def _model_index_metrics(facts: StageFacts) -> Iterator[tuple[DataPart, list[Metric]]]:
    judge = (facts.evaluation.get("judge") or {}).get("name")
    figures = {
        "win_rate": f"win rate over {facts.initial_policy}{f', by {markdown.judge_title(judge)}' if judge else ''}",
        "kl": _kl_title(facts),
        **{key: name for key, name in FIGURES.items() if key != "kl"},
    }
    estimates = {key: facts.estimate(*(("win_rate",) if key == "win_rate" else ("ppo", key))) for key in figures}
    yield evaluated_on(facts), [(key, (estimates[key] or {}).get("value"), name) for key, name in figures.items()]


def _kl_title(facts: StageFacts) -> str:
    return f"KL to {facts.initial_policy}, nats per completion"


def _draw(facts: StageFacts, draw: Draw) -> None:
    rows, mark = facts.metrics, facts.plot_marker_step
    panels = _PANELS
    if any(row.get("completions/eos_rate", 1) < 1 for row in rows):
        panels += (("completions/eos_rate", "Ended with EOS", "share of completions"),)
    panels += tuple(
        (key, f"{key.partition('/')[2]} (watched)", "mean of the rollouts") for key in watched_metrics(facts)
    )
    if penalty_varies(facts):
        panels += (("kl_coef", "β, the KL coefficient", "reward per nat"),)
    over_training = facts.evaluation.get("over_training")
    trajectory = over_training if isinstance(over_training, Mapping) and over_training.get("checkpoints") else None
    title = over_training_title(trajectory, facts.initial_policy) if trajectory else ""
    alternative_text = f"{title}; KL to {facts.initial_policy}, at each checkpoint"
    options = {"initial_policy": facts.initial_policy}
    draw("over_training", alternative_text, plots.plot_over_training, trajectory, **options)
    draw("reward_kl", "Reward and KL against the step", plots.plot_reward_and_kl, rows, mark=mark)
    draw("reward_sqrt_kl", "Reward against √KL", plots.plot_reward_against_kl, rows, mark=mark)
    alternative_text = "Training reward and judge against √KL, at each checkpoint"
    draw("against_kl", alternative_text, plots.plot_against_kl, trajectory, **options)
    alternative_text = "Judge and reward of PPO and of baselines against √KL"
    draw("baselines", alternative_text, plots.plot_frontier, facts.frontier, **options)
    titles = ", ".join(title[0].lower() + title[1:] for _, title, _ in panels)
    draw("training", f"Against the step: {titles}", plots.plot_panels, rows, panels, mark=mark)


def _variables(facts: StageFacts) -> dict[str, Any]:
    return {
        "headline": HEADLINE,
        "figures": policy_figures(facts),
        "kl": kl_settings(facts),
        "ptx_config": stage_setting(facts, "ptx_dataset_config"),
        "penalty_varies": penalty_varies(facts),
        "answer_rows": list(answer_rows(facts.evaluation.get("judges") or {})),
        "frontier": facts.frontier,
        "methods": _METHOD_DESCRIPTIONS,
        "baselines": list(_baselines(facts)),
        "extra_judges": list((facts.frontier.get("sft") or {}).get("extra_metrics") or {}),
        "other_judges": _other_judges(facts),
        "judge_notes": _judge_notes(_main_judge(facts)),
        "parts": reward_parts(facts),
        "selected_samples": selected_samples(facts, "ppo"),
        "reward_description": _reward_description(facts),
        "signs": signs(facts),
        "phase_times": _phase_times(facts),
        "verdict": verdict(facts),
        "verdict_kind": kind_of_verdict(facts),
        "summary": headline(facts),
        "example": example(facts),
        "watch_out": watch_out(facts),
    }


def _baselines(facts: StageFacts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name, figures) of the start, PPO and every baseline."""
    if not facts.frontier:
        return
    yield facts.initial_policy_title, facts.frontier["sft"]
    yield Raw("**PPO**"), facts.frontier["ppo"]
    for method, points in facts.frontier["methods"].items():
        yield from ((f"{method}, {point['label']}", point) for point in points)


def _phase_times(facts: StageFacts) -> dict[str, float]:
    """Returns the mean seconds of each phase of an update that was timed, and the mean `tokens_per_second`."""
    rows = [row for row in facts.metrics if is_finite(row.get("tokens_per_second"))]
    names = [
        "tokens_per_second",
        *(f"time/{phase}" for phase in ("rollout", "reference", "values", "reward", "update")),
    ]
    return {
        name.removeprefix("time/"): sum(row[name] for row in rows) / len(rows)
        for name in names
        if rows and all(is_finite(row.get(name)) for row in rows)
    }


def _reward_description(facts: StageFacts) -> Raw:
    functions = [markdown.code(name) for name, weight in facts.reward_function_weights.items() if weight != 0]
    logged_functions = [markdown.code(name) for name, weight in facts.reward_function_weights.items() if weight == 0]
    terms = [_reward_model_description(facts)] if facts.has_reward_model else []
    if functions:
        terms.append(f"the reward function{'s' if len(functions) > 1 else ''} {', '.join(functions)}")
    note = f" (with {', '.join(logged_functions)} logged at weight 0)" if logged_functions else ""
    return Raw((" and ".join(terms) or "a reward that is not recorded") + note)


def _reward_model_description(facts: StageFacts) -> str:
    model_count = sum(role in facts.parents for role in REWARD_ROLES)
    aggregation, penalty = facts.setting("reward_ensemble"), facts.setting("reward_ensemble_lambda", 0.5)
    if model_count < 2:
        return "a learned reward"
    descriptions = {"worst": "lowest score", "mean": "mean score", "mean_minus_variance": "mean minus variance"}
    penalty_note = f" (λ = {markdown.number(penalty)})" if aggregation == "mean_minus_variance" else ""
    return f"the {descriptions.get(aggregation, 'combined score')} of {model_count} reward models{penalty_note}"


def _main_judge(facts: StageFacts) -> dict[str, Any]:
    """Returns the entry of the main judge in evaluation.json, together with its figures."""
    judge = facts.evaluation.get("judge") or {}
    return {**((facts.evaluation.get("judges") or {}).get(judge.get("name")) or {}), **judge}


def _judge_notes(judge: Mapping[str, Any]) -> Raw:
    """Returns caveats about a judge, except for the one on a training reward as judge, which the template writes."""
    return judge_notes({key: value for key, value in judge.items() if key != "is_training_reward"})


def _other_judges(facts: StageFacts) -> dict[str, dict[str, Any]]:
    """Returns name -> {description, notes, sft, ppo, win_rate} of the other judges.

    Votes are judges named votes:NAME, which have only a description and a win rate.
    """
    main_name = (facts.evaluation.get("judge") or {}).get("name")
    judges: dict[str, dict[str, Any]] = {}
    for name, judge in (facts.evaluation.get("judges") or {}).items():
        if name != main_name and isinstance(judge, Mapping):
            estimates = {key: facts.estimate("judges", name, key) for key in ("sft", "ppo", "win_rate")}
            judges[name] = {**estimates, "description": judge.get("description", ""), "notes": _judge_notes(judge)}
    for name, votes in (facts.evaluation.get("votes") or {}).items():
        if isinstance(votes, Mapping):
            sentences = " ".join(str(votes[key]) for key in ("description", "problem") if votes.get(key))
            judges[f"votes:{name}"] = {
                "win_rate": facts.estimate("votes", name, "win_rate"),
                "description": sentences,
            }
    return judges


def _unmeasured(facts: StageFacts) -> list[str]:
    over_training = facts.evaluation.get("over_training")
    measurements = {
        f"win rate over {facts.initial_policy}": facts.estimate("win_rate"),
        f"the control ({facts.initial_policy} against itself under another seed)": facts.estimate("control"),
        "the judge before the end of training": isinstance(over_training, Mapping) and over_training.get("checkpoints"),
    }
    safety = "safety and bias" if "false statements" in facts.defects else "safety, bias and truthfulness"
    never_measured = ["human preferences", "other seeds", safety]
    if facts.step is not None:
        return never_measured
    figures = [_kl_title(facts) if name == FIGURES["kl"] else name for name in unmeasured_figures(facts)]
    return [*figures, *(name for name, measured in measurements.items() if not measured), *never_measured]


CARD = StageCard(
    template=TEMPLATES / "ppo.md.jinja",
    columns={"episodes": "episodes", "β": "kl_coef", "reward": "objective/score", "KL, nats": "objective/kl"},
    required_column="KL, nats",
    json_columns={"reward": "objective/score", "kl": "objective/kl"},
    model_index_metrics=_model_index_metrics,
    draw=_draw,
    variables=_variables,
    unmeasured=_unmeasured,
    evaluated_step_figures="reward, KL, judge and win rate on held-out prompts, samples and a verdict",
)
