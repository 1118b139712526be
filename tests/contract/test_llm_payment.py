"""The cache, the prices and the budget of an LLM judge."""

import json
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_llm_judge
from hub_fixture import base_environment
from stub_llm import OK, Fault, StubLLM, longer
from test_llm_judge import FIRST, PROMPTS, SCORES, SECOND, entries, judge_one_pair, make_judge
from warm import PYTHON, START_SECONDS
from zoo_process import wait_until

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges import llm as llm_judge
from rlhf_zoo.evaluation.judges.llm import LLMJudge
from rlhf_zoo.evaluation.judges.llm_usage import BudgetSpent, Usage

_key, stub = test_llm_judge._key, test_llm_judge.stub


def test_second_run_is_answered_from_cache(stub, tmp_path):
    with ThreadPoolExecutor() as pool:  # two judges at once share a cache
        results = list(pool.map(lambda _: make_judge(stub, tmp_path).compare(PROMPTS, FIRST, SECOND), range(2)))
    assert [[score for score, _ in result] for result in results] == [SCORES] * 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 12 and all(path.name[:2] == path.parent.name and path.suffix == ".json" for path in files)
    request_count = len(stub.requests)
    second = make_judge(stub, tmp_path, price=(1.0, 10.0))
    for _ in range(2):
        assert second.compare(PROMPTS, FIRST, SECOND) == results[0]
        assert second.usage == Usage(from_cache=12, cost=0.0, cached_cost=pytest.approx(12 * 200 / 1e6))
    assert len(stub.requests) == request_count
    with StubLLM(longer) as other:
        make_judge(other, tmp_path).compare(PROMPTS[:1], FIRST[:1], SECOND[:1])
        assert len(other.requests) == 2, "another endpoint has other answers"


@pytest.mark.parametrize(
    ("options", "new_requests"),
    [
        ({"model": "other"}, 2),
        ({"criterion": "the shorter one"}, 2),
        ({"parameters": {"seed": 1}}, 2),
        ({"name": "x", "concurrency": 1, "timeout": 3.0}, 0),
        ({"version": 2}, 2),
    ],
)
def test_cache_key_covers_what_answer_depends_on(stub, tmp_path, monkeypatch, options, new_requests):
    judge_one_pair(make_judge(stub, tmp_path))
    monkeypatch.setattr(llm_judge, "PROMPT_VERSION", options.pop("version", llm_judge.PROMPT_VERSION))
    model = options.pop("model", "stub")
    LLMJudge(stub.url, model, cache=tmp_path, progress=False, **options).compare(["p"], ["b"], ["aa"])
    assert len(stub.requests) == 2 + new_requests


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 1, "answers": []}', "schema 9", "forged"])
def test_cache_ignores_damaged_files_and_forged_scores(stub, tmp_path, damage):
    judge_one_pair(make_judge(stub, tmp_path))
    file = min(tmp_path.rglob("*.json"))
    original = file.read_text()
    forged = {"schema 9": original.replace("1,", "9,", 1), "forged": json.dumps(json.loads(original) | {"score": 7})}
    file.write_text(forged.get(damage, damage))
    assert judge_one_pair(make_judge(stub, tmp_path))[0].score == 1.0
    assert len(stub.requests) == (2 if damage == "forged" else 3)
    assert damage == "forged" or file.read_text() == original


def test_judge_counts_cost_and_limits_concurrency():
    for concurrency in (1, 3):
        with StubLLM(longer) as stub:
            barrier = threading.Barrier(concurrency, timeout=30)
            stub.script += [Fault("call", call=barrier.wait)] * 12
            judge = make_judge(stub, concurrency=concurrency, price=(2.5, 10.0))
            assert judge.usage.cost == 0.0
            judge.compare(PROMPTS, FIRST, SECOND)
            assert stub.max_concurrent == concurrency and len(stub.requests) == 12
    usage = judge.usage
    cost = pytest.approx((1200 * 2.5 + 120 * 10.0) / 1e6, rel=1e-12)
    assert usage == Usage(
        requests=12, answers=12, prompt_tokens=1200, completion_tokens=120, cost=cost, cached_cost=0.0
    )
    assert json.loads(json.dumps(usage.to_json())) == usage.to_json()


def test_answer_without_token_counts_is_charged_its_upper_bound(stub):
    stub.script += [Fault("unmetered")]
    judge = make_judge(stub, price=(1.0, 1.0), concurrency=1)
    judge_one_pair(judge)
    assert (judge.usage.unmetered, judge.usage.prompt_tokens, judge.usage.completion_tokens) == (1, 100, 10)
    size = sum(len(message["content"].encode()) for message in stub.requests[0].body["messages"])
    assert judge.usage.cost == pytest.approx((size + 64 + 64 + 110) / 1e6, rel=1e-12)


@pytest.mark.parametrize("concurrency", [1, 5])
def test_spent_budget_stops_judge_and_keeps_answers(tmp_path, concurrency):
    """The stub charges far more than the bound by bytes: only requests under way exceed the budget."""
    with StubLLM(longer, usage=(1_000_000, 0)) as stub:
        prompts = [f"{index:03}" for index in range(60)]
        options = {"price": (1.0, 0.0), "concurrency": concurrency}
        judge = make_judge(stub, tmp_path, budget=40.0, **options)
        with pytest.raises(BudgetSpent) as caught:
            judge.compare(prompts, ["aa"] * 60, ["b"] * 60)
        assert isinstance(caught.value, ZooError)
        message, paid = str(caught.value), len(stub.requests)
        assert 40 <= paid < 40 + concurrency
        assert message.startswith("The budget of 40 would not cover the next request, which may cost up to 0.00")
        assert re.search(
            rf"with 4\d spent: raise the budget to continue\. \({paid} of 120 answers are kept in ", message
        )
        assert message.endswith(f"{tmp_path}.)")
        assert judge.usage.cost == paid and len(entries(tmp_path)) == paid
        with pytest.raises(BudgetSpent):
            judge.compare(prompts, ["aa"] * 60, ["b"] * 60)
        assert len(stub.requests) == paid
        resumed = make_judge(stub, tmp_path, budget=100.0, **options)
        assert {score for score, _ in resumed.compare(prompts, ["aa"] * 60, ["b"] * 60)} == {1.0}
        assert len(stub.requests) == 120
        assert (resumed.usage.cost, resumed.usage.cached_cost, resumed.usage.from_cache) == (120.0 - paid, paid, paid)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_budget_is_never_exceeded(stub, concurrency):
    """The stub charges exactly the upper bound; waiting requests start only if they fit."""
    make_judge(stub).compare(["000"], ["aa"], ["b"])
    bound = sum(len(message["content"].encode()) for message in stub.requests[0].body["messages"]) + 64
    stub.usage = (bound, 64)
    stub.script += [Fault("call", call=lambda: time.sleep(0.02))] * 40
    judge = make_judge(stub, price=(1.0, 1.0), budget=10.5 * (bound + 64) / 1e6, concurrency=concurrency)
    with pytest.raises(BudgetSpent):
        judge.compare([f"{index:03}" for index in range(20)], ["aa"] * 20, ["b"] * 20)
    assert len(stub.requests) - 2 == 10
    assert judge.usage.cost == pytest.approx(10 * (bound + 64) / 1e6)


def test_interrupted_judge_exits_and_keeps_answers(tmp_path):
    """It is interrupted while one request hangs and another waits for its next attempt."""
    code = """
import json, sys
from rlhf_zoo.evaluation.judges import llm
llm._GRACE_SECONDS = 0.5  # seconds to wait for pending answers, which the stub never sends
judge = llm.LLMJudge(sys.argv[1], "stub", cache=sys.argv[2], backoff=100.0, timeout=100.0, concurrency=2)
judge.compare(*json.loads(sys.argv[3]))
"""
    pairs = (PROMPTS, FIRST, SECOND)
    with StubLLM(longer) as stub:
        stub.script += [OK, Fault("status", 500), Fault("hold"), Fault("hold")]
        arguments = [*PYTHON, "-c", code, stub.url, tmp_path, json.dumps(pairs)]
        process = subprocess.Popen(arguments, env=base_environment(), stderr=subprocess.PIPE, text=True)
        wait_until(lambda: len(stub.requests) >= 3, process, START_SECONDS)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=30)[1]
        assert process.returncode in (-signal.SIGINT, 130, 1) and "KeyboardInterrupt" in stderr
        assert len(entries(tmp_path)) == 1
        stub.script.clear()
        before = len(stub.requests)
        assert [score for score, _ in make_judge(stub, tmp_path).compare(*pairs)] == SCORES
        assert len(stub.requests) - before == 11


def test_unusable_cache_is_rejected_before_requests(stub, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ZooError, match=r"cannot be read \(Not a directory\)"):
        judge_one_pair(make_judge(stub, tmp_path / "cache"))
    assert not stub.requests, "no answer is paid for that could not be cached"
