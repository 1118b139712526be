"""benchmarks/bench.py: all sides do equal work, the floor computes what the models do, and runs resume."""

import json
from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from speed import floor, ours, points, report

from rlhf_zoo.functional import gae, selected_logprobs
from rlhf_zoo.modeling.sampling import sampler as sampling

TINY = points.POINTS["tiny"]


@pytest.fixture(autouse=True)
def restore_patched_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    levers = [(module, name) for lever in ours.LEVERS.values() for module, name, _ in lever]
    for patched in ((sampling, "uniforms"), *levers):
        monkeypatch.setattr(*patched, getattr(*patched))


@pytest.mark.parametrize("settings", [report.SETTINGS[name] for name in ("separate", "shared bf16")], ids=str)
def test_trainer_and_floor_sample_equally_many_tokens(settings: tuple, capsys: pytest.CaptureFixture) -> None:
    seen = []
    for side in (ours, floor):
        side.main(["tiny", "--updates", "2", *settings])
        seen.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    lengths = [min(length, TINY.response) for length in TINY.lengths(3 * TINY.batch)][TINY.batch :]
    expected = [sum(lengths[: TINY.batch]), sum(lengths[TINY.batch :])]
    for side in seen:
        assert [update["tokens"] for update in side["updates"]] == expected
        for update in side["updates"]:
            assert update["phases"].keys() == {*report.PHASES} and all(spent > 0 for spent in update["phases"].values())
            assert sum(update["phases"].values()) == pytest.approx(update["seconds"], rel=0.2)
        assert side["peak_mib"] > side["net_mib"] >= 0


@pytest.mark.parametrize("keys", [keys for keys in bench.LEVERS if "without" in keys], ids=str)
def test_trainer_without_lever_does_same_work(keys: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    ours.main(["tiny", "--updates", "1", "--set", json.dumps(keys)])
    (update,) = json.loads(capsys.readouterr().out.splitlines()[-1])["updates"]
    assert update["tokens"] == sum(min(each, TINY.response) for each in TINY.lengths(2 * TINY.batch)[TINY.batch :])
    for module, name, instead in ours.LEVERS.get(keys.get("without", ""), ()):
        assert getattr(module, name) is instead


@pytest.mark.parametrize("name", ["tiny", "tiny-kv"])
def test_floor_computes_same_logprobs_and_gradients_as_models(name: str) -> None:
    point = points.POINTS[name]
    models = points.build_models(point)
    prompts, lengths = point.prompts(3), [5, 3, 1]
    trunk, bias = floor.Trunk(models.policy.model, torch.float32), models.policy.lm_head.bias.detach()
    responses, logprobs, _ = floor.sample(trunk, bias, prompts, lengths)
    assert [len(each) for each in responses] == lengths
    packed = floor.Packed.of(prompts, responses)
    hidden = packed.hidden_states(trunk)[packed.predictors]
    logprob = floor.LogProbs.apply(hidden, trunk.embedding, bias, packed.tokens, torch.float32)
    weights = torch.randn(len(logprob))
    (logprob * weights).sum().backward()
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = models.policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / points.TEMPERATURE
        expected.append(selected_logprobs(logits, torch.tensor(response)))
    (torch.cat(expected) * weights).sum().backward()
    sampled = torch.stack([each for row in logprobs for each in row])
    for computed in (logprob, sampled):
        torch.testing.assert_close(computed, torch.cat(expected), atol=1e-5, rtol=1e-5)
    gradient = models.policy.get_input_embeddings().weight.grad
    torch.testing.assert_close(trunk.embedding.grad, gradient, atol=1e-5, rtol=1e-4)
    mlp = models.policy.model.layers[0].mlp
    gradients = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
    torch.testing.assert_close(trunk.layers[0].up.grad, gradients, atol=1e-5, rtol=1e-4)


def test_adapter_with_shared_trunk_does_same_work(capsys: pytest.CaptureFixture) -> None:
    ours.main(["tiny-kv", "--shared", "--updates", "1", "--set", '{"lora": true}'])
    (update,) = json.loads(capsys.readouterr().out.splitlines()[-1])["updates"]
    assert update["tokens"] == sum(min(each, TINY.response) for each in TINY.lengths(2 * TINY.batch)[TINY.batch :])


def test_packed_gae_matches_gae_of_each_row() -> None:
    rewards, values = torch.randn(2, 4), torch.randn(2, 4)
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    expected, _ = gae(rewards * mask, values * mask, mask, gamma=1.0, lam=floor.LAMBDA)
    torch.testing.assert_close(floor.advantages(rewards[mask], values[mask], [4, 2]), expected[mask])


def test_bench_resumes_after_interrupt_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    calls: list[str] = []

    def measured(side: str, point: str, setting: str, keys: dict[str, Any], *, updates: int) -> dict[str, Any]:
        if len(calls) == 3:
            calls.append("stop")
            raise KeyboardInterrupt
        calls.append(side)
        spent = {report.PEER: 4.0, "ours": 2.0, "floor": 1.5}[side] * (1 if setting == "separate" else 0.5)
        update = {"seconds": spent, "cpu": 2 * spent, "phases": dict.fromkeys(report.PHASES, spent / 5), "tokens": 7}
        return {"load": 0.1, "updates": [update] * 3, "peak_mib": 900.0, "net_mib": 100 * spent, "versions": {}}

    monkeypatch.setattr(bench, "_measure_side", measured)
    monkeypatch.setattr(bench, "PEER_PYTHON", Path(__file__))
    path = tmp_path / "figures.json"
    command = ["tiny", "--settings", "separate", "shared", "--output", str(path)]
    assert bench.main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["parts"]) == 3
    assert bench.main(command) == 0
    assert calls == [report.PEER, "ours", "floor", "stop", "ours", "floor", *[report.PEER, *["ours", "floor"] * 2]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["tiny", "separate", "4.00", "2.00", "2.00 ×", "1.50", "1.33 ×", "900", "200", "50%"] in rows
    assert ["tiny", "shared", "4.00", "1.00", "4.00 ×", "0.75", "1.33 ×", "900", "100", "25%"] in rows
    assert path.with_suffix(".svg").stat().st_size > 1000
    assert bench.main([*command, "--set", '{"gamma": 0.9}']) == 0
    assert "| tiny | shared | `gamma 0.9` | 1.00 × | 100 | 100% | 25% |" in capsys.readouterr().out
    assert calls[len(calls) - 4 :] == ["ours"] * 4, "what the file has is not measured again"
    parts = json.loads(path.read_text())
    busy = {key: part | {"load": 5.0} for key, part in parts["parts"].items()}
    assert "| tiny | shared | – | – | – | – | – | 900 | 100 | 25% |" in report.table({**parts, "parts": busy})
    parts["parts"]["tiny | ours | separate | 1"]["updates"][0]["tokens"] = 8
    with pytest.raises(SystemExit, match="unequal work"):
        report.table(parts)
