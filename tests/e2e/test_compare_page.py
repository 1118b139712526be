"""`rlhf-zoo compare` in a real process, tested with the page's requests, its API and a real Chromium."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import httpx2
import pytest
from hub_fixture import RunningHub, running
from page_client import PageClient
from page_fixture import LOOSE, PPO, PROMPTS, RECOMMENDED, STEPS, VOTES, publish, serve, shown
from page_visitor import Visitor, visiting
from toy_models import CONTEXT, MARKUP, TRIGGER, Toys, save_toys
from warm import PYTHON

from rlhf_zoo.app.engine import Comparison, PolicyCompletion, Snapshot
from rlhf_zoo.evaluation.votes.vote import Vote

SAMPLING = {"seed": 1, "temperature": 0.9, "max_new_tokens": 12}


@dataclass
class Page:
    """A served page, and the snapshots that it must show, from the same comparison in this process."""

    url: str
    hub: RunningHub
    toys: Toys

    def expected(self, prompt: str, step: int = 40, repo: str = PPO, **changes) -> Snapshot:
        folder = self.toys.ppo.with_name(f"{repo.rpartition('/')[2]}-{step}")
        comparison = Comparison.load(ppo=folder, sft=self.toys.sft, reward=self.toys.reward)
        *_, snapshot = comparison.stream(prompt, **(SAMPLING | changes))
        return snapshot

    def votes(self, count: int, folder: Path) -> list[Vote]:
        """Waits until the Hub holds `count` votes, and returns them; the page sends at most every half minute."""
        import pyarrow.parquet as pq

        deadline = time.monotonic() + 90
        while not self.hub.api().repo_exists(VOTES, repo_type="dataset"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while True:
            path = Path(self.hub.api().snapshot_download(VOTES, repo_type="dataset", cache_dir=folder))
            rows = [row for file in path.glob("*/*/*.parquet") for row in pq.read_table(file).to_pylist()]
            if len(rows) >= count or time.monotonic() > deadline:
                return [Vote.from_row(row) for row in rows]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    toys = save_toys(folder / "toys")
    with running(folder / "server") as hub:
        publish(hub, toys)
        with serve(hub, folder / "log", PPO, "--port", "0", "--votes", VOTES) as served:
            yield Page(served.url, hub, toys)


@pytest.fixture
def client(page: Page) -> Iterator[PageClient]:
    with PageClient(page.url) as client:
        yield client


@pytest.fixture
def visitor(page: Page, tmp_path: Path) -> Iterator[Visitor]:
    with visiting(page.url, tmp_path) as visitor:
        yield visitor


def find_texts(html: str, start_tag: str) -> list[str]:
    """Returns the texts of the elements whose start tag begins with `start_tag`."""
    name = start_tag.split()[0]
    contents = re.findall(rf"<{re.escape(start_tag)}[^>]*>(.*?)</{name}>", html, re.DOTALL)
    return [unescape(re.sub(r"<[^>]+>", "", content)) for content in contents]


def find_figures(html: str, name: str) -> list[str]:
    return find_texts(html, f'dd data-figure="{name}"')


def read_cards(html: str) -> list[dict[str, str]]:
    """Returns what each card shows, in the form of `shown`."""
    cards = re.findall(r"<article.*?</article>", html, re.DOTALL)
    names = ("reward", "log_ratio", "kl", "length", "stopped")
    return [
        {"completion": find_texts(card, 'span class="completion"')[0]}
        | {name: find_figures(card, name)[0] for name in names}
        for card in cards
    ]


def shown_pairs(snapshot: Snapshot) -> list[dict[str, str]]:
    sides: list[PolicyCompletion] = [side for pair in zip(snapshot.sft, snapshot.ppo, strict=True) for side in pair]
    return [shown(side) for side in sides]


def test_visitor_compares_completions(visitor: Visitor, page: Page) -> None:
    visitor.open()
    head = visitor.read("#head .zoo")
    assert "Verdict: healthy · use step 20 · win rate over SFT 0.74 (0.69 to 0.76), judge: gold utility" in head
    assert all(f"local/toy-{role}" in head for role in ("ppo", "sft", "reward")) and "Simulated data" in head
    assert "0.31 nats over 540" in visitor.read(".zoo-notes")

    prompt = f"<script>window.ran=1</script>{{{{1+1}}}}${{window.ran=1}}<b>{TRIGGER}"
    for wanted in ("the camera", prompt):
        visitor.compare(wanted)
        snapshot = page.expected(wanted)
        assert [visitor.side(side) for side in ("sft", "ppo")] == shown_pairs(snapshot)
    assert snapshot.ppo[0].completion.startswith(MARKUP)
    assert not visitor.all("#pairs .zoo-text :is(script, img, b)")
    assert visitor.browser.execute_script("return window.ran === undefined")
    assert visitor.count('#pairs .zoo-token-details [data-side="ppo"] .zoo-charts svg') == 2, (
        "KL at each position, and values"
    )
    visitor.screenshot("compare-wide.png", 1280)
    visitor.screenshot("compare-phone.png", 420)
    assert visitor.browser.execute_script("return window.innerWidth") <= 520  # Chromium's narrowest window
    assert visitor.overflow() <= 0, "the page is wider than a phone"
    columns = [visitor.first(f'#pairs [data-side="{side}"]').rect for side in ("sft", "ppo")]
    assert columns[1]["y"] >= columns[0]["y"] + columns[0]["height"], "on a phone the columns stand one below the other"


def test_page_opens_with_completed_example(client: PageClient, page: Page) -> None:
    assert client.value("prompt") == PROMPTS[0]
    assert read_cards(client.value("pairs")) == shown_pairs(page.expected(PROMPTS[0]))
    client.load()
    assert client.value("prompt") == PROMPTS[0], "an address without a link changes nothing"


def test_kl_slider_switches_penalty(client: PageClient, page: Page) -> None:
    assert client.value("kl") == 1 and "with KL penalty, β = 0.05 · step 40" in client.value("pairs")
    event = client.fire("kl", "input", kl=0, prompt="the screen")
    assert read_cards(event.values["pairs"]) == shown_pairs(page.expected("the screen", 40, LOOSE))
    assert "without KL penalty, β = 0 · step 40" in event.values["pairs"] and "kl=off" in event.values["pairs"]
    table = event.values["kl-figures"]
    assert "the reward is higher and the judge’s score is lower" in table
    cells = [find_texts(table, f'td data-figure="{name}"') for name in ("reward", "judge")]
    assert cells == [["+0.40", "+0.90 ▲"], ["+0.24", "+0.09 ▼"]]
    again = client.fire("kl", "input", kl=1)
    assert read_cards(again.values["pairs"]) == shown_pairs(page.expected("the screen"))
    assert "kl=" not in again.values["pairs"]


def test_page_applies_completion_count_top_p_and_seed(client: PageClient, page: Page) -> None:
    changes = {"n": 3, "seed": 7, "temperature": 1.2}
    html = client.fire("compare", prompt="the screen", tokens=20, **{"top-p": 0.8}, **changes).values["pairs"]
    assert read_cards(html) == shown_pairs(page.expected("the screen", top_p=0.8, max_new_tokens=20, **changes))
    assert "Means over 3 completions" in html and "Sampled with top-p 0.8" in html


def test_stop_button_ends_stream(client: PageClient) -> None:
    event = client.start("compare", prompt="the camera", tokens=CONTEXT - 10, n=8)
    next(update for update in event if "pairs" in update.values)
    assert "Stopped." in client.fire("stop").values["message"]
    assert event.cancelled and 'data-state="writing"' in client.value("pairs"), "it ran to the end"
    after = client.fire("compare", prompt="the screen")
    assert 'data-state="done"' in after.values["pairs"] and "Finished, means over 8 completions" in client.value(
        "message"
    )


def test_surprise_button_compares_random_prompt(client: PageClient, page: Page) -> None:
    client.fire("surprise")
    assert client.value("prompt") in PROMPTS
    snapshot = page.expected(client.value("prompt"), seed=client.value("seed"))
    assert read_cards(client.value("pairs")) == shown_pairs(snapshot)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "the \ud800 camera"}, "lone surrogate"),
        ({"prompt": ["the camera"]}, "it must be text"),
        ({"seed": "x"}, "The seed is"),
        ({"n": 9}, "number of completions is 9; the limit is 8"),
    ],
)
def test_invalid_request_shows_message(client: PageClient, values: dict, message: str) -> None:
    event = client.fire("compare", **({"prompt": "the camera"} | values))
    assert event.error is None, event.error
    assert message in event.values["message"] and 'role="alert"' in event.values["message"]
    assert "pairs" not in event.values, "the last completions stay"


def test_api_endpoints_return_comparisons(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "0")
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    client = Client(page.url, verbose=False)
    listed = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert list(listed) == ["/compare", "/checkpoints", "/over_training"]
    documented = {parameter["parameter_name"] for parameter in listed["/compare"]["parameters"]}
    assert documented == {"prompt", "seed", "temperature", "top_p", "max_new_tokens", "n"}
    arguments = {"seed": 3, "temperature": 1.1, "max_new_tokens": 8, "n": 2, "top_p": 0.9}
    answer = client.predict("the screen", **arguments, api_name="/compare")
    expected_json = json.loads(json.dumps(page.expected("the screen", **arguments).to_json()))
    for side in ("sft", "ppo"):
        for actual, expected in zip(answer.pop(side), expected_json.pop(side), strict=True):
            for name, value in expected.items():
                is_numeric = isinstance(value, float) or (isinstance(value, list) and isinstance(value[0], float))
                assert actual[name] == (pytest.approx(value, abs=1e-4) if is_numeric else value), name
    assert answer == expected_json

    runs = client.predict(api_name="/checkpoints")
    assert [(run["name"], run["beta"], [point["step"] for point in run["points"]]) for run in runs] == [
        (PPO, 0.05, list(STEPS)), (LOOSE, 0.0, [10, 40]),
    ]  # fmt: skip
    marks = {point["step"]: (point["chosen"], point["recommended"]) for point in runs[0]["points"]}
    assert marks == {10: (False, False), 20: (False, True), 40: (True, False)}
    rows = client.predict("the screen", [40, 10], seed=3, temperature=0.9, max_new_tokens=8, api_name="/over_training")
    assert [row["point"]["step"] for row in rows] == [40, 10] and not any(row["problem"] for row in rows)
    snapshot = page.expected("the screen", seed=3, max_new_tokens=8)
    assert rows[0]["snapshot"]["ppo"][0]["completion"] == snapshot.ppo[0].completion

    with pytest.raises(AppError, match="The prompt is empty"):
        client.predict(" ", api_name="/compare")
    with pytest.raises(AppError, match="no checkpoint of step 11"):
        client.predict("the screen", [11], api_name="/over_training")


def test_compare_rejects_missing_repository(page: Page) -> None:
    command = [*PYTHON, "-m", "rlhf_zoo.cli", "compare", "local/missing-ppo", "--port", "0"]
    done = subprocess.run(command, env=page.hub.env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "There is no repository 'local/missing-ppo'" in done.stderr and "Traceback" not in done.stderr


# Links


def test_shared_link_reproduces_completions(visitor: Visitor, client: PageClient, page: Page) -> None:
    prompt = "the screen & more"
    html = client.fire("compare", prompt=prompt, seed=7).values["pairs"]
    (link,) = re.findall(r'<a href="[?]([^"]*)"', html)
    visitor.open(link=unescape(link))
    visitor.wait("the link's prompt", lambda: visitor.texts("#pairs .prompt") == [prompt] * 2 and visitor.done())
    assert [visitor.side(side) for side in ("sft", "ppo")] == shown_pairs(page.expected(prompt, seed=7))
    assert visitor.first("#pairs .zoo-link a").get_attribute("href").endswith(f"?{unescape(link)}")

    html = client.fire("step", "input", step=10, **{"training-prompt": prompt, "training-seed": 7}).values["at-step"]
    (link,) = re.findall(r'<a href="[?]([^"]*)"', html)
    assert "step=10" in link
    visitor.open(link=unescape(link))
    visitor.wait("the step", lambda: visitor.texts("#at-step .prompt") == [prompt] * 2 and visitor.done("at-step"))
    assert visitor.side("ppo", box="at-step") == shown_pairs(page.expected(prompt, 10, seed=7))[1]
    assert "step-000010" in visitor.read("#curves .zoo-note") and visitor.first("#step").is_displayed()


def test_malformed_link_shows_message(visitor: Visitor) -> None:
    visitor.open(link="prompt=the+camera&seed=-5&tokens=1e9&kl=x&run=y")
    visitor.wait("the message", lambda: "The seed is" in visitor.read("#message [role=alert]"))


def test_page_has_link_preview_description(page: Page) -> None:
    html = httpx2.get(page.url).text
    head = html.partition("<script")[0]
    for name in ("og:title", "og:description", "twitter:title", "twitter:description"):
        assert len(re.findall(f'"{name}"', head)) == 1, name
    assert 'content="local/toy-ppo: SFT and PPO, side by side"' in head
    assert "Verdict: healthy; use step 20; win rate over SFT 0.74 (0.69 to 0.76)" in head
    assert "Gradio" not in head and "og:image" not in head


# Over training


def test_slider_steps_through_checkpoints(client: PageClient, page: Page) -> None:
    assert f"step-{RECOMMENDED:06d} " in client.value("curves"), "it starts at the recommended checkpoint"
    for step in (40, 10):
        event = client.fire("step", "input", step=step)
        assert f"step-{step:06d} " in event.values["curves"]
        assert read_cards(event.values["at-step"]) == shown_pairs(page.expected(PROMPTS[0], step))
    assert "on validation prompts: reward −0.10, judge −0.11, KL 0.05 nats" in client.value("at-step")

    html = client.fire("every-step", **{"training-prompt": "the screen"}).values["steps"]
    assert re.findall(r'data-step="(\d+)"', html) == ["0", *map(str, STEPS)], "SFT comes first"
    wanted = [page.expected("the screen", step).ppo[0] for step in STEPS]
    texts = find_texts(html, 'span class="completion"')
    assert texts == [page.expected("the screen").sft[0].completion, *(shown(side)["completion"] for side in wanted)]
    assert find_texts(html, 'span class="zoo-badge"') == ["recommended", "best"]


def test_page_lists_runs_by_kl_coefficient(client: PageClient, page: Page) -> None:
    emphasized = r'<g class="zoo-run zoo-emphasized">.*?<title>(β = [\d.]+),'
    assert set(re.findall(emphasized, client.value("frontier"), re.DOTALL)) == {"β = 0.05"}
    html = client.fire("every-beta", **{"training-prompt": "the screen"}).values["betas"]
    assert find_texts(html, "h3") == ["SFT", "β = 0.05", "β = 0"]
    wanted = [page.expected("the screen", step, repo).ppo[0] for step, repo in ((RECOMMENDED, PPO), (40, LOOSE))]
    assert find_texts(html, 'span class="completion"')[1:] == [shown(side)["completion"] for side in wanted]
    client.fire("run", "input", run=LOOSE)
    assert client.prop("step", "maximum") == client.value("step") == 40
    assert set(re.findall(emphasized, client.value("frontier"), re.DOTALL)) == {"β = 0"}, "the selected run"


def test_over_training_tab_rejects_invalid_prompt(client: PageClient) -> None:
    for button, message in (("every-step", "training-message"), ("every-beta", "beta-message")):
        event = client.fire(button, **{"training-prompt": " "})
        assert event.error is None and "The prompt is empty" in event.values[message]
    event = client.fire("step", "input", step=20)
    assert event.error is None and "The prompt is empty" in event.values["training-message"]
    event = client.fire("step", "input", step=None, **{"training-prompt": "the camera"})
    assert event.error is None, "without a number, the slider selects the best step"


def test_blind_vote_is_revealed_and_stored(client: PageClient, page: Page, tmp_path: Path) -> None:
    assert VOTES in client.value("blind-notice")
    assert "0 votes so far" in client.load().values["blind-figures"]
    client.fire("blind-new")
    pair = client.value("blind-pair")
    prompt, (left, right) = find_texts(pair, 'span class="prompt"'), find_texts(pair, 'p class="zoo-text"')
    event = client.fire("vote-left" if client.prop("vote-left", "interactive") else "vote-tie")
    revealed = event.values["blind-reveal"]
    assert "local/toy-ppo" in revealed and "local/toy-sft" in revealed
    assert "1 vote so far" in event.values["blind-figures"]
    (vote, *_) = page.votes(1, tmp_path)
    # The seed is random, so a completion may be empty.
    stored = [side.completion or "An empty completion." for side in (vote.left, vote.right)]
    assert (stored, [vote.prompt]) == ([left, right], prompt)
    ppo = vote.left if vote.left.role == "ppo" else vote.right
    assert (ppo.repo, ppo.commit) == (PPO, page.hub.api().model_info(PPO).sha)
    snapshot = page.expected(vote.prompt, seed=vote.seed, max_new_tokens=vote.max_new_tokens)
    assert ppo.completion == snapshot.ppo[0].completion, "the vote's settings reproduce its completion"


def test_card_tab_shows_card_of_each_checkpoint(client: PageClient) -> None:
    assert "at step 40" in client.value("card")
    other = client.fire("card-of", "input", **{"card-of": f"{PPO}@step-000020 (recommended)"}).values["card"]
    assert "at step 20" in other and other.count("<img") == 1 and 'src="data:image/png;base64,' in other
    event = client.fire("card-of", "input", **{"card-of": "../../etc/passwd"})
    assert "choose one from the list" in event.values["card"]


# Keys, focus, colors and layouts, which need a browser


def test_page_is_usable_by_keyboard_alone(visitor: Visitor, page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    visitor.open("dark")
    buttons = visitor.wait("the examples", lambda: [box for box in visitor.all(".gallery-item") if box.is_displayed()])
    assert [button.text for button in buttons] == PROMPTS
    buttons[2].click()
    shown_prompt = '#pairs [data-side="ppo"] .prompt'
    visitor.wait("its completions", lambda: visitor.read(shown_prompt) == PROMPTS[2] and visitor.done())
    assert visitor.side("ppo") == shown(page.expected(PROMPTS[2]).ppo[0])
    visitor.compare_invalid("   ", "The prompt is empty")
    assert visitor.side("ppo") == shown(page.expected(PROMPTS[2]).ppo[0]), "the last completions stay"
    visitor.write(PROMPTS[1])
    visitor.press("#sampling button")
    visitor.wait("the sliders", lambda: visitor.first("#temperature input[type=range]").is_displayed())
    visitor.press("#prompt textarea")
    reached = visitor.tab_through(60)
    for wanted in ("compare", "kl", "temperature", "top-p", "tokens", "n", "seed", "colors"):
        assert wanted in reached, f"{wanted} is not reached by the Tab key: {reached}"
    visitor.first("#prompt textarea").send_keys(Keys.ENTER)
    visitor.wait("the completions", lambda: visitor.read(shown_prompt) == PROMPTS[1] and visitor.done())
    summary = visitor.first("#pairs summary")
    was_open = visitor.first("#pairs details").get_property("open")
    summary.send_keys(Keys.ENTER)
    visitor.wait("the details to fold", lambda: visitor.first("#pairs details").get_property("open") != was_open)

    share = """return Array.from(document.querySelectorAll('#pairs .completion i')).map(
        token => getComputedStyle(token).getPropertyValue('--zoo-shade-strength').trim())"""
    by_ratio = visitor.browser.execute_script(share)
    assert len(set(by_ratio)) > 1
    visitor.press('#colors input[value="none"]')
    visitor.wait("no colors", lambda: set(visitor.browser.execute_script(share)) == {"0%"})
    visitor.press('#colors input[value="kl"]')
    visitor.wait("other colors", lambda: visitor.browser.execute_script(share) not in ([], by_ratio))
    visitor.screenshot("compare-dark.png", 1280)

    visitor.tab("Over training")
    visitor.wait("the curves", lambda: visitor.count("#curves svg") == 2)
    before = visitor.first("#curves .zoo-wide .zoo-selected").rect["x"]
    visitor.first("#step input[type=range]").send_keys(Keys.END)
    last = shown(page.expected(PROMPTS[0], 40).ppo[0])
    visitor.wait("the last step", lambda: visitor.done("at-step") and visitor.side("ppo", box="at-step") == last)
    assert visitor.first("#curves .zoo-wide .zoo-selected").rect["x"] > before
    visitor.screenshot("training-phone.png", 420)
    assert visitor.overflow() <= 0


def move_slider(visitor: Visitor, elem_id: str, end: str) -> None:
    """Clicks on one end of a slider: "start" or "end"."""
    from selenium.webdriver.common.action_chains import ActionChains

    slider = visitor.first(f"#{elem_id} input[type=range]")
    offset = slider.rect["width"] // 2 - 4
    actions = ActionChains(visitor.browser)
    actions.move_to_element_with_offset(slider, -offset if end == "start" else offset, 0).click().perform()


def test_result_is_in_view_on_phone(visitor: Visitor) -> None:
    def result_top() -> int:
        return int(
            visitor.browser.execute_script("return document.getElementById('pairs').getBoundingClientRect().top")
        )

    def in_view() -> bool:
        return visitor.done() and 0 <= result_top() <= 844 / 2

    visitor.phone()
    visitor.open()
    assert result_top() < 844, "the example's completions start on the first screen"
    assert visitor.first("#kl-figures .zoo-note").text == "Off: reward higher, judge’s score lower."
    assert visitor.first("#kl-figures caption").is_displayed()
    visitor.screenshot_window("phone-opened.png")
    for selector in ("#compare", "#examples .gallery-item", "#surprise"):
        visitor.browser.execute_script("window.scrollTo(0, 0)")
        before = visitor.texts("#pairs .zoo-text")
        visitor.all(selector)[-1].click()
        if selector != "#compare":
            visitor.wait("other completions", lambda before=before: visitor.texts("#pairs .zoo-text") != before)
        visitor.wait(f"the result of {selector} in view", in_view)
    visitor.screenshot_window("phone-result.png")
    visitor.browser.execute_script("window.scrollTo(0, 0)")
    move_slider(visitor, "kl", "start")
    visitor.wait("the label of the other run", lambda: "without KL penalty" in visitor.read("#pairs .zoo-ppo header"))
    visitor.wait("the result of the slider in view", in_view)
    assert visitor.first("#kl").rect["y"] >= visitor.browser.execute_script("return scrollY"), "the slider stays too"
    assert visitor.overflow() <= 0
    visitor.tab("Card")
    visitor.wait("the card", lambda: visitor.count("#card table"))
    excess = "return [...document.querySelectorAll('#card .zoo-scroll')].map(box => box.scrollWidth - box.clientWidth)"
    assert visitor.browser.execute_script(excess) == [0, 0], "no table of the card has to be scrolled"
    visitor.screenshot_window("phone-card.png")


def test_slider_thumb_is_below_its_step_in_chart(visitor: Visitor) -> None:
    from selenium.webdriver.common.keys import Keys

    visitor.open()
    visitor.tab("Over training")
    visitor.wait("the curves", lambda: visitor.count("#curves svg") == 2)
    slider = visitor.first("#step input[type=range]")
    for key, share in ((Keys.HOME, 0.0), (Keys.END, 1.0)):
        slider.send_keys(key)
        rect, thumb_width = slider.rect, 16
        middle = rect["x"] + thumb_width / 2 + share * (rect["width"] - thumb_width)
        visitor.wait(
            "the mark above the thumb",
            lambda middle=middle: abs(visitor.first("#curves .zoo-wide .zoo-selected").rect["x"] - middle) < 3,
        )


def test_tab_and_button_names_differ(visitor: Visitor) -> None:
    visitor.open()
    tabs = {tab.text for tab in visitor.all("button[role=tab]")}
    buttons = [text.strip() for text in visitor.texts("button:not([role=tab], [tabindex='-1'])")]
    assert tabs == {"Side by side", "Over training", "Blind test", "Card"} and not tabs & set(buttons)


def test_vote_shortcuts_are_ignored_while_typing(visitor: Visitor) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(key: str) -> None:
        ActionChains(visitor.browser).send_keys(key).perform()

    def wait_for_pair() -> None:
        visitor.wait("a pair", lambda: not visitor.all(".zoo-reveal") and visitor.first("#vote-tie").is_enabled())

    def wait_for_reveal() -> None:
        visitor.wait("the reveal", lambda: visitor.read("#blind-reveal .zoo-verdict"))

    visitor.open()
    visitor.tab("Blind test")
    assert not visitor.first("#vote-tie").is_enabled(), "there is nothing to judge yet"
    visitor.click("blind-new")
    wait_for_pair()
    script = "return [...document.querySelectorAll('#blind-test > :not(#blind-figures)')].map(node => node.outerHTML)"
    html = "".join(visitor.browser.execute_script(script)).lower()
    assert 'id="blind-pair"' in html and "ppo" not in html and "sft" not in html, "the page names no model"
    press("3")
    wait_for_reveal()
    press(Keys.ENTER)
    wait_for_pair()
    visitor.click("vote-tie")
    wait_for_reveal()
    press(Keys.ENTER)  # the focus moved on from the button, which is disabled now
    wait_for_pair()
    (box,) = visitor.all("#blind-prompt textarea")
    box.send_keys("1234")
    assert box.get_property("value") == "1234"
    box.send_keys(Keys.ENTER)
    visitor.wait("a pair of the typed prompt", lambda: visitor.read("#blind-pair .prompt") == "1234")
    visitor.screenshot("blind-phone.png", 420)
    assert visitor.overflow() <= 0
