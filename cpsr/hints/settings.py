"""Settings of the process, which no checkpoint has: a call that changes one is refused, whoever has changed it."""

import decimal
import locale
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from cpsr.errors import NotResumableError

__all__ = ["require_unchanged", "settings_of_blocks", "settings_of_process"]

_HALF = 0.5


def _decimals() -> Any:
    context = decimal.getcontext()  # without its flags, which computations set
    limits = context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp
    return *limits, [one.__name__ for one, traps in context.traps.items() if traps]


def _directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


# What sets each, and how it is read.
_OF_PROCESS: dict[str, Callable[[], Any]] = {
    "torch.set_default_dtype": torch.get_default_dtype,
    "torch.set_default_device": torch.get_default_device,
    "torch.set_num_threads": torch.get_num_threads,
    "torch.use_deterministic_algorithms": torch.get_deterministic_debug_mode,
    "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.set_flush_denormal": lambda: sys.float_info.min * _HALF == 0,
    "torch.set_printoptions": lambda: repr(torch._tensor_str.PRINT_OPTS),
    "numpy.setbufsize": numpy.getbufsize,
    "numpy.set_printoptions": lambda: repr(numpy.get_printoptions()),
    "decimal.setcontext": _decimals,
    "os.chdir": _directory,
    "locale.setlocale": lambda: locale.setlocale(locale.LC_ALL),
    "sys.setrecursionlimit": sys.getrecursionlimit,
    "warnings.simplefilter": lambda: [repr(one) for one in warnings.filters if one[0] == "error"],
}
_OF_BLOCKS: dict[str, Callable[[], Any]] = {
    "torch.set_grad_enabled": torch.is_grad_enabled,
    "torch.inference_mode": torch.is_inference_mode_enabled,
    "torch.autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "numpy.seterr": numpy.geterr,
    "numpy.seterrcall": numpy.geterrcall,
}


def settings_of_process() -> dict[str, Any]:
    """Settings that are the same everywhere in a function, by what sets them."""
    return {name: read() for name, read in _OF_PROCESS.items()}


def settings_of_blocks() -> dict[str, Any]:
    """Settings that a `with` around a hint may change, by what sets them."""
    return {name: read() for name, read in _OF_BLOCKS.items()}


def require_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse settings that the call has changed: a later one would begin without the change.

    Raises:
        NotResumableError: names what sets them.
    """
    for name, value in now.items():
        if before[name] != value:
            raise NotResumableError(
                f"the call has changed what {name} sets, from {before[name]} to {value}, and no checkpoint has that: "
                "set it before the call"
            )
