"""Completions are decoded after their prompt: with their leading space, and without thoughts."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from spaced_tokenizer import CHATML, LLAMA, QUESTION, metaspace
from tokenizers import AddedToken
from trainer_fixture import make_policy, make_reward_model
from transformers import PreTrainedTokenizerBase

from rlhf_zoo.app.engine import Comparison
from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.panel import score_completions
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.evaluation.measure import Evaluator
from rlhf_zoo.evaluation.text_logprobs import build_samples, score_by_reward
from rlhf_zoo.modeling.alignment import IncrementalDetokenizer, TokenText, decode_after
from rlhf_zoo.modeling.chat import (
    append_completion,
    completion_text,
    decode_completions,
    plain_text,
    tokenize_completion,
    tokenize_for_reward,
    tokenize_prompt,
    wrap_answer,
    wrap_completion,
)
from rlhf_zoo.modeling.chat_template import ChatSettings
from rlhf_zoo.modeling.reserved_columns import PROMPT_TOKENS
from rlhf_zoo.modeling.sampling.truncation import find_text_end
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.pipeline.experiments.baseline_trainers import TokenCounter, ppo_reward
from rlhf_zoo.ppo.completions import decode_rows
from rlhf_zoo.rewards import RewardModel, Rewards
from rlhf_zoo.runs.checks.conversations import check_rows
from rlhf_zoo.runs.data.generate import complete


def ids_of(tokenizer: PreTrainedTokenizerBase, *tokens: str) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert None not in ids and tokenizer.unk_token_id not in ids
    return ids


def reward_model_of(tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    model = make_reward_model(tokenizer, statistics=None)
    return RewardModel(model, tokenizer, tokenizer)


def test_reward_by_text_equals_reward_by_ids() -> None:
    tokenizer = metaspace()
    completion_ids = ids_of(tokenizer, "▁it", "▁is", "▁good")
    assert tokenizer.decode(completion_ids) == "it is good", "alone, the first space is lost"
    samples = build_samples(
        ["how is it"], [[*completion_ids, tokenizer.eos_token_id]], tokenizer, [tokenizer.eos_token_id]
    )
    rows = [{"prompt": "how is it", PROMPT_TOKENS: samples.prompt_id_lists()[0]}]
    texts = decode_rows(tokenizer, samples, rows)
    assert texts.completions == [" it is good"] and texts.texts == ["how is it it is good"]
    model = reward_model_of(tokenizer)
    by_ids = model.score_samples(samples, texts.texts)
    by_text = model.score_texts(texts.texts, ended=[True])
    assert torch.equal(by_ids, by_text)
    assert (model.score_texts(["how is itit is good"], ended=[True]) - by_ids).abs() > 0.01, "as it was read before"
    # The evaluation's edited texts, functions, and the baseline of trl, which decodes completions alone.
    assert tokenize_completion("how is it", " it is good", tokenizer) == completion_ids
    seen: list[Any] = []

    def look(completions: list[str], **_: Any) -> list[Any]:
        seen.extend(completions)
        return [[(0, 3, 1.0), (3, 6, 2.0)]] * len(completions)

    rewards = Rewards([look], tokenizer=tokenizer)
    scored = rewards(samples, texts.prompts, texts.completions, texts.texts, {})
    assert scored.by_token is not None and scored.by_token.tolist() == [[1.0, 2.0, 0.0, 0.0]]
    none: dict[str, float | None] = {"penalty": None, "score": None}
    paid = ppo_reward(rewards, tokenizer, TokenCounter(), missing_eos=none, score_clip=None)
    assert paid(prompts=["how is it"], completions=["it is good"], completion_ids=[completion_ids]) == [3.0]
    policy = make_policy(tokenizer)
    tools: Any = Evaluator(policy, tokenizer, rewards, panel=None, max_new_tokens=8, temperature=1.0)  # type: ignore[arg-type]
    assert score_by_reward(tools, ["how is it"], [" it is good"], {}, desc="texts") == [3.0]
    assert set(seen) == {" it is good"}


def test_sampled_text_is_same_for_centering_judges_and_page() -> None:
    tokenizer = metaspace()
    done = complete(
        make_policy(tokenizer), tokenizer, ["how is it"] * 6, keys=[(row,) for row in range(6)], seed=1,
        max_new_tokens=6, temperature=1.0, desc="",
    )  # fmt: skip
    before = tokenize_prompt("how is it", tokenizer)
    tokens = done.batches[0].completion_id_lists()
    for text, ids in zip(done.texts, tokens, strict=True):
        assert "how is it" + text == tokenizer.decode([*before, *ids], skip_special_tokens=True)
        pieces = IncrementalDetokenizer(tokenizer, before)
        for token in ids:
            pieces.add(token)
        assert pieces.finish() == text and pieces.text == text
    assert any(text.startswith(" ") for text in done.texts)
    rule = RuleJudge("spaces", lambda completions, **_: [float(text.startswith(" ")) for text in completions])
    assert score_completions(rule, ["how is it"] * 6, done.texts, None) == [
        float(text[:1] == " ") for text in done.texts
    ]
    assert find_text_end(tokenizer, ids_of(tokenizer, "▁it", "▁is"), text=" it", after=0, prompt=before) == 1


def test_chat_answer_has_no_leading_space_from_template() -> None:
    tokenizer = ChatSettings().write(metaspace(LLAMA))
    completion_ids = ids_of(tokenizer, "▁Sure", ".")
    before = tokenize_prompt(QUESTION, tokenizer)
    assert decode_after(tokenizer, before, completion_ids) == " Sure."
    assert decode_completions(tokenizer, [QUESTION], [before], [completion_ids]) == ["Sure."]
    assert tokenize_completion(QUESTION, "Sure.", tokenizer) == completion_ids
    conversation = append_completion(QUESTION, "Sure.")
    assert tokenize_for_reward(conversation, tokenizer, ended=False) == [*before, *completion_ids]
    assert tokenize_for_reward(conversation, tokenizer, ended=True) == [
        *before,
        *completion_ids,
        tokenizer.eos_token_id,
    ]


@pytest.mark.parametrize("template", [None, LLAMA])
def test_page_shows_completion_that_rewards_read(template: str | None) -> None:
    tokenizer = metaspace(template)
    tokenizer = tokenizer if template is None else ChatSettings().write(tokenizer)
    prompt: Any = "how is it" if template is None else QUESTION
    policy = make_policy(tokenizer)
    comparison = Comparison(ppo=policy, sft=policy, tokenizer=tokenizer, reward=reward_model_of(tokenizer))
    sides = [comparison.compare("how is it", seed=seed, max_new_tokens=4).ppo for seed in range(8)]
    before = tokenize_prompt(prompt, tokenizer)
    for side in sides:
        assert [side.completion] == decode_completions(tokenizer, [prompt], [before], [side.token_ids])
    assert any(side.tokens[0].startswith(" ") for side in sides)
    assert any(side.completion.startswith(" ") for side in sides) == (template is None)


def test_decode_after_handles_characters_split_at_prompt_end() -> None:
    """A prompt that ends within a character, and one whose end is no token's end."""
    letters = train_tokenizer(["a b"], vocab_size=258, max_length=512)
    ids = letters("a€b")["input_ids"]
    assert [decode_after(letters, ids[:cut], ids[cut:]) for cut in range(6)] == ["a€b", "€b", "€b", "€b", "b", ""]
    joined = train_tokenizer(["foobar"] * 9, vocab_size=300, max_length=512)
    assert len(joined("foobar")["input_ids"]) == 1
    assert joined.decode(tokenize_completion("foo", "bar", joined)) == "bar"
    spaced = metaspace()
    behind = tokenize_completion("how is", "it", spaced)
    assert decode_after(spaced, tokenize_prompt("how is", spaced), behind) == "it"
    assert TokenText(spaced, ids_of(spaced, "▁it", "▁is"), tokenize_prompt("how", spaced)).completing_token(3) == 0


# Thoughts


def thinking_tokenizer(*, prefilled: bool, special: bool) -> PreTrainedTokenizerBase:
    tokenizer = train_tokenizer(["so it is 4 no"], vocab_size=270, max_length=512)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")], special_tokens=special)
    tokenizer.chat_template = CHATML.replace("THINKS", "<think>\n" if prefilled else "")
    return ChatSettings(strip_thoughts=True).write(tokenizer)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("prefilled", "completion", "expected"),
    [
        (False, "<think>so</think>\n\n4", "4"),
        (False, "4", "4"),
        (False, "no <think>so it", "no "),
        (False, "<think>so", ""),
        (True, "so it is</think>\n\n4", "4"),
        (True, "so it is", ""),
        (True, "so</think>\n4 <think>no</think> 4", "4 4"),
        (False, "so</think>4", "4"),
        (False, "<think>so<think>no</think>it</think>4", "4"),
    ],
)
def test_decode_completions_strips_thoughts(special: bool, prefilled: bool, completion: str, expected: str) -> None:
    tokenizer = thinking_tokenizer(prefilled=prefilled, special=special)
    before = tokenize_prompt(QUESTION, tokenizer)
    ids = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert decode_completions(tokenizer, [QUESTION], [before], [ids]) == [expected]
    # A reward model is trained on what it will read.
    closed = tokenize_for_reward(append_completion(QUESTION, "<think>so</think>4"), tokenizer, ended=True)
    assert closed == tokenize_for_reward(append_completion(QUESTION, "4"), tokenizer, ended=True)


def test_prompt_with_open_thought_is_rejected() -> None:
    tokenizer = thinking_tokenizer(prefilled=False, special=True)
    prompt = [*QUESTION, {"role": "assistant", "content": "<think>so"}]
    with pytest.raises(ZooError, match="strip_thoughts"):
        tokenize_prompt(prompt, tokenizer)
    with pytest.raises(ZooError, match="Row 0 of the data"):
        check_rows(Dataset.from_list([{"prompt": prompt}]), tokenizer, subject="the data")
    closed = [*QUESTION, {"role": "assistant", "content": "<think>so</think>"}]
    assert tokenize_prompt(closed, tokenizer)
    unstripped = ChatSettings().write(thinking_tokenizer(prefilled=False, special=True))
    assert plain_text(append_completion(prompt, " it is")).endswith("<think>so it is")
    assert tokenize_prompt(prompt, unstripped)
    mention = [{"role": "user", "content": "what is <think> for"}]
    plain = tokenizer("so", add_special_tokens=False)["input_ids"]
    assert decode_completions(tokenizer, [mention], [tokenize_prompt(mention, tokenizer)], [plain]) == ["so"]


# Prompts that begin the answer


def test_open_assistant_turn_is_continued() -> None:
    tokenizer = thinking_tokenizer(prefilled=False, special=False)
    prompt = [*QUESTION, {"role": "assistant", "content": "so it"}]
    text = tokenizer.decode(tokenize_prompt(prompt, tokenizer))
    assert text.endswith("<|im_start|>assistant\nso it"), "neither closed nor opened again"
    assert wrap_completion(prompt, " is") == [{"role": "assistant", "content": " is"}]
    turns = [*QUESTION, {"role": "assistant", "content": "so it is"}]
    for completion in (" is", wrap_completion(prompt, " is"), turns[1:]):
        assert append_completion(prompt, completion) == turns
    assert plain_text(prompt) == "how is it\n\nso it"
    before = tokenize_prompt(prompt, tokenizer)
    ids = tokenize_completion(prompt, " is", tokenizer)
    assert decode_completions(tokenizer, [prompt], [before], [ids]) == [" is"]
    assert tokenize_for_reward(append_completion(prompt, " is"), tokenizer, ended=False) == [*before, *ids]


def test_completion_repeating_open_turn_is_kept() -> None:
    """A policy that repeats the beginning is read as it wrote; a data set's whole answer is read once."""
    prompt = [*QUESTION, {"role": "assistant", "content": "so"}]
    assert append_completion(prompt, "so it is")[-1]["content"] == "soso it is"
    assert completion_text("so it is", prompt) == "so it is"
    whole = wrap_answer(prompt, "so it is")
    assert whole == [{"role": "assistant", "content": "soso it is"}]
    assert append_completion(prompt, whole)[-1]["content"] == "soso it is"
    assert append_completion(prompt, [{"role": "assistant", "content": "so it is"}])[-1]["content"] == "so it is"
    assert completion_text(whole, prompt) == "so it is"
    assert wrap_answer("how is it", " so") == " so"


def test_truncated_thought_begun_by_template_is_stripped() -> None:
    tokenizer = thinking_tokenizer(prefilled=True, special=False)
    tokenizer.chat_template = tokenizer.chat_template.replace("<think>\n", "<think>\nso, ")
    before = tokenize_prompt(QUESTION, tokenizer)
    ids = tokenizer("it is", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(before).endswith("so, ")
    assert decode_completions(tokenizer, [QUESTION], [before], [ids]) == [""]
