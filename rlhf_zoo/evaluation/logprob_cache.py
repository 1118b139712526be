"""A cache of computed log-probabilities in a file, so that an interrupted probe resumes where it stopped."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..fileio import home, parse_json

log = logging.getLogger(__name__)

#: A larger file is emptied.
MAX_BYTES = 2**28
#: Decimal places of a stored value. Callers round values before `add`, so that new and stored values are equal.
DECIMALS = 5
_SAMPLED_WEIGHTS = 1024  # per tensor, for the digest of a model; a sample suffices, as training changes most weights

Value = float | list[float]


class LogprobCache:
    """Log-probabilities under one model, in memory and in a file. The file has digests and numbers, but no text.

    If the file cannot be written, the values are only in memory, and a warning says so.

    Args:
        model: The model.
        tokenizer: The model's tokenizer. Probabilities are over the tokens of its vocabulary.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._values: dict[str, Value] = {}
        self._path: Path | None = home() / "logprobs" / f"{model_fingerprint(model, tokenizer)}.jsonl"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8") as file:
                if file.tell() > MAX_BYTES:
                    file.truncate(0)
                file.seek(0)
                for line in file:
                    self._read(line)
                file.write("\n")  # the last line is incomplete if writing was interrupted
        except OSError as error:
            self._warn(error)

    def _read(self, line: str) -> None:
        try:
            key, value = parse_json(line)
        except (ValueError, TypeError):  # an empty or incomplete line
            return
        self._values[key] = value

    def _warn(self, error: OSError) -> None:
        log.warning(
            "%s cannot be read or written (%s): if this probe is interrupted, it will start from the beginning.",
            self._path,
            error.strerror,
        )
        self._path = None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def add(self, values: Mapping[str, Value]) -> None:
        """Adds values, and writes them to the file at once.

        Args:
            values: Values by the keys of `request_key`.
        """
        self._values.update(values)
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(item) + "\n" for item in values.items()))
        except OSError as error:
            self._warn(error)


def request_key(prompt_ids: Sequence[int], tokens: Sequence[int], *, is_sum: bool) -> str:
    """Returns the key under which the log-probability of a text after a prompt is stored.

    Args:
        prompt_ids: Token ids of the prompt.
        tokens: Token ids of the text.
        is_sum: Whether the value is the sum over the tokens instead of one number per token.
    """
    return hashlib.sha256(json.dumps([list(prompt_ids), list(tokens), is_sum]).encode()).hexdigest()[:32]


def model_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of a sample of each tensor and of the vocabulary's token ids, the same on every device.

    Args:
        model: The model.
        tokenizer: The model's tokenizer.
    """
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().values())).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        values = weight.detach().flatten()
        sample = values[:: max(1, len(values) // _SAMPLED_WEIGHTS)].float().cpu().numpy()
        digest.update(np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()[:32]
