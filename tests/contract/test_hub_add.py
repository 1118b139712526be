"""`rlhf-zoo hub add`: a model in a folder or a GGUF file becomes a repository that recipes can start from."""

import hashlib
from pathlib import Path

import pytest
from gguf_fixture import FILE, write_gguf
from huggingface_hub import ModelCard
from thread_hub import ThreadHub
from trainer_fixture import make_policy, make_tokenizer
from zoo_process import errors, zoo

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.modeling.loading import load_tokenizer
from rlhf_zoo.modeling.models import load_causal
from rlhf_zoo.publishing.add_model import add_model
from rlhf_zoo.runs.models import model_from_elsewhere

NAME = "maker/base"


def save(folder: Path) -> Path:
    make_policy().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_add_model_uploads_only_model_files_and_only_once(tmp_path: Path, thread_hub: ThreadHub) -> None:
    hub = Hub("other", thread_hub.url, "a test")
    folder = save(tmp_path / "base")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMy model.\n")
    for name in ("LICENSE.txt", "training_args.bin", "notes.md", ".env"):
        (folder / name).write_text(name)
    added = add_model(str(folder), NAME, license=None, source="trained by hand", hub=hub)
    assert (added.is_new, added.license) == (True, "mit")
    files = set(thread_hub.api().list_repo_files(NAME))
    assert {"config.json", "model.safetensors", "README.md", "LICENSE.txt"} <= files
    assert not {"training_args.bin", "notes.md", ".env"} & files
    card = ModelCard.load(NAME)
    assert "My model." in card.text and "Source: trained by hand" in card.text and card.data.license == "mit"
    assert (folder / "README.md").read_text().endswith("My model.\n"), "the folder itself is not changed"

    repeated = add_model(str(folder), NAME, license=None, source=None, hub=hub)
    assert (repeated.is_new, repeated.commit) == (False, added.commit)
    changed = add_model(str(folder), NAME, license="apache-2.0", source=None, hub=hub)
    assert changed.is_new and ModelCard.load(NAME).data.license == "apache-2.0"


def test_add_model_rejects_other_model_and_incomplete_folder(tmp_path: Path, thread_hub: ThreadHub) -> None:
    hub = Hub("other", thread_hub.url, "a test")
    folder = save(tmp_path / "base")
    add_model(str(folder), NAME, license=None, source=None, hub=hub)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ZooError, match=f"{NAME} on .* holds another model: choose another name"):
        add_model(str(folder), NAME, license="mit", source=None, hub=hub)
    weights = (folder / "model.safetensors").read_bytes()
    for file, message in (
        ("tokenizer_config.json", "has no tokenizer"),
        ("model.safetensors", "has no weights in safetensors"),
        ("config.json", r"has no configuration \(config.json\)"),
    ):
        for path in folder.glob("tokenizer*") if file.startswith("tokenizer") else [folder / file]:
            path.rename(tmp_path / path.name)
        with pytest.raises(ZooError, match=message):
            add_model(str(folder), "maker/other", license=None, source=None, hub=hub)
        for path in tmp_path.glob("*.*"):
            path.rename(folder / path.name)
    (folder / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(ZooError, match="truncated or damaged"):
        add_model(str(folder), "maker/other", license=None, source=None, hub=hub)
    (folder / "model.safetensors").unlink()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "maker/base"}')
    with pytest.raises(ZooError, match="is an adapter: merge it into its base"):
        add_model(str(folder), "maker/other", license=None, source=None, hub=hub)
    assert not thread_hub.api().repo_exists("maker/other")


def test_lineage_of_added_gguf_file_has_its_sha256(
    tmp_path: Path, thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "zoo"))
    hub, file = Hub("other", thread_hub.url, "a test"), write_gguf(tmp_path)
    add_model(str(file), NAME, license=None, source=None, hub=hub)
    lineage = model_from_elsewhere(NAME, hub, recipe="mine").lineage
    assert (lineage["repo"], lineage["gguf"]) == (NAME, hashlib.sha256(file.read_bytes()).hexdigest())


def test_hub_add_command_adds_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path)
    result = zoo("hub", "add", file, NAME, "--source", "made here", home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{NAME} now holds the model of {file} (commit "), result.stdout
    (folder,) = (tmp_path / "zoo" / "gguf").glob(f"*/{FILE}")
    assert load_tokenizer(folder).pad_token == "<|endoftext|>" and load_causal(folder)
    repeated = zoo("hub", "add", tmp_path, NAME, home=tmp_path)
    assert (repeated.returncode, repeated.stdout[:40]) == (0, f"{NAME} already holds the model of {tmp_path}"[:40])
    pulled = zoo("pull", NAME, "--hub", "local", "--output_dir", tmp_path / "pulled", home=tmp_path)
    assert pulled.returncode == 0, pulled.stderr
    card = (tmp_path / "pulled" / "README.md").read_text()
    assert "license: mit" in card and f"GGUF file `{FILE}` (Q8_0, sha256 `" in card and "Source: made here" in card
    for words in (("nowhere", NAME), (str(file), "base"), (str(file), "a/b/c")):
        refused = zoo("hub", "add", *words, home=tmp_path)
        assert (refused.returncode, len(errors(refused.stderr))) == (2, 1), refused.stderr
