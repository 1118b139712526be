"""lm-evaluation-harness before and after PPO: by a stand-in with its names, and by itself where it is installed.

`make test-full` installs it beside the environment and runs the test of the real one.
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

pytestmark = pytest.mark.usefixtures("pictures")

#: What we call, and by which keywords.
CALLED = {
    "lm_eval:simple_evaluate": {
        "model", "tasks", "num_fewshot", "limit", "apply_chat_template", "log_samples", "task_manager", "random_seed",
        "numpy_random_seed", "torch_random_seed", "fewshot_random_seed",
    },
    "lm_eval.models.huggingface:HFLM": {"pretrained", "tokenizer", "backend", "batch_size"},
    "lm_eval.tasks:TaskManager": set(),
}  # fmt: skip
NOT_INSTALLED = "lm_eval names tasks of lm-evaluation-harness, which is not installed: `pip install 'lm-eval>=0.4.13'`."
REAL = importlib.util.find_spec("lm_eval") is not None


class TaskManager:
    all_tasks = ("letters", "words")

    def load(self, task_list: list[str]) -> None:
        """Fetches the tasks' data."""
        if task_list == ["words"]:
            raise ConnectionError("no such\ndata set")


class HFLM:
    def __init__(self, **given: Any) -> None:
        assert {*given} <= CALLED["lm_eval.models.huggingface:HFLM"]
        self.policy, self.tokenizer = given["pretrained"], given["tokenizer"]


def simple_evaluate(**given: Any) -> dict[str, Any]:
    """What the real one answers with: METRIC,FILTER and its standard error, or "N/A", beside an alias."""
    assert {*given} <= CALLED["lm_eval:simple_evaluate"]
    model, [task] = given["model"], given["tasks"]
    with torch.no_grad():
        ids = torch.tensor([model.tokenizer("abc")["input_ids"]])
        reached = float(model.policy(input_ids=ids).logits.log_softmax(-1).max())
    of_task = {"alias": task, "acc,none": reached, "acc_stderr,none": 0.25, "f1,strict": 1.0, "f1_stderr,strict": "N/A"}
    return {
        "results": {task: of_task, "group": {"alias": "group"}},
        "n-samples": {task: {"original": 9, "effective": given["limit"]}},
        "n-shot": {task: given["num_fewshot"]},
    }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, held in {
        "lm_eval": {"simple_evaluate": simple_evaluate}, "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {}, "lm_eval.models.huggingface": {"HFLM": HFLM},
    }.items():  # fmt: skip
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.13" if name == "lm_eval" else version(name))
    monkeypatch.setattr(harness, "_manager", functools.cache(TaskManager))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("trained")
    make_recipe(folder)
    save_start(folder)
    context = make_context(folder)
    assert ppo.run(context) is True
    return context


def asking(context: RunContext, **keys: Any) -> RunContext:
    return replace(context, flags={**context.flags, "recipe": {f"evaluation.{key}": one for key, one in keys.items()}})


def test_where_it_is_not_installed_the_mend_is_named(trained: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch)
    check_tasks([])
    with pytest.raises(ZooError) as caught:
        evaluate.check_judges(asking(trained, lm_eval="letters"))
    assert str(caught.value) == NOT_INSTALLED


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "lm_eval" else find(name, *of))


def test_the_flag_is_looked_at_before_anything_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch)
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
def test_its_figures_stand_in_the_evaluation_and_on_the_card(trained: RunContext) -> None:
    with pytest.raises(ZooError, match="has no task 'leters', did you mean 'letters'"):
        check_tasks(["leters"])
    check_tasks(["letters", "words"])
    assert evaluate.run(trained) is True
    asked = asking(trained, lm_eval="letters", lm_eval_limit=5, lm_eval_fewshot=2)
    assert evaluate.run(asked) is True and evaluate.run(asked) is False, "with tasks it is another evaluation"
    document = read_json(trained.record("eval").path / "evaluation.json")
    found = document["lm_eval"]
    assert unexplained(found) == [] and (found["version"], found["limit"]) == ("0.4.13", 5)
    assert list(found["tasks"]) == ["letters"], "a group without figures is none"
    task = found["tasks"]["letters"]
    assert (task["n"], task["fewshot"]) == (5, 2)
    before, after = (task["metrics"]["acc,none"][side] for side in ("sft", "ppo"))
    assert before["stderr"] == 0.25 and before["value"] != after["value"], "each policy is asked itself"
    assert task["metrics"]["f1,strict"]["ppo"] == {"value": 1.0, "stderr": None}
    text = make_card(trained.record("ppo").path).read_text()
    assert "| letters, 2 shots | acc |" in text and " ± 0.25" in text and "| letters, 2 shots | f1,strict |" in text
    assert "Before and after PPO, by lm-eval 0.4.13, on at most 5 examples per task" in text
    assert card_json(StageFacts.read(trained.record("ppo").path, None))["evaluation"]["lm_eval"] == found


@pytest.mark.usefixtures("stand_in")
def test_data_that_cannot_be_had_are_told_before_anything_is_sampled(
    trained: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(evaluate, "make_evaluator")
    with pytest.raises(ZooError, match=r"ended with ConnectionError \(no such data set\) on words"):
        evaluate.run(asking(trained, lm_eval="words"))


@pytest.mark.usefixtures("stand_in")
def test_what_it_raises_is_a_sentence(trained: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ValueError("no such\nlabel")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", fail)
    with pytest.raises(ZooError, match=r"ended with ValueError \(no such label\) on letters"):
        evaluate.run(asking(trained, lm_eval="letters"))


@pytest.mark.skipif(not REAL, reason="lm-eval is not installed here; `make test-full` installs it beside")
def test_the_real_one_takes_what_we_call_it_with() -> None:
    for name, keywords in CALLED.items():
        module, _, attribute = name.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
        assert keywords <= parameters.keys(), name
    assert [*inspect.signature(harness._manager().load).parameters] == ["task_list"]


@pytest.mark.skipif(not REAL, reason="lm-eval is not installed here; `make test-full` installs it beside")
def test_a_local_task_is_run_by_the_real_one(trained: RunContext, tmp_path: Path) -> None:
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
    assert evaluate.run(asking(trained, lm_eval=str(task), lm_eval_limit=4)) is True
    found = read_json(trained.record("eval").path / "evaluation.json")["lm_eval"]
    assert found["version"] == importlib.metadata.version("lm_eval") and unexplained(found) == []
    assert found["tasks"]["alphabet"]["n"] == 4
    before = found["tasks"]["alphabet"]["metrics"]["acc,none"]["sft"]
    assert before["value"] == 1.0, "the policy has learned the alphabet"


@pytest.mark.attack
@pytest.mark.usefixtures("stand_in")
def test_a_bare_name_is_no_file_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be a download; a path is written as one."""
    monkeypatch.chdir(tmp_path)
    for name in ("evil", "evil.YAML"):
        Path(name).write_text("task: own\ndoc_to_text: !function beside.f\n")
    Path("folder").mkdir()
    for name in ("evil", "folder", "./folder", "."):
        with pytest.raises(ZooError, match="has no task"):
            check_tasks([name])
    check_tasks(["letters", "./evil", str(tmp_path / "evil"), "evil.YAML"])
