"""How many votes one address may give, and what is kept of it."""

import pytest

from rlhf_zoo.evaluation.votes.limits import TooManyVotesError, VoteLimits, voter_address


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def cast(limits: VoteLimits, address: str, pair: str) -> str | None:
    """The refusal, or None for a vote that was taken."""
    try:
        limits.check(address, (pair,))
    except TooManyVotesError as error:
        return str(error)
    limits.count(address, (pair,))
    return None


def test_vote_limits_bound_votes_of_one_address():
    """60 of 60 votes in 86 seconds were taken before."""
    clock = Clock()
    limits, taken = VoteLimits(clock=clock), 0
    for number in range(60):
        clock.now = 86 * number / 60
        taken += cast(limits, "192.0.2.1", f"pair {number}") is None
    assert taken == 20  # 10 in the first minute, 10 behind it
    assert cast(limits, "192.0.2.2", "pair 1") is None, "of others nothing is lost"
    for second in range(86, 2 * 86_400, 7):
        clock.now = second
        taken += cast(limits, "192.0.2.1", f"pair {second}") is None
        assert second >= 3600 or taken <= 60
        assert second >= 86_400 or taken <= 240
    assert taken <= 500


def test_refusal_says_when_to_retry_and_bounds_votes_per_prompt():
    clock = Clock()
    limits = VoteLimits(clock=clock)
    assert [cast(limits, "a", "same") for _ in range(3)] == [None] * 3
    assert "3 votes a day on the same two models and prompt" in cast(limits, "a", "same")
    assert cast(limits, "b", "same") is None
    assert [cast(limits, "a", str(number)) for number in range(7)] == [None] * 7
    clock.now = 47.5
    assert "One address may cast 10 votes in 1 minute: try again in 13 seconds." in cast(limits, "a", "x")
    clock.now = 60.5
    assert cast(limits, "a", "x") is None
    many = VoteLimits(10**6, clock=clock)
    assert [cast(many, "a", "same") for _ in range(500)] == [None] * 500


def test_vote_limits_keep_only_keyed_hashes_of_addresses():
    known = []
    for _ in range(2):
        limits = VoteLimits()
        assert cast(limits, "192.0.2.77", "a prompt") is None
        assert "192.0.2.77" not in repr(vars(limits)) and "a prompt" not in repr(vars(limits))
        known += limits._votes
    assert len(set(known)) == 2, "under another key each time"


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("8.8.8.8", None, "8.8.8.8"),
        ("::ffff:8.8.8.8", None, "8.8.8.8"),
        ("2001:4860::8888", None, "2001:4860::/64"),
        ("2001:4860::1:2:3:4", None, "2001:4860::/64"),
        ("fe80::1%eth0", None, "fe80::/64"),
        ("10.1.2.3", "1.1.1.1, 8.8.8.8", "8.8.8.8"),
        ("10.1.2.3", "8.8.8.8, 10.0.0.9", "8.8.8.8"),
        ("10.1.2.3", "nonsense, 10.0.0.9", "10.1.2.3"),
        ("testclient", None, "testclient"),
        (None, "", ""),
    ],
)
def test_voter_address_reads_peer_and_forwarded_header(peer, forwarded, address):
    assert voter_address(peer, forwarded) == address
