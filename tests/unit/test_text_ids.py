"""What a tokenizer puts around a text: BOS once, no end behind a prompt, and an end behind every answer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from spaced_tokenizer import CHATML, LLAMA, QUESTION, metaspace
from tokenizers import processors
from toy_run import make_context, make_recipe
from trainer_fixture import make_policy, make_reward_model, make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.chat import append_completion, tokenize_for_reward, tokenize_prompt
from rlhf_zoo.modeling.chat_template import ChatSettings, check_answers_end, end_of_turn
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.modeling.text_ids import switch_off_eos, tokenize_text
from rlhf_zoo.pipeline.inspect.doctor import _check_reads_eos
from rlhf_zoo.pipeline.stages import sft
from rlhf_zoo.pipeline.stages.sft import remove_second_bos
from rlhf_zoo.rewards import RewardModel


def ending(*, as_separator: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer that puts EOS behind every text, and BOS before it."""
    made = metaspace()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <eos>", special_tokens=[("<s>", 3), ("<eos>", 1)]
    )
    if as_separator:
        made.sep_token = "<eos>"
    return made


def test_rendered_text_gets_one_bos() -> None:
    tokenizer = metaspace(LLAMA)
    rendered = tokenizer.apply_chat_template(QUESTION, tokenize=False)
    assert rendered.startswith("<s>")
    assert tokenizer(rendered)["input_ids"][:2] == [3, 3], "the tokenizer puts a second one before it"
    assert tokenize_prompt(rendered, tokenizer).count(3) == 1 == tokenize_prompt("how is it", tokenizer).count(3)
    assert tokenize_for_reward(rendered + " it is", tokenizer, ended=True).count(3) == 1
    rows = Dataset.from_dict({"text": [rendered, "how is it"]})
    kept = remove_second_bos(rows, tokenizer, "text")["text"]
    assert [tokenizer(text)["input_ids"].count(3) for text in kept] == [1, 1]
    bare = make_tokenizer()
    expected = bare("<eos>ab")["input_ids"]
    assert tokenize_text("<eos>ab", bare) == expected, "a tokenizer that puts none keeps the text's own"


def test_tokenize_prompt_drops_eos_that_tokenizer_appends(tmp_path: Path) -> None:
    tokenizer = ending()
    assert tokenizer("how is it")["input_ids"][-1] == 1
    expected = metaspace()("how is it")["input_ids"]
    assert tokenize_prompt("how is it", tokenizer) == expected
    assert tokenize_prompt("how is it<eos>", tokenizer) == [*expected, 1], "one that the text itself has stays"
    assert tokenize_for_reward("how is it", tokenizer, ended=False) == expected
    assert tokenize_for_reward("how is it", tokenizer, ended=True) == [*expected, 1]
    # SFT turns it off for good, as trl reads prompts by the tokenizer alone.
    line = switch_off_eos(tokenizer)
    assert line is not None and line.startswith("The tokenizer added <eos> after every text, prompts included")
    assert switch_off_eos(tokenizer) is None
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert [one("how is it")["input_ids"] for one in (tokenizer, read)] == [expected, expected]


class Looked(Exception):
    """Ends a stage where it would begin to train."""


def trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict], **ppo: Any) -> dict[str, Any]:
    """What SFT gives its trainer, on a base whose tokenizer ends every text and whose template closes no answer."""

    def look(*_: Any, **parts: Any) -> None:
        raise Looked(parts)

    monkeypatch.setattr(sft, "make_trainer", look)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    make_recipe(folder)
    tokenizer, base, data = ending(), folder / "base", folder / "rows.jsonl"
    tokenizer.chat_template = OPEN
    make_policy(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"model_name_or_path": str(base), "dataset_name": str(data), "dataset_config": None, "use_cpu": True}
    with pytest.raises(Looked) as seen:
        sft.run(replace(make_context(folder), flags={"sft": own, "ppo": ppo}))
    result: dict[str, Any] = seen.value.args[0]
    return result


def test_sft_trainer_gets_one_bos_and_no_eos_after_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trained_on(tmp_path, monkeypatch, [{"prompt": "<s>how is it", "completion": " it is good"}])
    ids = result["processing_class"](result["train_dataset"][0]["prompt"])["input_ids"]
    assert ids == metaspace()("how is it")["input_ids"]


def test_sft_rejects_template_that_does_not_end_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"messages": [*QUESTION, {"role": "assistant", "content": "it is good"}]}]
    with pytest.raises(ZooError, match="The chat template does not end an answer"):
        trained_on(tmp_path / "a", monkeypatch, talk)
    result = trained_on(tmp_path / "b", monkeypatch, talk, truncate_text=".")
    assert result["train_dataset"][0] == talk[0], "PPO is told where an answer ends"


def test_doctor_eos_check_handles_tokenizer_that_appends_eos() -> None:
    """With and without an end, a model whose tokenizer ends every text once read the same."""

    def said(tokenizer: PreTrainedTokenizerBase) -> str:
        model = RewardModel(make_reward_model(tokenizer), tokenizer, tokenizer)
        return _check_reads_eos([model], tokenizer, [tokenizer("how is it")["input_ids"]])[1]

    assert said(ending()).startswith("without the end-of-sequence token a score changes by 0.")
    encoder = ending(as_separator=True)
    assert tokenize_for_reward("how is it", encoder, ended=False)[-1] == 1, "which an encoder reads behind every text"
    assert said(encoder) == "it reads an end-of-sequence token after every text"
    deaf = RewardModel(make_reward_model(make_tokenizer()), make_tokenizer(), make_tokenizer())
    with torch.no_grad():
        deaf.model.score.weight.zero_()
    with pytest.raises(ZooError, match="does not read the last token"):
        _check_reads_eos([deaf], make_tokenizer(), [[3, 4]])


def chat_of(template: str) -> PreTrainedTokenizerBase:
    made = train_tokenizer(["so it is"], vocab_size=270, max_length=512)
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template.replace("THINKS", "")
    return ChatSettings().write(made)


OPEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% generation %}{{ m.content }}INSIDE"
    "{% endgeneration %}OUTSIDE{% else %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "assistant_only", "said"),
    [
        (CHATML, False, None),
        (LLAMA, False, None),
        (OPEN, False, "The chat template does not end an answer with a special token"),
        (MARKED.replace("INSIDE", "<|im_end|>").replace("OUTSIDE", ""), True, None),
        (
            MARKED.replace("INSIDE", "").replace("OUTSIDE", "<|im_end|>"),
            True,
            r"the token that ends an answer, <\|im_end\|>",
        ),
        (MARKED.replace("INSIDE", "").replace("OUTSIDE", "<|im_end|>"), False, None),
    ],
)
def test_check_answers_end_rejects_template_without_trained_end(
    template: str, assistant_only: bool, said: str | None
) -> None:
    tokenizer = chat_of(template.replace("{{ bos_token }}", ""))
    if said is None:
        check_answers_end(tokenizer, assistant_only=assistant_only)
        special: Any = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
        assert special in ("<|im_end|>", "<eos>")
        assert tokenize_for_reward(append_completion(QUESTION, "so"), tokenizer, ended=True)[-1] == end_of_turn(
            tokenizer
        )
        return
    with pytest.raises(ZooError, match=said):
        check_answers_end(tokenizer, assistant_only=assistant_only)
