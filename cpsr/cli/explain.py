"""`cpsr explain`: the section of the pages that an error or a last line names, from the installed package."""

import re
from pathlib import Path

from cpsr.errors import ConfigError

__all__ = ["explain"]

PAGES = Path(__file__).parents[1] / "docs"
ERRORS = "errors"
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def explain(name: str) -> str:
    """The text of a section.

    Args:
        name: a class of `cpsr.errors`, or what a message ends with, such as `docs/launching.md#how-it-ends`.

    Raises:
        ConfigError: there is no such page or section.
    """
    page, _, anchor = name.strip("[] ").rpartition("#") if "#" in name else (name.strip("[] "), "", "")
    if not page.endswith(".md"):
        page, anchor = ERRORS, page
    path = PAGES / Path(page).with_suffix(".md").name
    if not path.is_file():
        raise ConfigError(f"there is no page {path.name} in {PAGES}")
    text = path.read_text(encoding="utf-8")
    found = _sections(text)
    if not anchor:
        return text
    if _slug(anchor) not in found:
        raise ConfigError(f"{path.name} has no section {anchor!r}; its sections: {', '.join(found)}")
    return found[_slug(anchor)]


def _sections(text: str) -> dict[str, str]:
    """Each section with those below it, by the anchor of its heading."""
    headings = list(HEADING.finditer(text))
    found = {}
    for index, heading in enumerate(headings):
        after = (one.start() for one in headings[index + 1 :] if len(one[1]) <= len(heading[1]))
        found[_slug(heading[2])] = text[heading.start() : next(after, len(text))].strip()
    return found


def _slug(heading: str) -> str:
    """A heading's anchor, as GitHub and the site write it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
