"""Meaning ranks: a sentence embedder ranks answers among prompts, and a probe finds answers to other prompts."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import rlhf_zoo
from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import embedding_ranks
from rlhf_zoo.evaluation.embedding_ranks import add_meaning_ranks, ranks_among_prompts
from rlhf_zoo.evaluation.probes import Completions, probe
from rlhf_zoo.hub.client.connect import DEFAULT_HUB

# No answer shares a word with its question, so words show nothing.
TOPICS = {
    f"question {number}": [f"{letter}{letter}{tail}" for tail in "klmnop"]
    for number, letter in enumerate("abcdefghij" * 3)
}
PROMPTS = list(TOPICS)


class Topics:
    """An embedder that knows which words belong to which question."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self.name = name

    def embed(self, texts: list[str]) -> torch.Tensor:
        rows = torch.zeros(len(texts), len(PROMPTS))
        for row, text in enumerate(texts):
            for place, (prompt, topic) in enumerate(TOPICS.items()):
                rows[row, place] = float(text == prompt) + sum(word in topic for word in text.split())
        return torch.nn.functional.normalize(rows + 1e-3, dim=1)


@pytest.fixture(autouse=True)
def embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_ranks, "Embedder", Topics)
    monkeypatch.setattr(embedding_ranks, "resolve", lambda name, hub: SimpleNamespace(path=Path(name)))


def answers(seed: int, *, shift: int = 0) -> Completions:
    rng = np.random.default_rng(seed)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    texts = []
    for k in range(len(prompts)):
        topic = TOPICS[PROMPTS[(k // 2 + shift) % len(PROMPTS)]]
        texts.append(" ".join(rng.choice(topic, size=4, replace=False)))
    return Completions(prompts, texts)


def with_meaning_ranks(policy: Completions, sft: Completions) -> tuple[Completions, Completions]:
    return add_meaning_ranks(policy, sft, "topics", DEFAULT_HUB)


def test_ranks_among_prompts_match_hand_values() -> None:
    prompts = np.eye(3, dtype=np.float32)
    texts = np.array([[1, 0, 0], [0, 1, 0], [0.6, 0.8, 0]], dtype=np.float32)
    assert ranks_among_prompts(texts, prompts, [0, 0, 0], [0, 1, 2]).tolist() == [1.0, 0.25, 0.5]
    assert ranks_among_prompts(texts, prompts, [0, 0, 0], [0, 0, 1]).tolist() == [1.0, 0.5, 1.0], "one group"


def test_meaning_probe_detects_answers_to_other_prompts() -> None:
    sft, honest, elsewhere = answers(0), answers(1), answers(2, shift=7)
    assert "words of the prompt" in probe(elsewhere, sft).skipped and probe(elsewhere, sft).fired == ()
    report = probe(*with_meaning_ranks(elsewhere, sft))
    assert report.fired == ("meaning of the prompt",) and report["meaning of the prompt"].effect > 0.9
    assert probe(*with_meaning_ranks(honest, sft))["meaning of the prompt"].fired is False
    assert "meaning of the prompt" not in {*probe(honest, sft).skipped}, "nobody gave an embedder"


def test_meaning_ranks_are_nan_for_empty_or_unmatched_prompts() -> None:
    sft, policy = answers(0), answers(1)
    policy = replace(policy, texts=["", *policy.texts[1:]], prompts=["elsewhere", "elsewhere", *policy.prompts[2:]])
    policy_ranked, sft_ranked = with_meaning_ranks(policy, sft)
    assert np.isnan(policy_ranked.meaning_ranks[:2]).all() and np.isnan(sft_ranked.meaning_ranks[:2]).all()
    assert np.isfinite(policy_ranked.meaning_ranks[2:]).all()
    with pytest.raises(ZooError, match="all prompts ask the same question"):
        with_meaning_ranks(replace(sft, groups=["one"] * len(sft)), replace(sft, groups=["one"] * len(sft)))


def test_meaning_ranks_use_last_request_of_conversation() -> None:
    sft = answers(0)
    turns = [[{"role": "system", "content": "s"}, {"role": "user", "content": prompt}] for prompt in sft.prompts]
    talk = replace(sft, prompts=[f"s {prompt}" for prompt in sft.prompts], conversations=turns)
    assert with_meaning_ranks(talk, talk)[0].meaning_ranks == with_meaning_ranks(sft, sft)[0].meaning_ranks


def test_probe_api_reports_lost_meaning() -> None:
    result = rlhf_zoo.probe(answers(2, shift=7), answers(0), embedder="topics")
    assert result.report.fired == ("meaning of the prompt",) and result.verdict.kind == "suspicious"
    assert rlhf_zoo.probe(answers(2, shift=7), answers(0)).report.fired == ()


def test_probe_command_needs_no_hub_for_embedder_folder(tmp_path: Path) -> None:
    files = []
    for name, side in (("rollouts", answers(2, shift=7)), ("sft", answers(0))):
        rows = [{"prompt": prompt, "completion": text} for prompt, text in zip(side.prompts, side.texts, strict=True)]
        files.append(write_rows(tmp_path / f"{name}.jsonl", rows))
    command = ["probe", files[0], "--against", files[1], "--embedder", str(tmp_path)]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert "meaning of the prompt" in result.stdout and "Verdict: suspicious, on 30 prompts." in result.stdout
    assert "Hub" not in result.stderr


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
