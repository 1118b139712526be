"""Votes: what they keep, the journal and the thread that sends, and what they say of the models."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vote_store import COMMIT, PPO, SFT, Store, make_vote
from zoo_process import wait_until as until

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.votes import box as vote_box
from rlhf_zoo.evaluation.votes.box import VoteBox
from rlhf_zoo.evaluation.votes.data import HubVotes, _parquet, _read_votes
from rlhf_zoo.evaluation.votes.ratings import (
    ELO_SCALE,
    fit_bradley_terry,
    fit_elo,
    preference_rate,
    summarize_votes,
)
from rlhf_zoo.evaluation.votes.vote import MAX_TEXT, VERDICTS, ShownCompletion, Vote, merge_votes
from rlhf_zoo.hub.client import refusals

# A vote


def test_vote_becomes_preference_pair_or_tie():
    left, right, tie = (make_vote(verdict, prompt="it is") for verdict in ("left", "right", "tie"))
    assert (left.chosen, left.rejected, left.configuration) == (PPO, SFT, "default")
    assert (right.chosen, right.rejected) == (SFT, PPO)
    assert (tie.chosen, tie.rejected, tie.configuration) == (None, None, "ties")
    assert make_vote("both_bad").configuration == "ties"
    row = right.to_row()
    assert [row[key] for key in ("prompt", "chosen", "rejected", "verdict")] == ["it is", SFT.completion,
                                                                                PPO.completion, "right"]  # fmt: skip
    assert (row["chosen_role"], row["chosen_reward"], row["rejected_tag"]) == ("sft", -0.25, "step-000040")
    assert tie.to_row()["left"] == PPO.completion


def test_vote_row_holds_nothing_about_the_voter():
    """The columns are these and no other: whoever adds one thinks of what it says of a person."""
    model = {"role", "repo", "commit", "tag", "reward", "ended"}
    for vote, sides in ((make_vote(), ("chosen", "rejected")), (make_vote("tie", left=SFT), ("left", "right"))):
        assert set(vote.to_row()) == {
            "prompt", "verdict", "temperature", "top_p", "seed", "max_new_tokens", "time", "id", *sides,
            *(f"{side}_{key}" for side in sides for key in model),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"verdict": "up"}, "verdict"),
        ({"prompt": "x" * 100_000}, "prompt of a vote has 100000 characters: the limit is 32768"),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"left": SFT}, "prefers the left side of two equal texts"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "at most 63 bits"),
        ({"seed": 1.0}, "seed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"id": "1"}, "random uuid"),
        ({"time": "2026-01-01"}, "UTC, to the second"),
        ({"completion": "x" * (MAX_TEXT + 1)}, "completion of a vote has 32769 characters"),
        ({"role": "rm"}, "ppo or sft"),
        ({"repo": "/home/somebody/runs/ppo"}, "use an id on the Hub"),
        ({"commit": "abc"}, "all 40 digits"),
        ({"reward": math.inf}, "finite number"),
        ({"reward": 10**400}, "finite number"),
        ({"ended": 1}, "true, false or none"),
    ],
)
def test_vote_rejects_bad_fields(fields, said):
    whole = {key: value for key, value in fields.items() if key in {field.name for field in dataclasses.fields(Vote)}}
    with pytest.raises(ZooError, match=said):
        make_vote(**(whole or {"left": dataclasses.replace(PPO, **fields)}))


# Round trips

HOSTILE = [
    "2024-01-01", "1", "null", "", " ", "NaN", '{"a": 1}', "\\ud800", "a\u2028b\x85d\x0be", "a\r\nb\rd\te", "\x00",
    "\ufeff", '"', "\\", "'", "x" * MAX_TEXT,
]  # fmt: skip
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(HOSTILE)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
sides = st.builds(
    ShownCompletion,
    texts,
    st.sampled_from(["ppo", "sft"]),
    st.sampled_from([None, "a/b", "A.b/c_d-e"]),
    st.sampled_from([None, COMMIT]),
    st.none() | texts,
    numbers,
    st.sampled_from([None, True, False]),
)


@st.composite
def any_votes(draw) -> Vote:
    left, right, verdict = draw(sides), draw(sides), draw(st.sampled_from(VERDICTS))
    if left.completion == right.completion:
        verdict = draw(st.sampled_from(["tie", "both_bad"]))
    return Vote(
        draw(texts), left, right, verdict, draw(st.floats(0, 1e6) | st.integers(0, 9)), draw(st.floats(1e-6, 1)),
        draw(st.integers(0, 2**63 - 1)), draw(st.integers(1, 2**63 - 1)),
    )  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(some=st.lists(any_votes(), min_size=1, max_size=6))
def test_vote_round_trips_through_journal_and_parquet(some, tmp_path_factory):
    """From the journal's lines and from the data set's files: what can be a vote can be sent."""
    for vote in some:
        line = vote_box._dump_row(vote.to_row())
        assert line.count("\n") == 1 and line.isascii()
        assert Vote.from_row(json.loads(line)) == vote
    folder = tmp_path_factory.mktemp("files")
    back = []
    for configuration in ("default", "ties"):
        content = _parquet(configuration, some)
        if content is not None:
            (folder / configuration).write_bytes(content)
            assert content == _parquet(configuration, some), "a batch that is sent again is the same file"
            back += _read_votes(folder / configuration)[0]
    assert merge_votes(back) == merge_votes(some)


def test_vote_from_row_rejects_bad_rows():
    for row in ({}, {"verdict": "left"}, {**make_vote().to_row(), "seed": None}, {**make_vote().to_row(), "chosen": 3}):
        with pytest.raises(ZooError):
            Vote.from_row(row)


# The box


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("rlhf_zoo.hub.client.refusals.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("rlhf_zoo.hub.client.refusals.MAX_PAUSE", 0.05)
    monkeypatch.setattr(vote_box, "POLL_SECONDS", 0.01)


@pytest.fixture
def journal(tmp_path) -> Path:
    return tmp_path / "journal"


def ids(votes: Sequence[Vote]) -> list[str]:
    return sorted(vote.id for vote in votes)


def test_vote_box_sends_batches_and_counts_each_vote_once(journal):
    store, cast = Store(), [make_vote(verdict) for verdict in VERDICTS]
    for times in (1, 2):
        with VoteBox(store, journal, interval=0) as box:
            for vote in cast * times:
                box.cast(vote)
            box.drain()
            assert store.ids == ids(cast) and box.unsent_ids() == []
            assert box.votes() == merge_votes(cast) and box.send_problem is None
        if times == 1:
            assert not list(journal.glob("votes/*")) and not list(journal.glob("batches/*"))


def test_vote_box_sends_waiting_votes_in_one_commit_per_interval(journal):
    store = Store()
    store.can_append.clear()
    with VoteBox(store, journal, interval=30) as box:
        box.cast(make_vote())
        until(lambda: store.calls)
        for _ in range(9):
            box.cast(make_vote())
        store.can_append.set()
        until(lambda: store.batches)
        time.sleep(0.1)
        assert [len(votes) for votes in store.batches.values()] == [1] and len(box.unsent_ids()) == 9
        box.drain()
        assert [len(votes) for votes in store.batches.values()] == [1, 9]


def test_cast_writes_vote_to_disk_without_waiting_for_hub(journal, caplog):
    store, vote = Store(), make_vote()
    store.can_append.clear()
    box = VoteBox(store, journal, interval=0, patience=0.1)
    box.cast(vote)  # the thread does not even run
    assert box.unsent_ids() == [vote.id] and VoteBox(store, journal).votes() == [vote]
    with box:
        start = time.monotonic()
        box.cast(make_vote())
        assert time.monotonic() - start < 1
        with pytest.raises(ZooError, match=r"2 votes for local/votes are not on the Hub yet \(it is slow\)"):
            box.drain(0.1)
        store.append_errors = [OSError("no route")] * 1000
        store.can_append.set()
        until(lambda: box.send_problem == "no route")
    assert "2 votes for local/votes are not on the Hub yet (no route): they are kept in" in caplog.text
    store.append_errors = []
    with VoteBox(store, journal, interval=0) as box:
        box.drain(10)
    assert len(store.ids) == 2


def test_vote_box_retries_when_hub_fails(journal, caplog):
    store = Store()
    store.append_errors = [
        OSError("no route"),
        ZooError("It holds another data set: no."),
        RuntimeError("a mistake of ours"),
    ]
    store.late_errors = [OSError("the answer was lost")]
    with VoteBox(store, journal, interval=0) as box:
        box.cast(make_vote())
        box.drain(10)
    # The thread has ended, so it has also recorded its success.
    assert (store.calls, len(store.ids), box.send_problem) == (5, 1, None)
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("Votes were not sent to local/votes (no route); they will be later.") == 1
    assert "local/votes answers again: votes are sent." in messages


@pytest.mark.parametrize("moment", ["begun", "half forgotten"])
def test_vote_box_loses_no_vote_when_killed(journal, moment):
    """The journal as each moment leaves it; tests/contract kills real processes, also once a batch was sent."""
    store, cast = Store(), [make_vote() for _ in range(4)]
    killed = VoteBox(store, journal)
    for vote in cast:
        killed.cast(vote)
    if moment == "begun":
        killed._journal._create_batch(cast)
    else:
        killed._journal.next_batch()
        killed._journal.write(cast[1])
    assert killed.unsent_ids() == ids(cast)
    with VoteBox(store, journal, interval=0) as box:
        box.cast(make_vote())
        box.drain()
        assert box.unsent_ids() == [] and len(box.votes()) == 5
    assert len(store.ids) == len(set(store.ids)) == 5


def test_vote_boxes_of_one_journal_send_one_at_a_time(journal):
    store = Store()
    store.can_append.clear()
    with VoteBox(store, journal, interval=0) as one, VoteBox(store, journal, interval=0) as other:
        one.cast(make_vote())
        until(lambda: store.calls)
        other.cast(make_vote())
        time.sleep(0.1)
        assert store.calls == 1
        store.can_append.set()
        other.drain()
        assert one.unsent_ids() == other.unsent_ids() == [] and one.votes() == other.votes()
    assert len(store.ids) == len(set(store.ids)) == 2


def test_vote_box_sets_aside_unreadable_vote_file(journal, caplog):
    store, vote = Store(), make_vote()
    box = VoteBox(store, journal, interval=0)
    box.cast(vote)
    (journal / "votes" / f"{make_vote().id}.json").write_text('{"prompt": "torn')
    with box:
        box.drain()
    assert store.ids == [vote.id] and len(list((journal / "votes").glob("*.unreadable"))) == 1
    assert "is not a vote" in caplog.text


@pytest.mark.parametrize("folder", ["votes", "batches", "sent"])
def test_vote_box_sets_aside_directory_named_like_a_vote(journal, caplog, folder):
    """It is set aside, and the thread goes on; before, nothing was ever sent again."""
    store, vote = Store(), make_vote()
    box = VoteBox(store, journal, interval=0)
    box.cast(vote)
    for name in (make_vote().id, vote.id if folder != "votes" else make_vote().id):
        (journal / folder / f"{name}.json" / "inside").mkdir(parents=True)
        (journal / folder / f"{name}.unreadable").mkdir()
    assert box.unsent_ids() == [vote.id]
    with box:
        box.drain(20)
    assert (store.ids, box.unsent_ids(), box.votes()) == ([vote.id], [], [vote])
    assert len(list((journal / folder).glob("*.unreadable/inside"))) == 2
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(messages) == 2 and all("it is a folder" in line for line in messages)


@pytest.mark.parametrize("name", ["lock", "sent"])
def test_vote_box_reports_blocked_lock_and_sent_paths(journal, caplog, monkeypatch, name):
    monkeypatch.setattr(refusals, "FIRST_PAUSE", 0.05)
    store = Store()
    box = VoteBox(store, journal, interval=0)
    box.cast(make_vote())
    (journal / name).mkdir() if name == "lock" else (journal / name).write_text("")
    box._thread.start()
    until(lambda: box.send_problem is not None)
    box.close()
    assert {"lock": "Is a directory", "sent": "File exists"}[name] in box.send_problem
    assert not [record for record in caplog.records if record.exc_info]


def test_votes_reject_bad_journal_and_repository_name(journal):
    journal.write_text("a file, where the folder should be")
    with pytest.raises(ZooError, match=r"cannot be written|Not a directory"):
        VoteBox(Store(), journal).cast(make_vote())
    for name in ("votes", "/tmp/votes", "a/b/c"):
        with pytest.raises(ZooError, match="use NAMESPACE/NAME"):
            HubVotes(name)


# Statistics


def test_preference_rate_matches_hand_computation():
    """Many prompts, one vote each: the bootstrap comes to the normal interval of a binomial."""
    scores = [1.0] * 60 + [0.5] * 20 + [0.0] * 20
    result = preference_rate(scores, range(100))
    assert (result.value, result.n, result.ties) == (0.7, 100, 0.2)
    # The variance of a score is 0.6 + 0.25·0.2 − 0.7² = 0.16, so the interval is 0.7 ± 1.96·0.04.
    assert result.ci95 == pytest.approx((0.7 - 0.0784, 0.7 + 0.0784), abs=0.008)
    thrice = preference_rate(scores * 3, [*range(100)] * 3)
    assert (thrice.n, thrice.ci95) == (300, pytest.approx(result.ci95)), "prompts count, not votes"


def test_bradley_terry_of_two_players_matches_hand_computation():
    """Odds of 3 to 1 are ln 3 nats, and 10 to 1 are 400 points."""
    theta = fit_bradley_terry([[0, 30], [10, 0]], prior=0)
    assert theta[0] - theta[1] == pytest.approx(math.log(3), abs=1e-9)
    theta = fit_bradley_terry([[0, 10], [1, 0]], prior=0)
    assert (theta[0] - theta[1]) * ELO_SCALE == pytest.approx(400, abs=1e-6)


def test_bradley_terry_of_three_players_solves_likelihood_equations():
    """At the maximum each player's expected wins are its wins (Bradley & Terry 1952)."""
    wins = np.array([[0, 7, 9.5], [3, 0, 6], [2.5, 4, 0]])
    theta = fit_bradley_terry(wins, prior=0)
    chance = 1 / (1 + np.exp(theta - theta[:, None]))
    assert ((wins + wins.T) * chance).sum(1) == pytest.approx(wins.sum(1), abs=1e-8)
    assert theta.sum() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("prompts", "each", "within"), [(10, 1, 1e-3), (10, 3, 1e-3), (80, 1, 0.15)])
def test_elo_intervals_match_hand_computation(prompts, each, within):
    """6 of 10 won: the difference has the variance 1/(n·0.6·0.4), and a player is half of it from the mean."""
    scores = [1.0, 1.0, 1.0, 0.0, 0.0] * (prompts // 5) * each
    on = [*range(prompts)] * each
    result = fit_elo(["a"] * len(on), ["b"] * len(on), scores, on, seed=1, prior=1e-6, resamples=200)
    theta, error = math.log(1.5) / 2, 1 / math.sqrt(prompts * 0.24) / 2
    assert result["a"].value == pytest.approx(1000 + theta * ELO_SCALE, abs=0.01) and result["a"].n == len(on)
    for bound, sign in zip(result["a"].ci95, (-1, 1), strict=True):
        assert (bound - result["a"].value) / ELO_SCALE == pytest.approx(sign * 1.96 * error, rel=within)


def votes_between(n_ppo: int, n_sft: int, n_tie: int, n_bad: int, **models) -> list[Vote]:
    """PPO on the left and on the right by turns; every vote on a prompt of its own."""
    ppo = dataclasses.replace(PPO, **models.get("ppo", {}))
    sft = dataclasses.replace(SFT, **models.get("sft", {}))
    kinds = ["ppo"] * n_ppo + ["sft"] * n_sft + ["tie"] * n_tie + ["both_bad"] * n_bad
    results = []
    for i, kind in enumerate(kinds):
        left, right = (ppo, sft) if i % 2 else (sft, ppo)
        verdict = kind if kind in ("tie", "both_bad") else ("left" if left.role == kind else "right")
        results.append(make_vote(verdict, left=left, right=right, prompt=f"prompt {i}"))
    return results


def test_votes_on_equivalent_prompts_count_as_one_prompt():
    spellings = ("the {}'s price", "the price of my {}", "The price of the {}.")
    names = ["radio", "chair", "phone", "tent"]
    votes = [
        make_vote("left", left=PPO, right=SFT, prompt=spelling.format(name)) for name in names for spelling in spellings
    ]
    rate = summarize_votes(votes)["win_rate"]
    assert (rate["n"], rate["prompts"]) == (12, 4)
    assert rate["ci95"] == summarize_votes([votes[0], votes[3], votes[6], votes[9]])["win_rate"]["ci95"]


def test_summary_matches_hand_computation():
    votes = votes_between(30, 10, 20, 5)
    result = summarize_votes([*votes, *votes], seed=1)  # each comes twice, as from the journal and from the Hub
    assert result["votes"] == 65 and json.dumps(result)
    assert result["counts"] == {"ppo": 30, "sft": 10, "tie": 20, "both_bad": 5}
    assert (result["win_rate"]["value"], result["win_rate"]["n"]) == (40 / 60, 60), "both bad is left out"
    assert result["win_rate"]["ties"] == pytest.approx(1 / 3)
    assert result["left"]["n"] == 40
    pair = result["pairs"][0]
    assert pair["ppo"] == {"role": "ppo", "repo": "local/toy-ppo", "commit": COMMIT, "tag": "step-000040"}
    assert pair["win_rate"] == result["win_rate"]
    best, other = result["elo"]
    assert (best["role"], other["role"], best["elo"]["n"]) == ("ppo", "sft", 60)
    # Ties are half a win each: odds of 40 to 20; the prior of one game each draws it in a little.
    assert best["elo"]["value"] - other["elo"]["value"] == pytest.approx(400 * math.log10(2), abs=3)


def test_summary_handles_no_votes_and_only_ties():
    assert summarize_votes([]) == {
        "votes": 0, "counts": {"ppo": 0, "sft": 0, "tie": 0, "both_bad": 0}, "win_rate": None, "pairs": [], "elo": [],
        "left": None,
    }  # fmt: skip
    ties = summarize_votes(votes_between(0, 0, 3, 0))
    assert ties["win_rate"]["value"] == 0.5 and ties["left"] is None
    assert summarize_votes(votes_between(0, 0, 0, 2))["win_rate"] is None


def test_summary_groups_revisions_by_commit_and_names_newest_tag():
    early = votes_between(2, 8, 0, 0, ppo={"commit": "a" * 40, "tag": "step-000010"})
    late = votes_between(9, 1, 0, 0, ppo={"commit": "b" * 40, "tag": "step-000040"})
    moved = votes_between(3, 0, 0, 0, ppo={"commit": "b" * 40, "tag": "best"})
    result = summarize_votes([*early, *late, *moved])
    assert [(pair["ppo"]["tag"], sum(pair["counts"].values())) for pair in result["pairs"]] == [
        ("best", 13), ("step-000010", 10),
    ]  # fmt: skip
    assert [row["commit"][0] for row in result["elo"]] == ["b", COMMIT[::-1][0], "a"]
    assert {row["among"] for row in result["elo"]} == {0}


def test_elo_scales_are_separate_for_unlinked_models():
    one = votes_between(6, 2, 0, 0)
    other = votes_between(1, 2, 0, 0, ppo={"repo": "x/ppo"}, sft={"repo": "x/sft"})
    result = summarize_votes([*one, *other])["elo"]
    assert [row["among"] for row in result] == [0, 0, 1, 1]
    for among in (0, 1):
        assert np.mean([row["elo"]["value"] for row in result if row["among"] == among]) == pytest.approx(1000)


def test_votes_between_two_ppo_checkpoints_count_for_elo_only():
    early = dataclasses.replace(PPO, commit="a" * 40, completion="early")
    result = summarize_votes([make_vote("left", left=PPO, right=early)])
    assert result["votes"] == 1 and result["win_rate"] is None and result["pairs"] == [] and len(result["elo"]) == 2
