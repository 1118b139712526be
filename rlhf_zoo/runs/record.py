"""The run directory: run.json, metrics.jsonl and the checkpoints of one stage.

A process that is killed at any moment leaves readable files: JSON documents are replaced atomically, metrics are
appended line by line, and a checkpoint counts only if it has the file COMPLETE.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import canonical_json, jsonable, now, read_json, sync_folder, write_json
from ..hub.client.run_signature import SIGNATURE, TRUST_RUN_FLAG, is_own, sign
from ..modeling.integrity import COMPLETE, find_damage, flush_and_hash
from .metrics_file import append_row, read_rows, truncate_rows
from .registry import STAGES
from .run_shape import SCHEMA, check_run_json

_DAMAGED_PREFIX = "damaged-"
#: The files of a card in a stage's directory.
CARD_FILES = ("README.md", "rlhf_card.json", "plots/*.png", ".eval_results/*.yaml")
#: File in a run's directory with the results of all stages.
SUMMARY = "summary.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# The training thread and the publishing thread both change run.json.
_WRITE_LOCK = threading.RLock()


@contextlib.contextmanager
def block_record_writes() -> Iterator[None]:
    """Keeps other threads from writing run.json inside the block, so that a folder listing has no temporary file."""
    with _WRITE_LOCK:
        yield


def write_complete(folder: Path | str) -> None:
    """Writes COMPLETE into a folder of weights, after the other files have reached the disk.

    COMPLETE has the digests that `integrity` uses to find damaged files.

    Args:
        folder: Folder of a checkpoint or of a merged model.
    """
    folder = Path(folder)
    files = flush_and_hash(folder)
    for directory, _, _ in os.walk(folder):
        sync_folder(Path(directory))
    write_json(folder / COMPLETE, {"schema": SCHEMA, "time": now(), "files": files})


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON of a stage's settings.

    The order of keys does not matter, a tuple counts as a list, and 1.0 counts as 1.

    Args:
        settings: The settings.

    Returns:
        The digest in hex.
    """
    return hashlib.sha256(canonical_json(settings).encode()).hexdigest()


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Returns the first key at which two sets of settings differ.

    Args:
        a: Settings.
        b: Other settings.

    Returns:
        The first such key in sorted order, with nested keys joined by dots; None exactly if the fingerprints are equal.
    """
    a, b = jsonable(a, nonfinite_as_text=True), jsonable(b, nonfinite_as_text=True)
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
    """Returns the step N of a folder named checkpoint-N.

    Args:
        path: The folder.

    Raises:
        ValueError: The folder has another name.
    """
    match = _CHECKPOINT.fullmatch(Path(path).name)
    if match is None:
        raise ValueError(f"{path} is not named checkpoint-N.")
    return int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is named checkpoint-N.

    Args:
        path: The folder.
    """
    return _CHECKPOINT.fullmatch(path.name) is not None


class StageRecord:
    """The directory of one stage, such as runs/tiny-world/ppo. The first write creates it; reading does not."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def run_file(self) -> Path:
        """The path of run.json."""
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        """The path of metrics.jsonl."""
        return self.path / "metrics.jsonl"

    def read(self) -> dict[str, Any]:
        """Reads run.json.

        Returns:
            The document; {} if the stage has not started.

        Raises:
            ZooError: run.json is not JSON of this schema.
        """
        try:
            document = read_json(self.run_file)
        except FileNotFoundError:
            return {}
        return check_run_json(document, self.run_file)

    def write(self, **fields: Any) -> dict[str, Any]:
        """Sets fields of run.json and keeps all other fields.

        The first write adds `schema` and `created`, and signs the document as this user's own. A document without a
        valid signature stays unsigned.

        Args:
            **fields: The fields to set.

        Returns:
            The new document.

        Raises:
            ZooError: The existing document cannot be read.
        """
        with _WRITE_LOCK:
            previous = self.read()
            document = jsonable({"schema": SCHEMA, "created": now(), **previous, **fields}, nonfinite_as_text=True)
            document.pop(SIGNATURE, None)
            if not previous or is_own(previous):
                document = sign(document)
            write_json(self.run_file, document)
            return self.read()

    def is_own(self) -> bool:
        """Whether this user's rlhf-zoo wrote run.json, or the user trusts it, as `run_signature` describes.

        If not, the record may have been downloaded, and code that it names must not be imported.
        """
        return is_own(self.read())

    def check_own(self) -> None:
        """Checks that the run is this user's own, before a command reports its results as this user's.

        Raises:
            ZooError: Another user wrote or changed run.json.
        """
        if not self.is_own():
            raise ZooError(
                f"{self.run_file} was not written by your rlhf-zoo, or was changed since, so its results cannot be "
                f"verified: add {TRUST_RUN_FLAG} if you trust this run."
            )

    def check_recipe(self, recipe: str) -> None:
        """Checks that the directory has no run of another recipe.

        Args:
            recipe: Name of the recipe.

        Raises:
            ZooError: The directory has a run of another recipe.
        """
        recorded_recipe = self.read().get("recipe", recipe)
        if recorded_recipe != recipe:
            raise ZooError(
                f"{self.path} has a run of the recipe {recorded_recipe!r}, not of {recipe!r}: choose another "
                "--output_dir, or use --restart to start again there."
            )

    def can_be_replaced(self, settings: Mapping[str, Any], recipe: str) -> bool:
        """Whether the directory has a run of the same recipe with other settings, for which `has_trained` is false.

        Args:
            settings: The settings of the new run.
            recipe: Name of the recipe.
        """
        document, new_fingerprint = self.read(), fingerprint(settings)
        has_other_settings = document.get("fingerprint", new_fingerprint) != new_fingerprint
        return has_other_settings and document.get("recipe") == recipe and not self.has_trained

    @property
    def has_trained(self) -> bool:
        """Whether the stage is finished, or has saved a checkpoint, even if that was renamed because it is damaged."""
        if self.read().get("status") == "finished" or self.last_checkpoint() is not None:
            return True
        return any(self.path.glob(f"{_DAMAGED_PREFIX}checkpoint-*"))

    def check_fingerprint(
        self,
        settings: Mapping[str, Any],
        *,
        recipe: str | None = None,
        cli_name: str | None = None,
        fix: str = "choose another --output_dir, or start again there with --restart",
    ) -> None:
        """Checks that the directory has no run of another recipe or with other settings. An empty directory passes.

        Args:
            settings: The settings of this run.
            recipe: Name of the recipe; None does not compare recipes.
            cli_name: The argument RECIPE of a command; None for the recipe's name.
            fix: What to do, for the message.

        Raises:
            ZooError: The directory has a run of another recipe or with other settings, or its recorded fingerprint does
                not match its recorded settings.
        """
        document = self.read()
        if recipe is not None:
            self.check_recipe(recipe)
        if "fingerprint" not in document or document["fingerprint"] == fingerprint(settings):
            return
        recorded_settings = document.get("resolved", {})
        key = first_difference(recorded_settings, settings)
        if key is None:
            raise ZooError(f"{self.run_file} has a fingerprint that does not match its settings: use --restart.")
        stage = document.get("stage")
        run_directory = shlex.quote(str(self.path.parent))
        command = f"rlhf-zoo {stage} {cli_name or recipe} --output_dir {run_directory} --restart"
        restart_hint = f" (`{command}`, with your other flags, leaves the other stages as they are)"
        old_value, new_value = _shorten_pair(_setting_text(recorded_settings, key), _setting_text(settings, key))
        raise ZooError(
            f"{self.path} has a run with {key} = {old_value}, and this one has {new_value}: "
            f"{fix}{restart_hint if recipe is not None and stage in STAGES else ''}."
        )

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl, as `metrics_file.append_row` does.

        Args:
            metrics: The row, with an integer `step`.

        Raises:
            ZooError: The file cannot be written.
        """
        append_row(self.metrics_file, metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """Reads all rows of metrics.jsonl, oldest first, and ignores an incomplete last line.

        Raises:
            ZooError: A line other than the last is not a row.
        """
        return read_rows(self.metrics_file)

    def truncate_metrics(self, step: int) -> None:
        """Drops the rows after a step, because a run that resumes at this step writes them again.

        Args:
            step: The last step to keep.
        """
        truncate_rows(self.metrics_file, step)

    def checkpoints(self) -> list[Path]:
        """Returns the complete checkpoints, by step."""
        return [path for path in self._checkpoint_folders() if (path / COMPLETE).is_file()]

    def last_checkpoint(self) -> Path | None:
        """Returns the complete checkpoint with the highest step, or None."""
        return next(reversed(self.checkpoints()), None)

    def chosen_checkpoint(self) -> Path | None:
        """Returns the checkpoint of a finished stage that later stages start from.

        Returns:
            The checkpoint that the release rule chose, or the last one if no choice is recorded; None if it is missing
            or incomplete.
        """
        choice = self.read().get("chosen")
        if not choice:
            return self.last_checkpoint()
        path = self.checkpoint_path(choice["step"])
        return path if (path / COMPLETE).is_file() else None

    def rename_damaged_checkpoints(self) -> list[str]:
        """Renames the damaged checkpoints after the last intact one to damaged-checkpoint-N.

        The run then resumes from the last intact checkpoint. Damaged checkpoints are kept for repair.

        Returns:
            A description of the damage of each renamed checkpoint.
        """
        problems = []
        for path in reversed(self.checkpoints()):
            problem = find_damage(path, for_resuming=True)
            if problem is None:
                break
            target = path.with_name(f"{_DAMAGED_PREFIX}{path.name}")
            if target.exists():
                shutil.rmtree(target)
            path.rename(target)
            problems.append(problem)
        return problems

    def remove_checkpoint(self, path: Path | str) -> None:
        """Deletes a checkpoint. COMPLETE is deleted first, so that a partly deleted checkpoint does not count.

        Args:
            path: Folder of the checkpoint.
        """
        (Path(path) / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(path)

    def checkpoint_path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of a step, whether or not it exists.

        Args:
            step: The step. It is checked, because a damaged or hostile run.json could hold a path instead.

        Raises:
            ZooError: The step is not an integer.
        """
        if type(step) is not int:
            raise ZooError(
                f"{self.run_file} names the checkpoint of a step {step!r:.200}, which is not an integer: restore the "
                "file, or start again with --restart."
            )
        return self.path / f"checkpoint-{step}"

    def mark_complete(self, path: Path | str) -> None:
        """Writes COMPLETE into a checkpoint, after its files and the metrics have reached the disk.

        Args:
            path: Folder of the checkpoint.

        Raises:
            ValueError: The folder is not named checkpoint-N.
        """
        checkpoint_step(path)
        if self.metrics_file.exists():
            with open(self.metrics_file, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.path)
        write_complete(path)

    def remove_incomplete_files(self) -> list[Path]:
        """Deletes checkpoints without COMPLETE and temporary files of killed writes.

        Returns:
            The deleted paths.
        """
        incomplete_checkpoints = [path for path in self._checkpoint_folders() if not (path / COMPLETE).is_file()]
        for path in incomplete_checkpoints:
            shutil.rmtree(path)
        with _WRITE_LOCK:  # otherwise the temporary file of another thread's write would count as a leftover
            leftovers = [path for name in ("run.json", "metrics.jsonl") for path in self.path.glob(f".{name}.*.tmp")]
            for path in leftovers:
                path.unlink()
        return incomplete_checkpoints + leftovers

    def clear(self) -> None:
        """Deletes the record for --restart: checkpoints, card, metrics.jsonl, then run.json. Other files stay.

        run.json is deleted last, so that after a kill the other files still belong to a known run.
        """
        for path in self._checkpoint_folders():
            (path / COMPLETE).unlink(missing_ok=True)
        self.remove_incomplete_files()
        for path in self.path.glob(f"{_DAMAGED_PREFIX}checkpoint-*"):
            shutil.rmtree(path)
        for pattern in CARD_FILES:
            for path in self.path.glob(pattern):
                path.unlink()
        self.metrics_file.unlink(missing_ok=True)
        self.run_file.unlink(missing_ok=True)

    def _checkpoint_folders(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        folders = (path for path in self.path.iterdir() if is_checkpoint(path) and path.is_dir())
        return sorted(folders, key=checkpoint_step)


def _setting_text(settings: Mapping[str, Any], key: str) -> str:
    """Formats the setting at a dotted key for a message; "nothing" if it is not set."""
    value: Any = settings
    for name in [key] if key in settings else key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return "nothing"
        value = value[name]
    return json.dumps(jsonable(value, nonfinite_as_text=True), ensure_ascii=False)


def _shorten_pair(a: str, b: str) -> tuple[str, str]:
    """Shortens two different texts to excerpts of 80 characters that contain their first difference."""
    width = 80
    if max(len(a), len(b)) <= width:
        return a, b
    difference = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, difference - width // 2)

    def excerpt(text: str) -> str:
        text = ("..." if start else "") + text[start:]
        return text if len(text) <= width else text[: width - 3] + "..."

    return excerpt(a), excerpt(b)
