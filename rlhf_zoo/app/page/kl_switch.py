"""A switch of the KL penalty: compares a run of the page with a run that was trained without the penalty."""

from __future__ import annotations

from dataclasses import dataclass

from ...fileio import finite, integer
from ..engine import Timeline, TimelinePoint, TimelineRun
from .html import format_number, format_signed

ON, OFF = 1, 0  # values of the slider
#: Key of a figure -> its title in the table.
_FIGURES = {"reward": "Reward", "judge": "Judge", "win_rate": "Win rate", "kl": "KL, nats"}


@dataclass(frozen=True)
class KLSwitch:
    """Two checkpoints of an ablation, with and without the KL penalty.

    Attributes:
        on: Run and checkpoint with the penalty.
        off: Run and checkpoint without the penalty: the run's last checkpoint, where the reward has been exploited
            longest; if this is the run that the page compares, the page's checkpoint instead.
        compared: Which of the two is the checkpoint that the page compares: ON or OFF.
    """

    on: tuple[TimelineRun, TimelinePoint]
    off: tuple[TimelineRun, TimelinePoint]
    compared: int

    @classmethod
    def of(cls, timeline: Timeline | None, step: object) -> KLSwitch | None:
        """Finds the two runs.

        Args:
            timeline: The runs; the first run has the compared checkpoint.
            step: The compared checkpoint's step, according to its card.

        Returns:
            The switch; None if every run has the penalty, or no run has it.
        """
        if timeline is None:
            return None
        compared_run = timeline.find_run()
        card_step = integer(step)
        point = (
            compared_run.point_at(card_step)
            if card_step in compared_run.steps and card_step is not None
            else compared_run.best
        )
        other_runs = [run for run in timeline.by_beta if run.name != compared_run.name]
        if compared_run.beta == 0:
            # Of the other runs, the one with the smallest penalty differs least.
            weakest = next((run for run in reversed(other_runs) if run.beta), None)
            return cls((weakest, weakest.best), (compared_run, point), OFF) if weakest is not None else None
        off = next((run for run in other_runs if run.beta == 0), None)
        if off is None or compared_run.beta is None:
            return None
        return cls((compared_run, point), (off, off.points[-1]), ON)

    def position_of(self, value: object) -> int:
        """Returns ON or OFF for a value of the slider, or `compared` for anything that is not a number.

        Args:
            value: The slider's value.
        """
        return (ON if value >= 0.5 else OFF) if finite(value) else self.compared

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
    def ends(self) -> str:
        """The labels below the two ends of the slider, as HTML."""
        return f'<p class="zoo-ends"><span>off (β = 0)</span><span>on (β = {self.on[0].beta:g})</span></p>'

    def html(self, value: object) -> str:
        """Renders the figures of both checkpoints on held-out prompts.

        Args:
            value: The slider's value, whose row is emphasized.
        """
        return f'<div class="zoo-switch"><p class="zoo-note">{self._finding()}</p>{self._table(value)}</div>'

    def _finding(self) -> str:
        on, off = self.on[1].evaluated, self.off[1].evaluated
        both = [name for name in ("reward", "judge") if name in on and name in off]
        if len(both) == 2 and off["reward"] > on["reward"] and off["judge"] < on["judge"]:
            return "Without the KL penalty the reward is higher and the judge’s score lower. Slide to read the texts."
        return "Slide to compare the texts with and without the KL penalty."

    def _table(self, value: object) -> str:
        shown = [name for name in _FIGURES if name in self.on[1].evaluated or name in self.off[1].evaluated]
        if not shown:
            return ""
        head = "".join(f'<th scope="col" data-figure="{name}">{_FIGURES[name]}</th>' for name in shown)
        rows = []
        for side, (_, point) in ((ON, self.on), (OFF, self.off)):
            cells = "".join(f'<td data-figure="{name}">{self._cell(side, name)}</td>' for name in shown)
            selection = ' data-selected="true"' if side == self.position_of(value) else ""
            name = f"{'On' if side == ON else 'Off'}, step {point.step}"
            rows.append(f'<tr{selection}><th scope="row">{name}</th>{cells}</tr>')
        return (
            '<div class="zoo-scroll" role="region" aria-label="Figures with and without KL penalty" tabindex="0">'
            f"<table><caption>On held-out prompts</caption><thead><tr><td></td>{head}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _cell(self, side: int, name: str) -> str:
        on, off = self.on[1].evaluated.get(name), self.off[1].evaluated.get(name)
        figure = on if side == ON else off
        cell = format_signed(figure) if name in ("reward", "judge") else format_number(figure)
        if side == OFF and on is not None and off is not None and on != off:
            arrow, word = ("▲", "higher") if off > on else ("▼", "lower")
            cell += f' <span class="zoo-arrow" role="img" aria-label="{word}">{arrow}</span>'
        return cell
