"""PPO here beside TRL 1.12.0's PPOTrainer and beside a floor, on equal work: `make bench`.

    python benchmarks/bench.py --all             # all that docs/performance.md shows, the parts below one after another
    python benchmarks/bench.py                   # four points, four settings, two rounds
    python benchmarks/bench.py full eos --settings separate --rounds 3
    python benchmarks/bench.py --set '{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}'
    python benchmarks/bench.py eos wide --settings separate --sides ours --levers
    python benchmarks/bench.py smollm2 --settings separate shared --set '{"lora": true}'  # the shape of a real model
    python benchmarks/bench.py eos --profile     # what the operations of an update are, here and at the floor
    python benchmarks/bench.py --write-docs      # runs nothing: puts the newest figures into the docs

Sides take turns, each time in a fresh process: A B A B. All sample the same numbers of tokens after the same prompts
(benchmarks/speed/points.py). Writes benchmarks/results/DATE-MACHINE.json after each process, so that a run that is cut
off goes on where it was, then prints the table and draws the plot beside it. TRL's side needs `.venv-trl`, which
`make bench` makes; it has one setting, as bf16 changes nothing there and it shares no trunk. Threads are those of
OMP_NUM_THREADS, 2 by default. On a machine that does something else, trust the memory and not the seconds.
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
from figures.tables import rendered
from speed.report import (
    DOCUMENT,
    END_TO_END,
    PEER,
    RESULTS,
    ROOT,
    SETTINGS,
    draw,
    key_table,
    newest,
    phase_table,
    profile_table,
    table,
    with_keys,
)

PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SIDES = {PEER: "speed.peer", "ours": "speed.ours", "floor": "speed.floor"}
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CI": "1"}
# What makes an update fast, off: one at a time.
LEVERS: list[dict[str, Any]] = [
    *({"without": lever} for lever in ("logits in chunks", "one pass of the head", "rows alike in length")),
    {"without": "real tokens as padding"}, {"without": "draw by blocks"},
    {"padding_free": True}, {"max_tokens_per_micro_batch": 1_000_000}, {"optim": "adamw_torch"},
    {"gradient_checkpointing": True}, {"max_rollout_batch_tokens": 1024}, {"num_ppo_epochs": 1},
]  # fmt: skip
_OURS = ("--sides", "ours", "--first", "3", "--rounds", "1", "--settings")
#: What --all runs, in order.
ALL: list[tuple[str, ...]] = [
    ("--set", json.dumps(END_TO_END)),
    ("eos", "wide", *_OURS, "separate", "--levers"),
    ("eos", "wide", "long", *_OURS, "separate bf16", "shared bf16", "--set", '{"max_tokens_per_micro_batch": 512}'),
    ("--profile",),
]
POINTS = ("full", "eos", "wide", "long")
#: Only if named: one takes minutes an update, the other is for tests.
MORE_POINTS = ("smollm2", "tiny")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "points", nargs="*", metavar="POINT", help=f"{', '.join(POINTS)} by default; or {' or '.join(MORE_POINTS)}"
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first", type=int, default=1, metavar="N", help="the number of the first round, default 1")
    parser.add_argument("--updates", type=int, default=3, help="counted updates of a process, after one of warm-up")
    more = "also this trainer with these keys of PPOConfig, beside itself without; can be given several times"
    parser.add_argument("--set", action="append", type=json.loads, default=[], metavar="JSON", help=more)
    parser.add_argument("--levers", action="store_true", help="the same, with each lever off, or on, in turn")
    parser.add_argument("--output", type=Path, help="the JSON file")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--again", action="store_true", help="measure again what the file has")
    only.add_argument("--profile", action="store_true", help="only see what the operations of an update are")
    only.add_argument("--all", action="store_true", help="points, keys, levers and profiles, in one file")
    only.add_argument("--write-docs", action="store_true", help="only put the newest figures into the docs")
    options = parser.parse_args(arguments)
    options.set += LEVERS if options.levers else []
    if options.write_docs:
        DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        draw(newest(), DOCUMENT.with_suffix(".svg"))
        return 0
    path = options.output or RESULTS / f"{datetime.date.today().isoformat()}-{_machine()}.json"
    if options.all:
        return next((code for part in ALL if (code := main([*part, "--output", str(path)]))), 0)
    if unknown := set(options.points) - {*POINTS, *MORE_POINTS}:
        parser.error(f"no point is called {', '.join(sorted(unknown))}: choose from {', '.join(POINTS + MORE_POINTS)}")
    if unknown := {name for keys in options.set for name in keys} - _keys(options):
        parser.error(f"--set names {', '.join(sorted(unknown))}, which is not a key of PPOConfig")
    if PEER in options.sides and not (options.profile or PEER_PYTHON.is_file()):
        parser.error(
            f"{PEER_PYTHON} is missing: run `make bench`, which installs TRL there, or give --sides ours floor"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    report = _begun(path, options)
    points = options.points or POINTS
    if options.profile:
        for point in points:
            for setting in options.settings:
                for side in ("ours", "floor"):
                    report.setdefault("profiles", {})[f"{point} | {side} | {setting}"] = _profiled(side, point, setting)
                    path.write_text(json.dumps(report, indent=1) + "\n")
        print(profile_table(report))
        return 0
    try:
        for side, point, setting, keys, number in _turns(points, options):
            key = f"{point} | {side} | {with_keys(setting, keys)} | {number}"
            if key not in report["parts"]:
                print(key, end=": ", flush=True)
                report["parts"][key] = part = _measured(side, point, setting, keys, updates=options.updates)
                versions = part.pop("versions")
                kept = report["versions"].setdefault(PEER if side == PEER else "here", {})
                if side != PEER:  # a file that went on after a commit has both
                    known = kept.get("rlhf-zoo", _commit())
                    versions["rlhf-zoo"] = known if _commit() in known.split(", ") else f"{known}, {_commit()}"
                kept |= versions
                path.write_text(json.dumps(report, indent=1) + "\n")
                seconds = sorted(update["seconds"] for update in part["updates"])
                print(f"{seconds[len(seconds) // 2]:.2f} s an update, {part['net_mib']:.0f} MiB", flush=True)
    except KeyboardInterrupt:
        print(f"\nStopped. {path} has what was measured; the same command goes on from there.", file=sys.stderr)
        return 130
    print("\n\n".join([table(report), *([key_table(report)] if options.set else []), phase_table(report)]))
    draw(report, path.with_suffix(".svg"))
    return 0


def _keys(given: argparse.Namespace) -> set[str]:
    """What --set may name; asks the trainer where it names anything."""
    if not given.set:
        return set()
    from rlhf_zoo import PPOConfig

    return {field.name for field in dataclasses.fields(PPOConfig)} | {"without", "attn_implementation", "lora"}


def _begun(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What the file has, without what is measured again."""
    if path.is_file() and not given.again:
        return json.loads(path.read_text())
    return {
        "kind": "bench", "date": datetime.date.today().isoformat(), "machine": cpu_name(), "cores": os.cpu_count(),
        "bf16 instructions": bool(re.search(r"avx512_bf16|amx_bf16|\bbf16\b", _read("/proc/cpuinfo"))),
        "threads": _threads(), "python": platform.python_version(), "versions": {}, "parts": {},
    }  # fmt: skip


def _turns(points: Sequence[str], given: argparse.Namespace) -> Iterator[tuple[str, str, str, dict[str, Any], int]]:
    """Side, point, setting, keys and round in the order of the clock: what is compared runs one after another."""
    for number in range(given.first, given.first + given.rounds):
        for point in points:
            for setting in given.settings:
                for side in given.sides:
                    if side != PEER:
                        for keys in [{}, *given.set] if side == "ours" else [{}]:
                            yield side, point, setting, keys, number
                    elif setting == given.settings[0]:
                        yield side, point, "separate", {}, number


def _measured(side: str, point: str, setting: str, keys: dict[str, Any], *, updates: int) -> dict[str, Any]:
    """What a process of that side says."""
    python = str(PEER_PYTHON) if side == PEER else sys.executable
    command = [python, "-m", SIDES[side], point, "--updates", str(updates), *SETTINGS[setting]]
    if side == "ours":
        command += ["--set", json.dumps(keys)]
    load, report = _watched(command)
    return {"load": load, **report}


def _profiled(side: str, point: str, setting: str) -> dict[str, Any]:
    load, kinds = _watched([sys.executable, "-m", "speed.profile", side, point, *SETTINGS[setting]])
    return {"load": load, "kinds": kinds}


def _watched(command: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Cores that others used meanwhile, and what the process said."""
    busy, own, start = _busy(), _children(), time.monotonic()
    report = _said(command)
    took = time.monotonic() - start
    return max(0.0, (_busy() - busy) - (_children() - own)) / took, report


def _said(command: Sequence[str]) -> dict[str, Any]:
    """The JSON that a process ends with."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(_threads()), **QUIET}
    process = subprocess.run(
        command, cwd=ROOT / "benchmarks", env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return document


def _busy() -> float:
    """CPU seconds of all processes of the machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def _children() -> float:
    """CPU seconds of processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "2"))


def _commit() -> str:
    """Of this trainer, "+" where files differ from it."""
    git = ("git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*")
    process = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip() or "?"


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def cpu_name() -> str:
    result = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return result[1] if result else platform.processor() or platform.machine()


def _machine() -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()} {os.cpu_count()} cores".lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
