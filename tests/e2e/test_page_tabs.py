"""The page's other tabs in a real Chromium: over training, the blind test with its votes on the Hub, and the card."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_fixture import RunningHub, start_hub
from page_client import PageClient
from page_fixture import LOOSE, PPO, PROMPTS, RECOMMENDED, STEPS, VOTES, figure, publish, serve, shown
from page_visitor import Visitor, visiting
from toy_models import Toys, save_toys

from rlhf_zoo.comparison import Comparison, Snapshot
from rlhf_zoo.hub.votes import Vote


@dataclass
class Page:
    url: str
    hub: RunningHub
    folder: Path
    toys: Toys

    def at(self, prompt: str, step: int, repo: str = PPO, **changes) -> Snapshot:
        """What the page must show of a step."""
        folder = self.toys.ppo.with_name(f"{repo.rpartition('/')[2]}-{step}")
        comparison = Comparison.load(ppo=folder, sft=self.toys.sft, reward=self.toys.reward)
        *_, found = comparison.stream(prompt, **({"seed": 1, "temperature": 0.9, "max_new_tokens": 12} | changes))
        return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("tabs")
    toys = save_toys(folder / "toys")
    hub = start_hub(folder / "server")
    try:
        publish(hub, toys)
        with serve(hub, folder / "log", PPO, "--port", "0", "--votes", VOTES) as served:
            yield Page(served.url, hub, folder, toys)
    finally:
        hub.stop()
    assert "Traceback" not in hub.log.read_text(), hub.log.read_text()


@pytest.fixture
def visitor(page: Page, tmp_path: Path) -> Iterator[Visitor]:
    with visiting(page.url, tmp_path) as visitor:
        yield visitor


def marked_step(visitor: Visitor) -> str:
    return visitor.read("#curves .zoo-note").partition(" ")[0]


def test_the_slider_goes_over_the_checkpoints(visitor: Visitor, page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    visitor.open()
    visitor.tab("Over training")
    visitor.wait("the curves", lambda: visitor.count("#curves svg") == 1)
    assert marked_step(visitor) == f"step-{RECOMMENDED}", "the recommended checkpoint is where it begins"
    assert {"recommended", "best"} <= set(visitor.texts("#curves text"))
    before = visitor.all("#curves .zoo-chosen")[0].rect["x"]

    (slider,) = visitor.all("#step input[type=range]")
    slider.send_keys(Keys.END)
    visitor.wait("the last step", lambda: marked_step(visitor) == "step-40")
    visitor.wait("its completions", lambda: visitor.done("at-step"))
    found = page.at(PROMPTS[0], 40)
    visitor.wait("those of the last step", lambda: visitor.side("ppo", box="at-step") == shown(found.ppo[0]))
    assert visitor.side("sft", box="at-step") == shown(found.sft[0])
    assert "in training: reward +0.40, KL 0.31 nats" in visitor.read('#at-step [data-side="ppo"] header')
    assert visitor.all("#curves .zoo-chosen")[0].rect["x"] > before

    slider.send_keys(Keys.HOME)
    first = page.at(PROMPTS[0], 10)
    visitor.wait("the first step", lambda: visitor.side("ppo", box="at-step") == shown(first.ppo[0]))
    assert first.ppo[0].kl < found.ppo[0].kl


def test_the_same_prompt_at_every_step(visitor: Visitor, page: Page) -> None:
    visitor.open()
    visitor.tab("Over training")
    visitor.write("the screen", box="training-prompt")
    visitor.click("every-step")
    visitor.wait("every step", lambda: visitor.done("steps"))
    assert visitor.count("#steps li") == 1 + len(STEPS), "SFT comes first"
    assert visitor.read('#steps [data-step="0"] .new') == page.at("the screen", 10).sft[0].completion
    for step in STEPS:
        card = f'#steps [data-step="{step}"]'
        side = page.at("the screen", step).ppo[0]
        assert visitor.read(f"{card} .new") == shown(side)["completion"]
        assert visitor.read(f"{card} [data-figure=kl]") == figure(side.kl, sign=False)
    assert visitor.texts("#steps .zoo-badge") == ["recommended", "best"]
    visitor.screenshot("training-wide.png", 1280)
    visitor.screenshot("training-phone.png", 420)
    assert visitor.overflow() <= 0
    visitor.browser.set_window_size(1280, 900)


def test_the_string_let_out(visitor: Visitor, page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    visitor.open("dark")
    visitor.tab("Over training")
    visitor.wait("the frontier", lambda: visitor.count("#frontier svg") == 1)
    assert {"β = 0.05", "β = 0"} <= set(visitor.texts("#frontier text"))
    visitor.write("the screen", box="training-prompt")
    (slider,) = visitor.all("#beta input[type=range]")
    slider.send_keys(Keys.END)
    loose = page.at("the screen", 40, LOOSE)
    visitor.wait("the loose run", lambda: visitor.side("ppo", box="at-beta") == shown(loose.ppo[0]))
    assert "β = 0 · step-40 (best)" in visitor.read('#at-beta [data-side="ppo"] header')
    slider.send_keys(Keys.HOME)
    tight = page.at("the screen", RECOMMENDED)
    visitor.wait("the tight run", lambda: visitor.side("ppo", box="at-beta") == shown(tight.ppo[0]))
    assert tight.ppo[0].kl < loose.ppo[0].kl
    visitor.click("every-beta")
    visitor.wait("every run", lambda: visitor.done("betas"))
    assert visitor.texts("#betas header b") == ["SFT", "β = 0.05", "β = 0"]
    visitor.screenshot("training-dark.png", 1280)


def test_a_prompt_that_cannot_be_shown_over_training(page: Page) -> None:
    with PageClient(page.url) as visitor:
        for button, message in (("every-step", "training-message"), ("every-beta", "beta-message")):
            event = visitor.fire(button, **{"training-prompt": " "})
            assert event.error is None and "The prompt is empty" in event.values[message]
        event = visitor.fire("step", "input", step=20, **{"training-prompt": "a" * 100_000})
        assert event.error is None and "10000" in event.values["training-message"]
        event = visitor.fire("step", "input", step=None, **{"training-prompt": "the camera"})
        assert event.error is None, "a slider without a number is where the run is best"


def votes_on(hub: RunningHub, folder: Path) -> list[Vote]:
    """What the data set on the Hub holds."""
    import pyarrow.parquet as pq

    path = Path(hub.api().snapshot_download(VOTES, repo_type="dataset", cache_dir=folder / f"cache-{time.time_ns()}"))
    return [
        Vote.from_row(row) for file in sorted(path.glob("*/*/*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def stored(page: Page, count: int) -> list[Vote]:
    """The votes on the Hub, once there are as many; a box sends at most every half minute."""
    deadline = time.monotonic() + 90
    while True:
        found = votes_on(page.hub, page.folder) if page.hub.api().repo_exists(VOTES, repo_type="dataset") else []
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def test_a_blind_vote_is_revealed_and_stored(visitor: Visitor, page: Page) -> None:
    visitor.open()
    visitor.tab("Blind test")
    assert VOTES in visitor.read("#blind-notice") and "Nothing" in visitor.read("#blind-notice")
    for name in ("left", "right", "tie", "both-bad"):
        assert not visitor.all(f"#vote-{name}")[0].is_enabled(), "there is nothing to judge yet"
    visitor.click("blind-new")
    visitor.wait("both completions", lambda: visitor.all("#vote-tie")[0].is_enabled())
    hidden = visitor.all("#blind-pair")[0].get_attribute("innerHTML")
    assert "ppo" not in hidden.lower() and "sft" not in hidden.lower() and "reward" not in hidden.lower()
    left, right = visitor.texts("#blind-pair .zoo-text")
    visitor.screenshot("blind-hidden.png", 1280)
    choice = "left" if visitor.all("#vote-left")[0].is_enabled() else "tie"
    visitor.click(f"vote-{choice}")
    visitor.wait("the reveal", lambda: "PPO" in visitor.read("#blind-reveal"))
    assert local_names(visitor.read("#blind-reveal"))
    visitor.wait("the figures", lambda: "1" in visitor.read("#blind-figures"))
    visitor.screenshot("blind-revealed.png", 1280)
    visitor.screenshot("blind-phone.png", 420)
    assert visitor.overflow() <= 0
    (vote, *_) = stored(page, 1)
    assert vote.verdict == choice and vote.prompt in PROMPTS
    assert vote.left.completion == left.strip("\n") or vote.left.completion in left
    assert vote.right.completion in right
    assert {vote.left.role, vote.right.role} == {"ppo", "sft"}
    ppo = vote.left if vote.left.role == "ppo" else vote.right
    assert (ppo.repo, ppo.commit) == (PPO, page.hub.api().model_info(PPO).sha)
    found = page.at(vote.prompt, 40, seed=vote.seed, max_new_tokens=vote.max_new_tokens)
    assert ppo.completion == found.ppo[0].completion, "the vote says how to draw it again"


def local_names(revealed: str) -> bool:
    return "local/toy-ppo" in revealed and "local/toy-sft" in revealed


def test_the_card_of_each_checkpoint(visitor: Visitor) -> None:
    visitor.open()
    visitor.tab("Card")
    visitor.wait("the card", lambda: "at step 40" in visitor.read("#card"))
    assert visitor.count('#card img[src^="data:image/png;base64,"]') == 1
    assert visitor.count("#card img") == 1, "a picture elsewhere is not asked for"
    assert visitor.count("#card script") == 0 and "<script>window.ran=1</script>" in visitor.read("#card")
    visitor.screenshot("card-wide.png", 1280)
    visitor.all("#card-of input")[0].click()
    choices = visitor.wait("the list", lambda: visitor.all("#card-of [role=option], ul[role=listbox] li"))
    assert [one.text.strip("✓ \n") for one in choices][1:3] == [f"{PPO}@step-10", f"{PPO}@step-20 (recommended)"]
    choices[1].click()
    visitor.wait("the other card", lambda: "at step 10" in visitor.read("#card"))
    visitor.screenshot("card-phone.png", 420)
    assert visitor.overflow() <= 0
    assert visitor.browser.execute_script("return window.ran === undefined")


def test_a_card_that_is_not_there(page: Page) -> None:
    with PageClient(page.url) as visitor:
        event = visitor.fire("card-of", "input", **{"card-of": "../../etc/passwd"})
    assert event.error is not None or "choose one of the list" in event.values["card"]
