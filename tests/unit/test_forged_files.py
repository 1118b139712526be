"""Untrusted files: readable errors for wrong types and sizes, no figures shown as ours, no terminal control."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_zoo.app.page import held_out
from rlhf_zoo.app.page import models as page_models
from rlhf_zoo.cli import main
from rlhf_zoo.cli.lineage import lineage
from rlhf_zoo.cli.publish import card
from rlhf_zoo.cli.tables import print_json, print_table, print_text
from rlhf_zoo.errors import PrintableFormatter, ZooError
from rlhf_zoo.fileio import MAX_DEPTH, MAX_JSON, parse_json, read_json
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.pipeline import policy_eval
from rlhf_zoo.pipeline.inspect.trace import TracedPolicy
from rlhf_zoo.publishing.catalog.card import Card
from rlhf_zoo.publishing.catalog.lineage import Lineage
from rlhf_zoo.runs.record import StageRecord
from rlhf_zoo.runs.run_shape import SHAPE

pytestmark = pytest.mark.attack

#: One of them at least is of another type than any field.
ODD: list[Any] = [True, -1, 10**400, math.nan, "x", ["x"], {"x": 1}, {"x": ["x"]}, [[[1]]]]


def test_json_depth_and_size_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper documents would end in a RecursionError wherever a function recurses over them."""
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    file = tmp_path / "x.json"
    for depth in (MAX_DEPTH + 1, 500, 10**4):
        for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            file.write_text(text)
            with pytest.raises(ZooError, match="nested more than 64 deep"):
                read_json(file)
            assert Card.parse(text.encode())[1] is not None
    monkeypatch.setattr("rlhf_zoo.fileio.MAX_JSON", 10)
    file.write_text('"0123456789"')
    with pytest.raises(ZooError, match="has more than 10 bytes"):
        read_json(file)
    assert MAX_JSON == 2**26


@pytest.mark.parametrize("name", [name for name in SHAPE if name is not None])
def test_run_record_rejects_fields_of_wrong_type(tmp_path: Path, name: str) -> None:
    record = StageRecord(tmp_path / "ppo")
    document = record.write(stage="ppo", recipe="toy")

    def refusal(value: Any) -> str | None:
        record.run_file.write_text(json.dumps({**document, name: value}))
        try:
            record.read()
        except ZooError as error:
            return str(error)
        return None

    refused = list(filter(None, map(refusal, ODD)))
    assert len(refused) >= 4 and all(sentence.startswith(name) for sentence in refused)
    record.run_file.write_text(json.dumps({**document, name: None}))
    assert record.read()[name] is None


@pytest.mark.parametrize("path", [("sft", 5), ("sft", {"path": 5}), ("sft", {"repo": ["x"]}), ("sft", {"commit": {}})])
def test_run_record_rejects_parents_of_wrong_type(tmp_path: Path, path: tuple[str, Any]) -> None:
    record = StageRecord(tmp_path / "ppo")
    document = record.write(stage="ppo")
    record.run_file.write_text(json.dumps({**document, "parents": dict([path])}))
    with pytest.raises(ZooError, match=r"parents\.sft.* has a different type"):
        record.read()


@pytest.mark.parametrize("row", ["[" * 10**4, '{"step": 1, "x": ' + "[" * 100 + "]" * 100 + "}", '{"step": 1e3}'])
def test_run_record_rejects_malformed_metrics_rows(tmp_path: Path, row: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n{row}\n")
    with pytest.raises(ZooError, match=r"Line 1 of .* is not a row of metrics"):
        StageRecord(tmp_path).metrics()


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PPO stage that another machine wrote, with figures and data beside it."""
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "theirs"))
    stage = tmp_path / "download" / "ppo"
    StageRecord(stage).write(
        stage="ppo", recipe="toy", status="finished", resolved={"dataset_name": str(tmp_path / "secret.jsonl")}
    )
    (stage.parent / "eval").mkdir()
    (stage.parent / "eval" / "evaluation.json").write_text('{"win_rate": {"value": 1.0}}')
    data = stage.parent / "data" / "prompts"
    data.mkdir(parents=True)
    (data / "test.jsonl").write_text('{"prompt": "hunter2"}\n')
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "ours"))
    return stage


@pytest.mark.parametrize("command", [card, lineage])
def test_card_and_lineage_refuse_run_of_another_machine(strange: Path, command: Any) -> None:
    before = sorted(strange.rglob("*"))
    arguments = [str(strange), *(["--hub", "http://127.0.0.1:9"] if command is lineage else [])]
    outcome = CliRunner().invoke(command, arguments)
    assert isinstance(outcome.exception, ZooError) and "was not written by your rlhf-zoo" in str(outcome.exception)
    assert str(outcome.exception).endswith("add --trust_run if you trust this run.")
    assert sorted(strange.rglob("*")) == before and "win_rate" not in outcome.output


def test_page_shows_no_data_of_untrusted_run(strange: Path) -> None:
    source = Checkpoint(str(strange), strange)
    runs, problem = page_models._find_timeline_runs(Lineage(source, source, None, {}), None, skip_unreadable=False)
    assert runs == [] and problem is not None and "was not written by your rlhf-zoo" in problem
    assert held_out.read_held_out_prompts(Lineage(source, source, None, {}), lambda prompt: None) == []


def test_untrusted_run_may_not_name_local_data(strange: Path) -> None:
    source = Checkpoint(str(strange), strange)
    document = StageRecord(strange).read()
    policy = TracedPolicy(
        source, source, (), None, None, 1, document["resolved"], strange / "run.json", is_trusted=False
    )
    with pytest.raises(ZooError, match=r"dataset_name to '.*secret\.jsonl', a path on the machine"):
        policy_eval._open_run_data(strange, policy, DEFAULT_HUB)


#: Clears a screen, sets a title, turns text around, and is half a character.
CONTROLS = "a\x1b[2J\x1b]0;t\x07\x9b1m\u202e\u2066\x00\r\ud800b"


def test_terminal_output_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({CONTROLS: CONTROLS, "é": "日本"})
    written = capsys.readouterr().out
    assert json.loads(written) == {CONTROLS: CONTROLS, "é": "日本"} and "日本" in written
    print_table(CONTROLS, [CONTROLS], [[CONTROLS]])
    print_text(CONTROLS, err=True)
    with pytest.raises(SystemExit) as end:
        main._fail(f"{CONTROLS}.")
    shown = capsys.readouterr()
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (CONTROLS,), None)
    texts = [
        written,
        shown.out,
        shown.err,
        PrintableFormatter().format(record),
        main._format_warning(CONTROLS, Warning, "", 0),
    ]
    assert end.value.code == 2 and all("2J" in text for text in texts)
    assert not [c for text in texts for c in text if not c.isprintable() and c != "\n"]
