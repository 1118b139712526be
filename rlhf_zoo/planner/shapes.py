"""The configurations of the models that a recipe names, without their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..hub.connect import CLIENT
from ..hub.pull import split_revision
from ..hub.refusals import refusals_as
from ..model_files import first_line, load_config
from ..recipes import read_mapping, shipped


@dataclass(frozen=True)
class Shape:
    """config: transformers' own. dtype: in which the weights are saved, a name of torch's."""

    config: Any
    dtype: str

    @property
    def context(self) -> int:
        """Tokens; 1024 where nothing bounds it."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or 1024)


def shape_of(name: str, *, revision: str | None = None) -> Shape:
    """Of a folder, of recipes/shapes.yaml, or of a Hub, in this order; name: also NAMESPACE/NAME@REVISION.

    Raises ZooError where none of them has it.
    """
    if Path(name).is_dir():
        return _read(name, None, f"The model {name}")
    repo, at = split_revision(name)
    if repo in known():
        return _known(repo)
    what = f"The model {repo} is no folder, is not in recipes/shapes.yaml and cannot be found on {CLIENT.address}"
    with refusals_as(what, "check its name, or give the folder of its config.json."):
        if (silence := CLIENT.silence()) is not None:
            raise silence
        return _read(repo, revision or at, f"The model {repo}")


def _read(source: str, revision: str | None, what: str) -> Shape:
    config = load_config(source, what=what, **({"revision": revision} if revision else {}))
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
