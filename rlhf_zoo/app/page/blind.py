"""The tab of the blind test: two completions, not labeled and on shuffled sides; a verdict, and then who wrote what.

Which side is PPO is known to the server alone until the verdict: the page holds the two texts and nothing else of them.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gradio as gr
from gradio.utils import get_space

from ...errors import ZooError
from ...evaluation.votes.limits import TooManyVotesError, voter_address
from ...evaluation.votes.vote import DECISIVE, Shown, Vote
from ...fileio import number as number_of
from ..engine import Side, Snapshot
from .drawing import Drawing
from .html import attributes, figure_list, notice, number, short_name, text
from .sampling import MODELS, Proposal, prompt_box
from .views import figures
from .vote_counts import Figures, Tally

log = logging.getLogger(__name__)

#: Verdicts as the buttons say them, in the order of their keys 1 to 4.
VERDICTS = {"left": "Left is better", "right": "Right is better", "tie": "Tie", "both_bad": "Both bad"}
NAMES = {"ppo": "PPO", "sft": "SFT"}
SAID = {"ppo": "You preferred PPO.", "sft": "You preferred SFT.", "tie": "You called it a tie.",
        "both_bad": "You found both bad."}  # fmt: skip
SEEDS = 2**31
KEPT = 3600.0  # seconds that the server remembers a pair which nobody judges
LONGEST_WAIT = 5.0  # seconds for the intervals to follow a vote
MOST_RATINGS = 30  # rows: whoever may write to the data set may name as many models as they like
NO_PAIR = "There is no pair to judge: draw a new one."
MOVED_ON = "That pair is no longer the one on the page: judge the one that is."
NOT_KEPT = "Your verdict could not be written to the disk of the machine that serves this page: give it again later."
NO_PROMPTS = "No held-out prompts are known for these models: write the beginning of a text."


@dataclass(frozen=True)
class Model:
    """Where a model is published. repo: NAMESPACE/NAME; all None for a folder of this machine."""

    repo: str | None = None
    commit: str | None = None
    tag: str | None = None

    @property
    def name(self) -> str:
        """As a visitor reads it; not escaped."""
        if self.repo is None:
            return "a folder, not on the Hub"
        name = short_name(self.repo if self.tag is None else f"{self.repo}@{self.tag}")
        return name if self.commit is None else f"{name} ({self.commit[:8]})"


@dataclass(frozen=True)
class Round:
    """Two completions of a prompt, as far as they are written, on sides that do not depend on the seed.

    ppo_side: left or right. id: of the vote that may come of it, so that only one of several verdicts counts.
    """

    snapshot: Snapshot
    ppo_side: str = field(default_factory=lambda: secrets.choice(DECISIVE))
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    verdict: str | None = None

    @property
    def roles(self) -> dict[str, str]:
        """Of each side, left first."""
        return {side: "ppo" if side == self.ppo_side else "sft" for side in DECISIVE}

    @property
    def sides(self) -> dict[str, Side]:
        """Left first."""
        return {side: getattr(self.snapshot, role)[0] for side, role in self.roles.items()}

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Those that may be given: none while it is being written, and no side is better of two equal texts."""
        if not self.snapshot.done:
            return ()
        left, right = self.sides.values()
        return tuple(VERDICTS) if left.completion != right.completion else ("tie", "both_bad")

    @property
    def preferred(self) -> str | None:
        """ppo or sft; None for a tie, for "both bad" and before the verdict."""
        return self.roles.get(self.verdict) if self.verdict is not None else None


def vote_of(drawn: Round, verdict: str, models: Mapping[str, Model]) -> Vote:
    """The vote that a verdict makes of a round. models: by role. Raises ZooError for one not in `drawn.verdicts`."""
    if not drawn.snapshot.done:
        raise ZooError("The completions are still being written: judge them when both are there.")
    if verdict not in drawn.verdicts:
        raise ZooError("The two texts are equal, so neither is better: say that they tie, or that both are bad.")
    shown: dict[str, Any] = {}
    for side, written in drawn.sides.items():
        role = drawn.roles[side]
        model = models[role]
        shown[side] = Shown(
            written.completion, role, model.repo, model.commit, model.tag, number_of(written.reward), written.ended
        )
    snapshot = drawn.snapshot
    sampling: dict[str, Any] = {
        name: getattr(snapshot, name) for name in ("temperature", "top_p", "seed", "max_new_tokens")
    }
    return Vote(prompt=snapshot.prompt, verdict=verdict, id=drawn.id, **shown, **sampling)


def pair_html(drawn: Round | None) -> str:
    """The two texts, and of what tells their writers nothing; None: where the first pair will stand."""
    prompt, state, texts = "", "empty", dict.fromkeys(DECISIVE, "")
    if drawn is not None:
        prompt = f'<p class="zoo-asked"><b>Prompt</b> <span class="given">{text(drawn.snapshot.prompt)}</span></p>'
        state = "done" if drawn.snapshot.done else "writing"
        texts = {side: one.completion for side, one in drawn.sides.items()}
    cards = "".join(
        f'<article class="zoo-card" data-side="{side}"><header><b>{side.capitalize()}</b></header>'
        f"{_completion(texts[side], state)}</article>"
        for side in DECISIVE
    )
    busy = ' aria-busy="true"' if state == "writing" else ""
    return f'<div class="zoo-blind" data-state="{state}"{busy}>{prompt}<div class="zoo-pair">{cards}</div></div>'


def _completion(written: str, state: str) -> str:
    if state == "empty":
        inside = '<span class="none">A completion will stand here.</span>'
    elif state == "done" and not written:
        inside = '<span class="none">An empty completion.</span>'
    else:  # the same caret on both sides, for which of them stopped first would tell one from the other
        caret = '<span class="caret" aria-hidden="true"></span>' if state == "writing" else ""
        inside = f'<span class="new">{text(written)}</span>{caret}'
    return f'<p class="zoo-text">{inside}</p>'


def reveal_html(drawn: Round, models: Mapping[str, Model]) -> str:
    """Who wrote what, and what it was worth; for a round with its verdict. models: by role."""
    cards = []
    for side, one in drawn.sides.items():
        role = drawn.roles[side]
        mark = '<span class="zoo-badge">your choice</span>' if side == drawn.verdict else ""
        cards.append(
            f'<article class="zoo-card zoo-{role}" data-side="{side}" data-role="{role}"><header>'
            f"<b>{side.capitalize()}: {NAMES[role]}</b>{mark}<span>{text(models[role].name)}</span></header>"
            f"{figures(one)}</article>"
        )
    how = f"Both were drawn with the seed {drawn.snapshot.seed}, at temperature {drawn.snapshot.temperature:g}."
    verdict = SAID[drawn.preferred or str(drawn.verdict)]
    return (
        f'<section class="zoo-reveal" role="status"><p class="zoo-verdict"><b>{verdict}</b> {_agrees(drawn)}</p>'
        f'<div class="zoo-pair">{"".join(cards)}</div><p class="zoo-note">{how}</p></section>'
    )


def _agrees(drawn: Round) -> str:
    """Which of the two the reward model prefers, beside a verdict that prefers one."""
    rewards = {drawn.roles[side]: one.reward for side, one in drawn.sides.items()}
    ppo, sft = rewards["ppo"], rewards["sft"]
    if drawn.preferred is None or ppo is None or sft is None or ppo == sft:
        return ""
    higher = "ppo" if ppo > sft else "sft"
    return "So does the reward model." if higher == drawn.preferred else f"The reward model prefers {NAMES[higher]}."


def figures_html(found: Figures, place: Mapping[str, str]) -> str:
    """The votes so far. place: `Tally.describe`. What the data set's rows name is a stranger's word, and escaped."""
    counts = found.summary["counts"]
    labels = {"ppo": "PPO preferred", "sft": "SFT preferred", "tie": "Tie", "both_bad": "Both bad"}
    rows = [(key, label, counts[key]) for key, label in labels.items()]
    votes = found.summary["votes"]
    head = f"<h2>{votes} vote{'s' * (votes != 1)} so far</h2>"
    notes = "".join(f'<p class="zoo-note">{note}</p>' for note in _notes(found, place["name"]))
    return (
        f'<section class="zoo-votes-so-far" data-votes="{votes}" data-exact="{str(found.exact).lower()}">{head}'
        f"{_win_rate(found.summary['win_rate'])}{figure_list(rows)}{_ratings(found.summary)}{notes}</section>"
    )


def _win_rate(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return '<p class="zoo-rate">No vote that tells one from the other yet.</p>'
    value, interval = rate["value"], rate["ci95"]
    shown = f"[{number(100 * interval[0], 1)}%, {number(100 * interval[1], 1)}%]" if interval else "follows"
    spoken = (
        f"PPO is preferred over SFT in {number(100 * value, 1)}% of {rate['n']}, a tie counting one half; "
        f"95% interval {shown}"
    )
    prompts = f" ({rate['prompts']} so far)" if rate.get("prompts") else ""
    band = ""
    if interval:
        low, high = (min(max(bound, 0.0), 1.0) for bound in interval)
        band = f'<i class="band" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></i>'
    return (
        f'<p class="zoo-rate"><b data-figure="win_rate">{number(100 * value, 1)}%</b> PPO over SFT, 95% interval '
        f'<span data-figure="ci95">{shown}</span>, n = <span data-figure="n">{rate["n"]}</span>, a tie counting one '
        f'half.</p><p class="zoo-basis">The interval counts prompts{prompts}: votes on one prompt are not '
        "independent.</p>"
        f'<div class="zoo-bar" role="img"{attributes({"aria-label": spoken})}>{band}<i class="half"></i>'
        f'<i class="point" style="left:{100 * value:.2f}%"></i></div>'
        '<p class="zoo-ends" aria-hidden="true"><span>SFT</span><span>½</span><span>PPO</span></p>'
    )


def _ratings(found: Mapping[str, Any]) -> str:
    """Elo of each revision, where more than one pair of revisions was compared."""
    ratings = found["elo"]
    if len(found["pairs"]) < 2 or not ratings:
        return ""
    several = len({row["among"] for row in ratings}) > 1
    heads = ["Revision", "Elo", "95% interval", "Votes", *(["Group"] if several else [])]
    rows = []
    for row in ratings[:MOST_RATINGS]:
        rating, name = row["elo"], Model(row["repo"], row["commit"], row["tag"]).name
        low, high = rating["ci95"]
        cells = [f"{rating['value']:.0f}", f"{low:.0f} to {high:.0f}", rating["n"], *([row["among"] + 1] * several)]
        named = f'<th scope="row">{NAMES[row["role"]]} {text(name)}</th>'
        rows.append(f"<tr>{named}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    notes = " Only ratings of one group are on one scale." if several else ""
    if len(ratings) > MOST_RATINGS:
        notes += f" {len(ratings) - MOST_RATINGS} more are left out."
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        f'<p class="zoo-elo-of">Elo rating of each revision, 1000 on average.{notes}</p>'
        '<div class="zoo-scroll" tabindex="0" role="region" aria-label="Elo ratings"><table class="zoo-elo">'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _notes(found: Figures, name: str) -> Iterator[str]:
    """Sentences, escaped."""
    if not found.exact and found.computed:
        yield f"Intervals and ratings are those of {found.computed} of these votes; the others are being added."
    if found.failing is not None and found.due:
        waiting = "1 vote waits" if found.due == 1 else f"{found.due} votes wait"
        yield (
            f"{waiting} on the disk, because {text(name)} does not take votes now ({text(found.failing)}); what waits "
            "is sent as soon as it does."
        )
    if found.unread is not None:
        yield f"Votes that {text(name)} has from elsewhere may be missing here ({text(found.unread)})."


def _notice(tally: Tally | None) -> str:
    if tally is None:
        return (
            '<div class="zoo"><p>No votes are kept here; <code>rlhf-zoo compare PPO --votes NAMESPACE/NAME</code> '
            "keeps them in a data set. Judge all the same: who wrote what is shown after your verdict.</p></div>"
        )
    place = tally.describe()
    link = (
        f'<a{attributes({"href": place["address"]})} target="_blank" rel="noopener noreferrer">{text(tally.name)}</a>'
    )
    return (
        '<div class="zoo"><p>Your verdict, the prompt and both completions go to the data set '
        f"{link} on the Hub, <b>for everyone who may read it</b>: write nothing private. Nothing about you is "
        "kept.</p></div>"
    )


# Keys work while the focus is in the tab, and not in a text box. A button that is disabled loses the focus, so that it
# moves on to the next pair, where Enter draws.
KEYS = """
const tab = element.closest('#blind-test');
if (tab && !tab.dataset.keys) {
  tab.dataset.keys = 'on';
  const votes = ['vote-left', 'vote-right', 'vote-tie', 'vote-both-bad'];
  tab.addEventListener('keydown', (event) => {
    if (event.repeat || event.isComposing || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.target.closest('input, textarea, select, [contenteditable]')) return;
    const button = tab.querySelector('#' + (votes['1234'.indexOf(event.key)] || 'none'));
    if (!button || button.disabled) return;
    event.preventDefault();
    button.click();
  });
  tab.addEventListener('click', (event) => {
    const button = event.target.closest('button');
    if (button && votes.includes(button.id)) tab.querySelector('#blind-new').focus({ preventScroll: true });
  });
}
"""
HINT = (
    '<p class="zoo-note zoo-keys">Keys <kbd>1</kbd> to <kbd>4</kbd> give the verdict and <kbd>Enter</kbd> draws the '
    "next pair, after a click on “New pair”.</p>"
)


def blind_tab(
    drawing: Drawing,
    models: Mapping[str, Model],
    tally: Tally | None,
    *,
    prompts: Sequence[str],
    proposal: Proposal,
    at_once: int,
) -> None:
    """Builds the tab inside the caller's.

    models: by role, ppo and sft. tally: where votes go, open as long as the page is served; None keeps none. prompts:
    held-out ones, drawn from where a visitor writes none. at_once: requests that run the models at the same time.
    """
    with gr.Column(elem_id="blind-test"):
        gr.HTML(_notice(tally), elem_id="blind-notice")
        with gr.Row(equal_height=True):
            placeholder = "Empty: a held-out prompt by chance" if prompts else "The beginning of a text"
            prompt = prompt_box("blind-prompt", placeholder, min_width=280)
            new = gr.Button("New pair", variant="primary", scale=1, min_width=120, elem_id="blind-new")
        message = gr.HTML("", elem_id="blind-message")
        pair = gr.HTML(pair_html(None), elem_id="blind-pair")
        with gr.Row(elem_id="blind-votes"):
            buttons = {
                verdict: gr.Button(label, interactive=False, min_width=120, elem_id=f"vote-{verdict.replace('_', '-')}")
                for verdict, label in VERDICTS.items()
            }
        gr.HTML(HINT, js_on_load=KEYS, elem_id="blind-keys")
        reveal = gr.HTML("", elem_id="blind-reveal")
        so_far = gr.HTML("", elem_id="blind-figures", visible=tally is not None)
        # The server's knowledge of the pair, and the page's: a verdict counts where they are of the same.
        state = gr.State(None, time_to_live=KEPT)
        token = gr.Textbox("", visible=False, elem_id="blind-pair-id")

    def enabled(verdicts: Sequence[str]) -> dict[Any, Any]:
        return {button: gr.update(interactive=verdict in verdicts) for verdict, button in buttons.items()}

    def draw(written: Any) -> Iterator[tuple[Round | None, str, str]]:
        drawn: Round | None = None
        try:
            for snapshot in drawing.stream(
                _chosen(written, prompts),
                seed=secrets.randbelow(SEEDS),
                temperature=proposal.temperature,
                max_new_tokens=proposal.length,
            ):
                drawn = Round(snapshot) if drawn is None else replace(drawn, snapshot=snapshot)
                yield (drawn if snapshot.done else None), pair_html(drawn), ""
        except ZooError as error:
            yield None, pair_html(None), notice(error)

    def ready(drawn: Round | None) -> dict[Any, Any]:
        return {token: "", **enabled(())} if drawn is None else {token: drawn.id, **enabled(drawn.verdicts)}

    def judging(verdict: str) -> Callable[[Round | None, Any], dict[Any, Any]]:
        def judge(drawn: Round | None, seen: Any, request: gr.Request | None = None) -> dict[Any, Any]:
            if drawn is None:
                return {message: notice(NO_PAIR)}
            if seen != drawn.id:
                return {message: notice(MOVED_ON)}
            try:
                vote = vote_of(drawn, verdict, models)
            except ZooError as error:
                return {message: notice(error)}
            try:
                vote = vote if tally is None else tally.cast(vote, _address(request))
            except TooManyVotesError as error:
                return {message: notice(error)}
            except ZooError as error:  # it names a path of this machine, which is its owner's to know and to mend
                log.error("A vote is not kept: %s", error)
                return {message: notice(NOT_KEPT)}
            judged = replace(drawn, verdict=vote.verdict)
            return {state: None, token: "", message: "", reveal: reveal_html(judged, models), **enabled(())}

        return judge

    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    # A vote waits for no generation, and is taken also when the queue of generations is full.
    unqueued: dict[str, Any] = {**quiet, "queue": False}
    asked = [new.click, prompt.submit]
    # An output that a yield skips is built anew each time: what only begins and ends is not among those that stream.
    gr.on(
        asked,
        lambda: {token: "", reveal: "", **enabled(())},
        outputs=[token, reveal, *buttons.values()],
        **unqueued,
    )
    gr.on(
        asked,
        draw,
        inputs=[prompt],
        outputs=[state, pair, message],
        concurrency_id=MODELS,
        concurrency_limit=at_once,
        **quiet,
    ).then(ready, inputs=[state], outputs=[token, *buttons.values()], **unqueued)
    for verdict, button in buttons.items():
        judged = button.click(
            judging(verdict),
            inputs=[state, token],
            outputs=[state, token, message, reveal, *buttons.values()],
            **unqueued,
        )
        if tally is not None:
            judged.then(_following(tally), outputs=[so_far], concurrency_limit=None, **quiet)
    if tally is not None:
        gr.on(
            None,
            lambda: figures_html(tally.figures(), tally.describe()),
            outputs=[so_far],
            **unqueued,
        )


def _address(request: gr.Request | None) -> str:
    """Whose verdict it is, for the limits. Only a Space stands behind a proxy that is known to name its visitors."""
    if request is None or request.client is None:
        return ""
    return voter_address(request.client.host, request.headers.get("x-forwarded-for") if get_space() else None)


def _following(tally: Tally) -> Callable[[], Any]:
    """The figures at once, and again when their intervals are of every vote."""

    async def follow() -> Any:
        found = tally.figures()
        wanted, deadline = found.summary["votes"], time.monotonic() + LONGEST_WAIT
        yield figures_html(found, tally.describe())
        while not found.exact and found.computed < wanted and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            found = tally.figures()
            if found.exact or found.computed >= wanted:
                yield figures_html(found, tally.describe())

    return follow


def _chosen(written: Any, prompts: Sequence[str]) -> Any:
    """What a visitor wrote, else a held-out prompt by chance."""
    if written is not None and not (isinstance(written, str) and not written.strip()):
        return written
    if not prompts:
        raise ZooError(NO_PROMPTS)
    return secrets.choice(prompts)
