"""lm-evaluation-harness before and after PPO, with a stand-in, and with the real package if it is installed.

`make test-full` installs it in a separate folder and runs the tests of the real package.
"""

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from json_keys import unexplained
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.cli import main as cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import lm_eval as harness
from rlhf_zoo.evaluation.lm_eval import check_tasks
from rlhf_zoo.fileio import read_json
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.publishing.cards.card import card_json, make_card
from rlhf_zoo.publishing.cards.facts import StageFacts
from rlhf_zoo.runs.context import RunContext

pytestmark = pytest.mark.usefixtures("quick_plots")

#: The functions that we call, and the keywords that we pass.
CALLED = {
    "lm_eval:simple_evaluate": {
        "model", "tasks", "num_fewshot", "limit", "apply_chat_template", "log_samples", "task_manager", "random_seed",
        "numpy_random_seed", "torch_random_seed", "fewshot_random_seed",
    },
    "lm_eval.models.huggingface:HFLM": {"pretrained", "tokenizer", "backend", "batch_size"},
    "lm_eval.tasks:TaskManager": set(),
}  # fmt: skip
NOT_INSTALLED = (
    "The key lm_eval names tasks of lm-evaluation-harness, which is not installed: run `pip install 'lm-eval>=0.4.13'`."
)
REAL = importlib.util.find_spec("lm_eval") is not None


class TaskManager:
    all_tasks = ("letters", "words")

    def load(self, task_list: list[str]) -> None:
        """Fetches the tasks' data."""
        if task_list == ["words"]:
            raise ConnectionError("no such\ndata set")


class HFLM:
    def __init__(self, **options: Any) -> None:
        assert {*options} <= CALLED["lm_eval.models.huggingface:HFLM"]
        self.policy, self.tokenizer = options["pretrained"], options["tokenizer"]


def simple_evaluate(**options: Any) -> dict[str, Any]:
    """Returns results in the real form: an alias, and METRIC,FILTER with its standard error or "N/A"."""
    assert {*options} <= CALLED["lm_eval:simple_evaluate"]
    model, [task] = options["model"], options["tasks"]
    with torch.no_grad():
        ids = torch.tensor([model.tokenizer("abc")["input_ids"]])
        figure = float(model.policy(input_ids=ids).logits.log_softmax(-1).max())
    task_result = {
        "alias": task,
        "acc,none": figure,
        "acc_stderr,none": 0.25,
        "f1,strict": 1.0,
        "f1_stderr,strict": "N/A",
    }
    return {
        "results": {task: task_result, "group": {"alias": "group"}},
        "n-samples": {task: {"original": 9, "effective": options["limit"]}},
        "n-shot": {task: options["num_fewshot"]},
    }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in {
        "lm_eval": {"simple_evaluate": simple_evaluate}, "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {}, "lm_eval.models.huggingface": {"HFLM": HFLM},
    }.items():  # fmt: skip
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.13" if name == "lm_eval" else version(name))
    monkeypatch.setattr(harness, "_task_manager", functools.cache(TaskManager))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("trained")
    make_recipe(folder)
    save_start(folder)
    context = make_context(folder)
    assert ppo.run(context) is True
    return context


def with_evaluation_keys(context: RunContext, **keys: Any) -> RunContext:
    return replace(
        context, flags={**context.flags, "recipe": {f"evaluation.{key}": value for key, value in keys.items()}}
    )


def hide_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *arguments: None if name == "lm_eval" else find(name, *arguments)
    )


def test_missing_lm_eval_is_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_lm_eval(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    lines = ["--corpus_args", '{"lines": 600}']
    for words in (
        ["run", "tiny-world", "--hub", "local", "--lm_eval", "letters,words", *lines],
        ["sweep", "tiny-world", "--hub", "local", "--grid", "lam=1", "--lm_eval", "letters", *lines],
        ["recipes", "validate", "tiny-world", "--evaluation.lm_eval", "letters"],
    ):
        with pytest.raises(ZooError) as caught:
            cli.cli.main(words, standalone_mode=False)
        assert str(caught.value) == NOT_INSTALLED
    assert not (tmp_path / "runs/tiny-world/sft").exists()
    with pytest.raises(ZooError, match="--lm_eval is for a recipe's run, but local/x is a policy: leave it out"):
        cli.cli.main(["eval", "local/x", "--lm_eval", "letters"], standalone_mode=False)


@pytest.mark.usefixtures("stand_in")
def test_lm_eval_figures_are_in_evaluation_and_card(trained: RunContext) -> None:
    with pytest.raises(ZooError, match="has no task 'leters', did you mean 'letters'"):
        check_tasks(["leters"])
    check_tasks(["letters", "words"])
    assert evaluate.run(trained) is True
    context = with_evaluation_keys(trained, lm_eval="letters", lm_eval_limit=5, lm_eval_fewshot=2)
    assert evaluate.run(context) is True and evaluate.run(context) is False, "tasks make it another evaluation"
    document = read_json(trained.record("eval").path / "evaluation.json")
    results = document["lm_eval"]
    assert unexplained(results) == [] and (results["version"], results["limit"]) == ("0.4.13", 5)
    assert list(results["tasks"]) == ["letters"], "a group without figures is left out"
    task = results["tasks"]["letters"]
    assert (task["n"], task["fewshot"]) == (5, 2)
    before, after = (task["metrics"]["acc,none"][side] for side in ("sft", "ppo"))
    assert before["stderr"] == 0.25 and before["value"] != after["value"], "each policy is evaluated"
    assert task["metrics"]["f1,strict"]["ppo"] == {"value": 1.0, "stderr": None}
    text = make_card(trained.record("ppo").path).read_text()
    assert "| letters, 2 shots | acc |" in text and " ± 0.25" in text and "| letters, 2 shots | f1,strict |" in text
    assert "Before and after PPO, by lm-eval 0.4.13, on at most 5 examples per task" in text
    assert card_json(StageFacts.read(trained.record("ppo").path, None))["evaluation"]["lm_eval"] == results


@pytest.mark.usefixtures("stand_in")
def test_unavailable_task_data_fail_before_sampling(trained: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(evaluate, "make_evaluator")
    with pytest.raises(ZooError, match=r"ended with ConnectionError \(no such data set\) on words"):
        evaluate.run(with_evaluation_keys(trained, lm_eval="words"))


@pytest.mark.usefixtures("stand_in")
def test_lm_eval_exception_becomes_one_sentence(trained: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ValueError("no such\nlabel")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", fail)
    with pytest.raises(ZooError, match=r"ended with ValueError \(no such label\) on letters"):
        evaluate.run(with_evaluation_keys(trained, lm_eval="letters"))


@pytest.mark.skipif(not REAL, reason="lm-eval is not installed; `make test-full` installs it")
def test_real_lm_eval_accepts_our_keywords() -> None:
    for name, keywords in CALLED.items():
        module, _, attribute = name.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
        assert keywords <= parameters.keys(), name
    assert [*inspect.signature(harness._task_manager().load).parameters] == ["task_list"]


@pytest.mark.skipif(not REAL, reason="lm-eval is not installed; `make test-full` installs it")
def test_real_lm_eval_runs_local_task(trained: RunContext, tmp_path: Path) -> None:
    rows = [{"text": "abcd", "choices": ["e", "k"], "answer": 0}, {"text": "cdef", "choices": ["z", "g"], "answer": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    task = tmp_path / "alphabet.yaml"
    task.write_text(f"""
task: alphabet
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    with pytest.raises(ZooError, match="has no task 'no such task'"):
        check_tasks(["no such task"])
    assert evaluate.run(with_evaluation_keys(trained, lm_eval=str(task), lm_eval_limit=4)) is True
    results = read_json(trained.record("eval").path / "evaluation.json")["lm_eval"]
    assert results["version"] == importlib.metadata.version("lm_eval") and unexplained(results) == []
    assert results["tasks"]["alphabet"]["n"] == 4
    before = results["tasks"]["alphabet"]["metrics"]["acc,none"]["sft"]
    assert before["value"] == 1.0, "the policy has learned the alphabet"


@pytest.mark.attack
@pytest.mark.usefixtures("stand_in")
def test_bare_task_name_is_not_file_of_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be a download, so only a name that looks like a path may be a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("evil", "evil.YAML"):
        Path(name).write_text("task: own\ndoc_to_text: !function beside.f\n")
    Path("folder").mkdir()
    for name in ("evil", "folder", "./folder", "."):
        with pytest.raises(ZooError, match="has no task"):
            check_tasks([name])
    check_tasks(["letters", "./evil", str(tmp_path / "evil"), "evil.YAML"])
