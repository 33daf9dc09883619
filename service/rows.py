"""From the journal's rows to answers."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cpsr.errors import JournalError
from cpsr.journal import JournalReader, json_ready
from cpsr.service.parameters import Window

__all__ = ["answered", "newest", "open_journal", "plain_row"]

Answer = TypeVar("Answer", bound=BaseModel)
Row = TypeVar("Row")


@contextmanager
def open_journal(run_dir: Path) -> Iterator[JournalReader]:
    """The journal of a run, for reading alone.

    Raises:
        JournalError: it cannot be read, or holds what this version does not know.
    """
    try:
        with JournalReader(run_dir / "journal.db") as reader:
            yield reader
    except ValidationError as error:
        raise JournalError(f"the journal in {run_dir} holds values that this version does not know: {error}") from error


def newest(
    run_dir: Path, row_type: type[Row], build: Callable[[Row], Answer], window: Window, kind: str | None = None
) -> tuple[list[Answer], int]:
    """The newest rows of one table in a window, and how many there are in its time.

    Args:
        run_dir: of the run.
        row_type: the table.
        build: makes the answer of a row.
        window: what is asked for.
        kind: only rows of one kind, where the table has any.

    Raises:
        JournalError: as `open_journal`.
    """
    since, until = window.since_unix_seconds, window.until_unix_seconds
    with open_journal(run_dir) as reader:
        rows = [build(row) for row in reader.newest(row_type, window.limit, since, until, kind)]
        return rows, reader.count(row_type, since, until, kind)


def answered(model: type[Answer], row: Any, **more: Any) -> Answer:
    """A row as the model of an answer, which may leave columns out and add further fields.

    Raises:
        ValidationError: a value is none that the model knows.
    """
    return model.model_validate(plain_row(row) | more, extra="ignore")


def plain_row(row: Any) -> dict[str, Any]:
    """A row as data that JSON takes: a number that is not finite is null, and inside of JSON columns its name."""
    plain = {}
    for name, value in dataclasses.asdict(row).items():
        unknown = isinstance(value, float) and not math.isfinite(value)
        plain[name] = None if unknown else json_ready(value)
    return plain
