"""Renders completions as HTML: text with a heat map, figures, and a table of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..engine import PolicyCompletion, Snapshot
from .charts import Role, draw_token_bars, draw_token_line
from .html import DASH, STOP_LABELS, escape_text, figure_list_html, format_number, format_signed, html_attributes

ROLE_DESCRIPTIONS: dict[Role, str] = {"sft": "where PPO started", "ppo": "trained to maximize the reward"}
#: Longer completions get their charts only when they are done, because redrawing the charts for each token is slow.
MAX_TOKENS_DRAWN_IN_PROGRESS = 128
#: Thresholds of the heat map's shades, in nats.
RATIO_EDGES = (0.05, 0.25, 1.0, 2.5)
KL_EDGES = (0.01, 0.1, 0.5, 2.0)


def role_names(initial_policy: str) -> dict[Role, str]:
    """Returns role -> name on the page, in the order of the columns.

    Args:
        initial_policy: What sentences call the policy that PPO started from: "SFT" or "the base".
    """
    return {"sft": initial_policy.removeprefix("the "), "ppo": "PPO"}


def shade_level(value: float, edges: Sequence[float]) -> int:
    """Returns a figure's shade in the heat map: the number of thresholds that the figure reaches.

    Args:
        value: The figure.
        edges: Ascending thresholds.
    """
    return sum(value >= edge for edge in edges)


def _shade_classes(sample: PolicyCompletion, index: int) -> str | None:
    """Returns the CSS classes of a token's shades: p1 to p4 or m1 to m4 by log-ratio, k1 to k4 by KL."""
    ratio, kl = sample.token_log_ratio[index], sample.token_kl[index]
    classes = []
    if level := shade_level(abs(ratio), RATIO_EDGES):
        classes.append(f"{'p' if ratio > 0 else 'm'}{level}")
    if level := shade_level(kl, KL_EDGES):
        classes.append(f"k{level}")
    return " ".join(classes) or None


def _token_tooltip(sample: PolicyCompletion, index: int) -> str:
    ratio, kl = format_signed(sample.token_log_ratio[index]), format_number(sample.token_kl[index])
    tooltip = f"log-ratio {ratio}, KL {kl} nats"
    if sample.token_values is not None:
        tooltip += f", V {format_signed(sample.token_values[index])}"
    return tooltip


def _token_elements(sample: PolicyCompletion) -> Iterator[str]:
    """Yields each token as an HTML element. The end-of-sequence token is shown as ∎, not as its text."""
    for index, token_text in enumerate(sample.tokens):
        is_eos = sample.ended and index == len(sample.tokens) - 1
        token_html = '<span class="eos" title="end of sequence">∎</span>' if is_eos else escape_text(token_text)
        if not token_html:
            continue
        tooltip = _token_tooltip(sample, index) if sample.stop is not None else None
        yield f"<i{html_attributes({'class': _shade_classes(sample, index), 'title': tooltip})}>{token_html}</i>"


def completion_html(
    prompt: str, sample: PolicyCompletion | None, *, heat_map: bool = False, is_chat: bool = False
) -> str:
    """Renders a prompt and a policy's completion.

    Args:
        prompt: The prompt.
        sample: The completion; None renders a placeholder.
        heat_map: Whether to render each token with its shades and a tooltip.
        is_chat: Whether the completion answers the prompt. If so, it gets its own paragraph.
    """
    if sample is None:
        return '<p class="zoo-text"><span class="none">The completion will appear here.</span></p>'
    completion_text = "".join(_token_elements(sample)) if heat_map else escape_text(sample.completion)
    caret = "" if sample.stop is not None else '<span class="caret" aria-hidden="true"></span>'
    return (
        f'<p class="zoo-text{" zoo-chat" if is_chat else ""}"><span class="prompt">{escape_text(prompt)}</span>'
        f'<span class="completion">{completion_text}</span>{caret}</p>'
    )


def figures_html(sample: PolicyCompletion | None) -> str:
    """Renders reward, log-ratio, KL summed over the completion, length and stop reason.

    Args:
        sample: The completion; None renders dashes.
    """
    values = [DASH] * 5
    if sample is not None:
        reward = "none" if sample.reward is None and sample.stop is not None else format_signed(sample.reward)
        values = [
            reward,
            format_signed(sample.log_ratio),
            format_number(sample.kl),
            str(sample.length),
            STOP_LABELS[sample.stop],
        ]
    keys = ("reward", "log_ratio", "kl", "length", "stopped")
    labels = ("Reward", "Log-ratio", "Summed KL", "Tokens", "Stopped")
    return figure_list_html(zip(keys, labels, values, strict=True))


def _policy_column_html(
    prompt: str,
    role: Role,
    sample: PolicyCompletion | None,
    *,
    name: str,
    row: int = 0,
    label: str = "",
    is_chat: bool = False,
) -> str:
    """Renders one policy's column: name, completion and figures. Without a completion, renders a placeholder."""
    head = f"<header><h3>{name}</h3><span>{label or ROLE_DESCRIPTIONS[role]}</span></header>"
    return (
        f'<article class="zoo-card zoo-{role}" data-side="{role}" data-row="{row}">{head}'
        f"{completion_html(prompt, sample, heat_map=True, is_chat=is_chat)}{figures_html(sample)}</article>"
    )


def _draw_token_charts(snapshot: Snapshot, row: int) -> dict[Role, str]:
    """Draws KL and values at each position. Returns {role: HTML}, with "" while a long completion is in progress."""
    samples: dict[Role, PolicyCompletion] = {"sft": snapshot.sft[row], "ppo": snapshot.ppo[row]}
    if not snapshot.done and any(sample.length > MAX_TOKENS_DRAWN_IN_PROGRESS for sample in samples.values()):
        return dict.fromkeys(samples, "")
    x_max = max(sample.length for sample in samples.values())
    kl_max = max((kl for sample in samples.values() for kl in sample.token_kl), default=0.0)
    all_values = [value for sample in samples.values() for value in sample.token_values or ()]
    html_by_role = {}
    for role, sample in samples.items():
        options: dict[str, Any] = {"labels": sample.tokens, "role": role, "x_max": x_max}
        html = draw_token_bars(sample.token_kl, title="KL at each position", unit="nats", y_max=kl_max, **options)
        if sample.token_values is not None:
            span = (min(all_values), max(all_values))
            html += draw_token_line(
                sample.token_values, title="PPO's value at each position", unit="", span=span, **options
            )
        html_by_role[role] = f'<div class="zoo-charts">{html}</div>'
    return html_by_role


def pairs_html(
    snapshot: Snapshot,
    *,
    ppo_label: str = ROLE_DESCRIPTIONS["ppo"],
    is_collapsed: bool = False,
    link: str | None = None,
) -> str:
    """Renders all completions of a snapshot. The two completions that share a random stream are side by side.

    Args:
        snapshot: Completions of both policies.
        ppo_label: HTML next to PPO's name.
        is_collapsed: Whether to collapse the token details of the first pair too. Those of other pairs always are.
        link: Address that shows the same completions again; None to show no link.
    """
    rows = []
    labels: dict[Role, str] = {"sft": ROLE_DESCRIPTIONS["sft"], "ppo": ppo_label}
    names = role_names(snapshot.initial_policy)
    for row in range(snapshot.n):
        cards = []
        for role, label in labels.items():
            label = f"{label} · {row + 1} of {snapshot.n}" if snapshot.n > 1 else label
            sample = getattr(snapshot, role)[row]
            options: dict[str, Any] = {"name": names[role], "row": row, "label": label, "is_chat": snapshot.is_chat}
            cards.append(_policy_column_html(snapshot.prompt, role, sample, **options))
        details = _token_details_html(snapshot, row, is_collapsed=is_collapsed or row > 0)
        rows.append(f'<div class="zoo-pair">{"".join(cards)}</div>{details}')
    content = _means_html(snapshot) + "".join(rows)
    content += f'<p class="zoo-note">{escape_text(snapshot.note)}</p>' if snapshot.note else ""
    if link is not None and snapshot.done:
        content += f'<p class="zoo-note zoo-link"><a{html_attributes({"href": link})}>Link to this comparison</a></p>'
    state, busy = ("done", "false") if snapshot.done else ("writing", "true")
    return f'<div class="zoo-pairs" data-state="{state}" aria-busy="{busy}">{content}</div>'


def _token_details_html(snapshot: Snapshot, row: int, *, is_collapsed: bool) -> str:
    """Renders charts and numbers of both policies in one `details` element, below their cards."""
    # While completions are in progress, only the first pair has charts, because redrawing all of them is slow.
    chart_html = _draw_token_charts(snapshot, row) if row == 0 or snapshot.done else {}
    names = role_names(snapshot.initial_policy)
    columns = "".join(
        f'<div data-side="{role}" data-row="{row}"><h4>{names[role]}</h4>{html}</div>'
        for role, html in chart_html.items()
        if html
    )
    numbers = ""
    if snapshot.done:
        tables = "".join(_token_table_html(role, getattr(snapshot, role)[row], names) for role in names)
        numbers = (
            f'<details class="zoo-numbers"><summary>Numbers</summary><div class="zoo-pair">{tables}</div></details>'
        )
    if not columns and not numbers:
        return ""
    open_attribute = "" if is_collapsed else " open"
    return (
        f'<details class="zoo-token-details"{open_attribute}><summary>Token by token</summary>'
        f'<div class="zoo-pair">{columns}</div>{numbers}</details>'
    )


def summary_html(snapshot: Snapshot) -> str:
    """Summarizes finished completions in words, for screen readers; "" while they are in progress.

    Args:
        snapshot: Completions of both policies.
    """
    if not snapshot.done:
        return ""
    parts, names = [], role_names(snapshot.initial_policy)
    samples_by_role: dict[Role, tuple[PolicyCompletion, ...]] = {"sft": snapshot.sft, "ppo": snapshot.ppo}
    for role, samples in samples_by_role.items():
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        reward = f"reward {format_signed(fmean(rewards))}, " if rewards else ""
        length = format_number(fmean(sample.length for sample in samples), 0)
        parts.append(f"{names[role]}: {reward}{length} tokens")
    mean_note = f", means over {snapshot.n} completions" if snapshot.n > 1 else ""
    return f'<p class="zoo-visually-hidden">Finished{mean_note}. {". ".join(parts)}.</p>'


def empty_pairs_html(initial_policy: str = "SFT") -> str:
    """Renders a placeholder until the first comparison.

    Args:
        initial_policy: As for `role_names`.
    """
    names = role_names(initial_policy)
    cards = "".join(_policy_column_html("", role, None, name=name) for role, name in names.items())
    return f'<div class="zoo-pairs" data-state="empty"><div class="zoo-pair">{cards}</div></div>'


def _token_table_html(role: Role, sample: PolicyCompletion, names: Mapping[Role, str]) -> str:
    """Renders the figures of each token as a table, for readers who cannot hover over tokens or see colors."""
    has_values = sample.token_values is not None
    columns = ("token", "log π PPO", f"log π {names['sft']}", "log-ratio", "KL")
    head = "".join(f"<th scope='col'>{column}</th>" for column in columns)
    head += "<th scope='col'>V</th>" if has_values else ""
    rows = []
    for index, token in enumerate(sample.tokens):
        cells = [
            format_number(sample.token_logprob_ppo[index]),
            format_number(sample.token_logprob_sft[index]),
            format_signed(sample.token_log_ratio[index]),
            format_number(sample.token_kl[index], 3),
        ]
        if sample.token_values is not None:
            cells.append(format_signed(sample.token_values[index]))
        token_html = escape_text(token).replace(" ", "\u2423").replace("\n", "\u21b5")
        rows.append(f"<tr><th scope='row'>{token_html}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    name = names[role]
    return (
        f'<div><h4>{name}</h4><div class="zoo-scroll" role="region" aria-label="Numbers of {name}" '
        f'tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></div>'
    )


def _means_html(snapshot: Snapshot) -> str:
    """Renders the means over n completions of one prompt; "" for a single completion or before all are done."""
    if snapshot.n < 2 or not snapshot.done:
        return ""
    rows, names = [], role_names(snapshot.initial_policy)
    samples_by_role: dict[Role, tuple[PolicyCompletion, ...]] = {"sft": snapshot.sft, "ppo": snapshot.ppo}
    for role, samples in samples_by_role.items():
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        rows.append(
            f'<tr class="zoo-{role}"><th scope="row">{names[role]}</th>'
            f'<td data-mean="{role}-reward">{format_signed(fmean(rewards)) if rewards else "none"}</td>'
            f'<td data-mean="{role}-log_ratio">{format_signed(fmean(sample.log_ratio for sample in samples))}</td>'
            f"<td>{format_number(fmean(sample.kl for sample in samples))}</td>"
            f"<td>{format_number(fmean(sample.length for sample in samples), 1)}</td>"
            f"<td>{sum(sample.ended for sample in samples)} of {snapshot.n}</td></tr>"
        )
    return (
        f'<div class="zoo-scroll"><table class="zoo-means"><caption>Means over {snapshot.n} completions of this prompt'
        "</caption><thead><tr><td></td><th>Reward</th><th>Log-ratio</th><th>Summed KL</th><th>Tokens</th>"
        f"<th>Stopped by itself</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def legend_html(initial_policy: str = "SFT") -> str:
    """Renders the legends of both heat maps. The style sheet shows the legend of the selected one.

    Args:
        initial_policy: As for `role_names`.
    """

    def positive_ranges(edges: Sequence[float]) -> list[str]:
        return [f"{low:g} to {high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g} and more"]

    negative_ranges = [f"−{high:g} to −{low:g}" for low, high in pairwise(RATIO_EDGES)]
    negative_ranges.append(f"−{RATIO_EDGES[-1]:g} and less")
    ratio = "".join(f'<i class="m{k}">{name}</i>' for k, name in reversed(list(enumerate(negative_ranges, 1))))
    ratio += "".join(f'<i class="p{k}">{name}</i>' for k, name in enumerate(positive_ranges(RATIO_EDGES), 1))
    kl = "".join(f'<i class="k{k}">{name}</i>' for k, name in enumerate(positive_ranges(KL_EDGES), 1))
    return (
        f'<div class="zoo-legend zoo-text"><p class="of-ratio">log-ratio of a token, nats: {ratio} '
        f"<span>below 0: more likely under {initial_policy}; above 0: more likely under PPO</span></p>"
        f'<p class="of-kl">KL at a position, nats: {kl}</p></div>'
    )
