"""`relevance`: mean-pooled embeddings of a tiny BERT, from a folder and from a Hub, and the models that are refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_hub import ThreadHub
from trainer_fixture import make_policy, make_tokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerBase

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.judges.rule import RuleJudge
from rlhf_zoo.hub.client.connect import DEFAULT_HUB, Hub, connect, current_hub
from rlhf_zoo.plugins import load_object
from rlhf_zoo.publishing.add_model import add_model
from rlhf_zoo.rewards import relevance as module
from rlhf_zoo.rewards.relevance import MINILM, Relevance, relevance

POSITIONS = 24


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights, as sentence-transformers saves a model."""
    folder = tmp_path_factory.mktemp("embedder")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=POSITIONS, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def cosine(folder: Path, *texts: str) -> float:
    """The cosine of two texts, each embedded alone and without padding."""
    tokenizer: PreTrainedTokenizerBase = make_tokenizer()
    model: Any = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        means = [model(torch.tensor([tokenizer(t)["input_ids"]])).last_hidden_state[0].mean(0) for t in texts]
    return float(torch.cosine_similarity(*means, dim=0))


def test_relevance_is_cosine_of_token_means_and_ignores_padding(embedder: Path) -> None:
    prompts = ["name a fruit", "name a fruit", "abc", "name a fruit", "", "abc"]
    completions = ["a banana:", "b", "abc", " \n", "b", "a fruit has a name"]
    scores = Relevance(model=str(embedder), batch_size=3)(prompts, completions, other=[1] * 6)
    for place in (0, 1, 5):
        assert scores[place] == pytest.approx(cosine(embedder, prompts[place], completions[place]), abs=1e-5)
        assert -1 <= scores[place] < 0.999
    assert scores[2] == pytest.approx(1) and scores[3:5] == [0, 0], "an empty text is not relevant"
    assert Relevance(model=str(embedder))([], []) == []


def test_relevance_reads_last_user_message_of_conversations(embedder: Path) -> None:
    reward = Relevance(model=str(embedder))
    prompt = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": "name a fruit"},
        {"role": "assistant", "content": "b"},
    ]
    chat = reward(
        [prompt, prompt[:1]], [[{"role": "assistant", "content": [{"type": "text", "text": "a banana"}]}]] * 2
    )
    assert chat == pytest.approx(reward(["name a fruit", "abc"], ["a banana"] * 2), abs=1e-6)


def test_relevance_truncates_long_texts(embedder: Path, tmp_path: Path) -> None:
    reward, text = Relevance(model=str(embedder)), "ab" * POSITIONS
    assert reward([text[:POSITIONS]], [text]) == pytest.approx([1])
    for path in embedder.glob("*.*"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 3}')
    assert Relevance(model=str(tmp_path))(["abc"], ["abcd"]) == pytest.approx([1])
    assert Relevance(model=str(tmp_path))(["ab"], ["abcd"]) != pytest.approx([1])


def test_relevance_works_as_judge_and_rejects_bad_settings(embedder: Path) -> None:
    target = f"rlhf_zoo.rewards.relevance:relevance(model={str(embedder)!r})"
    judge = RuleJudge(target)
    assert judge(["abc"], ["abc"]) == pytest.approx([1]) and judge.name == f"rule:{target}"
    assert pickle.loads(pickle.dumps(relevance)) == relevance and relevance.model == MINILM
    with pytest.raises(ZooError, match="model of the reward relevance is 3: give a folder or NAMESPACE/NAME"):
        load_object("rlhf_zoo.rewards.relevance:relevance(model=3)", group="rlhf_zoo.rewards")
    with pytest.raises(ZooError, match="batch_size of the reward relevance is 0"):
        Relevance(batch_size=0)


def test_loading_relevance_model_leaves_rng_state_unchanged(embedder: Path) -> None:
    """The first update of a training loads the model, and a resumed one at another step."""
    module._embedder.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Relevance(model=str(embedder))(["a"], ["b"])
    assert torch.equal(torch.get_rng_state(), before)


def test_relevance_model_comes_from_connected_hub(
    embedder: Path, thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Hub("other", thread_hub.url, "a test")
    add_model(str(embedder), MINILM, license="apache-2.0", source=None, hub=target)
    files = thread_hub.api().list_repo_files(MINILM)
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors"} <= set(files)
    monkeypatch.setattr("rlhf_zoo.hub.client.connect._current_hub", target)
    assert relevance(["name a fruit"], ["a banana"]) == pytest.approx([cosine(embedder, "name a fruit", "a banana")])
    with pytest.raises(ZooError, match="no repository 'sentence-transformers/other'"):
        Relevance(model="sentence-transformers/other")(["a"], ["b"])


def test_connect_sets_current_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_zoo.hub.client.connect._set_environment", lambda hub: None)
    with connect(Hub("other", "http://127.0.0.1:9", "a test")) as hub:
        assert current_hub() is hub
    assert current_hub() is DEFAULT_HUB


def test_relevance_rejects_other_models(embedder: Path, tmp_path: Path) -> None:
    make_policy().save_pretrained(tmp_path / "policy")
    make_tokenizer().save_pretrained(tmp_path / "policy")
    choose = "choose an encoder whose embedding is the mean over tokens, such as sentence-transformers/all-MiniLM-L6-v2"
    with pytest.raises(ZooError, match=f"policy is a LlamaForCausalLM: {choose}"):
        Relevance(model=str(tmp_path / "policy"))(["a"], ["b"])
    with pytest.raises(ZooError, match="There is no folder /nowhere"):
        Relevance(model="/nowhere")(["a"], ["b"])
    for name, settings, fault in (
        ("1_Pooling", {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "does not average"),
        ("1_Pooling", {"pooling_mode": "cls"}, "does not average"),
        ("2_Dense", {"in_features": 16}, "has the module Dense, which is not supported"),
    ):
        folder = tmp_path / f"{name}-{len(settings)}"
        (folder / name).mkdir(parents=True)
        for path in embedder.glob("*.*"):
            (folder / path.name).symlink_to(path)
        (folder / name / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ZooError, match=fault):
            Relevance(model=str(folder))(["a"], ["b"])
