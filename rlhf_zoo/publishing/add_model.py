"""Puts a model from a folder or a GGUF file on a Hub, so that recipes, adapters and lineage can name it there."""

import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import ZooError
from ..hub.client.connect import Hub
from ..hub.client.publish import checkpoint_files, hub_content_id, local_content_id, publish_files
from ..hub.client.refusals import translate_hub_errors
from ..modeling.embedder import SENTENCE_FILES
from ..modeling.gguf import SOURCE_FILE, gguf_source, unpack_if_gguf
from ..modeling.loading import TOKENIZER_FILES
from ..modeling.model_files import find_model_files

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

README = "README.md"
#: Matches the names of additional files to send with the model.
_EXTRA_FILE = re.compile(rf"licen[cs]e|notice|{re.escape(SOURCE_FILE)}", re.IGNORECASE)


@dataclass(frozen=True)
class AddResult:
    """The result of `add_model`.

    Attributes:
        repo: NAMESPACE/NAME.
        commit: The commit with the model.
        is_new: Whether this call made the commit; False if the repository already had the same files.
        license: The license on its card; None if there is none.
    """

    repo: str
    commit: str
    is_new: bool
    license: str | None


def add_model(model_path: str, repo: str, *, license: str | None, source: str | None, hub: Hub) -> AddResult:
    """Puts a causal language model, a reward model or a sentence embedder on a Hub in one commit.

    Sends weights, configuration, tokenizer, license, card and the settings of sentence-transformers. A GGUF file is
    unpacked first.

    Args:
        model_path: A folder, or a GGUF file.
        repo: NAMESPACE/NAME.
        license: The Hub's identifier of the license; None for the one that the card or the GGUF file names.
        source: Where the model comes from, to add to the card; None to add nothing.
        hub: The Hub to publish to.

    Raises:
        ZooError: The model does not exist, is damaged or is an adapter; the repository holds another model; or the Hub
            refuses.
    """
    folder = Path(unpack_if_gguf(model_path))
    if not folder.is_dir():
        raise ZooError(f"{model_path} is neither a folder nor a GGUF file: pass the path of a model.")
    folder_files = find_model_files(folder)
    if folder_files.adapter_config is not None:
        raise ZooError(f"{model_path} is an adapter: merge it into its base, and add the merged model.")
    for kind, names in (("configuration", ("config.json",)), ("tokenizer", TOKENIZER_FILES)):
        if not any(folder_files.has(file) for file in names):
            raise ZooError(f"{model_path} has no {kind} ({' or '.join(names)}): save it in that folder too.")
    if folder_files.weights is None:
        raise ZooError(f"{model_path} has no weights in safetensors: save the model in that folder.")
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-add-") as scratch:
        card = Path(scratch) / README
        card_license = _write_card(card, folder, title=repo.partition("/")[2], license=license, source=source)
        extra_files = {path.name: path for path in folder.iterdir() if _EXTRA_FILE.match(path.name)}
        sentence_files = (path for pattern in SENTENCE_FILES for path in folder.glob(pattern))
        model_files = checkpoint_files(folder) | {path.relative_to(folder).as_posix(): path for path in sentence_files}
        files = {**model_files, **extra_files, README: card}
        with translate_hub_errors(f"{repo} cannot be written on {hub.name}", "check its name, and try again."):
            # Without a license or source to add, only the model files must be equal: the card may have been edited.
            commit = _commit_with_files(repo, files if license or source else model_files, model_files, hub)
            is_new = commit is None
            commit = commit or publish_files(files, repo, repo_type="model", message=f"Add {folder.name}", hub=hub)
    return AddResult(repo, commit, is_new, card_license)


def _commit_with_files(repo: str, files: Mapping[str, Path], model_files: Collection[str], hub: Hub) -> str | None:
    """Returns the head commit of `main` if it has these files; None if they must be sent.

    Raises ZooError if the repository holds a model whose `model_files` differ.
    """
    api = hub.api()
    if not api.repo_exists(repo) or not api.file_exists(repo, "config.json"):
        return None
    commit = str(api.model_info(repo).sha)
    entries = cast("list[RepoFile]", api.get_paths_info(repo, list(files), revision=commit))
    equal_files = {
        entry.path for entry in entries if local_content_id(files[entry.path], entry) == hub_content_id(entry)
    }
    if not equal_files.issuperset(model_files):
        raise ZooError(f"{repo} on {hub.name} holds another model: choose another name.")
    return commit if equal_files == set(files) else None


def _write_card(path: Path, folder: Path, *, title: str, license: str | None, source: str | None) -> str | None:
    """Writes the model's own card, or a short one if it has none. Returns the license on the card."""
    from huggingface_hub import ModelCard

    gguf = gguf_source(folder)
    if (folder / README).is_file():
        card = ModelCard.load(folder / README)
    else:
        card = ModelCard(f"---\nlibrary_name: transformers\n---\n\n# {title}\n")
        if gguf:
            quantization = gguf.get("quantization") or "quantization unknown"
            card.text += (
                f"\nUnpacked from the GGUF file `{gguf.get('file')}` ({quantization}, sha256 `{gguf.get('sha256')}`) "
                "into float32. Quantization rounded the weights, so they are not those of the original model.\n"
            )
    card_license = license or card.data.license or gguf.get("license")
    if card_license is not None:
        card.data.license = card_license
    if source is not None:
        card.text += f"\nSource: {source}\n"
    card.save(path)
    return card_license if isinstance(card_license, str) else None
