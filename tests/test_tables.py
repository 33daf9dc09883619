"""Every table that a user sees fits a terminal of 80 columns, and leaves nothing out."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from cpsr.tables import print_table

WIDTH = 80
REASON = (
    "line over 8 checkpoints (300 iterations), gain 2.00, 12345 iterations ahead; expected end cost -38 +- 12; "
    "[rank 1] the loss of 4 probe batches is 1.2345 nats, 0.0123 below the checkpoint's; rank 1's state was lost with "
    "/mnt/storage/experiments/llama-7b/run-2026-11-23/checkpoints/step-0001234567/rank-00001.params.safetensors"
)


def printed(*tables: Table, width: int = WIDTH) -> str:
    written = io.StringIO()
    print_table(Console(width=width, file=written), *tables)
    return written.getvalue()


def require_fit(text: str, *words: str, width: int = WIDTH) -> None:
    """No line is longer, nothing is elided, and the words are there, each in one piece."""
    assert max(cell_len(line) for line in text.splitlines()) <= width, text
    assert "…" not in text
    for word in words:
        assert word in text, text


cells = st.text(st.sampled_from("abc 0159.%±漢"), min_size=1, max_size=30).map(lambda text: text.strip() or "-")


@given(st.integers(1, 14).flatmap(lambda count: st.lists(st.lists(cells, min_size=count, max_size=count), min_size=1)))
def test_whatever_is_in_it(rows: list[list[str]]) -> None:
    given_table = Table(*rows[0], title="A title of many words, which is longer than the table may well be")
    for row in rows[1:]:
        given_table.add_row(*row)
    require_fit(printed(given_table))


def test_a_table_that_is_too_wide_is_a_list_for_each_row() -> None:
    headings = ["method", *(f"heading-{index:04}" for index in range(9))]
    wide = Table(*headings, title="Wide", caption="at the end")
    wide.add_row("vitp", *("123456.789" for _ in range(9)))
    text = printed(wide)
    require_fit(text, "Wide", "at the end", "vitp", *headings)
    assert text.count("123456.789") == text.count("heading-") == 9
    require_fit(printed(wide, width=200), *headings, width=200)


@pytest.mark.parametrize("width", [40, 80])
def test_long_words_break_only_where_they_may(width: int) -> None:
    table_ = Table("rank", "reason")
    table_.add_column("number", no_wrap=True)
    table_.columns[1].overflow = "fold"
    table_.add_row("7", REASON, "1,234,567,890")
    require_fit(printed(table_, width=width), "1,234,567,890", "number", width=width)
