"""Votes: what they keep, the journal and the thread that sends, and what they say of the models."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import votes as statistics
from rlhf_zoo.evaluation.stats import proportion
from rlhf_zoo.evaluation.votes import ELO_SCALE, VERDICTS, bradley_terry, elo, preference_rate, summary
from rlhf_zoo.hub import vote_box
from rlhf_zoo.hub.vote_box import VoteBox
from rlhf_zoo.hub.vote_data import HubVotes, _parquet, _rows
from rlhf_zoo.hub.votes import LONGEST_TEXT, Shown, Vote, merged

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PPO = Shown("the good camera", "ppo", "local/toy-ppo", COMMIT, "step-000040", 0.5, True)
SFT = Shown("a camera", "sft", "local/toy-sft", COMMIT[::-1], "best", -0.25, False)


def make_vote(verdict: str = "left", **fields) -> Vote:
    return Vote(**{
        "prompt": "it is", "left": PPO, "right": SFT, "verdict": verdict, "temperature": 0.7, "top_p": 0.9, "seed": 3,
        "max_new_tokens": 20, **fields,
    })  # fmt: skip


# A vote


def test_a_vote_is_a_pair_or_a_tie():
    left, right, tie = make_vote("left"), make_vote("right"), make_vote("tie")
    assert (left.chosen, left.rejected, left.configuration) == (PPO, SFT, "default")
    assert (right.chosen, right.rejected) == (SFT, PPO)
    assert (tie.chosen, tie.rejected, tie.configuration) == (None, None, "ties")
    assert make_vote("both_bad").configuration == "ties"
    row = right.to_row()
    assert [row[key] for key in ("prompt", "chosen", "rejected", "verdict")] == ["it is", SFT.completion,
                                                                                PPO.completion, "right"]  # fmt: skip
    assert (row["chosen_role"], row["chosen_reward"], row["rejected_tag"]) == ("sft", -0.25, "step-000040")
    assert tie.to_row()["left"] == PPO.completion


def test_a_vote_holds_nothing_of_who_voted():
    """The columns are these and no other: whoever adds one thinks of what it says of a person."""
    model = {"role", "repo", "commit", "tag", "reward", "ended"}
    for verdict, sides in (("left", ("chosen", "rejected")), ("tie", ("left", "right"))):
        assert set(make_vote(verdict).to_row()) == {
            "prompt", "verdict", "temperature", "top_p", "seed", "max_new_tokens", "time", "id", *sides,
            *(f"{side}_{key}" for side in sides for key in model),
        }  # fmt: skip
    one, other = make_vote(), make_vote()
    assert one.id != other.id and one.id[14] == "4", "a random uuid"
    assert len(one.time) == 25 and one.time.endswith("+00:00")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"verdict": "up"}, "verdict"),
        ({"prompt": "x" * 100_000}, "prompt of a vote has 100000 characters: votes keep texts of at most 32768"),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"prompt": None}, "prompt of a vote is None: give text"),
        ({"left": SFT}, "prefers the left one of two equal texts"),
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
    ],
)
def test_what_no_vote_can_be_is_named(fields, said):
    with pytest.raises(ZooError, match=said):
        make_vote(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"completion": "x" * (LONGEST_TEXT + 1)}, "completion of a vote has 32769 characters"),
        ({"role": "rm"}, "ppo or sft"),
        ({"repo": "/home/somebody/runs/ppo"}, "give an id on the Hub"),
        ({"repo": "runs/toy/ppo"}, "give an id on the Hub"),
        ({"commit": "abc"}, "all 40 digits"),
        ({"reward": math.inf}, "finite number"),
        ({"reward": 10**400}, "finite number"),
        ({"ended": 1}, "true, false or none"),
    ],
)
def test_what_no_side_can_be_is_named(fields, said):
    with pytest.raises(ZooError, match=said):
        dataclasses.replace(PPO, **fields)


def test_a_tie_between_equal_texts_is_a_vote():
    assert make_vote("tie", left=SFT).left == SFT


# Round trips

HOSTILE = [
    "2024-01-01", "12:00:00", "2024-01-01T00:00:00Z", "1", "null", "true", "", " ", "NaN", "[1]", '{"a": 1}', "\\ud800",
    "a\u2028b\u2029c\x85d\x0be\x0cf", "a\r\nb\nc\rd\te", "\x00", "\x1b[31m", "\x7f", "\ufeff", "\u202e", "e\u0301",
    "\U0001f600",
    '<script>alert("x")</script>', "---\nconfigs: []\n---", '"', "\\", "'", "%s", "x" * LONGEST_TEXT,
]  # fmt: skip
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(HOSTILE)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
sides = st.builds(
    Shown,
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


@settings(max_examples=150, deadline=None)
@given(some=st.lists(any_votes(), min_size=1, max_size=6))
def test_every_vote_comes_back_exactly(some, tmp_path_factory):
    """From the journal's lines and from the data set's files: what can be a vote can be sent."""
    for vote in some:
        line = vote_box._dump(vote.to_row())
        assert line.count("\n") == 1 and line.isascii()
        assert Vote.from_row(json.loads(line)) == vote
    folder = tmp_path_factory.mktemp("files")
    back = []
    for configuration in ("default", "ties"):
        content = _parquet(configuration, some)
        if content is not None:
            (folder / configuration).write_bytes(content)
            assert content == _parquet(configuration, some), "a batch that is sent again is the same file"
            back += [Vote.from_row(row) for row in _rows(folder / configuration)]
    assert merged(back) == merged(some)


def test_a_row_that_is_no_vote():
    for row in ({}, {"verdict": "left"}, {**make_vote().to_row(), "seed": None}, {**make_vote().to_row(), "chosen": 3}):
        with pytest.raises(ZooError):
            Vote.from_row(row)


# The box


class Store:
    """A Hub in memory, by the contract of VoteStore: a batch that comes again replaces itself."""

    name = "local/votes"

    def __init__(self) -> None:
        self.batches: dict[str, list[Vote]] = {}
        self.calls = 0
        self.refuse: list[BaseException] = []
        self.after: list[BaseException] = []  # raised once the batch is stored
        self.gate = threading.Event()
        self.gate.set()

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        self.calls += 1
        assert self.gate.wait(20)
        if self.refuse:
            raise self.refuse.pop(0)
        self.batches[batch] = list(votes)
        if self.after:
            raise self.after.pop(0)

    @property
    def ids(self) -> list[str]:
        return sorted(vote.id for votes in self.batches.values() for vote in votes)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vote_box, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(vote_box, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(vote_box, "LOOK_AGAIN", 0.01)


@pytest.fixture
def journal(tmp_path) -> Path:
    return tmp_path / "journal"


def ids(votes: Sequence[Vote]) -> list[str]:
    return sorted(vote.id for vote in votes)


def test_votes_are_sent_in_batches_and_kept(journal):
    store, cast = Store(), [make_vote(verdict) for verdict in VERDICTS]
    with VoteBox(store, journal, interval=0) as box:
        for vote in cast:
            box.cast(vote)
        box.drain()
        assert store.ids == ids(cast) and box.due() == []
        assert box.votes() == merged(cast) and box.failing is None
    assert not list((journal / "votes").iterdir()) and not list((journal / "batches").iterdir())


def test_what_waits_goes_in_one_commit_and_the_interval_is_kept(journal):
    store = Store()
    store.gate.clear()
    with VoteBox(store, journal, interval=30) as box:
        box.cast(make_vote())
        while not store.calls:
            time.sleep(0.01)
        for _ in range(9):
            box.cast(make_vote())
        store.gate.set()
        while len(store.batches) < 1:
            time.sleep(0.01)
        time.sleep(0.1)
        assert [len(votes) for votes in store.batches.values()] == [1] and len(box.due()) == 9
        box.drain()
        assert [len(votes) for votes in store.batches.values()] == [1, 9]


def test_a_vote_is_on_the_disk_when_cast_returns_and_no_hub_is_waited_for(journal):
    store, vote = Store(), make_vote()
    store.gate.clear()
    box = VoteBox(store, journal, interval=0, patience=0.1)
    box.cast(vote)  # the thread does not even run
    assert box.due() == [vote.id] and VoteBox(store, journal).votes() == [vote]
    with box:
        began = time.monotonic()
        box.cast(make_vote())
        assert time.monotonic() - began < 1
        with pytest.raises(ZooError, match=r"2 votes for local/votes are not on the Hub yet \(it is slow\): they are"):
            box.drain(0.1)
        store.gate.set()
        box.drain(10)
    assert len(store.ids) == 2


def test_cast_twice_counts_once(journal):
    store, vote = Store(), make_vote()
    with VoteBox(store, journal, interval=0) as box:
        box.cast(vote)
        box.cast(vote)
        box.drain()
        box.cast(vote)
        box.drain()
    with VoteBox(store, journal, interval=0) as box:
        box.cast(vote)
        box.drain()
        assert box.votes() == [vote]
    assert store.ids == [vote.id]


def test_a_hub_that_fails_is_asked_again(journal, caplog):
    store = Store()
    store.refuse = [OSError("no route"), ZooError("It holds another data set: no."), RuntimeError("a mistake of ours")]
    store.after = [OSError("the answer was lost")]
    with VoteBox(store, journal, interval=0) as box:
        box.cast(make_vote())
        box.drain(10)
        assert (store.calls, len(store.ids), box.failing) == (5, 1, None)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("Votes were not sent to local/votes (no route); they will be later.") == 1
    assert "local/votes answers again: votes are sent." in said


def test_what_is_left_is_said_and_sent_by_the_next_box(journal, caplog):
    store = Store()
    store.refuse = [OSError("no route")] * 1000
    with VoteBox(store, journal, interval=0, patience=0.2) as box:
        box.cast(make_vote())
    assert "1 vote for local/votes are not on the Hub yet (no route): they are kept in" in caplog.text
    store.refuse = []
    with VoteBox(store, journal, interval=0) as box:
        box.drain()
        assert box.due() == []
    assert len(store.ids) == 1


KILLED = ("begun", "half forgotten", "sent, not acknowledged")


@pytest.mark.parametrize("moment", KILLED)
def test_a_kill_at_any_moment(journal, moment, monkeypatch):
    """The journal as each moment leaves it; tests/contract kills real processes."""
    store, cast = Store(), [make_vote() for _ in range(4)]
    killed = VoteBox(store, journal)
    for vote in cast:
        killed.cast(vote)
    if moment == "begun":
        killed._journal._begin(cast)
    else:
        name, votes = killed._journal.next_batch()
        if moment == "half forgotten":
            killed._journal.write(cast[1])
        else:
            store.append(name, votes)
    assert killed.due() == ids(cast)
    with VoteBox(store, journal, interval=0) as box:
        box.cast(make_vote())
        box.drain()
        assert box.due() == [] and len(box.votes()) == 5
    assert len(store.ids) == len(set(store.ids)) == 5


def test_one_sends_at_a_time_and_the_other_waits_for_it(journal):
    store = Store()
    store.gate.clear()
    with VoteBox(store, journal, interval=0) as one, VoteBox(store, journal, interval=0) as other:
        one.cast(make_vote())
        while not store.calls:
            time.sleep(0.01)
        other.cast(make_vote())
        time.sleep(0.1)
        assert store.calls == 1
        store.gate.set()
        other.drain()
        assert one.due() == other.due() == [] and one.votes() == other.votes()
    assert len(store.ids) == len(set(store.ids)) == 2


def test_a_spoilt_file_does_not_stop_the_others(journal, caplog):
    store, vote = Store(), make_vote()
    box = VoteBox(store, journal, interval=0)
    box.cast(vote)
    (journal / "votes" / f"{make_vote().id}.json").write_text('{"prompt": "torn')
    with box:
        box.drain()
    assert store.ids == [vote.id] and len(list((journal / "votes").glob("*.unreadable"))) == 1
    assert "is no vote" in caplog.text


def test_a_disk_that_refuses_is_said_to_the_voter(journal):
    journal.write_text("a file, where the folder should be")
    with pytest.raises(ZooError, match=r"cannot be written|Not a directory"):
        VoteBox(Store(), journal).cast(make_vote())


@pytest.mark.parametrize("name", ["votes", "/tmp/votes", "a/b/c", ""])
def test_a_name_that_no_hub_has(name):
    with pytest.raises(ZooError, match="give NAMESPACE/NAME"):
        HubVotes(name)


# Statistics


def test_a_preference_rate_by_hand():
    """Many prompts, one vote each: the bootstrap comes to the normal interval of a binomial."""
    scores = [1.0] * 60 + [0.5] * 20 + [0.0] * 20
    found = preference_rate(scores, range(100), seed=1)
    assert (found.value, found.n, found.ties) == (0.7, 100, 0.2)
    # The variance of a score is 0.6 + 0.25·0.2 − 0.7² = 0.16, so the interval is 0.7 ± 1.96·0.04.
    assert found.ci95 == pytest.approx((0.7 - 0.0784, 0.7 + 0.0784), abs=0.008)


def test_votes_on_one_prompt_are_not_many_observations():
    scores = [1.0] * 70 + [0.0] * 30
    apart = preference_rate(scores, range(100), seed=1)
    together = preference_rate(scores, [0] * 100, seed=1)
    assert apart.value == together.value == 0.7
    assert apart.ci95[1] - apart.ci95[0] < 0.2 and together.ci95 == (0.0, 1.0), "one prompt says next to nothing"
    ten = preference_rate([1.0] * 7 + [0.0] * 3, range(10), seed=1)
    assert ten.ci95 == proportion(7, 10).ci95
    half = preference_rate([1.0, 0.5, 0.0, 1.0, 1.0], range(5), seed=1)  # 3.5 of 5
    assert half.ci95 == (proportion(3, 5).ci95[0], proportion(4, 5).ci95[1])


@pytest.mark.parametrize("prompts", [12, 40])
def test_preference_intervals_hold_what_they_promise(prompts):
    """Prompts differ in how PPO does on them, each gets three votes: at least 91% of 95% intervals hold the truth."""
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(300):
        chance = np.repeat(rng.beta(3, 2, size=prompts), 3)  # mean 0.6
        votes = (rng.random(len(chance)) < chance).astype(float)
        low, high = preference_rate(votes, np.repeat(np.arange(prompts), 3).tolist(), seed=trial, resamples=400).ci95
        inside += low <= 0.6 <= high
    assert inside / 300 > 0.91  # 0.95 less three standard errors of 300 trials, 0.013 each


def test_scores_that_are_none():
    with pytest.raises(ValueError, match="counts 1, 1/2 or 0"):
        preference_rate([0.3], ["a"], seed=1)
    with pytest.raises(ValueError):
        preference_rate([], [], seed=1)
    with pytest.raises(ValueError):
        elo([], [], [], [], seed=1)


def test_two_players_by_hand():
    """Odds of 3 to 1 are ln 3 nats, and 10 to 1 are 400 points."""
    theta = bradley_terry([[0, 30], [10, 0]])
    assert theta[0] - theta[1] == pytest.approx(math.log(3), abs=1e-9)
    theta = bradley_terry([[0, 10], [1, 0]])
    assert (theta[0] - theta[1]) * ELO_SCALE == pytest.approx(400, abs=1e-6)


def test_three_players_meet_the_likelihood_equations():
    """At the maximum each player's expected wins are its wins (Bradley & Terry 1952)."""
    wins = np.array([[0, 7, 9.5], [3, 0, 6], [2.5, 4, 0]])
    theta = bradley_terry(wins)
    chance = 1 / (1 + np.exp(theta - theta[:, None]))
    assert ((wins + wins.T) * chance).sum(1) == pytest.approx(wins.sum(1), abs=1e-8)
    assert theta.sum() == pytest.approx(0, abs=1e-12)


def test_strengths_that_were_put_in_come_out():
    rng = np.random.default_rng(3)
    truth = np.array([1.2, 0.3, -0.4, -1.1])
    first, second = (rng.integers(0, 4, size=20_000) for _ in range(2))
    chance = 1 / (1 + np.exp(truth[second] - truth[first]))
    won = rng.random(20_000) < chance
    wins = np.zeros((4, 4))
    np.add.at(wins, (np.where(won, first, second), np.where(won, second, first)), 1)
    # A player has about 7500 games with others, so the standard error is about 0.025.
    assert bradley_terry(wins) == pytest.approx(truth - truth.mean(), abs=0.08)


def test_one_who_never_lost_needs_a_prior():
    wins = [[0, 5], [0, 0]]
    with pytest.raises(ValueError, match="use a prior"):
        bradley_terry(wins)
    theta = bradley_terry(wins, prior=1.0)
    assert 0 < theta[0] < 5 and theta[0] == -theta[1]
    # By symmetry θ0 = −θ1 = t: 5·(1 − σ(2t)) + ½ − σ(t) = 0.
    t = theta[0]
    assert 5 * (1 - 1 / (1 + math.exp(-2 * t))) + 0.5 - 1 / (1 + math.exp(-t)) == pytest.approx(0, abs=1e-9)


def test_elo_does_not_hang_on_the_order_of_votes():
    rng = np.random.default_rng(1)
    votes = [(int(a), int(b), float(s), int(p)) for a, b, s, p in zip(
        rng.integers(0, 3, 200), rng.integers(3, 5, 200), rng.choice([0, 0.5, 1], 200), rng.integers(0, 30, 200),
        strict=True,
    )]  # fmt: skip
    one = elo(*zip(*votes, strict=True), seed=1, resamples=50)
    other = elo(*zip(*votes[::-1], strict=True), seed=1, resamples=50)
    assert one.keys() == other.keys() == {0, 1, 2, 3, 4}
    for player in one:
        assert one[player].value == pytest.approx(other[player].value, abs=1e-6)
    assert np.mean([rating.value for rating in one.values()]) == pytest.approx(1000, abs=1e-9)
    swapped = elo([b for _, b, _, _ in votes], [a for a, _, _, _ in votes], [1 - s for _, _, s, _ in votes],
                  [p for *_, p in votes], seed=1, resamples=50)  # fmt: skip
    assert all(swapped[player].value == pytest.approx(one[player].value, abs=1e-6) for player in one)


@pytest.mark.parametrize("prompts", [10, pytest.param(60, marks=pytest.mark.full)])
def test_elo_intervals_hold_what_they_promise(prompts):
    """The difference of two players is twice the distance of each from the mean."""
    rng = np.random.default_rng(5)
    truth = ELO_SCALE * math.log(0.6 / 0.4) / 2
    inside = 0
    for trial in range(200):
        scores = (rng.random(prompts) < 0.6).astype(float)
        found = elo(["a"] * prompts, ["b"] * prompts, scores, range(prompts), seed=trial, resamples=200, prior=0.1)
        low, high = found["a"].ci95
        inside += low <= 1000 + truth <= high
    assert inside / 200 > 0.90


def votes_between(n_ppo: int, n_sft: int, n_tie: int, n_bad: int, **models) -> list[Vote]:
    """PPO on the left and on the right by turns; every vote on a prompt of its own."""
    ppo = dataclasses.replace(PPO, **models.get("ppo", {}))
    sft = dataclasses.replace(SFT, **models.get("sft", {}))
    kinds = ["ppo"] * n_ppo + ["sft"] * n_sft + ["tie"] * n_tie + ["both_bad"] * n_bad
    found = []
    for i, kind in enumerate(kinds):
        left, right = (ppo, sft) if i % 2 else (sft, ppo)
        verdict = kind if kind in ("tie", "both_bad") else ("left" if left.role == kind else "right")
        found.append(make_vote(verdict, left=left, right=right, prompt=f"prompt {i}"))
    return found


def test_a_summary_by_hand():
    votes = votes_between(30, 10, 20, 5)
    found = summary([*votes, *votes], seed=1)  # each comes twice, as from the journal and from the Hub
    assert found["votes"] == 65 and json.dumps(found)
    assert found["counts"] == {"ppo": 30, "sft": 10, "tie": 20, "both_bad": 5}
    assert (found["win_rate"]["value"], found["win_rate"]["n"]) == (40 / 60, 60), "both bad is left out"
    assert found["win_rate"]["ties"] == pytest.approx(1 / 3)
    assert found["left"]["n"] == 40
    pair = found["pairs"][0]
    assert pair["ppo"] == {"role": "ppo", "repo": "local/toy-ppo", "commit": COMMIT, "tag": "step-000040"}
    assert pair["win_rate"] == found["win_rate"]
    best, other = found["elo"]
    assert (best["role"], other["role"], best["elo"]["n"]) == ("ppo", "sft", 60)
    # Ties are half a win each: odds of 40 to 20; the prior of one game each draws it in a little.
    assert best["elo"]["value"] - other["elo"]["value"] == pytest.approx(400 * math.log10(2), abs=3)


def test_a_summary_of_nothing_and_of_ties_only():
    empty = summary([])
    assert empty == {
        "votes": 0, "counts": {"ppo": 0, "sft": 0, "tie": 0, "both_bad": 0}, "win_rate": None, "pairs": [], "elo": [],
        "left": None,
    }  # fmt: skip
    ties = summary(votes_between(0, 0, 3, 0))
    assert ties["win_rate"]["value"] == 0.5 and ties["left"] is None
    assert summary(votes_between(0, 0, 0, 2))["win_rate"] is None


def test_revisions_are_told_apart_by_commit_and_named_by_the_newest_tag():
    early = votes_between(2, 8, 0, 0, ppo={"commit": "a" * 40, "tag": "step-000010"})
    late = votes_between(9, 1, 0, 0, ppo={"commit": "b" * 40, "tag": "step-000040"})
    moved = votes_between(3, 0, 0, 0, ppo={"commit": "b" * 40, "tag": "best"})
    found = summary([*early, *late, *moved])
    assert [(pair["ppo"]["tag"], sum(pair["counts"].values())) for pair in found["pairs"]] == [
        ("best", 13), ("step-000010", 10),
    ]  # fmt: skip
    assert [row["commit"][0] for row in found["elo"]] == ["b", COMMIT[::-1][0], "a"]
    assert {row["among"] for row in found["elo"]} == {0}


def test_models_that_no_vote_links_are_not_on_one_scale():
    one = votes_between(6, 2, 0, 0)
    other = votes_between(1, 2, 0, 0, ppo={"repo": "x/ppo"}, sft={"repo": "x/sft"})
    found = summary([*one, *other])["elo"]
    assert [row["among"] for row in found] == [0, 0, 1, 1]
    for among in (0, 1):
        assert np.mean([row["elo"]["value"] for row in found if row["among"] == among]) == pytest.approx(1000)


def test_two_checkpoints_of_ppo_count_for_elo_only():
    early = dataclasses.replace(PPO, commit="a" * 40, completion="early")
    found = summary([make_vote("left", left=PPO, right=early)])
    assert found["votes"] == 1 and found["win_rate"] is None and found["pairs"] == [] and len(found["elo"]) == 2


def test_any_object_with_these_fields_is_a_ballot():
    side = {"repo": None, "commit": None, "tag": None}
    ballots = [
        SimpleNamespace(id=str(i), prompt=str(i), verdict="left", left=SimpleNamespace(role="ppo", **side),
                        right=SimpleNamespace(role="sft", **side))
        for i in range(3)
    ]  # fmt: skip
    assert summary(ballots)["counts"]["ppo"] == 3
    assert statistics.summary is summary
