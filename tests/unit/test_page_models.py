"""What a page is of: where the checkpoints of its run come from, and what happens where there are none."""

from pathlib import Path

import pytest
from card_run import make_runs
from toy_models import save_toys
from transformers import AutoTokenizer

from rlhf_zoo.app.engine import Comparison
from rlhf_zoo.app.page import models as page_models
from rlhf_zoo.app.page.sampling import SamplingDefaults
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.refs import Checkpoint
from rlhf_zoo.modeling.chat_template import ChatSettings
from rlhf_zoo.publishing.catalog.ablation import Ablation, Run
from rlhf_zoo.publishing.catalog.lineage import Lineage

COMMIT = "0123456789" * 4


def lineage(name: str, path: Path) -> Lineage:
    source = Checkpoint(name, path)
    return Lineage(source, source, None, {})


def listing(repo: str, *steps: int) -> dict:
    rows = [{"revision": f"step-{step}", "step": step, "commit": COMMIT, "also": [], "metrics": {}} for step in steps]
    return {"repo": repo, "note": None, "checkpoints": rows}


def test_hub_location_gives_repository_commit_and_tag(tmp_path: Path) -> None:
    for name, tag in (("local/x@best", "best"), ("local/x", None), (f"local/x@{COMMIT}", None)):
        assert Checkpoint(name, tmp_path, "local/x", COMMIT).hub_location == ("local/x", COMMIT, tag)
    assert Checkpoint("x@best", tmp_path).hub_location == (None, None, None)


def test_local_run_has_its_checkpoints(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs")
    stage = runs / "ppo"
    (stage / "checkpoint-20").mkdir(exist_ok=True)
    for given in (stage, stage / "checkpoint-20"):
        (found,), problem = page_models._find_timeline_runs(lineage(str(given), given), None, skip_unreadable=False)
        assert 20 in found.steps and problem is None


def test_folder_outside_a_run_has_no_checkpoints(tmp_path: Path) -> None:
    found, problem = page_models._find_timeline_runs(lineage(str(tmp_path), tmp_path), None, skip_unreadable=False)
    assert found == [] and "has no checkpoints beside it" in problem


def test_unavailable_runs_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = Run(listing("local/x", 10, 20), {})

    def find_runs(repo, card, *, names=None, **_):
        if names:
            raise ZooError("local/gone is not there.")
        return Ablation((own, Run(listing("local/empty"), {})), None)

    monkeypatch.setattr(page_models, "find_runs", find_runs)
    here = lineage("local/x@best", tmp_path / COMMIT)
    runs, problem = page_models._find_timeline_runs(here, None, skip_unreadable=False)
    assert [run.name for run in runs] == ["local/x"] and problem is None, "a run without checkpoints is left out"
    with pytest.raises(ZooError, match="local/gone"):
        page_models._find_timeline_runs(here, ["local/gone"], skip_unreadable=False)
    runs, problem = page_models._find_timeline_runs(here, ["local/gone"], skip_unreadable=True)
    assert [run.steps for run in runs] == [(10, 20)]
    assert problem == "The other runs are not shown: local/gone is not there."


def test_repository_without_tags_has_no_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = Ablation((Run(listing("local/x"), {}), Run(listing("local/y", 5), {})), None)
    monkeypatch.setattr(page_models, "find_runs", lambda *_, **__: bare)
    runs, problem = page_models._find_timeline_runs(lineage("local/x", tmp_path / COMMIT), None, skip_unreadable=False)
    assert runs == [] and problem == "local/x has no checkpoint with a tag: publish the steps of its run."


@pytest.mark.parametrize(("start", "title"), [("sft", "SFT"), ("maker/chat", "the base")])
def test_page_names_policy_that_ppo_started_from(
    start: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys = save_toys(tmp_path)
    card = {"stage": "ppo", "settings": {"model_name_or_path": start}}
    models = {role: Checkpoint(str(getattr(toys, role)), getattr(toys, role)) for role in ("ppo", "sft")}
    monkeypatch.setattr(page_models, "find_lineage", lambda *_, **__: Lineage(**models, reward=None, card=card))
    comparison = page_models.PageModels.load("toys").comparison
    *_, snapshot = comparison.with_policy(comparison._policies["ppo"]).stream("the camera", max_new_tokens=2)
    assert snapshot.initial_policy == title


def test_page_of_chat_model_asks_for_message_and_longer_answers(tmp_path: Path) -> None:
    toys = save_toys(tmp_path)
    text = page_models.PageModels(Comparison.load(ppo=toys.ppo, sft=toys.sft), lineage("toys", tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(toys.sft)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for folder in (toys.sft, toys.ppo):
        ChatSettings().write(tokenizer).save_pretrained(folder)
    chat = page_models.PageModels(Comparison.load(ppo=toys.ppo, sft=toys.sft), lineage("toys", tmp_path))
    assert (text.prompt_hint, chat.prompt_hint) == ("The beginning of a text", "A message to the models")
    longest = SamplingDefaults.of(chat).max_length
    assert SamplingDefaults.of(text).length == 32 < longest
    assert SamplingDefaults.of(chat).length == min(128, longest)
