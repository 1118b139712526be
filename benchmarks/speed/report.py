"""What the figures of benchmarks/bench.py say: a table, a plot, and the newest of them for the docs."""

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
#: What this trainer does beside each setting: no padding, and longer passes.
END_TO_END = {"padding_free": True, "max_tokens_per_micro_batch": 1024}
PHASES = ("rollout", "reference", "values", "reward", "update")
#: What was aimed at: a heading, the setting, beside whom, and the figure for each point.
FAST = {"full": 2.8, "eos": 3.5, "wide": 6.0, "long": 3.5}
NEAR = {"full": 1.15, "eos": 1.15, "long": 1.15, "smollm2": 1.1}
AIMS: list[tuple[str, str, str, Mapping[str, float]]] = [
    (
        "faster than TRL, same algorithm",
        "separate",
        PEER,
        {"full": 1.4, "eos": 1.9, "wide": 3.0, "long": 2.1, "smollm2": 1.55},
    ),
    ("faster than TRL, shared trunk", "shared", PEER, FAST | {"smollm2": 2.6}),
    ("faster than TRL, bf16 alone", "separate bf16", PEER, FAST),
    ("faster than TRL, shared trunk and bf16", "shared bf16", PEER, FAST),
    *((f"seconds by the floor's, {setting}", setting, "floor", NEAR) for setting in SETTINGS),
]
MEMORY = {"full": 0.5, "eos": 0.5, "wide": 0.4, "long": 0.4, "smollm2": 0.3}
QUIET = 0.3  # cores that others use while a process runs, above which its seconds are not to be trusted
BUSY = 0.7  # of its threads' time that a process computes, below which it was waiting for cores
NOTHING = "Nothing was measured yet: `make bench` does."

Report = Mapping[str, Any]
Parts = dict[tuple[str, str, str], dict[int, dict[str, Any]]]


def newest(having: str = "parts") -> Report:
    """The last committed figures that have such a part; empty where there are none."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        report = json.loads(path.read_text())
        if report.get("kind") == "bench" and report.get(having):
            return {"name": path.name, **report}
    return {}


def parts_of(report: Report) -> Parts:
    """(point, side, setting) -> round -> what its process said."""
    parts: Parts = defaultdict(dict)
    for key, part in report.get("parts", {}).items():
        point, side, setting, number = key.split(" | ")
        parts[point, side, setting][int(number)] = part
    return parts


def disturbed(part: Report, threads: int) -> bool:
    """Whether others used the machine while a process ran, or it had to wait for cores."""
    return part["load"] > QUIET or statistics.median(u["cpu"] / u["seconds"] for u in part["updates"]) < BUSY * threads


def quiet(report: Report) -> Parts:
    """What was measured while the machine did nothing else: only this has times worth a look."""
    return {
        key: {number: part for number, part in rounds.items() if not disturbed(part, report["threads"])}
        for key, rounds in parts_of(report).items()
    }


def seconds(part: Report) -> float:
    return statistics.median(update["seconds"] for update in part["updates"])


def ratios(over: Mapping[int, Report], under: Mapping[int, Report]) -> list[float]:
    """The ratio of seconds within each round that has both."""
    both = sorted(over.keys() & under.keys())
    for number in both:
        tokens = [[update["tokens"] for update in one[number]["updates"]] for one in (over, under)]
        if tokens[0] != tokens[1]:
            raise SystemExit(f"Round {number} compares unequal work: {tokens[0]} and {tokens[1]} tokens.")
    return [seconds(over[number]) / seconds(under[number]) for number in both]


def table(report: Report) -> str:
    """One row for each point and setting: seconds an update of the sides, ratios and memory."""
    parts = parts_of(report)
    if not parts:
        return NOTHING
    timed, rows = quiet(report), []
    for (point, side, setting), rounds in parts.items():
        if side != "ours" or "," in setting:
            continue
        other = point, PEER, "separate"
        peer, here, floor = (timed.get(key, {}) for key in (other, (point, side, setting), (point, "floor", setting)))
        rows.append([
            point, setting, _middle(peer), _middle(here), _times(ratios(peer, here)), _middle(floor),
            _times(ratios(here, floor)), f"{_mib(rounds, 'peak'):,.0f}",
            f"{_mib(rounds):,.0f}", _share(rounds, parts.get(other, {})),
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
    return f"{text.table(headings, rows)}\n\n{_under(report)}"


def aims_table(report: Report) -> str:
    """What was aimed at and what was seen, in bold where it is reached, with the range over rounds."""
    parts, timed = parts_of(report), quiet(report)
    points = [point for point in MEMORY if (point, "ours", "separate") in parts]
    rows = []
    for heading, setting, beside, aims in AIMS:
        cells = []
        for point in points:
            here, laid = (timed.get((point, "ours", each), {}) for each in (setting, with_keys(setting, END_TO_END)))
            floor, peer = timed.get((point, "floor", setting), {}), timed.get((point, PEER, "separate"), {})
            other, least = (peer, True) if beside == PEER else (floor, False)
            seen = [ratios(other, each) if least else ratios(each, other) for each in (here, laid)]
            best = ratios(peer, floor) if least else []
            cells.append(_aim(aims.get(point), *seen, best=best, least=least))
        rows.append([heading, *cells])
    cells = []
    for point in points:
        peer = parts.get((point, PEER, "separate"), {})
        mine = (parts.get((point, "ours", each)) for each in ("separate", with_keys("separate", END_TO_END)))
        cells.append(_aim(MEMORY[point], *([_mib(each) / _mib(peer)] if each and peer else [] for each in mine)))
    rows.append(["net memory by TRL's, same algorithm", *cells])
    return text.table(["aim", *points], [row for row in rows if set(row[1:]) != {"–"}]) if points else NOTHING


def with_keys(setting: str, keys: Mapping[str, Any]) -> str:
    """What this trainer's figures of a setting with some keys are called."""
    return ", ".join([setting, *(f"{name} {value}" for name, value in keys.items())])


def _aim(
    aim: float | None, seen: Sequence[float], laid: Sequence[float], *, best: Sequence[float] = (), least: bool = False
) -> str:
    """laid: with rows end to end; best: what the floor reaches."""

    def said(name: str, figures: Sequence[float]) -> str:
        middle = statistics.median(figures)
        reached = aim is not None and name != "the floor " and (middle >= aim if least else middle <= aim)
        spread = f" ({min(figures):.2f} to {max(figures):.2f})" if len(figures) > 1 and name != "the floor " else ""
        return f"{name}{'**' * reached}{middle:.2f}{'**' * reached}{spread}"

    if not seen:
        return "–"
    sign = "" if aim is None else f"{'≥' if least else '≤'} {aim:g}: "
    named = {"": seen, "end to end ": laid, "the floor ": best}
    return sign + "; ".join(said(name, figures) for name, figures in named.items() if figures)


def page(report: Report) -> str:
    """The table, the plot and the name of their file, for the docs."""
    if not report:
        return NOTHING
    plot = DOCUMENT.with_suffix(".svg").name
    drawn = f"\n\n![Seconds an update by phase]({plot})" if any(quiet(report).values()) else ""
    return f"{table(report)} Of {_link(report)}.{drawn}"


def _link(report: Report) -> str:
    return f"[{report['name']}](../benchmarks/results/{report['name']})"


def key_table(report: Report) -> str:
    """What keys of PPOConfig bring: this trainer with them beside itself without, in the same rounds."""
    parts = parts_of(report)
    timed, rows = quiet(report), []
    for (point, side, setting), rounds in parts.items():
        plain, _, keys = setting.partition(", ")
        if keys and (without := parts.get((point, side, plain))):
            faster = _times(ratios(timed[point, side, plain], timed[point, side, setting]))
            peer = _share(rounds, parts.get((point, PEER, "separate"), {}))
            rows.append([point, plain, text.code(keys), faster, f"{_mib(rounds):,.0f}", _share(rounds, without), peer])
    return (
        text.table(["point", "setting", "with", "faster", "net MiB", "/ without", f"/ {PEER}"], rows)
        if rows
        else NOTHING
    )


def phase_table(report: Report) -> str:
    """Seconds of each phase, a row for each point, side and setting."""
    parts = {key: rounds for key, rounds in quiet(report).items() if rounds}
    rows = []
    for (point, side, setting), rounds in parts.items():
        updates = [update["phases"] for part in rounds.values() for update in part["updates"]]
        spent = [statistics.median(update.get(phase, 0.0) for update in updates) for phase in PHASES]
        rows.append([point, f"{side}, {setting}", *(text.number(each, 2) for each in spent)])
    return text.table(["point", "side", *PHASES], rows) if rows else NOTHING


def profile_page(report: Report) -> str:
    """The table of `profile_table` and the name of its file, for the docs."""
    return f"{profile_table(report)}\n\nOf {_link(report)}, {report['machine']}." if report else NOTHING


def profile_table(report: Report) -> str:
    """What share of an update each kind of operation takes, and all of it in seconds, recorded and as it is.

    A row for each point, side and setting. What was recorded while others used the machine is left out.
    """
    profiles = report.get("profiles", {})
    if not profiles:
        return NOTHING
    kinds = list(dict.fromkeys(kind for result in profiles.values() for kind in result["kinds"]))
    timed, rows = quiet(report), []
    for key, result in profiles.items():
        point, side, setting = key.split(" | ")
        if result["load"] is not None and result["load"] > QUIET:  # None: of a file that did not say
            continue
        whole = sum(result["kinds"].values())
        rows.append([
            point, f"{side}, {setting}", *(f"{result['kinds'].get(kind, 0.0) / whole:.0%}" for kind in kinds),
            text.number(whole, 2), _middle(timed.get((point, side, setting), {})),
        ])  # fmt: skip
    return text.table(["point", "side", *kinds, "s, recorded", "s"], rows)


def draw(report: Report, path: Path) -> None:
    """Bars of seconds an update by phase, a panel for each point; without the keys of --set, which a table has."""
    from matplotlib import pyplot

    parts = {key: rounds for key, rounds in quiet(report).items() if rounds and key[2] in SETTINGS}
    points = list(dict.fromkeys(point for point, _, _ in parts))
    if not points:
        return
    figure, panels = pyplot.subplots(1, len(points), figsize=(4.2 * len(points), 4.2), squeeze=False)
    for panel, point in zip(panels[0], points, strict=True):
        bars = [(side, setting) for where, side, setting in parts if where == point]
        starts = [0.0] * len(bars)
        names = [f"{side}, {setting}" for side, setting in bars]
        for phase in PHASES:
            updates = [[u for part in parts[point, *bar].values() for u in part["updates"]] for bar in bars]
            spent = [statistics.median(u["phases"].get(phase, 0.0) for u in each) for each in updates]
            panel.barh(names, spent, left=starts, label=phase)
            starts = [start + more for start, more in zip(starts, spent, strict=True)]
        panel.invert_yaxis()
        panel.set(title=point, xlabel="seconds an update")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _middle(rounds: Mapping[int, Report]) -> str:
    return text.number(statistics.median(map(seconds, rounds.values())), 2) if rounds else "–"


def _mib(rounds: Mapping[int, Report], which: str = "net") -> float:
    return statistics.median(part[f"{which}_mib"] for part in rounds.values())


def _times(seen: Sequence[float]) -> str:
    return f"{statistics.median(seen):.2f} ×" if seen else "–"


def _share(rounds: Mapping[int, Report], peer: Mapping[int, Report]) -> str:
    return f"{_mib(rounds) / _mib(peer):.0%}" if peer else "–"


def _under(report: Report) -> str:
    """What the figures are of."""
    versions = report["versions"].get("here", {})
    loaded = sum(disturbed(part, report["threads"]) for part in report["parts"].values())
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
