"""The head of the page: which models it compares, and what the evaluation found."""

import re
from collections.abc import Iterator
from html import escape, unescape

from ...fileio import get_nested, int_or_none
from ...publishing.cards.markdown import judge_title
from ...publishing.catalog.card import Card, CardEstimate, one_line
from ...publishing.catalog.lineage import Lineage
from .html import escape_text, format_number, shorten_name


def header_html(lineage: Lineage) -> str:
    """Renders the head of the page.

    Args:
        lineage: The compared models and the PPO checkpoint's card, whose texts are escaped.
    """
    sft_label = "base model" if Card(lineage.card).started_from_base else "SFT"
    models = [("PPO", lineage.ppo.name), (sft_label, lineage.sft.name)]
    models += [("reward model", model.name) for model in lineage.rewards]
    model_names = '<span class="sep">·</span>'.join(
        f'<span class="model">{role} <b>{escape(shorten_name(name))}</b></span>' for role, name in models
    )
    findings = " · ".join(f'<span data-finding="{key}">{html}</span>' for key, html in _findings(Card(lineage.card)))
    data_note = ""
    if lineage.simulated:
        data_note = "<p>Simulated data: a program wrote the texts, and no person rated anything.</p>"
    title = Card(lineage.card).comparison_title
    return (
        f'<div class="zoo"><h1>{title}</h1><p class="zoo-findings">{findings}</p><p>{model_names}</p>{data_note}</div>'
    )


def link_preview(lineage: Lineage) -> tuple[str, str]:
    """Returns (title, description) of the page, which programs show beside a link to it.

    Args:
        lineage: The compared models and the card of the PPO checkpoint.
    """
    findings = "; ".join(unescape(re.sub(r"<[^>]+>", "", html)) for _, html in _findings(Card(lineage.card)))
    name = shorten_name(lineage.ppo.name)
    return (
        f"{name}: {Card(lineage.card).initial_policy} and PPO, side by side",
        f"One prompt through both policies, with the same random numbers. {findings}.",
    )


def _findings(card: Card) -> Iterator[tuple[str, str]]:
    """Yields (key, HTML) for the verdict, and for the recommended step, win rate and KL if the card has them."""
    report = get_nested(card, "evaluation", "over_training")
    recommended_report = get_nested(report, "at_recommended")
    if card.step is not None and int_or_none(get_nested(recommended_report, "step")) == card.step:
        report = recommended_report  # as on the card, the verdict is on the compared step, not on the last step
    verdict = one_line(get_nested(report, "verdict")) or one_line(get_nested(card, "evaluation", "verdict"))
    if verdict is None:
        yield "verdict", "<b>No verdict yet</b>: run <code>rlhf-zoo eval</code>"
    else:
        verdict_step = int_or_none(get_nested(report, "step"))
        is_other_step = verdict_step is not None and card.step is not None and verdict_step != card.step
        at_step = f" at step {verdict_step}" if is_other_step else ""
        yield "verdict", f"<b>Verdict{at_step}: {escape_text(verdict)}</b>"
    recommendation = get_nested(card, "evaluation", "recommended")  # {step} or a number
    step = int_or_none(recommendation.get("step") if isinstance(recommendation, dict) else recommendation)
    if step is not None:
        yield "recommended", f"use step {step}"
    if (win_rate := card.estimate("win_rate")) is not None:
        judge = one_line(get_nested(card, "evaluation", "judge", "name"))
        judge_note = f", judge: {escape_text(judge_title(judge))}" if judge else ""
        opponent = "the base model" if card.started_from_base else "SFT"
        figure = f"<b>{format_number(win_rate.value)}</b>{_interval_text(win_rate)}"
        yield "win-rate", f"win rate over {opponent} {figure}{judge_note}"
    if (kl := card.estimate("ppo", "kl")) is not None:
        yield "kl", f"KL {format_number(kl.value)} nats"


def _interval_text(estimate: CardEstimate) -> str:
    return f" ({format_number(estimate.ci95[0])} to {format_number(estimate.ci95[1])})" if estimate.ci95 else ""
