"""Policy and critic as one module: run together, trained by one optimizer, saved in one folder."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ZooError
from ..functional import exact_kl
from ..modeling.chunked_logprobs import TokenLoss
from ..modeling.critic import CRITIC_DIR, response_values
from ..modeling.fsdp import load_gathered
from ..modeling.logprobs import response_logprobs, response_states, text_logprobs
from ..modeling.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ModelFiles
from ..modeling.models import disable_dropout, is_peft
from ..modeling.sampling.sampler import Samples
from ..modeling.value_head import VALUE_HEAD_FILE, ValueHead, hidden_size_of, read_value_head


class TextBatch(NamedTuple):
    """Texts for the PTX loss.

    Attributes:
        ids: (B, L) int64, right-padded.
        attention: (B, L) bool, True on tokens.
        mask: (B, L−1) bool, True where the next token is a target.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor


class ActorCriticOutput(NamedTuple):
    """The outputs of policy and critic for response tokens.

    Attributes:
        logprobs: (B, T) in nats, log π at the sampling temperature.
        entropy: (B, T) in nats.
        values: (B, T).
        exact_kl: (B, T) in nats, to the reference; None if the reference's logits were not passed.
        text_logprobs: (B, L−1) in nats; None if no texts were passed.
        policy_loss: A scalar; None if no loss was passed. If it is set, log π and entropy have no gradients.
        policy_terms: The terms of that loss for the metrics, without gradients; None if no loss was passed.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    exact_kl: Tensor | None = None
    text_logprobs: Tensor | None = None
    policy_loss: Tensor | None = None
    policy_terms: Mapping[str, Tensor] | None = None


def shared_value_head(policy: PreTrainedModel) -> ValueHead:
    """Makes a critic on the policy's trunk. At first, V = 0 everywhere.

    Args:
        policy: A model with an LM head, whose input the critic reads.

    Raises:
        ZooError: The policy has no LM head.
    """
    if policy.get_output_embeddings() is None:
        raise ZooError(
            f"{type(policy).__name__} has no output embeddings, but a critic on its trunk reads their input: set "
            "critic to 'policy' or 'reward'."
        )
    head = ValueHead(hidden_size_of(policy.config), summary_dropout_prob=0.0)
    # With a random head, the first advantages would be noise.
    nn.init.zeros_(head.summary.weight)
    nn.init.zeros_(head.summary.bias)
    return head


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one wrapper (DDP, FSDP) and one optimizer serve both."""

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | ValueHead) -> None:
        """Joins policy and critic, and turns their dropout off.

        Args:
            policy: The model in training.
            critic: A separate model, or a value head on the policy's trunk.
        """
        super().__init__()
        self.policy = policy
        self.value_model: Any = critic
        disable_dropout(self)

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head on the policy's trunk."""
        return isinstance(self.value_model, ValueHead)

    def forward(
        self,
        samples: Samples,
        temperature: float = 1.0,
        texts: TextBatch | None = None,
        *,
        ref_logits: Tensor | None = None,
        entropy_requires_grad: bool = False,
        policy_loss: TokenLoss | None = None,
    ) -> ActorCriticOutput:
        """Runs policy and critic on the samples, in one pass if they share a trunk, and the policy on `texts` if given.

        Args:
            samples: B completions.
            temperature: The sampling temperature.
            texts: The texts for the PTX loss; None without that loss.
            ref_logits: (B, T, vocabulary size), the reference's logits for an exact KL; None without it.
            entropy_requires_grad: Whether the entropy has a gradient.
            policy_loss: The policy's loss, computed chunk by chunk where possible, so that not all logits are in memory
                at once. With None, no loss is computed, and log π has gradients.
        """
        shares_trunk = self.shares_trunk
        output = response_logprobs(
            self.policy,
            samples,
            temperature=temperature,
            return_states=shares_trunk,
            return_logits=ref_logits is not None,
            entropy_requires_grad=entropy_requires_grad,
            loss=policy_loss,
        )
        # A shared critic reads the input of the LM head, which is the trunk's output in every architecture. The policy
        # runs first, so that its chunks of logits are freed before the critic's activations take memory.
        values = self.values_from_states(output.states) if shares_trunk else response_values(self.value_model, samples)
        kl = None if ref_logits is None or output.logits is None else exact_kl(output.logits, ref_logits)
        text_token_logprobs = None if texts is None else text_logprobs(self.policy, texts.ids, texts.attention)
        return ActorCriticOutput(
            output.logprobs, output.entropy, values, kl, text_token_logprobs, output.loss, output.loss_terms
        )

    def values_from_states(self, states: Any) -> Tensor:
        """Computes V from the input of the policy's head, for a shared trunk.

        Args:
            states: (…, H).

        Returns:
            (…) float32.
        """
        return self.value_model(states).squeeze(-1)

    def values(self, samples: Samples) -> Tensor:
        """Computes V of the state before each response token.

        Args:
            samples: B completions.

        Returns:
            (B, T) float32, undefined outside the mask.
        """
        if self.shares_trunk:
            return self.values_from_states(response_states(self.policy, samples))
        return response_values(self.value_model, samples)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Switches on gradient checkpointing in every trunk.

        Args:
            **kwargs: As in transformers.
        """
        for trunk in self._trunks:
            trunk.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Does the same as `activation_checkpointing_enable`. transformers up to 5.17 calls this name.

        Args:
            **kwargs: As in transformers.
        """
        for trunk in self._trunks:
            trunk.gradient_checkpointing_enable(**kwargs)

    @property
    def _trunks(self) -> Sequence[Any]:
        return (self.policy,) if self.shares_trunk else (self.policy, self.value_model)

    def save_pretrained(
        self, directory: str | Path, *, merge: bool = False, weights: tuple[Any, Any] = (None, None)
    ) -> None:
        """Saves the policy as a plain checkpoint in `directory`, and the critic in `directory/critic`.

        Args:
            directory: The folder, which is created if it does not exist.
            merge: Whether to merge the policy's adapter into its base.
            weights: State dicts of policy and critic, if the modules are sharded; None for the modules' own. Not used
                for adapters and for the head of a shared critic.
        """
        policy_weights, critic_weights = weights
        directory = Path(directory)
        policy: Any = self.policy
        if merge and is_peft(policy):
            policy = copy.deepcopy(policy).merge_and_unload()
            # An adapter that was saved here before would be applied again, to the merged weights.
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (directory / name).unlink(missing_ok=True)
        _save(policy, directory, policy_weights)
        if not self.shares_trunk:
            _save(self.value_model, directory / CRITIC_DIR, critic_weights)
            return
        (directory / CRITIC_DIR).mkdir(parents=True, exist_ok=True)
        # Use TRL's names, so that TRL can load the head.
        state = self.value_model.state_dict()
        tensors = {f"v_head.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, directory / VALUE_HEAD_FILE, metadata={"format": "pt"})

    def load_checkpoint(self, directory: str | Path) -> None:
        """Loads the weights that `save_pretrained` saved, exactly, into these modules.

        Args:
            directory: The checkpoint.

        Raises:
            ZooError: The directory has no checkpoint, or another model's.
        """
        directory = Path(directory)
        _load_into(self.policy, directory)
        if not self.shares_trunk:
            _load_into(self.value_model, directory / CRITIC_DIR)
            return
        head = read_value_head(ModelFiles(directory))
        if head is None:
            raise ZooError(f"{directory} has no {VALUE_HEAD_FILE}: its critic is not a value head.")
        self.value_model.load_state_dict(head)


def _save(model: Any, directory: Path, weights: Any) -> None:
    """Saves a model. An adapter is saved in `directory` itself, where loaders look for it.

    By default, PEFT saves all adapters. An adapter with a name other than "default" goes into a subfolder of that name.
    """
    if not is_peft(model):
        model.save_pretrained(directory, state_dict=weights)
        return
    name = model.active_adapter
    model.save_pretrained(directory, selected_adapters=[name])
    if name != "default":
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            (directory / name / file).replace(directory / file)
        (directory / name).rmdir()


def _load_into(model: PreTrainedModel, directory: Path) -> None:
    """Copies a checkpoint's weights into `model`, in place, because an optimizer may refer to its parameters.

    `from_pretrained` reads the checkpoint, because some architectures save weights under names that differ from their
    modules' names.
    """
    if directory.is_dir():
        ModelFiles(directory).check_weights()
    if is_peft(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        if not (directory / ADAPTER_WEIGHTS).is_file():
            raise ZooError(f"{directory} has no {ADAPTER_WEIGHTS}: it is not an adapter checkpoint; choose another.")
        peft_model: Any = model
        # Load onto the CPU, because loading onto the GPU would need memory for a second copy.
        weights = load_peft_weights(str(directory), device="cpu")
        set_peft_model_state_dict(peft_model, weights, adapter_name=peft_model.active_adapter)
        return
    model_class: Any = type(model)
    try:
        checkpoint_model, loading_info = model_class.from_pretrained(
            directory,
            config=model.config,
            dtype=model.dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ZooError(f"{directory} has no model*.safetensors: it is not a checkpoint; choose another.") from error
    problems = ("unexpected_keys", "missing_keys", "mismatched_keys")
    wrong_keys = [key for problem in problems for key in sorted(loading_info[problem])]
    if wrong_keys:
        # An entry of mismatched_keys is (key, saved shape, shape in the model).
        names = ", ".join(key if isinstance(key, str) else key[0] for key in wrong_keys[:3])
        raise ZooError(
            f"{directory} does not fit this {type(model).__name__} ({names}): it is another model's checkpoint."
        )
    # Under FSDP each process copies its shard of the full weights.
    load_gathered(model, checkpoint_model.state_dict())
