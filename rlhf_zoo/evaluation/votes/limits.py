"""Limits on how many votes one address may cast, against ballot stuffing.

Addresses are not stored. Only keyed hashes are kept, in memory, under a key that is never written to a file.
"""

import hashlib
import ipaddress
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from ...errors import ZooError

#: Maximum number of votes from one address within an hour.
VOTES_PER_HOUR = 60
_DAY = 86_400.0
_MAX_VOTERS = 20_000


class TooManyVotesError(ZooError):
    """A vote is refused because its address has cast too many."""


class VoteLimits:
    """Counts votes by address. Thread-safe.

    Args:
        per_hour: Maximum votes per hour. The other limits follow: a sixth of it per minute (at least 10), four times as
            many per day, and a twentieth per day on one matchup, which is a prompt with two models (at least 3).
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, per_hour: int = VOTES_PER_HOUR, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = ((max(10, per_hour // 6), 60.0), (per_hour, 3600.0), (4 * per_hour, _DAY))
        self._per_matchup = max(3, per_hour // 20)
        self._clock = clock
        # A fresh key per process: hashes cannot be linked across restarts, nor reversed by trying all addresses.
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        # By the hash of an address, the time of each vote and the hash of its matchup.
        self._votes: OrderedDict[bytes, deque[tuple[float, bytes]]] = OrderedDict()

    def check(self, address: str, matchup: tuple[str, ...]) -> None:
        """Checks whether a vote would be accepted, without counting it.

        Args:
            address: The voter's address, from `voter_address`.
            matchup: The prompt and the two models of the vote.

        Raises:
            TooManyVotesError: The address has cast too many votes, in all or on this matchup.
        """
        now, this_matchup = self._clock(), self._digest(*matchup)
        with self._lock:
            votes = list(self._votes.get(self._digest(address), ()))
        for limit, seconds in self._limits:
            recent_times = [cast_at for cast_at, _ in votes if cast_at > now - seconds]
            if len(recent_times) >= limit:  # until the first of the last `limit` votes is old enough
                raise TooManyVotesError(
                    f"One address may cast {limit} votes in {_format_duration(seconds)}: try again in "
                    f"{_format_duration(recent_times[-limit] + seconds - now)}."
                )
        # A single voter must not decide the result of a matchup.
        matchups_today = [past_matchup for cast_at, past_matchup in votes if cast_at > now - _DAY]
        if matchups_today.count(this_matchup) >= self._per_matchup:
            raise TooManyVotesError(
                f"One address may cast {self._per_matchup} votes a day on the same two models and prompt: judge "
                "another prompt."
            )

    def count(self, address: str, matchup: tuple[str, ...]) -> None:
        """Counts a vote that was accepted.

        Args:
            address: The voter's address, from `voter_address`.
            matchup: The prompt and the two models of the vote.
        """
        voter = self._digest(address)
        with self._lock:
            # The daily limit is the largest, so no check needs more votes than that.
            daily_limit, _ = self._limits[-1]
            self._votes.setdefault(voter, deque(maxlen=daily_limit)).append((self._clock(), self._digest(*matchup)))
            self._votes.move_to_end(voter)
            # Memory stays bounded: the address whose last vote is the oldest is forgotten.
            if len(self._votes) > _MAX_VOTERS:
                self._votes.popitem(last=False)

    def _digest(self, *texts: str) -> bytes:
        return hashlib.blake2b("\0".join(texts).encode(), key=self._key, digest_size=16).digest()


def voter_address(peer: str | None, forwarded: str | None) -> str:
    """Identifies a voter as far as an address can.

    Args:
        peer: The address that the connection came from.
        forwarded: The header X-Forwarded-For if the page runs behind a proxy that sets it, as in a Space; None
            otherwise, because anybody may send such a header.

    Returns:
        The last public address in the header, else the peer's. The proxy itself saw the last address, while a sender
        can forge those before it. An IPv6 address becomes its /64 network, because a household usually has all of it.
    """
    for entry in reversed((forwarded or "").split(",")):
        if (address := _parse_address(entry.strip())) is not None and address.is_global:
            return _voter_network(address)
    address = _parse_address(peer or "")
    return _voter_network(address) if address is not None else peer or ""


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    # An IPv4 address in IPv6 notation is the same voter.
    return getattr(address, "ipv4_mapped", None) or address


def _voter_network(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)


def _format_duration(seconds: float) -> str:
    """Writes a duration in the largest unit that fits: "12 seconds", "1 minute"."""
    for size, unit in ((3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size or size == 1:
            count = max(1, -(-int(seconds * 1000) // (size * 1000)))  # rounded up, so that nobody tries too early
            return f"{count} {unit}{'s' * (count > 1)}"
    raise AssertionError(seconds)
