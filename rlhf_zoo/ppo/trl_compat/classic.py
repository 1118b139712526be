"""The step-wise loop of TRL 0.x and its tutorials: generate responses, score them yourself, and step.

    config = PPOConfig(init_kl_coef=0.2, target=6.0, batch_size=16, mini_batch_size=16)
    trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)
    for batch in trainer.dataloader:
        responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=20, do_sample=True)
        rewards = [score(response) for response in responses]  # your own scores
        stats = trainer.step(batch["input_ids"], responses, rewards)
        trainer.log_stats(stats, batch, rewards)

The names are TRL's; the update is `rlhf_zoo.PPOTrainer.step`. docs/from-trl.md lists intended differences.
"""

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.integrations import TensorBoardCallback  # type: ignore[attr-defined]

from ...errors import ZooError
from ...modeling.value_head_models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from .classic_config import ClassicPPOConfig as PPOConfig
from .classic_loop import ClassicLoop
from .helpers import stop_ids_of


class LengthSampler:
    """Draws an integer from [min_value, max_value) at each call.

    Args:
        min_value: The smallest integer, at least 0.
        max_value: The largest integer plus 1.

    Raises:
        ZooError: min_value is negative or not less than max_value.
    """

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 0 <= min_value < max_value:
            raise ZooError(f"LengthSampler got {min_value} and {max_value}, but needs 0 <= min_value < max_value.")
        self.values = range(min_value, max_value)

    def __call__(self) -> int:
        return random.choice(self.values)


def create_reference_model(model: nn.Module, num_shared_layers: int | None = None) -> Any:
    """Makes a frozen copy of a model, in evaluation mode.

    Args:
        model: The policy.
        num_shared_layers: The number of first layers that are shared, together with the embeddings, instead of copied.
            Shared weights are frozen in `model` too. None shares nothing.

    Raises:
        ZooError: num_shared_layers is less than 1, or not less than the model's number of layers.
    """
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    if num_shared_layers is None:
        return reference
    # Model families name their list of layers differently, so assume that it is the longest ModuleList.
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers: list[nn.Module] = max(stacks, key=len, default=[])
    if not 0 < num_shared_layers < len(layers):
        raise ZooError(
            f"num_shared_layers is {num_shared_layers}, but the model has {len(layers)} layers: set it from 1 to "
            f"{len(layers) - 1}, or to None to share none."
        )
    trained_ids = {id(parameter) for layer in layers[num_shared_layers:] for parameter in layer.parameters()}
    for weight, reference_weight in zip(model.parameters(), reference.parameters(), strict=True):
        # `parameters()` yields embeddings, then layers in order: everything before the first trained layer is shared.
        if id(weight) in trained_ids:
            break
        weight.requires_grad_(False)
        reference_weight.data = weight.data
    return reference


class PPOTrainer:
    """The trainer of TRL 0.x, with `generate`, `step` and `log_stats`. `model` is the model that was passed."""

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: AutoModelForCausalLMWithValueHead | None = None,
        ref_model: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        """Builds the trainer from the arguments of the trainer in TRL 0.x.

        Args:
            config: TRL 0.x's settings.
            model: The policy with its value head.
            ref_model: The reference for KL; None for a frozen copy of the policy, or the policy with its adapter off.
            tokenizer: The policy's tokenizer.
            dataset: The rows, which `dataloader` returns in shuffled batches of batch_size; None for no `dataloader`.
            optimizer: The optimizer; None for Trainer's default.
            data_collator: Joins rows of `dataset`.
            num_shared_layers: The number of first layers that policy and reference share; None shares nothing. Not used
                if ref_model is passed.
            lr_scheduler: The learning-rate schedule; None keeps the learning rate.

        Raises:
            ZooError: The configuration or the tokenizer is missing, or the model has no value head or is an
                encoder-decoder.
        """
        if not isinstance(config, PPOConfig):
            raise ZooError(f"config is a {type(config).__name__}: pass a PPOConfig of rlhf_zoo.ppo.trl_compat.classic.")
        if isinstance(model, AutoModelForSeq2SeqLMWithValueHead):
            raise ZooError("PPO supports only decoder-only models, but this model has an encoder: choose another.")
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ZooError(
                f"The model is a {type(model).__name__} without a value head: load it with "
                "AutoModelForCausalLMWithValueHead.from_pretrained."
            )
        if tokenizer is None:
            raise ZooError("The trainer has no tokenizer: pass the model's.")
        if ref_model is None and num_shared_layers is not None:
            ref_model = create_reference_model(model.pretrained_model, num_shared_layers)
        set_seed(config.seed)
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self._trainer = ClassicLoop(
            args=config.to_zoo_config(),
            processing_class=tokenizer,
            model=model,
            ref_model=ref_model,
            optimizers=(optimizer, lr_scheduler),
        )
        for reporter in self._trainer.callback_handler.callbacks:
            if isinstance(reporter, TensorBoardCallback) and reporter.logging_dir is None:
                reporter.logging_dir = str(config.logging_dir)
        self.dataset = dataset
        self.dataloader = None if dataset is None else self.prepare_dataloader(dataset, data_collator)

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None) -> Any:
        """Makes shuffled batches of batch_size rows, which differ between processes. An incomplete batch is dropped.

        Args:
            dataset: The rows.
            data_collator: Joins rows.
        """
        loader: Any = DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            collate_fn=data_collator,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator(torch.get_default_device()).manual_seed(self.config.seed),
        )
        return self.accelerator.prepare(loader)

    @property
    def accelerator(self) -> Any:
        return self._trainer.accelerator

    @property
    def current_device(self) -> torch.device:
        return self._trainer.args.device

    @property
    def optimizer(self) -> Any:
        """The optimizer; None before the first step, unless one was passed."""
        return self._trainer.optimizer

    @property
    def ref_model(self) -> Any:
        """The reference, without a value head, if it is a separate model; otherwise None."""
        assert self._trainer.reference is not None  # its configuration always has one
        return self._trainer.reference.separate_model

    @torch.no_grad()
    def generate(
        self,
        query_tensor: Tensor | Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Calls `model.generate` on a query or on a list of queries.

        Args:
            query_tensor: A 1-D tensor of token ids, or a list of such tensors.
            length_sampler: Draws the number of new tokens for each batch; None leaves it to `generation_kwargs`.
            batch_size: The number of queries at a time.
            return_prompt: Whether responses begin with their prompts.
            generate_ref_response: Whether to return a pair, with the reference's responses second.
            **generation_kwargs: Arguments for `model.generate`.

        Returns:
            (1, L) for one query; for a list, 1-D tensors without padding. A response includes its end token.

        Raises:
            ZooError: A query is not a 1-D tensor with at least one token.
        """
        is_single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        for row, query in enumerate(queries):
            if not isinstance(query, Tensor) or query.dim() != 1 or not len(query):
                kind = f"of shape {tuple(query.shape)}" if isinstance(query, Tensor) else type(query).__name__
                raise ZooError(f"Query {row} is {kind}: pass a 1-D tensor of token ids, or a list of such tensors.")

        def respond(model: Any) -> Any:
            rows: list[Tensor] = []
            for start in range(0, len(queries), batch_size):
                length_argument = {} if length_sampler is None else {"max_new_tokens": length_sampler()}
                batch = queries[start : start + batch_size]
                rows += self._generate_batch(model, batch, return_prompt, generation_kwargs | length_argument)
            return rows[0].unsqueeze(0) if is_single else rows

        responses = respond(self.model)
        if not generate_ref_response:
            return responses
        assert self._trainer.reference is not None
        with self._trainer.reference.model() as reference:
            return responses, respond(reference)

    def _generate_batch(
        self, model: Any, queries: list[Tensor], return_prompt: bool, kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        width = max(len(query) for query in queries)
        pad_id, device = self._trainer.padding_id, self.current_device
        ids = torch.stack([torch.cat([query.new_full((width - len(query),), pad_id), query]) for query in queries])
        ids = ids.to(device)
        mask = torch.stack([torch.arange(width) >= width - len(query) for query in queries]).long().to(device)
        was_training = model.training
        model.eval()  # dropout would change the policy that samples
        sequences = model.generate(input_ids=ids, attention_mask=mask, **{"pad_token_id": pad_id, **kwargs})
        model.train(was_training)
        stop_ids = stop_ids_of(self.model, kwargs.get("generation_config"), kwargs.get("eos_token_id"))
        if kwargs.get("eos_token_id") is None:
            stop_ids.append(self.tokenizer.eos_token_id)
        stop_tensor = torch.tensor(stop_ids, device=device)
        responses = []
        for query, row in zip(queries, sequences[:, width:], strict=True):
            # `generate` pads a row after its end. PAD may be EOS, so only the first end token counts.
            end = torch.isin(row, stop_tensor).nonzero()
            response = row[: int(end[0]) + 1] if len(end) else row
            responses.append(torch.cat([query.to(device), response]) if return_prompt else response)
        return responses

    def step(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Sequence[Any], response_masks: Any = None
    ) -> dict[str, Any]:
        """Makes one PPO update over `batch_size` completions.

        Args:
            queries: 1-D tensors of token ids.
            responses: 1-D tensors of token ids.
            scores: A number or one-element tensor for each response.
            response_masks: Not supported; must be None.

        Returns:
            TRL 0.x's statistics by their names.

        Raises:
            ZooError: The number of queries is not batch_size, a response is empty, a score is not finite, or there are
                response_masks.
        """
        if response_masks is not None:
            raise ZooError(
                "response_masks is not supported, as every response token counts as sampled from the policy: remove it."
            )
        if len(queries) != self.config.batch_size:
            raise ZooError(
                f"step() got {len(queries)} queries, but batch_size is {self.config.batch_size}: pass one batch per "
                "step."
            )
        start = time.perf_counter()
        self._trainer.step(queries, responses, scores)
        return {**self._trainer.statistics, "time/ppo/total": time.perf_counter() - start}

    def log_stats(
        self, stats: Mapping[str, Any], batch: Mapping[str, Any], rewards: Sequence[Any], columns_to_log: Any = None
    ) -> None:
        """Reports the statistics of a step, with `env/reward_mean` and `env/reward_std`, to the reporter in `log_with`.

        Args:
            stats: What `step` returned.
            batch: The queries and responses; not used.
            rewards: The scores.
            columns_to_log: Not used.
        """
        numbers = torch.tensor([float(reward) for reward in rewards], device=self.current_device)
        mean, deviation = self._trainer.mean_and_std(numbers)
        scalars = {name: value for name, value in stats.items() if isinstance(value, (int, float))}
        self._trainer.log({**scalars, "env/reward_mean": mean, "env/reward_std": deviation})

    @property
    def log_history(self) -> list[dict[str, float]]:
        """The statistics that `log_stats` has reported so far, by step."""
        return self._trainer.state.log_history

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Saves the model with its value head, and the tokenizer.

        Args:
            save_directory: The folder.
        """
        self.model.save_pretrained(str(save_directory))
        self.tokenizer.save_pretrained(str(save_directory))

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> None:
        """Pushes the model with its value head, and the tokenizer.

        Args:
            repo_id: The repository.
            **kwargs: As in transformers.
        """
        self.model.push_to_hub(repo_id, **kwargs)
        self.tokenizer.push_to_hub(repo_id, **kwargs)
