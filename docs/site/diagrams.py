"""Diagrams: pages hold them as Mermaid text, and the site shows pictures of them that are drawn beforehand.

The site loads no script from elsewhere. So a diagram that has changed has to be drawn again, with Chromium and the
bundle of the npm package mermaid (11.17.2)::

    npm pack mermaid && tar xzf mermaid-*.tgz
    python -m docs.site.diagrams package/dist/mermaid.min.js
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from docs.site.browser import opened_page

__all__ = ["DIAGRAMS", "blocks", "drawn", "picture_of"]

ROOT = Path(__file__).parents[2]
DIAGRAMS = ROOT / "docs" / "diagrams"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZE = re.compile(r'viewBox="\S+ \S+ (\S+) (\S+)"')
DRAW = """async text => {
    mermaid.initialize({startOnLoad: false, theme: 'neutral', htmlLabels: false, fontFamily: 'sans-serif',
        flowchart: {htmlLabels: false}, deterministicIds: true});
    return (await mermaid.render('diagram', text)).svg;
}"""


def blocks(text: str) -> list[str]:
    """The diagrams of a page."""
    return BLOCK.findall(text)


def picture_of(block: str) -> Path:
    """Where the picture of a diagram lies: its name is the hash of the text, so that none is out of date unseen."""
    return DIAGRAMS / f"{hashlib.sha256(block.encode()).hexdigest()[:12]}.svg"


def drawn(text: str) -> str:
    """The text of a page with pictures in the place of its diagrams."""
    return BLOCK.sub(lambda block: f"![Diagram](/{picture_of(block[1]).relative_to(ROOT)})", text)


def _all_blocks() -> Iterator[str]:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        yield from blocks(path.read_text(encoding="utf-8"))


def _sized(svg: str) -> str:
    """The picture with its size in pixels, on white also where the page is dark."""
    width, height = SIZE.findall(svg)[0]
    sized = svg.replace('width="100%"', f'width="{float(width):.0f}" height="{float(height):.0f}"', 1)
    return sized.replace('style="', 'style="background: white; ', 1).replace("<br>", "<br/>") + "\n"


def main(bundle: Path) -> None:
    """Draw the diagrams that have no picture, and remove pictures of none."""
    wanted = {picture_of(block): block for block in _all_blocks()}
    DIAGRAMS.mkdir(exist_ok=True)
    for path in set(DIAGRAMS.glob("*.svg")) - wanted.keys():
        path.unlink()
    with opened_page() as page:
        page.add_script_tag(path=bundle)
        for path, block in wanted.items():
            if not path.exists():
                path.write_text(_sized(page.evaluate(DRAW, block)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
