"""Makes the planner's rates, rlhf_zoo/pipeline/plan/rates.json, of what `make bench` and `make gpu` measured.

    python benchmarks/calibrate.py          # of the newest file of each machine in benchmarks/results
    python benchmarks/calibrate.py --check  # runs nothing and writes nothing: exit code 1 where they are others

Of several shapes of work the rates are fitted by least squares of relative errors, none below 0; the error is that of a
whole update at each point by a fit without it. Of fewer than three shapes each phase has one rate, and no error is
known.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from speed.points import EPOCHS, POINTS, Point

from rlhf_zoo.pipeline.plan.devices import GPUS, Device, parse_device
from rlhf_zoo.pipeline.plan.estimate import Work
from rlhf_zoo.pipeline.plan.plan import stage_keys_of
from rlhf_zoo.pipeline.plan.ppo import PPOModels, Reward, ppo_plan
from rlhf_zoo.pipeline.plan.seconds import RATES_FILE, Rates
from rlhf_zoo.pipeline.plan.shapes import new_shape

RESULTS = Path(__file__).parent / "results"
BUSY = 0.25  # CPU seconds a second that others used: such a process is left out
#: Rates of a phase -> the counts of `Work` that they are for.
PHASES = {
    "sample": {"forward": "prefill", "decode": "decode", "layer_step": "layer_steps"},
    "read": {"forward": "passes", "head": "head"},
    "update": {"update": "update", "update_head": "update_head", "trained": "trained"},
}
OF_PHASE = {"rollout": "sample", "values": "read", "reference": "read", "reward": "read", "update": "update"}
#: What `make gpu` of before 2026-11-24 measured under `speed`: Qwen2.5-0.5B's shape, prompts of 16 to 32 tokens.
#: Only its float32 is still used, as the parts of today measure bf16 alone.
OLD = {"sample": "sample", "reference and values": "read", "score": "read", "update": "update"}
OLD_SPEED = Point(896, 24, 14, 4864, 151_936, batch=64, prompt=(16, 32), response=256, ends=0.0, kv=2, micro=8)


@dataclass(frozen=True)
class Seen:
    """Seconds by phase of an update at a point."""

    point: str
    work: Work
    seconds: Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    made = rendered()
    if options.check:
        return int(RATES_FILE.read_text(encoding="utf-8") != made)
    RATES_FILE.write_text(made, encoding="utf-8")
    print(made, end="")
    return 0


def rendered() -> str:
    """rates.json as the results say."""
    result = [rates for path in newest() for rates in of_file(path)]
    lines = ",\n".join(json.dumps(_rounded(asdict(one))) for one in result)
    return f'{{"rates": [\n{lines}\n]}}\n'


def newest() -> list[Path]:
    """The newest file of each machine, DATE-MACHINE.json, the newest machine first: it stands for any CPU."""
    by_machine = {re.sub(r"^[\d-]{11}", "", path.name): path for path in sorted(RESULTS.glob("*.json"))}
    return sorted(by_machine.values(), reverse=True)


def of_file(path: Path) -> list[Rates]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("kind") == "bench":
        seen = of_bench(document)
        device, machine = "cpu", f"{document['machine']}, {document['threads']} threads"
    else:
        device = next((card for card in GPUS if card in path.name), None)
        if document.get("tiny") or device is None:
            return []
        seen, machine = of_gpu(document, parse_device(device)), document["machine"]
    about = {"device": device, "machine": machine, "source": path.name}
    return [fitted(rows, precision=precision, **about) for precision, rows in seen.items() if rows]


def of_bench(document: Mapping[str, Any]) -> dict[str, list[Seen]]:
    """What `make bench` saw of this trainer, by precision."""
    updates: dict[tuple[str, str], list[Any]] = {}
    for key, part in document["parts"].items():
        point, side, setting, _ = key.split(" | ")
        if side == "ours" and "," not in setting and part["load"] <= BUSY:
            updates.setdefault((point, setting), []).extend(part["updates"])
    result: dict[str, list[Seen]] = {"float32": [], "bfloat16": []}
    for (point, setting), seen in updates.items():
        seconds = _phases([one["phases"] for one in seen], OF_PHASE)
        half = setting.endswith("bf16")
        tokens = statistics.mean(one["tokens"] for one in seen) / POINTS[point].batch
        work = work_of(POINTS[point], parse_device("cpu"), shared="shared" in setting, half=half, answer=tokens)
        result["bfloat16" if half else "float32"].append(Seen(point, work, seconds))
    return result


def of_gpu(document: Mapping[str, Any], device: Device) -> dict[str, list[Seen]]:
    """What `make gpu` saw, by precision."""
    result: dict[str, list[Seen]] = {"float32": [], "bfloat16": []}
    parts = document["parts"]
    for point in ("c", "1b"):
        for setting, seen in parts.get(point, {}).items():
            if isinstance(seen, dict) and "update" in seen and "eager" not in setting:
                answer = seen["response tokens"] / POINTS[point].batch
                work = work_of(POINTS[point], device, shared="shared" in setting, half=True, answer=answer)
                result["bfloat16"].append(Seen(point, work, _phases([seen], OF_PHASE)))
    if (old := parts.get("speed", {}).get("float32")) is not None:
        phases = {phase: each["seconds"] for phase, each in old["phases"].items()}
        work = work_of(OLD_SPEED, device, shared=False, half=False, answer=256)
        result["float32"].append(Seen("speed", work, _phases([phases], OLD)))
    return result


def work_of(point: Point, device: Device, *, shared: bool, half: bool, answer: float) -> Work:
    """What an update at a point computes, in the mean over its rows. answer: tokens of a response on average."""
    architecture = {
        "model_type": "llama", "hidden_size": point.hidden, "num_hidden_layers": point.layers,
        "num_attention_heads": point.heads, "num_key_value_heads": point.kv or point.heads,
        "intermediate_size": point.intermediate, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    shape = new_shape(architecture, vocabulary=point.vocab)
    settings = {
        "per_device_train_batch_size": point.rows, "gradient_accumulation_steps": point.batch // point.rows,
        "num_ppo_epochs": EPOCHS, "response_length": round(answer), "bf16": half,
        "critic": "shared" if shared else "auto",
    }  # fmt: skip
    keys: SimpleNamespace = stage_keys_of("ppo", settings, where="a point")
    prompt_length = round(statistics.mean(map(len, point.prompts(4 * point.batch))))
    work = ppo_plan(keys, PPOModels(shape, [Reward(shape)]), device, prompt_length=prompt_length).work
    longest = max(min(length, point.response) for length in point.lengths(point.batch))
    return replace(work, layer_steps=work.layer_steps / round(answer) * longest)


def fitted(rows: Sequence[Seen], *, precision: str, **about: Any) -> Rates:
    points = list(dict.fromkeys(row.point for row in rows))
    rates = _fit(rows, several=len(points) > 2)
    errors = []
    if len(points) > 2:
        for point in points:
            left = _made(_fit([row for row in rows if row.point != point], several=True), precision, about, 0)
            for row in (row for row in rows if row.point == point):
                predicted, measured = sum(left.phases(row.work).values()), sum(row.seconds.values())
                errors.append(abs(predicted / measured - 1))
    made = _made(rates, precision, about, len(points))
    return replace(made, error=statistics.mean(errors), largest=max(errors)) if errors else made


def _made(rates: Mapping[str, float], precision: str, about: Mapping[str, Any], points: int) -> Rates:
    return Rates(precision=precision, points=points, error=None, largest=None, **about, **rates)


def _fit(rows: Sequence[Seen], *, several: bool) -> dict[str, float]:
    """Seconds for each count of `Work`."""
    result = dict.fromkeys((name for counts in PHASES.values() for name in counts), 0.0)
    for phase in ("read", "sample", "update"):
        counts = PHASES[phase]
        expected = np.array([row.seconds[phase] for row in rows])
        known = np.zeros(len(rows))
        names = list(counts)
        if phase == "sample":  # prompts are read at the rate of the other passes
            names.remove("forward")
            known = np.array([result["forward"] * row.work.prefill for row in rows])
        matrix = np.array([[getattr(row.work, counts[name]) for name in names] for row in rows], dtype=float)
        if not several:
            # One rate for all of it: of sampling for its steps, as starting kernels is what takes the time.
            names = ["layer_step"] if phase == "sample" else names
            total = matrix[:, -1:] if phase == "sample" else matrix[:, :2].sum(1, keepdims=True)
            each = float(np.median((expected - known) / total[:, 0]))
            result |= dict.fromkeys(names[:2], each)
            continue
        scale = np.maximum(matrix.max(0), 1e-30)
        rest = np.maximum(expected - known, 1e-9)
        solved = _least_squares(matrix / scale / expected[:, None], rest / expected)
        result |= dict(zip(names, solved / scale, strict=True))
    return result


def _least_squares(matrix: Any, wanted: Any) -> Any:
    """The solution without a negative part: there are few columns, so all choices of them are tried."""
    columns = range(matrix.shape[1])
    best, least = np.zeros(len(columns)), float("inf")
    for chosen in (list(some) for size in columns for some in combinations(columns, size + 1)):
        result = np.zeros(len(columns))
        result[chosen] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        apart = float(((matrix @ result - wanted) ** 2).sum())
        if (result >= 0).all() and apart < least:
            best, least = result, apart
    return best


def _phases(seen: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """Median seconds of the planner's phases."""
    result = dict.fromkeys(PHASES, 0.0)
    for name, phase in names.items():
        result[phase] += statistics.median(one.get(name, 0.0) for one in seen)
    return result


def _rounded(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in entry.items()}


if __name__ == "__main__":
    sys.exit(main())
