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
from .published import published_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Shape:
    """The architecture of a model.

    Attributes:
        config: The model's transformers configuration.
        dtype: The dtype of the saved weights, by torch's name.
    """

    config: "PreTrainedConfig"
    dtype: str

    @property
    def context(self) -> int:
        """Context length in tokens; 1024 if the configuration does not state it."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or 1024)


#: The files that a model's shape is read from.
SHAPE_FILES = ("config.json", ADAPTER_CONFIG, "*.py")


def is_local_shape(name: str) -> bool:
    """Whether a model's shape is available without a Hub.

    Args:
        name: A folder, a GGUF file, or NAMESPACE/NAME[@REVISION].
    """
    return Path(name).is_dir() or find_gguf(name) is not None or split_revision(name)[0] in published_shapes()


def find_shape(name: str, *, revision: str | None = None, hub: Hub = DEFAULT_HUB) -> Shape:
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
    if repo in published_shapes():
        return _published_shape(repo)
    folder = fetch_files(
        repo,
        revision or name_revision,
        hub,
        patterns=SHAPE_FILES,
        fix="check its name, --hub and --source_hub, or name the folder of its config.json.",
    )
    return _read_shape(str(folder), f"The model {repo}")


def _read_shape(folder: str, subject: str) -> Shape:
    config = load_config(folder, subject=subject)
    return Shape(config, str(config.dtype or "float32").removeprefix("torch."))


def _published_shape(repo: str) -> Shape:
    keys = dict(published_shapes()[repo])
    if (similar_repo := keys.pop("like", None)) is not None:
        keys = {**published_shapes()[similar_repo], **keys}
    dtype, labels, _ = keys.pop("dtype"), keys.pop("labels", None), keys.pop("parameters")
    return Shape(_build_config(keys, subject=f"The shape of {repo} in recipes/shapes.yaml", labels=labels), dtype)


def new_shape(architecture: Mapping[str, Any], *, vocabulary: int) -> Shape:
    """Returns the shape of a model that SFT creates.

    Args:
        architecture: The key `architecture` of recipe.yaml.
        vocabulary: Vocabulary size.

    Raises:
        ZooError: transformers cannot build the model.
    """
    return Shape(_build_config({"vocab_size": vocabulary, **architecture}, subject="The architecture"), "float32")


def _build_config(keys: Mapping[str, Any], *, subject: str, labels: int | None = None) -> "PreTrainedConfig":
    from transformers import AutoConfig

    fields = dict(keys)
    model_type = fields.pop("model_type", None)
    if labels is not None:
        fields["num_labels"] = labels
    try:
        return AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError) as error:
        raise ZooError(f"{subject} cannot be built ({first_line(error)}): correct its keys.") from error
