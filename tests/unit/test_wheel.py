"""The wheel that a Space carries: the same from sources and from an installation, byte for byte the same each time."""

import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from hub_fixture import base_environment

from rlhf_zoo import __version__
from rlhf_zoo.app.space import wheel
from rlhf_zoo.errors import ZooError

ROOT = Path(__file__).parents[2]


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.make_wheel(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(built)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def test_wheel_from_sources_is_deterministic_and_complete(built: Path, tmp_path: Path) -> None:
    assert built.name == f"rlhf_zoo-{__version__}-py3-none-any.whl"
    assert wheel.make_wheel(tmp_path).read_bytes() == built.read_bytes()
    found = contents(built)
    for name, source in {
        "rlhf_zoo/app/page/static.html.jinja": "rlhf_zoo/app/page/static.html.jinja",
        "rlhf_zoo/_recipes/tiny-world/ppo.yaml": "recipes/tiny-world/ppo.yaml",
        "rlhf_zoo/_spaces/compare/app.py": "spaces/compare/app.py",
        "rlhf_zoo/_metrics/win_rate/win_rate.py": "metrics/win_rate/win_rate.py",
        "rlhf_zoo/app/page/style.css": "rlhf_zoo/app/page/style.css",
    }.items():
        assert found[name] == (ROOT / source).read_bytes(), name
    points = found[f"rlhf_zoo-{__version__}.dist-info/entry_points.txt"].decode()
    assert "rlhf-zoo = rlhf_zoo.cli.main:main" in points and "[rlhf_zoo.rewards]" in points
    assert {name.partition("/")[0] for name in found} == {"rlhf_zoo", f"rlhf_zoo-{__version__}.dist-info"}
    assert not [name for name in found if "test" in name or name.endswith(".pyc")]


def test_wheel_from_installation_equals_wheel_from_sources(built: Path, installed: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in base_environment().items() if name != "PYTHONPATH"}
    code = """
import sys; from pathlib import Path
from rlhf_zoo.app.space.wheel import PACKAGE, make_wheel
print(PACKAGE); print(make_wheel(Path(sys.argv[1])))
"""
    command = [installed, "-c", code, tmp_path]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    package, made = map(Path, done.stdout.splitlines())
    assert package.is_relative_to(installed.parents[1]), "the sources ran"
    assert made.name == built.name
    with zipfile.ZipFile(made) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2020, 2, 2, 0, 0, 0)}, "bytes change with time"
    record = f"rlhf_zoo-{__version__}.dist-info/RECORD"
    ours, theirs = contents(made), contents(built)
    assert sorted(ours.pop(record).splitlines()) == sorted(theirs.pop(record).splitlines())
    assert ours == theirs


def test_repacked_wheel_installs_with_pip(installed: Path, tmp_path: Path) -> None:
    info = next(installed.parents[1].glob("lib/*/site-packages/rlhf_zoo-*.dist-info"))
    again = wheel.rebuild_wheel(metadata.Distribution.at(info), tmp_path)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(target), str(again)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / "bin" / "rlhf-zoo").is_file()


def test_repack_rejects_installation_with_missing_files(installed: Path, tmp_path: Path) -> None:
    info = next(installed.parents[1].glob("lib/*/site-packages/rlhf_zoo-*.dist-info"))
    lost = info.parent / "rlhf_zoo" / "functional.py"
    kept = lost.read_bytes()
    lost.unlink()
    try:
        with pytest.raises(ZooError, match=r"lacks rlhf_zoo/functional.py, .*: install it again\.$"):
            wheel.rebuild_wheel(metadata.Distribution.at(info), tmp_path)
    finally:
        lost.write_bytes(kept)


def test_make_wheel_rejects_other_installed_copy_and_missing_builder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheel, "PACKAGE", tmp_path / "rlhf_zoo")
    with pytest.raises(ZooError, match="but another rlhf-zoo is installed"):
        wheel.make_wheel(tmp_path)
    monkeypatch.setattr(wheel, "DISTRIBUTION", "rlhf-zoo-that-is-not-there")
    with pytest.raises(ZooError, match=r"is not installed, .*: install rlhf-zoo\.$"):
        wheel.make_wheel(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "hatchling.builders.wheel", None)
    with pytest.raises(ZooError, match="`pip install hatchling`"):
        wheel.make_wheel(tmp_path)
