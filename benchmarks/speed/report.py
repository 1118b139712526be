"""Tables and a plot of the figures of benchmarks/bench.py, also for the docs."""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
PEER = "TRL 1.12"
SETTINGS = {
    "separate": (),
    "separate bf16": ("--bf16",),
    "shared": ("--shared",),
    "shared bf16": ("--shared", "--bf16"),
}
#: Keys that this trainer is also measured with in each setting: no padding, and longer passes.
END_TO_END = {"padding_free": True, "max_tokens_per_micro_batch": 1024}
PHASES = ("rollout", "reference", "values", "reward", "update")
# Beyond these limits, the seconds of a process are not shown.
MAX_LOAD = 0.3  # cores that other processes used meanwhile
MIN_CPU_SHARE = 0.7  # share of its threads' time in which the process computed instead of waiting for cores
NOTHING = "Nothing was measured yet: `make bench` does."

Report = Mapping[str, Any]
Parts = dict[tuple[str, str, str], dict[int, dict[str, Any]]]


def newest_report(section: str = "parts") -> Report:
    """Loads the newest committed figures with such a section; {} if there are none."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        report = json.loads(path.read_text())
        if report.get("kind") == "bench" and report.get(section):
            return {"name": path.name, **report}
    return {}


def group_parts(report: Report) -> Parts:
    """Groups the parts of a report: (point, side, setting) -> round -> the part."""
    parts: Parts = defaultdict(dict)
    for key, part in report.get("parts", {}).items():
        point, side, setting, round_number = key.split(" | ")
        parts[point, side, setting][int(round_number)] = part
    return parts


def was_disturbed(part: Report, threads: int) -> bool:
    """Whether other processes used the machine while a process ran, or it had to wait for cores."""
    cpu_share = statistics.median(update["cpu"] / update["seconds"] for update in part["updates"]) / threads
    return part["load"] > MAX_LOAD or cpu_share < MIN_CPU_SHARE


def undisturbed_parts(report: Report) -> Parts:
    """Groups the parts that ran while the machine did nothing else: only their times are shown."""
    return {
        key: {number: part for number, part in rounds.items() if not was_disturbed(part, report["threads"])}
        for key, rounds in group_parts(report).items()
    }


def median_seconds(part: Report) -> float:
    return statistics.median(update["seconds"] for update in part["updates"])


def ratios(over: Mapping[int, Report], under: Mapping[int, Report]) -> list[float]:
    """Returns the ratio of seconds in each round that both sides have.

    Raises:
        SystemExit: The sides sampled different numbers of tokens.
    """
    shared_rounds = sorted(over.keys() & under.keys())
    for number in shared_rounds:
        tokens = [[update["tokens"] for update in rounds[number]["updates"]] for rounds in (over, under)]
        if tokens[0] != tokens[1]:
            raise SystemExit(f"Round {number} compares unequal work: {tokens[0]} and {tokens[1]} tokens.")
    return [median_seconds(over[number]) / median_seconds(under[number]) for number in shared_rounds]


def table(report: Report) -> str:
    """A row for each point and setting: the sides' seconds per update, their ratios, and memory."""
    parts = group_parts(report)
    if not parts:
        return NOTHING
    timed, rows = undisturbed_parts(report), []
    for (point, side, setting), rounds in parts.items():
        if side != "ours" or "," in setting:
            continue
        peer_key = point, PEER, "separate"
        keys = peer_key, (point, side, setting), (point, "floor", setting)
        peer, here, floor = (timed.get(key, {}) for key in keys)
        rows.append([
            point, setting, _format_seconds(peer), _format_seconds(here), _format_ratio(ratios(peer, here)),
            _format_seconds(floor), _format_ratio(ratios(here, floor)), f"{_median_mib(rounds, 'peak'):,.0f}",
            f"{_median_mib(rounds):,.0f}", _memory_share(rounds, parts.get(peer_key, {})),
        ])  # fmt: skip
    headings = [
        "point",
        "setting",
        f"{PEER}, s",
        "here, s",
        "faster",
        "floor, s",
        "/ floor",
        "peak MiB",
        "net MiB",
        f"/ {PEER}",
    ]
    return f"{text.table(headings, rows)}\n\n{_describe_run(report)}"


def with_keys(setting: str, keys: Mapping[str, Any]) -> str:
    """Returns the name of a setting with further keys."""
    return ", ".join([setting, *(f"{key} {value}" for key, value in keys.items())])


def page(report: Report) -> str:
    """The table, a link to its file, and the plot, for the docs."""
    if not report:
        return NOTHING
    plot_file = DOCUMENT.with_suffix(".svg").name
    plot = f"\n\n![Seconds an update by phase]({plot_file})" if any(undisturbed_parts(report).values()) else ""
    return f"{table(report)} Of {_link(report)}.{plot}"


def _link(report: Report) -> str:
    return f"[{report['name']}](../benchmarks/results/{report['name']})"


def key_table(report: Report) -> str:
    """A row for each set of keys of PPOConfig: this trainer with them and without them, in the same rounds."""
    parts = group_parts(report)
    timed, rows = undisturbed_parts(report), []
    for (point, side, setting), rounds in parts.items():
        plain, _, keys = setting.partition(", ")
        if keys and (without := parts.get((point, side, plain))):
            faster = _format_ratio(ratios(timed[point, side, plain], timed[point, side, setting]))
            peer = _memory_share(rounds, parts.get((point, PEER, "separate"), {}))
            rows.append(
                [
                    point,
                    plain,
                    text.code(keys),
                    faster,
                    f"{_median_mib(rounds):,.0f}",
                    _memory_share(rounds, without),
                    peer,
                ]
            )
    return (
        text.table(["point", "setting", "with", "faster", "net MiB", "/ without", f"/ {PEER}"], rows)
        if rows
        else NOTHING
    )


def phase_table(report: Report) -> str:
    """A row for each point, side and setting: the seconds of each phase."""
    parts = {key: rounds for key, rounds in undisturbed_parts(report).items() if rounds}
    rows = []
    for (point, side, setting), rounds in parts.items():
        updates = [update["phases"] for part in rounds.values() for update in part["updates"]]
        spent = [statistics.median(update.get(phase, 0.0) for update in updates) for phase in PHASES]
        rows.append([point, f"{side}, {setting}", *(text.number(seconds, 2) for seconds in spent)])
    return text.table(["point", "side", *PHASES], rows) if rows else NOTHING


def profile_page(report: Report) -> str:
    """The table of `profile_table` and a link to its file, for the docs."""
    return f"{profile_table(report)}\n\nOf {_link(report)}, {report['machine']}." if report else NOTHING


def profile_table(report: Report) -> str:
    """A row for each point, side and setting: each kind's share of an update, and the update's seconds.

    The seconds are given while recording and without it. Profiles recorded on a busy machine are left out.
    """
    profiles = report.get("profiles", {})
    if not profiles:
        return NOTHING
    kinds = list(dict.fromkeys(kind for result in profiles.values() for kind in result["kinds"]))
    timed, rows = undisturbed_parts(report), []
    for key, result in profiles.items():
        point, side, setting = key.split(" | ")
        if result["load"] is not None and result["load"] > MAX_LOAD:  # older files have no load
            continue
        recorded = sum(result["kinds"].values())
        rows.append([
            point, f"{side}, {setting}", *(f"{result['kinds'].get(kind, 0.0) / recorded:.0%}" for kind in kinds),
            text.number(recorded, 2), _format_seconds(timed.get((point, side, setting), {})),
        ])  # fmt: skip
    return text.table(["point", "side", *kinds, "s, recorded", "s"], rows)


def draw(report: Report, path: Path) -> None:
    """Draws bars of seconds per update by phase, a panel for each point, without the settings of --set."""
    from matplotlib import pyplot

    parts = {key: rounds for key, rounds in undisturbed_parts(report).items() if rounds and key[2] in SETTINGS}
    points = list(dict.fromkeys(point for point, _, _ in parts))
    if not points:
        return
    figure, panels = pyplot.subplots(1, len(points), figsize=(4.2 * len(points), 4.2), squeeze=False)
    for panel, point in zip(panels[0], points, strict=True):
        bars = [(side, setting) for other_point, side, setting in parts if other_point == point]
        starts = [0.0] * len(bars)
        names = [f"{side}, {setting}" for side, setting in bars]
        for phase in PHASES:
            updates = [[update for part in parts[point, *bar].values() for update in part["updates"]] for bar in bars]
            spent = [statistics.median(update["phases"].get(phase, 0.0) for update in rows) for rows in updates]
            panel.barh(names, spent, left=starts, label=phase)
            starts = [start + more for start, more in zip(starts, spent, strict=True)]
        panel.invert_yaxis()
        panel.set(title=point, xlabel="seconds an update")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _format_seconds(rounds: Mapping[int, Report]) -> str:
    return text.number(statistics.median(map(median_seconds, rounds.values())), 2) if rounds else "–"


def _median_mib(rounds: Mapping[int, Report], which: str = "net") -> float:
    return statistics.median(part[f"{which}_mib"] for part in rounds.values())


def _format_ratio(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.2f} ×" if figures else "–"


def _memory_share(rounds: Mapping[int, Report], peer: Mapping[int, Report]) -> str:
    return f"{_median_mib(rounds) / _median_mib(peer):.0%}" if peer else "–"


def _describe_run(report: Report) -> str:
    """Names the machine and the versions behind the figures."""
    versions = report["versions"].get("here", {})
    loaded = sum(was_disturbed(part, report["threads"]) for part in report["parts"].values())
    words = [
        f"{report['machine']}, {report['cores']} cores, {report['threads']} threads, "
        f"{'with' if report['bf16 instructions'] else 'without'} bf16 instructions; "
        f"rlhf-zoo at {versions.get('rlhf-zoo', '?')}, torch {versions.get('torch', '?')}, "
        f"transformers {versions.get('transformers', '?')}; {report['date']}."
    ]
    if loaded:
        words.append(
            f"The machine was busy while {loaded} of {len(report['parts'])} processes ran: their memory is shown, "
            "and their seconds, which would say little, are not."
        )
    return " ".join(words)
