"""A switch for the KL penalty: compares a run of the page with a run that was trained without the penalty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...fileio import int_or_none, is_finite
from ...publishing.catalog.card import CardEstimate
from ..engine import Timeline, TimelinePoint, TimelineRun
from .html import escape_text, format_number, format_signed

ON, OFF = 1, 0  # values of the slider
#: Figure -> its title in the table.
_FIGURE_TITLES = {"reward": "Reward", "judge": "Judge", "win_rate": "Win rate", "kl": "KL, nats"}


@dataclass(frozen=True)
class KLSwitch:
    """Two checkpoints of an ablation, with and without the KL penalty.

    Attributes:
        on: Run and checkpoint with the penalty.
        off: Run and checkpoint without the penalty. The checkpoint is the run's last, where the reward has been
            exploited longest, unless the page compares this run: then it is the page's checkpoint.
        compared_position: ON or OFF, the position of the checkpoint that the page compares.
    """

    on: tuple[TimelineRun, TimelinePoint]
    off: tuple[TimelineRun, TimelinePoint]
    compared_position: int

    @classmethod
    def of(cls, timeline: Timeline | None, step: object) -> KLSwitch | None:
        """Finds the two runs.

        Args:
            timeline: The runs; the first run has the compared checkpoint.
            step: The compared checkpoint's step, according to its card.

        Returns:
            The switch; None if every run with a known β has the penalty or none has it, or if the compared run's β is
            unknown.
        """
        if timeline is None:
            return None
        compared_run, card_step = timeline.default_run, int_or_none(step)
        point = compared_run.default_point
        if card_step is not None and card_step in compared_run.steps:
            point = compared_run.point_at(card_step)
        other_runs = [run for run in timeline.runs_with_beta if run.name != compared_run.name]
        if compared_run.beta == 0:
            # Of the other runs, the one with the smallest penalty differs least.
            on_run = next((run for run in reversed(other_runs) if run.beta), None)
            return None if on_run is None else cls((on_run, on_run.default_point), (compared_run, point), OFF)
        off_run = next((run for run in other_runs if run.beta == 0), None)
        if off_run is None or compared_run.beta is None:
            return None
        return cls((compared_run, point), (off_run, off_run.points[-1]), ON)

    def position_of(self, value: object) -> int:
        """Returns ON or OFF for a value of the slider, or `compared_position` for anything that is not a number.

        Args:
            value: The slider's value.
        """
        return (ON if value >= 0.5 else OFF) if is_finite(value) else self.compared_position

    def checkpoint_at(self, value: object) -> tuple[TimelineRun, TimelinePoint]:
        """Returns the run and checkpoint that a value of the slider selects.

        Args:
            value: The slider's value.
        """
        return self.on if self.position_of(value) == ON else self.off

    def label(self, value: object) -> str:
        """Describes the checkpoint that a value of the slider selects.

        Args:
            value: The slider's value.
        """
        run, point = self.checkpoint_at(value)
        penalty = f"with KL penalty, β = {run.beta:g}" if self.position_of(value) == ON else "without KL penalty, β = 0"
        return f"{penalty} · step {point.step}"

    @property
    def ends_html(self) -> str:
        """The labels below the two ends of the slider, as HTML."""
        return f'<p class="zoo-ends"><span>off (β = 0)</span><span>on (β = {self.on[0].beta:g})</span></p>'

    def html(self, value: object) -> str:
        """Renders the figures of both checkpoints on held-out prompts, and what they show.

        Args:
            value: The slider's value. The row of the checkpoint that it selects is emphasized.
        """
        _, off_point = self.off
        # The few completions on the page may not show what got worse, so show what the probes found in all texts.
        if self.position_of(value) == OFF and off_point.findings:
            note = escape_text(f"Texts at step {off_point.step}, before → after PPO: {' '.join(off_point.findings)}")
        else:
            wide_text, narrow_text = self._figures_texts()
            note = f'<span class="zoo-wide">{wide_text}</span><span class="zoo-narrow">{narrow_text}</span>'
        return f'<div class="zoo-switch"><p class="zoo-note">{note}</p>{self._table_html(value)}</div>'

    def _figures_texts(self) -> tuple[str, str]:
        """Returns what the figures show, in words for a wide screen and for a phone."""
        on_figures, off_figures = self._figures()
        if _difference(on_figures, off_figures, "reward") == 1 and "judge" in on_figures and "judge" in off_figures:
            judge_difference = _difference(on_figures, off_figures, "judge")
            if judge_difference == -1:
                return (
                    "Without the KL penalty, the reward is higher and the judge’s score is lower. Slide to read the "
                    "texts.",
                    "Off: reward higher, judge’s score lower.",
                )
            if judge_difference == 0:
                return (
                    "Without the KL penalty, the reward is higher; these prompts do not show whether the judge’s score "
                    "differs. Slide to read the texts.",
                    "Off: reward higher, judge not shown to differ.",
                )
        return "Slide to compare the texts with and without the KL penalty.", "Slide to compare the texts."

    def _prompt_kind(self) -> str:
        """Returns the kind of prompts on which both checkpoints have the most figures in common.

        In a tie, prefers a kind on which one of them has figures, and then test prompts.
        """
        on_by_kind, off_by_kind = self.on[1].evaluated, self.off[1].evaluated

        def sort_key(kind: str) -> tuple[int, bool]:
            common_figures = on_by_kind.get(kind, {}).keys() & off_by_kind.get(kind, {}).keys()
            return len(common_figures), kind in on_by_kind or kind in off_by_kind

        return max(("test", "validation"), key=sort_key)

    def _figures(self) -> tuple[Mapping[str, CardEstimate], Mapping[str, CardEstimate]]:
        """Returns the figures of both checkpoints on the same prompts."""
        kind = self._prompt_kind()
        return self.on[1].evaluated.get(kind, {}), self.off[1].evaluated.get(kind, {})

    def _table_html(self, value: object) -> str:
        on_figures, off_figures = self._figures()
        names = [name for name in _FIGURE_TITLES if name in on_figures or name in off_figures]
        if not names:
            return ""
        head = "".join(f'<th scope="col" data-figure="{name}">{_FIGURE_TITLES[name]}</th>' for name in names)
        rows = []
        for position, (_, point) in ((ON, self.on), (OFF, self.off)):
            cells = "".join(self._cell_html(position, name) for name in names)
            selection = ' data-selected="true"' if position == self.position_of(value) else ""
            title = f"{'On' if position == ON else 'Off'}, step {point.step}"
            rows.append(f'<tr{selection}><th scope="row">{title}</th>{cells}</tr>')
        has_arrows = any(_difference(on_figures, off_figures, name) for name in names)
        caption = f"On {self._prompt_kind()} prompts" + (" · ▲▼: 95% intervals apart" if has_arrows else "")
        return (
            '<div class="zoo-scroll" role="region" aria-label="Figures with and without KL penalty" tabindex="0">'
            f"<table><caption>{caption}</caption><thead><tr><td></td>{head}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _cell_html(self, position: int, name: str) -> str:
        on_figures, off_figures = self._figures()
        figure = (on_figures if position == ON else off_figures).get(name)
        format_figure = format_signed if name in ("reward", "judge") else format_number
        cell = format_figure(None if figure is None else figure.value)
        title = ""
        if figure is not None and figure.ci95 is not None:
            low, high = map(format_figure, figure.ci95)
            title = f' title="95% interval {low} to {high}"'
        difference = _difference(on_figures, off_figures, name)
        if position == OFF and difference:
            arrow, word = ("▲", "higher") if difference > 0 else ("▼", "lower")
            cell += f' <span class="zoo-arrow" role="img" aria-label="{word}">{arrow}</span>'
        return f'<td data-figure="{name}"{title}>{cell}</td>'


def _difference(on: Mapping[str, CardEstimate], off: Mapping[str, CardEstimate], name: str) -> int:
    """Returns 1 if a figure is higher without the penalty, −1 if it is lower, 0 if intervals overlap or are missing."""
    on_interval, off_interval = (figures[name].ci95 if name in figures else None for figures in (on, off))
    if on_interval is None or off_interval is None:
        return 0
    (on_low, on_high), (off_low, off_high) = on_interval, off_interval
    return int(off_low > on_high) - int(off_high < on_low)
