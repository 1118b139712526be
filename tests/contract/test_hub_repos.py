"""Repositories of the embedded Hub, through the unmodified client: create, settings, roles, lists, cards."""

import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import paginate

KINDS = ("model", "dataset", "space")
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [rlhf, ppo]
datasets: [local/remarks]
base_model: local/tiny-sft
base_model_relation: finetune
language: en
---
# A card
"""


@pytest.fixture
def api(in_process_hub):
    return in_process_hub.api()


def create(api, repo_id: str, kind: str = "model", **options):
    sdk = {"space_sdk": "gradio"} if kind == "space" else {}
    return api.create_repo(repo_id, repo_type=kind, **sdk, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_repository_is_created_found_and_deleted(in_process_hub, api, kind):
    url = create(api, "first", kind)
    assert (url.repo_id, url.repo_type, url.endpoint) == ("local/first", kind, in_process_hub.url)
    assert [other_kind for other_kind in KINDS if api.repo_exists("local/first", repo_type=other_kind)] == [kind]
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        create(api, "local/first", kind)
    assert create(api, "local/first", kind, exist_ok=True).repo_id == "local/first"
    info = api.repo_info("local/first", repo_type=kind)
    assert info.id == "local/first"
    assert info.sha == in_process_hub.git("local/first", "rev-parse", "main", kind=kind).strip()
    api.delete_repo("local/first", repo_type=kind)
    assert not api.repo_exists("local/first", repo_type=kind)
    assert not in_process_hub.git_dir("local/first", kind).exists()
    with pytest.raises(RepositoryNotFoundError):
        api.delete_repo("local/first", repo_type=kind)
    api.delete_repo("local/first", repo_type=kind, missing_ok=True)


def test_whoami_returns_user_organizations_and_role(in_process_hub, api):
    create(api, "team/model")
    who = api.whoami()
    assert (who["name"], who["auth"]["accessToken"]["role"]) == ("local", "write")
    assert [org["name"] for org in who["orgs"]] == ["team"]
    assert api.get_full_repo_name("bare") == "local/bare"
    assert in_process_hub.api("read").whoami()["auth"]["accessToken"]["role"] == "read"


def test_wrong_token_is_rejected(in_process_hub):
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        in_process_hub.api().whoami(token="hf_nonsense")
    with pytest.raises(HfHubHTTPError) as caught:
        in_process_hub.api().create_repo("local/x", token="hf_nonsense")
    assert caught.value.response.status_code == 401
    assert "Invalid credentials" in str(caught.value)


def test_private_repository_is_hidden_from_anonymous(in_process_hub, api):
    create(api, "local/secret", private=True)
    create(api, "local/open")
    assert api.model_info("local/secret").private is True
    assert in_process_hub.api("read").model_info("local/secret").id == "local/secret"
    assert {m.id for m in in_process_hub.api("read").list_models()} == {"local/secret", "local/open"}

    stranger = in_process_hub.api(None)
    assert {m.id for m in stranger.list_models()} == {"local/open"}
    with pytest.raises(RepositoryNotFoundError):
        stranger.model_info("local/secret")
    with pytest.raises(RepositoryNotFoundError):
        stranger.hf_hub_download("local/secret", ".gitattributes", cache_dir=in_process_hub.cache)
    with pytest.raises(RepositoryNotFoundError):
        stranger.list_repo_files("local/secret")

    api.update_repo_settings("local/secret", private=False)
    assert stranger.model_info("local/secret").private is False
    api.update_repo_settings("local/secret", visibility="private")
    assert not stranger.repo_exists("local/secret")
    with pytest.raises(BadRequestError, match="no gated repositories"):
        api.update_repo_settings("local/secret", gated="auto")


def test_writes_require_write_token(in_process_hub, api):
    create(api, "local/m")
    head = api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="local/m").oid
    for role, status, message in (("read", 403, "may only read"), (None, 401, "401")):
        other = in_process_hub.api(role)
        for call in (
            lambda other: other.create_repo("local/other"),
            lambda other: other.upload_file(path_or_fileobj=b"y", path_in_repo="y.txt", repo_id="local/m"),
            lambda other: other.delete_file("x.txt", "local/m"),
            lambda other: other.create_tag("local/m", tag="v1"),
            lambda other: other.create_branch("local/m", branch="b"),
            lambda other: other.delete_repo("local/m"),
            lambda other: other.move_repo("local/m", "local/n"),
            lambda other: other.update_repo_settings("local/m", private=True),
            lambda other: other.create_collection("c", namespace="local"),
            lambda other: other.super_squash_history("local/m"),
        ):
            with pytest.raises(HfHubHTTPError, match=message) as caught:
                call(other)
            assert caught.value.response.status_code == status
        assert other.model_info("local/m").sha == head
    reader = in_process_hub.api("read")
    reader.auth_check("local/m")
    with pytest.raises(HfHubHTTPError):
        reader.auth_check("local/m", write=True)
    api.auth_check("local/m", write=True)


def test_missing_repository_and_revision_raise_their_errors(in_process_hub, api):
    create(api, "local/m")
    for call in (
        lambda: api.model_info("local/none"),
        lambda: api.model_info("gpt2"),
        lambda: api.list_repo_files("local/none"),
        lambda: api.hf_hub_download("gpt2", "x", cache_dir=in_process_hub.cache),
        lambda: api.upload_file(path_or_fileobj=b"y", path_in_repo="y.txt", repo_id="local/none"),
        lambda: api.list_repo_refs("local/none"),
    ):
        with pytest.raises(RepositoryNotFoundError):
            call()
    for call in (
        lambda: api.model_info("local/m", revision="none"),
        lambda: api.model_info("local/m", revision="0" * 40),
        lambda: api.list_repo_files("local/m", revision="refs/pr/1"),
        lambda: api.hf_hub_download("local/m", "x", revision="none", cache_dir=in_process_hub.cache),
        lambda: api.upload_file(path_or_fileobj=b"y", path_in_repo="y.txt", repo_id="local/m", revision="none"),
        lambda: api.list_repo_commits("local/m", revision="none"),
    ):
        with pytest.raises(RevisionNotFoundError):
            call()
    assert not api.revision_exists("local/m", "none")
    assert api.revision_exists("local/m", "main")


def push_card(api, repo_id: str, card: str, kind: str = "model"):
    create(api, repo_id, kind)
    return api.create_commit(
        repo_id, [CommitOperationAdd("README.md", card.encode())], commit_message="Add card", repo_type=kind
    )


def test_card_metadata_becomes_tags(in_process_hub, api):
    push_card(api, "local/tiny-ppo", CARD)
    info = api.model_info("local/tiny-ppo")
    assert info.pipeline_tag == "text-generation"
    assert info.library_name == "transformers"
    assert info.card_data.license == "apache-2.0"
    models = {"base_model:local/tiny-sft", "base_model:finetune:local/tiny-sft"}
    assert models | {"rlhf", "ppo", "dataset:local/remarks", "license:apache-2.0", "en"} <= set(info.tags)


def test_list_models_filters_searches_and_sorts(in_process_hub, api):
    push_card(api, "local/tiny-ppo", CARD)
    create(api, "local/plain")
    create(api, "team/tiny-other")
    create(api, "local/data", "dataset")

    def ids(**query):
        return [model.id for model in api.list_models(**query)]

    assert sorted(ids()) == ["local/plain", "local/tiny-ppo", "team/tiny-other"]
    assert ids(author="team") == ["team/tiny-other"]
    assert sorted(ids(search="TINY")) == ["local/tiny-ppo", "team/tiny-other"]
    assert ids(filter="ppo") == ["local/tiny-ppo"]
    assert ids(filter=["ppo", "license:mit"]) == []
    assert ids(trained_dataset="local/remarks") == ["local/tiny-ppo"]
    assert ids(filter="base_model:finetune:local/tiny-sft") == ["local/tiny-ppo"]
    assert ids(pipeline_tag="text-generation") == ["local/tiny-ppo"]
    assert ids(inference="warm") == []
    assert ids(sort="created_at", limit=2) == ["team/tiny-other", "local/plain"]
    assert ids(sort="created_at") == ["team/tiny-other", "local/plain", "local/tiny-ppo"]
    with pytest.raises(BadRequestError, match="Cannot sort"):
        ids(sort="color")

    [plain] = api.list_models(author="local", filter="ppo")
    assert plain.siblings is None
    assert plain.card_data is None
    [full] = api.list_models(filter="ppo", full=True, cardData=True)
    assert [s.rfilename for s in full.siblings] == [".gitattributes", "README.md"]
    assert full.card_data.tags == ["rlhf", "ppo"]
    [expanded] = api.list_models(filter="ppo", expand=["sha", "cardData"])
    assert expanded.sha == api.model_info("local/tiny-ppo").sha
    assert expanded.tags is None
    assert expanded.card_data.license == "apache-2.0"


def test_list_models_is_paged(in_process_hub, api):
    names = [f"local/m{number}" for number in range(7)]
    for name in names:
        create(api, name)
    headers = {"authorization": f"Bearer {in_process_hub.token}"}
    pages = paginate(f"{in_process_hub.url}/api/models", {"limit": 3, "author": "local", "sort": "createdAt"}, headers)
    assert [item["id"] for item in pages] == names[::-1]


def test_list_datasets_and_spaces_filters(in_process_hub, api):
    push_card(
        api, "local/d", "---\ntask_categories: [text-generation]\nlanguage: en\nsize_categories: n<1K\n---\n", "dataset"
    )
    create(api, "local/e", "dataset")
    assert [d.id for d in api.list_datasets(task_categories="text-generation", language="en")] == ["local/d"]
    assert [d.id for d in api.list_datasets(dataset_name="e", sort="created_at")] == ["local/e"]
    push_card(api, "local/s", "---\nsdk: gradio\ntitle: Compare\nmodels: [local/tiny-ppo]\n---\n", "space")
    create(api, "local/t", "space")
    assert [s.id for s in api.list_spaces(models="local/tiny-ppo")] == ["local/s"]
    assert [s.id for s in api.list_spaces(linked=True)] == ["local/s"]
    assert sorted(s.id for s in api.list_spaces(search="local")) == ["local/s", "local/t"]
    assert api.space_info("local/t").sdk == "gradio"


@pytest.mark.parametrize(
    ("front_matter", "message"),
    [
        ("tags: [a, b", "cannot be read"),
        ("- a\n- b", "must be a mapping"),
    ],
)
def test_commit_rejects_invalid_card(in_process_hub, api, front_matter, message):
    create(api, "local/m")
    before = api.model_info("local/m").sha
    content = f"---\n{front_matter}\n---\ntext\n".encode()
    with pytest.raises(ValueError, match="Invalid metadata") as caught:
        api.upload_file(path_or_fileobj=content, path_in_repo="README.md", repo_id="local/m")
    assert message in str(caught.value)
    assert api.model_info("local/m").sha == before


def test_commit_warns_of_card_without_metadata(in_process_hub, api):
    create(api, "local/m")
    with pytest.warns(UserWarning, match="no YAML metadata"):
        api.upload_file(path_or_fileobj=b"# Hello\n", path_in_repo="README.md", repo_id="local/m")


def test_discussions_and_pull_requests_are_refused(in_process_hub, api):
    create(api, "local/m")
    assert list(api.get_repo_discussions("local/m")) == []
    assert api.list_repo_refs("local/m", include_pull_requests=True).pull_requests == []
    for call in (
        lambda: api.create_discussion("local/m", title="Hello"),
        lambda: api.create_pull_request("local/m", title="Hello"),
        lambda: api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="local/m", create_pr=True),
        lambda: api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="local/m", revision="refs/pr/1"),
        lambda: api.merge_pull_request("local/m", 1),
        lambda: api.comment_discussion("local/m", 1, "Hello"),
    ):
        with pytest.raises(HfHubHTTPError, match="commit to a branch") as caught:
            call()
        assert caught.value.response.status_code == 403
