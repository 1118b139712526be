"""Stores access tokens as hashes, and signs links for requests that carry no token."""

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


def _hash_token(token: str) -> str:
    # Nobody can guess the 160 random bits of a token, so a plain hash is enough, without salt or stretching.
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


@dataclass(frozen=True)
class TokenRecord:
    """The record of an issued token, without the token itself.

    Args:
        sha256: Hash of the token. Its first digits are the `id`.
        role: "read" or "write".
        created: Time of creation, in ISO 8601.
        name: The token's purpose, for lists.
        expires: Time of expiry, in ISO 8601; None for a token that is valid until it is revoked.

    Raises:
        ValueError: A field is invalid, for example because it was edited by hand.
    """

    sha256: str
    role: str
    created: str
    name: str | None = None
    expires: str | None = None

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(str(self.sha256)):
            raise ValueError(f"{self.sha256!r:.80} is not a sha256")
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
        """The digits that identify the token when tokens are listed or revoked."""
        return self.sha256[:_ID_LENGTH]

    @property
    def expired(self) -> bool:
        """Whether the time of expiry has passed."""
        return self.expires is not None and datetime.fromisoformat(self.expires) <= datetime.now(UTC)


class TokenFile:
    """The file of issued tokens. It is read again after any process has added or revoked a token.

    Args:
        root: The Hub's folder.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "tokens.json"
        self._stamp: tuple[int, int] | None = None
        self._records: dict[str, TokenRecord] = {}  # by sha256

    def role(self, token: str) -> str | None:
        """Looks up the role of a token.

        Args:
            token: The token.

        Returns:
            "read" or "write"; None for a token that was never issued, was revoked or has expired.

        Raises:
            ZooError: The file is damaged.
        """
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        # The file is replaced, never edited, so the inode changes even if the clock has not advanced.
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            self._records = {record.sha256: record for record in self.read_all()}
            self._stamp = stamp
        record = self._records.get(_hash_token(token))
        return None if record is None or record.expired else record.role

    def read_all(self) -> list[TokenRecord]:
        """Returns every record, oldest first, including expired ones. Raises ZooError if the file is damaged."""
        try:
            return [TokenRecord(**entry) for entry in read_json(self._path, [])]
        except (ValueError, TypeError) as error:
            raise ZooError(
                f"{self._path} is damaged ({error}): restore it from a copy, or remove it, which revokes every "
                "token, and make others with `rlhf-zoo hub token`."
            ) from error

    def add(self, role: str, *, name: str | None = None, seconds: int | None = None) -> str:
        """Issues a token and returns it. Only the hash is stored, so the token can be shown only once.

        Args:
            role: "read" or "write".
            name: The token's purpose, for lists.
            seconds: How long the token is valid; None for no limit.
        """
        token = f"hub_{secrets.token_hex(20)}"
        now = int(time.time())
        expires = None if seconds is None else _format_date(now + seconds)
        with locked(self._path.with_name(".tokens.lock")):
            self._write([*self.read_all(), TokenRecord(_hash_token(token), role, _format_date(now), name, expires)])
        return token

    def revoke(self, id_or_token: str) -> TokenRecord | None:
        """Revokes a token.

        Args:
            id_or_token: The token's id, its sha256, or the token itself.

        Returns:
            The record of the revoked token; None if there is no such token.
        """
        with locked(self._path.with_name(".tokens.lock")):
            records = self.read_all()
            for record in records:
                if id_or_token in (record.id, record.sha256) or _hash_token(id_or_token) == record.sha256:
                    self._write([other for other in records if other is not record])
                    return record
        return None

    def _write(self, records: list[TokenRecord]) -> None:
        # Leave out expired tokens: `role` refuses them anyway.
        items = [vars(record).items() for record in records if not record.expired]
        write_json(self._path, [{key: value for key, value in fields if value is not None} for fields in items])


def _is_date(value: object) -> bool:
    """Whether a value is a time in ISO 8601 with a time zone, which a comparison with the current time needs."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _format_date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@contextmanager
def _open_token_file(root: str | os.PathLike[str], action: str) -> Iterator[tuple[Path, TokenFile]]:
    folder = Path(root).expanduser()
    try:
        yield folder, TokenFile(folder)
    except OSError as error:
        raise ZooError(f"Cannot {action} under {folder}: {error.strerror}; choose another --root.") from error


def create_token(
    root: str | os.PathLike[str], role: str, *, name: str | None = None, seconds: int | None = None
) -> str:
    """Issues a token for a Hub and returns it.

    Args:
        root: The Hub's folder, created if it does not exist.
        role: "read" or "write".
        name: The token's purpose, for lists.
        seconds: How long the token is valid; None for no limit.

    Raises:
        ZooError: The role is unknown, the folder cannot be written, or the file of tokens is damaged.
    """
    if role not in ROLES:
        raise ZooError(f"Token role '{role}' is unknown: use --role read or --role write.")
    with _open_token_file(root, "write a token") as (folder, token_file):
        make_private(folder)
        return token_file.add(role, name=name, seconds=seconds)


def list_tokens(root: str | os.PathLike[str]) -> list[TokenRecord]:
    """Lists the tokens of a Hub.

    Args:
        root: The Hub's folder.

    Returns:
        The records, oldest first; empty if there is no Hub.

    Raises:
        ZooError: The file of tokens is damaged or cannot be read.
    """
    with _open_token_file(root, "read the tokens") as (_, token_file):
        return token_file.read_all()


def revoke_tokens(root: str | os.PathLike[str], ids_or_tokens: tuple[str, ...]) -> list[TokenRecord]:
    """Revokes tokens and returns their records.

    Args:
        root: The Hub's folder.
        ids_or_tokens: The ids of the tokens, or the tokens themselves.

    Raises:
        ZooError: An argument matches no token, although tokens that the others match are revoked; or the file of tokens
            is damaged or cannot be written.
    """
    with _open_token_file(root, "revoke tokens") as (folder, token_file):
        # `revoke` needs the folder, because it locks a file there.
        record_by_key = {key: token_file.revoke(key) if folder.is_dir() else None for key in ids_or_tokens}
    # A text that is too long for an id may be a token, so show only its start.
    unknown_keys = ", ".join(
        f"'{key[:8]}…'" if len(key) > _ID_LENGTH else f"'{key}'" for key, record in record_by_key.items() if not record
    )
    if unknown_keys:
        raise ZooError(f"The Hub under {folder} has no token {unknown_keys}: `rlhf-zoo hub token list` shows the ids.")
    return [record for record in record_by_key.values() if record is not None]


class Signer:
    """Signs upload links and Xet tokens, so that an upload does not carry the user's token.

    Args:
        root: The Hub's folder. The key is in `ROOT/secret`, and all servers of that root use it.
    """

    def __init__(self, root: Path) -> None:
        path = root / "secret"
        with locked(root / ".tokens.lock"):
            # A truncated key could be guessed.
            if not path.exists() or path.stat().st_size != _KEY_BYTES:
                replace_file(path, secrets.token_bytes(_KEY_BYTES))
        self._key = path.read_bytes()

    def sign(self, *parts: str, seconds: int = _LINK_SECONDS) -> str:
        """Signs a permission.

        Args:
            parts: Texts that say what is permitted.
            seconds: How long the permission is valid.

        Returns:
            `EXPIRY.DIGEST`, with EXPIRY in seconds since the epoch.
        """
        expiry = str(int(time.time()) + seconds)
        return f"{expiry}.{self._digest(expiry, parts)}"

    def verify(self, signature: str, *parts: str) -> bool:
        """Whether `sign` made this signature for the same parts, and the signature has not expired.

        Args:
            signature: The signature that the client sent.
            parts: Texts that say what must be permitted.
        """
        expiry, _, digest = signature.partition(".")
        expected_digest = self._digest(expiry, parts)
        is_current = expiry.isascii() and expiry.isdigit() and int(expiry) >= time.time()
        return is_current and hmac.compare_digest(digest.encode(errors="replace"), expected_digest.encode())

    def _digest(self, expiry: str, parts: tuple[str, ...]) -> str:
        return hmac.new(self._key, "\n".join((expiry, *parts)).encode(), hashlib.sha256).hexdigest()
