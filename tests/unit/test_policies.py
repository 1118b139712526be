"""`rlhf-zoo eval`: what its arguments mean, and what is refused before any model is loaded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from miniatures import save_two_label_classifier
from toy_models import Toys, save_toys
from transformers import AutoTokenizer

from rlhf_zoo.cli.evaluate import _is_policy, _policy_flags, _recipe_keys
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.llm import LLMJudge
from rlhf_zoo.evaluation.judges.named import check_judges_available, open_panel
from rlhf_zoo.evaluation.judges.panel import Panel, RewardJudge, score_completions, sort_free_first
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.evaluation.measure import find_function_judges, find_reward_model_judges
from rlhf_zoo.modeling.models import load_causal, load_classifier
from rlhf_zoo.pipeline.policy_eval import (
    ComparisonSettings,
    PolicyPair,
    _check_context_length,
    _load_labeled_texts,
    find_pair,
)
from rlhf_zoo.ppo.base import PPO_STATE
from rlhf_zoo.publishing.cards.report import report, slug
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.runs.data.sources import DataSource
from rlhf_zoo.runs.record import StageRecord
from rlhf_zoo.runs.settings.evaluation import LabeledArguments, LLMConfig, llm_config
from rlhf_zoo.runs.settings.values import json_object


def test_what_is_a_policy(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.yaml").touch()
    (tmp_path / "model").mkdir()
    recipes = ["tiny-world", "tiny-wrold", str(tmp_path / "recipe"), str(tmp_path / "missing"), "./missing"]
    assert [name for name in recipes if _is_policy(name, against=None)] == []
    policies = ["local/toy-ppo", "local/toy-ppo@step-40", str(tmp_path / "model")]
    assert [name for name in policies if _is_policy(name, against=None)] == policies
    assert _is_policy("gpt2", against="gpt2-xl")


def test_options_as_keys_of_a_recipe() -> None:
    given = {"prompts": 20, "samples": None, "group": None, "llm": {"budget": 1}}
    assert _recipe_keys(("a:b", "llm:x"), given, {}) == {
        "evaluation.prompts": 20, "evaluation.llm": {"budget": 1}, "evaluation.judge": "a:b",
        "evaluation.judges": ["llm:x"], "evaluation.judge_name": None, "evaluation.judge_description": "",
    }  # fmt: skip
    with pytest.raises(ZooError, match=r"--prompts sets evaluation.prompts too: leave --prompts or --evalu"):
        _recipe_keys((), given, {"evaluation.prompts": 3})


def test_flags_of_a_policy() -> None:
    def read(*arguments: str) -> dict[str, Any]:
        context: Any = SimpleNamespace(args=list(arguments))
        return _policy_flags(context)

    assert read("--seed", "3", "--dataset-name", "x/y") == {"seed": 3, "dataset_name": "x/y"}
    columns = read("--columns", '{"prompt": "text"}', "--dataset_config", "default")
    assert columns == {"columns": {"prompt": "text"}, "dataset_config": "default"}
    assert read("--columns", "{prompt: question}", "--dataset_config", "null") == {
        "columns": {"prompt": "question"}, "dataset_config": "",
    }  # fmt: skip
    for arguments, message in (
        (["--sample", "2"], "--sample is not an option for a policy, did you mean 'samples'?"),
        (["--ppo.kl_coef", "0"], "--ppo.kl_coef is not an option for a policy"),
        (["--seed", "x"], "--seed is 'x': give a whole number."),
        (["--columns", "text"], "--columns is 'text', but it takes a mapping"),
    ):
        with pytest.raises(ZooError) as refused:
            read(*arguments)
        assert message in str(refused.value)
    for text, message in (
        ("{", "--llm is '{', which is not JSON ("),
        ("[1]", "--llm is '[1]', which is not a JSON object: write '{}'."),
        (f'{{"budget": {2**63}}}', f"{2**63}}}', but it takes whole numbers of at most 63 bits: write '{{}}'."),
    ):
        with pytest.raises(ZooError) as refused:
            json_object(text, option="--llm", example="'{}'")
        assert message in str(refused.value)
    assert json_object('{"budget": 1}', option="--llm", example="'{}'") == {"budget": 1}


def test_terms_that_cannot_work() -> None:
    fields: dict[str, Any]
    for fields, message in (
        ({"columns": {"prompt": 3}}, "columns has 3 for prompt, which is not the name of a column."),
        ({"prompts": 0}, r"--prompts is 0: give at least 1\."),
        ({"seed": -1}, r"--seed is -1: give at least 0\."),
        ({"temperature": 0.0}, r"--temperature is 0\.0: .* give at least 0\.0001\."),
        ({"max_new_tokens": 0}, r"--max_new_tokens is 0: give at least 1\."),
    ):
        with pytest.raises(ZooError, match=message):
            ComparisonSettings(**fields)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nonsense"], "There is no judge 'nonsense': write classifier, KIND:NAME or MODULE:FUNCTION, where KIND is"),
        (["classifer"], "There is no judge 'classifer', did you mean 'classifier'?"),
        (["vote:a/b"], "There is no kind of judge 'vote' and no module of that name, did you mean 'votes:a/b'?"),
        (["nowhere_at_all:f"], "There is no module 'nowhere_at_all'"),
        (["reward.x:f"], "There is no module 'reward'"),
        (["reward:"], "names nothing after its colon: write reward:NAME."),
        (
            ["votes:a/b"],
            "The first judge must score single completions, but votes:a/b only compares pairs: name another judge "
            "before it, such as classifier.",
        ),
        (["pairs:builtins:len"], "but pairs:builtins:len only compares pairs"),
        (["classifier", "votes:nowhere"], "is not a repository for votes"),
        (["classifier", "llm:x", "classifier"], "The judge classifier is named twice: name it once."),
        (["rule:numeric_matsh"], "numeric_matsh"),
        (
            ["rule:length(target=4)"],
            "counts tokens, but a judge reads texts: set its unit, as in rule:length(unit='words').",
        ),
        (["unlabeled:nowhere_at_all:f"], "There is no module 'nowhere_at_all'"),
        (["unlabelled:a:b"], "did you mean 'unlabeled:a:b'?"),
    ],
)
def test_judges_that_cannot_be_had(names: list[str], message: str) -> None:
    with pytest.raises(ZooError) as refused:
        check_judges_available(names, LLMConfig())
    assert message in str(refused.value)


def test_settings_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "ftp://elsewhere")
    with pytest.raises(ZooError, match="is not an endpoint of an LLM judge"):
        check_judges_available(["llm:x"], LLMConfig())
    monkeypatch.delenv("OPENAI_BASE_URL")
    check_judges_available(["llm:x"], llm_config({"price": [1, 2], "budget": 3}, "--llm"))
    for given, message in (
        ({"prise": [1, 2]}, "did you mean 'price'?"),
        ({"price": [1]}, "set two numbers"),
        ({"budget": "much"}, "budget"),
        ({"endpoint": "https://elsewhere"}, "not a key of an LLM judge"),  # a recipe must not say where a key is sent
        ({"api_key_env": "HF_TOKEN"}, "not a key of an LLM judge: the keys are criterion, price, budget, "),
    ):
        with pytest.raises(ZooError) as refused:
            llm_config(given, "--llm")
        assert message in str(refused.value)


def longest(prompts: list[str], completions: list[str]) -> list[float]:
    """The longer, the better.

    A card says the first paragraph alone.
    """
    return [float(len(text)) for text in completions]


def known(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [None if wanted == "?" else float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def told(texts: list[str]) -> Any:
    class Told:
        name, description = "told", str(texts)

        def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
            return longest(prompts, completions)

    return Told()


def few(texts: list[str]) -> Any:
    raise ValueError("too few")


def first(prompts: list[str], shown_first: list[str], shown_second: list[str]) -> list[float]:
    return [1.0] * len(prompts)


def test_a_panel(tmp_path: Path) -> None:
    names = ["test_policies:longest", "rule:test_policies:known", "pairs:test_policies:first", "votes:a/b"]
    panel = open_panel(names, llm=LLMConfig(), load_labeled=lambda: [], folder=tmp_path, seed=1, title="length")
    assert [judge.name for judge in panel.scoring_judges] == ["length", "rule:test_policies:known"]
    assert [judge.name for judge in panel.pair_judges] == ["pairs:test_policies:first"] and panel.vote_repos == ("a/b",)
    assert panel.scoring_judges[0].description == "The longer, the better."
    rule = panel.scoring_judges[1]
    assert score_completions(rule, ["p", "q"], ["a", "b"], {"answer": ["a", "a"], "other": [1, 2]}) == [1.0, 0.0]
    assert score_completions(panel.scoring_judges[0], ["p"], ["abc"], {"answer": ["a"]}) == [3.0]
    with pytest.raises(ZooError, match="returned no score for the prompt 'q'"):
        score_completions(rule, ["p", "q"], ["a", "b"], {"answer": ["a", "?"]})
    with pytest.raises(ZooError, match="answer"):
        score_completions(rule, ["p"], ["a"], {})
    assert isinstance(rule, RuleJudge)


def test_a_judge_that_is_shown_no_label(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "bb", "label": 0}]

    def panel(name: str) -> Any:
        return open_panel([f"unlabeled:{name}"], llm=LLMConfig(), load_labeled=lambda: rows, folder=tmp_path, seed=1)

    (judge,) = panel("test_policies:told").scoring_judges
    assert judge.description == "['a', 'bb']" and score_completions(judge, ["p"], ["abc"], {}) == [3.0]
    with pytest.raises(ZooError, match="returned a list, not a judge"):
        panel("builtins:sorted")
    with pytest.raises(ZooError, match=r"The judge 'test_policies:few' raised ValueError \(too few\): fix it"):
        panel("test_policies:few")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """To be read alone."""
    return save_toys(tmp_path_factory.mktemp("toys"))


def test_a_policy_and_what_is_none(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="is a LlamaForSequenceClassification, which generates no text"):
        load_causal(toys.reward)
    assert load_causal(toys.sft).config.architectures == ["LlamaForCausalLM"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ZooError, match="cannot be loaded"):
        open_panel([f"reward:{tmp_path / 'empty'}"], llm=LLMConfig(), load_labeled=lambda: [], folder=tmp_path, seed=1)
    tools: Any = SimpleNamespace(
        reference=load_causal(toys.sft), tokenizer=AutoTokenizer.from_pretrained(toys.sft), max_new_tokens=95
    )
    _check_context_length(load_causal(toys.ppo), tools, ["the"])
    with pytest.raises(
        ZooError,
        match=r"The models take 96 tokens and the longest prompt has 2, which leaves no room for 95 new tokens",
    ):
        _check_context_length(load_causal(toys.ppo), tools, ["the", "the camera"])


def test_the_training_reward_is_known_by_its_weights(toys: Toys) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toys.reward)

    def model() -> RewardModel:
        return RewardModel(load_classifier(toys.reward), tokenizer, tokenizer)

    other = model()
    with torch.no_grad():
        next(other.model.parameters())[0, 0] += 1e-3
    panel = Panel([RewardJudge("reward:copy", model()), RewardJudge("reward:other", other)])
    tools: Any = SimpleNamespace(panel=panel, rewards=Rewards([model()]))
    assert find_reward_model_judges(tools) == {"reward:copy"}
    assert find_reward_model_judges(SimpleNamespace(panel=panel, rewards=None)) == frozenset()  # type: ignore[arg-type]
    given = panel.scoring_judges[0](["the camera"], [" is good"])
    alone = model().score_texts(["the camera is good"], ended=[True]).tolist()
    np.testing.assert_allclose(given, alone, rtol=1e-6)


def test_a_judge_is_one_label_of_a_classifier(toys: Toys, tmp_path: Path) -> None:
    two = tmp_path / "a#b"
    save_two_label_classifier(two, toys.reward)

    def judge(name: str) -> RewardJudge:
        [found] = open_panel([name], llm=LLMConfig(), load_labeled=lambda: [], folder=tmp_path, seed=1).scoring_judges
        assert isinstance(found, RewardJudge)
        return found

    good, bad = judge(f"reward:{two}#good"), judge(f"reward:{two}#bad")
    assert good.description == f"The probability of 'good' by {two}."
    asked = ["the camera", "the battery"], [" is good", " is not"]
    shares = np.array([good(*asked), bad(*asked)])
    np.testing.assert_allclose(shares.sum(0), 1, rtol=1e-6)
    assert ((shares > 0) & (shares < 1)).all() and len(set(shares.ravel())) == 4
    for name, message in (
        (
            f"reward:{two}",
            rf"has 2 outputs, but a judge has one: name the label .* reward:{two}#bad; the labels are bad, good",
        ),
        (f"reward:{two}#goood", "has no label 'goood', did you mean 'good'"),
        (f"reward:{toys.reward}#good", "has a single output, so the label 'good'"),
    ):
        with pytest.raises(ZooError, match=message):
            check_judges_available([name], LLMConfig())


@pytest.mark.attack
@pytest.mark.parametrize("where", ["parents", "evaluation"])
def test_no_card_has_a_policy_judged_by_files_of_this_machine(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A card is its publisher's word: it may name data sets of a Hub, whatever folders there are here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "secret").mkdir(parents=True)
    (tmp_path / "runs" / "secret" / "train.jsonl").write_text('{"text": "mine", "label": 1}\n')
    folder = shutil.copytree(toys.ppo, tmp_path / "strange")
    named = {
        "parents": {"parents": {"data": {"repo": "runs/secret", "commit": "main"}}},
        "evaluation": {"evaluation": {"labeled": {"dataset_name": "runs/secret"}}},
    }[where]
    (folder / "rlhf_card.json").write_text(json.dumps({"stage": "ppo", **named}))
    with pytest.raises(ZooError, match=r"The card of .* sets .* to .*runs/secret, and a local folder has"):
        find_pair(str(folder), against=str(toys.sft), reward=None, settings=ComparisonSettings())


def test_folders_of_models(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="does not name the SFT model it started from"):
        find_pair(str(toys.ppo), against=None, reward=None, settings=ComparisonSettings())
    empty = tmp_path / "nothing"
    empty.mkdir()
    with pytest.raises(ZooError, match="nothing holds no model: pass a run, such as runs/tiny-world"):
        find_pair(str(empty), against=None, reward=None, settings=ComparisonSettings())
    settings = ComparisonSettings(dataset_name="data", dataset_revision="main")
    found = find_pair(str(toys.ppo), against=str(toys.sft), reward=str(toys.reward), settings=settings)
    assert found.data is not None
    assert (found.policy.path, found.against.path, found.rewards[0].path) == (toys.ppo, toys.sft, toys.reward)
    assert (found.data.location, found.data.revision) == ("data", "main")
    without = find_pair(str(toys.ppo), against=str(toys.sft), reward="none", settings=settings)
    assert without.rewards == () and without.sampling == {"temperature": 1.0, "response_length": 53}


def finished(toys: Toys, folder: Path, settings: dict[str, Any]) -> Path:
    """The last checkpoint of the run in `folder`, whose parents are the toys."""
    checkpoint = folder / "ppo/checkpoint-4"
    shutil.copytree(toys.ppo, checkpoint)
    (checkpoint / PPO_STATE).touch()
    record = StageRecord(checkpoint.parent)
    record.mark_complete(checkpoint)
    parents = {"sft": {"path": str(toys.sft)}, "reward": {"path": str(toys.reward)}}
    record.write(stage="ppo", status="finished", parents=parents, resolved=settings)
    return checkpoint


def test_missing_models_of_a_run_are_named_by_flags_of_the_command(toys: Toys, tmp_path: Path) -> None:
    settings = ComparisonSettings(dataset_name="data")
    record = StageRecord(finished(toys, tmp_path / "run", {}).parent)
    parents = record.read()["parents"]
    record.write(parents={**parents, "reward": {"path": str(tmp_path / "deleted")}})
    with pytest.raises(ZooError, match=r"The reward model that .* nor published: name it with --reward\."):
        find_pair(str(tmp_path / "run"), against=None, reward=None, settings=settings)
    assert find_pair(str(tmp_path / "run"), against=None, reward="none", settings=settings).rewards == ()
    record.write(parents={"sft": {"path": str(tmp_path / "deleted")}})
    with pytest.raises(ZooError, match=r"The sft model that .* nor published: name it with --against\."):
        find_pair(str(tmp_path / "run"), against=None, reward=None, settings=settings)


def described(toys: Toys, folder: Path, card: dict[str, Any]) -> PolicyPair:
    """A folder with the toy policy and a card, against the toy SFT policy."""
    shutil.copytree(toys.ppo, folder, dirs_exist_ok=True)
    (folder / "rlhf_card.json").write_text(json.dumps(card))
    return find_pair(
        str(folder), against=str(toys.sft), reward="none", settings=ComparisonSettings(dataset_name="data")
    )


def test_what_a_run_of_this_machine_says(toys: Toys, tmp_path: Path) -> None:
    """Its SFT policy, reward model, data and judge stand in its records; a card only describes."""
    (tmp_path / "run/data/prompts").mkdir(parents=True)
    checkpoint = finished(toys, tmp_path / "run", {"response_length": 9, "temperature": 0.5})
    StageRecord(tmp_path / "run/eval").write(resolved={"evaluation": {"judge": "own_judges:longest"}})
    for name in (tmp_path / "run", tmp_path / "run/ppo", checkpoint):
        found = find_pair(str(name), against=None, reward=None, settings=ComparisonSettings())
        assert (found.policy.path, found.against.path, found.judge) == (checkpoint, toys.sft, "own_judges:longest")
        assert [one.path for one in found.rewards] == [toys.reward]
        assert found.data is not None and found.data.location == str(tmp_path / "run/data")
        assert found.sampling == {"response_length": 9.0, "temperature": 0.5}
    card = described(toys, tmp_path / "told", {"evaluation": {"judge": {"target": "os:system"}}})
    assert card.judge is None and card.judge_in_card == "os:system"  # told, never imported
    for odd in ([], {"judge": "x"}, {"judge": {"target": 3}}, "x"):
        assert described(toys, tmp_path / "told", {"evaluation": odd}).judge_in_card is None


def test_missing_labeled_texts_are_reported_with_their_own_data_set(toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/train.jsonl").write_text('{"text": "a"}\n')
    pair = described(toys, tmp_path / "told", {})
    pair = replace(pair, labeled=LabeledArguments(dataset_name=str(tmp_path / "labels")))
    with pytest.raises(ZooError, match=r"The data set .*labels has no labeled texts .* choose a judge with --judge"):
        _load_labeled_texts(pair, DataSource("prompts", None, {}))


REWARD_SETTINGS = {
    "reward_funcs": ["length(target=4)", "rules:polite"],
    "reward_weights": [1.0, 0.5, 0],
    "reward_model_path": "reward",
}


@pytest.mark.parametrize(
    ("settings", "rewarded"),
    [
        (REWARD_SETTINGS, {"length(target=4)"}),
        ({**REWARD_SETTINGS, "reward_model_path": None, "reward_weights": [0, 2]}, {"rules:polite"}),
        ({**REWARD_SETTINGS, "reward_weights": None}, {"length(target=4)", "rules:polite"}),
        (
            {**REWARD_SETTINGS, "reward_weights": [1.0]},
            {"length(target=4)", "rules:polite"},
        ),  # what cannot be read frees nobody
        ({**REWARD_SETTINGS, "reward_weights": "x"}, {"length(target=4)", "rules:polite"}),
        ({**REWARD_SETTINGS, "reward_funcs": [3]}, set()),
        ({**REWARD_SETTINGS, "reward_funcs": "rules:polite"}, set()),
        ({}, set()),
    ],
)
def test_functions_that_rewarded_a_policy(
    toys: Toys, tmp_path: Path, settings: dict[str, Any], rewarded: set[str]
) -> None:
    """By the card of a folder, and by the record of a run."""
    card = described(toys, tmp_path / "told", {"settings": settings})
    assert card.functions == rewarded
    finished(toys, tmp_path / "run", settings)
    settings = ComparisonSettings(dataset_name="data")
    assert find_pair(str(tmp_path / "run"), against=None, reward=None, settings=settings).functions == rewarded
    names = ["length(target=4, unit='words')", "length(unit='words', target=5)"]
    tools: Any = SimpleNamespace(panel=Panel([RuleJudge(name) for name in names]))
    same = {f"rule:{names[0]}"} if "length(target=4)" in rewarded else set()
    assert find_function_judges(tools, card.functions) == same, "in whatever unit it counts"
    assert find_function_judges(tools, {"length(target=5)"}) == {f"rule:{names[1]}"}


def test_what_is_paid_for_is_asked_last() -> None:
    paid, rule = LLMJudge("http://127.0.0.1:9", "m"), RuleJudge("length(target=4, unit='words')")
    assert sort_free_first([paid, rule]) == [rule, paid]


def test_a_stage_of_a_run_is_its_reward_model(toys: Toys, tmp_path: Path) -> None:
    record = StageRecord(tmp_path / "reward")
    shutil.copytree(toys.reward, record.checkpoint_path(3))
    record.mark_complete(record.checkpoint_path(3))
    record.write(stage="reward")
    panel = open_panel([f"reward:{record.path}"], llm=LLMConfig(), load_labeled=list, folder=tmp_path, seed=1)
    assert panel.scoring_judges[0](["the camera"], [" is good"])


def test_a_report_shows_names_as_text() -> None:
    estimate = {"value": 0.5, "ci95": [0.4, 0.6], "n": 8}
    judge = {
        "description": "<b>*good*</b>", "is_training_reward": True, "win_rate": estimate,
        "check": {"accuracy": estimate, "unfit": "The judge contradicts the labels."},
    }  # fmt: skip
    document = {
        "policy": {"name": "a/b@c", "repo": "a/b", "commit": "0" * 40, "tag": "c"},
        "against": {"name": "x|y", "commit": None},
        "sft": {"judge": estimate, "kl": {**estimate, "value": 0.0}}, "ppo": {"judge": estimate, "kl": estimate},
        "judges": {"<i>": judge}, "judge": {"name": "<i>"}, "win_rate_at_equal_length": estimate, "control": estimate,
        "votes": {"u/v": {"win_rate": None, "problem": "u/v holds no votes."}}, "n": 8, "prompts": 4,
        "samples_per_prompt": 2, "split": "test", "data": {"location": "d"}, "temperature": 1.0, "max_new_tokens": 5,
        "seed": 1, "command": "rlhf-zoo eval a/b",
        "difference": {"judge": {**estimate, "value": 0.25}},
    }  # fmt: skip
    text = report(document)
    assert "<i>" not in text and "<b>" not in text
    assert "for `a/b@c` at `0000000000`, which may differ from the checkpoint that this card describes." in text
    assert "0: it is the reference | 0.500 [0.400, 0.600] | 8 |  |" in text
    assert "| judge | 0.500 [0.400, 0.600] | 0.500 [0.400, 0.600] | 8 | 0.250 [0.400, 0.600] |" in text
    tables = [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(tables) == {6}
    assert "**This is the policy's own reward" in text and "**The judge contradicts the labels.**" in text
    assert "u/v holds no votes." in text
    assert (
        slug("local/toy-ppo@step-40") == "local--toy-ppo--step-40" and slug("../x/") == "x" and slug("//") == "policy"
    )
