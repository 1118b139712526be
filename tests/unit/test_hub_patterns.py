"""Patterns of .gitattributes and .gitignore: agreement with git and fnmatch, and worst-case time."""

import re
import subprocess
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.hub.server.faults import Fault
from rlhf_zoo.hub.server.patterns import Budget, Glob, IgnoredPaths, LfsPaths, MalformedPatternError

TOKENS = st.sampled_from(["a", "b", "aa", "*", "?", "[ab]", "[!a]", "[a-b]", "-"])
NAMES = st.text("abc-", max_size=8)


@given(st.lists(TOKENS, max_size=8).map("".join), NAMES)
@settings(max_examples=500, deadline=None)
def test_glob_matches_like_fnmatch(pattern: str, name: str) -> None:
    assert Glob(pattern.encode()).matches(name.encode()) == fnmatchcase(name, pattern)


LINES = [
    b"*.bin", b"/a*", b"a/*", b"a/**", b"**/b", b"a/**/b", b"**/**/c", b"*a*b", b"a?c", b"[a-c]b", b"[!a]", b"[^a]",
    b"[[:alpha:]]c", b"[a", b"[[:no:]]", b"[]]", b"[z-a]", b"\\a", b"a\\", b"a**b", b"a/b", b"c", b"a*/b*/c", b"***/c",
    b"a/***/c",
]  # fmt: skip
PATHS = ["a", "b", "c", "a/b", "a/c", "b/a", "a/b/c", "a/a/b/c", "ab/bc/c", "x.bin", "a/x.bin", "aab", "abc", "ac/b"]


def test_lfs_and_ignore_patterns_match_git(tmp_path: Path) -> None:
    """One pattern at a time, then all together with negations: every answer equals git's."""

    def git(*arguments: str, text: str) -> str:
        done = subprocess.run(["git", "-C", str(tmp_path), *arguments], input=text, capture_output=True, text=True)
        return done.stdout

    git("init", "-q", text="")
    stdin = "\0".join(PATHS) + "\0"
    several = [b"*.bin", b"!a/x.bin", b"a/", b"!a/b", b"b*", b"!b", b"# c", b"\\!c", b"c \\ ", b" "]
    for lines in (*([line] for line in LINES), LINES, several, [b"c", b"!c"], [b"!c", b"c/", b"a\r"]):
        attributes = [line + (b" -filter" if line.startswith(b"[") else b" text filter=lfs") for line in lines]
        (tmp_path / ".gitattributes").write_bytes(b"\n".join(attributes))
        fields = git("check-attr", "-z", "--stdin", "filter", text=stdin).split("\0")
        large = LfsPaths(b"\n".join(attributes), Budget())
        assert {path: large(path) for path in PATHS} == dict(
            zip(fields[::3], [x == "lfs" for x in fields[2::3]], strict=False)
        ), lines
        (tmp_path / ".gitattributes").unlink()
        (tmp_path / ".gitignore").write_bytes(b"\n".join(lines))
        left_out = set(git("check-ignore", "-z", "--no-index", "--stdin", text=stdin).split("\0")) - {""}
        ignored = IgnoredPaths(b"\n".join(lines), Budget())
        assert {path for path in PATHS if ignored(path)} == left_out, lines
        (tmp_path / ".gitignore").unlink()


@pytest.mark.parametrize(
    "pattern",
    [
        b"*a*a*a*ab",
        b"*a" * 8 + b"*b",
        b"?*a" * 600,
        b"**/*a" * 400 + b"/b",
        b"[" + b"[:x" * 600 + b"]b",
        b"[ab]*" * 400 + b"c",
    ],
)
def test_worst_case_patterns_match_quickly(pattern: bytes) -> None:
    """A regular expression of the first takes minutes over such a path."""
    began = time.process_time()
    for path in (b"a" * 1024, b"a/" * 511 + b"a"):
        assert not Glob(pattern).matches(path)
    assert time.process_time() - began < 1


def test_pattern_budget_bounds_steps_per_request() -> None:
    budget = Budget(steps=10_000)
    large = LfsPaths(b"?*x*\n/a/*b?\n".replace(b"\n", b" filter=lfs\n"), budget)
    with pytest.raises(Fault, match="takes too long") as caught:
        any(large("a" * 100) for _ in range(1000))
    assert caught.value.status == 400
    with pytest.raises(Fault):
        IgnoredPaths(b"?\n" * 10_000, Budget(steps=10_000))


def test_glob_rejects_malformed_patterns() -> None:
    for pattern in (b"[", b"[a", b"[[:no:]]", b"a\\", b"[a-\\"):
        with pytest.raises(MalformedPatternError, match=re.escape(str(pattern)[2:3])):
            Glob(pattern)
