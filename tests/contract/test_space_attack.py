"""A Space is created completely or not at all: checks come first, and a later failure deletes the Space again."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from thread_hub import ThreadHub

from rlhf_zoo.app.space.deploy import deploy
from rlhf_zoo.app.space.files import PinnedModel, SpaceModels
from rlhf_zoo.errors import ZooError

pytestmark = pytest.mark.attack

SPACE, VOTES = "local/toy-compare", "local/votes"


@pytest.fixture
def deploy_toy_space(thread_hub: ThreadHub) -> Callable[..., Any]:
    commits = {name: thread_hub.make(f"toy-{name}", {"rlhf_card.json": "{}"}) for name in ("ppo", "sft")}
    models = SpaceModels(
        *(PinnedModel(f"local/toy-{name}", commits[name]) for name in ("ppo", "sft")), None, votes=VOTES
    )
    return lambda render_page=str: deploy(SPACE, models, render_page=render_page)


def existing_repos(hub: ThreadHub) -> list[str]:
    return [repo.id for repo in (*hub.api().list_spaces(), *hub.api().list_datasets())]


def refuse(method: str, status: int, when: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
    """Returns a method of HfApi that fails as if the Hub refused the call."""
    original = getattr(HfApi, method)

    def refuse_call(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return original(self, *args, **kwargs)
        import httpx2

        request = httpx2.Request("POST", "http://hub")
        raise HfHubHTTPError("no", response=httpx2.Response(status, request=request))

    return refuse_call


def test_failed_deploy_leaves_no_empty_space(
    thread_hub: ThreadHub,
    deploy_toy_space: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> Any:
        raise ZooError("The completions cannot be drawn.")

    with monkeypatch.context() as patch:  # before the Space is created
        patch.setitem(sys.modules, "hatchling.builders.wheel", None)
        patch.setattr(HfApi, "create_repo", refuse("create_repo", 599))
        with pytest.raises(ZooError, match="`pip install hatchling`"):
            deploy_toy_space()
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", refuse("create_commit", 403))
        with pytest.raises(ZooError, match=f"Cannot write to the Space {SPACE} on "):
            deploy_toy_space()
        assert existing_repos(thread_hub) == []
    with monkeypatch.context() as patch:  # the account has no Gradio Spaces: the static page fails here
        patch.setattr(HfApi, "create_repo", refuse("create_repo", 402, lambda *_, **kw: kw["space_sdk"] == "gradio"))
        with pytest.raises(ZooError, match="cannot be drawn"):
            deploy_toy_space(fail)
        assert existing_repos(thread_hub) == []
    with monkeypatch.context() as patch:

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(HfApi, "create_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deploy_toy_space()
        assert existing_repos(thread_hub) == []
    with monkeypatch.context() as patch:
        is_votes = lambda *_, **kw: kw["repo_type"] == "dataset"  # noqa: E731
        patch.setattr(HfApi, "create_repo", refuse("create_repo", 403, is_votes))
        with pytest.raises(ZooError, match=f"Cannot create the data set {VOTES} on "):
            deploy_toy_space()
        assert existing_repos(thread_hub) == []
    assert not caplog.records
    with monkeypatch.context() as patch:  # deleting the Space fails as well, which is logged
        patch.setattr(HfApi, "create_commit", refuse("create_commit", 403))
        patch.setattr(HfApi, "delete_repo", refuse("delete_repo", 403))
        with pytest.raises(ZooError, match="Cannot write to"):
            deploy_toy_space()
    assert [record.args[0] for record in caplog.records] == [SPACE, VOTES]
    result = deploy_toy_space()  # continues with the existing repositories
    assert (result.created, result.changed) == (False, True)
    assert existing_repos(thread_hub) == [SPACE, VOTES]


def test_failed_deploy_keeps_existing_space(
    thread_hub: ThreadHub, deploy_toy_space: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deploy_toy_space().created
    monkeypatch.setattr(HfApi, "create_commit", refuse("create_commit", 403))
    with pytest.raises(ZooError, match="Cannot write to"):
        deploy_toy_space()
    assert existing_repos(thread_hub) == [SPACE, VOTES]
    assert "compare.json" in thread_hub.api().list_repo_files(SPACE, repo_type="space")
