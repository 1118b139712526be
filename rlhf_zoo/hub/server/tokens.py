"""Access tokens, kept as hashes, and signatures for links that carry no token."""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...errors import ZooError
from ...fileio import replace_file
from .durable import locked, make_private, read_json, write_json

ROLES = ("read", "write")
_ID_LENGTH = 12
_KEY_BYTES = 32
_LINK_SECONDS = 6 * 3600
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _digest(token: str) -> str:
    # A token is 160 random bits: a plain hash cannot be searched, and needs neither salt nor stretching.
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


@dataclass(frozen=True)
class Token:
    """What is known of a token that was given out, but for the token itself: id is the start of its sha256.

    created and expires: ISO 8601; expires is None for a token that is good until it is revoked.
    """

    sha256: str
    role: str
    created: str
    name: str | None = None
    expires: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a field that somebody wrote by hand and nothing could read."""
        if not _SHA256.fullmatch(str(self.sha256)):
            raise ValueError(f"{self.sha256!r:.80} is no sha256")
        if self.role not in ROLES:
            raise ValueError(f"the token {self.id} has the role {self.role!r:.80}, not read or write")
        if not isinstance(self.name, str | None):
            raise ValueError(f"the name of the token {self.id} is {self.name!r:.80}, not text")
        for field in ("created", "expires"):
            date = getattr(self, field)
            if date is not None and not _is_date(date):
                raise ValueError(
                    f"{field} of the token {self.id} is {date!r:.80}, not a date such as 2027-01-31T00:00:00+00:00"
                )

    @property
    def id(self) -> str:
        """By which it is listed and revoked."""
        return self.sha256[:_ID_LENGTH]

    @property
    def expired(self) -> bool:
        """True once nobody is let in by it."""
        return self.expires is not None and datetime.fromisoformat(self.expires) <= datetime.now(UTC)


class TokenFile:
    """The tokens that were given out, read again whenever another process adds or revokes one."""

    def __init__(self, root: Path) -> None:
        self._path = root / "tokens.json"
        self._stamp: tuple[int, int] | None = None
        self._tokens: dict[str, Token] = {}

    def role(self, token: str) -> str | None:
        """read, write, or None for a token that this Hub never gave out, or that was revoked or has expired."""
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return None
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp != self._stamp:
            self._tokens = {token.sha256: token for token in self.all()}
            self._stamp = stamp
        found = self._tokens.get(_digest(token))
        return None if found is None or found.expired else found.role

    def all(self) -> list[Token]:
        """Every token, oldest first, also the expired ones; ZooError where the file is damaged."""
        try:
            return [Token(**entry) for entry in read_json(self._path, [])]
        except (ValueError, TypeError) as error:
            raise ZooError(
                f"{self._path} is damaged ({error}): mend it or restore it from a copy, or remove it, which ends every "
                "token, and make others with `rlhf-zoo hub token`."
            ) from error

    def add(self, role: str, *, name: str | None = None, seconds: int | None = None) -> str:
        """Make a token; only its hash is stored, so this is the one time that it is seen."""
        token = f"hub_{secrets.token_hex(20)}"
        now = int(time.time())
        expires = None if seconds is None else _date(now + seconds)
        with locked(self._path.with_name(".tokens.lock")):
            self._write([*self.all(), Token(_digest(token), role, _date(now), name, expires)])
        return token

    def revoke(self, name: str) -> Token | None:
        """Let nobody in any more by the token of that id, or by that token; None where there is none."""
        with locked(self._path.with_name(".tokens.lock")):
            tokens = self.all()
            for token in tokens:
                if name in (token.id, token.sha256) or _digest(name) == token.sha256:
                    self._write([other for other in tokens if other is not token])
                    return token
        return None

    def _write(self, tokens: list[Token]) -> None:
        """Expired ones are dropped."""
        valid = [token for token in tokens if not token.expired]
        write_json(self._path, [{key: value for key, value in vars(t).items() if value is not None} for t in valid])


def _is_date(value: object) -> bool:
    """Whether it is ISO 8601 with a time zone, so that it can be compared with the present time."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@contextmanager
def _tokens_under(root: str | os.PathLike[str], what: str) -> Iterator[tuple[Path, TokenFile]]:
    folder = Path(root).expanduser()
    try:
        yield folder, TokenFile(folder)
    except OSError as error:
        raise ZooError(f"Cannot {what} under {folder}: {error.strerror}; choose another --root.") from error


def create_token(
    root: str | os.PathLike[str], role: str, *, name: str | None = None, seconds: int | None = None
) -> str:
    """Give out a token for the Hub under `root`; ZooError where that cannot be done.

    role is read or write; name says in lists what the token is for; after `seconds` it expires.
    """
    if role not in ROLES:
        raise ZooError(f"Token role '{role}' is unknown: use --role read or --role write.")
    with _tokens_under(root, "write a token") as (folder, tokens):
        make_private(folder)
        return tokens.add(role, name=name, seconds=seconds)


def list_tokens(root: str | os.PathLike[str]) -> list[Token]:
    """The tokens of the Hub under `root`, oldest first; empty where there is no Hub."""
    with _tokens_under(root, "read the tokens") as (_, tokens):
        return tokens.all()


def revoke_tokens(root: str | os.PathLike[str], names: tuple[str, ...]) -> list[Token]:
    """Revoke tokens, each given by its id or by itself; ZooError for what names none, after the others are revoked."""
    with _tokens_under(root, "revoke tokens") as (folder, tokens):
        revoked = {name: tokens.revoke(name) if folder.is_dir() else None for name in names}
    # What was given may be a token: no more of it is shown than tells it from an id.
    missing = ", ".join(
        f"'{name[:8]}…'" if len(name) > _ID_LENGTH else f"'{name}'" for name in revoked if not revoked[name]
    )
    if missing:
        raise ZooError(f"No token {missing} of the Hub under {folder}: `rlhf-zoo hub token list` shows their ids.")
    return [token for token in revoked.values() if token is not None]


class Signer:
    """Signs upload links and Xet tokens: a file's bytes come without the user's token, so something else must prove
    consent.

    The key lies in `ROOT/secret` and is shared by every server over that root.
    """

    def __init__(self, root: Path) -> None:
        path = root / "secret"
        with locked(root / ".tokens.lock"):
            if not path.exists() or path.stat().st_size != _KEY_BYTES:  # a key cut short would be a guess away
                replace_file(path, secrets.token_bytes(_KEY_BYTES))
        self._key = path.read_bytes()

    def sign(self, *parts: str, seconds: int = _LINK_SECONDS) -> str:
        """`EXPIRY.SIGNATURE` over `parts`, good for so many seconds (six hours); EXPIRY counts from the epoch."""
        expiry = str(int(time.time()) + seconds)
        return f"{expiry}.{self._signature(expiry, parts)}"

    def verify(self, signature: str, *parts: str) -> bool:
        """True while `signature` was made by `sign` over the same parts and has not expired."""
        expiry, _, given = signature.partition(".")
        expected = self._signature(expiry, parts)
        fresh = expiry.isascii() and expiry.isdigit() and int(expiry) >= time.time()
        return fresh and hmac.compare_digest(given.encode(errors="replace"), expected.encode())

    def _signature(self, expiry: str, parts: tuple[str, ...]) -> str:
        return hmac.new(self._key, "\n".join((expiry, *parts)).encode(), hashlib.sha256).hexdigest()
