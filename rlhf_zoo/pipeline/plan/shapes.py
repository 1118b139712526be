"""The configurations of the models that a recipe names, without their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.pull import split_revision
from ...modeling.loading import ADAPTER_CONFIG, first_line, load_config
from ...runs.checks.models import look_at
from ...runs.recipe import read_mapping, shipped


@dataclass(frozen=True)
class Shape:
    """config: transformers' own. dtype: in which the weights are saved, a name of torch's."""

    config: Any
    dtype: str

    @property
    def context(self) -> int:
        """Tokens; 1024 where nothing bounds it."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or 1024)


#: Of a model, what says its shape.
READ = ("config.json", ADAPTER_CONFIG, "*.py")


def is_at_hand(name: str) -> bool:
    """Whether a model's shape is known without asking a Hub."""
    return Path(name).is_dir() or split_revision(name)[0] in known()


def shape_of(name: str, *, revision: str | None = None, hub: Hub = CLIENT) -> Shape:
    """A model's shape: of a folder, of recipes/shapes.yaml, or of a Hub, in this order.

    Args:
        name: A folder, or NAMESPACE/NAME with or without @REVISION.
        revision: Of the repository, where the name says none.
        hub: Where to look; its source comes after it.

    Raises:
        ZooError: None of them has it.
    """
    if Path(name).is_dir():
        return _read(name, f"The model {name}")
    repo, at = split_revision(name)
    if repo in known():
        return _known(repo)
    folder = look_at(
        repo,
        revision or at,
        hub,
        patterns=READ,
        what=f"The model {repo} is no folder, is not in recipes/shapes.yaml and",
        mend="check its name, --hub and --source_hub, or give the folder of its config.json.",
    )
    return _read(str(folder), f"The model {repo}")


def _read(folder: str, what: str) -> Shape:
    config = load_config(folder, what=what)
    return Shape(config, str(config.dtype or "float32").removeprefix("torch."))


def known() -> Mapping[str, Mapping[str, Any]]:
    """recipes/shapes.yaml."""
    return read_mapping(shipped() / "shapes.yaml")


def _known(name: str) -> Shape:
    keys = dict(known()[name])
    if (other := keys.pop("like", None)) is not None:
        keys = {**known()[other], **keys}
    dtype, labels, _ = keys.pop("dtype"), keys.pop("labels", None), keys.pop("parameters")
    return Shape(_configuration(keys, what=f"recipes/shapes.yaml says of {name} a shape that", labels=labels), dtype)


def new_shape(architecture: Mapping[str, Any], *, vocabulary: int) -> Shape:
    """Of a model that SFT makes: `architecture` of recipe.yaml."""
    return Shape(_configuration({"vocab_size": vocabulary, **architecture}, what="The architecture"), "float32")


def _configuration(keys: Mapping[str, Any], *, what: str, labels: int | None = None) -> Any:
    from transformers import AutoConfig

    fields = dict(keys)
    kind = fields.pop("model_type", None)
    if labels is not None:
        fields["num_labels"] = labels
    try:
        return AutoConfig.for_model(kind, **fields)
    except (ValueError, TypeError) as error:
        raise ZooError(f"{what} cannot be built ({first_line(error)}).") from error
