"""The blind test: nothing tells the sides apart before the verdict, and a verdict is one vote."""

import contextlib
import dataclasses
import itertools
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from page_client import PageClient
from toy_models import save_toys
from vote_store import Store

from rlhf_zoo.app.engine import Comparison, Limits, PolicyCompletion, Snapshot
from rlhf_zoo.app.page import blind, streams
from rlhf_zoo.app.page.blind import (
    NO_PAIR,
    STALE_PAIR,
    VERDICTS,
    VOTE_NOT_STORED,
    ModelRevision,
    Pair,
    build_blind_tab,
    create_vote,
    pair_html,
    reveal_html,
    votes_html,
)
from rlhf_zoo.app.page.sampling import SamplingDefaults
from rlhf_zoo.app.page.streams import CompletionStreams
from rlhf_zoo.app.page.vote_counts import Tally, VoteFigures
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.votes.ratings import summarize_votes
from rlhf_zoo.evaluation.votes.vote import Vote

CONTENDERS = {
    "ppo": ModelRevision("local/toy-ppo", "a" * 40, "step-000040"),
    "sft": ModelRevision("local/toy-sft", "b" * 40),
}
DATA_SET = "local/votes"
PROMPTS = ["the battery is", "the screen", "it is heavy but"]


def written(text: str, **fields: Any) -> PolicyCompletion:
    told = {"completion": text, "reward": 0.5, "log_ratio": 0.25, "token_log_ratio": (0.25,), "tokens": (text,)}
    return PolicyCompletion(**{**told, "length": 1, "ended": True, "stop": "eos", **fields})


def drawn(
    ppo: PolicyCompletion, sft: PolicyCompletion, *, ppo_side: str = "left", prompt: str = "it is", **fields: Any
) -> Pair:
    done = all(side.stop is not None for side in (ppo, sft))
    snapshot = Snapshot(prompt, 7, 0.9, 1.0, 12, sft=(sft,), ppo=(ppo,), done=done)
    return Pair(snapshot, ppo_side, **fields)


PPO, SFT = written(" sharp", reward=1.25), written(" weak", reward=-0.5, ended=False, stop="length", length=12)


# A pair


def test_sides_are_random_and_independent_of_the_seed():
    pairs = [Pair(drawn(PPO, SFT).snapshot) for _ in range(2000)]
    left = sum(one.ppo_side == "left" for one in pairs)
    assert 850 < left < 1150, "0.5 ± 6 standard errors"
    assert len({one.id for one in pairs}) == 2000
    assert drawn(PPO, SFT).role_by_side == {"left": "ppo", "right": "sft"}
    assert drawn(PPO, SFT, ppo_side="right").completion_by_side == {"left": SFT, "right": PPO}


@pytest.mark.parametrize(
    ("verdict", "preferred"), [("left", "sft"), ("right", "ppo"), ("tie", None), ("both_bad", None)]
)
def test_verdict_becomes_a_vote_on_the_shown_pair(verdict, preferred):
    one = drawn(PPO, SFT, ppo_side="right")
    vote = create_vote(one, verdict, CONTENDERS)
    assert (vote.id, vote.verdict, vote.prompt, vote.seed, vote.temperature, vote.top_p, vote.max_new_tokens) == (
        one.id, verdict, "it is", 7, 0.9, 1.0, 12,
    )  # fmt: skip
    left, right = vote.left, vote.right
    assert (left.role, left.repo, left.commit, left.tag) == ("sft", "local/toy-sft", "b" * 40, None)
    assert (left.completion, left.reward, left.ended) == (" weak", -0.5, False)
    assert (right.role, right.repo, right.commit, right.tag) == ("ppo", "local/toy-ppo", "a" * 40, "step-000040")
    assert (right.completion, right.reward, right.ended) == (" sharp", 1.25, True)
    assert (vote.chosen.role if vote.chosen else None) == preferred
    assert dataclasses.replace(one, verdict=verdict).preferred_role == preferred


def test_vote_omits_local_paths_and_nonfinite_rewards():
    """A folder of this machine leaves no path, and a reward that is no number is none."""
    vote = create_vote(
        drawn(written("a", reward=math.nan), SFT), "left", {"ppo": ModelRevision(), "sft": ModelRevision()}
    )
    for side in (vote.left, vote.right):
        assert (side.repo, side.commit, side.tag) == (None, None, None)
    assert vote.left.reward is None


def test_pair_accepts_verdicts_only_when_finished():
    assert drawn(PPO, SFT).allowed_verdicts == tuple(VERDICTS)
    for one in (drawn(written("a", stop=None), SFT), drawn(PPO, written("b", stop=None))):
        assert one.allowed_verdicts == ()
        with pytest.raises(ZooError, match="still in progress"):
            create_vote(one, "tie", CONTENDERS)
    same = drawn(written(" same"), written(" same", reward=None))
    assert same.allowed_verdicts == ("tie", "both_bad") and create_vote(same, "tie", CONTENDERS).verdict == "tie"
    for verdict in ("left", "right"):
        with pytest.raises(ZooError, match="The two texts are equal"):
            create_vote(same, verdict, CONTENDERS)


# What the page holds


@pytest.mark.parametrize("ends", [(None, None), ("eos", None), ("eos", "length")])
def test_pair_html_does_not_reveal_sides(ends):
    """PPO on the left, and the same texts with the roles changed over: the same bytes, whatever else they differ in."""
    figures = {"reward": 9.0, "log_ratio": 3.5, "length": 40, "kl": 2.0, "token_kl": (2.0,), "token_values": (1.0,)}
    one = drawn(written(" first", stop=ends[0], **figures), written(" second", stop=ends[1]), ppo_side="left")
    other = drawn(written(" second", stop=ends[1]), written(" first", stop=ends[0]), ppo_side="right")
    assert pair_html(one) == pair_html(other)
    held = pair_html(one).lower()
    assert held.index(" first") < held.index(" second") and held.count("caret") == 2 * (None in ends)
    assert not [
        word for word in ("ppo", "sft", "reward", one.id, "eos", "length", "3.5", "9.0", "zoo-side") if word in held
    ]


def test_pair_html_escapes_text():
    hostile = "<img src=x onerror=alert(1)>\"'&\u202e${1}"
    one = drawn(written(hostile), written("&amp;"), prompt=hostile, verdict="left")
    for page in (pair_html(one), reveal_html(one, CONTENDERS)):
        assert "<img" not in page and "\u202e" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;⟨U+202E⟩${1}" in pair_html(one)


def plain(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_reveal_names_base_model():
    pair = drawn(PPO, SFT, verdict="right")
    page = plain(
        reveal_html(
            dataclasses.replace(pair, snapshot=dataclasses.replace(pair.snapshot, initial_policy="the base")),
            CONTENDERS,
        )
    )
    assert page.startswith("You preferred the base. The reward prefers PPO.") and "Right: base" in page


@pytest.mark.parametrize(
    ("verdict", "side", "told"),
    [
        ("left", "left", "You preferred PPO. The reward agrees."),
        ("right", "left", "You preferred SFT. The reward prefers PPO."),
        ("right", "right", "You preferred PPO. The reward agrees."),
        ("tie", "left", "You called it a tie."),
        ("both_bad", "right", "You rated both bad."),
    ],
)
def test_reveal_names_sides_and_rewards(verdict, side, told):
    page = reveal_html(drawn(PPO, SFT, ppo_side=side, verdict=verdict), CONTENDERS)
    read = plain(page)
    assert read.startswith(told)
    assert ("The reward " in read) == (verdict in ("left", "right"))
    names = {"ppo": "PPO", "sft": "SFT"}
    first, second = ("ppo", "sft") if side == "left" else ("sft", "ppo")
    assert f"Left: {names[first]}" in read and f"Right: {names[second]}" in read
    assert "local/toy-ppo@step-000040 (aaaaaaaa)" in read and "local/toy-sft (bbbbbbbb)" in read
    cards = dict(re.findall(r'data-role="(ppo|sft)">(.*?)</article>', page))
    assert [figure(cards["ppo"], key) for key in ("reward", "log_ratio", "length", "stopped")] == [
        "+1.25", "+0.25", "1", "by itself",
    ]  # fmt: skip
    assert [figure(cards["sft"], key) for key in ("reward", "stopped")] == ["−0.50", "cut off"]
    assert page.count("your choice") == (verdict in ("left", "right"))
    assert "seed 7 at temperature 0.9" in read


def figure(page: str, key: str) -> str:
    (found,) = re.findall(rf'data-figure="{key}">([^<]*)<', page)
    return found


def tallied(votes: Sequence[Vote], **fields: Any) -> VoteFigures:
    told = {
        "is_exact": True, "votes_in_intervals": len(votes), "unsent_count": 0, "send_problem": None,
        "read_problem": None,
    }  # fmt: skip
    return VoteFigures(summarize_votes(votes), **{**told, **fields})


def votes_for(
    wins: int, losses: int, ties: int = 0, bad: int = 0, contenders: dict[str, ModelRevision] = CONTENDERS
) -> list[Vote]:
    verdicts = ["left"] * wins + ["right"] * losses + ["tie"] * ties + ["both_bad"] * bad
    return [
        create_vote(drawn(PPO, SFT, prompt=f"prompt {k}"), verdict, contenders) for k, verdict in enumerate(verdicts)
    ]


def test_figures_show_current_tally():
    votes = votes_for(30, 10, 10, 5)
    page = votes_html(tallied(votes), DATA_SET)
    rate = summarize_votes(votes)["win_rate"]
    assert "55 votes so far" in page
    assert [figure(page, key) for key in ("ppo", "sft", "tie", "both_bad", "n")] == ["30", "10", "10", "5", "50"]
    assert figure(page, "win_rate") == "70.0%"
    low, high = (100 * bound for bound in rate["ci95"])
    assert figure(page, "ci95") == f"[{low:.1f}%, {high:.1f}%]"
    assert f'class="band" style="left:{low:.2f}%;width:{high - low:.2f}%"' in page
    assert 'class="point" style="left:70.00%"' in page
    assert "zoo-elo" not in page and "zoo-note" not in page, "one pair of revisions, and nothing waits"
    from_base = votes_html(tallied(votes), DATA_SET, "the base")
    assert "PPO over the base, 95%" in from_base and "Base preferred" in from_base and "SFT" not in from_base
    page = votes_html(tallied(votes_for(0, 0, 0, 1)), DATA_SET)
    assert "1 vote so far" in page and "No votes count toward the win rate yet." in page and "zoo-bar" not in page


# The tab's handlers


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    toys = save_toys(tmp_path_factory.mktemp("toys"))
    limits = Limits(prompt_characters=1000)
    return Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward, device="cpu", limits=limits)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The same prompts, seeds and sides in every run: now and then, two completions are equal."""
    rng = random.Random(1)
    monkeypatch.setattr(blind, "secrets", SimpleNamespace(randbelow=rng.randrange, choice=rng.choice))
    return Store()


@pytest.fixture
def tally(store: Store, tmp_path: Path) -> Iterator[Tally]:
    with Tally(store, tmp_path / "journal", send_interval=0) as tally:
        yield tally


def make_tab(comparison: Comparison, tally: Tally | None, prompts: Sequence[str] = PROMPTS) -> gr.Blocks:
    with gr.Blocks(title="A blind test", analytics_enabled=False) as page, gr.Tabs(), gr.Tab("Blind test"):
        build_blind_tab(
            CompletionStreams(comparison),
            CONTENDERS,
            tally,
            prompts=prompts,
            defaults=SamplingDefaults(0.9, 12, 12),
            max_concurrent=8,
        )
    return page.queue(max_size=40, api_open=False)


class Visit:
    """One session's calls of the handlers, without a server: what each component and the server's state hold."""

    def __init__(self, page: gr.Blocks) -> None:
        self.parts = {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}
        (self.state,) = [block for block in page.blocks.values() if isinstance(block, gr.State)]
        self.pair: Pair | None = None
        self.seen: dict[str, Any] = {}
        self.pairs: list[str] = []
        self._calls: dict[str, list[Any]] = {}
        self._after = {call.trigger_after: call for call in page.fns.values() if call.trigger_after is not None}
        for call in page.fns.values():
            for target, event in call.targets:
                if event == "click":
                    self._calls.setdefault(page.blocks[target].elem_id, []).append(call)

    def take(self, changes: dict[Any, Any] | tuple, outputs: Sequence[Any] = ()) -> None:
        for part, value in changes.items() if isinstance(changes, dict) else zip(outputs, changes, strict=True):
            if part is self.state:
                self.pair = value
            else:
                self.seen[part.elem_id] = value
                self.pairs += [value] * (part.elem_id == "blind-pair")

    def enabled(self) -> list[str]:
        return [name for name in ("vote-left", "vote-right", "vote-tie", "vote-both-bad")
                if self.seen[name]["interactive"]]  # fmt: skip

    def draw(self, prompt: Any = "", *, until: int | None = None) -> None:
        clear, draw = self._calls["blind-new"]
        self.take(clear.fn())
        for changes in itertools.islice(draw.fn(prompt), until):
            self.take(changes, draw.outputs)
        if until is None:
            self.take(self._after[draw._id].fn(self.pair))

    def call(self, name: str) -> Callable[[Pair | None, str], dict[Any, Any]]:
        (call,) = self._calls[f"vote-{name}"]
        return call.fn

    def vote(self, name: str, *, seen: str | None = None) -> None:
        pair = self.seen.get("blind-pair-id", "") if seen is None else seen
        self.take(self.call(name)(self.pair, pair))


def test_tab_draws_a_pair_and_takes_a_verdict(comparison, tally, store):
    visit = Visit(make_tab(comparison, tally))
    visit.draw(until=1)
    assert visit.pair is None and visit.enabled() == [] and 'data-state="writing"' in visit.seen["blind-pair"]
    visit.vote("left")
    assert NO_PAIR in visit.seen["blind-message"], "on the server too"
    visit.draw()
    one = visit.pair
    assert one.snapshot.prompt in PROMPTS and one.snapshot.temperature == 0.9 and one.snapshot.max_new_tokens == 12
    assert visit.seen["blind-message"] == "" and visit.seen["blind-pair"] == pair_html(one)
    assert visit.enabled() == ["vote-left", "vote-right", "vote-tie", "vote-both-bad"]
    again = comparison.compare(one.snapshot.prompt, seed=one.snapshot.seed, temperature=0.9, max_new_tokens=12)
    assert (again.ppo, again.sft) == (one.snapshot.ppo[0], one.snapshot.sft[0])
    visit.vote("right")
    judged = dataclasses.replace(one, verdict="right")
    assert visit.pair is None and visit.enabled() == []
    assert visit.seen["blind-reveal"] == reveal_html(judged, CONTENDERS)
    visit.vote("right")
    assert NO_PAIR in visit.seen["blind-message"] and visit.seen["blind-reveal"] == reveal_html(judged, CONTENDERS)
    visit.draw("the camera")
    assert visit.seen["blind-reveal"] == "" and visit.pair.snapshot.prompt == "the camera"
    assert visit.pair.id != one.id and visit.pair.snapshot.seed != one.snapshot.seed
    tally._box.drain(20)
    (vote,) = store.read()
    assert vote == dataclasses.replace(create_vote(one, "right", CONTENDERS), time=vote.time)


def test_sides_stay_fixed_while_texts_stream(comparison, tally, monkeypatch):
    monkeypatch.setattr(streams, "SNAPSHOT_INTERVAL", 0.0)
    visit = Visit(make_tab(comparison, tally))
    for _ in range(4):
        visit.pairs.clear()
        visit.draw()
        one = visit.pair
        whole = comparison.stream(one.snapshot.prompt, seed=one.snapshot.seed, temperature=0.9, max_new_tokens=12)
        assert len(visit.pairs) > 5
        assert visit.pairs == [pair_html(dataclasses.replace(one, snapshot=snapshot)) for snapshot in whole]


def test_verdict_on_replaced_pair_is_no_vote(comparison, tally):
    visit = Visit(make_tab(comparison, tally))
    visit.draw()
    before = visit.seen["blind-pair-id"]
    visit.draw()
    visit.vote("left", seen=before)
    assert STALE_PAIR in visit.seen["blind-message"] and tally.figures().summary["votes"] == 0
    visit.vote("left")
    assert tally.figures().summary["votes"] == 1


def test_first_of_two_verdicts_on_a_pair_counts(comparison, tally):
    """By the id of the vote, made with the pair: the tally keeps the first vote of an id, and both reveal that."""
    visit = Visit(make_tab(comparison, tally))
    visit.draw()
    one = visit.pair
    reveals = [visit.call(verdict)(one, one.id)[visit.parts["blind-reveal"]] for verdict in ("both-bad", "tie")]
    assert tally.figures().summary["counts"] == {"ppo": 0, "sft": 0, "tie": 0, "both_bad": 1}
    assert reveals == [reveal_html(dataclasses.replace(one, verdict="both_bad"), CONTENDERS)] * 2


def test_full_disk_is_reported_and_pair_can_be_judged_again(comparison, tally, monkeypatch, caplog):
    visit = Visit(make_tab(comparison, tally))
    visit.draw()

    def full(vote: Vote) -> None:
        raise ZooError("/srv/votes/1.json cannot be written (disk full): free some space.")

    monkeypatch.setattr(tally._box, "cast", full)
    visit.vote("tie")
    assert (
        VOTE_NOT_STORED in visit.seen["blind-message"] and visit.pair is not None and visit.seen["blind-reveal"] == ""
    )
    assert tally.figures().summary["votes"] == 0
    assert "A vote was not stored: /srv/votes/1.json cannot be written" in caplog.text
    monkeypatch.undo()
    visit.vote("tie")
    assert visit.seen["blind-message"] == "" and tally.figures().summary["counts"]["tie"] == 1


def test_vote_limit_of_an_address_ignores_forged_headers(comparison, tally, monkeypatch):
    visit = Visit(make_tab(comparison, tally))

    def ask(peer: str, forwarded: str) -> gr.Request:
        return SimpleNamespace(client=SimpleNamespace(host=peer), headers={"x-forwarded-for": forwarded})

    def judge(request: gr.Request) -> str:
        visit.draw("the camera")
        visit.take(visit.call("tie")(visit.pair, visit.pair.id, request))
        return visit.seen["blind-message"]

    assert [judge(ask("192.0.2.1", f"8.8.8.{number}")) for number in range(3)] == [""] * 3
    assert "3 votes a day on the same two models and prompt" in judge(ask("192.0.2.1", "8.8.4.4"))
    assert visit.pair is not None and visit.seen["blind-reveal"] == "", "it may be judged later"
    assert judge(ask("192.0.2.2", "")) == ""
    monkeypatch.setattr(blind, "get_space", lambda: "user/space")  # whose proxy names the visitors
    assert judge(ask("10.0.0.1", "192.0.2.1, 8.8.8.8")) == ""
    assert tally.figures().summary["votes"] == 5


def test_tab_without_tally_stores_no_votes(comparison):
    page = make_tab(comparison, None)
    visit = Visit(page)
    assert "This page stores no votes" in visit.parts["blind-notice"].value
    assert visit.parts["blind-figures"].visible is False
    visit.draw()
    one = visit.pair
    visit.vote("both-bad")
    assert visit.seen["blind-reveal"] == reveal_html(dataclasses.replace(one, verdict="both_bad"), CONTENDERS)


def test_tab_states_where_votes_go_and_hides_its_api(comparison, tally):
    page = make_tab(comparison, tally)
    notice = Visit(page).parts["blind-notice"].value
    assert f'href="{tally.address}"' in notice and ">local/votes</a>" in notice
    assert "Nothing about you is stored." in plain(notice)
    assert page.fns and all(call.api_visibility == "private" for call in page.fns.values())
    limits = {call.concurrency_id: call.concurrency_limit for call in page.fns.values()}
    assert limits["models"] == 8


class Stalled:
    """Draws one pair at once; everybody after waits."""

    def __init__(self) -> None:
        self.free, self.asked = threading.Event(), 0

    def stream(self, prompt: str, **_: Any) -> Iterator[Snapshot]:
        self.asked += 1
        if self.asked > 1:
            self.free.wait(60)
        yield drawn(PPO, SFT, prompt=prompt).snapshot


def test_vote_does_not_wait_for_generation_or_queue():
    stalled = Stalled()
    with gr.Blocks() as page:
        defaults = SamplingDefaults(temperature=1.0, length=8, max_length=8)
        build_blind_tab(stalled, CONTENDERS, None, prompts=PROMPTS, defaults=defaults, max_concurrent=1)
    page.queue(max_size=2)
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True)
    with contextlib.ExitStack() as opened:
        opened.callback(page.close)
        opened.callback(stalled.free.set)
        voter, *others = (opened.enter_context(PageClient(url)) for _ in range(6))
        assert voter.fire("blind-new").error is None
        waiting = [other.start("blind-new") for other in others]
        assert any(event.queue_full for event in waiting)
        voted = voter.fire("vote-left")
        assert voted.error is None and voted.seconds < 10 and "toy-ppo" in voted.values["blind-reveal"]
