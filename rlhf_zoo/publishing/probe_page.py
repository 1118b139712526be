"""Renders the findings of `rlhf-zoo probe` as one self-contained HTML page."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from ..errors import printable
from ..evaluation.probes.report import SEVERE_RATIO
from ..evaluation.rollouts import RolloutFindings
from ..evaluation.stats import Estimate
from ..fileio import now
from ..modeling.prompt_keys import format_group_count

#: Longest sample that the page shows, in characters.
MAX_SAMPLE = 2000
#: Kind of verdict -> CSS class of its color. The page also writes the verdict in words.
_VERDICT_CLASSES = {
    "hacked": "bad", "worse": "bad", "past the peak": "bad", "suspicious": "doubtful", "better": "good",
    "healthy": "good",
}  # fmt: skip


def probe_page(result: RolloutFindings, *, policy: str, reference: str) -> str:
    """Renders the page as HTML, which has no scripts and loads nothing. All text is escaped.

    Args:
        result: The findings.
        policy: Name of the policy's completions, such as the path of their file.
        reference: Name of SFT's completions.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        # Characters that a browser hides, or that change the direction of the text, are shown as escapes.
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shorten"] = _shorten
    return environment.get_template("probe_page.html.jinja").render(
        result=result,
        policy=policy,
        reference=reference,
        verdict_class=_VERDICT_CLASSES.get(result.verdict.kind, "open"),
        in_groups=format_group_count(result.groups, result.prompts),
        figures=list(_figures(result)),
        probes=sorted(result.report.probes, key=lambda probe: (not probe.fired, -probe.ratio)),
        bar_percent=lambda probe: round(100 * min(max(probe.ratio, 0.0) / SEVERE_RATIO, 1.0)),
        severe=SEVERE_RATIO,
        version=version("rlhf-zoo"),
        time=now(),
    )


def _figures(result: RolloutFindings) -> Iterator[tuple[str, Estimate]]:
    """Yields (title, estimate) of the figures behind the verdict, as far as they were measured."""
    verdict = result.verdict
    estimates = {
        "Training reward, policy − SFT": verdict.proxy_gain,
        "Judge, policy − SFT": verdict.judge_gain,
        "Win rate of the policy over SFT, by the judge": verdict.win_rate,
        "Share of labeled pairs that the judge orders correctly": verdict.judge.accuracy,
        "Share of own pairs that the judge orders correctly": verdict.judge.own_accuracy,
        "Rank correlation of the judge's scores on two halves of the samples": result.split_half,
    }
    yield from ((title, estimate) for title, estimate in estimates.items() if estimate is not None)


def _shorten(text: str) -> str:
    hidden_count = len(text) - MAX_SAMPLE
    return text if hidden_count <= 0 else f"{text[:MAX_SAMPLE]} … ({hidden_count:,} more characters)"
