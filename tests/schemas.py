"""Small data sets with the columns and forms of public data sets, and recipes that train on them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

#: ChatML like Qwen's, with `enable_thinking`, but without a default system turn.
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}{%- endif %}"
)
WORDS = ("sharp", "clear", "heavy", "cheap", "bright", "slow", "good", "weak")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows_of(schema: str, count: int = 24, *, form: str = "plain") -> list[dict[str, Any]]:
    """Returns rows like those of a public data set. hh-rlhf has a conversational form too, like TRL's copies of it."""
    rows = []
    for row in range(count):
        question = f"how is item {row}"
        good, bad = f"it is {WORDS[row % 8]}", f"it is {WORDS[(row + 3) % 8]} and bad"
        if schema == "trl-lib/ultrafeedback_binarized":
            sides = {
                side: [_turn("user", question), _turn("assistant", reply)]
                for side, reply in (("chosen", good), ("rejected", bad))
            }
            rows.append({**sides, "score_chosen": 8.0, "score_rejected": 3.5})
        elif schema == "trl-lib/tldr":
            rows.append({"prompt": f"POST: {question} TL;DR:", "completion": f" {good}"})
        elif schema == "trl-lib/tldr-preference":
            rows.append({"prompt": f"POST: {question} TL;DR:", "chosen": f" {good}", "rejected": f" {bad}"})
        elif schema == "Anthropic/hh-rlhf":
            before = f"\n\nHuman: {question}\n\nAssistant: it is fine\n\nHuman: really\n\nAssistant:"
            turns = [_turn("user", question), _turn("assistant", "it is fine"), _turn("user", "really")]
            is_conversational = form == "conversational"
            rows.append(
                {
                    side: [*turns, _turn("assistant", reply)] if is_conversational else f"{before} {reply}"
                    for side, reply in (("chosen", good), ("rejected", bad))
                }
            )
        elif schema == "openai/gsm8k":
            solution = f"{row} and {row} are {row}+{row} = <<{row}+{row}={2 * row}>>{2 * row}"
            rows.append({"question": question, "answer": f"{solution}\n#### {2 * row}"})
        elif schema == "stanfordnlp/imdb":
            rows.append({"text": f"{question} {good}", "label": row % 2})
        else:
            raise LookupError(schema)
    return rows


CHAT = {"conversational": True}
#: Columns that SFT learns from: the chosen text, as turns or as a completion; the answer to a question.
TURNS, PREFERRED = {"columns": {"messages": "chosen"}}, {"columns": {"completion": "chosen"}}
ANSWERS, QUESTIONS = {"columns": {"prompt": "question", "completion": "answer"}}, {"columns": {"prompt": "question"}}
#: (schema, form) -> keys of the recipe and of each stage that the data can train; see `make_recipe`.
SCHEMAS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("trl-lib/ultrafeedback_binarized", "conversational"): {"recipe": {}, "sft": TURNS, "reward": {}, "ppo": {}},
    ("trl-lib/tldr", "plain"): {"recipe": {}, "sft": {}, "ppo": {}},
    ("trl-lib/tldr", "conversational"): {"recipe": CHAT, "sft": {}, "ppo": {}},
    ("trl-lib/tldr-preference", "plain"): {"recipe": {}, "sft": PREFERRED, "reward": {}, "ppo": {}},
    ("trl-lib/tldr-preference", "conversational"): {"recipe": CHAT, "sft": PREFERRED, "reward": {}, "ppo": {}},
    ("Anthropic/hh-rlhf", "plain"): {"recipe": {}, "sft": {"columns": {"text": "chosen"}}, "reward": {}, "ppo": {}},
    ("Anthropic/hh-rlhf", "conversational"): {"recipe": {}, "sft": TURNS, "reward": {}, "ppo": {}},
    ("openai/gsm8k", "plain"): {"recipe": {}, "sft": ANSWERS, "ppo": QUESTIONS},
    ("openai/gsm8k", "conversational"): {
        "recipe": {**CHAT, "system_prompt": "Answer with a number."},
        "sft": ANSWERS,
        "ppo": QUESTIONS,
    },
    ("stanfordnlp/imdb", "plain"): {"recipe": {}, "sft": {}, "ppo": {"columns": {"prompt": "text"}}},
}

#: The splits of each public data set, in the configuration that the examples use.
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
    """Writes a data set with one configuration; each split has the same rows."""
    folder.mkdir(parents=True)
    for split in splits:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


def length(completions: Any, **_: Any) -> list[float]:
    """A reward function that also accepts conversations, which TRL passes as lists of turns."""
    return [float(len(each if isinstance(each, str) else each[-1]["content"])) for each in completions]


def make_recipe(
    folder: Path, schema: str, form: str, *, base: Path | str | None = None, **keys: Mapping[str, Any]
) -> Path:
    """Writes the recipe `mine` with every stage that the schema has data for, and its data set with one split.

    base: The model to start from, with its tokenizer and template; None for a new model. keys: Further keys of the
    recipe or of stages.
    """
    stage_keys = SCHEMAS[schema, form]
    recipe = folder / "mine"
    recipe.mkdir(parents=True)
    data = write_data(folder / "data", rows_of(schema, form=form))
    template = folder / "chat.jinja"
    # Only one special token of a new tokenizer can end an answer: EOS.
    template.write_text(TEMPLATE.replace("'<|im_end|>'", "eos_token"), encoding="utf-8")
    defaults: dict[str, dict[str, Any]] = {
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
                **({} if "reward" in stage_keys else {"reward_model_path": None}), "reward_funcs": ["schemas:length"]},
    }  # fmt: skip
    if base is not None:
        defaults["sft"]["model_name_or_path"] = str(base)
    else:
        defaults["recipe"] |= {"tokenizer": {"vocab_size": 300}, "architecture": ARCHITECTURE}
        defaults["sft"] |= {"chat_template_path": str(template)} if form == "conversational" else {}
    for name, schema_keys in stage_keys.items():
        merged = defaults[name] | schema_keys | dict(keys.get(name, {}))
        (recipe / f"{name}.yaml").write_text(yaml.safe_dump(merged), encoding="utf-8")
    return recipe


def judge(prompts: list[str], completions: list[str]) -> list[float]:
    assert not any("<|im_start|>" in prompt for prompt in prompts), "a judge gets plain text, without special tokens"
    return [float(len(completion)) for completion in completions]
