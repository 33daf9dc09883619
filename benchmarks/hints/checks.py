"""What every checkpoint looks at to notice changes that it would lose: how long that takes."""

import timeit
from collections.abc import Callable
from types import FunctionType
from typing import Any

from rich.table import Table
from torch import nn

from cpsr.hints.attributes import Attributes
from cpsr.hints.settings import settings_of_process
from cpsr.hints.used import Used

__all__ = ["checks_table", "seconds_of_checks"]

HELPERS, WIDE, NARROW = 200, (10, 1000), (100, 316)  # functions; layers and widths of two modules of 10M parameters
_REPEATS = 20


def seconds_of_checks() -> dict[str, float]:
    """Of each check the median time, in seconds."""
    wide, narrow = (nn.Sequential(*(_layer(width) for _ in range(layers))) for layers, width in (WIDE, NARROW))
    checks: dict[str, Callable[[], Any]] = {
        f"globals, {HELPERS} helpers with a list each": Used(_helpers()).require_unchanged,
        f"module of 10M parameters, {WIDE[0]} layers": Attributes(wide).require_same,
        f"module of 10M parameters, {NARROW[0]} layers": Attributes(narrow).require_same,
        "settings of the process": settings_of_process,
    }
    return {
        name: sorted(timeit.repeat(check, number=1, repeat=_REPEATS))[_REPEATS // 2] for name, check in checks.items()
    }


def checks_table(seconds: dict[str, float]) -> Table:
    """The same for people."""
    table = Table("what each checkpoint looks at", "ms", title="Checks", title_justify="left")
    for name, one in seconds.items():
        table.add_row(name, f"{1e3 * one:.3f}")
    return table


def _layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout())


def _helpers() -> FunctionType:
    """A function that uses a list and calls another one, which does the same, and so on."""
    scope: dict[str, Any] = {f"TABLE_{one}": [one] for one in range(HELPERS)} | {f"helper_{HELPERS}": _last}
    for one in range(HELPERS):
        code = _template.__code__.replace(co_names=(f"helper_{one + 1}", f"TABLE_{one}"))
        scope[f"helper_{one}"] = FunctionType(code, scope, f"helper_{one}")
    found: FunctionType = scope["helper_0"]
    return found


_TABLE = [0]


def _template(x: int) -> int:
    return _last(x) + _TABLE[0]


def _last(x: int) -> int:
    return x
