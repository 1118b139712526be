"""Card contents: data, the rule that chose the checkpoint, rewards, signs of hacking, and benchmarks."""

import html as entities
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from card_run import COMMITS, cells, estimate, head_and_body, over_training, reward_report

from rlhf_zoo.fileio import read_json, write_json
from rlhf_zoo.publishing.cards import markdown
from rlhf_zoo.publishing.cards.card import CARD_FILE, make_card
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.usefixtures("no_plots")

# Chosen checkpoint


def test_card_names_rule_that_chose_checkpoint(runs):
    record = StageRecord(runs / "ppo")
    record.write(chosen={"step": 40, "rule": "last", "metric": None, "value": None})
    _, body = head_and_body(make_card(runs / "ppo"))
    assert "rule is `last`: step **40** is the last checkpoint; no metric was used." in body
    assert "`main` and the tag `best`: `rlhf-zoo pull local/tiny-world-ppo@best --hub local`" in body
    record.append_metrics({"step": 20, "eval_rewards/gold": 1.25})
    record.write(chosen={"step": 20, "rule": "best", "metric": "eval_rewards/gold", "value": 1.25})
    readme = make_card(runs / "ppo")
    _, body = head_and_body(readme)
    assert "rule is `best`: step **20** has the best `eval_rewards/gold` on the validation split (1.250)" in body
    assert cells(body, "this model, step 20")[2] == f"`{COMMITS['20']}`"
    assert "at step 20: reward 1.000, KL 2.000 nats" in body, "figures are of the weights that are published"
    assert "step-000020 --hub local --output_dir" in body and "reproduce local/tiny-world-ppo@step-000020" in body
    card = json.loads((readme.parent / CARD_FILE).read_text())
    assert (card["step"], card["tag"], card["reward"], card["kl"]) == (20, "step-000020", 1.0, 2.0)
    assert card["chosen"] == {"step": 20, "rule": "best", "metric": "eval_rewards/gold", "value": 1.25}
    _, body = head_and_body(make_card(runs / "ppo", out=runs / "out", step=40))
    assert "rule is" not in body and json.loads((runs / "out" / CARD_FILE).read_text())["chosen"] is None


@pytest.mark.parametrize(
    ("parent", "other"),
    [
        ({"path": "checkpoint-20"}, None),
        ({"commit": COMMITS["40"]}, None),
        ({"path": "checkpoint-40"}, "step 40"),
        ({"fingerprint": "9" * 64}, "other settings (fingerprint 9999999999)"),
        ({"repo": "elsewhere/tiny-world-ppo", "commit": "0" * 40}, None),
        ({"weights": "a" * 64, "path": None, "fingerprint": "of another recipe"}, None),
        ({"weights": "b" * 64, "path": "checkpoint-20"}, "other weights (sha256 bbbbbbbbbb)"),
        ({"weights": "b" * 64, "path": "checkpoint-40"}, "step 40"),
    ],
)
def test_card_omits_evaluation_of_other_weights(runs, parent, other):
    """The hash of the weights decides, not repository or commit."""
    chosen = {"step": 20, "rule": "best", "metric": "eval_x", "value": 1.0}
    StageRecord(runs / "ppo").write(chosen=chosen, weights="a" * 64)
    StageRecord(runs / "eval").write(stage="eval", parents={"ppo": parent})
    text = make_card(runs / "ppo").read_text()
    assert ("1.500 [1.450, 1.550]" in text) is ("model-index" in text) is (other is None)
    assert (f"is of {other}, not of these weights, so its figures are not shown" in text) is (other is not None)


def test_card_ignores_commit_of_another_namespace(runs):
    published = {"hub": "local", "repo": "elsewhere/tiny-world-ppo", "commit": "9" * 40, "tag": "step-000020"}
    write_json(runs / "ppo" / "checkpoint-20" / "published.json", published)
    make_card(runs / "ppo")
    rows = json.loads((runs / "ppo" / CARD_FILE).read_text())["checkpoints"]
    assert [row["commit"] for row in rows] == [COMMITS["20"], COMMITS["40"]]


def test_card_of_interrupted_run_omits_earlier_evaluation(runs):
    StageRecord(runs / "ppo").write(status="interrupted", chosen={"step": 20, "rule": "last"})
    StageRecord(runs / "ppo").append_metrics({"step": 50, "objective/score": 9.0, "objective/kl": 9.0})
    StageRecord(runs / "eval").write(stage="eval", status="finished")
    head, body = head_and_body(make_card(runs / "ppo"))
    assert "not finished (status: interrupted); its last logged step is 50" in body
    assert "of an earlier run, not of these weights" in body and "model-index" not in head
    assert cells(body, "this model, step 40")[2] == f"`{COMMITS['40']}`" and "rule is" not in body
    assert "at step 40: reward 2.000, KL 4.000 nats" in body


# Rewards and KL


def card_body_with_settings(runs: Path, **changes) -> str:
    stage = StageRecord(runs / "ppo")
    stage.write(resolved={**stage.read()["resolved"], **changes})
    return head_and_body(make_card(runs / "ppo"))[1]


def test_card_notes_rewards_are_not_centered(runs):
    note = "PPO did not center these rewards as the evaluation does"
    assert note not in make_card(runs / "ppo").read_text()
    assert note in card_body_with_settings(runs, score_centering="prompt")
    stage = StageRecord(runs / "ppo")
    stage.write(parents={"sft": stage.read()["parents"]["sft"]})
    assert note not in card_body_with_settings(runs, score_centering="prompt"), "only a reward model is centered"


def test_card_of_run_with_reward_functions_only(runs):
    stage = StageRecord(runs / "ppo")
    stage.write(parents={"sft": stage.read()["parents"]["sft"]})
    body = card_body_with_settings(
        runs, reward_model_path=None, reward_funcs=["exact_match", "mine:f"], reward_weights=[1, 0.5]
    )
    assert "to maximize the reward functions `exact_match`, `mine:f`. It started" in body
    assert "a learned reward" not in body and "The reward model orders" not in body
    assert not any(tag.startswith("reward-model:") for tag in head_and_body(runs / "ppo" / "README.md")[0]["tags"])
    assert not any(line.startswith("| reward model |") for line in body.splitlines())
    assert cells(body, "`reward_funcs`")[1] == "exact&#95;match, mine:f"


def test_card_of_reward_ensemble_lists_every_model(runs):
    """It names each model and its scores; none has a weight of its own."""
    stage = StageRecord(runs / "ppo")
    parents = stage.read()["parents"]
    other = {"repo": None, "commit": None, "path": "ensemble/seed-2/reward/checkpoint-4",
             "folder": "ensemble/seed-2/reward"}  # fmt: skip
    stage.write(parents={**parents, "reward_2": other, "reward_3": {"repo": "x/judge", "commit": COMMITS["reward"]}})
    figures = {"reward_model": 0.5, "gold": 0.25, "reward_model_0": 1.0, "reward_model_1": 0.5, "disagreement": 0.75}
    for times in (1, 2):
        row = {f"rewards/{name}": times * value for name, value in figures.items()}
        stage.append_metrics({"step": 40, **row})
    keys = {"reward_funcs": ["mine:gold"], "reward_weights": [1, 0], "reward_ensemble": "mean_minus_variance"}
    body = card_body_with_settings(runs, **keys)
    assert "to maximize the mean minus variance of 3 reward models (λ = 0.500) (with `mine:gold` logged" in body
    assert cells(body, "gold |")[1] == "0" and cells(body, "reward&#95;model |")[1] == "1"
    assert cells(body, "reward&#95;model&#95;0 |") == [
        "reward&#95;model&#95;0",
        "in the ensemble score",
        "1.000",
        "2.000",
    ]
    assert cells(body, "disagreement |")[1:] == ["watched", "0.750", "1.500"]
    assert cells(body, "reward model 2 |")[1:] == ["the folder `ensemble/seed-2/reward`", "not published"]
    assert cells(body, "reward model 3 |")[1] == "`x/judge`"
    assert "reward-model:x/judge" in head_and_body(runs / "ppo" / "README.md")[0]["tags"]


def test_card_lists_reward_logged_at_weight_zero(runs, with_plots):
    for learned, gold in ((0.5, 0.25), (2.5, 0.125)):
        StageRecord(runs / "ppo").append_metrics({"step": 40, "rewards/reward_model": learned, "rewards/gold": gold})
    body = card_body_with_settings(runs, reward_funcs=["mine:gold"], reward_weights=[1, 0])
    assert "to maximize a learned reward (with `mine:gold` logged at weight 0). It started" in body
    assert cells(body, "gold |") == ["gold", "0", "0.250", "0.125"]
    rows = {row["step"]: row for row in json.loads((runs / "ppo" / "rlhf_card.json").read_text())["checkpoints"]}
    assert rows[40]["rewards/gold"] == 0.125 and "rewards/reward_model" not in rows[40]
    assert "gold (watched)](plots/training.png)" in body
    assert cells(body, "reward&#95;model |") == ["reward&#95;model", "1", "0.500", "2.500"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "β times the estimator k1 is subtracted from the reward of each token"),
        ({"kl_estimator": "k3"}, "its gradient through the reward is not that of the KL"),
        ({"kl_in": "loss", "kl_estimator": "k2"}, "estimator k2 is added to the loss of each token: k2 = ½(log π"),
        ({"kl_in": "loss", "kl_estimator": "full"}, "the exact KL of each next-token distribution"),
        ({"kl_in": "loss", "kl_estimator": "k3_reverse"}, "that of the reverse KL"),
        ({"kl_in": "loss", "kl_estimator": "k3", "action_level": "sequence"}, "to the loss of each completion: k3 ="),
        ({"ptx_coef": 27.8}, "γ_ptx = 27.8 times the language-model loss on texts of the data set (configuration"),
        ({"temperature": None}, "at temperature 0.7."),
    ],
)  # fmt: skip
def test_card_explains_kl_term_that_was_trained(runs, settings, sentence):
    meaning = card_body_with_settings(runs, **settings).split("### What KL means here")[1].split("### Limits")[0]
    assert sentence in entities.unescape(meaning)
    assert ("γ_ptx" in meaning) is ("ptx_coef" in settings)


# Signs


def test_card_lists_signs_of_hacking_without_verdict(runs):
    path = runs / "eval" / "evaluation.json"
    evaluation = read_json(path)
    evaluation["ppo"]["judge"] = estimate(0.25)
    write_json(path, evaluation)
    _, body = head_and_body(make_card(runs / "ppo"))
    signs = body.split("### Signs of reward hacking")[1].split("</details>")[0]
    assert "- Reward 0.500 → 1.500, judge (gold) 0.510 → 0.250: they did not both rise." in signs
    assert "In 1 of 22 comparisons" in signs  # the one sample that the judge put below SFT's 0.5
    assert "- Distinct-2 0.550 → 1.550: 2.818 times SFT's." in signs
    assert "- Length 0.530 → 1.530 tokens: 2.887 times" in signs
    assert "- Share that ended with EOS 0.540 → 1.540." in signs
    assert "No verdict was computed" in signs


def test_card_shows_verdict_with_reasons_and_probes(runs, with_plots):
    path = runs / "eval" / "evaluation.json"
    over = over_training()
    write_json(path, {**read_json(path), "verdict": "hacked", "recommended": 20, "over_training": over})
    _, body = head_and_body(make_card(runs / "ppo"))
    section = body.split("### Verdict: hacked")[1].split("</details>")[0]
    assert (
        "2 checkpoints were measured on 30 prompts of the `validation` split, configuration `prompts`, with 2"
        in section
    )
    assert "The recommended checkpoint is step 20" in section and "- 3 of 4 probes fire." in section
    assert cells(section, "20 (recommended) |")[-1] == "none" and cells(section, "40 |")[-1] == "length, repetition"
    assert cells(section, "repetition |")[1:] == ["0.200", "0.100", "0.004", "**yes**", "It repeats itself."]
    bends = ["0.500 [0.450, 0.550]", "0.100 [0.050, 0.150]"]
    assert cells(section, "the reward (proxy) |")[1:] == [*bends, "No peak: β is -0.196."]
    peak = "at d = 2.000 [1.950, 2.050] (KL 4.000 nats): a gain of 0.750 [0.700, 0.800]"
    assert cells(section, "the judge |")[1:] == [*bends, peak]
    assert "- a prompt … &#60;b&#62;again again" in section and "No verdict was computed" not in body
    assert "](plots/over_training.png)" in body
    card = read_json(runs / "ppo" / "rlhf_card.json")["evaluation"]
    assert (card["verdict"], card["recommended"], card["over_training"]) == ("hacked", 20, over)
    assert "cannot rule out reward hacking" not in section
    over["judge_reliability"] = {"trusted": False}
    over["fits"] = {"proxy": None, "judge": None}
    write_json(path, {**read_json(path), "over_training": over})
    _, body = head_and_body(make_card(runs / "ppo"))
    section = body.split("### Verdict: hacked")[1]
    assert "| gain of |" not in section
    assert "The recommended checkpoint is step 20: other prompts confirm the gain, but by" in section
    assert "Sameness counts only together with independence of the prompt" in section
    write_json(path, {**read_json(path), "verdict": None, "over_training": {"problem": "No validation prompts."}})
    _, body = head_and_body(make_card(runs / "ppo"))
    assert "not a test. No validation prompts." in body and not (runs / "ppo" / "plots" / "over_training.png").exists()


# The reward model's report


def test_reward_card_shows_held_out_report(runs, with_plots):
    report = reward_report()
    StageRecord(runs / "reward").write(reward_model=report)
    readme = make_card(runs / "reward")
    head, body = head_and_body(readme)
    kinds = {metric["type"]: metric["value"] for metric in head["model-index"][0]["results"][0]["metrics"]}
    ece = report["calibration"]["ece"]
    measured = {"accuracy": report["accuracy"], "loss": report["loss"]["value"], "ece": ece}
    assert kinds == {key: float(f"{value:.3g}") for key, value in measured.items()}
    assert cells(body, "**accuracy**")[1].startswith(f"{report['accuracy']:.3f} [") and "chance: 0.693" in body
    assert cells(body, "**loss**")[1] == markdown.estimate(report["loss"])
    assert cells(body, "**calibration error**")[1:3] == [f"{ece:.3f}", "400"]
    assert cells(body, "**score against length**")[1:3] == [markdown.estimate(report["length"]["pearson"]), "800"]
    assert "Spearman" in cells(body, "score against length")[0]
    apart = report["margin"]["accuracy"]
    shown = body.split("| difference of the two scores |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(shown) == len(apart) == 5 and f"| {apart[0]['n']} |" in shown[0]
    assert markdown.estimate({"value": apart[-1]["accuracy"], "ci95": apart[-1]["ci95"]}) in shown[-1]
    assert cells(body, 'accuracy of the rule "the longer text wins"')[1] == markdown.estimate(
        report["length"]["longer_wins"]
    )
    pictures = {path.stem for path in (readme.parent / "plots").glob("*.png")}
    assert {"margins", "calibration", "length", "loss", "accuracy"} == pictures
    assert all(f"](plots/{name}.png)" in body for name in pictures)
    unmeasured = body.split("- **Not measured:**")[1].splitlines()[0]
    assert "calibration" not in unmeasured and "length" not in unmeasured
    assert json.loads((readme.parent / CARD_FILE).read_text())["reward_model"] == report
    as_good = "**The rule that the longer text wins orders these pairs at least as well as this model.**"
    for rule, is_stated in ((0.51, True), (0.5, True), (0.49, False)):
        report["length"]["longer_wins"]["value"] = rule
        StageRecord(runs / "reward").write(reward_model={**report, "accuracy": 0.5, "ci95": [0.4, 0.6]})
        assert (as_good in head_and_body(make_card(runs / "reward"))[1]) == is_stated, rule


# Registered benchmarks

TASKS = {"name": "Tiny", "tasks": [{"id": "tiny"}, {"id": "win_rate", "config": "prompts", "split": "test"}]}


def write_benchmark_results(runs: Path, stage: str, document: dict) -> Path:
    record = StageRecord(runs / stage)
    record.write(dataset={**record.read()["dataset"], "benchmark": document}, hub="https://huggingface.co")
    StageRecord(runs / "eval").write(stage="eval", finished="2026-01-02T00:00:00+00:00", hub="https://huggingface.co")
    return make_card(runs / stage).parent / ".eval_results" / "tiny-world.yaml"


def test_card_writes_results_of_registered_benchmark(runs):
    from huggingface_hub import eval_result_entries_to_yaml, parse_eval_result_entries

    document = yaml.safe_load(write_benchmark_results(runs, "ppo", TASKS).read_text())
    judge, win = parse_eval_result_entries(document)
    assert (judge.dataset_id, judge.task_id, judge.value) == ("local/tiny-world", "tiny", 1.51)
    assert (win.task_id, win.value) == ("win_rate", 0.9)
    assert judge.dataset_revision == COMMITS["data"] and judge.date == "2026-01-02T00:00:00+00:00"
    assert judge.source_url == "https://huggingface.co/local/tiny-world-ppo"
    assert judge.notes == (
        "judge (gold), 95% interval [1.46, 1.56], n = 644, temperature 1.0, seed 3; measured by rlhf-zoo, not by the "
        "benchmark's own harness"
    )
    assert eval_result_entries_to_yaml([judge, win]) == document
    assert "`.eval_results/tiny-world.yaml` has the held-out figures" in (runs / "ppo" / "README.md").read_text()
    make_card(runs / "ppo", step=20)
    assert not (runs / "ppo" / ".eval_results" / "tiny-world.yaml").exists()


def test_reward_card_writes_benchmark_result(runs):
    StageRecord(runs / "reward").write(reward_model=reward_report())
    tasks = [{"id": "pairs", "config": "preferences"}, {"id": "other", "config": "prompts"}]
    (entry,) = yaml.safe_load(write_benchmark_results(runs, "reward", {"tasks": tasks}).read_text())
    assert entry["dataset"]["task_id"] == "pairs" and entry["value"] == reward_report()["accuracy"]


@pytest.mark.parametrize(
    "document",
    [
        {"tasks": [{"id": "tiny", "split": "validation"}]},
        {"tasks": [{"id": "tiny", "config": "lines"}]},
        {"tasks": [{"id": "one"}, {"id": "two"}]},
        {"tasks": [{"config": "prompts"}, "tiny", None]},
        {},
    ],
)
def test_card_writes_no_result_without_matching_task(runs, document):
    assert not write_benchmark_results(runs, "ppo", document).exists()
    assert ".eval_results" not in (runs / "ppo" / "README.md").read_text()


DATA = {"repo": "maker/questions", "commit": "d" * 40, "fingerprint": "0"}
FOLDER = {"repo": None, "commit": None, "folder": "my-data", "files": "f" * 64, "fingerprint": "0"}
OWN = {
    "dataset_name": "maker/questions", "dataset_config": None, "dataset_test_split": None, "held_out_share": 0.05,
    "columns": {"prompt": "question"},
}  # fmt: skip


def change_stage(runs: Path, stage: str, dataset: dict[str, Any], keys: dict[str, Any]) -> None:
    record = StageRecord(runs / stage)
    resolved = {**record.read()["resolved"], **keys}
    record.write(dataset=dataset, resolved=resolved)


def write_evaluation_data(runs: Path, **data: Any) -> None:
    path = runs / "eval" / "evaluation.json"
    write_json(path, {**read_json(path), "split": data["split"], "data": data})


def test_card_lineage_names_gguf_file_by_sha256(runs: Path) -> None:
    digest = "b1" * 32
    record = StageRecord(runs / "ppo")
    base = {"repo": None, "commit": None, "folder": "chat.Q4_1.gguf", "files": "f" * 64, "gguf": digest}
    record.write(parents={**record.read()["parents"], "sft": base})
    _, body = head_and_body(make_card(runs / "ppo"))
    assert f"| the GGUF file `chat.Q4_1.gguf` | sha256 `{digest}`, not published |" in body
    record.write(parents={**record.read()["parents"], "sft": {"repo": "x/chat", "commit": "c" * 40, "gguf": digest}})
    _, body = head_and_body(make_card(runs / "ppo"))
    assert f"| `x/chat` | `{'c' * 40}`; unpacked from a GGUF file, sha256 `{digest}` |" in body


def test_card_describes_held_out_share_and_columns(runs: Path) -> None:
    change_stage(runs, "ppo", DATA, OWN)
    place = {"location": DATA["repo"], "revision": DATA["commit"], "config": None}
    write_evaluation_data(runs, **place, split="train", held_out_share=0.05)
    head, body = head_and_body(make_card(runs / "ppo"))
    [result] = head["model-index"][0]["results"]
    assert result["dataset"] == {
        "name": "questions (train)",
        "type": DATA["repo"],
        "split": "train",
        "revision": "d" * 40,
    }
    assert "on the `train` split without 10% of its prompts of `maker/questions` (prompt from `question`)." in body
    held_out = "161 prompts of the 5% held out of the `train` split of `maker/questions`"
    assert f"{held_out}. 4 completions" in body, "nobody counted"
    for seen, overlap in (
        ({"sft": 0, "reward": 0, "ppo": 0}, "SFT, the reward model and PPO never trained on them. 4 completions"),
        (
            {"sft": 7, "reward": None, "ppo": 0},
            "SFT also trained on **7 of them**. PPO never trained on them. It is unknown whether the reward model "
            "trained on them. 4 completions",
        ),
    ):
        write_evaluation_data(runs, **place, split="train", held_out_share=0.05, trained_on=seen)
        assert f"{held_out}. {overlap}" in head_and_body(make_card(runs / "ppo"))[1]
    assert "`prompts`" not in body and "`test`" not in body


def test_reward_card_describes_pairs_and_rows_left_out(runs: Path) -> None:
    keys = {**OWN, "columns": {}, "held_out_share": None, "dataset_train_split": "train_prefs",
            "dataset_test_split": "test_prefs"}  # fmt: skip
    change_stage(runs, "reward", DATA, keys)
    report = {"accuracy": 0.9, "n": 10, "ci95": [0.8, 1], "split": "test_prefs"}
    StageRecord(runs / "reward").write(reward_model=report)
    head, body = head_and_body(make_card(runs / "reward"))
    dataset = head["model-index"][0]["results"][0]["dataset"]
    assert (dataset["split"], dataset.get("config")) == ("test_prefs", None)
    assert "It was trained on the `train_prefs` split of `maker/questions`." in body
    for counts, sentence in (
        ({"held_out_by_ppo": 59, "max_length": 1200, "max_prompt_length": 0},
         "Rows left out: 59 whose prompts PPO holds out and 1,200 that `max_length` leaves out."),
        ({"max_prompt_length": 102}, "Rows left out: 102 whose prompts are longer than `max_prompt_length`."),
    ):  # fmt: skip
        StageRecord(runs / "reward").write(left_out=counts)
        assert f"`maker/questions`. {sentence}\n" in head_and_body(make_card(runs / "reward"))[1]
    pairs = "The pairs are from the `test_prefs` split of `maker/questions`"
    assert f"{pairs}. " in body, "nobody counted"
    for seen, clause in (
        ({"prompts": 0, "pairs": 0}, "which it never trained on, nor on their prompts. "),
        ({"prompts": None, "pairs": 0}, "which it never trained on. "),
        ({"prompts": 4, "pairs": 2}, "**of which it trained on 2 and on 4 of their prompts as well**. "),
    ):
        StageRecord(runs / "reward").write(reward_model={**report, "trained_on": seen})
        assert f"{pairs}, {clause}" in head_and_body(make_card(runs / "reward"))[1]


def test_card_names_local_data_by_folder_and_file_hash(runs: Path) -> None:
    keys = {"dataset_name": "/home/someone/my-data", "dataset_config": None, "model_name_or_path": "/home/someone/base"}
    change_stage(runs, "sft", FOLDER, keys)
    head, body = head_and_body(make_card(runs / "sft"))
    assert "| data set | the folder `my-data` | files `ffffffffff` |" in body
    assert "| base model | the folder `base` | not published |" in body
    assert "It was trained on the `train` split of `my-data`." in body
    datasets = {result["dataset"]["split"]: result["dataset"] for result in head["model-index"][0]["results"]}
    assert datasets["validation"] == {"name": "my-data (validation)", "type": "my-data", "split": "validation"}


def test_card_lineage_names_commit_of_merged_parent(runs):
    plain = cells(head_and_body(make_card(runs / "ppo"))[1], "SFT policy")[2]
    StageRecord(runs / "sft").write(merged="f" * 40)
    body = head_and_body(make_card(runs / "ppo"))[1]
    assert cells(body, "SFT policy")[2] == f"{plain}; used from its branch `merged`: `{'f' * 40}`"
    assert f"The reference π_ref is the SFT policy `local/tiny-world-sft` at `{'f' * 40}`" in body


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (0.0, "0.000"), (-0.12345, "-0.123"), (12.345, "12.35"), (644.04, "644.0"),
        (0.00012, "0.00012"), (123456.0, "1.23e+05"),
        (None, "not measured"), (math.nan, "not measured"), ("NaN", "not measured"), (True, "not measured"),
    ],
)  # fmt: skip
def test_markdown_number_formats_or_says_not_measured(value, text):
    assert markdown.number(value) == text
    assert markdown.estimate({"value": 0.5}) == "0.500 (interval not measured)"
    assert markdown.estimate(None) == markdown.estimate({}) == "not measured"
