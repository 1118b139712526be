"""Rendering of conversations: the head of a chat template, and what models, judges and people read."""

import pytest
import schemas
from datasets import Dataset

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import chat_template
from rlhf_zoo.modeling.chat import (
    append_completion,
    plain_text,
    remove_thoughts,
    tokenize_for_reward,
    tokenize_prompt,
    wrap_prompt,
)
from rlhf_zoo.modeling.chat_template import ChatSettings, end_of_turn
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.runs.data.hold_out import split_by_prompt
from rlhf_zoo.runs.data.layout import drop_long_prompts, split_pair
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.settings.parse import recipe_config

ASKED = [{"role": "user", "content": "how are you"}]


def make_chat_tokenizer(template: str | None = schemas.TEMPLATE):
    tokenizer = train_tokenizer(["how are you", "fine"] * 4, vocab_size=280, max_length=64)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def test_template_head_survives_saving_and_is_written_once(tmp_path) -> None:
    odd = 'Say "hi" #} {% x %}\n😀'
    chat = ChatSettings(odd, {"enable_thinking": False}, True)
    tokenizer = chat.write(make_chat_tokenizer())
    head = tokenizer.chat_template
    assert chat.write(tokenizer).chat_template == head, "written again, it takes its own place"
    tokenizer.save_pretrained(tmp_path)
    read = type(tokenizer).from_pretrained(tmp_path)
    assert ChatSettings.of(read) == chat and ChatSettings.of(make_chat_tokenizer()) is None
    text = read.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\n{odd}<|im_end|>\n<|im_start|>user\nhow are you<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
    )
    messages = [{"role": "system", "content": "mine"}, *ASKED]
    text = read.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert odd not in text and "mine" in text and "<think>" not in text, "what a caller says comes first"


def test_reward_tokens_match_ppo_rollout_tokens() -> None:
    tokenizer = ChatSettings().write(make_chat_tokenizer())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(tokenizer) == end
    written = [*tokenize_prompt(ASKED, tokenizer), *tokenizer("fine", add_special_tokens=False)["input_ids"]]
    assert tokenize_for_reward(append_completion(ASKED, "fine"), tokenizer, ended=True) == [*written, end]
    assert tokenize_for_reward(append_completion(ASKED, "fine"), tokenizer, ended=False) == written
    plain_tokenizer = make_chat_tokenizer()
    rendered = tokenizer.decode(tokenize_for_reward(append_completion(ASKED, "fine"), plain_tokenizer, ended=True))
    assert rendered.endswith("fine<|im_end|>\n")
    plain = tokenize_for_reward(append_completion(ASKED, "fine"), make_chat_tokenizer(None), ended=True)
    assert plain == [*make_chat_tokenizer(None)("how are you\n\nfine")["input_ids"], tokenizer.eos_token_id]


def test_plain_text_renders_conversations() -> None:
    talk = [{"role": "system", "content": "s"}, *ASKED, {"role": "assistant", "content": "fine"}, *ASKED]
    assert plain_text("a text") == "a text" and plain_text(ASKED) == "how are you\n\n"
    assert plain_text(talk) == "System: s\n\nUser: how are you\n\nAssistant: fine\n\nUser: how are you\n\n"
    for prompt in (ASKED, talk, talk[:-1]):
        assert plain_text(append_completion(prompt, "well")) == plain_text(prompt) + "well"
    assert remove_thoughts("<think>a\nb</think>\n\n42") == "42" and remove_thoughts("so <think>cut") == "so "
    assert wrap_prompt(" hi ", make_chat_tokenizer()) == " hi "
    assert wrap_prompt(" hi ", ChatSettings().write(make_chat_tokenizer())) == [{"role": "user", "content": "hi"}]


@pytest.mark.attack
@pytest.mark.parametrize("name", ["x = 1 %}EVIL{% set y", "range", "messages", "true", "True", "for", "eos_token", ""])
def test_chat_rejects_invalid_template_variables(name: str) -> None:
    with pytest.raises(ZooError, match="not a free variable of a template: use"):
        ChatSettings(chat_template_kwargs={name: 1})
    with pytest.raises(ZooError, match="not a free variable of a template: use"):
        recipe_config(load_recipe("tiny-world"), {"chat_template_kwargs": {name: 1}})


def test_chat_rejects_unrenderable_system_prompts() -> None:
    with pytest.raises(ZooError, match="set chat_template_path in"):
        ChatSettings().write(make_chat_tokenizer(None))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('No system turns') }}{% endif %}x"
    with pytest.raises(ZooError, match=r"of user \(No system turns\).*remove system_prompt"):
        ChatSettings("s").write(make_chat_tokenizer(refuses))


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "growth": "{% set x = namespace(t='a' * 1000000) %}{% for a in range(9999) %}{% set x.t = x.t ~ x.t %}{% endfor %}",
}


@pytest.mark.attack
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_endless_template_raises_readable_error(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 1.0)
    monkeypatch.setattr(chat_template, "RENDER_MEMORY", 2**29)
    with pytest.raises(ZooError, match="exceeds"):
        tokenize_prompt(ASKED, make_chat_tokenizer(template))


@pytest.mark.attack
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it nests or calls itself too deeply"),
        ("{{ 1 // 0 }}", "modulo by zero"),
        ("{{ 10 ** 10 ** 9 }}", "computes powers"),
        ("{% set x = ('%}', 10 ** 10 ** 9) %}", "computes powers"),
    ],
)
def test_template_with_python_failure_raises_readable_error(template: str, why: str) -> None:
    with pytest.raises(ZooError, match=why):
        tokenize_prompt(ASKED, make_chat_tokenizer(template))


def test_template_allows_keyword_unpacking() -> None:
    tokenizer = make_chat_tokenizer("{{ dict(a=1, **messages[0]).content }}")
    assert tokenize_prompt(ASKED, tokenizer) == tokenizer("how are you")["input_ids"]


def test_split_pair_finds_implicit_prompt() -> None:
    row = schemas.rows_of("Anthropic/hh-rlhf", 1)[0]
    pair = split_pair({"chosen": row["chosen"] + " one", "rejected": row["chosen"] + " two"})
    assert pair["prompt"].endswith("really\n\nAssistant:") and pair["chosen"].endswith(" one")
    lines = split_pair({"chosen": "Is it so?\nYes", "rejected": "Is it so?\nNo"})
    assert lines == {"prompt": "Is it so?\n", "chosen": "Yes", "rejected": "No"}
    tabs = split_pair({"chosen": "a b\tcd", "rejected": "a b\tce"})
    assert tabs["prompt"] == "a b\t"
    words_apart = split_pair({"chosen": "Answer: good", "rejected": "Answer: bad"})
    assert words_apart == {"prompt": "Answer:", "chosen": " good", "rejected": " bad"}
    row = schemas.rows_of("trl-lib/ultrafeedback_binarized", 1)[0]
    assert split_pair(row)["prompt"] == row["chosen"][:1]
    same = split_pair({"chosen": row["chosen"], "rejected": row["chosen"]})
    assert same["chosen"] == row["chosen"][1:], "two equal sides keep their answers"


def test_split_by_prompt_parts_share_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([{"prompt": "x" * (1 + place // 2)} for place in range(40)])
    parts = split_by_prompt(rows, 0.2, part_count=2)
    assert [len(set(part["prompt"])) for part in parts] == [4, 4, 12]
    assert len(set().union(*(part["prompt"] for part in parts))) == 20
    short, left_out = drop_long_prompts(rows, make_chat_tokenizer(None), 5, subject="the prompts")
    assert 0 < len(short) < 40 and left_out == 40 - len(short)
    assert f"{left_out} of 40 rows of the prompts are left out: max_prompt_length is 5." in caplog.text
    with pytest.raises(ZooError, match="leaves none of 20 prompts"):
        split_by_prompt(rows, 0.5, part_count=2)
