"""Renders the figures of the votes so far as HTML: counts, win rate with interval, and Elo ratings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .html import escape_text, figure_list_html, format_number, html_attributes, shorten_name
from .views import role_names
from .vote_counts import VoteFigures

MAX_RATINGS = 30  # rows of the table, because the data set may name any number of models


@dataclass(frozen=True)
class ModelRevision:
    """A model as votes name it.

    Attributes:
        repo: NAMESPACE/NAME; None for a local folder, which has neither commit nor tag.
        commit: Its commit.
        tag: The commit's tag; None if it has no tag.
    """

    repo: str | None = None
    commit: str | None = None
    tag: str | None = None

    @property
    def name(self) -> str:
        """The name on the page. It is not escaped."""
        if self.repo is None:
            return "a folder, not on the Hub"
        name = shorten_name(self.repo if self.tag is None else f"{self.repo}@{self.tag}")
        return name if self.commit is None else f"{name} ({self.commit[:8]})"


def votes_html(figures: VoteFigures, data_set: str, initial_policy: str = "SFT") -> str:
    """Renders the figures. Names from the data set are escaped, because they are not trusted.

    Args:
        figures: The figures of the votes.
        data_set: The data set of the votes, NAMESPACE/NAME.
        initial_policy: As for `role_names`.
    """
    counts, start_title = figures.summary["counts"], role_names(initial_policy)["sft"]
    start_title = start_title[0].upper() + start_title[1:]
    labels = {"ppo": "PPO preferred", "sft": f"{start_title} preferred", "tie": "Tie", "both_bad": "Both bad"}
    rows = [(key, label, counts[key]) for key, label in labels.items()]
    vote_count = figures.summary["votes"]
    head = f"<h2>{vote_count} vote{'s' * (vote_count != 1)} so far</h2>"
    head += _win_rate_html(figures.summary["win_rate"], initial_policy)
    is_exact = str(figures.is_exact).lower()
    notes = "".join(f'<p class="zoo-note">{note}</p>' for note in _notes(figures, data_set))
    return (
        f'<section class="zoo-votes-so-far" data-votes="{vote_count}" data-exact="{is_exact}">'
        f"{head}{figure_list_html(rows)}{_ratings_html(figures.summary, initial_policy)}{notes}</section>"
    )


def _win_rate_html(rate: Mapping[str, Any] | None, initial_policy: str) -> str:
    if rate is None:
        return '<p class="zoo-rate">No votes count toward the win rate yet.</p>'
    value, interval = rate["value"], rate["ci95"]
    ci_text = (
        f"[{format_number(100 * interval[0], 1)}%, {format_number(100 * interval[1], 1)}%]"
        if interval
        else "not yet computed"
    )
    description = (
        f"PPO is preferred over {initial_policy} in {format_number(100 * value, 1)}% of {rate['n']} votes, where a tie "
        f"counts one half and “Both bad” is left out; 95% interval {ci_text}"
    )
    prompt_count = rate.get("prompts")
    prompt_note = f" ({prompt_count} prompt{'s' * (prompt_count != 1)} so far)" if prompt_count else ""
    band = ""
    if interval:
        low, high = (min(max(bound, 0.0), 1.0) for bound in interval)
        band = f'<i class="band" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></i>'
    return (
        f'<p class="zoo-rate"><b data-figure="win_rate">{format_number(100 * value, 1)}%</b> PPO over {initial_policy}'
        f', 95% interval <span data-figure="ci95">{ci_text}</span>, n = <span data-figure="n">{rate["n"]}</span>. '
        'A tie counts one half; “Both bad” is left out.</p><p class="zoo-interval-note">The interval resamples whole '
        f"prompts{prompt_note}, because votes on the same prompt are not independent.</p>"
        f'<div class="zoo-bar" role="img"{html_attributes({"aria-label": description})}>{band}<i class="half"></i>'
        f'<i class="point" style="left:{100 * value:.2f}%"></i></div>'
        f'<p class="zoo-ends" aria-hidden="true"><span>{role_names(initial_policy)["sft"]}</span><span>½</span>'
        "<span>PPO</span></p>"
    )


def _ratings_html(summary: Mapping[str, Any], initial_policy: str) -> str:
    """Renders the Elo rating of each revision; "" without ratings, or with fewer than two pairs of models."""
    ratings = summary["elo"]
    if len(summary["pairs"]) < 2 or not ratings:
        return ""
    has_groups = len({row["among"] for row in ratings}) > 1
    heads = ["Revision", "Elo", "95% interval", "Votes", *(["Group"] if has_groups else [])]
    rows = []
    for row in ratings[:MAX_RATINGS]:
        rating, name = row["elo"], ModelRevision(row["repo"], row["commit"], row["tag"]).name
        low, high = rating["ci95"]
        cells = [f"{rating['value']:.0f}", f"{low:.0f} to {high:.0f}", rating["n"], *([row["among"] + 1] * has_groups)]
        header = f'<th scope="row">{role_names(initial_policy)[row["role"]]} {escape_text(name)}</th>'
        rows.append(f"<tr>{header}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    notes = " Ratings of different groups cannot be compared." if has_groups else ""
    if len(ratings) > MAX_RATINGS:
        notes += f" {len(ratings) - MAX_RATINGS} more ratings are not shown."
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        f'<p class="zoo-elo-title">Elo rating of each revision, 1000 on average.{notes}</p>'
        '<div class="zoo-scroll" tabindex="0" role="region" aria-label="Elo ratings"><table class="zoo-elo">'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _notes(figures: VoteFigures, data_set: str) -> Iterator[str]:
    """Yields sentences on what the figures lack, as HTML."""
    data_set = escape_text(data_set)
    if not figures.is_exact and figures.votes_in_intervals:
        yield f"Intervals and ratings cover {figures.votes_in_intervals} of these votes; the others are being added."
    if figures.send_problem is not None and figures.unsent_count:
        subject = "1 vote is" if figures.unsent_count == 1 else f"{figures.unsent_count} votes are"
        yield (
            f"{subject} waiting on the server, because {data_set} is not accepting votes at the moment "
            f"({escape_text(figures.send_problem)}). The server keeps trying."
        )
    if figures.read_problem is not None:
        problem = escape_text(figures.read_problem)
        yield f"Votes that {data_set} received from other pages may be missing here ({problem})."
