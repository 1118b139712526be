"""A Space is made whole or not at all: what can fail fails before it is made, and what fails later takes it back."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from thread_hub import ThreadHub

from rlhf_zoo.app.space.deploy import deploy
from rlhf_zoo.app.space.files import Pinned, SpaceModels
from rlhf_zoo.errors import ZooError

pytestmark = pytest.mark.attack

SPACE, VOTES = "local/toy-compare", "local/votes"


@pytest.fixture
def go(thread_hub: ThreadHub) -> Callable[..., Any]:
    made = {name: thread_hub.make(f"toy-{name}", {"rlhf_card.json": "{}"}) for name in ("ppo", "sft")}
    models = SpaceModels(*(Pinned(f"local/toy-{name}", made[name]) for name in ("ppo", "sft")), None, votes=VOTES)
    return lambda page=str: deploy(SPACE, models, page=page)


def there(hub: ThreadHub) -> list[str]:
    return [one.id for one in (*hub.api().list_spaces(), *hub.api().list_datasets())]


def refuse(call: str, status: int, when: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
    """HfApi's method of this name, which a Hub refuses."""
    honest = getattr(HfApi, call)

    def asked(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return honest(self, *args, **kwargs)
        import httpx2

        request = httpx2.Request("POST", "http://hub")
        raise HfHubHTTPError("no", response=httpx2.Response(status, request=request))

    return asked


def test_no_empty_space_is_left(
    thread_hub: ThreadHub, go: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise ZooError("The completions cannot be drawn.")

    with monkeypatch.context() as patch:  # before it is made
        patch.setitem(sys.modules, "hatchling.builders.wheel", None)
        patch.setattr(HfApi, "create_repo", refuse("create_repo", 599))
        with pytest.raises(ZooError, match="`pip install hatchling`"):
            go()
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "create_commit", refuse("create_commit", 403))
        with pytest.raises(ZooError, match=f"Cannot write to the Space {SPACE} on "):
            go()
        assert there(thread_hub) == []
    with monkeypatch.context() as patch:  # the account may have no Gradio Space: a static page, which fails here
        patch.setattr(HfApi, "create_repo", refuse("create_repo", 402, lambda *_, **kw: kw["space_sdk"] == "gradio"))
        with pytest.raises(ZooError, match="cannot be drawn"):
            go(fail)
        assert there(thread_hub) == []
    with monkeypatch.context() as patch:

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(HfApi, "create_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            go()
        assert there(thread_hub) == []
    with monkeypatch.context() as patch:
        is_votes = lambda *_, **kw: kw["repo_type"] == "dataset"  # noqa: E731
        patch.setattr(HfApi, "create_repo", refuse("create_repo", 403, is_votes))
        with pytest.raises(ZooError, match=f"Cannot create the data set {VOTES} on "):
            go()
        assert there(thread_hub) == []
    assert not caplog.records
    with monkeypatch.context() as patch:  # nor can it be deleted again: that is said
        patch.setattr(HfApi, "create_commit", refuse("create_commit", 403))
        patch.setattr(HfApi, "delete_repo", refuse("delete_repo", 403))
        with pytest.raises(ZooError, match="Cannot write to"):
            go()
    assert [record.args[0] for record in caplog.records] == [SPACE, VOTES]
    done = go()  # goes on with what is there
    assert (done.created, done.changed) == (False, True)
    assert there(thread_hub) == [SPACE, VOTES]


def test_a_space_that_was_there_stays(
    thread_hub: ThreadHub, go: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go().created
    monkeypatch.setattr(HfApi, "create_commit", refuse("create_commit", 403))
    with pytest.raises(ZooError, match="Cannot write to"):
        go()
    assert there(thread_hub) == [SPACE, VOTES]
    assert "compare.json" in thread_hub.api().list_repo_files(SPACE, repo_type="space")
