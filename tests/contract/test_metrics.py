"""The metric modules load with `evaluate.load` without a request, and give exact figures."""

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
import yaml
from hub_fixture import base_environment
from warm import PYTHON

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation import metrics
from rlhf_zoo.evaluation.stats import bootstrap_mean, mean_share, proportion, win_rate
from rlhf_zoo.evaluation.text import distinct_n_estimate

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "metrics"


@pytest.fixture(scope="module", autouse=True)
def _own_caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path_factory.mktemp("evaluate"))
        yield


def test_every_metric_folder_loads():
    assert metrics.METRICS == ("distinct_n", "kl_divergence", "preference_accuracy", "win_rate")
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == list(metrics.METRICS)
    for name in metrics.METRICS:
        assert {path.name for path in (FOLDER / name).iterdir() if path.name != "__pycache__"} == {
            f"{name}.py",
            "README.md",
            "requirements.txt",
        }
        loaded = metrics.load_metric(name)
        assert isinstance(loaded, evaluate.Metric)
        assert (loaded.name, loaded.module_type) == (name, "metric")


def test_load_metric_ignores_other_version_in_cache(monkeypatch, tmp_path):
    """An earlier release may have left one in a cache that comes first on the path."""
    old = tmp_path / "evaluate_modules" / "metrics" / "win_rate"
    old.mkdir(parents=True)
    for folder in (old, *old.parents[:2]):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, name)
    assert metrics.load_metric("win_rate").compute(predictions=[1.0], references=[0.0])["value"] == 1.0


def test_load_metric_rejects_unknown_names(monkeypatch, tmp_path):
    with pytest.raises(ZooError, match="no metric 'win-rate', did you mean 'win_rate'"):
        metrics.load_metric("win-rate")
    with pytest.raises(ValueError, match="win_rate has no configuration 'by_row'"):
        metrics.load_metric("win_rate", "by_row")
    monkeypatch.setattr(metrics, "__file__", str(tmp_path / "rlhf_zoo" / "evaluation" / "metrics.py"))
    with pytest.raises(ZooError, match="lacks the metric module win_rate"):
        metrics.find_metric_folder("win_rate")
    for location in ("metrics", "rlhf_zoo/_metrics"):  # in a checkout, and in a wheel, which takes precedence
        (tmp_path / location / "win_rate").mkdir(parents=True)
        assert metrics.find_metric_folder("win_rate") == tmp_path / location / "win_rate"


def test_metrics_load_and_compute_without_network(tmp_path):
    """From the checkout's root, with the documented path and empty caches, and without offline settings."""
    code = """
import socket, sys, json
def refuse(*arguments, **options):
    raise AssertionError(f"a request: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
import evaluate
from rlhf_zoo.evaluation.metrics import METRICS, load_metric
assert not evaluate.config.HF_EVALUATE_OFFLINE
rows = {
    "distinct_n": {"predictions": ["a b", "a c"]},
    "kl_divergence": {"predictions": [[-1.0]], "references": [[-3.0]]},
    "preference_accuracy": {"predictions": [1.0], "references": [0.0]},
    "win_rate": {"predictions": [1.0], "references": [0.0]},
}
results = {name: [evaluate.load(f"metrics/{name}").compute(**rows[name])["value"],
                load_metric(name).compute(**rows[name])["value"]] for name in METRICS}
print(json.dumps(results))
"""
    env = base_environment() | {"HF_HOME": str(tmp_path)}
    process = subprocess.run([*PYTHON, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "distinct_n": [1.0, 1.0],
        "kl_divergence": [2.0, 2.0],
        "preference_accuracy": [1.0, 1.0],
        "win_rate": [1.0, 1.0],
    }


def test_metric_imports_name_source_of_package():
    from evaluate.loading import get_imports

    for name in metrics.METRICS:
        imports = get_imports(str(FOLDER / name / f"{name}.py"))
        assert ("library", "rlhf_zoo", "git+https://github.com/rlhf-zoo/rlhf-zoo", None) in imports
        assert {kind for kind, *_ in imports} == {"library"}


@pytest.mark.parametrize("name", metrics.METRICS)
def test_metric_readme_example_prints_its_result(name):
    _, head, body = (FOLDER / name / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    front = yaml.safe_load(head)
    assert {"evaluate", "metric"} <= set(front["tags"]) and front["license"] == "apache-2.0"
    assert len(front["short_description"]) <= 60 and front["title"] and front["description"]
    call, printed = re.search(r"print\(metric\.compute\((.+)\)\)\n```\n\nprints\n\n```\n(.+)\n```", body).groups()
    keywords = ast.parse(f"_({call})", mode="eval").body.keywords
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
    assert str(metrics.load_metric(name).compute(**arguments)) == printed
    assert metrics.load_metric(name).inputs_description.strip() in body


# Figures


def test_win_rate_and_distinct_n_match_evaluation():
    rng = np.random.default_rng(0)
    ours, theirs = rng.integers(0, 4, (2, 60)).astype(float)
    rows = {"predictions": ours, "references": theirs}
    prompts = [str(row // 3) for row in range(60)]
    metric = metrics.load_metric("win_rate")
    expected = win_rate(ours, theirs, prompts, tolerance=1.0).to_json()
    assert metric.compute(**rows, prompts=prompts, tolerance=1.0) == expected
    assert metric.compute(**rows) == win_rate(ours, theirs, list(range(60))).to_json()
    texts, prompts = ["the lens is sharp", "the lens is bright", "a case", "a case"], ["a", "a", "b", "b"]
    metric = metrics.load_metric("distinct_n")
    assert metric.compute(predictions=texts) == distinct_n_estimate(texts, [0, 1, 2, 3], 2).to_json()
    assert metric.compute(predictions=texts, prompts=prompts, n=1) == distinct_n_estimate(texts, prompts, 1).to_json()


def test_preference_accuracy_is_proportion_or_mean_by_prompt():
    chosen, rejected = [1.0, 2.0, 0.5, 3.0], [0.0, 2.0, 1.5, 1.0]  # right, tie, wrong, right
    metric = metrics.load_metric("preference_accuracy")
    assert metric.compute(predictions=chosen, references=rejected) == proportion(2, 4).to_json()
    by_prompt = metric.compute(predictions=chosen, references=rejected, prompts=["a", "a", "b", "b"])
    assert by_prompt == mean_share([1.0, 0.0, 0.0, 1.0], list("aabb")).to_json()  # half are right for each prompt
    all_right = metric.compute(predictions=[1.0] * 6, references=[0.0] * 6, prompts=list("aabbcc"))
    assert all_right == {"value": 1.0, "ci95": list(proportion(3, 3).ci95), "n": 6}


def test_batches_give_result_of_single_compute():
    """With their prompts in each batch, or with all prompts at the end."""
    rows = {"predictions": [0.1, 0.5, 0.2, 0.9], "references": [0.3, 0.5, 0.1, 0.0]}
    expected = metrics.load_metric("win_rate").compute(**rows, prompts=list("aabb"))
    by_prompt, prompts_at_end = metrics.load_metric("win_rate", "by_prompt"), metrics.load_metric("win_rate")
    for part in (slice(0, 1), slice(1, 4)):
        batch = {name: column[part] for name, column in rows.items()}
        by_prompt.add_batch(**batch, prompts=list("aabb")[part])
        prompts_at_end.add_batch(**batch)
    assert by_prompt.compute() == prompts_at_end.compute(prompts=list("aabb")) == expected


def test_kl_divergence_matches_estimator_formulas():
    ours, theirs = [[-1.0, -0.5, -2.0], [-0.25]], [[-2.0, -0.25, -2.0], [-1.25]]
    metric = metrics.load_metric("kl_divergence")
    result = metric.compute(predictions=ours, references=theirs, estimator="k2", seed=5)
    assert result == bootstrap_mean([0.5 + 0.03125, 0.5], [0, 1], seed=5).to_json()
    assert metrics.completion_kl(ours, theirs) == [0.75, 1.0]
    assert metrics.completion_kl(ours, theirs, estimator="k2") == [0.5 + 0.03125, 0.5]
    assert metrics.completion_kl(ours, theirs, level="sequence") == [0.75, 1.0]
    assert metrics.completion_kl(ours, theirs, estimator="k2", level="sequence") == [0.75**2 / 2, 0.5]
    assert metrics.completion_kl([-1.5], [-2.0], estimator="k3", level="sequence") == pytest.approx(
        [math.exp(-0.5) - 0.5], rel=1e-12
    )


# Invalid rows


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("win_rate", {"predictions": [1.0, 2.0], "references": [1.0]}, r"Mismatch .*predictions \(2\)"),
        ("win_rate", {"predictions": [1.0, math.nan], "references": [1.0, 0.0]}, "Row 1 of the predictions is nan"),
        ("win_rate", {"predictions": [1.0], "references": [math.inf]}, "Row 0 of the references is inf"),
        ("win_rate", {"predictions": [1.0], "references": [0.0], "prompts": ["a", "b"]}, "1 rows and 2 prompts"),
        ("preference_accuracy", {"predictions": [math.nan], "references": [0.0]}, "Row 0 of the predictions is nan"),
        ("kl_divergence", {"predictions": [[-1.0, -1.0]], "references": [[-1.0]]}, r"Completion 0 has .*\(2,\)"),
        ("kl_divergence", {"predictions": [[-1.0], [math.nan]], "references": [[-1.0], [-1.0]]}, "Completion 1 has a"),
        ("kl_divergence", {"predictions": [[-1.0]], "references": [[-1.0]], "estimator": "k4"}, "no KL estimator 'k4'"),
        ("kl_divergence", {"predictions": [[-1.0]], "references": [[-1.0]], "level": "word"}, "no level 'word'"),
        ("distinct_n", {"predictions": ["a b"], "n": 0}, "at least one word, not 0"),
        ("distinct_n", {"predictions": [3]}, "don't match the expected format"),
    ],
)
def test_metric_rejects_invalid_rows(name, rows, message):
    metric = metrics.load_metric(name)
    with pytest.raises(ValueError, match=message):
        metric.compute(**rows)
    if name == "win_rate":
        assert metric.compute(predictions=[1.0], references=[0.0])["n"] == 1, "it can be used again"
