"""The tab with the blind test. It shows two unlabeled completions, and reveals the policies after the vote.

Until the verdict, only the server knows which side is PPO. The browser receives the two texts and nothing else about
them.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gradio as gr
from gradio.utils import get_space

from ...errors import ZooError
from ...evaluation.votes.limits import TooManyVotesError, voter_address
from ...evaluation.votes.vote import SIDES, ShownCompletion, Vote
from ...fileio import float_or_none
from ..engine import PolicyCompletion, Snapshot
from .browser import PAGE_EVENT, create_live_region
from .charts import Role
from .html import escape_text, html_attributes, notice_html
from .sampling import MODEL_QUEUE, SEED_LIMIT, SamplingDefaults, create_prompt_box
from .streams import CompletionStreams
from .views import figures_html, role_names
from .vote_counts import Tally
from .vote_figures import ModelRevision, votes_html

log = logging.getLogger(__name__)

#: Verdict -> label of its button. The keys 1 to 4 give the verdicts in this order.
VERDICTS = {"left": "Left is better", "right": "Right is better", "tie": "Tie", "both_bad": "Both bad"}
VERDICT_SENTENCES = {"ppo": "You preferred PPO.", "sft": "You preferred {}.", "tie": "You called it a tie.",
        "both_bad": "You rated both bad."}  # fmt: skip
PAIR_LIFETIME = 3600.0  # seconds for which the server keeps a pair without a verdict
MAX_INTERVAL_WAIT = 5.0  # seconds to wait after a vote for intervals that include it
#: Component -> its new value or properties.
Updates = dict[gr.components.Component, object]
NO_PAIR = "There is no pair to judge: click “New pair”."
STALE_PAIR = "The page shows another pair now: judge that pair."
VOTE_NOT_STORED = "The server could not store your vote: try again later."
NO_PROMPTS = "There are no held-out prompts for these models: write a prompt."


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, in progress or done. Their sides are random and independent of the seed.

    Attributes:
        snapshot: The completions.
        ppo_side: left or right.
        id: Id of the vote on this pair, so that only the first of several verdicts counts.
        verdict: A key of VERDICTS; None before the verdict.
    """

    snapshot: Snapshot
    ppo_side: str = field(default_factory=lambda: secrets.choice(SIDES))
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    verdict: str | None = None

    @property
    def role_by_side(self) -> dict[str, Role]:
        """Side -> role (ppo or sft), left first."""
        return {side: "ppo" if side == self.ppo_side else "sft" for side in SIDES}

    @property
    def completion_by_side(self) -> dict[str, PolicyCompletion]:
        """Side -> completion, left first."""
        return {side: getattr(self.snapshot, role)[0] for side, role in self.role_by_side.items()}

    @property
    def allowed_verdicts(self) -> tuple[str, ...]:
        """The possible verdicts: none before both completions are done; only "tie" and "both_bad" for equal texts."""
        if not self.snapshot.done:
            return ()
        left, right = self.completion_by_side.values()
        return tuple(VERDICTS) if left.completion != right.completion else ("tie", "both_bad")

    @property
    def preferred_role(self) -> str | None:
        """ppo or sft; None for a tie, for "both bad" and before the verdict."""
        return self.role_by_side.get(self.verdict) if self.verdict is not None else None


def create_vote(pair: Pair, verdict: str, models: Mapping[str, ModelRevision]) -> Vote:
    """Creates the vote for a verdict.

    Args:
        pair: The judged pair.
        verdict: One of `pair.allowed_verdicts`.
        models: Role (ppo or sft) -> model.

    Raises:
        ZooError: The verdict is not allowed.
    """
    if not pair.snapshot.done:
        raise ZooError("The completions are still in progress: judge them when both are done.")
    if verdict not in pair.allowed_verdicts:
        raise ZooError("The two texts are equal: choose “Tie” or “Both bad”.")
    snapshot = pair.snapshot
    fields: dict[str, Any] = {
        name: getattr(snapshot, name) for name in ("temperature", "top_p", "seed", "max_new_tokens")
    }
    for side, sample in pair.completion_by_side.items():
        role = pair.role_by_side[side]
        model, reward = models[role], float_or_none(sample.reward)
        fields[side] = ShownCompletion(
            sample.completion, role, model.repo, model.commit, model.tag, reward, sample.ended
        )
    return Vote(prompt=snapshot.prompt, verdict=verdict, id=pair.id, **fields)


def pair_html(pair: Pair | None) -> str:
    """Renders the two texts, and nothing that could reveal which policy wrote which.

    Args:
        pair: The pair; None renders a placeholder.
    """
    prompt, state, texts = "", "empty", dict.fromkeys(SIDES, "")
    if pair is not None:
        prompt = (
            f'<p class="zoo-prompt"><b>Prompt</b> <span class="prompt">{escape_text(pair.snapshot.prompt)}</span></p>'
        )
        state = "done" if pair.snapshot.done else "writing"
        texts = {side: sample.completion for side, sample in pair.completion_by_side.items()}
    cards = "".join(
        f'<article class="zoo-card" data-side="{side}"><header><h3>{side.capitalize()}</h3></header>'
        f"{_completion_html(texts[side], state)}</article>"
        for side in SIDES
    )
    busy = ' aria-busy="true"' if state == "writing" else ""
    return f'<div class="zoo-blind" data-state="{state}"{busy}>{prompt}<div class="zoo-pair">{cards}</div></div>'


def _completion_html(completion: str, state: str) -> str:
    if state == "empty":
        content = '<span class="none">The completion will appear here.</span>'
    elif state == "done" and not completion:
        content = '<span class="none">An empty completion.</span>'
    else:  # both sides keep the caret until both are done, because stopping first could reveal a policy
        caret = '<span class="caret" aria-hidden="true"></span>' if state == "writing" else ""
        content = f'<span class="completion">{escape_text(completion)}</span>{caret}'
    return f'<p class="zoo-text">{content}</p>'


def reveal_html(pair: Pair, models: Mapping[str, ModelRevision]) -> str:
    """Renders which policy wrote which completion, with the figures of both.

    Args:
        pair: A pair with its verdict.
        models: Role (ppo or sft) -> model.
    """
    cards = []
    for side, sample in pair.completion_by_side.items():
        role = pair.role_by_side[side]
        badge = '<span class="zoo-badge">your choice</span>' if side == pair.verdict else ""
        cards.append(
            f'<article class="zoo-card zoo-{role}" data-side="{side}" data-role="{role}"><header>'
            f"<h3>{side.capitalize()}: {role_names(pair.snapshot.initial_policy)[role]}</h3>{badge}"
            f"<span>{escape_text(models[role].name)}</span></header>{figures_html(sample)}</article>"
        )
    sampling_note = f"Both were sampled with seed {pair.snapshot.seed} at temperature {pair.snapshot.temperature:g}."
    verdict = VERDICT_SENTENCES[pair.preferred_role or str(pair.verdict)].format(pair.snapshot.initial_policy)
    return (
        f'<section class="zoo-reveal"><p class="zoo-verdict"><b>{verdict}</b> '
        f"{_reward_sentence(pair)}</p>"
        f'<div class="zoo-pair">{"".join(cards)}</div><p class="zoo-note">{sampling_note}</p></section>'
    )


def _reward_sentence(pair: Pair) -> str:
    """Says whether the reward agrees with the verdict; "" if the verdict or the reward prefers neither completion."""
    rewards = {pair.role_by_side[side]: sample.reward for side, sample in pair.completion_by_side.items()}
    ppo, sft = rewards["ppo"], rewards["sft"]
    if pair.preferred_role is None or ppo is None or sft is None or ppo == sft:
        return ""
    if (ppo > sft) == (pair.preferred_role == "ppo"):
        return "The reward agrees."
    return f"The reward prefers {'PPO' if ppo > sft else pair.snapshot.initial_policy}."


def _storage_notice_html(tally: Tally | None) -> str:
    if tally is None:
        return (
            '<div class="zoo"><p>This page stores no votes. <code>rlhf-zoo compare PPO --votes NAMESPACE/NAME</code> '
            "serves a page that stores votes in a data set. You can still judge: your verdict reveals which policy "
            "wrote which text.</p></div>"
        )
    href = html_attributes({"href": tally.address})
    link = f'<a{href} target="_blank" rel="noopener noreferrer">{escape_text(tally.name)}</a>'
    return (
        '<div class="zoo"><p>Your verdict, the prompt and both completions go to the data set '
        f"{link} on the Hub, <b>visible to everyone who may read it</b>: do not include anything private. Nothing "
        "about you is stored.</p></div>"
    )


# Keys work while the focus is in the tab but not in a text box. A vote disables the clicked button, which then loses
# the focus. So a vote moves the focus to "New pair", where Enter draws the next pair.
KEYS_SCRIPT = """
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
KEYS_HINT = (
    '<p class="zoo-note zoo-keys">After a click on “New pair”, the keys <kbd>1</kbd> to <kbd>4</kbd> vote and '
    "<kbd>Enter</kbd> draws the next pair.</p>"
)


def build_blind_tab(
    streams: CompletionStreams,
    models: Mapping[str, ModelRevision],
    tally: Tally | None,
    *,
    prompts: Sequence[str],
    defaults: SamplingDefaults,
    max_concurrent: int,
    initial_policy: str = "SFT",
) -> None:
    """Builds the contents of the tab.

    Args:
        streams: Samples the completions.
        models: Role (ppo or sft) -> model.
        tally: Receives the votes; None if votes are not stored.
        prompts: Held-out prompts, one of which is drawn if the visitor writes no prompt.
        defaults: Sampling parameters of every pair.
        max_concurrent: Largest number of requests that run the models at the same time.
        initial_policy: As for `role_names`.
    """
    tab = _create_components(tally, prompts)
    vote_buttons, pair_state, pair_id_box = tab.vote_buttons, tab.pair_state, tab.pair_id_box

    def draw_pair(prompt: object) -> Iterator[tuple[Pair | None, str, str]]:
        pair: Pair | None = None
        try:
            for snapshot in streams.stream(
                _choose_prompt(prompt, prompts),
                seed=secrets.randbelow(SEED_LIMIT),
                temperature=defaults.temperature,
                max_new_tokens=defaults.length,
            ):
                pair = Pair(snapshot) if pair is None else replace(pair, snapshot=snapshot)
                yield (pair if snapshot.done else None), pair_html(pair), ""
        except ZooError as error:
            yield None, pair_html(None), notice_html(error)

    def enable_buttons(pair: Pair | None) -> Updates:
        if pair is None:
            return {pair_id_box: "", **tab.enable_only(())}
        return {pair_id_box: pair.id, **tab.enable_only(pair.allowed_verdicts)}

    # A vote bypasses the queue, so that it never waits for a completion and is accepted even if the queue is full.
    no_queue: dict[str, Any] = {**PAGE_EVENT, "queue": False}
    draw_triggers = [tab.new_pair_button.click, tab.prompt_box.submit]
    # Gradio rebuilds every output at each yield, so outputs that change only at the start or end have their own events.
    gr.on(
        draw_triggers,
        lambda: {pair_id_box: "", tab.reveal_view: "", **tab.enable_only(())},
        outputs=[pair_id_box, tab.reveal_view, *vote_buttons.values()],
        **no_queue,
    )
    gr.on(
        draw_triggers,
        draw_pair,
        inputs=[tab.prompt_box],
        outputs=[pair_state, tab.pair_view, tab.message_view],
        concurrency_id=MODEL_QUEUE,
        concurrency_limit=max_concurrent,
        **PAGE_EVENT,
    ).then(enable_buttons, inputs=[pair_state], outputs=[pair_id_box, *vote_buttons.values()], **no_queue)
    for verdict, button in vote_buttons.items():
        vote_event = button.click(
            _vote_handler(verdict, tab, models, tally),
            inputs=[pair_state, pair_id_box],
            outputs=[pair_state, pair_id_box, tab.message_view, tab.reveal_view, *vote_buttons.values()],
            **no_queue,
        )
        if tally is not None:
            show_figures = _vote_figures_handler(tally, initial_policy)
            vote_event.then(show_figures, outputs=[tab.vote_figures_view], concurrency_limit=None, **PAGE_EVENT)
    if tally is not None:  # without triggers, the function runs when the page loads
        gr.on(
            None,
            lambda: votes_html(tally.figures(), tally.name, initial_policy),
            outputs=[tab.vote_figures_view],
            **no_queue,
        )


@dataclass(frozen=True)
class _Tab:
    """The components of the tab. `vote_buttons` maps each verdict to its button."""

    prompt_box: gr.Textbox
    new_pair_button: gr.Button
    message_view: gr.HTML
    pair_view: gr.HTML
    vote_buttons: Mapping[str, gr.Button]
    reveal_view: gr.HTML
    vote_figures_view: gr.HTML
    # The pair stays on the server. The browser sends a pair's id with each vote, which counts only if the ids match.
    pair_state: gr.State
    pair_id_box: gr.Textbox

    def enable_only(self, verdicts: Sequence[str]) -> Updates:
        """Returns the updates that enable the buttons of these verdicts and disable the others."""
        return {button: gr.update(interactive=verdict in verdicts) for verdict, button in self.vote_buttons.items()}


def _create_components(tally: Tally | None, prompts: Sequence[str]) -> _Tab:
    """Creates the components, in the order of the page."""
    with gr.Column(elem_id="blind-test"):
        gr.HTML("<h2>Which of two completions is better?</h2>", elem_classes="zoo-visually-hidden")
        gr.HTML(_storage_notice_html(tally), elem_id="blind-notice")
        with gr.Row(equal_height=True):
            placeholder = "Leave empty for a random held-out prompt" if prompts else "Your prompt"
            prompt_box = create_prompt_box("blind-prompt", placeholder, min_width=280)
            new_pair_button = gr.Button("New pair", variant="primary", scale=1, min_width=120, elem_id="blind-new")
        message_view = create_live_region("blind-message")
        pair_view = gr.HTML(pair_html(None), elem_id="blind-pair")
        with gr.Row(elem_id="blind-votes"):
            vote_buttons = {
                verdict: gr.Button(label, interactive=False, min_width=120, elem_id=f"vote-{verdict.replace('_', '-')}")
                for verdict, label in VERDICTS.items()
            }
        gr.HTML(KEYS_HINT, js_on_load=KEYS_SCRIPT, elem_id="blind-keys")
        reveal_view = create_live_region("blind-reveal")
        vote_figures_view = gr.HTML("", elem_id="blind-figures", visible=tally is not None)
        pair_state = gr.State(None, time_to_live=PAIR_LIFETIME)
        pair_id_box = gr.Textbox("", visible=False, elem_id="blind-pair-id")
    return _Tab(
        prompt_box, new_pair_button, message_view, pair_view, vote_buttons, reveal_view, vote_figures_view, pair_state,
        pair_id_box,
    )  # fmt: skip


def _vote_handler(
    verdict: str, tab: _Tab, models: Mapping[str, ModelRevision], tally: Tally | None
) -> Callable[..., Updates]:
    """Returns the handler of a verdict's button. It casts the vote, and reveals which policy wrote which text."""

    def cast_vote(pair: Pair | None, shown_id: object, request: gr.Request | None = None) -> Updates:
        if pair is None:
            return {tab.message_view: notice_html(NO_PAIR)}
        if shown_id != pair.id:
            return {tab.message_view: notice_html(STALE_PAIR)}
        try:
            vote = create_vote(pair, verdict, models)
        except ZooError as error:
            return {tab.message_view: notice_html(error)}
        try:
            vote = vote if tally is None else tally.cast(vote, _voter_address(request))
        except TooManyVotesError as error:
            return {tab.message_view: notice_html(error)}
        except ZooError as error:  # the message names a path on the server, which visitors must not see
            log.error("A vote was not stored: %s", error)
            return {tab.message_view: notice_html(VOTE_NOT_STORED)}
        # Not `verdict`, because an earlier vote on this pair may be the one that counts.
        judged_pair = replace(pair, verdict=vote.verdict)
        return {
            tab.pair_state: None,
            tab.pair_id_box: "",
            tab.message_view: "",
            tab.reveal_view: reveal_html(judged_pair, models),
            **tab.enable_only(()),
        }

    return cast_vote


def _voter_address(request: gr.Request | None) -> str:
    """Returns the voter's address, for the rate limits. The proxy's header is trusted only in a Space."""
    if request is None or request.client is None:
        return ""
    return voter_address(request.client.host, request.headers.get("x-forwarded-for") if get_space() else None)


def _vote_figures_handler(tally: Tally, initial_policy: str) -> Callable[[], AsyncIterator[str]]:
    """Returns the handler that shows counts and win rates immediately, and again when intervals include all votes."""

    async def show_figures() -> AsyncIterator[str]:
        figures = tally.figures()
        vote_count, deadline = figures.summary["votes"], time.monotonic() + MAX_INTERVAL_WAIT
        yield votes_html(figures, tally.name, initial_policy)
        # If votes were deleted from the data set, exact figures include fewer votes.
        while not figures.is_exact and figures.votes_in_intervals < vote_count and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            figures = tally.figures()
            if figures.is_exact or figures.votes_in_intervals >= vote_count:
                yield votes_html(figures, tally.name, initial_policy)

    return show_figures


def _choose_prompt(prompt: object, prompts: Sequence[str]) -> object:
    """Returns the visitor's prompt, or a random held-out prompt if it is empty."""
    is_empty = prompt is None or (isinstance(prompt, str) and not prompt.strip())
    if not is_empty:
        return prompt
    if not prompts:
        raise ZooError(NO_PROMPTS)
    return secrets.choice(prompts)
