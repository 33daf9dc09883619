"""The menu of the site: every page is in it once, also one that the index does not name."""

from pathlib import Path

from docutils import nodes

from docs.site.pages import menu, titled

DOCS = Path(__file__).parents[2] / "docs"
INDEX = """# Title

Of [no section](none.md).

## First

- [One](one.md) and [two](two.md#anchor), [one](one.md) again, [elsewhere](https://example.org/page.md)

## Second

- [Above](../ABOVE.md)
"""


def sections(index: str) -> dict[str, list[str]]:
    """Pages by the caption of their hidden menu."""
    blocks = [block.partition("```")[0].splitlines() for block in index.split("```{toctree}\n")[1:]]
    assert all(block[0] == ":hidden:" for block in blocks)
    return {block[1].removeprefix(":caption: "): block[3:] for block in blocks}


def test_each_section_is_a_menu_of_the_pages_that_it_links_to() -> None:
    found = sections(menu(INDEX, ["one", "two", "three"]))
    assert found == {"First": ["one"], "Second": ["../ABOVE"], "More": ["three", "two"]}


def test_every_page_is_in_the_menu_once() -> None:
    pages = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")
    found = sections(menu((DOCS / "index.md").read_text(encoding="utf-8"), pages))
    listed = [page for names in found.values() for page in names if not page.startswith("../")]
    assert sorted(listed) == pages


def test_a_link_whose_text_is_a_file_shows_the_title_of_the_page() -> None:
    document = nodes.document(None, None)
    for text, target in [
        ("launching.md", "launching.html#torchrun"),
        ("README", "../README.html"),
        ("no.md", "no.html"),
    ]:
        document += nodes.reference("", text, refuri=target)
    titles = {"docs/launching": nodes.title("", "Launching a job"), "README": nodes.title("", "CPSR")}
    titled(document, "docs/start", titles)
    assert [link.astext() for link in document.findall(nodes.reference)] == ["Launching a job", "README", "no.md"]
