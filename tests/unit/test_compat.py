"""trl_compat: names and behaviour of TRL 1.12 and of TRL 0.x's loop. The code of docs/from-trl.md runs here too."""

import copy
import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trainer_fixture import (
    CONTEXT,
    DEVICE,
    EOS,
    GOOD,
    LETTERS,
    PAD,
    digests,
    make_policy,
    make_reward_model,
    make_tokenizer,
    prompt_rows,
)
from transformers import (
    AutoModelForTokenClassification,
    GenerationConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    HfArgumentParser,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.ppo import trl_compat as compat
from rlhf_zoo.ppo.trl_compat import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    batch_generation,
    classic,
    masked_mean,
    masked_var,
    masked_whiten,
)
from rlhf_zoo.rewards import RewardModel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-trl.md").read_text(encoding="utf-8")

# TRL 1.12.0, read off `inspect.signature(PPOTrainer.__init__)` and `dataclasses.fields(PPOConfig)`.
CONSTRUCTOR = [
    "args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model", "data_collator",
    "eval_dataset", "optimizers", "callbacks", "peft_config",
]  # fmt: skip
FIELDS: dict[str, Any] = {
    "learning_rate": 3e-6, "logging_steps": 10, "bf16": None, "gradient_checkpointing": True, "dataset_num_proc": None,
    "num_mini_batches": 1, "total_episodes": None, "local_rollout_forward_batch_size": 64, "num_sample_generations": 10,
    "response_length": 53, "stop_token": None, "stop_token_id": None, "temperature": 0.7, "missing_eos_penalty": None,
    "sft_model_path": "EleutherAI/pythia-160m", "reward_model_path": "EleutherAI/pythia-160m",
    "num_total_batches": None, "micro_batch_size": None, "local_batch_size": None, "batch_size": None,
    "local_mini_batch_size": None, "mini_batch_size": None, "push_to_hub": False, "model_adapter_name": None,
    "ref_adapter_name": None, "num_ppo_epochs": 4, "whiten_rewards": False, "kl_coef": 0.05, "kl_estimator": "k1",
    "cliprange": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
    "ds3_gather_for_generation": True,
}  # fmt: skip
# Our default where it is another: what TRL's trainer did, whatever its default said. docs/from-trl.md has them.
OF_TRANSFORMERS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
DEPARTURES: dict[str, Any] = {
    "logging_steps": 1, "bf16": False, "gradient_checkpointing": OF_TRANSFORMERS["gradient_checkpointing"],
}  # fmt: skip


# TRL 1.12: constructor and configuration


def test_ppo_trainer_has_trl_keywords_in_order() -> None:
    assert list(inspect.signature(PPOTrainer).parameters)[: len(CONSTRUCTOR)] == CONSTRUCTOR


def test_ppo_config_has_trl_defaults_or_documented_ones() -> None:
    ours = {field.name: field.default for field in dataclasses.fields(PPOConfig)}
    assert {name: ours[name] for name in FIELDS} == FIELDS | DEPARTURES
    assert all(f"`{name}`" in PAGE for name in DEPARTURES)


def test_ppo_config_keeps_other_training_arguments_defaults(tmp_path: Path) -> None:
    """All but those that PPO has to change; world_size is a property there."""
    changed = {"learning_rate", "logging_steps", "remove_unused_columns"}
    ours = {field.name: field.default for field in dataclasses.fields(PPOConfig)}
    for field in dataclasses.fields(TrainingArguments):
        assert field.name in changed or ours[field.name] == field.default, field.name
    with pytest.raises(TypeError, match="world_size"):
        PPOConfig(output_dir=str(tmp_path), world_size=2)


def test_ppo_config_computes_batch_sizes(tmp_path: Path) -> None:
    args = PPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=6, num_mini_batches=3,
        total_episodes=100, batch_size=1, use_cpu=DEVICE == "cpu",
    )  # fmt: skip
    assert (args.micro_batch_size, args.local_batch_size, args.batch_size) == (4, 24, 24)
    assert (args.local_mini_batch_size, args.mini_batch_size, args.num_total_batches) == (8, 8, 5)


def test_argument_parser_reads_both_configs(tmp_path: Path) -> None:
    """A default with a type that argparse cannot read would fail here, for every script that parses its flags."""
    [args] = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --learning_rate 2e-5 --kl_estimator k3 --stop_token eos --use_cpu".split()
    )
    assert (args.learning_rate, args.kl_estimator, args.stop_token) == (2e-5, "k3", "eos")
    [old] = HfArgumentParser(classic.PPOConfig).parse_args_into_dataclasses(
        ["--batch_size", "16", "--mini_batch_size", "4", "--target", "2.5", "--early_stopping"]
    )
    assert (old.batch_size, old.mini_batch_size, old.target, old.early_stopping) == (16, 4, 2.5, True)


# TRL 1.12: the helpers. Numbers by hand.

VALUES = torch.tensor([[1.0, 2.0, 3.0], [5.0, 0.0, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


def test_masked_statistics_match_hand_values() -> None:
    assert masked_mean(VALUES, MASK) == 11 / 4
    assert masked_mean(VALUES, MASK, axis=1).tolist() == [2.0, 5.0]
    # Deviations from 2.75: −1.75, −0.75, 0.25, 2.25; their squares add up to 8.75.
    assert masked_var(VALUES, MASK).item() == pytest.approx(8.75 / 3, rel=1e-6)  # float32
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(8.75 / 4, rel=1e-6)
    deviation = math.sqrt(8.75 / 3)
    whitened = [[-1.75 / deviation, -0.75 / deviation, 0.25 / deviation], [2.25 / deviation, -2.75 / deviation]]
    result = masked_whiten(VALUES, MASK)
    assert result[0].tolist() == pytest.approx(whitened[0], rel=1e-6)
    assert result[1, :2].tolist() == pytest.approx(whitened[1], rel=1e-6)
    assert torch.equal(masked_whiten(VALUES, MASK, shift_mean=False), result + 11 / 4)
    for mask in (torch.zeros_like(MASK), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        with pytest.raises(ZooError, match=f"masked_var got {int(mask.sum())} values"):
            masked_whiten(VALUES, mask)


@pytest.mark.parametrize("pad", [PAD, 17], ids=["a PAD with an embedding", "a PAD past the embeddings"])
def test_batch_generation_matches_generating_rows_alone(pad: int) -> None:
    policy = make_policy()
    prompts = [[5, 6], [7], [8, 9, 3, 4], [10, 3], [12]]
    queries = torch.tensor([[pad] * (4 - len(ids)) + ids for ids in prompts])
    alone = {}
    for row, ids in enumerate(prompts):
        out = policy.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        alone[row] = out.sequences[0, len(ids) :].tolist(), torch.cat(out.scores)
    # What the first row says second ends a response; so other rows end elsewhere, or not at all.
    stop = alone[0][0][1]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=stop)
    sequences, scores = batch_generation(policy, queries, 2, pad, config)
    assert sequences.shape == (5, 10) and scores.shape == (5, 6, 17) and torch.equal(sequences[:, :4], queries)
    lengths = set()
    for row, (tokens, logits) in alone.items():
        length = tokens.index(stop) + 1 if stop in tokens else 6
        lengths.add(length)
        assert sequences[row, 4:].tolist() == tokens[:length] + [pad] * (6 - length)
        assert torch.allclose(scores[row, :length], logits[:length], atol=1e-5)  # padding rounds otherwise
        assert not scores[row, length:].any()
    assert len(lengths) > 1
    assert config.pad_token_id is None and not config.output_scores, "the caller's configuration is his own"


# TRL 1.12: the trainer


def gpt2(kind: Any, seed: int, **fields: Any) -> Any:
    config = GPT2Config(
        vocab_size=17, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2, eos_token_id=EOS,
        bos_token_id=None, **fields,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        return kind(config).to(DEVICE).eval()


def tokenised(count: int = 16) -> Dataset:
    tokenizer = make_tokenizer()
    return (
        prompt_rows(count)
        .map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]})
        .select_columns(["input_ids"])
    )


def make_trl_trainer(directory: Path, **options: Any) -> PPOTrainer:
    """A trainer as a script for TRL 1.12 makes it, over the toy world; names of PPOConfig go there."""
    parts: dict[str, Any] = {
        "processing_class": make_tokenizer(),
        "model": make_policy(),
        "ref_model": make_policy(),
        "reward_model": make_reward_model(statistics=None),
        "value_model": make_reward_model(seed=2, statistics=None),
        "train_dataset": tokenised(),
    }
    parts |= {name: options.pop(name) for name in (*CONSTRUCTOR, "reward_funcs") if name in options}
    fields: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "total_episodes": 16,
        "num_ppo_epochs": 2,
        "response_length": 10,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": DEVICE == "cpu",
    }
    return PPOTrainer(args=PPOConfig(**fields | options), **parts)


def test_training_updates_given_policy_and_copied_critic(tmp_path: Path) -> None:
    policy, reference, value_model = make_policy(), make_policy(), make_reward_model(seed=2, statistics=None)
    before = [digests(model) for model in (policy, value_model)]
    trainer = make_trl_trainer(tmp_path, model=policy, ref_model=reference, value_model=value_model, stop_token="eos")
    assert trainer.model.policy is trainer.policy_model is policy and trainer.ref_model is reference
    assert trainer.model.value_model is trainer.value_model is not value_model
    assert type(trainer.reward_model).__name__ == "LlamaForSequenceClassification"
    assert (trainer.stop_token_id, trainer.train_dataset_len, trainer.is_peft_model) == (EOS, 16, False)
    assert trainer.args.num_total_batches == 2
    head = value_model.score.weight.clone()
    assert torch.equal(trainer.value_model.score.weight, head)
    assert trainer.generate_completions() == {}, "TRL does nothing without eval_dataset"
    trainer.train()
    assert digests(policy).items() - before[0].items() and digests(reference) == before[0]
    assert not torch.equal(trainer.value_model.score.weight, head) and digests(value_model) == before[1]
    with trainer.null_ref_context() as model:
        assert model is reference


def test_update_count_follows_epochs_without_episodes(tmp_path: Path) -> None:
    trainer = make_trl_trainer(tmp_path, total_episodes=None, num_train_epochs=2, train_dataset=tokenised(12))
    assert trainer.args.num_total_batches == 4  # two a pass: 8 and 4 prompts
    trainer.train()
    assert trainer.state.global_step == 4


def test_lora_reference_is_policy_without_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig

    policy = make_policy()
    policy.save_pretrained(tmp_path / "base")
    policy = type(policy).from_pretrained(tmp_path / "base")
    ids = torch.tensor([[5, 6, 7]])
    logits = policy(ids).logits
    trainer = make_trl_trainer(
        tmp_path / "run", model=policy, ref_model=None, peft_config=LoraConfig(r=2, target_modules=["q_proj"])
    )
    trainer.train()
    assert trainer.is_peft_model and trainer.ref_model is None
    with trainer.null_ref_context() as model:
        assert torch.equal(model(ids).logits, logits)
    assert not torch.equal(trainer.policy(ids).logits, logits)


@pytest.mark.parametrize("stops", [{}, {"stop_token_id": 9}], ids=["none", "id"])
def test_eos_anywhere_avoids_missing_eos_penalty(tmp_path: Path, stops: dict[str, Any]) -> None:
    """Where nothing stops a completion it runs on behind its EOS, and TRL looks for EOS anywhere in it."""
    seen: list[tuple[Any, Tensor]] = []

    class Watched(PPOTrainer):
        def compute_advantages(self, rollout: Any, reward_scores: Any) -> Any:
            advantages = super().compute_advantages(rollout, reward_scores)
            seen.append((rollout.samples, reward_scores.total - advantages.shaped_scores))
            return advantages

    trainer = make_trl_trainer(tmp_path, missing_eos_penalty=2.0, num_mini_batches=1, **stops)
    trainer.__class__ = Watched
    trainer.train()
    [first, second] = seen
    penalties = torch.cat([first[1], second[1]]).tolist()
    completions = [*first[0].completion_id_lists(), *second[0].completion_id_lists()]
    ends = {EOS, 9} if "stop_token_id" in stops else {EOS}
    assert penalties == pytest.approx([0.0 if ends & set(ids) else 2.0 for ids in completions], abs=1e-6)  # float32
    assert {round(penalty) for penalty in penalties} == {0, 2}
    if not stops:
        assert all(len(ids) == 10 for ids in completions) and any(EOS in ids[:-1] for ids in completions)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_pad_beyond_embeddings_leaves_scores_unchanged(kind: str) -> None:
    """Scripts add [PAD] and resize nothing. The score of a batch is that of each row alone, unpadded."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 17
    model = gpt2(GPT2ForSequenceClassification, 1, num_labels=1) if kind == "gpt2" else make_reward_model()
    rows = [[5, 6, 7, EOS], [8, EOS], [9, 10, 3, 4, 5, 6], [0, 0]]
    # One row alone needs no PAD, and its score is read at its last token.
    with torch.no_grad():
        alone = [float(copy.deepcopy(model)(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in rows]
    reward = RewardModel(model, tokenizer, tokenizer, center=False, scale=False)
    assert reward._score_ids(rows).tolist() == pytest.approx(alone, abs=5e-6)  # padding rounds otherwise
    assert model.config.pad_token_id != 17, "transformers makes no model of such a configuration"


def test_optimizer_over_copied_critic_is_rejected(tmp_path: Path) -> None:
    policy, value_model = make_policy(), make_reward_model(statistics=None)
    optimizer = torch.optim.AdamW([*policy.parameters(), *value_model.parameters()], lr=1e-3)
    with pytest.raises(ZooError, match="optimizer has no weight of the critic"):
        make_trl_trainer(tmp_path, model=policy, value_model=value_model, optimizers=(optimizer, None))
    value_model.config.num_labels = 1
    critic = AutoModelForTokenClassification.from_config(value_model.config)
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic.parameters()], lr=1e-3)
    trainer = make_trl_trainer(tmp_path, model=policy, value_model=critic, optimizers=(optimizer, None))
    before = digests(critic)
    trainer.train()
    assert trainer.value_model is critic and digests(critic).items() - before.items()


def t5() -> AutoModelForSeq2SeqLMWithValueHead:
    config = T5Config(vocab_size=17, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    return AutoModelForSeq2SeqLMWithValueHead.from_pretrained(T5ForConditionalGeneration(config))


def test_trainer_errors_are_one_sentence(tmp_path: Path) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ZooError, match=message) as error:
            make_trl_trainer(tmp_path, **options)
        assert "\n" not in str(error.value)

    refused("stop_token is 'period': set it to 'eos'", stop_token="period")
    refused("stop_token and stop_token_id are both set", stop_token="eos", stop_token_id=0)
    refused("has an encoder", model=t5())


# docs/from-trl.md


def test_migration_page_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs its code blocks in order, on toy models in the folders that they name."""
    alphabet = sorted(set(LETTERS + ":; ") | set("the battery of this phone my kettle's handle camera's screen strap"))
    tokenizer = make_tokenizer("".join(alphabet))
    for name, model in (
        ("sft", make_policy(tokenizer, max_position_embeddings=128)),
        ("reward", make_reward_model(tokenizer, max_position_embeddings=128)),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.S | re.M)
    assert len(blocks) == 7
    seen: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"from-trl.md, block {number}", "exec"), seen)
    assert (tmp_path / "runs" / "from-trl" / "critic" / "config.json").is_file()
    assert set(seen["table"]) == {"prompt", "completion", "score"} and len(seen["table"]["score"]) == 4
    assert seen["trainer"].rewards.names == ["reward_model", "short"] and seen["stats"]["objective/kl"] >= 0
    assert AutoModelForCausalLMWithValueHead.from_pretrained("runs/classic").v_head.summary.weight.any()


def test_migration_page_links_and_names_exist() -> None:
    """Links of the page lead somewhere, and its tables name every field, keyword and metric of TRL's."""
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    for name in CONSTRUCTOR:
        assert re.search(rf"\b{name}\b", PAGE), name
    metrics = (
        "objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores eps lr "
        "policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg "
        "val/ratio val/ratio_var val/num_eos_tokens episode"
    )
    for name in metrics.split():
        assert f"| `{name}` |" in PAGE, name
    ours = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `[a-z_/]+` \| `([a-z_/]+)` \|", PAGE, flags=re.M)
    assert len(rows) >= 14 and all(f"`{name}`" in ours for name in rows if name != "train_samples_per_second")
    assert set(compat.__all__) - {"PPOConfig", "PPOTrainer"} <= set(re.findall(r"\w+", PAGE)) and GOOD in LETTERS
