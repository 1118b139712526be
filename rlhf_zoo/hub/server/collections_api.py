"""Serves collections: named lists of repositories, one JSON file each under ROOT/collections/NAMESPACE/."""

import logging
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import Any

from .access import Access, Api
from .durable import check_types, locked, read_json, write_json
from .faults import Fault, bad_request, is_file_error
from .messages import SMALL_BODY, Request, Response, json_response, member
from .names import KINDS, OWNER, RepoId, parse_repo_id
from .routing import Router
from .storage import now

log = logging.getLogger(__name__)
_PAGE_SIZE = 100
# Key -> type of its value, in a collection's file and in each of its items. A file with other types is damaged.
_COLLECTION_TYPES = {"slug": str, "title": str, "description": str | None, "owner": str, "private": bool, "theme": str,
               "position": int, "upvotes": int, "items": list, "lastUpdated": str}  # fmt: skip
_ITEM_TYPES = {"_id": str, "id": str, "type": str, "note": str}


class CollectionsApi(Api):
    """Collections and their items."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._root = access.storage.root / "collections"

    def register(self, router: Router) -> None:
        address = "/api/collections/{namespace}/{slug}"
        router.add("GET", "/api/collections", self._find)
        router.add("POST", "/api/collections", self._create, max_body=SMALL_BODY)
        router.add("GET", address, self._get)
        router.add("PATCH", address, self._change, max_body=SMALL_BODY)
        router.add("DELETE", address, self._delete)
        router.add("POST", f"{address}/items", self._add_item, max_body=SMALL_BODY)
        router.add("PATCH", f"{address}/items/{{item_id}}", self._change_item, max_body=SMALL_BODY)
        router.add("DELETE", f"{address}/items/{{item_id}}", self._delete_item)

    def _find(self, request: Request) -> Response:
        """Finds collections by owner, item ("models/NAMESPACE/NAME") or words in the title."""
        owners, items = request.values("owner"), request.values("item")
        words = (request.value("q") or "").lower().split()
        matches = []
        for collection in _read_collections(self._root.glob("*/*.json")):
            if not self._can_see(request, collection):
                continue
            # Filter by the visible items: an anonymous search must not reveal a private repository.
            collection["items"] = self._visible_items(request, collection)
            item_names = {f"{KINDS[item['type']]}/{item['id']}" for item in collection["items"]}
            if (owners and collection["owner"] not in owners) or (items and not item_names & set(items)):
                continue
            if all(word in collection["title"].lower() for word in words):
                collection.pop("position")  # lists of the real Hub do not have it
                matches.append(_to_api_json(collection))
        matches.sort(key=lambda collection: collection["lastUpdated"], reverse=True)
        page, headers = request.page(matches, _PAGE_SIZE)
        return json_response(page, headers=headers)

    def _create(self, request: Request) -> Response:
        """Creates a collection. Fault 409, with the slug, if the owner already has a collection with that title."""
        request.require_write()
        fields = request.json()
        title = _short_text(fields, "title", 60)
        if not title:
            raise bad_request("A collection needs a title.")
        # The namespace becomes a folder, so it must follow the rules for repository names.
        owner = parse_repo_id("model", fields.get("namespace") or OWNER, "x").namespace
        with self._lock():
            folder = self._root / owner
            folder.mkdir(exist_ok=True)
            for other in _read_collections(folder.glob("*.json")):
                if other["title"] == title:
                    slug = other["slug"]
                    raise Fault(409, f"The collection '{slug}' already has that title.", body={"slug": slug})
            collection: dict[str, Any] = {
                "slug": f"{owner}/{_slug(title)}-{secrets.token_hex(12)}",
                "title": title,
                "description": _short_text(fields, "description", 150) or None,
                "owner": owner,
                "private": bool(fields.get("private", False)),
                "theme": "blue",
                "position": 0,
                "upvotes": 0,
                "items": [],
            }
            self._save(collection)
        return self._answer(request, collection)

    def _get(self, request: Request, namespace: str, slug: str) -> Response:
        """Returns a collection with the items that the caller may see."""
        return self._answer(request, self._load(request, namespace, slug))

    def _change(self, request: Request, namespace: str, slug: str) -> Response:
        """Changes title, description, visibility, theme or position. A new title changes the slug, but not its id."""
        request.require_write()
        fields = request.json()
        with self._lock():
            collection = self._load(request, namespace, slug)
            old_path = self._path(collection["slug"])
            for key, limit in (("title", 60), ("description", 150), ("theme", 30)):
                if key in fields:
                    collection[key] = _short_text(fields, key, limit)
            if "private" in fields:
                collection["private"] = bool(fields["private"])
            if isinstance(fields.get("position"), int):
                collection["position"] = int(fields["position"])
            collection_id = collection["slug"].rpartition("-")[2]
            collection["slug"] = f"{collection['owner']}/{_slug(collection['title'])}-{collection_id}"
            # Write the new file before removing the old: a crash between the two steps loses nothing.
            self._save(collection)
            if self._path(collection["slug"]) != old_path:
                old_path.unlink()
        return json_response({"success": True, "data": _to_api_json(collection)})

    def _delete(self, request: Request, namespace: str, slug: str) -> Response:
        """Deletes a collection, but not the repositories in it."""
        request.require_write()
        with self._lock():
            self._path(self._load(request, namespace, slug)["slug"]).unlink()
        return json_response({})

    def _add_item(self, request: Request, namespace: str, slug: str) -> Response:
        """Appends a repository. Fault 409 if it is already in the collection."""
        request.require_write()
        fields = request.json()
        item = member(fields, "item", dict) or {}
        kind = member(item, "type", str)
        if kind not in KINDS:
            raise bad_request(f"A collection of the embedded Hub holds models, datasets and Spaces, not '{kind}'.")
        parts = (member(item, "id", str) or "").removeprefix(f"{KINDS[kind]}/").split("/")
        if len(parts) != 2:
            raise bad_request("The item's id must be NAMESPACE/NAME.")
        repo = parse_repo_id(kind, *parts)
        self._access.require_read(request, repo)
        with self._lock():
            collection = self._load(request, namespace, slug)
            if any((entry["type"], entry["id"]) == (kind, str(repo)) for entry in collection["items"]):
                raise Fault(409, f"'{repo}' is already in the collection.")
            note = _short_text(fields, "note", 500)
            collection["items"].append({"_id": secrets.token_hex(12), "id": str(repo), "type": kind, "note": note})
            self._save(collection)
        return self._answer(request, collection)

    def _change_item(self, request: Request, namespace: str, slug: str, item_id: str) -> Response:
        """Changes an item's note, or moves the item to another position."""
        request.require_write()
        fields = request.json()
        with self._lock():
            collection = self._load(request, namespace, slug)
            entry = _find_item(collection, item_id)
            if "note" in fields:
                entry["note"] = _short_text(fields, "note", 500)
            if isinstance(fields.get("position"), int):
                collection["items"].remove(entry)
                collection["items"].insert(max(0, fields["position"]), entry)
            self._save(collection)
        return json_response({})

    def _delete_item(self, request: Request, namespace: str, slug: str, item_id: str) -> Response:
        """Removes an item, but does not delete its repository."""
        request.require_write()
        with self._lock():
            collection = self._load(request, namespace, slug)
            collection["items"].remove(_find_item(collection, item_id))
            self._save(collection)
        return json_response({})

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self._root / ".lock")

    def _can_see(self, request: Request, collection: dict[str, Any]) -> bool:
        return request.role is not None or not collection["private"]

    def _visible_items(self, request: Request, collection: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the items that the caller may see, under their current names."""
        storage, visible_items = self._access.storage, []
        for item in collection["items"]:
            # An item keeps the name that the repository had when it was added. Name and visibility may have changed.
            repo = RepoId(item["type"], *item["id"].split("/"))
            if not storage.exists(repo):
                repo = storage.current_name(repo) or repo
            with storage.skip_damaged(repo):
                # With a token, callers see every item, even one whose repository is damaged or was deleted.
                if request.role is not None or self._access.can_see(request, storage.settings(repo)):
                    visible_items.append({**item, "id": str(repo)})
        return visible_items

    def _answer(self, request: Request, collection: dict[str, Any]) -> Response:
        return json_response(_to_api_json({**collection, "items": self._visible_items(request, collection)}))

    def _path(self, slug: str) -> Path:
        owner, _, name = slug.partition("/")
        return self._root / owner / f"{name}.json"

    def _load(self, request: Request, namespace: str, slug: str) -> dict[str, Any]:
        id_match = re.fullmatch(r"(?:[a-z0-9-]*-)?([0-9a-f]{24})", slug)
        owner = parse_repo_id("model", namespace, "x").namespace
        # The last part of a slug identifies the collection. The title before it may be outdated.
        paths = list((self._root / owner).glob(f"*-{id_match[1]}.json")) if id_match else []
        collection = next(_read_collections(paths), None)
        if collection is None or not self._can_see(request, collection):
            raise Fault(404, f"The collection '{namespace}/{slug}' was not found on this Hub.")
        return collection

    def _save(self, collection: dict[str, Any]) -> None:
        collection["lastUpdated"] = now()
        write_json(self._path(collection["slug"]), collection)


def _read_collections(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yields the collections in these files. Logs and skips damaged files."""
    removed_marker = object()  # marks a file that another request has removed
    for path in sorted(paths):
        try:
            collection = read_json(path, removed_marker)
            if collection is removed_marker:
                continue
            _check_collection(collection, path)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and not is_file_error(error):  # a failure of the disk, not of this file
                raise
            log.warning("%s is damaged (%s): restore it from a copy, or remove it.", path, error)
        else:
            yield collection


def _check_collection(collection: Any, path: Path) -> None:
    """Raises ValueError if the file at `path` holds something that this Hub would not write there."""
    check_types(collection, _COLLECTION_TYPES)
    if (collection["owner"], collection["slug"]) != (path.parent.name, f"{path.parent.name}/{path.stem}"):
        raise ValueError(f"it holds '{collection['slug']:.80}', which belongs in another file")
    for item in collection["items"]:
        check_types(item, _ITEM_TYPES)
        try:
            parse_repo_id(item["type"], *item["id"].split("/", 1))
        except (Fault, TypeError):
            raise ValueError(f"'{item['id']:.80}' is not a repository") from None


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "collection"


def _short_text(fields: dict[str, Any], key: str, limit: int) -> str:
    value = fields.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > limit:
        raise bad_request(f"The {key} must be text of at most {limit} characters.")
    return value


def _find_item(collection: dict[str, Any], item_id: str) -> dict[str, Any]:
    for item in collection["items"]:
        if item["_id"] == item_id:
            return item
    raise Fault(404, f"The collection has no item '{item_id[:60]}'.")


def _to_api_json(collection: dict[str, Any]) -> dict[str, Any]:
    """Returns the collection in the form of the Hub's API."""
    items = []
    for position, item in enumerate(collection["items"]):
        entry = {**item, "position": position}
        note = entry.pop("note", "")
        if note:
            entry["note"] = {"text": note, "html": escape(note)}
        items.append(entry)
    return {**collection, "items": items, "isUpvotedByUser": False}
