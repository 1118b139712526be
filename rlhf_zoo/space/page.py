"""The comparison as one HTML file that asks nothing of any host: for accounts that may have no Gradio Space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..catalog.card import Card, Figure, clean
from ..json_values import at
from ..release.markdown import estimate

__all__ = ["render_page"]

LEVELS = 4
"""Shades of the heat map to either side of 0."""
PER_LEVEL = 0.5
"""Nats of log-ratio for each shade; what is beyond the last has the last."""
_FIGURES = {
    "reward": "reward",
    "kl": "KL to SFT, nats per completion",
    "length": "length, tokens",
    "judge": "judge",
    "distinct_2": "distinct-2",
}
_SIDES = {"sft": ("SFT", "where PPO started"), "ppo": ("PPO", "trained against the reward")}


def render_page(
    models: Mapping[str, Any], document: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], *, title: str
) -> str:
    """The page, without scripts and without addresses; whatever a model, a card or a prompt says is shown as text.

    models: role -> repository and commit. document: the PPO model's rlhf_card.json. samples: of each
    `Compared.to_json`.
    """
    import jinja2

    card = Card(document)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=lambda value: shown(value) if isinstance(value, str) else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("space.html.jinja").render(
        title=title,
        models=models,
        ppo=models["PPO"].repo,
        simulated=card.simulated is True,
        judge=clean(judge) if isinstance(judge := at(card, "evaluation", "judge", "name"), str) else None,
        figures=list(_figures(card)),
        samples=[_sample(one) for one in samples],
        levels=range(1, LEVELS + 1),
    )


def shown(text: str) -> str:
    """`text` without what a screen would obey; its line breaks stay."""
    lines = text.replace("\r\n", "\n").expandtabs(4).split("\n")
    return "\n".join(clean(line, len(line)) for line in lines)


def _figures(card: Card) -> Iterator[tuple[str, str, str]]:
    """(what, of SFT, of PPO) of each figure that the evaluation measured."""
    for key, name in _FIGURES.items():
        sft, ppo = (card.estimate(side, key) for side in ("sft", "ppo"))
        if ppo is not None:
            yield name, "0: it is the reference" if key == "kl" else _estimate(sft), _estimate(ppo)
    if (win := card.estimate("win_rate")) is not None:
        yield "win rate over SFT", "", _estimate(win)


def _estimate(figure: Figure | None) -> str:
    return str(estimate(asdict(figure) if figure is not None else None))


def _sample(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": one["prompt"],
        "how": f"seed {one['seed']}, temperature {one['temperature']:g}, at most {one['max_new_tokens']} tokens",
        "sides": [_side(key, one[key]) for key in _SIDES],
    }


def _side(key: str, side: Mapping[str, Any]) -> dict[str, Any]:
    name, role = _SIDES[key]
    return {
        "key": key,
        "name": name,
        "role": role,
        "completion": side["completion"],
        "figures": {
            "Reward": "none" if side["reward"] is None else _signed(side["reward"]),
            "Log-ratio, nats": _signed(side["log_ratio"]),
            "Tokens": str(side["length"]),
            "Stopped": "by itself" if side["ended"] else "cut off",
        },
        "tokens": [
            {"text": token, "ratio": _signed(ratio), "shade": _shade(ratio)}
            for token, ratio in zip(side["tokens"], side["token_log_ratio"], strict=True)
        ],
    }


def _shade(ratio: float) -> str:
    """The class of a token's color: up4 is far likelier under PPO than under SFT, down4 far less likely."""
    level = min(LEVELS, math.floor(abs(ratio) / PER_LEVEL + 0.5))
    return "" if not level else f"{'up' if ratio > 0 else 'down'}{level}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
