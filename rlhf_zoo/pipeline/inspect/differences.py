"""Compares two runs of the same stage: checkpoints tensor by tensor, metrics column by column.

The two sides are called `published` and `here`. Tensors are equal only if all their bits are, and metrics only if they
are the same numbers; there is no tolerance.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import first_line
from ...hub.client.claims import CLAIM_FILE, RECIPE_FILE
from ...publishing.cards.card import CARD_FILE
from ...runs.metrics_file import without_times
from ...runs.record import COMPLETE, first_difference

#: Folders of a checkpoint to compare. merged/ is omitted, because it follows from the adapter and its base.
FOLDERS = (".", "critic")
#: Files that describe the run rather than the model, or are compared separately.
NOT_COMPARED = (
    CARD_FILE, CLAIM_FILE, RECIPE_FILE, COMPLETE, "README.md", "metrics.jsonl", "trainer_state.json", "published.json",
)  # fmt: skip
#: Larger numbers are not subtracted. An integer in downloaded JSON may be too large for a float.
MAX_NUMBER = 1e300
#: Keys with the version of the library that wrote a file, which `compare_versions` reports.
VERSION_KEYS = ("transformers_version", "peft_version")
BASE_KEYS = ("base_model_name_or_path", "revision")


def compare_weights(published: Path, here: Path) -> list[dict[str, Any]]:
    """Compares the safetensors files of two checkpoints.

    Args:
        published: Folder of the published checkpoint.
        here: Folder of the other checkpoint.

    Returns:
        A row {file, tensors, differing, max_abs, max_rel, worst, problem} per file. `differing` is the number of
        tensors that differ in any bit or are on one side only. `max_abs` is the largest |a − b|, in the tensor `worst`;
        `max_rel` is the largest max |a − b| / max |a| of a tensor; each is None if it is not finite. `problem` is the
        first other difference, such as a shape, or None.
    """
    names = sorted({*_list_files(published, ".safetensors"), *_list_files(here, ".safetensors")})
    return [_compare_file(name, published / name, here / name) for name in names]


def _compare_file(name: str, published: Path, here: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "file": name, "tensors": 0, "differing": 0, "max_abs": 0.0, "max_rel": 0.0, "worst": None, "problem": None,
    }  # fmt: skip
    for side, path in (("published", published), ("here", here)):
        if not path.is_file():
            return row | {"problem": f"is missing {'in the published checkpoint' if side == 'published' else 'here'}"}
    try:
        with safe_open(published, framework="pt") as published_file, safe_open(here, framework="pt") as file_here:
            published_keys, keys_here = set(published_file.keys()), set(file_here.keys())
            row["tensors"] = len(published_keys | keys_here)
            for key in sorted(published_keys | keys_here):
                if key in published_keys & keys_here:
                    _compare_tensor(row, key, published_file.get_tensor(key), file_here.get_tensor(key))
                else:
                    row["differing"] += 1
                    row["problem"] = (
                        row["problem"] or f"{key} is only {'published' if key in published_keys else 'here'}"
                    )
    except SafetensorError as error:
        return row | {"problem": f"cannot be read ({first_line(error)})"}
    return row | {key: row[key] if math.isfinite(row[key]) else None for key in ("max_abs", "max_rel")}


def _compare_tensor(row: dict[str, Any], key: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds the difference of a tensor to the row of its file. `a` is published, and `b` is here."""
    if a.shape != b.shape or a.dtype != b.dtype:
        row["differing"] += 1
        shapes = " and ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in (a, b))
        row["problem"] = row["problem"] or f"{key} is {shapes}"
        return
    if torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))):
        return
    row["differing"] += 1
    a, b = a.double(), b.double()
    # Equal infinities have distance 0, and a NaN on one side has an infinite distance.
    distance = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    largest, scale = float(distance.max()), float(a.abs().max())
    if row["worst"] is None or largest > row["max_abs"]:
        row["worst"], row["max_abs"] = key, largest
    row["max_rel"] = max(row["max_rel"], largest / scale if scale else math.inf if largest else 0.0)


def compare_files(published: Path, here: Path) -> list[dict[str, str]]:
    """Compares the published files other than weights: configurations, tokenizer, PPO's state.

    Args:
        published: Folder of the published checkpoint.
        here: Folder of the other checkpoint. Files that only this folder has are ignored.

    Returns:
        {file, problem} for each file that differs.
    """
    differing = []
    for name in _list_files(published):
        if Path(name).name in NOT_COMPARED or name.endswith((".safetensors", ".pt", ".pth", ".bin")):
            continue
        if not (here / name).is_file():
            differing.append({"file": name, "problem": "is missing here"})
        elif problem := _describe_difference(published / name, here / name):
            differing.append({"file": name, "problem": problem})
    return differing


def _describe_difference(published: Path, here: Path) -> str | None:
    a, b = published.read_bytes(), here.read_bytes()
    if a == b:
        return None
    try:
        first, second = json.loads(a), json.loads(b)
    except ValueError:
        return f"has {len(a)} bytes published and {len(b)} here, with different content"
    if not isinstance(first, dict) or not isinstance(second, dict):
        return "has different content"
    # A published adapter names its base by repository, and an adapter on disk by folder.
    ignored_keys = (*VERSION_KEYS, *(BASE_KEYS if published.name == "adapter_config.json" else ()))
    for key in ignored_keys:
        first.pop(key, None)
        second.pop(key, None)
    for side in (first, second):  # peft keeps these names in a set, whose order varies between processes
        if isinstance(names := side.get("target_modules"), list):
            side["target_modules"] = sorted(map(str, names))
    difference = first_difference(first, second)
    return None if difference is None else f"{difference} differs"


def compare_metrics(
    published: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]], *, step: int
) -> dict[str, Any]:
    """Compares the rows of metrics up to a step.

    Args:
        published: The rows of the published run.
        here: The rows of the other run.
        step: The last step to compare.

    Returns:
        {rows, rows_here, columns, differing, problem}. `columns` is the number of compared columns. `differing` has
        {column, rows, of, max_abs, first_step} for each column with differing rows; `max_abs` is None if a side has
        no number. `problem` names the first row whose steps differ; None if there is none.
    """
    sides = [[row for row in rows if row["step"] <= step] for rows in (published, here)]
    # A checkpoint may be sent before the last rows of its step are written, such as those of an evaluation.
    while len(sides[1]) > len(sides[0]) and sides[1][-1]["step"] == step:
        sides[1].pop()
    steps = [[row["step"] for row in rows] for rows in sides]
    comparison: dict[str, Any] = {"rows": len(sides[0]), "rows_here": len(sides[1]), "problem": None}
    if steps[0] != steps[1]:
        row, pair = next((row, pair) for row, pair in enumerate(zip_longest(*steps), 1) if pair[0] != pair[1])
        first, second = ("no step" if number is None else f"step {number}" for number in pair)
        comparison["problem"] = f"row {row} has {first} in the published metrics and {second} here"
    columns: dict[str, dict[str, Any]] = {}
    for a, b in zip(*(map(without_times, rows) for rows in sides), strict=False):
        for name in sorted({*a, *b} - {"step"}):
            column = columns.setdefault(name, {"column": name, "rows": 0, "of": 0, "max_abs": 0.0, "first_step": None})
            column["of"] += 1
            if name in a and name in b and type(a[name]) is type(b[name]) and a[name] == b[name]:
                continue
            column["rows"] += 1
            column["first_step"] = a["step"] if column["first_step"] is None else column["first_step"]
            distance = _distance(a.get(name), b.get(name))
            has_numbers = column["max_abs"] is not None and distance is not None
            column["max_abs"] = max(column["max_abs"], distance) if has_numbers else None
    comparison["columns"] = len(columns)
    comparison["differing"] = [column for column in columns.values() if column["rows"]]
    return comparison


def _distance(a: Any, b: Any) -> float | None:
    are_numbers = all(type(value) in (int, float) and abs(value) < MAX_NUMBER for value in (a, b))
    return abs(float(a) - float(b)) if are_numbers else None


def compare_settings(published: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compares two sets of settings.

    Args:
        published: The settings of the published run.
        here: The settings of the other run.

    Returns:
        {key, published, here} for each setting that differs. Nested keys are joined by dots.
    """
    rows = []
    for key in sorted(published.keys() | here.keys()):
        a, b = published.get(key), here.get(key)
        if first_difference({key: a}, {key: b}) is None:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            rows += [{**row, "key": f"{key}.{row['key']}"} for row in compare_settings(a, b)]
        else:
            rows.append({"key": key, "published": a, "here": b})
    return rows


def compare_versions(published: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compares recorded versions.

    Args:
        published: The versions of the published run.
        here: The versions of this run.

    Returns:
        {name, published, here} for each version that differs; None stands for a version that was not recorded.
    """
    names = dict.fromkeys([*here, *published])
    rows = [{"name": name, "published": published.get(name), "here": here.get(name)} for name in names]
    return [row for row in rows if row["published"] != row["here"]]


def _list_files(folder: Path, ending: str = "") -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for subfolder in FOLDERS
        for path in (folder / subfolder).glob(f"*{ending}")
        if path.is_file() and not path.name.startswith(".")
    )
