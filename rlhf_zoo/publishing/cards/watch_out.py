"""Writes what a reader of a PPO card should watch out for, according to the held-out evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...evaluation.paraphrases import GROUP_REMEDY, paraphrase_warning
from ...runs.settings.declared import default_of
from .data import STAGE_NAMES
from .estimates import estimate_at, is_better_than_ppo
from .facts import StageFacts
from .markdown import SOURCE, Raw, escape, judge_title, short, with_interval

_MIN_LENGTH_RATIO = 1.05  # a smaller change of length is not worth a line
_MIN_REPETITION = 0.05  # share of repeated word pairs; a smaller one is not worth a line
_MIN_SHARE_ENDED = 0.5  # if fewer answers end by themselves, the judge mostly reads fragments
MIN_LENGTH_CORRELATION = 0.3  # a reward whose rank correlation with length is smaller does not "like long texts"


class _Change(NamedTuple):
    """A figure before and after PPO."""

    before: float
    after: float


def watch_out(facts: StageFacts) -> list[Raw]:
    """Returns sentences on what PPO changed besides the judge's rating, and on reasons to doubt the evaluation.

    Args:
        facts: The facts of the stage.
    """
    return [Raw(line) for line in (*_changes(facts), *_doubts(facts))]


def counter_evidence(facts: StageFacts) -> str:
    """Returns a sentence on what speaks against PPO, to follow the advice to use it; "" if nothing does.

    Args:
        facts: The facts of the stage.
    """
    parts = [f"more answers have {defect}" for defect in _defects(facts, rise_is_shown=True)[:1]]
    rise = facts.estimate("difference", "repetition")
    if (change := _change(facts, "repetition")) and _repeats_more(change) and rise and rise["ci95"][0] > 0:
        parts.append(f"answers repeat themselves more ({_percent(change.before)} → {_percent(change.after)})")
    best, ppo = facts.best_filter, facts.estimate("ppo", "judge")
    if best is not None and ppo is not None and best["reaches_ppo"]:
        scores = [short((estimate or {}).get("value")) for estimate in (estimate_at(best, "judge"), ppo)]
        if is_better_than_ppo(best):
            parts.append(
                f"{facts.initial_policy}'s answers after a filter score higher by the judge ({scores[0]}, "
                f"PPO {scores[1]}): [how]({SOURCE}/docs/reward-up-text-worse.md#a-filter-in-the-place-of-ppo)"
            )
        else:
            parts.append(f"a filter of {facts.initial_policy}'s answers scores {scores[0]}, PPO {scores[1]}")
    if not parts:
        return ""
    *first_parts, last_part = parts
    return f"**But** {', '.join(first_parts)}{', and ' if first_parts else ''}{last_part}."


def _defects(facts: StageFacts, *, rise_is_shown: bool) -> list[str]:
    """Returns the defects whose rise with PPO is shown or, if `rise_is_shown` is False, is not, each with both shares.

    A rise is shown if the interval of the paired difference lies above 0.
    """
    defects = []
    for name in facts.defects:
        before, after = (facts.estimate("defects", name, side) for side in ("sft", "ppo"))
        rise = facts.estimate("defects", name, "difference")
        if before and after and rise and (rise["ci95"][0] > 0) is rise_is_shown:
            defects.append(f"{escape(name)} ({_percent(before['value'])} → {_percent(after['value'])})")
    return defects


def _changes(facts: StageFacts) -> Iterator[str]:
    if change := _change(facts, "length"):
        ratio = max(change) / max(min(change), 1e-9)
        if ratio >= _MIN_LENGTH_RATIO and _is_shown(facts, "length"):
            title = "Longer" if change.after > change.before else "Shorter"
            sentence = f"**{title} answers.** {short(change.before)} → {short(change.after)} tokens."
            if win_rate := facts.estimate("win_rate_at_equal_length"):
                sentence += (
                    " No win rate at equal length: the lengths overlap too little."
                    if win_rate.get("warning")
                    else f" At equal length the win rate is {with_interval(win_rate)}."
                )
            yield sentence
    if (change := _change(facts, "distinct_2")) and change.after < change.before and _is_shown(facts, "distinct_2"):
        values = f"from {short(change.before)} to {short(change.after)}"
        yield f"**Less variety.** Distinct word pairs fall {values}."
    if (change := _change(facts, "repetition")) and _repeats_more(change):
        before_ppo = f"{facts.initial_policy_title} {_percent(change.before)}"
        yield f"**Repetition.** An answer repeats {_percent(change.after)} of its word pairs ({before_ppo})."
    if (change := _change(facts, "eos_rate")) and _is_often_cut(facts, change):
        before_ppo = f"{facts.initial_policy_title} {_percent(1 - change.before)}"
        yield f"**Unfinished answers.** {_percent(1 - change.after)} reach the token limit ({before_ppo})."
    if rising_defects := _defects(facts, rise_is_shown=True):
        other_defects = _defects(facts, rise_is_shown=False)
        other_sentence = f" Not shown to rise: {', '.join(other_defects)}." if other_defects else ""
        yield f"**More** answers with {', '.join(rising_defects)}.{other_sentence}"
    main_name = (facts.evaluation.get("judge") or {}).get("name")
    for name in facts.evaluation.get("judges") or {}:
        before, after = (facts.estimate("judges", name, side) for side in ("sft", "ppo"))
        is_covered = name.startswith(("rule:length", "rule:repetition"))  # by the lines above
        if name != main_name and not is_covered and before and after and _fell(before, after):
            values = f"from {short(before['value'])} to {short(after['value'])}"
            yield f"**{escape(judge_title(name))} falls** {values}{_measured_quantity(facts, name)}."


def _repeats_more(repetition: _Change) -> bool:
    """Whether repetition rises to a share of word pairs that is worth a line."""
    return repetition.after > max(repetition.before, _MIN_REPETITION)


def _is_often_cut(facts: StageFacts, eos_rate: _Change) -> bool:
    """Whether PPO's answers reach the token limit more often than SFT's, or if they could end, most of them reach it.

    Without a stop token, every answer has the full length, which is no defect.
    """
    stops = [facts.settings.get(key, default_of("ppo", key)) for key in ("stop_token", "stop_token_id")]
    has_stop_token = any(stop is not None for stop in stops)
    return eos_rate.after < eos_rate.before - 0.02 or (has_stop_token and eos_rate.after < _MIN_SHARE_ENDED)


def _doubts(facts: StageFacts) -> Iterator[str]:
    before, after = facts.estimate("agreement", "sft"), facts.estimate("agreement", "ppo")
    same_side = facts.estimate("agreement", "same_side")
    is_reward = (facts.evaluation.get("judge") or {}).get("is_training_reward")
    # A judge that is the reward agrees with itself.
    if same_side and same_side["value"] < 1 and not is_reward:
        share = _percent(1 - same_side["value"])
        sentence = f"**Reward and judge disagree** in {share} of the comparisons."
        if before and after and _fell(before, after):
            values = f"from {short(before['value'])} to {short(after['value'])}"
            sentence += f" Their correlation over answers falls {values}."
        yield sentence
    if (facts.evaluation.get("trivial") or {}).get("winnable_by_a_constant"):
        beaten = f"One text for every prompt beats {facts.initial_policy} by this judge"
        yield f"**A fixed text wins.** {beaten}, so it cannot rule out hacking."
    if is_reward:
        yield "**The judge is the training reward**, so a win only shows that training worked."
    correlation = estimate_at(facts.reward_report, "length", "spearman") if facts.has_reward_model else None
    if correlation and correlation["value"] >= MIN_LENGTH_CORRELATION:
        yield f"**The reward likes long texts**: rank correlation {short(correlation['value'])} with length."
    rival_sentence = _filter_sentence(facts) if facts.best_filter else _rival_sentence(facts)
    if rival_sentence:
        yield rival_sentence
    paraphrases = facts.evaluation.get("possible_paraphrases")
    if isinstance(paraphrases, int) and paraphrases > 0:
        yield f"**Paraphrased prompts?** {paraphrase_warning(paraphrases, GROUP_REMEDY)}"
    data = facts.evaluation.get("data")
    for stage, count in ((data.get("trained_on") if isinstance(data, Mapping) else None) or {}).items():
        if count:
            title = STAGE_NAMES.get(stage, escape(stage))
            yield f"**Seen in training.** {title[:1].upper()}{title[1:]} also trained on {count:,} of these prompts."


def _filter_sentence(facts: StageFacts) -> str | None:
    """Returns a sentence on the best simple filter of SFT's samples.

    None if PPO is shown to be better than the filter, or if `counter_evidence` names the filter after the advice to
    use this step.
    """
    best = facts.best_filter
    difference = estimate_at(best or {}, "ppo_minus_this")
    if best is None or difference is None or difference["ci95"][0] > 0:
        return None
    recommended_step = (facts.evaluation.get("over_training") or {}).get("recommended")
    if best["reaches_ppo"] and recommended_step is not None and recommended_step == facts.described_step:
        return None
    filtered_policy = f"{facts.initial_policy} with a filter ({escape(best['name'])})"
    if is_better_than_ppo(best):
        return (
            f"**A simple filter does better** by the judge: {facts.initial_policy}'s answers, {escape(best['name'])}."
        )
    if best["reaches_ppo"]:
        subject = filtered_policy[:1].upper() + filtered_policy[1:]
        return f"**A simple filter does as well.** {subject} reaches PPO's score by the judge."
    return f"**A simple filter may do as well.** PPO's lead over {filtered_policy} is not shown."


def _rival_sentence(facts: StageFacts) -> str | None:
    """Returns a sentence on the best-of-n with the lowest reward that still reaches PPO's; None if none reaches it."""
    points = (facts.frontier.get("methods") or {}).get("best-of-n") or ()
    ppo = facts.frontier.get("ppo") or {}
    rivals = [point for point in points if point["reward"]["value"] >= ppo["reward"]["value"]]
    if not rivals:
        return None
    rival = min(rivals, key=lambda point: point["reward"]["value"])
    rival_rate, ppo_rate = (with_interval(point["win_rate"]["sft"]) for point in (rival, ppo))
    return (
        f"**Simplest rival:** best-of-n from {facts.initial_policy} ({escape(rival['label'])}) reaches PPO's "
        f"reward, with a win rate of {rival_rate} (PPO {ppo_rate})."
    )


def _measured_quantity(facts: StageFacts, name: str) -> str:
    """Returns what a rule measures, in brackets; "" for a judge that is not a rule, or without a phrase for it."""
    description = str((facts.evaluation.get("judges") or {})[name].get("description") or "")
    meaning = description.removeprefix(f"The rule {name.removeprefix('rule:')}, ").rstrip(".")
    is_phrase = meaning != description.rstrip(".") and not meaning.startswith("which ")
    return f" ({escape(meaning)})" if is_phrase else ""


def _change(facts: StageFacts, key: str) -> _Change | None:
    before, after = (facts.estimate(side, key) for side in ("sft", "ppo"))
    return _Change(before["value"], after["value"]) if before and after else None


def _is_shown(facts: StageFacts, key: str) -> bool:
    """Whether the interval of the paired difference excludes 0; True if no interval was measured."""
    interval = (facts.estimate("difference", key) or {}).get("ci95")
    return not interval or interval[0] > 0 or interval[1] < 0


def _fell(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the interval after PPO lies entirely below the interval before it."""
    return bool(before.get("ci95") and after.get("ci95") and after["ci95"][1] < before["ci95"][0])


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{100 * share:.2g}%"
