"""A link carries a prompt, seed and step, and reading it back loses nothing, whatever its text holds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.app.engine import Snapshot
from rlhf_zoo.app.page.link import MAX_LINK_LENGTH, Link, link_address
from rlhf_zoo.app.page.sampling import SamplingDefaults

PROPOSAL = SamplingDefaults(temperature=0.7, length=32, max_length=64)
SNAPSHOT = Snapshot("the battery", 3, 0.7, 1.0, 32, sft=(None,), ppo=(None,), done=True)


@settings(deadline=None)
@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=80),
    st.integers(0, 2**31),
    st.sampled_from([0.7, 0.05, 2.0]),
    st.sampled_from([1.0, 0.05]),
    st.integers(1, 64),
    st.integers(0, 10**6),
)
def test_link_round_trips_its_fields(prompt, seed, temperature, top_p, tokens, step) -> None:
    snapshot = replace(SNAPSHOT, prompt=prompt, seed=seed, temperature=temperature, top_p=top_p, max_new_tokens=tokens)
    link = Link.parse(link_address(snapshot, PROPOSAL, step=step, run="a/b & c", kl="off"))
    assert link is not None and (link.prompt, link.step, link.run, link.kl) == (prompt, step, "a/b & c", "off")
    usual = {"temperature": 0.7, "top_p": 1.0, "tokens": 32}
    assert {**usual, **link.sampling} == {"seed": seed, "temperature": temperature, "top_p": top_p, "tokens": tokens}


def test_link_omits_defaults() -> None:
    assert link_address(SNAPSHOT, PROPOSAL) == "?prompt=the+battery&seed=3"
    assert link_address(replace(SNAPSHOT, prompt="x" * MAX_LINK_LENGTH), PROPOSAL) is None
    assert link_address(replace(SNAPSHOT, prompt="half \ud800"), PROPOSAL) is None


@pytest.mark.parametrize("query", ["", "?", None, 3, "seed=3", "?__theme=dark", "&".join(["prompt=x"] * 40)])
def test_parse_is_none_without_prompt(query) -> None:
    assert Link.parse(query) is None


@pytest.mark.parametrize("value", ["x", "nan", "inf", "1e400", "", "1" * 400])
def test_parse_ignores_bad_numbers(value: str) -> None:
    assert Link.parse(f"?prompt=a&seed={value}&step={value}") == Link("a", {})
