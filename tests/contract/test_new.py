"""`rlhf-zoo new`: a recipe for any model and for data of common formats, which is valid without an edit."""

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
from rlhf_zoo.pipeline.plan.result import Plan
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import load_recipe

BY_LENGTH = 'rule:length(unit="words")'
PAGE = (Path(__file__).parents[2] / "docs/your-model.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


@pytest.fixture(autouse=True)
def without_tracing(untraced: pytest.MonkeyPatch) -> None:
    """Skips tracing, which takes four fifths of the time of `new`."""


def zoo(*words: str) -> None:
    cli.cli.main(list(words), standalone_mode=False)


def read_recipe(name: str = "mine") -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.safe_load(path.read_text()) for path in Path(name).glob("*.yaml")}


def run_context() -> RunContext:
    hub = Hub("other", "http://127.0.0.1:9", "a test")
    return RunContext(recipe=load_recipe("mine"), directory=Path("run"), hub=hub, namespace="local", publish=False)


def save_model_and_data(family: str, *names: str) -> None:
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
def test_new_from_preferences_writes_recipe_that_passes_doctor(
    family: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model_and_data(family, name)
    zoo("new", "mine", "--model", "base", "--preferences", name)
    output = capsys.readouterr().out
    keys = read_recipe()
    assert keys.keys() == {"recipe", "sft", "reward", "ppo"}
    assert keys["sft"]["columns"] == PREFERENCES[name] and "same-labels (no judge was given" in output
    assert (keys["recipe"]["evaluation"]["judge"], keys["reward"]["judge_share"]) == ("same-labels", 0.3)
    assert ("TOO FEW FOR A VERDICT" in output) == (keys["recipe"]["evaluation"]["prompts"] < 20)
    is_chat = miniatures.FAMILIES[family].template is not None and name != "Anthropic/hh-rlhf"
    assert bool(keys["recipe"].get("conversational")) == (is_chat and name == "trl-lib/tldr-preference")
    assert keys["recipe"].get("chat_template_kwargs") == ({"enable_thinking": False} if family == "Qwen3" else None)
    zoo("recipes", "validate", "mine")
    # Checks that need a trained SFT policy are skipped; nothing fails.
    findings = [row for row in examine(run_context()) if row.check in ("keys", "columns", "prompts", "batch")]
    assert len(findings) == 4 and not [finding for finding in findings if finding.status == FAILED], findings
    for path in Path("mine").glob("*.yaml"):  # a comment on each key, or on the one that it follows
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert sum("  # " in line for line in lines) > 0.6 * len(lines), path
        assert path.read_text().startswith("# ")


@pytest.mark.parametrize(("prompts", "few"), [(240, True), (408, False)])
def test_new_warns_of_few_evaluation_prompts(prompts: int, few: bool, capsys: pytest.CaptureFixture[str]) -> None:
    save_model_and_data("GPT-2")
    rows = [{"prompt": f"what is {row}", "completion": f"{row}"} for row in range(prompts)]
    schemas.write_data(Path("asked"), rows)
    zoo("new", "mine", "--model", "base", "--prompts", "asked", "--reward", "length")
    output = capsys.readouterr().out
    part = {240: 46, 408: 77}[prompts]
    assert (
        f"no stage trains on {2 * part} of {prompts} prompts: {part} to monitor training and {part} to evaluate, of "
        f"which the evaluation uses {prompts // 8}" in output
    )
    assert "TOO FEW" not in output
    assert ("FEW: below 50 only large effects can be found" in output) == few


def test_new_accepts_json_lines_file(tmp_path: Path) -> None:
    save_model_and_data("Llama 3", "trl-lib/tldr-preference")
    file = next(Path("trl-lib/tldr-preference").rglob("train.jsonl")).rename("pairs.jsonl")
    zoo("new", "mine", "--model", "base", "--preferences", str(file))
    keys = read_recipe()
    assert keys["recipe"]["dataset_name"] == str(tmp_path / "pairs.jsonl")
    assert keys["ppo"]["dataset_train_split"] == "train" and keys["ppo"]["held_out_share"]
    zoo("recipes", "validate", "mine")


def test_new_with_verifiable_reward_uses_it_as_judge(capsys: pytest.CaptureFixture[str]) -> None:
    save_model_and_data("Qwen2.5", "openai/gsm8k")
    zoo("new", "mine", "--model", "base", "--prompts", "openai/gsm8k", "--reward", "numeric_match")
    keys = read_recipe()
    assert keys.keys() == {"recipe", "sft", "ppo"}
    assert keys["sft"]["columns"] == {"prompt": "question", "completion": "answer"}
    assert keys["ppo"]["columns"] == {"prompt": "question"}
    assert (keys["ppo"]["reward_model_path"], keys["ppo"]["reward_funcs"]) == (None, ["numeric_match"])
    assert keys["recipe"]["conversational"] and "is its own judge" in capsys.readouterr().out
    zoo("recipes", "validate", "mine")


def test_new_guesses_reward_label_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    save_model_and_data("Qwen3", "trl-lib/tldr")
    miniatures.save_two_label_classifier(Path("two"), Path("base"))
    words = ["--model", "base", "--prompts", "trl-lib/tldr", "--reward", "two"]
    zoo("new", "mine", *words, "--judge", BY_LENGTH)
    assert re.search(r"reward_label: good \(GUESSED: the last of bad, good", capsys.readouterr().out)
    assert read_recipe()["ppo"]["reward_label"] == "good"
    zoo("recipes", "validate", "mine")
    with pytest.raises(ZooError, match=r"The judge reward:\S+/two has 2 outputs, but a judge has one: name"):
        zoo("new", "other", *words, "--judge", "reward:two")


@pytest.mark.parametrize(
    ("name", "is_on_hub"),
    [("maker/model", True), ("maker/model@v1", True), ("./model", False), ("/no/model", False), ("model", False)],
)
def test_request_looks_up_only_hub_names_on_hub(name: str, is_on_hub: bool) -> None:
    request = RecipeRequest(name, prompts="data.jsonl", rewards=["length"])
    assert request.first_hub_name == (name if is_on_hub else None)


def test_new_writes_absolute_paths(monkeypatch: pytest.MonkeyPatch, working_directory: Path) -> None:
    save_model_and_data("GPT-2", "trl-lib/tldr-preference")
    zoo("new", "mine", "--model", "base", "--preferences", "trl-lib/tldr-preference", "--judge", BY_LENGTH)
    keys = read_recipe()
    assert RecipeRequest("base", judge="reward:base").judge == f"reward:{working_directory / 'base'}"
    (working_directory / "elsewhere").mkdir()
    monkeypatch.chdir(working_directory / "elsewhere")
    for name in (keys["sft"]["model_name_or_path"], keys["recipe"]["dataset_name"]):
        assert Path(name).is_dir()


def test_new_counts_rows_up_to_limit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    miniatures.save("GPT-2", Path("base"))
    rows = [{"prompt": f"what is {row}?", "chosen": " yes", "rejected": " no"} for row in range(230)]
    schemas.write_data(Path("pairs"), rows)
    for module in ("data", "recipe"):
        monkeypatch.setattr(f"rlhf_zoo.pipeline.new.{module}.MAX_COUNTED", 220)
    zoo("new", "mine", "--model", "base", "--preferences", "pairs", "--judge", BY_LENGTH)
    assert "at least 220 rows" in " ".join(capsys.readouterr().out.split())


def test_new_allows_responses_twice_as_long_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    miniatures.save("GPT-2", Path("base"))
    for words, expected in ((1, 32), (5, 64), (40, 96)):  # the model reads 128 tokens
        rows = [{"prompt": f"what is {row}?", "chosen": " yes" * words, "rejected": " no"} for row in range(24)]
        schemas.write_data(Path(f"pairs{words}"), rows)
        zoo("new", f"mine{words}", "--model", "base", "--preferences", f"pairs{words}", "--judge", BY_LENGTH)
        assert read_recipe(f"mine{words}")["ppo"]["response_length"] == expected, capsys.readouterr().out


def test_new_maps_columns_of_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    miniatures.save("Qwen3", Path("base"))
    rows = schemas.rows_of("trl-lib/tldr-preference")
    columns = {"prompt": "asked", "chosen": "better", "rejected": "worse"}
    schemas.write_data(Path("pairs"), [{columns[name]: text for name, text in row.items()} for row in rows])
    words = ["new", "mine", "--model", "base", "--preferences", "pairs", "--judge", BY_LENGTH]
    with pytest.raises(ZooError, match=r"name them by --columns '\{chosen: …, rejected: …, prompt: …\}'"):
        zoo(*words)
    for value, message in (
        ("{chosn: better}", "names 'chosn', which no stage reads, did you mean 'chosen'"),
        ("[1]", "it takes"),
    ):
        with pytest.raises(ZooError, match=message):
            zoo(*words, "--columns", value)
    zoo(*words, "--columns", "{prompt: asked, chosen: better, rejected: worse}")
    assert read_recipe()["reward"]["columns"] == columns
    assert read_recipe()["ppo"]["columns"] == {"prompt": "asked"}
    assert read_recipe()["sft"]["columns"] == {"prompt": "asked", "completion": "better"}
    zoo("recipes", "validate", "mine")


def test_new_uses_lora_when_full_weights_do_not_fit(thread_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and data are on a Hub: the recipe pins commits, and names configurations and splits."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", thread_hub.url)
    miniatures.save("GPT-2", Path("base"))
    license_text = "mit\ncorpus: os:system"  # the card's license must not become another key
    Path("base/README.md").write_text(f"---\n{yaml.safe_dump({'license': license_text})}---\n")
    thread_hub.api().create_repo("local/base")
    thread_hub.api().upload_folder(repo_id="local/base", folder_path="base")
    rows = {split: "".join(json.dumps(row) + "\n" for row in schemas.rows_of("trl-lib/tldr")) for split in "ab"}
    pairs = "".join(json.dumps(row) + "\n" for row in schemas.rows_of("trl-lib/tldr-preference"))
    front_matter = {"configs": [
        {"config_name": "lines", "data_files": [{"split": "train", "path": "lines.jsonl"}]},
        {"config_name": "pairs", "data_files": [
            {"split": "train_prefs", "path": "a.jsonl"}, {"split": "test_prefs", "path": "b.jsonl"},
        ]},
    ]}  # fmt: skip
    files = {
        "README.md": f"---\n{yaml.safe_dump(front_matter)}---\n",
        "lines.jsonl": rows["a"],
        "a.jsonl": pairs,
        "b.jsonl": pairs,
    }
    commit = thread_hub.make("data", files, kind="dataset")
    zoo("new", "mine", "--model", "local/base", "--preferences", "local/data", "--memory", "0.0001")
    keys = read_recipe()
    assert keys["sft"]["model_revision"] == thread_hub.api().model_info("local/base").sha
    assert keys["recipe"]["dataset_revision"] == commit
    assert keys["recipe"]["license"] == license_text and "corpus" not in keys["recipe"]
    source_keys = ("dataset_config", "dataset_train_split", "dataset_test_split")
    assert [keys["reward"][key] for key in source_keys] == ["pairs", "train_prefs", "test_prefs"]
    assert [keys["sft"][key] for key in source_keys[:2]] == ["lines", "train"]
    for stage in keys.keys() - {"recipe"}:
        assert keys[stage]["use_peft"] and keys[stage]["dtype"] == "bfloat16" and "optim" not in keys[stage]
    assert sorted(keys["sft"]["lora_target_modules"]) == ["c_attn", "c_fc", "c_proj"]
    zoo("recipes", "validate", "mine")


def test_new_on_gpu_uses_8_bit_optimizer_only_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    save_model_and_data("Qwen3-Base", "trl-lib/tldr")
    monkeypatch.setattr("rlhf_zoo.pipeline.new.recipe.best_device", lambda: torch.device("cuda"))
    fake_importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr("rlhf_zoo.pipeline.new.recipe.importlib", fake_importlib)
    files_by_memory, planned_stages = {}, []

    def counted_plan(*args: Any, stages: Any = None, **kwargs: Any) -> Plan:
        planned_stages.append(stages)
        return make_plan(*args, stages=stages, **kwargs)

    monkeypatch.setattr("rlhf_zoo.pipeline.new.recipe.make_plan", counted_plan)
    for gib in (1, 0.00005):
        request = RecipeRequest("base", prompts="trl-lib/tldr", rewards=["length(unit='tokens')"], gib=gib)
        new_recipe = make_recipe(request, title="mine")
        files_by_memory[gib] = {name: yaml.safe_load(text) for name, text in new_recipe.files.items()}
        assert files_by_memory[gib]["recipe.yaml"]["evaluation"]["judge"] == "rule:length(unit='words')"
        judge_reason = next(reason for setting, _, reason in new_recipe.decisions if setting == "judge")
        assert "the reward itself shows that training worked, not that answers got better" in judge_reason
        assert (
            "# their sum is the reward" in new_recipe.files["ppo.yaml"]
            and "added to" not in new_recipe.files["ppo.yaml"]
        )
    # The other stages are planned once, with the sizes that fit or were tried last.
    assert planned_stages == [["ppo"], None, *6 * [["ppo"]], None]
    publishing = next(reason for setting, _, reason in new_recipe.decisions if setting == "publishing")
    assert f"by `rlhf-zoo hub add {os.path.abspath('base')} NAMESPACE/NAME` and pass that name to `new`" in publishing
    assert "--memory" not in publishing, "the card's memory cannot be raised"
    assert not {"use_peft", "dtype", "optim"} & files_by_memory[1]["ppo.yaml"].keys()
    for stage in ("sft", "ppo"):
        keys = files_by_memory[0.00005][f"{stage}.yaml"]
        assert (keys["use_peft"], keys["dtype"], keys["optim"], keys["bf16"]) == (True, "bfloat16", "adamw_8bit", None)
    sizes = files_by_memory[0.00005]["ppo.yaml"]
    assert sizes["max_rollout_batch_tokens"] == sizes["max_prompt_length"] + sizes["response_length"]
    assert "max_rollout_batch_tokens" not in files_by_memory[1]["ppo.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
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
        (
            ["--preferences", "nowhere"],
            "so the data set nowhere cannot be looked up: check the network, HF_ENDPOINT and --source_hub",
        ),
        (["--preferences", "nope.jsonl"], "There is no file nope.jsonl: check the path after --preferences."),
        (["--preferences", "data/nope.JSONL.gz"], "There is no file data/nope.JSONL.gz: check the path after --pref"),
        (["--preferences", "torn", "--texts", "./nope"], "There is no file or folder ./nope: check the path after --t"),
        (["--preferences", "torn", "--model", "./nope"], "There is no file or folder ./nope: check the path after --m"),
        (["--preferences", "notes.txt"], "notes.txt is read as JSON lines, but does not have the ending .jsonl"),
        (["--preferences", "latin.jsonl"], "line 2 of latin.jsonl is not UTF-8; convert the file."),
        (
            ["--prompts", "same", "--reward", "length"],
            "same has 1: add rows to it, or pass other --prompts.",
        ),
        (
            ["--preferences", "trl-lib/ultrafeedback_binarized", "--columns", "{chosen:better}"],
            "--columns names 'chosen:better', which no stage reads: YAML needs a space after a colon.",
        ),
    ],
)
def test_new_rejects_unusable_input_and_writes_nothing(words: list[str], message: str) -> None:
    save_model_and_data("Pythia", "trl-lib/tldr", "trl-lib/ultrafeedback_binarized")
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
    with pytest.raises(ZooError, match=re.escape(message)):
        zoo("new", "mine", "--model", "base", *words)
    assert not Path("mine").exists()


def test_new_rejects_folder_that_is_not_empty() -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(ZooError, match="mine already exists and is not empty"):
        zoo("new", "mine", "--model", "base", "--preferences", "trl-lib/tldr-preference")


@pytest.mark.full
def test_new_memory_matches_planner_and_docs_page(
    capsys: pytest.CaptureFixture[str], untraced: pytest.MonkeyPatch
) -> None:
    """Uses the configuration of Qwen3-0.6B, without its weights."""
    save_model_and_data("Qwen3", "trl-lib/ultrafeedback_binarized")
    Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=True,
    ).save_pretrained("base")  # fmt: skip
    facts = inspect_model("base")
    assert (facts.parameters, facts.kv_values) == (596_049_920, 57_344)
    zoo("new", "mine", "--model", "base", "--preferences", "trl-lib/ultrafeedback_binarized", "--memory", "80")
    assert "Plan for GPU (80 GiB): sft " in capsys.readouterr().out
    untraced.undo()
    loaded_recipe = load_recipe("mine")
    flags = {"ppo": {"response_length": 256, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}}
    adapter = {"use_peft": True, "lora_r": 16, "lora_target_modules": facts.target_names}
    columns = []
    for extra_flags in ({}, adapter):
        overrides = {"ppo": {**flags["ppo"], **extra_flags}}
        [plan] = make_plan(
            loaded_recipe, parse_device("80gb"), overrides, prompt_length=512, stages=["ppo"], suggest_changes=False
        ).stages
        columns.append(
            {**{name: model.total for name, model in plan.models.items()}, "at most, in the update": plan.peak}
        )
    for part in columns[0]:
        row = f"| {part} | {columns[0][part] / GIB:.2f} | {columns[1].get(part, 0) / GIB:.2f} |"
        assert row in PAGE, row


def save_instruct_model(folder: Path) -> Path:
    """Saves a chat model whose tokenizer pads with EOS, like those of many instruct models."""
    miniatures.save("Qwen2.5", folder)
    file = folder / "tokenizer_config.json"
    keys = json.loads(file.read_text())
    file.write_text(json.dumps({**keys, "pad_token": keys["eos_token"]}))
    return folder


def test_new_from_prompts_and_reward_starts_ppo_from_model(capsys: pytest.CaptureFixture[str]) -> None:
    save_instruct_model(Path("base"))
    schemas.write_data(Path("asked"), [{"prompt": f"What is {row}?"} for row in range(80)])
    zoo("new", "mine", "--model", "base", "--prompts", "asked", "--reward", "length")
    keys = read_recipe()
    assert keys.keys() == {"recipe", "ppo"}
    assert keys["ppo"]["model_name_or_path"] == os.path.abspath("base") and keys["recipe"]["conversational"]
    assert keys["recipe"]["description"] == "PPO from base on asked.", "no path of this machine on a card"
    assert keys["ppo"]["pad_token"] != json.loads(Path("base/tokenizer_config.json").read_text())["eos_token"]
    assert f"PPO uses {keys['ppo']['pad_token']}, because PAD must differ from EOS" in capsys.readouterr().out
    zoo("recipes", "validate", "mine")
    assert not [row for row in examine(run_context()) if row.status == FAILED]


def test_new_accepts_gguf_file(capsys: pytest.CaptureFixture[str], untraced: pytest.MonkeyPatch) -> None:
    untraced.undo()
    file = write_gguf(Path())
    schemas.write_data(Path("asked"), [{"prompt": f"the {row}"} for row in range(80)])
    zoo("new", "mine", "--model", str(file), "--prompts", "asked", "--reward", "length")
    keys = read_recipe()
    assert keys["ppo"]["model_name_or_path"] == os.path.abspath(file) and keys["recipe"]["license"] == "mit"
    zoo("recipes", "validate", "mine")
    zoo("plan", "mine", "--gpu", "24gb")
    assert "ppo" in capsys.readouterr().out


def test_new_escapes_column_names_in_output(capsys: pytest.CaptureFixture[str]) -> None:
    miniatures.save("GPT-2", Path("base"))
    column = "text\nreward_funcs: [evil]\x1b[2J"
    schemas.write_data(Path("texts"), [{column: f"one two three {row}", "text": "a"} for row in range(80)])
    mapping = json.dumps({"prompt": column})
    zoo("new", "mine", "--model", "base", "--prompts", "texts", "--reward", "length", "--columns", mapping)
    output = capsys.readouterr().out
    assert "prompt from text reward_funcs: [evil]\\x1b[2J" in output and "\x1b" not in output
    assert not [line for line in output.splitlines() if line.startswith("reward_funcs: [evil]")]


@pytest.mark.parametrize(("column", "long"), [("text", True), ("text", False), ("prompt", True)])
def test_new_suggests_cutting_long_texts(
    column: str, long: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_zoo.pipeline.new.sizes.MAX_RESPONSE", 32)
    miniatures.save("GPT-2", Path("base"))
    text = "x " * (40 if long else 3)
    schemas.write_data(Path("texts"), [{column: f"{text}{row}", "completion": "y"} for row in range(80)])
    zoo("new", "mine", "--model", "base", "--prompts", "texts", "--reward", "length")
    hint = """LONG, because they are complete texts: --columns '{prompt: "{text:8 words}"}' cuts them"""
    assert (hint in " ".join(capsys.readouterr().out.split())) == (column == "text" and long)


def test_new_truncates_prompts_by_placeholder() -> None:
    miniatures.save("GPT-2", Path("base"))
    schemas.write_data(Path("texts"), [{"text": f"one two three four five six {row} eight"} for row in range(80)])
    words = ["new", "mine", "--model", "base", "--prompts", "texts", "--reward", "length", "--columns"]
    with pytest.raises(ZooError, match=r"--columns maps prompt to '\{txt:3 words\}', but the data have no such column"):
        zoo(*words, "{prompt: '{txt:3 words}'}")
    zoo(*words, "{prompt: '{text:7 words}'}")
    assert read_recipe()["ppo"]["columns"] == {"prompt": "{text:7 words}"} and "columns" not in read_recipe()["sft"]
    zoo("recipes", "validate", "mine")


def test_new_on_cpu_limits_time_of_update_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Uses the configuration of SmolLM2-135M, without its weights."""
    save_instruct_model(Path("base"))
    LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ).save_pretrained("base")  # fmt: skip
    schemas.write_data(Path("asked"), [{"prompt": f"What is {row}?"} for row in range(8000)])
    words = ["--model", "base", "--prompts", "asked", "--reward", "length"]
    zoo("new", "here", *words)
    output = capsys.readouterr().out
    assert "Try next:\n  rlhf-zoo plan here  # " in output and "--gpu" not in output, "this machine has no GPU"
    keys = read_recipe("here")["ppo"]
    assert keys["critic"] == "shared" and keys["response_length"] == 64, output
    rollout = keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"]
    [seconds] = re.findall(r"about ([\d.]+) s per PPO update", output)
    assert rollout >= 8 and (float(seconds) <= 60 or rollout == 8), output
    assert float(seconds) * keys["total_episodes"] / rollout <= 7200 * 1.01
    capsys.readouterr()
    zoo("new", "there", *words, "--memory", "24")
    output = capsys.readouterr().out
    assert "Try next:\n  rlhf-zoo plan there --gpu 24gb  # " in output
    assert " GiB of 22.1 GiB usable; 24 GiB set by --memory)" in output
    keys = read_recipe("there")["ppo"]
    assert "critic" not in keys and (keys["response_length"], keys["total_episodes"]) != (64, 0)
    assert keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"] == 64
