"""Several reward models as one reward: in the trainer, in a run with its evaluation, and where a run is looked at."""

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_rewards
import torch
from test_rewards import call, one
from toy_run import make_context, make_recipe, save_stage, save_start
from trainer_fixture import LETTERS, make_reward_model, make_tokenizer, make_trainer, prompt_rows, updates_of

from rlhf_zoo import functional
from rlhf_zoo.app.engine import Comparison
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import reward_load_settings
from rlhf_zoo.evaluation.measure import find_reward_judges, make_evaluator
from rlhf_zoo.modeling.models import set_score_statistics
from rlhf_zoo.modeling.sampling.sampler import Samples
from rlhf_zoo.pipeline.inspect import doctor, examination, trace
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.publishing.catalog.lineage import find_lineage
from rlhf_zoo.rewards import RewardEnsemble, RewardModel, Rewards
from rlhf_zoo.runs.checks.models import starting_models
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.parents import check_members
from rlhf_zoo.runs.record import fingerprint

samples = test_rewards.samples
MEMBER = "ensemble/seed-2/reward"
WORST = {"reward_model_path": f"reward,{MEMBER}", "reward_ensemble": "worst"}


def models() -> list[Any]:
    """Of three seeds, each with units of its own."""
    return [make_reward_model(seed=seed, statistics=(0.1 * seed, 0.2 + 0.3 * seed)) for seed in (1, 2, 3)]


# The trainer


@pytest.mark.parametrize("how", ["worst", "mean", "mean_minus_variance"])
def test_trainer_combines_ensemble_scores_and_logs_each_model(tmp_path: Path, how: str) -> None:
    given: dict[str, Any] = {"reward_ensemble_lambda": 2.0} if how == "mean_minus_variance" else {}
    trainer = make_trainer(
        tmp_path, reward_model=models(), reward_funcs=one, reward_weights=[1.0, 0.5], reward_ensemble=how,
        eval_dataset=prompt_rows(4), eval_strategy="steps", eval_steps=2, **given,
    )  # fmt: skip
    names = ["reward_model", "one", "reward_model_0", "reward_model_1", "reward_model_2", "disagreement"]
    assert trainer.rewards.names == names
    scored: list[Any] = []
    score = trainer.score
    trainer.score = lambda *given: scored.append(score(*given)) or scored[-1]
    trainer.train()
    first = scored[0]
    for paid, _, *each, apart in first.per_reward.tolist():
        mean, variance = statistics.fmean(each), statistics.pvariance(each)
        wanted = {"worst": min(each), "mean": mean, "mean_minus_variance": mean - 2 * variance}[how]
        assert paid == pytest.approx(wanted, abs=1e-5)
        assert apart == pytest.approx(statistics.stdev(each), abs=1e-5)
    assert first.total.tolist() == pytest.approx((first.per_reward[:, 0] + 0.5 * first.per_reward[:, 1]).tolist())
    assert len({round(value, 4) for value in first.per_reward[:, 2:5].flatten().tolist()}) > 12, "models differ"
    row = updates_of(trainer)[0]
    assert [row[f"rewards/{name}"] for name in names] == pytest.approx(first.per_reward.mean(0).tolist(), abs=1e-5)
    assert any("eval_rewards/disagreement" in line for line in trainer.state.log_history)


def test_critic_starts_from_first_model_that_shares_policy_tokenizer(
    tmp_path: Path,
) -> None:
    own = make_tokenizer(LETTERS[::-1])
    given = [make_reward_model(own, seed=4), *models()[:2]]
    trainer = make_trainer(
        tmp_path, reward_model=given, reward_processing_class=[own, make_tokenizer(), make_tokenizer()],
        reward_ensemble="mean",
    )  # fmt: skip
    assert [one.shares_ids for one in trainer.rewards.models] == [False, True, True]
    trunk = trainer.value_model.get_input_embeddings().weight
    assert torch.equal(trunk, given[1].get_input_embeddings().weight)
    trainer.train()
    with pytest.raises(ZooError, match=r"^There are 3 reward models and 2 tokenizers in reward_processing_class"):
        make_trainer(tmp_path, reward_model=given, reward_processing_class=[own, own], reward_ensemble="mean")


def test_ensemble_loads_one_model_at_a_time(samples: Samples) -> None:
    """So that those which wait on the CPU, or in shards, are never whole together."""
    open_now, most = [], []

    class Hand:
        def __init__(self, model: Any) -> None:
            self.model = model

        def __enter__(self) -> None:
            open_now.append(self.model)
            most.append(list(open_now))

        def __exit__(self, *_: object) -> None:
            open_now.remove(self.model)

    tokenizer, given = make_tokenizer(), models()
    scorers = [RewardModel(model, tokenizer, tokenizer) for model in given]
    rewards = Rewards([RewardEnsemble(scorers[:2], how="worst"), scorers[2]])
    rewards(samples, ["a"] * 3, ["b"] * 3, ["ab"] * 3, {}, model_context=Hand)
    assert most == [[model] for model in given]


def test_ensemble_scores_texts_like_samples_with_default_lambda_of_half(samples: Samples) -> None:
    tokenizer, policy = make_tokenizer(), make_tokenizer(LETTERS[::-1])
    scorers = [RewardModel(model, tokenizer, policy) for model in models()]
    ensemble = RewardEnsemble(scorers, how="worst")
    texts, ended = ["abc", "gg", "lkj"], samples.ended.tolist()
    found = ensemble.score_texts(texts, ended=ended)
    each = [scorer.score_texts(texts, ended=ended).tolist() for scorer in scorers]
    assert found.tolist() == pytest.approx([min(column) for column in zip(*each, strict=True)])
    assert ensemble.score_samples(samples, texts).tolist() == pytest.approx(found.tolist())
    assert Rewards([one, ensemble]).model_rewards == [ensemble]
    half, default = (RewardEnsemble(scorers, how="mean_minus_variance", penalty=x) for x in (0.5, None))
    assert torch.equal(half.score_texts(texts, ended=ended), default.score_texts(texts, ended=ended))
    assert reward_load_settings.ENSEMBLES == functional.ENSEMBLES, "what cards are read by needs no torch"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "There are 3 reward models and reward_ensemble is not set: choose 'worst' or"),
        (
            {"reward_ensemble": "best"},
            "reward_ensemble is 'best': choose one of 'worst', 'mean', 'mean_minus_variance'.",
        ),
        ({"reward_ensemble": "mean", "count": 1}, "reward_ensemble is 'mean', but there is one reward model: use"),
        ({"reward_ensemble": "mean", "count": 0}, "reward_ensemble is 'mean', but there is no reward model: use"),
        (
            {"reward_ensemble": "worst", "reward_ensemble_lambda": 0.5},
            "reward_ensemble_lambda is 0.5, but reward_ensemble is 'worst': only 'mean_minus_variance' has a λ",
        ),
        ({"reward_ensemble": "mean_minus_variance", "reward_ensemble_lambda": -1.0}, "reward_ensemble_lambda is -1.0"),
        ({"reward_ensemble": "mean", "twice": True}, "is listed twice: use different"),
        ({"reward_ensemble": "mean", "raw": True}, "has no stored mean and standard deviation"),
        ({"reward_ensemble": "mean", "wide": True}, "has 2 outputs, but a reward model needs one"),
        ({"reward_ensemble": "mean", "reward_weights": [1.0, 1.0]}, "reward_weights has 2 numbers for 1 rewards"),
    ],
)
def test_trainer_rejects_bad_ensembles(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    chosen = models()[: given.pop("count", 3)]
    if given.pop("twice", False):
        chosen[2] = chosen[0]
    if given.pop("raw", False):
        chosen[1] = make_reward_model(seed=5, statistics=None)
    if given.pop("wide", False):
        chosen[1] = make_reward_model(num_labels=2)
    with pytest.raises(ZooError) as caught:
        make_trainer(tmp_path, reward_model=chosen, **given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_ensemble_without_scaling_needs_no_statistics(tmp_path: Path) -> None:
    raw = [make_reward_model(seed=seed, statistics=None) for seed in (1, 2)]
    how = {"score_centering": "running", "score_scaling": "none"}
    assert make_trainer(tmp_path, reward_model=raw, reward_ensemble="worst", **how).rewards.names[0] == "reward_model"


def test_ensemble_names_model_with_nonfinite_score(samples: Samples) -> None:
    tokenizer, given = make_tokenizer(), models()
    given[1].score.weight.data.fill_(math.nan)
    scorers = [RewardModel(model, tokenizer, tokenizer) for model in given]
    with pytest.raises(ZooError, match=r"reward_model LlamaForSequenceClassification scored nan for row 0"):
        call(Rewards([RewardEnsemble(scorers, how="mean")]), samples)


# A run


def save_member(folder: Path, *, sft: Any = None) -> Path:
    """As `rlhf-zoo ensemble` leaves the reward model of seed 2."""
    model = make_reward_model(seed=2)
    set_score_statistics(model, mean=-0.2, std=1.7, measured_on="nothing: a toy")
    save_stage(folder, MEMBER, model, make_tokenizer())
    record = make_context(folder).record("ppo")
    member = type(record)(folder / "run" / MEMBER)
    member.write(stage="reward", parents={"sft": {"fingerprint": sft or fingerprint({"sft": 1})}})
    return member.path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("ensemble")
    make_recipe(folder)
    save_start(folder)
    save_member(folder)
    context = make_context(folder, **WORST)
    assert ppo.run(context)
    return context


def test_run_records_all_reward_models_and_logs_combined_score(run: RunContext) -> None:
    document = run.record("ppo").read()
    assert document["resolved"]["reward_model_path"] == ["reward", MEMBER]
    parents = document["parents"]
    assert parents["reward"]["path"] == "checkpoint-4" and parents["reward_2"]["path"] == f"{MEMBER}/checkpoint-4"
    assert set(document["resolved"]["parents"]) == {"sft", "reward", "reward_2"}
    [first, *_] = run.record("ppo").metrics()
    assert first["rewards/reward_model"] <= min(first["rewards/reward_model_0"], first["rewards/reward_model_1"])

    assert evaluate.run(run)
    tools = make_evaluator(run, run.checkpoint("sft").path)
    assert tools.rewards is not None and len(tools.rewards.models) == 2
    rows = [json.loads(line) for line in (run.directory / "eval/samples.jsonl").open()]
    # Of completions without special tokens, which no text shows.
    rows = [row for row in rows if len(row["ppo"]["completion"]) + row["ppo"]["ended"] == row["ppo"]["length"]]
    texts = [row["prompt"] + row["ppo"]["completion"] for row in rows]
    ended = [row["ppo"]["ended"] for row in rows]
    each = torch.stack([one.score_texts(texts, ended=ended) for one in tools.rewards.models])
    assert [row["ppo"]["reward"] for row in rows] == pytest.approx(each.amin(0).tolist(), abs=1e-4)
    assert (each[0] > each[1]).any() and (each[0] < each[1]).any(), "neither is always the worst"

    card = make_card(run.record("ppo").path).read_text()
    assert f"| reward model 2 | the folder `{MEMBER}` | not published |" in card
    assert re.search(r"reward_ensemble.*worst", card)


def test_ensemble_members_are_not_independent_judges(run: RunContext) -> None:
    paths = [run.checkpoint("reward").path, run.directory / MEMBER / "checkpoint-4"]
    flags = {**run.flags, "recipe": {"evaluation.judge": f"reward:{paths[1]}"}}
    judged = replace(run, flags=flags)
    tools = make_evaluator(judged, judged.checkpoint("sft").path)
    assert find_reward_judges(judged, tools) == {tools.judge.name}


def test_doctor_and_trace_score_with_all_ensemble_members(run: RunContext) -> None:
    findings = {one.check: one for one in doctor.examine(run)}
    assert all(one.status != examination.FAILED for one in findings.values()), findings
    assert findings["reward functions"].detail == "1 × worst of 2 reward models"
    assert findings["reward model's tokenizer"].detail.count("the policy's: it reads ids") == 2

    subject = trace.find_traced_policy(str(run.directory))
    assert [model.path.parent.parent.name for model in subject.reward_models] == ["run", "seed-2"]
    found = trace.trace_checkpoint(subject, "abc")
    each = [found.scores[f"reward_model_{place}"] for place in (0, 1)]
    assert found.score == pytest.approx(min(each)) and each[0] != pytest.approx(each[1])
    alone = trace.find_traced_policy(
        str(run.directory), sft=str(run.directory / "sft"), reward=str(run.directory / MEMBER)
    )
    assert (alone.reference.path, alone.reward_models[0].path.name) == (subject.reference.path, "checkpoint-4")
    assert list(trace.trace_checkpoint(alone, "abc").scores) == ["reward_model"]

    make_card(run.record("ppo").path)
    stage = run.record("ppo").path
    lineage = find_lineage(
        str(stage), sft=str(run.checkpoint("sft").path), reward=str(run.checkpoint("reward").path), hub=run.hub
    )
    assert len(lineage.rewards) == 1 and lineage.reward_load_kwargs["ensemble"] == "worst"
    paths = [model.path for model in subject.reward_models]
    given: dict[str, Any] = {"ppo": run.checkpoint("ppo").path, "sft": subject.reference.path, "device": "cpu"}
    scores = []
    for reward in (paths, paths[0], paths[1]):
        made = Comparison.load(**given, reward=reward, reward_kwargs=lineage.reward_load_kwargs)
        [*_, last] = made.stream("abc", max_new_tokens=6)
        scores.append(last.ppo[0].reward)
    assert scores[0] == pytest.approx(min(scores[1:]))


def test_missing_ensemble_members_are_rejected_before_training(tmp_path: Path) -> None:
    make_recipe(tmp_path)
    save_start(tmp_path)
    context = make_context(tmp_path, **WORST)
    trains = r"`rlhf-zoo ensemble .*toy --output_dir .*run --seeds N` trains reward models of N seeds"
    with pytest.raises(ZooError, match=rf"names {MEMBER}, but .* has no finished reward model: {trains}\.$"):
        check_members(context)
    skipped = {one.check: one for one in doctor.examine(context)}["reward checkpoint"]
    assert (skipped.status, skipped.detail) == (examination.SKIPPED, f"train {MEMBER} with `rlhf-zoo ensemble` first")
    save_member(tmp_path, sft="another")
    with pytest.raises(ZooError, match=rf"from a different SFT policy than .*: {trains} again with --restart\.$"):
        ppo.run(context)
    assert not (tmp_path / "run" / "ppo" / "run.json").exists()
    for wrong, said in (
        ({"reward_ensemble": "worst"}, "reward_ensemble is 'worst', but there is one reward model"),
        ({"reward_model_path": f"reward,{MEMBER}"}, "There are 2 reward models and reward_ensemble is not set"),
        ({"reward_model_path": "reward,reward", "reward_ensemble": "mean"}, "The reward model reward is listed twice"),
    ):
        with pytest.raises(ZooError, match=said):
            ppo.load_reward_functions(make_context(tmp_path, **wrong).settings("ppo"))
    with pytest.raises(ZooError, match="stage reward has a single output, so the label 'GOOD'"):
        starting_models(make_context(tmp_path, **WORST, reward_label="GOOD"))
