"""Cards and help texts use short sentences, like the guides (`test_docs_site.py`)."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from card_run import head_and_body
from prose import sentences

from rlhf_zoo.cli.main import cli
from rlhf_zoo.publishing.cards.card import make_card

MEAN, LONGEST = 18, 30


def help_texts(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """Yields the help of a command, of its options and of its subcommands, without examples."""
    context = click.Context(command, info_name=name)
    yield name, re.sub(r"\x08\n.*?(?:\n\n|\Z)", "\n\n", command.help or "", flags=re.DOTALL)
    for parameter in command.get_params(context):
        yield f"{name} --{parameter.name}", getattr(parameter, "help", None) or ""
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            subcommand = command.get_command(context, child)
            assert subcommand is not None
            yield from help_texts(f"{name} {child}", subcommand)


def long_sentences(text: str) -> list[str]:
    return [" ".join(words) for words in sentences(text) if len(words) > LONGEST]


def test_help_uses_short_sentences() -> None:
    texts = dict(help_texts("rlhf-zoo", cli))
    assert len(texts) > 200
    assert {name: long for name, text in texts.items() if (long := long_sentences(text))} == {}
    all_sentences = [sentence for text in set(texts.values()) for sentence in sentences(text)]
    assert sum(map(len, all_sentences)) / len(all_sentences) <= MEAN


def prose(body: str) -> str:
    """Removes elements, quotation marks and the line of links from a card."""
    text = re.sub(r"(?m)^>\s?(?:\[!\w+\])?", "", re.sub(r"</?[a-z][^>]*>", "\n\n", body))
    return re.sub(r"(?m)^.*how to read this card.*$", "", text)


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_card_uses_short_sentences(runs: Path, stage: str) -> None:
    _, body = head_and_body(make_card(runs / stage))
    assert long_sentences(prose(body)) == []
    for part in (body, re.sub(r"(?s)<details>.*?</details>", "", body)):
        card_sentences = sentences(prose(part))
        assert len(card_sentences) > 3 and sum(map(len, card_sentences)) / len(card_sentences) <= MEAN


def test_long_sentences_finds_long_sentence() -> None:
    long = " ".join(["word"] * LONGEST) + " end."
    assert long_sentences(f"{long} Two words here.") == [long]
