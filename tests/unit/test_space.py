"""The comparison Space's files, and what `rlhf-zoo compare` refuses before it loads a model."""

from __future__ import annotations

import ast
import socket
import sys
from pathlib import Path

import pytest
import yaml

import rlhf_zoo
from rlhf_zoo.comparison import Compared, Side
from rlhf_zoo.errors import ZooError
from rlhf_zoo.stages import compare

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "spaces" / "compare"


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_front_matter() -> None:
    head = yaml.safe_load((SPACE / "README.md").read_text().split("---\n")[1])
    assert head["sdk"] == "gradio" and head["sdk_version"] == pins(ROOT / "constraints.txt")["gradio"]
    assert (SPACE / head["app_file"]).is_file()
    assert head["python_version"] == "3.11"
    assert {head["colorFrom"], head["colorTo"]} <= {
        "red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray",
    }  # fmt: skip
    assert len(head["short_description"]) <= 60  # the Hub's limit
    assert {"title", "emoji", "models", "datasets", "suggested_hardware", "license"} <= set(head)


def test_requirements_are_the_constraints() -> None:
    required, constraints = pins(SPACE / "requirements.txt"), pins(ROOT / "constraints.txt")
    assert required and required == {name: constraints[name] for name in required}


def test_only_the_public_api() -> None:
    tree = ast.parse((SPACE / "app.py").read_text())
    ours = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_zoo")
        for alias in node.names
    ]
    assert ours and {module for module, _ in ours} == {"rlhf_zoo"}
    assert {name for _, name in ours} <= set(rlhf_zoo.__all__)


def test_what_models_write_is_escaped() -> None:
    app = compare._app()
    nasty = "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;"
    side = Side(nasty, None, -0.5, (-0.5,), (nasty,), 1, True)
    card = app._card("ppo", Compared(nasty, 1, 1.0, 8, sft=side, ppo=side))
    assert "<script" not in card and "<img" not in card
    assert card.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2 and card.count("&amp;amp;") == 2
    assert ">none<" in card and ">−0.50<" in card and ">by itself<" in card


def test_without_gradio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ZooError, match=r"pip install 'rlhf-zoo\[space\]'"):
        compare.launch("local/x-ppo", sft=None, reward=None, host="127.0.0.1", port=0)


def test_ports_and_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ZooError, match=f"Port {port} of 127.0.0.1 is taken: choose another with --port"):
            compare.launch("local/x-ppo", sft=None, reward=None, host="127.0.0.1", port=port)
    assert compare._free_port("127.0.0.1", port) == port
    assert compare._free_port("127.0.0.1", 0) > 0
    for number in (-1, 65536):
        with pytest.raises(ZooError, match=f"There is no port {number}"):
            compare._free_port("127.0.0.1", number)
    with pytest.raises(ZooError, match="no address of this machine"):
        compare._free_port("192.0.2.1", 0)  # TEST-NET-1, which no machine has
