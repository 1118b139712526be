"""The unfolded part of a card: verdict, advice, three figures, an example, and warnings, in few words."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from card_run import cells, estimate, head_and_body, over_training, reward_report
from huggingface_hub import ModelCard

from rlhf_zoo.fileio import read_json, write_json
from rlhf_zoo.publishing.cards import markdown
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.publishing.plot_parts import over_training_title
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.usefixtures("no_plots")

CONSTANTS = {
    "winnable_by_a_constant": False,
    "policies": [
        {
            "name": "often",
            "kind": "constant",
            "text": "x",
            "win_rate": estimate(0.25),
            "reward": estimate(-1.0),
            "judge": None,
        },
        {
            "name": "loved",
            "kind": "constant",
            "text": "y",
            "win_rate": estimate(0.125),
            "reward": estimate(1.75),
            "judge": None,
        },
        {
            "name": "shuffled",
            "kind": "policy",
            "text": "",
            "win_rate": estimate(0.5),
            "reward": estimate(9.0),
            "judge": None,
        },
    ],
}


def card(runs: Path, stage: str = "ppo", **evaluation: Any) -> str:
    """The part of a card that is not folded, with changes to evaluation.json."""
    path = runs / "eval" / "evaluation.json"
    write_json(path, {**read_json(path), **evaluation})
    return unfolded(head_and_body(make_card(runs / stage))[1])


def unfolded(body: str) -> str:
    return re.sub(r"<details>.*?</details>", "", body, flags=re.DOTALL)


def judged(kind: str, **changes: Any) -> dict[str, Any]:
    over = {**over_training(), "verdict": kind, "kind": kind, "step": 40, "recommended": None, **changes}
    return {"verdict": kind, "recommended": over["recommended"], "over_training": over}


@pytest.mark.parametrize(
    ("verdict", "alert", "advice"),
    [
        (judged("healthy", recommended=40), "TIP", "Use **step 40** (this page, `main`):\n>\n> `rlhf-zoo pull local/"),
        (judged("healthy", recommended=40), "TIP", "does not count as hacking: repetition. No step scores clearly"),
        (judged("healthy", recommended=20), "TIP", "Use **step 20** instead of this one, step 40:\n>\n> `rlhf-zoo"),
        (judged("healthy", recommended=20), "TIP", "repetition. The judge rates step 20 highest (judge's score"),
        (judged("hacked", reasons=["Hacked: the judge of SFT is fooled."]), "CAUTION", "The judge of SFT is fooled."),
        (judged("no sign found", recommended=40), "NOTE", "but the judge is unchecked"),
        (judged("no gain"), "WARNING", "Use the SFT model."),
        (judged("gain not shown"), "WARNING", "or evaluate on more prompts."),
        (
            judged("gain not shown", disagree=True, win_rate=estimate(0.52)),
            "WARNING",
            "but the win rate, 0.52 (0.47–0.57), does not confirm that.",
        ),
        (judged("suspicious"), "WARNING", "No checkpoint is recommended: read the samples"),
        (judged("past the peak at step 20"), "WARNING", "The judge's score has fallen since that peak."),
        (judged("not judged", reasons=["There is no judge."]), "WARNING", "There is no judge."),
    ],
)  # fmt: skip
def test_card_begins_with_verdict_and_advice(runs, verdict, alert, advice):
    text = card(runs, **verdict)
    title, box, lead = text.strip().split("\n\n")[:3]
    assert title == "# tiny-world-ppo"
    assert lead.startswith("A language model trained with PPO") and "**Simulated data:** a program" in lead
    assert box.startswith(f"> [!{alert}]\n> **Verdict: {verdict['verdict']}.**") and advice in box
    assert "\n>\n> Why: " in box
    command = f"> `rlhf-zoo pull local/tiny-world-ppo@step-0000{verdict['recommended']} --hub local"
    assert (command in box) == (verdict["recommended"] is not None) == ("rlhf-zoo pull" in box)
    this = (
        "<details><summary>This step, 40, which is not the recommended one</summary>\n\n"
        "```sh\nrlhf-zoo pull local/tiny-world-ppo@step-000040"
    )
    assert (this in head_and_body(make_card(runs / "ppo"))[1]) == (verdict["recommended"] == 20)


def test_card_names_step_that_verdict_is_about(runs):
    StageRecord(runs / "ppo").write(chosen={"step": 20, "rule": "recommended", "metric": None, "value": None})
    text = card(runs, **judged("hacked", recommended=20))
    assert "**Verdict at step 40: hacked.**" in text and "Use **step 20** (this page, `main`)" in text
    text = card(runs, **judged("hacked", recommended=40))
    assert "`rlhf-zoo pull local/tiny-world-ppo@step-000040 --hub local --output_dir tiny-world-ppo`" in text


def test_card_of_recommended_step_has_verdict_of_that_step(runs):
    """Not that on the end of training, which may be hacked. A hacked end stays in its second sentence."""
    at_step = {"verdict": "healthy", "kind": "healthy", "step": 20, "disagree": False, "fired": [], "explained": [],
           "reasons": ["Judge and reward rise."]}  # fmt: skip
    verdict = judged("hacked", recommended=20, at_recommended=at_step)
    assert "**Verdict: hacked.**" in card(runs, **verdict)
    StageRecord(runs / "ppo").write(chosen={"step": 20, "rule": "recommended", "metric": None, "value": None})
    text = card(runs, **verdict)
    assert "> [!TIP]\n> **Verdict: healthy.** Use **step 20** (this page, `main`):\n" in text
    assert "> Why: Judge and reward rise together, and none of 2 probes for reward hacking fired." in text
    assert "Training went on to step 40, where the verdict is *hacked*." in text
    whole = head_and_body(make_card(runs / "ppo"))[1]
    assert "<summary>Why “healthy”: rule" in whole and "### Verdict at step 40, the last: hacked\n" in whole
    assert "as if step 20 were the last checkpoint:\n\n- Judge and reward rise.\n" in whole
    assert ", all 40 updates took 61 s" in text
    pull = "rlhf-zoo pull local/tiny-world-ppo@step-000020 --hub local --output_dir tiny-world-ppo"
    assert f">\n> `{pull}`\n" in text and f"```sh\n{pull}\n```" not in text


def test_card_says_why_recommended_step_beats_healthy_last_step(runs):
    at_step = {"verdict": "healthy", "kind": "healthy", "step": 20, "disagree": False, "fired": [], "explained": [],
           "reasons": ["Judge and reward rise."]}  # fmt: skip
    StageRecord(runs / "ppo").write(chosen={"step": 20, "rule": "recommended", "metric": None, "value": None})
    verdict = judged("healthy", recommended=20, at_recommended=at_step)
    use = "Step 40, the last, is *healthy* too, but"
    assert f"{use} the judge rates step 20 highest." in card(runs, **verdict)
    last = verdict["over_training"]["checkpoints"][-1]
    last["judge"]["value"] = 0.9
    reason = "no step scores clearly higher by the judge, and step 20 stays closer to SFT."
    assert f"{use} {reason}" in card(runs, **verdict)
    last |= {"kl": estimate(0.5)}
    excluded = "the judge rates step 40 highest, but probes find signs of hacking there (length, repetition)."
    assert excluded in card(runs, **verdict)
    middle = {**last, "step": 30, "judge": estimate(0.95), "kl": estimate(5.0)}
    verdict["over_training"]["checkpoints"].insert(1, middle)
    assert "step 20 stays closer to SFT than step 30." in card(runs, **verdict)


def test_card_without_verdict_states_judge_preference(runs):
    assert "> **No verdict.** The judge prefers it to SFT. Read the samples" in card(runs)
    assert "The judge prefers SFT." in card(runs, win_rate=estimate(0.25))
    assert "No prompts. The judge shows no difference" in card(
        runs, win_rate=estimate(0.5), over_training={"problem": "No prompts."}
    )
    assert "Nothing here shows whether PPO helped" in card(runs, win_rate=None)


def test_card_compares_main_figures_with_best_constant_text(runs):
    assert "fixed text" not in card(runs)
    text = card(runs, trivial=CONSTANTS)
    assert cells(text, "**Win rate over SFT**")[1:] == ["0.50\N{NO-BREAK SPACE}¹", "**0.90** (0.85–0.95)"]
    assert cells(text, "**KL to SFT**, nats")[1:] == ["0.52", "**1.52** (1.47–1.57)"]
    assert cells(text, "**Reward**")[1:] == ["0.50", "**1.50** (1.45–1.55)"]
    assert "Judge: gold. 644 completions to 161 prompts" in text
    assert " The best fixed text tried wins 0.25; the reward's favorite gets reward 1.75 and wins 0.12. ¹ SFT" in text
    both = {**CONSTANTS, "policies": CONSTANTS["policies"][:1]}
    assert " The best fixed text tried wins 0.25, with reward " in card(runs, trivial=both)


def test_card_example_is_median_pair_by_judge(runs):
    rows = [
        {"prompt": f"Write\nline {n} {'long ' * 60}", "sft": {"completion": " a", "judge": 0.0, "reward": 0.0},
         "ppo": {"completion": f"* {n}\n* **bold** {'word ' * 80}", "judge": judge, "reward": 0.0}}
        for n, judge in enumerate([0.0, 0.0, 0.0, 3.0, -1.0, 2.0])
    ]  # fmt: skip
    path = runs / "eval" / "samples.jsonl"
    path.write_text("".join(line + "\n" for line in map(json.dumps, rows)))
    text = card(runs)
    assert "**The median pair by the judge**: “Write↵line 5 long" in text
    answer = cells(text, "**PPO**")[1]
    assert (
        answer.startswith("&#42; 5↵&#42; &#42;&#42;bold")
        and answer.endswith("word …")
        and len(html.unescape(answer)) < 105
    )


def test_card_lists_warnings(runs):
    def change(key: str, before: float, after: float) -> None:
        evaluation["sft"][key], evaluation["ppo"][key] = estimate(before), estimate(after)
        evaluation["difference"][key] = estimate(after - before)

    evaluation = read_json(runs / "eval" / "evaluation.json")
    change("length", 10.0, 14.5)
    change("distinct_2", 0.75, 0.25)
    change("repetition", 0.0, 0.25)
    change("eos_rate", 1.0, 0.5)
    evaluation |= {
        "win_rate_at_equal_length": estimate(0.75),
        "agreement": {"sft": estimate(0.75), "ppo": estimate(0.25), "same_side": estimate(0.8)},
        "judges": {
            "gold": {},
            "rule:length(unit='words')": {"sft": estimate(9.0), "ppo": estimate(5.0)},
            "true statements": {"sft": estimate(0.9), "ppo": estimate(0.5)},
            "rule:g()": {"sft": estimate(0.9), "ppo": estimate(0.5), "description": "The rule g(), minus the errors."},
        },
        "trivial": {**CONSTANTS, "winnable_by_a_constant": True},
        "data": {"trained_on": {"sft": 7, "reward": 0, "ppo": None}},
        "possible_paraphrases": 12,
    }
    StageRecord(runs / "eval").write(stage="eval", fingerprint="f")
    point = {"reward": estimate(1.5), "judge": estimate(1.0), "kl": {"value": 1.0, "is_bound": True}, "seeds": [1],
             "win_rate": {"sft": estimate(0.6)}, "compute": {"flops": 1.0}}  # fmt: skip
    methods = {"best-of-n": [{**point, "label": f"n = {n}", "reward": estimate(n / 2)} for n in (2, 4, 8)]}
    frontier = {"evaluation": "f", "sft": point, "ppo": point, "methods": methods, "served": 1, "commands": {}}
    (runs / "baseline").mkdir()
    write_json(runs / "baseline" / "frontier.json", frontier)
    watch = card(runs, **evaluation).split("## Watch out for")[1].split("## Trained with")[0]
    for sentence in (
        "- **Longer answers.** 10.0 → 14.5 tokens. At equal length the win rate is 0.75 (0.70–0.80).",
        "- **Less variety.** Distinct word pairs fall from 0.75 to 0.25.",
        "- **Repetition.** An answer repeats 25% of its word pairs (SFT 0%).",
        "- **Unfinished answers.** 50% reach the token limit (SFT 0%).",
        "- **true statements falls** from 0.90 to 0.50.",
        "- **g falls** from 0.90 to 0.50 (minus the errors).",
        "- **Reward and judge disagree** in 20% of the comparisons. "
        "Their correlation over answers falls from 0.75 to 0.25.",
        "- **A fixed text wins.**",
        "- **Simplest rival:** best-of-n from SFT (n = 4) reaches PPO's reward, with a win rate of 0.60 (0.55–0.65) (",
        "- **Paraphrased prompts?** 12 prompts share nearly all their content words with a prompt of another group.",
        "- **Seen in training.** SFT also trained on 7 of these prompts.",
        "- **Not measured:** the judge before the end of training; human preferences",
    ):
        assert sentence in watch, sentence


@pytest.mark.parametrize(
    ("same_side", "is_training_reward", "is_listed"), [(0.8, False, True), (1.0, False, False), (0.8, True, False)]
)
def test_card_lists_disagreement_of_independent_judge_only(runs, same_side, is_training_reward, is_listed):
    evaluation = read_json(runs / "eval" / "evaluation.json")
    judge = {**evaluation["judge"], "is_training_reward": is_training_reward}
    watch = card(runs, judge=judge, agreement={"same_side": estimate(same_side)}).split("## Watch out for")[1]
    assert ("Reward and judge disagree" in watch) == is_listed


@pytest.mark.parametrize(
    ("ended", "stop", "is_listed"),
    [
        (0.4, {}, True),
        (0.6, {}, False),
        (0.4, {"stop_token": None}, False),
        (0.4, {"stop_token": None, "stop_token_id": 13}, True),
    ],
)
def test_card_warns_when_most_answers_are_cut(runs, ended, stop, is_listed):
    """As often cut as before PPO, but most of what the judge reads are fragments; not where all have one length."""
    evaluation = read_json(runs / "eval" / "evaluation.json")
    for side in ("sft", "ppo"):
        evaluation[side]["eos_rate"] = estimate(ended)
    record = StageRecord(runs / "ppo")
    record.write(resolved={**record.read()["resolved"], **stop})
    watch = card(runs, **evaluation).split("## Watch out for")[1].split("## Trained with")[0]
    assert ("- **Unfinished answers.** 60% reach the token limit (SFT 60%)." in watch) == is_listed


def filter_row(name: str, judge: float, lead: float) -> dict:
    figures = {"judge": estimate(judge), "win_rate": estimate(0.6), "reward": estimate(1.0)}
    return {"name": name, "kind": "words", "drawn": 4.0, "words": ["is"] if "word" in name else [], **figures,
            "ppo_minus_this": estimate(lead), "reaches_ppo": lead <= 0}  # fmt: skip


def test_card_compares_gain_with_defects_and_best_filter(runs):
    defects = {
        "false statements": {"sft": estimate(0.05), "ppo": estimate(0.15), "difference": estimate(0.1)},
        "doubled clauses": {"sft": estimate(0.05), "ppo": estimate(0.08), "difference": estimate(0.03)},
    }
    filters = {"samples": 16, "best": "without 1 word", "tried": [
        filter_row("best of 2 by the reward", 0.5, 1.0), filter_row("without 1 word", 1.6, -0.1)]}  # fmt: skip
    text = card(runs, defects=defects, filters=filters, **judged("healthy", recommended=40))
    assert "safety and bias.\n" in text, "false statements are measured"
    counter = (
        "**But** more answers have false statements (5% → 15%), and SFT's answers after a filter score higher by the "
        "judge (1.60, PPO 1.51): [how](https://github.com/rlhf-zoo/rlhf-zoo/blob/main/docs/reward-up-text-worse.md"
    )
    assert counter in text.split("|")[0]
    assert counter in card(runs, defects=defects, filters=filters, **judged("suspicious", recommended=40))
    assert "**But**" not in card(runs, defects=defects, filters=filters, **judged("hacked"))
    text = card(runs, defects=defects, filters=filters, **judged("healthy", recommended=40))
    assert cells(text, "**Judge's score**")[1:] == ["0.51", "**1.51** (1.46–1.56)"]
    assert cells(text, "Judge's score of filtered SFT")[1:] == ["1.60", "–"]
    watch = text.split("## Watch out for")[1].split("## Trained with")[0]
    more = "- **More** answers with false statements (5% → 15%). Not shown to rise: doubled clauses (5% → 8%).\n"
    assert more in watch, "the second interval of the difference holds 0"
    assert "simple filter" not in watch, "the advice says it"
    hacked = card(runs, defects=defects, filters=filters, **judged("hacked"))
    assert "- **A simple filter does better** by the judge: SFT's answers, without 1 word.\n" in hacked
    text = card(runs, defects=defects, filters=filters, **judged("healthy", recommended=40))
    text = (runs / "ppo" / "README.md").read_text(encoding="utf-8")
    assert cells(text, "false statements, share of completions")[1:3] == [
        "0.050 [0.000, 0.100]",
        "0.150 [0.100, 0.200]",
    ]
    assert cells(text, "without 1 word (compared above)")[1] == "4.000" and "*without 1 word* leaves out: is." in text


def test_card_counters_advice_with_repetition(runs):
    evaluation = read_json(runs / "eval" / "evaluation.json")
    for side, share in (("sft", 0.16), ("ppo", 0.3), ("difference", 0.14)):
        evaluation[side] = {**evaluation.get(side, {}), "repetition": estimate(share)}
    text = card(runs, **{**evaluation, **judged("healthy", recommended=40)})
    assert "**But** answers repeat themselves more (16% → 30%)." in text
    evaluation["difference"]["repetition"] = estimate(0.01)
    assert "**But**" not in card(runs, **{**evaluation, **judged("healthy", recommended=40)}), "not shown"


def test_card_compares_ppo_with_best_of_filters_that_beat_it(runs):
    """evaluation.json's best needs the fewest samples to reach PPO's score, so others may score higher."""
    tried = [filter_row(name, 1.51 - lead, lead) for name, lead in (("best of 4", -0.02), ("best of 8", -0.3))]
    text = card(runs, filters={"samples": 8, "best": "best of 4", "tried": tried}, **judged("healthy", recommended=40))
    assert "**But** SFT's answers after a filter score higher by the judge (1.81, PPO 1.51): [how](" in text
    assert cells(text, "Judge's score of filtered SFT")[1] == "1.81" and " Filtered: best of 8. " in text


@pytest.mark.parametrize(
    ("lead", "warning"),
    [
        (-0.02, "- **A simple filter does as well.** SFT with a filter (best of 8) reaches PPO's score"),
        (0.02, "- **A simple filter may do as well.** PPO's lead"),
        (0.5, None),
    ],
)
def test_card_names_filter_when_ppo_lead_is_uncertain(runs, lead, warning):
    filters = {"samples": 16, "best": "best of 8", "tried": [filter_row("best of 8", 1.51 - lead, lead)]}
    text = card(runs, filters=filters, **judged("healthy", recommended=40))
    assert ("**But** a filter of SFT's answers scores 1.53, PPO 1.51." in text) is (lead < 0)
    text = card(runs, filters=filters, **judged("hacked"))
    watch = text.split("## Watch out for")[1].split("## Trained with")[0]
    assert (warning in watch) if warning else ("simple filter" not in watch)


def test_card_summarizes_training(runs):
    text = card(runs).split("## Trained with")[1]
    assert "- **Recipe:** `tiny-world`, rlhf-zoo 0.1.0, seed 3\n" in text
    assert "- **PPO:** 40 updates, 2,560 completions, β 0.10, the whole run took 61 s\n" in text


@pytest.mark.parametrize(
    ("versions", "use_cpu", "machine"),
    [
        ({"threads": "1"}, False, "61 s on 1 CPU thread"),
        ({"threads": "2", "gpu": "NVIDIA H200"}, False, "61 s on NVIDIA H200"),
        ({"threads": "2", "gpu": "NVIDIA H200"}, True, "61 s on 2 CPU threads"),
    ],
)
def test_card_names_machine_of_training(runs, versions, use_cpu, machine):
    record = StageRecord(runs / "ppo")
    run = record.read()
    record.write(versions=run["versions"] | versions, resolved=run["resolved"] | {"use_cpu": use_cpu})
    assert f"the whole run took {machine}\n" in card(runs)


def test_card_on_huggingface_hub_has_source_and_chat_tag(runs):
    StageRecord(runs / "ppo").write(hub="https://huggingface.co")
    (runs / "ppo" / "checkpoint-40" / "chat_template.jinja").write_text("{#- rlhf-zoo {} #}{#- end #}x")
    readme = make_card(runs / "ppo")
    head, body = head_and_body(readme)
    assert head["model-index"][0]["results"][0]["source"] == {
        "name": "rlhf_card.json", "url": "https://huggingface.co/local/tiny-world-ppo/blob/main/rlhf_card.json",
    }  # fmt: skip
    assert "conversational" in head["tags"]
    assert ModelCard.load(readme).data.eval_results[0].source_name == "rlhf_card.json"
    assert 'prompt = [{"role": "user", "content": "prompt 0"}]' in body and '["generated_text"][-1]["content"]' in body


def test_sft_card_links_to_ppo_policy(runs):
    text = card(runs, stage="sft")
    assert cells(text, "**Perplexity**")[1] == "**7.39**" and cells(text, "prompt 1")[1] == "a plain line"
    assert "PPO made from it `local/tiny-world-ppo`" in text


def test_reward_card_compares_accuracy_with_chance_and_length_rule(runs):
    report = reward_report()
    StageRecord(runs / "reward").write(reward_model=report)
    text = card(runs, stage="reward")
    assert cells(text, "**Accuracy**")[2:] == ["0.50", markdown.with_interval(report["length"]["longer_wins"])]
    assert "Length hardly matters." in text and "PPO trained on it `local/tiny-world-ppo`" in text
    assert 'score = pipeline("text-classification", model="./tiny-world-reward", function_to_apply="none")' in text
    report["length"]["spearman"] = estimate(0.75)
    StageRecord(runs / "reward").write(reward_model=report)
    assert "PPO on this reward will probably write longer texts." in card(runs, stage="reward")


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_card_unfolded_part_is_short(runs, stage):
    StageRecord(runs / "reward").write(reward_model=reward_report())
    text = card(runs, stage=stage, trivial=CONSTANTS, **judged("healthy", recommended=40))
    assert len(text.split()) <= 450


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ([0.0, 1.0, 1.0], "Reward and judge rise together, then level off"),
        ([0.0, 1.0, 2.0], "Reward and judge rise together"),
        ([0.0, 1.0, -1.0], "Reward rises, the judge ends below SFT"),
        ([0.0, 0.1, 0.1], "Reward rises, the judge hardly changes"),
    ],
)
def test_over_training_title_describes_curves(judge, message):
    over = over_training()
    over["verdict"] = "healthy"
    for row, value in zip([over["sft"], *over["checkpoints"]], judge, strict=True):
        row["judge"] = {"value": value, "ci95": [value - 0.2, value + 0.2], "n": 60}
    assert over_training_title(over) == message
    if judge[-1] >= 1:
        suspicious = {**over, "kind": "suspicious"}
        assert over_training_title(suspicious) == "Reward and judge rise, the verdict is suspicious"
    over["fall"] = {"detected": False, "step": 20, "share_kept": 0.5}
    expected = "Reward rises, the judge is highest at step 20" if judge[-1] >= 1 else message
    assert over_training_title(over) == expected
    over["fall"] = {"detected": True}
    assert over_training_title(over) != message or judge[-1] < 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0267, "0.027"), (0.7259, "0.73"), (-0.184, "−0.18"), (2.18, "2.18"), (11.42, "11.4"),
     (346.7, "347"),
     (12345.6, "12,300"), (540, "540"), (None, "not measured")],
)  # fmt: skip
def test_markdown_short_keeps_two_or_three_digits(value, text):
    assert markdown.short(value) == text


@pytest.mark.parametrize(
    ("name", "title"),
    [('rule:f(a=0, name="all_followed")', "all followed"), ("rule:grammar()", "grammar"), ("llm:gpt(x)", "llm:gpt(x)")],
)
def test_judge_title_omits_arguments(name, title):
    assert markdown.judge_title(name) == title


def test_card_moves_long_command_into_details(runs):
    command = f"rlhf-zoo run tiny-world --seed 3 --ppo.reward_funcs {'f,' * 80}g"
    StageRecord(runs / "ppo").write(command=command)
    text, body = card(runs), (runs / "ppo" / "README.md").read_text()
    assert "- **Repeat it:** the command in the last fold\n" in text and command in body


def test_markdown_interval_writes_negative_bounds_with_to():
    assert markdown.with_interval({"value": -0.07, "ci95": [-0.1123, 0.02]}) == "−0.07 (−0.11 to 0.02)"
    assert markdown.with_interval(None) == "not measured" and markdown.with_interval({"value": 0.5}) == "0.50"
