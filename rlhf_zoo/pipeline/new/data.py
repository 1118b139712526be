"""What the rows of a data set look like, and by which keys each stage reads them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets

from ...errors import ZooError
from ...hub.client.connect import CLIENT
from ...hub.client.data_gate import GatedData, gated
from ...hub.client.refusals import client_errors, reason, refusals_as
from ...modeling.chat_template import is_conversation
from ...modeling.prompt_keys import count_distinct_prompts
from ...runs.data.layout import Form, in_form
from ...runs.data.sources import wrong_in
from ...runs.data.tables import dataset_of
from ...runs.data.turns import SHAREGPT, speaker

#: Rows that are looked at, of a split whose size nobody says.
COUNTED = 5000
LOOKED_AT = 200
#: What data sets call the column that a stage reads, the likeliest first.
CALLED = {
    "prompt": ("prompt", "question", "instruction", "query", "problem", "input", "text"),
    "completion": ("completion", "answer", "output", "response", "solution"),
    "chosen": ("chosen", "chosen_response", "preferred"),
    "rejected": ("rejected", "rejected_response", "dispreferred"),
}
#: A split for a stage: what its name begins with, the likeliest first.
TRAIN = {"texts": ("train_sft", "train"), "pairs": ("train_prefs", "train"), "prompts": ("train_gen", "train")}
TEST = {
    "texts": ("validation", "test_sft", "test", "eval"), "pairs": ("test_prefs", "test", "validation", "eval"),
    "prompts": ("test_gen", "test"),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A configuration of a data set: its splits, and the first rows of each that was looked at, by its name.

    counted: the first `COUNTED` rows of a split, read when they are asked for.
    """

    configuration: str | None
    splits: Mapping[str, int]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    counted: Callable[[str], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Source:
    """A data set by its name and commit, None of a folder."""

    name: str
    revision: str | None
    parts: Sequence[Part]


@dataclass(frozen=True)
class Reading:
    """How a stage reads a data set: keys of its YAML, the rows that it trains on, some of these in the stage's form.

    plain: whether their prompts or texts are no conversations. prompts: how many different ones the rows of the split
    hold, and tested those of the split to evaluate on, None without one; both at the least where rows beyond `COUNTED`
    were not read. They count rows for other stages than PPO.
    """

    data: Source
    keys: Mapping[str, Any]
    count: int
    rows: Sequence[Mapping[str, Any]]
    prompts: int
    tested: int | None = None

    @property
    def plain(self) -> bool:
        return not any(
            is_conversation(self.rows[0].get(name)) for name in ("prompt", "messages", "completion", "chosen")
        )

    @property
    def asks(self) -> bool:
        """Whether prompt and answer stand in columns of their own."""
        return "prompt" in self.rows[0]


def look_at_data(name: str) -> Source:
    """The splits of each configuration, with their first rows: of a folder, a file of JSON lines, whose split is train,
    or NAMESPACE/NAME[@REVISION].

    Raises ZooError for what cannot be loaded.
    """
    here = Path(name).exists()
    repo, _, revision = (name, "", "") if here else name.partition("@")
    commit = None
    if not here:
        from huggingface_hub import HfApi

        what = f"The data set {repo} is no folder, no file, and cannot be found on {CLIENT.address}"
        with refusals_as(what, "check its name and --source_hub."):
            commit = str(HfApi().dataset_info(repo, revision=revision or None).sha)
    try:
        with gated(repo, commit) as gate:
            names = [""] if Path(name).is_file() else gate.configurations()
            parts = [_part(gate, config if len(names) > 1 else None) for config in names]
    except (ValueError, datasets.exceptions.DatasetsError, *client_errors()) as error:
        said = wrong_in(Path(repo)) or f"{reason(error)}; check what it holds"
        raise ZooError(f"The data set {name} cannot be loaded: {said}.") from error
    return Source(repo, commit, parts)


def _part(gate: GatedData, configuration: str | None) -> Part:
    known = gate.builder(configuration).info.splits or {}
    sizes, rows = {}, {}
    for split in gate.splits(configuration):
        stream = gate.stream(configuration, split)
        rows[split] = list(islice(stream, LOOKED_AT))
        said = known[split].num_examples if split in known else 0
        sizes[split] = said or (
            len(rows[split]) if len(rows[split]) < LOOKED_AT else sum(1 for _ in islice(stream, COUNTED))
        )

    def counted(split: str) -> Iterable[Mapping[str, Any]]:
        return islice(gate.stream(configuration, split), COUNTED)

    return Part(configuration, sizes, rows, counted)


def read_as(data: Source, form: Form, named: Mapping[str, str] | None = None) -> Reading | None:
    """How a stage would read the data set; None where nothing in it has the stage's form.

    Of several configurations the first that has it is taken. named: what somebody says that columns are called, ours ->
    theirs. Raises ZooError where the columns of the form are there, and what they hold is none.
    """
    refused = None
    for part in data.parts:
        train = _first(part.splits, TRAIN[form])
        if train is None or not part.rows[train]:
            continue
        names = dict.fromkeys(name for row in part.rows[train] for name in row)
        rows = dataset_of({name: [row.get(name) for row in part.rows[train]] for name in names})
        columns = _columns(rows, form, named or {})
        if columns is None:
            continue
        try:
            shaped = in_form(rows, form, columns=columns, turns=False, text="text", of=f"The data set {data.name}")
        except ZooError as error:
            refused = error
            continue
        test = _first(part.splits, TEST.get(form, ()))
        keys: dict[str, Any] = {
            "dataset_config": part.configuration,
            "dataset_train_split": train,
            "dataset_test_split": test,
            "columns": columns,
        }
        found = Reading(data, keys, part.splits[train], list(shaped), part.splits[train])
        if form != "prompts":
            return found
        tested = None if test is None else _distinct(part, test, columns, data.name)
        return replace(found, prompts=_distinct(part, train, columns, data.name), tested=tested)
    if refused is not None:
        raise refused
    return None


def _distinct(part: Part, split: str, columns: Mapping[str, str], name: str) -> int:
    """How many different prompts a split holds; of one whose first rows repeat none, as many as rows."""

    def among(rows: Sequence[Mapping[str, Any]]) -> int:
        if not rows:
            return 0
        table = dataset_of({column: [row.get(column) for row in rows] for column in dict.fromkeys(chain(*rows))})
        of = f"The data set {name}, split {split},"
        return count_distinct_prompts(
            in_form(table, "prompts", columns=columns, turns=False, text="text", of=of)["prompt"]
        )

    looked_at = part.rows[split]
    return part.splits[split] if among(looked_at) == len(looked_at) else among(list(part.counted(split)))


def _first(splits: Mapping[str, int], beginnings: Sequence[str]) -> str | None:
    """The split whose name begins with the first of these that any begins with."""
    return next((name for start in beginnings for name in sorted(splits) if name.startswith(start)), None)


def _columns(rows: datasets.Dataset, form: Form, named: Mapping[str, str]) -> dict[str, str] | None:
    """The key `columns`: empty where the data set's own names are the stage's; None where it has no such columns."""
    names, first = rows.column_names, rows[0]
    called = {ours: (named.get(ours), *theirs) for ours, theirs in CALLED.items()}
    found = {ours: next((one for one in theirs if one in names), None) for ours, theirs in called.items()}
    renamed = {ours: theirs for ours, theirs in found.items() if theirs is not None}

    def only(*wanted: str) -> dict[str, str]:
        return {ours: renamed[ours] for ours in wanted if renamed[ours] != ours}

    pairs = "chosen" in renamed and "rejected" in renamed
    asked = renamed.get("prompt") not in (None, "text")
    if SHAREGPT in names and "prompt" not in (*names, *named):  # which the likes of `input` do not take the place of
        asked = False
    if form == "pairs":
        return only("chosen", "rejected", *(["prompt"] if asked else [])) if pairs else None
    if "messages" in names or (SHAREGPT in names and not pairs):
        return {}
    if form == "prompts":
        if pairs and not asked:
            return only("chosen", "rejected")
        return only("prompt") if "prompt" in renamed else None
    if asked and "completion" in renamed:
        return only("prompt", "completion")
    if pairs:
        chosen = renamed["chosen"]
        if speaker(first[chosen]) not in (None, "assistant"):
            return {"messages": chosen}
        if SHAREGPT in names:
            return only("chosen", "rejected")
        return {**only("prompt"), "completion": chosen} if asked else {"text": chosen}
    return {} if "text" in names else None
