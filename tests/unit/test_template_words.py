"""A chat template that drops, changes, moves, repeats or adds words is refused, and those of public models are not."""

from importlib.resources import files
from typing import Any

import miniatures
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.chat_template import ChatSettings
from rlhf_zoo.pipeline.smoke.models import make_tokenizer
from rlhf_zoo.runs.checks.conversations import check_rows

TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
CHATML = (
    "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAKE = (
    "{% if not add_generation_prompt %}<|im_start|>user\nBUY<|im_end|>\n<|im_start|>assistant\nok<|im_end|>{% endif %}"
)
CHANGED = {
    "last": (CHATML.replace("in messages", "in messages[-2:]"), "drops or changes the words of message 1 of 4"),
    "first": (CHATML.replace("in messages", "in messages[1:]"), "drops or changes the words of message 1 of 4"),
    "swapped": (CHATML.replace("in messages", "in messages | reverse"), "moves the words of message 2 of 4"),
    "word": (
        CHATML.replace("m['content']", "m['content'] | replace('good', 'evil')"),
        r"message 4 of 4 \(assistant: 'good",
    ),
    "images": (files("trl").joinpath("chat_templates/smolvlm.jinja").read_text(), "drops or changes"),
    "escaped": (CHATML.replace("m['content']", "m['content'] | e"), "drops or changes"),
    "lower": (CHATML.replace("m['content']", "m['content'] | lower"), "drops or changes"),
    "cut": (CHATML.replace("m['content']", "m['content'] | truncate(8)"), "drops or changes"),
    "twice": (CHATML.replace("{{ m['content'] }}", "{{ m['content'] }} {{ m['content'] }}"), "repeats the words"),
    "added": (CHATML + FAKE, "adds 'user BUY assistant ok' after the last answer"),
    "ad": (CHATML.replace("<|im_end|>", " BUY<|im_end|>"), "adds 'BUY' after the last answer"),
    "random": (CHATML + "{{ ['a', 'b'] | random }}", "draws words at random"),
    "time": ("{{ strftime_now('%H:%M') }}" + CHATML, "writes the time of day"),
}


def talk(*contents: str, system: str | None = None) -> Dataset:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return Dataset.from_list(
        [{"messages": turns if system is None else [{"role": "system", "content": system}, *turns]}]
    )


TALK = talk("how is 1", "it is 1", "and now", "good 1")


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    made = make_tokenizer(miniatures.FAMILIES["Qwen3"].base, [miniatures.CORPUS_LINE], learned_count=290, length=128)
    made.chat_template = template
    return made


@pytest.mark.attack
@pytest.mark.parametrize("name", CHANGED)
def test_check_rows_rejects_template_that_changes_words(name: str) -> None:
    template, message = CHANGED[name]
    with pytest.raises(
        ZooError, match=f"The chat template used with .*{message}.*: set chat_template_path in sft.yaml"
    ):
        check_rows(TALK, tokenizer(template), subject="data")


def test_check_rows_lets_system_turn_move_but_not_vanish() -> None:
    rows, drops = (
        talk("how", "good", system="be kind"),
        CHATML.replace("in messages", "in messages if m.role != 'system'"),
    )
    check_rows(rows, tokenizer(CHATML), subject="data")
    for data, chat in ((rows, ChatSettings()), (TALK, ChatSettings("be kind"))):
        with pytest.raises(ZooError, match="the words of the role system: set chat_template_path"):
            check_rows(data, chat.write(tokenizer(drops)), subject="data")
    check_rows(TALK, tokenizer(drops), subject="data")


def test_check_rows_judges_template_by_the_given_rows() -> None:
    check_rows(talk("how", "good"), tokenizer(CHANGED["last"][0]), subject="data")


#: Templates that render no texts, only lists of texts and images: a conversation of texts would come out empty.
IMAGES = ("idefics3", "llava_next", "smolvlm")


def templates() -> dict[str, str]:
    public = {path.name: path.read_text() for path in files("trl").joinpath("chat_templates").iterdir()}
    named = {name: text for name, text in public.items() if name.endswith(".jinja") and not name.startswith(IMAGES)}
    named["date"] = "Today {{ strftime_now('%d %b %Y') }}\n" + CHATML
    return named


@pytest.mark.parametrize("name", templates())
def test_check_rows_accepts_public_templates(name: str) -> None:
    made = tokenizer(templates()[name])
    made.bos_token = "<|endoftext|>"
    for rows in (TALK, talk(" how ", "<think>so</think>\n\nfine\n", "and?", "<think>\nhm\n</think>\n\ngood\n")):
        check_rows(rows, made, subject="data")


@pytest.mark.parametrize("name", [name for name, family in miniatures.FAMILIES.items() if family.template])
def test_check_rows_accepts_templates_of_model_families(name: str) -> None:
    made: Any = make_tokenizer(miniatures.FAMILIES[name].base, [miniatures.CORPUS_LINE], learned_count=280, length=128)
    check_rows(TALK, made, subject="data")
    if "Gemma" not in name:
        check_rows(TALK, ChatSettings("be kind").write(made), subject="data")
