"""Renders completions as HTML: text with a heat map, figures, and a table of tokens."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..engine import PolicyCompletion, Snapshot
from .charts import Role, draw_token_bars, draw_token_line
from .html import DASH, STOP_LABELS, escape_text, figure_list_html, format_number, format_signed, html_attributes

#: Role -> name on the page, in the order of the columns.
NAMES: dict[Role, str] = {"sft": "SFT", "ppo": "PPO"}
ROLE_DESCRIPTIONS: dict[Role, str] = {"sft": "where PPO started", "ppo": "trained to maximize the reward"}
#: The charts of longer completions are drawn only when they are done, because redrawing them for each token is slow.
MAX_TOKENS_DRAWN_IN_PROGRESS = 128
#: Thresholds of the heat map's shades, in nats.
RATIO_EDGES = (0.05, 0.25, 1.0, 2.5)
KL_EDGES = (0.01, 0.1, 0.5, 2.0)


def shade_level(value: float, edges: Sequence[float]) -> int:
    """Returns the shade of a figure in the heat map: the number of thresholds that it reaches.

    Args:
        value: The figure.
        edges: Ascending thresholds.
    """
    return sum(value >= edge for edge in edges)


def _shade_classes(side: PolicyCompletion, index: int) -> str | None:
    """Returns the CSS classes of a token's shades: p1 to p4 or m1 to m4 by log-ratio, k1 to k4 by KL."""
    ratio, kl = side.token_log_ratio[index], side.token_kl[index]
    classes = []
    if strength := shade_level(abs(ratio), RATIO_EDGES):
        classes.append(f"{'p' if ratio > 0 else 'm'}{strength}")
    if strength := shade_level(kl, KL_EDGES):
        classes.append(f"k{strength}")
    return " ".join(classes) or None


def _token_tooltip(side: PolicyCompletion, index: int) -> str:
    tooltip = f"log-ratio {format_signed(side.token_log_ratio[index])}, KL {format_number(side.token_kl[index])} nats"
    if side.token_values is not None:
        tooltip += f", V {format_signed(side.token_values[index])}"
    return tooltip


def _token_elements(side: PolicyCompletion) -> Iterator[str]:
    """Yields each token as an element. The end-of-sequence token has no text, so it becomes ∎."""
    for index, token_text in enumerate(side.tokens):
        is_last = index == len(side.tokens) - 1
        visible = (
            '<span class="eos" title="end of sequence">∎</span>' if is_last and side.ended else escape_text(token_text)
        )
        if not visible:
            continue
        tooltip = _token_tooltip(side, index) if side.stop is not None else None
        yield f"<i{html_attributes({'class': _shade_classes(side, index), 'title': tooltip})}>{visible}</i>"


def completion_html(
    prompt: str, side: PolicyCompletion | None, *, heat_map: bool = False, is_chat: bool = False
) -> str:
    """Renders a prompt and a policy's completion.

    Args:
        prompt: The prompt.
        side: The completion; None renders a placeholder.
        heat_map: Whether to render each token with its shades and a tooltip.
        is_chat: Whether the completion answers the prompt, and so begins a paragraph of its own.
    """
    if side is None:
        return '<p class="zoo-text"><span class="none">The completion will appear here.</span></p>'
    token_html = "".join(_token_elements(side)) if heat_map else escape_text(side.completion)
    caret = "" if side.stop is not None else '<span class="caret" aria-hidden="true"></span>'
    return (
        f'<p class="zoo-text{" zoo-chat" if is_chat else ""}"><span class="given">{escape_text(prompt)}</span>'
        f'<span class="new">{token_html}</span>{caret}</p>'
    )


def figures_html(side: PolicyCompletion | None) -> str:
    """Renders reward, log-ratio, KL summed over the completion, length and stop reason.

    Args:
        side: The completion; None renders dashes.
    """
    values = [DASH] * 5
    if side is not None:
        reward = "none" if side.reward is None and side.stop is not None else format_signed(side.reward)
        values = [
            reward,
            format_signed(side.log_ratio),
            format_number(side.kl),
            str(side.length),
            STOP_LABELS[side.stop],
        ]
    keys = ("reward", "log_ratio", "kl", "length", "stopped")
    labels = ("Reward", "Log-ratio", "Summed KL", "Tokens", "Stopped")
    return figure_list_html(zip(keys, labels, values, strict=True))


def _policy_column_html(
    prompt: str, role: Role, side: PolicyCompletion | None, *, row: int = 0, label: str = "", is_chat: bool = False
) -> str:
    """Renders one policy's column: name, completion and figures. Without a completion, renders a placeholder."""
    head = f"<header><h3>{NAMES[role]}</h3><span>{label or ROLE_DESCRIPTIONS[role]}</span></header>"
    return (
        f'<article class="zoo-card zoo-{role}" data-side="{role}" data-row="{row}">{head}'
        f"{completion_html(prompt, side, heat_map=True, is_chat=is_chat)}{figures_html(side)}</article>"
    )


def _draw_token_charts(snapshot: Snapshot, row: int) -> dict[Role, str]:
    """Draws KL and values at each position, as HTML by role; "" while a long completion is in progress."""
    sides: dict[Role, PolicyCompletion] = {"sft": snapshot.sft[row], "ppo": snapshot.ppo[row]}
    if not snapshot.done and any(side.length > MAX_TOKENS_DRAWN_IN_PROGRESS for side in sides.values()):
        return dict.fromkeys(sides, "")
    width = max(side.length for side in sides.values())
    kl_top = max((kl for side in sides.values() for kl in side.token_kl), default=0.0)
    all_values = [value for side in sides.values() for value in side.token_values or ()]
    html_by_role = {}
    for role, side in sides.items():
        shared: dict[str, Any] = {"labels": side.tokens, "role": role, "width": width}
        html = draw_token_bars(side.token_kl, title="KL at each position", unit="nats", top=kl_top, **shared)
        if side.token_values is not None:
            span = (min(all_values), max(all_values))
            html += draw_token_line(
                side.token_values, title="PPO's value at each position", unit="", span=span, **shared
            )
        html_by_role[role] = f'<div class="zoo-charts">{html}</div>'
    return html_by_role


def pairs_html(
    snapshot: Snapshot, *, ppo: str = ROLE_DESCRIPTIONS["ppo"], folded: bool = False, link: str | None = None
) -> str:
    """Renders all completions of a snapshot. The two completions of one random stream are side by side.

    Args:
        snapshot: Completions of both policies.
        ppo: HTML next to PPO's name.
        folded: Whether to collapse the token details of the first pair too.
        link: Address that shows the same completions again; None to show no link.
    """
    rows = []
    labels: dict[Role, str] = {"sft": ROLE_DESCRIPTIONS["sft"], "ppo": ppo}
    for row in range(snapshot.n):
        cards = []
        for role, label in labels.items():
            label = f"{label} · {row + 1} of {snapshot.n}" if snapshot.n > 1 else label
            side = getattr(snapshot, role)[row]
            cards.append(
                _policy_column_html(snapshot.prompt, role, side, row=row, label=label, is_chat=snapshot.is_chat)
            )
        details = _token_details_html(snapshot, row, folded=folded or row > 0)
        rows.append(f'<div class="zoo-pair">{"".join(cards)}</div>{details}')
    content = _means_html(snapshot) + "".join(rows)
    content += f'<p class="zoo-note">{escape_text(snapshot.note)}</p>' if snapshot.note else ""
    if link is not None and snapshot.done:
        content += f'<p class="zoo-note zoo-link"><a{html_attributes({"href": link})}>Link to this comparison</a></p>'
    state, busy = ("done", "false") if snapshot.done else ("writing", "true")
    return f'<div class="zoo-pairs" data-state="{state}" aria-busy="{busy}">{content}</div>'


def _token_details_html(snapshot: Snapshot, row: int, *, folded: bool) -> str:
    """Renders charts and numbers of both policies below their cards, in one `details` so that no gap is left."""
    # While completions are in progress, only the first pair has charts, because redrawing all of them is slow.
    chart_html = _draw_token_charts(snapshot, row) if row == 0 or snapshot.done else {}
    columns = "".join(
        f'<div data-side="{role}" data-row="{row}"><h4>{NAMES[role]}</h4>{html}</div>'
        for role, html in chart_html.items()
        if html
    )
    tables = "".join(_token_table_html(role, getattr(snapshot, role)[row]) for role in NAMES) if snapshot.done else ""
    numbers = ""
    if tables:
        numbers = (
            f'<details class="zoo-numbers"><summary>Numbers</summary><div class="zoo-pair">{tables}</div></details>'
        )
    if not columns and not numbers:
        return ""
    open_attribute = "" if folded else " open"
    return (
        f'<details class="zoo-why"{open_attribute}><summary>Token by token</summary>'
        f'<div class="zoo-pair">{columns}</div>{numbers}</details>'
    )


def summary_html(snapshot: Snapshot) -> str:
    """Describes finished completions in words, for screen readers; "" while they are in progress.

    Args:
        snapshot: Completions of both policies.
    """
    if not snapshot.done:
        return ""
    parts = []
    sides_by_role: dict[Role, tuple[PolicyCompletion, ...]] = {"sft": snapshot.sft, "ppo": snapshot.ppo}
    for role, sides in sides_by_role.items():
        rewards = [side.reward for side in sides if side.reward is not None]
        reward = f"reward {format_signed(fmean(rewards))}, " if rewards else ""
        parts.append(f"{NAMES[role]}: {reward}{format_number(fmean(side.length for side in sides), 0)} tokens")
    mean = f", means over {snapshot.n} completions" if snapshot.n > 1 else ""
    return f'<p class="zoo-heard">Finished{mean}. {". ".join(parts)}.</p>'


def empty_pairs_html() -> str:
    """Renders a placeholder for the first comparison."""
    cards = "".join(_policy_column_html("", role, None) for role in NAMES)
    return f'<div class="zoo-pairs" data-state="empty"><div class="zoo-pair">{cards}</div></div>'


def _token_table_html(role: Role, side: PolicyCompletion) -> str:
    """Renders the figures of each token as a table, for readers who cannot hover over tokens or see colors."""
    has_values = side.token_values is not None
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("token", "log π PPO", "log π SFT", "log-ratio", "KL"))
    head += "<th scope='col'>V</th>" if has_values else ""
    rows = []
    for index, token in enumerate(side.tokens):
        cells = [
            format_number(side.token_logprob_ppo[index]),
            format_number(side.token_logprob_sft[index]),
            format_signed(side.token_log_ratio[index]),
            format_number(side.token_kl[index], 3),
        ]
        if side.token_values is not None:
            cells.append(format_signed(side.token_values[index]))
        visible = escape_text(token).replace(" ", "\u2423").replace("\n", "\u21b5")
        rows.append(f"<tr><th scope='row'>{visible}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f'<div><h4>{NAMES[role]}</h4><div class="zoo-scroll" role="region" aria-label="Numbers of {NAMES[role]}" '
        f'tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></div>'
    )


def _means_html(snapshot: Snapshot) -> str:
    """Renders means over n completions of one prompt."""
    if snapshot.n < 2 or not snapshot.done:
        return ""
    cells = []
    sides_by_role: dict[Role, tuple[PolicyCompletion, ...]] = {"sft": snapshot.sft, "ppo": snapshot.ppo}
    for role, sides in sides_by_role.items():
        rewards = [side.reward for side in sides if side.reward is not None]
        cells.append(
            f'<tr class="zoo-{role}"><th scope="row">{NAMES[role]}</th>'
            f'<td data-mean="{role}-reward">{format_signed(fmean(rewards)) if rewards else "none"}</td>'
            f'<td data-mean="{role}-log_ratio">{format_signed(fmean(side.log_ratio for side in sides))}</td>'
            f"<td>{format_number(fmean(side.kl for side in sides))}</td>"
            f"<td>{format_number(fmean(side.length for side in sides), 1)}</td>"
            f"<td>{sum(side.ended for side in sides)} of {snapshot.n}</td></tr>"
        )
    return (
        f'<div class="zoo-scroll"><table class="zoo-means"><caption>Means over {snapshot.n} completions of this prompt'
        "</caption><thead><tr><td></td><th>Reward</th><th>Log-ratio</th><th>Summed KL</th><th>Tokens</th>"
        f"<th>Stopped by itself</th></tr></thead><tbody>{''.join(cells)}</tbody></table></div>"
    )


def legend_html() -> str:
    """Renders the legends of both heat maps. The style sheet shows the legend of the selected one."""

    def above(edges: Sequence[float]) -> list[str]:
        return [f"{low:g} to {high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g} and more"]

    below = [f"−{high:g} to −{low:g}" for low, high in pairwise(RATIO_EDGES)] + [f"−{RATIO_EDGES[-1]:g} and less"]
    ratio = "".join(f'<i class="m{k}">{name}</i>' for k, name in reversed(list(enumerate(below, 1))))
    ratio += "".join(f'<i class="p{k}">{name}</i>' for k, name in enumerate(above(RATIO_EDGES), 1))
    kl = "".join(f'<i class="k{k}">{name}</i>' for k, name in enumerate(above(KL_EDGES), 1))
    return (
        f'<div class="zoo-legend zoo-text"><p class="of-ratio">log-ratio of a token, nats: {ratio} '
        "<span>below 0: more likely under SFT; above 0: more likely under PPO</span></p>"
        f'<p class="of-kl">KL at a position, nats: {kl}</p></div>'
    )
