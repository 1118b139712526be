"""The run directory: run.json, metrics.jsonl and the checkpoints of one stage.

Everything that outlives a process goes through here, so that a kill at any moment leaves files that can be read: JSON
documents are replaced as a whole, metrics are appended line by line, and a checkpoint counts once it holds COMPLETE.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import canonical_json, jsonable, now, read_json, sync_folder, write_json, write_refused, write_text
from ..hub.client.run_signature import SIGNATURE, is_own, signed
from ..modeling.integrity import COMPLETE, damage, seal
from .registry import STAGES

SCHEMA = 1
DAMAGED = "damaged-"
#: What a card's making leaves in a stage's directory.
OF_A_CARD = ("README.md", "rlhf_card.json", "plots/*.png", ".eval_results/*.yaml")
#: In a run's directory, what came of all stages.
SUMMARY = "summary.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# The thread that trains and the one that publishes both change run.json.
_WRITING = threading.RLock()


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics without when it was written and how long something took: in these, equal runs differ."""
    return {
        name: value
        for name, value in row.items()
        if name != "time" and not name.startswith(("time/", "perf/")) and not name.endswith(("runtime", "_per_second"))
    }


@contextlib.contextmanager
def records_at_rest() -> Iterator[None]:
    """While open, no thread of this process writes a run.json: whoever lists a folder finds no temporary file there."""
    with _WRITING:
        yield


def write_complete(folder: Path | str) -> None:
    """Write COMPLETE into a folder of weights, after all that stands in it has reached the disk: see `integrity`."""
    folder = Path(folder)
    files = seal(folder)
    for one, _, _ in os.walk(folder):
        sync_folder(Path(one))
    write_json(folder / COMPLETE, {"schema": SCHEMA, "time": now(), "files": files})


def fingerprint(resolved: Mapping[str, Any]) -> str:
    """sha256, in hex, over the canonical JSON of a resolved recipe.

    Independent of the order of keys; a tuple equals a list and 1.0 equals 1, as they do in YAML.
    """
    return hashlib.sha256(canonical_json(resolved).encode()).hexdigest()


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """The first key, in sorted order, at which two resolved recipes differ; nested keys are joined by dots.

    None exactly when their fingerprints are equal.
    """
    a, b = jsonable(a, named=True), jsonable(b, named=True)
    for key in sorted(a.keys() | b.keys()):
        if key not in a or key not in b:
            return key
        if canonical_json(a[key]) == canonical_json(b[key]):
            continue
        if isinstance(a[key], dict) and isinstance(b[key], dict):
            return f"{key}.{first_difference(a[key], b[key])}"
        return key
    return None


def checkpoint_step(path: Path | str) -> int:
    """The step N of a folder named checkpoint-N. Raises ValueError for any other name."""
    match = _CHECKPOINT.fullmatch(Path(path).name)
    if match is None:
        raise ValueError(f"{path} is not named checkpoint-N.")
    return int(match[1])


class StageRecord:
    """The directory of one stage, e.g. runs/tiny-world/ppo. It is made by the first write, not by looking at it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    # run.json

    def read(self) -> dict[str, Any]:
        """run.json, or {} where the stage has not begun. Raises ZooError where it cannot be understood."""
        try:
            document = read_json(self.run_file)
        except FileNotFoundError:
            return {}
        if not isinstance(document, dict):
            raise ZooError(f"{self.run_file} does not hold a JSON object: begin again with --restart.")
        if document.get("schema") != SCHEMA:
            raise ZooError(
                f"{self.run_file} has schema {document.get('schema')!r} and this rlhf-zoo reads {SCHEMA}: "
                "use the version that wrote it, or begin again with --restart."
            )
        return document

    def write(self, **fields: Any) -> dict[str, Any]:
        """Set these fields of run.json, keep the others, and return the document as it now stands.

        `schema` and `created` are set by the first write, which also signs it as this user's own. A document that
        was not signed stays so, whoever changes it.
        """
        with _WRITING:
            before = self.read()
            document = jsonable({"schema": SCHEMA, "created": now(), **before, **fields}, named=True)
            document.pop(SIGNATURE, None)
            if not before or is_own(before):
                document = signed(document)
            write_json(self.run_file, document)
            return self.read()

    def is_own(self) -> bool:
        """Whether this user's rlhf-zoo began the stage, or the user trusts it: see `run_signature`.

        Of any other, as of a download, no code that it names may be imported.
        """
        return is_own(self.read())

    def check_recipe(self, recipe: str) -> None:
        """Raise ZooError if the directory holds a run of another recipe."""
        held = self.read().get("recipe", recipe)
        if held != recipe:
            raise ZooError(
                f"{self.path} holds a run of the recipe {held!r}, not of {recipe!r}: choose another --output_dir, or "
                "give --restart to begin again there."
            )

    def came_to_nothing(self, resolved: Mapping[str, Any], recipe: str) -> bool:
        """Whether other settings of the recipe ended before their first checkpoint: to begin again costs nothing."""
        document, mine = self.read(), fingerprint(resolved)
        other = document.get("fingerprint", mine) != mine and document.get("recipe") == recipe
        return other and not self.has_trained

    @property
    def has_trained(self) -> bool:
        """Whether the stage is finished, or has saved a checkpoint that it can go on from."""
        if self.read().get("status") == "finished" or self.last_checkpoint() is not None:
            return True
        return any(self.path.glob(f"{DAMAGED}checkpoint-*"))

    def check_fingerprint(
        self,
        resolved: Mapping[str, Any],
        *,
        recipe: str | None = None,
        called: str | None = None,
        mend: str = "choose another --output_dir, or begin again there with --restart",
    ) -> None:
        """Raise ZooError if the directory holds a run of another recipe or of other settings; an empty one passes.

        called: the recipe as a command names it; None is its name.
        """
        document = self.read()
        if recipe is not None:
            self.check_recipe(recipe)
        if "fingerprint" not in document or document["fingerprint"] == fingerprint(resolved):
            return
        before = document.get("resolved", {})
        key = first_difference(before, resolved)
        if key is None:
            raise ZooError(f"The fingerprint in {self.run_file} does not fit its settings: begin again with --restart.")
        stage = document.get("stage")
        command = f"rlhf-zoo {stage} {called or recipe} --output_dir {self.path.parent} --restart"
        alone = f" (`{command}`, with your other flags, leaves the other stages as they are)"
        raise ZooError(
            f"{self.path} holds a run with {key} = {_at(before, key)}, and this one has {_at(resolved, key)}: "
            f"{mend}{alone if recipe is not None and stage in STAGES else ''}."
        )

    # metrics.jsonl

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one row. `step` must be in it; `time` is added; a number that is not finite is written as null.

        A line that a kill left torn is dropped first, so that it cannot swallow the new one. Raises ZooError where the
        file system refuses.
        """
        step = metrics.get("step")
        if type(step) is not int:
            raise ValueError(f"A row of metrics needs an integer step, not {step!r}.")
        row = {"step": step, "time": now(), **metrics}
        line = json.dumps(jsonable(row, named=False), allow_nan=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(self.metrics_file, "a+b") as file:
                end = file.seek(0, os.SEEK_END)
                before = self._mend_tail(file, end)
                try:
                    file.write(before + line.encode() + b"\n")
                    file.flush()
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise ZooError(write_refused(self.metrics_file, error)) from error

    @staticmethod
    def _mend_tail(file: Any, end: int) -> bytes:
        """Cut a torn last line off; return what must precede the next line (a newline after a whole, open one)."""
        if end == 0:
            return b""
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return b""
        file.seek(0)
        content = file.read()
        start = content.rfind(b"\n") + 1
        if _row(content[start:]) is not None:
            return b"\n"
        file.truncate(start)
        return b""

    def metrics(self) -> list[dict[str, Any]]:
        """All rows, oldest first; a last line torn by a kill is left out. Raises ZooError for any other bad line."""
        try:
            lines = self.metrics_file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        rows = []
        for number, line in enumerate(lines, start=1):
            row = _row(line) if line.strip() else None
            if row is not None:
                rows.append(row)
            elif line.strip() and number < len(lines):
                raise ZooError(
                    f"Line {number} of {self.metrics_file} is not a row of metrics: remove it, or use --restart."
                )
        return rows

    def truncate_metrics(self, step: int) -> None:
        """Drop the rows after `step`, so that a run resumed from the checkpoint of that step repeats none."""
        if not self.metrics_file.exists():
            return
        rows = (row for row in self.metrics() if row["step"] <= step)
        write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))

    # checkpoints

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, by step."""
        return [path for path in self._checkpoint_folders() if (path / COMPLETE).is_file()]

    def last_checkpoint(self) -> Path | None:
        """The complete checkpoint with the highest step, or None."""
        return next(reversed(self.checkpoints()), None)

    def chosen_checkpoint(self) -> Path | None:
        """The checkpoint of a finished stage that others start from: the one its rule chose, the last where none did.

        None where it is no longer there.
        """
        chosen = self.read().get("chosen")
        if not chosen:
            return self.last_checkpoint()
        path = self.checkpoint_path(chosen["step"])
        return path if (path / COMPLETE).is_file() else None

    def set_damaged_aside(self) -> list[str]:
        """Renames the newest checkpoints to damaged-checkpoint-N until one is whole. Returns what was wrong with each.

        So a run goes on from the last whole one, and loses nothing that somebody may still mend.
        """
        problems = []
        for path in reversed(self.checkpoints()):
            problem = damage(path, training=True)
            if problem is None:
                break
            aside = path.with_name(f"{DAMAGED}{path.name}")
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)
            problems.append(problem)
        return problems

    def remove_checkpoint(self, path: Path | str) -> None:
        """Delete a checkpoint. After a kill in between, what is left of it does not count as one."""
        (Path(path) / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(path)

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step stands, or will. Raises ZooError for a step that is no number, but a path."""
        if type(step) is not int:
            raise ZooError(
                f"{self.run_file} names the checkpoint of a step {step!r:.200}, which is no whole number: restore it, "
                "or begin again with --restart."
            )
        return self.path / f"checkpoint-{step}"

    def mark_complete(self, path: Path | str) -> None:
        """Write COMPLETE into a checkpoint, after all that stands in it, and the metrics, have reached the disk."""
        checkpoint_step(path)
        if self.metrics_file.exists():
            with open(self.metrics_file, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.path)
        write_complete(path)

    def remove_incomplete(self) -> list[Path]:
        """Delete checkpoints without COMPLETE, and temporary files of a killed write. Returns what it deleted."""
        torn = [path for path in self._checkpoint_folders() if not (path / COMPLETE).is_file()]
        for path in torn:
            shutil.rmtree(path)
        with _WRITING:  # what another thread is writing at this moment was left by no kill
            leftovers = [path for name in ("run.json", "metrics.jsonl") for path in self.path.glob(f".{name}.*.tmp")]
            for path in leftovers:
                path.unlink()
        return torn + leftovers

    def clear(self) -> None:
        """Delete the record (--restart): its checkpoints, card, metrics.jsonl, then run.json; other files stay.

        run.json goes last, so that after a kill in between what is left still says whose it is.
        """
        for path in self._checkpoint_folders():
            (path / COMPLETE).unlink(missing_ok=True)
        self.remove_incomplete()
        for path in self.path.glob(f"{DAMAGED}checkpoint-*"):
            shutil.rmtree(path)
        for pattern in OF_A_CARD:
            for path in self.path.glob(pattern):
                path.unlink()
        self.metrics_file.unlink(missing_ok=True)
        self.run_file.unlink(missing_ok=True)

    def _checkpoint_folders(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        folders = (path for path in self.path.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir())
        return sorted(folders, key=checkpoint_step)


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or None if it is not one. No proper prefix of a JSON object is a JSON object."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _at(settings: Mapping[str, Any], key: str) -> str:
    """The value at a dotted key, for a message: short, or that it is not set."""
    value: Any = settings
    for part in [key] if key in settings else key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return "nothing"
        value = value[part]
    text = json.dumps(jsonable(value, named=True), ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
