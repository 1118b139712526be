"""Files with the measurements of an unfinished evaluation, so that it can continue after an interruption."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import home, write_text
from ..modeling import distributed
from ..runs.context import environment_info
from ..runs.record import fingerprint

log = logging.getLogger(__name__)


class SavedMeasurements:
    """The measurements of one evaluation, one file each, in the user's cache folder.

    JSON keeps every float exactly, so a continued evaluation gives the figures of an uninterrupted one. The files are
    not in the run directory: it may come from somebody else, and those figures must not count as measured here.

    Args:
        run: The run directory.
        identity: The settings and data that every measurement depends on, besides the versions of packages. Files of an
            evaluation with another identity or other versions are deleted.
        restart: Whether to delete the files of this evaluation too.
    """

    def __init__(self, run: Path, identity: Mapping[str, Any], *, restart: bool = False) -> None:
        self._root = home() / "evaluations" / fingerprint({"run": run.resolve()})[:16]
        self._folder = self._root / fingerprint({**identity, "versions": environment_info()})[:16]
        #: Seconds that an earlier process spent on the measurements that this process has read.
        self.seconds = 0.0
        self._writable = True
        if restart or not self._folder.is_dir():
            self.delete()

    def get(self, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Returns a saved measurement; if there is none, makes and saves it. All processes must call this together.

        Args:
            key: What distinguishes the measurement from the others of this evaluation.
            make: Returns a new measurement, made of what JSON holds: lists, dictionaries with text keys, texts, numbers
                and None.
        """
        path = self._folder / f"{fingerprint(key)[:32]}.json"
        document = distributed.call_on_main_process(lambda: _read(path))
        if document is not None:
            self.seconds += document["seconds"]
            return document["value"]
        start = time.monotonic()
        value = make()
        if distributed.is_main_process() and self._writable:
            document = {"seconds": time.monotonic() - start, "value": value}
            # Judges may give scalars of numpy, which `item` converts.
            text = json.dumps(document, default=lambda scalar: scalar.item())
            try:
                write_text(path, text)
            except ZooError as error:  # an evaluation does not need these files
                log.warning("%s Until then, an interrupted evaluation starts again.", error)
                self._writable = False
        return value

    def delete(self) -> None:
        """Deletes all files, because the evaluation is finished or its settings have changed."""
        if distributed.is_main_process() and self._root.is_dir():
            shutil.rmtree(self._root)


def _read(path: Path) -> dict[str, Any] | None:
    # `fileio.read_json` bounds the size of untrusted documents. This file is our own, and may be larger.
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no file, or a damaged one, which will be replaced
        return None
