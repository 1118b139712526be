"""How the trainer applies the formulas: temperature, padding, counts, divisors, shuffles and the order of shaping."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fixture import CONTEXT, LETTERS, PAD, Spy, make_policy, make_tokenizer, make_trainer, prompt_rows
from transformers import GPT2Config, GPT2ForTokenClassification

from rlhf_zoo.modeling.critic import response_values
from rlhf_zoo.modeling.sampling.sampler import Samples, left_pad
from rlhf_zoo.ppo.minibatch import Minibatch
from rlhf_zoo.rewards import RewardScores

pytestmark = pytest.mark.attack


def test_critic_values_of_padded_batch_equal_those_of_single_rows() -> None:
    torch.manual_seed(0)
    fields = {"n_positions": CONTEXT, "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": 1, "pad_token_id": PAD}
    critic = GPT2ForTokenClassification(
        GPT2Config(vocab_size=len(make_tokenizer()), initializer_range=0.5, **fields)
    ).eval()
    prompts, responses = [[3], [4, 5, 6, 7, 8]], [[9, 10, 11], [5, 6, 7]]
    ids, prompt_mask = left_pad(prompts, PAD, "cpu")
    answers = torch.tensor(responses)
    mask = torch.ones_like(answers, dtype=torch.bool)
    samples = Samples(ids, prompt_mask, answers, mask, torch.zeros(mask.shape), torch.zeros(2, dtype=torch.bool))
    with torch.no_grad():
        values = response_values(critic, samples)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            alone = critic(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, 0]
            torch.testing.assert_close(values[row], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_exact_kl_uses_sampling_temperature_for_both_policies(tmp_path: Path) -> None:
    settings = {
        "temperature": 0.5, "kl_in": "loss", "kl_estimator": "full", "num_ppo_epochs": 1, "num_mini_batches": 1,
        "max_steps": 1, "learning_rate": 0.0, "critic_learning_rate": 0.0,
    }  # fmt: skip
    with torch.enable_grad():
        own_reference = make_trainer(tmp_path / "own", kind=Spy, **settings)
        own_reference.train()
        other_reference = make_trainer(tmp_path / "other", kind=Spy, ref_model=make_policy(seed=2), **settings)
        with pytest.warns(UserWarning, match="rollout to the reference"):
            other_reference.train()
    assert own_reference.last_metrics["loss/kl"] == pytest.approx(0, abs=1e-6)
    samples = other_reference.updates[0][0].samples
    policy, reference, kls = make_policy(), make_policy(seed=2), []
    for prompt, is_token, response in zip(
        samples.prompt_ids, samples.prompt_mask, samples.completion_id_lists(), strict=True
    ):
        ids = torch.cat([prompt[is_token], torch.tensor(response)]).unsqueeze(0)
        p, q = (
            (model(input_ids=ids).logits[0, -len(response) - 1 : -1] / 0.5).log_softmax(-1)
            for model in (policy, reference)
        )
        kls.append((p.exp() * (p - q)).sum(-1))
    assert other_reference.last_metrics["loss/kl"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)


def test_kl_coef_adapts_by_number_of_completions(tmp_path: Path) -> None:
    """8 prompts with 3 completions each, at the reference: KL is 0, so β falls by 0.2·n/horizon."""
    trainer = make_trainer(
        tmp_path, max_steps=1, num_generations=3, kl_target=6.0, kl_horizon=100, kl_coef=0.5, num_ppo_epochs=1
    )
    trainer.train()
    assert trainer.controller.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 24 / 100), rel=1e-6)


def test_seq_sum_norm_divides_by_maximum_response_length(tmp_path: Path) -> None:
    """The same short responses with a limit of 10 and of 20 tokens: the second has half the gradients."""
    norms = []
    for length in (10, 20):
        trainer = make_trainer(
            tmp_path / str(length), response_length=length, loss_aggregation="seq-sum-norm", num_ppo_epochs=1,
            num_mini_batches=1, train_dataset=None, reward_funcs=None, entropy_coef=0.1,
        )  # fmt: skip
        queries = prompt_rows(8)["prompt"]
        metrics = trainer.step(queries, [LETTERS[row : row + 1 + row % 4] for row in range(8)], list(range(8)))
        norms.append(
            {name: value for name, value in metrics.items() if name.startswith("grad_norm/") or name == "loss"}
        )
    assert norms[0] == pytest.approx({name: 2 * value for name, value in norms[1].items()}, rel=1e-4)
    assert min(map(abs, norms[1].values())) > 1e-4


class MinibatchRecorder(Spy):
    """Records the rows of each minibatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.minibatches: list[list[int]] = []

    def train_on_minibatch(self, model: Any, batch: Minibatch, progress: Any) -> None:
        self.minibatches.append(batch.indices.tolist())
        super().train_on_minibatch(model, batch, progress)


def test_every_epoch_of_every_update_has_new_shuffle(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=MinibatchRecorder, num_ppo_epochs=3, num_mini_batches=2, max_steps=2)
    trainer.train()
    epochs = [
        tuple(first + second) for first, second in zip(trainer.minibatches[::2], trainer.minibatches[1::2], strict=True)
    ]
    assert len(epochs) == 6 == len(set(epochs))
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)


def test_missing_eos_penalty_and_score_are_not_clipped(tmp_path: Path) -> None:
    scores, ended = torch.tensor([5.0, -5.0, 0.5, -0.5]), torch.tensor([True, True, False, False])
    reward_scores = RewardScores(total=scores, per_reward=scores.unsqueeze(1))
    subtracting = make_trainer(tmp_path, score_clip=1.0, missing_eos_penalty=3.0)
    assert subtracting.shape_scores(reward_scores, ended).tolist() == [1.0, -1.0, -2.5, -3.5]
    replacing = make_trainer(tmp_path, score_clip=1.0, missing_eos_score=-4.0)
    assert replacing.shape_scores(reward_scores, ended).tolist() == [1.0, -1.0, -4.0, -4.0]
