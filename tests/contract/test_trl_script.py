"""examples/trl_ppo.py with the embedded Hub, on tiny models whose PAD id is beyond their embeddings."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hub_fixture import RunningHub
from trainer_fixture import CONTEXT, EOS, LETTERS, good, make_tokenizer, prompt_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

SCRIPT = Path(__file__).parents[2] / "examples" / "trl_ppo.py"
FLAGS = [
    *("--dataset_name", "local/prompts", "--model_name_or_path", "local/sft", "--sft_model_path", "local/sft"),
    *("--reward_model_path", "local/reward", "--output_dir", "out", "--hub_model_id", "local/ppo", "--push_to_hub"),
    *("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2", "--num_mini_batches", "2"),
    *("--num_ppo_epochs", "2", "--total_episodes", "64", "--response_length", "10", "--learning_rate", "3e-3"),
    *("--stop_token", "eos", "--missing_eos_penalty", "1.0", "--num_sample_generations", "1"),
    *("--per_device_eval_batch_size", "4", "--report_to", "tensorboard", "--use_cpu", "--disable_tqdm", "True"),
]
UPDATES = 64 // 16


def tokenizer_without_pad() -> PreTrainedTokenizerBase:
    """Like GPT-2's tokenizer: the script has to add a PAD, whose id is the first beyond the embeddings."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def gpt2(kind: type[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, seed: int, **fields: int) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2,
        eos_token_id=EOS, bos_token_id=None, **fields,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(config)


@pytest.fixture(scope="module")
def hub_with_models(shared_hub: RunningHub, tmp_path_factory: pytest.TempPathFactory) -> RunningHub:
    """A Hub with local/sft, local/reward and local/prompts."""
    folder, api, tokenizer = tmp_path_factory.mktemp("tiny"), shared_hub.api(), tokenizer_without_pad()
    models = {
        "sft": gpt2(GPT2LMHeadModel, tokenizer, 0),
        "reward": gpt2(GPT2ForSequenceClassification, tokenizer, 1, num_labels=1),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        api.create_repo(f"local/{name}")
        api.upload_folder(repo_id=f"local/{name}", folder_path=folder / name)
    prompt_rows(40).to_json(folder / "train.jsonl")
    api.create_repo("local/prompts", repo_type="dataset")
    api.upload_file(
        repo_id="local/prompts", repo_type="dataset", path_or_fileobj=folder / "train.jsonl", path_in_repo="train.jsonl"
    )
    return shared_hub


def test_script_trains_and_pushes_loadable_models(hub_with_models: RunningHub, tmp_path: Path) -> None:
    output = hub_with_models.run(sys.executable, str(SCRIPT), *FLAGS, cwd=tmp_path)
    out = tmp_path / "out"

    state = json.loads((out / f"checkpoint-{UPDATES}" / "trainer_state.json").read_text())
    lines = [line for line in state["log_history"] if "objective/kl" in line]
    assert [line["step"] for line in lines] == list(range(1, UPDATES + 1))
    assert all(math.isfinite(line["objective/score"]) and math.isfinite(line["objective/kl"]) for line in lines)
    # The run starts at its reference, up to float32 rounding over ten tokens; then it moves away.
    assert abs(lines[0]["objective/kl"]) < 1e-5 < 1e-2 < lines[-1]["objective/kl"]
    assert "'objective/score'" in output and list(out.glob("runs/*/events.out.tfevents.*"))

    pulled, sft_folder = (
        hub_with_models.api().snapshot_download(f"local/{name}", local_dir=tmp_path / name) for name in ("ppo", "sft")
    )
    policy, sft = AutoModelForCausalLM.from_pretrained(pulled), AutoModelForCausalLM.from_pretrained(sft_folder)
    trained = policy.state_dict()
    assert all(not torch.equal(trained[name], weight) for name, weight in sft.state_dict().items() if "mlp" in name)
    saved = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(trained[name], weight) for name, weight in saved.items())
    assert AutoModelForTokenClassification.from_pretrained(pulled, subfolder="critic").config.num_labels == 1

    tokenizer = AutoTokenizer.from_pretrained(pulled)
    assert tokenizer.pad_token == "[PAD]" and tokenizer.pad_token_id == policy.config.vocab_size
    text = policy.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4, pad_token_id=EOS)
    assert good(tokenizer.batch_decode(text[:, 3:])) and set(tokenizer.decode(text[0, :3])) <= set(LETTERS)

    card = (Path(pulled) / "README.md").read_text()
    assert re.search(r"^datasets:\n- local/prompts$", card, flags=re.M), card
    tables = sorted(path.name for path in (out / "completions" / "samples").iterdir())
    assert tables == [f"step-{UPDATES:06d}.jsonl"], "the script's last line replaces the table of the run"


def test_script_trains_pushes_and_resumes_adapter(hub_with_models: RunningHub, tmp_path: Path) -> None:
    lora = ["--use_peft", "--lora_target_modules", "all-linear", "--hub_model_id", "local/lora", "--save_steps", "2"]
    checkpoint = tmp_path / "out" / "checkpoint-2"
    hub_with_models.run(sys.executable, str(SCRIPT), *FLAGS, *lora, cwd=tmp_path)
    adapters = [_adapter(tmp_path / "out")]
    hub_with_models.run(
        sys.executable, str(SCRIPT), *FLAGS, *lora, "--resume_from_checkpoint", str(checkpoint), cwd=tmp_path
    )
    adapters.append(_adapter(tmp_path / "out"))
    pulled = Path(hub_with_models.api().snapshot_download("local/lora", local_dir=tmp_path / "lora"))
    assert _adapter(pulled) == adapters[0] == adapters[1] != _adapter(checkpoint)
    assert (pulled / "critic" / "adapter_model.safetensors").is_file() and not (pulled / "model.safetensors").exists()
    assert json.loads((pulled / "adapter_config.json").read_text())["base_model_name_or_path"] == "local/sft"


def _adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()
