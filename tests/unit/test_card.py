"""Cards state what the run directory holds, mark missing figures, and escape text that is not ours."""

import html as entities
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from card_run import COMMITS, cells, head_and_body
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import write_json
from rlhf_zoo.publishing.cards import markdown
from rlhf_zoo.publishing.cards.card import CARD_FILE, make_card
from rlhf_zoo.publishing.cards.commands import training_command
from rlhf_zoo.publishing.cards.facts import StageFacts
from rlhf_zoo.publishing.cards.markdown import SOURCE
from rlhf_zoo.publishing.cards.report import judge_notes
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.usefixtures("no_plots")

PAGE = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def render_html(body: str) -> str:
    return PAGE.render(body)


def make_front_matter(kind: str, stage: str, config: str, split: str, metrics: list[dict]) -> dict:
    dataset = {"name": f"tiny-world ({config} {split})", "type": "local/tiny-world", "config": config, "split": split}
    task, tag = {
        "sft": ("Language modeling", "sft"), "reward": ("Ranking pairs of answers", "reward-model"),
        "ppo": ("Answers, against the SFT model", "ppo"),
    }[stage]  # fmt: skip
    dataset |= {"revision": COMMITS["data"]}
    result = {"task": {"type": kind, "name": task}, "dataset": dataset, "metrics": metrics}
    return {
        "language": "en",
        "license": "apache-2.0", "pipeline_tag": kind, "library_name": "transformers", "datasets": ["local/tiny-world"],
        "tags": ["rlhf", tag, "trl", "rlhf-zoo", f"stage:{stage}", "simulated"],
        "model-index": [{"name": f"tiny-world-{stage}", "results": [result]}],
    }  # fmt: skip


def test_card_front_matter_matches_golden(runs):
    base = {"base_model": "local/tiny-world-sft", "base_model_relation": "finetune"}
    readme = make_card(runs / "ppo")
    head, _ = head_and_body(readme)
    measured = {
        "win_rate": (0.9, "win rate over SFT, by gold"), "kl": (1.52, "KL to SFT, nats per completion"),
        "reward": (1.5, "reward (the proxy that PPO maximizes)"),
        "length": (1.53, "length, tokens"), "judge": (1.51, "judge"), "eos_rate": (1.54, "ended with EOS, share"),
        "distinct_2": (1.55, "distinct-2"), "repetition": (1.56, "repetition"),
    }  # fmt: skip
    metrics = [{"type": kind, "value": value, "name": name} for kind, (value, name) in measured.items()]
    expected = {**make_front_matter("text-generation", "ppo", "prompts", "test", metrics), **base}
    expected["tags"].insert(5, "reward-model:local/tiny-world-reward")
    assert head == expected
    assert head["model-index"][0]["results"][0]["metrics"] == metrics, "the win rate is first"
    loaded = ModelCard.load(readme)  # the Hub's own class reads it, and writes it back
    assert len(loaded.data.eval_results) == 8 and yaml.safe_load(loaded.data.to_yaml()) == head

    head, _ = head_and_body(make_card(runs / "reward"))
    accuracy = [{"type": "accuracy", "value": 0.93, "name": "accuracy on held-out pairs"}]
    assert head == {**make_front_matter("text-classification", "reward", "preferences", "test", accuracy), **base}
    head, _ = head_and_body(make_card(runs / "sft"))
    tasks = [(result["task"]["name"], result["metrics"][0]["type"]) for result in head["model-index"][0]["results"]]
    assert tasks == [("Language modeling", "loss"), ("Answers to held-out prompts", "reward")]
    # SFT policies are published, and have a card, before anything is evaluated.
    (runs / "eval" / "evaluation.json").unlink()
    head, _ = head_and_body(make_card(runs / "sft"))
    metrics = [
        {"type": "loss", "value": 2.0, "name": "loss, nats per token"},
        {"type": "perplexity", "value": 7.39, "name": "perplexity, per token"},
    ]
    assert head == make_front_matter("text-generation", "sft", "lines", "validation", metrics)


def test_make_card_imports_no_heavy_packages(runs):
    code = (
        "import sys; from rlhf_zoo.publishing.cards.card import make_card; assert 'matplotlib' not in sys.modules\n"
        f"for stage in ('sft', 'reward', 'ppo'): make_card({str(runs)!r} + '/' + stage)\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'datasets', 'sklearn', 'matplotlib.pyplot'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert (runs / "ppo" / "README.md").is_file()


def test_card_reports_every_kind_of_judge(runs):
    """A pairwise judge has no mean score; the card flags judges that contradict labels or were the reward."""
    path = runs / "eval" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    half = {"value": 0.5, "ci95": [0.4, 0.6], "n": 644}
    check = {"accuracy": {"value": 0.2, "ci95": [0.1, 0.3], "n": 50}, "unfit": "The judge contradicts the labels."}
    evaluation["judges"] |= {
        "llm:m": {"description": "A model.", "win_rate": half, "usage": {"cost": 0.25}, "orders": {"agreement": half}},
        "reward:<b>": {"description": "Another.", "sft": half, "ppo": half, "win_rate": half, "check": check},
    }
    apart = {"value": 0.3, "ci95": [0.1, 0.5], "n": 50}
    shared = {"correlation": half, "judge_errs": half, "where_reward_errs": half, "excess": apart, "independent": False}
    right = {"accuracy": {"value": 0.9, "ci95": [0.8, 1.0], "n": 50}, "unfit": None}
    evaluation["judge"]["check"] = {
        **right, "own": {**right, "with_reward": shared}, "same_labels": False, "independent": False,
    }  # fmt: skip
    evaluation["judges"]["classifier"] = {"win_rate": half, "description": "A third.", "check": {"same_labels": True}}
    evaluation["votes"] = {"u/v": {"description": "Votes.", "win_rate": None, "problem": "u/v holds no votes."}}
    evaluation["agreement"] = {"sft": half, "ppo": None, "same_side": half}
    path.write_text(json.dumps(evaluation))
    _, body = head_and_body(make_card(runs / "ppo"))
    assert "It is not the reward that PPO was trained on." in body
    assert cells(body, "win rate by llm:m")[2] == "0.500 [0.400, 0.600]" and "second judge llm:m |" not in body
    assert "It judges pairs in both orders, and agrees with itself on 0.500 [0.400, 0.600] of them. Cost: 0.25." in body
    assert cells(body, "second judge reward:&#60;b&#62;")[1] == "0.500 [0.400, 0.600]"
    assert "Another. **The judge contradicts the labels.**" in body
    assert "It orders 0.900 [0.800, 1.000] of 50 labeled pairs correctly." in body
    assert "Of 50 labeled pairs of the policies' own outputs, it orders 0.900" in body
    assert "It is not independent of the reward model: it shares its errors" in body
    assert "A third. **Same labels:** it was trained on the reward model's labels and shares" in body
    assert cells(body, "win rate by votes:u/v")[2] == "not measured" and "Votes. u/v holds no votes." in body
    assert cells(body, "reward and judge prefer the same")[2] == "0.500 [0.400, 0.600]"
    assert cells(body, "rank correlation of reward and judge")[1:3] == ["0.500 [0.400, 0.600]", "not measured"]
    evaluation["judge"]["is_training_reward"] = True
    write_json(path, evaluation)
    assert "This is the reward that PPO was trained on" in make_card(runs / "ppo").read_text()


@pytest.mark.parametrize(("lenient", "is_flagged"), [((-0.01, 0.03), True), ((0.01, 0.05), False)])
def test_judge_notes_flag_gain_seen_by_strict_reading_only(lenient, is_flagged):
    apart = {"strict": {"value": 0.2, "ci95": [0.1, 0.3]}, "lenient": {"value": 0.02, "ci95": list(lenient)}}
    answers = {reading: {"difference": difference} for reading, difference in apart.items()}
    notes = str(judge_notes({"checks_answers": True, "answers": answers}))
    assert "By the strict reading the policy gains 0.200 [0.100, 0.300], by the lenient one 0.020" in notes
    assert ("**Only the strict reading shows a gain" in notes) is is_flagged


def test_ppo_card_states_figures_settings_and_commands(runs, with_plots):
    _, body = head_and_body(make_card(runs / "ppo"))
    assert [cells(body, f"**{name}**")[1:] for name in ("Win rate over SFT", "KL to SFT", "Reward")] == [
        ["0.50\N{NO-BREAK SPACE}¹", "**0.90** (0.85–0.95)"],
        ["0.52", "**1.52** (1.47–1.57)"], ["0.50", "**1.50** (1.45–1.55)"],
    ]  # fmt: skip
    headline = [cells(body, name)[1:] for name in ("reward (", "KL to SFT", "win rate over SFT", "length")]
    assert headline == [
        ["0.500 [0.450, 0.550]", "1.500 [1.450, 1.550]", "1.250 [1.200, 1.300]"],
        ["0.520 [0.470, 0.570]", "1.520 [1.470, 1.570]", ""],
        ["", "0.900 [0.850, 0.950]", ""],
        ["0.530 [0.480, 0.580]", "1.530 [1.480, 1.580]", "-0.500 [-0.550, -0.450]"],
    ]
    assert cells(body, "control")[1] == "0.500 [0.450, 0.550]"
    assert cells(body, "win rate by lexicon")[2] == "0.800 [0.750, 0.850]"
    assert "0.125 of the comparisons were ties" in body
    assert "**Judge:** gold. The utility that is known exactly. It is not the reward that PPO was trained on." in body
    assert "The reference π_ref is the SFT policy `local/tiny-world-sft`" in body
    assert "It was trained on the `train` split, configuration `prompts`, of `local/tiny-world`." in body
    assert "β is fixed at 0.100." in body and "temperature 1.0" in body
    assert "Simulated data" in body
    assert cells(body, "reward model |")[1:] == ["`local/tiny-world-reward`", f"`{COMMITS['reward']}`"]
    assert cells(body, "this model, step 40")[2] == f"`{COMMITS['40']}`"
    assert "![Reward and KL against the step](plots/reward_kl.png)" in body
    assert (runs / "ppo" / "plots" / "reward_kl.png").read_bytes()[:4] == b"\x89PNG"
    assert "rlhf-zoo pull local/tiny-world-ppo@step-000040 --hub local --output_dir tiny-world-ppo\n" in body
    assert 'generate = pipeline("text-generation", model="./tiny-world-ppo")' in body
    assert "print(generate(prompt, do_sample=True, top_k=0, max_new_tokens=20)" in body, "as the evaluation sampled"


def test_card_checkpoint_table_lists_tags(runs):
    shutil.rmtree(runs / "ppo" / "checkpoint-20")  # pruned after it was sent
    _, body = head_and_body(make_card(runs / "ppo"))
    assert cells(body, "20 |") == ["20", "1280", "1.000", "2.000", "`step-000020`", f"`{'d' * 10}`"]
    assert cells(body, "40 |") == ["40", "2560", "2.000", "4.000", "`step-000040`", f"`{'e' * 10}`"]
    assert "by its tag: `rlhf-zoo pull local/tiny-world-ppo@step-000040 --hub local`" in body
    assert "`rlhf-zoo pull local/tiny-world-ppo@best --hub local`" in body


def test_card_shows_worst_and_farthest_samples(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    first, worst, far = body.split("### Samples")[1].split("</details>")[0].split("\n**")[1:]
    assert [row.split(" | ")[0] for row in first.splitlines() if row.startswith("| prompt ")][1:] == [
        f"| prompt {n}" for n in range(4)
    ]
    assert " fine number 0 *(no end)* |" in first and first.count("(no end)") == 1
    assert worst.startswith("The worst of all 22, by the judge**") and "| the odd |" in worst.splitlines()[4]
    assert "| a far |" in far.splitlines()[4] and "55.50" in far.splitlines()[4]


def test_card_escapes_completions(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    page = render_html(body)
    for tag in ("<script", "<b>", '<img src="j"', 'http://a.b"', "<h1>head", "<strong>bold"):
        assert tag not in page
    guides = {f"{SOURCE}/README.md#install", f"{SOURCE}/docs/cards.md"}
    assert set(re.findall('href="([^"]*)"', page)) == {"rlhf_card.json", "metrics.jsonl"} | guides
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "alert(1)" in row)
    assert row.count("<td>") == 6
    assert "&lt;script&gt;alert(1)&lt;/script&gt; **bold** | [x](http://a.b) `tick` ![i](j) &amp;amp; &lt;b&gt;" in row
    assert "↵# head↵↵- item $x$ \\| www.a.b" in row


MARKS = ["_em_ __strong__", "*em* **strong**", "~~gone~~", "a | b", "[x]: /y", "`code`", "<i>"]


@given(text=st.text(max_size=60) | st.lists(st.sampled_from(MARKS), max_size=4).map(" ".join))
@settings(deadline=None)
def test_escape_keeps_text_within_one_table_cell(text):
    page = render_html(f"| a | b |\n|---|---|\n| x {markdown.escape(text)} y | z |\n")
    shown = re.sub(r"\r\n|[\r\n\u2028\u2029]", "↵", text).replace("\t", " ")
    shown = "".join(character if character.isprintable() else "�" for character in shown)
    row = re.search(r"<tbody>\n<tr>\n<td>(.*)</td>\n<td>z</td>\n</tr>", page)
    assert row is not None
    assert not re.search("<(?!/?t[dr])", row[1])
    assert " ".join(entities.unescape(row[1]).split()) == " ".join(f"x {shown} y".split())


@given(text=st.text(max_size=80))
@settings(deadline=None)
def test_no_text_closes_a_fence(text):
    tokens = MarkdownIt("commonmark").parse(f"{markdown.fence(text)}\n\nafter\n")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


def test_card_contains_no_tokens_or_local_paths(runs):
    for stage in ("sft", "reward", "ppo"):
        readme = make_card(runs / stage)
        for path in (readme, readme.parent / CARD_FILE):
            text = path.read_text(encoding="utf-8")
            assert "hf_abc" not in text and "/home/someone" not in text and str(runs) not in text
        assert "rlhf-zoo " + stage + " tiny-world --seed 3" in readme.read_text(encoding="utf-8")


def test_card_of_earlier_step_shows_that_step_only(runs):
    head, body = head_and_body(make_card(runs / "ppo", out=runs / "out", step=20))
    assert "model-index" not in head and head["base_model"] == "local/tiny-world-sft"
    assert "This is **step 20**" in body and "step-000040" not in body and "@best" not in body
    figures = "Reward, KL, judge and win rate on held-out prompts, samples and a verdict"
    pull = "`rlhf-zoo pull local/tiny-world-ppo@main --hub local`"
    assert f"{figures} are on the card of the evaluated step, `main`: {pull}." in body
    assert "- **Not measured:** human preferences; other seeds; safety, bias and truthfulness." in body
    assert "Figures on held-out prompts: not evaluated." in body and "| win rate" not in body
    assert "1.500 [" not in body and "Verdict" not in body
    assert "at step 20: reward 1.000, KL 2.000 nats" in body and "seconds" not in body
    assert "Not evaluated: there are no samples of this step." in body
    assert "reward 0.500 → 1.000." in body
    card = json.loads((runs / "out" / CARD_FILE).read_text())
    assert (card["step"], card["reward"], card["kl"], card["evaluation"]) == (20, 1.0, 2.0, None)
    assert [row["step"] for row in card["checkpoints"]] == [20]
    assert not (runs / "ppo" / "README.md").exists()


def test_card_shows_pull_command_of_step_not_yet_pushed(runs):
    stage = StageRecord(runs / "ppo")
    stage.write(repo={"id": "local/tiny-world-ppo", "commit": None, "tags": {}})
    _, body = head_and_body(make_card(runs / "ppo", step=20))
    assert cells(body, "20 |")[-2:] == ["`step-000020`", "this one"]
    assert "`rlhf-zoo pull local/tiny-world-ppo@step-000020 --hub local`" in body
    _, body = head_and_body(make_card(runs / "ppo"))
    assert cells(body, "40 |")[-1] == "not published" and "pull local/tiny-world-ppo@step" not in body
    published = {"hub": "local", "repo": "local/tiny-world-ppo", "commit": "f" * 40, "tag": "step-000040"}
    write_json(runs / "ppo" / "checkpoint-40" / "published.json", published)
    _, body = head_and_body(make_card(runs / "ppo"))
    assert cells(body, "40 |")[-1] == f"`{'f' * 10}`"


def test_card_marks_missing_figures_as_not_measured(tmp_path, with_plots):
    for stage in ("sft", "reward", "ppo"):
        StageRecord(tmp_path / stage).write(stage=stage, status="running")
        head, body = head_and_body(make_card(tmp_path / stage))
        assert "model-index" not in head and "base_model" not in head and "simulated" not in head["tags"]
        assert "not measured" in body and "Curves over the steps: not measured." in body
        assert "This run is not finished (status: running)" in body
        assert not re.search(r"\b(None|nan|Undefined)\b", body)
        assert not (tmp_path / stage / "plots").exists()


def test_card_marks_nonfinite_figures_as_not_measured(runs):
    path = runs / "eval" / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["ppo"]["kl"] = {"value": math.nan, "ci95": [math.nan, math.inf], "n": 644}
    evaluation["win_rate"] = None
    write_json(path, evaluation)
    head, body = head_and_body(make_card(runs / "ppo"))
    assert {"kl", "win_rate"}.isdisjoint(metric["type"] for metric in head["model-index"][0]["results"][0]["metrics"])
    assert cells(body, "KL to SFT")[2] == "not measured" and cells(body, "**KL to SFT")[2] == "**not measured**"
    assert "- **Not measured:** KL to SFT, nats per completion; win rate over SFT;" in body


def test_reward_card_reports_best_of_n_ties_and_hard_pairs(runs):
    """Figures that the run lacks are marked as not measured."""
    stage, estimate = StageRecord(runs / "reward"), {"value": 0.5, "ci95": [0.25, 0.75], "n": 8}
    report = {"accuracy": 0.875, "n": 800, "ci95": [0.85, 0.9]}
    body = head_and_body(make_card(stage.path))[1]
    assert cells(body, "**best of 4**")[1] == cells(body, "**ties**")[1] == "not measured"
    assert "best of 4; ties; " in body and "by the true utility" not in body
    best = {"candidates": 4, "chance": 0.25, **estimate, "borrowed": 0.125, "gold": {**estimate, "value": 0.625}}
    quarter = {"low": 0.0, "high": 0.25, **estimate, "gold": 0.875}
    hard = {
        "by_overlap": [quarter],
        "by_strength": None,
        "same_length": {**estimate, "gold": 1.0},
        "chosen_longer": None,
    }
    tie = {"n": 3, "apart": {**estimate, "n": 3}, "others": {**estimate, "value": 2.0, "n": 5}, "ratio": 0.25}
    stage.write(reward_model={**report, "best_of_n": best, "ties": tie, "hard": hard})
    body = head_and_body(make_card(stage.path))[1]
    row = cells(body, "**best of 4**")
    assert row[0].endswith("(by chance: 0.250); by the true utility: 0.625") and row[1:3] == [
        "0.500 [0.250, 0.750]", "8",
    ]  # fmt: skip
    assert "for a similar one (a share of 0.125 of the rejected candidates)" in body
    assert cells(body, "**ties**")[:3] == [
        "**ties**: difference of the two scores; for other pairs 2.000 [0.250, 0.750]", "0.500 [0.250, 0.750]", "3",
    ]  # fmt: skip
    table = body.split("| pairs that are not ties, ordered correctly |")[1].split("\n\n")[0].splitlines()
    assert table == [
        " by the true utility | by this model | n |", "|---|---|---|---|",
        "| words in common: 0.000 to 0.250 | 0.875 | 0.500 [0.250, 0.750] | 8 |",
        "| lengths within 10% of each other | 1.000 | 0.500 [0.250, 0.750] | 8 |",
    ]  # fmt: skip


def test_reward_card_without_evaluation_uses_training_report(runs, with_plots):
    (runs / "eval" / "evaluation.json").unlink()
    _, body = head_and_body(make_card(runs / "reward"))
    assert cells(body, "**accuracy**")[1] == "not measured"
    assert cells(body, "mean of its score")[1] == "0.750"
    report = {"score_mean": 1.5, "score_std": 2.0, "accuracy": 0.875, "n": 800, "ci95": [0.85, 0.9]}
    StageRecord(runs / "reward").write(reward_model=report)
    _, body = head_and_body(make_card(runs / "reward"))
    assert cells(body, "**accuracy**")[1:] == ["0.875 [0.850, 0.900]", "800"]
    assert cells(body, "mean of its score")[1] == "1.500"
    readme = make_card(runs / "reward", step=20)
    head, body = head_and_body(readme)
    assert (
        cells(body, "**accuracy**")[1] == "–"
        and "are on the card of the evaluated step" in body
        and "model-index" not in head
    )
    assert "- **Not measured:** agreement with people beyond its pairs; accuracy on PPO's completions; other" in body
    assert cells(body, "mean of its score")[1] == "0.750"
    assert json.loads((readme.parent / CARD_FILE).read_text())["reward_model"] is None
    assert {path.stem for path in (readme.parent / "plots").glob("*.png")} == {"loss", "accuracy"}


def test_card_on_huggingface_hub_links_repos_and_license(runs):
    stage = StageRecord(runs / "ppo")
    resolved = {**stage.read()["resolved"], "license": "cc-by-4.0", "simulated": False}
    stage.write(resolved=resolved, hub="https://huggingface.co")
    head, body = head_and_body(make_card(runs / "ppo"))
    assert head["license"] == "cc-by-4.0" and "simulated" not in head["tags"] and "Simulated data" not in body
    assert "--hub https://huggingface.co" in body and "output_dir" not in body
    assert (
        'model="local/tiny-world-ppo", revision="step-000040")' in body and "pip install torch transformers\n" in body
    )
    assert "[SFT model](https://huggingface.co/local/tiny-world-sft)" in body
    assert "[data](https://huggingface.co/datasets/local/tiny-world)" in body
    _, body = head_and_body(make_card(runs / "ppo", step=20))
    assert "step, `main`: [local/tiny-world-ppo](https://huggingface.co/local/tiny-world-ppo)." in body


@pytest.mark.parametrize("hub", ["local", "https://huggingface.co"])
def test_card_code_loads_adapter_on_base_model(runs, hub):
    stage = StageRecord(runs / "ppo")
    stage.write(resolved={**stage.read()["resolved"], "use_peft": True}, hub=hub)
    head, _ = head_and_body(make_card(runs / "ppo"))
    assert head["library_name"] == "transformers", "the checkpoint holds no adapter, whatever the settings say"
    for folder in stage.checkpoints():
        (folder / "adapter_config.json").write_text("{}")
    head, body = head_and_body(make_card(runs / "ppo"))
    assert head["library_name"] == "peft" and head["base_model_relation"] == "adapter"
    assert head["base_model"] == "local/tiny-world-sft"
    assert "Its weights are a LoRA adapter for `local/tiny-world-sft`." in body
    code = re.search(r"```python\n(.*?)```", body, re.DOTALL)[1]
    if hub == "local":
        fetch = f"rlhf-zoo pull local/tiny-world-sft@{COMMITS['sft']} --hub local --output_dir tiny-world-sft\n"
        assert fetch in body
        assert 'base = AutoModelForCausalLM.from_pretrained("./tiny-world-sft")' in code
        assert 'PeftModel.from_pretrained(base, "./tiny-world-ppo")' in code
    else:
        assert f'base = AutoModelForCausalLM.from_pretrained("local/tiny-world-sft", revision="{"a" * 40}")' in code
        assert 'PeftModel.from_pretrained(base, "local/tiny-world-ppo", revision="step-000040")' in code
    for folder in stage.checkpoints():
        (folder / "COMPLETE").unlink()
    assert head_and_body(make_card(runs / "ppo", step=20))[0]["library_name"] == "peft", "as it is while it is saved"


@pytest.mark.parametrize("hub", ["local", "https://huggingface.co"])
def test_card_of_merged_branch_describes_full_model(runs, hub):
    stage = StageRecord(runs / "ppo")
    stage.write(resolved={**stage.read()["resolved"], "use_peft": True, "push_merged": True}, hub=hub)
    for folder in stage.checkpoints():
        (folder / "adapter_config.json").write_text("{}")
    pull = f"rlhf-zoo pull local/tiny-world-ppo@merged --hub {hub}"
    _, body = head_and_body(make_card(runs / "ppo"))
    assert f"The branch `merged` has the adapter merged into that model: `{pull}`" in body
    _, body = head_and_body(make_card(runs / "ppo", step=20))
    assert pull not in body
    readme = make_card(runs / "ppo", merged=True)
    head, body = head_and_body(readme)
    assert head["library_name"] == "transformers" and head["base_model_relation"] == "finetune"
    assert "This is the branch `merged`: the adapter of step 40 merged into" in body and "PeftModel" not in body
    if hub == "local":
        assert f"{pull} --output_dir tiny-world-ppo\n" in body
    else:
        assert 'model="local/tiny-world-ppo", revision="merged")' in body
    assert json.loads((readme.parent / CARD_FILE).read_text())["merged"] is True


def test_card_of_unpublished_run_has_no_hub_commands(runs):
    for stage in ("sft", "reward", "ppo"):
        record = StageRecord(runs / stage)
        parents = {role: {"repo": None, "commit": None} for role in record.read()["parents"]}
        data = {"repo": None, "commit": None, "fingerprint": "0"}
        record.write(repo=None, parents=parents, dataset=data, command="rlhf-zoo run tiny-world --seed 3")
        head, body = head_and_body(make_card(runs / stage))
        assert "base_model" not in head and "datasets" not in head
        assert "rlhf-zoo pull" not in body and "```python" not in body and "rlhf-zoo reproduce" not in body
        assert cells(body, "data set")[1:] == ["not published", "not published"]
        assert cells(body, "this model")[1:] == ["not published", "not published"]
        assert re.findall(r"```sh\n(.*?)```", body, re.DOTALL) == ["rlhf-zoo run tiny-world --seed 3\n"]
    # A path on this machine is not a repository either.
    parents = {"sft": {"repo": None, "commit": None, "path": "/home/someone/model"}}
    record.write(parents=parents, dataset={"repo": "/home/someone/data", "commit": None})
    head, body = head_and_body(make_card(runs / "ppo"))
    assert "/home/someone" not in body and "datasets" not in head
    assert cells(body, "data set")[1] == "not published" and cells(body, "SFT policy")[1] == "not published"


# Lineage


def test_card_lineage_reaches_base_model(runs):
    _, body = head_and_body(make_card(runs / "ppo"))
    assert cells(body, "base model")[1] == "none: random initial weights"
    sft = StageRecord(runs / "sft")
    sft.write(resolved={"model_name_or_path": "acme/base-1b", "model_revision": "f" * 40})
    for stage in ("sft", "reward", "ppo"):
        head, body = head_and_body(make_card(runs / stage))
        assert cells(body, "base model")[1:] == ["`acme/base-1b`", f"`{'f' * 40}`"]
        assert head["base_model"] == ("acme/base-1b" if stage == "sft" else "local/tiny-world-sft")
    rows = body.split("### Lineage")[1].split("### What")[0].splitlines()
    names = [row.split(" | ")[0].strip("| ") for row in rows if row.startswith("| ")][1:]
    assert names == ["base model", "SFT policy", "reward model", "data set", "this model, step 40"]
    sft.write(resolved={"model_name_or_path": "/models/base-1b"})
    assert "base_model" not in head_and_body(make_card(sft.path))[0]
    sft.run_file.unlink()
    assert cells(head_and_body(make_card(runs / "ppo"))[1], "base model")[1] == "not recorded"


def test_card_json_holds_lineage_evaluation_and_checkpoints(runs):
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
def test_make_card_rejects_other_folders_and_unknown_steps(runs, stage):
    with pytest.raises(ZooError, match="name the directory of a stage"):
        make_card(runs / stage)
    with pytest.raises(ZooError, match="has no step 41: it has 10, 20, 30, 40"):
        make_card(runs / "ppo", step=41)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("rlhf-zoo run tiny-world --output_dir /home/me/runs/x --seed 2", "rlhf-zoo run tiny-world --seed 2"),
        ("rlhf-zoo run tiny-world --overwrite_repo --seed 2", "rlhf-zoo run tiny-world --seed 2"),
        ("rlhf-zoo run /home/me/my-recipe --output-dir=/tmp/x", "rlhf-zoo run my-recipe"),
        ("rlhf-zoo ppo r --value_model=/home/me/critic", "rlhf-zoo ppo r --value_model=critic"),
        (["rlhf-zoo", "run", "r", "--a", "two words"], "rlhf-zoo run r --a 'two words'"),
        (["rlhf-zoo", "run", "r", "--token", "hf_abcdefghijk"], "rlhf-zoo run r --token hf_***"),
    ],
)
def test_training_command_omits_local_folders_and_tokens(command, shown):
    assert training_command(StageFacts(Path("x"), {"stage": "ppo", "command": command}, [], None)) == shown
