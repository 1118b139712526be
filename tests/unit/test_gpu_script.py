"""benchmarks/gpu.py on the CPU with tiny models, so that every part is tested without a GPU."""

import gzip
import json
import time
from pathlib import Path

import gpu
import gpu_processes
import gpu_smollm2
import pytest
from gguf_fixture import write_gguf
from speed.points import POINTS


def test_gpu_script_starts_no_part_after_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "figures.json"
    words = ["--device", "cpu", "--tiny", "--output", str(path)]
    assert gpu.main([*words, "ceilings"]) == 0
    assert json.loads(path.read_text())["parts"]["ceilings"][gpu.MATRIX_RATE] > 0
    assert gpu.main([*words, "--minutes", "-1"]) == 0
    assert "parity: not begun, the -1 minutes are over" in capsys.readouterr().out
    assert json.loads(path.read_text())["parts"].keys() == {"ceilings"}


def test_gpu_script_skips_part_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setitem(gpu.PARTS, "resume", lambda *_: time.sleep(60))
    monkeypatch.setitem(gpu.TIME_LIMITS, "resume", 0.2)
    assert gpu.main(["--device", "cpu", "--tiny", "--output", str(path), "resume", "ceilings"]) == 0
    figures = json.loads(path.read_text())["parts"]
    assert figures["resume"] == {"not run": "it took longer than the minutes that were left"}
    assert figures["ceilings"][gpu.MATRIX_RATE] > 0


def test_gpu_script_test_files_exist() -> None:
    assert all((gpu.ROOT / name).is_file() for name in gpu_processes.TESTS)


def test_update_flops_of_shape_c_match_hand_count() -> None:
    point = POINTS["c"]
    responses = [min(length, point.response) for length in point.lengths(2560)]
    assert sum(responses) / 2560 == pytest.approx(314, rel=0.03)
    trunk = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)  # of 494 million weights; 136 are the head's
    first = sum(responses[:256])
    tokens = first + sum(map(len, point.prompts(256)))
    assert point.update_flops(256, shared=True) == pytest.approx(24 * (trunk * tokens + 896 * 151_936 * first))
    assert point.update_flops(256) == pytest.approx(24 * (2 * trunk * tokens + 896 * 151_936 * first))


@pytest.mark.full
def test_gpu_script_runs_every_part_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_processes, "PEER", tmp_path)
    monkeypatch.delenv("RLHF_ZOO_DATA", raising=False)
    path = tmp_path / "figures.json"
    parts = [name for name in gpu.PARTS if name != "tests"]
    assert gpu.main(["--device", "cpu", "--tiny", "--output", str(path), "--minutes", "60", *parts]) == 0
    figures = json.loads(path.read_text())["parts"]
    assert figures.keys() == set(parts)
    assert figures["trl"].keys() == figures["smollm2"].keys() == {"not run"}
    assert all(0 < setting["share of the measured rate"] < 1 for setting in figures["c"].values())
    for name in ("c", "1b", "8b-lora"):
        for setting in figures[name].values():
            assert setting["rollout"] > 0 and setting["update"] > 0 and setting["response tokens"] > 0


@pytest.mark.full
def test_smollm2_part_joins_halves_trains_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path, context=2048)
    content = file.read_bytes()
    model = tmp_path / "model.gguf"
    for half, part in zip(gpu_smollm2.HALVES, (content[:1000], content[1000:]), strict=True):
        model.with_name(f"{model.name}.{half}").write_bytes(part)
    (tmp_path / "ifeval").mkdir()
    row = {"prompt": "Say yes without commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    with gzip.open(tmp_path / "ifeval" / "test.jsonl.gz", "wt") as prompts:
        prompts.write(json.dumps(row) + "\n")
    monkeypatch.setenv("RLHF_ZOO_DATA", str(tmp_path))
    monkeypatch.setattr(gpu_smollm2, "MODEL", model)
    figures = gpu_smollm2.smollm2("cpu", tiny=True)
    assert model.read_bytes() == content
    assert figures["updates"] == 1 and 0 <= figures["last update"]["rewards/instructions_followed"] <= 2
    assert figures["IFEval before"]["prompts"] == figures["IFEval after"]["prompts"] == 1
