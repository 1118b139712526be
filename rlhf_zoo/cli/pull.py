"""`rlhf-zoo pull`: downloads a checkpoint from a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ZooError
from .layout import Command
from .open_run import open_hub
from .options import HUB, UserPath, json_option
from .tables import print_json, print_table, print_text

if TYPE_CHECKING:
    from ..hub.client.connect import Hub
    from ..hub.client.pull import PulledRevision

_MAX_LISTED_FILES = 5


@click.command(cls=Command)
@click.argument("repository", metavar="REPOSITORY[@REVISION]")
@click.option("--output_dir", "--output-dir", type=UserPath(), help="Folder for the files.  [default: the cache]")
@click.option("--list", "list_only", is_flag=True, help="List the checkpoints with reward and KL; download nothing.")
@HUB
@json_option()
def pull(repository: str, output_dir: Path | None, list_only: bool, hub: str | None, as_json: bool) -> None:
    """Download a checkpoint and print its path.

    REVISION is a branch, a commit, or a tag such as best or step-000040. The default is main. step-40 means
    step-000040, and so does 40 unless a branch or tag has that name. An interrupted download resumes, and
    each file is checked against the Hub's checksums. --output_dir must be new, empty, or from an earlier pull of the
    same repository.

    \b
    Example:
      rlhf-zoo pull local/tiny-world-ppo@step-000040 --hub local
      rlhf-zoo pull local/tiny-world-ppo --list --hub local
    """
    if list_only and output_dir is not None:
        raise ZooError("--list downloads nothing: leave out --output_dir.")
    if list_only and "@" in repository:
        raise ZooError(f"--list shows all checkpoints: write {repository.partition('@')[0]} without a revision.")
    with open_hub(hub) as connected_hub:
        if list_only:
            _print_checkpoints(repository, connected_hub, as_json)
            return
        from ..hub.client.pull import fetch
        from ..hub.client.refusals import retry_when_rate_limited

        download = retry_when_rate_limited(
            lambda: fetch(repository, output_dir, hub=connected_hub), hub_name=connected_hub.name
        )
        _print_notes(download, repository.partition("@")[2])
        if not as_json:
            print_text(str(download.path))
            return
        names = ("repo", "revision", "commit", "path", "files", "bytes", "refetched", "unrelated")
        document = {name: getattr(download, name) for name in names}
        files = [{name: getattr(file, name) for name in ("path", "size", "sha256")} for file in download.files]
        print_json({**document, "path": str(download.path), "files": files})


def _print_notes(download: PulledRevision, revision: str) -> None:
    """Prints notes on the download to stderr. `revision` is the revision that the user requested, or ""."""
    if revision and download.revision != revision:  # other programs need the tag
        print_text(f"{revision} is the tag {download.revision}.", err=True)
    if download.outage is not None:
        print_text(f"The Hub does not answer ({download.outage}): this is the copy in the cache.", err=True)
    if download.refetched:
        print_text(f"Fetched again, because they differed: {_first_names(download.refetched)}", err=True)
    if download.unrelated:
        print_text(f"Left untouched, because this revision lacks them: {_first_names(download.unrelated)}", err=True)


def _first_names(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED_FILES
    return ", ".join(names[:_MAX_LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def _print_checkpoints(repo: str, hub: Hub, as_json: bool) -> None:
    from ..publishing.cards.markdown import number
    from ..publishing.catalog.index import list_checkpoints

    listing = list_checkpoints(repo, hub)
    if as_json:
        print_json(listing)
        return
    rows = listing["checkpoints"]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    title = ", ".join(filter(None, (repo, listing["stage"], listing["recipe"] and f"recipe {listing['recipe']}")))
    print_table(title, ["revision", "step", *metrics, "commit", "date", "also"], [
        [
            row["revision"],
            "" if row["step"] is None else str(row["step"]),
            *(str(number(row["metrics"][name])) if name in row["metrics"] else "" for name in metrics),
            row["commit"][:10],
            (row["date"] or "")[:10],
            " ".join(row["also"]),
        ]
        for row in rows
    ])  # fmt: skip
