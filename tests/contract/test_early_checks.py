"""Mistakes that can be found before training are reported before training, quickly and by name."""

import http.server
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import toy_run
import yaml
from card_run import head_and_body, make_runs
from miniatures import save, save_two_label_classifier
from safetensors.torch import load_file, save_file
from schemas import make_recipe, rows_of, write_data
from thread_hub import ThreadHub
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import reload_clients
from rlhf_zoo.pipeline.run_recipe import run_stage
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.settings import loading

pytestmark = pytest.mark.usefixtures("quick_plots", "no_plots")


def save_reward_model(folder: Path, base: Path) -> Path:
    """Saves a reward model with one output, and the tokenizer of `base`."""
    config = AutoConfig.from_pretrained(base, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


UNREACHABLE_HUB = "http://127.0.0.1:9"


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for name in [name for name in os.environ if name.startswith("HF_") and name != "HF_HUB_DISABLE_XET"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> None:
        before = dict(os.environ)  # a command that opens a Hub changes it
        try:
            cli.main(list(words), prog_name="rlhf-zoo", standalone_mode=False)
        finally:
            os.environ.clear()
            os.environ.update(before)
            reload_clients()

    return run


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """Writes the recipe `mine`, which starts from a model in a folder; returns that folder."""
    base = save("Qwen3", tmp_path / "base")
    make_recipe(tmp_path, "trl-lib/ultrafeedback_binarized", "conversational", base=base)
    return base


def make_hub_recipe(folder: Path, **keys: object) -> None:
    """Writes the recipe `mine`, whose data and model are named on a Hub."""
    recipe = make_recipe(folder, "trl-lib/ultrafeedback_binarized", "conversational", base="maker/base")
    for name, extra_keys in {"recipe": {"dataset_name": "maker/pairs"}, **keys}.items():
        file = recipe / f"{name}.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | dict(extra_keys)))


def test_validate_lists_unchecked_items_when_hub_is_unreachable(
    zoo: Callable[..., None], tmp_path: Path, capsys
) -> None:
    make_hub_recipe(tmp_path)
    started = time.monotonic()
    for option, name in (("--source_hub", f"the source {UNREACHABLE_HUB}"), ("--hub", UNREACHABLE_HUB)):
        zoo("recipes", "validate", "mine", option, UNREACHABLE_HUB)
        output = capsys.readouterr().out
        assert output.startswith(
            "mine is valid: sft, reward, ppo.\nNot checked: the columns of maker/pairs, the context of"
        )
        assert f"which {name} does not show (it does not answer: " in output
        assert output.endswith(f"; name another Hub with {option}.\n")
    assert time.monotonic() - started < 40, "the client's own retries take 35 s each"


@pytest.mark.usefixtures("untraced")
def test_plan_and_validate_read_from_the_hubs_of_run(
    zoo: Callable[..., None], tmp_path: Path, capsys, thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hub_recipe(tmp_path, recipe={})
    base, api = save("Qwen3", tmp_path / "base"), thread_hub.api()
    api.create_repo("maker/base")
    api.upload_folder(repo_id="maker/base", folder_path=base)
    named_hubs = (
        ["--source_hub", thread_hub.url],
        ["--hub", "local", "--source_hub", thread_hub.url],
        ["--hub", thread_hub.url, "--source_hub", "none"],
        [],
    )
    for hubs in named_hubs:
        if not hubs:
            monkeypatch.setenv("RLHF_ZOO_SOURCE_HUB", thread_hub.url)
        zoo("plan", "mine", "--gpu", "cpu", "--prompt_length", "8", "--json", *hubs)
        plan = json.loads(capsys.readouterr().out)
        assert [stage["stage"] for stage in plan["stages"]] == ["sft", "reward", "ppo"]
        zoo("recipes", "validate", "mine", *hubs)
        assert capsys.readouterr().out == "mine is valid: sft, reward, ppo.\n", "nothing was left unchecked"
    monkeypatch.delenv("RLHF_ZOO_SOURCE_HUB")
    with pytest.raises(ZooError, match=r"^The model maker/base cannot be found on the embedded Hub"):
        zoo("plan", "mine", "--gpu", "cpu", "--source_hub", "none")


def test_validate_reports_hub_that_answers_503(zoo: Callable[..., None], tmp_path: Path, capsys) -> None:
    class Unavailable(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    make_hub_recipe(tmp_path)
    try:
        zoo("recipes", "validate", "mine", "--source_hub", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
    assert "does not show (it does not answer: 503 Service Unavailable)" in capsys.readouterr().out


def test_validate_counts_rows_cut_by_max_length(zoo: Callable[..., None], base_model: Path, capsys) -> None:
    zoo("recipes", "validate", "mine", "--sft.max_length", "4")
    assert "\nThe stage sft: max_length, 4, cuts 24 of 24 rows; 24 of them keep no" in capsys.readouterr().out
    zoo("recipes", "validate", "mine", "--sft.max_length", "512")
    assert "max_length" not in capsys.readouterr().out


def test_validate_rejects_missing_package(
    zoo: Callable[..., None], base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_find_spec = loading.importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else original_find_spec(name)
    )
    with pytest.raises(ZooError, match="load_in_4bit of the stage sft needs bitsandbytes, which is not installed"):
        zoo("recipes", "validate", "mine", "--sft.load_in_4bit", "true", "--sft.use_peft", "true")


def test_sft_rejects_changed_base_weights(zoo: Callable[..., None], base_model: Path, tmp_path: Path) -> None:
    hub = ThreadHub(tmp_path / "hub")
    train = ("sft", "mine", "--max_steps", "1", "--hub", hub.url, "--source_hub", "none")
    try:
        zoo(*train)
        parent = json.loads(Path("runs/mine/sft/run.json").read_text())["parents"]["base"]
        assert parent["folder"] == "base" and len(parent["files"]) == 64
        zoo(*train)
        file = base_model / "model.safetensors"
        save_file({name: weight + 1 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
        with pytest.raises(ZooError, match=r"The base model in .*base has changed since this run started with it"):
            zoo(*train)
    finally:
        hub.close()


#: Like Gemma's template: no system turn, and user and assistant alternate.
STRICT = (
    "{%- for m in messages %}{%- if m.role != ('user' if loop.index0 is even else 'assistant') %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("flags", "split", "stage", "template_source"),
    [
        ("", "train", "sft", "base"),
        ("--sft.dataset_test_split test --sft.held_out_share none", "test", "sft", "file"),
        ("--reward.dataset_test_split test --reward.held_out_share none", "test", "reward", "model"),
        ("--reward.dataset_validation_split test", "test", "reward", "base"),
        ("", "train", "ppo", "file"),
        ("--ppo.dataset_test_split test --ppo.held_out_share none", "test", "ppo", "base"),
        ("--evaluation.dataset_test_split test", "test", "ppo", "base"),
    ],
)
def test_run_names_row_that_chat_template_rejects(
    zoo: Callable[..., None], base_model: Path, flags: str, split: str, stage: str, template_source: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.chat_template = STRICT
    path = {"file": "strict.jinja", "model": "other"}.get(template_source)
    template_flags = ("--sft.chat_template_path", path) if path else ()
    if template_source == "base":
        tokenizer.save_pretrained(base_model)
    elif template_source == "model":
        tokenizer.save_pretrained(save("Qwen3", Path("other")))
    Path("strict.jinja").write_text(STRICT)
    rows = rows_of("trl-lib/ultrafeedback_binarized")
    write_data(Path("bad"), rows, ("train", "test"))
    for side in ("chosen", "rejected"):
        rows[5][side].insert(0, {"role": "system", "content": "be kind"})
    (Path("bad") / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = (
        rf"Row 5 of the split {split} of bad \(stage {stage}\) cannot be rendered \(.*how is item 5.*must alternate"
    )
    with pytest.raises(ZooError, match=message):
        zoo("run", "mine", f"--{stage}.dataset_name", "bad", *flags.split(), *template_flags, "--hub", UNREACHABLE_HUB)
    assert not list(Path("runs").glob("*/*/checkpoint-*"))


def test_reward_stage_centers_scores_on_prompts_of_pairs(zoo: Callable[..., None], base_model: Path) -> None:
    """In a recipe with only SFT and reward stages, scores are centered over samples on the prompts of the pairs."""
    Path("mine/ppo.yaml").unlink()
    zoo("run", "mine", "--hub", UNREACHABLE_HUB, "--source_hub", "none")
    record = json.loads(Path("runs/mine/reward/run.json").read_text())
    assert record["status"] == "finished" and record["reward_model"]["score_std"] > 0


def test_run_rejects_missing_preference_before_sft(zoo: Callable[..., None], base_model: Path) -> None:
    for preference, message in (("none", "simulated_pairs needs `preference`"), ("schemas:nobody", "nobody")):
        flags = ("--reward.simulated_pairs", "4", "--reward.preference", preference)
        with pytest.raises(ZooError, match=message):
            zoo("run", "mine", *flags, "--hub", UNREACHABLE_HUB)
    assert not Path("runs/mine/sft/run.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "response_length 120",
            r"^response_length .* is 120, .* reads 128: lower .*, or set max_prompt_length to at most 8",
        ),
        (
            "max_prompt_length 3",
            r"^max_prompt_length of the stage ppo is 3, but the shortest of \d+ prompts has \d+ tokens",
        ),
        (
            "reward_model_path who/knows",
            f"^The Hub {UNREACHABLE_HUB} cannot be reached .*, so the model who/knows cannot be looked up",
        ),
        ("value_model_name_or_path who/knows", "so the model who/knows cannot be looked up: check the network"),
    ],
)
def test_run_rejects_lengths_and_models_that_do_not_fit(
    zoo: Callable[..., None], base_model: Path, flags: str, message: str
) -> None:
    with pytest.raises(ZooError, match=message):
        zoo("run", "mine", "--hub", UNREACHABLE_HUB, "--source_hub", "none", *f"--ppo.{flags}".split())
    assert not Path("runs/mine/sft").exists()


def test_sft_rejects_tokenizer_larger_than_embeddings(zoo: Callable[..., None], base_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.add_tokens(["one more", "and one"])
    tokenizer.save_pretrained(base_model)
    with pytest.raises(ZooError, match=r"base has \d+ embedding rows, but its tokenizer has the token \d+"):
        zoo("sft", "mine", "--hub", UNREACHABLE_HUB, "--source_hub", "none")
    assert not Path("runs/mine/sft/run.json").exists()


SPLIT = "has no split 'held', only 'train': set .*"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            '--reward.columns {"chosn":"chosen"}',
            r"`columns` for .* has the key 'chosn', which nothing reads, did you mean 'chosen'\?",
        ),
        ('--sft.columns {"messages":"choosen"}', "has no column 'choosen', only 'chosen', 'rejected'"),
        ("--sft.dataset_test_split test", "set dataset_test_split to null"),
        ("--ppo.reward_model_path two", "two has 2 outputs, .*, one of bad, good"),
        ("--ppo.reward_model_path two --ppo.reward_label goood", "no label 'goood', did you mean 'good'"),
        ("--ppo.reward_label good", "of the stage reward has a single output, so the label 'good' does not apply"),
        ("--evaluation.judge reward:two", "The judge reward:two has 2 outputs, but a judge has one: name the label"),
        ("--sft.dataset_test_split held --sft.held_out_share none", rf"{SPLIT} of the stage sft\."),
        ("--reward.dataset_test_split held --reward.held_out_share none", rf"{SPLIT} of the stage reward\."),
        ("--reward.dataset_validation_split held", rf"{SPLIT} of the stage reward\."),
        ("--ppo.dataset_test_split held --ppo.held_out_share none", rf"{SPLIT} of the stage ppo\."),
        ("--evaluation.dataset_test_split held", rf"{SPLIT} of the evaluation\."),
        (
            "--sft.eval_strategy steps --sft.eval_steps 1 --sft.held_out_share none",
            "eval_strategy of the stage sft is steps, but nothing is held out to evaluate on",
        ),
    ],
)
def test_validate_rejects_settings_that_would_fail_in_training(
    zoo: Callable[..., None], base_model: Path, flags: str, message: str
) -> None:
    save_two_label_classifier(Path("two"), base_model)
    with pytest.raises(ZooError, match=message):
        zoo("recipes", "validate", "mine", *flags.split())


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        ("reward", {"margin": None}, r"Row 7 .*margin"),
        ("reward", {"margin": "much"}, r"Row 7 .*margin"),
        ("reward", {"rejected": None}, r"Row 7 .*rejected"),
        ("sft", {"chosen": "well"}, r"Row 7 .*messages"),
        ("sft", {"chosen": "[]"}, r"Row 7 .*messages"),  # `datasets` reads it as JSON
    ],
)
def test_validate_and_run_reject_invalid_late_row(
    zoo: Callable[..., None], base_model: Path, stage: str, change: dict[str, object], message: str
) -> None:
    rows = [{**row, "margin": 1.0} for row in rows_of("trl-lib/ultrafeedback_binarized")]
    rows[7] |= change
    Path("late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (f"--{stage}.dataset_name", "late.jsonl")
    with pytest.raises(ZooError, match=message):
        zoo("recipes", "validate", "mine", *flags)
    with pytest.raises(ZooError, match=message):
        zoo("run", "mine", *flags, "--hub", UNREACHABLE_HUB)
    assert not Path("runs/mine/sft/checkpoint-1").exists() and not list(Path("runs").rglob("*.safetensors"))


@pytest.mark.parametrize(("stage", "key"), [("sft", "model_name_or_path"), ("reward", "reward_model_path")])
def test_recipe_without_stage_that_ppo_starts_from_is_rejected(
    zoo: Callable[..., None], base_model: Path, stage: str, key: str
) -> None:
    Path("mine", f"{stage}.yaml").unlink()
    message = (
        f"starts from the model of the stage {stage}, but the recipe mine has no {stage}.yaml: add that file, or name "
        f"another model by {key}"
    )
    for words in (["recipes", "validate", "mine"], ["run", "mine", "--hub", "local"]):
        with pytest.raises(ZooError, match=message):
            zoo(*words)


def test_reward_model_padding_with_eos_needs_reward_pad_token(zoo: Callable[..., None], base_model: Path) -> None:
    """Rejected before SFT trains, as a reward model and as a judge; the key fixes it."""
    reward_model = save_reward_model(Path("paid"), base_model)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(reward_model)
    arguments = ("mine", "--ppo.reward_model_path", "paid")
    key = "--ppo.reward_pad_token"
    for words in (["recipes", "validate", *arguments], ["run", *arguments, "--hub", UNREACHABLE_HUB]):
        with pytest.raises(ZooError, match=r"reward model paid pads with its EOS.*set reward_pad_token"):
            zoo(*words)
        with pytest.raises(ZooError, match=r"reward_pad_token is '<none>', which the tokenizer of .* does not have"):
            zoo(*words, key, "<none>")
        with pytest.raises(ZooError, match=r"reward_pad_token is '.*', which is also the EOS of"):
            zoo(*words, key, tokenizer.eos_token)
    with pytest.raises(ZooError, match=r"judge reward:paid pads with its EOS"):
        zoo("recipes", "validate", "mine", "--evaluation.judge", "reward:paid")
    zoo("recipes", "validate", *arguments, key, "<|fim_pad|>")
    assert not Path("runs/mine/sft").exists()


def test_run_rejects_truncated_reward_model(zoo: Callable[..., None], base_model: Path) -> None:
    weights = save_reward_model(Path("paid"), base_model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ZooError, match=r"paid/model\.safetensors is truncated or damaged"):
        zoo("run", "mine", "--ppo.reward_model_path", "paid", "--hub", UNREACHABLE_HUB)
    assert not Path("runs/mine/sft").exists()


def test_validate_rejects_reward_model_with_too_few_embeddings(zoo: Callable[..., None], base_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_reward_model(Path("paid"), base_model))
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained("paid")
    with pytest.raises(ZooError, match=r"reward model paid has ids up to .*, but its config.json has vocab_size"):
        zoo("recipes", "validate", "mine", "--ppo.reward_model_path", "paid")


def test_validate_accepts_reward_label_and_eval_strategy(zoo: Callable[..., None], base_model: Path) -> None:
    save_two_label_classifier(Path("two"), base_model)
    zoo("recipes", "validate", "mine", "--ppo.reward_model_path", "two", "--ppo.reward_label", "good")
    zoo("recipes", "validate", "mine", "--sft.eval_strategy", "steps", "--sft.eval_steps", "1")


def test_ppo_warns_that_evaluation_would_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy_run.make_recipe(tmp_path)
    toy_run.save_start(tmp_path)
    context = replace(toy_run.make_context(tmp_path), flags={"recipe": {"evaluation.prompts": 10_000}})
    assert run_stage(context, "ppo")
    assert f"`rlhf-zoo eval {tmp_path}/toy` would fail: The test split has " in caplog.text


def test_bf16_is_off_when_machine_lacks_it(tmp_path: Path) -> None:
    assert PPOConfig(output_dir=str(tmp_path), bf16=None, use_cpu=True).bf16 is False


def test_card_reports_truncated_reward_texts_and_all_ties(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs")
    plain_body = head_and_body(make_card(runs / "ppo"))[1]
    assert "read only the end" not in plain_body and "All comparisons were ties" not in plain_body
    run, evaluation = runs / "ppo/run.json", runs / "eval/evaluation.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"reward_cut": 1234}))
    results = json.loads(evaluation.read_text())
    results["win_rate"]["ties"], results["judge"]["name"] = 1.0, "same labels"
    evaluation.write_text(json.dumps(results))
    body = head_and_body(make_card(runs / "ppo"))[1]
    assert "**The reward model read only the end** of at least 1234 training texts" in body
    assert "**All comparisons were ties: the judge cannot tell the two policies apart.**" in body
    assert "It is not the reward that PPO was trained on." in plain_body
    assert "It is not the reward that PPO was trained on." not in body
