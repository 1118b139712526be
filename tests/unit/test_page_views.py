"""The page's HTML of completions: every figure where it belongs, and nothing of a text that a browser would run."""

from dataclasses import replace

import pytest
from html_page import Page
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_models import save_toys

from rlhf_zoo.app.engine import Comparison, PolicyCompletion, Snapshot, visible_text
from rlhf_zoo.app.page.views import (
    KL_EDGES,
    RATIO_EDGES,
    completion_html,
    empty_pairs_html,
    figures_html,
    legend_html,
    pairs_html,
    shade_level,
    summary_html,
)

KNOWN = {
    "article", "b", "caption", "circle", "dd", "details", "div", "dl", "dt", "g", "h3", "h4", "header", "i", "line",
    "p", "path", "polyline", "rect", "span", "style", "sub", "summary", "svg", "table", "tbody", "td", "text", "th",
    "thead", "title", "tr", "tspan",
}  # fmt: skip


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    toys = save_toys(tmp_path_factory.mktemp("toys"))
    return Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward)


def last(comparison: Comparison, prompt: str = "the camera", **sampling) -> Snapshot:
    *_, found = comparison.stream(prompt, **({"max_new_tokens": 12, "seed": 3} | sampling))
    return found


def test_completions_are_shown_in_pairs(comparison: Comparison) -> None:
    found = last(comparison, n=3)
    page = Page(pairs_html(found))
    assert [(one["data-side"], one["data-row"]) for one in page.all("article")] == [
        (role, str(row)) for row in range(3) for role in ("sft", "ppo")
    ]
    tokens = sum(side.length for side in (*found.sft, *found.ppo))
    assert len(page.texts("th", scope="row")) == 2 + tokens, "a row of numbers for each token, and the two means"
    assert page.elements[0][1] == {"class": "zoo-pairs", "data-state": "done", "aria-busy": "false"}
    mean = sum(side.reward for side in found.ppo) / 3
    assert page.texts("td", data_mean="ppo-reward") == [f"{mean:+.2f}".replace("-", "−")]
    assert page.texts("caption") == ["Means over 3 completions of this prompt"]
    assert not Page(pairs_html(last(comparison))).texts("caption"), "of one completion there is no mean"


def test_figures_handle_missing_reward_and_show_values(comparison: Comparison) -> None:
    found = last(comparison)
    side = replace(found.ppo[0], reward=None, token_values=tuple(0.5 for _ in found.ppo[0].tokens))
    assert Page(figures_html(side)).texts("dd", data_figure="reward") == ["none"]
    endless = Page(figures_html(replace(side, reward=float("nan"), log_ratio=float("-inf"), kl=float("inf"))))
    assert [endless.texts("dd", data_figure=key) for key in ("reward", "log_ratio", "kl")] == [["–"], ["–"], ["–"]]
    valued = Page(pairs_html(replace(found, ppo=(side,))))
    assert valued.texts("th", scope="col").count("V") == 1, "SFT's completion has no values here"
    assert any("V +0.50" in (attrs.get("title") or "") for attrs in valued.all("i"))


def test_chat_answers_and_continuations_have_their_layout(comparison: Comparison) -> None:
    found = last(comparison)
    assert len(Page(pairs_html(found)).texts("p", class_="zoo-text")) == 2
    assert len(Page(pairs_html(replace(found, is_chat=True))).texts("p", class_="zoo-text zoo-chat")) == 2


def test_token_shades_follow_figures() -> None:
    side = PolicyCompletion(
        completion="abcdef", reward=None, log_ratio=0.0, token_log_ratio=(0.04, 0.05, -0.3, 1.0, -9.0, float("nan")),
        tokens=("a", "b", "c", "d", "e", "f"), length=6, ended=False, stop="length",
        token_kl=(0, 0.01, 0.2, 0.6, 2.0, 0), token_logprob_ppo=(0.0,) * 6, token_logprob_sft=(0.0,) * 6,
    )  # fmt: skip
    page = Page(completion_html("", side, heat_map=True))
    found = [attrs.get("class") for attrs in page.all("i")]
    assert found == [None, "p1 k1", "m2 k2", "p3 k3", "m4 k4", None]
    assert shade_level(0.0, RATIO_EDGES) == 0 and shade_level(100.0, KL_EDGES) == len(KL_EDGES) == 4


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=60), st.lists(st.text(max_size=8), min_size=1, max_size=6))
@example("<script>window.ran=1</script>", ['"onload=1', "<img src=x onerror=1>", "&amp;"])
def test_views_escape_text(prompt: str, pieces: list[str]) -> None:
    count = len(pieces)
    zeros = (0.0,) * count
    side = PolicyCompletion(
        completion="".join(pieces), reward=0.0, log_ratio=0.0, token_log_ratio=zeros, tokens=tuple(pieces),
        length=count, ended=False, stop="length", token_kl=zeros, token_logprob_ppo=zeros, token_logprob_sft=zeros,
        token_values=zeros,
    )  # fmt: skip
    page = Page(pairs_html(Snapshot(prompt, 1, 1.0, 0.5, 8, sft=(side,), ppo=(side,), done=True)))
    assert {tag for tag, _, _ in page.elements} <= KNOWN
    assert page.texts("span", class_="prompt") == [visible_text(prompt)] * 2
    names = {name for _, attrs, _ in page.elements for name in attrs}
    assert not any(name.startswith("on") or name in ("href", "src", "srcdoc") for name in names)


def test_details_of_both_policies_are_in_one_fold(comparison: Comparison) -> None:
    found = last(comparison)
    html = pairs_html(found, link="?prompt=a&amp")
    page = Page(html)
    assert page.texts("summary") == ["Token by token", "Numbers"]
    assert page.texts("h3") == page.texts("h4")[:2] == page.texts("h4")[2:] == ["SFT", "PPO"]
    assert "</article></div><details" in html, "the fold is below the cards, so that opening it moves neither"
    assert [one["href"] for one in page.all("a")] == ["?prompt=a&amp"]
    assert not Page(pairs_html(replace(found, done=False), link="?prompt=a")).all("a"), (
        "there is nothing to link to yet"
    )


def test_base_model_is_not_called_sft(comparison: Comparison) -> None:
    found = replace(last(comparison, n=2), initial_policy="the base")
    html = pairs_html(found)
    assert Page(html).texts("h3")[:2] == Page(html).texts("h4")[:2] == ["base", "PPO"]
    pages = (html, summary_html(found), empty_pairs_html("the base"), legend_html("the base"))
    assert not any("SFT" in page for page in pages)
    assert "more likely under the base" in pages[-1]


def test_finished_completions_are_announced_in_a_sentence(comparison: Comparison) -> None:
    found = last(comparison)
    rewards = [f"{side.reward:+.2f}".replace("-", "−") for side in (found.sft[0], found.ppo[0])]
    assert Page(summary_html(found)).text == (
        f"Finished. SFT: reward {rewards[0]}, {found.sft[0].length} tokens. "
        f"PPO: reward {rewards[1]}, {found.ppo[0].length} tokens."
    )
    assert summary_html(replace(found, done=False)) == ""
    bare = tuple(replace(side, reward=None) for side in found.sft)
    assert f"Finished. SFT: {found.sft[0].length} tokens. PPO: reward" in summary_html(replace(found, sft=bare))
