"""Runs TRL 1.12.0's PPOTrainer on tiny models and saves its results, the fixture of `test_trl_parity.py`.

TRL removed PPO after 1.12.0 (PR #7020), so this needs a separate environment:

    python3.11 -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0
    .venv-trl/bin/pip install trl==1.12.0 transformers==5.23.0 accelerate datasets pandas rich peft
    OMP_NUM_THREADS=1 .venv-trl/bin/python tests/numerics/trl_parity/generate.py

It writes `models.safetensors`, `CASE.safetensors` for each case, and `cases.json` next to itself, in half a minute; on
one machine, the same bytes each time. It computes nothing itself: every tensor is a local variable of TRL's `train`,
read when that calls `accelerator.backward`, an argument of a function that it calls, or a weight after its optimizer
steps.

Shapes: B rollouts, P prompt and T response positions, M micro-batches of b rows per update (over all its epochs). For
each update u, `CASE.safetensors` holds
    u.queries (B, P), u.responses (B, T)   token ids, prompts padded on the left
    u.logprobs, u.ref_logprobs, u.values, u.kl, u.rewards, u.advantages, u.returns (B, T)   the inputs of the losses
    u.raw_rewards, u.raw_advantages (B, T)   before whitening; u.raw_scores (B,) before the penalty, u.scores (B,) after
    u.padding_mask, u.padding_mask_p1 (B, T)   True where TRL masks out policy and value terms
    u.permutations (epochs, B), u.micro_rows (M, b)   the order of rows, and the rows of each micro-batch
    u.micro_logprobs, u.micro_values (M, b, T), u.micro_policy_loss, u.micro_value_loss (M,)
    u.policy, u.value_model (n,)   every weight after the update, flattened in the order of cases.json
`cases.json` holds each case's settings, learning rates, optimizer steps and logged metrics.
"""

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

UPDATES = 2
PAD, EOS = 0, 1
TOKENS = ["<pad>", "<eos>", "<unk>", *"abcdefghijkl:;"]
PROMPT_LENGTHS = (2, 5)

ARCHITECTURE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}

# Channel 0 of the residual stream is always 1, so its column in the head acts as a bias of the logits: PAD becomes
# impossible, and EOS impossible or, if responses are to end early, likelier than any letter.
NEVER, OFTEN = -60.0, 0.85

# AdamW divides a gradient by its size plus epsilon. With the default 1e-8, a gradient that is only rounding becomes a
# step of the full learning rate; with 1e-3 it stays small.
COMMON: dict[str, Any] = {
    "response_length": 6,
    "kl_coef": 0.2,
    "learning_rate": 2e-3,
    "adam_epsilon": 1e-3,
    "num_ppo_epochs": 2,
    "num_mini_batches": 1,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "temperature": 1.0,
    "kl_estimator": "k1",
    "whiten_rewards": False,
    "missing_eos_penalty": None,
    "stop_token": None,
    "gamma": 0.97,
    "lam": 0.9,
    "cliprange": 0.05,
    "cliprange_value": 0.05,
    "vf_coef": 0.5,
    "weight_decay": 0.0,
}

# TRL makes an optimizer step every `gradient_accumulation_steps` micro-batches, whatever `num_mini_batches` is, so
# minibatches have an effect only without accumulation; `minibatches_ignored` shows it. There are prompts for a third
# batch, because in the last batch of a pass over the prompts TRL makes an optimizer step for every micro-batch.
CASES: dict[str, dict[str, Any]] = {
    "minibatches": COMMON | {"num_mini_batches": 2},
    "k3_whitened": COMMON | {"kl_estimator": "k3", "whiten_rewards": True, "temperature": 0.7},
    "accumulated": COMMON
    | {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "missing_eos_penalty": 1.5,
        "weight_decay": 0.1,
    },
    "together": COMMON
    | {
        "per_device_train_batch_size": 16,
        "num_mini_batches": 2,
        "kl_estimator": "k3",
        "whiten_rewards": True,
        "missing_eos_penalty": 1.5,
        "temperature": 0.7,
    },
    "minibatches_ignored": COMMON
    | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 2},
    "early_eos": COMMON | {"stop_token": "eos", "missing_eos_penalty": 1.5, "response_length": 8, "temperature": 0.7},
    "early_eos_whitened": COMMON
    | {"stop_token": "eos", "whiten_rewards": True, "kl_estimator": "k3", "response_length": 8},
}
SEED = 4
# Only these weights are saved, because tests read no others and weights fill most of the fixture.
WEIGHTS_OF = {
    "minibatches": (0, 1),
    "k3_whitened": (0, 1),
    "accumulated": (0, 1),
    "together": (1,),
    "minibatches_ignored": (0,),
}


def build_models() -> dict[str, Any]:
    """policy, reference (near the policy, so that KL is neither 0 nor large), value_model and reward_model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(SEED)
    policy = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 1.0
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        policy.lm_head.weight[:, 0] = 0.0
        policy.lm_head.weight[[PAD, EOS], 0] = NEVER
        reference = copy.deepcopy(policy)
        for name, weight in reference.named_parameters():
            if "_proj" in name:
                noise = 0.05 * torch.randn_like(weight)
                weight += noise.masked_fill(weight == 0, 0)
    heads = LlamaConfig(**ARCHITECTURE, num_labels=1)
    value_model, reward_model = LlamaForSequenceClassification(heads), LlamaForSequenceClassification(heads)
    return {"policy": policy, "reference": reference, "value_model": value_model, "reward_model": reward_model}


def flat(model: Any) -> Any:
    import torch

    return torch.cat([weight.detach().flatten() for weight in model.state_dict().values()])


def build_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_prompts(count: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(SEED)
    low, high = PROMPT_LENGTHS
    return [draw.integers(3, len(TOKENS), size=draw.integers(low, high + 1)).tolist() for _ in range(count)]


class Recorder:
    """Records the tensors of TRL's `train` per update, in wrappers of the functions that it calls."""

    def __init__(self, module: Any, trainer: Any, models: dict[str, Any]) -> None:
        self.updates: list[dict[str, Any]] = [{} for _ in range(UPDATES)]
        self.micro: list[list[dict[str, Any]]] = [[] for _ in range(UPDATES)]
        self.orders: list[list[Any]] = [[] for _ in range(UPDATES)]
        self.steps: list[list[float]] = [[] for _ in range(UPDATES)]
        self.logs: list[dict[str, float]] = []
        self.trainer, self.models = trainer, models
        self._whiten, self._reward = module.masked_whiten, module.get_reward
        self._backward, self._permutation = trainer.accelerator.backward, module.np.random.permutation
        module.masked_whiten, module.get_reward = self.masked_whiten, self.get_reward
        module.np.random.permutation = self.permutation
        trainer.accelerator.backward = self.backward
        # The optimizer inside accelerate's, which passes on only the steps that end an accumulation.
        trainer.optimizer.optimizer.register_step_post_hook(self.stepped)

    @property
    def update_index(self) -> int:
        return self.trainer.state.global_step

    def masked_whiten(self, values: Any, mask: Any, shift_mean: bool = True) -> Any:
        self.updates[self.update_index]["raw_advantages" if shift_mean else "raw_rewards"] = values.clone()
        return self._whiten(values, mask, shift_mean)

    def get_reward(self, model: Any, *args: Any) -> Any:
        out = self._reward(model, *args)
        if model is self.models["reward_model"]:
            self.updates[self.update_index]["raw_scores"] = out[1].clone()
        return out

    def permutation(self, size: int) -> Any:
        order = self._permutation(size)
        self.orders[self.update_index].append(order.copy())
        return order

    def backward(self, loss: Any, **kwargs: Any) -> None:
        local = sys._getframe(1).f_locals
        if not self.micro[self.update_index]:
            names = (
                "queries", "responses", "logprobs", "ref_logprobs", "values", "kl", "scores", "rewards", "advantages",
                "returns", "padding_mask", "padding_mask_p1",
            )  # fmt: skip
            self.updates[self.update_index] |= {name: local[name].clone() for name in names}
        self.micro[self.update_index].append(
            {
                "rows": local["micro_batch_inds"].copy(),
                "logprobs": local["new_logprobs"].detach().clone(),
                "values": local["vpred"].detach().clone(),
                "policy_loss": local["pg_loss"].detach().clone(),
                "value_loss": local["vf_loss"].detach().clone(),
            }
        )
        self._backward(loss, **kwargs)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        [rate] = {group["lr"] for group in optimizer.param_groups}
        self.steps[self.update_index].append(float(rate))

    def ended(self, update: int) -> None:
        """Records the weights after an update's last optimizer step, when `state.global_step` has already increased."""
        for name in ("policy", "value_model"):
            self.updates[update][name] = flat(self.models[name]).clone()


def run(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a case in a separate process (accelerate keeps state between trainers); returns its arrays and JSON."""
    import numpy as np
    import torch
    import transformers
    import trl.experimental.ppo.ppo_trainer as module
    from datasets import Dataset

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    settings = CASES[case]
    models = build_models()
    if settings["stop_token"] == "eos":
        with torch.no_grad():
            for name in ("policy", "reference"):
                models[name].lm_head.weight[EOS, 0] = OFTEN
    batch = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    recorders: list[Recorder] = []

    class Watch(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            recorders[0].logs.append({k: v for k, v in logs.items() if k not in ("eps", "epoch")})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorders[0].ended(state.global_step - 1)

    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        config = module.PPOConfig(
            output_dir=directory,
            total_episodes=UPDATES * batch,
            num_sample_generations=0,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            disable_tqdm=True,
            seed=SEED,
            **settings,
        )
        trainer = module.PPOTrainer(
            args=config,
            processing_class=build_tokenizer(),
            model=models["policy"],
            ref_model=models["reference"],
            reward_model=models["reward_model"],
            value_model=models["value_model"],
            train_dataset=Dataset.from_dict({"input_ids": build_prompts((UPDATES + 1) * batch)}),
            callbacks=[Watch()],
        )
        # TRL seeds torch, and not the NumPy generator that shuffles.
        np.random.seed(SEED)
        recorder = Recorder(module, trainer, models)
        recorders.append(recorder)
        trainer.train()

    arrays: dict[str, Any] = {}
    for update in range(UPDATES):
        tensors, micro = recorder.updates[update], recorder.micro[update]
        sampled = tensors["responses"]
        if settings["stop_token"] is None:
            assert not torch.isin(sampled, torch.tensor([PAD, EOS])).any(), "PAD or EOS was sampled: change SEED"
        else:
            ended = (sampled == EOS).any(1)
            assert ended.any() and not ended.all(), "responses must differ in ending: change SEED"
        if update not in WEIGHTS_OF.get(case, ()):
            del tensors["policy"], tensors["value_model"]
        tensors["permutations"] = torch.from_numpy(np.stack(recorder.orders[update]))
        tensors["micro_rows"] = torch.from_numpy(np.stack([m.pop("rows") for m in micro]))
        for name in micro[0]:
            tensors[f"micro_{name}"] = torch.stack([m[name] for m in micro])
        arrays |= {f"{update}.{name}": value.contiguous().numpy() for name, value in tensors.items()}
    return arrays, {
        "settings": settings,
        "optimizer_steps": [len(rates) for rates in recorder.steps],
        "learning_rates": [sorted(set(rates)) for rates in recorder.steps],
        "logs": recorder.logs,
    }


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=here, help="folder to write to; default: this script's")
    into = parser.parse_args().into
    # Before any import of TRL, here and in the processes of the cases: no network, no telemetry.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1", CI="1")

    from importlib.metadata import version

    from safetensors.numpy import save_file
    from safetensors.torch import save_file as save_tensors

    into.mkdir(parents=True, exist_ok=True)
    models = build_models()
    layout = {
        name: {key: list(weight.shape) for key, weight in model.state_dict().items()} for name, model in models.items()
    }
    save_tensors({name: flat(model) for name, model in models.items()}, into / "models.safetensors")
    spawn = multiprocessing.get_context("spawn")
    cases = {}
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            arrays, cases[case] = pool.submit(run, case).result()
        save_file(arrays, into / f"{case}.safetensors")
        print(f"{case}: {cases[case]['optimizer_steps']} optimizer steps", flush=True)
    facts = {
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
        "architecture": ARCHITECTURE,
        "tokens": TOKENS,
        "ending_bias": OFTEN,
        "layout": layout,
    }
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(result)}" for case, result in cases.items())
    (into / "cases.json").write_text(f'{json.dumps(facts)[:-1]}, "cases": {{\n{lines}\n}}}}\n')
    print(f"{sum(path.stat().st_size for path in into.iterdir() if path.suffix != '.py'):,} bytes in {into}")


if __name__ == "__main__":
    main()
