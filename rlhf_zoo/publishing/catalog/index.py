"""Lists the models of a namespace and the checkpoints of a repository, from the Hub's listings and rlhf_card.json.

Cards are not trusted (see `card.Card`). If a card cannot be read, the listing says so in a note. Needs no torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...fileio import float_or_none, get_nested, int_or_none, write_text
from ...hub.client.connect import DEFAULT_HUB, HF_URL, Hub
from ...hub.client.refusals import is_disk_full, translate_hub_errors
from ...hub.client.step_tags import tagged_steps
from ...runs.registry import STAGES
from ..cards import markdown
from ..cards.markdown import Raw
from .card import Card, CardEstimate, iso_date, one_line, try_download_card

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

TAG = "rlhf-zoo"
WORKERS = 8
BEGIN, END = "<!-- zoo -->", "<!-- /zoo -->"
INTRODUCTION = """# Recipes

A recipe is a folder of YAML files: one for each stage, and `recipe.yaml` for what they share. `rlhf-zoo recipes list`
lists these, `rlhf-zoo run NAME` trains and publishes one, and `rlhf-zoo recipes copy NAME FOLDER` copies one to edit.

The table shows their results: every row is a repository at a commit, with the figures of its `rlhf_card.json`.
"""
_STAGE_ORDER = {stage: index for index, stage in enumerate(STAGES)}
_NOT_METRICS = ("step", "tag", "commit")  # keys of a checkpoint's row in a card that hold no metric
_MAX_METRICS = 8  # per checkpoint; a card is not trusted and could list any number


@dataclass(frozen=True)
class Entry:
    """A repository at the head of `main`, as its card describes it. Values that the card lacks are None.

    Attributes:
        repo: NAMESPACE/NAME.
        commit: Head commit of `main`.
        stage: The stage that trained it.
        recipe: Name of its recipe.
        base: Name of the base model.
        step: The checkpoint's step.
        seed: The run's seed.
        simulated: Whether a program simulates the human preferences.
        reward: Mean reward of its completions.
        kl: KL to SFT, in nats per completion.
        win_rate: Win rate over SFT, by the recipe's judge.
        accuracy: Accuracy of a reward model on held-out pairs.
        verdict: PPO only: kind of the verdict, such as "healthy", at this step if the card has one, otherwise at the
            run's last checkpoint.
        date: When the run finished, or else started, or else when the repository last changed, in ISO 8601.
        note: Why the card could not be read, or how the repository is damaged; else None.
    """

    repo: str
    commit: str
    stage: str | None = None
    recipe: str | None = None
    base: str | None = None
    step: int | None = None
    seed: int | None = None
    simulated: bool | None = None
    reward: CardEstimate | None = None
    kl: CardEstimate | None = None
    win_rate: CardEstimate | None = None
    accuracy: CardEstimate | None = None
    verdict: str | None = None
    date: str | None = None
    note: str | None = None


#: Name of a sort order -> (its key, which returns None for a missing figure; whether the largest comes first).
SORTS: dict[str, tuple[Callable[[Entry], Any], bool]] = {
    "reward": (lambda entry: entry.reward and entry.reward.value, True),
    "kl": (lambda entry: entry.kl and entry.kl.value, False),
    "win_rate": (lambda entry: entry.win_rate and entry.win_rate.value, True),
    "date": (lambda entry: entry.date, True),
    "stage": (lambda entry: entry.stage and (_STAGE_ORDER.get(entry.stage, 9), entry.stage), False),
    "name": (lambda entry: entry.repo, False),
}


def make_entry(
    repo: str,
    commit: str,
    document: Mapping[str, object],
    *,
    changed_at: datetime | None = None,
    tags: Iterable[str] = (),
    note: str | None = None,
) -> Entry:
    """Creates an entry from a card.

    Args:
        repo: NAMESPACE/NAME.
        commit: Head commit of main.
        document: The card, which is not trusted.
        changed_at: When the repository last changed; None if the Hub does not say.
        tags: The repository's metadata tags on the Hub, such as stage:ppo. They are used if the card names no stage.
        note: Why the card could not be read; None if it was.
    """
    card = Card(document)
    stage = card.stage or next((one_line(tag[6:]) for tag in tags if tag.startswith("stage:")), None)
    return Entry(
        repo=one_line(repo) or "",
        commit=one_line(commit) or "",
        stage=stage,
        recipe=card.recipe,
        base=card.base,
        step=card.step,
        seed=card.seed,
        simulated=card.simulated,
        verdict=_verdict(card) if stage == "ppo" else None,
        date=card.date or (iso_date(changed_at.isoformat()) if changed_at else None),
        note=note,
        **_figures(stage, card),
    )


def _figures(stage: str | None, card: Card) -> dict[str, CardEstimate | None]:
    """Returns the figures of a stage. Each card holds the evaluation of the whole run, so they must be selected."""
    if stage == "reward":
        report = get_nested(card, "evaluation", "reward_model")
        is_report = isinstance(report, Mapping)
        return {"accuracy": CardEstimate.read({**report, "value": report.get("accuracy")})} if is_report else {}
    if stage not in ("sft", "ppo"):
        return {}
    figures = {"reward": card.estimate(stage, "reward") or _training_figure(card.get("reward"))}
    if stage == "ppo":
        figures["kl"] = card.estimate(stage, "kl") or _training_figure(card.get("kl"))
        figures["win_rate"] = card.estimate("win_rate")
    return figures


def _verdict(card: Card) -> str | None:
    trajectory = get_nested(card, "evaluation", "over_training")
    step_verdict = get_nested(trajectory, "at_recommended")
    is_for_this_step = card.step is not None and int_or_none(get_nested(step_verdict, "step")) == card.step
    return one_line(get_nested(step_verdict if is_for_this_step else trajectory, "kind"))


def _training_figure(value: object) -> CardEstimate | None:
    last_logged = float_or_none(value)
    return None if last_logged is None else CardEstimate(last_logged, held_out=False)


def filter_entries(
    entries: Iterable[Entry], *, stage: str | None = None, recipe: str | None = None, base: str | None = None
) -> list[Entry]:
    """Returns the entries with this stage, recipe and base model. None selects all.

    Args:
        entries: The entries to select from.
        stage: Name of a stage.
        recipe: Name of a recipe.
        base: Repository of a base model, or its name without the namespace.
    """
    return [
        entry
        for entry in entries
        if (stage is None or entry.stage == stage)
        and (recipe is None or entry.recipe == recipe)
        and (base is None or base in (entry.base, (entry.base or "").rpartition("/")[2]))
    ]


def sort_entries(entries: Iterable[Entry], sort: str | None = None, *, reverse: bool = False) -> list[Entry]:
    """Returns entries in order. With `sort`, entries that lack its value come last, even in reverse order.

    Args:
        entries: The entries to sort.
        sort: A key of `SORTS`; None for recipe, stage and name.
        reverse: Whether to reverse the order.
    """
    in_default_order = sorted(
        entries, key=lambda entry: (entry.recipe or "~", _STAGE_ORDER.get(entry.stage or "", 9), entry.repo)
    )
    if sort is None:
        return in_default_order[::-1] if reverse else in_default_order
    key, largest_first = SORTS[sort]
    sortable_entries = [entry for entry in in_default_order if key(entry) is not None]
    sortable_entries.sort(key=key, reverse=largest_first != reverse)
    return [*sortable_entries, *(entry for entry in in_default_order if key(entry) is None)]


def benchmark_table(entries: Sequence[Entry], *, command: str, namespace: str) -> str:
    """Formats entries as a Markdown table between markers, with a legend.

    Args:
        entries: The rows, in order.
        command: The command that makes the table, for its caption.
        namespace: The namespace that was listed.

    Returns:
        The text to insert into a README, markers included.
    """
    head = ("repository @ commit", "recipe", "stage", "base", "reward", "KL, nats", "win rate", "accuracy", "seed",
            "step", "data", "date")  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for entry in entries:
        data = {True: "simulated", False: "real", None: "unknown"}[entry.simulated]
        figures = (entry.reward, entry.kl, entry.win_rate, entry.accuracy)
        name = Raw(f"{markdown.escape(entry.repo)} @ {markdown.escape(entry.commit)}")
        texts = (entry.recipe, entry.stage, entry.base)
        numbers = (entry.seed, entry.step)
        rows.append((
            Raw(f"{name}: {markdown.escape(entry.note)}") if entry.note else name,
            *(markdown.escape(text or "") for text in texts),
            *(_markdown_figure(figure) for figure in figures),
            *("" if number is None else str(number) for number in numbers),
            data,
            (entry.date or "")[:10],
        ))  # fmt: skip
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    legend = textwrap.fill(
        "Reward: the proxy that PPO maximizes. KL: to SFT, per completion. Win rate: over SFT, by the recipe's judge. "
        "Accuracy: of a reward model on held-out pairs. In brackets: 95% intervals; n is the number of samples. "
        "Figures marked “training” are the last that training logged, not held-out ones. Data: “simulated” if a "
        "program simulates the human judges.",
        width=120,
    )
    caption = f"Made by {markdown.code(command)} from the models that {markdown.code(namespace)} has published."
    return f"{BEGIN}\n{caption}\n\n{table}\n\n{legend}\n{END}\n"


def _markdown_figure(figure: CardEstimate | None) -> str:
    if figure is None:
        return ""
    text = str(markdown.number(figure.value))
    if figure.ci95:
        text += f" [{markdown.number(figure.ci95[0])}, {markdown.number(figure.ci95[1])}]"
    if figure.n is not None:
        text += f", n={figure.n}"
    return text if figure.held_out else f"{text} (training)"


def insert_table(text: str | None, table: str) -> str:
    """Inserts the table between the markers of a text, in place of an older one, or appends it if there are no markers.

    Args:
        text: The text; None for a new file, which gets an introduction.
        table: The text that `benchmark_table` returned.

    Raises:
        ZooError: The text has markers, but not exactly one pair in order.
    """
    if text is None:
        return f"{INTRODUCTION}\n{table}"
    if BEGIN not in text and END not in text:
        return f"{text.rstrip()}\n\n{table}" if text.strip() else f"{INTRODUCTION}\n{table}"
    before, _, remainder = text.partition(BEGIN)
    old_table, end_marker, after = remainder.partition(END)
    if not end_marker or END in before or BEGIN in old_table or BEGIN in after or END in after:
        raise ZooError(f"The markers {BEGIN} and {END} must appear once each, in this order, around the table.")
    return f"{before}{table.rstrip()}{after}"


def write_benchmark(path: Path, table: str) -> None:
    """Writes the table into a file as `insert_table` does. Text outside the markers is kept.

    Args:
        path: The file, created if it does not exist.
        table: The text that `benchmark_table` returned.

    Raises:
        ZooError: The file cannot be read or written, or it has markers, but not exactly one pair in order.
    """
    try:
        text = path.read_bytes().decode() if path.exists() else None
        if not path.parent.is_dir():
            raise ZooError(f"The folder {path.parent} does not exist: create it, or pass another path to --readme.")
        new_text = insert_table(text, table)
        if new_text != text:
            write_text(path, new_text)
    except ZooError as error:
        raise ZooError(f"{path}: {error}") if text is not None else error from None
    except UnicodeDecodeError as error:
        raise ZooError(f"{path} is not UTF-8 text ({error}): pass another file.") from error
    except OSError as error:
        if is_disk_full(error):
            raise
        raise ZooError(f"{path} cannot be read or written ({error.strerror or error}): pass another file.") from error


def account_name(hub: Hub = DEFAULT_HUB) -> str:
    """Returns the name of the user that the Hub's token belongs to.

    Args:
        hub: The Hub to ask.

    Raises:
        ZooError: The Hub does not answer, or there is no token.
    """
    with translate_hub_errors(f"{hub.address} does not name your account", "pass --namespace, or set a token."):
        return hub.api().whoami()["name"]


def published_models(namespace: str, hub: Hub = DEFAULT_HUB) -> list[Entry]:
    """Returns the models of a namespace that have the metadata tag rlhf-zoo or that the Hub reports as damaged.

    Args:
        namespace: A user or an organization.
        hub: The Hub to ask.

    Raises:
        ZooError: The Hub does not list them.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    with translate_hub_errors(f"Cannot list the models of {namespace} on {hub.name}", "check the network and --hub."):
        models = list(hub.api().list_models(author=namespace, filter=TAG, expand=["sha", "lastModified", "tags"]))
        damage_notes = _damage_notes(namespace, hub)
    with disable_progress_bars(), ThreadPoolExecutor(WORKERS) as pool:
        entries = {entry.repo: entry for entry in pool.map(partial(_read_entry, hub=hub), models)}
    for repo, note in damage_notes.items():
        entries[repo] = replace(entries.get(repo) or Entry(repo, ""), note=f"damaged on the Hub: {note}")
    return list(entries.values())


def _damage_notes(namespace: str, hub: Hub) -> dict[str, str]:
    """Returns damaged model -> reason. Only the embedded Hub reports damage, and only to users with a token."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if hub.address == HF_URL:
        return {}
    response = get_session().get(
        f"{hub.address}/api/rlhf-zoo/damaged", params={"author": namespace}, headers=build_hf_headers(token=hub.token)
    )
    try:
        hf_raise_for_status(response)
        items = response.json()
    except (HfHubHTTPError, ValueError):  # not an embedded Hub, so it lacks this endpoint; or there is no token
        return {}
    notes = {}
    for item in items if isinstance(items, list) else []:
        repo, note = (one_line(get_nested(item, key)) for key in ("id", "reason"))
        if get_nested(item, "type") == "model" and repo is not None and note is not None:
            notes[repo] = note
    return notes


def _read_entry(model: ModelInfo, *, hub: Hub) -> Entry:
    card, note = try_download_card(model.id, model.sha or "main", hub)
    return make_entry(model.id, model.sha or "", card, changed_at=model.last_modified, tags=model.tags or (), note=note)


def list_checkpoints(repo: str, hub: Hub = DEFAULT_HUB) -> dict[str, Any]:
    """Lists the checkpoints of a repository.

    The rows are the tags of steps, then the other tags and branches. A step's `also` contains `best` or `main` if the
    card at that ref names the step. A ref whose card names no tagged step gets its own row at the end.

    Args:
        repo: NAMESPACE/NAME of a model.
        hub: The Hub to ask.

    Returns:
        {repo, stage, recipe, note, checkpoints: [{revision, step, commit, date, also, metrics}]}, ordered by step.
        `note` says why the card could not be read; it is None if the card names a stage. `metrics` are those on the
        card: reward, kl and rewards of weight 0 for PPO; losses and accuracy for other stages.

    Raises:
        ZooError: The Hub does not list them.
    """
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    api = hub.api()
    with translate_hub_errors(f"Cannot list the checkpoints of {repo} on {hub.name}", "check the network and --hub."):
        try:
            refs = api.list_repo_refs(repo)
            dates = {commit.commit_id: commit.created_at for commit in api.list_repo_commits(repo)}
        except RepositoryNotFoundError as error:
            raise ZooError(f"There is no repository {repo!r} on {hub.name} that this token may read.") from error
        except HFValidationError as error:
            raise ZooError(f"{repo!r} is not a repository: write NAMESPACE/NAME.") from error
    commits = {ref.name: ref.target_commit for ref in (*refs.branches, *refs.tags)}
    pointers: dict[str, str] = {name: commits.pop(name) for name in ("best", "main") if name in commits}
    with disable_progress_bars():
        cards = {name: try_download_card(repo, commit, hub) for name, commit in pointers.items()}
    note = next((note for _, note in cards.values()), None)
    listing = checkpoint_listing(commits, pointers, {name: card for name, (card, _) in cards.items()}, dates)
    return {"repo": repo, "note": None if listing["stage"] else note, **listing}


def checkpoint_listing(
    commits_by_ref: Mapping[str, str],
    pointers: Mapping[str, str],
    cards: Mapping[str, Mapping[str, object]],
    dates: Mapping[str, datetime],
) -> dict[str, Any]:
    """Creates the listing that `list_checkpoints` returns, from the Hub's refs and cards.

    Args:
        commits_by_ref: Tag or branch -> commit, without best and main.
        pointers: best and main -> commit.
        cards: best and main -> card.
        dates: Commit -> its date.

    Returns:
        {stage, recipe, checkpoints}.
    """
    pointer_cards = {name: Card(cards.get(name) or {}) for name in ("main", "best")}
    card = pointer_cards["main"] or pointer_cards["best"]
    rows_of_card = {row["tag"]: row for row in card.checkpoints if isinstance(row.get("tag"), str)}
    step_by_tag = {tag: step for step, tag in tagged_steps(commits_by_ref).items()}
    pointers_by_step: dict[int, list[str]] = {}
    for name in pointers:
        step = int_or_none(get_nested(pointer_cards[name], "chosen", "step")) if name == "best" else None
        step = pointer_cards[name].step if step is None else step
        if step is not None and step in step_by_tag.values():
            pointers_by_step.setdefault(step, []).append(name)
    # Exporting creates new commits, so no commit on the card matches a tag.
    is_exported = not any(row.get("commit") == commits_by_ref.get(tag) for tag, row in rows_of_card.items())

    def make_row(name: str, step: int | None, commit: str, card_row: Mapping[str, Any]) -> dict[str, Any]:
        date = dates.get(commit)
        numbers = {one_line(key): float_or_none(value) for key, value in card_row.items() if key not in _NOT_METRICS}
        metrics = {key: value for key, value in numbers.items() if key is not None and value is not None}
        return {
            "revision": one_line(name),
            "step": step,
            "commit": commit,
            "date": iso_date(date.isoformat()) if date else None,
            "also": pointers_by_step.get(step, []) if step is not None else [],
            "metrics": dict(list(metrics.items())[:_MAX_METRICS]),
        }

    rows = []
    for name in sorted(commits_by_ref, key=lambda name: (name not in step_by_tag, step_by_tag.get(name, 0), name)):
        card_row = rows_of_card.get(name, {})
        if not is_exported and card_row.get("commit") not in (None, commits_by_ref[name]):
            card_row = {}  # the tag has moved since, so these metrics belong to another checkpoint
        rows.append(make_row(name, step_by_tag.get(name), commits_by_ref[name], card_row))
    shown_pointers = {name for names in pointers_by_step.values() for name in names}
    rows += [make_row(name, None, pointers[name], {}) for name in pointers if name not in shown_pointers]
    return {"stage": card.stage, "recipe": card.recipe, "checkpoints": rows}
