"""Hooks of mkdocs: add pages from other folders and pages generated from the code, adapt links, name the search dialog.

Pages link to files by relative paths, which work on GitHub. In the site, a link to a page of the site stays relative,
and a link to any other file leads to its source on GitHub. A link to a missing file gives a warning, which
`mkdocs build --strict` turns into an error.
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
#: Pages of the site outside docs/. They keep their paths in the site.
OUTSIDE = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "recipes").glob("*/README.md"))),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*/README.md"))),
)
#: Matches fenced blocks and inline code first, whose brackets are not links, then links and images.
LINK = re.compile(
    r"(?ms)^ *```.*?^ *```|`+[^`\n]+`+|(?<=\]\()(?P<target>[^()\s]+)(?=\))"
    r'|\b(?P<attribute>src|srcset)="(?P<picture>[^"]+)"'
)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from other folders and the generated pages."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path, content in site_pages.pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files at pages of the site or at GitHub, and unescapes bars in tables."""
    uri = page.file.src_uri
    origin = uri if uri in OUTSIDE else f"docs/{uri}"

    def replacement(match: re.Match[str]) -> str:
        if match["target"] is not None:
            return site_link(match["target"], uri, origin, files)
        if match["picture"] is not None:
            # mkdocs does not adapt links in HTML, so they must be relative to the page's address.
            link = site_link(match["picture"], uri, origin, files)
            picture = posixpath.normpath(posixpath.join(posixpath.dirname(uri), link))
            return f'{match["attribute"]}="{posixpath.relpath(picture, page.url or ".")}"'
        # In a table, code with a bar needs a backslash on GitHub, which Python-Markdown would show.
        in_table = markdown[markdown.rfind("\n", 0, match.start()) + 1] == "|"
        return match[0].replace("\\|", "|") if in_table else match[0]

    return LINK.sub(replacement, markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Names the search dialog for screen readers, which the theme does not."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def site_link(target: str, uri: str, origin: str, files: Files) -> str:
    """Returns the target of a page's link in the site.

    Args:
        target: The target that the page has.
        uri: The page's path in the site.
        origin: The page's path in the repository.
        files: All files of the site.

    Returns:
        The new target.
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
