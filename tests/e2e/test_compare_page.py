"""`rlhf-zoo compare` as a person and as a program meet it: a real process, a real Chromium, the real client."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_fixture import RunningHub, start_hub
from page_client import PageClient
from page_fixture import LOOSE, PPO, PROMPTS, STEPS, publish, serve, shown
from page_visitor import Visitor, visiting
from toy_models import CONTEXT, MARKUP, TRIGGER, Toys, save_toys
from warm import PYTHON

from rlhf_zoo.comparison import Comparison, Snapshot

SAMPLING = {"seed": 1, "temperature": 0.9, "max_new_tokens": 12}


@dataclass
class Page:
    """The page as served, and the same comparison in this process."""

    url: str
    here: Comparison

    def expected(self, prompt: str, **changes) -> Snapshot:
        *_, found = self.here.stream(prompt, **(SAMPLING | changes))
        return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningHub, Toys]]:
    folder = tmp_path_factory.mktemp("compare")
    toys = save_toys(folder / "toys")
    running = start_hub(folder / "server")
    try:
        publish(running, toys)
        yield running, toys
    finally:
        running.stop()
    assert "Traceback" not in running.log.read_text(), running.log.read_text()


@pytest.fixture(scope="module")
def page(hub: tuple[RunningHub, Toys], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    running, toys = hub
    log = tmp_path_factory.mktemp("page") / "log"
    with serve(running, log, PPO, "--port", "0") as served:
        yield Page(served.url, Comparison.load(ppo=toys.ppo, sft=toys.sft, reward=toys.reward))


@pytest.fixture
def visitor(page: Page, tmp_path: Path) -> Iterator[Visitor]:
    with visiting(page.url, tmp_path) as visitor:
        yield visitor


def test_a_visitor_compares(visitor: Visitor, page: Page) -> None:
    visitor.open()
    head = visitor.read(".zoo")
    assert all(f"local/toy-{role}" in head for role in ("ppo", "sft", "reward")) and "simulated world" in head
    assert "0.31 nats over 540" in visitor.read(".zoo-notes")
    assert visitor.side("ppo")["reward"] == "–"

    visitor.compare("the camera")
    found = page.expected("the camera")
    assert found.sft[0].completion != found.ppo[0].completion and found.ppo[0].log_ratio != 0
    for side in ("sft", "ppo"):
        assert visitor.side(side) == shown(getattr(found, side)[0])
    assert visitor.count('#pairs [data-side="ppo"] .zoo-charts svg') == 2, "KL at each position, and values"
    visitor.screenshot("compare-wide.png", 1280)
    visitor.screenshot("compare-phone.png", 420)
    assert visitor.browser.execute_script("return window.innerWidth") <= 520  # Chromium's narrowest window
    assert visitor.overflow() <= 0, "the page is wider than a phone"
    columns = [visitor.all(f'#pairs [data-side="{side}"]')[0].rect for side in ("sft", "ppo")]
    assert columns[1]["y"] >= columns[0]["y"] + columns[0]["height"], "on a phone the columns stand one below the other"

    visitor.browser.set_window_size(1280, 900)
    visitor.open("dark")
    visitor.compare("the camera")
    visitor.screenshot("compare-dark.png", 1280)


def test_several_completions_top_p_and_seed(visitor: Visitor, page: Page) -> None:
    visitor.open()
    for control, value in (("n", "3"), ("top-p", "0.8"), ("seed", "7"), ("tokens", "20"), ("temperature", "1.2")):
        visitor.set_number(control, value)
    visitor.compare("the screen", n=3)
    found = page.expected("the screen", n=3, top_p=0.8, seed=7, max_new_tokens=20, temperature=1.2)
    for row in range(3):
        for side in ("sft", "ppo"):
            assert visitor.side(side, row) == shown(getattr(found, side)[row])
    assert "Means over 3 completions" in visitor.read(".zoo-means caption")
    assert "Drawn with top-p 0.8" in visitor.read("#pairs .zoo-note")
    visitor.screenshot("compare-several.png", 1280)


def test_both_completions_grow_at_the_same_time(page: Page) -> None:
    with PageClient(page.url) as visitor:
        event = visitor.fire("compare", prompt="the camera", tokens=CONTEXT - 20, n=8, seed=4)
    written = [update.values.get("pairs") for update in event.updates]
    growing = [html for html in written if html is not None and 'data-state="writing"' in html]
    assert len(growing) >= 2, "it came at once"
    lengths = [[int(n) for n in figures(html, "length")] for html in growing]
    assert [sum(pair) for pair in lengths] == sorted(sum(pair) for pair in lengths)
    assert lengths[0][0] >= 1 and lengths[0][1] >= 1, "one waited for the other"
    assert 'data-state="done"' in written[-1]


def figures(html: str, name: str) -> list[str]:
    return [part.split("<")[0] for part in html.split(f'data-figure="{name}">')[1:]]


def test_an_example_a_surprise_and_the_enter_key(visitor: Visitor, page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    visitor.open()
    buttons = visitor.wait("the examples", lambda: [one for one in visitor.all(".gallery-item") if one.is_displayed()])
    assert [one.text for one in buttons] == PROMPTS
    buttons[2].click()
    (box,) = visitor.all("#prompt textarea")
    visitor.wait("the example in the box", lambda: box.get_property("value") == PROMPTS[2])
    visitor.wait(
        "its completions", lambda: visitor.done() and visitor.read('#pairs [data-side="ppo"] .given') == PROMPTS[2]
    )
    assert visitor.side("ppo") == shown(page.expected(PROMPTS[2]).ppo[0])
    visitor.write(PROMPTS[1])
    box.send_keys(Keys.ENTER)
    visitor.wait(
        "the completions", lambda: visitor.done() and visitor.read('#pairs [data-side="ppo"] .given') == PROMPTS[1]
    )

    visitor.write("")
    visitor.click("surprise")
    visitor.wait("a prompt by chance", lambda: box.get_property("value") in PROMPTS)
    seed = int(visitor.all("#seed input")[0].get_property("value"))
    prompt = box.get_property("value")
    found = page.expected(prompt, seed=seed)
    visitor.wait("its completions", lambda: visitor.done() and visitor.side("sft") == shown(found.sft[0]))


def test_the_keyboard_alone_is_enough(visitor: Visitor, page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    visitor.open()
    visitor.write("the camera")
    reached = visitor.tab_through(40)
    for wanted in ("compare", "temperature", "top-p", "tokens", "n", "seed", "colours"):
        assert wanted in reached, f"{wanted} is not reached by the Tab key: {reached}"
    visitor.all("#compare")[0].send_keys(Keys.ENTER)
    visitor.wait("the completions", visitor.done)
    summary = visitor.all("#pairs summary")[0]
    was = visitor.all("#pairs details")[0].get_property("open")
    summary.send_keys(Keys.ENTER)
    visitor.wait("the details to fold", lambda: visitor.all("#pairs details")[0].get_property("open") != was)


def test_tokens_are_coloured_by_what_is_chosen(visitor: Visitor) -> None:
    visitor.open()
    visitor.compare("the camera")
    share = """return Array.from(document.querySelectorAll('#pairs .new i')).map(
        one => getComputedStyle(one).getPropertyValue('--zoo-share').trim())"""
    by_ratio = visitor.browser.execute_script(share)
    assert len(set(by_ratio)) > 1
    visitor.all('#colours input[value="none"]')[0].click()
    visitor.wait("no colours", lambda: set(visitor.browser.execute_script(share)) == {"0%"})
    visitor.all('#colours input[value="kl"]')[0].click()
    visitor.wait("others", lambda: visitor.browser.execute_script(share) not in ([], by_ratio))
    visitor.screenshot("compare-kl.png", 1280)


def test_a_stream_is_stopped(visitor: Visitor) -> None:
    visitor.open()
    visitor.set_number("tokens", str(CONTEXT - 10))
    visitor.set_number("n", "8")
    visitor.write("the camera")
    # Toy models write in less time than a driver needs for a click: the page itself clicks once the button is there.
    visitor.browser.execute_script(
        """const watch = new MutationObserver(() => {
            const button = document.querySelector('#stop');
            if (getComputedStyle(button).display === 'none') return;
            watch.disconnect(); button.click();
        });
        watch.observe(document.body, {subtree: true, childList: true, attributes: true});"""
    )
    visitor.click("compare")
    visitor.wait("the message", lambda: "Stopped." in visitor.read("#message"))
    assert visitor.count('#pairs [data-state="writing"]') == 1, "it went on to its end"
    assert not visitor.all("#stop")[0].is_displayed()
    visitor.compare("the screen", n=8)
    assert visitor.read("#message").strip() == ""


def test_the_page_documents_its_endpoints(visitor: Visitor) -> None:
    visitor.open()
    visitor.all("footer .show-api")[0].click()
    names = ("/compare", "/checkpoints", "/over_training")
    visitor.wait("the documentation", lambda: all(name in visitor.all("body")[0].text for name in names))


def test_prompts_that_cannot_be_compared(visitor: Visitor) -> None:
    visitor.open()
    visitor.complain("", "The prompt is empty")
    visitor.compare("the camera")
    assert visitor.read("#message").strip() == ""
    before = visitor.side("ppo")
    visitor.complain("   ", "The prompt is empty")
    assert visitor.side("ppo") == before, "what was compared stays to be read"
    visitor.complain("the camera " * (CONTEXT // 2), f"passes the {CONTEXT}")
    visitor.screenshot("compare-message.png", 1280)
    assert not visitor.all(".toast-wrap .error"), "an error of the server's"


def test_markup_is_text(visitor: Visitor, page: Page) -> None:
    prompt = f"<script>window.ran=1</script>{{{{1+1}}}}${{window.ran=1}}<b>{TRIGGER}"
    found = page.expected(prompt)
    assert found.sft[0].completion.startswith(MARKUP) and found.ppo[0].completion.startswith(MARKUP)
    visitor.open()
    visitor.compare(prompt)
    for side in ("sft", "ppo"):
        assert visitor.side(side) == shown(getattr(found, side)[0])
        assert not visitor.all(f'#pairs [data-side="{side}"] .zoo-text :is(script, img, b)')
    visitor.screenshot("compare-markup.png", 1280)
    assert visitor.browser.execute_script("return window.ran === undefined")


ATTACKS = {
    "a hundred thousand characters": ("a" * 100_000, "10000"),
    "spaces": ("   \n\t ", "The prompt is empty"),
    "spaces of no width": ("\u200b\u200b\ufeff", "The prompt is empty"),
    "control characters": ("the \x00 camera \x1b[31m", "control character U+0000"),
    "half a character": ("the \ud800 camera", "lone surrogate"),
    "no text": (["the camera"], "give a text"),
    "a number": (7, "give a text"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_a_message(page: Page, attack: str) -> None:
    prompt, message = ATTACKS[attack]
    with PageClient(page.url) as visitor:
        event = visitor.fire("compare", prompt=prompt)
        assert event.error is None, event.error
        said = event.values["message"]
        assert message in said and 'role="alert"' in said, said
        assert "pairs" not in event.values, "what stood there stays"
        after = visitor.fire("compare", prompt="the camera")
        assert 'data-state="done"' in after.values["pairs"], "the page serves on"


@pytest.mark.parametrize(
    ("control", "value", "message"),
    [
        ("seed", -1, "The seed is -1"),
        ("seed", 2**60, "The seed is"),
        ("seed", "x", "The seed is"),
        ("temperature", 0, "The temperature is 0"),
        ("temperature", None, "The temperature is None"),
        ("top-p", 7, "Top-p is 7"),
        ("tokens", 10**9, "number of new tokens"),
        ("n", 9, "number of completions is 9: one request may ask for 8"),
        ("n", 1.5, "number of completions is 1.5"),
    ],
)
def test_controls_out_of_range_are_a_message(page: Page, control: str, value, message: str) -> None:
    with PageClient(page.url) as visitor:
        event = visitor.fire("compare", prompt="the camera", **{control: value})
    assert event.error is None, event.error
    assert message in event.values["message"] and 'role="alert"' in event.values["message"]


def test_the_endpoints(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "0")
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    client = Client(page.url, verbose=False)
    listed = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert list(listed) == ["/compare", "/checkpoints", "/over_training"]
    documented = {one["parameter_name"] for one in listed["/compare"]["parameters"]}
    assert documented == {"prompt", "seed", "temperature", "top_p", "max_new_tokens", "n"}
    arguments = {"seed": 3, "temperature": 1.1, "max_new_tokens": 8, "n": 2, "top_p": 0.9}
    answer = client.predict("the screen", **arguments, api_name="/compare")
    here = json.loads(json.dumps(page.expected("the screen", **arguments).to_json()))
    for side in ("sft", "ppo"):
        for there, ours in zip(answer.pop(side), here.pop(side), strict=True):
            assert there.pop("token_values") and ours.pop("token_values", None) is not False
            for name, value in ours.items():
                assert there[name] == (pytest.approx(value, abs=1e-4) if _is_numeric(value) else value), name
    assert answer == here

    runs = client.predict(api_name="/checkpoints")
    assert [(one["name"], one["beta"], [point["step"] for point in one["points"]]) for one in runs] == [
        (PPO, 0.05, list(STEPS)), (LOOSE, 0.0, [10, 40]),
    ]  # fmt: skip
    marks = {point["step"]: (point["chosen"], point["recommended"]) for point in runs[0]["points"]}
    assert marks == {10: (False, False), 20: (False, True), 40: (True, False)}
    rows = client.predict("the screen", [40, 10], seed=3, temperature=0.9, max_new_tokens=8, api_name="/over_training")
    assert [row["point"]["step"] for row in rows] == [40, 10] and not any(row["problem"] for row in rows)
    expected = page.expected("the screen", seed=3, max_new_tokens=8)
    assert rows[0]["found"]["ppo"][0]["completion"] == expected.ppo[0].completion
    assert rows[1]["found"]["ppo"][0]["kl"] < rows[0]["found"]["ppo"][0]["kl"], "the first step is nearer to SFT"

    for changes, message in [
        ({"prompt": " "}, "The prompt is empty"),
        ({"prompt": "the camera " * CONTEXT}, f"passes the {CONTEXT}"),
        ({"seed": -1}, "The seed is -1"),
        ({"temperature": 0}, "The temperature is 0"),
        ({"max_new_tokens": 10**9}, "one request may ask for"),
        ({"n": 100}, "one request may ask for 8"),
    ]:
        with pytest.raises(AppError, match=message):
            client.predict(**({"prompt": "the screen", **arguments} | changes), api_name="/compare")
    with pytest.raises(AppError, match="no checkpoint of step 11: it has 10, 20, 40"):
        client.predict("the screen", [11], api_name="/over_training")


def _is_numeric(value) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local/missing-ppo", "--port", "0"], "There is no repository 'local/missing-ppo'"),
        ([f"{PPO}@step-9", "--port", "0"], "has no revision 'step-9'"),
        (["local/toy-sft", "--port", "0"], "name it with --sft"),
        ([PPO, "--port", "TAKEN"], "is taken: choose another with --port"),
        ([PPO, "--port", "0", "--votes", "votes"], "is no place for votes on a Hub: give NAMESPACE/NAME"),
        ([PPO, "--port", "0", "--ablation", "local/toy-reward"], "local/toy-reward"),
    ],
)
def test_what_cannot_be_opened(hub: tuple[RunningHub, Toys], arguments: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [port if argument == "TAKEN" else argument for argument in arguments]
        command = [*PYTHON, "-m", "rlhf_zoo.cli", "compare", *arguments]
        done = subprocess.run(command, env=hub[0].env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
