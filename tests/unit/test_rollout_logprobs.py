"""`probe --model`: the chat template, devices, and the cache that an interrupted probe goes on from."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from datasets import Dataset
from miniatures import load
from test_probes import sft
from test_rollouts import write

import rlhf_zoo
from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import logprob_cache, rollout_logprobs
from rlhf_zoo.evaluation.head_to_head import head_to_head
from rlhf_zoo.evaluation.judges.panel import Panel
from rlhf_zoo.evaluation.judges.scalar import FunctionJudge
from rlhf_zoo.evaluation.measure import Evaluator
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.rollout_files import read_rollouts
from rlhf_zoo.evaluation.rollout_logprobs import ModelOptions, add_logprobs
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.modeling.loading import load_tokenizer
from rlhf_zoo.modeling.models import load_causal

TEMPLATE = (
    "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """The number of texts in each forward pass."""
    batches: list[int] = []
    scorer = rollout_logprobs.make_batch_scorer

    def counted(*arguments):
        score = scorer(*arguments)

        def score_rows(rows):
            batches.append(len(rows))
            return score(rows)

        return score_rows

    monkeypatch.setattr(rollout_logprobs, "make_batch_scorer", counted)
    return batches


def save(folder: Path, *, template: str | None) -> Path:
    model, tokenizer = load("GPT-2")
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chats(completions: Completions) -> list[dict[str, object]]:
    return [
        {
            "prompt": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": prompt}]},
            ],
            "completion": [{"role": "assistant", "content": text}],
        }
        for prompt, text in zip(completions.prompts, completions.texts, strict=True)
    ]


def by_hand(prompt: str, text: str) -> list[float]:
    model, tokenizer = load("GPT-2")
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text)]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids[0] + ids[1]])).logits[0].log_softmax(-1)
    return [float(logprobs[len(ids[0]) - 1 + k, token]) for k, token in enumerate(ids[1])]


def test_chat_template_applies_to_conversations_not_texts(tmp_path, home, caplog):
    policy, reference = sft(1, prompts=12), sft(2, prompts=12)
    prompt, text = policy.prompts[5], policy.texts[5]
    rendered = f"[system]s[user]{prompt}[assistant]"
    for case, (template, rows, expected, warning) in enumerate(
        (
            (TEMPLATE, chats, rendered, ""),
            (None, chats, f"s\n{prompt}", "has no chat template, so conversations are read as plain text"),
            (TEMPLATE, None, prompt, "The prompts are texts, so the chat template of"),
        )
    ):
        caplog.clear()
        folder = save(tmp_path / f"model-{case}", template=template)
        sides = [read_rollouts(rows(side)) if rows else side for side in (policy, reference)]
        scored, _ = add_logprobs(*sides, ModelOptions(folder, DEFAULT_HUB), seed=1)
        assert scored.logprobs[5] == pytest.approx(by_hand(expected, text), abs=2e-4)
        assert len(scored.dependence) == 24 and max(scored.dependence) <= np.log(9)
        assert (warning in caplog.text) if warning else not caplog.records


def test_samples_of_evaluation_are_both_sides_of_probe(tmp_path, home):
    """Of conversations they hold the messages, system turns included, so the SFT model reads what it was trained on."""
    folder = save(tmp_path / "model", template=TEMPLATE)
    model, tokenizer = load_causal(folder), load_tokenizer(folder)
    evaluator = Evaluator(
        model, tokenizer, None, Panel([FunctionJudge("toy_run:judge")]), max_new_tokens=6, temperature=1.0
    )
    rows = Dataset.from_list([
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"tell me about item {number}"}]}
        for number in range(12)
    ])  # fmt: skip
    comparison = head_to_head(load_causal(folder), evaluator, rows, samples_per_prompt=2, seed=1)
    samples = tmp_path / "samples.jsonl"
    samples.write_text(comparison.to_jsonl(), encoding="utf-8")
    first = json.loads(samples.read_text(encoding="utf-8").split("\n")[0])
    assert (list(first), first["messages"]) == (
        ["prompt", "messages", "sample", "sft", "ppo", "control"], rows[0]["prompt"]
    )  # fmt: skip
    for side in ("ppo", "sft"):
        read = read_rollouts(samples, side=side)
        measured = comparison.measurements[side]
        assert read.texts == measured.completions and read.judge_scores == measured.judge_scores["judge"]
        assert read.conversations == [rows[number // 2]["prompt"] for number in range(24)] and read.rewards is None
    scored, _ = add_logprobs(read, read, ModelOptions(folder, DEFAULT_HUB), seed=1)
    own = by_hand("[system]s[user]tell me about item 5[assistant]", read.texts[10])
    assert scored.logprobs[10] == pytest.approx(own, abs=2e-4)
    for options in ([], ["--model", str(folder)]):
        command = ["probe", str(samples), "--against", str(samples), "--json", *options]
        result = CliRunner().invoke(cli, command, catch_exceptions=False)
        document = json.loads(result.stdout)
        assert (document["prompts"], document["completions"], document["left_out"]) == (12, 24, [0, 0])
        needs_model = [family for family, why in document["probes"]["skipped"].items() if "needs the SFT model" in why]
        assert needs_model == ([] if options else ["word salad", "independence of the prompt"])

    plain = Dataset.from_list([{"prompt": f"item {number}"} for number in range(3)])
    samples.write_text(head_to_head(model, evaluator, plain, samples_per_prompt=1, seed=1).to_jsonl(), encoding="utf-8")
    assert "messages" not in json.loads(samples.read_text(encoding="utf-8").split("\n")[0])
    assert read_rollouts(samples).prompts == plain["prompt"][:] and read_rollouts(samples).conversations is None
    rows_without = [{"prompt": "a", "ppo": {"reward": 1.0}}]
    with pytest.raises(ZooError, match="row 1 has no completion"):
        read_rollouts(rows_without)


def test_interrupted_probe_resumes_with_same_result(tmp_path, home, computed, monkeypatch, capfd):
    folder = str(save(tmp_path / "model", template=None))
    policy = replace(sft(1, prompts=20), prompts=[*sft(1, prompts=20).prompts[:38], "only here", "only here"])
    # 19 prompts with 2 texts each are shared; 2 rows are equal, and computed once.
    policy = replace(policy, texts=[*policy.texts[:36], "the same", "the same", "x", "y"])
    monkeypatch.setattr(rollout_logprobs, "max_rows_in_memory", lambda model, width: 10)
    complete = rlhf_zoo.probe(policy, sft(2, prompts=19), model=folder).to_json()
    distinct = 75 * 9
    assert max(computed) == rollout_logprobs.CPU_BATCH
    assert (
        sum(computed) == distinct and "log p under other prompts, on cpu: 600 of 600 (100%)" in capfd.readouterr().err
    )
    assert rlhf_zoo.probe(policy, sft(2, prompts=19), model=folder).to_json() == complete
    assert sum(computed) == distinct, "all was in the cache"
    (file,) = (home / "logprobs").iterdir()
    assert "the same" not in file.read_text(), "numbers and digests only"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:200]) + lines[200][:20])  # a kill in the middle of a line
    assert rlhf_zoo.probe(policy, sft(2, prompts=19), model=folder).to_json() == complete
    again = sum(computed) - distinct
    assert again == distinct - sum(bool(line.strip()) for line in lines[:200])
    assert rlhf_zoo.probe(policy, sft(2, prompts=19), model=folder).to_json() == complete
    assert sum(computed) == distinct + again, "what follows the damaged line is read"


def test_logprob_cache_is_per_model_and_restarts_when_full(tmp_path, home, computed, monkeypatch):
    rollouts = sft(1, prompts=10, samples=1), sft(2, prompts=10, samples=1)
    folder = save(tmp_path / "model", template=None)
    add_logprobs(*rollouts, ModelOptions(folder, DEFAULT_HUB), seed=1)
    first = sum(computed)
    model, _ = load("GPT-2")
    with torch.no_grad():
        model.transformer.wte.weight += 1e-3
    model.save_pretrained(folder)
    add_logprobs(*rollouts, ModelOptions(folder, DEFAULT_HUB), seed=1)
    assert (sum(computed), len(list((home / "logprobs").iterdir()))) == (2 * first, 2)
    monkeypatch.setattr(logprob_cache, "MAX_BYTES", 10)
    add_logprobs(*rollouts, ModelOptions(folder, DEFAULT_HUB), seed=1)
    assert sum(computed) == 3 * first


def test_unwritable_home_gives_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "file"))
    rollouts = sft(1, prompts=10, samples=1), sft(2, prompts=10, samples=1)
    scored, _ = add_logprobs(*rollouts, ModelOptions(save(tmp_path / "m", template=None), DEFAULT_HUB), seed=1)
    assert len(scored.logprobs) == 10 and "cannot be read or written (Not a directory)" in caplog.text


def test_long_texts_are_truncated_and_long_prompts_rejected(tmp_path, home, caplog):
    folder = save(tmp_path / "model", template=None)  # it reads 128 tokens
    policy = replace(sft(1, prompts=10, samples=1), texts=["word " * 200] * 10)
    scored, _ = add_logprobs(policy, sft(2, prompts=10, samples=1), ModelOptions(folder, DEFAULT_HUB), seed=1)
    assert len({len(logprobs) for logprobs in scored.logprobs}) == 1 and "10 texts are read up to" in caplog.text
    long = [replace(side, prompts=[f"{k} " + "word " * 200 for k in range(10)]) for side in (policy, policy)]
    with pytest.raises(ZooError, match=r"A prompt has more tokens than .* can read \(128\)"):
        add_logprobs(*long, ModelOptions(folder, DEFAULT_HUB), seed=1)


def test_probe_model_accepts_device_and_dtype(tmp_path, home):
    folder = save(tmp_path / "model", template=None)
    files = [write(tmp_path / f"{seed}.jsonl", sft(seed, prompts=12)) for seed in (1, 2)]
    command = ["probe", str(files[0]), "--against", str(files[1])]
    process = CliRunner().invoke(
        cli, [*command, "--model", str(folder), "--device", "cpu", "--dtype", "bfloat16", "--json"]
    )
    assert process.exit_code == 0 and "word salad" not in json.loads(process.stdout)["probes"]["skipped"]
    for flags, message in (
        (["--device", "cpu"], "give the SFT model too"),
        (["--dtype", "auto"], "give the SFT model too"),
        (["--model", str(folder), "--device", "cuda:77"], "There is no device 'cuda:77' here"),
        (["--model", str(folder), "--device", "abacus"], "There is no device 'abacus' here"),
    ):
        refused = CliRunner().invoke(cli, [*command, *flags])
        assert isinstance(refused.exception, ZooError) and message in str(refused.exception)
