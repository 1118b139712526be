"""The tally: every vote counts at once, intervals follow, and the Hub is waited for by nobody."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import test_votes
from vote_store import Store, make_vote
from zoo_process import wait_until as until

from rlhf_zoo.app.page import vote_counts as module
from rlhf_zoo.app.page.vote_counts import Tally, VoteFigures
from rlhf_zoo.evaluation.votes.ratings import summarize_votes
from rlhf_zoo.evaluation.votes.vote import VERDICTS, Vote, merge_votes

quick, journal = test_votes.quick, test_votes.journal


def open_tally(store: Store, journal: Path, **seconds: float) -> Tally:
    return Tally(
        store,
        journal,
        **{"send_interval": 0, "read_interval": 0.02, "read_interval_after_sending": 0, "retry_delay": 0.02, **seconds},
    )


def settled(tally: Tally) -> VoteFigures:
    """The figures, once the intervals are of every vote."""
    until(lambda: tally.figures().is_exact)
    return tally.figures()


def test_vote_counts_at_once_and_intervals_follow(journal, monkeypatch):
    """While the bootstrap of the first votes runs, the next ones are counted."""
    go, asked = threading.Event(), []

    def slow(votes):
        asked.append(len(votes))
        assert go.wait(20)
        return summarize_votes(votes)

    there = [make_vote(verdict) for verdict in VERDICTS]
    with open_tally(Store(there), journal) as tally:
        until(lambda: tally.figures().is_exact and tally.figures().summary["votes"] == 4)
        before = tally.figures().summary
        monkeypatch.setattr(module, "summarize_votes", slow)
        cast = [make_vote("right", swapped=True), make_vote("right"), make_vote("tie")]
        for number, vote in enumerate(cast, start=5):
            tally.cast(vote)
            found = tally.figures()
            assert (found.is_exact, found.votes_in_intervals, found.summary["votes"]) == (False, 4, number)
        counted = summarize_votes(merge_votes(there, cast))
        for key in ("votes", "counts"):
            assert found.summary[key] == counted[key]
        assert counted["counts"] == {"ppo": 2, "sft": 2, "tie": 2, "both_bad": 1}
        assert found.summary["win_rate"] == counted["win_rate"] | {
            key: before["win_rate"][key] for key in ("ci95", "prompts")
        }
        assert found.summary["elo"] == before["elo"]
        go.set()
        assert settled(tally).summary == counted and tally.figures().votes_in_intervals == 7
    assert len(asked) <= 2 and asked[-1] == 7, "not once for every vote"


def test_counts_are_exact_in_any_order(journal):
    """Votes here, on the Hub, in both, and sent, at the same time: at the end the summary is that of all."""
    rng = random.Random(1)
    store = Store([make_vote(rng.choice(VERDICTS), swapped=rng.random() < 0.5) for _ in range(30)])
    mine = [make_vote(rng.choice(VERDICTS), swapped=rng.random() < 0.5) for _ in range(48)]
    with open_tally(store, journal) as tally:

        def visit(votes: Sequence[Vote]) -> None:
            for vote in votes:
                tally.cast(vote)
                assert tally.figures().summary["votes"] >= 1
                store.existing.append(make_vote("tie"))

        threads = [threading.Thread(target=visit, args=(mine[place::6],)) for place in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        until(lambda: tally.figures().summary["votes"] == 30 + 48 + 48)
        until(lambda: tally.figures().is_exact and not tally._box.unsent_ids())
        assert tally.figures().summary == summarize_votes(merge_votes(store.read(), mine))
    assert sorted(vote.id for votes in store.batches.values() for vote in votes) == sorted(vote.id for vote in mine)


def test_unreadable_hub_is_reported_and_retried(journal, caplog):
    store = Store([make_vote()])
    store.can_read.clear()
    with open_tally(store, journal) as tally:
        assert tally.figures().read_problem == "they are being read"
        tally.cast(make_vote())
        assert tally.figures().summary["votes"] == 1
        store.read_error = OSError("no route")
        store.can_read.set()
        until(lambda: tally.figures().read_problem == "no route")
        store.read_error = RuntimeError("a mistake of ours")
        until(lambda: tally.figures().read_problem == "a mistake of ours")
        store.read_error = None
        until(lambda: tally.figures().read_problem is None)
        assert settled(tally).summary["votes"] == 2
    assert "The votes of local/votes could not be read (no route)." in caplog.text
    assert "The votes of local/votes could not be read; trying again later." in caplog.text


def test_tally_follows_votes_added_and_removed_on_hub(journal):
    store = Store([make_vote(), make_vote()])
    with open_tally(store, journal) as tally:
        until(lambda: settled(tally).summary["votes"] == 2)
        mine = tally.cast(make_vote("tie"))
        store.existing = [make_vote("right")]
        until(lambda: settled(tally).summary == summarize_votes(merge_votes(store.existing, [mine])))


def test_vote_cast_during_a_read_is_kept(journal, monkeypatch):
    store = Store([make_vote()])
    store.can_read.clear()
    with open_tally(store, journal, read_interval=600) as tally:
        monkeypatch.setattr(tally._box, "votes", list)  # as it was before the vote
        monkeypatch.setattr(store, "append", lambda batch, votes: None)  # and the Hub's had been listed before it came
        tally.cast(make_vote("tie"))
        until(lambda: not tally._box.unsent_ids())
        store.can_read.set()
        until(lambda: tally.figures().read_problem is None)
        assert settled(tally).summary["counts"] == {"ppo": 1, "sft": 0, "tie": 1, "both_bad": 0}


def test_tally_reads_hub_after_sending_but_not_too_often(journal):
    store = Store()
    with open_tally(store, journal, read_interval=600) as tally:
        until(lambda: store.reads == 1)
        tally.cast(make_vote())
        until(lambda: store.reads == 2)
    rare = Store()
    with open_tally(rare, journal / "rare", read_interval=600, read_interval_after_sending=600) as tally:
        until(lambda: rare.reads == 1)
        for _ in range(5):
            tally.cast(make_vote())
            tally._box.drain(10)
    assert rare.reads == 1


def test_failing_summary_ends_no_thread(journal, monkeypatch, caplog):
    monkeypatch.setattr(module, "summarize_votes", lambda votes: {} if not votes else 1 / 0)
    with open_tally(Store(), journal) as tally:
        tally._summary = summarize_votes([])
        tally.cast(make_vote())
        until(lambda: "Cannot compute the win rate and ratings of 1 votes." in caplog.text)
        found = tally.figures()
        assert (found.is_exact, found.summary["votes"]) == (False, 1)
        monkeypatch.setattr(module, "summarize_votes", summarize_votes)
        assert settled(tally).summary["votes"] == 1


def test_closing_tally_drains_and_ends_threads(journal):
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("votes")]

    def serve() -> None:
        with open_tally(store, journal, send_interval=600) as tally:
            for _ in range(3):
                tally.cast(make_vote())
            raise KeyboardInterrupt

    store, before = Store(), threads()
    with pytest.raises(KeyboardInterrupt):
        serve()
    assert len(store.ids) == 3 and threads() == before
