"""Policy and critic as one module: run together, trained by one optimizer, saved beside each other."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ZooError
from ..functional import exact_kl
from ..modeling.fsdp import load_full
from ..modeling.loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ModelFiles
from ..modeling.logprobs import TokenLoss, response_logprobs, response_states, text_logprobs
from ..modeling.models import CRITIC_DIR, disable_dropout, is_peft, response_values
from ..modeling.sampling.sampler import Samples
from ..modeling.value_head import VALUE_HEAD_FILE, ValueHead, hidden_size_of, read_value_head


class TextBatch(NamedTuple):
    """Texts for the language-model loss.

    Attributes:
        ids: (B, L) int64, right-padded.
        attention: (B, L) bool, True on tokens.
        mask: (B, L−1) bool, the next tokens that count as targets.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor


class ActorCriticOutput(NamedTuple):
    """What policy and critic say of response tokens.

    Attributes:
        logprobs: (B, T) in nats, log π at the sampling temperature.
        entropy: (B, T) in nats.
        values: (B, T).
        exact_kl: (B, T) in nats, to the reference whose logits were given.
        text_logprobs: (B, L−1) in nats, of the texts that were given.
        policy_loss: of the loss that was given. Then log π and entropy have no gradients: the loss has them.
        policy_terms: its terms for the metrics, without gradients.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    exact_kl: Tensor | None = None
    text_logprobs: Tensor | None = None
    policy_loss: Tensor | None = None
    policy_terms: Mapping[str, Tensor] | None = None


def shared_value_head(policy: PreTrainedModel) -> ValueHead:
    """A critic on the policy's trunk, with V = 0 everywhere at first.

    Raises:
        ZooError: the policy has no LM head.
    """
    if policy.get_output_embeddings() is None:
        raise ZooError(
            f"{type(policy).__name__} names no output embeddings, which a critic on its trunk reads: give critic "
            "another value than 'shared'."
        )
    head = ValueHead(hidden_size_of(policy.config), summary_dropout_prob=0.0)
    nn.init.zeros_(head.summary.weight)
    nn.init.zeros_(head.summary.bias)
    return head


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one wrapper (DDP, FSDP) and one optimizer serve both."""

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | ValueHead) -> None:
        """Joins policy and critic, and turns their dropout off.

        Args:
            policy: the model in training.
            critic: a model of its own, or a value head on the policy's trunk.
        """
        super().__init__()
        self.policy = policy
        self.value_model: Any = critic
        disable_dropout(self)

    @property
    def shared(self) -> bool:
        """Whether the critic reads the policy's trunk."""
        return isinstance(self.value_model, ValueHead)

    def forward(
        self,
        samples: Samples,
        temperature: float = 1.0,
        texts: TextBatch | None = None,
        *,
        ref_logits: Tensor | None = None,
        entropy_learns: bool = False,
        policy_loss: TokenLoss | None = None,
    ) -> ActorCriticOutput:
        """Runs each trunk once.

        Args:
            samples: b completions.
            temperature: of the sampling.
            texts: for the language-model loss.
            ref_logits: (b, T, V), the reference's, for an exact KL.
            entropy_learns: whether the entropy has a gradient.
            policy_loss: computed with the head, chunk by chunk of the logits. Without one, log π has gradients.
        """
        shared = self.shared
        output = response_logprobs(
            self.policy,
            samples,
            temperature=temperature,
            states=shared,
            logits=ref_logits is not None,
            entropy_learns=entropy_learns,
            loss=policy_loss,
        )
        # What the LM head is given is the trunk's output at the response positions, whatever the architecture.
        # The policy's pass comes first, and with it the chunks of logits: the critic's activations are not held yet.
        values = self.value_of(output.states) if shared else response_values(self.value_model, samples)
        kl = None if ref_logits is None or output.logits is None else exact_kl(output.logits, ref_logits)
        of_texts = None if texts is None else text_logprobs(self.policy, texts.ids, texts.attention)
        return ActorCriticOutput(output.logprobs, output.entropy, values, kl, of_texts, output.loss, output.loss_terms)

    def value_of(self, states: Any) -> Tensor:
        """V of what the policy's head reads, (…, H) -> (…) float32, where critic and policy share a trunk."""
        return self.value_model(states).squeeze(-1)

    def values(self, samples: Samples) -> Tensor:
        """V of the state before each response token, (B, T) float32; what lies outside the mask is meaningless."""
        if self.shared:
            return self.value_of(response_states(self.policy, samples))
        return response_values(self.value_model, samples)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        for trunk in self._trunks:
            trunk.activation_checkpointing_enable(**kwargs)

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """The same, as transformers 5.17 names it."""
        for trunk in self._trunks:
            trunk.gradient_checkpointing_enable(**kwargs)

    @property
    def _trunks(self) -> Sequence[Any]:
        return (self.policy,) if self.shared else (self.policy, self.value_model)

    def save_pretrained(
        self, directory: str | Path, *, merge: bool = False, weights: tuple[Any, Any] = (None, None)
    ) -> None:
        """Saves the policy as a plain checkpoint in `directory`, and the critic in `directory/critic`.

        Args:
            directory: made where it is missing.
            merge: whether a policy with an adapter is saved as its base with the adapter merged in.
            weights: state dicts of policy and critic, where the modules themselves hold shards; None takes their own.
        """
        of_policy, of_critic = weights
        directory = Path(directory)
        policy: Any = self.policy
        if merge and is_peft(policy):
            policy = copy.deepcopy(policy).merge_and_unload()
            # Where an unmerged one was saved before: whoever found its adapter would put it onto the merged weights.
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (directory / name).unlink(missing_ok=True)
        _save(policy, directory, of_policy)
        if not self.shared:
            _save(self.value_model, directory / CRITIC_DIR, of_critic)
            return
        (directory / CRITIC_DIR).mkdir(parents=True, exist_ok=True)
        tensors = {f"v_head.{name}": t.detach().cpu().contiguous() for name, t in self.value_model.state_dict().items()}
        save_file(tensors, directory / VALUE_HEAD_FILE, metadata={"format": "pt"})

    def load_checkpoint(self, directory: str | Path) -> None:
        """Loads what `save_pretrained` wrote into these modules, bit for bit.

        Raises:
            ZooError: the directory holds no such checkpoint, or one of another model.
        """
        directory = Path(directory)
        _load_into(self.policy, directory)
        if not self.shared:
            _load_into(self.value_model, directory / CRITIC_DIR)
            return
        head = read_value_head(directory)
        if head is None:
            raise ZooError(f"{directory} holds no {VALUE_HEAD_FILE}: its critic is none on the policy's trunk.")
        self.value_model.load_state_dict(head)


def _save(model: Any, directory: Path, weights: Any) -> None:
    """`save_pretrained`, but the adapter in training lies in `directory` itself, where whoever loads it looks.

    PEFT puts one of another name than "default" into a folder of that name, and all others beside it.
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
    """Copies a checkpoint's weights into `model`, whose parameters an optimizer may hold already.

    `from_pretrained` reads them: some architectures are saved under other names than their modules have.
    """
    if directory.is_dir():
        ModelFiles(directory).check_weights()
    if is_peft(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        if not (directory / ADAPTER_WEIGHTS).is_file():
            raise ZooError(
                f"{directory} holds no {ADAPTER_WEIGHTS}: it is not a checkpoint of an adapter; choose another."
            )
        adapted: Any = model
        weights = load_peft_weights(str(directory), device="cpu")
        set_peft_model_state_dict(adapted, weights, adapter_name=adapted.active_adapter)
        return
    kind: Any = type(model)
    try:
        loaded, info = kind.from_pretrained(
            directory,
            config=model.config,
            dtype=model.dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ZooError(f"{directory} holds no model*.safetensors: it is not a checkpoint; choose another.") from error
    misfits = [key for name in ("unexpected_keys", "missing_keys", "mismatched_keys") for key in sorted(info[name])]
    if misfits:
        names = ", ".join(key if isinstance(key, str) else key[0] for key in misfits[:3])
        raise ZooError(
            f"{directory} does not fit this {type(model).__name__} ({names}): it is another model's checkpoint."
        )
    load_full(model, loaded.state_dict())
