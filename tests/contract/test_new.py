"""`rlhf-zoo new`: a recipe for any model and data of public forms, which is valid before anybody edits it."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import miniatures
import pytest
import schemas
import torch
import yaml
from gguf_fixture import write_gguf
from transformers import LlamaConfig, Qwen3Config

from rlhf_zoo.cli import main as cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.pipeline.inspect.doctor import examine
from rlhf_zoo.pipeline.inspect.examination import FAILED
from rlhf_zoo.pipeline.new.model import inspect_model
from rlhf_zoo.pipeline.new.recipe import make_recipe
from rlhf_zoo.pipeline.new.request import RecipeRequest
from rlhf_zoo.pipeline.plan.devices import parse_device
from rlhf_zoo.pipeline.plan.memory import GIB
from rlhf_zoo.pipeline.plan.plan import make_plan
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import load_recipe

BY_LENGTH = 'rule:length(unit="words")'
PAGE = (Path(__file__).parents[2] / "docs/your-model.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


@pytest.fixture(autouse=True)
def weights_alone(untraced: pytest.MonkeyPatch) -> None:
    """To trace the passes is four fifths of `new`."""


def zoo(*words: str) -> None:
    cli.cli.main(list(words), standalone_mode=False)


def recipe(name: str = "mine") -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in Path(name).glob("*.yaml")}


def on_disk(family: str, *names: str) -> None:
    miniatures.save(family, Path("base"))
    for name in names:
        schemas.write_data(Path(name), schemas.rows_of(name))


PREFERENCES = {
    "trl-lib/ultrafeedback_binarized": {"messages": "chosen"},
    "trl-lib/tldr-preference": {"completion": "chosen"},
    "Anthropic/hh-rlhf": {"text": "chosen"},
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Qwen3", "trl-lib/ultrafeedback_binarized"),
        ("Llama 3", "trl-lib/tldr-preference"),
        ("GPT-2", "Anthropic/hh-rlhf"),
    ],
)
def test_preferences_become_a_recipe_that_passes_every_check(
    family: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk(family, name)
    zoo("new", "mine", "--model", "base", "--preferences", name)
    said = capsys.readouterr().out
    keys = recipe()
    assert keys.keys() == {"recipe", "sft", "reward", "ppo"}
    assert keys["sft"]["columns"] == PREFERENCES[name] and "same-labels (no judge was given" in said
    assert (keys["recipe"]["evaluation"]["judge"], keys["reward"]["judge_share"]) == ("same-labels", 0.3)
    assert ("TOO FEW FOR A VERDICT" in said) == (keys["recipe"]["evaluation"]["prompts"] < 20)
    talks = miniatures.FAMILIES[family].template is not None and name != "Anthropic/hh-rlhf"
    assert bool(keys["recipe"].get("conversational")) == (talks and name == "trl-lib/tldr-preference")
    assert keys["recipe"].get("chat_template_kwargs") == ({"enable_thinking": False} if family == "Qwen3" else None)
    zoo("recipes", "validate", "mine")
    context = RunContext(
        recipe=load_recipe("mine"), directory=Path("run"), hub=Hub("other", "http://127.0.0.1:9", "a test"),
        namespace="local", publish=False,
    )  # fmt: skip
    # What needs a trained SFT policy says so; nothing fails.
    checked = [one for one in examine(context) if one.check in ("keys", "columns", "prompts", "batch")]
    assert len(checked) == 4 and not [one for one in checked if one.status == FAILED], checked
    for path in Path("mine").glob("*.yaml"):  # a comment on each key, or on the one that it follows
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert sum("  # " in line for line in lines) > 0.6 * len(lines), path
        assert path.read_text().startswith("# ")


@pytest.mark.parametrize(("prompts", "few"), [(240, True), (408, False)])
def test_few_prompts_for_the_evaluation_are_named(prompts: int, few: bool, capsys: pytest.CaptureFixture[str]) -> None:
    on_disk("GPT-2")
    rows = [{"prompt": f"what is {row}", "completion": f"{row}"} for row in range(prompts)]
    schemas.write_data(Path("asked"), rows)
    zoo("new", "mine", "--model", "base", "--prompts", "asked", "--reward", "length")
    said = capsys.readouterr().out
    assert f"{prompts // 8} prompts for the evaluation" in said and "TOO FEW" not in said
    assert ("FEW: below 50 only large effects can be found" in said) == few


def test_a_file_of_json_lines_is_a_data_set(tmp_path: Path) -> None:
    on_disk("Llama 3", "trl-lib/tldr-preference")
    file = next(Path("trl-lib/tldr-preference").rglob("train.jsonl")).rename("pairs.jsonl")
    zoo("new", "mine", "--model", "base", "--preferences", str(file))
    keys = recipe()
    assert keys["recipe"]["dataset_name"] == str(tmp_path / "pairs.jsonl")
    assert keys["ppo"]["dataset_train_split"] == "train" and keys["ppo"]["held_out_share"]
    zoo("recipes", "validate", "mine")


def test_a_reward_that_a_program_checks_needs_no_pairs_and_judges_itself(capsys: pytest.CaptureFixture[str]) -> None:
    on_disk("Qwen2.5", "openai/gsm8k")
    zoo("new", "mine", "--model", "base", "--prompts", "openai/gsm8k", "--reward", "numeric_match")
    keys = recipe()
    assert keys.keys() == {"recipe", "sft", "ppo"}
    assert keys["sft"]["columns"] == {"prompt": "question", "completion": "answer"}
    assert keys["ppo"]["columns"] == {"prompt": "question"}
    assert (keys["ppo"]["reward_model_path"], keys["ppo"]["reward_funcs"]) == (None, ["numeric_match"])
    assert keys["recipe"]["conversational"] and "is its own judge" in capsys.readouterr().out
    zoo("recipes", "validate", "mine")


def test_the_label_of_a_reward_model_is_guessed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    on_disk("Qwen3", "trl-lib/tldr")
    miniatures.two_labels(Path("two"), Path("base"))
    words = ["--model", "base", "--prompts", "trl-lib/tldr", "--reward", "two"]
    zoo("new", "mine", *words, "--judge", BY_LENGTH)
    assert re.search(r"reward_label: good \(GUESSED: the last of bad, good", capsys.readouterr().out)
    assert recipe()["ppo"]["reward_label"] == "good"
    zoo("recipes", "validate", "mine")
    with pytest.raises(ZooError, match=r"The judge reward:\S+/two has 2 outputs, but a judge has one: name"):
        zoo("new", "other", *words, "--judge", "reward:two")


def test_a_recipe_runs_from_another_folder_than_it_was_written_in(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    on_disk("GPT-2", "trl-lib/tldr-preference")
    zoo(
        "new",
        "mine",
        "--model",
        "base",
        "--preferences",
        "trl-lib/tldr-preference",
        "--judge",
        BY_LENGTH,
    )
    keys = recipe()
    assert RecipeRequest("base", judge="reward:base").judge == f"reward:{place / 'base'}"
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    for name in (keys["sft"]["model_name_or_path"], keys["recipe"]["dataset_name"]):
        assert Path(name).is_dir()


def test_rows_are_counted_up_to_a_bound(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    miniatures.save("GPT-2", Path("base"))
    rows = [{"prompt": f"what is {row}?", "chosen": " yes", "rejected": " no"} for row in range(230)]
    schemas.write_data(Path("pairs"), rows)
    for module in ("data", "recipe"):
        monkeypatch.setattr(f"rlhf_zoo.pipeline.new.{module}.MAX_COUNTED", 220)
    zoo("new", "mine", "--model", "base", "--preferences", "pairs", "--judge", BY_LENGTH)
    assert "at least 220 rows" in " ".join(capsys.readouterr().out.split())


def test_answers_may_be_twice_as_long_as_those_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    miniatures.save("GPT-2", Path("base"))
    for words, most in ((1, 32), (5, 64), (40, 96)):  # of 128 tokens that the model reads
        rows = [{"prompt": f"what is {row}?", "chosen": " yes" * words, "rejected": " no"} for row in range(24)]
        schemas.write_data(Path(f"pairs{words}"), rows)
        zoo(
            "new",
            f"mine{words}",
            "--model",
            "base",
            "--preferences",
            f"pairs{words}",
            "--judge",
            BY_LENGTH,
        )
        assert recipe(f"mine{words}")["ppo"]["response_length"] == most, capsys.readouterr().out


def test_columns_of_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    miniatures.save("Qwen3", Path("base"))
    rows = schemas.rows_of("trl-lib/tldr-preference")
    named = {"prompt": "asked", "chosen": "better", "rejected": "worse"}
    schemas.write_data(Path("pairs"), [{named[name]: text for name, text in row.items()} for row in rows])
    words = ["new", "mine", "--model", "base", "--preferences", "pairs", "--judge", BY_LENGTH]
    with pytest.raises(ZooError, match=r"name them by --columns '\{chosen: …, rejected: …, prompt: …\}'"):
        zoo(*words)
    for wrong, said in (
        ("{chosn: better}", "names 'chosn', which no stage reads, did you mean 'chosen'"),
        ("[1]", "it takes"),
    ):
        with pytest.raises(ZooError, match=said):
            zoo(*words, "--columns", wrong)
    zoo(*words, "--columns", "{prompt: asked, chosen: better, rejected: worse}")
    assert recipe()["reward"]["columns"] == named
    assert recipe()["ppo"]["columns"] == {"prompt": "asked"}
    assert recipe()["sft"]["columns"] == {"prompt": "asked", "completion": "better"}
    zoo("recipes", "validate", "mine")


def test_where_all_weights_do_not_fit_it_is_lora_on_the_layers_of_the_model(
    thread_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a Hub: everything is pinned to the commit that was looked at, and configurations and splits are found."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", thread_hub.url)
    miniatures.save("GPT-2", Path("base"))
    terms = "mit\ncorpus: os:system"  # what a card says is a text, and no further key
    Path("base/README.md").write_text(f"---\n{yaml.safe_dump({'license': terms})}---\n")
    thread_hub.api().create_repo("local/base")
    thread_hub.api().upload_folder(repo_id="local/base", folder_path="base")
    rows = {split: "".join(json.dumps(row) + "\n" for row in schemas.rows_of("trl-lib/tldr")) for split in "ab"}
    pairs = "".join(json.dumps(row) + "\n" for row in schemas.rows_of("trl-lib/tldr-preference"))
    front = {"configs": [
        {"config_name": "lines", "data_files": [{"split": "train", "path": "lines.jsonl"}]},
        {"config_name": "pairs", "data_files": [
            {"split": "train_prefs", "path": "a.jsonl"}, {"split": "test_prefs", "path": "b.jsonl"},
        ]},
    ]}  # fmt: skip
    files = {
        "README.md": f"---\n{yaml.safe_dump(front)}---\n",
        "lines.jsonl": rows["a"],
        "a.jsonl": pairs,
        "b.jsonl": pairs,
    }
    commit = thread_hub.make("data", files, kind="dataset")
    zoo("new", "mine", "--model", "local/base", "--preferences", "local/data", "--memory", "0.0001")
    keys = recipe()
    assert keys["sft"]["model_revision"] == thread_hub.api().model_info("local/base").sha
    assert keys["recipe"]["dataset_revision"] == commit
    assert keys["recipe"]["license"] == terms and "corpus" not in keys["recipe"]
    reads = ("dataset_config", "dataset_train_split", "dataset_test_split")
    assert [keys["reward"][key] for key in reads] == ["pairs", "train_prefs", "test_prefs"]
    assert [keys["sft"][key] for key in reads[:2]] == ["lines", "train"]
    for stage in keys.keys() - {"recipe"}:
        assert keys[stage]["use_peft"] and keys[stage]["dtype"] == "bfloat16" and "optim" not in keys[stage]
    assert sorted(keys["sft"]["lora_target_modules"]) == ["c_attn", "c_fc", "c_proj"]
    zoo("recipes", "validate", "mine")


def test_on_a_gpu_lora_takes_few_bits_where_it_needs_them_and_a_reward_without_labels_judges_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_disk("Qwen3-Base", "trl-lib/tldr")
    monkeypatch.setattr("rlhf_zoo.pipeline.new.recipe.best_device", lambda: torch.device("cuda"))
    there = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr("rlhf_zoo.pipeline.new.recipe.importlib", there)
    needed = {}
    for gib in (1, 0.00005):
        made = make_recipe(RecipeRequest("base", prompts="trl-lib/tldr", rewards=["length"], gib=gib), title="mine")
        needed[gib] = {name: yaml.safe_load(text) for name, text in made.files.items()}
        assert needed[gib]["recipe.yaml"]["evaluation"]["judge"] == "rule:length(unit='words')"
        why = next(reason for setting, _, reason in made.decisions if setting == "judge")
        assert "the reward itself shows that training worked, not that answers got better" in why
        assert "# their sum is the reward" in made.files["ppo.yaml"] and "added to" not in made.files["ppo.yaml"]
    assert not {"use_peft", "dtype", "optim"} & needed[1]["ppo.yaml"].keys()
    for stage in ("sft", "ppo"):
        keys = needed[0.00005][f"{stage}.yaml"]
        assert (keys["use_peft"], keys["dtype"], keys["optim"], keys["bf16"]) == (True, "bfloat16", "adamw_8bit", None)
    sizes = needed[0.00005]["ppo.yaml"]
    assert sizes["max_rollout_batch_tokens"] == sizes["max_prompt_length"] + sizes["response_length"]
    assert "max_rollout_batch_tokens" not in needed[1]["ppo.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--preferences", "trl-lib/tldr"],
            "has the columns prompt, completion, but preferences need the columns chosen",
        ),
        (["--preferences", "asked"], "has the columns prompt, but preferences need the columns chosen and rejected"),
        (["--preferences", "trl-lib/ultrafeedback_binarized"], "has no chat template: use a model"),
        (
            ["--prompts", "trl-lib/tldr"],
            "There is neither preference data nor a reward: pass --preferences or --reward.",
        ),
        (["--reward", "numeric_match"], "There are no prompts for PPO: pass --prompts"),
        (
            ["--prompts", "trl-lib/tldr", "--reward", "numeric_mach"],
            "nor a repository, did you mean 'numeric_match'?",
        ),
        (
            ["--prompts", "asked", "--reward", "length"],
            ", but SFT reads messages, prompt and completion, or text: pass",
        ),
        (["--preferences", "trl-lib/tldr", "--judge", "clasifier"], "clasifier"),
        (
            ["--preferences", "trl-lib/ultrafeedback_binarized", "--columns", "{chosen: chsen}"],
            "--columns maps chosen to 'chsen', but the data have no such column, did you mean 'chosen'?",
        ),
        (["--preferences", "torn"], "torn has nothing in the column 'chosen': correct it, or remove the row."),
        (["--preferences", "empty"], "empty cannot be loaded: train.jsonl is empty: add rows."),
        (["--preferences", "broken"], "broken cannot be loaded: line 2 of train.jsonl is not JSON ("),
        (
            ["--preferences", "mixed"],
            "mixed has a conversation, and row 0 a text, in the column 'prompt': correct it",
        ),
        (["--preferences", "nowhere"], "The data set nowhere is neither a folder nor a file, and cannot be found"),
        (["--preferences", "notes.txt"], "notes.txt is read as JSON lines, but does not have the ending .jsonl"),
        (["--preferences", "latin.jsonl"], "line 2 of latin.jsonl is not UTF-8; convert the file."),
        (
            ["--prompts", "same", "--reward", "length"],
            "same has 1 different prompts that are short enough, but some are held out",
        ),
        (
            ["--preferences", "trl-lib/ultrafeedback_binarized", "--columns", "{chosen:better}"],
            "--columns names 'chosen:better', which no stage reads: YAML needs a space after a colon.",
        ),
    ],
)
def test_what_no_recipe_can_be_made_of_is_said_and_nothing_written(words: list[str], said: str) -> None:
    on_disk("Pythia", "trl-lib/tldr", "trl-lib/ultrafeedback_binarized")
    schemas.write_data(Path("asked"), [{"prompt": f"what is {row}"} for row in range(24)])
    pairs = [{"prompt": f"what is {row}", "chosen": "a", "rejected": "b"} for row in range(24)]
    schemas.write_data(Path("torn"), [*pairs[:3], {**pairs[3], "chosen": None}, *pairs[4:]])
    for name, lines in (("empty", ""), ("broken", '{"prompt": "a"}\n{"prompt": \n')):
        Path(name).mkdir()
        Path(name, "train.jsonl").write_text(lines)
    Path("latin.jsonl").write_bytes(b'{"chosen": "a", "rejected": "b"}\n{"chosen": "caf\xe9", "rejected": "b"}\n')
    schemas.write_data(Path("same"), [{"prompt": "what is it", "completion": f"{row}"} for row in range(24)])
    Path("notes.txt").write_text("Chosen and rejected.\n")
    turns = [{"role": "user", "content": "what"}]
    schemas.write_data(Path("mixed"), [*pairs[:3], {**pairs[3], "prompt": turns}, *pairs[4:]])
    with pytest.raises(ZooError, match=re.escape(said)):
        zoo("new", "mine", "--model", "base", *words)
    assert not Path("mine").exists()


def test_it_writes_over_nothing() -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(ZooError, match="mine already exists and is not empty"):
        zoo("new", "mine", "--model", "base", "--preferences", "trl-lib/tldr-preference")


@pytest.mark.full
def test_memory_is_that_of_the_planner_as_the_page_says(
    capsys: pytest.CaptureFixture[str], untraced: pytest.MonkeyPatch
) -> None:
    """Qwen3-0.6B by its own numbers, without its weights."""
    on_disk("Qwen3", "trl-lib/ultrafeedback_binarized")
    Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=True,
    ).save_pretrained("base")  # fmt: skip
    facts = inspect_model("base")
    assert (facts.parameters, facts.kv_values) == (596_049_920, 57_344)
    zoo("new", "mine", "--model", "base", "--preferences", "trl-lib/ultrafeedback_binarized", "--memory", "80")
    assert "Plan for GPU (80 GiB): sft " in capsys.readouterr().out
    untraced.undo()
    made = load_recipe("mine")
    flags = {"ppo": {"response_length": 256, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}}
    adapter = {"use_peft": True, "lora_r": 16, "lora_target_modules": facts.target_names}
    columns = []
    for more in ({}, adapter):
        own = {"ppo": {**flags["ppo"], **more}}
        [plan] = make_plan(
            made, parse_device("80gb"), own, prompt_length=512, stages=["ppo"], suggest_changes=False
        ).stages
        columns.append({**{name: one.total for name, one in plan.models.items()}, "at most, in the update": plan.peak})
    for what in columns[0]:
        row = f"| {what} | {columns[0][what] / GIB:.2f} | {columns[1].get(what, 0) / GIB:.2f} |"
        assert row in PAGE, row


def instruct(folder: Path) -> Path:
    """A chat model whose tokenizer pads with EOS, as many instruct models have it."""
    miniatures.save("Qwen2.5", folder)
    file = folder / "tokenizer_config.json"
    keys = json.loads(file.read_text())
    file.write_text(json.dumps({**keys, "pad_token": keys["eos_token"]}))
    return folder


def test_prompts_and_a_reward_start_ppo_from_the_model_itself(capsys: pytest.CaptureFixture[str]) -> None:
    instruct(Path("base"))
    schemas.write_data(Path("asked"), [{"prompt": f"What is {row}?"} for row in range(80)])
    zoo("new", "mine", "--model", "base", "--prompts", "asked", "--reward", "length")
    keys = recipe()
    assert keys.keys() == {"recipe", "ppo"}
    assert keys["ppo"]["model_name_or_path"] == os.path.abspath("base") and keys["recipe"]["conversational"]
    assert keys["recipe"]["description"] == "PPO from base on asked.", "no path of this machine on a card"
    assert keys["ppo"]["pad_token"] != json.loads(Path("base/tokenizer_config.json").read_text())["eos_token"]
    assert f"PPO uses {keys['ppo']['pad_token']}, because PAD must differ from EOS" in capsys.readouterr().out
    zoo("recipes", "validate", "mine")
    context = RunContext(
        recipe=load_recipe("mine"), directory=Path("run"), hub=Hub("other", "http://127.0.0.1:9", "a test"),
        namespace="local", publish=False,
    )  # fmt: skip
    assert not [row for row in examine(context) if row.status == FAILED]


def test_a_gguf_file_is_a_model_like_any_other(
    capsys: pytest.CaptureFixture[str], untraced: pytest.MonkeyPatch
) -> None:
    untraced.undo()
    file = write_gguf(Path())
    schemas.write_data(Path("asked"), [{"prompt": f"the {row}"} for row in range(80)])
    zoo("new", "mine", "--model", str(file), "--prompts", "asked", "--reward", "length")
    keys = recipe()
    assert keys["ppo"]["model_name_or_path"] == os.path.abspath(file) and keys["recipe"]["license"] == "mit"
    zoo("recipes", "validate", "mine")
    zoo("plan", "mine", "--gpu", "24gb")
    assert "ppo" in capsys.readouterr().out


def test_a_name_from_the_data_prints_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    miniatures.save("GPT-2", Path("base"))
    column = "text\nreward_funcs: [evil]\x1b[2J"
    schemas.write_data(Path("texts"), [{column: f"one two three {row}", "text": "a"} for row in range(80)])
    zoo(
        "new",
        "mine",
        "--model",
        "base",
        "--prompts",
        "texts",
        "--reward",
        "length",
        "--columns",
        json.dumps({"prompt": column}),
    )
    shown = capsys.readouterr().out
    assert "prompt from text reward_funcs: [evil]\\x1b[2J" in shown and "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("reward_funcs: [evil]")]


def test_prompts_are_cut_by_a_placeholder() -> None:
    miniatures.save("GPT-2", Path("base"))
    schemas.write_data(Path("texts"), [{"text": f"one two three four five six {row} eight"} for row in range(80)])
    words = ["new", "mine", "--model", "base", "--prompts", "texts", "--reward", "length", "--columns"]
    with pytest.raises(ZooError, match=r"--columns maps prompt to '\{txt:3 words\}', but the data have no such column"):
        zoo(*words, "{prompt: '{txt:3 words}'}")
    zoo(*words, "{prompt: '{text:7 words}'}")
    assert recipe()["ppo"]["columns"] == {"prompt": "{text:7 words}"} and "columns" not in recipe()["sft"]
    zoo("recipes", "validate", "mine")


def test_on_a_cpu_updates_and_the_run_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M by its own numbers, without its weights."""
    instruct(Path("base"))
    LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ).save_pretrained("base")  # fmt: skip
    schemas.write_data(Path("asked"), [{"prompt": f"What is {row}?"} for row in range(8000)])
    words = ["--model", "base", "--prompts", "asked", "--reward", "length"]
    zoo("new", "here", *words)
    shown = capsys.readouterr().out
    keys = recipe("here")["ppo"]
    assert keys["critic"] == "shared" and keys["response_length"] == 64, shown
    rollout = keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"]
    [plan] = re.findall(r"about ([\d.]+) s per PPO update", shown)
    assert rollout >= 8 and (float(plan) <= 60 or rollout == 8), shown
    assert float(plan) * keys["total_episodes"] / rollout <= 7200 * 1.01
    zoo("new", "there", *words, "--memory", "24")
    keys = recipe("there")["ppo"]
    assert "critic" not in keys and (keys["response_length"], keys["total_episodes"]) != (64, 0)
    assert keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] == 64
