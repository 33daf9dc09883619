"""Statements of the journal keep to what later versions of Python demand of them."""

import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

QUOTED = re.compile(r"'[^']*'")
NAMED = re.compile(r"\?\d|[:@$]\w")


class StrictConnection(sqlite3.Connection):
    """Refuses a sequence for placeholders with a name, as Python 3.14 does, or a number, of which 3.12.1 warns."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        _check(sql, parameters)
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        rows = list(parameters)
        for row in rows:
            _check(sql, row)
        return super().executemany(sql, rows)


def _check(sql: str, parameters: Any) -> None:
    if NAMED.search(QUOTED.sub("''", sql)) and not isinstance(parameters, Mapping):
        raise sqlite3.ProgrammingError(f"named placeholders and a sequence: {sql}")


@pytest.fixture(autouse=True)
def _strict_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, factory=StrictConnection, **named))
