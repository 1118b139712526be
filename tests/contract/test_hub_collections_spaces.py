"""Collections and Spaces of the embedded Hub, through the unmodified client."""

import pytest
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError

SPACE = "local/compare"


def test_client_manages_collections_and_their_items(in_process_hub):
    api = in_process_hub.api()
    for name in ("sft", "ppo"):
        api.create_repo(f"local/{name}")
    api.create_repo("local/data", repo_type="dataset")
    collection = api.create_collection("Tiny World!", description="One run", private=True)
    assert collection.slug.startswith("local/tiny-world-")
    assert (collection.owner, collection.private, collection.description) == ("local", True, "One run")
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        api.create_collection("Tiny World!")
    assert api.create_collection("Tiny World!", exists_ok=True).slug == collection.slug

    slug = collection.slug
    api.add_collection_item(slug, "local/sft", "model")
    api.add_collection_item(slug, "local/ppo", "model", note="the policy")
    filled = api.add_collection_item(slug, "local/data", "dataset")
    assert [(item.item_id, item.item_type, item.position) for item in filled.items] == [
        ("local/sft", "model", 0),
        ("local/ppo", "model", 1),
        ("local/data", "dataset", 2),
    ]
    assert filled.items[1].note == "the policy"
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        api.add_collection_item(slug, "local/sft", "model")
    assert len(api.add_collection_item(slug, "local/sft", "model", exists_ok=True).items) == 3
    with pytest.raises(RepositoryNotFoundError):
        api.add_collection_item(slug, "local/none", "model")
    with pytest.raises(BadRequestError):
        api.add_collection_item(slug, "2307.09288", "paper")

    last = filled.items[2]
    api.update_collection_item(slug, last.item_object_id, note="read me", position=0)
    first = api.get_collection(slug).items[0]
    assert (first.item_id, first.note) == ("local/data", "read me")
    api.delete_collection_item(slug, first.item_object_id)
    assert [item.item_id for item in api.get_collection(slug).items] == ["local/sft", "local/ppo"]
    with pytest.raises(HfHubHTTPError):
        api.delete_collection_item(slug, first.item_object_id)
    api.delete_collection_item(slug, first.item_object_id, missing_ok=True)

    assert list(in_process_hub.api(None).list_collections()) == []
    changed = api.update_collection_metadata(slug, title="Runs", private=False)
    assert changed.slug.startswith("local/runs-")
    assert changed.slug.rpartition("-")[2] == slug.rpartition("-")[2]
    assert api.get_collection(slug).title == "Runs"  # the old address still leads there
    [listed] = in_process_hub.api(None).list_collections(owner="local", item="models/local/ppo")
    assert (listed.slug, listed.position, len(listed.items)) == (changed.slug, 0, 2)
    assert list(api.list_collections(item="models/local/none")) == []
    assert list(api.list_collections(owner="team")) == []
    api.delete_collection(slug)
    with pytest.raises(HfHubHTTPError, match=r"\b404 "):
        api.get_collection(slug)
    api.delete_collection(slug, missing_ok=True)


def test_client_manages_variables_and_secrets_of_stopped_space(in_process_hub):
    api = in_process_hub.api()
    api.create_repo(SPACE, repo_type="space", space_sdk="gradio", space_variables=[{"key": "A", "value": "1"}])
    api.upload_file(path_or_fileobj=b"print()", path_in_repo="app.py", repo_id=SPACE, repo_type="space")
    runtime = api.get_space_runtime(SPACE)
    assert (runtime.stage, runtime.hardware) == ("STOPPED", None)
    assert "does not run" in runtime.raw["errorMessage"]
    assert api.restart_space(SPACE).stage == "STOPPED"
    assert api.pause_space(SPACE).stage == "STOPPED"
    assert api.space_info(SPACE).runtime.stage == "STOPPED"
    with pytest.raises(BadRequestError, match="does not run them"):
        api.request_space_hardware(SPACE, "t4-small")

    assert api.get_space_variables(SPACE)["A"].value == "1"
    variables = api.add_space_variable(SPACE, "MODEL", "local/ppo", description="which")
    assert (variables["MODEL"].value, variables["MODEL"].description) == ("local/ppo", "which")
    assert variables["MODEL"].updated_at is not None
    assert set(api.delete_space_variable(SPACE, "A")) == {"MODEL"}
    with pytest.raises(HfHubHTTPError):
        api.delete_space_variable(SPACE, "A")
    with pytest.raises(BadRequestError):
        api.add_space_variable(SPACE, "1 bad", "x")

    api.add_space_secret(SPACE, "API_KEY", "hunter2", description="for the judge")
    assert api.get_space_secrets(SPACE)["API_KEY"].description == "for the judge"
    stored = [path for path in in_process_hub.root.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert stored == []
    api.delete_space_secret(SPACE, "API_KEY")
    assert api.get_space_secrets(SPACE) == {}

    with pytest.raises(HfHubHTTPError, match=r"\b401 "):
        in_process_hub.api(None).get_space_variables(SPACE)
    with pytest.raises(HfHubHTTPError, match=r"\b403 "):
        in_process_hub.api("read").add_space_variable(SPACE, "X", "y")
    with pytest.raises(RepositoryNotFoundError):
        api.get_space_runtime("local/none")
