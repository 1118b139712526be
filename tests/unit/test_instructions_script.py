"""`benchmarks/instructions.py`: scores a base and a run's policy on both benchmarks, keeps and shows them."""

import gzip
import json
import shutil
import string
from pathlib import Path

import instructions
import pytest
from figures import instructions_table, keep, plots
from PIL import Image
from trainer_fixture import make_policy, make_tokenizer

from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.record import write_complete

ROWS = [
    {"prompt": f"Write {word} in lower case.", "instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}
    for word in ("tea", "sun", "sea")
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with a base, and benchmarks of three prompts."""
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    checkpoint = tmp_path / "run/ppo/checkpoint-2"
    for seed, folder in enumerate((tmp_path / "base", checkpoint)):
        tokenizer.save_pretrained(folder)
        make_policy(tokenizer, seed=seed).save_pretrained(folder)
    write_complete(checkpoint)
    sample = {"prompt": "Sing.", "sft": {"completion": "La"}, "ppo": {"completion": "La la"}}
    (tmp_path / "run/eval").mkdir()
    (tmp_path / "run/eval/samples.jsonl").write_text(json.dumps(sample) + "\n")
    (tmp_path / "run/ppo/metrics.jsonl").write_text('{"step": 1, "time/rollout": 20, "time/update": 40}\n')
    record = {"status": "finished", "seed": 4, "resolved": {"model_name_or_path": str(tmp_path / "base")},
              "chosen": {"step": 2}, "command": "rlhf-zoo run x", "seconds": 60.0}  # fmt: skip
    (tmp_path / "run/ppo/run.json").write_text(json.dumps({"schema": 1, "stage": "ppo", **record}))
    for folder in instructions.BENCHMARKS.values():
        (tmp_path / "data" / folder).mkdir(parents=True)
        with gzip.open(tmp_path / "data" / folder / "test.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS)
    monkeypatch.setenv("RLHF_ZOO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(keep, "FOLDER", tmp_path)
    monkeypatch.setattr(instructions, "TOKENS", 8)
    monkeypatch.setattr(instructions, "BASE", str(tmp_path / "base"))
    return tmp_path / "run"


def test_script_scores_base_policy_and_constant_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    answers = tmp_path / "answers"
    instructions.main([str(run), "--batch", "2", "--judges", "grammar", "--answers", str(answers)])
    document = keep.load(instructions.INSTRUCTIONS)
    assert [policy["policy"] for policy in document["policies"]] == ["base", "PPO", "one text"]
    assert document["policies"][1]["seed"] == 4 and document["runs"][0]["seconds"] == 60
    assert document["policies"][2]["IFEval"]["prompt_strict"]["share"] == 1, "the text has no capital letter"
    assert document["runs"][0]["pairs"] == [{"prompt": "Sing.", "start": "La", "ppo": "La la"}]
    page = instructions_table.page()
    assert "| PPO, seed 4 | " in page and "| one text | **100.0** | 100.0 (100.0 to 100.0)" in page
    assert "*PPO:*\n\n```text\nLa la\n```" in page
    before = {path: path.stat().st_mtime_ns for path in answers.rglob("*.jsonl")}
    assert len(before) == 4
    capsys.readouterr()
    instructions.main([str(run), "--judges", "--answers", str(answers)])
    assert {path: path.stat().st_mtime_ns for path in answers.rglob("*.jsonl")} == before


def test_sft_policy_of_a_run_is_scored_as_well(run: Path, tmp_path: Path) -> None:
    """PPO after SFT names no model, and SFT's is the base; without the default label both names differ."""
    shutil.copytree(run / "ppo", run / "sft")
    record = json.loads((run / "ppo/run.json").read_text())
    (run / "ppo/run.json").write_text(json.dumps(record | {"resolved": {}}))
    answers = ["--judges", "--benchmarks", "IFEval", "--answers", str(tmp_path / "answers")]
    instructions.main([f"PPO, edited answers={run}", *answers])
    document = keep.load(instructions.INSTRUCTIONS)
    names = ["base", "SFT, edited answers", "PPO, edited answers", "one text"]
    assert [policy["policy"] for policy in document["policies"]] == names
    assert "*SFT, edited answers:*\n\n```text\nLa\n```" in instructions_table.page()
    assert instructions.sft_name("long", run) == "SFT, long"
    last = run / "ppo/checkpoint-2"
    instructions.main([f"PPO, step 2={last}", "--add", *answers])
    with_checkpoint = keep.load(instructions.INSTRUCTIONS)
    assert [policy["policy"] for policy in with_checkpoint["policies"]] == [*names[:3], "PPO, step 2", "one text"]
    assert with_checkpoint["runs"] == document["runs"], "a checkpoint has no figures of its own"
    with pytest.raises(ZooError, match="checkpoint-9 has no checkpoint of the stage ppo"):
        instructions.policies_of([("PPO", run / "ppo/checkpoint-9")], tmp_path)


def test_add_keeps_earlier_figures(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The base and the first run stay as they were kept, and nothing of them is sampled."""
    with pytest.raises(SystemExit):
        instructions.main([str(run), "--add"])
    assert "leave --add out" in capsys.readouterr().err
    options = ["--benchmarks", "IFEval", "--batch", "2", "--judges"]
    instructions.main([str(run), *options, "--answers", str(tmp_path / "answers")])
    first = keep.load(instructions.INSTRUCTIONS)
    for _ in range(2):  # the second time it replaces itself
        instructions.main([f"more KL={run}", "--add", *options, "--answers", str(tmp_path / "others")])
    document = keep.load(instructions.INSTRUCTIONS)
    assert [policy["policy"] for policy in document["policies"]] == ["base", "PPO", "more KL", "one text"]
    assert [document["policies"][place] for place in (0, 1, 3)] == first["policies"]
    assert [figures["policy"] for figures in document["runs"]] == ["PPO", "more KL"]
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["more-KL-4"]
    assert "*More KL:*\n\n```text\nLa la\n```" in instructions_table.page()


def test_sampled_figures_stand_beside_greedy_ones(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--benchmarks", "IFEval", "--batch", "2", "--judges", "--answers", str(tmp_path / "answers")]
    with pytest.raises(ZooError, match="base has no greedy figures yet: score it without --temperature first"):
        instructions.main([str(run), "--temperature", "0.7", *options])
    assert not (tmp_path / "answers").exists()
    instructions.main([str(run), *options])
    greedy = keep.load(instructions.INSTRUCTIONS)
    instructions.main([str(run), "--temperature", "0.7", *options])
    document = keep.load(instructions.INSTRUCTIONS)
    assert [policy.pop("sampled", {}).get("temperature") for policy in document["policies"]] == [0.7, 0.7, None]
    assert document == greedy
    page = instructions_table.page()
    assert "| policy | IFEval, greedy | IFEval at 0.7 |" in page and "RUN --temperature 0.7`" in page


def test_limited_run_is_shown_but_not_kept(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    instructions.main(["--limit", "1", "--temperature", "1", "--judges", "--answers", str(tmp_path / "answers")])
    assert "base  on IFEval: " in capsys.readouterr().out
    assert keep.load(instructions.INSTRUCTIONS) == {}
    assert "Nothing is measured yet" in instructions_table.page()


def test_missing_verifiers_are_refused_before_sampling(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        instructions.main([str(run), "--verifiers", "no_such_package.ifeval", "--answers", str(tmp_path / "answers")])
    assert "--verifiers no_such_package.ifeval: No module named 'no_such_package'" in capsys.readouterr().err
    assert not (tmp_path / "answers").exists()


def test_single_benchmark_leaves_other_column_empty(run: Path, tmp_path: Path) -> None:
    answers = str(tmp_path / "answers")
    instructions.main([str(run), "--benchmarks", "IFEval", "--batch", "2", "--judges", "--answers", answers])
    assert "IFBench not measured" in instructions_table.page()
    assert {path.name for path in (tmp_path / "answers").rglob("*.jsonl")} == {"ifeval-t0.jsonl"}


def test_policies_are_distinguished_by_label_and_seed(run: Path, tmp_path: Path) -> None:
    pairs = [instructions.parse_run(f"{label}{run}") for label in ("", "β = 0.05=")]
    base, recipe, other = instructions.policies_of(pairs, tmp_path)
    assert [recipe["policy"], other["policy"]] == ["PPO", "β = 0.05"]
    assert len({policy["answers"] for policy in (base, recipe, other)}) == 3
    with pytest.raises(ZooError, match="labeled 'PPO' with seed 4: give one of them another label"):
        instructions.policies_of([pairs[0], pairs[0]], tmp_path)


def test_script_scores_last_checkpoint_of_interrupted_run(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "ppo/run.json").read_text())
    (run / "ppo/run.json").write_text(json.dumps({**record, "status": "running"}))
    instructions.main(
        [str(run), "--benchmarks", "IFEval", "--batch", "2", "--judges", "--answers", str(tmp_path / "a")]
    )
    page = instructions_table.page()
    assert "| PPO, seed 4 | " in page and "all instructions followed" not in page
    assert instructions_table.short_table() == instructions_table.NOT_MEASURED


def test_evaluated_run_has_loose_shares_and_a_curve(run: Path, tmp_path: Path) -> None:
    share = {"value": 0.5, "ci95": [0.25, 0.75], "n": 1}
    policy = dict.fromkeys(("reward", "judge", "kl", "length", "eos_rate", "repetition"), share)
    evaluation = {"sft": policy, "ppo": policy, "judges": {}, "verdict": "healthy"}
    (run / "eval/evaluation.json").write_text(json.dumps(evaluation))
    messages = [{"role": "user", "content": "Sing."}]
    answers = {
        "sft": {"completion": "La the sea is blue and the sun is warm today.", "ended": True},
        "ppo": {"completion": "La\nthe sea is blue and the sun is warm today.", "ended": True},
    }
    sample = {"prompt": "Sing.", "messages": messages, **answers}
    (run / "eval/samples.jsonl").write_text(json.dumps(sample) + "\n")
    (run / "data/prompts").mkdir(parents=True)
    (run / "data/prompts/test.jsonl").write_text(json.dumps({**ROWS[0], "prompt": messages}) + "\n")
    rows = [
        {"step": step, "instructions_followed/all": step / 4, "objective/kl": step, "rewards/words": 9}
        for step in (1, 2)
    ]
    rows.append({"step": 2, "eval/reward": 1})
    record = json.loads((run / "ppo/run.json").read_text())
    record["command"] = f"rlhf-zoo run x --dataset_name /home/ada/answers --output_dir {run}"
    (run / "ppo/run.json").write_text(json.dumps(record))
    (run / "ppo/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = instructions.run_figures("PPO", run)
    assert figures["command"] == "rlhf-zoo run x --dataset_name answers --output_dir runs/run"
    assert figures["curve"] == [{"step": 1, "followed": 0.25, "kl": 1}, {"step": 2, "followed": 0.5, "kl": 2}]
    assert figures["sft"]["loose"]["value"] == 0, "its only line has a capital letter"
    assert figures["ppo"]["loose"]["value"] == 1, "its last line has none"
    constant = {"judge": share, "loose": {**share, "value": 0.25}}
    shown = instructions_table.runs_table({"runs": [figures], "one_text_on_test_split": constant})
    assert "| one text | 0.50 (0.25 to 0.75) | 0.25 (0.25 to 0.75) |" in shown
    path = tmp_path / "curves.png"
    plots.draw_instructions([{"policy": "PPO", "seed": 1}], path)
    assert not path.exists(), "no run has a curve"
    plots.draw_instructions([figures] * 4, path)
    with Image.open(path) as picture:
        assert len(picture.getcolors()) > 10


def test_script_rejects_run_without_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "ppo")
    with pytest.raises(ZooError, match="has no checkpoint of the stage ppo: run it first"):
        instructions.main([str(run)])
