"""rlhf_zoo.ppo.trl_compat.classic: names, settings and the step loop of TRL 0.x."""

import copy
import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compat import PAGE, ROOT, gpt2, t5, tokenised
from torch import Tensor
from trainer_fixture import (
    DEVICE,
    EOS,
    digests,
    good,
    make_tokenizer,
)
from transformers import (
    GPT2LMHeadModel,
)

from rlhf_zoo.errors import ZooError
from rlhf_zoo.ppo.guards import GuardWarning
from rlhf_zoo.ppo.trl_compat import AutoModelForCausalLMWithValueHead, PPOConfig, classic

# TRL 0.x: configuration

# TRL 0.11.4, read off its dataclass; what its trainer filled in is left out.
CLASSIC: dict[str, Any] = {
    "seed": 0, "log_with": None, "task_name": None, "model_name": "gpt2", "query_dataset": "stanfordnlp/imdb",
    "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb", "remove_unused_columns": True, "tracker_kwargs": {},
    "accelerator_kwargs": {}, "project_kwargs": {}, "tracker_project_name": "trl", "push_to_hub_if_best_kwargs": {},
    "steps": 20000, "learning_rate": 1.41e-5, "adap_kl_ctrl": True, "init_kl_coef": 0.2, "kl_penalty": "kl",
    "target": 6.0, "horizon": 10000.0, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2,
    "vf_coef": 0.1, "batch_size": 128, "forward_batch_size": None, "mini_batch_size": 128,
    "gradient_accumulation_steps": 1, "ppo_epochs": 4, "max_grad_norm": None, "optimize_cuda_cache": None,
    "optimize_device_cache": False, "early_stopping": False, "target_kl": 1.0, "compare_steps": 1,
    "ratio_threshold": 10.0, "use_score_scaling": False, "use_score_norm": False, "score_clip": None,
    "whiten_rewards": False, "gradient_checkpointing": False, "dataset_num_proc": None,
}  # fmt: skip


def test_classic_config_has_trl_fields_and_defaults() -> None:
    ours = vars(classic.PPOConfig())
    assert ours | CLASSIC == ours and ours.keys() - CLASSIC.keys() == {"exp_name", "output_dir"}
    assert all(re.search(rf"\b{name}\b", PAGE) for name in CLASSIC)


def test_classic_config_maps_to_ppo_config(tmp_path: Path) -> None:
    config = classic.PPOConfig(
        batch_size=24, mini_batch_size=4, gradient_accumulation_steps=2, ppo_epochs=3, steps=100, early_stopping=True,
        target_kl=0.3, use_score_scaling=True, use_score_norm=True, score_clip=2.0, output_dir=str(tmp_path),
        project_kwargs={"logging_dir": "logs"},
    )  # fmt: skip
    assert (config.backward_batch_size, config.total_ppo_epochs) == (8, 5)
    assert config.logging_dir == Path("logs/trl") and config.to_dict()["project_kwargs/logging_dir"] == "logs"
    args = config.to_zoo_config()
    assert (args.episodes_per_update, args.per_device_train_batch_size, args.num_mini_batches) == (24, 4, 3)
    assert (args.num_ppo_epochs, args.early_stop_kl, args.kl_coef, args.kl_target, args.kl_horizon) == (
        3, 0.3, 0.2, 6.0, 10_000,
    )  # fmt: skip
    assert (args.score_scaling, args.score_centering, args.score_clip) == ("running", "running", 2.0)
    # Adam at a constant rate without decay and without clipping, as TRL made it.
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1.41e-5, 0.0, 0.0)
    assert (args.lr_scheduler_type, args.temperature) == ("constant", 1.0)
    fixed = classic.PPOConfig(adap_kl_ctrl=False, forward_batch_size=16, output_dir=str(tmp_path)).to_zoo_config()
    assert fixed.kl_target is None and fixed.per_device_train_batch_size == 16 and fixed.score_scaling == "none"


def test_classic_config_warns_of_unused_and_rejects_invalid_settings() -> None:
    with pytest.warns(GuardWarning, match="ratio_threshold has no effect here"):
        classic.PPOConfig(ratio_threshold=5.0)
    with pytest.raises(ZooError, match="kl_penalty is 'mse', whose gradient"):
        classic.PPOConfig(kl_penalty="mse")
    with pytest.raises(ZooError, match=r"batch_size 128 is not a multiple of .*, 48"):
        classic.PPOConfig(mini_batch_size=48)
    with pytest.raises(ZooError, match="push_to_hub_if_best_kwargs is not supported"):
        classic.PPOConfig(push_to_hub_if_best_kwargs={"repo_id": "owner/best"})


# TRL 0.x: the loop

SAMPLING: dict[str, Any] = {
    "min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": EOS, "max_new_tokens": 8,
}  # fmt: skip


def collator(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def classic_trainer(directory: Path, **options: Any) -> classic.PPOTrainer:
    """As the tutorials have it: GPT-2, PAD = EOS, a model with a value head; other names go into PPOConfig."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    parts: dict[str, Any] = {"model": None, "dataset": None}
    for name in ("model", "ref_model", "dataset", "data_collator", "optimizer", "num_shared_layers", "lr_scheduler"):
        if name in options:
            parts[name] = options.pop(name)
    if parts["model"] is None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            parts["model"] = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2(GPT2LMHeadModel, 0))
    fields: dict[str, Any] = {
        "batch_size": 8, "mini_batch_size": 4, "learning_rate": 1e-3, "ppo_epochs": 2, "output_dir": str(directory),
    }  # fmt: skip
    return classic.PPOTrainer(classic.PPOConfig(**fields | options), tokenizer=tokenizer, **parts)


def queries(count: int = 8) -> list[Tensor]:
    return [torch.tensor(ids) for ids in tokenised(count)["input_ids"]]


def score_responses(trainer: classic.PPOTrainer, responses: list[Tensor]) -> list[Tensor]:
    return [torch.tensor(score) for score in good(trainer.tokenizer.batch_decode(responses, skip_special_tokens=True))]


def run_one_step(trainer: classic.PPOTrainer, scores: list[Any] | None = None) -> dict[str, Any]:
    prompts = queries(trainer.config.batch_size)
    answers = trainer.generate(prompts, return_prompt=False, **SAMPLING)
    return trainer.step(prompts, answers, score_responses(trainer, answers) if scores is None else scores)


def test_dataloader_shuffles_and_drops_last_batch(tmp_path: Path) -> None:
    rows = tokenised(20).add_column("query", [str(row) for row in range(20)]).with_format("torch")
    trainer = classic_trainer(tmp_path, dataset=rows, data_collator=collator)
    assert len(trainer.dataloader) == 2 and trainer.dataset is rows
    passes = [[row for batch in trainer.dataloader for row in batch["query"]] for _ in range(2)]
    assert all(len(set(seen)) == 16 and seen != sorted(seen, key=int) for seen in passes) and passes[0] != passes[1]
    batch = next(iter(trainer.dataloader))
    assert all(isinstance(ids, Tensor) and ids.dim() == 1 for ids in batch["input_ids"])


def test_generate_accepts_one_or_many_queries_and_strips_padding(tmp_path: Path) -> None:
    trainer = classic_trainer(tmp_path)
    prompts = queries(8)
    greedy = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": EOS}
    answers = trainer.generate(prompts, batch_size=3, return_prompt=False, **greedy)
    whole = trainer.generate(prompts, batch_size=8, **greedy)
    for query, answer, joined in zip(prompts, answers, whole, strict=True):
        assert torch.equal(joined, torch.cat([query, answer])) and 1 <= len(answer) <= 8
        assert EOS not in answer[:-1].tolist()
        single = trainer.generate(query, **greedy)
        assert single.shape == (1, len(joined)) and torch.equal(single[0], joined)
        assert torch.equal(trainer.generate(query, return_prompt=False, **greedy)[0], answer)
    assert len({len(answer) for answer in answers}) > 1, "some end early, so that padding would show"


def test_generate_stops_at_given_eos_and_length(tmp_path: Path) -> None:
    trainer = classic_trainer(tmp_path)
    prompts, model = queries(8), trainer.model
    sampled = trainer.generate(prompts, return_prompt=False, batch_size=8, **SAMPLING)
    assert any(EOS in ids.tolist() for ids in sampled) and all(len(ids) <= 8 for ids in sampled)
    # Out of the vocabulary, as scripts have it so that nothing ends.
    for never in (-1, 100_000):
        endless = trainer.generate(prompts, return_prompt=False, batch_size=8, eos_token_id=never, **SAMPLING)
        assert all(len(ids) == 8 for ids in endless) and any(EOS in ids.tolist()[:-1] for ids in endless)
    # Some models end with one of several tokens; a batch goes on with padding behind each of them.
    model.generation_config.eos_token_id = [EOS, 9, 10, 11]
    for ids in trainer.generate(prompts, return_prompt=False, batch_size=8, **SAMPLING):
        assert not {EOS, 9, 10, 11} & set(ids[:-1].tolist()) and (len(ids) == 8 or int(ids[-1]) in {EOS, 9, 10, 11})
    lengths = iter([2, 5])
    drawn = trainer.generate(prompts, lambda: next(lengths), return_prompt=False, eos_token_id=-1, **SAMPLING)
    assert [len(ids) for ids in drawn] == [2] * 4 + [5] * 4
    sampler = classic.LengthSampler(3, 6)
    assert {sampler() for _ in range(200)} == {3, 4, 5}


def test_generate_can_return_reference_responses(tmp_path: Path) -> None:
    trainer = classic_trainer(tmp_path, learning_rate=0.1)
    greedy = {"return_prompt": False, "do_sample": False, "max_new_tokens": 8, "pad_token_id": EOS}
    before = trainer.generate(queries(), **greedy)
    run_one_step(trainer)
    current, reference = trainer.generate(queries(), generate_ref_response=True, **greedy)
    assert all(torch.equal(left, other) for left, other in zip(before, reference, strict=True))
    assert not all(torch.equal(left, other) for left, other in zip(before, current, strict=True))


def logprobs_and_values(model: Any, query: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """log π of each token of a response, and V before it, of one row alone: (T,) each."""
    with torch.no_grad():
        logits, _, values = model(torch.cat([query, response]).unsqueeze(0))
    start = len(query) - 1
    logps = logits[0, start:-1].log_softmax(-1)
    return logps[range(len(response)), response], values[0, start:-1]


def test_step_statistics_match_trl_definitions(tmp_path: Path) -> None:
    """Checks a second step, so that policy and reference differ, row by row with copies of the models."""
    trainer = classic_trainer(tmp_path, learning_rate=2e-2, gamma=0.97, lam=0.9, adap_kl_ctrl=False)
    run_one_step(trainer)
    asked = queries()
    answers = trainer.generate(asked, return_prompt=False, **SAMPLING)
    policy, reference = copy.deepcopy(trainer.model).eval(), trainer.ref_model
    scores = [float(score) for score in score_responses(trainer, answers)]
    stats = trainer.step(asked, answers, scores)

    kls, entropies, returns, values, paid = [], [], [], [], []
    for query, answer, score in zip(asked, answers, scores, strict=True):
        logprobs, value = logprobs_and_values(policy, query, answer)
        with torch.no_grad():
            logits = reference(torch.cat([query, answer]).unsqueeze(0)).logits[0, len(query) - 1 : -1]
        k1 = logprobs - logits.log_softmax(-1)[range(len(answer)), answer]
        rewards = -0.2 * k1
        paid += rewards.tolist()
        rewards[-1] += score
        deltas = rewards + 0.97 * torch.cat([value[1:], torch.zeros(1)]) - value
        ahead = [sum((0.97 * 0.9) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]
        returns += (torch.stack(ahead) + value).tolist()
        values += value.tolist()
        kls.append(float(k1.sum()))
        entropies.append(float(-logprobs.sum()))
    assert stats["objective/kl_dist"] == pytest.approx(kls, abs=1e-5) and max(map(abs, kls)) > 0.1
    mean, variance = (lambda x: sum(x) / len(x)), (lambda x: float(torch.tensor(x).var()))
    lengths, prompts = ([float(len(ids)) for ids in each] for each in (answers, asked))
    expected = {
        "objective/kl": mean(kls),
        "objective/kl_coef": 0.2,
        "objective/entropy": mean(entropies),
        "ppo/mean_non_score_reward": mean(paid),
        "ppo/mean_scores": mean(scores),
        "ppo/std_scores": variance(scores) ** 0.5,
        "ppo/returns/mean": mean(returns),
        "ppo/returns/var": variance(returns),
        "ppo/val/mean": mean(values),
        "ppo/val/var": variance(values),
        "ppo/val/error": mean([(v - r) ** 2 for v, r in zip(values, returns, strict=True)]),
        "ppo/learning_rate": 2e-2,
        "tokens/queries_len_mean": mean(prompts),
        "tokens/queries_len_std": variance(prompts) ** 0.5,
        "tokens/responses_len_mean": mean(lengths),
        "tokens/responses_len_std": variance(lengths) ** 0.5,
    }
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name  # float32, padded against alone
    explained = 1 - expected["ppo/val/error"] / expected["ppo/returns/var"]
    assert stats["ppo/val/var_explained"] == pytest.approx(explained, rel=1e-3)
    rest = {
        "ppo/loss/policy", "ppo/loss/value", "ppo/loss/total", "ppo/policy/entropy", "ppo/policy/approxkl",
        "ppo/policy/clipfrac", "ppo/policy/ratio", "ppo/val/clipfrac", "ppo/val/var_explained", "objective/kl_dist",
        "time/ppo/total",
    }  # fmt: skip
    assert stats.keys() == expected.keys() | rest and stats["time/ppo/total"] > 0


def test_first_training_pass_matches_sampling_logprobs(tmp_path: Path) -> None:
    """Log-probabilities of `generate` equal those of the training pass, whatever dropout and padding."""
    trainer = classic_trainer(tmp_path, ppo_epochs=1, mini_batch_size=8)
    prompts = queries()
    answers = trainer.generate(prompts, return_prompt=False, **SAMPLING)
    drawn = trainer.model.eval().generate(
        prompts[3].unsqueeze(0), return_dict_in_generate=True, output_logits=True, **SAMPLING | {"eos_token_id": None}
    )
    completion = drawn.sequences[0, len(prompts[3]) :]
    by = torch.stack(drawn.logits)[:, 0].log_softmax(-1)[range(len(completion)), completion]
    assert torch.allclose(by, logprobs_and_values(trainer.model, prompts[3], completion)[0], atol=1e-5)
    trainer.model.train()
    stats = trainer.step(prompts, answers, score_responses(trainer, answers))
    assert abs(stats["objective/kl"]) < 1e-5 and stats["ppo/policy/approxkl"] < 1e-10
    assert stats["ppo/policy/ratio"] == pytest.approx(1, abs=1e-6) and stats["ppo/policy/clipfrac"] == 0


def test_given_model_is_trained_and_saved(tmp_path: Path) -> None:
    trainer = classic_trainer(tmp_path / "out", learning_rate=1e-2)
    model, reference = trainer.model, digests(trainer.ref_model)
    before = digests(model)
    run_one_step(trainer)
    after = digests(model)
    moved = [name for name in before if before[name] != after[name]]
    assert {"v_head.summary.weight", "transformer.h.0.mlp.c_fc.weight", "lm_head.weight"} <= set(moved)
    assert digests(trainer.ref_model) == reference
    trainer.save_pretrained(tmp_path / "saved")
    assert digests(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved")) == after
    assert (tmp_path / "saved" / "tokenizer.json").is_file()


def test_reference_may_be_wrapped_or_share_layers(tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2(GPT2LMHeadModel, 0))
    reference = classic.create_reference_model(model)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    trainer = classic_trainer(tmp_path, model=model, ref_model=reference)
    assert trainer.ref_model is reference.pretrained_model

    trainer = classic_trainer(tmp_path, num_shared_layers=1, learning_rate=1e-2)
    before, reference = digests(trainer.model), digests(trainer.ref_model)
    run_one_step(trainer)
    unchanged = {name for name, digest in digests(trainer.model).items() if digest == before[name]}
    assert {name for name in unchanged if ".h." in name} == {name for name in before if ".h.0." in name}
    assert {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    } <= unchanged and "v_head.summary.weight" not in unchanged
    assert digests(trainer.ref_model) == reference
    shared = trainer.ref_model.transformer.h[0].mlp.c_fc.weight
    assert shared.data_ptr() == trainer.model.pretrained_model.transformer.h[0].mlp.c_fc.weight.data_ptr()
    with pytest.raises(ZooError, match="num_shared_layers is 2, but the model has 2 layers"):
        classic.create_reference_model(model, num_shared_layers=2)


def test_given_optimizer_is_used(tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2(GPT2LMHeadModel, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = classic_trainer(tmp_path, model=model, optimizer=optimizer, lr_scheduler=schedule)
    rates = [run_one_step(trainer)["ppo/learning_rate"] for _ in range(2)]
    assert rates == [0.5, 0.25]


def test_step_statistics_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = classic_trainer(
        tmp_path / "out", log_with="tensorboard", project_kwargs={"logging_dir": str(tmp_path / "logs")}
    )
    seen = []
    for _ in range(2):
        seen.append(run_one_step(trainer))
        trainer.log_stats(seen[-1], {"query": [], "response": []}, [torch.tensor(1.0), 2.0], columns_to_log=["query"])
    events = EventAccumulator(str(tmp_path / "logs" / "trl")).Reload()
    for name in ("objective/kl", "ppo/mean_scores", "ppo/loss/total"):
        [first, second] = events.Scalars(f"train/{name}")
        assert (first.step, second.step) == (1, 2)
        assert [first.value, second.value] == pytest.approx([stats[name] for stats in seen], rel=1e-6)
    [line, _] = trainer.log_history
    assert line["env/reward_mean"] == 1.5 and line["env/reward_std"] == pytest.approx(0.5**0.5)
    assert "objective/kl_dist" not in line and "runs" not in {path.name for path in tmp_path.rglob("*")}


def test_step_accepts_batch_of_one(tmp_path: Path) -> None:
    """As in the oldest quick start of TRL."""
    trainer = classic_trainer(tmp_path, batch_size=1, mini_batch_size=1)
    [query] = queries(1)
    answer = trainer.generate(query, return_prompt=False, **SAMPLING | {"max_new_tokens": 1})[0]
    stats = trainer.step([query], [answer], [torch.tensor([1.0])])
    numbers = [value for value in stats.values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in numbers) and stats["ppo/std_scores"] == 0


def test_step_errors_are_one_sentence(tmp_path: Path) -> None:
    trainer = classic_trainer(tmp_path)
    prompts = queries()
    answers = trainer.generate(prompts, return_prompt=False, **SAMPLING)
    scores = score_responses(trainer, answers)

    def refused(message: str, call: Any) -> None:
        with pytest.raises(ZooError, match=message) as error:
            call()
        assert "\n" not in str(error.value)

    refused("got 7 queries, but batch_size is 8", lambda: trainer.step(prompts[:7], answers[:7], scores[:7]))
    nan = [*scores[:3], torch.tensor(float("nan")), *scores[4:]]
    refused("Score 3 is nan: pass a finite number", lambda: trainer.step(prompts, answers, nan))
    refused("response_masks is not supported", lambda: trainer.step(prompts, answers, scores, response_masks=answers))
    refused(r"Query 0 is of shape \(1, 3\)", lambda: trainer.generate(torch.tensor([[3, 4, 5]]), **SAMPLING))
    refused("LengthSampler got 5 and 5", lambda: classic.LengthSampler(5, 5))
    refused("this model has an encoder", lambda: classic_trainer(tmp_path, model=t5()))
    plain = gpt2(GPT2LMHeadModel, 0)
    refused("model is a GPT2LMHeadModel without a value head", lambda: classic_trainer(tmp_path, model=plain))
    model, tokenizer = trainer.model, trainer.tokenizer
    refused("trainer has no tokenizer", lambda: classic.PPOTrainer(trainer.config, model))
    old = PPOConfig(output_dir=str(tmp_path), use_cpu=DEVICE == "cpu")
    refused("config is a PPOConfig: pass", lambda: classic.PPOTrainer(old, model, None, tokenizer))


def test_tutorial_loop_raises_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/classic_loop.py, 30 of its 100 steps, from random weights: only words of praise are left."""
    out = tmp_path / "classic"
    options = ["--output_dir", str(out), "--steps", "30", "--log_with", "tensorboard"]
    monkeypatch.setattr(sys, "argv", ["classic_loop.py", *options])
    runpy.run_path(str(ROOT / "examples" / "classic_loop.py"), run_name="__main__")
    curves = json.loads((out / "curves.json").read_text())
    assert {name: len(curve) for name, curve in curves.items()} == {"reward": 30, "kl": 30, "kl_coef": 30}
    assert all(math.isfinite(value) for curve in curves.values() for value in curve)
    # Random words score near 0, praise alone scores 1. Here the last ten steps are above 0.87.
    assert max(curves["reward"][:3]) < 0.3 and min(curves["reward"][-10:]) > 0.8
    assert abs(curves["kl"][0]) < 1e-5 and min(curves["kl"][10:]) > 0.5
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(out.glob("logs/trl/events.out.tfevents.*"))
    assert AutoModelForCausalLMWithValueHead.from_pretrained(out).v_head.summary.weight.any()
