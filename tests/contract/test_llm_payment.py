"""What an LLM judge costs, keeps and may not exceed: its cache, its prices and its budget."""

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
from test_llm_judge import FIRST, PROMPTS, SCORES, SECOND, ask, entries, make
from warm import PYTHON
from zoo_process import wait_until

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges import llm as llm_judge
from rlhf_zoo.evaluation.judges.llm import LLMJudge
from rlhf_zoo.evaluation.judges.llm_usage import BudgetSpent, Usage

_key, stub = test_llm_judge._key, test_llm_judge.stub


def test_a_second_run_asks_nothing(stub, tmp_path):
    with ThreadPoolExecutor() as pool:  # two at one time share a cache
        found = list(pool.map(lambda _: make(stub, tmp_path).compare(PROMPTS, FIRST, SECOND), range(2)))
    assert [[score for score, _ in one] for one in found] == [SCORES] * 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 12 and all(path.name[:2] == path.parent.name and path.suffix == ".json" for path in files)
    asked = len(stub.seen)
    second = make(stub, tmp_path, price=(1.0, 10.0))
    for _ in range(2):
        assert second.compare(PROMPTS, FIRST, SECOND) == found[0]
        assert second.usage == Usage(from_cache=12, cost=0.0, cached_cost=pytest.approx(12 * 200 / 1e6))
    assert len(stub.seen) == asked
    with StubLLM(longer) as other:
        make(other, tmp_path).compare(PROMPTS[:1], FIRST[:1], SECOND[:1])
        assert len(other.seen) == 2, "another endpoint, another answer"


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"model": "other"}, 2),
        ({"criterion": "the shorter one"}, 2),
        ({"parameters": {"seed": 1}}, 2),
        ({"name": "x", "concurrency": 1, "timeout": 3.0}, 0),
        ({"version": 2}, 2),
    ],
)
def test_what_an_answer_depends_on_is_in_its_digest(stub, tmp_path, monkeypatch, options, again):
    ask(make(stub, tmp_path))
    monkeypatch.setattr(llm_judge, "PROMPT_VERSION", options.pop("version", llm_judge.PROMPT_VERSION))
    model = options.pop("model", "stub")
    LLMJudge(stub.url, model, cache=tmp_path, progress=False, **options).compare(["p"], ["b"], ["aa"])
    assert len(stub.seen) == 2 + again


@pytest.mark.parametrize("broken", ["", "[]", '{"schema": 1, "answers": []}', "schema 9", "forged"])
def test_a_damaged_file_is_asked_for_again_and_a_score_is_read_from_the_answer(stub, tmp_path, broken):
    ask(make(stub, tmp_path))
    one = min(tmp_path.rglob("*.json"))
    whole = one.read_text()
    forged = {"schema 9": whole.replace("1,", "9,", 1), "forged": json.dumps(json.loads(whole) | {"score": 7})}
    one.write_text(forged.get(broken, broken))
    assert ask(make(stub, tmp_path))[0].score == 1.0
    assert len(stub.seen) == (2 if broken == "forged" else 3)
    assert broken == "forged" or one.read_text() == whole


def test_cost_is_counted_and_no_more_requests_are_out_than_may_be():
    for concurrency in (1, 3):
        with StubLLM(longer) as stub:
            meeting = threading.Barrier(concurrency, timeout=30)
            stub.script += [Fault("call", call=meeting.wait)] * 12
            judge = make(stub, concurrency=concurrency, price=(2.5, 10.0))
            assert judge.usage.cost == 0.0
            judge.compare(PROMPTS, FIRST, SECOND)
            assert stub.together == concurrency and len(stub.seen) == 12
    usage = judge.usage
    cost = pytest.approx((1200 * 2.5 + 120 * 10.0) / 1e6, rel=1e-12)
    assert usage == Usage(
        requests=12, answers=12, prompt_tokens=1200, completion_tokens=120, cost=cost, cached_cost=0.0
    )
    assert json.loads(json.dumps(usage.to_json())) == usage.to_json()


def test_an_answer_without_counts_costs_what_it_may_have(stub):
    stub.script += [Fault("unmetered")]
    judge = make(stub, price=(1.0, 1.0), concurrency=1)
    ask(judge)
    assert (judge.usage.unmetered, judge.usage.prompt_tokens, judge.usage.completion_tokens) == (1, 100, 10)
    size = sum(len(message["content"].encode()) for message in stub.seen[0].body["messages"])
    assert judge.usage.cost == pytest.approx((size + 64 + 64 + 110) / 1e6, rel=1e-12)


@pytest.mark.parametrize("concurrency", [1, 5])
def test_a_budget_stops_and_keeps(tmp_path, concurrency):
    """The stub charges far more than a request may cost by its bytes: those on their way go over, and no other."""
    with StubLLM(longer, usage=(1_000_000, 0)) as stub:
        prompts = [f"{index:03}" for index in range(60)]
        options = {"price": (1.0, 0.0), "concurrency": concurrency}
        judge = make(stub, tmp_path, budget=40.0, **options)
        with pytest.raises(BudgetSpent) as caught:
            judge.compare(prompts, ["aa"] * 60, ["b"] * 60)
        assert isinstance(caught.value, ZooError)
        said, paid = str(caught.value), len(stub.seen)
        assert 40 <= paid < 40 + concurrency
        assert said.startswith("The budget of 40 would not cover the next request, which may cost up to 0.00")
        assert re.search(rf"with 4\d spent: raise the budget to continue\. \({paid} of 120 answers are kept in ", said)
        assert said.endswith(f"{tmp_path}.)")
        assert judge.usage.cost == paid and len(entries(tmp_path)) == paid
        with pytest.raises(BudgetSpent):
            judge.compare(prompts, ["aa"] * 60, ["b"] * 60)
        assert len(stub.seen) == paid
        more = make(stub, tmp_path, budget=100.0, **options)
        assert {score for score, _ in more.compare(prompts, ["aa"] * 60, ["b"] * 60)} == {1.0}
        assert len(stub.seen) == 120
        assert (more.usage.cost, more.usage.cached_cost, more.usage.from_cache) == (120.0 - paid, paid, paid)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_budget_is_never_exceeded(stub, concurrency):
    """The stub counts what a request may cost at most; requests that wait for room come to nothing or fit."""
    make(stub).compare(["000"], ["aa"], ["b"])
    bound = sum(len(message["content"].encode()) for message in stub.seen[0].body["messages"]) + 64
    stub.usage = (bound, 64)
    stub.script += [Fault("call", call=lambda: time.sleep(0.02))] * 40
    judge = make(stub, price=(1.0, 1.0), budget=10.5 * (bound + 64) / 1e6, concurrency=concurrency)
    with pytest.raises(BudgetSpent):
        judge.compare([f"{index:03}" for index in range(20)], ["aa"] * 20, ["b"] * 20)
    assert len(stub.seen) - 2 == 10
    assert judge.usage.cost == pytest.approx(10 * (bound + 64) / 1e6)


def test_an_interrupted_process_ends_and_keeps_what_was_judged(tmp_path):
    """While a request hangs and another waits for its next attempt."""
    code = """
import json, sys
from rlhf_zoo.evaluation.judges.llm import LLMJudge
judge = LLMJudge(sys.argv[1], "stub", cache=sys.argv[2], backoff=100.0, timeout=100.0, concurrency=2)
judge.compare(*json.loads(sys.argv[3]))
"""
    pairs = (PROMPTS, FIRST, SECOND)
    with StubLLM(longer) as stub:
        stub.script += [OK, Fault("status", 500), Fault("hold"), Fault("hold")]
        arguments = [*PYTHON, "-c", code, stub.url, tmp_path, json.dumps(pairs)]
        process = subprocess.Popen(arguments, env=base_environment(), stderr=subprocess.PIPE, text=True)
        wait_until(lambda: len(stub.seen) >= 3, process, 60)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
        assert process.returncode in (-signal.SIGINT, 130, 1) and "KeyboardInterrupt" in said
        assert len(entries(tmp_path)) == 1
        stub.script.clear()
        before = len(stub.seen)
        assert [score for score, _ in make(stub, tmp_path).compare(*pairs)] == SCORES
        assert len(stub.seen) - before == 11


def test_a_folder_that_cannot_be_written_is_said(stub, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ZooError, match=r"could not be read \(Not a directory\)"):
        ask(make(stub, tmp_path / "cache"))
    assert not stub.seen, "nothing is paid for that could not be kept"
