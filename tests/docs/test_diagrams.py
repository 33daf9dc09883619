"""Diagrams are drawn from the text that the pages have now, and load nothing."""

import re
from pathlib import Path

from docs.site.diagrams import DIAGRAMS, blocks, drawn, picture_of

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_diagram_is_drawn_and_every_drawing_is_of_one() -> None:
    wanted = {picture_of(block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))}
    assert len(wanted) >= 6
    assert wanted == set(DIAGRAMS.iterdir()), "draw them again: docs/site/diagrams.py says how"


def test_a_drawing_runs_and_loads_nothing() -> None:
    for path in DIAGRAMS.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "<script" not in text
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}


def test_a_page_shows_the_drawing_in_the_place_of_the_text() -> None:
    page = "before\n\n```mermaid\nflowchart LR\n  a --> b\n```\n\nafter\n"
    (block,) = blocks(page)
    assert drawn(page) == f"before\n\n![Diagram](/docs/diagrams/{picture_of(block).name})\n\nafter\n"
