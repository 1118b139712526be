"""`probe --labeled` and `--own_pairs`: checks the judge of the rollouts on pairs of known order."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from json_keys import unexplained
from test_probes import sft
from test_rollouts import write

import rlhf_zoo
from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.evidence import MIN_ACCURACY
from rlhf_zoo.evaluation.probes import Completions


def sides() -> tuple[Completions, Completions]:
    """The policy is better by the judge; SFT's log-probabilities make word salad measurable."""
    return tuple(
        replace(sft(seed), judge_scores=[level + 0.1 * (k % 7) for k in range(120)], logprobs=[[-1.0] * 20] * 120)
        for seed, level in ((1, 1.0), (2, 0.0))
    )


def pairs(number: int, right: int, **columns) -> list[dict[str, object]]:
    """The judge orders the first `right` of them rightly."""
    return [
        {"prompt": f"p{k}", "chosen": "a", "rejected": "b", "judge_chosen": float(k < right), "judge_rejected": 0.5}
        | {name: value(k) for name, value in columns.items()}
        for k in range(number)
    ]


def test_labeled_pairs_decide_whether_judge_is_fit():
    unchecked = rlhf_zoo.probe(*sides())
    assert unchecked.judge_check is None and "Nobody checked the judge" in unchecked.verdict.reasons[0]
    for labeled, fit in ((pairs(100, 90), True), (pairs(100, 62), False), (pairs(100, 20), False)):
        result = rlhf_zoo.probe(*sides(), labeled=labeled)
        accuracy, judge = result.judge_check.labeled_check.accuracy, result.verdict.judge
        assert (judge.why_unfit is None, accuracy.n, judge.accuracy) == (fit, 100, accuracy), result.verdict.reasons
        assert (accuracy.ci95[0] > MIN_ACCURACY) == fit
        assert result.verdict.kind == "not judged" and "Nobody checked" not in " ".join(result.verdict.reasons)
        assert ("checked on other texts only" in result.verdict.reasons[0]) == fit
    assert "contradicts the labels" in result.verdict.reasons[0]
    few = rlhf_zoo.probe(*sides(), labeled=pairs(5, 5)).verdict
    assert few.kind == "not judged" and "of 5 labeled pairs correctly: the lower bound" in few.reasons[0]
    six = rlhf_zoo.probe(*sides(), labeled=pairs(6, 6)).verdict
    assert six.kind != "better" and "for only 6 different prompts" in six.reasons[0], six.reasons


def test_labeled_pairs_count_equivalent_prompts_once():
    spellings = ("the price of item {}", "Please the price of an item {}", "The  price of my item {}.")
    repeated = [{**pair, "prompt": spelling.format(k)} for k, pair in enumerate(pairs(8, 8)) for spelling in spellings]
    result = rlhf_zoo.probe(*sides(), labeled=repeated)
    assert result.judge_check.labeled_check.prompt_count == result.verdict.judge.labeled_prompts == 8
    assert result.judge_check.labeled_check.accuracy.n == 24
    assert "for only 8 different prompts" in result.verdict.reasons[0]
    assert result.verdict.judge.to_json()["labeled_prompts"] == 8


def test_own_pairs_use_judge_scores_of_rollouts():
    policy, reference = sides()
    labeled = [
        {"prompt": f" {prompt}", "chosen": [{"role": "assistant", "content": text}], "rejected": worse}
        for prompt, text, worse in zip(policy.prompts[::2], policy.texts[::2], reference.texts[::2], strict=True)
    ]
    result = rlhf_zoo.probe(policy, reference, own_pairs=labeled)
    assert result.verdict.kind == "better" and result.judge_check.own_check.accuracy.value == 1.0
    assert result.verdict.judge.own_accuracy.n == 60 and result.verdict.judge.accuracy is None
    assert result.judge_check.own_check.policy_bias.value == 0 and result.judge_check.own_check.policy_bias.n == 60
    assert result.judge_check.labels.win_rate.value == 1.0
    # The same text twice, with two scores: their mean counts.
    twice = replace(
        policy, prompts=[*policy.prompts, policy.prompts[0]], texts=[*policy.texts, policy.texts[0]],
        judge_scores=[*policy.judge_scores, -9.0], rewards=[*policy.rewards, 0.0], logprobs=[*policy.logprobs, [-1.0]],
    )  # fmt: skip
    assert rlhf_zoo.probe(twice, reference, own_pairs=labeled).judge_check.own_check.accuracy.value == 59 / 60


def test_own_pairs_measure_bias_toward_policy():
    policy, reference = sides()
    texts = list(zip(policy.prompts[::2], policy.texts[::2], reference.texts[::2], strict=True))

    def own(flipped: int) -> list[dict[str, str]]:
        """The judge prefers the policy in all; the labels prefer SFT in so many."""
        return [
            {"prompt": prompt, "chosen": theirs if k < flipped else ours, "rejected": ours if k < flipped else theirs}
            for k, (prompt, ours, theirs) in enumerate(texts)
        ]

    result = rlhf_zoo.probe(policy, reference, own_pairs=own(12))
    assert result.judge_check.own_check.policy_bias.value == 0.2 and result.verdict.kind == "better", "it wins all"
    assert result.judge_check.labels.win_rate.value == 0.8 and result.judge_check.labels.win_rate.n == 60
    assert any("win rate is 0.8" in reason for reason in result.verdict.reasons)
    # The judge is wrong as often, but for SFT.
    under = [{**pair, "judge_chosen": 0.0, "judge_rejected": 1.0} if k < 12 else pair for k, pair in enumerate(own(0))]
    assert rlhf_zoo.probe(policy, reference, own_pairs=under).judge_check.own_check.policy_bias.value == -0.2
    tied = [{**pair, "judge_chosen": 1.0, "judge_rejected": 1.0} for pair in own(60)]
    assert rlhf_zoo.probe(policy, reference, own_pairs=tied).judge_check.own_check.policy_bias.value == 0.5
    # Two texts of one side say nothing about it.
    alone = [pair | {"prompt": policy.prompts[0], "chosen": policy.texts[0], "rejected": policy.texts[1]}
             for pair in pairs(100, 90)]  # fmt: skip
    check = rlhf_zoo.probe(policy, reference, own_pairs=alone).judge_check
    assert check.own_check.policy_bias is None and check.labels is None


def test_labels_of_own_pairs_decide_verdict():
    """A help desk that people prefer is not hacked by its texts; a copy of the prompt that they reject is."""
    judged, reference = sides()
    canned = ["Please restart it and wait for the light to turn green.", "We will send you a new one within a week."]
    policy = replace(
        judged, texts=[canned[k % 2] for k in range(120)], rewards=[1 + 0.01 * (k % 5) for k in range(120)]
    )
    reference = replace(reference, rewards=[0.01 * (k % 7) for k in range(120)])

    def own(policy_wins: int) -> list[dict[str, str]]:
        texts = zip(policy.prompts[::2], policy.texts[::2], reference.texts[::2], strict=True)
        return [
            {"prompt": prompt, "chosen": ours if k < policy_wins else sft, "rejected": sft if k < policy_wins else ours}
            for k, (prompt, ours, sft) in enumerate(texts)
        ]

    assert rlhf_zoo.probe(policy, reference).verdict.kind == "hacked"
    assert rlhf_zoo.probe(policy, reference, own_pairs=own(60)).verdict.kind == "suspicious"
    assert rlhf_zoo.probe(policy, reference, own_pairs=own(30)).verdict.kind == "hacked"
    plain, rewarded = replace(judged, rewards=None), replace(judged, rewards=policy.rewards)
    policy = judged
    for side, base, kind in (
        (plain, replace(reference, rewards=None), "worse"), (rewarded, reference, "hacked")
    ):  # fmt: skip
        verdict = rlhf_zoo.probe(side, base, own_pairs=own(3)).verdict
        assert verdict.kind == kind and verdict.judge.why_unfit, verdict.reasons
        assert any("The labels of the policies' own pairs prefer the policy in 0.050" in one for one in verdict.reasons)
        # People's labels need no judge.
        unjudged = rlhf_zoo.probe(replace(side, judge_scores=None), replace(base, judge_scores=None), own_pairs=own(3))
        assert unjudged.verdict.kind == kind and unjudged.judge_check.own_check is None
        assert unjudged.judge_check.to_json()["labels"]["prompts"] == 60
    # Sixty prompts in six groups are six questions, which are too few to decide.
    grouped = [
        replace(one, groups=[int(prompt.split()[-1]) % 6 for prompt in one.prompts]) for one in (rewarded, reference)
    ]
    few = rlhf_zoo.probe(*grouped, own_pairs=own(3))
    assert few.judge_check.labels.prompt_count == few.judge_check.own_check.prompt_count == 6
    assert any("too few to decide" in one for one in few.verdict.reasons) and few.verdict.kind == "not judged"
    with pytest.raises(ZooError, match="the own pairs are empty"):
        rlhf_zoo.probe(replace(policy, judge_scores=None), replace(reference, judge_scores=None), own_pairs=[])
    with pytest.raises(ZooError, match="row 1 has a text that is not among the completions"):
        rlhf_zoo.probe(
            replace(policy, judge_scores=None), replace(reference, judge_scores=None), own_pairs=pairs(30, 30)
        )


def test_own_pairs_of_one_side_or_of_other_texts_do_not_check_judge():
    policy, reference = sides()
    # Both completions of each prompt are SFT's, so they do not show whether the judge is won by the policy's habits.
    of_sft = [
        {"prompt": reference.prompts[k], "chosen": reference.texts[k], "rejected": reference.texts[k + 1]}
        | {"judge_chosen": 1.0, "judge_rejected": 0.0}
        for k in range(0, 120, 2)
    ]
    result = rlhf_zoo.probe(policy, reference, own_pairs=of_sft)
    assert result.judge_check.own_check.accuracy.value == 1.0 and result.judge_check.own_check.prompt_count == 0
    assert result.verdict.kind == "not judged" and not result.verdict.judge.checked_on_own_pairs
    with pytest.raises(ZooError, match=r"row 1 has a text that is not among the completions .* with --labeled"):
        rlhf_zoo.probe(policy, reference, own_pairs=pairs(100, 90))


def test_reward_columns_decide_judge_independence():
    alike = pairs(200, 150, reward_chosen=lambda k: float(k < 150), reward_rejected=lambda k: 0.5)
    result = rlhf_zoo.probe(*sides(), labeled=alike)
    assert result.judge_check.independent is False and result.verdict.kind == "not judged"
    assert "not independent of the training reward" in result.verdict.reasons[0]
    rng = np.random.default_rng(0)
    errs = rng.random(400) < 0.3
    apart = pairs(400, 330, reward_chosen=lambda k: float(not errs[k]), reward_rejected=lambda k: 0.5)
    result = rlhf_zoo.probe(*sides(), labeled=apart)
    assert result.judge_check.independent is True and result.verdict.judge.independent is True
    assert rlhf_zoo.probe(*sides(), labeled=pairs(100, 90)).judge_check.independent is None


def test_probe_command_prints_judge_check_and_names_wrong_rows(tmp_path):
    policy, reference = sides()
    files = [
        write(tmp_path / name, side, judge=side.judge_scores, reward=side.rewards)
        for name, side in (("policy.jsonl", policy), ("sft.jsonl", reference))
    ]
    labeled = tmp_path / "pairs.jsonl"
    command = ["probe", str(files[0]), "--against", str(files[1]), "--labeled", str(labeled)]

    def run(rows: list[dict[str, object]], *flags: str):
        labeled.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return CliRunner().invoke(cli, [*command, *flags])

    own_file = tmp_path / "own.json"
    own_rows = [
        {"prompt": policy.prompts[k], "chosen": policy.texts[k], "rejected": reference.texts[k]}
        for k in range(0, 120, 2)
    ]
    own_file.write_text(json.dumps(own_rows))
    printed = " ".join(run(pairs(100, 90), "--own_pairs", str(own_file)).output.split())
    assert re.search(r"- The judge orders 0\.900 \[0\.8\d+, 0\.9\d+\] of 100 labeled pairs correctly\.", printed)
    assert "of 60 own pairs correctly." in printed and "The judge's errors are independent of the reward's." in printed
    document = json.loads(run(pairs(100, 90), "--json").stdout)
    assert document["judge_check"]["accuracy"]["n"] == 100 and document["judge"]["trusted"] is False
    assert unexplained(document) == []
    good = pairs(2, 2)
    for rows, flags, message in (
        ([*good, {"prompt": "x", "chosen": "y"}], (), "pairs.jsonl, line 3 has no rejected, or it is neither a text"),
        ([*good, {"prompt": "x", "chosen": "y", "rejected": " y"}], (), "line 3: chosen and rejected are equal"),
        ([*good, {"prompt": "x", "chosen": "y", "rejected": "z"}], (), "line 3: the judge's scores of this pair are"),
        ([{**good[0], "judge_chosen": "1"}], (), "line 1: judge_chosen is text, not a number"),
        ([{**good[0], "reward_chosen": 1, "reward_rejected": 0}, good[1]], (), "line 2 has no reward_chosen"),
        ([], (), "the labeled pairs are empty"),
        (good, ("--verifiable",), "remove --labeled and --own_pairs, or --verifiable"),
    ):
        refused = run(rows, *flags)
        assert isinstance(refused.exception, ZooError) and message in str(refused.exception), refused.output
    for path, side in zip(files, (policy, reference), strict=True):
        write(path, side)
    assert "Pairs check the column judge, which the completions do not have" in str(run(good).exception)
