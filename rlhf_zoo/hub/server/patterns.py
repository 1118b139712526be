"""The patterns of .gitattributes and .gitignore, matched in time that is linear in the path, whatever the pattern is.

A regular expression backtracks: over `*a*a*a*ab` it runs for minutes and holds every thread meanwhile. Here the places
of the pattern that a match may have reached are the bits of one number, and each byte of the path moves all of them.
The language is git's own (`wildmatch`): `*`, `?` and `[...]` match no slash, `**` as a whole part matches any folders.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from .faults import bad_request

#: Steps of matching that one request may take; a step is a byte of a path that moves through a pattern.
MAX_STEPS = 20_000_000
# git reads no longer line of .gitattributes.
_MAX_ATTRIBUTE_LINE = 2048
_ATTRIBUTE = re.compile(rb"[-!]?[A-Za-z0-9_.][-A-Za-z0-9_.]*(?:=.*)?")
_SLASH = ord("/")
_CLASSES = {
    b"alnum": string.ascii_letters + string.digits,
    b"alpha": string.ascii_letters,
    b"blank": " \t",
    b"cntrl": "".join(map(chr, [*range(32), 127])),
    b"digit": string.digits,
    b"graph": "".join(map(chr, range(33, 127))),
    b"lower": string.ascii_lowercase,
    b"print": "".join(map(chr, range(32, 127))),
    b"punct": string.punctuation,
    b"space": " \t\n\r",
    b"upper": string.ascii_uppercase,
    b"xdigit": string.hexdigits,
}
_NO_SLASH = [byte for byte in range(256) if byte != _SLASH]


class MalformedPatternError(ValueError):
    """A pattern that git gives up on: it matches nothing at all."""


class Budget:
    """The steps of matching that one request may still take."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Count some steps (Fault 400 where there are no more)."""
        self._left -= steps
        if self._left < 0:
            raise bad_request(
                "Matching these paths against the patterns of .gitattributes and .gitignore takes too long: "
                "send fewer files at once, or give fewer patterns."
            )


class Glob:
    """One pattern, without the slash at its start or end, compiled.

    Args:
        pattern: The pattern as it stands in the file.

    Raises:
        MalformedPatternError: Where a bracket stays open or names an unknown class, or a backslash ends the pattern.
    """

    def __init__(self, pattern: bytes) -> None:
        self.is_plain = not any(char in pattern for char in b"*?[\\")
        # `*` between plain text inside one part of a path: no automaton is needed, the pieces come one after the other.
        is_one_part = not any(char in pattern for char in b"?[\\/") and (pattern == b"*" or pattern.strip(b"*") != b"")
        self._pieces = pattern.split(b"*") if is_one_part else None
        self.steps_per_byte = 1 + len(pattern) // 512
        if self._pieces is None:
            self._compile(pattern)

    @property
    def is_simple(self) -> bool:
        """True where matching takes one step, not one for each byte."""
        return self._pieces is not None

    def matches(self, path: bytes) -> bool:
        """True where the whole path matches. Of a pattern without a slash, give the last part of the path."""
        if self._pieces is not None:
            return _SLASH not in path and _in_order(self._pieces, path)
        states = self._closed(1)
        for byte in path:
            states = self._closed(((states & self._advance[byte]) << 1) | (states & self._stay[byte]))
            if not states:
                return False
        return bool(states >> self._size & 1)

    def _closed(self, states: int) -> int:
        """With the places that can be reached without a byte of the path. No such steps follow on more than two."""
        entries = states & self._entries
        states |= entries << 1 | entries << 3
        return states | (states & self._loops) << 1

    def _compile(self, pattern: bytes) -> None:
        """Number the places as they come. A loop may stay; `**/` is an entry, a loop and a slash, or none of them."""
        self._advance, self._stay = [0] * 256, [0] * 256
        self._loops = self._entries = 0
        size = at = 0

        def one_of(members: list[int]) -> None:
            nonlocal size
            for byte in members:
                self._advance[byte] |= 1 << size
            size += 1

        def loop(members: list[int] | range) -> None:
            nonlocal size
            for byte in members:
                self._stay[byte] |= 1 << size
            self._loops |= 1 << size
            size += 1

        while at < len(pattern):
            char = pattern[at : at + 1]
            if char == b"*":
                end = at
                while pattern[end : end + 1] == b"*":
                    end += 1
                is_part = end - at > 1 and (at == 0 or pattern[at - 1] == _SLASH)
                if is_part and pattern[end : end + 1] == b"/":
                    end += 1
                    while pattern[end : end + 3] == b"**/":  # the same once more
                        end += 3
                    self._entries |= 1 << size
                    size += 1
                    loop(range(256))
                    one_of([_SLASH])
                else:
                    loop(range(256) if is_part and pattern[end : end + 2] in (b"", b"\\/") else _NO_SLASH)
                at = end
            elif char == b"[":
                members, at = _bracket(pattern, at + 1)
                one_of(members)
            elif char == b"?":
                one_of(_NO_SLASH)
                at += 1
            else:
                at += char == b"\\"
                if at == len(pattern):
                    raise MalformedPatternError(pattern)
                one_of([pattern[at]])
                at += 1
        self._size = size


def _in_order(pieces: list[bytes], name: bytes) -> bool:
    """True where the name begins with the first piece and ends with the last, with the others between, in order."""
    if len(pieces) == 1:
        return name == pieces[0]
    first, *middle, last = pieces
    at, end = len(first), len(name) - len(last)
    if not (name.startswith(first) and name.endswith(last)):
        return False
    for piece in middle:
        at = name.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return at <= end


def _bracket(pattern: bytes, at: int) -> tuple[list[int], int]:
    """The bytes that `[...]` matches, and the place behind it; `at` is the place behind its `[`."""
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    members: set[int] = set()
    before: int | None = None  # what may begin a range
    first = True
    while first or pattern[at : at + 1] != b"]":
        first = False
        char = pattern[at : at + 1]
        if char == b"-" and before is not None and pattern[at + 1 : at + 2] not in (b"]", b""):
            at += 1 + (pattern[at + 1 : at + 2] == b"\\")
            members.update(range(before, _byte(pattern, at) + 1))
            before = None
        elif char == b"[" and pattern[at + 1 : at + 2] == b":":
            end = pattern.find(b"]", at + 2)
            if end < 0:
                raise MalformedPatternError(pattern)
            if end == at + 2 or pattern[end - 1 : end] != b":":
                before = ord("[")  # no class, and so an ordinary member
                members.add(before)
            else:
                name = pattern[at + 2 : end - 1]
                if name not in _CLASSES:
                    raise MalformedPatternError(pattern)
                members.update(_CLASSES[name].encode())
                at, before = end, None
        else:
            at += char == b"\\"
            before = _byte(pattern, at)
            members.add(before)
        at += 1
    return [byte for byte in _NO_SLASH if (byte in members) != negated], at + 1


def _byte(pattern: bytes, at: int) -> int:
    if at >= len(pattern):
        raise MalformedPatternError(pattern)
    return pattern[at]


class _Rules:
    """Patterns in their order, each with what it says of a path: the last one that matches decides."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._said: list[bool] = []
        self._paths: dict[bytes, int] = {}
        self._names: dict[bytes, int] = {}
        self._globs: list[tuple[int, bool, Glob]] = []

    def add(self, pattern: bytes, says: bool) -> None:
        """A pattern with a slash in it is for whole paths, another one for the last part of a path."""
        is_name = b"/" not in pattern
        self._budget.spend(1 + len(pattern))
        try:
            glob = Glob(pattern.removeprefix(b"/"))
        except MalformedPatternError:  # git skips it
            return
        place = len(self._said)
        self._said.append(says)
        if glob.is_plain:
            (self._names if is_name else self._paths)[pattern.removeprefix(b"/")] = place
        else:
            self._budget.spend(0 if glob.is_simple else 256)
            self._globs.append((place, is_name, glob))

    def last(self, path: bytes) -> bool | None:
        """What the last pattern that matches says; None where none does."""
        name = path.rpartition(b"/")[2]
        best = max(self._paths.get(path, -1), self._names.get(name, -1))
        for place, is_name, glob in reversed(self._globs):
            if place < best:
                break
            text = name if is_name else path
            self._budget.spend(1 if glob.is_simple else len(text) * glob.steps_per_byte)
            if glob.matches(text):
                best = place
                break
        return self._said[best] if best >= 0 else None


class LfsPaths:
    """Tells which paths a .gitattributes hands to git-lfs."""

    def __init__(self, content: bytes, budget: Budget) -> None:
        self._rules = _Rules(budget)
        for line in content.split(b"\n"):
            pattern, *attributes = line.split() or [b"#"]
            # Comments, macros, and what git refuses or has for folders, which have no content.
            if pattern.startswith((b"#", b"!", b"[attr]")) or pattern.endswith(b"/") or len(line) > _MAX_ATTRIBUTE_LINE:
                continue
            said = [each for each in attributes if each.lstrip(b"-!").partition(b"=")[0] == b"filter"]
            if said and all(map(_ATTRIBUTE.fullmatch, attributes)):  # git reads no line with another name in it
                self._rules.add(pattern, said[-1] == b"filter=lfs")

    def __call__(self, path: str) -> bool:
        return self._rules.last(path.encode()) is True


class IgnoredPaths:
    """Tells which files a .gitignore leaves out."""

    def __init__(self, content: bytes, budget: Budget) -> None:
        self._files, self._all = _Rules(budget), _Rules(budget)
        self._folders: dict[bytes, bool] = {b"": False}
        for pattern, says in _ignore_lines(content):
            self._all.add(pattern.removesuffix(b"/"), says)
            if not pattern.endswith(b"/"):
                self._files.add(pattern, says)

    def __call__(self, path: str) -> bool:
        """A file below a folder that is left out cannot be taken in again."""
        name = path.encode()
        folders = [name[:place] for place, byte in enumerate(name) if byte == _SLASH]
        known = b""
        for folder in folders:
            if folder not in self._folders:
                self._folders[folder] = self._folders[known] or self._all.last(folder) is True
            known = folder
        return self._folders[known] or self._files.last(name) is True


def _ignore_lines(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Each pattern, and False where it takes in again what others leave out."""
    for raw in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        line = raw.removesuffix(b"\r")
        pattern = line.rstrip(b" ")
        escapes = len(pattern) - len(pattern.rstrip(b"\\"))
        if escapes % 2 and len(pattern) < len(line):
            pattern += b" "
        if pattern.startswith(b"#"):
            continue
        says = not pattern.startswith(b"!")
        pattern = pattern if says else pattern[1:]
        if pattern.strip(b"/"):
            yield pattern, says
