"""What the site adds to the pages of the repository: its menu, docstrings, and links to folders."""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from docs.site import api, diagrams
from docs.site.generated import replaced

__all__ = ["menu", "setup", "titled"]

INDEX = "docs/index"
INTERFACE = "docs/api"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
FILE = re.compile(r"(?:\.\./)?[\w/]+\.md")
PAGE = re.compile(r"\]\(((?:\.\./)?[\w/]+)\.md\)")


def menu(index: str, pages: list[str]) -> str:
    """The index with one hidden menu for each of its sections.

    Args:
        index: text of the page, whose sections link to pages.
        pages: all pages beside it, relative to it. Those that it does not link to make up a last section.
    """
    parts = SECTION.split(index)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    linked = {caption: list(dict.fromkeys(PAGE.findall(text))) for caption, text in sections.items()}
    known = {page for found in linked.values() for page in found}
    linked["More"] = sorted(page for page in pages if page not in known)
    return index + "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(found) + "\n```\n"
        for caption, found in linked.items()
        if found
    )


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Add menus, diagrams and docstrings: Sphinx calls this with the text of every page."""
    source[0] = diagrams.drawn(source[0])
    if page == INTERFACE:  # a clone has the names, the site their docstrings
        source[0] = replaced(source[0], api.text())
    folder = Path(app.srcdir) / page
    if page == INDEX:
        beside = [path.stem for path in sorted(folder.parent.glob("*.md")) if path.stem != "index"]
        source[0] = menu(source[0], beside)
    elif folder.is_dir():  # the pages in a folder lie below the page of its name
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{folder.name}/*\n```\n"


def _unlink(app: Sphinx, document: nodes.document) -> None:
    """A link to a folder of the repository, which the site does not have, becomes its name."""
    for link in list(document.findall(addnodes.pending_xref)):
        page = Path(app.srcdir) / str(link.get("refdoc", ""))
        if link["reftype"] == "myst" and (page.parent / str(link["reftarget"])).is_dir():
            link.replace_self(link.children)


def titled(doctree: nodes.document, page: str, titles: Mapping[str, nodes.Element]) -> None:
    """A link whose text is the file of a page shows the page's title: `launching.md` becomes *Launching a job*.

    Args:
        doctree: of a page, with its links resolved.
        page: its name, `docs/start`.
        titles: of all pages, by their names.
    """
    for link in list(doctree.findall(nodes.reference)):
        if FILE.fullmatch(link.astext()):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["refuri"].partition("#")[0]))
            if target.removesuffix(".html") in titles:
                link.children = [nodes.inline("", titles[target.removesuffix(".html")].astext())]


def _title(app: Sphinx, doctree: nodes.document, page: str) -> None:
    titled(doctree, page, app.env.titles)


def _outdated(app: Sphinx, *_: object) -> list[str]:
    """The page with docstrings, which are in none of Sphinx's files."""
    return [INTERFACE]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-get-outdated", _outdated)
    app.connect("source-read", _read)
    app.connect("doctree-read", _unlink)
    app.connect("doctree-resolved", _title)
    return {"parallel_read_safe": True}
