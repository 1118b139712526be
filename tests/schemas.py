"""Small data sets with exactly the columns and forms of public ones, and recipes that train on them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

#: ChatML, as Qwen's, with a switch for thoughts, and no system turn of its own.
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}{%- endif %}"
)
WORDS = ("sharp", "clear", "heavy", "cheap", "bright", "slow", "good", "weak")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows_of(schema: str, count: int = 24, *, form: str = "plain") -> list[dict[str, Any]]:
    """Rows as the public data set of this name has them; hh-rlhf's as turns too, as TRL's copies of it have them."""
    rows = []
    for row in range(count):
        asked, good, bad = f"how is item {row}", f"it is {WORDS[row % 8]}", f"it is {WORDS[(row + 3) % 8]} and bad"
        if schema == "trl-lib/ultrafeedback_binarized":
            sides = {
                side: [_turn("user", asked), _turn("assistant", said)]
                for side, said in (("chosen", good), ("rejected", bad))
            }
            rows.append({**sides, "score_chosen": 8.0, "score_rejected": 3.5})
        elif schema == "trl-lib/tldr":
            rows.append({"prompt": f"POST: {asked} TL;DR:", "completion": f" {good}"})
        elif schema == "trl-lib/tldr-preference":
            rows.append({"prompt": f"POST: {asked} TL;DR:", "chosen": f" {good}", "rejected": f" {bad}"})
        elif schema == "Anthropic/hh-rlhf":
            before = f"\n\nHuman: {asked}\n\nAssistant: it is fine\n\nHuman: really\n\nAssistant:"
            turns = [_turn("user", asked), _turn("assistant", "it is fine"), _turn("user", "really")]
            talks = form == "conversational"
            rows.append(
                {
                    side: [*turns, _turn("assistant", said)] if talks else f"{before} {said}"
                    for side, said in (("chosen", good), ("rejected", bad))
                }
            )
        elif schema == "openai/gsm8k":
            sum_of = f"{row} and {row} are {row}+{row} = <<{row}+{row}={2 * row}>>{2 * row}"
            rows.append({"question": asked, "answer": f"{sum_of}\n#### {2 * row}"})
        elif schema == "stanfordnlp/imdb":
            rows.append({"text": f"{asked} {good}", "label": row % 2})
        else:
            raise LookupError(schema)
    return rows


TALKS = {"conversational": True}
#: What SFT learns from: the preferred side, as turns and as a completion; an answer to a question.
TURNS, PREFERRED = {"columns": {"messages": "chosen"}}, {"columns": {"completion": "chosen"}}
ANSWERS, QUESTIONS = {"columns": {"prompt": "question", "completion": "answer"}}, {"columns": {"prompt": "question"}}
#: Of each schema and form, the keys of the recipe and of the stages that it can train; see `make_recipe`.
SCHEMAS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("trl-lib/ultrafeedback_binarized", "conversational"): {"recipe": {}, "sft": TURNS, "reward": {}, "ppo": {}},
    ("trl-lib/tldr", "plain"): {"recipe": {}, "sft": {}, "ppo": {}},
    ("trl-lib/tldr", "conversational"): {"recipe": TALKS, "sft": {}, "ppo": {}},
    ("trl-lib/tldr-preference", "plain"): {"recipe": {}, "sft": PREFERRED, "reward": {}, "ppo": {}},
    ("trl-lib/tldr-preference", "conversational"): {"recipe": TALKS, "sft": PREFERRED, "reward": {}, "ppo": {}},
    ("Anthropic/hh-rlhf", "plain"): {"recipe": {}, "sft": {"columns": {"text": "chosen"}}, "reward": {}, "ppo": {}},
    ("Anthropic/hh-rlhf", "conversational"): {"recipe": {}, "sft": TURNS, "reward": {}, "ppo": {}},
    ("openai/gsm8k", "plain"): {"recipe": {}, "sft": ANSWERS, "ppo": QUESTIONS},
    ("openai/gsm8k", "conversational"): {
        "recipe": {**TALKS, "system_prompt": "Answer with a number."},
        "sft": ANSWERS,
        "ppo": QUESTIONS,
    },
    ("stanfordnlp/imdb", "plain"): {"recipe": {}, "sft": {}, "ppo": {"columns": {"prompt": "text"}}},
}

#: Of each public data set, in the configuration that its examples read.
SPLITS = {
    "trl-lib/ultrafeedback_binarized": ("train", "test"),
    "trl-lib/tldr": ("train", "validation", "test"),
    "trl-lib/tldr-preference": ("train", "validation"),
    "Anthropic/hh-rlhf": ("train", "test"),
    "openai/gsm8k": ("train", "test"),
    "stanfordnlp/imdb": ("train", "test"),
}

ARCHITECTURE = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 256,
}  # fmt: skip
TRAINED = {
    "max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "bf16": False, "use_cpu": True,
    "gradient_checkpointing": False, "logging_steps": 1,
}  # fmt: skip
LAYOUT = {"dataset_config": None, "dataset_test_split": None, "held_out_share": 0.2}


def write_data(folder: Path, rows: list[dict[str, Any]], splits: Sequence[str] = ("train",)) -> Path:
    """A data set with one configuration, as its repository would hold it."""
    folder.mkdir(parents=True)
    for split in splits:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


def length(completions: Any, **_: Any) -> list[float]:
    """A reward function that takes conversations as TRL gives them."""
    return [float(len(one if isinstance(one, str) else one[-1]["content"])) for one in completions]


def make_recipe(
    folder: Path, schema: str, form: str, *, base: Path | str | None = None, **keys: Mapping[str, Any]
) -> Path:
    """A recipe of every stage that the schema has data for, on a data set of it with one split.

    base: the model to begin with, by its own tokenizer and template, in place of a new one. keys: of a stage, or of
    "recipe", on top.
    """
    given = SCHEMAS[schema, form]
    recipe = folder / "mine"
    recipe.mkdir(parents=True)
    data = write_data(folder / "data", rows_of(schema, form=form))
    template = folder / "chat.jinja"
    # A tokenizer of our own has one special token that can end an answer.
    template.write_text(TEMPLATE.replace("'<|im_end|>'", "eos_token"), encoding="utf-8")
    own: dict[str, dict[str, Any]] = {
        "recipe": {
            "description": f"{schema}, {form}.",
            "dataset_name": str(data),
            "evaluation": {"prompts": 2, "samples": 1, "checkpoint_prompts": 2, "checkpoint_samples": 1,
                           "judge": "schemas:judge"},
        },
        "sft": {**TRAINED, **LAYOUT, "max_length": 128},
        "reward": {**TRAINED, **LAYOUT, "max_length": 128, "score_samples": 4},
        "ppo": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 1, "save_steps": 1,
                "response_length": 6, "eval_strategy": "no", "use_cpu": True, **LAYOUT,
                **({} if "reward" in given else {"reward_model_path": None}), "reward_funcs": ["schemas:length"]},
    }  # fmt: skip
    if base is not None:
        own["sft"]["model_name_or_path"] = str(base)
    else:
        own["recipe"] |= {"tokenizer": {"vocab_size": 300}, "architecture": ARCHITECTURE}
        own["sft"] |= {"chat_template_path": str(template)} if form == "conversational" else {}
    for name, more in given.items():
        said = own[name] | more | dict(keys.get(name, {}))
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
    return recipe


def judge(prompts: list[str], completions: list[str]) -> list[float]:
    assert not any("<|im_start|>" in prompt for prompt in prompts), "judges read plain words"
    return [float(len(completion)) for completion in completions]
