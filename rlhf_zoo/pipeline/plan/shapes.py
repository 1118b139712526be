"""Finds the configurations of the models that a recipe names, without downloading weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError, first_line
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.pull import split_revision
from ...modeling.gguf import find_gguf, unpack_if_gguf
from ...modeling.loading import load_config
from ...modeling.model_files import ADAPTER_CONFIG
from ...runs.checks.files import fetch_files
from .shipped_shapes import shipped_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's layers, and the dtype of its weights: all that a plan needs to know about it.

    Attributes:
        config: The model's transformers configuration.
        dtype: The dtype of the saved weights, by torch's name.
    """

    config: "PreTrainedConfig"
    dtype: str

    @property
    def context_length(self) -> int:
        """Context length in tokens; 1024 if the configuration does not state it."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or 1024)


#: The files that a model's shape is read from.
SHAPE_FILES = ("config.json", ADAPTER_CONFIG, "*.py")


def has_local_shape(name: str) -> bool:
    """Whether the shape of a model can be found without a Hub.

    Args:
        name: A folder, a GGUF file, or NAMESPACE/NAME[@REVISION].
    """
    return Path(name).is_dir() or find_gguf(name) is not None or split_revision(name)[0] in shipped_shapes()


def find_shape(name: str, *, revision: str | None = None, hub: Hub = DEFAULT_HUB) -> ModelShape:
    """Finds a model's shape in a folder, in recipes/shapes.yaml, or on a Hub, in this order.

    Args:
        name: A folder, a GGUF file, or NAMESPACE/NAME[@REVISION].
        revision: Revision of the repository; None for the revision in the name, or else the default revision.
        hub: Where Hub ids are looked up.

    Raises:
        ZooError: The model cannot be found.
    """
    subject = f"The model {name}"
    if Path(name := unpack_if_gguf(name)).is_dir():
        return _read_shape(name, subject)
    repo, name_revision = split_revision(name)
    if repo in shipped_shapes():
        return _shipped_shape(repo)
    folder = fetch_files(
        repo,
        revision or name_revision,
        hub,
        patterns=SHAPE_FILES,
        fix="check its name, --hub and --source_hub, or name the folder of its config.json.",
    )
    return _read_shape(str(folder), f"The model {repo}")


def _read_shape(folder: str, subject: str) -> ModelShape:
    config = load_config(folder, subject=subject)
    return ModelShape(config, str(config.dtype or "float32").removeprefix("torch."))


def _shipped_shape(repo: str) -> ModelShape:
    keys = dict(shipped_shapes()[repo])
    if (similar_repo := keys.pop("like", None)) is not None:
        keys = {**shipped_shapes()[similar_repo], **keys}
    dtype, num_labels = keys.pop("dtype"), keys.pop("labels", None)
    del keys["parameters"]  # a check of the entry; all other keys belong to the configuration
    subject = f"The shape of {repo} in recipes/shapes.yaml"
    return ModelShape(_build_config(keys, subject=subject, num_labels=num_labels), dtype)


def new_shape(architecture: Mapping[str, Any], *, vocabulary: int) -> ModelShape:
    """Returns the shape of a model that SFT trains from scratch.

    Args:
        architecture: The key `architecture` of recipe.yaml.
        vocabulary: Vocabulary size.

    Raises:
        ZooError: transformers cannot build the model.
    """
    return ModelShape(_build_config({"vocab_size": vocabulary, **architecture}, subject="The architecture"), "float32")


def _build_config(keys: Mapping[str, Any], *, subject: str, num_labels: int | None = None) -> "PreTrainedConfig":
    from transformers import AutoConfig

    fields = dict(keys)
    model_type = fields.pop("model_type", None)
    if num_labels is not None:
        fields["num_labels"] = num_labels
    try:
        return AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError) as error:
        raise ZooError(f"{subject} cannot be built ({first_line(error)}): correct its keys.") from error
