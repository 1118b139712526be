"""Completions as HTML: the text with its heat map, its figures, and the numbers of each token."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..engine import Side, Snapshot
from .charts import Role, token_bars, token_line
from .html import NOTHING, STOPS, attributes, figure_list, number, signed, text

NAMES: dict[Role, str] = {"sft": "SFT", "ppo": "PPO"}
ROLES: dict[Role, str] = {"sft": "where PPO started", "ppo": "trained against the reward"}
#: Tokens up to which the charts grow with the text; longer completions have theirs when they are done.
DRAWN_WHILE_WRITING = 128
#: Nats at which the shades of the heat maps begin.
RATIO_EDGES = (0.05, 0.25, 1.0, 2.5)
KL_EDGES = (0.01, 0.1, 0.5, 2.0)


def shade(value: float, edges: Sequence[float]) -> int:
    """Counts the edges that a figure reaches, 0 to len(edges).

    Args:
        value: The figure.
        edges: Rising.
    """
    return sum(value >= edge for edge in edges)


def _classes(side: Side, place: int) -> str | None:
    ratio, kl = side.token_log_ratio[place], side.token_kl[place]
    classes = []
    if strength := shade(abs(ratio), RATIO_EDGES):
        classes.append(f"{'p' if ratio > 0 else 'm'}{strength}")
    if strength := shade(kl, KL_EDGES):
        classes.append(f"k{strength}")
    return " ".join(classes) or None


def _hint(side: Side, place: int) -> str:
    words = f"log-ratio {signed(side.token_log_ratio[place])}, KL {number(side.token_kl[place])} nats"
    if side.token_values is not None:
        words += f", V {signed(side.token_values[place])}"
    return words


def _tokens(side: Side) -> Iterator[str]:
    """Each token by itself; the end-of-sequence token is a sign, since its name is no part of the text."""
    for place, piece in enumerate(side.tokens):
        last = place == len(side.tokens) - 1
        shown = '<span class="eos" title="end of sequence">∎</span>' if last and side.ended else text(piece)
        if not shown:
            continue
        hint = _hint(side, place) if side.stop is not None else None
        yield f"<i{attributes({'class': _classes(side, place), 'title': hint})}>{shown}</i>"


def completion(prompt: str, side: Side | None, *, heat: bool = False) -> str:
    """Shows a prompt and a policy's completion.

    Args:
        prompt: The beginning of the text.
        side: The completion; None shows where it will stand.
        heat: Whether to show each token by itself, with its shades and figures.
    """
    if side is None:
        return '<p class="zoo-text"><span class="none">Its completion will stand here.</span></p>'
    written = "".join(_tokens(side)) if heat else text(side.completion)
    caret = "" if side.stop is not None else '<span class="caret" aria-hidden="true"></span>'
    return f'<p class="zoo-text"><span class="given">{text(prompt)}</span><span class="new">{written}</span>{caret}</p>'


def figures(side: Side | None) -> str:
    """Shows reward, log-ratio, exact KL along the completion, length and stop reason.

    Args:
        side: The completion; None shows dashes.
    """
    shown = [NOTHING] * 5
    if side is not None:
        reward = "none" if side.reward is None and side.stop is not None else signed(side.reward)
        shown = [reward, signed(side.log_ratio), number(side.kl), str(side.length), STOPS[side.stop]]
    keys = ("reward", "log_ratio", "kl", "length", "stopped")
    labels = ("Reward", "Log-ratio", "KL along it", "Tokens", "Stopped")
    return figure_list(zip(keys, labels, shown, strict=True))


def side_card(prompt: str, role: Role, side: Side | None, *, row: int = 0, who: str = "", charts: str = "") -> str:
    """Shows one policy's column: who it is, its completion, and its figures.

    Args:
        prompt: The beginning of the text.
        role: sft or ppo.
        side: The completion; None shows where it will stand.
        row: Its number among several.
        who: HTML beside its name.
        charts: HTML below the figures.
    """
    head = f"<header><b>{NAMES[role]}</b><span>{who or ROLES[role]}</span></header>"
    return (
        f'<article class="zoo-card zoo-{role}" data-side="{role}" data-row="{row}">{head}'
        f"{completion(prompt, side, heat=True)}{figures(side)}{charts}</article>"
    )


def charts(snapshot: Snapshot, row: int) -> dict[Role, str]:
    """Draws KL at each position, and PPO's values, both on one scale for both policies.

    Args:
        snapshot: Completions of both policies.
        row: Which pair of them.

    Returns:
        HTML by role; "" while a long completion is being written.
    """
    both: dict[Role, Side] = {"sft": snapshot.sft[row], "ppo": snapshot.ppo[row]}
    if not snapshot.done and any(side.length > DRAWN_WHILE_WRITING for side in both.values()):
        return dict.fromkeys(both, "")
    width = max(side.length for side in both.values())
    kl_top = max((kl for side in both.values() for kl in side.token_kl), default=0.0)
    all_values = [value for side in both.values() for value in side.token_values or ()]
    html_of = {}
    for role, side in both.items():
        shared: dict[str, Any] = {"labels": side.tokens, "side": role, "width": width}
        drawn = token_bars(side.token_kl, title="KL at each position", unit="nats", top=kl_top, **shared)
        if side.token_values is not None:
            span = (min(all_values), max(all_values))
            drawn += token_line(side.token_values, title="PPO's value at each position", unit="", span=span, **shared)
        html_of[role] = f'<div class="zoo-charts">{drawn}</div>'
    return html_of


def pairs(snapshot: Snapshot, *, ppo: str = ROLES["ppo"], folded: bool = False) -> str:
    """Shows all completions of a snapshot, the two of one random stream side by side.

    Args:
        snapshot: Completions of both policies.
        ppo: HTML beside PPO's name.
        folded: Whether the details of tokens are folded also of the first pair.
    """
    rows = []
    named: dict[Role, str] = {"sft": ROLES["sft"], "ppo": ppo}
    for row in range(snapshot.n):
        drawn = charts(snapshot, row) if row == 0 or snapshot.done else dict.fromkeys(ROLES, "")
        cards = []
        for role, who in named.items():
            side = getattr(snapshot, role)[row]
            numbered = f"{who} · {row + 1} of {snapshot.n}" if snapshot.n > 1 else who
            why = drawn[role] + (_table(side) if snapshot.done else "")
            if why:
                opened = "" if folded or row else " open"
                why = f'<details class="zoo-why"{opened}><summary>Token by token</summary>{why}</details>'
            cards.append(side_card(snapshot.prompt, role, side, row=row, who=numbered, charts=why))
        rows.append(f'<div class="zoo-pair">{"".join(cards)}</div>')
    inside = _means(snapshot) + "".join(rows)
    inside += f'<p class="zoo-note">{text(snapshot.note)}</p>' if snapshot.note else ""
    state, busy = ("done", "false") if snapshot.done else ("writing", "true")
    return f'<div class="zoo-pairs" data-state="{state}" aria-busy="{busy}">{inside}</div>'


def empty_pairs() -> str:
    """Shows where the first comparison will stand."""
    cards = "".join(side_card("", role, None) for role in NAMES)
    return f'<div class="zoo-pairs" data-state="empty"><div class="zoo-pair">{cards}</div></div>'


def _table(side: Side) -> str:
    """What the heat map and the charts show, as numbers: for those who cannot hover or see colors."""
    valued = side.token_values is not None
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("token", "log π PPO", "log π SFT", "log-ratio", "KL"))
    head += "<th scope='col'>V</th>" if valued else ""
    rows = []
    for place, piece in enumerate(side.tokens):
        cells = [
            number(side.token_logprob_ppo[place]),
            number(side.token_logprob_sft[place]),
            signed(side.token_log_ratio[place]),
            number(side.token_kl[place], 3),
        ]
        if side.token_values is not None:
            cells.append(signed(side.token_values[place]))
        shown = text(piece).replace(" ", "\u2423").replace("\n", "\u21b5")
        rows.append(f"<tr><th scope='row'>{shown}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        '<details class="zoo-numbers"><summary>Numbers</summary><div class="zoo-scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _means(snapshot: Snapshot) -> str:
    """Means over n completions, with how many there are: n samples of one prompt are no evaluation."""
    if snapshot.n < 2 or not snapshot.done:
        return ""
    cells = []
    both: dict[Role, tuple[Side, ...]] = {"sft": snapshot.sft, "ppo": snapshot.ppo}
    for role, sides in both.items():
        rewards = [side.reward for side in sides if side.reward is not None]
        cells.append(
            f'<tr class="zoo-{role}"><th scope="row">{NAMES[role]}</th>'
            f'<td data-mean="{role}-reward">{signed(fmean(rewards)) if rewards else "none"}</td>'
            f'<td data-mean="{role}-log_ratio">{signed(fmean(side.log_ratio for side in sides))}</td>'
            f"<td>{number(fmean(side.kl for side in sides))}</td>"
            f"<td>{number(fmean(side.length for side in sides), 1)}</td>"
            f"<td>{sum(side.ended for side in sides)} of {snapshot.n}</td></tr>"
        )
    return (
        f'<div class="zoo-scroll"><table class="zoo-means"><caption>Means over {snapshot.n} completions of this prompt'
        "</caption><thead><tr><td></td><th>Reward</th><th>Log-ratio</th><th>KL along it</th><th>Tokens</th>"
        f"<th>Stopped by itself</th></tr></thead><tbody>{''.join(cells)}</tbody></table></div>"
    )


def legend() -> str:
    """Explains the shades, in nats; the page's style shows the legend of the chosen one."""

    def above(edges: Sequence[float]) -> list[str]:
        return [f"{low:g} to {high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g} and more"]

    below = [f"−{high:g} to −{low:g}" for low, high in pairwise(RATIO_EDGES)] + [f"−{RATIO_EDGES[-1]:g} and less"]
    ratio = "".join(f'<i class="m{k}">{name}</i>' for k, name in reversed(list(enumerate(below, 1))))
    ratio += "".join(f'<i class="p{k}">{name}</i>' for k, name in enumerate(above(RATIO_EDGES), 1))
    kl = "".join(f'<i class="k{k}">{name}</i>' for k, name in enumerate(above(KL_EDGES), 1))
    return (
        f'<div class="zoo-legend zoo-text"><p class="of-ratio">log-ratio of a token, nats: {ratio} '
        "<span>below 0: SFT would rather write it; above 0: PPO</span></p>"
        f'<p class="of-kl">KL at a position, nats: {kl}</p></div>'
    )
