"""Hooks of mkdocs: pages of other folders, pages generated from the code, and links that work here and on GitHub.

Pages link to files by relative paths, as GitHub follows them. A link to a page of the site stays there; a link to any
other file of the repository becomes one to its source. A link to a file that does not exist is a warning, which
`mkdocs build --strict` makes an error.
"""

import logging
import posixpath
import re
from pathlib import Path

import site_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCE = "https://github.com/rlhf-zoo/rlhf-zoo"
#: Pages of the site that lie outside docs/, where GitHub shows them. They keep their paths in the site.
OUTSIDE = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "recipes").glob("*/README.md"))),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*/README.md"))),
)
#: Fenced blocks and inline code, whose brackets are no links, and then links, images and pictures of HTML.
LINK = re.compile(
    r"(?ms)^ *```.*?^ *```|`+[^`\n]+`+|(?<=\]\()(?P<target>[^()\s]+)(?=\))"
    r'|\b(?P<attribute>src|srcset)="(?P<picture>[^"]+)"'
)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of other folders, and those generated from the code."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path, content in site_pages.pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links to files of the repository links within the site, or to their source; unescapes bars in tables."""
    uri = page.file.src_uri
    origin = uri if uri in OUTSIDE else f"docs/{uri}"

    def replaced(match: re.Match[str]) -> str:
        if match["target"] is not None:
            return site_link(match["target"], uri, origin, files)
        if match["picture"] is not None:
            # mkdocs leaves HTML as it is: unlike a link of Markdown, this is relative to the page's address.
            link = site_link(match["picture"], uri, origin, files)
            picture = posixpath.normpath(posixpath.join(posixpath.dirname(uri), link))
            return f'{match["attribute"]}="{posixpath.relpath(picture, page.url or ".")}"'
        # In the code of a table GitHub needs a bar escaped, and Python-Markdown would show the backslash.
        in_table = markdown[markdown.rfind("\n", 0, match.start()) + 1] == "|"
        return match[0].replace("\\|", "|") if in_table else match[0]

    return LINK.sub(replaced, markdown)


def site_link(target: str, uri: str, origin: str, files: Files) -> str:
    """Returns where a link of a page leads in the site.

    Args:
        target: The link, as the page has it.
        uri: The page's path in the site.
        origin: The page's path in the repository.
        files: All files of the site.

    Returns:
        The link to write instead.
    """
    if re.match(r"[a-z][a-z0-9+.-]*:|#|/", target):
        return target
    path, hash_sign, heading = target.partition("#")
    resolved = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    inside = resolved.removeprefix("docs/")
    if files.get_file_from_path(inside) is not None:
        return posixpath.relpath(inside, posixpath.dirname(uri) or ".") + hash_sign + heading
    if (ROOT / resolved).exists():
        kind = "tree" if (ROOT / resolved).is_dir() else "blob"
        return f"{SOURCE}/{kind}/main/{resolved}{hash_sign}{heading}"
    log.warning("%s links to %s, which does not exist.", origin, target)
    return target
