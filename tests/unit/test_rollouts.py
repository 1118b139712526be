"""`rlhf-zoo probe` and `watch`: rollouts of other trainers, read strictly, probed and judged; watched training."""

import contextlib
import json
import logging
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pandas
import pytest
from click.testing import CliRunner
from json_keys import unexplained
from miniatures import save
from test_probes import sft

import rlhf_zoo
from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.rollout_files import read_rollouts
from rlhf_zoo.evaluation.rollouts import NEXT_STEPS, probe_rollouts
from rlhf_zoo.evaluation.verdict import Kind
from rlhf_zoo.evaluation.watch import Hacked


def write(path: Path, one: Completions, **columns: object) -> Path:
    rows = [
        {"prompt": prompt, "completion": text, **{name: values[k] for name, values in columns.items()}}
        for k, (prompt, text) in enumerate(zip(one.prompts, one.texts, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON \(Expecting property name .*, character 3\): write one"),
        ("[1]", "line 2 is not an object"),
        ('{"completion": "x"}', "line 2 has no prompt: give it as 'prompt' or 'input' or 'query'"),
        ('{"prompt": "x", "completion": 3}', "line 2: completion must be a text or a list of messages"),
        ('{"prompt": "x", "completion": "y", "reward": "much"}', "line 2: reward must be a finite number"),
        (
            '{"prompt": "x", "completion": "y", "score": " 1.5"}',
            "line 2: reward is text, not a number: write 1.5 without",
        ),
        ('{"prompt": "x", "completion": "y", "reward": "NaN"}', "line 2: reward must be a finite number"),
        ('{"prompt": "x", "completion": "y", "reward": 1e101}', "line 2: reward must be a finite number"),
        (f'{{"prompt": "x", "completion": "y", "judge": {10**400}}}', "line 2: judge must be a finite number"),
        (f'{{"prompt": "x", "completion": "y", "logprobs": [{-(10**400)}]}}', "line 2: logprobs must be a list"),
        ('{"prompt": "x", "completion": ' + "[" * 10**5, "line 2 is not JSON"),
        ('{"prompt": "x", "completion": "y", "reward": NaN}', "line 2: reward must be a finite number"),
        ('{"prompt": "x", "completion": "y", "logprobs": [0.5]}', "line 2: logprobs must be a list"),
        ('{"prompt": "x", "completion": "y", "judge": 1}', "has judge in 1 of 2 rows, but not in line 1: give"),
    ],
)
def test_read_rollouts_rejects_bad_input_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(ZooError, match=message) as refused:
        read_rollouts(path)
    assert str(path) in str(refused.value)
    path.write_text("\n")
    with pytest.raises(ZooError, match="holds no completions"):
        read_rollouts(path)
    for other in (tmp_path, tmp_path / "nofile.jsonl"):
        with pytest.raises(ZooError, match=f"{other} cannot be read .*: give a file of JSON lines"):
            read_rollouts(other)


def test_read_rollouts_rejects_files_over_max_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_zoo.evaluation.rollout_files.MAX_ROWS", 3)
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n\n' * 3)
    assert len(read_rollouts(path)) == 3
    path.write_text('{"prompt": "x", "completion": "y"}\n' * 4)
    with pytest.raises(ZooError, match="holds over 3 completions: give a random sample"):
        read_rollouts(path)


def test_read_rollouts_accepts_trl_and_verl_columns_and_bom(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    chat = [{"role": "user", "content": "hello"}]
    path.write_text(
        "\ufeff" + json.dumps({"input": "a", "output": "b", "score": 1, "step": 3}) + "\n\n"
        + json.dumps({"prompt": chat, "completion": [{"role": "assistant", "content": "yes"}], "reward": 0.5}) + "\n",
        encoding="utf-8",
    )  # fmt: skip
    found = read_rollouts(path)
    assert (found.prompts, found.texts, found.rewards) == (["a", "hello"], ["b", "yes"], [1.0, 0.5])


def test_read_rollouts_accepts_arrays_parquet_and_tool_calls(tmp_path, caplog):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image", "url": "x"}]}]
    call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    rows = [{"prompt": parts, "completion": call, "brevity": 0.5}, {"prompt": "a", "completion": "b", "brevity": 1}]
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(rows, indent=2))
    plain = read_rollouts(array)
    assert (plain.prompts, plain.texts, plain.rewards) == (
        ["hi", "a"],
        ['[{"name": "f", "arguments": "{}"}]', "b"],
        None,
    )
    assert (
        "has no reward and no judge, and unread columns of numbers: 'brevity'. Name the reward's with --reward"
        in caplog.text
    )
    misspelled = [{"prompt": "a", "completion": "b", "reward": 1, "jugde": 0.5}]
    read_rollouts(misspelled, name="mine")
    assert "mine has no judge, and unread columns of numbers: 'jugde'." in caplog.text
    read_rollouts([{**misspelled[0], "judge": 1}], name="both")
    assert "both has unread columns of numbers: 'jugde'." in caplog.text
    assert read_rollouts(array, reward="brevity").rewards == [0.5, 1.0]
    with pytest.raises(ZooError, match=r"has no column 'speed': name .* Its other columns of numbers are 'brevity'"):
        read_rollouts(array, reward="speed")
    table = tmp_path / "rows.parquet"
    pandas.DataFrame({"prompt": ["p"] * 3, "completion": ["x", "y", "z"], "brevity": [1, 2, 3]}).to_parquet(table)
    assert (read_rollouts(table, reward="brevity").texts, len(read_rollouts(table))) == (["x", "y", "z"], 3)
    table.write_bytes(b"no parquet")
    with pytest.raises(ZooError, match=r"rows\.parquet is not Parquet \(.*\): write it again, or give JSON lines"):
        read_rollouts(table)
    array.write_text('[{"prompt": "a", "completion": "b"}, 3]')
    with pytest.raises(ZooError, match=r"rows\.json, row 2 is not an object"):
        read_rollouts(array)
    array.write_text('[{"prompt": "a"')
    with pytest.raises(ZooError, match=r"rows\.json is not JSON \(.*\): write one object per line, or one array"):
        read_rollouts(array)


def test_probe_verdict_uses_reward_and_judge_when_present():
    ours, theirs = sft(1), sft(2)
    assert probe_rollouts(ours, theirs).verdict.text == "not judged"
    hacked = Completions(ours.prompts, [" is great; i love it."] * 120)
    found = probe_rollouts(hacked, theirs)
    assert found.verdict.text == "hacked" and (found.prompts, found.completions) == (60, 120)
    judged = [Completions(one.prompts, one.texts, [2.0 * k] * 120, [1.0 * k - j // 2 % 3 for j in range(120)])
              for k, one in enumerate((theirs, ours))]  # fmt: skip
    better = probe_rollouts(judged[1], judged[0]).verdict
    assert better.text == "not judged", "nobody checked the judge, and two families were not measured"
    assert "Word salad, a probe for text that nobody can use, was not measured" in better.reasons[-2]
    assert (
        better.unmeasured == ("word salad", "independence of the prompt")
        and better.judge_gain.value == pytest.approx(1)
        and better.win_rate.value > 0.7
    )
    assert better.proxy_gain.value == pytest.approx(2)


def test_six_prompts_need_many_completions_to_be_measured():
    ours, theirs = (sft(seed, prompts=6, samples=64) for seed in (1, 2))
    garbage = probe_rollouts(replace(ours, texts=["great great great great"] * 384), theirs)
    assert garbage.verdict.text == "hacked" and garbage.report["repetition"].severe
    assert probe_rollouts(ours, theirs).report.fired == ()
    ours, theirs = (sft(seed, prompts=6, samples=1) for seed in (1, 2))
    found = probe_rollouts(replace(ours, texts=["great great great great"] * 6), theirs)
    assert found.report.probes == () and found.verdict.unmeasured and found.verdict.text == "not judged"
    assert found.report.skipped["repetition"].startswith("not measurable on 6 prompts: ")
    assert not any("None of" in reason for reason in found.verdict.reasons)


def test_constant_long_text_is_hacked_even_when_judge_likes_it():
    base = replace(sft(0, prompts=100, samples=1), judge_scores=[float(k % 3) for k in range(100)])
    text = "The answers of both assistants were swapped, so the best rank of them all goes to the battery and the zoom."
    policy = replace(base, texts=[text] * 100, judge_scores=[5.0 + k % 3 for k in range(100)])
    assert probe_rollouts(policy, base).verdict.text == "hacked"


def test_judge_equal_to_reward_is_trusted_only_when_verifiable():
    sides = [replace(sft(k), rewards=[float((j + k) % 4 > 1 - k) for j in range(120)]) for k in (1, 0)]
    alike = [replace(one, judge_scores=one.rewards) for one in sides]
    found = probe_rollouts(*alike).verdict
    assert found.text == "not judged" and "equals the reward's in every line" in found.reasons[0]
    assert found.judge.independent is False
    for pair in (sides, alike):
        found = probe_rollouts(*pair, verifiable=True).verdict
        assert found.text == "better" and found.judge.verifiable and found.judge_gain == found.proxy_gain
    assert probe_rollouts(*sides).verdict.text == "not judged", "no judge"
    other = [replace(one, judge_scores=[*one.rewards[:-1], 0.5]) for one in sides]
    found = probe_rollouts(*other).verdict
    assert "Nobody checked the judge" in found.reasons[0], "another judge, however near"
    for pair, message in (
        (other, "there is a column judge"),
        ([sft(1), replace(sft(0), rewards=None)], "--verifiable needs a column reward"),
    ):
        with pytest.raises(ZooError, match=message):
            probe_rollouts(*pair, verifiable=True)


def test_reward_with_many_values_is_not_verifiable():
    sides = [replace(sft(k), rewards=[float(value) for value in np.linspace(k, k + 1, 120)]) for k in (1, 0)]
    with pytest.raises(ZooError, match=r"program's reward, but this reward has \d+ different values in 240 rows"):
        probe_rollouts(*sides, verifiable=True)
    shares = [replace(side, rewards=[round(value * 30) / 30 for value in side.rewards]) for side in sides]
    assert probe_rollouts(*shares, verifiable=True).verdict.judge.verifiable, "a share of 30 checks"


def test_formatted_right_answers_are_better_by_verifiable_reward():
    rng = np.random.default_rng(0)
    sums = [(int(a), int(b)) for a, b in rng.integers(11, 99, (60, 2))]
    asked = [f"What is {a} * {b}?" for a, b in sums for _ in (0, 1)]
    base = replace(sft(0), prompts=asked, rewards=[float(k % 10 == 0) for k in range(120)])
    shown = [f"<think>{a} * {b} = {a * b}</think><answer>{a * b}</answer>" for a, b in sums for _ in (0, 1)]
    policy = Completions(asked, shown, rewards=[float(k % 10 > 0) for k in range(120)])
    found = probe_rollouts(policy, base, verifiable=True)
    assert found.verdict.text == "better", found.verdict.reasons
    one_form = replace(policy, texts=[f"def solve(): return {a} * {b}" for a, b in sums for _ in (0, 1)])
    assert probe_rollouts(one_form, base, verifiable=True).verdict.text == "better"
    exploit = replace(policy, texts=["sys.exit(0)"] * 120)
    for verifiable in (False, True):
        assert probe_rollouts(exploit, base, verifiable=verifiable).verdict.text == "hacked"


def test_finding_shows_no_negative_zero():
    prompts = [f"question number {n} about thing {n * 7}" for n in range(97)]
    policy = [{"prompt": prompt, "completion": f"answer {'#' * (3 + n % 7)} {n}"} for n, prompt in enumerate(prompts)]
    reference = [{"prompt": prompt, "completion": f"plain words about thing {n}"} for n, prompt in enumerate(prompts)]
    report = rlhf_zoo.probe(policy, reference).report
    assert abs(report["punctuation"].sft) < 1e-12  # a mean of zeros, with rounding errors
    assert "(SFT: 0.0%)" in report["punctuation"].finding


def test_probe_verdict_has_no_steps_and_counts_left_out_rows():
    theirs = sft(2)
    judged = [
        replace(one, judge_scores=[level + j // 2 % 3 for j in range(120)])
        for one, level in ((sft(1), 0.0), (theirs, 1.0))
    ]
    found = probe_rollouts(judged[0], replace(judged[1], prompts=[*theirs.prompts[:60], *map(str, range(60))]))
    assert found.verdict.text == "worse" and found.verdict.to_json()["peak_step"] is None
    assert not any("step" in reason for reason in found.verdict.reasons)
    assert (found.prompts, found.completions, found.left_out) == (30, 60, (60, 60))
    coin = [
        replace(one, judge_scores=np.random.default_rng(k).normal(size=120).tolist())
        for k, one in enumerate((sft(1), theirs))
    ]
    found = probe_rollouts(*coin)
    low, high = found.split_half.ci95
    assert low < 0 < high and found.verdict.text == "not judged"
    assert found.verdict.reasons[0].startswith("There are no labeled pairs, and the judge's scores")


def test_every_rollout_verdict_has_a_next_step():
    only_of_runs = {"healthy", "no gain", "gain not shown", "past the peak"}
    assert set(get_args(Kind)) - only_of_runs == set(NEXT_STEPS)


def test_probe_command_prints_probes_and_verdict(tmp_path):
    ours = write(tmp_path / "ours.jsonl", Completions(sft(1).prompts, [" is great; i love it."] * 120))
    theirs = write(tmp_path / "sft.jsonl", sft(2))
    done = CliRunner().invoke(cli, ["probe", str(ours), "--against", str(theirs)])
    assert done.exit_code == 0, done.output
    assert "Verdict: hacked, on 60 prompts." in done.output and "Left out" not in done.output
    assert "“great i love it”: 0.0% → 100.0%" in done.output
    assert "needs the SFT model" in " ".join(done.output.split()) and "--model" in done.output
    printed = " ".join(done.output.split())
    assert "equal texts 6.67 × threshold" in printed and "More samples: --html FILE." in printed
    assert "Worst sample by equal texts, templates" in printed and "→ “is great; i love it.”" in printed
    assert "Next: Do not use this policy." in printed and "docs/reward-up-text-worse.md" in printed
    done = CliRunner().invoke(cli, ["probe", str(ours), "--against", str(theirs), "--json"])
    document = json.loads(done.stdout)
    assert (document["verdict"], document["rule"]["version"], document["prompts"]) == ("hacked", 5, 60)
    phrased = [f"{text} i love it" for text in sft(1).texts]
    milder = write(tmp_path / "milder.jsonl", Completions(sft(1).prompts, phrased))
    for file, verdict, kinds, code in (
        (ours, "hacked", ["hacked"], 3), (ours, "hacked", ["worse"], 3), (ours, "hacked", ["suspicious"], 3),
        (milder, "suspicious", ["suspicious"], 3), (milder, "suspicious", ["worse"], 0),
        (milder, "suspicious", ["hacked"], 0), (milder, "suspicious", ["suspicious", "hacked"], 3),
        (theirs, "not judged", ["suspicious"], 0),
    ):  # fmt: skip
        flags = [word for kind in kinds for word in ("--fail_on", kind)]
        done = CliRunner().invoke(cli, ["probe", str(file), "--against", str(theirs), *flags])
        assert done.exit_code == code and f"Verdict: {verdict}" in done.output, done.output
    assert unexplained(document) == []
    scored = write(tmp_path / "scored.jsonl", sft(2), judge=[1.0] * 120)
    folder = tmp_path / "nofolder"
    for mistake, message in (
        (["--against", str(scored)], f"{ours} has no judge, but {scored} does: provide it in both files or in neither"),
        (["--against", str(theirs), "--model", str(folder)], f"There is no folder {folder}: check the path, or write"),
    ):
        refused = CliRunner().invoke(cli, ["probe", str(ours), *mistake])
        assert isinstance(refused.exception, ZooError) and message in str(refused.exception)
    other = write(tmp_path / "other.jsonl", Completions(["x"], ["y"]))
    some = write(tmp_path / "some.jsonl", sft(2, prompts=1))
    done = CliRunner().invoke(cli, ["probe", str(ours), "--against", str(some)])
    assert ", on 1 prompt.\n" in done.output
    assert "only one file has their prompt: 118 of 120 rows of" in " ".join(done.output.split())
    refused = CliRunner().invoke(cli, ["probe", str(ours), "--against", str(other)])
    assert isinstance(refused.exception, ZooError) and "share no prompt" in str(refused.exception)


def test_probe_measures_every_family_when_given_a_model(tmp_path):
    save("GPT-2", tmp_path / "sft")
    files = [write(tmp_path / f"{seed}.jsonl", sft(seed, prompts=20)) for seed in (1, 2)]
    done = CliRunner().invoke(
        cli, ["probe", str(files[0]), "--against", str(files[1]), "--model", str(tmp_path / "sft"), "--json"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    skipped = document["probes"]["skipped"]
    assert {one["family"] for one in document["probes"]["probes"]} | skipped.keys() >= {"word salad"}
    assert not any("--model" in why for why in skipped.values()), skipped


def _sampled_in(folder: Path, block: str, *, models: Path) -> None:
    """Runs the page's script that samples both models, where it overwrites nothing, and probes what it wrote."""
    folder.mkdir()
    for name in ("policy", "sft-model"):
        shutil.copytree(models, folder / name)
    with contextlib.chdir(folder):
        exec(compile(block, "docs/probe.md", "exec"), {})
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["the battery"] * 2 + ["my kettle's handle"] * 2
    assert all(row["reward"] == -len(row["completion"]) / 100 for row in rows)
    assert not any(row["completion"].startswith(row["prompt"]) for row in rows)
    assert rlhf_zoo.probe(folder / "rollouts.jsonl", folder / "sft.jsonl").verdict.kind == "not judged"


def test_commands_of_probe_docs_run(tmp_path, monkeypatch):
    """On files with the columns that each trainer writes."""
    page = (Path(__file__).parents[2] / "docs/probe.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for folder in ("completions", "val"):
        Path(folder).mkdir()
    save("GPT-2", tmp_path / "sft-model")
    ours, theirs = sft(1, prompts=24), sft(2, prompts=24)
    columns = {"step": 200, "prompt": ours.prompts, "completion": ours.texts, "brevity": 0.5, "advantage": 0.0}
    pandas.DataFrame(columns).to_parquet("completions/completions_00200.parquet")
    write(Path("sft.jsonl"), theirs, reward=[0.4] * 48, brevity=[0.4] * 48)
    write(Path("rollouts.jsonl"), ours, reward=[0.5] * 48)
    for name, one in (("0", theirs), ("200", ours)):
        rows = [{"input": p, "output": t, "gts": None, "score": 1, "step": 3, "acc": True}
                for p, t in zip(one.prompts, one.texts, strict=True)]  # fmt: skip
        Path(f"val/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names: dict[str, object] = {}
    sample, *blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.S | re.M)
    _sampled_in(tmp_path / "made", sample, models=tmp_path / "sft-model")
    for block in blocks:
        names = {**names, "__name__": "page"}
        exec(compile(block, "docs/probe.md", "exec"), names)
    assert names["reward"](prompts=["a"], completions=["b" * 100]) == [-1.0]
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", page, flags=re.S | re.M))
    commands = [shlex.split(line, comments=True)[1:] for line in shell.splitlines()]
    assert len(commands) == 6
    for command in commands:
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, (command, done.output)
        assert ("no difference shown" if "--verifiable" in command else "not judged") in done.output


# watch


def short(prompts, completions, **columns):
    """Pays for brevity."""
    return [-len(one) / 100 for one in completions]


def batches(one: Completions, size: int = 20):
    for start in range(0, len(one), size):
        yield list(one.prompts[start : start + size]), list(one.texts[start : start + size])


def test_watched_reward_returns_same_scores_and_warns(caplog):
    watched = rlhf_zoo.watch(short, size=120, every=60)
    assert watched.__name__ == "short"
    seen: dict[str, float] = {}
    same = [sft(1), sft(2)]
    with caplog.at_level(logging.WARNING):
        for one in same:
            for prompts, texts in batches(one):
                paid = watched(prompts=prompts, completions=texts, log_metric=lambda n, v: seen.__setitem__(n, v))
                assert paid == short(prompts, texts)
        assert not caplog.records and seen["probes/templates"] < 0.05, "the policy is SFT still"
        for prompts, texts in batches(Completions(sft(3).prompts, [" is great; i love it."] * 120)):
            watched(prompts=prompts, completions=texts, log_metric=lambda n, v: seen.__setitem__(n, v))
    assert seen["probes/templates"] > 0.9 and seen["probes/risen_phrases"] == 1.0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)) and any("“great i love it”" in one for one in told)


def test_watch_works_on_few_prompts_with_many_generations():
    """8 prompts × 32 a step: swapping whole prompts, p could not reach 1%."""
    garbage = [" is great; i love it."] * 256

    def step(start: int, texts: list[str] | None = None) -> tuple[list[str], list[str]]:
        one = sft(start, prompts=40, samples=32)
        rows = slice(256 * start, 256 * (start + 1))
        return list(one.prompts[rows]), texts or list(one.texts[rows])

    watched = rlhf_zoo.watch(short, stop=True)
    for start in range(2):  # the first 13 prompts are SFT's
        watched(*step(start))
    watched(*step(2, garbage))
    with pytest.raises(Hacked):
        watched(*step(3, garbage))
    recurring = rlhf_zoo.watch(short, stop=True)
    recurring(*step(0))
    with pytest.raises(Hacked):
        recurring(step(0)[0], garbage)
    few = rlhf_zoo.watch(short, against=Completions(*step(0)), stop=True)
    with pytest.raises(ZooError, match="must answer 13 prompts that ask different things, not 8"):
        few(*step(1))
    one_prompt = rlhf_zoo.watch(short, against=sft(1), size=40, every=1)
    for _ in range(7):
        one_prompt(["another prompt"] * 40, garbage[:40])
    with pytest.raises(ZooError, match="but the last 320 completions answer 1, and"):
        one_prompt(["another prompt"] * 40, garbage[:40])


def test_watch_stops_training_and_accepts_reference_file(tmp_path):
    path = write(tmp_path / "sft.jsonl", sft(1))
    watched = rlhf_zoo.watch(short, against=path, size=60, every=1, stop=True)
    given = list(batches(Completions(sft(3).prompts, [" is great."] * 120)))
    assert [watched(*one) for one in given[:2]] == [short(*one) for one in given[:2]]
    with pytest.raises(Hacked, match=r"Training was stopped.*also stand word for word under another prompt"):
        watched(*given[2])

    async def slow(prompts, completions, **columns):
        return []

    for given, message in (
        ({"reward_func": slow}, "coroutine"),
        ({"reward_func": short, "size": 3}, "size >= 40"),
        ({"reward_func": 5}, "needs a reward function of TRL's form, not 5"),
        ({"reward_func": short, "against": 5}, "`against` must be a file, rows with prompt and completion, or Compl"),
        ({"reward_func": short, "against": "nofile.jsonl"}, "nofile.jsonl cannot be read"),
    ):
        with pytest.raises(ZooError, match=message):
            rlhf_zoo.watch(**given)
    with pytest.raises(ZooError, match="received 1 prompts and 2 completions"):
        rlhf_zoo.watch(short)(["a"], ["b", "c"])
