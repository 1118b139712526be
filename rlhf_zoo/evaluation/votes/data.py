"""The data set of votes on the Hub: what a commit adds, its card, and reading it.

`default` holds the votes that prefer a side, as pairs for a reward model (prompt, chosen, rejected). `ties` holds the
others (prompt, left, right). Every commit adds files of its own, so two Spaces never write the same one. The files are
parquet, because `datasets` turns JSON columns of texts that look like dates into dates.
"""

import logging
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import BadYAML, hub_id, load_yaml
from ...hub.client.claims import commit_on_head
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import reason
from ...hub.client.trees import fetch_dataset
from .vote import CONFIGURATIONS, MODEL_KEYS, VOTE_KEYS, Vote, merge_votes, side_names

log = logging.getLogger(__name__)

#: Maximum bytes (unpacked) and rows of a file of votes. A batch has up to a thousand votes, of some kilobytes each.
MAX_FILE_BYTES, MAX_ROWS = 2**28, 2**20
ROWS_AT_ONCE = 16  # rows unpacked together; few, because a dictionary-encoded text is copied into each row


class HubVotes:
    """The data set of votes in a repository of a Hub.

    Args:
        repo_id: NAMESPACE/NAME.
        private: Whether a repository that has to be created is private.
        hub: The Hub.

    Raises:
        ZooError: The name is not that of a repository.
    """

    def __init__(self, repo_id: str, *, private: bool = False, hub: Hub = DEFAULT_HUB) -> None:
        if hub_id(repo_id) is None or "/" not in repo_id:
            raise ZooError(f"{repo_id!r} is not a repository for votes: use NAMESPACE/NAME.")
        self.name, self.hub = repo_id, hub
        self._private, self._has_card = private, False
        self._cached: tuple[str, list[Vote]] | None = None  # the last commit that was read, and its votes

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        """Adds votes in one commit, as files named after the batch. Creates the repository and its card if missing.

        The parent of the commit is the head that was read. If another process commits meanwhile, the commit is tried
        again on the new head, so nothing is overwritten or missed. The client's errors propagate.

        Args:
            batch: Name of the batch, DATE/NAME.
            votes: The votes of the batch.

        Raises:
            ZooError: The repository holds another data set.
        """
        from huggingface_hub import CommitOperationAdd

        api = self.hub.api()
        if not self._has_card:
            api.create_repo(self.name, repo_type="dataset", exist_ok=True, private=self._private)
        # File names come from the batch, so sending the batch again writes the same files.
        files = {f"{name}/{batch}.parquet": _parquet(name, votes) for name in CONFIGURATIONS}

        def operations(head: str) -> list[Any]:
            card = None if self._has_card else self._updated_card(api, head)
            self._has_card = False  # if the commit fails, the README is checked again
            contents = {**files, "README.md": card.encode() if card else None}
            return [CommitOperationAdd(name, content) for name, content in contents.items() if content is not None]

        message = f"{len(votes)} vote{'s' * (len(votes) > 1)}"
        commit_on_head(self.name, operations, message, repo_type="dataset", hub=self.hub)
        self._has_card = True

    def _head_commit(self, api: Any) -> str:
        refs = api.list_repo_refs(self.name, repo_type="dataset")
        # A commit rather than "main", so that one call of `read` sees one state of the repository.
        return next(ref.target_commit for ref in refs.branches if ref.name == "main")

    def _updated_card(self, api: Any, head: str) -> str | None:
        """Returns the README to commit, with our configurations; None if the current one has them."""
        from huggingface_hub import DatasetCard

        if not api.get_paths_info(self.name, ["README.md"], revision=head, repo_type="dataset"):
            return _new_card(self.name)
        path = api.hf_hub_download(self.name, "README.md", revision=head, repo_type="dataset")
        text = Path(path).read_text(encoding="utf-8")
        configs = self._read_front_matter(text).get("configs") or []
        if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
            raise ZooError(f"The README of {self.name} has configs that are not a list of mappings: fix it there.")
        # A card that cannot be parsed must not be overwritten with a part of itself.
        card = DatasetCard(text, ignore_metadata_errors=False)
        our_configs = {config["config_name"]: config for config in _configs()}
        # Configurations that people added stay.
        other_configs = [config for config in configs if config.get("config_name") not in our_configs]
        if any(
            config != our_configs[config["config_name"]]
            for config in configs
            if config.get("config_name") in our_configs
        ):
            raise ZooError(f"{self.name} holds another data set: use a separate repository for votes.")
        if len(configs) - len(other_configs) == len(our_configs):
            return None
        card.data["configs"] = [*our_configs.values(), *other_configs]
        card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), "rlhf-zoo", "votes"]))
        return str(card)

    def _read_front_matter(self, text: str) -> dict[str, Any]:
        """Reads the YAML at the top of the README, which anybody with write access may have written."""
        from huggingface_hub.repocard import REGEX_YAML_BLOCK

        block = REGEX_YAML_BLOCK.search(text)
        try:
            metadata = load_yaml(block[2]) if block else {}
        except BadYAML as error:
            raise ZooError(f"The README of {self.name} begins with invalid YAML ({error}): fix it there.") from error
        if not isinstance(metadata, dict):
            raise ZooError(f"The README of {self.name} does not begin with a YAML mapping: fix it there.")
        return metadata

    def read(self) -> list[Vote]:
        """Reads every vote on the Hub, oldest first.

        Anybody with write access may add rows, so a row that is not a vote is skipped with a warning. The client's
        errors propagate.

        Returns:
            The votes; [] if there is no such repository.
        """
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            head = self._head_commit(self.hub.api())
            if self._cached is not None and self._cached[0] == head:
                return list(self._cached[1])
            patterns = [f"{name}/*/*.parquet" for name in CONFIGURATIONS]
            folder = fetch_dataset(self.hub, self.name, revision=head, patterns=patterns)
        except RepositoryNotFoundError:
            return []
        votes: list[Vote] = []
        invalid_count = 0
        for path in sorted(folder.glob("*/*/*.parquet")):
            file_votes, file_invalid_count = _read_votes(path)
            votes += file_votes
            invalid_count += file_invalid_count
        if invalid_count:
            log.warning("%s holds %d rows that are not votes of rlhf-zoo; they are skipped.", self.name, invalid_count)
        self._cached = (head, merge_votes(votes))
        return list(self._cached[1])


def _schema(configuration: str) -> Any:
    import pyarrow as pa

    sides = side_names(configuration)
    model = dict(zip(MODEL_KEYS, [*[pa.string()] * 4, pa.float64(), pa.bool_()], strict=True))
    vote = dict(zip(VOTE_KEYS, [*[pa.float64()] * 2, *[pa.int64()] * 2, *[pa.string()] * 2], strict=True))
    # An explicit schema: a column that is empty in one file would otherwise get another type there.
    texts = dict.fromkeys(("prompt", *sides, "verdict"), pa.string())
    models = {f"{side}_{key}": kind for side in sides for key, kind in model.items()}
    return pa.schema(list((texts | models | vote).items()))


def _parquet(configuration: str, votes: Sequence[Vote]) -> bytes | None:
    """Returns the votes of a configuration as a Parquet file; None if there are none."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [vote.to_row() for vote in votes if vote.configuration == configuration]
    if not rows:
        return None
    buffer = BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema=_schema(configuration)), buffer)
    return buffer.getvalue()


def _read_votes(path: Path) -> tuple[list[Vote], int]:
    """Reads a Parquet file that anybody with write access may have put there.

    Returns its votes, and the number of rows that are not votes. A file that is unreadable or too large has neither.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    vote_columns = {name for configuration in CONFIGURATIONS for name in _schema(configuration).names}
    votes, invalid_count = [], 0
    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
            if size > MAX_FILE_BYTES or metadata.num_rows > MAX_ROWS:
                raise ValueError(f"{metadata.num_rows} rows of {size} bytes exceed the limit of a file of votes")
            columns = [
                field.name for field in file.schema_arrow if field.name in vote_columns and _is_plain(field.type)
            ]
            for record_batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                for row in record_batch.to_pylist():
                    try:
                        votes.append(Vote.from_row(row))
                    except ZooError:
                        invalid_count += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        # One damaged file must not hide all other votes. Text that is not UTF-8 is a ValueError.
        log.warning("%s cannot be read (%s); its votes are skipped.", path, reason(error))
        return [], 0
    return votes, invalid_count


def _is_plain(kind: object) -> bool:
    """Returns whether a column holds texts, numbers or truth values, as votes do."""
    import pyarrow.types as types

    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return bool(types.is_null(kind)) or any(test(kind) for test in tests)


def _configs() -> list[dict[str, Any]]:
    return [
        {
            "config_name": name,
            "data_files": [{"split": "train", "path": f"{name}/*/*.parquet"}],
            **({"default": True} if name == "default" else {}),
        }
        for name in CONFIGURATIONS
    ]


def _new_card(name: str) -> str:
    import yaml

    front_matter = {
        "license": "cc-by-4.0",
        "tags": ["rlhf-zoo", "votes"],
        "annotations_creators": ["crowdsourced"],
        "configs": _configs(),
    }
    return f"""---
{yaml.safe_dump(front_matter, sort_keys=False, allow_unicode=True)}---

# Votes

These are votes of visitors to a comparison page of rlhf-zoo. Each visitor saw a prompt and two completions: one by an
SFT model and one by the PPO model trained from it (or by two checkpoints), sampled with the same seed. The sides were
shuffled and not labeled. The visitor chose the better side, a tie, or "both are bad".

| configuration | what it holds |
|---|---|
| `default` | votes that prefer a side: `prompt`, `chosen`, `rejected` |
| `ties` | the others: `prompt`, `left`, `right`, with `verdict` `tie` or `both_bad` |

Both have one split, `train`, in which every commit adds a file. Further columns:

- `verdict`: the side that was preferred (`left`, `right`), `tie` or `both_bad`.
- for each side: `role` (`ppo`, `sft`), `repo`, `commit` and `tag` of the model, `reward` as the page showed it after
  the vote, and `ended`, whether the model stopped by itself (if not, its text was cut off).
- `temperature`, `top_p`, `seed`, `max_new_tokens`: how both were sampled.
- `time` (UTC, to the second) and `id`, a random id of the vote.

**No personal data**: nothing about the voter is stored, neither name nor address nor session. Prompts are what visitors
typed or chose. Nobody checked votes or prompts. Anyone who opens the page may vote, up to a limit for each address, so
voters are not a sample of any population. Completions were written by models and may be wrong or offensive.

```python
from datasets import load_dataset

pairs = load_dataset("{name}", split="train")
ties = load_dataset("{name}", "ties", split="train")
```

Train a reward model on the pairs with `rlhf-zoo reward RECIPE --dataset_name {name}`.
"""
