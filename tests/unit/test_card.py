"""A card says what the run directory says, marks what is missing, and shows foreign text as text."""

import html as entities
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub import markdown
from rlhf_zoo.hub.card import CARD_FILE, make_card
from rlhf_zoo.hub.plots import plot_reward_and_kl, series
from rlhf_zoo.record import StageRecord, fingerprint, write_json

COMMITS = {name: character * 40 for name, character in zip(("sft", "reward", "data", "20", "40"), "abcde", strict=True)}
NASTY = (
    "<script>alert(1)</script> **bold** | [x](http://a.b) `tick` ![i](j) &amp; <b>\n# head\n\n- item $x$ \\| www.a.b"
)


def estimate(value: float, n: int = 644) -> dict:
    return {"value": value, "ci95": [value - 0.05, value + 0.05], "n": n}


def side(shift: float) -> dict:
    keys = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")
    return {key: estimate(round(0.5 + shift + place / 100, 4)) for place, key in enumerate(keys)}


def sample(prompt: str, number: int, completion: str, judge: float, kl: float = 4.0) -> dict:
    figures = {"reward": 0.25, "judge": judge, "kl": kl, "length": 7, "ended": True}
    return {
        "prompt": prompt,
        "sample": number,
        "sft": {"completion": " a plain line", **figures, "judge": 0.5, "kl": 0.0},
        "ppo": {"completion": completion, **figures},
    }


@pytest.fixture
def runs(tmp_path) -> Path:
    """A finished run of three stages and their evaluation."""
    resolved = {
        "recipe": {"simulated": True, "hub_token": "hf_abcdefghijklmnop"},
        "kl_coef": 0.1,
        "temperature": 1.0,
        "learning_rate": 3e-4,
        "max_grad_norm": math.inf,
        "hub_token": "hf_abcdefghijklmnop",
        "output_dir": "/home/someone/runs",
    }
    common = {
        "recipe": "tiny-world",
        "status": "finished",
        "seed": 3,
        "hub": "local",
        "versions": {"torch": "2.13.0", "rlhf_zoo": "0.1.0"},
        "seconds": 61.25,
        "created": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:01+00:00",
        "resolved": resolved,
        "dataset": {"repo": "local/tiny-world", "commit": COMMITS["data"], "fingerprint": "0"},
        "fingerprint": fingerprint(resolved),
    }
    sft = {"repo": "local/tiny-world-sft", "commit": COMMITS["sft"], "path": "/home/someone/sft"}
    reward = {"repo": "local/tiny-world-reward", "commit": COMMITS["reward"], "path": "/home/someone/reward"}

    def stage(name: str, parents: dict, rows: list[dict], steps: list[int], tags: dict) -> StageRecord:
        record = StageRecord(tmp_path / "runs" / name)
        repo = {"id": f"local/tiny-world-{name}", "commit": tags[max(tags)], "tags": tags}
        command = f"rlhf-zoo {name} tiny-world --seed 3 --hub_token hf_abcdefghijklmnop"
        record.write(**common, stage=name, parents=parents, repo=repo, command=command)
        for row in rows:
            record.append_metrics({"time": "2026-01-01T00:00:30+00:00", **row})
        for at in steps:
            folder = record.checkpoint_path(at)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"rlhf_zoo": {"score_mean": 0.75, "score_std": 2.5}}))
            record.mark_complete(folder)
        return record

    curve = [
        {"step": step, "episodes": 64 * step, "objective/score": step / 20, "objective/kl": step / 10, "kl_coef": 0.1}
        for step in range(10, 41, 10)
    ]
    stage(
        "ppo",
        {"sft": sft, "reward": reward},
        curve,
        [20, 40],
        {"step-000020": COMMITS["20"], "step-000040": COMMITS["40"], "best": COMMITS["40"]},
    )
    losses = [{"step": step, "loss": 3 / step, "eval_loss": 2.0, "eval_accuracy": 0.9} for step in (10, 20)]
    stage("sft", {}, losses, [20], {"step-000020": COMMITS["sft"]})
    stage("reward", {"sft": sft}, losses, [20], {"step-000020": COMMITS["reward"]})

    folder = tmp_path / "runs" / "eval"
    gold = {"name": "gold", "description": "The utility that is known exactly.", "is_training_reward": False}
    evaluation = {
        "schema": 1,
        "recipe": "tiny-world",
        "seed": 3,
        "split": "test",
        "prompts": 161,
        "samples_per_prompt": 4,
        "n": 644,
        "temperature": 1.0,
        "max_new_tokens": 20,
        "judge": gold,
        "judges": {"gold": {}, "lexicon": {"description": "Word lists.", "win_rate": estimate(0.8)}},
        "reward_model": {"accuracy": 0.93, "n": 1000, "ci95": [0.91, 0.945]},
        "sft": side(0),
        "ppo": side(1),
        "win_rate": {**estimate(0.9), "ties": 0.125},
        "control": {**estimate(0.5), "ties": 0.25},
        "seconds": 9.0,
    }
    write_json(folder / "evaluation.json", evaluation)
    rows = [sample(f"prompt {n // 2}", n % 2, f" fine number {n}", 0.9 + n / 1000) for n in range(20)]
    rows[0]["ppo"]["ended"] = False
    rows += [sample("the odd", 0, NASTY, -1.5), sample("a far", 0, " far away words", 0.95, kl=55.5)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "runs"


def head_and_body(readme: Path) -> tuple[dict, str]:
    _, head, body = readme.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), body


def html(body: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(body)


def cells(body: str, start: str) -> list[str]:
    line = next(line for line in body.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


GOLDEN = f"""\
---
license: apache-2.0
pipeline_tag: text-generation
library_name: transformers
base_model: local/tiny-world-sft
base_model_relation: finetune
datasets:
- local/tiny-world
tags:
- rlhf-zoo
- stage:ppo
- reward-model:local/tiny-world-reward
- simulated
model-index:
- name: tiny-world-ppo
  results:
  - task:
      type: text-generation
    dataset:
      name: local/tiny-world
      type: local/tiny-world
      split: test
      revision: {COMMITS["data"]}
    metrics:
    - type: reward
      value: 1.5
      name: reward (the proxy that PPO maximises)
    - type: judge
      value: 1.51
      name: judge
    - type: kl
      value: 1.52
      name: KL to SFT, nats per completion
    - type: length
      value: 1.53
      name: length, tokens
    - type: eos_rate
      value: 1.54
      name: ended by EOS, share
    - type: distinct_2
      value: 1.55
      name: distinct-2
    - type: repetition
      value: 1.56
      name: repetition
    - type: win_rate
      value: 0.9
      name: win rate over SFT
---
"""


def test_golden_front_matter(runs):
    assert make_card(runs / "ppo").read_text(encoding="utf-8").startswith(GOLDEN)


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_the_hubs_own_classes_read_the_metadata_and_write_it_back(runs, stage):
    from huggingface_hub import ModelCard

    readme = make_card(runs / stage)
    head, _ = head_and_body(readme)
    card = ModelCard.load(readme)
    assert len(card.data.eval_results) == len(head["model-index"][0]["results"][0]["metrics"])
    assert all(isinstance(result.metric_value, float) for result in card.data.eval_results)
    assert yaml.safe_load(card.data.to_yaml()) == head
    assert head["pipeline_tag"] == ("text-classification" if stage == "reward" else "text-generation")
    assert f"stage:{stage}" in head["tags"]
    assert head.get("base_model") == (None if stage == "sft" else "local/tiny-world-sft")


def test_needs_nothing_heavy(runs):
    code = (
        "import sys; from rlhf_zoo.hub.card import make_card; assert 'matplotlib' not in sys.modules\n"
        f"for stage in ('sft', 'reward', 'ppo'): make_card({str(runs)!r} + '/' + stage)\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'datasets', 'sklearn', 'matplotlib.pyplot'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert (runs / "ppo" / "README.md").is_file()


def test_ppo_card(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    headline = next(line for line in body.splitlines() if line.startswith("**Reward"))
    assert headline == (
        "**Reward 0.500 [0.450, 0.550] → 1.500 [1.450, 1.550], KL to SFT 1.520 [1.470, 1.570] nats per completion, "
        "win rate over SFT 0.900 [0.850, 0.950], length 0.530 [0.480, 0.580] → 1.530 [1.480, 1.580] tokens** "
        "(n = 644, seed 3)."
    )
    assert cells(body, "win rate of PPO over SFT")[2:] == ["0.900 [0.850, 0.950]", "644"]
    assert cells(body, "control")[1] == "0.500 [0.450, 0.550]"
    assert cells(body, "win rate by lexicon")[2] == "0.800 [0.750, 0.850]"
    assert "0.125 of the comparisons were ties" in body
    assert "**Judge:** gold. The utility that is known exactly. It is not the reward that PPO was trained on." in body
    assert "The reference π_ref is the SFT policy `local/tiny-world-sft`" in body
    assert "β is fixed; its last value was 0.100" in body and "temperature 1.0" in body
    assert "A simulated world" in body
    assert cells(body, "reward model |")[1:] == ["`local/tiny-world-reward`", f"`{COMMITS['reward']}`"]
    assert cells(body, "this model, step 40")[2] == f"`{COMMITS['40']}`"
    assert "![Reward and KL against the step](plots/reward_kl.png)" in body
    assert (runs / "ppo" / "plots" / "reward_kl.png").read_bytes()[:4] == b"\x89PNG"
    assert 'from_pretrained("local/tiny-world-ppo", revision="step-000040")' in body


def test_checkpoint_table_has_a_command_per_row(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    pull = "`rlhf-zoo pull local/tiny-world-ppo@step-0000{} --hub local`"
    assert cells(body, "20 |") == ["20", "1280", "1.000", "2.000", f"`{'d' * 10}`", pull.format(20)]
    assert cells(body, "40 |") == ["40", "2560", "2.000", "4.000", f"`{'e' * 10}`", pull.format(40)]
    assert "`rlhf-zoo pull local/tiny-world-ppo@best --hub local`" in body


def test_worst_and_farthest_samples_are_shown(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    first, worst, far = body.split("## Samples")[1].split("## Limits")[0].split("\n**")[1:]
    assert [row.split(" | ")[0] for row in first.splitlines() if row.startswith("| prompt ")][1:] == [
        f"| prompt {n}" for n in range(4)
    ]
    assert " fine number 0 *(no end)* |" in first and first.count("(no end)") == 1
    assert worst.startswith("The worst of all 22, by the judge**") and "| the odd |" in worst.splitlines()[4]
    assert "| a far |" in far.splitlines()[4] and "55.50" in far.splitlines()[4]


def test_completions_are_shown_as_text(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    page = html(body)
    for tag in ("<script", "<b>", '<img src="j"', "href", "<h1>head", "<strong>bold"):
        assert tag not in page
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "alert(1)" in row)
    assert row.count("<td>") == 6
    assert "&lt;script&gt;alert(1)&lt;/script&gt; **bold** | [x](http://a.b) `tick` ![i](j) &amp;amp; &lt;b&gt;" in row
    assert "↵# head↵↵- item $x$ \\| www.a.b" in row


@given(text=st.text(max_size=60))
@settings(deadline=None, max_examples=300)
def test_escaped_text_is_one_table_cell_of_that_text(text):
    page = html(f"| a | b |\n|---|---|\n| x {markdown.escape(text)} y | z |\n")
    shown = re.sub(r"\r\n|[\r\n\u2028\u2029]", "↵", text).replace("\t", " ")
    shown = "".join(character if character.isprintable() else "�" for character in shown)
    row = re.search(r"<tbody>\n<tr>\n<td>(.*)</td>\n<td>z</td>\n</tr>", page)
    assert row is not None
    assert " ".join(entities.unescape(row[1]).split()) == " ".join(f"x {shown} y".split())


@given(text=st.text(max_size=80))
@settings(deadline=None)
def test_nothing_ends_a_fence(text):
    tokens = MarkdownIt("commonmark").parse(f"{markdown.fence(text)}\n\nafter\n")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


def test_nothing_private_is_written(runs):
    for stage in ("sft", "reward", "ppo"):
        readme = make_card(runs / stage)
        for path in (readme, readme.parent / CARD_FILE):
            text = path.read_text(encoding="utf-8")
            assert "hf_abc" not in text and "/home/someone" not in text and str(runs) not in text
        assert "rlhf-zoo " + stage + " tiny-world --seed 3" in readme.read_text(encoding="utf-8")


def test_a_step_is_described_as_it_was(runs):
    head, body = head_and_body(make_card(runs / "ppo", out=runs / "out", step=20))
    assert "model-index" not in head and head["base_model"] == "local/tiny-world-sft"
    assert "checkpoint of **step 20**" in body and "step-000040" not in body and "@best" not in body
    assert "win rate and length: **not measured**" in body
    assert "at step 20: reward 1.000, KL 2.000 nats" in body
    assert "Not measured: there are no samples of this step." in body
    card = json.loads((runs / "out" / CARD_FILE).read_text())
    assert (card["step"], card["reward"], card["kl"], card["evaluation"]) == (20, 1.0, 2.0, None)
    assert [one["step"] for one in card["checkpoints"]] == [20]
    assert not (runs / "ppo" / "README.md").exists()


def test_the_step_being_saved_has_its_command_before_it_is_sent(runs):
    stage = StageRecord(runs / "ppo")
    stage.write(repo={"id": "local/tiny-world-ppo", "commit": None, "tags": {}})
    _, body = head_and_body(make_card(runs / "ppo", step=20))
    assert cells(body, "20 |")[-2:] == ["this one", "`rlhf-zoo pull local/tiny-world-ppo@step-000020 --hub local`"]
    _, body = head_and_body(make_card(runs / "ppo"))
    assert cells(body, "40 |")[-2:] == ["not published", "not published"]
    write_json(
        runs / "ppo" / "checkpoint-40" / "published.json", {"repo": "x", "commit": "f" * 40, "tag": "step-000040"}
    )
    _, body = head_and_body(make_card(runs / "ppo"))
    assert cells(body, "40 |")[-2] == f"`{'f' * 10}`"


def test_missing_figures_are_not_measured(tmp_path):
    for stage in ("sft", "reward", "ppo"):
        StageRecord(tmp_path / stage).write(stage=stage, status="running")
        head, body = head_and_body(make_card(tmp_path / stage))
        assert "model-index" not in head and "base_model" not in head and "simulated" not in head["tags"]
        assert "not measured" in body and "Curves over the steps: not measured." in body
        assert "This run is not finished (status: running)" in body
        assert not re.search(r"\b(None|nan|Undefined)\b", body)
        assert not (tmp_path / stage / "plots").exists()


def test_figures_that_are_not_finite_are_not_measured(runs):
    path = runs / "eval" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["ppo"]["kl"] = {"value": math.nan, "ci95": [math.nan, math.inf], "n": 644}
    evaluation["win_rate"] = None
    write_json(path, evaluation)
    head, body = head_and_body(make_card(runs / "ppo"))
    assert {"kl", "win_rate"}.isdisjoint(metric["type"] for metric in head["model-index"][0]["results"][0]["metrics"])
    assert cells(body, "KL to SFT")[2] == "not measured"
    assert "- Not measured: KL to SFT, nats per completion; win rate over SFT;" in body


def test_reward_card(runs):
    head, body = head_and_body(make_card(runs / "reward"))
    assert cells(body, "accuracy on held-out pairs")[1:] == ["0.930 [0.910, 0.945]", "1000"]
    assert cells(body, "mean of its score")[1] == "0.750" and cells(body, "standard deviation")[1] == "2.500"
    assert head["model-index"][0]["results"][0]["metrics"] == [
        {"type": "accuracy", "value": 0.93, "name": "accuracy on held-out pairs"}
    ]
    assert "PPO update" not in body and "AutoModelForSequenceClassification" in body


def test_reward_card_before_any_evaluation(runs):
    (runs / "eval" / "evaluation.json").unlink()
    _, body = head_and_body(make_card(runs / "reward"))
    assert cells(body, "accuracy on held-out pairs")[1] == "not measured"
    assert cells(body, "mean of its score")[1] == "0.750"
    report = {"score_mean": 1.5, "score_std": 2.0, "accuracy": 0.875, "n": 800, "ci95": [0.85, 0.9]}
    StageRecord(runs / "reward").write(reward_model=report)
    _, body = head_and_body(make_card(runs / "reward"))
    assert cells(body, "accuracy on held-out pairs")[1:] == ["0.875 [0.850, 0.900]", "800"]
    assert cells(body, "mean of its score")[1] == "1.500"
    _, body = head_and_body(make_card(runs / "reward", step=20))
    assert cells(body, "accuracy on held-out pairs")[1] == "not measured"
    assert cells(body, "mean of its score")[1] == "0.750"


def test_sft_from_a_base_model_names_it(runs):
    stage = StageRecord(runs / "sft")
    stage.write(resolved={"model_name_or_path": "acme/base-1b", "model_revision": "f" * 40})
    head, body = head_and_body(make_card(runs / "sft"))
    assert head["base_model"] == "acme/base-1b"
    assert cells(body, "base model")[1:] == ["`acme/base-1b`", f"`{'f' * 40}`"]
    stage.write(resolved={"model_name_or_path": "/models/base-1b"})
    assert "base_model" not in head_and_body(make_card(runs / "sft"))[0]


def test_sft_card(runs):
    head, body = head_and_body(make_card(runs / "sft"))
    assert cells(body, "validation perplexity")[1] == "7.389"
    assert cells(body, "training loss")[1] == "0.150"
    assert "kl" not in [metric["type"] for metric in head["model-index"][0]["results"][0]["metrics"]]
    assert "a plain line" in body and "far away" not in body


def test_a_judge_that_is_the_training_reward_is_called_that(runs):
    path = runs / "eval" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["judge"]["is_training_reward"] = True
    write_json(path, evaluation)
    _, body = head_and_body(make_card(runs / "ppo"))
    assert "This is the reward that PPO was trained on" in body


def test_an_evaluation_of_another_model_is_called_that(runs):
    evaluation = StageRecord(runs / "eval")
    evaluation.write(stage="eval", parents={"ppo": {"repo": "local/tiny-world-ppo", "commit": COMMITS["40"]}})
    assert "none of this run's" not in make_card(runs / "ppo").read_text()
    evaluation.write(parents={"ppo": {"repo": "local/tiny-world-ppo", "commit": "0" * 40}})
    assert f"is of commit `{'0' * 40}`, which is none of this run's" in make_card(runs / "ppo").read_text()


def test_license_adapter_and_real_hub(runs):
    stage = StageRecord(runs / "ppo")
    resolved = {**stage.read()["resolved"], "license": "cc-by-4.0", "use_peft": True, "simulated": False}
    stage.write(resolved=resolved, hub="https://huggingface.co")
    head, body = head_and_body(make_card(runs / "ppo"))
    assert head["license"] == "cc-by-4.0" and head["base_model_relation"] == "adapter"
    assert "simulated" not in head["tags"] and "simulated world" not in body
    assert "--hub https://huggingface.co" in body and "rlhf-zoo hub env" not in body


def test_equal_runs_give_equal_cards(runs):
    first, second = (make_card(runs / "ppo", out=runs / name).parent for name in ("a", "b"))
    names = sorted(path.relative_to(first) for path in first.rglob("*.*"))
    assert [str(name) for name in names] == ["README.md", "plots/reward_kl.png", CARD_FILE]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_card_json(runs):
    make_card(runs / "ppo")
    card = json.loads((runs / "ppo" / CARD_FILE).read_text())
    assert card["schema"] == 1 and card["repo"] == "local/tiny-world-ppo" and card["simulated"] is True
    assert card["parents"]["sft"] == {"repo": "local/tiny-world-sft", "commit": COMMITS["sft"]}
    assert card["evaluation"]["win_rate"]["value"] == 0.9 and card["evaluation"]["ppo"]["kl"]["value"] == 1.52
    assert card["checkpoints"][1] == {
        "step": 40, "tag": "step-000040", "commit": COMMITS["40"], "reward": 2.0, "kl": 4.0,
    }  # fmt: skip
    assert card["settings"]["kl_coef"] == 0.1
    assert card["prompts"] == [f"prompt {n}" for n in range(8)]


@pytest.mark.parametrize("stage", ["eval", "nothing", "."])
def test_only_stages_have_cards(runs, stage):
    with pytest.raises(ZooError, match="name the directory of a stage"):
        make_card(runs / stage)


def test_unknown_step(runs):
    with pytest.raises(ZooError, match="has no step 41: it has 10, 20, 30, 40"):
        make_card(runs / "ppo", step=41)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (0.0, "0.000"), (-0.12345, "-0.123"), (12.345, "12.35"), (644.04, "644.0"),
        (0.00012, "0.00012"), (123456.0, "1.23e+05"),
        (None, "not measured"), (math.nan, "not measured"), ("NaN", "not measured"), (True, "not measured"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert markdown.number(value) == text


def test_estimates_without_interval_say_so():
    assert markdown.estimate({"value": 0.5}) == "0.500 (interval not measured)"
    assert markdown.estimate({"value": 0.5, "ci95": [0.25, 0.75]}) == "0.500 [0.250, 0.750]"
    assert markdown.estimate(None) == markdown.estimate({}) == "not measured"


def test_series_skip_what_is_no_number(tmp_path):
    rows = [{"step": 1, "x": 1}, {"step": 2, "x": None}, {"step": 3}, {"step": 4, "x": math.nan}, {"step": 5, "x": 2.5}]
    assert series(rows, "x") == ([1, 5], [1.0, 2.5])
    assert not plot_reward_and_kl(rows, tmp_path / "plot.png") and not (tmp_path / "plot.png").exists()
