"""Renders the comparison as a self-contained HTML page, for accounts that may not run a Gradio Space."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...fileio import get_nested
from ...publishing.cards.markdown import estimate
from ...publishing.catalog.card import Card, CardEstimate, clean
from ..engine import Snapshot, visible_text
from ..space.files import SpaceModels
from .views import legend_html, pairs_html, role_names

#: Key of an estimate in the card -> its name on the page.
_FIGURE_NAMES = {
    "reward": "reward",
    "kl": "KL to {}, nats per completion",
    "length": "length, tokens",
    "judge": "judge",
    "distinct_2": "distinct-2",
}


def static_page_html(models: SpaceModels, snapshots: Sequence[Snapshot]) -> str:
    """Renders the page, which has no scripts. Text from models, cards and prompts is escaped.

    Args:
        models: The published models.
        snapshots: The finished completions, one snapshot per prompt.
    """
    import jinja2
    from markupsafe import Markup

    def show_hidden_characters(value: object) -> object:
        return visible_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    folder, card = Path(__file__).parent, Card(models.card)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        finalize=show_hidden_characters,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("static.html.jinja").render(
        models=models,
        card=card,
        figures=list(_figure_rows(card)),
        snapshots=snapshots,
        pairs=lambda snapshot: Markup(pairs_html(snapshot, is_collapsed=True)),
        legend=Markup(legend_html(card.initial_policy)),
        sft_name=role_names(card.initial_policy)["sft"],
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
    )


def _figure_rows(card: Card) -> Iterator[tuple[str, str, str]]:
    """Yields (name, SFT, PPO) for each figure of the evaluation."""
    judge = get_nested(card, "evaluation", "judge", "name")
    for key, name in _FIGURE_NAMES.items():
        sft, ppo = (card.estimate(role, key) for role in ("sft", "ppo"))
        if ppo is not None:
            label = f"{name}: {clean(judge)}" if key == "judge" and isinstance(judge, str) else name
            label = label.format(card.initial_policy) if key == "kl" else label
            yield label, "0: it is the reference" if key == "kl" else _estimate_text(sft), _estimate_text(ppo)
    if (win_rate := card.estimate("win_rate")) is not None:
        yield f"win rate over {card.initial_policy}", "", _estimate_text(win_rate)


def _estimate_text(figure: CardEstimate | None) -> str:
    return str(estimate(None if figure is None else asdict(figure)))
