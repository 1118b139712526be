"""Compares this trainer's speed and memory with TRL 1.12.0's PPOTrainer and with a floor, on equal work: `make bench`.

    python benchmarks/bench.py --all             # everything that docs/performance.md shows
    python benchmarks/bench.py                   # four points, four settings, two rounds
    python benchmarks/bench.py full eos --settings separate --rounds 3
    python benchmarks/bench.py --set '{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}'
    python benchmarks/bench.py eos wide --settings separate --sides ours --levers
    python benchmarks/bench.py smollm2 --settings separate shared --set '{"lora": true}'  # the shape of a real model
    python benchmarks/bench.py eos --profile     # time per kind of operation in an update, here and in the floor
    python benchmarks/bench.py --write-docs      # runs nothing: writes the newest figures into the docs

The sides take turns, each time in a fresh process: A B A B. All sample the same numbers of tokens after the same
prompts (benchmarks/speed/points.py). The script writes benchmarks/results/DATE-MACHINE.json after each process, so the
same command resumes an interrupted run. At the end it prints the table and draws the plot beside the JSON. TRL's side
needs `.venv-trl`, which `make bench` creates. It has one setting: bf16 changes nothing there, and it has no shared
trunk. OMP_NUM_THREADS sets the number of threads, 2 by default. On a busy machine, the seconds mean little.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from figures.tables import render_blocks
from speed.report import (
    DOCUMENT,
    END_TO_END,
    PEER,
    RESULTS,
    ROOT,
    SETTINGS,
    draw,
    key_table,
    newest_report,
    phase_table,
    profile_table,
    table,
    with_keys,
)

PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SIDES = {PEER: "speed.peer", "ours": "speed.ours", "floor": "speed.floor"}
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CI": "1"}
#: Changes that --levers tries one at a time: optimizations switched off, and options switched on.
LEVERS: list[dict[str, Any]] = [
    *({"without": lever} for lever in ("logits in chunks", "one pass of the head", "rows alike in length")),
    {"without": "real tokens as padding"}, {"without": "draw by blocks"},
    {"padding_free": True}, {"max_tokens_per_micro_batch": 1_000_000}, {"optim": "adamw_torch"},
    {"gradient_checkpointing": True}, {"max_rollout_batch_tokens": 1024}, {"num_ppo_epochs": 1},
]  # fmt: skip
_OURS = ("--sides", "ours", "--first", "3", "--rounds", "1", "--settings")
#: The arguments of each call that --all makes, in order.
ALL: list[tuple[str, ...]] = [
    ("--set", json.dumps(END_TO_END)),
    ("eos", "wide", *_OURS, "separate", "--levers"),
    ("eos", "wide", "long", *_OURS, "separate bf16", "shared bf16", "--set", '{"max_tokens_per_micro_batch": 512}'),
    ("smollm2", "--rounds", "1", "--updates", "1", "--settings", "separate", "shared", "--set", '{"lora": true}'),
    ("--profile",),
]
POINTS = ("full", "eos", "wide", "long")
#: Only if named, or the first with --all: its updates take minutes. The second is for tests.
MORE_POINTS = ("smollm2", "tiny")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "points", nargs="*", metavar="POINT", help=f"{', '.join(POINTS)} by default; or {' or '.join(MORE_POINTS)}"
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first", type=int, default=1, metavar="N", help="number of the first round (default: 1)")
    parser.add_argument("--updates", type=int, default=3, help="timed updates of each process, after one for warm-up")
    set_help = "also run this trainer with these keys of PPOConfig, and compare it with itself; repeatable"
    parser.add_argument("--set", action="append", type=json.loads, default=[], metavar="JSON", help=set_help)
    parser.add_argument("--levers", action="store_true", help="as --set, with each of LEVERS in turn")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--profile", action="store_true", help="only measure the time per kind of operation")
    only.add_argument("--all", action="store_true", help="measure points, keys, levers and profiles into one file")
    only.add_argument("--write-docs", action="store_true", help="only write the newest figures into the docs")
    options = parser.parse_args(arguments)
    options.set += LEVERS if options.levers else []
    if options.write_docs:
        DOCUMENT.write_text(render_blocks(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        draw(newest_report(), DOCUMENT.with_suffix(".svg"))
        return 0
    path = options.output or RESULTS / f"{datetime.date.today().isoformat()}-{_machine_slug()}.json"
    if options.all:
        return next((code for part in ALL if (code := main([*part, "--output", str(path)]))), 0)
    if unknown := set(options.points) - {*POINTS, *MORE_POINTS}:
        parser.error(f"unknown point {', '.join(sorted(unknown))}: choose from {', '.join(POINTS + MORE_POINTS)}")
    if unknown := {name for keys in options.set for name in keys} - _allowed_keys(options):
        parser.error(f"--set names {', '.join(sorted(unknown))}, which PPOConfig does not have")
    if PEER in options.sides and not (options.profile or PEER_PYTHON.is_file()):
        parser.error(
            f"{PEER_PYTHON} is missing: run `make bench`, which installs TRL there, or give --sides ours floor"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    report = _load_or_start_report(path)
    points = options.points or POINTS
    if options.profile:
        profiles = report.setdefault("profiles", {})
        for point in points:
            for setting in options.settings:
                for side in ("ours", "floor"):
                    profiles[f"{point} | {side} | {setting}"] = _profile_side(side, point, setting)
                    path.write_text(json.dumps(report, indent=1) + "\n")
        print(profile_table(report))
        return 0
    try:
        for side, point, setting, keys, round_number in _measurements(points, options):
            key = f"{point} | {side} | {with_keys(setting, keys)} | {round_number}"
            if key not in report["parts"]:
                print(key, end=": ", flush=True)
                report["parts"][key] = part = _measure_side(side, point, setting, keys, updates=options.updates)
                versions = part.pop("versions")
                recorded = report["versions"].setdefault(PEER if side == PEER else "here", {})
                if side != PEER:  # a run that resumes after a commit records both commits
                    commit = _current_commit()
                    commits = recorded.get("rlhf-zoo", commit)
                    versions["rlhf-zoo"] = commits if commit in commits.split(", ") else f"{commits}, {commit}"
                recorded |= versions
                path.write_text(json.dumps(report, indent=1) + "\n")
                seconds = sorted(update["seconds"] for update in part["updates"])
                print(f"{seconds[len(seconds) // 2]:.2f} s an update, {part['net_mib']:.0f} MiB", flush=True)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} has the figures so far; the same command goes on from there.", file=sys.stderr)
        return 130
    print("\n\n".join([table(report), *([key_table(report)] if options.set else []), phase_table(report)]))
    draw(report, path.with_suffix(".svg"))
    return 0


def _allowed_keys(options: argparse.Namespace) -> set[str]:
    """Returns the keys that --set may have. Imports the trainer only if --set is used."""
    if not options.set:
        return set()
    from rlhf_zoo import PPOConfig

    return {field.name for field in dataclasses.fields(PPOConfig)} | {"without", "attn_implementation", "lora"}


def _load_or_start_report(path: Path) -> dict[str, Any]:
    """Returns the report in the file, or an empty one if there is no file."""
    if path.is_file():
        return json.loads(path.read_text())
    return {
        "kind": "bench", "date": datetime.date.today().isoformat(), "machine": cpu_name(), "cores": os.cpu_count(),
        "bf16 instructions": bool(re.search(r"avx512_bf16|amx_bf16|\bbf16\b", _read_if_present("/proc/cpuinfo"))),
        "threads": _thread_count(), "python": platform.python_version(), "versions": {}, "parts": {},
    }  # fmt: skip


def _measurements(
    points: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[str, str, str, dict[str, Any], int]]:
    """Yields (side, point, setting, keys, round), so that processes to compare run one right after another."""
    for round_number in range(options.first, options.first + options.rounds):
        for point in points:
            for setting in options.settings:
                for side in options.sides:
                    if side != PEER:
                        for keys in [{}, *options.set] if side == "ours" else [{}]:
                            yield side, point, setting, keys, round_number
                    elif setting == options.settings[0]:
                        yield side, point, "separate", {}, round_number


def _measure_side(side: str, point: str, setting: str, keys: dict[str, Any], *, updates: int) -> dict[str, Any]:
    """Runs one process of a side and returns its report, with the load by other processes."""
    python = str(PEER_PYTHON) if side == PEER else sys.executable
    command = [python, "-m", SIDES[side], point, "--updates", str(updates), *SETTINGS[setting]]
    if side == "ours":
        command += ["--set", json.dumps(keys)]
    load, report = _run_and_watch(command)
    return {"load": load, **report}


def _profile_side(side: str, point: str, setting: str) -> dict[str, Any]:
    load, kinds = _run_and_watch([sys.executable, "-m", "speed.profile", side, point, *SETTINGS[setting]])
    return {"load": load, "kinds": kinds}


def _run_and_watch(command: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Runs a process; returns how many cores other processes used meanwhile, and the JSON that it printed."""
    machine, own, start = _machine_cpu_seconds(), _child_cpu_seconds(), time.monotonic()
    report = _run_for_json(command)
    seconds = time.monotonic() - start
    return max(0.0, (_machine_cpu_seconds() - machine) - (_child_cpu_seconds() - own)) / seconds, report


def _run_for_json(command: Sequence[str]) -> dict[str, Any]:
    """Runs a process in benchmarks/ and returns the JSON object in its last line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(_thread_count()), **QUIET}
    process = subprocess.run(
        command, cwd=ROOT / "benchmarks", env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return document


def _machine_cpu_seconds() -> float:
    """Returns the CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def _child_cpu_seconds() -> float:
    """Returns the CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _thread_count() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "2"))


def _current_commit() -> str:
    """Returns the checked-out commit, with "+" if files differ from it."""
    git = ("git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*")
    process = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip() or "?"


def _read_if_present(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def cpu_name() -> str:
    result = re.search(r"model name\s*:\s*(.+)", _read_if_present("/proc/cpuinfo"))
    return result[1] if result else platform.processor() or platform.machine()


def _machine_slug() -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()} {os.cpu_count()} cores".lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
