"""Every table that a user sees fits a terminal of 80 columns, and leaves nothing out."""

import io

from rich.console import Console
from rich.table import Table

from cpsr.tables import print_table

WIDTH = 80
PATH = "/mnt/storage/experiments/llama-7b/run-2026-11-23/checkpoints/slabs/rank-00001.params-0001234567-0.0.safetensors"


def test_a_table_fits_and_has_every_character() -> None:
    table, written = Table("rank", *(f"heading-{index:04}" for index in range(4)), "reason"), io.StringIO()
    table.add_column("number", no_wrap=True)
    table.add_row("7", *("123456.789" for _ in range(4)), PATH, "1,234,567,890")
    print_table(Console(width=WIDTH, file=written), table)
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in written.getvalue()
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    columns = ["".join(cell.strip() for cell in column) for column in zip(*rows, strict=True)]
    assert columns == ["7", *("123456.789" for _ in range(4)), PATH, "1,234,567,890"]
