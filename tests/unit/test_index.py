"""The zoo's index: entries made from cards, sorting, filters, and the benchmark table."""

import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.errors import ZooError
from rlhf_zoo.publishing.catalog.card import Card
from rlhf_zoo.publishing.catalog.index import (
    SORTS,
    CardEstimate,
    Entry,
    benchmark_table,
    checkpoint_listing,
    filter_entries,
    insert_table,
    make_entry,
    sort_entries,
    write_benchmark,
)

COMMIT = "c" * 40
HELD_OUT = {
    "reward_model": {"accuracy": 0.75, "ci95": [0.7, 0.8], "n": 500},
    "sft": {"reward": {"value": 0.5, "ci95": [0.25, 0.75], "n": 9}},
    "ppo": {"reward": {"value": 2.5, "ci95": [2.0, 3.0], "n": 540}, "kl": {"value": 7.0, "ci95": None, "n": 540}},
    "win_rate": {"value": 0.875, "ci95": [0.85, 0.9], "n": 540},
}
CARD = {
    "stage": "ppo", "recipe": "toy", "base_model": "zoo/toy-sft", "step": 40, "seed": 3, "simulated": True,
    "reward": 2.75, "kl": 7.5, "evaluation": HELD_OUT, "created": "2026-11-20T10:00:00+00:00",
    "finished": "2026-11-21T01:00:00+02:00",
}  # fmt: skip


def entry_of(**card: Any) -> Entry:
    return make_entry("zoo/toy-ppo", COMMIT, {**CARD, **card})


def test_entry_has_held_out_figures_of_own_stage():
    entry = entry_of()
    assert (entry.stage, entry.recipe, entry.base, entry.step, entry.seed) == ("ppo", "toy", "zoo/toy-sft", 40, 3)
    assert (entry.simulated, entry.date, entry.note) == (True, "2026-11-20T23:00:00+00:00", None)
    assert entry.reward == CardEstimate(2.5, (2.0, 3.0), 540) and entry.kl == CardEstimate(7.0, None, 540)
    assert entry.win_rate == CardEstimate(0.875, (0.85, 0.9), 540) and entry.accuracy is None
    sft = entry_of(stage="sft")
    assert sft.reward == CardEstimate(0.5, (0.25, 0.75), 9) and (sft.kl, sft.win_rate, sft.accuracy) == (
        None,
        None,
        None,
    )
    reward = entry_of(stage="reward")
    assert reward.accuracy == CardEstimate(0.75, (0.7, 0.8), 500)
    assert (reward.reward, reward.kl, reward.win_rate) == (None, None, None)


@pytest.mark.parametrize(("step", "verdict"), [(40, "healthy"), (80, "hacked"), (None, "hacked")])
def test_entry_has_verdict_on_its_own_step_or_else_on_the_run(step, verdict):
    trajectory = {"kind": "hacked", "step": 80, "at_recommended": {"kind": "healthy", "step": 40}}
    assert entry_of(evaluation={"over_training": trajectory}, step=step).verdict == verdict
    assert entry_of(evaluation={"over_training": {"kind": 7}}).verdict is None


def test_entry_without_evaluation_has_training_figures():
    entry = entry_of(evaluation=None, finished=None)
    assert entry.reward == CardEstimate(2.75, held_out=False) and entry.kl == CardEstimate(7.5, held_out=False)
    assert entry.win_rate is None and entry.date == "2026-11-20T10:00:00+00:00"
    # What the card does not say the Hub may.
    changed = datetime(2026, 11, 22, tzinfo=UTC)
    entry = make_entry("zoo/x", COMMIT, {}, changed_at=changed, tags=["rlhf-zoo", "stage:reward"], note="no card")
    assert (entry.stage, entry.date, entry.note) == ("reward", "2026-11-22T00:00:00+00:00", "no card")
    assert (entry.recipe, entry.base, entry.step, entry.reward) == (None, None, None, None)


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "that is not JSON"),
        (b"\xff\xfe", "that is not JSON"),
        (b"{'stage': 1}", "that is not JSON"),
        (b"[" * 100_000, "that is not JSON"),
        (b'{"kl": ' + b"1" * 5000 + b"}", "that is not JSON"),
        (b"[1]", "that is not a JSON object"),
        (b"null", "that is not a JSON object"),
    ],
)
def test_unreadable_card_becomes_note(content, note):
    card, message = Card.parse(content)
    assert card == {} and message is not None and note in message


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "7", [7], {"value": 7}, None, 10**400, {}])
def test_entry_ignores_values_that_are_no_numbers(value):
    entry = entry_of(evaluation={"ppo": {"reward": {"value": value}}, "win_rate": value}, reward=value, step=value)
    assert entry.reward is None and entry.step is None
    assert entry.win_rate == (CardEstimate(7.0) if value == {"value": 7} else None)
    odd = entry_of(evaluation={"win_rate": {"value": 0.5, "ci95": [0.4, value], "n": value}})
    assert odd.win_rate == CardEstimate(0.5)


TEXT = st.text(max_size=12) | st.sampled_from(["\x1b[31m", "\u202eexe", "a|b", "<!-- /zoo -->", "x" * 500, "\n\n# H"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*CARD, "checkpoints", "chosen"], JSON)), JSON)
def test_any_card_gives_printable_listing(card, rows):
    entry = make_entry("zoo/x", COMMIT, card)
    texts = [value for value in asdict(entry).values() if isinstance(value, str)]
    assert all(text.isprintable() and len(text) <= 96 for text in texts)
    for by in (None, *SORTS):
        assert len(sort_entries([entry, entry_of()], by)) == 2
    json.dumps(asdict(entry), allow_nan=False)
    table = benchmark_table([entry, entry_of()], command="rlhf-zoo zoo", namespace="zoo")
    assert insert_table(insert_table(None, table), table) == insert_table(None, table)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and {line.count("|") for line in lines} == {lines[0].count("|")}
    listed = checkpoint_listing({"step-000004": COMMIT}, {"main": COMMIT}, {"main": {**card, "checkpoints": rows}}, {})
    json.dumps(listed, allow_nan=False)


ENTRIES = [
    Entry("z/b-ppo", COMMIT, "ppo", "b", "z/b-sft", reward=CardEstimate(1.0), kl=CardEstimate(5.0), date="2026-01-02"),
    Entry(
        "z/a-ppo",
        COMMIT,
        "ppo",
        "a",
        "y/a-sft",
        reward=CardEstimate(2.0),
        kl=CardEstimate(3.0),
        win_rate=CardEstimate(0.9),
    ),
    Entry("z/a-sft", COMMIT, "sft", "a", date="2026-01-03"),
    Entry("z/a-reward", COMMIT, "reward", "a", "y/a-sft", date="2026-01-01"),
    Entry("z/none", COMMIT, note="no card"),
]


def names_of(entries: list[Entry]) -> list[str]:
    return [entry.repo.rpartition("/")[2] for entry in entries]


@pytest.mark.parametrize(
    ("by", "names", "backwards"),
    [
        (None, "a-sft a-reward a-ppo b-ppo none", "none b-ppo a-ppo a-reward a-sft"),
        ("reward", "a-ppo b-ppo a-sft a-reward none", "b-ppo a-ppo a-sft a-reward none"),
        ("kl", "a-ppo b-ppo a-sft a-reward none", "b-ppo a-ppo a-sft a-reward none"),
        ("win_rate", "a-ppo a-sft a-reward b-ppo none", "a-ppo a-sft a-reward b-ppo none"),
        ("date", "a-sft b-ppo a-reward a-ppo none", "a-reward b-ppo a-sft a-ppo none"),
        ("stage", "a-sft a-reward a-ppo b-ppo none", "a-ppo b-ppo a-reward a-sft none"),
        ("name", "a-ppo a-reward a-sft b-ppo none", "none b-ppo a-sft a-reward a-ppo"),
    ],
)
def test_sort_entries_orders_by_key(by, names, backwards):
    assert names_of(sort_entries(ENTRIES[::-1], by)) == names.split()
    assert names_of(sort_entries(ENTRIES, by, reverse=True)) == backwards.split()


def test_filter_entries_by_stage_recipe_and_base():
    def names(**filters: str) -> list[str]:
        return names_of(filter_entries(ENTRIES, **filters))

    assert names() == ["b-ppo", "a-ppo", "a-sft", "a-reward", "none"]
    assert names(stage="ppo") == ["b-ppo", "a-ppo"] and names(recipe="a", stage="reward") == ["a-reward"]
    assert names(base="y/a-sft") == names(base="a-sft") == ["a-ppo", "a-reward"] and names(base="z/a-sft") == []


# The table in Markdown


TABLE = benchmark_table(ENTRIES, command="rlhf-zoo zoo", namespace="zoo")


def test_benchmark_table_replaces_only_itself():
    text = "# Mine\r\n\nbefore\n\n<!-- zoo -->\nold\n<!-- /zoo -->\n\nafter  \n"
    new = insert_table(text, TABLE)
    assert new.startswith("# Mine\r\n\nbefore\n\n<!-- zoo -->\nMade by") and new.endswith("<!-- /zoo -->\n\nafter  \n")
    assert "old" not in new and insert_table(new, TABLE) == new
    appended = insert_table("# Mine\n", TABLE)
    assert appended == f"# Mine\n\n{TABLE}" and insert_table(appended, TABLE) == appended
    fresh = insert_table(None, TABLE)
    assert fresh.startswith("# Recipes\n") and fresh.endswith(TABLE) and insert_table(fresh, TABLE) == fresh


@pytest.mark.parametrize("order", ["a", "z", "za", "aaz", "azz", "azaz"])
def test_write_benchmark_rejects_unpaired_markers(order, tmp_path):
    text = "\n".join({"a": "<!-- zoo -->", "z": "<!-- /zoo -->"}[letter] for letter in order)
    (tmp_path / "R.md").write_text(text)
    with pytest.raises(ZooError, match=r"R\.md: The markers .* must appear once each"):
        write_benchmark(tmp_path / "R.md", TABLE)
    assert (tmp_path / "R.md").read_text() == text


def test_write_benchmark_rejects_missing_folder_and_non_utf8(tmp_path):
    with pytest.raises(ZooError, match=r"The folder .*/none does not exist: create it"):
        write_benchmark(tmp_path / "none" / "R.md", TABLE)
    (tmp_path / "latin.md").write_bytes(b"\xff")
    with pytest.raises(ZooError, match="is not UTF-8 text"):
        write_benchmark(tmp_path / "latin.md", TABLE)
    assert (tmp_path / "latin.md").read_bytes() == b"\xff"


def test_checkpoint_rows_omit_figures_of_moved_tags():
    """A run that was restarted has other checkpoints under the same tags; an older card is still in main."""
    tags = {"step-000004": "a" * 40, "step-000010": "b" * 40}
    rows = [
        {"tag": "step-000004", "commit": "a" * 40, "reward": 1.0},
        {"tag": "step-000010", "commit": "f" * 40, "reward": 2.0},
    ]
    listing = checkpoint_listing(tags, {"main": "b" * 40}, {"main": {"step": 10, "checkpoints": rows}}, {})
    assert [(row["step"], row["metrics"], row["also"]) for row in listing["checkpoints"]] == [
        (4, {"reward": 1.0}, []), (10, {}, ["main"]),
    ]  # fmt: skip
