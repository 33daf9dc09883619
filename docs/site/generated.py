"""The pages that are written from the source, and committed: `make pages` writes them again."""

import re
from collections.abc import Callable
from pathlib import Path

from docs.site import api, commands, configuration

__all__ = ["WRITERS", "current", "replaced"]

FOLDER = Path(__file__).parents[1]
WRITERS: dict[str, Callable[[], str]] = {
    "api": api.names,
    "commands": commands.text,
    "configuration": configuration.text,
}
BEGIN, END = "<!-- `make pages` writes what follows -->", "<!-- end of what `make pages` writes -->"
BLOCK = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)


def replaced(page: str, text: str) -> str:
    """A page with another text in its generated block."""
    return BLOCK.sub(lambda _: f"{BEGIN}\n\n{text.strip()}\n\n{END}", page)


def current(name: str) -> tuple[Path, str, str]:
    """A page's path, its text as it is, and as the source gives it."""
    path = FOLDER / f"{name}.md"
    page = path.read_text(encoding="utf-8")
    return path, page, replaced(page, WRITERS[name]())


if __name__ == "__main__":
    for written, _, wanted in map(current, WRITERS):
        written.write_text(wanted, encoding="utf-8")
