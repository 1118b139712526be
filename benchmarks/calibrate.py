"""Fits the planner's rates to the results of `make bench` and `make gpu`; writes rlhf_zoo/pipeline/plan/rates.json.

    python benchmarks/calibrate.py  # uses the newest file of each machine in benchmarks/results

With at least three points, rates are fitted by least squares of relative errors, none below 0. The error is that of a
whole update at each point, predicted by a fit without that point. With fewer points, all counts of a phase share one
rate, and the error is unknown.
"""

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from speed.points import EPOCHS, POINTS, Point

from rlhf_zoo.pipeline.plan.devices import Device, find_gpu, parse_device
from rlhf_zoo.pipeline.plan.estimate import Work
from rlhf_zoo.pipeline.plan.plan import parse_planner_keys
from rlhf_zoo.pipeline.plan.ppo import PPOModels, RewardModelSpec, ppo_plan
from rlhf_zoo.pipeline.plan.seconds import RATES_FILE, Rates
from rlhf_zoo.pipeline.plan.shapes import new_shape

RESULTS = Path(__file__).parent / "results"
MAX_LOAD = 0.25  # cores that other processes used: results of a process with more are left out
#: Phase -> its rates, each with the count of `Work` that it is multiplied by.
PHASES = {
    "sample": {"forward": "prefill", "decode": "decode", "layer_step": "layer_steps"},
    "read": {"forward": "forward_only", "head": "forward_only_head"},
    "update": {"update": "update", "update_head": "update_head", "parameter_update": "parameter_updates"},
}
#: Phase in the results -> phase of the planner.
PLANNER_PHASES = {"rollout": "sample", "values": "read", "reference": "read", "reward": "read", "update": "update"}
#: The part `speed` of `make gpu` before 2026-11-24 measured Qwen2.5-0.5B's shape with prompts of 16 to 32 tokens. Only
#: its float32 is still used, as the current parts measure only bf16.
OLD_PLANNER_PHASES = {"sample": "sample", "reference and values": "read", "score": "read", "update": "update"}
OLD_POINT = Point(896, 24, 14, 4864, 151_936, batch=64, prompt=(16, 32), response=256, ends=0.0, kv=2, micro=8)


@dataclass(frozen=True)
class Measurement:
    """The seconds of each planner phase in an update at a point, with the work that the update does."""

    point: str
    work: Work
    seconds: Mapping[str, float]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    content = render_rates()
    RATES_FILE.write_text(content, encoding="utf-8")
    print(content, end="")


def render_rates() -> str:
    """Returns the content of rates.json for the current results."""
    all_rates = [rates for path in newest_results() for rates in rates_from_file(path)]
    lines = ",\n".join(json.dumps(_round_floats(asdict(rates))) for rates in all_rates)
    return f'{{"rates": [\n{lines}\n]}}\n'


def newest_results() -> list[Path]:
    """Returns the newest DATE-MACHINE.json of each machine, newest first: the planner uses the first CPU's rates."""
    by_machine = {re.sub(r"^[\d-]{11}", "", path.name): path for path in sorted(RESULTS.glob("*.json"))}
    return sorted(by_machine.values(), reverse=True)


def rates_from_file(path: Path) -> list[Rates]:
    """Fits the rates of one machine, by precision; none for a rehearsal, or a GPU that the planner does not know."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("kind") == "bench":
        measurements = read_bench(document)
        device, machine = "cpu", f"{document['machine']}, {document['threads']} threads"
    else:
        machine = document["machine"]
        # Of GPUs that share a name, the machine's name has the memory size, as in "NVIDIA A100-SXM4-40GB".
        memory_size = re.search(r"(\d+)GB", machine)
        device = find_gpu(machine, float(memory_size[1]) if memory_size else 0)
        if document.get("tiny") or device is None:
            return []
        measurements = read_gpu(document, parse_device(device))
    about = {"device": device, "machine": machine, "source": path.name}
    return [fit_rates(rows, precision=precision, **about) for precision, rows in measurements.items() if rows]


def read_bench(document: Mapping[str, Any]) -> dict[str, list[Measurement]]:
    """Returns this trainer's measurements in a result of `make bench`, by precision."""
    updates: dict[tuple[str, str], list[Any]] = {}
    for key, part in document["parts"].items():
        point, side, setting, _ = key.split(" | ")
        if side == "ours" and "," not in setting and part["load"] <= MAX_LOAD:
            updates.setdefault((point, setting), []).extend(part["updates"])
    result: dict[str, list[Measurement]] = {"float32": [], "bfloat16": []}
    for (point, setting), timed in updates.items():
        seconds = _median_seconds([update["phases"] for update in timed], PLANNER_PHASES)
        is_bf16 = setting.endswith("bf16")
        tokens = statistics.mean(update["tokens"] for update in timed) / POINTS[point].batch
        is_shared = "shared" in setting
        work = work_of(POINTS[point], parse_device("cpu"), shared=is_shared, bf16=is_bf16, response_length=tokens)
        result["bfloat16" if is_bf16 else "float32"].append(Measurement(point, work, seconds))
    return result


def read_gpu(document: Mapping[str, Any], device: Device) -> dict[str, list[Measurement]]:
    """Returns the measurements in a result of `make gpu`, by precision."""
    result: dict[str, list[Measurement]] = {"float32": [], "bfloat16": []}
    parts = document["parts"]
    for point in ("c", "1b"):
        for setting, update in parts.get(point, {}).items():
            if isinstance(update, dict) and "update" in update and "eager" not in setting:
                tokens = update["response tokens"] / POINTS[point].batch
                work = work_of(POINTS[point], device, shared="shared" in setting, bf16=True, response_length=tokens)
                result["bfloat16"].append(Measurement(point, work, _median_seconds([update], PLANNER_PHASES)))
    if (old := parts.get("speed", {}).get("float32")) is not None:
        phases = {name: phase["seconds"] for name, phase in old["phases"].items()}
        work = work_of(OLD_POINT, device, shared=False, bf16=False, response_length=256)
        result["float32"].append(Measurement("speed", work, _median_seconds([phases], OLD_PLANNER_PHASES)))
    return result


def work_of(point: Point, device: Device, *, shared: bool, bf16: bool, response_length: float) -> Work:
    """Returns the work of an update at a point.

    Args:
        point: The shape of the models and of the batch.
        device: The device that is planned for.
        shared: Whether policy and critic share a trunk.
        bf16: Whether the update computes in bf16.
        response_length: Mean number of tokens of a response.
    """
    architecture = {
        "model_type": "llama", "hidden_size": point.hidden, "num_hidden_layers": point.layers,
        "num_attention_heads": point.heads, "num_key_value_heads": point.kv or point.heads,
        "intermediate_size": point.intermediate, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    shape = new_shape(architecture, vocabulary=point.vocab)
    settings = {
        "per_device_train_batch_size": point.rows, "gradient_accumulation_steps": point.batch // point.rows,
        "num_ppo_epochs": EPOCHS, "response_length": round(response_length), "bf16": bf16,
        "critic": "shared" if shared else "auto",
    }  # fmt: skip
    keys: SimpleNamespace = parse_planner_keys("ppo", settings, where="a point")
    prompt_length = round(statistics.mean(map(len, point.prompts(4 * point.batch))))
    work = ppo_plan(keys, PPOModels(shape, [RewardModelSpec(shape)]), device, prompt_length=prompt_length).work
    # A decoding step runs until the longest response of the batch ends.
    longest = max(min(length, point.response) for length in point.lengths(point.batch))
    return replace(work, layer_steps=work.layer_steps / round(response_length) * longest)


def fit_rates(rows: Sequence[Measurement], *, precision: str, **about: Any) -> Rates:
    """Fits the rates of one machine and precision, and their error if there are at least three points."""
    points = list(dict.fromkeys(row.point for row in rows))
    rates = _fit(rows, rate_per_count=len(points) > 2)
    errors = []
    if len(points) > 2:
        for point in points:
            fit = _fit([row for row in rows if row.point != point], rate_per_count=True)
            without_point = _make_rates(fit, precision, about, 0)
            for row in (row for row in rows if row.point == point):
                predicted, measured = sum(without_point.phases(row.work).values()), sum(row.seconds.values())
                errors.append(abs(predicted / measured - 1))
    result = _make_rates(rates, precision, about, len(points))
    return replace(result, mean_error=statistics.mean(errors), largest_error=max(errors)) if errors else result


def _make_rates(rates: Mapping[str, float], precision: str, about: Mapping[str, Any], points: int) -> Rates:
    return Rates(precision=precision, points=points, mean_error=None, largest_error=None, **about, **rates)


def _fit(rows: Sequence[Measurement], *, rate_per_count: bool) -> dict[str, float]:
    """Fits seconds per unit of each count of `Work`, or a single rate for all counts of a phase."""
    result = dict.fromkeys((name for counts in PHASES.values() for name in counts), 0.0)
    for phase in ("read", "sample", "update"):
        counts = PHASES[phase]
        measured = np.array([row.seconds[phase] for row in rows])
        prefill = np.zeros(len(rows))
        names = list(counts)
        if phase == "sample":  # the prompts are read at the rate of the phase `read`
            names.remove("forward")
            prefill = np.array([result["forward"] * row.work.prefill for row in rows])
        matrix = np.array([[getattr(row.work, counts[name]) for name in names] for row in rows], dtype=float)
        if not rate_per_count:
            # Sampling has a rate per step, as launching kernels takes most of its time.
            names = ["layer_step"] if phase == "sample" else names
            total = matrix[:, -1:] if phase == "sample" else matrix[:, :2].sum(1, keepdims=True)
            rate = float(np.median((measured - prefill) / total[:, 0]))
            result |= dict.fromkeys(names[:2], rate)
            continue
        scale = np.maximum(matrix.max(0), 1e-30)
        without_prefill = np.maximum(measured - prefill, 1e-9)
        solution = _least_squares(matrix / scale / measured[:, None], without_prefill / measured)
        result |= dict(zip(names, solution / scale, strict=True))
    return result


def _least_squares(matrix: Any, target: Any) -> Any:
    """Returns the least-squares solution without negative entries. Tries every subset of the few columns."""
    columns = range(matrix.shape[1])
    best, least_error = np.zeros(len(columns)), float("inf")
    for subset in (list(subset) for size in columns for subset in combinations(columns, size + 1)):
        solution = np.zeros(len(columns))
        solution[subset] = np.linalg.lstsq(matrix[:, subset], target, rcond=None)[0]
        error = float(((matrix @ solution - target) ** 2).sum())
        if (solution >= 0).all() and error < least_error:
            best, least_error = solution, error
    return best


def _median_seconds(updates: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """Returns the median seconds of each planner phase over updates, whose phases have these names."""
    result = dict.fromkeys(PHASES, 0.0)
    for name, phase in names.items():
        result[phase] += statistics.median(update.get(name, 0.0) for update in updates)
    return result


def _round_floats(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in entry.items()}


if __name__ == "__main__":
    main()
