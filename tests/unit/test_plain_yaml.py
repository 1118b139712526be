"""YAML of strangers is bounded before it is composed, and every mistake in it is one exception."""

import subprocess
import sys

import pytest

from rlhf_zoo.fileio import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, BadYAML, load_yaml
from rlhf_zoo.runs.data.sources import parse_benchmark

pytestmark = pytest.mark.attack

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1\nb: [x, {c: 2.5}]", {"a": 1, "b": ["x", {"c": 2.5}]}),
        ("base: &b {x: 1}\nmore: {<<: *b, y: 2}", {"base": {"x": 1}, "more": {"x": 1, "y": 2}}),
        ("- &a 1\n- *a", [1, 1]),
        ("- 12:30:45\n- 123456789012345678901234567890", [45045, 123456789012345678901234567890]),
        (f"- '{'1' * 500}'\n- {'1:x' * 500}\n- {'a' * 5000}", ["1" * 500, "1:x" * 500, "a" * 5000]),
        ("- 0.30000000000000004\n" * 2000, [0.30000000000000004] * 2000),
        ("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), None),
    ],
)
def test_load_yaml_reads_plain_documents(text, value):
    read = load_yaml(text)
    assert read == value or value is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 40_000, "nested"),
        ("- " * 40_000, "nested"),
        (BOMB, "values once its aliases are expanded"),
        (f"a: &a '{'x' * 10_000}'\nb: [{'*a, ' * 200}]", "characters once its aliases are expanded"),
        (f"a: &a '{'x' * 10_000}'\nb: &b [{'*a, ' * 50}]\nc: [*b, *b, *b]", "characters once its aliases"),
        ("&a [*a]", "contains itself"),
        ("a: &a {b: {c: *a}}", "contains itself"),
        ("- &a 1\n- &a 2", "duplicate anchor"),
        ("*nobody", "undefined alias"),
        ("x" * (MAX_CHARACTERS + 1), "characters"),
        ("- x\n" * (MAX_NODES + 1), "values"),
        ("!!timestamp foo", "tag"),
        ("!!bool foo", "tag"),
        ('!!int ""', "tag"),
        ("2001-99-99", "tag"),
        ("a: " + "1" * 5000, "line 1: a number has more"),
        ("- 1" + ":1" * 200_000, "a number has more"),
        ("- -1" + ":1" * 200_000 + ".5", "a number has more"),
        ("- !!int '1" + ":1" * 200_000 + "'", "a number has more"),
        ("- !<tag:yaml.org,2002:float> '1" + ":1" * 200_000 + "'", "a number has more"),
        ("%TAG !y! tag:yaml.org,2002:\n---\n- ! 1_1" + ":1" * 200_000, "a number has more"),
        ("? 0b" + "_1" * 1000, "a number has more"),
        # Equal modulo 2**61 - 1: a dictionary looks at each before it finds a place for the next.
        ("\n".join(f"0x{number * (2**61 - 1):x}: 1" for number in range(1, 40_000)), "integers have more"),
        ("\n".join(f"%TAG !{number}! x" for number in range(60_000)) + "\n--- x", "begin with %"),
        ("? [a]\n: b", "unhashable"),
        ("!!python/object:os.system x", "could not determine a constructor"),
        ("a: 1\n--- \nb: 2", "expected a single document"),
        ("a: [1, 2", "did not find"),
        ("\x00", "not allowed"),
        ("a: \ud800", "surrogate"),
    ],
)
def test_load_yaml_rejects_everything_else_with_bad_yaml(text, reason):
    with pytest.raises(BadYAML, match=reason):
        load_yaml(text)


def test_yaml_bombs_are_rejected_in_bounded_time_and_memory():
    script = (
        "import resource, sys, time; from rlhf_zoo.fileio import load_yaml, BadYAML\n"
        "import yaml; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; began = time.process_time()\n"
        "for text in ('[' * 2**20, sys.stdin.read(), '&a ' * 2**18, '{' * 2**19 + ': ' * 2**18):\n"
        "    try: load_yaml(text)\n"
        "    except BadYAML: pass\n"
        "    else: sys.exit('read')\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert after - before < 100 * 1024, after - before\n"
        "assert time.process_time() - began < 5, time.process_time() - began\n"
    )
    subprocess.run([sys.executable, "-c", script], input=BOMB, text=True, check=True, timeout=60)


# What a client reads of YAML that others commit beside data


def test_benchmark_reads_eval_yaml_and_ignores_malformed_ones() -> None:
    read = parse_benchmark("name: x\ntasks: [{id: 1, split: test}, {}]")
    assert read == {"name": "x", "tasks": [{"id": "1", "split": "test"}]}
    for text in ("a: " + "[" * 20_000, "tasks: !!timestamp foo", "- x", "\ud800"):
        assert parse_benchmark(text) is None, text[:20]
