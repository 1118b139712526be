"""The eval stage: its judge is fixed before training, and a new evaluation replaces the earlier one."""

import html
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_run
from folders import file_digests
from json_keys import unexplained
from thread_hub import ThreadHub
from toy_run import EVALUATION, make_context, make_recipe, save_stage, save_start, trained_policy
from trainer_fixture import make_tokenizer
from vote_store import make_vote

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import trajectory
from rlhf_zoo.evaluation.evidence import Evidence
from rlhf_zoo.evaluation.head_to_head import HeadToHead
from rlhf_zoo.evaluation.measure import make_evaluator
from rlhf_zoo.evaluation.stats import Estimate
from rlhf_zoo.evaluation.text_logprobs import score_by_reward
from rlhf_zoo.evaluation.trivial_policies import TrivialScores
from rlhf_zoo.evaluation.verdict import Verdict, decide
from rlhf_zoo.evaluation.votes.data import HubVotes
from rlhf_zoo.fileio import read_json
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.pipeline import run_recipe as pipeline
from rlhf_zoo.pipeline.policy_eval import ComparisonSettings, find_pair
from rlhf_zoo.pipeline.policy_eval import evaluate as evaluate_pair
from rlhf_zoo.pipeline.stages import evaluate, ppo, reward
from rlhf_zoo.pipeline.stages.evaluate import evaluation_prompts
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.data.hold_out import split_by_prompt
from rlhf_zoo.runs.dataset import own_pairs, stage_source
from rlhf_zoo.runs.judge import judge_run, shares_reward_labels
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.usefixtures("quick_plots")

JUDGE = "toy_run:judge"
EXACT = "rlhf_zoo.rewards.verifiable:exact_match"
ALONE = {name: value for name, value in EVALUATION.items() if name != "judge"}


def raise_no_opinion(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    raise ValueError("no opinion")


def with_judge(context: RunContext, judge: str, **keys: Any) -> RunContext:
    """The same run with another judge, as `rlhf-zoo eval RECIPE --judge` makes it."""
    flags = {"evaluation.judge": judge, **{f"evaluation.{name}": value for name, value in keys.items()}}
    return replace(context, flags={**context.flags, "recipe": flags})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """A run whose PPO is finished, and whose checkpoint the verdict is to choose."""
    folder = tmp_path_factory.mktemp("trained")
    make_recipe(folder)
    save_start(folder)
    context = make_context(folder, release="recommended")
    assert ppo.run(context) is True
    return context


def test_evaluation_reruns_with_another_judge(trained: RunContext) -> None:
    """A failed evaluation changes neither the earlier figures nor the published checkpoint."""
    chosen = trained.record("ppo").read()["chosen"]
    assert chosen["provisional"] is True
    before = file_digests(trained.directory)
    with pytest.raises(Exception, match="no opinion"):
        evaluate.run(with_judge(trained, "test_evaluate_stage:raise_no_opinion"))
    assert file_digests(trained.directory) == before, "a failed evaluation holds nothing"

    assert evaluate.run(trained) is True and evaluate.run(trained) is False
    assert "provisional" not in trained.record("ppo").read()["chosen"]
    first = trained.record("eval").read()
    assert first["resolved"]["evaluation"] | EVALUATION == first["resolved"]["evaluation"]

    before = file_digests(trained.directory)
    with pytest.raises(Exception, match="no opinion"):
        evaluate.run(with_judge(trained, "test_evaluate_stage:raise_no_opinion"))
    assert file_digests(trained.directory) == before, "the figures before still stand, and main is not held back"

    other = with_judge(trained, "rule:toy_run:answered", judges=[JUDGE])
    assert evaluate.run(other) is True and evaluate.run(other) is False
    second = trained.record("eval").read()
    figures = read_json(trained.record("eval").path / "evaluation.json")
    assert second["fingerprint"] != first["fingerprint"] and second["status"] == "finished"
    assert list(figures["judges"]) == ["rule:toy_run:answered", "judge"]
    assert second["parents"]["ppo"]["path"] == f"checkpoint-{trained.record('ppo').read()['chosen']['step']}"
    trained.record("eval").write(recipe="another")
    with pytest.raises(ZooError, match="has a run of the recipe 'another'"):
        evaluate.run(trained)


UP, UNSURE = Estimate(0.5, (0.1, 0.9), 6), Estimate(0.5, (-0.1, 1.1), 6)


@pytest.mark.parametrize(("gain", "winnable"), [(UP, False), (UNSURE, False), (UP, True)])
def test_checkpoint_is_recommended_only_when_test_prompts_confirm_gain(
    trained: RunContext, monkeypatch: pytest.MonkeyPatch, gain: Estimate, winnable: bool
) -> None:
    """Step 1 is the candidate; none remains when test prompts show that a constant text wins by the judge."""

    def decided(evidence: Evidence, *, seed: int) -> Verdict:
        return replace(decide(evidence, seed=seed), candidate=None if evidence.judge.winnable else 1)

    monkeypatch.setattr(trajectory, "decide", decided)
    monkeypatch.setattr(HeadToHead, "judge_gain", lambda self, policy, rows: gain)
    monkeypatch.setattr(TrivialScores, "winnable", winnable)
    assert evaluate.run(replace(trained, restart=True)) is True
    ppo, figures = trained.record("ppo"), read_json(trained.record("eval").path / "evaluation.json")
    recommended = 1 if gain is UP and not winnable else None
    step, none = (1, {}) if recommended else (3, {"none": True})
    assert ppo.read()["chosen"] == {"step": step, "rule": "recommended", "metric": None, "value": None, **none}
    assert trained.record("eval").read()["parents"]["ppo"]["path"] == f"checkpoint-{step}"
    assert figures["recommended"] is recommended and figures["over_training"]["recommended"] is recommended
    there = figures["over_training"]["at_recommended"]
    assert (there and there["step"]) == recommended, "a verdict on what is main, beside that on the end of training"
    make_card(ppo.path)
    card = (ppo.path / "README.md").read_text()
    assert f"The recipe's rule is `recommended`: step **{step}**" in card
    assert ("recommends none; there is no tag `best`." in card) is (recommended is None)


def test_evaluation_compares_policies_with_reference_answers(trained: RunContext) -> None:
    """The judge scores length: a sample is at least as long as the one-letter reference answer."""
    judged_by_length = with_judge(trained, JUDGE, reference={"column": "answer"})
    assert evaluate.run(judged_by_length) is True
    reference = read_json(trained.record("eval").path / "evaluation.json")["reference"]
    samples = (trained.record("eval").path / "samples.jsonl").read_text().splitlines()
    lengths = [len(json.loads(line)["sft"]["completion"]) for line in samples[:: EVALUATION["samples"]]]
    rows = evaluation_prompts(trained, stage_source(trained, "ppo"))
    apart = [length - len(answer) for length, answer in zip(lengths, rows["answer"], strict=True)]
    assert reference["sft"]["value"] == sum(
        1.0 if difference > 0 else 0.5 if difference == 0 else 0.0 for difference in apart
    ) / len(apart)
    assert reference["column"] == "answer" and reference["temperature"] is None and reference["ppo"]["n"] == len(rows)
    document = read_json(trained.record("eval").path / "evaluation.json")
    seen = {"sft": None, "reward": len(rows), "ppo": len(rows)}
    assert document["data"]["trained_on"] == seen, (
        "all splits hold the same prompts, and SFT's plain texts do not tell theirs"
    )
    make_card(trained.record("ppo").path)
    readme = (trained.record("ppo").path / "README.md").read_text()
    twice = [f"{name} also trained on **{len(rows)} of them**. " for name in ("The reward model", "PPO")]
    assert f"{''.join(twice)}It is unknown whether SFT trained on them. " in readme
    assert (
        "preferred by the judge over the reference answer (column answer)"
        in (trained.record("ppo").path / "README.md").read_text()
    )

    colder = with_judge(trained, JUDGE, reference={"column": "answer", "temperature": 0.01})
    assert evaluate.run(colder) is True and evaluate.run(colder) is False
    again = read_json(trained.record("eval").path / "evaluation.json")
    assert again["reference"]["temperature"] == 0.01 and again["temperature"] != 0.01


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"column": "summary"}, "names the column summary, but the evaluation's prompts have .*answer.*: name one"),
        ({"temperature": 0.5}, "evaluation.reference names no column"),
        ({"column": "row"}, "but some of its values are neither text nor messages"),
        (
            {"column": "answer", "temperature": 0.0},
            "temperature in evaluation.reference is 0.0: completions are sampled, so",
        ),
        ({"colum": "answer"}, "evaluation.reference"),
    ],
)
def test_evaluation_rejects_invalid_reference_settings(trained: RunContext, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        evaluation_prompts(context := with_judge(trained, JUDGE, reference=keys), stage_source(context, "ppo"))


class Silent:
    def rule(self, *_: Any) -> None: ...
    def print(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"judge": None}, "The judge classifier has no labeled texts .* name another judge"),
        ({"judge": "reward:no where"}, "neither a folder nor a repository"),
        ({"prompts": 99}, "evaluation.prompts is 99: lower it"),
    ],
)
def test_run_checks_evaluation_settings_before_training(
    tmp_path: Path, evaluation: dict[str, Any], message: str
) -> None:
    make_recipe(tmp_path, shared={"evaluation": {**EVALUATION, **evaluation}})
    context = make_context(tmp_path)
    with pytest.raises(ZooError, match=message):
        pipeline.run(context, Silent())
    assert not any((tmp_path / "run" / stage).exists() for stage in ("sft", "reward", "ppo", "eval"))


def test_verifiable_reward_serves_as_judge(tmp_path: Path) -> None:
    """Answers are read strictly and leniently, the verdict uses the rule, and the card says so."""
    make_recipe(tmp_path, ppo={"reward_funcs": [EXACT], "reward_model_path": None}, shared={"evaluation": ALONE})
    save_start(tmp_path)
    context = make_context(tmp_path)
    ppo.run(context)
    assert evaluate.run(context) is True
    figures = read_json(context.record("eval").path / "evaluation.json")
    name = f"rule:{EXACT}"
    judge, answers = figures["judge"], figures["judges"][name]["answers"]
    assert (judge["name"], judge["is_training_reward"], judge["checks_answers"]) == (name, True, True)
    assert answers.keys() == {"strict", "lenient"} and unexplained(figures) == []
    for sides in answers.values():
        for side in ("sft", "ppo"):
            right, passed = sides[side]["accuracy"], sides[side]["pass_at"]
            assert list(passed) == ["1", "2"] and right["n"] == 12 and passed["2"]["n"] == 6
            assert passed["1"]["value"] == pytest.approx(right["value"])
            assert passed["1"]["value"] <= passed["2"]["value"]
        assert sides["difference"]["value"] == pytest.approx(
            sides["ppo"]["accuracy"]["value"] - sides["sft"]["accuracy"]["value"]
        )
    assert answers["strict"]["ppo"]["accuracy"]["value"] == pytest.approx(figures["ppo"]["reward"]["value"])
    assert answers["lenient"]["ppo"]["accuracy"]["value"] >= answers["strict"]["ppo"]["accuracy"]["value"]
    assert "the training reward itself" not in str(figures["over_training"]["reasons"])
    trivial = figures["trivial"]
    assert [row["kind"] for row in trivial["policies"]][-1] == "shuffled" and trivial["policies"][0]["text"]
    assert figures["over_training"]["judge_reliability"]["winnable"] is trivial["winnable_by_a_constant"]
    assert all(row["win_rate"]["n"] == 12 and row["reward"]["n"] == 12 for row in trivial["policies"])
    make_card(context.record("ppo").path)
    card = html.unescape((context.record("ppo").path / "README.md").read_text())
    assert "| PPO with prompts shuffled |" in card
    assert "It is the reward that PPO was trained on. It checks whether an answer is right" in card
    assert f"correct answers by {name}, read strictly" in card and "| pass@2, read leniently" in card
    assert "By the strict reading the policy gains" in card
    alone = figures["over_training"]["without_judge"]
    assert alone in ("not judged", "suspicious", "hacked"), "nobody but a judge sees a gain"
    assert f"from reward, KL and probes alone, the same rule gives: **{alone}**." in card


def test_verifiable_reward_is_default_judge(tmp_path: Path) -> None:
    make_recipe(tmp_path, ppo={"reward_funcs": ["toy_run:answered", EXACT]}, shared={"evaluation": ALONE})
    context = make_context(tmp_path)
    settled = evaluate.evaluation_settings(context)
    assert settled.judge_names == [f"rule:{EXACT}"] and evaluate.identity_keys(settled)["judge"] == f"rule:{EXACT}"
    assert evaluate.evaluation_settings(make_context(tmp_path, reward_funcs="toy_run:answered")).judge_names == [
        "classifier"
    ]


REWARD = {"use_cpu": True, "max_steps": 2, "save_steps": 2, "score_samples": 4, "dataset_test_split": "none"}


def test_same_labels_judge_trains_on_reserved_pairs(tmp_path: Path) -> None:
    make_recipe(tmp_path, shared={"evaluation": {**EVALUATION, "judge": "same-labels"}})

    def flagged(**reward: Any) -> RunContext:
        context = make_context(tmp_path)
        return replace(context, flags={**context.flags, "reward": {**REWARD, **reward}})

    with pytest.raises(ZooError, match="reserves no pairs: set judge_share"):
        pipeline.run(flagged(), Silent())
    save_stage(tmp_path, "sft", trained_policy(), make_tokenizer())
    context = flagged(judge_share=0.5)
    assert reward.run(context) is True
    of_judge = judge_run(context)
    _, source = reward.open_pairs(context)
    reserved, trained = (set(reward.training_pairs(run, source)[0]["prompt"]) for run in (of_judge, context))
    assert len(reserved) == len(trained) == 6 and not reserved & trained

    assert ppo.run(context) is True and evaluate.run(context) is True
    figures = read_json(context.record("eval").path / "evaluation.json")
    assert figures["judge"]["name"] == "same labels" and not figures["judge"]["is_training_reward"]
    assert "shares the errors of these labels" in figures["judge"]["description"]
    assert context.record("eval").read()["resolved"]["evaluation"]["judge"] == "same-labels"
    record = of_judge.record("reward")
    assert record.path == tmp_path / "run/judge/reward"
    assert record.read()["fingerprint"] == context.record("reward").read()["fingerprint"]
    assert evaluate.run(context) is False
    assert evaluate.run(make_context(tmp_path)) is False, "the flags of the reward stage are those that it was given"
    again = judge_run(make_context(tmp_path)).settings("reward").resolved
    assert {**record.read()["resolved"], **again} == record.read()["resolved"] and again["max_steps"] == 2
    # Another judge leaves it and the reward model as they are; other keys of the reward model are another one's.
    before = file_digests(tmp_path / "run/judge")
    assert evaluate.run(with_judge(context, JUDGE)) is True
    with pytest.raises(ZooError, match="was trained with a different max_steps than this command sets"):
        evaluate.run(flagged(judge_share=0.5, max_steps=1))
    evaluate.check_judges(flagged(judge_share=0.5, max_steps=1), restart=True)
    assert file_digests(tmp_path / "run/judge") == before


def make_length_judge(texts: Sequence[str]) -> Any:
    """A judge that learns from texts alone: it likes long completions."""
    assert all(isinstance(text, str) for text in texts)

    class Long:
        name, description = "length", f"Learned from {len(texts)} texts."

        def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
            return toy_run.judge(prompts, completions)

    return Long()


def test_own_pairs_decide_whether_judge_is_trusted(trained: RunContext, tmp_path: Path) -> None:
    """A file beside recipe.yaml, checked first; the order within its pairs decides, and a change counts."""
    shutil.copytree(trained.directory, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    shutil.copytree(trained.recipe.folder, tmp_path / "toy")
    recipe = load_recipe(str(tmp_path / "toy"))
    run = replace(trained, directory=tmp_path / "run", recipe=recipe)
    texts = tmp_path / "toy" / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": letter, "label": 0}) + "\n" for letter in "abcd"))
    keys = {"own_pairs": {"dataset_name": "own.jsonl"}, "labeled": {"dataset_name": str(texts)}}
    context = with_judge(run, "unlabeled:test_evaluate_stage:make_length_judge", judges=[JUDGE], **keys)

    def write(*sides: str, rows: int = 40) -> None:
        pairs = [{"prompt": f"p{row}", sides[0]: "ab", sides[1]: "a", "from": "ppo"} for row in range(rows)]
        (tmp_path / "toy" / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))

    with pytest.raises(ZooError, match=r"own\.jsonl"):
        evaluate.check_judges(context)
    write("chosen", "refused")
    with pytest.raises(ZooError, match="has no column 'rejected', only"):
        evaluate.check_judges(context)
    write("rejected", "chosen")
    assert evaluate.run(context) is True and evaluate.run(context) is False
    path = tmp_path / "run/eval/evaluation.json"
    figures = read_json(path)
    check, over = figures["judge"]["check"], figures["over_training"]
    assert unexplained(figures) == [] and figures["own_pairs"] == {"dataset_name": "own.jsonl"}
    assert figures["judge"]["description"] == "Learned from 4 texts." and check["same_labels"] is False
    assert (check["own"]["accuracy"]["value"], check["own"]["accuracy"]["n"]) == (0.0, 40)
    assert (
        over["judge_reliability"]["own_accuracy"] == check["own"]["accuracy"]
        and not over["judge_reliability"]["trusted"]
    )
    assert any("of 40 pairs of the policies' outputs correctly" in reason for reason in over["reasons"])
    assert figures["judges"]["judge"]["check"]["own"]["finding"] == "contradicts", "of every judge"
    write("chosen", "rejected")
    assert evaluate.run(context) is True
    standing = read_json(path)["over_training"]["judge_reliability"]
    assert standing["own_accuracy"]["value"] == 1.0 and standing["unfit"] is None
    # Who learned from the labels of the reward's data is said to have.
    assert shares_reward_labels(with_judge(run, "classifier"), "classifier")
    assert not shares_reward_labels(context, "classifier") and not shares_reward_labels(
        context, context.shared.evaluation.judge
    )


def test_votes_on_hub_serve_as_own_pairs(trained: RunContext, thread_hub: ThreadHub, tmp_path: Path) -> None:
    """Votes come from the Hub; ties are no pairs."""
    hub = Hub("other", thread_hub.url, "a test", thread_hub.token, cache=thread_hub.cache, data_cache=tmp_path)
    votes = [make_vote("left"), make_vote("right"), make_vote("tie")]
    HubVotes("local/votes", hub=hub).append("2030-01-01/first", votes)
    context = with_judge(replace(trained, hub=hub), JUDGE, own_pairs={"dataset_name": "local/votes"})
    opened = own_pairs(context)
    assert opened is not None and opened[1].lineage["commit"]
    pairs = {(row["prompt"], row["chosen"], row["rejected"]) for row in opened[0]}
    assert pairs == {
        (votes[0].prompt, votes[0].left.completion, votes[0].right.completion),
        (votes[1].prompt, votes[1].right.completion, votes[1].left.completion),
    }


def test_evaluation_uses_settings_of_training(trained: RunContext, tmp_path: Path) -> None:
    shutil.copytree(trained.directory, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    plain, length = (
        replace(trained, directory=tmp_path / "run", flags={}),
        trained.settings("ppo").trainer.response_length,
    )
    stages = {**trained.recipe.stages, "ppo": {**trained.recipe.stages["ppo"], "response_length": 3}}
    assert evaluate.run(replace(plain, recipe=replace(trained.recipe, stages=stages)))
    assert read_json(tmp_path / "run/eval/evaluation.json")["max_new_tokens"] == length != 3
    with pytest.raises(ZooError, match="was trained with a different response_length than this command sets"):
        evaluate.run(replace(plain, flags={"ppo": {"response_length": "3"}}))


def first_half_spans(completions: Sequence[str], **_: Any) -> list[list[tuple[int, int, float]]]:
    return [[(0, len(completion) // 2, 1.0)] for completion in completions]


def test_score_by_reward_truncates_and_scores_given_texts(tmp_path: Path) -> None:
    """Texts are truncated, also for a reward that scores spans."""
    make_recipe(tmp_path)
    save_start(tmp_path)
    context = make_context(tmp_path, reward_model_path="none", reward_funcs="test_evaluate_stage:first_half_spans")
    tools = make_evaluator(context, context.checkpoint("sft").path)
    assert score_by_reward(tools, ["ab", "cd"], ["abc" * 40, "ab"], {}, desc="texts") == [1.0, 1.0]


def test_policy_evaluation_uses_held_out_prompts_of_run(trained: RunContext, tmp_path: Path) -> None:
    """By default it takes the run's data, and the share of its prompts that PPO held out."""
    run = tmp_path / "run"
    shutil.copytree(trained.directory, run)
    record = StageRecord(run / "ppo")
    settings = ComparisonSettings(prompts=4, samples=1)
    pair = find_pair(str(run), against=None, reward="none", settings=settings)
    assert pair.data is not None and pair.data.location == str(trained.directory.parent / "data")
    assert pair.held_out is None
    resolved = {**record.read()["resolved"], "held_out_share": 0.2, "dataset_test_split": None}
    record.write(resolved=resolved)
    pair = find_pair(str(run), against=None, reward="none", settings=settings)
    judged = replace(settings, judges=(JUDGE,))
    figures = evaluate_pair(pair, judged, out=tmp_path / "out", command="")
    assert (
        figures["split"] == figures["terms"]["split"] == "train (20% of its prompts held out)"
        and figures["prompts"] == 3
    )
    rows = pair.data.load("prompts", "train", columns=[])
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} == set(split_by_prompt(rows, 0.2, part_count=2)[0]["prompt"])
    on_test = evaluate_pair(pair, replace(judged, split="test"), out=tmp_path / "out", command="")
    assert on_test["split"] == "test" and on_test["prompts"] == 4
