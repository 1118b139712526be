"""Matches the patterns of .gitattributes and .gitignore. For every pattern, the time is linear in the path's length.

A regular expression backtracks: for `*a*a*a*ab` it runs for minutes and blocks every other thread. Here, a pattern is
a nondeterministic automaton. An integer has a bit for each state, and each byte of the path updates all bits at once.
The syntax is git's own (`wildmatch`): `*`, `?` and `[...]` match no slash, and `**` as a complete path component
matches any number of folders.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from .faults import bad_request

#: Maximum steps of matching per request. A step matches one byte of a path against one pattern.
MAX_STEPS = 20_000_000
# git ignores longer lines of .gitattributes.
_MAX_ATTRIBUTE_LINE = 2048
_ATTRIBUTE = re.compile(rb"[-!]?[A-Za-z0-9_.][-A-Za-z0-9_.]*(?:=.*)?")
_SLASH = ord("/")
_CHARACTER_CLASSES = {
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
    """A pattern that git rejects. It matches nothing."""


class Budget:
    """The matching steps that a request may still take."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._remaining = steps

    def spend(self, steps: int) -> None:
        """Subtracts steps from the budget.

        Args:
            steps: Matching steps.

        Raises:
            Fault: 400 if there are not enough steps left.
        """
        self._remaining -= steps
        if self._remaining < 0:
            raise bad_request(
                "Matching these paths against the patterns of .gitattributes and .gitignore takes too long: "
                "send fewer files at once, or give fewer patterns."
            )


class Glob:
    """A compiled pattern.

    Args:
        pattern: The pattern as in the file, without a slash at either end.

    Raises:
        MalformedPatternError: A bracket is not closed or names an unknown class, or the pattern ends with a backslash.
    """

    def __init__(self, pattern: bytes) -> None:
        self.is_plain = not any(char in pattern for char in b"*?[\\")
        # For a single path component of plain text and `*`, such as `*.safetensors`, it is enough to find each piece.
        is_simple = not any(char in pattern for char in b"?[\\/") and (pattern == b"*" or pattern.strip(b"*") != b"")
        self._pieces = pattern.split(b"*") if is_simple else None
        # A step takes longer for a long pattern, whose integers have more bits.
        self.steps_per_byte = 1 + len(pattern) // 512
        if self._pieces is None:
            self._compile(pattern)

    @property
    def is_simple(self) -> bool:
        """Whether matching takes a single step, instead of a step for each byte."""
        return self._pieces is not None

    def matches(self, path: bytes) -> bool:
        """Whether the pattern matches a complete path.

        Args:
            path: The path; only the last part if the pattern has no slash.
        """
        if self._pieces is not None:
            return _SLASH not in path and _has_pieces_in_order(self._pieces, path)
        # Bit n is set if the bytes read so far match the first n elements of the pattern.
        states = self._epsilon_closure(1)
        for byte in path:
            states = self._epsilon_closure(((states & self._advance[byte]) << 1) | (states & self._stay[byte]))
            if not states:
                return False
        return bool(states >> self._size & 1)

    def _epsilon_closure(self, states: int) -> int:
        """Adds the states that can be reached without reading a byte."""
        # At most two such steps follow each other: one past an entry, then one past a loop.
        entries = states & self._entries
        states |= entries << 1 | entries << 3
        return states | (states & self._loops) << 1

    def _compile(self, pattern: bytes) -> None:
        """Builds the bit masks. Each state is a bit; `_advance` and `_stay` have a mask for each byte value."""
        # A loop (`*`) may keep its state or be skipped. `**/` has three states: an entry, a loop and a slash. The entry
        # leads into the loop or past the slash, so that `**/a` also matches `a`.
        self._advance, self._stay = [0] * 256, [0] * 256
        self._loops = self._entries = 0
        size = position = 0

        def add_byte_class(members: list[int]) -> None:
            nonlocal size
            for byte in members:
                self._advance[byte] |= 1 << size
            size += 1

        def add_loop(members: list[int] | range) -> None:
            nonlocal size
            for byte in members:
                self._stay[byte] |= 1 << size
            self._loops |= 1 << size
            size += 1

        while position < len(pattern):
            char = pattern[position : position + 1]
            if char == b"*":
                end = position
                while pattern[end : end + 1] == b"*":
                    end += 1
                is_component = end - position > 1 and (position == 0 or pattern[position - 1] == _SLASH)
                if is_component and pattern[end : end + 1] == b"/":
                    end += 1
                    while pattern[end : end + 3] == b"**/":  # `**/**/` matches the same paths as `**/`
                        end += 3
                    self._entries |= 1 << size
                    size += 1
                    add_loop(range(256))
                    add_byte_class([_SLASH])
                else:
                    add_loop(range(256) if is_component and pattern[end : end + 2] in (b"", b"\\/") else _NO_SLASH)
                position = end
            elif char == b"[":
                members, position = _parse_bracket(pattern, position + 1)
                add_byte_class(members)
            elif char == b"?":
                add_byte_class(_NO_SLASH)
                position += 1
            else:
                position += char == b"\\"
                if position == len(pattern):
                    raise MalformedPatternError(pattern)
                add_byte_class([pattern[position]])
                position += 1
        self._size = size


def _has_pieces_in_order(pieces: list[bytes], name: bytes) -> bool:
    """Whether a name starts with the first piece, ends with the last, and has the other pieces between, in order."""
    if len(pieces) == 1:
        return name == pieces[0]
    first_piece, *middle_pieces, last_piece = pieces
    position, end = len(first_piece), len(name) - len(last_piece)
    if not (name.startswith(first_piece) and name.endswith(last_piece)):
        return False
    for piece in middle_pieces:  # the first occurrence leaves the most room for the other pieces
        position = name.find(piece, position, end)
        if position < 0:
            return False
        position += len(piece)
    return position <= end


def _parse_bracket(pattern: bytes, position: int) -> tuple[list[int], int]:
    """Returns the bytes that `[...]` matches, and the index after `]`. `position` is the index after `[`."""
    is_negated = pattern[position : position + 1] in (b"!", b"^")
    position += is_negated
    members: set[int] = set()
    range_start: int | None = None  # the last member, with which a following "-" starts a range
    is_first = True  # a "]" in first place is an ordinary member
    while is_first or pattern[position : position + 1] != b"]":
        is_first = False
        char = pattern[position : position + 1]
        if char == b"-" and range_start is not None and pattern[position + 1 : position + 2] not in (b"]", b""):
            position += 1 + (pattern[position + 1 : position + 2] == b"\\")
            members.update(range(range_start, _byte_at(pattern, position) + 1))
            range_start = None
        elif char == b"[" and pattern[position + 1 : position + 2] == b":":
            end = pattern.find(b"]", position + 2)
            if end < 0:
                raise MalformedPatternError(pattern)
            if end == position + 2 or pattern[end - 1 : end] != b":":
                range_start = ord("[")  # not the start of a class such as [:digit:], so an ordinary member
                members.add(range_start)
            else:
                name = pattern[position + 2 : end - 1]
                if name not in _CHARACTER_CLASSES:
                    raise MalformedPatternError(pattern)
                members.update(_CHARACTER_CLASSES[name].encode())
                position, range_start = end, None
        else:
            position += char == b"\\"
            range_start = _byte_at(pattern, position)
            members.add(range_start)
        position += 1
    return [byte for byte in _NO_SLASH if (byte in members) != is_negated], position + 1


def _byte_at(pattern: bytes, position: int) -> int:
    if position >= len(pattern):
        raise MalformedPatternError(pattern)
    return pattern[position]


class _Rules:
    """Patterns in order, each of which selects or excludes the paths that it matches. The last match decides."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # Patterns without wildcards need no matching: their indices in `_selections` are looked up by path or name.
        self._selections: list[bool] = []
        self._paths: dict[bytes, int] = {}
        self._names: dict[bytes, int] = {}
        self._globs: list[tuple[int, bool, Glob]] = []

    def add(self, pattern: bytes, selects: bool) -> None:
        """Adds a pattern, which takes precedence over all earlier patterns."""
        # In git, a pattern with a slash is matched against the complete path, any other against the last part.
        is_name = b"/" not in pattern
        self._budget.spend(1 + len(pattern))
        try:
            glob = Glob(pattern.removeprefix(b"/"))
        except MalformedPatternError:  # git skips it
            return
        index = len(self._selections)
        self._selections.append(selects)
        if glob.is_plain:
            (self._names if is_name else self._paths)[pattern.removeprefix(b"/")] = index
        else:
            self._budget.spend(0 if glob.is_simple else 256)  # a mask for each byte value
            self._globs.append((index, is_name, glob))

    def decide(self, path: bytes) -> bool | None:
        """Returns whether the last pattern that matches a path selects it; None if no pattern matches."""
        name = path.rpartition(b"/")[2]
        last_index = max(self._paths.get(path, -1), self._names.get(name, -1))
        for index, is_name, glob in reversed(self._globs):
            if index < last_index:  # a plain pattern that was added later matches, so it decides
                break
            text = name if is_name else path
            self._budget.spend(1 if glob.is_simple else len(text) * glob.steps_per_byte)
            if glob.matches(text):
                last_index = index
                break
        return self._selections[last_index] if last_index >= 0 else None


class LfsPaths:
    """Decides which paths git-lfs handles.

    Args:
        content: The .gitattributes.
        budget: Limits the steps of matching.
    """

    def __init__(self, content: bytes, budget: Budget) -> None:
        self._rules = _Rules(budget)
        for line in content.split(b"\n"):
            pattern, *attributes = line.split() or [b"#"]
            # Skip blank lines, comments, macros, patterns that git refuses, and folders, to which no filter applies.
            if pattern.startswith((b"#", b"!", b"[attr]")) or pattern.endswith(b"/") or len(line) > _MAX_ATTRIBUTE_LINE:
                continue
            filters = [attribute for attribute in attributes if attribute.lstrip(b"-!").partition(b"=")[0] == b"filter"]
            if filters and all(map(_ATTRIBUTE.fullmatch, attributes)):  # git skips a line with an invalid name
                self._rules.add(pattern, filters[-1] == b"filter=lfs")

    def __call__(self, path: str) -> bool:
        return self._rules.decide(path.encode()) is True


class IgnoredPaths:
    """Decides which files a .gitignore excludes.

    Args:
        content: The .gitignore.
        budget: Limits the steps of matching.
    """

    def __init__(self, content: bytes, budget: Budget) -> None:
        # A pattern that ends with a slash matches only folders, so files and folders have separate rules.
        self._file_rules, self._folder_rules = _Rules(budget), _Rules(budget)
        self._is_excluded: dict[bytes, bool] = {b"": False}
        for pattern, selects in _ignore_patterns(content):
            self._folder_rules.add(pattern.removesuffix(b"/"), selects)
            if not pattern.endswith(b"/"):
                self._file_rules.add(pattern, selects)

    def __call__(self, path: str) -> bool:
        """Whether the file at this path is excluded."""
        # In git, no pattern can include a file again if a folder above it is excluded. So check each folder above the
        # file first, from the top, and cache the result for later files.
        name = path.encode()
        folders = [name[:index] for index, byte in enumerate(name) if byte == _SLASH]
        parent = b""
        for folder in folders:
            if folder not in self._is_excluded:
                self._is_excluded[folder] = self._is_excluded[parent] or self._folder_rules.decide(folder) is True
            parent = folder
        return self._is_excluded[parent] or self._file_rules.decide(name) is True


def _ignore_patterns(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yields (pattern, whether it excludes the paths that it matches). A pattern with "!" includes them again."""
    for raw_line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        line = raw_line.removesuffix(b"\r")
        # git drops trailing spaces, except a space that a backslash escapes.
        pattern = line.rstrip(b" ")
        backslash_count = len(pattern) - len(pattern.rstrip(b"\\"))
        if backslash_count % 2 and len(pattern) < len(line):
            pattern += b" "
        if pattern.startswith(b"#"):
            continue
        selects = not pattern.startswith(b"!")
        pattern = pattern if selects else pattern[1:]
        if pattern.strip(b"/"):
            yield pattern, selects
