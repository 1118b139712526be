"""Names that recipes write become objects, or one sentence that says what to write instead."""

import importlib
import json
import sys

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.plugins import CORPORA, JUDGES, PREFERENCES, RECIPES, REWARDS, load_object, registered_names

GROUP = "rlhf_zoo.test_objects"


def install(folder, name, entries):
    """An installed distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    importlib.invalidate_caches()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`toy_plugin`, which registers two entry points."""
    (tmp_path / "toy_plugin.py").write_text(
        "def length(prompts, completions):\n    return [len(c) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "toy_plugin", "length = toy_plugin:length\ngone = toy_plugin:absent")


def test_load_object_imports_module_and_attribute():
    assert load_object("json:dumps", group=GROUP) is json.dumps
    assert load_object("json.decoder:JSONDecoder.decode", group=GROUP) is json.JSONDecoder.decode


def test_entry_point_groups_have_documented_names():
    groups = {CORPORA, JUDGES, PREFERENCES, RECIPES, REWARDS}
    assert groups == {f"rlhf_zoo.{word}" for word in ("corpora", "judges", "preferences", "recipes", "rewards")}


def test_load_object_finds_entry_points(package):
    assert registered_names(GROUP) == ["gone", "length"]
    assert load_object("length", group=GROUP)(["a"], ["four"]) == [4]
    assert load_object("length(prompts=['a'], completions=['four'])", group=GROUP) == [4]
    with pytest.raises(ZooError, match=r"did you mean 'length'\?"):
        load_object("lenght", group=GROUP)
    with pytest.raises(ZooError, match="no 'absent' in the module 'toy_plugin'"):
        load_object("gone", group=GROUP)


def test_load_object_imports_from_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # restores sys.path afterwards
    monkeypatch.chdir(tmp_path)
    assert load_object("my_rewards_here:ONE", group=GROUP) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jsom:dumps", "no module 'jsom'.*did you mean 'json'"),
        ("json.decodr:x", "no module 'json.decodr'.*did you mean 'json.decoder'"),
        ("json:dump5", r"no 'dump5' in the module 'json', did you mean 'dumps?'"),
        ("json:zzzzzz", "no 'zzzzzz' in the module 'json': json has "),
        ("json:", "names no attribute"),
        (":dumps", "does not name a module"),
        ("nothing_registered", ": write module:attribute"),
    ],
)
def test_load_object_rejects_bad_names_in_one_sentence(name, message):
    with pytest.raises(ZooError, match=message) as caught:
        load_object(name, group=GROUP)
    assert "\n" not in str(caught.value)


def test_plugin_with_missing_dependency_names_it(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZooError, match="'needs_more:x' needs the module 'no_such_dependency'"):
        load_object("needs_more:x", group=GROUP)


# Settings in parentheses


@pytest.fixture
def makers(tmp_path, monkeypatch):
    """A module with a factory, a dataclass and an object of it."""
    (tmp_path / "toy_makers.py").write_text(
        "from dataclasses import dataclass\n"
        "def at_most(limit, *, unit='words'):\n"
        "    if limit < 1:\n"
        "        raise ValueError('limit must be positive')\n"
        "    return (limit, unit)\n"
        "def anything(**settings):\n    return settings\n"
        "def broken():\n    return 1 / 0\n"
        "@dataclass(frozen=True)\n"
        "class Length:\n    target: int = 3\n    unit: str = 'tokens'\n"
        "length = Length(unit='words')\n"
        "NUMBER = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "toy_makers:"
    sys.modules.pop("toy_makers", None)


def test_settings_construct_an_object(makers):
    assert load_object(f"{makers}at_most(limit=3)", group=GROUP) == (3, "words")
    assert load_object(f"{makers}at_most( limit = 3, unit='tokens (all)' )", group=GROUP) == (3, "tokens (all)")
    made = load_object(f"{makers}Length(target=-5)", group=GROUP)
    assert (made.target, made.unit) == (-5, "tokens")
    assert load_object(f"{makers}anything()", group=GROUP) == {}
    literals = r"""anything(a=None, b=True, c=[1, 2.5], d={'x': ("y",)}, e=r"\d+:'", f='a' "b")"""
    assert load_object(makers + literals, group=GROUP) == {
        "a": None, "b": True, "c": [1, 2.5], "d": {"x": ("y",)}, "e": r"\d+:'", "f": "ab",
    }  # fmt: skip


def test_settings_of_dataclass_instance_give_a_copy(makers):
    made = load_object(f"{makers}length(target=9)", group=GROUP)
    assert (made.target, made.unit) == (9, "words")
    kept = load_object(f"{makers}length", group=GROUP)
    assert kept.target == 3 and kept == load_object(f"{makers}length()", group=GROUP)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("at_most(limit=3", "is not a name with settings: write NAME"),
        ("at_most(3)", "is not a name with settings"),
        ("at_most(*[3])", "is not a name with settings"),
        ("at_most(**{'limit': 3})", "is not a name with settings"),
        ("at_most(limit=3)(unit=1)", "is not a name with settings"),
        ("at_most(limit=1) + at_most(limit=2)", "is not a name with settings"),
        ("at_most(limit=words)", "limit in .* is not a literal: write a number, a quoted string"),
        ("at_most(limit=print('run'))", "limit in .* is not a literal"),
        ("at_most(limit=2 ** 9)", "limit in .* is not a literal"),
        ("at_most(limit=" + "(" * 500 + "1" + ")" * 500 + ")", "is not a name with settings"),
        ("at_most(limit='\0')", "is not a name with settings"),
        ("at_most(limit=1, limit=2)", "sets limit twice"),
        ("at_most(limit=1, unitt='words')", "no setting 'unitt' for .*, did you mean 'unit'"),
        ("at_most(limit=1, zzz=0)", "no setting 'zzz' for .*: it takes limit, unit"),
        ("at_most(unit='words')", "do not fit: missing a required argument: 'limit'"),
        ("at_most(limit=0)", "do not work: limit must be positive"),
        ("length(targt=1)", "no setting 'targt' for .*, did you mean 'target'"),
        ("NUMBER(x=1)", "has settings, but an object of type int takes none"),
        ("nothing(x=1)", "no 'nothing' in the module 'toy_makers'"),
    ],
)
def test_settings_are_parsed_as_literals_and_never_run(makers, capsys, settings, message):
    with pytest.raises(ZooError, match=message) as caught:
        load_object(makers + settings, group=GROUP)
    assert "\n" not in str(caught.value) and capsys.readouterr().out == ""


def test_plugin_defect_keeps_its_traceback(makers, tmp_path):
    (tmp_path / "defective.py").write_text("1 / 0\n")
    for name in (f"{makers}broken()", "defective:x"):
        with pytest.raises(ZeroDivisionError):
            load_object(name, group=GROUP)


def test_ambiguous_entry_point_name_is_rejected(package, tmp_path):
    install(tmp_path, "same", "length = toy_plugin:length")
    assert load_object("length", group=GROUP)(["a"], ["four"]) == [4]
    install(tmp_path, "another", "length = other:length")
    with pytest.raises(ZooError, match="more than once, as other:length and toy_plugin:length"):
        load_object("length", group=GROUP)


def test_registered_name_behind_another_names_prefix_is_suggested(package):
    with pytest.raises(ZooError, match=r".* has no 'rule:length': write only 'length'"):
        load_object("rule:length", group=GROUP)
    with pytest.raises(ZooError, match="There is no module 'rule'"):
        load_object("rule:nothing", group=GROUP)
