"""Names that recipes write become objects, or one sentence that says what to write instead."""

import importlib
import json

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.plugins import did_you_mean, load_object, registered

GROUP = "rlhf_zoo.test_objects"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed distribution `toy_plugin` that registers two entry points."""
    info = tmp_path / "toy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nlength = toy_plugin:length\ngone = toy_plugin:absent\n")
    (tmp_path / "toy_plugin.py").write_text(
        "def length(prompts, completions):\n    return [len(c) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def test_module_and_attribute():
    assert load_object("json:dumps", group=GROUP) is json.dumps
    assert load_object("json.decoder:JSONDecoder.decode", group=GROUP) is json.JSONDecoder.decode


def test_entry_point(package):
    assert registered(GROUP) == ["gone", "length"]
    assert load_object("length", group=GROUP)(["a"], ["four"]) == [4]
    with pytest.raises(ZooError, match=r"did you mean 'length'\?"):
        load_object("lenght", group=GROUP)
    with pytest.raises(ZooError, match="no 'absent' in the module 'toy_plugin'"):
        load_object("gone", group=GROUP)


def test_module_in_the_working_directory(tmp_path, monkeypatch):
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
        ("json:zzzzzz", "no 'zzzzzz' in the module 'json': json offers "),
        ("json:", "names no attribute"),
        (":dumps", "does not name a module"),
        (".json:dumps", "does not name a module"),
        ("nothing_registered", "or write module:attribute"),
    ],
)
def test_mistakes_are_one_sentence(name, message):
    with pytest.raises(ZooError, match=message) as caught:
        load_object(name, group=GROUP)
    assert "\n" not in str(caught.value)


def test_a_plugin_that_lacks_its_own_dependency_names_that(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZooError, match="'needs_more:x' needs the module 'no_such_dependency'"):
        load_object("needs_more:x", group=GROUP)


def test_a_defect_inside_a_plugin_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "defective.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        load_object("defective:x", group=GROUP)


def test_did_you_mean():
    assert did_you_mean("kl_coeff", ["kl_coef", "vf_coef"]) == ", did you mean 'kl_coef'?"
    assert did_you_mean("xyz", ["kl_coef"]) == ""
